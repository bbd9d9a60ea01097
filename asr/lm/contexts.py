"""Numbers contexts: the keys of one model, and combinations of several models' contexts.

Shapes: Q queries, M models, L live contexts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.kernels.hash_table import MAX_LOAD, HashTable, marked_positions, slot_of
from asr.kernels.memory import no_autograd

_FIRST_BUCKETS = 1 << 9


def check_contexts(low: int, high: int, num_contexts: int, model: str) -> None:
    """Raises AsrError if contexts from `low` to `high` are not all among the `num_contexts` of a model."""
    if low < 0 or high >= num_contexts:
        raise AsrError(
            f"The context index {low if low < 0 else high} is not one of the {num_contexts} of {model}; use only those "
            "that the same model has returned since it was last reset."
        )


def check_words(low: int, high: int, num_words: int, model: str) -> None:
    """Raises AsrError if word ids from `low` to `high` are not all among the `num_words` of a model."""
    if low < 0 or high >= num_words:
        raise AsrError(
            f"The word id {low if low < 0 else high} is not one of the {num_words} of {model}; map words to its "
            "vocabulary with RemappedLM."
        )


class ContextTable:
    """Numbers keys 0, 1, 2, ... in the order of their first occurrence; equal keys get equal numbers.

    Args:
        device: where the table is kept and queried.
        num_buckets: its initial size, a power of two; it grows by doubling.
    """

    def __init__(self, device: torch.device | str = "cpu", num_buckets: int = _FIRST_BUCKETS) -> None:
        self._device = torch.device(device)
        self._num_buckets = num_buckets
        self._queued: QueuedNumbers | None = None
        self._calls = _ROOM_IN_CALLS
        self.clear()

    def clear(self) -> None:
        """Drops all keys. Arrays that calls were reserved for are kept, since a CUDA graph may have captured them."""
        if self._queued is None:
            self._table = HashTable(self._num_buckets, self._device)
            self._key_of = torch.zeros(self._num_buckets, dtype=torch.int64, device=self._device)
        else:
            self._table.clear()
        # Numbers that are not in use and have room in `_key_of`, ascending.
        self._free = torch.arange(len(self._key_of), device=self._device)
        self._counts = np.zeros(_NUM_COUNTS, dtype=np.int64)

    def __len__(self) -> int:
        return self._table.count

    def key_of(self, idx: Tensor) -> Tensor:
        """The keys of numbers assigned before, (Q,).

        Raises:
            AsrError: a number cannot have been assigned; on a CPU only.
        """
        if idx.numel() and idx.device.type == "cpu":
            low, high = torch.aminmax(idx)
            check_contexts(int(low), int(high), len(self._key_of), "a combined language model")
        return self._key_of.index_select(0, idx)

    def index_of(self, key: Tensor) -> Tensor:
        """Numbers (Q,) int64 of keys (Q,), which are not negative; new keys are added in ascending order."""
        if self._queued is not None and self._queued.is_reserved:
            return self._queued.index_of(key, self._table, self._key_of)
        if self._table.can_put:
            slot, _, is_first = self._table.put(key)
            num_new = int(is_first.sum())  # the only time the host waits for the device
            if num_new:
                one = marked_positions(is_first, num_new)
                new_slot = slot.index_select(0, one)
                self._table.added(new_slot)
                self._number(key.index_select(0, one), new_slot)
            return self._table.values.index_select(0, slot)
        slot, missing = self._table.find(key)
        if missing is not None:
            slot = self._insert(key, slot, missing)
        return self._table.values.index_select(0, slot)

    @property
    def lacks_room(self) -> Tensor | None:
        """Whether a reserved call had too little room, (1,) bool; None if calls are not reserved."""
        return self._queued.lacks if self._queued is not None and self._queued.is_reserved else None

    def keep(self, idx: Tensor) -> None:
        """Drops all keys except those with the numbers idx (L,); the other numbers are used again."""
        is_kept = torch.zeros(len(self._key_of), dtype=torch.bool, device=self._key_of.device)
        is_kept[idx] = True
        self._table.keep(is_kept.index_select(0, self._table.values))
        self._free = (~is_kept).nonzero().squeeze(1)

    def reserve(self, num_queries: int) -> tuple[Tensor, ...]:
        """See `LanguageModel.reserve`; for calls of `index_of`, on a GPU with Triton."""
        room = self._calls * num_queries
        # Searches whose calls have other sizes, such as those with fewer streams, share the arrays: those that one has
        # captured remain.
        if self._queued is None or len(self._queued.free) < room:
            self._queued = QueuedNumbers(room, self._free.device)
        room = len(self._queued.free)
        self._table.reserve(room)
        self._reserve_numbers(room)
        self._queued.begin(self._free)
        return (self._table.keys, self._table.values, self._key_of, *self._queued.tensors())

    def release(self) -> bool:
        """See `LanguageModel.release`."""
        assert self._queued is not None
        try:
            num_new, had_room = self._queued.end()
        except BaseException:
            self._undo()
            raise
        if num_new is None:
            self._undo()
            return True
        self._table.count += num_new
        self._free = self._free[num_new:]
        if not had_room:
            self._calls *= 2
        return had_room

    def _undo(self) -> None:
        """Restores the numbers that were in use when calls were reserved."""
        is_used = torch.ones(len(self._key_of), dtype=torch.bool, device=self._key_of.device)
        is_used[self._free] = False
        number = is_used.nonzero().squeeze(1)
        self._table.clear()
        slot, _ = self._table.insert(self._key_of.index_select(0, number))
        self._table.values.index_copy_(0, slot, number)

    def lookup_tables(self, room: int) -> NumberingTables:
        """The arrays for a loop on a CPU, with room for `room` new keys, or for as many as the last loop could not add.

        Call `take` after the loop, before any other use of the table.
        """
        room = max(room, int(self._counts[_LACKING]))
        self._table.reserve(room)
        self._reserve_numbers(room)
        most = min(int(MAX_LOAD * self._table.num_slots) - self._table.count, len(self._free))
        self._counts[:] = 0, most, 0
        arrays = self._table.values.numpy(), self._key_of.numpy(), self._free.numpy()
        return NumberingTables(*self._table.for_loop(), *arrays, self._counts)

    def take(self) -> None:
        """Takes over the keys that a loop has added."""
        num_new = int(self._counts[_NEW])
        self._table.count += num_new
        self._free = self._free[num_new:]
        self._counts[_NEW] = 0

    def _insert(self, key: Tensor, slot: Tensor, missing: Tensor) -> Tensor:
        """Adds the keys at the positions `missing`; slot (Q,), valid for the others -> slot (Q,), valid for all."""
        table, num_rebuilds = self._table, self._table.num_rebuilds
        new_slot, one = table.insert(key.index_select(0, missing))
        self._number(key.index_select(0, missing.index_select(0, one)), new_slot.index_select(0, one))
        if table.num_rebuilds != num_rebuilds:
            return table.find(key)[0]
        return slot.index_copy_(0, missing, new_slot)

    def _number(self, key: Tensor, slot: Tensor) -> None:
        """Numbers new keys (D,), which are in slots (D,)."""
        key, order = key.sort()
        self._reserve_numbers(len(key))
        number, self._free = self._free[: len(key)], self._free[len(key) :]
        self._table.values.index_copy_(0, slot.index_select(0, order), number)
        self._key_of.index_copy_(0, number, key)

    def _reserve_numbers(self, num_new: int) -> None:
        while num_new > len(self._free):
            num = len(self._key_of)
            self._key_of = torch.cat([self._key_of, torch.zeros_like(self._key_of)])
            self._free = torch.cat([self._free, torch.arange(num, 2 * num, device=self._free.device)])


def release_all(releases: Sequence[Callable[[], bool]]) -> bool:
    """Calls all of these, even if one raises an exception -> whether all had room."""
    had_room: list[bool] = []
    with contextlib.ExitStack() as stack:
        for release in releases:
            stack.callback(lambda own: had_room.append(own()), release)
    return all(had_room)


_ROOM_IN_CALLS = 4


class QueuedNumbers:
    """Numbers keys while the host does not wait for the device, which counts the new ones.

    Args:
        room: F, how many new keys may be numbered.
        device: a GPU.

    Attributes:
        free: (F,) the numbers to assign next.
        lacks: (1,) bool, whether there was too little room for a call.
        is_reserved: whether calls are to be queued.
    """

    def __init__(self, room: int, device: torch.device) -> None:
        self.free = torch.zeros(room, dtype=torch.int64, device=device)
        self._num_new = torch.zeros(1, dtype=torch.int64, device=device)
        self.lacks = torch.zeros(1, dtype=torch.bool, device=device)
        self.is_reserved = False
        self._is_whole = True  # whether the last call was not interrupted

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, which stay the same."""
        return self.free, self._num_new, self.lacks

    def begin(self, free: Tensor) -> None:
        """Before the first call; free (F or more,) are the numbers that are not in use."""
        self.free.copy_(free[: len(self.free)])
        self._num_new.zero_()
        self.lacks.zero_()
        self.is_reserved = self._is_whole = True

    def index_of(self, key: Tensor, table: HashTable, key_of: Tensor) -> Tensor:
        """Numbers (Q,) of keys (Q,); of new ones for which there is no room, any numbers, which may not be in use."""
        self._is_whole = False
        found = table.find_queued(key)
        has_room = self._num_new + len(key) <= len(self.free)
        self.lacks.logical_or_(~has_room)
        slot, is_first = table.insert_queued(key, found, has_room.long())
        place = is_first.cumsum(0)
        number = self.free.index_select(0, (self._num_new + place - 1).clamp(0, len(self.free) - 1))
        table.store_queued(is_first, slot, number, table.values)
        table.store_queued(is_first, number, key, key_of)
        self._num_new.add_(place[-1:])
        self._is_whole = True
        return table.values.index_select(0, slot.clamp(min=0))

    def end(self) -> tuple[int | None, bool]:
        """After the last call: how many keys are new, and whether there was room for all; waits for the device.

        If the last call was interrupted, there may be keys without a number, and it is not known how many: None.
        """
        self.is_reserved = False
        if not self._is_whole:
            return None, True
        num_new, lacks = torch.cat([self._num_new, self.lacks.long()]).tolist()
        return num_new, not lacks


