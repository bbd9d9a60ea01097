"""Compiles tokens, words and an n-gram model into the graph that a CTC decoder searches."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from asr.ctc.phones_to_letters import PhonesToLetters
from asr.ctc.spelled_words import SPELLING, SpellingModel, splice_spellings
from asr.ctc.word_models import graph_ngram, with_unlisted_as_unknown
from asr.errors import AsrError
from asr.graph.build import OptionalSilence, build_phone_graph
from asr.graph.decoding_graph import DecodingGraph, graph_from_arrays
from asr.graph.epsilon_removal import remove_epsilons
from asr.graph.topology import add_boundary_loops, compose_topology, topology_named
from asr.lm.ngram.io import load_ngram_lm, save_ngram_lm
from asr.lm.ngram.model import NgramLM
from asr.options import require_type
from asr.text.byte_pieces import are_gpt2
from asr.text.ctc_tokens import CTCTokens
from asr.text.lexicon import Lexicon, has_stress
from asr.text.symbols import TokenTable, first_words, ordinary_words

_LOGGER = logging.getLogger(__name__)
SILENCES = ("SIL", "sil", "<sil>", "SP", "sp")
"""Possible names of a silence phone between words."""
MOST_NGRAMS = 300_000
"""How many n-grams a graph gets, unless the user says otherwise."""
_MOST_GRAPHS_KEPT = 4
_GRAPH_SUFFIX, _NGRAM_SUFFIX, _LETTERS_SUFFIX = ".safetensors", ".ngram", ".letters.ngram"
# Counts changes of what a graph with spelled words is compiled to, so that older files are not taken for it.
_SPELLED_VERSION = 4
_kept_graphs: OrderedDict[Hashable, WordGraph] = OrderedDict()
_kept_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class WordGraph:
    """A compiled graph and its sources.

    Attributes:
        graph: reads tokens of `CTCTokens.table` and outputs words.
        ngram: the model inside the graph, which a larger one may replace during the search.
        lexicon: the spellings of its words.
        spells: whether out-of-vocabulary words are spelled.
        letters: converts the phones of such words to letters; None unless words are spelled in phones.
    """

    graph: DecodingGraph
    ngram: NgramLM
    lexicon: Lexicon
    spells: bool
    letters: PhonesToLetters | None = None


def read_lexicon(source: str | Path | Lexicon | Mapping[str, Any], tokens: CTCTokens) -> Lexicon:
    """Reads a lexicon from a file, or from a mapping of words to one or several spellings in tokens.

    In a mapping, a spelling is a tuple of tokens or a string with spaces between tokens, and several spellings are a
    list; if all lists have single tokens only, they are refused. Words and tokens of a file keep their case; stress
    digits are removed if the tokens are phones without them. After a spelling that does not end in the word boundary,
    the boundary is optional: the word gets both spellings. Words of silence or boundaries alone are left out.

    Raises:
        AsrError: the file cannot be read, a spelling has tokens that the network does not have, no word is left, or it
            is not clear whether a word has one spelling or several.
    """
    if isinstance(source, Lexicon):
        lexicon = source
    elif isinstance(source, Mapping):
        _refuse_others(source)
        _refuse_lists_of_tokens(source)
        lexicon = Lexicon({word: _spellings(given) for word, given in source.items()})
    else:
        require_type(source, str | PathLike, "lexicon", "a file, a mapping or a Lexicon")
        keep_stress = tokens.kind != "phones" or has_stress(tokens.table.tokens)
        lexicon = Lexicon.from_file(source, keep_stress, upper_case=False)
    if tokens.is_byte_level and are_gpt2(lexicon.phones):
        ways_of = lexicon.pronunciations.items()
        lexicon = Lexicon({word: [tuple(map(tokens.converted, way)) for way in ways] for word, ways in ways_of})
    lacking = [phone for phone in lexicon.phones if phone not in tokens.table or phone == tokens.table.tokens[0]]
    if lacking:
        raise AsrError(
            f"{lexicon.name}: {len(lacking)} symbols of its spellings are not tokens of the network "
            f"({' '.join(lacking[:5])}{' ...' if len(lacking) > 5 else ''}); give a lexicon for these tokens."
        )
    silence = _silence_of(tokens)
    if silence is not None:
        lexicon = _without_silence(lexicon, silence)
    return lexicon if tokens.boundary_id is None else lexicon.with_optional(tokens.table.tokens[tokens.boundary_id])


def _silence_of(tokens: CTCTokens) -> str | None:
    """The symbol that may stand between any words, or None."""
    if tokens.boundary_id is not None:
        return tokens.table.tokens[tokens.boundary_id]
    return next((name for name in SILENCES if name in tokens.table), None) if tokens.kind == "phones" else None


def _without_silence(lexicon: Lexicon, silence: str) -> Lexicon:
    """The lexicon without words such as Kaldi's `!SIL`: silence needs no word."""
    ways_of = lexicon.pronunciations
    begin_so = [word for word, spelled in ways_of.joined.items() if spelled.startswith(silence)]
    silent = {word for word in begin_so if all({*way} == {silence} for way in ways_of[word])}
    if not silent:
        return lexicon
    if len(silent) == len(ways_of):
        raise AsrError(f"{lexicon.name}: the words of the lexicon are spelled as silence alone; give other words.")
    _LOGGER.warning(
        "%s: %d words are spelled as silence alone and are left out (%s).", lexicon.name, len(silent), min(silent)
    )
    return lexicon.restricted_to(word for word in ways_of if word not in silent)[0]


