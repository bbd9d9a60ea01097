"""`asr lm`: chooses vocabularies, estimates n-gram models, exports recurrent ones, and measures both."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from asr.bundle import read_rnn_lm
from asr.cli.main import Command
from asr.cli.options import found_rnn_lm, with_flags
from asr.cli.printing import print_record
from asr.errors import AsrError
from asr.lm.corpus import read_word_stream
from asr.lm.evaluate import (
    language_model_distributions,
    language_model_word_scores,
    log_linear_log_prob,
    measure_perplexity,
    network_distributions,
    network_word_scores,
    of_words,
    perplexity,
    tune_linear_weights,
    tune_log_linear_weights,
)
from asr.lm.ngram.arpa import read_arpa, read_arpa_words, write_arpa
from asr.lm.ngram.estimate import estimate_kneser_ney, thresholds_of
from asr.lm.ngram.io import load_ngram_lm, read_ngram_lm, save_ngram_lm
from asr.lm.ngram.model import NgramLM
from asr.lm.ngram.transform import mix_linearly, prune_to_size, prune_to_threshold
from asr.lm.ngram.trie import NgramTrie
from asr.lm.rnn.data import TokenFile
from asr.lm.rnn.export import NETWORK_FILES, network_from_checkpoint, save_network
from asr.lm.rnn.model import RNNLanguageModel
from asr.lm.rnn.outputs.log_partition import Precision
from asr.lm.rnn.outputs.nce import NceOutput
from asr.lm.rnn.outputs.softmax import FullSoftmaxOutput
from asr.lm.transformers import is_transformer
from asr.options import flag_of
from asr.serialization import atomic_path, output_path, require_writable
from asr.text.lexicon import in_upper_case
from asr.text.normalize import written_as
from asr.text.symbols import EOS_ID, SPECIAL_WORDS, Vocabulary, first_words

VOCABULARY_HELP = """\
Chooses a vocabulary: the most frequent words of some texts; with a lexicon, only words that it contains.

Prints one JSON line; `coverage` is the fraction of the running words of the texts that are in the vocabulary."""


def _add_texts(parser: argparse._ActionsContainer) -> None:
    """Adds the options that name texts."""
    parser.add_argument("--text", nargs="+", default=[], type=Path, help="files with one sentence per line")
    parser.add_argument(
        "--transcripts", nargs="+", default=[], type=Path, help="files with lines 'utterance-id WORDS', as in Kaldi"
    )


def add_vocabulary_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", type=output_path, help="file for the words, the most frequent first, one per line")
    _add_texts(parser)
    parser.add_argument(
        "--lexicon", type=Path, help="keep only words at the beginning of a line of this file, in any case"
    )
    parser.add_argument("--max-words", type=int, help="maximum number of words (default: no limit)")


def run_vocabulary(args: argparse.Namespace) -> int:
    if not args.text and not args.transcripts:
        raise AsrError("there are no texts to choose words from; give --text or --transcripts.")
    if args.max_words is not None and args.max_words < 1:
        raise AsrError(f"--max-words {args.max_words}: give 1 or more.")
    require_writable(args.output, inputs=[*args.text, *args.transcripts, args.lexicon])
    stream = read_word_stream(args.text, None, args.transcripts)
    words = stream.vocabulary.words
    count = np.bincount(stream.word_id, minlength=len(words))
    ids = list(range(len(SPECIAL_WORDS), len(words)))
    if args.lexicon:
        pronounced = set(map(in_upper_case, first_words(args.lexicon)))
        ids = [i for i in ids if written_as(in_upper_case(words[i]), pronounced) is not None]
    ids = sorted(ids, key=lambda i: (-count[i], words[i]))[: args.max_words]
    if len(words) == len(SPECIAL_WORDS):
        raise AsrError("the texts contain no words; give files with sentences.")
    if not ids:
        raise AsrError(f"{args.lexicon}: it contains no word of the texts; give a lexicon of their words.")
    with atomic_path(args.output) as partial:
        Vocabulary(words[i] for i in ids).save(partial)
    coverage = count[ids].sum() / stream.num_words
    report = {"words": len(ids), "word_types": len(words) - len(SPECIAL_WORDS), "coverage": round(float(coverage), 5)}
    print_record(report, sys.stdout)
    return 0


NGRAM_HELP = """Estimates an n-gram language model from text: interpolated modified Kneser-Ney, like KenLM's lmplz.

