"""The structure of the package: imports run one way, and modules and functions stay small.

Read from the source with `ast`, so that imports inside functions count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from asr.kernels.memory import paused_collector

ROOT = Path(__file__).resolve().parents[1]
# Which packages each package may import, beside itself.
ALLOWED = {
    "errors": "",
    "locks": "",
    "old_paths": "",
    "distributed": "errors",
    "options": "errors",
    "text": "errors",
    "torch_archive": "errors",
    "serialization": "errors kernels text torch_archive",
    "kernels": "errors locks old_paths",
    "audio": "errors kernels old_paths options",
    "metrics": "errors text",
    "nist": "errors metrics text",
    "lm": "distributed errors kernels old_paths options serialization text",
    "graph": "errors kernels lm serialization text torch_archive",
    "hub": "errors locks serialization",
    "bundle": "errors graph hub kernels lm options serialization text",
    "datasets": "audio distributed errors serialization text",
    "models": "audio bundle datasets distributed errors graph kernels locks metrics options serialization text",
    "decoding": "bundle errors graph kernels lm old_paths options serialization text torch_archive",
    "pipeline": "decoding",
    "results": "decoding errors",
    "transcripts": "errors options results",
    "reports": "audio decoding errors metrics nist results serialization text",
    "ctc": "audio bundle decoding errors graph hub kernels lm models options results serialization text",
    "recognizer": "audio bundle ctc decoding errors graph kernels lm models options pipeline results serialization "
    "text",
    "fusion": "bundle ctc decoding errors kernels lm models options text",
    "transducer": "ctc errors fusion kernels lm models",
    "attention": "audio errors fusion lm models results",
    "streaming": "audio bundle decoding errors graph kernels lm models options recognizer results text",
    "server": "audio errors recognizer results streaming transcripts",
    "testing": "audio bundle decoding errors graph kernels lm models serialization text",
}
EVERYTHING = {"asr", "cli", "__main__"}  # these may import what they like
# Which modules may import the heavy packages.
ONLY_IN = {
    "k2": "asr.decoding.k2* asr.models.losses",
    "pytorch_lightning": "asr.*.datamodule asr.models.*training asr.lm.rnn.training asr.cli.train",
    "lhotse": "asr.datasets.*",
    "numba": "asr.kernels.*",
    "aiohttp": "asr.server",
    "triton": "asr.decoding.gpu.* asr.kernels.*_triton asr.lm.*_triton "
    "asr.lm.rnn.outputs.softmax_loss_triton asr.testing.*",
}  # fmt: skip
# Compiled loops take arrays one by one where they are not yet named tuples.
KERNELS = (
    "asr.ctc.prefix_kernel asr.kernels.* asr.decoding.cpu.* asr.decoding.gpu.kernels "
    "asr.decoding.gpu.cut_off asr.decoding.gpu.losing_arcs asr.decoding.gpu.spread asr.decoding.gpu.traceback "
    "asr.decoding.gpu.word_scores asr.lm.*_numba asr.lm.*_triton"
)
MOST_LINES, MOST_PARAMETERS = 800, 8
# This list may only shrink.
WITH_MORE_PARAMETERS = {
    "asr.ctc.torchaudio.ctc_decoder",  # the arguments of torchaudio's function
    "asr.ctc.transformers.batch_decode",  # and of transformers' method
    # Bundles have the arguments of these.
    "asr.audio.fbank.Fbank",
    "asr.models.conformer.Conformer",
    "asr.models.tdnnf.Tdnnf",
    # Users write these, most of their arguments only by keyword.
    "asr.ctc.decoder.CTCDecoder",
    "asr.lm.transformers.TransformerNetwork",
    "asr.recognizer.Recognizer",
}


@cache
def trees() -> dict[str, ast.Module]:
    """Each module of the package, by its dotted name."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "asr").rglob("*.py")}
    with paused_collector():
        return {name.removesuffix(".__init__"): ast.parse(path.read_text("utf-8")) for name, path in paths.items()}


@cache
def imported(module: str, at_import_only: bool = False) -> tuple[str, ...]:
    """The dotted names that a module imports, in functions as well unless told otherwise."""
    return tuple(import_names(trees()[module], at_import_only))


