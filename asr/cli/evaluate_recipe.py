"""`asr evaluate --recipe`: several systems on several test sets, and a table of the results."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from asr.cli.main import Parser
from asr.cli.options import fetched_bundle_folder, found_rnn_lm
from asr.cli.printing import print_record
from asr.errors import AsrError
from asr.options import flag_of
from asr.reports.evaluation import Evaluation
from asr.reports.page import PageOptions, make_page
from asr.serialization import require_writable, write_whole_text
from asr.text.documents import parse_yaml, read_text

_RECIPES = Path(__file__).resolve().parents[2] / "recipes"
# Options that a recipe replaces.
_OF_RECIPES = ("hypotheses", "reference", "cuts", "compare", "export", "details")
# Options of a system that name files.
_FILES = ("ngram", "graph", "large_ngram", "lexicon", "hot_words", "words")
_FORM = "it needs 'sets' (NAME: manifest of 'asr prepare') and 'systems' (NAME: options of 'asr evaluate')"


@dataclass(frozen=True)
class Recipe:
    """Test sets and systems.

    Args:
        path: the file.
        sets: the manifest of each test set.
        systems: the options of each system, as on the command line.
    """

    path: Path
    sets: Mapping[str, str]
    systems: Mapping[str, str]

    @classmethod
    def read(cls, name: str) -> Recipe:
        """Reads a recipe, given by its file or by the name of a folder in `recipes/`.

        Raises:
            AsrError: there is none, or the file is not a recipe.
        """
        path = Path(name)
        if not path.is_file() and re.fullmatch(r"[\w-]+", name):
            path = _RECIPES / name / "evaluation.yaml"
        if not path.is_file():
            known = ", ".join(sorted(one.parent.name for one in _RECIPES.glob("*/evaluation.yaml")))
            raise AsrError(f"--recipe {name}: there is no such file{', and recipes/ has ' + known if known else ''}.")
        try:
            content = parse_yaml(read_text(path, "recipe"))
        except ValueError as error:
            raise AsrError(f"{path}: this is not valid YAML ({error}); {_FORM}.") from error
        parts = [content.get(key) if isinstance(content, dict) else None for key in ("sets", "systems")]
        for part in parts:
            if not isinstance(part, dict) or not part:
                raise AsrError(f"{path}: this is not an evaluation recipe; {_FORM}.")
            for key, value in part.items():
                # Names become names of files.
                if not re.fullmatch(r"[\w+.-][\w+. -]*", str(key)) or str(key).startswith("."):
                    raise AsrError(f"{path}: {key!r} is not a valid name; use letters, digits, spaces and + - . _")
                if not isinstance(value, (str, type(None))):
                    raise AsrError(f"{path}: {key!r} must be text; {_FORM}.")
        sets, systems = ({str(key): value or "" for key, value in part.items()} for part in parts)  # type: ignore[union-attr]
        return cls(path, sets, systems)


class _Parser(Parser):
    """Raises an error about a system's options."""

    def error(self, message: str) -> NoReturn:
        raise AsrError(message)


def run_recipe(
    args: argparse.Namespace,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    check: Callable[[argparse.Namespace], None],
    evaluate: Callable[[argparse.Namespace], int],
) -> int:
    """Recognizes each test set with each system, resuming an earlier run, and prints the table.

    For each test set, writes to the folder of `--output`: `SET/SYSTEM.json` (the input of `asr report`),
    `SET/SYSTEM.jsonl` (the recognition results) and `SET.html` (the report, with errors against time); also `table.md`
    and `table.json`.

    Args:
        args: the arguments of `asr evaluate`.
        add_arguments: adds these arguments to a parser.
        check: refuses options of recognition that have no effect with the others.
        evaluate: runs `asr evaluate` with one test set and one system.
    """
    if given := [name for name in _OF_RECIPES if getattr(args, name)]:
        raise AsrError(f"--recipe defines the sets and systems; leave out {given[0]}.")
    if not args.output:
        raise AsrError("--recipe writes tables, transcripts and reports; name their folder with --output.")
    recipe = Recipe.read(args.recipe)
    parser = _Parser(add_help=False)
    add_arguments(parser)
    # Wrong options are reported before anything is recognized.
    systems = {name: _arguments(args, recipe, name, parser, check) for name in recipe.systems}
    _score_alike([*systems.values()])
    present = {name: path for name, path in recipe.sets.items() if Path(path).is_file()}
    for name, path in recipe.sets.items():
        if name not in present:
            print(f"asr: {name} is left out: there is no {path}; make it with 'asr prepare'.", file=sys.stderr)
    if not present:
        raise AsrError(f"{recipe.path}: none of its manifests exists; make them with 'asr prepare'.")
    folder = Path(args.output)
    status, table = 0, list[dict[str, Any]]()
    for set_name, cuts in present.items():
        (folder / set_name).mkdir(parents=True, exist_ok=True)
        require_writable(folder / f"{set_name}.html", inputs=[cuts])
        evaluations = []
        for name, arguments in systems.items():
            print(f"{set_name}: {name}", file=sys.stderr)
            arguments.cuts = cuts
            status |= _evaluate(arguments, folder / set_name, name, evaluate)
            evaluations.append(Evaluation.load(arguments.details))
            table.append(_row(set_name, name, evaluations[-1]))
            write_whole_text(folder / "table.json", json.dumps(table, indent=1, ensure_ascii=False) + "\n")
        write_whole_text(folder / f"{set_name}.html", make_page(evaluations, PageOptions(title=set_name)).html)
    text = markdown(table)
    write_whole_text(folder / "table.md", text)
    if args.json:
        print_record(table, sys.stdout)
    else:
        print(text, end="")
    return status


