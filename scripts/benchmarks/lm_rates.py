"""Words per second of `scripts/bench lm`, in wall-clock and processor time: ours and faster-rnnlm's."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.lm.evaluate import network_word_scores
from asr.lm.rnn.model import RNNLanguageModel
from asr.lm.rnn.outputs.nce import NceOutput
from scripts.benchmarks.inputs import read_sentences
from scripts.benchmarks.peers import faster_rnnlm

Rates = dict[str, int]
_RUNS = 5  # of our scoring that takes less than a second; the median counts
_PEER_RUNS, _PEER_LENGTH = 3, 2  # the same for the peer, which reads the text twice a run so that it takes long enough


class Clock:
    """Wall and processor time from its making on."""

    def __init__(self) -> None:
        self.wall, self.processor = time.monotonic(), time.process_time()

    def seconds(self) -> tuple[float, float]:
        """Of either."""
        return time.monotonic() - self.wall, time.process_time() - self.processor


def scoring_rates(
    network: RNNLanguageModel, tree: RNNLanguageModel, text: NDArray[np.int32], num_threads: int
) -> tuple[dict[str, Rates], dict[str, float]]:
    """Rates by the clock with all threads and with one, and of processor time with one; figures of log Z."""
    rates: dict[str, Rates] = {"by_clock_all_threads": {}, "by_clock_one_thread": {}, "per_cpu_second": {}}
    excess: dict[str, Tensor] = {}
    kinds = (
        ("normalised", network, True, "float32"), ("normalised_int8", network, True, "int8"),
        ("unnormalised", network, False, "float32"), ("tree", tree, False, "float32"),
    )  # fmt: skip
    for kind, scored, normalized, precision in kinds:
        name, part = f"score_words_per_s_{kind}", text[:36_000] if normalized else text
        if isinstance(scored.output, NceOutput):
            scored.output.normalizer_precision = precision
        network_word_scores(scored, text[:2000], normalized=normalized)  # loads the compiled loops
        for by_clock, threads in (("by_clock_all_threads", num_threads), ("by_clock_one_thread", 1)):
            torch.set_num_threads(threads)
            seconds = []
            for _ in range(1 if normalized else _RUNS):
                clock = Clock()
                _, more = network_word_scores(scored, part, normalized=normalized)
                seconds.append(clock.seconds())
            wall, processor = map(median, zip(*seconds, strict=True))
            rates[by_clock][name] = round(len(part) / wall)
        rates["per_cpu_second"][name] = round(len(part) / processor)
        if more is not None:
            excess[precision] = more.double()
    log_z = {"log_z_mean": excess["float32"].mean(), "log_z_std": excess["float32"].std()}
    error = (excess["int8"] - excess["float32"]).abs()
    log_z |= {"int8_log_z_error_mean": error.mean(), "int8_log_z_error_max": error.max()}
    return rates, {name: round(float(value), 5) for name, value in log_z.items()}


def peer_rates(
    binary: Path, folder: Path, options: list[str], tree_options: list[str], num_threads: int
) -> dict[str, Rates]:
    """faster-rnnlm's on parts of the text in a folder: by the clock, training with that many threads, and of processor
    time with one; it scores with one.

    options, tree_options: of the network whose training and scoring are measured, and of the one with a tree.
    """
    rates: dict[str, Rates] = {"by_clock": {}, "per_cpu_second": {}}
    sizes = {"train": 120_000, "valid": 100, "test": 2_000}
    for part, num_words in sizes.items():
        lines = (folder / f"{part}.txt").read_text(encoding="utf-8").splitlines()
        length = np.cumsum([len(line.split()) + 1 for line in lines])
        short = lines[: int(np.searchsorted(length, num_words)) + 1]
        (folder / f"{part}.short").write_text("".join(line + "\n" for line in short), encoding="utf-8")
    (folder / "test.long").write_text(
        _PEER_LENGTH * (folder / "test.txt").read_text(encoding="utf-8"), encoding="utf-8"
    )
    # Its vocabulary file: what makes a short training text do. The first line is the sentence end.
    counts = Counter(word for words in read_sentences(folder / "train.txt") for word in [*words, "</s>"])
    ranked = sorted(counts.items(), key=lambda item: (item[0] != "</s>", -item[1]))

    def train(model: Path, row: list[str], threads: int = 1) -> faster_rnnlm.PeerTraining:
        model.write_text("".join(f"{word} {count}\n" for word, count in ranked), encoding="utf-8")
        files = folder / "train.short", folder / "valid.short"
        return faster_rnnlm.train(binary, model, row, *files, threads, ("--retry", "0", "--stop", "9"))

    for row, is_tree in ((options, False), (tree_options, True)):
        model = folder / f"peer{is_tree}"
        training = train(model, row)
        kinds = (("normalised", True, "test.short"), ("unnormalised", False, "test.long"))
        for kind, normalised, text in (("tree", False, "test.long"),) if is_tree else kinds:
            num_words = sum(len(words) + 1 for words in read_sentences(folder / text))
            runs = [
                faster_rnnlm.score(binary, model, folder / text, normalised=normalised)
                for _ in range(1 if normalised else _PEER_RUNS)
            ]
            name = f"score_words_per_s_{kind}"
            rates["by_clock"][name] = round(num_words / median(run.clock_seconds for run in runs))
            rates["per_cpu_second"][name] = round(num_words / median(run.processor_seconds for run in runs))
        if not is_tree:
            rates["per_cpu_second"]["train_words_per_s"] = training.words_per_cpu_s
            together = train(folder / "peer_of_threads", row, num_threads)
            rates["by_clock"]["train_words_per_s"] = together.words_per_s
    return rates


def ratios(ours: dict[str, Rates], peer: dict[str, Rates]) -> dict[str, dict[str, float]]:
    """Each of our rates over the peer's of the same kind of second; it normalises in one precision."""
    table = {}
    for kind, rates in ours.items():
        theirs = peer["per_cpu_second" if kind == "per_cpu_second" else "by_clock"]
        pairs = {name: theirs.get(name.removesuffix("_int8")) for name in rates}
        table[kind] = {name: round(rates[name] / rate, 2) for name, rate in pairs.items() if rate is not None}
    return table
