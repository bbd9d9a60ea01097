"""`asr fit`, `asr validate`, `asr test` and `asr predict`: LightningCLI on a YAML recipe."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningCLI


def run(arguments: Sequence[str]) -> int:
    """Runs one of Lightning's sub-commands; the model and the data are whatever classes the YAML names.

    Args:
        arguments: the sub-command and its options, such as `["fit", "--config", "recipes/an4/am.yaml"]`.

    Returns:
        the exit code.
    """
    # Batches are bucketed by duration and made beside the trainer on purpose.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.INFO)
    LightningCLI(
        pl.LightningModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=list(arguments),
    )
    return 0
