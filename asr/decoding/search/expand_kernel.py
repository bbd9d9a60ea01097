"""What the partial paths of one stream become over the arcs that leave them, as a loop for `compiled_loop`.

Shapes: K partial paths, A candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# More than the rounding of a difference of two scores can be.
_SLACK = 0.01
_RECOMBINED = 8


def num_arcs(state: Any, arc_begin: Any) -> Any:
    """How many arcs leave these states (K,), each counted as often as it stands there."""
    total = 0
    for path in range(len(state)):
        total += arc_begin[state[path] + 1] - arc_begin[state[path]]
    return total


def expand_paths(
    state: Any, score: Any, begin: int, end: int, arc_begin: Any, token_id: Any, arc_score: Any, num_words: Any,
    log_prob: Any, row: Any, reach: Any, beam: Any, word_beam: Any, min_active: int, is_pruned: bool,
    source: Any, arc: Any, value: Any, first: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Fills in, from `first` on, what the paths of one stream become; arguments otherwise as of `expand_frame`.

    Args:
        begin, end: the stream's paths.
        row: where its frame begins in the scores.
        source, arc, value: there is room for all arcs; value is not relative.

    Returns:
        Behind which place the candidates end, the best of their scores, and whether any that is possible was left out.
    """
    # Where the best path leads tells at once what is not worth writing down.
    leader = begin
    for path in range(begin, end):
        if score[path] > score[leader]:
            leader = path
    lead = np.float32(-np.inf)
    for position in range(arc_begin[state[leader]], arc_begin[state[leader] + 1]):
        reached = score[leader] + arc_score[position]
        lead = max(lead, reached + log_prob[row + token_id[position]])
    while True:
        best = lead
        floor = np.float32(best - reach - _SLACK)
        left_out = False
        num = first
        for path in range(begin, end):
            path_score = score[path]
            for position in range(arc_begin[state[path]], arc_begin[state[path] + 1]):
                reached = path_score + arc_score[position]
                reached = reached + log_prob[row + token_id[position]]
                if reached < floor or reached == -np.inf:
                    left_out = left_out or reached > -np.inf
                    continue
                source[num], arc[num], value[num] = path, position, reached
                num += 1
                if reached > best:
                    best = reached
                    floor = np.float32(best - reach - _SLACK)
        if not left_out:
            break
        num_inside = 0
        for i in range(first, num):
            relative = value[i] - best
            if relative >= -beam and (not is_pruned or relative >= -word_beam or num_words[arc[i]] == 0):
                num_inside += 1
        # Without a language model several of these may recombine into one.
        if num_inside >= (min_active if is_pruned else _RECOMBINED * min_active):
            break
        reach = np.float32(np.inf)
    return num, best, left_out
