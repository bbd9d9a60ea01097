"""Corpora that others have listed: what is in the list is in the cuts, at the right times."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lhotse")
from lhotse import CutSet, MonoCut, MultiCut, Recording, SupervisionSegment

from asr.cli.main import main
from asr.datasets.corpora.lists import Table
from asr.datasets.cuts import read_cuts
from asr.errors import AsrError
from tests.datasets.toy_corpora import write_audio


@pytest.fixture
def audio(tmp_path: Path) -> Path:
    write_audio(tmp_path / "audio" / "a.wav", 0.5)
    write_audio(tmp_path / "audio" / "b.wav", 1.0)
    return tmp_path / "audio"


def prepared(capsys: pytest.CaptureFixture[str], kind: str, corpus: Path, code: int = 0) -> dict[str, MonoCut]:
    output = corpus.parent / "prepared"
    assert main(["prepare", kind, "--corpus", str(corpus), "--output", str(output), "--redo"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["num_utterances"] == len(Path(report["text"]).read_text().splitlines())
    return {cut.id: cut for cut in CutSet.from_file(report["cuts"])}


def test_a_data_folder_of_kaldi(audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "wav.scp").write_text(f"ra {audio / 'a.wav'}\nrb cat {audio / 'b.wav'} |\n")
    (folder / "text").write_text("ra one  word\nrb two words\n")
    cuts = prepared(capsys, "kaldi", folder)
    assert {name: cut.supervisions[0].text for name, cut in cuts.items()} == {"ra": "one word", "rb": "two words"}
    (folder / "segments").write_text("u1 rb 0.25 0.75\nu2 rb 0.5 9\nu3 ra 2 3\nu4 ra 0 0.1\n")
    (folder / "text").write_text("u1 one\nu2 two\nu3 three\nu9 nine\n")
    (folder / "utt2spk").write_text("u1 s1\nu2 s2\nu3 s2\n")
    cuts = prepared(capsys, "kaldi", folder, 1)
    assert {name: (cut.start, cut.duration) for name, cut in cuts.items()} == {"u1": (0.25, 0.5), "u2": (0.5, 0.5)}
    assert [cut.supervisions[0].speaker for cut in cuts.values()] == ["s1", "s2"]
    samples = cuts["u1"].load_audio()
    assert (samples == cuts["u1"].recording.load_audio()[:, 4000:12000]).all()
    report = json.loads((tmp_path / "prepared" / "kaldi_train.report.json").read_text())
    assert {one["item"] for one in report["skipped"]} == {"u3", "u4", "u9"}


@pytest.mark.parametrize(
    ("speakers", "message"),
    [
        ("ra s1\n", "'rb' has no speaker; add its line"),
        ("ra s1\nrb\n", "'rb' has no speaker; add its line"),
        ("ra s1\nrb s1\nrc s2\nrd s2\n", "'rc' has neither audio nor a transcript in this folder; correct its name"),
    ],
)
def test_speakers_of_other_utterances_are_refused(
    audio: Path, tmp_path: Path, speakers: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wav.scp").write_text(f"ra {audio / 'a.wav'}\nrb {audio / 'b.wav'}\n")
    (tmp_path / "text").write_text("ra one\nrb two\n")
    (tmp_path / "utt2spk").write_text(speakers)
    assert main(["prepare", "kaldi", "--corpus", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert f"asr: error: {tmp_path / 'utt2spk'}: the utterance {message}" in capsys.readouterr().err


@pytest.mark.parametrize("segment", ["0.25 0.75 1", "-1 0.75", "0.75 0.25"])
def test_a_segment_that_is_not_two_times_is_refused(
    audio: Path, tmp_path: Path, segment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wav.scp").write_text(f"rb {audio / 'b.wav'}\n")
    (tmp_path / "text").write_text("u1 one\n")
    (tmp_path / "segments").write_text(f"u1 rb {segment}\n")
    assert main(["prepare", "kaldi", "--corpus", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "u1: expected 'utterance recording begin end' in seconds, without a channel" in capsys.readouterr().err


@pytest.mark.parametrize("delimiter", [",", "\t", "|"])
def test_a_table(audio: Path, tmp_path: Path, delimiter: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "clips").symlink_to(audio)
    rows = [("client_id", "Path", "sentence"), ("s1", "a.wav", "one"), ("s2", "b.wav", "two  words"), ("s3", "", "x")]
    (tmp_path / "test.tsv").write_text("".join(delimiter.join(row) + "\n" for row in rows))
    cuts = prepared(capsys, "csv", tmp_path / "test.tsv", 1)
    found = {name: (cut.supervisions[0].text, cut.supervisions[0].speaker) for name, cut in cuts.items()}
    assert found == {"a": ("one", "s1"), "b": ("two words", "s2")}
    assert cuts["a"].recording.sources[0].source == str(tmp_path / "clips" / "a.wav")


@pytest.mark.parametrize("kind", ["csv", "nemo", "kaldi"])
def test_names_of_files_in_the_other_form_of_unicode(
    kind: str, audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (audio / "a.wav").rename(audio / "e\u0301.wav")
    (audio / "b.wav").rename(audio / "è.wav")
    folder, files = tmp_path / "lists", {"x": "é.wav", "y": "e\u0300.wav"}
    folder.mkdir()
    rows = [f"{name},../audio/{file},one\n" for name, file in files.items()]
    (folder / "list.csv").write_text("".join(["id,path,text\n", *rows]))
    nemo = [json.dumps({"id": i, "audio_filepath": f"../audio/{f}", "text": "one"}) + "\n" for i, f in files.items()]
    (folder / "list.json").write_text("".join(nemo))
    (folder / "wav.scp").write_text("".join(f"{i} {audio / f}\n" for i, f in files.items()))
    (folder / "text").write_text("x one\ny one\n")
    cuts = prepared(capsys, kind, {"csv": folder / "list.csv", "nemo": folder / "list.json", "kaldi": folder}[kind])
    assert {name: cut.duration for name, cut in cuts.items()} == {"x": 0.5, "y": 1.0}


@pytest.mark.parametrize(
    ("first", "second", "texts"),
    [
        ('"Yes, he said.', "no", ['"Yes, he said.', "no"]),  # Common Voice: no quoting
        ('"Yes", he said.', "no", ['"Yes", he said.', "no"]),
        ('"Yes, he said.', 'Then "no."', ['"Yes, he said.', 'Then "no."']),
        ('"Yes, he said.', '"', ['"Yes, he said.', '"']),
        ('"""Yes,"" he said."', "no", ['"Yes," he said.', "no"]),  # a spreadsheet
    ],
)
def test_quotation_marks_in_tsv(
    audio: Path, tmp_path: Path, first: str, second: str, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "validated.tsv"
    table.write_text(f"path\tsentence\tage\n{audio / 'a.wav'}\t{first}\t20\n{audio / 'b.wav'}\t{second}\t30\n")
    assert [cut.supervisions[0].text for cut in prepared(capsys, "csv", table).values()] == texts


@pytest.mark.parametrize("delimiter", ["|", ";"])
def test_a_sentence_that_begins_with_a_quotation_mark_takes_no_rows(
    audio: Path, tmp_path: Path, delimiter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the metadata of LJSpeech."""
    rows = [("path", "text"), (str(audio / "a.wav"), '"Yes, he said.'), (str(audio / "b.wav"), 'Then "no."')]
    (tmp_path / "table.csv").write_text("".join(delimiter.join(row) + "\n" for row in rows))
    cuts = prepared(capsys, "csv", tmp_path / "table.csv")
    assert [cut.supervisions[0].text for cut in cuts.values()] == ['"Yes, he said.', 'Then "no."']


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('path,text\na.wav,one\n\nb.wav,"two\nc.wav,three\nd.wav,four\n', 4),
        ('path,text\na.wav,"one\nb.wav,two"\n', 2),
        ('path,text\na.wav,one,more,"two\nb.wav,two\n', 2),
        ('path,text,"age\na.wav,one,20\n', 1),
    ],
)
def test_a_field_that_takes_the_next_rows_is_refused(
    tmp_path: Path, content: str, line: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.csv").write_text(content)
    arguments = ["prepare", "csv", "--corpus", str(tmp_path / "table.csv"), "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert f"table.csv:{line}: a field has a line break, perhaps" in capsys.readouterr().err


def test_a_manifest_of_nemo(audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        {"audio_filepath": "audio/a.wav", "duration": 0.5, "text": "one"},
        {"audio_filepath": str(audio / "b.wav"), "offset": 0.25, "duration": 0.5, "text": "two"},
        {"audio_filepath": "audio/b.wav", "duration": 0.125, "text": "three"},
        {"audio_filepath": str(audio / "b.wav"), "offset": 0.253, "duration": 0.125, "text": "within 10 ms"},
        {"audio_filepath": str(audio / "b.wav"), "offset": 0.254, "duration": 0.125, "text": "within 10 ms"},
    ]
    (tmp_path / "train.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    cuts = prepared(capsys, "nemo", tmp_path / "train.json")
    assert {name: (cut.start, cut.duration) for name, cut in cuts.items()} == {
        "a": (0.0, 0.5),
        "b": (0.0, 0.125),
        "b-0000025": (0.25, 0.5),
        "b-00000253000": (0.253, 0.125),
        "b-00000254000": (0.254, 0.125),
    }


@pytest.mark.parametrize(
    ("kind", "name", "line", "cure"),
    [
        ("csv", "list.csv", "{},word\n", "give the table a column id"),
        ("nemo", "list.json", '{{"audio_filepath": "{}", "text": "word"}}\n', "give the lines an id"),
    ],
)
def test_what_to_do_about_repeated_ids(
    tmp_path: Path, kind: str, name: str, line: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders of speakers often have files of the same names."""
    for speaker in ("s1", "s2"):
        write_audio(tmp_path / speaker / "a.wav", 0.5)
    header = "path,text\n" if kind == "csv" else ""
    (tmp_path / name).write_text(header + "".join(line.format(f"{speaker}/a.wav") for speaker in ("s1", "s2")))
    output = str(tmp_path / "prepared")
    assert main(["prepare", kind, "--corpus", str(tmp_path / name), "--output", output]) == 1
    assert f"the id occurs a second time; the first one is kept; {cure}" in capsys.readouterr().err


def test_a_number_of_jobs_below_1_is_refused(audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("path,text\naudio/a.wav,word\n")
    arguments = ["prepare", "csv", "--corpus", str(tmp_path / "a.csv"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--num-jobs", "0"]) == 2
    assert "--num-jobs 0: give 1 or more." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_lengths_and_ids_that_are_missing(audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text('{"audio_filepath": "audio/a.wav", "text": "word", "duration": -1}\n')
    assert main(["prepare", "nemo", "--corpus", str(tmp_path / "a.json"), "--output", str(tmp_path / "out")]) == 2
    assert "a.json:1: expected an object with audio_filepath" in capsys.readouterr().err
    (tmp_path / "a.csv").write_text("path,text,id\naudio/a.wav,word\n")
    assert main(["prepare", "csv", "--corpus", str(tmp_path / "a.csv"), "--output", str(tmp_path / "out")]) == 2
    assert "line 2: the row has no id" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"supervisions": ["word"]},
        {"start": float("nan")},
        {"start": -1.0},
        {"duration": 0.0},
        {"recording": {"duration": None, "sources": [{"type": "file", "channels": [0], "source": "a.wav"}]}},
        {"recording": []},
    ],
)
def test_damaged_cuts_of_lhotse_are_skipped(
    audio: Path, tmp_path: Path, change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    source = {"type": "file", "channels": [0], "source": str(audio / "a.wav")}
    sound = {"id": "sound", "type": "MonoCut", "start": 0.0, "duration": 0.5, "channel": 0}
    sound |= {"supervisions": [{"text": "word"}], "recording": {"duration": 0.5, "sources": [source]}}
    records = [sound, {**sound, "id": "damaged", **change}]
    (tmp_path / "cuts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert list(prepared(capsys, "lhotse", tmp_path / "cuts.jsonl", 1)) == ["sound"]
    report = json.loads((tmp_path / "prepared" / "lhotse_cuts.report.json").read_text())
    assert report["skipped"] == [{"item": "damaged", "reason": "this is not a cut of one recording in a file"}]


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x1c"])
def test_only_line_feeds_end_lines(
    audio: Path, tmp_path: Path, separator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`str.splitlines` knows other ends of lines, which texts from the web contain."""
    record = {"audio_filepath": "audio/a.wav", "text": f"one{separator}two"}
    text = json.dumps(record, ensure_ascii=False) if separator != "\x1c" else json.dumps(record)
    (tmp_path / "train.json").write_text(f"{text}\r\n", encoding="utf-8")
    assert prepared(capsys, "nemo", tmp_path / "train.json")["a"].supervisions[0].text == "one two"
    (tmp_path / "wav.scp").write_text(f"a {audio / 'a.wav'}\r\n")
    (tmp_path / "text").write_text(f"a one{separator}two\r\n", encoding="utf-8")
    assert prepared(capsys, "kaldi", tmp_path)["a"].supervisions[0].text == "one two"
    (tmp_path / "wav.scp").unlink()
    assert prepared(capsys, "ljspeech", tmp_path, 1)["a"].supervisions[0].text == "ONE TWO"


def test_cuts_of_lhotse_stay_what_they_are(audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "wav.scp").write_text(f"rb {audio / 'b.wav'}\n")
    (tmp_path / "train" / "text").write_text("u1 one\nu2 two\n")
    (tmp_path / "train" / "segments").write_text("u1 rb 0.25 0.75\nu2 rb 0 -1\n")
    first = prepared(capsys, "kaldi", tmp_path / "train")
    (tmp_path / "cuts.jsonl.gz").write_bytes((tmp_path / "prepared" / "kaldi_train.jsonl.gz").read_bytes())
    again = prepared(capsys, "lhotse", tmp_path / "cuts.jsonl.gz")
    described = [
        {name: (cut.start, cut.duration, cut.supervisions[0].text) for name, cut in cuts.items()}
        for cuts in (first, again)
    ]
    assert described[0] == described[1]
    with gzip.open(tmp_path / "cuts.jsonl.gz", "wt") as file:
        file.write(json.dumps({"id": "x", "type": "MonoCut", "start": 0, "duration": 1, "supervisions": []}) + "\n")
    assert (
        main(["prepare", "lhotse", "--corpus", str(tmp_path / "cuts.jsonl.gz"), "--output", str(tmp_path / "x")]) == 2
    )
    assert "there are no transcribed utterances: x: this is not a cut of one recording" in capsys.readouterr().err


@pytest.mark.parametrize("record", [{"sources": [], "duration": 1.0}, {"recording_id": "x", "start": 0.0, "text": "A"}])
def test_lhotse_recordings_and_supervisions_are_no_cuts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: dict[str, object]
) -> None:
    (tmp_path / "set.jsonl").write_text(json.dumps({"id": "x", **record}) + "\n")
    assert main(["prepare", "lhotse", "--corpus", str(tmp_path / "set.jsonl"), "--output", str(tmp_path / "x")]) == 2
    assert "not a manifest of cuts; 'lhotse cut simple -r RECORDINGS -s" in capsys.readouterr().err


def test_cuts_of_some_channels_or_changed_recordings_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two speakers on a telephone, whose channels must not be averaged, and a recording at another speed."""
    write_audio(tmp_path / "call.wav", 1.0)
    recording = Recording.from_file(tmp_path / "call.wav")
    stereo = replace(recording, sources=[replace(recording.sources[0], channels=[0, 1])], channel_ids=[0, 1])

    def cut(name: str, of: Recording, channel: int | list[int]) -> MonoCut | MultiCut:
        words = SupervisionSegment(id=name, recording_id=of.id, start=0, duration=of.duration, text=name)
        kind = MultiCut if isinstance(channel, list) else MonoCut
        return kind(id=name, start=0, duration=of.duration, channel=channel, recording=of, supervisions=[words])

    cuts = [
        cut("caller", stereo, 0),
        cut("both", stereo, [0, 1]),
        cut("slow", recording.perturb_speed(0.9), 0),
        cut("rate", recording.resample(8000), 0),
    ]
    CutSet.from_cuts(cuts).to_file(tmp_path / "cuts.jsonl.gz")
    assert sorted(prepared(capsys, "lhotse", tmp_path / "cuts.jsonl.gz", 1)) == ["both", "rate"]
    report = json.loads((tmp_path / "prepared" / "lhotse_cuts.report.json").read_text())
    assert {one["item"] for one in report["skipped"]} == {"caller", "slow"}
    assert "takes only some channels of its recording" in report["skipped"][0]["reason"]


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        ("csv", "a.csv", "name,words\nx,y\n", "the table needs a header with a column for the audio"),
        ("nemo", "a.json", "{}\n", "a.json:1: expected an object with audio_filepath"),
        ("nemo", "a.json", '{"audio_filepath": "a", "offset": -1}\n', "a.json:1: expected an object"),
        ("lhotse", "a.jsonl", "[]\n", "this is not a JSON Lines manifest"),
        ("kaldi", "nowhere", None, "there is no such file; give --corpus a data folder of Kaldi"),
    ],
)
def test_wrong_lists_are_one_sentence(
    tmp_path: Path, kind: str, name: str, content: str | None, message: str, capsys
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["prepare", kind, "--corpus", str(tmp_path / name), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_part_that_a_list_does_not_have_is_named_with_the_one_that_it_has(tmp_path: Path) -> None:
    """`asr prepare --parts` and `asr chain --corpus csv:PART=FILE` both name parts."""
    (tmp_path / "test.csv").write_text("path,text\n0.wav,A\n")
    with pytest.raises(AsrError, match=r"test\.csv: there is no part 'train'; its only part is 'test'\."):
        Table().list_part(tmp_path / "test.csv", "train")


@pytest.mark.slow
def test_a_small_manifest_does_not_fill_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cuts.jsonl.gz"
    path.write_bytes(gzip.compress((b" " * 999_999 + b"\n") * 65, 1))
    with pytest.raises(AsrError, match="it expands to more than any manifest of this size"):
        read_cuts([path])
    assert main(["prepare", "lhotse", "--corpus", str(path), "--output", str(tmp_path / "x")]) == 2
    assert "the manifest expands to more than 64 MB" in capsys.readouterr().err


def test_a_damaged_gzipped_manifest_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cuts.jsonl.gz"
    whole = gzip.compress(json.dumps({"id": list(range(1000))}).encode())
    path.write_bytes(whole[:40] + bytes(200) + whole[240:])
    assert main(["prepare", "lhotse", "--corpus", str(path), "--output", str(tmp_path / "x")]) == 2
    assert "cuts.jsonl.gz: " in (message := capsys.readouterr().err) and "Traceback" not in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration": math.nan}, "are not a span of time"),
        ({"duration": math.inf}, "are not a span of time"),
        ({"start": math.nan}, "are not a span of time"),
        ({"duration": -1}, "are not a span of time"),
        ({"start": "x"}, "must be real number"),
        ({"start": 10**400}, "too large"),
        ({"sampling_rate": math.inf}, "has no sampling rate"),
        ({"sampling_rate": -1}, "has no sampling rate"),
    ],
)
def test_cuts_without_sound_numbers_are_refused(
    audio: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    recording = Recording.from_file(audio / "a.wav").to_dict()
    record = {"id": "c", "start": 0, "duration": 0.5, "channel": 0, "supervisions": [], "type": "MonoCut"}
    record |= {name: value for name, value in change.items() if name != "sampling_rate"}
    recording |= {name: value for name, value in change.items() if name == "sampling_rate"}
    (tmp_path / "cuts.jsonl").write_text(json.dumps({**record, "recording": recording}))
    with pytest.raises(AsrError, match=rf"cuts\.jsonl: this is not a readable manifest of lhotse cuts \(.*{message}"):
        read_cuts([tmp_path / "cuts.jsonl"])


@pytest.mark.parametrize("name", ["offset", "duration"])
def test_times_of_nemo_beyond_all_numbers_are_told(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps({"audio_filepath": "a.wav", "text": "a", "duration": 1, name: 10**400}))
    assert main(["prepare", "nemo", "--corpus", str(path), "--output", str(tmp_path / "x")]) == 2
    assert "list.json:1: expected an object with audio_filepath" in capsys.readouterr().err
