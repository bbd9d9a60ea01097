"""Minimum Bayes risk the plain way: every position of a sentence, every state and every arc, and posteriors by tensors.

The loops of `asr.decoding.cpu.mbr` leave out silent frames and empty shares, but round alike, so that their results are
equal to the last digit. See there for the algorithm. A sentence of W words has Q = 2 W + 1 positions, those of its
words and one before, between and after them, which hold no word (-1).

Shapes: S states, A arcs, R rows, V distinct words of the lattice.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.decoding.lattice import Lattice
from asr.decoding.mbr import PartPosteriors
from asr.decoding.settings import DecodingOptions


class WeightedLattice(NamedTuple):
    """A lattice of one utterance with posterior probabilities; states come before those that they lead to.

    Attributes:
        start_state: the only state without a path to it.
        arc_begin: (S + 1,) int64.
        dst_state: (A,) int64.
        word_begin: (A + 1,) int64; arc a has the words word[word_begin[a] : word_begin[a + 1]].
        word: integers from 0 to V - 1.
        posterior: (A,) float64, of each arc; arcs with 0 are left out.
        reached: (S,) float64, the posterior of passing through each state.
        ending: (S,) float64, the posterior of ending at each state.
    """

    start_state: int
    arc_begin: Any
    dst_state: Any
    word_begin: Any
    word: Any
    posterior: Any
    reached: Any
    ending: Any


def arc_posteriors(lattice: Lattice, options: DecodingOptions, scale: float = 1.0) -> Tensor:
    """The posterior probability of each arc, (A,) float64, by the forward-backward algorithm, frame by frame."""
    arc_total, ahead = scale * lattice.arc_total(options), scale * lattice.final_total(options)
    posterior, through = torch.zeros_like(arc_total), torch.zeros_like(ahead)
    through[lattice.start_state] = 1.0
    src_state = lattice.src_state()
    frames = [(first, last) for first, last in itertools.pairwise(lattice.arc_frame_begin) if first < last]
    for first, last in reversed(frames):
        # The states of a frame are adjacent.
        low, high = int(src_state[first]), int(src_state[last - 1]) + 1
        position, added = src_state[first:last] - low, arc_total[first:last] + ahead[lattice.dst_state[first:last]]
        best = ahead[low:high].scatter_reduce(0, position, added, "amax")
        shift = torch.where(best > -torch.inf, best, torch.zeros_like(best))
        total = (ahead[low:high] - shift).exp().scatter_add(0, position, (added - shift[position]).exp())
        ahead[low:high] = total.log() + shift
    share = (arc_total + ahead[lattice.dst_state] - ahead[src_state]).exp()
    share = torch.where(ahead[src_state] > -torch.inf, share, torch.zeros_like(share))
    for first, last in frames:
        posterior[first:last] = through[src_state[first:last]] * share[first:last]
        through.index_add_(0, lattice.dst_state[first:last], posterior[first:last])
    return posterior


def weighted_lattice(lattice: Lattice, options: DecodingOptions, scale: float) -> tuple[WeightedLattice, Tensor]:
    """The lattice of one utterance with posteriors at a scale, and its distinct words (V,), ascending."""
    distinct, word = torch.unique(lattice.word_id, return_inverse=True)
    posterior = torch.from_numpy(PartPosteriors(lattice, options).at(scale).posterior)
    reached = torch.zeros(lattice.num_states, dtype=torch.float64)
    reached.index_add_(0, lattice.dst_state, posterior)
    reached[lattice.start_state] = 1.0
    leaving = torch.zeros_like(reached).index_add_(0, lattice.src_state(), posterior)
    ending = (reached - leaving).clamp(min=0.0)
    arrays = (lattice.arc_begin, lattice.dst_state, lattice.word_begin, word, posterior, reached, ending)
    return WeightedLattice(int(lattice.start_state[0]), *(part.numpy() for part in arrays)), distinct


def least_risk(lattice: WeightedLattice, sentence: Any, num_words: int, max_rounds: int) -> Any:
    """Improves a sentence (W,) until its expected errors do not fall any more -> the sentence, its expected errors."""
    row = rows_of_states(lattice)
    best, least = sentence, np.inf
    for _ in range(max_rounds):
        positions = with_gaps(sentence)
        errors, risk = expected_errors(lattice, row, positions)
        if risk >= least - 1e-9:
            break
        best, least = sentence, risk
        posterior = position_posteriors(lattice, row, positions, errors, num_words)
        sentence = np.empty(len(positions), np.int64)
        length = 0
        for position in range(len(positions)):
            word = np.argmax(posterior[position])
            if word < num_words:
                sentence[length] = word
                length += 1
        sentence = sentence[:length]
        if len(sentence) == len(best) and np.all(sentence == best):
            break
    return best, least


def sentence_posteriors(lattice: WeightedLattice, sentence: Any, num_words: int) -> Any:
    """The share of the paths that have each word of a sentence (W,) in its place, (W,).

    A path is aligned to the sentence with as few errors as possible. Words that no path has are V.
    """
    row, positions = rows_of_states(lattice), with_gaps(sentence)
    errors, _ = expected_errors(lattice, row, positions)
    posterior = position_posteriors(lattice, row, positions, errors, num_words)
    found = np.zeros(len(sentence))
    for place in range(len(sentence)):
        if sentence[place] < num_words:
            found[place] = posterior[2 * place + 1, sentence[place]]
    return found


def with_gaps(sentence: Any) -> Any:
    """The positions (2 W + 1,) of a sentence (W,): its words, and -1 around them, where words may be inserted."""
    positions = np.full(2 * len(sentence) + 1, -1, np.int64)
    positions[1::2] = sentence
    return positions


def rows_of_states(lattice: WeightedLattice) -> Any:
    """The row of each state, (S,), -1 for states that no path reaches.

    A state whose only arc has no word shares the row of the arc's source, so that chains of frames cost nothing.
    """
    num_states = len(lattice.reached)
    num_arcs, source, is_silent = np.zeros(num_states, np.int64), np.zeros(num_states, np.int64), np.zeros(num_states)
    for state in range(num_states):
        for arc in range(lattice.arc_begin[state], lattice.arc_begin[state + 1]):
            if lattice.posterior[arc] > 0.0:
                dst = lattice.dst_state[arc]
                num_arcs[dst] += 1
                source[dst] = state
                is_silent[dst] = lattice.word_begin[arc] == lattice.word_begin[arc + 1]
    row, num_rows = np.full(num_states, -1, np.int64), 0
    for state in range(num_states):
        if num_arcs[state] == 1 and is_silent[state]:
            row[state] = row[source[state]]
        elif num_arcs[state] or state == lattice.start_state:
            row[state] = num_rows
            num_rows += 1
    return row


def expected_errors(lattice: WeightedLattice, row: Any, positions: Any) -> Any:
    """The expected errors of a sentence, positions (Q,).

    Returns:
        errors (R, Q + 1), those of the first q positions, given the paths to a state; and those of the sentence.
    """
    num_positions, risk = len(positions), 0.0
    errors = np.zeros((row.max() + 1, num_positions + 1))
    before, after = np.empty(num_positions + 1), np.empty(num_positions + 1)
    is_complete = np.zeros(len(errors), np.bool_)
    for position in range(num_positions):
        errors[row[lattice.start_state], position + 1] = errors[row[lattice.start_state], position]
        errors[row[lattice.start_state], position + 1] += positions[position] >= 0
    is_complete[row[lattice.start_state]] = True
    for state in range(len(row)):
        own = row[state]
        if own < 0:
            continue
        if not is_complete[own]:
            errors[own] /= lattice.reached[state]
            is_complete[own] = True
        risk += lattice.ending[state] * errors[own, num_positions]
        for arc in range(lattice.arc_begin[state], lattice.arc_begin[state + 1]):
            dst = row[lattice.dst_state[arc]]
            if lattice.posterior[arc] > 0.0 and dst != own:
                before[:] = errors[own]
                for place in range(lattice.word_begin[arc], lattice.word_begin[arc + 1]):
                    read_word(lattice.word[place], positions, before, after)
                    before[:] = after
                for position in range(num_positions + 1):
                    errors[dst, position] += lattice.posterior[arc] * before[position]
    return errors, risk


def read_word(word: int, positions: Any, before: Any, after: Any) -> None:
    """Computes the errors (Q + 1,) after a word of a path from those before it."""
    after[0] = before[0] + 1.0
    for position in range(len(positions)):
        same_place = before[position] + (word != positions[position])
        skipped = after[position] + (positions[position] >= 0)
        after[position + 1] = min(same_place, before[position + 1] + 1.0, skipped)


def position_posteriors(lattice: WeightedLattice, row: Any, positions: Any, errors: Any, num_words: int) -> Any:
    """The posterior of each word at each position, and of none in the last column, (Q, V + 1); rows sum to 1.

    Args:
        lattice: the lattice.
        row: (S,), see `rows_of_states`.
        positions: (Q,) the sentence.
        errors: (R, Q + 1), see `expected_errors`.
        num_words: V.
    """
    num_positions, most_words = len(positions), 0
    for arc in range(len(lattice.posterior)):
        most_words = max(most_words, lattice.word_begin[arc + 1] - lattice.word_begin[arc])
    posterior = np.zeros((num_positions, num_words + 1))
    at = np.empty((most_words + 1, num_positions + 1))  # the errors between the words of an arc
    passing, left = np.empty(num_positions + 1), np.empty(num_positions + 1)
    # The share of the paths whose alignment passes a state when q positions have been read.
    share = np.zeros(errors.shape)
    for state in range(len(row) - 1, -1, -1):
        own = row[state]
        if own < 0:
            continue
        share[own, num_positions] += lattice.ending[state]
        for arc in range(lattice.arc_begin[state], lattice.arc_begin[state + 1]):
            dst = row[lattice.dst_state[arc]]
            if lattice.posterior[arc] > 0.0 and dst != own:
                weight = lattice.posterior[arc] / lattice.reached[lattice.dst_state[arc]]
                for position in range(num_positions + 1):
                    passing[position] = weight * share[dst, position]
                    at[0, position] = errors[own, position]
                begin, end = lattice.word_begin[arc], lattice.word_begin[arc + 1]
                for place in range(begin, end):
                    read_word(lattice.word[place], positions, at[place - begin], at[place - begin + 1])
                for place in range(end - 1, begin - 1, -1):
                    add_posteriors(
                        lattice.word[place],
                        positions,
                        (at[place - begin], at[place - begin + 1]),
                        passing,
                        left,
                        posterior,
                    )
                    passing[:] = left
                share[own] += passing
    skipping = 0.0
    for position in range(num_positions - 1, -1, -1):
        skipping += share[row[lattice.start_state], position + 1]
        posterior[position, num_words] += skipping
    return posterior


def add_posteriors(word: int, positions: Any, around: Any, passing: Any, left: Any, posterior: Any) -> None:
    """Undoes `read_word`: adds posterior (Q, V + 1), computes the shares before the word, left (Q + 1,).

    Of paths that have not reached the first position there is nothing to add, so that left[0] lacks them.

    Args:
        word: the word.
        positions: (Q,) the sentence.
        around: errors (Q + 1,) before and after the word.
        passing: (Q + 1,), the shares after the word; changed.
        left: receives the result.
        posterior: (Q, V + 1), added to.
    """
    before, after = around
    left[:] = 0.0
    for position in range(len(positions) - 1, -1, -1):
        share = passing[position + 1]
        if share == 0.0:
            continue
        same_place = before[position] + (word != positions[position])
        skipped = after[position] + (positions[position] >= 0)
        # At equal errors the word takes an empty place: else it could never be inserted.
        if same_place <= before[position + 1] + 1.0 and same_place <= skipped:
            left[position] += share
            posterior[position, word] += share
        elif before[position + 1] + 1.0 <= skipped:
            left[position + 1] += share
        else:
            passing[position] += share
            posterior[position, posterior.shape[1] - 1] += share


def nearest_path(lattice: WeightedLattice, sentence: Any, arc_total: Any, final_total: Any) -> Any:
    """The path whose words are nearest to a sentence (W,), and of these the best one.

    Args:
        lattice: the lattice.
        sentence: (W,).
        arc_total: (A,) scores.
        final_total: (S,) scores, -inf for states that are not final.

    Returns:
        The arcs of the path, (L,) int64, and its score.
    """
    num_states, length = len(lattice.reached), len(sentence)
    far = np.iinfo(np.int32).max // 2
    errors, score = np.full((num_states, length + 1), far, np.int32), np.full((num_states, length + 1), -np.inf)
    # The last arc to a state, and how many words of the sentence had been read before it.
    last_arc, words_before = np.full(errors.shape, -1, np.int32), np.full(errors.shape, -1, np.int32)
    source = np.full(len(arc_total), -1, np.int64)
    for read in range(length + 1):
        errors[lattice.start_state, read], score[lattice.start_state, read] = read, 0.0
    end, least, best = lattice.start_state, far, -np.inf
    now, origin = np.empty(length + 1, np.int32), np.empty(length + 1, np.int32)
    for state in range(num_states):
        if not lattice.reached[state]:
            continue
        total = score[state, length] + final_total[state]
        if total > -np.inf and is_nearer(errors[state, length], total, least, best):
            end, least, best = state, errors[state, length], total
        for arc in range(lattice.arc_begin[state], lattice.arc_begin[state + 1]):
            if lattice.posterior[arc] == 0.0:
                continue
            source[arc], dst = state, lattice.dst_state[arc]
            now[:] = errors[state]
            for read in range(length + 1):
                origin[read] = read
            for place in range(lattice.word_begin[arc], lattice.word_begin[arc + 1]):
                step_over(lattice.word[place], sentence, score[state], now, origin)
            for read in range(length + 1):
                total = score[state, origin[read]] + arc_total[arc]
                if is_nearer(now[read], total, errors[dst, read], score[dst, read]):
                    errors[dst, read], score[dst, read] = now[read], total
                    last_arc[dst, read], words_before[dst, read] = arc, origin[read]
    path, read = [0 for _ in range(0)], length
    while last_arc[end, read] >= 0:
        arc = last_arc[end, read]
        path.append(arc)
        end, read = source[arc], words_before[end, read]
    return np.array(path[::-1], np.int64), best


def step_over(word: int, sentence: Any, score: Any, errors: Any, origin: Any) -> None:
    """Reads a word of an arc: changes errors (W + 1,) and the number of words read before the arc, origin (W + 1,).

    score (W + 1,) is that of the paths before the arc.
    """
    for read in range(len(sentence), -1, -1):
        errors[read] += 1
        if read:
            replaced = errors[read - 1] + (word != sentence[read - 1])
            if is_nearer(replaced, score[origin[read - 1]], errors[read], score[origin[read]]):
                errors[read], origin[read] = replaced, origin[read - 1]
    for read in range(len(sentence)):
        if is_nearer(errors[read] + 1, score[origin[read]], errors[read + 1], score[origin[read + 1]]):
            errors[read + 1], origin[read + 1] = errors[read] + 1, origin[read]


def is_nearer(errors: int, score: float, other_errors: int, other_score: float) -> bool:
    """Whether a path has fewer errors than another, or as many and a better score."""
    return errors < other_errors or (errors == other_errors and score > other_score)
