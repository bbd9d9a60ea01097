"""From aligned phones to what lattice-free MMI trains on: tied states, the denominator graph, and pronunciations.

The denominator is a phone n-gram model without backing off, as a hidden Markov model. As in Povey et al. (2016), all
histories of two phones are states, and so are those histories of three phones that tell most about the next phone. A
state lists only the phones that followed it in training, which keeps the graph small. The probabilities of
pronunciations are those with which alignments chose them (after Chen et al. 2015).

Shapes: T output frames, F features, D dimensions of the frames that the trees are grown on, P phones, S states, A arcs.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from asr.bundle import FILE_NAME as BUNDLE_FILE
from asr.bundle import Bundle
from asr.errors import AsrError
from asr.graph.context import ENTRY, LOOP, TIED_STATES, TiedStates
from asr.graph.denominator_graph import DenominatorGraph
from asr.models.chain_corpus import FRAME_SECONDS, SILENCE, Alignment, PreparedCorpus
from asr.models.interface import UtteranceCmvn
from asr.models.state_tying import ContextStatistics, grow_trees
from asr.serialization import atomic_folder
from asr.text.lexicon import Lexicon, word_ends

_CEPSTRA = 13
_FACTOR = 3  # frames of features per output frame
STATES_FILE = "states.json"
DENOMINATOR_FILE = "denominator.npz"

History = tuple[int, ...]
_BOUNDARY = 0  # silence precedes every utterance
_STEPS = 100
_RESTART = 1e-3
_STAY = 0.5
_PRIOR_COUNT = 2.0


def require_corpora(names: Iterable[str], corpora: Collection[str], where: str) -> None:
    """Checks names of corpora; `where` they are given begins the message.

    Raises:
        AsrError: one is not among the corpora.
    """
    for name in names:
        if name not in corpora:
            raise AsrError(f"{where}: there is no corpus {name!r}; there are {', '.join(sorted(corpora))}.")


def require_names(corpus: PreparedCorpus, min_score: dict[str, float], held_out: Sequence[str]) -> None:
    """Checks names of corpora and speakers.

    Raises:
        AsrError: a corpus of `min_score` or a held-out speaker is not in the prepared corpus.
    """
    require_corpora(min_score, corpus.corpora, f"{corpus.folder}: min_score")
    speakers = {utterance.speaker for utterance in corpus.utterances}
    for speaker in held_out:
        if speaker not in speakers:
            raise AsrError(f"{corpus.folder}: there is no speaker {speaker!r} to hold out.")


def usable_utterances(
    corpus: PreparedCorpus, alignment: Alignment, min_score: dict[str, float], held_out: Sequence[str] = ()
) -> tuple[list[int], list[int]]:
    """The utterances to train on, and those of held-out speakers.

    Args:
        corpus: the prepared corpus.
        alignment: of its utterances; those without one are in neither list.
        min_score: corpus -> the lowest mean score per frame of a training utterance, since readers may deviate from
            the text.
        held_out: speakers, as the corpus names them.

    Raises:
        AsrError: the alignment is of other utterances; or as `require_names`.
    """
    require_names(corpus, min_score, held_out)
    if len(alignment.score) != len(corpus):
        raise AsrError(
            f"{corpus.folder}: the alignment is of {len(alignment.score)} utterances, but there are {len(corpus)}; "
            "make it again."
        )
    train: list[int] = []
    aside: list[int] = []
    for index, utterance in enumerate(corpus.utterances):
        if not len(alignment.of(index)[0]):
            continue
        if utterance.speaker in held_out:
            aside.append(index)
        elif alignment.score[index] >= min_score.get(utterance.corpus, -math.inf):
            train.append(index)
    return train, aside


def context_statistics(corpus: PreparedCorpus, alignment: Alignment, utterances: Sequence[int]) -> ContextStatistics:
    """Statistics of the cepstra of three neighboring output frames, by HMM state, phone before and phone."""
    statistics = ContextStatistics.empty(len(alignment.phones), 3 * _CEPSTRA)
    cosines = _cosines(corpus.num_features)
    cmvn = UtteranceCmvn()
    for utterance in utterances:
        features = torch.from_numpy(corpus.features(utterance, 0).astype(np.float32))
        normal = cmvn(features[None], torch.tensor([len(features)]))[0].numpy()
        num_outputs = len(normal) // _FACTOR
        cepstra = normal[: num_outputs * _FACTOR].reshape(num_outputs, _FACTOR, -1).mean(1) @ cosines
        padded = np.pad(cepstra, ((1, 1), (0, 0)), mode="edge")
        frames = np.concatenate((padded[:-2], padded[1:-1], padded[2:]), axis=1)
        phone, start = alignment.of(utterance)
        first = np.round(start / (_FACTOR * FRAME_SECONDS)).astype(np.int64).clip(0, max(0, num_outputs - 1))
        length = np.diff(first, append=num_outputs)
        position = np.repeat(np.arange(len(phone)), length)
        state = np.full(num_outputs - first[0], LOOP)
        state[first - first[0]] = ENTRY
        before = np.concatenate(([0], phone[:-1]))
        statistics.add(state, before[position], phone[position], frames[first[0] :])
    return statistics


def _cosines(num_features: int) -> npt.NDArray[np.float32]:
    """The discrete cosine transform from log energies to cepstra, (F, 13)."""
    angle = math.pi / num_features * (np.arange(num_features) + 0.5)[:, None] * np.arange(_CEPSTRA)
    return (np.cos(angle) * math.sqrt(2.0 / num_features)).astype(np.float32)


def phone_histories(sequences: Iterable[Sequence[int]], num_long: int) -> dict[History, Counter[int]]:
    """The states of the phone model: histories, which end in the phone being spoken, and counts of the next phones.

    Args:
        sequences: phones of the training utterances.
        num_long: number of histories of three phones to keep.
    """
    padded: list[History] = [(_BOUNDARY, _BOUNDARY, *sequence) for sequence in sequences]
    short: dict[History, Counter[int]] = defaultdict(Counter)
    long: dict[History, Counter[int]] = defaultdict(Counter)
    for sequence in padded:
        for end in range(2, len(sequence)):
            short[sequence[end - 2 : end]][sequence[end]] += 1
            if end >= 3:
                long[sequence[end - 3 : end]][sequence[end]] += 1
    gains = {history: _gain(counts, short[history[1:]]) for history, counts in long.items()}
    kept = set(sorted(gains, key=lambda history: (-gains[history], history))[:num_long])
    counts: dict[History, Counter[int]] = defaultdict(Counter)
    for sequence in padded:
        history: History = sequence[:2]
        for phone in sequence[2:]:
            counts[history][phone] += 1
            history = _next_history(history, phone, kept)
        counts[history][-1] += 0  # the last history is a state even if nothing ever follows it
        del counts[history][-1]
    return dict(counts)


def denominator_graph(histories: dict[History, Counter[int]], states: TiedStates) -> DenominatorGraph:
    """The phone model with two HMM states for each phone, of which the first takes exactly one frame.

    A state of the result is a history whose last phone has begun: an arc to itself reads the phone's loop column, an
    arc to the next history the next phone's entry column.

    Args:
        histories: of `phone_histories`.
        states: the columns.
    """
    number = {history: index for index, history in enumerate(sorted(histories))}
    kept: set[History] = {history for history in histories if len(history) == 3}
    arcs: list[tuple[int, int, float]] = []
    for history, index in number.items():
        total = sum(histories[history].values())
        for following, count in histories[history].items():
            arcs.append((number[_next_history(history, following, kept)], index, (1.0 - _STAY) * count / total))
    target, source, probability = (np.array(values) for values in zip(*sorted(arcs), strict=True))
    start = np.zeros(len(number))
    start[number[(_BOUNDARY, _BOUNDARY)]] = 1.0
    occupancy, mean = start, np.zeros(len(number))
    for _ in range(_STEPS):
        arriving = np.bincount(target, weights=occupancy[source] * probability, minlength=len(number))
        occupancy = _STAY * occupancy + arriving
        occupancy = occupancy / occupancy.sum() * (1 - _RESTART) + _RESTART * start
        mean += occupancy / _STEPS
    before, phone = np.array([history[-2:] for history in number]).T
    return DenominatorGraph(
        entry=states.entry[before, phone],
        loop=states.loop[before, phone],
        stay=np.full(len(number), _STAY, dtype=np.float32),
        begin=np.searchsorted(target, np.arange(len(number) + 1)).astype(np.int64),
        source=source.astype(np.int64),
        probability=probability.astype(np.float32),
        initial=(mean / mean.sum()).astype(np.float32),
    )


def _next_history(history: History, phone: int, kept: set[History]) -> History:
    longer = (*history[-2:], phone)
    return longer if longer in kept else longer[1:]


def _gain(counts: Counter[int], shorter: Counter[int]) -> float:
    """What a longer history adds to the log likelihood of the training phones."""
    total, shorter_total = sum(counts.values()), sum(shorter.values())
    return float(
        sum(count * (np.log(count / total) - np.log(shorter[phone] / shorter_total)) for phone, count in counts.items())
    )


def prepare_chain(
    corpus: PreparedCorpus,
    alignment: Alignment,
    utterances: Sequence[int],
    max_columns: int,
    num_long_histories: int,
    output: Path,
) -> tuple[TiedStates, DenominatorGraph]:
    """Grows the decision trees, estimates the phone model and writes both.

    Args:
        corpus: the prepared corpus.
        alignment: of its utterances.
        utterances: to train on.
        max_columns: the maximum number of outputs of the network.
        num_long_histories: number of histories of three phones in the phone model.
        output: folder for the files, which replace those of an earlier run together.

    Raises:
        AsrError: there are no utterances, fewer columns than the phones need, or the folder cannot be written.
    """
    if not utterances:
        raise AsrError(
            f"{corpus.folder}: no utterance is left to train on: each one is too short for its words, of a held-out "
            "speaker, or below the lowest score of its corpus."
        )
    statistics = context_statistics(corpus, alignment, utterances)
    states = grow_trees(alignment.phones, statistics, max_columns)
    histories = phone_histories([alignment.of(index)[0].tolist() for index in utterances], num_long_histories)
    graph = denominator_graph(histories, states)
    with atomic_folder(output) as partial:  # the states of one run and the denominator of another would not fit
        (partial / STATES_FILE).write_text(json.dumps(states.to_json()), encoding="utf-8")
        np.savez(partial / DENOMINATOR_FILE, **graph._asdict())
    return states, graph


def load_chain(folder: Path) -> tuple[TiedStates, DenominatorGraph]:
    """Reads what `prepare_chain` wrote, or takes tied states and denominator from a bundle.

    With those of a bundle, the trained network fits the bundle's decoding graph.

    Args:
        folder: of `prepare_chain`, or of a bundle.

    Raises:
        AsrError: a file is missing or damaged, or the bundle has no tied states or no denominator.
    """
    if (folder / BUNDLE_FILE).is_file():
        bundle = Bundle.load(folder)
        saved = bundle.graph.meta.get(TIED_STATES)
        if saved is None or bundle.denominator is None:
            raise AsrError(
                f"{folder}: the bundle has no tied states or no denominator graph; use one of LF-MMI training."
            )
        return TiedStates.from_json(saved), bundle.denominator
    for name in (STATES_FILE, DENOMINATOR_FILE):
        if not (folder / name).is_file():
            raise AsrError(f"{folder / name}: there is no such file; prepare the training first.")
    return TiedStates.from_file(folder / STATES_FILE), DenominatorGraph.load(folder / DENOMINATOR_FILE)


def pronunciation_scores(
    corpus: PreparedCorpus, alignment: Alignment, utterances: Sequence[int], lexicon: Lexicon
) -> dict[str, list[float]]:
    """The log probability of each pronunciation, relative to the word's most probable one.

    The probabilities of rare words are smoothed by the shares of first, second, ... pronunciations over all words.

    Args:
        corpus: the prepared corpus.
        alignment: with the best pronunciation of each word.
        utterances: the utterances to count.
        lexicon: all pronunciations, the preferred one first.

    Returns:
        word -> scores (at most 0), in the lexicon's order; words with one pronunciation are left out.
    """
    number = {phone: index for index, phone in enumerate(alignment.phones)}
    silence = number[SILENCE]
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    by_rank: Counter[tuple[int, int]] = Counter()
    for utterance in utterances:
        words = corpus.utterances[utterance].text.split()
        phones = [phone for phone in alignment.of(utterance)[0].tolist() if phone != silence]
        variants = [[tuple(number[phone] for phone in each) for each in lexicon[word]] for word in words]
        ends = word_ends(phones, variants)
        if ends is None:
            continue
        for word, choices, begin, end in zip(words, variants, [0, *ends[:-1]], ends, strict=True):
            spoken = tuple(phones[begin:end])
            if spoken in choices:
                counts[word][choices.index(spoken)] += 1
                by_rank[len(choices), choices.index(spoken)] += 1
    scores: dict[str, list[float]] = {}
    for word, choices_of_word in lexicon.pronunciations.items():
        size = len(choices_of_word)
        if size == 1:
            continue
        prior = np.array([by_rank[size, rank] + 1.0 for rank in range(size)])
        share = np.array([counts[word][rank] for rank in range(size)]) + _PRIOR_COUNT * prior / prior.sum()
        scores[word] = np.log(share / share.max()).tolist()
    return scores
