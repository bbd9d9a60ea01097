"""The documentation is true: links lead somewhere, commands parse, examples run.

Nothing here needs a network or a corpus. A fenced `sh` block in README.md, CONTRIBUTING.md or docs/ is run as written
unless an HTML comment `<!-- not run: REASON -->` stands right above it.
"""

from __future__ import annotations

import argparse
import ast
import doctest
import functools
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from asr.bundle import Bundle
from asr.cli.main import COMMANDS, command_named
from asr.errors import AsrError
from asr.kernels.jit import triton_is_new_enough
from asr.models.acoustic_model import AcousticModel

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "recipes").rglob("*.md"),
        *(ROOT / "scripts").rglob("*.md"),
        *(ROOT / "checkpoints").glob("*/*.md"),
    ]
)
# Written by people for people who have nothing but the checkout: all that they show must work.
GUIDES = [page for page in PAGES if page.parent == ROOT or page.parent == ROOT / "docs"]
PYTHON_GUIDES = [page for page in GUIDES if "\n```python\n" in page.read_text("utf-8")]
SHELL_GUIDES = [page for page in GUIDES if re.search(r"(?m)^```sh$", page.read_text("utf-8"))]


class Block(NamedTuple):
    """A code block of a page; `line` counts from 1, `reason` says why it is not run, if it is not."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None


_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+) -->")


@functools.cache
def blocks(page: Path) -> tuple[Block, ...]:
    """All fenced and indented code blocks of a page."""
    found: list[Block] = []
    lines = page.read_text("utf-8").splitlines()
    idx, previous, reason = 0, "", None
    while idx < len(lines):
        line = lines[idx]
        match = re.match(r"^(?P<indent> *)```(?P<language>\w*)", line)
        if match is not None:
            begin = idx + 1
            idx = next(i for i in range(begin, len(lines)) if lines[i].strip() == "```")
            text = "\n".join(row[len(match["indent"]) :] for row in lines[begin:idx])
            found.append(Block(page, begin + 1, match["language"], text, reason))
        elif line.startswith("    ") and not previous.strip():
            begin = idx
            while idx + 1 < len(lines) and lines[idx + 1].startswith("    "):
                idx += 1
            text = "\n".join(row[4:] for row in lines[begin : idx + 1])
            found.append(Block(page, begin + 1, "", text, reason))
        if line.strip():
            not_run = _NOT_RUN.fullmatch(line.strip())
            reason = None if not_run is None else not_run["reason"]
        previous = lines[idx]
        idx += 1
    return tuple(found)


def prose(page: Path) -> str:
    """A page's text without its fenced code blocks."""
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    found: dict[str, int] = {}
    slugs = set()
    for heading in re.findall(r"(?m)^#{1,6} +(.+?) *$", prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        slugs.add(slug if slug not in found else f"{slug}-{found[slug]}")
        found[slug] = found.get(slug, 0) + 1
    return slugs


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_no_page_has_both_sides_of_a_merge(page: Path) -> None:
    assert not re.search(r"(?m)^(<{7}|={7}|>{7})( |$)", page.read_text("utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page if not path else (page.parent / path).resolve()
        assert linked.exists(), f"{page.name} links to {target}, which does not exist"
        assert linked.is_relative_to(ROOT), f"{page.name} links to {target}, outside the checkout"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}, where no heading has this name"


def _mentioned(page: Path) -> Iterator[str]:
    """What stands in backquotes and in code blocks."""
    yield from re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))
    for block in blocks(page):
        yield from block.text.split()


_FILE = re.compile(r"^(asr|scripts|recipes|checkpoints|tests|constraints|docs)/[\w./-]+$")
# What commands on a page write.
_WRITTEN = ("docs/api",)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_files_named_on_a_page_exist(page: Path) -> None:
    for word in _mentioned(page):
        name = word.strip("()[],;:'\"").rstrip(".")
        if _FILE.match(name) and not name.startswith(_WRITTEN):
            assert (ROOT / name).exists(), f"{page.name} names {name}, which does not exist"


_DOTTED = re.compile(r"^asr(\.\w+)+$")


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_modules_and_classes_named_on_a_page_exist(page: Path) -> None:
    for word in _mentioned(page):
        name = word.partition("(")[0].rstrip(".,")
        if _DOTTED.match(name):
            assert _exists(name), f"{page.name} names {name}, which does not exist"


