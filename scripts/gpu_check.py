"""Compares recognition on a GPU with the CPU, stage by stage, and measures both. Run by scripts/gpu_check."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.cli.bundle_choice import bundle_folder
from asr.decoding_mode import available_modes
from asr.evaluation.timing import StageTimes
from asr.query.engine import RnnLM
from asr.recognizer import Recognizer, default_first_pass

_CLIPS = Path(__file__).resolve().parent / "demo_clips"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", help="folder of a bundle, or its name in checkpoints/")
    parser.add_argument("--copies", type=int, default=16, help="how often each clip stands in the benchmark's batch")
    args = parser.parse_args()
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    folder = bundle_folder(args.bundle)
    waveforms = _waveforms(Bundle.load(folder).sampling_rate)
    checks = [_check("features and acoustic model", lambda: _compare_log_prob(folder, waveforms, cpu, gpu))]
    if Bundle.load(folder).rnn_lm is not None:
        checks.append(_check("recurrent language model's scores", lambda: _compare_scores(folder, cpu, gpu)))
    first_passes = ["torch"] if default_first_pass(gpu) == "torch" else ["torch", "k2"]
    for mode in available_modes(Bundle.load(folder)):
        for name in first_passes:
            checks.append(_check(f"{mode}, {name}", lambda m=mode, n=name: _compare(folder, m, n, waveforms, cpu, gpu)))
    for mode in available_modes(Bundle.load(folder)):
        for device in (cpu, gpu):
            _benchmark(folder, mode, waveforms, 1 if device == cpu else args.copies, device)
    print(json.dumps({"checks": len(checks), "failed": checks.count(False)}))
    return 0 if all(checks) else 1


def _waveforms(sampling_rate: int) -> list[Tensor]:
    try:
        from asr.data.audio import find_audio_files, read_audio
    except ImportError:
        print("soundfile is not installed: noise takes the place of the demo's clips")
        generator = torch.Generator().manual_seed(0)
        return [0.1 * torch.randn(4 * sampling_rate, generator=generator) for _ in range(4)]
    return [read_audio(path, sampling_rate) for path in find_audio_files(_CLIPS)]


def _check(name: str, compare: Callable[[], str]) -> bool:
    try:
        print(f"ok    {name}: {compare()}")
    except AssertionError as error:
        print(f"WRONG {name}: {error}")
        return False
    return True


def _compare_log_prob(folder: Path, waveforms: list[Tensor], cpu: torch.device, gpu: torch.device) -> str:
    tables = []
    for device in (cpu, gpu):
        recognizer = Recognizer.from_folder(folder, mode="ngram").to(device)
        with torch.no_grad():
            tables.append([row.cpu() for row in recognizer.log_prob(waveforms, StageTimes())])
    assert torch.equal(tables[0][1], tables[1][1]), "the numbers of frames differ"
    difference = max(
        float((ours[:num] - theirs[:num]).exp().sub(1).abs().mul(theirs[:num].exp()).max())
        for ours, theirs, num in zip(tables[0][0], tables[1][0], tables[0][1].tolist(), strict=True)
    )
    assert difference < 0.02, f"probabilities differ by up to {difference:.4f}"
    return f"probabilities differ by at most {difference:.1e}"


def _compare_scores(folder: Path, cpu: torch.device, gpu: torch.device) -> str:
    scores = []
    for device in (cpu, gpu):
        bundle = Bundle.load(folder)
        assert bundle.rnn_lm is not None
        engine = RnnLM(bundle.rnn_lm.network.to(device))  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(0)
        context_idx, parts = engine.start(64), []
        for _ in range(8):
            word_id = torch.randint(4, len(engine.vocabulary), (64,), generator=generator).to(device)
            log_prob, context_idx = engine.score(context_idx, word_id)
            parts.append(log_prob.cpu())
        scores.append(torch.cat(parts))
    difference = float((scores[0] - scores[1]).abs().max())
    assert difference < 0.02, f"log probabilities differ by up to {difference:.4f}"
    return f"512 log probabilities differ by at most {difference:.1e}"


def _compare(
    folder: Path, mode: str, first_pass: str, waveforms: list[Tensor], cpu: torch.device, gpu: torch.device
) -> str:
    on_cpu, on_gpu = (
        Recognizer.from_folder(folder, mode=mode, first_pass=first_pass).to(device)(waveforms) for device in (cpu, gpu)
    )
    num_same = sum(ours.text == theirs.text for ours, theirs in zip(on_cpu, on_gpu, strict=True))
    for ours, theirs in zip(on_cpu, on_gpu, strict=True):
        # Sums in another order may turn a tie; the totals must still be as good.
        assert abs(ours.total - theirs.total) < 0.1 + 1e-3 * abs(ours.total), (
            f"{ours.text!r} with {ours.total:.3f} on the CPU, {theirs.text!r} with {theirs.total:.3f} on the GPU"
        )
    return f"{num_same} of {len(on_cpu)} transcripts are the same, all totals agree"


def _benchmark(folder: Path, mode: str, waveforms: list[Tensor], copies: int, device: torch.device) -> None:
    recognizer = Recognizer.from_folder(folder, mode=mode, batch_seconds=1e4).to(device)
    recognizer(waveforms[:1])  # the first call prepares kernels
    times = StageTimes()
    for result in recognizer(waveforms * copies):
        times.add(result.times)
    name = recognizer.first_pass_name
    print(f"{device.type:<5}{mode:<14}{name:<6}{len(waveforms) * copies} utterances: {times.format()}")


if __name__ == "__main__":
    sys.exit(main())
