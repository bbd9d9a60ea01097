"""Times of tokens from attention."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from asr.attention import AttentionDecoder
from asr.attention.decoder import best_path, evenly, token_spans
from tests.reference.toy_attention import State, ToyAttention


def test_the_best_path_is_that_of_all() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        fit = generator.normal(size=(4, 8))

        def total(begin: tuple[int, ...], fit: np.ndarray = fit) -> float:
            return sum(
                fit[row, first:after].sum() for row, (first, after) in enumerate(itertools.pairwise((*begin, 8)))
            )

        paths = [(0, *rest) for rest in itertools.combinations(range(1, 8), 3)]
        assert tuple(best_path(fit)) == max(paths, key=total)


def test_spans_follow_the_attention() -> None:
    weight = torch.full((2, 4, 12), 0.01)
    for token, frames in enumerate([(0, 3), (3, 4), (4, 9), (9, 12)]):
        weight[0, token, slice(*frames)] = 1.0
    begin, end = token_spans(weight)
    assert (begin.tolist(), end.tolist()) == ([0, 3, 4], [3, 4, 9])


def test_frames_that_say_nothing_do_not_count() -> None:
    weight = torch.full((1, 3, 6), 0.01)
    weight[0, :, 0] = 50.0
    weight[0, 0, 1:3] = weight[0, 1, 3:5] = weight[0, 2, 5] = 0.2
    begin, end = token_spans(weight)
    assert (begin.tolist(), end.tolist()) == ([0, 3], [3, 5])


def test_all_frames_and_heads_count_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        weight = torch.rand(2, 3, 8, generator=generator) * torch.rand(2, 1, 8, generator=generator) ** 4
        each = weight.numpy()
        fit = ((each - each.mean(1, keepdims=True)) / each.std(1, keepdims=True)).mean(0)
        begin, end = token_spans(weight)
        assert [*begin, end[-1]] == best_path(fit).tolist()


@pytest.mark.parametrize(("num_tokens", "num_frames"), [(5, 3), (3, 3), (1, 1)])
def test_more_tokens_than_frames(num_tokens: int, num_frames: int) -> None:
    begin, end = token_spans(torch.ones(1, num_tokens + 1, num_frames))
    assert begin[0] == 0 and end[-1] == num_frames
    assert (begin[1:] == end[:-1]).all()


def test_even_spans() -> None:
    begin, end = evenly(4, 10)
    assert (begin.tolist(), end.tolist()) == ([0, 2, 5, 7], [2, 5, 7, 10])
    assert [len(each) for each in evenly(0, 10)] == [0, 0]


def test_words_have_times() -> None:
    network = ToyAttention(["▁a", "b", "<blk>", "▁b"], end_bias=-8.0)
    network.max_tokens = 8
    encoded = torch.randn(3, 20, 6, generator=torch.Generator().manual_seed(0))
    for found in AttentionDecoder(network)(encoded, [20, 12, 3], nbest=3):
        for each in found:
            spans = [(token.start_frame, token.end_frame) for token in each.tokens]
            assert spans == sorted(spans)
            assert spans[0][0] == 0
            for word in each.words:
                assert word.start == pytest.approx(word.start_frame * network.frame_shift)
                assert word.start_frame <= word.end_frame <= 20


class Attending(ToyAttention):
    """Says what it attends to; without `reads_lengths`, padding is taken for frames."""

    reads_lengths = True

    def attention(
        self, encoded: torch.Tensor, num_frames: torch.Tensor, prompt: torch.Tensor, token: torch.Tensor
    ) -> torch.Tensor:
        frames = num_frames if self.reads_lengths else torch.full_like(num_frames, encoded.shape[1])
        _, state = self.start(encoded, frames, prompt)
        found = [self._weight(state)]
        for column in token.T:
            _, state = self.step(column, torch.arange(len(encoded)), state)
            found.append(self._weight(state))
        return torch.stack(found, 1)[None]

    def _weight(self, state: State) -> torch.Tensor:
        weight = (state.encoded @ state.hidden.unsqueeze(2)).squeeze(2)
        is_used = torch.arange(weight.shape[1]) < state.num_frames.unsqueeze(1)
        return weight.masked_fill(~is_used, -torch.inf).softmax(1)


@pytest.mark.parametrize("reads_lengths", [True, False])
@torch.no_grad()
def test_padding_does_not_count(reads_lengths: bool) -> None:
    network = Attending(["▁a", "b", "<blk>", "▁b"], end_bias=-8.0)
    network.max_tokens, network.reads_lengths = 8, reads_lengths
    encoded, num_frames = torch.randn(4, 30, 6, generator=torch.Generator().manual_seed(0)), [30, 13, 9, 0]
    decoder = AttentionDecoder(network)
    together = decoder(encoded, num_frames, nbest=2)
    alone = [decoder(each[:num], nbest=2) for each, num in zip(encoded, num_frames, strict=True)]
    assert [[each.tokens for each in texts] for texts in together] == [[each.tokens for each in own] for own in alone]
    assert len({token.end_frame - token.start_frame for token in together[1][0].tokens}) > 1
    for found, num in zip(together[:2], num_frames[:2], strict=True):
        own = encoded[together.index(found), None, :num]
        column = torch.tensor([[network.tokens.symbols.index(token.text) for token in found[0].tokens]])
        frames = torch.tensor([num])
        begin, end = token_spans(network.attention(own, frames, network.prompt(own, frames), column)[:, 0])
        spans = [(token.start_frame, token.end_frame) for token in found[0].tokens]
        assert spans == [*zip(begin.tolist(), end.tolist(), strict=True)]
