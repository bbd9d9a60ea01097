"""Graphs in files: small integers, compressed, and back.

Shapes: S states, F final states, A arcs, K arcs with words, W words.
"""

from __future__ import annotations

import lzma
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.graph.fst import GraphArrays, offsets

FIELDS = ("arc_count", "label", "dst_state", "score", "word_arc", "word_count", "word_id", "final_state", "final_score")

_PIECE = 1 << 20  # bytes

# Graphs expand three- to tenfold. A small file from an attacker could otherwise fill the memory.
_MOST_EXPANSION = 100
_TYPES = {np.dtype(each).name: each for each in (np.uint8, np.int8, np.int16, np.int32)}


def pack(graph: GraphArrays, score_step: float) -> dict[str, Tensor]:
    """Packs a graph into small integers; this is lossless because scores are multiples of `score_step`.

    Returns:
        arc_count (S,), label (A,), dst_state (A,), score (A,) in steps; word_arc (K,) and word_count (K,)
        of arcs with words, where word_arc is the distance from the previous such arc; word_id (W,); final_state (F,)
        and final_score (F,) in steps.
    """
    counts = np.diff(graph.word_begin)
    with_words = np.flatnonzero(counts)
    final_state = np.flatnonzero(graph.final_score > -np.inf)
    fields = {
        "arc_count": np.diff(graph.arc_begin),
        "label": graph.label,
        "dst_state": graph.dst_state,
        "score": _steps(graph.score, score_step),
        "word_arc": np.diff(with_words, prepend=0),
        "word_count": counts[with_words],
        "word_id": graph.word_id,
        "final_state": final_state,
        "final_score": _steps(graph.final_score[final_state], score_step),
    }
    return {name: _smallest(values) for name, values in fields.items()}


def unpack(tensors: Mapping[str, Tensor], score_step: float, name: str) -> GraphArrays:
    """The inverse of `pack`.

    Raises:
        AsrError: a field is missing, or the fields do not fit each other.
    """
    missing = [field for field in FIELDS if field not in tensors]
    if missing:
        raise AsrError(f"{name}: the graph file lacks the field {missing[0]!r}; build the graph again.")
    for field in FIELDS:
        if tensors[field].dim() != 1 or tensors[field].is_floating_point() or tensors[field].is_complex():
            raise AsrError(
                f"{name}: the field {field!r} of the graph is not a list of integers; build the graph again."
            )
    fields = {field: tensors[field].numpy() for field in FIELDS}
    if any(
        len(fields[field]) and fields[field].min() < 0 for field in ("arc_count", "word_arc", "word_count", "word_id")
    ):
        raise AsrError(f"{name}: the graph has counts below zero; build the graph again.")
    num_states, num_arcs = len(fields["arc_count"]), len(fields["label"])
    word_arc, word_count = np.cumsum(fields["word_arc"], dtype=np.int64), fields["word_count"]
    lengths_fit = (
        num_arcs == len(fields["dst_state"]) == len(fields["score"]) == fields["arc_count"].sum(dtype=np.int64)
    )
    words_fit = len(word_arc) == len(word_count) and word_count.sum(dtype=np.int64) == len(fields["word_id"])
    if not lengths_fit or not words_fit or len(fields["final_state"]) != len(fields["final_score"]):
        raise AsrError(f"{name}: the fields of the graph do not fit each other; build the graph again.")
    for index, end in ((fields["dst_state"], num_states), (word_arc, num_arcs), (fields["final_state"], num_states)):
        if len(index) and not 0 <= index.min() <= index.max() < end:
            raise AsrError(f"{name}: an index is out of range; build the graph again.")
    counts = np.zeros(num_arcs, dtype=word_count.dtype)
    counts[word_arc] = word_count
    final_score = np.full(num_states, -np.inf, dtype=np.float32)
    final_score[fields["final_state"]] = np.multiply(fields["final_score"], score_step, dtype=np.float64)
    return GraphArrays(
        offsets(fields["arc_count"]),
        fields["dst_state"].astype(np.int32, copy=False),
        fields["label"].astype(np.int32),
        np.multiply(fields["score"], score_step, dtype=np.float64).astype(np.float32),
        offsets(counts),
        fields["word_id"].astype(np.int32, copy=False),
        final_score,
    )


def compress(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Compresses one-dimensional tensors of integers by LZMA (.xz).

    Returns:
        the compressed bytes (uint8) of each tensor, and the type of its values, as NumPy names it.
    """
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    packed = {name: lzma.compress(values.tobytes()) for name, values in arrays.items()}
    as_tensors = {name: torch.from_numpy(np.frombuffer(content, np.uint8).copy()) for name, content in packed.items()}
    return as_tensors, {name: values.dtype.name for name, values in arrays.items()}


def decompress(tensors: Mapping[str, Tensor], types: Mapping[str, str], name: str) -> dict[str, Tensor]:
    """The inverse of `compress`; tensors without a type stay as they are.

    Raises:
        AsrError: a tensor cannot be decompressed to values of its type, or all together expand to far more than graphs
            do.
    """
    result = dict(tensors)
    room = _Room(_MOST_EXPANSION * sum(tensor.numel() for tensor in tensors.values()) + (1 << 20))
    with ThreadPoolExecutor() as pool:
        expanded = {each: pool.submit(_expanded, tensors.get(each), kind, room) for each, kind in types.items()}
    for field_name, values in expanded.items():
        try:
            result[field_name] = values.result()
        except (lzma.LZMAError, KeyError, TypeError, ValueError) as error:
            raise AsrError(
                f"{name}: the field {field_name!r} of the graph cannot be decompressed; copy the file or build the "
                "graph again."
            ) from error
    return result


class _Room:
    """How many bytes may still be decompressed, by all threads together."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Takes part of the room; `LZMAError` if there is not that much."""
        with self._lock:
            self._left -= size
            if self._left < 0:
                raise lzma.LZMAError


def _expanded(packed: Tensor | None, type_name: str, room: _Room) -> Tensor:
    if packed is None:
        raise KeyError
    stream, content = lzma.LZMADecompressor(), bytearray()
    piece = stream.decompress(packed.numpy().tobytes(), max_length=_PIECE)
    while piece:
        room.take(len(piece))
        content += piece
        piece = b"" if stream.eof else stream.decompress(b"", max_length=_PIECE)
    if not stream.eof:
        raise lzma.LZMAError
    return torch.from_numpy(np.frombuffer(content, _TYPES[type_name]))


def _steps(score: np.ndarray, score_step: float) -> np.ndarray:  # type: ignore[type-arg]
    return np.round(score.astype(np.float64) / score_step).astype(np.int64)


def _smallest(values: np.ndarray) -> Tensor:  # type: ignore[type-arg]
    """Converts values to the smallest integer type that can hold them."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    dtype = next(each for each in _TYPES.values() if np.iinfo(each).min <= low <= high <= np.iinfo(each).max)
    return torch.from_numpy(values.astype(dtype))
