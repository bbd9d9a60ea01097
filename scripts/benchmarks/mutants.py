"""Mutation testing: breaks a module in one place at a time and checks whether its tests fail.

    scripts/bench mutants                     # 40 mutants; some minutes per hundred, two at a time
    scripts/bench mutants --modules asr/lm/cached/eviction.py --number 20 --seed 1
    scripts/bench mutants --per-module 20 --jobs 1 --fast

A mutant has another comparison, operation, number or truth value, `max` instead of `min`, or one statement less. It
works on a copy of the checkout. Loops compiled by numba are skipped, because their tests compare them with the same
code uncompiled and each mutant would have to be compiled. The share of mutants killed by tests is stored for
`scripts/bench onepass --quick`. Survivors are listed; each is a missing test or a change without effect. The latter are
explained in `scripts.benchmarks.mutants_explained`; they are not run, and the share is of the others.
"""

from __future__ import annotations

import ast
import copy
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asr.errors import AsrError
from scripts.benchmarks.inputs import ROOT, argument_parser, cache_folder
from scripts.benchmarks.mutants_explained import EXPLAINED
from scripts.benchmarks.report import provenance, table

_CACHED = ("tests/lm/cached",)
_OUTPUTS = (
    "tests/lm/rnn/test_output_layers.py", "tests/lm/rnn/test_few_words.py", "tests/lm/rnn/test_training.py",
    "tests/lm/rnn/test_measure.py",
)  # fmt: skip
_SEARCH = ("tests/decoding/test_token_passing.py", "tests/decoding/test_online.py")
_LATTICES = ("tests/decoding/test_word_lattice.py", "tests/decoding/test_lattice_records.py")
_LFMMI = ("tests/models/test_lfmmi.py", "tests/models/test_lfsmbr.py", "tests/models/test_denominator.py")
_CHAIN = (
    "tests/models/test_chain_training.py", "tests/models/test_chunks.py", "tests/models/test_adaptation.py",
    "tests/models/test_state_tying.py",
)  # fmt: skip
_STREAMS = ("tests/models/test_export_streaming.py", "tests/models/test_ensemble.py", "tests/models/test_external.py")
_PREFIXES = ("tests/ctc/test_prefix_search.py", "tests/ctc/test_pyctcdecode.py", "tests/ctc/test_spelled_words.py")
TESTS = {
    "asr/lm/cached/approximations.py": (*_CACHED, "tests/recognizer/test_settings.py"),
    "asr/lm/cached/engine.py": _CACHED,
    "asr/lm/cached/eviction.py": _CACHED,
    "asr/lm/cached/outputs.py": _CACHED,
    "asr/lm/cached/states.py": _CACHED,
    "asr/lm/cached/trie.py": _CACHED,
    "asr/lm/rnn/maxent.py": (*_OUTPUTS, "tests/lm/rnn/test_huffman.py"),
    "asr/lm/rnn/model.py": (*_OUTPUTS, "tests/lm/rnn"),
    "asr/lm/rnn/outputs/nce.py": (*_OUTPUTS, "tests/lm/rnn/test_log_z.py"),
    "asr/lm/combine.py": ("tests/lm/test_combine.py", "tests/lm/cached/test_retain.py"),
    "asr/lm/contexts.py": ("tests/lm/test_contexts.py", "tests/lm/test_combine.py", "tests/lm/cached/test_retain.py"),
    "asr/decoding/frame.py": (
        *_SEARCH, "tests/decoding/test_recombination.py", "tests/decoding/test_selection.py",
        "tests/decoding/test_frame_backends.py", "tests/decoding/test_chunk_backends.py",
        "tests/decoding/test_rescoring.py",
    ),
    "asr/decoding/backtrace.py": (*_SEARCH, *_LATTICES, "tests/decoding/test_words.py"),
    "asr/decoding/lattice.py": (*_LATTICES, "tests/decoding/test_nbest.py", "tests/decoding/test_rescoring.py"),
    "asr/decoding/words.py": ("tests/decoding/test_words.py", "tests/decoding/test_nbest.py"),
    "asr/decoding/chunks.py": ("tests/decoding/test_chunks.py",),
    "asr/decoding/nbest.py": (
        "tests/decoding/test_nbest.py", "tests/decoding/test_second_pass.py", "tests/lm/rnn/test_few_words.py",
    ),
    "asr/decoding/rescoring.py": (
        "tests/decoding/test_rescoring.py", "tests/decoding/test_second_pass.py", "tests/decoding/test_selection.py",
    ),
    "asr/graph/build.py": ("tests/graph",),
    "asr/graph/context.py": ("tests/graph", *_CHAIN),
    "asr/graph/decoding_graph.py": ("tests/graph", "tests/decoding/test_log_probs.py"),
    "asr/graph/denominator_graph.py": _LFMMI,
    "asr/graph/epsilon_removal.py": ("tests/graph",),
    "asr/graph/fst.py": ("tests/graph",),
    "asr/graph/imported.py": ("tests/graph",),
    "asr/graph/openfst.py": ("tests/graph",),
    "asr/graph/topology.py": ("tests/graph", *_LFMMI, *_CHAIN),
    "asr/graph/transition_model.py": ("tests/graph",),
    "asr/text/ctc_tokens.py": ("tests/text", "tests/ctc/test_tokens.py", "tests/ctc/test_bundles.py"),
    "asr/text/lexicon.py": ("tests/text", "tests/graph", "tests/decoding/test_words.py"),
    "asr/text/normalize.py": ("tests/text",),
    "asr/text/symbols.py": ("tests/text", "tests/graph", "tests/lm/test_combine.py"),
    "asr/audio/decoder_messages.py": ("tests/audio",),
    "asr/audio/fbank.py": ("tests/audio",),
    "asr/audio/io.py": ("tests/audio", "tests/robust/test_odd_audio.py"),
    "asr/audio/media.py": ("tests/audio",),
    "asr/audio/resample.py": ("tests/audio",),
    "asr/audio/segments.py": ("tests/audio",),
    "asr/ctc/decoder.py": ("tests/ctc",),
    "asr/ctc/frames.py": ("tests/ctc/test_frames.py", *_PREFIXES),
    "asr/ctc/graph_search.py": ("tests/ctc/test_decoder.py",),
    "asr/ctc/graphs.py": ("tests/ctc/test_decoder.py",),
    "asr/ctc/language_models.py": ("tests/ctc/test_decoder.py", *_PREFIXES),
    "asr/ctc/phones_to_letters.py": ("tests/ctc/test_phones_to_letters.py",),
    "asr/ctc/prefix_beam.py": _PREFIXES,
    "asr/ctc/prefix_search.py": _PREFIXES,
    "asr/ctc/pyctcdecode.py": ("tests/ctc/test_pyctcdecode.py", "tests/ctc/test_transformers.py"),
    "asr/ctc/spelled_words.py": ("tests/ctc/test_decoder.py", *_PREFIXES),
    "asr/ctc/stream.py": ("tests/ctc/test_decoder.py", *_PREFIXES),
    "asr/ctc/torchaudio.py": ("tests/ctc/test_torchaudio.py",),
    "asr/ctc/transformers.py": ("tests/ctc/test_transformers.py",),
    "asr/ctc/word_models.py": ("tests/ctc/test_decoder.py", *_PREFIXES),
    "asr/ctc/word_trie.py": ("tests/ctc/test_decoder.py", *_PREFIXES),
    "asr/models/adaptation.py": ("tests/models/test_adaptation.py",),
    "asr/models/alignment.py": ("tests/models/test_ctc_alignment.py", "tests/models/test_training_parts.py"),
    "asr/models/chain_corpus.py": _CHAIN,
    "asr/models/chain_preparation.py": (*_CHAIN, "tests/models/test_denominator.py"),
    "asr/models/chain_training.py": _CHAIN,
    "asr/models/chunks.py": _CHAIN,
    "asr/models/hybrid_alignment.py": ("tests/models/test_hybrid_alignment.py",),
    "asr/models/lfmmi.py": (*_LFMMI, "tests/models/test_adaptation.py"),
    "asr/models/losses.py": ("tests/models/test_objectives.py", "tests/models/test_networks.py"),
    "asr/models/phone_alignment.py": ("tests/models/test_phone_alignment.py",),
    "asr/models/state_tying.py": ("tests/models/test_state_tying.py",),
    "asr/models/tdnnf.py": ("tests/models/test_tdnnf.py", "tests/models/test_transfer.py", *_STREAMS),
    "asr/models/windows.py": _STREAMS,
    "asr/lm/offload.py": ("tests/lm/rnn/test_host_rnn_lm.py", "tests/lm/ngram/test_host_ngram.py"),
    "asr/metrics.py": ("tests/metrics", "tests/decoding/test_words.py"),
    "asr/nist.py": ("tests/metrics",),
    "asr/results.py": (
        "tests/test_results.py", "tests/test_transcripts.py", "tests/recognizer/test_settings.py",
        "tests/decoding/test_nbest.py",
    ),
    "asr/streaming.py": ("tests/recognizer/test_streaming.py", "tests/recognizer/test_settings.py"),
}  # fmt: skip
"""Module -> what should notice that it is broken."""

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "argmin": "argmax", "argmax": "argmin"}
_FIRST_TIMEOUT = 900
_TIMEOUT = 240
"""Seconds; without a mutant, loops may have to be compiled."""
_NOTHING_SELECTED = 5
"""Exit status of pytest."""


