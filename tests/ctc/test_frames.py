"""Log-probabilities in every form that users have them, and what is said of those that are none."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from asr.ctc import CTCTokens
from asr.ctc.frames import as_frames
from asr.errors import AsrError

TOKENS = CTCTokens(["a", "b", "-"])
CPU = torch.device("cpu")


def log_probs(*shape: int) -> torch.Tensor:
    return torch.randn((*shape, 3), generator=torch.Generator().manual_seed(0)).log_softmax(-1)


def test_forms_of_the_same() -> None:
    wanted = log_probs(2, 5)[:, :, [2, 0, 1]]
    given = log_probs(2, 5)
    for form in (given, given.numpy(), given.requires_grad_(), given.detach().double(), given.tolist()):
        frames = as_frames(form, None, TOKENS, "log_probs", CPU)
        assert torch.allclose(frames.log_prob, wanted, atol=1e-6)
        assert frames.num_frames.tolist() == [5, 5]
        assert not frames.log_prob.requires_grad
    single = as_frames(given[0], None, TOKENS, "log_probs", CPU)
    assert single.is_single
    assert torch.equal(single.log_prob[0], wanted[0])
    listed = as_frames([given[0], given[1][:2]], None, TOKENS, "log_probs", CPU)
    assert listed.num_frames.tolist() == [5, 2]
    assert torch.equal(listed.log_prob[1, :2], wanted[1, :2])


def test_arrays_that_torch_does_not_take() -> None:
    wanted = log_probs(2, 5)
    read_only = wanted.numpy().copy()
    read_only.flags.writeable = False
    for form in (wanted.numpy()[::-1].copy()[::-1], wanted.numpy().astype(">f4"), read_only):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            frames = as_frames(form, None, TOKENS, "log_probs", CPU)
        assert torch.equal(frames.log_prob, wanted[:, :, [2, 0, 1]])


class OtherArray:
    """An array of a library that torch does not know."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return self._values


def test_arrays_of_other_libraries() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    given = log_probs(2, 5).bfloat16().float()
    wanted = as_frames(given, [5, 4], TOKENS, "log_probs", CPU)
    lengths = OtherArray(np.array([5, 4]))
    for values in (given.numpy(), given.numpy().astype(bfloat16)):
        frames = as_frames(OtherArray(values), lengths, TOKENS, "log_probs", CPU)
        assert torch.equal(frames.log_prob, wanted.log_prob)
        assert frames.num_frames.tolist() == [5, 4]
        listed = as_frames([OtherArray(values[0]), OtherArray(values[1, :4])], None, TOKENS, "log_probs", CPU)
        assert torch.equal(listed.log_prob[1, :4], wanted.log_prob[1, :4])


def test_other_kinds_of_values() -> None:
    logits = torch.randn((1, 4, 3), generator=torch.Generator().manual_seed(1))
    wanted = logits.log_softmax(2)[:, :, [2, 0, 1]]
    assert torch.allclose(as_frames(logits, None, TOKENS, "logits", CPU).log_prob, wanted)
    prob = as_frames(logits.softmax(2), None, TOKENS, "probabilities", CPU).log_prob
    assert torch.allclose(prob, wanted, atol=1e-5)
    assert torch.equal(as_frames(logits, None, TOKENS, "scores", CPU).log_prob, logits[:, :, [2, 0, 1]])
    half = logits.log_softmax(2).half()
    assert as_frames(half, None, TOKENS, "log_probs", CPU).log_prob.dtype == torch.float32


def with_nan(where: tuple[int, int]) -> torch.Tensor:
    given = log_probs(2, 5)
    given[where] = float("nan")
    return given


