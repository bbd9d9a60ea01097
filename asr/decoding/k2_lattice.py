"""Lattices as k2's FSAs, in files of torch; k2 itself is only needed to write them."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch

from asr.decoding.k2 import FINAL_LABEL, import_k2
from asr.decoding.lattice import Lattice
from asr.decoding.lattice_links import NO_ARC
from asr.decoding.settings import DecodingOptions
from asr.decoding.word_lattice import SENTENCE_END, WordArc, WordLattice, state_times
from asr.errors import AsrError
from asr.serialization import open_atomic
from asr.torch_archive import load_tensors, ragged_parts

_SCORES = ("am_score", "graph_score", "lm_score")


def lattice_to_k2(lattice: Lattice, options: DecodingOptions, sentence_ends: torch.Tensor | None = None) -> Any:
    """Converts a lattice of one utterance to a `k2.Fsa`, with states ordered by frame.

    Labels are acoustic tokens, `scores` are the scaled totals. Attributes of arcs are `am_score`, `graph_score`,
    `lm_score`, unscaled; `graph_arc`, -1 on final arcs; `aux_labels`, ragged, the words; `sentence_end`, 1 where a
    sentence ends and another one follows, if there are such arcs.

    Args:
        lattice: the lattice.
        options: scales.
        sentence_ends: (A,) bool, see `Lattice.sentence_ends`; None for none.

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
    if sentence_ends is not None and bool(sentence_ends.any()):
        fsa.sentence_end = torch.cat([sentence_ends, torch.zeros(num_ends, dtype=torch.bool)])[order].to(torch.int32)
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


def save_k2_lattice(
    path: str | Path, lattice: Lattice, options: DecodingOptions, sentence_ends: torch.Tensor | None = None
) -> None:
    """Writes a file for `k2.Fsa.from_dict(torch.load(path))`; arguments as for `lattice_to_k2`.

    Raises:
        AsrError: the file cannot be written; an existing file is left unchanged.
    """
    file = io.BytesIO()  # torch's file writer may end the process if the disk is full
    torch.save(lattice_to_k2(lattice, options, sentence_ends).as_dict(), file)
    with open_atomic(Path(path)) as whole:
        whole.write(file.getbuffer())


def load_k2_lattice(path: str | Path) -> Lattice:
    """Reads what `save_k2_lattice` wrote, without k2, and without running code from the file.

    Raises:
        AsrError: the file cannot be read, is damaged, or is not such a lattice.
    """
    content = _content(path)
    arcs = content["arcs"]
    attributes: dict[str, Any] = {name: content.get(name) for name in (*_SCORES, "graph_arc")}
    if arcs.dim() != 2 or arcs.shape[1] != 4 or not len(arcs):
        raise AsrError(f"{path}: this is not a k2 lattice: its arcs are not four integers each.")
    for name, value in attributes.items():
        dtype = torch.float32 if name in _SCORES else torch.int32
        if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.shape != (len(arcs),):
            raise AsrError(f"{path}: the attribute {name!r} must have one {dtype} for each arc; use a lattice of ours.")
    return _lattice_of_arcs(arcs, attributes, _words_of_arcs(content, len(arcs), path), str(path))


def _content(path: str | Path) -> dict[str, Any]:
    """The attributes of an Fsa or FsaVec, of which `arcs` are 32-bit integers. No code is run."""
    try:
        content = load_tensors(path, states_of=["_k2.ragged RaggedTensor"])
    except (OSError, UnpicklingError) as error:
        raise AsrError(f"{path}: this is not a k2 lattice, or it is damaged ({error}).") from error
    arcs = content.get("arcs") if isinstance(content, dict) else None
    if not isinstance(arcs, torch.Tensor) or arcs.dtype != torch.int32:
        raise AsrError(f"{path}: this is not a k2 lattice: its arcs are not 32-bit integers.")
    return content


