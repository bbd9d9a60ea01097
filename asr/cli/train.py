"""`asr fit`, `asr validate`, `asr test` and `asr predict`: LightningCLI on a YAML recipe."""

from __future__ import annotations

import logging
import warnings
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.plugins.io import TorchCheckpointIO

from asr.errors import AsrError
from asr.serialization import read_checkpoint

_SUBCOMMANDS = ("fit", "validate", "test", "predict")


# What jsonargparse says beside the key and what is wrong with it.
_BESIDE = ("Does not validate", "Subtypes:", "Errors:", "Expected a <class 'NoneType'>", "Given value type:")


_LONGEST_VALUE = 80


class _CheckpointIO(TorchCheckpointIO):  # type: ignore[misc]
    """Checkpoints for `--ckpt_path` are read by our own reader: no code runs from them."""

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return read_checkpoint(path)


class _Cli(LightningCLI):  # type: ignore[misc]
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        trainer.strategy.checkpoint_io = _CheckpointIO()
        return trainer


def run(arguments: Sequence[str]) -> int:
    """Runs one of Lightning's sub-commands; the model and the data are whatever classes the YAML names.

    Args:
        arguments: the sub-command and its options, such as `["fit", "--config", "recipes/an4/am.yaml"]`.

    Returns:
        the exit code.

    Raises:
        AsrError: an option or the YAML is wrong; or as the model and the data raise it.
    """
    # Batches are bucketed by duration and made beside the trainer on purpose.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # The arguments are those of the command line, less the program's name.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.INFO)
    _check_checkpoint(arguments)
    try:
        _Cli(
            pl.LightningModule,
            pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"exit_on_error": False, **{name: {"exit_on_error": False} for name in _SUBCOMMANDS}},
            args=list(arguments),
        )
    except (ArgumentError, UnicodeDecodeError) as error:
        raise AsrError(
            f"{' '.join(arguments)}: {_sentence(str(error))}; 'asr {arguments[0]} --help' names all options."
        ) from error
    except UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise AsrError(
            f"{' '.join(arguments)}: the checkpoint is damaged or holds other objects ({reason})."
        ) from error
    except ValueError as error:
        # What the YAML's classes say of their input comes wrapped in a page about types.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, AsrError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None
    return 0


def _check_checkpoint(arguments: Sequence[str]) -> None:
    """Refuses a checkpoint on the command line that `read_checkpoint` refuses: Lightning looks into it first."""
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, attached = option.partition("=")
        if name == "--ckpt_path" and Path(attached or value).is_file():
            read_checkpoint(attached or value)


def _sentence(message: str) -> str:
    """The key, what is wrong with it, and its value where that is short."""
    lines = (line.strip().removeprefix("- ") for line in message.splitlines())
    kept = (line for line in lines if not line.startswith(_BESIDE))
    return " ".join(line for line in kept if not line.startswith("Given value:") or len(line) <= _LONGEST_VALUE)
