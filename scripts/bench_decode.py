"""Measures decoding: agreement of the first passes, their time, what the RNN LM costs and gains, n-best and streaming.

    python scripts/bench_decode.py --quick
    python scripts/bench_decode.py --bundle checkpoints/NAME --log-probs FILE.npz --references FILE

Frame log-probabilities are those of FILE.npz (utterance id -> (T, C)), with references `id WORDS` a line. Without it
they are simulated: a random walk through the graph, blurred by noise; figures from it say "simulation". Times are
seconds of this process's CPU, both sides in one run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asr.bundle import Bundle  # noqa: E402  the checkout must be on the path first
from asr.decoding.first_pass import DecodeResult, FirstPass  # noqa: E402
from asr.decoding.nbest import n_best  # noqa: E402
from asr.decoding.options import DecodingOptions  # noqa: E402
from asr.decoding.prefix_tree import PrefixTree, score_tree_by_network  # noqa: E402
from asr.decoding.streaming import StreamingDecoder  # noqa: E402
from asr.decoding.torch_pass import TorchFirstPass  # noqa: E402
from asr.decoding_mode import decoding_options, language_models  # noqa: E402
from asr.errors import AsrError  # noqa: E402
from asr.graph.artefact import DecodingGraph  # noqa: E402
from asr.lm.contract import LanguageModel  # noqa: E402

_T = TypeVar("_T")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few utterances: under 50 seconds on 2 cores")
    parser.add_argument("--bundle", type=Path, help="default: the first of checkpoints/ that has an RNN LM")
    parser.add_argument("--log-probs", type=Path, help="npz: utterance id -> (T, C) natural log-probabilities")
    parser.add_argument("--references", type=Path, help="utterance id and words a line")
    parser.add_argument("--num-utterances", type=int, help="default: 8 with --quick, else all")
    parser.add_argument("--noise", type=float, default=2.6, help="of the simulation")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bundle = Bundle.load(args.bundle or default_bundle())
    num_utts = args.num_utterances or (8 if args.quick else 1 << 30)
    if args.log_probs is not None and args.references is not None:
        frames, references = read_frames(args.log_probs, args.references, num_utts)
        kind = "given"
    else:
        frames, references = simulate(bundle.graph, min(num_utts, 64), 120, args.noise)
        kind = "simulation"
    report: dict[str, Any] = {"bundle": bundle.name, "frames": kind, "num_utterances": len(frames)}
    report["num_frames"] = sum(map(len, frames))
    with torch.no_grad():
        measure_first_passes(bundle, frames, references, report)
        measure_language_model(bundle, frames, references, report)
        measure_n_best(bundle, frames[-1], report)
        report["chunked_equals_whole"] = chunked_equals_whole(bundle, frames[:3])
    print(json.dumps(report))
    return 0


def default_bundle() -> Path:
    for folder in sorted((ROOT / "checkpoints").glob("*/bundle.json")):
        if "rnn_lm" in json.loads(folder.read_text(encoding="utf-8")):
            return folder.parent
    raise AsrError("checkpoints/: there is no bundle with a recurrent language model; name one with --bundle.")


def read_frames(path: Path, references: Path, num_utts: int) -> tuple[list[Tensor], list[list[str]]]:
    words = {line.split()[0]: line.split()[1:] for line in references.read_text("utf-8").splitlines() if line.strip()}
    archive = np.load(path)
    ids = sorted((name for name in archive if name in words), key=lambda name: (-len(archive[name]), name))
    ids = ids[:: max(1, len(ids) // num_utts)][:num_utts]
    return [torch.from_numpy(archive[name]).float() for name in ids], [words[name] for name in ids]


def simulate(
    graph: DecodingGraph, num_utts: int, num_frames: int, noise: float
) -> tuple[list[Tensor], list[list[str]]]:
    """Walks through the graph, arcs drawn by their scores, as frames: the walk's token stands out of noise."""
    generator = torch.Generator().manual_seed(0)
    frames, references = [], []
    for _ in range(num_utts):
        state = graph.start_state
        path: list[int] = []
        words: list[int] = []
        while len(path) < num_frames or float(graph.final_score[state]) == -torch.inf:
            first, last = int(graph.arc_begin[state]), int(graph.arc_begin[state + 1])
            if first == last or len(path) > 2 * num_frames:
                break
            arc = first + int(torch.multinomial(graph.score[first:last].softmax(0), 1, generator=generator))
            path.append(int(graph.token_id[arc]))
            words += graph.word_id[int(graph.word_begin[arc]) : int(graph.word_begin[arc + 1])].tolist()
            state = int(graph.dst_state[arc])
        score = noise * torch.randn(len(path), len(graph.tokens), generator=generator)
        score[torch.arange(len(path)), torch.tensor(path)] += 6.0
        frames.append(score.log_softmax(1))
        references.append([graph.vocabulary.words[word] for word in words])
    return frames, references


