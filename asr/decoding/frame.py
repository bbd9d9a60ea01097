"""The step that every search here takes: expand arcs, score words, recombine.

The torch pass takes it over a decoding graph, on-the-fly rescoring and n-best extraction over a lattice.
Shapes: K tokens, A expanded arcs, Q word queries.


Where a frame's tokens are cut off: beam, and exactly so many at least and at most.

Shapes: K tokens, N utterances.


One frame of the token search, for all streams together.

Shapes: N streams, S states, K partial paths before the frame, A expanded arcs, K' partial paths after it.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from asr.decoding.backend import FrameBackend
from asr.decoding.backtrace import Backtrace
from asr.decoding.interface import DecodingOptions
from asr.decoding.lattice import LatticeRecords
from asr.decoding.search_graph import ArcSet, Searchable
from asr.decoding.selection import frame_halves
from asr.decoding.tokens import ActiveTokens, Candidates, expand
from asr.lm.interface import LanguageModel

# torch 1.13.1 says so at each start; the form used here has stayed as it was.
warnings.filterwarnings("ignore", message=r"scatter_reduce\(\) is in beta")


# Odd 63-bit multipliers; successive rounds of `group` take successive ones so that keys that met once part again.
_HASH_MULTIPLIERS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB, 0x2545F4914F6CDD1D)


_MAGNITUDE_MASK = 0x7FFFFFFF


_POSITION_MASK = 0xFFFFFFFF


NOT_REACHED = torch.iinfo(torch.int64).max


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


_RADIX_SHIFTS = ((20, 11), (10, 10), (0, 10))


_INFINITE_BITS = 0x7F800000


def best_score(score: Tensor, utt_idx: Tensor, num_utts: int) -> Tensor:
    """The best score of each utterance, (N,), -inf where it has no token."""
    best = torch.full((num_utts,), -torch.inf, device=score.device)
    if num_utts == 1:
        return score.amax(0, keepdim=True) if len(score) else best
    return best.scatter_reduce_(0, utt_idx, score, "amax", include_self=True)


def kth_best_score(score: Tensor, utt_idx: Tensor, num_utts: int, k: int) -> Tensor:
    """The k-th best score of each utterance, by radix selection; -inf where it has fewer.

    Args:
        score: (K,) float32, at most 0.
        utt_idx: (K,) int64 in [0, num_utts).
        num_utts: N.
        k: at least 1.

    Returns:
        (N,) float32.
    """
    bits = magnitude_bits(score)
    wanted = torch.full((num_utts, 1), k, dtype=torch.int64, device=score.device)
    prefix = torch.zeros(num_utts, dtype=torch.int64, device=score.device)
    candidate: Tensor | None = None
    enough = torch.ones(num_utts, dtype=torch.bool, device=score.device)
    for shift, width in _RADIX_SHIFTS:
        num_buckets = 1 << width
        bucket = utt_idx * num_buckets + ((bits >> shift) & (num_buckets - 1))
        if candidate is not None:
            bucket = torch.where(candidate, bucket, num_utts * num_buckets)
        histogram = torch.bincount(bucket, minlength=num_utts * num_buckets + 1)[:-1].view(num_utts, num_buckets)
        cumulative = histogram.cumsum(1)
        reached = cumulative >= wanted
        enough &= reached[:, -1]
        chosen = reached.to(torch.int8).argmax(1, keepdim=True)
        wanted = wanted - (cumulative - histogram).gather(1, chosen)
        prefix = (prefix << width) + chosen.squeeze(1)
        candidate = (bits >> shift) == prefix.index_select(0, utt_idx)
    prefix = torch.where(enough, prefix, _INFINITE_BITS)
    return -(prefix.to(torch.int32).view(torch.float32))


def prune_tokens(
    score: Tensor, utt_idx: Tensor, num_utts: int, beam: float, min_active: int, max_active: int | None
) -> Tensor:
    """The tokens that survive a frame, in their order; (K',) int64 positions.

    Args:
        score: (K,) float32 relative to the best of the utterance, at most 0; -inf never survives.
        utt_idx: (K,) int64.
        num_utts: N.
        beam: below the best.
        min_active: so many survive outside the beam too.
        max_active: so many at most, ties excepted; None for no limit.
    """
    kept = score >= -beam if beam < torch.inf else score > -torch.inf
    position = kept.nonzero().squeeze(1)
    if num_utts == 1:
        too_few, most = len(position) < min(min_active, len(score)), len(position)
    else:
        count = torch.bincount(utt_idx.index_select(0, position), minlength=num_utts)
        available = torch.bincount(utt_idx, minlength=num_utts).clamp(max=min_active)
        too_few, most = bool((count < available).any()), int(count.max()) if num_utts else 0
    if too_few:
        threshold = kth_best_score(score, utt_idx, num_utts, min_active).clamp(max=-beam)
        kept = (score >= threshold.index_select(0, utt_idx)) & (score > -torch.inf)
        position = kept.nonzero().squeeze(1)
    if max_active is not None and most > max_active:
        score, utt_idx = score.index_select(0, position), utt_idx.index_select(0, position)
        threshold = kth_best_score(score, utt_idx, num_utts, max_active)
        position = position.masked_select(score >= threshold.index_select(0, utt_idx))
    return position


# A table with one place for each (stream, state) is faster than hashing, while it is of a sensible size.
_LARGEST_TABLE = 1 << 24


class FrameStep:
    """Expands, scores, recombines and prunes. Arguments as of `TokenSearch`.

    Loops or kernels do most of it, where they run and `form` does not say otherwise; see `frame_form`.
    """

    def __init__(
        self,
        graph: Searchable,
        options: DecodingOptions,
        lm: LanguageModel | None,
        backtrace: Backtrace,
        lattice: LatticeRecords | None,
        form: str = "auto",
    ) -> None:
        self._graph = graph
        self._options = options
        self._lm = lm
        self._backtrace = backtrace
        self._lattice = lattice
        self._table: Tensor | None = None
        self._halves = frame_halves(form, graph, options, lm is not None)

    def read(self, tokens: ActiveTokens, log_prob: Tensor, frame_begin: Tensor, offset: Tensor) -> ActiveTokens:
        """Reads a frame.

        Args:
            tokens: what is alive, `stream` numbering the rows of the next two.
            log_prob: scaled log-probabilities of all streams and frames, flat.
            frame_begin: (N,) int64, where the stream's frame begins in `log_prob`.
            offset: (N,) float64, what relative scores lack; changed in place.
        """
        if self._halves is not None:
            # Triton launches on the current device.
            with torch.cuda.device_of(offset):
                kept = self._read_in_halves(self._halves, tokens, log_prob, frame_begin, offset)
            return self.follow_epsilons(kept, offset)
        arcs = self._graph.emitting
        source, arc = expand(arcs.arc_begin, tokens.state)
        column = arcs.token_id.index_select(0, arc).to(torch.int64)
        if len(offset) == 1:
            stream = torch.zeros_like(source)
            column += frame_begin
        else:
            stream = tokens.stream.index_select(0, source)
            column += frame_begin.index_select(0, stream)
        score = tokens.score.index_select(0, source)
        score += arcs.score.index_select(0, arc)
        score += log_prob.index_select(0, column)
        candidates = self._extend(tokens, arcs, source, arc, stream, score, offset)
        winner, position = self._winners(candidates, offset)
        return self.follow_epsilons(self._kept(tokens, arcs, candidates, winner, position), offset)

    def _read_in_halves(
        self, halves: FrameBackend, tokens: ActiveTokens, log_prob: Tensor, frame_begin: Tensor, offset: Tensor
    ) -> ActiveTokens:
        arcs, before = self._graph.emitting, offset.clone()
        found, is_complete = halves.expand(tokens, log_prob, frame_begin, offset)
        while True:
            candidates = self._with_words(tokens, arcs, *found, offset)
            if self._lm is not None and self._options.max_contexts_per_state is not None:
                winner, position, is_enough = *self._winners(candidates, offset), True
            else:
                winner, position, is_enough = halves.keep(
                    candidates.stream, candidates.state, candidates.context_idx, candidates.score, is_complete
                )
            if is_enough:
                return self._kept(tokens, arcs, candidates, winner, position)
            # Fewer than min_active_states are near the best: those that were left out count after all.
            offset.copy_(before)
            found, is_complete = halves.expand(tokens, log_prob, frame_begin, offset, everything=True)

    def follow_epsilons(self, tokens: ActiveTokens, offset: Tensor) -> ActiveTokens:
        """Takes arcs that read nothing until nothing new or better comes of it."""
        arcs = self._graph.epsilon
        if arcs is None:
            return tokens
        newest = tokens
        while len(newest):
            source, arc = expand(arcs.arc_begin, newest.state)
            if not len(source):
                break
            stream = newest.stream.index_select(0, source)
            score = newest.score.index_select(0, source) + arcs.score.index_select(0, arc)
            shift = torch.zeros_like(offset)
            candidates = self._extend(newest, arcs, source, arc, stream, score, shift)
            # Both sets relative to the same best.
            candidates.score += shift.index_select(0, candidates.stream).float()
            both = ActiveTokens.join([tokens, self._tokens_of(newest, candidates)])
            both.score = _relative(both.score, both.stream, offset)
            context_idx = None if self._lm is None else both.context_idx
            winner = recombine(self._place(both.stream, both.state), both.score, context_idx)
            lost = winner != torch.arange(len(winner), device=winner.device)
            kept = self._survivors(both.score.masked_fill(lost, -torch.inf), both.stream, len(offset), is_limited=False)
            is_new = kept >= len(tokens)
            old, new = kept[~is_new], kept[is_new]
            newest = both.select(new)
            arc = arcs.arc_of(candidates.arc.index_select(0, new - len(tokens)))
            newest.record = self._backtrace.add(newest.record, arc)
            tokens = ActiveTokens.join([both.select(old), newest])
        tokens = tokens.select(self._survivors(tokens.score, tokens.stream, len(offset)))
        # Compiled loops want the paths of a stream side by side.
        return tokens if len(offset) == 1 else tokens.select(torch.sort(tokens.stream, stable=True).indices)

    def _extend(
        self,
        tokens: ActiveTokens,
        arcs: ArcSet,
        source: Tensor,
        arc: Tensor,
        stream: Tensor,
        score: Tensor,
        offset: Tensor,
    ) -> Candidates:
        """Scores the words of arcs; source, arc, stream, score (A,)."""
        options = self._options
        score = _relative(score, stream, offset)
        if self._lm is not None:
            # The graph's own scores decide which words are worth asking the language model for.
            if options.word_beam is not None:
                dropped = (arcs.words.num_words.index_select(0, arc) > 0) & (score < -options.word_beam)
                score.masked_fill_(dropped, -torch.inf)
            chosen = self._survivors(score, stream, len(offset), is_limited=False)
            source, arc = source.index_select(0, chosen), arc.index_select(0, chosen)
            score, stream = score.index_select(0, chosen), stream.index_select(0, chosen)
        return self._with_words(tokens, arcs, source, arc, stream, score, offset)

    def _with_words(
        self,
        tokens: ActiveTokens,
        arcs: ArcSet,
        source: Tensor,
        arc: Tensor,
        stream: Tensor,
        score: Tensor,
        offset: Tensor,
    ) -> Candidates:
        """Adds what the language model says; source, arc, stream, score (A,)."""
        context_idx = lm_score = None
        if self._lm is not None:
            context_idx = tokens.context_idx.index_select(0, source)
            changed, word_score, next_idx = arcs.words.score(self._lm, arc, context_idx)
            context_idx.index_copy_(0, changed, next_idx)
            score.index_add_(0, changed, word_score, alpha=self._options.lm_scale)
            lm_score = tokens.lm_score.index_select(0, source)
            lm_score.index_add_(0, changed, word_score.double())
            score = _relative(score, stream, offset)
        state = arcs.dst_state.index_select(0, arc).to(torch.int64)
        return Candidates(source, arc, stream, score, state, context_idx, lm_score)

    def _winners(self, candidates: Candidates, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Recombines and prunes: the winner that each candidate lost to (A,), and the positions of those that stay."""
        place = self._place(candidates.stream, candidates.state)
        table = self._table_for(len(offset))
        winner = recombine(place, candidates.score, candidates.context_idx, table)
        lost = winner != torch.arange(len(winner), device=winner.device)
        score = candidates.score.masked_fill(lost, -torch.inf)
        limit = self._options.max_contexts_per_state
        if limit is not None and candidates.context_idx is not None:
            score.masked_fill_(~best_of_group(place, score, limit), -torch.inf)
        return winner, self._survivors(score, candidates.stream, len(offset))

    def _kept(
        self, tokens: ActiveTokens, arcs: ArcSet, candidates: Candidates, winner: Tensor, position: Tensor
    ) -> ActiveTokens:
        """Those that stay, each with a record."""
        kept = self._tokens_of(tokens, candidates, position)
        arc = arcs.arc_of(candidates.arc.index_select(0, position))
        kept.record = self._backtrace.add(kept.record, arc)
        if self._lattice is not None:
            self._lattice.add(tokens, candidates, arcs.arc_of(candidates.arc), winner, position, kept.record)
        return kept

    def _tokens_of(self, tokens: ActiveTokens, candidates: Candidates, position: Tensor | None = None) -> ActiveTokens:
        """Some candidates as partial paths, or all, each with the record of the path that it goes on from."""

        def some(value: Tensor) -> Tensor:
            return value if position is None else value.index_select(0, position)

        source = some(candidates.source)
        if candidates.context_idx is None or candidates.lm_score is None:
            context_idx = tokens.context_idx.index_select(0, source)
            lm_score = tokens.lm_score.index_select(0, source)
        else:
            context_idx, lm_score = some(candidates.context_idx), some(candidates.lm_score)
        record = tokens.record.index_select(0, source)
        return ActiveTokens(
            some(candidates.stream), some(candidates.state), context_idx, some(candidates.score), lm_score, record
        )

    def _place(self, stream: Tensor, state: Tensor) -> Tensor:
        """One number for each stream and state."""
        place = stream * self._graph.num_states
        place += state
        return place

    def _table_for(self, num_streams: int) -> Tensor | None:
        size = num_streams * self._graph.num_states
        if self._lm is not None or size > _LARGEST_TABLE:
            return None
        if self._table is None or len(self._table) < size:
            device = self._graph.final_score.device
            self._table = torch.full((size,), NOT_REACHED, dtype=torch.int64, device=device)
        return self._table

    def _survivors(self, score: Tensor, stream: Tensor, num_streams: int, is_limited: bool = True) -> Tensor:
        options = self._options
        max_active = options.max_active_states if is_limited else None
        return prune_tokens(score, stream, num_streams, options.search_beam, options.min_active_states, max_active)


def _relative(score: Tensor, stream: Tensor, offset: Tensor) -> Tensor:
    """Scores relative to the best of each stream, which is added to the stream's offset in place."""
    best = best_score(score, stream, len(offset))
    best = torch.where(best > -torch.inf, best, torch.zeros_like(best))
    offset += best
    score -= best if len(best) == 1 else best.index_select(0, stream)
    return score
