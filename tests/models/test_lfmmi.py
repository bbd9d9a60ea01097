"""Lattice-free MMI against the enumeration of all paths, in value and gradient, and mutants that this must catch."""

from __future__ import annotations

import inspect
import itertools
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.graph.denominator_graph import DenominatorGraph
from asr.models import lfmmi
from asr.models.lfmmi import LfMmi, NumeratorPiece, numerator_piece

LEAK = 0.3


def tiny_graph() -> DenominatorGraph:
    """Three states; the second reads one column on arrival and later, the others two."""
    return DenominatorGraph(
        entry=np.array([1, 0, 3]),
        loop=np.array([2, 0, 4]),
        stay=np.array([0.5, 0.6, 0.3], dtype=np.float32),
        begin=np.array([0, 2, 4, 5]),
        source=np.array([1, 2, 0, 2, 1]),
        probability=np.array([0.25, 0.45, 0.5, 0.2, 0.15], dtype=np.float32),
        initial=np.array([0.5, 0.3, 0.2], dtype=np.float32),
    )


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "denominator.safetensors"
    tiny_graph().save(path)
    for name, array in DenominatorGraph.load(path)._asdict().items():
        assert np.array_equal(array, getattr(tiny_graph(), name)), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial": np.zeros(0, dtype=np.float32)}, "different numbers of states"),
        ({"entry": [1, 0]}, "different numbers of states"),
        ({"loop": [2, 0, 4, 4]}, "different numbers of states"),
        ({"begin": [0, 2, 5]}, "different numbers of arcs"),
        ({"source": [1, 2, 0, 2]}, "different numbers of arcs"),
        ({"begin": [1, 2, 4, 5]}, "begin does not increase"),
        ({"begin": [0, 2, 4, 4]}, "begin does not increase"),
        ({"begin": [0, 4, 2, 5]}, "begin does not increase"),
        ({"source": [1, 2, -1, 2, 1]}, "source of an arc"),
        ({"source": [1, 2, 0, 3, 1]}, "source of an arc"),
        ({"entry": [1, -1, 3]}, "column is negative"),
        ({"loop": [2, 0, -1]}, "column is negative"),
        ({"stay": np.array([0.5, -0.1, 0.3], dtype=np.float32)}, "not between 0 and 1"),
        ({"initial": np.array([0.5, 1.1, 0.3], dtype=np.float32)}, "not between 0 and 1"),
        ({"stay": np.array([0.5, np.nan, 0.3], dtype=np.float32)}, "not between 0 and 1"),
        ({"entry": np.array([1, 0, 3], dtype=np.int32)}, "entry is not a one-dimensional array of int64"),
        ({"stay": np.array([0.5, 0.6, 0.3])}, "stay is not a one-dimensional array of float32"),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "denominator.safetensors"
    tiny_graph()._replace(**{name: np.asarray(array) for name, array in changes.items()}).save(path)
    with pytest.raises(AsrError, match=message):
        DenominatorGraph.load(path)


def enumerated_denominator(score: Tensor, graph: DenominatorGraph, leak: float) -> Tensor:
    """The log sum over every sequence of (state reached, state after the leak), for score (T, C) float64."""
    num_states = graph.num_states
    step: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for state in range(num_states):
        step.setdefault((state, state), []).append((float(graph.stay[state]), int(graph.loop[state])))
    for source, target, probability in zip(graph.source, graph.target(), graph.probability, strict=True):
        step.setdefault((int(source), int(target)), []).append((float(probability), int(graph.entry[target])))
    score_of = {
        (frame, *states): torch.stack([row[column] + np.log(each) for each, column in arcs]).logsumexp(0)
        for states, arcs in step.items()
        for frame, row in enumerate(score)
    }
    terms = []
    for sequence in itertools.product(range(num_states), repeat=1 + 2 * len(score)):
        weight, state = float(graph.initial[sequence[0]]), sequence[0]
        taken = []
        for frame, (reached, kept) in enumerate(zip(sequence[1::2], sequence[2::2], strict=True)):
            if (state, reached) not in step:
                weight = 0.0
                break
            taken.append(score_of[frame, state, reached])
            weight *= leak * float(graph.initial[kept]) + (1.0 if kept == reached else 0.0)
            state = kept
        if weight > 0.0:
            terms.append(torch.stack(taken).sum() + np.log(weight))
    return torch.stack(terms).logsumexp(0)


