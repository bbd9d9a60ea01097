"""`scripts/bench use`: what users rely on: the wheel, resuming, formats, sclite's counts, training, exported models.

`wheel_ok` unpacks the wheel outside the checkout and lets another process import it, fetch a bundle from a local server
that drops connections, and recognize. The environment's own packages are used instead of those that pip would install,
and must include the wheel's requirements. `resume_100k_s` is processor time. `sclite_difference` is null if sclite
(Debian's package sctk) is not installed. `ddp_max_difference_am` and `ddp_max_difference_lm` are the largest
differences of weights between one process of training and two, whole and resumed, for tiny acoustic models (CTC and
lattice-free MMI, in float64) and language models; `onnx_max_difference` is that of log-probabilities of an exported
network between onnxruntime and torch. They are null without Lightning or onnxruntime.
"""

from __future__ import annotations

import http.server
import importlib.metadata
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

from asr import nist
from asr.audio.io import read_audio
from asr.bundle import Bundle, bundle_folder
from asr.cli.output import ResultsFile
from asr.cli.recordings import recordings
from asr.metrics import alignment_errors
from asr.models.export import export_acoustic_model
from asr.models.external import load_acoustic_model
from asr.results import Word
from asr.serialization import require_writable
from asr.transcripts import FORMATS, Transcript, format_transcript
from scripts.benchmarks.inputs import ROOT, argument_parser
from scripts.benchmarks.processes import largest_differences

_NUM_SENTENCES = 300
_BREAK_AFTER = 3_000_000
_LARGEST_DIFFERENCE = 1e-4
_CLIP = ROOT / "scripts" / "demo_clips" / "river.flac"
_SCLITE = "/usr/lib/sctk/bin/sclite"  # where Debian puts it, out of the path

_INSIDE = """
import sys
sys.path[:] = [sys.argv[1], *(path for path in sys.path if path not in ("", sys.argv[4]))]
import asr
assert asr.__file__.startswith(sys.argv[1]), asr.__file__
recognizer = asr.load(sys.argv[2], mode="ngram")
assert recognizer(sys.argv[3])[0].words
"""


def main(arguments: list[str]) -> int:
    parser = argument_parser("use", __doc__)
    parser.add_argument("--quick", action="store_true", help="no effect: the benchmark always takes less than a minute")
    parser.add_argument("--bundle", default="an4", help="bundle that the wheel fetches and uses (default: an4)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[str, Any] = {
            "wheel_ok": wheel_works(folder, args.bundle),
            "resume_100k_s": round(resume_seconds(folder), 3),
            "sclite_difference": sclite_difference(folder),
            "formats_round_trip": formats_round_trip(folder),
            **training_differences(folder),
            "onnx_max_difference": onnx_difference(folder, args.bundle),
        }
    print(json.dumps(found))
    is_exact = all((found[name] or 0.0) < _LARGEST_DIFFERENCE for name in found if "max_difference" in name)
    is_right = found["wheel_ok"] and found["formats_round_trip"] and not found["sclite_difference"]
    return 0 if is_right and is_exact else 1


class BreakingServer(http.server.ThreadingHTTPServer):
    """Serves a folder and ends each response after a few megabytes.

    Attributes:
        folder: served as it is.
        damaged: name of a file that is served with another last byte.
    """

    folder: Path
    damaged: str | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class BreakingHandler(http.server.BaseHTTPRequestHandler):
    """Answers requests, also for the rest of a file."""

    server: BreakingServer

    def do_GET(self) -> None:
        path = self.server.folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        content, asked = path.read_bytes(), self.headers.get("Range")
        if path.name == self.server.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        begin = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        self.wfile.write(content[begin : begin + _BREAK_AFTER])

    def log_message(self, *_: Any) -> None:
        pass


def copy_sources(folder: Path) -> None:
    """What git has, bundles left out, so that no build folder of earlier runs gets into a wheel."""
    if shutil.which("git") and (ROOT / ".git").exists():
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        names = [name for name in tracked.decode().split("\0") if name and not name.startswith("checkpoints/")]
    else:
        names = [str(path.relative_to(ROOT)) for path in (ROOT / "asr").rglob("*.py")] + ["pyproject.toml"]
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def wheel_works(folder: Path, bundle: str) -> bool:
    """Whether the wheel is complete; missing parts are listed on stderr."""
    source = folder / "source"
    copy_sources(source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(source)]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if built.returncode or not wheels:
        print(built.stderr, file=sys.stderr)
        return False
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(folder / "installed")
    (metadata,) = (folder / "installed").glob("*.dist-info")
    required = importlib.metadata.Distribution.at(metadata).requires or []
    missing = [name for name in map(_required_name, required) if name and not _is_installed(name)]
    if missing:
        print(f"scripts/bench use: not installed here: {', '.join(missing)}", file=sys.stderr)
        return False
    with BreakingServer(("127.0.0.1", 0), BreakingHandler) as server:
        server.folder = bundle_folder(bundle).resolve().parent
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"{server.address}/{bundle_folder(bundle).name}"
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ASR_BUNDLE")}
        environment |= {"ASR_CACHE": str(folder / "cache")}
        command = [sys.executable, "-c", _INSIDE, str(folder / "installed"), address, str(_CLIP), str(ROOT)]
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        server.shutdown()
    if ran.returncode:
        print(ran.stderr, file=sys.stderr)
    return ran.returncode == 0


