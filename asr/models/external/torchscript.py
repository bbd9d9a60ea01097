"""TorchScript files: a network with its tokens, read without its Python code.

Shapes: N utterances, L samples, T frames, F features, T' frames of output, C tokens.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.audio.fbank import Fbank
from asr.errors import AsrError
from asr.models.external.base import ExternalModel, StreamingModel, frames_by_share
from asr.models.external.streaming import ChunkedStream, whole_in_chunks
from asr.text.ctc_tokens import CTCTokens
from asr.text.documents import parse_json

METADATA = "metadata.json"
TOKENS = "tokens.txt"
_STATE_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


class TorchScriptModel(ExternalModel):
    """A scripted or traced network.

    Args:
        network: (waveform (N, L) or features (N, T, F), lengths (N,)) -> log-probabilities or logits, or these and
            lengths.
        tokens: its output symbols.
        metadata: `sampling_rate` (16000), `frame_shift` in seconds, `input` (`waveform` or `fbank`), and for the latter
            `fbank`, the arguments of `asr.audio.fbank.Fbank`. A network with states has `states`, their shapes and
            torch types; `T`, the frames of a chunk; and `decode_chunk_len`, the frames from one chunk to the next. It
            is called like `asr.models.export_streaming.StreamingNetwork`.
        name: shown to users.

    Raises:
        AsrError: the metadata have no frame shift, name another input or do not describe the states.
    """

    def __init__(self, network: Any, tokens: CTCTokens, metadata: dict[str, Any], name: str = "torchscript") -> None:
        self.name = name
        self.tokens = tokens
        self._network = network
        self.sampling_rate = int(metadata.get("sampling_rate", 16000))
        if "frame_shift" not in metadata:
            raise AsrError(f"{name}: {METADATA} does not give the frame_shift, in seconds; add it, or give it here.")
        self.frame_shift = float(metadata["frame_shift"])
        kind = metadata.get("input", "waveform")
        if kind not in ("waveform", "fbank"):
            raise AsrError(f"{name}: the input is {kind!r}; it must be waveform or fbank.")
        self.extractor = Fbank(**metadata.get("fbank", {})) if kind == "fbank" else None
        try:
            self._states = [
                torch.zeros([int(size) for size in shape], dtype=_STATE_TYPES[name])
                for shape, name in metadata.get("states", ())
            ]
            self._chunk_sizes = (int(metadata["T"]), int(metadata["decode_chunk_len"])) if self._states else (0, 0)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise AsrError(f"{name}: {METADATA} does not describe its states and chunks; export it again.") from error
        if self._states and (self.extractor is None or min(self._chunk_sizes) < 1):
            raise AsrError(f"{name}: {METADATA} has states, but no filterbanks or chunk sizes; export it again.")

    @property
    def is_streaming(self) -> bool:
        """Whether the network keeps states between chunks."""
        return bool(self._states)

    @property
    def takes_lengths(self) -> bool:
        """See `ChunkedModel`."""
        return True

    def normal_features(self, features: Tensor) -> Tensor:
        """See `ChunkedModel`."""
        return features

    def chunk_sizes(self) -> tuple[int, int]:
        """See `ChunkedModel`."""
        return self._chunk_sizes

    def initial_states(self) -> list[Tensor]:
        """See `ChunkedModel`."""
        return self._states

    def step(self, chunk: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """See `ChunkedModel`."""
        padded = F.pad(chunk, (0, 0, 0, self._chunk_sizes[0] - len(chunk)))
        try:
            log_prob, num, *states = self._network(padded[None], torch.tensor([len(chunk)]), *states)
        except RuntimeError as error:
            raise AsrError(f"{self.name}: it cannot be run in chunks ({str(error).splitlines()[-1]}).") from error
        return self.checked(log_prob[:, : int(num)])[0], states

    def stream(self) -> StreamingModel:
        """See `ExternalModel.stream`."""
        return ChunkedStream(self) if self.is_streaming else super().stream()

    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """See `ExternalModel.forward`."""
        if self.is_streaming:
            return whole_in_chunks(self, waveform, num_samples)
        if self.extractor is not None:
            inputs, lengths = self.extractor(waveform, num_samples)
        else:
            inputs, lengths = waveform, num_samples
        output = self._network(inputs, lengths)
        if isinstance(output, (tuple, list)):
            return output[0], output[1]
        return output, frames_by_share(lengths, inputs.shape[1], output.shape[1])


def save(network: Any, path: str | Path, tokens: CTCTokens, **metadata: Any) -> None:
    """Writes a scripted or traced network with its tokens and metadata in one file, for `load`.

    Raises:
        OSError: the file cannot be written.
    """
    content = {METADATA: json.dumps(metadata), TOKENS: "".join(f"{symbol}\n" for symbol in tokens.symbols)}
    file = io.BytesIO()  # torch's own file writer aborts the process if the disk is full
    torch.jit.save(network, file, _extra_files=content)
    Path(path).write_bytes(file.getbuffer())


def load(path: str, **metadata: Any) -> TorchScriptModel:
    """Reads a file; metadata given here override the file's.

    Raises:
        AsrError: the file is missing or damaged, or there are no tokens in it or next to it.
    """
    file = Path(path)
    if not file.is_file():
        raise AsrError(f"torchscript:{path}: there is no such file.")
    extra = {METADATA: "", TOKENS: ""}
    try:
        network = torch.jit.load(io.BytesIO(file.read_bytes()), map_location="cpu", _extra_files=extra)
    except (RuntimeError, ValueError) as error:
        raise AsrError(f"torchscript:{path}: this is not a readable TorchScript file.") from error
    texts = {name: text.decode() if isinstance(text, bytes) else text for name, text in extra.items()}
    beside = file.with_name(TOKENS)
    tokens: Any = metadata.pop("tokens", None)
    if tokens is None and texts[TOKENS]:
        tokens = texts[TOKENS].rstrip("\n").split("\n")
    elif tokens is None and beside.is_file():
        tokens = beside
    if tokens is None:
        raise AsrError(f"torchscript:{path}: it has no tokens; put {TOKENS} next to it, with one symbol per line.")
    described = parse_json(texts[METADATA]) if texts[METADATA] else {}
    return TorchScriptModel(network.eval(), CTCTokens(tokens), {**described, **metadata}, f"torchscript:{path}")
