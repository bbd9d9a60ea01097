"""Lattice-free MMI (Povey et al. 2016): the transcript's paths against all paths of a phone language model.

The numerator sums over all ways to spread the phones of a piece over its frames, each phone near its position in an
alignment. The denominator sums over all paths of a graph of HMM states. Both are exact forward-backward passes in
compiled loops; without numba the same loops run in the interpreter.

Shapes: N pieces of equal length, T frames, C columns, S states, A arcs, P phones of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asr.graph.denominator_graph import DenominatorGraph, FloatArray
from asr.kernels.jit import jit

_HIGHEST = 30.0


class _OutgoingArcs(NamedTuple):
    """The arcs of a denominator graph sorted by source state, for the backward pass.

    Attributes:
        begin: (S + 1,) int64; the arcs from state s are `begin[s] : begin[s + 1]`.
        target: (A,) int64, the state that an arc leads to.
        probability: (A,) float32.
    """

    begin: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    probability: FloatArray


class NumeratorPiece(NamedTuple):
    """The phones of one piece; all frames are output frames from the piece's beginning.

    Attributes:
        entry: (P,) int64, the column of the first frame of a phone.
        loop: (P,) int64, the column of its other frames.
        earliest: (P,) int64, the first frame that the phone may have.
        latest: (P,) int64, one after the last frame that it may have.
        has_begun: (P,) bool, whether the phone may already be spoken when the piece begins.
        may_end: (P,) bool, whether it may be the last phone of the piece.
    """

    entry: npt.NDArray[np.int64]
    loop: npt.NDArray[np.int64]
    earliest: npt.NDArray[np.int64]
    latest: npt.NDArray[np.int64]
    has_begun: npt.NDArray[np.bool_]
    may_end: npt.NDArray[np.bool_]


def numerator_piece(
    entry: npt.NDArray[np.int64],
    loop: npt.NDArray[np.int64],
    begin: npt.NDArray[np.float64],
    end: npt.NDArray[np.float64],
    num_frames: int,
    tolerance: float,
) -> NumeratorPiece:
    """The phones that a piece may contain.

    Args:
        entry: columns of all phones of the utterance.
        loop: as `entry`.
        begin: where each phone begins, in output frames from the piece's beginning; may be negative.
        end: where it ends.
        num_frames: T of the piece.
        tolerance: frames by which a phone may begin earlier and end later than the alignment says.
    """
    earliest = np.floor(begin - tolerance + 0.5).astype(np.int64)
    latest = np.maximum(np.ceil(end + tolerance - 0.5).astype(np.int64), earliest + 1)
    inside = np.flatnonzero((latest > 0) & (earliest < num_frames))
    earliest, latest = earliest[inside], latest[inside]
    # The state before the first frame is a phone that may have been spoken in frame -1. The utterance's first phone
    # may also just be about to begin, which the entry from the state before it allows (see `_numerator`).
    has_begun = earliest < 0
    may_end = latest >= num_frames
    if not may_end.any():
        may_end[-1] = True
        latest[-1] = num_frames
    return NumeratorPiece(entry[inside], loop[inside], earliest, latest, has_begun, may_end)


class LfMmi:
    """The objective of a batch of pieces of equal length.

    Args:
        graph: the denominator.
        leak: probability, in each frame, of a jump to a state drawn from `graph.initial` (the leaky HMM).
    """

    def __init__(self, graph: DenominatorGraph, leak: float = 0.1) -> None:
        self.graph = graph
        self.leak = leak
        order = np.argsort(graph.source, kind="stable")
        self._outgoing = _OutgoingArcs(
            np.searchsorted(graph.source[order], np.arange(graph.num_states + 1)).astype(np.int64),
            graph.target()[order].astype(np.int64),
            graph.probability[order],
        )

    def denominator(self, score: Tensor) -> tuple[Tensor, Tensor]:
        """The log sum over all paths, (N,) float64, and its gradient (N, T, C), the columns' posteriors.

        Args:
            score: (N, T, C) natural logs, normalized or not.
        """
        num_pieces, num_frames, num_columns = score.shape
        # Pieces last: the inner loops of the recursion run over them.
        shift = score.detach().amax(2, keepdim=True)
        probability = (score.detach() - shift).clamp(min=-_HIGHEST * 2).exp().permute(1, 2, 0).contiguous().float()
        posterior = torch.zeros(num_frames, num_columns, num_pieces)
        value = torch.zeros(num_pieces, dtype=torch.float64)
        loop = jit(_denominator) or _denominator
        leak = np.float32(self.leak)
        loop(probability.numpy(), self.graph, self._outgoing, leak, posterior.numpy(), value.numpy())
        return value + shift.double().sum((1, 2)), posterior.permute(2, 0, 1)

    def numerator(self, score: Tensor, pieces: Sequence[NumeratorPiece]) -> tuple[Tensor, Tensor]:
        """Like `denominator`, over the paths of each piece's own phones; -inf and gradient 0 if there is no path."""
        value = torch.zeros(len(pieces), dtype=torch.float64)
        scores = score.detach().float().contiguous()
        posterior = torch.zeros_like(scores)
        loop = jit(_numerator) or _numerator
        for row, piece in enumerate(pieces):
            value[row] = loop(scores[row].numpy(), *piece, posterior[row].numpy())
        return value, posterior

    def __call__(self, score: Tensor, pieces: Sequence[NumeratorPiece]) -> tuple[Tensor, Tensor]:
        """The loss of each piece, denominator minus numerator, (N,) float32, and the numerator's posteriors (N, T, C).

        A piece without a path for its phones has loss 0 and gradient 0.

        Args:
            score: (N, T, C), the network's.
            pieces: their phones.
        """
        loss: Tensor
        loss, posterior = _LossOfPieces.apply(score, self, pieces)
        return loss, posterior


