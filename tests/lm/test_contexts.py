"""Numbers of contexts: unique, reused once forgotten, packed and unpacked exactly, by tensors as by loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asr.errors import AsrError
from asr.lm.contexts import ContextTable, DenseContexts, has_room, pack_contexts, unpack_contexts

CPU = torch.device("cpu")


def numbered(table: ContextTable, batch: list[int], numbers: dict[int, int]) -> tuple[Tensor, Tensor]:
    """A batch's keys and the table's numbers of them, each of which is the one that it had, if it had one."""
    key = torch.tensor(batch, dtype=torch.int64) * (1 << 50) + 3
    idx = table.index_of(key)
    for one, number in zip(key.tolist(), idx.tolist(), strict=True):
        assert numbers.setdefault(one, number) == number
    return key, idx


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 50), max_size=40), max_size=10))
def test_keys_are_numbered_once(batches: list[list[int]]) -> None:
    table = ContextTable(num_buckets=1)
    numbers: dict[int, int] = {}
    for batch in batches:
        key, idx = numbered(table, batch, numbers)
        assert torch.equal(table.key_of(idx), key)
    assert sorted(numbers.values()) == list(range(len(table)))


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=20), min_size=10, max_size=20))
def test_numbers_of_keys_that_are_not_kept_are_given_again(batches: list[list[int]]) -> None:
    table = ContextTable(num_buckets=1)
    numbers: dict[int, int] = {}
    for batch in batches:
        key, idx = numbered(table, batch, numbers)
        assert len(set(numbers.values())) == len(numbers) == len(table)
        assert max(numbers.values()) < 64  # at most 40 at a time
        table.keep(idx)
        numbers = {one: numbers[one] for one in key.tolist()}
        assert len(table) == len(numbers) and torch.equal(table.key_of(idx), key)


@pytest.mark.slow
@given(
    num_models=st.integers(2, 5),
    rows=st.lists(st.lists(st.integers(0, (1 << 31) - 1), min_size=5, max_size=5), max_size=20),
)
def test_packing_is_exact(num_models: int, rows: list[list[int]]) -> None:
    contexts = DenseContexts(num_models, CPU)
    parts = [torch.tensor([row[which] for row in rows], dtype=torch.int64) for which in range(num_models)]
    packed = contexts.pack(parts)
    assert len(torch.unique(packed)) == len({tuple(row[:num_models]) for row in rows})
    assert (packed >= 0).all()
    for ours, theirs in zip(contexts.unpack(packed), parts, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("num_models", [2, 3, 4])
def test_loops_pack_as_tensors_do(num_models: int) -> None:
    """Batch by batch, in turns: each finds what the other has numbered, and tables grow on the way."""
    contexts, generator = DenseContexts(num_models, CPU), torch.Generator().manual_seed(0)
    num_stops, lower = 0, set[tuple[int, ...]]()
    for size in (3, 40, 700, 3000):
        parts = [torch.randint(1 << 12, (size,), generator=generator) for _ in range(num_models)]
        lower |= set(zip(*(part.tolist() for part in parts[-2:]), strict=True))
        array, packed = torch.stack(parts).numpy(), np.empty(size, dtype=np.int64)
        tables = contexts.lookup_tables()
        if num_models > 2:
            while not has_room(tables, size):
                num_stops += 1
                tables = contexts.lookup_tables()
        with np.errstate(over="ignore"):
            pack_contexts(array, tables, packed)
            found = np.empty_like(array)
            unpack_contexts(packed, tables, found)
        contexts.take()
        assert (found == array).all()
        # All but the first context are numbered; with three models, each pair of the others once.
        if num_models < 4:
            assert len(contexts) == (len(lower) if num_models == 3 else 0)
        assert contexts.pack(parts).tolist() == packed.tolist()
        for ours, theirs in zip(contexts.unpack(torch.from_numpy(packed)), parts, strict=True):
            assert torch.equal(ours, theirs)
    assert (num_stops > 0) == (num_models > 2)


@pytest.mark.slow
def test_numbers_of_a_stream_without_an_end_are_bounded() -> None:
    contexts, generator, most = DenseContexts(4, CPU, forget_from=8), torch.Generator().manual_seed(0), 0
    live = contexts.pack([torch.randint(1 << 20, (4,), generator=generator) for _ in range(4)])
    for _ in range(100):
        parts = [torch.randint(1 << 20, (4,), generator=generator) for _ in range(4)]
        live = torch.cat([live[:2], contexts.pack(parts)[:2]])
        expected = [part.tolist() for part in contexts.unpack(live)]
        contexts.retain(live)
        assert [part.tolist() for part in contexts.unpack(live)] == expected
        most = max(most, len(contexts))
    assert most <= 16
    contexts.retain(live[:0])
    assert len(contexts) == 0


def test_a_context_that_does_not_fit_is_an_error() -> None:
    one = torch.ones(1, dtype=torch.int64)
    for num_models in (2, 3):
        for which in range(num_models):
            for excess in (1 << 32, -1):
                parts = [one] * num_models
                parts[which] = one * excess
                contexts = DenseContexts(num_models, CPU)
                with pytest.raises(AsrError, match=r"not one of 0 to 2\*\*31 - 1"):
                    contexts.pack(parts)
                with pytest.raises(AsrError, match=r"not one of 0 to 2\*\*31 - 1"):
                    contexts.check()
    with pytest.raises(AsrError, match=r"not one of 0 to 2\*\*31 - 1"):
        DenseContexts(2, CPU).pack([one << 31, one])
