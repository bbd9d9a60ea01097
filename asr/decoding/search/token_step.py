"""The step that every search here takes: expand arcs, score words, recombine.

The torch pass takes it over a decoding graph, on-the-fly rescoring and n-best extraction over a lattice.
Shapes: K tokens, A expanded arcs, Q word queries.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from asr.lm.contract import LanguageModel

# torch 1.13.1 says so at each start; the form used here has stayed as it was.
warnings.filterwarnings("ignore", message=r"scatter_reduce\(\) is in beta")

# Odd 63-bit multipliers; successive rounds of `group` take successive ones so that keys that met once part again.
_HASH_MULTIPLIERS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB, 0x2545F4914F6CDD1D)
_MAGNITUDE_MASK = 0x7FFFFFFF
_POSITION_MASK = 0xFFFFFFFF
NOT_REACHED = torch.iinfo(torch.int64).max


def expand(arc_begin: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Lists all arcs that leave the states of some tokens, by prefix sums.

    Args:
        arc_begin: (S + 1,) int64, arcs of state s are arc_begin[s] to arc_begin[s + 1].
        state: (K,) int64.

    Returns:
        source (A,) the token, and arc (A,) the arc, in token order; both int64.
    """
    begin = arc_begin.index_select(0, state)
    num_arcs = arc_begin.index_select(0, state + 1) - begin
    end = num_arcs.cumsum(0)
    total = int(end[-1]) if len(end) else 0
    source = torch.repeat_interleave(num_arcs, output_size=total)
    arc = (begin - end + num_arcs).index_select(0, source)
    arc += torch.arange(total, device=state.device)
    return source, arc


