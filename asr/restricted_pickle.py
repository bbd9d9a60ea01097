"""Files of `torch.save` read without running code from them.

`torch.load(weights_only=True)` would do, but torch 1.13's refuses floating-point numbers.
"""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

_CLASSES = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch device",
    "torch Size",
    *(f"torch {kind}Storage" for kind in "Float Double Half BFloat16 Long Int Short Char Byte Bool".split()),
}
# These name classes by what lies on the stack or in a registry; `torch.save` writes none of them.
_HIDDEN_NAMES = {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}


def load_tensors(path: str | Path, further_classes: Collection[str] = ()) -> Any:
    """Tensors, numbers, strings and containers of them, on the CPU.

    Args:
        path: a file of `torch.save`.
        further_classes: `module name` of what else may be made from the file.

    Raises:
        pickle.UnpicklingError: it asks for another class. A file that is missing or damaged raises almost anything.
    """
    with zipfile.ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if name.endswith(".pkl")]
        if len(pickles) != 1:  # a TorchScript archive has several
            raise pickle.UnpicklingError(f"it has {len(pickles)} pickles where one belongs")
        content = archive.read(pickles[0])
    for opcode, argument, _ in pickletools.genops(content):
        named = opcode.name == "GLOBAL" and argument not in _CLASSES and argument not in further_classes
        if named or opcode.name in _HIDDEN_NAMES:
            raise pickle.UnpicklingError(f"{argument or opcode.name} has no place in such a file")
    return torch.load(str(path), map_location="cpu", weights_only=False)
