"""Prepares n-gram models for decoding graphs: reads any file, prunes to a size, adds missing words.

Shapes: A n-grams of all orders, S states, V words.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from asr.errors import AsrError
from asr.lm.corpus import WordStream
from asr.lm.ngram.arpa import KENLM_MAGIC, LN_10
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.io import read_ngram_lm
from asr.lm.ngram.model import NgramArrays, NgramLM
from asr.lm.ngram.transform import prune_to_size
from asr.lm.ngram.trie import ROOT, NgramTrie
from asr.text.symbols import BOS_ID, EOS_ID, EPSILON_ID, SPECIAL_WORDS, UNK_ID, Vocabulary

# Files write -99 or -100 for the log10 of zero.
_HARDLY_POSSIBLE = -90.0 * LN_10


def read_ngram(source: str | Path | NgramLM) -> NgramLM:
    """Reads a model from ARPA text or our binary file; a model is returned as it is.

    Raises:
        AsrError: it is neither, or the file is missing, damaged or a KenLM binary, which cannot be compiled into a
            graph.
    """
    if isinstance(source, NgramLM):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise AsrError(f"{type(source).__name__} is not an n-gram model; give a file or an NgramLM.")
    if is_kenlm_binary(source):
        raise AsrError(
            f"{source}: a KenLM binary does not list its n-grams, so it cannot be compiled into a graph; give the ARPA "
            "file that it was built from, or give this file as lm= together with a word list."
        )
    path = Path(source).resolve()
    stat = path.stat()
    return _read_once(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=4)
def _read_once(path: Path, modified: int, size: int) -> NgramLM:
    """Returns the same object for an unchanged file, so that graphs compiled from it are found in the cache."""
    return read_ngram_lm(path)


def is_kenlm_binary(path: str | Path) -> bool:
    """Whether a file was written by KenLM's `build_binary`.

    Raises:
        AsrError: the file cannot be read.
    """
    try:
        with Path(path).open("rb") as stream:
            return stream.read(len(KENLM_MAGIC)) == KENLM_MAGIC
    except OSError as error:
        raise AsrError(f"{path}: the language model cannot be read ({error.strerror}).") from error


def listed_words(ngram: NgramLM) -> list[str]:
    """The words that a model has as unigrams, without the special ones, in its order."""
    num_words = len(ngram.vocabulary)
    score = ngram.arrays.arc_score(torch.arange(num_words, device=ngram.device)).cpu().tolist()
    words = ngram.vocabulary.words
    return [words[word_id] for word_id in range(len(SPECIAL_WORDS), num_words) if score[word_id] > -math.inf]


def rules_out_unknown(ngram: NgramLM, penalty: float = 0.0) -> bool:
    """Whether a model has no `<unk>` to speak of, as those of a closed vocabulary; a penalty adds to its score."""
    unknown = ngram.arrays.arc_score(torch.tensor([UNK_ID], device=ngram.device))
    return float(unknown) + penalty < _HARDLY_POSSIBLE


def uniform_ngram(words: Sequence[str]) -> NgramLM:
    """A unigram model in which all words, the end of the sentence and `<unk>` are equally likely."""
    vocabulary = Vocabulary(words, name="word list")
    num_words = len(vocabulary)
    score = np.full(num_words, -math.log(num_words - 2), dtype=np.float32)
    score[[EPSILON_ID, BOS_ID]] = -np.inf
    no_parent = np.full(num_words, ROOT, dtype=np.int32)
    word_id = np.arange(num_words, dtype=np.int32)
    backoff = np.zeros(num_words, dtype=np.float32)
    return NgramLM.from_trie(NgramTrie(vocabulary, (0, num_words), no_parent, word_id, score, backoff), "word list")


def ngram_of_spellings(spellings: Collection[Sequence[str]], symbols: Sequence[str], order: int) -> NgramLM:
    """Estimates a model of symbols, in which each word is a sentence (modified Kneser-Ney).

    Args:
        spellings: the symbols of each word.
        symbols: all symbols that a word may have.
        order: the n-gram order.
    """
    vocabulary = Vocabulary(symbols, name="spellings")
    id_of = {symbol: number for number, symbol in enumerate(vocabulary.words)}
    stream = [number for each in spellings for number in (BOS_ID, *(id_of[symbol] for symbol in each), EOS_ID)]
    words = WordStream(np.array(stream, dtype=np.int32), vocabulary, len(vocabulary))
    return NgramLM.from_trie(estimate_kneser_ney(words, order, keep_unseen=True).trie, "spellings")


def graph_ngram(ngram: NgramLM, words: Sequence[str], max_ngrams: int) -> NgramLM:
    """Makes the model for a graph: with all words of a list, and only the most important n-grams.

    Words that are not in the model share its `<unk>` evenly, as in `RemappedLM`, so that the full model can replace the
    graph's during the search.

    Args:
        ngram: the model, of any size.
        words: the words of the graph.
        max_ngrams: maximum number of n-grams of all orders; a larger model is pruned by entropy.

    Raises:
        AsrError: the model has none of the words.
    """
    known = set(listed_words(ngram))
    missing = [word for word in dict.fromkeys(words) if word not in known]
    if words and len(missing) == len(set(words)):
        raise AsrError(f"{ngram.name}: {_none_of_words(words, known)}")
    num_ngrams = len(ngram.arrays.label)
    if not missing and num_ngrams <= max_ngrams and not len(ngram.arrays.score_level):
        return ngram
    trie = trie_of(ngram)
    if missing:
        trie = _with_words(trie, missing)
    if num_ngrams > max_ngrams:
        trie = prune_to_size(trie, max(max_ngrams, trie.order_begin[1]))
    return NgramLM.from_trie(trie, ngram.name)


def with_unlisted_as_unknown(ngram: NgramLM, words: Collection[str]) -> NgramLM:
    """The model for a graph that spells words outside a list: `<unk>` stands for every word that is not listed.

    It has the probability of the model's `<unk>` and of its words that are not listed. It is a unigram only, so
    that the graph spells words in a single place.

    Args:
        ngram: the model.
        words: the listed words.
    """
    arrays = ngram.arrays
    score = arrays.arc_score(torch.arange(len(arrays.label), device=arrays.label.device)).clone()
    is_longer = torch.arange(len(arrays.label), device=score.device) >= len(ngram.vocabulary)
    score[is_longer & (arrays.label == UNK_ID)] = -math.inf
    listed = {*SPECIAL_WORDS, *words}
    unlisted = [word_id for word_id, word in enumerate(ngram.vocabulary.words) if word not in listed]
    score[UNK_ID] = torch.logsumexp(score[[UNK_ID, *unlisted]].double(), 0)
    plain = replace(arrays, score=score, score_level=torch.zeros(0, dtype=torch.float32), index=None)
    return NgramLM(ngram.vocabulary, plain, ngram.order, ngram.name)


def trie_of(ngram: NgramLM) -> NgramTrie:
    """The n-grams of a model: the inverse of `NgramArrays.from_trie`."""
    arrays: NgramArrays = ngram.arrays.to("cpu")
    dst_state = arrays.dst_state.numpy()
    num_arcs, num_words = len(dst_state), len(ngram.vocabulary)
    # States are numbered in the order of their n-grams; an n-gram that is not a state leads to an earlier state.
    highest = np.maximum.accumulate(np.concatenate([[0], dst_state]))
    is_state = dst_state > highest[:-1]
    of_state = np.concatenate([[ROOT], np.flatnonzero(is_state)]).astype(np.int32)
    parent = np.repeat(of_state, np.diff(arrays.arc_begin.numpy()))
    order_begin = [0, num_words]
    while order_begin[-1] < num_arcs:
        longer = parent[order_begin[-1] :] >= order_begin[-1]
        order_begin.append(order_begin[-1] + (int(longer.argmax()) if longer.any() else len(longer)))
    backoff = np.zeros(num_arcs, dtype=np.float32)
    backoff[of_state[1:]] = arrays.backoff_score.numpy()[1:]
    score = arrays.arc_score(torch.arange(num_arcs)).numpy().copy()
    return NgramTrie(ngram.vocabulary, tuple(order_begin), parent, arrays.label.numpy(), score, backoff)


def _with_words(trie: NgramTrie, words: Sequence[str]) -> NgramTrie:
    """Adds words to a model; they share the probability of `<unk>` evenly."""
    num_before, num_new = trie.order_begin[1], len(words)
    vocabulary = Vocabulary((*trie.vocabulary.ordinary, *words))
    share = trie.score[UNK_ID] - np.float32(math.log(num_new))
    order_begin = (0, *(begin + num_new for begin in trie.order_begin[1:]))
    parent = np.where(trie.parent >= num_before, trie.parent + num_new, trie.parent)

    def widened(values: np.ndarray, added: float) -> np.ndarray:  # type: ignore[type-arg]
        new = np.full(num_new, added, dtype=values.dtype)
        return np.concatenate([values[:num_before], new, values[num_before:]])

    score = widened(trie.score, float(share))
    word_id = np.concatenate(
        [trie.word_id[:num_before], np.arange(num_before, num_before + num_new), trie.word_id[num_before:]]
    )
    return NgramTrie(
        vocabulary,
        order_begin,
        widened(parent, ROOT).astype(np.int32),
        word_id.astype(np.int32),
        score,
        widened(trie.backoff, 0.0),
        trie.lists_bos,
    )


def _none_of_words(words: Sequence[str], known: Collection[str]) -> str:
    """Explains why a model has none of the words."""
    sample = words[0]
    for change in (str.lower, str.upper):
        if any(change(word) in known for word in words[:1000]):
            has = "lower" if change is str.lower else "upper"
            return f"the model is in {has} case and the words ({sample!r}, ...) are not; convert both to the same case."
    return f"the model has none of the {len(words)} words ({sample!r}, ...); both must have the same language."
