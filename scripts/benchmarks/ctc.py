"""`CTCDecoder` compared with other decoders: the same frames, n-gram model and lexicon, beams swept.

    scripts/bench ctc --quick
    scripts/bench ctc --utterances 60 --kinds letters phones

For letters, pieces and phones, each decoder's beam is swept. The frames are network outputs for dev-clean-2, from
`--train`, `--networks` or stored next to this module by `--record`. All decoders run one utterance at a time on one
thread. Times are CPU seconds of this process, the least of three passes, or of fewer that take a second together; there
is only one pass with the neural model, because it caches scores. Words, n-gram model and neural model, which is
interpolated with the n-gram model, are those of the librispeech bundle. Peers that are not installed are skipped.
kaldi-decoder, sherpa-onnx, whose only beam is the number of active states, and k2 search our graph; flashlight-text,
torchaudio and pyctcdecode use n-gram model and lexicon. Ours is measured twice: `CTCDecoder`, and our replacement of
pyctcdecode, which sums over paths; both also with the neural model inside.

With --quick there are eight utterances, one to three beams of each decoder, passes of 0.3 seconds, and of the peers
pyctcdecode and flashlight-text. It takes less than a minute once graphs and loops are compiled, which the first call
does.

The last line is one JSON object; for each kind of tokens it has

- `wer_ours`, `wer_best_peer`, `wer_ours_neural`: the lowest word error rates in % over the beams;
- `time_over_best_peer_at_equal_wer`: the time of our fastest beam that is no worse than the best peer, divided by that
  peer's time; null if ours does not reach its error rate or there is no peer;
- `time_over_pyctcdecode`, `time_over_flashlight` and so on: the same for each peer;
- `neural_time_over_pyctcdecode`: our time with the neural model, at its fastest beam with fewer errors than any peer,
  divided by the time of pyctcdecode's beam with the fewest errors.

Scales are those with the fewest errors of two held-out training speakers, for two kinds of search: those that find the
best path, and those that sum over paths, which are pyctcdecode and our replacement. `--tune` prints the errors for each
choice (`tune`), with `--spelled` those for each spelling penalty. With `--lexicon-free`, decoders without a word list
are measured instead, see `scripts.benchmarks.ctc_free`. `--train` measures all of this with the outputs of networks
that read posteriors of phones by the bundle's acoustic model. The first call trains them, five minutes of one core for
each kind, and six minutes for the posteriors (`scripts.benchmarks.ctc_networks`).

With `--all-cores`, forked processes, one for each core, share the utterances as well, and `ms_by_clock` is the time by
the clock for a frame. Each decoder, ours included, then has one copy for each process. JSON then also has
`all_cores_over_pyctcdecode` and so on: `time_over_...` by this clock.

With `--spelled` the key `spelled` gives the effect of spelling words outside a list of 5,000; see `measure_spelled`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from asr.bundle import Bundle, bundle_folder
from asr.ctc import CTCDecoder, CTCTokens
from asr.ctc.frames import as_frames
from asr.ctc.graph_search import GraphSearch
from asr.ctc.graphs import spelled_lexicon
from asr.ctc.interface import CTCDecodingConfig
from asr.ctc.language_models import LentModels, model_maker
from asr.ctc.pyctcdecode import build_ctcdecoder
from asr.ctc.word_models import listed_words, trie_of
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.combine import Difference, Interpolated, mapped_to
from asr.lm.interface import LanguageModel
from asr.lm.ngram.arpa import write_arpa
from asr.lm.ngram.model import NgramLM
from asr.metrics import NO_ERRORS, count_errors
from asr.text.lexicon import Lexicon
from scripts.benchmarks import ctc_free
from scripts.benchmarks.ctc_networks import read_out, read_out_held
from scripts.benchmarks.ctc_workload import RECORDED, CTCWorkload, read, recorded, tokens_of, write
from scripts.benchmarks.inputs import (
    LIBRISPEECH_BUNDLE,
    argument_parser,
    cache_folder,
    default_corpora,
    required_corpora,
)
from scripts.benchmarks.peers import ctc as peers
from scripts.benchmarks.report import table
from scripts.benchmarks.speech import recordings

KINDS = ("letters", "pieces", "phones")
# The language model's scale and what is added for a word, chosen by `tune`: for all decoders that find the best path,
# and for those that sum over paths, pyctcdecode and our replacement.
SCALES = {"letters": (0.75, 0.0), "pieces": (0.5, 3.0), "phones": (0.75, 0.0)}
SUMMED_SCALES = {"letters": (0.5, 1.5), "pieces": (0.5, 3.0)}
NEURAL_SCALES = {"letters": (0.75, 0.0), "pieces": (0.5, 3.0), "phones": (0.75, 0.0)}
SUMMED_NEURAL_SCALES = {"letters": (0.75, 1.5), "pieces": (0.5, 3.0)}
NEURAL_WEIGHT = 0.85
USUAL_WEIGHT = 0.7
TRIED_SCALES = (0.25, 0.5, 0.75, 1.0, 1.25)
TRIED_WORD_SCORES = (0.0, 1.5, 3.0, 4.5)
OTHER_WEIGHTS = (0.5, 0.85)
# Of `CTCDecodingConfig`: search_beam, max_active_states, output_beam, context_beam
TUNING_BEAMS = (11.0, 600, 6.0, 6.0)
# Besides those of the same numbers of states as sherpa-onnx's, whose beam is 16.
OUR_BEAMS = (
    *((2.0, 10), (4.0, 50), (6.0, 150), (8.0, 300), (11.0, 600), (14.0, 1500), (18.0, 3000)),
    *((16.0, 50), (16.0, 300)),
)
OUR_QUICK_BEAMS = ((2.0, 10), (4.0, 50), (8.0, 300))
# search_beam, max_active_states, output_beam, context_beam with the neural model
NEURAL_BEAMS = ((8.0, 300, 4.0, 4.0), (11.0, 600, 4.0, 4.0), (11.0, 600, 6.0, 6.0), (14.0, 1500, 8.0, 10.0))
NEURAL_QUICK_BEAMS = NEURAL_BEAMS[:1]
# The one of --quick first: pyctcdecode's own default, and torchaudio's for flashlight. kaldi-decoder and k2 prune by
# score as ours does.
PEER_BEAMS: dict[str, tuple[Any, ...]] = {
    "pyctcdecode": (100, 30, 10, 300),
    "flashlight": (50, 20, 200),
    "torchaudio": (50,),
    "kaldi": ((8.0, 300), (4.0, 50), (11.0, 600)),
    "sherpa": (300, 50),
    "k2": ((8.0, 300), (4.0, 50), (11.0, 600)),
}
# Of the summed search, besides pyctcdecode's.
MORE_BEAMS = (50, 150, 500)
# Of the summed search with the neural model in --quick.
SMALL_BEAM = 30
# 3 milliseconds a frame with a beam of 50 already
TOO_SLOW = {("flashlight", "pieces", 200)}
QUICK_TOO_SLOW = {("flashlight", "pieces", 50)}
NUM_FREQUENT = 5000
# Of words outside the list; chosen by `--tune --spelled`.
TRIED_PENALTIES = (-8.0, -6.0, -4.0, -2.0, 0.0)
SPELLING_PENALTIES = {"letters": -2.0, "pieces": -8.0, "phones": 0.0}
# Each loads the n-gram model by itself, for some seconds.
QUICK_PEERS = ("pyctcdecode", "flashlight")
# Their threads end in a forked process, where the next search would wait for them; so no search runs before a fork.
WITH_THREADS = ("k2",)
OUR_PREFIX = "ours, summed"
"""The name of our prefix beam search, which sums over paths, and over spellings in pieces."""
_T = TypeVar("_T")
OURS, NEURAL, NEURAL_PREFIX = "ours", "ours, neural", "ours, summed, neural"
SYSTEMS = (OURS, OUR_PREFIX, *PEER_BEAMS, NEURAL, NEURAL_PREFIX)
Decode = Callable[[Tensor], list[str]]
Make = Callable[[], Decode]
System = tuple[str, str, Make]
"""Name, beam, and what makes it."""


class Passes(NamedTuple):
    """How often a decoder reads the utterances: `most` times, but not again after `seconds`."""

    most: int
    seconds: float


PASSES, QUICK_PASSES, ONE_PASS = Passes(3, 1.0), Passes(3, 0.3), Passes(1, math.inf)


def main(arguments: list[str]) -> int:
    parser = argument_parser("ctc", __doc__)
    parser.add_argument("--quick", action="store_true", help="few utterances and beams, under a minute once set up")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of tokens (default: all)")
    parser.add_argument("--utterances", type=int, help="utterances of each kind (default: 40, with --quick 8)")
    parser.add_argument("--corpora", type=Path, default=default_corpora(), help="folder with librispeech/")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="only these decoders (default: all)")
    parser.add_argument("--no-neural", action="store_true", help="without the recurrent language model")
    parser.add_argument("--lexicon-free", action="store_true", help="decoders without a word list instead")
    parser.add_argument("--train", action="store_true", help="outputs of networks that are trained for this")
    parser.add_argument("--all-cores", action="store_true", help="also the time by the clock with all cores in use")
    parser.add_argument("--tune", action="store_true", help="errors of training speakers for each choice of scales")
    parser.add_argument("--networks", nargs="+", default=(), metavar="BUNDLE", help="bundles with CTC networks")
    parser.add_argument(
        "--num-spellings", type=int, default=1, help="ways to write a word in pieces, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--record", action="store_true", help="store their outputs next to this module, replacing earlier ones"
    )
    parser.add_argument(
        "--spelled",
        nargs="*",
        type=float,
        metavar="PENALTY",
        help="also measure words outside a list of the 5,000 most frequent, for each spelling penalty",
    )
    options = parser.parse_args(arguments)
    num_utts = options.utterances or (8 if options.quick else 40)
    bundle = Bundle.load(LIBRISPEECH_BUNDLE)
    networks = {tokens_of(own).kind: own for own in (Bundle.load(bundle_folder(name)) for name in options.networks)}
    of_networks = {kind: recorded(own, recordings(options.corpora, num_utts)[1]) for kind, own in networks.items()}
    workloads = read(RECORDED) | of_networks
    results: dict[str, Any] = {}
    if options.tune:
        for kind in options.kinds:
            held = read_out_held(bundle, workloads[kind], options.corpora)
            if options.spelled is None:
                results[kind] = tune_of(bundle, held)
            else:
                results[kind] = measure_spelled(kind, bundle, held, options.spelled or TRIED_PENALTIES)
        print(json.dumps(results))
        return 0
    if options.train:
        stored = [workloads[kind] for kind in options.kinds]
        workloads |= {each.tokens.kind: each for each in read_out(bundle, stored, options.corpora, num_utts)}
    if options.record:
        write(workloads.values(), RECORDED)
    for kind in options.kinds:
        workload = workloads[kind].first(num_utts)
        if options.lexicon_free:
            if kind != "phones":
                results[kind] = measure_free(workload, required_corpora(options.corpora))
            continue
        if kind == "pieces" and options.num_spellings > 1:
            several = CTCTokens(workload.tokens.symbols, kind=kind, num_spellings=options.num_spellings)
            workload = replace(workload, tokens=several)
        num_cores = len(os.sched_getaffinity(0)) if options.all_cores else 0
        results[kind] = measure(
            kind, bundle, workload, options.quick, not options.no_neural, options.systems, num_cores
        )
        if options.spelled is not None:
            penalties = options.spelled or (SPELLING_PENALTIES[kind],)
            results[kind]["spelled"] = measure_spelled(kind, bundle, workload, penalties)
    print(json.dumps(results))
    return 0


def measure(
    kind: str,
    bundle: Bundle,
    workload: CTCWorkload,
    quick: bool,
    neural: bool,
    names: Sequence[str] | None = None,
    num_cores: int = 0,
) -> dict[str, float | int | str | None]:
    """The figures of one kind of tokens, of all decoders or of those with these names; also with `num_cores` cores."""
    ngram = bundle.small_ngram
    assert ngram is not None
    arpa = cache_folder() / f"{bundle.name}_small.arpa"
    if not arpa.is_file():
        arpa.parent.mkdir(parents=True, exist_ok=True)
        write_arpa(trie_of(ngram), arpa)
    words, scales, summed_scales = listed_words(ngram), SCALES[kind], SUMMED_SCALES.get(kind, ())
    lexicon = lexicon_of(bundle, words, workload.tokens)
    systems = our_systems(workload, ngram, lexicon, scales, quick)
    if kind != "phones":
        systems += prefix_systems(workload, ngram, words, summed_scales, quick)
    systems += peer_systems(workload, words, lexicon, arpa, quick)
    graph = functools.lru_cache(1)(lambda: built(workload, ngram, lexicon, scales).word_graph.graph)  # type: ignore[union-attr]
    if not quick:
        systems += graph_systems(workload, graph, scales)
    if bundle.rnn_lm is not None and neural:
        if kind != "phones":
            systems += neural_prefix_systems(workload, bundle, ngram, words, quick)
        for beam, most, output_beam, context_beam in NEURAL_QUICK_BEAMS if quick else NEURAL_BEAMS:
            beams = {"search_beam": beam, "max_active_states": most}
            beams |= {"output_beam": output_beam, "context_beam": context_beam}
            beams |= {"lm": bundle, "lm_weight": NEURAL_WEIGHT}
            make = functools.partial(ours, workload, ngram, lexicon, NEURAL_SCALES[kind], **beams)
            systems.append((NEURAL, f"{beam:g}/{context_beam:g}", make))
    rows = []
    for name, beam, make in systems:
        if names is not None and name not in names:
            continue
        try:
            passes, decode = ONE_PASS if "neural" in name else QUICK_PASSES if quick else PASSES, make()
            row = {"system": name, "beam": beam}
            if num_cores:
                # First, before a neural model knows the scores.
                row["ms_by_clock"] = time_by_clock(decode, workload, passes, num_cores)
            measured = functools.partial(run, decode, workload, passes)
            rows.append({**row, **(in_fork(measured) if num_cores and name in WITH_THREADS else measured())})
        except ImportError:
            continue
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if rows:
        table(f"{workload.name}: {len(workload.frames)} utterances, {workload.num_frames} frames", rows)
    return summary(rows, workload)


def tune_of(bundle: Bundle, workload: CTCWorkload) -> list[dict[str, Any]]:
    """`tune` with the language models of a bundle."""
    ngram = bundle.small_ngram
    assert ngram is not None
    words = listed_words(ngram)
    recurrent = mapped_to(model_maker(bundle, words)[0](), ngram.vocabulary, warn=False)
    return tune(workload, ngram, lexicon_of(bundle, words, workload.tokens), recurrent, words)


def tune(
    workload: CTCWorkload, ngram: NgramLM, lexicon: Lexicon, recurrent: LanguageModel, words: Sequence[str]
) -> list[dict[str, Any]]:
    """Word error rates in % for each choice of scales: of the graph search, of the summed search, and their mean.

    All pairs of scales are tried with the n-gram model, and with the recurrent model at its usual weight; then other
    weights with the pair of the least mean. The recurrent model is one for all choices, because it caches scores.
    """
    tokens = workload.tokens
    graph = built(workload, ngram, lexicon, (1.0, 0.0)).word_graph
    assert graph is not None
    rows: list[dict[str, Any]] = []

    def try_out(scales: Sequence[float], weight: float) -> None:
        lm = interpolated(recurrent, ngram, weight) if weight > 0.0 else ngram
        models = LentModels((lambda: Difference(lm, ngram)) if weight > 0.0 else None, False)
        config = CTCDecodingConfig(*scales, *TUNING_BEAMS)
        search = GraphSearch(graph, tokens, config, models, None, False)

        def by_graph(log_prob: Tensor) -> list[str]:
            ((best,),) = search.decode(as_frames(log_prob, None, tokens, "log_probs", torch.device("cpu")), 1)
            return best.text.split()

        found = {"graph": run(by_graph, workload, ONE_PASS)["wer"]}
        if tokens.kind != "phones":
            decode = summed(workload, lambda: lm, words, scales, 100)
            found["summed"] = run(decode, workload, ONE_PASS)["wer"]
        of_choice = {"weight": weight, "lm_scale": scales[0], "word_score": scales[1]}
        rows.append({**of_choice, **found, "mean": sum(found.values()) / len(found)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)

    with torch.no_grad():
        for weight in (0.0, USUAL_WEIGHT):
            for scales in itertools.product(TRIED_SCALES, TRIED_WORD_SCORES):
                try_out(scales, weight)
        best = min(rows[len(rows) // 2 :], key=lambda row: row["mean"])
        for weight in OTHER_WEIGHTS:
            try_out((best["lm_scale"], best["word_score"]), weight)
    table(f"{workload.name}: {len(workload.frames)} utterances, {workload.num_frames} frames", rows)
    return rows


def lexicon_of(bundle: Bundle, words: Sequence[str], tokens: CTCTokens) -> Lexicon:
    """The spellings of words: in phones the bundle's."""
    lexicon = bundle.lexicon if tokens.kind == "phones" else spelled_lexicon(words, tokens)[0]
    assert lexicon is not None
    return lexicon


