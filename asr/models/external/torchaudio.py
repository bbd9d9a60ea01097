"""CTC pipelines of `torchaudio.pipelines` (wav2vec 2.0, HuBERT, WavLM), and their networks with your own weights.

Shapes: N utterances, L samples, T frames, C tokens.
"""

from __future__ import annotations

import math
import urllib.error
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asr.errors import AsrError, package
from asr.models.external.base import ExternalModel, each_alone, named, positive_integer, reason_of
from asr.text.ctc_tokens import CTCTokens


class TorchaudioModel(ExternalModel):
    """A `torchaudio.models.Wav2Vec2Model`.

    Args:
        network: (waveforms, lengths) -> (emissions, lengths).
        labels: one for each column of its output; the blank is `-`.
        sampling_rate: in Hz.
        name: shown to users.

    Raises:
        AsrError: the labels cannot be used, the sampling rate is not a whole number greater than 0, or the network is
            of another class.
    """

    def __init__(self, network: nn.Module, labels: Sequence[str], sampling_rate: int = 16000, name: str = "") -> None:
        self.name = name or type(network).__name__
        self.network = network.eval()
        with named(self.name):
            self.tokens = CTCTokens(list(labels))
        self.sampling_rate = positive_integer(sampling_rate, f"{self.name}: the sampling_rate")
        with named(f"{self.name}: it is not a network like Wav2Vec2Model", "use CallableModel for others"):
            self.frame_shift = _stride(network) / self.sampling_rate
        # Group norm, and the norm of waveforms, average over all samples, padding and other recordings included.
        self._runs_alone = any(isinstance(module, nn.GroupNorm) for module in network.modules()) or bool(
            getattr(network, "normalize_waveform", False)
        )

    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        if not self._runs_alone:
            return self._emissions(waveform, num_samples)
        return each_alone(self._emissions, waveform, num_samples)

    def _emissions(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        place = next(self.network.parameters())
        with named(f"{self.name}: the network cannot read this audio", "the recording may be too short"):
            emissions, num_frames = self.network(waveform.to(place), num_samples.to(place.device))
        return emissions.float().log_softmax(-1), num_frames


def load(name: str, **options: Any) -> TorchaudioModel:
    """Loads the pipeline of that name; torchaudio downloads its weights if they are not on this machine.

    Raises:
        AsrError: there is no such CTC pipeline, or its weights cannot be downloaded.
    """
    pipeline = pipeline_named(name, "get_labels", "CTC pipeline")
    file_name = Path(str(getattr(pipeline, "_path", ""))).name
    try:
        network = pipeline.get_model(**options)
    except (urllib.error.URLError, OSError, RuntimeError) as error:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        raise AsrError(
            f"torchaudio:{name}: its weights cannot be downloaded ({reason_of(error)}); put the file {file_name} into "
            f"{folder}."
        ) from error
    return TorchaudioModel(network, pipeline.get_labels(), int(pipeline.sample_rate), f"torchaudio:{name}")


def pipeline_named(name: str, method: str, what: str) -> Any:
    """The pipeline of torchaudio of that name; pipelines of its kind, `what` for messages, are those with `method`.

    Raises:
        AsrError: torchaudio is missing, or there is no such pipeline.
    """
    pipelines = vars(package("torchaudio.pipelines", f"torchaudio:{name}"))
    # The module also has the class of these pipelines.
    known = [each for each, one in pipelines.items() if hasattr(one, method) and not isinstance(one, type)]
    if name not in known:
        raise AsrError(
            f"torchaudio:{name}: there is no such {what}; there are {', '.join(sorted(known)) or 'none'} in this "
            "version of torchaudio."
        )
    return pipelines[name]


def _stride(network: nn.Module) -> int:
    """Samples from one frame to the next: the product of the strides of the feature extractor's convolutions."""
    extractor = network
    for name in ("model", "feature_extractor"):
        # Pipelines may wrap their network.
        extractor = getattr(extractor, name, extractor) if name == "model" else getattr(extractor, name)
    strides = [int(module.stride[0]) for module in extractor.modules() if isinstance(module, nn.Conv1d)]
    return math.prod(strides)
