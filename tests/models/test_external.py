"""Networks of other toolkits, each a tiny random one in that toolkit's own format."""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import json
import math
import os
import pickle
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asr.audio.fbank import Fbank
from asr.bundle import Bundle
from asr.ctc import CTCDecoder, CTCTokens
from asr.ctc.bundles import bundle_with_acoustic_model
from asr.ctc.recognizer import CTCRecognizer
from asr.decoding.settings import ResourceOptions
from asr.errors import AsrError
from asr.kernels.jit import torch_on_one_thread
from asr.models.external import CallableModel, load_acoustic_model
from asr.models.external.nemo_features import NemoFeatures
from asr.models.external.network import ExternalNetwork
from asr.models.external.onnx import OnnxModel, in_unit_range
from asr.models.external.streaming import StateEncoder
from asr.models.external.torchscript import save
from asr.recognizer import Recognizer
from asr.streaming import StreamingOptions, StreamingRecognizer, recognize_stream
from asr.text.lexicon import Lexicon
from tests.models.external_audio import noise, outputs_as_alone

pytestmark = pytest.mark.slow

SYMBOLS = ["<blk>", "|", *"abc"]


class Windows(nn.Module):
    """Samples to logits of windows of 320 samples, as scripted networks are."""

    def __init__(self, num_tokens: int = len(SYMBOLS)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(320, num_tokens)

    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        num_frames = waveform.shape[1] // 320
        frames = waveform[:, : num_frames * 320].reshape(waveform.shape[0], num_frames, 320)
        return 10.0 * self.linear(frames), torch.div(num_samples, 320, rounding_mode="floor")


def test_any_function() -> None:
    model = CallableModel(Windows(), SYMBOLS, sampling_rate=16000, frame_shift=0.02)
    log_prob, num_frames = model([noise(0.4), noise(0.2, 1)])
    assert log_prob.shape == (2, 20, 5)
    assert num_frames.tolist() == [20, 10]
    assert torch.allclose(log_prob.exp().sum(2), torch.ones(2, 20))
    decoder = CTCDecoder(model.tokens, frame_shift=model.frame_shift, warm_up=False)
    assert len(decoder(log_prob, num_frames)) == 2
    slower, _ = model(noise(0.4)[::2], sampling_rate=8000)
    assert slower.shape[1] == 20
    windows = Windows()

    def probabilities(waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        logits, num_frames = windows(waveform, num_samples)
        return logits.softmax(2), num_frames

    found, _ = CallableModel(probabilities, SYMBOLS, 16000, 0.02)([noise(0.4), noise(0.2, 1)])
    assert torch.allclose(found.exp(), log_prob.exp(), atol=1e-6)
    without_lengths = CallableModel(lambda x, n: Windows()(x, n)[0], SYMBOLS, 16000, 0.02)
    assert without_lengths([noise(0.4), noise(0.2)])[1].tolist() == [20, 10]
    with pytest.raises(AsrError, match="it has 4 tokens"):
        CallableModel(Windows(), SYMBOLS[:4], 16000, 0.02)(noise(0.1))
    with pytest.raises(AsrError, match="no empty ones"):
        model(torch.zeros(0))


def test_another_frame_shift_is_warned_of() -> None:
    for shift, rate in ((0.04, 16000), (20, 16000), (0.02, 8000)):
        with pytest.warns(UserWarning, match="mine: the frame_shift is .* frames for 1.00 s, one for each 0.0"):
            CallableModel(Windows(), SYMBOLS, rate, shift, name="mine")([noise(0.5)[: rate // 2], noise(1.0)[:rate]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CallableModel(Windows(), SYMBOLS, 16000, 0.02)([noise(1.0), noise(0.1)])
        CallableModel(Windows(), SYMBOLS, 16000, 0.04)(noise(0.4))  # too few frames to tell
    with pytest.raises(AsrError, match="mine: the function is of type str; give a function or a module"):
        CallableModel("network", SYMBOLS, 16000, 0.02, name="mine")  # type: ignore[arg-type]


def test_recordings_shorter_than_a_window_of_the_network() -> None:
    convolution = nn.Conv1d(1, len(SYMBOLS), kernel_size=400, stride=320)
    model = CallableModel(lambda x, n: convolution(x[:, None]).transpose(1, 2), SYMBOLS, 16000, 0.02)
    recognizer = CTCRecognizer(model, CTCDecoder(SYMBOLS, frame_shift=0.02, warm_up=False))
    long, short = recognizer([noise(0.4), noise(0.001)])
    assert (long.duration, short.duration) == (0.4, 0.001)
    assert all(word.end <= 0.001 for word in short.words)
    assert model([noise(0.001), noise(0.4)])[1].tolist() == [5, 19]  # 0.1 s and 0.4 s


def test_samples_of_any_type() -> None:
    model = CallableModel(Windows(), SYMBOLS, sampling_rate=16000, frame_shift=0.02)
    waveform = (noise(0.4) * 2**15).round() / 2**15
    wanted, _ = model(waveform)
    for given in (
        waveform.numpy(),
        waveform.double(),
        (waveform * 2**15).to(torch.int16),
        [(waveform * 2**31).to(torch.int32).numpy()],
        (waveform * 2**15).to(torch.int16).numpy()[None],
    ):
        assert torch.allclose(model(given)[0], wanted, atol=1e-5)
    for wrong, message in (
        ("x.wav", "the waveform is of type str"),
        (["x.wav"], "waveform 0 is of type str; give a tensor or a NumPy array"),
        ([waveform, waveform > 0], "waveform 1 holds torch.bool"),
        (np.zeros(800, dtype=np.uint8), "waveform 0 holds uint8"),
    ):
        with pytest.raises(AsrError, match=message):
            model(wrong)


def times(factor: float) -> Any:
    return lambda frames: frames * factor


@pytest.mark.parametrize(
    ("output", "frames", "message"),
    [
        (lambda logits: None, None, "is of type NoneType; it must return a tensor of"),
        (lambda logits: logits.numpy(), None, "is of type ndarray; it must return a tensor of"),
        (lambda logits: logits[0], None, r"has the shape \(20, 5\); it must be \(utterances, frames, tokens\)"),
        (lambda logits: logits.unsqueeze(3), None, r"has the shape \(2, 20, 5, 1\); it must be"),
        (lambda logits: logits[:1], None, r"for 2 utterances has the shape \(1, 20, 5\)"),
        (lambda logits: logits.transpose(0, 1), times(1), r"for 2 utterances has the shape \(20, 2, 5\)"),
        (lambda logits: logits[:, :, :4], times(1), r"\(2, 20, 4\), but it has 5 tokens"),
        (lambda logits: logits * math.nan, None, "for utterance 0 has NaN or infinity in frame 0; check its input"),
        (lambda logits: logits + math.inf, None, "for utterance 0 has NaN or infinity in frame 0; check its input"),
        (lambda logits: logits - math.inf, None, "for utterance 0 has NaN or infinity in frame 0; check its input"),
        (lambda logits: logits.clone().index_fill_(1, torch.tensor([12]), math.nan), times(1), "in frame 12; check"),
        (lambda logits: logits, times(2), "have 20 to 40 frames, but its output has 20; it must count frames"),
        (lambda logits: logits, times(-1), "have -20 to -10 frames, but its output has 20"),
        (
            lambda logits: logits,
            times(0.05),
            r"are torch.float32 of the shape \(2,\); they must be a tensor of 2 whole",
        ),
        (lambda logits: logits, lambda frames: frames[:, None], r"are torch.int64 of the shape \(2, 1\); they must"),
        (lambda logits: logits, lambda frames: frames[:1], r"are torch.int64 of the shape \(1,\); they must"),
        (lambda logits: logits, lambda frames: frames.tolist(), r"are \[20, 10\]; they must be a tensor"),
    ],
)
def test_bad_output_is_told(output: Any, frames: Any, message: str) -> None:
    def function(waveform: Tensor, num_samples: Tensor) -> Any:
        logits, num_frames = Windows()(waveform, num_samples)
        return output(logits.detach()) if frames is None else (output(logits.detach()), frames(num_frames))

    model = CallableModel(function, SYMBOLS, 16000, 0.02, name="mine")
    batch = [noise(0.4), noise(0.2)]
    with pytest.raises(AsrError, match=f"^mine: .*{message}"):
        model(batch)
    padded = nn.utils.rnn.pad_sequence(batch, batch_first=True)
    with pytest.raises(AsrError, match=f"^mine: .*{message}"):
        ExternalNetwork.of(model).network(padded.unsqueeze(2), torch.tensor([6400, 3200]))


def test_padding_may_hold_anything() -> None:
    def function(waveform: Tensor, num_samples: Tensor) -> Any:
        logits, num_frames = Windows()(waveform, num_samples)
        padding = torch.arange(logits.shape[1]) >= num_frames[:, None]
        return logits.masked_fill(padding[:, :, None], math.nan), num_frames

    batch = [noise(0.4), noise(0.2)]
    found, num_frames = CallableModel(function, SYMBOLS, 16000, 0.02)(batch)
    wanted, _ = CallableModel(Windows(), SYMBOLS, 16000, 0.02)(batch)
    assert torch.equal(found[1, : num_frames[1]], wanted[1, : num_frames[1]])


def test_the_rate_of_samples_is_a_whole_number_of_any_type() -> None:
    model = CallableModel(Windows(), SYMBOLS, 16000, 0.02)
    assert torch.equal(model(noise(0.4), 8000.0)[0], model(noise(0.4), 8000)[0])  # type: ignore[arg-type]
    for wrong in ("8000", 8000.5, 0):
        with pytest.raises(AsrError, match=r"^the sampling rate is .*; give a whole number of Hz"):
            model(noise(0.4), wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["x", 0, -1, math.nan, math.inf, None, True, [1]])
def test_numbers_must_be_greater_than_0(value: Any) -> None:
    with pytest.raises(AsrError, match=r"^mine: the sampling_rate is .*; give a whole number greater than 0"):
        CallableModel(Windows(), SYMBOLS, value, 0.02, name="mine")
    with pytest.raises(AsrError, match=r"^mine: the frame_shift is .*; give a number greater than 0"):
        CallableModel(Windows(), SYMBOLS, 16000, value, name="mine")


def test_a_missing_package_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchaudio", "torchaudio.pipelines"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AsrError, match=r"needs the package torchaudio\.pipelines, .*; `pip install torchaudio`"):
        load_acoustic_model("torchaudio:WAV2VEC2_ASR_BASE_960H")


def test_recordings_of_any_length() -> None:
    model = CallableModel(Windows(), SYMBOLS, sampling_rate=16000, frame_shift=0.02)
    decoder = CTCDecoder(model.tokens, frame_shift=model.frame_shift, warm_up=False)
    recordings = [noise(0.5), noise(3.0, 1)]
    found = CTCRecognizer(model, decoder, ResourceOptions(max_segment_seconds=1.0))(recordings)
    whole = CTCRecognizer(model, decoder)(recordings)
    assert found[0].text == whole[0].text == decoder(*model(recordings[0]))[0][0].text  # type: ignore[index]
    assert found[1].duration == pytest.approx(3.0)
    times = [(word.start, word.end) for word in found[1].words]
    assert times == sorted(times)
    assert times[-1][1] <= 3.0
    assert times[-1][0] > 1.0
    pcm = (recordings[0] * 2**15).round().clamp(-(2**15), 2**15 - 1).to(torch.int16)
    for given in (pcm, pcm.numpy(), (pcm / 2**15).numpy(), [pcm.numpy()]):
        (result,) = CTCRecognizer(model, decoder)(given)
        assert result.text == whole[0].text
        assert result.total == pytest.approx(whole[0].total, abs=0.05)
    with pytest.raises(AsrError, match="recording 0 has no samples"):
        CTCRecognizer(model, decoder)(torch.zeros(0))
    with pytest.raises(AsrError, match="are not the decoder's 2"):
        CTCRecognizer(model, CTCDecoder(["-", "a"], warm_up=False))


def test_torchscript(tmp_path: Path) -> None:
    network = torch.jit.script(Windows())
    path = tmp_path / "network.pt"
    save(network, path, CTCTokens(SYMBOLS), sampling_rate=16000, frame_shift=0.02)
    model = load_acoustic_model(f"torchscript:{path}")
    wanted = CallableModel(Windows(), SYMBOLS, 16000, 0.02)
    batch = [noise(0.4), noise(0.2)]
    for found, expected in zip(model(batch), wanted(batch), strict=True):
        assert torch.equal(found, expected)
    assert (model.tokens.symbols, model.frame_shift) == (tuple(SYMBOLS), 0.02)


@pytest.mark.parametrize(
    "tokens",
    [
        CTCTokens(["_", "a", "b", "c", "d"], blank=4),  # `_` at the beginning would be taken for the blank
        CTCTokens(["a", "b", "c", "|", ""]),
        CTCTokens(["<blk>", "a", "b", "|", "c"], word_boundary="b"),
        CTCTokens(["<blk>", "|", *"abc"], word_boundary=""),
        CTCTokens(["<blk>", *"abcd"], kind="phones"),
    ],
)
def test_torchscript_keeps_what_tokens_are(tmp_path: Path, tokens: CTCTokens) -> None:
    path = tmp_path / "network.pt"
    save(torch.jit.script(Windows()), path, tokens, frame_shift=0.02)
    found = load_acoustic_model(f"torchscript:{path}").tokens
    for name in ("symbols", "blank_id", "word_boundary", "kind"):
        assert getattr(found, name) == getattr(tokens, name), name


def test_torchscript_takes_tokens_and_their_marks(tmp_path: Path) -> None:
    path = tmp_path / "network.pt"
    save(torch.jit.script(Windows()), path, CTCTokens(SYMBOLS), frame_shift=0.02)
    mine = CTCTokens([*"abcde"], blank=2)
    assert load_acoustic_model(f"torchscript:{path}", tokens=mine).tokens is mine
    given = load_acoustic_model(f"torchscript:{path}", tokens=[*"abc|-"], blank=-1).tokens
    assert (given.blank_id, given.word_boundary) == (4, "|")
    for wrong in ([1], "x"):
        with pytest.raises(AsrError, match=f"^torchscript:{path}: "):
            load_acoustic_model(f"torchscript:{path}", blank=wrong)


def test_torchscript_with_tokens_beside(tmp_path: Path) -> None:
    path = tmp_path / "network.pt"
    torch.jit.script(Windows()).save(str(path))
    with pytest.raises(AsrError, match=r"put tokens\.txt next to it"):
        load_acoustic_model(f"torchscript:{path}")
    (tmp_path / "tokens.txt").write_text("".join(f"{symbol}\n" for symbol in SYMBOLS))
    with pytest.raises(AsrError, match="does not give the frame_shift"):
        load_acoustic_model(f"torchscript:{path}")
    assert load_acoustic_model(f"torchscript:{path}", frame_shift=0.02).frame_shift == 0.02
    path.write_bytes(b"nothing")
    with pytest.raises(AsrError, match="not a readable TorchScript file"):
        load_acoustic_model(f"torchscript:{path}")


FBANK = '{"frame_shift": 0.01, "input": "fbank", "fbank": %s}'


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{", "not a JSON object .*; write the file again"),
        ("[" * 100000, "not a JSON object .it is nested too deeply"),
        ("[1]", "not a JSON object .it is of type list"),
        (b"\xff", "is not UTF-8 text .*; write the file again"),
        ('{"frame_shift": "a"}', "the frame_shift in metadata.json is 'a'; give a number greater than 0"),
        ('{"frame_shift": NaN}', "the frame_shift in metadata.json is nan; give a number"),
        ('{"frame_shift": 0.02, "sampling_rate": null}', "the sampling_rate in metadata.json is None; give a whole"),
        (
            '{"frame_shift": 0.02, "sampling_rate": 8000.5}',
            "the sampling_rate in metadata.json is 8000.5; give a whole",
        ),
        (FBANK % "[1]", "'fbank' of its metadata does not describe a filterbank .*; export it again"),
        (FBANK % '{"bins": 1}', "does not describe a filterbank .*'bins'"),
        (FBANK % '{"num_mel_bins": 0}', "does not describe a filterbank .*num_mel_bins is 0"),
        (FBANK % '{"dither": "a"}', "does not describe a filterbank .*str"),
        (FBANK % '{"sampling_rate": 8000}', "sampling_rate of 8000 Hz, but the network one of 16000 Hz; export"),
    ],
)
def test_bad_metadata_of_torchscript_are_told(tmp_path: Path, metadata: str | bytes, message: str) -> None:
    path = tmp_path / "network.pt"
    content = {"metadata.json": metadata, "tokens.txt": "\n".join(SYMBOLS)}
    torch.jit.save(torch.jit.script(Windows()), str(path), _extra_files=content)
    with pytest.raises(AsrError, match=f"^torchscript:{path}: .*{message}"):
        load_acoustic_model(f"torchscript:{path}")


def test_bad_torchscript_networks_are_told(tmp_path: Path) -> None:
    class Alone(nn.Module):
        def forward(self, waveform: Tensor) -> Tensor:
            return waveform

    class Number(nn.Module):
        def forward(self, waveform: Tensor, num_samples: Tensor) -> int:
            return 3

    path = tmp_path / "network.pt"
    for network, message in [
        (Alone(), "cannot read waveforms and lengths .*; correct metadata.json"),
        (Number(), "is of type int; it must return a tensor"),
    ]:
        save(torch.jit.script(network), path, CTCTokens(SYMBOLS), frame_shift=0.02)
        with pytest.raises(AsrError, match=f"^torchscript:{path}: .*{message}"):
            load_acoustic_model(f"torchscript:{path}")(noise(0.1))
    (tmp_path / "tokens.txt").write_text("a\na\n")
    torch.jit.script(Windows()).save(str(path))
    with pytest.raises(AsrError, match=f"^torchscript:{path}: .*none of the 2 tokens"):
        load_acoustic_model(f"torchscript:{path}", frame_shift=0.02)


@pytest.mark.parametrize("name", ["", "onnx", "kaldi:model", "onnx:"])
def test_names(name: str) -> None:
    with pytest.raises(AsrError, match="is named KIND:NAME"):
        load_acoustic_model(name)


# --- ONNX


def onnx_file(
    path: Path,
    kind: str,
    metadata: dict[str, str],
    num_tokens: int = len(SYMBOLS),
    longer_by: int = 0,
    num_utts: str | int = "N",
    subsampling: int = 1,
) -> np.ndarray:
    """A file in the form of icefall (`x`), of NeMo (`audio_signal`) or of transformers (`input_values`).

    A network of samples (also `waveform`) subtracts the mean of all of them, padding included.
    """
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    width = 320 if kind in ("input_values", "waveform") else 80
    weight = rng.normal(size=(width, num_tokens)).astype(np.float32) / np.float32(np.sqrt(width))
    constants = [numpy_helper.from_array(weight, "weight")]
    make = helper.make_node
    outputs = [helper.make_tensor_value_info("log_probs", TensorProto.FLOAT, [num_utts, "S", num_tokens])]
    if width == 320:
        inputs = [helper.make_tensor_value_info(kind, TensorProto.FLOAT, [num_utts, "L"])]
        constants.append(numpy_helper.from_array(np.array([0, -1, 320], dtype=np.int64), "shape"))
        nodes = [
            make("ReduceMean", [kind], ["mean"], axes=[1]),
            make("Sub", [kind, "mean"], ["centered"]),
            make("Reshape", ["centered", "shape"], ["frames"]),
            make("MatMul", ["frames", "weight"], ["log_probs"]),
        ]
    elif kind == "audio_signal":
        lengths = helper.make_tensor_value_info("length", TensorProto.INT64, ["N"])
        inputs = [helper.make_tensor_value_info(kind, TensorProto.FLOAT, [num_utts, 80, "T"]), lengths]
        slices = {"begin": 0, "end": 2**31, "axis": 1, "step": subsampling}
        constants += [numpy_helper.from_array(np.array([number]), name) for name, number in slices.items()]
        nodes = [
            make("Transpose", [kind], ["all_frames"], perm=[0, 2, 1]),
            make("Slice", ["all_frames", *slices], ["frames"]),
            make("MatMul", ["frames", "weight"], ["logits"]),
            make("LogSoftmax", ["logits"], ["log_probs"], axis=2),
        ]
    else:
        lengths = helper.make_tensor_value_info("x_lens", TensorProto.INT64, ["N"])
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [num_utts, "T", 80]), lengths]
        outputs.append(helper.make_tensor_value_info("log_probs_len", TensorProto.INT64, ["N"]))
        constants.append(numpy_helper.from_array(np.array([longer_by], dtype=np.int64), "more"))
        nodes = [
            make("MatMul", ["x", "weight"], ["logits"]),
            make("LogSoftmax", ["logits"], ["log_probs"], axis=2),
            make("Add", ["x_lens", "more"], ["log_probs_len"]),
        ]
    write_onnx(path, nodes, inputs, outputs, constants, metadata)
    assert onnx
    return weight


def streaming_file(path: Path, metadata: dict[str, str], signal: str = "x") -> np.ndarray:
    """A network whose state is the sum of all features of the chunks so far."""
    pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(80, len(SYMBOLS))) / 80).astype(np.float32)
    make, info = helper.make_node, helper.make_tensor_value_info
    constants = [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(np.array([1]), "axis")]
    nodes = [
        make("ReduceSum", [signal, "axis"], ["sum"], keepdims=1),
        make("Add", ["sum", "cached"], ["new_cached"]),
        make("MatMul", ["new_cached", "weight"], ["logits"]),
        make("LogSoftmax", ["logits"], ["log_probs"], axis=2),
    ]
    inputs = [info(signal, TensorProto.FLOAT, [1, "T", 80]), info("cached", TensorProto.FLOAT, [1, 1, 80])]
    outputs = [
        info("log_probs", TensorProto.FLOAT, [1, 1, len(SYMBOLS)]),
        info("new_cached", TensorProto.FLOAT, [1, 1, 80]),
    ]
    write_onnx(path, nodes, inputs, outputs, constants, metadata)
    return weight


