"""Instructions that Python cannot express, against NumPy."""

from typing import Any

import numpy as np
import pytest

from asr.kernels.jit import jit_required
from asr.kernels.simd import AMX_TILE, COLUMNS, NARROW, ROWS, aligned

numba = pytest.importorskip("numba")
intrinsics = pytest.importorskip("asr.kernels.intrinsics")


def pretend(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    """Generates code only with what such a processor has; skips the test if this one has less.

    Args:
        monkeypatch: restores the instructions.
        processor: the name of its newest vector instructions, or "plain".
    """
    known = "avx2", "avx512f", "avx512bw", "avx512vnni", "amx-tile", "amx-int8"
    allowed = {
        "plain": (),
        "avx2": known[:1],
        "avxvnni": ("avx2", "avxvnni"),
        "avx512bw": known[:3],
        "avx512vnni": known[:4],
        "amx": known,
    }[processor]
    if not all(map(intrinsics.has_instruction, allowed)):
        pytest.skip(f"this processor has no {processor}")
    monkeypatch.setattr(intrinsics, "has_instruction", lambda name: name in allowed)
    if processor == "amx" and not intrinsics.has_tiles():
        pytest.skip("Linux does not let this process use tiles")


PROCESSORS = ("plain", "avx2", "avxvnni", "avx512bw", "avx512vnni")


@pytest.mark.parametrize("index_type", [np.int32, np.int64])
@pytest.mark.parametrize("processor", PROCESSORS[:2])
def test_arcs_that_reach_a_limit_are_appended(
    monkeypatch: pytest.MonkeyPatch, processor: str, index_type: type[Any]
) -> None:
    """At an array's end and of any length; ties, infinities and what is not a number included."""
    pretend(monkeypatch, processor)
    append_reaching: Any = intrinsics.append_reaching

    @numba.njit
    def append(token: Any, score: Any, begin: int, num: int, log_prob: Any, limits: Any, out: Any) -> Any:
        start, limit, best = limits
        sources, arcs, sums = out
        return append_reaching(
            token, score, begin, num, log_prob, start, limit, best, 7, sources, arcs, sums, 3
        )  # fmt: skip

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
                    reaches = np.flatnonzero(within >= limit)
                    best = np.float32(finite[-1] if len(finite) else 0.0)
                    out = np.full(24, -1, index_type), np.full(24, -1, index_type), np.full(24, -1.0, np.float32)
                    limits = start, np.float32(limit), best
                    found, is_above = append(token, score, begin, num, log_prob, limits, out)
                    assert found == len(reaches) and is_above == bool((within[reaches] > best).any())
                    assert (out[0][3 : 3 + found] == 7).all() and (out[1][3 : 3 + found] == begin + reaches).all()
                    assert (out[2][3 : 3 + found] == within[reaches]).all()
                    for array in out:
                        assert (array[:3] == -1).all() and (array[3 + 16 :] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["plain", "avx512bw"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_products_of_rows(monkeypatch: pytest.MonkeyPatch, dtype: str, processor: str) -> None:
    """Of every length, also of rows that are part of wider ones."""
    pretend(monkeypatch, processor)
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


@pytest.mark.parametrize("processor", PROCESSORS[1:])
@pytest.mark.parametrize("width", [COLUMNS, NARROW])
def test_products_of_integers_are_exact(monkeypatch: pytest.MonkeyPatch, processor: str, width: int) -> None:
    """The largest ones included: bytes without a sign times bytes with one."""
    pretend(monkeypatch, processor)
    group = intrinsics.integers_per_element()
    assert group == (4 if processor.endswith("vnni") else 2)
    set_block: Any = intrinsics.set_block
    add_narrow_block: Any = intrinsics.add_narrow_block

    @numba.njit
    def set_products(products: Any, left: Any, right: Any, start: Any) -> None:
        set_block(products, left, right, 0, start)

    @numba.njit
    def add_products(products: Any, left: Any, right: Any) -> None:
        add_narrow_block(products, left, right, 0)

    generator = np.random.default_rng(1)
    for size in (4, 36):
        left, right = generator.integers(256, size=(ROWS, size)), generator.integers(-127, 128, size=(size, width))
        left[0], right[:, 0], right[:, 1] = 255, 127, -127
        kinds: tuple[Any, Any] = (np.uint8, np.int8) if group == 4 else (np.int16, np.int16)
        packed = np.ascontiguousarray(left.astype(kinds[0])).view(np.int32)
        # One element holds adjacent integers of a column.
        columns = np.ascontiguousarray(right.T.astype(kinds[1])).view(np.int32)
        products, start = np.full((ROWS, width), 7, dtype=np.int32), np.arange(width, dtype=np.int32)[None]
        if width == COLUMNS:
            set_products(products, packed, np.ascontiguousarray(columns.T), start)
            np.testing.assert_array_equal(products, left @ right + start)
        else:
            add_products(products, packed, np.ascontiguousarray(columns.T))
            np.testing.assert_array_equal(products, left @ right + 7)


@pytest.mark.slow
@pytest.mark.parametrize("processor", [*PROCESSORS[1:], "amx"])
def test_all_rows_of_a_tile(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    """Any number of rows and any inner size, whether or not they are whole tiles of AMX."""
    pretend(monkeypatch, processor)
    set_rows: Any = intrinsics.set_rows
    group = intrinsics.integers_per_element()
    kinds: tuple[Any, Any] = (np.uint8, np.int8) if group == 4 else (np.int16, np.int16)

    @numba.njit
    def set_products(products: Any, left: Any, right: Any, start: Any) -> None:
        set_rows(products, left, right, start)

    generator = np.random.default_rng(1)
    start = np.arange(COLUMNS, dtype=np.int32)[None]
    for num_rows in (0, ROWS, 3 * ROWS, 2 * AMX_TILE, 2 * AMX_TILE + ROWS):
        for size in (20, 4 * AMX_TILE, 12 * AMX_TILE, 4 * AMX_TILE + 4):
            left = generator.integers(256, size=(num_rows, size))
            right = generator.integers(-127, 128, size=(size, COLUMNS))
            left[:1], right[:, 0], right[:, 1] = 255, 127, -127
            packed = np.ascontiguousarray(left.astype(kinds[0])).view(np.int32)
            columns = np.ascontiguousarray(np.ascontiguousarray(right.T.astype(kinds[1])).view(np.int32).T)
            # A part of wider rows, as one tile of many has it; what follows stays.
            wide = np.full((num_rows + ROWS, COLUMNS + 16), 7, dtype=np.int32)
            set_products(wide[:, :COLUMNS], packed, columns, start)
            np.testing.assert_array_equal(wide[:num_rows, :COLUMNS], left @ right + start)
            assert (wide[num_rows:] == 7).all() and (wide[:, COLUMNS:] == 7).all()


def test_tiles_need_the_processor_and_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    instructions = {"avx512vnni", "amx-tile", "amx-int8"}
    for missing in (None, *sorted(instructions)):
        for may_use in (True, False):
            monkeypatch.setattr(intrinsics, "has_instruction", (instructions - {missing}).__contains__)
            monkeypatch.setattr(intrinsics, "_may_use_tiles", lambda may_use=may_use: may_use)
            assert intrinsics.has_tiles() == (missing is None and may_use)


@pytest.mark.parametrize("answer", [0, -1, OSError(), AttributeError()])
def test_what_linux_answers(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Where there is no such call, for example in some sandboxes, tiles are not used."""

    class Library:
        def __init__(self, name: None) -> None:
            pass

        def syscall(self, *arguments: int) -> int:
            assert arguments == (158, 0x1023, 18)
            if isinstance(answer, Exception):
                raise answer
            return int(answer)

    monkeypatch.setattr(intrinsics.ctypes, "CDLL", Library)
    monkeypatch.setattr(intrinsics.sys, "platform", "linux")
    assert intrinsics._may_use_tiles.__wrapped__() == (answer == 0)
    monkeypatch.setattr(intrinsics.sys, "platform", "win32")
    assert not intrinsics._may_use_tiles.__wrapped__()


def test_aligned_arrays() -> None:
    address: Any = numba.njit(lambda array: array.ctypes.data)
    for function in (aligned, jit_required(aligned)):
        for kind in (np.uint8, np.int16, np.int32):
            for num_rows, width in ((1, 1), (5, 7), (64, 640), (0, 3)):
                array = function(num_rows, width, np.empty(0, kind))
                assert array.shape == (num_rows, width) and array.dtype == kind and array.flags.c_contiguous
                assert array.size == 0 or address(array) % 64 == 0


@pytest.mark.parametrize("processor", ["plain", "avx512f"])
def test_processors_that_do_not_multiply_integers_fast(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    """Among them are those with AVX-512 for 32 and 64 bits only."""
    names = () if processor == "plain" else ("avx2", processor)
    monkeypatch.setattr(intrinsics, "has_instruction", lambda name: name in names)
    assert intrinsics.integers_per_element() == 0
