"""Output layers with a full softmax, and with one over frequency classes and one over the words of a class.

Shapes: N words of a batch, Q queries, H hidden, M history words, V vocabulary, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from asr.kernels.precision import product_dtype
from asr.lm.interface import CacheableTerms
from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.outputs.base import OutputLayer
from asr.lm.rnn.outputs.log_partition import LogZ, Precision, log_z_of
from asr.lm.rnn.outputs.softmax_loss import softmax_loss
from asr.text.symbols import BOS_ID, EPSILON_ID


class FullSoftmaxOutput(OutputLayer):
    """log P(w | h) = row(w) . hidden + bias(w) + MaxEnt(w, h), normalized over all words but `<eps>` and `<s>`.

    Args:
        rows: the output word vectors (V, H), shared with the input where the two are tied.
        maxent: n-gram features, or None; in training a word reads and updates a weight for each vocabulary word and
            history length.
        compute_dtype: what the matrix products of the loss run in.
        normalizer_precision: of the sum over the vocabulary, see `log_z_of`; a word's own score is float32.
    """

    def __init__(
        self, rows: nn.Embedding, maxent: HashedMaxEnt | None, compute_dtype: str = "float32",
        normalizer_precision: Precision = "float32",
    ) -> None:  # fmt: skip
        super().__init__()
        self.rows = rows
        self.maxent = maxent
        self.compute_dtype = product_dtype(compute_dtype)
        self.normalizer_precision: Precision = normalizer_precision
        self.bias = nn.Parameter(torch.zeros(rows.num_embeddings))

    @property
    def cacheable_terms(self) -> CacheableTerms:
        return "history"

    def set_unigram(self, counts: Tensor, *, reset_bias: bool) -> None:
        if reset_bias:
            smoothed = counts.double() + 1
            with torch.no_grad():
                self.bias.copy_((smoothed / smoothed.sum()).log())

    def loss(self, hidden: Tensor, history: Tensor, word_id: Tensor, generator: torch.Generator) -> Tensor:
        rows = self.rows(torch.arange(self.rows.num_embeddings, device=hidden.device))
        return softmax_loss(hidden, rows, self.bias, self.maxent, history, word_id, compute_dtype=self.compute_dtype)

    def word_score(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        scores = (hidden * self.rows.weight[word_id]).sum(dim=1) + self.bias[word_id]
        return scores if self.maxent is None else scores + self.maxent.score(history, word_id)

    def history_normalizer(self, hidden: Tensor, history: Tensor) -> Tensor:
        return self.exact_log_z(len(hidden))(hidden, history)

    def exact_log_z(self, num_queries: int) -> LogZ:
        return log_z_of(self.rows.weight, self.bias, self.maxent, self.normalizer_precision, num_queries)

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        return self.word_score(hidden, history, word_id) - self.history_normalizer(hidden, history)


class ClassSoftmaxOutput(OutputLayer):
    """P(w | h) = P(class(w) | h) P(w | class(w), h); each class holds about the same sum of square-rooted counts.

    Rows 0 .. C - 1 are the classes; the words' rows follow in the order of their classes, so that a class is a slice.

    Args:
        vocabulary_size: V; `<eps>` and `<s>` are in no class.
        hidden_size: H.
        maxent: n-gram features over `num_rows(vocabulary_size, num_classes)` rows, or None.
        num_classes: C; 0 for the square root of V.
        compute_dtype: what the matrix products of the loss run in.
    """

    def __init__(
        self,
        vocabulary_size: int,
        hidden_size: int,
        maxent: HashedMaxEnt | None,
        num_classes: int = 0,
        compute_dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.maxent = maxent
        self.num_classes = num_classes or default_num_classes(vocabulary_size)
        self.compute_dtype = product_dtype(compute_dtype)
        self.rows = nn.Embedding(self.num_classes + vocabulary_size, hidden_size, sparse=True)
        self.bias = nn.Embedding(self.num_classes + vocabulary_size, 1, sparse=True)
        nn.init.normal_(self.rows.weight, std=hidden_size**-0.5)
        nn.init.zeros_(self.bias.weight)
        # The counts determine the classes, so a checkpoint holds only the counts.
        self.counts: Tensor
        self.register_buffer("counts", torch.ones(vocabulary_size, dtype=torch.int64))
        self.class_of: Tensor
        self.row_of: Tensor
        self.class_rows: Tensor  # of classes that have words: a very frequent word may fill the share of several
        for name in ("class_of", "row_of", "class_rows"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.class_begin: list[int] = []
        self._build()

    @property
    def cacheable_terms(self) -> CacheableTerms:
        return "group"

    def set_unigram(self, counts: Tensor, *, reset_bias: bool) -> None:
        """Makes the classes; `reset_bias` starts the biases at the log counts."""
        self.counts.copy_(counts + 1)
        self._build()
        if reset_bias:
            in_class = self.counts.double().index_fill(0, torch.tensor([EPSILON_ID, BOS_ID]), 0)
            class_counts = torch.zeros(self.num_classes, dtype=torch.float64).index_add(0, self.class_of, in_class)
            share = self.counts / class_counts[self.class_of]
            self.bias.weight.data[self.row_of, 0] = share.log().to(self.bias.weight)
            self.bias.weight.data[: self.num_classes, 0] = class_counts.clamp(min=1).log().to(self.bias.weight)

    def loss(self, hidden: Tensor, history: Tensor, word_id: Tensor, generator: torch.Generator) -> Tensor:
        by_class = list(self._by_class(self.class_of[word_id]))
        classes, members = [idx for idx, _ in by_class], [member for _, member in by_class]
        order, sizes = torch.cat(members), [len(member) for member in members]
        row = [self.class_rows]
        row += [torch.arange(*self.class_begin[idx : idx + 2], device=hidden.device) for idx in classes]
        # All softmaxes' rows and features are taken at once: autograd adds up sparse gradients one by one, each time
        # copying what has come before.
        widths, all_rows = [len(part) for part in row], torch.cat(row)
        rows, bias = self.rows(all_rows).to(self.compute_dtype).split(widths), self.bias(all_rows)[:, 0].split(widths)
        inputs = [part.to(self.compute_dtype) for part in (hidden, *hidden[order].split(sizes))]
        scores = [F.linear(*args).float() + offset for *args, offset in zip(inputs, rows, bias, strict=True)]
        if self.maxent is not None:
            features = self.maxent.score_blocks([history, *history[order].split(sizes)], row)
            scores = [score + feature for score, feature in zip(scores, features, strict=True)]
        targets = [torch.searchsorted(self.class_rows, self.class_of[word_id])]
        targets += [self.row_of[word_id[member]] - part[0] for member, part in zip(members, row[1:], strict=True)]
        losses = [F.cross_entropy(*args, reduction="sum") for args in zip(scores, targets, strict=True)]
        return torch.stack(losses).sum()

    def word_score(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        scores = self._row_score(hidden, history, self.class_of[word_id])
        scores = scores + self._row_score(hidden, history, self.row_of[word_id])
        return scores.masked_fill((word_id == EPSILON_ID) | (word_id == BOS_ID), -torch.inf)

    def history_normalizer(self, hidden: Tensor, history: Tensor) -> Tensor:
        return self._scores(hidden, history, self.class_rows).logsumexp(dim=1)

    def group_of(self, word_id: Tensor) -> Tensor:
        return self.class_of[word_id]

    def group_normalizer(self, hidden: Tensor, history: Tensor, group: Tensor) -> Tensor:
        log_z = hidden.new_empty(len(hidden))
        for class_idx, member in self._by_class(group):
            row = torch.arange(*self.class_begin[class_idx : class_idx + 2], device=hidden.device)
            log_z[member] = self._scores(hidden[member], history[member], row).logsumexp(dim=1)
        return log_z

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        normalizer = self.history_normalizer(hidden, history)
        normalizer = normalizer + self.group_normalizer(hidden, history, self.group_of(word_id))
        return self.word_score(hidden, history, word_id) - normalizer

    def _scores(self, hidden: Tensor, history: Tensor, row: Tensor) -> Tensor:
        """Scores of the rows (K,), (Q, K)."""
        scores = F.linear(hidden, self.rows(row)) + self.bias(row).squeeze(1)
        return scores if self.maxent is None else scores + self.maxent.score_each(history, row)

    def _row_score(self, hidden: Tensor, history: Tensor, row: Tensor) -> Tensor:
        scores = (hidden * self.rows(row)).sum(dim=1) + self.bias.weight[row, 0]
        return scores if self.maxent is None else scores + self.maxent.score(history, row)

    @staticmethod
    def _by_class(group: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each class that occurs in group (Q,), with the places where it does."""
        order = torch.argsort(group, stable=True)
        classes, sizes = torch.unique_consecutive(group[order], return_counts=True)
        return zip(classes.tolist(), torch.split(order, sizes.tolist()), strict=True)

    def _build(self) -> None:
        class_of, begin = frequency_classes(self.counts.cpu().numpy(), self.num_classes)
        words = np.argsort(class_of, kind="stable")
        row_of = np.empty(len(class_of), dtype=np.int64)
        row_of[words] = np.arange(len(words)) - (class_of < 0).sum() + self.num_classes
        never = class_of < 0
        class_rows = np.flatnonzero(np.diff(begin))
        class_of[never], row_of[never] = class_rows[0], self.num_classes
        self.class_begin = (begin + self.num_classes).tolist()
        self.class_of = torch.from_numpy(class_of).to(self.counts.device)
        self.row_of = torch.from_numpy(row_of).to(self.counts.device)
        self.class_rows = torch.from_numpy(class_rows).to(self.counts.device)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._build()


def default_num_classes(vocabulary_size: int) -> int:
    """The square root of V, about where both softmaxes cost the same."""
    return max(1, math.isqrt(vocabulary_size))


def frequency_classes(counts: NDArray[np.int64], num_classes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """counts (V,) -> the class of each word, -1 for `<eps>` and `<s>`, and where classes begin among them, (C + 1,)."""
    root = np.sqrt(counts.astype(np.float64))
    root[[EPSILON_ID, BOS_ID]] = 0.0
    by_count = np.argsort(-root, kind="stable")
    by_count = by_count[(by_count != EPSILON_ID) & (by_count != BOS_ID)]
    mass = np.cumsum(root[by_count]) / root.sum()
    class_by_rank = np.minimum((mass - root[by_count] / root.sum() / 2) * num_classes, num_classes - 1).astype(np.int64)
    class_of = np.full(len(counts), -1, dtype=np.int64)
    class_of[by_count] = class_by_rank
    begin = np.searchsorted(class_by_rank, np.arange(num_classes + 1))
    return class_of, begin
