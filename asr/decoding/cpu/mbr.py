"""The sentence of a lattice with the least expected errors, as loops for `jit`. Uncompiled, they are a slow oracle.

This is the decoding of Xu et al. (2011). A sentence is compared with all paths of a lattice at once: the
expected edit distance to the paths that lead to a state is found from those of the states before it, with one alignment
for all paths that meet in a state. It is exact if only one path leads to each state, else an upper bound. Posteriors of
the alignments then tell which word each position of the sentence should have, and the sentence is improved until its
expected errors do not fall any more.

A sentence of W words has Q = 2 W + 1 positions, those of its words and one before, between and after them, which hold
no word and may gain one. Position 2 w + 1 is that of word w.

Shapes: S states, A arcs, G branching states, B arcs between rows, R rows, V distinct words of the lattice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from asr.decoding.cpu.lattice import total_of_arc, total_of_end
from asr.kernels.jit import kernel

FAR = np.iinfo(np.int32).max // 2
"""More errors than any path has."""


class ScoredLattice(NamedTuple):
    """The lattice of one utterance; states come before those that they lead to.

    Attributes:
        start_state: (1,) int64, the only state without an arc to it.
        arc_begin: (S + 1,) int64.
        dst_state: (A,) int64.
        word_begin: (A + 1,) int64; arc a has the words word[word_begin[a] : word_begin[a + 1]].
        word: integers from 0 to V - 1.
        arc_total: (A,) float64 scores.
        final_total: (S,) float64 scores, -inf where a path may not end.
    """

    start_state: Any
    arc_begin: Any
    dst_state: Any
    word_begin: Any
    word: Any
    arc_total: Any
    final_total: Any


class Rows(NamedTuple):
    """A lattice with posterior probabilities whose silent frames are left out.

    A state whose only arc has no word shares the row of the arc's source. States that neither end nor have arcs to
    other rows, and arcs with a posterior of 0, are left out. The others keep their order.

    Attributes:
        start_row: the row of the start state.
        reached: (R,) float64, the posterior of passing through the first state of each row.
        row: (G,) int64, the row of each state.
        ending: (G,) float64, the posterior of ending there.
        arc_begin: (G + 1,) int64.
        dst_row: (B,) int64.
        posterior: (B,) float64, above 0.
        word_begin: (B + 1,) int64.
        word: integers from 0 to V - 1.
    """

    start_row: int
    reached: Any
    row: Any
    ending: Any
    arc_begin: Any
    dst_row: Any
    posterior: Any
    word_begin: Any
    word: Any


@kernel(fastmath=False)
def score_lattice(word_begin: Any, word_id: Any, scores: Any, final_scores: Any, scales: Any) -> tuple[Any, ...]:
    """Adds up the scores of a lattice and numbers its words.

    Args:
        word_begin, word_id: words of the arcs.
        scores: am_score, graph_score and lm_score, (A,) each.
        final_scores: graph score and language model score of ending, (S,) each.
        scales: am_scale, graph_scale, lm_scale and word_insertion_penalty.

    Returns:
        word, arc_total and final_total, as in `ScoredLattice`; distinct words (V,) int64, ascending.
    """
    (am_score, graph_score, lm_score), (graph_final, lm_final) = scores, final_scores
    totals, finals = np.empty(len(am_score)), np.empty(len(graph_final))
    for arc in range(len(totals)):
        num_words = word_begin[arc + 1] - word_begin[arc]
        totals[arc] = total_of_arc(scales, am_score[arc], graph_score[arc], lm_score[arc], num_words)
    for state in range(len(finals)):
        finals[state] = total_of_end(scales, graph_final[state], lm_final[state])
    distinct = np.unique(word_id)
    return np.searchsorted(distinct, word_id), totals, finals, distinct


@kernel(fastmath=False)
def rows_of(lattice: ScoredLattice, scale: float) -> tuple[Any, ...]:
    """Posteriors by the scores times a scale: those of all arcs (A,), and the fields of `Rows`, in their order."""
    start, num_states = lattice.start_state[0], len(lattice.final_total)
    ahead, posterior = scale * lattice.final_total, np.zeros(len(lattice.arc_total))
    reached = np.zeros(num_states)
    reached[start] = 1.0
    sum_over_paths(lattice.arc_begin, lattice.dst_state, scale * lattice.arc_total, ahead, posterior, reached)
    row, num_rows = rows_of_states(lattice, posterior)
    reached_row, ending, num_branching = np.empty(num_rows), np.empty(num_states), 0
    branching, arc_begin = np.empty(num_states, np.int64), np.zeros(num_states + 1, np.int64)
    dst_row, kept = np.empty(len(posterior), np.int64), np.empty(len(posterior))
    word_begin, word = np.zeros(len(posterior) + 1, np.int64), np.empty(len(lattice.word), np.int64)
    num_arcs, num_words = 0, 0
    for state in range(num_states - 1, -1, -1):
        if row[state] >= 0:
            reached_row[row[state]] = reached[state]
    for state in range(num_states):
        if row[state] < 0:
            continue
        leaving, first_arc = 0.0, num_arcs
        for arc in range(lattice.arc_begin[state], lattice.arc_begin[state + 1]):
            leaving += posterior[arc]
            if posterior[arc] > 0.0 and row[lattice.dst_state[arc]] != row[state]:
                dst_row[num_arcs], kept[num_arcs] = row[lattice.dst_state[arc]], posterior[arc]
                for place in range(lattice.word_begin[arc], lattice.word_begin[arc + 1]):
                    word[num_words] = lattice.word[place]
                    num_words += 1
                num_arcs += 1
                word_begin[num_arcs] = num_words
        if num_arcs > first_arc or reached[state] > leaving:
            branching[num_branching], ending[num_branching] = row[state], max(reached[state] - leaving, 0.0)
            num_branching += 1
            arc_begin[num_branching] = num_arcs
    return (
        posterior, row[start], reached_row, branching[:num_branching], ending[:num_branching],
        arc_begin[: num_branching + 1], dst_row[:num_arcs], kept[:num_arcs], word_begin[: num_arcs + 1],
        word[:num_words],
    )  # fmt: skip


@kernel(fastmath=False)
def sum_over_paths(arc_begin: Any, dst_state: Any, arc_total: Any, ahead: Any, posterior: Any, reached: Any) -> None:
    """Computes the posterior probability of each arc and of passing through each state.

    Args:
        arc_begin, dst_state, arc_total: (S + 1,), (A,) and (A,); states are ordered by frame.
        ahead: (S,) the score of ending at each state; replaced by the summed score of all paths to an end.
        posterior: (A,) receives the posteriors of the arcs.
        reached: (S,) receives those of the states: 1 at start states, and elsewhere 0 before.
    """
    for state in range(len(ahead) - 1, -1, -1):
        first, last = arc_begin[state], arc_begin[state + 1]
        if last == first + 1 and ahead[state] == -np.inf:  # as below, without exponential and logarithm
            ahead[state] = arc_total[first] + ahead[dst_state[first]]
            continue
        best = ahead[state]
        for arc in range(first, last):
            best = max(best, arc_total[arc] + ahead[dst_state[arc]])
        if best > -np.inf:
            total = np.exp(ahead[state] - best)
            for arc in range(first, last):
                total += np.exp(arc_total[arc] + ahead[dst_state[arc]] - best)
            ahead[state] = best + np.log(total)
    for state in range(len(ahead)):
        if ahead[state] > -np.inf:
            for arc in range(arc_begin[state], arc_begin[state + 1]):
                lost = arc_total[arc] + ahead[dst_state[arc]] - ahead[state]
                posterior[arc] = reached[state] * (np.exp(lost) if lost != 0.0 else 1.0)
                reached[dst_state[arc]] += posterior[arc]


@kernel(fastmath=False)
def rows_of_states(lattice: ScoredLattice, posterior: Any) -> tuple[Any, int]:
    """The row of each state, (S,), -1 for states that no path reaches, and their number; posterior (A,) of the arcs."""
    num_states = len(lattice.final_total)
    num_arcs, source = np.zeros(num_states, np.int64), np.zeros(num_states, np.int64)
    is_silent = np.zeros(num_states, np.bool_)
    for state in range(num_states):
        for arc in range(lattice.arc_begin[state], lattice.arc_begin[state + 1]):
            if posterior[arc] > 0.0:
                dst = lattice.dst_state[arc]
                num_arcs[dst] += 1
                source[dst] = state
                is_silent[dst] = lattice.word_begin[arc] == lattice.word_begin[arc + 1]
    row, num_rows = np.full(num_states, -1, np.int64), 0
    for state in range(num_states):
        if num_arcs[state] == 1 and is_silent[state]:
            row[state] = row[source[state]]
        elif num_arcs[state] or state == lattice.start_state[0]:
            row[state] = num_rows
            num_rows += 1
    return row, num_rows


@kernel(fastmath=False)
def least_risk(rows: Rows, sentence: Any, num_words: int, max_rounds: int) -> tuple[Any, float, Any]:
    """Improves a sentence (W,) until its expected errors do not fall any more.

    Returns:
        The sentence, its expected errors, and the share of the paths that have each of its words in its place.
    """
    best, least, posterior = sentence, np.inf, np.empty((0, 0))
    for _ in range(max_rounds):
        errors, after, risk = expected_errors(rows, sentence)
        if risk >= least - 1e-9:
            break
        best, least = sentence, risk
        posterior = position_posteriors(rows, sentence, errors, after, num_words)
        sentence = np.empty(len(posterior), np.int64)
        length = 0
        for position in range(len(posterior)):
            word = np.argmax(posterior[position])
            if word < num_words:
                sentence[length] = word
                length += 1
        sentence = sentence[:length]
        if len(sentence) == len(best) and np.all(sentence == best):
            break
    return best, least, shares_of_words(posterior, best)


@kernel(fastmath=False)
def sentence_posteriors(rows: Rows, sentence: Any, num_words: int) -> Any:
    """The share of the paths that have each word of a sentence (W,) in its place, (W,).

    A path is aligned to the sentence with as few errors as possible. Words that no path has are V.
    """
    errors, after, _ = expected_errors(rows, sentence)
    return shares_of_words(position_posteriors(rows, sentence, errors, after, num_words), sentence)


@kernel(fastmath=False)
def shares_of_words(posterior: Any, sentence: Any) -> Any:
    """The posteriors (Q, V + 1) of the words of a sentence (W,) at their positions, (W,); 0 for words that are V."""
    found = np.zeros(len(sentence))
    for place in range(len(sentence)):
        if sentence[place] < posterior.shape[1] - 1:
            found[place] = posterior[2 * place + 1, sentence[place]]
    return found


@kernel(fastmath=False)
def expected_errors(rows: Rows, sentence: Any) -> tuple[Any, Any, float]:
    """The expected errors of a sentence (W,).

    Returns:
        errors (R, W + 1), those of the first w words, given the paths to a row; those after each word of the lattice,
        (its words, W + 1); and those of the sentence.
    """
    length = len(sentence)
    errors, after = np.zeros((len(rows.reached), length + 1)), np.empty((len(rows.word), length + 1))
    errors[rows.start_row] = np.arange(length + 1)
    is_complete = np.zeros(len(errors), np.bool_)
    is_complete[rows.start_row] = True
    risk = spread_errors(rows, sentence, errors, after, is_complete)
    return errors, after, risk


@kernel(fastmath=False, allocates=False)
def spread_errors(rows: Rows, sentence: Any, errors: Any, after: Any, is_complete: Any) -> float:
    """Fills in what `expected_errors` returns; only the rows that are complete have their errors."""
    length, risk = len(sentence), 0.0
    for state in range(len(rows.row)):
        own = rows.row[state]
        if not is_complete[own]:
            for place in range(length + 1):
                errors[own, place] /= rows.reached[own]
            is_complete[own] = True
        risk += rows.ending[state] * errors[own, length]
        for arc in range(rows.arc_begin[state], rows.arc_begin[state + 1]):
            dst, posterior, now = rows.dst_row[arc], rows.posterior[arc], errors[own]
            for number in range(rows.word_begin[arc], rows.word_begin[arc + 1]):
                read_word(rows.word[number], sentence, now, after[number])
                now = after[number]
            for place in range(length + 1):
                errors[dst, place] += posterior * now[place]
    return risk


@kernel(fastmath=False, allocates=False)
def read_word(word: int, sentence: Any, before: Any, after: Any) -> None:
    """Computes the errors of the first words of a sentence, (W + 1,), after a word of a path, from those before it."""
    after[0] = before[0] + 1.0
    for place in range(len(sentence)):
        replaced = before[place] + (word != sentence[place])
        after[place + 1] = min(replaced, before[place + 1] + 1.0, after[place] + 1.0)


@kernel(fastmath=False)
def position_posteriors(rows: Rows, sentence: Any, errors: Any, after: Any, num_words: int) -> Any:
    """The posterior of each word at each position, and of none in the last column, (Q, V + 1); rows sum to 1.

    Args:
        rows: the lattice.
        sentence: (W,).
        errors, after: see `expected_errors`.
        num_words: V.
    """
    num_positions, num_rows, start = 2 * len(sentence) + 1, len(errors), rows.start_row
    posterior, no_word = np.zeros((num_positions, num_words + 1)), np.zeros(num_positions)
    # The share of the paths whose alignment passes a row when q positions have been read. Most shares are 0, so only
    # those from `low` to `high` are stored, and that of all positions by itself.
    share, all_read = np.empty((num_rows, num_positions)), np.zeros(num_rows)
    spans = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    work = np.zeros((2, num_positions + 1))
    spread_shares(rows, sentence, (errors, after), (share, all_read, *spans), work, (posterior, no_word))
    skipping = all_read[start]
    for position in range(num_positions - 1, -1, -1):
        posterior[position, num_words] = no_word[position] + skipping
        if spans[0][start] <= position < spans[1][start]:
            skipping += share[start, position]
    return posterior


@kernel(fastmath=False, allocates=False)
def spread_shares(rows: Rows, sentence: Any, errors: Any, shares: Any, work: Any, posterior: Any) -> None:
    """Undoes `spread_errors`: adds posteriors, and finds the shares of all rows.

    Args:
        rows: the lattice.
        sentence: (W,).
        errors: as `expected_errors` returns them.
        shares: share (R, Q) of up to Q - 1 positions, all_read (R,), low and high (R,); no row has a share yet.
        work: (2, Q + 1), zeros; left as zeros.
        posterior: (Q, V + 1) of words, and (Q,) of none; added to.
    """
    (errors_of, after), (share, all_read, low, high), (passing, left) = errors, shares, work
    num_positions = share.shape[1]
    for state in range(len(rows.row) - 1, -1, -1):
        own = rows.row[state]
        all_read[own] += rows.ending[state]
        for arc in range(rows.arc_begin[state], rows.arc_begin[state + 1]):
            dst = rows.dst_row[arc]
            weight, first, last = rows.posterior[arc] / rows.reached[dst], low[dst], high[dst]
            begin, end = rows.word_begin[arc], rows.word_begin[arc + 1]
            if begin == end:
                widen(share, low, high, own, first, last)
                for read in range(first, last):
                    share[own, read] += weight * share[dst, read]
                all_read[own] += weight * all_read[dst]
                continue
            for read in range(first, last):
                passing[read] = weight * share[dst, read]
            passing[num_positions] = weight * all_read[dst]
            if passing[num_positions] > 0.0:
                first, last = first if first < last else num_positions, num_positions + 1
            if first == last:
                continue
            for number in range(end - 1, begin - 1, -1):
                before = errors_of[own] if number == begin else after[number - 1]
                around = before, after[number]
                first = add_posteriors(rows.word[number], sentence, around, work, (first, last), posterior)
                for read in range(first, last):
                    passing[read], left[read] = left[read], 0.0
            # No path has read all positions before a word: it takes at least the empty place at the end.
            while last > first and passing[last - 1] == 0.0:
                last -= 1
            widen(share, low, high, own, first, last)
            for read in range(first, last):
                share[own, read] += passing[read]
                passing[read] = 0.0


@kernel(fastmath=False, allocates=False)
def widen(share: Any, low: Any, high: Any, row: int, first: int, last: int) -> None:
    """Makes room for the shares of a row from `first` to `last`; see `spread_shares`."""
    if first == last:
        return
    if low[row] == high[row]:
        low[row] = high[row] = first
    for read in range(first, low[row]):
        share[row, read] = 0.0
    for read in range(high[row], last):
        share[row, read] = 0.0
    low[row], high[row] = min(low[row], first), max(high[row], last)


@kernel(fastmath=False, allocates=False)
def add_posteriors(word: int, sentence: Any, around: Any, shares: Any, span: Any, posterior: Any) -> int:
    """Undoes `read_word`: adds posteriors, and moves shares from after the word to before it.

    Of paths that have not reached the first position there is nothing to add, so their shares are dropped.

    Args:
        word: the word.
        sentence: (W,).
        around: errors (W + 1,) before and after the word.
        shares: (Q + 1,) after the word, which become zeros; and before it, zeros that receive the result.
        span: the shares after the word are zeros except from the first to before the last.
        posterior: see `spread_shares`.

    Returns:
        Where the shares before the word begin.
    """
    (before, after), (passing, left), (of_words, no_word) = around, shares, posterior
    first, last = span
    skipping, read = 0.0, last - 1
    while read >= first or skipping > 0.0:
        share = passing[read] + skipping
        passing[read], skipping = 0.0, 0.0
        if read == 0:
            break
        read -= 1
        if share == 0.0:
            continue
        # Position `read` is a word of the sentence or one of the empty places around them.
        place, is_word = read // 2, read % 2
        replaced, skipped = before[place] + 1.0, after[place] + is_word
        if is_word and word == sentence[place]:
            replaced = before[place]
        deleted = before[place + is_word] + 1.0
        # At equal errors the word takes an empty place: else it could never be inserted.
        if replaced <= deleted and replaced <= skipped:
            left[read] += share
            of_words[read, word] += share
        elif deleted <= skipped:
            left[read + 1] += share
        else:
            skipping = share
            no_word[read] += share
    return read


@kernel(fastmath=False)
def nearest_path(lattice: ScoredLattice, posterior: Any, sentence: Any) -> tuple[Any, float]:
    """The path whose words are nearest to a sentence (W,), and of these the best one.

    Args:
        lattice: the lattice.
        posterior: (A,); arcs with 0 are left out.
        sentence: (W,).

    Returns:
        The arcs of the path, (L,) int64, and its score; no arcs and -inf if no path is complete.
    """
    most, limit = len(sentence) + len(lattice.word), 0
    while True:
        path, total = path_within(lattice, posterior, sentence, limit)
        if total > -np.inf or limit >= most:
            return path, total
        limit = 2 * limit + 1


@kernel(fastmath=False)
def path_within(lattice: ScoredLattice, posterior: Any, sentence: Any, limit: int) -> tuple[Any, float]:
    """As `nearest_path`, if that path has at most `limit` errors; else no arcs and -inf.

    The beginnings of a path do not have more errors than all of it, so only those within the limit go on.
    """
    num_states, length = len(lattice.final_total), len(sentence)
    shape = (num_states, length + 1)
    # Of the best path to a state that has read so many words: its errors and score, its last arc, and how many words
    # had been read before it. Only those from `low` to `high` are stored.
    cells = (np.empty(shape, np.int32), np.empty(shape), np.empty(shape, np.int32), np.empty(shape, np.int32))
    low, high = np.zeros(num_states, np.int64), np.zeros(num_states, np.int64)
    source = np.empty(len(posterior), np.int64)
    end, total = extend_paths(
        lattice, posterior, sentence, limit, (cells, low, high), source, np.empty((2, length + 1), np.int32)
    )
    path, read = [0 for _ in range(0)], length
    while total > -np.inf and cells[2][end, read] >= 0:
        arc = cells[2][end, read]
        path.append(arc)
        end, read = source[arc], cells[3][end, read]
    return np.array(path[::-1], np.int64), total


@kernel(fastmath=False, allocates=False)
def extend_paths(
    lattice: ScoredLattice, posterior: Any, sentence: Any, limit: int, table: Any, source: Any, work: Any
) -> tuple[int, float]:
    """Fills in the table of `path_within` -> the last state of the path, and its score, -inf if there is none.

    source (A,) receives the state that each arc leaves; work (2, W + 1) is memory.
    """
    (cells, low, high), (now, origin) = table, work
    (errors, score, last_arc, words_before), start, length = cells, lattice.start_state[0], len(sentence)
    open_cells(table, start, 0, min(limit, length) + 1)
    for read in range(high[start]):
        errors[start, read], score[start, read] = read, 0.0
    end, least, best = start, limit + 1, -np.inf
    for state in range(len(lattice.final_total)):
        if low[state] == high[state]:
            continue
        if high[state] > length and lattice.final_total[state] > -np.inf:
            total = score[state, length] + lattice.final_total[state]
            if is_nearer(errors[state, length], total, least, best):
                end, least, best = state, errors[state, length], total
        for arc in range(lattice.arc_begin[state], lattice.arc_begin[state + 1]):
            if posterior[arc] == 0.0:
                continue
            source[arc], dst = state, lattice.dst_state[arc]
            begin, stop = lattice.word_begin[arc], lattice.word_begin[arc + 1]
            # Each word reads one of the sentence; others may be missing.
            first, last = low[state], min(high[state] + (stop - begin) * (1 + limit), length + 1)
            open_cells(table, state, first, last)
            for read in range(first, last):
                now[read], origin[read] = errors[state, read], read
            for place in range(begin, stop):
                step_over(lattice.word[place], sentence, score[state], work, (first, last))
            while first < last and now[last - 1] > limit:
                last -= 1
            while first < last and now[first] > limit:
                first += 1
            open_cells(table, dst, first, last)
            for read in range(first, last):
                total = score[state, origin[read]] + lattice.arc_total[arc]
                if is_nearer(now[read], total, errors[dst, read], score[dst, read]):
                    errors[dst, read], score[dst, read] = now[read], total
                    last_arc[dst, read], words_before[dst, read] = arc, origin[read]
    return end, best


@kernel(fastmath=False, allocates=False)
def open_cells(table: Any, state: int, first: int, last: int) -> None:
    """Makes room for a state's cells from `first` to `last`, without paths; see `path_within`."""
    cells, low, high = table
    errors, score, last_arc, _ = cells
    if low[state] == high[state]:
        low[state] = high[state] = first
    for begin, end in ((first, low[state]), (high[state], last)):
        for read in range(begin, end):
            errors[state, read], score[state, read], last_arc[state, read] = FAR, -np.inf, -1
    low[state], high[state] = min(low[state], first), max(high[state], last)


@kernel(fastmath=False, allocates=False)
def step_over(word: int, sentence: Any, score: Any, work: Any, span: Any) -> None:
    """Reads a word of an arc: changes errors (W + 1,) and the number of words read before the arc, origin (W + 1,).

    score (W + 1,) is that of the paths before the arc; the span is what is changed.
    """
    (errors, origin), (first, last) = work, span
    for read in range(last - 1, first - 1, -1):
        errors[read] += 1
        if read > first:
            replaced = errors[read - 1] + (word != sentence[read - 1])
            if is_nearer(replaced, score[origin[read - 1]], errors[read], score[origin[read]]):
                errors[read], origin[read] = replaced, origin[read - 1]
    for read in range(first, last - 1):
        if is_nearer(errors[read] + 1, score[origin[read]], errors[read + 1], score[origin[read + 1]]):
            errors[read + 1], origin[read + 1] = errors[read] + 1, origin[read]


@kernel(fastmath=False, allocates=False)
def is_nearer(errors: int, score: float, other_errors: int, other_score: float) -> bool:
    """Whether a path has fewer errors than another, or as many and a better score."""
    return errors < other_errors or (errors == other_errors and score > other_score)
