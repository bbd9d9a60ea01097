"""`asr fit`, `asr validate` and `asr test`: LightningCLI on a YAML recipe. `asr predict` only names other commands."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytorch_lightning as pl
from jsonargparse import ActionConfigFile, Namespace  # type: ignore[attr-defined]
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities.exceptions import SIGTERMException

from asr.cli.main import NEGATIVE_NUMBER
from asr.cli.old_recipes import OldKeys, hint_of_groups, old_class_paths
from asr.distributed import largest
from asr.errors import AsrError
from asr.kernels.precision import cpu_multiplies_bfloat16
from asr.serialization import atomic_path, read_checkpoint

# Parts of jsonargparse's messages besides the key and the error.
_NOISE = (
    "Does not validate", "Subtypes:", "Errors:", "Expected a <class 'NoneType'>", "Given value type:",
    "Given value: NestedArg",  # an option of the command line, which the message begins with
)  # fmt: skip

_LONGEST_VALUE = 80

_GO_ON = (
    "and the training has ended; the checkpoints written so far are complete, so continue from one with --ckpt_path"
)

_WORKER_ENDED = (
    "a process that prepares batches was killed or failed, perhaps for lack of memory "
    f"(reduce their number with --data.init_args.loading.num_workers), {_GO_ON}"
)

# Messages of torch and Lightning, and what they mean; a group is the part that is shown.
_EXPLANATIONS = {
    r"Error\(s\) in loading state_dict for \w+:\s+(size mismatch for [\w.]+|[^\n,]+)": "the checkpoint is of another "
    "network than that of the recipe ({}); give both of the same training",
    r"Early stopping conditioned on metric `([^`]+)` which is not available": "{}, which EarlyStopping monitors, is "
    "not computed; check its name, and give utterances to validate on",
    "DataLoader worker": _WORKER_ENDED,
    # Lightning 2.2 turns 16-mixed into bf16-mixed on a CPU.
    "expected scalar type BFloat16 but found Float": "trainer.precision: this version of torch cannot train this "
    "network in bfloat16 on a CPU; give --trainer.precision 32",
    r"`val_check_interval` \((\d+)\) must be less than or equal to the number of the training batches \((\d+)\)": (
        "trainer.val_check_interval is {}, but an epoch has only {} batches; give at most as many, or 1.0 to validate "
        "after each epoch"
    ),
    "No supported gpu backend found": "trainer.accelerator: torch finds no GPU; give cpu or auto",
    r"(-?\d+) is not in bounds, numpy accepts from (\d+) to (\d+)": "seed_everything is {}; give {} to {}",
    # Of networks and their configurations, which know nothing of recipes.
    r"(?:^|Errors:\s+- )(\w+ is [^\n;]+; it must be [^\n]+)": "model: {}",
    "Connection (?:closed|reset) by peer": f"another process of this training was killed or failed, {_GO_ON}",
}


class _CheckpointIO(TorchCheckpointIO):  # type: ignore[misc]
    """Writes whole checkpoints or none, and reads that of `--ckpt_path` so that no code from it is run."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """As in Lightning, whose older versions leave an empty file behind if a training ends while they write."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with atomic_path(Path(path)) as partial:
            super().save_checkpoint(checkpoint, str(partial), storage_options)

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return read_checkpoint(path)


HELP = """\
Trains a network according to a YAML file, the recipe: model, data and trainer. Options override the recipe.

  asr fit --config recipes/an4/am.yaml                         a recipe
  asr fit --config recipes/an4/am.yaml --data.batches.max_batch_duration 50 --trainer.devices 2 --trainer.strategy ddp
  asr fit --config recipes/an4/am.yaml --print_config          the recipe with all of its keys
  asr fit --config recipes/an4/am.yaml --ckpt_path FILE        continue where a run stopped
  asr fit --model.help asr.lm.rnn.training.LitRNNLM            the options of a class
  asr validate --config recipes/an4/am.yaml --ckpt_path FILE   figures of a checkpoint on the validation data

recipes (in the repository):
  recipes/an4/am.yaml                      Conformer, CTC, 948 utterances
  recipes/librispeech/am_tdnnf.yaml        TDNN-F, lattice-free MMI
  recipes/librispeech/am.yaml              Conformer, CTC, 960 hours
  recipes/librispeech/rnnlm.yaml           GRU language model
  recipes/wikitext-2/rnnlm-gru256.yaml     GRU language model on a small text

classes for 'model' and 'data':
  asr.models.training.LitAcousticModel     CTC, with asr.datasets.datamodule.AcousticDataModule
  asr.models.chain_training.LitChainModel  lattice-free MMI, with asr.models.chain_training.ChainDataModule
  asr.lm.rnn.training.LitRNNLM             language models, with asr.lm.rnn.datamodule.TextDataModule

--help-all shows all options of the trainer and of the command line.
"""

