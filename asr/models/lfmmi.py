"""Lattice-free MMI (Povey et al. 2016) and lattice-free sMBR (Kanda et al. 2018).

MMI compares the transcript's paths with all paths of a phone language model. The numerator sums over all ways to spread
the phones of a piece over its frames, each phone near its position in an alignment. The denominator sums over all paths
of a graph of HMM states. Both are exact forward-backward passes in compiled loops; without numba the same loops run in
the interpreter.

Unlike in the paper, the numerator's paths do not have the probabilities of the phone model and of the self-loops. These
are the same for all paths with the same phones, so gradients hardly change (only the first and last phones of a piece
vary), but the loss of a piece is off by a constant, and may be negative.

State-level minimum Bayes risk (sMBR; Gibson and Hain 2006, Kingsbury 2009, Veselý et al. 2013) maximizes the expected
number of correct frames instead. The expectation is over all paths of the denominator. A frame of a path is correct to
the degree of the numerator's posterior of the column that the path reads.

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


class ExpectedAccuracy(NamedTuple):
    """What a forward-backward pass over all paths finds for each piece.

    Attributes:
        value: (N,) float64, the log sum over all paths.
        posterior: (N, T, C), its gradient: the columns' posteriors.
        accuracy: (N,) float64, the expected accuracy of a path, summed over its frames.
        gradient: (N, T, C), the gradient of `accuracy`: a column's posterior times the difference between the mean
            accuracy of the paths that read it in this frame and that of all paths.
    """

    value: Tensor
    posterior: Tensor
    accuracy: Tensor
    gradient: Tensor


class ObjectiveOfPieces(NamedTuple):
    """The objective and its parts.

    Attributes:
        loss: (N,) float32, to minimize; the only part with a gradient.
        mmi: (N,) float32, denominator minus numerator.
        accuracy: (N,) float32, the expected accuracy summed over frames, or 0 if sMBR has no weight.
        posterior: (N, T, C), the targets: the numerator's posteriors, with the teacher's share.
    """

    loss: Tensor
    mmi: Tensor
    accuracy: Tensor
    posterior: Tensor


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
    num_frames: int,
    tolerance: float,
) -> NumeratorPiece:
    """The phones that a piece may contain.

    Args:
        entry: columns of all phones of the utterance.
        loop: as `entry`.
        begin: where each phone begins, in output frames from the piece's beginning; may be negative. It ends where the
            next one begins.
        num_frames: T of the piece.
        tolerance: frames by which a phone may begin earlier and end later than the alignment says.
    """
    end = np.append(begin[1:], max(begin[-1] + 1, num_frames))
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
        smbr_weight: weight of sMBR, between 0 and 1; MMI has the rest.
        column_accuracy: (C,), what a correct frame of each column counts in sMBR; None for 1. Kanda et al. (2018) treat
            silence with special care: if its frames count, networks may learn to delete words.
        teacher_weight: share of the teacher's posteriors in the targets, where there is a teacher; see `__call__`.
    """

    def __init__(
        self,
        graph: DenominatorGraph,
        leak: float = 0.1,
        smbr_weight: float = 0.0,
        column_accuracy: npt.NDArray[np.float32] | None = None,
        teacher_weight: float = 0.5,
    ) -> None:
        self.graph = graph
        self.leak = leak
        self.smbr_weight = smbr_weight
        self.teacher_weight = teacher_weight
        self.column_accuracy = None if column_accuracy is None else torch.from_numpy(column_accuracy).float()
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
        probability, shift = _probability(score)
        posterior = torch.zeros(num_frames, num_columns, num_pieces)
        value = torch.zeros(num_pieces, dtype=torch.float64)
        loop = jit(_denominator) or _denominator
        leak = np.float32(self.leak)
        loop(probability.numpy(), self.graph, self._outgoing, leak, posterior.numpy(), value.numpy())
        return value + shift, posterior.permute(2, 0, 1)

    def expected_accuracy(self, score: Tensor, accuracy: Tensor) -> ExpectedAccuracy:
        """The denominator, and the expected accuracy over its paths.

        Args:
            score: (N, T, C) natural logs, normalized or not.
            accuracy: (N, T, C), what a path that reads a column in a frame counts there.
        """
        num_pieces, num_frames, num_columns = score.shape
        probability, shift = _probability(score)
        correct = accuracy.detach().permute(1, 2, 0).contiguous().float()
        posterior = torch.zeros(num_frames, num_columns, num_pieces)
        gradient = torch.zeros(num_frames, num_columns, num_pieces)
        totals = torch.zeros(2, num_pieces, dtype=torch.float64)
        loop = jit(_expected_accuracy) or _expected_accuracy
        loop(
            probability.numpy(), correct.numpy(), self.graph, self._outgoing, np.float32(self.leak),
            posterior.numpy(), gradient.numpy(), totals.numpy(),
        )  # fmt: skip
        return ExpectedAccuracy(totals[0] + shift, posterior.permute(2, 0, 1), totals[1], gradient.permute(2, 0, 1))

    def numerator(self, score: Tensor, pieces: Sequence[NumeratorPiece]) -> tuple[Tensor, Tensor]:
        """Like `denominator`, over the paths of each piece's own phones; -inf and gradient 0 if there is no path."""
        value = torch.zeros(len(pieces), dtype=torch.float64)
        scores = score.detach().float().contiguous()
        posterior = torch.zeros_like(scores)
        loop = jit(_numerator) or _numerator
        for row, piece in enumerate(pieces):
            value[row] = loop(scores[row].numpy(), *piece, posterior[row].numpy())
        return value, posterior

    def __call__(
        self, score: Tensor, pieces: Sequence[NumeratorPiece], teacher: Tensor | None = None
    ) -> ObjectiveOfPieces:
        """The loss of each piece, its parts, and the targets.

        The loss is (1 - smbr_weight) * (denominator - numerator) - smbr_weight * expected accuracy. The accuracies are
        constants: the gradient does not go through the numerator's posteriors that they are made of. A piece without a
        path for its phones has loss 0 and gradient 0.

        With a teacher, the numerator is `1 - teacher_weight` of what it is otherwise, and the expected score under the
        teacher's posteriors is the rest (sequence distillation; Kanda et al. 2018). The denominator minus that expected
        score is the cross-entropy between the teacher's distribution over paths and the network's, up to a constant.

        Args:
            score: (N, T, C), the network's.
            pieces: their phones.
            teacher: (N, T, C), posteriors of the columns; None for no teacher.
        """
        return ObjectiveOfPieces(*_LossOfPieces.apply(score, self, pieces, teacher))


