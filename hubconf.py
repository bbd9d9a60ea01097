"""Entry points for torch.hub: `torch.hub.load(<checkout>, "recognizer", source="local")`.

A bundle is a folder, the name of one in `checkpoints/`, or one that is fetched: `https://...` or `hf:owner/name`.
"""

from __future__ import annotations

from typing import Any as _Any

import asr as _asr
from asr.bundle import Bundle as _Bundle
from asr.bundle import bundle_folder as _bundle_folder
from asr.bundle import read_rnn_lm as _read_rnn_lm
from asr.models.acoustic_model import AcousticModel as _AcousticModel

dependencies = ["torch", "numpy", "safetensors", "soundfile", "yaml"]


def recognizer(bundle: str | None = None, **arguments: _Any) -> _asr.Recognizer:
    """A module that turns recordings into words.

    Args:
        bundle: folder, name, `https://...` or `hf:owner/name`; the preferred one if None.
        arguments: those of `asr.load`, such as `mode="ngram"`, or `acoustic_model="torchaudio:..."` with an `ngram` for
            a CTC network from elsewhere.

    Returns:
        an `asr.Recognizer`; call it with a file's path, samples (L,) or a batch (N, L).

    Example:
        >>> recognizer = torch.hub.load(".", "recognizer", source="local")  # doctest: +SKIP
        >>> recognizer(waveform, sampling_rate=16000)[0].text  # doctest: +SKIP
        'HELLO WORLD'
    """
    return _asr.load(bundle, **arguments)


def streaming_recognizer(
    bundle: str | None = None, options: _asr.StreamingOptions | None = None, **arguments: _Any
) -> _asr.StreamingRecognizer:
    """Turns live audio into words, many streams at a time.

    Args:
        bundle: as of `recognizer`.
        options: chunk length, look-ahead and endpoint rules; `asr.StreamingOptions`.
        arguments: as of `recognizer`.

    Returns:
        an `asr.StreamingRecognizer` with the methods `open`, `push`, `step` and `close`.

    Example:
        >>> streaming = torch.hub.load(".", "streaming_recognizer", source="local")  # doctest: +SKIP
        >>> stream = streaming.open(sampling_rate=8000)  # doctest: +SKIP
    """
    return _asr.StreamingRecognizer(_asr.load(bundle, **arguments), options)


def acoustic_model(bundle: str | None = None) -> _AcousticModel:
    """A module that turns waveforms into log-probabilities of tokens: features and network of a bundle.

    Args:
        bundle: as of `recognizer`.

    Returns:
        a module; `log_prob, num_frames = model(waveform, num_samples)` with waveform (N, L) gives (N, T, C) natural
        logs and (N,) frames. Its `tokens` name the C outputs; number 0 is the blank.

    Example:
        >>> model = torch.hub.load(".", "acoustic_model", source="local")  # doctest: +SKIP
        >>> log_prob, num_frames = model(waveform)  # doctest: +SKIP
    """
    return _AcousticModel.from_bundle(_Bundle.load(_bundle_folder(bundle)))


def language_model(bundle: str | None = None) -> _Any:
    """The recurrent language model of a bundle.

    Args:
        bundle: as of `recognizer`; also a folder of 'asr lm rnn export', or a checkpoint of 'asr fit'.

    Returns:
        an `asr.lm.rnn.model.RNNLanguageModel`; its `vocabulary` numbers the words.

    Raises:
        asr.AsrError: the bundle has no recurrent language model.

    Example:
        >>> model = torch.hub.load(".", "language_model", source="local")  # doctest: +SKIP
        >>> len(model.vocabulary)  # doctest: +SKIP
        64003
    """
    return _read_rnn_lm(_bundle_folder(bundle)).network