_TERMINATED = 128 + signal.SIGTERM
_CHECKPOINT_NAME = "terminated.ckpt"
_TOLD = b"\nasr: a checkpoint is written after this step or validation; another Ctrl-C ends at once\n"
_TOGETHER_SECONDS = 1.0


def _is_over(trainer: pl.Trainer) -> bool:
    """Whether the training ends with the epoch that ends now."""
    is_last = trainer.current_epoch + 1 == trainer.max_epochs or trainer.global_step == trainer.max_steps
    return bool(is_last or trainer.should_stop)


class _Termination(pl.Callback):  # type: ignore[misc]
    """On SIGTERM or Ctrl-C finishes the current step, writes a checkpoint, and ends the process like one that was
    killed. After the first Ctrl-C, another one ends it at once.

    All processes of a training stop at the same step, whichever of them the signal reaches first. If it arrives in the
    last batch of an epoch or during validation, the epoch is finished first.
    """

    def __init__(self) -> None:
        self.asked_by = 0  # the number of the signal
        self.is_over = False
        self._asked_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Replaces Lightning's handler of SIGTERM, which exits with code 0 and writes no checkpoint, and Python's of
        Ctrl-C, unless the shell has made this a background job, which ignores it."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            if number == signal.SIGTERM or callable(signal.getsignal(number)):
                self._before[number] = signal.signal(number, lambda number, _: self._ask(trainer, number))

    def _ask(self, trainer: pl.Trainer, number: int) -> None:
        if self.asked_by:
            # Terminals send Ctrl-C to all processes of a training, and torchrun once more to those it has started.
            is_same = trainer.world_size > 1 and time.monotonic() - self._asked_at < _TOGETHER_SECONDS
            if number == signal.SIGINT and not is_same:
                signal.signal(number, self._before[signal.SIGINT])
                signal.raise_signal(number)
            return
        self.asked_by, self._asked_at = number, time.monotonic()
        launcher: Any = trainer.strategy.launcher
        if number == signal.SIGINT:
            if trainer.is_global_zero:
                with contextlib.suppress(OSError):
                    os.write(2, _TOLD)  # `print` might be running already
        elif hasattr(launcher, "kill"):
            launcher.kill(number)  # the processes that this one has started

    def on_train_batch_start(self, trainer: pl.Trainer, _: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Stops before the first batch of a step, unless it is the last one of the epoch: after that Lightning counts
        the epoch as finished. Within a step the gradients of its first batches would be lost."""
        begins = batch_idx % trainer.accumulate_grad_batches == 0
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if begins and not is_last and (number := largest(self.asked_by)):
            self._stop(trainer, number)

    def on_train_epoch_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Makes this epoch the last of the process, unless it is the last of the training."""
        self.asked_by = largest(self.asked_by)
        self.is_over = self.asked_by > 0 and not _is_over(trainer)
        trainer.should_stop = trainer.should_stop or self.is_over

    def on_train_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Stops after an epoch."""
        if self.is_over:
            self._stop(trainer, self.asked_by)

    def teardown(self, trainer: pl.Trainer, _: pl.LightningModule, stage: str) -> None:
        """Restores the previous handlers."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _stop(self, trainer: pl.Trainer, number: int) -> None:
        keeps = trainer.checkpoint_callback
        path = Path(getattr(keeps, "dirpath", None) or trainer.default_root_dir) / _CHECKPOINT_NAME
        trainer.save_checkpoint(path, weights_only=False)
        if trainer.is_global_zero:
            event = "interrupted" if number == signal.SIGINT else "terminated"
            print(f"asr: {event}; continue with --ckpt_path {path}", file=sys.stderr, flush=True)
        environment = getattr(trainer.strategy, "cluster_environment", None)
        # A process started by Lightning must not look as if it had failed: Lightning would kill the others.
        is_child = isinstance(environment, LightningEnvironment) and trainer.local_rank > 0
        raise SystemExit(0 if is_child else 128 + number)


class _Checkpoints(pl.Callback):  # type: ignore[misc]
    """Saves the final checkpoint, which Lightning skips unless training ends on one of the recipe's intervals, and
    remembers the best ones of the run that is continued.

    The last epoch is validated even if `check_val_every_n_epoch` leaves it out, and each `ModelCheckpoint` that keeps
    the latest weights (without `monitor`, or with `save_last`) saves those of the end.
    """

    def on_fit_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Rejects folders of checkpoints that cannot be written before the training, not at its first checkpoint."""
        for keeps in trainer.checkpoint_callbacks:
            name = str(getattr(keeps, "dirpath", None) or "")
            if not name or "://" in name:
                continue
            there = next(path for path in (Path(name), *Path(name).parents) if path.exists())
            if not (there.is_dir() and os.access(there, os.W_OK)):
                raise AsrError(f"{name}: checkpoints cannot be written there; give ModelCheckpoint another dirpath.")

    def on_load_checkpoint(self, trainer: pl.Trainer, _: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps the best figures so far: Lightning forgets them where checkpoints now go to another folder, and would
        call the best one since then `best`. It does not delete those in the earlier folder."""
        for keeps in trainer.checkpoint_callbacks:
            state = checkpoint["callbacks"].get(keeps.state_key, {})
            if "dirpath" in state:
                state["dirpath"] = getattr(keeps, "dirpath", None)

    def on_train_epoch_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Has the last epoch validated."""
        if trainer.check_val_every_n_epoch is not None and trainer.current_epoch + 1 == trainer.max_epochs:
            trainer.check_val_every_n_epoch = 1

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Saves where `max_steps` ends within an epoch; later, the epoch would count as finished when resumed."""
        if trainer.global_step == trainer.max_steps and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Saves the last epoch, unless it has just been saved."""
        if _is_over(trainer):
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        for keeps in trainer.checkpoint_callbacks:
            if not isinstance(keeps, ModelCheckpoint) or keeps._should_skip_saving_checkpoint(trainer):
                continue
            candidates = keeps._monitor_candidates(trainer)
            if keeps.monitor is None:
                keeps._save_topk_checkpoint(trainer, candidates)
            keeps._save_last_checkpoint(trainer, candidates)


class _Parser(LightningArgumentParser):  # type: ignore[misc]
    """Takes old keys of recipes, and no abbreviations: a misspelled option must not start a training.

    jsonargparse makes a parser of this kind for each class that a recipe names.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})
        self._negative_number_matcher = NEGATIVE_NUMBER
        self._old_keys: OldKeys | None = None
        self._groups: set[str] = set()

    def add_class_arguments(self, theclass: type, *args: Any, **kwargs: Any) -> Any:
        added = super().add_class_arguments(theclass, *args, **kwargs)
        if not args:  # otherwise the class is a group of the recipe, such as the trainer
            self._old_keys = OldKeys(theclass, {name.partition(".")[0] for name in added})
            self._groups = {name for name in added if name in (self.groups or {})}
        return added

    def parse_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As in jsonargparse, which takes anything for a group, and null for any key."""
        config = super().parse_object(self._old_keys.in_groups(obj) if self._old_keys else obj, *args, **kwargs)
        for group in self._groups:
            if not isinstance(config.get(group, Namespace()), Namespace):
                raise AsrError(f"{group} is {config[group]!r}; give its keys, or leave it out.")
        if self._old_keys:
            keys = [action.dest for action in self._actions if action.default is not None]
            nulls = dict.fromkeys(key for key in keys if config.get(key, key) is None)
            self.validate(Namespace(nulls), False, True)  # checks null, too, but not what is missing
        return config

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if args is not None and self._old_keys:
            args = [self._old_keys.option_in_group(option) for option in args]
        return super().parse_args(args, *more, **kwargs)


class _CLI(LightningCLI):  # type: ignore[misc]
    """Lightning's command line for one subcommand, the first argument; the parsers of all take a second to make.

    Args:
        arguments: the command line without the program's name.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._name = arguments[0]
        super().__init__(
            pl.LightningModule,
            pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "asr", "exit_on_error": False, self._name: {"exit_on_error": False}},
            args=list(arguments),
            trainer_defaults={"callbacks": [_Checkpoints(), _Termination()]},
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # a static method of Lightning's
        """The arguments of the trainer's method that the command line does not offer."""
        return {self._name: LightningCLI.subcommands()[self._name]}

    def init_parser(self, **kwargs: Any) -> _Parser:
        """As in Lightning, whose older versions do not let another class of parsers be chosen."""
        header = f"pytorch_lightning=={pl.__version__}"  # type: ignore[attr-defined]
        parser = _Parser(**{"dump_header": [header], **kwargs})
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="a recipe; a later one overrides it")
        return parser

    def parse_arguments(self, parser: Any, args: Any) -> None:
        with hint_of_groups():
            super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        """Leaves the model to the recipe. Lightning 2.6 would take classes and arguments from the checkpoint, and read
        it by `torch.load`."""

    def before_instantiate_classes(self) -> None:
        """Rejects a test of random weights; modules read their `initial_checkpoint` only when a training begins."""
        if self._name != "fit" and self.config[self._name].ckpt_path is None:
            raise AsrError(f"asr {self._name}: there are no weights; give --ckpt_path a checkpoint of 'asr fit'.")

    def _run_subcommand(self, subcommand: str) -> None:
        """Removes the folder of a run that ended before its first batch, such as one whose `initial_checkpoint` does
        not exist: otherwise the next run would be `version_1`, and not what the commands of a recipe's page expect."""
        logger = self.trainer.logger
        folder = Path(logger.log_dir) if logger is not None and logger.log_dir is not None else None
        is_new = folder is not None and not folder.exists()
        try:
            super()._run_subcommand(subcommand)
        except BaseException:
            has_begun = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready > 0
            if folder is not None and is_new and self.trainer.is_global_zero and not has_begun:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, ImportError, RuntimeError) as error:
            raise MisconfigurationException(str(error)) from error
        _warn_of_slow_bfloat16(trainer)
        _require_numbers(trainer)
        if self._name == "fit":
            _require_training(trainer)
        _require_whole_weights(trainer)
        trainer.strategy.checkpoint_io = _CheckpointIO()
        return trainer


