"""The papers' tables on query streams: capacity, recombination, quantised histories, batching, hidden stores."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import on_device
from asr.lm.interface import StatefulNetwork
from scripts.benchmarks.clock import waiting_clock
from scripts.benchmarks.query_stream import QueryStream, merged, replay
from scripts.benchmarks.query_throughput import copies_of, fastest
from scripts.benchmarks.query_workload import columns, naive_seconds, run
from scripts.benchmarks.report import table


def index_table(network: StatefulNetwork, streams: list[QueryStream]) -> None:
    _, naive_cpu_s = naive_seconds(network, streams[0], 300)
    everything = CachedRNNLM(network)
    run(everything, streams)
    all_bytes = everything.statistics().bytes_held
    cases: list[tuple[str, int | None, bool]] = [("each utterance anew", None, True), ("kept, all", None, False)]
    cases += [(f"kept, 1/{part} of that", all_bytes // part, False) for part in (2, 8, 32, 128)]
    rows = []
    for name, capacity, resets in cases:
        engine = CachedRNNLM(network, CacheOptions(capacity_bytes=capacity))
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
    table("index-table: capacity, and keeping the cache over utterances (MB: the peak)", rows, thousands=",")


def frame_batch(network: StatefulNetwork, streams: list[QueryStream]) -> None:
    exact, rows = None, []
    for precision in (None, "round-2", "round-1", "sign"):
        engine = CachedRNNLM(network, CacheOptions(history_precision=precision))
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
    table("frame-batch: quantised history vectors", rows, thousands=",")
    print("\n" + nearness(network, streams))
    rows = []
    for name, batching, asked in (
        ("query", "query", [merged(streams)]),
        ("utterance", "frame", streams),
        ("frame", "frame", [merged(streams)]),
    ):
        engine = CachedRNNLM(network, CacheOptions(batching=batching))
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
    table(
        "frame-batch: batching (one processor; the blocks are those that a second device would need)",
        rows,
        thousands=",",
    )


def nearness(network: StatefulNetwork, streams: list[QueryStream]) -> str:
    """How near the histories that a word follows come to each other, in words."""
    engine = CachedRNNLM(network)
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
    """Histories that end in the same words share a context: that of the first come, or of the best in a window."""
    engine = CachedRNNLM(network)
    exact, cpu_s = run(engine, streams)
    rows = [_recombined("none", "", engine, exact, exact, cpu_s)]
    for length in (5, 4, 3, 2, 1):
        for choice in ("first", "best"):
            engine = CachedRNNLM(network, CacheOptions(recombination_length=length, recombination=choice))
            log_prob, cpu_s = run(engine, streams)
            rows.append(_recombined(str(length), choice, engine, log_prob, exact, cpu_s))
    table("four-caches: recombination length, the first come stays or the best within 50 calls", rows, thousands=",")


def _recombined(
    length: str, choice: str, engine: CachedRNNLM, log_prob: Tensor, exact: Tensor, cpu_s: float
) -> dict[str, Any]:
    difference = (log_prob - exact).abs()
    return {
        "recombination length": length,
        "stays": choice,
        **columns(engine.statistics(), cpu_s),
        "mean difference": float(difference.mean()),
        "largest": float(difference.max()),
    }


def hidden_dtypes(network: StatefulNetwork, streams: list[QueryStream]) -> None:
    exact, rows = None, []
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        engine = CachedRNNLM(network, CacheOptions(hidden_dtype=dtype))
        log_prob, cpu_s = run(engine, streams)
        exact = log_prob if exact is None else exact
        rows.append(
            {
                "kept in": dtype,
                "largest difference": float((log_prob - exact).abs().max()),
                **columns(engine.statistics(), cpu_s),
            }
        )
    table("hidden store", rows, thousands=",")


CACHES = [
    ("cache 2", "cache_hidden"),
    ("+ cache 1", "cache_scores"),
    ("+ cache 3", "cache_history_normalizers"),
    ("+ cache 4", "cache_group_normalizers"),
    ("+ tree paths", "cache_tree_paths"),
]


def four_caches(title: str, network: StatefulNetwork, with_skip: QueryStream, without_skip: QueryStream) -> None:
    """A row for each cache that the network's output layer has any use for; the faster of two runs."""
    rows: list[dict[str, Any]] = []
    for heuristic, stream in (("no", without_skip), ("yes", with_skip)):
        for name, options in _settings(network):
            best: dict[str, Any] = {}
            for _ in range(2):
                engine = CachedRNNLM(network, CacheOptions(**options))
                _, cpu_s = run(engine, [stream])
                counts = engine.statistics()
                if not best or cpu_s < best["cpu_s"]:
                    best = {
                        "skip heuristic": heuristic,
                        "caches": name,
                        "queries": counts.num_queries,
                        "hidden rows": counts.num_hidden_rows,
                        "outputs": counts.num_outputs,
                        "class normalisers": counts.num_history_normalizers,
                        "word normalisers": counts.num_group_normalizers,
                        "tree decisions": counts.num_tree_decisions,
                        "cpu_s": cpu_s,
                    }
            rows.append(best)
    table(f"four-caches, Table 5: one utterance, {title}", rows, thousands=",")


