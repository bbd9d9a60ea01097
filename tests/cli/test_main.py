from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import soundfile

from asr.cli import main
from asr.cli.options import bundle_folder, device_from
from asr.errors import AsrError
from asr.testing.tones import RATE, tones

ROOT = Path(__file__).resolve().parents[2]


def test_help_names_every_command(capsys):
    assert main.main([]) == 0
    help_text = capsys.readouterr().out
    assert all(f"  {name} " in help_text for name in main.COMMANDS)
    assert main.main(["--help"]) == 0
    assert capsys.readouterr().out == help_text


@pytest.mark.parametrize("command", [name for name in main.COMMANDS if main.COMMANDS[name][0] != "asr.cli.train"])
def test_every_command_explains_itself(capsys, command):
    pytest.importorskip("kaldifst")
    with pytest.raises(SystemExit) as leaving:
        main.main([*command.split(), "--help"])
    assert leaving.value.code == 0
    assert f"usage: asr {command}" in capsys.readouterr().out


def _printed(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main.main(arguments)
    assert leaving.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["transcribe", "evaluate", "serve"])
def test_help_of_commands_with_many_options(capsys, command):
    known = main.command_named(command)
    parser = argparse.ArgumentParser()
    known.add_arguments(parser)
    visible = [one for one in parser._actions if one.option_strings and one.help != argparse.SUPPRESS]
    flags = {one.dest: one.option_strings[-1] for one in visible if one.dest != "help"}
    assert set(known.common) <= set(flags), "an option was renamed"
    brief, whole = (_printed(capsys, command, option) for option in ("--help", "--help-all"))
    listed = {text: {*re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.M)} - {"--help"} for text in (brief, whole)}
    assert listed[brief] == {"--help-all", *(re.sub("^--no-", "--", flags[name]) for name in known.common)}
    for one in visible:
        assert f"\n  {', '.join(one.option_strings)}" in whole, one.dest
    num_more = len(visible) - 1 - len(known.common)
    assert f"'asr {command} --help-all' shows {num_more} more" in brief
    for text in (brief, whole):
        assert text.startswith(f"usage: asr {command} [OPTIONS]")
        assert len(max(text.splitlines(), key=len)) <= 120
    assert len(brief.splitlines()) < 90 < len(whole.splitlines())
    assert known.details in whole


@pytest.mark.parametrize("command", [["doctor"], ["bundle"], ["lm", "rnn"], ["lm", "rnn", "measure"]])
def test_help_of_one_length_has_both_names(capsys, command):
    texts = [_printed(capsys, *command, option) for option in ("--help", "--help-all")]
    assert texts[0] == texts[1] and "[--help-all]" not in texts[0]
    assert texts[0].startswith(f"usage: asr {' '.join(command)}")


@pytest.mark.parametrize("group", [[], ["lm"]])
def test_all_commands_are_listed_under_both_names(capsys, group):
    assert main.main([*group, "--help-all"]) == 0
    whole = capsys.readouterr().out
    assert main.main([*group, "--help"]) == 0
    assert capsys.readouterr().out == whole


@pytest.mark.parametrize("command", [name for name in main.COMMANDS if main.COMMANDS[name][0] != "asr.cli.train"])
def test_help_shows_the_default_of_every_option(command):
    pending = [argparse.ArgumentParser()]
    main.command_named(command).add_arguments(pending[0])
    while pending:
        for action in pending.pop()._actions:
            if isinstance(action, argparse._SubParsersAction):
                pending += action.choices.values()
            elif action.option_strings and action.nargs != 0 and action.default not in (None, "", [], False):
                text = str(action.help)
                assert "default" in text or text == argparse.SUPPRESS, action.option_strings[0]


@pytest.mark.parametrize("arguments", [["transcribe", ""], ["transcribe", "a.wav", "--bundle="], ["graph", "--g", ""]])
def test_an_empty_argument_is_not_the_current_folder(capsys, arguments):
    assert main.main(arguments) == 2
    assert f"asr {arguments[0]}: an argument is empty, perhaps a shell variable" in capsys.readouterr().err


def test_a_terminal_gets_no_escape_sequences_from_messages(monkeypatch, capsys):
    def run(arguments):
        raise AsrError("the name \x1b[2Jgone\x07 is damaged")

    monkeypatch.setattr(main, "run", run)
    assert main.main([]) == 2
    assert capsys.readouterr().err == "asr: error: the name \ufffd[2Jgone\ufffd is damaged\n"


