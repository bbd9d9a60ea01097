"""Prefix beam search against the enumeration of all paths."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from asr.ctc import CTCDecoder, CTCDecodingConfig, CTCTokens
from asr.ctc.frames import as_frames
from asr.ctc.language_models import LentModels
from asr.ctc.prefix_beam import PrefixBeam, in_order, read_chunks
from asr.ctc.prefix_search import PrefixSearch, token_rules
from asr.ctc.word_models import uniform_ngram
from asr.lm.interface import LanguageModel
from asr.lm.ngram.model import NgramLM
from asr.text.symbols import Vocabulary
from tests.ctc.oracle import best_token_sequences, sums_of_texts

SYMBOLS = ["-", "a", "b", "|"]
OPEN = {"search_beam": 1e9, "beam_size": 10_000, "token_min_log_prob": -1e9}


def random_frames(num_frames: int, seed: int, num_tokens: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randn((num_frames, num_tokens), generator=generator)).log_softmax(1)


def search(lm: NgramLM | None, compiled: bool, **settings: float) -> PrefixSearch:
    models = LentModels(None if lm is None else lambda: lm, False)
    config = CTCDecodingConfig(**(OPEN | settings))  # type: ignore[arg-type]
    return PrefixSearch(CTCTokens(SYMBOLS), config, models, None, compiled)


def token_model(ngram_of: Callable[..., NgramLM]) -> NgramLM:
    return ngram_of(["a b |", "a | b b", "b a", "b | a a |"], ["a", "b", "|"], order=3)


def letters_text(tokens: Sequence[int]) -> str:
    return " ".join("".join([SYMBOLS[token] for token in tokens]).replace("|", " ").split())


def score_of(lm: NgramLM) -> Callable[[tuple[int, ...]], float]:
    return lambda tokens: float(lm.score_sentence([SYMBOLS[token] for token in tokens]).double().sum())


class NoTables(LanguageModel):
    """The same model as one that only answers calls."""

    def __init__(self, lm: NgramLM) -> None:
        self._lm = lm

    @property
    def vocabulary(self) -> Vocabulary:
        return self._lm.vocabulary

    def start(self, num_streams: int) -> torch.Tensor:
        return self._lm.start(num_streams)

    def score(self, context_idx: torch.Tensor, word_id: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._lm.score(context_idx, word_id)

    def final(self, context_idx: torch.Tensor) -> torch.Tensor:
        return self._lm.final(context_idx)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_sums_of_paths_without_a_language_model(compiled: bool, seed: int) -> None:
    log_prob = random_frames(5, seed)
    wanted = best_token_sequences(log_prob.double().numpy(), lambda tokens: 0.0, 0.0, 0.0, SYMBOLS.index("|"))
    beam = PrefixBeam(search(None, compiled)._rules, 0, compiled)
    read_chunks([beam], [log_prob.numpy()], None)
    found = {tuple(beam.characters(each.prefix)[0].tolist()): each.total for each in beam.alive()}
    assert found == pytest.approx({tokens: score for score, tokens in wanted}, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_language_model_and_insertion(compiled: bool, seed: int, ngram_of: Callable[..., NgramLM]) -> None:
    log_prob, lm = random_frames(5, seed), token_model(ngram_of)
    sequences = best_token_sequences(log_prob.double().numpy(), score_of(lm), 0.7, 0.3, None)
    wanted = sums_of_texts(sequences, letters_text)
    for model in (lm, NoTables(lm)):
        searcher = search(model, compiled, lm_scale=0.7, word_insertion_penalty=0.3)  # type: ignore[arg-type]
        frames = as_frames(log_prob, None, searcher.tokens, "log_probs", torch.device("cpu"))
        (found,) = searcher.decode(frames, 10_000)
        assert {each.text: each.score for each in found} == pytest.approx(wanted, abs=1e-4)
        scores = [each.score for each in found]
        assert scores == sorted(scores, reverse=True)
        assert searcher.decode(frames, 3)[0] == found[:3]
        for each in found:
            tokens = next(tokens for _, tokens in sequences if letters_text(tokens) == each.text)
            assert [SYMBOLS.index(token.text) for token in each.tokens] == list(tokens)
            assert each.lm_score == pytest.approx(score_of(lm)(tokens), abs=1e-4)
            assert each.score == pytest.approx(each.am_score + 0.7 * each.lm_score + 0.3 * len(tokens), abs=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("symbols", "options"),
    [
        (SYMBOLS, {}),
        (["<pad>", "|", "a", "<unk>"], {}),
        (["-", "s", "h", "sh"], {"kind": "letters"}),
        (["-", "▁", "▁a", "a", "b"], {}),
        (["[PAD]", "a", "##a", "##aa"], {}),
        (["-", "▁", "<0xC3>", "<0xA9>", "é"], {"kind": "pieces"}),
        (["-", "AH", "B", "D"], {}),
        (["-", "|", "AH", "B"], {"kind": "phones", "word_boundary": "|"}),
    ],
)
def test_scores_are_sums_over_all_paths_of_a_text(symbols: list[str], options: dict[str, Any], compiled: bool) -> None:
    def text_of(entries: Sequence[int]) -> str:
        written = [tokens.table.tokens[entry] for entry in entries]
        if tokens.kind == "phones":
            return " ".join([symbol.replace("|", "") for symbol in written]).strip()
        if "##a" in symbols:
            written = [symbol.removeprefix("##") if symbol.startswith("##") else f" {symbol}" for symbol in written]
        text = "".join(written).replace("▁", " ").replace("|", " ").replace("<unk>", "").replace("<0xC3><0xA9>", "é")
        return " ".join(re.sub("<0x..>", "\N{REPLACEMENT CHARACTER}", text).split())

    tokens = CTCTokens(symbols, **options)
    searcher = PrefixSearch(tokens, CTCDecodingConfig(**OPEN), LentModels(None, False), None, compiled)  # type: ignore[arg-type]
    for seed in range(3):
        log_prob = random_frames(5, seed, len(symbols))
        sequences = best_token_sequences(log_prob.double().numpy(), lambda tokens: 0.0, 0.0, 0.0, tokens.boundary_id)
        frames = as_frames(log_prob, None, tokens, "log_probs", torch.device("cpu"))
        found = {each.text.strip(): each.score for each in searcher.decode(frames, 10_000)[0]}
        wanted = sums_of_texts(sequences, text_of)
        assert found.keys() == wanted.keys()
        # Bytes that are not UTF-8 are told apart, though they have the same text.
        valid = {text for text in wanted if "\N{REPLACEMENT CHARACTER}" not in text}
        assert {text: found[text] for text in valid} == pytest.approx({text: wanted[text] for text in valid}, abs=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_boundary_that_adds_nothing_costs_nothing(compiled: bool) -> None:
    """Whatever the penalty of tokens, it is no reason to prune it."""
    searcher = search(None, compiled, word_insertion_penalty=-20.0, search_beam=5.0)
    half = math.log(0.5)
    log_prob = torch.tensor([[-99.0, 0.0, -99.0, -99.0], [-99.0, -99.0, -99.0, 0.0], [0.0, -99.0, -99.0, -99.0]])
    log_prob = torch.cat([log_prob, torch.tensor([[half, -99.0, -99.0, half]])])
    frames = as_frames(log_prob, None, searcher.tokens, "log_probs", torch.device("cpu"))
    (best,) = searcher.decode(frames, 1)[0]
    assert (best.text, best.score) == ("a", pytest.approx(-40.0))


@pytest.mark.slow
def test_bounded_beams_agree_between_forms(ngram_of: Callable[..., NgramLM]) -> None:
    lm = token_model(ngram_of)
    for seed, (beam_size, search_beam) in enumerate(itertools.product((1, 3, 8), (1.0, 4.0, 50.0))):
        log_prob = random_frames(30, seed)
        answers = []
        for compiled, model in itertools.product((False, True), (lm, NoTables(lm))):
            searcher = search(model, compiled, beam_size=beam_size, search_beam=search_beam, token_min_log_prob=-6.0)  # type: ignore[arg-type]
            frames = as_frames(log_prob, None, searcher.tokens, "log_probs", torch.device("cpu"))
            answers.append(searcher.decode(frames, 3)[0])
        texts = [[(hyp.text, hyp.tokens) for hyp in hyps] for hyps in answers]
        assert texts.count(texts[0]) == len(texts)
        assert all(len(hyps) <= 3 for hyps in answers)


def test_never_more_alive_than_the_beam_allows() -> None:
    rules = token_rules(CTCTokens(SYMBOLS), CTCDecodingConfig(beam_size=4, search_beam=3.0), None)
    beam = PrefixBeam(rules)
    for frame in random_frames(20, 7).split(1):
        read_chunks([beam], [frame.numpy()], None)
        alive = beam.prefixes.count[1]
        scores = beam.prefixes.score[:alive]
        assert 1 <= alive <= 4
        assert scores.max() - scores.min() <= 3.0


def test_room_grows_and_old_prefixes_are_forgotten() -> None:
    log_prob = random_frames(60, 3).numpy()
    rules = token_rules(CTCTokens(SYMBOLS), CTCDecodingConfig(beam_size=20, token_min_log_prob=-1e9), None)
    whole = PrefixBeam(rules)
    read_chunks([whole], [log_prob], None)
    pieces = PrefixBeam(rules, first_room=128, compact_at=150)
    for begin in range(0, 60, 7):
        read_chunks([pieces], [log_prob[begin : begin + 7]], None)
    assert len(pieces.prefixes.parent) > 128
    assert pieces.prefixes.count[0] < whole.prefixes.count[0]
    told = [
        [(np.stack(beam.characters(each.prefix)).tolist(), each.total) for each in beam.alive()]
        for beam in (whole, pieces)
    ]
    assert told[0] == told[1]


@pytest.mark.slow
def test_batch_and_stream_equal_single(ngram_of: Callable[..., NgramLM]) -> None:
    lm = token_model(ngram_of)
    for model in (lm, NoTables(lm)):
        decoder = CTCDecoder(SYMBOLS, token_lm=model, warm_up=False, frame_shift=0.02)  # type: ignore[arg-type]
        log_probs = torch.stack([random_frames(20, seed) for seed in range(4)])
        lengths = torch.tensor([20, 7, 0, 13])
        batch = decoder(log_probs, lengths, nbest=2)
        for utterance, length, hypotheses in zip(log_probs, lengths, batch, strict=True):
            assert decoder(utterance[:length], nbest=2) == hypotheses
            stream = decoder.stream()
            for chunk in utterance[:length].split(3):
                stream.accept(chunk)
                stream.partial()
            assert stream.finish() == hypotheses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "symbols", [SYMBOLS, ["-", "▁a", "b", "▁"], ["-", "AH", "B", "D"], ["-", "▁", "<0xC3>", "<0xA9>"]]
)
def test_partial_results_are_made_of_the_last_ones(symbols: list[str]) -> None:
    decoder = CTCDecoder(symbols, warm_up=False, beam_size=4, frame_shift=0.5)
    num_kept = 0
    for seed in range(10):
        log_probs = (2.0 * random_frames(60, seed)).log_softmax(1)
        stream = decoder.stream()
        earlier = stream.partial()
        for begin in range(0, 60, 3):
            stream.accept(log_probs[begin : begin + 3])
            found = stream.partial()
            anew = decoder.stream()
            anew.accept(log_probs[: begin + 3])
            assert found == anew.partial()
            pairs = [*zip(earlier.tokens, found.tokens, strict=False), *zip(earlier.words, found.words, strict=False)]
            num_kept += sum(one is other for one, other in pairs)
            earlier = found
    assert num_kept > 1000


@pytest.mark.slow
def test_a_long_stream_is_not_compacted_in_vain() -> None:
    rules = token_rules(CTCTokens(SYMBOLS), CTCDecodingConfig(beam_size=2), None)
    beam = PrefixBeam(rules)
    # A prefix of "|" at the end is lost in each frame.
    alternating = torch.tensor([-30.0, -30.0, -30.0, -4.0]).repeat(300_000, 1)
    alternating[::2, 1] = alternating[1::2, 2] = -0.02
    read_chunks([beam], [alternating.numpy()], None)
    beam.begin()
    for _ in range(3):
        read_chunks([beam], [alternating[:100].numpy()], None)
        num = int(beam.prefixes.count[0])
        beam.begin()
        assert beam.prefixes.count[0] == num > 300_000


@pytest.mark.slow
def test_old_prefixes_are_forgotten_within_a_chunk() -> None:
    rules = token_rules(CTCTokens(SYMBOLS), CTCDecodingConfig(beam_size=300), None)
    log_prob = (3.0 * random_frames(3000, 0)).log_softmax(1).numpy()
    beam, pieces = PrefixBeam(rules), PrefixBeam(rules)
    read_chunks([beam], [log_prob], None)
    for part in np.split(log_prob, 10):
        read_chunks([pieces], [part], None)
    assert beam.prefixes.count[0] < 330_000
    assert [each.total for each in beam.alive()] == [each.total for each in pieces.alive()]


@pytest.mark.parametrize("symbols", [SYMBOLS, ["-", "▁a", "b", "▁"]])
@pytest.mark.parametrize("asks_always", [True, False])
def test_stable_words_are_those_of_all_prefixes(symbols: list[str], asks_always: bool) -> None:
    decoder = CTCDecoder(symbols, warm_up=False, beam_size=2)
    most = 0
    for seed in range(5):
        stream, seen = decoder.stream(), []
        for number, chunk in enumerate((4.0 * random_frames(60, seed)).log_softmax(1).split(4)):
            stream.accept(chunk)
            if not asks_always and number % 3:
                continue
            beam = stream._reader._beam  # type: ignore[union-attr]
            alive = [beam.characters(each.prefix)[0].tolist() for each in beam.alive()]
            shared = [chars[0] for chars in zip(*alive, strict=False) if len(set(chars)) == 1]
            while any(prefix[: len(shared)] != shared for prefix in alive):
                shared.pop()
            num = stream.num_stable_words
            assert num == max(0, len(decoder.tokens.group(shared)) - 1)
            seen.append([word.text for word in stream.partial().words[:num]])
        final = [word.text for word in stream.finish().words]
        most = max(most, len(seen[-1]))
        assert all(words == final[: len(words)] for words in seen)
    assert most > 3


def test_stable_words_of_phones_are_the_shared_phones() -> None:
    decoder = CTCDecoder(["-", "AH", "K", "T"], kind="phones", blank=0, warm_up=False, beam_size=2)
    stream, most = decoder.stream(), 0
    for chunk in (4.0 * random_frames(60, 0)).log_softmax(1).split(4):
        stream.accept(chunk)
        beam = stream._reader._beam  # type: ignore[union-attr]
        num = stream.num_stable_words
        assert num == max(most, len(beam.shared_path()) - 1)
        most = num
    assert most > 10


def test_words_and_times_of_a_clear_text(frames_of: Callable[..., torch.Tensor]) -> None:
    symbols = ["-", "|", *"ehlotw"]
    decoder = CTCDecoder(symbols, warm_up=False, frame_shift=0.5)
    best = decoder(frames_of(symbols, list("hello|two"), strength=12.0))[0]
    assert best.text == "hello two"
    assert [(word.start_frame, word.end_frame, word.start, word.end) for word in best.words] == [
        (0, 9, 0.0, 4.5),
        (12, 17, 6.0, 8.5),
    ]
    assert np.isclose(best.score, best.am_score)
    best = decoder(frames_of(symbols, list("|hello||two|"), strength=12.0))[0]
    assert [(word.text, word.start_frame, word.end_frame) for word in best.words] == [("hello", 2, 11), ("two", 16, 21)]
    assert [(token.text, token.start_frame) for token in best.tokens] == [
        *zip("hello|two|", (2, 4, 6, 8, 10, 12, 16, 18, 20, 22), strict=True)
    ]


@pytest.mark.parametrize("num_tokens", [2, 4])
def test_times_of_tokens_and_words_are_in_order(num_tokens: int) -> None:
    decoder = CTCDecoder(SYMBOLS[:num_tokens], warm_up=False)
    for seed in range(20):
        for best in decoder(random_frames(30, seed, num_tokens), nbest=5):
            for runs in (best.tokens, best.words):
                frames = [frame for run in runs for frame in (run.start_frame, run.end_frame)]
                assert frames == sorted(frames)
                assert all(run.start_frame < run.end_frame for run in runs)
                assert min(frames, default=0) >= 0 and max(frames, default=0) <= 30


def test_frames_in_order() -> None:
    for begin, end, first, last in (
        ([], [], [], []),
        ([4], [6], [4], [6]),
        ([0, 2, 7], [1, 5, 9], [0, 2, 7], [1, 5, 9]),
        ([0, 2, 3], [4, 9, 3], [0, 2, 3], [2, 3, 4]),
        ([0, 5, 4, 4], [1, 6, 5, 5], [0, 2, 3, 4], [1, 3, 4, 5]),
    ):
        assert [frames.tolist() for frames in in_order(begin, end)] == [first, last]


def test_bytes_of_pieces_are_text() -> None:
    symbols = ["<blk>", "▁caf", "<0xC3>", "<0xA9>", "s"]
    log_probs = torch.full((4, 5), -20.0).scatter(1, torch.tensor([[1], [2], [3], [4]]), 0.0)
    assert CTCDecoder(symbols, warm_up=False)(log_probs)[0].text == "cafés"


def test_a_model_whose_search_failed_is_not_lent_again(ngram_of: Callable[..., NgramLM]) -> None:
    made: list[NgramLM] = []

    def make() -> NgramLM:
        made.append(token_model(ngram_of))
        return made[-1]

    models = LentModels(make, False)
    with models.lent() as first:
        pass
    with models.lent() as again:
        assert again is first is made[0]
    with pytest.raises(KeyboardInterrupt), models.lent():
        raise KeyboardInterrupt
    with models.lent() as other:
        assert other is not first and len(made) == 2


def test_tokens_that_the_language_model_lacks_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Letters in another case beside a boundary that both have, for example; equivalent tokens are the same."""
    CTCDecoder(["-", "|", "é", "A"], token_lm=uniform_ngram(["|", "e\u0301", "a"]), warm_up=False)
    assert "the language model lacks 1 of the 3 tokens (A); they have the probability of its <unk>" in caplog.text


def test_texts_differ_in_white_space_of_any_kind() -> None:
    symbols = ["-", "a", "\u3000"]
    log_prob = (2.0 * torch.randn((4, 3), generator=torch.Generator().manual_seed(5))).log_softmax(1)
    tokens = CTCTokens(symbols)
    decoder = CTCDecoder(tokens, warm_up=False, beam_size=1000, search_beam=1e9, token_min_log_prob=-1e9)
    sequences = best_token_sequences(log_prob.double().numpy(), lambda tokens: 0.0, 0.0, 0.0, None)
    wanted = sums_of_texts(sequences, lambda found: " ".join("a" * (end - begin) for begin, end in tokens.group(found)))
    for hypothesis in decoder(log_prob, nbest=4):
        assert hypothesis.score == pytest.approx(wanted[hypothesis.text], abs=1e-4)
    assert "a a" in wanted