def _exists(dotted: str) -> bool:
    parts = dotted.split(".")
    for num_parts in range(len(parts), 0, -1):
        module_name = ".".join(parts[:num_parts])
        try:
            if importlib.util.find_spec(module_name) is None:
                continue
        except ModuleNotFoundError:
            continue
        if num_parts == len(parts):
            return True
        try:
            found: object = importlib.import_module(module_name)
        except ModuleNotFoundError as error:  # a module of an extra that is not installed here
            return (error.name or "").partition(".")[0] != "asr"
        for part in parts[num_parts:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("page", PYTHON_GUIDES, ids=names(PYTHON_GUIDES))
def test_what_python_examples_import_exists(page: Path) -> None:
    """The quick part of `test_python_examples_of_a_page_run`."""
    for block in blocks(page):
        if block.language == "python":
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("asr"):
                    for alias in node.names:
                        assert _exists(f"{node.module}.{alias.name}"), f"{page.name}: {node.module} has no {alias.name}"


def shell_lines(text: str) -> Iterator[str]:
    """The commands of a block, continuation lines joined."""
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield stripped


def asr_commands(block: Block) -> Iterator[list[str]]:
    """The arguments of each `asr ...` in a block of shell commands."""
    if block.language not in ("", "sh"):
        return
    variables: dict[str, str] = {}
    for line in shell_lines(block.text):
        assigned = re.fullmatch(r'(\w+)="(.*)"', line)
        if assigned is not None:
            variables[assigned[1]] = assigned[2]
        for name, value in variables.items():
            line = line.replace(f"${name} ", f"{value} ")
        if not re.search(r"(^|[|&;=] *|^\w+=\S+ )asr ", line):
            continue
        words = shlex.split(line, comments=True)
        command: list[str] | None = None
        for word in [*words, ";"]:
            if word in ("|", "&&", ";", "<", ">", "2>"):
                if command is not None:
                    yield command
                command = None
            elif word == "asr":
                command = []
            elif command is not None:
                command.append(word)


class _RefusingParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise AssertionError(message)


COMMAND_PAGES = [page for page in PAGES if any(True for block in blocks(page) for _ in asr_commands(block))]


def _parse(arguments: list[str]) -> None:
    """Parses a command line as `asr` would, without running it."""
    if not arguments or arguments[0] in ("--help", "--version"):
        return
    num_words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    name, rest = " ".join(arguments[:num_words]), arguments[num_words:]
    assert name in COMMANDS, f"there is no command {name}"
    if COMMANDS[name][0] == "asr.cli.train":
        for position, argument in enumerate(rest):
            if argument == "--config":
                assert (ROOT / rest[position + 1]).is_file(), f"there is no recipe {rest[position + 1]}"
        return
    parser = _RefusingParser(prog=f"asr {name}")
    command_named(name).add_arguments(parser)
    if "--help" not in rest:
        parser.parse_args(rest)


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=names(COMMAND_PAGES))
def test_asr_commands_on_a_page_are_complete(page: Path) -> None:
    for block in blocks(page):
        for arguments in asr_commands(block):
            try:
                _parse(arguments)
            except (AssertionError, argparse.ArgumentError, AsrError) as error:
                pytest.fail(f"{page.name}, line {block.line}: asr {' '.join(arguments)}: {error}")


def training_commands(page: Path) -> list[list[str]]:
    """The commands of a page that override options of a recipe."""
    found = (arguments for block in blocks(page) for arguments in asr_commands(block))
    return [words for words in found if words[:2] == ["fit", "--config"] and len(words) > 3]


TRAINING_PAGES = [page for page in COMMAND_PAGES if training_commands(page)]


