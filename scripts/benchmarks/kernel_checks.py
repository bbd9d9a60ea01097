"""Checks of the Triton kernels whose programs share memory, and broken kernels that the checks must notice.

A check runs kernels with some block size under `interleaved_programs`, and compares the results with plain torch. A
mutant is a kernel with one line changed, or an atomic operation that is not atomic. A mutant that no check notices
shows that such a fault could go unnoticed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from asr.decoding.backend import ArcSet, ArcWords, Candidates, Searchable
from asr.decoding.chunk_backend import ChunkBackend
from asr.decoding.frame import FrameSearch, TorchFrameBackend
from asr.decoding.gpu import cut_off, losing_arcs
from asr.decoding.gpu import kernels as search_kernels
from asr.decoding.gpu.cuda_graph import CudaGraphSearch
from asr.decoding.gpu.frame import FrameLimits, Recombination, TritonFrameBackend
from asr.decoding.lattice_records import LatticeRecords
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels import hash_table_triton
from asr.kernels.hash_table import marked_positions
from asr.lm.cached import engine_triton
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import EOS_ID, Vocabulary
from scripts.benchmarks.interleaving import Interleaving, interleaved_programs

_CPU = torch.device("cpu")


class Difference(AssertionError):
    """The results of kernels differ from those of plain torch."""


def _same(what: str, found: Any, expected: Any) -> None:
    equal = torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
    if not equal:
        raise Difference(f"{what}: {found} where plain torch has {expected}")


def check_hash_table(seed: int, lanes: int) -> None:
    """Inserts random keys, some of them known, into a table that becomes half full, and looks up all of them."""
    generator = torch.Generator().manual_seed(seed)
    num_buckets = 4 << (seed % 2)
    table = torch.full((num_buckets, 8), -1, dtype=torch.int64)
    value = torch.zeros(num_buckets * 8, dtype=torch.int64)
    shift, number = 63 - (num_buckets - 1).bit_length(), dict[int, int]()
    with mock.patch.object(hash_table_triton, "_LANES", lanes):
        for turn in range(3):
            key = torch.randint(0, 16, (num_buckets * 2,), generator=generator) * 1234567
            asked = key.tolist()
            if turn == 1:
                slot, is_new, is_first = hash_table_triton.put_keys(table, value, key, shift)
                _same("new keys", is_new.tolist(), [one not in number for one in asked])
                first = marked_positions(is_first, int(is_first.sum()))
                value[slot[first]] = 0
            else:
                slot, missing = hash_table_triton.find_keys(table, key, shift)
                _same(
                    "absent",
                    [] if missing is None else missing.tolist(),
                    [i for i, k in enumerate(asked) if k not in number],
                )
                if missing is None:
                    continue
                new_slot, first = hash_table_triton.insert_keys(table, value, key[missing], shift)
                slot[missing], first = new_slot, missing[first]
            _same("keys at their places", table.view(-1)[slot], key)
            _same(
                "first queries",
                first.tolist(),
                [i for i, k in enumerate(asked) if k not in number and k not in asked[:i]],
            )
            for place in first.tolist():
                number[asked[place]] = 1 + len(number)
                value[slot[place]] = len(number)
            _same("values", value[slot].tolist(), [number[one] for one in asked])
    _same("size", int((table >= 0).sum()), len(number))


def check_recombination(seed: int, block: int) -> None:
    """Recombines and prunes random candidates, many of them in few states; twice, in the same buffers."""
    generator = torch.Generator().manual_seed(seed)
    limits = ((0, 10**6), (3, 6))[seed % 2]
    options = DecodingOptions(search_beam=4.0, min_active_states=limits[0], max_active_states=limits[1])
    has_lm = seed % 3 > 0
    graph = _Arcless()
    ours = TritonFrameBackend(graph, FrameLimits(options, has_lm, _CPU, block), 2 * block)
    theirs = TorchFrameBackend(graph, options, has_lm)
    for _ in range(2):
        num, num_streams = 5 * block + 1, 2
        stream = torch.randint(num_streams, (num,), generator=generator).sort().values
        state = torch.randint(3, (num,), generator=generator)
        context_idx = torch.randint(2, (num,), generator=generator) if has_lm else None
        score = -torch.randint(0, 9, (num,), generator=generator).float()
        is_complete = torch.ones(num_streams, dtype=torch.bool)
        candidates = Candidates(state, state, stream, score, state, context_idx, None, is_complete)
        found, expected = (one.recombine_and_prune(candidates) for one in (ours, theirs))
        _same("winners", found.winner, expected.winner)
        _same("survivors", found.kept, expected.kept)
        is_inside = (expected.winner == torch.arange(num)) & (score >= -options.search_beam)
        num_inside = torch.bincount(stream[is_inside], minlength=num_streams)
        _same("winners inside the beam", ours.num_inside(num_streams), num_inside)


def check_cut_off(seed: int, block: int) -> None:
    """Finds the worst surviving score of each stream, of which one has none; twice, in the same buffers."""
    generator = torch.Generator().manual_seed(seed)
    num, num_streams, beam = 5 * block + 1, 4, 5.0
    min_active, max_active = ((2, 3), (3 * block, 4 * block), (0, 2), (0, 10**6))[seed % 4]
    ours = cut_off.CutOff(num, num_streams, block, _CPU)
    for _ in range(2):
        stream = torch.randint(num_streams, (num,), generator=generator).sort().values
        stream += stream >= 2
        stream = stream.clamp(max=num_streams - 1)
        score = -torch.randint(0, 9, (num,), generator=generator).float() * torch.rand(num, generator=generator)
        score[torch.rand(num, generator=generator) < 0.2] = -torch.inf
        parts = [score[stream == one] for one in range(num_streams)]
        inside = torch.tensor([int((part >= -beam).sum()) for part in parts])
        end = torch.tensor([len(part) for part in parts]).cumsum(0)
        begin = torch.cat([end.new_zeros(1), end[:-1]])
        is_there = end > begin
        by_stream = torch.stack([inside, begin * is_there, end * is_there]).int()
        ours.run((score, stream, torch.tensor([num])), by_stream, beam, min_active, max_active)
        expected = [_threshold(part, beam, min_active, max_active) for part in parts]
        _same("the worst scores that survive", ours.threshold.tolist(), expected)


def _threshold(score: Tensor, beam: float, min_active: int, max_active: int) -> float:
    inside = int((score >= -beam).sum())
    wanted = min_active if inside < min_active else max_active
    kth = float(score.sort(descending=True).values[wanted - 1]) if 0 < wanted <= len(score) else -float("inf")
    if inside < min_active:
        return min(-beam, kth)
    return max(-beam, kth) if inside > max_active else -beam


def check_losing_arcs(seed: int, block: int) -> None:
    """Finds the losing arcs that a lattice needs, for random candidates; two frames in succession."""
    generator = torch.Generator().manual_seed(seed)
    limits, beam = (((0, 4), 5.0), ((9, 10), 2.0))[seed % 2]
    options = DecodingOptions(
        search_beam=beam, output_beam=2.0, min_active_states=limits[0], max_active_states=limits[1]
    )
    own, num_streams, num = FrameLimits(options, False, _CPU, block), 2, 3 * block + 1
    recombined, records = Recombination(own, num, num_streams, _CPU), LatticeRecords(num_streams, options)
    counts, expected = torch.zeros(search_kernels.NUM_COUNTS, dtype=torch.int64), []
    found = _Expanded(num, triton.cdiv(num, block), num_streams)
    buffers = losing_arcs.LosingArcBuffers(own, records.margin, found, 4 * num)  # type: ignore[arg-type]
    for _ in range(2):
        stream = torch.randint(num_streams, (num,), generator=generator).sort().values
        state = torch.randint(8, (num,), generator=generator)
        found.stream, found.score = stream.int(), -torch.randint(0, 7, (num,), generator=generator).float()
        found.arc, found.backpointer = torch.arange(num).int() + 100, torch.arange(num) + 1000
        recombined.run(found.stream, state.int(), None, found.score, found.num_kept)
        value, winner = recombined.value, recombined.winner.long()
        survives = (value > -torch.inf) & (value >= recombined.threshold[stream])
        buffers.number[survives] = torch.arange(int(survives.sum()))
        candidates = Candidates(state, state, stream, found.score, state, None, None, torch.ones(num_streams) > 0)
        losing = records.losing(candidates, winner, survives).nonzero().squeeze(1)
        gap = found.score[winner[losing]] - found.score[losing]
        expected.append((found.backpointer[losing], buffers.number[winner[losing]], found.arc[losing].long(), gap))
        buffers.run(found, recombined, counts)  # type: ignore[arg-type]
    num_losing = int(counts[search_kernels.NUM_LOSING.value])
    _same("most losing arcs", int(counts[search_kernels.MOST_LOSING.value]), sum(len(one[0]) for one in expected))
    parts = (buffers.src, buffers.dst, buffers.arc, buffers.score_gap)
    for name, part, columns in zip(("src", "dst", "arc", "gap"), parts, zip(*expected, strict=True), strict=True):
        _same(f"losing arcs, {name}", part[:num_losing], torch.cat(columns))


def check_recurrent_lm(seed: int, lanes: int) -> None:
    """Queries of random histories, with repetitions, in calls of a fixed size; with too little room at first."""
    generator, num_words, num = torch.Generator().manual_seed(seed), 8, 3 * lanes + 1
    torch.manual_seed(seed)
    config = RNNLMConfig(embedding_size=4, hidden_size=4, maxent_order=2, maxent_size=64)
    network = RNNLanguageModel(Vocabulary([f"w{i}" for i in range(num_words)]), config).eval()
    plain, lm = (CachedRNNLM(network, CacheOptions(compiled=False)) for _ in range(2))
    lm.trie.edges._kernels = hash_table_triton
    lm._triton_engine = engine_triton.TritonEngine(lm.expansion, network, None)
    lm._triton_engine._most_rows = 2  # too few
    contexts, expected_contexts = lm.start(1), plain.start(1)
    lanes_of = [mock.patch.object(module, "_LANES", lanes) for module in (hash_table_triton, engine_triton)]
    with lanes_of[0], lanes_of[1], torch.no_grad():
        had_room = False
        while not had_room:
            assert lm.reserve(num) is not None
            own, expected_own = contexts, expected_contexts
            generator.manual_seed(seed)
            for _ in range(4):
                which = torch.randint(len(own), (num,), generator=generator)
                word_id = torch.randint(EOS_ID, EOS_ID + num_words, (num,), generator=generator)
                log_prob, next_idx = lm.score(own[which], word_id)
                expected, expected_next = plain.score(expected_own[which], word_id)
                own, expected_own = torch.cat([own, next_idx]), torch.cat([expected_own, expected_next])
                if int(lm._triton_engine._counts[engine_triton.HAS_ROOM.value]):
                    _same("scores", bool(torch.allclose(log_prob, expected, atol=1e-5)), True)
                else:
                    break
            had_room = lm.release(0)
    pairs = set(zip(own.tolist(), expected_own.tolist(), strict=True))
    _same("contexts", (len(set(own.tolist())), len(pairs)), 2 * (len(set(expected_own.tolist())),))
    _same("rows", lm.hidden.rows.num_used, len(set(lm.trie.hidden_row[lm.trie.hidden_row >= 0].tolist())))


class _Expanded:
    """Candidates in the form of `ArcExpansion`'s results."""

    stream: Tensor
    score: Tensor
    arc: Tensor
    backpointer: Tensor

    def __init__(self, num_arcs: int, num_tiles: int, num_streams: int) -> None:
        self.num_arcs, self.num_tiles, self.num_streams = num_arcs, num_tiles, num_streams
        self.num_kept, self.score = torch.tensor([num_arcs]), torch.zeros(num_arcs)


