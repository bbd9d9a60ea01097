"""Out-of-vocabulary words: where the n-gram model allows `<unk>`, the graph spells any word, symbol by symbol.

The score of such a word is log P(<unk> | history) of the word model plus log P(spelling) of an n-gram model of symbols,
which is estimated from the spellings of the listed words. Words of the word model that are not listed count as `<unk>`.
The graph has one copy of the symbol model, entered where the word model outputs `<unk>` as a unigram, and left to the
history `<unk>` (the unknown-word model of Kaldi's `make_unk_lm`; Bazzi and Glass, Modeling out-of-vocabulary words for
robust speech recognition, 2000).

Shapes: A arcs, S states.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asr.graph.fst import INPUT_EPSILON, GraphArrays, Words, expand
from asr.lm.ngram.model import NgramLM
from asr.text.ctc_tokens import PIECE_PREFIX
from asr.text.normalize import is_unspaced
from asr.text.symbols import BOS_ID, EOS_ID, UNK_ID

SPELLING = "#spelling"
"""The symbol that stands for any spelled word while the graph is composed."""
_SPLICED = -2


@dataclass(frozen=True, eq=False)
class SpellingModel:
    """A model of the spellings of out-of-vocabulary words.

    Attributes:
        ngram: n-gram model of symbols; its sentences are spellings of words without the boundary after them.
        boundary: the symbol that ends a word, or None.
        penalty: natural log, added to each spelled word.
        beginnings: the symbols that begin words and occur nowhere else in them; None if any symbol may begin a word. A
            lone `▁` among them is not a word. Symbols of scripts without spaces may begin words, too.
        key: cache key; equal for models that are equal given the same lexicon.
    """

    ngram: NgramLM
    boundary: str | None
    penalty: float = 0.0
    beginnings: frozenset[str] | None = None
    key: Hashable = None


def splice_spellings(
    graph: GraphArrays, symbols: Sequence[str], model: SpellingModel
) -> tuple[GraphArrays, tuple[str, ...]]:
    """Replaces each arc labelled `SPELLING` by the spelling model.

    Args:
        graph: composition of lexicon and word model, with epsilons.
        symbols: the symbols of its labels, including `SPELLING`.
        model: the spelling model.

    Returns:
        The graph, and the symbols of its labels, without `SPELLING`.
    """
    wanted = [*(symbol for symbol in symbols if symbol != SPELLING)]
    spelled = [symbol for symbol in model.ngram.vocabulary.ordinary if symbol not in wanted]
    names = (*wanted, *spelled)
    place = {symbol: position for position, symbol in enumerate(names)}
    number = np.array([place.get(symbol, _SPLICED) for symbol in symbols], dtype=np.int32)
    label = np.where(graph.label >= 0, number[graph.label], INPUT_EPSILON)
    src_state = graph.src_state()
    entry = np.flatnonzero(label == _SPLICED)
    kept = np.flatnonzero(label != _SPLICED)
    inner = _inner_graph(model, names)
    num_states, num_inner = graph.num_states, len(inner.final_score)

    # One copy for each state that spelled words lead to: a single one if <unk> is only a unigram.
    targets, copy_of_entry = np.unique(graph.dst_state[entry], return_inverse=True)
    parts: list[tuple[Any, Any, Any, Any, Words]] = [
        (src_state[kept], graph.dst_state[kept], label[kept], graph.score[kept], graph.words.take(kept))
    ]
    for copy, target in enumerate(targets):
        first = num_states + copy * num_inner
        inside = np.flatnonzero(~inner.is_first)
        no_words = Words.empty(len(inside))
        parts.append(
            (first + inner.src[inside], first + inner.dst[inside], inner.label[inside], inner.score[inside], no_words)
        )
        ends = np.flatnonzero(inner.final_score > -np.inf)
        boundary = INPUT_EPSILON if model.boundary is None else place[model.boundary]
        parts.append(
            (
                first + ends,
                np.full(len(ends), target),
                np.full(len(ends), boundary),
                inner.final_score[ends],
                Words.empty(len(ends)),
            )
        )
    # The word is output where its first symbol is read.
    leaving = np.flatnonzero(inner.is_first)
    arc, owner = expand(np.zeros(len(entry), dtype=np.int64), np.full(len(entry), len(leaving)))
    chosen = leaving[arc]
    begin = num_states + copy_of_entry[owner] * num_inner
    parts.append(
        (
            src_state[entry[owner]],
            begin + inner.dst[chosen],
            inner.label[chosen],
            graph.score[entry[owner]] + inner.score[chosen] + np.float32(model.penalty),
            graph.words.take(entry[owner]),
        )
    )
    final_score = np.concatenate([graph.final_score, np.full(len(targets) * num_inner, -np.inf, dtype=np.float32)])
    src, dst, labels, score = (np.concatenate([part[column] for part in parts]) for column in range(4))
    words = Words.concatenate([part[4] for part in parts])
    return GraphArrays.from_arcs(src, dst, labels, score, words, final_score), names


@dataclass(frozen=True)
class _Inner:
    """The spelling model as arcs.

    Attributes:
        src, dst, label, score: (A,) the arcs; a label of -1 backs off.
        is_first: (A,) whether an arc reads the first symbol of a word.
        final_score: (S,) log P(end of word), -inf where a word cannot end.
    """

    src: np.ndarray  # type: ignore[type-arg]
    dst: np.ndarray  # type: ignore[type-arg]
    label: np.ndarray  # type: ignore[type-arg]
    score: np.ndarray  # type: ignore[type-arg]
    is_first: np.ndarray  # type: ignore[type-arg]
    final_score: np.ndarray  # type: ignore[type-arg]


def _inner_graph(model: SpellingModel, names: Sequence[str]) -> _Inner:
    """The spelling model as arcs labelled by `names`; the start has an arc for each first symbol and no backoff."""
    ngram = model.ngram
    arrays = ngram.arrays
    words = ngram.vocabulary.words
    place = {symbol: position for position, symbol in enumerate(names)}
    number = np.array([place.get(symbol, -1) for symbol in words], dtype=np.int64)
    may_begin = np.array(
        [model.beginnings is None or symbol in model.beginnings or is_unspaced(symbol[0]) for symbol in words]
    )
    may_follow = np.array([model.beginnings is None or symbol not in model.beginnings for symbol in words])
    label = arrays.label.cpu().numpy()
    score = arrays.arc_score(torch.arange(len(label), device=arrays.label.device)).cpu().numpy()
    arc_begin, dst_state = arrays.arc_begin.cpu().numpy(), arrays.dst_state.cpu().numpy()
    num_states = len(arc_begin) - 1
    src = np.repeat(np.arange(num_states), np.diff(arc_begin))
    possible = score > -np.inf
    final_score = np.full(num_states, -np.inf, dtype=np.float32)
    ends = possible & (label == EOS_ID)
    final_score[src[ends]] = score[ends]
    start = int(dst_state[BOS_ID])
    usable = possible & (label > UNK_ID) & (number[label] >= 0) & may_follow[label]
    kept = np.flatnonzero(usable)
    backing, backoff = arrays.states_that_back_off().cpu().numpy(), arrays.backoff_score.cpu().numpy()
    symbol_id = np.arange(UNK_ID + 1, len(words))
    symbol_id = symbol_id[(number[symbol_id] >= 0) & (score[symbol_id] > -np.inf)]

    def following(context: int, symbols: Any) -> tuple[Any, Any, Any]:
        """The symbols that may follow a history, with backoff already applied: ids, scores, next states."""
        found, dst = ngram.score(torch.full((len(symbols),), context), torch.from_numpy(symbols))
        is_possible = (found > -torch.inf).cpu().numpy()
        return symbols[is_possible], found.cpu().numpy()[is_possible], dst.cpu().numpy()[is_possible]

    first, first_score, first_dst = following(start, symbol_id[may_begin[symbol_id]])
    arcs = [
        (src[kept], dst_state[kept], number[label[kept]], score[kept]),
        (backing, arrays.backoff_state.cpu().numpy()[backing], np.full(len(backing), INPUT_EPSILON), backoff[backing]),
    ]
    # A lone `▁` leads to a state of its own, the last one, in which no word ends.
    if model.beginnings is not None:
        for mark in np.flatnonzero(np.array(words)[first] == PIECE_PREFIX):
            later, later_score, later_dst = following(int(first_dst[mark]), symbol_id[may_follow[symbol_id]])
            arcs.append((np.full(len(later), num_states), later_dst, number[later], later_score))
            first_dst[mark] = num_states
    arcs.append((np.zeros(len(first), dtype=np.int64), first_dst, number[first], first_score))
    src, dst, labels, scores = (np.concatenate(parts) for parts in zip(*arcs, strict=True))
    is_first = np.arange(len(src)) >= len(src) - len(first)
    return _Inner(src, dst, labels, scores, is_first, np.append(final_score, np.float32(-np.inf)))
