"""Decoding with graphs of several million arcs, by size of the graph, beams and batch.

    scripts/bench decode-scale --graphs 64k.300k=graph.safetensors 90k.1000k=...

Name each graph with its file (`asr graph --finished` loads fastest). Each graph is measured in a separate process, so
that peak memory is measured separately. The frames are those of `scripts/bench decode`, so the graphs need the topology
of the bundle's. Times are CPU seconds, all columns of a row in one process, the faster of two runs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from asr.bundle import Bundle
from asr.decoding.build import recognition_settings
from asr.decoding.k2 import K2Decoder
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from scripts.benchmarks.decode_workload import (
    Workload,
    best_of,
    decode_all,
    heard,
    kaldi_decoder,
    lesser,
    timed,
    word_error_rate,
)
from scripts.benchmarks.inputs import LIBRISPEECH_BUNDLE, argument_parser, default_corpora
from scripts.benchmarks.report import table
from scripts.benchmarks.speech import recordings

BEAMS = ((8.0, 1000), (11.0, 2000), (14.0, 3000), (17.0, 5000))
BATCH_SIZES = (1, 8, 32)


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("decode-scale", __doc__)
    parser.add_argument("--graphs", nargs="+", required=True, metavar="NAME=GRAPH")
    parser.add_argument("--bundle", type=Path, default=LIBRISPEECH_BUNDLE)
    parser.add_argument("--corpora", type=Path, default=default_corpora(), help="(default: %(default)s)")
    parser.add_argument("--num-utterances", type=int, default=32)
    parser.add_argument("--parts", nargs="+", default=["size", "beams"], choices=["size", "beams"])
    args = parser.parse_args(argv)
    for part in args.parts:
        rows = []
        for named in args.graphs:
            # A process for each, so that its peak memory is its own.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows += pool.apply(measured, (part, named, args))
        table({"size": "Over the graph's size", "beams": "Over beams and batches"}[part], rows)
    return 0


def measured(part: str, named: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one graph, in a process of its own."""
    torch.set_num_threads(1)
    name, _, graph_file = named.partition("=")
    if not graph_file:
        raise AsrError(f"--graphs {named}: give NAME=GRAPH.")
    bundle = Bundle.load(args.bundle)
    workload = heard(bundle, *recordings(args.corpora, args.num_utterances))
    with torch.no_grad():
        if part == "size":
            return over_size(name, Path(graph_file), bundle, workload)
        return over_beams(name, DecodingGraph.load(graph_file), bundle, workload)


def over_size(name: str, graph_file: Path, bundle: Bundle, workload: Workload) -> list[dict[str, Any]]:
    """Each decoder at the bundle's beams: memory, ms per frame, word error rates."""
    options = recognition_settings(bundle, "ngram", {}).decoding
    graph, load_s = timed(lambda: DecodingGraph.load(graph_file))
    row: dict[str, Any] = {"graph": name, "states": graph.num_states, "arcs": graph.num_arcs, "load s": load_s}
    row["graph MB"] = resident_mb()
    torch_pass = TokenPassingDecoder(graph, options)
    decode_all(torch_pass, workload.frames[:2])  # the loops are compiled before
    add(row, "torch", lesser(lambda: decode_all(torch_pass, workload.frames)), workload)
    add(row, "torch, 1", lesser(lambda: decode_all(torch_pass, workload.frames, batch_size=1)), workload, False)
    row["torch MB"] = resident_mb()
    k2_pass = K2Decoder(graph, options)
    add(row, "k2", lesser(lambda: decode_all(k2_pass, workload.frames)), workload)
    row["k2 MB"] = resident_mb()
    hypotheses, seconds = lesser(lambda: kaldi_decoder(graph, options, workload.frames))
    row["kaldi ms"] = 1e3 * seconds / workload.num_frames
    row["kaldi WER"] = word_error_rate(workload, hypotheses)
    row["kaldi MB"] = resident_mb()
    return [row]


def over_beams(name: str, graph: DecodingGraph, bundle: Bundle, workload: Workload) -> list[dict[str, Any]]:
    """The torch pass and k2's over beams and batches."""
    base = recognition_settings(bundle, "ngram", {}).decoding
    decode_all(TokenPassingDecoder(graph, base), workload.frames[:2])
    rows = []
    for beam, most in BEAMS:
        for batch_size in BATCH_SIZES if beam == base.search_beam else BATCH_SIZES[-1:]:
            options = replace(base, search_beam=beam, max_active_states=most)
            row: dict[str, Any] = {"graph": name, "search_beam": beam, "max_active_states": most, "batch": batch_size}
            for kind, first_pass in (("torch", TokenPassingDecoder(graph, options)), ("k2", K2Decoder(graph, options))):
                add(row, kind, decode_all(first_pass, workload.frames, batch_size=batch_size), workload)
            rows.append(row)
    return rows


def add(row: dict[str, Any], kind: str, found: Any, workload: Workload, with_words: bool = True) -> None:
    """The ms a frame and the word error rate of results with their seconds."""
    row[f"{kind} ms"] = 1e3 * found[1] / workload.num_frames
    if with_words:
        row[f"{kind} WER"] = word_error_rate(workload, best_of(found[0]))


def resident_mb() -> int:
    """The peak memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
