"""Kaldi's transition model: the output of the network (pdf) of each transition id, the labels of HCLG graphs.

It is read from a model (`final.mdl`, binary or text), of which only the transition model at its beginning is read, or
from the output of `show-transitions phones.txt final.mdl`. The layout is that of Kaldi's `hmm-topology.cc` and
`transition-model.cc`.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError

_BINARY = b"\0B"
_BEGIN = b"<TransitionModel>"
_SHOWN = b"Transition-state "
_STATE = re.compile(
    r"Transition-state \d+: phone = \S+ hmm-state = \d+ "
    r"(?:pdf = (\d{1,9})|forward-pdf = (\d{1,9}) self-loop-pdf = (\d{1,9}))"
)
_TRANSITION = re.compile(r"\s*Transition-id = (\d{1,9}) p = \S+.*\[(self-loop|\d+ -> \d+)\]")
_MOST_PHONES = 10**6
_MOST_TRANSITIONS = 10**7  # states share their transitions, so that a small file may describe many

_Topology = tuple[list[int], list[list[list[int]]]]  # phone -> entry (-1 for none); entry, state -> destinations


def is_transition_model(path: str | Path) -> bool:
    """Whether a file begins like those that `read_transition_pdfs` reads."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(64)
    except OSError:
        return False
    return head.removeprefix(_BINARY).lstrip().startswith((_BEGIN, _SHOWN))


def read_transition_pdfs(path: str | Path) -> npt.NDArray[np.int32]:
    """The pdf of each transition id.

    Args:
        path: a Kaldi model, or the output of `show-transitions`.

    Returns:
        (I + 1,) int32, the network's column for each transition id from 1 to I; -1 at index 0.

    Raises:
        AsrError: the file cannot be read or is damaged.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise AsrError(f"{path}: the transition model cannot be read ({error.strerror}).") from error
    if content.lstrip().startswith(_SHOWN):
        pdfs = _shown(content.decode("utf-8", "replace"), path)
    else:
        fields = _BinaryFields(content) if content.startswith(_BINARY) else _TextFields(content)
        try:
            pdfs = _pdfs(fields)
        except (ValueError, IndexError, struct.error) as error:
            raise AsrError(
                f"{path}: this is not a Kaldi transition model, or it is damaged; give final.mdl, or the output of "
                "'show-transitions phones.txt final.mdl'."
            ) from error
    if not pdfs or not 0 <= min(pdfs) <= max(pdfs) < 1 << 31:
        raise AsrError(
            f"{path}: the transition model has no transitions, or an output below 0 or above {(1 << 31) - 1}; the "
            "file is damaged."
        )
    return np.array([-1, *pdfs], dtype=np.int32)


def _shown(text: str, path: str | Path) -> list[int]:
    """Parses the output of `show-transitions`."""
    pdfs: list[int] = []
    forward = again = -1
    for number, line in enumerate(text.splitlines(), start=1):
        if state := _STATE.match(line):
            one, forward_pdf, loop_pdf = state.groups()
            forward, again = (int(one), int(one)) if one is not None else (int(forward_pdf), int(loop_pdf))
        elif transition := _TRANSITION.match(line):
            if int(transition[1]) != len(pdfs) + 1:
                raise AsrError(f"{path}:{number}: expected the transition id {len(pdfs) + 1}; the file is incomplete.")
            pdfs.append(again if transition[2] == "self-loop" else forward)
        elif line.strip():
            raise AsrError(f"{path}:{number}: {line.strip()[:60]!r} is not what show-transitions prints.")
    return pdfs


class _TextFields:
    """Reads the fields of a model in text form in order."""

    def __init__(self, content: bytes) -> None:
        self._fields = content.decode("utf-8", "replace").split()
        self._position = 0

    def token(self) -> str:
        self._position += 1
        return self._fields[self._position - 1]

    def integer(self) -> int:
        return int(self.token())

    def topology(self) -> _Topology:
        entry_of: dict[int, int] = {}
        entries: list[list[list[int]]] = []
        while (name := self.token()) == "<TopologyEntry>":
            _expect(self.token(), "<ForPhones>")
            while (phone := self.token()) != "</ForPhones>":
                entry_of[int(phone)] = len(entries)
            states: list[list[int]] = []
            while (name := self.token()) != "</TopologyEntry>":
                if name == "<State>":
                    _expect(self.token(), str(len(states)))
                    states.append([])
                elif name == "<Transition>":
                    states[-1].append(self.integer())
                    float(self.token())
                elif name in ("<PdfClass>", "<ForwardPdfClass>", "<SelfLoopPdfClass>"):
                    self.integer()
                else:
                    _expect(name, "</State>")
            entries.append(states)
        _expect(name, "</Topology>")
        if max(entry_of, default=0) > _MOST_PHONES:
            raise ValueError
        return [entry_of.get(phone, -1) for phone in range(max(entry_of, default=0) + 1)], entries


class _BinaryFields:
    """Reads the fields of a model in binary form in order."""

    def __init__(self, content: bytes) -> None:
        self._content, self._position = content, len(_BINARY)

    def token(self) -> str:
        begin, end = self._position, self._content.index(b" ", self._position)
        self._position = end + 1
        return self._content[begin:end].decode("ascii")

    def _value(self, form: str) -> int:
        """Reads a byte with the number's size, which must be 4, and the number."""
        size, value = struct.unpack_from("<b" + form, self._content, self._position)
        if size != 4:
            raise ValueError
        self._position += 5
        return int(value)

    def integer(self) -> int:
        return self._value("i")

    def _integers(self) -> list[int]:
        num = self.integer()
        if num < 0:
            raise ValueError
        values = struct.unpack_from(f"<{num}i", self._content, self._position)
        self._position += 4 * num
        return list(values)

    def topology(self) -> _Topology:
        self._integers()  # the phones, which `entry_of` covers
        entry_of = self._integers()
        num_entries = self.integer()
        has_two_classes = num_entries == -1  # a forward class and a self-loop class
        if has_two_classes:
            num_entries = self.integer()
        entries = []
        for _ in range(num_entries):
            states = []
            for _ in range(self.integer()):
                for _ in range(1 + has_two_classes):
                    self.integer()
                states.append([self._destination() for _ in range(self.integer())])
            entries.append(states)
        _expect(self.token(), "</Topology>")
        return entry_of, entries

    def _destination(self) -> int:
        state = self.integer()
        self._value("f")
        return state


def _pdfs(fields: _TextFields | _BinaryFields) -> list[int]:
    """Reads a transition model -> the pdfs of all transition ids, in order."""
    _expect(fields.token(), "<TransitionModel>")
    _expect(fields.token(), "<Topology>")
    entry_of, entries = fields.topology()
    kind = fields.token()
    if kind not in ("<Triples>", "<Tuples>"):
        raise ValueError
    pdfs = []
    for _ in range(fields.integer()):
        phone, state, forward = fields.integer(), fields.integer(), fields.integer()
        again = fields.integer() if kind == "<Tuples>" else forward
        if min(phone, state, entry_of[phone]) < 0:
            raise ValueError
        pdfs += [again if following == state else forward for following in entries[entry_of[phone]][state]]
        if len(pdfs) > _MOST_TRANSITIONS:
            raise ValueError
    _expect(fields.token(), kind.replace("<", "</"))
    return pdfs


def _expect(found: str, wanted: str) -> None:
    if found != wanted:
        raise ValueError
