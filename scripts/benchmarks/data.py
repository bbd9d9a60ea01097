"""Batches per second of the acoustic data module, epoch by epoch: the first computes features, later ones reuse them.

scripts/bench data --cuts data/librispeech/librispeech_train-clean-5.jsonl.gz --lexicon lexicon.txt
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch

from asr.datasets.datamodule import AcousticDataModule
from scripts.benchmarks.inputs import argument_parser


def main(argv: Sequence[str]) -> int:
    """Prints one JSON object per epoch; `cpu_s` is processor time, which hardly depends on other load."""
    parser = argument_parser("data", __doc__)
    parser.add_argument("--cuts", nargs="+", required=True, help="manifests of `asr prepare`")
    parser.add_argument("--lexicon", nargs="+", required=True, help="lexicons")
    parser.add_argument("--speed-factors", nargs="+", type=float, default=[0.9, 1.0, 1.1], help="%(default)s")
    parser.add_argument("--memory-gb", type=float, default=4.0, help="%(default)s")
    parser.add_argument("--epochs", type=int, default=5, help="%(default)s")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    module = AcousticDataModule(
        train_cuts=args.cuts, lexicon=args.lexicon, speed_factors=args.speed_factors, memory_gb=args.memory_gb
    )
    begin = time.process_time()
    module.setup("fit")
    print(json.dumps({"setup_cpu_s": round(time.process_time() - begin, 2)}), flush=True)
    loader = module.train_dataloader()
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)  # type: ignore[union-attr]
        begin, wall_begin = time.process_time(), time.perf_counter()
        frames = [int(batch["num_frames"].sum()) for batch in loader]
        cpu_s, wall_s = time.process_time() - begin, time.perf_counter() - wall_begin
        report = {
            "epoch": epoch,
            "batches": len(frames),
            "hours": round(sum(frames) / 360000, 3),
            "cpu_s": round(cpu_s, 2),
            "wall_s": round(wall_s, 2),
            "batches_a_cpu_s": round(len(frames) / cpu_s, 1),
        }
        print(json.dumps(report), flush=True)
    return 0
