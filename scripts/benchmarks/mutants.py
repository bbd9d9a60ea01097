"""Mutation testing: breaks a module in one place at a time and checks whether its tests fail.

    scripts/bench mutants --fast                     # 40 mutants of asr/lm and asr/decoding, by the fast tests
    scripts/bench mutants --per-module 5 --seed 1 --modules asr/lm/cached asr/decoding/nbest.py

A mutant has another comparison, operation, number or truth value, `max` instead of `min`, or one statement less. First
all tests run without a mutant, and the functions that each calls are recorded; recordings are kept until the code
changes. A mutant's tests are those that call its function, the most specific ones first, up to 15 CPU seconds. Loops
compiled by numba are skipped, because their tests compare them with the same code uncompiled and each mutant would have
to be compiled. What became of each mutant is kept, too, so that the same command continues a run that was ended. The
share of mutants killed by tests is stored for `scripts/bench onepass --quick`. Survivors are listed; each is a missing
test or a change without effect. The latter are explained in `scripts.benchmarks.mutants_explained`; they are not run,
and the share is of the others.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

from asr.errors import AsrError
from scripts.benchmarks.inputs import ROOT, argument_parser, cache_folder, with_progress
from scripts.benchmarks.mutants_explained import EXPLAINED, SIZES, WITH_A_GPU, WITH_K2
from scripts.benchmarks.mutants_tests import Function, Outcomes, Reach, Worker, record, state_of_code, test_files
from scripts.benchmarks.report import provenance, table

_T = TypeVar("_T")
DEFAULT_MODULES = ("asr/lm", "asr/decoding")
_NO_MODULES = ("asr/decoding/gpu/", "asr/lm/ngram/lookup_triton.py", "asr/old_paths.py")
"""Kernels, whose mutants are in `kernel_checks.py` and `host_checks.py`, and a list of names."""

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_NUMBERS = re.compile(r"[\d.]+ -> [\d.]+")
_NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "argmin": "argmax", "argmax": "argmin"}


@dataclass(frozen=True)
class Mutant:
    """A change of a module: its path, which node of the syntax tree is changed and how, the line's number and text, the
    node's text before and after, and the first line and name of the function that it is in, if any."""

    module: str
    place: int
    kind: int
    line: int
    text: str
    change: str
    function: int | None
    name: str

    def tree(self) -> ast.Module:
        """The module's syntax tree with the change."""
        tree = ast.parse((ROOT / self.module).read_text(encoding="utf-8"))
        _change(next(node for place, node in enumerate(ast.walk(tree)) if place == self.place), self.kind)
        return ast.fix_missing_locations(tree)


