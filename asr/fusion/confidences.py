"""Confidences of words, from the hypotheses that a search has given up.

A hypothesis that differs from the best text first in some word is evidence against that word. Its weight is its share
relative to that of the best text, in the last step in which both took part: if it left the beam, what it would have if
both had gone on alike. The confidence of a word, given the words before it, is thus

    1 / (1 + (sum of the weights against the word) ** SCALE)

which is 1 if no hypothesis has another word there. Without SCALE, it would be the posterior probability of the word
among the hypotheses (Wessel et al., Confidence measures for large vocabulary continuous speech recognition, 2001).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from asr.fusion.interface import Pruned
from asr.text.ctc_tokens import CTCTokens

SCALE = 0.5
"""Networks are overconfident. Chosen on two training speakers with the small transducer of `scripts/bench`."""

_END = "\n"


def written_tokens(tokens: CTCTokens) -> list[str]:
    """What each entry of `CTCTokens.table` adds to a text: its bytes as characters, and a space before a word."""
    found = []
    for entry in range(len(tokens.table)):
        is_text = tokens.is_text(entry)
        begins = entry > 0 and tokens.separates_words(entry)
        begins |= is_text and (tokens.kind == "phones" or (tokens.kind == "pieces" and tokens.begins_word(entry)))
        found.append(" " * begins + (tokens.bytes_of(entry).decode("latin-1") if is_text else ""))
    return found


class ConfidenceEstimator:
    """Estimates the confidence of each word of a text, from the weights of hypotheses that have another word.

    A hypothesis is followed token by token. Its place is the number of characters in which it equals the text, or once
    it differs, the negative number of the first word that differs, from -1 on.

    Args:
        words: the text, as `written_tokens` writes it.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._text = "".join(f"{word} " for word in words) + _END
        self._begins = [0, *accumulate(len(word) + 1 for word in words)]
        self._weight = np.zeros(len(words) + 1)

    def follow(self, place: int, written: str) -> int:
        """The place of a hypothesis after what it adds."""
        if place < 0:
            return place
        if place == 0 or self._text[place - 1] == " ":
            written = written.lstrip(" ")
        if self._text.startswith(written, place):
            return place + len(written)
        while self._text.startswith(written[0], place):
            place, written = place + 1, written[1:]
        return -bisect_right(self._begins, place)

    def end(self, place: int) -> int:
        """The place of a hypothesis that ends."""
        return self.follow(place, f" {_END}")

    def add(self, place: int, log_weight: float) -> None:
        """Adds the weight of a hypothesis relative to the text's, natural log, if it differs."""
        if place < 0:
            self._weight[-place - 1] += np.exp(log_weight)

    def add_pruned(self, pruned: Pruned, written: Sequence[str]) -> None:
        """Adds the weights of hypotheses that left the beam, by what each token adds to a text."""
        place_of = {-1: 0}
        for node, next_entry, log_weight in zip(*pruned[2:], strict=True):
            below = []
            while node not in place_of:
                below.append(node)
                node = pruned.parent[node]
            place = place_of[node]
            for node in reversed(below):
                if pruned.parent[node] >= 0:
                    place = self.follow(place, written[pruned.entry[node]])
                place_of[node] = place
            self.add(place if next_entry < 0 else self.follow(place, written[next_entry]), log_weight)

    def confidences(self) -> list[float]:
        """The confidence of each word."""
        # The last place is after all words.
        found: list[float] = (1.0 / (1.0 + self._weight[:-1] ** SCALE)).tolist()
        return found
