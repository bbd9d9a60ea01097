"""Training batches of pieces of utterances; all pieces of a batch have the same length (Povey et al. 2016).

Shapes: N pieces of a batch, T frames of features with their context, F features, L output frames of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asr.audio.fbank import Fbank
from asr.datasets.augment import SpecAugment, VocalTractPerturbation
from asr.distributed import WHOLE, Share, batch_rows, draw_from, draw_rows
from asr.errors import AsrError, require_at_least, require_below_one, require_between
from asr.models.chain_corpus import FRAME_SECONDS, PreparedCorpus
from asr.models.interface import STD_FLOOR, SpeakerStatistics, UtteranceCmvn
from asr.models.tdnnf import smoothed

# Maximum number of other utterances of its speaker with which a piece is normalized.
_MOST_OTHERS = 8


class Chunk(NamedTuple):
    """A piece of an utterance: L output frames from `first_output` on."""

    utterance: int
    condition: int
    first_output: int


class ChunkBatch(NamedTuple):
    """The batch of a training step.

    Attributes:
        features: (N, T, F) float32, normalized, with the network's context on both sides.
        chunks: where each piece comes from.
        num_outputs: L.
        rows: (N,) positions in the batch of all processes.
        num_all: number of pieces of that batch.
        number: seed of the epoch, and number of the batch in it.
    """

    features: Tensor
    chunks: list[Chunk]
    num_outputs: int
    rows: Sequence[int]
    num_all: int
    number: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class ChunkSizes:
    """Lengths of pieces, and the size of a batch.

    Attributes:
        lengths: output frames that a piece may have; shorter utterances are left out.
        frames_per_batch: approximate number of output frames of a batch, of all processes together. Batches of less
            than half as many are left out.

    Raises:
        AsrError: there is no length, or a number is below 1.
    """

    lengths: Sequence[int] = (30, 50, 75, 100, 130)
    frames_per_batch: int = 2400

    def __post_init__(self) -> None:
        require_at_least(1, frames_per_batch=self.frames_per_batch)
        if min(self.lengths, default=0) < 1:
            raise AsrError(
                f"lengths: {list(self.lengths)}: give the output frames of a piece, such as [30, 50, 75, 100, 130]."
            )


@dataclass(frozen=True)
class ChunkAugmentation:
    """What is drawn for every piece in training.

    Attributes:
        max_warp: the largest warp of vocal tract length perturbation, below 1; 0 for none.
        max_smoothing: the largest share that a filter takes of each neighbor, up to 0.5 (`FilterSmoothing`); 0 for
            none.
        spec_augment: masks of bands of frames and features, or None.
        speaker_share: the share of pieces whose utterance is normalized together with others of its speaker, which are
            drawn for every piece (`SpeakerStatistics`).

    Raises:
        AsrError: a number is outside its range.
    """

    max_warp: float = 0.1
    max_smoothing: float = 0.0
    spec_augment: SpecAugment | None = None
    speaker_share: float = 0.0

    def __post_init__(self) -> None:
        require_below_one(max_warp=self.max_warp)
        require_between(0, 0.5, max_smoothing=self.max_smoothing)
        require_between(0, 1, speaker_share=self.speaker_share)


NO_AUGMENTATION = ChunkAugmentation(max_warp=0.0)


class ChunkLoader:
    """Cuts utterances into other pieces in each epoch, and loads batches of them.

    Args:
        corpus: prepared features.
        utterances: the utterances to use.
        conditions: indices into `corpus.conditions`; one is drawn for every utterance and epoch, by their weights.
        sizes: of pieces and batches.
        left_context: feature frames before a piece.
        right_context: feature frames after it.
        factor: feature frames per output frame.
        augmentation: of the pieces.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        utterances: Sequence[int],
        conditions: Sequence[int] = (0,),
        sizes: ChunkSizes = ChunkSizes(),
        left_context: int = 0,
        right_context: int = 0,
        factor: int = 3,
        augmentation: ChunkAugmentation = NO_AUGMENTATION,
    ) -> None:
        self.corpus = corpus
        self.utterances = list(utterances)
        self.conditions = tuple(conditions)
        self.lengths = tuple(sorted(sizes.lengths))
        self.frames_per_batch = sizes.frames_per_batch
        self.left_context = left_context
        self.right_context = right_context
        self.factor = factor
        self.augmentation = augmentation
        max_warp = augmentation.max_warp
        self._warp = VocalTractPerturbation(max_warp, Fbank(**corpus.fbank_arguments)) if max_warp else None
        self._of_speaker: dict[str, list[int]] = {}
        for utterance in self.utterances:
            self._of_speaker.setdefault(corpus.utterances[utterance].speaker, []).append(utterance)
        self._cmvn = UtteranceCmvn()
        self._statistics: dict[tuple[int, int], SpeakerStatistics] = {}

    def plan(self, seed: int) -> list[tuple[int, list[Chunk]]]:
        """The batches of an epoch in random order: (L, pieces); the same for the same seed."""
        rng = np.random.default_rng(seed)
        weight = np.array([self.corpus.conditions[condition].weight for condition in self.conditions])
        weight /= weight.sum()
        by_length: dict[int, list[Chunk]] = {length: [] for length in self.lengths}
        for utterance in self.utterances:
            condition = self.conditions[int(rng.choice(len(weight), p=weight))]
            num_outputs = self.corpus.utterances[utterance].num_frames[condition] // self.factor
            if num_outputs < self.lengths[0]:
                continue
            pieces = -(-num_outputs // self.lengths[-1])
            fitting = (length for length in self.lengths if length * pieces <= num_outputs)
            longest_fit = max(fitting, default=self.lengths[0])
            cover = min(length for length in self.lengths if length * pieces >= num_outputs)
            # Pieces overlap a little or leave a little out, whichever is less.
            length = cover if cover * pieces - num_outputs < num_outputs - longest_fit * pieces else longest_fit
            if length > num_outputs:
                length = longest_fit
            room = num_outputs - length
            if pieces == 1:
                starts = [int(rng.integers(room + 1))]
            else:
                slack = max(0, num_outputs - length * pieces)
                shift = int(rng.integers(slack + 1))
                starts = [min(room, shift + round(piece * (room - slack) / (pieces - 1))) for piece in range(pieces)]
            by_length[length] += [Chunk(utterance, condition, start) for start in starts]
        batches: list[tuple[int, list[Chunk]]] = []
        for length, chunks in by_length.items():
            size = max(1, self.frames_per_batch // length)
            order = rng.permutation(len(chunks))
            for begin in range(0, len(order), size):
                batches.append((length, [chunks[index] for index in order[begin : begin + size]]))
        # A small last batch would have poor statistics for the norms.
        batches = [batch for batch in batches if 2 * batch[0] * len(batch[1]) >= self.frames_per_batch]
        return [batches[index] for index in rng.permutation(len(batches))]

    def load(self, length: int, chunks: Sequence[Chunk], share: Share = WHOLE) -> ChunkBatch:
        """Features of a share of a batch; masks and warps are drawn by torch's generator for the whole batch."""
        rows, num_all = share.rows(len(chunks)), len(chunks)
        chunks = [chunks[row] for row in rows]
        num_frames = self.left_context + length * self.factor + self.right_context
        features = np.zeros((len(chunks), num_frames, self.corpus.num_features), dtype=np.float32)
        inside = np.zeros((len(chunks), num_frames), dtype=bool)
        others = self._drawn_speakers(rows, num_all)
        for row, chunk in enumerate(chunks):
            utterance = self.corpus.features(chunk.utterance, chunk.condition)
            mean, inverse_std = self._normal(chunk, others[row])
            first = chunk.first_output * self.factor - self.left_context
            begin, end = max(0, first), min(len(utterance), first + num_frames)
            features[row, begin - first : end - first] = (utterance[begin:end] - mean) * inverse_std
            inside[row, begin - first : end - first] = True
        batch = torch.from_numpy(features)
        with batch_rows(rows, num_all):
            if self._warp is not None:
                # The warp is linear in the features; as a matrix it takes a tenth of the time.
                one = torch.eye(self.corpus.num_features)
                batch = batch @ self._warp(one.expand(len(chunks), -1, -1))
            if self.augmentation.max_smoothing:
                drawn = draw_rows(lambda num: torch.rand(num, 1, 1), len(chunks))
                batch = smoothed(batch, self.augmentation.max_smoothing * drawn)
            if self.augmentation.spec_augment is not None:
                batch = self.augmentation.spec_augment(batch, torch.full((len(chunks),), num_frames))
        batch = batch * torch.from_numpy(inside)[:, :, None]
        return ChunkBatch(batch, chunks, length, rows, num_all)

    def epoch(self, seed: int, share: Share = WHOLE, start: int = 0) -> Iterator[ChunkBatch]:
        """The batches of an epoch from `start` on; the seed determines their random numbers."""
        for number, (length, chunks) in enumerate(self.plan(seed)):
            if number >= start:
                draw_from(seed, number)
                yield self.load(length, chunks, share)._replace(number=(seed, number))

    def output_seconds(self, chunk: Chunk, length: int) -> npt.NDArray[np.float64]:
        """The middle of each output frame of a piece, in seconds of the utterance at speed 1, (L,)."""
        frame = (chunk.first_output + np.arange(length, dtype=np.float64) + 0.5) * self.factor
        seconds: npt.NDArray[np.float64] = frame * (FRAME_SECONDS * self.corpus.conditions[chunk.condition].speed)
        return seconds

    def _drawn_speakers(self, rows: Sequence[int], num_all: int) -> list[list[float]]:
        """For each row of a batch, the random numbers that choose other utterances of its speaker."""
        speaker_share = self.augmentation.speaker_share
        if not speaker_share:
            return [[]] * len(rows)
        numbers = torch.rand(num_all, 1 + _MOST_OTHERS).tolist()
        # What is left of the first number, once it has decided, is their number.
        shares = [numbers[row][0] / speaker_share for row in rows]
        return [
            numbers[row][1 : 2 + int(_MOST_OTHERS * share)] if share < 1.0 else []
            for row, share in zip(rows, shares, strict=True)
        ]

    def _normal(self, chunk: Chunk, drawn: Sequence[float]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """What `UtteranceCmvn` subtracts from the whole utterance and then multiplies it by, (F,) each.

        Args:
            chunk: a piece of the utterance.
            drawn: numbers from 0 to 1 for the speaker's other utterances; none for the utterance on its own.
        """
        speaker = self._of_speaker[self.corpus.utterances[chunk.utterance].speaker]
        others = {speaker[int(number * len(speaker))] for number in drawn} - {chunk.utterance}
        parts = (self._statistics_of(each, chunk.condition) for each in others)
        known = SpeakerStatistics.of_all(parts, self.corpus.num_features)
        mean, variance, _ = self._statistics_of(chunk.utterance, chunk.condition) + known.limited()
        return mean.numpy(), variance.sqrt().clamp(min=STD_FLOOR).reciprocal().numpy()

    def _statistics_of(self, utterance: int, condition: int) -> SpeakerStatistics:
        key = (utterance, condition)
        if key not in self._statistics:
            features = torch.from_numpy(self.corpus.features(utterance, condition).astype(np.float32))
            self._statistics[key] = self._cmvn.statistics(features[None], torch.tensor([len(features)]))
        return self._statistics[key]
