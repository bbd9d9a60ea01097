"""Training of a recurrent language model under Lightning."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from torch import Tensor

from asr.distributed import (
    average_gradient,
    broadcast,
    current_share,
    gather_rows,
    prepare_wrapping,
    require_end,
    total,
    warn_of_kept_rate,
)
from asr.errors import AsrError, require_above_zero, require_at_least, require_between
from asr.kernels.jit import torch_on_one_thread
from asr.lm.rnn.data import TokenBatch
from asr.lm.rnn.export import load_network
from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.lm.rnn.optim import AdamWithSparseRows
from asr.serialization import read_checkpoint
from asr.text.symbols import Vocabulary


@dataclass(frozen=True)
class Optimization:
    """Learning rates and gradients of `LitRNNLM`.

    Attributes:
        lr: Adam's learning rate for the recurrent layers.
        sparse_lr: Adagrad's learning rate for word vectors, biases and n-gram features.
        warmup_steps: the rates rise linearly over these steps.
        decay_start: fraction of the run after which the rates fall, by a half cosine.
        final_lr_factor: the factor of the rates at the end of the run.
        max_grad_norm: the dense gradients, averaged over the words of a step, are clipped to this norm.

    Raises:
        AsrError: a number is outside its range.
    """

    lr: float = 2e-3
    sparse_lr: float = 0.1
    warmup_steps: int = 100
    decay_start: float = 0.5
    final_lr_factor: float = 0.02
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        require_above_zero(lr=self.lr, sparse_lr=self.sparse_lr, max_grad_norm=self.max_grad_norm)
        require_between(0, 1, decay_start=self.decay_start, final_lr_factor=self.final_lr_factor)
        require_at_least(0, warmup_steps=self.warmup_steps)

    def factor(self, step: int, num_steps: int) -> float:
        """The factor of the rates in a step of a run of `num_steps`: warm-up, plateau, half cosine."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        begin = self.decay_start * num_steps
        progress = min(1.0, max(0.0, (step - begin) / max(1.0, num_steps - begin)))
        return warm * (self.final_lr_factor + (1 - self.final_lr_factor) * 0.5 * (1 + math.cos(math.pi * progress)))


