"""Entry points for torch.hub: `torch.hub.load(<checkout>, "recognizer", source="local")`."""

from __future__ import annotations

from typing import Any

from asr.cli.options import bundle_folder
from asr.recognizer import Recognizer

dependencies = ["torch", "numpy", "safetensors"]


def recognizer(bundle: str | None = None, **arguments: Any) -> Recognizer:
    """A module that turns waveforms into words.

    Args:
        bundle: folder of a bundle, or its name in `checkpoints/`; the checkout's preferred one if None.
        arguments: of `asr.recognizer.Recognizer`, such as `mode="ngram"`.

    Example:
        >>> recognizer = torch.hub.load(".", "recognizer", source="local")
        >>> recognizer(waveform, sampling_rate=16000)[0].text
    """
    return Recognizer.from_folder(bundle_folder(bundle), **arguments)
