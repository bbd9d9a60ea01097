"""`CTCDecoder` with words: against enumeration, whole and in chunks, and what is said of what does not fit."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import pickle
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("kaldifst", reason="compiling graphs needs kaldifst")

from asr.bundle import Bundle
from asr.ctc import CTCDecoder, CTCDecodingConfig, CTCHypothesis, CTCTokens
from asr.ctc.graphs import compile_graph, read_lexicon, spelled_lexicon
from asr.ctc.language_models import LentModels, StatefulModel, model_maker
from asr.ctc.word_models import graph_ngram, trie_of, uniform_ngram
from asr.errors import AsrError
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import WrappedLM
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import Vocabulary
from tests.ctc.oracle import ForgetfulNgram, best_of_paths, best_word_sequences
from tests.reference.table_lm import TableLM
from tests.reference.toy_network import ToyNetwork

NETWORK = RNNLanguageModel(Vocabulary(["ab"]), RNNLMConfig(4))

pytestmark = pytest.mark.slow


class Lists(TableLM):
    """Answers with lists of numbers."""

    def score(self, context_idx: torch.Tensor, word_id: torch.Tensor) -> Any:
        return [answer.tolist() for answer in super().score(context_idx, word_id)]


SYMBOLS = ["-", "a", "b", "|"]
WORDS = ["a", "ab", "b", "ba"]
SPELLED = {"a": [(1,)], "ab": [(1, 2)], "b": [(2,)], "ba": [(2, 1)]}
OPEN = {"search_beam": 1e9, "max_active_states": 1_000_000, "output_beam": 50.0, "context_beam": None}


def random_frames(num_frames: int, seed: int, num_tokens: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randn((num_frames, num_tokens), generator=generator)).log_softmax(1)


@pytest.fixture
def word_model(ngram_of: Callable[..., NgramLM]) -> NgramLM:
    return ngram_of(["a ab b", "ba a", "b b ab a", "ab"], WORDS, order=3)


def sentence_score(lm: NgramLM) -> Callable[[Sequence[str]], float]:
    return lambda words: float(lm.score_sentence(list(words)).double().sum())


def close(found: Sequence[CTCHypothesis], wanted: list[tuple[float, tuple[str, ...]]]) -> bool:
    """Whether a list has the best texts with their scores; n-grams are rounded in graphs."""
    scores = {" ".join(words): score for score, words in wanted}
    return all(
        math.isclose(hypothesis.score, scores[hypothesis.text], abs_tol=3e-3)
        and math.isclose(hypothesis.score, score, abs_tol=3e-3)
        for hypothesis, (score, _) in zip(found, wanted, strict=False)
    )


@pytest.mark.parametrize("seed", range(4))
def test_letters_against_enumeration(seed: int, word_model: NgramLM) -> None:
    decoder = CTCDecoder(SYMBOLS, ngram=word_model, warm_up=False, lm_scale=0.8, word_insertion_penalty=0.4, **OPEN)
    log_prob = random_frames(5, seed)
    wanted = best_word_sequences(
        log_prob.double().numpy(), SPELLED, sentence_score(word_model), 0.8, 0.4, boundary=3, max_words=3
    )
    found = decoder(log_prob, nbest=4)
    assert len(found) == 4
    assert close(found, wanted)
    for hypothesis in found:
        parts = hypothesis.am_score + 0.8 * hypothesis.lm_score + 0.4 * len(hypothesis.words)
        assert hypothesis.score == pytest.approx(parts, abs=1e-4)
        assert hypothesis.lm_score == pytest.approx(sentence_score(word_model)(hypothesis.text.split()), abs=1e-3)
    assert close(decoder(log_prob), wanted)


def test_letters_of_the_other_case_against_enumeration(word_model: NgramLM) -> None:
    decoder = CTCDecoder([each.upper() for each in SYMBOLS], ngram=word_model, warm_up=False, lm_scale=0.8, **OPEN)
    log_prob = random_frames(5, 1)
    score = sentence_score(word_model)
    wanted = best_word_sequences(log_prob.double().numpy(), SPELLED, score, 0.8, 0.0, boundary=3, max_words=3)
    found = decoder(log_prob, nbest=4)
    assert len(found) == 4 and close(found, wanted)
    assert {token.text for token in found[0].tokens} <= {"A", "B", "|"}


@pytest.mark.parametrize("inputs", ["log_probs", "logits", "probabilities"])
def test_tokens_in_plain_form_against_enumeration(inputs: Any, word_model: NgramLM) -> None:
    """A network that writes `Ab, ba-b.` finds the words that it would if it wrote `ab ba b`."""
    symbols = ["B", "a", ",", "|", "A", "b", "-", ".", "<blk>"]
    merged = [[8, 2, 7], [1, 4], [0, 5], [3, 6]]
    options: dict[str, Any] = {"ngram": word_model, "warm_up": False, "lm_scale": 0.8, "frame_shift": 0.1, **OPEN}
    decoder = CTCDecoder(symbols, inputs=inputs, **options)
    log_prob = random_frames(5, 5, len(symbols))
    frames = {"log_probs": log_prob, "logits": log_prob + 3.0, "probabilities": log_prob.exp()}[inputs]
    plain = torch.stack([log_prob.double()[:, columns].logsumexp(1) for columns in merged], 1)
    score = sentence_score(word_model)
    wanted = best_word_sequences(plain.numpy(), SPELLED, score, 0.8, 0.0, boundary=3, max_words=3)
    found = decoder(frames, nbest=4)
    assert len(found) == 4 and close(found, wanted)
    same = CTCDecoder(SYMBOLS, **options)(plain.float(), nbest=4)
    assert found[0].text and [(each.text, each.tokens) for each in found] == [(each.text, each.tokens) for each in same]
    stream = decoder.stream()
    for part in frames.split(2):
        stream.accept(part)
    assert stream.finish().text == found[0].text
    with pytest.raises(AsrError, match="have 4 columns but there are 9 tokens"):
        decoder(plain.float())


@pytest.mark.parametrize("fusion", ["none", "lattice", "search"])
def test_hot_words_against_enumeration(fusion: str, word_model: NgramLM) -> None:
    plain = sentence_score(word_model)
    models: dict[str, Any] = {"words": WORDS, "lm": word_model, "lm_fusion": fusion}
    hot: dict[str, Any] = {"hot_words": {"ab": 3.0, "B a": None}, "hot_word_score": 2.5}
    models = {"ngram": word_model} if fusion == "none" else models
    decoder = CTCDecoder(SYMBOLS, warm_up=False, lm_scale=0.8, **models, **hot, **OPEN)
    assert decoder.word_graph is not None
    gain = min(3.0, -float(decoder.word_graph.ngram.score_sentence(["ab", "ab", "ab"])[2]))

    def score(words: Sequence[str]) -> float:
        pairs = list(itertools.pairwise(words))
        return plain(words) + gain * list(words).count("ab") + 2 * 2.5 * pairs.count(("b", "a"))

    num_changed = 0
    for seed in range(6):
        log_prob = random_frames(5, seed)
        of_paths = log_prob.double().numpy(), SPELLED
        wanted = best_word_sequences(*of_paths, score, 0.8, 0.0, boundary=3, max_words=3)
        num_changed += wanted[0][1] != best_word_sequences(*of_paths, plain, 0.8, 0.0, boundary=3, max_words=3)[0][1]
        assert close(decoder(log_prob, nbest=3), wanted)
        stream = decoder.stream()
        stream.accept(log_prob)
        assert close([stream.finish()], wanted)
    assert num_changed


@pytest.mark.parametrize("none", [[], {}, iter(())], ids=["list", "mapping", "iterator"])
def test_no_hot_words_are_as_none_given(none: Any, word_model: NgramLM) -> None:
    for arguments in ({"ngram": word_model, **OPEN}, {}):
        without = CTCDecoder(SYMBOLS, warm_up=False, **arguments)
        decoder = CTCDecoder(SYMBOLS, warm_up=False, hot_words=none, hot_word_score=3.0, **arguments)
        assert decoder(random_frames(5, 0)) == without(random_frames(5, 0))


def test_phrases_may_be_in_the_search_without_another_model() -> None:
    given: dict[str, Any] = {"words": WORDS, "hot_words": ["ab b a"], "hot_word_score": 6.0, "warm_up": False, **OPEN}
    found = []
    for fusion in ("lattice", "search"):
        settings = {**given, "lm_fusion": fusion}
        if fusion == "search":
            del settings["context_beam"]
        best = CTCDecoder(SYMBOLS, **settings)(random_frames(9, 0))[0]
        found.append((best.text, round(best.score, 3)))
    assert found[0] == found[1] and found[0][0] == "ab b a"


@pytest.mark.parametrize("seed", range(3))
def test_pieces_against_enumeration(seed: int, word_model: NgramLM) -> None:
    symbols = ["▁a", "▁b", "a", "b", "<blk>"]
    decoder = CTCDecoder(symbols, ngram=word_model, warm_up=False, lm_scale=1.0, **OPEN)
    log_prob = random_frames(4, seed, 5)
    spelled = {"a": [(1,)], "ab": [(1, 4)], "b": [(2,)], "ba": [(2, 3)]}
    blank_first = log_prob[:, [4, 0, 1, 2, 3]].double().numpy()
    wanted = best_word_sequences(blank_first, spelled, sentence_score(word_model), 1.0, 0.0, boundary=None, max_words=4)
    assert close(decoder(log_prob, nbest=3), wanted)


def test_phones_of_a_lexicon_with_several_pronunciations(word_model: NgramLM) -> None:
    lexicon = {"a": ["AA", "EY"], "ab": ["AA B"], "b": ["B"], "ba": ["B AA"]}
    decoder = CTCDecoder(
        ["<blk>", "AA", "EY", "B"], lexicon=lexicon, ngram=word_model, warm_up=False, lm_scale=1.0, **OPEN
    )
    spelled = {"a": [(1,), (2,)], "ab": [(1, 3)], "b": [(3,)], "ba": [(3, 1)]}
    for seed in range(3):
        log_prob = random_frames(5, seed)
        wanted = best_word_sequences(
            log_prob.double().numpy(), spelled, sentence_score(word_model), 1.0, 0.0, boundary=None, max_words=5
        )
        assert close(decoder(log_prob, nbest=3), wanted)


@pytest.mark.parametrize("seed", range(4))
def test_boundaries_are_optional_after_spellings_without_them(seed: int, word_model: NgramLM) -> None:
    lexicon = {"a": ["a"], "ab": ["a b |", "b a"], "b": ["b"], "ba": ["b a |"]}
    decoder = CTCDecoder(SYMBOLS, lexicon=lexicon, ngram=word_model, warm_up=False, lm_scale=0.8, **OPEN)
    log_prob = random_frames(5, seed)
    pattern = {"a": r"a\|*", "ab": r"(ab\|+|ba\|*)", "b": r"b\|*", "ba": r"ba\|+"}
    score_of = sentence_score(word_model)
    # A boundary is free at the end.
    by_text = {
        "".join(SYMBOLS[token] for token in tokens) + "|": score
        for tokens, score in best_of_paths(log_prob.double().numpy()).items()
    }
    wanted = []
    for words in itertools.chain.from_iterable(itertools.product(WORDS, repeat=num) for num in range(6)):
        whole = re.compile(r"\|*" + "".join(pattern[word] for word in words))
        best = max((score for text, score in by_text.items() if whole.fullmatch(text)), default=-math.inf)
        wanted.append((best + 0.8 * score_of(words), words))
    found = decoder(log_prob, nbest=4)
    assert len(found) == 4
    assert close(found, sorted(wanted, reverse=True))


def test_times_of_words_without_boundaries_between_them(frames_of: Callable[..., torch.Tensor]) -> None:
    decoder = CTCDecoder(
        ["-", "a", "b", "c", "|"], lexicon={"ab": ["a b"], "c": ["c"], "a-c": ["a | c"]}, warm_up=False, lm_scale=0.1
    )
    for text, frames in [
        ("abcab", [("ab", 0, 3), ("c", 4, 5), ("ab", 6, 9)]),
        ("ab|a|cc", [("ab", 0, 3), ("a-c", 6, 11), ("c", 12, 13)]),
    ]:
        best = decoder(frames_of(["-", "a", "b", "c", "|"], list(text), strength=10.0))[0]
        assert [(word.text, word.start_frame, word.end_frame) for word in best.words] == frames


def test_times_of_a_lone_mark_that_is_a_word(frames_of: Callable[..., torch.Tensor]) -> None:
    symbols, lexicon = ["-", "▁", "▁a", "b"], {"um": "▁", "ab": "▁a b", "a": "▁a"}
    best = CTCDecoder(symbols, lexicon=lexicon, warm_up=False)(frames_of(symbols, ["▁", "▁a", "b", "▁", "▁a"]))[0]
    found = [(word.text, word.start_frame, word.end_frame) for word in best.words]
    assert found == [("um", 0, 1), ("ab", 2, 5), ("um", 6, 7), ("a", 8, 9)]


@pytest.mark.parametrize(
    ("symbols", "lexicon"),
    [
        (["-", "|", "a", "b"], {"!SIL": "|", "ab": "a b |", "a": "a |"}),
        (["-", "SIL", "a", "b"], {"!SIL": ["SIL", "SIL SIL"], "ab": "a b", "a": "a"}),
    ],
)
def test_words_of_silence_alone_are_left_out(
    symbols: list[str], lexicon: dict[str, Any], frames_of: Callable[..., torch.Tensor], caplog
) -> None:
    pause = symbols[1]
    decoder = CTCDecoder(symbols, lexicon=lexicon, warm_up=False)
    assert "1 words are spelled as silence alone and are left out (!SIL)" in caplog.text
    best = decoder(frames_of(symbols, ["a", "b", pause, pause, "a", pause], strength=10.0))[0]
    assert [(word.text, word.start_frame, word.end_frame) for word in best.words] == [("ab", 0, 3), ("a", 8, 9)]
    with pytest.raises(AsrError, match="the words of the lexicon are spelled as silence alone"):
        CTCDecoder(symbols, lexicon={"!SIL": pause})


def test_language_model_in_the_place_of_the_graphs(word_model: NgramLM) -> None:
    log_prob = random_frames(5, 11)
    wanted = best_word_sequences(
        log_prob.double().numpy(), SPELLED, sentence_score(word_model), 0.9, 0.0, boundary=3, max_words=3
    )
    for fusion in ("lattice", "search"):
        decoder = CTCDecoder(SYMBOLS, words=WORDS, lm=word_model, warm_up=False, lm_scale=0.9, lm_fusion=fusion, **OPEN)
        assert decoder.word_graph is not None
        assert decoder.word_graph.ngram.order == 1
        assert close(decoder(log_prob), wanted), fusion
        assert decoder(log_prob)[0].lm_score == pytest.approx(
            sentence_score(word_model)(decoder(log_prob)[0].text.split()), abs=1e-3
        )


def test_large_model_acts_beside_its_pruned_self(word_model: NgramLM) -> None:
    small = len(word_model.vocabulary) + 4
    decoder = CTCDecoder(SYMBOLS, ngram=word_model, graph_ngrams=small, warm_up=False, lm_scale=0.9, **OPEN)
    assert decoder.word_graph is not None
    assert decoder.word_graph.ngram.num_arcs < word_model.num_arcs
    for seed in range(3):
        log_prob = random_frames(5, seed)
        wanted = best_word_sequences(
            log_prob.double().numpy(), SPELLED, sentence_score(word_model), 0.9, 0.0, boundary=3, max_words=3
        )
        assert close(decoder(log_prob), wanted)


def test_boundaries_are_read_anywhere_and_any_number_of_times(frames_of: Callable[..., torch.Tensor]) -> None:
    decoder = CTCDecoder(SYMBOLS, words=WORDS, warm_up=False, frame_shift=0.1)
    for text in ("ab|ba", "|ab|ba|", "||ab|||ba||", "ab||ba"):
        best = decoder(frames_of(SYMBOLS, list(text), strength=10.0))[0]
        assert best.text == "ab ba", text
        assert best.is_complete
        assert [token.text for token in best.tokens] == list(text)
        begin = text.index("ab")
        assert best.words[0].start_frame == 2 * begin
        assert best.words[0].start == pytest.approx(0.2 * begin)
        assert best.words[1].end_frame <= 2 * len(text)


def test_times_are_pythons_numbers() -> None:
    decoder = CTCDecoder(SYMBOLS, words=["ab"], frame_shift=np.float32(0.02), inputs="scores", warm_up=False)
    (word,) = decoder(torch.eye(len(SYMBOLS))[[SYMBOLS.index("a"), SYMBOLS.index("b")]])[0].words
    assert type(word.start) is float and type(word.end) is float


def test_batches_streams_and_threads_agree(word_model: NgramLM) -> None:
    other = uniform_ngram(WORDS)
    for models in ({"ngram": word_model}, {"ngram": word_model, "lm": other, "lm_weight": 0.5, "lm_fusion": "search"}):
        decoder = CTCDecoder(SYMBOLS, warm_up=False, confidences=True, frame_shift=0.01, **models)  # type: ignore[arg-type]
        without = CTCDecoder(SYMBOLS, warm_up=False, frame_shift=0.01, **models)  # type: ignore[arg-type]
        batch = torch.stack([random_frames(30, seed) for seed in range(4)])
        lengths = torch.tensor([30, 12, 0, 25])
        wanted = decoder(batch, lengths, nbest=3)
        for utterance, length, hypotheses in zip(batch, lengths, wanted, strict=True):
            single = decoder(utterance[:length].numpy(), nbest=3)
            assert [each.text for each in single] == [each.text for each in hypotheses]
            assert [each.score for each in single] == pytest.approx([each.score for each in hypotheses], abs=1e-3)
            for hypothesis in hypotheses:
                assert all(0.0 <= word.confidence <= 1.0 for word in hypothesis.words)  # type: ignore[operator]
            stream = without.stream()
            for chunk in utterance[:length].split(4):
                stream.accept(chunk)
                stream.partial()
            assert stream.finish().text == hypotheses[0].text
        answers: list[object] = [None] * 4

        def work(position: int, decoder: CTCDecoder, given: tuple[torch.Tensor, ...], answers: list[object]) -> None:
            answers[position] = decoder(*given, nbest=3)

        threads = [
            threading.Thread(target=work, args=(position, decoder, (batch, lengths), answers)) for position in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [wanted] * 4


@pytest.mark.parametrize(
    ("symbols", "arguments"),
    [
        (SYMBOLS, {"words": WORDS, "blank_skip_threshold": 0.6}),
        (SYMBOLS, {"words": ["a", "ab"], "spell_unknown": True}),
        (SYMBOLS, {"lexicon": {"a": "a |", "b": "b |", "same": "a |"}}),
        (SYMBOLS, {"lexicon": {"a": "a", "b": "b |", "bb": "b b"}}),
        (["-", "▁a", "b", "▁"], {"words": ["a", "ab", "b"]}),
    ],
)
def test_partial_results_are_made_of_the_last_ones(symbols: list[str], arguments: dict[str, Any]) -> None:
    decoder = CTCDecoder(symbols, warm_up=False, search_beam=3.0, frame_shift=0.5, **arguments)
    num_kept = 0
    for seed in range(2):
        frames = (2.0 * random_frames(60, seed)).log_softmax(1)
        stream = decoder.stream()
        earlier = stream.partial()
        for begin in range(0, 60, 3):
            stream.accept(frames[begin : begin + 3])
            anew = decoder.stream()
            for first in range(0, begin + 3, 3):
                anew.accept(frames[first : first + 3])
            found = stream.partial()
            assert found == anew.partial()
            num_kept += sum(one is other for one, other in zip(earlier.tokens, found.tokens, strict=False))
            earlier = found
        assert stream.finish() == anew.finish()
    assert num_kept > 250


@pytest.mark.parametrize("has_words", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_searches_do_not_make_each_other_forget(
    has_words: bool, is_shared: bool, ngram_of: Callable[..., NgramLM], word_model: NgramLM
) -> None:
    lm: Any = ForgetfulNgram(word_model if has_words else ngram_of(["a b", "b a a"], ["a", "b", "|"]))
    lm = WrappedLM(lm) if is_shared else lm
    models: dict[str, Any] = {"token_lm": lm}
    if has_words:
        models = {"ngram": word_model, "lm": lm, "lm_weight": 0.5}
    decoder = CTCDecoder(SYMBOLS, warm_up=False, **models)
    utterances = [random_frames(40, seed) for seed in range(3)]
    alone = []
    for frames in utterances:
        stream = decoder.stream()
        stream.accept(frames)
        alone.append(stream.finish().text)
    streams = [decoder.stream() for _ in utterances]
    for at in range(0, 40, 4):
        for stream, frames in zip(streams, utterances, strict=True):
            stream.accept(frames[at : at + 4])
        decoder(random_frames(10, at))
    assert [stream.finish().text for stream in streams] == alone


class Remembered(StatefulModel):
    """All words are equally probable; knows which states are still in memory."""

    class State:
        pass

    def __init__(self) -> None:
        super().__init__(Vocabulary(["a", "b", "|"]), self.State(), forget_from=1000)
        self.made: list[weakref.ref[Remembered.State]] = []

    def after(self, state: Any, word_id: int) -> tuple[float, Any]:
        following = self.State()
        self.made.append(weakref.ref(following))
        return -1.0, following

    def at_end(self, state: Any) -> float:
        return 0.0


@pytest.mark.parametrize("is_shared", [True, False])
def test_language_models_forget_earlier_utterances(is_shared: bool) -> None:
    lm = Remembered()
    decoder = CTCDecoder(SYMBOLS, token_lm=WrappedLM(lm) if is_shared else lm, warm_up=False)
    open_stream = decoder.stream()
    open_stream.accept(random_frames(5, 0))
    most = 0
    for seed in range(8):
        decoder(random_frames(40, seed))
        stream = decoder.stream()
        stream.accept(random_frames(40, seed))
        most = max(most, sum(state() is not None for state in lm.made))
        stream.finish()
    assert len(lm.made) > 4 * most
    open_stream.accept(random_frames(5, 1))
    again = decoder.stream()
    again.accept(torch.cat([random_frames(5, seed) for seed in range(2)]))
    assert open_stream.finish() == again.finish()


@pytest.mark.parametrize("fails", [False, True])
def test_streams_give_their_language_models_back_unless_a_query_failed(fails: bool) -> None:
    models = LentModels(functools.partial(TableLM, Vocabulary(["a"])))
    loan = models.loan()
    with contextlib.suppress(KeyboardInterrupt), loan.turn():
        if fails:
            raise KeyboardInterrupt
    with loan.turn():
        loan.give_back()
    assert (models.loan().model is loan.model) == (not fails)


def test_streams_take_the_language_model_of_those_that_have_ended() -> None:
    made = list[CachedRNNLM]()
    network = RNNLanguageModel(Vocabulary(["a", "b", "|"]), RNNLMConfig(4)).eval()

    def make() -> CachedRNNLM:
        made.append(CachedRNNLM(network, CacheOptions()))
        return made[-1]

    decoder = CTCDecoder(SYMBOLS, token_lm=network, lm_scale=0.5, warm_up=False)
    wanted = [decoder(random_frames(20, seed))[0] for seed in range(3)]
    decoder._search.models = LentModels(make)
    for seed in range(3):
        stream = decoder.stream()
        stream.accept(random_frames(20, seed))
        found = stream.finish()
        assert found.text == wanted[seed].text
        assert found.score == pytest.approx(wanted[seed].score, abs=1e-2)
    assert len(made) == 1


class Entered(WrappedLM):
    """Notices if two threads query it at the same time."""

    is_busy = was_entered_twice = False

    def score(self, context_idx: torch.Tensor, word_id: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.was_entered_twice |= self.is_busy
        self.is_busy = True
        time.sleep(0.001)
        self.is_busy = False
        return super().score(context_idx, word_id)


@pytest.mark.parametrize("has_words", [True, False])
def test_threads_do_not_enter_a_users_model_together(
    has_words: bool, ngram_of: Callable[..., NgramLM], word_model: NgramLM
) -> None:
    lm = Entered(ForgetfulNgram(word_model if has_words else ngram_of(["a b", "b a a"], ["a", "b", "|"])))
    models: dict[str, Any] = {"words": WORDS, "lm": lm} if has_words else {"token_lm": lm}
    decoder = CTCDecoder(SYMBOLS, warm_up=False, **models)
    frames = random_frames(12, 0)

    def read() -> None:
        stream = decoder.stream()
        for chunk in frames.split(4):
            stream.accept(chunk)
        stream.finish()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    decoder(frames)
    for thread in threads:
        thread.join()
    assert not lm.was_entered_twice


def test_decoders_in_other_processes(
    word_model: NgramLM, ngram_of: Callable[..., NgramLM], arpa_file: Callable[[NgramLM], Path]
) -> None:
    frames = random_frames(20, 0)
    tokens = ngram_of(["a b", "b a a"], ["a", "b", "|"])
    small = len(word_model.vocabulary) + 4
    network = ToyNetwork(len(WORDS))
    network.vocabulary = Vocabulary(WORDS)
    sources: list[dict[str, Any]] = [
        {"ngram": word_model},
        {"ngram": word_model, "graph_ngrams": small},
        {"words": WORDS, "spell_unknown": True},
        {"ngram": word_model, "lm": CachedRNNLM(network)},
        {"ngram": word_model, "lm": WrappedLM(ForgetfulNgram(word_model)), "lm_fusion": "search"},
        {"words": WORDS, "lm": ForgetfulNgram(word_model)},
        {"token_lm": tokens},
        {"token_lm": ForgetfulNgram(tokens)},
        {},
    ]
    for models in sources:
        decoder = CTCDecoder(SYMBOLS, warm_up=False, **models)
        wanted = decoder(frames, nbest=2)
        for received in (pickle.loads(pickle.dumps(decoder)), pickle.loads(ForkingPickler.dumps(decoder))):
            assert received(frames, nbest=2) == wanted
            stream, other = received.stream(), decoder.stream()
            for each in (stream, other):
                each.accept(frames)
            assert stream.finish() == other.finish()
        assert decoder(frames, nbest=2) == wanted


def test_nothing_to_read_is_the_empty_text() -> None:
    decoder = CTCDecoder(SYMBOLS, words=WORDS, warm_up=False)
    assert decoder(torch.zeros(0, 4))[0].text == ""
    assert decoder(torch.zeros(0, 5, 4)) == []
    silence = torch.tensor([[0.0, -50.0, -50.0, -50.0]] * 9)
    assert decoder(silence)[0].text == ""
    assert CTCDecoder(SYMBOLS, warm_up=False)(torch.zeros(0, 4))[0].text == ""


def test_same_graph_is_compiled_once(word_model: NgramLM, arpa_file: Callable[[NgramLM], Path]) -> None:
    path = arpa_file(word_model)
    graphs = [CTCDecoder(SYMBOLS, ngram=path, warm_up=False).word_graph for _ in range(2)]
    assert graphs[0] is graphs[1]
    other = CTCDecoder(SYMBOLS, ngram=path, words=["a", "b"], warm_up=False)
    assert other.word_graph is not graphs[0]
    assert other.word_graph is not None
    assert set(other.word_graph.lexicon.pronunciations) == {"a", "b"}


def test_words_that_the_model_lacks_share_its_unknown(word_model: NgramLM) -> None:
    small = graph_ngram(word_model, [*WORDS, "bb", "aab"], 10**9)
    unknown = float(word_model.score_sentence(["zzz"])[0])
    for word in ("bb", "aab"):
        assert float(small.score_sentence([word])[0]) == pytest.approx(unknown - math.log(2), abs=1e-5)
    for sentence in (["a", "ab"], ["b", "b", "ab"]):
        assert torch.equal(small.score_sentence(sentence), word_model.score_sentence(sentence))


def test_trie_of_a_model_is_the_one_it_was_made_of(word_model: NgramLM) -> None:
    again = NgramLM.from_trie(trie_of(word_model))
    for name, tensor in word_model.arrays.tensors().items():
        assert torch.equal(tensor, getattr(again.arrays, name)), name


@pytest.mark.parametrize(
    ("unknown", "effect"),
    [
        ("", "it has no <unk> either, so they are hardly ever found; estimate it with <unk> (SRILM: -unk)"),
        ("-99 <unk>", "it has no <unk> either, so they are hardly ever found"),
        ("-2 <unk>", "they share the probability of its <unk>."),
    ],
)
def test_words_missing_from_the_ngram_model_are_told_once(
    unknown: str, effect: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ngram = tmp_path / "words.arpa"
    unigrams = ["-99 <s>", "-1 </s>", "-1 a", "-1 ba", *unknown.splitlines()]
    lines = ["\\data\\", f"ngram 1={len(unigrams)}", "", "\\1-grams:", *unigrams, "", "\\end\\", ""]
    ngram.write_text("\n".join(lines))
    decoder = CTCDecoder(SYMBOLS, ngram=ngram, words=["a", "ab", "b"], warm_up=False)
    for seed in range(2):
        decoder(random_frames(5, seed))
    (told,) = [record.message for record in caplog.records]
    assert told.startswith(f"{ngram}: the model lacks 2 of 3 words (ab, b); {effect}")


def test_spelled_lexicon_leaves_out_what_cannot_be_spelled(caplog: pytest.LogCaptureFixture) -> None:
    tokens = CTCTokens(SYMBOLS)
    lexicon, left_out = spelled_lexicon(["ab", "abc", "b"], tokens)
    assert lexicon.pronunciations == {"ab": [("a", "b", "|")], "b": [("b", "|")]}
    assert left_out == ["abc"]
    spelled_lexicon(["ab", "\ufeffab", "b", "b\u00e9"], tokens)
    assert r"2 of 4 words cannot be spelled in these tokens and are left out (\ufeffab, bé)" in caplog.text
    graph = compile_graph(tokens, lexicon, uniform_ngram(["ab", "b"]), 1000)
    assert graph.graph.tokens == tokens.table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"words": ["xyz"]}, "none of the 1 words ('xyz', ...) can be spelled"),
        ({"words": []}, "there is no word in it"),
        ({"words": ["a b"]}, "'a b' is not a word"),
        ({"lexicon": {"ab": "a c |"}}, "1 symbols of its spellings are not tokens of the network (c)"),
        ({"words": ["ab"], "token_lm": uniform_ngram(["a"])}, "token_lm cannot be combined with a word list"),
        ({"spell_unknown": True}, "spell_unknown adds words to a list"),
        ({"words": ["ab"], "inputs": "energies"}, "inputs is 'energies'"),
        ({"words": ["ab"], "frame_shift": -1.0}, "frame_shift is -1.0"),
        ({"words": ["ab"], "lm_weight": 2.0}, "lm_weight is 2.0"),
        ({"frame_shift": "0.02"}, "frame_shift is '0.02'; it must be a number"),
        ({"words": ["ab"], "lm": uniform_ngram(["ab"]), "lm_weight": "1"}, "lm_weight is '1'; it must be a number"),
        ({"ngram": uniform_ngram(["ab"]), "graph_ngrams": "9"}, "graph_ngrams is '9'; it must be a number"),
        ({"ngram": 5}, "int is not an n-gram model; give a file or an NgramLM"),
        ({"words": ["ab", None]}, "word list: None is not a word"),
        ({"words": ["ab", ["b"]]}, "word list: ['b'] is not a word"),
        ({"words": 5}, "words is of type int; give a file, or a collection"),
        ({"lexicon": {"ab": None}}, "lexicon: None is not a spelling of 'ab'; give a string of tokens"),
        ({"lexicon": {"ab": [5]}}, "lexicon: [5] is not a spelling of 'ab'"),
        ({"lexicon": {5: "a b"}}, "lexicon: 5 is not a word"),
        ({"lexicon": 5}, "lexicon is of type int; give a file, a mapping or a Lexicon"),
        ({"blank": 1.5}, "the blank's column is 1.5"),
        ({"words": ["ab"], "graph_folder": 5}, "graph_folder is of type int; give the path of a folder"),
        ({"words": ["ab"], "piece_model": 5}, "piece_model is of type int; give a file, or a loaded model"),
        ({"words": ["ab"], "beam": 3.0}, "no argument or setting 'beam'"),
        ({"config": {"lm_scale": 2.0}}, "config is of type dict; give a CTCDecodingConfig, or its fields as keywords"),
        ({"words": ["ab"], "search_beam": 0.0}, "search_beam is 0.0"),
        ({"words": ["ab"], "beam_size": 0}, "beam_size is 0"),
        ({"words": ["ab"], "beam_size": 2.5}, "beam_size is 2.5"),
        ({"words": ["ab"], "beam_size": float("inf")}, "beam_size is inf"),
        ({"words": ["ab"], "beam_size": float("nan")}, "beam_size is nan"),
        ({"beam_size": 10**30}, "beam_size is 1000000000000000000000000000000; it must be a whole number"),
        ({"words": ["ab"], "max_active_states": 2.5}, "max_active_states is 2.5"),
        ({"words": ["ab"], "lm_scale": -1.0}, "lm_scale is -1.0"),
        ({"ngram": "nowhere.arpa"}, "nowhere.arpa: the language model cannot be read"),
        ({"words": ["ab"], "lm": "nowhere"}, "nowhere: there is no such language model"),
        ({"words": ["ab"], "lm": object()}, "object is not a language model"),
        (
            {"words": ["ab"], "lm": torch.nn.GRUCell(1, 1)},
            "GRUCell is a torch module without a list of words; give asr",
        ),
        ({"words": ["ab"], "lm": Lists(Vocabulary(["ab"]))}, "Lists.score, log_prob: for two queries it is a list"),
        ({"words": ["a"], "ngram": uniform_ngram(["x", "y"])}, "the model has none of the 1 words"),
        ({"words": ["a", "b"], "ngram": uniform_ngram(["A", "B"])}, "the model is in upper case"),
        ({"lexicon": {"ab": ["a", "b"], "b": "b"}}, "['a', 'b'] may be one spelling of 'ab' or 2 of one token each"),
        ({"token_lm": uniform_ngram(["x"])}, "the language model has none of the 3 tokens"),
        ({"token_lm": uniform_ngram(["a", "b", "ab"])}, "the language model lacks the word boundary '|'"),
        (
            {"words": ["ab"], "spell_unknown": True, "token_lm": uniform_ngram(["a", "ab"])},
            "token_lm: 1 of its words are not tokens of the network ('ab', ...)",
        ),
        ({"words": ["ab"], "lm": uniform_ngram(["ab"]), "lm_weight": 0.5}, "lm_weight is 0.5, but there is no n-gram"),
        ({"words": ["ab"], "lm": uniform_ngram(["ab"]), "lm_options": {"hidden_dtype": "int8"}}, "hidden_dtype has no"),
        (
            {
                "words": ["ab"],
                "lm": NETWORK,
                "lm_options": {"recombination": "best"},
            },
            "recombination has no eff",
        ),
        (
            {
                "words": ["ab"],
                "lm": NETWORK,
                "lm_options": {"recombination_length": 2, "recombination_window": 3},
            },
            "recombination_window has no effect without recombination_length and recombination 'best'",
        ),
    ],
)
def test_bad_arguments_are_told(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(AsrError) as error:
        CTCDecoder(SYMBOLS, warm_up=False, **arguments)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"tokens": CTCTokens(SYMBOLS), "blank": 0},
        {"tokens": CTCTokens(SYMBOLS), "word_boundary": "|"},
        {"tokens": CTCTokens(SYMBOLS), "kind": "letters"},
        {"tokens": CTCTokens(SYMBOLS), "piece_model": "bpe.model"},
        {"tokens": CTCTokens(SYMBOLS), "num_spellings": 1},
        {"words": WORDS, "lm_weight": 0.7},
        {"words": WORDS, "lm_options": {}},
        {"words": WORDS, "spelling_penalty": 0.0},
        {"words": WORDS, "graph_ngrams": 10},
        {"words": WORDS, "hot_word_score": 3.0},
        {"hot_words": ["a"]},
        {"words": WORDS, "context_beam": 6.0},
        {"words": WORDS, "lm": uniform_ngram(WORDS), "lm_fusion": "search", "context_beam": 5.0},
        {"words": WORDS, "num_spellings": 2},
        {"words": WORDS, "lm_fusion": "search"},
        {"words": WORDS, "beam_size": 50},
        {"words": WORDS, "config": CTCDecodingConfig(token_min_log_prob=-5.0)},
        {"lexicon": {"ab": "a b |"}, "num_spellings": 2},
        {"confidences": True},
        {"num_spellings": 2},
        {"graph_folder": "graphs"},
        {"max_active_states": 100},
        {"config": CTCDecodingConfig(output_beam=5.0)},
        {"lm_scale": 1.0},
    ],
    ids=" ".join,
)
def test_arguments_without_effect_are_refused(arguments: dict[str, Any]) -> None:
    name = list(arguments)[-1]
    if name == "config":
        name = "token_min_log_prob" if "words" in arguments else "output_beam"
    with pytest.raises(AsrError, match=f"^{name} has no effect here: .*; leave it out\\.$"):
        CTCDecoder(**{"tokens": SYMBOLS, **arguments}, warm_up=False)


def test_streams_refuse_what_they_lack() -> None:
    with pytest.raises(AsrError, match="the words of a stream have no confidences"):
        CTCDecoder(SYMBOLS, words=WORDS, confidences=True, warm_up=False).stream()
    with pytest.raises(AsrError, match="commit_seconds has no effect here"):
        CTCDecoder(SYMBOLS, frame_shift=0.01, warm_up=False).stream(commit_seconds=5.0)


def test_recurrent_model_runs_as_its_bundle_says(tiny_bundle_folder: Path) -> None:
    bundle = Bundle.load(tiny_bundle_folder)
    bundle.decoding["rnn"] = {"hidden_dtype": "int8", "search_beam": 9.0}

    def options_of(source: Any, **options: Any) -> CacheOptions:
        return model_maker(source, (), options)[0]().options  # type: ignore[attr-defined, no-any-return]

    assert (options_of(bundle).hidden_dtype, options_of(bundle).hidden_products) == ("int8", "float32")
    assert options_of(bundle, hidden_dtype="float16").hidden_dtype == "float16"
    assert options_of(bundle, capacity_bytes=None).capacity_bytes is None
    assert options_of(bundle).capacity_bytes == options_of(tiny_bundle_folder).capacity_bytes == 1 << 30
    assert bundle.rnn_lm is not None
    network = options_of(bundle.rnn_lm.network)
    assert (network.hidden_dtype, network.hidden_products) == ("float32", "int8")
    with pytest.raises(AsrError, match="no option 'hidden' of a recurrent model; there are hidden_dtype, "):
        options_of(bundle, hidden="int8")
    bundle.rnn_lm = None
    with pytest.raises(AsrError, match="no recurrent language model"):
        options_of(bundle)


@pytest.mark.parametrize("ways", ["a b", ("a", "b"), ["a b"], [("a", "b")], [["a", "b"]]])
def test_one_spelling_in_all_its_forms(ways: Any) -> None:
    tokens = CTCTokens(SYMBOLS)
    assert read_lexicon({"ab": ways}, tokens).pronunciations["ab"] == [("a", "b"), ("a", "b", "|")]
    several = read_lexicon({"a": ["a", "b"], "ab": ["a b"]}, tokens).pronunciations  # spellings are strings here
    assert several["a"] == [("a",), ("a", "|"), ("b",), ("b", "|")]


def test_bad_calls_are_told() -> None:
    decoder = CTCDecoder(SYMBOLS, words=WORDS, warm_up=False)
    log_prob = random_frames(5, 0)
    for call, message in [
        (lambda: decoder(log_prob, nbest=0), "nbest is 0"),
        (lambda: decoder(log_prob.exp()), "are probabilities"),
        (lambda: decoder.stream(commit_seconds=1.0), "commit_seconds needs the frame shift"),
        (lambda: decoder.stream(commit_seconds=0), "commit_seconds is 0; give seconds"),
        (lambda: decoder.stream(commit_seconds=0.1), "commit_seconds is 0.1; give seconds, 0.2 or more"),
        (lambda: decoder.stream(commit_seconds=math.nan), "commit_seconds is nan; give seconds"),
        (lambda: decoder.stream(commit_seconds="5"), "commit_seconds is '5'; give seconds"),  # type: ignore[arg-type]
        (lambda: CTCDecoder(SYMBOLS, device="gpu"), "device gpu: there is no such device"),
        (lambda: decoder.stream().accept(log_prob.unsqueeze(0)), "a stream reads one utterance"),
    ]:
        with pytest.raises(AsrError, match=message):
            call()
    assert len(decoder(log_prob, nbest=np.int64(2))) == 2  # type: ignore[arg-type]
    stream = decoder.stream()
    stream.finish()
    with pytest.raises(AsrError, match="the stream has ended"):
        stream.accept(log_prob)


def test_phones_without_a_lexicon_are_told() -> None:
    with pytest.raises(AsrError, match="give a lexicon with pronunciations"):
        CTCDecoder(["<blk>", "AA", "B"], words=["ab"], warm_up=False)


def test_kenlm_binary_is_told_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"mmap lm http://kheafield.com/code format version 5\n\0" + bytes(100))
    with pytest.raises(AsrError, match="does not list its n-grams"):
        CTCDecoder(SYMBOLS, ngram=path, warm_up=False)
    with pytest.raises(AsrError, match="KenLM"):
        CTCDecoder(SYMBOLS, words=WORDS, lm=path, warm_up=False)


def test_scores_of_kenlm(word_model: NgramLM, arpa_file: Callable[[NgramLM], Path]) -> None:
    pytest.importorskip("kenlm")
    from asr.ctc.language_models import KenLanguageModel

    theirs = KenLanguageModel(arpa_file(word_model), WORDS)
    context = theirs.start(1)
    total = 0.0
    for word in ("a", "ab", "zzz", "b"):
        score, context = theirs.score(context, theirs.vocabulary.ids_of([word]))
        total += float(score)
    total += float(theirs.final(context))
    assert np.isclose(total, sentence_score(word_model)(["a", "ab", "zzz", "b"]), atol=1e-4)
    contexts = []
    for first in ("a", "b"):  # what the model remembers is the same then, and so is the context
        context = theirs.start(1)
        for word in (first, "ab", "b", "a", "ab"):
            _, context = theirs.score(context, theirs.vocabulary.ids_of([word]))
        contexts.append(int(context))
    assert contexts[0] == contexts[1] and theirs.order < 5
    few = KenLanguageModel(arpa_file(word_model), WORDS)
    few._forget_from = few._forget_at = 1
    few.retain(few.start(1))
    for _ in range(2):  # what was forgotten is found again, under one number
        _, found = few.score(few.start(2), few.vocabulary.ids_of(["a", "a"]))
        assert found.tolist() == [1, 1]
        few.retain(few.start(1))


def test_graphs_are_kept_in_a_folder(tmp_path: Path, word_model: NgramLM, forget_graphs: Callable[[], None]) -> None:
    log_prob = random_frames(12, 5)
    steps: list[str] = []
    wanted = None
    for is_kept in (False, True):
        decoder = CTCDecoder(
            SYMBOLS, ngram=word_model, warm_up=False, graph_folder=tmp_path / "graphs", progress=steps.append
        )
        wanted = wanted or decoder(log_prob)
        assert decoder(log_prob) == wanted and bool(steps) != is_kept
        forget_graphs()
        steps.clear()
    # Each graph with the n-gram model inside it.
    assert [path.suffix for path in sorted((tmp_path / "graphs").iterdir())] == [".ngram", ".safetensors"]
    CTCDecoder(SYMBOLS, ngram=word_model, words=["a", "b"], warm_up=False, graph_folder=tmp_path / "graphs")
    assert len(list((tmp_path / "graphs").glob("*.safetensors"))) == 2


def test_a_folder_for_graphs_that_fails_is_told_and_does_no_harm(
    tmp_path: Path, word_model: NgramLM, caplog: pytest.LogCaptureFixture, forget_graphs: Callable[[], None]
) -> None:
    log_prob = random_frames(12, 5)
    wanted = CTCDecoder(SYMBOLS, ngram=word_model, warm_up=False)(log_prob)

    def decoded(folder: Path) -> Any:
        caplog.clear()
        forget_graphs()
        return CTCDecoder(SYMBOLS, ngram=word_model, warm_up=False, graph_folder=folder)(log_prob)

    (tmp_path / "file").touch()
    assert decoded(tmp_path / "file" / "graphs") == wanted
    assert "the graph is not kept there (" in caplog.text
    assert decoded(tmp_path) == wanted and not caplog.text
    (graph,) = tmp_path.glob("*.safetensors")
    graph.write_bytes(graph.read_bytes()[:1000])
    assert decoded(tmp_path) == wanted
    assert "The graph is compiled again." in caplog.text
    assert decoded(tmp_path) == wanted and not caplog.text


def test_a_word_may_be_found_in_a_spelling_of_more_pieces() -> None:
    symbols = ["<blk>", "▁ab", "▁a", "b", "▁c"]
    log_probs = torch.full((4, 5), -8.0).scatter(1, torch.tensor([[2], [3], [0], [0]]), 0.0).log_softmax(1)
    for num_spellings, text, pieces in ((1, "", ()), (2, "ab", ("▁a", "b"))):
        decoder = CTCDecoder(symbols, words=["ab", "c"], num_spellings=num_spellings, warm_up=False, **OPEN)
        (best,) = decoder(log_probs)
        assert best.text == text  # no words are better than one that the frames do not spell
        assert tuple(token.text for token in best.tokens) == pieces


def test_decoders_and_streams_that_change_into_and_out_of_inference_mode() -> None:
    network = ToyNetwork(len(WORDS))
    network.vocabulary = Vocabulary(WORDS)
    log_probs = random_frames(12, seed=3)
    expected = CTCDecoder(SYMBOLS, words=WORDS, lm=CachedRNNLM(network), warm_up=False)(log_probs)[0]
    with torch.inference_mode():
        decoder = CTCDecoder(SYMBOLS, words=WORDS, lm=CachedRNNLM(network), warm_up=False)
        stream = decoder.stream()
        assert decoder(log_probs)[0] == expected
        stream.accept(log_probs[:6])
    assert decoder(log_probs)[0] == expected
    stream.accept(log_probs[6:])
    assert stream.finish().text == expected.text


def test_equivalent_words_are_the_same(ngram_of: Callable[..., NgramLM]) -> None:
    """Composed in the n-gram model, decomposed in list, lexicon and hot words: the words are those of the model."""
    composed, decomposed = "é", "e\u0301"
    model = ngram_of([composed, "a"], [composed, "a"], order=1)
    for source in ({}, {"words": [decomposed, "a"]}, {"lexicon": {decomposed: "é", "a": "a"}}):
        decoder = CTCDecoder(["-", "é", "a"], ngram=model, hot_words=[decomposed], warm_up=False, **source)
        assert decoder.word_graph is not None
        assert set(decoder.word_graph.lexicon.pronunciations) == {composed, "a"}
        assert decoder.word_graph.ngram.vocabulary == model.vocabulary


@pytest.mark.parametrize("seed", range(3))
def test_words_without_spaces_against_enumeration(seed: int, ngram_of: Callable[..., NgramLM]) -> None:
    """Pieces: characters without marks beside marked ones. Letters: the boundary is optional."""
    words = ["今", "今天", "天", "b"]
    model = ngram_of(["今 今天", "天 b 天", "今天 天"], words, order=2)
    decoder = CTCDecoder(["-", "今", "天", "▁b"], ngram=model, warm_up=False, lm_scale=0.7, **OPEN)
    log_prob = random_frames(5, seed)
    spelled = {"今": [(1,)], "今天": [(1, 2)], "天": [(2,)], "b": [(3,)]}
    wanted = best_word_sequences(
        log_prob.double().numpy(), spelled, sentence_score(model), 0.7, 0.0, boundary=None, max_words=5
    )
    found = decoder(log_prob, nbest=3)
    assert len(found) == 3 and close(found, wanted)
    letters: dict[str, Any] = {"tokens": ["-", "今", "天", "|"], "ngram": model, "warm_up": False, **OPEN}
    by_lexicon = CTCDecoder(lexicon={"今": "今", "今天": "今 天", "天": "天"}, **letters)
    for one, other in zip(CTCDecoder(**letters)(log_prob, nbest=3), by_lexicon(log_prob, nbest=3), strict=True):
        assert (one.text, one.words, one.score) == (other.text, other.words, pytest.approx(other.score))
