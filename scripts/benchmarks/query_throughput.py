"""Speed of the query engine: concurrent streams, several engines with one network, one stream of an hour."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.cached.states import QueryStatistics
from asr.lm.interface import StatefulNetwork
from asr.text.symbols import SPECIAL_WORDS
from scripts.benchmarks.clock import waiting_clock
from scripts.benchmarks.query_stream import QueryStream, merged, replay
from scripts.benchmarks.report import table

FRAMES_PER_SECOND = 100 / 3  # of the bundle `librispeech`


@dataclass(frozen=True)
class Replayed:
    """What a replay of several streams took, by the clock and of the processors, and each engine's answers (Q,)."""

    wall_s: float
    cpu_s: float
    counts: QueryStatistics
    answers: list[tuple[QueryStream, Tensor]]

    @property
    def queries_per_s(self) -> float:
        return self.counts.num_queries / self.wall_s


def replay_side_by_side(
    network: StatefulNetwork, streams: Sequence[QueryStream], num_engines: int, num_workers: int = 1
) -> Replayed:
    """Streams divided among engines, each on a thread of its own; all run the one network, hidden layer and output.

    The clock runs from the moment when all threads are ready until the last is done; `num_workers` is that of each
    engine's hidden layer.
    """
    device = network.initial_state().device
    clock = waiting_clock(device)
    shares = divided(streams, num_engines)
    there = [share.to(device) for share in shares]
    engines = [CachedRNNLM(network, hidden_networks=[network] * num_workers) for _ in shares]
    answers: list[Tensor] = [torch.empty(0)] * len(shares)
    ready = threading.Barrier(len(shares) + 1)

    def work(idx: int) -> None:
        ready.wait()
        answers[idx] = replay(there[idx], engines[idx])

    threads = [threading.Thread(target=work, args=(idx,)) for idx in range(len(shares))]
    for thread in threads:
        thread.start()
    ready.wait()
    wall, cpu = clock(), time.process_time()
    for thread in threads:
        thread.join()
    wall_s, cpu_s = clock() - wall, time.process_time() - cpu
    counts = sum((engine.statistics() for engine in engines), start=QueryStatistics())
    on_host = [log_prob.cpu() for log_prob in answers]
    return Replayed(wall_s, cpu_s, counts, list(zip(shares, on_host, strict=True)))


def divided(streams: Sequence[QueryStream], num_shares: int) -> list[QueryStream]:
    """Streams in shares of about equally many queries, each share's merged."""
    shares: list[list[QueryStream]] = [[] for _ in range(min(num_shares, len(streams)))]
    for stream in sorted(streams, key=lambda stream: -stream.query.numel()):
        min(shares, key=lambda share: sum(other.query.numel() for other in share)).append(stream)
    return [merged(share) for share in shares]


def in_other_words(stream: QueryStream, shift: int, num_words: int) -> QueryStream:
    """A copy that shares no history with the stream."""
    other = (stream.word - len(SPECIAL_WORDS) + shift) % num_words + len(SPECIAL_WORDS)
    word = torch.where(stream.word < len(SPECIAL_WORDS), stream.word, other)
    return QueryStream(stream.parent, word, stream.query, stream.call_begin)


def fastest(
    network: StatefulNetwork, streams: Sequence[QueryStream], num_engines: int, num_workers: int, seconds: float
) -> Replayed:
    """The fastest, by wall time, of the replays that fit into `seconds`; at least three."""
    begin, replays = time.perf_counter(), []
    while len(replays) < 3 or time.perf_counter() - begin < seconds:
        replays.append(replay_side_by_side(network, streams, num_engines, num_workers))
    return min(replays, key=lambda each: each.wall_s)


def copies_of(streams: Sequence[QueryStream], num: int, network: StatefulNetwork) -> list[QueryStream]:
    """This number of copies of the streams, with words such that no two share a history."""
    num_words = len(network.vocabulary) - len(SPECIAL_WORDS)
    return [in_other_words(streams[i % len(streams)], 997 * (i // len(streams)), num_words) for i in range(num)]


def throughput(network: StatefulNetwork, streams: list[QueryStream], seconds: float) -> None:
    """Streams side by side in one engine, in one whose hidden layer has two threads, and in two engines."""
    rows = []
    for num_streams in (1, 2, 4, 8, 16, 32):
        copies = copies_of(streams, num_streams, network)
        one = fastest(network, copies, 1, 1, seconds)
        two_workers = fastest(network, copies, 1, 2, seconds)
        two = fastest(network, copies, 2, 1, seconds) if num_streams > 1 else None
        rows.append({
            "streams": num_streams,
            "queries": one.counts.num_queries,
            "without hidden": one.counts.answered_without_hidden,
            "MB": one.counts.bytes_held / 1e6,
            "one engine: queries/s": round(one.queries_per_s),
            "queries/cpu_s": round(one.counts.num_queries / one.cpu_s),
            "hidden layer on two threads": round(two_workers.queries_per_s),
            "two engines: queries/s": round(two.queries_per_s) if two else "",
            "queries/cpu_s of both": round(two.counts.num_queries / two.cpu_s) if two else "",
        })  # fmt: skip
    table(f"throughput over the number of streams, H = {network.hidden_size}, by the clock", rows, thousands=",")


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def long_stream(network: StatefulNetwork, stream: QueryStream, minutes: int, capacity_bytes: int) -> None:
    """One stream that never restarts: each round continues from a context of the previous round."""
    engine = CachedRNNLM(network, CacheOptions(capacity_bytes=capacity_bytes))
    rounds = round(minutes * 60 * FRAMES_PER_SECOND / stream.num_calls)
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
            engine.retain(torch.cat((context_of_node[last > call], context_of_node[reached[:1]])))
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
    table(f"one stream of {minutes} minutes within {capacity_bytes / 1e6:g} MB", rows, thousands=",")
