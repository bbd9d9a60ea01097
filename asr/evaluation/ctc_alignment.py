"""Which frame belongs to which phone of a known transcript: the best path through a CTC model of it.

Shapes: T frames, C tokens, L phones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asr.text.tokens import BLANK_ID


def align_ctc(log_prob: NDArray[np.float32], token_id: Sequence[int]) -> NDArray[np.int64] | None:
    """The phone that each frame reads on the best path.

    Args:
        log_prob: (T, C) natural logs.
        token_id: the tokens of the L phones in order; equal neighbours are parted by a blank.

    Returns:
        (T,) positions in `token_id`, -1 where a blank is read; None where the frames are too few for the phones.
    """
    labels = np.full(2 * len(token_id) + 1, BLANK_ID, dtype=np.int64)
    labels[1::2] = token_id
    may_skip = np.zeros(len(labels), dtype=bool)
    may_skip[3::2] = labels[3::2] != labels[1:-2:2]
    score = np.full(len(labels), -np.inf)
    score[0] = 0.0
    emission = log_prob[:, labels]
    came_from = np.zeros(emission.shape, dtype=np.int8)
    for frame, row in enumerate(emission):
        ways = np.full((3, len(labels)), -np.inf)
        ways[0] = score
        if frame == 0:
            ways[1, 1:2] = score[:1]  # before the first frame nothing was read: either blank or phone may come
        else:
            ways[1, 1:] = score[:-1]
            ways[2, 2:] = np.where(may_skip[2:], score[:-2], -np.inf)
        came_from[frame] = ways.argmax(0)
        score = ways.max(0) + row
    position = len(labels) - 1
    if len(labels) > 1 and score[-2] > score[-1]:
        position -= 1
    if score[position] == -np.inf:
        return None
    path = np.empty(len(log_prob), dtype=np.int64)
    for frame in range(len(log_prob) - 1, -1, -1):
        path[frame] = position // 2 if position % 2 else -1
        position -= came_from[frame, position]
    return path
