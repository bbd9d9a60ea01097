"""Lattices that are made by hand or at random, without a search."""

from __future__ import annotations

import math
import random

import torch

from asr.decoding.lattice import Lattice


def small_lattice(
    frame: list[int], arcs: list[tuple[int, int, list[int], float]], final: list[float] | None = None
) -> Lattice:
    """Arcs are (source, destination, words, score), sorted; without `final`, paths may end in the last state alone."""
    if final is None:
        final = [-math.inf] * (len(frame) - 1) + [0.0]
    src, dst, words, score = zip(*arcs, strict=True) if arcs else ((), (), (), ())
    return Lattice(
        frame=torch.tensor(frame),
        utt_idx=torch.zeros(len(frame), dtype=torch.int64),
        start_state=torch.tensor([0]),
        arc_begin=torch.tensor([sum(one < state for one in src) for state in range(len(frame) + 1)]),
        dst_state=torch.tensor(dst, dtype=torch.int64),
        graph_arc=torch.arange(len(arcs)),
        token_id=torch.ones(len(arcs), dtype=torch.int32),
        am_score=torch.tensor(score),
        graph_score=torch.zeros(len(arcs)),
        lm_score=torch.zeros(len(arcs)),
        word_begin=torch.tensor([0, *map(len, words)]).cumsum(0),
        word_id=torch.tensor([word for each in words for word in each], dtype=torch.int64),
        final_graph_score=torch.tensor(final),
        final_lm_score=torch.zeros(len(frame)),
    )


def lattice_of_all_sorts(seed: int, num_frames: int = 5) -> Lattice:
    """Few words and whole scores: many ties, ways to say a sentence, and prefixes that go on alike.

    Arcs have up to three words, many none; any state may be an end, also the start; some are unreachable or dead ends.
    """
    generator = random.Random(seed)
    frame = [0, *sorted(frame for frame in range(1, num_frames + 1) for _ in range(generator.randint(1, 4)))]
    arcs = []
    for state, own in enumerate(frame):
        following = [other for other, later in enumerate(frame) if later == own + 1]
        for other in [other for other in following for _ in range(generator.choice((0, 1, 1, 2)))]:
            words = [generator.choice((4, 5)) for _ in range(generator.choice((0, 0, 0, 1, 1, 1, 2, 3)))]
            arcs.append((state, other, words, -float(generator.randrange(4))))
    return small_lattice(frame, arcs, [generator.choice((-math.inf, -math.inf, -1.0, 0.0)) for _ in frame])
