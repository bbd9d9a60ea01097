"""Training of acoustic models with Lightning: optimizer, schedule, averaged weights, transfer, token error rate.

Shapes: N utterances, T frames of features, F features, T' output frames, C tokens.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.datasets.cuts import cut_text
from asr.datasets.datamodule import AcousticDataModule
from asr.distributed import (
    batch_rows,
    begin_epoch,
    current_share,
    draw_from,
    largest,
    prepare_wrapping,
    require_end,
    total,
    warn_of_kept_rate,
)
from asr.errors import AsrError, require_above_zero, require_at_least, require_below_one, require_between
from asr.metrics import NO_ERRORS, ErrorCounts, count_errors
from asr.models.alignment import IGNORED, TeacherAlignment, summed_cross_entropy, uniform_alignment
from asr.models.checkpoint import FBANK, require_same_features, trained_network, warn_of_other_features
from asr.models.interface import AcousticNetwork, Objective
from asr.text.ctc_tokens import PIECE_PREFIX

_LOGGER = logging.getLogger(__name__)


def warmup_cosine(step: int, warmup_steps: int, total_steps: int, floor: float) -> float:
    """Factor of the peak learning rate: a linear warm-up, then half a cosine down to `floor`, where it stays."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def planned_steps(trainer: pl.Trainer, num_batches: int) -> int:
    """The optimizer steps of a training, after which its schedules end.

    Args:
        trainer: it may limit epochs, steps and batches, and take several batches for a step. A limit of more batches
            than an epoch has is removed.
        num_batches: batches of an epoch.

    Raises:
        AsrError: it limits neither epochs nor steps, or would repeat the same batches in each epoch.
    """
    require_end(trainer)
    if getattr(trainer, "overfit_batches", 0):  # which the class does not declare
        raise AsrError(
            "trainer.overfit_batches: each epoch has other batches here; give a manifest of a few utterances instead, "
            "or trainer.limit_train_batches."
        )
    if isinstance(trainer.limit_train_batches, int):
        if trainer.limit_train_batches > num_batches:
            # Lightning takes it for the number of batches, which loaders do not tell, and never comes to validate.
            trainer.limit_train_batches = 1.0
        else:
            num_batches = trainer.limit_train_batches
    num_epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
    steps = -(-num_batches // trainer.accumulate_grad_batches) * max(1, num_epochs)
    if trainer.max_steps > 0:  # it is -1 without a limit, and so is max_epochs
        return int(trainer.max_steps if num_epochs < 0 else min(steps, trainer.max_steps))
    return int(steps)


def adamw(network: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only; fused where this torch has a fused kernel for the device."""
    matrices = [parameter for parameter in network.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in network.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    on_cpu = all(parameter.device.type == "cpu" for parameter in network.parameters())
    fused = version >= (2, 4) or (version >= (2, 0) and not on_cpu)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), **({"fused": True} if fused else {}))


def scheduled(optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> Any:
    """What Lightning takes: an optimizer whose learning rates are multiplied by `factor` of the step's number."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


_MOST_DROPPED = 30  # the loss scale of 16-mixed needs about ten such steps to settle


class GradientClipper:
    """Scales gradients down to `max_norm`; drops all of them if one is not finite, so that the step changes nothing.

    Args:
        max_norm: the largest norm.
    """

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm
        self._num_dropped = 0

    def clip(self, module: nn.Module) -> Tensor:
        """Clips the gradients of a module. Returns the norm before, ().

        Raises:
            AsrError: those of the last steps, many in a row, were not finite.
        """
        parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
        if torch.isfinite(norm):
            self._num_dropped = 0
            return norm
        for parameter in parameters:
            parameter.grad = None
        self._num_dropped += 1
        if self._num_dropped == _MOST_DROPPED:
            raise AsrError(
                f"the training has diverged: the gradients of {_MOST_DROPPED} steps in a row were not finite. Start "
                "again, perhaps with an earlier checkpoint as initial_checkpoint, with a lower optimization.peak_lr."
            )
        return norm


class WeightAverage(nn.Module):
    """An exponential moving average of a network's weights, which validation and export use.

    Early in training the decay is smaller, so that the average soon forgets the random initialization.

    Args:
        network: the network to average.
        decay: weight of the old average in each step, such as 0.999.
        averages_statistics: whether floating-point buffers, such as the statistics of norms, are averaged, too; all
            others are copied.
    """

    num_updates: Tensor

    def __init__(self, network: nn.Module, decay: float, averages_statistics: bool = False) -> None:
        super().__init__()
        self.decay = decay
        self.averages_statistics = averages_statistics
        self.network = copy.deepcopy(network).eval().requires_grad_(False)
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Moves the average towards the network's weights; call it after each optimizer step."""
        self.num_updates += 1
        num_updates = int(self.num_updates)
        decay = min(self.decay, (1 + num_updates) / (10 + num_updates))
        for mean, value in zip(self.network.parameters(), network.parameters(), strict=True):
            mean.lerp_(value, 1.0 - decay)
        for own, buffer in zip(self.network.buffers(), network.buffers(), strict=True):
            if self.averages_statistics and buffer.is_floating_point():
                own.lerp_(buffer, 1.0 - decay)
            else:
                own.copy_(buffer)

    def train(self, mode: bool = True) -> WeightAverage:
        """Stays in evaluation mode."""
        return super().train(False)


def greedy_tokens(log_prob: Tensor, num_frames: Tensor) -> list[list[int]]:
    """The best token of each frame, with repeats merged and blanks removed.

    Args:
        log_prob: (N, T', C).
        num_frames: (N,).

    Returns:
        the token ids of each utterance.
    """
    best = log_prob.argmax(dim=-1)
    sequences: list[list[int]] = []
    for frames, count in zip(best, num_frames.tolist(), strict=True):
        merged = torch.unique_consecutive(frames[:count])
        sequences.append(merged[merged != 0].tolist())
    return sequences


def require_sizes(network: AcousticNetwork, num_features: int, num_tokens: int) -> None:
    """Checks that a network fits the data.

    Raises:
        AsrError: it has another number of features or tokens.
    """
    if (network.num_features, network.num_tokens) != (num_features, num_tokens):
        raise AsrError(
            f"the network has num_features {network.num_features} and num_tokens {network.num_tokens}, but the data "
            f"have {num_features} and {num_tokens}; set them in model.init_args.network.init_args."
        )


def num_needed_frames(tokens: Sequence[int]) -> int:
    """The output frames that CTC needs for a transcript: one for each token, and a blank between two equal ones."""
    return len(tokens) + sum(first == second for first, second in itertools.pairwise(tokens))


# The networks' parameters that have a dimension of tokens, and which dimension that is.
_TOKEN_DIMENSION = {
    "out.weight": 0,
    "out.bias": 0,
    "feedback.weight": 1,
    "branch.out.weight": 0,
    "branch.out.bias": 0,
}


@torch.no_grad()
def transfer_weights(
    network: nn.Module, tokens: Sequence[str], weights: Mapping[str, Tensor], weight_tokens: Sequence[str]
) -> None:
    """Initializes a network with the weights of another one that may have other tokens; they are matched by name.

    A token that the other network does not have begins as the mean of its letters, if that network has these: word
    pieces can follow a network of letters. All other tokens keep their random initialization, with the lowest bias.

    Args:
        network: modified in place.
        tokens: its tokens, blank first.
        weights: state dict of the other network.
        weight_tokens: tokens of the other network.

    Raises:
        AsrError: the networks differ in more than their tokens.
    """
    shared = [token for token in tokens if token in weight_tokens]
    new = torch.tensor([list(tokens).index(token) for token in shared], dtype=torch.int64)
    old = torch.tensor([list(weight_tokens).index(token) for token in shared], dtype=torch.int64)
    spelled = {
        number: [weight_tokens.index(letter) for letter in letters]
        for number, token in enumerate(tokens)
        if token not in weight_tokens
        and (letters := token.removeprefix(PIECE_PREFIX))
        and set(letters) <= set(weight_tokens[1:])
    }
    state = network.state_dict()
    if state.keys() != weights.keys():
        name = sorted(state.keys() ^ weights.keys())[0]
        raise AsrError(f"initial_checkpoint: only one of the networks has {name}; use one of the same class.")
    for name, target in state.items():
        source = weights[name]
        dim = _TOKEN_DIMENSION.get(name)
        if dim is not None:
            source = target.clone().fill_(source.min()) if target.ndim == 1 else target.clone()
            source.index_copy_(dim, new, weights[name].index_select(dim, old))
            for token, parts in spelled.items():
                mean = weights[name].index_select(dim, torch.tensor(parts)).mean(dim)
                source.select(dim, token).copy_(mean)
        if source.shape != target.shape:
            raise AsrError(
                f"initial_checkpoint: {name} is {tuple(source.shape)} there and {tuple(target.shape)} here; "
                "use a network of the same sizes."
            )
        target.copy_(source)


@dataclass(frozen=True)
class Optimization:
    """Learning rates, gradients and averaged weights of `LitAcousticModel`.

    Attributes:
        peak_lr: learning rate at the end of the warm-up.
        warmup_fraction: fraction of all steps in which the learning rate rises; half a cosine follows.
        final_lr_fraction: the last learning rate as a fraction of the peak.
        max_gradient_norm: larger gradients are clipped to this norm.
        average_decay: decay of the moving average of weights.

    Raises:
        AsrError: a number is outside its range.
    """

    peak_lr: float = 1e-3
    warmup_fraction: float = 0.05
    final_lr_fraction: float = 0.02
    max_gradient_norm: float = 1.0
    average_decay: float = 0.999

    def __post_init__(self) -> None:
        require_above_zero(peak_lr=self.peak_lr, max_gradient_norm=self.max_gradient_norm)
        require_between(0, 1, warmup_fraction=self.warmup_fraction, final_lr_fraction=self.final_lr_fraction)
        require_below_one(average_decay=self.average_decay)


@dataclass(frozen=True)
class Regularization:
    """Regularization of `LitAcousticModel`; networks have dropout and skipped layers of their own.

    Attributes:
        weight_decay: for weight matrices; biases and norms have none.
        intermediate_weight: weight of the loss of intermediate outputs, if the network has them.
        seed: of dropout and of skipped layers.

    Raises:
        AsrError: a number is outside its range.
    """

    weight_decay: float = 0.02
    intermediate_weight: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(0, weight_decay=self.weight_decay)
        require_between(0, 1, intermediate_weight=self.intermediate_weight)


class LitAcousticModel(pl.LightningModule):
    """Trains an acoustic model on tokens, by CTC or a related objective.

    Validation and testing use the averaged weights. Batches are those of `AcousticDataModule`; if several
    processes train, each has a share of every batch. The random numbers of a step depend only on seed, epoch and batch,
    so they are the same in all processes, and in a resumed run.

    Args:
        network: the acoustic model; its `num_features` and `num_tokens` must be those of the data.
        objective: the training loss, such as `asr.models.losses.TorchCtc`.
        optimization: learning rates, gradients and averaged weights.
        regularization: weight decay, and the loss of intermediate outputs.
        flat_start_steps: number of first steps on frame cross-entropy with uniformly spread tokens; see
            `asr.models.alignment`.
        length_multiple: training batches are padded to a multiple of this number of frames.
        initial_checkpoint: initialize from the averaged weights of this checkpoint of `asr fit`, or from the network of
            the bundle in this folder; its tokens may differ.
        teacher: folder of a bundle. Training then uses frame cross-entropy with the alignments of its network;
            validation still shows the objective.

    Raises:
        AsrError: a number is outside its range.
    """

    token_frames: Tensor

    def __init__(
        self,
        network: nn.Module,
        objective: nn.Module,
        optimization: Optimization = Optimization(),
        regularization: Regularization = Regularization(),
        flat_start_steps: int = 0,
        length_multiple: int = 64,
        initial_checkpoint: str | None = None,
        teacher: str | None = None,
    ) -> None:
        super().__init__()
        require_at_least(0, flat_start_steps=flat_start_steps)
        require_at_least(1, length_multiple=length_multiple)
        self.network: AcousticNetwork = network  # type: ignore[assignment]
        self.objective: Objective = objective  # type: ignore[assignment]
        self.average = WeightAverage(network, optimization.average_decay)
        self.optimization = optimization
        self._clipper = GradientClipper(optimization.max_gradient_norm)
        self.regularization = regularization
        self.initial_checkpoint = initial_checkpoint
        self.flat_start_steps = flat_start_steps
        self.length_multiple = length_multiple
        self.teacher = teacher
        self._teacher_alignment: TeacherAlignment | None = None
        if teacher is not None:
            # Frames of each token so far; one each at first, so that no prior is 0.
            self.register_buffer("token_frames", torch.ones(self.network.num_tokens))
        self._errors: ErrorCounts = NO_ERRORS
        # Sums of the current validation: losses and tokens.
        self._sums = torch.zeros(2, dtype=torch.float64)
        self._is_resumed = False

    def forward(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        """The averaged network: features (N, T, F) and num_frames (N,) to log_prob (N, T', C) and num_frames (N,)."""
        log_prob, num_frames = self.average.network(features, num_frames)
        return log_prob, num_frames

    def setup(self, stage: str) -> None:
        """Prepares the model for several processes; a step may skip layers."""
        prepare_wrapping(self, self.trainer, may_drop=True)

    def on_fit_start(self) -> None:
        """Checks that the network fits the data, and prepares the objective with the training transcripts."""
        data = self._data()
        require_sizes(self.network, data.feature_dim, data.num_tokens)
        texts = map(cut_text, data.cuts["train"])
        # A resumed run has loaded its weights by now, but `global_step` is still 0.
        if self.initial_checkpoint is not None and not self._is_resumed:
            initial = trained_network(self.initial_checkpoint)
            warn_of_other_features(initial.fbank, data.fbank.arguments, self.initial_checkpoint)
            for network in (self.network, self.average.network):
                transfer_weights(network, data.token_table.tokens, initial.weights, initial.tokens)  # type: ignore[arg-type]
        if self.teacher is not None:
            self._teacher_alignment = TeacherAlignment(self.teacher, data.token_table.tokens, data.fbank)
        sequences = [data.tokenizer.encode(text.split())[0] for text in texts]
        self._require_frames(sequences)
        self.objective.prepare(sequences)

    def _require_frames(self, sequences: Sequence[Sequence[int]]) -> None:
        """Warns of training utterances with more tokens than the network has outputs: their loss counts as 0.

        Raises:
            AsrError: there are no others.
        """
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        frame_seconds = data.fbank.frame_shift / data.fbank.sampling_rate * self.network.subsampling_factor
        durations = [cut.duration for cut in data.cuts["train"]]
        num_short = sum(
            num_needed_frames(tokens) > math.ceil(duration / frame_seconds)
            for tokens, duration in zip(sequences, durations, strict=True)
        )
        if not num_short:
            return
        said = (
            f"train: {num_short} of {len(sequences)} utterances are too short for their tokens at an output each "
            f"{1000 * frame_seconds:g} ms and train nothing; do the transcripts fit the audio? If they do, take longer "
            "tokens, or a network with a smaller subsampling factor"
        )
        if num_short == len(sequences):
            raise AsrError(f"{said}.")
        _LOGGER.warning("%s", said)

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Counts the batches of each epoch from its first one."""
        if batch["number"][1] == 0:
            begin_epoch(self.trainer)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The loss of a batch, ().

        If several processes train, each multiplies its loss by their number, because gradients will be averaged.
        """
        # CPUs prepare new kernels for every shape, which costs more than padding to a few different lengths.
        max_frames = largest(batch["features"].shape[1])
        max_frames += -max_frames % self.length_multiple
        features = F.pad(batch["features"], (0, 0, 0, max_frames - batch["features"].shape[1]))
        draw_from(self.regularization.seed, *batch["number"])
        with batch_rows(batch["rows"], batch["num_all"]):
            outputs, num_frames = self.network.forward_all_layers(features, batch["num_frames"])
        name = "flat_start_loss" if self.global_step < self.flat_start_steps else "train_loss"
        losses, count = self._losses(batch, features, outputs, num_frames)
        loss = losses[-1]
        sums = total(torch.stack([loss.detach(), count.to(loss)]))
        count = sums[1].clamp(min=1)
        self.log(name, sums[0] / count, prog_bar=True, on_step=True, on_epoch=False, batch_size=1)
        if len(losses) > 1:
            intermediate, weight = torch.stack(losses[:-1]).mean(), self.regularization.intermediate_weight
            loss = (1.0 - weight) * loss + weight * intermediate
        return loss * (current_share().num / count)

    def _losses(
        self, batch: dict[str, Any], features: Tensor, outputs: Sequence[Tensor], num_frames: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """The losses of a batch, which may be one process's share and have no utterances.

        Args:
            batch: of the data module.
            features: its features, (N, T, F), padded further.
            outputs: log-probabilities (N, T', C) of the intermediate layers and, last, of the final one.
            num_frames: (N,) output frames.

        Returns:
            one sum, (), for each output that counts, and the number of frames or tokens in these sums, ().
        """
        tokens, num_tokens = batch["tokens"], batch["num_tokens"]
        max_frames = outputs[-1].shape[1]
        label = tokens.new_full((len(tokens), max_frames), IGNORED)
        if self.global_step < self.flat_start_steps:
            if len(label):
                label = uniform_alignment(features, num_frames, tokens, num_tokens, max_frames)
            mean = torch.stack([summed_cross_entropy(output, label) for output in outputs]).mean()
            return [mean], (label != IGNORED).sum()
        if self._teacher_alignment is not None:
            if len(label):
                sequences = features, batch["num_frames"], tokens, num_tokens
                label = self._teacher_alignment(*sequences, self.network.subsampling_factor, num_frames, max_frames)
            counted = label[label != IGNORED]
            self.token_frames += total(counted.bincount(minlength=len(self.token_frames)))
            log_prior = (self.token_frames / self.token_frames.sum()).log()
            losses = [summed_cross_entropy(output, label, log_prior) for output in outputs]
            return losses, label.new_tensor(len(counted))
        if not len(tokens):
            return [output.sum() for output in outputs], num_tokens.sum()
        return [self.objective(output, num_frames, tokens, num_tokens).sum() for output in outputs], num_tokens.sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clips gradients; a step with gradients that are not finite is skipped."""
        self.log("gradient_norm", self._clipper.clip(self))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Also updates the averaged weights. A hook after the step would be too late: checkpoints come before it."""
        super().optimizer_step(*args, **kwargs)
        self.average.update(self.network)  # type: ignore[arg-type]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Sets gradients to None. With zeros, as in torch 1.13, Adam would move the weights of skipped layers."""
        optimizer.zero_grad(set_to_none=True)

    def on_validation_epoch_start(self) -> None:
        self._errors = NO_ERRORS
        self._sums.zero_()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Token error rate of greedy decoding, and the objective per token."""
        if not len(batch["tokens"]):
            return
        log_prob, num_frames = self(batch["features"], batch["num_frames"])
        loss = self.objective(log_prob, num_frames, batch["tokens"], batch["num_tokens"]).sum()
        self._sums += torch.stack([loss.detach().double().cpu(), batch["num_tokens"].sum().cpu()])
        for i, hypothesis in enumerate(greedy_tokens(log_prob, num_frames)):
            reference = batch["tokens"][i, : batch["num_tokens"][i]].tolist()
            self._errors += count_errors([str(token) for token in reference], [str(token) for token in hypothesis])

    def on_validation_epoch_end(self) -> None:
        self._log_figures("val")

    on_test_epoch_start, test_step = on_validation_epoch_start, validation_step

    def on_test_epoch_end(self) -> None:
        self._log_figures("test")

    def configure_optimizers(self) -> Any:
        optimization = self.optimization
        optimizer = adamw(self.network, optimization.peak_lr, self.regularization.weight_decay)  # type: ignore[arg-type]
        # The number of bucketed batches is not known beforehand, so the data module counts them.
        total_steps = planned_steps(self.trainer, self._data().num_train_batches())
        warmup_steps = round(optimization.warmup_fraction * total_steps)

        def factor(step: int) -> float:
            return warmup_cosine(step, warmup_steps, total_steps, optimization.final_lr_fraction)

        return scheduled(optimizer, factor)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the tokens, which bundles need, and the features."""
        data = self._data()
        checkpoint["tokens"] = list(data.token_table.tokens)
        checkpoint[FBANK] = data.fbank.arguments

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Notes that the run is resumed.

        Raises:
            AsrError: the checkpoint is of other tokens, which may be as many, or of other features.
        """
        data = self._data()
        tokens = list(data.token_table.tokens)
        if checkpoint.get("tokens", tokens) != tokens:
            raise AsrError(
                "ckpt_path: the checkpoint has other tokens than the data; give the lexicon or the token table of its "
                "training."
            )
        require_same_features(checkpoint.get(FBANK, {}), data.fbank.arguments, "ckpt_path", "the recipe")
        warn_of_kept_rate(self, checkpoint, "peak_lr", self.optimization.peak_lr)
        self._is_resumed = True

    def _data(self) -> AcousticDataModule:
        data: AcousticDataModule = self.trainer.datamodule  # type: ignore[attr-defined]
        return data

    def _log_figures(self, stage: str) -> None:
        """Logs the figures over all processes' batches."""
        counts = torch.tensor(astuple(self._errors))
        self.log(f"{stage}_token_error_rate", ErrorCounts(*total(counts).tolist()).rate, prog_bar=stage == "val")
        loss, num_tokens = total(self._sums).tolist()
        self.log(f"{stage}_loss", loss / max(1.0, num_tokens))
