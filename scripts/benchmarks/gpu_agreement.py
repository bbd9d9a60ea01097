"""For `scripts/gpu_check`: a GPU agrees with a CPU, workers with one thread, and backends with plain torch and k2."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.decoding.backend import Searchable
from asr.decoding.build import recognition_settings
from asr.decoding.chunk_backend import ChunkBackend
from asr.decoding.frame import FrameSearch
from asr.decoding.interface import DecodeResult
from asr.decoding.selection import BackendFactory, frame_backend, select_backend
from asr.decoding.settings import DecodingOptions, ResourceOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.kernels import hash_table
from asr.kernels.hash_table import HashTable
from asr.kernels.jit import triton_available
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.interface import LanguageModel
from asr.lm.ngram.model import NgramLM
from asr.recognizer import Recognizer
from asr.results import StageTimes
from scripts.benchmarks.clock import waiting_clock
from scripts.benchmarks.gpu_expected import IN_FLOAT32

# k2 prunes in another way, so that now and then one of the two loses a path that the other one keeps.
_MOST_OTHERS = 0.1

Check = tuple[str, Callable[[], str]]


class NotHere(Exception):
    """The code to compare does not run on this kind of device."""


def backend_of(name: str) -> BackendFactory:
    """A backend by its name; `triton frames` runs single frames, `triton chunks` runs chunks without a CUDA graph."""

    def made(graph: Searchable, options: DecodingOptions, lm: LanguageModel | None, keep_lattice: bool) -> ChunkBackend:
        if name == "triton frames":
            return FrameSearch(graph, options, lm, frame_backend(graph, options, lm is not None, "triton"))
        device = graph.final_score.device
        if name == "triton chunks" and graph.epsilon is None and triton_available(device):
            from asr.decoding.gpu.chunk_lm import TritonChunkSearchWithLM
            from asr.decoding.gpu.cuda_graph import CudaGraphSearch, LmInside
            from asr.decoding.gpu.frame import FrameLimits, TritonFrameBackend

            limits, inside = FrameLimits(options, lm is not None, device), None
            if lm is not None:
                frame_by_frame = TritonChunkSearchWithLM(graph, options, lm, TritonFrameBackend(graph, limits))
                inside = LmInside(lm, options.lm_scale, frame_by_frame)
            return CudaGraphSearch(graph, limits, capture=False, inside=inside)
        return select_backend(graph, options, lm, keep_lattice, name.split()[0])

    return made


def search_checks(folder: Path, device: torch.device, num_utts: int, num_frames: int) -> list[Check]:
    """What is to be compared on this device, by name.

    Args:
        folder: of a bundle, whose graph is searched with frames drawn by chance.
        num_utts, num_frames: how many of them.
    """
    bundle = Bundle.load(folder)
    generator = torch.Generator().manual_seed(0)
    num_tokens = len(bundle.graph.tokens)
    log_prob = (3 * torch.randn(num_utts, num_frames, num_tokens, generator=generator)).log_softmax(2)
    lengths = torch.linspace(num_frames // 2, num_frames, num_utts).long()
    expected: dict[bool, list[DecodeResult]] = {}

    def decoded(backend: str, where: torch.device, with_lm: bool, captured: bool = False) -> list[DecodeResult]:
        options = recognition_settings(bundle, "ngram", {}).decoding
        options = replace(options, search_beam=min(options.search_beam, 12.0), max_active_states=2000)
        search = TokenPassingDecoder(bundle.graph.to(where), options, backend=backend_of(backend))
        lm = None
        if with_lm:
            assert bundle.rnn_lm is not None
            lm = CachedRNNLM(bundle.rnn_lm.network.to(where))  # type: ignore[arg-type]
        with warnings.catch_warnings(), torch.no_grad():
            # A graph that cannot be captured is a warning elsewhere, and wrong here. What others warn of is no matter.
            if captured:
                warnings.filterwarnings("error", message="a frame could not be captured")
            return search.decode(log_prob.to(where), lengths.to(where), lm)

    def compare(backend: str, where: torch.device, with_lm: bool) -> str:
        if with_lm not in expected:
            expected[with_lm] = decoded("torch", device, with_lm)
        begin = time.perf_counter()
        if backend == "triton" and where.type != "cuda":
            raise NotHere("CUDA graphs need a GPU")
        try:
            found = decoded(backend, where, with_lm, backend == "triton")
        except AsrError as error:
            # What a GPU is there for must run on one.
            raise (NotHere if backend == "numba" or where.type != "cuda" else AssertionError)(error) from error
        seconds = time.perf_counter() - begin
        for ours, theirs in zip(found, expected[with_lm], strict=True):
            assert (ours.best is None) == (theirs.best is None), "a path where there is none"
            if ours.best is not None and theirs.best is not None:
                difference = abs(ours.best.total - theirs.best.total)
                # On the same device the search's own sums are the same, bit for bit; a network's are not.
                exact = where == device and not with_lm
                allowed = 0.0 if exact else 1e-4 * abs(theirs.best.total) + 0.02 * with_lm
                assert difference <= allowed, f"{ours.best.total} where the torch backend has {theirs.best.total}"
                assert not exact or ours.best.word_ids == theirs.best.word_ids, "other words"
        return f"{len(found)} best paths agree with the torch backend's; {seconds:.2f} s, compiling included"

    backends = ("triton frames", "triton chunks", "triton", "numba")
    cases = [(backend, device, with_lm) for with_lm in (False, True) for backend in backends]
    cases += [("auto", torch.device("cpu"), with_lm) for with_lm in (False, True)]
    return [
        (
            f"token passing, {backend} on {where.type}, {'GRU' if with_lm else 'n-gram graph'}",
            lambda b=backend, w=where, m=with_lm: compare(b, w, m),  # type: ignore[misc]
        )
        for backend, where, with_lm in cases
        if not with_lm or bundle.rnn_lm is not None
    ] + [
        ("hash table", lambda: compare_hash_tables(device, 4 * num_utts * num_frames)),
        ("n-gram look-up", lambda: compare_ngrams(bundle.small_ngram, device, 64 * num_utts * num_frames)),
    ]


def compare_hash_tables(device: torch.device, num_keys: int) -> str:
    """Inserts and finds keys with kernels and with tensor operations."""
    if not triton_available(device):
        raise (AssertionError if device.type == "cuda" else NotHere)("triton is missing")
    generator = torch.Generator().manual_seed(0)
    with mock.patch.object(hash_table, "gpu_module", lambda name, _: importlib.import_module(name)):
        tables = [HashTable(16, device), HashTable(16, device, compiled=False)]
    held = [torch.zeros(0, dtype=torch.int64, device=device) for _ in tables]
    for _ in range(4):
        key = torch.randint(2 * num_keys, (num_keys,), generator=generator).to(device) * 1234567
        absent: list[Tensor] = []
        for number, table in enumerate(tables):
            slot, missing = table.find(key)
            if missing is not None:
                _, one = table.insert(key[missing])
                held[number] = torch.cat([held[number], key[missing][one]])
                absent.append(missing)
            slot, missing = table.find(key)
            assert missing is None, "a key that was put in is not found"
            assert torch.equal(table.keys.view(-1)[slot], key), "a key is found where another stands"
        assert len(absent) != 2 or torch.equal(absent[0], absent[1]), "other keys are absent"
        assert torch.equal(held[0].sort().values, held[1].sort().values), "other keys are new"
    return f"{tables[0].count} keys put in and found"


def compare_ngrams(lm: NgramLM, device: torch.device, num_queries: int) -> str:
    """Queries the model on the CPU and on the device, with hashed and searched arcs, and reports the device's rate."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randint(lm.num_states, (num_queries,), generator=generator)
    word_id = torch.randint(len(lm.vocabulary), (num_queries,), generator=generator)
    expected = lm.score(state, word_id)
    rates = []
    searched = NgramLM(lm.vocabulary, replace(lm.arrays, index=None), lm.order)
    for model in (lm.with_index().to(device), searched.to(device)):
        queries = state.to(device), word_id.to(device)
        model.score(*queries)
        begin = time.perf_counter()
        found = [part.cpu() for part in model.score(*queries)]
        rates.append(num_queries / (time.perf_counter() - begin))
        assert all(map(torch.equal, found, expected)), "other scores or states"
    return f"{num_queries} queries give the same bits; {rates[0]:.3g} hashed, {rates[1]:.3g} searched a second"


