"""Bundles with an external acoustic model: a decoding graph of its tokens, and language models of words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from asr.bundle import Bundle
from asr.ctc.graphs import MOST_NGRAMS, compile_graph, read_lexicon, spelled_lexicon
from asr.ctc.interface import CTCDecodingConfig
from asr.ctc.language_models import RECURRENT_MODES
from asr.ctc.word_models import listed_words, read_ngram, uniform_ngram
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.hub import cache_folder
from asr.lm.cached.approximations import CacheOptions
from asr.lm.ngram.model import NgramLM
from asr.models.external.base import ExternalModel, load_acoustic_model
from asr.models.external.network import ExternalNetwork, Samples
from asr.options import options_of, require_type
from asr.serialization import ModelSpec, fingerprint_of
from asr.text.ctc_tokens import CTCTokens
from asr.text.lexicon import Lexicon
from asr.text.plain_form import tokens_for_words


def graph_cache() -> Path:
    """The folder that caches decoding graphs of external acoustic models."""
    return cache_folder() / "graphs"


def bundle_with_acoustic_model(
    acoustic_model: str | ExternalModel,
    bundle: Bundle | None = None,
    ngram: str | Path | NgramLM | None = None,
    lexicon: str | Path | Lexicon | None = None,
    progress: Callable[[str], None] = lambda step: None,
    graph_folder: str | Path | None = None,
    graph: str | Path | None = None,
) -> Bundle:
    """Combines an external acoustic model with language models of words.

    If the acoustic model has the tokens of the bundle, for example because it was exported from it, the bundle's graph
    and decoding options are used. Otherwise a graph is compiled and cached in a folder, and the options are those of
    `CTCDecodingConfig`. Compiling takes about 15 s for 64,000 words spelled in letters.

    Args:
        acoustic_model: the network, or its name `KIND:NAME` (see `asr.models.external.base.KINDS`).
        bundle: provides the language models, and the lexicon for a network of phones.
        ngram: n-gram model of words that replaces the bundle's: ARPA text or our binary, of any size. If it is too
            large for the graph, it becomes the bundle's large model.
        lexicon: the spellings of words in the network's tokens; required for phones only.
        progress: called with the name of each step of compiling.
        graph_folder: cache folder for compiled graphs; None for `graph_cache`.
        graph: a ready decoding graph for the network's tokens, as `asr graph` writes it. `ngram` must then be the model
            in that graph; it is needed for decoding with a larger model, such as those of `bundle`.

    Raises:
        AsrError: the network or a file cannot be read, there are no words, there is no lexicon for phones, words cannot
            be spelled in the tokens, or the bundle would have no effect.
    """
    model = load_acoustic_model(acoustic_model) if isinstance(acoustic_model, str) else acoustic_model
    wanted = "its name KIND:NAME, or for a network of your own asr.models.external.CallableModel(function, tokens, ...)"
    require_type(model, ExternalModel, "acoustic_model", wanted)
    tokens = model.tokens
    samples = {"sampling_rate": model.sampling_rate}
    parts: dict[str, Any] = {
        "features": ModelSpec("Samples", samples, Samples(**samples).eval()),
        "acoustic_model": ExternalNetwork.of(model),
        "fingerprint": " ".join(
            [bundle.fingerprint if bundle is not None else "", model.name, *map(_fingerprint, (ngram, lexicon, graph))]
        )
        + _fingerprint(model.name.partition(":")[2]),
    }
    if bundle is not None and ngram is lexicon is graph is None and tokens.table.tokens == bundle.graph.tokens.tokens:
        return replace(bundle, **parts)
    parts |= {"name": model.name, "decoding": _decoding(bundle), "rnn_lm": None if bundle is None else bundle.rnn_lm}
    if graph is not None:
        if bundle is not None and ngram is None:
            raise AsrError(
                f"bundle {bundle.name} has no effect here: its language models replace the n-gram model in the graph; "
                "give that model (ngram, --ngram), or leave out the bundle."
            )
        return Bundle(
            graph=DecodingGraph.load(graph, tokens.table),
            small_ngram=None if ngram is None else read_ngram(ngram),
            large_ngram=None if bundle is None else bundle.large_ngram,
            lexicon=None if lexicon is None else read_lexicon(lexicon, tokens),
            **parts,
        )
    words = _word_model(bundle, ngram)
    if lexicon is None and words is not None:
        tokens = tokens_for_words(tokens, listed_words(words))
        if tokens is not model.tokens:
            parts["acoustic_model"] = ExternalNetwork.of(model, tokens)
    spellings = _spellings(tokens, bundle, lexicon, words)
    if words is None:
        words = uniform_ngram(list(spellings.pronunciations))
    keeps_all = bundle is not None and words is bundle.small_ngram
    most = len(words.arrays.label) if keeps_all else MOST_NGRAMS
    folder = graph_cache() if graph_folder is None else graph_folder
    compiled = compile_graph(tokens, spellings, words, most, progress=progress, folder=folder)
    small = compiled.ngram
    large = bundle.large_ngram if bundle is not None and ngram is None else None
    if small.num_arcs != words.num_arcs or small.vocabulary != words.vocabulary:
        large = large or words
    return Bundle(
        graph=compiled.graph,
        small_ngram=small,
        large_ngram=large,
        lexicon=compiled.lexicon,
        **parts,
    )


def _word_model(bundle: Bundle | None, ngram: str | Path | NgramLM | None) -> NgramLM | None:
    """The n-gram model to compile into the graph; None if there is only a lexicon."""
    if ngram is not None:
        return read_ngram(ngram)
    if bundle is None:
        return None
    words = bundle.small_ngram or bundle.large_ngram
    if words is None:
        raise AsrError(f"bundle {bundle.name}: it has no n-gram model for the graph; give one (ngram, --ngram).")
    return words


def _spellings(
    tokens: CTCTokens, bundle: Bundle | None, lexicon: str | Path | Lexicon | None, words: NgramLM | None
) -> Lexicon:
    """Spellings in the network's tokens of the n-gram model's words, or of the lexicon's if there is no model."""
    if lexicon is None and tokens.kind == "phones" and bundle is not None:
        lexicon = bundle.lexicon
    if lexicon is not None:
        given = read_lexicon(lexicon, tokens)
        return given if words is None else given.restricted_to(listed_words(words))[0]
    if tokens.kind == "phones":
        raise AsrError(
            f"{tokens.name}: the acoustic model's tokens are phones; give a lexicon with pronunciations "
            "(lexicon, --lexicon)."
        )
    if words is None:
        raise AsrError(
            "an external acoustic model has no words of its own; give an n-gram model (ngram, --ngram), a lexicon or a "
            "bundle."
        )
    return spelled_lexicon(listed_words(words), tokens)[0]


def _decoding(bundle: Bundle | None) -> dict[str, dict[str, Any]]:
    """Default options of CTC networks, since nothing was tuned for this one.

    Of the bundle's options, those of its recurrent model are kept: how it runs, and its weight.
    """
    usual = asdict(CTCDecodingConfig().options())
    by_mode = {} if bundle is None else bundle.decoding
    kept = {"rnn_weight", "carry_history", *options_of(CacheOptions)}
    return {"ngram": usual} | {
        mode: usual | {name: value for name, value in by_mode.get(mode, {}).items() if name in kept}
        for mode in RECURRENT_MODES
    }


def _fingerprint(source: Any) -> str:
    if isinstance(source, (str, Path)) and Path(source).exists():
        return fingerprint_of(Path(source))
    return str(source) if source is not None else ""
