"""The search of transducers with the networks on a simulated GPU."""

from __future__ import annotations

import pytest
import torch

from asr.testing.simulated_gpu import simulated_gpu
from asr.text.symbols import Vocabulary
from asr.transducer import TransducerDecoder
from tests.reference.table_lm import TableLM
from tests.reference.toy_transducer import ToyTransducer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes"),
]


@pytest.mark.parametrize("durations", [(), (0, 1, 2)])
def test_hypotheses_are_those_of_a_cpu(durations: tuple[int, ...]) -> None:
    encoded = torch.randn(3, 12, 6, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([12, 5, 9])
    network, model = ToyTransducer(["▁a", "b", "<blk>", "▁b"], durations), TableLM(Vocabulary(["a", "ab"]))
    arguments = {"lm": model, "internal_lm_scale": 0.1, "beam_size": 4}
    expected = TransducerDecoder(network, **arguments)(encoded, lengths, nbest=3)
    with simulated_gpu() as device:
        moved = TransducerDecoder(network.to(torch.device("cuda")), **arguments)
        assert moved.network.device.type == "cuda"
        found = moved(encoded.to("cuda"), lengths, nbest=3)
        assert sum(device.waits.values()) > 0
    for own, wanted in zip(found, expected, strict=True):
        assert [each.tokens for each in own] == [each.tokens for each in wanted]
        assert [each.score for each in own] == pytest.approx([each.score for each in wanted], abs=1e-3)
