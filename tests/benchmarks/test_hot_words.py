"""The benchmark of hot words, on tones."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.benchmarks.__main__ import main
from tests.benchmarks.test_speech import corpus


@pytest.mark.one_stack
@pytest.mark.slow
def test_rare_words_are_counted_for_each_list_and_score(
    tmp_path: Path, tiny_bundle_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus(tmp_path)
    arguments = ["--bundle", str(tiny_bundle_folder), "--corpora", str(tmp_path), "--every", "1", "--rank", "4"]
    assert main(["hot-words", *arguments, "--scores", "0", "3"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "4 utterances, 10 words; 2 hot words are said."
    assert [line.partition(": WER")[0] for line in lines] == [
        "hot words: none, score 0",
        "hot words: said and others, score 0",
        "hot words: said and others, score 3",
        "hot words: others, score 0",
        "hot words: others, score 3",
    ]
    assert all(": WER 20.00 %, 4 rare words found of 4, 2 false, " in line for line in lines)
