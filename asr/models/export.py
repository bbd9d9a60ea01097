"""Acoustic models as ONNX and TorchScript files, which need none of this program's code.

A file reads filterbanks: features (N, T, F) float32 and num_frames (N,) int64 in, natural log-probabilities (N, T', C)
and their frames (N,) out; it normalizes utterances itself. Inputs and outputs of ONNX files have the names that icefall
gives them. Tokens and the settings of the filterbank are in the file, so that `onnx:` and `torchscript:` of
`asr.models.external` need no other files. A streaming file reads one stream, chunk by chunk, see
`asr.models.export_streaming`.

Shapes: N utterances, T frames, F features, T' frames of output, C tokens.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.bundle import Bundle
from asr.errors import AsrError
from asr.models.export_streaming import STATES, StreamChunks, StreamingNetwork
from asr.models.external import onnx, torchscript
from asr.models.external.network import ExternalNetwork
from asr.models.interface import BoundedNetwork, UtteranceCmvn
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
    factor: Any = network.subsampling_factor
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, max(_FRAMES), features.feature_dim, generator=generator), torch.tensor(_FRAMES)
    # A pause, so that the trace covers frames that do not count in the normalization.
    inputs[0][0, 60:200] -= 20.0
    tokens = list(bundle.graph.tokens.tokens)
    with atomic_path(Path(path)) as partial, warnings.catch_warnings():
        # Warnings that sizes become constants: the sizes of the network are constant.
        warnings.simplefilter("ignore")
        stream = None if streaming is None else StreamingNetwork(cast(BoundedNetwork, network), streaming)
        states: tuple[Tensor, ...] = ()
        if stream is not None:
            states = stream.initial_states()
            inputs = inputs[0][:1, :1].expand(-1, stream.num_frames, -1), torch.tensor([stream.num_frames])
        if form == "torchscript":
            traced: Any = torch.jit.trace(network if stream is None else stream, (*inputs, *states), check_trace=False)
            chunks: dict[str, Any] = {}
            if stream is not None:
                described = [(list(state.shape), str(state.dtype).removeprefix("torch.")) for state in states]
                chunks = {"states": described, "T": stream.num_frames, "decode_chunk_len": stream.shift}
            torchscript.save(
                traced,
                partial,
                CTCTokens(tokens),
                sampling_rate=features.sampling_rate,
                frame_shift=bundle.frame_seconds,
                input="fbank",
                fbank=features.arguments,
                **chunks,
            )
        else:
            metadata = {
                "model_type": type(bundle.acoustic_model.network).__name__,
                "subsampling_factor": str(factor),
                "sample_rate": str(features.sampling_rate),
                "vocab_size": str(len(tokens)),
                "tokens": "\n".join(tokens),
                "fbank": json.dumps(features.arguments),
            }
            if stream is None:
                _export_onnx(network, inputs, partial, ("x", "x_lens"), ("log_probs", "log_probs_len"), _DYNAMIC_AXES)
            else:
                names = ("log_probs", "log_probs_len", *(f"new_{name}" for name in STATES))
                _export_onnx(stream, (*inputs, *states), partial, ("x", "x_lens", *STATES), names, {})
                metadata |= {"T": str(stream.num_frames), "decode_chunk_len": str(stream.shift)}
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


def _export_onnx(
    network: nn.Module,
    inputs: tuple[Tensor, ...],
    path: Path,
    input_names: Sequence[str],
    output_names: Sequence[str],
    dynamic_axes: dict[str, dict[int, str]],
) -> None:
    if not can_export_onnx():
        raise AsrError("torch 2 needs the package onnx to export to ONNX: pip install onnx.")
    legacy = {} if _IS_TORCH_1 else {"dynamo": False}
    export: Any = torch.onnx.export
    export(
        network,
        inputs,
        str(path),
        opset_version=_OPSET,
        input_names=list(input_names),
        output_names=list(output_names),
        dynamic_axes=dynamic_axes,
        **legacy,
    )


def _add_metadata(path: Path, metadata: dict[str, str]) -> None:
    """Adds `metadata_props` to an ONNX file: entries of a repeated field may be appended to a protocol buffer."""
    with path.open("ab") as stream:
        for key, value in metadata.items():
            entry = _field(1, key.encode()) + _field(2, value.encode())
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
