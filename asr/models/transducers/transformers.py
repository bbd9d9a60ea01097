"""Transducers of transformers with their feature extractors and tokenizers: hub name or local folder.

They are Parakeet's and Nemotron's (`AutoModelForRNNT`, `AutoModelForTDT`), whose prediction networks are LSTMs.

Shapes: N utterances, L samples, T frames, E encoder dimensions, K hypotheses, P prediction dimensions, D durations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from asr.errors import AsrError, package
from asr.models.external.base import named, positive_integer
from asr.models.external.encoder import TorchEncoder
from asr.models.external.transformers import AudioReader, class_by_type, load_parts, tokens_of
from asr.models.transducers.base import State, Transducer

_MAPPINGS = {"AutoModelForRNNT": "MODEL_FOR_RNNT_MAPPING", "AutoModelForTDT": "MODEL_FOR_TDT_MAPPING"}
_FIRST_VERSION = "5.24"


class TransformersTransducer(AudioReader, TorchEncoder, Transducer):
    """A transducer of transformers.

    Args:
        network: an `AutoModelForRNNT` or `AutoModelForTDT`.
        feature_extractor: that of the same checkpoint.
        tokenizer: that of the same checkpoint.
        name: shown to users.

    Raises:
        AsrError: the network is no transducer with an LSTM, the tokenizer's ids do not fit its columns, or the feature
            extractor is not one of audio.
    """

    def __init__(self, network: nn.Module, feature_extractor: Any, tokenizer: Any, name: str = "") -> None:
        super().__init__(network, feature_extractor, name)
        with named(f"{self.name}: it is not a transducer with an LSTM", "give one like Parakeet"):
            config, decoder = self.network.config, self.network.decoder
            self._embedding, self._lstm, self._projector = decoder.embedding, decoder.lstm, decoder.decoder_projector
            self._join = self.network.joint
            self.durations = tuple(map(int, getattr(config, "durations", ())))
            num_columns, blank = int(config.vocab_size), int(config.blank_token_id)
            subsampling = getattr(config.encoder_config, "subsampling_factor", None)
        with named(self.name):
            self.tokens = tokens_of(tokenizer, num_columns, blank, self.name)
        subsampling = positive_integer(subsampling, f"{self.name}: the subsampling_factor of its configuration")
        hop = getattr(feature_extractor, "hop_length", None)
        hop = positive_integer(hop, f"{self.name}: the hop_length of its feature extractor")
        self.frame_shift = subsampling * hop / self.sampling_rate

    def encode(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        return self.read(waveform, num_samples)

    def run_network(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        output = self.network.get_audio_features(**inputs)
        encoded: Tensor = output.pooler_output
        if output.attention_mask is None:
            return encoded, torch.full((len(encoded),), encoded.shape[1], dtype=torch.int64)
        return encoded, output.attention_mask.sum(-1).long().cpu()

    def start(self) -> tuple[Tensor, State]:
        zeros = torch.zeros(1, self._lstm.num_layers, self._lstm.hidden_size)
        zeros = zeros.to(next(self.network.parameters()))
        # In training, the blank stands before the first token.
        return self.predict(torch.tensor([self.tokens.blank_id], device=self.device), (zeros, zeros))

    def predict(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        layers_first = tuple(each.transpose(0, 1).contiguous() for each in state)
        output, following = self._lstm(self._embedding(token[:, None]), layers_first)
        return self._projector(output).squeeze(1), tuple(each.transpose(0, 1) for each in following)

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        logits: Tensor = self._join(encoder_hidden_states=encoded, decoder_hidden_states=predicted)
        return logits.float()


def load(name: str, **options: Any) -> TransformersTransducer:
    """Loads the network of a hub name or a local folder; options are passed on to `from_pretrained`.

    Raises:
        AsrError: transformers is missing or too old, the network is neither on this machine nor can it be downloaded,
            it is not a transducer, the checkpoint lacks some of its weights, or it needs code of its own.
    """
    full_name = f"transformers:{name}"
    transformers = package("transformers", full_name)
    if not all(hasattr(transformers, each) for each in _MAPPINGS):
        raise AsrError(
            f"{full_name}: transducers need transformers {_FIRST_VERSION} or later, but {transformers.__version__} is "
            "installed here; `pip install --upgrade transformers`."
        )
    auto_class = class_by_type(name, _MAPPINGS, "transducer")
    cure = "give one that was trained as a transducer"
    return TransformersTransducer(*load_parts(name, auto_class, cure, options), full_name)
