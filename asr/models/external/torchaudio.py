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

from asr.errors import AsrError
from asr.models.external.base import ExternalModel, package
from asr.text.ctc_tokens import CTCTokens


class TorchaudioModel(ExternalModel):
    """A `torchaudio.models.Wav2Vec2Model`.

    Args:
        network: (waveforms, lengths) -> (emissions, lengths).
        labels: one for each column of its output; the blank is `-`.
        sampling_rate: in Hz.
        name: shown to users.
    """

    def __init__(self, network: nn.Module, labels: Sequence[str], sampling_rate: int = 16000, name: str = "") -> None:
        self.name = name or type(network).__name__
        self.network = network.eval()
        self.tokens = CTCTokens(list(labels))
        self.sampling_rate = sampling_rate
        self.frame_shift = _stride(network) / sampling_rate

    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """See `ExternalModel.forward`."""
        device = next(self.network.parameters()).device
        emissions, num_frames = self.network(waveform.to(device), num_samples.to(device))
        return emissions.log_softmax(-1), num_frames


def load(name: str, **options: Any) -> TorchaudioModel:
    """Loads the pipeline of that name; torchaudio downloads its weights if they are not on this machine.

    Raises:
        AsrError: there is no such CTC pipeline, or its weights cannot be downloaded.
    """
    pipelines = package("torchaudio.pipelines", f"torchaudio:{name}")
    pipeline = getattr(pipelines, name, None)
    if pipeline is None or not hasattr(pipeline, "get_labels"):
        known = sorted(each for each in dir(pipelines) if hasattr(getattr(pipelines, each), "get_labels"))
        raise AsrError(f"torchaudio:{name}: there is no such CTC pipeline; there are {', '.join(known)}.")
    file_name = Path(str(getattr(pipeline, "_path", ""))).name
    try:
        network = pipeline.get_model(**options)
    except (urllib.error.URLError, OSError, RuntimeError) as error:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AsrError(
            f"torchaudio:{name}: its weights cannot be downloaded ({reason}); put the file {file_name} into {folder}."
        ) from error
    return TorchaudioModel(network, pipeline.get_labels(), int(pipeline.sample_rate), f"torchaudio:{name}")


def _stride(network: nn.Module) -> int:
    """Samples from one frame to the next: the product of the strides of the feature extractor's convolutions."""
    extractor = network
    for name in ("model", "feature_extractor"):
        # Pipelines may wrap their network.
        extractor = getattr(extractor, name, extractor) if name == "model" else getattr(extractor, name)
    strides = [int(module.stride[0]) for module in extractor.modules() if isinstance(module, nn.Conv1d)]
    return math.prod(strides)
