"""An n-gram model larger than the accelerator's memory: arcs in host memory, the index on the device.

Shapes: S states, A arcs, V words, Q queries.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asr.lm.cached_rows import CachedRows, CacheStatistics
from asr.lm.ngram.arc_finder import ArcFinder, is_narrow, narrow
from asr.lm.ngram.arrays import NgramArrays
from asr.lm.ngram.ngram_lm import NgramLM
from asr.lm.placement import Level, Placement
from asr.text.vocabulary import EOS_ID, Vocabulary

_COLUMNS = 2


class HostNgramLM:
    """Equal to `NgramLM` bit for bit, in as much device memory as it is given.

    Three placements, the first that fits the budget:

    - `resident`: all arrays on the device.
    - `index`: labels (in 16 bits where the words allow it), first arcs and backoff states on the device, so that arcs
      are found there; scores, destinations and backoff weights in host memory, fetched once a batch for each distinct
      arc and state backed off from. What the budget leaves is a cache of them.
    - `cache`: only a cache of answers on the device; what it lacks is looked up on the host, labels included.

    Args:
        lm: the model in host memory; a memory-mapped one stays on disk until it is asked.
        device: where queries come from and answers go.
        device_budget: bytes of device memory that the model may take.

    Raises:
        AsrError: the budget is too small for the smallest cache.
    """

    def __init__(self, lm: NgramLM, device: torch.device | str, device_budget: int) -> None:
        self._host = lm
        self._device = torch.device(device)
        self._rows: CachedRows | None = None
        self._resident: NgramLM | None = None
        self._finder: ArcFinder | None = None
        total_bytes, index_bytes = sum(lm.arrays.num_bytes().values()), bytes_to_find_arcs(lm)
        place_bytes = CachedRows.place_bytes(_COLUMNS, torch.int32)
        placement = Placement.within(device_budget, total_bytes, index_bytes, place_bytes, "an n-gram model")
        self.placement: Level = placement.level
        if self.placement == "resident":
            self._resident = lm.to(self._device)
            self._device_bytes = total_bytes
            return
        if self.placement == "index":
            self._finder = ArcFinder(_what_finds_arcs(lm).to(self._device))
        read = self._read_arcs if self.placement == "index" else self._read_answers
        self._rows = CachedRows(read, _COLUMNS, torch.int32, placement.num_places, self._device)
        self._device_bytes = self._rows.num_bytes + (index_bytes if self._finder is not None else 0)

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` numbers."""
        return self._host.vocabulary

    @property
    def device_bytes(self) -> int:
        """Device memory that the model takes."""
        return self._device_bytes

    @property
    def statistics(self) -> CacheStatistics:
        """What the cache has been asked; all zero where everything is resident."""
        return self._rows.statistics if self._rows is not None else CacheStatistics()

    def start(self, num_streams: int) -> Tensor:
        """The state after `<s>` for each stream, (num_streams,) int64."""
        return self._host.start(num_streams).to(self._device)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | state) and the next state: log_prob (Q,), next_idx (Q,)."""
        if self._resident is not None:
            return self._resident.score(context_idx, word_id)
        assert self._rows is not None
        if self._finder is None:
            row = self._rows.rows(torch.add(word_id, context_idx, alpha=len(self.vocabulary)))
            return _score_of(row), row[:, 1].to(torch.int64)
        arc_idx, passed = self._finder.follow(context_idx, word_id)
        keys = [arc_idx, *(torch.add(state, self._host.num_arcs) for _, state in passed)]
        rows = self._rows.rows(torch.cat(keys)).split([len(key) for key in keys])
        backoff = torch.zeros(len(word_id), device=self._device)
        for (query, _), row in zip(passed, rows[1:], strict=True):
            backoff.index_add_(0, query, _score_of(row))
        return backoff + _score_of(rows[0]), rows[0][:, 1].to(torch.int64)

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | state), (Q,)."""
        return self.score(context_idx, torch.full_like(context_idx, EOS_ID))[0]

    def _read_arcs(self, key: Tensor) -> Tensor:
        """Scores (as bits) and destinations of arcs; backoff weights of states, whose keys follow the arcs'; (K, 2)."""
        arrays, num_arcs = self._host.arrays, self._host.num_arcs
        row = torch.zeros((len(key), _COLUMNS), dtype=torch.int32)
        is_arc = key.lt(num_arcs)
        arc_idx, state = key[is_arc], key[is_arc.logical_not()].sub_(num_arcs)
        row[is_arc] = torch.stack(
            [arrays.arc_score(arc_idx).view(torch.int32), arrays.dst_state.index_select(0, arc_idx)], dim=1
        )
        row[is_arc.logical_not(), 0] = arrays.backoff_score.index_select(0, state).view(torch.int32)
        return row

    def _read_answers(self, key: Tensor) -> Tensor:
        """Scores (as bits) and next states of packed (state, word) pairs, (K, 2) int32."""
        state = torch.div(key, len(self.vocabulary), rounding_mode="floor")
        score, next_state = self._host.score(state, torch.sub(key, state, alpha=len(self.vocabulary)))
        return torch.stack([score.view(torch.int32), next_state.to(torch.int32)], dim=1)


def bytes_to_find_arcs(lm: NgramLM) -> int:
    """Device memory that the placement `index` takes besides its cache."""
    sizes = lm.arrays.num_bytes()
    label_bytes = 2 * lm.num_arcs if is_narrow(len(lm.vocabulary)) else sizes["label"]
    return label_bytes + sizes["arc_begin"] + sizes["backoff_state"] + sizes["word_map"]


def _what_finds_arcs(lm: NgramLM) -> NgramArrays:
    """What finding an arc needs and no more; the host keeps the rest."""
    nothing = torch.zeros(0)
    label = narrow(lm.arrays.label) if is_narrow(len(lm.vocabulary)) else lm.arrays.label
    return replace(
        lm.arrays, label=label, score=nothing, dst_state=nothing, backoff_score=nothing, score_level=nothing, index=None
    )


def _score_of(row: Tensor) -> Tensor:
    """(Q, 2) int32 -> the scores whose bits stand in the first column, (Q,) float32."""
    return row[:, 0].contiguous().view(torch.float32)