def _words_of_arcs(content: Mapping[str, Any], num_arcs: int, path: str | Path) -> list[list[int]]:
    """The word ids of each arc, from a tensor of one each (0 or -1 for none) or from a ragged tensor."""
    labels = content.get("aux_labels")
    if isinstance(labels, torch.Tensor) and labels.shape == (num_arcs,):
        return [[label] if label > 0 else [] for label in labels.tolist()]
    parts = ragged_parts(labels, num_arcs)
    if parts is None:
        raise AsrError(f"{path}: the words ('aux_labels') must be one number or one list for each arc.")
    begin, values = (part.tolist() for part in parts)
    return [values[first:end] for first, end in itertools.pairwise(begin)]


def read_k2_lattices(path: str | Path, words: Mapping[int, str], frame_seconds: float) -> list[WordLattice]:
    """Reads lattices of k2 or icefall: an Fsa or FsaVec, saved by `torch.save(fsa.as_dict(), path)`. No code is run.

    An arc's `scores` are its total, of which `lm_scores`, if any, are the language model's part. Where
    `sentence_end`, if any, is not 0, a sentence ends before the arc's words.

    Args:
        path: the file. A single lattice is named after it; several are named `file-1`, `file-2`, and so on.
        words: id -> word.
        frame_seconds: duration of a frame of the acoustic model.

    Raises:
        AsrError: the file cannot be read, or contains something else.
    """
    path = Path(path)
    content = _content(path)
    splits, arcs = _k2_parts(content["arcs"], path)
    labels = _words_of_arcs(content, len(arcs), path)
    lm_scores, ends = (_of_arcs(content.get(name), len(arcs)) for name in ("lm_scores", "sentence_end"))
    scores = arcs[:, 3].contiguous().view(torch.float32).tolist()
    arc_list = [
        _K2Arc(src, dst, label, score, old, ids, bool(end))
        for (src, dst, label, _), score, old, ids, end in zip(
            arcs.tolist(), scores, lm_scores, labels, ends, strict=True
        )
    ]
    names = [path.stem] if len(splits) == 2 else [f"{path.stem}-{number}" for number in range(1, len(splits))]
    return [
        _k2_lattice(name, arc_list[begin:end], words, frame_seconds, path)
        for name, (begin, end) in zip(names, itertools.pairwise(splits), strict=True)
    ]


def _of_arcs(attribute: Any, num_arcs: int) -> list[float]:
    """An optional attribute of arcs, one number each; 0 if it is not there."""
    is_given = isinstance(attribute, torch.Tensor) and attribute.shape == (num_arcs,)
    return attribute.tolist() if is_given else [0.0] * num_arcs


class _K2Arc(NamedTuple):
    """An arc of k2: total score, the language model's part of it, word ids, and whether a sentence ends before them."""

    src: int
    dst: int
    label: int
    score: float
    lm_score: float
    ids: list[int]
    is_end: bool


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
    for src, dst, label, score, old, ids, is_end in arcs:
        if min(src, dst) < 0 or not math.isfinite(score) or not math.isfinite(old):
            raise AsrError(f"{path}: this is not a k2 lattice: a state is negative, or a score is not finite.")
        if label == FINAL_LABEL:
            final[src] = max(final.get(src, (score - old, old)), (score - old, old), key=sum)
            continue
        unknown = [one for one in ids if one > 0 and one not in words]
        if unknown:
            raise AsrError(f"{path}: there is no word {unknown[0]} in the word list.")
        spoken = [SENTENCE_END] * is_end + [words[one] for one in ids if one > 0 and words[one]] or [""]
        for position, word in enumerate(spoken):
            is_first, is_last = position == 0, position == len(spoken) - 1
            end = dst if is_last else num_states
            scores = (score - old, old) if is_first else (0.0, 0.0)
            found.append(WordArc(src, end, word, *scores))
            frames.append(int(is_last))
            src = end
            num_states += not is_last
    return WordLattice(name, num_states, 0, found, final, state_times(found, frames, frame_seconds))
