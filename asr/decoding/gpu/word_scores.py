"""The language model's part of a frame in fixed buffers: the words of all candidates in a call of a fixed size.

A frame queries W words, however many candidates have words. If there are fewer, they are repeated, which the language
model's caches answer; without any, `</s>` is queried after some context. Words for which there is no room are not
scored; the host learns from the counts how many there were, and repeats the frames in larger buffers.

Shapes: A candidates, K tokens, N streams, W queries, B lanes of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asr.decoding.backend import ArcSet
from asr.decoding.gpu.frame import ArcExpansion, FrameLimits
from asr.decoding.gpu.kernels import LOWEST, MOST_WORDS, NUM_QUERIES, ordered, raise_to_max, unordered
from asr.lm.interface import LanguageModel
from asr.text.symbols import EOS_ID

_END = tl.constexpr(EOS_ID)


@triton.jit
def copy_contexts(
    source: tl.tensor,
    total: tl.tensor,
    capacity: tl.tensor,
    path_context: tl.tensor,
    path_lm_score: tl.tensor,
    context_idx: tl.tensor,
    lm_score: tl.tensor,
    arc_score: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Copies the contexts and scores of the tokens (K,) to the candidates (A,) that extend them.

    Args:
        source: (A,), total (1,), capacity A.
        context_idx: int64, lm_score: float64, arc_score: float64, (A,) each, written; arc_score with 0.
    """
    num = tl.minimum(tl.load(total), capacity)
    first = tl.program_id(0).to(tl.int64) * B
    if first >= num:
        return
    position = first + tl.arange(0, B)
    is_valid = position < num
    own = tl.load(source + position, mask=is_valid, other=0)
    tl.store(context_idx + position, tl.load(path_context + own, mask=is_valid, other=0), mask=is_valid)
    tl.store(lm_score + position, tl.load(path_lm_score + own, mask=is_valid, other=0.0), mask=is_valid)
    tl.store(arc_score + position, tl.zeros([B], tl.float64), mask=is_valid)


