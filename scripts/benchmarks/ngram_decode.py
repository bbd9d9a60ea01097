"""Word error rate and time with language models of growing size, each replacing the graph's trigram.

    scripts/bench ngram-decode --cuts librispeech_dev-clean-2.jsonl.gz --bundle librispeech \\
        --large-ngram 4gram.ngram --pruned-ngram 4gram.pruned.1000k.arpa --pruned-graph 4gram.pruned.safetensors

The systems are: the trigram of the bundle's graph alone; the pruned 4-gram on the fly, and compiled into a separate
graph; the large 4-gram on the fly, with all of it on the device, only what finds its arcs, or a tenth of its size as
budget; the recurrent model with all of its tables or a tenth of them on the device, and interpolated with the large
4-gram. The acoustic model runs once; then every system decodes every batch of utterances in turn, so that other load
affects all alike. Times are CPU seconds of the search with its language model. Prints one JSON line per system.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.bundle import Bundle, bundle_folder
from asr.datasets.cuts import cut_text, cut_waveform, read_cuts
from asr.decoding.build import OLD_FIRST_PASSES, build_decoder, language_models, recognition_settings
from asr.decoding.interface import Decoder
from asr.decoding.settings import DecodingOptions
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import Difference, RemappedLM, mapped_to
from asr.lm.interface import LanguageModel
from asr.lm.ngram.io import load_ngram_lm, read_ngram_lm
from asr.lm.offload import HostNgramLM, HostTable, bytes_to_find_arcs, table_bytes, with_host_tables
from asr.metrics import bootstrap_interval, score_transcripts
from asr.recognizer import Recognizer
from asr.results import StageTimes
from scripts.benchmarks.inputs import argument_parser

CPU = torch.device("cpu")
REFERENCE = "trigram"
_CACHE_BYTES = 1 << 30  # of each recurrent model


@dataclass
class System:
    """A first pass with a language model, and what it has found so far."""

    first_pass: Decoder
    lm: LanguageModel | None
    placed: dict[str, HostNgramLM | HostTable] = field(default_factory=dict)
    cpu_s: float = 0.0
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def decode(self, names: list[str], log_prob: Tensor, num_frames: Tensor) -> float:
        """Decodes a batch; CPU seconds."""
        cpu = time.process_time()
        results = self.first_pass.decode(log_prob, num_frames, self.lm)
        cpu = time.process_time() - cpu
        if self.lm is not None:
            # No history is held from one batch to the next: caches may make room.
            self.lm.retain(num_frames.new_empty(0))
        for name, result in zip(names, results, strict=True):
            self.words[name] = result.best.words if result.best is not None else ()
        return cpu


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("ngram-decode", __doc__)
    parser.add_argument("--cuts", required=True, help="manifest of 'asr prepare'")
    parser.add_argument("--bundle", default="librispeech")
    parser.add_argument("--large-ngram", required=True, type=Path, help="binary n-gram model")
    parser.add_argument("--pruned-ngram", type=Path, help="the model that --pruned-graph was compiled from")
    parser.add_argument("--pruned-graph", type=Path, help="decoding graph of 'asr graph'")
    parser.add_argument("--first-pass", choices=list(OLD_FIRST_PASSES)[1:], default="torch")
    parser.add_argument("--systems", nargs="+", help="only these systems, and the trigram")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="stop after about this time, with the results so far"
    )
    parser.add_argument("--repeats", type=int, default=1, help="decode each batch this many times; the fastest counts")
    parser.add_argument("--batch", type=int, default=8, help="utterances decoded together")
    parser.add_argument(
        "--skip-beam", type=float, default=math.inf, help="torch-search: beam of the words that are queried"
    )
    parser.add_argument("--output-beam", type=float, default=7.0, help="k2, torch: beam of the rescored lattice")
    parser.add_argument("--context-beam", type=float, default=8.0, help="k2, torch: beam of word histories")
    parser.add_argument("--log-probs", type=Path, help="file to store the network's outputs in for the next run")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    bundle = Bundle.load(bundle_folder(args.bundle))
    if args.log_probs is not None and args.log_probs.exists():
        references, batches, am_s = torch.load(args.log_probs)
    else:
        references, batches, am_s = _log_probs(bundle, args)
        if args.log_probs is not None:
            torch.save((references, batches, am_s), args.log_probs)
    systems = _systems(bundle, args)
    random.Random(0).shuffle(batches)
    for system in systems.values():
        system.decode(*batches[0])  # loops are compiled, memory is had
    begin = time.monotonic()
    done: dict[str, tuple[str, ...]] = {}
    for names, log_prob, num_frames in batches:
        times = [[one.decode(names, log_prob, num_frames) for one in systems.values()] for _ in range(args.repeats)]
        for system, cpu_s in zip(systems.values(), map(min, zip(*times, strict=True)), strict=True):
            system.cpu_s += cpu_s
        done |= {name: references[name] for name in names}
        if time.monotonic() - begin > args.seconds:
            break
    for name, system in systems.items():
        report = score_transcripts(done, system.words)
        low, high = bootstrap_interval(report.words.values())
        row: dict[str, Any] = {
            "system": name,
            "first_pass": args.first_pass,
            "utterances": len(done),
            "wer": round(report.total_words.rate, 4),
            "wer_interval": [round(low, 4), round(high, 4)],
            "search_over_trigram": round(system.cpu_s / systems[REFERENCE].cpu_s, 3),
            "search_s_per_utterance": round(system.cpu_s / len(done), 4),
            "network_s_per_utterance": round(am_s / len(references), 4),
            "same_words_as_trigram": sum(words == systems[REFERENCE].words[i] for i, words in system.words.items()),
        }
        for whole in ("4-gram", "GRU"):
            if whole in systems:
                same = sum(words == systems[whole].words[i] for i, words in system.words.items())
                row[f"same_words_as_{whole}"] = same
        for table, where in system.placed.items():
            row[table] = {
                "placement": where.placement,
                "device_mb": round(where.device_bytes / 1e6, 1),
                "hit_ratio": round(where.statistics.hit_ratio, 4),
                "fetched_mb": round(where.statistics.num_bytes / 1e6, 2),
            }
        print(json.dumps(row), flush=True)
    return 0


def _log_probs(
    bundle: Bundle, args: argparse.Namespace
) -> tuple[dict[str, tuple[str, ...]], list[tuple[list[str], Tensor, Tensor]], float]:
    """References; batches of names, log_prob (N, T, C) and num_frames (N,); CPU seconds of the network."""
    recognizer = Recognizer(bundle, mode="ngram", decoder="token-passing")
    cuts = sorted(read_cuts([args.cuts]), key=lambda cut: -cut.duration)
    batches, begin = [], time.process_time()
    for first in range(0, len(cuts), args.batch):
        part = cuts[first : first + args.batch]
        samples = [cut_waveform(cut, bundle.sampling_rate) for cut in part]
        with torch.no_grad():
            batches.append(([cut.id for cut in part], *recognizer.log_prob(samples, StageTimes())))
    am_s = time.process_time() - begin
    return {cut.id: tuple(cut_text(cut).split()) for cut in cuts}, batches, am_s


def _systems(bundle: Bundle, args: argparse.Namespace) -> dict[str, System]:
    assert bundle.small_ngram is not None
    small = bundle.small_ngram
    large = load_ngram_lm(args.large_ngram)  # compared with its checksums, so that all of it is in memory
    total = sum(large.arrays.num_bytes().values())
    options = recognition_settings(bundle, "ngram", {"output_beam": args.output_beam}).decoding
    fly_options = replace(options, skip_beam=args.skip_beam, context_beam=args.context_beam)
    passes: dict[tuple[int, DecodingOptions], Decoder] = {}

    def first_pass(graph: DecodingGraph, options: DecodingOptions) -> Decoder:
        key = (id(graph), options)
        if key not in passes:
            passes[key] = build_decoder(*OLD_FIRST_PASSES[args.first_pass], graph, options, keep_lattices=False)
        return passes[key]

    def on_the_fly(lm: LanguageModel) -> System:
        return System(first_pass(bundle.graph, fly_options), Difference(mapped_to(lm, small.vocabulary), small))

    def in_host_memory(budget: int) -> System:
        host = HostNgramLM(large, CPU, budget)
        return replace(on_the_fly(host), placed={"n-gram": host})

    def recurrent(mode: str, share: float | None = None) -> System:
        assert bundle.rnn_lm is not None
        bundle.large_ngram = large
        settings = recognition_settings(bundle, mode, {})
        own, rnn_weight = settings.decoding, settings.language_models.rnn_weight
        network: Any = bundle.rnn_lm.network
        if share is None:
            return System(
                first_pass(bundle.graph, own),
                language_models(bundle, mode, rnn_weight, CPU, CacheOptions(capacity_bytes=_CACHE_BYTES)).model,
            )
        on_device, tables = with_host_tables(network, CPU, int(share * table_bytes(network)))
        lm = Difference(
            RemappedLM(CachedRNNLM(on_device, CacheOptions(capacity_bytes=_CACHE_BYTES)), small.vocabulary), small
        )
        return System(first_pass(bundle.graph, own), lm, dict(tables))

    makers: dict[str, Callable[[], System]] = {
        REFERENCE: lambda: System(first_pass(bundle.graph, options), None),
        "trigram taken out and put in": lambda: on_the_fly(small),
        "4-gram": lambda: on_the_fly(large),
        "4-gram, index on the device": lambda: in_host_memory(bytes_to_find_arcs(large) + total // 100),
        "4-gram, a tenth on the device": lambda: in_host_memory(total // 10),
        "GRU": lambda: recurrent("rnn"),
        "GRU, a tenth of its tables on the device": lambda: recurrent("rnn", 0.1),
        "GRU and 4-gram": lambda: recurrent("interpolated"),
    }
    if args.pruned_ngram is not None:
        pruned = read_ngram_lm(args.pruned_ngram)
        makers["pruned 4-gram"] = lambda: on_the_fly(pruned)
    if args.pruned_graph is not None:
        graph = DecodingGraph.load(args.pruned_graph)
        makers["pruned 4-gram's own graph"] = lambda: System(first_pass(graph, options), None)
    wanted = [REFERENCE, *(args.systems if args.systems is not None else makers)]
    return {name: makers[name]() for name in dict.fromkeys(wanted)}
