"""As much of the package safetensors as this project calls, for `scripts/gpu_check` on machines that lack it.

A file is the length of a header in eight bytes, the header, which is JSON, and the tensors' values one behind the
other. The header names type, shape and place of each tensor, and has text under `__metadata__`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch as _torch  # `torch` in here is the module beside this one

DTYPES = {
    "F64": _torch.float64,
    "F32": _torch.float32,
    "F16": _torch.float16,
    "BF16": _torch.bfloat16,
    "I64": _torch.int64,
    "I32": _torch.int32,
    "I16": _torch.int16,
    "I8": _torch.int8,
    "U8": _torch.uint8,
    "BOOL": _torch.bool,
}


class SafetensorError(Exception):
    """A file is not what it should be."""


class safe_open:
    """Reads a file.

    Args:
        filename: of the file.
        framework: `pt` gives tensors, `np` arrays.
    """

    def __init__(self, filename: str | Path, framework: str = "pt") -> None:
        self._content = bytearray(Path(filename).read_bytes())
        self._framework = framework
        try:
            self._begin = 8 + int.from_bytes(self._content[:8], "little")
            self._header: dict[str, Any] = json.loads(self._content[8 : self._begin])
            self._metadata: dict[str, str] | None = self._header.pop("__metadata__", None)
        except (ValueError, AttributeError) as error:
            raise SafetensorError(f"the header cannot be read: {error}") from error

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def metadata(self) -> dict[str, str] | None:
        """The text in the header."""
        return self._metadata

    def keys(self) -> list[str]:
        """The names of all tensors."""
        return list(self._header)

    def get_tensor(self, name: str) -> Any:
        """One of them."""
        try:
            entry = self._header[name]
            dtype, (begin, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
            tensor = _torch.empty(entry["shape"], dtype=dtype)
            if begin != end:
                place = slice(self._begin + begin, self._begin + end)
                tensor = _torch.frombuffer(self._content[place], dtype=dtype).reshape(entry["shape"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise SafetensorError(f"the tensor {name} cannot be read: {error!r}") from error
        return tensor.numpy() if self._framework == "np" else tensor
