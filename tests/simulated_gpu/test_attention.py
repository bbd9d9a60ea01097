"""The search of attention models with the networks on a simulated GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asr.attention import AttentionDecoder
from asr.testing.simulated_gpu import simulated_gpu
from asr.text.symbols import Vocabulary
from tests.models.test_attention_transformers import BATCH, KINDS, model
from tests.reference.table_lm import TableLM
from tests.reference.toy_attention import ToyAttention

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes"),
]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for own, wanted in zip(found, expected, strict=True):
        assert [each.tokens for each in own] == [each.tokens for each in wanted]
        assert [each.score for each in own] == pytest.approx([each.score for each in wanted], abs=1e-3)


def test_hypotheses_are_those_of_a_cpu() -> None:
    encoded = torch.randn(3, 12, 6, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([12, 5, 9])
    network, lm = ToyAttention(["▁a", "b", "<blk>", "▁b"], end_bias=-4.0), TableLM(Vocabulary(["a", "ab"]))
    arguments = {"lm": lm, "internal_lm_scale": 0.1, "beam_size": 4}
    expected = AttentionDecoder(network, **arguments)(encoded, lengths, nbest=3)
    with simulated_gpu() as device:
        moved = AttentionDecoder(network.to(torch.device("cuda")), **arguments)
        assert moved.network.device.type == "cuda"
        found = moved(encoded.to("cuda"), lengths, nbest=3)
        assert sum(device.waits.values()) > 0
    assert_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_networks_of_transformers(kind: str) -> None:
    own = model(pytest.importorskip("transformers"), kind, seed=2)
    expected = AttentionDecoder(own, beam_size=2, internal_lm_scale=0.1)(*own(BATCH))
    with simulated_gpu():
        moved = AttentionDecoder(own.to(torch.device("cuda")), beam_size=2, internal_lm_scale=0.1)
        encoded, num_frames = own(BATCH)
        assert encoded.device.type == "cuda"
        found = moved(encoded, num_frames)
    assert_equal(found, expected)
