"""Alignments of phones: by the network of a bundle, and by a small classifier trained on a first alignment.

A network of tied states, or the classifier, gives frame scores of phones. A Viterbi search finds the best pronunciation
of each word of a transcript with them, with or without silence between words. Of a CTC network's output, the middles of
the phones are taken.

Shapes: N pieces, T frames, L output frames of a piece, C phones (0 is silence), S states of an utterance's graph, E
edges between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.bundle import Bundle
from asr.errors import AsrError
from asr.graph.context import TIED_STATES, TiedStates
from asr.graph.fst import offsets
from asr.kernels.jit import jit
from asr.kernels.precision import rounded_products
from asr.models.alignment import align_ctc
from asr.models.chain_corpus import FRAME_SECONDS, SILENCE, Alignment, PreparedCorpus, Progress
from asr.models.chunks import Chunk, ChunkLoader, ChunkSizes
from asr.models.tdnnf import Tdnnf
from asr.serialization import checksum_of_tensors
from asr.text.lexicon import Lexicon

_RADIUS_SECONDS = 0.12
_LEAST_PRIOR, _LEAST_POSTERIOR = 1e-4, 1e-6
_NUM_EPOCHS, _PEAK_LR = 3, 2e-3
_LEFT_OUT = 0.1  # share of the utterances, those aligned worst, whose readers may not have read the text


class TranscriptGraph(NamedTuple):
    """States of a transcript in an order in which all edges but self-loops lead forward.

    Attributes:
        phone: (S,) int64.
        edge_begin: (S + 1,) int64; the predecessors of state s are `source[edge_begin[s] : edge_begin[s + 1]]`; each
            state follows itself, too.
        source: (E,) int64; -1 is the beginning.
        is_final: (S,) bool.
    """

    phone: npt.NDArray[np.int64]
    edge_begin: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    is_final: npt.NDArray[np.bool_]


def phones_from_ctc(
    log_prob: Tensor, tokens: Sequence[int], frame_seconds: float, num_seconds: float
) -> tuple[list[int], list[float], float] | None:
    """A first alignment from a CTC network, which outputs a phone in one or two frames.

    A phone ends halfway to its neighbor's middle, but no further than 0.12 s from its own; the rest is silence.

    Args:
        log_prob: (T, C), blank at 0.
        tokens: the transcript, columns of `log_prob`.
        frame_seconds: seconds from one frame to the next.
        num_seconds: length of the utterance.

    Returns:
        tokens with 0 for silence, the seconds at which they begin, and the mean score per frame; None if there are too
        few frames.
    """
    target = torch.tensor([list(tokens)])
    position, found = align_ctc(log_prob[None], torch.tensor([len(log_prob)]), target, torch.tensor([len(tokens)]))
    if not bool(found[0]):
        return None
    path = position[0]
    column = torch.where(path >= 0, target[0][path.clamp(min=0)], torch.zeros_like(path))
    score = float(log_prob.gather(1, column[:, None]).mean())
    frame = torch.arange(len(path))[path >= 0].numpy()
    count = np.bincount(path[path >= 0].numpy(), minlength=len(tokens))
    middle = np.bincount(path[path >= 0].numpy(), weights=(frame + 0.5) * frame_seconds, minlength=len(tokens)) / count
    begin = middle - _RADIUS_SECONDS
    end = middle + _RADIUS_SECONDS
    halfway = (middle[1:] + middle[:-1]) / 2
    begin[1:] = np.maximum(begin[1:], halfway)
    end[:-1] = np.minimum(end[:-1], halfway)
    phones: list[int] = []
    seconds: list[float] = []
    now = 0.0
    for token, first, last in zip(tokens, begin, end, strict=True):
        if first > now + 1e-6:
            phones.append(0)
            seconds.append(now)
        phones.append(token)
        seconds.append(max(0.0, float(first)))
        now = float(last)
    if now < num_seconds:
        phones.append(0)
        seconds.append(now)
    return phones, seconds, score


def transcript_graph(words: Sequence[Sequence[Sequence[int]]]) -> TranscriptGraph:
    """The graph of a transcript: each word has one of its pronunciations, and silence between words is optional.

    Args:
        words: for each word its pronunciations, each a sequence of phones from 1 on.
    """
    phone: list[int] = [0]
    sources: list[list[int]] = [[-1]]
    ends = [-1, 0]
    for variants in words:
        last = []
        for variant in variants:
            for position, each in enumerate(variant):
                sources.append(list(ends) if position == 0 else [len(phone) - 1])
                phone.append(each)
            last.append(len(phone) - 1)
        sources.append(last)
        phone.append(0)
        ends = [*last, len(phone) - 1]
    is_final = np.zeros(len(phone), dtype=np.bool_)
    is_final[[end for end in ends if end >= 0]] = True
    flat = np.array([source for each in sources for source in each], dtype=np.int64)
    begin = offsets([len(each) for each in sources])
    return TranscriptGraph(np.array(phone, dtype=np.int64), begin, flat, is_final)


def align_transcript(
    graph: TranscriptGraph, frame_score: npt.NDArray[np.float32]
) -> tuple[list[int], list[int], float] | None:
    """The best path: phones, the frame at which each begins, and the mean score per frame.

    Args:
        graph: of the transcript.
        frame_score: (T, C) natural logs.

    Returns:
        None if there are too few frames.
    """
    path = np.empty(len(frame_score), dtype=np.int64)
    loop = jit(_viterbi) or _viterbi
    score = loop(*graph, np.ascontiguousarray(frame_score), path)
    if not np.isfinite(score):
        return None
    begins = np.flatnonzero(np.diff(path, prepend=-1))
    return graph.phone[path[begins]].tolist(), begins.tolist(), float(score) / len(path)


def _viterbi(
    phone: npt.NDArray[np.int64],
    edge_begin: npt.NDArray[np.int64],
    source: npt.NDArray[np.int64],
    is_final: npt.NDArray[np.bool_],
    frame_score: npt.NDArray[np.float32],
    path: npt.NDArray[np.int64],
) -> float:
    """Fills `path` (T,) with the best state of each frame; returns the score, -inf if there is no path."""
    num_frames, num_states = frame_score.shape[0], phone.shape[0]
    came_from = np.full((num_frames, num_states), -1, dtype=np.int32)
    score = np.full(num_states, -np.inf)
    following = np.full(num_states, -np.inf)
    for state in range(num_states):
        for edge in range(edge_begin[state], edge_begin[state + 1]):
            if source[edge] < 0:
                score[state] = frame_score[0, phone[state]]
    for frame in range(1, num_frames):
        for state in range(num_states):
            best, before = score[state], state
            for edge in range(edge_begin[state], edge_begin[state + 1]):
                if source[edge] >= 0 and score[source[edge]] > best:
                    best, before = score[source[edge]], source[edge]
            following[state] = best + frame_score[frame, phone[state]]
            came_from[frame, state] = before
        score, following = following, score
    best, state = -np.inf, -1
    for last in range(num_states):
        if is_final[last] and score[last] > best:
            best, state = score[last], last
    if state < 0:
        return -np.inf
    for frame in range(num_frames - 1, -1, -1):
        path[frame] = state
        state = came_from[frame, state]
    return float(best)


def require_features(bundle: Bundle, fbank_arguments: Mapping[str, Any]) -> None:
    """Checks that a bundle's network takes filterbanks such as those of a corpus.

    Raises:
        AsrError: it takes others.
    """
    own = getattr(bundle.features.network, "arguments", {})
    differing = [name for name in fbank_arguments if name not in own or own[name] != fbank_arguments[name]]
    if differing:
        name = differing[0]
        raise AsrError(
            f"bundle {bundle.name}: its network was trained on other features than those to prepare ({name} is "
            f"{own.get(name)}, not {fbank_arguments[name]}); "
            + ("give --high-freq." if differing == ["high_freq"] else "take another bundle.")
        )


def aligned_phones(bundle: Bundle) -> tuple[str, ...]:
    """The phones of alignments by a bundle, silence first."""
    if TIED_STATES in bundle.graph.meta:
        return TiedStates.from_json(bundle.graph.meta[TIED_STATES]).phones
    return (SILENCE, *bundle.graph.tokens.tokens[1:])


def require_phones(bundle: Bundle, lexicon: Lexicon, words: Iterable[str]) -> None:
    """Checks that a bundle's network has the phones of the first pronunciation of each word that is in the lexicon.

    Raises:
        AsrError: it lacks one.
    """
    phones = set(aligned_phones(bundle))
    for word in words:
        lacking = set(lexicon[word][0] if word in lexicon else ()) - phones
        if lacking:
            raise AsrError(
                f"bundle {bundle.name}: its network has no phone {min(lacking)!r} ({word}); give a lexicon with the "
                "phones of the network."
            )


def checksum_of_sources(bundle: Bundle, lexicon: Lexicon, words: Iterable[str], sources: Mapping[str, str]) -> str:
    """A checksum of what alignments by a bundle depend on: network, pronunciations, and `PreparedCorpus.sources`."""
    pronunciations = {word: lexicon[word] for word in sorted(set(words)) if word in lexicon}
    known = {source: checksum for source, checksum in sorted(sources.items()) if checksum}
    header = json.dumps(pronunciations) + (json.dumps(known) if known else "")
    return checksum_of_tensors(header, bundle.acoustic_model.network.state_dict())


def align_with_bundle(
    corpus: PreparedCorpus, lexicon: Lexicon, bundle: Bundle, on_progress: Progress = lambda done, total: None
) -> Alignment:
    """An alignment by the acoustic model of a bundle.

    Args:
        corpus: prepared with the bundle's filterbanks.
        lexicon: a network of tied states uses all pronunciations of a word, a CTC network only the first one.
        bundle: the bundle.
        on_progress: called when the network has read an utterance.

    Raises:
        AsrError: the bundle does not have all phones.
    """
    network: Any = bundle.acoustic_model.network.eval()
    seconds: float = network.subsampling_factor * FRAME_SECONDS
    if TIED_STATES in bundle.graph.meta:
        states = TiedStates.from_json(bundle.graph.meta[TIED_STATES])
        likelihoods = phone_likelihoods(corpus, network, states, on_progress)
        return realign(corpus, lexicon, states.phones, likelihoods, seconds)
    tokens = bundle.graph.tokens
    found: list[tuple[Sequence[int], Sequence[float], float]] = []
    for index, utterance in enumerate(corpus.utterances):
        wanted = [token for word in utterance.text.split() for token in tokens.ids_of(lexicon[word][0])]
        log_prob = _log_prob(corpus, index, network)
        path = phones_from_ctc(log_prob, wanted, seconds, len(corpus.features(index, 0)) * FRAME_SECONDS)
        found.append(([], [], -np.inf) if path is None else path)
        on_progress(index + 1, len(corpus))
    return Alignment.from_lists(aligned_phones(bundle), found)


def phone_likelihoods(
    corpus: PreparedCorpus,
    network: nn.Module,
    states: TiedStates,
    on_progress: Progress = lambda done, total: None,
) -> list[Tensor]:
    """Log-likelihoods of phones, up to a constant, from a network of tied states: posterior over prior.

    Returns:
        for each utterance, (T', C).
    """
    owner = torch.from_numpy(states.phone_of_column)
    posteriors = []
    for index in range(len(corpus)):
        column = _log_prob(corpus, index, network).exp()
        posteriors.append(torch.zeros(len(column), len(states.phones)).index_add_(1, owner, column))
        on_progress(index + 1, len(corpus))
    prior = torch.stack([posterior.sum(0) for posterior in posteriors]).sum(0)
    log_prior = (prior / prior.sum()).clamp(min=_LEAST_PRIOR).log()
    return [posterior.clamp(min=_LEAST_POSTERIOR).log() - log_prior for posterior in posteriors]


def refine_alignment(
    corpus: PreparedCorpus, lexicon: Lexicon, alignment: Alignment, seed: int, report: Callable[[str], None]
) -> Alignment:
    """Trains a classifier on the nine tenths of the utterances that are aligned best, and aligns all of them with it.

    Args:
        corpus: the prepared corpus.
        lexicon: all pronunciations of a word are used.
        alignment: the previous alignment.
        seed: of the classifier's training.
        report: called with a line of text after each epoch.

    Raises:
        AsrError: there is too little speech to train on.
    """
    aligned = [index for index in range(len(corpus)) if np.isfinite(alignment.score[index])]
    threshold = np.quantile(alignment.score[aligned], _LEFT_OUT) if aligned else 0.0
    best = [index for index in aligned if alignment.score[index] >= threshold]
    network, log_prior = train_phone_classifier(corpus, alignment, best, seed, report)
    likelihoods = (_log_prob(corpus, index, network) - log_prior for index in range(len(corpus)))
    return realign(corpus, lexicon, alignment.phones, likelihoods, network.subsampling_factor * FRAME_SECONDS)


def frame_labels(alignment: Alignment, loader: ChunkLoader, chunk: Chunk, length: int) -> npt.NDArray[np.int64]:
    """The phone of each output frame of a piece, (L,)."""
    phone, start = alignment.of(chunk.utterance)
    seconds = loader.output_seconds(chunk, length)
    return phone[np.searchsorted(start, seconds, side="right").clip(1) - 1]


def train_phone_classifier(
    corpus: PreparedCorpus, alignment: Alignment, utterances: Sequence[int], seed: int, report: Callable[[str], None]
) -> tuple[Tdnnf, Tensor]:
    """A small network trained by cross-entropy.

    Returns:
        the network in evaluation mode, and the log prior of each phone (C,).

    Raises:
        AsrError: the utterances fill no batch.
    """
    torch.manual_seed(seed)
    network = Tdnnf(
        corpus.num_features, len(alignment.phones), dim=256, bottleneck_dim=64, num_layers=5, prefinal_dim=128,
        small_dim=128,
    )  # fmt: skip
    context = network.left_context, network.right_context
    loader = ChunkLoader(corpus, utterances, (0,), ChunkSizes(frames_per_batch=3200), *context)
    num_batches = len(loader.plan(0))
    if not num_batches:
        raise AsrError(
            f"{corpus.folder}: {len(utterances)} aligned utterances are too few to train a classifier of phones, which "
            "needs some minutes of speech; give more speech, or --passes 0 to keep the first alignment."
        )
    optimizer = torch.optim.AdamW(network.parameters(), lr=_PEAK_LR, weight_decay=0.02)
    total = _NUM_EPOCHS * num_batches
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, _PEAK_LR, total_steps=total + _NUM_EPOCHS * 4, pct_start=0.1
    )
    frames = torch.ones(len(alignment.phones))
    for epoch in range(_NUM_EPOCHS):
        right = count = 0
        for step, batch in enumerate(loader.epoch(seed + epoch)):
            labels = [frame_labels(alignment, loader, chunk, batch.num_outputs) for chunk in batch.chunks]
            target = torch.from_numpy(np.stack(labels))
            frames += target.flatten().bincount(minlength=len(frames))
            with rounded_products():
                logits = network.branch(network.encode(batch.features))
            loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 4 == 0:
                network.semi_orthogonal_step()
            right += int((logits.argmax(2) == target).sum())
            count += target.numel()
        report(f"epoch {epoch}: {right / max(1, count):.3f} of the frames right")
    return network.eval(), (frames / frames.sum()).log()


def realign(
    corpus: PreparedCorpus, lexicon: Lexicon, phones: Sequence[str], likelihoods: Iterable[Tensor], frame_seconds: float
) -> Alignment:
    """The best path of every transcript through log-likelihoods of phones.

    Args:
        corpus: prepared features.
        lexicon: all pronunciations of a word are used.
        phones: the columns, silence first.
        likelihoods: for each utterance, (T', C).
        frame_seconds: length of an output frame.

    Raises:
        AsrError: the phones do not begin with silence, or the lexicon has other phones.
    """
    if phones[0] != SILENCE:
        raise AsrError(f"The first phone must be {SILENCE}, not {phones[0]}.")
    number = {phone: index for index, phone in enumerate(phones)}
    found: list[tuple[Sequence[int], Sequence[float], float]] = []
    for utterance, log_likelihood in zip(corpus.utterances, likelihoods, strict=True):
        try:
            words = [[[number[phone] for phone in variant] for variant in lexicon[w]] for w in utterance.text.split()]
        except KeyError as error:
            raise AsrError(f"{utterance.utterance_id}: the model has no phone {error.args[0]!r}.") from error
        path = align_transcript(transcript_graph(words), log_likelihood.numpy())
        if path is None:
            found.append(([], [], -np.inf))
            continue
        path_phones, frames, score = path
        found.append((path_phones, [frame * frame_seconds for frame in frames], score))
    return Alignment.from_lists(phones, found)


def _log_prob(corpus: PreparedCorpus, index: int, network: nn.Module) -> Tensor:
    """Log-probabilities of one utterance, (T', C)."""
    features = torch.from_numpy(corpus.features(index, 0).astype(np.float32))
    with torch.no_grad():
        log_prob: Tensor = network(features[None], torch.tensor([len(features)]))[0][0]
    return log_prob