# Indices into `NumberingTables.counts`: keys added by the loop, keys it may add, and keys for which there was no room.
_NEW, _MAX_NEW, _LACKING = range(3)
_NUM_COUNTS = 3


class NumberingTables(NamedTuple):
    """The arrays of a `ContextTable` that loops read and write.

    Attributes:
        keys, shift: of the hash table.
        number: (slots,) the number of the key in each slot.
        key_of: (numbers,) the key of each number.
        free: (F,) the numbers to assign next.
        counts: (3,) int64.
    """

    keys: Any
    shift: int
    number: Any
    key_of: Any
    free: Any
    counts: Any


def has_room(numberings: Any, num: int) -> bool:
    """Whether a loop may add `num` new keys to each table."""
    for tables in numberings:
        counts = tables.counts
        if counts[_NEW] + num > counts[_MAX_NEW]:
            counts[_LACKING] = num
            return False
    return True


def number_keys(keys: Any, tables: Any, number: Any) -> None:
    """Fills number (Q,) with the numbers of keys (Q,), new ones included; there must be room for them."""
    table, width, counts = tables.keys, tables.keys.shape[1], tables.counts
    for query in range(len(keys)):
        slot = slot_of(table, keys[query], tables.shift)
        if slot < 0:
            slot = -1 - slot
            new = tables.free[counts[_NEW]]
            table[slot // width, slot % width], tables.number[slot], tables.key_of[new] = keys[query], new, keys[query]
            counts[_NEW] += 1
        number[query] = tables.number[slot]


_PACKED_BITS = 32
_LOW_BITS = (1 << _PACKED_BITS) - 1
FORGET_FROM = 1 << 16
"""How many numbers of `DenseContexts` may be in use before any are forgotten."""
_ROOM = 1 << 10  # a loop can add at least this many keys


class DenseContexts:
    """Packs the contexts of several models into one number, exactly.

    Two contexts go into the upper 31 and the lower 32 bits of an int64. If there are more, the last two are packed
    into one and numbered densely, so that the result fits 32 bits, until two are left. So the first model should be
    the one with the most contexts.

    Args:
        num_models: M; if it is 1, contexts stay as they are.
        device: where contexts are packed.
        forget_from: how many numbers may be in use before `retain` forgets any.
    """

    @no_autograd()
    def __init__(self, num_models: int, device: torch.device, forget_from: int = FORGET_FROM) -> None:
        self.num_models = num_models
        self._device = device
        self._forget_from = forget_from
        self._unused = ContextTable(num_buckets=1).lookup_tables(0)
        self._numberings = [ContextTable(self._device) for _ in range(max(0, self.num_models - 2))]
        self._forget_at = self._forget_from
        # Whether an index was too large. To test it in every call, the host would have to wait for a GPU.
        self._exceeds = torch.zeros((), dtype=torch.bool, device=self._device)

    def _clear(self) -> None:
        for numbering in self._numberings:
            numbering.clear()
        self._forget_at = self._forget_from
        self._exceeds.zero_()

    def __len__(self) -> int:
        return max((len(numbering) for numbering in self._numberings), default=0)

    def pack(self, contexts: Sequence[Tensor]) -> Tensor:
        """M tensors of contexts, (Q,) each -> one tensor, (Q,).

        Raises:
            AsrError: a context needs more bits than there are; on a GPU only `check` raises it.
        """
        packed = contexts[-1]
        if self.num_models == 1:
            return packed
        for context_idx, numbering in zip(contexts[-2:0:-1], self._numberings, strict=True):
            packed = numbering.index_of(self._packed(context_idx, packed))
        return self._packed(contexts[0], packed)

    def extended(self, context_idx: Tensor, contexts: Sequence[Tensor]) -> Tensor:
        """`pack` of the M contexts that follow context_idx (Q,), or context_idx where reserved calls lack room.

        Later calls may query what this gives, so it must be in use: models may have forgotten any others.
        """
        packed = self.pack(contexts)
        for numbering in self._numberings:
            lacks = numbering.lacks_room
            if lacks is not None:
                packed = torch.where(lacks, context_idx, packed)
        return packed

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """The inverse of `pack`."""
        if self.num_models == 1:
            return [packed]
        contexts, rest = [packed >> _PACKED_BITS], packed & _LOW_BITS
        for numbering in reversed(self._numberings):
            key = numbering.key_of(rest)
            contexts.append(key >> _PACKED_BITS)
            rest = key & _LOW_BITS
        return [*contexts, rest]

    def retain(self, live: Tensor) -> None:
        """Once many numbers are in use, forgets all those that contexts (L,) do not need."""
        if live.numel() == 0:
            self.check()
            self._clear()
        elif len(self) >= self._forget_at:
            rest = live & _LOW_BITS
            for numbering in reversed(self._numberings):
                following = numbering.key_of(rest) & _LOW_BITS
                numbering.keep(rest)
                rest = following
            self._forget_at = max(self._forget_from, 2 * len(self))

    def check(self) -> None:
        """Raises AsrError if a context did not fit its bits."""
        if bool(self._exceeds):
            raise AsrError(
                f"A context index of a combined language model is not one of 0 to 2**{_PACKED_BITS - 1} - 1; number "
                "the histories as they are met, and limit them, for example by a capacity."
            )

    def reserve(self, num_queries: int) -> tuple[Tensor, ...]:
        """See `LanguageModel.reserve`; for calls of `pack` and `unpack`, on a GPU with Triton."""
        tensors = [self._exceeds]
        with contextlib.ExitStack() as undo:
            for numbering in self._numberings:
                tensors += numbering.reserve(num_queries)
                undo.callback(numbering.release)
            undo.pop_all()
        return tuple(tensors)

    def release(self) -> bool:
        """See `LanguageModel.release`."""
        return release_all([numbering.release for numbering in self._numberings])

    def lookup_tables(self) -> tuple[NumberingTables, ...]:
        """The M - 2 numberings for loops, with room for new numbers; see `ContextTable.lookup_tables`.

        With two models there is an unused one, because numba has no type for the elements of an empty tuple.
        """
        if not self._numberings:
            return (self._unused,)
        return tuple(numbering.lookup_tables(_ROOM) for numbering in self._numberings)

    def take(self) -> None:
        """Takes over the numbers that a loop has assigned."""
        for numbering in self._numberings:
            numbering.take()

    def _packed(self, upper: Tensor, lower: Tensor) -> Tensor:
        excess = torch.bitwise_or(upper >> (_PACKED_BITS - 1), lower >> _PACKED_BITS)
        self._exceeds.logical_or_(torch.any(excess))
        if excess.device.type == "cpu":
            self.check()
        return torch.bitwise_or(torch.bitwise_left_shift(upper, _PACKED_BITS), lower)


def pack_contexts(contexts: Any, numberings: Any, packed: Any) -> None:
    """`DenseContexts.pack` as a loop: contexts (M, Q) into packed (Q,); there must be room for new numbers."""
    num_models, num = contexts.shape
    for i in range(num):
        packed[i] = contexts[num_models - 1, i]
    for which in range(num_models - 2):
        for i in range(num):
            packed[i] |= contexts[num_models - 2 - which, i] << _PACKED_BITS
        number_keys(packed, numberings[which], packed)
    for i in range(num):
        packed[i] |= contexts[0, i] << _PACKED_BITS


def unpack_contexts(packed: Any, numberings: Any, contexts: Any) -> bool:
    """Fills contexts (M, Q) from packed (Q,): the inverse of `pack_contexts`; False if a number is unknown."""
    num_models, num = contexts.shape
    for i in range(num):
        contexts[0, i], rest = packed[i] >> _PACKED_BITS, packed[i] & _LOW_BITS
        for which in range(1, num_models - 1):
            key_of = numberings[num_models - 2 - which].key_of
            if rest >= len(key_of):
                return False
            contexts[which, i], rest = key_of[rest] >> _PACKED_BITS, key_of[rest] & _LOW_BITS
        contexts[num_models - 1, i] = rest
    return True
