"""Archives of Kaldi lattices, binary and text, compact and not; costs are negated scores.

Text archives: one line per arc, in compact lattices `from to word graph_cost,acoustic_cost,transition_ids`; one line
per final state; an empty line after each utterance. The layout of binary lattices is that of OpenFst's `vector-fst.h`,
with weights as in Kaldi's `lattice-weight.h`: graph cost and acoustic cost, and in compact lattices also the transition
ids that an arc reads.

In ours, which are compact text, a word is written as its id in the vocabulary (0 for none, as in Kaldi's words.txt),
and a transition id is the acoustic token plus 1; an arc has at most one. The acoustic cost is unscaled. The graph cost
is the sum of the scaled scores of graph and language model and the word insertion penalty; its parts are not stored.
Neither are the ends of sentences: to Kaldi's tools, every label is a word.
Kaldi's tools find the same paths with `--acoustic-scale` set to `am_scale`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from asr.decoding.lattice import Lattice
from asr.decoding.lattice_links import NO_TOKEN, Link, frame_links, lattice_from_links, links_of
from asr.decoding.settings import DecodingOptions
from asr.decoding.word_lattice import NOT_WORDS, WordArc, WordLattice, state_times
from asr.errors import AsrError
from asr.graph.openfst import OpenFstReader, is_openfst
from asr.text.documents import READING_ERRORS, finite_number, is_whole_number, open_text, read_text, unreadable
from asr.text.symbols import EPSILON_ID

_COMPACT, _PLAIN = "compactlattice44", "lattice44"


class _Arc(NamedTuple):
    """An arc of a file, or a final state if `dst` is None."""

    where: str
    src: int
    dst: int | None
    word_id: int
    am_score: float
    graph_score: float
    transitions: tuple[int, ...]


def write_kaldi_lattice(file: TextIO, utterance: str, lattice: Lattice, options: DecodingOptions) -> None:
    """Appends the lattice of one utterance to an archive; the utterance's name must not contain white space."""
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
    # In Kaldi, the state in the first line is the start state.
    lines += [line for state in sorted(by_state) for line in by_state[state]]
    file.write("\n".join(lines) + "\n\n")


def read_word_ids(path: str | Path) -> dict[int, str]:
    """Reads Kaldi's `words.txt`: id -> word, which is empty for symbols that are not words.

    Raises:
        AsrError: the file cannot be read, or a line is not `word id`.
    """
    words: dict[int, str] = {}
    for number, line in enumerate(read_text(path, "word list").splitlines(), start=1):
        fields = line.split()
        if fields and (len(fields) != 2 or not is_whole_number(fields[1])):
            raise AsrError(f"{path}:{number}: expected 'word id', as in Kaldi's words.txt.")
        if fields:
            words[int(fields[1])] = "" if fields[0] in NOT_WORDS else fields[0]
    return words


def is_binary_lattice(head: bytes) -> bool:
    """Whether a file begins like a binary lattice or an archive of binary lattices."""
    return is_openfst(head) or is_openfst(head.partition(b" ")[2])


def read_kaldi_lattices(path: str | Path, num_words: int) -> Iterator[tuple[str, Lattice]]:
    """Reads the utterances of an archive and their lattices. Missing values are 0, or -1 for graph arcs.

    Args:
        path: the archive, binary or text, compact or not, plain, .gz or .xz.
        num_words: size of the vocabulary of the word ids.

    Raises:
        AsrError: the file cannot be read, or a line is not part of a lattice; the message names the line.
    """
    for name, start, arcs in _archive(Path(path)):
        if not arcs:
            raise AsrError(f"{path}: {name}: the lattice is empty.")
        yield name, _frame_lattice(f"{path}: {name}", start, arcs, num_words)


