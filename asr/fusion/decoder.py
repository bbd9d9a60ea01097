"""What decoders of transducers and of attention models share: words, language models, and hypotheses.

Shapes: N utterances, T frames, E encoder dimensions.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from asr.bundle import Bundle
from asr.ctc.frames import as_lengths, as_tensor
from asr.ctc.graphs import read_words
from asr.ctc.interface import (
    CTCHypothesis,
    CTCToken,
    CTCWord,
    no_hypothesis,
    refuse_given,
    require_nbest,
    require_weight,
    settings_of,
)
from asr.ctc.language_models import (
    LM_WEIGHT,
    LentModels,
    interpolated,
    made_with_phrases,
    model_maker,
    token_models,
    words_of,
)
from asr.ctc.recognizer import Network
from asr.ctc.word_models import listed_words, read_ngram
from asr.errors import AsrError
from asr.fusion.confidences import ConfidenceEstimator, written_tokens
from asr.fusion.interface import Finished, FusionConfig, IntArray
from asr.fusion.scores import TextScores, TokenScores, WordScores, unigrams_of
from asr.fusion.spelling import SpelledWords, spelled_words
from asr.kernels.memory import no_autograd, on_cpu_by_default
from asr.lm.combine import mapped_to
from asr.lm.hot_words import DEFAULT_SCORE, HotWords, as_phrases
from asr.lm.interface import LanguageModel
from asr.lm.ngram.model import NgramLM
from asr.options import require_type
from asr.text.ctc_tokens import CTCTokens
from asr.text.symbols import Vocabulary

_INTERNAL_LM_SCALE = 0.2
# Where hot words are all that is known, other words are as good, and how they are written does not matter.
_HOT_WORDS_ONLY: dict[str, Any] = {"lm_scale": 1.0, "spelling_penalty": 0.0, "plain_words": True}


class Text(NamedTuple):
    """A text.

    Attributes:
        best: the best sequence of tokens that is written so.
        total: the score of all of these.
        confidences: of the words, if they are known.
    """

    best: Finished
    total: float
    confidences: Sequence[float] | None = None


class TokenNetwork(Network, Protocol):
    """A network that scores the next token."""

    name: str
    tokens: CTCTokens

    @property
    def device(self) -> torch.device: ...

    def stream(self) -> Any: ...


class FusionDecoder(ABC):
    """Decodes the output of a network's encoder; several threads may call it at the same time.

    Args:
        network: the network.
        words: the words that are listed: a file with one word per line, or a collection. By default, the words of the
            n-gram model, or of `lm`.
        ngram: an n-gram model of words of any size: ARPA text (also .gz, .xz), our binary, or an `NgramLM`.
        lm: another language model of words, in the forms of `asr.ctc.CTCDecoder`: a recurrent network, a bundle, a
            KenLM binary, `transformers:NAME`, or any `asr.lm.interface.LanguageModel`.
        lm_weight: weight of `lm` in its linear interpolation with `ngram`, 0 to 1 (default: 0.7).
        lm_options: how a recurrent `lm` runs, fields of `asr.lm.cached.approximations.CacheOptions` by name.
        token_lm: a language model of tokens, in the forms of `ngram` or `lm`; not together with words.
        hot_words: words and phrases to prefer, among the words if there are any; a mapping gives each its score, or
            None for 4. Scores are multiplied by `lm_scale`. Without words and language models, other words cost
            nothing, and `lm_scale` is 1 and `plain_words` True by default.
        settings: scales and beams, the fields of the decoder's configuration.

    Raises:
        AsrError: an argument cannot be read, is out of range, does not match the others or would have no effect.
    """

    network: TokenNetwork
    config: FusionConfig
    models: LentModels
    scores: TextScores
    config_type: ClassVar[type[FusionConfig]]
    network_type: ClassVar[type[Any]]
    example: ClassVar[str]
    """How a network is made, for messages."""

    @on_cpu_by_default()
    def __init__(
        self,
        network: Any,
        *,
        words: str | Path | Iterable[str] | None = None,
        ngram: str | Path | NgramLM | None = None,
        lm: str | Path | Bundle | nn.Module | LanguageModel | None = None,
        lm_weight: float | None = None,
        lm_options: Mapping[str, Any] | None = None,
        token_lm: str | Path | nn.Module | LanguageModel | None = None,
        hot_words: Iterable[str] | Mapping[str, float | None] | None = None,
        **settings: Any,
    ) -> None:
        require_type(network, self.network_type, "network", self.example)
        require_type(network.tokens, CTCTokens, f"{network.name}: tokens", "asr.text.ctc_tokens.CTCTokens(symbols)")
        self.network = network
        self.config = settings_of(self.config_type, settings)
        self._written = written_tokens(network.tokens)
        if lm is None:
            refuse_given({"lm_weight": lm_weight, "lm_options": lm_options}, "there is no lm")
        elif ngram is None:
            refuse_given({"lm_weight": lm_weight}, "there is no n-gram model to interpolate with")
        if lm_weight is not None:
            require_weight("lm_weight", lm_weight)
        hot_words = as_phrases(hot_words) or None
        if words is ngram is lm is token_lm is None and hot_words is not None:
            words = sorted({word for phrase in hot_words for word in phrase.split()})
            defaults = {name: value for name, value in _HOT_WORDS_ONLY.items() if name not in settings}
            self.config = replace(self.config, **defaults)
        has_words = not (words is ngram is lm is None)
        if not has_words:
            refuse_given({"hot_words": hot_words}, "it is for searches of words")
            refuse_given(settings, "it is for searches of words", ("spelling_penalty", "plain_words"))
        if hot_words is None and ngram is lm is token_lm is None:
            refuse_given(settings, "there is no language model", ("lm_scale",))
        if self.config.internal_lm_scale is None:
            subtracted = 0.0 if ngram is lm is token_lm is None else _INTERNAL_LM_SCALE
            self.config = replace(self.config, internal_lm_scale=subtracted)
        self._spelled: SpelledWords | None = None
        if has_words:
            if token_lm is not None:
                raise AsrError("token_lm cannot be combined with words; leave out one of them.")
            model = None if ngram is None else read_ngram(ngram)
            listed = _listed(words, model, lm)
            if not listed:
                raise AsrError("the language model has no words; give words, or a model that has some.")
            weight = LM_WEIGHT if lm_weight is None else lm_weight
            self._words(listed, model, lm, 1.0 if model is None else weight, lm_options, hot_words)
        else:
            self.models = token_models(token_lm, network.tokens)
            with self.models.lent() as lent:
                self.scores = TokenScores(network.tokens, self.config, None if lent is None else lent.vocabulary)

    @no_autograd()
    def __call__(self, encoded: Any, lengths: Any = None, *, nbest: int = 1) -> list[Any]:
        """Decodes one utterance or a batch.

        Args:
            encoded: the encoder's output, (N, T, E) or (T, E), as the network returns it.
            lengths: (N,) number of frames of each utterance; None for all T.
            nbest: maximum number of different texts per utterance.

        Returns:
            A list of hypotheses (`asr.ctc.CTCHypothesis`), best first, for each utterance; for a single (T, E) input,
            just its list. No list is empty: if nothing survived the beam, it has one empty hypothesis that is not
            `is_complete`.

        Raises:
            AsrError: the shape is wrong, or values are NaN or infinite.
        """
        require_nbest(nbest)
        values, num_frames, is_single = as_batch(encoded, lengths)
        values = values.to(self.network.device)
        with self.models.lent() as lm:
            finished = self.search(lm, values, num_frames)
            if lm is not None:
                lm.retain(lm.start(0))
        texts = self.timed([self.best_texts(each, int(nbest)) for each in finished], values, num_frames)
        found = [self.hypotheses(each) for each in texts]
        return found[0] if is_single else found

    @abstractmethod
    def search(self, lm: LanguageModel | None, encoded: Tensor, num_frames: IntArray) -> list[list[Finished]]:
        """The hypotheses of each utterance, encoded (N, T, E) and (N,), best first."""

    def stream(self) -> Any:
        """Opens a stream, which accepts the encoder's frames as they arrive.

        Raises:
            AsrError: the decoder reads whole utterances.
        """
        raise AsrError(f"{self.network.name}: its decoder reads whole utterances; it cannot stream.")

    def texts(self, encoded: Any, lengths: Any = None) -> list[str]:
        """The best text of each utterance; arguments as for a call."""
        found: list[list[CTCHypothesis] | CTCHypothesis] = self(encoded, lengths)
        return [each[0].text if isinstance(each, list) else each.text for each in found]

    def _words(
        self,
        listed: Sequence[str],
        ngram: NgramLM | None,
        lm: str | Path | Bundle | nn.Module | LanguageModel | None,
        lm_weight: float,
        lm_options: Mapping[str, Any] | None,
        hot_words: Iterable[str] | Mapping[str, float | None] | None,
    ) -> None:
        """Prepares language models of words, and what texts gain."""
        tokens, config = self.network.tokens, self.config
        spelled = spelled_words(listed, tokens, config.plain_words, unigrams_of(listed, ngram)[0])
        self._spelled = spelled
        if ngram is not None and not set(listed).difference(listed_words(ngram)):
            vocabulary = ngram.vocabulary
        else:
            vocabulary = Vocabulary(listed, name="word list")
        make: Callable[[], LanguageModel] | None = None
        is_shared = False
        if lm is not None:
            make_lm, is_shared = model_maker(lm, vocabulary.ordinary, lm_options)
            make = functools.partial(interpolated, make_lm, ngram, lm_weight, vocabulary, torch.device("cpu"))
        elif ngram is not None:
            make = functools.partial(mapped_to, ngram, vocabulary)
        gains: dict[str, float] = {}
        if hot_words is not None:
            # The n-gram model may have more words than can be found.
            known = Vocabulary([*spelled.words.values()], name="word list")
            limits = None if ngram is None else mapped_to(ngram, known, warn=False)
            hot = HotWords(hot_words, known, DEFAULT_SCORE, limits)
            gain = hot.gain(vocabulary)
            gains = {vocabulary.words[word]: float(gain[word]) for word in gain.nonzero().flatten().tolist()}
            phrases = hot.model(vocabulary)
            if phrases is not None:
                make = functools.partial(made_with_phrases, make, phrases)
        self.models = LentModels(make, is_shared)
        self.scores = WordScores(tokens, spelled, config, None if make is None else vocabulary, ngram, gains)

    def best_texts(self, finished: Sequence[Finished], nbest: int) -> list[Text]:
        """The best texts, each by the sum over the sequences of tokens that are written so."""
        groups: dict[tuple[str, ...], list[Finished]] = {}
        for each in finished:
            entries = each.entries.tolist()
            words = tuple(self._word(entries[first:after]) for first, after in self.spans(entries))
            groups.setdefault(words, []).append(each)
        totals = (float(np.logaddexp.reduce([each.total for each in same])) for same in groups.values())
        texts = [Text(same[0], total) for same, total in zip(groups.values(), totals, strict=True)]
        best = sorted(texts, key=lambda text: -self.config.rank(text.total, len(text.best.entries)))[:nbest]
        return [text._replace(confidences=self._confidences(text, texts)) for text in best]

    def timed(self, texts: list[list[Text]], encoded: Tensor, num_frames: IntArray) -> list[list[Text]]:
        """The texts of each utterance with the frames of their tokens, if the search does not find these."""
        return texts

    def hypotheses(self, texts: Sequence[Text]) -> list[CTCHypothesis]:
        """What a call returns for an utterance."""
        return [self.hypothesis(each) for each in texts] or [no_hypothesis()]

    def hypothesis(self, text: Text, is_complete: bool = True) -> CTCHypothesis:
        """A hypothesis with the tokens of the best sequence; what others add to the total is added to `am_score`."""
        symbols, shift, best = self.network.tokens.table.tokens, self.network.frame_shift, text.best
        entries, begins, ends = best.entries.tolist(), best.begin.tolist(), best.end.tolist()
        words = []
        for number, (first, after) in enumerate(self.spans(entries)):
            word, begin, end = self._word(entries[first:after]), begins[first], ends[after - 1]
            confidence = None if text.confidences is None else text.confidences[number]
            is_spelled = self._spelled is not None and not self._spelled.has(word)
            words.append(CTCWord(word, begin, end, begin * shift, end * shift, confidence, is_spelled))
        tokens = tuple(CTCToken(symbols[entry], *span) for entry, *span in zip(entries, begins, ends, strict=True))
        am_score = best.am_score + text.total - best.total
        return CTCHypothesis(tuple(words), tokens, text.total, am_score, best.lm_score, is_complete)

    def _confidences(self, text: Text, others: Sequence[Text]) -> Sequence[float] | None:
        """The confidences of a text's words, given all texts."""
        if text.best.pruned is None:
            return None
        entries, written = text.best.entries.tolist(), self._written
        words = ["".join(written[entry] for entry in entries[first:after]) for first, after in self.spans(entries)]
        estimator = ConfidenceEstimator([word.replace(" ", "") for word in words])
        for other in others:
            place = functools.reduce(estimator.follow, (written[entry] for entry in other.best.entries), 0)
            estimator.add(estimator.end(place), other.total - text.total)
        estimator.add_pruned(text.best.pruned(), written)
        return estimator.confidences()

    def _word(self, entries: list[int]) -> str:
        """The word that some tokens spell, as it is listed."""
        text = self.network.tokens.text_of(*entries)
        return text if self._spelled is None else self._spelled.listed(text)

    def spans(self, entries: list[int]) -> list[tuple[int, int]]:
        """The words of a sequence of tokens: the position of the first token, and the one after the last."""
        tokens = self.network.tokens
        if tokens.kind == "phones":
            return [(place, place + 1) for place, entry in enumerate(entries) if tokens.is_text(entry)]
        return tokens.group(entries)


