"""The `asr` command: one file a command, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType

from asr import __version__
from asr.errors import AsrError

# command, of one word or two -> (module, what it does), in the order in which a newcomer needs them.
COMMANDS: dict[str, tuple[str, str]] = {
    "transcribe": ("asr.cli.transcribe", "turn audio files or folders into words"),
    "doctor": ("asr.cli.doctor", "show what this installation can do, and what to install for the rest"),
    "prepare": ("asr.cli.prepare", "make manifests from a corpus folder (AN4, LibriSpeech, speechocean762, ...)"),
    "lm vocabulary": ("asr.cli.lm_vocabulary", "choose the word list that graph and language models share"),
    "lm ngram": ("asr.cli.lm_ngram", "estimate, prune or convert an n-gram language model"),
    "lm rnn": ("asr.cli.lm_rnn", "export a trained recurrent language model, or measure one"),
    "lm perplexity": ("asr.cli.lm_perplexity", "measure how well an n-gram model predicts a text"),
    "graph": ("asr.cli.graph", "compile lexicon and small n-gram into a decoding graph"),
    "fit": ("asr.cli.train", "train an acoustic or a language model from a YAML recipe"),
    "validate": ("asr.cli.train", "run the validation of a recipe"),
    "test": ("asr.cli.train", "run the test of a recipe"),
    "predict": ("asr.cli.train", "run the prediction of a recipe"),
    "bundle": ("asr.cli.bundle", "put trained parts together into one bundle that transcribe and torch.hub load"),
    "evaluate": ("asr.cli.evaluate", "error rates of transcripts, or of a manifest that is decoded first"),
}


_EXAMPLES = """\
examples:
  asr doctor                                      what works here
  asr transcribe talk.flac --bundle checkpoints/librispeech
  asr transcribe folder/ --bundle checkpoints/librispeech --jsonl --output words.jsonl
  asr evaluate words.jsonl --reference reference.txt
  asr fit --config recipes/an4/am.yaml            train

'asr COMMAND --help' explains a command. Results go to stdout, progress and warnings to stderr.
Exit codes: 0 all well, 1 some inputs failed (the others are done), 2 the request itself is wrong.
"""


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [
        "usage: asr COMMAND [OPTIONS]",
        "",
        "Speech recognition with a large language model inside the search.",
        "",
    ]
    lines += ["commands:", *(f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items())]
    lines += ["", "options:", "  -h, --help    show this text", "  --version     show the version", "", _EXAMPLES]
    return "\n".join(lines)


_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")


def _command_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"asr {name}", description=module.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    # argparse takes -1e-1 for an option.
    parser._negative_number_matcher = _NEGATIVE_NUMBER
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs one command; AsrError passes through.

    Args:
        arguments: the command line without the program's name.

    Returns:
        the exit code.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(f"asr {__version__}")
        return 0
    num_words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    name, rest = " ".join(arguments[:num_words]), list(arguments[num_words:])
    if name not in COMMANDS:
        raise AsrError(f"asr: there is no command {' '.join(arguments[:2])!r}; there are: {', '.join(COMMANDS)}.")
    module = _import_command(COMMANDS[name][0])
    if module.__name__ == "asr.cli.train":
        # LightningCLI reads the whole command line itself, `fit` and its kin included.
        return int(module.run([name, *rest]))
    return int(module.run(_command_parser(name, module).parse_args(rest)))


def _import_command(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] == "asr":
            raise
        raise AsrError(
            f"this command needs the Python package {missing!r}, which is not installed; "
            "run scripts/setup, or pip install 'asr[all]'."
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point: prints an AsrError as one sentence and returns the exit code."""
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()  # what cannot be written shows while it can be told
        return code
    except AsrError as error:
        # What libraries say may be several lines.
        print("asr: error:", *(line.strip() for line in str(error).splitlines()), file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("asr: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # The reader of our output (head, less) has seen enough.
        code = 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"asr: error: {where}the system refuses to read or write ({error.strerror or error}).", file=sys.stderr)
        code = 2
    _forget_output()
    return code


def _forget_output() -> None:
    """Drops what cannot be written to stdout: Python would try once more when it ends, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
