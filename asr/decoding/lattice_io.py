"""Lattices in the formats of other programs: HTK's SLF, Kaldi's compact lattices, k2's FSAs.

In these formats, a link has at most one word; in a `Lattice`, an arc reads a frame and has any number of words. When an
arc is written, all its words except the last get separate links before it that read no frame. When a file is read,
links that read no frame are merged with the next link that reads one.

SLF: nodes have times, links have words and scores, in unscaled natural logs: `a` is the acoustic score, `r` the graph's
(HTK's field for pronunciation scores), `l` the language model's; files of SRILM may have a second one, `n`. The header
has the weights `acscale`, `prscale`, `lmscale` and `wdpenalty`, so that HTK computes the same total. `d` is a link's
token and its seconds, `v` the decoding graph's arc.

Kaldi's text archives: one line per arc, `from to word graph_cost,acoustic_cost,transition_ids`; one line per final
state; an empty line after each utterance. Costs are negated scores. A word is written as its id in the vocabulary (0
for none, as in Kaldi's words.txt), and a transition id is the acoustic token plus 1; an arc has at most one. The
acoustic cost is unscaled. The graph cost is the sum of the scaled scores of graph and language model and the word
insertion penalty; its parts are not stored. Kaldi's tools find the same paths with `--acoustic-scale` set to
`am_scale`.

Shapes: S states, A arcs, W words.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TextIO

import torch

from asr.decoding.interface import DecodingOptions
from asr.decoding.k2 import FINAL_LABEL, import_k2
from asr.decoding.lattice import Lattice
from asr.errors import AsrError
from asr.serialization import open_atomic
from asr.text.documents import LARGEST_NUMBER, finite_number, read_text
from asr.text.symbols import EPSILON_ID, TokenTable, Vocabulary
from asr.torch_archive import load_tensors, ragged_parts

NO_TOKEN = -1
NO_ARC = -1

# A small file may describe many links: a long silence, or many paths over links that read no frame.
_MAX_LINKS = 1_000_000


@dataclass(frozen=True)
class Link:
    """An arc with at most one word.

    Args:
        src_state, dst_state: source and destination state.
        word_id: the word; `EPSILON_ID` for none.
        token_id: the acoustic token of its frame; `NO_TOKEN` if it reads no frame.
        am_score, graph_score, lm_score: natural logs, unscaled.
        graph_arc: the arc of the decoding graph; `NO_ARC` if unknown.
    """

    src_state: int
    dst_state: int
    word_id: int
    token_id: int
    am_score: float = 0.0
    graph_score: float = 0.0
    lm_score: float = 0.0
    graph_arc: int = NO_ARC


@dataclass
class LatticeLinks:
    """A lattice of one utterance. States are ordered by frame, the start is state 0, and no link leads backward.

    Args:
        frame: number of frames read before each state.
        links: sorted by source state.
        final: final state -> its graph and language model score.
    """

    frame: list[int]
    links: list[Link] = field(default_factory=list)
    final: dict[int, tuple[float, float]] = field(default_factory=dict)


def links_of(lattice: Lattice) -> LatticeLinks:
    """Converts a lattice of one utterance to links with at most one word each."""
    src_state, dst_state = lattice.src_state().tolist(), lattice.dst_state.tolist()
    token_id, graph_arc = lattice.token_id.tolist(), lattice.graph_arc.tolist()
    scores = list(zip(lattice.am_score.tolist(), lattice.graph_score.tolist(), lattice.lm_score.tolist(), strict=True))
    word_begin, word_id = lattice.word_begin.tolist(), lattice.word_id.tolist()
    frame = lattice.frame.tolist()
    links: list[Link] = []
    for arc, state in enumerate(src_state):
        words = word_id[word_begin[arc] : word_begin[arc + 1]] or [EPSILON_ID]
        for word in words[:-1]:
            frame.append(frame[state])
            links.append(Link(state, len(frame) - 1, word, NO_TOKEN))
            state = len(frame) - 1
        links.append(Link(state, dst_state[arc], words[-1], token_id[arc], *scores[arc], graph_arc[arc]))
    may_end = (lattice.final_graph_score > -torch.inf).nonzero().squeeze(1)
    finals = zip(
        may_end.tolist(),
        lattice.final_graph_score[may_end].tolist(),
        lattice.final_lm_score[may_end].tolist(),
        strict=True,
    )
    return _sorted(frame, links, {state: (graph_score, lm_score) for state, graph_score, lm_score in finals})


def _sorted(frame: Sequence[int], links: Sequence[Link], final: dict[int, tuple[float, float]]) -> LatticeLinks:
    """Orders states by frame; in each frame, the lattice's states come before those added for words."""
    order = sorted(range(len(frame)), key=lambda state: (frame[state], state))
    number = [0] * len(order)
    for new, old in enumerate(order):
        number[old] = new
    renumbered = [replace(link, src_state=number[link.src_state], dst_state=number[link.dst_state]) for link in links]
    renumbered.sort(key=lambda link: link.src_state)
    return LatticeLinks(
        [frame[state] for state in order], renumbered, {number[state]: scores for state, scores in final.items()}
    )


