"""Mutation testing: breaks a module in one place at a time and checks whether its tests fail.

    scripts/bench mutants                     # 40 mutants; some minutes per hundred, two at a time
    scripts/bench mutants --modules asr/lm/cached/eviction.py --number 20 --seed 1

A mutant has another comparison, operation, number or truth value, `max` instead of `min`, or one statement less. It
works on a copy of the checkout. Loops compiled by numba are skipped, because their tests compare them with the same
code uncompiled and each mutant would have to be compiled. The share of mutants killed by tests is stored for
`scripts/bench onepass --quick`. Survivors are listed; each is a missing test or a change without effect.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asr.errors import AsrError
from scripts.benchmarks.inputs import ROOT, argument_parser, cache_folder
from scripts.benchmarks.report import provenance

_CACHED = ("tests/lm/cached",)
TESTS = {
    "asr/lm/cached/approximations.py": (*_CACHED, "tests/recognizer/test_settings.py"),
    "asr/lm/cached/engine.py": _CACHED,
    "asr/lm/cached/eviction.py": _CACHED,
    "asr/lm/cached/outputs.py": _CACHED,
    "asr/lm/cached/states.py": _CACHED,
    "asr/lm/cached/trie.py": _CACHED,
    "asr/lm/rnn/maxent.py": ("tests/lm/rnn",),
    "asr/lm/rnn/model.py": ("tests/lm/rnn",),
    "asr/lm/rnn/outputs/nce.py": ("tests/lm/rnn",),
    "asr/decoding/chunks.py": ("tests/decoding/test_chunks.py",),
    "asr/decoding/nbest.py": ("tests/decoding/test_nbest.py", "tests/decoding/test_second_pass.py"),
    "asr/decoding/rescoring.py": ("tests/decoding/test_rescoring.py", "tests/decoding/test_second_pass.py"),
}
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
_TIMEOUT = 900.0


@dataclass(frozen=True)
class Mutant:
    """A change of a module: its path, which node of the syntax tree is changed and how, the line, and both texts."""

    module: str
    place: int
    kind: int
    line: int
    change: str

    def source(self) -> str:
        """The module's source with the change."""
        tree = ast.parse((ROOT / self.module).read_text(encoding="utf-8"))
        _change(next(node for place, node in enumerate(ast.walk(tree)) if place == self.place), self.kind)
        return ast.unparse(tree)


def mutants_of(module: str) -> list[Mutant]:
    """All mutants of a module."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    annotations = {id(part) for node in ast.walk(tree) for one in _annotations(node) for part in ast.walk(one)}
    found = []
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in annotations:
            continue
        for kind in range(_num_changes(node)):
            broken = copy.deepcopy(node)
            if _change(broken, kind):
                before, after = (ast.unparse(_part(one, kind)) for one in (node, broken))
                found.append(Mutant(module, place, kind, getattr(node, "lineno", 0), f"{before}  ->  {after}"))
    return found


def _annotations(node: ast.AST) -> list[ast.AST]:
    """The type annotations at a node, which are never run."""
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


class Copies:
    """Copies of the checkout, one for each job.

    Args:
        folder: where to put them.
        number: of jobs.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._free = [folder / str(job) for job in range(number)]
        for target in self._free:
            for name in ("asr", "tests", "scripts", "recipes"):
                # With their times, so that what numba has compiled stays valid.
                shutil.copytree(ROOT / name, target / name)
            for name in ("pyproject.toml", "hubconf.py"):
                if (ROOT / name).is_file():
                    shutil.copy2(ROOT / name, target / name)

    def killed(self, mutant: Mutant | None, module: str) -> bool:
        """Whether tests fail with the mutant, or without any."""
        folder = self._free.pop()
        path = folder / module
        try:
            if mutant is not None:
                path.write_text(mutant.source(), encoding="utf-8")
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
            environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
            try:
                done = subprocess.run(
                    [*command, *TESTS[module]], cwd=folder, env=environment, capture_output=True, timeout=_TIMEOUT,
                    check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return True  # it hangs
            return done.returncode != 0
        finally:
            shutil.copy2(ROOT / module, path)
            self._free.append(folder)


def run(mutants: Sequence[Mutant], num_jobs: int) -> Iterator[tuple[Mutant, bool]]:
    """Each mutant, and whether the tests killed it.

    Raises:
        AsrError: the tests fail without any mutant.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_jobs) as pool:
        copies = Copies(Path(folder), num_jobs)
        for module, fails in zip(
            dict.fromkeys(mutant.module for mutant in mutants),
            pool.map(lambda module: copies.killed(None, module), dict.fromkeys(one.module for one in mutants)),
            strict=True,
        ):
            if fails:
                raise AsrError(f"the tests of {module} fail without a mutant; fix them first.")
        yield from zip(mutants, pool.map(lambda mutant: copies.killed(mutant, mutant.module), mutants), strict=True)


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
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants at a time (default: 2)")
    args = parser.parse_args(argv)
    everything = [mutant for module in args.modules for mutant in mutants_of(module)]
    chosen = random.Random(args.seed).sample(everything, min(args.number, len(everything)))
    num_killed = 0
    for mutant, is_killed in run(chosen, args.jobs):
        num_killed += is_killed
        if not is_killed:
            print(f"survived: {mutant.module}:{mutant.line}: {mutant.change.splitlines()[0]}", flush=True)
    found = {
        "mutants_killed_share": num_killed / max(1, len(chosen)),
        "mutants": len(chosen),
        "mutants_from": provenance(["mutants", *argv]),
    }
    cache_folder().mkdir(parents=True, exist_ok=True)
    (cache_folder() / "mutants.json").write_text(json.dumps(found), encoding="utf-8")
    print(json.dumps(found))
    return 0
