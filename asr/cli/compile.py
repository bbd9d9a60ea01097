"""Compiles the loops that recognition needs on this machine ahead of time, and checks whether that has been done.

numba keeps the machine code next to the sources, or in the user's cache folder if that place is read-only. A small
record lists its files and the sources that they were compiled from.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from asr.bundle import Bundle, all_bundle_folders
from asr.cli.options import notice
from asr.decoding.build import available_modes
from asr.errors import AsrError
from asr.graph.context import TIED_STATES, TiedStates
from asr.graph.denominator_graph import DenominatorGraph
from asr.hub import user_cache
from asr.kernels.jit import UNWRITABLE_FOLDERS, built_for, cached_code, has_package, watch_compiler
from asr.models.adaptation import RecognizedSpeech, adapt
from asr.recognizer import Recognizer
from asr.streaming import StreamingRecognizer
from asr.text.documents import parse_json

RECORD = f"asr-compiled.{sys.implementation.cache_tag}.json"
"""As numba's own files, one for each version of Python that uses the checkout."""


def record_folders() -> list[Path]:
    """Where the record may be, in order of preference."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(os.environ["NUMBA_CACHE_DIR"])]
    folders = [Path(__file__).resolve().parents[1] / "__pycache__"]
    with contextlib.suppress(AsrError):  # no home folder
        folders.append(user_cache() / "asr")
    return folders


def compile_loops(folders: Sequence[Path]) -> int:
    """Compiles what all modes of some bundles need: offline, with lattices, with the fusion in the search, and streams.

    Bundles that can adapt to speakers do so once.

    Args:
        folders: of bundles; empty for those of the checkout.

    Returns:
        the number of functions compiled; 0 where all of them were in numba's cache.

    Raises:
        AsrError: the code cannot be kept, because no folder for it can be written.
    """
    begin, num_compiled = time.perf_counter(), 0

    def count(number: int) -> None:
        nonlocal num_compiled
        num_compiled = number

    console = Console(stderr=True)
    steps = [step for folder in folders or all_bundle_folders() for step in _steps(Bundle.load(folder))]
    if not console.is_terminal:
        print("asr: compiling the search's loops for this machine; needed once, some minutes.", file=sys.stderr)
    text = "compiling loops for this machine"
    with watch_compiler(count):
        for step in track(steps, text, console=console, disable=not console.is_terminal):
            step()
            if UNWRITABLE_FOLDERS:
                raise AsrError(
                    f"{UNWRITABLE_FOLDERS[0]}: compiled loops cannot be kept there; make room, or name another folder "
                    "in the environment variable NUMBA_CACHE_DIR."
                )
    _write_record()
    print(f"asr: {num_compiled} functions compiled in {time.perf_counter() - begin:.0f} s.", file=sys.stderr)
    return num_compiled


def _steps(bundle: Bundle) -> list[Callable[[], object]]:
    def prepare(mode: str, **arguments: Any) -> Callable[[], object]:
        return lambda: Recognizer(bundle, mode, decoder="token-passing", **arguments).prepare()

    def stream(mode: str) -> Callable[[], object]:
        return lambda: StreamingRecognizer(Recognizer(bundle, mode, decoder="token-passing"))

    steps: list[Callable[[], object]] = []
    for mode in available_modes(bundle):
        steps += [prepare(mode), prepare(mode, keep_lattices=True)]
        steps += [prepare(mode, lm_fusion="chunks"), prepare(mode, lm_fusion="search"), stream(mode)]
    tied = bundle.graph.meta.get(TIED_STATES)
    if bundle.denominator is not None and tied is not None:
        steps.append(functools.partial(adapt_to_noise, bundle.acoustic_model.network, tied, bundle.denominator))
    return steps


def adapt_to_noise(network: Any, tied: dict[str, Any], denominator: DenominatorGraph) -> None:
    """Adapts a network with these tied states to made-up speech, for the loops of the objective."""
    factor, num_outputs = network.subsampling_factor, 80
    features = torch.randn(factor * num_outputs, network.num_features, generator=torch.Generator().manual_seed(0))
    runs = tuple((1 + at % (network.num_tokens - 1), 4 * at, 4 * at + 4) for at in range(num_outputs // 4))
    adapt(network, TiedStates.from_json(tied), denominator, [RecognizedSpeech(features, runs)])


def _write_record() -> None:
    content = {"built_for": built_for(), **cached_code()}
    for folder in record_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RECORD).write_text(json.dumps(content, indent=1), encoding="utf-8")
            return


def compiled_state() -> tuple[bool, str]:
    """Whether the loops are compiled, and a phrase for users that says where, or why not."""
    if not has_package("numba"):
        return False, "numba is not installed; slower tensor operations are used instead"
    record = next((folder / RECORD for folder in record_folders() if (folder / RECORD).is_file()), None)
    if record is None:
        return False, "not compiled ahead; 'asr doctor --compile' does it, otherwise the first recordings do"
    try:
        content = parse_json(record.read_text(encoding="utf-8"))
        missing = [path for path in content["files"] if not Path(path).is_file()]
        sources = {Path(path): time_ns for path, time_ns in content["sources"].items()}
        changed = [path for path, ns in sources.items() if not path.is_file() or path.stat().st_mtime_ns != ns]
        made_for = content["built_for"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False, f"unknown ({record} cannot be read); run 'asr doctor --compile'"
    if missing:
        return False, f"{len(missing)} of {len(content['files'])} are missing; run 'asr doctor --compile'"
    if changed or made_for != built_for():
        return False, "compiled for other sources, or another numba, Python or CPU; run 'asr doctor --compile'"
    return True, f"{len(content['files'])} functions in {Path(next(iter(content['files']), '.')).parents[1]}"


@contextlib.contextmanager
def compiling_notice() -> Iterator[None]:
    """`notice` for a block that may compile loops."""
    why = "compiling the search's loops for this machine; needed once, up to a minute"
    with notice(why) as show, watch_compiler(lambda number: show(f"{number} functions so far")):
        yield
