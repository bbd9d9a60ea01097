"""Lattices in HTK's standard lattice format (SLF).

Nodes have times, links have words and scores, in unscaled natural logs: `a` is the acoustic score, `r` the graph's
(HTK's field for pronunciation scores), `l` the language model's; files of SRILM may have a second one, `n`. The header
has the weights `acscale`, `prscale`, `lmscale` and `wdpenalty`, so that HTK computes the same total. `d` is a link's
token and its seconds, `v` the decoding graph's arc. The word `</s>` ends a sentence, also if another one follows; SRILM
takes it for no word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from asr.decoding.lattice import Lattice
from asr.decoding.lattice_links import MAX_LINKS, NO_ARC, NO_TOKEN, Link, frame_links, lattice_from_links, links_of
from asr.decoding.settings import DecodingOptions
from asr.decoding.word_lattice import NOT_WORDS, WordArc, WordLattice, word_or_end
from asr.errors import AsrError
from asr.text.documents import finite_number, read_text
from asr.text.symbols import EPSILON_ID, UNK_ID, TokenTable, Vocabulary

NO_WORD = "!NULL"

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
_OF_NODES = ("W", "a", "r")  # fields that nodes may have instead of the links that lead to them
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


class _SlfLink(NamedTuple):
    """A link of a file: its place in the file, the numbers of its nodes, its word, empty for none, and all fields."""

    where: str
    src: int
    dst: int
    word: str
    fields: dict[str, str]

    def number(self, name: str, default: str = "0") -> float:
        return finite_number(self.fields.get(name, default), self.where)


class _SlfFile(NamedTuple):
    """The content of a file: fields of the header, seconds of the nodes that have them, links, first and last nodes.

    `log_base` is the factor from its scores to natural logs.
    """

    path: Path
    header: dict[str, str]
    num_nodes: int
    seconds: dict[int, float]
    links: list[_SlfLink]
    start: int
    ends: list[int]
    log_base: float

    def number(self, name: str, default: str) -> float:
        return finite_number(self.header.get(name, default), str(self.path))


def _read_file(path: Path) -> _SlfFile:
    header: dict[str, str] = {}
    nodes: dict[str, dict[str, str]] = {}
    rows: list[tuple[str, dict[str, str]]] = []
    for number, line in enumerate(read_text(path, "lattice").splitlines(), start=1):
        if given := _FRAME_SECONDS.match(line):
            header["frame_seconds"] = given[1]
        if line.startswith("#") or not line.strip():
            continue
        fields = slf_fields(line)
        if "I" in fields:
            nodes[fields["I"]] = fields
        elif "J" in fields:
            rows.append((f"{path}:{number}", fields))
        elif fields:
            header.update(fields)
        else:
            raise AsrError(f"{path}:{number}: {line.strip()!r} is not a field of a lattice (name=value).")
    if not nodes or not rows:
        raise AsrError(f"{path}: this is not an HTK lattice: it has no nodes (I=...) or no links (J=...).")
    for kind, here in (("N", len(nodes)), ("L", len(rows))):
        if kind in header and finite_number(header[kind], str(path)) != here:
            raise AsrError(
                f"{path}: the header announces {kind}={header[kind]}, but there are {here}; the file is cut short."
            )
    _require_whole(header, nodes, path)
    number_of = {name: number for number, name in enumerate(nodes)}
    links: list[_SlfLink] = []
    for where, fields in rows:
        src, dst = fields.get("S", ""), fields.get("E", "")
        if src not in nodes or dst not in nodes:
            raise AsrError(f"{where}: a link must lead from a node (S=) to a node (E=) of the file.")
        # SRILM writes the words, and if asked to, the acoustic scores of links at the nodes that they lead to.
        fields = {**{name: nodes[dst][name] for name in _OF_NODES if name in nodes[dst]}, **fields}
        links.append(_SlfLink(where, number_of[src], number_of[dst], fields.get("W", ""), fields))
    entered, left = {link.dst for link in links}, {link.src for link in links}
    starts = _named("start", header, nodes) or [number for number in range(len(nodes)) if number not in entered]
    if len(starts) != 1:
        raise AsrError(f"{path}: the lattice must have one first node, not {len(starts)}.")
    unit = finite_number(header.get("tscale", "1"), str(path))
    seconds = {
        number_of[name]: unit * finite_number(node["t"], str(path)) for name, node in nodes.items() if "t" in node
    }
    ends = _named("end", header, nodes) or [number for number in range(len(nodes)) if number not in left]
    return _SlfFile(path, header, len(nodes), seconds, links, starts[0], ends, _log_of_base(header, path))


def _named(field: str, header: Mapping[str, str], nodes: Mapping[str, Any]) -> list[int]:
    """The number of the node that SRILM names in the header; none if it does not."""
    return [number for number, name in enumerate(nodes) if name == header.get(field)]


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
    file = _read_file(Path(path))
    if frame_seconds is None:
        frame_seconds = file.number("frame_seconds", "0.01")
    return _Reader(file, vocabulary, tokens, frame_seconds, max_links).lattice()


class _Reader:
    """Converts the links of a file to `Link`s."""

    def __init__(
        self, file: _SlfFile, vocabulary: Vocabulary, tokens: TokenTable, frame_seconds: float, max_links: int
    ) -> None:
        self._file = file
        ordinary = {word: word_id for word_id, word in enumerate(vocabulary.words) if word_id >= UNK_ID}
        self._word_id = {**dict.fromkeys(NOT_WORDS, EPSILON_ID), **ordinary}
        self._token_id = {token: token_id for token_id, token in enumerate(tokens.tokens)}
        self._frame_seconds = frame_seconds
        self._max_links = max_links
        self._links: list[Link] = []
        self._num_states = file.num_nodes

    def lattice(self) -> Lattice:
        file = self._file
        for link in file.links:
            self._add(link)
        final = dict.fromkeys(file.ends, (0.0, 0.0))
        return lattice_from_links(self._num_states, file.start, self._links, final, str(file.path), self._max_links)

    def _add(self, link: _SlfLink) -> None:
        if link.word not in self._word_id:
            raise AsrError(f"{link.where}: the word {link.word!r} is not in the vocabulary.")
        word_id = self._word_id[link.word]
        am_score, graph_score, lm_score, ngram_score = (
            self._file.log_base * link.number(name) for name in ("a", "r", "l", "n")
        )
        scores = (am_score, graph_score, lm_score + ngram_score)
        frames = self._frames(link)
        if len(self._links) + len(frames) > self._max_links:
            raise AsrError(
                f"{self._file.path}: the lattice has more than {self._max_links} frames on its links; prune it."
            )
        graph_arc = int(link.number("v", "-1")) if "d" in link.fields else NO_ARC
        if not NO_ARC <= graph_arc < 1 << 62:
            raise AsrError(f"{link.where}: {graph_arc} (v=) is not an arc of a decoding graph.")
        self._links += frame_links(link.src, link.dst, word_id, frames, scores, self._num_states, graph_arc)
        self._num_states += max(0, len(frames) - 1)

    def _frames(self, link: _SlfLink) -> list[int]:
        """The token of each frame of a link."""
        frames: list[int] = []
        if "d" not in link.fields:
            seconds = self._file.seconds
            return [0] * self._num_frames(link.where, seconds.get(link.dst, 0.0) - seconds.get(link.src, 0.0))
        spans, position = link.fields["d"].removesuffix(":"), 0
        while position < len(spans):
            span = _SPAN.match(spans, position)
            if span is None or span[1] not in self._token_id:
                part = spans[position : None if span is None else span.end()].removeprefix(":")
                raise AsrError(f"{link.where}: {part!r} is not a token of the acoustic model with its seconds.")
            token, position = span[1], span.end()
            num_frames = max(1, self._num_frames(link.where, finite_number(span[2], link.where)))
            if len(frames) + num_frames > self._max_links:
                raise AsrError(f"{link.where}: the link is longer than {self._max_links} frames; the file is damaged.")
            frames += [self._token_id[token]] * num_frames
        return frames

    def _num_frames(self, where: str, seconds: float) -> int:
        if seconds / self._frame_seconds > self._max_links:
            raise AsrError(f"{where}: the link is {seconds:g} s long; the file is damaged.")
        return max(0, round(seconds / self._frame_seconds))


def read_slf_lattice(path: str | Path) -> WordLattice:
    """Reads a lattice of any recognizer, for rescoring. Scores may have any base, and words may be on nodes or links.

    The language model's score is the sum of `l`, `r` and SRILM's `n`, the last two times `prscale` and `ngscale` over
    `lmscale`, so that `lmscale` weighs them as the header says.

    Raises:
        AsrError: the file cannot be read, or is not such a lattice.
    """
    file = _read_file(Path(path))
    am_scale, lm_scale, *others = (file.number(name, "1") for name in ("acscale", "lmscale", "prscale", "ngscale"))
    shares = [1.0, *(scale / lm_scale if lm_scale else 1.0 for scale in others)]
    arcs = []
    for link in file.links:
        am_score = file.log_base * link.number("a")
        lm_score = sum(file.log_base * share * link.number(name) for name, share in zip("lrn", shares, strict=True))
        arcs.append(WordArc(link.src, link.dst, word_or_end(link.word), am_score, lm_score))
    return WordLattice(
        "_".join(file.header.get("U", file.path.name.partition(".")[0]).split()),
        file.num_nodes,
        file.start,
        arcs,
        dict.fromkeys(file.ends, (0.0, 0.0)),
        file.seconds,
        (am_scale, lm_scale, file.number("wdpenalty", "0") * file.log_base),
    )


def _require_whole(header: Mapping[str, str], nodes: Mapping[str, Mapping[str, str]], path: str | Path) -> None:
    """Rejects an SLF file that has sub-lattices, because the words in them would be lost."""
    named = [f"I={name} L={fields['L']}" for name, fields in nodes.items() if "L" in fields]
    named += [f"SUBLAT={header['SUBLAT']}"] if "SUBLAT" in header else []
    if named:
        raise AsrError(f"{path}: {named[0]}: sub-lattices are not supported; expand them where the file was made.")


def _log_of_base(header: Mapping[str, str], path: str | Path) -> float:
    """Factor from the scores of an SLF file to natural logs: the log of the header's base, which is e if not given."""
    # HTK writes 0 for scores that are not logarithms.
    base = finite_number(header.get("base", str(math.e)), str(path))
    if base <= 0 or base == 1:
        raise AsrError(f"{path}: the base of logarithms in the header is {base:g}; it must be above 0, and not 1.")
    return math.log(base)
