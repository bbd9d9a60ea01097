"""Loops are compiled ahead: by `asr doctor --compile`, and once for all processes of a machine."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.cli import compile as compiling
from asr.cli.main import main
from asr.decoding.warmup import made_up_log_prob, query_many
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.jit import built_for, watch_compiler
from asr.kernels.linear import MAX_LOOP_ROWS
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import Vocabulary

pytest.importorskip("numba")

RECOGNIZE = """
import json, sys, time
import torch
import asr
from asr.kernels.jit import watch_compiler
from asr.testing.tones import TEXT, tones

bundle, compiled, seconds = asr.Bundle.load(sys.argv[1]), [], {}
waveforms = [tones(line.split()) for line in TEXT[:5]]
with watch_compiler(compiled.append):
    for mode in ("ngram", "rnn", "interpolated", "large_ngram"):
        for keep_lattices in (False, True):
            recognizer = asr.Recognizer(bundle, mode, decoder="token-passing", keep_lattices=keep_lattices)
            recognizer.prepare()
            compiled_before = len(compiled)
            runs = [recognizer(waveforms) for _ in range(3)]
            assert len(compiled) == compiled_before, (mode, keep_lattices, "compiled after prepare")
            stages = [[result.times.stages for result in results] for results in runs]
            seconds[f"{mode} {keep_lattices}"] = [
                sum(times["search"] + times.get("language model", 0.0) for times in one) for one in stages
            ]
        streaming = asr.StreamingRecognizer(recognizer)
        compiled_before = len(compiled)
        stream = streaming.open()
        streaming.push(stream, waveforms[0])
        streaming.close(stream)
        while streaming.is_ready:
            streaming.step()
        assert len(compiled) == compiled_before, (mode, "compiled by a stream")
print(json.dumps({"compiled": len(compiled), "seconds": seconds}))
"""


@pytest.mark.slow
def test_a_fresh_process_compiles_nothing_and_its_first_search_is_as_fast(tiny_bundle_folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "asr", "doctor", "--json", "--compile", "--bundle", str(tiny_bundle_folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    findings = {line["part"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert findings["compiled loops"]["state"] == "ok", done.stderr
    assert "functions compiled in" in done.stderr
    again = [sys.executable, "-c", RECOGNIZE, str(tiny_bundle_folder)]
    done = subprocess.run(again, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["compiled"] == 0
    for name, (first, *later) in report["seconds"].items():
        # Compiling would take ten seconds and more; loading machine code takes some tenths, on a busy machine a second.
        assert first < 5 * max(later) + 2.0, (name, first, later)


ADAPT = """
import torch
from asr.bundle import Bundle
from asr.cli.compile import adapt_to_noise
from asr.graph.context import TIED_STATES, TiedStates
from asr.kernels.jit import watch_compiler
from asr.models.adaptation import RecognizedSpeech, adapt

bundle, compiled = Bundle.load("checkpoints/librispeech"), []
network, tied = bundle.acoustic_model.network, bundle.graph.meta[TIED_STATES]
with watch_compiler(compiled.append):
    adapt_to_noise(network, tied, bundle.denominator)
    before = len(compiled)
    runs = ((5, 3, 40), (9, 40, 77), (5, 90, 200))
    speech = [RecognizedSpeech(torch.randn(600, network.num_features), runs) for _ in range(3)]
    adapt(network, TiedStates.from_json(tied), bundle.denominator, speech)
