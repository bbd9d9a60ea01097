"""Reads lattices of other recognizers: SLF and k2.

`asr.decoding.kaldi_lattice` reads Kaldi's lattices, `asr.decoding.nbest_io` n-best lists.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch

from asr.decoding.k2 import FINAL_LABEL
from asr.decoding.kaldi_lattice import state_times
from asr.decoding.slf import log_of_base, require_whole, slf_fields
from asr.decoding.word_lattice import WordArc, WordLattice
from asr.errors import AsrError
from asr.text.documents import finite_number, read_text
from asr.torch_archive import load_tensors, ragged_parts

_NOT_WORDS = ("!NULL", "<eps>", "<s>", "</s>", "!SENT_START", "!SENT_END", "!ENTER", "!EXIT", "!SIL", "#0")


def read_word_ids(path: str | Path) -> dict[int, str]:
    """Reads Kaldi's `words.txt`: id -> word, which is empty for symbols that are not words.

    Raises:
        AsrError: the file cannot be read, or a line is not `word id`.
    """
    words: dict[int, str] = {}
    for number, line in enumerate(read_text(path, "word list").splitlines(), start=1):
        fields = line.split()
        if fields and (len(fields) != 2 or not fields[1].isdigit()):
            raise AsrError(f"{path}:{number}: expected 'word id', as in Kaldi's words.txt.")
        if fields:
            words[int(fields[1])] = "" if fields[0] in _NOT_WORDS else fields[0]
    return words


def read_slf_lattice(path: str | Path) -> WordLattice:
    """Reads a lattice in HTK's format. Scores may have any base, and words may be on nodes or links.

    The language model's score is the sum of `l`, `r` and SRILM's `n`, the last two times `prscale` and `ngscale` over
    `lmscale`, so that `lmscale` weighs them as the header says.

    Raises:
        AsrError: the file cannot be read, or is not such a lattice.
    """
    path = Path(path)
    header: dict[str, str] = {}
    nodes: dict[str, dict[str, str]] = {}
    links: list[tuple[str, dict[str, str]]] = []
    for number, line in enumerate(read_text(path, "lattice").splitlines(), start=1):
        fields = slf_fields(line)
        if line.startswith("#") or not line.strip():
            continue
        if "I" in fields:
            nodes[fields["I"]] = fields
        elif "J" in fields:
            links.append((f"{path}:{number}", fields))
        else:
            header.update(fields)
    if not nodes or not links:
        raise AsrError(f"{path}: this is not an HTK lattice: it has no nodes (I=...) or no links (J=...).")
    for kind, here in (("N", len(nodes)), ("L", len(links))):
        if kind in header and finite_number(header[kind], str(path)) != here:
            raise AsrError(
                f"{path}: the header announces {kind}={header[kind]}, but there are {here}; the file is cut short."
            )
    require_whole(header, nodes, path)
    log_base = log_of_base(header, path)
    shares = _lm_shares(header, path)
    state_of = {name: state for state, name in enumerate(nodes)}
    arcs = []
    for where, link in links:
        if link.get("S") not in nodes or link.get("E") not in nodes:
            raise AsrError(f"{where}: a link must lead from a node (S=) to a node (E=) of the file.")
        am_score = log_base * finite_number(link.get("a", "0"), where)
        lm_score = sum(log_base * share * finite_number(link.get(name, "0"), where) for name, share in shares.items())
        word = link.get("W", nodes[link["E"]].get("W", ""))
        word = "" if word in _NOT_WORDS else word
        arcs.append(WordArc(state_of[link["S"]], state_of[link["E"]], word, am_score, lm_score))
    entered, left = {arc.dst for arc in arcs}, {arc.src for arc in arcs}
    starts = [state for state in range(len(nodes)) if state not in entered]
    if len(starts) != 1:
        raise AsrError(f"{path}: the lattice must have one first node, not {len(starts)}.")
    time = {state_of[name]: finite_number(node["t"], str(path)) for name, node in nodes.items() if "t" in node}
    scales = [
        finite_number(header.get(name, default), str(path))
        for name, default in (("acscale", "1"), ("lmscale", "1"), ("wdpenalty", "0"))
    ]
    return WordLattice(
        "_".join(header.get("U", path.name.partition(".")[0]).split()),
        len(nodes),
        starts[0],
        arcs,
        {state: (0.0, 0.0) for state in range(len(nodes)) if state not in left},
        time,
        (scales[0], scales[1], scales[2] * log_base),
    )


def _lm_shares(header: Mapping[str, str], path: Path) -> dict[str, float]:
    """The weights of the scores `l`, `r` and `n` relative to `lmscale`; HTK and SRILM take 1 for a missing scale."""
    scales = {
        name: finite_number(header.get(scale, "1"), str(path))
        for name, scale in (("l", "lmscale"), ("r", "prscale"), ("n", "ngscale"))
    }
    return {name: scale / scales["l"] if scales["l"] else 1.0 for name, scale in scales.items()}


def read_k2_lattices(path: str | Path, words: Mapping[int, str], frame_seconds: float) -> list[WordLattice]:
    """Reads lattices of k2 or icefall: an Fsa or FsaVec, saved by `torch.save(fsa.as_dict(), path)`. No code is run.

    An arc's `scores` are its total, of which `lm_scores`, if any, are the language model's part.

    Args:
        path: the file. A single lattice is named after it; several are named `file-1`, `file-2`, and so on.
        words: id -> word.
        frame_seconds: duration of a frame of the acoustic model.

    Raises:
        AsrError: the file cannot be read, or contains something else.
    """
    path = Path(path)
    try:
        content = load_tensors(path, states_of=["_k2.ragged RaggedTensor"])
    except (OSError, UnpicklingError) as error:
        raise AsrError(f"{path}: this is not a k2 lattice, or it is damaged ({error}).") from error
    arcs = content.get("arcs") if isinstance(content, dict) else None
    if not isinstance(arcs, torch.Tensor) or arcs.dtype != torch.int32:
        raise AsrError(f"{path}: this is not a k2 lattice: its arcs are not 32-bit integers.")
    splits, arcs = _k2_parts(arcs, path)
    labels = _k2_words(content.get("aux_labels"), len(arcs), path)
    lm_score = content.get("lm_scores")
    is_given = isinstance(lm_score, torch.Tensor) and lm_score.shape == (len(arcs),)
    lm_scores = lm_score.tolist() if is_given else [0.0] * len(arcs)  # type: ignore[union-attr]
    scores = arcs[:, 3].contiguous().view(torch.float32).tolist()
    arc_list = [
        _K2Arc(src, dst, label, score, old, ids)
        for (src, dst, label, _), score, old, ids in zip(arcs.tolist(), scores, lm_scores, labels, strict=True)
    ]
    names = [path.stem] if len(splits) == 2 else [f"{path.stem}-{number}" for number in range(1, len(splits))]
    return [
        _k2_lattice(name, arc_list[begin:end], words, frame_seconds, path)
        for name, (begin, end) in zip(names, itertools.pairwise(splits), strict=True)
    ]


class _K2Arc(NamedTuple):
    """An arc of k2: total score, the language model's part of it, and word ids."""

    src: int
    dst: int
    label: int
    score: float
    lm_score: float
    ids: list[int]


