"""Import paths of earlier versions, of modules and of single names; they work for one release, with a hint."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any


def _names(old: str, new: str, names: str) -> dict[str, tuple[str, ...]]:
    return {f"{old}.{name}": (new,) for name in names.split()}


MOVED = {
    "asr.attention.alignment": ("asr.attention.decoder",),
    "asr.attention.interface": ("asr.attention.search",),
    "asr.audio.decoder_messages": ("asr.audio.codecs",),
    "asr.audio.media": ("asr.audio.codecs",),
    "asr.decoding.confidence": ("asr.decoding.words",),
    "asr.decoding.lattice_io": (
        "asr.decoding.kaldi_lattice",
        "asr.decoding.k2_lattice",
        "asr.decoding.slf",
        "asr.decoding.lattice_links",
    ),
    "asr.decoding.log_probs": ("asr.decoding.interface",),
    "asr.decoding.paths": ("asr.decoding.backtrace", "asr.decoding.nbest", "asr.decoding.words"),
    "asr.decoding.search_graph": ("asr.decoding.backend",),
    "asr.decoding.token_search": ("asr.decoding.frame",),
    "asr.decoding.tokens": ("asr.decoding.backend",),
    "asr.decoding.word_lattice_io": ("asr.decoding.slf", "asr.decoding.k2_lattice", "asr.decoding.kaldi_lattice"),
    "asr.graph.sentences": ("asr.graph.context",),
    "asr.graph.shared_exits": ("asr.graph.topology",),
    "asr.kernels.autograd": ("asr.kernels.memory",),
    "asr.kernels.byte_layers": ("asr.kernels.byte_products",),
    "asr.kernels.heap": ("asr.kernels.memory",),
    "asr.kernels.threads": ("asr.kernels.jit", "asr.lm.evaluate"),
    "asr.kernels.transfers": ("asr.kernels.memory",),
    "asr.lm.cached.projections": ("asr.lm.cached.outputs",),
    "asr.lm.cached.statistics": ("asr.lm.cached.states",),
    "asr.lm.moved": ("asr.lm.combine",),
    "asr.models.chain_network": ("asr.models.tdnnf",),
    "asr.models.ensemble": ("asr.models.tdnnf",),
    "asr.models.export_streaming": ("asr.models.export",),
    "asr.models.hybrid_alignment": ("asr.models.phone_alignment",),
    "asr.models.layers": ("asr.models.interface", "asr.models.tdnnf", "asr.kernels.linear", "asr.distributed"),
    "asr.transducer.interface": ("asr.transducer.search",),
    **_names("asr.audio.io", "asr.audio.pcm", "RAW_FORMATS PcmFormat byte_pieces"),
    **_names("asr.audio.resample", "asr.audio.fbank", "FeatureStream"),
    **_names("asr.audio.segments", "asr.audio.samples", "as_samples to_mono"),
    **_names("asr.decoding.backend", "asr.decoding.chunk_backend", "Chunk ChunkBackend SearchSink"),
    **_names("asr.decoding.interface", "asr.decoding.settings", "DecodingOptions"),
    **_names("asr.decoding.lattice", "asr.decoding.lattice_records", "LatticeRecords collects_on lattice_margin"),
    **_names(
        "asr.kernels.simd", "asr.lm.rnn.outputs.log_partition", "MAX_TERM TILE add_features ask_for_features in_tiles"
    ),
    **_names("asr.lm.combine", "asr.lm.checks", "CheckedLM"),
    **_names("asr.lm.interface", "asr.lm.checks", "require_language_model"),
    **_names("asr.lm.rnn.output_numba", "asr.lm.rnn.maxent", "add_gathered add_slices"),
}
"""Old module -> the modules that its names are in now; or a name of a module that calls `offer` -> its module now."""

GONE = {
    "asr.decoding.backend.Backend": "a search takes one ChunkBackend, and asr.decoding.frame.FrameSearch makes one of "
    "a FrameBackend; see docs/adding.md",
    "asr.decoding.lattice.arc_posteriors": "asr.decoding.mbr.PartPosteriors has the posteriors of arcs at a scale",
}
"""A name without a successor, of a module that calls `offer` -> what to use instead."""


def _warn(old: str, now: Sequence[str]) -> None:
    warnings.warn(f"{old} is now {' and '.join(now)}; the old path will go.", FutureWarning, stacklevel=3)


class _OldPaths(MetaPathFinder, Loader):
    """Finds modules by their old names; asked last, so that modules that exist are not affected."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        now = MOVED[module.__name__]
        _warn(module.__name__, now)
        for name in now:
            found = vars(importlib.import_module(name)).items()
            vars(module).update({key: value for key, value in found if not key.startswith("__")})


def install() -> None:
    """Lets Python find modules by their old names."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        sys.meta_path.append(_OldPaths())


def offer(module: str) -> None:
    """Lets a module, which calls this with its `__name__`, give the names that were once in it."""
    vars(sys.modules[module])["__getattr__"] = partial(_name_of, module)


def _name_of(module: str, name: str) -> Any:
    old = f"{module}.{name}"
    if old in GONE:
        raise ImportError(f"{old} is gone: {GONE[old]}.")
    if old not in MOVED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    (now,) = MOVED[old]
    _warn(old, [f"{now}.{name}"])
    return getattr(importlib.import_module(now), name)