# Options of the trainer that Lightning does not check, and the least value of each.
_LEAST = {
    "check_val_every_n_epoch": 1,
    "accumulate_grad_batches": 1,
    "log_every_n_steps": 0,
    "gradient_clip_val": 0,
    "num_sanity_val_steps": -1,
}


def _require_numbers(trainer: pl.Trainer) -> None:
    """Rejects numbers with which training would fail later, or would not do what they say."""
    for name, least in _LEAST.items():
        number = getattr(trainer, name)
        if number is not None and not number >= least:
            raise AsrError(f"trainer.{name} is {number}; give {least} or more.")
    if isinstance(trainer.val_check_interval, (int, float)) and not trainer.val_check_interval > 0:
        raise AsrError(f"trainer.val_check_interval is {trainer.val_check_interval}; give a number above 0.")


def _require_training(trainer: pl.Trainer) -> None:
    """Rejects limits with which Lightning would end at once, with exit code 0 and without a checkpoint."""
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if getattr(trainer, name) == 0:
            raise AsrError(f"trainer.{name} is 0, so that nothing would be trained; give 1 or more, or leave it out.")


def _require_whole_weights(trainer: pl.Trainer) -> None:
    """Rejects weights of 16 bits: steps are smaller than their last bit, and a moving average would stand still."""
    kind, _, parts = str(trainer.precision).partition("-")
    if kind in ("16", "bf16") and parts == "true":
        raise AsrError(
            f"trainer.precision is {trainer.precision}, which would round the weights to 16 bits after each step; give "
            f"{kind}-mixed or 32."
        )


