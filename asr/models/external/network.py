"""External networks in place of an acoustic model of this program: samples in, log-probabilities out.

Shapes: N utterances, L samples, T frames of output, C tokens.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asr.audio.resample import checked_rate
from asr.errors import AsrError
from asr.graph.topology import with_last_boundary
from asr.models.external.base import ExternalModel, load_acoustic_model, named
from asr.serialization import ModelSpec, OwnFormat
from asr.text.ctc_tokens import CTCTokens
from asr.text.plain_form import PlainForm, PlainTokens

_ONNX = "onnx:"


class Samples(nn.Module):
    """Samples in place of features, for networks that compute features themselves.

    Args:
        sampling_rate: in Hz.

    Raises:
        AsrError: the sampling rate is not a whole number, or out of range.
    """

    window: Tensor
    frame_shift = frame_length = feature_dim = 1

    def __init__(self, sampling_rate: int) -> None:
        super().__init__()
        self.sampling_rate = checked_rate(sampling_rate, "Samples: sampling_rate")
        self.register_buffer("window", torch.ones(1), persistent=False)

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """See `asr.audio.fbank.Fbank.num_frames`; each sample is a frame."""
        return num_samples

    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """waveform (N, L) in [-1, 1], num_samples (N,) -> (N, L, 1) float32 and num_samples."""
        return waveform.float().unsqueeze(2), num_samples


class ExternalNetwork(nn.Module, OwnFormat):
    """An `ExternalModel` as an `asr.models.interface.AcousticNetwork`; its features are those of `Samples`.

    The blank becomes token 0. If the tokens include a boundary between words, an added frame ends the last word. The
    arguments are the fields of a bundle's description; `of` makes them from a model.

    Args:
        source: `KIND:NAME` as for `load_acoustic_model`; only `onnx:` if the file is in the bundle.
        tokens: arguments of `CTCTokens`.
        sampling_rate: in Hz.
        frame_shift: seconds from one output frame to the next.
        normalize: whether an ONNX network reads normalized samples; None if it reads none, or as usual.
        separators: of tokens in plain form (`PlainTokens`), the characters that separate words; None if tokens are as
            the network has them.
    """

    num_features = 1

    def __init__(
        self,
        source: str,
        tokens: dict[str, Any],
        sampling_rate: int,
        frame_shift: float,
        normalize: bool | None = None,
        separators: str | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.tokens = CTCTokens(**tokens)
        if separators is not None:
            self.tokens = PlainTokens(self.tokens, PlainForm(separators))
        self.frame_shift = frame_shift
        self.normalize = normalize
        self.num_tokens = len(self.tokens.table)
        self.subsampling_factor = max(1, round(frame_shift * sampling_rate))
        # Its device is that of the network, even if the network is not a torch module.
        self.place = nn.Parameter(torch.zeros(0), requires_grad=False)
        self._model: ExternalModel | None = None

    @classmethod
    def of(cls, model: ExternalModel, tokens: CTCTokens | None = None) -> ModelSpec:
        """A model with the description from which a bundle builds it again.

        Args:
            model: the network.
            tokens: its tokens, perhaps in plain form; None for `model.tokens`.
        """
        tokens = model.tokens if tokens is None else tokens
        arguments: dict[str, Any] = {
            "source": _ONNX if model.name.startswith(_ONNX) else model.name,
            "tokens": {
                "symbols": list(model.tokens.symbols),
                "blank": model.tokens.blank_id,
                "word_boundary": model.tokens.word_boundary or "",
                "kind": model.tokens.kind,
            },
            "sampling_rate": model.sampling_rate,
            "frame_shift": model.frame_shift,
        }
        normalizes = getattr(model, "normalizes", None)
        if normalizes is not None:
            arguments["normalize"] = normalizes
        if isinstance(tokens, PlainTokens):
            arguments["separators"] = tokens.form.separators
        network = cls(**arguments)
        network._use(model)
        return ModelSpec("External", arguments, network.eval())

    @property
    def model(self) -> ExternalModel:
        """The network itself."""
        assert self._model is not None
        return self._model

    @property
    def file_suffix(self) -> str | None:
        """See `OwnFormat`; only ONNX files go into a bundle."""
        return ".onnx" if self.source == _ONNX else None

    def load_file(self, path: Path | None) -> None:
        self._use(load_acoustic_model(self.source) if path is None else self._read(path))

    def save_file(self, path: Path | None) -> None:
        name = self.model.name
        kind, _, place = name.partition(":")
        if path is not None:
            shutil.copyfile(place, path)
            what = f"{name}: a bundle holds one file for the network, and a copy of this one cannot be read alone"
            with named(what, "if its weights are in other files, save them in the same one"):
                self._read(path)
        elif kind == "torchscript":
            raise AsrError(f"{name}: a bundle holds no programs, such as TorchScript files; export it to ONNX.")
        elif kind not in ("torchaudio", "transformers") or Path(place).is_dir():
            raise AsrError(
                f"{name}: a bundle can hold an ONNX file, or name a torchaudio pipeline or a transformers model on the "
                "hub, but not this; export it to ONNX."
            )

    def forward(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        """Samples (N, L, 1), their numbers (N,) -> natural log-probabilities (N, T, C) float32, blank first, (N,)."""
        log_prob, num_outputs = self.model.run(features.squeeze(2).cpu(), num_frames.cpu())
        log_prob = self.tokens.in_order_of_table(log_prob.to(features.device))
        return with_last_boundary(log_prob, num_outputs.to(num_frames), self.tokens.boundary_id)

    def forward_all_layers(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """The call's result, in a list."""
        log_prob, num_outputs = self(features, num_frames)
        return [log_prob], num_outputs

    def forward_normalized(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """Same as `forward_all_layers`: external networks normalize their features themselves."""
        return self.forward_all_layers(features, num_frames)

    def _read(self, path: Path) -> ExternalModel:
        return load_acoustic_model(
            f"{_ONNX}{path}", tokens=self.tokens, frame_shift=self.frame_shift, normalize=self.normalize
        )

    def _use(self, model: ExternalModel) -> None:
        if model.tokens.symbols != self.tokens.symbols:
            raise AsrError(
                f"{model.name}: its tokens are not those that the bundle was made for; make the bundle again."
            )
        self._model = model
        network = getattr(model, "network", None)
        if isinstance(network, nn.Module):
            self.network = network  # moves to the device with this module