def mutants_of(module: str) -> list[Mutant]:
    """All mutants of a module."""
    source = (ROOT / module).read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    left_out = {id(part) for node in ast.walk(tree) for one in _without_effect(node) for part in ast.walk(one)}
    function_of = {
        id(part): (min(one.lineno for one in (function, *function.decorator_list)), function.name)
        for function in _functions(tree)
        for part in ast.walk(function)
    }
    found = []
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in left_out:
            continue
        for kind in range(_num_changes(node)):
            broken = _own_lists(node)
            if _change(broken, kind):
                part = _part(node, kind)
                before, after = (ast.unparse(one).partition("\n")[0] for one in (part, _part(broken, kind)))
                line: int = part.lineno  # type: ignore[attr-defined]
                text, function = lines[line - 1].strip(), function_of.get(id(node), (None, ""))
                found.append(Mutant(module, place, kind, line, text, f"{before} -> {after}", *function))
    return found


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """The functions and methods; those inside a function belong to it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        else:
            yield from _functions(node)


def explanation(mutant: Mutant) -> str | None:
    """Why the mutant is not expected to fail a test; None if it is."""
    if mutant.name in WITH_A_GPU.get(mutant.module, ()):
        return "only GPUs use the function"
    if mutant.name in WITH_K2.get(mutant.module, ()) and find_spec("k2") is None:
        return "k2 is not installed"
    is_number = mutant.function is None and _NUMBERS.fullmatch(mutant.change)
    if is_number and mutant.text.partition(" = ")[0] in SIZES.get(mutant.module, ()):
        return "how much is done at once"
    return EXPLAINED.get(mutant.module, {}).get((mutant.text, mutant.change))


def _without_effect(node: ast.AST) -> list[ast.AST]:
    """The parts of a node that change nothing or cannot be tested here.

    Type annotations are not run, `zip(strict=)` and `dataclass(frozen=, eq=)` only catch mistakes, and loops that numba
    has compiled are taken from its cache, as are the module's numbers that they use.
    """
    if isinstance(node, ast.keyword) and node.arg in ("strict", "frozen", "eq"):
        return [node.value]
    if isinstance(node, ast.Module):
        loops = [one for one in node.body if isinstance(one, ast.FunctionDef) and _is_loop(one)]
        used = {part.id for one in loops for part in ast.walk(one) if isinstance(part, ast.Name)}
        numbers = [
            one
            for one in node.body
            if isinstance(one, ast.Assign) and any(isinstance(to, ast.Name) and to.id in used for to in one.targets)
        ]
        return [*loops, *numbers]
    found = (getattr(node, name, None) for name in ("annotation", "returns"))
    return [one for one in found if isinstance(one, ast.AST)]


def _is_loop(function: ast.FunctionDef) -> bool:
    """Whether numba compiles the function."""
    kinds = [arg.annotation for arg in function.args.args]
    decorators = [one.func for one in function.decorator_list if isinstance(one, ast.Call)]
    marks = [one.id for one in (*kinds, *decorators) if isinstance(one, ast.Name)]
    return "Any" in marks or "kernel" in marks


def _own_lists(node: ast.AST) -> ast.AST:
    """A copy that shares all but its lists, which is what `_change` changes."""
    fields = {name: list(value) if isinstance(value, list) else value for name, value in ast.iter_fields(node)}
    return type(node)(**fields)


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
        before = node.value
        node.value = not before if isinstance(before, bool) else before + 1
        return bool(node.value != before)  # large numbers stay
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


def modules_of(paths: Sequence[str]) -> list[str]:
    """The modules that files and folders stand for.

    Raises:
        AsrError: a path does not exist.
    """
    found = []
    for path in paths:
        if not (ROOT / path).exists():
            raise AsrError(f"no module or folder {path}; name them from the checkout's folder, such as asr/lm.")
        files = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("*.py"))
        found += [file.relative_to(ROOT).as_posix() for file in files]
    return [module for module in dict.fromkeys(found) if not module.startswith(_NO_MODULES)]


class Runner:
    """Finds out which tests call which functions, and runs those of a mutant.

    Args:
        num_jobs: number of processes.
        fast: whether slow tests are left out.
    """

    def __init__(self, num_jobs: int, fast: bool) -> None:
        self._processes = [Worker() for _ in range(num_jobs)]
        self._free = list(self._processes)
        self._pool = ThreadPoolExecutor(num_jobs)
        self._marked = "not slow and not gpu" if fast else "not gpu"
        self._reach = Reach({})
        self._outcomes: Outcomes | None = None

    def record(self, paths: Sequence[str]) -> None:
        """Runs the tests in files and folders without any mutant, unless their recordings are up to date.

        Raises:
            AsrError: tests fail.
        """
        state = state_of_code()
        tests: dict[str, tuple[float, frozenset[Function]]] = {}
        files = test_files(paths)
        done = self._pool.map(
            lambda file: self._with_process(lambda one: record(one, file, self._marked, state)), files
        )
        for some in with_progress(done, "tests without mutants", len(files)):
            tests |= some
        self._reach = Reach(tests)
        self._outcomes = Outcomes(state, files, self._marked)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def killed(self, mutants: Sequence[Mutant]) -> Iterator[bool]:
        """Whether tests fail with each mutant, after `record`.

        Raises:
            AsrError: the tests were ended from outside.
        """
        return self._pool.map(self._is_killed, mutants)

    def _is_killed(self, mutant: Mutant) -> bool:
        assert self._outcomes is not None
        place = mutant.module, mutant.place, mutant.kind
        known = self._outcomes.of(place)
        if known is None:
            known = self._run(mutant)
            self._outcomes.add(place, known)
        return known

    def _run(self, mutant: Mutant) -> bool:
        tests, seconds = self._reach.tests_of(mutant.module, mutant.function)
        if not tests:
            return False
        made = {"mutant": dataclasses.asdict(mutant), "cpu_s": 30 + 5 * int(seconds)}
        status = self._with_process(lambda one: one.run(tests, self._marked, **made))
        if status in (-signal.SIGINT, -signal.SIGTERM):
            raise AsrError("the tests were ended from outside; the same command continues.")
        return status != 0

    def _with_process(self, task: Callable[[Worker], _T]) -> _T:
        process = self._free.pop()
        try:
            return task(process)
        finally:
            self._free.append(process)


def recorded() -> dict[str, Any]:
    """The share of the last run, with its number of mutants and its commit; None without one."""
    path = cache_folder() / "mutants.json"
    if not path.is_file():
        return {"mutants_killed_share": None}
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return known


def _show(progress: str) -> None:
    """Replaces the line of progress on stderr."""
    print(f"\r{progress:<78}\r", end="", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("mutants", __doc__)
    parser.add_argument(
        "--modules", nargs="+", default=DEFAULT_MODULES, metavar="PATH",
        help=f"files or folders to break (default: {' '.join(DEFAULT_MODULES)})",
    )  # fmt: skip
    parser.add_argument(
        "--tests", nargs="+", default=["tests"], metavar="PATH", help="files or folders of tests (default: tests)"
    )
    parser.add_argument("--number", type=int, default=40, help="number of mutants, drawn at random (default: 40)")
    parser.add_argument("--per-module", type=int, metavar="NUMBER", help="draw this many of each module instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants at a time (default: 2)")
    parser.add_argument("--fast", action="store_true", help="leave out slow tests, like scripts/test --fast")
    args = parser.parse_args(argv)
    groups = [mutants_of(module) for module in modules_of(args.modules)]
    number = args.per_module
    if number is None:
        groups, number = [list(itertools.chain(*groups))], args.number
    drawn = [mutant for group in groups for mutant in random.Random(args.seed).sample(group, min(number, len(group)))]
    chosen = [mutant for mutant in drawn if explanation(mutant) is None]
    killed: Counter[str] = Counter()
    runner = Runner(args.jobs, args.fast)
    try:
        runner.record(args.tests)
        begin = time.monotonic()
        for number, (mutant, is_killed) in enumerate(zip(chosen, runner.killed(chosen), strict=True), start=1):
            killed[mutant.module] += is_killed
            if not is_killed:
                _show("")
                print(f"survived: {mutant.module}:{mutant.line}: {mutant.text}: {mutant.change}", flush=True)
            minutes = (time.monotonic() - begin) / 60 / number * (len(chosen) - number)
            _show(f"{number} of {len(chosen)} mutants, {killed.total()} killed, about {minutes:.0f} min left")
        _show("")
    finally:
        runner.close()
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
