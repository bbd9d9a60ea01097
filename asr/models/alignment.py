"""Frame alignments of transcripts: the best CTC path, a uniform one for flat starts, and those of a trained network.

A network that starts with CTC first learns to output only blanks, and needs a thousand steps or more to leave that
plateau. As in the flat start of GMM systems, the first steps can instead be trained on tokens spread uniformly over
the speech. Hybrid networks are trained on the frame labels of a trained network throughout.

Shapes: N utterances, T frames, F features, C tokens, U tokens of a transcript, T' output frames.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.audio.fbank import Fbank
from asr.bundle import Bundle
from asr.errors import AsrError
from asr.models.checkpoint import require_same_features
from asr.text.symbols import BLANK_ID


@torch.no_grad()
def align_ctc(log_prob: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The best CTC path of each transcript (Viterbi); equal neighbors have a blank between them.

    Args:
        log_prob: (N, T, C) natural logs, blank at 0.
        num_frames: (N,) int64.
        tokens: (N, U) int64, padded.
        num_tokens: (N,) int64.

    Returns:
        position: (N, T) int64, the position in the transcript of each frame's token; -1 for blanks and padding.
        found: (N,) bool, whether there are enough frames for the tokens; if not, all positions are -1.
    """
    num_utts, max_frames, _ = log_prob.shape
    # Blanks before, between and after the tokens: label 2u + 1 is token u.
    labels = tokens.new_full((num_utts, 2 * tokens.shape[1] + 1), BLANK_ID)
    labels[:, 1::2] = tokens
    may_skip = torch.zeros_like(labels, dtype=torch.bool)
    may_skip[:, 3::2] = tokens[:, 1:] != tokens[:, :-1]
    impossible = -torch.inf
    emission = log_prob.gather(2, labels[:, None].expand(-1, max_frames, -1))
    score = emission.new_full(labels.shape, impossible)
    score[:, 0] = 0.0
    came_from = torch.zeros(emission.shape, dtype=torch.int8, device=log_prob.device)
    for frame in range(max_frames):
        stay, step, skip = score, torch.full_like(score, impossible), torch.full_like(score, impossible)
        step[:, 1:] = score[:, :-1]
        if frame:
            skip[:, 2:] = score[:, :-2].masked_fill(~may_skip[:, 2:], impossible)
        best, way = torch.stack([stay, step, skip]).max(0)
        runs = (num_frames > frame)[:, None]
        score = torch.where(runs, best + emission[:, frame], score)
        came_from[:, frame] = way.masked_fill(~runs, 0).to(torch.int8)
    utt = torch.arange(num_utts, device=log_prob.device)
    last_blank = 2 * num_tokens
    last_token = (last_blank - 1).clamp(min=0)
    label = torch.where(score[utt, last_token] > score[utt, last_blank], last_token, last_blank)
    found = score[utt, label] > impossible
    position = tokens.new_full((num_utts, max_frames), -1)
    for frame in range(max_frames - 1, -1, -1):
        reads = found & (num_frames > frame) & (label % 2 == 1)
        position[:, frame] = torch.where(reads, label // 2, position[:, frame])
        label = label - came_from[utt, frame, label]
    return position, found


# The label of frames that are not training examples.
IGNORED = -100
_SPEECH_LEVEL = 0.35


def uniform_alignment(
    features: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor, max_frames: int
) -> Tensor:
    """Spreads the tokens of each transcript uniformly over the frames with speech.

    Frames have speech if the mean of their log filterbanks is above a fraction (`_SPEECH_LEVEL`) of the range from
    quiet frames (5 % quantile of the utterance) to loud ones (95 % quantile).

    Args:
        features: (N, T, F) log filterbanks.
        num_frames: (N,) output frames.
        tokens: (N, U) padded with 0.
        num_tokens: (N,).
        max_frames: T'.

    Returns:
        the token of each output frame, (N, T') int64: blank in silence, `IGNORED` in padding.
    """
    level = F.adaptive_avg_pool1d(features.float().mean(-1)[:, None], max_frames)[:, 0]  # (N, T')
    alignment = torch.full(level.shape, IGNORED, dtype=torch.int64, device=features.device)
    for i, (frames, count) in enumerate(zip(num_frames.tolist(), num_tokens.tolist(), strict=True)):
        own = level[i, :frames]
        if not frames or not count:
            continue
        quiet, loud = own.quantile(0.05), own.quantile(0.95)
        speech = (own > quiet + _SPEECH_LEVEL * (loud - quiet)).nonzero()[:, 0]
        alignment[i, :frames] = 0
        position = torch.arange(len(speech), device=features.device) * count // max(1, len(speech))
        alignment[i, speech] = tokens[i, position]
    return alignment


def summed_cross_entropy(log_prob: Tensor, alignment: Tensor, log_prior: Tensor | None = None) -> Tensor:
    """The sum of the cross-entropies of all frames that are not ignored, ().

    Args:
        log_prob: (N, T', C).
        alignment: (N, T') int64.
        log_prior: (C,) log of the relative frequency of each token's frames. With it, `log_prob` learns the ratio of
            posterior to prior up to a constant, which decoders expect of hybrid systems.
    """
    if log_prior is not None:
        log_prob = (log_prob + log_prior).log_softmax(-1)
    return F.nll_loss(log_prob.flatten(0, 1), alignment.flatten(), ignore_index=IGNORED, reduction="sum")


class TeacherAlignment:
    """Labels frames by the alignment of a bundle's network, which may have any frame rate.

    CTC networks output a phone in only a few frames. The label of a frame is therefore the phone with the nearest
    middle, if that is no further away than `radius_seconds`; other frames are blank, and so is one frame between equal
    phones.

    Args:
        folder: of the bundle.
        tokens: of the data, blank first; the bundle may have them in another order.
        fbank: the features of the data, which the bundle's network will read, too.
        radius_seconds: half the length of the longest phone.

    Raises:
        AsrError: the bundle does not have all tokens, or its network was trained on other features.
    """

    def __init__(self, folder: str, tokens: tuple[str, ...], fbank: Fbank, radius_seconds: float = 0.12) -> None:
        bundle = Bundle.load(folder)
        names = bundle.graph.tokens.tokens
        missing = [token for token in tokens if token not in names]
        if missing:
            some = " ".join(missing[:5])
            raise AsrError(f"teacher: {folder} does not have the tokens {some}; train on the phones of its lexicon.")
        if bundle.acoustic_model.network.num_features != fbank.feature_dim:  # type: ignore[attr-defined]
            raise AsrError(
                f"teacher: {folder} has another number of features than the data ({fbank.feature_dim}); use its fbank."
            )
        trained: dict[str, Any] = bundle.features.network.arguments  # type: ignore[assignment]
        require_same_features(trained, fbank.arguments, f"{folder}: teacher", "the recipe")
        self.network = bundle.acoustic_model.network.eval()
        self.token_id = torch.tensor([names.index(token) for token in tokens])
        shift: float = bundle.features.network.frame_shift / bundle.sampling_rate  # type: ignore[assignment,operator]
        self.radius = radius_seconds / shift

    @torch.no_grad()
    def __call__(
        self,
        features: Tensor,
        num_frames: Tensor,
        tokens: Tensor,
        num_tokens: Tensor,
        subsampling_factor: int,
        num_outputs: Tensor,
        max_outputs: int,
    ) -> Tensor:
        """The label of each output frame of the network in training, (N, T') int64; `IGNORED` where there is none.

        Args:
            features: (N, T, F).
            num_frames: (N,).
            tokens: (N, U) int64, padded with 0.
            num_tokens: (N,).
            subsampling_factor: frames of features for each output frame.
            num_outputs: (N,) output frames.
            max_outputs: T'.
        """
        device = features.device
        self.network.to(device)
        log_prob, heard_frames = self.network(features, num_frames)
        position, found = align_ctc(log_prob, heard_frames, self.token_id.to(device)[tokens], num_tokens)
        # The middle of the frames of each phone, in frames of features.
        factor: int = self.network.subsampling_factor  # type: ignore[assignment]
        time = (torch.arange(position.shape[1], device=device) + 0.5) * factor
        reads = position >= 0
        place = position.clamp(min=0)
        total = torch.zeros(tokens.shape, device=device).scatter_add_(1, place, reads * time)
        middle = total / torch.zeros_like(total).scatter_add_(1, place, reads.float())
        real = torch.arange(tokens.shape[1], device=device) < num_tokens[:, None]
        middle = middle.masked_fill(~(real & found[:, None]), torch.inf)
        output = torch.arange(max_outputs, device=device)
        output_time = (output + 0.5) * subsampling_factor
        distance, nearest = (output_time[:, None] - middle[:, None]).abs().min(2)
        label = torch.where(distance <= self.radius, tokens.gather(1, nearest), BLANK_ID)
        # In CTC graphs a blank separates a phone that occurs twice from a long one.
        again = (nearest[:, 1:] != nearest[:, :-1]) & (label[:, 1:] == label[:, :-1])
        label[:, 1:] = label[:, 1:].masked_fill(again, BLANK_ID)
        return label.masked_fill(~found[:, None] | (output >= num_outputs[:, None]), IGNORED)