Text has one sentence per line, plain, .gz or .xz; blank lines are ignored. Decoding graphs need small models:
--max-ngrams and --entropy drop the least important n-grams. The result is written as ARPA text, as a binary file that
is memory-mapped for look-up, or both. --from-arpa converts and prunes an existing model, or mixes several into one:

  asr lm ngram --from-arpa domain.arpa general.arpa --weights 0.7 0.3 --max-ngrams 300000 --arpa mixed.arpa"""


_ORDER = 3


def add_ngram_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("input")
    _add_texts(source)
    source.add_argument(
        "--from-arpa", nargs="+", type=Path, help="instead of text, an existing model to convert, or several to mix"
    )
    source.add_argument(
        "--weights", nargs="+", type=float, help="weights of the models of --from-arpa, in that order, with a sum of 1"
    )
    source.add_argument(
        "--by-history", action="store_true", help="with several models: weight each by how well it predicts the history"
    )
    source.add_argument("--vocabulary", type=Path, help="word list; n-grams with other words are dropped")
    source.add_argument(
        "--keep-unseen",
        action="store_true",
        help="keep words of the vocabulary that are not in the text, with the probability of <unk>",
    )
    source.add_argument("--map-unknown", action="store_true", help="count words outside the vocabulary as <unk>")
    model = parser.add_argument_group("model")
    model.add_argument("--order", type=int, help=f"length of the longest n-grams (default: {_ORDER})")
    model.add_argument(
        "--prune", nargs="+", type=int, default=[], help="for each order, drop n-grams with at most this count"
    )
    model.add_argument(
        "--entropy",
        type=float,
        help="then drop n-grams whose removal raises the relative entropy by less than this (try 1e-7)",
    )
    model.add_argument(
        "--max-ngrams", type=int, help="also drop those, until there are at most this number of n-grams of all orders"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--arpa", type=output_path, help="write the model as ARPA text")
    output.add_argument("--binary", type=output_path, help="write the model as a binary file for look-up")
    output.add_argument("--quantize", action="store_true", help="binary: one byte per score instead of four")
    output.add_argument("--no-index", action="store_true", help="binary: no hash index; half the size, slower look-up")
    output.add_argument(
        "--compress", action="store_true", help="binary: about 40 %% of the size; decompressed into memory, not mapped"
    )
    output.add_argument("--write-vocabulary", type=output_path, help="write the words of the model, one per line")


def run_ngram(args: argparse.Namespace) -> int:
    """Runs the command; prints one JSON line."""
    if not (args.arpa or args.binary or args.write_vocabulary):
        raise AsrError("there is nothing to write; give --arpa, --binary or --write-vocabulary.")
    if bool(args.from_arpa) == bool(args.text or args.transcripts):
        raise AsrError("give either text (--text, --transcripts) or --from-arpa.")
    order = _ORDER if args.order is None else args.order
    if order < 1 or (args.max_ngrams is not None and args.max_ngrams < 1):
        raise AsrError("--order and --max-ngrams must be 1 or more.")
    given = [flag_of(name) for name in ("order", "prune", "map_unknown") if getattr(args, name)]
    if args.from_arpa and given:
        raise AsrError(f"{given[0]} has no effect with --from-arpa, whose n-grams exist; leave it out.")
    try:
        thresholds_of(order, args.prune)
    except AsrError as error:
        raise with_flags(error, ["prune"]) from error
    if args.map_unknown and not args.vocabulary:
        raise AsrError("--map-unknown needs --vocabulary; without it, no word of the text is unknown.")
    of_binary = [flag_of(name) for name in ("quantize", "no_index", "compress") if getattr(args, name)]
    if of_binary and not args.binary:
        raise AsrError(f"{of_binary[0]} changes the binary file; give --binary.")
    of_several = [flag_of(name) for name in ("weights", "by_history") if getattr(args, name)]
    if of_several and len(args.from_arpa or []) < 2:
        raise AsrError(f"{of_several[0]} mixes several models; give two or more after --from-arpa.")
    outputs = (path for path in (args.arpa, args.binary, args.write_vocabulary) if path is not None)
    require_writable(*outputs, inputs=[*args.text, *args.transcripts, *(args.from_arpa or ()), args.vocabulary])
    if args.arpa is not None and args.arpa.suffix in (".gz", ".xz"):
        raise AsrError(f"--arpa {args.arpa}: ARPA text is written uncompressed; leave out {args.arpa.suffix}.")
    if args.entropy is not None and not args.entropy >= 0:
        raise AsrError(f"--entropy {args.entropy}: give a number of 0 or more, such as 1e-7.")
    if args.keep_unseen and (args.from_arpa or not args.vocabulary):
        raise AsrError("--keep-unseen needs --vocabulary and text.")
    begin = time.monotonic()
    vocabulary = Vocabulary.from_file(args.vocabulary) if args.vocabulary else None
    report: dict[str, object] = {}
    if args.from_arpa:
        trie, count = _read_and_mix(args.from_arpa, args.weights or [1.0], vocabulary, args.by_history), None
        if vocabulary is not None and not trie.listed()[len(SPECIAL_WORDS) :].any():
            raise _no_common_words(args.vocabulary, args.from_arpa)
    else:
        stream = read_word_stream(args.text, vocabulary, args.transcripts)
        if vocabulary is not None and stream.num_unlisted == stream.num_words:
            raise _no_common_words(args.vocabulary, [*args.text, *args.transcripts])
        _say(f"{stream.num_words} words in {stream.num_sentences} sentences; estimating order {order}")
        report |= {"sentences": stream.num_sentences, "words": stream.num_words}
        report |= {"unlisted_words": stream.num_unlisted, "word_types": len(stream.vocabulary) - len(SPECIAL_WORDS)}
        if args.map_unknown:
            stream = stream.with_unknown()
        model = estimate_kneser_ney(stream, order, args.prune, keep_unseen=args.keep_unseen)
        trie, count = model.trie, model.count
        report |= {"distinct_ngrams": model.num_distinct, "discounts": model.discounts}
        if model.fallback_orders:
            orders = ", ".join(map(str, model.fallback_orders))
            _say(f"the text is too small to determine discounts (order {orders}); using 0.5, 1 and 1.5")
            report["fallback_orders"] = model.fallback_orders
    if args.max_ngrams is not None:
        trie = prune_to_size(trie, args.max_ngrams, count, args.entropy)
    elif args.entropy is not None:
        trie = prune_to_threshold(trie, args.entropy, count)
    _say(f"n-grams by order: {', '.join(map(str, trie.counts))}")
    if args.arpa:
        write_arpa(trie, args.arpa)
    if args.write_vocabulary:
        with atomic_path(args.write_vocabulary) as partial:
            trie.vocabulary.save(partial)
    if args.binary:
        lm = NgramLM.from_trie(trie, args.binary.name)
        lm = lm.quantized() if args.quantize else lm
        save_ngram_lm(lm if args.no_index else lm.with_index(), args.binary, args.compress)
        report |= {"binary_bytes": args.binary.stat().st_size, "states": lm.num_states}
    report |= {"ngrams": trie.counts, "seconds": round(time.monotonic() - begin, 2)}
    print_record(report, sys.stdout)
    return 0


def _read_and_mix(
    paths: list[Path], weights: list[float], vocabulary: Vocabulary | None, by_history: bool
) -> NgramTrie:
    if len(weights) != len(paths):
        raise AsrError(f"--from-arpa names {len(paths)} models; give --weights with as many numbers.")
    if len(paths) == 1:
        return read_arpa(paths[0], vocabulary)
    if vocabulary is None:
        vocabulary = Vocabulary(dict.fromkeys(word for path in paths for word in read_arpa_words(path)))
    return mix_linearly([read_arpa(path, vocabulary) for path in paths], weights, by_history)


def _no_common_words(vocabulary: Path, inputs: list[Path]) -> AsrError:
    names = ", ".join(map(str, inputs))
    return AsrError(f"{vocabulary}: none of its words is in {names}; check that both have the same case.")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


RNN_HELP = """Exports a recurrent language model from a training checkpoint, or measures one.

  asr lm rnn export exp/.../last.ckpt lm/ --maxent-weights 8000000
  asr lm rnn measure lm/ --transcripts dev-clean.text.xz --ngram 4gram.ngram

