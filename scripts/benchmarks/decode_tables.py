"""The papers' decoding tables on real speech, and other decoders on the same graph; run by `scripts/bench decode`.

docs/references.md cites the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asr.bundle import Bundle
from asr.decoding.build import recognition_settings
from asr.decoding.interface import Hypothesis
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from scripts.benchmarks import figures
from scripts.benchmarks.decode_workload import (
    BATCH_SIZE,
    Workload,
    best_of,
    decode_all,
    heard,
    kaldi_decoder,
    word_error_rate,
)
from scripts.benchmarks.nbest import prefix_tree_cost
from scripts.benchmarks.report import table
from scripts.benchmarks.speech import an4_recordings
from scripts.benchmarks.systems import BEAMS, SYSTEMS, Run, System, run, warm_up

# The rows of BEAMS whose curves are drawn, and the one at which systems are compared.
_CURVE = BEAMS[1:6]
_WIDE = BEAMS[5]
_LIST_SIZES = (10, 100, 1000)
_SECOND_WEIGHTS = (0.3, 0.5, 0.7, 1.0)
_ONE_PASS = SYSTEMS["gru, one pass"]
_NO_SKIP = SYSTEMS["gru, one pass, no skip beam"]
# Stored rows of int8 are rounded, rows that are computed again are not: with float32, the caches change no word.
_CACHED = {"hidden_dtype": "float32"}
# Without cached hidden rows, the hidden layer runs again for each query, from the previous row: "naive cache 2".
_NAIVE = {**_CACHED, "cache_scores": False, "cache_hidden": False}


def run_tables(
    bundle: Bundle, workload: Workload, names: Sequence[str], corpora: Path | None, plots: Path | None
) -> None:
    """Prints the tables of these names.

    Args:
        bundle: with a recurrent language model and its graph's n-gram model.
        workload: what to decode.
        names: keys of `TABLES`.
        corpora: folder of the corpora, for a second test set.
        plots: folder for figures, or None.
    """
    seconds, words = workload.seconds, workload.num_words
    print(f"{workload.name}: {len(workload.frames)} utterances, {seconds:.1f} s, {words} words")
    for name in names:
        TABLES[name](bundle, workload, corpora, plots)


def speed(bundle: Bundle, workload: Workload, *_: Path | None) -> None:
    """Token passing and k2 with equal beams; nothing where k2 is missing."""
    options = recognition_settings(bundle, "ngram", {}).decoding
    try:
        from asr.decoding.k2 import K2Decoder

        K2Decoder(bundle.graph, options)
    except AsrError as error:
        print(f"k2 left out: {error}")
        return
    rows = []
    for beam, most, batch_size in (
        (8.0, 1000, BATCH_SIZE),
        (14.0, 3000, BATCH_SIZE),
        (14.0, 3000, 1),
        (20.0, 7000, BATCH_SIZE),
    ):
        some = replace(options, search_beam=beam, max_active_states=most)
        own, own_s = decode_all(TokenPassingDecoder(bundle.graph, some), workload.frames, batch_size=batch_size)
        others, k2_s = decode_all(K2Decoder(bundle.graph, some), workload.frames, batch_size=batch_size)
        rows.append(
            {
                "search beam / active states": f"{beam:g} / {most}",
                "batch": batch_size,
                "token passing, ms per frame": 1e3 * own_s / workload.num_frames,
                "k2, ms per frame": 1e3 * k2_s / workload.num_frames,
                "token passing / k2": own_s / k2_s,
                "WER token passing": word_error_rate(workload, best_of(own)),
                "WER k2": word_error_rate(workload, best_of(others)),
            }
        )
    table("Token passing and k2, no large language model", rows)


def peers(bundle: Bundle, workload: Workload, *_: Path | None) -> None:
    """Decoders on the same graph and frames; those that cannot run are named."""
    options = recognition_settings(bundle, "ngram", {}).decoding
    rows: list[dict[str, Any]] = []

    def add(name: str, hypotheses: Sequence[Hypothesis | None], seconds: float) -> None:
        wer = word_error_rate(workload, hypotheses)
        rows.append({"decoder": name, "ms per frame": 1e3 * seconds / workload.num_frames, "WER": wer})

    def add_decoder(name: str, decoder: Any, batch_size: int) -> None:
        results, seconds = decode_all(decoder, workload.frames, batch_size=batch_size)
        add(name, best_of(results), seconds)

    for batch_size, how in ((BATCH_SIZE, f"batches of {BATCH_SIZE}"), (1, "one by one")):
        add_decoder(f"token passing, {how}", TokenPassingDecoder(bundle.graph, options), batch_size)
    try:
        from asr.decoding.k2 import K2Decoder

        add_decoder(f"k2, batches of {BATCH_SIZE}", K2Decoder(bundle.graph, options), BATCH_SIZE)
    except AsrError as error:
        print(f"k2 left out: {error}")
    try:
        found = kaldi_decoder(bundle.graph, options, workload.frames)
        add("kaldi-decoder `FasterDecoder`, one by one", *found)
    except ImportError as error:
        print(f"kaldi-decoder left out: {error}")
    table("Decoders on the same graph and frames, the bundle's beams", rows)


def index_table(bundle: Bundle, workload: Workload, _: Path | None, plots: Path | None) -> None:
    """Lee et al. (2015), Figure 2: error over time; Table 2: one pass and two passes."""
    curves = {
        "1 pass, trigram": SYSTEMS["trigram"],
        "1 pass, GRU": _ONE_PASS,
        "2 passes, GRU over the lattice": SYSTEMS["gru"],
    }
    systems = curves | {
        "2 passes, GRU over 1000-best": System("ngram", second_pass="nbest"),
        "2 passes, hybrid over 1000-best": System("ngram", second_pass="nbest", second_weight=0.5),
    }
    warm_up(bundle, workload, list(systems.values()))
    points, rows = [], []
    for beams in _CURVE:
        row = {"search beam / active / output / context beam": str(beams)}
        for name, system in curves.items():
            one = run(bundle, workload, system, beams)
            points.append({"system": name, "of real time": one.seconds / workload.seconds, "WER": one.wer})
            row[name] = f"{one.wer:.2f} %, {one.seconds / workload.seconds:.4f}"
        rows.append(row)
    table(f"Error over beams ({workload.name}): WER, CPU time as a part of real time", rows)
    rows = [_row(name, fastest(bundle, workload, system, _WIDE), workload) for name, system in systems.items()]
    table(f"One and two passes, beams {_WIDE}", rows)
    if plots is not None:
        figures.error_over_time(points, workload.name, plots / "error_over_time.svg")


def prefix_tree(bundle: Bundle, workload: Workload, _: Path | None, plots: Path | None) -> None:
    """Si et al. (2013), Table 2: error by the length of the list; Table 3 and Figures 3 and 4: its cost."""
    systems: dict[str, tuple[System, dict[str, Any]]] = {
        "first pass: trigram": (SYSTEMS["trigram"], {}),
        "4-gram over the lattice": (SYSTEMS["4-gram"], {}),
        "GRU over the lattice": (SYSTEMS["gru"], {}),
    }
    for mode, name in (("rnn", "GRU"), ("interpolated", "GRU and 4-gram")):
        for size in _LIST_SIZES:
            system = System("ngram", second_pass="nbest", second_mode=mode)
            systems[f"{name} over {size}-best"] = system, {"second_pass_sentences": size}
    rows = []
    for name, (system, more) in systems.items():
        one = run(bundle, workload, system, _WIDE, more)
        rows.append({"pass": name, "WER": f"{one.wer:.2f} %", "95 % interval": _interval(one)})
    table(f"Error by the length of the list ({workload.name}), beams {_WIDE}", rows)
    prefix_tree_cost(bundle, workload, plots)


def four_caches(bundle: Bundle, workload: Workload, *_: Path | None) -> None:
    """Huang et al. (2014), Tables 3 to 6: models in the first pass, its caches, and second passes over its lattices."""
    # Every model inside the search is queried for the same words.
    large = System("large_ngram", "search", skip_beam=recognition_settings(bundle, "rnn", {}).decoding.skip_beam)
    both = SYSTEMS["gru and 4-gram, one pass"]
    first_passes: dict[str, tuple[System, Mapping[str, Any]]] = {
        "trigram": (SYSTEMS["trigram"], {}),
        "4-gram": (large, {}),
        "GRU, no caches": (_ONE_PASS, _NAIVE),
        "GRU": (_ONE_PASS, _CACHED),
        "GRU and 4-gram": (both, _CACHED),
    }
    warm_up(bundle, workload, [system for system, _ in first_passes.values()])
    rows = [
        _row(name, fastest(bundle, workload, system, caches=caches), workload)
        for name, (system, caches) in first_passes.items()
    ]
    table(f"Language models inside the search ({workload.name}), the bundle's beams", rows)

    rows = []
    for name, system, caches in (
        ("none", _NO_SKIP, _NAIVE),
        ("skip beam", _ONE_PASS, _NAIVE),
        ("skip beam, hidden states", _ONE_PASS, {**_CACHED, "cache_scores": False}),
        ("skip beam, hidden states, scores", _ONE_PASS, _CACHED),
        ("hidden states, scores", _NO_SKIP, _CACHED),
    ):
        one = run(bundle, workload, system, caches=caches)
        assert one.counts is not None
        row = _row(name, one, workload)
        del row["hit ratio"]
        rows.append(row | {"queries": one.counts.num_queries, "hidden states": one.counts.num_hidden_rows})
    table(f"Caches, GRU inside the search ({workload.name})", rows, thousands=",")

    rows = []
    for name, mode, fusion in (
        ("trigram", "ngram", "lattice"),
        ("4-gram", "large_ngram", "search"),
        ("GRU and 4-gram", "interpolated", "search"),
    ):
        row = {"first pass": name, "alone": f"{run(bundle, workload, System(mode, fusion)).wer:.2f}"}
        for weight in _SECOND_WEIGHTS:
            one = run(bundle, workload, System(mode, fusion, "lattice", second_weight=weight))
            row[f"GRU {weight:g}"] = f"{one.wer:.2f}"
        rows.append(row)
    table(f"The GRU over lattices of first passes ({workload.name}): WER in %, by its weight", rows)


def frame_batch(bundle: Bundle, workload: Workload, corpora: Path | None, _: Path | None) -> None:
    """Lee et al. (2018): error and time on test sets, n-gram, exact and quantized histories."""
    sets = [workload]
    others = an4_recordings(corpora)
    if others:
        sets.append(heard(bundle, "AN4 test", others))
    systems: dict[str, tuple[System, dict[str, Any]]] = {"4-gram": (SYSTEMS["4-gram"], {}), "GRU": (_ONE_PASS, {})}
    for precision in ("round-2", "round-1", "sign"):
        systems[f"GRU, {precision}"] = _ONE_PASS, {"history_precision": precision}
    warm_up(bundle, workload, [system for system, _ in systems.values()])
    rows = []
    for name, (system, more) in systems.items():
        row: dict[str, Any] = {"language model": name}
        for one in sets:
            found = fastest(bundle, one, system, None, more)
            row[f"{one.name}: WER"] = f"{found.wer:.2f} %"
            row[f"{one.name}: of real time"] = found.seconds / one.seconds
            row[f"{one.name}: hidden states"] = row[f"{one.name}: shared"] = ""
            if found.counts is not None:
                computed, shared = found.counts.num_hidden_rows, found.counts.num_shared_rows
                row[f"{one.name}: hidden states"] = computed
                row[f"{one.name}: shared"] = f"{shared / (computed + shared):.2%}"
        rows.append(row)
    table("Test sets, GRU inside the search, the bundle's beams", rows, thousands=",")
    print("; ".join(f"{one.name}: {len(one.frames)} utterances, {one.seconds:.1f} s" for one in sets))


def hit_ratio(bundle: Bundle, workload: Workload, *_: Path | None) -> None:
    """What determines how many queries the caches answer; `scripts/bench query` has more about queries."""
    options = recognition_settings(bundle, "rnn", {}).decoding
    own = options.search_beam
    searches: list[tuple[str, System, dict[str, Any]]] = [
        (f"inside the search, beam {beam:g}", _NO_SKIP, {"search_beam": beam})
        for beam in sorted({8.0, 10.0, 12.0, own, 15.0})
    ]
    if options.skip_beam is not None:
        searches.append((f"beam {own:g}, only words within a beam of {options.skip_beam:g}", _ONE_PASS, {}))
    searches.append((f"over the lattice (default), output beam {options.output_beam:g}", SYSTEMS["gru"], {}))
    rows = []
    for name, system, more in searches:
        counts = run(bundle, workload, system, None, more).counts
        assert counts is not None
        rows.append(
            {
                "search": name,
                "queries": counts.num_queries,
                "hit ratio": f"{counts.hit_ratio:.1%}",
                "without hidden state": f"{counts.answered_without_hidden:.2%}",
                "hidden states": counts.num_hidden_rows,
            }
        )
    table(f"Queries ({workload.name})", rows, thousands=",")


TABLES: dict[str, Callable[[Bundle, Workload, Path | None, Path | None], None]] = {
    "speed": speed,
    "peers": peers,
    "index-table": index_table,
    "prefix-tree": prefix_tree,
    "four-caches": four_caches,
    "frame-batch": frame_batch,
    "hit-ratio": hit_ratio,
}


def fastest(bundle: Bundle, workload: Workload, system: System, *beams: Any, **settings: Any) -> Run:
    """The faster of two runs."""
    return min((run(bundle, workload, system, *beams, **settings) for _ in range(2)), key=lambda one: one.seconds)


def _row(name: str, one: Run, workload: Workload) -> dict[str, Any]:
    return {
        "system": name,
        "WER": f"{one.wer:.2f} %",
        "95 % interval": _interval(one),
        "of real time": one.seconds / workload.seconds,
        "hit ratio": f"{one.counts.hit_ratio:.1%}" if one.counts is not None else "",
    }


def _interval(one: Run) -> str:
    return f"{one.interval[0]:.1f} to {one.interval[1]:.1f}"
