"""`asr fit` and its kin: what is wrong with a recipe is one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from asr.cli.main import main

pytest.importorskip("pytorch_lightning")
pytest.importorskip("jsonargparse")

MODEL = "model:\n  class_path: asr.lm.rnn.training.LitRNNLM\n  init_args: {vocabulary: none.txt}\n"
DATA = "data:\n  class_path: asr.lm.rnn.datamodule.TextDataModule\n  init_args: {vocabulary: none.txt}\n"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (MODEL.replace("LitRNNLM", "Nonsense") + DATA, "has no attribute 'Nonsense'"),
        (MODEL + DATA + "trainer: {max_epochs: many}\n", "key \"trainer.max_epochs\": Expected a <class 'int'>"),
        (MODEL + DATA + "trainer: {max_epoch: 3}\n", "does not accept option 'trainer.max_epoch'"),
        (MODEL.replace("{vocabulary: none.txt}", "{lr: x}") + DATA, 'Parser key "lr"'),
        ("model: [\n", "while parsing a flow node"),
        ("", "Unexpected config"),
        (b"\xff\xfe\n", "can't decode byte 0xff"),
        (None, "recipe.yaml"),
    ],
)
def test_a_wrong_recipe_is_one_sentence(tmp_path, capsys, recipe, message):
    path = tmp_path / "recipe.yaml"
    if recipe is not None:
        path.write_bytes(recipe if isinstance(recipe, bytes) else recipe.encode())
    assert main(["fit", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith(f"asr: error: fit --config {path}: ")
    assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_the_command_line_brings_no_warning_of_lightnings(tmp_path):
    (tmp_path / "recipe.yaml").write_text(MODEL + DATA)
    command = [sys.executable, "-m", "asr", "fit", "--config", str(tmp_path / "recipe.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith("asr: error: ")
    assert "LightningCLI" not in run.stderr
