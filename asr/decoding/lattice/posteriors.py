"""How sure a lattice is of its arcs and of the words of a hypothesis.

Shapes: S states, A arcs.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from asr.decoding.first_pass import Hypothesis
from asr.decoding.lattice.lattice import Lattice
from asr.decoding.options import DecodingOptions


def arc_posteriors(lattice: Lattice, options: DecodingOptions, scale: float = 1.0) -> Tensor:
    """The share that the paths through each arc have in the sum over all paths of its utterance, (A,) float64.

    Args:
        lattice: one or several utterances.
        options: scales of the parts of a score.
        scale: of the whole score; below 1 evens out the overconfidence of frame-wise scores.
    """
    arc_total, final_total = scale * lattice.arc_total(options), scale * lattice.final_total(options)
    src_state, begin = lattice.src_state(), lattice.arc_frame_begin()
    frames = list(itertools.pairwise(begin))
    forward = torch.full_like(final_total, -torch.inf)
    forward[lattice.start_state] = 0.0
    for first, last in frames:
        dst_state = lattice.dst_state[first:last]
        _add_in_logs(forward, dst_state, forward[src_state[first:last]] + arc_total[first:last])
    backward = final_total.clone()
    for first, last in reversed(frames):
        dst_state = lattice.dst_state[first:last]
        _add_in_logs(backward, src_state[first:last], backward[dst_state] + arc_total[first:last])
    total = backward[lattice.start_state][lattice.utt_idx[src_state]]
    return (forward[src_state] + arc_total + backward[lattice.dst_state] - total).exp()


def _add_in_logs(score: Tensor, state: Tensor, added: Tensor) -> None:
    """score[state] = log(exp(score[state]) + sum of exp(added)), in place."""
    best = score.clone().scatter_reduce_(0, state, added, "amax", include_self=True)
    shift = torch.where(best > -torch.inf, best, torch.zeros_like(best))
    total = (score - shift).exp().scatter_add_(0, state, (added - shift[state]).exp())
    touched = torch.unique(state)
    score[touched] = total[touched].log() + shift[touched]


def with_confidences(
    hypothesis: Hypothesis,
    lattice: Lattice,
    options: DecodingOptions,
    scale: float = 1.0,
    num_frames_apart: int = 5,
    original_frame: Tensor | None = None,
) -> Hypothesis:
    """The hypothesis with each word's confidence: the share of all paths that have the word at about its time.

    Args:
        hypothesis: one of the lattice's.
        lattice: of one utterance.
        options, scale: as of `arc_posteriors`.
        num_frames_apart: paths whose word begins at most so many frames earlier or later agree.
        original_frame: (T,) int64, where frames were left out what each of the lattice's was before, as the hypothesis
            tells them.
    """
    posterior = arc_posteriors(lattice, options, scale)
    owner = torch.repeat_interleave(lattice.num_words())
    word_posterior = posterior[owner]
    frame = lattice.frame[lattice.src_state()[owner]]
    if original_frame is not None:
        frame = original_frame.to(frame.device)[frame]
    confidences = []
    for word_id, start_frame in zip(hypothesis.word_ids, hypothesis.start_frames, strict=True):
        agrees = (lattice.word_id == word_id) & ((frame - start_frame).abs() <= num_frames_apart)
        confidences.append(min(1.0, float(word_posterior[agrees].sum())))
    return replace(hypothesis, confidences=tuple(confidences))
