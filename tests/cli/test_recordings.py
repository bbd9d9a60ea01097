"""What `asr transcribe` takes and writes: lists of Kaldi and lhotse, formats, shards, and resuming."""

from __future__ import annotations

import gzip
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from asr.bundle import Bundle
from asr.cli.main import main
from asr.cli.output import ResultsFile, TranscriptFolder, maker_of
from asr.cli.printing import print_record
from asr.cli.recordings import Shard, recordings
from asr.datasets.kaldi import read_wav_scp
from asr.decoding.settings import ResourceOptions
from asr.errors import AsrError
from asr.recognizer import Recognizer
from asr.reports.clips import ClipReader
from asr.reports.evaluation import Clip
from asr.testing.tones import RATE, tones
from asr.transcripts import Transcript


def write(path: Path, words: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(str(path), tones(words).numpy(), RATE, subtype="FLOAT")
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder of Kaldi."""
    one, two = write(tmp_path / "audio" / "one.wav", ["PAT", "TWO"]), write(tmp_path / "audio" / "two.wav", ["SICK"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wav.scp").write_text(f"rec1 {one}\nrec2\tcat {two} |\n")
    return tmp_path / "data"


def test_kaldi_s_recordings_and_segments(data: Path) -> None:
    found = recordings([str(data / "wav.scp")])
    assert found.names == ["rec1", "rec2"] and data / "wav.scp" in found.inputs
    whole = found.read("rec1", RATE)
    assert torch.equal(whole, tones(["PAT", "TWO"]))
    assert torch.equal(found.read("rec2", RATE), tones(["SICK"]))
    (data / "segments").write_text("u1 rec1 0.1 0.5\nu2 rec1 0.25 -1\n")
    found = recordings([str(data / "wav.scp")])
    assert found.names == ["u1", "u2"]
    assert torch.equal(found.read("u1", RATE), whole[1600:8000]) and torch.equal(found.read("u2", RATE), whole[4000:])


def test_segments_of_long_recordings_are_decoded_alone(tmp_path: Path) -> None:
    """The rest of the recording is lost, so that nobody can decode it."""
    path = tmp_path / "long.flac"
    samples = torch.randn(20 * RATE, generator=torch.Generator().manual_seed(0)) * 0.1
    soundfile.write(path, samples.numpy(), RATE)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (tmp_path / "wav.scp").write_text(f"rec {path}\n")
    (tmp_path / "segments").write_text("u1 rec 2 3\nu2 rec 19 20\n")
    found = recordings([str(tmp_path / "wav.scp")])
    torch.testing.assert_close(found.read("u1", RATE), samples[2 * RATE : 3 * RATE], rtol=0, atol=1e-4)
    with pytest.raises(AsrError, match=r"long\.flac: the audio cannot be decoded"):
        found.read("u2", RATE)
    torch.testing.assert_close(ClipReader().read(Clip(str(path), 2.0, 3.0)), found.read("u1", RATE))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rec3 rm -rf x.wav |", r"runs no commands; the pipe 'rm -rf x.wav \|'"),
        ("rec3 sox x.wav -t wav - speed 1.1 |", "runs no commands"),
        ("rec3 sph2pipe -f wav -c 2 x.sph |", "runs no commands"),
        ("rec3 cat x.wav; rm y |", "runs no commands"),
        ("rec3 cat 'x.wav |", "runs no commands"),
        ("rec3", "expected the name of an audio file"),
        ("rec1 other.wav", "'rec1' occurs twice"),
    ],
)
def test_no_command_of_a_list_is_run(data: Path, line: str, message: str) -> None:
    with (data / "wav.scp").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(AsrError, match=message):
        read_wav_scp(data / "wav.scp")


def test_decoding_pipes_are_read_around(tmp_path: Path) -> None:
    lines = {
        "flac -c -d -s {} |": "a.flac",
        "/usr/bin/sph2pipe -f wav -p {} |": "b.sph",
        "cat '{}' |": "with space.wav",
    }
    content = "".join(f"{place} {line.format(name)}\n" for place, (line, name) in enumerate(lines.items()))
    (tmp_path / "wav.scp").write_text(content)
    found = [utterance.audio for utterance in read_wav_scp(tmp_path / "wav.scp")]
    assert found == [Path.cwd() / name for name in lines.values()]


def test_relative_names_start_from_the_current_folder(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Kaldi, whose scripts are run from the folder above `data`."""
    (data / "wav.scp").write_text("rec1 audio/one.wav\nrec2 cat audio/none.wav |\n")
    monkeypatch.chdir(data.parent)
    found = recordings(["data/wav.scp"])
    monkeypatch.chdir("/")
    assert torch.equal(found.read("rec1", RATE), tones(["PAT", "TWO"]))
    with pytest.raises(AsrError, match=rf"^data/wav.scp: {data.parent}/audio/none.wav: there is no such audio file"):
        found.read("rec2", RATE)


@pytest.mark.parametrize("line", ["u1 rec9 0 1", "u1 rec1 1 0.5", "u1 rec1 x 2", "u1 rec1 1", "u1 rec1 nan 2"])
def test_wrong_segments_are_one_sentence(data: Path, line: str) -> None:
    (data / "segments").write_text(f"{line}\n")
    with pytest.raises(AsrError, match="segments: u1: "):
        recordings([str(data / "wav.scp")])


@pytest.mark.slow
def test_a_long_list_given_twice_is_refused_at_once(tmp_path: Path) -> None:
    """Counting each name in the list of all took twenty seconds here."""
    path = tmp_path / "wav.scp"
    path.write_text("".join(f"u{number} {number}.wav\n" for number in range(20_000)))
    begin = time.process_time()
    with pytest.raises(AsrError, match="the recording 'u0' is listed twice"):
        recordings([str(path), str(path)])
    assert time.process_time() - begin < 5


def test_shards_share_the_recordings() -> None:
    names = [str(place) for place in range(10)]
    parts = [Shard.parse(f"{i}/3").of(names) for i in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == names and {len(part) for part in parts} == {3, 4}
    for wrong in ("0/3", "4/3", "3", "1/0", "a/b", "-1/2"):
        with pytest.raises(AsrError, match=r"--shard .*: give the number of this job and the number of jobs"):
            Shard.parse(wrong)


def test_ids_of_lists_are_those_of_a_reference(data: Path, tmp_path: Path, tiny_bundle_folder: Path, capsys) -> None:
    """Also ids that look like paths of files."""
    lines = (data / "wav.scp").read_text().replace("rec1", "speaker/rec.1").replace("rec2", "speaker/rec.2")
    (data / "wav.scp").write_text(lines)
    (tmp_path / "reference").write_text("speaker/rec.1 PAT TWO\nspeaker/rec.2 SICK\n")
    (tmp_path / "reference.stm").write_text("speaker/rec.1 1 a 0 9 PAT TWO\nspeaker/rec.2 1 a 0 9 SICK\n")
    words = str(tmp_path / "words.jsonl")
    options = ["--bundle", str(tiny_bundle_folder), "--ngram-only", "--decoder", "token-passing", "--output", words]
    assert main(["transcribe", str(data / "wav.scp"), *options]) == 0
    for reference in ("reference", "reference.stm"):
        assert main(["evaluate", words, "--reference", str(tmp_path / reference)]) == 0
        assert "0 of 2 utterances have errors" in capsys.readouterr().out


@pytest.mark.slow
def test_formats_are_written_and_resumed(data: Path, tmp_path: Path, tiny_bundle_folder: Path, capsys) -> None:
    options = ["--bundle", str(tiny_bundle_folder), "--ngram-only", "--decoder", "token-passing"]
    scp = ["transcribe", str(data / "wav.scp"), *options]
    assert main([*scp, "--output-format", "trn"]) == 0
    assert capsys.readouterr().out == "PAT TWO (rec1)\nSICK (rec2)\n"
    output = tmp_path / "out"
    folder = [*scp, "--output-format", "srt,ctm", "--output-dir", str(output)]
    assert main([*folder, "--shard", "2/2"]) == 0
    assert sorted(path.name for path in output.iterdir()) == [".made_by", ".transcripts", "rec2.ctm", "rec2.srt"]
    before = (output / "rec2.ctm").stat().st_mtime_ns
    assert main(folder) == 0
    assert "1 of 2 files are already in" in capsys.readouterr().err
    assert (output / "rec2.ctm").stat().st_mtime_ns == before
    assert [line.split()[4] for line in (output / "rec1.ctm").read_text().splitlines()] == ["PAT", "TWO"]
    assert main([*folder, "--search-beam", "9"]) == 2
    assert "its files were made by" in capsys.readouterr().err


def test_a_folder_has_the_transcripts_of_one_recognizer(tmp_path: Path) -> None:
    """Also those of other recordings and formats than an earlier run wrote: a later run may name all of them."""
    names = {"x/a.wav": "a", "x/b.wav": "b"}
    first = TranscriptFolder(tmp_path, ("txt",), {"x/a.wav": "a"})
    first.require_maker("one")
    first.add("x/a.wav", Transcript("a", (), 0.0, {}))
    for formats, files in ((("txt",), {"x/b.wav": "b"}), (("srt",), names)):
        with pytest.raises(AsrError, match="its files were made by 'one', not by 'other'; choose another --output-dir"):
            TranscriptFolder(tmp_path, formats, files).require_maker("other")
        TranscriptFolder(tmp_path, formats, files).require_maker("one")
    (tmp_path / "a.txt").rename(tmp_path / ".0123456789abcdef.a.txt")  # as a killed process leaves it
    TranscriptFolder(tmp_path, ("txt",), names).require_maker("other")


@pytest.mark.slow
def test_a_recognizer_has_another_name_if_its_words_may_differ(tiny_bundle_folder: Path) -> None:
    calibration = {"ngram": {"bias": -5.0, "terms": {}}}  # no word is probable
    bundle = replace(Bundle.load(tiny_bundle_folder), confidence=calibration)

    def made(**resources: Any) -> Recognizer:
        return Recognizer(bundle, "ngram", options={"max_token_seconds": 1.0}, resources=ResourceOptions(**resources))

    confident = made()
    confident.calibration = None
    waveform = tones(["KIT", "TWO"])
    assert [one([waveform])[0].text for one in (made(), confident)] == ["", "KIT TWO"]
    others = [made(), made(max_segment_seconds=5.0), made(acoustic_precision="float32"), confident]
    assert len({maker_of(one) for one in others}) == 4
    assert maker_of(made(batch_seconds=3.0, num_workers=1)) == maker_of(made())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output-format", "docx"], "there is no such format"),
        (["--output-format", "srt,vtt"], "several formats need --output-dir"),
        (["--output-format", "srt"], "of several recordings needs a file for each; give --output-dir"),
        (["--output-format", "srt", "--jsonl"], "--jsonl and --output-format srt exclude each other"),
        (["--output-format", "srt", "--output", "words"], "--output always writes JSON Lines"),
        (["--output-dir", "words", "--output", "words"], "--output and --output-dir exclude each other"),
        (["--output-format", "srt", "--stream"], "--output-format and --stream exclude each other"),
        (["--output-dir", "words", "--stream"], "--output-dir and --stream exclude each other; give --output FILE"),
        (["--shard", "3/2"], "--shard 3/2"),
        (["--stream"], "wav.scp: --stream reads audio files, folders of them and standard input (-), but no lists"),
        (["--partials", "best"], "--partials has no effect without --stream"),
        (["--chunk-seconds", "0.3"], "--chunk-seconds has no effect without --stream"),
        (["--lattice-format", "kaldi"], "--lattice-format has no effect without --lattices"),
        (["--no-lattice-gzip"], "--no-lattice-gzip has no effect without --lattices"),
    ],
)
def test_wrong_requests_are_one_sentence(data: Path, options: list[str], message: str, capsys) -> None:
    assert main(["transcribe", str(data / "wav.scp"), *options]) == 2
    assert message in capsys.readouterr().err