def enumerated_numerator(score: Tensor, piece: NumeratorPiece) -> Tensor:
    """The log sum over every way to stay or to move on in each frame."""
    terms = []
    num_frames, num_phones = len(score), len(piece.entry)
    starts = [-1, *np.flatnonzero(piece.has_begun).tolist()]
    for start in starts:
        for moves in itertools.product((False, True), repeat=num_frames):
            phone, total = start, score.new_zeros(())
            for frame, moved in enumerate(moves):
                phone += moved
                if not 0 <= phone < num_phones or not piece.earliest[phone] <= frame < piece.latest[phone]:
                    break
                total = total + score[frame, (piece.entry if moved else piece.loop)[phone]]
            else:
                if piece.may_end[phone]:
                    terms.append(total)
    return torch.stack(terms).logsumexp(0) if terms else score.new_full((), -torch.inf)


def tiny_pieces() -> list[NumeratorPiece]:
    entry, loop = np.array([1, 0, 3]), np.array([2, 0, 4])
    begin = np.array([-1.0, 1.0, 2.0])
    return [
        numerator_piece(entry, loop, begin, 3, tolerance=1.0),
        numerator_piece(entry, loop, begin, 3, tolerance=0.0),
        numerator_piece(entry[::-1].copy(), loop[::-1].copy(), begin + 1.0, 3, tolerance=0.5),
        NumeratorPiece(
            entry, loop, np.array([-1, 0, 1]), np.array([3, 3, 3]), np.array([True, False, False]),
            np.array([False, True, False]),
        ),
    ]  # fmt: skip


def scores(num_pieces: int = 4, num_frames: int = 3, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(num_pieces, num_frames, 5, generator=generator)


def test_the_denominator_equals_path_enumeration_in_value_and_gradient() -> None:
    score = scores()
    value, posterior = LfMmi(tiny_graph(), LEAK).denominator(score)
    exact = score.double().requires_grad_()
    expected = torch.stack([enumerated_denominator(row, tiny_graph(), LEAK) for row in exact])
    torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5, check_dtype=False)
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(posterior.double(), gradient, atol=1e-5, rtol=1e-4)


