"""Training in several processes or runs: shares of batches, sums over all processes, shared random numbers, resuming.

A batch is split over the processes, each of which takes a share of its rows. Random numbers are drawn for the whole
batch, with the same seed in all processes, and each process takes those of its own rows. Sums of losses are divided by
counts of the whole batch. So several processes compute what one process does with the same batches. A run that
continues another asks for the epoch and the batch that come next.

Shapes: N rows of this process, M rows of the whole batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from asr.errors import AsrError

_LOGGER = logging.getLogger(__name__)


class Share(NamedTuple):
    """The part of a batch that belongs to a process.

    Attributes:
        rank: number of the process, from 0.
        num: number of processes.
    """

    rank: int = 0
    num: int = 1

    def rows(self, num_rows: int) -> range:
        """Every `num`-th row: neighboring rows, which often have similar lengths, go to different processes."""
        return range(self.rank, num_rows, self.num)

    def block(self, num_rows: int) -> slice:
        """A contiguous block of rows; the blocks of all processes follow one another."""
        return slice(num_rows * self.rank // self.num, num_rows * (self.rank + 1) // self.num)


WHOLE = Share()


def current_share() -> Share:
    """The share of this process; the whole batch if there is no process group."""
    if dist.is_available() and dist.is_initialized():
        return Share(dist.get_rank(), dist.get_world_size())
    return WHOLE


def _on_group_device(values: Tensor) -> Tensor:
    """The tensor where the process group can read it: NCCL accepts GPU tensors only."""
    return values.cuda() if dist.get_backend() == "nccl" and values.device.type == "cpu" else values


def total(values: Tensor) -> Tensor:
    """The sum of `values` over all processes, of the same shape and without gradient."""
    if current_share().num == 1:
        return values
    summed = _on_group_device(values.detach().clone())
    dist.all_reduce(summed)
    return summed.to(values.device)


def largest(number: int) -> int:
    """The maximum of the number over all processes."""
    if current_share().num == 1:
        return number
    found = _on_group_device(torch.tensor(number))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


def gather_rows(values: Tensor) -> Tensor:
    """Concatenates the rows (N, ...) of all processes in the order of ranks, (M, ...); N may differ."""
    num = current_share().num
    if num == 1:
        return values
    own = _on_group_device(values.detach().contiguous())
    counts = [torch.zeros((), dtype=torch.int64, device=own.device) for _ in range(num)]
    dist.all_gather(counts, torch.tensor(len(own), device=own.device))
    sizes = [int(count) for count in counts]
    # all_gather requires the same shape from all processes.
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in range(num)]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(values.device)


def average_gradient(parameter: nn.Parameter) -> None:
    """Replaces a gradient, sparse or dense, by the mean over all processes, as DistributedDataParallel does.

    DistributedDataParallel cannot average sparse gradients of custom functions, and NCCL no sparse gradients at all.
    """
    num, grad = current_share().num, parameter.grad
    if num == 1 or grad is None:
        return
    if grad.is_sparse and _has_each_row_once(grad):
        # To list each row once for each process would be more data, and the steps of Adagrad on entries would differ.
        parameter.grad = torch.sparse_coo_tensor(grad._indices(), total(grad._values()) / num, grad.shape)
    elif grad.is_sparse:
        places, values = gather_rows(grad._indices().t()).t(), gather_rows(grad._values()) / num
        parameter.grad = torch.sparse_coo_tensor(places, values, grad.shape)
    else:
        parameter.grad = total(grad) / num


def _has_each_row_once(grad: Tensor) -> bool:
    """Whether a sparse gradient lists all rows of the table in their order, as a softmax over all words does."""
    rows = grad._indices()[0]
    return len(rows) == len(grad) and bool((rows == torch.arange(len(rows), device=rows.device)).all())


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Gives all processes the values of the first one, in place."""
    if current_share().num == 1:
        return
    for tensor in tensors:
        values = _on_group_device(tensor.detach())
        dist.broadcast(values, src=0)
        with torch.no_grad():
            tensor.copy_(values)


