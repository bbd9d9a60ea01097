"""Figures of the benchmarks; matplotlib is needed only here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asr.errors import AsrError


def pyplot() -> Any:
    """matplotlib's pyplot for files, no screen.

    Raises:
        AsrError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise AsrError("figures need matplotlib; run `pip install 'onepass-asr[plots]'`.") from error
    matplotlib.use("svg")
    # Text as text, and the same names of things in each run: smaller SVG files that differ where figures do.
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "figure"
    import matplotlib.pyplot

    return matplotlib.pyplot


def error_over_time(rows: list[dict[str, Any]], name: str, path: Path) -> None:
    """Error rate over time, a curve for each system, as in Lee et al. (2015), Figure 2."""
    figure, axes = pyplot().subplots(figsize=(5.5, 3.6))
    for kind in dict.fromkeys(row["system"] for row in rows):
        some = [row for row in rows if row["system"] == kind]
        times, rates = [row["of real time"] for row in some], [row["WER"] for row in some]
        axes.plot(times, rates, "o-", label=kind, markersize=4)
    axes.set(
        xlabel="CPU time of search and language model, of real time",
        ylabel="word error rate, %",
        xscale="log",
        title=name,
    )
    _save(figure, axes, path)


def n_best(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds over the list's size, as in Si et al. (2013), Figure 4."""
    figure, axes = pyplot().subplots(figsize=(5.5, 3.6))
    for utterance, style in (("middle", "o-"), ("longest", "s--")):
        some = [row for row in rows if row["utterance"] == utterance]
        for column in ("s, sentence by sentence", "s, tree, row by row", "s, tree, level by level"):
            label = f"{column[3:]}, {utterance} utterance"
            axes.plot([row["n-best"] for row in some], [row[column] for row in some], style, label=label, markersize=4)
    axes.set(xlabel="sentences in the list", ylabel="CPU s", xscale="log", yscale="log", title="n-best rescoring")
    _save(figure, axes, path)


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
