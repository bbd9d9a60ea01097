"""A causal Transformer on a simulated GPU: histories stay on the host, keys and values on the device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from asr.decoding.settings import ResourceOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.transformers import TransformerNetwork
from asr.recognizer import Recognizer
from asr.testing.simulated_gpu import simulated_gpu
from asr.testing.tones import RATE, tones
from asr.text.symbols import Vocabulary

toy = pytest.importorskip("tests.reference.toy_transformer")

pytestmark = pytest.mark.slow

VOCABULARY = Vocabulary(["THE", "QUICK", "BROWN", "FOX", "DON'T", "DOG"])


def scores(lm: CachedRNNLM) -> list[float]:
    """Of all pairs of words and their ends."""
    words = torch.cartesian_prod(torch.arange(4, 10), torch.arange(4, 10))
    context_idx, total = lm.start(len(words)), torch.zeros(len(words))
    for word_id in words.unbind(1):
        log_prob, context_idx = lm.score(context_idx, word_id)
        total = total + log_prob
    found: list[float] = (total + lm.final(context_idx)).tolist()
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


def test_a_recognizer_runs_it_where_it_is_itself(
    tiny_bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in `test_recognition`: the interpreter is slow.
    monkeypatch.setattr("asr.decoding.gpu.frame.FIRST_CAPACITY", 512)
    monkeypatch.setattr("asr.recognizer.needs_warm_up", lambda *_: False)
    toy.saved(tmp_path)
    samples = tones(["KIT", "TWO"])[1200:-1200]
    resources = ResourceOptions(acoustic_precision="float32")
    recognizer = Recognizer.from_folder(
        *(tiny_bundle_folder, None, f"transformers:{tmp_path}"), mode="rnn", resources=resources
    )
    (expected,) = recognizer(samples, RATE)
    with simulated_gpu():
        (found,) = recognizer.to("cuda")(samples, RATE)
        assert recognizer.recurrent_model is not None
        assert next(recognizer.recurrent_model.parameters()).device.type == "cuda"
        assert found.text == expected.text and found.lm_score == pytest.approx(expected.lm_score, abs=1e-3)
        recognizer.to("cpu")
    assert recognizer(samples, RATE)[0].text == expected.text