class _LossOfPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score: Tensor, objective: LfMmi, pieces: Sequence[NumeratorPiece]) -> tuple[Tensor, Tensor]:
        numerator, numerator_posterior = objective.numerator(score, pieces)
        denominator, denominator_posterior = objective.denominator(score)
        found = torch.isfinite(numerator) & torch.isfinite(denominator)
        gradient = (denominator_posterior - numerator_posterior) * found[:, None, None]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(numerator_posterior)
        loss = torch.where(found, denominator - numerator, torch.zeros_like(denominator))
        return loss.float(), numerator_posterior

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None, None], None, None


def _denominator(
    probability: FloatArray,
    graph: DenominatorGraph,
    outgoing: _OutgoingArcs,
    leak: np.float32,
    posterior: FloatArray,
    value: npt.NDArray[np.float64],
) -> None:
    """Forward-backward over (T, C, N) probabilities; fills posterior (T, C, N) and value (N,).

    Forward probabilities are scaled to sum to 1 in each frame before the leak, so that float32 suffices.
    """
    entry, loop, stay, initial = graph.entry, graph.loop, graph.stay, graph.initial
    num_frames, _, num_pieces = probability.shape
    num_states = initial.shape[0]
    forward = np.empty((num_frames + 1, num_states, num_pieces), dtype=np.float32)
    arriving = np.empty((num_frames, num_states, num_pieces), dtype=np.float32)
    scale = np.empty((num_frames, num_pieces), dtype=np.float32)
    total = np.empty(num_pieces, dtype=np.float32)
    for state in range(num_states):
        forward[0, state, :] = initial[state]
    for frame in range(num_frames):
        now, following, arrivals, frame_probability = (
            forward[frame], forward[frame + 1], arriving[frame], probability[frame],
        )  # fmt: skip
        _weighted_sums(graph.begin, graph.source, graph.probability, now, arrivals)
        total[:] = 0.0
        for state in range(num_states):
            reached, first, again = following[state], frame_probability[entry[state]], frame_probability[loop[state]]
            arrived, stayed, remain = arrivals[state], now[state], stay[state]
            for piece in range(num_pieces):
                reached[piece] = arrived[piece] * first[piece] + remain * stayed[piece] * again[piece]
            for piece in range(num_pieces):
                total[piece] += reached[piece]
        for piece in range(num_pieces):
            total[piece] = max(total[piece], np.float32(1e-30))
            scale[frame, piece] = np.float32(1.0) / total[piece]
            value[piece] += np.log(np.float64(total[piece]))
        for state in range(num_states):
            leaked, reached, factor = leak * initial[state], following[state], scale[frame]
            for piece in range(num_pieces):
                reached[piece] = reached[piece] * factor[piece] + leaked
    # Every state may be the last one.
    total[:] = 0.0
    for state in range(num_states):
        for piece in range(num_pieces):
            total[piece] += forward[num_frames, state, piece]
    backward = np.empty((num_states, num_pieces), dtype=np.float32)
    entered = np.empty((num_states, num_pieces), dtype=np.float32)
    earlier = np.empty((num_states, num_pieces), dtype=np.float32)
    for piece in range(num_pieces):
        value[piece] += np.log(np.float64(total[piece]))
    for state in range(num_states):
        for piece in range(num_pieces):
            backward[state, piece] = np.float32(1.0) / total[piece]
    for frame in range(num_frames - 1, -1, -1):
        now, arrivals, frame_probability, occupied = (
            forward[frame], arriving[frame], probability[frame], posterior[frame],
        )  # fmt: skip
        total[:] = 0.0
        for state in range(num_states):
            behind, share = backward[state], initial[state]
            for piece in range(num_pieces):
                total[piece] += share * behind[piece]
        for piece in range(num_pieces):
            total[piece] *= leak
        for state in range(num_states):
            first, again, remain = frame_probability[entry[state]], frame_probability[loop[state]], stay[state]
            behind, before, factor = backward[state], entered[state], scale[frame]
            # Backward through the leak, which passes a share of every state on to all states, and the frame's scale.
            for piece in range(num_pieces):
                path = (behind[piece] + total[piece]) * factor[piece]
                before[piece] = first[piece] * path
                behind[piece] = remain * again[piece] * path
            by_entry, by_loop = occupied[entry[state]], occupied[loop[state]]
            arrived, stayed = arrivals[state], now[state]
            for piece in range(num_pieces):
                by_entry[piece] += before[piece] * arrived[piece]
            for piece in range(num_pieces):
                by_loop[piece] += behind[piece] * stayed[piece]
        _weighted_sums(outgoing.begin, outgoing.target, outgoing.probability, entered, earlier)
        for state in range(num_states):
            behind, before = backward[state], earlier[state]
            for piece in range(num_pieces):
                behind[piece] += before[piece]


