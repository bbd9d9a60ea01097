"""The word sequence of a lattice that is nearest to the reference: what rescoring could reach at best.

Shapes: S states, R reference words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr.decoding.lattice import Lattice

_FAR = 1 << 20


def oracle_errors(lattice: Lattice, reference: Sequence[int]) -> int:
    """The fewest substitutions, insertions and deletions between the reference and any path of the lattice.

    Args:
        lattice: of one utterance, with a path.
        reference: word ids.
    """
    num_ref = len(reference)
    words = torch.tensor(reference, dtype=torch.int64)
    position = torch.arange(num_ref + 1)
    # distance[s, r]: fewest errors between some way to state s and the first r words of the reference.
    distance = torch.full((lattice.num_states, num_ref + 1), _FAR, dtype=torch.int64)
    distance[int(lattice.start_state[0])] = position
    arc_begin, dst_state = lattice.arc_begin.tolist(), lattice.dst_state.tolist()
    word_begin, word_id = lattice.word_begin.tolist(), lattice.word_id.tolist()
    for state in range(lattice.num_states):
        for arc in range(arc_begin[state], arc_begin[state + 1]):
            row = distance[state]
            for word in word_id[word_begin[arc] : word_begin[arc + 1]]:
                row = _after_word(row, words, word, position)
            dst = dst_state[arc]
            distance[dst] = torch.minimum(distance[dst], row)
    ends = lattice.final_graph_score.cpu() > -torch.inf
    return int(distance[ends, num_ref].min())


def _after_word(row: Tensor, reference: Tensor, word: int, position: Tensor) -> Tensor:
    inserted = row + 1
    matched = row[:-1] + (reference != word).to(torch.int64)
    best = torch.cat([inserted[:1], torch.minimum(inserted[1:], matched)])
    # Words of the reference may be deleted after it: best[r] = min over q <= r of best[q] + r - q.
    return (best - position).cummin(0).values + position
