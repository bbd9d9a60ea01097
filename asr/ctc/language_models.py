"""Language models for CTC search: they are loaded, and each is lent to one search at a time.

`StatefulModel` adapts models that score one word at a time in a given state, such as KenLM's and torchaudio's.

Shapes: N streams, Q queries.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from asr.bundle import FILE_NAME, Bundle, read_rnn_lm
from asr.ctc.word_models import is_kenlm_binary, read_ngram
from asr.decoding.build import recognition_settings
from asr.errors import AsrError
from asr.kernels.lookup import LookupTables
from asr.kernels.memory import no_autograd
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.checks import CheckedLM, require_language_model
from asr.lm.combine import Interpolated, mapped_to, on_device
from asr.lm.hot_words import with_phrases
from asr.lm.interface import LanguageModel, StatefulNetwork
from asr.lm.ngram.arpa import LN_10
from asr.lm.ngram.io import MAGIC
from asr.lm.ngram.model import NgramLM
from asr.lm.transformers import is_transformer
from asr.lm.transformers import load as load_transformer
from asr.serialization import copied_to_processes
from asr.text.ctc_tokens import CTCTokens
from asr.text.symbols import UNK_ID, Vocabulary

RECURRENT_MODES = ("rnn", "interpolated")
"""The modes of a bundle whose settings say how its recurrent model runs, the preferred one first."""
LM_WEIGHT = 0.7
"""The usual weight of a model in its interpolation with an n-gram model."""
_CACHE_BYTES = 1 << 30
_FORGET_FROM = 1 << 16

_Stateful = TypeVar("_Stateful", bound="StatefulModel")


class StatefulModel(LanguageModel):
    """A language model that caches the score of each (state, word); contexts number the states in use, from 0.

    Several times slower than models that score in batches. Several threads may query it.

    Args:
        vocabulary: the words of `word_id`.
        first: the state before the first word.
        forget_from: how many states may be in use before `retain` forgets any.
    """

    def __init__(self, vocabulary: Vocabulary, first: Any, forget_from: int = _FORGET_FROM) -> None:
        self._vocabulary = vocabulary
        self._forget_from = forget_from
        self._lock = threading.Lock()
        self._begin(first)

    def _begin(self, first: Any) -> None:
        self._states: list[Any] = [first]
        # Contexts whose states were forgotten.
        self._free: list[int] = []
        self._edges: dict[tuple[int, int], tuple[float, int]] = {}
        self._forget_at = self._forget_from

    def fresh(self: _Stateful) -> _Stateful:
        """The same model with contexts of its own; of all models made in this way, one answers at a time."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._begin(self._states[0])
        return other

    def __getstate__(self) -> dict[str, Any]:
        """State without contexts, but for the first."""
        return {**self.fresh().__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @abstractmethod
    def after(self, state: Any, word_id: int) -> tuple[float, Any]:
        """The score of a word in a state, natural log, and the state after it."""

    @abstractmethod
    def at_end(self, state: Any) -> float:
        """The score of ending the sentence in a state, natural log."""

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def start(self, num_streams: int) -> Tensor:
        return torch.zeros(num_streams, dtype=torch.int64)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        with self._lock:
            answers = [self._edge(*query) for query in zip(context_idx.tolist(), word_id.tolist(), strict=True)]
        log_prob = torch.tensor([score for score, _ in answers], dtype=torch.float32)
        return log_prob, torch.tensor([state for _, state in answers], dtype=torch.int64)

    def final(self, context_idx: Tensor) -> Tensor:
        with self._lock:
            scores = [self.at_end(self._states[idx]) for idx in context_idx.tolist()]
        return torch.tensor(scores, dtype=torch.float32)

    def retain(self, live: Tensor) -> None:
        """Once many states are in use, forgets all those that contexts (L,) do not need."""
        with self._lock:
            if len(self._states) - len(self._free) < self._forget_at:
                return
            kept = {0, *live.tolist()}
            self._keep(kept)
            self._forget_at = max(self._forget_from, 2 * len(kept))

    def _keep(self, kept: set[int]) -> None:
        """Forgets all other contexts."""
        self._states = [state if idx in kept else None for idx, state in enumerate(self._states)]
        self._free = [idx for idx in range(len(self._states)) if idx not in kept]
        self._edges = {query: edge for query, edge in self._edges.items() if query[0] in kept and edge[1] in kept}

    def _edge(self, context_idx: int, word_id: int) -> tuple[float, int]:
        known = self._edges.get((context_idx, word_id))
        if known is None:
            score, state = self.after(self._states[context_idx], word_id)
            known = self._edges[context_idx, word_id] = float(score), self._context_of(state)
        return known

    def _context_of(self, state: Any) -> int:
        """The context of a state; states are not compared, as those of some models cannot be."""
        if self._free:
            idx = self._free.pop()
            self._states[idx] = state
            return idx
        self._states.append(state)
        return len(self._states) - 1


class KenLanguageModel(StatefulModel):
    """A language model queried through KenLM.

    Several times slower than an ARPA file or our binary loaded as `NgramLM`, which scores in batches.

    Args:
        path: an ARPA file or a KenLM binary.
        words: the words that may be queried.

    Raises:
        AsrError: the package is not installed, the file is not a model, or it has none of the words.
    """

    _context: dict[Any, int]

    def __init__(self, path: str | Path, words: Sequence[str]) -> None:
        try:
            self._kenlm: Any = importlib.import_module("kenlm")
        except ImportError as error:
            raise AsrError(
                f"{path}: a KenLM binary needs the package kenlm; `pip install kenlm`, or give the ARPA file."
            ) from error
        try:
            self._model = self._kenlm.Model(str(path))
        except (OSError, RuntimeError) as error:
            raise AsrError(f"{path}: KenLM cannot read this model ({str(error).splitlines()[0]}).") from error
        if not any(word in self._model for word in words):
            raise AsrError(f"{path}: the model has none of the {len(words)} words; check their letter case.")
        self._arguments = (path, words)
        first = self._kenlm.State()
        self._model.BeginSentenceWrite(first)
        super().__init__(Vocabulary(words, name=str(path)), first)

    def __reduce__(self) -> tuple[type[KenLanguageModel], tuple[str | Path, Sequence[str]]]:
        return KenLanguageModel, self._arguments

    @property
    def order(self) -> int:
        """The n-gram order."""
        return int(self._model.order)

    def after(self, state: Any, word_id: int) -> tuple[float, Any]:
        following = self._kenlm.State()
        word = "<unk>" if word_id == UNK_ID else self.vocabulary.words[word_id]
        return self._model.BaseScore(state, word, following) * LN_10, following

    def _context_of(self, state: Any) -> int:
        """The context of a state. Equal ones have one context, so that their number is limited and paths recombine."""
        if state not in self._context:
            self._context[state] = super()._context_of(state)
        return self._context[state]

    def _keep(self, kept: set[int]) -> None:
        super()._keep(kept)
        self._context = {state: idx for state, idx in self._context.items() if idx in kept}

    def _begin(self, first: Any) -> None:
        super()._begin(first)
        self._context = {first: 0}

    def at_end(self, state: Any) -> float:
        return float(self._model.BaseScore(state, "</s>", self._kenlm.State())) * LN_10


class SharedModel(CheckedLM):
    """One search's view of the user's own model, which others query as well, though no two at the same time.

    The model may forget what no view holds. If it has tables, it forgets nothing, since loops make contexts that no
    view sees.

    Args:
        lm: the model.
        views: all views of the model; None for the first one.
    """

    def __init__(self, lm: LanguageModel, views: weakref.WeakSet[SharedModel] | None = None) -> None:
        super().__init__(lm)
        self._views = weakref.WeakSet() if views is None else views
        self._views.add(self)
        self._held: list[Tensor] = []
        self._has_tables = False

    def __reduce__(self) -> tuple[type[SharedModel], tuple[LanguageModel]]:
        return SharedModel, (self._lm,)

    def another(self) -> SharedModel:
        """A view for another search."""
        return SharedModel(self._lm, self._views)

    def start(self, num_streams: int) -> Tensor:
        return self._hold(super().start(num_streams))

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, next_idx = super().score(context_idx, word_id)
        return log_prob, self._hold(next_idx)

    def start_from(self, state: Tensor) -> Tensor:
        return self._hold(super().start_from(state))

    def lookup_tables(self) -> LookupTables | None:
        """The model's own."""
        tables = super().lookup_tables()
        self._has_tables |= tables is not None
        return tables

    def retain(self, live: Tensor) -> None:
        """Tells the model which contexts the searches of all views hold, of which this one's are (L,)."""
        self._held = [live]
        views = list(self._views)
        if not any(view._has_tables for view in views):
            self._lm.retain(torch.cat([context for view in views for context in view._held]))

    def _hold(self, context_idx: Tensor) -> Tensor:
        if context_idx.numel():
            self._held.append(context_idx)
        return context_idx


@copied_to_processes
class LentModels:
    """A pool of language models, each lent to one search at a time, so that several threads may decode.

    Args:
        make: makes a model; None for no language model.
        is_shared: whether the models that `make` returns query the same one; searches and streams then take turns.
    """

    def __init__(self, make: Callable[[], LanguageModel] | None = None, is_shared: bool = False) -> None:
        self._make = make
        self._lock = threading.RLock() if is_shared else None
        self._idle: list[LanguageModel] = []

    def __reduce__(self) -> tuple[type[LentModels], tuple[Callable[[], LanguageModel] | None, bool]]:
        return LentModels, (self._make, self._lock is not None)

    @contextlib.contextmanager
    def lent(self) -> Iterator[LanguageModel | None]:
        """Lends a model until the block ends; None if there is no language model.

        A model whose block failed is not lent again, because its caches may be half written.
        """
        if self._make is None:
            yield None
            return
        if self._lock is not None:
            with self._lock:
                self._idle = self._idle or [self._make()]
                yield self._idle[0]
            return
        try:
            model = self._idle.pop()
        except IndexError:  # all models are lent
            model = self._make()
        yield model
        self._idle.append(model)

    def loan(self) -> Loan:
        """Lends a model to a stream."""
        return Loan(self._make, self._idle, self._lock)


class Loan:
    """The language model of a stream, which queries it in its turns, and gives it back when it has ended.

    Args:
        make: as for `LentModels`.
        idle: the models that are not lent.
        lock: held in each turn, if all models query the same one.

    Attributes:
        model: None if there is no language model.
    """

    def __init__(
        self,
        make: Callable[[], LanguageModel] | None,
        idle: list[LanguageModel],
        lock: contextlib.AbstractContextManager[Any] | None,
    ) -> None:
        self._idle, self._lock, self._is_intact = idle, lock, True
        self.model: LanguageModel | None = None
        with contextlib.suppress(IndexError):  # all models are lent
            if lock is None:
                self.model = idle.pop()
        if self.model is None and make is not None:
            with self.turn():
                self.model = make()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A block without autograd in which the stream queries its model; if it fails, the model is not lent again."""
        with contextlib.nullcontext() if self._lock is None else self._lock, no_autograd():
            try:
                yield
            except BaseException:
                self._is_intact = False
                raise

    def give_back(self) -> None:
        """Ends the loan, in a turn; the model keeps what it has cached, but nothing that it was asked to hold."""
        if self.model is not None:
            self.model.retain(self.model.start(0))
            if self._lock is None and self._is_intact:
                self._idle.append(self.model)


def is_ngram_file(path: str | Path) -> bool:
    """Whether a path is an n-gram file: ARPA text, our binary or KenLM's."""
    if Path(path).is_dir():
        return False
    if is_kenlm_binary(path):
        return True
    with Path(path).open("rb") as stream:
        begin = stream.read(1 << 16)
    return begin.startswith(MAGIC) or b"\\data\\" in begin or Path(path).suffix in (".arpa", ".gz", ".xz")


def model_maker(
    source: Any, words: Sequence[str], options: Mapping[str, Any] | None = None
) -> tuple[Callable[[], LanguageModel], bool]:
    """Returns a function that makes the language model, and whether all that it makes query the same one.

    Args:
        source: a file or folder, a bundle, a network, a language model, or `transformers:NAME`.
        words: the words that may be queried; only KenLM's binaries and Transformers need them.
        options: how a recurrent network runs, `CacheOptions` by name. They override the settings of its bundle, or for
            a network without one, products of 8-bit integers.

    Raises:
        AsrError: the source is not a language model, it has no network for the options, or an option does not exist.
    """
    settings = CacheOptions(hidden_products="int8")
    if is_transformer(source):
        source = load_transformer(source, Vocabulary(words))
    if isinstance(source, (str, Path)):
        if not Path(source).exists():
            raise AsrError(f"{source}: there is no such language model.")
        if (Path(source) / FILE_NAME).is_file():
            source = Bundle.load(source)
        elif not is_ngram_file(source):
            source = read_rnn_lm(source).network
        elif not is_kenlm_binary(source):
            source = read_ngram(source)
    if isinstance(source, Bundle):
        source, settings = _recurrent(source)
    if isinstance(source, StatefulNetwork):
        network: Any = source.eval() if isinstance(source, nn.Module) else source
        # Histories are kept between utterances; when the cache is full, the least used ones are evicted.
        settings = replace(settings, **{"capacity_bytes": _CACHE_BYTES, **_known(options or {}, settings)})
        if network.has_exact_states:
            settings.require_exact()
        return functools.partial(CachedRNNLM, network, settings), False
    if options:
        raise AsrError(
            f"{next(iter(options))} has no effect here: it is for a recurrent network, and the language model is not "
            "one that is run here; leave it out."
        )
    if isinstance(source, (str, Path)):
        return KenLanguageModel(source, words).fresh, False
    if isinstance(source, NgramLM):
        return functools.partial(same, source), False
    if isinstance(source, StatefulModel):
        return functools.partial(_checked_fresh, source), False
    if isinstance(source, LanguageModel):
        require_language_model(source)
        return SharedModel(source).another, True
    if isinstance(source, nn.Module):
        raise AsrError(
            f"{type(source).__name__} is a torch module without a list of words; give "
            "asr.lm.torch_adapter.WordModule(module, vocabulary), or for a causal model of transformers "
            "asr.lm.transformers.TransformerNetwork(model, tokenizer, vocabulary)."
        )
    raise AsrError(
        f"{type(source).__name__} is not a language model; give a file or folder, a network of this program, or an "
        "object with vocabulary, start, score and final."
    )


def token_models(source: Any, tokens: CTCTokens) -> LentModels:
    """Language models of tokens, in the forms of `model_maker`; none if the source is None.

    Raises:
        AsrError: the source is a Transformer, or as for `model_maker`.
    """
    if source is None:
        return LentModels()
    if is_transformer(source):
        raise AsrError(f"token_lm is {source}, which scores words; give words and lm={str(source)!r}.")
    return LentModels(*model_maker(source, tokens.table.tokens[1:]))


def words_of(lm: Any, instead: str) -> list[str]:
    """The words of a language model in the forms of `model_maker`.

    Args:
        lm: the model.
        instead: what to give if it has none.

    Raises:
        AsrError: it has no list of words, or is a file of n-grams, or as for `model_maker`.
    """
    if is_transformer(lm):
        raise AsrError(f"{lm}: a Transformer has no list of words; give {instead}.")
    if isinstance(lm, (str, Path)) and is_ngram_file(lm):
        raise AsrError(f"{lm}: without a word list, give an n-gram file as ngram=, not as lm=.")
    make, _ = model_maker(lm, ())
    return list(make().vocabulary.ordinary)


def interpolated(
    make: Callable[[], LanguageModel],
    ngram: NgramLM | None,
    weight: float,
    vocabulary: Vocabulary,
    device: torch.device,
) -> LanguageModel:
    """A new model with some weight, interpolated with an n-gram model if there is one, over a vocabulary."""
    other = on_device(mapped_to(make(), vocabulary), device)
    if ngram is None or weight == 1.0:
        return other
    return Interpolated([other, mapped_to(ngram, vocabulary, warn=False)], [weight, 1.0 - weight])


def made_with_phrases(make: Callable[[], LanguageModel] | None, phrases: NgramLM) -> LanguageModel:
    """A new model, if there is one, with the scores of hot phrases on top."""
    return with_phrases(None if make is None else make(), phrases)


def same(model: LanguageModel) -> LanguageModel:
    """The model itself: with `functools.partial`, a function that makes a model which any number of searches share."""
    return model


def _checked_fresh(model: StatefulModel) -> LanguageModel:
    return CheckedLM(model.fresh())


def _recurrent(bundle: Bundle) -> tuple[nn.Module, CacheOptions]:
    """A bundle's recurrent model, and how the recognizer runs it."""
    if bundle.rnn_lm is None:
        raise AsrError(f"bundle {bundle.name}: it has no recurrent language model; name another one.")
    mode = next((mode for mode in RECURRENT_MODES if mode in bundle.decoding), RECURRENT_MODES[0])
    return bundle.rnn_lm.network, recognition_settings(bundle, mode, {}).cache


def _known(options: Mapping[str, Any], settings: CacheOptions) -> Mapping[str, Any]:
    """The options, all of which are fields of `CacheOptions` and have an effect beside the other settings."""
    known = CacheOptions.__dataclass_fields__
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise AsrError(f"there is no option {unknown!r} of a recurrent model; there are {', '.join(known)}.")
    length = options.get("recombination_length", settings.recombination_length)
    choice = options.get("recombination", settings.recombination)
    if "recombination" in options and length is None:
        raise AsrError("recombination has no effect without recombination_length; give both, or leave it out.")
    if "recombination_window" in options and (length is None or choice != "best"):
        raise AsrError(
            "recombination_window has no effect without recombination_length and recombination 'best'; give all of "
            "them, or leave it out."
        )
    return options
