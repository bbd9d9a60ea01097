"""`scripts/bench gpu --quick`: counts for the GPU code without a GPU.

On a simulated device it counts the host's waits and launches per frame, and finds memory that is freed or used too
early. In Triton's interpreter, with interleaved programs, it compares kernels with plain torch and checks that broken
kernels are detected. None of this runs on a GPU, and none of the figures is a time on one.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.decoding.frame import TokenSearch
from asr.decoding.gpu import frame as gpu_frame
from asr.decoding.words import Calibration
from asr.recognizer import Recognizer
from asr.testing.simulated_gpu import simulated_gpu
from asr.testing.tones import RATE, tiny_bundle, tones
from scripts.benchmarks import gpu_ctc
from scripts.benchmarks.host_checks import HOST_MUTANTS, stream_hazards
from scripts.benchmarks.inputs import AN4_BUNDLE, ROOT
from scripts.benchmarks.kernel_checks import MUTANTS, interleavings, is_caught

# The interpreter runs a kernel's programs one by one: little room at first means few that have nothing to do.
_CAPACITY = 1024
_BEAMS = {"min_active_states": 0, "max_active_states": 10**6}
_CASES = {
    "one_pass": ("rnn", "search", False),
    "one_pass_lattice": ("rnn", "search", True),
    "default": ("interpolated", "lattice", True),
    "ngram": ("ngram", "lattice", False),
    "ngram_lattice": ("ngram", "lattice", True),
}
"""Mode, LM fusion, and whether lattices are kept, which confidences need, too."""

_SENTENCES = ["SICK TO SKIP", "KIT TO PAT"]
# Any will do: the posteriors that it maps are what takes time.
_CALIBRATION = Calibration(0.0, {"word_posterior": [-1.0, 1.0]}, {"word_posterior": [-1.0, 1.0]})
# The host looks every 32 frames, by which these differ; one frame is 320 samples. Few tokens are interpreted sooner.
_NARROW_BEAM = 4.0
_SHORT, _LONG = 40 * 320, 72 * 320
_NUM_TOGETHER = 3


def main() -> None:
    """Prints the counts as one JSON object."""
    print(json.dumps(quick()))


def quick() -> dict[str, Any]:
    """The fields of the JSON object by name; computed in two processes with about equal work."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        others = pool.submit(_of_kernels_and, ("ngram",))
        bundle = _tiny_bundle()
        fields = {"host_ms_per_utterance": host_ms_per_utterance(bundle)}
        names = ("one_pass", "one_pass_lattice", "default", "ngram_lattice")
        return {**fields, **_of_recognizers(bundle, names), **others.result()}


def _tiny_bundle() -> Bundle:
    with tempfile.TemporaryDirectory() as folder:
        return tiny_bundle(Path(folder))