class _LossOfPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, score: Tensor, objective: LfMmi, pieces: Sequence[NumeratorPiece], teacher: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        numerator, numerator_posterior = objective.numerator(score, pieces)
        target, target_posterior = numerator, numerator_posterior
        if teacher is not None:
            share = objective.teacher_weight
            target = (1.0 - share) * numerator + share * (teacher * score.detach()).double().sum((1, 2))
            target_posterior = (1.0 - share) * numerator_posterior + share * teacher
        weight = objective.smbr_weight
        if weight:
            counted = objective.column_accuracy
            correct = numerator_posterior if counted is None else numerator_posterior * counted
            denominator, posterior, accuracy, slope = objective.expected_accuracy(score, correct)
            gradient = (1.0 - weight) * (posterior - target_posterior) - weight * slope
        else:
            denominator, posterior = objective.denominator(score)
            accuracy = torch.zeros_like(denominator)
            gradient = posterior - target_posterior
        found = torch.isfinite(numerator) & torch.isfinite(denominator)
        nothing = torch.zeros_like(denominator)
        mmi = torch.where(found, denominator - numerator, nothing)
        accuracy = torch.where(found, accuracy, nothing)
        loss = (1.0 - weight) * torch.where(found, denominator - target, nothing) - weight * accuracy
        ctx.save_for_backward(gradient * found[:, None, None])
        loss, mmi, accuracy = loss.float(), mmi.float(), accuracy.float()
        ctx.mark_non_differentiable(mmi, accuracy, target_posterior)
        return loss, mmi, accuracy, target_posterior

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None, None], None, None, None


