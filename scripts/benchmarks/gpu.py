"""Recognition on a GPU: agreement with the CPU, agreement of the backends with plain torch, and speed.

Run by scripts/gpu_check. `--device cpu --small` runs everything on a CPU with very little data, as a test of itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.bundle import Bundle, bundle_folder
from asr.decoding.build import OLD_FIRST_PASSES, available_modes, default_decoder
from asr.decoding.settings import ResourceOptions
from asr.errors import AsrError
from asr.lm.cached.engine import CachedRNNLM
from asr.recognizer import Recognizer
from asr.results import StageTimes
from scripts.benchmarks.gpu_agreement import NotHere, search_checks
from scripts.benchmarks.gpu_expected import IN_FLOAT32
from scripts.benchmarks.gpu_plan import main as run_checks
from scripts.benchmarks.gpu_speed import chain, placements_agree, queries, training
from scripts.benchmarks.inputs import ROOT, argument_parser

_CLIPS = ROOT / "scripts" / "demo_clips"


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("gpu", __doc__)
    parser.add_argument("--bundle", help="folder of a bundle, or its name in checkpoints/")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to test the check itself")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256, 1024], help="utterances in a batch")
    parser.add_argument("--small", action="store_true", help="very little data, as a test of this program")
    parser.add_argument("--quick", action="store_true", help="only counts that need no GPU")
    parser.add_argument("--budget-s", type=float, help="seconds for a plan of checks, each in a process; needs --out")
    parser.add_argument("--out", help="folder for the results of the plan")
    parser.add_argument("--simulate", action="store_true", help="run the plan on a simulated device, as a test of it")
    args = parser.parse_args(argv)
    if args.budget_s is not None:
        if args.out is None:
            raise AsrError("a plan of checks (--budget-s) needs a folder for its results; give it with --out.")
        return run_checks([str(args.budget_s), args.out, *(["--simulate"] if args.simulate else [])])
    if args.quick:
        return _quick()
    device, cpu = torch.device(args.device), torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    folder = bundle_folder(args.bundle)
    bundle = Bundle.load(folder)
    waveforms = demo_waveforms(bundle.sampling_rate)
    if args.small:
        waveforms = [waveforms[0][: 2 * bundle.sampling_rate]]
    checks = [_check("features and acoustic model", lambda: compare_log_prob(folder, waveforms, cpu, device))]
    if bundle.rnn_lm is not None:
        checks.append(_check("recurrent language model's scores", lambda: _compare_scores(folder, cpu, device)))
    checks.append(_check("query engine, layers on either side", lambda: placements_agree(device)))
    for name, compare in search_checks(folder, device, *((2, 4) if args.small else (64, 200))):
        checks.append(_check(name, compare))
    modes = available_modes(bundle)[: 1 if args.small else None]
    first_passes = ["torch", "torch-search"]
    if default_decoder(device) == "k2" and not args.small:
        first_passes.append("k2")
    for mode in modes:
        for name in first_passes:
            compare = partial(compare_modes, folder, mode, name, waveforms, cpu, device)
            checks.append(_check(f"{mode}, {name}", compare))
        checks.append(_check(f"{mode}, workers", partial(compare_workers, folder, mode, waveforms, device)))
    measured: dict[str, float] = {}
    for mode in modes:
        for batch in [1] if args.small else args.batch:
            measured |= chain(folder, mode, waveforms, batch, device)
    measured |= queries(device, [3] if args.small else [3, 8, 32, 128, 256])
    for num_words in [500] if args.small else [33_000, 200_000]:
        measured |= training(device, num_words, *((4, 1) if args.small else (256, 100)))
    counts = {"checks": len(checks), "failed": checks.count(False), "not_for_this_device": checks.count(None)}
    print(json.dumps({**counts, **measured}))
    return 1 if counts["failed"] else 0


def _quick() -> int:
    """Counts on a simulated device, in a process in which Triton interprets kernels from its first import on."""
    python = Path(sys.executable)
    if torch.__version__ < "2" or importlib.util.find_spec("triton") is None:
        python = ROOT / ".venv-b" / "bin" / "python"
        if not python.is_file():
            raise AsrError(
                "counting needs torch 2 and triton; install them with scripts/setup --stack b --tests, or name a "
                "Python that has them in ASR_PYTHON."
            )
    command = [str(python), "-c", "from scripts.benchmarks.gpu_counts import main; main()"]
    return subprocess.run(command, check=False, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode


def demo_waveforms(sampling_rate: int) -> list[Tensor]:
    try:
        from asr.audio.io import find_audio_files, read_audio
    except ImportError:
        print("soundfile is not installed: noise takes the place of the demo's clips")
        generator = torch.Generator().manual_seed(0)
        return [0.1 * torch.randn(4 * sampling_rate, generator=generator) for _ in range(4)]
    return [read_audio(path, sampling_rate) for path in find_audio_files(_CLIPS)]


def _check(name: str, compare: Callable[[], str]) -> bool | None:
    """Whether the two agree; None if one of them does not run on this device."""
    try:
        print(f"ok    {name}: {compare()}")
    except NotHere as error:
        print(f"none  {name}: {error}")
        return None
    except Exception as error:  # one that breaks must not hide what the others find
        if not isinstance(error, AssertionError):
            traceback.print_exc(file=sys.stdout)
        print(f"WRONG {name}: {error}")
        return False
    return True


def compare_log_prob(folder: Path, waveforms: list[Tensor], cpu: torch.device, gpu: torch.device) -> str:
    tables = []
    for device in (cpu, gpu):
        recognizer = Recognizer.from_folder(folder, mode="ngram", resources=IN_FLOAT32).to(device)
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
        engine = CachedRNNLM(bundle.rnn_lm.network.to(device))  # type: ignore[arg-type]
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


def compare_modes(
    folder: Path, mode: str, first_pass: str, waveforms: list[Tensor], cpu: torch.device, gpu: torch.device
) -> str:
    decoder, lm_fusion = OLD_FIRST_PASSES[first_pass]
    choices: dict[str, Any] = {"mode": mode, "decoder": decoder, "lm_fusion": lm_fusion, "resources": IN_FLOAT32}
    on_cpu, on_gpu = (Recognizer.from_folder(folder, **choices).to(device)(waveforms) for device in (cpu, gpu))
    num_same = sum(ours.text == theirs.text for ours, theirs in zip(on_cpu, on_gpu, strict=True))
    for ours, theirs in zip(on_cpu, on_gpu, strict=True):
        # Sums in another order may turn a tie; the totals must still be as good.
        assert abs(ours.total - theirs.total) < 0.1 + 1e-3 * abs(ours.total), (
            f"{ours.text!r} with {ours.total:.3f} on the CPU, {theirs.text!r} with {theirs.total:.3f} on the GPU"
        )
    return f"{num_same} of {len(on_cpu)} transcripts are the same, all totals agree"


def compare_workers(
    folder: Path,
    mode: str,
    waveforms: list[Tensor],
    device: torch.device,
    numbers: Sequence[int] = (0, 1, 2, 4),
) -> str:
    """Batches one after the other, and several at a time in separate streams, give the same results."""
    recordings = waveforms * 4
    seconds = max(map(len, waveforms)) / Bundle.load(folder).sampling_rate
    results = []
    for num_workers in numbers:
        recognizer = Recognizer.from_folder(
            folder,
            mode=mode,
            decoder="token-passing",
            resources=ResourceOptions(batch_seconds=2 * seconds, num_workers=num_workers),
        )
        results.append([(result.text, result.total) for result in recognizer.to(device)(recordings)])
    for found in results[1:]:
        for (text, total), (other_text, other_total) in zip(results[0], found, strict=True):
            assert abs(total - other_total) < 1e-3 * abs(total) + 1e-3, (
                f"{text!r} {total}, {other_text!r} {other_total}"
            )
    num_same = sum(found == results[0] for found in results[1:])
    told = ", ".join(map(str, numbers[1:]))
    return f"{told} workers: totals agree, {num_same} of {len(numbers) - 1} equal to the last digit"
