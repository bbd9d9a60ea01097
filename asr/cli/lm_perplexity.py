"""`asr lm perplexity`: perplexity of n-gram models on texts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from asr.errors import AsrError
from asr.lm.corpus import read_word_stream
from asr.lm.evaluate import measure_perplexity
from asr.lm.ngram.io import read_ngram_lm

NAME = "lm perplexity"


HELP = """Measures the perplexity of an n-gram model (ARPA or binary) on texts, including sentence ends.

Prints one JSON line for each text. `perplexity` scores out-of-vocabulary words as <unk>; `perplexity_listed` skips
them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("model", type=Path, help="ARPA file (plain, .gz, .xz) or binary file of 'asr lm ngram'")
    parser.add_argument("texts", nargs="+", type=Path, help="files with one sentence per line; blank lines are ignored")
    parser.add_argument("--transcripts", action="store_true", help="lines are 'utterance-id WORDS', as in Kaldi")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
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
        print(json.dumps(report), flush=True)
    return 0
