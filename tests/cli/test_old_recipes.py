"""Recipes with keys of earlier versions mean the same as with those of now, and one hint says how to write them."""

from __future__ import annotations

import importlib
import inspect
from argparse import ArgumentError
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from asr.cli.main import main
from asr.cli.old_recipes import GROUPS, hint_of_groups

pl = pytest.importorskip("pytorch_lightning")
jsonargparse = pytest.importorskip("jsonargparse")

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*/*.yaml"))
RECIPES = [recipe for recipe in RECIPES if "class_path" in recipe.read_text("utf-8")]
MODEL = "asr.models.chain_training.LitChainModel"
NETWORK = {"class_path": "asr.models.tdnnf.Tdnnf", "init_args": {"num_features": 20, "num_tokens": 9}}
OLD = {
    "model": {"class_path": MODEL, "init_args": {"network": NETWORK, "peak_lr": 0.002, "leak": 0.2}},
    "data": {
        "class_path": "asr.models.chain_training.ChainDataModule",
        "init_args": {
            "corpus": "a", "alignment": "b", "chain": "c", "held_out": ["d"], "max_warp": 0.05,
            "spec_augment": {"class_path": "asr.datasets.augment.SpecAugment", "init_args": {"num_time_masks": 1}},
        },
    },
}  # fmt: skip


def load_class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def parsed(folder: Path, recipe: Any, *options: str) -> dict[str, Any]:
    """What `asr fit` reads from a recipe, a mapping or a text, and from options."""
    from asr.cli.train import _Parser

    path = folder / "recipe.yaml"
    path.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe, sort_keys=False))
    parser: Any = _Parser(exit_on_error=False)
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile)
    parser.add_subclass_arguments(pl.LightningModule, "model")
    parser.add_subclass_arguments(pl.LightningDataModule, "data", required=False)
    with hint_of_groups():
        config = parser.parse_args(["--config", str(path), *options])
    found: dict[str, Any] = yaml.safe_load(parser.dump(config, skip_none=False))
    return found


@pytest.mark.parametrize("path", GROUPS)
def test_groups_have_the_keys_that_their_classes_had(path: str) -> None:
    defaults = {name: one.default for name, one in inspect.signature(load_class(path)).parameters.items()}
    for group, keys in GROUPS[path].items():
        assert is_dataclass(defaults[group])
        assert keys.split() == [field.name for field in fields(defaults[group])]
        assert not set(keys.split()) & defaults.keys()


def test_old_keys_mean_the_same_as_new_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = yaml.safe_load(yaml.safe_dump(OLD))
    new["model"]["init_args"] = {
        "network": NETWORK, "optimization": {"peak_lr": 0.002}, "objective": {"leak": 0.2}
    }  # fmt: skip
    data = new["data"]["init_args"]
    new["data"]["init_args"] = {name: data[name] for name in ("corpus", "alignment", "chain")} | {
        "selection": {"held_out": ["d"]},
        "augmentation": {"max_warp": 0.05, "spec_augment": data["spec_augment"]},
    }
    expected = parsed(tmp_path, new)
    assert not capsys.readouterr().err
    assert parsed(tmp_path, OLD) == expected
    assert capsys.readouterr().err == (
        "asr: hint: keys of recipes are in groups now, as --print_config shows: write optimization.peak_lr, "
        "objective.leak (LitChainModel); selection.held_out, augmentation.max_warp, augmentation.spec_augment "
        "(ChainDataModule); the old spelling will be removed in the next release.\n"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model.init_args.peak_lr", "0.5"], {"model.optimization.peak_lr": 0.5}),
        (["--model.final_lr=1e-3", "--model.peak_lr=5e-1"], {"model.optimization.peak_lr": 0.5}),
        (["--model.init_args", "{peak_lr: 0.5}"], {"model.optimization.peak_lr": 0.5}),
        (["--data.init_args.held_out", "[e, f]"], {"data.selection.held_out": ["e", "f"]}),
        (["--data.held_out+", "e", "--data.held_out+=f"], {"data.selection.held_out": ["d", "e", "f"]}),
        (["--data.spec_augment.num_time_masks=7"], {"data.augmentation.spec_augment.init_args.num_time_masks": 7}),
        (["--data.spec_augment", "null"], {"data.augmentation.spec_augment": None}),
    ],
)
@pytest.mark.parametrize("are_old", [True, False])
def test_options_of_the_command_line_may_be_old(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: dict[str, Any], are_old: bool
) -> None:
    recipe = OLD if are_old else parsed(tmp_path, OLD)
    capsys.readouterr()
    found = parsed(tmp_path, recipe, *options)
    for key, value in expected.items():
        section, *names = key.split(".")
        place = found[section]["init_args"]
        for name in names:
            place = place[name]
        assert place == value
    # The rest of the group and of the recipe stays.
    assert found["model"]["init_args"]["objective"]["leak"] == 0.2
    assert found["data"]["init_args"]["augmentation"]["max_warp"] == 0.05
    hints = capsys.readouterr().err.splitlines()
    assert len(hints) == 1 and hints[0].count("optimization.peak_lr") == (are_old or "peak_lr" in str(options))


def test_a_second_recipe_may_have_some_old_keys_only(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("model: {init_args: {peak_lr: 0.5, optimization: {final_lr: 0.25}}}\n")
    found = parsed(tmp_path, OLD, "--config", str(tmp_path / "more.yaml"))["model"]["init_args"]
    assert found["optimization"]["peak_lr"] == 0.5 and found["optimization"]["final_lr"] == 0.25
    assert found["objective"]["leak"] == 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.init_args.peak_l", "1"], "Option 'peak_l' is not accepted"),
        (["--model.optimization.peak_l=1"], "unrecognized arguments: --optimization.peak_l=1"),
        (["--model.optimization", "{peak_l: 1}"], "Group 'optimization' does not accept option 'peak_l'"),
        (["--model.optimisation.peak_lr", "1"], "unrecognized arguments: --optimisation.peak_lr=1"),
        (["--data.init_args.fbank.num_mel_bin", "3"], "num_mel_bin"),
        (["--model.init_args", "{leak: 1, objective: {leak: 1}}"], "leak and objective.leak are the same option;"),
        (["--model.init_args", "{leak: 1, objective: 3}"], "objective is 3; give its keys, among them leak; 'asr"),
        (["--model.init_args", "{objective: null}"], "objective is None; give its keys, or leave it out; 'asr"),
        (["--model.init_args", "{objective: [1]}"], "objective is [1]; give its keys, or leave it out; 'asr"),
        (["--model.init_args", "{objective: {leak: null}}"], 'Parser key "objective.leak": Expected a <class'),
    ],
)
def test_unknown_keys_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(OLD))
    assert main(["fit", "--config", str(tmp_path / "recipe.yaml"), *options]) == 2
    hint, error = capsys.readouterr().err.splitlines()
    assert hint.startswith("asr: hint: ") and message in error and "NestedArg" not in error
    assert error.startswith("asr: error: fit --config ") and error.endswith("'asr fit --help-all' lists all options.")


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recipes_have_new_keys(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = yaml.safe_load(path.read_text("utf-8"))
    parsed(tmp_path, {name: content[name] for name in ("model", "data")})
    assert not capsys.readouterr().err


def test_a_class_of_ones_own_may_have_keys_of_the_same_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_training.py").write_text(
        "from asr.models.chain_training import LitChainModel\n"
        "class Own(LitChainModel):\n"
        "    def __init__(self, leak: float, **options):\n"
        "        super().__init__(**options)\n"
        "class Flat(LitChainModel):\n"
        "    def __init__(self, network: object, peak_lr: float = 1.0):\n"
        "        super().__init__(network)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = OLD["model"]["init_args"]
    found = parsed(tmp_path, {"model": {"class_path": "own_training.Own", "init_args": given}})["model"]["init_args"]
    assert found["leak"] == 0.2 and found["objective"]["leak"] == 0.1 and found["optimization"]["peak_lr"] == 0.002
    assert capsys.readouterr().err.count("write optimization.peak_lr (Own); the old") == 1
    given = {"network": NETWORK, "peak_lr": 0.002}
    found = parsed(tmp_path, {"model": {"class_path": "own_training.Flat", "init_args": given}})["model"]["init_args"]
    assert found["peak_lr"] == 0.002
    given["leak"] = 0.2
    with pytest.raises(ArgumentError, match="Option 'leak' is not accepted"):
        parsed(tmp_path, {"model": {"class_path": "own_training.Flat", "init_args": given}})
    assert not capsys.readouterr().err


def test_one_of_several_processes_gives_the_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    parsed(tmp_path, OLD)
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_a_run_with_old_keys_continues_from_a_checkpoint_and_ends_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from scripts.benchmarks.processes import write_inputs
    from tests.cli.test_termination import recipe, weights

    (tmp_path / "inputs").mkdir()
    write_inputs(tmp_path / "inputs")
    keeps = {"dirpath": str(tmp_path / "run"), "filename": "{step}", "every_n_train_steps": 4, "save_top_k": -1}
    keeps = {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": keeps}
    slow = ["--model.optimization.lr", "1e-3"]
    assert main([*recipe(tmp_path / "inputs", "language", tmp_path / "run", [keeps]), *slow]) == 0
    assert "hint" not in capfd.readouterr().err
    again = recipe(tmp_path / "inputs", "language", tmp_path / "again", [])
    content = yaml.safe_load(Path(again[-1]).read_text())
    for section in (content["model"], content["data"]):
        for group in GROUPS[section["class_path"]]:
            section["init_args"] |= section["init_args"].pop(group, {})
    Path(again[-1]).write_text(yaml.safe_dump(content))
    assert main([*again, "--model.lr", "1e-3", "--ckpt_path", str(tmp_path / "run" / "step=4.ckpt")]) == 0
    hints = [line for line in capfd.readouterr().err.splitlines() if line.startswith("asr: hint: ")]
    assert len(hints) == 1 and "write texts.train_texts (TextDataModule); optimization.lr (LitRNNLM); the" in hints[0]
    expected, found = (weights(tmp_path / name / "last.ckpt") for name in ("run", "again"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
