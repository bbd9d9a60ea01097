"""Lightning data module for language-model text: token files read in parallel streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from asr.distributed import ResumesEpoch, current_share
from asr.errors import AsrError, require_at_least
from asr.lm.rnn.data import TokenBatch, TokenFile, TokenStreams
from asr.text.symbols import Vocabulary


@dataclass(frozen=True)
class TextFiles:
    """The texts of `TextDataModule`.

    Attributes:
        train_texts: plain texts, one sentence per line (.xz and .gz too).
        train_transcripts: Kaldi `text` files, `utt-id WORDS`.
        transcript_repeats: how often the training transcripts are read in an epoch; texts are read once.
        validation_texts: as train_texts.
        validation_transcripts: as train_transcripts.

    Raises:
        AsrError: `transcript_repeats` is below 1.
    """

    train_texts: list[str] | None = None
    train_transcripts: list[str] | None = None
    transcript_repeats: int = 1
    validation_texts: list[str] | None = None
    validation_transcripts: list[str] | None = None

    def __post_init__(self) -> None:
        require_at_least(1, transcript_repeats=self.transcript_repeats)


class TextDataModule(ResumesEpoch, pl.LightningDataModule):
    """Training and validation text in windows of `num_steps` words of `num_streams` streams.

    A run that was stopped within an epoch continues at the window it had reached; text, `num_streams` and `num_steps`
    must be the same. If several processes train, each reads its share of the streams.

    Args:
        vocabulary: word list, one word per line; text words that are not in it become `<unk>` and are counted.
        cache_dir: where the token files are kept.
        texts: texts to train on and to validate on.
        num_streams: parallel streams, of all processes together.
        num_steps: T, words of each stream in a batch; backpropagation through time is truncated to these.

    Raises:
        AsrError: a number is below 1, or the vocabulary cannot be read.
    """

    def __init__(
        self,
        vocabulary: str,
        cache_dir: str,
        texts: TextFiles = TextFiles(),
        num_streams: int = 128,
        num_steps: int = 32,
    ) -> None:
        super().__init__()
        require_at_least(1, num_streams=num_streams, num_steps=num_steps)
        self.vocabulary = Vocabulary.from_file(vocabulary)
        self.cache_dir = Path(cache_dir)
        self.train_paths = _paths(texts.train_texts), _paths(texts.train_transcripts) * texts.transcript_repeats
        self.validation_paths = _paths(texts.validation_texts), _paths(texts.validation_transcripts)
        self.num_streams, self.num_steps = num_streams, num_steps
        # The model sets this to the number of words that its n-gram features read.
        self.num_history_words = 0
        self.train_tokens: TokenFile | None = None
        self.validation_tokens: TokenFile | None = None
        self._saved_windows: dict[str, Any] = {}

    def prepare_data(self) -> None:
        """Makes the token files; called in one process per machine."""
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Opens the token files, and makes those that do not exist yet."""
        if self.train_tokens is None:
            texts, transcripts = self.train_paths
            self.train_tokens = TokenFile.build(texts, transcripts, self.vocabulary, self.cache_dir / "train.tokens")
        if self.validation_tokens is None and any(self.validation_paths):
            texts, transcripts = self.validation_paths
            path = self.cache_dir / "validation.tokens"
            self.validation_tokens = TokenFile.build(texts, transcripts, self.vocabulary, path)

    def train_dataloader(self) -> DataLoader[TokenBatch]:
        """One epoch's windows in order.

        Raises:
            AsrError: the run continues within an epoch of other windows.
        """
        assert self.train_tokens is not None
        start = self.take_start()
        windows = self._windows() if start else {}
        changed = [name for name, value in windows.items() if self._saved_windows.get(name, value) != value]
        if changed:
            raise AsrError(
                f"ckpt_path: the checkpoint was written within an epoch of other {' and '.join(changed)}; give those "
                "of its training, or a checkpoint of the end of an epoch."
            )
        streams = self._streams(self.train_tokens, self.num_streams)
        return DataLoader(streams, batch_size=None, sampler=_WindowSampler(len(streams), start))

    def state_dict(self) -> dict[str, Any]:
        position = super().state_dict()
        return {**position, **self._windows()} if position["batches_done"] else position

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next training loader start at the saved position; earlier versions saved nothing else."""
        super().load_state_dict(state_dict)
        self._saved_windows = state_dict

    def _windows(self) -> dict[str, Any]:
        """What determines the windows of an epoch."""
        assert self.train_tokens is not None
        return {
            "num_streams": self.num_streams,
            "num_steps": self.num_steps,
            "training text": self.train_tokens.checksum,
        }

    def val_dataloader(self) -> DataLoader[TokenBatch] | list[Any]:
        """The validation text in few streams, so that few sentences are split between streams."""
        if self.validation_tokens is None:
            return []
        streams = self._streams(self.validation_tokens, max(8, current_share().num))
        return DataLoader(streams, batch_size=None, sampler=_WindowSampler(len(streams)))

    def num_train_batches(self) -> int:
        """Batches of an epoch."""
        assert self.train_tokens is not None
        return len(self._streams(self.train_tokens, self.num_streams))

    def _streams(self, tokens: TokenFile, num_streams: int) -> TokenStreams:
        return TokenStreams(tokens.token_id, num_streams, self.num_steps, self.num_history_words, current_share())


class _WindowSampler(DistributedSampler[int]):
    """0 .. num_batches - 1 in order, the first time from `start` on.

    Processes divide the streams among them, not the windows. It is a `DistributedSampler` because Lightning, if several
    processes train, replaces any other sampler by one that shuffles.
    """

    def __init__(self, num_batches: int, start: int = 0) -> None:
        super().__init__(range(num_batches), num_replicas=1, rank=0, shuffle=False)  # type: ignore[arg-type]
        self.num_batches = num_batches
        self.start = start

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        return iter(range(start, self.num_batches))


def _paths(names: list[str] | None) -> list[Path]:
    return [Path(name) for name in names or []]
