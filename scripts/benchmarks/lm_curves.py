"""Perplexity against training time: the recipes' runs on WikiText-2 and faster-rnnlm's, as JSON and as a plot.

asr fit --config recipes/wikitext-2/rnnlm-gru100.yaml
scripts/bench lm-curves ours --row gru100 --folders exp/wikitext-2/rnnlm-gru100/version_* >> curves.jsonl
scripts/bench lm-curves peer --row gru100 --binary .../faster-rnnlm/rnnlm --models peer/ >> curves.jsonl
scripts/bench lm-curves plot curves.jsonl curves.png
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asr.lm.rnn.data import TokenFile
from scripts.benchmarks.figures import pyplot
from scripts.benchmarks.inputs import argument_parser, default_corpora
from scripts.benchmarks.lm import ROWS, corpus
from scripts.benchmarks.peers import faster_rnnlm


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("lm-curves", __doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    ours = actions.add_parser("ours", help="the curve of a recipe's run, from its logs")
    ours.add_argument("--row", choices=list(ROWS), required=True)
    ours.add_argument(
        "--folders", type=Path, nargs="+", required=True, help="folders version_* of the run and its continuations"
    )
    peer = actions.add_parser("peer", help="train and test the peer")
    peer.add_argument("--row", choices=list(ROWS), required=True)
    peer.add_argument("--binary", type=Path, required=True)
    peer.add_argument("--models", type=Path, required=True, help="folder for the trained models")
    peer.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of its training")
    peer.add_argument(
        "--test-lines", type=int, default=20, help="test NCE models on every N-th line, because it is slow"
    )
    peer.add_argument("--corpora", type=Path, default=default_corpora())
    drawing = actions.add_parser("plot", help="plot the JSON lines of curves")
    drawing.add_argument("curves", type=Path)
    drawing.add_argument("picture", type=Path)
    args = parser.parse_args(argv)
    if args.action == "plot":
        plot(args.curves, args.picture)
    elif args.action == "ours":
        print(json.dumps({"row": args.row, "system": "ours", "curve": read_curve(args.folders)}))
    else:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(peer_training(args, Path(folder))))
    return 0


def peer_training(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The peer trained to its own end; its curve and its perplexity on the test text or every n-th line of it."""
    _, parts, _ = corpus(args, folder)
    args.models.mkdir(parents=True, exist_ok=True)
    model = args.models / args.row
    (folder / "excerpt.txt").write_text(validation_excerpt(folder / "valid.txt", parts["valid"]), encoding="utf-8")
    texts = folder / "train.txt", folder / "excerpt.txt"
    result = faster_rnnlm.train(args.binary, model, ROWS[args.row][1], *texts, args.threads)
    line = {"row": args.row, "system": "faster-rnnlm", "threads": args.threads}
    line |= {"train_words_per_s": result.words_per_s, "train_words_per_cpu_s": result.words_per_cpu_s}
    every = 1 if ROWS[args.row][0]["output"] == "hierarchical" else args.test_lines
    text = (folder / "test.txt").read_text(encoding="utf-8").splitlines(keepends=True)[::every]
    (folder / "test.part").write_text("".join(text), encoding="utf-8")
    test = faster_rnnlm.score(args.binary, model, folder / "test.part", normalised=True)
    line |= {"test_perplexity": round(test.perplexity, 2), "test_lines": f"every {every}"}
    return {**line, "curve": result.curve}


def validation_excerpt(text: Path, tokens: TokenFile, num_streams: int = 8, num_words: int = 500) -> str:
    """The sentences that the recipes validate on: those inside the first words of eight streams."""
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    end = np.flatnonzero(tokens.token_id == 2) + 1
    first = np.arange(num_streams)[:, None] * (len(tokens.token_id) // num_streams)
    begin = np.concatenate(([0], end[:-1]))
    inside = ((begin >= first) & (end <= first + num_words)).any(axis=0)
    return "".join(line for line, is_inside in zip(lines, inside, strict=True) if is_inside)


def read_curve(folders: list[Path]) -> list[tuple[float, float, float]]:
    """(seconds of training by the clock, of the processor, validation perplexity) from a run's logs, resumed or not."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: dict[int, tuple[float, float, float]] = {}
    for folder in folders:
        events = EventAccumulator(str(folder)).Reload()
        if "val_perplexity" not in events.Tags()["scalars"]:
            continue  # interrupted before its first validation
        scalars = [events.Scalars(name) for name in ("train_seconds", "train_cpu_seconds", "val_perplexity")]
        for clock, processor, value in zip(*scalars, strict=True):
            points[clock.step] = round(clock.value, 1), round(processor.value, 1), round(value.value, 2)
    return [points[step] for step in sorted(points)]


def plot(curves: Path, picture: Path) -> None:
    """Validation perplexity against time by the clock, one line a training."""
    figure, axes = pyplot().subplots(figsize=(7, 4))
    colours: dict[str, Any] = {}
    for line in map(json.loads, curves.read_text(encoding="utf-8").splitlines()):
        seconds, _, values = zip(*line["curve"], strict=True)
        (drawn,) = axes.plot(
            seconds, values, "o-" if line["system"] == "ours" else "x--",
            label=f"{line['row']}, {line['system']}", color=colours.get(line["row"]),
        )  # fmt: skip
        colours[line["row"]] = drawn.get_color()
    axes.set(xlabel="seconds of training by the clock", ylabel="validation perplexity (excerpt)", yscale="log")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture)
