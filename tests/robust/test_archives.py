"""Checkpoints, lattices and manifests made to run code or damaged: each is refused, whatever reads it."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pickle
import random
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asr.decoding.k2_lattice import load_k2_lattice
from asr.errors import AsrError
from asr.lm.rnn.export import read_network
from asr.models.checkpoint import trained_network
from asr.serialization import read_checkpoint
from asr.torch_archive import load_tensors
from tests.reference.harmful_pickle import HarmfulPickle

READERS: list[Callable[[Path], object]] = [read_checkpoint, trained_network, read_network, load_k2_lattice]


def good_checkpoint() -> bytes:
    file = io.BytesIO()
    weights = torch.arange(400.0).view(20, 20)
    content = {
        "state_dict": {
            "average.network.weight": weights,
            "half": weights.half().t(),
            "parameter": torch.nn.Parameter(weights),
        },
        "tokens": ["<blk>", "AA"],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False]),
    }
    torch.save(content, file)
    return file.getvalue()


def rewritten(change: Callable[[zipfile.ZipFile, str, bytes], None]) -> bytes:
    """The good checkpoint with its pickle's entry written by `change`."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good_checkpoint())) as old, zipfile.ZipFile(file, "w") as new:
        warnings.simplefilter("ignore")
        for name in old.namelist():
            if name.endswith("data.pkl"):
                change(new, name, old.read(name))
            else:
                new.writestr(name, old.read(name))
    return file.getvalue()


def attacks(folder: Path) -> dict[str, bytes]:
    harmful = {"state_dict": {}, "x": HarmfulPickle(folder)}
    bad = pickle.dumps(harmful, 2)
    made = str(folder).encode()
    modern, legacy = io.BytesIO(), io.BytesIO()
    torch.save(harmful, modern)
    torch.save(harmful, legacy, _use_new_zipfile_serialization=False)
    pk = "data.pkl"
    return {
        "modern": modern.getvalue(),
        "legacy": legacy.getvalue(),
        "plain pickle": bad,
        "pickle before an archive": pickle.dumps(HarmfulPickle(folder), 2) + good_checkpoint(),
        "legacy file before an archive": legacy.getvalue() + good_checkpoint(),
        "archive before an archive": modern.getvalue() + good_checkpoint(),
        "doubled, first": rewritten(lambda new, name, old: (new.writestr(name, bad), new.writestr(name, old))[0]),
        "doubled, last": rewritten(lambda new, name, old: (new.writestr(name, old), new.writestr(name, bad))[0]),
        "other case": rewritten(
            lambda new, name, old: (new.writestr(name, old), new.writestr(name.replace(pk, "DATA.PKL"), bad))[0]
        ),
        "other case beside a decoy": rewritten(
            lambda new, name, old: (
                new.writestr(name.replace(pk, "data.PKL"), bad),
                new.writestr(name.replace(pk, "x.pkl"), old),
            )[0]
        ),
        "protocol 4": rewritten(lambda new, name, old: new.writestr(name, pickle.dumps(harmful, 4))),
        "INST": rewritten(lambda new, name, old: new.writestr(name, b"(S'%s'\nios\nmkdir\n." % made)),
        "GLOBAL": rewritten(lambda new, name, old: new.writestr(name, b"cposix\nmkdir\n(S'%s'\ntR." % made)),
        "behind STOP": rewritten(lambda new, name, old: new.writestr(name, old + bad)),
        "compressed": rewritten(lambda new, name, old: new.writestr(name, old, zipfile.ZIP_DEFLATED)),
        "pickle of pickles": rewritten(
            lambda new, name, old: new.writestr(
                name, b"cpickle\nloads\n(B%s%stR." % (len(bad).to_bytes(4, "little"), bad)
            )
        ),
        "attribute of a constructor": rewritten(
            lambda new, name, old: new.writestr(
                name, b"ctorch._utils\n_rebuild_tensor_v2\n(NN}X\x01\x00\x00\x00aK\x01stb."
            )
        ),
        "huge memo": rewritten(lambda new, name, old: new.writestr(name, b"\x80\x02}r\xff\xff\xff\x7f.")),
        "storage outside": rewritten(
            lambda new, name, old: new.writestr(
                name, b"(S'storage'\nctorch\nFloatStorage\nS'../../etc'\nS'cpu'\nI10\ntQ."
            )
        ),
        "tensor beyond its storage": rewritten(
            lambda new, name, old: new.writestr(name, old.replace(b"K\x14K\x14", b"K\x14K\x15"))
        ),
    }


def test_no_attack_runs_code_or_is_read(tmp_path: Path) -> None:
    made = tmp_path / "made"
    path = tmp_path / "last.ckpt"
    for attack, content in attacks(made).items():
        path.write_bytes(content)
        for reader in READERS:
            with pytest.raises(AsrError):
                reader(path)
                pytest.fail(f"{attack} was read by {reader.__name__}")
            assert not made.exists(), f"{attack} runs code in {reader.__name__}"


def test_what_torch_saves_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(good_checkpoint())
    found, expected = load_tensors(path), torch.load(path)
    assert found["tokens"] == expected["tokens"]
    for name in ("empty", "scalar", "flags"):
        assert torch.equal(found[name], expected[name])
    for name, value in expected["state_dict"].items():
        assert torch.equal(found["state_dict"][name], value) and found["state_dict"][name].dtype == value.dtype
        assert isinstance(found["state_dict"][name], torch.nn.Parameter) == isinstance(value, torch.nn.Parameter)


