"""Lightning's checkpoints read without Lightning, and without running code from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asr.errors import AsrError
from asr.restricted_pickle import load_tensors


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content on the CPU: tensors, numbers, strings and containers of them, nothing else.

    Raises:
        AsrError: the file is missing or damaged, is no checkpoint, or holds objects of other classes.
    """
    try:
        content = load_tensors(path)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    else:
        if isinstance(content, dict) and "state_dict" in content:
            return content
        reason = "it has no state_dict"
    raise AsrError(f"{path}: no Lightning checkpoint can be read there ({reason}).")
