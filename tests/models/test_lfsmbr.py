"""Lattice-free sMBR against the enumeration of all paths, in value and gradient, and mutants that this must catch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from asr.graph.denominator_graph import DenominatorGraph
from asr.models import lfmmi
from asr.models.lfmmi import LfMmi
from tests.models.test_lfmmi import LEAK, enumerated_numerator, mutated, scores, tiny_graph, tiny_pieces


def enumerated_paths(score: Tensor, accuracy: Tensor, graph: DenominatorGraph, leak: float) -> tuple[Tensor, Tensor]:
    """Log probability and accuracy of every sequence of (state reached, state after the leak), (paths,) each."""
    arcs = {(int(state), int(state)): (float(graph.stay[state]), int(graph.loop[state])) for state in range(3)}
    for source, target, probability in zip(graph.source, graph.target(), graph.probability, strict=True):
        arcs[int(source), int(target)] = (float(probability), int(graph.entry[target]))
    weights, columns = [], []
    for first, *rest in itertools.product(range(graph.num_states), repeat=1 + 2 * len(score)):
        weight, state = float(graph.initial[first]), first
        path = []
        for reached, kept in zip(rest[::2], rest[1::2], strict=True):
            probability, column = arcs.get((state, reached), (0.0, 0))
            weight *= probability * (leak * float(graph.initial[kept]) + (kept == reached))
            path.append(column)
            state = kept
        if weight > 0.0:
            weights.append(weight)
            columns.append(path)
    frame, column = torch.arange(len(score)), torch.tensor(columns)
    return score[frame, column].sum(1) + score.new_tensor(weights).log(), accuracy[frame, column].sum(1)


def accuracies(num_pieces: int = 4, num_frames: int = 3, seed: int = 5) -> Tensor:
    return torch.rand(num_pieces, num_frames, 5, generator=torch.Generator().manual_seed(seed))


def ring(num_states: int = 7) -> DenominatorGraph:
    """A graph in which each state leads to the next two."""
    rng = np.random.default_rng(1)
    initial = rng.random(num_states)
    state = np.arange(num_states)
    return DenominatorGraph(
        entry=state % 5,
        loop=(state + 2) % 5,
        stay=np.full(num_states, 0.5, dtype=np.float32),
        begin=np.arange(num_states + 1) * 2,
        source=np.stack([(state - 2) % num_states, (state - 1) % num_states], axis=1).flatten(),
        probability=np.tile(np.array([0.3, 0.2], dtype=np.float32), num_states),
        initial=(initial / initial.sum()).astype(np.float32),
    )


def test_the_expected_accuracy_equals_path_enumeration_in_value_and_gradient() -> None:
    score, accuracy = scores(2), accuracies(2)
    found = LfMmi(tiny_graph(), LEAK).expected_accuracy(score, accuracy)
    exact = score.double().requires_grad_()
    paths = [enumerated_paths(row, own, tiny_graph(), LEAK) for row, own in zip(exact, accuracy.double(), strict=True)]
    expected = torch.stack([(log.softmax(0) * count).sum() for log, count in paths])
    torch.testing.assert_close(found.accuracy, expected, atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad(expected.sum(), exact, retain_graph=True)
    torch.testing.assert_close(found.gradient.double(), gradient, atol=1e-5, rtol=1e-4)
    value = torch.stack([log.logsumexp(0) for log, _ in paths])
    torch.testing.assert_close(found.value, value, atol=1e-5, rtol=1e-5)
    (posterior,) = torch.autograd.grad(value.sum(), exact)
    torch.testing.assert_close(found.posterior.double(), posterior, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_gradient_is_the_posterior_times_the_difference_from_the_mean_accuracy() -> None:
    """gamma(t, c) * (A(t, c) - A_avg), with A(t, c) as the mean over the enumerated paths that read c in frame t."""
    score, accuracy = scores(1, 2)[0], accuracies(1, 2)[0]
    found = LfMmi(tiny_graph(), LEAK).expected_accuracy(score[None], accuracy[None])
    # The accuracy's own derivative in each of its entries is the posterior, so one path's columns can be read off it.
    own = accuracy.double().requires_grad_()
    log, count = enumerated_paths(score.double(), own, tiny_graph(), LEAK)
    probability = log.softmax(0)
    reads = torch.stack([torch.autograd.grad(each, own, retain_graph=True)[0] for each in count])  # (paths, T, C)
    posterior = (probability[:, None, None] * reads).sum(0)
    mean = (probability[:, None, None] * reads * count[:, None, None]).sum(0) / posterior.clamp(min=1e-30)
    average = (probability * count).sum()
    torch.testing.assert_close(found.gradient[0].double(), (posterior * (mean - average)).detach(), atol=1e-5, rtol=0)


def test_the_gradient_equals_finite_differences_of_the_value_and_of_the_posteriors() -> None:
    """Expected accuracy is the derivative of the denominator along the accuracies, and its gradient the posteriors'."""
    score, accuracy = scores(3, 40, seed=8), accuracies(3, 40)
    objective = LfMmi(ring(), 0.1)
    found = objective.expected_accuracy(score, accuracy)
    step = 1e-2
    (more, posterior_more), (less, posterior_less) = (
        objective.denominator(score + sign * step * accuracy) for sign in (1.0, -1.0)
    )
    torch.testing.assert_close(found.accuracy, (more - less) / (2 * step), atol=2e-3, rtol=1e-4)
    slope = (posterior_more - posterior_less) / (2 * step)
    torch.testing.assert_close(found.gradient, slope, atol=1e-3, rtol=1e-3)
    assert found.gradient.abs().max() > 0.05
    direction = torch.randn(score.shape, generator=torch.Generator().manual_seed(1))
    moved = [objective.expected_accuracy(score + sign * step * direction, accuracy).accuracy for sign in (1.0, -1.0)]
    inner = (found.gradient * direction).sum((1, 2)).double()
    torch.testing.assert_close((moved[0] - moved[1]) / (2 * step), inner, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("weight", [0.7, 1.0])
@pytest.mark.parametrize("silence", [1.0, 0.25])
def test_the_loss_weighs_mmi_and_expected_accuracy_and_its_gradient_is_theirs(weight: float, silence: float) -> None:
    counts = np.array([silence, 1.0, 1.0, 1.0, 1.0], dtype=np.float32)
    score, pieces = scores(2).requires_grad_(), tiny_pieces()[:2]
    parts = LfMmi(tiny_graph(), LEAK, weight, counts)(score, pieces)
    exact = score.detach().double().requires_grad_()
    numerators = torch.stack([enumerated_numerator(row, each) for row, each in zip(exact, pieces, strict=True)])
    (posterior,) = torch.autograd.grad(numerators.sum(), exact, retain_graph=True)
    paths = [
        enumerated_paths(row, own, tiny_graph(), LEAK)
        for row, own in zip(exact, posterior * torch.from_numpy(counts), strict=True)
    ]
    mmi = torch.stack([log.logsumexp(0) for log, _ in paths]) - numerators
    accuracy = torch.stack([(log.softmax(0) * count).sum() for log, count in paths])
    expected = (1.0 - weight) * mmi - weight * accuracy
    for found, wanted in ((parts.loss, expected), (parts.mmi, mmi), (parts.accuracy, accuracy)):
        torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)
    factor = torch.tensor([1.0, 3.0])
    (gradient,) = torch.autograd.grad((parts.loss * factor).sum(), score)
    (exact_gradient,) = torch.autograd.grad((expected * factor).sum(), exact)
    torch.testing.assert_close(gradient.double(), exact_gradient, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(parts.posterior.double(), posterior, atol=1e-5, rtol=1e-4)


def test_without_weight_loss_and_gradient_are_those_of_mmi_bit_for_bit() -> None:
    objective = LfMmi(tiny_graph(), LEAK)
    score = scores().requires_grad_()
    loss, _, _, posterior = LfMmi(tiny_graph(), LEAK, 0.0, np.zeros(5, dtype=np.float32))(score, tiny_pieces())
    (gradient,) = torch.autograd.grad(loss.sum(), score)
    numerator, numerator_posterior = objective.numerator(score, tiny_pieces())
    denominator, denominator_posterior = objective.denominator(score)
    assert torch.equal(loss, (denominator - numerator).float())
    assert torch.equal(gradient, denominator_posterior - numerator_posterior)
    assert torch.equal(posterior, numerator_posterior)


def test_the_denominator_beside_the_accuracy_is_the_denominator() -> None:
    score = scores(3, 50)
    value, posterior = LfMmi(ring(), 0.1).denominator(score)
    found = LfMmi(ring(), 0.1).expected_accuracy(score, accuracies(3, 50))
    torch.testing.assert_close(found.value, value, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found.posterior, posterior, atol=1e-6, rtol=1e-5)


def test_a_batch_gives_what_each_piece_alone_gives() -> None:
    score = scores()
    objective = LfMmi(tiny_graph(), LEAK, 0.8)
    together = score.clone().requires_grad_()
    loss, *_ = objective(together, tiny_pieces())
    (gradient,) = torch.autograd.grad(loss.sum(), together)
    for row, piece in enumerate(tiny_pieces()):
        alone = score[row : row + 1].clone().requires_grad_()
        own, *_ = objective(alone, [piece])
        torch.testing.assert_close(own[0], loss[row], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(own.sum(), alone)[0][0], gradient[row], atol=1e-6, rtol=1e-5)


def test_frames_in_which_nothing_counts_add_nothing_to_the_accuracy() -> None:
    """Without leak, frames that all paths spend in one column, before and after, change neither value nor gradient."""
    graph = DenominatorGraph(
        entry=np.array([0, 1, 3, 0]),
        loop=np.array([0, 2, 4, 0]),
        stay=np.array([0.5, 0.5, 0.5, 1.0], dtype=np.float32),
        begin=np.array([0, 0, 2, 4, 6]),
        source=np.array([0, 2, 0, 1, 1, 2]),
        probability=np.array([0.3, 0.3, 0.2, 0.2, 0.3, 0.2], dtype=np.float32),
        initial=np.array([1.0, 0.0, 0.0, 0.0], dtype=np.float32),
    )
    score, accuracy = scores(1, 4), accuracies(1, 4)
    score[:, :, 0] = -1e4
    padding = torch.full((1, 3, 5), -1e4)
    padding[:, :, 0] = 0.0
    objective = LfMmi(graph, 0.0)
    # Scores of a frame count relative to its best one: the padding's others are cut off at -60.
    alone = objective.expected_accuracy(
        torch.cat([score, padding[:, :1]], 1), torch.cat([accuracy, 0 * padding[:, :1]], 1)
    )
    padded = objective.expected_accuracy(
        torch.cat([padding, score, padding], 1), torch.cat([0 * padding, accuracy, 0 * padding], 1)
    )
    torch.testing.assert_close(padded.accuracy, alone.accuracy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded.gradient[:, 3:7], alone.gradient[:, :4], atol=1e-5, rtol=1e-4)
    assert padded.gradient[:, :3].abs().max() < 1e-5 and padded.gradient[:, 7:].abs().max() < 1e-5
    assert 0.5 < float(alone.accuracy) < 4.0


def test_an_accuracy_that_all_columns_share_pulls_at_nothing() -> None:
    found = LfMmi(ring(), 0.1).expected_accuracy(scores(2, 100), torch.full((2, 100, 5), 0.75))
    torch.testing.assert_close(found.accuracy, torch.full((2,), 75.0, dtype=torch.float64), atol=1e-3, rtol=1e-5)
    assert found.gradient.abs().max() < 1e-4


def test_long_pieces_with_extreme_scores_stay_finite() -> None:
    found = LfMmi(tiny_graph(), 0.1).expected_accuracy(30.0 * scores(2, 300), accuracies(2, 300))
    assert torch.isfinite(found.accuracy).all() and torch.isfinite(found.gradient).all()
    assert (found.accuracy > 0.0).all() and (found.accuracy < 300.0).all()
    assert found.gradient.sum(2).abs().max() < 1e-2


def test_a_piece_whose_scores_are_no_numbers_counts_nothing() -> None:
    score = scores()
    whole = LfMmi(tiny_graph(), LEAK, 0.5)(score, tiny_pieces())
    score[1, 1, 2] = torch.nan
    parts = LfMmi(tiny_graph(), LEAK, 0.5)(score, tiny_pieces())
    for value, before in ((parts.loss, whole.loss), (parts.mmi, whole.mmi), (parts.accuracy, whole.accuracy)):
        assert float(value[1]) == 0.0
        torch.testing.assert_close(value[[0, 2, 3]], before[[0, 2, 3]])


def test_steps_along_the_gradient_raise_the_expected_accuracy() -> None:
    objective = LfMmi(tiny_graph(), LEAK, 1.0)
    score = scores(1, 3)
    seen = []
    for _ in range(30):
        score = score.detach().requires_grad_()
        parts = objective(score, tiny_pieces()[:1])
        seen.append(float(parts.accuracy))
        (gradient,) = torch.autograd.grad(parts.loss.sum(), score)
        score = score - 2.0 * gradient
    assert seen[-1] > seen[0] + 0.3 and seen[-1] > 0.9 * 3


MUTANTS = {
    "the leak passes no accuracy on": ("+ leaked * total_correct[piece]", "+ 0.0 * total_correct[piece]"),
    "the accuracy is not scaled with its probability": (
        "total_correct[piece] *= scale[frame, piece]",
        "total_correct[piece] *= 1.0",
    ),
    "arrivals gain what loops gain": (
        "arrived_correct[piece] + gain_first[piece] * arrived[piece]",
        "arrived_correct[piece] + gain_again[piece] * arrived[piece]",
    ),
    "loops gain nothing": ("stayed_correct[piece] + gain_again[piece] * stayed[piece]", "stayed_correct[piece]"),
    "the accuracy so far is forgotten": (
        "pull_entry[piece] += before[piece] * arrived_correct[piece] +",
        "pull_entry[piece] +=",
    ),
    "the mean accuracy is not subtracted": ("-np.float32(expected[piece]) / total[piece]", "np.float32(0.0)"),
    "no accuracy through the leak on the way back": ("total_correct[piece] *= leak", "total_correct[piece] *= 0.0"),
    "this frame's accuracy is missing on the way back": (
        "first[piece] * (path_correct + gain_first[piece] * path)",
        "first[piece] * path_correct",
    ),
    "the accuracy to come forgets the loop": (
        "behind_correct[piece] += before_correct[piece]",
        "behind_correct[piece] = before_correct[piece]",
    ),
    "accuracies travel along the wrong arcs": (
        "_weighted_sums(outgoing.begin, outgoing.target, outgoing.probability, entered_correct",
        "_weighted_sums(graph.begin, graph.source, graph.probability, entered_correct",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", MUTANTS.values(), ids=[*MUTANTS])
def test_the_enumeration_catches_a_mutant(change: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lfmmi, "_expected_accuracy", mutated("_expected_accuracy", change))
    interpreted: Callable[..., None] = lambda function: None  # noqa: E731
    monkeypatch.setattr(lfmmi, "jit", interpreted)
    with pytest.raises(AssertionError):
        test_the_expected_accuracy_equals_path_enumeration_in_value_and_gradient()
