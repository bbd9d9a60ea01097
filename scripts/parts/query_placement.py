"""The query engine on a GPU, or with its layers on both sides, on recorded query streams."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asr.lm.cached.engine import CachedRNNLM
from asr.lm.interface import StatefulNetwork
from parts.markdown_table import table
from parts.query_throughput import copies_of, fastest
from scripts.benchmarks.query_stream import QueryStream, merged, replay

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

    The device is waited for at each reading of the clock, so that each stage's seconds are its own. Differences are to
    the answers of the first row, all on the CPU.
    """
    on = {_CPU: copy.deepcopy(network).to(_CPU), device: copy.deepcopy(network).to(device)}  # type: ignore[attr-defined]
    places = [(_CPU, _CPU, _CPU)]
    if device != _CPU:
        places += [(_CPU, device, _CPU), (device, device, _CPU), (device, _CPU, device), (device, device, device)]
    stream, expected, rows = merged(streams), None, []
    for search, hidden, output in places:
        for batching in ("query", "frame"):
            engine = CachedRNNLM(on[output], [on[hidden]], search_device=search, batching=batching, synchronize=True)
            answers: Tensor = replay(stream.to(search), engine).cpu()
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
