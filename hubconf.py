"""Entry points for torch.hub: `torch.hub.load(<checkout>, "recognizer", source="local")`."""

from __future__ import annotations

from typing import Any

import asr

dependencies = ["torch", "numpy", "safetensors"]


def recognizer(bundle: str | None = None, **arguments: Any) -> asr.Recognizer:
    """A module that turns recordings into words.

    Args:
        bundle: folder of a bundle, or the name of one in `checkpoints/`; the checkout's preferred one if None.
        arguments: those of `asr.Recognizer`, such as `mode="ngram"`.

    Example:
        >>> recognizer = torch.hub.load(".", "recognizer", source="local")  # doctest: +SKIP
        >>> recognizer(waveform, sampling_rate=16000)[0].text  # doctest: +SKIP
        'HELLO WORLD'
    """
    return asr.load(bundle, **arguments)
