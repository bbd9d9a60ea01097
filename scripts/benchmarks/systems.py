"""The systems that benchmarks compare: modes, passes and beams; and a run of one over some speech.

Times are CPU seconds of search and language model in this process, one thread, cold caches, compiled loops.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr.audio.segments import batches_of_similar_length
from asr.bundle import Bundle
from asr.decoding.build import build_decoder, recognition_settings
from asr.decoding.interface import DecodeResult
from asr.decoding.rescoring import second_pass
from asr.decoding.settings import NEEDS, Pass, Settings, setting_options
from asr.lm.cached.states import QueryStatistics
from asr.lm.transformers import TransformerNetwork
from asr.metrics import bootstrap_interval
from asr.recognizer import Recognizer
from scripts.benchmarks.decode_workload import Workload, errors

BATCH_SECONDS = 100.0
_CACHE_BYTES = 1 << 30


class System(NamedTuple):
    """A mode, and where its language model is applied; the mode `auto` is the bundle's default."""

    mode: str
    lm_fusion: str = "lattice"
    second_pass: str = "none"
    second_mode: str = "rnn"
    second_weight: float = 1.0
    skip_beam: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Second pass and skip beam, as options of a recognizer."""
        skip = {} if self.skip_beam is None else {"skip_beam": self.skip_beam}
        if self.second_pass == "none":
            return skip
        names = ("second_pass", "second_pass_mode", "second_pass_weight")
        return {**skip, **dict(zip(names, (self.second_pass, self.second_mode, self.second_weight), strict=True))}


SYSTEMS = {
    "trigram": System("ngram"),
    "4-gram": System("large_ngram"),
    "gru": System("rnn"),
    "gru and 4-gram": System("interpolated"),
    "gru, chunks": System("rnn", "chunks"),
    "gru, one pass": System("rnn", "search"),
    "gru and 4-gram, one pass": System("interpolated", "search"),
    "gru, one pass, no skip beam": System("rnn", "search", skip_beam=math.inf),
}

SECOND_PASSES = {
    "trigram, then gru over the lattice": System("ngram", "lattice", "lattice"),
    "trigram, then gru over 1000 sentences": System("ngram", "lattice", "nbest"),
    "trigram, then 4-gram over 1000 sentences": System("ngram", "lattice", "nbest", "large_ngram"),
    "4-gram, then gru over the lattice": System("large_ngram", "lattice", "lattice"),
    "4-gram, hybrid with gru over the lattice": System("large_ngram", "lattice", "lattice", "rnn", 0.7),
    "4-gram, hybrid with gru over 1000 sentences": System("large_ngram", "lattice", "nbest", "rnn", 0.7),
}


class Beams(NamedTuple):
    """What all systems share; the last two only matter where a lattice is rescored."""

    search_beam: float
    max_active_states: int
    output_beam: float
    context_beam: float

    def __str__(self) -> str:
        return f"{self.search_beam:g} / {self.max_active_states} / {self.output_beam:g} / {self.context_beam:g}"


# From narrow to wide.
BEAMS = (
    Beams(8.0, 500, 3.0, 3.0),
    Beams(10.0, 1000, 4.0, 4.0),
    Beams(11.0, 1000, 5.0, 5.0),
    Beams(12.0, 1500, 6.0, 5.0),
    Beams(13.0, 2000, 6.0, 6.0),
    Beams(14.0, 3000, 7.0, 8.0),
    Beams(16.0, 7000, 9.0, 10.0),
)


@dataclass(frozen=True)
class Run:
    """One system with some beams.

    Args:
        wer: word error rate, in %.
        interval: its 95 % bootstrap interval.
        seconds: CPU seconds of search and language model.
        counts: of the recurrent model's engine, if there is one.
    """

    wer: float
    interval: tuple[float, float]
    seconds: float
    counts: QueryStatistics | None


def batches_of(rows: Sequence[Tensor], longest: float) -> list[list[int]]:
    """Which rows a recognizer takes together: those of similar length, up to so much with padding."""
    return [list(batch) for batch in batches_of_similar_length([len(row) for row in rows], int(longest))]


def options_of(bundle: Bundle, system: System, beams: Beams | None) -> dict[str, Any]:
    """The beams that apply to the system, and the acoustic scale of the mode `rnn`.

    Beams are as wide as each other only with equal scales.
    """
    if beams is None:
        return {}
    shared = {
        "am_scale": recognition_settings(bundle, "rnn", {}).decoding.am_scale,
        "search_beam": beams.search_beam,
        "max_active_states": beams.max_active_states,
    }
    if system.second_pass == "none" and (system.mode == "ngram" or system.lm_fusion == "search"):
        return shared
    if system.mode == "ngram" and system.second_pass == "nbest":
        return {**shared, "output_beam": beams.output_beam}
    # Over a lattice the context beam is what prunes; a bundle's skip beam is for one pass.
    return {**shared, "output_beam": beams.output_beam, "context_beam": beams.context_beam, "skip_beam": math.inf}


def run(
    bundle: Bundle,
    workload: Workload,
    system: System,
    beams: Beams | None = None,
    more: Mapping[str, Any] | None = None,
    batch_seconds: float = BATCH_SECONDS,
    caches: Mapping[str, Any] | None = None,
) -> Run:
    """Decodes with cold caches.

    Args:
        bundle: its language models and, unless others are given, its options.
        workload: what to decode.
        system: modes and passes.
        beams: the same for all systems; None for the bundle's own beams and scales.
        more: other decoding options; the system gets those that have an effect in it.
        batch_seconds: how much speech is decoded together, with padding.
        caches: changes to the recurrent model's `CacheOptions`.
    """
    options = {**options_of(bundle, system, beams), **_in_effect(more or {}, system), **system.options}
    recognizer = Recognizer(bundle, system.mode, decoder="token-passing", lm_fusion=system.lm_fusion, options=options)
    settings = recognizer.settings
    # Past the recognizer's refusal: nothing is built from them yet, and users have no options for some.
    vars(recognizer)["settings"] = replace(settings, cache=replace(settings.cache, **(caches or {})))
    has_second = system.second_pass != "none"
    decoder = build_decoder("token-passing", system.lm_fusion, bundle.graph, recognizer.options, has_second)
    how = (bundle.graph, recognizer.final_options, settings.language_models)
    models = recognizer.build_language_models(_CACHE_BYTES)
    network = None if bundle.rnn_lm is None else bundle.rnn_lm.network
    if isinstance(network, TransformerNetwork):
        network.forget()
    found: dict[int, DecodeResult] = {}
    frames = workload.frames
    begin = time.process_time()
    for batch in batches_of(frames, batch_seconds * workload.num_frames / workload.seconds):
        padded = torch.nn.utils.rnn.pad_sequence([frames[i] for i in batch], batch_first=True)
        results = decoder.decode(padded, torch.tensor([len(frames[i]) for i in batch]), models.model)
        if models.second is not None:
            results = second_pass(results, models.model, models.second.model, *how, keeps_lattice=False)
        found.update(zip(batch, results, strict=True))
        models.forget_contexts()
    seconds = time.process_time() - begin
    counts = errors(workload, [found[i].best for i in range(len(frames))])
    low, high = bootstrap_interval(counts)
    return Run(
        100.0 * sum(counts[1:], counts[0]).rate,
        (100.0 * low, 100.0 * high),
        seconds,
        models.statistics(),
    )


def _in_effect(options: Mapping[str, Any], system: System) -> dict[str, Any]:
    own = Pass(system.mode, system.lm_fusion, *Settings.of(system.options).models)
    needs = {name: one.needs for name, one in setting_options().items()}
    # An unknown option stays, so that the recognizer refuses it.
    return {name: value for name, value in options.items() if not needs.get(name) or NEEDS[needs[name]][1](own)}


def warm_up(bundle: Bundle, workload: Workload, systems: Sequence[System]) -> None:
    """Compiles what the systems need, on the shortest utterance."""
    frames, references = min(zip(workload.frames, workload.references, strict=True), key=lambda pair: len(pair[0]))
    seconds = workload.seconds * len(frames) / workload.num_frames
    for system in systems:
        run(bundle, Workload(workload.name, [frames], [references], seconds), system, BEAMS[0])