def _warn_of_slow_bfloat16(trainer: pl.Trainer) -> None:
    is_on_cpu = trainer.strategy.root_device.type == "cpu"
    if str(trainer.precision).startswith("bf16") and is_on_cpu and not cpu_multiplies_bfloat16():
        print(
            "asr: this processor does not multiply bfloat16; training is many times as fast with "
            "--trainer.precision 32.",
            file=sys.stderr,
        )


def run(arguments: Sequence[str]) -> int:
    """Runs one of Lightning's subcommands; the model and the data are the classes that the YAML names.

    Args:
        arguments: the subcommand and its options, such as `["fit", "--config", "recipes/an4/am.yaml"]`. All except
            `fit` need `--ckpt_path`, and `predict` is refused.

    Returns:
        the exit code; a training ended by SIGTERM or Ctrl-C raises SystemExit with 143 or 130 once its checkpoint is
        written.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed before the first batch, or twice, and Lightning has shut the training
            down.
        AsrError: an option or the YAML is wrong, the trainer cannot be as they say, the checkpoint is of another
            network, or another process of the training has ended; also any error of the model and the data.
    """
    if arguments[0] == "predict":
        raise AsrError(
            "asr predict would keep no results; make a bundle with 'asr bundle' and give it to 'asr transcribe' or "
            "'asr evaluate'."
        )
    if {"-h", "--help", "--help-all"} & set(arguments):
        print(HELP)
        if "--help-all" not in arguments:
            return 0
        arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    # Batches are bucketed by duration and prepared in the trainer's process on purpose.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # The arguments are those of the command line without the program's name.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    # The averaged network is not trained by gradients. The modules, not the data, move batches.
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")
    warnings.filterwarnings("ignore", message="You have overridden `transfer_batch_to_device`")
    # Sums over all processes are logged; a language model may have no text to validate on.
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True")
    warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    console = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    console.setLevel(logging.INFO)
    console.addFilter(_is_no_advertisement)
    _check_checkpoint(arguments)
    try:
        with old_class_paths(), _quiet_log_writers():
            trainer = _CLI(arguments).trainer
    except (ArgumentError, UnicodeDecodeError) as error:
        raise AsrError(
            f"{' '.join(arguments)}: {_sentence(str(error))}; 'asr {arguments[0]} --help-all' lists all options."
        ) from error
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from ended  # Lightning 2.6 exits with code 1
        raise
    except SIGTERMException:
        # Before the first batch or in a separate validation: there is nothing to save.
        raise SystemExit(_TERMINATED) from None
    except UnpicklingError as error:
        raise AsrError(
            f"{' '.join(arguments)}: the checkpoint is damaged or contains other objects ({_first_line(error)})."
        ) from error
    except MisconfigurationException as error:
        # Raised when the trainer is built, or only when the training begins.
        raise _explained(error) or AsrError(f"trainer: {_first_line(error)}.") from error
    except (ConnectionResetError, ConnectionRefusedError, EOFError) as error:
        # The process was killed while it was sending a batch.
        raise AsrError(f"{_WORKER_ENDED}.") from error
    except OSError as error:
        if error.filename is not None or isinstance(error, BrokenPipeError):
            raise
        raise AsrError(
            f"the logs of the training, or standard output, cannot be written ({error.strerror or error}), {_GO_ON}."
        ) from error
    except RuntimeError as error:
        if (explained := _explained(error)) is None:
            raise
        raise explained from error
    except ValueError as error:
        # Errors of the classes in the YAML come wrapped in a long message about types.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, AsrError):
            cause = cause.__cause__
        cause = cause or _explained(error)
        if cause is None:
            raise
        raise cause from None
    if trainer.interrupted:
        raise KeyboardInterrupt  # Lightning 2.2 returns as if the training were over
    return 0