@pytest.mark.one_stack
@pytest.mark.slow
@pytest.mark.parametrize("page", TRAINING_PAGES, ids=names(TRAINING_PAGES))
def test_options_of_training_on_a_page_exist(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pytorch_lightning")
    train = importlib.import_module("asr.cli.train")
    monkeypatch.chdir(ROOT)
    for arguments in training_commands(page):
        with pytest.raises(SystemExit) as ended:
            train.run([*arguments, "--print_config"])
        assert ended.value.code == 0, " ".join(arguments)
        assert "hint" not in capsys.readouterr().err, " ".join(arguments)


_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Of LightningCLI, which takes the fields of classes, and of other programs.
_OTHER_OPTIONS = {"--model", "--data", "--trainer", "--ckpt_path", "--logdir", "--nodes", "--ntasks-per-node"}
_OTHER_OPTIONS |= {"--acoustic-scale", "--strict", "--print_config"}


def _options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from _options_of(part)


@functools.cache
def _known_options() -> frozenset[str]:
    known = {"--help-all", *_OTHER_OPTIONS}
    for name, (module, _) in COMMANDS.items():
        if module != "asr.cli.train":
            parser = argparse.ArgumentParser()
            command_named(name).add_arguments(parser)
            known.update(_options_of(parser))
    for path in (ROOT / "scripts").rglob("*"):
        if path.is_file() and path.suffix in ("", ".py"):
            known.update(_OPTION.findall(path.read_text("utf-8")))
    return frozenset(known)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_options_named_on_a_page_exist(page: Path) -> None:
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page)):
        assert not set(_OPTION.findall(code)) - _known_options(), f"{page.name}: {code}"


@pytest.mark.parametrize("page", [ROOT / "README.md"], ids=["README.md"])
def test_the_readme_is_short(page: Path) -> None:
    assert len(page.read_text("utf-8").splitlines()) <= 120


def _modules_with_doctests() -> list[str]:
    found = []
    for path in [*sorted((ROOT / "asr").rglob("*.py")), ROOT / "hubconf.py"]:
        # Examples that need a bundle or a network are skipped; a module of those alone has nothing to run.
        if re.search(r">>> (?!.*# doctest: \+SKIP)(?!import )", path.read_text("utf-8")):
            found.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("module_name", _modules_with_doctests())
def test_examples_in_docstrings_run(module_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = importlib.import_module(module_name)
    outcome = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.one_stack
@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON_GUIDES, ids=names(PYTHON_GUIDES))
def test_python_examples_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """All blocks of a page make one program, which runs by itself: examples may change registries."""
    program = []
    for block in blocks(page):
        if block.language == "python" and block.reason is None:
            # Error messages then name the page's own lines.
            program.append("\n" * (block.line - 1 - sum(part.count("\n") for part in program)) + block.text + "\n")
    path = tmp_path / f"{page.stem}.py"
    path.write_text("".join(program), "utf-8")
    _run([sys.executable, str(path)], _scratch(tmp_path / "folder"))


@pytest.mark.one_stack
@pytest.mark.slow
@pytest.mark.parametrize("page", SHELL_GUIDES, ids=names(SHELL_GUIDES))
def test_shell_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """All blocks of a page are one shell session."""
    script = "\n".join(block.text for block in blocks(page) if block.language == "sh" and block.reason is None)
    _run(["bash", "-e", "-u", "-o", "pipefail", "-c", script], _scratch(tmp_path / "folder"))


@pytest.mark.one_stack
@pytest.mark.slow
def test_the_readme_shows_what_the_demo_prints(tmp_path: Path) -> None:
    shown = next(block.text for block in blocks(ROOT / "README.md") if block.text.startswith("$ scripts/demo "))
    clips = [f"scripts/demo_clips{name}" for name in ("", "/reference.txt")]
    command = [sys.executable, "-m", "scripts.benchmarks", "modes", clips[0], "--reference", clips[1]]
    printed = iter(_run(command, _scratch(tmp_path / "folder")).splitlines())
    for line in shown.splitlines():
        if line.strip(". ") and not line.startswith("$"):
            assert line in printed, f"the demo does not print {line!r}, or not in this order"


@pytest.mark.one_stack
@pytest.mark.slow
def test_the_hot_words_of_the_page_correct_its_clips(tmp_path: Path) -> None:
    page = ROOT / "docs" / "decoding.md"
    script = next(block.text for block in blocks(page) if block.language == "sh" and "--hot-words" in block.text)
    spoken = (ROOT / "scripts" / "demo_clips" / "reference.txt").read_text("utf-8").splitlines()
    printed = _run(["bash", "-e", "-c", script], _scratch(tmp_path / "folder")).splitlines()
    assert len(printed) == 2
    for line in printed:
        name, _, text = line.partition(".flac: ")
        assert f"{Path(name).name} {text}" in spoken


