"""What the tests of the CTC decoder share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asr.lm.ngram.model import NgramLM


@pytest.fixture
def frames_of() -> Callable[..., torch.Tensor]:
    """Log-probabilities of a network that reads a text letter by letter, with blanks between, more or less surely."""

    def build(symbols: list[str], tokens: list[str], strength: float = 6.0, noise: float = 1.0, seed: int = 0):  # type: ignore[no-untyped-def]
        generator = torch.Generator().manual_seed(seed)
        columns = [column for symbol in tokens for column in (symbols.index(symbol), 0)]
        logits = noise * torch.randn((len(columns), len(symbols)), generator=generator)
        logits[torch.arange(len(columns)), torch.tensor(columns)] += strength
        return logits.log_softmax(1)

    return build


@pytest.fixture
def forget_graphs() -> Callable[[], None]:
    """Lets the process forget the graphs that it has compiled, in favor of others."""
    from asr.ctc import CTCDecoder

    def forget() -> None:
        for words in (["a"], ["b"], ["ab"], ["a", "b"]):
            CTCDecoder(["<blk>", "a", "b"], words=words, warm_up=False)

    return forget


@pytest.fixture
def arpa_file(tmp_path: Path) -> Callable[[NgramLM], Path]:
    """Writes a model as ARPA text."""
    from asr.ctc.word_models import trie_of
    from asr.lm.ngram.arpa import write_arpa

    def write(model: NgramLM) -> Path:
        path = tmp_path / "model.arpa"
        write_arpa(trie_of(model), path)
        return path

    return write
