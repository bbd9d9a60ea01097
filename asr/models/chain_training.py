"""Training of a network by lattice-free MMI and lattice-free sMBR with Lightning."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from asr.audio.fbank import Fbank
from asr.distributed import (
    ResumesEpoch,
    batch_rows,
    begin_epoch,
    current_share,
    draw_from,
    epoch_to_draw,
    prepare_wrapping,
    total,
    warn_of_kept_rate,
)
from asr.errors import AsrError, require_above_zero, require_at_least, require_below_one, require_between
from asr.graph.context import TIED_STATES, TiedStates
from asr.models.chain_corpus import FRAME_SECONDS, Alignment, PreparedCorpus
from asr.models.chain_preparation import load_chain, usable_utterances
from asr.models.checkpoint import FBANK, require_same_features, trained_network, warn_of_other_features
from asr.models.chunks import ChunkAugmentation, ChunkBatch, ChunkLoader, ChunkSizes
from asr.models.distillation import TeacherPosteriors
from asr.models.lfmmi import LfMmi, NumeratorPiece, numerator_piece
from asr.models.tdnnf import ChainNetwork
from asr.models.training import GradientClipper, WeightAverage, adamw, planned_steps, require_sizes, scheduled

_TEACHER = "teacher_posteriors"  # in checkpoints: `TeacherPosteriors.key`

# The parameters of `Tdnnf` and `ChainFeedForwardNetwork` whose rows are tied states.
_OUTPUTS = re.compile(r"(branch|auxiliary)\.(out\.)?(weight|bias)")


@dataclass(frozen=True)
class Selection:
    """Which utterances of a prepared corpus are trained on, and which ones validation uses.

    Attributes:
        held_out: speakers for validation.
        train_on_held_out: whether to train on them as well, for a final run after everything has been tuned.
        min_score: corpus -> lowest alignment score of an utterance to train on.
    """

    held_out: Sequence[str] = ()
    train_on_held_out: bool = False
    min_score: dict[str, float] | None = None


class ChainDataModule(ResumesEpoch, pl.LightningDataModule):
    """Batches of pieces of prepared utterances; if several processes train, each takes a share of every batch.

    A run that was stopped within an epoch continues with the batch it had reached.

    Args:
        corpus: a prepared folder.
        alignment: a file in it.
        chain: the folder with tied states and denominator graph, or a bundle whose decoding graph the network will fit.
        selection: utterances to train on and to validate on.
        batches: lengths of pieces, and the size of a batch.
        augmentation: changes of the training pieces.
        seed: of the order.
        fbank: the features that the corpus was prepared with, and that a bundle will have. None is the default.

    Raises:
        AsrError: a file is missing, the corpus was prepared with other filterbanks, or the alignment has other phones
            than the tied states.
    """

    def __init__(
        self,
        corpus: str,
        alignment: str,
        chain: str,
        selection: Selection = Selection(),
        batches: ChunkSizes = ChunkSizes(),
        augmentation: ChunkAugmentation = ChunkAugmentation(),
        seed: int = 1,
        fbank: Fbank | None = None,
    ) -> None:
        super().__init__()
        self.corpus = PreparedCorpus(corpus)
        if (fbank or Fbank()).arguments != self.corpus.fbank_arguments:
            defaults = Fbank().arguments
            own = {name: value for name, value in self.corpus.fbank_arguments.items() if value != defaults[name]}
            raise AsrError(
                f"{corpus}: it was prepared with other filterbanks; give fbank the init_args {own} or prepare it again."
            )
        self.alignment_path = Path(corpus) / alignment
        self.alignment = Alignment.load(self.alignment_path)
        self.states, self.graph = load_chain(Path(chain))
        phones = itertools.zip_longest(self.alignment.phones, self.states.phones, fillvalue="none")
        for number, (aligned, tied) in enumerate(phones):
            if aligned != tied:
                raise AsrError(
                    f"{self.alignment_path}: phone {number} is {aligned}, but {tied} in the tied states of {chain}; "
                    "give the alignment and the chain of one run of `asr chain`, or a bundle with the same phones."
                )
        self.seed = seed
        self._train, self._valid = usable_utterances(
            self.corpus, self.alignment, selection.min_score or {}, selection.held_out
        )
        if selection.train_on_held_out:
            self._train = sorted(self._train + self._valid)
        self._batches, self._augmentation = batches, augmentation
        self.train_chunks: ChunkLoader | None = None
        self.valid_chunks: ChunkLoader | None = None
        self._num_train_batches = 0

    def open(self, network: ChainNetwork) -> None:
        """Makes the loaders for a network's context and frame rate.

        Raises:
            AsrError: the training speakers, or those held out, fill no batch.
        """
        context = network.left_context, network.right_context, network.subsampling_factor
        conditions = range(len(self.corpus.conditions))
        self.train_chunks = ChunkLoader(
            self.corpus, self._train, conditions, self._batches, *context, self._augmentation
        )
        self.valid_chunks = ChunkLoader(self.corpus, self._valid, (0,), self._batches, *context)
        self._num_train_batches = self._num_batches(self.train_chunks, "training")
        if self.valid_chunks.utterances:
            self._num_batches(self.valid_chunks, "held-out")

    def _num_batches(self, chunks: ChunkLoader, what: str) -> int:
        num = len(chunks.plan(self.seed))
        if not num:
            raise AsrError(
                f"{self.corpus.folder}: {len(chunks.utterances)} {what} utterances fill no batch of "
                f"{self._batches.frames_per_batch} frames; reduce frames_per_batch, or give shorter lengths."
            )
        return num

    def num_train_batches(self) -> int:
        """Batches of the first epoch; other epochs differ a little."""
        return self._num_train_batches

    def context_counts(self) -> npt.NDArray[np.float64]:
        """How often one phone follows another in training, (P, P) [phone before, phone]; the first follows silence."""
        count = np.zeros((len(self.alignment.phones),) * 2)
        for utterance in self._train:
            phone, _ = self.alignment.of(utterance)
            np.add.at(count, (np.concatenate(([0], phone[:-1])), phone), 1.0)
        return count

    def train_dataloader(self) -> Any:
        """Batches of the current epoch; each epoch has other pieces."""
        return DataLoader(_Epochs(self.train_chunks, self.seed, self.trainer, self.take_start()), batch_size=None)

    def val_dataloader(self) -> Any:
        """Batches of the held-out speakers, the same each time."""
        return DataLoader(_Epochs(self.valid_chunks, 0, None), batch_size=None)

    def pieces(self, batch: ChunkBatch, factor: int, tolerance: float) -> list[NumeratorPiece]:
        """The numerators of a batch, of which an output frame has `factor` frames of features."""
        factor_seconds = factor * FRAME_SECONDS
        found = []
        for chunk in batch.chunks:
            phone, start = self.alignment.of(chunk.utterance)
            speed = self.corpus.conditions[chunk.condition].speed
            begin = start / (factor_seconds * speed) - chunk.first_output
            found.append(numerator_piece(*self.states.columns_of(phone), begin, batch.num_outputs, tolerance))
        return found


class _Epochs(IterableDataset):  # type: ignore[type-arg]
    """The batches of the trainer's current epoch, the first time from `start` on; or always those of one seed."""

    def __init__(self, chunks: ChunkLoader | None, seed: int, trainer: Any, start: int = 0) -> None:
        if chunks is None:
            raise AsrError("The data module has no loaders yet; it is for `LitChainModel`.")
        self._chunks, self._seed, self._trainer, self._start = chunks, seed, trainer, start

    def __iter__(self) -> Iterator[ChunkBatch]:
        epoch = 0 if self._trainer is None else epoch_to_draw(self._trainer)
        start, self._start = self._start, 0
        return self._chunks.epoch(self._seed + epoch, current_share(), start)


