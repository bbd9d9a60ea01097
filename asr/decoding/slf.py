"""Lattices in HTK's standard lattice format (SLF).

Nodes have times, links have words and scores, in unscaled natural logs: `a` is the acoustic score, `r` the graph's
(HTK's field for pronunciation scores), `l` the language model's; files of SRILM may have a second one, `n`. The header
has the weights `acscale`, `prscale`, `lmscale` and `wdpenalty`, so that HTK computes the same total. `d` is a link's
token and its seconds, `v` the decoding graph's arc.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from asr.decoding.lattice import Lattice
from asr.decoding.lattice_links import MAX_LINKS, NO_ARC, NO_TOKEN, Link, lattice_from_links, links_of
from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError
from asr.text.documents import finite_number, read_text
from asr.text.symbols import EPSILON_ID, TokenTable, Vocabulary

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
    path: str | Path,
    vocabulary: Vocabulary,
    tokens: TokenTable,
    frame_seconds: float | None = None,
    max_links: int = MAX_LINKS,
) -> Lattice:
    """Reads the lattice of one utterance, written by `write_slf` or another program.

    A link without `d` becomes blank frames, as many as fit between its nodes' times, with all scores on the first.

    Args:
        path: the file, plain, .gz or .xz.
        vocabulary, tokens: the known words and tokens.
        frame_seconds: duration of a frame; None reads it from the file, or takes 0.01 if it is not there.
        max_links: maximum number of frames on all links.

    Raises:
        AsrError: the file cannot be read, is not a lattice, is too large, or has an unknown word or token.
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
    return _Reader(path, vocabulary, tokens, frame_seconds, log_of_base(header, path), max_links).lattice(nodes, rows)


class _Reader:
    """Converts the links of a file to `Link`s."""

    def __init__(
        self,
        path: Path,
        vocabulary: Vocabulary,
        tokens: TokenTable,
        frame_seconds: float,
        log_base: float,
        max_links: int,
    ) -> None:
        self._path = path
        self._word_id = {word: word_id for word_id, word in enumerate(vocabulary.words)}
        self._token_id = {token: token_id for token_id, token in enumerate(tokens.tokens)}
        self._frame_seconds = frame_seconds
        self._log_base = log_base
        self._max_links = max_links
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
        final = {ends[0]: (0.0, 0.0)}
        return lattice_from_links(self._num_states, starts[0], self._links, final, str(self._path), self._max_links)

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
        if len(self._links) + len(frames) > self._max_links:
            raise AsrError(f"{self._path}: the lattice has more than {self._max_links} frames on its links; prune it.")
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
            if len(frames) + num_frames > self._max_links:
                raise AsrError(f"{where}: the link is longer than {self._max_links} frames; the file is damaged.")
            frames += [self._token_id[token]] * num_frames
        return frames

    def _num_frames(self, where: str, seconds: float) -> int:
        if seconds / self._frame_seconds > self._max_links:
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
