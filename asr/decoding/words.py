"""The words of a hypothesis: when they were said, and how far they can be trusted.

Determinization moves a word's label after the phones that it shares with other words, so the graph outputs words some
phones late. The lexicon says which phones belong to which word, because the path's phones are the concatenated
pronunciations of its words (`WordAligner`). Times remain inexact within phones: CTC spikes lie inside a phone, not at
its edges.

The posterior probability of a word in the lattice ranks words well, but is not the probability that the word is right:
acoustic scores of neighboring frames are not independent, and pruned paths are missing. A calibration maps posteriors
at several scales (`asr.decoding.mbr.PathPosteriors`) to a probability. It is a logistic function of a sum of
piecewise-linear functions (after Yu, Li and Deng, 2011), fitted by `fit_calibration`.

A search must explain every frame, also those of noise. A network trained on speech finds no silence in noise, so the
best path stays in a few tokens for seconds, with words around them. In speech, a token lasts 50 ms on average. In less
than a second of noise, tokens cannot last long, but then there are only a few words with low confidences. `spoken`
finds both.

Shapes: P phones, W words of a lattice, K words of a hypothesis, S scales, E features, B knots.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asr.decoding.interface import DecodeResult, Hypothesis
from asr.decoding.mbr import PathPosteriors
from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError
from asr.graph.context import BIPHONE_TOPOLOGY, TIED_STATES, TiedStates
from asr.graph.decoding_graph import DecodingGraph
from asr.text.lexicon import Lexicon, has_stress, word_ends
from asr.text.symbols import EOS_ID, UNK_ID

_LOGGER = logging.getLogger(__name__)

_TOPOLOGY = "ctc"


def can_align(graph: DecodingGraph) -> bool:
    """Whether the runs of tokens along a path of the graph are its phones."""
    return graph.meta.get("topology", _TOPOLOGY) in (_TOPOLOGY, BIPHONE_TOPOLOGY)


def lexicon_of_graph(lexicon: Lexicon | Sequence[str | Path], graph: DecodingGraph) -> Lexicon:
    """The lexicon from which a graph's words get their times: one that is given, or read from files.

    Raises:
        AsrError: a file cannot be read, or as for `WordAligner` and `WordAligner.check_words`.
    """
    if not isinstance(lexicon, Lexicon):
        lexicon = Lexicon.for_words(lexicon, graph.vocabulary.words, has_stress(graph.tokens.tokens))
    WordAligner(lexicon, graph).check_words(graph.vocabulary.ordinary)
    return lexicon


class WordAligner:
    """Gives the words of hypotheses the times of their phones. `<unk>` may have any phones if the lexicon has none.

    Args:
        lexicon: the lexicon that the graph was built from, or a larger one.
        graph: the decoding graph; its topology must be `ctc`, where each phone is a run of equal tokens, or
            `chain-biphone`, whose tied states determine the phones.

    Raises:
        AsrError: the graph has another topology.
    """

    def __init__(self, lexicon: Lexicon, graph: DecodingGraph) -> None:
        if not can_align(graph):
            topology = graph.meta["topology"]
            raise AsrError(f"word times from the lexicon need a graph of the topology {_TOPOLOGY}, not {topology}.")
        is_biphone = graph.meta.get("topology", _TOPOLOGY) == BIPHONE_TOPOLOGY
        self._states = TiedStates.from_json(graph.meta[TIED_STATES]) if is_biphone else None
        names = graph.tokens.tokens if self._states is None else self._states.phones
        token_id = {token: position for position, token in enumerate(names)}
        silence = graph.meta.get("silence")
        self._silence = token_id.get(silence) if silence is not None else None
        self._variants: dict[str, list[tuple[int, ...]]] = {}
        self._lexicon = lexicon
        self._token_id = token_id

    def check_words(self, words: Sequence[str]) -> None:
        """Checks that the lexicon has pronunciations of a graph's words in its phones; warns of words that it lacks.

        Raises:
            AsrError: it has none of them.
        """
        name = self._lexicon.name
        lacking = [word for word in words if not self._variants_of(word)]
        if len(lacking) == len(words):
            raise AsrError(
                f"{name}: the lexicon has none of the graph's {len(words)} words ({words[0]!r}, ...) in the phones of "
                "its acoustic model; give the one that the graph was built from."
            )
        if lacking:
            _LOGGER.warning(
                "%s: the lexicon lacks %d of the graph's %d words (%r, ...) in the phones of its acoustic model; "
                "sentences with them get less exact word times.",
                name, len(lacking), len(words), lacking[0],
            )  # fmt: skip

    def aligned(self, hypothesis: Hypothesis) -> Hypothesis:
        """The hypothesis with the times of its words' phones.

        It is unchanged if the phones do not match the lexicon, or if a word has none.
        """
        runs = hypothesis.phones if self._states is None else self._states.phones_of_runs(hypothesis.phones)
        phones = [run for run in runs if run[0] != self._silence]
        variants: list[list[tuple[int, ...]] | int] = []
        for word_id, word, start_frame in zip(
            hypothesis.word_ids, hypothesis.words, hypothesis.start_frames, strict=True
        ):
            ways = self._variants_of(word)
            is_open = word_id == UNK_ID and not ways
            # The graph outputs <unk> where its first phone is read.
            variants.append(sum(end <= start_frame for _, _, end in phones) if is_open else ways)
        ends = word_ends([token for token, _, _ in phones], variants)
        if ends is None:
            return hypothesis
        begins = [0, *ends[:-1]]
        return replace(
            hypothesis,
            start_frames=tuple(phones[begin][1] for begin in begins[: len(ends)]),
            end_frames=tuple(phones[end - 1][2] for end in ends),
        )

    def _variants_of(self, word: str) -> list[tuple[int, ...]]:
        if word not in self._variants:
            known = self._token_id
            spelled = self._lexicon.pronunciations.get(word, [])
            variants = [
                tuple(known[phone] for phone in phones if known[phone] != self._silence)
                for phones in spelled
                if all(phone in known for phone in phones)
            ]
            # A word of silence alone, such as Kaldi's `!SIL`, has no phones to take its times from.
            self._variants[word] = [variant for variant in variants if variant]
        return self._variants[word]


Floats = NDArray[np.float64]

SCALES = (1.0, 0.3)
"""Scales of the total score at which posteriors are computed."""

_LEAST = 1e-4

FEATURES = ("word_posterior", "flat_word_posterior", "mean_word_posterior")
"""Features of a calibration: log odds of a word's posterior at both scales, and of the mean over its utterance."""

