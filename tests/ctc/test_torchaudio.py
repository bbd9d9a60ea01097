"""The drop-in for torchaudio's decoder, beside torchaudio's own where that is installed."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("kaldifst", reason="compiling graphs needs kaldifst")

from asr.ctc.torchaudio import ctc_decoder
from asr.errors import AsrError
from asr.lm.ngram.model import NgramLM
from tests.ctc.oracle import best_of_paths, best_token_sequences, sums_of_texts

pytestmark = pytest.mark.slow

TOKENS = ["-", "|", *"abcde"]
WORDS = ["bad", "bead", "cab", "dead", "ace"]


@pytest.fixture
def files(tmp_path: Path, ngram_of: Callable[..., NgramLM], arpa_file: Callable[[NgramLM], Path]) -> dict[str, str]:
    """A lexicon, a token list and language models of words and of tokens, as torchaudio reads them."""
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("".join(f"{word} {' '.join(word)} |\n" for word in WORDS))
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("".join(f"{token}\n" for token in TOKENS))
    lm = ngram_of(["bad cab", "dead bead ace", "ace bad", "cab dead", "bead"], WORDS, order=2)
    return {"lexicon": str(lexicon), "tokens": str(tokens), "lm": str(arpa_file(lm))}


def emissions(text: str, strength: float = 7.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = [column for symbol in text for column in (TOKENS.index(symbol), 0)]
    logits = torch.randn((1, len(columns), len(TOKENS)), generator=generator)
    logits[0, torch.arange(len(columns)), torch.tensor(columns)] += strength
    return logits.log_softmax(2)


def test_words(files: dict[str, str]) -> None:
    decoder = ctc_decoder(**files, nbest=3, beam_size=500)
    ((best, *others),) = decoder(emissions("|bad|cab|"))
    assert best.words == ["bad", "cab"]
    assert decoder.idxs_to_tokens(best.tokens) == list("|bad|cab|")
    assert best.timesteps.tolist() == [2 * position for position in range(9)]
    assert [other.score for other in others] == sorted((other.score for other in others), reverse=True)
    assert all(other.score < best.score and other.words != best.words for other in others)


def test_weights_change_what_is_found(files: dict[str, str]) -> None:
    given = emissions("bad|cab", strength=3.0, seed=3)
    one = ctc_decoder(**files, lm_weight=1.0, beam_size=500)(given)[0][0]
    more = ctc_decoder(**files, lm_weight=1.0, word_score=2.0, sil_score=0.5, beam_size=500)(given)[0][0]
    silences = sum(1 for token in decoder_tokens(files, more) if token == "|")
    assert more.words == one.words == ["bad", "cab"]
    assert more.score >= one.score + 2 * 2.0 + 0.5 * min(1, silences) - 1e-3


def test_only_the_most_probable_tokens_are_followed(files: dict[str, str]) -> None:
    given = emissions("|bad|cab|")
    (wanted,) = ctc_decoder(**files, nbest=5, beam_size=500)(given)
    (every,) = ctc_decoder(**files, nbest=5, beam_size=500, beam_size_token=len(TOKENS))(given)
    (single,) = ctc_decoder(**files, nbest=5, beam_size=500, beam_size_token=1)(given)
    assert [each.words for each in every] == [each.words for each in wanted]
    assert {word for each in wanted for word in each.words} > {"bad", "cab"}
    # Blanks may always follow, and so take the place of a word.
    assert sorted(each.words for each in single[1:]) == [["bad"], ["cab"]]
    assert (single[0].words, single[0].score) == (["bad", "cab"], pytest.approx(wanted[0].score, abs=1e-4))


def decoder_tokens(files: dict[str, str], hypothesis: Any) -> list[str]:
    return [TOKENS[int(token)] for token in hypothesis.tokens]


def test_lists_and_mappings_in_the_place_of_files(files: dict[str, str]) -> None:
    lexicon = {word: [" ".join([*word, "|"])] for word in WORDS}
    given = emissions("dead|ace|")
    wanted = ctc_decoder(**files, beam_size=500)(given)[0][0]
    found = ctc_decoder(lexicon, TOKENS, files["lm"], beam_size=500)(given)[0][0]
    assert (found.words, found.score) == (wanted.words, pytest.approx(wanted.score, abs=1e-4))
    without = ctc_decoder(lexicon, TOKENS, beam_size=500)(given)[0][0]
    assert without.words == ["dead", "ace"]


def test_tokens_without_a_lexicon(files: dict[str, str], ngram_of: Callable[..., NgramLM]) -> None:
    decoder = ctc_decoder(None, TOKENS, nbest=2)
    found = decoder(emissions("eab|c", strength=9.0))[0]
    assert len(found) == 2
    assert decoder.idxs_to_tokens(found[0].tokens) == list("eab|c")
    assert found[0].words == []
    lm = ngram_of(["c a b | c a b"], TOKENS[1:], order=2)
    with_lm = ctc_decoder(None, TOKENS, lm, lm_weight=3.0)
    assert decoder.idxs_to_tokens(with_lm(emissions("cab|cab"))[0][0].tokens) == list("cab|cab")


def test_chunks(files: dict[str, str]) -> None:
    decoder = ctc_decoder(**files, beam_size=500)
    given = emissions("|bad|dead|cab")
    wanted = decoder(given)[0][0]
    decoder.decode_begin()
    for chunk in given[0].split(4):
        decoder.decode_step(chunk)
    decoder.decode_end()
    (found,) = decoder.get_final_hypothesis()
    assert found.words == wanted.words == ["bad", "dead", "cab"]
    assert found.score == pytest.approx(wanted.score, abs=1e-3)
    with pytest.raises(AsrError, match="no utterance is open"):
        decoder.decode_step(given[0])
    with pytest.raises(AsrError, match="no utterance has ended"):
        ctc_decoder(**files).get_final_hypothesis()


class Counting:
    """A language model with torchaudio's interface: it likes its words in turn."""

    def start(self, start_with_nothing: bool) -> int:
        return 0

    def score(self, state: int, number: int) -> tuple[int, float]:
        return state + 1, 0.0 if number == state % len(WORDS) else -5.0

    def finish(self, state: int) -> tuple[int, float]:
        return state, -1.0


