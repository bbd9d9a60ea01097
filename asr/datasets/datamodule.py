"""The Lightning data module for acoustic models: manifests in, bucketed and augmented batches out."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from lhotse import CutSet
from lhotse.dataset.sampling.base import CutSampler
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from asr.audio.fbank import Fbank
from asr.datasets.cuts import FilterReport, bucket_sampler, hold_out_speakers, read_cuts, select_usable
from asr.datasets.dataset import (
    AcousticBatch,
    AcousticDataset,
    Augmentation,
    FeatureFolder,
    FeatureMemory,
    PlannedBatch,
    WaveformCache,
)
from asr.distributed import ResumesEpoch, current_share, epoch_to_draw
from asr.errors import AsrError, require_above_zero, require_at_least, require_below_one
from asr.text.lexicon import Tokenizer
from asr.text.symbols import TokenTable

Split = Literal["train", "valid", "test"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CutSelection:
    """Manifests of lhotse cuts, as `asr prepare` writes them, and which of their utterances are used.

    Attributes:
        train_cuts: manifests to train on; all of them are used together.
        valid_cuts: manifests to validate on.
        test_cuts: manifests for `test`.
        valid_fraction: fraction of `train_cuts` that is held out for validation, in whole speakers, if `valid_cuts` is
            empty.
        min_duration: shorter utterances are left out of training, in seconds.
        max_duration: longer utterances are left out of training, in seconds.

    Raises:
        AsrError: the fraction is outside its range.
    """

    train_cuts: Sequence[str] = ()
    valid_cuts: Sequence[str] = ()
    test_cuts: Sequence[str] = ()
    valid_fraction: float = 0.0
    min_duration: float = 0.1
    max_duration: float = 40.0

    def __post_init__(self) -> None:
        require_below_one(valid_fraction=self.valid_fraction)


@dataclass(frozen=True)
class TokenizerFiles:
    """What `Tokenizer.from_files` reads.

    Attributes:
        lexicon: files in the format of CMUdict or Kaldi; the first one that has a word is used. The case of words does
            not matter. Without a lexicon, tokens are characters.
        tokens: the token table; by default the phones of the lexicon, sorted. Characters need one.
        keep_stress: whether to keep the stress marks of vowels.
    """

    lexicon: Sequence[str] = ()
    tokens: str | None = None
    keep_stress: bool = False


@dataclass(frozen=True)
class BatchSize:
    """The size of batches.

    Attributes:
        max_batch_duration: maximum seconds of audio in a batch, of all processes together, before the speed is changed.
        max_batch_cuts: maximum number of utterances in a batch; None for no limit.
        num_buckets: number of groups of similar duration that batches are drawn from.

    Raises:
        AsrError: a number is outside its range.
    """

    max_batch_duration: float = 200.0
    max_batch_cuts: int | None = None
    num_buckets: int = 10

    def __post_init__(self) -> None:
        require_above_zero(max_batch_duration=self.max_batch_duration)
        require_at_least(1, num_buckets=self.num_buckets)
        if self.max_batch_cuts is not None:
            require_at_least(1, max_batch_cuts=self.max_batch_cuts)


@dataclass(frozen=True)
class Loading:
    """Where data are kept, and who prepares them; the results do not depend on it.

    Attributes:
        memory_gb: maximum memory for decoded audio and, as far as it suffices, features; 0 to keep none.
        feature_dir: folder where features are stored when first computed, for later epochs and runs. Those of an audio
            file that has changed since are computed again, and those for which there is no room, each time.
        num_workers: number of processes that prepare batches; 0 prepares them in the trainer's process.

    Raises:
        AsrError: a number is outside its range.
    """

    memory_gb: float = 4.0
    feature_dir: str | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        require_at_least(0, num_workers=self.num_workers)


class AcousticDataModule(ResumesEpoch, pl.LightningDataModule):
    """Batches of features and tokens from the cuts of any prepared corpora, bucketed by duration.

    Batches are those of all processes: if several train, each takes its share of every batch, and the result is that of
    one process. A run that was stopped within an epoch continues with the batch it had reached.

    Args:
        selection: manifests, and which of their utterances are used.
        tokenizer: lexicon and tokens.
        fbank: computes the features; by default Kaldi's with 80 filters.
        batches: size of the batches.
        augmentation: changes of the training utterances.
        loading: where data are kept, and who prepares them.
        seed: of the batches' order and of augmentation.

    Raises:
        AsrError: the noise has another sampling rate than the features; also as `Tokenizer.from_files`.
    """

    def __init__(
        self,
        selection: CutSelection = CutSelection(),
        tokenizer: TokenizerFiles = TokenizerFiles(),
        fbank: Fbank | None = None,
        batches: BatchSize = BatchSize(),
        augmentation: Augmentation = Augmentation(),
        loading: Loading = Loading(),
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.cut_paths: dict[Split, list[str]] = {
            "train": list(selection.train_cuts),
            "valid": list(selection.valid_cuts),
            "test": list(selection.test_cuts),
        }
        self.selection = selection
        self.batches = batches
        self.loading = loading
        self.seed = seed
        self.tokenizer = Tokenizer.from_files(tokenizer.lexicon, tokenizer.tokens, tokenizer.keep_stress)
        self.fbank = Fbank() if fbank is None else fbank
        noise = augmentation.noise
        if noise is not None and noise.sampling_rate != self.fbank.sampling_rate:
            raise AsrError(
                f"noise: sampling_rate is {noise.sampling_rate}, but {self.fbank.sampling_rate} in fbank; give both "
                "the same."
            )
        self.waveforms = WaveformCache(self.fbank.sampling_rate)
        self.features: FeatureFolder | FeatureMemory | None = None
        if loading.feature_dir is not None:
            self.features = FeatureFolder(loading.feature_dir, self.fbank.arguments)
        elif loading.num_workers == 0:  # each worker process would fill memory of its own
            self.features = FeatureMemory(loading.memory_gb)
        self.train_dataset = AcousticDataset(self.fbank, self.tokenizer, self.waveforms, self.features, augmentation)
        self.plain_dataset = AcousticDataset(self.fbank, self.tokenizer, self.waveforms, self.features)
        self.cuts: dict[Split, CutSet] = {}
        self.left_out: dict[Split, FilterReport] = {}

    @property
    def token_table(self) -> TokenTable:
        """The output symbols of the acoustic model."""
        return self.tokenizer.tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens, blank included."""
        return len(self.tokenizer.tokens)

    @property
    def feature_dim(self) -> int:
        """Number of features in a frame."""
        return self.fbank.feature_dim

    def setup(self, stage: str | None = None) -> None:
        """Reads the manifests, reports unknown words, and loads small corpora into memory."""
        wanted: dict[str | None, tuple[Split, ...]]
        wanted = {"fit": ("train", "valid"), "validate": ("valid",), "test": ("test",)}
        for split in wanted.get(stage, ("train", "valid", "test")):
            self._split(split)

    def train_dataloader(self) -> DataLoader[AcousticBatch]:
        """Shuffled and augmented batches."""
        loader = self._loader("train", self.train_dataset, shuffle=True)
        sampler: Any = loader.sampler
        sampler.start = self.take_start()
        if self.trainer is not None:
            sampler.set_epoch(epoch_to_draw(self.trainer))
        return loader

    def val_dataloader(self) -> DataLoader[AcousticBatch] | list[Any]:
        """Batches in a fixed order; an empty list if there is nothing to validate on."""
        return self._loader("valid", self.plain_dataset, shuffle=False) if len(self._split("valid")) else []

    def test_dataloader(self) -> DataLoader[AcousticBatch]:
        """Batches in a fixed order, with all utterances."""
        return self._loader("test", self.plain_dataset, shuffle=False)

    def num_train_batches(self) -> int:
        """Number of batches in the first epoch; later epochs may differ by a few, since buckets fill differently."""
        return sum(1 for _ in self._sampler("train", shuffle=True))

    def _split(self, split: Split) -> CutSet:
        """The cuts of a split, which are read on first use."""
        if split not in self.cuts:
            self._read_split(split)
        return self.cuts[split]

    def _read_split(self, split: Split) -> None:
        holds_out = not self.cut_paths["valid"] and self.selection.valid_fraction > 0.0
        source: Split = "train" if split == "valid" and holds_out else split
        if split != "valid" and not self.cut_paths[split]:
            raise AsrError(f"{split}_cuts: there is no manifest; give at least one that `asr prepare` wrote.")
        cuts = read_cuts(self.cut_paths[source])
        if self.cut_paths[source] and not cuts:
            raise AsrError(
                f"{', '.join(self.cut_paths[source])}: {source}_cuts has no utterances; give a manifest that has some."
            )
        if source == "train" and holds_out:
            rest, held_out = hold_out_speakers(cuts, self.selection.valid_fraction, self.seed)
            cuts = held_out if split == "valid" else rest
            share = sum(cut.duration for cut in held_out) / sum(cut.duration for cut in (*rest, *held_out))
            if split == "valid" and share > self.selection.valid_fraction + 0.1:
                _log.warning(
                    "valid_fraction: %.0f %% of the speech is held out, because speakers are held out as a whole; give "
                    "valid_cuts if that is too much.",
                    100 * share,
                )
        # Test utterances with unknown words are kept, since they count in the word error rate.
        usable, left_out = select_usable(cuts, self.tokenizer, self.selection.min_duration, self.selection.max_duration)
        left_out.log(split, len(cuts), are_kept=split == "test")
        if split == "test":
            usable = cuts
        if cuts and not usable:
            raise AsrError(
                f"{', '.join(self.cut_paths[source])}: no utterance can be used; does the lexicon fit the corpus?"
            )
        self.left_out[split] = left_out
        self.cuts[split] = CutSet.from_cuts(usable)
        self.waveforms.fill(self.cuts[split], self.loading.memory_gb)
        if isinstance(self.features, FeatureMemory):
            self.features.limit_gigabytes(self.loading.memory_gb - self.waveforms.gigabytes)

    def _sampler(self, split: Split, shuffle: bool) -> CutSampler:
        size = self.batches
        return bucket_sampler(
            self._split(split), size.max_batch_duration, size.max_batch_cuts, size.num_buckets, shuffle, self.seed
        )

    def _loader(self, split: Split, dataset: AcousticDataset, shuffle: bool) -> DataLoader[AcousticBatch]:
        dataset.share = current_share()
        return DataLoader(
            dataset,
            sampler=_BatchSampler(self._sampler(split, shuffle), self.seed),
            batch_size=None,
            num_workers=self.loading.num_workers,
            persistent_workers=self.loading.num_workers > 0,
            worker_init_fn=_ignore_termination,
            # A generator of its own, so that a loader draws nothing from that of the network.
            generator=torch.Generator(),
        )


def _ignore_termination(_: int) -> None:
    """Schedulers send SIGTERM to all processes, and terminals Ctrl-C; the trainer ends those that prepare batches when
    it has finished."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """Python would ask those that are left by SIGTERM and wait for ever."""
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise an error
    for worker in workers:
        worker.kill()


class _BatchSampler(DistributedSampler[PlannedBatch]):
    """A sampler's batches with epoch and number, in the first epoch from the batch `start` on.

    All processes get the same batches; the dataset takes a share of each. It is a `DistributedSampler` because
    Lightning, if several processes train, replaces any other sampler by one of its own.
    """

    def __init__(self, batches: CutSampler, seed: int) -> None:
        super().__init__(range(0), num_replicas=1, rank=0, shuffle=False)  # type: ignore[arg-type]
        self.batches, self.batch_seed = batches, seed
        self.start = 0

    def __len__(self) -> int:
        raise TypeError("the number of batches of an epoch is known at its end")

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[PlannedBatch]:
        # Not before the first batch is needed: loaders with persistent workers create an iterator and drop it.
        start, self.start = self.start, 0
        epoch = self.epoch
        for number, cuts in enumerate(self.batches):
            if number >= start:
                yield PlannedBatch(cuts, epoch, number, self.batch_seed)
