"""Settings of the whole test suite: few threads, Hypothesis profiles, and where corpora may lie."""

from __future__ import annotations

import atexit
import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Triton's kernels run in its interpreter; it wants to know before anybody imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")
# torch reads it when it is imported; the process that hands out the tests does without torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from asr.bundle import Bundle
    from asr.lm.ngram.model import NgramLM

settings.register_profile("dev", deadline=None, max_examples=25)
# CI must not fail by chance: the same examples every time, and no time limit on a busy machine.
settings.register_profile(
    "ci", deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_finish() -> None:
    """Spares every test what grows with the number of imported modules.

    Collected garbage is looked for among new objects only. pytest hangs its handlers into each logger that does not
    propagate, six times a test, and torch has fifty of them.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries count what is left when Python ends
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder that holds `an4/`, `librispeech/` and the like; tests that ask for it are skipped without one."""
    checkout = Path(__file__).resolve().parents[1]
    candidates = [os.environ.get("ASR_CORPORA"), checkout / "shared" / "data", checkout.parent / "shared" / "data"]
    for candidate in candidates:
        if candidate and Path(candidate).is_dir():
            return Path(candidate)
    pytest.skip("no corpora: set ASR_CORPORA to the folder that holds an4/ and librispeech/")


@pytest.fixture(scope="session")
def tiny_bundle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved bundle that recognizes the words of `asr.testing.tones`."""
    pytest.importorskip("kaldifst", reason="compiling the graph needs kaldifst")
    from asr.testing.tones import tiny_bundle

    folder = tmp_path_factory.mktemp("bundle")
    tiny_bundle(folder).save(folder / "tones", half_precision=False)
    return folder / "tones"


@pytest.fixture(scope="session")
def librispeech() -> Bundle:
    """The shipped bundle, whose loading takes seconds; tests must not change it."""
    from asr.bundle import Bundle

    return Bundle.load(Path(__file__).resolve().parents[1] / "checkpoints" / "librispeech")


@pytest.fixture
def ngram_of() -> Callable[..., NgramLM]:
    """Estimates a model of sentences."""
    import numpy as np

    from asr.lm.corpus import WordStream
    from asr.lm.ngram.estimate import estimate_kneser_ney
    from asr.lm.ngram.model import NgramLM
    from asr.text.symbols import BOS_ID, EOS_ID, Vocabulary

    def build(sentences: list[str], words: list[str], order: int = 2) -> NgramLM:
        vocabulary = Vocabulary(words)
        stream = [
            word_id
            for sentence in sentences
            for word_id in (BOS_ID, *vocabulary.ids_of(sentence.split()).tolist(), EOS_ID)
        ]
        counted = WordStream(np.array(stream, dtype=np.int32), vocabulary, len(vocabulary))
        return NgramLM.from_trie(estimate_kneser_ney(counted, order, keep_unseen=True).trie)

    return build


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of torch's threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
