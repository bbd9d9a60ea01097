"""HTK's standard lattice format (SLF).

Nodes have times, links words and scores: `a` the acoustic score, `r` the graph's (HTK's place for pronunciations), `l`
the language model's, natural logs, unscaled. The header has the weights, `acscale`, `prscale`, `lmscale` and
`wdpenalty`, so that HTK's total is ours. `d` tells a link's token and its seconds, `v` the decoding graph's arc.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TextIO

from asr.decoding.lattice.lattice import Lattice
from asr.decoding.lattice.links import NO_ARC, NO_TOKEN, Link, lattice_from_links, links_of
from asr.decoding.options import DecodingOptions
from asr.errors import AsrError
from asr.text.tokens import TokenTable
from asr.text.vocabulary import EPSILON_ID, Vocabulary

NO_WORD = "!NULL"
_NOT_WORDS = {NO_WORD, "!SENT_START", "!SENT_END", "<s>", "</s>"}
_FIELD = re.compile(r"(\w+)=(\S*)")
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
        file: open for writing.
        utterance: its name.
        lattice: of one utterance.
        vocabulary, tokens: those of the decoding graph.
        options: scales, for the header.
        frame_seconds: between two frames of the lattice.
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
        word = NO_WORD if link.word_id == EPSILON_ID else vocabulary.words[link.word_id]
        scores = f"a={link.am_score:.9g} r={link.graph_score:.9g} l={link.lm_score:.9g}"
        line = f"J={number} S={link.src_state} E={link.dst_state} W={word} {scores}"
        if link.token_id != NO_TOKEN:
            line += f" v={link.graph_arc} d=:{tokens.tokens[link.token_id]},{frame_seconds:.4f}:"
        lines.append(line)
    for number, (state, (graph_score, lm_score)) in enumerate(links.final.items(), start=len(links.links)):
        lines.append(f"J={number} S={state} E={end} W={NO_WORD} a=0 r={graph_score:.9g} l={lm_score:.9g}")
    file.write("\n".join(lines) + "\n")


def read_slf(
    path: str | Path, vocabulary: Vocabulary, tokens: TokenTable, frame_seconds: float | None = None
) -> Lattice:
    """The lattice of one utterance, from here or from another program.

    Links without `d` have as many frames as lie between their nodes' times, of blank, and all scores on the first.

    Args:
        path: the file.
        vocabulary, tokens: what its words and tokens are called.
        frame_seconds: between two frames; what the file itself tells if None.

    Raises:
        AsrError: the file cannot be read or is no lattice, or has a word or token that is not known.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AsrError(f"{path}: the lattice cannot be read ({error}).") from error
    told = _FRAME_SECONDS.search(text)
    if frame_seconds is None:
        frame_seconds = _number(told[1], str(path)) if told else 0.01
    nodes: dict[str, dict[str, str]] = {}
    rows: list[tuple[str, dict[str, str]]] = []
    header: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#") or not line.strip():
            continue
        fields = dict(_FIELD.findall(line))
        where = f"{path}:{number}"
        if "I" in fields:
            nodes[fields["I"]] = fields
        elif "J" in fields:
            rows.append((where, fields))
        elif fields:
            header.update(fields)
        else:
            raise AsrError(f"{where}: {line.strip()!r} is no field of a lattice (name=value).")
    if not nodes or "N" not in header:
        raise AsrError(
            f"{path}: this is no HTK lattice; it has no nodes (I=...) or does not tell their number (N=...)."
        )
    if len(nodes) != int(_number(header["N"], str(path))) or len(rows) != int(_number(header.get("L", "0"), str(path))):
        raise AsrError(
            f"{path}: the header tells of {header['N']} nodes and {header.get('L', '0')} links, there are {len(nodes)} "
            f"and {len(rows)}; the file is cut short."
        )
    base = _number(header.get("base", str(math.e)), str(path))
    return _Reader(path, vocabulary, tokens, frame_seconds, math.log(base)).lattice(nodes, rows)


class _Reader:
    """Links of the file to links of ours."""

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
                raise AsrError(f"{where}: a link leads from a node (S=) to a node (E=) of the file.")
            src_state, dst_state = number[row["S"]], number[row["E"]]
            has_exit.add(src_state)
            has_entry.add(dst_state)
            self._add(where, row, nodes[row["S"]], nodes[row["E"]], src_state, dst_state)
        starts = [state for state in range(len(nodes)) if state not in has_entry]
        ends = [state for state in range(len(nodes)) if state not in has_exit]
        if len(starts) != 1 or len(ends) != 1:
            raise AsrError(f"{self._path}: a lattice has one first and one last node, not {len(starts)}, {len(ends)}.")
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
        am_score, graph_score, lm_score = (
            self._log_base * _number(row.get(name, "0"), where) for name in ("a", "r", "l")
        )
        frames = self._frames(where, row, src, dst)
        scores = (am_score, graph_score, lm_score)
        if not frames:
            self._links.append(Link(src_state, dst_state, word_id, NO_TOKEN, *scores))
            return
        # The whole link's scores stand on its first frame.
        graph_arc = int(_number(row.get("v", "-1"), where)) if "d" in row else NO_ARC
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
            seconds = _number(dst.get("t", "0"), where) - _number(src.get("t", "0"), where)
            return [0] * max(0, round(seconds / self._frame_seconds))
        for part in filter(None, row["d"].split(":")):
            token, *rest = part.split(",")
            if token not in self._token_id or not rest:
                raise AsrError(f"{where}: {part!r} is no token of the acoustic model with its seconds.")
            frames += [self._token_id[token]] * max(1, round(_number(rest[0], where) / self._frame_seconds))
        return frames


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise AsrError(f"{where}: {text!r} is no number.") from error
