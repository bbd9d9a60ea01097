"""Instructions that Python cannot express, against NumPy."""

from typing import Any

import numpy as np
import pytest

numba = pytest.importorskip("numba")
intrinsics = pytest.importorskip("asr.kernels.intrinsics")


@pytest.mark.parametrize("has_gather", [True, False])
def test_which_sums_reach_a_limit(monkeypatch: pytest.MonkeyPatch, has_gather: bool) -> None:
    """At an array's end and of any length; ties, infinities and what is not a number included."""
    if not has_gather:
        monkeypatch.setattr(intrinsics, "has_instruction", lambda name: False)
    reaching: Any = intrinsics.reaching

    @numba.njit
    def bits_of(token: Any, score: Any, begin: int, num: int, log_prob: Any, start: Any, limit: Any) -> Any:
        return reaching(token, score, begin, num, log_prob, start, limit)

    generator = np.random.default_rng(1)
    for num_columns in (1, 7, 500):
        log_prob = generator.normal(size=num_columns).astype(np.float32)
        log_prob[generator.integers(num_columns)] = -np.inf
        token = generator.integers(num_columns, size=40).astype(np.int32)
        score = generator.normal(size=40).astype(np.float32)
        score[[3, 30]] = -np.inf, np.nan
        start = np.float32(generator.normal())
        total = (start + score) + log_prob[token]
        for num in range(1, 17):
            for begin in (0, 11, 40 - num):
                within = total[begin : begin + num]
                finite = within[np.isfinite(within)]
                for limit in (*finite[:2], np.nextafter(finite[:1], np.float32(9)).sum(), -np.inf, np.inf):
                    expected = sum(1 << i for i in range(num) if within[i] >= limit)
                    assert bits_of(token, score, begin, num, log_prob, start, np.float32(limit)) == expected


@pytest.mark.parametrize("has_wide_registers", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_products_of_rows(monkeypatch: pytest.MonkeyPatch, dtype: str, has_wide_registers: bool) -> None:
    """Of every length, also of rows that are part of wider ones."""
    if not has_wide_registers:
        monkeypatch.setattr(intrinsics, "has_instruction", lambda name: False)
    row_product: Any = intrinsics.row_product

    @numba.njit
    def product(left: Any, i: int, right: Any, j: int) -> Any:
        return row_product(left, i, right, j)

    generator = np.random.default_rng(1)
    left = generator.integers(-127, 128, size=(5, 90)).astype(dtype)
    right = generator.normal(size=(4, 90)).astype(np.float32)
    for num in (1, 15, 16, 40, 90):
        for part, other in ((left[:, :num], right[:, :num]), (left[:, -num:], right[:, -num:])):
            found = product(part, 3, other, 2)
            assert found == pytest.approx(part[3].astype(np.float64) @ other[2].astype(np.float64), rel=1e-4, abs=1e-2)
