"""Decoding: agreement of the decoders, their times and word errors, cost and gain of the recurrent language model.

    scripts/bench decode --quick      # under a minute; the last line is one JSON object
    scripts/bench decode              # the papers' tables and other decoders as well; with --plots FOLDER figures
    scripts/bench decode --log-probs FILE.npz --references FILE

Without your own frames (npz: utterance id -> (T, C); lines `id words`) it decodes dev-clean-2, or the demo's clips if
the corpora are missing. Times are CPU seconds of this process, both sides of a ratio in one run, the faster of two;
loading of graphs and models and compilation of loops are excluded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.decoding.build import language_models, recognition_settings
from asr.decoding.interface import DecodeResult, LanguageModels
from asr.decoding.online import StreamingDecoder
from asr.decoding.settings import DecodingOptions, ResourceOptions, Settings
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from scripts.benchmarks import decode_tables
from scripts.benchmarks.decode_workload import (
    RNN_BEAMS,
    Workload,
    best_first_pass,
    best_of,
    decode_all,
    given,
    heard,
    lesser,
    word_error_rate,
)
from scripts.benchmarks.inputs import LIBRISPEECH_BUNDLE, argument_parser, default_corpora
from scripts.benchmarks.nbest import measure_n_best, middle_sized
from scripts.benchmarks.speech import recordings

# Beams so wide that pruning cannot tell two passes apart.
WIDE = {"search_beam": 30.0, "max_active_states": 20_000}
# With --quick, sentence-by-sentence rescoring is timed on every 4th sentence.
_SAMPLED = 4


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("decode", __doc__)
    parser.add_argument("--quick", action="store_true", help="few utterances and no tables")
    parser.add_argument("--bundle", type=Path, default=LIBRISPEECH_BUNDLE)
    parser.add_argument("--corpora", type=Path, default=default_corpora(), help="(default: %(default)s)")
    parser.add_argument("--log-probs", type=Path, help="npz: utterance id -> (T, C) natural log-probabilities")
    parser.add_argument("--references", type=Path, help="lines with utterance id and words")
    parser.add_argument("--every", type=int, help="every n-th utterance (default of dev-clean-2: 6, 10 with --quick)")
    parser.add_argument("--tables", nargs="+", help="some of: " + ", ".join(decode_tables.TABLES))
    parser.add_argument("--plots", type=Path, help="folder for figures (needs matplotlib)")
    args = parser.parse_args(argv)
    names = args.tables or list(decode_tables.TABLES)
    for name in names:
        if name not in decode_tables.TABLES:
            raise AsrError(f"there is no table {name!r}; there are {', '.join(decode_tables.TABLES)}.")
    torch.set_num_threads(1)
    bundle = Bundle.load(args.bundle)
    workload = chosen_workload(args, bundle)
    if bundle.rnn_lm is None or bundle.small_ngram is None:
        raise AsrError(f"{args.bundle}: the bundle has no recurrent language model; name one that has one.")
    with torch.no_grad():
        warm_up(bundle, workload)
        if not args.quick:
            decode_tables.run_tables(bundle, workload, names, args.corpora, args.plots)
        if args.quick or not args.tables:
            print(json.dumps(quick(bundle, workload, _SAMPLED if args.quick else 1)))
    return 0


def chosen_workload(args: argparse.Namespace, bundle: Bundle) -> Workload:
    if (args.log_probs is None) != (args.references is None):
        raise AsrError("--log-probs and --references belong together; give both or neither.")
    if args.log_probs is not None:
        return given(bundle, args.log_probs, args.references, args.every or 1)
    every = args.every or (10 if args.quick else 6)
    name, speech = recordings(args.corpora)
    return heard(bundle, name, speech[::every] if name == "dev-clean-2" else speech)


def warm_up(bundle: Bundle, workload: Workload) -> None:
    """Compiles numba's loops and touches the models once."""
    some = [min(workload.frames, key=len)[:20]]
    settings = recognition_settings(bundle, "rnn", {})
    options, models = settings.decoding, users_models(bundle, settings)
    decode_all(TokenPassingDecoder(bundle.graph, options), some)
    decode_all(TokenPassingDecoder(bundle.graph, options, lm_fusion="lattice"), some, models.model)
    decode_all(best_first_pass(bundle.graph, options, rescores=True), some, models.model)


def users_models(bundle: Bundle, settings: Settings) -> LanguageModels:
    """New language models on the CPU, with the bundle's approximations and the memory that users have by default."""
    cache = replace(settings.cache, capacity_bytes=ResourceOptions().cache_bytes)
    return language_models(bundle, "rnn", settings.language_models.rnn_weight, torch.device("cpu"), cache)