@dataclass(frozen=True)
class _Way:
    """A path of links of which only the last reads a frame, merged into one link."""

    link: Link
    words: tuple[int, ...]


def lattice_from_links(
    num_states: int, start: int, links: Sequence[Link], final: dict[int, tuple[float, float]], name: str
) -> Lattice:
    """Builds the lattice of one utterance.

    Args:
        num_states: S.
        start: the start state.
        links: in any order.
        final: final state -> its graph and language model score.
        name: name of the file, for error messages.

    Raises:
        AsrError: there is a cycle, no reachable final state, a state reached by paths with different numbers of frames,
            or a word after the last frame.
    """
    out: list[list[Link]] = [[] for _ in range(num_states)]
    for link in links:
        out[link.src_state].append(link)
    order = _topological(out, start, name)
    ways: dict[int, list[_Way]] = {}
    ends = dict(final)
    num_ways = 0
    for state in reversed(order):
        ways[state] = []
        for link in out[state]:
            words = (link.word_id,) if link.word_id != EPSILON_ID else ()
            if link.token_id != NO_TOKEN:
                ways[state].append(_Way(link, words))
                continue
            num_ways += len(ways[link.dst_state])
            if num_ways > _MAX_LINKS:
                raise AsrError(
                    f"{name}: links that read no frame form more than {_MAX_LINKS} paths; prune the lattice."
                )
            ways[state] += [_Way(_after(link, way.link), words + way.words) for way in ways[link.dst_state]]
            if link.dst_state in ends:
                if words:
                    raise AsrError(f"{name}: there is a word after the last frame, which is not supported.")
                graph_score, lm_score = ends[link.dst_state]
                reached = (graph_score + link.graph_score + link.am_score, lm_score + link.lm_score)
                ends[state] = max(ends.get(state, reached), reached, key=sum)
    frame = {start: 0}
    for state in order:
        for way in ways[state] if state in frame else ():
            after = frame[state] + 1
            if frame.setdefault(way.link.dst_state, after) != after:
                raise AsrError(
                    f"{name}: state {way.link.dst_state} is reached after {frame[way.link.dst_state]} frames and after "
                    f"{after}; all paths to a state must have the same number of frames."
                )
    states = sorted(frame, key=lambda state: frame[state])
    if not any(state in ends for state in states):
        raise AsrError(f"{name}: no final state can be reached.")
    return _assembled(states, frame, ways, ends)


def _after(first: Link, second: Link) -> Link:
    """Merges a link that reads no frame with the one after it."""
    return replace(
        second,
        src_state=first.src_state,
        am_score=first.am_score + second.am_score,
        graph_score=first.graph_score + second.graph_score,
        lm_score=first.lm_score + second.lm_score,
    )


