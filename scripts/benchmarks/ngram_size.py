"""Measures an n-gram model of any size step by step: CPU time and peak memory of building it, and look-up.

    scripts/bench ngram-size estimate --text TEXT.xz --transcripts TRANSCRIPTS.xz --vocabulary words.txt \\
        --map-unknown --order 7 --binary big.ngram --arpa big.arpa
    scripts/bench ngram-size convert --arpa big.arpa --binary converted.ngram
    scripts/bench ngram-size look-up --binary big.ngram --queries TRANSCRIPTS.xz \\
        --arpa big.arpa --kenlm-bin kenlm-0.3.0/bin

`estimate` goes from text directly to the binary file and then also writes ARPA text; `convert` reads the ARPA text;
`look-up` loads the file, queries it, and compares some scores with those of the ARPA text. KenLM's programs
(docs/benchmarks/ngram.md says how to build them) must be compiled for models of that order. Prints one JSON line per
step; the peak is the process's resident memory during the step (Linux).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.lm.corpus import read_word_stream
from asr.lm.ngram.arpa import LN_10, read_arpa, write_arpa
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.io import load_ngram_lm, save_ngram_lm
from asr.lm.ngram.model import NgramLM
from asr.lm.ngram.trie import NgramTrie
from asr.text.documents import open_text
from asr.text.symbols import UNK_ID, Vocabulary
from scripts.benchmarks.inputs import argument_parser
from scripts.benchmarks.ngram import budgets, copy_text, rates, sizes, walk
from scripts.benchmarks.peers.kenlm import kenlm_programs

CHECKED_SENTENCES = 3000
CHECKED_BY_TEXT = 500


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("ngram-size", __doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    estimate = actions.add_parser("estimate")
    estimate.add_argument("--text", nargs="+", default=[], type=Path)
    estimate.add_argument("--transcripts", nargs="+", default=[], type=Path)
    estimate.add_argument("--vocabulary", type=Path)
    estimate.add_argument("--order", type=int, default=7)
    estimate.add_argument("--map-unknown", action="store_true", help="count words outside the vocabulary as <unk>")
    convert = actions.add_parser("convert")
    look_up = actions.add_parser("look-up")
    look_up.add_argument("--queries", required=True, type=Path, help="lines 'utterance-id WORDS'")
    look_up.add_argument("--query-words", type=int, default=1_000_000)
    look_up.add_argument("--kenlm-bin", type=Path, help="compare with KenLM's programs")
    for action in (estimate, convert, look_up):
        action.add_argument("--arpa", type=Path, required=action is convert)
        action.add_argument("--binary", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    {"estimate": _estimate, "convert": _convert, "look-up": _look_up}[args.action](args)
    return 0


def _estimate(args: argparse.Namespace) -> None:
    with _Step("read the text") as step:
        vocabulary = Vocabulary.from_file(args.vocabulary) if args.vocabulary else None
        stream = read_word_stream(args.text, vocabulary, args.transcripts)
        stream = stream.with_unknown() if args.map_unknown else stream
        step.report |= {"words": stream.num_words}
    with _Step("estimate") as step:
        trie = estimate_kneser_ney(stream, args.order).trie
        step.report |= {"ngrams": sum(trie.counts), "by_order": trie.counts}
    del stream
    _save(trie, args.binary)
    if args.arpa:
        with _Step("write ARPA text") as step:
            write_arpa(trie, args.arpa)
            step.report |= {"bytes": args.arpa.stat().st_size}


def _convert(args: argparse.Namespace) -> None:
    with _Step("read ARPA text") as step:
        trie = read_arpa(args.arpa)
        step.report |= {"ngrams": sum(trie.counts), "by_order": trie.counts}
    _save(trie, args.binary)


def _save(trie: NgramTrie, binary: Path) -> None:
    with _Step("turn into arrays") as step:
        lm = NgramLM.from_trie(trie, binary.name)
        step.report |= {"states": lm.num_states}
    with _Step("hash index"):
        lm = lm.with_index()
    with _Step("write the binary file") as step:
        save_ngram_lm(lm, binary)
        step.report |= {"bytes": binary.stat().st_size}


def _look_up(args: argparse.Namespace) -> None:
    with _Step("load"):
        lm = load_ngram_lm(args.binary, verify=False)
    with _Step("load, checksums compared"):
        lm = load_ngram_lm(args.binary, verify=True)
    plain = NgramLM(lm.vocabulary, replace(lm.arrays, index=None), lm.order, lm.name)
    with _Step("sizes") as step:
        step.report |= {"ngrams": lm.num_arcs} | sizes(plain, lm)
    with tempfile.TemporaryDirectory(dir=args.binary.parent) as folder:
        queries = Path(folder) / "queries.txt"
        num_words = copy_text(args.queries, queries, args.query_words, has_id=True)
        with _Step("score text"):
            state, word, log_prob = walk(lm, queries)
        with _Step("look-ups") as step:
            step.report |= rates(lm, state, word)
        with _Step("device budgets") as step:
            step.report |= budgets(plain, lm, state, word)
        if args.arpa is not None:
            with _Step("scores by the text") as step:
                step.report |= _against_text(lm, args.arpa, queries, log_prob)
        if args.kenlm_bin is not None:
            with _Step("KenLM's programs") as step:
                known = {"query_words": num_words, "ngrams": lm.num_arcs} | rates(lm, state, word)
                step.report |= kenlm_programs(args.kenlm_bin, args.arpa, queries, known)
            with _Step("KenLM's scores") as step:
                step.report |= _against_kenlm(args, queries, log_prob)


def _against_text(lm: NgramLM, arpa: Path, queries: Path, log_prob: Tensor) -> dict[str, Any]:
    """The largest difference from what the ARPA text itself says of some sentences, backoffs followed by dictionary."""
    sentences = []
    is_listed = lm.arrays.word_map.ne(UNK_ID).tolist()
    known = {word for word, listed in zip(lm.vocabulary.words, is_listed, strict=True) if listed}
    for line in queries.read_text().splitlines()[:CHECKED_BY_TEXT]:
        words = [word if word in known else "<unk>" for word in line.split()]
        sentences.append([word.encode() for word in ("<s>", *words, "</s>")])
    spans = [(s, e - n, e) for s in sentences for e in range(1, len(s) + 1) for n in range(1, min(lm.order, e) + 1)]
    wanted = {b" ".join(sentence[begin:end]) for sentence, begin, end in spans}
    listed: dict[bytes, tuple[float, float]] = {}
    with open_text(arpa) as lines:
        for line in lines:
            fields = line.rstrip(b"\n").split(b"\t")
            if len(fields) > 1 and fields[1] in wanted:
                listed[fields[1]] = (float(fields[0]), float(fields[2]) if len(fields) > 2 else 0.0)
    theirs = []
    for sentence in sentences:
        for end in range(2, len(sentence) + 1):
            score, begin = 0.0, max(0, end - lm.order)
            while (ngram := b" ".join(sentence[begin:end])) not in listed:
                score += listed.get(b" ".join(sentence[begin : end - 1]), (0.0, 0.0))[1]
                begin += 1
            theirs.append((score + listed[ngram][0]) * LN_10)
    difference = log_prob[: len(theirs)].double() - torch.tensor(theirs, dtype=torch.float64)
    return {"checked_words": len(theirs), "max_abs_error_vs_text": float(difference.abs().max())}


def _against_kenlm(args: argparse.Namespace, queries: Path, log_prob: Tensor) -> dict[str, Any]:
    """The largest difference over the words of some sentences, sentence ends included."""
    sentences = queries.read_bytes().splitlines()[:CHECKED_SENTENCES]
    answer = subprocess.run(
        [args.kenlm_bin / "query", "-v", "word", args.arpa.with_suffix(".probing")],
        input=b"\n".join(sentences) + b"\n",
        check=True,
        capture_output=True,
    )
    # a word is `word=id length score`, tab behind it; a line ends with its total
    words = [field for line in answer.stdout.decode().splitlines() for field in line.split("\t") if "=" in field]
    theirs = np.array([float(field.split()[2]) for field in words]) * LN_10
    ours = log_prob[: len(theirs)].numpy().astype(np.float64)
    return {"checked_words": len(theirs), "max_abs_error_vs_kenlm": float(np.abs(ours - theirs).max())}


class _Step:
    """Prints a step's CPU time, time by the clock and peak memory with whatever is put into `report`."""

    def __init__(self, name: str) -> None:
        self.report: dict[str, Any] = {"step": name}

    def __enter__(self) -> _Step:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._cpu, self._clock = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        cpu, clock = time.process_time() - self._cpu, time.perf_counter() - self._clock
        status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
        peak_gb = int(status["VmHWM"].split()[0]) / 1e6
        self.report |= {"cpu_s": round(cpu, 2), "clock_s": round(clock, 2), "peak_gb": round(peak_gb, 2)}
        print(json.dumps(self.report), flush=True)
