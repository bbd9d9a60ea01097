"""Collections of records and the splitting of lattices on a GPU: equal to a CPU's, at a cost that does not grow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
os.environ.setdefault("TRITON_INTERPRET", "1")

from asr.decoding.backtrace import Backtrace
from asr.decoding.lattice import Lattice, best_from_start, best_to_end, join
from asr.decoding.lattice_records import LatticeRecords
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.testing.simulated_gpu import SimulatedDevice, simulated_gpu
from tests.decoding.random_graphs import random_graph, random_log_prob

pytestmark = pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
NUM_UTTS, PER_UTT = 3, 4


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated_gpu() as simulated:
        yield simulated


def records_of(num_frames: int, where: torch.device) -> tuple[Backtrace, LatticeRecords]:
    """Random backpointers of some streams in each frame, each with a losing arc into it."""
    generator, own = torch.Generator().manual_seed(num_frames), NUM_UTTS * PER_UTT
    backtrace, records = Backtrace(where), LatticeRecords(NUM_UTTS, DecodingOptions(output_beam=1.0))
    utt_idx = torch.arange(NUM_UTTS).repeat_interleave(PER_UTT)
    for frame in range(num_frames):

        def before() -> Tensor:
            chosen = torch.randint(PER_UTT, (own,), generator=generator) + utt_idx * PER_UTT
            return chosen + (frame - 1) * own if frame else torch.full_like(chosen, -1)  # noqa: B023

        backtrace.add(before().to(where), torch.arange(own).to(where))
        losing = before(), torch.arange(own) + frame * own, torch.arange(own), torch.rand(own, generator=generator)
        records.add_frame(utt_idx.to(where), [column.to(where) for column in losing])
    return backtrace, records


@pytest.mark.slow
@pytest.mark.parametrize("with_lattice", [True, False])
def test_a_collection_keeps_what_a_cpu_keeps(with_lattice: bool, device: SimulatedDevice) -> None:
    found, costs = [], []
    for num_frames, where in ((8, CPU), (8, CUDA), (3, CUDA)):
        backtrace, records = records_of(num_frames, where)
        last = backtrace.num_records - NUM_UTTS * PER_UTT
        living = torch.tensor([last, last + 1, last + 7, last + 11, -1]).to(where)
        device.clear_counts()
        numbers = records.collect(backtrace, living) if with_lattice else backtrace.collect(living)
        costs.append((device.waits.total(), device.num_launches))
        columns = [numbers, *backtrace.records()]
        if with_lattice:
            columns += [*records._backpointers[0], *records._losing_arcs[0]]
        found.append(([column.tolist() for column in columns], backtrace.block_begin))
    assert found[0] == found[1] and 5 < len(found[0][0][1]) < 90
    # Neither waits nor launches depend on the number of frames.
    assert costs[1] == costs[2]
    assert costs[1][0] <= 6 and costs[1][1] <= 70


@pytest.mark.slow
def test_best_scores_of_states_are_a_cpus(device: SimulatedDevice) -> None:
    graph, options = random_graph(7, num_states=12, num_arcs=50, final_prob=0.3), DecodingOptions(output_beam=6.0)
    costs = []
    for num_frames in (5, 9):
        decoder = TokenPassingDecoder(graph, options, backend="torch")
        log_prob = random_log_prob(7, 3, num_frames)
        joint = decoder.search(log_prob, torch.tensor([2, num_frames, 0]), keep_lattice=True).lattice
        assert joint is not None
        there, scores = joint.to(CUDA), []
        device.clear_counts()
        for lattice in (joint, there):
            arc_total, final_total = lattice.arc_total(options), lattice.final_total(options)
            scores.append((best_from_start(lattice, arc_total), best_to_end(lattice, arc_total, final_total)))
        costs.append((device.waits.total(), device.num_launches))
        assert all(torch.equal(one, other.cpu()) for one, other in zip(*scores, strict=True))
        assert len(scores[0][0].unique()) > num_frames
    assert costs[0] == costs[1] and costs[0][0] <= 3


@pytest.mark.slow
def test_splitting_costs_the_same_for_any_number_of_utterances(device: SimulatedDevice) -> None:
    graph = random_graph(7, num_states=12, num_arcs=50, final_prob=0.3)
    decoder = TokenPassingDecoder(graph, DecodingOptions(output_beam=3.0), backend="torch")
    joint = decoder.search(random_log_prob(7, 3, 5), torch.tensor([2, 5, 0]), keep_lattice=True).lattice
    assert joint is not None
    costs = []
    for lattice in (joint, join([joint, joint, joint])):
        there = lattice.to(CUDA)
        device.clear_counts()
        parts = there.split()
        costs.append((device.waits.total(), device.num_launches))
        for position, (part, expected) in enumerate(zip(parts, expected_parts(lattice), strict=True)):
            for field in fields(Lattice):
                assert torch.equal(getattr(part, field.name), getattr(expected, field.name)), (position, field.name)
    assert costs[0] == costs[1]
    assert costs[0][0] <= 4 and costs[0][1] <= 60


def expected_parts(lattice: Lattice) -> list[Lattice]:
    """One lattice after the other, by `select`."""
    arc_utt, parts = lattice.utt_idx[lattice.src_state()], []
    for utt in range(lattice.num_utts):
        one = replace(lattice, start_state=lattice.start_state[utt : utt + 1])
        part = one.select(lattice.utt_idx == utt, arc_utt == utt)
        parts.append(replace(part, utt_idx=torch.zeros_like(part.utt_idx)))
    return parts
