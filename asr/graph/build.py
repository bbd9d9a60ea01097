"""Builds decoding graphs: lexicon (L) and n-gram model (G) as transducers, composed, determinized and minimized.

After Mohri, Pereira and Riley (2002). The topology (H) is applied when the graph is finished or loaded.

Shapes: S states, A arcs.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from asr.errors import AsrError
from asr.graph.context import BIPHONE_TOPOLOGY, TIED_STATES, TiedStates
from asr.graph.decoding_graph import DecodingGraph, PhoneGraph
from asr.graph.fst import (
    EPSILON,
    INPUT_EPSILON,
    GraphArrays,
    Transducer,
    round_scores,
)
from asr.graph.openfst import from_openfst, import_kaldifst, to_openfst
from asr.graph.topology import topology_named
from asr.lm.ngram.model import NgramArrays, NgramLM
from asr.text.lexicon import Lexicon
from asr.text.symbols import BOS_ID, EOS_ID, UNK_ID, TokenTable


def build_grammar_transducer(
    arrays: NgramArrays,
    usable_words: Collection[int],
    backoff_label: int,
    score_step: float,
) -> Transducer:
    """Builds G: n-grams are arcs; backing off is an arc that reads `backoff_label` and outputs nothing.

    Args:
        arrays: the model.
        usable_words: ids of words with a pronunciation; n-grams that end in other words get no arc.
        backoff_label: input label of the backoff arcs.
        score_step: scores are rounded to multiples of this.
    """
    label = arrays.label.cpu().numpy()
    score = arrays.arc_score(torch.arange(len(label), device=arrays.label.device)).cpu().numpy()
    arc_begin = arrays.arc_begin.cpu().numpy()
    num_states = len(arc_begin) - 1
    src_state = np.repeat(np.arange(num_states), np.diff(arc_begin))
    dst_state = arrays.dst_state.cpu().numpy()

    usable = np.zeros(len(arrays.word_map), dtype=bool)
    usable[np.fromiter(usable_words, np.int64, len(usable_words))] = True
    possible = score > -np.inf
    final_score = np.full(num_states, -np.inf)
    ends = possible & (label == EOS_ID)
    final_score[src_state[ends]] = score[ends]

    kept = possible & usable[label] & (label != EOS_ID) & (label != BOS_ID)
    # Others would add infinite weights, with which determinization never ends.
    can_back_off = arrays.states_that_back_off().cpu().numpy()
    num_backoffs = len(can_back_off)
    backoff_state = arrays.backoff_state.cpu().numpy()[can_back_off]
    backoff_score = arrays.backoff_score.cpu().numpy()[can_back_off]
    return Transducer.from_arcs(
        start=int(dst_state[BOS_ID]),
        src_state=np.concatenate([src_state[kept], can_back_off]),
        input_label=np.concatenate([label[kept], np.full(num_backoffs, backoff_label)]),
        output_label=np.concatenate([label[kept], np.full(num_backoffs, EPSILON)]),
        score=np.concatenate([round_scores(score[kept], score_step), round_scores(backoff_score, score_step)]),
        dst_state=np.concatenate([dst_state[kept], backoff_state]),
        final_score=round_scores(final_score, score_step),
        sort_by="input",
    )


LOOP_STATE = 0


def build_lexicon_transducer(
    pronunciations: Mapping[int, Sequence[Sequence[int]]],
    num_phones: int,
    num_words: int,
    silence: int | None,
    silence_probability: float,
    score_step: float,
    pronunciation_scores: Mapping[int, Sequence[float]],
) -> Transducer:
    """Builds L, in which any word may follow any word.

    Words are output at their first phone, so that composition adds the language model's score there. The input labels
    are 0 for epsilon, 1 to P for phones, P + 1 for backoff, and higher ones for disambiguation; the output label for
    backoff is `num_words`, above all word ids.

    Args:
        pronunciations: the pronunciations of each word id; phones are numbered from 1.
        num_phones: P.
        num_words: size of the vocabulary.
        silence: the phone that may occur at the start and after each word; None for no silence.
        silence_probability: its probability at each of these places.
        score_step: scores are rounded to multiples of this.
        pronunciation_scores: word id -> the score of each of its pronunciations; words that are not listed have 0.
    """
    backoff_input = num_phones + 1
    markers = _disambiguation(pronunciations)
    silence_marker = max(markers.values(), default=0) + 1
    states: dict[tuple[int, ...], int] = {}
    arcs: list[tuple[int, int, int, float, int]] = []
    num_states = 1

    # A pronunciation ends in the loop state; with silence, it may also end in the silence state.
    endings = [(LOOP_STATE, 0.0)]
    if silence is not None:
        silence_state, marker_state, start = 1, 2, 3
        num_states = 4
        with_silence, without = math.log(silence_probability), math.log1p(-silence_probability)
        endings = [(LOOP_STATE, without), (silence_state, with_silence)]
        arcs += [(start, EPSILON, EPSILON, score, state) for state, score in endings]
        arcs.append((silence_state, silence, EPSILON, 0.0, marker_state))
        arcs.append((marker_state, backoff_input + silence_marker, EPSILON, 0.0, LOOP_STATE))
    else:
        start = LOOP_STATE

    def add_arc(src_state: int, labels: tuple[int, ...], word_id: int, first_score: float) -> None:
        """Adds arcs for `labels`, sharing the states of a suffix with other words that end the same way."""
        nonlocal num_states
        while len(labels) > 1:
            rest = labels[1:]
            known = rest in states
            if not known:
                states[rest] = num_states
                num_states += 1
            arcs.append((src_state, labels[0], word_id, first_score, states[rest]))
            if known:
                return
            src_state, labels, word_id, first_score = states[rest], rest, EPSILON, 0.0
        arcs.extend((src_state, labels[0], word_id, first_score + score, state) for state, score in endings)

    for word_id, variants in pronunciations.items():
        word_scores = pronunciation_scores.get(word_id)
        for variant_idx, phones in enumerate(variants):
            marker = markers.get((word_id, variant_idx), 0)
            labels = (*phones, backoff_input + marker) if marker else tuple(phones)
            add_arc(LOOP_STATE, labels, word_id, word_scores[variant_idx] if word_scores else 0.0)
    arcs.append((LOOP_STATE, backoff_input, num_words, 0.0, LOOP_STATE))

    src_state, input_label, output_label, score, dst_state = (np.array(column) for column in zip(*arcs, strict=True))
    final_score = np.full(num_states, -np.inf)
    final_score[LOOP_STATE] = 0.0
    score = round_scores(score, score_step)
    return Transducer.from_arcs(
        start, src_state, input_label, output_label, score, dst_state, final_score, sort_by="output"
    )


def _disambiguation(pronunciations: Mapping[int, Sequence[Sequence[int]]]) -> dict[tuple[int, int], int]:
    """(word, variant) -> disambiguation symbol, for pronunciations that are equal to or a prefix of another one."""
    all_phones = [tuple(phones) for variants in pronunciations.values() for phones in variants]
    count = Counter(all_phones)
    beginnings = {phones[:length] for phones in count for length in range(1, len(phones))}
    used: Counter[tuple[int, ...]] = Counter()
    markers: dict[tuple[int, int], int] = {}
    for word_id, variants in pronunciations.items():
        for variant_idx, variant in enumerate(variants):
            phones = tuple(variant)
            if count[phones] > 1 or phones in beginnings:
                used[phones] += 1
                markers[word_id, variant_idx] = used[phones]
    return markers


EXACT_STEP = 2.0**-14
_Timer = Callable[[str], AbstractContextManager[None]]


@dataclass
class BuildReport:
    """Statistics of a graph that was built.

    Attributes:
        num_words: number of words that the graph can output.
        words_without_pronunciation: words of the language model that are not in the lexicon, and not in the graph.
        num_lexicon_words_outside_model: number of words of the lexicon that are not in the language model.
        sizes: step -> number of states and arcs after it.
        seconds: step -> time it took.
    """

    num_words: int = 0
    words_without_pronunciation: list[str] = field(default_factory=list)
    num_lexicon_words_outside_model: int = 0
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class OptionalSilence(NamedTuple):
    """A silence phone that may occur at the start and after each word, and its probability there."""

    phone: str
    probability: float = 0.5


def build_phone_graph(
    lexicon: Lexicon,
    language_model: NgramLM,
    tokens: TokenTable,
    topology: str | TiedStates = "ctc",
    silence: OptionalSilence | None = None,
    score_step: float = EXACT_STEP,
    pronunciation_scores: Mapping[str, Sequence[float]] | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> tuple[PhoneGraph, BuildReport]:
    """Composes lexicon and language model, and determinizes and minimizes the result.

    Args:
        lexicon: pronunciations.
        language_model: the small n-gram model; its vocabulary becomes the graph's.
        tokens: the acoustic model's outputs.
        topology: a name in `asr.graph.topology.TOPOLOGIES`, or the tied states of a left-biphone acoustic model. It is
            stored with the result, and applied when the graph is finished.
        silence: optional silence between words; None if blanks represent silence.
        score_step: a power of two. Scores of the language model are rounded to multiples of it, so that all further
            arithmetic is exact. With 2^-11, a score fits into 16 bits on disk and changes by at most 0.00025.
        pronunciation_scores: word -> the score of each of its pronunciations, natural log; words that are not listed
            have 0.
        progress: called with the name of each step when it begins.

    Raises:
        AsrError: the tokens are not those of the tied states, or the lexicon has phones that are not tokens or shares
            no word with the language model.
    """
    report = BuildReport()
    timed = functools.partial(_timed, report, progress)
    vocabulary = language_model.vocabulary
    with timed("lexicon"):
        pronunciations, phones = _pronunciations(lexicon, language_model, report, silence)
        if isinstance(topology, TiedStates):
            topology.require_tokens(tokens)
            _require_phones(lexicon.name, {vocabulary.words[i]: variants for i, variants in pronunciations}, topology)
        else:
            topology_named(topology).token_ids(phones, tokens)
        word_ids = [word_id for word_id, _ in pronunciations]
        scores = pronunciation_scores or {}
        number = {phone: label for label, phone in enumerate(phones, start=1)}
        lexicon_part = build_lexicon_transducer(
            {
                word_id: [[number[phone] for phone in phones] for phones in variants]
                for word_id, variants in pronunciations
            },
            len(phones),
            len(vocabulary),
            number[silence.phone] if silence is not None else None,
            silence.probability if silence is not None else 0.5,
            score_step,
            {word_id: scores[word] for word_id in word_ids if (word := vocabulary.words[word_id]) in scores},
        )
    with timed("grammar"):
        grammar = build_grammar_transducer(language_model.arrays, word_ids, len(vocabulary), score_step)
        report.sizes["grammar"] = (len(grammar.final_score), len(grammar.dst_state))
    combined = _composed(lexicon_part, grammar, score_step, timed)
    report.sizes["phone graph"] = (len(combined.final_score), len(combined.dst_state))
    meta: dict[str, Any] = {
        "topology": BIPHONE_TOPOLOGY if isinstance(topology, TiedStates) else topology,
        "language_model_order": language_model.order,
        "language_model_ngrams": len(language_model.arrays.label),
        "num_words": report.num_words,
        "score_step": score_step,
        "silence": silence.phone if silence is not None else None,
        "silence_probability": silence.probability if silence is not None else None,
    }
    if isinstance(topology, TiedStates):
        meta[TIED_STATES] = topology.to_json()
    label = combined.input_label - 1
    label[label >= len(phones)] = INPUT_EPSILON  # symbols for backoff and disambiguation
    arrays = GraphArrays.from_transducer(combined, label)
    return PhoneGraph(arrays, tuple(phones), tokens, vocabulary, meta), report


def build_graph(
    lexicon: Lexicon, language_model: NgramLM, tokens: TokenTable, topology: str | TiedStates = "ctc", **options: Any
) -> DecodingGraph:
    """Builds a graph and finishes it; `options` are those of `build_phone_graph`."""
    return build_phone_graph(lexicon, language_model, tokens, topology, **options)[0].finish()


def _pronunciations(
    lexicon: Lexicon, language_model: NgramLM, report: BuildReport, silence: OptionalSilence | None
) -> tuple[list[tuple[int, list[tuple[str, ...]]]], list[str]]:
    """The words in both language model and lexicon, with their pronunciations, and all phones, sorted."""
    vocabulary, arrays = language_model.vocabulary, language_model.arrays
    # The arcs of state 0 come first, and its arc w is the unigram of word w.
    unigram = torch.arange(len(vocabulary), device=arrays.label.device)
    listed = arrays.arc_score(unigram).cpu().numpy() > -np.inf
    pronunciations = []
    for word_id, word in enumerate(vocabulary.words):
        if not listed[word_id] or word_id < UNK_ID:
            continue
        if word in lexicon:
            pronunciations.append((word_id, lexicon[word]))
        elif word_id != UNK_ID:
            report.words_without_pronunciation.append(word)
    if not pronunciations:
        raise AsrError(
            f"{lexicon.name}: none of its words is in the language model {language_model.name}; "
            "check that both have words in the same case."
        )
    report.num_words = len(pronunciations)
    report.num_lexicon_words_outside_model = len(lexicon) - len(pronunciations)
    phones = {phone for _, variants in pronunciations for phones in variants for phone in phones}
    return pronunciations, sorted(phones | ({silence.phone} if silence is not None else set()))


def _require_phones(name: str, pronunciations: Mapping[str, Sequence[Sequence[str]]], states: TiedStates) -> None:
    """Checks, before the long part begins, that the tied states have all phones of the words' pronunciations."""
    known = frozenset(states.phones)
    for word, variants in pronunciations.items():
        missing = next((phone for phones in variants for phone in phones if phone not in known), None)
        if missing is not None:
            raise AsrError(
                f"{name}: the word {word!r} has the phone {missing!r}, which the acoustic model lacks; spell it with "
                f"the model's phones, {', '.join(states.phones[1:])}."
            )


def _composed(lexicon_part: Transducer, grammar: Transducer, score_step: float, timed: _Timer) -> Transducer:
    kaldifst = import_kaldifst()
    with timed("composition"):
        fst = kaldifst.compose(to_openfst(lexicon_part), to_openfst(grammar))
        if fst.num_states == 0:
            raise AsrError("the decoding graph is empty: no sentence of the language model can be pronounced.")
    with timed("determinization"):
        if kaldifst.determinize_star(fst):
            raise AsrError("the decoding graph cannot be determinized; check the lexicon for very long pronunciations.")
    with timed("minimization"):
        # The scores are multiples of the step already, so rounding to it changes nothing.
        kaldifst.minimize_encoded(fst, delta=score_step)
        kaldifst.connect(fst)
    return from_openfst(fst)


@contextmanager
def _timed(report: BuildReport, progress: Callable[[str], None], name: str) -> Iterator[None]:
    """Reports a step and measures its time."""
    progress(name)
    begin = time.perf_counter()
    yield
    report.seconds[name] = round(time.perf_counter() - begin, 2)
