"""Acoustic models as ONNX and TorchScript files, which need none of this program's code.

A file reads filterbanks: features (N, T, F) float32 and num_frames (N,) int64 in, natural log-probabilities (N, T', C)
and their frames (N,) out; it normalizes utterances itself. Inputs and outputs of ONNX files have the names that icefall
gives them. Tokens and the settings of the filterbank are in the file, so that `onnx:` and `torchscript:` of
`asr.models.external` need no other files.

A streaming file reads one stream, chunk by chunk. It includes what `asr.streaming` does around the network: its states
are the features before a chunk that its outputs depend on, the sums that normalize the features, and whether speech has
begun. Log-probabilities equal those of a stream through the bundle itself, except in long pauses (`asr.models.pauses`),
which files leave to the network.

Shapes: N utterances, T frames (of a chunk and its right context), F features, H frames of history, T' frames of output,
C tokens.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.bundle import Bundle
from asr.errors import AsrError
from asr.models.external import onnx, torchscript
from asr.models.external.network import ExternalNetwork
from asr.models.interface import LOG_PROB_IN_NOISE, STD_FLOOR, BoundedNetwork, UtteranceCmvn
from asr.models.pauses import DIGITAL_SILENCE
from asr.models.tdnnf import FrameNorm
from asr.serialization import atomic_path
from asr.text.ctc_tokens import CTCTokens

FORMATS = ("onnx", "torchscript")
_IS_TORCH_1 = torch.__version__.startswith("1.")
_OPSET = 14
# Lengths of the recordings that the network is traced with; the longer one has a pause, which normalization leaves out.
_FRAMES = (240, 97)
_DYNAMIC_AXES = {
    "x": {0: "N", 1: "T"},
    "x_lens": {0: "N"},
    "log_probs": {0: "N", 1: "T'"},
    "log_probs_len": {0: "N"},
}

STATES = ("left_features", "num_left", "feature_sums", "feature_count", "has_begun", "in_pause")
"""Names of the states, which all begin as zeros. Those after a chunk have the prefix `new_`."""


class StreamChunks(NamedTuple):
    """The chunks of a stream, in frames of output.

    Args:
        chunk: outputs per call.
        right: right context that the network sees.
        memory: the maximum number of frames that count in the normalization of the features.
        min_feature_std: standard deviation of the features below which the beginning of a stream is noise.
    """

    chunk: int
    right: int
    memory: int
    min_feature_std: float


class StreamingNetwork(nn.Module):
    """A network with the normalization of a stream's features, and the states that both need between calls.

    Args:
        network: in evaluation mode, traceable.
        chunks: sizes.
    """

    def __init__(self, network: BoundedNetwork, chunks: StreamChunks) -> None:
        super().__init__()
        self.network = network
        self.chunks = chunks
        self.factor = network.subsampling_factor
        self.num_frames = (chunks.chunk + chunks.right) * self.factor
        """T, frames of features per call."""
        self.shift = chunks.chunk * self.factor
        """Frames of features from the beginning of one call to that of the next."""
        self.num_history = -(-network.left_context // self.factor) * self.factor
        """H, frames of features kept before a chunk."""

    def initial_states(self) -> tuple[Tensor, ...]:
        """The states at the beginning of a stream, all zero, in the order of `STATES`."""
        num_features = self.network.num_features
        return (
            torch.zeros(1, self.num_history, num_features),
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(2, num_features, dtype=torch.float64),
            torch.zeros(1, dtype=torch.float64),
            torch.zeros(1),
            torch.zeros(1),
        )

    def forward(
        self,
        x: Tensor,
        x_lens: Tensor,
        left_features: Tensor,
        num_left: Tensor,
        feature_sums: Tensor,
        feature_count: Tensor,
        has_begun: Tensor,
        in_pause: Tensor,
    ) -> tuple[Tensor, ...]:
        """Evaluates one chunk. Fewer frames than T end the stream and yield all remaining outputs.

        Args:
            x: (1, T, F) float32, zeros after the last frame.
            x_lens: (1,) int64, number of frames.
            left_features: (1, H, F), the features right before x at the end.
            num_left: (1,) int64, how many of them are valid.
            feature_sums: (2, F) float64, sums of values and squares.
            feature_count: (1,) float64, number of frames in these sums.
            has_begun, in_pause: (1,) float32, 1 for yes.

        Returns:
            Log-probabilities (1, T', C), the number of valid frames among them (1,), and the new states in the same
            order.
        """
        is_whole = x_lens == self.num_frames
        number = torch.arange(self.num_frames)
        is_seen = number < x_lens
        seen = x[0].double()

        # Features are normalized by all frames so far and those of this call, without digital silence.
        is_audible = is_seen & (x[0].mean(dim=1) > DIGITAL_SILENCE)
        sums = feature_sums + _sums(seen, is_audible)
        count = (feature_count + is_audible.double().sum()).clamp(min=1.0)
        mean = sums[0] / count
        std = (sums[1] / count - mean.square()).clamp(min=0.0).sqrt()
        begun = (has_begun > 0.5) | (std.mean().unsqueeze(0) >= self.chunks.min_feature_std)
        is_left = torch.arange(self.num_history) >= self.num_history - num_left
        window = torch.cat([left_features, x], dim=1)
        normal = (window - mean.float()) / std.float().clamp(min=STD_FLOOR)
        inside = torch.cat([is_left, is_seen])[None, :, None]
        normal = torch.where(inside, normal, torch.zeros_like(normal))
        outputs, _ = self.network.forward_normalized(normal, x_lens + self.num_history)
        log_prob = outputs[-1][:, self.num_history // self.factor :]
        noise = torch.full_like(log_prob, LOG_PROB_IN_NOISE)
        noise = torch.cat([torch.zeros_like(noise[:, :, :1]), noise[:, :, 1:]], dim=2)
        log_prob = torch.where(begun[:, None, None], log_prob, noise)

        whole = torch.full_like(x_lens, self.chunks.chunk)
        num_outputs = torch.where(
            is_whole, whole, torch.div(x_lens + self.factor - 1, self.factor, rounding_mode="floor")
        )
        # Only the first chunk of a pause counts.
        has_word = (log_prob[0].argmax(dim=1) > 0) & (torch.arange(log_prob.shape[1]) < num_outputs)
        has_speech = has_word.to(torch.float32).max().unsqueeze(0) > 0.5
        counts = has_speech | (in_pause < 0.5)
        is_added = is_audible & (number < torch.where(is_whole, torch.full_like(x_lens, self.shift), x_lens))
        num_added = is_added.double().sum().unsqueeze(0)
        most = float(self.chunks.memory * self.factor)
        overflows = feature_count + num_added > most
        kept = torch.where(overflows, (most - num_added) / feature_count.clamp(min=1.0), torch.ones_like(feature_count))
        new_sums = torch.where(counts, feature_sums * kept + _sums(seen, is_added), feature_sums)
        new_count = torch.where(counts, (feature_count + num_added).clamp(max=most), feature_count)
        return (
            log_prob,
            num_outputs,
            window[:, self.shift : self.shift + self.num_history],
            (num_left + self.shift).clamp(max=self.num_history),
            new_sums,
            new_count,
            begun.float(),
            1.0 - has_speech.float(),
        )


def _sums(features: Tensor, is_counted: Tensor) -> Tensor:
    """Sums of values and squares of the frames that count: (T, F), (T,) -> (2, F)."""
    features = torch.where(is_counted[:, None], features, torch.zeros_like(features))
    return torch.stack([features.sum(0), features.square().sum(0)])


def export_acoustic_model(
    bundle: Bundle, path: str | Path, form: str, *, streaming: StreamChunks | None = None
) -> None:
    """Writes the acoustic model of a bundle.

    Args:
        bundle: with one of this program's own networks.
        path: the file to write.
        form: one of `FORMATS`.
        streaming: exports a network that reads a stream in such chunks; None exports one for whole utterances.

    Raises:
        AsrError: there is no such format, the network is an external one or cannot stream, or the file cannot be
            written.
    """
    if form not in FORMATS:
        raise AsrError(f"there is no format {form!r} to export to; there are {', '.join(FORMATS)}.")
    if isinstance(bundle.acoustic_model.network, ExternalNetwork):
        raise AsrError(
            f"bundle {bundle.name}: its acoustic model is an external one already; there is nothing to export."
        )
    if streaming is not None and not isinstance(bundle.acoustic_model.network, BoundedNetwork):
        raise AsrError(
            f"bundle {bundle.name}: its network reads whole utterances; only a TDNN-F, whose context is bounded, can "
            "be exported for streams."
        )
    network = _traceable(bundle.acoustic_model.network)
    features: Any = bundle.features.network
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, max(_FRAMES), features.feature_dim, generator=generator)
    # A pause, so that the trace covers frames that do not count in the normalization.
    x[0, 60:200] -= 20.0
    inputs: tuple[Tensor, ...] = (x, torch.tensor(_FRAMES))
    states: tuple[Tensor, ...] = ()
    chunks: dict[str, Any] = {}
    if streaming is not None:
        network = stream = StreamingNetwork(cast(BoundedNetwork, network), streaming)
        states = stream.initial_states()
        inputs = (x[:1, :1].expand(-1, stream.num_frames, -1), torch.tensor([stream.num_frames]), *states)
        chunks = {"T": stream.num_frames, "decode_chunk_len": stream.shift}
    tokens = list(bundle.graph.tokens.tokens)
    with atomic_path(Path(path)) as partial, warnings.catch_warnings():
        # Warnings that sizes become constants: the sizes of the network are constant.
        warnings.simplefilter("ignore")
        if form == "torchscript":
            if states:
                chunks["states"] = [(list(state.shape), str(state.dtype).removeprefix("torch.")) for state in states]
            torchscript.save(
                torch.jit.trace(network, inputs, check_trace=False),
                partial,
                CTCTokens(tokens),
                sampling_rate=features.sampling_rate,
                frame_shift=bundle.frame_seconds,
                input="fbank",
                fbank=features.arguments,
                **chunks,
            )
        else:
            _export_onnx(network, inputs, partial)
            metadata = {
                "model_type": type(bundle.acoustic_model.network).__name__,
                "subsampling_factor": bundle.acoustic_model.network.subsampling_factor,
                "sample_rate": features.sampling_rate,
                "vocab_size": len(tokens),
                "tokens": "\n".join(tokens),
                "fbank": json.dumps(features.arguments),
                **chunks,
            }
            _add_metadata(partial, metadata)
            onnx.seal(partial)


class TraceableCmvn(UtteranceCmvn):
    """`UtteranceCmvn` without a branch that depends on the number of frames, which a trace would fix."""

    def _counted(self, features: Tensor, inside: Tensor) -> Tensor:
        # Padding gives every rank enough frames; none of the added ones belongs to an utterance.
        longer = F.pad(features, (0, 0, 0, 2 * self.pause_margin))
        is_frame = F.pad(inside, (0, 2 * self.pause_margin))
        return super()._counted(longer, is_frame)[:, : features.shape[1]]


class TraceableNorm(nn.Module):
    """`FrameNorm` in evaluation: batch normalization in ONNX needs a scale, and sizes that a trace does not keep."""

    mean: Tensor
    inverse_std: Tensor

    def __init__(self, norm: FrameNorm) -> None:
        super().__init__()
        assert norm.running_mean is not None and norm.running_var is not None
        self.register_buffer("mean", norm.running_mean)
        self.register_buffer("inverse_std", (norm.running_var + norm.eps).rsqrt())

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, D) -> (N, T, D)."""
        return (x - self.mean) * self.inverse_std


def _traceable(network: nn.Module) -> nn.Module:
    """A copy of a network whose trace holds for any number of utterances and frames."""
    network = copy.deepcopy(network).cpu().eval().requires_grad_(False)
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, UtteranceCmvn):
                setattr(module, name, TraceableCmvn(child.pause_margin))
            if isinstance(child, FrameNorm):
                setattr(module, name, TraceableNorm(child))
    return network


