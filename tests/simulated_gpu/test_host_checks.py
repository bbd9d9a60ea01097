"""What the host does around the kernels is right, and broken forms of it are noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from asr.bundle import Bundle
from scripts.benchmarks import host_checks
from scripts.benchmarks.host_checks import HOST_MUTANTS, HostMutant, stream_hazards

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes"),
]
CHECKS = {mutant.check for mutant in HOST_MUTANTS}


@pytest.fixture
def bundle(tiny_bundle_folder: Path) -> Bundle:
    return Bundle.load(tiny_bundle_folder)


def test_workers_whose_arrays_grow_free_and_use_nothing_too_early(bundle: Bundle) -> None:
    assert stream_hazards(bundle, 2) == (0, 0)


@pytest.mark.parametrize("check", sorted(CHECKS, key=lambda check: check.__name__), ids=lambda check: check.__name__)
def test_the_host_is_right(check: Callable[[Bundle], None], bundle: Bundle) -> None:
    check(bundle)


@pytest.mark.parametrize("mutant", HOST_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_host_is_noticed(mutant: HostMutant, bundle: Bundle) -> None:
    assert mutant.is_caught(bundle)


def test_a_mutant_of_what_is_not_there_is_refused(bundle: Bundle) -> None:
    mutant = HOST_MUTANTS[0]
    other = HostMutant(mutant.name, mutant.owner, mutant.function, "no such line", "", host_checks.check_streams)
    with pytest.raises(ValueError, match="does not have"):
        other.is_caught(bundle)
