"""The papers' decoding tables on a workload, compared with other decoders; run by `scripts/bench decode`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asr.bundle import Bundle
from asr.decoding.build import decoding_options
from asr.decoding.interface import Decoder, DecodeResult, DecodingOptions
from asr.decoding.lattice import join
from asr.decoding.nbest import n_best, rescore_n_best
from asr.decoding.paths import hypothesis_of_path
from asr.decoding.rescoring import rescore_lattice
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.lm.cached.statistics import QueryStatistics
from asr.lm.combine import Difference, RemappedLM
from asr.lm.interface import LanguageModel
from asr.lm.ngram.io import load_ngram_lm
from asr.metrics import NO_ERRORS, count_errors
from asr.text.lexicon import Lexicon
from scripts.benchmarks import figures
from scripts.benchmarks.decode_workload import (
    BATCH_SIZE,
    RNN_BEAMS,
    Workload,
    best_first_pass,
    best_of,
    decode_all,
    lesser,
    rnn_lm,
    timed,
    word_error_rate,
)
from scripts.benchmarks.nbest import prefix_tree
from scripts.benchmarks.peers.flashlight import FlashlightSearch
from scripts.benchmarks.report import table

RNN_WEIGHT = 0.5
BEAMS = (6.0, 8.0, 10.0, 12.0, 14.0)


@dataclass(frozen=True)
class Inputs:
    """What some tables need beside bundle and workload: a larger n-gram, the graph's lexicon and ARPA file for
    flashlight-text, and a folder for figures."""

    large_ngram: Path | None
    lexicon: Path | None
    arpa: Path | None
    plots: Path | None


def run(bundle: Bundle, workload: Workload, names: list[str], inputs: Inputs) -> None:
    """Prints the tables of these names."""
    print(
        f"{workload.name}: {len(workload.frames)} utterances, {workload.num_frames} frames, {workload.num_words} words"
    )
    tables: dict[str, Callable[[], None]] = {
        "speed": lambda: speed(bundle, workload),
        "batches": lambda: batches(bundle, workload),
        "peers": lambda: peers(bundle, workload, inputs.lexicon, inputs.arpa),
        "index-table": lambda: index_table(bundle, workload, inputs.plots),
        "prefix-tree": lambda: prefix_tree(bundle, workload, inputs.plots),
        "four-caches": lambda: four_caches(bundle, workload, inputs.large_ngram),
        "frame-batch": lambda: frame_batch(bundle, workload),
    }
    for name in names:
        if name not in tables:
            raise AsrError(f"there is no table {name!r}; there are {', '.join(tables)}.")
        tables[name]()


def speed(bundle: Bundle, workload: Workload) -> None:
    """The torch pass's two forms and k2 at equal beams."""
    options, _ = decoding_options(bundle, "ngram", {})
    rows = []
    for beam, most, batch_size in (
        (8.0, 1000, BATCH_SIZE),
        (14.0, 3000, BATCH_SIZE),
        (14.0, 3000, 1),
        (20.0, 7000, BATCH_SIZE),
    ):
        some = replace(options, search_beam=beam, max_active_states=most)
        row: dict[str, Any] = {"search_beam": beam, "max_active_states": most, "batch": batch_size}
        results, torch_s = decode_all(TokenPassingDecoder(bundle.graph, some), workload.frames, batch_size=batch_size)
        others, k2_s = decode_all(best_first_pass(bundle.graph, some), workload.frames, batch_size=batch_size)
        row["torch ms/frame"] = 1e3 * torch_s / workload.num_frames
        row["k2 ms/frame"] = 1e3 * k2_s / workload.num_frames
        row["torch / k2"] = torch_s / k2_s
        row["WER torch"] = word_error_rate(best_of(results), workload.references)
        row["WER k2"] = word_error_rate(best_of(others), workload.references)
        rows.append(row)
    table("Speed of the first passes, no large language model", rows)


