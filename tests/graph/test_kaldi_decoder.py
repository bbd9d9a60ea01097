"""Kaldi's decoder as an oracle from outside: the same best path on the same graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asr.graph.build import build_graph
from asr.graph.fst import Transducer
from asr.graph.openfst import to_openfst
from asr.text.symbols import TokenTable
from tests.graph.test_exactness import LEXICON, PHONES, TEXT, language_model, lexicon_of, random_frames
from tests.reference.graph_search import word_sequence_scores

kaldifst = pytest.importorskip("kaldifst", reason="kaldifst is not installed", exc_type=ImportError)
kaldi_decoder = pytest.importorskip("kaldi_decoder", reason="kaldi-decoder is not installed", exc_type=ImportError)


@pytest.mark.parametrize("topology", ["ctc", "ctc-modified", "hmm-1"])
@pytest.mark.parametrize("num_frames", [1, 4, 6])
def test_kaldi_finds_the_same_best_path(topology: str, num_frames: int, tmp_path: Path) -> None:
    graph = build_graph(lexicon_of(LEXICON), language_model(tmp_path, TEXT, 3), TokenTable(PHONES), topology)
    transducer = Transducer(
        0,
        graph.arc_begin.numpy(),
        graph.token_id.numpy() + 1,  # Kaldi's label l reads column l - 1
        np.arange(1, graph.num_arcs + 1, dtype=np.int32),
        graph.score.numpy(),
        graph.dst_state.numpy(),
        graph.final_score.numpy(),
    )
    log_prob = random_frames(num_frames, len(graph.tokens))
    # The decoder keeps no reference to what it is given: both need a name as long as it lives.
    fst, decodable = to_openfst(transducer), kaldi_decoder.DecodableCtc(log_prob.numpy())
    decoder = kaldi_decoder.FasterDecoder(fst, kaldi_decoder.FasterDecoderOptions(beam=1e9))
    decoder.decode(decodable)
    found, path = decoder.get_best_path()
    assert found

    _, _, labels, _ = kaldifst.get_linear_symbol_sequence(path)
    arcs = [label - 1 for label in labels]
    assert len(arcs) == num_frames
    score = sum(float(graph.score[arc] + log_prob[frame, graph.token_id[arc]]) for frame, arc in enumerate(arcs))
    score += float(graph.final_score[graph.dst_state[arcs[-1]]])
    words = [word for arc in arcs for word in graph.word_id[graph.word_begin[arc] : graph.word_begin[arc + 1]].tolist()]
    expected = word_sequence_scores(graph, log_prob)
    assert tuple(words) == max(expected, key=expected.__getitem__)
    assert score == pytest.approx(max(expected.values()), abs=1e-4)