def read_kaldi_archive(path: str | Path, words: Mapping[int, str], frame_seconds: float) -> Iterator[WordLattice]:
    """Reads the lattices of an archive, for rescoring; one that the other recognizer left empty has no sentence.

    Args:
        path: the archive, binary (`lat.1.gz`) or text, as `lattice-copy ark:lat.1 ark,t:lat.txt` writes it.
        words: id -> word.
        frame_seconds: duration of a frame of the acoustic model.

    Raises:
        AsrError: the file cannot be read, or contains anything other than lattices.
    """
    for name, start, arcs in _archive(Path(path)):
        yield _word_lattice(name, start, arcs, words, frame_seconds)


def _archive(path: Path) -> Iterator[tuple[str, int, list[_Arc]]]:
    """Reads the name, start state and arcs of each lattice."""
    with open_text(path, "lattice archive") as file:
        try:
            is_binary = is_binary_lattice(file.peek(4096))  # type: ignore[attr-defined]
            content = file.read() if is_binary else b""
        except READING_ERRORS as error:
            raise unreadable(path, "lattice archive", error) from error
    yield from _binary(path, content) if is_binary else _text(path)


def _text(path: Path) -> Iterator[tuple[str, int, list[_Arc]]]:
    """Reads the name, start state and arcs of each text lattice."""
    name, arcs = "", list[_Arc]()
    for number, line in enumerate([*read_text(path, "lattice archive").splitlines(), ""], start=1):
        fields = line.split()
        if fields and not name:
            if len(fields) > 1:
                raise AsrError(f"{path}:{number}: expected the name of an utterance, not {line.strip()!r}.")
            name = fields[0]
        elif fields:
            arcs.append(_text_arc(f"{path}:{number}", fields))
        elif name:
            yield name, arcs[0].src if arcs else 0, arcs
            name, arcs = "", []


def _text_arc(where: str, fields: Sequence[str]) -> _Arc:
    # Compact lattices have `graph,acoustic,1_2_3`; others have the transition id before the word.
    is_arc = len(fields) >= 3
    is_compact = len(fields) < 5 and (len(fields) < 4 or "," in fields[3])
    has_weight = len(fields) in (2, 5) or (len(fields) == 4 and is_compact)
    costs = fields[-1].split(",") if has_weight else []
    graph_cost, am_cost, ids = (*costs, "", "", "")[:3]
    if is_arc and not is_compact:
        ids = fields[2].removeprefix("0")
    transitions = [*filter(None, ids.split("_"))]
    if len(fields) > 5 or len(costs) > 3 or not all(map(is_whole_number, [*fields[: 1 + is_arc], *transitions])):
        raise AsrError(f"{where}: {' '.join(fields)[:60]!r} is neither an arc nor a final state of a lattice.")
    scores = [-finite_number(cost or "0", where) for cost in (am_cost, graph_cost)]
    word = (fields[2] if is_compact else fields[3]) if is_arc else "0"
    if not is_whole_number(word):
        raise AsrError(f"{where}: there is no word {word[:60]} in the word list.")
    dst = int(fields[1]) if is_arc else None
    return _Arc(where, int(fields[0]), dst, int(word), scores[0], scores[1], tuple(map(int, transitions)))


def _binary(path: Path, content: bytes) -> Iterator[tuple[str, int, list[_Arc]]]:
    """Reads the name, start state and arcs of each binary lattice."""
    if is_openfst(content):
        yield (path.name.partition(".")[0], *_binary_lattice(OpenFstReader(content, 0, str(path))))
        return
    position = 0
    while position < len(content):
        end = content.find(b" ", position, position + 4096)
        name = content[position:end].decode("utf-8", "replace")
        if end <= position or name.split() != [name]:
            raise AsrError(f"{path}: byte {position}: expected the name of an utterance; the archive is damaged.")
        reader = OpenFstReader(content, end + 1, f"{path}: {name}")
        yield (name, *_binary_lattice(reader))
        position = reader.position


