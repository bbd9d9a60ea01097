"""Every language model recipe makes a model and a data module."""

from __future__ import annotations

from pathlib import Path

import pytest

pl = pytest.importorskip("pytorch_lightning")
pytest.importorskip("jsonargparse")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(ROOT.glob("recipes/*/*rnnlm*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_recipe_is_instantiated(recipe: Path, tmp_path: Path) -> None:
    from pytorch_lightning.cli import LightningCLI

    from asr.lm.rnn.training import LitRNNLM

    words = tmp_path / "words.txt"
    words.write_text("A\nB\n")
    overrides = [f"--{part}.init_args.vocabulary={words}" for part in ("model", "data")]
    cli = LightningCLI(
        pl.LightningModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        save_config_callback=None,
        args=[
            "--config",
            str(recipe),
            *overrides,
            "--model.init_args.network.maxent_size=100",
            "--trainer.logger=false",
        ],
    )
    assert isinstance(cli.model, LitRNNLM)
    assert cli.datamodule.vocabulary == cli.model.network.vocabulary


def test_there_are_recipes() -> None:
    assert {path.parent.name for path in RECIPES} >= {"an4", "librispeech", "wikitext-2"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_best_checkpoint_is_written_at_its_validation(recipe: Path) -> None:
    """After a number of steps, Lightning would write later weights under the figure of an earlier validation."""
    import yaml

    callbacks = yaml.safe_load(recipe.read_text(encoding="utf-8"))["trainer"]["callbacks"]
    chosen = [callback["init_args"] for callback in callbacks if "monitor" in callback["init_args"]]
    assert not any("every_n_train_steps" in arguments for arguments in chosen)