@dataclass(frozen=True)
class ChainOptimization:
    """Learning rates, gradients and averaged weights of `LitChainModel`.

    Attributes:
        peak_lr: learning rate after the warm-up.
        final_lr: learning rate at the end; the decay in between is exponential.
        warmup_fraction: fraction of all steps in which the learning rate rises.
        total_steps: number of steps of the schedule; None for the number that the trainer will make.
        max_gradient_norm: larger gradients are clipped to this norm.
        average_decay: decay of the moving average of weights, which validation uses.

    Raises:
        AsrError: a number is outside its range, such as a learning rate that is not above 0.
    """

    peak_lr: float = 1.5e-3
    final_lr: float = 1e-4
    warmup_fraction: float = 0.04
    total_steps: int | None = None
    max_gradient_norm: float = 5.0
    average_decay: float = 0.998

    def __post_init__(self) -> None:
        # An exponential decay never reaches a learning rate of 0.
        require_above_zero(peak_lr=self.peak_lr, final_lr=self.final_lr, max_gradient_norm=self.max_gradient_norm)
        require_between(0, 1, warmup_fraction=self.warmup_fraction)
        require_below_one(average_decay=self.average_decay)
        if self.total_steps is not None:
            require_at_least(1, total_steps=self.total_steps)


@dataclass(frozen=True)
class ChainObjective:
    """Lattice-free MMI, and lattice-free sMBR (Kanda et al. 2018) as a part of it.

    sMBR is meant for a network that MMI has trained: start from that one with `initial_checkpoint` and a low learning
    rate.

    Attributes:
        leak: see `LfMmi`.
        tolerance: output frames by which a phone may begin earlier or end later than aligned.
        smbr_weight: weight of lattice-free sMBR, between 0 and 1; MMI has the rest. The cross-entropy and the squared
            scores keep their weights.
        silence_accuracy: what a correct frame of silence counts in sMBR, between 0 and 1; that of another phone is 1.

    Raises:
        AsrError: a number is outside its range.
    """

    leak: float = 0.1
    tolerance: float = 2.5
    smbr_weight: float = 0.0
    silence_accuracy: float = 1.0

    def __post_init__(self) -> None:
        require_at_least(0, leak=self.leak, tolerance=self.tolerance)
        require_between(0, 1, smbr_weight=self.smbr_weight, silence_accuracy=self.silence_accuracy)


