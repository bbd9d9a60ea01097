"""`CTCDecoder`: log-probabilities of any CTC network in, words out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from asr.ctc.config import CTCDecodingConfig
from asr.ctc.frames import FRAME_INPUTS, FrameInput, as_frames
from asr.ctc.graph_search import GraphSearch
from asr.ctc.graphs import SILENCES, WordGraph, compile_graph, read_lexicon, read_words, spelled_lexicon
from asr.ctc.hypothesis import CTCHypothesis
from asr.ctc.language_models import LentModels, is_ngram_file, model_maker
from asr.ctc.prefix_search import TokenSearch
from asr.ctc.spelled_words import SpellingModel
from asr.ctc.stream import CTCStream
from asr.ctc.word_models import listed_words, ngram_of_spellings, read_ngram, uniform_ngram
from asr.errors import AsrError
from asr.lm.combine import Difference, Interpolated, RemappedLM
from asr.lm.interface import LanguageModel
from asr.lm.ngram.model import NgramLM
from asr.text.ctc_tokens import CTCTokens, PieceModel, TokenKind
from asr.text.lexicon import Lexicon

_LOGGER = logging.getLogger(__name__)
_SPELLING_ORDER = {"letters": 4, "pieces": 2, "phones": 3}
_ROWS_AHEAD = 8


class _Sources(NamedTuple):
    """What words and their language models are made of; see `CTCDecoder`."""

    lexicon: str | Path | Lexicon | Mapping[str, Any] | None
    words: str | Path | Iterable[str] | None
    ngram: str | Path | NgramLM | None
    lm: str | Path | nn.Module | LanguageModel | None
    lm_weight: float
    token_lm: str | Path | nn.Module | LanguageModel | None
    spell_unknown: bool
    spelling_penalty: float


class CTCDecoder:
    """Decodes the output of a CTC network; several threads may call it at a time.

        decoder = CTCDecoder("tokens.txt", ngram="3gram.arpa")
        print(decoder(log_probs)[0].text)

    With a lexicon, a word list or an n-gram model the words are searched over a compiled graph, Viterbi over the
    network's paths, with the n-gram model inside; with none of them, or with `token_lm`, any sequence of tokens may be
    found, each with the sum over its paths (Graves, Sequence transduction with recurrent neural networks, 2012; Hannun
    et al., First-pass large vocabulary continuous speech recognition using bi-directional recurrent DNNs, 2014).

    Args:
        tokens: the network's output symbols, see `CTCTokens`: a list, a file, or a `CTCTokens` made before.
        lexicon: how words are written in tokens: a file (`WORD TOKEN TOKEN ...`), a mapping, a `Lexicon`. Letters and
            pieces need none, phones do.
        words: the words that may be found, a file with one a line or a collection; by default those of the lexicon, of
            the n-gram model, or of `lm`.
        ngram: an n-gram model of words: ARPA text (.gz, .xz too), our binary, or an `NgramLM`, of any size: what the
            graph cannot hold acts while the search runs.
        lm: another language model of words for the search: a folder or bundle of a recurrent network, its network, a
            binary of KenLM, or any `asr.lm.interface.LanguageModel`. A network's hidden layer multiplies bytes where
            the processor can; for exact scores give `asr.lm.cached.engine.CachedRNNLM(network)`.
        lm_weight: how much of `lm` there is in its linear interpolation with `ngram`, 0 to 1; 1 where there is no
            `ngram`.
        token_lm: a language model of tokens, as `ngram` or `lm` are given; with it words are not listed, unless they
            are to be spelled (`spell_unknown`).
        blank, word_boundary, kind, piece_model: see `CTCTokens`.
        spell_unknown: whether words outside the list may be found, spelled in letters or pieces wherever the n-gram
            model allows `<unk>`; phones are turned into letters as the lexicon has them.
        spelling_penalty: natural log, added to each such word.
        frame_shift: seconds from one frame of the network's output to the next, for times of words in seconds.
        inputs: what is given to the call: `log_probs`, `logits`, `probabilities`, or `scores` (unchecked).
        confidences: whether words get confidences, which takes a little longer.
        config: scales and beams; keywords of `CTCDecodingConfig` may be given instead, as in `lm_scale=2.0`.
        graph_ngrams: so many n-grams of `ngram` go into the graph at most.
        graph_folder: where compiled graphs are kept, so that the next process loads them; None for memory alone.
        device: where the search runs; log-probabilities may come from any.
        warm_up: whether to try the search once here, since its loops are compiled when they are first run on a machine.
        progress: called with the name of each step of compiling the graph.

    Raises:
        AsrError: something given cannot be read or does not fit the rest; the sentence says what.
    """

    def __init__(
        self,
        tokens: CTCTokens | Sequence[str] | Mapping[str, int] | str | Path,
        *,
        lexicon: str | Path | Lexicon | Mapping[str, Any] | None = None,
        words: str | Path | Iterable[str] | None = None,
        ngram: str | Path | NgramLM | None = None,
        lm: str | Path | nn.Module | LanguageModel | None = None,
        lm_weight: float = 0.7,
        token_lm: str | Path | nn.Module | LanguageModel | None = None,
        blank: int | str | None = None,
        word_boundary: str | None = None,
        kind: TokenKind | None = None,
        piece_model: str | Path | PieceModel | None = None,
        spell_unknown: bool = False,
        spelling_penalty: float = 0.0,
        frame_shift: float | None = None,
        inputs: FrameInput = "log_probs",
        confidences: bool = False,
        config: CTCDecodingConfig | None = None,
        graph_ngrams: int = 300_000,
        graph_folder: str | Path | None = None,
        device: torch.device | str = "cpu",
        warm_up: bool = True,
        progress: Callable[[str], None] = lambda step: None,
        **settings: Any,
    ) -> None:
        if not isinstance(tokens, CTCTokens):
            tokens = CTCTokens(tokens, blank=blank, word_boundary=word_boundary, kind=kind, piece_model=piece_model)
        self.tokens = tokens
        self.config = _config_of(config, settings)
        self.device = torch.device(device)
        self.frame_shift = frame_shift
        self._inputs = _checked_inputs(inputs)
        if frame_shift is not None and not 0 < frame_shift < 10:
            raise AsrError(f"the frame shift is {frame_shift}; give seconds from one frame to the next, such as 0.02.")
        if not 0.0 <= lm_weight <= 1.0:
            raise AsrError(f"lm_weight is {lm_weight}; it lies between 0 and 1.")
        self.word_graph: WordGraph | None = None
        self._search: GraphSearch | TokenSearch
        if lexicon is words is ngram is lm is None:
            if spell_unknown:
                raise AsrError("spell_unknown adds words to a list of words; give a lexicon, words or an n-gram model.")
            model, is_shared = model_maker(token_lm, tokens.table.tokens[1:]) if token_lm is not None else (None, False)
            self._search = TokenSearch(tokens, self.config, LentModels(model, is_shared), frame_shift, self.device)
        else:
            if token_lm is not None and not spell_unknown:
                raise AsrError("token_lm is for tokens without a word list; leave out the words or say spell_unknown.")
            sources = _Sources(lexicon, words, ngram, lm, lm_weight, token_lm, spell_unknown, spelling_penalty)
            self.word_graph, models = self._words(sources, graph_ngrams, graph_folder, progress)
            self._search = GraphSearch(self.word_graph, tokens, self.config, models, frame_shift, confidences)
        if warm_up:
            self._warm_up()

    def __call__(
        self, log_probs: Any, lengths: Any = None, *, nbest: int = 1
    ) -> list[CTCHypothesis] | list[list[CTCHypothesis]]:
        """Decodes one utterance or a batch.

        Args:
            log_probs: (N, T, C) or (T, C) natural logs, or a list of (T, C); a tensor on any device or an array.
            lengths: (N,) frames of each utterance; None for all.
            nbest: so many different texts at most, best first.

        Returns:
            For each utterance its hypotheses; of one utterance without a batch just its hypotheses. There is always
            one, which is empty and not `is_complete` where nothing survived the beam.

        Raises:
            AsrError: wrong shape or width, NaN, or values that are not log-probabilities.
        """
        if isinstance(nbest, bool) or not isinstance(nbest, int) or nbest < 1:
            raise AsrError(f"nbest is {nbest!r}; ask for 1 hypothesis or more.")
        frames = as_frames(log_probs, lengths, self.tokens, self._inputs, self.device)
        with torch.no_grad():
            found = self._search.decode(frames, nbest)
        return found[0] if frames.is_single else found

    def texts(self, log_probs: Any, lengths: Any = None) -> list[str]:
        """The best text of each utterance; arguments as of a call."""
        found = self(log_probs, lengths)
        return [each[0].text if isinstance(each, list) else each.text for each in found]

    def stream(self, commit_seconds: float | None = None) -> CTCStream:
        """Opens a stream, which is given frames as they come; its result does not depend on how they are cut.

        Args:
            commit_seconds: what the best hypothesis said so long ago is decided, which bounds the memory of a stream
                that never pauses; None decides only what all hypotheses share. Needs a frame shift.
        """
        commit_frames = None
        if commit_seconds is not None:
            if self.frame_shift is None:
                raise AsrError("commit_seconds needs to know the frame shift; build the decoder with frame_shift=.")
            commit_frames = max(1, round(commit_seconds / self.frame_shift))
        return CTCStream(self._search, self.tokens, self._inputs, self.device, commit_frames)

    def _words(
        self,
        sources: _Sources,
        graph_ngrams: int,
        graph_folder: str | Path | None,
        progress: Callable[[str], None],
    ) -> tuple[WordGraph, LentModels]:
        """The compiled graph, and the language models that act beside it."""
        lexicon, words, ngram, lm, lm_weight, token_lm, spell_unknown, spelling_penalty = sources
        tokens = self.tokens
        spellings = None if lexicon is None else read_lexicon(lexicon, tokens)
        listed = None if words is None else read_words(words)
        large = None if ngram is None else read_ngram(ngram)
        if listed is None and spellings is not None:
            listed = list(spellings.pronunciations)
            if large is not None:
                known = set(listed_words(large))
                # Else an empty list: what the model says of none of them is told where the graph is made.
                listed = [word for word in listed if word in known] or listed
        if listed is None and large is not None:
            listed = listed_words(large)
        if lm is not None and listed is None:
            if isinstance(lm, (str, Path)) and is_ngram_file(lm):
                raise AsrError(f"{lm}: an n-gram file of which the words shall be taken is given as ngram=, not lm=.")
            model, _ = model_maker(lm, ())
            listed = list(model().vocabulary.words[4:])
        assert listed is not None
        if spellings is None:
            if tokens.kind == "phones":
                raise AsrError(f"{tokens.name}: these tokens are phones; give a lexicon that says how words sound.")
            spellings, _ = spelled_lexicon(listed, tokens)
        else:
            spellings, missing = spellings.restricted_to(listed)
            if missing and tokens.kind != "phones":
                spellings = spellings.merged_with(spelled_lexicon(missing, tokens)[0])
            elif missing:
                _LOGGER.warning("%d words have no entry in the lexicon (%s, ...).", len(missing), missing[0])
        if large is None:
            large = uniform_ngram(list(spellings.pronunciations))
            lm_weight = 1.0
        spelling = self._spelling_model(spellings, token_lm, spelling_penalty) if spell_unknown else None
        graph = compile_graph(tokens, spellings, large, graph_ngrams, spelling, progress, graph_folder)
        if self.device.type != "cpu":
            graph = replace(graph, graph=graph.graph.to(self.device), ngram=graph.ngram.to(self.device))
        small = graph.ngram
        if lm is None:
            if small.vocabulary == large.vocabulary and small.num_arcs == large.num_arcs:
                return graph, LentModels(None, False)
            on_device = large.to(self.device)
            return graph, LentModels(lambda: Difference(_mapped(on_device, small), small), False)
        make, is_shared = model_maker(lm, small.vocabulary.words[4:])
        on_device = large.to(self.device)

        def combined() -> LanguageModel:
            other = _mapped(make(), small)
            if lm_weight == 1.0:
                return Difference(other, small)
            if large.num_arcs == small.num_arcs:
                return Difference(Interpolated([other, small], [lm_weight, 1.0 - lm_weight]), small)
            mixed = Interpolated([other, _mapped(on_device, small)], [lm_weight, 1.0 - lm_weight])
            return Difference(mixed, small)

        return graph, LentModels(combined, is_shared)

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
                raise AsrError("spell_unknown: the graph spells by an n-gram model of tokens; give its file.")
            model = read_ngram(token_lm)
            return SpellingModel(model, boundary, penalty, beginnings, id(model))
        spelled = [
            [symbol for symbol in way if symbol != boundary]
            for ways in lexicon.pronunciations.values()
            for way in ways[:1]
        ]
        model = ngram_of_spellings(spelled, symbols, order)
        return SpellingModel(model, boundary, penalty, beginnings, order)

    def _warm_up(self) -> None:
        """Runs every loop once: numba compiles them when they are first run on a machine, and keeps what it made."""
        _LOGGER.info(
            "The search is tried once; where its loops were never run, they are compiled, which takes a while."
        )
        generator = torch.Generator().manual_seed(0)
        log_probs = torch.rand((2, 8, len(self.tokens)), generator=generator).log_softmax(2)
        frames = as_frames(log_probs, None, self.tokens, "scores", self.device, checks_blank=False)
        with torch.no_grad():
            for nbest in (1, 2):
                self._search.decode(frames, nbest)


def _config_of(config: CTCDecodingConfig | None, settings: dict[str, Any]) -> CTCDecodingConfig:
    if config is not None and settings:
        raise AsrError(f"{next(iter(settings))} is a setting of the config that was given, too; change it there.")
    if config is not None:
        return config
    known = CTCDecodingConfig.__dataclass_fields__
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise AsrError(f"there is no argument or setting {unknown[0]!r}; settings are {', '.join(known)}.")
    return CTCDecodingConfig(**settings)


def _checked_inputs(inputs: str) -> FrameInput:
    if inputs not in FRAME_INPUTS:
        raise AsrError(f"inputs is {inputs!r}; it is one of {', '.join(FRAME_INPUTS)}.")
    return inputs  # type: ignore[return-value]


def _mapped(model: LanguageModel, small: NgramLM) -> LanguageModel:
    """The model asked with the word ids of the graph's."""
    return model if model.vocabulary == small.vocabulary else RemappedLM(model, small.vocabulary)
