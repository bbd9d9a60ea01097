"""How a bound on bytes is divided between the trie and the hidden rows."""

from __future__ import annotations

from dataclasses import dataclass

from asr.hashing.hash_table import MAX_LOAD
from asr.query.trie import START

_TRIE_SHARE = 0.5
_FEWEST_SLOTS = 256
_FEWEST_ROWS = 16
_FIXED_BYTES = 512
"""For tables that are hardly used."""


@dataclass(frozen=True)
class ByteCosts:
    """What the arrays take: for each slot of the table of edges, each node, each hidden row."""

    per_slot: int
    per_node: int
    per_row: int


@dataclass(frozen=True)
class Limits:
    """How large the arrays may grow: slots of the table of edges (a power of two), nodes, hidden rows."""

    num_slots: int
    max_nodes: int
    max_rows: int

    @property
    def max_edges(self) -> int:
        return int(MAX_LOAD * self.num_slots)

    @classmethod
    def within(cls, capacity_bytes: int, costs: ByteCosts, num_edges: int = 0, num_nodes: int = 0) -> Limits:
        """At most half of the bytes for the trie, as its table has a power of two of slots; what is left for rows.

        Args:
            num_edges, num_nodes: there is room for so many in any case. Where half of the bytes is too little for
                them, the rows get less, and where all is too little, the bound is passed by what these take.
        """
        capacity_bytes -= _FIXED_BYTES
        bytes_per_slot = costs.per_slot + MAX_LOAD * costs.per_node
        num_slots = _FEWEST_SLOTS
        while 2 * num_slots * bytes_per_slot <= capacity_bytes * _TRIE_SHARE:
            num_slots *= 2
        while MAX_LOAD * num_slots < num_edges:
            num_slots *= 2
        max_nodes = max(int(MAX_LOAD * num_slots) + START + 1, num_nodes)
        left = capacity_bytes - costs.per_slot * num_slots - costs.per_node * max_nodes
        return cls(num_slots, max_nodes, max(left // costs.per_row, _FEWEST_ROWS))
