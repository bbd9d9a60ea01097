"""`CTCDecoder`: turns log-probabilities of any CTC network into words."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from asr.bundle import Bundle
from asr.ctc.frames import FRAME_INPUTS, FrameInput, as_frames
from asr.ctc.graph_search import GraphSearch
from asr.ctc.graphs import MOST_NGRAMS, SILENCES, WordGraph, compile_graph, read_lexicon, read_words, spelled_lexicon
from asr.ctc.interface import (
    CTCDecodingConfig,
    CTCHypothesis,
    refuse_given,
    require_nbest,
    require_number,
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
from asr.ctc.prefix_search import PrefixSearch
from asr.ctc.spelled_words import SpellingModel
from asr.ctc.stream import CTCStream
from asr.ctc.word_models import listed_words, ngram_of_spellings, read_ngram, rules_out_unknown, uniform_ngram
from asr.decoding.build import device_with_loops
from asr.decoding.online import SHORTEST_COMMIT_SECONDS
from asr.errors import AsrError
from asr.kernels.interrupts import interrupts_between_loops
from asr.kernels.jit import uncompiled
from asr.kernels.memory import no_autograd
from asr.lm.combine import Difference, mapped_to
from asr.lm.hot_words import DEFAULT_SCORE, HotWords, as_phrases
from asr.lm.interface import LanguageModel
from asr.lm.ngram.model import NgramLM
from asr.options import device_named, require_type
from asr.serialization import copied_to_processes
from asr.text.ctc_tokens import CTCTokens, PieceModel, TokenKind
from asr.text.lexicon import Lexicon
from asr.text.normalize import written_as
from asr.text.plain_form import tokens_for_words

_LOGGER = logging.getLogger(__name__)
_SPELLING_ORDER = {"letters": 4, "pieces": 2, "phones": 3}
# The settings that have an effect only with words, only without words, or only with a second language model.
_OF_WORDS = ("max_active_states", "output_beam", "context_beam", "blank_skip_threshold", "lm_fusion")
_OF_TOKENS = ("beam_size", "token_min_log_prob")
_OF_SECOND_MODELS = ("context_beam", "lm_fusion")


class _Sources(NamedTuple):
    """The arguments of `CTCDecoder` that define words and their language models, as they were given."""

    lexicon: str | Path | Lexicon | Mapping[str, Any] | None
    words: str | Path | Iterable[str] | None
    ngram: str | Path | NgramLM | None
    lm: str | Path | Bundle | nn.Module | LanguageModel | None
    lm_weight: float | None
    lm_options: Mapping[str, Any] | None
    hot_words: Iterable[str] | Mapping[str, float | None] | None
    hot_word_score: float | None
    token_lm: str | Path | nn.Module | LanguageModel | None
    spell_unknown: bool
    spelling_penalty: float | None
    graph_ngrams: int | None

    @property
    def define_words(self) -> bool:
        return not (self.lexicon is self.words is self.ngram is self.lm is None)

    def check(self, given: Mapping[str, Any]) -> None:
        """Checks numbers, and refuses arguments without effect, also among the settings that were given.

        Raises:
            AsrError: a number is out of range, or an argument or a setting would have no effect.
        """
        for name in ("graph_ngrams", "spelling_penalty"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name))
        if self.lm_weight is not None:
            require_weight("lm_weight", self.lm_weight)
        if self.lm is None:
            refuse_given({"lm_weight": self.lm_weight, "lm_options": self.lm_options}, "there is no lm")
        elif self.ngram is None and self.lm_weight is not None and self.lm_weight != 1.0:
            raise AsrError(
                f"lm_weight is {self.lm_weight}, but there is no n-gram model to interpolate with; leave it out."
            )
        if self.ngram is None:
            refuse_given({"graph_ngrams": self.graph_ngrams}, "there is no n-gram model")
            if self.lm is None and self.hot_words is None:  # phrases are a model
                refuse_given(given, "there is no second language model", _OF_SECOND_MODELS)
        if not self.spell_unknown:
            penalty = {"spelling_penalty": self.spelling_penalty}
            refuse_given(penalty, "words are not spelled unless spell_unknown is True")
        if self.hot_words is None:
            refuse_given({"hot_word_score": self.hot_word_score}, "there are no hot_words")


@copied_to_processes
class CTCDecoder:
    """Decodes the output of a CTC network; several threads may call it at the same time.

        decoder = CTCDecoder("tokens.txt", ngram="3gram.arpa")
        print(decoder(log_probs)[0].text)

    With a lexicon, a word list, an n-gram model or `lm`, a Viterbi search finds words in a compiled graph that includes
    the n-gram model. Without them, a prefix beam search may find any sequence of tokens, and scores each by the sum
    over its paths (Graves, Sequence transduction with recurrent neural networks, 2012; Hannun et al., First-pass large
    vocabulary continuous speech recognition using bi-directional recurrent DNNs, 2014).

    Args:
        tokens: the network's output symbols, see `CTCTokens`: a list, a file, or an existing `CTCTokens`.
        lexicon: the spellings of words in tokens: a file (`WORD TOKEN TOKEN ...`), a mapping or a `Lexicon`. After
            spellings that do not end in the word boundary, it is optional. Required for phones only.
        words: the words that may be found: a file with one word per line, or a collection. By default, the words of the
            lexicon, of the n-gram model, or of `lm`. They may be in another letter case than the tokens. If all are in
            one case and without punctuation, unlike the tokens, tokens are compared in that form (`PlainTokens`).
        ngram: an n-gram model of words of any size: ARPA text (also .gz, .xz), our binary, or an `NgramLM`. If it is
            too large for the graph, the graph gets a pruned model, and the search uses the full scores.
        lm: another language model of words for the search: a folder or bundle with a recurrent network, the network
            itself, a KenLM binary, `transformers:NAME` (see `asr.lm.transformers`), or any
            `asr.lm.interface.LanguageModel`.
        lm_weight: weight of `lm` in its linear interpolation with `ngram`, 0 to 1 (default: 0.7); 1 if there is no
            `ngram`.
        lm_options: how a recurrent `lm` runs, fields of `asr.lm.cached.approximations.CacheOptions` by name; for exact
            scores, `{"hidden_dtype": "float32", "hidden_products": "float32"}`. Those that are not given are as in the
            settings of its bundle; a network without a bundle multiplies 8-bit integers in its hidden layer if the
            processor can.
        hot_words: words and phrases among the words to prefer; a mapping gives each its score, or None for
            `hot_word_score`. The settings scale their scores as those of language models.
        hot_word_score: natural log, added for each word of a phrase in `hot_words` (default: 4).
        token_lm: a language model of tokens, in the forms of `ngram` or `lm`. Not together with a word list, unless
            words outside it are spelled (`spell_unknown`).
        blank, word_boundary, kind, piece_model, num_spellings: see `CTCTokens`; not for an existing one.
        spell_unknown: whether out-of-vocabulary words may be found, spelled in letters or pieces, wherever the n-gram
            model allows `<unk>`; phones are converted to letters with a model estimated from the lexicon.
        spelling_penalty: natural log, added to each spelled word (default: 0).
        frame_shift: seconds per frame of the network's output, for word times in seconds.
        inputs: what the call receives: `log_probs`, `logits`, `probabilities`, or `scores` (unchecked).
        confidences: whether words get confidences, which takes a little longer.
        config: scales and beams; alternatively, give fields of `CTCDecodingConfig` as keywords, as in `lm_scale=2.0`.
        graph_ngrams: maximum number of n-grams of `ngram` in the graph (default: 300,000).
        graph_folder: cache folder for compiled graphs, from which later processes load them; None for no folder.
        device: where recordings are searched; log-probabilities may be on any device. On the CPU in any case are the
            search of streams, and the language models that rescore lattices.
        warm_up: whether to run the search once now, because its loops are compiled on their first run on a machine.
        progress: called with the name of each step of compiling the graph.

    Raises:
        AsrError: an argument cannot be read, is out of range, does not match the others or would have no effect.
    """

    @interrupts_between_loops()
    @no_autograd()
    def __init__(
        self,
        tokens: CTCTokens | Sequence[str] | Mapping[str, int] | str | Path,
        *,
        lexicon: str | Path | Lexicon | Mapping[str, Any] | None = None,
        words: str | Path | Iterable[str] | None = None,
        ngram: str | Path | NgramLM | None = None,
        lm: str | Path | Bundle | nn.Module | LanguageModel | None = None,
        lm_weight: float | None = None,
        lm_options: Mapping[str, Any] | None = None,
        hot_words: Iterable[str] | Mapping[str, float | None] | None = None,
        hot_word_score: float | None = None,
        token_lm: str | Path | nn.Module | LanguageModel | None = None,
        blank: int | str | None = None,
        word_boundary: str | None = None,
        kind: TokenKind | None = None,
        piece_model: str | Path | PieceModel | None = None,
        num_spellings: int | None = None,
        spell_unknown: bool = False,
        spelling_penalty: float | None = None,
        frame_shift: float | None = None,
        inputs: FrameInput = "log_probs",
        confidences: bool = False,
        config: CTCDecodingConfig | None = None,
        graph_ngrams: int | None = None,
        graph_folder: str | Path | None = None,
        device: torch.device | str = "cpu",
        warm_up: bool = True,
        progress: Callable[[str], None] = lambda step: None,
        **settings: Any,
    ) -> None:
        of_tokens = {"blank": blank, "word_boundary": word_boundary, "kind": kind}
        of_spellings = {"piece_model": piece_model, "num_spellings": num_spellings}
        if isinstance(tokens, CTCTokens):
            refuse_given(of_tokens | of_spellings, "the tokens are CTCTokens already, which take it")
        else:
            tokens = CTCTokens(
                tokens,
                blank=blank,
                word_boundary=word_boundary,
                kind=kind,
                piece_model=piece_model,
                num_spellings=1 if num_spellings is None else num_spellings,
            )
        self.tokens = tokens
        self.config = _config_of(config, settings)
        self.device = device_named(str(device))
        self._inputs = _checked_inputs(inputs)
        self._confidences = confidences
        if frame_shift is not None:
            require_number("frame_shift", frame_shift)
            if not 0 < frame_shift < 10:
                raise AsrError(
                    f"frame_shift is {frame_shift}; give the seconds from one frame to the next, such as 0.02."
                )
            frame_shift = float(frame_shift)  # or else times would be NumPy's numbers, too
        self.frame_shift = frame_shift
        if hot_words is not None and not (hot_words := as_phrases(hot_words)):
            hot_words = hot_word_score = None
        require_type(graph_folder, str | PathLike | None, "graph_folder", "the path of a folder")
        sources = _Sources(
            *(lexicon, words, ngram, lm, lm_weight, lm_options, hot_words, hot_word_score),
            *(token_lm, spell_unknown, spelling_penalty, graph_ngrams),
        )
        given = _given_settings(config, settings)
        sources.check(given)
        self.word_graph: WordGraph | None = None
        self._search: GraphSearch | PrefixSearch
        if sources.define_words:
            if token_lm is not None and not spell_unknown:
                raise AsrError(
                    "token_lm cannot be combined with a word list; leave out the words, or set spell_unknown=True."
                )
            if tokens.kind == "phones" or (lexicon is not None and words is None):
                refuse_given(of_spellings, "the lexicon has the spellings of all words")
            if tokens.kind == "letters" and all(len(tokens.text_of(entry)) <= 1 for entry in range(len(tokens.table))):
                refuse_given({"num_spellings": num_spellings}, "there is one way to write a word in single letters")
            if self.config.lm_fusion == "search":
                refuse_given(
                    given, "it is for rescoring lattices, not for a model inside the search", ("context_beam",)
                )
            refuse_given(given, "it is for searches without words", _OF_TOKENS)
            self.word_graph, models = self._words(sources, graph_folder, progress)
            self._search = GraphSearch(self.word_graph, self.tokens, self.config, models, frame_shift, confidences)
        else:
            if spell_unknown:
                raise AsrError("spell_unknown adds words to a list of words; give a lexicon, words or an n-gram model.")
            of_words = {"graph_folder": graph_folder, "confidences": confidences or None, "hot_words": hot_words}
            refuse_given(of_words | of_spellings, "it is for searches of words")
            refuse_given(given, "it is for searches of words", _OF_WORDS)
            if token_lm is None:
                refuse_given(given, "there is no language model", ("lm_scale",))
            self._search = PrefixSearch(tokens, self.config, token_models(token_lm, tokens), frame_shift)
        if warm_up:
            self._warm_up()

    @uncompiled
    def __call__(self, log_probs: Any, lengths: Any = None, *, nbest: int = 1) -> list[Any]:
        """Decodes one utterance or a batch.

        Args:
            log_probs: (N, T, C) or (T, C) natural logs, or a list of (T, C); a tensor on any device or an array.
            lengths: (N,) number of frames of each utterance; None for all T.
            nbest: maximum number of different texts per utterance.

        Returns:
            A list of hypotheses, best first, for each utterance; for a single (T, C) input, just its list. No list is
            empty: if nothing survived the beam, it has one empty hypothesis that is not `is_complete`.

        Raises:
            AsrError: the shape or width is wrong, or values are NaN or not log-probabilities.
        """
        require_nbest(nbest)
        frames = as_frames(log_probs, lengths, self.tokens, self._inputs, self.device)
        with no_autograd():
            found = self._search.decode(frames, nbest)
        return found[0] if frames.is_single else found

    def texts(self, log_probs: Any, lengths: Any = None) -> list[str]:
        """The best text of each utterance; arguments as for a call."""
        found: list[list[CTCHypothesis] | CTCHypothesis] = self(log_probs, lengths)
        return [each[0].text if isinstance(each, list) else each.text for each in found]

    def stream(self, commit_seconds: float | None = None) -> CTCStream:
        """Opens a stream, which accepts frames as they arrive; its result does not depend on how they are chunked.

        Args:
            commit_seconds: words of the best hypothesis become final at this age, 0.2 or more, which bounds the memory
                of a stream without pauses. None makes words final only when all hypotheses share them. Needs a frame
                shift.

        Raises:
            AsrError: `commit_seconds` is out of range, or given though the decoder has no frame shift or no words; or
                the decoder adds confidences, which streams do not have.
        """
        if self._confidences:
            raise AsrError("the words of a stream have no confidences; build the decoder without confidences=True.")
        commit_frames = None
        if commit_seconds is not None:
            is_number = isinstance(commit_seconds, Real) and not isinstance(commit_seconds, bool)
            if not is_number or not SHORTEST_COMMIT_SECONDS <= commit_seconds < 1e6:
                raise AsrError(
                    f"commit_seconds is {commit_seconds!r}; give seconds, {SHORTEST_COMMIT_SECONDS} or more, such as 5."
                )
            if self.word_graph is None:
                raise AsrError("commit_seconds has no effect here: it is for searches of words; leave it out.")
            if self.frame_shift is None:
                raise AsrError("commit_seconds needs the frame shift; build the decoder with frame_shift=SECONDS.")
            commit_frames = max(1, round(commit_seconds / self.frame_shift))
        return CTCStream(self._search, self.tokens, self._inputs, self.device, commit_frames)

    def _words(
        self, sources: _Sources, graph_folder: str | Path | None, progress: Callable[[str], None]
    ) -> tuple[WordGraph, LentModels]:
        """The compiled graph, and the language models that act beside it."""
        lexicon = None if sources.lexicon is None else read_lexicon(sources.lexicon, self.tokens)
        listed = None if sources.words is None else read_words(sources.words)
        large = None if sources.ngram is None else read_ngram(sources.ngram)
        spellings = self._spellings(lexicon, listed, large, sources.lm)
        lm_weight = LM_WEIGHT if sources.lm_weight is None else sources.lm_weight
        if large is None:
            large = uniform_ngram(list(spellings.pronunciations))
            lm_weight = 1.0
        spelling = None
        if sources.spell_unknown:
            penalty = sources.spelling_penalty or 0.0
            spelling = self._spelling_model(spellings, sources.token_lm, penalty)
            if rules_out_unknown(large, penalty) and all(word in spellings for word in listed_words(large)):
                raise AsrError(
                    f"{large.name}: spell_unknown has no effect here: the model has no <unk>, in whose place words are "
                    "spelled; estimate it with <unk> (SRILM: -unk), or list fewer of its words."
                )
        most = MOST_NGRAMS if sources.graph_ngrams is None else sources.graph_ngrams
        graph = compile_graph(self.tokens, spellings, large, most, spelling, progress, graph_folder)
        lm_device = self.device if self.config.lm_fusion == "search" else device_with_loops(self.device)
        if self.device.type != "cpu":
            graph = replace(graph, graph=graph.graph.to(self.device), ngram=graph.ngram.to(lm_device))
        small = graph.ngram
        make: Callable[[], LanguageModel] | None = None
        is_shared = False
        if sources.lm is not None:
            make_lm, is_shared = model_maker(sources.lm, small.vocabulary.ordinary, sources.lm_options)
            # An n-gram model that is in the graph as a whole needs no second look-up.
            ngram_beside = small if large.num_arcs == small.num_arcs else large.to(lm_device)
            make = functools.partial(_combined, small, ngram_beside, make_lm, lm_weight, lm_device)
        elif small.vocabulary != large.vocabulary or small.num_arcs != large.num_arcs:
            make = functools.partial(_instead_of, small, large.to(lm_device))
        if sources.hot_words is not None:
            score = DEFAULT_SCORE if sources.hot_word_score is None else sources.hot_word_score
            hot = HotWords(sources.hot_words, graph.graph.vocabulary, score, small)
            graph = replace(graph, graph=graph.graph.with_gain(hot.gain(graph.graph.vocabulary)))
            phrases = hot.model(small.vocabulary)
            if phrases is not None:
                make = functools.partial(made_with_phrases, make, phrases.to(lm_device))
        return graph, LentModels(make, is_shared)

    def _spellings(
        self,
        lexicon: Lexicon | None,
        listed: list[str] | None,
        ngram: NgramLM | None,
        lm: str | Path | Bundle | nn.Module | LanguageModel | None,
    ) -> Lexicon:
        """The words that may be found, and how they are spelled: without a lexicon in `tokens_for_words`, which become
        the decoder's tokens."""
        tokens = self.tokens
        if lexicon is not None and listed is None:
            listed = list(lexicon.pronunciations)
            if ngram is not None:
                known = set(listed_words(ngram))
                names = (written_as(word, known) for word in listed)
                # If none is known, keep all: `graph_ngram` then raises an error that says why.
                listed = [name for name in names if name is not None] or listed
        elif ngram is not None:
            of_ngram = listed_words(ngram)
            if listed is None:
                listed = of_ngram
            else:
                known = set(of_ngram)
                listed = [written_as(word, known) or word for word in listed]
                _warn_of_missing([word for word in listed if word not in known], len(listed), ngram)
        if lm is not None and listed is None:
            listed = words_of(lm, "words, a lexicon or an n-gram model")
        assert listed is not None
        if lexicon is None:
            if tokens.kind == "phones":
                raise AsrError(
                    f"{tokens.name}: these tokens look like phones; give a lexicon with pronunciations, or, if they "
                    'are letters, kind="letters" and the word_boundary.'
                )
            self.tokens = tokens_for_words(tokens, listed)
            return spelled_lexicon(listed, self.tokens)[0]
        spellings, missing = lexicon.restricted_to(listed)
        if missing and tokens.kind != "phones":
            return spellings.merged_with(spelled_lexicon(missing, tokens)[0])
        if missing:
            _LOGGER.warning("%d words have no entry in the lexicon (%s, ...).", len(missing), missing[0])
        return spellings

    def _spelling_model(
        self, lexicon: Lexicon, token_lm: str | Path | nn.Module | LanguageModel | None, penalty: float
    ) -> SpellingModel:
        tokens = self.tokens
        boundary = None if tokens.boundary_id is None else tokens.table.tokens[tokens.boundary_id]
        silences = SILENCES if tokens.kind == "phones" else ()
        symbols = [
            symbol
            for entry, symbol in enumerate(tokens.table.tokens)
            if tokens.is_text(entry) and entry != tokens.boundary_id and symbol not in silences
        ]
        beginnings = None
        if tokens.kind == "pieces":
            entries = range(1, len(tokens.table))
            beginnings = frozenset(tokens.table.tokens[entry] for entry in entries if tokens.begins_word(entry))
        order = _SPELLING_ORDER[tokens.kind]
        if token_lm is not None:
            if not isinstance(token_lm, (str, Path, NgramLM)):
                raise AsrError("spell_unknown: token_lm must be an n-gram model of tokens; give its file.")
            model = read_ngram(token_lm)
            return SpellingModel(model, boundary, penalty, beginnings, model)
        spelled = [
            [symbol for symbol in way if symbol != boundary]
            for ways in lexicon.pronunciations.values()
            for way in ways[:1]
        ]
        model = ngram_of_spellings(spelled, symbols, order)
        return SpellingModel(model, boundary, penalty, beginnings, order)

    def _warm_up(self) -> None:
        """Runs every loop once: numba compiles each on its first run on a machine, and caches the result."""
        _LOGGER.info("Warming up the search; its first run on a machine compiles its loops, which takes a while.")
        generator = torch.Generator().manual_seed(0)
        log_probs = torch.rand((2, 8, len(self.tokens)), generator=generator).log_softmax(2)
        frames = as_frames(log_probs, None, self.tokens, "scores", self.device, checks_blank=False)
        with no_autograd():
            for nbest in (1, 2):
                self._search.decode(frames, nbest)


