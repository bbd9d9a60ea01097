"""Measures the recurrent language models: training and scoring rates, normalization, perplexity, also of a peer.

    scripts/bench lm --quick --peer .../faster-rnnlm/rnnlm      rates and normalization, under a minute
    scripts/bench lm --truncation checkpoints/librispeech      perplexity with histories of k words
    scripts/bench lm --collisions                              MaxEnt n-grams that share a weight

WikiText-2 is read from <corpora>/text/wikitext-2 (blank lines skipped, one sentence per line, sentence ends counted);
without it --quick uses a synthetic text, and says so. The peer is not part of this project (faster_rnnlm.py says how to
build it). All results are printed as JSON lines; --quick prints one.
For complete trainings, see `scripts/bench lm-curves`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asr.bundle import read_rnn_lm
from asr.kernels.jit import torch_on_one_thread
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.evaluate import language_model_word_scores, perplexity
from asr.lm.rnn.data import TokenFile, TokenStreams, pack_sentences
from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.lm.rnn.optim import AdamWithSparseRows
from asr.lm.rnn.outputs.nce import NceOutput
from asr.text.symbols import SPECIAL_WORDS, Vocabulary
from scripts.benchmarks.inputs import argument_parser, default_corpora, read_sentences, required_corpora
from scripts.benchmarks.lm_rates import Clock, peer_rates, ratios, scoring_rates

# For each row: the recipe's name, the network that --quick builds, and the peer's options for the same network.
ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gru100": ({"hidden_size": 100, "output": "nce"}, "--hidden 100 --hidden-type gru --nce 20".split()),
    "gru256": ({"hidden_size": 256, "output": "nce"}, "--hidden 256 --hidden-type gru --nce 20".split()),
    "sigmoid100": (
        {"hidden_size": 100, "output": "hierarchical", "cell": "sigmoid"},
        "--hidden 100 --hidden-type sigmoid".split(),
    ),
}


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("lm", __doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--row", choices=[*ROWS], default="gru256", help="network of --quick")
    parser.add_argument("--peer", type=Path, help="faster-rnnlm's binary, for comparison")
    parser.add_argument("--collisions", action="store_true", help="count MaxEnt n-grams that share a weight")
    parser.add_argument("--truncation", type=Path, help="trained network, or a bundle with one")
    parser.add_argument("--text", type=Path, help="text for --truncation (default: transcripts of dev-clean)")
    parser.add_argument("--max-words", type=int, default=5_000, help="number of words of the text")
    parser.add_argument("--corpora", type=Path, default=default_corpora())
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the multithreaded scoring")
    parser.add_argument("--compute-dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--compile", action="store_true", help="compile element-wise operations (needs torch 2 and a C++ compiler)"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        if args.truncation is not None:
            for line in truncation_table(args):
                print(json.dumps(line), flush=True)
        elif args.collisions:
            print(json.dumps(collisions(args, Path(folder))))
        else:
            print(json.dumps(quick(args, Path(folder))))
    return 0


def quick(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """NCE and MaxEnt of order 4: rates of a short training, of scoring, and the outputs' normalisation.

    Rates are words a second by the clock with all threads; then of scoring with one; then of processor time with one,
    which say something on a machine that is not idle, too.
    """
    vocabulary, parts, is_real = corpus(args, folder)
    options = {**ROWS[args.row][0], "num_noise_words": 256}
    network = make_network(vocabulary, parts["train"], args, options)
    begin = time.monotonic()
    training = [train(network, parts["train"], threads, max_seconds=2.0) for threads in (1, args.threads)]
    network.eval()
    tree = make_network(vocabulary, parts["train"], args, ROWS["sigmoid100"][0]).eval()
    rates, log_z = scoring_rates(network, tree, parts["test"].token_id, args.threads)
    errors = []
    for output in ("hierarchical", "class"):
        small = {"hidden_size": 32, "output": output}
        errors.append(normalisation_error(make_network(vocabulary, parts["train"], args, small)))
    rates["per_cpu_second"]["train_words_per_s"] = training[0][1]
    rates["by_clock_all_threads"]["train_words_per_s"] = training[1][0]
    report = {
        "bench": "lm", "row": args.row, "text": "WikiText-2" if is_real else "synthetic",
        "vocabulary": len(vocabulary), "cpus": os.cpu_count(), "threads": args.threads, "torch": torch.__version__,
        "compute_dtype": args.compute_dtype, **rates["by_clock_all_threads"],
        "by_clock_one_thread": rates["by_clock_one_thread"], "per_cpu_second": rates["per_cpu_second"],
        "max_normalisation_error": max(errors), **log_z,
    }  # fmt: skip
    if args.peer is not None:
        report["peer"] = peer = peer_rates(args.peer, folder, ROWS[args.row][1], ROWS["sigmoid100"][1], args.threads)
        report["ratio"] = ratios(rates, peer)
    return {**report, "seconds": round(time.monotonic() - begin, 1)}


def collisions(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Of the training text's distinct n-grams, those that share a weight, at table sizes of 1 M to 16 M."""
    vocabulary, parts, is_real = corpus(args, folder)
    table = {}
    for bits in (20, 22, 24):
        maxent = HashedMaxEnt(len(vocabulary), 4, 1 << bits)
        orders = measure_collisions(maxent, parts["train"].token_id)
        table[1 << bits] = [
            (order, num_ngrams, round(num_shared / num_ngrams, 4)) for order, num_ngrams, num_shared in orders
        ]
    return {"text": "WikiText-2" if is_real else "synthetic", "order_ngrams_shared_by_table_size": table}