def test_an_unknown_command_is_one_sentence(capsys):
    assert main.main(["transcrbe", "x.wav"]) == 2
    error = capsys.readouterr().err
    assert "there is no command 'transcrbe'; there are: transcribe" in error
    assert len(error.splitlines()) == 1


def test_a_recording_in_place_of_a_command(tmp_path, capsys):
    path = tmp_path / "x.wav"
    path.touch()
    assert main.main([str(path)]) == 2
    assert f"'{path}' is not a command; 'asr transcribe {path}' turns recordings" in capsys.readouterr().err
    assert main.main(["x" * 5000]) == 2
    assert "there is no command 'xxx" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (
            ["transcribe", "--bundel", "an4", "a.wav"],
            "--bundel (did you mean --bundle?); see 'asr transcribe --help-all'.",
        ),
        (["transcribe", "a.wav", "--nobody"], "--nobody; see 'asr transcribe --help-all'."),
        (["doctor", "--vresion"], "--vresion; see 'asr doctor --help'."),
        (["lm", "rnn", "export", "--frm"], "--help'."),
    ],
)
def test_a_misspelled_option_is_one_sentence(capsys, arguments, advice):
    with pytest.raises(SystemExit) as leaving:
        main.main(arguments)
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith(
        "asr " + " ".join(one for one in arguments[:3] if not one.startswith("-") and one not in ("an4", "a.wav"))
    )
    assert error.endswith(f"{advice}\n")


@pytest.mark.parametrize("number", ["-1e-3", "-.5E2", "-inf", "-Infinity", "-nan"])
def test_a_negative_number_is_no_option(number, monkeypatch):
    command = main.command_named("transcribe")
    seen = []
    monkeypatch.setattr(main, "command_named", lambda _: command._replace(run=lambda args: seen.append(args) or 0))
    for option in ("word_insertion_penalty", "hot_word_score"):
        assert main.main(["transcribe", "a.wav", f"--{option.replace('_', '-')}", number]) == 0
        assert repr(getattr(seen.pop(), option)) == repr(float(number))


def test_a_negative_number_is_no_option_of_a_second_command(capsys):
    assert main.main(["lm", "rnn", "measure", "lm/", "--text", "a", "--ngram-weight", "-1e-3"]) == 2
    assert "--ngram-weight -0.001: give" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code"),
    [(AsrError("No."), 2), (KeyboardInterrupt(), 130), (BrokenPipeError(), 0), (PermissionError(13, "No", "x"), 2)],
)
def test_exit_codes(monkeypatch, raised, code):
    def fail(arguments):
        raise raised

    monkeypatch.setattr(main, "run", fail)
    monkeypatch.setattr(main.sys, "stderr", open("/dev/null", "w"))  # noqa: PTH123, SIM115
    assert main.main(["doctor"]) == code


def test_warnings_of_modules_look_like_other_messages(monkeypatch, capsys):
    def warn(arguments):
        logging.getLogger("asr.audio.io").warning("%s: the audio is cut short\x1b.", "a.wav")
        warnings.warn_explicit("the blank may be column 3", UserWarning, main.__file__, 1)
        warnings.warn_explicit("not ours", UserWarning, "elsewhere.py", 1)
        return 0

    monkeypatch.setattr(main, "run", warn)
    assert main.main(["doctor"]) == 0
    assert capsys.readouterr().err == ""  # pytest handles warnings itself, as a program may that calls `main`
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    usual = warnings.showwarning
    with pytest.warns(UserWarning, match="not ours") as others:
        assert main.main(["doctor"]) == 0
    assert [str(each.message) for each in others] == ["not ours"]
    lines = "asr: a.wav: the audio is cut short\N{REPLACEMENT CHARACTER}.\nasr: the blank may be column 3\n"
    assert capsys.readouterr().err == lines
    assert not logging.getLogger("asr").handlers and warnings.showwarning is usual


