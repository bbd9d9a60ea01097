"""For `scripts/gpu_check`: k2 compared with this project's decoder on the same frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.decoding.build import recognition_settings
from asr.decoding.interface import DecodeResult
from asr.decoding.token_passing import TokenPassingDecoder
from asr.recognizer import Recognizer
from asr.results import StageTimes
from scripts.benchmarks.clock import waiting_clock

# The two prune differently, so that now and then one of them loses a path that the other one keeps.
_MOST_OTHERS = 0.1


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
