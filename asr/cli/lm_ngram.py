"""`asr lm ngram`: estimates an n-gram language model from text."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from asr.errors import AsrError
from asr.lm.corpus import read_word_stream
from asr.lm.ngram.arpa import read_arpa, read_arpa_words, write_arpa
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.io import save_ngram_lm
from asr.lm.ngram.model import NgramLM
from asr.lm.ngram.transform import mix_linearly, prune_to_size, prune_to_threshold
from asr.lm.ngram.trie import NgramTrie
from asr.serialization import require_writable
from asr.text.symbols import Vocabulary

NAME = "lm ngram"


HELP = """Estimates an n-gram language model from text: interpolated modified Kneser-Ney, like KenLM's lmplz.

Text has one sentence per line, plain, .gz or .xz; blank lines are ignored. Decoding graphs need small models:
--max-ngrams and --entropy drop the least important n-grams. The result is written as ARPA text, as a binary file that
is memory-mapped for look-up, or both. --from-arpa converts and prunes an existing model, or mixes several into one:

  asr lm ngram --from-arpa domain.arpa general.arpa --weights 0.7 0.3 --max-ngrams 300000 --arpa mixed.arpa"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    source = parser.add_argument_group("input")
    source.add_argument("--text", nargs="+", default=[], type=Path, help="files with one sentence per line")
    source.add_argument(
        "--transcripts", nargs="+", default=[], type=Path, help="files with lines 'utterance-id WORDS', as in Kaldi"
    )
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
    model.add_argument("--order", type=int, default=3, help="length of the longest n-grams (default: 3)")
    model.add_argument(
        "--prune", nargs="+", type=int, default=[], help="for each order, drop n-grams with at most this count"
    )
    model.add_argument(
        "--entropy",
        type=float,
        help="then drop n-grams whose removal raises the relative entropy by less than this (try 1e-7)",
    )
    model.add_argument("--max-ngrams", type=int, help="then prune to at most this number of n-grams of all orders")
    output = parser.add_argument_group("output")
    output.add_argument("--arpa", type=Path, help="write the model as ARPA text")
    output.add_argument("--binary", type=Path, help="write the model as a binary file for look-up")
    output.add_argument("--quantize", action="store_true", help="binary: one byte per score instead of four")
    output.add_argument("--no-index", action="store_true", help="binary: no hash index; half the size, slower look-up")
    output.add_argument("--write-vocabulary", type=Path, help="write the words of the model, one per line")


def run(args: argparse.Namespace) -> int:
    """Runs the command; prints one JSON line."""
    if not (args.arpa or args.binary or args.write_vocabulary):
        raise AsrError("there is nothing to write; give --arpa, --binary or --write-vocabulary.")
    if bool(args.from_arpa) == bool(args.text or args.transcripts):
        raise AsrError("give either text (--text, --transcripts) or --from-arpa.")
    if args.weights and not args.from_arpa:
        raise AsrError("--weights needs --from-arpa; give its models, or leave out the weights.")
    if args.by_history and len(args.from_arpa or []) < 2:
        raise AsrError("--by-history mixes several models; give two or more after --from-arpa.")
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
    else:
        stream = read_word_stream(args.text, vocabulary, args.transcripts)
        _say(f"{stream.num_words} words in {stream.num_sentences} sentences; estimating order {args.order}")
        report |= {"sentences": stream.num_sentences, "words": stream.num_words}
        report |= {"unlisted_words": stream.num_unlisted, "word_types": len(stream.vocabulary)}
        if args.map_unknown:
            stream = stream.with_unknown()
        model = estimate_kneser_ney(stream, args.order, args.prune, keep_unseen=args.keep_unseen)
        trie, count = model.trie, model.count
        report |= {"distinct_ngrams": model.num_distinct, "discounts": model.discounts}
        if model.fallback_orders:
            _say(f"the text does not determine the discounts of orders {model.fallback_orders}; using 0.5, 1, 1.5")
            report["fallback_orders"] = model.fallback_orders
    if args.entropy is not None:
        trie = prune_to_threshold(trie, args.entropy, count)
        count = None
    if args.max_ngrams is not None:
        trie = prune_to_size(trie, args.max_ngrams, count)
    _say(f"n-grams by order: {trie.counts}")
    if args.arpa:
        write_arpa(trie, args.arpa)
    if args.write_vocabulary:
        trie.vocabulary.save(args.write_vocabulary)
    if args.binary:
        lm = NgramLM.from_trie(trie, args.binary.name)
        lm = lm.quantized() if args.quantize else lm
        save_ngram_lm(lm if args.no_index else lm.with_index(), args.binary)
        report |= {"binary_bytes": args.binary.stat().st_size, "states": lm.num_states}
    report |= {"ngrams": trie.counts, "seconds": round(time.monotonic() - begin, 2)}
    print(json.dumps(report))
    return 0


def _read_and_mix(
    paths: list[Path], weights: list[float], vocabulary: Vocabulary | None, by_history: bool
) -> NgramTrie:
    if len(weights) != len(paths):
        raise AsrError(f"--weights: there are {len(weights)} weights for {len(paths)} models; give one for each model.")
    if len(paths) == 1:
        return read_arpa(paths[0], vocabulary)
    if vocabulary is None:
        vocabulary = Vocabulary(dict.fromkeys(word for path in paths for word in read_arpa_words(path)))
    return mix_linearly([read_arpa(path, vocabulary) for path in paths], weights, by_history)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
