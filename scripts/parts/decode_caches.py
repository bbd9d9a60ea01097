"""four-caches' and frame-batch's tables: what language models cost in the first pass, caches, rescored lattices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_decode import RNN_BEAMS

from asr.bundle import Bundle
from asr.decoding.build import decoding_options
from asr.decoding.interface import DecodingOptions
from asr.decoding.paths import hypothesis_of_path
from asr.decoding.rescoring import rescore_on_the_fly
from asr.decoding.token_passing import TokenPassingDecoder
from asr.lm.combine import RemappedLM, difference_lm
from asr.lm.interface import LanguageModel
from asr.lm.ngram.io import load_ngram_lm
from parts.decode_workload import Workload, best_first_pass, best_of, decode_all, rnn_lm, word_error_rate
from parts.markdown_table import table

RNN_WEIGHT = 0.5


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
            difference_lm(large, bundle.small_ngram),
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
            paths = iter(rescore_on_the_fly(found, rnn, lm))
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
    for name, word_beam, caches in (
        ("no skip, all caches", None, {}),
        ("skip, no cache", 6.0, naive),
        ("skip, + cache 2", 6.0, naive | {"cache_hidden": True}),
        ("skip, + caches 1, 2", 6.0, naive | {"cache_hidden": True, "cache_scores": True}),
        ("skip, all caches", 6.0, {}),
    ):
        lm, engine = rnn_lm(bundle, **caches)
        options = replace(rnn, word_beam=word_beam, max_active_states=1500)
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
