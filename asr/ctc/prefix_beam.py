"""The prefix beam search of one utterance or stream: its arrays, its language model queries, its hypotheses.

Shapes: T frames, C tokens, A language model queries, P prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asr.ctc import prefix_kernel
from asr.ctc.prefix_kernel import (
    ASKS,
    CHUNK_BEGIN,
    FIRST_NEW,
    FRAME,
    FREE,
    NEEDS_ROOM,
    NUM_ALIVE,
    NUM_ASKED,
    NUM_PREFIXES,
    NUM_SLOTS,
    ROOM_WANTED,
    UNKNOWN,
    Prefixes,
    Rules,
)
from asr.kernels.jit import jit
from asr.kernels.lookup import of_any_type
from asr.lm.interface import LanguageModel, device_of

FrameArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer[Any]]
_ROUNDS_BETWEEN_MARKS = 16
_FRAMES_AT_ONCE = 256
_PREFIX_DTYPES = {
    "parent": np.int32,
    "char": np.int32,
    "context": np.int64,
    "lm_score": np.float64,
    "bonus": np.float64,
    "guess": np.float64,
    "place": np.int32,
    "length": np.int32,
    "begin": np.int32,
    "end": np.int32,
    "peak": np.float64,
}


class Alive(NamedTuple):
    """A prefix that survives the last frame read.

    Attributes:
        prefix: its number.
        am_score: sum over its paths, natural log.
        lm_score: language model score, unscaled.
        total: the scaled sum of both, plus the bonuses of its words.
        context: the language model's context.
        length: as for `Prefixes`.
    """

    prefix: int
    am_score: float
    lm_score: float
    total: float
    context: int
    length: int


class PrefixBeam:
    """The search of one utterance or stream.

    Args:
        rules: tokens, words and weights.
        context: the language model's start context.
        compiled: whether to compile the loops if numba is installed; results are the same.
        first_room: number of prefixes for which there is room at first.
        compact_at: number of prefixes from which those that are needed no more are removed.
    """

    def __init__(
        self,
        rules: Rules,
        context: int = 0,
        compiled: bool = True,
        first_room: int = 1 << 12,
        compact_at: int = 1 << 18,
    ) -> None:
        self.rules = rules
        self._loops = _compiled_loops() if compiled else _plain_loops()
        self.prefixes = _empty(first_room, first_room, rules.beam_size, len(rules.num_ends))
        self.prefixes.count[[NUM_PREFIXES, NUM_ALIVE]] = 1
        self.prefixes.context[0] = context
        for values in (self.prefixes.parent, self.prefixes.char, self.prefixes.last, self.prefixes.node):
            values[0] = 0
        for values in (self.prefixes.lm_score, self.prefixes.bonus, self.prefixes.guess, self.prefixes.score):
            values[0] = 0.0
        self.prefixes.place[0] = self.prefixes.length[0] = 0
        self._first_compact_at = self._compact_at = compact_at

    def begin(self) -> None:
        """Begins a chunk, to be called before each one; compacts the prefix tree if it has grown large."""
        self.prefixes.count[CHUNK_BEGIN] = self.prefixes.count[FRAME]
        if self.prefixes.count[NUM_PREFIXES] > self._compact_at:
            self._compact()
            # Not again before half of them may be removed, however long the surviving ones are.
            self._compact_at = max(self._first_compact_at, 2 * int(self.prefixes.count[NUM_PREFIXES]))

    def advance(self, log_prob: npt.NDArray[np.float32]) -> bool:
        """Reads a chunk (T, C) until its end or a language model query -> whether it stopped for a query."""
        while True:
            outcome = self._loops.advance(log_prob, self.prefixes, self.rules)
            if outcome != NEEDS_ROOM:
                return bool(outcome == ASKS)
            self._grow()

    def advance_with_tables(self, log_prob: npt.NDArray[np.float32], tables: Any) -> None:
        """Reads a whole chunk (T, C), with scores looked up in the language model's tables inside the loop."""
        while self._loops.advance_with_tables(log_prob, self.prefixes, self.rules, tables) == NEEDS_ROOM:
            self._grow()

    def asked(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The pending language model queries: contexts and words, (A,) each."""
        num = int(self.prefixes.count[NUM_ASKED])
        return self.prefixes.asked_context[:num], self.prefixes.asked_word[:num]

    def answer(self, log_prob: npt.NDArray[np.float32], next_context: npt.NDArray[np.int64]) -> None:
        """Receives the results of the pending queries, (A,) each, and finishes the frame unless more are pending."""
        self._loops.settle(log_prob, next_context, self.prefixes, self.rules)

    def contexts(self) -> npt.NDArray[np.int64]:
        """The language model contexts that the search may still use.

        They are those of the surviving prefixes, of all longer ones, which may come back into the beam, and, within a
        frame, of new hypotheses.
        """
        prefixes, count = self.prefixes, self.prefixes.count
        num, num_slots = int(count[NUM_PREFIXES]), int(count[NUM_SLOTS])
        parent = prefixes.parent[:num]
        is_held, num_held = np.zeros(num, dtype=bool), 0
        is_held[prefixes.node[: int(count[NUM_ALIVE])]] = True
        is_held[int(count[FIRST_NEW]) :] = True
        while num_held < (num_held := int(is_held.sum())):
            is_held |= is_held[parent]
        known = prefixes.context[:num][is_held]
        of_slots = prefixes.slot_context[:num_slots][prefixes.slot_node[:num_slots] < 0]
        return np.unique(np.concatenate([known[known != UNKNOWN], of_slots]))

    def alive(self) -> list[Alive]:
        """The surviving prefixes, each once, best first."""
        prefixes = self.prefixes
        num = int(prefixes.count[NUM_ALIVE])
        sums: dict[int, float] = {}
        for prefix, score in zip(prefixes.node[:num].tolist(), prefixes.score[:num].tolist(), strict=True):
            sums[prefix] = float(np.logaddexp(sums[prefix], score)) if prefix in sums else score
        nodes = np.fromiter(sums, np.int64, len(sums))
        total = np.fromiter(sums.values(), np.float64, len(sums)) + prefixes.bonus[nodes]
        values = (total, prefixes.lm_score[nodes], prefixes.context[nodes], prefixes.length[nodes])
        found = [
            Alive(prefix, sums[prefix], lm_score, own_total, context, length)
            for prefix, own_total, lm_score, context, length in zip(sums, *(v.tolist() for v in values), strict=True)
        ]
        order = np.argsort(-(total + prefixes.guess[nodes]), kind="stable")
        return [found[place] for place in order.tolist()]

    def path(self, prefix: int) -> npt.NDArray[np.int32]:
        """The prefixes that end with each character of a prefix, itself the last one."""
        found = np.empty(int(self.prefixes.count[NUM_PREFIXES]), dtype=np.int32)
        num = self._loops.fill_path(prefix, self.prefixes.parent, found)
        return found[:num][::-1]

    def text_keys(self, prefixes: Sequence[int], written_begin: IntArray, written: IntArray) -> npt.NDArray[np.int64]:
        """A number for each of some prefixes, (K,), the same for equal texts; see `prefix_kernel.fill_text_keys`."""
        nodes, key = np.array(prefixes, dtype=np.int64), np.empty(len(prefixes), dtype=np.int64)
        self._loops.fill_text_keys(nodes, self.prefixes.parent, self.prefixes.char, written_begin, written, key)
        return key

    def shared_path(self) -> npt.NDArray[np.int32]:
        """The path of the longest prefix that all surviving prefixes extend or are; no other can come back."""
        num = int(self.prefixes.count[NUM_ALIVE])
        return self.path(self._loops.shared_prefix(self.prefixes.node[:num], self.prefixes.parent))

    def characters(self, prefix: int) -> tuple[IntArray, IntArray, IntArray]:
        """The characters of a prefix, their first frames, and the frames after their last ones, (L,) each."""
        prefixes, path = self.prefixes, self.path(prefix)
        return prefixes.char[path], prefixes.begin[path], prefixes.end[path]

    def _grow(self) -> None:
        """Enlarges the arrays to what the next frame may need."""
        count, old = self.prefixes.count, self.prefixes
        num, wanted = int(count[NUM_PREFIXES]), int(count[ROOM_WANTED])
        room, slots = len(old.parent), len(old.slot_node)
        while room < num + wanted:
            room *= 2
        while slots < wanted:
            slots *= 2
        new = _empty(room, slots, self.rules.beam_size, len(self.rules.num_ends))
        new.count[:] = count
        for name in _PREFIX_DTYPES:
            getattr(new, name)[:num] = getattr(old, name)[:num]
        alive = int(count[NUM_ALIVE])
        for name in ("node", "last", "score"):
            getattr(new, name)[:alive] = getattr(old, name)[:alive]
        self._loops.fill_table(new)
        self.prefixes = new

    def _compact(self) -> None:
        """Removes prefixes that no surviving prefix extends."""
        prefixes, count = self.prefixes, self.prefixes.count
        num, alive = int(count[NUM_PREFIXES]), int(count[NUM_ALIVE])
        kept = np.zeros(num, dtype=bool)
        kept[0] = True
        kept[self.shared_path()] = True
        newest = np.unique(prefixes.node[:alive])
        while len(newest):
            newest = newest[~kept[newest]]
            kept[newest] = True
            newest = np.unique(prefixes.parent[newest])
        chosen = np.flatnonzero(kept)
        number = np.cumsum(kept) - 1
        for name in _PREFIX_DTYPES:
            values = getattr(prefixes, name)
            values[: len(chosen)] = values[chosen]
        prefixes.parent[: len(chosen)] = number[prefixes.parent[: len(chosen)]]
        prefixes.node[:alive] = number[prefixes.node[:alive]]
        count[NUM_PREFIXES] = len(chosen)
        prefixes.table[:] = FREE
        self._loops.fill_table(prefixes)


def in_order(begin: npt.ArrayLike, end: npt.ArrayLike) -> tuple[IntArray, IntArray]:
    """Frames (L,) of tokens or words in a row, made such that none begins before another ends.

    Each of them has the frames of the best path that ends with it, and these paths differ.

    Args:
        begin: (L,) the first frames.
        end: (L,) the frames after the last ones.
    """
    place = np.arange(len(np.asarray(begin)))
    # Each has a frame or more, so that the next one's beginning limits its own.
    first = place + np.minimum.accumulate((np.asarray(begin) - place)[::-1])[::-1]
    last = np.maximum(first + 1, end)
    last[:-1] = np.minimum(last[:-1], first[1:])
    return first, last


def read_chunks(beams: Sequence[PrefixBeam], chunks: Sequence[FrameArray], lm: LanguageModel | None) -> None:
    """Reads a chunk of each utterance; language model queries of all utterances form one batch.

    Prefixes that are needed no more are removed from time to time, also within a chunk.

    Args:
        beams: the searches of N distinct utterances.
        chunks: (T, C) for each of the N utterances.
        lm: the language model; None if the rules use none.
    """
    for begin in range(0, max(map(len, chunks), default=0), _FRAMES_AT_ONCE):
        parts = [chunk[begin : begin + _FRAMES_AT_ONCE] for chunk in chunks]
        _read(beams, [(beam, part) for beam, part in zip(beams, parts, strict=True) if len(part)], lm)


def _read(beams: Sequence[PrefixBeam], reading: list[tuple[PrefixBeam, FrameArray]], lm: LanguageModel | None) -> None:
    """Reads some frames of some of the utterances; the language model keeps what any of them needs."""
    for beam, _ in reading:
        beam.begin()
    tables = None if lm is None else lm.lookup_tables()
    if tables is not None and tables.always_answers:
        of_any = of_any_type(tables)
        for beam, chunk in reading:
            beam.advance_with_tables(chunk, of_any)
        return
    num_rounds = 0
    while reading:
        reading = [(beam, chunk) for beam, chunk in reading if beam.advance(chunk)]
        if not reading:
            return
        assert lm is not None
        if num_rounds % _ROUNDS_BETWEEN_MARKS == 0:
            lm.retain(torch.from_numpy(np.concatenate([beam.contexts() for beam in beams])))
        num_rounds += 1
        asked = [beam.asked() for beam, _ in reading]
        context, word = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*asked, strict=True))
        log_prob, following = ask(lm, context, word)
        begin = 0
        for (beam, _), (own, _) in zip(reading, asked, strict=True):
            end = begin + len(own)
            beam.answer(log_prob[begin:end], following[begin:end])
            begin = end


def ask(lm: LanguageModel, context: Tensor, word: Tensor) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Queries a model on any device -> log-probabilities (Q,) and next contexts (Q,), on the host."""
    device = device_of(lm)
    log_prob, following = lm.score(context.to(device), word.to(device))
    return log_prob.detach().float().cpu().numpy(), following.cpu().numpy()


def ask_final(lm: LanguageModel, context: Tensor) -> npt.NDArray[np.float64]:
    """Final scores of contexts (Q,) by a model on any device, (Q,) on the host."""
    found: npt.NDArray[np.float64] = lm.final(context.to(device_of(lm))).double().cpu().numpy()
    return found


class _Loops(NamedTuple):
    advance: Callable[..., int]
    advance_with_tables: Callable[..., int]
    settle: Callable[..., bool]
    fill_path: Callable[..., int]
    fill_text_keys: Callable[..., None]
    shared_prefix: Callable[..., int]
    fill_table: Callable[..., None]


def _plain_loops() -> _Loops:
    def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with np.errstate(over="ignore"):  # hashing wraps around
                return function(*arguments)

        return run

    return _Loops(*(quiet(getattr(prefix_kernel, name)) for name in _Loops._fields))


def _compiled_loops() -> _Loops:
    loops = [jit(getattr(prefix_kernel, name)) for name in _Loops._fields]
    return _plain_loops() if None in loops else _Loops(*cast("list[Callable[..., Any]]", loops))


def _empty(room: int, slots: int, beam_size: int, num_tokens: int) -> Prefixes:
    arrays: dict[str, Any] = {name: np.empty(room, dtype=dtype) for name, dtype in _PREFIX_DTYPES.items()}
    # No more hypotheses survive a frame than it has, however large the beam.
    beam_size = min(beam_size, slots)
    return Prefixes(
        count=np.zeros(8, dtype=np.int64),
        **arrays,
        table=np.full(4 * room, FREE, dtype=np.int32),
        node=np.empty(beam_size, dtype=np.int32),
        last=np.empty(beam_size, dtype=np.int32),
        score=np.empty(beam_size, dtype=np.float64),
        end_key=np.empty(beam_size, dtype=np.int64),
        asked=np.empty(room, dtype=np.int32),
        asked_context=np.empty(room, dtype=np.int64),
        asked_word=np.empty(room, dtype=np.int64),
        answer=np.empty(room, dtype=np.float32),
        following=np.empty(room, dtype=np.int64),
        allowed=np.empty(num_tokens, dtype=np.int64),
        slot_node=np.empty(slots, dtype=np.int32),
        slot_last=np.empty(slots, dtype=np.int32),
        slot_score=np.empty(slots, dtype=np.float64),
        slot_context=np.empty(slots, dtype=np.int64),
        slot_lm_score=np.empty(slots, dtype=np.float64),
        slot_bonus=np.empty(slots, dtype=np.float64),
        slot_guess=np.empty(slots, dtype=np.float64),
        slot_table=np.zeros(4 * slots, dtype=np.int64),
        rank=np.empty(slots, dtype=np.float64),
        inside=np.empty(slots, dtype=np.float64),
    )
