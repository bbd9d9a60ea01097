"""Where a table is put within a budget, to the byte, and what its cache counts."""

from __future__ import annotations

import pytest
import torch

from asr.errors import AsrError
from asr.lm.offload import LEAST_PLACES, CachedRows, CacheStatistics, HostTable, TablePlacement

LEAST = LEAST_PLACES * 10  # bytes of the smallest cache, with 10 a place


@pytest.mark.parametrize(
    ("budget", "resident", "index", "expected"),
    [
        (99_999, 99_999, 500, TablePlacement("resident", 0)),
        (99_998, 99_999, 500, TablePlacement("index", (99_998 - 500) // 10)),
        (LEAST + 500, 99_999, 500, TablePlacement("index", LEAST_PLACES)),
        (LEAST + 499, 99_999, 500, TablePlacement("cache", LEAST_PLACES + 49)),
        (LEAST + 500, 99_999, None, TablePlacement("cache", LEAST_PLACES + 50)),
        (LEAST, 99_999, 500, TablePlacement("cache", LEAST_PLACES)),
        (0, 0, None, TablePlacement("resident", 0)),
    ],
)
def test_the_first_placement_that_fits(budget: int, resident: int, index: int | None, expected: TablePlacement) -> None:
    assert TablePlacement.within(budget, resident, index, 10, "a table") == expected


def test_one_byte_too_few() -> None:
    with pytest.raises(AsrError, match=f"budget of {LEAST - 1} bytes is too small for a table; give {LEAST} or more"):
        TablePlacement.within(LEAST - 1, 99_999, 500, 10, "a table")


@pytest.mark.parametrize(("asked", "places"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 4), (1023, 512), (1024, 1024)])
def test_a_cache_has_a_power_of_two_of_places(asked: int, places: int) -> None:
    cached = CachedRows(lambda key: torch.zeros(len(key), 3), 3, torch.float32, asked, "cpu")
    assert CachedRows.place_bytes(3, torch.float32) == 8 + 3 * 4
    assert cached.num_bytes == places * (8 + 3 * 4)


@pytest.mark.parametrize("num_places", [0, 1, 64])
def test_what_is_asked_found_and_fetched(num_places: int) -> None:
    """With one place, the newest row takes it."""
    fetched: list[list[int]] = []

    def read(key: torch.Tensor) -> torch.Tensor:
        fetched.append(key.tolist())
        return torch.stack([key, -key], dim=1)

    cached = CachedRows(read, 2, torch.int64, num_places, "cpu")
    assert cached.statistics == CacheStatistics(0, 0, 0, 0) and cached.statistics.hit_ratio == 0.0
    for key in ([5, 5, 5], [5], [6, 6], [5]):
        assert cached.rows(torch.tensor(key)).tolist() == [[one, -one] for one in key]
    again = {0: [[5], [5], [6], [5]], 1: [[5], [6], [5]], 64: [[5], [6]]}[num_places]
    assert fetched == again
    assert cached.statistics == CacheStatistics(7, 4, len(again), 16 * len(again))
    assert cached.statistics.hit_ratio == 1.0 - len(again) / 4


@pytest.mark.parametrize("num_rows", [8000, 8001, 8007, 8008])
def test_an_index_has_a_bit_for_each_row(num_rows: int) -> None:
    table = torch.zeros(num_rows, 1)
    table[[0, 7, 8, 13, num_rows - 1]] = torch.tensor([[1.0], [-2.0], [3.0], [4.0], [5.0]])
    index_bytes = -(-num_rows // 8)
    host = HostTable(table, "cpu", index_bytes + 12 * LEAST_PLACES, skips_zeros=True)
    assert host.placement == "index" and host.device_bytes == index_bytes + 12 * LEAST_PLACES
    assert torch.equal(host.rows(torch.arange(num_rows)), table)
    assert host.statistics.num_fetched == 5
    without = HostTable(table, "cpu", index_bytes + 12 * LEAST_PLACES - 1, skips_zeros=True)
    assert without.placement == "cache" and without.device_bytes == 12 * LEAST_PLACES
    whole = HostTable(table, "cpu", 4 * num_rows, skips_zeros=True)
    assert whole.placement == "resident" and whole.device_bytes == whole.table_bytes == 4 * num_rows
    assert whole.statistics == CacheStatistics() and torch.equal(whole.rows(torch.tensor([7, 6])), table[[7, 6]])
