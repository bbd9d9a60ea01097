"""Alignments of phones: from a CTC network, and by a Viterbi search with optional silence.

The search takes frame scores of phones from any network, and finds the best pronunciation of each word of a transcript,
with or without silence between words.

Shapes: T frames, C phones (0 is silence), S states of an utterance's graph, E edges between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asr.graph.fst import offsets
from asr.kernels.jit import jit
from asr.models.alignment import align_ctc

_RADIUS_SECONDS = 0.12


class TranscriptGraph(NamedTuple):
    """States of a transcript in an order in which all edges but self-loops lead forward.

    Attributes:
        phone: (S,) int64.
        edge_begin: (S + 1,) int64; the predecessors of state s are `source[edge_begin[s] : edge_begin[s + 1]]`; each
            state follows itself, too.
        source: (E,) int64; -1 is the beginning.
        is_final: (S,) bool.
    """

    phone: npt.NDArray[np.int64]
    edge_begin: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    is_final: npt.NDArray[np.bool_]


def phones_from_ctc(
    log_prob: Tensor, tokens: Sequence[int], frame_seconds: float, num_seconds: float
) -> tuple[list[int], list[float], float] | None:
    """A first alignment from a CTC network, which outputs a phone in one or two frames.

    A phone ends halfway to its neighbor's middle, but no further than 0.12 s from its own; the rest is silence.

    Args:
        log_prob: (T, C), blank at 0.
        tokens: the transcript, columns of `log_prob`.
        frame_seconds: seconds from one frame to the next.
        num_seconds: length of the utterance.

    Returns:
        tokens with 0 for silence, the seconds at which they begin, and the mean score per frame; None if there are too
        few frames.
    """
    target = torch.tensor([list(tokens)])
    position, found = align_ctc(log_prob[None], torch.tensor([len(log_prob)]), target, torch.tensor([len(tokens)]))
    if not bool(found[0]):
        return None
    path = position[0]
    column = torch.where(path >= 0, target[0][path.clamp(min=0)], torch.zeros_like(path))
    score = float(log_prob.gather(1, column[:, None]).mean())
    frame = torch.arange(len(path))[path >= 0].numpy()
    count = np.bincount(path[path >= 0].numpy(), minlength=len(tokens))
    middle = np.bincount(path[path >= 0].numpy(), weights=(frame + 0.5) * frame_seconds, minlength=len(tokens)) / count
    begin = middle - _RADIUS_SECONDS
    end = middle + _RADIUS_SECONDS
    halfway = (middle[1:] + middle[:-1]) / 2
    begin[1:] = np.maximum(begin[1:], halfway)
    end[:-1] = np.minimum(end[:-1], halfway)
    phones: list[int] = []
    seconds: list[float] = []
    now = 0.0
    for token, first, last in zip(tokens, begin, end, strict=True):
        if first > now + 1e-6:
            phones.append(0)
            seconds.append(now)
        phones.append(token)
        seconds.append(max(0.0, float(first)))
        now = float(last)
    if now < num_seconds:
        phones.append(0)
        seconds.append(now)
    return phones, seconds, score


def transcript_graph(words: Sequence[Sequence[Sequence[int]]]) -> TranscriptGraph:
    """The graph of a transcript: each word has one of its pronunciations, and silence between words is optional.

    Args:
        words: for each word its pronunciations, each a sequence of phones from 1 on.
    """
    phone: list[int] = [0]
    sources: list[list[int]] = [[-1]]
    ends = [-1, 0]
    for variants in words:
        last = []
        for variant in variants:
            for position, each in enumerate(variant):
                sources.append(list(ends) if position == 0 else [len(phone) - 1])
                phone.append(each)
            last.append(len(phone) - 1)
        sources.append(last)
        phone.append(0)
        ends = [*last, len(phone) - 1]
    is_final = np.zeros(len(phone), dtype=np.bool_)
    is_final[[end for end in ends if end >= 0]] = True
    flat = np.array([source for each in sources for source in each], dtype=np.int64)
    begin = offsets([len(each) for each in sources])
    return TranscriptGraph(np.array(phone, dtype=np.int64), begin, flat, is_final)


def align_transcript(
    graph: TranscriptGraph, frame_score: npt.NDArray[np.float32]
) -> tuple[list[int], list[int], float] | None:
    """The best path: phones, the frame at which each begins, and the mean score per frame.

    Args:
        graph: of the transcript.
        frame_score: (T, C) natural logs.

    Returns:
        None if there are too few frames.
    """
    path = np.empty(len(frame_score), dtype=np.int64)
    loop = jit(_viterbi) or _viterbi
    score = loop(*graph, np.ascontiguousarray(frame_score), path)
    if not np.isfinite(score):
        return None
    begins = np.flatnonzero(np.diff(path, prepend=-1))
    return graph.phone[path[begins]].tolist(), begins.tolist(), float(score) / len(path)


def _viterbi(
    phone: npt.NDArray[np.int64],
    edge_begin: npt.NDArray[np.int64],
    source: npt.NDArray[np.int64],
    is_final: npt.NDArray[np.bool_],
    frame_score: npt.NDArray[np.float32],
    path: npt.NDArray[np.int64],
) -> float:
    """Fills `path` (T,) with the best state of each frame; returns the score, -inf if there is no path."""
    num_frames, num_states = frame_score.shape[0], phone.shape[0]
    came_from = np.full((num_frames, num_states), -1, dtype=np.int32)
    score = np.full(num_states, -np.inf)
    following = np.full(num_states, -np.inf)
    for state in range(num_states):
        for edge in range(edge_begin[state], edge_begin[state + 1]):
            if source[edge] < 0:
                score[state] = frame_score[0, phone[state]]
    for frame in range(1, num_frames):
        for state in range(num_states):
            best, before = score[state], state
            for edge in range(edge_begin[state], edge_begin[state + 1]):
                if source[edge] >= 0 and score[source[edge]] > best:
                    best, before = score[source[edge]], source[edge]
            following[state] = best + frame_score[frame, phone[state]]
            came_from[frame, state] = before
        score, following = following, score
    best, state = -np.inf, -1
    for last in range(num_states):
        if is_final[last] and score[last] > best:
            best, state = score[last], last
    if state < 0:
        return -np.inf
    for frame in range(num_frames - 1, -1, -1):
        path[frame] = state
        state = came_from[frame, state]
    return float(best)
