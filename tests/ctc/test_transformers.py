"""A speech pipeline of transformers and a processor with this decoder, on a tiny random network."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asr.ctc.pyctcdecode import build_ctcdecoder
from asr.ctc.transformers import CTCProcessorWithLM, decoder_for_tokenizer, labels_of
from asr.errors import AsrError
from asr.lm.ngram.model import NgramLM

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

WORDS = ["BAD", "BEAD", "CAB"]


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Any, Any, Any]:
    """A network, its feature extractor and its tokenizer."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, **{x: 5 + n for n, x in enumerate("ABCDE")}}
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(vocabulary))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(path))
    extractor = transformers.Wav2Vec2FeatureExtractor(feature_size=1, sampling_rate=16000, padding_value=0.0)
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        vocab_size=10, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8, 8), conv_stride=(10, 8), conv_kernel=(10, 8), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config).eval(), extractor, tokenizer


@pytest.fixture
def arpa(ngram_of: Callable[..., NgramLM], arpa_file: Callable[[NgramLM], Path]) -> Path:
    return arpa_file(ngram_of(["BAD CAB", "BEAD"], WORDS, order=2))


def waveform(seconds: float = 0.5) -> np.ndarray:
    return np.random.default_rng(0).normal(size=int(16000 * seconds)).astype(np.float32)


def test_pipeline(parts: tuple[Any, Any, Any], arpa: Path) -> None:
    network, extractor, tokenizer = parts
    decoder = decoder_for_tokenizer(tokenizer, arpa)
    pipe = transformers.AutomaticSpeechRecognitionPipeline(
        model=network, feature_extractor=extractor, tokenizer=tokenizer, decoder=decoder
    )
    found = pipe(waveform(), return_timestamps="word")
    inputs = extractor(waveform(), sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        logits = network(**inputs).logits[0].numpy()
    beams = decoder.decode_beams(logits)
    assert found["text"] == beams[0][0]
    assert [chunk["text"] for chunk in found["chunks"]] == beams[0][0].split()
    hot = pipe(waveform(), decoder_kwargs={"hotwords": ["DEAD"], "hotword_weight": 50.0})
    assert hot["text"] == decoder.decode(logits, hotwords=["DEAD"], hotword_weight=50.0)


def test_processor(parts: tuple[Any, Any, Any], arpa: Path, tmp_path: Path) -> None:
    network, extractor, tokenizer = parts
    processor = CTCProcessorWithLM(extractor, tokenizer, decoder_for_tokenizer(tokenizer, arpa))
    inputs = processor(waveform(), sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        logits = network(**inputs).logits.numpy()
    assert processor.batch_decode(network(**inputs).logits) == processor.batch_decode(logits)  # with gradients
    assert processor.decode(network(**inputs).logits[0]) == processor.decode(logits[0])
    few = processor.decode(logits[0], 3, -5.0, output_word_offsets=True, n_best=9)
    assert few.text == [beam[0] for beam in processor.decoder.decode_beams(logits[0], 3, -5.0)] != [few.text[0]]
    theirs = transformers.Wav2Vec2ProcessorWithLM
    own, batch, one = (
        [*inspect.signature(method).parameters]
        for method in (processor.batch_decode, theirs.batch_decode, theirs.decode)
    )
    assert own == batch[1:] and own[3:] == one[2:]
    padded = np.concatenate([logits, np.full((1, 5, 10), -100.0, dtype=np.float32)], axis=1)
    one = processor.decode(logits[0], output_word_offsets=True)
    both = processor.batch_decode(np.concatenate([padded, padded]), output_word_offsets=True, n_best=3)
    assert both.text[0] == both.text[1]
    assert both.text[0][0] == one.text
    assert [each["word"] for each in one.word_offsets] == one.text.split()
    assert both.word_offsets[0][0] == one.word_offsets
    folder = tmp_path / "processor"
    processor.save_pretrained(folder)
    again = CTCProcessorWithLM.from_pretrained(folder)
    assert again.decode(logits[0]) == processor.decode(logits[0])
    assert processor(text="BAD CAB")["input_ids"] == tokenizer("BAD CAB")["input_ids"]
    assert processor(waveform(), text="BAD", sampling_rate=16000)["labels"] == tokenizer("BAD")["input_ids"]
    everything = 20, -10.0, -5.0, ["CAB"], 8.0, 0.4, 1.0, -9.0, False, True, 2
    assert processor.decode(logits[0], *everything).text == processor.batch_decode(logits, None, 1, *everything).text[0]


def test_what_does_not_fit_is_told(parts: tuple[Any, Any, Any]) -> None:
    _, extractor, tokenizer = parts
    assert labels_of(tokenizer) == ["", "<s>", "</s>", "⁇", " ", *"ABCDE"]
    with pytest.raises(AsrError, match="not in the decoder's alphabet"):
        CTCProcessorWithLM(extractor, tokenizer, build_ctcdecoder(["", " ", "A"]))
    processor = CTCProcessorWithLM(extractor, tokenizer, decoder_for_tokenizer(tokenizer))
    with pytest.raises(AsrError, match="give audio, a text, or both"):
        processor()
