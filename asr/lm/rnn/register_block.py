"""What compiled loops say to the compiler in its own terms: a block of a product held in vector registers, and bits.

A compiler left to itself keeps the sums of a product in memory; here a block of them, as large as the registers allow,
stays in registers over all of the inner dimension. Imported by `compiled_loop` alone, since it needs numba.

Shapes: K inner dimension, W columns.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from asr.lm.rnn.tile_kernel import COLUMNS, ROWS

llvmlite.binding.initialize_native_asmparser()  # for the one instruction that is written out

_INT32, _INT64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


def has_instruction(name: str) -> bool:
    """Whether the processor that loops are compiled for has a group of instructions, in LLVM's words."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{name}" in features.split(",")


@intrinsic
def add_block(typingctx: Any, products: Any, left: Any, right: Any, column: Any) -> Any:
    """Columns column .. column + COLUMNS - 1 of: products (ROWS, W) += left (ROWS, K) @ right (K, W).

    All are float32, or right is int16, a float16's bits; or all are int32, of which left's are four unsigned bytes
    along the inner dimension and right's four signed ones, where the processor has the instruction ("avx512vnni").
    """
    are_bytes, is_half = left.dtype == types.int32, right.dtype == types.int16

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # Sixteen registers of eight numbers, or thirty-two of sixteen: sums, a row's numbers, and what they multiply.
        lanes, num_rows = (16, ROWS) if has_instruction("avx512f") else (8, ROWS // 2)
        arrays = [_Rows(context, builder, *pair) for pair in zip(signature.args[:3], arguments[:3], strict=True)]
        for row in range(0, ROWS, num_rows):
            for first in range(0, COLUMNS, 3 * lanes):
                begin = builder.add(arguments[3], _INT64(first))
                _add_block(builder, arrays, range(row, row + num_rows), begin, lanes, are_bytes, is_half)
        return context.get_dummy_value()

    return types.void(products, left, right, column), generate


@intrinsic
def as_float32(typingctx: Any, number: Any) -> Any:
    """A float32 from its bits (int32)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(number), generate


@intrinsic
def bits_above(typingctx: Any, numbers: Any, begin: Any, limit: Any) -> Any:
    """Bit i of an int64: whether numbers[begin + i], float32, is above the limit."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        kind = ir.VectorType(_FLOAT, 64)
        place = builder.bitcast(builder.gep(data, [arguments[1]]), kind.as_pointer())
        limits = _in_all_lanes(builder, arguments[2], kind)
        return builder.bitcast(builder.fcmp_ordered(">", builder.load(place, align=4), limits), _INT64)

    return types.int64(numbers, begin, limit), generate


@intrinsic
def lowest_bit(typingctx: Any, bits: Any) -> Any:
    """The place of the lowest bit that is set in an int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(bits), generate


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Asks for a number of a one-dimensional array to be in the cache soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(function, [place, _INT32(0), _INT32(3), _INT32(1)])  # to be read, all caches, data
        return context.get_dummy_value()

    return types.void(array, index), generate


class _Rows:
    """The rows of a two-dimensional array, contiguous each, in generated code."""

    def __init__(self, context: Any, builder: Any, array_type: Any, value: Any) -> None:
        array = make_array(array_type)(context, builder, value)
        self._builder, self._data = builder, array.data
        self._stride = builder.sdiv(cgutils.unpack_tuple(builder, array.strides)[0], array.itemsize)
        self.num_rows = cgutils.unpack_tuple(builder, array.shape)[0]

    def place(self, row: Any, column: Any, kind: Any) -> Any:
        """A pointer of the kind to the number at this place."""
        at = self._builder.add(self._builder.mul(self._stride, row), column)
        return self._builder.bitcast(self._builder.gep(self._data, [at]), kind.as_pointer())


def _add_block(
    builder: Any, arrays: list[_Rows], rows: range, column: Any, lanes: int, are_bytes: bool, is_half: bool
) -> None:
    products, left, right = arrays
    number = _INT32 if are_bytes else _FLOAT
    several = ir.VectorType(number, lanes)
    columns = [builder.add(column, _INT64(lanes * j)) for j in range(3)]
    places = [products.place(_INT64(row), at, several) for row in rows for at in columns]
    totals = [cgutils.alloca_once(builder, several) for _ in places]
    for place, total in zip(places, totals, strict=True):
        builder.store(builder.load(place, align=4), total)
    multiply_add = _bytes_instruction if are_bytes else _multiply_add
    with cgutils.for_range(builder, right.num_rows) as loop:
        if is_half:
            halves = ir.VectorType(ir.HalfType(), lanes)
            loaded = [builder.load(right.place(loop.index, at, halves), align=2) for at in columns]
            factors = [builder.fpext(half, several) for half in loaded]
        else:
            factors = [builder.load(right.place(loop.index, at, several), align=4) for at in columns]
        for i, row in enumerate(rows):
            one = builder.load(left.place(_INT64(row), loop.index, number))
            spread = _in_all_lanes(builder, one, several)
            for j, factor in enumerate(factors):
                total = totals[3 * i + j]
                builder.store(multiply_add(builder, builder.load(total), spread, factor), total)
    for place, total in zip(places, totals, strict=True):
        builder.store(builder.load(total), place, align=4)


def _in_all_lanes(builder: Any, number: Any, kind: Any) -> Any:
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number, _INT32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_INT32, kind.count), [0] * kind.count))


def _multiply_add(builder: Any, total: Any, left: Any, right: Any) -> Any:
    contract = ("contract",)
    return builder.fadd(total, builder.fmul(left, right, flags=contract), flags=contract)


def _bytes_instruction(builder: Any, total: Any, left: Any, right: Any) -> Any:
    kind = ir.FunctionType(total.type, [total.type, left.type, right.type])
    return builder.asm(kind, "vpdpbusd $3, $2, $0", "=v,0,v,v", [total, left, right], side_effect=False)
