"""The hidden-layer work that no exact method can avoid, even one that knows which words will survive pruning.

    scripts/bench query-limit talk.mp3 folder/ [--every 20] [--search-beam 14]

A history needs a hidden state when the search requests the score of a word after it. If all such words are pruned in
the same frame, the state was computed only to prune them. The script counts histories with a word that survived (no
exact method avoids these), and histories with a word that would survive if its probability were 1 (the bound P <= 1
does not avoid these; it is exact only for normalized models).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from asr.audio.io import read_audio
from asr.cli.options import add_recognizer_arguments, recognizer_from
from asr.cli.recordings import audio_files
from asr.decoding.backend import ActiveTokens, Candidates, Expansion, Frame, Searchable, Survivors
from asr.decoding.frame import FrameSearch, TorchFrameBackend
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import CombinedLM, Difference, mapped_to
from asr.results import StageTimes
from scripts.benchmarks.inputs import argument_parser


class WatchedBackend(TorchFrameBackend):
    """The reference backend; records which histories were queried, and which of these queries were unavoidable."""

    lm: CombinedLM
    histories: ClassVar[dict[str, set[int]]] = {"asked": set(), "bound": set(), "survived": set()}

    def __init__(self, graph: Searchable, options: DecodingOptions) -> None:
        super().__init__(graph, options, has_lm=True)
        self._asked: tuple[Tensor, Tensor] | None = None

    def expand(self, tokens: ActiveTokens, frame: Frame, *, prune: bool = True) -> Expansion:
        expansion = super().expand(tokens, frame, prune=prune)
        self._asked = tokens.context_idx.index_select(0, expansion.source), expansion.score.clone()
        return expansion

    def recombine_and_prune(self, candidates: Candidates) -> Survivors:
        survivors = super().recombine_and_prune(candidates)
        if self._asked is not None:
            self._count(candidates.arc, *self._asked, survivors.kept)
            self._asked = None
        return survivors

    def _count(self, arc: Tensor, context_idx: Tensor, score: Tensor, kept: Tensor) -> None:
        """arc, context_idx and the score before the language model (A,) of all candidates; kept (K',) of them."""
        options, arcs = self._options, self._arcs
        has_word = arcs.words.num_words.index_select(0, arc) > 0
        asked = has_word.nonzero().squeeze(1)
        large_idx, small_idx = self.lm.contexts.unpack(context_idx.index_select(0, asked))
        survives = torch.zeros_like(has_word)
        survives[kept] = True
        # What reads no word is sure of its score: it sets the least that a word must reach.
        sure = score[~has_word]
        least = -torch.inf
        if len(sure):
            least = float(sure.max()) - options.search_beam
            if len(sure) > options.max_active_states:
                least = max(least, float(sure.topk(options.max_active_states).values[-1]))
        first = arcs.words.word_begin.index_select(0, arc.index_select(0, asked))
        small_score, _ = self.lm.models[1].score(small_idx, arcs.words.word_id.index_select(0, first))
        may = score.index_select(0, asked) - options.lm_scale * small_score >= least
        self.histories["asked"].update(large_idx.tolist())
        self.histories["bound"].update(large_idx[may].tolist())
        self.histories["survived"].update(large_idx[survives.index_select(0, asked)].tolist())


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("query-limit", __doc__)
    parser.add_argument("audio", nargs="+", help="files or folders")
    parser.add_argument("--every", type=int, default=1, help="take every N-th file (default: %(default)s)")
    add_recognizer_arguments(parser)
    parser.set_defaults(decoder="token-passing", lm_fusion="search")
    args = parser.parse_args(argv)
    recognizer = recognizer_from(args, "rnn")
    bundle = recognizer.bundle
    assert bundle.rnn_lm is not None and bundle.small_ngram is not None
    engine = CachedRNNLM(bundle.rnn_lm.network)  # type: ignore[arg-type]
    search = TokenPassingDecoder(
        *(bundle.graph, recognizer.options),
        backend=lambda graph, options, lm, _: FrameSearch(graph, options, lm, WatchedBackend(graph, options)),
    )
    lm = WatchedBackend.lm = Difference(mapped_to(engine, bundle.small_ngram.vocabulary), bundle.small_ngram)
    for path in audio_files(args.audio)[:: args.every]:
        with torch.no_grad():
            log_prob = recognizer.log_prob([read_audio(path, recognizer.sampling_rate)], StageTimes())
            search.decode(*log_prob, lm)
    counts = engine.statistics()
    print(
        f"{counts.num_queries:,} queries, {counts.num_hidden_rows:,} hidden rows: {counts.answered_without_hidden:.2%}"
    )
    for name, histories in WatchedBackend.histories.items():
        share = 1 - len(histories) / counts.num_queries
        print(f"{name}: {len(histories):,} histories in the frames; {share:.2%} without hidden were these all")
    return 0