def compare_log_prob(folder: Path, waveforms: list[Tensor], device: torch.device) -> str:
    """Features and acoustic model on a CPU and on the device."""
    tables = []
    for where in (torch.device("cpu"), device):
        recognizer = Recognizer.from_folder(folder, mode="ngram", resources=IN_FLOAT32).to(where)
        with torch.no_grad():
            tables.append([row.cpu() for row in recognizer.log_prob(waveforms, StageTimes())])
    assert torch.equal(tables[0][1], tables[1][1]), "the numbers of frames differ"
    difference = max(
        float((ours[:num] - theirs[:num]).exp().sub(1).abs().mul(theirs[:num].exp()).max())
        for ours, theirs, num in zip(tables[0][0], tables[1][0], tables[0][1].tolist(), strict=True)
    )
    assert difference < 0.02, f"probabilities differ by up to {difference:.4f}"
    return f"probabilities differ by at most {difference:.1e}"


def compare_workers(
    folder: Path, mode: str, waveforms: list[Tensor], device: torch.device, numbers: Sequence[int]
) -> str:
    """Batches one after the other, and several at a time in separate streams, give the same results."""
    recordings = waveforms * 4
    seconds = max(map(len, waveforms)) / Bundle.load(folder).sampling_rate
    results = []
    for num_workers in numbers:
        resources = ResourceOptions(batch_seconds=2 * seconds, num_workers=num_workers)
        recognizer = Recognizer.from_folder(folder, mode=mode, decoder="token-passing", resources=resources)
        results.append([(result.text, result.total) for result in recognizer.to(device)(recordings)])
    for found in results[1:]:
        for (text, total), (other_text, other_total) in zip(results[0], found, strict=True):
            assert abs(total - other_total) < 1e-3 * abs(total) + 1e-3, (
                f"{text!r} {total}, {other_text!r} {other_total}"
            )
    num_same = sum(found == results[0] for found in results[1:])
    told = ", ".join(map(str, numbers[1:]))
    return f"{told} workers: totals agree, {num_same} of {len(numbers) - 1} equal to the last digit"