def batches(bundle: Bundle, workload: Workload) -> None:
    """What the RNN LM costs on top of the n-gram over the utterances that are decoded together; the faster of two."""
    ngram, _ = decoding_options(bundle, "ngram", {})
    rnn, _ = decoding_options(bundle, "rnn", RNN_BEAMS)
    rows = []
    passes = {
        "torch": (
            TokenPassingDecoder(bundle.graph, ngram),
            TokenPassingDecoder(bundle.graph, rnn, lm_fusion="lattice"),
        ),
        "k2, where there is one": (
            best_first_pass(bundle.graph, ngram),
            best_first_pass(bundle.graph, rnn, rescores=True),
        ),
    }

    def with_rnn_lm(rescoring: Decoder, batch_size: int) -> tuple[tuple[list[DecodeResult], QueryStatistics], float]:
        # An engine of its own: what another run has computed must not be found again.
        lm, engine = rnn_lm(bundle)
        results, seconds = decode_all(rescoring, workload.frames, lm, batch_size)
        return (results, engine.statistics()), seconds

    for batch_size, name in itertools.product((8, 32, 128), passes):
        alone, rescoring = passes[name]
        results, ngram_s = lesser(partial(decode_all, alone, workload.frames, batch_size=batch_size))
        (others, counts), rnn_s = lesser(partial(with_rnn_lm, rescoring, batch_size))
        rows.append(
            {
                "batch": batch_size,
                "first pass": name,
                "3-gram ms/frame": 1e3 * ngram_s / workload.num_frames,
                "RNN LM ms/frame": 1e3 * rnn_s / workload.num_frames,
                "RNN LM / 3-gram": rnn_s / ngram_s,
                "WER 3-gram": word_error_rate(best_of(results), workload.references),
                "WER RNN LM": word_error_rate(best_of(others), workload.references),
                "hidden rows a run": counts.mean_hidden_batch,
            }
        )
    table(f"RNN LM in one pass, over utterances in a batch ({workload.name})", rows)


def peers(bundle: Bundle, workload: Workload, lexicon: Path | None, arpa: Path | None) -> None:
    """Other decoders with the same graph and frames; those that cannot run are listed."""
    options, _ = decoding_options(bundle, "ngram", {})
    rows = []

    def add(name: str, words: list[list[str]], seconds: float) -> None:
        pairs = zip(workload.references, words, strict=True)
        rate = 100 * sum((count_errors(list(a), b) for a, b in pairs), NO_ERRORS).rate
        rows.append({"decoder": name, "ms/frame": 1e3 * seconds / workload.num_frames, "WER": rate})

    def add_pass(name: str, first_pass: Any, batch_size: int) -> None:
        results, seconds = decode_all(first_pass, workload.frames, batch_size=batch_size)
        add(name, [list(one.words) if one else [] for one in best_of(results)], seconds)

    add_pass(f"torch pass, batches of {BATCH_SIZE}", TokenPassingDecoder(bundle.graph, options), BATCH_SIZE)
    add_pass("torch pass, one by one", TokenPassingDecoder(bundle.graph, options), 1)
    try:
        from asr.decoding.k2 import K2Decoder

        add_pass(f"k2, batches of {BATCH_SIZE}", K2Decoder(bundle.graph, options), BATCH_SIZE)
    except AsrError as error:
        print(f"k2 left out: {error}")
    try:
        from asr.testing.kaldi_search import KaldiSearch

        search = KaldiSearch(bundle.graph, options.search_beam, options.max_active_states, options.min_active_states)
        found, seconds = timed(lambda: [search.decode(frames * options.am_scale) for frames in workload.frames])
        words = []
        for one in found:
            path = [] if one is None else hypothesis_of_path(bundle.graph, options, *one, 0.0, 0.0).words
            words.append(list(path))
        add("kaldi-decoder FasterDecoder, one by one", words, seconds)
    except ImportError as error:
        print(f"kaldi-decoder left out: {error}")
    print("pyctcdecode left out: it spells words by their letters, and the acoustic model's tokens are phones.")
    if lexicon is None or arpa is None:
        print("flashlight-text left out: name the graph's --lexicon and --arpa file.")
    else:
        try:
            for beam_size in (50, 200, 500):
                peer = FlashlightSearch(bundle.graph, Lexicon.from_file(lexicon), arpa, options, beam_size)
                words, seconds = timed(lambda peer=peer: [peer.decode(frames) for frames in workload.frames])
                add(f"flashlight-text + KenLM, beam size {beam_size}, one by one", words, seconds)
        except ImportError as error:
            print(f"flashlight-text left out: {error}")
    table("Peers: same frames, the same graph where the decoder takes one", rows)


