"""Transducers of `torchaudio.pipelines` (Emformer), and their networks with your own weights.

Shapes: N utterances, L samples, T frames, E encoder dimensions, K hypotheses, P prediction dimensions, C tokens.
"""

from __future__ import annotations

import pickle
import urllib.error
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.errors import AsrError, package
from asr.models.external.base import each_alone, named, positive_integer, reason_of
from asr.models.external.encoder import TorchEncoder
from asr.models.external.torchaudio import pipeline_named
from asr.models.transducers.base import State, Transducer
from asr.text.ctc_tokens import CTCTokens


class TorchaudioTransducer(TorchEncoder, Transducer):
    """A `torchaudio.models.RNNT`.

    Args:
        network: moved to evaluation mode.
        feature_extractor: waveform (L,) -> features (T', F), padded for the encoder's right context, and T' as (1,).
        tokens: one for each column of the network's output; the blank is one of them, usually the last.
        sampling_rate: in Hz.
        hop_length: samples from one frame of features to the next.
        name: shown to users.

    Raises:
        AsrError: the tokens cannot be used or do not fit the network, the sampling rate or the hop length is not a
            whole number greater than 0, or the network is of another class.
    """

    def __init__(
        self,
        network: Any,
        feature_extractor: Callable[[Tensor], tuple[Tensor, Tensor]],
        tokens: CTCTokens | Sequence[str],
        sampling_rate: int = 16000,
        hop_length: int = 160,
        name: str = "",
    ) -> None:
        self.name = name or type(network).__name__
        self.network = network.eval()
        self._extractor = feature_extractor
        with named(self.name):
            if not isinstance(tokens, CTCTokens):
                tokens = CTCTokens(list(tokens))
                tokens.name = self.name
            self.tokens = tokens
        self.sampling_rate = positive_integer(sampling_rate, f"{self.name}: the sampling_rate")
        hop_length = positive_integer(hop_length, f"{self.name}: the hop_length")
        with named(f"{self.name}: it is not a network like torchaudio.models.RNNT", "give one of emformer_rnnt_model"):
            self.frame_shift = hop_length * int(self.network.transcriber.time_reduction.stride) / self.sampling_rate
            num_columns = int(self.network.joiner.linear.out_features)
        if num_columns != len(self.tokens):
            raise AsrError(
                f"{self.name}: the network has {num_columns} tokens, but the list has {len(self.tokens)}; give its own "
                "tokens, blank included."
            )

    def encode(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        return each_alone(self._encode_one, waveform, num_samples)

    def _encode_one(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        place = next(self.network.parameters())
        with named(f"{self.name}: the network cannot read this audio", "the recording may be too short"):
            features, num_features = self._extractor(waveform[0].cpu())
            # The lengths that the network returns count frames of the right context.
            encoded, _ = self.network.transcribe(features[None].to(place), num_features.to(place.device))
        return encoded, torch.tensor([encoded.shape[1]])

    def start(self) -> tuple[Tensor, State]:
        # In training, the blank stands before the first token.
        return self._predict(torch.tensor([self.tokens.blank_id], device=self.device), None)

    def predict(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        layers = [list(state[number : number + 2]) for number in range(0, len(state), 2)]
        return self._predict(token, layers)

    def _predict(self, token: Tensor, layers: list[list[Tensor]] | None) -> tuple[Tensor, State]:
        """Reads a token (K,) after the states of an LSTM's layers, [h, c] each, (K, hidden)."""
        output, _, following = self.network.predict(token[:, None], torch.ones_like(token), layers)
        return output.squeeze(1), tuple(each for layer in following for each in layer)

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        ones = torch.ones(len(encoded), dtype=torch.int64, device=encoded.device)
        logits, _, _ = self.network.join(encoded[:, None], ones, predicted[:, None], ones)
        return logits.flatten(1).float()


def load(name: str) -> TorchaudioTransducer:
    """Loads the pipeline of that name; torchaudio downloads its files if they are not on this machine.

    Raises:
        AsrError: torchaudio or sentencepiece is missing, there is no such transducer, or its files cannot be downloaded
            or read.
    """
    full_name = f"torchaudio:{name}"
    pipeline = pipeline_named(name, "get_token_processor", "transducer")
    utils = package("torchaudio.utils", full_name)
    package("sentencepiece", full_name)
    files = (pipeline._rnnt_path, pipeline._global_stats_path, pipeline._sp_model_path)
    try:
        # `get_decoder` would unpickle objects of any class.
        weights = torch.load(utils.download_asset(files[0]), map_location="cpu", weights_only=True)
        network = pipeline._rnnt_factory_func()
        network.load_state_dict(weights)
        extractor, pieces = pipeline.get_feature_extractor(), pipeline.get_token_processor().sp_model
    except (urllib.error.URLError, OSError, RuntimeError, ValueError, LookupError, pickle.UnpicklingError) as error:
        folder = Path(torch.hub.get_dir()) / "torchaudio"
        raise AsrError(
            f"{full_name}: its files cannot be downloaded or read ({reason_of(error)}); put {', '.join(files)} into "
            f"{folder}."
        ) from error
    symbols = [pieces.id_to_piece(column) for column in range(pieces.get_piece_size())]
    with named(full_name):
        tokens = CTCTokens(symbols, blank=pipeline._blank, piece_model=pieces)
    return TorchaudioTransducer(network, extractor, tokens, pipeline.sample_rate, pipeline.hop_length, full_name)