def _topological(out: list[list[Link]], start: int, name: str) -> list[int]:
    """The states that can be reached, in topological order."""
    order: list[int] = []
    mark: dict[int, int] = {}  # 1 entered, 2 left
    stack = [(start, 0)]
    while stack:
        state, position = stack.pop()
        if position == 0:
            if mark.get(state) == 2:
                continue
            mark[state] = 1
        if position < len(out[state]):
            stack.append((state, position + 1))
            dst_state = out[state][position].dst_state
            if mark.get(dst_state) == 1:
                raise AsrError(f"{name}: the lattice has a cycle through state {dst_state}.")
            if dst_state not in mark:
                stack.append((dst_state, 0))
        else:
            mark[state] = 2
            order.append(state)
    return order[::-1]


def _assembled(
    states: list[int], frame: dict[int, int], ways: dict[int, list[_Way]], ends: dict[int, tuple[float, float]]
) -> Lattice:
    number = {state: position for position, state in enumerate(states)}
    arcs = [way for state in states for way in ways[state]]
    counts = torch.tensor([len(ways[state]) for state in states])
    num_words = torch.tensor([len(way.words) for way in arcs], dtype=torch.int64)
    no_end = (-torch.inf, 0.0)
    final = [ends.get(state, no_end) for state in states]

    def of_links(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(way.link, name) for way in arcs], dtype=dtype)

    return Lattice(
        frame=torch.tensor([frame[state] for state in states]),
        utt_idx=torch.zeros(len(states), dtype=torch.int64),
        start_state=torch.zeros(1, dtype=torch.int64),
        arc_begin=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        dst_state=torch.tensor([number[way.link.dst_state] for way in arcs], dtype=torch.int64),
        graph_arc=of_links("graph_arc", torch.int64),
        token_id=of_links("token_id", torch.int32),
        am_score=of_links("am_score", torch.float32),
        graph_score=of_links("graph_score", torch.float32),
        lm_score=of_links("lm_score", torch.float32),
        word_begin=torch.cat([num_words.new_zeros(1), num_words.cumsum(0)]),
        word_id=torch.tensor([word for way in arcs for word in way.words], dtype=torch.int64),
        final_graph_score=torch.tensor([score for score, _ in final], dtype=torch.float32),
        final_lm_score=torch.tensor([score for _, score in final], dtype=torch.float32),
    )


NO_WORD = "!NULL"
_NOT_WORDS = {NO_WORD, "!SENT_START", "!SENT_END", "<s>", "</s>"}

# A value is quoted, or lasts until white space; a backslash takes away the meaning of the character after it.
_FIELD = re.compile(r"""(?<!\S)(\w+)=("(?:\\.|[^"\\])*"(?!\S)|'(?:\\.|[^'\\])*'(?!\S)|\S*)""")
# A token of a link and its seconds, and perhaps its score; the token itself may be a comma or colon.
_SPAN = re.compile(r":?(.+?),([-+.\deE]+)(?:,[-+.\deE]+)?(?=:|$)", re.DOTALL)
_ESCAPED = re.compile(r"((?:\\[0-7]{3})+)|\\(.)")
_ABBREVIATIONS = {
    "VERSION": "V",
    "UTTERANCE": "U",
    "NODES": "N",
    "LINKS": "L",
    "time": "t",
    "WORD": "W",
    "var": "v",
    "START": "S",
    "END": "E",
    "div": "d",
    "acoustic": "a",
    "language": "l",
    "ngram": "n",
}
_FRAME_SECONDS = re.compile(r"# frame_seconds=(\S+)")


