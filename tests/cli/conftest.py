from __future__ import annotations

import pytest
import soundfile

from asr.cli.main import main
from asr.testing.tones import RATE, TEXT, tones


@pytest.fixture
def evaluate(capsys):
    def run(*arguments):
        capsys.readouterr()
        code = main(["evaluate", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def cuts(tmp_path):
    """A manifest of three utterances."""
    lhotse = pytest.importorskip("lhotse")
    made = []
    for index, text in enumerate(TEXT[:3]):
        path = tmp_path / f"u{index}.wav"
        soundfile.write(path, tones(text.split(), seed=index).numpy(), RATE)
        recording = lhotse.Recording.from_file(path)
        supervision = lhotse.SupervisionSegment(path.stem, recording.id, 0, recording.duration, text=text)
        made.append(lhotse.MonoCut(path.stem, 0, recording.duration, 0, [supervision], recording=recording))
    lhotse.CutSet.from_cuts(made).to_file(tmp_path / "cuts.jsonl.gz")
    return tmp_path / "cuts.jsonl.gz"
