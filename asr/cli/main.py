"""The `asr` command. Modules of subcommands are imported only when one is called."""

from __future__ import annotations

import argparse
import atexit
import copy
import difflib
import gc
import importlib
import io
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TextIO

from asr import __version__
from asr.errors import AsrError, printable
from asr.kernels.interrupts import interrupts_between_loops


class Command(NamedTuple):
    """A command.

    Attributes:
        help: the description of `--help`.
        add_arguments: adds its arguments to a parser.
        run: runs it and returns the exit code.
        common: as in `Parser`.
        details: as in `Parser`.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    common: Collection[str] = ()
    details: str = ""


# Command of one word or two -> (module, what it does), in the order in which a newcomer needs them.
COMMANDS: dict[str, tuple[str, str]] = {
    "transcribe": ("asr.cli.transcribe", "turn audio files or folders into words"),
    "serve": ("asr.cli.serve", "recognize live audio and recordings for clients on the network"),
    "doctor": ("asr.cli.doctor", "show what works on this machine, and what to install for the rest"),
    "prepare": ("asr.cli.prepare", "read a corpus (AN4, LibriSpeech, speechocean762, ...) and write manifests"),
    "lm vocabulary": ("asr.cli.lm", "choose the vocabulary that graph and language models share"),
    "lm ngram": ("asr.cli.lm", "estimate, prune or convert an n-gram language model"),
    "lm rnn": ("asr.cli.lm", "export a trained recurrent language model, or measure one"),
    "lm perplexity": ("asr.cli.lm", "measure how well an n-gram model predicts a text"),
    "graph": ("asr.cli.graph", "compile lexicon and small n-gram into a decoding graph"),
    "chain": ("asr.cli.chain", "align corpora and prepare training by lattice-free MMI"),
    "fit": ("asr.cli.train", "train an acoustic or a language model from a YAML recipe"),
    "validate": ("asr.cli.train", "run the validation of a recipe on a checkpoint"),
    "test": ("asr.cli.train", "run the test of a recipe on a checkpoint"),
    "predict": ("asr.cli.train", "keeps no results and is refused; use transcribe or evaluate"),
    "bundle": ("asr.cli.bundle", "assemble trained parts into a bundle, which transcribe and torch.hub load"),
    "bundle list": ("asr.cli.bundle", "list the bundles on this machine"),
    "bundle fetch": ("asr.cli.bundle", "fetch a bundle by name, https address or hf:owner/name"),
    "bundle info": ("asr.cli.bundle", "show the contents of a bundle: parts, sizes, decoding options, card"),
    "calibrate": ("asr.cli.calibrate", "fit a bundle's word confidences on speech that it was not trained on"),
    "rescore": ("asr.cli.rescore", "rescore lattices and n-best lists of other recognizers"),
    "export": ("asr.cli.export", "write a bundle's acoustic model to an ONNX or TorchScript file"),
    "evaluate": ("asr.cli.evaluate", "compute error rates of transcripts, or recognize a manifest and score it"),
    "report": ("asr.cli.report", "make a page about evaluations: tables, curves, alignments with audio"),
}


_EXAMPLES = """\
examples:
  asr doctor                                      what works on this machine
  asr transcribe talk.flac                        words
  asr transcribe folder/ --output words.jsonl     JSON Lines with times and scores
  asr evaluate words.jsonl --reference reference.txt
  asr fit --config recipes/an4/am.yaml            train

'asr COMMAND --help' explains a command. Results go to stdout, progress and warnings to stderr.
Exit codes: 0 success, 1 some inputs failed and the others were processed, 2 the request itself is wrong.
"""


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [
        "usage: asr COMMAND [OPTIONS]",
        "",
        "Speech recognition with large language models.",
        "",
    ]
    lines += ["commands:", *(f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items())]
    lines += ["", "options:", "  -h, --help    show this text", "  --version     show the version", "", _EXAMPLES]
    return "\n".join(lines)


def _group_help(name: str, commands: Mapping[str, str]) -> str:
    width = max(map(len, commands)) + 2
    lines = [f"usage: asr {name} COMMAND [OPTIONS]", "", "commands:"]
    lines += [f"  {known:<{width}}{text}" for known, text in commands.items()]
    return "\n".join([*lines, "", f"'asr {name} COMMAND --help' explains a command."])


# What argparse takes for a value, not for an option; by default, not -1e-1 and -inf.
NEGATIVE_NUMBER = re.compile(r"-((\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|inf(inity)?|nan)$", re.IGNORECASE)
_EMPTY_OPTION = re.compile(r"--[\w-]+=")


def command_named(name: str) -> Command:
    """Imports a command. A module of several commands has them in `SUBCOMMANDS`, any other is itself the command.

    Raises:
        AsrError: a package that it needs is not installed.
    """
    module = _import_command(COMMANDS[name][0])
    if hasattr(module, "SUBCOMMANDS"):
        command: Command = module.SUBCOMMANDS[name]
        return command
    common, details = getattr(module, "COMMON", ()), getattr(module, "DETAILS", "")
    return Command(module.HELP, module.add_arguments, module.run, common, details)


_HELP_OPTIONS = ("-h", "--help", "--help-all")


class _HelpAll(argparse.Action):
    """`--help-all`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        print(parser.format_help_all(), end="")
        parser.exit()


