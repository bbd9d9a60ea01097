"""`CTCDecoder` beside pyctcdecode and flashlight-text: the same frames, n-gram, lexicon and scales, beams swept.

    scripts/bench ctc --quick
    scripts/bench ctc --utterances 60 --kinds letters phones

For letters, pieces and phones, each decoder's beam is swept. The tokens of the networks that `--networks` names are
those of real speech, dev-clean-2, the others are simulated; `data` says which. All run one utterance at a time on one
thread; CPU seconds of this process are counted. Words, n-gram and neural model, which is interpolated with the n-gram,
are the librispeech bundle's. Peers that are not installed are left out. The last line is one JSON object; for each kind
of tokens

- `wer_ours`, `wer_best_peer`, `wer_ours_neural`: the lowest word error rates in % over the beams;
- `time_over_best_peer_at_equal_wer`: the time of our fastest beam that is no worse than the best peer, divided by the
  time in which that peer reached it; null where ours does not reach it or there is no peer;
- `time_over_pyctcdecode`, `time_over_flashlight`: the same with each peer alone;
- `neural_time_over_pyctcdecode`: our time with the neural model over that of pyctcdecode's fastest beam.

With `--spelled` the key `spelled` says what spelling words outside a list of 5,000 does; see `measure_spelled`.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from asr.bundle import Bundle, bundle_folder
from asr.ctc import CTCDecoder
from asr.ctc.graphs import spelled_lexicon
from asr.ctc.word_models import listed_words, trie_of
from asr.lm.ngram.arpa import write_arpa
from asr.lm.ngram.model import NgramLM
from asr.metrics import NO_ERRORS, count_errors, read_transcripts
from asr.text.lexicon import Lexicon
from scripts.benchmarks.ctc_workload import CTCWorkload, recorded, simulated, tokens_of
from scripts.benchmarks.inputs import LIBRISPEECH_BUNDLE, argument_parser, cache_folder, default_corpora
from scripts.benchmarks.peers import ctc as peers
from scripts.benchmarks.report import table
from scripts.benchmarks.speech import recordings

KINDS = ("letters", "pieces", "phones")
# pyctcdecode's own defaults: at the scales of the others it merges words, since it adds nothing for a word.
PYCTCDECODE_SCALES = (0.5, 1.5)
# Scales of each kind, the same for the other decoders.
LM_SCALE = {"letters": 1.0, "pieces": 1.0, "phones": 1.25}
OUR_BEAMS = ((8.0, 300), (11.0, 600), (14.0, 1500), (18.0, 3000))
PEER_BEAMS = {"pyctcdecode": (10, 30, 100), "flashlight": (20, 60, 200, 600)}
NUM_FREQUENT = 5000
Decode = Callable[[Tensor], list[str]]
Make = Callable[[], Decode]


def main(arguments: list[str]) -> int:
    parser = argument_parser("ctc", __doc__)
    parser.add_argument("--quick", action="store_true", help="few utterances and beams, under a minute once set up")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of tokens (default: all)")
    parser.add_argument("--utterances", type=int, help="of each kind (default: 40, with --quick 6)")
    parser.add_argument("--corpora", type=Path, default=default_corpora(), help="the folder that holds librispeech/")
    parser.add_argument("--no-neural", action="store_true", help="without the recurrent language model")
    parser.add_argument("--networks", nargs="+", default=(), metavar="BUNDLE", help="bundles with CTC networks")
    parser.add_argument("--spelled", action="store_true", help="also words outside a list of the 5,000 most frequent")
    options = parser.parse_args(arguments)
    num_utts = options.utterances or (6 if options.quick else 40)
    bundle = Bundle.load(LIBRISPEECH_BUNDLE)
    networks = {tokens_of(own).kind: own for own in (Bundle.load(bundle_folder(name)) for name in options.networks)}
    results: dict[str, Any] = {}
    for kind in options.kinds:
        if kind in networks:
            workload = recorded(networks[kind], recordings(options.corpora, num_utts)[1])
        else:
            workload = simulated_workload(kind, bundle, options.corpora, num_utts)
        results[kind] = measure(kind, bundle, workload, options.quick, not options.no_neural)
    if options.spelled:
        results["spelled"] = measure_spelled(bundle, options.corpora, num_utts)
    print(json.dumps(results))
    return 0


def measure(
    kind: str, bundle: Bundle, workload: CTCWorkload, quick: bool, neural: bool
) -> dict[str, float | int | str | None]:
    """The figures of one kind of tokens."""
    ngram = bundle.small_ngram
    assert ngram is not None
    arpa = cache_folder() / f"{bundle.name}_small.arpa"
    if not arpa.is_file():
        arpa.parent.mkdir(parents=True, exist_ok=True)
        write_arpa(trie_of(ngram), arpa)
    words, scale = listed_words(ngram), LM_SCALE[kind]
    lexicon = bundle.lexicon if kind == "phones" else spelled_lexicon(words, workload.tokens)[0]
    assert lexicon is not None
    systems = our_systems(workload, ngram, lexicon, scale, quick)
    systems += peer_systems(kind, workload, words, lexicon, arpa, scale, quick)
    rnn = bundle.rnn_lm
    if rnn is not None and neural:
        make = functools.partial(ours, workload, ngram, lexicon, scale, 14.0, 1500, lm=rnn.network)
        systems.append(("ours, neural", 14.0, make))
    rows = []
    for name, beam, make in systems:
        try:
            rows.append({"system": name, "beam": beam, **run(make(), workload)})
        except ImportError:
            continue
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    table(f"{workload.name}: {len(workload.frames)} utterances, {workload.num_frames} frames", rows)
    return summary(rows, workload)


def simulated_workload(kind: str, bundle: Bundle, corpora: Path | None, num_utts: int) -> CTCWorkload:
    """Made-up outputs for sentences of dev-clean, or for two of our own where the corpora are missing."""
    ngram = bundle.small_ngram
    assert ngram is not None
    texts = Path(corpora or ".") / "text" / "dev-clean.text.xz"
    known = set(listed_words(ngram))
    if texts.is_file():
        sentences = [list(words) for words in read_transcripts(texts).values() if known.issuperset(words)]
    else:
        sentences = [["THE", "MAN", "WAS", "NOT", "THERE"], ["IT", "WAS", "A", "GOOD", "BOOK"]]
    step = max(1, len(sentences) // num_utts)
    lexicon = bundle.lexicon if kind == "phones" else None
    return simulated(kind, sentences[::step][:num_utts], list(ngram.vocabulary.words[4:]), lexicon)


def ours(
    workload: CTCWorkload, ngram: NgramLM, lexicon: Lexicon, scale: float, beam: float, most: int, lm: Any = None
) -> Decode:
    """Our decoder, one utterance a call."""
    decoder = CTCDecoder(
        workload.tokens,
        lexicon=lexicon,
        ngram=ngram,
        lm=lm,
        lm_scale=scale,
        search_beam=beam,
        max_active_states=most,
        graph_folder=cache_folder() / "ctc_graphs",
        warm_up=False,
    )

    def decode(log_prob: Tensor) -> list[str]:
        (best,) = decoder(log_prob)
        return best.text.split()  # type: ignore[union-attr]

    return decode


def measure_spelled(bundle: Bundle, corpora: Path | None, num_utts: int) -> dict[str, float]:
    """Simulated letters with a list of the most frequent words: with the others spelled, and without.

    Recall is of the words outside the list, false alarms are spelled words that were not said, for each word that was
    said and is in the list; both in %.
    """
    ngram = bundle.small_ngram
    assert ngram is not None
    arpa = cache_folder() / f"{bundle.name}_small.arpa"
    if not arpa.is_file():
        arpa.parent.mkdir(parents=True, exist_ok=True)
        write_arpa(trie_of(ngram), arpa)
    workload = simulated_workload("letters", bundle, corpora, num_utts)
    words = listed_words(ngram)[:NUM_FREQUENT]
    known, num_out, num_in = set(words), 0, 0
    figures: dict[str, float] = {}
    for spells in (False, True):
        decoder = CTCDecoder(
            workload.tokens,
            words=words,
            ngram=ngram,
            lm_scale=LM_SCALE["letters"],
            spell_unknown=spells,
            graph_folder=cache_folder() / "ctc_graphs",
        )
        counts, num_found, num_false, num_out, num_in = NO_ERRORS, 0, 0, 0, 0
        for log_prob, reference in zip(workload.frames, workload.references, strict=True):
            (best,) = decoder(log_prob)
            outside = [word for word in reference if word not in known]
            spelled = [word.text for word in best.words if word.is_spelled]  # type: ignore[union-attr]
            right = sum(min(outside.count(word), spelled.count(word)) for word in set(outside))
            num_found, num_false = num_found + right, num_false + len(spelled) - right
            num_out, num_in = num_out + len(outside), num_in + len(reference) - len(outside)
            counts += count_errors(reference, tuple(best.text.split()))  # type: ignore[union-attr]
        figures["wer_spelled" if spells else "wer_closed"] = round(100.0 * counts.rate, 3)
        figures |= {"oov_recall": round(100.0 * num_found / max(1, num_out), 2)}
        figures |= {"false_alarms": round(100.0 * num_false / max(1, num_in), 2)}
    return figures | {"oov_rate": round(100.0 * num_out / max(1, num_out + num_in), 2)}


def our_systems(
    workload: CTCWorkload, ngram: NgramLM, lexicon: Lexicon, scale: float, quick: bool
) -> list[tuple[str, float, Make]]:
    """Our decoder at each beam."""
    beams = OUR_BEAMS[1:3] if quick else OUR_BEAMS
    return [
        ("ours", beam, functools.partial(ours, workload, ngram, lexicon, scale, beam, most)) for beam, most in beams
    ]


def peer_systems(
    kind: str,
    workload: CTCWorkload,
    words: Sequence[str],
    lexicon: Lexicon,
    arpa: Path,
    scale: float,
    quick: bool,
) -> list[tuple[str, float, Make]]:
    """Those of the others, at each beam."""
    systems: list[tuple[str, float, Make]] = []
    for name, beams in PEER_BEAMS.items():
        for beam in beams[1:2] if quick else beams:
            if name == "flashlight":
                ways = {word: lexicon[word] for word in words if word in lexicon}
                make: Make = functools.partial(peers.flashlight, workload.tokens, ways, arpa, scale, 0.0, beam)
            elif kind != "phones":
                make = functools.partial(peers.pyctcdecode, workload.tokens, words, arpa, *PYCTCDECODE_SCALES, beam)
            else:
                continue
            systems.append((name, float(beam), make))
    return systems


def run(decode: Decode, workload: CTCWorkload) -> dict[str, float]:
    """Word error rate in %, and CPU milliseconds a frame."""
    counts, seconds = NO_ERRORS, 0.0
    decode(workload.frames[0][:20])
    for log_prob, words in zip(workload.frames, workload.references, strict=True):
        begin = time.process_time()
        found = decode(log_prob)
        seconds += time.process_time() - begin
        counts += count_errors(words, tuple(found))
    return {"wer": 100.0 * counts.rate, "ms_per_frame": 1000.0 * seconds / workload.num_frames}


def summary(rows: Sequence[dict[str, Any]], workload: CTCWorkload) -> dict[str, float | int | str | None]:
    """What the JSON says of one kind of tokens."""
    by_system: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_system.setdefault(row["system"], []).append(row)
    own, neural = by_system["ours"], by_system.get("ours, neural", [])
    best_peer = min((row["wer"] for name in PEER_BEAMS for row in by_system.get(name, [])), default=None)
    peer_rows = [row for name in PEER_BEAMS for row in by_system.get(name, [])]

    def ratio(others: Sequence[dict[str, Any]]) -> float | None:
        if not others:
            return None
        wer = min(row["wer"] for row in others)
        theirs = min(row["ms_per_frame"] for row in others if row["wer"] == wer)
        good = [row["ms_per_frame"] for row in own if row["wer"] <= wer]
        return round(min(good) / theirs, 4) if good else None

    pyctc = by_system.get("pyctcdecode", [])
    fastest = min((row["ms_per_frame"] for row in pyctc), default=None)
    return {
        "data": workload.name,
        "num_frames": workload.num_frames,
        "wer_ours": round(min(row["wer"] for row in own), 3),
        "wer_best_peer": None if best_peer is None else round(best_peer, 3),
        "time_over_best_peer_at_equal_wer": ratio(peer_rows),
        "wer_ours_neural": round(min(row["wer"] for row in neural), 3) if neural else None,
        "time_over_pyctcdecode": ratio(pyctc),
        "time_over_flashlight": ratio(by_system.get("flashlight", [])),
        "neural_time_over_pyctcdecode": round(neural[0]["ms_per_frame"] / fastest, 4) if neural and fastest else None,
    }