def write_slf(
    file: TextIO,
    utterance: str,
    lattice: Lattice,
    vocabulary: Vocabulary,
    tokens: TokenTable,
    options: DecodingOptions,
    frame_seconds: float,
) -> None:
    """Writes the lattice of one utterance.

    Args:
        file: a file open for writing.
        utterance: name of the utterance.
        lattice: a lattice of one utterance.
        vocabulary, tokens: of the decoding graph.
        options: scales, for the header.
        frame_seconds: duration of a frame of the lattice.
    """
    links = links_of(lattice)
    end = len(links.frame)
    seconds = [*links.frame, links.frame[-1]]
    lines = [
        "VERSION=1.0",
        f"UTTERANCE={utterance}",
        f"# frame_seconds={frame_seconds:.9g}",
        f"acscale={options.am_scale:.9g}",
        f"prscale={options.graph_scale:.9g}",
        f"lmscale={options.lm_scale:.9g}",
        f"wdpenalty={options.word_insertion_penalty:.9g}",
        f"N={end + 1} L={len(links.links) + len(links.final)}",
    ]
    lines += [f"I={state} t={frame * frame_seconds:.4f}" for state, frame in enumerate(seconds)]
    for number, link in enumerate(links.links):
        word = NO_WORD if link.word_id == EPSILON_ID else _escaped(vocabulary.words[link.word_id])
        scores = f"a={link.am_score:.9g} r={link.graph_score:.9g} l={link.lm_score:.9g}"
        line = f"J={number} S={link.src_state} E={link.dst_state} W={word} {scores}"
        if link.token_id != NO_TOKEN:
            line += f" v={link.graph_arc} d=:{_escaped(tokens.tokens[link.token_id])},{frame_seconds:.4f}:"
        lines.append(line)
    for number, (state, (graph_score, lm_score)) in enumerate(links.final.items(), start=len(links.links)):
        lines.append(f"J={number} S={state} E={end} W={NO_WORD} a=0 r={graph_score:.9g} l={lm_score:.9g}")
    file.write("\n".join(lines) + "\n")


def slf_fields(line: str) -> dict[str, str]:
    """The fields of a line of an SLF file by their abbreviated names, such as `W` for `WORD` (HTK book, chapter 20).

    Values may be quoted with either kind of quotes, and have characters escaped as in HTK: with a backslash before the
    character, or as three octal digits for each of its bytes.
    """
    return {_ABBREVIATIONS.get(name, name): _unquoted(value) for name, value in _FIELD.findall(line)}


def _unquoted(value: str) -> str:
    if len(value) > 1 and value[0] in "\"'" and value[-1] == value[0]:
        value = value[1:-1]
    return _ESCAPED.sub(_unescaped, value) if "\\" in value else value


def _unescaped(match: re.Match[str]) -> str:
    if match[1] is None:
        return match[2]
    return bytes(int(digits, 8) & 0xFF for digits in match[1].split("\\")[1:]).decode(errors="replace")


def _escaped(word: str) -> str:
    """A word or token as `slf_fields` reads it."""
    word = word.replace("\\", "\\\\")
    return f"\\{word}" if word.startswith(('"', "'")) else word


def read_slf(
    path: str | Path, vocabulary: Vocabulary, tokens: TokenTable, frame_seconds: float | None = None
) -> Lattice:
    """Reads the lattice of one utterance, written by `write_slf` or another program.

    A link without `d` becomes blank frames, as many as fit between its nodes' times, with all scores on the first.

    Args:
        path: the file, plain, .gz or .xz.
        vocabulary, tokens: the known words and tokens.
        frame_seconds: duration of a frame; None reads it from the file, or takes 0.01 if it is not there.

    Raises:
        AsrError: the file cannot be read, is not a lattice, or has an unknown word or token.
    """
    path = Path(path)
    text = read_text(path, "lattice")
    if frame_seconds is None:
        given = _FRAME_SECONDS.search(text)
        frame_seconds = finite_number(given[1], str(path)) if given else 0.01
    nodes: dict[str, dict[str, str]] = {}
    rows: list[tuple[str, dict[str, str]]] = []
    header: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#") or not line.strip():
            continue
        fields = slf_fields(line)
        where = f"{path}:{number}"
        if "I" in fields:
            nodes[fields["I"]] = fields
        elif "J" in fields:
            rows.append((where, fields))
        elif fields:
            header.update(fields)
        else:
            raise AsrError(f"{where}: {line.strip()!r} is not a field of a lattice (name=value).")
    if not nodes or "N" not in header:
        raise AsrError(
            f"{path}: this is not an HTK lattice: it has no nodes (I=...), or their number (N=...) is missing."
        )
    announced = [int(finite_number(header.get(name, "0"), str(path))) for name in ("N", "L")]
    if [len(nodes), len(rows)] != announced:
        raise AsrError(
            f"{path}: the header announces {header['N']} nodes and {header.get('L', '0')} links, but there are "
            f"{len(nodes)} and {len(rows)}; the file is cut short."
        )
    require_whole(header, nodes, path)
    return _Reader(path, vocabulary, tokens, frame_seconds, log_of_base(header, path)).lattice(nodes, rows)


