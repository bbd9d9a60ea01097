#!/usr/bin/env python3
"""Measures the recurrent language models: training and scoring rates, normalisation, perplexity, the peer beside.

    python scripts/bench_lm.py --quick                                   rates and normalisation, under a minute
    python scripts/bench_lm.py --rows --peer .../faster-rnnlm/rnnlm      WikiText-2: ours and faster-rnnlm's
    python scripts/bench_lm.py --truncation lm/                          four-caches' Table 7 for a trained network

WikiText-2 is read from <corpora>/text/wikitext-2 (blank lines left out, per sentence, sentence ends counted); without
it the quick bench makes a text of its own, and says so. The peer is built by its own makefile; it is not part of this
project. The last line of --quick is JSON; --rows and --truncation print a JSON line for each row.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from asr.lm.network_file import load_network
from asr.lm.rnn_lm import RnnLm, RnnLmConfig
from asr.lm.sparse_rows import AdamWithSparseRows
from asr.lm.token_file import TokenFile, read_sentences
from asr.lm.token_streams import TokenStreams
from asr.lm.word_scores import language_model_word_scores, network_word_scores, perplexity
from asr.query.engine import RnnLM
from asr.text.vocabulary import SPECIAL_WORDS, Vocabulary

# The rows of the issue: ours, and the peer's options for the same.
ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gru100": ({"hidden_size": 100, "output": "nce"}, "--hidden 100 --hidden-type gru --nce 20".split()),
    "gru256": ({"hidden_size": 256, "output": "nce"}, "--hidden 256 --hidden-type gru --nce 20".split()),
    "sigmoid100": (
        {"hidden_size": 100, "output": "hierarchical", "cell": "sigmoid"},
        "--hidden 100 --hidden-type sigmoid".split(),
    ),
}
PEER_MAXENT = "--direct 4 --direct-order 4 --threads 1".split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", nargs="*", choices=[*ROWS, []], help="train these rows (default: all)")
    parser.add_argument("--truncation", type=Path, help="folder of a trained network")
    parser.add_argument("--text", type=Path, help="text for --truncation (default: WikiText-2's test part)")
    parser.add_argument("--max-words", type=int, default=20_000, help="words of it")
    parser.add_argument("--peer", type=Path, help="faster-rnnlm's binary")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--corpora", type=Path, default=_corpora())
    parser.add_argument("--compute-dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true", help="compile the element-wise work (torch 2, C++ compiler)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        if args.truncation is not None:
            for line in truncation_table(args):
                print(json.dumps(line), flush=True)
        elif args.rows is not None:
            for line in run_rows(args, Path(folder)):
                print(json.dumps(line), flush=True)
        else:
            print(json.dumps(quick(args, Path(folder))))
    return 0


def quick(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """GRU 256, NCE, MaxEnt of order 4: rates of a short training, of scoring, and the outputs' normalisation."""
    vocabulary, parts, is_real = corpus(args, folder)
    network = make_network(vocabulary, parts["train"], args, {"hidden_size": 256, "output": "nce"})
    begin = time.monotonic()
    # Two steps make the optimiser's state (and compile, where asked); they are not counted.
    train_words_per_s = train(network, parts["train"], args, epochs=1, warm_up_steps=2, max_seconds=12.0)
    network.eval()
    text = parts["test"].token_id
    rates = {}
    for name, normalized, num_words in (("normalised", True, 1500), ("unnormalised", False, 20_000)):
        part = text[:num_words]
        start = time.monotonic()
        _, excess = network_word_scores(network, part, normalized=normalized)
        rates[f"score_words_per_s_{name}"] = round(num_words / (time.monotonic() - start))
        if excess is not None:
            log_z = {"log_z_mean": round(float(excess.mean()), 4), "log_z_std": round(float(excess.std()), 4)}
    errors = []
    for output in ("hierarchical", "class"):
        options = {"hidden_size": 32, "output": output}
        errors.append(normalisation_error(make_network(vocabulary, parts["train"], args, options)))
    return {
        "bench": "lm", "text": "WikiText-2" if is_real else "synthetic", "vocabulary": len(vocabulary),
        "cpus": os.cpu_count(), "threads": 1, "torch": torch.__version__, "compute_dtype": args.compute_dtype,
        "seconds": round(time.monotonic() - begin, 1), "train_words_per_s": train_words_per_s, **rates,
        "max_normalisation_error": max(errors), **log_z,
    }  # fmt: skip


