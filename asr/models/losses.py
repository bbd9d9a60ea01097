"""Training objectives: CTC by torch, CTC by k2, and CTC-CRF.

Shapes: N utterances, T frames, C tokens, U tokens of a transcript.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.errors import AsrError
from asr.models.interface import valid_frames


class TorchCtc(nn.Module):
    """CTC (Graves et al., 2006) by torch: the negative log-likelihood of the tokens over all alignments."""

    def prepare(self, token_sequences: Sequence[Sequence[int]]) -> None:
        """Does nothing; CTC needs no statistics of transcripts."""

    def forward(self, log_prob: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> Tensor:
        """log_prob (N, T, C), num_frames (N,), tokens (N, U), num_tokens (N,) -> (N,)."""
        log_prob = log_prob.float().transpose(0, 1)
        return F.ctc_loss(log_prob, tokens, num_frames, num_tokens, reduction="none", zero_infinity=True)


class K2Ctc(nn.Module):
    """CTC by k2: the same loss and gradient as torch's, from the intersection of a CTC graph with the frames.

    Args:
        output_beam: alignments that are worse than the best by more than this are dropped; a wide beam is exact.
    """

    def __init__(self, output_beam: float = 1e4) -> None:
        super().__init__()
        self.output_beam = output_beam

    def prepare(self, token_sequences: Sequence[Sequence[int]]) -> None:
        """Does nothing; CTC needs no statistics of transcripts."""

    def forward(self, log_prob: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> Tensor:
        """log_prob (N, T, C), num_frames (N,), tokens (N, U), num_tokens (N,) -> (N,)."""
        try:
            import k2
        except ImportError as error:
            raise AsrError(
                "K2Ctc needs k2, which is not installed; set objective to asr.models.losses.TorchCtc."
            ) from error
        # k2 expects the longest utterance first.
        order = torch.argsort(num_frames, descending=True)
        sequences = [tokens[i, : num_tokens[i]].tolist() for i in order.tolist()]
        graph = k2.ctc_graph(sequences, modified=False, device=log_prob.device)
        segments = torch.stack((torch.arange(len(order)), torch.zeros(len(order)), num_frames[order].cpu()), dim=1)
        frames = k2.DenseFsaVec(log_prob.float()[order], segments.to(torch.int32))
        lattice = k2.intersect_dense(graph, frames, output_beam=self.output_beam)
        score = lattice.get_tot_scores(log_semiring=True, use_double_scores=True).float()
        # -inf if no alignment fits the frames; it must not reach the gradient.
        loss = torch.where(torch.isfinite(score), -score, torch.zeros_like(score))
        return loss[torch.argsort(order)]


class CtcCrf(nn.Module):
    """CTC-CRF (Xiang and Ou, 2019), a lattice-free MMI: CTC normalized over all token sequences.

    The score of a path is the sum of its frames' log-probabilities and the log-probability of its tokens by a bigram of
    the transcripts. The denominator is computed exactly by a forward-backward pass with 2 C states (last token, whether
    the last frame was blank), in probabilities that are rescaled in each frame.

    Args:
        num_tokens: C, blank included.
        discount: subtracted from each bigram count and given to the unigram (absolute discounting).
        ctc_weight: weight of an added CTC loss, which keeps early training stable.

    Raises:
        AsrError: the discount is not above 0, so that a bigram that does not occur would be impossible.
    """

    bigram: Tensor  # (C, C): rows are previous tokens (0 at the beginning), columns next tokens (0 for the end)

    def __init__(self, num_tokens: int, discount: float = 0.5, ctc_weight: float = 0.1) -> None:
        super().__init__()
        if not discount > 0.0:
            raise AsrError(f"CtcCrf: discount is {discount}; give a number above 0, such as 0.5.")
        self.num_tokens = num_tokens
        self.discount = discount
        self.ctc_weight = ctc_weight
        self.ctc = TorchCtc()
        self.register_buffer("bigram", torch.full((num_tokens, num_tokens), 1.0 / num_tokens))

    def prepare(self, token_sequences: Sequence[Sequence[int]]) -> None:
        """Estimates the token bigram."""
        count = torch.zeros(self.num_tokens, self.num_tokens, dtype=torch.float64)
        for sequence in token_sequences:
            ids = torch.tensor([0, *sequence, 0])
            count.index_put_((ids[:-1], ids[1:]), torch.ones(len(ids) - 1, dtype=torch.float64), accumulate=True)
        unigram = (count.sum(0) + 1.0) / (count.sum() + self.num_tokens)
        kept = (count - self.discount).clamp(min=0.0)
        total = count.sum(1, keepdim=True)
        spread = torch.where(total > 0, 1.0 - kept.sum(1, keepdim=True) / total.clamp(min=1.0), torch.ones_like(total))
        self.bigram.copy_(kept / total.clamp(min=1.0) + spread * unigram)

    def forward(self, log_prob: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> Tensor:
        """log_prob (N, T, C), num_frames (N,), tokens (N, U), num_tokens (N,) -> (N,)."""
        numerator = self.ctc(log_prob, num_frames, tokens, num_tokens)
        before = torch.cat((tokens.new_zeros(len(tokens), 1), tokens), dim=1)
        after = torch.cat((tokens, tokens.new_zeros(len(tokens), 1)), dim=1)
        position = torch.arange(before.shape[1], device=tokens.device)
        token_score = self.bigram.log()[before, after] * (position <= num_tokens[:, None])
        denominator: Tensor = _LogPartition.apply(log_prob.float(), num_frames, self.bigram)
        loss = (1.0 + self.ctc_weight) * numerator - token_score.sum(1) + denominator
        # Utterances without an alignment must not train the denominator alone.
        return torch.where(numerator > 0, loss, loss.new_zeros(()))


class _LogPartition(torch.autograd.Function):
    """The log-sum over all CTC paths of frame and bigram scores, (N,); its gradient is the posterior of the paths."""

    @staticmethod
    def forward(ctx: Any, log_prob: Tensor, num_frames: Tensor, bigram: Tensor) -> Tensor:
        """log_prob (N, T, C) float32, num_frames (N,), bigram (C, C) -> (N,)."""
        frame_prob = log_prob.exp()
        valid = valid_frames(num_frames, log_prob.shape[1]).to(frame_prob.dtype)
        step = _Steps(bigram)
        blank, token, log_scale = step.start(frame_prob)
        history: list[tuple[Tensor, Tensor, Tensor]] = []
        for frame_idx in range(log_prob.shape[1]):
            keep = valid[:, frame_idx, None]
            new_blank, new_token = step.advance(blank, token, frame_prob[:, frame_idx])
            scale = (new_blank.sum(1, keepdim=True) + new_token.sum(1, keepdim=True)).clamp(min=1e-30)
            history.append((blank, token, scale))
            blank = torch.where(keep > 0, new_blank / scale, blank)
            token = torch.where(keep > 0, new_token / scale, token)
            log_scale = log_scale + scale.squeeze(1).log() * keep.squeeze(1)
        total = ((blank + token) * step.end).sum(1).clamp(min=1e-30)
        ctx.save_for_backward(_posterior(step, frame_prob, valid, history, total))
        return log_scale + total.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The posterior of each token in each frame, times the gradient of the value."""
        (posterior,) = ctx.saved_tensors
        return posterior * grad[:, None, None], None, None


