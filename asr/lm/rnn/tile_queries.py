"""What loops that sum over the vocabulary share: tables in tiles of words, queries in an order that suits the cache.

Shapes: Q queries, H hidden, K inner dimension, M history words, R history lengths, V vocabulary, P tiles of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.tile_kernel import COLUMNS, ROWS
from asr.lm.threads import in_threads

TILE = 12 * COLUMNS


def tiled(rows: Tensor, width: int = TILE) -> Tensor:
    """rows (V, K) -> (P, K, width), zeros after the last word."""
    return F.pad(rows, (0, 0, 0, -len(rows) % width)).view(-1, width, rows.shape[1]).transpose(1, 2).contiguous()


def of_tiles(values: Tensor, padding: float = 0.0) -> Tensor:
    """values (V,) -> (P, TILE)."""
    return F.pad(values, (0, -len(values) % TILE), value=padding).view(-1, TILE)


def log_sums(
    loop: Callable[..., None], queries: tuple[Tensor, ...], history: Tensor, maxent: HashedMaxEnt | None,
    tables: tuple[Any, ...], rooms: tuple[tuple[tuple[int, ...], torch.dtype], ...],
) -> Tensor:  # fmt: skip
    """log Z (Q,) by loop(*queries, places, *tables, *rooms, top, total), which adds exp(score - top) to total.

    queries: (Q, ...) each; history (Q, M); rooms: the shapes of what each thread needs to work in.
    """
    num_queries = len(history)
    places = history.new_zeros(num_queries, 0) if maxent is None else maxent.places(history)
    order = torch.arange(num_queries)
    # Histories that end alike one after the other: the second finds its features in the cache.
    for column in places[:, :2].t().flip(0):
        order = order[column[order].argsort(stable=True)]
    # The last query again to fill the last rows.
    order = order[torch.arange(-(-num_queries // ROWS) * ROWS).clamp(max=num_queries - 1)]
    columns = [values[order].contiguous().numpy() for values in (*queries, places)]
    arrays = [table.numpy() if isinstance(table, Tensor) else table for table in tables]
    top = torch.full((len(order),), -torch.inf)
    total = torch.zeros(len(order), dtype=torch.float64)

    def work(begin: int, end: int) -> None:
        part = slice(ROWS * begin, ROWS * end)
        room = (torch.empty(shape, dtype=dtype).numpy() for shape, dtype in rooms)
        loop(*(column[part] for column in columns), *arrays, *room, top[part].numpy(), total[part].numpy())

    in_threads(work, len(order) // ROWS, rows_at_least=8)
    log_z = torch.empty(num_queries)
    log_z[order] = (top + total.log()).float()
    return log_z
