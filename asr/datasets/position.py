"""The position of a training run: the epoch whose batches come next, and how many of them are done."""

from __future__ import annotations

from typing import Any


def epoch_to_draw(trainer: Any) -> int:
    """The epoch whose batches a trainer takes next.

    Lightning sets the epoch of samplers itself, but after a resume only when the first batch has already been drawn;
    and a checkpoint written after an epoch's validation still counts as that epoch.
    """
    epochs = trainer.fit_loop.epoch_progress.current
    is_over = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and epochs.started > epochs.processed
    return int(epochs.processed) + int(is_over)


def batches_done(trainer: Any) -> int:
    """Training batches of the current epoch that are done; 0 if all are, since those of the next epoch follow."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    # Not `completed`: checkpoints are written by a hook that runs before a batch counts as completed.
    return 0 if progress.is_last_batch else int(progress.current.processed)
