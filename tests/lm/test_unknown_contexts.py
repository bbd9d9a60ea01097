"""Unknown contexts are refused in one sentence, by calls and by loops, which would not end; unknown words by calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.kernels.jit import jit, kernel
from asr.kernels.lookup import look_up, of_any_type
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import Difference, Interpolated, RemappedLM
from asr.lm.corpus import read_word_stream
from asr.lm.interface import LanguageModel
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import SPECIAL_WORDS, Vocabulary
from tests.reference.ngram_oracle import toy_sentences

pytest.importorskip("numba")


@pytest.fixture(scope="module")
def ngram(tmp_path_factory: pytest.TempPathFactory) -> NgramLM:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("\n".join(toy_sentences(0, 100)))
    return NgramLM.from_trie(estimate_kneser_ney(read_word_stream([path]), 2).trie)


def cached(vocabulary: Vocabulary, **options: object) -> CachedRNNLM:
    torch.manual_seed(0)
    network = RNNLanguageModel(vocabulary, RNNLMConfig(6, 9, maxent_order=2, maxent_size=1000, log_z=0.3))
    return CachedRNNLM(network, CacheOptions(**options))  # type: ignore[arg-type]


MODELS: dict[str, Callable[[NgramLM], LanguageModel]] = {
    "n-gram": lambda ngram: ngram,
    "indexed n-gram": lambda ngram: ngram.with_index(),
    "recurrent": lambda ngram: cached(ngram.vocabulary),
    "bounded": lambda ngram: cached(ngram.vocabulary, capacity_bytes=20_000_000),
    "in tensors": lambda ngram: cached(ngram.vocabulary, compiled=False),
    "remapped": lambda ngram: RemappedLM(
        cached(ngram.vocabulary), Vocabulary(["new", *ngram.vocabulary.words[len(SPECIAL_WORDS) :]])
    ),
    "difference": lambda ngram: Difference(cached(ngram.vocabulary), ngram),
    "three": lambda ngram: Difference(Interpolated([cached(ngram.vocabulary), ngram.with_index()], [0.5, 0.5]), ngram),
}
UNKNOWN = (-1, -(1 << 40), 5000, (1 << 31) + 1, (5000 << 32) + 1, (1 << 62) + 1)


@kernel(fastmath=False)
def asked(context_idx: Tensor, word_id: Tensor, tables: object, log_prob: Tensor, next_idx: Tensor) -> bool:
    return look_up(context_idx, word_id, tables, log_prob, next_idx)


def score_in_loop(lm: LanguageModel, context_idx: Tensor, word_id: Tensor) -> Tensor:
    """As a compiled search asks: again and again until the tables have an answer."""
    log_prob, next_idx = torch.empty(len(word_id)), torch.empty_like(word_id)
    loop = jit(asked)
    assert loop is not None
    for _ in range(10):
        arrays = (part.numpy() for part in (context_idx, word_id))
        tables = lm.lookup_tables()
        if loop(*arrays, of_any_type(tables), log_prob.numpy(), next_idx.numpy()):
            lm.expand(context_idx[:0], context_idx)
            return log_prob
        lm.expand(context_idx, context_idx)
    raise AssertionError("the loop waits for an answer without end")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_unknown_contexts_are_refused(ngram: NgramLM, name: str) -> None:
    word_id = torch.tensor([len(SPECIAL_WORDS) + 3, len(SPECIAL_WORDS) + 5])
    # The low 32 bits of most are those of contexts that exist; tensor operations see no others.
    for unknown in (-1, 5000) if name == "in tensors" else UNKNOWN:
        for in_loop in (False, True):
            lm = MODELS[name](ngram)
            if in_loop and lm.lookup_tables() is None:
                continue
            start = lm.start(2)
            known, _ = lm.score(start, word_id)
            context_idx = torch.tensor([int(start[0]), unknown])
            with pytest.raises(AsrError, match=r"The context index -?[0-9]+ is not one of the [0-9]+ of a"):
                if in_loop:
                    score_in_loop(lm, context_idx, word_id)
                else:
                    lm.score(context_idx, word_id)
            # The model can go on.
            torch.testing.assert_close(lm.score(lm.start(2), word_id)[0], known)


@pytest.mark.parametrize("name", ["n-gram", "indexed n-gram", "recurrent"])
def test_unknown_words_are_refused(ngram: NgramLM, name: str) -> None:
    lm = MODELS[name](ngram)
    for unknown in (-1, len(lm.vocabulary)):
        with pytest.raises(AsrError, match=f"word id {unknown} is not one of the {len(lm.vocabulary)} of a .*Remapped"):
            lm.score(lm.start(2), torch.tensor([4, unknown]))
    nothing = torch.zeros(0, dtype=torch.int64)
    assert len(lm.score(nothing, nothing)[0]) == 0
