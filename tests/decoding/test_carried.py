"""Decoders that start from carried states, against every path scored after all words of the utterances before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from asr.decoding.carried import CarriedStates
from asr.decoding.interface import DecodeResult
from asr.decoding.online import StreamingDecoder
from asr.decoding.token_passing import TokenPassingDecoder
from asr.text.symbols import BOS_ID, EOS_ID, Vocabulary
from tests.decoding.random_graphs import UNPRUNED, random_graph, random_log_prob
from tests.reference.lattice_paths import all_sentences
from tests.reference.table_lm import TableLM

OPTIONS = replace(UNPRUNED, output_beam=1e9, chunk_frames=2, lookahead_frames=1)


class SessionLM(TableLM):
    """A table of probabilities after all words of a session; a carried state is the number of such a text."""

    def __init__(self, vocabulary: Vocabulary, seed: int = 0) -> None:
        super().__init__(vocabulary, seed)
        self.texts: list[tuple[int, ...]] = [()]

    def first_state(self, num_streams: int) -> Tensor:
        return torch.zeros(num_streams, 1)

    def start_from(self, state: Tensor) -> Tensor:
        return torch.tensor([self._place((*self.texts[int(each)], BOS_ID)) for each in state], dtype=torch.int64)

    def state_after(self, state: Tensor, sentences: Any) -> Tensor:
        for each, words in zip(state, sentences, strict=True):
            self.texts.append((*self.texts[int(each)], BOS_ID, *words, EOS_ID) if words else self.texts[int(each)])
        return torch.arange(len(self.texts) - len(state), len(self.texts))[:, None].float()

    def after(self, text: tuple[int, ...]) -> TableLM:
        """The oracle: a model whose sentences follow a text."""
        owner = self

        class After(TableLM):
            def score_sentence(self, word_ids: tuple[int, ...]) -> float:
                words = (*text, BOS_ID, *word_ids, EOS_ID)
                return sum(owner.log_prob_of(words[:i], words[i]) for i in range(len(text) + 1, len(words)))

        return After(self.vocabulary)


def check(result: DecodeResult, plain: DecodeResult, lm: SessionLM, text: tuple[int, ...]) -> tuple[int, ...]:
    """Compares a result with the oracle over the lattice of a search without a language model; returns its text."""
    best = result.best
    if best is None:
        return text
    if result.reached_final:
        assert plain.lattice is not None
        totals = all_sentences(plain.lattice, OPTIONS, lm.after(text))
        assert best.total == pytest.approx(max(totals.values()), abs=1e-3)
        assert best.lm_score == pytest.approx(lm.after(text).score_sentence(best.word_ids), abs=1e-3)
    else:
        words = (*text, BOS_ID, *best.word_ids)
        scores = [lm.log_prob_of(words[:i], words[i]) for i in range(len(text) + 1, len(words))]
        assert best.lm_score == pytest.approx(sum(scores), abs=1e-3)
    return (*text, BOS_ID, *best.word_ids, EOS_ID) if best.word_ids else text


def decoder_of(kind: str, graph: Any) -> Any:
    if kind == "k2":
        pytest.importorskip("k2")
        from asr.decoding.k2 import K2Decoder

        return K2Decoder(graph, OPTIONS, inputs="scores")
    return TokenPassingDecoder(graph, OPTIONS, lm_fusion=kind, inputs="scores")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lattice", "chunks", "search", "k2"])
@settings(max_examples=4)
@example(seed=4)  # the second utterance alone has no complete path, and is searched again
@given(seed=st.integers(0, 10**6))
def test_an_utterance_follows_those_before_it(kind: str, seed: int) -> None:
    """Three sessions, of which the second is silent in one batch; some utterances have no complete path."""
    graph = random_graph(seed, final_prob=0.3)
    lm, decoder = SessionLM(graph.vocabulary, seed), decoder_of(kind, graph)
    first_pass = TokenPassingDecoder(graph, OPTIONS, keep_lattice=True, inputs="scores")
    carried, texts = CarriedStates(lm, graph.vocabulary), {"a": (), "b": (), "c": ()}
    for turn, sessions in enumerate((["a", "b", "c"], ["c", "a"], ["b", "c", "a"])):
        log_prob = random_log_prob(seed + turn, len(sessions), 5)
        num_frames = torch.tensor([4, 1, 5][: len(sessions)])
        plain = first_pass.decode(log_prob, num_frames)
        results = decoder.decode(log_prob, num_frames, lm, carried.before(sessions))
        carried.add(sessions, results)
        for session, result, other in zip(sessions, results, plain, strict=True):
            texts[session] = check(result, other, lm, texts[session])


@pytest.mark.slow
@settings(max_examples=4)
@given(seed=st.integers(0, 10**6))
def test_an_utterance_of_a_stream_follows_those_before_it(seed: int) -> None:
    graph = random_graph(seed)
    lm = SessionLM(graph.vocabulary, seed)
    first_pass = TokenPassingDecoder(graph, OPTIONS, keep_lattice=True, inputs="scores")
    decoder = StreamingDecoder(graph, OPTIONS, lm, inputs="scores")
    carried, texts = CarriedStates(lm, graph.vocabulary), [(), ()]
    for turn in range(3):
        log_prob, num_frames = random_log_prob(seed + turn, 2, 4), torch.tensor([4, 3])
        streams = decoder.start(2, carried.before([0, 1]))
        for begin in (0, 2):
            decoder.advance(streams, log_prob[:, begin : begin + 2], (num_frames - begin).clamp(0, 2))
        results = [decoder.finalize(stream) for stream in streams]
        carried.add([0, 1], results)
        plain = first_pass.decode(log_prob, num_frames)
        texts = [check(*each, lm, text) for *each, text in zip(results, plain, texts, strict=True)]


def test_a_session_that_has_ended_is_forgotten() -> None:
    lm = SessionLM(Vocabulary(["A", "B"]))
    carried = CarriedStates(lm, lm.vocabulary)
    graph = random_graph(3)
    result = TokenPassingDecoder(graph, OPTIONS, inputs="scores").decode(random_log_prob(3, 1, 5))
    carried.add(["a", "b"], [result[0], DecodeResult((), False, 0)])
    assert len(carried) == 2
    carried.end("a")
    carried.end("a")
    assert len(carried) == 1
    assert torch.equal(carried.before(["a"]), lm.first_state(1))
