"""From aligned phones to what lattice-free MMI trains on: tied states and the denominator graph.

Shapes: T output frames, F features, D dimensions of the frames that the trees are grown on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from asr.audio.cmvn import UtteranceCmvn
from asr.bundle import FILE_NAME as BUNDLE_FILE
from asr.bundle import Bundle
from asr.errors import AsrError
from asr.graph.context import ENTRY, LOOP, TIED_STATES, TiedStates
from asr.graph.denominator_graph import DenominatorGraph
from asr.models.chain_corpus import FRAME_SECONDS, Alignment, PreparedCorpus
from asr.models.denominator import denominator_graph, phone_histories
from asr.models.state_tying import ContextStatistics, grow_trees
from asr.text.documents import parse_json

_CEPSTRA = 13
STATES_FILE = "states.json"
DENOMINATOR_FILE = "denominator.npz"


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
        AsrError: a speaker is not in the corpus.
    """
    speakers = {utterance.speaker for utterance in corpus.utterances}
    unknown = [speaker for speaker in held_out if speaker not in speakers]
    if unknown:
        raise AsrError(f"{corpus.folder}: there is no speaker {unknown[0]!r} to hold out.")
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


def context_statistics(
    corpus: PreparedCorpus, alignment: Alignment, utterances: Sequence[int], factor: int = 3
) -> ContextStatistics:
    """Statistics of the cepstra of three neighboring output frames, by HMM state, phone before and phone."""
    statistics = ContextStatistics.empty(len(alignment.phones), 3 * _CEPSTRA)
    cosines = _cosines(corpus.num_features)
    cmvn = UtteranceCmvn()
    for utterance in utterances:
        features = torch.from_numpy(corpus.features(utterance, 0).astype(np.float32))
        normal = cmvn(features[None], torch.tensor([len(features)]))[0].numpy()
        num_outputs = len(normal) // factor
        cepstra = normal[: num_outputs * factor].reshape(num_outputs, factor, -1).mean(1) @ cosines
        padded = np.pad(cepstra, ((1, 1), (0, 0)), mode="edge")
        frames = np.concatenate((padded[:-2], padded[1:-1], padded[2:]), axis=1)
        phone, start = alignment.of(utterance)
        first = np.round(start / (factor * FRAME_SECONDS)).astype(np.int64).clip(0, max(0, num_outputs - 1))
        length = np.diff(first, append=num_outputs)
        position = np.repeat(np.arange(len(phone)), length)
        state = np.full(num_outputs - first[0], LOOP)
        state[first - first[0]] = ENTRY
        before = np.concatenate(([0], phone[:-1]))
        statistics.add(state, before[position], phone[position], frames[first[0] :])
    return statistics


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
        output: folder for the files.
    """
    statistics = context_statistics(corpus, alignment, utterances)
    states = grow_trees(alignment.phones, statistics, max_columns)
    histories = phone_histories([alignment.of(index)[0].tolist() for index in utterances], num_long_histories)
    graph = denominator_graph(histories, states)
    output.mkdir(parents=True, exist_ok=True)
    (output / STATES_FILE).write_text(json.dumps(states.to_json()), encoding="utf-8")
    np.savez(output / DENOMINATOR_FILE, **graph._asdict())
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
    states = TiedStates.from_json(parse_json((folder / STATES_FILE).read_text(encoding="utf-8")))
    return states, DenominatorGraph.load(folder / DENOMINATOR_FILE)


def _cosines(num_features: int) -> npt.NDArray[np.float32]:
    """The discrete cosine transform from log energies to cepstra, (F, 13)."""
    angle = math.pi / num_features * (np.arange(num_features) + 0.5)[:, None] * np.arange(_CEPSTRA)
    return (np.cos(angle) * math.sqrt(2.0 / num_features)).astype(np.float32)
