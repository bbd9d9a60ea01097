"""Which frame belongs to which token of a known transcript: the best path through a CTC model of it.

Shapes: N utterances, T frames, C tokens, U tokens of a transcript.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.text.tokens import BLANK_ID


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
