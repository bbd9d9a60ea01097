"""Arrays to OpenFst and back, through its file format for constant transducers: both ways without a Python loop."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from asr.errors import AsrError
from asr.graph.transducer import EPSILON, Transducer

_MAGIC = 2125659606
_IS_EXPANDED = 1
_NOT_ALIGNED = 2
_STATE = np.dtype([("final", "<f4"), ("pos", "<u4"), ("num", "<u4"), ("num_in_eps", "<u4"), ("num_out_eps", "<u4")])
_ARC = np.dtype([("input", "<i4"), ("output", "<i4"), ("weight", "<f4"), ("dst", "<i4")])


def import_kaldifst() -> Any:
    """The finite-state library; only building graphs needs it.

    Raises:
        AsrError: it is not installed.
    """
    try:
        import kaldifst
    except ImportError as error:
        raise AsrError("Building a decoding graph needs the package kaldifst; run `pip install kaldifst`.") from error
    return kaldifst


def to_openfst(transducer: Transducer) -> Any:
    """A `kaldifst.StdVectorFst` in the tropical semiring, whose weights are scores with the sign changed."""
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
    header = struct.pack("<i", _MAGIC) + _text("const") + _text("standard")
    header += struct.pack("<iiQqqq", _NOT_ALIGNED, 0, _IS_EXPANDED, transducer.start, num_states, num_arcs)
    kaldifst = import_kaldifst()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "transducer.fst"
        with path.open("wb") as file:
            file.write(header)
            file.write(states.tobytes())
            file.write(arcs.tobytes())
        return kaldifst.StdVectorFst(kaldifst.StdConstFst.read(str(path)))


def from_openfst(fst: Any) -> Transducer:
    """The arrays of any OpenFst transducer in the tropical semiring."""
    kaldifst = import_kaldifst()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "transducer.fst"
        kaldifst.StdConstFst(fst).write(str(path))
        content = path.read_bytes()
    position = struct.calcsize("<i")
    for _ in range(2):  # the kinds of transducer and arc
        (length,) = struct.unpack_from("<i", content, position)
        position += 4 + length
    _, _, _, start, num_states, num_arcs = struct.unpack_from("<iiQqqq", content, position)
    position += struct.calcsize("<iiQqqq")
    states = np.frombuffer(content, _STATE, num_states, position)
    arcs = np.frombuffer(content, _ARC, num_arcs, position + states.nbytes)
    arc_begin = np.zeros(num_states + 1, dtype=np.int64)
    np.cumsum(states["num"], out=arc_begin[1:])
    return Transducer(
        start,
        arc_begin,
        arcs["input"].copy(),
        arcs["output"].copy(),
        np.subtract(0.0, arcs["weight"], dtype=np.float32),
        arcs["dst"].copy(),
        np.subtract(0.0, states["final"], dtype=np.float32),
    )


def _text(text: str) -> bytes:
    return struct.pack("<i", len(text)) + text.encode()


def _count_by_state(flag: Any, counts: Any) -> Any:
    state = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(state, weights=flag, minlength=len(counts)).astype(np.uint32)
