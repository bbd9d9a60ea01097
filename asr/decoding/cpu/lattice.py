"""Numba loops for lattices: losses of paths, selection, building and pruning. Uncompiled, they are slow oracles.

`build_pruned` builds the lattice of whole utterances, `connect_chunk` that of a chunk of frames, which the language
model then rescores.

Shapes: N utterances or streams, T frames, C tokens, R backpointers, L losing arcs, S states, A arcs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from asr.kernels.jit import kernel


class LatticeBackpointers(NamedTuple):
    """The backpointers of a search (R,); those of a frame of an utterance are adjacent.

    Attributes:
        previous: the previous backpointer, -1 at a start.
        utt_idx: the utterance.
        frame: number of frames read.
    """

    previous: Any
    utt_idx: Any
    frame: Any


class LosingArcs(NamedTuple):
    """Arcs that lost in recombination (L,), in the order of the frames.

    Attributes:
        src: the backpointer before the arc, -1 at a start.
        dst: the backpointer that the arc lost to.
        score_gap: how far it was below the winner.
    """

    src: Any
    dst: Any
    score_gap: Any


@kernel(fastmath=False)
def add_losses(backpointers: Any, losing: Any, loss: Any) -> None:
    """Computes how far the best path through each backpointer is below the best path of all.

    Args:
        backpointers: `LatticeBackpointers`; those of a frame come after all that lead to them.
        losing: `LosingArcs`.
        loss: (R,) float32, the loss of ending at each backpointer, infinite where no path may end; lowered in place.
    """
    previous, frame = backpointers.previous, backpointers.frame
    end, arc = len(previous), len(losing.dst) - 1
    while end > 0:
        begin = end - 1
        while begin > 0 and frame[begin - 1] == frame[end - 1]:
            begin -= 1
        while arc >= 0 and losing.dst[arc] >= begin:
            src = losing.src[arc]
            if src >= 0:
                loss[src] = min(loss[src], loss[losing.dst[arc]] + losing.score_gap[arc])
            arc -= 1
        for i in range(begin, end):
            if previous[i] >= 0:
                loss[previous[i]] = min(loss[previous[i]], loss[i])
        end = begin


@kernel(fastmath=False)
def kept_within(margin: float, backpointers: Any, losing: Any, loss: Any, num_utts: int) -> Any:
    """The backpointers and losing arcs on paths that lose at most `margin`, as states and arcs of a lattice.

    Args:
        margin: maximum loss of a path.
        backpointers, losing: as for `add_losses`.
        loss: (R,) as `add_losses` leaves it.
        num_utts: number of utterances, whose start states come before all other states.

    Returns:
        backpointer (R',), losing arc (L',): those that are kept, ascending.
        state (R',): the same backpointers by frame; number (R + 1,): the state of each backpointer, from num_utts on,
        or -1 if it is not kept; the additional last entry is -1.
        src_state, dst_state (R' + L',): of the arcs, those of the backpointers first.
    """
    previous, frame = backpointers.previous, backpointers.frame
    kept, kept_losing = np.empty(len(loss), dtype=np.int64), np.empty(len(losing.dst), dtype=np.int64)
    # Where the states of each frame begin.
    begin = np.zeros(int(frame.max()) + 2 if len(frame) else 1, dtype=np.int64)
    num_kept, num_losing = 0, 0
    for i in range(len(loss)):
        if loss[i] <= margin:
            kept[num_kept] = i
            num_kept += 1
            begin[frame[i] + 1] += 1
    for i in range(len(losing.dst)):
        if loss[losing.dst[i]] + losing.score_gap[i] <= margin:
            kept_losing[num_losing] = i
            num_losing += 1
    begin = begin.cumsum()
    number, state = np.full(len(loss) + 1, -1, dtype=np.int64), np.empty(num_kept, dtype=np.int64)
    for i in kept[:num_kept]:
        place = begin[frame[i]]
        begin[frame[i]] += 1
        number[i], state[place] = num_utts + place, i
    num_arcs = num_kept + num_losing
    src_state, dst_state = np.empty(num_arcs, dtype=np.int64), np.empty(num_arcs, dtype=np.int64)
    for arc in range(num_arcs):
        if arc < num_kept:
            own, before = kept[arc], previous[kept[arc]]
        else:
            own, before = losing.dst[kept_losing[arc - num_kept]], losing.src[kept_losing[arc - num_kept]]
        src_state[arc] = backpointers.utt_idx[own] if before < 0 else number[before]
        dst_state[arc] = number[own]
    return kept[:num_kept], kept_losing[:num_losing], state, number, src_state, dst_state


@kernel(fastmath=False)
def order_by_source(src_state: Any, num_states: int) -> Any:
    """Sorts arcs stably by source state -> their order (A,), and arc_begin (S + 1,)."""
    arc_begin = np.zeros(num_states + 1, dtype=np.int64)
    for state in src_state:
        arc_begin[state + 1] += 1
    arc_begin = arc_begin.cumsum()
    place, order = arc_begin.copy(), np.empty(len(src_state), dtype=np.int64)
    for arc in range(len(src_state)):
        order[place[src_state[arc]]] = arc
        place[src_state[arc]] += 1
    return order, arc_begin


@kernel(fastmath=False)
def spread_forward(arc_begin: Any, dst_state: Any, arc_total: Any, score: Any) -> None:
    """Raises the score of each state (S,) to the best over its incoming arcs; states are ordered by frame."""
    for state in range(len(score)):
        for arc in range(arc_begin[state], arc_begin[state + 1]):
            score[dst_state[arc]] = max(score[dst_state[arc]], score[state] + arc_total[arc])


@kernel(fastmath=False)
def spread_backward(arc_begin: Any, dst_state: Any, arc_total: Any, score: Any) -> None:
    """Raises the score of each state (S,) to the best over its outgoing arcs; states are ordered by frame."""
    for state in range(len(score) - 1, -1, -1):
        for arc in range(arc_begin[state], arc_begin[state + 1]):
            score[state] = max(score[state], score[dst_state[arc]] + arc_total[arc])


@kernel(fastmath=False)
def total_of_arc(scales: Any, am_score: float, graph_score: float, lm_score: float, num_words: int) -> float:
    """`Lattice.arc_total` of one arc; scales are am_scale, graph_scale, lm_scale and word_insertion_penalty."""
    am_scale, graph_scale, lm_scale, penalty = scales
    scaled = am_scale * np.float64(am_score) + graph_scale * np.float64(graph_score)
    return scaled + lm_scale * np.float64(lm_score) + penalty * np.float64(num_words)


@kernel(fastmath=False)
def total_of_end(scales: Any, graph_score: float, lm_score: float) -> float:
    """`Lattice.final_total` of one state; scales as for `total_of_arc`."""
    _, graph_scale, lm_scale, _ = scales
    if graph_score > -np.inf:
        return graph_scale * np.float64(graph_score) + lm_scale * np.float64(lm_score)
    return -np.inf


@kernel(fastmath=False)
def build_pruned(parts: Any, graph: Any, log_prob: Any, scales: Any, beam: float) -> Any:
    """Builds a lattice from its parts as `lattice_from_graph` does, and prunes it as `prune` does.

    Args:
        parts: frame, utt_idx, start_state, src_state, dst_state, arc, lm_score, final_graph_score and final_lm_score,
            as in `LatticeParts`; arrays of states are overwritten.
        graph: token_id, score, word_begin and word_id of the decoding graph.
        log_prob: (N, T, C) unscaled.
        scales: am_scale, graph_scale, lm_scale and word_insertion_penalty.
        beam: arcs are pruned if the best path through them is further below the best path.

    Returns:
        The fields of `Lattice`, in their order.
    """
    frame, utt_idx, start_state, src_state, dst_state, arc, lm_score, final_graph_score, final_lm_score = parts
    token_id, score, word_begin, word_id = graph
    order, arc_begin = order_by_source(src_state, len(frame))
    src_state, dst_state, arc, lm_score = src_state[order], dst_state[order], arc[order], lm_score[order]
    arc_token, am_score = np.empty(len(arc), dtype=token_id.dtype), np.empty(len(arc), dtype=np.float32)
    graph_score, total = np.empty(len(arc), dtype=np.float32), np.empty(len(arc), dtype=np.float64)
    first_word, num_words = np.empty(len(arc), dtype=np.int64), np.empty(len(arc), dtype=np.int64)
    # A loop of its own: no computation waits for these scattered loads.
    for i in range(len(arc)):
        arc_token[i], graph_score[i] = token_id[arc[i]], score[arc[i]]
        first_word[i], num_words[i] = word_begin[arc[i]], word_begin[arc[i] + 1] - word_begin[arc[i]]
    for i in range(len(arc)):
        am_score[i] = log_prob[utt_idx[src_state[i]], frame[src_state[i]], arc_token[i]]
        total[i] = total_of_arc(scales, am_score[i], graph_score[i], lm_score[i], num_words[i])
    forward, backward = np.full(len(frame), -np.inf), np.empty(len(frame))
    forward[start_state] = 0.0
    spread_forward(arc_begin, dst_state, total, forward)
    for state in range(len(frame)):
        backward[state] = total_of_end(scales, final_graph_score[state], final_lm_score[state])
    spread_backward(arc_begin, dst_state, total, backward)
    limit = backward[start_state] - beam
    # Slack, so that rounding does not prune arcs of the best path.
    limit = limit - 1e-6 * np.maximum(np.abs(limit), 1.0)
    is_start, number, num_kept = np.zeros(len(frame), dtype=np.bool_), np.full(len(frame), -1), 0
    is_start[start_state] = True
    for state in range(len(frame)):
        through = forward[state] + backward[state]
        if is_start[state] or (through >= limit[utt_idx[state]] and through > -np.inf):
            number[state] = num_kept
            num_kept += 1
    # Moves the arcs that are kept to the front.
    num_arcs, total_words = 0, 0
    new_begin, new_word_begin = np.zeros(num_kept + 1, dtype=np.int64), np.zeros(len(arc) + 1, dtype=np.int64)
    for i in range(len(arc)):
        through = forward[src_state[i]] + total[i] + backward[dst_state[i]]
        lowest = limit[utt_idx[src_state[i]]]
        if number[src_state[i]] < 0 or number[dst_state[i]] < 0 or through < lowest or through == -np.inf:
            continue
        new_begin[number[src_state[i]] + 1] += 1
        dst_state[num_arcs], arc[num_arcs], arc_token[num_arcs] = number[dst_state[i]], arc[i], arc_token[i]
        am_score[num_arcs], graph_score[num_arcs], lm_score[num_arcs] = am_score[i], graph_score[i], lm_score[i]
        first_word[num_arcs] = first_word[i]
        total_words += num_words[i]
        num_arcs += 1
        new_word_begin[num_arcs] = total_words
    words = np.empty(total_words, dtype=np.int64)
    for i in range(num_arcs):
        for position in range(new_word_begin[i], new_word_begin[i + 1]):
            words[position] = word_id[first_word[i] + position - new_word_begin[i]]
    for state in range(len(frame)):
        if number[state] >= 0:
            own = number[state]
            frame[own], utt_idx[own] = frame[state], utt_idx[state]
            final_graph_score[own], final_lm_score[own] = final_graph_score[state], final_lm_score[state]
    return (
        frame[:num_kept], utt_idx[:num_kept], number[start_state], new_begin.cumsum(), dst_state[:num_arcs],
        arc[:num_arcs], arc_token[:num_arcs], am_score[:num_arcs], graph_score[:num_arcs], lm_score[:num_arcs],
        new_word_begin[: num_arcs + 1], words, final_graph_score[:num_kept], final_lm_score[:num_kept],
    )  # fmt: skip


class ChunkRecords(NamedTuple):
    """Backpointers (R,) and losing arcs (L,) of a chunk, see `LatticeRecords.add_frames`.

    Backpointers of frame 0 are the tokens before the chunk. All others come after those that lead to them.

    Attributes:
        previous, arc: of the backpointers; unused at frame 0.
        utt_idx, frame: streams of the backpointers, and number of frames of the chunk read.
        src, dst, losing_arc, score_gap: of the losing arcs.
        loss: (R,) float32, how far the best path through each backpointer is below the stream's best path.
    """

    previous: Any
    arc: Any
    utt_idx: Any
    frame: Any
    src: Any
    dst: Any
    losing_arc: Any
    score_gap: Any
    loss: Any


@kernel(fastmath=False)
def connect_chunk(
    records: Any, last_frame: Any, margin: Any, graph: Any, log_prob: Any, score: Any
) -> tuple[Any, Any, Any, Any, Any, Any, Any, Any]:
    """The states and arcs of a chunk that are within the margin, with pushed scores.

    With pushed scores, a path to a state has the score of its best continuation in the search, which extends beyond
    `last_frame`.

    Args:
        records: `ChunkRecords`.
        last_frame: (N,) number of frames that belong to the graph.
        margin: float32, maximum loss of a path.
        graph: scores and tokens of the arcs that were searched, word_begin and word_id.
        log_prob: (N, T, C) float32, scaled, as in the search.
        score: (R,) float64, given at frame 0; filled in for all states.

    Returns:
        number (R,): the state of each backpointer, -1 for none; backpointer (S,): the inverse.
        arc_begin (S + 1,), dst_state (A,), pushed score (A,) float32, searched arc (A,), word_begin (A + 1,) and
        word_id (W,) of the graph.
    """
    arc_score, arc_token, word_begin, word_id = graph
    number, num_states = np.full(len(records.previous), -1, dtype=np.int64), 0
    backpointer = np.empty(len(records.previous), dtype=np.int64)
    for own in range(len(records.previous)):
        utt_idx, frame = records.utt_idx[own], records.frame[own]
        if not records.loss[own] <= margin or frame > last_frame[utt_idx]:
            continue
        number[own], backpointer[num_states] = num_states, own
        num_states += 1
        if frame > 0:
            arc = records.arc[own]
            read = np.float64(arc_score[arc]) + np.float64(log_prob[utt_idx, frame - 1, arc_token[arc]])
            score[own] = score[records.previous[own]] + read
    # The first pass counts the arcs that leave each state, the second one writes them.
    place = np.zeros(num_states + 1, dtype=np.int64)
    dst_state, arc_of = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64)
    pushed, arc_begin = np.empty(0, dtype=np.float32), place
    for fills in range(2):
        for own in range(len(records.previous)):
            if number[own] >= 0 and records.frame[own] > 0:
                before = number[records.previous[own]]
                if fills:
                    at = place[before]
                    dst_state[at], arc_of[at] = number[own], records.arc[own]
                    pushed[at] = records.loss[records.previous[own]] - records.loss[own]
                place[before] += 1
        for i in range(len(records.dst)):
            won = records.dst[i]
            if number[won] >= 0 and records.loss[won] + records.score_gap[i] <= margin:
                before = number[records.src[i]]
                if fills:
                    at = place[before]
                    dst_state[at], arc_of[at] = number[won], records.losing_arc[i]
                    pushed[at] = records.loss[records.src[i]] - (records.loss[won] + records.score_gap[i])
                place[before] += 1
        if not fills:
            arc_begin = np.zeros(num_states + 1, dtype=np.int64)
            arc_begin[1:] = place[:num_states].cumsum()
            place = arc_begin.copy()
            num_arcs = arc_begin[num_states]
            dst_state, arc_of = np.empty(num_arcs, dtype=np.int32), np.empty(num_arcs, dtype=np.int64)
            pushed = np.empty(num_arcs, dtype=np.float32)
    new_begin, words = words_of_arcs(arc_of, word_begin, word_id)
    return number, backpointer[:num_states], arc_begin, dst_state, pushed, arc_of, new_begin, words


@kernel(fastmath=False)
def words_of_arcs(arc: Any, word_begin: Any, word_id: Any) -> tuple[Any, Any]:
    """The words of arcs (A,), given those of all arcs: word_begin (A + 1,) and word_id (W,) int64."""
    new_begin = np.zeros(len(arc) + 1, dtype=np.int64)
    for i in range(len(arc)):
        new_begin[i + 1] = new_begin[i] + word_begin[arc[i] + 1] - word_begin[arc[i]]
    words = np.empty(new_begin[len(arc)], dtype=np.int64)
    for i in range(len(arc)):
        for position in range(new_begin[i], new_begin[i + 1]):
            words[position] = word_id[word_begin[arc[i]] + position - new_begin[i]]
    return new_begin, words