Training is `asr fit --config recipes/<corpus>/rnnlm.yaml`."""


def add_rnn_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(show_help=lambda: parser.print_help(sys.stderr))
    actions = parser.add_subparsers(dest="action", metavar="export|measure")
    export = actions.add_parser("export", help="write a checkpoint's network to a folder that loads without Lightning")
    export.add_argument("checkpoint", type=Path, help="checkpoint of 'asr fit'")
    export.add_argument("folder", type=output_path, help="folder for the network")
    export.add_argument("--maxent-weights", type=int, help="keep only this number of n-gram weights, the largest ones")
    export.add_argument("--float32", action="store_true", help="store weights as float32 instead of float16")
    measure = actions.add_parser("measure", help="measure perplexity, and how far the scores are from normalized")
    measure.add_argument(
        "model",
        help="exported folder, checkpoint or bundle, named as for 'asr transcribe --bundle'; or transformers:NAME, an "
        "AutoModelForCausalLM of transformers, which spells the words of the text, or those of --ngram",
    )
    _add_texts(measure)
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


def run_rnn(args: argparse.Namespace) -> int:
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
        if args.maxent_weights is not None and network.maxent is None:
            raise AsrError(f"--maxent-weights: the network of {args.checkpoint} has no n-gram weights; leave it out.")
        save_network(network, args.folder, half_precision=not args.float32, num_maxent_weights=args.maxent_weights)
        return 0
    if not (args.text or args.transcripts):
        raise AsrError("there is nothing to measure on; give --text or --transcripts.")
    print_record(measure_network(args), sys.stdout)
    return 0


def measure_network(args: argparse.Namespace) -> dict[str, object]:
    """Perplexities with sentence ends, out-of-vocabulary words scored as `<unk>`."""
    if args.ngram_weight is not None and not 0 <= args.ngram_weight <= 1:
        raise AsrError(f"--ngram-weight {args.ngram_weight}: give a number from 0 to 1.")
    if args.log_linear_words < 0:
        raise AsrError(f"--log-linear-words {args.log_linear_words}: give a number of words, or leave it out.")
    if args.ngram is None and (args.ngram_weight is not None or args.log_linear_words):
        option = "--log-linear-words" if args.log_linear_words else "--ngram-weight"
        raise AsrError(f"{option} combines the network with an n-gram model; give --ngram.")
    ngram = None if args.ngram is None else load_ngram_lm(args.ngram)
    spelled: Vocabulary | None = None
    if is_transformer(args.model):
        if args.log_linear_words:
            raise AsrError(
                "--log-linear-words sums over the words of a recurrent model; leave it out for a Transformer."
            )
        spelled = read_word_stream(args.text, None, args.transcripts).vocabulary if ngram is None else ngram.vocabulary
    network: Any = read_rnn_lm(found_rnn_lm(args.model), spelled).network
    if ngram is not None and ngram.vocabulary != network.vocabulary:
        raise AsrError(f"{args.ngram}: its word list differs from that of {args.model}; train both with the same list.")
    if args.normalizer_precision is not None:
        if spelled is not None or not isinstance(network.output, (NceOutput, FullSoftmaxOutput)):
            raise AsrError(
                f"--normalizer-precision has no effect on {args.model}, whose output sums over no vocabulary; leave it "
                "out."
            )
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


PERPLEXITY_HELP = """Measures the perplexity of an n-gram model (ARPA or binary) on texts, including sentence ends.

