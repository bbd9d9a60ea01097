"""An object whose unpickling does something that a test can see."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class HarmfulPickle:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)