def prepare_wrapping(module: nn.Module, trainer: Any, own_gradients: Sequence[str] = (), *, may_drop: bool) -> None:
    """Configures DistributedDataParallel before Lightning wraps a module in it.

    It ignores `own_gradients` and all buffers, which are equal in all processes or synchronized by the module itself.

    Args:
        module: a Lightning module, in its `setup`.
        trainer: its trainer.
        own_gradients: names of parameters whose gradients the module averages itself.
        may_drop: whether a step may leave parameters unused.

    Raises:
        AsrError: there are several processes, and the trainer's strategy is not `ddp`.
    """
    if trainer.world_size == 1:
        return
    options = getattr(trainer.strategy, "_ddp_kwargs", None)
    if options is None:
        raise AsrError("trainer.strategy: training in several processes needs `ddp`.")
    if may_drop:
        options.setdefault("find_unused_parameters", True)
    buffers = [name for name, _ in module.named_buffers()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [*own_gradients, *buffers])


def require_end(trainer: Any) -> None:
    """Checks that a schedule of learning rates, which fall until the training ends, has an end.

    Raises:
        AsrError: the trainer limits neither epochs nor steps.
    """
    if trainer.max_steps < 0 and (trainer.max_epochs is None or trainer.max_epochs < 0):
        raise AsrError(
            "trainer.max_epochs: the learning rates fall until the training ends; give max_epochs or max_steps."
        )


def warn_of_kept_rate(module: Any, checkpoint: dict[str, Any], name: str, rate: float, key: str = "initial_lr") -> None:
    """Logs a warning if a run is continued with another learning rate than it began with: optimizer and schedule take
    theirs from the checkpoint.

    Args:
        module: a Lightning module; nothing is said unless it is trained.
        checkpoint: Lightning's.
        name: of the rate in recipes.
        rate: the recipe's.
        key: of the rate in the optimizer's groups of parameters.
    """
    states = checkpoint.get("optimizer_states")
    kept = states[0]["param_groups"][0].get(key, rate) if states and module.trainer.state.fn == "fit" else rate
    if kept != rate:
        _LOGGER.warning(
            "ckpt_path: the run goes on with the %s %g with which it began, not %g; for another one, start a new run "
            "from the checkpoint's weights.",
            *(name, kept, rate),
        )


def draw_from(*numbers: int) -> None:
    """Seeds torch's generators from numbers such as a seed, an epoch and a batch."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))


class _Rows(NamedTuple):
    place: Tensor  # (N,) in the whole batch
    num_all: int


_rows: ContextVar[_Rows | None] = ContextVar("rows", default=None)


@contextlib.contextmanager
def batch_rows(place: Sequence[int] | Tensor, num_all: int) -> Iterator[None]:
    """Context in which `draw_rows` draws for a batch of `num_all` rows, of which this process has `place` (N,)."""
    is_whole = len(place) == num_all
    token = _rows.set(None if is_whole else _Rows(torch.as_tensor(place, dtype=torch.int64), num_all))
    try:
        yield
    finally:
        _rows.reset(token)


def draw_rows(draw: Callable[[int], Tensor], num_rows: int, dim: int = 0) -> Tensor:
    """Draws random numbers for the rows of a batch.

    Args:
        draw: draws them for a given number of rows, which is the size of dimension `dim`.
        num_rows: N.
        dim: the dimension of rows.

    Returns:
        `draw(num_rows)`; inside `batch_rows`, this process's rows of `draw(M)`.
    """
    rows = _rows.get()
    if rows is None:
        return draw(num_rows)
    assert num_rows == len(rows.place), "a batch of other rows"
    drawn = draw(rows.num_all)
    return drawn.index_select(dim, rows.place.to(drawn.device))


class BatchDropout(nn.Dropout):
    """Dropout whose masks are drawn for the whole batch; (N, ...) -> (N, ...)."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0 or current_share().num == 1:
            return super().forward(input)
        shape = input.shape[1:]
        return input * draw_rows(lambda num: F.dropout(input.new_ones(num, *shape), self.p), len(input))


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


def begin_epoch(trainer: Any) -> None:
    """Makes the batch that begins the first one of its epoch.

    Lightning goes on counting where a run continues from the last step of an epoch of unknown length, so that steps of
    several batches would end elsewhere.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    progress.ready, progress.started, progress.processed, progress.completed = 1, 0, 0, 0


class ResumesEpoch:
    """A base of Lightning data modules: a run that was stopped within an epoch continues with the next batch."""

    trainer: Any
    _resume_at = 0

    def state_dict(self) -> dict[str, Any]:
        """The position within the epoch."""
        return {"batches_done": 0 if self.trainer is None else batches_done(self.trainer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next training loader start at the saved position."""
        self._resume_at = state_dict["batches_done"]

    def take_start(self) -> int:
        """The batch with which the next training loader starts; the ones after it start with the first."""
        start, self._resume_at = self._resume_at, 0
        return start
