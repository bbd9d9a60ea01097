"""Lattices as k2 gives them, turned into ours.

Shapes: N utterances, T frames, C tokens, S states of ours, A arcs of ours.


Decoding graphs as k2 wants them.

Shapes: S states, A arcs, F final states.


The first pass by k2's pruned intersection; the language model rescores its lattice on the fly.

Shapes: N utterances, T frames, C tokens, S lattice states, A lattice arcs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asr.decoding.interface import DecodeResult, DecodingOptions
from asr.decoding.lattice import Lattice, LatticeParts, lattice_from_graph
from asr.decoding.log_probs import check_log_prob, skip_blanks
from asr.decoding.rescoring import LatticePath, rescore_lattice
from asr.decoding.search_graph import SearchGraph
from asr.decoding.token_passing import TokenPassingDecoder
from asr.decoding.word_map import WordMapper
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.interface import LanguageModel

_FINAL_LABEL = -1


def lattice_from_k2(fsas: Any, order: list[int], graph: DecodingGraph, log_prob: Tensor) -> tuple[Lattice, list[int]]:
    """Takes k2's final arcs off and looks all scores up anew, each by itself.

    Args:
        fsas: FsaVec of `intersect_dense_pruned`, with the attributes `arc_idx` and `frame`.
        order: for each of its FSAs the utterance.
        graph: the graph that was searched.
        log_prob: (N, T, C) of all utterances, unscaled.

    Returns:
        the lattice of all utterances that have a complete path, and which these are, in the order of its start states.
    """
    device = log_prob.device
    values = fsas.arcs.values().to(torch.int64)
    state_begin = fsas.arcs.row_splits(1).to(torch.int64)
    num_states = int(state_begin[-1])
    src_state = fsas.arcs.row_ids(2).to(torch.int64)
    dst_state = src_state + values[:, 1] - values[:, 0]
    is_final = values[:, 2] == _FINAL_LABEL
    inner = (~is_final).nonzero().squeeze(1)
    # A state's frame is told by the arcs around it; k2's own final states go.
    frame = torch.zeros(num_states, dtype=torch.int64, device=device)
    frame[dst_state[inner]] = fsas.frame[inner].to(torch.int64) + 1
    graph_state = torch.full((num_states,), graph.start_state, dtype=torch.int64, device=device)
    graph_arc = fsas.arc_idx[inner].to(torch.int64)
    graph_state[dst_state[inner]] = graph.dst_state[graph_arc].to(torch.int64)
    stays = torch.ones(num_states, dtype=torch.bool, device=device)
    stays[dst_state[is_final]] = False
    final_score = torch.full((num_states,), -torch.inf, device=device)
    ends = src_state[is_final]
    # k2's pass in chunks lets every state end; those of the graph that may not are no ends.
    ends = ends[graph.final_score[graph_state[ends]] > -torch.inf]
    final_score[ends] = graph.final_score[graph_state[ends]]
    num_of_fsa = state_begin[1:] - state_begin[:-1]
    has_path = torch.zeros(len(order), dtype=torch.bool, device=device)
    fsa_of = fsas.arcs.row_ids(1).to(torch.int64)
    has_path[fsa_of[ends]] = True
    stays &= has_path[fsa_of]
    kept = stays.nonzero().squeeze(1)
    by_frame = kept[torch.sort(frame[kept], stable=True).indices]
    if not bool(has_path.all()):
        inner = inner[stays[src_state[inner]]]
        graph_arc = fsas.arc_idx[inner].to(torch.int64)
    number = torch.full((num_states,), -1, dtype=torch.int64, device=device)
    number[by_frame] = torch.arange(len(by_frame), device=device)
    utt_of_fsa = torch.tensor(order, dtype=torch.int64, device=device)
    used = (has_path & (num_of_fsa > 0)).nonzero().squeeze(1)
    parts = LatticeParts(
        frame=frame[by_frame],
        utt_idx=utt_of_fsa[fsa_of[by_frame]],
        start_state=number[state_begin[:-1][used]],
        src_state=number[src_state[inner]],
        dst_state=number[dst_state[inner]],
        arc=graph_arc,
        lm_score=torch.zeros(len(inner), device=device),
        final_graph_score=final_score[by_frame],
        final_lm_score=torch.zeros(len(by_frame), device=device),
    )
    return lattice_from_graph(parts, graph, log_prob), utt_of_fsa[used].tolist()


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


# What k2 takes for no beam at all.
WIDEST_BEAM = 1e10


def require_k2(graph: DecodingGraph) -> Any:
    """The k2 module.

    Raises:
        AsrError: it does not import, or the graph has arcs that read nothing.
    """
    if graph.has_epsilons:
        raise AsrError(
            "the graph has arcs that read no frame, which k2 would take for blanks; build the graph without "
            "input epsilons or use the torch pass."
        )
    try:
        import k2
    except ImportError as error:
        raise AsrError(
            f"the k2 pass needs k2, which does not import here ({error}); `asr doctor` says how to install it, "
            "or use the torch pass."
        ) from error
    return k2


class K2Decoder:
    """Pruned intersection of whole utterances.

    Args:
        graph: decoding graph without arcs that read nothing, on the device where the search shall run.
        options: beams and scales.
        keep_lattice: whether results carry a lattice; with a language model it is split by word history and has the
            language model's scores.
    """

    def __init__(
        self, graph: DecodingGraph, options: DecodingOptions | None = None, *, keep_lattice: bool = False
    ) -> None:
        self._k2 = require_k2(graph)
        self.graph = graph
        self.options = options if options is not None else DecodingOptions()
        self._mapper = WordMapper(graph.vocabulary)
        self._keep_lattice = keep_lattice
        prepared = SearchGraph(graph, self.options)
        scaled = replace(graph, score=prepared.emitting.score, final_score=prepared.final_score)
        self._fsa = to_k2(scaled)
        self._fallback = TokenPassingDecoder(graph, self.options, keep_lattice=keep_lattice)

    def decode(self, log_prob: Tensor, num_frames: Tensor, lm: LanguageModel | None = None) -> list[DecodeResult]:
        """log_prob (N, T, C) natural log, num_frames (N,) int64 -> one result an utterance, in order.

        An utterance whose lattice reaches no final state is decoded by the torch pass, which tells the best
        unfinished path.

        Raises:
            AsrError: the log-probabilities have NaN in them or another width than the graph's tokens.
        """
        lm = self._mapper.mapped(lm)
        check_log_prob(log_prob, num_frames, len(self.graph.tokens))
        log_prob = log_prob.to(self.graph.device, torch.float32)
        num_frames = num_frames.to(self.graph.device, torch.int64)
        kept_log_prob, kept_frames, original_frame = log_prob, num_frames, None
        if self.options.blank_skip_threshold is not None:
            kept_log_prob, kept_frames, original_frame, _ = skip_blanks(
                log_prob, num_frames, self.options.blank_skip_threshold
            )
            original_frame = original_frame.cpu()
        results: list[DecodeResult | None] = [None] * len(num_frames)
        used = (kept_frames > 0).nonzero().squeeze(1)
        if len(used):
            found = self._search(kept_log_prob[used], kept_frames[used], lm)
            for utt_idx, path in zip(used.tolist(), found, strict=True):
                if path is None:
                    continue
                num = int(kept_frames[utt_idx])
                frame_of = None if original_frame is None else original_frame[utt_idx, :num]
                hypothesis = path.hypothesis(self._fallback.host_graph, self.options, frame_of)
                results[utt_idx] = DecodeResult((hypothesis,), True, num, path.lattice, frame_of)
        missing = [utt_idx for utt_idx, result in enumerate(results) if result is None]
        if missing:
            rest = torch.tensor(missing, device=log_prob.device)
            instead = self._fallback.decode(log_prob[rest], num_frames[rest], lm)
            for utt_idx, result in zip(missing, instead, strict=True):
                results[utt_idx] = result
        return [result for result in results if result is not None]

    def _search(self, log_prob: Tensor, num_frames: Tensor, lm: LanguageModel | None) -> list[LatticePath | None]:
        """The best path of each utterance, None where it has no complete one."""
        fsas, order = self._intersect(log_prob, num_frames)
        found: list[LatticePath | None] = [None] * len(num_frames)
        if lm is not None:
            joint, used = lattice_from_k2(fsas, order, self.graph, log_prob)
            for utt_idx, path in zip(used, rescore_lattice(joint, self.options, lm, self._keep_lattice), strict=True):
                found[utt_idx] = path
            return found
        lattices: dict[int, Lattice] = {}
        if self._keep_lattice:
            joint, used = lattice_from_k2(fsas, order, self.graph, log_prob)
            lattices = dict(zip(used, joint.split(), strict=True))
        for utt_idx, (graph_arc, total) in enumerate(self._best_paths(fsas, order)):
            if graph_arc is not None:
                last_state = int(self.graph.dst_state[graph_arc[-1]])
                final_score = float(self.graph.final_score[last_state])
                found[utt_idx] = LatticePath(graph_arc, total, final_score, 0.0, lattices.get(utt_idx))
        return found

    def _intersect(self, log_prob: Tensor, num_frames: Tensor) -> tuple[Any, list[int]]:
        """The lattices as k2 gives them, and whose each is: k2 wants long utterances first."""
        order = torch.sort(num_frames, descending=True, stable=True).indices.cpu()
        segments = torch.stack([order, torch.zeros_like(order), num_frames.cpu()[order]], dim=1).to(torch.int32)
        options = self.options
        fsas = self._k2.intersect_dense_pruned(
            self._fsa,
            self._k2.DenseFsaVec((log_prob * options.am_scale).contiguous(), segments),
            search_beam=min(options.search_beam, WIDEST_BEAM),
            output_beam=min(options.output_beam, WIDEST_BEAM),
            min_active_states=options.min_active_states,
            max_active_states=options.max_active_states,
            frame_idx_name="frame",
        )
        return fsas, order.tolist()

    def _best_paths(self, fsas: Any, order: list[int]) -> list[tuple[Tensor | None, float]]:
        """The graph arcs of each utterance's best path, and its total; None where it has no complete path."""
        paths = self._k2.shortest_path(fsas, use_double_scores=True)
        begin = paths.arcs.row_splits(2)[paths.arcs.row_splits(1).long()].tolist()
        best: list[tuple[Tensor | None, float]] = [(None, 0.0)] * len(order)
        for position, utt_idx in enumerate(order):
            first, last = begin[position], begin[position + 1]
            if last > first:
                # The last arc is k2's own, to its final state.
                graph_arc = paths.arc_idx[first : last - 1].to(torch.int64)
                best[utt_idx] = (graph_arc, float(paths.scores[first:last].sum(dtype=torch.float64)))
        return best