def _scratch(folder: Path) -> Path:
    """A folder that looks like the checkout, into which commands may write."""
    folder.mkdir()
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name != "asr":  # imported from the checkout, loops compiled
            (folder / entry.name).symlink_to(entry)
    launcher = folder / ".bin" / "asr"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m asr "$@"\n', "utf-8")
    launcher.chmod(0o755)
    python = folder / ".bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', "utf-8")
    python.chmod(0o755)
    return folder


def _run(command: list[str], folder: Path) -> str:
    """Runs a command that must succeed, and returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder / '.bin'}:{os.environ['PATH']}"}
    outcome = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert outcome.returncode == 0, f"{outcome.stdout[-2000:]}\n{outcome.stderr[-4000:]}"
    return outcome.stdout


_TRACE = """
import os, sys, threading
import asr, torch
from asr.audio.io import read_audio

torch.set_num_threads(1)
recognizer = asr.load("librispeech")
second = read_audio("scripts/demo_clips/river.flac", 16000)[4480:20480]
recognizer(second, 16000)  # compiles, and imports what is imported late
recognizer.to("cpu")
recognizer.prepare()  # empty caches again
package = os.path.dirname(asr.__file__) + os.sep
files = set()

def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(package):
        files.add(frame.f_code.co_filename.removeprefix(package))

threading.setprofile(note)
sys.setprofile(note)
recognizer(second, 16000)
sys.setprofile(None)
print("files:", *sorted(files))
"""


def test_the_architecture_names_every_package_and_module_at_the_top() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    section = text[text.index("\n## Where to find what") : text.index("\n## Import order")]
    modules = {path.name for path in (ROOT / "asr").glob("*.py") if not path.name.startswith("_")}
    names = modules | {f"{path.parent.name}/" for path in (ROOT / "asr").glob("*/__init__.py")}
    assert {name for name in names if name not in section} == set()


@pytest.mark.slow
def test_the_walk_through_names_the_files_that_run(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    section = text[text.index("\n## One second of audio") : text.index("\n## Glossary")]
    named = set(re.findall(r"\]\(\.\./asr/([\w/]+\.py)\)", section))
    (tmp_path / "trace.py").write_text(_TRACE, "utf-8")
    printed = _run([sys.executable, str(tmp_path / "trace.py")], _scratch(tmp_path / "folder"))
    # Python asks old_paths.py for every package that is not installed.
    traced = set(printed.partition("files:")[2].split()) - {"old_paths.py"}
    assert traced - named == set(), "these files run and are not in the walk-through"
    # Some files run only on some processors and versions of torch.
    assert len(named - traced) <= 3, f"these files are in the walk-through and do not run: {named - traced}"


@pytest.mark.slow
def test_the_walk_through_has_the_shapes_of_one_second() -> None:
    model = AcousticModel.from_bundle(Bundle.load(ROOT / "checkpoints" / "librispeech"))
    second, num_samples = torch.zeros(1, 16000), torch.tensor([16000])
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    features, log_prob = model.features(second, num_samples)[0], model(second)[0]
    assert f"{tuple(features.shape)}" in text
    assert f"{tuple(log_prob.shape)}" in text
    assert f"16,000 samples become {log_prob.shape[1]} rows" in text


@pytest.mark.slow
@pytest.mark.skipif(not triton_is_new_enough(), reason="without Triton's modules the reference is not whole")
def test_the_api_reference_builds(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    _run([str(ROOT / "scripts" / "build_docs"), str(tmp_path / "api")], _scratch(tmp_path / "folder"))
    text_of = {path: path.read_text("utf-8") for path in (tmp_path / "api").rglob("*.html")}
    built = {path.relative_to(tmp_path / "api").with_suffix("") for path in text_of}
    named = {"asr/recognizer", "asr/lm/interface", "asr/decoding/token_passing", "asr/decoding/gpu/kernels"}
    assert set(map(Path, named)) <= built
    # Links between the pages, and to places in them.
    anchors = {path: set(re.findall(r'id="([^"]*)"', text)) for path, text in text_of.items()}
    for page, text in text_of.items():
        for path, anchor in re.findall(r'href="([^":#?]*\.html)?(?:#([^"]*))?"', text):
            linked = page if not path else (page.parent / path).resolve()
            assert linked in anchors, f"{page}: {path}"
            assert not anchor or linked == page or anchor in anchors[linked], f"{page}: {path}#{anchor}"
