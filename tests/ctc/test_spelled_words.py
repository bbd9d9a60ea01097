"""Words outside the list, spelled: scores joined from the word model's `<unk>` and the spelling model."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("kaldifst", reason="compiling graphs needs kaldifst")

from asr.ctc import CTCDecoder
from asr.ctc.word_models import ngram_of_spellings, with_unlisted_as_unknown
from asr.errors import AsrError
from asr.lm.ngram.model import NgramLM

pytestmark = pytest.mark.slow

SYMBOLS = ["-", "|", *"abcdeo"]
WORDS = ["abode", "bead", "code", "decode"]


@pytest.fixture
def word_model(ngram_of: Callable[..., NgramLM]) -> NgramLM:
    return ngram_of(["bead code", "decode bead <unk> abode", "<unk> code", "abode"], WORDS, order=2)


@pytest.mark.parametrize("kind", ["letters", "pieces"])
def test_unknown_words_are_spelled_and_known_ones_are_not(
    kind: str, word_model: NgramLM, frames_of: Callable[..., torch.Tensor]
) -> None:
    symbols = SYMBOLS if kind == "letters" else ["-", *(f"▁{x}" for x in "abcdeo"), *"abcdeo"]

    def tokens_of(text: str) -> list[str]:
        if kind == "letters":
            return list(text.replace(" ", "|"))
        return [symbol for word in text.split() for symbol in (f"▁{word[0]}", *word[1:])]

    decoder = CTCDecoder(symbols, ngram=word_model, spell_unknown=True, warm_up=False, frame_shift=1.0)
    closed = CTCDecoder(symbols, ngram=word_model, warm_up=False)
    for text in ("bead code", "bead dodo code", "cab", "adobe adobe", "abode dabbed"):
        log_prob = frames_of(symbols, tokens_of(text), strength=12.0)
        best = decoder(log_prob)[0]
        assert best.text == text
        assert [word.is_spelled for word in best.words] == [word not in WORDS for word in text.split()]
        starts = [word.start_frame for word in best.words]
        ahead = [tokens_of(" ".join([*text.split()[:n], "x"])) for n in range(len(text.split()))]
        assert starts == [2 * (len(tokens) - 1) for tokens in ahead]
        stream = decoder.stream()
        for chunk in log_prob.split(5):
            stream.accept(chunk)
        assert stream.finish().text == text
        if any(word not in WORDS for word in text.split()):
            assert closed(log_prob)[0].text != text


@pytest.mark.parametrize("symbols", [SYMBOLS, [*SYMBOLS, *"ABCDEO,"]])
def test_unknown_words_are_in_the_letter_case_of_the_list(
    symbols: list[str], frames_of: Callable[..., torch.Tensor]
) -> None:
    listed = [word.upper() for word in WORDS]
    decoder = CTCDecoder(symbols, words=listed, spell_unknown=True, warm_up=False)
    for text in ("bead|dodo|code", "Bead,|doDO|code") if "B" in symbols else ("bead|dodo|code",):
        best = decoder(frames_of(symbols, list(text), strength=12.0))[0]
        assert best.text == "BEAD DODO CODE"
        assert [word.is_spelled for word in best.words] == [False, True, False]


def test_a_model_without_unknown_words_spells_none(tmp_path: Path) -> None:
    ngram = tmp_path / "closed.arpa"
    ngram.write_text("\\data\\\nngram 1=4\n\n\\1-grams:\n-99 <s>\n-1 </s>\n-1 bead\n-1 code\n\n\\end\\\n")
    with pytest.raises(AsrError, match=r"closed\.arpa: spell_unknown has no effect here: the model has no <unk>"):
        CTCDecoder(SYMBOLS, ngram=ngram, spell_unknown=True, warm_up=False)
    # A word of the model that is not listed, or a penalty that makes up for its score, gives <unk> a probability.
    CTCDecoder(SYMBOLS, ngram=ngram, words=["bead"], spell_unknown=True, warm_up=False)
    CTCDecoder(SYMBOLS, ngram=ngram, spell_unknown=True, spelling_penalty=225.0, warm_up=False)


@pytest.mark.parametrize("listed", [["今天", "HELLO"], ["HELLO"]])
def test_characters_of_scripts_without_spaces_begin_spelled_words(
    listed: list[str], frames_of: Callable[..., torch.Tensor]
) -> None:
    symbols = ["-", *"今天气很", "▁HE", "LLO"]
    decoder = CTCDecoder(symbols, words=listed, spell_unknown=True, spelling_penalty=3.0, warm_up=False)
    best = decoder(frames_of(symbols, ["今", "天", "▁HE", "LLO", "很"], strength=20.0))[0]
    assert [(word.text, word.start_frame, word.end_frame, word.is_spelled) for word in best.words] == [
        ("今天", 0, 3, "今天" not in listed),
        ("HELLO", 4, 7, False),
        ("很", 8, 9, True),
    ]


def test_a_lone_mark_is_no_spelled_word(word_model: NgramLM, frames_of: Callable[..., torch.Tensor]) -> None:
    symbols = ["-", "▁", "▁b", *"abcdeo"]
    decoder = CTCDecoder(symbols, ngram=word_model, spell_unknown=True, spelling_penalty=3.0, warm_up=False)
    best = decoder(frames_of(symbols, ["▁b", "e", "a", "d", "▁", "c", "a", "b"], strength=12.0))[0]
    assert [(word.text, word.start_frame, word.is_spelled) for word in best.words] == [
        ("bead", 0, False),
        ("cab", 8, True),
    ]
    for hypothesis in decoder(frames_of(symbols, ["▁b", "e", "▁", "▁b", "a", "▁"], strength=4.0), nbest=30):
        entries = [symbols.index(token.text) for token in hypothesis.tokens]
        groups = [decoder.tokens.text_of(*entries[begin:end]) for begin, end in decoder.tokens.group(entries)]
        assert hypothesis.text.split() == groups


def test_score_is_that_of_the_word_model_and_of_the_spelling(
    word_model: NgramLM, frames_of: Callable[..., torch.Tensor]
) -> None:
    decoder = CTCDecoder(
        SYMBOLS, ngram=word_model, spell_unknown=True, spelling_penalty=-0.5, warm_up=False, lm_scale=1.0
    )
    best = decoder(frames_of(SYMBOLS, list("bead|cab|code"), strength=14.0))[0]
    assert best.text == "bead cab code"
    arrays, bead = word_model.arrays, word_model.vocabulary.ids_of(["bead"])
    first, context = word_model.score(word_model.start(1), bead)
    unknown = arrays.backoff_score[context] + arrays.arc_score(torch.tensor([3]))
    last, context = word_model.score(arrays.dst_state[3:4].long(), word_model.vocabulary.ids_of(["code"]))
    words = torch.cat([first, unknown, last, word_model.final(context)])
    spelling = ngram_of_spellings([list(word) for word in WORDS], list("abcdeo"), 4).score_sentence(list("cab"))
    assert best.lm_score == pytest.approx(float(words.sum() + spelling.sum()) - 0.5, abs=2e-3)


def test_penalty_decides_how_often(word_model: NgramLM, frames_of: Callable[..., torch.Tensor]) -> None:
    log_prob = frames_of(SYMBOLS, list("bead|coded|code"), strength=5.0)
    texts = []
    for penalty in (20.0, -60.0):
        decoder = CTCDecoder(SYMBOLS, ngram=word_model, spell_unknown=True, spelling_penalty=penalty, warm_up=False)
        texts.append([word.is_spelled for word in decoder(log_prob)[0].words])
    assert all(texts[0])
    assert not any(texts[1])


def test_listed_words_are_not_out_of_vocabulary_however_they_were_found(
    word_model: NgramLM, frames_of: Callable[..., torch.Tensor]
) -> None:
    decoder = CTCDecoder(SYMBOLS, ngram=word_model, spell_unknown=True, spelling_penalty=8.0, warm_up=False)
    best = decoder(frames_of(SYMBOLS, list("bead|cab"), strength=20.0))[0]
    assert [(word.text, word.is_spelled) for word in best.words] == [("bead", False), ("cab", True)]


def test_own_model_of_spellings(
    word_model: NgramLM, ngram_of: Callable[..., NgramLM], frames_of: Callable[..., torch.Tensor]
) -> None:
    letters = ngram_of(["d o d o", "c a b"], list("abcdeo"), order=2)
    decoder = CTCDecoder(SYMBOLS, ngram=word_model, spell_unknown=True, token_lm=letters, warm_up=False)
    assert decoder(frames_of(SYMBOLS, list("bead|dodo"), strength=12.0))[0].text == "bead dodo"


def test_model_of_spellings_with_a_history_that_never_backs_off(
    word_model: NgramLM, ngram_of: Callable[..., NgramLM], frames_of: Callable[..., torch.Tensor]
) -> None:
    letters = ngram_of(["a b c d", "d b d", "c d d a", "a d b a", "d b d a", "d", "a"], list("abcd"), order=2)
    assert bool(letters.arrays.backoff_score.isneginf().any())
    decoder = CTCDecoder(SYMBOLS, ngram=word_model, spell_unknown=True, token_lm=letters, warm_up=False)
    assert decoder(frames_of(SYMBOLS, list("bead|dbd"), strength=12.0))[0].text == "bead dbd"


def test_a_kept_graph_keeps_its_model_of_spellings(word_model: NgramLM, ngram_of: Callable[..., NgramLM]) -> None:
    """Another model could otherwise get the same id, and with it the graph."""
    letters = ngram_of(["d o d o", "c a b"], list("abcdeo"), order=2)
    alive = weakref.ref(letters)
    CTCDecoder(SYMBOLS, ngram=word_model, spell_unknown=True, token_lm=letters, warm_up=False)
    del letters
    gc.collect()
    assert alive() is not None


def test_unlisted_words_count_as_unknown_and_nothing_else_changes(word_model: NgramLM) -> None:
    arrays = word_model.arrays
    unigram = {word: float(arrays.arc_score(torch.tensor([at]))) for at, word in enumerate(word_model.vocabulary.words)}
    for listed in (WORDS, ["bead", "code"]):
        plain = with_unlisted_as_unknown(word_model, listed)
        for sentence in (["bead", "code"], ["code"], ["code", "bead", "bead"]):
            assert torch.equal(plain.score_sentence(sentence), word_model.score_sentence(sentence))
        unknown = sum(math.exp(unigram[word]) for word in {"<unk>", *WORDS} - {*listed})
        assert float(plain.arrays.score[3]) == pytest.approx(math.log(unknown), abs=1e-5)
        longer = plain.arrays.label[len(plain.vocabulary) :] == 3
        assert bool((plain.arrays.score[len(plain.vocabulary) :][longer] == -math.inf).all())


def test_words_outside_the_list_are_spelled_as_often_as_the_model_has_them(
    word_model: NgramLM, frames_of: Callable[..., torch.Tensor]
) -> None:
    log_prob = frames_of(SYMBOLS, list("bead|cab|bead"), strength=14.0)
    scores = []
    for words in (WORDS, ["bead", "code"]):
        decoder = CTCDecoder(SYMBOLS, words=words, ngram=word_model, spell_unknown=True, warm_up=False, lm_scale=1.0)
        best = decoder(log_prob)[0]
        assert best.text == "bead cab bead"
        spelling = ngram_of_spellings([list(word) for word in words], list("abcdeo"), 4).score_sentence(list("cab"))
        scores.append(best.lm_score - float(spelling.sum()))
    unigram = word_model.arrays.arc_score(torch.arange(len(word_model.vocabulary)))
    unlisted = [3, *word_model.vocabulary.ids_of(["abode", "decode"]).tolist()]
    assert scores[1] - scores[0] == pytest.approx(float(unigram[unlisted].logsumexp(0) - unigram[3]), abs=2e-3)


PHONES = ["<blk>", "SIL", "K", "S", "AA", "B", "D"]
SOUND_OF = {"c": "K", "s": "S", "a": "AA", "b": "B", "d": "D", "-": "SIL"}


@pytest.mark.parametrize("is_kept", [False, True])
def test_phones_of_unknown_words_become_letters(
    is_kept: bool,
    ngram_of: Callable[..., NgramLM],
    frames_of: Callable[..., torch.Tensor],
    tmp_path: Path,
    forget_graphs: Callable[[], None],
) -> None:
    listed = ("ca", "sab", "bad", "dab", "cabs", "scab", "dabs", "basc", "daba", "casba")
    lexicon = {word: " ".join(SOUND_OF[letter] for letter in word) for word in listed}
    word_model = ngram_of(["ca sab", "bad <unk> ca", "<unk> sab", "sab <unk> sab"], list(lexicon), order=2)
    for _ in range(1 + is_kept):
        forget_graphs()
        decoder = CTCDecoder(
            PHONES,
            lexicon=lexicon,
            ngram=word_model,
            spell_unknown=True,
            graph_folder=tmp_path,
            frame_shift=1.0,
            warm_up=False,
        )
    for text in ("ca dacs sab", "bassa-sab", "bad-adda-ca", "sab-cascad", "dab"):
        heard = text.replace(" ", "")
        log_prob = frames_of(PHONES, [SOUND_OF[letter] for letter in heard], strength=12.0)
        best = decoder(log_prob)[0]
        words = text.replace("-", " ").split()
        assert best.text == " ".join(words)
        assert [word.is_spelled for word in best.words] == [word not in lexicon for word in words]
        assert [word.start_frame for word in best.words] == [2 * heard.index(word) for word in words]
        assert [word.end_frame for word in best.words] == [2 * (heard.index(word) + len(word)) - 1 for word in words]
        stream = decoder.stream()
        for chunk in log_prob.split(5):
            stream.accept(chunk)
        assert stream.finish() == best
