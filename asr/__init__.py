"""A PyTorch-native speech recognizer that decodes with a large language model inside the search.

The public interface; everything is imported on first use, so that `import asr` takes no time.

Example:
    >>> import asr
    >>> recognizer = asr.load("librispeech")  # doctest: +SKIP
    >>> recognizer("talk.mp3")[0].text  # doctest: +SKIP
    'HELLO WORLD'
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asr import old_paths
from asr.errors import AsrError

if TYPE_CHECKING:
    from asr.bundle import Bundle
    from asr.decoding.settings import DecodingOptions, ResourceOptions
    from asr.lm.interface import LanguageModel
    from asr.recognizer import Recognizer
    from asr.streaming import StreamingOptions, StreamingRecognizer

__version__ = "0.1.0"

__all__ = [
    "AsrError",
    "Bundle",
    "DecodingOptions",
    "LanguageModel",
    "Recognizer",
    "ResourceOptions",
    "StreamingOptions",
    "StreamingRecognizer",
    "load",
]

_MODULES = {
    "Bundle": "asr.bundle",
    "DecodingOptions": "asr.decoding.settings",
    "LanguageModel": "asr.lm.interface",
    "Recognizer": "asr.recognizer",
    "ResourceOptions": "asr.decoding.settings",
    "StreamingOptions": "asr.streaming",
    "StreamingRecognizer": "asr.streaming",
}

old_paths.install()


def load(bundle: str | Path | None = None, **arguments: Any) -> Recognizer:
    """Loads a recognizer.

    Args:
        bundle: folder of a bundle; the name of one in `checkpoints/`; or one to fetch: `https://...`,
            `hf:owner/name`, or the name of a published bundle. None takes the environment variable ASR_BUNDLE, or else
            the preferred bundle; but no bundle if `acoustic_model` comes with an `ngram` or a `lexicon`.
        arguments: those of `Recognizer` and `Recognizer.from_folder`, such as `mode="ngram"`.

    Raises:
        AsrError: there is no such bundle, it cannot be fetched, it is damaged, or an argument is out of range.
    """
    from asr.kernels.interrupts import interrupts_between_loops

    with interrupts_between_loops():
        from asr.bundle import bundle_folder
        from asr.recognizer import Recognizer

        # An external acoustic model that comes with its own words needs no bundle.
        has_words = arguments.get("ngram") is not None or arguments.get("lexicon") is not None
        is_alone = bundle is None and has_words and arguments.get("acoustic_model") is not None
        return Recognizer.from_folder(None if is_alone else bundle_folder(bundle), **arguments)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'asr' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
