"""Import paths of earlier versions, which work for one release: importing one gives a hint."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

MOVED = {
    "asr.decoding.confidence": ("asr.decoding.words",),
    "asr.decoding.log_probs": ("asr.decoding.interface",),
    "asr.decoding.paths": ("asr.decoding.backtrace", "asr.decoding.nbest", "asr.decoding.words"),
    "asr.decoding.search_graph": ("asr.decoding.backend",),
    "asr.decoding.token_search": ("asr.decoding.frame",),
    "asr.decoding.tokens": ("asr.decoding.backend",),
    "asr.kernels.autograd": ("asr.kernels.memory",),
    "asr.kernels.heap": ("asr.kernels.memory",),
    "asr.kernels.threads": ("asr.kernels.jit", "asr.lm.evaluate"),
    "asr.kernels.transfers": ("asr.kernels.memory",),
    "asr.lm.cached.statistics": ("asr.lm.cached.states",),
    "asr.lm.moved": ("asr.lm.combine",),
    "asr.models.chain_network": ("asr.models.tdnnf",),
    "asr.models.ensemble": ("asr.models.tdnnf",),
    "asr.models.layers": ("asr.models.interface", "asr.models.tdnnf", "asr.kernels.linear", "asr.distributed"),
}
"""Old module -> the modules that its names are in now."""


class _OldPaths(MetaPathFinder, Loader):
    """Finds modules by their old names; asked last, so that modules that exist are not affected."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        now = MOVED[module.__name__]
        warnings.warn(
            f"{module.__name__} is now {' and '.join(now)}; the old path will go.", FutureWarning, stacklevel=2
        )
        for name in now:
            found = vars(importlib.import_module(name)).items()
            vars(module).update({key: value for key, value in found if not key.startswith("__")})


def install() -> None:
    """Lets Python find modules by their old names."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        sys.meta_path.append(_OldPaths())