def quick(bundle: Bundle, workload: Workload, sampled: int) -> dict[str, Any]:
    """The figures of the JSON line."""
    report: dict[str, Any] = {"bundle": bundle.name, "frames": workload.name}
    report |= {
        "num_utterances": len(workload.frames),
        "num_frames": workload.num_frames,
        "num_words": workload.num_words,
    }
    options = recognition_settings(bundle, "ngram", {}).decoding
    torch_results, torch_seconds = lesser(
        lambda: decode_all(TokenPassingDecoder(bundle.graph, options), workload.frames)
    )
    ngram_results, ngram_seconds = lesser(lambda: decode_all(best_first_pass(bundle.graph, options), workload.frames))
    report["wer_ngram"] = word_error_rate(workload, best_of(ngram_results))
    report["ngram_ms_per_frame"] = 1e3 * ngram_seconds / workload.num_frames
    report["torch_ms_per_frame"] = 1e3 * torch_seconds / workload.num_frames
    has_k2 = type(best_first_pass(bundle.graph, options)).__name__ == "K2Decoder"
    report["torch_over_k2_time"] = torch_seconds / ngram_seconds if has_k2 else None
    report["same_words_torch_k2"] = same_words(torch_results, ngram_results) if has_k2 else None
    report["best_score_max_diff"], report["compared_with"] = agreement(bundle, options, workload)
    for suffix, beams in (("", RNN_BEAMS), ("_bundle_beams", {})):
        settings = recognition_settings(bundle, "rnn", beams)
        rnn_options = settings.decoding
        first_pass = best_first_pass(bundle.graph, rnn_options, rescores=True)

        def with_rnn_lm(first_pass: Any, settings: Settings = settings) -> tuple[Any, float]:
            # An engine of its own: what another run has computed must not be found again.
            models = users_models(bundle, settings)
            assert models.engine is not None
            results, seconds = decode_all(first_pass, workload.frames, models.model)
            return (results, models.engine.statistics()), seconds

        (results, counts), seconds = lesser(partial(with_rnn_lm, first_pass))
        report["wer_rnnlm" + suffix] = word_error_rate(workload, best_of(results))
        report["rnnlm_over_ngram_time" + suffix] = seconds / ngram_seconds
        (torch_results, _), seconds = lesser(
            partial(with_rnn_lm, TokenPassingDecoder(bundle.graph, rnn_options, lm_fusion="lattice"))
        )
        report["torch_wer_rnnlm" + suffix] = word_error_rate(workload, best_of(torch_results))
        report["torch_rnnlm_over_ngram_time" + suffix] = seconds / torch_seconds
        report["torch_rnnlm_ms_per_frame" + suffix] = 1e3 * seconds / workload.num_frames
        report["hidden_rows_per_word" + suffix] = counts.num_hidden_rows / workload.num_words
        report["options" + suffix] = beams or asdict(rnn_options)
        if beams:
            # What the network adds: both searches have the same beams and weigh the frames alike.
            narrow = recognition_settings(bundle, "ngram", {"am_scale": rnn_options.am_scale, **beams}).decoding
            for name, decoder, with_rnn in (
                ("rnnlm", best_first_pass(bundle.graph, narrow), report["rnnlm_over_ngram_time"] * ngram_seconds),
                ("torch_rnnlm", TokenPassingDecoder(bundle.graph, narrow), seconds),
            ):
                _, alone = lesser(partial(decode_all, decoder, workload.frames))
                report[f"{name}_over_ngram_time_same_beams"] = with_rnn / alone
    report |= measure_n_best(bundle, middle_sized(workload.frames), sampled)
    report["chunked_equals_whole"] = chunked_equals_whole(bundle, workload.frames[:3])
    return report


def agreement(bundle: Bundle, options: DecodingOptions, workload: Workload) -> tuple[float | None, list[str]]:
    """The largest difference between the best totals of the torch pass and the other available decoders, wide beams."""
    some = sorted(workload.frames, key=len)[:2]
    wide = replace(options, **WIDE)  # type: ignore[arg-type]
    own = [
        one.best.total for one in decode_all(TokenPassingDecoder(bundle.graph, wide), some)[0] if one.best is not None
    ]
    others: dict[str, list[float]] = {}
    try:
        from asr.decoding.k2 import K2Decoder

        results = decode_all(K2Decoder(bundle.graph, wide), some)[0]
        others["k2"] = [one.best.total for one in results if one.best is not None]
    except AsrError as error:
        print(f"without k2: {error}", file=sys.stderr)
    try:
        from asr.testing.kaldi_search import KaldiSearch

        search = KaldiSearch(bundle.graph, beam=wide.search_beam, max_active=wide.max_active_states)
        found = [search.decode(log_prob * wide.am_scale) for log_prob in some]
        others["kaldi-decoder"] = [total for _, total in filter(None, found)]
    except ImportError as error:
        print(f"without kaldi-decoder: {error}", file=sys.stderr)
    differences = [abs(a - b) for totals in others.values() for a, b in zip(own, totals, strict=True)]
    return (max(differences) if differences else None), list(others)


def same_words(one: Sequence[DecodeResult], other: Sequence[DecodeResult]) -> int:
    pairs = zip(best_of(one), best_of(other), strict=True)
    return sum(a is not None and b is not None and a.word_ids == b.word_ids for a, b in pairs)


def chunked_equals_whole(bundle: Bundle, frames: list[Tensor]) -> bool:
    options = recognition_settings(bundle, "ngram", {}).decoding
    whole, _ = decode_all(TokenPassingDecoder(bundle.graph, options), frames)
    decoder = StreamingDecoder(bundle.graph, options)
    streams = decoder.start(len(frames))
    for size, stream, log_prob in zip((1, 7, 30), streams, frames, strict=False):
        for begin in range(0, len(log_prob), size):
            chunk = log_prob[begin : begin + size]
            decoder.advance([stream], chunk.unsqueeze(0), torch.tensor([len(chunk)]))
    chunked = [decoder.finalize(stream) for stream in streams]
    return all(
        one.best is not None
        and other.best is not None
        and one.best.word_ids == other.best.word_ids
        and abs(one.best.total - other.best.total) < 1e-3
        for one, other in zip(whole, chunked, strict=True)
    )
