"""The report: what it shows, that it is one file, and that nothing from a transcript becomes part of the page."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr.errors import AsrError
from asr.reports.evaluation import Clip, Evaluation, HeardWord, Utterance
from asr.reports.page import PageOptions, make_page
from asr.reports.word_graph import START, Follows, GraphWord, WordGraph

EVIL = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
RATE = 16000


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def words(text: str, confidence: float | None = None) -> tuple[HeardWord, ...]:
    return tuple(HeardWord(word, 0.2 * place, 0.2 * place + 0.2, confidence) for place, word in enumerate(text.split()))


def evaluation(name: str = "one", **changes: object) -> Evaluation:
    utterances = (
        Utterance("a", ("one", "two", "three"), words("one too three"), 1.0, {"search": 0.1}),
        Utterance("b", ("four",), words("four five"), 0.5, {"search": 0.05}),
    )
    summary = {
        "wer": 0.5,
        "wer_interval": [0.25, 0.75],
        "substitutions": 1,
        "insertions": 1,
        "deletions": 0,
        "cer": 0.3,
        "wrong_utterances": 2,
        "real_time_factor": 0.1,
        "seconds": {"features": 0.05, "search": 0.1},
    }
    return replace(Evaluation(name, utterances, summary), **changes)  # type: ignore[arg-type]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two seconds: half of it a low tone, half a high one."""
    time = np.arange(RATE) / RATE
    path = tmp_path / "tones.wav"
    soundfile.write(path, 0.3 * np.concatenate([np.sin(2 * np.pi * hz * time) for hz in (300, 2000)]), RATE)
    return path


def test_figures_alignments_and_confusions_are_shown() -> None:
    page = Elements(make_page([evaluation()], PageOptions(title="Mine")).html)
    text = " ".join(" ".join(page.text).split())
    for shown in ("Mine", "50.00%", "25.00% to 75.00%", "0.1000", "two → too", "1 of 3", "1 of 1"):
        assert shown in text
    rows = {str(row["data-n"]): row for row in page.of("details") if "data-n" in row}
    assert [(rows[n]["data-e"], rows[n]["data-r"]) for n in "01"] == [("1", "0.333"), ("1", "1.000")]
    assert len(page.of("del")) == 1 + 2 and len(page.of("ins")) == 2 + 2  # two of each in the legend