@pytest.mark.slow
def test_no_flipped_bit_changes_what_is_read(tmp_path: Path) -> None:
    content = good_checkpoint()
    path = tmp_path / "last.ckpt"
    path.write_bytes(content)
    expected = load_tensors(path)
    generator = random.Random(0)
    num_read = 0
    for _ in range(400):
        damaged = bytearray(content)
        damaged[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            found = load_tensors(path)
        except pickle.UnpicklingError:
            continue
        # What is left are bits that mean nothing: padding, dates, versions.
        num_read += 1
        assert found["tokens"] == expected["tokens"] and found["state_dict"].keys() == expected["state_dict"].keys()
        for name, value in expected["state_dict"].items():
            assert torch.equal(found["state_dict"][name], value)
    assert num_read < 200


COMMAND = {"type": "command", "channels": [0], "source": "mkdir made"}
RECORDING = {
    "id": "a",
    "sources": [COMMAND],
    "sampling_rate": 16000,
    "num_samples": 16000,
    "duration": 1.0,
    "channel_ids": [0],
}
PLAIN = {**RECORDING, "sources": [{"type": "file", "channels": [0], "source": "a.flac"}]}
CUT = {
    "id": "a",
    "start": 0,
    "duration": 1.0,
    "channel": 0,
    "supervisions": [],
    "recording": RECORDING,
    "type": "MonoCut",
}


def with_source(**source: str) -> dict[str, object]:
    return {**CUT, "recording": {**RECORDING, "sources": [{**COMMAND, **source}]}}


@pytest.mark.parametrize(
    "cut",
    [
        CUT,
        with_source(type="url", source="http://localhost/a.flac"),
        with_source(type="file", source="pipe:mkdir made"),
        with_source(type="file", source="a.sph; mkdir made; a.sph"),
        {**CUT, "recording": PLAIN, "custom": {"target": RECORDING}},
        {**CUT, "recording": {**PLAIN, "transforms": [{"name": "Reverb", "kwargs": {"rir": RECORDING}}]}},
        {**CUT, "recording": PLAIN, "features": {"storage_type": "kaldiio", "storage_path": "mkdir made |"}},
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_no_manifest_runs_a_command(tmp_path: Path, cut: dict[str, object], packed: bool, monkeypatch) -> None:
    pytest.importorskip("lhotse")
    from asr.datasets.cuts import cut_waveform, read_cuts

    monkeypatch.chdir(tmp_path)
    path = tmp_path / ("cuts.jsonl.gz" if packed else "cuts.jsonl")
    path.write_bytes(gzip.compress(json.dumps(cut).encode()) if packed else json.dumps(cut).encode())
    with pytest.raises(AsrError, match="not a readable manifest"):
        cut_waveform(read_cuts([path])[0], 16000)
    assert not (tmp_path / "made").exists()


def test_plain_manifests_are_read(tmp_path: Path) -> None:
    pytest.importorskip("lhotse")
    from asr.datasets.cuts import read_cuts

    path = tmp_path / "cuts.jsonl"
    path.write_text(json.dumps({**CUT, "recording": PLAIN}) + "\n\n")
    assert [cut.id for cut in read_cuts([path])] == ["a"]


def test_lightning_resumes_by_the_same_reader(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("pytorch_lightning")
    import pytorch_lightning as pl

    from asr.cli import train

    made, path = tmp_path / "made", tmp_path / "last.ckpt"
    torch.save({"state_dict": {}, "x": HarmfulPickle(made)}, path)
    monkeypatch.chdir(tmp_path)
    model = ["--model", "pytorch_lightning.demos.boring_classes.BoringModel"]
    data = ["--data", "pytorch_lightning.demos.boring_classes.BoringDataModule"]
    quiet = [
        f"--trainer.{name}"
        for name in ("logger=false", "enable_checkpointing=false", "fast_dev_run=true", "accelerator=cpu")
    ]
    assert pl is not None
    with pytest.raises(AsrError, match="posix mkdir has no place"):
        train.run(["fit", *model, *data, *quiet, "--ckpt_path", str(path)])
    assert not made.exists()


@pytest.mark.slow
def test_a_checkpoint_names_no_class_for_the_model(tmp_path: Path, monkeypatch) -> None:
    """Lightning 2.6 would build what the checkpoint's hyperparameters name, in the place of the recipe's model."""
    pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.demos.boring_classes import BoringModel

    from asr.cli import train

    made, path = tmp_path / "made", tmp_path / "last.ckpt"
    (tmp_path / "harmful.py").write_text(f"import os; os.mkdir({str(made)!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    content = {"state_dict": BoringModel().state_dict(), "pytorch-lightning_version": "2.2.5", "loops": {}}
    torch.save({**content, "hyper_parameters": {"_class_path": "harmful.Model"}}, path)
    command = ["fit", "--model", "pytorch_lightning.demos.boring_classes.BoringModel"]
    command += ["--data", "pytorch_lightning.demos.boring_classes.BoringDataModule", "--ckpt_path", str(path)]
    with contextlib.suppress(Exception):  # the rest of the checkpoint is missing
        train.run([*command, "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu", "--trainer.logger=false"])
    assert not made.exists()
