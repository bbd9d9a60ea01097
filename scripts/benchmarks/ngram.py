"""Compares n-gram look-up with KenLM on real text: exactness, rate, memory, and small device budgets.

    scripts/bench ngram --quick                      a 4-gram of 1.5 M words, under a minute
    scripts/bench ngram --train-words 0 --order 4    of all the text (takes memory and time)

KenLM's Python package gets the same queries in the same run. Its rate is that of `Model.score` on whole sentences,
where the loop over the words runs in C++ in one thread; ours is that of batches from two threads. KenLM's own programs
are measured as well if `--kenlm-bin` names a folder with `query` and `build_binary` (docs/benchmarks/ngram.md says how
to build them). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.lm.corpus import read_word_stream
from asr.lm.ngram.arpa import LN_10, write_arpa
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.io import load_ngram_lm, save_ngram_lm
from asr.lm.ngram.model import NgramLM
from asr.lm.offload import HostNgramLM, bytes_to_find_arcs
from asr.text.documents import open_text
from asr.text.symbols import BOS_ID, UNK_ID
from scripts.benchmarks.inputs import argument_parser, default_corpora
from scripts.benchmarks.peers.kenlm import kenlm_programs, same_states

QUICK_TRAIN_WORDS = 1_500_000
NUM_THREADS = 2
STATE_SENTENCES = 3000
FRAME_QUERIES = 2000


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("ngram", __doc__)
    parser.add_argument("--quick", action="store_true", help=f"train on {QUICK_TRAIN_WORDS} words")
    parser.add_argument("--corpora", type=Path, default=default_corpora(), help="folder with text/gutenberg-40m.txt.xz")
    parser.add_argument("--train-words", type=int, default=QUICK_TRAIN_WORDS, help="words to train on; 0: all")
    parser.add_argument("--query-words", type=int, default=1_000_000, help="number of words to look up")
    parser.add_argument("--order", type=int, default=4)
    parser.add_argument("--kenlm-bin", type=Path, help="folder with KenLM's query and build_binary")
    parser.add_argument("--load", type=float, default=0.5, help="share of the hash index's slots in use")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report: dict[str, Any] = {"bench": "ngram", "order": args.order, "cpus": os.cpu_count(), "torch": torch.__version__}
    if args.corpora is None:
        raise AsrError("there are no corpora; name the folder that has text/ with --corpora or ASR_CORPORA.")
    with tempfile.TemporaryDirectory() as folder:
        report |= _run(args, Path(folder))
    print(json.dumps(report))
    return 0


def _run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = {}
    text, queries = folder / "train.txt", folder / "queries.txt"
    with _Timer(report, "text_s"):
        source = args.corpora / "text"
        report["train_words"] = copy_text(source / "gutenberg-40m.txt.xz", text, args.train_words, has_id=False)
        report["query_words"] = copy_text(source / "train-clean-100.text.xz", queries, args.query_words, has_id=True)
    with _Timer(report, "estimate_s"):
        trie = estimate_kneser_ney(read_word_stream([text]), args.order).trie
    report["ngrams"] = sum(trie.counts)
    with _Timer(report, "write_arpa_s"):
        write_arpa(trie, folder / "lm.arpa")
    with _Timer(report, "arrays_s"):
        plain = NgramLM.from_trie(trie)
        lm = plain.with_index(args.load)
    with _Timer(report, "save_s"):
        save_ngram_lm(lm, folder / "lm.ngram")
    with _Timer(report, "load_s"):
        lm = load_ngram_lm(folder / "lm.ngram", verify=False)
    report |= sizes(plain, lm)
    state, word, log_prob = walk(lm, queries)
    report |= _against_kenlm(lm, folder / "lm.arpa", queries, state, word, log_prob)
    if args.kenlm_bin is not None:
        with _Timer(report, "kenlm_programs_s"):
            report |= kenlm_programs(args.kenlm_bin, folder / "lm.arpa", queries, report)
    report |= budgets(plain, lm, state, word)
    return report


def sizes(plain: NgramLM, lm: NgramLM) -> dict[str, Any]:
    def per_ngram(model: NgramLM) -> float:
        return round(sum(model.arrays.num_bytes().values()) / model.num_arcs, 2)

    return {
        "bytes_per_ngram": per_ngram(plain),
        "bytes_per_ngram_indexed": per_ngram(lm),
        "bytes_per_ngram_quantized": per_ngram(plain.quantized()),
        "states": lm.num_states,
    }


def walk(lm: NgramLM, queries: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Every word's state before it, its id and its score, in the text's order; (Q,) each, sentence ends included."""
    stream = read_word_stream([queries], lm.vocabulary)
    word_id = np.where(stream.word_id < stream.num_listed, stream.word_id, UNK_ID).astype(np.int64)
    begin = np.flatnonzero(word_id == BOS_ID)
    length = np.diff(begin, append=len(word_id)) - 1
    state = torch.zeros(len(word_id), dtype=torch.int64)
    score = torch.zeros(len(word_id))
    words = torch.from_numpy(word_id)
    context_idx = lm.start(len(begin))
    for step in range(1, int(length.max()) + 1):
        alive = np.flatnonzero(length >= step)
        place = torch.from_numpy(begin[alive] + step)
        kept = torch.from_numpy(alive)
        state[place] = context_idx[kept]
        score[place], context_idx[kept] = lm.score(context_idx[kept], words[place])
    asked = words.ne(BOS_ID)
    return state[asked], words[asked], score[asked]