class _Reader:
    """Converts the links of a file to `Link`s."""

    def __init__(
        self, path: Path, vocabulary: Vocabulary, tokens: TokenTable, frame_seconds: float, log_base: float
    ) -> None:
        self._path = path
        self._word_id = {word: word_id for word_id, word in enumerate(vocabulary.words)}
        self._token_id = {token: token_id for token_id, token in enumerate(tokens.tokens)}
        self._frame_seconds = frame_seconds
        self._log_base = log_base
        self._links: list[Link] = []
        self._num_states = 0

    def lattice(self, nodes: dict[str, dict[str, str]], rows: list[tuple[str, dict[str, str]]]) -> Lattice:
        number = {name: position for position, name in enumerate(nodes)}
        self._num_states = len(nodes)
        has_entry, has_exit = set[int](), set[int]()
        for where, row in rows:
            if row.get("S") not in number or row.get("E") not in number:
                raise AsrError(f"{where}: a link must lead from a node (S=) to a node (E=) of the file.")
            src_state, dst_state = number[row["S"]], number[row["E"]]
            has_exit.add(src_state)
            has_entry.add(dst_state)
            self._add(where, row, nodes[row["S"]], nodes[row["E"]], src_state, dst_state)
        starts = [state for state in range(len(nodes)) if state not in has_entry]
        ends = [state for state in range(len(nodes)) if state not in has_exit]
        if len(starts) != 1 or len(ends) != 1:
            raise AsrError(f"{self._path}: there are {len(starts)} first and {len(ends)} last nodes, not one of each.")
        return lattice_from_links(self._num_states, starts[0], self._links, {ends[0]: (0.0, 0.0)}, str(self._path))

    def _add(
        self,
        where: str,
        row: dict[str, str],
        src: dict[str, str],
        dst: dict[str, str],
        src_state: int,
        dst_state: int,
    ) -> None:
        word = row.get("W", dst.get("W", NO_WORD))
        if word not in _NOT_WORDS and word not in self._word_id:
            raise AsrError(f"{where}: the word {word!r} is not in the vocabulary.")
        word_id = EPSILON_ID if word in _NOT_WORDS else self._word_id[word]
        am_score, graph_score, lm_score, ngram_score = (
            self._log_base * finite_number(row.get(name, "0"), where) for name in ("a", "r", "l", "n")
        )
        lm_score += ngram_score
        frames = self._frames(where, row, src, dst)
        if len(self._links) + len(frames) > _MAX_LINKS:
            raise AsrError(f"{self._path}: the lattice has more than {_MAX_LINKS} frames on its links; prune it.")
        scores = (am_score, graph_score, lm_score)
        if not frames:
            self._links.append(Link(src_state, dst_state, word_id, NO_TOKEN, *scores))
            return
        # All scores of the link go to its first frame.
        graph_arc = int(finite_number(row.get("v", "-1"), where)) if "d" in row else NO_ARC
        if not NO_ARC <= graph_arc < 1 << 62:
            raise AsrError(f"{where}: {graph_arc} (v=) is not an arc of a decoding graph.")
        for position, token_id in enumerate(frames):
            is_last = position == len(frames) - 1
            following = dst_state if is_last else self._num_states
            self._num_states += not is_last
            if position == 0:
                self._links.append(Link(src_state, following, word_id, token_id, *scores, graph_arc))
            else:
                self._links.append(Link(src_state, following, EPSILON_ID, token_id))
            src_state = following

    def _frames(self, where: str, row: dict[str, str], src: dict[str, str], dst: dict[str, str]) -> list[int]:
        """The token of each frame of a link."""
        frames: list[int] = []
        if "d" not in row:
            seconds = finite_number(dst.get("t", "0"), where) - finite_number(src.get("t", "0"), where)
            return [0] * self._num_frames(where, seconds)
        spans, position = row["d"].removesuffix(":"), 0
        while position < len(spans):
            span = _SPAN.match(spans, position)
            if span is None or span[1] not in self._token_id:
                part = spans[position : None if span is None else span.end()].removeprefix(":")
                raise AsrError(f"{where}: {part!r} is not a token of the acoustic model with its seconds.")
            token, position = span[1], span.end()
            num_frames = max(1, self._num_frames(where, finite_number(span[2], where)))
            if len(frames) + num_frames > _MAX_LINKS:
                raise AsrError(f"{where}: the link is longer than {_MAX_LINKS} frames; the file is damaged.")
            frames += [self._token_id[token]] * num_frames
        return frames

    def _num_frames(self, where: str, seconds: float) -> int:
        if seconds / self._frame_seconds > _MAX_LINKS:
            raise AsrError(f"{where}: the link is {seconds:g} s long; the file is damaged.")
        return max(0, round(seconds / self._frame_seconds))


