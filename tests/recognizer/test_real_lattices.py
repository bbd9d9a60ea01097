"""Lattices of the final search on real speech: chunks by compiled loops against one frame at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from asr.audio.io import read_audio
from asr.bundle import Bundle
from asr.decoding.backend import Searchable
from asr.decoding.chunk_backend import ChunkBackend
from asr.decoding.cpu.frame import NumbaFrameBackend
from asr.decoding.frame import FrameSearch
from asr.decoding.lattice import Lattice
from asr.decoding.mbr import PathPosteriors
from asr.decoding.rescoring import rescore_lattice
from asr.decoding.selection import select_backend
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.lm.interface import LanguageModel
from asr.recognizer import Recognizer
from asr.results import StageTimes

pytestmark = [pytest.mark.slow, pytest.mark.corpus]

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
_SPEECH = {
    "librispeech": ("librispeech/LibriSpeech/dev-clean-2", ("1272-128104-0002.*", "2035-147961-0003.*")),
    "an4": ("an4/wav", ("cen3-fcaw-b.*", "cen3-mdms2-b.*")),
}


def _recordings(corpora: Path, name: str) -> list[Path]:
    folder, patterns = corpora / _SPEECH[name][0], _SPEECH[name][1]
    found = [path for pattern in patterns for path in sorted(folder.rglob(pattern))]
    if len(found) < len(patterns):
        pytest.skip(f"these recordings of {folder} are missing: {patterns}")
    return found


def _frame_by_frame(graph: Searchable, options: DecodingOptions, lm: LanguageModel | None, _: bool) -> ChunkBackend:
    return FrameSearch(graph, options, lm, NumbaFrameBackend(graph, options, lm is not None))


@pytest.mark.parametrize("mode", ["auto", "large_ngram"])
@pytest.mark.parametrize("name", sorted(_SPEECH))
def test_chunks_give_the_lattices_of_single_frames(name: str, mode: str, corpora: Path) -> None:
    pytest.importorskip("numba")
    bundle = Bundle.load(CHECKPOINTS / name)
    if mode == "large_ngram" and bundle.large_ngram is None:
        pytest.skip("this bundle has no large n-gram model")
    recognizer = Recognizer(bundle, mode, decoder="token-passing")
    options = recognizer.options
    speech = [read_audio(path, recognizer.sampling_rate) for path in _recordings(corpora, name)]
    with torch.no_grad():
        log_prob, num_frames = recognizer.log_prob(speech, StageTimes())
    decoder = TokenPassingDecoder(bundle.graph, options)
    first = decoder.search(log_prob, num_frames, keep_lattice=True)
    assert first.lattice is not None
    found = []
    for make_backend in (_frame_by_frame, select_backend):
        # Caches of their own: what one search has asked must not change how the other one's queries are batched.
        lm = recognizer.build_language_models(1 << 28).model
        assert lm is not None
        found.append(rescore_lattice(first.lattice, options, lm, True, make_backend=make_backend))
    for expected, path in zip(*found, strict=True):
        assert expected is not None and path is not None and torch.equal(expected.graph_arc, path.graph_arc)
        assert path.total == pytest.approx(expected.total, abs=1e-3)
        assert expected.lattice is not None and path.lattice is not None
        if mode == "large_ngram":
            _assert_equal(expected.lattice, path.lattice)
        hypothesis = path.hypothesis(bundle.graph, options, None)
        assert len(hypothesis.words) >= 2
        before, after = (
            PathPosteriors(one, options).of_hypothesis(1.0, hypothesis) for one in (expected.lattice, path.lattice)
        )
        assert after == pytest.approx(before, abs=1e-3)


def _assert_equal(one: Lattice, other: Lattice) -> None:
    differing: Sequence[str] = [
        field.name for field in fields(one) if not torch.equal(getattr(one, field.name), getattr(other, field.name))
    ]
    assert not differing