def index_table(bundle: Bundle, workload: Workload, plots: Path | None) -> None:
    """index-table, Table 2 and Figure 2: one pass and two passes over beams."""
    ngram, _ = decoding_options(bundle, "ngram", {})
    rnn, _ = decoding_options(bundle, "rnn", {})
    rows: list[dict[str, Any]] = []

    def add(kind: str, beam: float, hypotheses: Any, seconds: float) -> None:
        rate = word_error_rate(hypotheses, workload.references)
        rows.append({"pass / model": kind, "beam": beam, "WER": rate, "ms/frame": 1e3 * seconds / workload.num_frames})

    for beam in BEAMS:
        results, seconds = decode_all(best_first_pass(bundle.graph, replace(ngram, search_beam=beam)), workload.frames)
        add("1 / 3-gram", beam, best_of(results), seconds)
    for beam in (3.0, 4.0, 5.0, 6.0, 7.0):
        narrow = replace(rnn, search_beam=10.5, output_beam=beam, context_beam=beam)
        results, seconds = decode_all(
            best_first_pass(bundle.graph, narrow, rescores=True), workload.frames, rnn_lm(bundle)[0]
        )
        add("1 / RNN LM", beam, best_of(results), seconds)
    lists, seconds = [], 0.0
    wide = replace(ngram, output_beam=12.0)
    search = TokenPassingDecoder(bundle.graph, wide, keep_lattice=True)
    for log_prob in workload.frames:
        begin = time.process_time()
        found = search.decode(log_prob[None], torch.tensor([len(log_prob)]))[0]
        assert found.lattice is not None, "an utterance reached no final state; widen the beam"
        lists.append(n_best(found.lattice, bundle.graph, wide, 1000))
        seconds += time.process_time() - begin
    # The second pass weighs the frames as the one pass with the RNN LM does.
    shift = rnn.am_scale - ngram.am_scale
    lists = [tuple(replace(one, total=one.total + shift * one.am_score) for one in some) for some in lists]
    hybrid = rnn_lm(bundle, RNN_WEIGHT)[0]
    for kind, lm in (("2 / hybrid, 1000-best", hybrid), ("2 / RNN LM, 1000-best", rnn_lm(bundle)[0])):
        rescored, more = timed(lambda lm=lm: rescore_n_best(lists, lm, rnn))
        add(kind, 14.0, [some[0] if some else None for some in rescored], seconds + more)
    table(
        f"index-table Table 2 ({workload.name}); beam: search_beam of the 3-gram, output and context beam of the RNN",
        rows,
    )
    if plots is not None:
        figures.error_over_time(rows, workload.name, plots / f"error_over_time_{slug(workload)}.svg")


def slug(workload: Workload) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in workload.name.replace(" %", ""))