def measure_free(workload: CTCWorkload, corpora: Path) -> list[dict[str, Any]]:
    """Decoders without a word list: word and letter error rates in %, and CPU milliseconds a frame."""
    rows = []
    for name, beam, make in ctc_free.systems(workload, corpora):
        try:
            rows.append({"system": name, "beam": beam, **run(make(), workload, PASSES, in_letters=True)})
        except ImportError:
            continue
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    table(f"{workload.name}, without a word list: {len(workload.frames)} utterances", rows)
    return rows


def built(
    workload: CTCWorkload, ngram: NgramLM, lexicon: Lexicon | None, scales: Sequence[float], **settings: Any
) -> CTCDecoder:
    """Our decoder."""
    folder = cache_folder() / "ctc_graphs"
    # All n-grams are in the graph, which others search, too.
    settings |= {"lm_scale": scales[0], "word_insertion_penalty": scales[1], "graph_ngrams": ngram.num_arcs}
    return CTCDecoder(workload.tokens, lexicon=lexicon, ngram=ngram, graph_folder=folder, warm_up=False, **settings)


def ours(workload: CTCWorkload, ngram: NgramLM, lexicon: Lexicon, scales: Sequence[float], **settings: Any) -> Decode:
    """Our decoder, one utterance per call."""
    decoder = built(workload, ngram, lexicon, scales, **settings)

    def decode(log_prob: Tensor) -> list[str]:
        (best,) = decoder(log_prob)
        return best.text.split()  # type: ignore[union-attr]

    return decode