def write_onnx(path: Path, nodes: Any, inputs: Any, outputs: Any, constants: Any, metadata: dict[str, str]) -> None:
    import onnx
    from onnx import helper

    graph = helper.make_graph(nodes, "tiny", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(model, metadata)
    onnx.save(model, str(path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("onnxruntime")
    (tmp_path / "tokens.txt").write_text("".join(f"{symbol} {n}\n" for n, symbol in enumerate(SYMBOLS)))
    return tmp_path


def test_onnx_of_icefall(folder: Path) -> None:
    weight = onnx_file(folder / "model.onnx", "x", {"subsampling_factor": "1"})
    model = load_acoustic_model(f"onnx:{folder}")
    assert (model.frame_shift, model.tokens.symbols) == (0.01, tuple(SYMBOLS))
    batch = [noise(0.3), noise(0.2, 1)]
    log_prob, num_frames = model(batch)
    assert num_frames.tolist() == [30, 20]
    fbank = Fbank(high_freq=-400.0)
    for utterance, found in zip(batch, log_prob, strict=True):
        features = in_unit_range(fbank(utterance.unsqueeze(0), torch.tensor([len(utterance)]))[0])[0]
        wanted = (features @ torch.from_numpy(weight)).log_softmax(1)
        assert torch.allclose(found[: len(wanted)], wanted, atol=1e-4)


def test_quiet_filterbanks_of_icefall_are_those_of_kaldi_native_fbank() -> None:
    knf = pytest.importorskip("kaldi_native_fbank")
    options = knf.FbankOptions()
    options.frame_opts.dither, options.frame_opts.snip_edges = 0.0, False
    options.mel_opts.num_bins, options.mel_opts.high_freq = 80, -400.0
    # Digital silence, noise in the last bit, and speech
    waveform = torch.cat([torch.zeros(1600), (noise(0.1) * 10.0).round() / 2**15, noise(0.1)])
    theirs = knf.OnlineFbank(options)
    theirs.accept_waveform(16000, waveform.tolist())
    theirs.input_finished()
    wanted = np.stack([theirs.get_frame(frame) for frame in range(theirs.num_frames_ready)])
    features, _ = Fbank(high_freq=-400.0)(waveform[None], torch.tensor([len(waveform)]))
    assert np.abs(in_unit_range(features)[0].numpy() - wanted).max() < 1e-3


@pytest.mark.parametrize("name", ["bpe.model", "tokenizer.model"])
def test_the_piece_model_next_to_a_file_spells_words(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Processor:
        def __init__(self, model_file: str) -> None:
            assert model_file == str(folder / name)

        def encode(self, text: str, out_type: type[str]) -> list[str]:
            return ["▁a", "b", "c"]

    pieces = ["<blk>", "▁a", "b", "c", "bc"]
    (folder / "tokens.txt").write_text("".join(f"{symbol} {n}\n" for n, symbol in enumerate(pieces)))
    onnx_file(folder / "model.onnx", "x", {"subsampling_factor": "1"})
    torch.jit.script(Windows()).save(str(folder / "model.pt"))
    sources: list[tuple[str, dict[str, Any]]] = [
        (f"onnx:{folder}", {}), (f"torchscript:{folder / 'model.pt'}", {"frame_shift": 0.02})
    ]  # fmt: skip
    for source, options in sources:
        assert load_acoustic_model(source, **options).tokens.spell("abc") == [("▁a", "bc")]
    (folder / name).touch()
    module = types.ModuleType("sentencepiece")
    module.SentencePieceProcessor = Processor  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec("sentencepiece", None)
    monkeypatch.setitem(sys.modules, "sentencepiece", module)
    for source, options in sources:
        assert load_acoustic_model(source, **options).tokens.spell("abc") == [("▁a", "b", "c")]
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.warns(UserWarning, match="the package sentencepiece is missing"):
        assert load_acoustic_model(f"onnx:{folder}").tokens.spell("abc") == [("▁a", "bc")]
    # Letters need no such model.
    (folder / "tokens.txt").write_text("".join(f"{symbol} {n}\n" for n, symbol in enumerate(SYMBOLS)))
    assert load_acoustic_model(f"onnx:{folder}").tokens.spell("abc") == [("a", "b", "c", "|")]


@pytest.mark.parametrize("kind", ["x", "audio_signal", "input_values"])
def test_onnx_of_one_recording(folder: Path, kind: str) -> None:
    metadata, batch = {"subsampling_factor": "1"}, [noise(0.32), noise(0.16, 1)]
    onnx_file(folder / "model.onnx", kind, metadata)
    wanted, num_wanted = load_acoustic_model(f"onnx:{folder}")(batch)
    onnx_file(folder / "model.onnx", kind, metadata, num_utts=1)
    found, num_frames = load_acoustic_model(f"onnx:{folder}")(batch)
    assert torch.equal(num_frames, num_wanted)
    for one, other, num in zip(found, wanted, num_frames, strict=True):
        assert torch.allclose(one[:num], other[:num], atol=1e-4)


def test_onnx_of_wenet(folder: Path) -> None:
    metadata = {"subsampling_factor": "1", "model_type": "wenet_ctc"}
    weight = onnx_file(folder / "model.onnx", "x", metadata)
    log_prob, _ = load_acoustic_model(f"onnx:{folder}")(noise(0.3))
    features = Fbank(high_freq=0.0)(noise(0.3)[None], torch.tensor([4800]))[0][0]
    assert torch.allclose(log_prob[0], (features @ torch.from_numpy(weight)).log_softmax(1), atol=1e-4)


def test_onnx_of_nemo(folder: Path) -> None:
    weight = onnx_file(
        folder / "model.onnx", "audio_signal", {"subsampling_factor": "1", "normalize_type": "per_feature"}
    )
    model = load_acoustic_model(f"onnx:{folder / 'model.onnx'}")
    log_prob, num_frames = model(noise(0.3))
    features, lengths = NemoFeatures(80, 16000, "per_feature")(noise(0.3).unsqueeze(0), torch.tensor([4800]))
    assert num_frames.tolist() == lengths.tolist() == [31]
    assert torch.allclose(features.mean(1), torch.zeros(80), atol=1e-4)
    assert torch.allclose(log_prob[0], (features[0] @ torch.from_numpy(weight)).log_softmax(1), atol=1e-4)


def test_a_network_that_is_loaded_while_torch_has_one_thread_has_all(folder: Path, threads: int) -> None:
    """Commands load recognizers with torch on one thread; onnxruntime fixes the number when it reads a file."""
    onnx_file(folder / "model.onnx", "x", {"subsampling_factor": "1"})
    with torch_on_one_thread():
        model = load_acoustic_model(f"onnx:{folder}")
    assert model._session.get_session_options().intra_op_num_threads == threads


def test_an_onnx_network_is_copied_whole_from_any_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx_file(folder / "model.onnx", "input_values", {})
    monkeypatch.chdir(folder)
    model = OnnxModel("model.onnx", "tokens.txt", frame_shift=0.03, blank=SYMBOLS[1], normalize=False)
    monkeypatch.chdir("/")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (copied.frame_shift, copied.tokens.blank_id) == (0.03, 1)
        assert torch.equal(copied(noise(0.2))[0], model(noise(0.2))[0])


@pytest.mark.parametrize("subsampling", [1, 4, 8])
def test_frame_shift_of_onnx_without_metadata(folder: Path, subsampling: int) -> None:
    """As NeMo writes it. 10 seconds have 126 frames of 0.08 s."""
    onnx_file(folder / "model.onnx", "audio_signal", {}, subsampling=subsampling)
    model = load_acoustic_model(f"onnx:{folder}")
    assert model.frame_shift == pytest.approx(0.01 * subsampling, abs=1e-9)


def test_onnx_of_transformers(folder: Path) -> None:
    """Its feature extractor gives each recording mean 0 and variance 1, unless its description says otherwise."""
    weight = torch.from_numpy(onnx_file(folder / "model.onnx", "input_values", {}))
    (folder / "tokens.txt").unlink()
    (folder / "vocab.json").write_text(json.dumps({symbol: column for column, symbol in enumerate(SYMBOLS)}))
    model = load_acoustic_model(f"onnx:{folder}")
    assert (model.frame_shift, model.tokens.symbols) == (0.02, tuple(SYMBOLS))
    batch = [noise(0.32), 0.2 * noise(0.16, 1) + 0.1]
    log_prob, num_frames = model(batch)
    assert num_frames.tolist() == [16, 8]
    for utterance, found, num in zip(batch, log_prob, num_frames, strict=True):
        normal = (utterance - utterance.mean()) / utterance.std(unbiased=False)
        assert torch.allclose(found[:num], (normal.view(-1, 320) @ weight).log_softmax(1), atol=1e-3)
    preprocessor = folder / "preprocessor_config.json"
    preprocessor.write_text('{"do_normalize": false, "sampling_rate": 8000}')
    model = load_acoustic_model(f"onnx:{folder}")
    assert (model.frame_shift, model.sampling_rate) == (0.04, 8000)
    wanted = ((batch[0] - batch[0].mean()).view(-1, 320) @ weight).log_softmax(1)
    assert torch.allclose(model(batch[0])[0][0], wanted, atol=1e-4)
    # A bundle keeps this without the description.
    bundle_with_acoustic_model(model, lexicon=lexicon_of_letters(), graph_folder=folder).save(folder / "bundle")
    network = Bundle.load(folder / "bundle").acoustic_model.network
    found, _ = network(batch[0][None, :, None], torch.tensor([len(batch[0])]))
    assert torch.allclose(found[0, : len(wanted)], wanted, atol=1e-4)
    for content, message in (("[]", "is not a JSON object .*list"), ('{"sampling_rate": 0}', "the sampling_rate in")):
        preprocessor.write_text(content)
        with pytest.raises(AsrError, match=f"^onnx:{folder}/model.onnx: .*{message}"):
            load_acoustic_model(f"onnx:{folder}")


def test_bundles_of_onnx_files_with_weights_elsewhere_are_refused(folder: Path) -> None:
    onnx = pytest.importorskip("onnx")
    onnx_file(folder / "model.onnx", "x", {"subsampling_factor": "1"})
    model = onnx.load(str(folder / "model.onnx"))
    onnx.save(model, str(folder / "model.onnx"), save_as_external_data=True, location="weights", size_threshold=0)
    bundle = bundle_with_acoustic_model(f"onnx:{folder}", lexicon=lexicon_of_letters(), graph_folder=folder)
    with pytest.raises(AsrError, match=f"^onnx:{folder}/model.onnx: a bundle holds one file .* other files, save them"):
        bundle.save(folder / "bundle")
    assert not (folder / "bundle").exists()


@pytest.fixture
def weights_elsewhere(folder: Path) -> Callable[[str], Any]:
    """Writes `model.onnx` with its weights in the file of a location, and loads it."""

    def load(location: str) -> Any:
        import onnx

        onnx_file(folder / "model.onnx", "x", {"subsampling_factor": "1"})
        model = onnx.load(str(folder / "model.onnx"))
        weight = next(one for one in model.graph.initializer if one.name == "weight")
        (folder / location).write_bytes(weight.raw_data)
        weight.ClearField("raw_data")
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        return load_acoustic_model(f"onnx:{folder}")

    return load


def test_onnx_with_weights_outside_of_its_folder_is_refused(
    folder: Path, weights_elsewhere: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "weights"
    (folder / "link").symlink_to(elsewhere)
    for location in (str(elsewhere), os.path.relpath(elsewhere, folder), "link"):
        message = f"^onnx:{folder}/model.onnx: it has weights in '{location}', which is not in its folder; save them"
        with pytest.raises(AsrError, match=message):
            weights_elsewhere(location)


def test_onnx_with_weights_in_its_folder_is_read(folder: Path, weights_elsewhere: Callable[[str], Any]) -> None:
    whole = weights_elsewhere("weights")(noise(0.3))[0]
    # The Hugging Face Hub's cache has links to files in a folder with all of them.
    (folder / "blobs").mkdir()
    for name in ("model.onnx", "weights"):
        (folder / name).rename(folder / "blobs" / f"{name}-1")
        (folder / name).symlink_to(folder / "blobs" / f"{name}-1")
    assert torch.equal(load_acoustic_model(f"onnx:{folder}")(noise(0.3))[0], whole)


def test_onnx_without_lengths_reads_each_recording_alone(folder: Path) -> None:
    onnx_file(folder / "model.onnx", "waveform", {})
    model = load_acoustic_model(f"onnx:{folder}")
    batch = [noise(0.32), noise(0.16, 1) + 0.1]
    log_prob, num_frames = model(batch)
    assert num_frames.tolist() == [16, 8]
    for utterance, found, num in zip(batch, log_prob, num_frames, strict=True):
        assert torch.allclose(found[:num], model(utterance)[0][0], atol=1e-5)


def test_onnx_in_chunks(folder: Path) -> None:
    weight = streaming_file(folder / "model.onnx", {"T": "4", "decode_chunk_len": "4", "subsampling_factor": "4"})
    model = load_acoustic_model(f"onnx:{folder}")
    assert isinstance(model, OnnxModel)
    assert model.is_streaming
    assert model.frame_shift == 0.04
    waveform = noise(0.32)
    whole, num_frames = model(waveform)
    assert num_frames.tolist() == [8]
    features = in_unit_range(Fbank(high_freq=-400.0)(waveform.unsqueeze(0), torch.tensor([len(waveform)]))[0])[0]
    sums = features.reshape(8, 4, 80).sum(1).cumsum(0)
    assert torch.allclose(whole[0], (sums @ torch.from_numpy(weight)).log_softmax(1), atol=1e-3)
    decoder = CTCDecoder(model.tokens, frame_shift=model.frame_shift, warm_up=False)
    wanted = decoder(whole)[0][0]
    for size in (700, 1600, 5120):
        stream, words = model.stream(), decoder.stream()
        pieces = waveform.split(size)
        for number, piece in enumerate(pieces):
            words.accept(stream.accept(piece, is_last=number == len(pieces) - 1))
        found = words.finish()
        assert found.text == wanted.text
        assert found.score == pytest.approx(wanted.score, abs=1e-3)


def test_every_frame_of_a_stream_has_an_output(folder: Path) -> None:
    """Networks that look ahead are given silence after the end, however the samples are split."""
    weight = streaming_file(folder / "model.onnx", {"T": "6", "decode_chunk_len": "4", "subsampling_factor": "4"})
    model = load_acoustic_model(f"onnx:{folder}")
    waveform = noise(0.3)  # 30 frames: chunks begin at 0, 4, ... 28
    features = in_unit_range(Fbank(high_freq=-400.0)(waveform[None], torch.tensor([4800]))[0])[0]
    silence = torch.full((4, 80), math.log(torch.finfo(torch.float32).eps))
    sums = torch.cat([features, silence]).unfold(0, 6, 4).sum(2).cumsum(0)
    wanted = (sums @ torch.from_numpy(weight)).log_softmax(1)
    for size in (4800, 1600, 700, 80):
        stream, pieces = model.stream(), waveform.split(size)
        found = [stream.accept(piece, is_last=number == len(pieces) - 1) for number, piece in enumerate(pieces)]
        assert torch.allclose(torch.cat(found), wanted, atol=1e-3)


def test_streams_of_an_onnx_network(folder: Path) -> None:
    streaming_file(folder / "model.onnx", {"T": "4", "decode_chunk_len": "4", "subsampling_factor": "4"})
    made = bundle_with_acoustic_model(f"onnx:{folder}", lexicon=lexicon_of_letters(), graph_folder=folder)
    recognizer = Recognizer(made, decoder="token-passing", options={"word_insertion_penalty": 8.0})
    waveform = noise(1.0)
    (whole,) = recognizer(waveform)
    assert whole.words
    for size in (700, 16000):
        results = list(recognize_stream(recognizer, waveform.split(size)))
        assert results[-1].is_final
        assert results[-1].text == whole.text
        assert results[-1].total == pytest.approx(whole.total, abs=1e-2)
    with pytest.raises(AsrError, match=r"left_seconds sets windows, but onnx:.* keeps states"):
        StreamingRecognizer(recognizer, StreamingOptions(left_seconds=2.0))


def test_streams_with_states_read_one_chunk_a_step(folder: Path) -> None:
    """So that an utterance may end after each chunk, however many samples were pushed."""
    streaming_file(folder / "model.onnx", {"T": "4", "decode_chunk_len": "4", "subsampling_factor": "4"})
    model = load_acoustic_model(f"onnx:{folder}")
    network: Any = ExternalNetwork.of(model).network
    waveform = noise(0.32)
    wanted, _ = network(waveform[None, :, None], torch.tensor([len(waveform)]))
    for sizes in ([5120], [700, 4420], [80] * 64):
        stream = StateEncoder(network).open(torch.device("cpu"))
        for piece in waveform.split(sizes):
            stream.push(piece[:, None])
        stream.close()
        found = []
        while stream.is_ready:
            found += StateEncoder(network).step([stream])
        # The last one has the boundary after the last word.
        assert max(map(len, found[:-1])) == 1
        assert torch.allclose(torch.cat(found), wanted[0], atol=1e-4)


def lexicon_of_letters() -> Lexicon:
    return Lexicon({word: [(*word.lower(), "|")] for word in ("A", "BC", "CAB")})


def test_bad_onnx_is_told(folder: Path) -> None:
    path = folder / "model.onnx"
    (folder / ".0123456789abcdef.model.onnx").write_bytes(b"unfinished")
    with pytest.raises(AsrError, match="0 ONNX files"):
        load_acoustic_model(f"onnx:{folder}")
    path.write_bytes(b"nothing")
    with pytest.raises(AsrError, match="not a readable ONNX file"):
        load_acoustic_model(f"onnx:{folder}")
    streaming_file(path, {})
    with pytest.raises(
        AsrError, match=r"keeps states \(cached\), but its metadata have no field 'T', .*; export it again"
    ):
        load_acoustic_model(f"onnx:{folder}")
    streaming_file(path, {}, "audio_signal")
    with pytest.raises(AsrError, match=r"reads audio_signal and keeps states .cached.; .* export it for whole"):
        load_acoustic_model(f"onnx:{folder}")
    onnx_file(path, "x", {"subsampling_factor": "1"}, num_tokens=9)
    with pytest.raises(AsrError, match="it has 5 tokens"):
        load_acoustic_model(f"onnx:{folder}")(noise(0.1))
    onnx_file(path, "x", {"subsampling_factor": "1"})
    model = load_acoustic_model(f"onnx:{folder}")
    assert isinstance(model, OnnxModel)
    with pytest.raises(AsrError, match="cannot stream"):
        model.stream()
    (folder / "tokens.txt").unlink()
    with pytest.raises(AsrError, match=r"put tokens\.txt next to it"):
        load_acoustic_model(f"onnx:{folder}")


@pytest.mark.parametrize(
    ("kind", "metadata", "message"),
    [
        ("x", {"sample_rate": "abc"}, "the field 'sample_rate' of its metadata is 'abc'; give a whole number"),
        ("x", {"subsampling_factor": "four"}, "the field 'subsampling_factor' of its metadata is 'four'; give a whole"),
        ("x", {"subsampling_factor": "0"}, "the field 'subsampling_factor' of its metadata is '0'; give a whole"),
        ("x", {"fbank": "{"}, "the field 'fbank' of its metadata is not JSON .*; export it again"),
        ("x", {"fbank": "[]"}, "the field 'fbank' of its metadata does not describe a filterbank .*; export it again"),
        ("x", {"fbank": '{"frame_shift_ms": 1e300}'}, "does not describe a filterbank .*; export it again"),
        ("x", {"fbank": '{"num_mel_bins": 40}'}, "describes 40 features, but its input 'x' has 80; export it again"),
        ("x", {"fbank": '{"sampling_rate": 8000}'}, "of 8000 Hz, but the network one of 16000 Hz; export it again"),
        ("x", {"feature": "whisper"}, "say feature = whisper, so that it reads features that are not computed here"),
        ("x", {"model_type": "telespeech_ctc"}, "say model_type = telespeech_ctc, so that it reads features"),
        ("x", {"mean": "1.0,2.0", "invstd": "1.0,1.0"}, "say mean, so that it reads features"),
        ("audio_signal", {"is_giga_am": "1", "normalize_type": ""}, "say is_giga_am = 1, so that it reads features"),
        ("x", {"sample_rate": "50"}, "Fbank: sampling_rate is 50; give a whole number of Hz from 1000"),
        ("audio_signal", {"sample_rate": "50"}, "cannot be used at 50 Hz, only from 100 to 20480 Hz"),
        ("audio_signal", {"sample_rate": "44100"}, "cannot be used at 44100 Hz, only from 100 to 20480 Hz"),
        ("audio_signal", {"normalize_type": "all"}, "the normalization 'all' is unknown"),
    ],
)
def test_bad_metadata_of_onnx_are_told(folder: Path, kind: str, metadata: dict[str, str], message: str) -> None:
    onnx_file(folder / "model.onnx", kind, metadata)
    with pytest.raises(AsrError, match=f"^onnx:{folder}/model.onnx: .*{message}"):
        load_acoustic_model(f"onnx:{folder}")


@pytest.mark.parametrize(
    ("size", "shift", "message"),
    [
        ("x", "4", "the field 'T' of its metadata is 'x'; give a whole number"),
        ("4", "0", "the field 'decode_chunk_len' of its metadata is '0'; give a whole number"),
        ("4", "8", "chunks have T = 4 frames and are decode_chunk_len = 8 frames apart; .* export it again"),
    ],
)
def test_bad_chunks_of_onnx_are_told(folder: Path, size: str, shift: str, message: str) -> None:
    streaming_file(folder / "model.onnx", {"T": size, "decode_chunk_len": shift})
    with pytest.raises(AsrError, match=f"^onnx:{folder}/model.onnx: .*{message}"):
        load_acoustic_model(f"onnx:{folder}")


def test_bad_frames_of_onnx_are_told(folder: Path) -> None:
    onnx_file(folder / "model.onnx", "x", {"subsampling_factor": "1"}, longer_by=3)
    with pytest.raises(AsrError, match=f"^onnx:{folder}/model.onnx: .*have 23 to 33 frames, but its output has 30"):
        load_acoustic_model(f"onnx:{folder}")([noise(0.3), noise(0.2)])


def test_onnx_of_transformers_with_a_mask(folder: Path) -> None:
    pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    make, info = helper.make_node, helper.make_tensor_value_info
    weight = np.random.default_rng(0).normal(size=(320, len(SYMBOLS))).astype(np.float32) / 18
    constants = [
        numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(np.array([0, -1, 320]), "shape"),
    ]  # fmt: skip
    nodes = [
        make("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        make("Mul", ["input_values", "mask"], ["samples"]),
        make("Reshape", ["samples", "shape"], ["frames"]),
        make("MatMul", ["frames", "weight"], ["logits"]),
    ]
    inputs = [
        info("input_values", TensorProto.FLOAT, ["N", "L"]),
        info("attention_mask", TensorProto.INT64, ["N", "L"]),
    ]
    outputs = [info("logits", TensorProto.FLOAT, ["N", "S", len(SYMBOLS)])]
    write_onnx(folder / "model.onnx", nodes, inputs, outputs, constants, {})
    model = load_acoustic_model(f"onnx:{folder}")
    batch = [noise(0.32), noise(0.16, 1)]
    log_prob, num_frames = model(batch)
    assert (model.frame_shift, num_frames.tolist()) == (0.02, [16, 8])
    normal = (batch[1] - batch[1].mean()) / batch[1].std(unbiased=False)
    wanted = (normal.view(-1, 320) @ torch.from_numpy(weight)).log_softmax(1)
    assert torch.allclose(log_prob[1, :8], wanted, atol=1e-3)


def test_onnx_with_other_inputs_is_told(folder: Path) -> None:
    pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    info = helper.make_tensor_value_info
    path = folder / "model.onnx"
    node = helper.make_node("Add", ["picture", "mask"], ["out"])
    shape = [1, 3, 8, 8]
    inputs = [info("picture", TensorProto.FLOAT, shape), info("mask", TensorProto.FLOAT, shape)]
    write_onnx(path, [node], inputs, [info("out", TensorProto.FLOAT, shape)], [], {})
    with pytest.raises(
        AsrError, match=r"neither a signal and its lengths nor a signal and states .*; export it for whole"
    ):
        load_acoustic_model(f"onnx:{folder}")
    features = info("input_features", TensorProto.FLOAT, ["N", "T", 160])
    node = helper.make_node("Identity", ["input_features"], ["out"])
    write_onnx(path, [node], [features], [info("out", TensorProto.FLOAT, ["N", "T", 160])], [], {})
    with pytest.raises(AsrError, match=r"it reads input_features, .*; give the network as transformers:NAME"):
        load_acoustic_model(f"onnx:{folder}")
    node = helper.make_node("Identity", ["picture"], ["out"])
    write_onnx(path, [node], inputs[:1], [info("out", TensorProto.FLOAT, shape)], [], {})
    with pytest.raises(AsrError, match="'picture' has 4 dimensions"):
        load_acoustic_model(f"onnx:{folder}")


def test_filterbanks_of_nemo_are_those_of_kaldi_native_fbank() -> None:
    knf = pytest.importorskip("kaldi_native_fbank")
    options = knf.FbankOptions()
    options.frame_opts.dither, options.frame_opts.window_type = 0.0, "hann"
    options.frame_opts.remove_dc_offset, options.frame_opts.snip_edges = False, False
    options.frame_opts.preemph_coeff = 0.97
    options.mel_opts.num_bins, options.mel_opts.low_freq, options.mel_opts.high_freq = 80, 0.0, 0.0
    options.mel_opts.is_librosa = True
    theirs = knf.OnlineFbank(options)
    waveform = noise(0.5)
    theirs.accept_waveform(16000, waveform.tolist())
    theirs.input_finished()
    wanted = np.stack([theirs.get_frame(frame) for frame in range(theirs.num_frames_ready)])
    found = NemoFeatures(80, 16000, "")(waveform.unsqueeze(0), torch.tensor([len(waveform)]))[0][0].numpy()
    # The two cut windows a few samples apart; their averages agree.
    assert np.abs(found[2:-3].mean(0) - wanted[2 : len(found) - 3].mean(0)).mean() < 0.1


# --- torchaudio and transformers


def torchaudio(part: str) -> Any:
    """A module of torchaudio, whose libraries may not load."""
    try:
        return importlib.import_module(f"torchaudio.{part}")
    except (ImportError, OSError) as error:
        pytest.skip(f"no torchaudio: {error}")


def tiny_wav2vec2(torchaudio_models: Any, num_tokens: int, norm: str = "layer_norm") -> Any:
    torch.manual_seed(0)
    return torchaudio_models.wav2vec2_model(
        extractor_mode=norm, extractor_conv_layer_config=[(8, 10, 5), (8, 8, 4), (8, 4, 4)],
        extractor_conv_bias=True, encoder_embed_dim=16, encoder_projection_dropout=0.0, encoder_pos_conv_kernel=4,
        encoder_pos_conv_groups=2, encoder_num_layers=1, encoder_num_heads=2, encoder_attention_dropout=0.0,
        encoder_ff_interm_features=16, encoder_ff_interm_dropout=0.0, encoder_dropout=0.0,
        encoder_layer_norm_first=False, encoder_layer_drop=0.0, aux_num_out=num_tokens,
    ).eval()  # fmt: skip


def test_torchaudio_network() -> None:
    models = torchaudio("models")
    from asr.models.external.torchaudio import TorchaudioModel

    labels = ("-", "|", "A", "B", "C")
    model = TorchaudioModel(tiny_wav2vec2(models, 5), labels)
    assert model.frame_shift == pytest.approx(80 / 16000)
    batch = [noise(0.2), noise(0.1)]
    log_prob, num_frames = outputs_as_alone(model, batch, atol=1e-4)
    decoder = CTCDecoder(model.tokens, words=["AB", "CAB"], frame_shift=model.frame_shift, warm_up=False)
    assert len(decoder(log_prob, num_frames)) == 2
    with pytest.raises(AsrError, match=r"^Windows: it is not a network like Wav2Vec2Model .*; use CallableModel"):
        TorchaudioModel(Windows(), labels)
    with pytest.raises(AsrError, match=r"^Wav2Vec2Model: the sampling_rate is 0; give a whole number"):
        TorchaudioModel(tiny_wav2vec2(models, 5), labels, 0)
    with pytest.raises(AsrError, match=r"^Wav2Vec2Model: .*the token 'A' occurs twice"):
        TorchaudioModel(tiny_wav2vec2(models, 5), ("-", "|", "A", "A", "C"))
    with pytest.raises(AsrError, match=r"^Wav2Vec2Model: the network cannot read this audio .* may be too short"):
        model.forward(noise(0.0005)[None], torch.tensor([8]))


@pytest.mark.slow
def test_wav2vec2_base_of_torchaudio() -> None:
    """The network as torchaudio builds it, with random weights: words of the list, the same whatever else is read."""
    models = torchaudio("models")
    from asr.models.external.torchaudio import TorchaudioModel

    labels = ("-", "|", *"ETAONIHSRDLUMWCFGYPBVK'XJQZ")
    torch.manual_seed(0)
    model = TorchaudioModel(models.wav2vec2_base(aux_num_out=len(labels)).eval(), labels)
    assert model.frame_shift == pytest.approx(0.02)
    decoder = CTCDecoder(model.tokens, words=["A", "HELLO", "THE", "WORLD"], frame_shift=model.frame_shift)
    batch = [noise(1.5), noise(0.7)]
    log_prob, num_frames = model(batch)
    assert num_frames.tolist() == [74, 34]
    texts = [hypotheses[0].text for hypotheses in decoder(log_prob, num_frames)]
    assert set(" ".join(texts).split()) <= {"A", "HELLO", "THE", "WORLD"} and any(texts)
    assert texts == [decoder(*model(utterance))[0][0].text for utterance in batch]


@pytest.mark.parametrize("norm", ["layer_norm", "group_norm"])
def test_torchaudio_recordings_do_not_depend_on_others(norm: str) -> None:
    models = torchaudio("models")
    from asr.models.external.torchaudio import TorchaudioModel

    model = TorchaudioModel(tiny_wav2vec2(models, 5, norm), ("-", "|", "A", "B", "C"))
    batch = [noise(0.2), noise(0.1)]
    log_prob, num_frames = model(batch)
    for utterance, found, num in zip(batch, log_prob, num_frames, strict=True):
        single, _ = model(utterance)
        assert len(single[0]) == num
        assert torch.allclose(found[:num], single[0], atol=1e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64], ids=str)
def test_torchaudio_network_of_another_type(kind: torch.dtype) -> None:
    try:
        models = importlib.import_module("torchaudio.models")
    except (ImportError, OSError) as error:
        pytest.skip(f"no torchaudio: {error}")
    from asr.models.external.torchaudio import TorchaudioModel

    model = TorchaudioModel(tiny_wav2vec2(models, 5), ("-", "|", "A", "B", "C"))
    wanted, _ = model(noise(0.2))
    model.network.to(kind)
    found, _ = model(noise(0.2))
    assert found.dtype == torch.float32 and (found.exp() - wanted.exp()).abs().max() < 0.1


def test_torchaudio_norm_of_waveforms() -> None:
    """In some pipelines, the whole batch is normalized."""
    from asr.models.external.torchaudio import TorchaudioModel

    class Normalizing(nn.Module):
        normalize_waveform = True

        def __init__(self) -> None:
            super().__init__()
            self.feature_extractor = nn.Conv1d(1, 5, 320, 320)

        def forward(self, waveform: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            normal = nn.functional.layer_norm(waveform, waveform.shape)
            return self.feature_extractor(normal.unsqueeze(1)).transpose(1, 2), lengths // 320

    model = TorchaudioModel(Normalizing(), ("-", "|", "A", "B", "C"))
    batch = [noise(0.4), 5.0 * noise(0.2)]
    log_prob, num_frames = model(batch)
    assert num_frames.tolist() == [20, 10]
    for utterance, found, num in zip(batch, log_prob, num_frames, strict=True):
        assert torch.equal(found[:num], model(utterance)[0][0])


def test_torchaudio_names() -> None:
    torchaudio("pipelines")
    for name in ("WAV2VEC2_BASE", "Wav2Vec2ASRBundle", "no such name"):
        with pytest.raises(AsrError, match=r"no such CTC pipeline; there are .*WAV2VEC2_ASR_BASE_960H"):
            load_acoustic_model(f"torchaudio:{name}")


def test_torchaudio_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torchaudio("pipelines")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))

    def no_network(*args: object, **kwargs: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", no_network)
    for module in ("torchaudio._internal", "torchaudio._internal.module_utils", "torchaudio.pipelines._wav2vec2.utils"):
        try:
            loaded = importlib.import_module(module)
        except ImportError:
            continue
        if hasattr(loaded, "load_state_dict_from_url"):
            monkeypatch.setattr(loaded, "load_state_dict_from_url", no_network)
    with pytest.raises(AsrError, match=r"put the file \S+\.pth into .*checkpoints"):
        load_acoustic_model("torchaudio:WAV2VEC2_ASR_BASE_10M")
