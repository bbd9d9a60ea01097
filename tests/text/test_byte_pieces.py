"""Byte-level pieces of GPT-2."""

from __future__ import annotations

import pytest

from asr.text.byte_pieces import are_gpt2, bytes_of, from_gpt2
from asr.text.ctc_tokens import CTCTokens

# As GPT-2's tokenizer writes " été", "don", "日", and the first byte of the latter.
ETE, NOON, DAY, PART = "ĠÃ©tÃ©", "don", "æĹ¥", "æ"


def test_the_alphabet_is_that_of_tokenizers() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    encode = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    text = "".join(map(chr, [*range(1, 0x400), 0x65E5, 0x1F600]))
    written = "".join(piece for piece, _ in encode(text))
    assert b"".join(bytes_of(from_gpt2(char, " ")) for char in written) == text.encode()


def test_pieces_are_recognized() -> None:
    assert are_gpt2([ETE, NOON, DAY, PART, "!"])
    assert not are_gpt2([NOON, "été", "!"])  # nothing begins a word
    assert not are_gpt2([ETE, "日"])
    assert not are_gpt2([])


def test_tokens_of_converted_pieces() -> None:
    symbols = ["<blk>", *(from_gpt2(piece, "▁") for piece in (ETE, NOON, DAY, PART, "Ġ", "ĠĠ", "Ċ"))]
    tokens = CTCTokens(symbols, blank=0, byte_level=True)
    assert tokens.kind == "pieces" and tokens.is_byte_level
    assert [tokens.text_of(entry) for entry in (1, 2, 3)] == ["été", "don", "日"]
    assert [tokens.begins_word(entry) for entry in (1, 2, 3)] == [True, False, False]
    assert tokens.bytes_of(4) == b"\xe6"
    assert tokens.spell("été") == [(symbols[1],)]