def run_rows(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Perplexity after each epoch against the seconds of training so far, for us and for the peer."""
    vocabulary, parts, is_real = corpus(args, folder)
    if not is_real:
        raise SystemExit("--rows needs WikiText-2 in the corpora folder")
    for row in args.rows or ROWS:
        options, peer_options = ROWS[row]
        network = make_network(vocabulary, parts["train"], args, {**options, "dropout": 0.3})
        curve: list[tuple[float, float]] = []
        rate = train(network, parts["train"], args, epochs=args.epochs, curve=curve, validation=parts["valid"])
        network.eval()
        log_prob, excess = network_word_scores(network, parts["test"].token_id, normalized=True)
        line = {"row": row, "system": "ours", "test_perplexity": round(perplexity(log_prob), 2), "curve": curve}
        if excess is not None:
            line |= {"log_z_mean": round(float(excess.mean()), 3), "log_z_std": round(float(excess.std()), 3)}
        yield {**line, "train_words_per_s": rate, "epochs": args.epochs}
        if args.peer is not None:
            yield {"row": row, "system": "faster-rnnlm", **run_peer(args, folder, peer_options)}


def run_peer(args: argparse.Namespace, folder: Path, options: list[str]) -> dict[str, Any]:
    """The peer on the same text, one thread, until its own stopping rule."""
    model = folder / "peer.model"
    files = {part: folder / f"{part}.txt" for part in ("train", "valid", "test")}
    command = [str(args.peer), "--rnnlm", str(model), *options, *PEER_MAXENT]
    begin = time.monotonic()
    done = subprocess.run(
        [*command, "--train", str(files["train"]), "--valid", str(files["valid"])],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.monotonic() - begin
    log = done.stdout + done.stderr
    epochs = [float(value) for value in re.findall(r"[Vv]alid(?:ation)?[^\n]*?entropy[^\d]*([\d.]+)", log)]
    test = subprocess.run(
        [str(args.peer), "--rnnlm", str(model), "--test", str(files["test"]), "--nce-accurate-test", "1"],
        capture_output=True, text=True, check=True)  # fmt: skip
    log_probs = [float(line) for line in test.stdout.split() if re.fullmatch(r"-?[\d.]+(?:e[-+]?\d+)?", line)]
    words = sum(len(sentence) + 1 for sentence in read_sentences(files["test"]))
    # It prints log10 of each sentence.
    result = round(10 ** (-sum(log_probs) / words), 2) if log_probs else None
    return {"test_perplexity": result, "validation_entropy_by_epoch": epochs, "seconds": round(seconds, 1)}


def truncation_table(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Perplexity when histories that end in the same k words share the hidden state of the first that came."""
    network = load_network(args.truncation)
    text = args.text or args.corpora / "text" / "wikitext-2" / "test.txt.xz"
    with tempfile.TemporaryDirectory() as folder:
        tokens = TokenFile.build([text], [], network.vocabulary, Path(folder) / "text.tokens").token_id
    ends = np.flatnonzero(tokens == 2) + 1
    tokens = tokens[: ends[min(np.searchsorted(ends, args.max_words), len(ends) - 1)]]
    for length in (1, 2, 3, 4, 5, None):
        engine = RnnLM(network, recombination_length=length)
        log_prob = language_model_word_scores(engine, tokens, sentences_at_once=64)
        # Scores are those of the search: less the constant log Z, which differs from the true one alike in all rows.
        line = {"history_words": length or "all", "words": len(log_prob)}
        yield {**line, "score_per_word": round(float(log_prob.mean()), 4), "exp": round(perplexity(log_prob), 2)}


def corpus(args: argparse.Namespace, folder: Path) -> tuple[Vocabulary, dict[str, TokenFile], bool]:
    """The training text's words; train, valid and test as token files, and as plain text for the peer."""
    source = args.corpora / "text" / "wikitext-2" if args.corpora else None
    is_real = source is not None and source.is_dir()
    for part in ("train", "valid", "test"):
        sentences = read_sentences(source / f"{part}.txt.xz") if source and is_real else synthetic(part == "train")
        (folder / f"{part}.txt").write_text("".join(" ".join(words) + "\n" for words in sentences), encoding="utf-8")
    counts = Counter(word for words in read_sentences(folder / "train.txt") for word in words)
    vocabulary = Vocabulary(word for word, _ in counts.most_common() if word not in SPECIAL_WORDS)
    parts = {
        part: TokenFile.build([folder / f"{part}.txt"], [], vocabulary, folder / f"{part}.tokens")
        for part in ("train", "valid", "test")
    }
    return vocabulary, parts, is_real


def synthetic(is_train: bool) -> Iterator[list[str]]:
    """Sentences of Zipf-distributed words, each third one decided by the word before it."""
    random = np.random.default_rng(1 if is_train else 2)
    for _ in range(20_000 if is_train else 2_000):
        ranks = np.minimum(random.zipf(1.2, 20), 30_000)
        ranks[2::3] = ranks[1::3][: len(ranks[2::3])] * 7 % 30_000
        yield [f"w{rank}" for rank in ranks]


def make_network(vocabulary: Vocabulary, tokens: TokenFile, args: argparse.Namespace, options: dict[str, Any]) -> RnnLm:
    config = RnnLmConfig(embedding_size=options["hidden_size"], maxent_order=4, maxent_size=1 << 22, **options)
    network = RnnLm(vocabulary, config, args.compute_dtype, args.compile)
    counts = torch.from_numpy(tokens.unigram_counts(len(vocabulary)))
    network.output.set_unigram(counts, reset_bias=True)
    return network


def train(
    network: RnnLm,
    tokens: TokenFile,
    args: argparse.Namespace,
    epochs: int,
    warm_up_steps: int = 0,
    max_seconds: float = math.inf,
    curve: list[tuple[float, float]] | None = None,
    validation: TokenFile | None = None,
) -> int:
    """Trains with the recipe's optimiser and a half-cosine schedule -> words a second of process time of training."""
    num_streams = 256 if max_seconds < math.inf else 64
    streams = TokenStreams(tokens.token_id, num_streams, 20, network.num_history_words)
    optimizer = AdamWithSparseRows(network.parameters(), lr=3e-3)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    num_steps, step, seconds, counted = epochs * len(streams), 0, 0.0, 0
    for _ in range(epochs):
        states = None
        network.train()
        for batch_idx in range(len(streams)):
            begin = time.monotonic()
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (0.02 + 0.49 * (1 + math.cos(math.pi * step / num_steps)))
            batch = streams[batch_idx]
            loss, states = network(batch, states, torch.Generator().manual_seed(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step > warm_up_steps:
                seconds += time.monotonic() - begin
                counted += batch.target_id.numel()
            if seconds > max_seconds:
                break
        if validation is not None and curve is not None:
            network.eval()
            log_prob, _ = network_word_scores(network, validation.token_id, normalized=True)
            curve.append((round(seconds, 1), round(perplexity(log_prob), 2)))
            print(f"epoch: {curve[-1][0]} s of training, validation perplexity {curve[-1][1]}", file=sys.stderr)
        if seconds > max_seconds:
            break
    return round(counted / seconds)


@torch.no_grad()
def normalisation_error(network: RnnLm) -> float:
    """The largest |sum over the vocabulary - 1| over some histories, with weights shaken up."""
    for parameter in network.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    num_words = len(network.vocabulary)
    worst = 0.0
    for _ in range(3):
        hidden = torch.randn(1, network.hidden_size).expand(num_words, -1)
        history = torch.randint(4, num_words, (1, network.num_history_words)).expand(num_words, -1)
        log_prob = network.log_prob(hidden, history, torch.arange(num_words))[2:]
        worst = max(worst, abs(float(log_prob.double().exp().sum()) - 1))
    return worst


def _corpora() -> Path | None:
    checkout = Path(__file__).resolve().parents[1]
    named = os.environ.get("ASR_CORPORA")
    for candidate in (
        Path(named) if named else None,
        checkout / "shared" / "data",
        checkout.parent / "shared" / "data",
    ):
        if candidate is not None and candidate.is_dir():
            return candidate
    return None


if __name__ == "__main__":
    sys.exit(main())