def measure_spelled(
    kind: str, bundle: Bundle, workload: CTCWorkload, penalties: Sequence[float]
) -> dict[str, float | list[dict[str, float]]]:
    """With a list of the most frequent words: without the others, and with the others spelled.

    Recall is of the words outside the list, false alarms are spelled words that were not said, for each word that was
    said and is in the list; both in %.
    """
    ngram = bundle.small_ngram
    assert ngram is not None
    words = frequent_words(ngram, NUM_FREQUENT)
    known = set(words)
    num_out = sum(word not in known for words in workload.references for word in words)
    num_in = sum(map(len, workload.references)) - num_out
    lexicon = bundle.lexicon if kind == "phones" else None

    def measured(**settings: Any) -> dict[str, float]:
        decoder = built(workload, ngram, lexicon, SCALES[kind], words=words, **settings)
        counts, num_found, num_false = NO_ERRORS, 0, 0
        for log_prob, reference in zip(workload.frames, workload.references, strict=True):
            (best,) = decoder(log_prob)
            outside = [word for word in reference if word not in known]
            spelled = [word.text for word in best.words if word.is_spelled]  # type: ignore[union-attr]
            right = sum(min(outside.count(word), spelled.count(word)) for word in set(outside))
            num_found, num_false = num_found + right, num_false + len(spelled) - right
            counts += count_errors(reference, tuple(best.text.split()))  # type: ignore[union-attr]
        shares = (counts.rate, num_found / max(1, num_out), num_false / max(1, num_in))
        return {
            name: round(100.0 * share, 2) for name, share in zip(("wer", "recall", "false_alarms"), shares, strict=True)
        }

    rows = [{"penalty": penalty, **measured(spell_unknown=True, spelling_penalty=penalty)} for penalty in penalties]
    oov_rate = round(100.0 * num_out / (num_out + num_in), 2)
    return {"oov_rate": oov_rate, "num_oov": num_out, "wer_closed": measured()["wer"], "spelled": rows}


