"""Safe reader for files of `torch.save`: it runs no code from them and detects flipped bits.

`torch.load` is not used, because it might parse a file differently from the code that checked it. `zipfile` opens the
archive once and compares each entry with its CRC-32. The pickle may refer to a few constructors only, which functions
of this module replace, and every tensor must lie inside its storage.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {
    f"torch {kind}Storage": dtype
    for kind, dtype in {
        "Float": torch.float32,
        "Double": torch.float64,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
_MAX_ENTRIES = 1 << 20
_MAX_PICKLE_BYTES = 1 << 28
_MAX_DIMENSIONS = 16


def load_tensors(path: str | Path, states_of: Collection[str] = ()) -> Any:
    """Loads tensors, numbers, strings and containers of them to the CPU.

    Args:
        path: a file of `torch.save`.
        states_of: further classes, as `module name`. Their objects are not created; each is replaced by an
            `ObjectState`.

    Raises:
        pickle.UnpicklingError: the file is not of `torch.save`, is damaged, or holds other objects.
        OSError: the file cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            if file.read(4) != b"PK\x03\x04":
                raise pickle.UnpicklingError("it does not begin as an archive of torch.save")
            num_bytes = file.seek(0, io.SEEK_END)
            with zipfile.ZipFile(file) as archive:
                return _Archive(archive, num_bytes, states_of).content()
    except (OSError, pickle.UnpicklingError):
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        raise pickle.UnpicklingError(str(error) or type(error).__name__) from error


class ObjectState:
    """The saved state of an object whose class is not loaded.

    Attributes:
        state: the state in the file, unchecked.
    """

    def __init__(self) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def ragged_parts(value: Any, num_rows: int) -> tuple[Tensor, Tensor] | None:
    """The parts of a `k2.RaggedTensor` with two axes, as `load_tensors` reads it.

    Returns:
        Where each row begins, with the end of the last one, (num_rows + 1,) int64, and the values of all rows, (W,)
        int64; None if it is something else, or has another number of rows.
    """
    state = getattr(value, "state", None)
    if not isinstance(state, tuple) or len(state) != 3:
        return None
    begin, _, values = state  # row_splits, "row_ids1", values
    if not all(isinstance(part, Tensor) and part.dtype == torch.int32 and part.dim() == 1 for part in (begin, values)):
        return None
    begin, values = begin.long(), values.long()
    fits = len(begin) == num_rows + 1 and int(begin[0]) == 0 and int(begin[-1]) == len(values)
    return (begin, values) if fits and bool((begin[1:] >= begin[:-1]).all()) else None


