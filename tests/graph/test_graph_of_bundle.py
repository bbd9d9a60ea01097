"""`asr graph --tokens BUNDLE` takes over how the bundle's model spreads phones over its outputs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from asr.bundle import Bundle
from asr.cli.main import main
from asr.graph.context import BIPHONE_TOPOLOGY, TIED_STATES, TiedStates
from asr.graph.decoding_graph import DecodingGraph
from asr.text.symbols import TokenTable

ARPA = """\\data\\
ngram 1=4

\\1-grams:
-1 <s>
-0.5 </s>
-0.5 AB
-0.5 BA

\\end\\
"""


def graph_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> DecodingGraph:
    states = TiedStates(("SIL", "a", "b"), np.array([[0, 1, 3]] * 3), np.array([[0, 2, 4]] * 3))
    meta = {"topology": BIPHONE_TOPOLOGY, TIED_STATES: states.to_json(), "silence": "SIL", "silence_probability": 0.2}
    graph = SimpleNamespace(tokens=TokenTable(states.column_names()), meta=meta)
    monkeypatch.setattr(Bundle, "load", lambda folder: SimpleNamespace(graph=graph))
    (tmp_path / "bundle").mkdir()
    (tmp_path / "lexicon").write_text("AB a b\nBA b a\n")
    (tmp_path / "arpa").write_text(ARPA)
    output = tmp_path / "graph.safetensors"
    command = ["graph", "--lexicon", tmp_path / "lexicon", "--arpa", tmp_path / "arpa", "--output", output]
    assert main([str(part) for part in [*command, "--tokens", tmp_path / "bundle"]] + list(options)) == 0
    return DecodingGraph.load(output)


def test_tied_states_and_silence_come_from_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(tmp_path, monkeypatch)
    assert graph.meta["topology"] == BIPHONE_TOPOLOGY and graph.tokens.tokens[1:] == (
        "a_1_0",
        "a_2_0",
        "b_1_0",
        "b_2_0",
    )
    assert graph.meta["silence"] == "SIL" and graph.meta["silence_probability"] == 0.2


def test_an_option_comes_before_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(tmp_path, monkeypatch, "--silence-probability", "0.4")
    assert graph.meta["silence"] == "SIL" and graph.meta["silence_probability"] == 0.4


def test_the_probability_of_silence_needs_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lexicon").write_text("AB a b\nBA b a\n")
    (tmp_path / "arpa").write_text(ARPA)
    files = {"--lexicon": "lexicon", "--arpa": "arpa", "--output": "graph.safetensors"}
    command = ["graph", *(text for option, name in files.items() for text in (option, str(tmp_path / name)))]
    assert main([*command, "--silence-probability", "0.4"]) == 2
    assert "--silence-probability has no effect without --silence" in capsys.readouterr().err