@dataclass(frozen=True)
class Mutant:
    """A change of a module: its path, which node of the syntax tree is changed and how, the line's number and text, and
    the node's text before and after."""

    module: str
    place: int
    kind: int
    line: int
    text: str
    change: str

    def source(self) -> str:
        """The module's source with the change."""
        tree = ast.parse((ROOT / self.module).read_text(encoding="utf-8"))
        _change(next(node for place, node in enumerate(ast.walk(tree)) if place == self.place), self.kind)
        return ast.unparse(tree)


def mutants_of(module: str) -> list[Mutant]:
    """All mutants of a module."""
    source = (ROOT / module).read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    left_out = {id(part) for node in ast.walk(tree) for one in _without_effect(node) for part in ast.walk(one)}
    found = []
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in left_out:
            continue
        for kind in range(_num_changes(node)):
            broken = copy.deepcopy(node)
            if _change(broken, kind):
                part = _part(node, kind)
                before, after = (ast.unparse(one).partition("\n")[0] for one in (part, _part(broken, kind)))
                line: int = part.lineno  # type: ignore[attr-defined]
                found.append(Mutant(module, place, kind, line, lines[line - 1].strip(), f"{before} -> {after}"))
    return found


def explanation(mutant: Mutant) -> str | None:
    """Why the mutant is not expected to fail a test; None if it is."""
    return EXPLAINED.get(mutant.module, {}).get((mutant.text, mutant.change))


