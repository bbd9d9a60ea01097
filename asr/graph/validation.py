"""What must hold of a decoding graph's tensors before a search may trust them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.graph.graph_arrays import INPUT_EPSILON

TENSOR_DTYPES = {
    "arc_begin": torch.int64,
    "dst_state": torch.int32,
    "token_id": torch.int32,
    "score": torch.float32,
    "word_begin": torch.int64,
    "word_id": torch.int32,
    "final_score": torch.float32,
}


def require_valid_tensors(tensors: Mapping[str, Tensor], num_tokens: int, num_words: int, name: str) -> None:
    """Checks a graph's tensors (see `DecodingGraph` for what they are).

    Args:
        tensors: by name, all of `TENSOR_DTYPES`.
        num_tokens: columns of the acoustic model.
        num_words: size of the vocabulary.
        name: where the graph came from; named in error messages.

    Raises:
        AsrError: a tensor has a wrong type or size, an index points outside, or no path can end.
    """
    for tensor_name, dtype in TENSOR_DTYPES.items():
        tensor = tensors[tensor_name]
        if tensor.dtype != dtype or tensor.dim() != 1:
            raise AsrError(
                f"{name}: the field {tensor_name!r} is {tensor.dtype} with {tensor.dim()} dimensions, not "
                f"one-dimensional {dtype}; build the graph again."
            )
    num_states, num_arcs = tensors["final_score"].numel(), tensors["dst_state"].numel()
    if num_states == 0:
        raise AsrError(f"{name}: the graph has no state; build it again.")
    sizes = {"arc_begin": num_states + 1, "token_id": num_arcs, "score": num_arcs, "word_begin": num_arcs + 1}
    for tensor_name, size in sizes.items():
        found = tensors[tensor_name].numel()
        if found != size:
            raise AsrError(f"{name}: the field {tensor_name!r} has {found} entries, not {size}; build the graph again.")
    _require_offsets(name, "arc_begin", tensors["arc_begin"], num_arcs)
    _require_offsets(name, "word_begin", tensors["word_begin"], tensors["word_id"].numel())
    _require_range(name, "dst_state", tensors["dst_state"], 0, num_states)
    _require_range(name, "token_id", tensors["token_id"], INPUT_EPSILON, num_tokens)
    _require_range(name, "word_id", tensors["word_id"], 1, num_words)
    if not bool(torch.isfinite(tensors["score"]).all()) or bool(torch.isnan(tensors["final_score"]).any()):
        raise AsrError(f"{name}: the graph holds scores that are not finite numbers; build it again.")
    if not bool(torch.isfinite(tensors["final_score"]).any()):
        raise AsrError(f"{name}: no state is final, so no path can end; build the graph again.")


def _require_offsets(name: str, tensor_name: str, offsets: Tensor, total: int) -> None:
    if int(offsets[0]) != 0 or int(offsets[-1]) != total or bool((offsets[1:] < offsets[:-1]).any()):
        raise AsrError(f"{name}: the field {tensor_name!r} does not rise from 0 to {total}; build the graph again.")


def _require_range(name: str, tensor_name: str, ids: Tensor, low: int, end: int) -> None:
    if ids.numel() and (int(ids.min()) < low or int(ids.max()) >= end):
        raise AsrError(
            f"{name}: the field {tensor_name!r} has values from {int(ids.min())} to {int(ids.max())}, but "
            f"{low} to {end - 1} are allowed; build the graph again."
        )