def test_custom_language_model(files: dict[str, str]) -> None:
    decoder = ctc_decoder(files["lexicon"], TOKENS, Counting(), lm_weight=1.0, beam_size=500)
    assert decoder(emissions("bad|bead|cab|", strength=9.0))[0][0].words == ["bad", "bead", "cab"]
    liked = decoder(emissions("bad|bead|cab|", strength=12.0))[0][0].score
    disliked = decoder(emissions("cab|bead|bad|", strength=12.0))[0][0].score
    assert liked - disliked == pytest.approx(10.0, abs=1.5)


@pytest.mark.parametrize("special", [(), ("<s>", "<pad>", "</s>", "<unk>")])
def test_words_are_numbered_by_their_lines(files: dict[str, str], tmp_path: Path, special: tuple[str, ...]) -> None:
    """As in fairseq's dictionaries, which begin with special words and have counts."""
    listed = [*special, *reversed(WORDS)]
    (tmp_path / "dict.txt").write_text("".join(f"{word} {9}\n" for word in listed))
    asked: list[int] = []

    class Asked(Counting):
        def score(self, state: int, number: int) -> tuple[int, float]:
            asked.append(number)
            return state + 1, 0.0 if listed[number] == WORDS[state % len(WORDS)] else -50.0

    decoder = ctc_decoder(files["lexicon"], TOKENS, Asked(), str(tmp_path / "dict.txt"), lm_weight=1.0, beam_size=500)
    assert decoder(emissions("bad|bead|cab|", strength=9.0))[0][0].words == WORDS[:3]
    assert {len(special) + number for number in range(len(WORDS))} == {*asked}


def best_words(
    given: torch.Tensor, spellings: dict[str, str], lm: Counting, word_score: float
) -> dict[tuple[str, ...], float]:
    """The best path of every sequence of words by enumeration, for emissions (T, C).

    Silences may stand before the first word, and more of them wherever there is one. A word that is spelled without
    silence may be followed by it; the last word may lack it.
    """
    found: dict[tuple[str, ...], float] = {}

    def read(columns: tuple[int, ...], at: int, words: tuple[str, ...], state: int, score: float) -> None:
        if at == len(columns):
            found[words] = max(score + lm.finish(state)[1], found.get(words, -math.inf))
            return
        if columns[at] == 1 and (at == 0 or columns[at - 1] == 1):
            read(columns, at + 1, words, state, score)
        for number, (word, spelling) in enumerate(spellings.items()):
            own = tuple(TOKENS.index(token) for token in spelling.split() if token != "|")
            end = at + len(own)
            if columns[at:end] != own:
                continue
            following, lm_score = lm.score(state, number)
            total = score + lm_score + word_score
            if end == len(columns) or not spelling.endswith("|"):
                read(columns, end, (*words, word), following, total)
            if columns[end : end + 1] == (1,):
                read(columns, end + 1, (*words, word), following, total)

    for columns, score in best_of_paths(given.numpy()).items():
        if score > -math.inf:
            read(columns, 0, (), 0, score)
    return found