def require_whole(header: Mapping[str, str], nodes: Mapping[str, Mapping[str, str]], path: str | Path) -> None:
    """Rejects an SLF file that has sub-lattices, because the words in them would be lost.

    Raises:
        AsrError: a node stands for a sub-lattice (`L=`), or the file defines one (`SUBLAT=`).
    """
    named = [f"I={name} L={fields['L']}" for name, fields in nodes.items() if "L" in fields]
    named += [f"SUBLAT={header['SUBLAT']}"] if "SUBLAT" in header else []
    if named:
        raise AsrError(f"{path}: {named[0]}: sub-lattices are not supported; expand them where the file was made.")


def log_of_base(header: Mapping[str, str], path: str | Path) -> float:
    """Factor from the scores of an SLF file to natural logs: the log of the header's base, which is e if not given.

    Raises:
        AsrError: the base is not a number above 0 other than 1. HTK writes 0 for scores that are not logarithms.
    """
    base = finite_number(header.get("base", str(math.e)), str(path))
    if base <= 0 or base == 1:
        raise AsrError(f"{path}: the base of logarithms in the header is {base:g}; it must be above 0, and not 1.")
    return math.log(base)


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


def read_kaldi_lattices(path: str | Path, num_words: int) -> Iterator[tuple[str, Lattice]]:
    """Reads the utterances of an archive and their lattices. Missing values are 0, or -1 for graph arcs.

    Args:
        path: a text archive of compact lattices, of `write_kaldi_lattice` or Kaldi, plain, .gz or .xz.
        num_words: size of the vocabulary of the word ids.

    Raises:
        AsrError: the file cannot be read, or a line is not part of a lattice; the message names the line.
    """
    path = Path(path)
    lines = read_text(path, "lattices").splitlines()
    utterance: str | None = None
    first, rows = 0, list[tuple[int, list[str]]]()
    for number, line in enumerate([*lines, ""], start=1):
        fields = line.split()
        if fields and utterance is None:
            if len(fields) > 1:
                raise AsrError(f"{path}:{number}: expected the name of an utterance, not {line.strip()!r}.")
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
                    raise AsrError(
                        f"{path}:{number}: a final state has frames; run lattice-align-words or a similar tool."
                    )
                continue
            if len(fields) not in (3, 4):
                raise ValueError(fields)
            dst_state, word_id = numbered(fields[1]), int(fields[2])
            graph_cost, am_cost, tokens = _weight(fields[3] if len(fields) == 4 else "0,0,")
        except (ValueError, IndexError) as error:
            raise AsrError(
                f"{path}:{number}: {' '.join(fields)!r} is neither an arc 'from to word graph,acoustic,transitions' "
                "nor a final state of a compact lattice."
            ) from error
        if not 0 <= word_id < num_words:
            raise AsrError(f"{path}:{number}: there is no word {word_id} in a vocabulary of {num_words}.")
        scores = (-am_cost, -graph_cost)
        token = tokens[0] if tokens else NO_TOKEN
        links.append(Link(state, dst_state, word_id, token, *scores))
        if len(tokens) > 1:
            extra.append((len(links) - 1, dst_state, tokens[1:], number))
    num_states = len(state_of)
    # An arc of several frames becomes several arcs, with all scores on the first.
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
    if not abs(float(graph_cost)) + abs(float(am_cost)) <= LARGEST_NUMBER or not min(tokens, default=0) >= 0:
        raise ValueError(text)
    if max(tokens, default=0) >= 1 << 31:
        raise ValueError(text)
    return float(graph_cost), float(am_cost), tokens