@contextlib.contextmanager
def _quiet_log_writers() -> Iterator[None]:
    """Within the block, a thread that cannot write prints nothing: TensorBoard's error is raised in the main thread."""
    usual = threading.excepthook

    def show(failure: threading.ExceptHookArgs) -> None:
        if not isinstance(failure.exc_value, OSError):
            usual(failure)

    threading.excepthook = show
    try:
        yield
    finally:
        threading.excepthook = usual


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return "Tip:" not in record.getMessage()


def _check_checkpoint(arguments: Sequence[str]) -> None:
    """Rejects a checkpoint on the command line that `read_checkpoint` rejects, before Lightning opens it."""
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, attached = option.partition("=")
        if name == "--ckpt_path" and Path(attached or value).is_file():
            read_checkpoint(attached or value)


def _explained(error: Exception) -> AsrError | None:
    """What a message of torch or Lightning means; None if it is not in `_EXPLANATIONS`."""
    for message, explanation in _EXPLANATIONS.items():
        if found := re.search(message, str(error)):
            return AsrError(f"{explanation.format(*found.groups())}.")
    return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".!")


def _sentence(message: str) -> str:
    """The key, the error, and the value if it is short."""
    lines = (line.strip().removeprefix("- ") for line in message.splitlines())
    kept = (line for line in lines if not line.startswith(_NOISE))
    kept = (line for line in kept if not line.startswith("Given value:") or len(line) <= _LONGEST_VALUE)
    return " ".join(kept).rstrip(".")