def frequent_words(ngram: NgramLM, num_words: int) -> list[str]:
    """The words with the most probable unigrams, the first ones first."""
    score = ngram.arrays.arc_score(torch.arange(len(ngram.vocabulary))).tolist()
    by_word = dict(zip(ngram.vocabulary.words, score, strict=True))
    return sorted(listed_words(ngram), key=lambda word: -by_word[word])[:num_words]


def our_systems(
    workload: CTCWorkload, ngram: NgramLM, lexicon: Lexicon, scales: Sequence[float], quick: bool
) -> list[System]:
    """Our decoder at each beam."""
    return [
        (
            OURS,
            f"{beam:g}/{most}",
            functools.partial(ours, workload, ngram, lexicon, scales, search_beam=beam, max_active_states=most),
        )
        for beam, most in (OUR_QUICK_BEAMS if quick else OUR_BEAMS)
    ]


def prefix_systems(
    workload: CTCWorkload, ngram: NgramLM, words: Sequence[str], scales: Sequence[float], quick: bool
) -> list[System]:
    """Our replacement of pyctcdecode at each of its beams, and at more."""
    return [
        (OUR_PREFIX, str(beam), functools.partial(summed, workload, lambda: ngram, words, scales, beam))
        for beam in (*PEER_BEAMS["pyctcdecode"], *MORE_BEAMS)[: 1 if quick else None]
    ]


