"""How a compiled loop queries a language model: through the model's tables, without a call back into Python.

A model provides its arrays as a named tuple (`LookupTables`). `compiled_lookup` registers the loop that answers queries
from tables of that type, and `look_up` calls it from any other loop. Tables may contain other models' tables: a
difference of two models looks up both. Loops and combinations take tables of any type (`of_any_type`), so each of them,
and each model's lookup, is compiled once, and not for every combination of models.

Shapes: Q queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from asr.kernels.jit import Intrinsic, jit_callee, jit_required, kernel, source_stamps

Lookup = Callable[[Any, Any, Any, Any, Any], bool]
_LookupT = TypeVar("_LookupT", bound=Lookup)


class LookupTables(Protocol):
    """What a model's loop reads: a named tuple of arrays, numbers and other models' tables.

    Attributes:
        always_answers: whether the loop can answer every query. If not, it returns False when a history must first be
            expanded, see `LanguageModel.expand`.
    """

    @property
    def always_answers(self) -> bool: ...


_LOOKUPS: dict[type, Lookup] = {}


def compiled_lookup(tables: type) -> Callable[[_LookupT], _LookupT]:
    """Registers a function as the loop that answers from tables of this type.

    The function takes context_idx, word_id (Q,) int64, the tables, and log_prob (Q,) float32 and next_idx (Q,) int64,
    which it fills. It returns whether it could answer all the queries.
    """

    def register(function: _LookupT) -> _LookupT:
        _LOOKUPS[tables] = function
        return function

    return register


class _LookUp(Intrinsic):
    def __call__(self, context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
        if type(tables) is AnyTables:  # only compiled code can call the address
            return bool(jit_required(look_up_any)(context_idx, word_id, tables, log_prob, next_idx))
        return _LOOKUPS[type(tables)](context_idx, word_id, tables, log_prob, next_idx)

    def load(self) -> Any:
        return _compiled_look_up()

    def stamps(self, argument_types: Any) -> list[tuple[str, int]]:
        """The sources of the lookups for all tables among the arguments; only the types say which these are."""
        lookups = {id(found): found for found in map(_LOOKUPS.get, _tuple_types(argument_types)) if found is not None}
        return sorted({stamp for found in lookups.values() for stamp in source_stamps(found)})


look_up = _LookUp(__name__, "look_up")
"""look_up(context_idx, word_id, tables, log_prob, next_idx) -> bool, for compiled loops; see `compiled_lookup`."""


def _tuple_types(argument_types: Any) -> Iterator[type]:
    """The named tuples among numba's types, at any depth of nesting, also behind pointers."""
    from numba import types

    for each in argument_types:
        if isinstance(each, types.CPointer):
            yield from _tuple_types([each.dtype])
        named = getattr(each, "instance_class", None)
        if named is not None:
            yield named
        if getattr(each, "types", None) is not None:
            yield from _tuple_types(each.types)


class AnyTables(NamedTuple):
    """Tables of a type that a loop does not know, see `of_any_type`: the address of their lookup, and their values."""

    function: int
    values: Any
    always_answers: bool


write_value: Any = Intrinsic("asr.kernels.intrinsics", "write_value")
read_value: Any = Intrinsic("asr.kernels.intrinsics", "read_value")
call_lookup: Any = Intrinsic("asr.kernels.intrinsics", "call_lookup")


def of_any_type(tables: Any) -> AnyTables:
    """The same `LookupTables` for a compiled loop, which is then compiled once and not for each type of tables.

    Large loops take much longer to compile than lookups do. `tables` must be kept as long as the result is in use.
    """
    from numba._dispatcher import compute_fingerprint

    function, size = _lookup_of(type(tables), compute_fingerprint(tables), tables)
    values = np.empty(size, dtype=np.int64)
    jit_required(_write)(values, tables)
    return AnyTables(function, values, tables.always_answers)


class AnyType:
    """`of_any_type` for the tables of one model, which change seldom: done once, and they are kept as long."""

    def __init__(self) -> None:
        self._last: tuple[Any, AnyTables] | None = None

    def __call__(self, tables: Any) -> AnyTables:
        last = self._last
        if last is None or last[0] is not tables:
            last = self._last = tables, of_any_type(tables)
        return last[1]

    def __reduce__(self) -> tuple[type[AnyType], tuple[()]]:
        return AnyType, ()  # a copy of the model has tables elsewhere


_FOUND: dict[tuple[type, bytes], tuple[int, int]] = {}


def _lookup_of(kind: type, fingerprint: bytes, tables: Any) -> tuple[int, int]:
    """The address of the compiled lookup for tables of one type, and how many int64 such tables take."""
    if (kind, fingerprint) not in _FOUND:
        from numba import typeof

        from asr.kernels.intrinsics import lookup_types, size_of

        lookup: Any = jit_callee(_answer)
        types = lookup_types(typeof(tables))
        lookup.compile(types)
        compiled = lookup.overloads[types]
        address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        _FOUND[kind, fingerprint] = address, -(-size_of(types[0].dtype) // 8)
    return _FOUND[kind, fingerprint]


@kernel(fastmath=False, allocates=False)
def _write(values: Any, tables: Any) -> None:
    write_value(values, tables)


@kernel(fastmath=False, allocates=False)
def _answer(tables: Any, context_idx: Any, word_id: Any, log_prob: Any, next_idx: Any) -> bool:
    """`look_up` in the tables that a pointer points to."""
    return look_up(context_idx, word_id, read_value(tables), log_prob, next_idx)


@compiled_lookup(AnyTables)
@kernel(fastmath=False, allocates=False)
def look_up_any(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
    """Answers as the lookup of the tables themselves."""
    return bool(call_lookup(tables.function, tables.values, context_idx, word_id, log_prob, next_idx))


@functools.cache
def _compiled_look_up() -> Any:
    from numba.extending import overload

    def any_look_up(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
        raise NotImplementedError

    @overload(any_look_up, strict=False)  # strict would compare the annotations as well
    def chosen(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> Any:
        loop: Any = jit_callee(_LOOKUPS[tables.instance_class])

        def called(context_idx, word_id, tables, log_prob, next_idx):  # type: ignore[no-untyped-def]
            return loop(context_idx, word_id, tables, log_prob, next_idx)

        return called

    return any_look_up
