"""Text made to sound like recordings: stretches of their posteriors, joined phone by phone.

A network that reads posteriors of phones learns to spell from text. Train-clean-5 has 20,000 words, too few. So any
sentence is made from pieces of its recordings: from left to right, the longest sequence of phones that was said
somewhere is taken from a random one of these places. The last phones of words are other symbols than the same phones
within words, so that pauses come between words only.

Shapes: T frames, P phones.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asr.models.alignment import align_ctc
from asr.text.lexicon import Lexicon

_LONGEST = 10
_UTTERANCES_OF_A_BATCH = 16
Symbol = tuple[str, bool]
"""A phone, and whether it ends a word."""


def spelled_in_phones(words: Sequence[str], lexicon: Lexicon) -> list[Symbol] | None:
    """The phones of words, in their first pronunciations; None if a word has none."""
    symbols: list[Symbol] = []
    for word in words:
        if word not in lexicon:
            return None
        phones = lexicon[word][0]
        symbols += [(phone, number == len(phones)) for number, phone in enumerate(phones, start=1)]
    return symbols


class SpokenText:
    """Recordings that sentences are made of.

    Args:
        posteriors: (T, 1 + 2 P) log posteriors of each recording: silence, first frames, further frames.
        texts: their words.
        phones: the P phones in the order of the columns.
        lexicon: pronunciations.
    """

    def __init__(
        self, posteriors: Sequence[Tensor], texts: Sequence[Sequence[str]], phones: Sequence[str], lexicon: Lexicon
    ) -> None:
        self.lexicon = lexicon
        said = [
            (own, symbols)
            for own, text in zip(posteriors, texts, strict=True)
            if (symbols := spelled_in_phones(text, lexicon))
        ]
        self._posteriors: list[Tensor] = []
        self._begins: list[list[int]] = []  # the first frame of each phone, and the end
        self._places: dict[tuple[Symbol, ...], list[tuple[int, int]]] = defaultdict(list)
        for i in range(0, len(said), _UTTERANCES_OF_A_BATCH):
            batch = said[i : i + _UTTERANCES_OF_A_BATCH]
            for (own, symbols), begins in zip(batch, _first_frames(batch, phones), strict=True):
                if begins is not None:
                    self._add(own, symbols, begins)

    def _add(self, posteriors: Tensor, symbols: Sequence[Symbol], begins: list[int]) -> None:
        recording = len(self._posteriors)
        self._posteriors.append(posteriors)
        self._begins.append(begins)
        for begin in range(len(symbols)):
            for end in range(begin + 1, min(begin + _LONGEST, len(symbols)) + 1):
                self._places[tuple(symbols[begin:end])].append((recording, begin))

    def say(self, words: Sequence[str], draw: random.Random) -> Tensor | None:
        """Posteriors (T, 1 + 2 P) of a sentence; None if a word has no pronunciation, or a phone was never said."""
        symbols = spelled_in_phones(words, self.lexicon)
        if not symbols:
            return None
        parts, position = [], 0
        while position < len(symbols):
            places, length = self._longest(symbols, position)
            if not places:
                return None
            recording, place = draw.choice(places)
            begins = self._begins[recording]
            parts.append(self._posteriors[recording][begins[place] : begins[place + length]])
            position += length
        return torch.cat(parts)

    def _longest(self, symbols: Sequence[Symbol], position: int) -> tuple[list[tuple[int, int]], int]:
        """The places of the longest sequence of phones from a position on, and its length."""
        for length in range(min(_LONGEST, len(symbols) - position), 0, -1):
            places = self._places.get(tuple(symbols[position : position + length]))
            if places:
                return places, length
        return [], 0


def _first_frames(said: Sequence[tuple[Tensor, list[Symbol]]], phones: Sequence[str]) -> list[list[int] | None]:
    """The first frame of each phone and the number of frames; None for recordings shorter than their text."""
    column = {phone: number for number, phone in enumerate(phones, start=1)}
    log_prob = [_as_ctc(own.float()) for own, _ in said]
    tokens = [torch.tensor([column[phone] for phone, _ in symbols]) for _, symbols in said]
    lengths = [torch.tensor([len(each) for each in rows]) for rows in (log_prob, tokens)]
    position, found = align_ctc(
        pad_sequence(log_prob, batch_first=True), lengths[0], pad_sequence(tokens, batch_first=True), lengths[1]
    )
    return [
        [*_begins(row[: len(own)], len(each)), len(own)] if ok else None
        for row, own, each, ok in zip(position, log_prob, tokens, found.tolist(), strict=True)
    ]


def _begins(position: Tensor, num_tokens: int) -> list[int]:
    """The first frame of each token of a path, (T,), which is -1 in blanks."""
    begins: list[int] = torch.searchsorted(position.cummax(0).values, torch.arange(num_tokens)).tolist()
    return begins


def _as_ctc(posteriors: Tensor) -> Tensor:
    """Posteriors (T, 1 + P): silence and further frames are the blank."""
    num_phones = posteriors.shape[1] // 2
    first = posteriors[:, 1 : 1 + num_phones]
    rest = torch.cat((posteriors[:, :1], posteriors[:, 1 + num_phones :]), dim=1)
    return torch.cat((rest.logsumexp(1, keepdim=True), first), dim=1)
