"""n-gram look-up as a Triton kernel, one lane for each query; equals `asr.lm.ngram.lookup.score_words` bit for bit.

Shapes: Q queries, S states, A arcs, B slots of the hash index, L lanes of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asr.lm.ngram.lookup import MULTIPLIERS
from asr.lm.ngram.model import NgramArrays

# At least the threads of a program: 128.
_LANES = 128
_FIRST, _SECOND = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_TAG_MASK = tl.constexpr((1 << 31) - 1)
_ARC_MASK = tl.constexpr((1 << 32) - 1)


@triton.jit
def _by_index(
    context: tl.tensor,
    word: tl.tensor,
    is_open: tl.tensor,
    slot: tl.tensor,
    num_homes: tl.tensor,
    word_bits: tl.tensor,
    key_bits: tl.tensor,
) -> tl.tensor:
    """The arcs of open queries (L,) int64, -1 where a state has no such arc; see `ArcIndex`."""
    mask = (tl.full([1], 1, tl.int64) << key_bits) - 1
    key = (((context << word_bits) + word) * _FIRST) & mask
    key = ((key ^ (key >> (key_bits // 2))) * _SECOND) & mask
    tag = key & _TAG_MASK
    place = ((key >> (key_bits - 32)) * num_homes) >> 32
    entry = tl.load(slot + place, mask=is_open, other=-1)
    goes_on = (entry >= 0) & ((entry >> 32) != tag)
    while tl.max(goes_on.to(tl.int32), 0) > 0:
        place = tl.where(goes_on, place + 1, place)
        entry = tl.where(goes_on, tl.load(slot + place, mask=goes_on, other=-1), entry)
        goes_on = (entry >= 0) & ((entry >> 32) != tag)
    return tl.where(entry >= 0, entry & _ARC_MASK, -1)


@triton.jit
def _by_search(
    context: tl.tensor, word: tl.tensor, is_open: tl.tensor, arc_begin: tl.tensor, label: tl.tensor
) -> tl.tensor:
    """The same by binary search among a state's labels."""
    low = tl.load(arc_begin + context, mask=is_open, other=0).to(tl.int64)
    end = tl.load(arc_begin + context + 1, mask=is_open, other=0).to(tl.int64)
    high = end
    while tl.max((low < high).to(tl.int32), 0) > 0:
        middle = (low + high) >> 1
        is_below = tl.load(label + middle, mask=low < high, other=0) < word
        next_low = tl.where((low < high) & is_below, middle + 1, low)
        high = tl.where((low < high) & (is_below == 0), middle, high)
        low = next_low
    is_listed = (low < end) & (tl.load(label + low, mask=low < end, other=0) == word)
    return tl.where(is_listed, low, -1)


@triton.jit(do_not_specialize=["num_queries", "num_homes", "word_bits", "key_bits"])
def _score_words(
    state: tl.tensor,
    word_id: tl.tensor,
    num_queries: tl.tensor,
    slot: tl.tensor,
    num_homes: tl.tensor,
    word_bits: tl.tensor,
    key_bits: tl.tensor,
    arc_begin: tl.tensor,
    label: tl.tensor,
    backoff_state: tl.tensor,
    backoff_score: tl.tensor,
    score: tl.tensor,
    level: tl.tensor,
    dst_state: tl.tensor,
    log_prob: tl.tensor,
    next_idx: tl.tensor,
    HAS_INDEX: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    L: tl.constexpr,
) -> None:
    """Writes log_prob (Q,) float32 and next_idx (Q,) int64 for state, word_id (Q,) int64."""
    query = tl.program_id(0) * L + tl.arange(0, L)
    is_valid = query < num_queries
    context = tl.load(state + query, mask=is_valid, other=0)
    word = tl.load(word_id + query, mask=is_valid, other=0)
    arc = word  # in state 0 the word's arc has its own number
    backoff = tl.zeros([L], tl.float32)
    is_open = context != 0
    while tl.max(is_open.to(tl.int32), 0) > 0:
        if HAS_INDEX:
            found = _by_index(context, word, is_open, slot, num_homes, word_bits, key_bits)
        else:
            found = _by_search(context, word, is_open, arc_begin, label)
        arc = tl.where(is_open & (found >= 0), found, arc)
        is_open = is_open & (found < 0)
        backoff += tl.load(backoff_score + context, mask=is_open, other=0.0)
        context = tl.load(backoff_state + context, mask=is_open, other=0).to(tl.int64)
        is_open = context != 0
    own = tl.load(score + arc, mask=is_valid)
    if IS_QUANTIZED:
        own = tl.load(level + own.to(tl.int32), mask=is_valid)
    tl.store(log_prob + query, backoff + own, mask=is_valid)
    tl.store(next_idx + query, tl.load(dst_state + arc, mask=is_valid).to(tl.int64), mask=is_valid)


def score_words(arrays: NgramArrays, state: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
    """`NgramLM.score` for word ids that `ArcFinder.mapped` has mapped; the host does not wait for the device."""
    state, word_id = state.contiguous(), word_id.contiguous()
    log_prob, next_idx = torch.empty(len(state), device=state.device), torch.empty_like(state)
    if not len(state):
        return log_prob, next_idx
    index, found = arrays.index, (arrays.label, 0, 0, 0)
    if index is not None:
        found = (index.slot, index.num_homes, index.word_bits, index.key_bits)
    with torch.cuda.device_of(state):
        _score_words[(triton.cdiv(len(state), _LANES),)](
            *(state, word_id, len(state), *found, arrays.arc_begin, arrays.label, arrays.backoff_state),
            *(arrays.backoff_score, arrays.score, arrays.score_level, arrays.dst_state, log_prob, next_idx),
            HAS_INDEX=index is not None,
            IS_QUANTIZED=len(arrays.score_level) > 0,
            L=_LANES,
        )
    return log_prob, next_idx