def test_other_lists_are_no_cuts(tmp_path: Path, capsys) -> None:
    pytest.importorskip("lhotse")
    path = tmp_path / "nemo.jsonl"
    for line, reason in (
        (
            '{"audio_filepath": "a.wav", "duration": 3.5}',
            "a line has the fields audio_filepath, duration, but no 'type'",
        ),
        ("[1]", "a line is not a JSON object"),
    ):
        path.write_text(line)
        assert main(["transcribe", str(path)]) == 2
        message = f"{path}: this is not a readable manifest of lhotse cuts ({reason}); create it with `asr prepare`"
        assert message in capsys.readouterr().err


def test_a_file_is_no_folder_of_transcripts(data: Path, tmp_path: Path, capsys) -> None:
    path = tmp_path / "file"
    path.touch()
    assert main(["transcribe", str(data / "wav.scp"), "--output-dir", str(path)]) == 2
    assert f"{path}: transcripts cannot be written there (File exists)" in capsys.readouterr().err


def test_lhotse_s_cuts(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("lhotse")
    from lhotse import CutSet, Recording

    cuts = CutSet.from_cuts(
        [Recording.from_file(tmp_path / "audio" / "one.wav").to_cut().truncate(offset=0.1, duration=0.3)]
    )
    with gzip.open(tmp_path / "cuts.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(cut.to_dict()) + "\n" for cut in cuts)
    found = recordings([str(tmp_path / "cuts.jsonl.gz")])
    assert len(found.names) == 1
    torch.testing.assert_close(found.read(found.names[0], RATE), tones(["PAT", "TWO"])[1600:6400])


def test_results_are_known_again_without_parsing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes resuming 100,000 recordings quick; `scripts/bench use` measures it."""
    words = [{"word": "WORD", "start": 0.1 * place, "end": 0.1 * place + 0.1} for place in range(8)]
    line = json.dumps({"audio": "@", "text": "WORD " * 8, "words": words, "made_by": "tones ngram abc"})
    path = tmp_path / "words.jsonl"
    path.write_text("".join(line.replace("@", f"folder/{place}.wav") + "\n" for place in range(1000)))
    with monkeypatch.context() as patch:
        patch.delattr("asr.cli.output._record")
        output = ResultsFile(path, "audio")
    with output:
        assert len(output.done) == 1000
        assert output.record("folder/777.wav")["audio"] == "folder/777.wav"
        with pytest.raises(AsrError, match="was recognized by 'tones ngram abc', not by 'other'"):
            output.require_maker("other")


def test_lines_that_others_wrote_are_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "words.jsonl"
    records = [
        {"audio": "plain.wav", "text": "A", "made_by": "x"},
        {"audio": 'quo"te\\.wav', "text": "B", "made_by": "x"},
        {"text": "C", "audio": "order.wav"},
        {"audio": "failed.wav", "error": "bad", "made_by": "x"},
        {"audio": "fake.wav", "text": 'D", "made_by": "y', "made_by": "x"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with ResultsFile(path, "audio") as output:
        assert list(output.done) == ["plain.wav", 'quo"te\\.wav', "order.wav", "fake.wav"]
        assert [output.record(name)["text"] for name in output.done] == ["A", "B", "C", 'D", "made_by": "y']
        output.require_maker("x")


@pytest.mark.parametrize("line", ["", '{"video": "a.wav", "text": "A", "made_by": "x"}'])
def test_a_file_with_lines_of_something_else_is_refused_and_stays(tmp_path: Path, line: str) -> None:
    path = tmp_path / "words.jsonl"
    path.write_text(f'{line}\n{{"audio": "a.wav", "text": "A", "made_by": "x"}}\n')
    before = path.read_bytes()
    with pytest.raises(AsrError, match=r"words\.jsonl:1: this line is not output of this command"):
        ResultsFile(path, "audio")
    assert path.read_bytes() == before


def test_characters_are_escaped_only_where_they_cannot_be_written() -> None:
    record = {"audio": "ü.wav", "text": "Ü"}
    for encoding, line in (("utf-8", '{"audio": "ü.wav", "text": "Ü"}'), ("ascii", json.dumps(record))):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        print_record(record, stream)
        assert stream.buffer.getvalue().decode(encoding) == f"{line}\n"  # type: ignore[attr-defined]
    text = io.StringIO()  # has no encoding
    print_record(record, text)
    assert text.getvalue() == '{"audio": "ü.wav", "text": "Ü"}\n'


def test_a_list_without_recordings_is_told(tmp_path: Path) -> None:
    (tmp_path / "cuts.jsonl").write_text("")
    with pytest.raises(AsrError, match=r"cuts\.jsonl: there are no recordings in this list"):
        recordings([str(tmp_path / "cuts.jsonl")])
