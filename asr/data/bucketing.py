"""Which utterances make a batch, and of which epoch."""

from __future__ import annotations

import warnings
from typing import Any

from lhotse import CutSet
from lhotse.dataset import DynamicBucketingSampler


def bucket_sampler(
    cuts: CutSet, max_duration: float, max_cuts: int | None, num_buckets: int, shuffle: bool, seed: int
) -> DynamicBucketingSampler:
    """Batches of like duration, of at most so many seconds and cuts, from buckets that small corpora have fewer of."""
    with warnings.catch_warnings():
        # lhotse warns that cuts in memory forgo the savings of lazy ones.
        warnings.filterwarnings("ignore", message="You are using DynamicBucketingSampler with an eagerly read CutSet")
        return DynamicBucketingSampler(
            cuts,
            max_duration=max_duration,
            max_cuts=max_cuts,
            num_buckets=max(1, min(num_buckets, len(cuts) // 2)),
            shuffle=shuffle,
            seed=seed,
        )


def epoch_to_draw(trainer: Any) -> int:
    """The epoch whose batches a trainer takes next.

    Lightning tells samplers itself, but after a resume only when the first batch is drawn already, and a checkpoint behind
    an epoch's validation still counts as that epoch.
    """
    epochs = trainer.fit_loop.epoch_progress.current
    is_over = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and epochs.started > epochs.processed
    return int(epochs.processed) + int(is_over)