def measure_collisions(maxent: HashedMaxEnt, token_id: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """For orders from 2 on: distinct n-grams of a text (L,), and those whose weight another n-gram, of any order, has.

    Sentence starts count as words. The features are those of words; output layers that hash nodes or classes ask for
    more than one weight a word.
    """
    num_words = maxent.vocabulary_size
    slots = []
    parts = list(pack_sentences(token_id, maxent.order - 1, len(token_id)))
    history = torch.cat([part.history for part in parts])
    word_id = torch.cat([part.word_id for part in parts]).numpy()
    places = maxent.places(history).numpy()
    history_idx = np.zeros(len(word_id), dtype=np.int64)
    for age in range(maxent.order - 1):
        # Numbers the distinct histories of this length: shorter ones' numbers joined by the next older word.
        _, history_idx = np.unique(history_idx * num_words + history[:, age].numpy(), return_inverse=True)
        _, first = np.unique(history_idx * num_words + word_id, return_index=True)
        slots.append(places[first, age] + word_id[first])
    used, num_users = np.unique(np.concatenate(slots), return_counts=True)
    return [
        (order, len(slot), int((num_users[np.searchsorted(used, slot)] > 1).sum()))
        for order, slot in enumerate(slots, start=2)
    ]


def truncation_table(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Perplexity when histories that end in the same k words share the hidden state of the first that came.

    As in Huang et al. (2014), Table 7.
    """
    network: Any = read_rnn_lm(args.truncation).network
    if isinstance(network.output, NceOutput):
        network.output.normalized = True
    text = [] if args.text is None else [args.text]
    transcripts = [] if text else [required_corpora(args.corpora) / "text" / "dev-clean.text.xz"]
    with tempfile.TemporaryDirectory() as folder:
        tokens = TokenFile.build(text, transcripts, network.vocabulary, Path(folder) / "text.tokens").token_id
    ends = np.flatnonzero(tokens == 2) + 1
    tokens = tokens[: ends[min(np.searchsorted(ends, args.max_words), len(ends) - 1)]]
    for length in (1, 2, 3, 4, 5, None):
        engine = CachedRNNLM(network, CacheOptions(recombination_length=length))
        log_prob = language_model_word_scores(engine, tokens, sentences_at_once=64)
        line = {"history_words": length or "all", "words": len(log_prob)}
        yield {**line, "perplexity": round(perplexity(log_prob), 2)}


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


def make_network(
    vocabulary: Vocabulary, tokens: TokenFile, args: argparse.Namespace, options: dict[str, Any]
) -> RNNLanguageModel:
    config = RNNLMConfig(embedding_size=options["hidden_size"], maxent_order=4, maxent_size=1 << 22, **options)
    network = RNNLanguageModel(vocabulary, config, args.compute_dtype, args.compile)
    counts = torch.from_numpy(tokens.unigram_counts(len(vocabulary)))
    network.output.set_unigram(counts, reset_bias=True)
    return network


def train(network: RNNLanguageModel, tokens: TokenFile, num_threads: int, max_seconds: float) -> tuple[int, int]:
    """The recipes' batches and optimiser for about `max_seconds` -> words a second of wall and of processor time.

    Two steps make the optimiser's state (and compile, where asked); they are not counted.
    """
    torch.set_num_threads(num_threads)
    streams = TokenStreams(tokens.token_id, 64, 20, network.num_history_words)
    optimizer = AdamWithSparseRows(network.parameters(), lr=3e-3)
    states, clock, counted = None, Clock(), 0
    for step in range(len(streams)):
        if step == 2:
            clock, counted = Clock(), 0
        batch = streams[step]
        with torch_on_one_thread():
            loss, states = network(batch, states, torch.Generator().manual_seed(step))
            loss.backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        counted += batch.target_id.numel()
        if step > 2 and time.monotonic() - clock.wall > max_seconds:
            break
    wall, processor = clock.seconds()
    return round(counted / wall), round(counted / processor)


@torch.no_grad()
def normalisation_error(network: RNNLanguageModel) -> float:
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