def import_names(tree: ast.Module, at_import_only: bool) -> Iterator[str]:
    pending: list[ast.AST] = [tree]
    while pending:  # through statements only: most of a tree is expressions, which import nothing
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (at_import_only and runs_later(node)):
            for block in ("body", "orelse", "handlers", "finalbody", "cases"):
                pending.extend(getattr(node, block, ()))


def runs_later(node: ast.AST) -> bool:
    """A function, or what is only for type checkers."""
    for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return for_types or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def own(names: Iterable[str]) -> set[str]:
    """The modules of the package among imported names; a name inside a module stands for the module."""
    found = set()
    for name in names:
        while name.startswith("asr") and name not in trees():
            name = name.rpartition(".")[0]
        found |= {name} & trees().keys()
    return found


def matches(module: str, patterns: str) -> bool:
    return any(fnmatch(module, pattern) for pattern in patterns.split())


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "asr"


def cycles(graph: dict[str, set[str]]) -> set[str]:
    """The nodes in circles, and between two circles: what is left when ends are taken away again and again."""
    left = {node: set(targets) & graph.keys() - {node} for node, targets in graph.items()}
    while True:
        imported = set().union(*left.values())
        stay = {node for node, targets in left.items() if targets & left.keys() and node in imported}
        if stay == left.keys():
            return stay
        left = {node: left[node] & stay for node in stay}


def test_packages_import_one_way() -> None:
    assert not cycles({package: set(allowed.split()) for package, allowed in ALLOWED.items()}), "the table itself"
    wrong = []
    for module in trees():
        package = package_of(module)
        if package not in EVERYTHING:
            assert package in ALLOWED, f"{package} is new: say in ALLOWED what it may import"
            allowed = {package, *ALLOWED[package].split()}
            wrong += [f"{module} -> {target}" for target in own(imported(module)) if package_of(target) not in allowed]
    assert not wrong


def module_graph() -> dict[str, set[str]]:
    """The modules that each imports, in functions and for type checkers as well: a reader follows these, too."""
    return {module: own(imported(module)) for module in trees()}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not cycles(module_graph())


@pytest.mark.parametrize("before", ["", "if TYPE_CHECKING:\n    ", "def later() -> None:\n    "])
def test_any_circle_is_noticed(before: str) -> None:
    graph = module_graph()
    for first, second in (("asr.audio.pcm", "asr.audio.io"), ("asr.decoding.cpu.lattice", "asr.decoding.lattice")):
        added = own(import_names(ast.parse(f"{before}import {second}"), at_import_only=False))
        assert {first, second} <= cycles({**graph, first: graph[first] | added})


@pytest.mark.parametrize("package", ONLY_IN)
def test_heavy_packages_stay_where_they_belong(package: str) -> None:
    users = [module for module in trees() if package in {name.split(".")[0] for name in imported(module)}]
    assert users, f"nothing imports {package}"
    assert [module for module in users if not matches(module, ONLY_IN[package])] == []


def test_loading_a_bundle_and_recognizing_import_no_training_package() -> None:
    seen, pending, outside = set(), ["asr.bundle", "asr.recognizer", "asr.streaming", "asr.cli.transcribe"], set()
    while pending:
        module = pending.pop()
        if module not in seen:
            seen.add(module)
            names = imported(module, at_import_only=True)
            pending += own(names)
            outside |= {name.split(".")[0] for name in names}
    assert not outside & {"pytorch_lightning", "lhotse", "k2", "torchaudio", "jsonargparse", "numba", "triton"}


def test_modules_have_at_most_800_lines() -> None:
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in (ROOT / "asr").rglob("*.py")}
    assert {path.name: count for path, count in lines.items() if count > MOST_LINES} == {}


@pytest.mark.slow
def test_functions_have_at_most_8_parameters() -> None:
    found = set()
    for module, tree in trees().items():
        if matches(module, KERNELS):
            continue
        owners = {
            part: node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for part in node.body
            if getattr(part, "name", "") == "__init__"
        }
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                positional = [*node.args.posonlyargs, *node.args.args]
                is_method = bool(positional) and positional[0].arg in ("self", "cls", "ctx")
                if len(positional) - is_method + len(node.args.kwonlyargs) > MOST_PARAMETERS:
                    found.add(f"{module}.{owners.get(node, node.name)}")
    assert found == WITH_MORE_PARAMETERS, "too many parameters, or the list is out of date"