def _against_kenlm(
    lm: NgramLM, arpa: Path, queries: Path, state: Tensor, word: Tensor, log_prob: Tensor
) -> dict[str, Any]:
    import kenlm

    report: dict[str, Any] = {}
    with _Timer(report, "kenlm_load_s"):
        model = kenlm.Model(str(arpa))
    sentences = queries.read_text().splitlines()
    theirs = np.fromiter((s for text in sentences for s, _, _ in model.full_scores(text)), np.float64, len(word))
    report["max_abs_error_vs_kenlm"] = float(np.abs(log_prob.numpy().astype(np.float64) - theirs * LN_10).max())
    report["states_equal_kenlm"] = same_states(model, sentences[:STATE_SENTENCES], state)
    theirs_s: list[tuple[float, float]] = []

    def ask_kenlm() -> None:
        theirs_s.append(_seconds(lambda: [model.score(text) for text in sentences]))

    report |= rates(lm, state, word, ask_kenlm)
    kenlm_wall, kenlm_cpu = map(min, zip(*theirs_s, strict=True))
    cpu = len(word) / report["lookups_per_cpu_s"]
    return report | {
        "kenlm_words_per_s": round(len(word) / kenlm_wall),
        "lookups_over_kenlm": round(report["lookups_per_s_2_threads"] * kenlm_wall / len(word), 2),
        "lookups_over_kenlm_per_cpu_second": round(kenlm_cpu / cpu, 2),
    }


def rates(lm: NgramLM, state: Tensor, word: Tensor, between: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Look-ups a second by one thread and by two; `between` takes turns, so that a busy machine disturbs both alike."""
    lm.score(state[:10], word[:10])  # compiles
    ours_s, threads_s = [], []
    parts = list(zip(state.chunk(NUM_THREADS), word.chunk(NUM_THREADS), strict=True))
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for _ in range(3):
            between()
            ours_s.append(_seconds(lambda: lm.score(state, word)))
            threads_s.append(_seconds(lambda: list(pool.map(lambda part: lm.score(*part), parts)))[0])
    wall, cpu = map(min, zip(*ours_s, strict=True))
    return {
        "lookups_per_s_1_thread": round(len(word) / wall),
        "lookups_per_cpu_s": round(len(word) / cpu),
        "lookups_per_s_2_threads": round(len(word) / min(threads_s)),
    }


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall time and this thread's CPU time of some work."""
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - wall, time.thread_time() - cpu


def budgets(plain: NgramLM, lm: NgramLM, state: Tensor, word: Tensor) -> dict[str, Any]:
    """Frames of queries under three budgets: the same answers, what is fetched, and how long it takes."""
    total = sum(plain.arrays.num_bytes().values())
    frames = [(s, w) for s, w in zip(state.split(FRAME_QUERIES), word.split(FRAME_QUERIES), strict=True)][:200]
    report: dict[str, Any] = {}
    expected = [lm.score(s, w) for s, w in frames]
    placements = {"resident": 2 * total, "index": 0, "tenth": total // 10}
    index_bytes = bytes_to_find_arcs(plain)
    placements["index"] = index_bytes + total // 20
    for name, budget in placements.items():
        host = HostNgramLM(lm if name == "tenth" else plain, "cpu", budget)
        begin = time.perf_counter()
        answers = [host.score(s, w) for s, w in frames]
        seconds = time.perf_counter() - begin
        pairs = zip(answers, expected, strict=True)
        same = all(torch.equal(a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
        report[f"{name}_identical"] = same
        report[f"{name}_us_per_query"] = round(1e6 * seconds / sum(len(w) for _, w in frames), 3)
        report[f"{name}_placement"] = host.placement
        report[f"{name}_device_share"] = round(host.device_bytes / total, 3)
        report[f"{name}_hit_ratio"] = round(host.statistics.hit_ratio, 3)
    report["device_share"] = round(index_bytes / total, 3)
    report["tenth_budget_identical"] = report.pop("tenth_identical")
    return report


def copy_text(source: Path, target: Path, max_words: int, has_id: bool) -> int:
    """Copies sentences until `max_words` are reached (0: all); returns the number of words."""
    num_words = 0
    with open_text(source) as lines, target.open("wb") as out:
        for line in lines:
            words = line.split()[1:] if has_id else line.split()
            if words:
                num_words += len(words)
                out.write(b" ".join(words) + b"\n")
            if max_words and num_words >= max_words:
                break
    return num_words


class _Timer:
    """Puts the seconds of a block into a report and on stderr."""

    def __init__(self, report: dict[str, Any], name: str) -> None:
        self._report, self._name = report, name

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._report[self._name] = round(time.perf_counter() - self._begin, 2)
        print(f"{self._name}: {self._report[self._name]}", file=sys.stderr, flush=True)