def check_search(graph: DecodingGraph, seed: int, block: int, in_buffers: bool) -> None:
    """Decodes random frames, either chunk by chunk in buffers of a fixed size or frame by frame."""
    generator = torch.Generator().manual_seed(seed)
    num_frames = torch.tensor([3, 2])
    log_prob = (2 * torch.randn(2, 3, len(graph.tokens), generator=generator)).log_softmax(2)
    beam, limits = ((3.0, (4, 6)), (float("inf"), (0, 10**6)))[seed % 2]
    options = DecodingOptions(search_beam=beam, min_active_states=limits[0], max_active_states=limits[1])

    def made(searched: Searchable, options: DecodingOptions, _: Any, keep_lattice: bool) -> ChunkBackend:
        own = FrameLimits(options, False, _CPU, block)
        if in_buffers:
            return CudaGraphSearch(searched, own, False, 4, 4 * block)
        return FrameSearch(searched, options, None, TritonFrameBackend(searched, own, 2 * block))

    backends: tuple[Any, Any] = ("torch", made)
    expected, found = (
        TokenPassingDecoder(graph, options, backend=one).decode(log_prob, num_frames) for one in backends
    )
    for ours, theirs in zip(found, expected, strict=True):
        _same("hypotheses", ours.hypotheses, theirs.hypotheses)