def _without_effect(node: ast.AST) -> list[ast.AST]:
    """The parts of a node that change nothing or cannot be tested here.

    Type annotations are not run, `zip(strict=)` and `dataclass(frozen=, eq=)` only catch mistakes, and functions with
    arguments of type `Any` are loops for numba.
    """
    if isinstance(node, ast.keyword) and node.arg in ("strict", "frozen", "eq"):
        return [node.value]
    if isinstance(node, ast.Module):
        functions = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        kinds = {id(one): [arg.annotation for arg in one.args.args] for one in functions}
        return [
            one for one in functions if any(isinstance(kind, ast.Name) and kind.id == "Any" for kind in kinds[id(one)])
        ]
    found = (getattr(node, name, None) for name in ("annotation", "returns"))
    return [one for one in found if isinstance(one, ast.AST)]


def _part(node: ast.AST, kind: int) -> ast.AST:
    """The part that a change of this kind affects: the node, or one of its statements."""
    is_body = isinstance(node, (ast.FunctionDef, ast.If, ast.For, ast.While))
    return node.body[kind] if is_body else node  # type: ignore[attr-defined, no-any-return]


def _num_changes(node: ast.AST) -> int:
    if isinstance(node, (ast.FunctionDef, ast.If, ast.For, ast.While)):
        return len(node.body)
    return len(node.ops) if isinstance(node, ast.Compare) else 1


