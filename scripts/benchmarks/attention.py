"""`AttentionDecoder` with a small attention model: error rate against time, with and without language models.

    scripts/bench attention
    scripts/bench attention --beside-transformers

The model has 500 pieces and frames of 60 ms. The first call trains it (`scripts.benchmarks.attention_network`), and
what `scripts/bench transducer` trains if that was not called before; interrupted training goes on with the next call.
The utterances are of dev-clean-2. Language models are the trigram and the GRU of the librispeech bundle, each alone,
and both interpolated. Times are as for `scripts/bench transducer`.

With --beside-transformers, a Whisper of the size of `tiny` with random weights writes 60 tokens for ten seconds, by our
search and by `generate`. The time includes the decoder, but not the encoder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from asr.attention import AttentionDecoder
from asr.bundle import Bundle
from asr.errors import package
from asr.models.attention.transformers import TransformersAttentionModel
from scripts.benchmarks.attention_network import heard_by_attention
from scripts.benchmarks.ctc_workload import RECORDED
from scripts.benchmarks.ctc_workload import read as read_ctc
from scripts.benchmarks.inputs import LIBRISPEECH_BUNDLE, argument_parser, default_corpora
from scripts.benchmarks.transducer import MODELS, measured, ours, tune

BEAMS, NUM_TOKENS, SECONDS = (1, 2, 4, 8), 60, 10
NUM_PIECES = 51865
_PASSES = 3


def main(arguments: list[str]) -> int:
    parser = argument_parser("attention", __doc__)
    parser.add_argument("--utterances", type=int, default=41, help="number of utterances (default: 41)")
    parser.add_argument("--corpora", type=Path, default=default_corpora(), help="folder with librispeech/ and text/")
    parser.add_argument("--beams", type=int, nargs="+", default=BEAMS, help="beam sizes (default: 1 2 4 8)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="language models (default: all)")
    parser.add_argument("--tune", action="store_true", help="errors of training speakers for each choice of scales")
    parser.add_argument("--beside-transformers", action="store_true", help="times of two beam searches")
    options = parser.parse_args(arguments)
    if options.beside_transformers:
        print(json.dumps(beside_transformers(options.beams)))
        return 0
    bundle = Bundle.load(LIBRISPEECH_BUNDLE)
    tokens = read_ctc(RECORDED)["pieces"].tokens
    workload = heard_by_attention(bundle, tokens, options.corpora, None if options.tune else options.utterances)
    if options.tune:
        print(json.dumps(tune(bundle, workload, options.models)))
    else:
        print(json.dumps(measured(ours(bundle, workload.network, options.beams, options.models), workload)))
    return 0


@torch.no_grad()
def beside_transformers(beams: list[int]) -> list[dict[str, float]]:
    """CPU seconds of both searches for each beam, and one by the other."""
    model = random_whisper()
    waveform = 0.1 * torch.randn(SECONDS * model.sampling_rate, generator=torch.Generator().manual_seed(0))
    encoded, num_frames = model(waveform)
    inputs = model.inputs_of(waveform[None], torch.tensor([len(waveform)]))
    output = package("transformers.modeling_outputs", "this benchmark").BaseModelOutput(last_hidden_state=encoded)
    rows = []
    for beam in beams:
        decoder = AttentionDecoder(model, beam_size=beam, token_min_log_prob=-1e9)

        def generate(num_beams: int = beam) -> None:
            model.network.generate(
                encoder_outputs=output, input_features=inputs["input_features"], language="en", task="transcribe",
                num_beams=num_beams, max_new_tokens=NUM_TOKENS, do_sample=False,
            )  # fmt: skip

        def decode(decoder: AttentionDecoder = decoder) -> None:
            decoder(encoded, num_frames)

        own, theirs = least_time(decode), least_time(generate)
        rows.append({"beam_size": beam, "seconds": own, "of_transformers": theirs, "ratio": own / theirs})
    return rows


def least_time(run: Callable[[], None]) -> float:
    """CPU seconds, the least of some passes."""
    times = []
    for _ in range(_PASSES):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return min(times)


def random_whisper() -> TransformersAttentionModel:
    """A Whisper of the size of `tiny` whose texts do not end before their limit."""
    transformers = package("transformers", "this benchmark")
    characters = sorted(package("tokenizers.pre_tokenizers", "this benchmark").ByteLevel.alphabet())
    marks = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    pieces = [*characters, *(f"Ġ{number}" for number in range(NUM_PIECES - len(characters) - len(marks)))]
    tokenizer = transformers.WhisperTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[])
    tokenizer.add_tokens(marks, special_tokens=True)
    end, start, english, transcribe, no_times = tokenizer.convert_tokens_to_ids(marks)
    sizes: dict[str, Any] = {
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 4),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 6),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 1536),
    }
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    torch.manual_seed(0)
    config = transformers.WhisperConfig(vocab_size=len(tokenizer), d_model=384, num_mel_bins=80, **sizes, **ids)
    network = transformers.WhisperForConditionalGeneration(config)
    generation = network.generation_config
    generation.lang_to_id, generation.task_to_id = {"<|en|>": english}, {"transcribe": transcribe}
    generation.no_timestamps_token_id, generation.is_multilingual = no_times, True
    # The end is not suppressed, but hardly ever among the best tokens.
    generation.suppress_tokens, generation.begin_suppress_tokens = [start, english, transcribe, no_times], [end]
    model = TransformersAttentionModel(network, transformers.WhisperFeatureExtractor(), tokenizer, language="en")
    model.max_tokens = NUM_TOKENS
    return model
