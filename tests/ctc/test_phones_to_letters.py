"""Phones to letters: alignments against their enumeration, spellings against that of all pairs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from asr.ctc import phones_to_letters
from asr.ctc.phones_to_letters import PhonesToLetters
from asr.errors import AsrError
from asr.text.lexicon import Lexicon

WORDS = {
    "ox": "AA K S",
    "oxen": "AA K S AH N",
    "knee": "N IY",
    "see": "S IY",
    "sock": "S AA K",
    "neck": "N EH K",
    "cosy": "K OW Z IY",
    "kong": "K AA NG",
}


def lexicon_of(words: dict[str, str]) -> Lexicon:
    return Lexicon({word: [tuple(phones.split())] for word, phones in words.items()})


def cuts_of(word: str, num_phones: int) -> list[tuple[str, ...]]:
    """All ways to cut a word into parts of none to three letters."""
    return [
        tuple(word[end - count : end] for end, count in zip(itertools.accumulate(counts), counts, strict=True))
        for counts in itertools.product(range(4), repeat=num_phones)
        if sum(counts) == len(word)
    ]


def test_counts_and_best_alignments_are_those_of_all_alignments() -> None:
    words = {word: tuple(phones.split()) for word, phones in WORDS.items()}
    phones = sorted({phone for sounds in words.values() for phone in sounds})
    kinds: dict[str | None, int] = {None: 0}
    batches = list(phones_to_letters._batches(words, {phone: at for at, phone in enumerate(phones)}, kinds))
    probability = np.random.default_rng(0).random((len(phones), len(kinds)))
    probability[:, 0] = 0.0
    wanted = np.zeros_like(probability)
    best = {}
    for word, sounds in words.items():
        pairs = [
            [(phones.index(p), kinds[part]) for p, part in zip(sounds, cut, strict=True)]
            for cut in cuts_of(word, len(sounds))
        ]
        weights = np.array([np.prod([probability[pair] for pair in each]) for each in pairs])
        for each, weight in zip(pairs, weights / weights.sum(), strict=True):
            for pair in each:
                wanted[pair] += weight
        best[word] = list(zip(sounds, cuts_of(word, len(sounds))[int(weights.argmax())], strict=True))
    found = sum(phones_to_letters._counts(batch, probability) for batch in batches)
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    for batch in batches:
        aligned = list(phones_to_letters._best_alignments(batch, probability))
        assert aligned == [best[word] for word in batch.words]


def test_spelling_is_the_best_of_all_sequences_of_pairs() -> None:
    model = PhonesToLetters.estimate(lexicon_of(WORDS))
    names = model.ngram.vocabulary.words[4:]
    for phones in (["N", "IY"], ["K", "AA", "K", "S"], ["S", "EH", "NG", "IY"]):
        choices = [[name for name in names if name.startswith(f"{phone}=")] for phone in phones]
        scored = {
            "".join(name.split("=")[1] for name in pairs): float(model.ngram.score_sentence(pairs).sum())
            for pairs in itertools.product(*choices)
        }
        found = model.spell(phones)
        assert scored[found] == pytest.approx(max(score for text, score in scored.items() if text), abs=1e-5)


def test_words_of_one_phone_may_all_have_one_letter() -> None:
    model = PhonesToLetters.estimate(lexicon_of({"a": "AH", "I": "AY", "sea": "S IY"}))
    assert model.spell(["AY"]) == "I" and model.spell(["S", "IY"]) == "sea"


@pytest.mark.slow
def test_words_that_were_not_listed_are_spelled() -> None:
    sounds = {"k": "K", "sh": "SH", "ee": "IY", "t": "T", "a": "AE", "n": "N"}
    words = [parts for length in (2, 3, 4) for parts in itertools.product(sounds, repeat=length)]
    rng = np.random.default_rng(0)
    rng.shuffle(words)
    listed, held_out = words[:300], words[300:400]
    model = PhonesToLetters.estimate(lexicon_of({"".join(w): " ".join(sounds[x] for x in w) for w in listed}))
    right = sum(model.spell([sounds[part] for part in word]) == "".join(word) for word in held_out)
    assert right >= 99


def test_unknown_phones_are_left_out_and_hopeless_lexicons_refused() -> None:
    model = PhonesToLetters.estimate(lexicon_of(WORDS))
    assert model.spell(["S", "ZZ", "IY"]) == model.spell(["S", "IY"]) == "see"
    assert model.spell(["ZZ"]) == model.spell([]) == ""
    with pytest.raises(AsrError, match="no word can be aligned with its phones"):
        PhonesToLetters.estimate(lexicon_of({"toolong": "T", "a=b": "AH B"}))