class _Constructor:
    """A callable that a pickle can call but not modify."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError("it sets attributes of a constructor")


class _Archive:
    """The entries of an archive; duplicate names are refused."""

    def __init__(self, archive: zipfile.ZipFile, num_bytes: int, states_of: Collection[str]) -> None:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise pickle.UnpicklingError(f"it has {len(pickles)} entries 'data.pkl' instead of one")
        self._root = pickles[0].removesuffix("data.pkl")
        others = [name for name in names if not name.startswith(self._root) or name.lower().endswith(".pkl")]
        if len(others) != 1 or len({name.lower() for name in names}) != len(names) or len(names) > _MAX_ENTRIES:
            raise pickle.UnpicklingError("its entries are not those of one archive of torch.save")
        # zipfile tolerates leading bytes before an archive and shifts all offsets by them.
        if min(entry.header_offset for entry in entries) != 0:
            raise pickle.UnpicklingError("there are bytes before the archive")
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
            raise pickle.UnpicklingError("an entry is compressed or encrypted, which torch.save never does")
        if any(entry.file_size != entry.compress_size for entry in entries):
            raise pickle.UnpicklingError("an entry has two sizes")
        if sum(entry.file_size for entry in entries) > num_bytes:
            raise pickle.UnpicklingError("its entries overlap")
        self._archive = archive
        self._names = set(names)
        self._sizes = {entry.filename: entry.file_size for entry in entries}
        self._states_of = states_of
        self._storages: dict[str, Tensor] = {}

    def content(self) -> Any:
        for name in sorted(self._names):
            if name.endswith("/byteorder") and self._archive.read(name).decode() != sys.byteorder:
                raise pickle.UnpicklingError("its byte order is not that of this machine")
        name = self._root + "data.pkl"
        if self._sizes[name] > _MAX_PICKLE_BYTES:
            raise pickle.UnpicklingError("its pickle is too large")
        content = self._archive.read(name)
        _require_plain(content)
        value = _Unpickler(content, self).load()
        # Entries that nothing refers to are read for their checksums: damage there makes the whole file suspect.
        for entry in self._archive.infolist():
            if entry.filename.removeprefix(self._root + "data/") not in self._storages:
                self._archive.read(entry)
        return value

    def storage(self, reference: Any) -> Tensor:
        """The one-dimensional storage that a persistent id refers to."""
        if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
            raise pickle.UnpicklingError("it refers to something that is not a storage")
        _, dtype, key, _, num_elements = reference
        name = f"{self._root}data/{key}"
        if not isinstance(dtype, torch.dtype) or not isinstance(key, str) or name not in self._names:
            raise pickle.UnpicklingError(f"the storage {key!r} is missing")
        if key not in self._storages:
            # A bytearray makes the tensor writable; `frombuffer` does not accept an empty one.
            content = bytearray(self._archive.read(name))
            self._storages[key] = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
        storage = self._storages[key]
        item_bytes = torch.empty(0, dtype=dtype).element_size()
        if not _is_size(num_elements) or num_elements * item_bytes != len(storage):
            raise pickle.UnpicklingError(f"the storage {key!r} does not have its declared size")
        return storage.view(dtype)

    def find(self, module: str, name: str) -> Any:
        """The substitute for a global name of the pickle."""
        wanted = f"{module} {name}"
        if wanted in DTYPES:
            return DTYPES[wanted]
        if wanted in self._states_of:
            return type("FreshState", (ObjectState,), {})
        if wanted in _CONSTRUCTORS:
            return _Constructor(_CONSTRUCTORS[wanted])
        raise pickle.UnpicklingError(f"{wanted} has no place in such a file")


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, archive: _Archive) -> None:
        super().__init__(io.BytesIO(content))
        self._of = archive

    def find_class(self, module: str, name: str) -> Any:
        return self._of.find(module, name)

    def persistent_load(self, pid: Any) -> Tensor:
        return self._of.storage(pid)


def _require_plain(content: bytes) -> None:
    """Refuses trailing bytes, and memo indices beyond the number of opcodes, for which the unpickler would allocate."""
    end = 0
    for num_opcodes, (opcode, argument, position) in enumerate(pickletools.genops(content)):
        if opcode.name.endswith("PUT") and not 0 <= int(str(argument)) <= num_opcodes:
            raise pickle.UnpicklingError("its memo has an index that is too large")
        if opcode.name == "STOP" and position is not None:
            end = position + 1
    if end != len(content):
        raise pickle.UnpicklingError("there are bytes after its pickle")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any = False, hooks: Any = None, *_: Any
) -> Tensor:
    """Replaces `torch._utils._rebuild_tensor_v2`; refuses tensors that do not lie inside their storage."""
    if not isinstance(storage, Tensor) or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise pickle.UnpicklingError("a tensor's description is malformed")
    numbers = (offset, *size, *stride)
    if not all(map(_is_size, numbers)) or len(size) != len(stride) or len(size) > _MAX_DIMENSIONS:
        raise pickle.UnpicklingError("a tensor has an invalid size")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    num_elements = math.prod(size)
    if num_elements > len(storage) or (num_elements and last >= len(storage)):
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    tensor = torch.as_strided(storage, size, stride, offset if num_elements else 0)
    return tensor.requires_grad_(bool(requires_grad)) if tensor.is_floating_point() else tensor


def _parameter(data: Any, requires_grad: Any = True, hooks: Any = None) -> nn.Parameter:
    if not isinstance(data, Tensor):
        raise pickle.UnpicklingError("a parameter is not a tensor")
    return nn.Parameter(data, bool(requires_grad) and data.is_floating_point())


def _size(values: Any = ()) -> torch.Size:
    if not isinstance(values, (list, tuple)) or not all(map(_is_size, values)) or len(values) > _MAX_DIMENSIONS:
        raise pickle.UnpicklingError("a tensor's size is invalid")
    return torch.Size(values)


def _device(*description: Any) -> torch.device:
    return torch.device("cpu")


_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": OrderedDict,
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": _parameter,
    "torch device": _device,
    "torch Size": _size,
}
