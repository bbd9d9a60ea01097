"""`asr graph` with tied states, and scores of pronunciations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from asr.cli.main import main
from asr.graph.build import OptionalSilence, build_graph
from asr.graph.context import BIPHONE_TOPOLOGY, TiedStates
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.corpus import read_word_stream
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.text.lexicon import Lexicon
from asr.text.symbols import TokenTable
from tests.reference.exhaustive_search import exhaustive_search

PHONES = ("SIL", "AH", "N", "W")
ARPA = "\\data\\\nngram 1=4\n\n\\1-grams:\n-99\t<s>\n-0.7\t</s>\n-1.0\t<unk>\n-0.6\tONE\n\n\\end\\\n"


def untied() -> TiedStates:
    """Columns of their own for every phone behind every phone."""
    number = len(PHONES)
    entry = np.arange(number * number).reshape(number, number)
    entry = 2 * (entry - np.arange(number)[:, None]) - 1
    loop = entry + 1
    entry[:, 0] = loop[:, 0] = 0
    return TiedStates(PHONES, entry, loop)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "lexicon.txt").write_text("ONE W AH1 N\nONE(2) W N\n")
    (tmp_path / "lm.arpa").write_text(ARPA)
    (tmp_path / "states.json").write_text(json.dumps(untied().to_json()))
    (tmp_path / "scores.json").write_text(json.dumps({"ONE": [0.0, -1.5], "ELSE": [0.0]}))
    return tmp_path


def run(files: Path, *options: str) -> int:
    return main(
        [
            "graph", "--lexicon", str(files / "lexicon.txt"), "--arpa", str(files / "lm.arpa"),
            "--output", str(files / "graph.safetensors"), "--silence", "SIL", *options,
        ]
    )  # fmt: skip


def test_the_command_writes_a_graph_of_biphones_that_loads_alone(files: Path) -> None:
    states = ("--topology", BIPHONE_TOPOLOGY, "--tied-states", str(files / "states.json"))
    assert run(files, *states, "--pronunciation-scores", str(files / "scores.json")) == 0
    phones = DecodingGraph.load(files / "graph.safetensors")
    assert list(phones.tokens.tokens) == untied().column_names()
    assert run(files, *states, "--pronunciation-scores", str(files / "scores.json"), "--finished") == 0
    finished = DecodingGraph.load(files / "graph.safetensors")
    assert finished.num_arcs == phones.num_arcs


def test_the_case_of_words_in_the_lexicon_and_in_its_scores_does_not_matter(files: Path) -> None:
    states = ("--topology", BIPHONE_TOPOLOGY, "--tied-states", str(files / "states.json"))
    scores = ("--pronunciation-scores", str(files / "scores.json"))
    graphs = []
    for lexicon_word, scores_word, model_word in (("ONE", "ONE", "ONE"), ("ONE", "One", "one"), ("one", "ONE", "One")):
        (files / "lexicon.txt").write_text(f"{lexicon_word} W AH1 N\n{lexicon_word}(2) W N\n")
        (files / "scores.json").write_text(json.dumps({scores_word: [0.0, -1.5]}))
        (files / "lm.arpa").write_text(ARPA.replace("ONE", model_word))
        assert run(files, *states, *scores) == 0
        graphs.append(DecodingGraph.load(files / "graph.safetensors"))
        assert model_word in graphs[-1].vocabulary.words
    assert run(files, *states) == 0
    for graph in graphs[1:]:
        assert torch.equal(graph.score, graphs[0].score)
    assert not torch.equal(DecodingGraph.load(files / "graph.safetensors").score, graphs[0].score)


def test_what_does_not_fit_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, "--topology", BIPHONE_TOPOLOGY) == 2
    assert "--tied-states go together" in capsys.readouterr().err
    (files / "scores.json").write_text(json.dumps({"ONE": [0.0]}))
    states = ("--topology", BIPHONE_TOPOLOGY, "--tied-states", str(files / "states.json"))
    assert run(files, *states, "--pronunciation-scores", str(files / "scores.json")) == 2
    assert "1 pronunciations in this file and 2 in the lexicon" in capsys.readouterr().err
    for score in (math.nan, -math.inf):
        (files / "scores.json").write_text(json.dumps({"ONE": [0.0, score]}))
        assert run(files, *states, "--pronunciation-scores", str(files / "scores.json")) == 2
        assert "no valid pronunciation scores (a score is not a finite number)" in capsys.readouterr().err
    (files / "lexicon.txt").write_text("ONE HH AH1 N\n")
    assert run(files, *states) == 2
    complaint = (
        "lexicon.txt: the word 'ONE' has the phone 'HH', which the acoustic model lacks; spell it with the model's"
    )
    assert complaint in capsys.readouterr().err


def test_a_pronunciation_costs_what_its_score_says(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("ONE\nONE ONE\n")
    model = NgramLM.from_trie(estimate_kneser_ney(read_word_stream([tmp_path / "text"]), 2).trie)
    lexicon = Lexicon({"ONE": [("W", "AH", "N"), ("W", "N")]})
    states = untied()
    tokens = TokenTable(states.column_names())
    silence = OptionalSilence("SIL", 0.25)
    plain = build_graph(lexicon, model, tokens, states, silence=silence)
    scored = build_graph(lexicon, model, tokens, states, silence=silence, pronunciation_scores={"ONE": [-0.5, -2.0]})
    w, ah, n = 3, 1, 2
    for phones, difference in (([w, ah, n], -0.5), ([w, n], -2.0)):
        log_prob = torch.full((len(phones), len(tokens)), -50.0)
        for frame, (before, phone) in enumerate(zip([0, *phones], phones, strict=False)):
            log_prob[frame, states.entry[before, phone]] = 0.0
        totals = [exhaustive_search(graph, log_prob)[0].total for graph in (plain, scored)]
        assert totals[1] - totals[0] == pytest.approx(difference, abs=1e-3)
