"""From lexicon, language model and topology to the decoding graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from asr.errors import AsrError
from asr.graph.artefact import DecodingGraph
from asr.graph.grammar_transducer import build_grammar_transducer
from asr.graph.graph_arrays import INPUT_EPSILON, GraphArrays, Words
from asr.graph.lexicon_transducer import LexiconTransducer, build_lexicon_transducer
from asr.graph.openfst import from_openfst, import_kaldifst, to_openfst
from asr.graph.phone_graph import PhoneGraph
from asr.graph.topology import topology_named
from asr.graph.transducer import Transducer
from asr.lm.ngram.ngram_lm import NgramLM
from asr.text.lexicon import Lexicon
from asr.text.tokens import TokenTable
from asr.text.vocabulary import UNK_ID

EXACT_STEP = 2.0**-14


@dataclass
class BuildReport:
    """What became of the input.

    Attributes:
        num_words: words that the graph can write.
        words_without_pronunciation: words of the language model that it cannot write, because the lexicon lacks them.
        num_lexicon_words_outside_model: words of the lexicon that the language model does not list.
        sizes: states and arcs after each step.
        seconds: time of each step.
    """

    num_words: int = 0
    words_without_pronunciation: list[str] = field(default_factory=list)
    num_lexicon_words_outside_model: int = 0
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def build_phone_graph(
    lexicon: Lexicon,
    language_model: NgramLM,
    tokens: TokenTable,
    topology: str = "ctc",
    silence: str | None = None,
    silence_probability: float = 0.5,
    score_step: float = EXACT_STEP,
    progress: Callable[[str], None] = lambda step: None,
) -> tuple[PhoneGraph, BuildReport]:
    """Composes lexicon and language model, determinises and minimises them.

    Args:
        lexicon: pronunciations.
        language_model: the small n-gram model; its vocabulary becomes the graph's.
        tokens: the acoustic model's outputs.
        topology: see `asr.graph.topology.TOPOLOGIES`; kept with the result, applied when the graph is finished.
        silence: the phone that may stand between words; None where blanks do that.
        silence_probability: how probable it is at each place.
        score_step: every score of the language model is rounded to a multiple of it, a power of two, so that all
            further arithmetic is exact. 2^-11 fits a score into 16 bits on disk and moves it by 0.00025 at most.
        progress: called with the name of each step as it begins.

    Raises:
        AsrError: lexicon and tokens, or lexicon and language model, do not fit each other.
    """
    report = BuildReport()
    clock = _Clock(report, progress)
    vocabulary = language_model.vocabulary
    with clock.step("lexicon"):
        pronunciations, phones = _pronunciations(lexicon, language_model, report, silence)
        topology_named(topology).token_ids(phones, tokens)
        number = {phone: label for label, phone in enumerate(phones, start=1)}
        lexicon_part = build_lexicon_transducer(
            {
                word_id: [[number[phone] for phone in phones] for phones in variants]
                for word_id, variants in pronunciations
            },
            len(phones),
            len(vocabulary),
            number[silence] if silence is not None else None,
            silence_probability,
            score_step,
        )
    with clock.step("grammar"):
        usable = [word_id for word_id, _ in pronunciations]
        grammar = build_grammar_transducer(language_model.arrays, usable, lexicon_part.backoff_output, score_step)
        report.sizes["grammar"] = (len(grammar.final_score), len(grammar.dst_state))
    combined = _composed(lexicon_part, grammar, score_step, clock)
    report.sizes["phone graph"] = (len(combined.final_score), len(combined.dst_state))
    meta = {
        "topology": topology,
        "language_model_order": language_model.order,
        "language_model_ngrams": len(language_model.arrays.label),
        "num_words": report.num_words,
        "score_step": score_step,
        "silence": silence,
        "silence_probability": silence_probability if silence is not None else None,
    }
    return PhoneGraph(_phone_arrays(combined, len(phones)), tuple(phones), tokens, vocabulary, meta), report


def build_graph(
    lexicon: Lexicon, language_model: NgramLM, tokens: TokenTable, topology: str = "ctc", **options: Any
) -> DecodingGraph:
    """The finished graph; `options` as in `build_phone_graph`."""
    return build_phone_graph(lexicon, language_model, tokens, topology, **options)[0].finish()


def _pronunciations(
    lexicon: Lexicon, language_model: NgramLM, report: BuildReport, silence: str | None
) -> tuple[list[tuple[int, list[tuple[str, ...]]]], list[str]]:
    """The words that model and lexicon share, and the phones, sorted."""
    vocabulary, arrays = language_model.vocabulary, language_model.arrays
    # State 0 stands first, and its arc w is the unigram of word w.
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
            "check that both write words alike (upper or lower case)."
        )
    report.num_words = len(pronunciations)
    report.num_lexicon_words_outside_model = len(lexicon) - len(pronunciations)
    phones = {phone for _, variants in pronunciations for phones in variants for phone in phones}
    return pronunciations, sorted(phones | ({silence} if silence is not None else set()))


def _composed(lexicon_part: LexiconTransducer, grammar: Transducer, score_step: float, clock: _Clock) -> Transducer:
    kaldifst = import_kaldifst()
    with clock.step("composition"):
        fst = kaldifst.compose(to_openfst(lexicon_part.transducer), to_openfst(grammar))
        if fst.num_states == 0:
            raise AsrError("The decoding graph is empty: no sentence of the language model can be pronounced.")
    with clock.step("determinisation"):
        if kaldifst.determinize_star(fst):
            raise AsrError("The decoding graph cannot be determinised; check the lexicon for very long pronunciations.")
    with clock.step("minimisation"):
        # The scores are multiples of the step already: rounding to it changes nothing and equal states merge.
        kaldifst.minimize_encoded(fst, delta=score_step)
        kaldifst.connect(fst)
    return from_openfst(fst)


def _phone_arrays(transducer: Transducer, num_phones: int) -> GraphArrays:
    """Labels from 1 to those from 0, backoff and disambiguation symbols to epsilons, the start to state 0."""
    label = transducer.input_label - 1
    label[label >= num_phones] = INPUT_EPSILON
    num_states = len(transducer.final_score)
    words = Words.single(transducer.output_label)
    arrays = GraphArrays(
        transducer.arc_begin,
        transducer.dst_state,
        label,
        transducer.score,
        words.begin,
        words.word_id,
        transducer.final_score,
    )
    states = np.arange(num_states)
    return arrays if transducer.start == 0 else arrays.take_states(np.roll(states, -transducer.start))


class _Clock:
    """Times the steps and announces them."""

    def __init__(self, report: BuildReport, progress: Callable[[str], None]) -> None:
        self._report = report
        self._progress = progress

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        self._progress(name)
        begin = time.perf_counter()
        yield
        self._report.seconds[name] = round(time.perf_counter() - begin, 2)
