"""How a compiled loop asks a language model of a kind that it does not know: the type of the model's tables tells.

Shapes: Q queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from asr.lm.compiled_loop import Intrinsic, compiled_loop

_LOOPS: dict[type, tuple[Callable[..., bool], bool]] = {}


def answers_from(tables: type, loop: Callable[..., bool], reorders_sums: bool) -> None:
    """Says which loop, with what else `compiled_loop` takes, answers from tables of a type: `tuple` or a named one."""
    _LOOPS[tables] = loop, reorders_sums


class _Answer(Intrinsic):
    """answer(context_idx, word_id, tables, log_prob, next_idx) fills the last two (Q,) -> whether it could."""

    def __call__(self, context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
        return _LOOPS[type(tables)][0](context_idx, word_id, tables, log_prob, next_idx)

    def load(self) -> Any:
        return _compiled_answer()


answer = _Answer(__name__, "answer")


@functools.cache
def _compiled_answer() -> Any:
    from numba.extending import overload

    def any_answer(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
        raise NotImplementedError

    @overload(any_answer, strict=False)  # numba would have the annotations equal, too
    def chosen(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> Any:
        loop: Any = compiled_loop(*_LOOPS[getattr(tables, "instance_class", tuple)])

        def called(context_idx, word_id, tables, log_prob, next_idx):  # type: ignore[no-untyped-def]
            return loop(context_idx, word_id, tables, log_prob, next_idx)

        return called

    return any_answer
