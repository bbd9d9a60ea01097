"""The query engine on query streams recorded from real decoding: exactness, hit ratios, speed, memory.

    python scripts/bench_query.py --quick        # under 50 s; the last line is one JSON object
    python scripts/bench_query.py                # the papers' tables as well
    python scripts/bench_query.py --bundle librispeech --streams FILE [--tables index-table throughput]

`cpu_s` is processor time, which depends less on what else the machine does; the other seconds are wall time inside
`score`. Without --bundle the weights are random, H = 256: they change no count of exact modes and no time. Streams
are recorded by scripts/record_queries.py; BENCH_QUERY.md has the figures, and the commands of the recordings.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asr.bundle import Bundle  # noqa: E402
from asr.cli.bundle_choice import bundle_folder  # noqa: E402
from asr.lm.contract import StatefulNetwork  # noqa: E402
from asr.lm.rnn_lm import RnnLm, RnnLmConfig  # noqa: E402
from asr.query.engine import RnnLM  # noqa: E402
from asr.query.recording import QueryStream, load_streams, merged, replay  # noqa: E402
from asr.query.statistics import QueryStatistics  # noqa: E402
from asr.text.vocabulary import BOS_ID, SPECIAL_WORDS, Vocabulary  # noqa: E402
from tests.reference.plain_lm import PlainLM  # noqa: E402

FRAMES_PER_SECOND = 25
TABLES = ["index-table", "four-caches", "recombination", "frame-batch", "hidden-store", "throughput", "long-stream"]


def random_network(output: str, num_words: int = 65_000) -> RnnLm:
    """GRU H = 256 with trigram features, as in frame-batch (NCE), or with a class softmax as in four-caches."""
    torch.manual_seed(0)
    config = RnnLmConfig(output=output, maxent_order=3, maxent_size=1 << 20)  # type: ignore[arg-type]
    network = RnnLm(Vocabulary([f"w{i}" for i in range(num_words)]), config)
    if network.maxent is not None:
        torch.nn.init.normal_(network.maxent.weight, std=0.05)
    return network.eval()


def run(
    engine: RnnLM, streams: Sequence[QueryStream], marks: bool = False, resets: bool = False
) -> tuple[Tensor, float]:
    """Replays streams one after another -> log_prob (Q,) of all, processor seconds."""
    begin, scores = time.process_time(), []
    for stream in streams:
        if resets:
            engine.reset()
        scores.append(replay(stream, engine, marking(stream, engine) if marks else None))
    return torch.cat(scores), time.process_time() - begin


def marking(stream: QueryStream, engine: RnnLM) -> Callable[[int, Tensor], None]:
    """Marks live, after each call, the contexts that a later call asks for."""
    last = stream.last_call_of_context()
    reached = torch.stack([call.max() for call in stream.calls()]).cummax(0).values

    def mark(call: int, context_of_node: Tensor) -> None:
        live = (last[: int(reached[call]) + 1] > call).nonzero().squeeze(1)
        engine.mark_live(context_of_node[live])

    return mark


def naive_seconds(network: StatefulNetwork, stream: QueryStream, num: int) -> tuple[float, float]:
    """Wall and processor seconds a query of the engine that calls the network once a query: score, then new state."""
    generator = torch.Generator().manual_seed(0)
    nodes = stream.query[torch.randint(0, stream.query.numel(), (num,), generator=generator)]
    first = network.state_size - network.hidden_size
    plain, asked = PlainLM(network), []
    for words in stream.histories(nodes):
        newest_first = [*reversed([BOS_ID, *words[:-1]]), 0, 0, 0, 0][: network.num_history_words]
        state = plain._state((BOS_ID, *words[:-1]))
        asked.append((state, torch.tensor([newest_first], dtype=torch.int64), torch.tensor([words[-1]])))
    wall, cpu = time.perf_counter(), time.process_time()
    with torch.no_grad():
        for state, history, word_id in asked:
            network.log_prob(state[:, first:], history, word_id)
            network.step(state, word_id)
    return (time.perf_counter() - wall) / num, (time.process_time() - cpu) / num


def max_abs_error(network: StatefulNetwork, stream: QueryStream, log_prob: Tensor, num: int) -> float:
    """Of a sample of the answers against the network run word by word."""
    sample = torch.randint(0, stream.query.numel(), (num,), generator=torch.Generator().manual_seed(1))
    plain = PlainLM(network)
    expected = [plain.last_log_prob(words) for words in stream.histories(stream.query[sample])]
    return float((log_prob[sample] - torch.tensor(expected)).abs().max())


def table(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows of equal keys as a Markdown table."""
    print(f"\n### {title}\n\n| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}")
    for row in rows:
        cells = [
            f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
            for value in row.values()
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def columns(counts: QueryStatistics, cpu_s: float) -> dict[str, Any]:
    return {
        "queries": counts.num_queries,
        "hit ratio": counts.hit_ratio,
        "without hidden": counts.answered_without_hidden,
        "hidden rows": counts.num_hidden_rows,
        "contexts": counts.num_contexts,
        "MB": counts.bytes_held / 1e6,
        "bytes/context": counts.bytes_per_context,
        "cpu_s": cpu_s,
        "queries/cpu_s": counts.num_queries / cpu_s,
    }


def quick(network: StatefulNetwork, streams: list[QueryStream], workers: int) -> dict[str, Any]:
    """The figures that the one JSON line has."""
    stream = merged(streams)
    best: tuple[float, float, RnnLM, Tensor] | None = None
    for _ in range(3):
        engine = RnnLM(network, [network] * workers)
        log_prob, cpu_s = run(engine, [stream])
        wall_s = engine.statistics().seconds_total
        if best is None or wall_s < best[0]:
            best = (wall_s, cpu_s, engine, log_prob)
    assert best is not None
    wall_s, cpu_s, engine, log_prob = best
    counts = engine.statistics()
    naive_wall_s, naive_cpu_s = naive_seconds(network, stream, 500)
    return {
        "max_abs_error": max_abs_error(network, stream, log_prob, 200),
        "answered_without_hidden": round(counts.answered_without_hidden, 5),
        "speedup_over_naive": round(naive_wall_s * counts.num_queries / wall_s, 1),
        "speedup_over_naive_cpu": round(naive_cpu_s * counts.num_queries / cpu_s, 1),
        "queries_per_s": round(counts.num_queries / wall_s),
        "queries_per_cpu_s": round(counts.num_queries / cpu_s),
        "bytes_per_context": round(counts.bytes_per_context, 1),
        "hit_ratio": round(counts.hit_ratio, 5),
        "queries": counts.num_queries,
        "contexts": counts.num_contexts,
        "hidden_rows": counts.num_hidden_rows,
        "streams": len(streams),
        "hidden_size": network.hidden_size,
        "workers": workers,
    }


def index_table(network: StatefulNetwork, streams: list[QueryStream]) -> None:
    _, naive_cpu_s = naive_seconds(network, streams[0], 300)
    everything = RnnLM(network)
    run(everything, streams)
    all_bytes = everything.statistics().bytes_held
    cases: list[tuple[str, int | None, bool]] = [("each utterance anew", None, True), ("kept, all", None, False)]
    cases += [(f"kept, 1/{part} of that", all_bytes // part, False) for part in (2, 8, 32, 128)]
    rows = []
    for name, capacity, resets in cases:
        engine = RnnLM(network, capacity_bytes=capacity)
        _, cpu_s = run(engine, streams, marks=capacity is not None, resets=resets)
        counts = engine.statistics()
        row = columns(counts, cpu_s)
        row["MB"] = counts.peak_bytes / 1e6
        row |= {
            "bound MB": (capacity or 0) / 1e6,
            "evictions": counts.num_evictions,
            "rows dropped": counts.num_dropped_rows,
        }
        rows.append({"cache": name, **row, "x naive": naive_cpu_s * counts.num_queries / cpu_s})
    table("index-table: capacity, and keeping the cache over utterances (MB: the peak)", rows)


def four_caches(with_skip: QueryStream, without_skip: QueryStream, num_calls: int) -> None:
    network = random_network("class")
    rows = []
    for heuristic, stream in (("no", without_skip), ("yes", with_skip)):
        end = int(stream.call_begin[num_calls])
        cut = QueryStream(stream.parent, stream.word, stream.query[:end], stream.call_begin[: num_calls + 1])
        for number, name in enumerate(("naive cache 2", "cache 2", "+ cache 1", "+ cache 3", "+ cache 4")):
            on = [number > i for i in range(4)]
            engine = RnnLM(
                network,
                cache_hidden=on[0],
                cache_scores=on[1],
                cache_history_normalizers=on[2],
                cache_group_normalizers=on[3],
            )
            _, cpu_s = run(engine, [cut])
            counts = engine.statistics()
            rows.append(
                {
                    "skip heuristic": heuristic,
                    "caches": name,
                    "queries": counts.num_queries,
                    "hidden rows": counts.num_hidden_rows,
                    "outputs": counts.num_outputs,
                    "class normalisers": counts.num_history_normalizers,
                    "word normalisers": counts.num_group_normalizers,
                    "cpu_s": cpu_s,
                }
            )
    table(f"four-caches, Table 5: first {num_calls} calls, class softmax", rows)


def frame_batch(network: StatefulNetwork, streams: list[QueryStream]) -> None:
    exact, rows = None, []
    for precision in (None, "round-2", "round-1", "sign"):
        engine = RnnLM(network, history_precision=precision)
        log_prob, cpu_s = run(engine, streams)
        exact = log_prob if exact is None else exact
        counts = engine.statistics()
        total = counts.num_hidden_rows + counts.num_shared_rows
        rows.append(
            {
                "precision": precision or "baseline",
                "hidden rows": counts.num_hidden_rows,
                "redundancy": counts.num_shared_rows / total,
                "largest difference": float((log_prob - exact).abs().max()),
                "cpu_s": cpu_s,
            }
        )
    table("frame-batch: quantised history vectors", rows)
    print("\n" + nearness(network, streams))
    rows = []
    for name, batching, asked in (
        ("query", "query", [merged(streams)]),
        ("utterance", "frame", streams),
        ("frame", "frame", [merged(streams)]),
    ):
        engine = RnnLM(network, batching=batching)
        run(engine, asked)
        counts = engine.statistics()
        rows.append(
            {
                "batches by": name,
                "hidden runs": counts.num_hidden_calls,
                "blocks to another device": 2 * counts.num_hidden_calls,
                "rows a run": counts.mean_hidden_batch,
                "hidden s": counts.seconds_hidden,
                "output s": counts.seconds_output,
            }
        )
    table("frame-batch: batching (one processor; the blocks are those that a second device would need)", rows)


def nearness(network: StatefulNetwork, streams: list[QueryStream]) -> str:
    """How near the histories that a word follows come to each other, in words."""
    engine = RnnLM(network)
    run(engine, streams)
    node = (engine.trie.nodes.is_used() & (engine.trie.hidden_row >= 0)).nonzero().squeeze(1)[2:]
    word = engine.trie.word[node]
    before = engine.trie.hidden_row[engine.trie.parent[node].long()].long()
    state = engine.hidden.read(before)[:, : getattr(network, "recurrent_size", network.state_size)]
    distances, signs = [], []
    for one in word.unique().tolist():
        same = state[(word == one).nonzero().squeeze(1)[:200]]
        if len(same) > 1:
            apart = torch.cdist(same, same, p=torch.inf).fill_diagonal_(torch.inf)
            differing = torch.cdist((same > 0).float(), (same > 0).float(), p=1.0).fill_diagonal_(torch.inf)
            distances.append(apart.min(1).values)
            signs.append(differing.min(1).values)
    at = torch.tensor([0.01, 0.1, 0.5])
    far, flipped = (torch.quantile(torch.cat(part), at).tolist() for part in (distances, signs))
    return (
        f"Nearest other history before the same word, 1 %, 10 %, 50 % of {len(node):,}: largest difference of a column "
        f"{', '.join(f'{value:.3f}' for value in far)}; columns of {state.shape[1]} that differ in sign "
        f"{', '.join(f'{value:.0f}' for value in flipped)}; mean magnitude {float(state.abs().mean()):.3f}."
    )


def recombination(network: StatefulNetwork, streams: list[QueryStream]) -> None:
    rows = []
    exact, _ = run(RnnLM(network), streams)
    for length in (None, 5, 4, 3, 2, 1):
        engine = RnnLM(network, recombination_length=length)
        log_prob, cpu_s = run(engine, streams)
        difference = (log_prob - exact).abs()
        rows.append(
            {
                "recombination length": "none" if length is None else str(length),
                **columns(engine.statistics(), cpu_s),
                "mean difference": float(difference.mean()),
                "largest": float(difference.max()),
            }
        )
    table("four-caches: recombination length, the first come stays", rows)


def hidden_dtypes(network: StatefulNetwork, streams: list[QueryStream]) -> None:
    exact, rows = None, []
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        engine = RnnLM(network, hidden_dtype=dtype)
        log_prob, cpu_s = run(engine, streams)
        exact = log_prob if exact is None else exact
        rows.append(
            {
                "kept in": dtype,
                "largest difference": float((log_prob - exact).abs().max()),
                **columns(engine.statistics(), cpu_s),
            }
        )
    table("hidden store", rows)


def throughput(network: StatefulNetwork, streams: list[QueryStream], workers: int) -> None:
    num_words = len(network.vocabulary) - len(SPECIAL_WORDS)
    rows = []
    for num_streams in (1, 2, 4, 8, 16):
        # Copies in other words, so that no two streams share a history.
        copies = []
        for i in range(num_streams):
            stream, shift = streams[i % len(streams)], 997 * (i // len(streams))
            other = (stream.word - len(SPECIAL_WORDS) + shift) % num_words + len(SPECIAL_WORDS)
            word = torch.where(stream.word < len(SPECIAL_WORDS), stream.word, other)
            copies.append(QueryStream(stream.parent, word, stream.query, stream.call_begin))
        best: dict[str, Any] = {}
        for _ in range(2):
            engine = RnnLM(network, [network] * workers)
            _, cpu_s = run(engine, [merged(copies)])
            counts = engine.statistics()
            if not best or counts.queries_per_s > best["queries/s"]:
                stages = {
                    "find s": counts.seconds_find,
                    "hidden s": counts.seconds_hidden,
                    "output s": counts.seconds_output,
                }
                best = {"queries/s": counts.queries_per_s, **columns(counts, cpu_s), **stages}
        rows.append({"streams": num_streams, **best})
    table(f"throughput over the number of streams, H = {network.hidden_size}, {workers} workers", rows)


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def long_stream(network: StatefulNetwork, stream: QueryStream, minutes: int, capacity_bytes: int) -> None:
    """One stream that never starts anew: each round goes on from a context of the round before."""
    engine = RnnLM(network, capacity_bytes=capacity_bytes)
    rounds = minutes * 60 * FRAMES_PER_SECOND // stream.num_calls
    last, reached = stream.last_call_of_context(), stream.calls()[-1]
    context, rows = engine.start(1)[0], []
    parent, word = stream.parent[stream.query], stream.word[stream.query]
    for number in range(1, rounds + 1):
        context_of_node = torch.zeros_like(stream.parent)
        context_of_node[0] = context
        for call, query in enumerate(stream.calls()):
            begin, end = int(stream.call_begin[call]), int(stream.call_begin[call + 1])
            _, next_idx = engine.score(context_of_node[parent[begin:end]], word[begin:end])
            context_of_node[query] = next_idx
            # Nodes that no call has reached yet are 0, the node above `<s>`, which stays in any case.
            engine.mark_live(torch.cat((context_of_node[last > call], context_of_node[reached[:1]])))
        context = context_of_node[reached[0]]
        if number % max(1, rounds // 12) == 0:
            counts = engine.statistics()
            rows.append(
                {
                    "minutes": number * stream.num_calls / FRAMES_PER_SECOND / 60,
                    "queries": counts.num_queries,
                    "contexts": counts.num_contexts,
                    "hidden rows held": counts.num_hidden_held,
                    "MB held": counts.bytes_held / 1e6,
                    "peak MB": counts.peak_bytes / 1e6,
                    "process MB": resident_bytes() / 1e6,
                    "evictions": counts.num_evictions,
                    "seconds evicting": counts.seconds_evict,
                    "seconds": counts.seconds_total,
                }
            )
    table(f"one stream of {minutes} minutes within {capacity_bytes / 1e6:g} MB", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the JSON line only")
    parser.add_argument("--streams", type=Path, default=ROOT / "tests/assets/query_streams.npz.xz", help="%(default)s")
    parser.add_argument(
        "--skip-streams",
        type=Path,
        default=ROOT / "tests/assets/query_streams_skip.npz.xz",
        help="one utterance with and without the skip heuristic (%(default)s)",
    )
    parser.add_argument("--bundle", help="a bundle whose recurrent model answers; default: random weights, H = 256")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="which tables; default: all")
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="threads of the hidden layer (%(default)s)")
    parser.add_argument("--minutes", type=int, default=60, help="of the long stream (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    network: Any = random_network("nce")
    if args.bundle:
        rnn_lm = Bundle.load(bundle_folder(args.bundle)).rnn_lm
        if rnn_lm is None:
            parser.error(f"the bundle {args.bundle} has no recurrent language model")
        network = rnn_lm.network
    streams = load_streams(args.streams)
    if not args.quick:
        with_skip, without_skip = load_streams(args.skip_streams)
        tables: dict[str, Callable[[], None]] = {
            "index-table": lambda: index_table(network, streams),
            "four-caches": lambda: four_caches(with_skip, without_skip, 20),
            "recombination": lambda: recombination(network, streams),
            "frame-batch": lambda: frame_batch(network, streams),
            "hidden-store": lambda: hidden_dtypes(network, streams),
            "throughput": lambda: throughput(network, streams, args.workers),
            "long-stream": lambda: long_stream(network, with_skip, args.minutes, 4_000_000),
        }
        for name in args.tables:
            tables[name]()
    print(json.dumps(quick(network, streams, args.workers)))


if __name__ == "__main__":
    main()