def _settings(network: StatefulNetwork) -> Iterator[tuple[str, dict[str, bool]]]:
    """Names and the engine's options: no cache but that of states, then one more each time."""
    output = CachedRNNLM(network).output
    is_of_use = {
        "cache_history_normalizers": output.cache_history,
        "cache_group_normalizers": output.cache_group,
        "cache_tree_paths": output.cache_paths,
    }
    options = {option: False for _, option in CACHES}
    yield "naive cache 2", dict(options)
    for name, option in CACHES:
        options[option] = True
        if is_of_use.get(option, True):
            yield name, dict(options)


_CPU = torch.device("cpu")


def throughput_of_one_engine(
    network: StatefulNetwork,
    streams: Sequence[QueryStream],
    seconds: float,
    numbers: Sequence[int] = (3, 8, 32, 128, 256),
) -> list[dict[str, Any]]:
    """Streams side by side in one engine, search, hidden and output layer all where the network lies."""
    rows = []
    for num_streams in numbers:
        best = fastest(network, copies_of(streams, num_streams, network), 1, 1, seconds)
        rows.append(
            {
                "streams": num_streams,
                "queries": best.counts.num_queries,
                "without hidden": best.counts.answered_without_hidden,
                "MB": best.counts.bytes_held / 1e6,
                "calls": best.counts.num_calls,
                "ms a call": 1e3 * best.wall_s / best.counts.num_calls,
                "queries/s": round(best.queries_per_s),
            }
        )
    table(f"throughput over the number of streams, H = {network.hidden_size}, by the clock", rows, thousands=",")
    return rows


def placement(network: StatefulNetwork, streams: Sequence[QueryStream], device: torch.device) -> list[dict[str, Any]]:
    """The streams side by side with search, hidden and output layer here or on the device, by query and by frame.

    The device is waited for at each reading of the clock, so that each stage's seconds are its own. What is moved is
    counted for the hidden layer; queries from another device are not. Differences are to the answers of the first row,
    all on the CPU.
    """
    on = {_CPU: copy.deepcopy(network).to(_CPU), device: copy.deepcopy(network).to(device)}  # type: ignore[attr-defined]
    places = [(_CPU, _CPU, _CPU)]
    if device != _CPU:
        places += [(_CPU, device, _CPU), (device, device, _CPU), (device, _CPU, device), (device, device, device)]
    stream, expected, rows = merged(streams), None, []
    for search, hidden, output in places:
        for batching in ("query", "frame"):
            engine = CachedRNNLM(
                on[output],
                CacheOptions(batching=batching),
                hidden_networks=[on[hidden]],
                clock=waiting_clock(search, hidden, output),
            )
            answers: Tensor = replay(stream.to(search), on_device(engine, search)).cpu()
            expected = answers if expected is None else expected
            counts = engine.statistics()
            rows.append(
                {
                    "search, hidden, output": f"{search.type}, {hidden.type}, {output.type}",
                    "batches by": batching,
                    "hidden runs": counts.num_hidden_calls,
                    "blocks": counts.num_transfers,
                    "MB moved": counts.bytes_moved / 1e6,
                    "moving s": counts.seconds_transfer,
                    "hidden s": counts.seconds_hidden,
                    "output s": counts.seconds_output,
                    "all s": counts.seconds_total,
                    "largest difference": float((answers - expected).abs().max()),
                }
            )
    table("placement: the layers on either side, batched by query and by frame", rows, thousands=",")
    return rows