# Features of earlier calibrations, of words at about the same time.
_OLD_FEATURES = ("posterior", "flat_posterior", "utterance_posterior")


def confidence_features(posteriors: Floats) -> Floats:
    """Posteriors (K, S) of an utterance's words -> (K, E)."""
    mean = np.full(len(posteriors), posteriors[:, 0].mean() if len(posteriors) else 0.0)
    return _log_odds(np.stack([posteriors[:, 0], posteriors[:, 1], mean], axis=1))


def _log_odds(probability: Floats) -> Floats:
    bounded = probability.clip(_LEAST, 1.0 - _LEAST)
    odds: Floats = np.log(bounded / (1.0 - bounded))
    return odds


@dataclass(frozen=True, eq=False)
class Calibration:
    """Maps features to the probability that a word is right.

    The log odds are `bias` plus a piecewise-linear function of each feature, which is constant beyond its knots.

    Args:
        bias: log odds.
        knots: feature -> (B,) ascending.
        values: feature -> (B,) log odds at the knots.
    """

    bias: float
    knots: Mapping[str, Sequence[float]]
    values: Mapping[str, Sequence[float]]

    def probabilities(self, features: Floats) -> Floats:
        """Features (K, E) -> (K,)."""
        odds = np.full(len(features), self.bias)
        for column, name in enumerate(FEATURES):
            if name in self.knots:
                odds += np.interp(features[:, column], self.knots[name], self.values[name])
        return np.asarray(1.0 / (1.0 + np.exp(-odds)))

    def as_dict(self) -> dict[str, Any]:
        """The calibration as JSON values."""
        terms = {
            name: {"knots": list(self.knots[name]), "values": [round(value, 4) for value in self.values[name]]}
            for name in self.knots
        }
        return {"bias": round(self.bias, 4), "terms": terms}

    @staticmethod
    def is_outdated(record: Any) -> bool:
        """Whether `as_dict` of an earlier version wrote JSON values, with other features."""
        terms = record.get("terms") if isinstance(record, dict) else None
        return isinstance(terms, dict) and bool(terms) and set(terms) <= set(_OLD_FEATURES)

    @classmethod
    def from_dict(cls, record: Any, where: str) -> Calibration:
        """Reads the output of `as_dict`.

        Args:
            record: JSON values.
            where: their source, for error messages.

        Raises:
            AsrError: the values are not a calibration.
        """
        try:
            terms = {str(name): (list(term["knots"]), list(term["values"])) for name, term in record["terms"].items()}
            numbers = [record["bias"], *(number for term in terms.values() for part in term for number in part)]
            is_valid = all(isinstance(number, (int, float)) and np.isfinite(number) for number in numbers)
            is_valid &= all(
                len(knots) == len(values) > 0 and knots == sorted(knots) for knots, values in terms.values()
            )
        except (TypeError, KeyError, AttributeError):
            is_valid = False
        if not is_valid or not set(terms) <= set(FEATURES):
            raise AsrError(
                f"{where}: this is not a calibration of confidences: a bias, and for some of {', '.join(FEATURES)} as "
                "many knots, ascending, as values; fit it with 'asr calibrate'."
            )
        knots, values = ({name: term[part] for name, term in terms.items()} for part in (0, 1))
        return cls(float(record["bias"]), knots, values)


