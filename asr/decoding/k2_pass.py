"""The first pass by k2's pruned intersection; the language model rescores its lattice on the fly.

Shapes: N utterances, T frames, C tokens, S lattice states, A lattice arcs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asr.decoding.first_pass import DecodeResult
from asr.decoding.frame_scores import check_log_prob, skip_blanks
from asr.decoding.lattice.k2_lattice import lattice_from_k2
from asr.decoding.lattice.lattice import Lattice
from asr.decoding.on_the_fly import LatticePath, rescore_joint
from asr.decoding.options import DecodingOptions
from asr.decoding.search.search_graph import SearchGraph
from asr.decoding.torch_pass import TorchFirstPass
from asr.decoding.word_map import WordMapper
from asr.errors import AsrError
from asr.graph.artefact import DecodingGraph
from asr.graph.k2_conversion import to_k2
from asr.lm.contract import LanguageModel

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


class K2FirstPass:
    """Pruned intersection of whole utterances.

    Args:
        graph: decoding graph without arcs that read nothing, on the device where the search shall run.
        options: beams and scales.
        keep_lattice: whether results carry a lattice; with a language model it is split by word history and has the
            language model's scores.
    """

    def __init__(
        self, graph: DecodingGraph, options: DecodingOptions | None = None, keep_lattice: bool = False
    ) -> None:
        self._k2 = require_k2(graph)
        self.graph = graph
        self.options = options if options is not None else DecodingOptions()
        self._mapper = WordMapper(graph.vocabulary)
        self._keep_lattice = keep_lattice
        prepared = SearchGraph(graph, self.options)
        scaled = replace(graph, score=prepared.emitting.score, final_score=prepared.final_score)
        self._fsa = to_k2(scaled)
        self._fallback = TorchFirstPass(graph, self.options, keep_lattice)

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
            for utt_idx, path in zip(used, rescore_joint(joint, self.options, lm, self._keep_lattice), strict=True):
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
