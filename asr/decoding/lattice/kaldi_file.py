"""Kaldi's text archives of compact lattices.

A line an arc: `from to word graph_cost,acoustic_cost,transition_ids`; a line a final state; an empty line behind each
utterance. Costs are negative scores. Here a word is its id in the vocabulary (0 is nothing, as in Kaldi's words.txt), a
transition id is the acoustic token plus 1, and an arc has one or none.

Kaldi knows two costs: the acoustic one is unscaled, and the graph cost has the graph's score, the language model's and
the word insertion penalty in it, each scaled. So Kaldi's tools find the same paths with `--acoustic-scale` set to
`am_scale`; the split of the graph cost is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from asr.decoding.lattice.lattice import Lattice
from asr.decoding.lattice.links import NO_TOKEN, Link, lattice_from_links, links_of
from asr.decoding.options import DecodingOptions
from asr.errors import AsrError
from asr.text.vocabulary import EPSILON_ID


def write_kaldi_lattice(file: TextIO, utterance: str, lattice: Lattice, options: DecodingOptions) -> None:
    """Appends the lattice of one utterance to an archive; the utterance's name has no white space."""
    links = links_of(lattice)
    lines = [utterance + " "]
    by_state: dict[int, list[str]] = {}
    for link in links.links:
        score = options.graph_scale * link.graph_score + options.lm_scale * link.lm_score
        score += options.word_insertion_penalty * (link.word_id != EPSILON_ID)
        transition = "" if link.token_id == NO_TOKEN else str(link.token_id + 1)
        weight = f"{-score:.9g},{-link.am_score:.9g},{transition}"
        by_state.setdefault(link.src_state, []).append(f"{link.src_state}\t{link.dst_state}\t{link.word_id}\t{weight}")
    for state, (graph_score, lm_score) in links.final.items():
        score = options.graph_scale * graph_score + options.lm_scale * lm_score
        by_state.setdefault(state, []).append(f"{state}\t{-score:.9g},0,")
    # Kaldi takes the state of the first line for the start.
    lines += [line for state in sorted(by_state) for line in by_state[state]]
    file.write("\n".join(lines) + "\n\n")


def read_kaldi_lattices(path: str | Path, num_words: int) -> Iterator[tuple[str, Lattice]]:
    """The utterances of an archive with their lattices; what is not in the file is 0, or -1 for arcs of the graph.

    Args:
        path: a text archive of compact lattices, from here or from Kaldi.
        num_words: size of the vocabulary that the words' ids number.

    Raises:
        AsrError: the file cannot be read, or something in it is no lattice; the line is named.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AsrError(f"{path}: the lattices cannot be read ({error}).") from error
    utterance: str | None = None
    first, rows = 0, list[tuple[int, list[str]]]()
    for number, line in enumerate([*lines, ""], start=1):
        fields = line.split()
        if fields and utterance is None:
            if len(fields) > 1:
                raise AsrError(f"{path}:{number}: here stands an utterance's name alone, not {line.strip()!r}.")
            utterance, first, rows = fields[0], number, []
        elif fields:
            rows.append((number, fields))
        elif utterance is not None:
            yield utterance, _parsed(rows, f"{path}:{first}", path, num_words)
            utterance = None


def _parsed(rows: Sequence[tuple[int, list[str]]], name: str, path: Path, num_words: int) -> Lattice:
    if not rows:
        raise AsrError(f"{name}: the lattice is empty.")
    links: list[Link] = []
    final: dict[int, tuple[float, float]] = {}
    state_of: dict[str, int] = {}

    def numbered(field: str) -> int:
        if not field.isdigit():
            raise ValueError(field)
        return state_of.setdefault(field, len(state_of))

    extra: list[tuple[int, int, list[int], int]] = []
    for number, fields in rows:
        try:
            state = numbered(fields[0])
            if len(fields) <= 2:
                graph_cost, am_cost, tokens = _weight(fields[1] if len(fields) == 2 else "0,0,")
                final[state] = (-graph_cost - am_cost, 0.0)
                if tokens:
                    raise AsrError(f"{path}:{number}: frames on a final state; run lattice-align-words or the like.")
                continue
            if len(fields) not in (3, 4):
                raise ValueError(fields)
            dst_state, word_id = numbered(fields[1]), int(fields[2])
            graph_cost, am_cost, tokens = _weight(fields[3] if len(fields) == 4 else "0,0,")
        except (ValueError, IndexError) as error:
            raise AsrError(
                f"{path}:{number}: {' '.join(fields)!r} is no arc 'from to word graph,acoustic,transitions' and no "
                "final state of a compact lattice."
            ) from error
        if not 0 <= word_id < num_words:
            raise AsrError(f"{path}:{number}: there is no word {word_id} in a vocabulary of {num_words}.")
        scores = (-am_cost, -graph_cost)
        token = tokens[0] if tokens else NO_TOKEN
        links.append(Link(state, dst_state, word_id, token, *scores))
        if len(tokens) > 1:
            extra.append((len(links) - 1, dst_state, tokens[1:], number))
    num_states = len(state_of)
    # A word of several frames becomes several arcs, all its scores on the first.
    for position, dst_state, tokens, _ in extra:
        link = links[position]
        links[position] = Link(link.src_state, num_states, link.word_id, link.token_id, link.am_score, link.graph_score)
        for offset, token in enumerate(tokens, start=1):
            is_last = offset == len(tokens)
            links.append(Link(num_states, dst_state if is_last else num_states + 1, EPSILON_ID, token))
            num_states += 1
    return lattice_from_links(num_states, 0, links, final, name)


def _weight(text: str) -> tuple[float, float, list[int]]:
    graph_cost, am_cost, transitions = text.split(",")
    tokens = [int(transition) - 1 for transition in transitions.split("_") if transition]
    return float(graph_cost), float(am_cost), tokens
