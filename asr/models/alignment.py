"""Which frame belongs to which token of a known transcript: the best path through a CTC model of it.

Shapes: N utterances, T frames, C tokens, U tokens of a transcript.


A first guess of the alignment, which gets training past CTC's all-blank plateau.

A network that starts with CTC first learns to say blank everywhere and needs a thousand steps and more to leave that.
As GMM systems do in their flat start, the first steps here take every utterance's tokens as spread evenly over its
speech, silence being blank, and train on frame cross-entropy; CTC then finds the real alignment within few steps.


Frame labels from another network's alignment: how the papers' networks are trained, frame by frame.

A trained CTC network says where each phone of a transcript is heard; each frame near it is then a training example of
that phone, as the alignments of a GMM system are in the papers. The trained network may have any frame shift.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.bundle import Bundle
from asr.errors import AsrError
from asr.text.symbols import BLANK_ID


@torch.no_grad()
def align_ctc(log_prob: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The position in its transcript that each frame reads on the best path; equal neighbours are parted by a blank.

    Args:
        log_prob: (N, T, C) natural logs, blank at 0.
        num_frames: (N,) int64.
        tokens: (N, U) int64, padded.
        num_tokens: (N,) int64.

    Returns:
        position: (N, T) int64, -1 where a blank is read and behind the end.
        found: (N,) bool, whether the frames suffice for the tokens; where they do not, all positions are -1.
    """
    num_utts, max_frames, _ = log_prob.shape
    # Blanks before, between and behind the tokens: label 2u + 1 is token u.
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


# The label of frames that are no training examples.
IGNORED = -100


def uniform_alignment(
    features: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor, max_frames: int, threshold: float = 0.35
) -> Tensor:
    """A token id for each output frame, blank in silence, -100 in padding; (N, T') int64.

    Speech is where the mean of the log filterbanks lies above `threshold` of the way from the utterance's quiet frames
    (5 % quantile) to its loud ones (95 %).

    Args:
        features: (N, T, F) log filterbanks.
        num_frames: (N,) output frames, of T'.
        tokens: (N, U) padded with 0.
        num_tokens: (N,).
        max_frames: T'.
        threshold: see above.
    """
    level = F.adaptive_avg_pool1d(features.float().mean(-1)[:, None], max_frames)[:, 0]  # (N, T')
    alignment = torch.full(level.shape, IGNORED, dtype=torch.int64, device=features.device)
    for i, (frames, count) in enumerate(zip(num_frames.tolist(), num_tokens.tolist(), strict=True)):
        own = level[i, :frames]
        if not frames or not count:
            continue
        quiet, loud = own.quantile(0.05), own.quantile(0.95)
        speech = (own > quiet + threshold * (loud - quiet)).nonzero()[:, 0]
        alignment[i, :frames] = 0
        position = torch.arange(len(speech), device=features.device) * count // max(1, len(speech))
        alignment[i, speech] = tokens[i, position]
    return alignment


def frame_cross_entropy(log_prob: Tensor, alignment: Tensor, log_prior: Tensor | None = None) -> Tensor:
    """Mean over real frames of minus their token's log-probability, ().

    Args:
        log_prob: (N, T', C).
        alignment: (N, T') int64.
        log_prior: (C,) how frequent each token's frames are. With it `log_prob` learns posterior over prior, but for a
            constant: what a search takes from hybrid systems, so that frequent tokens are not counted twice.
    """
    if log_prior is not None:
        log_prob = (log_prob + log_prior).log_softmax(-1)
    return F.nll_loss(log_prob.flatten(0, 1), alignment.flatten(), ignore_index=IGNORED)


class TeacherAlignment:
    """Labels frames by the network of a bundle.

    CTC reads a phone in few frames: all that are nearer to their middle than to that of any other phone are the
    phone's, up to `radius_seconds`; what is further from all is blank, as is a frame between a phone and its equal.

    Args:
        folder: the bundle's.
        tokens: of the data, blank first; the bundle's may stand in another order.
        num_features: F of the data.
        radius_seconds: half of the longest phone.

    Raises:
        AsrError: the bundle lacks a token, or its network takes other features.
    """

    def __init__(self, folder: str, tokens: tuple[str, ...], num_features: int, radius_seconds: float = 0.12) -> None:
        bundle = Bundle.load(folder)
        names = bundle.graph.tokens.tokens
        missing = [token for token in tokens if token not in names]
        if missing:
            some = " ".join(missing[:5])
            raise AsrError(f"teacher: {folder} lacks the tokens {some}; train on its lexicon's phones.")
        if bundle.acoustic_model.network.num_features != num_features:  # type: ignore[attr-defined]
            raise AsrError(
                f"teacher: {folder} takes other features than the data's {num_features}; give the data its fbank."
            )
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
        """The token of each output frame of the network in training, (N, T') int64; ignored where there is none.

        Args:
            features: (N, T, F).
            num_frames: (N,).
            tokens: (N, U) int64, padded with 0.
            num_tokens: (N,).
            subsampling_factor: feature frames to an output frame.
            num_outputs: (N,) output frames.
            max_outputs: T'.
        """
        device = features.device
        self.network.to(device)
        log_prob, heard_frames = self.network(features, num_frames)
        position, found = align_ctc(log_prob, heard_frames, self.token_id.to(device)[tokens], num_tokens)
        # The middle of the frames that read each phone, in feature frames.
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
        # A graph of CTC tells a phone that comes twice from a long one by the blank between.
        again = (nearest[:, 1:] != nearest[:, :-1]) & (label[:, 1:] == label[:, :-1])
        label[:, 1:] = label[:, 1:].masked_fill(again, BLANK_ID)
        return label.masked_fill(~found[:, None] | (output >= num_outputs[:, None]), IGNORED)