print(before, len(compiled) - before)
"""


@pytest.mark.one_stack
@pytest.mark.slow
def test_the_loops_of_adaptation_are_compiled_ahead(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ADAPT], capture_output=True, text=True, check=False, env=environment, cwd=root
    )
    assert done.returncode == 0, done.stderr
    ahead, later = map(int, done.stdout.split())
    assert ahead > 0 and later == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "adapts"), [("librispeech", True), ("an4", False)])
def test_bundles_that_adapt_do_so_when_loops_are_compiled(name: str, adapts: bool) -> None:
    bundle = Bundle.load(Path(__file__).resolve().parents[2] / "checkpoints" / name)
    steps = [step for step in compiling._steps(bundle) if isinstance(step, functools.partial)]
    assert [step.func for step in steps] == [compiling.adapt_to_noise] * adapts


def test_what_a_cold_cache_lacks_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import numba

    counts: list[int] = []
    with watch_compiler(counts.append):
        assert numba.njit(lambda x: x + 1)(1) == 2
    assert counts[-1] >= 1
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    text = "not compiled ahead; 'asr doctor --compile' does it, otherwise the first recordings do"
    assert compiling.compiled_state() == (False, text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"files": ["/nowhere/loop.nbi"]}, "1 of 1 are missing"),
        ({"sources": {__file__: 1}}, "for other sources"),
        ({"sources": {"/nowhere/removed.py": 1}}, "for other sources"),
        ({"built_for": ["0.1", "i386", "3.0"]}, "or another numba, Python or CPU"),
        ({"sources": None}, "cannot be read"),
    ],
)
def test_the_record_of_compiled_loops_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any], reason: str | None
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    loop = tmp_path / "kernels" / "loop.nbi"
    loop.parent.mkdir()
    loop.touch()
    sources = {__file__: Path(__file__).stat().st_mtime_ns}
    record = {"built_for": built_for(), "files": [str(loop)], "sources": sources, **change}
    (tmp_path / compiling.RECORD).write_text(json.dumps(record))
    is_compiled, text = compiling.compiled_state()
    assert is_compiled == (reason is None)
    assert reason is None or reason in text


def test_a_record_goes_to_the_users_cache_where_the_package_is_read_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "asr").mkdir()
    (tmp_path / "asr" / "__pycache__").touch()  # no folder can be made or written here, even by root
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "asr" / "cli" / "compile.py"))
    compiling._write_record()
    assert (tmp_path / "cache" / "asr" / compiling.RECORD).is_file()


def test_made_up_utterances_follow_the_graph(tiny_bundle_folder: Path) -> None:
    graph = DecodingGraph.load(tiny_bundle_folder / "graph.safetensors")
    log_prob, num_frames = made_up_log_prob(graph)
    assert log_prob.shape[0] == len(num_frames) and log_prob.shape[1] == int(num_frames.max())
    assert torch.allclose(log_prob.exp().sum(-1), torch.ones(log_prob.shape[:2]))
    assert torch.equal(log_prob, made_up_log_prob(graph)[0])
    assert float(log_prob[0].exp().amax(-1).mean()) > 0.9


class Recorded(RNNLanguageModel):
    """Records how many states follow how many."""

    def branch(self, state: Tensor, before: Tensor, word_id: Tensor) -> Tensor:
        self.__dict__.setdefault("sizes", []).append((len(state), len(word_id)))
        return super().branch(state, before, word_id)


def test_many_histories_that_follow_a_few_are_queried_ahead() -> None:
    """For them there is a loop that made-up utterances do not reach, and a product of few rows."""
    words = [f"W{number}" for number in range(MAX_LOOP_ROWS)]
    network = Recorded(Vocabulary(words), RNNLMConfig(hidden_size=8, embedding_size=8)).eval()
    query_many(CachedRNNLM(network))
    assert [sizes for sizes in network.__dict__["sizes"] if 2 <= sizes[0] <= MAX_LOOP_ROWS < sizes[1]]


@pytest.mark.slow
def test_loops_that_cannot_be_kept_are_not_compiled_for_minutes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_bundle_folder: Path
) -> None:
    monkeypatch.setattr(compiling, "UNWRITABLE_FOLDERS", [tmp_path / "__pycache__"])
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    with pytest.raises(AsrError, match="__pycache__: compiled loops cannot be kept there; make room, or name another"):
        compiling.compile_loops([tiny_bundle_folder])
    assert not compiling.compiled_state()[0]


def test_a_command_group_without_its_subcommand_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, is_error in ((["lm"], 2, True), (["lm", "--help"], 0, False), (["lm", "rnn"], 2, True)):
        assert main(arguments) == code
        output = capsys.readouterr()
        text = output.err if is_error else output.out
        assert "usage: asr lm" in text and not (output.out if is_error else output.err)
    assert main(["lm", "nonsense"]) == 2
    assert "there is no command 'lm nonsense'" in capsys.readouterr().err


def test_old_spellings_work_with_a_hint(
    capsys: pytest.CaptureFixture[str], tiny_bundle_folder: Path, tmp_path: Path
) -> None:
    import argparse

    from asr.cli.options import add_recognizer_arguments

    parser = argparse.ArgumentParser()
    add_recognizer_arguments(parser)
    for old, decoder, fusion in (
        ("torch", "token-passing", "lattice"),
        ("torch-search", "token-passing", "search"),
        ("k2", "k2", "lattice"),
        ("auto", "auto", "lattice"),
    ):
        args = parser.parse_args(["--first-pass", old, "--mode", "on_the_fly"])
        assert (args.decoder, args.lm_fusion, args.mode) == (decoder, fusion, "rnn")
        first, second = capsys.readouterr().err.splitlines()
        assert first.startswith(f"asr: hint: --first-pass {old} is now --decoder {decoder}")
        assert second.startswith("asr: hint: --mode on_the_fly is now --mode rnn")
    assert "--first-pass" not in parser.format_help()
