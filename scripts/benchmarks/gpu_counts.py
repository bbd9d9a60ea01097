"""`scripts/bench gpu --quick`: what can be counted of GPU code without a GPU.

On a simulated device: how often the host waits and how much it launches for each frame, and memory freed too early.
In Triton's interpreter, programs interleaved: kernels against plain torch, and broken kernels. None of this has run on
a GPU, and none of it is a time on one.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.decoding.gpu import frame as gpu_frame
from asr.decoding.token_search import TokenSearch
from asr.recognizer import Recognizer
from asr.testing.kernel_checks import MUTANTS, interleavings, is_caught
from asr.testing.simulated_gpu import simulated_gpu
from asr.testing.stream_checks import early_frees
from asr.testing.tones import RATE, tiny_bundle, tones
from scripts.benchmarks.gpu_pack import packed_bytes

# The interpreter runs a kernel's programs one by one: little room at first means few that have nothing to do.
_CAPACITY = 256
_BEAMS = {"min_active_states": 0, "max_active_states": 10**6}
_CASES = {
    "one_pass": ("rnn", "search", False),
    "default": ("interpolated", "lattice", False),
    "ngram": ("ngram", "lattice", False),
    "ngram_lattice": ("ngram", "lattice", True),
}
_SENTENCES = ["SICK TO SKIP", "KIT TO PAT"]


def main() -> None:
    """Prints the counts as one JSON object."""
    print(json.dumps(quick()))


def quick() -> dict[str, Any]:
    """The fields of the JSON object, by name."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = tiny_bundle(Path(folder))
    recordings = [tones(sentence.split(), seed=seed) for seed, sentence in enumerate(_SENTENCES)]
    fields: dict[str, Any] = {"host_ms_per_utterance": host_ms_per_utterance(bundle)}
    for name, (mode, lm_fusion, keep_lattices) in _CASES.items():
        waits, launches = _per_frame(copy.deepcopy(bundle), recordings, mode, lm_fusion, keep_lattices)
        fields |= {f"waits_per_frame_{name}": waits, f"launches_per_frame_{name}": launches}
        print(f"{name}: {waits} waits and {launches} launches for each frame", file=sys.stderr, flush=True)
    ran, differences = interleavings(bundle.graph, range(4), (4, 16))
    fields |= {"interleavings_tried": ran.launches, "interleaving_differences": len(differences)}
    caught = [is_caught(mutant, range(6), 4) for mutant in MUTANTS]
    fields |= {"mutants_caught": sum(caught), "mutants": len(MUTANTS)}
    fields["allocator_hazards"] = early_frees(20, num_streams=4)
    fields["allocator_hazards_of_old_streams"] = early_frees(20, is_persistent=False, num_streams=4)
    fields["gpu_check_mb"] = round(packed_bytes() / 2**20, 1)
    return fields


def _per_frame(
    bundle: Bundle, recordings: list[Tensor], mode: str, lm_fusion: str, keep_lattices: bool
) -> tuple[float, float]:
    """Waits and launches of a first call, from samples to words, divided by the frames of the longest recording."""
    with simulated_gpu() as device, mock.patch.object(gpu_frame, "FIRST_CAPACITY", _CAPACITY):
        asked: Any = {"lm_fusion": lm_fusion, "keep_lattices": keep_lattices, "options": _BEAMS}
        recognizer = Recognizer(bundle, mode, decoder="token-passing", **asked).to("cuda")
        # Buffers of the right size are there after the first recordings; the histories of words are new.
        recognizer.prepare()
        frames = []
        advance = TokenSearch.advance

        def counted(self: TokenSearch, stream: Tensor, log_prob: Tensor, num_frames: Tensor) -> None:
            frames.append(log_prob.shape[1])
            advance(self, stream, log_prob, num_frames)

        with torch.no_grad(), mock.patch.object(TokenSearch, "advance", counted):
            device.clear_counts()
            recognizer(recordings, RATE)
        num_frames = max(frames)
        return round(device.waits.total() / num_frames, 2), round(device.num_launches / num_frames, 1)


@contextmanager
def _left_out(owner: Any, name: str, clock: list[float]) -> Iterator[None]:
    """Adds the processor seconds of a method to a clock."""
    method = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            clock[0] += time.process_time() - begin

    with mock.patch.object(owner, name, timed):
        yield


def host_ms_per_utterance(bundle: Bundle, num_utterances: int = 64) -> float:
    """Processor milliseconds of a CPU for what remains beside acoustic model and frames: checks, batches, results."""
    recordings = [tones(_SENTENCES[i % 2].split()[:2], seed=i) for i in range(num_utterances)]
    recognizer = Recognizer(bundle, "ngram", decoder="token-passing", options=_BEAMS)
    best = float("inf")
    for _ in range(3):
        inside = [0.0]
        with _left_out(TokenSearch, "advance", inside), _left_out(Recognizer, "log_prob", inside):
            begin = time.process_time()
            recognizer(recordings, RATE)
            best = min(best, time.process_time() - begin - inside[0])
    return round(1000 * best / num_utterances, 3)
