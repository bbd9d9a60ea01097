"""On a CPU with numba, training and scoring call compiled loops. Tensor operations give the same, more slowly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asr.kernels.jit import jit_for, jit_required
from asr.lm.evaluate import network_word_scores
from asr.lm.rnn.data import TokenStreams
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.lm.rnn.optim import AdamWithSparseRows
from asr.text.symbols import EOS_ID, Vocabulary

pytest.importorskip("numba")
MODULES = (
    "maxent",
    "optim",
    "outputs.hierarchical",
    "outputs.log_partition",
    "outputs.nce",
    "recurrent",
    "recurrent_numba",
)


COMMON = {
    "adagrad_entries", "adagrad_rows", "add_products_by_column", "add_sentences", "fill_gradients", "fill_kept",
    "fill_outputs",
}  # fmt: skip


@pytest.mark.one_stack
@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "own"),
    [
        ("nce", {
            "add_exponentials_float32", "add_word_scores", "fill_feature_gradients", "fill_hidden_gradients",
            "fill_probabilities",
        }),
        ("hierarchical", {"add_path_log_prob", "add_row_gradients", "fill_paths", "number_nodes"}),
        ("full", {"add_exponentials_float32", "add_slices"}),
    ],
)  # fmt: skip
def test_each_loop_is_called_compiled(output: str, own: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()

    def noting(choose: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(function: Callable[..., Any], *tensor: Tensor) -> Callable[..., Any] | None:
            loop = choose(function, *tensor)

            def call(*arguments: Any) -> Any:
                called.add(function.__name__)
                return loop(*arguments)

            return None if loop is None else call

        return chosen

    for module in MODULES:
        monkeypatch.setattr(f"asr.lm.rnn.{module}.jit_for", noting(jit_for))
        monkeypatch.setattr(f"asr.lm.rnn.{module}.jit_required", noting(jit_required), raising=False)
    torch.manual_seed(0)
    config = RNNLMConfig(16, 16, output=output, maxent_order=3, maxent_size=500, num_noise_words=32, dropout=0.1)
    network = RNNLanguageModel(Vocabulary(f"w{i}" for i in range(60)), config)
    token_id = np.random.default_rng(0).integers(4, 64, 2000, dtype=np.int32)
    token_id[9::10] = EOS_ID
    loss, _ = network(TokenStreams(token_id, 16, 4, 2)[0], None, torch.Generator().manual_seed(1))
    loss.backward()
    AdamWithSparseRows(network.parameters()).step()
    network_word_scores(network.eval(), token_id, normalized=True)
    assert called == COMMON | own
