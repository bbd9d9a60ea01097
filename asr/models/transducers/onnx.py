"""Transducers in ONNX files, run by onnxruntime: exports of icefall and of NeMo as for sherpa-onnx.

A folder has `encoder*.onnx`, `decoder*.onnx`, `joiner*.onnx` and `tokens.txt`, and for pieces `bpe.model`. What the
encoder reads is described in `asr.models.external.onnx`; if it keeps states, it is a streaming one, whose states are
zeros before an utterance. The others are recognized by their inputs:

| file | inputs -> outputs | metadata |
| --- | --- | --- |
| icefall's decoder | the last tokens (K, context) -> (K, P) | `context_size` |
| icefall's joiner | (K, E), (K, P) -> logits (K, C) | |
| NeMo's encoder | features -> (N, E, T) | `vocab_size` without blank, `pred_rnn_layers`, `pred_hidden` |
| NeMo's decoder | token (K, 1), ones (K,), h, c (layers, K, hidden) -> (K, P, 1), lengths, h, c | |
| NeMo's joiner | (K, E, 1), (K, P, 1) -> logits (K, 1, 1, C), or (K, 1, 1, C + D) with the durations 0 to D - 1 | |

Shapes: N utterances, L samples, T frames, E encoder dimensions, K hypotheses, P prediction dimensions, C tokens, D
durations.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asr.errors import AsrError
from asr.models.external.base import checked_frames, each_alone, frames_by_share
from asr.models.external.onnx import OnnxEncoder, OnnxFile
from asr.models.external.streaming import ChunkReader
from asr.models.transducers.base import State, Transducer

_PARTS = ("encoder", "decoder", "joiner")
_QUANTIZED = ".int8."
_LARGEST_SIZE = 10_000


class _Encoder(OnnxEncoder):
    def step(self, chunk: Tensor, states: Any) -> tuple[Tensor, Any]:
        outputs, following = self.read_chunk(chunk, states)
        encoded, *num_frames = self.frames_of(outputs)
        return encoded[0, : int(num_frames[0]) if num_frames else None], following

    def frames_of(self, outputs: list[Any]) -> list[Any]:
        """Encoded (N, T, E) and, if the network returns them, frames (N,).

        Raises:
            AsrError: the former are no tensor of 3 dimensions.
        """
        encoded, *rest = outputs
        if not isinstance(encoded, Tensor) or encoded.dim() != 3:
            raise AsrError(f"{self.name}: its output is no tensor of 3 dimensions; give a transducer's encoder.")
        return [encoded.transpose(1, 2) if self.kind == "transposed" else encoded, *rest]


class OnnxTransducer(Transducer):
    """A transducer in three ONNX files.

    Args:
        encoder: the file of the encoder.
        decoder: the file of the prediction network.
        joiner: the file of the joint network.
        tokens: a list or a file; None for `tokens.txt` next to the encoder.
        num_threads: threads of onnxruntime; None for as many as torch uses.
        frame_shift: in seconds; None derives it from the metadata `subsampling_factor`, or from numbers of frames.
        blank: as for `CTCTokens`.

    Raises:
        AsrError: onnxruntime is missing, a file cannot be read or is of another form than those above, the files do
            not belong together, or there are no tokens or another number of them than the joint network scores.
    """

    def __init__(
        self,
        encoder: str | Path,
        decoder: str | Path,
        joiner: str | Path,
        tokens: Any = None,
        num_threads: int | None = None,
        frame_shift: float | None = None,
        blank: int | str | None = None,
    ) -> None:
        self.name = f"onnx:{Path(encoder).parent}"
        self._encoder = _Encoder(encoder, num_threads)
        self._decoder, self._joiner = OnnxFile(decoder, num_threads), OnnxFile(joiner, num_threads)
        self._num_threads = num_threads
        self.tokens = self._encoder.own_tokens(tokens, blank)
        self.sampling_rate = self._encoder.sampling_rate
        self._num_dims = self._size_of_frames() if self._encoder.is_streaming else 0
        self._states = [name for name, each in self._decoder.inputs.items() if len(each.shape) == 3]
        self._check_inputs()
        if self._states:
            layers, hidden = (_size(self._encoder, field) for field in ("pred_rnn_layers", "pred_hidden"))
            self._first: State = (torch.zeros(1, layers, hidden),) * 2
        else:
            self._first = (torch.full((1, _size(self._decoder, "context_size")), -1),)
        self._check_columns()
        self.frame_shift = self._encoder.shift(frame_shift, self.encode)

    def __reduce__(self) -> tuple[type[OnnxTransducer], tuple[Any, ...]]:
        # Copies and other processes open the files again, from whichever folder they work in.
        files = (self._encoder.path, self._decoder.path, self._joiner.path)
        return OnnxTransducer, (*files, self.tokens, self._num_threads, self.frame_shift)

    def encode(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        if self._encoder.is_streaming:
            utterances = zip(waveform, num_samples.tolist(), strict=True)
            parts = [self.stream().accept(each[:num], is_last=True) for each, num in utterances]
            return pad_sequence(parts, batch_first=True), torch.tensor([len(part) for part in parts])
        if len(num_samples) > 1 and self._encoder.reads_one:
            return each_alone(self.encode, waveform, num_samples)
        outputs, lengths, longest = self._encoder.read(waveform, num_samples)
        encoded, *rest = self._encoder.frames_of(outputs)
        num_frames = rest[0] if rest else frames_by_share(lengths, longest, encoded.shape[1])
        return encoded, checked_frames(num_frames, len(num_samples), encoded.shape[1], self._encoder.name)

    def stream(self) -> ChunkReader:
        return ChunkReader(self._encoder, self._num_dims) if self._encoder.is_streaming else super().stream()

    def start(self) -> tuple[Tensor, State]:
        # In training, the blank stands before the first token, and nothing before it.
        return self.predict(torch.tensor([self.tokens.blank_id]), self._first)

    def predict(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        if not self._states:
            context = torch.cat([state[0][:, 1:], token[:, None]], 1)
            feed = {next(iter(self._decoder.inputs)): context.numpy()}
            return _rows(self._decoder, self._decoder.run_session(feed)[0]), (context,)
        inputs = (token[:, None], torch.ones_like(token), *(each.transpose(0, 1) for each in state))
        feed = {name: value.numpy() for name, value in zip(self._decoder.inputs, inputs, strict=True)}
        output, *_, h, c = self._decoder.run_session(feed)
        return _rows(self._decoder, output), tuple(torch.from_numpy(each).transpose(0, 1) for each in (h, c))

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        feed = {
            name: value.reshape(value.shape + (1,) * (len(each.shape) - 2)).numpy()
            for (name, each), value in zip(self._joiner.inputs.items(), (encoded, predicted), strict=True)
        }
        return _rows(self._joiner, self._joiner.run_session(feed)[0])

    def _size_of_frames(self) -> int:
        """The dimensions of frames of a streaming encoder, E, for which it reads a chunk."""
        encoder = self._encoder
        encoder.chunk_sizes()
        chunk = torch.zeros(_size(encoder, "T"), encoder.extractor.feature_dim)
        encoded, _ = encoder.step(chunk, encoder.initial_states())
        return encoded.shape[1]

    def _check_inputs(self) -> None:
        shapes = [len(each.shape) for each in self._decoder.inputs.values()]
        if shapes not in ([2], [2, 1, 3, 3]) or len(self._decoder.outputs) < len(shapes):
            raise AsrError(
                f"{self._decoder.name}: its inputs {', '.join(self._decoder.inputs)} are neither tokens, nor a token, "
                "its length and two states of an LSTM that it returns; export it as for sherpa-onnx."
            )
        shapes = [len(each.shape) for each in self._joiner.inputs.values()]
        if shapes not in ([2, 2], [3, 3]):
            raise AsrError(
                f"{self._joiner.name}: its inputs {', '.join(self._joiner.inputs)} are not an output of the encoder "
                "and one of the decoder; export it as for sherpa-onnx."
            )

    def _check_columns(self) -> None:
        """Runs the networks, with two hypotheses, and counts the durations.

        Raises:
            AsrError: they do not belong together, or there is another number of tokens than of columns.
        """
        num_tokens, rate = len(self.tokens), self.sampling_rate
        noise = 0.01 * torch.randn(1, rate, generator=torch.Generator().manual_seed(0))
        encoded, _ = self.encode(noise, torch.tensor([rate]))
        _, state = self.start()
        predicted, _ = self.predict(
            torch.tensor([self.tokens.blank_id] * 2), tuple(each.expand(2, *each.shape[1:]) for each in state)
        )
        num_columns = self.join(encoded[:1, 0].expand(2, -1), predicted).shape[1]
        of_tokens = self._encoder.number("vocab_size", None) + 1 if self._states else num_columns
        if of_tokens != num_tokens:
            raise AsrError(
                f"{self.name}: the networks have {of_tokens} tokens, but the list has {num_tokens}; give theirs."
            )
        num_durations = num_columns - num_tokens
        if num_durations < 0 or num_durations == 1:
            raise AsrError(
                f"{self._joiner.name}: its output has {num_columns} columns for {num_tokens} tokens and any durations, "
                "of which there are at least 2; give the joint network that belongs to the others."
            )
        self.durations = tuple(range(num_durations))


def load(folder: str, int8: bool = False, **options: Any) -> OnnxTransducer:
    """Loads the networks of a folder; options are passed on to `OnnxTransducer`.

    Args:
        folder: with the files above.
        int8: whether to prefer files with `.int8.` in their names to others.
        options: of `OnnxTransducer`.

    Raises:
        AsrError: files are missing, there are several for a part, or as for `OnnxTransducer`.
    """
    encoder, decoder, joiner = (_file_of(part, Path(folder), int8) for part in _PARTS)
    return OnnxTransducer(encoder, decoder, joiner, **options)


def _file_of(part: str, folder: Path, int8: bool) -> Path:
    files = sorted(folder.glob(f"{part}*.onnx"))
    preferred = [file for file in files if (_QUANTIZED in file.name) == int8] or files
    if len(preferred) != 1:
        found = ", ".join(file.name for file in preferred) or "none"
        raise AsrError(
            f"onnx:{folder}: a transducer has one file {part}*.onnx, but this folder has {found}; give a folder with "
            f"one of each of {', '.join(f'{each}*.onnx' for each in _PARTS)}."
        )
    others = ", ".join(file.name for file in files if file not in preferred)
    if others:
        warnings.warn(
            f"onnx:{folder}: {preferred[0].name} is used, not {others}; int8={not int8} would use the other.",
            stacklevel=3,
        )
    return preferred[0]


def _size(file: OnnxFile, field: str) -> int:
    size = file.number(field, None)
    if size > _LARGEST_SIZE:
        raise AsrError(
            f"{file.name}: the field {field!r} of its metadata is above {_LARGEST_SIZE}, which would fill the memory; "
            "export it again."
        )
    return size


def _rows(file: OnnxFile, output: Any) -> Tensor:
    """An output of numbers whose first dimension is K, as (K, X)."""
    if not isinstance(output, np.ndarray) or output.ndim < 2:
        raise AsrError(f"{file.name}: its output has no row for each hypothesis; export it as for sherpa-onnx.")
    return torch.from_numpy(output).flatten(1)
