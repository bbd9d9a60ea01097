"""`scripts/bench install --python PYTHON ...`: tests an installed wheel like a new user, outside the checkout.

PYTHON is the interpreter of an environment in which the wheel is installed with its extra graph, such as
`python3.13 -m venv new && new/bin/pip install -f dist 'onepass-asr[graph]'`. Tried are torch.hub (`list`, `help`, all
entries, from the checkout's files in a folder of their own), `asr bundle list|fetch|info` with a server that breaks
off, a wrong file, no network, and the commands and the program of README.md as they stand there, but for those that it
says are not run. Bundles are fetched from that server. Each line is one JSON object; the exit code is 1 if anything
failed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.inputs import ROOT, argument_parser
from scripts.benchmarks.use import BreakingHandler, BreakingServer, copy_sources

_ENTRIES = ("acoustic_model", "language_model", "recognizer", "streaming_recognizer")

# torch.hub takes a repository that is in its cache from there, without a network.
_HUB = f"""
import os, pathlib, sys, torch
folder = pathlib.Path(torch.hub.get_dir(), "owner_name_main")
folder.parent.mkdir(parents=True)
os.symlink(sys.argv[1], folder)
shown = torch.hub.list("owner/name:main", skip_validation=True, trust_repo=True)
assert sorted(shown) == {list(_ENTRIES)!r}, shown
for name in shown:
    assert "Example:" in torch.hub.help("owner/name:main", name, skip_validation=True, trust_repo=True)
loaded = {{name: torch.hub.load(sys.argv[1], name, source="local", bundle="an4") for name in shown}}
import asr
assert os.path.realpath(asr.__file__).startswith(os.path.realpath(sys.argv[1])), asr.__file__
log_prob, num_frames = loaded["acoustic_model"](torch.zeros(1, 16000))
assert log_prob.shape[1] == int(num_frames)
print(loaded["recognizer"](sys.argv[2])[0].text)
"""


def main(arguments: list[str]) -> int:
    parser = argument_parser("install", __doc__)
    parser.add_argument("--python", nargs="+", required=True, help="interpreters of environments with the wheel")
    args = parser.parse_args(arguments)
    is_ok = True
    with tempfile.TemporaryDirectory() as name, BreakingServer(("127.0.0.1", 0), BreakingHandler) as server:
        server.folder = ROOT / "checkpoints"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        copy_sources(Path(name) / "checkout")
        for python in args.python:
            found = tried(Path(python).absolute(), Path(name), server)
            print(json.dumps(found), flush=True)
            is_ok = is_ok and all(value for key, value in found.items() if key.endswith("_ok"))
        server.shutdown()
    return 0 if is_ok else 1


def tried(python: Path, folder: Path, server: BreakingServer) -> dict[str, Any]:
    """What works in an environment; failures are shown on stderr."""
    scratch = Path(tempfile.mkdtemp(dir=folder))
    checkout = folder / "checkout"
    own = ("PYTHONPATH", "ASR_BUNDLE", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"ASR_CACHE": str(scratch / "cache"), "TORCH_HOME": str(scratch / "torch")}
    environment |= {"ASR_BUNDLES": server.address, "PATH": f"{python.parent}:{os.environ['PATH']}"}

    def run(command: Sequence[str], into: Path = scratch, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=into, env=environment | more, capture_output=True, text=True, check=False, timeout=3000
        )

    def works(command: Sequence[str], into: Path = scratch) -> bool:
        ran = run(command, into)
        if ran.returncode:
            print(f"{python}: {' '.join(command)[:200]}\n{ran.stdout}{ran.stderr}", file=sys.stderr)
        return ran.returncode == 0

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    clip = str(checkout / "scripts" / "demo_clips" / "river.flac")
    program = scratch / "readme.py"
    program.write_text("\n".join(_blocks(readme, "python")), encoding="utf-8")
    shutil.copytree(checkout / "scripts" / "demo_clips", scratch / "used" / "scripts" / "demo_clips")
    versions = run([str(python), "-c", "import sys, torch; print(sys.version.split()[0], torch.__version__)"])
    return {
        "python": versions.stdout.split()[0],
        "torch": versions.stdout.split()[1],
        "import_ok": works([str(python), "-c", f"import asr; assert not asr.__file__.startswith({str(ROOT)!r})"]),
        "bundles_ok": _bundles_work(run, server, scratch),
        "hub_ok": works([str(python), "-c", _HUB, str(checkout), clip]),
        "readme_commands_ok": works(["bash", "-euc", "\n".join(_blocks(readme, "sh"))], scratch / "used"),
        "readme_program_ok": works([str(python), str(program)], scratch / "used"),
    }


def _blocks(page: str, language: str) -> list[str]:
    """The blocks of a page to run."""
    return re.findall(rf"(?ms)(?<!-->\n)^```{language}\n(.*?)^```$", page)


def _bundles_work(run: Callable[..., subprocess.CompletedProcess[str]], server: BreakingServer, scratch: Path) -> bool:
    """`asr bundle` with a transfer that breaks off, with a damaged file, and without a network."""
    server.damaged = "graph.safetensors"
    wrong = run(["asr", "bundle", "fetch", "an4"])
    server.damaged = None
    nothing, fetched, listed, information = (
        run(["asr", "bundle", *arguments])
        for arguments in (["list", "--json"], ["fetch", "an4"], ["list"], ["info", "an4", "--json"])
    )
    away = run(["asr", "bundle", "fetch", "https://127.0.0.1:9/an4"])
    checks = {
        "nothing is listed": (nothing.returncode, nothing.stdout) == (0, ""),
        "fetched in pieces": fetched.returncode == 0 and Path(fetched.stdout.strip()).is_relative_to(scratch / "cache"),
        "listed": "an4" in listed.stdout,
        "described": information.returncode == 0 and json.loads(information.stdout)["name"] == "an4",
        "a wrong checksum": wrong.returncode == 2 and "its checksum differs" in wrong.stderr,
        "no network": away.returncode == 2 and "is there a network?" in away.stderr and away.stderr.count("\n") == 1,
    }
    for name, is_ok in checks.items():
        if not is_ok:
            print(f"asr bundle: {name}: not so", file=sys.stderr)
    return all(checks.values())
