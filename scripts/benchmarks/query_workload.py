"""Shared code of the tables of `scripts/bench query`: networks, replays, the naive engine, and printing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from asr.lm.cached.engine import CachedRNNLM
from asr.lm.cached.states import QueryStatistics
from asr.lm.interface import StatefulNetwork
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.testing.plain_lm import PlainLM
from asr.text.symbols import BOS_ID, Vocabulary
from scripts.benchmarks.clock import waiting_clock
from scripts.benchmarks.query_stream import QueryStream, replay


def random_network(output: str, hidden_size: int = 256) -> RNNLanguageModel:
    """GRU with trigram features, as in frame-batch (NCE), or with a class softmax as in four-caches."""
    torch.manual_seed(0)
    config = RNNLMConfig(hidden_size, hidden_size, output=output, maxent_order=3, maxent_size=1 << 20)  # type: ignore[arg-type]
    network = RNNLanguageModel(Vocabulary([f"w{i}" for i in range(65_000)]), config)
    if network.maxent is not None:
        torch.nn.init.normal_(network.maxent.weight, std=0.05)
    return network.eval()


def run(
    engine: CachedRNNLM, streams: Sequence[QueryStream], marks: bool = False, resets: bool = False
) -> tuple[Tensor, float]:
    """Replays streams one after another -> log_prob (Q,) of all, processor seconds."""
    begin, scores = time.process_time(), []
    for stream in streams:
        if resets:
            engine.reset()
        scores.append(replay(stream, engine, marking(stream, engine) if marks else None))
    return torch.cat(scores), time.process_time() - begin


def marking(stream: QueryStream, engine: CachedRNNLM) -> Callable[[int, Tensor], None]:
    """After each call, marks the contexts that later calls query as live."""
    last = stream.last_call_of_context()
    reached = torch.stack([call.max() for call in stream.calls()]).cummax(0).values

    def mark(call: int, context_of_node: Tensor) -> None:
        live = (last[: int(reached[call]) + 1] > call).nonzero().squeeze(1)
        engine.retain(context_of_node[live])

    return mark


def naive_seconds(network: StatefulNetwork, stream: QueryStream, num: int) -> tuple[float, float]:
    """Wall and processor seconds per query with one network call per query; the fastest of three runs."""
    generator = torch.Generator().manual_seed(0)
    nodes = stream.query[torch.randint(0, stream.query.numel(), (num,), generator=generator)]
    first, device = network.state_size - network.hidden_size, network.initial_state().device
    plain, asked = PlainLM(network), []
    for words in stream.histories(nodes):
        newest_first = [*reversed([BOS_ID, *words[:-1]]), 0, 0, 0, 0][: network.num_history_words]
        state = plain.state_after((BOS_ID, *words[:-1]))
        history = torch.tensor([newest_first], dtype=torch.int64, device=device)
        asked.append((state, history, torch.tensor([words[-1]], device=device)))
    best, clock = (float("inf"), float("inf")), waiting_clock(device)
    with torch.no_grad():
        for _ in range(3):
            wall, cpu = clock(), time.process_time()
            for state, history, word_id in asked:
                network.log_prob(state[:, first:], history, word_id)
                network.step(state, word_id)
            best = min(best, (clock() - wall, time.process_time() - cpu))
    return best[0] / num, best[1] / num


def max_abs_error(network: StatefulNetwork, stream: QueryStream, log_prob: Tensor, num: int) -> float:
    """The largest error of a sample of the scores against the network run word by word."""
    sample = torch.randint(0, stream.query.numel(), (num,), generator=torch.Generator().manual_seed(1))
    plain = PlainLM(network)
    expected = [plain.last_log_prob(words) for words in stream.histories(stream.query[sample])]
    return float((log_prob[sample] - torch.tensor(expected)).abs().max())


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