def neural_prefix_systems(
    workload: CTCWorkload, bundle: Bundle, ngram: NgramLM, words: Sequence[str], quick: bool
) -> list[System]:
    """The same with the recurrent model, interpolated with the n-gram model as in `CTCDecoder`."""
    scales = SUMMED_NEURAL_SCALES[workload.tokens.kind]

    def language_model() -> LanguageModel:
        recurrent = mapped_to(model_maker(bundle, words)[0](), ngram.vocabulary, warn=False)
        return interpolated(recurrent, ngram, NEURAL_WEIGHT)

    return [
        (NEURAL_PREFIX, str(beam), functools.partial(summed, workload, language_model, words, scales, beam))
        for beam in ((SMALL_BEAM,) if quick else PEER_BEAMS["pyctcdecode"])
    ]


def interpolated(recurrent: LanguageModel, ngram: NgramLM, weight: float) -> LanguageModel:
    """The recurrent model with a weight, and the n-gram model with the rest; over one vocabulary."""
    return Interpolated([recurrent, ngram], [weight, 1.0 - weight])


def summed(
    workload: CTCWorkload,
    language_model: Callable[[], LanguageModel],
    words: Sequence[str],
    scales: Sequence[float],
    beam: int,
) -> Decode:
    """Our replacement of pyctcdecode."""
    labels = peers.labels_of(workload.tokens)
    decoder = build_ctcdecoder(labels, None, words, *scales, language_model=language_model())
    return lambda log_prob: decoder.decode(log_prob, beam_width=beam).split()


