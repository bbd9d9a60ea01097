"""Products are rounded to bfloat16 only where the processor multiplies it."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
import torch

from asr.errors import AsrError
from asr.kernels import precision


def test_linux_knows_the_same_instructions() -> None:
    pytest.importorskip("llvmlite")
    info = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not info.is_file():
        pytest.skip("only Linux on x86-64 lists them under these names")
    flags = re.findall(r"\b(avx512_bf16|amx_bf16)\b", info.read_text())
    assert precision.cpu_multiplies_bfloat16() == bool(flags)


@pytest.mark.parametrize("is_fast", [True, False])
def test_products_are_rounded_where_that_is_fast(monkeypatch: pytest.MonkeyPatch, is_fast: bool) -> None:
    monkeypatch.setattr(precision, "cpu_multiplies_bfloat16", lambda: is_fast)
    fast = torch.bfloat16 if is_fast or torch.cuda.is_available() else torch.float32
    assert precision.product_dtype("bfloat16") == fast
    assert precision.product_dtype("float32") == torch.float32
    with precision.rounded_products():
        assert torch.nn.Linear(4, 4)(torch.ones(1, 4)).dtype == (torch.bfloat16 if is_fast else torch.float32)
    assert torch.nn.Linear(4, 4)(torch.ones(1, 4)).dtype == torch.float32


def test_another_type_is_refused() -> None:
    with pytest.raises(AsrError, match="compute_dtype is 'float16'; give float32 or bfloat16"):
        precision.product_dtype("float16")