_SCORES = ("am_score", "graph_score", "lm_score")


def lattice_to_k2(lattice: Lattice, options: DecodingOptions) -> Any:
    """Converts a lattice of one utterance to a `k2.Fsa`, with states ordered by frame.

    Labels are acoustic tokens, `scores` are the scaled totals. Attributes of arcs are `am_score`, `graph_score`,
    `lm_score`, unscaled; `graph_arc`, -1 on final arcs; `aux_labels`, ragged, the words.

    Raises:
        AsrError: k2 cannot be imported.
    """
    k2 = import_k2()
    ends = (lattice.final_graph_score > -torch.inf).nonzero().squeeze(1)
    src_state = torch.cat([lattice.src_state(), ends])
    # k2 requires the arcs of a state to be adjacent, with its final arc last.
    order = torch.sort(src_state, stable=True).indices
    num_ends = len(ends)
    final_state = torch.full((num_ends,), lattice.num_states)
    final_label = torch.full((num_ends,), FINAL_LABEL)
    total = torch.cat([lattice.arc_total(options), lattice.final_total(options)[ends]]).float()
    columns = [
        src_state,
        torch.cat([lattice.dst_state, final_state]),
        torch.cat([lattice.token_id.long(), final_label]),
        total.view(torch.int32).long(),
    ]
    fsa = k2.Fsa(torch.stack(columns, dim=1)[order].to(torch.int32).contiguous())
    zeros = torch.zeros(num_ends, dtype=torch.float32)
    fsa.am_score = torch.cat([lattice.am_score, zeros])[order]
    fsa.graph_score = torch.cat([lattice.graph_score, lattice.final_graph_score[ends]])[order]
    fsa.lm_score = torch.cat([lattice.lm_score, lattice.final_lm_score[ends]])[order]
    fsa.graph_arc = torch.cat([lattice.graph_arc, torch.full((num_ends,), -1)])[order].to(torch.int32)
    words = [*torch.split(lattice.word_id, lattice.num_words().tolist()), *[lattice.word_id[:0]] * num_ends]
    fsa.aux_labels = k2.RaggedTensor([words[position].tolist() for position in order.tolist()], dtype=torch.int32)
    return fsa