class ArcWords:
    """The words of arcs, zero, one or several each, read in order.

    Args:
        word_begin: (A + 1,) int64, words of arc a are word_id[word_begin[a]] to word_id[word_begin[a + 1]].
        word_id: (W,) integer.
    """

    def __init__(self, word_begin: Tensor, word_id: Tensor) -> None:
        self.word_begin = word_begin
        self.word_id = word_id.to(torch.int64)
        self.num_words = (word_begin[1:] - word_begin[:-1]).to(torch.int32)
        self.max_words = int(self.num_words.max()) if len(self.num_words) else 0

    @classmethod
    def of_arcs(cls, word_begin: Tensor, word_id: Tensor, arc: Tensor) -> ArcWords:
        """Those of some arcs (K,) alone; word_begin and word_id are those of all arcs."""
        owner, position = expand(word_begin, arc)
        num_words = torch.bincount(owner, minlength=len(arc))
        return cls(torch.cat([num_words.new_zeros(1), num_words.cumsum(0)]), word_id.index_select(0, position))

    def score(self, lm: LanguageModel, arc: Tensor, context_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores the words of arcs, all j-th words in one call of the language model.

        Args:
            lm: the language model, its words numbered as ours.
            arc: (K,).
            context_idx: (K,) the history before the arc.

        Returns:
            changed (Q,), the positions of arcs that have words; their lm_score (Q,); their next context_idx (Q,).
        """
        changed = self.num_words.index_select(0, arc).nonzero().squeeze(1)
        arc, context_idx = arc.index_select(0, changed), context_idx.index_select(0, changed)
        if not len(changed):
            return changed, torch.zeros(0, device=arc.device), context_idx
        word = self.word_id.index_select(0, self.word_begin.index_select(0, arc))
        return changed, *self.score_rest(lm, arc, *lm.score(context_idx, word))

    def score_rest(
        self, lm: LanguageModel, arc: Tensor, lm_score: Tensor, context_idx: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores the words of arcs (Q,) but for the first: lm_score and context_idx (Q,) behind that -> behind all."""
        for position in range(1, self.max_words):
            more = (self.num_words.index_select(0, arc) > position).nonzero().squeeze(1)
            if not len(more):
                break
            word = self.word_id.index_select(0, self.word_begin.index_select(0, arc.index_select(0, more)) + position)
            log_prob, next_idx = lm.score(context_idx.index_select(0, more), word)
            lm_score = lm_score.index_add(0, more, log_prob)
            context_idx = context_idx.index_copy(0, more, next_idx)
        return lm_score, context_idx


def magnitude_bits(score: Tensor) -> Tensor:
    """Integers that order scores of at most 0: the better the score, the smaller the integer; (K,) int64."""
    return score.view(torch.int32).to(torch.int64) & _MAGNITUDE_MASK


def group(key: Tensor, second_key: Tensor | None = None) -> Tensor:
    """For each key the position of one that equals it, the same for all that are equal; (K,) int64.

    A hash table without chains: all keys write their position, and read who came to stay. Those that read another
    key met a collision and go on to a table of their own. Some key settles in each round, so it ends.

    Args:
        key: (K,) int64.
        second_key: (K,) int64, further digits of the key.
    """
    num_slots = 1 << max(4, (8 * len(key)).bit_length())
    table = torch.empty(num_slots, dtype=torch.int64, device=key.device)
    pending = torch.arange(len(key), device=key.device)
    representative = pending
    for round_idx in range(len(key) + 1):
        multiplier = _HASH_MULTIPLIERS[round_idx % len(_HASH_MULTIPLIERS)] + 2 * (round_idx // len(_HASH_MULTIPLIERS))
        pending_key = key if round_idx == 0 else key.index_select(0, pending)
        slot = pending_key * multiplier
        if second_key is not None:
            pending_second = second_key if round_idx == 0 else second_key.index_select(0, pending)
            slot ^= slot >> 32
            slot += pending_second
            slot *= multiplier
        slot ^= slot >> 32
        slot *= multiplier
        slot = (slot >> 24) & (num_slots - 1)
        table.scatter_(0, slot, pending)
        found = table.index_select(0, slot)
        differs = key.index_select(0, found) != pending_key
        if second_key is not None:
            differs |= second_key.index_select(0, found) != pending_second
        representative = found if round_idx == 0 else representative.index_copy_(0, pending, found)
        collided = differs.nonzero().squeeze(1)
        if not len(collided):
            break
        pending = pending.index_select(0, collided)
    return representative


def recombine(key: Tensor, score: Tensor, second_key: Tensor | None = None, table: Tensor | None = None) -> Tensor:
    """For each token the best one with equal keys; of equally good ones the first.

    Args:
        key: (K,) int64.
        score: (K,) float32, at most 0.
        second_key: (K,) int64, further digits of the key.
        table: one place for each possible key, all `NOT_REACHED`, which they are again afterwards; None for keys that
            may be anything.

    Returns:
        winner (K,) int64 positions; a token stays where it is its own winner.
    """
    packed = magnitude_bits(score)
    packed <<= 32
    packed += torch.arange(len(key), device=key.device)
    if table is None:
        slot = group(key, second_key)
        best = torch.full_like(key, NOT_REACHED)
    else:
        slot, best = key, table
    best.scatter_reduce_(0, slot, packed, "amin", include_self=True)
    winner = best.index_select(0, slot)
    winner &= _POSITION_MASK
    if table is not None:
        table.index_fill_(0, slot, NOT_REACHED)
    return winner


def best_of_group(key: Tensor, score: Tensor, num_kept: int) -> Tensor:
    """Marks the `num_kept` best tokens of each key; of equally good ones the first. (K,) bool.

    Args:
        key: (K,) int64.
        score: (K,) float32, at most 0.
        num_kept: how many.
    """
    representative = group(key)
    order = torch.sort((representative << 32) + magnitude_bits(score), stable=True).indices
    owner = representative.index_select(0, order)
    position = torch.arange(len(key), device=key.device)
    starts = torch.ones_like(owner, dtype=torch.bool)
    starts[1:] = owner[1:] != owner[:-1]
    rank = position - torch.where(starts, position, torch.zeros_like(position)).cummax(0).values
    return torch.empty_like(starts).index_copy_(0, order, rank < num_kept)