def _required_name(requirement: str) -> str:
    """The distribution that is asked for; empty if only an extra asks for it."""
    match = re.match(r"[\w.-]+", requirement)
    return match[0] if match is not None and "extra ==" not in requirement else ""


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def resume_seconds(folder: Path, num_files: int = 100_000) -> float:
    """Processor seconds until it is known which of `num_files` recordings are done.

    The folder is listed, no input may be the output, and the results are read.
    """
    audio = folder / "audio"
    words = [{"word": "WORD", "start": 0.1 * place, "end": 0.1 * place + 0.1} for place in range(8)]
    line = json.dumps({"audio": "@", "text": "WORD " * 8, "words": words, "made_by": "bench ngram 0"})
    names = [f"{audio}/{place // 1000:03d}/{place}.wav" for place in range(num_files)]
    for name in names:
        if name.endswith(("000.wav", "/0.wav")):
            Path(name).parent.mkdir(parents=True)
        Path(name).touch()
    (folder / "words.jsonl").write_text("".join(line.replace("@", name) + "\n" for name in names))
    begin = time.process_time()
    found = recordings([str(audio)])
    require_writable(folder / "words.jsonl", inputs=found.names)
    with ResultsFile(folder / "words.jsonl", "audio") as output:
        left = [name for name in found.names if name not in output.done]
    seconds = time.process_time() - begin
    assert not left and len(found.names) == num_files
    return seconds


def training_differences(folder: Path) -> dict[str, float | None]:
    """The largest differences of weights between one process of training and two."""
    if not all(importlib.util.find_spec(name) for name in ("pytorch_lightning", "lhotse")):
        return {"ddp_max_difference_am": None, "ddp_max_difference_lm": None}
    inputs = folder / "training"
    inputs.mkdir()
    found = largest_differences(inputs, ("ctc", "chain", "nce"))
    return {"ddp_max_difference_am": max(found["ctc"], found["chain"]), "ddp_max_difference_lm": found["nce"]}


def onnx_difference(folder: Path, bundle: str) -> float | None:
    """The largest difference of a log-probability between torch and onnxruntime, over two recordings in a batch."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    loaded = Bundle.load(bundle_folder(bundle))
    export_acoustic_model(loaded, folder / "model.onnx", "onnx")
    exported = load_acoustic_model(f"onnx:{folder / 'model.onnx'}")
    samples = read_audio(_CLIP, exported.sampling_rate)
    num_samples = torch.tensor([len(samples), len(samples) // 2])
    waveform = samples.repeat(2, 1)
    with torch.no_grad():
        wanted, num_frames = loaded.acoustic_model.network(*loaded.features.network(waveform, num_samples))
        found, _ = exported.forward(waveform, num_samples)
    rows = [(found[row, :num] - wanted[row, :num]).abs().max() for row, num in enumerate(num_frames.tolist())]
    return float(torch.stack(rows).max())


def sclite_difference(folder: Path) -> int | None:
    """The sum of the differences of all counts from sclite's, on random sentences; None without sclite."""
    program = shutil.which("sclite") or (_SCLITE if Path(_SCLITE).is_file() else None)
    if program is None:
        return None
    generator = random.Random(0)
    sides: list[dict[str, list[str]]] = [{}, {}]
    for place in range(_NUM_SENTENCES):
        for side in sides:
            side[f"s_{place}"] = [generator.choice("abcdE") for _ in range(generator.randint(1, 20))]
    for side, name in zip(sides, ("ref", "hyp"), strict=True):
        (folder / f"{name}.trn").write_text(nist.format_trn(side))
    command = [program, "-r", "ref.trn", "trn", "-h", "hyp.trn", "trn", "-i", "rm", "-o", "pra", "stdout"]
    shown = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    difference, scores = 0, re.findall(r"id: \((s_\d+)\)\nScores: \(#C #S #D #I\) (.*)\n", shown)
    assert len(scores) == _NUM_SENTENCES
    for name, numbers in scores:
        counts = alignment_errors(nist.align(sides[0][name], sides[1][name]))
        correct = counts.num_ref - counts.num_substitutions - counts.num_deletions
        ours = (correct, counts.num_substitutions, counts.num_deletions, counts.num_insertions)
        difference += sum(abs(one - int(other)) for one, other in zip(ours, numbers.split(), strict=True))
    return difference


def formats_round_trip(folder: Path) -> bool:
    """Whether words and times written as CTM, STM, TRN and JSON are unchanged when read again."""
    words = tuple(Word(f"W{place}", 0.4 * place, 0.4 * place + 0.25, 0.5) for place in range(40))
    record = {"text": " ".join(word.text for word in words), "words": [word.as_dict() for word in words]}
    transcript = Transcript("talk", words, 20.0, record)
    for name in FORMATS:
        (folder / f"talk.{name}").write_text(format_transcript(transcript, name))
    texts = tuple(word.text for word in words)
    (timed,) = nist.read_ctm(folder / "talk.ctm").values()
    times = [(round(word.begin, 3), round(word.begin + word.duration, 3)) for word in timed]
    written = [(word["start"], word["end"]) for word in json.loads((folder / "talk.json").read_text())["words"]]
    return (
        tuple(word.text for word in timed) == texts
        and times == [(round(word.start, 3), round(word.end, 3)) for word in words] == [*map(tuple, written)]
        and nist.read_trn(folder / "talk.trn") == {"talk": texts}
        and tuple(word for segment in nist.read_stm(folder / "talk.stm") for word in segment.words) == texts
        and (folder / "talk.txt").read_text().split() == list(texts)
    )
