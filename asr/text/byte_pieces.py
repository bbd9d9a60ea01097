"""Byte-level pieces: text whose UTF-8 bytes are written as one printable character each (icefall's `bbpe`).

A byte that is a printable ASCII character stands for itself. The other ones are the characters from U+0100 on, in
order, without those that Unicode's normalization NFKC would replace. CJK characters are words of their own.

GPT-2's byte-level pieces, which Whisper has, too, use other characters; `from_gpt2` converts them.
"""

from __future__ import annotations

import codecs
import itertools
import re
import unicodedata
from collections.abc import Collection, Iterable

_FIRST = 0x100
_CONTINUATIONS = bytes(range(0x80, 0xC0))
_CJK = re.compile(
    "([\u1100-\u11ff\u2e80-\ua4cf\ua840-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc\U00020000-\U0002ffff])"
)


def _characters() -> list[str]:
    """The character of each byte."""
    others = (char for char in map(chr, itertools.count(_FIRST)) if unicodedata.normalize("NFKC", char) == char)
    return [chr(byte) if 0x20 <= byte <= 0x7E else next(others) for byte in range(0x100)]


def _gpt2_bytes() -> dict[str, int]:
    """The byte of each character of GPT-2's alphabet."""
    same = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in same]
    return {**{chr(byte): byte for byte in same}, **{chr(_FIRST + n): byte for n, byte in enumerate(others)}}


_GPT2_BYTES = _gpt2_bytes()
_GPT2_SPACE = "Ġ"
_CHARACTERS = _characters()
_BYTES = {char: byte for byte, char in enumerate(_CHARACTERS)}


def are_byte_level(pieces: Iterable[str], prefix: str) -> bool:
    """Whether pieces are byte-level: all of them are parts of UTF-8 text, and some have bytes beyond ASCII.

    Args:
        pieces: without special symbols.
        prefix: the mark of pieces that begin a word.
    """
    texts: list[bytes] = []
    for piece in pieces:
        within, *begins = piece.split(prefix)
        if any(char not in _BYTES for char in "".join([within, *begins])):
            return False
        # Only what continues a word may begin within a character; all may end there.
        texts += [bytes_of(within).lstrip(_CONTINUATIONS), *map(bytes_of, begins)]
    try:
        for text in texts:
            codecs.getincrementaldecoder("utf-8")().decode(text)
    except UnicodeDecodeError:
        return False
    found = set().union(*texts)
    # Alphabets with characters from U+0100 on, such as Latvian, have some that would be control characters.
    return min(found, default=0) >= 0x20 and 0x7F not in found and max(found) > 0x7F


def are_gpt2(pieces: Collection[str]) -> bool:
    """Whether pieces, without special symbols, are GPT-2's byte-level ones."""
    return any(piece[0] == _GPT2_SPACE for piece in pieces if piece) and _GPT2_BYTES.keys() >= set().union(*pieces)


def from_gpt2(piece: str, prefix: str) -> str:
    """A byte-level piece of GPT-2 as one of icefall's, with a prefix in place of a space before a word."""
    begins = piece[:1] == _GPT2_SPACE
    return begins * prefix + "".join([_CHARACTERS[_GPT2_BYTES[char]] for char in piece[begins:]])


def from_text(text: str) -> str:
    """A text as a byte-level piece."""
    return "".join(_CHARACTERS[byte] for byte in text.encode())


def bytes_of(piece: str) -> bytes:
    """The bytes that a byte-level piece stands for."""
    return bytes(map(_BYTES.__getitem__, piece))


def as_bytes(word: str) -> str:
    """A word as such a network's training text has it: its bytes, and spaces around CJK characters."""
    return from_text(" ".join(part for part in _CJK.split(word) if part))