def _in_brief(action: argparse.Action) -> argparse.Action:
    """An option whose help is only the first clause."""
    brief = copy.copy(action)
    brief.help = str(action.help).partition(";")[0]
    return brief


class Parser(argparse.ArgumentParser):
    """argparse's parser, with `NEGATIVE_NUMBER`, errors of one line, and help of two lengths.

    Args:
        common: the options that `--help` shows, by `dest`, each with the first clause of its help, where all would fill
            several screens; `--help-all` shows all. Empty: both show all.
        details: what `--help-all` says after the description.
    """

    def __init__(self, *args: Any, common: Collection[str] = (), details: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = NEGATIVE_NUMBER
        self._common, self._details = common, details
        if common:
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all options in detail")
        else:
            self.add_argument("--help-all", action="help", help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Leaves out the usage of argparse, which fills the screen and hides the message."""
        help_option = "--help-all" if self._common else "--help"
        self.exit(2, f"{self.prog}: error: {message}{self._similar(message)}; see '{self.prog} {help_option}'.\n")

    def _similar(self, message: str) -> str:
        """The option that a misspelled one may stand for."""
        wrong = re.match(r"unrecognized arguments:.*?(--[^\s=]+)", message)
        known = [flag for action in self._actions for flag in action.option_strings if action.help != argparse.SUPPRESS]
        similar = difflib.get_close_matches(wrong[1], known, 1, cutoff=0.75) if wrong else []
        return f" (did you mean {similar[0]}?)" if similar else ""

    def format_usage(self) -> str:
        """The usage, without the options if there are many."""
        if not self._common:
            return super().format_usage()
        formatter = self.formatter_class(prog=f"{self.prog} [OPTIONS]")
        formatter.add_usage(None, [action for action in self._actions if not action.option_strings], [])
        return formatter.format_help()

    def format_help(self) -> str:
        """The text of `--help`."""
        if not self._common:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        num_hidden = 0
        for group in self._action_groups:
            shown = [action for action in group._group_actions if self._is_common(action)]
            formatter.start_section(group.title)
            formatter.add_arguments(map(_in_brief, shown))
            formatter.end_section()
            num_hidden += sum(action.help != argparse.SUPPRESS for action in group._group_actions) - len(shown)
        formatter.add_text(f"'{self.prog} --help-all' shows {num_hidden} more, and the details of these.")
        return f"{self.format_usage()}\n{formatter.format_help()}"

    def _is_common(self, action: argparse.Action) -> bool:
        return not action.option_strings or action.dest in {"help", "help_all", *self._common}

    def format_help_all(self) -> str:
        """The text of `--help-all`."""
        whole = copy.copy(self)
        whole._common = ()
        whole.usage = self.format_usage().partition(": ")[2].strip()
        whole.description = f"{self.description}\n\n{self._details}"
        return whole.format_help()


def _command_parser(name: str, command: Command) -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"asr {name}",
        description=command.help,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        common=command.common,
        details=command.details,
    )
    command.add_arguments(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs one command.

    Args:
        arguments: the command line without the program's name.

    Returns:
        the exit code.

    Raises:
        AsrError: as the command raises it.
    """
    if not arguments or arguments[0] in (*_HELP_OPTIONS, "help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(f"asr {__version__}")
        return 0
    num_words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    name, rest = " ".join(arguments[:num_words]), list(arguments[num_words:])
    group = {known: text for known, (_, text) in COMMANDS.items() if known.startswith(f"{name} ")}
    if group and name not in COMMANDS and (not rest or rest[0] in _HELP_OPTIONS):
        # As argparse does it: help that was asked for goes to stdout, a missing subcommand is an error.
        print(_group_help(name, group), file=sys.stdout if rest else sys.stderr)
        return 0 if rest else 2
    if name not in COMMANDS:
        unknown = " ".join(arguments[: 2 if group else 1])
        if os.access(unknown, os.F_OK):
            raise AsrError(
                f"asr: {unknown!r} is not a command; 'asr transcribe {unknown}' turns recordings into words."
            )
        raise AsrError(f"asr: there is no command {unknown!r}; there are: {', '.join(COMMANDS)}.")
    if any(not one or _EMPTY_OPTION.fullmatch(one) for one in rest):
        raise AsrError(f"asr {name}: an argument is empty, perhaps a shell variable that is not set; give it a value.")
    if COMMANDS[name][0] == "asr.cli.train":
        # LightningCLI parses the whole command line itself, including the subcommand.
        return int(_import_command("asr.cli.train").run([name, *rest]))
    command = command_named(name)
    if group and not rest:
        print(_group_help(name, {name: COMMANDS[name][1], **group}), file=sys.stderr)
        return 2
    return command.run(_command_parser(name, command).parse_args(rest))


_EXTRA_OF = dict.fromkeys(("pytorch_lightning", "jsonargparse", "lhotse", "tensorboard", "torchmetrics"), "train")
_EXTRA_OF |= {"kaldifst": "graph", "k2": "k2", "onnxruntime": "onnx", "av": "media", "aiohttp": "serve"}


def how_to_install(package: str) -> str:
    """How to install a missing package, in a checkout and for an installed wheel."""
    extra = f"[{_EXTRA_OF[package]}]" if package in _EXTRA_OF else ""
    return f"run scripts/setup, or pip install 'onepass-asr{extra}'"


def _import_command(module_name: str) -> ModuleType:
    was_enabled, imports_torch = gc.isenabled(), "torch" not in sys.modules
    gc.disable()  # Python would look several times for cycles among the objects of torch, which stay
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] == "asr":
            raise
        raise AsrError(
            f"this command needs the Python package {missing!r}, which is not installed; "
            f"{how_to_install(missing.partition('.')[0])}."
        ) from error
    finally:
        if imports_torch:
            gc.freeze()  # nor will it later
            atexit.register(gc.unfreeze)  # libraries such as nanobind report what Python does not collect at its end
        if was_enabled:
            gc.enable()


class _WarningLines(logging.Handler):
    """Prints what modules warn of as errors are printed; progress bars may have replaced `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        print("asr:", printable(record.getMessage()), file=sys.stderr)


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Within the block, the package's warnings are lines on stderr, unless the program handles them itself."""
    logger, handler = logging.getLogger("asr"), _WarningLines(logging.WARNING)
    if logger.hasHandlers():
        yield
        return
    package, usual = str(Path(__file__).resolve().parents[1]), warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if os.path.realpath(filename).startswith(package):
            print("asr:", printable(str(message)), file=sys.stderr)
        else:
            usual(message, category, filename, lineno, file, line)

    logger.addHandler(handler)
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual
        logger.removeHandler(handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point: prints an AsrError as one line and returns the exit code."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not if a program has replaced it
            stream.reconfigure(errors="backslashreplace")
    try:
        with interrupts_between_loops(), _warnings_as_lines():
            code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()  # errors of writing must show here, where they are reported
        _end_at_once(arguments)
        if arguments is None and "pytorch_lightning" not in sys.modules:  # with it, more is to be closed
            sys.stderr.flush()
            os._exit(code)  # to free all objects would take most of a second
        return code
    except AsrError as error:
        # Messages of libraries may have several lines.
        print("asr: error:", *(printable(line.strip()) for line in str(error).splitlines()), file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        _end_at_once(arguments)
        print("asr: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # The reader of our output, such as head, has closed it.
        code = 0
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
        print(
            f"asr: error: there is not enough memory ({reason}); "
            "reduce the amount of work at a time, for example with --batch-seconds or --cache-mb.",
            file=sys.stderr,
        )
        code = 2
    except OSError as error:
        what = f"{error.filename} cannot be read or" if error.filename is not None else "standard output cannot be"
        print(f"asr: error: {what} written ({error.strerror or error}).", file=sys.stderr)
        code = 2
    _discard_output()
    return code


def _end_at_once(arguments: Sequence[str] | None) -> None:
    """Lets Ctrl-C end a process that is about to end, without traceback; not one that gave arguments to `main`."""
    # Shells let background jobs ignore it.
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _open_closed_streams() -> None:
    """Opens the standard streams that the shell has closed, which are None. What is written to stdout then fails."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115


def _lacks_memory(error: Exception) -> bool:
    """Whether the host or a GPU ran out of memory; torch has no exception class for the host, and CUDA's libraries
    speak of their status, such as CUBLAS_STATUS_ALLOC_FAILED."""
    is_ours = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_ours or any(sign in str(error) for sign in ("can't allocate memory", "out of memory", "ALLOC_FAILED"))


def _discard_output() -> None:
    """Discards what cannot be written to stdout; otherwise Python tries again when it exits, and complains."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
