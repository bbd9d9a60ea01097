"""TorchScript files: a network with its tokens, read without its Python code.

Shapes: N utterances, L samples, T frames, F features, T' frames of output, C tokens.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.errors import AsrError
from asr.models.external.base import fbank_of, named, positive_integer, positive_number, tokens_of_file
from asr.models.external.streaming import ChunkedModel, checked_chunk_sizes
from asr.text.ctc_tokens import CTCTokens
from asr.text.documents import parse_json

METADATA = "metadata.json"
TOKENS = "tokens.txt"
_STATE_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


class TorchScriptModel(ChunkedModel):
    """A scripted or traced network.

    Args:
        network: (waveform (N, L) or features (N, T, F), lengths (N,)) -> log-probabilities or logits, or these and
            lengths.
        tokens: its output symbols.
        metadata: `sampling_rate` (16000), `frame_shift` in seconds, `input` (`waveform` or `fbank`), and for the latter
            `fbank`, the arguments of `asr.audio.fbank.Fbank`. A network with states has `states`, their shapes and
            torch types; `T`, the frames of a chunk; and `decode_chunk_len`, the frames from one chunk to the next. It
            is called like `asr.models.export.StreamingNetwork`. `load` also reads `blank`, `word_boundary`
            and `kind`, see `CTCTokens`.
        name: shown to users.

    Raises:
        AsrError: the metadata have no frame shift, name another input, or do not describe numbers, the filterbank or
            the states.
    """

    takes_lengths = True

    def __init__(self, network: Any, tokens: CTCTokens, metadata: dict[str, Any], name: str = "torchscript") -> None:
        self.name = name
        self.tokens = tokens
        self._network = network
        self.sampling_rate = positive_integer(
            metadata.get("sampling_rate", 16000), f"{name}: the sampling_rate in {METADATA}"
        )
        if "frame_shift" not in metadata:
            raise AsrError(f"{name}: {METADATA} does not give the frame_shift, in seconds; add it, or give it here.")
        self.frame_shift = positive_number(metadata["frame_shift"], f"{name}: the frame_shift in {METADATA}")
        kind = metadata.get("input", "waveform")
        if kind not in ("waveform", "fbank"):
            raise AsrError(f"{name}: the input is {kind!r}; it must be waveform or fbank.")
        self.extractor = fbank_of(metadata.get("fbank", {}), self.sampling_rate, name) if kind == "fbank" else None
        try:
            self._states = [
                torch.zeros([int(size) for size in shape], dtype=_STATE_TYPES[name])
                for shape, name in metadata.get("states", ())
            ]
            self._chunk_sizes = (int(metadata["T"]), int(metadata["decode_chunk_len"])) if self._states else (0, 0)
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise AsrError(f"{name}: {METADATA} does not describe its states and chunks; export it again.") from error
        if self._states and self.extractor is None:
            raise AsrError(f"{name}: {METADATA} has states, but no filterbanks; export it again.")
        if self._states:
            self._chunk_sizes = checked_chunk_sizes(*self._chunk_sizes, name)

    def chunk_sizes(self) -> tuple[int, int]:
        return self._chunk_sizes

    def initial_states(self) -> Sequence[Tensor]:
        return self._states

    def step(self, chunk: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        padded = F.pad(chunk, (0, 0, 0, self._chunk_sizes[0] - len(chunk)))
        output = self._run(padded[None], torch.tensor([len(chunk)]), *states)
        if not isinstance(output, (tuple, list)) or len(output) != 2 + len(states):
            raise AsrError(
                f"{self.name}: in chunks, it must return log-probabilities, frames and its {len(states)} states; "
                "export it again."
            )
        log_prob, num_frames = self.checked(output[0], output[1], 1)
        return log_prob[0, : int(num_frames)], list(output[2:])

    def forward_whole(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        if self.extractor is not None:
            inputs, lengths = self.extractor(waveform, num_samples)
        else:
            inputs, lengths = waveform, num_samples
        return self.sorted_output(self._run(inputs, lengths), lengths, inputs.shape[1])

    def _run(self, *inputs: Tensor) -> Any:
        kind = "waveforms" if self.extractor is None else "filterbanks"
        given = f"{kind}, lengths and {len(self._states)} states" if self._states else f"{kind} and lengths"
        try:
            return self._network(*inputs)
        except RuntimeError as error:
            # The lines before the last one are a traceback of the script.
            reason = str(error).strip().split("\n")[-1]
            raise AsrError(
                f"{self.name}: the network cannot read {given} ({reason}); correct {METADATA}, or give longer "
                "recordings."
            ) from error


def save(network: Any, path: str | Path, tokens: CTCTokens, **metadata: Any) -> None:
    """Writes a scripted or traced network with its tokens and metadata in one file, for `load`.

    Raises:
        OSError: the file cannot be written.
    """
    described = {"blank": tokens.blank_id, "word_boundary": tokens.word_boundary or "", "kind": tokens.kind, **metadata}
    content = {METADATA: json.dumps(described), TOKENS: "".join(f"{symbol}\n" for symbol in tokens.symbols)}
    file = io.BytesIO()  # torch's own file writer aborts the process if the disk is full
    torch.jit.save(network, file, _extra_files=content)
    Path(path).write_bytes(file.getbuffer())


def load(path: str, **metadata: Any) -> TorchScriptModel:
    """Reads a file; metadata given here override the file's, and `tokens`, in any form of `CTCTokens`, its tokens.

    Raises:
        AsrError: the file is missing or damaged, there are no tokens in it or next to it, or its metadata cannot be
            used.
    """
    file = Path(path)
    if not file.is_file():
        raise AsrError(f"torchscript:{path}: there is no such file.")
    extra = {METADATA: "", TOKENS: ""}
    try:
        network = torch.jit.load(io.BytesIO(file.read_bytes()), map_location="cpu", _extra_files=extra)
    except (RuntimeError, ValueError) as error:
        raise AsrError(f"torchscript:{path}: this is not a readable TorchScript file.") from error
    with named(f"torchscript:{path}: {METADATA} or {TOKENS} in it is not UTF-8 text", "write the file again"):
        texts = {name: text.decode() if isinstance(text, bytes) else text for name, text in extra.items()}
    beside = file.with_name(TOKENS)
    tokens: Any = metadata.pop("tokens", None)
    if tokens is None and texts[TOKENS]:
        tokens = texts[TOKENS].removesuffix("\n").split("\n")
    elif tokens is None and beside.is_file():
        tokens = beside
    if tokens is None:
        raise AsrError(f"torchscript:{path}: it has no tokens; put {TOKENS} next to it, with one symbol per line.")
    with named(f"torchscript:{path}: {METADATA} in it is not a JSON object", "write the file again"):
        described = parse_json(texts[METADATA]) if texts[METADATA] else {}
        if not isinstance(described, dict):
            raise ValueError(f"it is of type {type(described).__name__}")
    described |= metadata
    with named(f"torchscript:{path}"):
        marks = {name: described[name] for name in ("blank", "word_boundary", "kind") if name in described}
        symbols = tokens if isinstance(tokens, CTCTokens) else tokens_of_file(tokens, file, **marks)
    return TorchScriptModel(network.eval(), symbols, described, f"torchscript:{path}")
