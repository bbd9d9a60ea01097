"""Our lattices as k2's FSAs, and back.

Shapes: S states, A arcs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from asr.decoding.lattice.lattice import Lattice
from asr.decoding.options import DecodingOptions
from asr.errors import AsrError
from asr.graph.k2_conversion import import_k2
from asr.restricted_pickle import load_tensors

_FINAL_LABEL = -1
_SCORES = ("am_score", "graph_score", "lm_score")


def lattice_to_k2(lattice: Lattice, options: DecodingOptions) -> Any:
    """A `k2.Fsa` of a lattice of one utterance, states in the order of frames.

    Labels are acoustic tokens, `scores` the scaled totals. Attributes of its arcs: `am_score`, `graph_score`,
    `lm_score`, unscaled; `graph_arc`, -1 on final arcs; `aux_labels`, ragged, the words.

    Raises:
        AsrError: k2 is not there.
    """
    k2 = import_k2()
    ends = (lattice.final_graph_score > -torch.inf).nonzero().squeeze(1)
    src_state = torch.cat([lattice.src_state(), ends])
    # k2 wants each state's arcs together, final ones last.
    order = torch.sort(src_state, stable=True).indices
    num_ends = len(ends)
    final_state = torch.full((num_ends,), lattice.num_states)
    final_label = torch.full((num_ends,), _FINAL_LABEL)
    total = torch.cat([lattice.arc_total(options), lattice.final_total(options)[ends]]).float()
    columns = [
        src_state,
        torch.cat([lattice.dst_state, final_state]),
        torch.cat([lattice.token_id.long(), final_label]),
        total.view(torch.int32).long(),
    ]
    fsa = k2.Fsa(torch.stack(columns, dim=1)[order].to(torch.int32).contiguous())
    zeros = torch.zeros(num_ends)
    fsa.am_score = torch.cat([lattice.am_score, zeros])[order]
    fsa.graph_score = torch.cat([lattice.graph_score, lattice.final_graph_score[ends]])[order]
    fsa.lm_score = torch.cat([lattice.lm_score, lattice.final_lm_score[ends]])[order]
    fsa.graph_arc = torch.cat([lattice.graph_arc, torch.full((num_ends,), -1)])[order].to(torch.int32)
    words = [*torch.split(lattice.word_id, lattice.num_words().tolist()), *[lattice.word_id[:0]] * num_ends]
    fsa.aux_labels = k2.RaggedTensor([words[position].tolist() for position in order.tolist()], dtype=torch.int32)
    return fsa


def lattice_from_k2_fsa(fsa: Any, name: str = "FSA") -> Lattice:
    """The lattice of a `k2.Fsa` as `lattice_to_k2` makes it.

    Raises:
        AsrError: it has not all these attributes.
    """
    missing = [attribute for attribute in (*_SCORES, "graph_arc", "aux_labels") if not hasattr(fsa, attribute)]
    if missing:
        raise AsrError(f"{name}: the FSA lacks the attribute {missing[0]!r}; take one that `lattice_to_k2` made.")
    values = fsa.arcs.values()[:, :3].long()
    is_final = values[:, 2] == _FINAL_LABEL
    inner, ends = (~is_final).nonzero().squeeze(1), is_final.nonzero().squeeze(1)
    num_states = int(values[:, :2].max()) if len(values) else 0
    counts = torch.bincount(values[inner, 0], minlength=num_states)
    frame = torch.zeros(num_states, dtype=torch.int64)
    for src_state, dst_state in values[inner, :2].tolist():
        frame[dst_state] = frame[src_state] + 1
    words = fsa.aux_labels.tolist()
    chosen = [words[position] for position in inner.tolist()]
    num_words = torch.tensor([len(row) for row in chosen], dtype=torch.int64)
    no_end = torch.full((num_states,), -torch.inf)
    return Lattice(
        frame=frame,
        utt_idx=torch.zeros(num_states, dtype=torch.int64),
        start_state=torch.zeros(1, dtype=torch.int64),
        arc_begin=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        dst_state=values[inner, 1],
        graph_arc=fsa.graph_arc[inner].long(),
        token_id=values[inner, 2].to(torch.int32),
        am_score=fsa.am_score[inner],
        graph_score=fsa.graph_score[inner],
        lm_score=fsa.lm_score[inner],
        word_begin=torch.cat([num_words.new_zeros(1), num_words.cumsum(0)]),
        word_id=torch.tensor([word for row in chosen for word in row], dtype=torch.int64),
        final_graph_score=no_end.index_copy(0, values[ends, 0], fsa.graph_score[ends]),
        final_lm_score=torch.zeros(num_states).index_copy(0, values[ends, 0], fsa.lm_score[ends]),
    )


def save_k2_lattice(path: str | Path, lattice: Lattice, options: DecodingOptions) -> None:
    """Writes what `k2.Fsa.from_dict(torch.load(path))` reads."""
    torch.save(lattice_to_k2(lattice, options).as_dict(), str(path))


def load_k2_lattice(path: str | Path) -> Lattice:
    """Reads what `save_k2_lattice` wrote, without running code from the file.

    Raises:
        AsrError: the file cannot be read, or holds something else.
    """
    k2 = import_k2()
    try:
        fsa = k2.Fsa.from_dict(load_tensors(path, ["_k2.ragged RaggedTensor"]))
    except Exception as error:
        raise AsrError(f"{path}: this is no k2 lattice, or it is damaged ({type(error).__name__}).") from error
    return lattice_from_k2_fsa(fsa, str(path))