def _listed(
    words: str | Path | Iterable[str] | None,
    ngram: NgramLM | None,
    lm: str | Path | Bundle | nn.Module | LanguageModel | None,
) -> list[str]:
    """The words that are listed."""
    if words is not None:
        return read_words(words)
    if ngram is not None:
        return listed_words(ngram)
    return words_of(lm, "words or an n-gram model")


def as_batch(encoded: Any, lengths: Any) -> tuple[Tensor, IntArray, bool]:
    """Encoded frames (N, T, E), their numbers (N,), and whether there was no batch dimension."""
    values = as_tensor(encoded, "encoded frames").detach()
    is_single = values.dim() == 2
    values = values.unsqueeze(0) if is_single else values
    if values.dim() != 3:
        raise AsrError(
            f"the encoder's output has the shape {tuple(values.shape)}; give (utterances, frames, dimensions) or "
            "(frames, dimensions)."
        )
    num_frames = as_lengths(lengths, *values.shape[:2])
    is_used = torch.arange(values.shape[1]) < num_frames.unsqueeze(1)
    bad = (~torch.isfinite(values).all(2).cpu() & is_used).nonzero()
    if len(bad):
        raise AsrError(
            f"utterance {int(bad[0, 0])}, frame {int(bad[0, 1])}: the encoder's output has NaN or infinity; check its "
            "input and its weights."
        )
    return values, num_frames.numpy(), is_single
