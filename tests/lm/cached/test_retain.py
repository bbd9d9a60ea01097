"""Marks of live contexts reach the engine through every model that stands before it."""

import pytest
import torch

from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import Difference, Interpolated, RemappedLM
from asr.text.symbols import Vocabulary
from tests.reference.toy_network import ToyNetwork


@pytest.mark.slow
def test_marks_pass_through_mapping_interpolation_and_difference():
    engine = CachedRNNLM(ToyNetwork(num_words=60), CacheOptions(capacity_bytes=10_000))
    words = Vocabulary([f"w{i}" for i in range(50)])
    mapped = RemappedLM(engine, words)
    second = RemappedLM(CachedRNNLM(ToyNetwork(num_words=60, seed=1)), words)
    model = Difference(Interpolated([mapped, second], [0.5, 0.5]), second)
    context = model.start(20)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        _, next_idx = model.score(context, torch.randint(3, 54, (20,), generator=generator))
        context = next_idx[torch.randint(0, 20, (20,), generator=generator)]
        model.retain(context)
    assert engine.statistics().num_evictions > 0
