from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from asr.cli.doctor import _gpus, examine, install_advice
from asr.cli.main import main
from asr.errors import AsrError


def test_the_table_and_json_say_the_same(capsys):
    assert main(["doctor"]) == 0
    table = capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    parts = {finding["part"] for finding in findings}
    assert parts >= {"Python", "torch", "stack", "k2", "torchaudio", "MP3", "decoder"}
    for finding in findings:
        assert finding["text"].splitlines()[0] in table


def test_a_bundle_is_for_compiling(capsys):
    assert main(["doctor", "--bundle", "an4"]) == 2
    assert "--bundle has no effect without --compile" in capsys.readouterr().err


def test_a_missing_k2_comes_with_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "k2", None)
    found = {finding.part: finding for finding in examine()}
    assert found["k2"].state == "no"
    assert "k2" in found["k2"].text.splitlines()[1]
    assert found["decoder"].text.startswith("token-passing")


def test_missing_compiled_loops_are_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    found = {finding.part: finding for finding in examine()}
    assert found["numba"].state == "no"
    assert "compiled loops on CPUs: search, lookup, training: run scripts/setup" in found["numba"].text


def test_why_torch_finds_no_gpu(monkeypatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Update.\nMore.")

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", init)
    found = {finding.part: finding for finding in examine()}
    assert found["GPU"].state == "no"
    assert found["GPU"].text.startswith("The NVIDIA driver on your system is too old (found version 11040).")
    assert found["GPU"].text.endswith("; decoding runs on the CPU") and "\n" not in found["GPU"].text


def test_a_gpu_that_is_in_use_is_bad(monkeypatch):
    def busy(name):
        raise AsrError(f"device {name}: torch cannot use this GPU.") from RuntimeError("CUDA error: device is busy")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr("asr.options.device_named", busy)
    (finding,) = _gpus()
    assert finding.state == "bad"
    assert finding.text == "NVIDIA H200, compute capability 9.0: CUDA error: device is busy"


def test_a_missing_package_that_is_needed_is_bad(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main(["doctor"]) == 1
    assert "bad safetensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("torch_version", "cuda", "python", "expected"),
    [
        ("1.13.1+cu117", "11.7", (3, 10), "k2==1.23.4"),
        ("2.13.0+cu130", "13.0", (3, 11), "k2==1.24.4.dev20260710+cuda13.0.torch2.13.0 -f https://k2-fsa.github.io/k2/cuda.html"),
        ("2.9.0+cpu", None, (3, 11), "k2==1.24.4.dev20251029+cpu.torch2.9.0 -f https://k2-fsa.github.io/k2/cpu.html"),
    ],
)  # fmt: skip
def test_known_builds_of_k2(torch_version, cuda, python, expected):
    (line,) = install_advice(torch_version, cuda, python)
    assert "pip install " in line
    assert expected in line


def test_wheels_depend_on_the_version_of_python():
    assert "k2==1.24.4.dev20260625+cuda13.0" in install_advice("2.12.1", "13.0", (3, 11))[0]
    for minor in (12, 14):
        assert (
            f"knows no k2 build for torch 2.12.1 (cuda13.0) on Python 3.{minor}"
            in install_advice("2.12.1", "13.0", (3, minor))[0]
        )
    for cuda in ("11.8", "12.1", "12.4"):
        assert f"k2==1.24.4.dev20240905+cuda{cuda}.torch2.4.1" in install_advice("2.4.1", cuda, (3, 12))[0]


def test_the_wheel_for_python_3_10_is_told_by_its_hash():
    pinned = (Path(__file__).resolve().parents[2] / "constraints" / "k2.txt").read_text().splitlines()[-1]
    assert pinned.startswith("k2==1.23.4 --hash=sha256:")
    assert pinned in install_advice("1.13.1+cu117", "11.7", (3, 10))[0]


def test_a_k2_for_another_python_is_not_called_missing(monkeypatch, capsys, tmp_path):
    (tmp_path / "k2").mkdir()
    (tmp_path / "k2" / "__init__.py").write_text("import _k2\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("k2", "_k2"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "_k2", None)
    main(["doctor"])
    assert "installed, but cannot be imported" in capsys.readouterr().out


def test_where_no_build_of_k2_is_known():
    assert "built for torch 2.13.0 with CUDA 12.6, 13.0, 13.2, not 12.8" in install_advice("2.13.0", "12.8", (3, 11))[0]
    unknown = install_advice("2.99.0+cpu", None, (3, 12))
    assert "knows no k2 build for torch 2.99.0 (cpu) on Python 3.12" in unknown[0]
    assert unknown[-1].endswith("+cpu.torch2.99.0 -f https://k2-fsa.github.io/k2/cpu.html")
    assert "not aarch64" in install_advice("2.13.0", "13.0", (3, 11), "aarch64")[0]


def test_a_numpy_that_is_too_new_for_torch_is_named(monkeypatch):
    class Tensor:
        def numpy(self):
            raise RuntimeError("Numpy is not available")

    monkeypatch.setattr("torch.zeros", lambda *_: Tensor())
    (finding,) = [one for one in examine() if one.part == "torch"]
    assert finding.state == "bad" and "pip install 'numpy<2'" in finding.text
