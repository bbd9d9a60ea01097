"""Where a table larger than it should be lies: all on the device, only what finds its rows, or only a cache of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asr.errors import AsrError

Level = Literal["resident", "index", "cache"]
LEAST_PLACES = 1024


@dataclass(frozen=True)
class Placement:
    """A level of placement and the cache that the budget leaves it.

    Attributes:
        level: `resident`, everything on the device; `index`, what finds a row, rows being fetched; `cache`, neither.
        num_places: of the cache of rows; 0 where everything is resident.
    """

    level: Level
    num_places: int

    @classmethod
    def within(
        cls, device_budget: int, resident_bytes: int, index_bytes: int | None, place_bytes: int, what: str
    ) -> Placement:
        """The first level that fits the budget, with as many cache places as it leaves.

        Args:
            device_budget: bytes of device memory to spend.
            resident_bytes: of the whole table.
            index_bytes: of what finds its rows; None where nothing is needed for that.
            place_bytes: of one row in the cache.
            what: named where the budget is too small.

        Raises:
            AsrError: the budget is too small for the smallest cache.
        """
        if resident_bytes <= device_budget:
            return cls("resident", 0)
        least = LEAST_PLACES * place_bytes
        if index_bytes is not None and index_bytes + least <= device_budget:
            return cls("index", (device_budget - index_bytes) // place_bytes)
        if least > device_budget:
            raise AsrError(f"A device budget of {device_budget} bytes is too small for {what}; give {least} or more.")
        return cls("cache", device_budget // place_bytes)
