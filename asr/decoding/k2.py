"""The decoder with k2's pruned intersection; a language model rescores its lattices.

This module also converts decoding graphs to k2's FSAs, and k2's lattices to `Lattice`.

Shapes: N utterances, T frames, C tokens, S lattice states, A lattice arcs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asr.decoding.backend import SearchGraph
from asr.decoding.interface import DecodeResult, LogProbCheck, with_num_frames
from asr.decoding.lattice import Lattice, LatticeParts, pruned_lattice
from asr.decoding.rescoring import LatticePath, rescore_lattice
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.combine import WordMapper
from asr.lm.interface import LanguageModel

FINAL_LABEL = -1
"""The label of k2's final arcs."""

NO_ARC = -1
"""The attribute `arc_idx` of arcs that are not in the graph."""

WIDEST_BEAM = 1e10
"""A beam so wide that k2 prunes nothing."""

_NO_LIMIT = 1 << 20


def lattice_from_k2(
    fsas: Any, order: list[int], graph: DecodingGraph, log_prob: Tensor, options: DecodingOptions
) -> tuple[Lattice, list[int]]:
    """Converts k2's lattices to one `Lattice`, without k2's final arcs; acoustic and graph scores are looked up again.

    k2 prunes a part of a lattice before it knows which of its paths go on to the best end, and keeps several times as
    many arcs as are within the output beam. So they are pruned again here.

    Args:
        fsas: FsaVec of `intersect_dense_pruned`, with the attributes `arc_idx` and `frame`.
        order: the utterance of each FSA.
        graph: the graph that was searched.
        log_prob: (N, T, C) of all utterances, unscaled.
        options: scales and output beam.

    Returns:
        The lattice of all utterances with a complete path, in the order of the FSAs, and the indices of these
        utterances.
    """
    device = log_prob.device
    values = fsas.arcs.values().to(torch.int64)
    state_begin = fsas.arcs.row_splits(1).to(torch.int64)
    num_states = int(state_begin[-1])
    src_state = fsas.arcs.row_ids(2).to(torch.int64)
    dst_state = src_state + values[:, 1] - values[:, 0]
    is_final = values[:, 2] == FINAL_LABEL
    inner = (~is_final).nonzero().squeeze(1)
    # A state's frame follows from the arcs that lead to it. k2's own final states are dropped.
    frame = torch.zeros(num_states, dtype=torch.int64, device=device)
    frame[dst_state[inner]] = fsas.frame[inner].to(torch.int64) + 1
    graph_state = torch.full((num_states,), graph.start_state, dtype=torch.int64, device=device)
    graph_arc = fsas.arc_idx[inner].to(torch.int64)
    graph_state[dst_state[inner]] = graph.dst_state[graph_arc].to(torch.int64)
    stays = torch.ones(num_states, dtype=torch.bool, device=device)
    stays[dst_state[is_final]] = False
    final_score = torch.full((num_states,), -torch.inf, dtype=torch.float32, device=device)
    ends = src_state[is_final]
    # With the online intersecter, every state is final. Only those that are final in the graph count.
    ends = ends[graph.final_score[graph_state[ends]] > -torch.inf]
    final_score[ends] = graph.final_score[graph_state[ends]]
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
    used = has_path.nonzero().squeeze(1)
    utt_of_fsa = torch.tensor(order, dtype=torch.int64, device=device)[used]
    parts = LatticeParts(
        frame=frame[by_frame],
        utt_idx=(has_path.cumsum(0) - 1)[fsa_of[by_frame]],
        start_state=number[state_begin[:-1][used]],
        src_state=number[src_state[inner]],
        dst_state=number[dst_state[inner]],
        arc=graph_arc,
        lm_score=torch.zeros(len(inner), dtype=torch.float32, device=device),
        final_graph_score=final_score[by_frame],
        final_lm_score=torch.zeros(len(by_frame), dtype=torch.float32, device=device),
    )
    return pruned_lattice(parts, graph, log_prob.index_select(0, utt_of_fsa), options), utt_of_fsa.tolist()


def import_k2() -> Any:
    """Imports k2.

    Raises:
        AsrError: it cannot be imported.
    """
    try:
        import k2
    except (ImportError, OSError, AttributeError) as error:
        raise AsrError(f"k2 cannot be imported ({error}); `asr doctor` says how to install it.") from error
    return k2


