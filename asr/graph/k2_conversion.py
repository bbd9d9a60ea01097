"""Decoding graphs as k2 wants them.

Shapes: S states, A arcs, F final states.
"""

from __future__ import annotations

from typing import Any

import torch

from asr.errors import AsrError
from asr.graph.artefact import DecodingGraph

FINAL_LABEL = -1
NO_ARC = -1


def import_k2() -> Any:
    """The k2 module.

    Raises:
        AsrError: it is not there.
    """
    try:
        import k2
    except ImportError as error:
        raise AsrError(f"k2 does not import here ({error}); `asr doctor` says how to install it.") from error
    return k2


def to_k2(graph: DecodingGraph) -> Any:
    """A `k2.Fsa` that reads tokens, one a frame, on the graph's device.

    It has one state more than the graph: k2's only final state, to which each state that may end has an arc with the
    label -1 and the final score. Attributes of its arcs: `arc_idx`, the graph's arc, and `dst_state`, the
    graph state that it leads to; both are -1 on final arcs.

    Raises:
        AsrError: the graph has input epsilons, which k2 would read as blanks, or k2 is not there.
    """
    k2 = import_k2()
    if graph.has_epsilons:
        raise AsrError("k2 would take the graph's arcs that read nothing for blanks; call `remove_epsilons` first.")
    device = graph.device
    ends = torch.nonzero(torch.isfinite(graph.final_score))[:, 0].to(torch.int32)
    num_ends, num_arcs = ends.numel(), graph.num_arcs
    src_state = torch.cat([graph.src_state(), ends])
    # Within a state its final arc comes last; the stable sort keeps all else in order.
    order = torch.sort(src_state, stable=True).indices

    def both(of_arcs: torch.Tensor, of_ends: torch.Tensor) -> torch.Tensor:
        return torch.cat([of_arcs.to(of_ends.dtype), of_ends])[order]

    def constant(value: int) -> torch.Tensor:
        return torch.full((num_ends,), value, dtype=torch.int32, device=device)

    score = both(graph.score, graph.final_score[ends.long()]).contiguous()
    columns = [
        src_state[order],
        both(graph.dst_state, constant(graph.num_states)),
        both(graph.token_id, constant(FINAL_LABEL)),
        score.view(torch.int32),
    ]
    fsa = k2.Fsa(torch.stack(columns, dim=1).contiguous())
    fsa.arc_idx = both(torch.arange(num_arcs, device=device), constant(NO_ARC))
    fsa.dst_state = both(graph.dst_state, constant(NO_ARC))
    return fsa
