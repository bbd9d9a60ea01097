"""Kernels whose programs run interleaved give what tensor operations give, and a broken atomic operation is noticed."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
os.environ.setdefault("TRITON_INTERPRET", "1")

from asr.kernels import hash_table_triton as kernels
from tests.reference.interleaving import interleaved_programs

pytestmark = pytest.mark.slow

_MULTIPLIER = -7046029254386353131


def fill_table(seed: int, lanes: int) -> None:
    """Inserts random keys in two rounds, and checks what each query and each place says."""
    generator = torch.Generator().manual_seed(seed)
    num_buckets = 8 << (seed % 3)
    table = torch.full((num_buckets, 8), -1, dtype=torch.int64)
    value = torch.zeros(num_buckets * 8, dtype=torch.int64)
    shift, known = 63 - (num_buckets - 1).bit_length(), set()
    with mock.patch.object(kernels, "_LANES", lanes):
        for _ in range(2):
            key: Tensor = torch.randint(0, 40, (num_buckets * 2,), generator=generator) * 1234567
            _, missing = kernels.find_keys(table, key, _MULTIPLIER, shift)
            if missing is None:
                continue
            wanted = key[missing]
            slot, first = kernels.insert_keys(table, value, wanted, _MULTIPLIER, shift)
            assert torch.equal(table.view(-1)[slot], wanted)
            new = wanted[first].tolist()
            assert len(set(new)) == len(new) and known.isdisjoint(new)
            assert first.tolist() == [wanted.tolist().index(one) for one in new]
            known.update(new)
            assert kernels.find_keys(table, key, _MULTIPLIER, shift)[1] is None
    assert int((table >= 0).sum()) == len(known)


@pytest.mark.parametrize("lanes", [2, 4, 16])
def test_keys_inserted_by_interleaved_programs_are_found_once(lanes: int) -> None:
    with interleaved_programs(lanes) as counts:
        for seed in range(4):
            fill_table(seed, lanes)
    assert counts.switches > counts.programs > counts.launches > 0


def test_a_compare_and_swap_that_is_not_atomic_is_noticed() -> None:
    def is_noticed(seed: int) -> bool:
        try:
            with interleaved_programs(seed, splits_cas=True):
                fill_table(seed, 4)
        except AssertionError:
            return True
        return False

    assert any(is_noticed(seed) for seed in range(8))
