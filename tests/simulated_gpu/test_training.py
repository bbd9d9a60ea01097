"""What training computes forward on a simulated GPU: nothing is on the wrong device, and losses are the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("pytorch_lightning", reason="training needs Lightning")

from asr.audio.fbank import Fbank
from asr.bundle import Bundle
from asr.lm.rnn.data import TokenBatch, TokenStreams
from asr.lm.rnn.model import RNNLMConfig
from asr.lm.rnn.training import LitRNNLM
from asr.models.alignment import TeacherAlignment
from asr.models.conformer import Conformer
from asr.models.feedforward import FeedForwardNetwork
from asr.models.losses import CtcCrf, TorchCtc
from asr.models.training import LitAcousticModel
from asr.testing.simulated_gpu import simulated_gpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes"),
]
WORDS = [f"w{number}" for number in range(60)]
TOKENS = np.random.default_rng(0).integers(4, 64, 2000).astype(np.int32)
NETWORKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "conformer": (Conformer, {"dim": 16, "num_blocks": 2, "num_heads": 2, "hidden_dim": 32, "group_size": 8}),
    "dnn": (FeedForwardNetwork, {"num_hidden_layers": 1, "hidden_dim": 32, "left_context": 1, "right_context": 1}),
}


def moved(batch: TokenBatch, device: str) -> TokenBatch:
    return TokenBatch(*(part.to(device) if isinstance(part, Tensor) else part for part in batch))


@pytest.mark.parametrize("cell", ["gru", "relu"])
@pytest.mark.parametrize("output", ["nce", "hierarchical", "class", "full"])
def test_a_language_model_s_losses_are_the_same(tmp_path: Path, output: Any, cell: Any) -> None:
    (tmp_path / "words").write_text("\n".join(WORDS))
    config = RNNLMConfig(8, 12, cell=cell, output=output, maxent_order=3, maxent_size=256, num_noise_words=20)

    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = LitRNNLM(str(tmp_path / "words"), config)
        model.network.output.set_unigram(torch.from_numpy(np.bincount(TOKENS, minlength=64)), reset_bias=True)
        model.to(device).train()
        model.trainer = mock.Mock(accumulate_grad_batches=1, global_step=0)
        streams = TokenStreams(TOKENS, 4, 8, model.network.num_history_words)
        # As behind a checkpoint, which holds the streams' states on the CPU.
        model.on_load_checkpoint({"stream_states": [torch.full((4, 12), 0.5)]})
        with mock.patch.object(LitRNNLM, "_is_logged", return_value=False), torch.no_grad():
            found = [float(model.training_step(moved(streams[idx], device), idx)) for idx in (1, 2)]
            model.validation_step(moved(streams[3], device), 0)
        return [*found, *model._sums.tolist()]

    expected = losses("cpu")
    with simulated_gpu():
        assert losses("cuda") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("objective", ["ctc", "ctc_crf", "flat start", "teacher"])
@pytest.mark.parametrize("network", [*NETWORKS])
def test_an_acoustic_model_s_losses_are_the_same(network: str, objective: str, tiny_bundle_folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = {
        "features": torch.randn(2, 64, 20, generator=generator),
        "num_frames": torch.tensor([64, 40]),
        "tokens": torch.tensor([[1, 2, 3], [2, 1, 0]]),
        "num_tokens": torch.tensor([3, 2]),
    }
    whole = {"rows": torch.arange(2), "num_all": 2, "number": (0, 0)}

    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        build, arguments = NETWORKS[network]
        loss: nn.Module = CtcCrf(5) if objective == "ctc_crf" else TorchCtc()
        options: dict[str, Any] = {"flat start": {"flat_start_steps": 1}, "teacher": {"teacher": "its folder"}}
        model = LitAcousticModel(
            build(num_features=20, num_tokens=5, **arguments), loss, **options.get(objective, {})
        ).eval()
        model.objective.prepare([[1, 2, 3], [2, 1]])
        if objective == "teacher":
            tokens = Bundle.load(tiny_bundle_folder).graph.tokens.tokens
            model._teacher_alignment = TeacherAlignment(str(tiny_bundle_folder), tokens, Fbank(num_mel_bins=20))
        model.to(device)
        on_device = {name: part.to(device) for name, part in batch.items()} | whole
        found: list[float] = []
        model.log = lambda name, value, **_: found.append(float(value))  # type: ignore[method-assign]
        with torch.no_grad():
            model.training_step(on_device, 0)
            model.average.update(model.network)  # type: ignore[arg-type]
            model.on_validation_epoch_start()
            model.validation_step(on_device, 0)
        return [*found, *model._sums.tolist(), model._errors.rate]

    expected = losses("cpu")
    with simulated_gpu():
        assert losses("cuda") == pytest.approx(expected, rel=1e-5)
