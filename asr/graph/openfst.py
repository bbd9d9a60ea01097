"""Binary OpenFst files, read and written without OpenFst: transducers with 32-bit weights.

The layout is that of OpenFst's `fst.cc`, `vector-fst.h` and `const-fst.h`: a header, optionally two symbol tables, then
states and arcs. Types `vector` and `const` are read. Files are not trusted: all sizes are checked against the length of
the file. Through a file of the type `const`, transducers also get to kaldifst and back, without a loop over their arcs.
"""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.graph.fst import EPSILON, Transducer, offsets

MAGIC = 2125659606
_SYMBOLS_MAGIC = 2125658996
_HAS_INPUT_SYMBOLS, _HAS_OUTPUT_SYMBOLS, _IS_ALIGNED = 1, 2, 4
_IS_EXPANDED = 1
_ALIGNED_VERSION = 1  # constant transducers of this version are always aligned; later versions have a flag
_ALIGNMENT = 16
_STATE = np.dtype([("final", "<f4"), ("pos", "<u4"), ("num", "<u4"), ("num_in_eps", "<u4"), ("num_out_eps", "<u4")])
_ARC = np.dtype([("input", "<i4"), ("output", "<i4"), ("weight", "<f4"), ("dst", "<i4")])
_LONGEST_NAME = 1 << 16


def is_openfst(head: bytes) -> bool:
    """Whether the first bytes of a file are those of an OpenFst file."""
    return head[:4] == struct.pack("<i", MAGIC)


def read_openfst(path: str | Path) -> Transducer:
    """Reads a transducer in the tropical or log semiring; scores are negated weights.

    Raises:
        AsrError: the file cannot be read, is cut short, or has another type of transducer or weight.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise AsrError(f"{path}: the transducer cannot be read ({error.strerror}).") from error
    if not is_openfst(content):
        raise AsrError(f"{path}: this is not a binary OpenFst file.")
    reader = OpenFstReader(content, 0, str(path))
    kind, arc_type, version, flags, start, num_states, num_arcs = reader.header()
    if kind not in ("vector", "const") or arc_type not in ("standard", "log"):
        raise AsrError(
            f"{path}: this is a transducer of type {kind!r} with arcs of type {arc_type!r}; convert it with "
            "`fstconvert --fst_type=const`, with weights of type standard."
        )
    if kind == "const":
        is_aligned = version == _ALIGNED_VERSION or bool(flags & _IS_ALIGNED)
        final, counts, arcs = _const(reader, num_states, num_arcs, is_aligned)
    else:
        final, counts, arcs = _vector(reader, num_states)
    if not 0 <= start < len(final):
        raise AsrError(f"{path}: the transducer is empty: it has no start state.")
    if len(arcs) and not 0 <= int(arcs["dst"].min()) <= int(arcs["dst"].max()) < len(final):
        raise AsrError(f"{path}: an arc leads to a state that does not exist; the file is damaged.")
    if not all((weight > -np.inf).all() for weight in (arcs["weight"], final)):  # nan compares as False
        raise AsrError(f"{path}: a weight is not a number; the file is damaged.")
    possible = arcs["weight"] < np.inf
    src_state = np.repeat(np.arange(len(final)), counts)[possible]
    arcs = arcs[possible]
    return Transducer(
        int(start),
        offsets(np.bincount(src_state, minlength=len(final))),
        arcs["input"].copy(),
        arcs["output"].copy(),
        np.subtract(0.0, arcs["weight"], dtype=np.float32),
        arcs["dst"].copy(),
        np.subtract(0.0, final, dtype=np.float32),
    )


class OpenFstHeader(NamedTuple):
    """A transducer's header: types of transducer and arc, and sizes; num_states is -1 if unknown."""

    kind: str
    arc_type: str
    version: int
    flags: int
    start: int
    num_states: int
    num_arcs: int