def test_nothing_from_outside_is_loaded_and_nothing_but_its_script_runs() -> None:
    page = Elements(make_page([evaluation()], PageOptions()).html)
    policy = next(each["content"] for each in page.of("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert len(page.of("script")) == 1 and not page.of("link") and not page.of("img")
    for _, attributes in page.found:
        assert not {name for name in attributes if name.startswith("on") or name == "style"}
        assert all((attributes.get(name) or "#").startswith(("#", "data:")) for name in ("src", "href"))


@pytest.mark.slow
def test_text_of_transcripts_names_and_options_is_escaped(recording: Path) -> None:
    graph = WordGraph((GraphWord(EVIL, 0.1, 0.4, 0.5),), (Follows(START, 0, 0.5),))
    heard = (HeardWord(EVIL, 0.1, 0.4, 0.3), HeardWord("b", 0.4, 0.5, 0.3))
    one = Utterance(EVIL, (EVIL, "c"), heard, 1.0, {EVIL: 0.1}, Clip(str(recording)), EVIL)
    system = {"mode": EVIL, "options": {EVIL: EVIL}}
    cache = tuple({"audio_seconds": t, "num_queries": 9.0 * t, "num_edge_hits": t} for t in (1.0, 2.0))
    changes = {"utterances": (one,), "system": system, "cache": cache, "lattices": {EVIL: graph}}
    summary = {**evaluation().summary, "seconds": {EVIL: 1.0}}
    plain = make_page(
        [evaluation(utterances=(replace(one, id="a", error="", words=words("d e", 0.5)),))], PageOptions()
    )
    pages = [
        make_page(
            [
                evaluation(EVIL, summary=summary, **changes),
                evaluation(f"{EVIL} 2", **{**changes, "system": {"mode": f"{EVIL} 2", "options": {EVIL: 2}}}),
            ],
            PageOptions(EVIL),
        ),
        make_page([evaluation(EVIL, summary=summary, **changes)], PageOptions(EVIL)),
    ]
    for page in pages:
        found = Elements(page.html)
        assert len(found.of("script")) == 1 and not found.of("img")
        assert not any("onerror" in attributes for _, attributes in found.found)
        assert {tag for tag, _ in found.found} >= {tag for tag, _ in Elements(plain.html).found} - {"ul", "li"}
        text = "".join(found.text)
        assert text.count(EVIL) >= 6
        assert "<img" not in page.html.replace(EVIL, "")


@pytest.mark.slow
def test_audio_is_embedded_for_the_worst_within_the_bound_and_linked_for_the_others(
    tmp_path: Path, recording: Path
) -> None:
    spoken = [
        Utterance(f"u/{n}", ("x",) * n, words("y " * n), 1.0, audio=Clip(str(recording), n % 2, n % 2 + 1.0))
        for n in range(5)
    ]
    one = evaluation(utterances=tuple(spoken))
    folder = tmp_path / "page.audio"
    clips = make_page([one], PageOptions(num_embedded=2, clip_folder=folder)).clips
    assert list(clips.embedded) == ["u/4", "u/3"]
    assert clips.linked == {f"u/{n}": f"page.audio/u_{n}.mp3" for n in (2, 1, 0)}
    assert sorted(path.name for path in folder.iterdir()) == ["u_0.mp3", "u_1.mp3", "u_2.mp3"]
    # The right second of the recording: u/4 has the low tone, u/3 the high one.
    pitches = []
    for name in ("u/4", "u/3"):
        samples, rate = soundfile.read(io.BytesIO(clips.embedded[name][1]))
        pitches.append(np.abs(np.fft.rfft(samples)).argmax() * rate / len(samples))
    assert pitches == pytest.approx([300, 2000], rel=0.02)
    size = clips.num_bytes // 2
    bounded = make_page([one], PageOptions(num_embedded=5, max_bytes=int(3.5 * size)))
    assert len(bounded.clips.embedded) == 3 and bounded.clips.num_bytes <= 3.5 * size
    players = Elements(bounded.html).of("audio")
    assert len(players) == 3 and not bounded.clips.linked
    content = base64.b64decode(str(players[0]["src"]).partition(",")[2])
    assert content == bounded.clips.embedded["u/4"][1]


def test_a_recording_that_is_gone_leaves_the_page_without_it(tmp_path: Path) -> None:
    gone = replace(evaluation().utterances[0], audio=Clip(str(tmp_path / "gone.wav")))
    page = make_page([evaluation(utterances=(gone,))], PageOptions())
    assert "gone.wav" in page.clips.problem and not Elements(page.html).of("audio")


def test_systems_of_one_mode_are_a_curve() -> None:
    swept = [
        evaluation(f"b{beam}", system={"mode": mode, "options": {"search_beam": beam}},
                   summary={**evaluation().summary, "wer": 1 / beam, "real_time_factor": beam / 100})
        for mode, beam in (("rnn", 8), ("rnn", 4), ("rnn", 12), ("ngram", 4))
    ]  # fmt: skip
    html = make_page(swept, PageOptions(num_compared=2)).html
    lines = re.findall(r'<polyline class="line (c\d)" points="([^"]*)"', html)
    assert [color for color, _ in lines] == ["c0"]  # a single point is not a line
    places = [tuple(map(float, point.split(","))) for point in lines[0][1].split()]
    assert len(places) == 3 and places == sorted(places)  # from fast to slow ...
    assert [y for _, y in places] == sorted(y for _, y in places)  # ... and downwards to fewer errors
    text = " ".join(Elements(html).text)
    assert "Options that differ" in text and "search_beam" in text
    assert "b12: 1 of 3" not in text and "b4: 1 of 3" in text  # transcripts of the first two only


def test_confidences_that_are_right_half_of_the_time() -> None:
    sure = evaluation(
        utterances=(
            Utterance("a", ("one", "two"), (HeardWord("one", 0, 1, 0.95), HeardWord("too", 1, 2, 0.95)), 2.0),
            Utterance("b", ("x", "y"), (HeardWord("x", 0, 1, 0.15), HeardWord("z", 1, 2, 0.15)), 2.0),
        )
    )
    text = " ".join(Elements(make_page([sure], PageOptions()).html).text)
    assert "2 words, mean confidence 95.0%, 50.0% right" in text and "2 words, mean confidence 15.0%" in text
    assert "0.400" in text  # |0.95 - 0.5| and |0.15 - 0.5|, half each


def test_a_spectrogram_has_the_words_at_their_times(recording: Path) -> None:
    graph = WordGraph(
        (GraphWord("LOW", 0.0, 1.0, 0.9), GraphWord("LAW", 0.0, 1.0, 0.1), GraphWord("HIGH", 1.0, 2.0, 1.0)),
        (Follows(0, 2, 0.9), Follows(1, 2, 0.1)),
    )
    heard = (HeardWord("LOW", 0.0, 1.0), HeardWord("HEY", 1.0, 2.0))
    one = Utterance("a", ("LOW", "HIGH"), heard, 2.0, audio=Clip(str(recording)))
    html = make_page([evaluation(utterances=(one,), lattices={"a": graph})], PageOptions()).html
    image = base64.b64decode(re.findall(r'<image href="data:image/png;base64,([^"]*)"', html)[0])
    assert image.startswith(b"\x89PNG") and image[16:24] == (200).to_bytes(4, "big") + (80).to_bytes(4, "big")
    boxes = re.findall(r'<g class="(good|bad)"><rect x="([\d.]+)"[^>]*/><text[^>]*>(\w+)<', html)
    assert [(kind, word) for kind, _, word in boxes] == [("good", "LOW"), ("bad", "HEY")]
    assert float(boxes[1][1]) - float(boxes[0][1]) == pytest.approx(150)
    assert html.count('class="link"') == 2


def test_audio_too_short_for_a_frame_has_no_spectrogram(recording: Path) -> None:
    one = Utterance("a", ("LOW",), (HeardWord("LOW", 0.0, 0.2),), 0.2, audio=Clip(str(recording), 1.997, 2.2))
    html = make_page([evaluation(utterances=(one,))], PageOptions()).html
    assert "<image" not in html and '<g class="good">' in html


@pytest.mark.slow
def test_a_thousand_utterances_stay_small() -> None:
    many = [Utterance(f"u{n}", ("word",) * 20, words("word " * 19), 5.0, {"search": 0.1}) for n in range(1000)]
    html = make_page([evaluation(utterances=tuple(many))], PageOptions()).html
    assert html.count('<details class="u"') == 1000
    assert len(html) < 1_500_000


def test_systems_of_other_test_sets_are_refused() -> None:
    other = evaluation("two", utterances=evaluation().utterances[:1])
    with pytest.raises(AsrError, match=r"two: 1 utterances are not those of one .*first 'b'"):
        make_page([evaluation(), other], PageOptions())
