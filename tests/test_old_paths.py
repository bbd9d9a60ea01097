"""Import paths of earlier versions work, with a hint."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

from asr.old_paths import MOVED

# A name of each old module that user code is likely to import.
NAMES = {
    "asr.decoding.confidence": "Calibration",
    "asr.decoding.log_probs": "skip_blanks",
    "asr.decoding.paths": "WordAligner",
    "asr.decoding.search_graph": "Searchable",
    "asr.decoding.token_search": "TokenSearch",
    "asr.decoding.tokens": "ActiveTokens",
    "asr.kernels.autograd": "no_autograd",
    "asr.kernels.heap": "release",
    "asr.kernels.threads": "in_threads",
    "asr.kernels.transfers": "to_device",
    "asr.lm.cached.statistics": "QueryStatistics",
    "asr.lm.moved": "MovedLM",
    "asr.models.chain_network": "ChainNetwork",
    "asr.models.ensemble": "Ensemble",
    "asr.models.layers": "FrameNorm",
}


@pytest.mark.parametrize("old", MOVED)
def test_old_paths_lead_to_the_same_objects(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=re.escape(f"{old} is now {MOVED[old][0]}")):
        module = importlib.import_module(old)
    found = [getattr(importlib.import_module(new), NAMES[old], None) for new in MOVED[old]]
    assert getattr(module, NAMES[old]) in found


def test_unknown_modules_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module("asr.decoding.nothing")


def test_the_old_class_of_backends_is_explained() -> None:
    with pytest.raises(ImportError, match="Backend is gone: a search takes one ChunkBackend"):
        from asr.decoding.backend import Backend  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from asr.decoding.backend import Nothing  # type: ignore[attr-defined]  # noqa: F401


def test_names_that_moved_out_of_the_module_of_lattices() -> None:
    from asr.decoding import lattice, lattice_records

    for name in ("LatticeRecords", "collects_on", "lattice_margin"):
        with pytest.warns(FutureWarning, match=f"lattice.{name} is now in asr.decoding.lattice_records"):
            assert getattr(lattice, name) is getattr(lattice_records, name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        lattice.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_the_modules_of_audio_and_lattice_files_offer_what_moved_out_of_them() -> None:
    from asr.audio import io, pcm
    from asr.decoding import lattice_io, lattice_links, slf

    assert all(getattr(io, name) is getattr(pcm, name) for name in ("RAW_FORMATS", "PcmFormat", "byte_pieces"))
    of_slf = ("NO_WORD", "log_of_base", "read_slf", "require_whole", "slf_fields", "write_slf")
    assert all(getattr(lattice_io, name) is getattr(slf, name) for name in of_slf)
    of_links = ("NO_ARC", "NO_TOKEN", "LatticeLinks", "Link", "lattice_from_links", "links_of")
    assert all(getattr(lattice_io, name) is getattr(lattice_links, name) for name in of_links)