def to_k2(graph: DecodingGraph) -> Any:
    """Converts a graph to a `k2.Fsa` on the same device, which reads one token per frame.

    It has one more state than the graph, k2's only final state. Each final state of the graph has an arc to it with the
    label -1 and the final score. Attributes of arcs are `arc_idx`, the graph's arc, and `dst_state`, the graph state
    that it leads to; both are -1 on final arcs.

    Raises:
        AsrError: the graph has input epsilons, which k2 would read as blanks, or k2 cannot be imported.
    """
    k2 = import_k2()
    if graph.has_epsilons:
        raise AsrError("k2 would read the graph's input epsilons as blanks; call `remove_epsilons` first.")
    device = graph.device
    ends = torch.nonzero(torch.isfinite(graph.final_score))[:, 0].to(torch.int32)
    num_ends, num_arcs = ends.numel(), graph.num_arcs
    src_state = torch.cat([graph.src_state(), ends])
    # The final arc of a state comes last; the stable sort keeps the order of the others.
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


def state_limits(graph: DecodingGraph, options: DecodingOptions) -> dict[str, int]:
    """The limits on active states as k2's arguments: the minimum is below the maximum, as k2 requires.

    k2's tables grow with the maximum, but a frame cannot have more active states than the graph has.
    """
    most = min(options.max_active_states, max(_NO_LIMIT, graph.num_states))
    return {"min_active_states": min(options.min_active_states, most - 1), "max_active_states": most}


def k2_works(device: torch.device) -> bool:
    """Whether k2 can be imported, and can intersect a graph of two states on a device.

    A k2 that was built for another torch may fail on import, or only when it is used.
    """
    try:
        k2 = import_k2()
        arcs = torch.tensor([[0, 1, 1, 0], [1, 2, FINAL_LABEL, 0]], dtype=torch.int32, device=device)
        frames = k2.DenseFsaVec(torch.zeros(1, 1, 2, device=device), torch.tensor([[0, 0, 1]], dtype=torch.int32))
        lattice = k2.intersect_dense_pruned(k2.create_fsa_vec([k2.Fsa(arcs)]), frames, 10.0, 10.0, 1, 10)
        return bool(lattice.num_arcs == 2)
    except Exception:  # a mismatched build may raise anything
        return False


def require_k2(graph: DecodingGraph) -> Any:
    """Imports k2 for a graph.

    Raises:
        AsrError: k2 cannot be imported, or the graph has input epsilons.
    """
    if graph.has_epsilons:
        raise AsrError(
            "the graph has input epsilons, which k2 would read as blanks; build it without input epsilons, or use the "
            "decoder token-passing."
        )
    try:
        return import_k2()
    except AsrError as error:
        raise AsrError(f"the decoder k2 cannot be used: {error} Or use the decoder token-passing.") from error


def _rows(state: Tensor | None, row: Tensor) -> Tensor | None:
    """Rows (R,) of carried states (N, D); None for None."""
    return None if state is None else state[row.to(state.device)]


