"""The cached language model on queries recorded from real decoding: exactness, hit ratios, speed, memory.

    scripts/bench query --quick [--engines 2]     # under a minute; the last line is one JSON object
    scripts/bench query                           # the papers' tables as well
    scripts/bench query --bundle librispeech --streams FILE [--tables index-table throughput]
    scripts/bench query --tables four-caches --lm FOLDER...
    scripts/bench query --device cuda --tables throughput placement

The queries are those of four utterances of dev-clean-2 with the bundle `librispeech`, recorded once; without the
corpora, older recordings of this checkout. `scripts/bench record-queries` makes others.

`cpu_s` is CPU time, which depends less on other load. Without --bundle or --lm the weights are random, H = 256; with
exact caches this changes neither counts nor times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from asr.bundle import Bundle, bundle_folder
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.interface import StatefulNetwork
from asr.lm.rnn.export import load_network
from scripts.benchmarks.inputs import ROOT, argument_parser, default_corpora
from scripts.benchmarks.query_stream import QueryStream, load_streams, merged, replay
from scripts.benchmarks.query_tables import (
    four_caches,
    frame_batch,
    hidden_dtypes,
    index_table,
    placement,
    recombination,
    throughput_of_one_engine,
)
from scripts.benchmarks.query_throughput import fastest, long_stream, throughput
from scripts.benchmarks.query_workload import max_abs_error, naive_seconds, random_network
from scripts.benchmarks.record_queries import spoken_streams

TABLES = ["index-table", "four-caches", "recombination", "frame-batch", "hidden-store", "throughput", "long-stream"]
GPU_TABLES = ["throughput", "placement"]

_ASSETS = ROOT / "tests/assets"
_RECORDED, _RECORDED_SKIP = _ASSETS / "query_streams.npz.xz", _ASSETS / "query_streams_skip.npz.xz"
# One utterance heard by a network of 10 ms frames, as the papers' are; the bundle's frames are of 30 ms.
SHORT_FRAMES = _ASSETS / "query_streams_10ms.npz.xz"
_SKIP_BEAM = 8.0


def answered_without_hidden(network: StatefulNetwork, stream: QueryStream) -> float:
    """The share of a stream's queries that need no hidden state."""
    engine = CachedRNNLM(network)
    replay(stream.to(engine.device), engine)
    return engine.statistics().answered_without_hidden


def quick(
    network: StatefulNetwork, streams: list[QueryStream], engines: int, workers: int, seconds: float
) -> dict[str, Any]:
    """The figures of the JSON line."""
    best = fastest(network, streams, engines, workers, seconds)
    counts = best.counts
    naive_wall_s, naive_cpu_s = naive_seconds(network, merged(streams), 500)
    return {
        "max_abs_error": max(max_abs_error(network, stream, log_prob, 200) for stream, log_prob in best.answers),
        "answered_without_hidden": round(counts.answered_without_hidden, 5),
        "answered_without_hidden_10ms": round(answered_without_hidden(network, *load_streams(SHORT_FRAMES)), 5),
        "speedup_over_naive": round(naive_wall_s * counts.num_queries / best.wall_s, 1),
        "speedup_over_naive_cpu": round(naive_cpu_s * counts.num_queries / best.cpu_s, 1),
        "queries_per_s": round(best.queries_per_s),
        "queries_per_cpu_s": round(counts.num_queries / best.cpu_s),
        "bytes_per_context": round(counts.bytes_per_context, 1),
        "hit_ratio": round(counts.hit_ratio, 5),
        "queries": counts.num_queries,
        "contexts": counts.num_contexts,
        "hidden_rows": counts.num_hidden_rows,
        "streams": len(streams),
        "hidden_size": network.hidden_size,
        "engines": engines,
        "workers": workers,
    }