def beside_k2(folder: Path, device: torch.device, recordings: Sequence[Tensor]) -> dict[str, Any]:
    """Speed of k2's search and ours without a language model, and whether they agree: `wrong` if they do not.

    Raises:
        ImportError: k2 is not installed.
    """
    from asr.decoding.k2 import K2Decoder

    bundle = Bundle.load(folder)
    options = recognition_settings(bundle, "ngram", {}).decoding
    recognizer = Recognizer(bundle, mode="ngram", decoder="token-passing").to(device)
    with torch.no_grad():
        log_prob, num_frames = recognizer.log_prob(list(recordings), StageTimes())
    audio = sum(map(len, recordings)) / bundle.sampling_rate
    graph, found = bundle.graph.to(device), dict[str, Any]()
    results, clock = list[list[DecodeResult]](), waiting_clock(device)
    for name, decoder in (("token_passing", TokenPassingDecoder(graph, options)), ("k2", K2Decoder(graph, options))):
        decoder.decode(log_prob, num_frames)  # compiles and makes room
        begin = clock()
        results.append(decoder.decode(log_prob, num_frames))
        found[f"search_times_real_time_{name}"] = round(audio / (clock() - begin), 1)
    return {**found, **agreement(*results)}


def agreement(ours: Sequence[DecodeResult], theirs: Sequence[DecodeResult]) -> dict[str, Any]:
    """How many best paths have other words or another total, with `wrong` where that is more than pruning explains."""
    num_others = 0
    for one, other in zip(ours, theirs, strict=True):
        if (one.best is None) != (other.best is None):
            num_others += 1
        elif one.best is not None and other.best is not None:
            differs = abs(one.best.total - other.best.total) > 0.1 + 1e-3 * abs(one.best.total)
            num_others += differs or one.best.word_ids != other.best.word_ids
    found: dict[str, Any] = {"num_compared": len(ours), "num_others": num_others}
    if num_others > _MOST_OTHERS * len(ours):
        found["wrong"] = f"{num_others} of {len(ours)} best paths of k2 are others"
    return found
