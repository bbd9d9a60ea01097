"""How a compiled loop queries a language model: through the model's tables, without a call back into Python.

A model provides its arrays as a named tuple (`LookupTables`). `compiled_lookup` registers the loop that answers queries
from tables of that type, and `look_up` calls it from any other loop. A model whose histories need work before they can
be queried also registers the loop that does this work, with `compiled_expansion`; `expand` calls it. Tables may contain
other models' tables: a difference of two models looks up both. Loops and combinations take tables of any type
(`of_any_type`), so each of them, and each model's loop, is compiled once, and not for every combination of models.

Shapes: Q queries, K contexts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from asr.kernels.jit import Intrinsic, intrinsics_of, jit_callee, jit_required, kernel, source_stamps

Lookup = Callable[[Any, Any, Any, Any, Any], bool]
Expansion = Callable[[Any, Any], int]
_LookupT = TypeVar("_LookupT", bound=Lookup)
_ExpansionT = TypeVar("_ExpansionT", bound=Expansion)


class LookupTables(Protocol):
    """What a model's loop reads: a named tuple of arrays, numbers and other models' tables.

    Attributes:
        always_answers: whether the loop can answer every query. If not, it returns False when a history must first be
            expanded, by `expand` or by `LanguageModel.expand`.
    """

    @property
    def always_answers(self) -> bool: ...


_LOOKUPS: dict[type, Lookup] = {}
_EXPANSIONS: dict[type, Expansion] = {}


def compiled_lookup(tables: type) -> Callable[[_LookupT], _LookupT]:
    """Registers a function as the loop that answers from tables of this type.

    The function takes context_idx, word_id (Q,) int64, the tables, and log_prob (Q,) float32 and next_idx (Q,) int64,
    which it fills. It returns whether it could answer all the queries.
    """

    def register(function: _LookupT) -> _LookupT:
        _LOOKUPS[tables] = function
        return function

    return register


def compiled_expansion(tables: type) -> Callable[[_ExpansionT], _ExpansionT]:
    """Registers a function as the loop that expands histories, so that lookups in tables of this type can answer.

    The function takes context_idx (K,) int64 and the tables. It returns how many histories it has expanded, or -1 if it
    could not expand all: `LanguageModel.expand` then can, or says what is wrong.
    """

    def register(function: _ExpansionT) -> _ExpansionT:
        _EXPANSIONS[tables] = function
        return function

    return register


@kernel(fastmath=False, allocates=False)
def _nothing_to_expand(context_idx: Any, tables: Any) -> int:
    return 0


def _expansion_of(tables: type) -> Expansion:
    return _EXPANSIONS.get(tables, _nothing_to_expand)


class _OfTables(Intrinsic):
    """Calls the loop that is registered for the type of its tables."""

    def loop_of(self, tables: type) -> Callable[..., Any] | None:
        raise NotImplementedError

    def stamps(self, argument_types: Any) -> list[tuple[str, int]]:
        """Those of the loops for all tables among the arguments; only the types say which these are."""
        loops = {loop for kind in _tuple_types(argument_types) if (loop := self.loop_of(kind)) is not None}
        stamps = {stamp for loop in loops for stamp in source_stamps(loop)}
        for intrinsic in {each for loop in loops for each in intrinsics_of(loop)}:
            if not isinstance(intrinsic, _OfTables):  # its loops are among these
                stamps.update(intrinsic.stamps(argument_types))
        return sorted(stamps)


class _LookUp(_OfTables):
    def __call__(self, context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
        if type(tables) is AnyTables:  # only compiled code can call the address
            return bool(jit_required(look_up_any)(context_idx, word_id, tables, log_prob, next_idx))
        return _LOOKUPS[type(tables)](context_idx, word_id, tables, log_prob, next_idx)

    def load(self) -> Any:
        return _compiled_look_up()

    def loop_of(self, tables: type) -> Callable[..., Any] | None:
        return _LOOKUPS.get(tables)


class _Expand(_OfTables):
    def __call__(self, context_idx: Any, tables: Any) -> int:
        if type(tables) is AnyTables:
            return int(jit_required(expand_any)(context_idx, tables))
        return _expansion_of(type(tables))(context_idx, tables)

    def load(self) -> Any:
        return _compiled_expand()

    def loop_of(self, tables: type) -> Callable[..., Any] | None:
        return _expansion_of(tables)


look_up = _LookUp(__name__, "look_up")
"""look_up(context_idx, word_id, tables, log_prob, next_idx) -> bool, for compiled loops; see `compiled_lookup`."""
expand = _Expand(__name__, "expand")
"""expand(context_idx, tables) -> int, for compiled loops; see `compiled_expansion`."""


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
    """Tables of a type that a loop does not know, see `of_any_type`: the addresses of their loops, and their values."""

    lookup: int
    expansion: int
    values: Any
    always_answers: bool


write_value: Any = Intrinsic("asr.kernels.intrinsics", "write_value")
read_value: Any = Intrinsic("asr.kernels.intrinsics", "read_value")
call_lookup: Any = Intrinsic("asr.kernels.intrinsics", "call_lookup")
call_expansion: Any = Intrinsic("asr.kernels.intrinsics", "call_expansion")


def of_any_type(tables: Any) -> AnyTables:
    """The same `LookupTables` for a compiled loop, which is then compiled once and not for each type of tables.

    Large loops take much longer to compile than lookups do. `tables` must be kept as long as the result is in use.
    """
    from numba._dispatcher import compute_fingerprint

    lookup, expansion, size = _loops_of(type(tables), compute_fingerprint(tables), tables)
    values = np.empty(size, dtype=np.int64)
    jit_required(_write)(values, tables)
    return AnyTables(lookup, expansion, values, tables.always_answers)


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


_FOUND: dict[tuple[type, bytes], tuple[int, int, int]] = {}


def _loops_of(kind: type, fingerprint: bytes, tables: Any) -> tuple[int, int, int]:
    """The addresses of the compiled lookup and expansion for tables of one type, and how many int64 these take."""
    if (kind, fingerprint) not in _FOUND:
        from numba import typeof

        from asr.kernels.intrinsics import expansion_types, lookup_types, size_of

        own = typeof(tables)
        addresses = _address(_answer, lookup_types(own)), _address(_expand, expansion_types(own))
        _FOUND[kind, fingerprint] = *addresses, -(-size_of(own) // 8)
    return _FOUND[kind, fingerprint]


def _address(function: Callable[..., Any], types: tuple[Any, ...]) -> int:
    callee: Any = jit_callee(function)
    callee.compile(types)
    compiled = callee.overloads[types]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


@kernel(fastmath=False, allocates=False)
def _write(values: Any, tables: Any) -> None:
    write_value(values, tables)


@kernel(fastmath=False, allocates=False)
def _answer(tables: Any, context_idx: Any, word_id: Any, log_prob: Any, next_idx: Any) -> bool:
    """`look_up` in the tables that a pointer points to."""
    return look_up(context_idx, word_id, read_value(tables), log_prob, next_idx)


@kernel(fastmath=False, allocates=False)
def _expand(tables: Any, context_idx: Any) -> int:
    """`expand` for the tables that a pointer points to."""
    return expand(context_idx, read_value(tables))


@compiled_lookup(AnyTables)
@kernel(fastmath=False, allocates=False)
def look_up_any(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
    """Answers as the lookup of the tables themselves."""
    return bool(call_lookup(tables.lookup, tables.values, context_idx, word_id, log_prob, next_idx))


@compiled_expansion(AnyTables)
@kernel(fastmath=False, allocates=False)
def expand_any(context_idx: Any, tables: Any) -> int:
    """Expands histories as the loop for the tables themselves."""
    return int(call_expansion(tables.expansion, tables.values, context_idx))


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


@functools.cache
def _compiled_expand() -> Any:
    from numba.extending import overload

    def any_expand(context_idx: Any, tables: Any) -> int:
        raise NotImplementedError

    @overload(any_expand, strict=False)
    def chosen(context_idx: Any, tables: Any) -> Any:
        loop: Any = jit_callee(_expansion_of(tables.instance_class))

        def called(context_idx, tables):  # type: ignore[no-untyped-def]
            return loop(context_idx, tables)

        return called

    return any_expand
