"""A large n-gram model on the fly against the graph that was compiled from it: the same best path and score."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path

import pytest
import torch

from asr.decoding.interface import Decoder
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.graph.build import build_graph
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.combine import Difference
from asr.lm.ngram.arpa import LN_10
from asr.lm.ngram.model import NgramLM
from asr.text.lexicon import Lexicon
from asr.text.symbols import TokenTable

pytest.importorskip("kaldifst", reason="kaldifst is not installed", exc_type=ImportError)

PRONUNCIATIONS = {"A": [("P", "T")], "B": [("T",)], "C": [("P",)], "D": [("T", "P")]}
OPTIONS = DecodingOptions(
    search_beam=math.inf, output_beam=math.inf, context_beam=None, max_active_states=10**6, am_scale=0.8
)


def _arpa(folder: Path, seed: int, order: int) -> Path:
    """A random model whose listed n-grams are better than backing off, so that no path gains by backing off early.

    Scores are multiples of 1/64, which rounding in the graph leaves alone.
    """
    rng = random.Random(seed)
    words = list(PRONUNCIATIONS)
    ngrams: list[dict[tuple[str, ...], int]] = [dict.fromkeys([("<s>",), ("</s>",), ("<unk>",)], -200)]
    ngrams[0].update({(word,): -rng.randint(150, 200) for word in [*words, "</s>"]})
    for longer in range(2, order + 1):
        contexts = [ngram for ngram in ngrams[-1] if ngram[-1] not in ("</s>", "<unk>")]
        listed = [(*context, word) for context in contexts for word in [*words, "</s>"] if rng.random() < 0.6]
        ngrams.append({ngram: -rng.randint(5, 60) if longer == 2 else -rng.randint(5, 40) for ngram in listed})
    lines = ["\\data\\", *(f"ngram {n}={len(level)}" for n, level in enumerate(ngrams, 1)), ""]
    for n, level in enumerate(ngrams, 1):
        lines.append(f"\\{n}-grams:")
        for ngram, score in level.items():
            backoff = f"\t{-rng.randint(80, 120) / 64 / LN_10:.9f}" if n < order else ""
            lines.append(f"{score / 64 / LN_10:.9f}\t{' '.join(ngram)}{backoff}")
        lines.append("")
    path = folder / f"{order}gram.arpa"
    path.write_text("\n".join([*lines, "\\end\\", ""]))
    return path


def _first_pass(name: str, graph: DecodingGraph) -> Decoder:
    if name == "torch":
        return TokenPassingDecoder(graph, OPTIONS)
    from asr.decoding.k2 import K2Decoder

    return K2Decoder(graph, OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("first_pass", ["torch", "k2"])
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_composed_graph(first_pass: str, seed: int, tmp_path: Path) -> None:
    if first_pass == "k2" and importlib.util.find_spec("k2") is None:
        pytest.skip("k2 is not installed")
    small = NgramLM.from_arpa(_arpa(tmp_path, seed, 2))
    large = NgramLM.from_arpa(_arpa(tmp_path, seed + 100, 3), small.vocabulary)
    tokens = TokenTable(["P", "T"])
    small_graph, large_graph = (build_graph(Lexicon(PRONUNCIATIONS), lm, tokens) for lm in (small, large))
    generator = torch.Generator().manual_seed(seed)
    log_prob = torch.randn(3, 7, len(tokens.tokens), generator=generator).mul(2).log_softmax(dim=2)
    num_frames = torch.tensor([7, 6, 4])
    offline = _first_pass(first_pass, large_graph).decode(log_prob, num_frames)
    found = _first_pass(first_pass, small_graph).decode(log_prob, num_frames, Difference(large, small))
    for ours, theirs in zip(found, offline, strict=True):
        assert ours.best is not None and theirs.best is not None
        assert ours.best.words == theirs.best.words
        assert ours.best.total == pytest.approx(theirs.best.total, abs=1e-3)
        assert ours.best.graph_score + ours.best.lm_score == pytest.approx(theirs.best.graph_score, abs=1e-3)
