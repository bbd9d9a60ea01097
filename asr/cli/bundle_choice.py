"""Which bundle a command takes where the user names none."""

from __future__ import annotations

import os
from pathlib import Path

from asr.bundle_manifest import FILE_NAME
from asr.errors import AsrError

_CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
_PREFERRED = "librispeech"


def bundle_folder(asked: str | None, checkpoints: Path = _CHECKPOINTS) -> Path:
    """The folder of a bundle.

    Args:
        asked: a folder, the name of a folder in `checkpoints`, or None for the variable ASR_BUNDLE, else the
            preferred one of `checkpoints`.
        checkpoints: the checkout's own bundles.

    Raises:
        AsrError: there is no such bundle.
    """
    own = sorted(path.parent for path in checkpoints.glob(f"*/{FILE_NAME}"))
    names = ", ".join(path.name for path in own) or "none"
    asked = asked or os.environ.get("ASR_BUNDLE")
    if asked:
        for folder in (Path(asked), checkpoints / asked):
            if (folder / FILE_NAME).is_file():
                return folder
        raise AsrError(f"{asked}: there is no bundle here ({FILE_NAME} is missing); checkpoints/ has: {names}.")
    if not own:
        raise AsrError(f"{checkpoints}: there is no trained bundle here; name one with --bundle.")
    return next((path for path in own if path.name == _PREFERRED), own[0])