def peer_systems(
    workload: CTCWorkload, words: Sequence[str], lexicon: Lexicon, arpa: Path, quick: bool
) -> list[System]:
    """Those of the others, at each beam."""
    systems: list[System] = []
    kind = workload.tokens.kind
    ways = lexicon.restricted_to(words)[0].pronunciations
    too_slow = QUICK_TOO_SLOW if quick else TOO_SLOW
    for name in QUICK_PEERS if quick else (*QUICK_PEERS, "torchaudio"):
        if name == "pyctcdecode" and kind == "phones":
            continue
        spellings, scales = (words, SUMMED_SCALES[kind]) if name == "pyctcdecode" else (ways, SCALES[kind])
        with_beam = loaded_once(getattr(peers, name), workload.tokens, spellings, arpa, *scales)
        beams = [beam for beam in PEER_BEAMS[name] if (name, kind, beam) not in too_slow]
        for beam in beams[: 1 if quick else None]:
            systems.append((name, str(beam), functools.partial(with_beam, beam)))
    return systems


def graph_systems(workload: CTCWorkload, graph: Callable[[], DecodingGraph], scales: Sequence[float]) -> list[System]:
    """Those that search our graph, at each beam."""
    systems: list[System] = []
    for name in ("sherpa", "kaldi", "k2"):
        frames = (workload.frames,) if name == "sherpa" else ()

        def load(name: str = name, frames: tuple[Sequence[Tensor], ...] = frames) -> Callable[..., Decode]:
            found: Callable[..., Decode] = getattr(peers, name)(workload.tokens, graph(), *frames, *scales)
            return found

        with_beam = loaded_once(load)
        for beam in PEER_BEAMS[name]:
            beams = beam if isinstance(beam, tuple) else (beam,)
            systems.append((name, f"{beams[0]:g}", functools.partial(with_beam, *beams)))
    return systems