def test_the_numerator_equals_path_enumeration_in_value_and_gradient() -> None:
    score = scores()
    value, posterior = LfMmi(tiny_graph(), LEAK).numerator(score, tiny_pieces())
    exact = score.double().requires_grad_()
    expected = torch.stack([enumerated_numerator(row, each) for row, each in zip(exact, tiny_pieces(), strict=True)])
    torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(posterior.double(), gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_loss_is_denominator_less_numerator_and_its_gradient_is_theirs() -> None:
    score = scores().requires_grad_()
    loss, _, _, posterior = LfMmi(tiny_graph(), LEAK)(score, tiny_pieces())
    exact = score.detach().double().requires_grad_()
    expected = torch.stack(
        [
            enumerated_denominator(row, tiny_graph(), LEAK) - enumerated_numerator(row, each)
            for row, each in zip(exact, tiny_pieces(), strict=True)
        ]
    )
    torch.testing.assert_close(loss.double(), expected, atol=1e-4, rtol=1e-4)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    (gradient,) = torch.autograd.grad((loss * weight).sum(), score)
    (exact_gradient,) = torch.autograd.grad((expected * weight).sum(), exact)
    torch.testing.assert_close(gradient.double(), exact_gradient, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(posterior.sum(2), torch.ones(4, 3))


@pytest.mark.slow
def test_a_teacher_takes_its_share_of_the_numerator() -> None:
    score, pieces = scores().requires_grad_(), tiny_pieces()
    teacher = torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(5)).softmax(2)
    objective = LfMmi(tiny_graph(), LEAK, teacher_weight=0.3)
    loss, mmi, _, posterior = objective(score, pieces, teacher)
    (gradient,) = torch.autograd.grad(loss.sum(), score)
    exact = score.detach().double().requires_grad_()
    denominator = torch.stack([enumerated_denominator(row, tiny_graph(), LEAK) for row in exact])
    numerator = torch.stack([enumerated_numerator(row, piece) for row, piece in zip(exact, pieces, strict=True)])
    expected = denominator - 0.7 * numerator - 0.3 * (teacher * exact).sum((1, 2))
    torch.testing.assert_close(loss.double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mmi.double(), denominator - numerator, atol=1e-4, rtol=1e-4)
    (exact_gradient,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(gradient.double(), exact_gradient, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(posterior, 0.7 * objective.numerator(score, pieces)[1] + 0.3 * teacher)


def test_a_constant_a_frame_changes_no_loss() -> None:
    score = scores()
    objective = LfMmi(tiny_graph(), LEAK)
    loss, *_ = objective(score, tiny_pieces())
    shifted, *_ = objective(score + torch.tensor([5.0, -3.0, 100.0])[None, :, None], tiny_pieces())
    torch.testing.assert_close(loss, shifted, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("smbr_weight", [0.0, 1.0])
def test_a_piece_without_a_path_pulls_at_nothing(smbr_weight: float) -> None:
    too_many = NumeratorPiece(
        entry=np.array([1, 3, 1]),
        loop=np.array([2, 4, 2]),
        earliest=np.array([0, 0, 0]),
        latest=np.array([2, 2, 2]),
        has_begun=np.array([False, False, False]),
        may_end=np.array([False, False, True]),
    )
    score = scores(1, 2).requires_grad_()
    loss, *_ = LfMmi(tiny_graph(), LEAK, smbr_weight)(score, [too_many])
    assert loss.tolist() == [0.0]
    (gradient,) = torch.autograd.grad(loss.sum(), score)
    assert not gradient.any()


def test_long_pieces_neither_overflow_nor_underflow() -> None:
    score = 30.0 * scores(2, 300)
    value, posterior = LfMmi(tiny_graph(), 0.1).denominator(score)
    assert torch.isfinite(value).all()
    torch.testing.assert_close(posterior.sum(2), torch.ones(2, 300), atol=1e-3, rtol=1e-3)


DENOMINATOR_MUTANTS = {
    "the leak goes to all states alike": (
        "leaked, reached, factor = leak * initial[state]",
        "leaked, reached, factor = leak * np.float32(0.5)",
    ),
    "no leak on the way back": ("total[piece] *= leak", "total[piece] *= 0.0"),
    "arrivals read the loop's column": (
        "first, again = following[state], frame_probability[entry[state]]",
        "first, again = following[state], frame_probability[loop[state]]",
    ),
    "the loop costs nothing": ("remain * stayed[piece] * again[piece]", "stayed[piece] * again[piece]"),
    "the backward pass forgets the loop": ("behind[piece] += before[piece]", "behind[piece] = before[piece]"),
    "loops are not counted": ("by_loop[piece] += behind[piece] * stayed[piece]", "pass"),
    "frames are not scaled back": (
        "path = (behind[piece] + total[piece]) * factor[piece]",
        "path = behind[piece] + total[piece]",
    ),
}
NUMERATOR_MUTANTS = {
    "all phones may end": ("if may_end[phone]:", "if True:"),
    "nothing has begun": ("stays = 0.0 if has_begun[phone]", "stays = 0.0 if not has_begun[phone]"),
    "no earliest frame": ("if not earliest[phone] <= frame < latest[phone]:", "if not frame < latest[phone]:"),
    "moves are not counted": ("posterior[frame, entry[phone]] +=", "posterior[frame, entry[phone]] += 0.0 *"),
}


def mutated(name: str, change: tuple[str, str]) -> types.FunctionType:
    source = inspect.getsource(getattr(lfmmi, name))
    assert change[0] in source
    namespace = dict(vars(lfmmi))
    exec("from __future__ import annotations\n" + source.replace(change[0], change[1], 1), namespace)
    function: types.FunctionType = namespace[name]
    return function


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [("_denominator", change) for change in DENOMINATOR_MUTANTS.values()]
    + [("_numerator", change) for change in NUMERATOR_MUTANTS.values()],
    ids=[*DENOMINATOR_MUTANTS, *NUMERATOR_MUTANTS],
)
def test_the_enumeration_catches_a_mutant(name: str, change: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lfmmi, name, mutated(name, change))
    monkeypatch.setattr(lfmmi, "jit", lambda function: None)
    test = {
        "_denominator": test_the_denominator_equals_path_enumeration_in_value_and_gradient,
        "_numerator": test_the_numerator_equals_path_enumeration_in_value_and_gradient,
    }[name]
    with pytest.raises(AssertionError):
        test()
