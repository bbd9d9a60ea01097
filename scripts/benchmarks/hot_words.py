"""Hot words: how many of the rare words that were said are found, and how many that were not.

    scripts/bench hot-words                                                   # every third utterance of dev-clean-2
    scripts/bench hot-words --parts train-clean-5/1988 --speeds 0.8 1.25      # other speech, faster and slower

The hot words are the rare words of the references, which is all that a good list could have, and as many others as
`--others`, which nobody said. A word is rare if at least `--rank` words of the bundle's n-gram model are more frequent.
The default mode, one thread; each line of results is printed at once.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from asr.audio.io import read_audio
from asr.audio.resample import resample
from asr.bundle import Bundle
from asr.lm.hot_words import DEFAULT_SCORE
from asr.metrics import NO_ERRORS, count_errors
from asr.recognizer import Recognizer
from scripts.benchmarks.accuracy import batches
from scripts.benchmarks.inputs import LIBRISPEECH_BUNDLE, argument_parser, default_corpora
from scripts.benchmarks.speech import Recording, recordings


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("hot-words", __doc__)
    parser.add_argument("--bundle", type=Path, default=LIBRISPEECH_BUNDLE)
    parser.add_argument("--corpora", type=Path, default=default_corpora(), help="(default: %(default)s)")
    parser.add_argument("--parts", nargs="+", default=["dev-clean-2"], help="folders of LibriSpeech")
    parser.add_argument("--every", type=int, default=3, help="take every N-th utterance (default: %(default)s)")
    parser.add_argument("--speeds", nargs="+", type=float, default=[1.0], help="of the utterances, in turn")
    parser.add_argument("--others", type=int, default=300, help="hot words that nobody said (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=5000, help="of the most frequent rare word (default: %(default)s)")
    parser.add_argument(
        "--scores", nargs="+", type=float, default=[2.0, DEFAULT_SCORE, 6.0], help="of the hot words, in turn"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    bundle = Bundle.load(args.bundle)
    speech = [one for part in args.parts for one in recordings(args.corpora, None, part)[1]][:: args.every]
    rate = bundle.sampling_rate
    waveforms: dict[Path, Tensor] = {}
    for number, one in enumerate(speech):
        speed = args.speeds[number % len(args.speeds)]
        waveforms[one.path] = resample(read_audio(one.path, rate), round(rate * speed), rate)
    said, others = rare_words(bundle, speech, args.rank, args.others)
    print(f"{len(speech)} utterances, {sum(len(one.words) for one in speech)} words; {len(said)} hot words are said.")
    for hot_words in [[], [*said, *others], others] if others else [[], said]:
        for score in args.scores if hot_words else (0.0,):
            recognizer = Recognizer(bundle, hot_words=hot_words or None, hot_word_score=score)
            counts, found, false, seconds = NO_ERRORS, 0, 0, time.process_time()
            results = list(batches(recognizer, speech, waveforms.__getitem__, rate))
            seconds = time.process_time() - seconds
            for one, words in zip(speech, results, strict=True):
                heard = [word for word, _ in words]
                counts += count_errors(one.words, heard)
                right, wrong = Counter(one.words) & Counter(heard), Counter(heard) - Counter(one.words)
                found += sum(right[word] for word in said)
                false += sum(wrong[word] for word in (*said, *others))
            kind = "none" if not hot_words else "said and others" if len(hot_words) > len(others) else "others"
            print(
                f"hot words: {kind}, score {score:g}: WER {100 * counts.rate:.2f} %, {found} rare words found of "
                f"{sum(Counter(one.words)[word] for one in speech for word in said)}, {false} false, {seconds:.1f} s",
                flush=True,
            )
    return 0


def rare_words(bundle: Bundle, speech: Sequence[Recording], rank: int, num_others: int) -> tuple[list[str], list[str]]:
    """The rare words of the references that the bundle has, and some others."""
    model = bundle.small_ngram
    assert model is not None
    words = model.vocabulary.words
    unigram = model.arrays.arc_score(torch.arange(len(words)))
    ranked = [words[word_id] for word_id in unigram.argsort(descending=True, stable=True).tolist()]
    ordinary = {*bundle.graph.vocabulary.ordinary}
    rare = [word for word in ranked[rank:] if word in ordinary]
    references = {word for one in speech for word in one.words}
    others = [word for word in rare[: 10 * rank] if word not in references]
    return [word for word in rare if word in references], random.Random(1).sample(others, min(num_others, len(others)))