def _change(node: ast.AST, kind: int) -> bool:
    """Changes a node in place; False if there is nothing to change."""
    if isinstance(node, ast.Compare) and type(node.ops[kind]) in _COMPARED:
        node.ops[kind] = _COMPARED[type(node.ops[kind])]()
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _CALCULATED:
        node.op = _CALCULATED[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
        if isinstance(node.op, ast.Not):
            node.operand = ast.UnaryOp(ast.Not(), node.operand)
        else:
            node.op = ast.UAdd()
    elif isinstance(node, ast.Attribute) and node.attr in _NAMES:
        node.attr = _NAMES[node.attr]
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        node.id = _NAMES[node.id]
    elif isinstance(node, (ast.FunctionDef, ast.If, ast.For, ast.While)):
        gone = node.body[kind]
        if not isinstance(gone, (ast.Expr, ast.AugAssign)) or isinstance(getattr(gone, "value", None), ast.Constant):
            return False
        node.body[kind] = ast.Pass()
    else:
        return False
    return True


# Forks once per order, so that libraries are imported once and nothing of a mutant stays. An order is a time limit in
# seconds, a selection by marks and tests; the answer is the exit status, negative for a signal.
_TEST_SERVER = """
import json, os, signal, sys
import hypothesis, numpy, pytest, torch
try:
    import numba
except ImportError:
    pass
for order in sys.stdin:
    seconds, marked, *tests = json.loads(order)
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", marked, *tests]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Copies:
    """Copies of the checkout, one for each job, each with a process that runs tests in it.

    Args:
        folder: where to put them.
        number: of jobs.
        fast: whether slow tests are left out.
    """

    def __init__(self, folder: Path, number: int, fast: bool) -> None:
        self._marked = ("not slow",) if fast else ("not slow", "slow")
        self._free = []
        for target in (folder / str(job) for job in range(number)):
            for name in ("asr", "tests", "scripts", "recipes"):
                # With their times, so that what numba has compiled stays valid.
                shutil.copytree(ROOT / name, target / name)
            for name in ("pyproject.toml", "hubconf.py"):
                if (ROOT / name).is_file():
                    shutil.copy2(ROOT / name, target / name)
            # CI: Hypothesis draws the same examples for every mutant.
            environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1", "CI": "1"}
            server = subprocess.Popen(
                [sys.executable, "-c", _TEST_SERVER], cwd=target, env=environment, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )  # fmt: skip
            self._free.append((target, server))
        self._servers = [server for _, server in self._free]
        self._changes = itertools.count(1)

    def close(self) -> None:
        for server in self._servers:
            server.communicate()

    def killed(self, mutant: Mutant | None, module: str) -> bool:
        """Whether tests fail with the mutant, or without any; slow ones run after the others."""
        folder, server = self._free.pop()
        assert server.stdin is not None
        assert server.stdout is not None
        path = folder / module
        try:
            if mutant is not None:
                path.write_text(mutant.source(), encoding="utf-8")
                # Python takes a file of the same size and second for unchanged.
                change = next(self._changes)
                os.utime(path, (change, change))
            seconds = _FIRST_TIMEOUT if mutant is None else _TIMEOUT
            for marked in self._marked:
                print(json.dumps([seconds, marked, *TESTS[module]]), file=server.stdin, flush=True)
                if int(server.stdout.readline()) not in (0, _NOTHING_SELECTED):
                    return True
            return False
        finally:
            shutil.copy2(ROOT / module, path)
            self._free.append((folder, server))


def run(mutants: Sequence[Mutant], num_jobs: int, fast: bool) -> Iterator[tuple[Mutant, bool]]:
    """Each mutant, and whether the tests killed it.

    Raises:
        AsrError: the tests fail without any mutant.
    """
    modules = list(dict.fromkeys(mutant.module for mutant in mutants))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_jobs) as pool:
        copies = Copies(Path(folder), num_jobs, fast)
        try:
            for module, fails in zip(modules, pool.map(lambda one: copies.killed(None, one), modules), strict=True):
                if fails:
                    raise AsrError(f"the tests of {module} fail without a mutant; fix them first.")
            yield from zip(mutants, pool.map(lambda one: copies.killed(one, one.module), mutants), strict=True)
        finally:
            copies.close()


def recorded() -> dict[str, Any]:
    """The share of the last run, with its number of mutants and its commit; None without one."""
    path = cache_folder() / "mutants.json"
    if not path.is_file():
        return {"mutants_killed_share": None}
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return known


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("mutants", __doc__)
    parser.add_argument("--modules", nargs="+", choices=list(TESTS), default=list(TESTS), metavar="FILE")
    parser.add_argument("--number", type=int, default=40, help="number of mutants, drawn at random (default: 40)")
    parser.add_argument("--per-module", type=int, metavar="NUMBER", help="draw this many of each module instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants at a time (default: 2)")
    parser.add_argument("--fast", action="store_true", help="leave out slow tests, like scripts/test --fast")
    args = parser.parse_args(argv)
    groups = [mutants_of(module) for module in args.modules]
    if args.per_module is None:
        groups = [list(itertools.chain(*groups))]
    drawn = [
        mutant
        for group in groups
        for mutant in random.Random(args.seed).sample(group, min(args.per_module or args.number, len(group)))
    ]
    chosen = [mutant for mutant in drawn if explanation(mutant) is None]
    killed: Counter[str] = Counter()
    for mutant, is_killed in run(chosen, args.jobs, args.fast):
        killed[mutant.module] += is_killed
        if not is_killed:
            print(f"survived: {mutant.module}:{mutant.line}: {mutant.text}: {mutant.change}", flush=True)
    all_drawn, tried = (Counter(mutant.module for mutant in some) for some in (drawn, chosen))
    rows = [
        {"module": module, "drawn": all_drawn[module], "explained": all_drawn[module] - tried[module],
         "killed": killed[module], "survived": tried[module] - killed[module]}
        for module in all_drawn
    ]  # fmt: skip
    table("Mutants", rows)
    found = {
        "mutants_killed_share": killed.total() / max(1, len(chosen)),
        "mutants": len(chosen),
        "mutants_explained": len(drawn) - len(chosen),
        "mutants_from": provenance(["mutants", *argv]),
    }
    cache_folder().mkdir(parents=True, exist_ok=True)
    (cache_folder() / "mutants.json").write_text(json.dumps(found), encoding="utf-8")
    print(json.dumps(found))
    return 0