class _Steps:
    """A frame of the forward and backward recursions; the state is (N, C) after a blank and (N, C) after the token."""

    def __init__(self, bigram: Tensor) -> None:
        self.next = bigram.clone()
        self.next[:, 0] = 0.0  # the end is not a transition
        self.end = bigram[:, 0]
        self.same = self.next.diagonal()

    def start(self, frame_prob: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The state before the first token, as after a blank."""
        blank = torch.zeros_like(frame_prob[:, 0])
        blank[:, 0] = 1.0
        return blank, torch.zeros_like(blank), blank.new_zeros(len(blank))

    def advance(self, blank: Tensor, token: Tensor, frame_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Forward probabilities after one more frame, frame_prob (N, C)."""
        reached = blank + token
        # A token is repeated only after a blank; without one it is the same token.
        entered = reached @ self.next - token * self.same + token
        return reached * frame_prob[:, :1], entered * frame_prob

    def retreat(self, blank: Tensor, token: Tensor, frame_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Backward probabilities before a frame, from those after it."""
        emitted = token * frame_prob
        behind_blank = blank * frame_prob[:, :1] + emitted @ self.next.T
        return behind_blank, behind_blank - emitted * self.same + emitted


def _posterior(
    step: _Steps, frame_prob: Tensor, valid: Tensor, history: list[tuple[Tensor, Tensor, Tensor]], total: Tensor
) -> Tensor:
    posterior = torch.zeros_like(frame_prob)
    after_blank = (step.end / total[:, None]).clone()
    after_token = after_blank.clone()
    for frame_idx in range(frame_prob.shape[1] - 1, -1, -1):
        blank, token, scale = history[frame_idx]
        keep = valid[:, frame_idx, None] > 0
        frame = frame_prob[:, frame_idx]
        new_blank, new_token = step.advance(blank, token, frame)
        occupancy = new_token * after_token / scale
        occupancy[:, 0] = (new_blank * after_blank / scale).sum(1)
        posterior[:, frame_idx] = torch.where(keep, occupancy, torch.zeros_like(occupancy))
        before_blank, before_token = step.retreat(after_blank, after_token, frame)
        after_blank = torch.where(keep, before_blank / scale, after_blank)
        after_token = torch.where(keep, before_token / scale, after_token)
    return posterior