def _of_recognizers(bundle: Bundle, names: Sequence[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in names:
        counts = counts_of(bundle, name)
        fields |= {f"{kind}_{name}": count for kind, count in counts.items()}
        told = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in counts.items())
        print(f"{name}: {told}", file=sys.stderr, flush=True)
    return fields


def counts_of(bundle: Bundle, name: str) -> dict[str, float]:
    """Waits and launches of one of the cases."""
    own = copy.deepcopy(bundle)
    if name not in ("one_pass", "default"):
        return _slope(own, name)
    return _of_a_call(own, [tones(sentence.split(), seed=seed) for seed, sentence in enumerate(_SENTENCES)], name)


def _of_kernels_and(names: Sequence[str]) -> dict[str, Any]:
    """Kernels, streams and broken forms of the code, and some of the recognizers."""
    torch.set_num_threads(1)
    bundle = _tiny_bundle()
    ran, differences = interleavings(bundle.graph, range(3), (4, 16))
    caught = [is_caught(mutant, range(6), 4) for mutant in MUTANTS]
    caught += [mutant.is_caught(bundle) for mutant in HOST_MUTANTS]
    num_hazards, num_races = stream_hazards(bundle, 2)
    return {
        **_of_recognizers(bundle, names),
        "interleavings_tried": ran.launches,
        "interleaving_differences": len(differences),
        "mutants_caught": sum(caught),
        "mutants": len(caught),
        "allocator_hazards": num_hazards,
        "stream_races": num_races,
        "gpu_check_mb": round(_bytes_of_gpu_check() / 2**20, 1),
    }


def _bytes_of_gpu_check() -> int:
    """The size of the files that `scripts/gpu_check` needs: code, recorded queries, the smallest bundle and a graph."""
    assets = [ROOT / "tests" / "assets" / name for name in ("query_streams.npz.xz", "gpu_expected.npz")]
    code = [path for folder in ("asr", "scripts/benchmarks") for path in (ROOT / folder).rglob("*.py")]
    return sum(path.stat().st_size for path in (*assets, *code, *AN4_BUNDLE.iterdir(), *gpu_ctc.FOLDER.iterdir()))


def _of_a_call(bundle: Bundle, recordings: list[Tensor], name: str) -> dict[str, float]:
    """Counts of a first call with new word histories, from samples to words, per frame of the longest recording."""
    with _recognizing(bundle, name, _BEAMS) as count:
        num_frames, waits, launches = count(recordings)
    return {
        "waits_per_frame": round(waits / num_frames, 2),
        "launches_per_frame": round(launches / num_frames, 1),
    }


def _slope(bundle: Bundle, name: str) -> dict[str, float]:
    """The cost of each further frame and recording, and the fixed cost of a call; the buffers are large enough."""
    with _recognizing(bundle, name, {**_BEAMS, "search_beam": _NARROW_BEAM}) as count:
        count(_NUM_TOGETHER * [_of_length(_SHORT)])
        if "one_pass" in name:
            count([_of_length(_LONG)])  # the language model learns the histories
        of_long, of_short = (count([_of_length(num)]) for num in (_LONG, _SHORT))
        of_several = count(_NUM_TOGETHER * [_of_length(_SHORT)])
    more = of_long[0] - of_short[0]
    waits, launches = ((of_long[kind] - of_short[kind]) / more for kind in (1, 2))
    return {
        "waits_per_frame": round(waits, 3),
        "waits_per_call": of_short[1] - math.ceil(waits * of_short[0]),
        "waits_per_utterance": (of_several[1] - of_short[1]) / (_NUM_TOGETHER - 1),
        "launches_per_frame": round(launches, 1),
        "launches_per_call": of_short[2] - math.ceil(launches * of_short[0]),
        "launches_per_utterance": (of_several[2] - of_short[2]) / (_NUM_TOGETHER - 1),
    }


def _of_length(num_samples: int) -> Tensor:
    """A word and then silence, with this total length."""
    word = tones(["PAT"])
    quiet = 0.003 * torch.randn(num_samples - len(word), generator=torch.Generator().manual_seed(0))
    return torch.cat([word, quiet])


@contextmanager
def _recognizing(
    bundle: Bundle, name: str, beams: dict[str, Any]
) -> Iterator[Callable[[list[Tensor]], tuple[int, int, int]]]:
    """Recordings -> frames of the longest, waits and launches of the call, on a simulated device."""
    mode, lm_fusion, keep_lattices = _CASES[name]
    with simulated_gpu() as device, mock.patch.object(gpu_frame, "FIRST_CAPACITY", _CAPACITY):
        asked: Any = {"lm_fusion": lm_fusion, "keep_lattices": keep_lattices, "options": beams}
        recognizer = Recognizer(bundle, mode, decoder="token-passing", **asked).to("cuda")
        recognizer.calibration = _CALIBRATION if keep_lattices else None
        recognizer.prepare()
        frames: list[int] = []
        advance = TokenSearch.advance

        def counted(self: TokenSearch, stream: Tensor, log_prob: Tensor, num_frames: Tensor) -> None:
            frames.append(log_prob.shape[1])
            advance(self, stream, log_prob, num_frames)

        def count(recordings: list[Tensor]) -> tuple[int, int, int]:
            frames.clear()
            device.clear_counts()
            results = recognizer(recordings, RATE)
            assert not keep_lattices or all(word.confidence is not None for one in results for word in one.words)
            return max(frames), device.waits.total(), device.num_launches

        with torch.no_grad(), mock.patch.object(TokenSearch, "advance", counted):
            yield count


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
    """CPU milliseconds for everything except acoustic model and search frames: checks, batches, results."""
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
