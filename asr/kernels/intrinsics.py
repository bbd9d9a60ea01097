"""LLVM instructions for what loops cannot express in Python: register-blocked products, bits, prefetches.

By default the compiler keeps the sums of a product in memory. Here a block of sums, as large as the registers allow,
stays in registers over the whole inner dimension. Only `jit` imports this module, since it needs numba.

Shapes: K inner dimension, W columns.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from asr.kernels.simd import AMX_TILE, COLUMNS, NARROW, ROWS

llvmlite.binding.initialize_native_asmparser()  # for the one instruction in inline assembly


_BOOL, _INT32, _INT64, _FLOAT = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()


def has_instruction(name: str) -> bool:
    """Whether the processor that loops are compiled for has a group of instructions, by LLVM's name for it."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{name}" in features.split(",")


def has_tiles() -> bool:
    """Whether `set_rows` multiplies bytes with AMX: the processor has it, and Linux lets this process use it."""
    instructions = "avx512vnni", "amx-tile", "amx-int8"
    return all(map(has_instruction, instructions)) and _may_use_tiles()


@functools.cache
def _may_use_tiles() -> bool:
    """Asks Linux for the registers that hold tiles; without its permission, their first use ends the process."""
    if sys.platform != "linux":
        return False
    number_of_arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    try:
        return ctypes.CDLL(None).syscall(number_of_arch_prctl, request_permission, tile_data) == 0
    except (OSError, AttributeError):
        return False


def integers_per_element() -> int:
    """How many integers an int32 of `add_block`'s factors holds; 0 if the processor does not multiply integers fast.

    With VNNI, of AVX-512 or AVX, four bytes, whose products are added in one instruction; otherwise two int16. The sums
    are the same, those of bytes in half the time.
    """
    if has_instruction("avx512vnni" if has_instruction("avx512f") else "avxvnni"):
        return 4
    return 2 if has_instruction("avx512bw" if has_instruction("avx512f") else "avx2") else 0


@intrinsic
def add_block(typingctx: Any, products: Any, left: Any, right: Any, column: Any) -> Any:
    """Columns column .. column + COLUMNS - 1 of: products (ROWS, W) += left (ROWS, K) @ right (K, W).

    All are float32, or right is int16, a float16's bits; or all are int32, and those of left and right each hold
    several integers along the inner dimension (`integers_per_element`): four bytes, left's unsigned and right's signed,
    or two int16.
    """
    return types.void(products, left, right, column), _block_of(COLUMNS)


@intrinsic
def add_narrow_block(typingctx: Any, products: Any, left: Any, right: Any, column: Any) -> Any:
    """Like `add_block`, but NARROW columns."""
    return types.void(products, left, right, column), _block_of(NARROW)


@intrinsic
def add_transposed_block(typingctx: Any, products: Any, left: Any, right: Any, column: Any) -> Any:
    """Like `add_block`, for left (K, ROWS): products += left^T @ right."""
    return types.void(products, left, right, column), _block_of(COLUMNS, is_transposed=True)


@intrinsic
def add_narrow_transposed_block(typingctx: Any, products: Any, left: Any, right: Any, column: Any) -> Any:
    """Like `add_transposed_block`, but NARROW columns."""
    return types.void(products, left, right, column), _block_of(NARROW, is_transposed=True)


@intrinsic
def set_block(typingctx: Any, products: Any, left: Any, right: Any, column: Any, start: Any) -> Any:
    """Like `add_block`, but products = left @ right + start (1, W)."""
    return types.void(products, left, right, column, start), _block_of(COLUMNS)


