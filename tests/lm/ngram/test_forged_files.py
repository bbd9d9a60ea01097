"""n-gram files whose checksums are right and whose arrays are not: with some of them a look-up would never end."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.lm.ngram.io import load_ngram_lm, save_ngram_lm
from asr.lm.ngram.lookup import ArcIndex
from asr.lm.ngram.model import NgramArrays, NgramLM
from tests.reference.tiny_arpa import TINY

# The hand-worked trigram has 6 words, 5 states and 11 arcs, of which 6 leave state 0; states back off at most twice.
NUM_WORDS, NUM_STATES, NUM_ARCS = 6, 5, 11


@pytest.fixture
def lm(tmp_path: Path) -> NgramLM:
    (tmp_path / "tiny.arpa").write_text(TINY)
    return NgramLM.from_arpa(tmp_path / "tiny.arpa")


def put(values: Tensor, place: int, value: float) -> Tensor:
    changed = values.clone()
    changed[place] = value
    return changed


def saved(folder: Path, lm: NgramLM, arrays: NgramArrays, order: Any = None) -> Path:
    save_ngram_lm(NgramLM(lm.vocabulary, arrays, lm.order if order is None else order), folder / "lm.ngram")
    return folder / "lm.ngram"


def test_the_sizes_of_the_hand_worked_model(lm: NgramLM) -> None:
    arrays = lm.arrays
    assert (len(lm.vocabulary), lm.num_states, lm.num_arcs) == (NUM_WORDS, NUM_STATES, NUM_ARCS)
    assert int(arrays.arc_begin[1]) == NUM_WORDS and int(arrays.backoff_state.max()) > 0


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("arc_begin", lambda begin: begin[:-1], "the sizes of its arrays do not fit"),
        ("score", lambda score: score[:-1], "the sizes of its arrays do not fit"),
        ("dst_state", lambda state: state[:-1], "the sizes of its arrays do not fit"),
        ("backoff_score", lambda score: score[:-1], "the sizes of its arrays do not fit"),
        ("word_map", lambda word: word[:-1], "the sizes of its arrays do not fit"),
        ("score_level", lambda level: torch.zeros(256), "the sizes of its arrays do not fit"),
        ("arc_begin", lambda begin: put(begin, 0, 1), "an index is out of range"),
        ("arc_begin", lambda begin: put(begin, 1, NUM_WORDS - 1), "an index is out of range"),
        ("arc_begin", lambda begin: put(begin, 2, NUM_WORDS - 1), "an index is out of range"),
        ("arc_begin", lambda begin: put(begin, -1, NUM_ARCS + 1), "an index is out of range"),
        ("arc_begin", lambda begin: put(begin, -1, NUM_ARCS - 1), "an index is out of range"),
        ("label", lambda label: put(label, -1, NUM_WORDS), "an index is out of range"),
        ("label", lambda label: put(label, 3, -1), "an index is out of range"),
        ("dst_state", lambda state: put(state, 3, NUM_STATES), "an index is out of range"),
        ("dst_state", lambda state: put(state, -1, -1), "an index is out of range"),
        ("word_map", lambda word: put(word, 4, NUM_WORDS), "an index is out of range"),
        ("word_map", lambda word: put(word, 4, -1), "an index is out of range"),
        ("backoff_state", lambda state: put(state, 2, NUM_STATES), "a backoff state is out of range"),
        ("backoff_state", lambda state: put(state, 2, -1), "a backoff state is out of range"),
        ("backoff_state", lambda state: put(state, 2, 2), "backing off does not end"),
        ("backoff_state", lambda state: put(put(state, 2, 3), 3, 2), "backing off does not end"),
        ("score", lambda score: put(score, 4, torch.nan), "a score is not a number"),
        ("score", lambda score: put(score, 4, torch.inf), "a score is not a number"),
        ("backoff_score", lambda score: put(score, 1, torch.nan), "a score is not a number"),
        ("backoff_score", lambda score: put(score, 1, torch.inf), "a score is not a number"),
    ],
)
def test_arrays_that_do_not_fit(
    lm: NgramLM, tmp_path: Path, name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    changes: dict[str, Any] = {name: change(getattr(lm.arrays, name))}
    with pytest.raises(AsrError, match=rf"lm\.ngram: the header does not describe an n-gram model \({message}\)"):
        load_ngram_lm(saved(tmp_path, lm, replace(lm.arrays, **changes)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dst_state", lambda state: put(state, 3, NUM_STATES - 1)),
        ("label", lambda label: put(label, -1, NUM_WORDS - 1)),
        ("word_map", lambda word: put(put(word, 4, NUM_WORDS - 1), 5, 0)),
        ("backoff_state", lambda state: torch.tensor([0, 0, 1, 2, 0], dtype=torch.int32)),  # three times, in a trigram
        ("score", lambda score: put(score, 4, -torch.inf)),
        ("backoff_score", lambda score: put(score, 1, 3.0)),
    ],
)
def test_arrays_at_their_limits(lm: NgramLM, tmp_path: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    changes: dict[str, Any] = {name: change(getattr(lm.arrays, name))}
    found = getattr(load_ngram_lm(saved(tmp_path, lm, replace(lm.arrays, **changes))).arrays, name)
    assert torch.equal(found, changes[name])


@pytest.mark.parametrize(("order", "fits"), [(0, False), (1, True), (64, True), (65, False), (True, False)])
def test_orders(lm: NgramLM, tmp_path: Path, order: Any, fits: bool) -> None:
    path = saved(tmp_path, lm, lm.arrays, order)
    if fits:
        assert load_ngram_lm(path).order == order
    else:
        with pytest.raises(AsrError, match="the sizes of its arrays do not fit"):
            load_ngram_lm(path)
    # Four steps back are too many for the order of 2.
    arrays = replace(lm.arrays, backoff_state=torch.tensor([0, 0, 1, 2, 3], dtype=torch.int32))
    load_ngram_lm(saved(tmp_path, lm, arrays, 3))
    with pytest.raises(AsrError, match="backing off does not end"):
        load_ngram_lm(saved(tmp_path, lm, arrays, 2))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_levels_that_are_no_numbers(lm: NgramLM, tmp_path: Path, value: float) -> None:
    arrays = lm.quantized().arrays
    load_ngram_lm(saved(tmp_path, lm, arrays))
    with pytest.raises(AsrError, match="a score is not a number"):
        load_ngram_lm(saved(tmp_path, lm, replace(arrays, score_level=put(arrays.score_level, 3, value))))
    with pytest.raises(AsrError, match="the sizes of its arrays do not fit"):
        load_ngram_lm(saved(tmp_path, lm, replace(arrays, score_level=arrays.score_level[:255])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: replace(index, num_homes=0), "the size of the hash index does not fit"),
        (lambda index: replace(index, num_homes=len(index.slot) - 7), "the size of the hash index does not fit"),
        (lambda index: replace(index, num_homes=True), "the size of the hash index does not fit"),
        (lambda index: replace(index, word_bits=2), "the key size of the hash index does not fit"),
        (lambda index: replace(index, word_bits=-1), "the key size of the hash index does not fit"),
        (lambda index: replace(index, word_bits=33, key_bits=32), "the key size of the hash index does not fit"),
        (lambda index: replace(index, key_bits=64), "the key size of the hash index does not fit"),
        (lambda index: replace(index, slot=put(index.slot, -1, 3)), "the hash index points outside the arrays"),
        (lambda index: replace(index, slot=put(index.slot, -8, 3)), "the hash index points outside the arrays"),
        (lambda index: replace(index, slot=put(index.slot, 0, NUM_ARCS)), "the hash index points outside the arrays"),
    ],
)
def test_an_index_that_does_not_fit(
    lm: NgramLM, tmp_path: Path, change: Callable[[ArcIndex], ArcIndex], message: str
) -> None:
    index = lm.with_index().arrays.index
    assert index is not None
    with pytest.raises(AsrError, match=message):
        load_ngram_lm(saved(tmp_path, lm, replace(lm.arrays, index=change(index))))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: replace(index, num_homes=len(index.slot) - 8),
        lambda index: replace(index, num_homes=1),
        lambda index: replace(index, word_bits=3, key_bits=63),
        lambda index: replace(index, slot=put(index.slot, -9, NUM_ARCS - 1)),
    ],
)
def test_an_index_at_its_limits(lm: NgramLM, tmp_path: Path, change: Callable[[ArcIndex], ArcIndex]) -> None:
    index = lm.with_index().arrays.index
    assert index is not None
    changed = change(index)
    found = load_ngram_lm(saved(tmp_path, lm, replace(lm.arrays, index=changed))).arrays.index
    assert found is not None and torch.equal(found.slot, changed.slot)
    assert (found.num_homes, found.word_bits, found.key_bits) == (
        changed.num_homes, changed.word_bits, changed.key_bits
    )  # fmt: skip


def test_files_of_earlier_versions_can_be_read(lm: NgramLM, tmp_path: Path) -> None:
    """What is written now is what was written then, to the byte: magic, header, alignment, and the slots' hashes."""
    indexed = NgramLM(lm.vocabulary, lm.with_index().arrays, lm.order, "tiny")
    save_ngram_lm(indexed, tmp_path / "lm.ngram")
    content = (tmp_path / "lm.ngram").read_bytes()
    assert (len(content), zlib.crc32(content)) == (1664, 1064963863)