def can_export_onnx() -> bool:
    """Whether this torch exports to ONNX: the exporter of torch 2 needs the package onnx."""
    return _IS_TORCH_1 or importlib.util.find_spec("onnx") is not None


def _export_onnx(network: nn.Module, inputs: tuple[Tensor, ...], path: Path) -> None:
    if not can_export_onnx():
        raise AsrError("torch 2 needs the package onnx to export to ONNX: pip install onnx.")
    legacy = {} if _IS_TORCH_1 else {"dynamo": False}
    states = STATES if isinstance(network, StreamingNetwork) else ()
    export: Any = torch.onnx.export
    export(
        network,
        inputs,
        str(path),
        opset_version=_OPSET,
        input_names=["x", "x_lens", *states],
        output_names=["log_probs", "log_probs_len", *(f"new_{name}" for name in states)],
        dynamic_axes={} if states else _DYNAMIC_AXES,
        **legacy,
    )


def _add_metadata(path: Path, metadata: dict[str, Any]) -> None:
    """Adds `metadata_props` to an ONNX file: entries of a repeated field may be appended to a protocol buffer."""
    with path.open("ab") as stream:
        for key, value in metadata.items():
            entry = _field(1, key.encode()) + _field(2, str(value).encode())
            stream.write(_field(14, entry))


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    groups = []
    while True:
        groups.append(value & 0x7F | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(groups)
