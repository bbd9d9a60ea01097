"""The denominator of lattice-free MMI: a phone n-gram model without backing off, as a hidden Markov model.

As in Povey et al. (2016), all histories of two phones are states, and so are those histories of three phones that tell
most about the next phone. A state lists only the phones that followed it in training, which keeps the graph small.

Shapes: P phones, S states, A arcs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from asr.graph.context import TiedStates
from asr.graph.denominator_graph import DenominatorGraph

History = tuple[int, ...]
_BOUNDARY = 0  # silence precedes every utterance
_STEPS = 100
_RESTART = 1e-3
_STAY = 0.5


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