@dataclass(frozen=True)
class ChainRegularization:
    """Regularization of `LitChainModel` (Povey et al. 2016, 2018).

    Attributes:
        weight_decay: for matrices.
        dropout: the highest dropout probability; dropout begins after a fifth of the training, is highest in the
            middle and falls to 0 at the end.
        xent_weight: weight of the cross-entropy of the auxiliary branch with the numerator's posteriors.
        score_l2: weight of the squared scores.

    Raises:
        AsrError: a number is outside its range.
    """

    weight_decay: float = 0.02
    dropout: float = 0.2
    xent_weight: float = 0.1
    score_l2: float = 5e-5

    def __post_init__(self) -> None:
        require_at_least(0, weight_decay=self.weight_decay, xent_weight=self.xent_weight, score_l2=self.score_l2)
        require_below_one(dropout=self.dropout)


class LitChainModel(pl.LightningModule):
    """Trains a network by lattice-free MMI with cross-entropy regularization (Povey et al. 2016, 2018).

    Args:
        network: such as `Tdnnf`, with an auxiliary branch; `num_tokens` must be the number of tied states.
        optimization: learning rates, gradients and averaged weights.
        objective: lattice-free MMI, and sMBR.
        regularization: weight decay, dropout, and terms beside the objective.
        initial_checkpoint: start from the averaged weights of this checkpoint, or from the network of this bundle (the
            first one of an ensemble). If its states are tied in another way, each output begins as the mean of the
            outputs that it is made of (`TiedStates.tied_from`).
        teacher: a bundle with the data's tied states, from whose acoustic model the network also learns
            (`TeacherPosteriors`); None for no teacher.
        teacher_weight: share of the teacher's posteriors in the numerator, between 0 and 1.

    Raises:
        AsrError: the teacher's weight is outside its range, or the network lacks the auxiliary branch.
    """

    def __init__(
        self,
        network: ChainNetwork,
        optimization: ChainOptimization = ChainOptimization(),
        objective: ChainObjective = ChainObjective(),
        regularization: ChainRegularization = ChainRegularization(),
        initial_checkpoint: str | None = None,
        teacher: str | None = None,
        teacher_weight: float = 0.5,
    ) -> None:
        super().__init__()
        require_between(0, 1, teacher_weight=teacher_weight)
        if network.auxiliary is None:
            raise AsrError("LitChainModel: the network needs has_auxiliary: true.")
        self.network = network
        self.average = WeightAverage(network, optimization.average_decay, averages_statistics=True)
        self.optimization, self.objective, self.regularization = optimization, objective, regularization
        self._clipper = GradientClipper(optimization.max_gradient_norm)
        self.initial_checkpoint = initial_checkpoint
        self.teacher, self.teacher_weight = teacher, teacher_weight
        self._lfmmi: LfMmi | None = None
        self._teacher: TeacherPosteriors | None = None
        self._is_resumed = False
        self._kept: dict[str, Any] | None = None  # what the checkpoint says of the teacher's posteriors
        # Sums of the current validation: MMI, cross-entropy, accuracy and frames.
        self._validation_sums = torch.zeros(4, dtype=torch.float64)

    def setup(self, stage: str) -> None:
        """Checks that the network fits the data, and opens the loaders."""
        prepare_wrapping(self, self.trainer, may_drop=False)
        data = self._data()
        require_sizes(self.network, data.corpus.num_features, data.states.num_columns)
        data.open(self.network)
        column_accuracy = np.ones(data.states.num_columns, dtype=np.float32)
        column_accuracy[data.states.phone_of_column == 0] = self.objective.silence_accuracy
        self._lfmmi = LfMmi(
            data.graph, self.objective.leak, self.objective.smbr_weight, column_accuracy, self.teacher_weight
        )

    def on_fit_start(self) -> None:
        """Takes the initial weights, unless a checkpoint has been loaded, and the teacher's posteriors."""
        if self.initial_checkpoint is not None and not self._is_resumed:
            weights = self._initial_weights(self.initial_checkpoint)
            try:
                self.network.load_state_dict(weights)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[-1].strip()
                raise AsrError(
                    f"{self.initial_checkpoint}: initial_checkpoint: the weights do not fit the network ({reason})."
                ) from error
            self.average.network.load_state_dict(weights)
        if self.teacher is not None:
            data = self._data()
            assert self._lfmmi is not None
            factor = self.network.subsampling_factor
            self._teacher = TeacherPosteriors(data.corpus, self.teacher, data.states, self._lfmmi, factor, self._kept)

    def on_train_batch_start(self, batch: ChunkBatch, batch_idx: int) -> None:
        """Counts the batches of each epoch from its first one."""
        if batch.number[1] == 0:
            begin_epoch(self.trainer)

    def training_step(self, batch: ChunkBatch, batch_idx: int) -> Tensor:
        """The objective per frame, ().

        If several processes train, each divides the objective of its pieces by the frames of all, and multiplies it by
        the number of processes, because gradients will be averaged.
        """
        self.network.set_dropout(self._dropout_now())
        assert self.network.auxiliary is not None
        draw_from(*batch.number)
        with batch_rows(batch.rows, batch.num_all):
            hidden = self.network.encode(batch.features)
            score = self.network.branch(hidden).float()
            auxiliary = self.network.auxiliary(hidden).float()
        num_frames = batch.num_all * batch.num_outputs
        objective, xent, shown = self._sums(score, auxiliary, batch, self._teacher)
        self.log_dict(self._named(total(shown) / num_frames), prog_bar=True, on_step=True, on_epoch=False, batch_size=1)
        weights = self.regularization
        loss = objective + weights.xent_weight * xent + 0.5 * weights.score_l2 * score.square().sum()
        return loss * (current_share().num / num_frames)

    def _sums(
        self, score: Tensor, auxiliary: Tensor, batch: ChunkBatch, teacher: TeacherPosteriors | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over the frames of this process: objective, cross-entropy, and what to log (see `_named`)."""
        assert self._lfmmi is not None
        if not batch.chunks:
            return score.sum(), auxiliary.sum(), score.new_zeros(3)
        pieces = self._data().pieces(batch, self.network.subsampling_factor, self.objective.tolerance)
        taught = None if teacher is None else teacher.of(batch.chunks, batch.num_outputs)
        loss, mmi, accuracy, posterior = self._lfmmi(score, pieces, taught)
        xent = -(posterior * F.log_softmax(auxiliary, dim=2)).sum()
        return loss.sum(), xent, torch.stack([mmi.sum(), xent.detach(), accuracy.sum()])

    def _named(self, means: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """What to log of the means per frame of MMI, cross-entropy and accuracy, (3,)."""
        names = ("mmi", "xent", "accuracy") if self.objective.smbr_weight else ("mmi", "xent")
        return {prefix + name: mean for name, mean in zip(names, means.float(), strict=False)}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clips gradients; a step whose gradient is not finite is skipped."""
        self.log("gradient_norm", self._clipper.clip(self.network))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Also applies the semi-orthogonal constraint, every fourth step, and updates the moving average.

        A hook after the step would be too late, since checkpoints are written before the module's hooks are called.
        """
        super().optimizer_step(*args, **kwargs)
        if (int(self.average.num_updates) + 1) % 4 == 0:
            self.network.semi_orthogonal_step()
        self.average.update(self.network)

    def validation_step(self, batch: ChunkBatch, batch_idx: int) -> None:
        """Adds up the objective with averaged weights."""
        network: Any = self.average.network
        hidden = network.encode(batch.features)
        *_, shown = self._sums(network.branch(hidden).float(), network.auxiliary(hidden).float(), batch)
        num_frames = torch.tensor([len(batch.chunks) * batch.num_outputs])
        self._validation_sums += torch.cat([shown.double().cpu(), num_frames])

    def on_validation_epoch_start(self) -> None:
        """Resets the sums."""
        self._validation_sums.zero_()

    def on_validation_epoch_end(self) -> None:
        """Logs the parts of the objective per frame, over all processes' batches."""
        sums = total(self._validation_sums)
        if sums[3]:
            self.log_dict(self._named(sums[:3] / sums[3], "val_"), prog_bar=True)

    def configure_optimizers(self) -> Any:
        """AdamW with a short warm-up and an exponential decay."""
        optimization, num_steps = self.optimization, self._num_steps()
        optimizer = adamw(self.network, optimization.peak_lr, self.regularization.weight_decay)
        warmup = max(1, round(optimization.warmup_fraction * num_steps))

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
            return float((optimization.final_lr / optimization.peak_lr) ** progress)

        return scheduled(optimizer, factor)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the columns' names, the tied states, the features, and which posteriors are the teacher's."""
        states = self._data().states
        checkpoint[FBANK] = self._data().corpus.fbank_arguments
        checkpoint["tokens"] = states.column_names()
        checkpoint[TIED_STATES] = states.to_json()
        if self._teacher is not None:
            checkpoint[_TEACHER] = self._teacher.key

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A resumed run needs neither the initial checkpoint nor, if all posteriors are kept, the teacher.

        Raises:
            AsrError: the checkpoint is of other tied states or features.
        """
        states = self._data().states.to_json()
        if checkpoint.get(TIED_STATES, states) != states:
            raise AsrError(
                "ckpt_path: the checkpoint has other tied states than data.chain; give those of its training."
            )
        require_same_features(checkpoint.get(FBANK, {}), self._data().corpus.fbank_arguments, "ckpt_path", "the corpus")
        warn_of_kept_rate(self, checkpoint, "peak_lr", self.optimization.peak_lr)
        self._is_resumed = True
        self._kept = checkpoint.get(_TEACHER)

    def transfer_batch_to_device(self, batch: ChunkBatch, device: torch.device, dataloader_idx: int) -> ChunkBatch:
        """Moves only the features."""
        return batch._replace(features=batch.features.to(device))

    def _initial_weights(self, path: str) -> dict[str, Tensor]:
        weights, _, saved, fbank = trained_network(path)
        data = self._data()
        warn_of_other_features(fbank, data.corpus.fbank_arguments, path)
        if saved is not None and saved != data.states.to_json():
            before = TiedStates.from_json(saved)
            if before.phones != data.states.phones:
                raise AsrError(f"{path}: initial_checkpoint: its phones are not those of {data.alignment_path}.")
            share = torch.from_numpy(data.states.tied_from(before, data.context_counts())).float()
            for name, value in self.network.state_dict().items():
                has_columns = weights.get(name, value).shape[:1] == (before.num_columns,)
                # Where the shapes are equal, only the name tells columns from as many hidden units.
                if name in weights and has_columns and (weights[name].shape != value.shape or _OUTPUTS.fullmatch(name)):
                    weights[name] = share @ weights[name].float()
        if Path(path).is_dir():  # a bundle lacks the branch that only training needs, which keeps its random weights
            weights = {**self.network.state_dict(), **weights}
        return weights

    def _data(self) -> ChainDataModule:
        data: ChainDataModule = self.trainer.datamodule  # type: ignore[attr-defined]
        return data

    def _num_steps(self) -> int:
        if self.optimization.total_steps is not None:
            return self.optimization.total_steps
        return planned_steps(self.trainer, self._data().num_train_batches())

    def _dropout_now(self) -> float:
        done = self.global_step / max(1, self._num_steps())
        if done < 0.2:
            return 0.0
        return self.regularization.dropout * ((done - 0.2) / 0.3 if done < 0.5 else max(0.0, (1.0 - done) / 0.5))
