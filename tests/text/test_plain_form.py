"""Tokens that are alike but for letter case and punctuation. Words in plain form: tests/fusion/test_spelling.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from asr.text.byte_pieces import from_text
from asr.text.ctc_tokens import CTCTokens
from asr.text.plain_form import PlainForm, PlainTokens, tokens_for_words

LETTERS = ["a", "A", "<blk>", "b", "|", "B", ",", "-", "?", "<unk>", "'"]
PIECES = ["<unk>", "▁", "▁He", "▁he", "He", "llo", "LLO", ",", "▁-", "▁of▁The", "▁of▁the", "<0x41>", "!", "<blk>"]


def test_letters_in_plain_form() -> None:
    tokens = PlainTokens(CTCTokens(LETTERS), PlainForm())
    assert tokens.table.tokens == ("<blk>", "a", "b", "|", "<unk>", "'")
    assert len(tokens) == len(LETTERS) and tokens.symbols == tuple(LETTERS) and tokens.blank_id == 2
    assert tokens.spell("AB'a") == [("a", "b", "'", "a", "|")]
    assert tokens.text_of(1, 2) == "ab" and not tokens.is_text(4) and tokens.separates_words(3)
    # Where words have hyphens, a hyphen is a letter.
    assert PlainTokens(CTCTokens(LETTERS), PlainForm("")).spell("A-B") == [("a", "-", "b", "|")]


def test_pieces_in_plain_form() -> None:
    tokens = PlainTokens(CTCTokens(PIECES, num_spellings=2), PlainForm())
    assert tokens.table.tokens == ("<blk>", "<unk>", "▁", "▁he", "he", "llo", "▁of▁the", "<0x41>")
    assert tokens.spell("HELLO") == [("▁he", "llo"), ("▁", "he", "llo")]
    assert tokens.begins_word(3) and not tokens.begins_word(4)
    assert tokens.bytes_of(7) == b"A"
    words = PlainTokens(CTCTokens(["[PAD]", "Hel", "hel", "##lo", "##LO", "##-", "."]), PlainForm())
    assert words.table.tokens == ("<blk>", "hel", "##lo")
    assert words.spell("HELLO") == [("hel", "##lo")] and not words.begins_word(2)


def test_bytes_of_other_characters_keep_their_case() -> None:
    """In byte-level pieces, U+0100 and U+0101 are two bytes, not a letter in two cases."""
    upper, lower = from_text("É"), from_text("é")
    assert upper[1].lower() != upper[1], "which would be another byte"
    tokens = CTCTokens(["<pad>", "▁H", "▁h", upper, lower, "s", "S", "."], byte_level=True)
    plain = PlainTokens(tokens, PlainForm())
    assert plain.table.tokens == ("<blk>", "▁h", upper, lower, "s")
    assert plain.spell("HÉS") == [("▁h", lower, "s")]


@pytest.mark.parametrize("shape", [(3,), (2, 5), (2, 3, 1)])
@pytest.mark.parametrize("symbols", [LETTERS, PIECES])
def test_probabilities_of_an_entry_are_added(symbols: list[str], shape: tuple[int, ...]) -> None:
    network, form = CTCTokens(symbols), PlainForm()
    tokens = PlainTokens(network, form)
    generator = torch.Generator().manual_seed(1)
    log_prob = (30 * torch.randn((*shape, len(symbols)), generator=generator)).log_softmax(-1)
    log_prob[..., 3] = -torch.inf
    log_prob[..., 5] = -torch.inf
    kept = log_prob.clone()
    found = tokens.in_order_of_table(log_prob)
    assert torch.equal(log_prob, kept)
    assert found.shape == (*shape, len(tokens.table)) and found.dtype == log_prob.dtype
    torch.testing.assert_close(found.exp().sum(-1), log_prob.exp().sum(-1), atol=1e-5, rtol=0)
    for entry, symbol in enumerate(tokens.table.tokens):
        is_mark = [each in (*",?!", "▁-", "<blk>") for each in symbols]
        alike = is_mark if entry == 0 else [each.lower() == symbol.lower() for each in symbols]
        if symbol == "|":
            alike[symbols.index("-")] = True
        wanted = log_prob.double()[..., alike].logsumexp(-1).float()
        torch.testing.assert_close(found[..., entry], wanted, atol=1e-5, rtol=1e-6)


def test_columns_of_tokens_as_they_are_only_move() -> None:
    log_prob = torch.randn((2, 4, 4)).log_softmax(-1)
    first = CTCTokens(["<blk>", "a", "b", "|"])
    assert first.in_order_of_table(log_prob) is log_prob
    assert torch.equal(CTCTokens(["a", "b", "<blk>", "|"]).in_order_of_table(log_prob), log_prob[..., [2, 0, 1, 3]])


@pytest.mark.parametrize(
    ("symbols", "words", "table"),
    [
        (["<blk>", "▁Hi", "▁hi"], ["HI"], ("<blk>", "▁hi")),
        (["<blk>", "▁Hi", "▁hi"], ["hi"], ("<blk>", "▁hi")),
        (["<blk>", "▁Hi", "▁hi"], ["Hi", "there"], None),
        (["<blk>", "▁Hi", "▁hi", "."], ["hi.", "Hi"], None),
        (["<blk>", "▁hi", "."], ["hi", "there"], ("<blk>", "▁hi")),
        (["<blk>", "▁hi", "▁there"], ["HI", "THERE"], None),
        (["<blk>", "|", "h", "i", "'"], ["HI"], None),
        (["<blk>", "AH", "B", "b"], ["HI"], None),
    ],
)
def test_form_of_tokens_for_words(symbols: list[str], words: list[str], table: tuple[str, ...] | None) -> None:
    tokens = CTCTokens(symbols)
    found = tokens_for_words(tokens, words)
    assert (found is tokens) == (table is None)
    assert found.table.tokens == (table or tokens.table.tokens)
    assert tokens_for_words(found, words) is found


def test_form_that_was_chosen_stays() -> None:
    tokens = PlainTokens(CTCTokens(LETTERS), PlainForm(""))
    assert tokens_for_words(tokens, ["AB"]) is tokens


@pytest.mark.parametrize("is_upper", [False, True])
def test_tokens_in_one_letter_case_spell_words_in_any(is_upper: bool) -> None:
    symbols = ["<blk>", "|", "a", "é", "'"]
    tokens = CTCTokens([symbol.upper() if len(symbol) == 1 else symbol for symbol in symbols] if is_upper else symbols)
    for word in map("".join, itertools.product("aA", "éÉ", "'’", "aA")):
        wanted = word.replace("’", "'").upper() if is_upper else word.replace("’", "'").lower()
        assert tokens.spell(word) == [(*wanted, "|")]
    assert tokens.spell("ab") == []
    assert CTCTokens(["<blk>", "|", "a", "B"]).spell("AB") == [], "not in one case"
