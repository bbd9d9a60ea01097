"""`asr fit` and its kin: what is wrong with a recipe is one sentence."""

from __future__ import annotations

import errno
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asr.cli.main import main
from asr.text.symbols import Vocabulary

pl = pytest.importorskip("pytorch_lightning")
pytest.importorskip("jsonargparse")

OLD_RECIPE = Path(__file__).resolve().parents[1] / "assets" / "old_recipe.yaml"
MODEL = "model:\n  class_path: asr.lm.rnn.training.LitRNNLM\n  init_args: {vocabulary: none.txt}\n"
DATA = "data:\n  class_path: asr.lm.rnn.datamodule.TextDataModule\n  init_args: {vocabulary: none.txt}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (MODEL.replace("LitRNNLM", "Nonsense") + DATA, "has no attribute 'Nonsense'"),
        (MODEL + DATA + "trainer: {max_epochs: many}\n", "key \"trainer.max_epochs\": Expected a <class 'int'>"),
        (MODEL + DATA + "trainer: {max_epoch: 3}\n", "does not accept option 'trainer.max_epoch'"),
        (MODEL.replace("{vocabulary: none.txt}", "{optimization: {lr: x}}") + DATA, 'Parser key "optimization.lr"'),
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
@pytest.mark.parametrize("option", ["--trainer.max_epoch", "--seed_every"])
def test_a_misspelled_option_is_refused_not_completed(tmp_path, capsys, option):
    path = tmp_path / "recipe.yaml"
    path.write_text(MODEL + DATA)
    assert main(["fit", "--config", str(path), option, "3"]) == 2
    assert f"unrecognized arguments: {option} 3" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.accelerator", "gpu"], "trainer.accelerator: torch finds no GPU; give cpu or auto"),
        (
            ["--trainer.accelerator", "abacus"],
            "trainer: You selected an invalid accelerator name: `accelerator='abacus'`",
        ),
        (
            ["--trainer.devices", "0"],
            "trainer: `Trainer(devices='0')` value is not a valid input using cpu accelerator.",
        ),
        (["--trainer.devices", "some"], "trainer: `devices` selected with `CPUAccelerator` should be an int > 0."),
        (["--trainer.strategy", "fsdp"], "GPU accelerator"),
        (["--trainer.precision", "7"], 'Parser key "trainer.precision"'),
        (
            ["--trainer.max_epochs", "-5"],
            "trainer: `max_epochs` must be a non-negative integer or -1. You passed in -5.",
        ),
        (["--trainer.check_val_every_n_epoch", "0"], "trainer.check_val_every_n_epoch is 0; give 1 or more."),
        (["--trainer.val_check_interval", "0"], "trainer.val_check_interval is 0; give a number above 0."),
        (["--trainer.accumulate_grad_batches", "0"], "trainer.accumulate_grad_batches is 0; give 1 or more."),
        (["--trainer.log_every_n_steps", "-1"], "trainer.log_every_n_steps is -1; give 0 or more."),
        (["--trainer.gradient_clip_val", "-0.5"], "trainer.gradient_clip_val is -0.5; give 0 or more."),
        (["--trainer.gradient_clip_val", "-5e-1"], "trainer.gradient_clip_val is -0.5; give 0 or more."),
        (["--trainer.max_epochs", "0"], "trainer.max_epochs is 0, so that nothing would be trained; give 1 or more"),
        (["--trainer.max_steps", "0"], "trainer.max_steps is 0, so that nothing would be trained; give 1 or more"),
        (["--trainer.limit_train_batches", "0"], "trainer.limit_train_batches is 0, so that nothing would be trained;"),
        (["--trainer.precision", "16-true"], "trainer.precision is 16-true, which would round the weights to 16 bits"),
        (["--trainer.precision", "bf16-true"], "give bf16-mixed or 32."),
        (["--trainer.num_sanity_val_steps", "-2"], "trainer.num_sanity_val_steps is -2; give -1 or more."),
        pytest.param(
            ["--seed_everything", "-1"],
            "seed_everything is -1; give 0 to 4294967295.",
            marks=pytest.mark.skipif(pl.__version__ < "2.3", reason="takes 0 instead, with a warning"),
        ),
    ],
)
def test_a_trainer_that_cannot_be_is_one_sentence(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main([*tiny_language_model(tmp_path), *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("asr: error: ") and message in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision, is_fast, is_said", [("bf16", False, True), ("bf16", True, False), ("32", False, False)]
)
def test_products_that_the_processor_is_slow_at_are_said(tmp_path, capsys, monkeypatch, precision, is_fast, is_said):
    monkeypatch.setattr("asr.cli.train.cpu_multiplies_bfloat16", lambda: is_fast)
    # The trainer is built; then a check of ours ends the command.
    assert (
        main([*tiny_language_model(tmp_path), "--trainer.precision", precision, "--trainer.val_check_interval", "0"])
        == 2
    )
    assert ("training is many times as fast with --trainer.precision 32" in capsys.readouterr().err) == is_said


def tiny_language_model(tmp_path: Path) -> list[str]:
    """The command that trains one."""
    Vocabulary(["ONE", "TWO"]).save(tmp_path / "words.txt")
    files = f"vocabulary: {tmp_path / 'words.txt'}"
    model = MODEL.replace("vocabulary: none.txt", f"{files}, network: {{embedding_size: 4, hidden_size: 4}}")
    data = DATA.replace("vocabulary: none.txt", f"{files}, cache_dir: {tmp_path}")
    (tmp_path / "recipe.yaml").write_text(model + data)
    others = ["--seed_everything=1", "--trainer.logger=false", "--trainer.accelerator=cpu"]
    return ["fit", "--config", str(tmp_path / "recipe.yaml"), *others]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["validate", "test"])
def test_random_weights_are_not_tested(tmp_path, capsys, command):
    assert main([command, *tiny_language_model(tmp_path)[1:]]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"asr: error: asr {command}: there are no weights; give --ckpt_path a checkpoint of 'asr fit'."


def test_results_that_would_be_lost_are_not_computed(capsys):
    assert main(["predict", "--config", "recipes/an4/am.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("asr: error: asr predict would keep no results; ") and "'asr evaluate'" in error


@pytest.mark.slow
def test_the_validation_of_a_checkpoint_is_that_of_its_training(tmp_path, monkeypatch):
    """Also for n-gram features, whose histories the data module reads as the model tells it."""
    from asr.lm.rnn.training import LitRNNLM
    from scripts.benchmarks.processes import write_inputs
    from tests.cli.test_termination import recipe

    sums: list[torch.Tensor] = []
    log = LitRNNLM.on_validation_epoch_end
    monkeypatch.setattr(LitRNNLM, "on_validation_epoch_end", lambda self: (sums.append(self._sums.clone()), log(self)))
    (tmp_path / "inputs").mkdir()
    write_inputs(tmp_path / "inputs")
    arguments = recipe(tmp_path / "inputs", "language", tmp_path / "run", [])[1:]
    arguments += ["--data.init_args.texts.validation_texts", f"[{tmp_path / 'inputs' / 'text.txt'}]"]
    assert main(["fit", *arguments]) == 0
    assert main(["validate", *arguments, "--ckpt_path", str(tmp_path / "run" / "last.ckpt")]) == 0
    assert len(sums) > 2 and torch.equal(sums[-1], sums[-2])


@pytest.mark.slow
def test_a_checkpoint_of_another_network_and_a_missing_metric_are_one_sentence(tmp_path, capsys):
    from scripts.benchmarks.processes import write_inputs
    from tests.cli.test_termination import recipe

    (tmp_path / "inputs").mkdir()
    write_inputs(tmp_path / "inputs")
    acoustic = recipe(tmp_path / "inputs", "acoustic", tmp_path / "acoustic", [])
    language = recipe(tmp_path / "inputs", "language", tmp_path / "language", [])
    no_validation = ["--data.init_args.selection.valid_cuts", "[]", "--trainer.max_epochs", "1"]
    assert main([*acoustic, *no_validation]) == 0
    checkpoint = str(tmp_path / "acoustic" / "last.ckpt")
    stops = {"class_path": "pytorch_lightning.callbacks.EarlyStopping", "init_args": {"monitor": "val_loss"}}
    stopping = recipe(tmp_path / "inputs", "acoustic", tmp_path / "stopping", [stops])
    another = "the checkpoint is of another network than that of the recipe ("
    for command, message in (
        (
            [*acoustic, "--ckpt_path", checkpoint, "--model.init_args.network.init_args.hidden_dim", "48"],
            "size mismatch for",
        ),
        ([*acoustic, "--ckpt_path", checkpoint, "--model.init_args.network.init_args.num_blocks", "3"], "Missing key"),
        ([*language, "--ckpt_path", checkpoint], "Missing key"),
        ([*stopping, *no_validation], "val_loss, which EarlyStopping monitors, is not computed"),
    ):
        capsys.readouterr()
        assert main(command) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("asr: error: ") and message in error and len(error) < 250
        assert (another in error) == (command[:3] != stopping)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("model.init_args.optimization.max_gradient_norm", "-1", "max_gradient_norm is -1.0; give a number above 0."),
        ("model.init_args.network.init_args.num_heads", "3", "model: num_heads is 3; it must be 1 or more"),
        ("model.init_args.network.init_args.dropout", "1", "model: dropout is 1.0; it must be 0 or more and below 1."),
        ("data.init_args.loading.num_workers", "-1", "num_workers is -1; give 0 or more."),
    ],
)
def test_a_number_outside_its_range_is_one_sentence(tmp_path, capsys, option, value, message):
    from tests.cli.test_termination import recipe

    (tmp_path / "lexicon.txt").write_text("A AH0\n")
    assert main([*recipe(tmp_path, "acoustic", tmp_path / "run", []), f"--{option}", value]) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith(f"asr: error: {message}") and len(error[-1]) < 120


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ >= "2", reason="later versions mix bfloat16 and float32")
def test_a_network_that_cannot_be_trained_in_bfloat16_is_one_sentence(tmp_path, capsys):
    from scripts.benchmarks.processes import write_inputs
    from tests.cli.test_termination import recipe

    (tmp_path / "inputs").mkdir()
    write_inputs(tmp_path / "inputs")
    arguments = recipe(tmp_path / "inputs", "acoustic", tmp_path / "run", [])
    assert main([*arguments, "--trainer.precision", "bf16-mixed"]) == 2
    assert "bfloat16 on a CPU; give --trainer.precision 32" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_folder_for_checkpoints_that_cannot_be_written_is_refused_before_training(tmp_path, capsys, monkeypatch):
    from asr.lm.rnn.training import LitRNNLM
    from scripts.benchmarks.processes import write_inputs
    from tests.cli.test_termination import recipe

    (tmp_path / "inputs").mkdir()
    write_inputs(tmp_path / "inputs")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(LitRNNLM, "training_step", lambda *_: pytest.fail("it has trained"))
    keeps = {"dirpath": str(tmp_path / "file" / "checkpoints"), "every_n_epochs": 2}
    keeps = {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": keeps}
    assert main(recipe(tmp_path / "inputs", "language", tmp_path / "run", [keeps])) == 2
    message = f"asr: error: {tmp_path}/file/checkpoints: checkpoints cannot be written there; give ModelCheckpoint "
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)


@pytest.mark.slow
@pytest.mark.parametrize("logger", ["CSVLogger", "TensorBoardLogger"])
def test_a_run_that_ends_before_its_first_batch_leaves_no_folder(tmp_path, capsys, logger):
    """Its number would be missing: pages of recipes name `version_0`."""
    text = tmp_path / "text.txt"
    text.write_text("ONE TWO\n" * 50)
    arguments = [*tiny_language_model(tmp_path), f"--data.init_args.texts.train_texts=[{text}]"]
    arguments += [f"--trainer.logger=pytorch_lightning.loggers.{logger}", f"--trainer.logger.save_dir={tmp_path}"]
    arguments += ["--trainer.logger.name=run", "--trainer.max_epochs=1"]
    assert main([*arguments, f"--model.init_args.init_from={tmp_path / 'none.ckpt'}"]) == 2
    assert "none.ckpt" in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / "run").glob("*"))
    assert main(arguments) == 0
    assert [path.name for path in (tmp_path / "run").glob("*")] == ["version_0"]
    # A folder with an earlier run's results stays.
    arguments += ["--trainer.logger.version=0", f"--model.init_args.init_from={tmp_path / 'none.ckpt'}"]
    assert main(arguments) == 2
    assert list((tmp_path / "run" / "version_0").glob("checkpoints/*.ckpt"))


