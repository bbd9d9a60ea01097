"""Import paths of earlier versions work, with a hint."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from asr.old_paths import GONE, MOVED

ROOT = Path(__file__).resolve().parents[1]
OFFERING = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "asr").rglob("*.py")
    if "\nold_paths.offer(__name__)\n" in path.read_text("utf-8")
)

# A name of each old module that user code is likely to import.
NAMES = {
    "asr.attention.alignment": "token_spans",
    "asr.attention.interface": "AttentionDecodingConfig",
    "asr.audio.decoder_messages": "kept_complaints",
    "asr.audio.media": "container_of",
    "asr.decoding.confidence": "Calibration",
    "asr.decoding.lattice_io": "read_kaldi_lattices",
    "asr.decoding.log_probs": "skip_blanks",
    "asr.decoding.paths": "WordAligner",
    "asr.decoding.search_graph": "Searchable",
    "asr.decoding.token_search": "TokenSearch",
    "asr.decoding.tokens": "ActiveTokens",
    "asr.decoding.word_lattice_io": "read_word_ids",
    "asr.graph.sentences": "SILENCE",
    "asr.graph.shared_exits": "SharedExits",
    "asr.kernels.autograd": "no_autograd",
    "asr.kernels.byte_layers": "Int8Layers",
    "asr.kernels.heap": "release",
    "asr.kernels.threads": "in_threads",
    "asr.kernels.transfers": "to_device",
    "asr.lm.cached.projections": "ProjectionCache",
    "asr.lm.cached.statistics": "QueryStatistics",
    "asr.lm.moved": "MovedLM",
    "asr.models.chain_network": "ChainNetwork",
    "asr.models.ensemble": "Ensemble",
    "asr.models.export_streaming": "StreamChunks",
    "asr.models.hybrid_alignment": "align_with_bundle",
    "asr.models.layers": "FrameNorm",
    "asr.transducer.interface": "TransducerDecodingConfig",
}


MOVED_NAMES = [old for old in MOVED if old not in NAMES]


def test_every_old_module_has_a_name_to_try() -> None:
    assert NAMES.keys() <= MOVED.keys()
    assert all(old.rpartition(".")[0] in OFFERING for old in [*MOVED_NAMES, *GONE])


@pytest.mark.parametrize("old", NAMES)
def test_old_paths_lead_to_the_same_objects(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=re.escape(f"{old} is now {MOVED[old][0]}")):
        module = importlib.import_module(old)
    found = [getattr(importlib.import_module(new), NAMES[old], None) for new in MOVED[old]]
    assert getattr(module, NAMES[old]) in found


@pytest.mark.parametrize("old", MOVED_NAMES)
def test_old_names_lead_to_the_same_objects(old: str) -> None:
    (new,), (module, _, name) = MOVED[old], old.rpartition(".")
    found: dict[str, object] = {}
    with pytest.warns(FutureWarning, match=re.escape(f"{old} is now {new}.{name}; the old path will go.")) as hints:
        exec(f"from {module} import {name}", found)
    assert found[name] is getattr(importlib.import_module(new), name)
    assert [hint.filename for hint in hints] == ["<string>"], "one hint, at the line that imports"


def test_unknown_modules_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module("asr.decoding.nothing")


@pytest.mark.parametrize("module", OFFERING)
def test_names_that_never_were_are_not_found(module: str) -> None:
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec(f"from {module} import Nothing")
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Nothing'"):
        importlib.import_module(module).Nothing  # noqa: B018


def test_the_old_class_of_backends_is_explained() -> None:
    with pytest.raises(ImportError, match="Backend is gone: a search takes one ChunkBackend"):
        from asr.decoding.backend import Backend  # type: ignore[attr-defined]  # noqa: F401