Prints one JSON line for each text. `perplexity` scores out-of-vocabulary words as <unk>; `perplexity_listed` skips
them."""


def add_perplexity_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="ARPA file (plain, .gz, .xz) or binary file of 'asr lm ngram'")
    parser.add_argument("texts", nargs="+", type=Path, help="files with one sentence per line; blank lines are ignored")
    parser.add_argument("--transcripts", action="store_true", help="lines are 'utterance-id WORDS', as in Kaldi")


def run_perplexity(args: argparse.Namespace) -> int:
    if not args.model.is_file():
        raise AsrError(f"{args.model}: there is no such model file; make one with 'asr lm ngram'.")
    lm = read_ngram_lm(args.model)
    for path in args.texts:
        texts, transcripts = ([], [path]) if args.transcripts else ([path], [])
        result = measure_perplexity(lm, read_word_stream(texts, lm.vocabulary, transcripts))
        report = {
            "text": str(path),
            "perplexity": round(result.perplexity, 3),
            "perplexity_listed": round(result.perplexity_listed, 3),
            "sentences": result.num_sentences,
            "words": result.num_words,
            "unlisted_words": result.num_unlisted,
        }
        print_record(report, sys.stdout)
    return 0


SUBCOMMANDS = {
    "lm vocabulary": Command(VOCABULARY_HELP, add_vocabulary_arguments, run_vocabulary),
    "lm ngram": Command(NGRAM_HELP, add_ngram_arguments, run_ngram),
    "lm rnn": Command(RNN_HELP, add_rnn_arguments, run_rnn),
    "lm perplexity": Command(PERPLEXITY_HELP, add_perplexity_arguments, run_perplexity),
}