def read_words(source: str | Path | Iterable[str]) -> list[str]:
    """Reads distinct words from a file, one per line, or from any collection.

    Raises:
        AsrError: the file cannot be read, there are no words, or one has white space in it.
    """
    name = "word list"
    if isinstance(source, (str, Path)):
        name = str(source)
        source = first_words(source)
    require_type(source, Iterable, "words", "a file, or a collection of strings")
    listed = list(source)
    wrong = [word for word in listed if not isinstance(word, str) or word.split() != [word]]
    if wrong:
        raise AsrError(f"{name}: {wrong[0]!r} is not a word; words are strings without white space.")
    words = ordinary_words(listed)
    if not words:
        raise AsrError(f"{name}: there is no word in it; give one word per line.")
    return words


def spelled_lexicon(words: Sequence[str], tokens: CTCTokens) -> tuple[Lexicon, list[str]]:
    """Spells words in tokens -> the lexicon, and the words that cannot be spelled.

    Raises:
        AsrError: no word can be spelled.
    """
    spellings = {word: tokens.spell(word) for word in words}
    left_out = [word for word, spelling in spellings.items() if not spelling]
    if len(left_out) == len(words):
        raise AsrError(
            f"{tokens.name}: none of the {len(words)} words ({left_out[0]!r}, ...) can be spelled in these tokens."
        )
    if left_out:
        _LOGGER.warning(
            "%s: %d of %d words cannot be spelled in these tokens and are left out (%s%s).",
            *(tokens.name, len(left_out), len(words), ", ".join(map(_shown, left_out[:5]))),
            ", ..." if len(left_out) > 5 else "",
        )
    return Lexicon({word: ways for word, ways in spellings.items() if ways}, name="spelled words"), left_out


def _shown(word: str) -> str:
    """The word, with characters that cannot be seen (U+200B, U+FEFF) as escapes."""
    return word if word.isprintable() else repr(word)[1:-1]


