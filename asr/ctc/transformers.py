"""Decoding in transformers: in a speech pipeline, or in a processor that replaces `Wav2Vec2ProcessorWithLM`.

The pipeline accepts any decoder with `decode_beams`:

    decoder = decoder_for_tokenizer(tokenizer, "4gram.arpa")
    pipe = AutomaticSpeechRecognitionPipeline(model, feature_extractor, tokenizer, decoder=decoder)
    print(pipe(waveform)["text"])

`Wav2Vec2ProcessorWithLM` accepts pyctcdecode's class only, so use `CTCProcessorWithLM` instead:

    processor = CTCProcessorWithLM(feature_extractor, tokenizer, decoder)
    inputs = processor(waveform, sampling_rate=16000, return_tensors="pt")
    print(processor.batch_decode(model(**inputs).logits).text)

Neither pyctcdecode nor kenlm is needed, and NumPy may be of any version.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asr.ctc.alphabet import Alphabet
from asr.ctc.pyctcdecode import (
    DEFAULT_BEAM_WIDTH,
    DEFAULT_HOTWORD_WEIGHT,
    DEFAULT_MIN_TOKEN_LOGP,
    DEFAULT_PRUNE_LOGP,
    BeamSearchDecoderCTC,
    OutputBeamMPSafe,
    as_array,
    build_ctcdecoder,
)
from asr.errors import AsrError

_PADDING = -100.0
_BLANK, _SPACE, _UNKNOWN = "", " ", "⁇"


@dataclass
class CTCDecoderOutput:
    """Like `Wav2Vec2DecoderWithLMOutput`: texts, scores and offsets of one utterance or of a batch.

    Attributes:
        text: the best text, or the `n_best` best texts.
        logit_score: the network's score of each text.
        lm_score: the total score of each text.
        word_offsets: words with `start_offset` and `end_offset` in frames, or None.
    """

    text: Any
    logit_score: Any = None
    lm_score: Any = None
    word_offsets: Any = None


class CTCProcessorWithLM:
    """A feature extractor, a tokenizer and a decoder with a language model, like `Wav2Vec2ProcessorWithLM`.

    Args:
        feature_extractor: a feature extractor of transformers.
        tokenizer: a tokenizer of transformers.
        decoder: made by `decoder_for_tokenizer` or `build_ctcdecoder`.

    Raises:
        AsrError: the tokenizer has symbols that the decoder does not know.
    """

    def __init__(self, feature_extractor: Any, tokenizer: Any, decoder: BeamSearchDecoderCTC) -> None:
        missing = sorted(set(labels_of(tokenizer)) - set(decoder._alphabet.labels))
        if missing:
            raise AsrError(
                f"the tokenizer's symbols {missing[:5]} are not in the decoder's alphabet; build the decoder with "
                "decoder_for_tokenizer."
            )
        self.feature_extractor = feature_extractor
        self.tokenizer = tokenizer
        self.decoder = decoder

    def __call__(self, audio: Any = None, *args: Any, text: Any = None, **kwargs: Any) -> Any:
        """Returns features of audio or token ids of a text; given both, features with the ids as `labels`."""
        if audio is None and text is None:
            raise AsrError("give audio, a text, or both.")
        encoded = None if text is None else self.tokenizer(text, **({} if audio is not None else kwargs))
        if audio is None:
            return encoded
        inputs = self.feature_extractor(audio, *args, **kwargs)
        if encoded is not None:
            inputs["labels"] = encoded["input_ids"]
        return inputs

    def pad(self, input_features: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        """Pads features, labels, or both."""
        padded_labels = None if labels is None else self.tokenizer.pad(labels, **kwargs)
        if input_features is None:
            return padded_labels
        padded = self.feature_extractor.pad(input_features, **kwargs)
        if padded_labels is not None:
            padded["labels"] = padded_labels["input_ids"]
        return padded

    def batch_decode(
        self,
        logits: Any,
        pool: Any = None,
        num_processes: int | None = None,
        beam_width: int | None = None,
        beam_prune_logp: float | None = None,
        token_min_logp: float | None = None,
        hotwords: Iterable[str] | None = None,
        hotword_weight: float | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        unk_score_offset: float | None = None,
        lm_score_boundary: bool | None = None,
        output_word_offsets: bool = False,
        n_best: int = 1,
    ) -> CTCDecoderOutput:
        """Decodes logits (N, T, C), an array or a tensor, in which frames of -100 are padding.

        `pool` and `num_processes` are not used. The other arguments are those of `BeamSearchDecoderCTC.decode_beams`
        and `reset_params`.
        """
        if n_best < 1:
            raise AsrError(f"n_best is {n_best}; ask for 1 or more.")
        self.decoder.reset_params(alpha, beta, unk_score_offset, lm_score_boundary)
        utterances = [as_array(each) for each in logits]
        found = self.decoder.decode_beams_batch(
            None,
            [each[(each != _PADDING).all(axis=-1)] for each in utterances],
            beam_width=DEFAULT_BEAM_WIDTH if beam_width is None else beam_width,
            beam_prune_logp=DEFAULT_PRUNE_LOGP if beam_prune_logp is None else beam_prune_logp,
            token_min_logp=DEFAULT_MIN_TOKEN_LOGP if token_min_logp is None else token_min_logp,
            hotwords=hotwords,
            hotword_weight=DEFAULT_HOTWORD_WEIGHT if hotword_weight is None else hotword_weight,
        )
        columns = [_columns(beams[:n_best]) for beams in found]
        if n_best == 1:
            columns = [[values[0] for values in each] for each in columns]
        text, logit_score, lm_score, offsets = ([each[place] for each in columns] for place in range(4))
        return CTCDecoderOutput(text, logit_score, lm_score, offsets if output_word_offsets else None)

    def decode(self, logits: Any, *settings: Any, **named_settings: Any) -> CTCDecoderOutput:
        """Like `batch_decode` for one utterance, logits (T, C), and without `pool` and `num_processes`."""
        found = self.batch_decode([logits], None, None, *settings, **named_settings)
        offsets = None if found.word_offsets is None else found.word_offsets[0]
        return CTCDecoderOutput(found.text[0], found.logit_score[0], found.lm_score[0], offsets)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Writes all three parts into a folder."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.feature_extractor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.decoder.save_to_dir(folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path, unigram_encoding: str = "utf-8") -> CTCProcessorWithLM:
        """Reads a folder written by `save_pretrained` of this class or of `Wav2Vec2ProcessorWithLM`.

        Raises:
            AsrError: transformers is not installed, or a part of the folder is missing or damaged.
        """
        try:
            from transformers import AutoFeatureExtractor, AutoTokenizer
        except ImportError as error:
            raise AsrError("a processor needs the package transformers; `pip install transformers`.") from error
        try:
            extractor, tokenizer = AutoFeatureExtractor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise AsrError(f"{folder}: no feature extractor and tokenizer can be read from it ({error}).") from error
        return cls(extractor, tokenizer, BeamSearchDecoderCTC.load_from_dir(folder, unigram_encoding))


def labels_of(tokenizer: Any) -> list[str]:
    """A tokenizer's symbols in the order of ids, normalized as in `Alphabet`: "" is the blank, " " the boundary."""
    vocabulary = tokenizer.get_vocab()
    by_id = {column: symbol for symbol, column in vocabulary.items()}
    symbols = [by_id.get(column, f"<unused-{column}>") for column in range(max(by_id) + 1)]
    special = {
        tokenizer.pad_token: _BLANK,
        getattr(tokenizer, "word_delimiter_token", None): _SPACE,
        tokenizer.unk_token: _UNKNOWN,
    }
    return Alphabet.build_alphabet([special.get(symbol, symbol) for symbol in symbols]).labels


def decoder_for_tokenizer(
    tokenizer: Any, kenlm_model_path: str | Path | None = None, **settings: Any
) -> BeamSearchDecoderCTC:
    """Builds a decoder for a network's tokenizer; the other arguments are those of `build_ctcdecoder`."""
    return build_ctcdecoder(labels_of(tokenizer), kenlm_model_path, **settings)


def _columns(beams: list[OutputBeamMPSafe]) -> list[list[Any]]:
    """Texts, network scores, total scores, and word offsets of hypotheses."""
    offsets = [
        [{"word": word, "start_offset": begin, "end_offset": end} for word, (begin, end) in frames]
        for _, frames, _, _ in beams
    ]
    return [[beam[0] for beam in beams], [beam[2] for beam in beams], [beam[3] for beam in beams], offsets]