def _k2_parts(arcs: torch.Tensor, path: Path) -> tuple[list[int], torch.Tensor]:
    """Where the arcs of each lattice begin, with the end of the last one, and the arcs (A, 4).

    One lattice is saved as (A, 4). A vector of lattices is flattened: their number, 0, where the states of each begin,
    where the arcs of each begin, and the arcs. States are counted from 0 in each lattice.
    """
    if arcs.dim() == 2 and arcs.shape[1] == 4:
        return [0, len(arcs)], arcs
    if arcs.dim() == 1 and len(arcs) >= 2 and 0 <= int(arcs[0]) <= (len(arcs) - 4) // 2:
        number = int(arcs[0])
        splits, rest = arcs[3 + number : 4 + 2 * number].tolist(), arcs[4 + 2 * number :]
        rises = all(one <= other for one, other in itertools.pairwise(splits))
        if int(arcs[1]) == 0 and splits[0] == 0 and rises and 4 * splits[-1] == len(rest):
            return splits, rest.reshape(-1, 4)
    raise AsrError(f"{path}: this is not a k2 lattice: its arcs are not four integers each.")


def _k2_lattice(
    name: str, arcs: list[_K2Arc], words: Mapping[int, str], frame_seconds: float, path: Path
) -> WordLattice:
    found: list[WordArc] = []
    final: dict[int, tuple[float, float]] = {}
    frames: list[int] = []
    num_states = max((max(arc.src, arc.dst) for arc in arcs), default=0) + 1
    if num_states > 2 * len(arcs) + 1:  # a damaged file must not cause huge arrays
        raise AsrError(f"{path}: this is not a k2 lattice: it has {num_states} states, but only {len(arcs)} arcs.")
    for src, dst, label, score, old, ids in arcs:
        if min(src, dst) < 0 or not math.isfinite(score) or not math.isfinite(old):
            raise AsrError(f"{path}: this is not a k2 lattice: a state is negative, or a score is not finite.")
        if label == FINAL_LABEL:
            final[src] = max(final.get(src, (score - old, old)), (score - old, old), key=sum)
            continue
        unknown = [one for one in ids if one not in words]
        if unknown:
            raise AsrError(f"{path}: there is no word {unknown[0]} in the word list.")
        spoken = [words[one] for one in ids if words[one]] or [""]
        for position, word in enumerate(spoken):
            is_first, is_last = position == 0, position == len(spoken) - 1
            end = dst if is_last else num_states
            scores = (score - old, old) if is_first else (0.0, 0.0)
            found.append(WordArc(src, end, word, *scores))
            frames.append(int(is_last))
            src = end
            num_states += not is_last
    return WordLattice(name, num_states, 0, found, final, state_times(found, frames, frame_seconds))


def _k2_words(labels: Any, num_arcs: int, path: str | Path) -> list[list[int]]:
    """The word ids of each arc, from a tensor of one each or from a ragged tensor."""
    if isinstance(labels, torch.Tensor) and labels.shape == (num_arcs,):
        return [[label] if label > 0 else [] for label in labels.tolist()]
    parts = ragged_parts(labels, num_arcs)
    if parts is None:
        raise AsrError(f"{path}: the words ('aux_labels') must be one number or one list for each arc.")
    begin, values = (part.tolist() for part in parts)
    return [[one for one in values[first:end] if one > 0] for first, end in itertools.pairwise(begin)]