def as_scored(log_prob: torch.Tensor, num_tokens: int | None) -> torch.Tensor:
    """Frames (T, C) as the searches below see them: sil_score 0.5 is added to token 1, and few tokens are kept."""
    scored = log_prob.clone()
    scored[:, 1] += 0.5
    if num_tokens is not None:
        # The blank counts as one of them, and stays in any case.
        is_out = scored < scored.topk(num_tokens).values[:, -1:]
        is_out[:, 0] = False
        scored = scored.masked_fill(is_out, -math.inf)
    return scored


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_tokens", [None, 3])
@pytest.mark.parametrize("end", ["", " |"])
def test_against_all_paths(seed: int, num_tokens: int | None, end: str) -> None:
    lexicon = {word: " ".join(word) + end for word in ("a", "ab", "abb", "cc", "b")}
    generator = torch.Generator().manual_seed(seed)
    given = (2.0 * torch.randn((1, 6, 5), generator=generator)).log_softmax(2)
    weights = {"lm_weight": 1.0, "word_score": 1.0, "sil_score": 0.5, "beam_size_token": num_tokens}
    beams = {"beam_size": 10**5, "beam_threshold": 1e3}
    lists = {word: [spelling] for word, spelling in lexicon.items()}
    (best, *_), *_ = ctc_decoder(lists, TOKENS[:5], Counting(), **weights, **beams)(given)  # type: ignore[arg-type]
    scored = as_scored(given[0], num_tokens)
    wanted = best_words(scored, lexicon, Counting(), 1.0)
    assert best.score == pytest.approx(max(wanted.values()), abs=1e-3)
    assert wanted[tuple(best.words)] == pytest.approx(best.score, abs=1e-3)


@pytest.mark.parametrize("sil_score", [0.0, 0.5])
def test_emissions_may_be_arrays(sil_score: float) -> None:
    given = (2.0 * torch.randn((1, 6, 5), generator=torch.Generator().manual_seed(0))).log_softmax(2)
    decoder = ctc_decoder(None, TOKENS[:5], sil_score=sil_score, beam_size_token=3)
    ((wanted,),), ((found,),) = decoder(given), decoder(given.numpy())
    assert (found.score, found.tokens.tolist()) == (wanted.score, wanted.tokens.tolist())
    decoder.decode_begin()
    decoder.decode_step(given[0].numpy())
    decoder.decode_end()
    assert decoder.get_final_hypothesis()[0].score == pytest.approx(wanted.score)


@pytest.mark.parametrize("num_tokens", [None, 3])
def test_tokens_against_all_paths(num_tokens: int | None) -> None:
    given = (2.0 * torch.randn((1, 6, 5), generator=torch.Generator().manual_seed(0))).log_softmax(2)
    decoder = ctc_decoder(
        None, TOKENS[:5], nbest=40, sil_score=0.5, beam_size_token=num_tokens, beam_size=10**4, beam_threshold=1e3
    )
    scored = as_scored(given[0], num_tokens)

    def text_of(columns: Sequence[int]) -> str:
        return " ".join("".join([TOKENS[column] for column in columns]).replace("|", " ").split())

    sequences = best_token_sequences(scored.numpy(), lambda tokens: 0.0, 0.0, 0.0, TOKENS.index("|"))
    wanted = sums_of_texts(sequences, text_of)
    (found,) = decoder(given)
    assert [each.score for each in found] == pytest.approx(sorted(wanted.values(), reverse=True)[:40], abs=1e-3)
    texts = [text_of(each.tokens.tolist()) for each in found]
    assert len(set(texts)) == len(found) == 40
    for each, text in zip(found, texts, strict=True):
        assert wanted[text] == pytest.approx(each.score, abs=1e-3)