@intrinsic
def set_rows(typingctx: Any, products: Any, left: Any, right: Any, start: Any) -> Any:
    """products (N, COLUMNS) = left (N, K) @ right (K, COLUMNS) + start (1, COLUMNS); N is a multiple of ROWS.

    See `add_block` for the types. As many columns as registers hold are computed for all rows before the next ones, so
    that these columns of right stay in the nearest cache. With AMX (`has_tiles`), whole tiles of bytes are multiplied
    if K is a multiple of AMX_TILE. Rows should begin at multiples of 64 bytes: others take two to four times as long.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        arrays = [_Rows(context, builder, kind, value) for kind, value in zip(kinds, arguments, strict=True)]
        lanes, num_rows, step = _block_size(COLUMNS, kinds[1])
        multiplied = _set_tiles(builder, arrays) if kinds[1].dtype == types.int32 and has_tiles() else _INT64(0)
        for first in range(0, COLUMNS, step):
            columns = [_INT64(first + lanes * j) for j in range(step // lanes)]
            limits = (multiplied, arrays[1].num_rows, _INT64(num_rows))
            with cgutils.for_range_slice(builder, *limits) as (begin, _):
                rows = [builder.add(begin, _INT64(row)) for row in range(num_rows)]
                _add_block(builder, arrays, rows, columns, lanes, kinds[1:3], is_transposed=False)
        return context.get_dummy_value()

    return types.void(products, left, right, start), generate


def _set_tiles(builder: Any, arrays: list[_Rows]) -> Any:
    """Computes the first rows of `set_rows` by tiles of AMX_TILE rows and AMX_TILE columns -> their number."""
    products, left, right, start = arrays
    byte, pointer = ir.IntType(8), ir.IntType(8).as_pointer()

    def call(name: str, *arguments: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)

    def tile_at(array: _Rows, row: Any, column: Any, row_bytes: Any = None) -> tuple[Any, Any]:
        return array.place(row, column, byte), array.row_bytes if row_bytes is None else row_bytes

    # Tiles 0 to 2 hold sums, 3 the left factor, 4 to 6 the right one; each has AMX_TILE rows of 64 bytes.
    sizes = bytearray(64)
    sizes[0] = 1  # the only layout there is
    for tile in range(7):
        sizes[16 + 2 * tile], sizes[48 + tile] = 4 * AMX_TILE, AMX_TILE
    sizes_in_memory = cgutils.global_constant(builder, "tile_sizes", ir.Constant(ir.ArrayType(byte, 64), sizes))
    fits = builder.icmp_signed("==", builder.urem(right.num_rows, _INT64(AMX_TILE)), _INT64(0))
    whole = builder.sub(left.num_rows, builder.urem(left.num_rows, _INT64(AMX_TILE)))
    num_rows = builder.select(fits, whole, _INT64(0))
    call("ldtilecfg", builder.bitcast(sizes_in_memory, pointer))
    with cgutils.for_range_slice(builder, _INT64(0), num_rows, _INT64(AMX_TILE)) as (row, _):
        for at in range(3):  # the same row for all of the tile
            call("tileloadd64", byte(at), *tile_at(start, _INT64(0), _INT64(AMX_TILE * at), _INT64(0)))
        with cgutils.for_range_slice(builder, _INT64(0), right.num_rows, _INT64(AMX_TILE)) as (inner, _):
            call("tileloadd64", byte(3), *tile_at(left, row, inner))
            for at in range(3):
                call("tileloadd64", byte(4 + at), *tile_at(right, inner, _INT64(AMX_TILE * at)))
                call("tdpbusd", byte(at), byte(3), byte(4 + at))
        for at in range(3):
            call("tilestored64", byte(at), *tile_at(products, row, _INT64(AMX_TILE * at)))
    call("tilerelease")
    return num_rows


@intrinsic
def write_value(typingctx: Any, target: Any, value: Any) -> Any:
    """Writes a number, an array's description, or a tuple of these to target, an int64 array of `size_of` its type.

    What is written holds no references to arrays.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(data, context.get_data_type(value).as_pointer())
        context.pack_value(builder, value, _uncounted(context, builder, value, arguments[1]), place)
        return context.get_dummy_value()

    return types.void(target, value), generate