def _binary_lattice(reader: OpenFstReader) -> tuple[int, list[_Arc]]:
    """Reads the start state and arcs of one binary lattice."""
    header = reader.header()
    if header.kind != "vector" or header.arc_type not in (_COMPACT, _PLAIN):
        raise AsrError(
            f"{reader.name}: this is not a lattice but a transducer of type {header.kind!r} with arcs of type "
            f"{header.arc_type!r}; 'lattice-copy ark:... ark,t:...' writes lattices as text."
        )
    is_compact = header.arc_type == _COMPACT
    arcs: list[_Arc] = []
    for state in range(header.num_states):
        am_score, graph_score, transitions = _weight(reader, is_compact)
        if am_score + graph_score > -math.inf:
            arcs.append(_Arc(reader.name, state, None, 0, am_score, graph_score, transitions))
        (num_arcs,) = reader.values("<q")
        for _ in range(num_arcs):
            label, word_id = reader.values("<ii")
            am_score, graph_score, transitions = _weight(reader, is_compact)
            (dst,) = reader.values("<i")
            if not 0 <= dst < header.num_states:
                raise AsrError(f"{reader.name}: an arc leads to a state that does not exist; the file is damaged.")
            if not is_compact and label:
                transitions = (label,)
            if am_score + graph_score > -math.inf:  # else no path uses the arc
                arcs.append(_Arc(reader.name, state, dst, word_id, am_score, graph_score, transitions))
    return header.start, arcs


def _weight(reader: OpenFstReader, is_compact: bool) -> tuple[float, float, tuple[int, ...]]:
    """Reads a weight -> acoustic score, graph score and transition ids."""
    graph_cost, am_cost = reader.values("<ff")
    if math.isnan(graph_cost) or math.isnan(am_cost) or -math.inf in (graph_cost, am_cost):
        raise AsrError(f"{reader.name}: a weight is not a number; the file is damaged.")
    if not is_compact:
        return -am_cost, -graph_cost, ()
    (size,) = reader.values("<i")
    begin = reader.advance(4 * size)  # refuses sizes below 0
    return -am_cost, -graph_cost, struct.unpack_from(f"<{size}i", reader.content, begin)


def _frame_lattice(name: str, start: int, arcs: Sequence[_Arc], num_words: int) -> Lattice:
    state_of = {start: 0}
    for arc in arcs:
        for state in (arc.src, arc.dst):
            if state is not None:
                state_of.setdefault(state, len(state_of))
    num_states = len(state_of)
    links: list[Link] = []
    final: dict[int, tuple[float, float]] = {}
    for arc in arcs:
        if arc.dst is None:
            if arc.transitions:
                raise AsrError(f"{arc.where}: a final state has frames; run lattice-align-words or a similar tool.")
            final[state_of[arc.src]] = (arc.graph_score + arc.am_score, 0.0)
            continue
        if not 0 <= arc.word_id < num_words:
            raise AsrError(f"{arc.where}: there is no word {arc.word_id} in a vocabulary of {num_words}.")
        if not all(0 < one <= 1 << 31 for one in arc.transitions):
            raise AsrError(f"{arc.where}: a transition id is not a number from 1 to {1 << 31}.")
        tokens = [one - 1 for one in arc.transitions]
        scores = (arc.am_score, arc.graph_score, 0.0)
        links += frame_links(state_of[arc.src], state_of[arc.dst], arc.word_id, tokens, scores, num_states)
        num_states += max(0, len(tokens) - 1)
    return lattice_from_links(num_states, 0, links, final, name)


def _word_lattice(
    name: str, start: int, arcs: Sequence[_Arc], words: Mapping[int, str], frame_seconds: float
) -> WordLattice:
    state_of = {start: 0}
    found: list[WordArc] = []
    final: dict[int, tuple[float, float]] = {}
    frames: list[int] = []
    for arc in arcs:
        src = state_of.setdefault(arc.src, len(state_of))
        if arc.dst is None:
            final[src] = (arc.am_score, arc.graph_score)
            continue
        if arc.word_id not in words:
            raise AsrError(f"{arc.where}: there is no word {arc.word_id} in the word list.")
        dst = state_of.setdefault(arc.dst, len(state_of))
        found.append(WordArc(src, dst, words[arc.word_id], arc.am_score, arc.graph_score))
        frames.append(len(arc.transitions))
    return WordLattice(name, len(state_of), 0, found, final, state_times(found, frames, frame_seconds))
