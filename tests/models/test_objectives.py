"""Objectives against torch's CTC and against path enumeration."""

from __future__ import annotations

import importlib.util
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asr.errors import AsrError
from asr.models.losses import CtcCrf, K2Ctc, TorchCtc
from tests.reference.ctc_paths import collapsed

HAS_K2 = importlib.util.find_spec("k2") is not None


def random_case(lengths: list[int], targets: list[list[int]], num_tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    log_prob = torch.randn(len(lengths), max(lengths), num_tokens, generator=generator).log_softmax(-1).requires_grad_()
    tokens = torch.zeros(len(targets), max(map(len, targets)), dtype=torch.int64)
    for i, target in enumerate(targets):
        tokens[i, : len(target)] = torch.tensor(target)
    return log_prob, torch.tensor(lengths), tokens, torch.tensor([len(target) for target in targets])


def paths_of(log_prob: Tensor, num_frames: int) -> list[tuple[list[int], Tensor]]:
    """All token sequences of one utterance's paths with the paths' scores."""
    num_tokens = log_prob.shape[1]
    found = []
    for path in product(range(num_tokens), repeat=num_frames):
        score = torch.stack([log_prob[frame, token] for frame, token in enumerate(path)]).sum()
        found.append((collapsed(path), score))
    return found


def gradient(loss: Tensor, log_prob: Tensor) -> Tensor:
    weight = torch.arange(1.0, len(loss) + 1.0)
    return torch.autograd.grad((loss * weight).sum(), log_prob, retain_graph=True)[0]


def test_torch_ctc_equals_path_enumeration() -> None:
    log_prob, num_frames, tokens, num_tokens = random_case([4, 3], [[1, 1], [2]], num_tokens=3)
    expected = []
    for i, target in enumerate([[1, 1], [2]]):
        scores = [score for sequence, score in paths_of(log_prob[i], int(num_frames[i])) if sequence == target]
        expected.append(-torch.logsumexp(torch.stack(scores), 0))
    loss = TorchCtc()(log_prob, num_frames, tokens, num_tokens)
    torch.testing.assert_close(loss, torch.stack(expected))


@pytest.mark.skipif(not HAS_K2, reason="k2 is not installed")
def test_k2_ctc_equals_torch_ctc_in_value_and_gradient() -> None:
    targets = [[1, 2, 2, 3], [4], [3, 3], [1, 2, 3, 4, 1]]
    log_prob, num_frames, tokens, num_tokens = random_case([9, 4, 12, 10], targets, num_tokens=5)
    of_torch = TorchCtc()(log_prob, num_frames, tokens, num_tokens)
    of_k2 = K2Ctc()(log_prob, num_frames, tokens, num_tokens)
    torch.testing.assert_close(of_k2, of_torch, atol=1e-4, rtol=1e-4)
    # torch's gradient is that of a log-softmax's input folded in, so both are taken back through one.
    logits = torch.randn_like(log_prob).requires_grad_()
    gradients = []
    for objective in (TorchCtc(), K2Ctc()):
        loss = objective(F.log_softmax(logits, dim=-1), num_frames, tokens, num_tokens)
        gradients.append(gradient(loss, logits))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not HAS_K2, reason="k2 is not installed")
def test_k2_ctc_gives_zero_where_tokens_do_not_fit() -> None:
    log_prob, num_frames, tokens, num_tokens = random_case([3, 6], [[1, 1, 1], [2, 1]], num_tokens=3)
    loss = K2Ctc()(log_prob, num_frames, tokens, num_tokens)
    assert loss[0] == 0.0
    assert loss[1] > 0.0
    assert torch.isfinite(gradient(loss, log_prob)).all()


@pytest.mark.skipif(HAS_K2, reason="k2 is installed")
def test_without_k2_the_cure_is_named() -> None:
    with pytest.raises(AsrError, match=r"TorchCtc"):
        K2Ctc()(*random_case([3], [[1]], num_tokens=3))


@pytest.mark.slow
def test_ctc_crf_equals_path_enumeration_in_value_and_gradient() -> None:
    targets = [[1, 1], [2], [1]]
    log_prob, num_frames, tokens, num_tokens = random_case([5, 3, 2], targets, num_tokens=3)
    objective = CtcCrf(num_tokens=3, ctc_weight=0.0)
    objective.prepare([[1, 2], [2, 2, 1], [1]])
    bigram = objective.bigram.log()
    expected = []
    for i, target in enumerate(targets):
        numerator, denominator = [], []
        for sequence, score in paths_of(log_prob[i], int(num_frames[i])):
            total = score + sum(bigram[a, b] for a, b in zip([0, *sequence], [*sequence, 0], strict=True))
            denominator.append(total)
            if sequence == target:
                numerator.append(total)
        expected.append(torch.logsumexp(torch.stack(denominator), 0) - torch.logsumexp(torch.stack(numerator), 0))
    loss = objective(log_prob, num_frames, tokens, num_tokens)
    torch.testing.assert_close(loss, torch.stack(expected), atol=1e-4, rtol=1e-4)
    logits = torch.randn_like(log_prob).requires_grad_()
    loss = objective(F.log_softmax(logits, dim=-1), num_frames, tokens, num_tokens)
    exact = gradient(loss, logits)
    numeric = torch.zeros_like(logits)
    weight = torch.arange(1.0, 4.0)
    for index in product(range(3), range(5), range(3)):
        changed = logits.detach().clone()
        values = []
        for delta in (1e-2, -1e-2):
            changed[index] = logits.detach()[index] + delta
            loss = objective(F.log_softmax(changed, dim=-1), num_frames, tokens, num_tokens)
            values.append(float((loss * weight).sum()))
        numeric[index] = (values[0] - values[1]) / 2e-2
    torch.testing.assert_close(exact, numeric, atol=2e-3, rtol=2e-2)


def test_ctc_crf_is_never_negative_and_its_bigram_sums_to_one() -> None:
    objective = CtcCrf(num_tokens=6)
    objective.prepare([[1, 2, 3], [5, 5], [4, 1]])
    torch.testing.assert_close(objective.bigram.sum(1), torch.ones(6))
    case = random_case([30, 20, 3], [[1, 2, 3, 1, 1], [5], [4, 4, 4]], num_tokens=6)
    loss = objective(*case)
    assert (loss[:2] > 0).all()
    assert loss[2] == 0.0  # three equal tokens need two blanks between them


def test_ctc_crf_needs_a_discount_lest_a_new_bigram_be_impossible() -> None:
    """With none, the loss of a transcript with a bigram that was not among those prepared would be infinite."""
    with pytest.raises(AsrError, match=r"discount is 0\.0; give a number above 0"):
        CtcCrf(num_tokens=4, discount=0.0)
