"""Reads archives of Kaldi lattices, binary and text, compact and not.

The layout of binary lattices is that of OpenFst's `vector-fst.h`, with weights as in Kaldi's `lattice-weight.h`: graph
cost and acoustic cost, and in compact lattices also the transition ids that an arc reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from asr.decoding.word_lattice import WordArc, WordLattice
from asr.errors import AsrError
from asr.graph.openfst import MAGIC, OpenFstReader
from asr.text.documents import READING_ERRORS, finite_number, open_text, read_text, unreadable

_BINARY_MARK = MAGIC.to_bytes(4, "little")
_COMPACT, _PLAIN = "compactlattice44", "lattice44"


class _Arc(NamedTuple):
    """An arc of a file, or a final state if `dst` is None; costs are negated natural logs."""

    where: str
    src: int
    dst: int | None
    word_id: int
    graph_cost: float
    am_cost: float
    num_frames: int


def is_binary_lattice(head: bytes) -> bool:
    """Whether a file begins like a binary lattice or an archive of binary lattices."""
    return head.startswith(_BINARY_MARK) or head.partition(b" ")[2].startswith(_BINARY_MARK)


def read_kaldi_archive(path: str | Path, words: Mapping[int, str], frame_seconds: float) -> Iterator[WordLattice]:
    """Reads the lattices of a Kaldi archive, compact or not.

    Args:
        path: the archive, binary (`lat.1.gz`) or text, as `lattice-copy ark:lat.1 ark,t:lat.txt` writes it.
        words: id -> word.
        frame_seconds: duration of a frame of the acoustic model.

    Raises:
        AsrError: the file cannot be read, or contains anything other than lattices.
    """
    path = Path(path)
    with open_text(path, "lattice archive") as file:
        try:
            is_binary = is_binary_lattice(file.peek(4096))  # type: ignore[attr-defined]
            content = file.read() if is_binary else b""
        except READING_ERRORS as error:
            raise unreadable(path, "lattice archive", error) from error
    found = _binary(path, content) if is_binary else _text(path)
    for name, start, arcs in found:
        if not arcs:
            raise AsrError(f"{path}: {name}: the lattice is empty.")
        yield _lattice(name, start, arcs, words, frame_seconds)


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
    weight = fields[-1] if has_weight else "0,0"
    costs = (*weight.split(","), "", "")[:3]
    if len(fields) > 5 or not fields[0].isdigit() or (is_arc and not fields[1].isdigit()):
        raise AsrError(f"{where}: {' '.join(fields)!r} is neither an arc nor a final state of a lattice.")
    graph_cost, am_cost = (finite_number(cost or "0", where) for cost in costs[:2])
    if not is_arc:
        return _Arc(where, int(fields[0]), None, 0, graph_cost, am_cost, 0)
    label = fields[2] if is_compact else fields[3]
    if not label.isdigit():
        raise AsrError(f"{where}: there is no word {label} in the word list.")
    num_frames = len([one for one in costs[2].split("_") if one]) if is_compact else int(fields[2] != "0")
    return _Arc(where, int(fields[0]), int(fields[1]), int(label), graph_cost, am_cost, num_frames)


def _binary(path: Path, content: bytes) -> Iterator[tuple[str, int, list[_Arc]]]:
    """Reads the name, start state and arcs of each binary lattice."""
    if content.startswith(_BINARY_MARK):
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
        graph_cost, am_cost, num_frames = _weight(reader, is_compact)
        if graph_cost + am_cost < math.inf:
            arcs.append(_Arc(reader.name, state, None, 0, graph_cost, am_cost, num_frames))
        (num_arcs,) = reader.values("<q")
        for _ in range(num_arcs):
            label, word_id = reader.values("<ii")
            graph_cost, am_cost, num_frames = _weight(reader, is_compact)
            (dst,) = reader.values("<i")
            if not 0 <= dst < header.num_states:
                raise AsrError(f"{reader.name}: an arc leads to a state that does not exist; the file is damaged.")
            num_read = num_frames if is_compact else int(label != 0)
            arcs.append(_Arc(reader.name, state, dst, word_id, graph_cost, am_cost, num_read))
    return header.start, arcs


def _weight(reader: OpenFstReader, is_compact: bool) -> tuple[float, float, int]:
    """Reads a weight -> graph cost, acoustic cost and number of transition ids."""
    graph_cost, am_cost = reader.values("<ff")
    if math.isnan(graph_cost) or math.isnan(am_cost) or -math.inf in (graph_cost, am_cost):
        raise AsrError(f"{reader.name}: a weight is not a number; the file is damaged.")
    if not is_compact:
        return graph_cost, am_cost, 0
    (size,) = reader.values("<i")
    reader.advance(4 * size)
    return graph_cost, am_cost, size


def _lattice(
    name: str, start: int, arcs: Sequence[_Arc], words: Mapping[int, str], frame_seconds: float
) -> WordLattice:
    state_of = {start: 0}
    found: list[WordArc] = []
    final: dict[int, tuple[float, float]] = {}
    frames: list[int] = []
    for arc in arcs:
        src = state_of.setdefault(arc.src, len(state_of))
        if arc.dst is None:
            final[src] = (-arc.am_cost, -arc.graph_cost)
            continue
        if arc.word_id not in words:
            raise AsrError(f"{arc.where}: there is no word {arc.word_id} in the word list.")
        if not math.isfinite(arc.graph_cost + arc.am_cost):
            continue  # no path uses the arc
        dst = state_of.setdefault(arc.dst, len(state_of))
        found.append(WordArc(src, dst, words[arc.word_id], -arc.am_cost, -arc.graph_cost))
        frames.append(arc.num_frames)
    return WordLattice(name, len(state_of), 0, found, final, state_times(found, frames, frame_seconds))


def state_times(arcs: Sequence[WordArc], frames: Sequence[int], frame_seconds: float) -> dict[int, float]:
    """State -> seconds, from the number of frames that each arc reads; empty if none reads any."""
    if not any(frames):
        return {}
    out: dict[int, list[tuple[int, int]]] = {}
    for arc, num_frames in zip(arcs, frames, strict=True):
        out.setdefault(arc.src, []).append((arc.dst, num_frames))
    frame, pending = {0: 0}, [0]
    while pending:
        state = pending.pop()
        for dst, num_frames in out.get(state, ()):
            if dst not in frame:
                frame[dst] = frame[state] + num_frames
                pending.append(dst)
    return {state: number * frame_seconds for state, number in frame.items()}
