"""For `scripts/gpu_check`: k2 and flashlight-text compared with this project's decoders on the same frames."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.ctc import CTCDecoder
from asr.ctc.word_models import trie_of
from asr.decoding.build import recognition_settings
from asr.decoding.interface import DecodeResult
from asr.decoding.token_passing import TokenPassingDecoder
from asr.lm.ngram.arpa import write_arpa
from asr.recognizer import Recognizer
from asr.results import StageTimes

# The two prune differently, so that now and then one of them loses a path that the other one keeps.
_MOST_OTHERS = 0.1
_ENDURED = 0.02
_SCALE = 2.0


def seconds_of(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What some work gives the second time, and the seconds that it took; the first time compiles and makes room."""
    work()
    synchronize(device)
    begin = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Waits for a GPU's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    results: list[list[DecodeResult]] = []
    for name, decoder in (("token_passing", TokenPassingDecoder(graph, options)), ("k2", K2Decoder(graph, options))):
        own, seconds = seconds_of(lambda one=decoder: one.decode(log_prob, num_frames), device)  # type: ignore[misc]
        found[f"search_times_real_time_{name}"] = round(audio / seconds, 1)
        results.append(own)
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


def beside_flashlight(folder: Path, device: torch.device, num_utts: int) -> dict[str, Any]:
    """Our CTC decoder on the device and flashlight-text's on a CPU: simulated letters, one n-gram, one by one.

    Raises:
        ImportError: flashlight-text is not installed.
    """
    # k2 does without what these need.
    from asr.metrics import NO_ERRORS, count_errors
    from scripts.benchmarks.ctc_workload import simulated
    from scripts.benchmarks.peers import ctc as peers

    ngram = Bundle.load(folder).small_ngram
    chance, words = random.Random(0), [word for word in ngram.vocabulary.words if word.isalpha() and word.isupper()]
    workload = simulated("letters", [chance.choices(words, k=6) for _ in range(num_utts)], words)
    spelled = {word: workload.tokens.spell(word) for word in words}
    with tempfile.TemporaryDirectory() as name:
        arpa = Path(name) / "small.arpa"
        write_arpa(trie_of(ngram), arpa)
        theirs = peers.flashlight(workload.tokens, spelled, arpa, _SCALE, 0.0)(60)
        decoder = CTCDecoder(
            workload.tokens, words=words, ngram=ngram, lm_scale=_SCALE, graph_folder=name, device=device, warm_up=False
        )

        def ours(log_prob: Tensor) -> list[str]:
            (best,) = decoder(log_prob)
            return str(best.text).split()  # type: ignore[union-attr]

        found: dict[str, Any] = {}
        for system, decode in (("ours", ours), ("flashlight", theirs)):
            counts, seconds = NO_ERRORS, []
            for log_prob, reference in zip(workload.frames, workload.references, strict=True):
                text, spent = seconds_of(lambda one=decode, rows=log_prob: one(rows), device)  # type: ignore[misc]
                counts += count_errors(reference, tuple(text))
                seconds.append(spent / len(log_prob))
            found[f"ms_per_frame_{system}"] = round(1e3 * statistics.median(seconds), 4)
            found[f"wer_{system}"] = round(100.0 * counts.rate, 2)
    if found["wer_ours"] > found["wer_flashlight"] + 100.0 * _ENDURED:
        found["wrong"] = "our word error rate is higher than flashlight-text's"
    return found