def _arguments(
    args: argparse.Namespace,
    recipe: Recipe,
    name: str,
    parser: _Parser,
    check: Callable[[argparse.Namespace], None],
) -> argparse.Namespace:
    """The command line's options, overridden by those of the system."""
    given = copy.copy(args)
    given.recipe, given.json = None, False
    try:
        parsed: argparse.Namespace = parser.parse_args(shlex.split(recipe.systems[name]), copy.copy(given))
        for option in (*_OF_RECIPES, "recipe", "output", "resume", "json"):
            if getattr(parsed, option) != getattr(given, option):
                raise AsrError(f"{flag_of(option)} is not for a system, but for the whole recipe; leave it out")
        check(parsed)
        _require_inputs(parsed)
    except (AsrError, ValueError) as error:
        raise AsrError(f"{recipe.path}: the options of {name!r} are not valid: {str(error).rstrip('.')}.") from error
    return parsed


def _require_inputs(system: argparse.Namespace) -> None:
    """Fetches the bundles of a system, and checks that its files exist: the systems before it may take hours.

    Raises:
        AsrError: there is no such bundle or file.
    """
    if system.bundle is not None:
        fetched_bundle_folder(system.bundle)
    if system.rnn_lm is not None:
        found_rnn_lm(system.rnn_lm)
    for name in _FILES:
        path = getattr(system, name)
        if path is not None and not Path(path).exists():
            raise AsrError(f"{flag_of(name)} {path}: there is no such file")


def _score_alike(systems: Sequence[argparse.Namespace]) -> None:
    """Has all systems scored by the same rules: otherwise, their references would differ."""
    for name in ("ignore_case", "ignore_punctuation"):
        asked = any(getattr(system, name) for system in systems)
        for system in systems:
            setattr(system, name, asked)
    scoring = "sclite" if any(system.scoring == "sclite" for system in systems) else "auto"
    for system in systems:
        system.scoring = scoring


def _evaluate(
    arguments: argparse.Namespace, folder: Path, name: str, evaluate: Callable[[argparse.Namespace], int]
) -> int:
    """Recognizes and scores what has not been done yet; returns the exit code."""
    details, words = folder / f"{name}.json", folder / f"{name}.jsonl"
    arguments.details, arguments.output, arguments.resume = str(details), str(words), True
    before = (Evaluation.load(details), words.stat().st_size) if details.is_file() and words.is_file() else None
    with contextlib.redirect_stdout(io.StringIO()):
        status = evaluate(arguments)
    # A run that recognized nothing made no queries: keep the counts of the earlier one.
    if before is not None and before[1] == words.stat().st_size:
        earlier, scored = before[0], Evaluation.load(details)
        summary = {**scored.summary, "cache": earlier.summary.get("cache", {})}
        replace(scored, summary=summary, cache=earlier.cache, lattices=earlier.lattices).save(details)
    return status


def _row(set_name: str, system: str, evaluation: Evaluation) -> dict[str, Any]:
    summary = evaluation.summary
    cache = summary.get("cache") or {}
    # Summed over utterances, so that a resumed run counts those of earlier runs.
    seconds = sum(sum(one.seconds.values()) for one in evaluation.utterances)
    duration = sum(one.duration or 0.0 for one in evaluation.utterances)
    asked = cache.get("num_queries")
    return {
        "set": set_name,
        "system": system,
        "wer": summary["wer"],
        "wer_interval": summary["wer_interval"],
        "words": summary["words"],
        "utterances": summary["utterances"],
        "failed": summary.get("failed", 0),
        "real_time_factor": round(seconds / duration, 4) if duration else None,
        "hit_ratio": round(cache["edge_hit_ratio"], 4) if asked else None,
        "answered_without_hidden": round(cache["answered_without_hidden"], 4) if asked else None,
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table: systems by test sets.

    Each cell has the word error rate with its 95 % interval, the real-time factor and, for recurrent models, the share
    of word scores found in the cache.
    """
    sets = list(dict.fromkeys(row["set"] for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    cells = {(row["set"], row["system"]): _cell(row) for row in rows}
    lines = [" | ".join(["| system", *sets]) + " |", "| --- " * (1 + len(sets)) + "|"]
    lines += [" | ".join([f"| {name}", *(cells.get((one, name), "") for one in sets)]) + " |" for name in systems]
    sizes = {row["set"]: f"{row['set']} {row['words']:,} words of {row['utterances']:,} utterances" for row in rows}
    note = (
        "Word error rate in % with its 95 % interval; real-time factor; for recurrent language models the share of "
        "word scores found in the cache. " + "; ".join(sizes.values()) + "."
    )
    return "\n".join([*lines, "", note, ""])


def _cell(row: Mapping[str, Any]) -> str:
    if row["wer"] is None:
        return "no words"
    low, high = row["wer_interval"]
    parts = [f"{100 * row['wer']:.2f} ({100 * low:.2f} to {100 * high:.2f})"]
    if row["real_time_factor"] is not None:
        parts.append(f"{row['real_time_factor']:.3f}")
    if row["hit_ratio"] is not None:
        parts.append(f"{100 * row['hit_ratio']:.1f} %")
    return "; ".join(parts)
