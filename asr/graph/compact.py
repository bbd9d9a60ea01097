"""The graph of phones in few bytes: what is stored on disk, and how it becomes a graph of frames when it is loaded.

A graph of phones with its backoff epsilons is several times smaller than the graph of frames that the search needs,
and that follows from it: epsilons removed, topology composed.

Shapes: S states, A arcs, K arcs with words, W words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.graph.epsilon_removal import remove_epsilons
from asr.graph.graph_arrays import GraphArrays, offsets
from asr.graph.topology import compose_topology, topology_named
from asr.text.tokens import TokenTable

FIELDS = ("arc_count", "label", "dst_state", "score", "word_arc", "word_count", "word_id", "final_state", "final_score")


def finish(graph: GraphArrays, phones: Sequence[str], topology_name: str, tokens: TokenTable) -> GraphArrays:
    """The graph of frames: labels are columns of the acoustic model, no epsilons."""
    topology = topology_named(topology_name)
    return compose_topology(topology, topology.token_ids(phones, tokens), remove_epsilons(graph))


def pack(graph: GraphArrays, score_step: float) -> dict[str, Tensor]:
    """The graph in small integers; nothing is lost, since scores are multiples of `score_step`.

    Returns:
        arc_count (S,), label (A,), dst_state (A,), score (A,) in steps, and for arcs with words word_arc (K,), how far
        behind the one before; word_count (K,); word_id (W,); final_state (F,), final_score (F,).
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
    """What `pack` was given.

    Raises:
        AsrError: a field is missing, or the fields do not fit each other.
    """
    missing = [field for field in FIELDS if field not in tensors]
    if missing:
        raise AsrError(f"{name}: the graph file lacks the field {missing[0]!r}; build the graph again.")
    fields = {field: tensors[field].numpy().astype(np.int64) for field in FIELDS}
    num_states, num_arcs = len(fields["arc_count"]), len(fields["label"])
    word_arc, word_count = np.cumsum(fields["word_arc"]), fields["word_count"]
    lengths_fit = num_arcs == len(fields["dst_state"]) == len(fields["score"]) == fields["arc_count"].sum()
    words_fit = len(word_arc) == len(word_count) and word_count.sum() == len(fields["word_id"])
    if not lengths_fit or not words_fit or len(fields["final_state"]) != len(fields["final_score"]):
        raise AsrError(f"{name}: the fields of the graph do not fit each other; build the graph again.")
    for index, end in ((fields["dst_state"], num_states), (word_arc, num_arcs), (fields["final_state"], num_states)):
        if len(index) and not 0 <= index.min() <= index.max() < end:
            raise AsrError(f"{name}: the graph points outside itself; build the graph again.")
    counts = np.zeros(num_arcs, dtype=np.int64)
    counts[word_arc] = word_count
    final_score = np.full(num_states, -np.inf, dtype=np.float32)
    final_score[fields["final_state"]] = fields["final_score"] * score_step
    return GraphArrays(
        offsets(fields["arc_count"]),
        fields["dst_state"].astype(np.int32),
        fields["label"].astype(np.int32),
        (fields["score"] * score_step).astype(np.float32),
        offsets(counts),
        fields["word_id"].astype(np.int32),
        final_score,
    )


def _steps(score: np.ndarray, score_step: float) -> np.ndarray:  # type: ignore[type-arg]
    return np.round(score.astype(np.float64) / score_step).astype(np.int64)


def _smallest(values: np.ndarray) -> Tensor:  # type: ignore[type-arg]
    """The values in the smallest integer type that holds them."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    types = (np.uint8, np.int8, np.int16, np.int32)
    dtype = next(each for each in types if np.iinfo(each).min <= low <= high <= np.iinfo(each).max)
    return torch.from_numpy(values.astype(dtype))