class _Arcless:
    """A graph without arcs, for backends that only recombine."""

    num_states = 8
    epsilon: ArcSet | None = None
    is_pushed = False

    def __init__(self) -> None:
        none = torch.zeros(0, dtype=torch.int64)
        self.final_score = self.final_graph_score = torch.zeros(self.num_states)
        begin, words = (
            torch.zeros(self.num_states + 1, dtype=torch.int64),
            ArcWords(torch.zeros(1, dtype=torch.int64), none),
        )
        self.emitting = ArcSet(begin, none.int(), none.int(), none.float(), None, words)


@dataclass(frozen=True)
class Mutant:
    """A way to break kernels.

    Args:
        name: the fault.
        split: `cas` or `rmw`, an atomic operation that becomes a load and a store, or None.
        module, line, instead: otherwise a line of the module, which must occur, and its replacement.
    """

    name: str
    split: str | None = None
    module: ModuleType | None = None
    line: str = ""
    instead: str = ""


MUTANTS = (
    Mutant("compare-and-swap is not atomic", split="cas"),
    Mutant("minimum, maximum and sum are not atomic", split="rmw"),
    Mutant(
        "hash table: a key that another program has just put in is not recognized",
        None,
        hash_table_triton,
        "        goes_on = goes_on & (held != wanted) & (held != _EMPTY)\n",
        "        goes_on = goes_on & (held != _EMPTY)\n",
    ),
    Mutant("hash table: the values of known keys are raised, too", None, hash_table_triton, "mask=is_new, sem", "sem"),
    Mutant(
        "recombination: a slot's holder may have another key",
        None,
        search_kernels,
        "        is_pending = is_pending & (is_equal == 0)\n",
        "        is_pending = is_pending & (is_equal == 0) & (holder > position)\n",
    ),
    Mutant(
        "recombination: a slot is looked at, and then taken without looking again",
        None,
        search_kernels,
        'holder = tl.atomic_cas(owner + own_slot, tl.full([B], EMPTY, tl.int32), position, sem="relaxed")\n',
        "holder = tl.load(owner + own_slot)\n        tl.store(owner + own_slot, position, mask=holder < 0)\n",
    ),
    Mutant(
        "recombination: the table's best scores are not cleared",
        None,
        search_kernels,
        "    tl.store(best + own_slot, tl.full([B], UNBEATEN, tl.int64), mask=is_valid)",
        "    pass",
    ),
    Mutant(
        "lattice: arcs that lost to what was pruned stay",
        None,
        losing_arcs,
        '    survives = (best > float("-inf")) & (best >= tl.load(threshold + own_stream, mask=is_valid, other=0.0))\n',
        '    survives = best > float("-inf")\n',
    ),
    Mutant(
        "lattice: survivors behind the beam let nothing else in",
        None,
        losing_arcs,
        "tl.minimum(-beam, -unordered(tl.load(worst + own_stream, mask=is_valid, other=0)))",
        "-beam",
    ),
    Mutant(
        "lattice: losing arcs overwrite those of the frame before",
        None,
        losing_arcs,
        "    place = tl.load(counts + NUM_LOSING) + rank\n",
        "    place = rank\n",
    ),
    Mutant(
        "cut-off: what another program has counted is overwritten",
        None,
        cut_off,
        'tl.atomic_add(histogram + row + bucket, count, mask=count > 0, sem="relaxed")',
        "tl.store(histogram + row + bucket, count, mask=count > 0)",
    ),
    Mutant(
        "cut-off: counts are added by a load and a store",
        None,
        cut_off,
        'tl.atomic_add(histogram + row + bucket, count, mask=count > 0, sem="relaxed")',
        "tl.store(histogram + row + bucket, tl.load(histogram + row + bucket) + count)",
    ),
    Mutant(
        "cut-off: what has been counted stays for the next frame",
        None,
        cut_off,
        "tl.store(histogram + row + tl.arange(0, _NUM_BUCKETS), tl.zeros([_NUM_BUCKETS], tl.int32))",
        "pass",
    ),
    Mutant(
        "language model: who computes a state is not forgotten after a call",
        None,
        engine_triton,
        "    tl.store(owner + own, tl.full([L], _NO_OWNER, tl.int32), mask=is_valid)\n",
        "",
    ),
    Mutant(
        "language model: the states of a call overwrite those of the last one",
        None,
        engine_triton,
        "tl.load(free_row + tl.load(counts + NUM_ROWS) + place, mask",
        "tl.load(free_row + place, mask",
    ),
    Mutant(
        "counts of streams are stored, not added",
        None,
        search_kernels,
        'tl.atomic_add(count + own, tl.sum((is_counted & (stream == own)).to(tl.int32), 0), sem="relaxed")\n',
        "tl.store(count + own, tl.load(count + own) + tl.sum((is_counted & (stream == own)).to(tl.int32), 0))\n",
    ),
)
"""Mutants, each of which one of `shared_memory_checks` must catch."""


