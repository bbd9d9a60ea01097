"""`asr lm rnn`: exports a trained recurrent language model, or measures one."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from asr.bundle import read_rnn_lm
from asr.errors import AsrError
from asr.lm.evaluate import (
    language_model_distributions,
    language_model_word_scores,
    log_linear_log_prob,
    network_distributions,
    network_word_scores,
    of_words,
    perplexity,
    tune_linear_weights,
    tune_log_linear_weights,
)
from asr.lm.ngram.io import load_ngram_lm
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.data import TokenFile
from asr.lm.rnn.export import NETWORK_FILES, network_from_checkpoint, save_network
from asr.lm.rnn.model import RNNLanguageModel
from asr.lm.rnn.outputs.log_partition import Precision
from asr.lm.rnn.outputs.nce import NceOutput
from asr.lm.rnn.outputs.softmax import FullSoftmaxOutput
from asr.serialization import require_writable
from asr.text.symbols import EOS_ID

NAME = "lm rnn"


HELP = """Exports a recurrent language model from a training checkpoint, or measures one.

  asr lm rnn export exp/.../last.ckpt lm/ --maxent-weights 8000000
  asr lm rnn measure lm/ --transcripts dev-clean.text.xz --ngram 4gram.ngram

Training is `asr fit --config recipes/<corpus>/rnnlm.yaml`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.set_defaults(show_help=lambda: parser.print_help(sys.stderr))
    actions = parser.add_subparsers(dest="action", metavar="export|measure")
    export = actions.add_parser("export", help="write a checkpoint's network to a folder that loads without Lightning")
    export.add_argument("checkpoint", type=Path)
    export.add_argument("folder", type=Path)
    export.add_argument("--maxent-weights", type=int, help="keep only this number of n-gram weights, the largest ones")
    export.add_argument("--float32", action="store_true", help="store weights as float32 instead of float16")
    measure = actions.add_parser("measure", help="measure perplexity, and how far the scores are from normalized")
    measure.add_argument("model", type=Path, help="exported folder, checkpoint or bundle")
    measure.add_argument("--text", nargs="+", default=[], type=Path, help="files with one sentence per line")
    measure.add_argument(
        "--transcripts", nargs="+", default=[], type=Path, help="files with lines 'utterance-id WORDS', as in Kaldi"
    )
    measure.add_argument(
        "--ngram", type=Path, help="binary n-gram model to interpolate with; the weight is tuned on the text"
    )
    measure.add_argument("--ngram-weight", type=float, help="weight of the n-gram model, instead of tuning it")
    measure.add_argument(
        "--normalizer-precision",
        choices=get_args(Precision),
        help="precision of sums over the vocabulary; int8 is two to three times as fast on processors with int8 "
        "products (default: that of the network's configuration)",
    )
    measure.add_argument(
        "--log-linear-words",
        type=int,
        default=0,
        help="tune exactly normalized log-linear weights on this number of words, and measure on the same number of "
        "other words (try 300)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; `measure` prints one JSON line."""
    if args.action is None:
        args.show_help()
        return 2
    if args.action == "export":
        if args.maxent_weights is not None and args.maxent_weights < 1:
            raise AsrError(f"--maxent-weights {args.maxent_weights}: give 1 or more, or leave it out to keep all.")
        if args.folder.is_dir():
            require_writable(*(args.folder / name for name in NETWORK_FILES), inputs=[args.checkpoint])
        network = network_from_checkpoint(args.checkpoint)
        save_network(network, args.folder, half_precision=not args.float32, num_maxent_weights=args.maxent_weights)
        return 0
    if not (args.text or args.transcripts):
        raise AsrError("there is nothing to measure on; give --text or --transcripts.")
    print(json.dumps(measure_network(args)))
    return 0


def measure_network(args: argparse.Namespace) -> dict[str, object]:
    """Perplexities with sentence ends, out-of-vocabulary words scored as `<unk>`."""
    if args.ngram_weight is not None and not 0 <= args.ngram_weight <= 1:
        raise AsrError(f"--ngram-weight {args.ngram_weight}: give a number from 0 to 1.")
    network = read_rnn_lm(args.model).network
    assert isinstance(network, RNNLanguageModel)
    ngram = None if args.ngram is None else load_ngram_lm(args.ngram)
    if ngram is not None and ngram.vocabulary != network.vocabulary:
        raise AsrError(f"{args.ngram}: its word list differs from that of {args.model}; train both with the same list.")
    if args.normalizer_precision is not None and isinstance(network.output, (NceOutput, FullSoftmaxOutput)):
        network.output.normalizer_precision = args.normalizer_precision
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "text.tokens"
        tokens = TokenFile.build(args.text, args.transcripts, network.vocabulary, path)
        log_prob, excess = network_word_scores(network, tokens.token_id, normalized=True)
        report: dict[str, object] = {
            "sentences": tokens.counts.num_sentences,
            "words": tokens.counts.num_words,
            "unknown_words": tokens.counts.num_unknown,
            "perplexity": perplexity(log_prob),
        }
        if excess is not None:
            report |= {"log_z_mean": float(excess.mean()), "log_z_std": float(excess.std())}
        if ngram is not None:
            both = torch.stack((language_model_word_scores(ngram, tokens.token_id), log_prob))
            weight, mixed = tune_linear_weights(both)
            if args.ngram_weight is not None:
                weight = torch.tensor([args.ngram_weight, 1 - args.ngram_weight], dtype=torch.float64)
                mixed = torch.logsumexp(both.double() + weight.log()[:, None], dim=0)
            report |= {"ngram_perplexity": perplexity(both[0]), "ngram_weight": float(weight[0])}
            report |= {"interpolated_perplexity": perplexity(mixed)}
            if args.log_linear_words:
                report["log_linear"] = measure_log_linear(network, ngram, tokens.token_id, args.log_linear_words)
    return report


def measure_log_linear(
    network: RNNLanguageModel, ngram: NgramLM, token_id: NDArray[np.int32], num_words: int
) -> dict[str, object]:
    """Log-linear weights tuned on the first `num_words` words, and their perplexity on the same number after them."""
    ends = np.flatnonzero(token_id == EOS_ID) + 1
    middle, end = (
        int(ends[min(int(np.searchsorted(ends, words)), len(ends) - 1)]) for words in (num_words, 2 * num_words)
    )
    if end == middle:
        raise AsrError(f"the text has fewer than {num_words} words for each part; lower --log-linear-words.")
    parts = []
    for part in (token_id[:middle], token_id[middle:end]):
        distributions = torch.stack((language_model_distributions(ngram, part), network_distributions(network, part)))
        parts.append((distributions, torch.from_numpy(part.astype(np.int64))))
    weight = tune_log_linear_weights(*parts[0])
    (held_out, word_id) = parts[1]
    alone = of_words(held_out, word_id)
    linear, _ = tune_linear_weights(of_words(*parts[0]))
    return {
        "tuned_on_words": middle,
        "measured_on_words": end - middle,
        "ngram_weight": float(weight[0]),
        "network_weight": float(weight[1]),
        "perplexity": perplexity(log_linear_log_prob(held_out, word_id, weight)),
        "ngram_perplexity": perplexity(alone[0]),
        "network_perplexity": perplexity(alone[1]),
        "linear_perplexity": perplexity(torch.logsumexp(alone.double() + linear.log()[:, None], dim=0)),
    }