def _instead_of(small: NgramLM, large: LanguageModel) -> LanguageModel:
    """A model that replaces the graph's own."""
    return Difference(mapped_to(large, small.vocabulary, warn=False), small)


def _combined(
    small: NgramLM, ngram: NgramLM, make: Callable[[], LanguageModel], weight: float, device: torch.device
) -> LanguageModel:
    """A model of words interpolated with the n-gram model, instead of the graph's own."""
    return Difference(interpolated(make, ngram, weight, small.vocabulary, device), small)


def _warn_of_missing(missing: list[str], num_words: int, ngram: NgramLM) -> None:
    """Warns if an n-gram model lacks some of the words, though not all, which is an error."""
    if not 0 < len(missing) < num_words:
        return
    if rules_out_unknown(ngram):
        effect = (
            "it has no <unk> either, so they are hardly ever found; estimate it with <unk> (SRILM: -unk) or with these "
            "words"
        )
    else:
        effect = "they share the probability of its <unk>"
    shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    _LOGGER.warning("%s: the model lacks %d of %d words (%s); %s.", ngram.name, len(missing), num_words, shown, effect)


def _config_of(config: CTCDecodingConfig | None, settings: dict[str, Any]) -> CTCDecodingConfig:
    if config is not None and settings:
        raise AsrError(f"{next(iter(settings))} cannot be given beside config; set it in the config.")
    if config is None:
        return settings_of(CTCDecodingConfig, settings)
    require_type(config, CTCDecodingConfig, "config", "a CTCDecodingConfig, or its fields as keywords")
    return config


def _given_settings(config: CTCDecodingConfig | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The fields of `CTCDecodingConfig` that the user has set."""
    if config is None:
        return settings
    of_config = {field.name: (getattr(config, field.name), field.default) for field in fields(config)}
    return {name: value for name, (value, default) in of_config.items() if value != default}


def _checked_inputs(inputs: str) -> FrameInput:
    if inputs not in FRAME_INPUTS:
        raise AsrError(f"inputs is {inputs!r}; it must be one of {', '.join(FRAME_INPUTS)}.")
    return inputs  # type: ignore[return-value]