@pytest.mark.parametrize(
    ("given", "lengths", "kind", "message"),
    [
        (log_probs(2, 5).exp(), None, "log_probs", "are probabilities, not log-probabilities"),
        (10.0 * log_probs(2, 5) + 3.0, None, "log_probs", "not log-probabilities"),
        (log_probs(2, 5), None, "probabilities", 'inputs is "probabilities", but values'),
        (log_probs(2, 5)[:, :, :2], None, "log_probs", "have 2 columns but there are 3 tokens"),
        (torch.zeros(2, 5, 4), None, "log_probs", "give blank=3"),
        (
            log_probs(2, 5).transpose(1, 2),
            None,
            "log_probs",
            "the shape (2, 3, 5) must be that of the tokens, so transpose",
        ),
        (torch.zeros(3), None, "log_probs", "give (utterances, frames, tokens)"),
        ([0.5, 0.5], None, "log_probs", "have the shape (2,); give"),
        ([], None, "log_probs", "have the shape (0,); give"),
        (with_nan((1, 2)), None, "log_probs", "utterance 1, frame 2: the acoustic model gave NaN"),
        (with_nan((1, 2)), [5, 5], "logits", "utterance 1, frame 2: the acoustic model gave NaN"),
        (log_probs(2, 5), [5], "log_probs", "1 lengths for 2 utterances"),
        (log_probs(2, 5), [5, 6], "log_probs", "range from 5 to 6"),
        (log_probs(2, 5), [-1, 2], "log_probs", "range from -1 to 2"),
        (log_probs(2, 5), [0.5, 1.0], "log_probs", "not whole numbers"),
        (log_probs(2, 5), [1.0, 1.0], "log_probs", "not fractions of the longest utterance"),
        (log_probs(2, 5), [True, False], "log_probs", "lengths are true or false"),
        (log_probs(5, 2), [5, 4], "log_probs", "2 lengths for 5 utterances; transpose (frames, utterances, tokens)"),
        ("frames", None, "log_probs", "type str cannot be read"),
        (log_probs(2, 5).to("meta"), None, "log_probs", "log-probabilities: the tensor is of the kind meta; give a de"),
        (log_probs(2, 5).to_sparse(), None, "log_probs", "the tensor is of the kind torch.sparse_coo"),
        (log_probs(2, 5).numpy() + 0j, None, "log_probs", "the tensor is of the kind torch.complex64"),
        (log_probs(2, 5), torch.ones(2, device="meta"), "log_probs", "lengths: the tensor is of the kind meta"),
    ],
)
def test_bad_values_are_told(given: object, lengths: object, kind: str, message: str) -> None:
    with pytest.raises(AsrError) as error:
        as_frames(given, lengths, TOKENS, kind, CPU)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["log_probs", "logits", "scores"])
def test_a_frame_without_a_possible_token_is_named(kind: str) -> None:
    """Of 300 frames, the check of sums looks at 64 only."""
    given = log_probs(2, 150)
    given[1, 77] = -np.inf
    with pytest.raises(AsrError, match="utterance 1, frame 77: all values are -inf"):
        as_frames(given, None, TOKENS, kind, CPU)  # type: ignore[arg-type]
    given[1, 77:] = -np.inf
    assert as_frames(given, [150, 77], TOKENS, kind, CPU).num_frames.tolist() == [150, 77]  # type: ignore[arg-type]


def test_frames_that_are_not_used_may_be_anything() -> None:
    frames = as_frames(with_nan((1, 4)), [5, 4], TOKENS, "log_probs", CPU)
    assert frames.num_frames.tolist() == [5, 4]
    minus_infinity = torch.tensor([[0.0, -np.inf, -np.inf]]).log_softmax(1)
    assert as_frames(minus_infinity, None, TOKENS, "log_probs", CPU).is_single


def test_frames_before_utterances_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="500 utterances of 2 frames; if .* transpose"):
        as_frames(log_probs(500, 2), None, TOKENS, "log_probs", CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape in ((0, 0), (1, 0), (1, 1), (500, 200)):
            as_frames(log_probs(*shape), None, TOKENS, "log_probs", CPU)
        as_frames(log_probs(500, 2), [2] * 500, TOKENS, "log_probs", CPU)
        assert as_frames(log_probs(2, 1), [1.0, 1.0], TOKENS, "log_probs", CPU).num_frames.tolist() == [1, 1]


def test_blank_elsewhere_is_warned_of() -> None:
    given = torch.full((1, 100, 3), -5.0)
    given[:, :, 0] = 3.0
    with pytest.warns(UserWarning, match="column 0 \\('a'\\) is the best in 100% of the frames"):
        as_frames(given.log_softmax(2), None, TOKENS, "log_probs", CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_frames(given.roll(2, 2).log_softmax(2), None, TOKENS, "log_probs", CPU)
