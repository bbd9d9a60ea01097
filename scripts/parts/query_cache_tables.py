"""four-caches, Table 5: each cache added in turn, for any output layer, with and without the skip heuristic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asr.lm.cached.engine import CachedRNNLM
from asr.lm.interface import StatefulNetwork
from parts.markdown_table import table
from parts.query_workload import run
from scripts.benchmarks.query_stream import QueryStream

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
                engine = CachedRNNLM(network, **options)
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
