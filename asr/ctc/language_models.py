"""Language models for CTC search: loading them, and lending each to one search at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from asr.bundle import read_rnn_lm
from asr.ctc.kenlm import KenLanguageModel
from asr.ctc.word_models import is_kenlm_binary, read_ngram
from asr.errors import AsrError
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.interface import LanguageModel
from asr.lm.ngram.io import MAGIC
from asr.lm.ngram.model import NgramLM

_CACHE_BYTES = 1 << 30


class LentModels:
    """A pool of language models, each lent to one search at a time, so that several threads may decode.

    Args:
        make: makes a model; None for no language model.
        is_shared: whether `make` always returns the same model; searches then take turns.
    """

    def __init__(self, make: Callable[[], LanguageModel] | None, is_shared: bool) -> None:
        self._make = make
        self._lock = threading.Lock() if is_shared else None
        self._idle: list[LanguageModel] = []

    @contextmanager
    def lent(self) -> Iterator[LanguageModel | None]:
        """Lends a model until the block ends; None if there is no language model."""
        if self._make is None:
            yield None
            return
        if self._lock is not None:
            with self._lock:
                self._idle = self._idle or [self._make()]
                yield self._idle[0]
            return
        try:
            model = self._idle.pop()
        except IndexError:  # all models are lent
            model = self._make()
        try:
            yield model
        finally:
            self._idle.append(model)

    def for_good(self) -> LanguageModel | None:
        """A model that is never returned, for a stream; the common one if models are shared."""
        if self._make is None:
            return None
        if self._lock is not None:
            self._idle = self._idle or [self._make()]
            return self._idle[0]
        return self._make()


def is_ngram_file(path: str | Path) -> bool:
    """Whether a path is an n-gram file: ARPA text, our binary or KenLM's."""
    if Path(path).is_dir():
        return False
    if is_kenlm_binary(path):
        return True
    with Path(path).open("rb") as stream:
        begin = stream.read(1 << 16)
    return begin.startswith(MAGIC) or b"\\data\\" in begin or Path(path).suffix in (".arpa", ".gz", ".xz")


def model_maker(source: Any, words: Sequence[str]) -> tuple[Callable[[], LanguageModel], bool]:
    """Returns a function that makes the language model, and whether it always returns the same one.

    Raises:
        AsrError: the source is not a language model.
    """
    if isinstance(source, (str, Path)):
        if not Path(source).exists():
            raise AsrError(f"{source}: there is no such language model.")
        if not is_ngram_file(source):
            source = read_rnn_lm(source).network
        elif is_kenlm_binary(source):
            ken = KenLanguageModel(source, words)
            return lambda: ken, True
        else:
            source = read_ngram(source)
    if isinstance(source, NgramLM):
        return lambda: source, False
    if isinstance(source, nn.Module) and hasattr(source, "initial_state"):
        network: Any = source.eval()
        # Histories are kept between utterances; when the cache is full, the least used ones are evicted.
        options = CacheOptions(capacity_bytes=_CACHE_BYTES, hidden_products="int8")
        return lambda: CachedRNNLM(network, options), False
    if isinstance(source, LanguageModel):
        return lambda: source, True
    raise AsrError(
        f"{type(source).__name__} is not a language model; give a file or folder, a network of this program, or an "
        "object with vocabulary, start, score and final."
    )