def with_final_words(
    decoded: DecodeResult,
    graph: DecodingGraph,
    options: DecodingOptions,
    calibration: Calibration | None,
    scale: float | None = None,
) -> DecodeResult:
    """The result with the path of least expected errors as its best, if `mbr_scale` is set, and with confidences.

    Args:
        decoded: of an utterance; without a lattice its path stays.
        graph: the graph that was searched.
        options: scales.
        calibration: for lattices of this mode.
        scale: without a calibration, the confidences are posteriors by the total scores times this scale; None gives no
            confidences then.
    """
    best = decoded.best
    if best is None:
        return decoded
    lattice, original = decoded.lattice, decoded.original_frame
    posteriors = None if lattice is None else PathPosteriors(lattice, options, original)
    if posteriors is not None and options.mbr_scale is not None:
        best = posteriors.path_of_least_risk(graph, options.mbr_scale, best)
    if calibration is not None:
        best = calibrated(best, posteriors, calibration)
    elif posteriors is not None and scale is not None:
        best = with_posteriors(best, posteriors, scale)
    return replace(decoded, hypotheses=(best, *decoded.hypotheses[1:]))


def calibrated(hypothesis: Hypothesis, posteriors: PathPosteriors | None, calibration: Calibration) -> Hypothesis:
    """The hypothesis with calibrated confidences.

    Args:
        hypothesis: of the utterance.
        posteriors: of its lattice; None if no path was complete, which gives all words a posterior of 0.
        calibration: for lattices of this mode.
    """
    by_scale = np.zeros((len(hypothesis.words), len(SCALES)))
    if posteriors is not None:
        by_scale = np.stack([posteriors.of_hypothesis(scale, hypothesis) for scale in SCALES], axis=1)
    probabilities = calibration.probabilities(confidence_features(by_scale))
    return replace(hypothesis, confidences=tuple(map(float, probabilities)))


def with_posteriors(hypothesis: Hypothesis, posteriors: PathPosteriors, scale: float) -> Hypothesis:
    """The hypothesis with confidences that are not calibrated: the posterior of each word, at a scale."""
    return replace(hypothesis, confidences=tuple(posteriors.of_hypothesis(scale, hypothesis).tolist()))


# Quantiles of the features at which knots are placed.
_SHARES = (0.02, 0.1, 0.25, 0.5, 0.75, 0.98)
_PENALTY = 1.0
_MAX_STEPS = 100


def fit_calibration(features: Floats, is_right: NDArray[np.bool_], penalty: float = _PENALTY) -> Calibration:
    """Fits a calibration by penalized maximum likelihood (Newton steps).

    Args:
        features: (W, E), of words of many utterances.
        is_right: (W,) bool.
        penalty: weight of the squared differences between neighboring values, in words.

    Raises:
        AsrError: there are fewer than 100 words, or all are right, or all wrong.
    """
    num_right = int(is_right.sum())
    if len(is_right) < 100 or num_right in (0, len(is_right)):
        raise AsrError(
            f"calibration: {num_right} of {len(is_right)} recognized words are right; at least 100 words are needed, "
            "right ones and wrong ones."
        )
    knots = {name: _knots(features[:, column]) for column, name in enumerate(FEATURES)}
    # Columns are hat functions of all features. Their sums are constants, like the bias; the penalty makes them unique.
    hats = [np.ones((len(features), 1))]
    rough = [np.zeros((1, 1))]
    for column, name in enumerate(FEATURES):
        hats.append(np.stack([np.interp(features[:, column], knots[name], row) for row in np.eye(len(knots[name]))], 1))
        steps = np.diff(np.eye(len(knots[name])), axis=0)
        rough.append(penalty * steps.T @ steps + 1e-2 * np.eye(len(knots[name])))
    design = np.concatenate(hats, axis=1)
    prior = np.zeros((design.shape[1], design.shape[1]))
    begin = 0
    for block in rough:
        prior[begin : begin + len(block), begin : begin + len(block)] = block
        begin += len(block)
    weight = np.zeros(design.shape[1])
    for _ in range(_MAX_STEPS):
        expected = 1.0 / (1.0 + np.exp(-design @ weight))
        gradient = design.T @ (expected - is_right) + prior @ weight
        curvature = (design * (expected * (1.0 - expected))[:, None]).T @ design + prior
        step = np.linalg.solve(curvature + 1e-9 * np.eye(len(weight)), gradient)
        weight -= step
        if np.abs(step).max() < 1e-8:
            break
    values, begin = {}, 1
    for name in FEATURES:
        values[name] = [float(value) for value in weight[begin : begin + len(knots[name])]]
        begin += len(knots[name])
    return Calibration(float(weight[0]), knots, values)


