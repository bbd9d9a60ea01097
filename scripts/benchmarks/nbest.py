"""n-best rescoring: every sentence separately, word by word, compared with the prefix tree."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.decoding.build import recognition_settings
from asr.decoding.nbest import PrefixTree, n_best, score_tree
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.text.symbols import BOS_ID, EOS_ID, EPSILON_ID
from scripts.benchmarks import figures
from scripts.benchmarks.decode_workload import Workload, timed
from scripts.benchmarks.report import table

_T = TypeVar("_T")
SIZES = (10, 20, 50, 100, 200, 500, 1000, 2000)
_MANY = 200  # longer lists: the sentence-by-sentence side is timed on every eighth sentence


def middle_sized(frames: list[Tensor]) -> Tensor:
    return sorted(frames, key=len)[len(frames) // 2]


def measure_n_best(bundle: Bundle, log_prob: Tensor, sampled: int) -> dict[str, Any]:
    """1000-best: every sentence by itself, word by word, against the prefix tree in batches.

    Both by the clock, on one of torch's threads and on as many as the process has cores.
    """
    assert bundle.rnn_lm is not None
    network: Any = bundle.rnn_lm.network
    sentences, extraction = thousand_best(bundle, log_prob, 1000)
    tree = PrefixTree(sentences)
    some = sentences[::sampled]
    report: dict[str, Any] = {
        "nbest_size": len(sentences),
        "nbest_prefixes": tree.num_prefixes,
        "nbest_words": num_words(sentences),
        "nbest_extraction_seconds": extraction,
    }
    differences = []
    before = torch.get_num_threads()
    for suffix, num_threads in (("", 1), ("_all_threads", len(os.sched_getaffinity(0)))):
        torch.set_num_threads(num_threads)
        score_by_tree(sentences, network)
        together, tree_seconds = least(lambda: score_by_tree(sentences, network), 5)
        alone, seconds = least(lambda: [score_sentence(one, network) for one in some], 2)
        seconds *= num_words(sentences) / num_words(some)
        report |= {
            f"nbest_speedup_1000{suffix}": seconds / tree_seconds,
            f"nbest_seconds{suffix}": [seconds, tree_seconds],
        }
        differences.append((together[::sampled] - torch.tensor(alone, dtype=torch.float64)).abs().max())
    torch.set_num_threads(before)
    difference = float(max(differences))
    return report | {"nbest_threads": num_threads, "nbest_max_diff": difference, "nbest_identical": difference < 1e-3}


def least(work: Callable[[], _T], num_runs: int) -> tuple[_T, float]:
    """The result, and the wall seconds of the fastest run; CPU seconds would hide the threads."""
    times = []
    for _ in range(num_runs):
        begin = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - begin)
    return result, min(times)


def score_sentence(sentence: Sequence[int], network: Any) -> float:
    """Scores one sentence word by word, including `</s>`: the cost of rescoring without a tree."""
    state = network.step(network.initial_state().unsqueeze(0), torch.tensor([BOS_ID]))
    history = torch.full((1, network.num_history_words), EPSILON_ID)
    history[:, :1] = BOS_ID
    total = torch.zeros(1, dtype=torch.float64)
    for word in (*sentence, EOS_ID):
        word_id = torch.tensor([word])
        total += network.log_prob(network.project(state), history, word_id)
        if word != EOS_ID:
            state = network.step(state, word_id)
            history = torch.cat([word_id.unsqueeze(1), history], dim=1)[:, : network.num_history_words]
    return float(total)


def score_by_tree(sentences: Sequence[Sequence[int]], network: Any, batching: str = "frame") -> Tensor:
    """Scores sentences over their prefix tree, with empty caches."""
    return score_tree(PrefixTree(sentences), CachedRNNLM(network, CacheOptions(batching=batching)))


def num_words(sentences: Sequence[Sequence[int]]) -> int:
    """`</s>` counted."""
    return sum(len(sentence) + 1 for sentence in sentences)


def thousand_best(bundle: Bundle, log_prob: Tensor, num: int) -> tuple[list[list[int]], float]:
    """The n best sentences of an utterance in the RNN LM's word ids, and the seconds of the fastest extraction."""
    assert bundle.rnn_lm is not None
    network: Any = bundle.rnn_lm.network
    options = recognition_settings(bundle, "ngram", {"output_beam": 12.0}).decoding
    results = TokenPassingDecoder(bundle.graph, options, keep_lattice=True).decode(
        log_prob[None], torch.tensor([len(log_prob)])
    )
    lattice = results[0].lattice
    if lattice is None:
        raise AsrError("the utterance of the n-best list reached no final state; widen the beam.")
    hypotheses, seconds = least(lambda: n_best(lattice, bundle.graph, options, num), 5)
    word_map = bundle.graph.vocabulary.map_to(network.vocabulary)
    return [word_map[list(one.word_ids)].tolist() for one in hypotheses], seconds


def prefix_tree_cost(bundle: Bundle, workload: Workload, plots: Path | None) -> None:
    """Si et al. (2013), Table 3 and Figures 3 and 4: each sentence alone, the tree row by row, and level by level."""
    assert bundle.rnn_lm is not None
    network: Any = bundle.rnn_lm.network
    longest = max(workload.frames, key=len)
    row_mb = 4e-6 * network.recurrent_size
    rows = []
    for name, log_prob in (("middle", middle_sized(workload.frames)), ("longest", longest)):
        most, _ = thousand_best(bundle, log_prob, SIZES[-1])
        for size in sorted({min(size, len(most)) for size in SIZES}):
            sentences = most[:size]
            every = 8 if size > _MANY else 1
            tree = PrefixTree(sentences)
            together, batched_s = timed(lambda some=sentences: score_by_tree(some, network))
            by_one, tree_s = timed(lambda some=sentences: score_by_tree(some, network, batching="query"))
            alone, standard_s = timed(lambda some=sentences[::every]: [score_sentence(one, network) for one in some])
            standard_s *= num_words(sentences) / num_words(sentences[::every])
            rows.append(
                {
                    "utterance": name,
                    "n-best": size,
                    "words": num_words(sentences),
                    "prefixes": tree.num_prefixes,
                    "MB of hidden rows": tree.num_prefixes * row_mb,
                    "s, sentence by sentence": standard_s,
                    "s, tree, row by row": tree_s,
                    "s, tree, level by level": batched_s,
                    "speed-up": standard_s / batched_s,
                    "largest difference": max(
                        float((together[::every] - torch.tensor(alone, dtype=torch.float64)).abs().max()),
                        float((together - by_one).abs().max()),
                    ),
                }
            )
    table(f"Cost by the length of the list ({workload.name})", rows)
    if plots is not None:
        figures.n_best(rows, plots / "n_best.svg")