def caches_of_networks(folders: list[Path], with_skip: QueryStream, without_skip: QueryStream) -> None:
    """Table 5 of four-caches for the networks in these folders, or for random ones."""
    networks = [(f"{folder}: {{}}", load_network(folder)) for folder in folders] or [
        ("{}, random weights", random_network(output)) for output in ("class", "hierarchical")
    ]
    for title, network in networks:
        kind = f"{network.config.output} output, H = {network.hidden_size}, {len(network.vocabulary):,} words"
        four_caches(title.format(kind), network, with_skip, without_skip)


def chosen_streams(path: Path | None, corpora: Path | None) -> list[QueryStream]:
    """Those of a file, of dev-clean-2 or, without the corpora, of this checkout."""
    spoken = None if path else spoken_streams(corpora, None)
    return load_streams(path or _RECORDED) if spoken is None else spoken


def skip_streams(corpora: Path | None) -> tuple[QueryStream, QueryStream]:
    """One utterance with and without a skip beam."""
    some, all_words = spoken_streams(corpora, _SKIP_BEAM), spoken_streams(corpora, None)
    if some is None or all_words is None:
        some, all_words = ([stream] for stream in load_streams(_RECORDED_SKIP))
    shortest = min(range(len(some)), key=lambda i: some[i].num_calls)
    return some[shortest], all_words[shortest]


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("query", __doc__)
    parser.add_argument("--quick", action="store_true", help="only the JSON line")
    parser.add_argument("--streams", type=Path, help="another recording of `scripts/bench record-queries`")
    parser.add_argument("--corpora", type=Path, default=default_corpora(), help="(default: %(default)s)")
    parser.add_argument("--bundle", help="a bundle whose recurrent model to query; default: random weights, H = 256")
    parser.add_argument(
        "--lm",
        nargs="+",
        type=Path,
        default=[],
        help="network folders for the table of four-caches; default: random weights, class softmax and tree",
    )
    parser.add_argument("--device", default="cpu", help="device of network and search (%(default)s)")
    parser.add_argument(
        "--tables", nargs="+", choices=sorted({*TABLES, *GPU_TABLES}), help="default: all of the device"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (%(default)s)")
    parser.add_argument(
        "--engines", type=int, default=1, help="number of engines, each on a thread with its streams (%(default)s)"
    )
    parser.add_argument("--workers", type=int, default=1, help="threads of an engine's hidden layer (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="duration of each throughput measurement (%(default)s)"
    )
    parser.add_argument("--minutes", type=int, default=60, help="length of the long stream (%(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    network: Any = random_network("nce")
    if args.bundle:
        rnn_lm = Bundle.load(bundle_folder(args.bundle)).rnn_lm
        if rnn_lm is None:
            parser.error(f"the bundle {args.bundle} has no recurrent language model")
        network = rnn_lm.network
    streams, device = chosen_streams(args.streams, args.corpora), torch.device(args.device)
    network = network.to(device)
    known = TABLES if device.type == "cpu" else GPU_TABLES
    names = args.tables or known
    for name in names:
        if name not in known:
            parser.error(f"there is no table {name} on {device.type}, but {', '.join(known)}")
    if not args.quick:
        with_skip, without_skip = skip_streams(args.corpora)
        rate = throughput if device.type == "cpu" else throughput_of_one_engine
        tables: dict[str, Callable[[], Any]] = {
            "index-table": lambda: index_table(network, streams),
            "four-caches": lambda: caches_of_networks(args.lm, with_skip, without_skip),
            "recombination": lambda: recombination(network, streams),
            "frame-batch": lambda: frame_batch(network, streams),
            "hidden-store": lambda: hidden_dtypes(network, streams),
            "throughput": lambda: rate(network, streams, args.seconds),
            "placement": lambda: placement(network, streams, device),
            "long-stream": lambda: long_stream(network, with_skip, args.minutes, 4_000_000),
        }
        for name in names:
            tables[name]()
    print(json.dumps(quick(network, streams, args.engines, args.workers, args.seconds)))
    return 0