@triton.jit(do_not_specialize=["capacity"])
def gather_queries(
    with_words: tl.tensor,
    num_with_words: tl.tensor,
    arc: tl.tensor,
    context_idx: tl.tensor,
    word_begin: tl.tensor,
    word_id: tl.tensor,
    some_context: tl.tensor,
    counts: tl.tensor,
    capacity: tl.tensor,
    query_context: tl.tensor,
    query_word: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Writes the queries for the first words of the candidates' arcs.

    Args:
        with_words: (A,) int64, the candidates with words; num_with_words (1,).
        arc, context_idx: (A,) of the candidates; word_begin, word_id: of the graph's arcs.
        some_context: (1,) int64, for a frame without words.
        counts: see `kernels.NUM_COUNTS`.
        query_context, query_word: (W,) int64, written; W is `capacity`.
    """
    num = tl.load(num_with_words)
    if tl.program_id(0) == 0:
        tl.store(counts + MOST_WORDS, tl.maximum(tl.load(counts + MOST_WORDS), num))
        tl.store(counts + NUM_QUERIES, tl.load(counts + NUM_QUERIES) + num)
    query = tl.program_id(0) * B + tl.arange(0, B)
    is_place = query < capacity
    is_valid = is_place & (query * 0 + num > 0)
    own = tl.load(with_words + query % tl.maximum(tl.minimum(num, capacity), 1), mask=is_valid, other=0)
    own_arc = tl.load(arc + own, mask=is_valid, other=0)
    first = tl.load(word_begin + own_arc, mask=is_valid, other=0)
    word = tl.load(word_id + first, mask=is_valid, other=0).to(tl.int64)
    tl.store(query_word + query, tl.where(is_valid, word, _END), mask=is_place)
    context = tl.load(context_idx + own, mask=is_valid, other=0)
    tl.store(query_context + query, tl.where(is_valid, context, tl.load(some_context)), mask=is_place)


@triton.jit(do_not_specialize=["which", "capacity"])
def take_answers(
    with_words: tl.tensor,
    num_with_words: tl.tensor,
    arc: tl.tensor,
    num_words: tl.tensor,
    word_begin: tl.tensor,
    word_id: tl.tensor,
    which: tl.tensor,
    log_prob: tl.tensor,
    next_idx: tl.tensor,
    capacity: tl.tensor,
    query_context: tl.tensor,
    query_word: tl.tensor,
    word_score: tl.tensor,
    context_idx: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Takes the answers (W,) to the queries for word `which` of the arcs, and writes those for the words after it.

    Args:
        with_words to word_id: as for `gather_queries`; num_words of the graph's arcs.
        log_prob, next_idx: (W,) the answers.
        query_context, query_word: (W,) changed where an arc has one more word.
        word_score: (W,) float32, the answers are added to it; context_idx (A,), changed.
    """
    query = tl.program_id(0) * B + tl.arange(0, B)
    is_valid = query < tl.minimum(tl.load(num_with_words), capacity)
    own = tl.load(with_words + query, mask=is_valid, other=0)
    own_arc = tl.load(arc + own, mask=is_valid, other=0)
    num = tl.load(num_words + own_arc, mask=is_valid, other=0)
    is_valid = is_valid & (num > which)
    score = tl.load(log_prob + query, mask=is_valid, other=0.0)
    if which > 0:
        score += tl.load(word_score + query, mask=is_valid, other=0.0)
    tl.store(word_score + query, score, mask=is_valid)
    context = tl.load(next_idx + query, mask=is_valid, other=0)
    tl.store(context_idx + own, context, mask=is_valid)
    goes_on = is_valid & (num > which + 1)
    place = tl.load(word_begin + own_arc, mask=goes_on, other=0) + which + 1
    tl.store(query_context + query, context, mask=goes_on)
    tl.store(query_word + query, tl.load(word_id + place, mask=goes_on, other=0).to(tl.int64), mask=goes_on)


@triton.jit(do_not_specialize=["capacity"])
def add_word_scores(
    with_words: tl.tensor,
    num_with_words: tl.tensor,
    word_score: tl.tensor,
    lm_scale: tl.tensor,
    capacity: tl.tensor,
    score: tl.tensor,
    lm_score: tl.tensor,
    arc_score: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Adds the scores of words (W,) float32 to those of their candidates (A,); arc_score gets what lm_score gains."""
    query = tl.program_id(0) * B + tl.arange(0, B)
    is_valid = query < tl.minimum(tl.load(num_with_words), capacity)
    own = tl.load(with_words + query, mask=is_valid, other=0)
    gained = tl.load(word_score + query, mask=is_valid, other=0.0)
    tl.store(score + own, tl.load(score + own, mask=is_valid, other=0.0) + gained * lm_scale, mask=is_valid)
    before = tl.load(lm_score + own, mask=is_valid, other=0.0)
    after = before + gained.to(tl.float64)
    tl.store(lm_score + own, after, mask=is_valid)
    tl.store(arc_score + own, after - before, mask=is_valid)


@triton.jit
def raise_best(
    score: tl.tensor, stream: tl.tensor, total: tl.tensor, capacity: tl.tensor, best: tl.tensor, B: tl.constexpr
) -> None:
    """Raises best (N,) int32 to the `ordered` best score of each stream; score, stream (A,), total (1,), capacity A."""
    num = tl.minimum(tl.load(total), capacity)
    first = tl.program_id(0).to(tl.int64) * B
    if first >= num:
        return
    position = first + tl.arange(0, B)
    is_valid = position < num
    own = tl.load(stream + position, mask=is_valid, other=0).to(tl.int32)
    raise_to_max(best, own, ordered(tl.load(score + position, mask=is_valid, other=float("-inf"))), is_valid)


@triton.jit
def subtract_best(
    score: tl.tensor, stream: tl.tensor, total: tl.tensor, capacity: tl.tensor, best: tl.tensor, B: tl.constexpr
) -> None:
    """Makes scores relative to the best of their stream, in place; arguments as for `raise_best`."""
    num = tl.minimum(tl.load(total), capacity)
    first = tl.program_id(0).to(tl.int64) * B
    if first >= num:
        return
    position = first + tl.arange(0, B)
    is_valid = position < num
    own = unordered(tl.load(best + tl.load(stream + position, mask=is_valid, other=0), mask=is_valid, other=0))
    value = tl.load(score + position, mask=is_valid, other=0.0) - tl.where(own > float("-inf"), own, 0.0)
    tl.store(score + position, value, mask=is_valid)


class WordScores:
    """Buffers for the words of a frame's candidates, and the kernels around the language model's calls.

    Args:
        arcs: the graph's arcs that read a frame.
        limits: beams and limits.
        lm: the language model, whose calls are reserved for num_queries queries while `run` is used.
        lm_scale: weight of its scores.
        found: the buffers of the candidates.
        num_queries: W.

    Attributes:
        context_idx: (A,) int64, lm_score: (A,) float64, of the candidates with their words.
        arc_score: (A,) float64, the scores of the words alone.
        best: (N,) int32, `ordered` best scores of the streams, which `run` subtracts.
        some_context: (1,) int64, any context of the language model; set by the caller.
    """

    def __init__(
        self,
        arcs: ArcSet,
        limits: FrameLimits,
        lm: LanguageModel,
        lm_scale: float,
        found: ArcExpansion,
        num_queries: int,
    ) -> None:
        self._words = arcs.words
        self._limits = limits
        self._lm = lm
        self._lm_scale = lm_scale
        self._found = found
        device = found.score.device

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.context_idx = zeros(found.num_arcs, torch.int64)
        self.lm_score, self.arc_score = zeros(found.num_arcs, torch.float64), zeros(found.num_arcs, torch.float64)
        self.best = zeros(found.num_streams, torch.int32)
        self.some_context = zeros(1, torch.int64)
        self._query_context, self._query_word = zeros(num_queries, torch.int64), zeros(num_queries, torch.int64)
        self._word_score = zeros(num_queries, torch.float32)

    def run(self, path_context: Tensor, path_lm_score: Tensor, counts: Tensor) -> None:
        """Scores the words of the candidates that have just been found, and makes scores relative again.

        Args:
            path_context: (K,) int64, path_lm_score: (K,) float64, of the tokens.
            counts: (NUM_COUNTS,).
        """
        found, words, block = self._found, self._words, self._limits.block
        counted, grid = (found.num_kept, found.num_arcs), (found.num_tiles,)
        copy_contexts[grid](
            *(found.source, *counted, path_context, path_lm_score, self.context_idx, self.lm_score, self.arc_score),
            B=block,
        )
        num_queries = len(self._query_word)
        query_grid = (triton.cdiv(num_queries, block),)
        asked = (found.with_words, found.num_with_words)
        queries = (self._query_context, self._query_word)
        gather_queries[query_grid](
            *(*asked, found.arc, self.context_idx, words.word_begin, words.word_id, self.some_context, counts),
            *(num_queries, *queries),
            B=block,
        )
        for which in range(words.max_words):
            log_prob, next_idx = self._lm.score(*queries)
            take_answers[query_grid](
                *(*asked, found.arc, words.num_words, words.word_begin, words.word_id, which, log_prob, next_idx),
                *(num_queries, *queries, self._word_score, self.context_idx),
                B=block,
            )
        add_word_scores[query_grid](
            *(*asked, self._word_score, self._lm_scale, num_queries, found.score, self.lm_score, self.arc_score),
            B=block,
            enable_fp_fusion=False,  # products are rounded before they are added, as by torch
        )
        self.best.fill_(LOWEST.value)
        raise_best[grid](found.score, found.stream, *counted, self.best, B=block)
        subtract_best[grid](found.score, found.stream, *counted, self.best, B=block)
