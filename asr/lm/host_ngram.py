"""An n-gram model larger than the accelerator's memory: arcs in host memory, the index on the device.

Shapes: S states, A arcs, V words, Q queries.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asr.lm.arc_finder import ArcFinder
from asr.lm.cached_rows import CachedRows, CacheStatistics
from asr.lm.ngram import NgramLM
from asr.lm.ngram_arrays import NgramArrays
from asr.lm.placement import Level, Placement
from asr.text.vocabulary import EOS_ID, Vocabulary

_INDEX_ARRAYS = ("arc_begin", "label", "backoff_state", "backoff_score", "word_map")
_COLUMNS = 2


class HostNgramLM:
    """Equal to `NgramLM` bit for bit, in as much device memory as it is given.

    Three placements, the first that fits the budget:

    - `resident`: all arrays on the device.
    - `index`: labels, first arcs and backoffs on the device, so that arcs are found there; scores and destinations in
      host memory, fetched once a batch for each distinct arc. What the budget leaves is a cache of arcs.
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
        sizes = lm.arrays.num_bytes()
        index_bytes = sum(sizes[name] for name in _INDEX_ARRAYS)
        place_bytes = CachedRows.place_bytes(_COLUMNS, torch.int32)
        placement = Placement.within(device_budget, sum(sizes.values()), index_bytes, place_bytes, "an n-gram model")
        self.placement: Level = placement.level
        if self.placement == "resident":
            self._resident = lm.to(self._device)
            self._device_bytes = sum(sizes.values())
            return
        if self.placement == "index":
            self._finder = ArcFinder(self._without_arcs(lm.arrays))
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
    def device_share(self) -> float:
        """Device memory over the size of the whole model."""
        return self._device_bytes / sum(self._host.arrays.num_bytes().values())

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
            return row[:, 0].contiguous().view(torch.float32), row[:, 1].to(torch.int64)
        arc_idx, backoff = self._finder.find(context_idx, word_id)
        row = self._rows.rows(arc_idx)
        return backoff + row[:, 0].contiguous().view(torch.float32), row[:, 1].to(torch.int64)

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | state), (Q,)."""
        return self.score(context_idx, torch.full_like(context_idx, EOS_ID))[0]

    def _without_arcs(self, arrays: NgramArrays) -> NgramArrays:
        """What finding an arc needs, on the device; the host keeps the rest."""
        nothing = torch.zeros(0)
        return replace(arrays, score=nothing, dst_state=nothing, index=None).to(self._device)

    def _read_arcs(self, arc_idx: Tensor) -> Tensor:
        """Scores (as bits) and destinations of arcs, (K, 2) int32."""
        arrays = self._host.arrays
        return torch.stack(
            [arrays.arc_score(arc_idx).view(torch.int32), arrays.dst_state.index_select(0, arc_idx)], dim=1
        )

    def _read_answers(self, key: Tensor) -> Tensor:
        """Scores (as bits) and next states of packed (state, word) pairs, (K, 2) int32."""
        state = torch.div(key, len(self.vocabulary), rounding_mode="floor")
        score, next_state = self._host.score(state, torch.sub(key, state, alpha=len(self.vocabulary)))
        return torch.stack([score.view(torch.int32), next_state.to(torch.int32)], dim=1)
