"""Which words went wrong: utterances aligned for a reader, and the most frequent confusions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import kaldialign

GAP = ""  # which no word is


def align(reference: Sequence[str], hypothesis: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs (reference word, hypothesis word); `GAP` stands for an insertion or a deletion."""
    return [(str(a), str(b)) for a, b in kaldialign.align(list(reference), list(hypothesis), GAP)]


def format_alignment(reference: Sequence[str], hypothesis: Sequence[str]) -> str:
    """Three lines, words under each other: REF, HYP, and a mark S, I or D under each error; `*` stands for no word."""
    rows: tuple[list[str], list[str], list[str]] = (["REF:"], ["HYP:"], ["    "])
    for ref_word, hyp_word in align(reference, hypothesis):
        mark = "" if ref_word == hyp_word else "I" if ref_word == GAP else "D" if hyp_word == GAP else "S"
        shown = ref_word or "*", hyp_word or "*", mark
        width = max(map(len, shown))
        for row, text in zip(rows, shown, strict=True):
            row.append(text.ljust(width))
    return "\n".join(" ".join(row).rstrip() for row in rows)


def confusions(
    references: Mapping[str, Sequence[str]], hypotheses: Mapping[str, Sequence[str]]
) -> Counter[tuple[str, str]]:
    """How often each wrong pair (reference word, hypothesis word) occurs; `GAP` as in `align`."""
    return Counter(
        pair
        for utt_id, reference in references.items()
        for pair in align(reference, hypotheses.get(utt_id, ()))
        if pair[0] != pair[1]
    )


def format_confusions(counts: Counter[tuple[str, str]], num_shown: int = 20) -> Iterable[str]:
    """The most frequent ones, a line each."""
    for (ref_word, hyp_word), count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:num_shown]:
        if ref_word == GAP:
            yield f"{count:6d}  inserted  {hyp_word}"
        elif hyp_word == GAP:
            yield f"{count:6d}  deleted   {ref_word}"
        else:
            yield f"{count:6d}  {ref_word} -> {hyp_word}"