def test_the_last_token_of_a_word_without_silence_beside_torchaudio(tmp_path: Path) -> None:
    """In torchaudio it cannot last; here it can, as CTC has it."""
    try:
        theirs = importlib.import_module("torchaudio.models.decoder").ctc_decoder
    except (ImportError, OSError, RuntimeError, AttributeError):
        pytest.skip("torchaudio has no decoder here")
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("ab a b\n")
    for heard, lasts in [("ab-", False), ("abb", True)]:
        given = torch.full((1, 3, 4), -9.0)
        given[0, torch.arange(3), torch.tensor([("-", "|", "a", "b").index(token) for token in heard])] = 0.0
        (found,), (wanted,) = (
            make(str(lexicon), ["-", "|", "a", "b"], beam_threshold=1e3)(given)[0] for make in (ctc_decoder, theirs)
        )
        assert found.words == wanted.words == ["ab"]
        assert found.score == pytest.approx(0.0, abs=1e-3)
        assert wanted.score == pytest.approx(-9.0 if lasts else 0.0, abs=1e-3)


def test_what_is_refused(files: dict[str, str]) -> None:
    for name, value in [("word_score", -0.3), ("unk_score", -1.0), ("lm_dict", "words.txt")]:
        with pytest.raises(AsrError, match=f"{name} has no effect here"):
            ctc_decoder(None, TOKENS, **{name: value})
    with pytest.raises(AsrError, match="sil_score has no effect here"):
        ctc_decoder(None, ["-", "a", "b"], sil_score=0.5)
    with pytest.raises(AsrError, match="without a language model it must be 0"):
        ctc_decoder(files["lexicon"], TOKENS, unk_score=-1.0)
    with pytest.raises(AsrError, match="beam_size is 0; keep 1 hypothesis or more"):
        ctc_decoder(**files, beam_size=0)
    with pytest.raises(AsrError, match="beam_size_token is 0"):
        ctc_decoder(**files, beam_size_token=0)
    with pytest.raises(AsrError, match="nbest is 3, but an utterance in chunks has one hypothesis"):
        ctc_decoder(**files, nbest=3).decode_begin()
    with pytest.raises(AsrError, match="log_add=True is not supported"):
        ctc_decoder(**files, log_add=True)
    with pytest.raises(AsrError, match="give \\(batch, frames, tokens\\)"):
        ctc_decoder(**files)(torch.zeros(3, 7))
    with pytest.raises(AsrError, match="blank '#' is not one of the 7 tokens"):
        ctc_decoder(files["lexicon"], TOKENS, blank_token="#")


def test_unknown_words_are_spelled(files: dict[str, str]) -> None:
    given = emissions("bad|ecce|cab", strength=12.0)
    one, other = (ctc_decoder(**files, beam_size=2000, unk_score=score, lm_weight=2.0)(given) for score in (-1.0, -2.5))
    assert one[0][0].words == other[0][0].words == ["bad", "ecce", "cab"]
    assert one[0][0].score - other[0][0].score == pytest.approx(1.5, abs=1e-2)


@pytest.mark.parametrize("seed", range(3))
def test_same_words_as_torchaudio(seed: int, files: dict[str, str]) -> None:
    try:
        theirs = importlib.import_module("torchaudio.models.decoder")
        decoders = [theirs.ctc_decoder(**files, beam_size=500, lm_weight=w, word_score=-0.3) for w in (1.5, 2.5)]
    except (ImportError, OSError, RuntimeError, AttributeError):
        pytest.skip("torchaudio has no decoder here")
    given = emissions("|bad|cab|dead|ace|", strength=4.0, seed=seed)
    wanted, wanted_heavier = (decoder(given)[0][0] for decoder in decoders)
    found, heavier = (
        ctc_decoder(**files, beam_size=5000, lm_weight=w, word_score=-0.3)(given)[0][0] for w in (1.5, 2.5)
    )
    assert found.words == wanted.words
    if heavier.words == found.words and wanted_heavier.words == wanted.words:
        assert heavier.score - found.score == pytest.approx(wanted_heavier.score - wanted.score, abs=0.02)


def test_an_n_gram_file_is_weighed_in_logs_to_base_10(files: dict[str, str], ngram_of: Callable[..., NgramLM]) -> None:
    given = emissions("|bad|cab|", seed=4)
    none, file = (ctc_decoder(**files, beam_size=500, lm_weight=weight)(given)[0][0] for weight in (0.0, 2.0))
    assert none.words == file.words == ["bad", "cab"]
    log10_prob = float(NgramLM.from_arpa(files["lm"]).score_sentence(file.words).sum()) / math.log(10.0)
    assert file.score - none.score == pytest.approx(2.0 * log10_prob, abs=1e-2)
