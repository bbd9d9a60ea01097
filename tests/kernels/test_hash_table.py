"""The tensor hash table against a dict."""

import importlib
import pickle
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.kernels import hash_table
from asr.kernels.hash_table import HashTable

# Kernels run in Triton's interpreter.
FORMS = ["tensor", "loops", pytest.param("kernels", marks=pytest.mark.slow)]


def made(num_buckets: int, form: str) -> HashTable:
    """A table on the CPU; the kernels run in Triton's interpreter."""
    if form != "kernels":
        return HashTable(num_buckets, torch.device("cpu"), compiled=form == "loops")
    pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
    with mock.patch.object(hash_table, "gpu_module", lambda name, device: importlib.import_module(name)):
        return HashTable(num_buckets, torch.device("cpu"))


# Few distinct keys and a tiny table: full buckets, wrap-around and growth all happen.
KEYS = st.lists(st.integers(0, 200), max_size=80)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(batches=st.lists(KEYS, max_size=6), spread=st.sampled_from([1, 1 << 32, 12345678901]))
def test_equals_a_dict(batches, spread, form):
    table = made(1, form)
    oracle: dict[int, int] = {}
    for batch in batches:
        key = torch.tensor(batch, dtype=torch.int64) * spread
        slot, missing = table.find(key)
        absent = [] if missing is None else missing.tolist()
        assert absent == [i for i, k in enumerate(key.tolist()) if k not in oracle]
        expected = [oracle[k] for k in key.tolist() if k in oracle]
        assert [table.values[s].item() for s in slot.tolist() if s >= 0] == expected
        if absent:
            new, one = table.insert(key[missing])
            assert sorted(key[missing][one].tolist()) == sorted({key[i].item() for i in absent})
            table.values[new] = key[missing] * 7
            oracle |= {k: (k * 7) for k in key[missing].tolist()}
        assert table.count == len(oracle)
        slot, missing = table.find(key)
        assert missing is None
        assert table.keys.view(-1)[slot].tolist() == key.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_keep_drops_the_unmarked_keys_and_finds_the_others(form):
    table = made(1, form)
    key = torch.arange(1000)
    slot, _ = table.insert(key)
    table.values[slot] = key
    table.keep(table.values % 3 == 0)
    slot, missing = table.find(key)
    assert missing is not None
    assert missing.tolist() == [i for i in range(1000) if i % 3]
    assert table.values[slot[::3]].tolist() == list(range(0, 1000, 3))


@pytest.mark.parametrize("form", FORMS)
def test_colliding_keys_overflow_into_the_next_buckets(form):
    table = made(16, form)
    candidates = torch.arange(4000)
    home = table._bucket_of(candidates)
    key = candidates[home == 15][:30]
    table.insert(key)
    assert table.keys.shape[0] == 16
    slot, missing = table.find(key)
    assert missing is None
    assert len(set(slot.tolist())) == 30
    assert table.find(candidates[home == 15][30:40])[1].tolist() == list(range(10))


def test_a_pickled_table_finds_keys_that_it_puts_into_the_next_buckets() -> None:
    table = pickle.loads(pickle.dumps(made(16, "tensor")))
    candidates = torch.arange(4000)
    key = candidates[table._bucket_of(candidates) == 15][:30]
    table.insert(key)
    assert table.find(key)[1] is None


def test_keys_that_differ_in_few_bits_spread_over_the_table() -> None:
    table = made(1 << 10, "tensor")
    for shift in (0, 32):
        assert len(torch.unique(table._bucket_of((torch.arange(1000) << shift) + 7))) > 500