def _uncounted(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """The value with arrays that are not counted: numba releases its own reference when the call ends."""
    if isinstance(kind, types.Array):
        array = make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()
    for at, each in enumerate(getattr(kind, "types", ())):
        value = builder.insert_value(value, _uncounted(context, builder, each, builder.extract_value(value, at)), at)
    return value


@intrinsic
def read_value(typingctx: Any, pointer: Any) -> Any:
    """The value that `write_value` has written where a typed pointer points."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.unpack_value(builder, pointer.dtype, arguments[0])

    return pointer.dtype(pointer), generate


_IDS, _SCORES = types.Array(types.int64, 1, "C"), types.Array(types.float32, 1, "C")


def lookup_types(tables: Any) -> tuple[Any, ...]:
    """The types that a function called by `call_lookup` takes, for tables of numba's type `tables`."""
    return types.CPointer(tables), _IDS, _IDS, _SCORES, _IDS


def expansion_types(tables: Any) -> tuple[Any, ...]:
    """Like `lookup_types`, for `call_expansion`."""
    return types.CPointer(tables), _IDS


def size_of(kind: Any) -> int:
    """How many bytes `write_value` writes for a value of one of numba's types."""
    context = cpu_target.target_context
    return int(context.get_abi_sizeof(context.get_data_type(kind)))


@intrinsic
def call_lookup(
    typingctx: Any, function: Any, values: Any, context_idx: Any, word_id: Any, log_prob: Any, next_idx: Any
) -> Any:
    """Calls the function of `lookup_types` at an address, with the tables whose values `write_value` has written."""
    return _call_with_tables(types.boolean, values, lookup_types(types.uint8))


@intrinsic
def call_expansion(typingctx: Any, function: Any, values: Any, context_idx: Any) -> Any:
    """Like `call_lookup`, for a function of `expansion_types`."""
    return _call_with_tables(types.int64, values, expansion_types(types.uint8))


def _call_with_tables(result: Any, values: Any, kinds: tuple[Any, ...]) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        convention = context.call_conv
        kind = convention.get_function_type(result, kinds)
        address = builder.inttoptr(arguments[0], kind.as_pointer())
        data = make_array(signature.args[1])(context, builder, arguments[1]).data
        tables = builder.bitcast(data, context.get_value_type(kinds[0]))
        status, returned = convention.call_function(builder, address, result, kinds, [tables, *arguments[2:]])
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return returned

    return result(types.int64, values, *kinds[1:]), generate


@intrinsic
def monotonic_seconds(typingctx: Any) -> Any:
    """The seconds since an arbitrary moment, like `time.monotonic`; 0 on systems without POSIX clocks."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not hasattr(time, "CLOCK_MONOTONIC"):
            return ir.DoubleType()(0.0)
        place = builder.alloca(ir.LiteralStructType([_INT64, _INT64]))
        kind = ir.FunctionType(_INT32, [_INT32, place.type])
        read_clock = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(read_clock, [_INT32(time.CLOCK_MONOTONIC), place])
        seconds, nanoseconds = (
            builder.sitofp(builder.load(cgutils.gep_inbounds(builder, place, 0, part)), ir.DoubleType())
            for part in range(2)
        )
        return builder.fadd(seconds, builder.fmul(nanoseconds, ir.DoubleType()(1e-9)))

    return types.float64(), generate


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
    """The position of the lowest bit that is set in an int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(bits), generate


@intrinsic
def append_reaching(
    typingctx: Any, token: Any, score: Any, begin: Any, num: Any, log_prob: Any, start: Any, limit: Any, best: Any,
    source: Any, sources: Any, arcs: Any, sums: Any, at: Any,
) -> Any:  # fmt: skip
    """Appends the arcs begin + i, i < num <= 16, with (start + score[begin + i]) + log_prob[token[begin + i]] >= limit.

    Their numbers go to `arcs`, the sums to `sums`, and `source` to `sources` as many times, all from place `at` on.
    These arrays have room for 16 more, in which anything may be written. Returns how many there are, and whether a sum
    is above `best`. `token` is int32, `sources` and `arcs` are int32 or int64, the other arrays are float32. The sums
    are rounded as in Python's order, on any processor.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = list(arguments)
        for place in (0, 1, 4, 9, 10, 11):
            values[place] = make_array(signature.args[place])(context, builder, values[place]).data
        what = _Reaching(*values)
        found = cgutils.alloca_once_value(builder, _INT64(0)), cgutils.alloca_once_value(builder, _BOOL(0))
        append, lanes = (_append_eight, 8) if has_instruction("avx2") else (_append_one, 1)
        append(builder, what, 0, *found)
        for first in range(lanes, 16, lanes):
            # Most states have few arcs.
            with builder.if_then(builder.icmp_signed(">", what.num, _INT64(first))):
                append(builder, what, first, *found)
        return context.make_tuple(builder, signature.return_type, [builder.load(each) for each in found])

    kinds = token, score, begin, num, log_prob, start, limit, best, source, sources, arcs, sums, at
    return types.Tuple((types.int64, types.boolean))(*kinds), generate


class _Reaching(NamedTuple):
    """The arguments of `append_reaching` in generated code, arrays as pointers."""

    token: Any
    score: Any
    begin: Any
    num: Any
    log_prob: Any
    start: Any
    limit: Any
    best: Any
    source: Any
    sources: Any
    arcs: Any
    sums: Any
    at: Any


def _append_eight(builder: Any, what: _Reaching, first: int, count: Any, is_above: Any) -> None:
    """Appends arcs first .. first + 7, those beyond the last left out.

    AVX-512 could gather 16, but takes longer where few are needed.
    """
    lanes, byte = 8, ir.IntType(8)
    ids, numbers = (ir.VectorType(kind, lanes) for kind in (_INT32, _FLOAT))
    left = _in_all_lanes(builder, builder.trunc(builder.sub(what.num, _INT64(first)), _INT32), ids)
    inside = builder.icmp_signed("<", ir.Constant(ids, list(range(lanes))), left)
    begin = builder.add(what.begin, _INT64(first))

    def call(name: str, kind: Any, *operands: Any) -> Any:
        function_kind = ir.FunctionType(kind, [operand.type for operand in operands])
        return builder.call(cgutils.get_or_insert_function(builder.module, function_kind, f"llvm.{name}"), operands)

    def load(data: Any, kind: Any, name: str) -> Any:
        place = builder.bitcast(builder.gep(data, [begin]), kind.as_pointer())
        return call(f"masked.load.{name}.p0", kind, place, _INT32(4), inside, ir.Constant(kind, None))

    def compare(kind: str, number: Any) -> Any:
        return builder.fcmp_ordered(kind, total, _in_all_lanes(builder, number, numbers))

    mask = builder.bitcast(builder.sext(inside, ids), numbers)
    columns = builder.bitcast(what.log_prob, byte.as_pointer()), load(what.token, ids, "v8i32"), mask, byte(4)
    gathered = call("x86.avx2.gather.d.ps.256", numbers, ir.Constant(numbers, None), *columns)
    partial = builder.fadd(_in_all_lanes(builder, what.start, numbers), load(what.score, numbers, "v8f32"))
    total = builder.fadd(partial, gathered)
    reaches = builder.and_(compare(">=", what.limit), inside)
    bits = builder.bitcast(reaches, byte)
    # The lanes whose bits are set move to the front.
    order = builder.gep(_orders(builder.module), [_INT64(0), builder.zext(bits, _INT64)])
    order = builder.zext(builder.bitcast(builder.load(order), ir.VectorType(byte, lanes)), ids)
    source = _in_all_lanes(builder, builder.trunc(what.source, _INT32), ids)
    arcs = builder.add(_in_all_lanes(builder, builder.trunc(begin, _INT32), ids), order)
    _store(builder, what, count, source, arcs, call("x86.avx2.permps", numbers, total, order))
    builder.store(builder.add(builder.load(count), builder.zext(builder.ctpop(bits), _INT64)), count)
    above = builder.bitcast(builder.and_(compare(">", what.best), reaches), byte)
    builder.store(builder.or_(builder.load(is_above), builder.icmp_unsigned("!=", above, byte(0))), is_above)


def _orders(module: Any) -> Any:
    """A constant table: for each of 256 sets of 8 lanes, a byte of an int64 for each, the lanes of the set first."""
    rows = [
        sum(lane << 8 * place for place, lane in enumerate(sorted(range(8), key=lambda lane: not bits >> lane & 1)))
        for bits in range(256)
    ]
    return cgutils.global_constant(module, "asr_orders", ir.Constant(ir.ArrayType(_INT64, 256), rows))


def _append_one(builder: Any, what: _Reaching, first: int, count: Any, is_above: Any) -> None:
    """Appends arc `first`, which is there."""
    arc = builder.add(what.begin, _INT64(first))
    column = builder.sext(builder.load(builder.gep(what.token, [arc])), _INT64)
    partial = builder.fadd(what.start, builder.load(builder.gep(what.score, [arc])))
    total = builder.fadd(partial, builder.load(builder.gep(what.log_prob, [column])))
    reaches = builder.fcmp_ordered(">=", total, what.limit)
    _store(builder, what, count, builder.trunc(what.source, _INT32), builder.trunc(arc, _INT32), total)
    builder.store(builder.add(builder.load(count), builder.zext(reaches, _INT64)), count)
    above = builder.and_(reaches, builder.fcmp_ordered(">", total, what.best))
    builder.store(builder.or_(builder.load(is_above), above), is_above)


def _store(builder: Any, what: _Reaching, count: Any, *values: Any) -> None:
    """Writes sources, arcs and sums, numbers or vectors, behind those that are there."""
    place = builder.add(what.at, builder.load(count))
    for value, data in zip(values, (what.sources, what.arcs, what.sums), strict=True):
        kind = data.type.pointee
        if isinstance(value.type, ir.VectorType):
            kind = ir.VectorType(kind, value.type.count)
        value = value if value.type == kind else builder.sext(value, kind)
        builder.store(value, builder.bitcast(builder.gep(data, [place]), kind.as_pointer()), align=4)


@intrinsic
def row_product(typingctx: Any, left: Any, i: Any, right: Any, j: Any) -> Any:
    """left[i] . right[j] as float32, of (N, K) float32 or int8 and (M, K) float32, rows contiguous."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = 16 if has_instruction("avx512f") else 8
        rows = [_Rows(context, builder, signature.args[at], arguments[at]) for at in (0, 2)]
        size = rows[0].num_columns
        whole = builder.sub(size, builder.urem(size, _INT64(lanes)))
        several = ir.VectorType(_FLOAT, lanes)
        total = cgutils.alloca_once_value(builder, ir.Constant(several, [0.0] * lanes))
        _add_products(builder, rows, arguments[1::2], total, several, (_INT64(0), whole, _INT64(lanes)))
        kind = ir.FunctionType(_FLOAT, [_FLOAT, several])
        add_lanes = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{lanes}f32")
        added = builder.call(add_lanes, [_FLOAT(0.0), builder.load(total)], fastmath=("reassoc",))
        rest = cgutils.alloca_once_value(builder, added)
        _add_products(builder, rows, arguments[1::2], rest, _FLOAT, (whole, size, _INT64(1)))
        return builder.load(rest)

    return types.float32(left, i, right, j), generate


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Prefetches an element of a one-dimensional array into the cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(function, [place, _INT32(0), _INT32(3), _INT32(1)])  # to be read, all caches, data
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def copy_items(typingctx: Any, target: Any, to: Any, source: Any, at: Any, num: Any) -> Any:
    """target[to : to + num] = source[at : at + num], for one-dimensional arrays of one type that do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        into = make_array(signature.args[0])(context, builder, arguments[0])
        data = make_array(signature.args[2])(context, builder, arguments[2]).data
        first, begin = builder.gep(into.data, [arguments[1]]), builder.gep(data, [arguments[3]])
        cgutils.raw_memcpy(builder, first, begin, arguments[4], into.itemsize)
        return context.get_dummy_value()

    return types.void(target, to, source, at, num), generate


class _Rows:
    """The rows of a two-dimensional array, each contiguous, in generated code."""

    def __init__(self, context: Any, builder: Any, array_type: Any, value: Any) -> None:
        array = make_array(array_type)(context, builder, value)
        self._builder, self._data = builder, array.data
        self.row_bytes = cgutils.unpack_tuple(builder, array.strides)[0]
        self._stride = builder.sdiv(self.row_bytes, array.itemsize)
        self._are_bytes = array_type.dtype == types.int8
        self.num_rows, self.num_columns = cgutils.unpack_tuple(builder, array.shape)

    def place(self, row: Any, column: Any, kind: Any) -> Any:
        """A pointer of the given type to the number at this place."""
        at = self._builder.add(self._builder.mul(self._stride, row), column)
        return self._builder.bitcast(self._builder.gep(self._data, [at]), kind.as_pointer())

    def load(self, row: Any, column: Any, kind: Any) -> Any:
        """One float, or a vector of floats, from float32 or int8."""
        if not self._are_bytes:
            return self._builder.load(self.place(row, column, kind), align=4)
        byte = ir.IntType(8)
        stored = ir.VectorType(byte, kind.count) if isinstance(kind, ir.VectorType) else byte
        return self._builder.sitofp(self._builder.load(self.place(row, column, stored), align=1), kind)


def _add_products(builder: Any, rows: list[_Rows], which: list[Any], total: Any, kind: Any, columns: Any) -> None:
    """Adds the product of one row of each of two arrays at columns (begin, end, step) to what total points to."""
    with cgutils.for_range_slice(builder, *columns) as (column, _):
        factors = [array.load(row, column, kind) for array, row in zip(rows, which, strict=True)]
        builder.store(_multiply_add(builder, builder.load(total), *factors), total)


def _block_of(width: int, is_transposed: bool = False) -> Callable[..., Any]:
    """Returns the generator of the code of a block's product, from products, left, right, column and perhaps start."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        lanes, num_rows, step = _block_size(width, kinds[1])
        arrays = [_Rows(context, builder, kinds[at], arguments[at]) for at in range(len(kinds)) if at != 3]
        for row in range(0, ROWS, num_rows):
            for first in range(0, width, step):
                begin = builder.add(arguments[3], _INT64(first))
                columns = [builder.add(begin, _INT64(lanes * j)) for j in range(step // lanes)]
                rows = [_INT64(row + i) for i in range(num_rows)]
                _add_block(builder, arrays, rows, columns, lanes, kinds[1:3], is_transposed)
        return context.get_dummy_value()

    return generate


def _block_size(width: int, factor_kind: Any) -> tuple[int, int, int]:
    """Numbers in a register, and rows and columns whose sums are held in registers at once."""
    # 16 registers of 8 numbers, or 32 of 16, hold the sums, the numbers of a row, and their factors; without VNNI also
    # products of integers, for which the 16 leave less room.
    lanes, num_rows = (16, ROWS) if has_instruction("avx512f") else (8, ROWS // 2)
    has_less_room = lanes == 8 and factor_kind.dtype == types.int32 and integers_per_element() == 2
    return lanes, num_rows, min(width, (2 if has_less_room else 3) * lanes)


def _add_block(
    builder: Any, arrays: list[_Rows], rows: list[Any], columns: list[Any], lanes: int, factor_kinds: Any,
    is_transposed: bool,
) -> None:  # fmt: skip
    products, left, right, *start = arrays
    are_integers, is_half = factor_kinds[0].dtype == types.int32, factor_kinds[1].dtype == types.int16
    number = _INT32 if are_integers else _FLOAT
    several = ir.VectorType(number, lanes)
    places = [products.place(row, at, several) for row in rows for at in columns]
    begin = [start[0].place(_INT64(0), at, several) for _ in rows for at in columns] if start else places
    totals = [cgutils.alloca_once(builder, several) for _ in places]
    for place, total in zip(begin, totals, strict=True):
        builder.store(builder.load(place, align=4), total)
    multiply_add = _multiply_add
    if are_integers:
        multiply_add = _bytes_instruction if integers_per_element() == 4 else _int16_instruction
    with cgutils.for_range(builder, right.num_rows) as loop:
        if is_half:
            halves = ir.VectorType(ir.HalfType(), lanes)
            loaded = [builder.load(right.place(loop.index, at, halves), align=2) for at in columns]
            factors = [builder.fpext(half, several) for half in loaded]
        else:
            factors = [builder.load(right.place(loop.index, at, several), align=4) for at in columns]
        for i, row in enumerate(rows):
            at = (loop.index, row) if is_transposed else (row, loop.index)
            one = builder.load(left.place(*at, number))
            spread = _in_all_lanes(builder, one, several)
            for j, factor in enumerate(factors):
                total = totals[len(columns) * i + j]
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
    # Without AVX-512, the instruction has another encoding, for the first 16 registers.
    prefix, register = ("", "v") if total.type.count == 16 else ("{vex} ", "x")
    code, operands = f"{prefix}vpdpbusd $3, $2, $0", f"={register},0,{register},{register}"
    return builder.asm(kind, code, operands, [total, left, right], side_effect=False)


def _int16_instruction(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Adds the sums of two products of int16 each; in int32 they are exact."""
    lanes = total.type.count
    halves = ir.VectorType(ir.IntType(16), 2 * lanes)
    kind = ir.FunctionType(total.type, [halves, halves])
    name = "llvm.x86.avx512.pmaddw.d.512" if lanes == 16 else "llvm.x86.avx2.pmadd.wd"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.add(total, builder.call(function, [builder.bitcast(each, halves) for each in (left, right)]))
