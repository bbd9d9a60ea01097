"""SIGTERM and Ctrl-C end `asr fit` with a checkpoint, from which a run goes on to the undisturbed one's end."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

pl = pytest.importorskip("pytorch_lightning")
pytest.importorskip("jsonargparse")

from lightning_fabric.plugins.io import torch_io  # noqa: E402

from asr.cli import train  # noqa: E402
from asr.cli.main import main  # noqa: E402
from asr.errors import AsrError  # noqa: E402
from scripts.benchmarks.processes import write_inputs  # noqa: E402

pytestmark = pytest.mark.slow

WORKERS = ["--data.init_args.loading.num_workers", "1"]
ROOT = Path(__file__).resolve().parents[2]


class SignalAt(pl.Callback):  # type: ignore[misc]
    """Sends a signal to the first process and those that prepare its batches, after a batch; schedulers do at any time.

    Args:
        batch: number of the batch, from 1; 0 for the last one of the first epoch.
        number: of the signal; as a terminal does, SIGINT is also sent to the other processes of the training.
    """

    def __init__(self, batch: int, number: int = int(signal.SIGTERM)) -> None:
        self.batch, self.number = batch, number

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress
        is_last = progress.is_last_batch and trainer.current_epoch == 0
        if trainer.is_global_zero and (progress.total.ready == self.batch if self.batch else is_last):
            others = getattr(trainer.strategy.launcher, "procs", []) if self.number == signal.SIGINT else []
            for pid in (os.getpid(), *(child.pid for child in (*others, *multiprocessing.active_children()))):
                os.kill(pid, self.number)


class KillAt(pl.Callback):  # type: ignore[misc]
    """Kills a process of the training at the end of a step, as a kernel without memory does.

    Args:
        step: the step.
        victim: `worker` for one that prepares batches, `peer` for another process of the training.
    """

    def __init__(self, step: int, victim: str) -> None:
        self.step, self.victim = step, victim

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == self.step:
            children: list[Any] = [*multiprocessing.active_children()]
            if self.victim == "peer":
                children = trainer.strategy.launcher.procs
            os.kill(children[0].pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def recipe(folder: Path, kind: str, output: Path, callbacks: list[dict[str, Any]]) -> list[str]:
    """The arguments of `asr fit`; the recipe is written into `output`."""
    if kind == "acoustic":
        network = {"num_features": 20, "num_tokens": 4, "dim": 16, "num_blocks": 2, "num_heads": 2, "hidden_dim": 32}
        network |= {"kernel_size": 3, "group_size": 8, "skip_probability": 0.5}
        fbank = {"class_path": "asr.audio.fbank.Fbank", "init_args": {"num_mel_bins": 20}}
        model: dict[str, Any] = {
            "class_path": "asr.models.training.LitAcousticModel",
            "init_args": {
                "network": {"class_path": "asr.models.conformer.Conformer", "init_args": network},
                "objective": {"class_path": "asr.models.losses.TorchCtc"},
            },
        }
        cuts = [f"{folder}/cuts.jsonl.gz"]
        data: dict[str, Any] = {
            "selection": {"train_cuts": cuts, "valid_cuts": cuts},
            "tokenizer": {"lexicon": [f"{folder}/lexicon.txt"]},
            "fbank": fbank,
            "batches": {"max_batch_duration": 4.0},
            "augmentation": {"speed_factors": [0.9, 1]},
        }
        data = {"class_path": "asr.datasets.datamodule.AcousticDataModule", "init_args": data}
    else:
        words = str(folder / "words.txt")
        network = {"hidden_size": 8, "embedding_size": 8, "maxent_order": 3, "maxent_size": 97, "dropout": 0.2}
        model = {"class_path": "asr.lm.rnn.training.LitRNNLM", "init_args": {"vocabulary": words, "network": network}}
        data = {"vocabulary": words, "cache_dir": str(output / "tokens"), "num_streams": 4, "num_steps": 16}
        data["texts"] = {"train_texts": [f"{folder}/text.txt"]}
        data = {"class_path": "asr.lm.rnn.datamodule.TextDataModule", "init_args": data}
    last = {"dirpath": str(output), "filename": "last", "enable_version_counter": False}
    callbacks = [*callbacks, {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": last}]
    trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": 3, "logger": False, "callbacks": callbacks}
    trainer |= {"default_root_dir": str(output), "enable_progress_bar": False}
    # In float32 Adam turns the rounding errors of gradients that are zero into whole steps.
    trainer["precision"] = "64-true" if kind == "acoustic" else "32-true"
    content = {"seed_everything": 1, "model": model, "data": data, "trainer": trainer}
    output.mkdir()
    (output / "recipe.yaml").write_text(yaml.safe_dump(content))
    return ["fit", "--config", str(output / "recipe.yaml")]


def weights(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path)["state_dict"]
    return state


@pytest.mark.parametrize(
    ("number", "kind", "batch", "options"),
    [
        (signal.SIGTERM, "language", 3, []),
        (signal.SIGTERM, "acoustic", 4, WORKERS),
        (signal.SIGTERM, "acoustic", 4, ["--trainer.devices", "2", "--trainer.strategy", "ddp"]),
        (signal.SIGINT, "acoustic", 4, [*WORKERS, "--trainer.devices", "2", "--trainer.strategy", "ddp"]),
    ],
)
def test_a_terminated_training_goes_on_to_the_same_end(
    folder: Path, tmp_path: Path, number: int, kind: str, batch: int, options: list[str]
) -> None:
    assert train.run(recipe(folder, kind, tmp_path / "whole", [])) == 0
    expected = weights(tmp_path / "whole" / "last.ckpt")
    signal_at = {"class_path": "tests.cli.test_termination.SignalAt", "init_args": {"batch": batch}}
    signal_at["init_args"]["number"] = int(number)
    killed = recipe(folder, kind, tmp_path / "killed", [signal_at])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "asr", *killed, *options]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
    try:
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    finally:
        signal.signal(signal.SIGINT, before)
    checkpoint = tmp_path / "killed" / "terminated.ckpt"
    told = f"asr: {'interrupted' if number == signal.SIGINT else 'terminated'}; continue with --ckpt_path {checkpoint}"
    assert (ran.returncode, told in ran.stderr) == (128 + number, True), ran.stderr
    assert "weights_only" not in ran.stderr  # a message of Lightning's
    assert torch.load(checkpoint)["global_step"] == batch
    # In one process, whatever the number before.
    assert train.run([*recipe(folder, kind, tmp_path / "resumed", []), "--ckpt_path", str(checkpoint)]) == 0
    found = weights(tmp_path / "resumed" / "last.ckpt")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("batch", "num_batches", "step"), [(0, 1, 0), (0, 2, 0), (3, 2, 2), (4, 2, 2)])
def test_a_signal_within_a_step_or_an_epochs_last_batch_is_heeded_behind_it(
    folder: Path, tmp_path: Path, batch: int, num_batches: int, step: int
) -> None:
    """Of `num_batches` batches a step; `step` is the one after which the training ends, 0 for an epoch's last one."""
    options = ["--trainer.accumulate_grad_batches", str(num_batches)]
    assert train.run([*recipe(folder, "language", tmp_path / "whole", []), *options]) == 0
    whole = torch.load(tmp_path / "whole" / "last.ckpt")
    handler = signal.getsignal(signal.SIGTERM)
    signal_at = {"class_path": "tests.cli.test_termination.SignalAt", "init_args": {"batch": batch}}
    with pytest.raises(SystemExit) as end:
        train.run([*recipe(folder, "language", tmp_path / "killed", [signal_at]), *options])
    assert end.value.code == 143 and signal.getsignal(signal.SIGTERM) is handler
    checkpoint = tmp_path / "killed" / "terminated.ckpt"
    assert torch.load(checkpoint)["global_step"] == (step or whole["global_step"] / 3)
    resumed = [*recipe(folder, "language", tmp_path / "resumed", []), *options, "--ckpt_path", str(checkpoint)]
    assert train.run(resumed) == 0
    found = weights(tmp_path / "resumed" / "last.ckpt")
    for name, value in whole["state_dict"].items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("keeps", "options"),
    [
        ({"filename": "last", "every_n_epochs": 2}, ["--trainer.check_val_every_n_epoch", "2"]),
        ({"filename": "last", "every_n_train_steps": 4}, ["--trainer.max_steps", "6"]),
        ({"filename": "best", "every_n_train_steps": 4, "save_last": True}, []),
    ],
)
def test_the_end_of_a_training_is_saved(
    folder: Path, tmp_path: Path, keeps: dict[str, Any], options: list[str]
) -> None:
    """Also if it falls between two validations, or between two of the steps that a checkpoint is written after."""
    every = {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint"}
    every |= {"init_args": {"dirpath": str(tmp_path / "every"), "every_n_train_steps": 1, "save_top_k": -1}}
    kept = {**every, "init_args": {"dirpath": str(tmp_path / "kept"), "enable_version_counter": False, **keeps}}
    assert train.run([*recipe(folder, "language", tmp_path / "run", [every, kept]), *options]) == 0
    last = max(int(torch.load(path)["global_step"]) for path in (tmp_path / "every").glob("*.ckpt"))
    for name in ("kept", "run"):
        assert torch.load(tmp_path / name / "last.ckpt")["global_step"] == last


def test_the_last_epoch_is_validated(folder: Path, tmp_path: Path) -> None:
    best = {"dirpath": str(tmp_path / "best"), "filename": "{epoch}", "monitor": "val_loss", "save_top_k": -1}
    callback = {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": best}
    arguments = recipe(folder, "acoustic", tmp_path / "run", [callback])
    assert train.run([*arguments, "--trainer.check_val_every_n_epoch", "2"]) == 0
    assert sorted(path.name for path in (tmp_path / "best").glob("*.ckpt")) == ["epoch=1.ckpt", "epoch=2.ckpt"]
    assert torch.load(tmp_path / "run" / "last.ckpt")["epoch"] == 2


@pytest.mark.parametrize("limit", [2, 1000])
def test_epochs_with_a_limit_are_validated_even_if_they_do_not_reach_it(
    folder: Path, tmp_path: Path, limit: int
) -> None:
    best = {"dirpath": str(tmp_path / "best"), "filename": "{epoch}", "monitor": "val_loss", "save_top_k": -1}
    callback = {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": best}
    arguments = recipe(folder, "acoustic", tmp_path / "run", [callback])
    assert train.run([*arguments, "--trainer.limit_train_batches", str(limit)]) == 0
    names = sorted(path.name for path in (tmp_path / "best").glob("*.ckpt"))
    assert names == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"]


def test_a_training_that_ended_within_an_epoch_goes_on_there(folder: Path, tmp_path: Path) -> None:
    assert train.run(recipe(folder, "language", tmp_path / "whole", [])) == 0
    last = tmp_path / "part" / "last.ckpt"
    arguments = recipe(folder, "language", tmp_path / "part", [])
    assert train.run([*arguments, "--trainer.max_steps", "3", "--trainer.check_val_every_n_epoch", "2"]) == 0
    assert torch.load(last)["global_step"] == 3
    assert train.run([*recipe(folder, "language", tmp_path / "resumed", []), "--ckpt_path", str(last)]) == 0
    steps = [torch.load(tmp_path / name / "last.ckpt")["global_step"] for name in ("whole", "resumed")]
    assert steps[0] == steps[1]


def test_a_run_that_goes_on_keeps_the_best_checkpoints_so_far(folder: Path, tmp_path: Path) -> None:
    """In another folder it would otherwise call the best of its own epochs the best."""
    every = {"filename": "{epoch}", "monitor": "epoch", "save_top_k": -1, "dirpath": str(tmp_path / "every")}
    best = {"filename": "{epoch}", "monitor": "val_loss", "mode": "max"}  # the first epoch has the highest loss
    for name, options in (("whole", []), ("resumed", ["--ckpt_path", str(tmp_path / "every" / "epoch=0.ckpt")])):
        callbacks = [
            {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": arguments}
            for arguments in ({**best, "dirpath": str(tmp_path / f"{name}-best")}, every)
        ]
        assert train.run([*recipe(folder, "acoustic", tmp_path / name, callbacks), *options]) == 0
    kept = [[path.name for path in (tmp_path / f"{name}-best").glob("*")] for name in ("whole", "resumed")]
    assert kept == [["epoch=0.ckpt"], []]


class PressesCtrlC(pl.Callback):  # type: ignore[misc]
    """Does what Ctrl-C does, in the third batch.

    Args:
        times: how often.
    """

    def __init__(self, times: int) -> None:
        self.times = times

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            for _number in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_a_training_with_a_checkpoint_and_twice_at_once(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], times: int
) -> None:
    """Lightning would exit with 0 or 1; after 0, a script would go on and use half of a training."""
    callback = {"class_path": "tests.cli.test_termination.PressesCtrlC", "init_args": {"times": times}}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
    try:
        with pytest.raises(SystemExit) as end:
            sys.exit(main(recipe(folder, "language", tmp_path / "run", [callback])))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == 130
    checkpoint, lines = tmp_path / "run" / "terminated.ckpt", capfd.readouterr().err.splitlines()
    told = f"interrupted; continue with --ckpt_path {checkpoint}" if times == 1 else "interrupted"
    assert lines[-1] == f"asr: {told}" and checkpoint.exists() == (times == 1)
    assert "asr: a checkpoint is written after this step or validation; another Ctrl-C ends at once" in lines


class BreaksConnection(pl.Callback):  # type: ignore[misc]
    """Fails as the main process does if a worker is killed while it is sending a batch."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_batch_start(self, *_: Any) -> None:
        raise getattr(builtins, self.name)


@pytest.mark.parametrize("name", ["ConnectionResetError", "ConnectionRefusedError", "EOFError"])
def test_a_worker_killed_while_sending_is_one_sentence(folder: Path, tmp_path: Path, name: str) -> None:
    callback = {"class_path": "tests.cli.test_termination.BreaksConnection", "init_args": {"name": name}}
    with pytest.raises(AsrError, match="a process that prepares batches was killed or failed, perhaps for lack"):
        train.run(recipe(folder, "language", tmp_path / "run", [callback]))


def test_a_checkpoint_is_written_whole_or_not_at_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's death may be noticed while a checkpoint is written."""
    writes = torch_io._atomic_save
    written: list[Path] = []

    def breaks_off(checkpoint: dict[str, Any], path: str) -> None:
        written.append(Path(path))
        writes(checkpoint, path)
        if len(written) == 3:
            os.truncate(path, 100)
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    monkeypatch.setattr(torch_io, "_atomic_save", breaks_off)
    every = {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint"}
    every |= {"init_args": {"dirpath": str(tmp_path / "every"), "every_n_train_steps": 1, "save_top_k": -1}}
    with pytest.raises(AsrError, match="the checkpoints written so far are complete"):
        train.run(recipe(folder, "language", tmp_path / "run", [every]))
    assert {int(torch.load(path)["global_step"]) for path in (tmp_path / "every").iterdir()} == {1, 2}
    assert not any(path.exists() for path in written)


@pytest.mark.one_stack
@pytest.mark.parametrize(
    ("victim", "options", "sentence"),
    [
        ("worker", WORKERS, "a process that prepares batches was killed or failed"),
        (
            "peer",
            ["--trainer.devices", "2", "--trainer.strategy", "ddp"],
            "another process of this training was killed or failed",
        ),
    ],
)
def test_a_killed_process_ends_the_training_and_checkpoints_stay(
    folder: Path, tmp_path: Path, victim: str, options: list[str], sentence: str
) -> None:
    kills = {"class_path": "tests.cli.test_termination.KillAt", "init_args": {"step": 4, "victim": victim}}
    every = {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint"}
    every |= {"init_args": {"dirpath": str(tmp_path / "every"), "every_n_train_steps": 1, "save_top_k": -1}}
    killed = recipe(folder, "acoustic", tmp_path / "killed", [every, kills])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "asr", *killed, *options]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    # Lightning looks every five seconds for processes that are gone, and kills the first one if it is still there.
    assert ran.returncode in ((2,) if victim == "worker" else (2, -signal.SIGKILL)), ran.stderr
    assert ran.returncode != 2 or f"asr: error: {sentence}" in ran.stderr, ran.stderr
    steps = {int(torch.load(path)["global_step"]): path for path in (tmp_path / "every").glob("*.ckpt")}
    assert max(steps) >= 3
    if victim == "worker":
        # With processes that prepare batches, too, the run goes on from the same batch.
        resumed = recipe(folder, "acoustic", tmp_path / "resumed", [])
        assert train.run(recipe(folder, "acoustic", tmp_path / "whole", [])) == 0
        assert train.run([*resumed, *WORKERS, "--ckpt_path", str(steps[3])]) == 0
        expected, found = (weights(tmp_path / name / "last.ckpt") for name in ("whole", "resumed"))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