class OpenFstReader:
    """Reads the values of a file in order."""

    def __init__(self, content: bytes, position: int, name: str) -> None:
        self.content, self.position, self.name = content, position, name

    def values(self, form: str) -> tuple[Any, ...]:
        begin = self.advance(struct.calcsize(form))
        return struct.unpack_from(form, self.content, begin)

    def advance(self, num_bytes: int) -> int:
        """Skips bytes, and returns where they begin."""
        begin, end = self.position, self.position + num_bytes
        if num_bytes < 0 or end > len(self.content):
            raise AsrError(f"{self.name}: the OpenFst file is cut short or damaged; copy it again.")
        self.position = end
        return begin

    def text(self) -> str:
        (length,) = self.values("<i")
        if length > _LONGEST_NAME:
            raise AsrError(f"{self.name}: the OpenFst file is damaged: a name has {length} bytes.")
        begin = self.advance(length)
        return self.content[begin : begin + length].decode("utf-8", "replace")

    def header(self) -> OpenFstHeader:
        """Reads the header of a transducer, and skips its symbol tables."""
        (magic,) = self.values("<i")
        if magic != MAGIC:
            raise AsrError(f"{self.name}: expected an OpenFst transducer; the file is damaged.")
        kind, arc_type = self.text(), self.text()
        version, flags, _, start, num_states, num_arcs = self.values("<iiQqqq")
        for flag in (_HAS_INPUT_SYMBOLS, _HAS_OUTPUT_SYMBOLS):
            if flags & flag:
                self.skip_symbols()
        return OpenFstHeader(kind, arc_type, version, flags, start, num_states, num_arcs)

    def skip_symbols(self) -> None:
        """Skips a symbol table; words.txt and tokens.txt define the labels instead."""
        (magic,) = self.values("<i")
        if magic != _SYMBOLS_MAGIC:
            raise AsrError(f"{self.name}: the OpenFst file is damaged: its symbol table is missing.")
        self.text()
        _, size = self.values("<qq")
        for _ in range(size):
            self.text()
            self.values("<q")

    def align(self) -> None:
        self.advance(-self.position % _ALIGNMENT)

    def array(self, dtype: np.dtype[Any], size: int) -> npt.NDArray[Any]:
        begin = self.advance(size * dtype.itemsize)
        return np.frombuffer(self.content, dtype, size, begin)


_Parts = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[Any]]


def _const(reader: OpenFstReader, num_states: int, num_arcs: int, is_aligned: bool) -> _Parts:
    """Reads all states, then all arcs."""
    if is_aligned:
        reader.align()
    states = reader.array(_STATE, num_states)
    if is_aligned:
        reader.align()
    arcs = reader.array(_ARC, num_arcs)
    counts = states["num"].astype(np.int64)
    if counts.sum() != num_arcs or (states["pos"] != offsets(counts)[:-1])[counts > 0].any():
        raise AsrError(f"{reader.name}: the states do not fit the arcs; the file is damaged.")
    return states["final"], counts, arcs


def _vector(reader: OpenFstReader, num_states: int) -> _Parts:
    """Reads each state followed by its arcs; num_states is -1 in a stream, which ends with the file."""
    final, counts, begins = list[float](), list[int](), list[int]()
    while (len(final) < num_states) if num_states >= 0 else (reader.position < len(reader.content)):
        weight, count = reader.values("<fq")
        final.append(weight)
        counts.append(count)
        begins.append(reader.advance(count * _ARC.itemsize if count >= 0 else -1))
    arcs = np.empty(sum(counts), dtype=_ARC)
    position = 0
    for begin, count in zip(begins, counts, strict=True):
        arcs[position : position + count] = np.frombuffer(reader.content, _ARC, count, begin)
        position += count
    return np.array(final, dtype=np.float32), np.array(counts, dtype=np.int64), arcs


def import_kaldifst() -> Any:
    """Imports kaldifst, which is needed only to build graphs.

    Raises:
        AsrError: it is not installed.
    """
    try:
        import kaldifst
    except ImportError as error:
        raise AsrError("building a decoding graph needs the package kaldifst; run `pip install kaldifst`.") from error
    return kaldifst


def to_openfst(transducer: Transducer) -> Any:
    """Converts to a `kaldifst.StdVectorFst` in the tropical semiring, whose weights are negated scores."""
    num_states, num_arcs = len(transducer.final_score), len(transducer.dst_state)
    counts = np.diff(transducer.arc_begin)
    states = np.empty(num_states, dtype=_STATE)
    states["final"] = -transducer.final_score
    states["pos"] = transducer.arc_begin[:-1]
    states["num"] = counts
    states["num_in_eps"] = _count_by_state(transducer.input_label == EPSILON, counts)
    states["num_out_eps"] = _count_by_state(transducer.output_label == EPSILON, counts)
    arcs = np.empty(num_arcs, dtype=_ARC)
    arcs["input"], arcs["output"] = transducer.input_label, transducer.output_label
    arcs["weight"], arcs["dst"] = -transducer.score, transducer.dst_state
    header = struct.pack("<i", MAGIC) + _text("const") + _text("standard")
    header += struct.pack("<iiQqqq", _ALIGNED_VERSION + 1, 0, _IS_EXPANDED, transducer.start, num_states, num_arcs)
    kaldifst = import_kaldifst()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "transducer.fst"
        with path.open("wb") as file:
            file.write(header)
            file.write(states.tobytes())
            file.write(arcs.tobytes())
        return kaldifst.StdVectorFst(kaldifst.StdConstFst.read(str(path)))


def from_openfst(fst: Any) -> Transducer:
    """Converts any transducer of kaldifst in the tropical semiring to arrays."""
    kaldifst = import_kaldifst()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "transducer.fst"
        kaldifst.StdConstFst(fst).write(str(path))
        return read_openfst(path)


def _text(text: str) -> bytes:
    return struct.pack("<i", len(text)) + text.encode()


def _count_by_state(flag: Any, counts: Any) -> Any:
    state = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(state, weights=flag, minlength=len(counts)).astype(np.uint32)
