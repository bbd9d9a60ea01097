"""`HostNgramLM` equals `NgramLM` bit for bit in every placement, and fetches no more than it must."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asr.errors import AsrError
from asr.lm import offload
from asr.lm.corpus import read_word_stream
from asr.lm.interface import LanguageModel
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.lm.offload import CachedRows, HostNgramLM
from tests.reference.ngram_oracle import toy_sentences


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> NgramLM:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("\n".join(toy_sentences(0, 3000)))
    return NgramLM.from_trie(estimate_kneser_ney(read_word_stream([path]), 4).trie)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "placement"), [(2.0, "resident"), (1.0, "resident"), (0.75, "index"), (0.3, "cache"), (0.1, "cache")]
)
def test_same_scores_and_states_within_the_budget(lm: NgramLM, share: float, placement: str) -> None:
    budget = int(share * sum(lm.arrays.num_bytes().values()))
    host = HostNgramLM(lm, "cpu", budget)
    assert isinstance(host, LanguageModel)
    assert host.placement == placement
    assert host.device_bytes <= budget
    generator = torch.Generator().manual_seed(0)
    expected_idx, idx = lm.start(300), host.start(300)
    for _ in range(12):
        word = torch.randint(2, len(lm.vocabulary), (300,), generator=generator) // 3
        expected, expected_idx = lm.score(expected_idx, word)
        score, idx = host.score(idx, word)
        assert torch.equal(score, expected)
        assert torch.equal(idx, expected_idx)
        assert torch.equal(host.final(idx), lm.final(idx))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["quantized", "many words"])
def test_other_scores_and_labels(lm: NgramLM, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "quantized":
        lm = lm.quantized()
    else:
        monkeypatch.setattr(offload, "is_narrow", lambda _: False)
    host = HostNgramLM(lm, "cpu", offload.bytes_to_find_arcs(lm) + 17_000)
    assert host.placement == "index"
    state = torch.arange(lm.num_states).repeat_interleave(5)
    word = torch.arange(len(state)) % len(lm.vocabulary)
    for ours, theirs in zip(host.score(state, word), lm.score(state, word), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_a_batch_fetches_each_row_once_and_a_repeat_nothing(lm: NgramLM) -> None:
    host = HostNgramLM(lm, "cpu", int(0.75 * sum(lm.arrays.num_bytes().values())))
    state = host.start(1000)
    word = torch.arange(4, 14).repeat(100)
    host.score(state, word)
    num_backed_off = host.statistics.num_queries - 1000
    assert 0 < num_backed_off < 1000  # all of them from <s>
    assert host.statistics.num_fetched == 11
    assert host.statistics.num_bytes == 88
    host.score(state, word)
    assert host.statistics.num_fetched == 11
    assert host.statistics.hit_ratio == 0.5


def test_budget_too_small(lm: NgramLM) -> None:
    with pytest.raises(AsrError, match="budget of 100 bytes is too small"):
        HostNgramLM(lm, "cpu", 100)


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=12),
    st.integers(0, 20),
)
def test_cached_rows_are_the_rows(batches: list[list[int]], num_places: int) -> None:
    table = torch.arange(82).view(41, 2)
    cached = CachedRows(lambda key: table[key], 2, torch.int64, num_places, "cpu")
    for batch in batches:
        key = torch.tensor(batch, dtype=torch.int64)
        assert torch.equal(cached.rows(key), table[key])
    assert cached.statistics.num_fetched <= cached.statistics.num_distinct <= cached.statistics.num_queries