@pytest.mark.slow
def test_an_interval_of_validations_beyond_the_epoch_is_one_sentence(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("ONE TWO\n" * 50)
    texts = [f"--data.init_args.texts.{name}_texts=[{text}]" for name in ("train", "validation")]
    texts += [f"--trainer.default_root_dir={tmp_path}", "--trainer.val_check_interval=1000"]
    assert main([*tiny_language_model(tmp_path), *texts]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("asr: error: trainer.val_check_interval is 1000, but an epoch has only ")


@pytest.mark.slow
def test_callbacks_that_exclude_each_other_are_one_sentence(tmp_path, capsys):
    keeps = "{class_path: pytorch_lightning.callbacks.ModelCheckpoint}"
    arguments = tiny_language_model(tmp_path)
    with (tmp_path / "recipe.yaml").open("a") as recipe:
        recipe.write(f"trainer: {{callbacks: [{keeps}, {keeps}]}}\n")
    assert main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("asr: error: trainer: Found more than one stateful callback of type `ModelCheckpoint`")


@pytest.mark.slow
def test_logs_that_cannot_be_written_are_one_sentence(tmp_path, capsys, monkeypatch):
    """TensorBoard writes them in a thread, which would print a traceback."""
    gfile = pytest.importorskip("tensorboard.compat.tensorflow_stub.io.gfile")

    def full_disk(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    arguments = [*tiny_language_model(tmp_path), f"--data.init_args.texts.train_texts=[{tmp_path / 'text.txt'}]"]
    (tmp_path / "text.txt").write_text("ONE TWO\n" * 50)
    arguments += [f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=true", "--trainer.max_epochs=1"]
    monkeypatch.setattr(gfile.LocalFileSystem, "write", full_disk)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    message = "asr: error: the logs of the training, or standard output, cannot be written (No space left on device), "
    assert error.splitlines()[-1].startswith(message) and "Traceback" not in error


@pytest.mark.slow
def test_the_command_line_brings_no_warning_of_lightnings(tmp_path):
    (tmp_path / "recipe.yaml").write_text(MODEL + DATA)
    command = [sys.executable, "-m", "asr", "fit", "--config", str(tmp_path / "recipe.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith("asr: error: ")
    assert "LightningCLI" not in run.stderr


@pytest.mark.slow
def test_a_recipe_with_old_class_paths_still_makes_its_classes(tmp_path, capsys):
    """The recipe for AN4 as it was before the packages were reorganized."""
    from pytorch_lightning.cli import LightningCLI

    from asr.cli.old_recipes import old_class_paths
    from asr.cli.train import _CLI
    from asr.models.conformer import Conformer
    from asr.models.losses import TorchCtc

    (tmp_path / "lexicon.txt").write_text("A AH0\n")
    options = [f"--data.lexicon=[{tmp_path / 'lexicon.txt'}]", "--trainer.logger=false"]

    class CLI(_CLI):
        """Makes the classes, but runs no subcommand."""

        def __init__(self, arguments):
            self._name = "fit"
            bases = {"model_class": pl.LightningModule, "datamodule_class": pl.LightningDataModule}
            modes = {"subclass_mode_model": True, "subclass_mode_data": True}
            LightningCLI.__init__(self, **bases, **modes, run=False, save_config_callback=None, args=arguments)

    with old_class_paths():
        cli = CLI(["--config", str(OLD_RECIPE), *options])
    assert isinstance(cli.model.network, Conformer) and isinstance(cli.model.objective, TorchCtc)
    assert type(cli.datamodule).__name__ == "AcousticDataModule" and len(cli.model.network.blocks) == 8
    hints = [line for line in capsys.readouterr().err.splitlines() if line.startswith("asr: hint: ")]
    assert "asr: hint: the class asr.am.conformer.Conformer is now asr.models.conformer.Conformer; " in "\n".join(hints)
    assert len(hints) == len(set(hints)) == 6
    assert "write optimization.peak_lr, " in hints[-1] and "loading" not in hints[-1]
    assert cli.model.optimization.peak_lr == 1.5e-3 and cli.datamodule.selection.valid_fraction == 0.04


def test_every_old_class_path_names_a_class():
    from asr.cli.old_recipes import OLD_CLASS_PATHS

    for path in OLD_CLASS_PATHS.values():
        module, name = path.rsplit(".", 1)
        assert isinstance(getattr(importlib.import_module(module), name), type)


@pytest.mark.slow
def test_help_begins_with_recipes_and_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help"]) == 0
    own = capsys.readouterr().out
    assert own.startswith("Trains a network according to a YAML file, the recipe")
    assert "--help-all shows all options" in own and len(own.splitlines()) < 40
    with pytest.raises(SystemExit) as leaving:
        main(["fit", "--help-all"])
    assert leaving.value.code == 0
    own_again, _, rest = capsys.readouterr().out.partition("\nusage: asr ")
    assert own_again.strip() == own.strip() and "--trainer.max_epochs" in rest
    recipes = re.findall(r"^  (recipes/\S+)", own, re.MULTILINE)
    assert len(recipes) == 5 and all((OLD_RECIPE.parents[2] / recipe).is_file() for recipe in recipes)
    classes = re.findall(r"asr\.[a-z_.]+\.[A-Z]\w+", own)
    assert len(classes) == 7
    for name in classes:
        module, _, class_name = name.rpartition(".")
        assert hasattr(importlib.import_module(module), class_name)