def measure_first_passes(
    bundle: Bundle, frames: list[Tensor], references: list[list[str]], report: dict[str, Any]
) -> None:
    options, _ = decoding_options(bundle, "ngram", {})
    report["options"] = asdict(options)
    torch_pass = TorchFirstPass(bundle.graph, options)
    results, seconds = decode_all(torch_pass, frames)
    report["wer_ngram"] = word_error_rate(results, references)
    report["ngram_torch_seconds"] = seconds
    report["torch_over_k2_time"] = report["best_score_max_diff"] = None
    try:
        from asr.decoding.k2_pass import K2FirstPass

        k2_pass = K2FirstPass(bundle.graph, options)
    except AsrError as error:
        print(f"without k2: {error}", file=sys.stderr)
        return
    others, k2_seconds = decode_all(k2_pass, frames)
    report["ngram_k2_seconds"] = k2_seconds
    report["torch_over_k2_time"] = seconds / k2_seconds
    # Beams so wide that pruning cannot tell the two apart.
    wide = replace(options, search_beam=30.0, max_active_states=20_000)
    some = sorted(frames, key=len)[:2]
    pairs = zip(
        decode_all(TorchFirstPass(bundle.graph, wide), some)[0],
        decode_all(K2FirstPass(bundle.graph, wide), some)[0],
        strict=True,
    )
    report["best_score_max_diff"] = max(
        abs(one.best.total - other.best.total)
        for one, other in pairs
        if one.best is not None and other.best is not None
    )
    report["same_words"] = sum(
        one.best is not None and other.best is not None and one.best.word_ids == other.best.word_ids
        for one, other in zip(results, others, strict=True)
    )


def measure_language_model(
    bundle: Bundle, frames: list[Tensor], references: list[list[str]], report: dict[str, Any]
) -> None:
    for mode, name in (("on_the_fly", "rnnlm"), ("interpolated", "interpolated")):
        options, rnn_weight = decoding_options(bundle, mode, {})
        models = language_models(bundle, mode, rnn_weight, torch.device("cpu"))
        results, seconds = decode_all(best_first_pass(bundle.graph, options), frames, models.model)
        report[f"wer_{name}"] = word_error_rate(results, references)
        base = report.get("ngram_k2_seconds", report["ngram_torch_seconds"])
        report[f"{name}_over_ngram_time"] = seconds / base
        if models.engine is not None:
            report[f"{name}_statistics"] = asdict(models.engine.statistics())


def measure_n_best(bundle: Bundle, log_prob: Tensor, report: dict[str, Any]) -> None:
    """1000-best: every sentence by itself, word by word, against the prefix tree in batches."""
    assert bundle.rnn_lm is not None
    network: Any = bundle.rnn_lm.network
    options, _ = decoding_options(bundle, "ngram", {})
    result = TorchFirstPass(bundle.graph, options, keep_lattice=True).decode(
        log_prob.unsqueeze(0), torch.tensor([len(log_prob)])
    )[0]
    if result.lattice is None:
        raise AsrError("the utterance chosen for the n-best list reached no final state; widen the beam.")
    lattice = result.lattice
    hypotheses, report["nbest_extraction_seconds"] = timed(lambda: n_best(lattice, bundle.graph, options, 1000))
    word_map = bundle.graph.vocabulary.map_to(network.vocabulary)
    sentences = [word_map[list(one.word_ids)].tolist() for one in hypotheses]

    def tree_scores() -> Tensor:
        return score_tree_by_network(PrefixTree(sentences), network)

    tree_scores()
    together, tree_seconds = timed(tree_scores)
    alone, seconds = timed(lambda: [float(score_tree_by_network(PrefixTree([one]), network)) for one in sentences])
    report["nbest_size"] = len(sentences)
    report["nbest_prefixes"] = PrefixTree(sentences).num_prefixes
    report["nbest_words"] = sum(len(sentence) + 1 for sentence in sentences)
    report["nbest_speedup_1000"] = seconds / tree_seconds
    report["nbest_identical"] = bool((together - torch.tensor(alone, dtype=torch.float64)).abs().max() < 1e-3)


def chunked_equals_whole(bundle: Bundle, frames: list[Tensor]) -> bool:
    options, _ = decoding_options(bundle, "ngram", {})
    whole, _ = decode_all(TorchFirstPass(bundle.graph, options), frames)
    decoder = StreamingDecoder(bundle.graph, options)
    streams = decoder.start(len(frames))
    for size, stream, log_prob in zip((1, 7, 30), streams, frames, strict=False):
        for begin in range(0, len(log_prob), size):
            chunk = log_prob[begin : begin + size]
            decoder.advance([stream], chunk.unsqueeze(0), torch.tensor([len(chunk)]))
    chunked = [decoder.finalize(stream) for stream in streams]
    return all(
        one.best is not None
        and other.best is not None
        and one.best.word_ids == other.best.word_ids
        and abs(one.best.total - other.best.total) < 1e-3
        for one, other in zip(whole, chunked, strict=True)
    )


def best_first_pass(graph: DecodingGraph, options: DecodingOptions) -> FirstPass:
    """k2's pass where there is a k2, else the torch pass."""
    try:
        from asr.decoding.k2_pass import K2FirstPass

        return K2FirstPass(graph, options)
    except AsrError:
        return TorchFirstPass(graph, options)


def decode_all(
    first_pass: FirstPass, frames: list[Tensor], lm: LanguageModel | None = None, batch_size: int = 8
) -> tuple[list[DecodeResult], float]:
    def run() -> list[DecodeResult]:
        results = []
        for begin in range(0, len(frames), batch_size):
            batch = frames[begin : begin + batch_size]
            padded = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
            results += first_pass.decode(padded, torch.tensor([len(one) for one in batch]), lm)
        return results

    return timed(run)


def timed(work: Callable[[], _T]) -> tuple[_T, float]:
    begin = time.process_time()
    result = work()
    return result, time.process_time() - begin


def word_error_rate(results: list[DecodeResult], references: list[list[str]]) -> float:
    import kaldialign

    errors: int = sum(
        kaldialign.edit_distance(reference, list(result.best.words) if result.best else [])["total"]
        for reference, result in zip(references, results, strict=True)
    )
    return 100.0 * errors / max(1, sum(map(len, references)))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AsrError as error:
        sys.exit(str(error))
