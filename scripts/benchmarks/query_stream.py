"""Query streams recorded from real decoding, kept in a small file, and played back to any language model.

A stream numbers word histories by nodes: node 0 is `<s>`, every other node has a parent and a word, and a query is the
node that it leads to.

Shapes: C nodes, Q queries, L calls.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.kernels.hash_table import segment_max
from asr.lm.interface import LanguageModel
from asr.text.symbols import BOS_ID, EOS_ID, Vocabulary

_FIELDS = ("parent", "word", "query", "call_begin")


@dataclass(frozen=True)
class QueryStream:
    """The queries of one decoding to its language model.

    Attributes:
        parent, word: (C,) int64, of each node; node 0 is its own parent.
        query: (Q,) int64, the node each query leads to: its parent is the context, its word the word.
        call_begin: (L + 1,) int64, where each call's queries begin; on the host.
    """

    parent: Tensor
    word: Tensor
    query: Tensor
    call_begin: Tensor

    def to(self, device: torch.device) -> QueryStream:
        """The same, asked from a device."""
        return QueryStream(self.parent.to(device), self.word.to(device), self.query.to(device), self.call_begin)

    @property
    def num_calls(self) -> int:
        return self.call_begin.numel() - 1

    def calls(self) -> list[Tensor]:
        """The query nodes of each call."""
        return list(self.query.split((self.call_begin[1:] - self.call_begin[:-1]).tolist()))

    def last_call_of_context(self) -> Tensor:
        """The last call that asks for a successor of each node, -1 where none does, (C,)."""
        call = torch.repeat_interleave(torch.arange(self.num_calls), self.call_begin[1:] - self.call_begin[:-1])
        return segment_max(call, self.parent[self.query], self.parent.numel()).clamp_(min=-1)

    def histories(self, nodes: Tensor) -> list[list[int]]:
        """The words of each node's history after `<s>`."""
        parent, word = self.parent.tolist(), self.word.tolist()
        histories = []
        for node in nodes.tolist():
            words = []
            while node:
                words.append(word[node])
                node = parent[node]
            histories.append(words[::-1])
        return histories


def merged(streams: Sequence[QueryStream]) -> QueryStream:
    """The streams decoded concurrently: call i has the queries of call i of each; equal histories are not merged."""
    parents, words, queries, calls, shift = [torch.zeros(1, dtype=torch.int64)], [torch.tensor([BOS_ID])], [], [], 0
    for stream in streams:
        # Node 0 is common; the others are shifted.
        parents.append(torch.where(stream.parent[1:] > 0, stream.parent[1:] + shift, 0))
        words.append(stream.word[1:])
        queries.append(torch.where(stream.query > 0, stream.query + shift, 0))
        calls.append(
            torch.repeat_interleave(torch.arange(stream.num_calls), stream.call_begin[1:] - stream.call_begin[:-1])
        )
        shift += stream.parent.numel() - 1
    call, order = torch.cat(calls).sort(stable=True)
    num_queries = torch.bincount(call, minlength=max(stream.num_calls for stream in streams))
    call_begin = torch.cat((torch.zeros(1, dtype=torch.int64), num_queries.cumsum(0)))
    return QueryStream(torch.cat(parents), torch.cat(words), torch.cat(queries)[order], call_begin)


def save_streams(path: str | Path, streams: Sequence[QueryStream]) -> None:
    """Writes streams to a file; xz halves its size compared with npz's own compression."""
    arrays = {}
    for number, stream in enumerate(streams):
        for name in _FIELDS:
            arrays[f"{number}_{name}"] = getattr(stream, name).numpy().astype(np.int32)
    with lzma.open(path, "wb", preset=2) as file:
        np.savez(file, **arrays)


def load_streams(path: str | Path) -> list[QueryStream]:
    """Raises AsrError where the file cannot be read as one of `save_streams`."""
    try:
        with lzma.open(path) as file, np.load(io.BytesIO(file.read())) as arrays:
            num_streams = len(arrays.files) // len(_FIELDS)
            return [
                QueryStream(*(torch.from_numpy(arrays[f"{i}_{name}"].astype(np.int64)) for name in _FIELDS))
                for i in range(num_streams)
            ]
    except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError) as error:
        raise AsrError(f"{path}: no recorded query streams can be read from it ({error}); record it again.") from error


class QueryRecorder(LanguageModel):
    """A language model that forwards every call to another model and records it.

    Record with an exact `CachedRNNLM` without a capacity: a context that stands for several histories has no path. Each
    `start` begins a new stream; decode one utterance at a time where streams are to be merged in other numbers later.
    """

    def __init__(self, language_model: LanguageModel) -> None:
        self.language_model = language_model
        self._calls: list[list[tuple[Tensor, Tensor, Tensor]]] = []

    @property
    def vocabulary(self) -> Vocabulary:
        return self.language_model.vocabulary

    def start(self, num_streams: int) -> Tensor:
        self._calls.append([])
        return self.language_model.start(num_streams)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, next_idx = self.language_model.score(context_idx, word_id)
        self._calls[-1].append((context_idx.cpu().clone(), word_id.cpu().clone(), next_idx.cpu().clone()))
        return log_prob, next_idx

    def final(self, context_idx: Tensor) -> Tensor:
        log_prob, _ = self.score(context_idx, torch.full_like(context_idx, EOS_ID))
        return log_prob

    def streams(self) -> list[QueryStream]:
        """What has been recorded; streams without a query are left out."""
        start = int(self.language_model.start(1))
        return [_stream_of(calls, start) for calls in self._calls if any(call[0].numel() for call in calls)]


def _stream_of(calls: list[tuple[Tensor, Tensor, Tensor]], start: int) -> QueryStream:
    context, word, reached = (torch.cat([call[i] for call in calls]) for i in range(3))
    # Contexts are numbered by their order in the recorded model, in which parents come before their children.
    old = torch.unique(torch.cat((torch.tensor([start]), reached)))
    old = torch.cat((old[old == start], old[old != start]))
    new = torch.full((int(torch.cat((old, context)).max()) + 1,), -1)
    new[old] = torch.arange(old.numel())
    parent, node_word = torch.zeros_like(old), torch.full_like(old, BOS_ID)
    parent[new[reached]], node_word[new[reached]] = new[context], word
    if int(parent.min()) < 0:
        raise ValueError("a recorded context was reached by no recorded query of its stream")
    sizes = torch.tensor([0] + [call[0].numel() for call in calls])
    return QueryStream(parent, node_word, new[reached], sizes.cumsum(0))


def replay(
    stream: QueryStream,
    language_model: LanguageModel,
    after_call: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Replays the queries call by call -> log_prob (Q,). `after_call(call, context_of_node)` follows each call.

    `context_of_node` (C,) holds the model's context of each node that has been reached.
    """
    context_of_node = torch.zeros_like(stream.parent)
    context_of_node[0] = language_model.start(1)[0]
    parent, word = stream.parent[stream.query], stream.word[stream.query]
    log_probs = []
    bounds = stream.call_begin.tolist()
    for call, query in enumerate(stream.calls()):
        asked = slice(bounds[call], bounds[call + 1])
        context_idx = context_of_node.index_select(0, parent[asked])
        log_prob, next_idx = language_model.score(context_idx, word[asked])
        context_of_node.index_copy_(0, query, next_idx)
        log_probs.append(log_prob)
        if after_call is not None:
            after_call(call, context_of_node)
    return torch.cat(log_probs)
