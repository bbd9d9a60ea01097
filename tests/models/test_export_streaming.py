"""Networks with states: exported, and read back chunk by chunk, they say what a stream through the bundle says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asr.audio.fbank import LOG_FLOOR, Fbank
from asr.audio.io import read_audio
from asr.bundle import Bundle
from asr.cli.main import main
from asr.errors import AsrError
from asr.models.export import StreamChunks, StreamingNetwork, export_acoustic_model
from asr.models.external import load_acoustic_model, torchscript
from asr.models.interface import BoundedNetwork
from asr.models.tdnnf import Ensemble, Tdnnf
from asr.models.windows import ChunkedEncoder, WindowSizes
from asr.recognizer import Recognizer
from asr.serialization import ModelSpec
from asr.streaming import recognize_stream
from asr.text.ctc_tokens import CTCTokens

ARGUMENTS: dict[str, Any] = {
    "num_features": 20,
    "num_tokens": 5,
    "dim": 12,
    "bottleneck_dim": 4,
    "num_layers": 2,
    "prefinal_dim": 8,
    "small_dim": 8,
}
CLIPS = Path(__file__).resolve().parents[2] / "scripts" / "demo_clips"


@pytest.fixture(scope="module")
def network() -> Tdnnf:
    torch.manual_seed(0)
    network = Tdnnf(**ARGUMENTS).eval()
    with torch.no_grad():
        network.branch.out.weight.normal_()
    return network


def features_with_pauses(num_frames: int) -> Tensor:
    """Noise that is loud and soft in turns; it begins soft, and the level drifts."""
    generator = torch.Generator().manual_seed(num_frames)
    is_loud = (torch.arange(num_frames) // 60) % 2 == 1
    features = torch.randn(num_frames, 20, generator=generator) * 0.5
    return (
        features
        + torch.where(is_loud, 6.0, 0.0)[:, None] * torch.rand(num_frames, 20, generator=generator)
        + (0.01 * torch.arange(num_frames)[:, None])
    )


def stream_of_bundle(network: BoundedNetwork, sizes: WindowSizes, features: Tensor) -> Tensor:
    encoder = ChunkedEncoder(network, sizes)
    stream = encoder.open(torch.device("cpu"))
    stream.push(features)
    stream.close()
    found = []
    while stream.is_ready:
        found += encoder.step([stream])
    return torch.cat(found)


@torch.no_grad()
def stream_with_states(network: BoundedNetwork, chunks: StreamChunks, features: Tensor) -> Tensor:
    module = StreamingNetwork(network, chunks)
    states, found = module.initial_states(), []
    begin = 0
    while begin < len(features):
        chunk = features[begin : begin + module.num_frames]
        x = torch.nn.functional.pad(chunk, (0, 0, 0, module.num_frames - len(chunk)))[None]
        log_prob, num, *states = module(x, torch.tensor([len(chunk)]), *states)
        found.append(log_prob[0, : int(num)])
        if len(chunk) < module.num_frames:
            break
        begin += module.shift
    return torch.cat(found)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "right"), [(4, 6), (8, 2), (1, 0)])
@pytest.mark.parametrize("num_frames", [7, 30, 90, *(pytest.param(num, marks=pytest.mark.slow) for num in (361, 600))])
@pytest.mark.parametrize(("memory", "min_std"), [(40, 0.7), (1000, 0.0)])
def test_states_do_what_windows_do(
    network: Tdnnf, chunk: int, right: int, num_frames: int, memory: int, min_std: float
) -> None:
    features = features_with_pauses(num_frames)
    features[num_frames // 2 : num_frames * 2 // 3] = LOG_FLOOR  # digital silence
    wanted = stream_of_bundle(network, WindowSizes(chunk, 100, right, memory, min_std), features)
    found = stream_with_states(network, StreamChunks(chunk, right, memory, min_std), features)
    assert len(wanted) == -(-num_frames // 3)
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.slow
def test_an_ensemble_does_so_too(network: Tdnnf) -> None:
    others = ARGUMENTS | {"num_layers": 3, "num_convolutions": 1}
    specs = [ModelSpec("Tdnnf", ARGUMENTS, network), ModelSpec("Tdnnf", others, Tdnnf(**others))]
    ensemble: Any = Ensemble.of(specs).network
    features = features_with_pauses(90)
    wanted = stream_of_bundle(ensemble, WindowSizes(4, 100, 6, 40, 0.7), features)
    found = stream_with_states(ensemble, StreamChunks(4, 6, 40, 0.7), features)
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.slow
def test_the_cases_hold_noise_pauses_and_speech(network: Tdnnf) -> None:
    log_prob = stream_with_states(network, StreamChunks(4, 6, 40, 0.7), features_with_pauses(600))
    is_noise = (log_prob[:, 1:] == -20.0).all(1)
    assert is_noise[0]
    assert not is_noise[-1]
    best = log_prob.argmax(1)
    assert (best == 0).any()
    assert (best > 0).any()


@torch.no_grad()
def test_speech_that_has_begun_goes_on(network: Tdnnf) -> None:
    module = StreamingNetwork(network, StreamChunks(4, 6, 40, 0.7))
    quiet, num = 0.01 * features_with_pauses(30)[None], torch.tensor([module.num_frames])
    states = list(module.initial_states())
    is_noise = [bool((module(quiet, num, *states)[0][..., 1:] == -20.0).all())]
    states[4] = torch.ones(1)
    is_noise.append(bool((module(quiet, num, *states)[0][..., 1:] == -20.0).any()))
    assert is_noise == [True, False]


def tdnnf_bundle(folder: Path, network: Tdnnf) -> Bundle:
    bundle = Bundle.load(folder)
    assert isinstance(bundle.features.network, Fbank)
    return replace(bundle, acoustic_model=ModelSpec("Tdnnf", ARGUMENTS, network))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", "torchscript"])
def test_read_back_in_chunks_of_any_size(tiny_bundle_folder: Path, tmp_path: Path, network: Tdnnf, form: str) -> None:
    if form == "onnx":
        pytest.importorskip("onnxruntime")
        if not torch.__version__.startswith("1."):
            pytest.importorskip("onnx")
    bundle, path = tdnnf_bundle(tiny_bundle_folder, network), tmp_path / "model"
    export_acoustic_model(bundle, path, form, streaming=StreamChunks(5, 6, 50, 0.7))
    model: Any = load_acoustic_model(f"{form}:{path}")
    assert model.is_streaming
    assert model.frame_shift == pytest.approx(0.03)
    generator = torch.Generator().manual_seed(1)
    waveform = torch.randn(30001, generator=generator) * 0.1
    waveform[:9000] *= 0.001
    waveform[18000:24000] *= 0.001
    features, _ = bundle.features.network(waveform[None], torch.tensor([len(waveform)]))
    wanted = stream_of_bundle(network, WindowSizes(5, 100, 6, 50, 0.7), features[0])
    whole, num_frames = model(waveform)
    assert num_frames.tolist() == [len(wanted)]
    assert torch.allclose(whole[0], wanted, atol=1e-3)
    for size in (160, 1000, 16000):
        stream, pieces = model.stream(), waveform.split(size)
        parts = [stream.accept(piece, is_last=number == len(pieces) - 1) for number, piece in enumerate(pieces)]
        # Outputs come as soon as their context has been heard.
        assert sum(map(len, parts[: len(parts) // 2 + 1])) > 0
        assert torch.allclose(torch.cat(parts), whole[0], atol=1e-3)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"states": [[[1, 4], "float8"]], "T": 9, "decode_chunk_len": 3}, "does not describe its states"),
        ({"states": [[[1, -4], "float32"]], "T": 9, "decode_chunk_len": 3}, "does not describe its states"),
        ({"states": [[[1, 4], "float32"]], "T": 9}, "does not describe its states"),
        ({"states": [[[1, 4], "float32"]], "T": 9, "decode_chunk_len": 0}, "are decode_chunk_len = 0 frames apart"),
        ({"states": [[[1, 4], "float32"]], "T": 3, "decode_chunk_len": 9}, "are decode_chunk_len = 9 frames apart"),
        ({"states": [[[1, 4], "float32"]], "T": 9, "decode_chunk_len": 3, "input": "waveform"}, "no filterbanks"),
        ({"states": [[[1, 4], "float32"]], "T": 9, "decode_chunk_len": 3}, "read filterbanks, lengths and 1 states"),
    ],
)
def test_files_whose_states_are_described_wrongly(tmp_path: Path, described: dict[str, Any], message: str) -> None:
    network = torch.jit.trace(torch.nn.Linear(80, 2), torch.zeros(1, 80))
    tokens = CTCTokens(["-", "A"])
    torchscript.save(network, tmp_path / "model", tokens, **{"frame_shift": 0.03, "input": "fbank", **described})
    with pytest.raises(AsrError, match=message):
        load_acoustic_model(f"torchscript:{tmp_path / 'model'}")(torch.zeros(4000))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", "torchscript"])
def test_the_shipped_network_says_the_same_words(
    librispeech: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    if form == "onnx":
        pytest.importorskip("onnxruntime")
        if not torch.__version__.startswith("1."):
            pytest.importorskip("onnx")
    path = tmp_path / "streaming"
    assert main(["export", "librispeech", "--format", form, "--streaming", "--output", str(path)]) == 0
    capsys.readouterr()
    clip = read_audio(sorted(CLIPS.glob("*.flac"))[0], 16000)
    texts = []
    for name in (None, f"{form}:{path}"):
        recognizer = Recognizer(librispeech, "ngram", decoder="token-passing", acoustic_model=name)
        results = [result for result in recognize_stream(recognizer, clip.split(4000)) if result.is_final]
        texts.append([word.text for result in results for word in result.words])
    assert len(texts[0]) > 5
    assert texts[1] == texts[0]


def test_what_cannot_stream_is_told(
    tiny_bundle_folder: Path, tmp_path: Path, network: Tdnnf, capsys: pytest.CaptureFixture[str]
) -> None:
    chunks, path = StreamChunks(4, 4, 40, 0.0), tmp_path / "model"
    with pytest.raises(AsrError, match="its network reads whole utterances; only a TDNN-F"):
        export_acoustic_model(Bundle.load(tiny_bundle_folder), path, "onnx", streaming=chunks)
    given = ["export", str(tiny_bundle_folder), "--format", "onnx", "--output", str(path), "--chunk-seconds", "0.3"]
    assert main(given) == 2
    assert "--chunk-seconds is for streams; add --streaming." in capsys.readouterr().err
    assert main([*given[:-1], "nan", "--streaming"]) == 2
    assert "--chunk-seconds is nan; it must be above 0" in capsys.readouterr().err
    assert not path.exists()


class Odd(torch.nn.Module):
    """A network of chunks that returns too few states or too many frames."""

    def __init__(self, has_states: bool, num_frames: int) -> None:
        super().__init__()
        self.has_states, self.num_frames = has_states, num_frames

    def forward(self, x: torch.Tensor, x_lens: torch.Tensor, state: torch.Tensor) -> list[torch.Tensor]:
        found = [x[:, :, :2], torch.full_like(x_lens, self.num_frames)]
        return [*found, state] if self.has_states else found


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Odd(has_states=False, num_frames=4), "must return log-probabilities, frames and its 1 states; export it"),
        (Odd(has_states=True, num_frames=5), "have 5 to 5 frames, but its output has 4"),
        (Odd(has_states=True, num_frames=-1), "have -1 to -1 frames, but its output has 4"),
    ],
)
def test_chunks_that_come_back_wrong(tmp_path: Path, network: Odd, message: str) -> None:
    traced = torch.jit.trace(network, (torch.zeros(1, 4, 80), torch.tensor([4]), torch.zeros(1)))
    described = {"frame_shift": 0.01, "input": "fbank", "states": [[[1], "float32"]], "T": 4, "decode_chunk_len": 4}
    torchscript.save(traced, tmp_path / "model", CTCTokens(["-", "A"]), **described)
    with pytest.raises(AsrError, match=message):
        load_acoustic_model(f"torchscript:{tmp_path / 'model'}")(torch.rand(4000))
