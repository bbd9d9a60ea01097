"""Any `AutoModelForCTC` of transformers with its feature extractor and tokenizer: hub name or local folder.

Shapes: N utterances, L samples, T frames, C tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asr.errors import AsrError
from asr.models.external.base import (
    ExternalModel,
    frames_by_share,
    named,
    package,
    positive_integer,
    positive_number,
    reason_of,
)
from asr.text.ctc_tokens import CTCTokens

_FILES = "config.json, model.safetensors, preprocessor_config.json, tokenizer_config.json and vocab.json"
# Used in training only; checkpoints of trained networks may lack them.
_NOT_NEEDED = ("masked_spec_embed", "num_batches_tracked")


class TransformersModel(ExternalModel):
    """A CTC network of transformers.

    Args:
        network: an `AutoModelForCTC`.
        feature_extractor: that of the same checkpoint.
        tokenizer: that of the same checkpoint.
        name: shown to users.

    Raises:
        AsrError: the tokenizer's ids do not fit the network's columns, or the feature extractor is not one of audio.
    """

    def __init__(self, network: nn.Module, feature_extractor: Any, tokenizer: Any, name: str = "") -> None:
        self.name = name or type(network).__name__
        self.network = network.eval()
        self._extractor = feature_extractor
        config: Any = network.config
        with named(self.name):
            self.tokens = tokens_of(tokenizer, int(config.vocab_size), getattr(config, "pad_token_id", None))
        rate = getattr(feature_extractor, "sampling_rate", None)
        self.sampling_rate = positive_integer(rate, f"{self.name}: the sampling_rate of its feature extractor")
        ratio = getattr(config, "inputs_to_logits_ratio", None)
        # The ratio of most networks leaves out the strides of an adapter.
        if ratio is None or getattr(config, "add_adapter", False):
            self.frame_shift = self.measured_shift()
        else:
            samples = positive_number(ratio, f"{self.name}: the inputs_to_logits_ratio of its configuration")
            self.frame_shift = samples / self.sampling_rate

    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """See `ExternalModel.forward`."""
        utterances = [each[:num].cpu().numpy() for each, num in zip(waveform, num_samples.tolist(), strict=True)]
        if getattr(self._extractor, "return_attention_mask", True):
            return self._logits(utterances)
        # Networks without a mask would take the padding of shorter utterances for audio.
        parts = [self._logits([each])[0][0] for each in utterances]
        num_frames = torch.tensor([len(each) for each in parts])
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), num_frames

    def _logits(self, utterances: list[Any]) -> tuple[Tensor, Tensor]:
        place = next(self.network.parameters())
        cure = "the recording may be too short, or the feature extractor that of another network"
        with named(f"{self.name}: the network cannot read this audio", cure):
            made = self._extractor(utterances, sampling_rate=self.sampling_rate, padding=True, return_tensors="pt")
            # Weights may be of 16 bits (`torch_dtype`).
            inputs = {
                name: value.to(place.device, place.dtype if value.is_floating_point() else value.dtype)
                for name, value in made.items()
            }
            logits = self.network(**inputs).logits.float().log_softmax(-1)
        mask = inputs.get("attention_mask")
        num_frames = torch.full((len(utterances),), logits.shape[1], dtype=torch.int64)
        if mask is not None and len(utterances) > 1:
            num_inputs = mask.sum(-1)
            lengths = getattr(self.network, "_get_feat_extract_output_lengths", None)
            if lengths is not None and mask.shape[1] > logits.shape[1]:
                num_frames = lengths(num_inputs).long().cpu().clamp(max=logits.shape[1])
            else:
                num_frames = frames_by_share(num_inputs.cpu(), mask.shape[1], logits.shape[1])
        return logits.cpu(), num_frames


def tokens_of(tokenizer: Any, num_columns: int, blank: int | None) -> CTCTokens:
    """A tokenizer's symbols for the columns of a network; columns without a symbol never appear in text.

    Raises:
        AsrError: a symbol's id is not a number or is beyond the columns, or as for `CTCTokens`.
    """
    symbols = [f"<unused-{column}>" for column in range(num_columns)]
    for symbol, column in tokenizer.get_vocab().items():
        if isinstance(column, int) and 0 <= column < num_columns:
            symbols[column] = symbol
        elif symbol not in getattr(tokenizer, "all_special_tokens", ()):
            raise AsrError(
                f"the tokenizer's symbol {symbol!r} has the id {column!r}; the network has {num_columns} columns, so "
                "give its own tokenizer."
            )
    if blank is None:
        blank = tokenizer.pad_token_id
    boundary = getattr(tokenizer, "word_delimiter_token", None)
    return CTCTokens(symbols, blank=blank, word_boundary=boundary if boundary in symbols else None)


def load(name: str, **options: Any) -> TransformersModel:
    """Loads the network of a hub name or a local folder; options are passed on to `from_pretrained`.

    Raises:
        AsrError: the network is neither on this machine nor can it be downloaded, it is not a CTC network, or the
            checkpoint lacks some of its weights.
    """
    transformers = package("transformers", f"transformers:{name}")
    try:
        network, info = transformers.AutoModelForCTC.from_pretrained(name, output_loading_info=True, **options)
        _check_complete(name, info["missing_keys"])
        extractor = transformers.AutoFeatureExtractor.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except AsrError:
        raise
    except Exception as error:  # of any class, if a file is damaged
        where = "the folder must have" if Path(name).is_dir() else "without a network connection, give a folder with"
        raise AsrError(
            f"transformers:{name}: the network cannot be loaded ({reason_of(error)}); {where} {_FILES}."
        ) from error
    return TransformersModel(network, extractor, tokenizer, f"transformers:{name}")


def _check_complete(name: str, missing: Collection[str]) -> None:
    """Raises AsrError if the checkpoint lacks weights, which transformers fills with random numbers and a warning."""
    missing = sorted(key for key in missing if not key.endswith(_NOT_NEEDED))
    if missing:
        raise AsrError(
            f"transformers:{name}: the checkpoint lacks {len(missing)} weights of the network ({missing[0]}, ...); "
            "give one that was trained by CTC, with an output layer."
        )
