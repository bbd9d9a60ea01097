"""Every acoustic-model recipe builds its network and objective, and names options that its data module has."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from asr.audio.fbank import Fbank
from asr.datasets.datamodule import AcousticDataModule
from asr.models.checkpoint import trained_network
from asr.models.training import LitAcousticModel, transfer_weights

pytestmark = pytest.mark.slow

ALL_RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*/am*.yaml"))
RECIPES = [recipe for recipe in ALL_RECIPES if "asr.models.training.LitAcousticModel" in recipe.read_text("utf-8")]
CHAIN_RECIPES = [recipe for recipe in ALL_RECIPES if recipe not in RECIPES]


def load_class(path: str) -> type[Any]:
    module, name = path.rsplit(".", 1)
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found


def build(section: dict[str, Any]) -> Any:
    return load_class(section["class_path"])(**section.get("init_args", {}))


def with_groups(owner: type[Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with instances for groups of keys."""
    defaults = {name: one.default for name, one in inspect.signature(owner).parameters.items()}
    return {
        name: type(defaults[name])(**value) if is_dataclass(defaults[name]) else value
        for name, value in arguments.items()
    }


def test_there_are_recipes() -> None:
    assert {recipe.stem for recipe in RECIPES} >= {"am", "am_dnn", "am_mini"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.parent.name}/{recipe.stem}")
def test_a_recipe_is_complete(recipe: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    arguments = dict(config["model"]["init_args"])
    network_section, objective = arguments.pop("network"), build(arguments.pop("objective"))
    if "num_blocks" in network_section["init_args"]:  # fewer blocks make the same network quicker
        network_section["init_args"]["num_blocks"] = 2
        network_section["init_args"]["intermediate_blocks"] = [1]
    network = build(network_section).eval()
    assert config["model"]["class_path"] == "asr.models.training.LitAcousticModel"
    inspect.signature(LitAcousticModel).bind(network, objective, **with_groups(LitAcousticModel, arguments))
    data = with_groups(AcousticDataModule, config["data"]["init_args"])
    assert config["data"]["class_path"] == "asr.datasets.datamodule.AcousticDataModule"
    inspect.signature(AcousticDataModule).bind(**data)
    build(data["augmentation"].spec_augment)
    assert network.num_features == (build(data["fbank"]) if "fbank" in data else Fbank()).feature_dim
    with torch.inference_mode():
        log_prob, _ = network(torch.randn(1, 30, network.num_features), torch.tensor([30]))
    assert log_prob.shape[2] == network.num_tokens
    if str(arguments.get("initial_checkpoint")).startswith("checkpoints/"):
        initial = trained_network(Path(__file__).parents[2] / arguments["initial_checkpoint"])
        tokens = [str(number) for number in range(network.num_tokens)]
        transfer_weights(network, tokens, initial.weights, initial.tokens)
    kept = [
        callback["init_args"]
        for callback in config["trainer"]["callbacks"]
        if callback["class_path"] == "pytorch_lightning.callbacks.ModelCheckpoint"
    ]
    # From Lightning 2.6 on, `save_last` beside `monitor` no longer keeps a last state that is not a best one, too.
    assert [arguments["filename"].partition("-")[0] for arguments in kept] == ["best", "last"]
    assert ["monitor" in arguments for arguments in kept] == [True, False]
    for section in config["trainer"]["callbacks"]:
        inspect.signature(load_class(section["class_path"])).bind(**section.get("init_args", {}))
    logger = config["trainer"]["logger"]
    build({**logger, "init_args": {**logger["init_args"], "save_dir": str(tmp_path)}}).log_metrics({"loss": 1.0})
    assert list(tmp_path.rglob("events.out.tfevents.*"))


@pytest.mark.parametrize("recipe", CHAIN_RECIPES, ids=lambda recipe: f"{recipe.parent.name}/{recipe.stem}")
def test_a_recipe_of_lattice_free_mmi_is_complete(recipe: Path) -> None:
    config = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    model, data = config["model"], config["data"]
    assert model["class_path"] == "asr.models.chain_training.LitChainModel"
    assert data["class_path"] == "asr.models.chain_training.ChainDataModule"
    network, owner = build(model["init_args"]["network"]).eval(), load_class(model["class_path"])
    owner(**{**with_groups(owner, model["init_args"]), "network": network})
    owner = load_class(data["class_path"])
    arguments = with_groups(owner, data["init_args"])
    inspect.signature(owner).bind(**arguments)
    build(arguments["augmentation"].spec_augment)
    assert network.num_features == build(data["init_args"]["fbank"]).feature_dim
    with torch.inference_mode():
        log_prob, num_frames = network(torch.randn(1, 30, network.num_features), torch.tensor([30]))
    assert log_prob.shape == (1, 10, network.num_tokens) and num_frames.tolist() == [10]
    for section in config["trainer"]["callbacks"]:
        inspect.signature(load_class(section["class_path"])).bind(**section.get("init_args", {}))
