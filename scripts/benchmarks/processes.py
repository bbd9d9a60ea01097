"""Differences of weights between trainings of tiny networks in one process and in several, whole and resumed.

All random parts are on: dropout, skipped layers, masks, speeds, noise words. Acoustic models are trained in float64,
because in float32 Adam turns the rounding errors of zero gradients into whole steps.

`python -m scripts.benchmarks.processes FOLDER KIND ...` runs one of the processes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scripts.benchmarks.inputs import ROOT

KINDS = ("ctc", "chain", "nce", "full")
_SOUNDS = ("SIL", "a", "b")


def largest_differences(folder: Path, kinds: Sequence[str] = KINDS, num_processes: int = 2) -> dict[str, float]:
    """The largest difference of a weight between one process and several, of whole and resumed runs, by kind."""
    write_inputs(folder)
    train(folder, kinds, 1)
    train(folder, kinds, num_processes)
    found = {}
    for kind in kinds:
        expected, *others = (
            torch.load(folder / f"{kind}-{num}-{run}.pt") for num in (1, num_processes) for run in ("whole", "resumed")
        )
        assert all(other.keys() == expected.keys() for other in others)
        found[kind] = max(float((other[name] - expected[name]).abs().max()) for other in others for name in expected)
    return found


def train(folder: Path, kinds: Sequence[str], num_processes: int) -> None:
    """Trains in separate processes, started like a cluster's scheduler starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    environment |= {
        "WORLD_SIZE": str(num_processes),
        "NODE_RANK": "0",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", __name__, str(folder), *kinds]
    running = [
        subprocess.Popen(command, cwd=ROOT, env={**environment, "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(num_processes)
    ]
    try:
        messages = [process.communicate(timeout=300)[1].decode() for process in running]
    finally:
        for process in running:
            process.kill()
    for process, message in zip(running, messages, strict=True):
        if process.returncode:
            raise RuntimeError(f"training in {num_processes} processes failed:\n{message}")


def write_inputs(folder: Path) -> None:
    """Twelve recordings of two tones with their cuts, alignment and tied states, and a text."""
    import soundfile
    from lhotse import CutSet, MonoCut, Recording, SupervisionSegment

    from asr.audio.fbank import Fbank
    from asr.datasets.corpora.base import Utterance
    from asr.models.chain_corpus import Alignment, PreparedCorpus, write_corpus
    from asr.models.chain_preparation import prepare_chain, usable_utterances
    from asr.text.lexicon import Lexicon

    rng, time = np.random.default_rng(0), np.arange(4800) / 16000
    sounds = dict(zip(_SOUNDS, (0.0 * time, np.sin(3000 * time), np.sin(15000 * time)), strict=True))
    utterances, aligned, cuts = [], [], []
    for number in range(12):
        phones = ["SIL", *rng.choice(_SOUNDS[1:], size=3 + number % 4).tolist(), "SIL"]
        samples = 0.1 * np.concatenate([sounds[phone] for phone in phones])
        path = folder / f"{number:02d}.wav"
        soundfile.write(path, samples + 0.001 * rng.normal(size=len(samples)), 16000)
        speaker, words = f"speaker{number % 3}", " ".join(phones[1:-1]).upper()
        utterances.append(("toy", Utterance(str(number), path, words, speaker)))
        aligned.append(([_SOUNDS.index(phone) for phone in phones], [0.3 * at for at in range(len(phones))], 1.0))
        recording = Recording.from_file(path)
        segment = SupervisionSegment(path.stem, recording.id, 0.0, recording.duration, text=words, speaker=speaker)
        cuts.append(MonoCut(path.stem, 0.0, recording.duration, 0, [segment], recording=recording))
    CutSet.from_cuts(cuts).to_file(folder / "cuts.jsonl.gz")
    (folder / "lexicon.txt").write_text("A AH0\nB B IY1\n")
    lexicon, prepared = Lexicon({"A": [("a",)], "B": [("b",)]}), folder / "prepared"
    write_corpus(prepared, utterances, lexicon, Fbank(num_mel_bins=20), conditions=("1", "1.1"))
    alignment = Alignment.from_lists(_SOUNDS, aligned)
    alignment.save(prepared / "alignment.npz")
    corpus = PreparedCorpus(prepared)
    prepare_chain(corpus, alignment, usable_utterances(corpus, alignment, {})[0], 9, 5, folder / "states")
    words = "THE A CAT DOG SAT RAN FAR".split()
    (folder / "words.txt").write_text("\n".join(words))
    sentences = (" ".join(rng.choice(words, size=rng.integers(2, 6))) for _ in range(130))
    (folder / "text.txt").write_text("\n".join(sentences))


def _acoustic(folder: Path, kind: str) -> tuple[Any, Any]:
    from asr.audio.fbank import Fbank
    from asr.datasets.augment import SpecAugment

    if kind == "ctc":
        from asr.datasets.datamodule import AcousticDataModule, BatchSize, CutSelection, TokenizerFiles
        from asr.datasets.dataset import Augmentation
        from asr.models.conformer import Conformer
        from asr.models.losses import TorchCtc
        from asr.models.training import LitAcousticModel, Optimization

        cuts = [str(folder / "cuts.jsonl.gz")]
        # The last batches of the groups of like length have one utterance: nothing is left for the second process.
        data = AcousticDataModule(
            CutSelection(cuts, cuts), TokenizerFiles([str(folder / "lexicon.txt")]), Fbank(num_mel_bins=20),
            BatchSize(12.0, 4, 2), Augmentation((0.9, 1.0), max_vocal_tract_warp=0.1, spec_augment=SpecAugment()),
        )  # fmt: skip
        network = Conformer(20, 4, 16, 2, 2, 32, 3, 8, 0.1, 0.5, (1,))
        optimization = Optimization(peak_lr=1e-2, average_decay=0.5)
        return LitAcousticModel(network, TorchCtc(), optimization, flat_start_steps=2), data
    from asr.models.chain_training import (
        ChainDataModule,
        ChainOptimization,
        ChainRegularization,
        LitChainModel,
        Selection,
    )
    from asr.models.chunks import ChunkAugmentation, ChunkSizes
    from asr.models.tdnnf import Tdnnf

    chain = ChainDataModule(
        str(folder / "prepared"), "alignment.npz", str(folder / "states"), Selection(["toy-speaker2"]),
        ChunkSizes((20, 40), 120), ChunkAugmentation(spec_augment=SpecAugment()), fbank=Fbank(num_mel_bins=20),
    )  # fmt: skip
    tdnnf = Tdnnf(20, chain.states.num_columns, 16, 4, 2, 8, 8, has_auxiliary=True)
    schedule = ChainOptimization(peak_lr=5e-3, average_decay=0.5)
    return LitChainModel(tdnnf, schedule, regularization=ChainRegularization(dropout=0.3)), chain


def _language(folder: Path, kind: str) -> tuple[Any, Any]:
    from asr.lm.rnn.datamodule import TextDataModule, TextFiles
    from asr.lm.rnn.model import RNNLMConfig
    from asr.lm.rnn.training import LitRNNLM, Optimization

    text, words = [str(folder / "text.txt")], str(folder / "words.txt")
    texts = TextFiles(train_texts=text, validation_texts=text)
    data = TextDataModule(words, str(folder / "tokens"), texts, num_streams=5, num_steps=8)
    config = RNNLMConfig(
        8, 8, output=kind, maxent_order=3, maxent_size=97, num_noise_words=32, dropout=0.2, carry_state=True  # type: ignore[arg-type]
    )  # fmt: skip
    return LitRNNLM(words, config, optimization=Optimization(warmup_steps=1)), data


def _fit(folder: Path, kind: str, checkpoint: Path | None, num_processes: int) -> Any:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.strategies import DDPStrategy

    pl.seed_everything(1)
    is_acoustic = kind in ("ctc", "chain")
    model, data = (_acoustic if is_acoustic else _language)(folder, kind)
    keep = ModelCheckpoint(
        dirpath=folder / f"{kind}-{num_processes}", every_n_train_steps=5, save_top_k=-1, filename="{step}"
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=num_processes, max_epochs=2, logger=False, enable_progress_bar=False,
        strategy=DDPStrategy(process_group_backend="gloo") if num_processes > 1 else "auto", num_sanity_val_steps=0,
        enable_model_summary=False, callbacks=[] if checkpoint else [keep], enable_checkpointing=checkpoint is None,
        precision="64-true" if is_acoustic else "32-true",
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=checkpoint)
    assert trainer.global_step > 7
    return trainer


def _results(trainer: Any) -> dict[str, Tensor]:
    """Weights, and the figures of the last validation."""
    figures = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("val_")}
    assert figures
    return {**trainer.lightning_module.state_dict(), **figures}


def main(arguments: Sequence[str]) -> None:
    """Trains each kind, then resumes it from its fifth step, and writes the results."""
    folder, num_processes = Path(arguments[0]), int(os.environ["WORLD_SIZE"])
    warnings.filterwarnings("ignore")
    for kind in arguments[1:]:
        for run in ("whole", "resumed"):
            checkpoint = folder / f"{kind}-{num_processes}" / "step=5.ckpt" if run == "resumed" else None
            trainer = _fit(folder, kind, checkpoint, num_processes)
            if trainer.is_global_zero:
                torch.save(_results(trainer), folder / f"{kind}-{num_processes}-{run}.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
