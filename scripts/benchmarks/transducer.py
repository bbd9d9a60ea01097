"""`TransducerDecoder` with a small transducer: error rate against time, with and without language models.

    scripts/bench transducer --quick
    scripts/bench transducer --utterances 41

The transducer has 500 pieces and frames of 60 ms. The first call trains it (`scripts.benchmarks.transducer_network`) in
45 minutes of one core, and seven more if `scripts/bench ctc --train` has not made what it reads. Interrupted training
goes on with the next call. The utterances are of dev-clean-2. Language models are the trigram and the GRU of the
librispeech bundle, each alone, and both interpolated. torchaudio's RNNTBeamSearch, where it is installed, decodes the
same networks without a language model; it divides scores by length, as by default, or not.

Times are CPU seconds of this process for each second of audio, without the encoder, one utterance at a time on one
thread: the least of three passes, or of fewer that take two seconds together. With the GRU there is only one pass,
because it caches scores. `rtf_batch` is the time of one call with all utterances.

With --quick there are eight utterances and one beam. Their encoded frames and the networks are stored next to this
module by `--record`. The last line is one JSON object with, for the beam `beam_size`:

- `wer_greedy`, `wer_beam`, `wer_ngram`, `wer_rnn`, `wer_both`: word error rates in %;
- `decoding_rtf`, `decoding_rtf_ngram`, `decoding_rtf_rnn`, `decoding_rtf_both`: seconds for each second of audio;
- `wer_torchaudio`, `time_over_torchaudio`: errors of the peer without a language model and, at equal beams, our time
  divided by its time; null where it is not installed.

Scales are the decoder's defaults, which were chosen on two held-out training speakers. `--tune` prints the errors of
these for other choices.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr.attention import AttentionDecoder
from asr.bundle import Bundle
from asr.ctc import CTCTokens
from asr.ctc.word_models import listed_words
from asr.errors import AsrError
from asr.fusion.decoder import FusionDecoder
from asr.metrics import NO_ERRORS, count_errors
from asr.models.attention import AttentionModel
from asr.models.transducers import Transducer
from asr.transducer import TransducerDecoder
from scripts.benchmarks.ctc_workload import RECORDED as CTC_RECORDED
from scripts.benchmarks.ctc_workload import read as read_ctc
from scripts.benchmarks.inputs import LIBRISPEECH_BUNDLE, argument_parser, default_corpora
from scripts.benchmarks.peers import transducer as peers
from scripts.benchmarks.report import table
from scripts.benchmarks.transducer_network import greedy
from scripts.benchmarks.transducer_workload import RECORDED, EncodedWorkload, heard, heard_held, read, write

BEAMS, QUICK_BEAMS, TUNING_BEAM = (1, 2, 4, 8, 16), (8,), 8
NEURAL_WEIGHT = 0.85
GREEDY = "greedy"
# Whether hypotheses are compared by their scores divided by their lengths.
PEERS = {"torchaudio": True, "torchaudio, not by length": False}
MODELS = ("none", "trigram", "GRU", "GRU and trigram")
# Of lm_scale, internal_lm_scale and word_insertion_penalty, by `--tune`.
TRIED = ((0.25, 0.35, 0.5, 0.75), (0.0, 0.1, 0.2, 0.3, 0.4), (0.0, 1.0))
_MOST_PASSES, _MOST_SECONDS = 3, 2.0
_JSON_NAMES = {"none": "", "trigram": "_ngram", "GRU": "_rnn", "GRU and trigram": "_both"}
Decode = Callable[[Tensor, Tensor], list[list[str]]]
"""Encoded (N, T, WIDTH) and frames (N,) -> words of each utterance."""


class System(NamedTuple):
    """A decoder; if it caches scores, it can be measured once only."""

    name: str
    beam: int
    make: Callable[[], Decode]
    caches: bool = False
    has_batches: bool = False


def main(arguments: list[str]) -> int:
    parser = argument_parser("transducer", __doc__)
    parser.add_argument("--quick", action="store_true", help="the stored utterances and one beam, under a minute")
    parser.add_argument("--utterances", type=int, help="number of utterances (default: 41, with --quick 8)")
    parser.add_argument("--corpora", type=Path, default=default_corpora(), help="folder with librispeech/ and text/")
    parser.add_argument("--beams", type=int, nargs="+", help="beam sizes (default: 1 2 4 8 16, with --quick 8)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="language models (default: all)")
    parser.add_argument("--tune", action="store_true", help="errors of training speakers for each choice of scales")
    parser.add_argument(
        "--record", action="store_true", help="store eight utterances next to this module, replacing earlier ones"
    )
    options = parser.parse_args(arguments)
    if options.quick and (options.tune or options.record):
        raise AsrError("--quick has stored utterances only; leave it out with --tune and --record.")
    bundle = Bundle.load(LIBRISPEECH_BUNDLE)
    if options.quick:
        workload = read(RECORDED)
    else:
        tokens = read_ctc(CTC_RECORDED)["pieces"].tokens
        if options.tune:
            print(json.dumps(tune(bundle, heard_held(bundle, tokens, options.corpora), options.models)))
            return 0
        workload = heard(bundle, tokens, options.corpora, options.utterances or 41)
        if options.record:
            write(heard(bundle, tokens, options.corpora, 8), RECORDED)
    workload = workload.first(options.utterances or len(workload.encoded))
    beams = options.beams or (QUICK_BEAMS if options.quick else BEAMS)
    print(json.dumps(measure(bundle, workload, beams, options.models)))
    return 0


def measure(
    bundle: Bundle, workload: EncodedWorkload, beams: Sequence[int], models: Sequence[str]
) -> dict[str, float | int | str | None]:
    """The figures; prints tables."""
    rows = measured(systems(bundle, workload, beams, models), workload)
    return summary(rows, workload, beams[0] if len(beams) == 1 else TUNING_BEAM)


def measured(systems: Iterable[System], workload: EncodedWorkload) -> list[dict[str, Any]]:
    """Measures systems whose packages are installed, and prints a table."""
    rows = []
    for system in systems:
        try:
            row = {"system": system.name, "beam": system.beam, **run(system, workload)}
        except ImportError:
            continue
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    table(f"{workload.name}: {len(workload.encoded)} utterances, {workload.num_seconds:.0f} s", rows)
    return rows


def systems(bundle: Bundle, workload: EncodedWorkload, beams: Sequence[int], models: Sequence[str]) -> Iterator[System]:
    """The greedy search, ours with each model and beam, and the peers."""
    network = workload.network

    def of_columns(find: Callable[[Tensor], Sequence[int]]) -> Decode:
        return lambda encoded, lengths: [words_of(network.tokens, find(own)) for own in encoded]

    def of_peer(by_length: bool, beam: int) -> Decode:
        return of_columns(peers.torchaudio(network, by_length)(beam))

    search = functools.partial(greedy, network.networks, blank=network.tokens.blank_id)
    yield System(GREEDY, 1, functools.partial(of_columns, search))
    yield from ours(bundle, network, beams, models)
    for (name, by_length), beam in itertools.product(PEERS.items(), beams):
        yield System(name, beam, functools.partial(of_peer, by_length, beam))


def ours(
    bundle: Bundle, network: Transducer | AttentionModel, beams: Sequence[int], models: Sequence[str]
) -> Iterator[System]:
    """Our decoder with each model and beam."""

    def make(model: str, beam: int) -> Decode:
        decoder = decoder_of(bundle, network, model, None, beam)
        return lambda encoded, lengths: [text.split() for text in decoder.texts(encoded, lengths)]

    for model, beam in itertools.product(models, beams):
        yield System(model, beam, functools.partial(make, model, beam), caches="GRU" in model, has_batches=True)


def decoder_of(
    bundle: Bundle, network: Transducer | AttentionModel, model: str, scales: Sequence[float] | None, beam: int
) -> FusionDecoder:
    """Our decoder with one of `MODELS` and its scales, or the defaults."""
    ngram = bundle.small_ngram
    assert ngram is not None
    settings: dict[str, Any] = {"beam_size": beam}
    if scales is not None:
        settings |= dict(zip(("lm_scale", "internal_lm_scale", "word_insertion_penalty"), scales, strict=True))
    if model == "GRU":
        settings |= {"words": listed_words(ngram), "lm": bundle}
    elif model == "trigram":
        settings |= {"ngram": ngram}
    elif model == "GRU and trigram":
        settings |= {"ngram": ngram, "lm": bundle, "lm_weight": NEURAL_WEIGHT}
    return (TransducerDecoder if isinstance(network, Transducer) else AttentionDecoder)(network, **settings)


def words_of(tokens: CTCTokens, columns: Sequence[int]) -> list[str]:
    """The words of pieces."""
    entries = [tokens.columns.index(column) for column in columns]
    return [tokens.text_of(*entries[begin:end]) for begin, end in tokens.group(entries)]


def run(system: System, workload: EncodedWorkload) -> dict[str, float | str]:
    """Word error rate in %, and CPU seconds for each second of audio: one at a time in the fastest pass, and a batch.

    Raises:
        ImportError: its package is not installed.
    """

    def begun() -> Decode:
        decode = system.make()
        decode(workload.encoded[0][None, :20], torch.tensor([min(20, len(workload.encoded[0]))]))
        return decode

    decode, times = begun(), list[float]()
    while len(times) < (1 if system.caches else _MOST_PASSES) and sum(times) < _MOST_SECONDS:
        begin = time.process_time()
        found = [decode(own[None], torch.tensor([len(own)]))[0] for own in workload.encoded]
        times.append(time.process_time() - begin)
    rates = {"wer": error_rate(workload.references, found), "rtf": min(times) / workload.num_seconds}
    if not system.has_batches:
        return {**rates, "rtf_batch": ""}
    decode, batch = begun(), workload.batch
    begin = time.process_time()
    decode(*batch)
    return {**rates, "rtf_batch": (time.process_time() - begin) / workload.num_seconds}


def error_rate(references: Iterable[Sequence[str]], found: Iterable[Sequence[str]]) -> float:
    """Word errors in %."""
    pairs = zip(references, found, strict=True)
    return 100.0 * sum((count_errors(tuple(right), tuple(own)) for right, own in pairs), NO_ERRORS).rate


def tune(bundle: Bundle, workload: EncodedWorkload, models: Sequence[str]) -> list[dict[str, Any]]:
    """Word error rates in % for each choice of scales."""
    rows = []
    for model in models:
        for scales in [None] if model == MODELS[0] else [None, *itertools.product(*TRIED)]:
            decoder = decoder_of(bundle, workload.network, model, scales, TUNING_BEAM)
            texts = [text.split() for text in decoder.texts(*workload.batch)]
            lm_scale, internal, word = scales or ("default", "", "")
            row = {"system": model, "lm_scale": lm_scale, "internal_lm_scale": internal, "word_score": word}
            rows.append({**row, "wer": error_rate(workload.references, texts)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    table(f"{workload.name}: {len(workload.encoded)} utterances, {workload.num_seconds:.0f} s", rows)
    return rows


def summary(
    rows: Sequence[Mapping[str, Any]], workload: EncodedWorkload, beam: int
) -> dict[str, float | int | str | None]:
    """The JSON object, for one beam."""
    by_name = {row["system"]: row for row in rows if row["beam"] == beam or row["system"] == GREEDY}
    found: dict[str, Any] = {
        "data": workload.name,
        "num_seconds": round(workload.num_seconds, 2),
        "beam_size": beam,
        "wer_greedy": by_name[GREEDY]["wer"],
    }
    for name, suffix in _JSON_NAMES.items():
        row = by_name.get(name, {"wer": None, "rtf": None})
        found |= {f"wer{suffix or '_beam'}": row["wer"], f"decoding_rtf{suffix}": row["rtf"]}
    own, peer = by_name.get("none"), by_name.get(next(iter(PEERS)))
    found["wer_torchaudio"] = None if peer is None else peer["wer"]
    found["time_over_torchaudio"] = None if own is None or peer is None else own["rtf"] / peer["rtf"]
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}
