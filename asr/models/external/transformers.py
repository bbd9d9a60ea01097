"""Any `AutoModelForCTC` of transformers with its feature extractor and tokenizer: hub name or local folder.

Shapes: N utterances, L samples, T frames, C tokens.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asr.errors import AsrError, package
from asr.models.external.base import (
    ExternalModel,
    each_alone,
    frames_by_share,
    measured_shift,
    named,
    positive_integer,
    positive_number,
    reason_of,
)
from asr.text.byte_pieces import are_gpt2, bytes_of, from_gpt2, from_text
from asr.text.ctc_tokens import PIECE_PREFIX, CTCTokens

_FILES = (
    "config.json, model.safetensors, preprocessor_config.json, tokenizer_config.json and vocab.json or tokenizer.json"
)
# Used in training only; checkpoints of trained networks may lack them.
_NOT_NEEDED = ("masked_spec_embed", "num_batches_tracked")
MASKS = ("attention_mask", "padding_mask")
# The methods of its networks that count frames of output.
_FRAME_COUNTS = ("_get_feat_extract_output_lengths", "_get_subsampling_output_length")
_SHORTEST_SHIFT = 0.001
# The options that say where files are, and whether code in them is run: for the network, its extractor and tokenizer.
_OPTIONS_OF_FILES = (
    *("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"),
    "trust_remote_code",
)
TOLERANCE = 0.01
"""By how much log-probabilities may differ if only the order of sums does, at least."""


class AudioReader(ABC):
    """Recordings through the feature extractor of a network of transformers into the network.

    Args:
        network: moved to evaluation mode.
        feature_extractor: that of the same checkpoint.
        name: shown to users.

    Raises:
        AsrError: the feature extractor is not one of audio.

    Attributes:
        padding: as feature extractors take it.
    """

    padding: bool | str = True

    def __init__(self, network: nn.Module, feature_extractor: Any, name: str) -> None:
        self.name = name or type(network).__name__
        self.network: Any = network.eval()
        self._extractor = feature_extractor
        rate = getattr(feature_extractor, "sampling_rate", None)
        self.sampling_rate = positive_integer(rate, f"{self.name}: the sampling_rate of its feature extractor")

    @abstractmethod
    def run_network(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The network's inputs by name -> its output (N, T, X), and frames (N,) int64 on the host."""

    def read(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """(N, L) float in [-1, 1] and (N,) -> the network's output for each recording, as if it was alone."""
        if len(num_samples) > 1 and not self._ignores_padding:
            return each_alone(self._read_together, waveform, num_samples)
        return self._read_together(waveform, num_samples)

    @functools.cached_property
    def _ignores_padding(self) -> bool:
        """Whether recordings have the same output beside longer ones.

        Networks without a mask take padding for audio, and the convolutions of some others read it in spite of one.
        That is found out with noise, at lengths that leave different remainders.
        """
        if not self.is_masked:
            return False
        rate = self.sampling_rate
        noise = 0.01 * torch.randn(5, 2 * rate, generator=torch.Generator().manual_seed(0))
        num_samples = torch.tensor([rate + number * rate // 100 for number in range(4)] + [2 * rate])
        with torch.no_grad():
            beside, num_frames = self._read_together(noise, num_samples)
            alone, num_alone = each_alone(self._read_together, noise[:4], num_samples[:4])
        if not torch.equal(num_frames[:4], num_alone):
            return False
        most = max(TOLERANCE, 16.0 * torch.finfo(next(self.network.parameters()).dtype).eps)
        parts = zip(beside, alone, num_alone.tolist(), strict=False)
        return all(float((one[:num] - other[:num]).abs().max()) < most for one, other, num in parts)

    @property
    def is_masked(self) -> bool:
        """Whether the feature extractor says which samples or frames are padding."""
        return bool(getattr(self._extractor, "return_attention_mask", True))

    def _read_together(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """All recordings as one batch."""
        with self._named():
            return self.run_network(self.inputs_of(waveform, num_samples))

    def inputs_of(self, waveform: Tensor, num_samples: Tensor) -> dict[str, Tensor]:
        """The network's inputs by name, for all recordings as one batch."""
        utterances = [each[:num].cpu().numpy() for each, num in zip(waveform, num_samples.tolist(), strict=True)]
        place = next(self.network.parameters())
        # Some extractors make the mask that they say they make only if they are asked to.
        asked: dict[str, Any] = {"return_attention_mask": True} if self.is_masked else {}
        with self._named():
            made = self._extractor(
                utterances, sampling_rate=self.sampling_rate, padding=self.padding, return_tensors="pt", **asked
            )
            # Weights may be of 16 bits (`torch_dtype`).
            return {
                name: value.to(place.device, place.dtype if value.is_floating_point() else value.dtype)
                for name, value in made.items()
            }

    def _named(self) -> AbstractContextManager[None]:
        cure = "the recording may be too short, or the feature extractor that of another network"
        return named(f"{self.name}: the network cannot read this audio", cure)


class TransformersModel(AudioReader, ExternalModel):
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
        super().__init__(network, feature_extractor, name)
        config = self.network.config
        blank = getattr(config, "blank_token_id", None)
        with named(self.name):
            blank = getattr(config, "pad_token_id", None) if blank is None else blank
            self.tokens = tokens_of(tokenizer, int(config.vocab_size), blank, self.name)
        ratio = getattr(config, "inputs_to_logits_ratio", None)
        samples = 0.0
        if ratio is not None:
            samples = positive_number(ratio, f"{self.name}: the inputs_to_logits_ratio of its configuration")
        # The ratio of most networks leaves out the strides of an adapter; LASR's counts frames of features.
        is_known = samples >= _SHORTEST_SHIFT * self.sampling_rate and not getattr(config, "add_adapter", False)
        self.frame_shift = (
            samples / self.sampling_rate if is_known else measured_shift(self.forward, self.sampling_rate)
        )

    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        return self.read(waveform, num_samples)

    def run_network(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        log_prob = self.network(**inputs).logits.float().log_softmax(-1).cpu()
        return log_prob, num_frames_of(self.network, mask_in(inputs), *log_prob.shape[:2])


def mask_in(inputs: Mapping[str, Tensor]) -> Tensor | None:
    """The mask among a network's inputs, (N, samples or frames), if there is one."""
    return next((inputs[name] for name in MASKS if name in inputs), None)


def num_frames_of(network: nn.Module, mask: Tensor | None, num_utts: int, max_frames: int) -> Tensor:
    """A network's frames of output (N,) for a mask of the input (N, samples or frames); all of them without one."""
    if mask is None:
        return torch.full((num_utts,), max_frames, dtype=torch.int64)
    num_inputs = mask.sum(-1)
    count: Any = next((getattr(network, name) for name in _FRAME_COUNTS if hasattr(network, name)), None)
    if count is None or mask.shape[1] <= max_frames:
        return frames_by_share(num_inputs.cpu(), mask.shape[1], max_frames)
    num_frames: Tensor = count(num_inputs).long().cpu().clamp(0, max_frames)
    return num_frames


class _Pieces:
    """How a tokenizer of transformers writes words in pieces, see `PieceModel`."""

    def __init__(self, tokenizer: Any, is_gpt2: bool) -> None:
        self._tokenizer, self._is_gpt2 = tokenizer, is_gpt2

    def encode(self, text: str, out_type: type[str]) -> list[str]:
        """The pieces of a text."""
        if self._is_gpt2:
            pieces = self._tokenizer.tokenize(f" {bytes_of(text).decode()}")
            return [out_type(from_gpt2(piece, PIECE_PREFIX)) for piece in pieces]
        return list(map(out_type, self._tokenizer.tokenize(text)))


def tokens_of(
    tokenizer: Any, num_columns: int, blank: int | None, name: str, hidden: Collection[int] = ()
) -> CTCTokens:
    """A tokenizer's symbols for the columns of a network; columns without a symbol never appear in text.

    The tokenizer decides how words are written in pieces. Hidden columns never appear, either.

    Args:
        tokenizer: of transformers.
        num_columns: of the network.
        blank: its column; None for that of the tokenizer's padding.
        name: of the network, for messages.
        hidden: columns.

    Raises:
        AsrError: no symbol is text, a symbol's id is not a number or is beyond the columns, or as for `CTCTokens`.
    """
    symbols = [f"<unused-{column}>" for column in range(num_columns)]
    vocab: dict[str, Any] = tokenizer.get_vocab()
    added: dict[str, Any] = getattr(tokenizer, "get_added_vocab", dict)()
    if not vocab.keys() - added.keys():  # what transformers makes of a folder without the files of Whisper's
        raise AsrError("its tokenizer has no tokens of text; add its tokenizer.json to the folder")
    is_gpt2 = are_gpt2(vocab.keys() - added.keys())
    for symbol, column in vocab.items():
        if isinstance(column, int) and 0 <= column < num_columns:
            if column not in hidden:
                symbols[column] = symbol
                if is_gpt2:
                    symbols[column] = from_text(symbol) if symbol in added else from_gpt2(symbol, PIECE_PREFIX)
        elif symbol not in getattr(tokenizer, "all_special_tokens", ()):
            raise AsrError(
                f"the tokenizer's symbol {symbol!r} has the id {column!r}; the network has {num_columns} columns, so "
                "give its own tokenizer."
            )
    if blank is None:
        blank = tokenizer.pad_token_id
    boundary = getattr(tokenizer, "word_delimiter_token", None)
    marks: dict[str, Any] = {"blank": blank, "word_boundary": boundary if boundary in symbols else None}
    if is_gpt2:
        marks["byte_level"] = True
    tokens = CTCTokens(symbols, **marks)
    if tokens.kind == "pieces":
        tokens = CTCTokens(symbols, piece_model=_Pieces(tokenizer, is_gpt2), **marks)
    tokens.name = name
    return tokens


def load(name: str, **options: Any) -> TransformersModel:
    """Loads the network of a hub name or a local folder; options are passed on to `from_pretrained`.

    Raises:
        AsrError: the network is neither on this machine nor can it be downloaded, it is not a CTC network, the
            checkpoint lacks some of its weights, or it needs code of its own without `trust_remote_code=True`.
    """
    transformers = package("transformers", f"transformers:{name}")
    cure = "give one that was trained by CTC, with an output layer"
    parts = load_parts(name, lambda _: transformers.AutoModelForCTC, cure, options)
    return TransformersModel(*parts, f"transformers:{name}")


def class_by_type(
    name: str, mappings: Mapping[str, str], what: str, is_such: Callable[[Any], bool] = lambda _: True
) -> Callable[[dict[str, Any]], Any]:
    """Finds the class of a network by the type in its configuration, before its weights are read, for `load_parts`.

    Args:
        name: of the network, a hub name or a local folder.
        mappings: the classes with `from_pretrained`, and the mapping of transformers with the configurations of each.
        what: networks of these classes are, for messages.
        is_such: whether a class of configurations is of such networks; not all of a mapping need to be.

    Returns:
        What `load_parts` takes. It raises AsrError if the network is of another type.
    """
    transformers = package("transformers", f"transformers:{name}")

    def auto_class(of_files: dict[str, Any]) -> Any:
        config = transformers.AutoConfig.from_pretrained(name, **of_files)
        known = {each: filter(is_such, getattr(transformers, mapping)) for each, mapping in mappings.items()}
        of_type = {own.model_type: each for each, configs in known.items() for own in configs}
        if config.model_type not in of_type:
            raise AsrError(
                f"transformers:{name}: this is no {what}, but of the type {config.model_type}; give one of "
                f"{', '.join(sorted(of_type))}."
            )
        return getattr(transformers, of_type[config.model_type])

    return auto_class


def load_parts(
    name: str, auto_class: Callable[[dict[str, Any]], Any], cure: str, options: dict[str, Any]
) -> tuple[nn.Module, Any, Any]:
    """Loads a network, its feature extractor and its tokenizer from a hub name or a local folder.

    Args:
        name: of the network.
        auto_class: the options that say where files are -> the class with `from_pretrained` for the network.
        cure: what to do if the checkpoint lacks weights.
        options: for `from_pretrained`.

    Raises:
        AsrError: as for `load`.
    """
    transformers = package("transformers", f"transformers:{name}")
    # By default, transformers asks on standard input whether to run the code in a folder.
    options = {"trust_remote_code": False, **options}
    of_files = {option: value for option, value in options.items() if option in _OPTIONS_OF_FILES}
    # Networks of many languages (MMS) have letters for each.
    language = {"target_lang": options["target_lang"]} if "target_lang" in options else {}
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise AsrError(f"transformers:{name}: there is no such folder; give one with {_FILES}.")
    try:
        network, info = auto_class(of_files).from_pretrained(name, output_loading_info=True, **options)
        # transformers fills missing weights with random numbers and a warning.
        missing = sorted(key for key in info["missing_keys"] if not key.endswith(_NOT_NEEDED))
        if missing:
            raise AsrError(
                f"transformers:{name}: the checkpoint lacks {len(missing)} weights of the network ({missing[0]}, ...); "
                f"{cure}."
            )
        extractor = transformers.AutoFeatureExtractor.from_pretrained(name, **of_files)
        return network, extractor, transformers.AutoTokenizer.from_pretrained(name, **of_files, **language)
    except AsrError:
        raise
    except Exception as error:  # of any class, if a file is damaged
        where = "the folder must have" if Path(name).is_dir() else "without a network connection, give a folder with"
        raise AsrError(
            f"transformers:{name}: the network cannot be loaded ({reason_of(error)}); {where} {_FILES}."
        ) from error