class K2Decoder:
    """k2's pruned intersection of whole utterances; implements `Decoder`.

    Args:
        graph: decoding graph without input epsilons, on the device of the search.
        options: beams and scales.
        keep_lattice: whether results have a lattice. With a language model, its states are split by word history, and
            it contains the language model's scores.
        inputs: kind of the input of `decode`, a key of `asr.decoding.interface.INPUTS`.

    Raises:
        AsrError: k2 cannot be imported, the graph has input epsilons, or `inputs` is not a key of `INPUTS`.
    """

    def __init__(
        self,
        graph: DecodingGraph,
        options: DecodingOptions | None = None,
        *,
        keep_lattice: bool = False,
        inputs: str = "log_probs",
    ) -> None:
        self._k2 = require_k2(graph)
        self.graph = graph
        self.options = options if options is not None else DecodingOptions()
        self._mapper = WordMapper(graph.vocabulary)
        self._keep_lattice = keep_lattice
        self._check = LogProbCheck(len(graph.tokens), inputs)
        prepared = SearchGraph(graph, self.options)
        scaled = replace(graph, score=prepared.emitting.score, final_score=prepared.final_score)
        self._fsa = to_k2(scaled)
        self._fallback = TokenPassingDecoder(graph, self.options, keep_lattice=keep_lattice, inputs="scores")

    def decode(
        self,
        log_prob: Tensor,
        num_frames: Tensor | None = None,
        lm: LanguageModel | None = None,
        lm_state: Tensor | None = None,
    ) -> list[DecodeResult]:
        """Like `Decoder.decode`.

        Utterances whose lattice reaches no final state are decoded by token passing, which finds the best unfinished
        path.

        Raises:
            AsrError: the log-probabilities contain NaN or +inf, or their width is not the graph's number of tokens.
        """
        log_prob, num_frames = with_num_frames(log_prob, num_frames)
        lm = self._mapper.mapped(lm)
        self._check(log_prob, num_frames)
        frames = self._fallback.frames(log_prob, num_frames)
        results: list[DecodeResult | None] = [None] * len(num_frames)
        used = (frames.num_frames > 0).nonzero().squeeze(1)
        if len(used):
            found = self._search(frames.log_prob[used], frames.num_frames[used], lm, _rows(lm_state, used))
            for utt_idx, path in zip(used.tolist(), found, strict=True):
                if path is None:
                    continue
                num = int(frames.num_frames[utt_idx])
                frame_of = None if frames.original_frame is None else frames.original_frame[utt_idx, :num]
                hypothesis = path.hypothesis(self._fallback.host_graph, self.options, frame_of)
                results[utt_idx] = DecodeResult((hypothesis,), True, num, path.lattice, frame_of)
        missing = [utt_idx for utt_idx, result in enumerate(results) if result is None]
        if missing:
            rest = torch.tensor(missing)
            instead = self._fallback.decode(log_prob[rest], num_frames[rest], lm, _rows(lm_state, rest))
            for utt_idx, result in zip(missing, instead, strict=True):
                results[utt_idx] = result
        return [result for result in results if result is not None]

    def _search(
        self, log_prob: Tensor, num_frames: Tensor, lm: LanguageModel | None, lm_state: Tensor | None
    ) -> list[LatticePath | None]:
        """The best complete path of each utterance, or None if it has none."""
        fsas, order = self._intersect(log_prob, num_frames)
        found: list[LatticePath | None] = [None] * len(num_frames)
        if lm is not None:
            joint, used = lattice_from_k2(fsas, order, self.graph, log_prob, self.options)
            lm_state = _rows(lm_state, torch.tensor(used, dtype=torch.int64))
            paths = rescore_lattice(joint, self.options, lm, self._keep_lattice, lm_state=lm_state)
            for utt_idx, path in zip(used, paths, strict=True):
                found[utt_idx] = path
            return found
        lattices: dict[int, Lattice] = {}
        if self._keep_lattice:
            joint, used = lattice_from_k2(fsas, order, self.graph, log_prob, self.options)
            lattices = dict(zip(used, joint.split(), strict=True))
        for utt_idx, (graph_arc, total) in enumerate(self._best_paths(fsas, order)):
            if graph_arc is not None:
                last_state = int(self.graph.dst_state[graph_arc[-1]])
                final_score = float(self.graph.final_score[last_state])
                found[utt_idx] = LatticePath(graph_arc, total, final_score, 0.0, lattices.get(utt_idx))
        return found

    def _intersect(self, log_prob: Tensor, num_frames: Tensor) -> tuple[Any, list[int]]:
        """k2's lattices, and the utterance of each; k2 requires long utterances first."""
        order = torch.sort(num_frames, descending=True, stable=True).indices.cpu()
        segments = torch.stack([order, torch.zeros_like(order), num_frames.cpu()[order]], dim=1).to(torch.int32)
        options = self.options
        fsas = self._k2.intersect_dense_pruned(
            self._fsa,
            self._k2.DenseFsaVec((log_prob * options.am_scale).contiguous(), segments),
            search_beam=min(options.search_beam, WIDEST_BEAM),
            output_beam=min(options.output_beam, WIDEST_BEAM),
            **state_limits(self.graph, options),
            frame_idx_name="frame",
        )
        return fsas, order.tolist()

    def _best_paths(self, fsas: Any, order: list[int]) -> list[tuple[Tensor | None, float]]:
        """The graph arcs of each utterance's best path, None if it has no complete path, and its total score."""
        paths = self._k2.shortest_path(fsas, use_double_scores=True)
        begin = paths.arcs.row_splits(2)[paths.arcs.row_splits(1).long()].tolist()
        best: list[tuple[Tensor | None, float]] = [(None, 0.0)] * len(order)
        for position, utt_idx in enumerate(order):
            first, last = begin[position], begin[position + 1]
            if last > first:
                # The last arc is k2's own final arc.
                graph_arc = paths.arc_idx[first : last - 1].to(torch.int64)
                best[utt_idx] = (graph_arc, float(paths.scores[first:last].sum(dtype=torch.float64)))
        return best
