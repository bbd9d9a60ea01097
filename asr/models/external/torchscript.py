"""TorchScript files: a network with its tokens, read without its Python code.

Shapes: N utterances, L samples, T frames, C tokens.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.audio.fbank import Fbank
from asr.errors import AsrError
from asr.models.external.base import ExternalModel, frames_by_share
from asr.text.ctc_tokens import CTCTokens
from asr.text.documents import parse_json

METADATA = "metadata.json"
TOKENS = "tokens.txt"


class TorchScriptModel(ExternalModel):
    """A scripted or traced network.

    Args:
        network: (waveform (N, L) or features (N, T, F), lengths (N,)) -> log-probabilities or logits, or these and
            lengths.
        tokens: its output symbols.
        metadata: `sampling_rate` (16000), `frame_shift` in seconds, `input` (`waveform` or `fbank`), and for the latter
            `fbank`, the arguments of `asr.audio.fbank.Fbank`.
        name: shown to users.

    Raises:
        AsrError: the metadata lack the frame shift or name another input.
    """

    def __init__(self, network: Any, tokens: CTCTokens, metadata: dict[str, Any], name: str = "torchscript") -> None:
        self.name = name
        self.tokens = tokens
        self._network = network
        self.sampling_rate = int(metadata.get("sampling_rate", 16000))
        if "frame_shift" not in metadata:
            raise AsrError(f"{name}: {METADATA} does not say the frame_shift, in seconds; add it, or give it here.")
        self.frame_shift = float(metadata["frame_shift"])
        kind = metadata.get("input", "waveform")
        if kind not in ("waveform", "fbank"):
            raise AsrError(f"{name}: the input is {kind!r}; it is waveform or fbank.")
        self._fbank = Fbank(**metadata.get("fbank", {})) if kind == "fbank" else None

    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """As `ExternalModel.forward`."""
        if self._fbank is not None:
            inputs, lengths = self._fbank(waveform, num_samples)
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
    file = io.BytesIO()  # torch's own writer of files ends the process where a disk is full
    torch.jit.save(network, file, _extra_files=content)
    Path(path).write_bytes(file.getbuffer())


def load(path: str, **metadata: Any) -> TorchScriptModel:
    """Reads a file; metadata given here count more than the file's.

    Raises:
        AsrError: the file is missing or damaged, or has no tokens in it or beside it.
    """
    file = Path(path)
    if not file.is_file():
        raise AsrError(f"torchscript:{path}: there is no such file.")
    extra = {METADATA: "", TOKENS: ""}
    try:
        network = torch.jit.load(io.BytesIO(file.read_bytes()), map_location="cpu", _extra_files=extra)
    except (RuntimeError, ValueError) as error:
        raise AsrError(f"torchscript:{path}: this is no TorchScript file that can be read.") from error
    texts = {name: text.decode() if isinstance(text, bytes) else text for name, text in extra.items()}
    beside = file.with_name(TOKENS)
    tokens: Any = metadata.pop("tokens", None)
    if tokens is None and texts[TOKENS]:
        tokens = texts[TOKENS].rstrip("\n").split("\n")
    elif tokens is None and beside.is_file():
        tokens = beside
    if tokens is None:
        raise AsrError(f"torchscript:{path}: its tokens are not in it; put {TOKENS} beside it, one symbol a line.")
    described = parse_json(texts[METADATA]) if texts[METADATA] else {}
    return TorchScriptModel(network.eval(), CTCTokens(tokens), {**described, **metadata}, f"torchscript:{path}")