def loaded_once(load: Callable[..., Callable[..., Decode]], *arguments: Any) -> Callable[..., Decode]:
    """A function that makes decoders of a peer with different beams, whose models are loaded when the first is made."""
    loaded = functools.lru_cache(1)(functools.partial(load, *arguments))

    def with_beam(*beams: float) -> Decode:
        return loaded()(*beams)

    return with_beam


def run(decode: Decode, workload: CTCWorkload, passes: Passes, in_letters: bool = False) -> dict[str, float]:
    """Word error rate in %, and that in letters if asked for, and CPU milliseconds a frame in the fastest pass."""
    decode(workload.frames[0][:20])
    times: list[float] = []
    while len(times) < passes.most and sum(times) < passes.seconds:
        begin = time.process_time()
        found = [decode(log_prob) for log_prob in workload.frames]
        times.append(time.process_time() - begin)
    rates = {"wer": _error_rate(workload.references, found)}
    if in_letters:
        rates["letters"] = _error_rate(map(" ".join, workload.references), map(" ".join, found))
    return rates | {"ms_per_frame": 1000.0 * min(times) / workload.num_frames}


def time_by_clock(decode: Decode, workload: CTCWorkload, passes: Passes, num_cores: int) -> float:
    """Milliseconds a frame in the fastest pass, by the clock, where processes forked from this one share a pass.

    Raises:
        threading.BrokenBarrierError: a process has ended or takes longer than ten minutes.
    """
    context = multiprocessing.get_context("fork")
    barrier, goes_on = context.Barrier(num_cores + 1, timeout=600.0), context.Value("b", True)

    def work(first: int) -> None:
        try:
            decode(workload.frames[0][:20])
            while True:
                barrier.wait()
                if not goes_on.value:
                    return
                for log_prob in workload.frames[first::num_cores]:
                    decode(log_prob)
                barrier.wait()
        except BaseException:
            barrier.abort()
            raise

    workers = [context.Process(target=work, args=(first,), daemon=True) for first in range(num_cores)]
    for worker in workers:
        worker.start()
    times: list[float] = []
    while len(times) < passes.most and sum(times) < passes.seconds:
        barrier.wait()
        begin = time.perf_counter()
        barrier.wait()
        times.append(time.perf_counter() - begin)
    goes_on.value = False
    barrier.wait()
    for worker in workers:
        worker.join()
    return 1000.0 * min(times) / workload.num_frames