class LitRNNLM(pl.LightningModule):
    """Trains an `RNNLanguageModel`; validates by its true, normalized perplexity and by the spread of its log Z.

    Args:
        vocabulary: word list, one word per line.
        network: the network's shape.
        init_from: where to start from, with a new schedule: a checkpoint, with its optimizer's state, or an exported
            folder; then let the rates rise slowly (`optimization.warmup_steps`). A resumed run does not read it.
        optimization: learning rates and gradients.
        noise_seed: seed of noise and dropout; batch i draws the same in every run.
        compute_dtype: matrix products, "float32", or "bfloat16" where the hardware
            multiplies it; parameters stay float32.
        compile_cell: compiles the recurrent layers' element-wise work.

    Raises:
        AsrError: the word list cannot be read.
    """

    def __init__(
        self,
        vocabulary: str,
        network: RNNLMConfig,
        init_from: str | None = None,
        optimization: Optimization = Optimization(),
        noise_seed: int = 1,
        compute_dtype: str = "float32",
        compile_cell: bool = False,
    ) -> None:
        super().__init__()
        self.network = RNNLanguageModel(Vocabulary.from_file(vocabulary), network, compute_dtype, compile_cell)
        self.init_from = init_from
        self._is_resumed = False
        self.optimization = optimization
        self.noise_seed = noise_seed
        self._states: list[Tensor] | None = None
        # The states of all processes' streams, if the run continues from a checkpoint.
        self._loaded_states: list[Tensor] | None = None
        self._own_gradients: list[torch.nn.Parameter] = []
        self._validation_states: list[Tensor] | None = None
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._seconds = self._cpu_seconds = 0.0
        self._batch_begin = (0.0, 0.0)
        # Batches and words of the current optimizer step, which may span several batches.
        self._num_batches = self._num_words = 0

    def setup(self, stage: str) -> None:
        """Initializes noise and biases from the training text's counts.

        Raises:
            AsrError: word lists do not fit, several processes train with a strategy other than `ddp`, or the trainer
                clips gradients or has a precision of its own.
        """
        sparse = self._tables()
        prepare_wrapping(self, self.trainer, list(sparse), may_drop=False)
        self._own_gradients = list(sparse.values())
        data = getattr(self.trainer, "datamodule", None)
        if data is None:
            return
        if data.vocabulary != self.network.vocabulary:
            raise AsrError("data.vocabulary and model.vocabulary are different word lists; give both the same file.")
        data.num_history_words = self.network.num_history_words
        if stage != "fit":
            return
        if self.trainer.gradient_clip_val:
            raise AsrError("trainer.gradient_clip_val has no effect on LitRNNLM; leave it out and set max_grad_norm.")
        if self.trainer.precision != "32-true":
            raise AsrError(
                f"trainer.precision is {self.trainer.precision}, but LitRNNLM chooses the precision of each part; "
                "leave it out, and set compute_dtype: bfloat16 for faster matrix products."
            )
        data.setup(stage)
        counts = torch.from_numpy(data.train_tokens.unigram_counts(len(data.vocabulary)))
        self.network.output.set_unigram(counts, reset_bias=self.init_from is None)

    def _require_words(self, words: tuple[str, ...] | None, what: str) -> None:
        """Rejects weights of other words, or of the same ones in another order: they may have the same shapes."""
        if words is not None and words != self.network.vocabulary.ordinary:
            raise AsrError(
                f"{what} has another word list than model.vocabulary; give the list that it was trained with."
            )

    def _tables(self) -> dict[str, torch.nn.Parameter]:
        """The parameters with sparse gradients, by name."""
        found: dict[str, torch.nn.Parameter] = {}
        for path, module in self.named_modules():
            if isinstance(module, HashedMaxEnt) or (isinstance(module, torch.nn.Embedding) and module.sparse):
                found[f"{path}.weight"] = cast(torch.nn.Parameter, module.weight)
        return found

    def on_fit_start(self) -> None:
        """Takes the weights of `init_from`, unless a checkpoint has been loaded, and copies the first process's tables
        to the others; Lightning's strategy copies the other parameters.

        Raises:
            AsrError: the weights cannot be read, or are of other words.
        """
        if self.init_from is not None and not self._is_resumed:
            self._start_from(self.init_from)
        broadcast(self._own_gradients)

    def _start_from(self, path: str) -> None:
        if Path(path).is_dir():
            trained = load_network(path)
            self._require_words(trained.vocabulary.ordinary, f"{path}: init_from")
            self.network.load_state_dict(trained.state_dict())
        else:
            checkpoint = read_checkpoint(path)
            self._require_words(checkpoint.get("rnn_lm_words"), f"{path}: init_from")
            self.load_state_dict(checkpoint["state_dict"])

    def on_train_batch_start(self, batch: TokenBatch, batch_idx: int) -> None:
        """Starts the clocks of training without validation; other processes do not affect that of processor time."""
        self._batch_begin = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, outputs: Any, batch: TokenBatch, batch_idx: int) -> None:
        """Stops the clocks of training."""
        begin, cpu_begin = self._batch_begin
        self._seconds += time.perf_counter() - begin
        self._cpu_seconds += time.process_time() - cpu_begin

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """The loss summed over the batch's words; the mean is logged.

        If several processes train, each multiplies its loss by their number, because gradients will be averaged; and by
        the number of batches of a step, because Lightning divides by it.
        """
        batch_number = self.global_step * self.trainer.accumulate_grad_batches + self._num_batches
        generator = torch.Generator().manual_seed(self.noise_seed + batch_number)
        self._num_batches += 1
        self._num_words += batch.num_all_words
        if self._loaded_states is not None:
            own = slice(batch.first_stream, batch.first_stream + len(batch.input_id))
            self._states = [state[own].to(batch.input_id.device) for state in self._loaded_states]
            self._loaded_states = None
        loss, self._states = self.network(batch, self._states, generator)
        if self._is_logged():
            self.log("train_loss", total(loss.detach()) / batch.num_all_words, prog_bar=True, batch_size=1)
        return loss * (current_share().num * self.trainer.accumulate_grad_batches)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Runs with one torch thread, since compiled loops do most of the work; it includes forward and backward."""
        with torch_on_one_thread():
            super().optimizer_step(*args, **kwargs)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clips the dense gradients; Adagrad's steps are bounded anyway.

        Raises:
            AsrError: they are not finite.
        """
        for parameter in self._own_gradients:
            average_gradient(parameter)
        dense = [p for p in self.network.parameters() if p.grad is not None and not p.grad.is_sparse]
        norm = torch.nn.utils.clip_grad_norm_(dense, self.optimization.max_grad_norm * self._num_words)
        # To wait for every norm would slow down a GPU.
        if (norm.device.type == "cpu" or self._is_logged()) and not torch.isfinite(norm):
            raise AsrError(
                f"the training has diverged: the gradients of step {self.global_step + 1} are not finite. Start again, "
                "perhaps with an earlier checkpoint as init_from, with lower optimization.lr and sparse_lr."
            )
        if self._is_logged():
            self.log("grad_norm", norm / self._num_words, batch_size=1)
        self._num_batches = self._num_words = 0

    def _is_logged(self) -> bool:
        """Whether this step is logged. To pass other steps' values to Lightning as well would take milliseconds."""
        every = int(self.trainer.log_every_n_steps)  # type: ignore[attr-defined]
        return every > 0 and (self.global_step + 1) % every == 0

    def on_validation_epoch_start(self) -> None:
        """Resets state and sums."""
        self._validation_states = None
        self._sums.zero_()

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Adds up true log probabilities and log Z."""
        hidden, self._validation_states = self.network.hidden_sequence(batch, self._validation_states)
        hidden = hidden.flatten(0, 1)
        history = batch.history.transpose(0, 1).flatten(0, 1)
        word_id = batch.target_id.t().reshape(-1)
        log_z = self.network.exact_log_z(len(word_id))
        log_prob, deviation = self.network.normalized_log_prob(hidden, history, word_id, log_z)
        deviation = torch.zeros_like(log_prob) if deviation is None else deviation
        values = log_prob.sum(), deviation.sum(), deviation.square().sum(), torch.tensor(len(word_id))
        self._sums += torch.stack([value.double().cpu() for value in values])

    def on_validation_epoch_end(self) -> None:
        """Logs the normalized perplexity, mean and standard deviation of log Z over its constant, and the time of
        training so far, by the clock and of the processor."""
        log_prob, deviation, square, count = total(self._sums).tolist()
        if count == 0:
            return
        mean = deviation / count
        self.log("val_perplexity", math.exp(min(-log_prob / count, 50.0)), prog_bar=True)
        self.log("train_seconds", self._seconds)
        self.log("train_cpu_seconds", self._cpu_seconds)
        self.log("val_log_z_mean", mean)
        self.log("val_log_z_std", math.sqrt(max(0.0, square / count - mean * mean)))

    def configure_optimizers(self) -> Any:
        """Adam with sparse rows; warm-up, plateau, half cosine.

        Raises:
            AsrError: the trainer limits neither epochs nor steps.
        """
        rates = self.optimization
        optimizer = AdamWithSparseRows(self.network.parameters(), lr=rates.lr, sparse_lr=rates.sparse_lr)
        if self.init_from is not None and not self._is_resumed and not Path(self.init_from).is_dir():
            state = read_checkpoint(self.init_from)["optimizer_states"][0]
            # The parameter groups, and with them the learning rates, are those of this run.
            optimizer.load_state_dict({"state": state["state"], "param_groups": optimizer.state_dict()["param_groups"]})
        require_end(self.trainer)
        num_steps = max(1, int(self.trainer.estimated_stepping_batches))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates.factor(step, num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the streams' states, from which a resumed run continues, the training times and the configuration."""
        states = self._states if self._loaded_states is None else None
        checkpoint["stream_states"] = self._loaded_states if states is None else [gather_rows(part) for part in states]
        checkpoint["train_seconds"], checkpoint["train_cpu_seconds"] = self._seconds, self._cpu_seconds
        # With these, an export does not need Lightning.
        checkpoint["rnn_lm_config"] = asdict(self.network.config)
        checkpoint["rnn_lm_words"] = self.network.vocabulary.ordinary

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the streams' states and the training times; `init_from` is not needed then.

        Raises:
            AsrError: the checkpoint is of other words.
        """
        self._require_words(checkpoint.get("rnn_lm_words"), "ckpt_path: the checkpoint")
        warn_of_kept_rate(self, checkpoint, "lr", self.optimization.lr)
        warn_of_kept_rate(self, checkpoint, "sparse_lr", self.optimization.sparse_lr, "sparse_lr")
        self._is_resumed = True
        self._states, self._loaded_states = None, checkpoint.get("stream_states")
        self._seconds = checkpoint.get("train_seconds", 0.0)
        self._cpu_seconds = checkpoint.get("train_cpu_seconds", 0.0)
