"""Our acoustic models as ONNX and TorchScript files, run by onnxruntime and torch.jit, and read back."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asr.audio.fbank import Fbank
from asr.audio.io import read_audio
from asr.bundle import Bundle, all_bundle_folders
from asr.cli.main import main
from asr.decoding.settings import ResourceOptions
from asr.errors import AsrError
from asr.models.export import FORMATS, TraceableCmvn, can_export_onnx, export_acoustic_model
from asr.models.external import CallableModel, load_acoustic_model, onnx
from asr.models.interface import UtteranceCmvn
from asr.recognizer import Recognizer
from asr.serialization import ModelSpec

CLIPS = Path(__file__).resolve().parents[2] / "scripts" / "demo_clips"


def bursts(num_samples: int) -> Tensor:
    """Noise with pauses."""
    generator = torch.Generator().manual_seed(num_samples)
    is_loud = torch.rand(num_samples // 4000 + 1, generator=generator) > 0.5
    return torch.randn(num_samples, generator=generator) * is_loud.repeat_interleave(4000)[:num_samples] * 0.1


def require(form: str) -> None:
    if form == "onnx" and importlib.util.find_spec("onnxruntime") is None:
        pytest.skip("needs onnxruntime")


@pytest.mark.parametrize("num_frames", [[5], [60, 12], [88, 80], [100, 101], [700, 260, 30]])
def test_the_normalization_without_branches_is_the_same(num_frames: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(len(num_frames), max(num_frames), 4, generator=generator) + 3.0
    # Pauses; those of short utterances count, however far they are from what is loud.
    features[:, 15:90] -= 20.0
    features[:, 110:240] -= 20.0
    lengths = torch.tensor(num_frames)
    wanted = UtteranceCmvn()(features, lengths)
    assert torch.equal(TraceableCmvn()(features, lengths), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_any_number_of_utterances_and_frames(tiny_bundle_folder: Path, tmp_path: Path, form: str) -> None:
    require(form)
    bundle = Bundle.load(tiny_bundle_folder)
    export_acoustic_model(bundle, tmp_path / "model", form)
    model = load_acoustic_model(f"{form}:{tmp_path / 'model'}")
    assert model.tokens.table.tokens == bundle.graph.tokens.tokens
    assert (model.sampling_rate, model.frame_shift) == (16000, 0.02)
    for lengths in ((16000,), (8000, 3000), (90000, 40000, 200)):
        num_samples = torch.tensor(lengths)
        waveform = torch.nn.utils.rnn.pad_sequence([bursts(length) for length in lengths], batch_first=True)
        with torch.no_grad():
            wanted, num_wanted = bundle.acoustic_model.network(*bundle.features.network(waveform, num_samples))
            found, num_found = model.forward(waveform, num_samples)
        assert num_found.tolist() == num_wanted.tolist()
        for row, number in enumerate(num_wanted.tolist()):
            assert torch.allclose(found[row, :number], wanted[row, :number], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_other_frame_shifts_of_filterbanks_are_kept(tiny_bundle_folder: Path, tmp_path: Path, form: str) -> None:
    require(form)
    bundle = Bundle.load(tiny_bundle_folder)
    arguments = bundle.features.arguments | {"frame_shift_ms": 8.0}
    features = ModelSpec("Fbank", arguments, Fbank(**arguments))
    export_acoustic_model(replace(bundle, features=features), tmp_path / "model", form)
    assert load_acoustic_model(f"{form}:{tmp_path / 'model'}").frame_shift == pytest.approx(0.016)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("folder", all_bundle_folders(), ids=lambda folder: folder.name)
def test_shipped_networks_say_the_same_words(folder: Path, tmp_path: Path, form: str) -> None:
    require(form)
    bundle = Bundle.load(folder)
    export_acoustic_model(bundle, tmp_path / "model", form)
    clips = [read_audio(path, 16000) for path in sorted(CLIPS.glob("*.flac"))[:2]]
    exact = ResourceOptions(acoustic_precision="float32")
    own = Recognizer(bundle, "ngram", decoder="token-passing", resources=exact)(clips)
    theirs = Recognizer(bundle, "ngram", decoder="token-passing", acoustic_model=f"{form}:{tmp_path / 'model'}")(clips)
    for one, other in zip(own, theirs, strict=True):
        assert [replace(word, confidence=None) for word in one.words] == [
            replace(word, confidence=None) for word in other.words
        ]
        assert [word.confidence for word in one.words] == pytest.approx([w.confidence for w in other.words], abs=1e-3)
        assert one.total == pytest.approx(other.total, abs=0.05)


def test_the_command(tiny_bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "model.pt"
    command = ["export", str(tiny_bundle_folder), "--output", str(output), "--format"]
    assert main([*command, "torchscript"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 5
    assert load_acoustic_model(f"torchscript:{output}").tokens.symbols[0] == "<blk>"
    assert main(["export", str(tiny_bundle_folder), "--format", "onnx", "--output", str(tmp_path / "no" / "a")]) == 2
    assert "make it first" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not can_export_onnx(), reason="needs onnx")
def test_flipped_bits_of_onnx_files_are_noticed(tiny_bundle_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    export_acoustic_model(Bundle.load(tiny_bundle_folder), path, "onnx")
    good = path.read_bytes()
    onnx.require_intact(path)
    assert b"asr_sha256" in good[-100:]
    # The checksum's key is the last thing before it, and nothing that matters.
    num_checked = len(good) - len(b"..asr_sha256..") - 66
    generator = random.Random(0)
    for position in [0, num_checked - 1, len(good) - 1, *(generator.randrange(num_checked) for _ in range(50))]:
        damaged = bytearray(good)
        damaged[position] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(AsrError, match="does not match its checksum"):
            onnx.require_intact(path)
    if importlib.util.find_spec("onnxruntime") is not None:
        with pytest.raises(AsrError, match="does not match its checksum"):
            load_acoustic_model(f"onnx:{path}")
        path.write_bytes(good)
        assert load_acoustic_model(f"onnx:{path}").metadata["asr_sha256"] == good[-64:].decode()
    # Files of other programs have none.
    path.write_bytes(b"short")
    onnx.require_intact(path)


def test_what_cannot_be_exported_is_told(tiny_bundle_folder: Path, tmp_path: Path) -> None:
    bundle = Bundle.load(tiny_bundle_folder)
    with pytest.raises(AsrError, match="there is no format 'tflite'"):
        export_acoustic_model(bundle, tmp_path / "model", "tflite")
    tokens = list(bundle.graph.tokens.tokens)
    model = CallableModel(lambda x, n: (torch.zeros(1, 1, len(tokens)), n), tokens, 16000, 0.02)
    from asr.ctc.bundles import bundle_with_acoustic_model

    with pytest.raises(AsrError, match="is an external one already"):
        export_acoustic_model(bundle_with_acoustic_model(model, bundle), tmp_path / "model", "onnx")


@pytest.mark.skipif(torch.__version__.startswith("1."), reason="torch 1 exports by itself")
def test_a_missing_exporter_is_told(
    tiny_bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    given = ["export", str(tiny_bundle_folder), "--format", "onnx", "--output", str(tmp_path / "model.onnx")]
    assert main(given) == 2
    assert "needs the package onnx to export to ONNX: pip install onnx." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
