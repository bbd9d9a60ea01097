"""The folder that a simulation of speech is made from, and the choice of the sentences to simulate."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from asr.errors import AsrError
from asr.text.lexicon import Lexicon
from asr.text.tokens import TokenTable

Words = tuple[str, ...]
_T = TypeVar("_T")


@dataclass(frozen=True)
class SimulationFolder:
    """What `scripts/simulate_frames.py prepare` makes of a corpus.

    Args:
        path: the folder.
    """

    path: Path

    @property
    def segments(self) -> Path:
        """The pool of segments of real speech (`SegmentPool`)."""
        return self.path / "segments.npz.xz"

    @property
    def sentences(self) -> Path:
        """`id words` a line."""
        return self.path / "sentences.txt"

    @property
    def lexicon(self) -> Path:
        """The pronunciations of the sentences' words."""
        return self.path / "lexicon.txt"

    def require(self) -> SimulationFolder:
        """Itself.

        Raises:
            AsrError: a file is missing; the command that makes all three is named.
        """
        for file in (self.segments, self.sentences, self.lexicon):
            if not file.is_file():
                raise AsrError(
                    f"{file} is missing: make the simulation's data once from a corpus of yours, with `python "
                    "scripts/simulate_frames.py prepare --audio LibriSpeech/dev-clean-2 --text dev-clean.text.xz "
                    f"dev-other.text.xz --lexicon lexicon.txt.xz --output {self.path}`."
                )
        return self


def speaker_of(utt_id: str) -> str:
    """In LibriSpeech's ids (`1272-128104-0000`), what stands before the first hyphen."""
    return utt_id.partition("-")[0]


def sayable(lexicon: Lexicon, tokens: TokenTable, token_ids: Container[int]) -> Lexicon:
    """The words whose first pronunciation has phones of `token_ids` only."""
    ids = {phone: tokens.id_of(phone) in token_ids for phone in lexicon.phones if phone in tokens}
    words = [word for word, variants in lexicon.pronunciations.items() if all(ids.get(one) for one in variants[0])]
    return lexicon.restricted_to(words)[0]


def choose_sentences(
    texts: Sequence[Mapping[str, Words]],
    num: int,
    words: Container[str],
    left_out: Container[str],
    lengths: tuple[int, int] = (5, 25),
) -> dict[str, Words]:
    """So many sentences, in equal parts from the texts, spread evenly over each.

    Args:
        texts: of each, words by utterance id.
        num: how many; fewer come back where a text has less than its part.
        words: sentences with any other word are not chosen.
        left_out: speakers whose sentences are not chosen.
        lengths: the fewest and most words of a sentence.
    """
    chosen: dict[str, Words] = {}
    for place, text in enumerate(texts):
        fit = [
            utt_id
            for utt_id, sentence in text.items()
            if lengths[0] <= len(sentence) <= lengths[1]
            and speaker_of(utt_id) not in left_out
            and all(word in words for word in sentence)
        ]
        part = num * (place + 1) // len(texts) - num * place // len(texts)
        chosen.update((utt_id, text[utt_id]) for utt_id in evenly(fit, part))
    return chosen


def evenly(items: list[_T], num: int) -> list[_T]:
    """So many of them, spread over the whole list."""
    return [items[i * len(items) // num] for i in range(num)] if num < len(items) else items