def _weighted_sums(
    begin: npt.NDArray[np.int64],
    source: npt.NDArray[np.int64],
    weight: FloatArray,
    values: FloatArray,
    sums: FloatArray,
) -> None:
    """sums[s] = sum over arcs a in begin[s] : begin[s + 1] of weight[a] * values[source[a]]; both (S, N)."""
    num_pieces = values.shape[1]
    for state in range(len(begin) - 1):
        row = sums[state]
        row[:] = 0.0
        for arc in range(begin[state], begin[state + 1]):
            factor = weight[arc]
            other = values[source[arc]]
            for piece in range(num_pieces):
                row[piece] += factor * other[piece]


def _numerator(
    score: FloatArray,
    entry: npt.NDArray[np.int64],
    loop: npt.NDArray[np.int64],
    earliest: npt.NDArray[np.int64],
    latest: npt.NDArray[np.int64],
    has_begun: npt.NDArray[np.bool_],
    may_end: npt.NDArray[np.bool_],
    posterior: FloatArray,
) -> float:
    """Forward-backward of one piece in logs; fills posterior (T, C) and returns the log sum, -inf without a path."""
    num_frames, num_phones = score.shape[0], entry.shape[0]
    forward = np.full((num_frames, num_phones), -np.inf)
    for frame in range(num_frames):
        for phone in range(num_phones):
            if not earliest[phone] <= frame < latest[phone]:
                continue
            if frame == 0:
                stays = 0.0 if has_begun[phone] else -np.inf
                enters = 0.0 if phone == 0 or has_begun[phone - 1] else -np.inf
            else:
                stays = forward[frame - 1, phone]
                enters = forward[frame - 1, phone - 1] if phone > 0 else -np.inf
            forward[frame, phone] = _log_add(stays + score[frame, loop[phone]], enters + score[frame, entry[phone]])
    total = -np.inf
    for phone in range(num_phones):
        if may_end[phone]:
            total = _log_add(total, forward[num_frames - 1, phone])
    if total == -np.inf:
        return total
    backward = np.full(num_phones, -np.inf)
    for phone in range(num_phones):
        if may_end[phone]:
            backward[phone] = 0.0
    for frame in range(num_frames - 1, -1, -1):
        for phone in range(num_phones):
            if not earliest[phone] <= frame < latest[phone]:
                backward[phone] = -np.inf
                continue
            if frame == 0:
                stays = 0.0 if has_begun[phone] else -np.inf
                enters = 0.0 if phone == 0 or has_begun[phone - 1] else -np.inf
            else:
                stays = forward[frame - 1, phone]
                enters = forward[frame - 1, phone - 1] if phone > 0 else -np.inf
            behind = backward[phone] - total
            posterior[frame, loop[phone]] += np.exp(stays + score[frame, loop[phone]] + behind)
            posterior[frame, entry[phone]] += np.exp(enters + score[frame, entry[phone]] + behind)
        # In ascending order, so that phone + 1 still has its value for the frame after this one.
        for phone in range(num_phones):
            stays = backward[phone] + score[frame, loop[phone]]
            moves = -np.inf
            if phone + 1 < num_phones:
                moves = backward[phone + 1] + score[frame, entry[phone + 1]]
            backward[phone] = _log_add(stays, moves)
    return total


def _log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    if a < b:
        a, b = b, a
    if b == -np.inf:
        return a
    return a + np.log1p(np.exp(b - a))
