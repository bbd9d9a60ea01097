"""Frame labels from another network's alignment: how the papers' networks are trained, frame by frame.

A trained CTC network says where each phone of a transcript is heard; each frame near it is then a training example of
that phone, as the alignments of a GMM system are in the papers. The trained network may have any frame shift.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.am.ctc_alignment import align_ctc
from asr.am.flat_start import IGNORED
from asr.bundle import Bundle
from asr.errors import AsrError
from asr.text.tokens import BLANK_ID


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