def compile_graph(
    tokens: CTCTokens,
    lexicon: Lexicon,
    ngram: NgramLM,
    max_ngrams: int,
    spelling: SpellingModel | None = None,
    progress: Callable[[str], None] = lambda step: None,
    folder: str | Path | None = None,
) -> WordGraph:
    """Compiles a graph, unless it is among the last graphs of this process or in the cache folder.

    Args:
        tokens: the network's tokens.
        lexicon: the words of the graph, spelled in tokens.
        ngram: their language model, of any size.
        max_ngrams: maximum number of n-grams in the graph; a larger `ngram` is pruned.
        spelling: how out-of-vocabulary words are spelled; None if they are not.
        progress: called with the name of each step.
        folder: cache folder for other processes, created if it is missing; files are named by a checksum of the
            graph's sources. None caches in memory only. If the folder cannot be written to, or has a damaged file, a
            warning says so, and the graph is compiled here.

    Raises:
        AsrError: the arguments do not match each other.
    """
    spells_with = () if spelling is None else spelling.ngram.vocabulary.ordinary
    foreign = [symbol for symbol in spells_with if symbol not in tokens.table]
    if foreign:
        raise AsrError(
            f"token_lm: {len(foreign)} of its words are not tokens of the network ({foreign[0]!r}, ...); give a model "
            "that was estimated from text that is split into these tokens."
        )
    spelled = None if spelling is None else (spelling.key, spelling.penalty)
    key = (tokens.table, tokens.word_boundary, lexicon.checksum, ngram, max_ngrams, spelled)
    with _kept_lock:
        kept = _kept_graphs.get(key)
        if kept is not None:
            _kept_graphs.move_to_end(key)
            return kept
    path = None if folder is None else Path(folder) / _checksum(tokens, lexicon, ngram, max_ngrams, spelling)
    writes_letters = spelling is not None and tokens.kind == "phones"
    compiled = None if path is None else _kept(path, tokens, lexicon, spelling is not None, writes_letters)
    if compiled is None:
        progress("n-gram")
        small = graph_ngram(ngram, list(lexicon.pronunciations), max_ngrams)
        compiled = _compiled(tokens, lexicon, small, spelling, progress)
        if writes_letters:
            progress("letters of phones")
            compiled = replace(compiled, letters=PhonesToLetters.estimate(lexicon))
        if path is not None:
            _keep(compiled, path)
    with _kept_lock:
        _kept_graphs[key] = compiled
        while len(_kept_graphs) > _MOST_GRAPHS_KEPT:
            _kept_graphs.popitem(last=False)
    return compiled


def _compiled(
    tokens: CTCTokens,
    lexicon: Lexicon,
    small: NgramLM,
    spelling: SpellingModel | None,
    progress: Callable[[str], None],
) -> WordGraph:
    table, in_graph, entries = tokens.table, small, lexicon
    if spelling is not None:
        table = TokenTable((*table.tokens[1:], SPELLING), name=table.name)
        in_graph = with_unlisted_as_unknown(small, lexicon.pronunciations)
        entries = Lexicon({**lexicon.pronunciations, "<unk>": [(SPELLING,)]}, name=lexicon.name)
    silence = _silence_of(tokens) if tokens.boundary_id is None else None
    optional = OptionalSilence(silence) if silence is not None else None
    phone_graph, _ = build_phone_graph(entries, in_graph, table, silence=optional, progress=progress)
    arrays, symbols = phone_graph.arrays, phone_graph.phones
    progress("topology")
    if spelling is not None:
        arrays, symbols = splice_spellings(arrays, symbols, spelling)
    arrays, meta = remove_epsilons(arrays), phone_graph.meta
    if tokens.word_boundary is not None and (boundary := tokens.table.tokens[tokens.boundary_id or 0]) in symbols:
        arrays = add_boundary_loops(arrays, symbols.index(boundary))
        meta = {**meta, "silence": boundary}
    topology = topology_named("ctc")
    finished = compose_topology(topology, topology.token_ids(symbols, tokens.table), arrays)
    graph = graph_from_arrays(finished, tokens.table, phone_graph.vocabulary, meta)
    return WordGraph(graph, small, lexicon, spelling is not None)