def _lattice_of_arcs(
    arcs: torch.Tensor, attributes: Mapping[str, torch.Tensor], words: Sequence[Sequence[int]], name: str
) -> Lattice:
    """k2's arcs (A, 4), attributes (A,) each, and the words of each arc -> a lattice of one utterance."""
    values = arcs[:, :3].long()
    is_final = values[:, 2] == FINAL_LABEL
    inner, ends = (~is_final).nonzero().squeeze(1), is_final.nonzero().squeeze(1)
    num_states = int(values[:, :2].max()) if len(values) else 0
    src_state, dst_state, label = values.unbind(1)
    # States are ordered by frame, and the final one comes last.
    is_sound = len(ends) > 0 and bool((src_state >= 0).all() and (src_state[1:] >= src_state[:-1]).all())
    is_sound = is_sound and bool((dst_state > src_state).all() and (dst_state[ends] == num_states).all())
    is_sound = is_sound and bool((dst_state[inner] < num_states).all() and (label[inner] >= 0).all())
    is_sound = is_sound and num_states <= len(values) and bool((attributes["graph_arc"] >= NO_ARC).all())
    is_sound = is_sound and all(bool(attributes[score].isfinite().all()) for score in _SCORES)
    is_sound = is_sound and all(word >= 0 for row in words for word in row)
    if not is_sound:
        raise AsrError(f"{name}: the arcs are not those of a lattice; use one that `lattice_to_k2` created.")
    counts = torch.bincount(values[inner, 0], minlength=num_states)
    frame = torch.zeros(num_states, dtype=torch.int64)
    for src, dst in values[inner, :2].tolist():
        frame[dst] = frame[src] + 1
    chosen = [words[position] for position in inner.tolist()]
    num_words = torch.tensor([len(row) for row in chosen], dtype=torch.int64)
    no_end = torch.full((num_states,), -torch.inf, dtype=torch.float32)
    return Lattice(
        frame=frame,
        utt_idx=torch.zeros(num_states, dtype=torch.int64),
        start_state=torch.zeros(1, dtype=torch.int64),
        arc_begin=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        dst_state=values[inner, 1],
        graph_arc=attributes["graph_arc"][inner].long(),
        token_id=values[inner, 2].to(torch.int32),
        am_score=attributes["am_score"][inner],
        graph_score=attributes["graph_score"][inner],
        lm_score=attributes["lm_score"][inner],
        word_begin=torch.cat([num_words.new_zeros(1), num_words.cumsum(0)]),
        word_id=torch.tensor([word for row in chosen for word in row], dtype=torch.int64),
        final_graph_score=no_end.index_copy(0, values[ends, 0], attributes["graph_score"][ends]),
        final_lm_score=torch.zeros(num_states, dtype=torch.float32).index_copy(
            0, values[ends, 0], attributes["lm_score"][ends]
        ),
    )


def save_k2_lattice(path: str | Path, lattice: Lattice, options: DecodingOptions) -> None:
    """Writes a file for `k2.Fsa.from_dict(torch.load(path))`.

    Raises:
        AsrError: the file cannot be written; an existing file is left unchanged.
    """
    file = io.BytesIO()  # torch's file writer may end the process if the disk is full
    torch.save(lattice_to_k2(lattice, options).as_dict(), file)
    with open_atomic(Path(path)) as whole:
        whole.write(file.getbuffer())


def load_k2_lattice(path: str | Path) -> Lattice:
    """Reads what `save_k2_lattice` wrote, without k2, and without running code from the file.

    Raises:
        AsrError: the file cannot be read, is damaged, or is not such a lattice.
    """
    try:
        content = load_tensors(path, states_of=["_k2.ragged RaggedTensor"])
    except (OSError, UnpicklingError) as error:
        raise AsrError(f"{path}: this is not a k2 lattice, or it is damaged ({error}).") from error
    names = ("arcs", *_SCORES, "graph_arc", "aux_labels")
    missing = [name for name in names if not isinstance(content, dict) or name not in content]
    if missing:
        raise AsrError(f"{path}: this is not a k2 lattice: it lacks the attribute {missing[0]!r}.")
    arcs, attributes = content["arcs"], {name: content[name] for name in names[1:-1]}
    dtypes = {**dict.fromkeys(_SCORES, torch.float32), "graph_arc": torch.int32}
    if not _is_tensor(arcs, torch.int32, 2) or arcs.shape[1] != 4 or not len(arcs):
        raise AsrError(f"{path}: this is not a k2 lattice: its arcs are not four integers each.")
    for name, value in attributes.items():
        if not _is_tensor(value, dtypes[name], 1) or len(value) != len(arcs):
            raise AsrError(f"{path}: the attribute {name!r} must have one {dtypes[name]} for each arc.")
    words = ragged_parts(content["aux_labels"], len(arcs))
    if words is None:
        raise AsrError(f"{path}: the words ('aux_labels') must be one list for each arc.")
    begin, values = (part.tolist() for part in words)
    rows = [values[first:end] for first, end in itertools.pairwise(begin)]
    return _lattice_of_arcs(arcs, attributes, rows, str(path))


def _is_tensor(value: Any, dtype: torch.dtype, num_dimensions: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype and value.dim() == num_dimensions
