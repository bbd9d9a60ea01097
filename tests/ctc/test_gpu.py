"""The CTC decoder on a simulated GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("kaldifst", reason="compiling graphs needs kaldifst")

from asr.ctc import CTCDecoder, CTCHypothesis
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.testing.simulated_gpu import simulated_gpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes"),
]
SYMBOLS = ["-", "a", "b", "|"]
WORDS = ["a", "ab", "b", "ba"]


def streamed(decoder: CTCDecoder, log_prob: torch.Tensor) -> CTCHypothesis:
    stream = decoder.stream()
    for chunk in log_prob.split(5):
        stream.accept(chunk)
    return stream.finish()


@pytest.mark.parametrize("lm_fusion", ["lattice", "search"])
@pytest.mark.parametrize("has_network", [False, True])
def test_it_finds_the_same(lm_fusion: str, has_network: bool, ngram_of: Callable[..., NgramLM]) -> None:
    pytest.importorskip("triton", reason="GPUs run Triton's kernels")
    ngram = ngram_of(["a ab b", "ba a", "b b ab a", "ab"], WORDS, order=3)
    torch.manual_seed(0)
    sizes = RNNLMConfig(embedding_size=8, hidden_size=8)
    lm = RNNLanguageModel(ngram.vocabulary, sizes).eval() if has_network else None
    log_prob = (2.0 * torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(0))).log_softmax(2)
    found = []
    for device in ("cpu", "cuda"):
        with simulated_gpu():
            decoder = CTCDecoder(
                SYMBOLS, ngram=ngram, lm=lm, lm_fusion=lm_fusion, graph_ngrams=6, device=device, warm_up=False
            )
            results: Any = decoder(log_prob.to(device), torch.tensor([12, 9, 0]), nbest=2)
            found.append([*itertools.chain(*results), streamed(decoder, log_prob[0].to(device))])
    for ours, theirs in zip(*found, strict=True):
        assert ours.text == theirs.text and ours.score == pytest.approx(theirs.score, abs=1e-4)
    assert found[0][0].text
