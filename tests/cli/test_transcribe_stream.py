"""`asr transcribe --stream`."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import soundfile
import torch

from asr.cli.main import main
from asr.cli.stream import _EndOfInput
from asr.errors import AsrError
from asr.metrics import read_transcripts
from asr.streaming import StreamingRecognizer
from asr.testing.tones import RATE, tones

WORDS = ["PAT", "TO", "KIT"]


@pytest.fixture
def transcribe(tiny_bundle_folder, capsys, monkeypatch):
    def run(*arguments, content=b""):
        capsys.readouterr()
        buffer = content if isinstance(content, io.BytesIO) else io.BytesIO(content)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=buffer))
        options = ["--stream", "--chunk-seconds", "0.3", "--right-seconds", "0.2", "--ngram-only"]
        code = main(["transcribe", "--bundle", str(tiny_bundle_folder), *options, *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return run


@pytest.mark.slow
def test_standard_input_as_raw_samples_and_as_wav(transcribe):
    raw = (tones(WORDS) * 32767).short().numpy().tobytes()
    code, lines, _ = transcribe("-", "--raw-rate", RATE, "--jsonl", content=raw)
    records = list(map(json.loads, lines))
    assert code == 0
    assert [record["type"] for record in records] == ["partial"] * (len(records) - 1) + ["final"]
    assert records[-1]["text"] == "PAT TO KIT" and records[-1]["reason"] == "end" and records[-1]["audio"] == "-"
    assert records[-1]["words"][0]["start"] == pytest.approx(0.1, abs=0.05)
    assert len(records) > 1 and records[0]["settled"] <= len(records[0]["words"])
    file = io.BytesIO()
    soundfile.write(file, tones(WORDS, rate=44100).numpy(), 44100, format="WAV")
    code, lines, _ = transcribe("-", content=file.getvalue())
    assert code == 0 and lines == ["- 0.00-1.00: PAT TO KIT"]


class Microphone(io.BytesIO):
    """Gives its samples; then a signal comes while it is waited for, and silence follows."""

    def __init__(self, content=b"", number=signal.SIGINT):
        super().__init__(content)
        self.number = number

    def read1(self, size=-1):
        return super().read1(size) or self._silence(size)

    def read(self, size=-1):
        return super().read(size) or self._silence(size)

    def _silence(self, size):
        os.kill(os.getpid(), self.number)
        return bytes(size)


@pytest.mark.slow
def test_ctrl_c_ends_live_audio_and_completes_its_last_utterance(transcribe):
    samples = (tones(WORDS) * 32767).short().numpy().tobytes()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
    try:
        code, lines, errors = transcribe("-", "--raw-rate", RATE, content=Microphone(samples))
        assert code == 130 and lines == ["- 0.00-1.00: PAT TO KIT"] and errors == "asr: interrupted\n"
        code, lines, errors = transcribe("-", content=Microphone())  # the header of a WAV file is waited for
        assert code == 130 and lines == [] and errors == "asr: interrupted\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_sigterm_ends_live_audio_and_completes_its_last_utterance(transcribe, capsys):
    before = signal.getsignal(signal.SIGTERM)  # Lightning leaves its own
    samples = (tones(WORDS) * 32767).short().numpy().tobytes()
    with pytest.raises(SystemExit) as leaving:
        transcribe("-", "--raw-rate", RATE, content=Microphone(samples, signal.SIGTERM))
    assert leaving.value.code == 143
    assert capsys.readouterr().out == "- 0.00-1.00: PAT TO KIT\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_is_not_held_back(monkeypatch):
    end, raised, before = _EndOfInput(), [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    with end.by_signals():
        assert end.next(iter([1])) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert end.next(iter([1])) is None and raised == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert raised == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_many_files_at_once_and_bad_ones_among_them(tmp_path, transcribe):
    for index, words in enumerate([WORDS, ["SICK", "SKIP"], ["KIT", "TWO"], WORDS]):
        soundfile.write(tmp_path / f"{index}.wav", tones(words).numpy(), RATE)
    nan = tones(WORDS)
    nan[-1] = float("nan")
    soundfile.write(tmp_path / "nan.wav", nan.numpy(), RATE, subtype="FLOAT")
    (tmp_path / "text.wav").write_text("words")
    code, lines, errors = transcribe(tmp_path, tmp_path / "nowhere.wav", "--streams", 3, "--statistics")
    assert code == 1
    found = {line.split(" ")[0].rsplit("/")[-1]: line.split(": ")[1] for line in lines}
    expected = {"0.wav": "PAT TO KIT", "1.wav": "SICK SKIP", "2.wav": "KIT TWO", "3.wav": "PAT TO KIT"}
    assert {name: found[name] for name in expected} == expected
    for name, reason in {
        "nan.wav": "NaN, infinite or",
        "text.wav": "cannot be decoded",
        "nowhere.wav": "no such audio file",
    }.items():
        assert [line for line in errors.splitlines() if name in line and reason in line]
    assert "real-time factor" in errors
    code, lines, _ = transcribe(tmp_path / "1.wav", tmp_path / "nowhere.wav", "--jsonl", "--partials", "stable")
    *_, last = map(json.loads, lines)
    assert code == 1
    assert last == {
        "audio": f"{tmp_path}/nowhere.wav",
        "error": f"{tmp_path}/nowhere.wav: there is no such audio file.",
    }


@pytest.mark.slow
def test_streams_that_have_ended_in_the_output_are_skipped(tmp_path, transcribe):
    for index, words in enumerate([WORDS, ["SICK", "SKIP"]]):
        soundfile.write(tmp_path / f"{index}.wav", tones(words).numpy(), RATE)
    nan = tones(WORDS)
    nan[-1] = float("nan")
    soundfile.write(tmp_path / "nan.wav", nan.numpy(), RATE, subtype="FLOAT")
    files, output = [tmp_path / name for name in ("0.wav", "1.wav", "nan.wav")], tmp_path / "out"
    assert transcribe(*files, "--output", output)[0] == 1
    whole = output.read_text()
    code, _, errors = transcribe(*files, tmp_path / "nowhere.wav", "--output", output)
    assert code == 1 and "3 of 4 files are already in" in errors
    assert "nan.wav: " in errors and "nowhere.wav: " in errors  # what failed is told again
    assert output.read_text().startswith(whole) and output.read_text().count("\n") == whole.count("\n") + 1
    # An interruption within the second stream.
    lines = whole.splitlines(keepends=True)
    ends = [number for number, line in enumerate(lines) if '"reason": "end"' in line]
    output.write_text("".join(lines[: ends[1]]))
    code, _, errors = transcribe(*files[:2], "--output", output)
    assert code == 0 and errors == f"1 of 2 files are already in {output}.\n"
    assert read_transcripts(output) == {"0": tuple(WORDS), "1": ("SICK", "SKIP")}


def test_a_recording_that_cannot_be_recognized_leaves_the_next_ones(tmp_path, transcribe, monkeypatch):
    for index in range(2):
        soundfile.write(tmp_path / f"{index}.wav", tones(WORDS).numpy(), RATE)
    step = StreamingRecognizer._step

    def failing_at_first(self, numbers):
        if 0 in numbers:
            raise AsrError("the acoustic model gave NaN.")
        return step(self, numbers)

    monkeypatch.setattr(StreamingRecognizer, "_step", failing_at_first)
    code, lines, errors = transcribe(tmp_path)
    assert code == 1 and lines == [f"{tmp_path}/1.wav 0.00-1.00: PAT TO KIT"]
    assert errors == f"asr: {tmp_path}/0.wav: the acoustic model gave NaN.\n"


@pytest.mark.slow
def test_streams_are_shared_by_jobs(tmp_path, transcribe):
    for index in range(3):
        soundfile.write(tmp_path / f"{index}.wav", tones(WORDS).numpy(), RATE)
    for shard, expected in {"1/2": ["0.wav", "2.wav"], "2/2": ["1.wav"]}.items():
        lines = transcribe(tmp_path, "--shard", shard)[1]
        assert [line.split(" ")[0].rsplit("/")[-1] for line in lines] == expected


def test_silence_and_nothing(transcribe):
    code, lines, _ = transcribe("-", "--raw-rate", RATE, "--jsonl", content=bytes(2 * RATE))
    (record,) = map(json.loads, lines)
    assert code == 0 and record["text"] == "" and record["end"] == 1.0
    file = io.BytesIO()
    soundfile.write(file, torch.zeros(0).numpy(), RATE, format="WAV")
    for content, *options in ((b"", "--raw-rate", RATE), (b"\0", "--raw-rate", RATE), (b"",), (file.getvalue(),)):
        code, lines, errors = transcribe("-", "--jsonl", *options, content=content)
        (record,) = map(json.loads, lines)
        assert code == 1 and record["error"].startswith("-: standard input ends before any sample; give it a WAV file")
        assert f"asr: {record['error']}\n" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-", "-"], "can be given only once"),
        (["-"], "ends before any sample"),
        (["-", "--raw-rate", "0"], "--raw-rate 0: give 1 or more"),
        (["-", "--raw-format", "f32le"], "--raw-format has no effect without --raw-rate"),
        (["-", "--raw-channels", "2"], "--raw-channels has no effect without --raw-rate"),
        (["a.wav", "--raw-rate", "16000"], "--raw-rate is for standard input"),
        (["-", "--raw-rate", "16000", "--chunk-seconds", "0"], "streaming: --chunk-seconds is 0"),
        (["-", "--second-pass", "lattice"], "streams have no second pass (lattice); set --second-pass to none"),
        (["-", "--partials", "stable", "--mbr-scale", "1"], "--mbr-scale has no effect here: the words of the live"),
    ],
)
def test_a_wrong_request_is_one_sentence(transcribe, arguments, message):
    code, lines, errors = transcribe(*arguments)
    assert code in (1, 2) and lines == []
    assert message in errors and len(errors.splitlines()) == 1


@pytest.mark.slow
def test_many_wrong_pieces_in_a_row_are_reported_once(transcribe, tmp_path):
    speech, wrong = tones(WORDS), torch.full((2 * RATE,), 3e9)
    soundfile.write(tmp_path / "loud.wav", torch.cat([speech, wrong, speech]).numpy(), RATE, subtype="FLOAT")
    code, lines, errors = transcribe(tmp_path / "loud.wav", "--jsonl")
    assert code == 1 and errors.count("it is ignored") == 1
    records = list(map(json.loads, lines))
    assert ["error" in record for record in records].count(True) == 1
    words = [word for record in records if record.get("type") == "final" for word in record["words"]]
    # The words before and after the wrong samples may be cut, but the last one comes where it is spoken.
    assert words[-1]["word"] == "KIT" and words[-1]["end"] == pytest.approx(2 * len(speech) / RATE + 2.0, abs=0.2)
