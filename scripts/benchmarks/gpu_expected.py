"""The expected results of `scripts/gpu_check`: words and totals of each mode, found earlier on a CPU.

    python -m scripts.benchmarks.gpu_expected

writes them with the demo's clips to one file, which a machine without soundfile can read. Run it on a CPU whenever the
AN4 bundle or the search changes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.decoding.build import OLD_FIRST_PASSES, available_modes
from asr.decoding.settings import ResourceOptions
from asr.recognizer import Recognizer
from scripts.benchmarks.inputs import AN4_BUNDLE, ROOT

PATH = ROOT / "tests" / "assets" / "gpu_expected.npz"
IN_FLOAT32 = ResourceOptions(acoustic_precision="float32")
"""What a CPU is compared with a GPU in, which does not multiply bytes."""

_INT16 = 32768.0


class Expected(NamedTuple):
    """Recordings, and for each mode and first pass the text and total of each of them."""

    waveforms: list[Tensor]
    results: dict[str, list[tuple[str, float]]]


def clips() -> list[Tensor]:
    """The demo's clips, (L,) each, at 16 kHz."""
    with np.load(PATH) as arrays:
        return [torch.from_numpy(arrays[name] / np.float32(_INT16)) for name in arrays.files if name != "results"]


def load_expected(folder: Path) -> Expected | None:
    """The expected results of a bundle; None if the file is for another bundle."""
    with np.load(PATH) as arrays:
        record: dict[str, Any] = json.loads(bytes(arrays["results"]))
    if record["checksum"] != checksum_of(folder):
        return None
    results = {name: [(text, total) for text, total in rows] for name, rows in record["results"].items()}
    return Expected(clips(), results)


def checksum_of(folder: Path) -> str:
    """The checksum of a bundle's files."""
    return str(json.loads((folder / "bundle.json").read_text("utf-8"))["checksum"])


def recognized(folder: Path, name: str, waveforms: list[Tensor], device: torch.device) -> list[tuple[str, float]]:
    """Text and total of each recording; `name` is a mode and a first pass, such as `rnn, torch-search`."""
    mode, first_pass = name.split(", ")
    decoder, lm_fusion = OLD_FIRST_PASSES[first_pass]
    choices: dict[str, Any] = {"mode": mode, "decoder": decoder, "lm_fusion": lm_fusion, "resources": IN_FLOAT32}
    recognizer = Recognizer.from_folder(folder, **choices).to(device)
    return [(result.text, result.total) for result in recognizer(waveforms)]


def names_of(folder: Path) -> list[str]:
    """The modes of a bundle, each with two first passes."""
    modes = available_modes(Bundle.load(folder))
    return [f"{mode}, {first_pass}" for mode in modes for first_pass in ("torch", "torch-search")]


def main() -> None:
    """Writes the file."""
    from asr.audio.io import find_audio_files, read_audio

    waveforms = [read_audio(path, 16000) for path in find_audio_files(ROOT / "scripts" / "demo_clips")]
    names = names_of(AN4_BUNDLE)
    samples = [(waveform * _INT16).round().to(torch.int16) for waveform in waveforms]
    heard = [part.float() / _INT16 for part in samples]
    results = {name: recognized(AN4_BUNDLE, name, heard, torch.device("cpu")) for name in names}
    record = json.dumps({"checksum": checksum_of(AN4_BUNDLE), "results": results}).encode()
    arrays = {f"clip_{number}": part.numpy() for number, part in enumerate(samples)}
    np.savez_compressed(PATH, results=np.frombuffer(record, dtype=np.uint8), **arrays)
    print(f"{PATH}: {PATH.stat().st_size} bytes, {len(samples)} clips, {', '.join(names)}")


if __name__ == "__main__":
    main()