def _checksum(
    tokens: CTCTokens, lexicon: Lexicon, ngram: NgramLM, max_ngrams: int, spelling: SpellingModel | None
) -> str:
    """A checksum of all sources of a graph, for its file name."""
    digest = hashlib.sha256()
    described: list[Any] = [
        tokens.table.tokens,
        tokens.word_boundary,
        lexicon.checksum,
        ngram.order,
        max_ngrams,
    ]
    models = [ngram]
    if spelling is not None:
        models.append(spelling.ngram)
        described += [spelling.boundary, spelling.penalty, sorted(spelling.beginnings or ()), _SPELLED_VERSION]
    digest.update(json.dumps(described, ensure_ascii=False).encode())
    for model in models:
        digest.update("\n".join(model.vocabulary.words).encode())
        for tensor in model.arrays.tensors().values():
            digest.update(np.ascontiguousarray(tensor.cpu().numpy()).data)
    return digest.hexdigest()[:32]


def _kept(path: Path, tokens: CTCTokens, lexicon: Lexicon, spells: bool, writes_letters: bool) -> WordGraph | None:
    """Loads a graph from the cache folder; None if it is not there, or is damaged."""
    graph, ngram = path.with_suffix(_GRAPH_SUFFIX), path.with_suffix(_NGRAM_SUFFIX)
    letters = path.with_suffix(_LETTERS_SUFFIX) if writes_letters else None
    if not (graph.is_file() and ngram.is_file() and (letters is None or letters.is_file())):
        return None
    try:
        return WordGraph(
            DecodingGraph.load(graph, tokens.table),
            load_ngram_lm(ngram),
            lexicon,
            spells,
            None if letters is None else PhonesToLetters(load_ngram_lm(letters)),
        )
    except AsrError as error:
        _LOGGER.warning("%s The graph is compiled again.", error)
        return None


def _keep(compiled: WordGraph, path: Path) -> None:
    """Writes a graph to the cache folder, if that is possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_ngram_lm(compiled.ngram, path.with_suffix(_NGRAM_SUFFIX))
        if compiled.letters is not None:
            save_ngram_lm(compiled.letters.ngram, path.with_suffix(_LETTERS_SUFFIX))
        compiled.graph.save(path.with_suffix(_GRAPH_SUFFIX))
    except OSError as error:
        _LOGGER.warning("%s: the graph is not kept there (%s); the next process compiles it again.", path.parent, error)
    except AsrError as error:
        _LOGGER.warning("%s The graph is not kept; the next process compiles it again.", error)


def _refuse_others(lexicon: Mapping[Any, Any]) -> None:
    """Refuses what is neither a word nor its spellings."""
    for word, given in lexicon.items():
        if not isinstance(word, str):
            raise AsrError(f"lexicon: {word!r} is not a word; words are strings.")
        ways = [given] if isinstance(given, (str, tuple)) else given
        if not isinstance(ways, Collection) or any(not isinstance(way, (str, list, tuple)) for way in ways):
            raise AsrError(f"lexicon: {given!r} is not a spelling of {word!r}; give a string of tokens.")


def _refuse_lists_of_tokens(lexicon: Mapping[str, Any]) -> None:
    lists = {word: given for word, given in lexicon.items() if not isinstance(given, (str, tuple))}
    if any(not isinstance(way, str) or len(way.split()) > 1 for ways in lists.values() for way in ways):
        return
    unclear = next((word for word, ways in lists.items() if len(ways) > 1), None)
    if unclear is not None:
        ways = list(lists[unclear])
        raise AsrError(
            f"lexicon: {ways} may be one spelling of {unclear!r} or {len(ways)} of one token each; give "
            f"{' '.join(ways)!r} for one, or {[(way,) for way in ways]} for several."
        )


def _spellings(given: Any) -> list[tuple[str, ...]]:
    """Converts a mapping's value: a string or a tuple is one spelling, any other collection holds several."""
    ways = [given] if isinstance(given, (str, tuple)) else list(given)
    return [tuple(way.split()) if isinstance(way, str) else tuple(way) for way in ways]