PRESSED_AT_THE_END = """
import atexit, os, signal, sys
from asr.cli import main

def done(arguments):
    return 0

def interrupted(arguments):
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.modules["pytorch_lightning"] = sys  # a command that trains ends as programs usually do
main.run = globals()[sys.argv[1]]
sys.exit(main.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("run", "told"), [("done", ""), ("interrupted", "asr: interrupted\n")])
def test_ctrl_c_while_the_process_ends_gives_no_traceback(run, told):
    command = [sys.executable, "-c", PRESSED_AT_THE_END, run]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, told)


def test_a_command_that_does_not_train_ends_at_once_with_all_it_has_written(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = "import atexit, sys; from asr.cli import main; atexit.register(print, 'freed')\n"
    program += "main.run = lambda arguments: print('words') or 3\nsys.exit(main.main())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "words\n", "")


def test_cycles_are_not_looked_for_among_what_a_command_imports(monkeypatch):
    frozen = []
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(gc.isenabled()))
    main._import_command("asr.errors")
    assert frozen == []  # torch was there before
    monkeypatch.delitem(sys.modules, "torch")
    main._import_command("asr.errors")
    assert frozen == [False] and gc.isenabled()


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(main.COMMANDS, "strange", ("surely_not_installed.command", ""))
    assert main.main(["strange"]) == 2
    assert "needs the Python package 'surely_not_installed'" in capsys.readouterr().err


def test_the_bundle_that_is_taken(tmp_path, monkeypatch):
    monkeypatch.delenv("ASR_BUNDLE", raising=False)
    with pytest.raises(AsrError, match="librispeech: this bundle is not on this machine"):
        bundle_folder(None, tmp_path)
    for name in ("an4", "librispeech"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bundle.json").touch()
        assert bundle_folder(None, tmp_path).name == name
    assert bundle_folder("an4", tmp_path) == tmp_path / "an4"
    assert bundle_folder(str(tmp_path / "an4"), tmp_path / "elsewhere") == tmp_path / "an4"
    monkeypatch.setenv("ASR_BUNDLE", "an4")
    assert bundle_folder(None, tmp_path).name == "an4"
    with pytest.raises(AsrError, match=r"nowhere: there is no bundle here .* checkpoints/ has: an4, librispeech"):
        bundle_folder("nowhere", tmp_path)


def test_a_full_disk_is_one_sentence():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        run = subprocess.run([sys.executable, "-m", "asr", "--help"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert run.returncode == 2
    assert run.stderr == b"asr: error: standard output cannot be written (No space left on device).\n"


def test_the_package_runs_as_a_module():
    run = subprocess.run([sys.executable, "-m", "asr", "doctors"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "doctors" in run.stderr


@pytest.mark.parametrize(
    ("missing", "extra"), [("pytorch_lightning", "[train]"), ("kaldifst", "[graph]"), ("torch", "")]
)
def test_a_missing_package_is_told_with_its_extra(
    missing: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr("importlib.import_module", import_module)
    assert main.main(["fit", "--help"]) == 2
    assert f"{missing!r}, which is not installed; run scripts/setup, or pip install 'onepass-asr{extra}'." in (
        capsys.readouterr().err
    )


def test_what_standard_output_cannot_encode_is_escaped() -> None:
    command = (
        "from asr.cli import main; main.run = lambda _: print('caf\\u00e9 \\udce9') or 0; raise SystemExit(main.main())"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run([sys.executable, "-c", command], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert (run.returncode, run.stdout) == (0, b"caf\\xe9 \\udce9\n")


def test_a_closed_standard_output_is_one_sentence() -> None:
    command = f"{sys.executable} -m asr --help 2>&1 >&-"
    run = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stdout == "asr: error: standard output cannot be written (Bad file descriptor).\n"


def test_a_closed_standard_input_has_no_samples(tiny_bundle_folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main.main(["transcribe", "--bundle", str(tiny_bundle_folder), "--ngram-only", "--stream", "-"]) == 1
    assert "standard input ends before any sample" in capsys.readouterr().err


@pytest.mark.one_stack
@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "code", "error"),
    [
        ("2>&1 >&-", 2, "the output cannot be written (Bad file descriptor)"),
        ("--output words.jsonl >&-", 0, ""),
        ("2>&-", 0, ""),
        ("--stream - <&- 2>&1", 1, "standard input ends before any sample"),
    ],
)
def test_closed_standard_streams(tmp_path, tiny_bundle_folder, closed, code, error):
    soundfile.write(tmp_path / "a.wav", tones(["PAT"]).numpy(), RATE)
    audio = "" if "--stream" in closed else "a.wav"
    command = f"{sys.executable} -m asr transcribe --bundle {tiny_bundle_folder} --ngram-only {audio} {closed}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done
    assert error in done.stdout and "Traceback" not in done.stdout + done.stderr


def test_a_gpu_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    def fails(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nMore.")

    monkeypatch.setattr("asr.options.torch.ones", fails)
    reason = r"cuda: torch \S+ cannot use this GPU \(CUDA error: no kernel image .* on the device\); 'asr doctor'"
    with pytest.raises(AsrError, match=f"^--device {reason}"):
        device_from("cuda")
    with pytest.warns(UserWarning, match=f"{reason} .* The CPU is used instead"):
        assert device_from("auto").type == "cpu"