def _probability(score: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (N, T, C) as probabilities up to a factor for each frame, (T, C, N), and the sum of its logs, (N,)."""
    # Pieces last: the inner loops of the recursion run over them.
    shift = score.detach().amax(2, keepdim=True)
    probability = (score.detach() - shift).clamp(min=-_HIGHEST * 2).exp().permute(1, 2, 0).contiguous().float()
    return probability, shift.double().sum((1, 2))


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


def _expected_accuracy(
    probability: FloatArray,
    accuracy: FloatArray,
    graph: DenominatorGraph,
    outgoing: _OutgoingArcs,
    leak: np.float32,
    posterior: FloatArray,
    gradient: FloatArray,
    totals: npt.NDArray[np.float64],
) -> None:
    """`_denominator` with a second sum beside each sum over paths: that of probability times accuracy.

    The accuracy of a path is that of its frames so far on the way forward, and of its frames to come on the way back.
    The latter begins at minus the expected accuracy of the whole piece, so both add up to a path's difference from it.

    `accuracy` is (T, C, N), `gradient` too; `totals` is (2, N), the log sums and the expected accuracies.
    """
    value, expected = totals[0], totals[1]
    entry, loop, stay, initial = graph.entry, graph.loop, graph.stay, graph.initial
    num_frames, _, num_pieces = probability.shape
    num_states = initial.shape[0]
    forward = np.empty((num_frames + 1, num_states, num_pieces), dtype=np.float32)
    arriving = np.empty((num_frames, num_states, num_pieces), dtype=np.float32)
    forward_correct = np.empty((num_frames + 1, num_states, num_pieces), dtype=np.float32)
    arriving_correct = np.empty((num_frames, num_states, num_pieces), dtype=np.float32)
    scale = np.empty((num_frames, num_pieces), dtype=np.float32)
    total = np.empty(num_pieces, dtype=np.float32)
    total_correct = np.empty(num_pieces, dtype=np.float32)
    for state in range(num_states):
        forward[0, state, :] = initial[state]
        forward_correct[0, state, :] = 0.0
    for frame in range(num_frames):
        now, following, arrivals, frame_probability = (
            forward[frame], forward[frame + 1], arriving[frame], probability[frame],
        )  # fmt: skip
        now_correct, following_correct, arrivals_correct, frame_accuracy = (
            forward_correct[frame], forward_correct[frame + 1], arriving_correct[frame], accuracy[frame],
        )  # fmt: skip
        _weighted_sums(graph.begin, graph.source, graph.probability, now, arrivals)
        _weighted_sums(graph.begin, graph.source, graph.probability, now_correct, arrivals_correct)
        total[:] = 0.0
        total_correct[:] = 0.0
        for state in range(num_states):
            reached, first, again = following[state], frame_probability[entry[state]], frame_probability[loop[state]]
            reached_correct, gain_first, gain_again = (
                following_correct[state], frame_accuracy[entry[state]], frame_accuracy[loop[state]],
            )  # fmt: skip
            arrived, stayed, remain = arrivals[state], now[state], stay[state]
            arrived_correct, stayed_correct = arrivals_correct[state], now_correct[state]
            for piece in range(num_pieces):
                on_arrival, on_loop = first[piece], remain * again[piece]
                reached[piece] = arrived[piece] * on_arrival + stayed[piece] * on_loop
                reached_correct[piece] = (arrived_correct[piece] + gain_first[piece] * arrived[piece]) * on_arrival + (
                    stayed_correct[piece] + gain_again[piece] * stayed[piece]
                ) * on_loop
            for piece in range(num_pieces):
                total[piece] += reached[piece]
                total_correct[piece] += reached_correct[piece]
        for piece in range(num_pieces):
            total[piece] = max(total[piece], np.float32(1e-30))
            scale[frame, piece] = np.float32(1.0) / total[piece]
            total_correct[piece] *= scale[frame, piece]
            value[piece] += np.log(np.float64(total[piece]))
        for state in range(num_states):
            leaked, reached, factor = leak * initial[state], following[state], scale[frame]
            reached_correct = following_correct[state]
            for piece in range(num_pieces):
                reached[piece] = reached[piece] * factor[piece] + leaked
                reached_correct[piece] = reached_correct[piece] * factor[piece] + leaked * total_correct[piece]
    # Every state may be the last one.
    total[:] = 0.0
    total_correct[:] = 0.0
    for state in range(num_states):
        for piece in range(num_pieces):
            total[piece] += forward[num_frames, state, piece]
            total_correct[piece] += forward_correct[num_frames, state, piece]
    backward = np.empty((num_states, num_pieces), dtype=np.float32)
    entered = np.empty((num_states, num_pieces), dtype=np.float32)
    earlier = np.empty((num_states, num_pieces), dtype=np.float32)
    backward_correct = np.empty((num_states, num_pieces), dtype=np.float32)
    entered_correct = np.empty((num_states, num_pieces), dtype=np.float32)
    earlier_correct = np.empty((num_states, num_pieces), dtype=np.float32)
    for piece in range(num_pieces):
        value[piece] += np.log(np.float64(total[piece]))
        expected[piece] = total_correct[piece] / total[piece]
    for state in range(num_states):
        for piece in range(num_pieces):
            backward[state, piece] = np.float32(1.0) / total[piece]
            backward_correct[state, piece] = -np.float32(expected[piece]) / total[piece]
    for frame in range(num_frames - 1, -1, -1):
        now, arrivals, frame_probability, occupied = (
            forward[frame], arriving[frame], probability[frame], posterior[frame],
        )  # fmt: skip
        now_correct, arrivals_correct, frame_accuracy, pulled = (
            forward_correct[frame], arriving_correct[frame], accuracy[frame], gradient[frame],
        )  # fmt: skip
        total[:] = 0.0
        total_correct[:] = 0.0
        for state in range(num_states):
            behind, behind_correct, share = backward[state], backward_correct[state], initial[state]
            for piece in range(num_pieces):
                total[piece] += share * behind[piece]
                total_correct[piece] += share * behind_correct[piece]
        for piece in range(num_pieces):
            total[piece] *= leak
            total_correct[piece] *= leak
        for state in range(num_states):
            first, again, remain = frame_probability[entry[state]], frame_probability[loop[state]], stay[state]
            gain_first, gain_again = frame_accuracy[entry[state]], frame_accuracy[loop[state]]
            behind, before, factor = backward[state], entered[state], scale[frame]
            behind_correct, before_correct = backward_correct[state], entered_correct[state]
            # Backward through the leak, which passes a share of every state on to all states, and the frame's scale.
            for piece in range(num_pieces):
                path = (behind[piece] + total[piece]) * factor[piece]
                path_correct = (behind_correct[piece] + total_correct[piece]) * factor[piece]
                before[piece] = first[piece] * path
                before_correct[piece] = first[piece] * (path_correct + gain_first[piece] * path)
                behind[piece] = remain * again[piece] * path
                behind_correct[piece] = remain * again[piece] * (path_correct + gain_again[piece] * path)
            by_entry, by_loop = occupied[entry[state]], occupied[loop[state]]
            pull_entry, pull_loop = pulled[entry[state]], pulled[loop[state]]
            arrived, stayed = arrivals[state], now[state]
            arrived_correct, stayed_correct = arrivals_correct[state], now_correct[state]
            for piece in range(num_pieces):
                by_entry[piece] += before[piece] * arrived[piece]
                pull_entry[piece] += before[piece] * arrived_correct[piece] + before_correct[piece] * arrived[piece]
            for piece in range(num_pieces):
                by_loop[piece] += behind[piece] * stayed[piece]
                pull_loop[piece] += behind[piece] * stayed_correct[piece] + behind_correct[piece] * stayed[piece]
        _weighted_sums(outgoing.begin, outgoing.target, outgoing.probability, entered, earlier)
        _weighted_sums(outgoing.begin, outgoing.target, outgoing.probability, entered_correct, earlier_correct)
        for state in range(num_states):
            behind, before = backward[state], earlier[state]
            behind_correct, before_correct = backward_correct[state], earlier_correct[state]
            for piece in range(num_pieces):
                behind[piece] += before[piece]
                behind_correct[piece] += before_correct[piece]


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
