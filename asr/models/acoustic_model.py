"""Features and network of a bundle as one module: waveforms in, log-probabilities of tokens out.

Shapes: N recordings, L samples, T output frames, C tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from asr.audio.samples import as_samples
from asr.bundle import Bundle
from asr.errors import AsrError
from asr.models.interface import moves_only


class AcousticModel(nn.Module):
    """Waveforms to frame log-probabilities, in evaluation mode unless it is trained further.

    Args:
        features: waveform to features.
        network: features to log-probabilities.
        tokens: names of the C outputs; number 0 is the blank.
    """

    def __init__(self, features: nn.Module, network: nn.Module, tokens: tuple[str, ...]) -> None:
        super().__init__()
        self.features = features
        self.network = network
        self.tokens = tokens
        self.eval()

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> AcousticModel:
        """The acoustic model of a bundle."""
        return cls(bundle.features.network, bundle.acoustic_model.network, tuple(bundle.graph.tokens.tokens))

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> AcousticModel:
        """Applies `.half()` and other changes of type only to the network; features stay float32."""
        self.features._apply(moves_only(fn), *args, **kwargs)
        self.network._apply(fn, *args, **kwargs)
        return self

    @property
    def sampling_rate(self) -> int:
        """Sampling rate of the waveforms, in Hz."""
        return int(self.features.sampling_rate)  # type: ignore[arg-type]

    @property
    def frame_seconds(self) -> float:
        """Time between two output frames."""
        shift: int = self.features.frame_shift * self.network.subsampling_factor  # type: ignore[assignment, operator]
        return shift / self.sampling_rate

    def forward(self, waveform: Tensor, num_samples: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Computes log-probabilities.

        Args:
            waveform: (L,) or (N, L) at `sampling_rate`: floating-point samples in [-1, 1], int16 or int32.
            num_samples: (N,) length of each recording of a padded batch; None if there is no padding.

        Returns:
            log_prob (N, T, C), natural logs, and num_frames (N,).

        Raises:
            AsrError: the waveform has another type or shape, or the lengths do not fit it.
        """
        waveform = as_samples(waveform, "the waveform")
        if waveform.dim() == 1:
            waveform = waveform[None]
        if waveform.dim() != 2:
            raise AsrError(f"the waveform has shape {tuple(waveform.shape)}; give (L,) or (N, L).")
        if num_samples is None:
            num_samples = torch.full((len(waveform),), waveform.shape[1], dtype=torch.int64, device=waveform.device)
        elif num_samples.shape != waveform.shape[:1]:
            raise AsrError(
                f"num_samples has shape {tuple(num_samples.shape)}; give ({len(waveform)},), one for each recording."
            )
        elif len(waveform) and not 0 <= int(num_samples.min()) <= int(num_samples.max()) <= waveform.shape[1]:
            raise AsrError(
                f"num_samples is from {int(num_samples.min())} to {int(num_samples.max())}; the waveform has "
                f"{waveform.shape[1]} samples."
            )
        features, num_frames = self.features(waveform, num_samples)
        if int(num_frames.max()) == 0:
            return features.new_zeros(len(waveform), 0, len(self.tokens)), num_frames
        log_prob, num_frames = self.network(features, num_frames)
        return log_prob, num_frames
