"""`CTCDecoder` with a graph of made-up words on a device: it finds what a CPU finds, and how long a batch takes.

    python -m scripts.benchmarks.gpu_ctc

writes the n-gram model and the compiled graph, which `scripts/gpu_check` then needs no kaldifst for. Run it whenever
graphs are compiled otherwise.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.ctc import CTCDecoder
from asr.lm.corpus import WordStream
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.io import load_ngram_lm, save_ngram_lm
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import BOS_ID, EOS_ID, SPECIAL_WORDS, Vocabulary
from scripts.benchmarks.inputs import ROOT

FOLDER = ROOT / "tests" / "assets" / "gpu_ctc"
TOKENS = ["-", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
_NUM_WORDS, _NUM_SENTENCES = 500, 500
_PEAK = 8.0  # added to the logit of the token that is said; all logits have standard normal noise
# By how much scores may differ, as a share of them; without a network only sums are in another order.
_TOLERANCE = 1e-3


class Sizes(NamedTuple):
    """Utterances of a batch, their frames, how many are compared, hidden units of the network, and the search beam."""

    num_utts: int = 128
    num_frames: int = 250
    num_compared: int = 6
    hidden_size: int = 256
    beam: float = 12.0


def agreement(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Decodes with the graph alone, and with a network inside the search and over lattices.

    Returns:
        For each of them `..._same`, which texts are a CPU's, `..._ms` for a batch that is new to the network, and
        `..._times_real_time` with frames of 20 ms; `wrong` where scores differ from a CPU's.
    """
    ngram = load_ngram_lm(FOLDER / "ngram.bin")
    torch.manual_seed(0)
    network = RNNLanguageModel(ngram.vocabulary, RNNLMConfig(sizes.hidden_size, sizes.hidden_size)).eval()
    few = made_up(ngram.vocabulary, sizes.num_compared, max(6, sizes.num_frames // 4), 0)
    found: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {
        "graph": {},
        "in_search": {"lm": network, "lm_weight": 0.3, "lm_fusion": "search"},
        "over_lattices": {"lm": network, "lm_weight": 0.3, "confidences": True},
    }
    for name, options in cases.items():
        cpu, own = (
            CTCDecoder(
                TOKENS, ngram=ngram, graph_folder=FOLDER, search_beam=sizes.beam, device=place, warm_up=False, **options
            )
            for place in (torch.device("cpu"), device)
        )  # fmt: skip
        pairs = [(one[0], other[0]) for one, other in zip(own(few.to(device)), cpu(few), strict=True)]
        found[f"{name}_same"] = f"{sum(one.text == other.text for one, other in pairs)} of {len(pairs)}"
        worst = max(abs(one.score - other.score) / (1.0 + abs(other.score)) for one, other in pairs)
        if not worst < _TOLERANCE or not all(other.text for _, other in pairs):
            found["wrong"] = f"{name}: scores differ from a CPU's by up to {worst:.1e} of them"
        seconds = 0.0
        for seed in (1, 2):  # the first batch compiles, makes room and captures
            many = made_up(ngram.vocabulary, sizes.num_utts, sizes.num_frames, seed).to(device)
            begin = time.perf_counter()
            own(many)
            seconds = time.perf_counter() - begin
        found[f"{name}_ms"] = round(1000.0 * seconds, 1)
        found[f"{name}_times_real_time"] = round(0.02 * sizes.num_utts * sizes.num_frames / seconds, 1)
        print(json.dumps(found), flush=True)
    return found


def made_up(vocabulary: Vocabulary, num_utts: int, num_frames: int, seed: int) -> Tensor:
    """Log-probabilities (N, T, C) of utterances in which words are said one after the other, drawn by chance."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = torch.randn(num_utts, num_frames, len(TOKENS), generator=generator)
    for utterance in logits:
        said: list[int] = []
        while len(said) < num_frames:
            for letter in (*vocabulary.words[chance.randrange(len(SPECIAL_WORDS), len(vocabulary))], "|"):
                said += [TOKENS.index(letter)] * chance.randint(1, 2) + [0] * chance.randint(1, 2)
        utterance[torch.arange(num_frames), torch.tensor(said[:num_frames])] += _PEAK
    return logits.log_softmax(2)


def main() -> None:
    """Writes the files."""
    chance, generator = random.Random(0), np.random.default_rng(0)
    words = sorted({"".join(chance.choices(TOKENS[2:], k=chance.randint(2, 8))) for _ in range(_NUM_WORDS)})
    vocabulary = Vocabulary(words)
    word_id = generator.integers(len(SPECIAL_WORDS), len(vocabulary), (_NUM_SENTENCES, 8)).astype(np.int32)
    word_id[:, 0], word_id[:, -1] = BOS_ID, EOS_ID
    stream = WordStream(word_id.reshape(-1), vocabulary, len(vocabulary))
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    save_ngram_lm(NgramLM.from_trie(estimate_kneser_ney(stream, 2).trie), FOLDER / "ngram.bin")
    decoder = CTCDecoder(TOKENS, ngram=load_ngram_lm(FOLDER / "ngram.bin"), graph_folder=FOLDER, warm_up=False)
    assert decoder.word_graph is not None
    print(f"{decoder.word_graph.graph.num_arcs} arcs")
    for path in sorted(FOLDER.iterdir()):
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