def shared_memory_checks(seed: int, block: int, module: ModuleType | None = None) -> list[Callable[[], None]]:
    """The quick checks with one seed and block size; with a module, only those that run its kernels."""
    alone: dict[ModuleType | None, Callable[[int, int], None]]
    alone = {losing_arcs: check_losing_arcs, cut_off: check_cut_off, engine_triton: check_recurrent_lm}
    if module in alone:
        return [lambda: alone[module](seed, block)]
    checks = [lambda: check_hash_table(seed, block), lambda: check_recombination(seed, block)]
    if module is None:
        others = (check_losing_arcs, check_cut_off, check_recurrent_lm)
        checks += [functools.partial(check, seed, block) for check in others]
    return checks


def is_caught(mutant: Mutant, seeds: range, block: int) -> bool:
    """Whether a check fails with one of the seeds."""
    for seed in seeds:
        with _broken(mutant), interleaved_programs(seed, splits=mutant.split):
            for check in shared_memory_checks(seed, block, mutant.module):
                try:
                    check()
                except (Difference, IndexError):
                    return True
    return False


@contextlib.contextmanager
def _broken(mutant: Mutant) -> Iterator[None]:
    """Replaces the module's kernels by the mutant's."""
    if mutant.module is None:
        yield
        return
    source = Path(str(mutant.module.__file__)).read_text("utf-8")
    if mutant.line not in source:
        raise ValueError(f"the mutant {mutant.name!r} changes a line that {mutant.module.__name__} does not have")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / "mutant.py"  # the interpreter reads kernels from files
        path.write_text(source.replace(mutant.line, mutant.instead), "utf-8")
        spec = importlib.util.spec_from_file_location(f"{mutant.module.__name__}_mutant", path)
        assert spec is not None and spec.loader is not None
        broken = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = broken
        stack.callback(sys.modules.pop, spec.name)
        spec.loader.exec_module(broken)
        for name, value in vars(broken).items():
            if type(value).__name__ == "InterpretedFunction":
                stack.enter_context(mock.patch.object(mutant.module, name, value))
        yield


def interleavings(graph: DecodingGraph, seeds: range, blocks: tuple[int, ...]) -> tuple[Interleaving, list[str]]:
    """Runs all checks under many orders -> counts of what ran, and the differences."""
    total, differences = Interleaving(), []
    for block in blocks:
        for seed in seeds:
            checks = shared_memory_checks(seed, block)
            if block == max(blocks):
                checks.append(lambda seed=seed, block=block: check_search(graph, seed, block, seed % 2 == 0))  # type: ignore[misc]
            with interleaved_programs(seed) as counts:
                for check in checks:
                    try:
                        check()
                    except Difference as error:
                        differences.append(f"seed {seed}, block {block}: {error}")
            total.launches += counts.launches
            total.programs += counts.programs
            total.switches += counts.switches
    return total, differences