def in_fork(measure: Callable[[], _T]) -> _T:
    """What a function returns in a process forked from this one.

    Raises:
        EOFError: the function has failed, which that process reports on stderr.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=lambda: sender.send(measure()), daemon=True)
    worker.start()
    sender.close()
    found: _T = receiver.recv()
    worker.join()
    return found


def _error_rate(references: Iterable[Sequence[str]], found: Iterable[Sequence[str]]) -> float:
    """Errors in %, of words or of the letters of texts."""
    pairs = zip(references, found, strict=True)
    return 100.0 * sum((count_errors(tuple(right), tuple(own)) for right, own in pairs), NO_ERRORS).rate


def summary(rows: Sequence[dict[str, Any]], workload: CTCWorkload) -> dict[str, float | int | str | None]:
    """The JSON fields of one kind of tokens."""
    by_system: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_system.setdefault(row["system"], []).append(row)
    own = by_system.get(OURS, []) + by_system.get(OUR_PREFIX, [])
    neural = by_system.get(NEURAL, []) + by_system.get(NEURAL_PREFIX, [])
    best_peer = min((row["wer"] for name in PEER_BEAMS for row in by_system.get(name, [])), default=None)
    peer_rows = [row for name in PEER_BEAMS for row in by_system.get(name, [])]

    def ratio(others: Sequence[dict[str, Any]], time: str = "ms_per_frame") -> float | None:
        if not others:
            return None
        wer = min(row["wer"] for row in others)
        theirs = min(row[time] for row in others if row["wer"] == wer)
        good = [row[time] for row in own if row["wer"] <= wer]
        return round(min(good) / theirs, 4) if good else None

    pyctc = by_system.get("pyctcdecode", [])
    theirs = min(((row["wer"], row["ms_per_frame"]) for row in pyctc), default=None)
    good = [row for row in neural if best_peer is None or row["wer"] < best_peer]
    fastest = min((row["ms_per_frame"] for row in good), default=None)
    found: dict[str, Any] = {
        "data": workload.name,
        "num_frames": workload.num_frames,
        "wer_ours": round(min(row["wer"] for row in own), 3) if own else None,
        "wer_best_peer": None if best_peer is None else round(best_peer, 3),
        "time_over_best_peer_at_equal_wer": ratio(peer_rows),
        "wer_ours_neural": round(min(row["wer"] for row in neural), 3) if neural else None,
        "neural_time_over_pyctcdecode": round(fastest / theirs[1], 4) if fastest and theirs else None,
    }
    found |= {f"time_over_{name}": ratio(by_system.get(name, [])) for name in PEER_BEAMS}
    if any("ms_by_clock" in row for row in rows):
        found |= {f"all_cores_over_{name}": ratio(by_system.get(name, []), "ms_by_clock") for name in PEER_BEAMS}
    return found
