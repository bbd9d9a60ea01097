"""Statistics of a cached language model: counts, and the time of each stage."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass
class QueryStatistics:
    """Counts since the record was created; `num_contexts`, `num_hidden_held` and `bytes_held` are current values.

    Attributes:
        num_calls, num_queries: of `score` and `final`.
        num_edge_hits: queries answered from a stored score (cache 1).
        num_edges: distinct (context, word) scored and stored.
        num_hidden_rows, num_hidden_calls, largest_hidden_batch: rows that went through the hidden layer, its number of
            runs, and the largest number of rows in one run.
        num_shared_rows: rows taken from a similar history instead (quantized history vectors).
        num_outputs, num_history_normalizers, num_group_normalizers, num_tree_decisions: what the output layer
            computed.
        num_transfers, bytes_moved: blocks sent between devices, counted in each direction.
        num_contexts, num_hidden_held, bytes_held, peak_bytes: contexts, hidden rows, and bytes of all arrays, without
            room for more hidden rows that has not been touched.
        num_evictions, num_evicted_contexts, num_dropped_rows: effects of the capacity.
        seconds_find, seconds_hidden, seconds_output, seconds_evict, seconds_transfer, seconds_total: by the engine's
            clock; on a GPU the time to launch the work, unless the clock waits for it. The time to send the hidden
            layer's rows is part of `seconds_hidden`, too; that of several workers is added up.
    """

    num_calls: int = 0
    num_queries: int = 0
    num_edge_hits: int = 0
    num_edges: int = 0
    num_hidden_rows: int = 0
    num_hidden_calls: int = 0
    largest_hidden_batch: int = 0
    num_shared_rows: int = 0
    num_outputs: int = 0
    num_history_normalizers: int = 0
    num_group_normalizers: int = 0
    num_tree_decisions: int = 0
    num_transfers: int = 0
    bytes_moved: int = 0
    num_contexts: int = 0
    num_hidden_held: int = 0
    bytes_held: int = 0
    peak_bytes: int = 0
    num_evictions: int = 0
    num_evicted_contexts: int = 0
    num_dropped_rows: int = 0
    seconds_find: float = 0.0
    seconds_hidden: float = 0.0
    seconds_output: float = 0.0
    seconds_evict: float = 0.0
    seconds_transfer: float = 0.0
    seconds_total: float = 0.0

    @property
    def edge_hit_ratio(self) -> float:
        """Share of queries answered from a stored score."""
        return self.num_edge_hits / max(self.num_queries, 1)

    @property
    def hit_ratio(self) -> float:
        """The same as if queries came one by one: repeated queries of a call count as hits (Lee et al. 2015)."""
        return 1.0 - self.num_edges / max(self.num_queries, 1)

    @property
    def answered_without_hidden(self) -> float:
        """Share of queries that needed no run of the hidden layer, assuming that each computed row is for one query."""
        return 1.0 - self.num_hidden_rows / max(self.num_queries, 1)

    @property
    def mean_hidden_batch(self) -> float:
        return self.num_hidden_rows / max(self.num_hidden_calls, 1)

    @property
    def bytes_per_context(self) -> float:
        return self.bytes_held / max(self.num_contexts, 1)

    @property
    def queries_per_s(self) -> float:
        return self.num_queries / self.seconds_total if self.seconds_total else 0.0

    def as_dict(self) -> dict[str, int | float]:
        """All counts and ratios, for a line of JSON."""
        ratios = (
            "edge_hit_ratio",
            "hit_ratio",
            "answered_without_hidden",
            "mean_hidden_batch",
            "bytes_per_context",
            "queries_per_s",
        )
        return {**asdict(self), **{name: getattr(self, name) for name in ratios}}

    def __add__(self, other: QueryStatistics) -> QueryStatistics:
        """The sum of two engines' counts."""
        summed = QueryStatistics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})
        summed.largest_hidden_batch = max(self.largest_hidden_batch, other.largest_hidden_batch)
        return summed