def four_caches(bundle: Bundle, workload: Workload, large_ngram: Path | None) -> None:
    """four-caches, Tables 3 and 4 (models in the first pass), 5 (caches, skip heuristic), 6 (lattice rescoring)."""
    assert bundle.small_ngram is not None
    ngram, _ = decoding_options(bundle, "ngram", {})
    rnn, _ = decoding_options(bundle, "rnn", RNN_BEAMS)
    models: dict[str, tuple[LanguageModel | None, DecodingOptions]] = {"baseline (3-gram)": (None, ngram)}
    if large_ngram is not None:
        large: LanguageModel = load_ngram_lm(large_ngram)
        if large.vocabulary != bundle.small_ngram.vocabulary:
            large = RemappedLM(large, bundle.small_ngram.vocabulary)
        models["4-gram"] = (
            Difference(large, bundle.small_ngram),
            replace(rnn, am_scale=ngram.am_scale, search_beam=14.0),
        )
    models["RNN LM"] = (rnn_lm(bundle)[0], rnn)
    models["RNN LM + 3-gram, 0.5"] = (rnn_lm(bundle, RNN_WEIGHT)[0], rnn)
    rows, lattices = [], {}
    for name, (lm, options) in models.items():
        results, seconds = decode_all(
            best_first_pass(bundle.graph, options, rescores=lm is not None), workload.frames, lm
        )
        row = {"first pass": name, "WER": word_error_rate(best_of(results), workload.references)}
        rows.append(row | {"ms/frame": 1e3 * seconds / workload.num_frames})
        kept = best_first_pass(bundle.graph, replace(options, output_beam=6.0), keep_lattice=True, rescores=True)
        lattices[name] = decode_all(kept, workload.frames, lm)[0]
    table(f"four-caches Tables 3 and 4 ({workload.name})", rows)
    rows = []
    for name, results in lattices.items():
        row = {"lattice of": name}
        for weight in (0.3, 0.5, 0.8, None):
            lm = rnn_lm(bundle, weight)[0]
            found = [one.lattice for one in results if one.lattice is not None]
            paths = iter(rescore_lattice(join(found), rnn, lm))
            hypotheses = []
            for one in results:
                path = next(paths) if one.lattice is not None else None
                hypotheses.append(
                    one.best
                    if path is None
                    else hypothesis_of_path(bundle.graph, rnn, path.graph_arc, path.total, 0.0, 0.0)
                )
            row["RNN LM alone" if weight is None else f"RNN LM {weight}"] = word_error_rate(
                hypotheses, workload.references
            )
        rows.append(row)
    table(f"four-caches Table 6 ({workload.name}): WER of lattices rescored by RNN LM and 3-gram", rows)
    few = Workload(workload.name, workload.frames[:6], workload.references[:6])
    naive = {
        "cache_scores": False,
        "cache_hidden": False,
        "cache_history_normalizers": False,
        "cache_group_normalizers": False,
    }
    rows = []
    for name, skip_beam, caches in (
        ("no skip, all caches", None, {}),
        ("skip, no cache", 6.0, naive),
        ("skip, + cache 2", 6.0, naive | {"cache_hidden": True}),
        ("skip, + caches 1, 2", 6.0, naive | {"cache_hidden": True, "cache_scores": True}),
        ("skip, all caches", 6.0, {}),
    ):
        lm, engine = rnn_lm(bundle, **caches)
        options = replace(rnn, skip_beam=skip_beam, max_active_states=1500)
        results, seconds = decode_all(TokenPassingDecoder(bundle.graph, options), few.frames, lm)
        counts = engine.statistics()
        rows.append(
            {
                "search": name,
                "WER": word_error_rate(best_of(results), few.references),
                "ms/frame": 1e3 * seconds / few.num_frames,
                "queries": counts.num_queries,
                "hidden rows": counts.num_hidden_rows,
            }
        )
    table(f"four-caches Table 5 ({workload.name}, 6 utterances): RNN LM inside the torch pass's search", rows)


def frame_batch(bundle: Bundle, workload: Workload) -> None:
    """frame-batch's tables: n-gram, float and quantised histories."""
    ngram, _ = decoding_options(bundle, "ngram", {})
    rnn, _ = decoding_options(bundle, "rnn", RNN_BEAMS)
    results, seconds = decode_all(best_first_pass(bundle.graph, ngram), workload.frames)
    rows: list[dict[str, Any]] = []

    def add(name: str, results: Any, seconds: float, counts: tuple[int, int]) -> None:
        rate = word_error_rate(best_of(results), workload.references)
        row = {"language model": name, "WER": rate, "ms/frame": 1e3 * seconds / workload.num_frames}
        rows.append(row | {"hidden rows": counts[0], "shared": counts[1] / max(1, sum(counts))})

    add("3-gram", results, seconds, (0, 0))
    for precision in (None, "round-2", "round-1", "sign"):
        lm, engine = rnn_lm(bundle, history_precision=precision)
        results, seconds = decode_all(best_first_pass(bundle.graph, rnn, rescores=True), workload.frames, lm)
        counts = engine.statistics()
        add(f"RNN LM, {precision or 'float'}", results, seconds, (counts.num_hidden_rows, counts.num_shared_rows))
    table(f"frame-batch ({workload.name})", rows)
