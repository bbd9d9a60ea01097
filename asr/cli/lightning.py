"""`asr fit`, `asr validate`, `asr test` and `asr predict`: LightningCLI on a YAML recipe."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningCLI

from asr.errors import AsrError


def run(arguments: Sequence[str]) -> int:
    """Runs one of Lightning's sub-commands; the model and the data are whatever classes the YAML names.

    Args:
        arguments: the sub-command and its options, such as `["fit", "--config", "recipes/an4/am.yaml"]`.

    Returns:
        the exit code.

    Raises:
        AsrError: as the model and the data raise it.
    """
    # Batches are bucketed by duration and made beside the trainer on purpose.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.INFO)
    try:
        LightningCLI(
            pl.LightningModule,
            pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            args=list(arguments),
        )
    except ValueError as error:
        # What the YAML's classes say of their input comes wrapped in a page about types.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, AsrError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None
    return 0
