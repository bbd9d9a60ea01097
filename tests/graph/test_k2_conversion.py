"""The graph in k2 against the plain search, on the stack where k2 is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asr.decoding.k2 import to_k2
from asr.errors import AsrError
from asr.graph.build import build_graph
from asr.text.symbols import TokenTable, Vocabulary
from tests.graph.test_exactness import LEXICON, PHONES, TEXT, language_model, lexicon_of, random_frames
from tests.reference.graph_search import word_sequence_scores
from tests.reference.toy_graph import graph_of_arcs

k2 = pytest.importorskip("k2", reason="k2 is not installed", exc_type=ImportError)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["ctc", "ctc-modified", "hmm-1"])
@pytest.mark.parametrize("num_frames", [1, 4, 6])
def test_k2_finds_the_same_best_score_and_words(topology: str, num_frames: int, tmp_path: Path) -> None:
    graph = build_graph(lexicon_of(LEXICON), language_model(tmp_path, TEXT, 2), TokenTable(PHONES), topology)
    log_prob = random_frames(num_frames, len(graph.tokens))
    dense = k2.DenseFsaVec(log_prob[None], torch.tensor([[0, 0, num_frames]], dtype=torch.int32))
    lattice = k2.intersect_dense_pruned(to_k2(graph), dense, 1e9, 1e9, 1, 100_000)
    best = k2.shortest_path(lattice, use_double_scores=True)

    scores = word_sequence_scores(graph, log_prob)
    assert float(best.get_tot_scores(True, False)) == pytest.approx(max(scores.values()), abs=1e-4)
    arcs = best.arc_idx[best.arc_idx >= 0].long()
    assert graph.dst_state[arcs].tolist() == best.dst_state[best.dst_state >= 0].tolist()
    spans = zip(graph.word_begin[arcs].tolist(), graph.word_begin[arcs + 1].tolist(), strict=True)
    words = tuple(word for begin, end in spans for word in graph.word_id[begin:end].tolist())
    assert words == max(scores, key=scores.__getitem__)


def test_final_arcs_are_last_and_marked(tmp_path: Path) -> None:
    graph = build_graph(lexicon_of(LEXICON), language_model(tmp_path, TEXT, 2), TokenTable(PHONES))
    fsa = to_k2(graph)
    assert fsa.num_arcs == graph.num_arcs + int(torch.isfinite(graph.final_score).sum())
    is_final = fsa.labels == -1
    assert (fsa.arc_idx[is_final] == -1).all() and (fsa.dst_state[is_final] == -1).all()
    assert torch.equal(fsa.scores[~is_final], graph.score)
    assert fsa.arc_idx[~is_final].tolist() == list(range(graph.num_arcs))


def test_epsilons_are_refused_and_can_be_removed() -> None:
    arcs: list[list[tuple[int, int, float, list[int]]]] = [[(1, 1, -0.5, [4])], [(2, -1, -0.25, [])], [(0, 2, 0.0, [])]]
    graph = graph_of_arcs(arcs, [0.0, -3.0, -1.0], TokenTable(["x", "y"]), Vocabulary(["X"]))
    with pytest.raises(AsrError, match="as blanks"):
        to_k2(graph)
    assert to_k2(graph.remove_epsilons()).num_arcs > 0
