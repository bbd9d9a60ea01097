"""What the language model's caches saved, for a reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def format_cache(counts: Mapping[str, int | float]) -> Iterator[str]:
    """A few lines from the counts of `asr.query.statistics.QueryStatistics`; none without a recurrent model."""
    if not counts.get("num_queries"):
        return
    queries, hits = counts["num_queries"], counts["edge_hit_ratio"]
    yield f"language model: {queries:,} word scores asked in {counts['num_calls']:,} calls"
    yield f"  {hits:.1%} answered from the cache of scores; {counts['num_outputs']:,} computed by the output layer"
    yield (
        f"  {counts['num_hidden_rows']:,} histories went through the hidden layer, "
        f"{counts['mean_hidden_batch']:.1f} at a time ({counts['largest_hidden_batch']:,} at most); "
        f"{counts['answered_without_hidden']:.1%} of the scores needed no work of it"
    )
    if counts["num_history_normalizers"] or counts["num_group_normalizers"]:
        yield (
            f"  {counts['num_history_normalizers']:,} normalizers of histories and "
            f"{counts['num_group_normalizers']:,} of classes computed"
        )
    if counts["num_tree_decisions"]:
        yield f"  {counts['num_tree_decisions']:,} decisions along the tree's paths computed"
    yield (
        f"  {counts['num_contexts']:,} histories held in {counts['bytes_held'] / 1e6:.1f} MB; "
        f"{counts['num_evicted_contexts']:,} forgotten for space"
    )
    yield (
        f"  seconds: {counts['seconds_total']:.2f}, of them {counts['seconds_find']:.2f} finding, "
        f"{counts['seconds_hidden']:.2f} in the hidden layer, {counts['seconds_output']:.2f} in the output layer, "
        f"{counts['seconds_evict']:.2f} forgetting; {counts['num_transfers']:,} blocks with "
        f"{counts['bytes_moved'] / 1e6:.1f} MB moved between devices in {counts['seconds_transfer']:.2f} s"
    )
