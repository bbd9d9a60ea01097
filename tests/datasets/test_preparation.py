"""Corpora to manifests: one bad file costs one utterance, an interruption costs one part."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from lhotse import CutSet

from asr.audio.io import inspect_audio
from asr.cli.main import main
from asr.datasets.corpora.base import Corpus, CorpusPart, Utterance
from asr.datasets.corpora.librispeech import LibriSpeech
from asr.datasets.prepare import PartReport, prepare_part
from asr.errors import AsrError
from tests.datasets.toy_corpora import write_audio, write_librispeech


def test_cuts_say_what_the_files_hold(tmp_path: Path) -> None:
    write_librispeech(tmp_path / "corpus", num=2)
    stereo = write_audio(tmp_path / "corpus" / "dev-clean-2" / "19" / "198" / "19-198-0000.flac", 0.5, 44100, 2)
    report = prepare_part(LibriSpeech(), tmp_path / "corpus", "dev-clean-2", tmp_path / "out")
    cuts = CutSet.from_file(report.cuts).to_eager()
    assert (report.num_utterances, report.num_speakers, report.skipped) == (4, 2, [])
    assert report.hours == round(sum(cut.duration for cut in cuts) / 3600, 4)
    first = cuts["19-198-0000"]
    assert (first.sampling_rate, first.num_samples, first.duration) == (44100, 22050, 0.5)
    assert first.recording.sources[0].source == str(stereo)
    assert (first.supervisions[0].text, first.supervisions[0].speaker) == ("A BAY", "19")
    assert first.load_audio().shape == (2, 22050)
    assert Path(report.text).read_text(encoding="utf-8") == "A BAY\n" * 4
    assert PartReport.from_file(tmp_path / "out" / "librispeech_dev-clean-2.report.json") == report


class _Thousand:
    """A corpus of a thousand names for a good file, one of them a bad one."""

    name = "thousand"

    def __init__(self, good: Path, bad: Path) -> None:
        self.files = [bad if index == 500 else good for index in range(1000)]

    def parts_in(self, corpus_dir: Path) -> list[str]:
        return ["all"]

    def list_part(self, corpus_dir: Path, part: str) -> CorpusPart:
        return CorpusPart([Utterance(f"u{i:04d}", path, "GO", "s") for i, path in enumerate(self.files)], [])

    def lexicon(self, corpus_dir: Path) -> Path | None:
        return None

    def download(self, corpus_dir: Path, parts: object) -> None:
        raise NotImplementedError


@pytest.mark.slow
def test_one_bad_file_among_a_thousand_costs_one_result(tmp_path: Path) -> None:
    good = write_audio(tmp_path / "good.wav", 0.05)
    bad = tmp_path / "bad.wav"
    bad.write_bytes(good.read_bytes()[:-200])
    corpus: Corpus = _Thousand(good, bad)
    calls: list[tuple[int, int]] = []
    report = prepare_part(
        corpus,
        tmp_path,
        "all",
        tmp_path / "out",
        num_jobs=2,
        on_progress=lambda done, total: calls.append((done, total)),
    )
    assert report.num_utterances == len(CutSet.from_file(report.cuts)) == 999
    assert [each.item for each in report.skipped] == ["u0500"]
    assert str(bad) in report.skipped[0].reason and "cut short" in report.skipped[0].reason
    assert calls == [(1, 2), (2, 2)]


@pytest.mark.slow
def test_a_file_of_many_utterances_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = write_audio(tmp_path / "good.wav", 0.05)
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"nothing like audio")
    corpus = _Thousand(good, bad)
    corpus.files[::2] = [bad] * 500
    decoded: list[Path] = []

    def counting(path: Path) -> tuple[int, int, int]:
        decoded.append(path)
        time.sleep(0.02)  # the other threads come to this file as well
        return inspect_audio(path)

    monkeypatch.setattr("asr.datasets.prepare.inspect_audio", counting)
    report = prepare_part(corpus, tmp_path, "all", tmp_path / "out", num_jobs=4)
    assert sorted(decoded) == [bad, good]
    assert (report.num_utterances, len(report.skipped)) == (500, 500)


def test_a_finished_part_is_not_done_again_unless_it_changed(tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    folder = write_librispeech(corpus, num=1)
    first = prepare_part(LibriSpeech(), corpus, "dev-clean-2", out)
    stamp = Path(first.cuts).stat().st_mtime_ns
    assert prepare_part(LibriSpeech(), corpus, "dev-clean-2", out) == first
    assert Path(first.cuts).stat().st_mtime_ns == stamp
    assert prepare_part(LibriSpeech(), corpus, "dev-clean-2", out, redo=True) == first
    assert Path(first.cuts).stat().st_mtime_ns != stamp
    transcript = next(folder.rglob("*.trans.txt"))
    transcript.write_text(transcript.read_text(encoding="utf-8").replace("BAY", "BEE"), encoding="utf-8")
    prepare_part(LibriSpeech(), corpus, "dev-clean-2", out)
    assert "A BEE" in Path(first.text).read_text(encoding="utf-8")
    write_audio(next(folder.rglob("*.flac")), 0.9)
    assert prepare_part(LibriSpeech(), corpus, "dev-clean-2", out).hours > first.hours
    write_librispeech(corpus, num=2)
    assert prepare_part(LibriSpeech(), corpus, "dev-clean-2", out).num_utterances == 4


def test_a_part_of_another_folder_is_replaced_only_on_request(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name, num in (("one", 1), ("another", 3)):
        write_librispeech(tmp_path / name, num=num)
    first = prepare_part(LibriSpeech(), tmp_path / "one", "dev-clean-2", out)
    with pytest.raises(AsrError, match=r"is of \S+one; choose another --output, or replace it with --redo"):
        prepare_part(LibriSpeech(), tmp_path / "another", "dev-clean-2", out)
    assert prepare_part(LibriSpeech(), tmp_path / "one", "dev-clean-2", out) == first
    assert prepare_part(LibriSpeech(), tmp_path / "another", "dev-clean-2", out, redo=True).num_utterances == 6


def test_an_interrupted_part_leaves_no_half_and_is_done_again(tmp_path: Path) -> None:
    write_librispeech(tmp_path / "corpus", num=2)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_part(LibriSpeech(), tmp_path / "corpus", "dev-clean-2", tmp_path / "out", on_progress=interrupt)
    assert not list((tmp_path / "out").iterdir())
    report = prepare_part(LibriSpeech(), tmp_path / "corpus", "dev-clean-2", tmp_path / "out")
    Path(f"{tmp_path}/out/librispeech_dev-clean-2.report.json").write_text("{", encoding="utf-8")
    assert prepare_part(LibriSpeech(), tmp_path / "corpus", "dev-clean-2", tmp_path / "out") == report
    assert sorted(path.name.partition(".")[2] for path in (tmp_path / "out").iterdir()) == [
        "jsonl.gz",
        "report.json",
        "txt",
    ]


def test_nothing_usable_and_nowhere_to_write(tmp_path: Path) -> None:
    part = write_librispeech(tmp_path / "corpus", num=1)
    (tmp_path / "file").touch()
    seen: list[int] = []
    with pytest.raises(AsrError, match="output cannot be written"):
        prepare_part(
            LibriSpeech(),
            tmp_path / "corpus",
            "dev-clean-2",
            tmp_path / "file",
            on_progress=lambda done, _: seen.append(done),
        )
    assert seen == []  # told before any file is decoded
    for path in part.rglob("*.flac"):
        path.write_bytes(b"nothing like audio")
    with pytest.raises(AsrError, match=r"none of the 2 audio files of dev-clean-2 is usable: .*cannot be decoded"):
        prepare_part(LibriSpeech(), tmp_path / "corpus", "dev-clean-2", tmp_path / "out")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_librispeech(tmp_path / "corpus", num=2).parent
    arguments = ["prepare", "mini-librispeech", "--corpus", str(corpus), "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)  # one line: progress is elsewhere
    assert (report["part"], report["num_utterances"], report["skipped"]) == ("dev-clean-2", 4, [])
    (corpus / "dev-clean-2" / "19" / "198" / "19-198-0001.flac").write_bytes(b"")
    assert main([*arguments, "--redo", "--parts", "dev-clean-2"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["skipped"][0]["item"] == "19-198-0001"
    assert "1 skipped" in captured.err and "0 bytes" in captured.err
    assert main(["prepare", "an4", "--corpus", str(tmp_path / "absent"), "--output", str(tmp_path / "out")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_the_report_is_json_in_any_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_librispeech(tmp_path / "corpus", num=1).parent
    arguments = ["prepare", "mini-librispeech", "--corpus", str(corpus), "--output", str(tmp_path / "Körpus")]
    for encoding in ("ascii", "utf-8"):
        written = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
        assert main(arguments) == 0
        assert json.loads(written.getvalue())["cuts"].endswith("Körpus/librispeech_dev-clean-2.jsonl.gz")
        assert ("ö".encode() in written.getvalue()) == (encoding == "utf-8")


def test_a_corpus_lexicon_comes_along(tmp_path: Path) -> None:
    root = tmp_path / "an4"
    write_audio(root / "wav" / "train" / "fash" / "an251-fash-b.flac")
    (root / "train.text").write_text("fash/an251-fash-b YES\n", encoding="utf-8")
    (root / "an4.dic").write_text("YES Y EH S\n", encoding="utf-8")
    assert main(["prepare", "an4", "--corpus", str(root), "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "an4.dic").read_text(encoding="utf-8") == "YES Y EH S\n"
