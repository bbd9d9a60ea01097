"""A causal Transformer on a simulated GPU: the tree stays on the host, keys and values on the device."""

from __future__ import annotations

import copy

import pytest
import torch

from asr.lm.cached.engine import CachedRNNLM
from asr.lm.transformers import TransformerNetwork
from asr.testing.simulated_gpu import simulated_gpu
from asr.text.symbols import Vocabulary

toy = pytest.importorskip("tests.reference.toy_transformer")

pytestmark = pytest.mark.slow

VOCABULARY = Vocabulary(["THE", "QUICK", "BROWN", "FOX", "DON'T", "DOG"])


def scores(lm: CachedRNNLM) -> list[float]:
    """Of all pairs of words and their ends, on the host."""
    words = torch.cartesian_prod(torch.arange(4, 10), torch.arange(4, 10)).to(lm.device)
    context_idx, total = lm.start(len(words)), torch.zeros(len(words), device=lm.device)
    for word_id in words.unbind(1):
        log_prob, context_idx = lm.score(context_idx, word_id)
        total = total + log_prob
    found: list[float] = (total + lm.final(context_idx)).cpu().tolist()
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_scores_are_those_of_a_cpu(kind: str) -> None:
    network = TransformerNetwork(toy.model_of(kind), toy.TOKENIZER, VOCABULARY)
    expected = scores(CachedRNNLM(network))
    with simulated_gpu() as device:
        moved = copy.deepcopy(network).to("cuda")
        assert scores(CachedRNNLM(moved)) == pytest.approx(expected, abs=1e-4)
        assert moved.num_tokens_read == network.num_tokens_read
        assert sum(device.waits.values()) > 0