def _knots(feature: Floats) -> list[float]:
    """The distinct quantiles of a feature at `_SHARES`, ascending."""
    return sorted({round(float(value), 3) for value in np.quantile(feature, _SHARES)})


# Words are judged together if the silence between them is shorter.
_GAP_SECONDS = 0.3

# At most this many words with a mean confidence below this are all rejected.
_FEW_WORDS, _IMPROBABLE = 3, 0.25


def spoken(hypothesis: Hypothesis, frame_seconds: float, max_token_seconds: float | None) -> list[bool]:
    """Which words of a hypothesis are speech rather than noise.

    Args:
        hypothesis: with calibrated confidences if available, and with exact word times if known.
        frame_seconds: time between two frames, in seconds.
        max_token_seconds: words count as noise if the tokens of all words between two silences last longer than this on
            average; None accepts all words.
    """
    num_words = len(hypothesis.words)
    is_spoken = [True] * num_words
    if max_token_seconds is None:
        return is_spoken
    if hypothesis.confidences and num_words <= _FEW_WORDS and sum(hypothesis.confidences) < _IMPROBABLE * num_words:
        return [False] * num_words
    starts, ends, first = hypothesis.start_frames, hypothesis.end_frames, 0
    for last in range(num_words):
        if last + 1 < num_words and (starts[last + 1] - ends[last]) * frame_seconds < _GAP_SECONDS:
            continue
        lengths = _lengths(hypothesis.phones, starts[first], ends[last])
        if lengths and sum(lengths) * frame_seconds > max_token_seconds * len(lengths):
            is_spoken[first : last + 1] = [False] * (last + 1 - first)
        first = last + 1
    return is_spoken


def _lengths(runs: Sequence[tuple[int, int, int]], begin: int, end: int) -> list[int]:
    """The number of frames of each run of tokens within a span."""
    return [min(last, end) - max(first, begin) for _, first, last in runs if first < end and last > begin]


def without_sentence_ends(decoded: DecodeResult, options: DecodingOptions) -> DecodeResult:
    """The result without the words `</s>` of a graph of several sentences (`DecodingGraph.with_sentence_ends`)."""
    hypotheses = tuple(map(_without_sentence_ends, decoded.hypotheses))
    lattice = None if decoded.lattice is None else decoded.lattice.without_sentence_ends(options)
    return replace(decoded, hypotheses=hypotheses, lattice=lattice)


def _without_sentence_ends(hypothesis: Hypothesis) -> Hypothesis:
    if EOS_ID not in hypothesis.word_ids:
        return hypothesis
    places = [place for place, word in enumerate(hypothesis.word_ids) if word == EOS_ID]
    ends = tuple(place - number for number, place in enumerate(places))
    return replace(only_words(hypothesis, [word != EOS_ID for word in hypothesis.word_ids]), sentence_ends=ends)


def only_words(hypothesis: Hypothesis, stays: Sequence[bool]) -> Hypothesis:
    """The hypothesis with the words that stay; scores and phones remain those of the whole path."""
    if all(stays):
        return hypothesis
    kept = [position for position, stay in enumerate(stays) if stay]
    return replace(
        hypothesis,
        word_ids=tuple(hypothesis.word_ids[i] for i in kept),
        words=tuple(hypothesis.words[i] for i in kept),
        start_frames=tuple(hypothesis.start_frames[i] for i in kept),
        end_frames=tuple(hypothesis.end_frames[i] for i in kept),
        confidences=tuple(hypothesis.confidences[i] for i in kept if hypothesis.confidences),
        sentence_ends=tuple(sum(stays[:end]) for end in hypothesis.sentence_ends),
    )
