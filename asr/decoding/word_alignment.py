"""Where words begin and end, told by their pronunciations.

A decoding graph writes a word somewhere on its way: determinisation moves it behind all phones that it shares with
other words, so that the frame at which it is written is late by some phones. Which phones are whose follows from the
lexicon alone: the path's phones are its words' pronunciations one after another. What is left is the acoustic model's
own: CTC spikes lie within a phone, not at its edges.

Shapes: P phones, W words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asr.decoding.first_pass import Hypothesis
from asr.errors import AsrError
from asr.graph.artefact import DecodingGraph
from asr.text.lexicon import Lexicon

_TOPOLOGY = "ctc"


def can_align(graph: DecodingGraph) -> bool:
    """Whether the runs of tokens along a path of the graph are its phones."""
    return bool(graph.meta.get("topology", _TOPOLOGY) == _TOPOLOGY)


class WordAligner:
    """Gives hypotheses the times that their phones have.

    Args:
        lexicon: that the graph was built from, or one with more.
        graph: the decoding graph; its topology must be `ctc`, where each phone is a run of equal tokens.

    Raises:
        AsrError: the topology is another.
    """

    def __init__(self, lexicon: Lexicon, graph: DecodingGraph) -> None:
        if not can_align(graph):
            topology = graph.meta["topology"]
            raise AsrError(f"word times from the lexicon need a graph of the topology {_TOPOLOGY}, not {topology}.")
        token_id = {token: position for position, token in enumerate(graph.tokens.tokens)}
        silence = graph.meta.get("silence")
        self._silence = token_id.get(silence) if silence is not None else None
        self._variants: dict[str, list[tuple[int, ...]]] = {}
        self._lexicon = lexicon
        self._token_id = token_id

    def aligned(self, hypothesis: Hypothesis) -> Hypothesis:
        """The hypothesis with the times of its words' phones; unchanged where the lexicon does not explain them."""
        phones = [run for run in hypothesis.phones if run[0] != self._silence]
        variants = [self._variants_of(word) for word in hypothesis.words]
        ends = word_ends([token for token, _, _ in phones], variants)
        if ends is None:
            return hypothesis
        begins = [0, *ends[:-1]]
        return replace(
            hypothesis,
            start_frames=tuple(phones[begin][1] for begin in begins[: len(ends)]),
            end_frames=tuple(phones[end - 1][2] for end in ends),
        )

    def _variants_of(self, word: str) -> list[tuple[int, ...]]:
        if word not in self._variants:
            known = self._token_id
            spelled = self._lexicon.pronunciations.get(word, [])
            self._variants[word] = [
                tuple(known[phone] for phone in phones) for phones in spelled if all(phone in known for phone in phones)
            ]
        return self._variants[word]


def word_ends(phones: Sequence[int], variants: Sequence[Sequence[tuple[int, ...]]]) -> list[int] | None:
    """After how many phones each word ends.

    Args:
        phones: (P,) tokens.
        variants: for each of W words its pronunciations.

    Returns:
        (W,) ascending, the last being P unless phones of a word that has not been written yet follow; the last word
        may lack phones. None where the words do not explain the phones.
    """
    # For each number of words, the numbers of phones that they can take, and what the words before took.
    reached: list[dict[int, int]] = [{0: -1}]
    for position, choices in enumerate(variants):
        is_last = position == len(variants) - 1
        after: dict[int, int] = {}
        for begin in reached[-1]:
            for choice in choices:
                end = begin + len(choice)
                if tuple(phones[begin:end]) == choice:
                    after.setdefault(end, begin)
                elif is_last and begin < len(phones) < end and tuple(phones[begin:]) == choice[: len(phones) - begin]:
                    after.setdefault(len(phones), begin)
        reached.append(after)
    if not variants or not reached[-1]:
        return None
    end = len(phones) if len(phones) in reached[-1] else max(reached[-1])
    ends: list[int] = []
    for before in reversed(reached[1:]):
        ends.append(end)
        end = before[end]
    return ends[::-1]
