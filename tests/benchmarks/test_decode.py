"""The benchmark of decoding, on tones: its tables can be printed, and caches change no word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asr.bundle import Bundle
from asr.decoding.build import recognition_settings
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.recognizer import Recognizer
from asr.text.symbols import Vocabulary
from scripts.benchmarks.__main__ import main
from scripts.benchmarks.decode import users_models
from scripts.benchmarks.nbest import score_by_tree, score_sentence
from tests.benchmarks.test_speech import corpus


def rows_of(printed: str, title: str) -> list[list[str]]:
    """The cells of the table whose title begins so."""
    lines = printed.partition(f"### {title}")[2].splitlines()[4:]
    table = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), None)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


@pytest.mark.one_stack
@pytest.mark.slow
def test_the_papers_tables_are_printed(
    tmp_path: Path, tiny_bundle_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus(tmp_path)
    arguments = ["--bundle", str(tiny_bundle_folder), "--corpora", str(tmp_path), "--every", "1"]
    names = ["speed", "peers", "index-table", "prefix-tree", "four-caches", "frame-batch", "hit-ratio"]
    assert main(["decode", *arguments, "--tables", *names]) == 0
    printed = capsys.readouterr().out
    assert "dev-clean-2: 4 utterances" in printed
    passes = {row[0]: row[1] for row in rows_of(printed, "One and two passes")}
    assert len(passes) == 5 and len(set(passes.values())) == 1
    caches = rows_of(printed, "Caches, GRU inside the search")
    assert len({row[1] for row in caches}) == 1
    queries, hidden = ([int(row[column].replace(",", "")) for row in caches] for column in (4, 5))
    assert hidden[0] >= queries[0] > hidden[-1]
    inside = [int(row[1].replace(",", "")) for row in rows_of(printed, "Queries")[:5]]
    assert inside[-1] == max(inside) > inside[0]


@pytest.mark.slow
def test_the_recurrent_model_is_measured_with_the_caches_that_users_have(tiny_bundle_folder: Path) -> None:
    bundle = Bundle.load(tiny_bundle_folder)
    bundle.decoding["rnn"] = {"hidden_dtype": "int8"}
    recognizer = Recognizer(bundle, mode="rnn")
    users = recognizer.build_language_models(recognizer.resources.cache_bytes).engine
    measured = users_models(bundle, recognition_settings(bundle, "rnn", {})).engine
    assert users is not None and measured is not None
    assert measured.options == users.options and measured.options.hidden_dtype == "int8"


@torch.no_grad()
def test_sentence_by_sentence_scores_as_the_tree_where_the_last_layer_is_projected() -> None:
    torch.manual_seed(0)
    network = RNNLanguageModel(Vocabulary("ABCD"), RNNLMConfig(embedding_size=4, hidden_size=6))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter)
    sentences = [[4, 5], [4, 6, 5], []]
    alone = [score_sentence(sentence, network) for sentence in sentences]
    assert score_by_tree(sentences, network).tolist() == pytest.approx(alone, abs=1e-4)


def test_an_unknown_table_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "--tables", "speed", "table-7"]) == 2
    assert "there is no table 'table-7'; there are speed, peers" in capsys.readouterr().err
