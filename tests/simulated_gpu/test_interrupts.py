"""An interrupted query on a GPU leaves no edge without a score."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
os.environ.setdefault("TRITON_INTERPRET", "1")

from asr.lm.cached.engine import CachedRNNLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.testing.simulated_gpu import simulated_gpu
from asr.text.symbols import Vocabulary

pytestmark = pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes")


@pytest.mark.slow
def test_scores_after_an_interrupted_wait_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    network = RNNLanguageModel(Vocabulary(["a", "b", "c"]), RNNLMConfig(embedding_size=8, hidden_size=8)).eval()
    own = CachedRNNLM(network)
    word_id = torch.tensor([own.vocabulary.id_of(word) for word in "abc"])
    expected, _ = own.score(own.start(3), word_id)

    with simulated_gpu() as device:
        lm = CachedRNNLM(network.to("cuda"))
        queries = lm.start(3), word_id.to("cuda")

        def interrupted(name: str) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(device, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lm.score(*queries)
        found, _ = lm.score(*queries)
        assert torch.allclose(found.cpu(), expected, atol=1e-6)
