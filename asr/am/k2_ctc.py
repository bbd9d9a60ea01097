"""CTC by k2: the same value and gradient as torch's, through k2's differentiable intersection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from asr.errors import AsrError


class K2Ctc(nn.Module):
    """Minus the log-likelihood of the tokens, from the total score of k2's CTC graph met with the frames.

    Args:
        output_beam: alignments worse than the best by more are left out; a wide beam is exact.
    """

    def __init__(self, output_beam: float = 1e4) -> None:
        super().__init__()
        self.output_beam = output_beam

    def prepare(self, token_sequences: Sequence[Sequence[int]]) -> None:
        """Nothing to learn from transcripts."""

    def forward(self, log_prob: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> Tensor:
        """log_prob (N, T, C), num_frames (N,), tokens (N, U), num_tokens (N,) -> (N,)."""
        try:
            import k2
        except ImportError as error:
            raise AsrError(
                "K2Ctc needs k2, which is not installed; set objective to asr.am.torch_ctc.TorchCtc."
            ) from error
        # k2 wants the longest utterance first.
        order = torch.argsort(num_frames, descending=True)
        sequences = [tokens[i, : num_tokens[i]].tolist() for i in order.tolist()]
        graph = k2.ctc_graph(sequences, modified=False, device=log_prob.device)
        segments = torch.stack((torch.arange(len(order)), torch.zeros(len(order)), num_frames[order].cpu()), dim=1)
        frames = k2.DenseFsaVec(log_prob.float()[order], segments.to(torch.int32))
        lattice = k2.intersect_dense(graph, frames, output_beam=self.output_beam)
        score = lattice.get_tot_scores(log_semiring=True, use_double_scores=True).float()
        # No alignment fits into the frames: -inf, which must not reach the gradient.
        loss = torch.where(torch.isfinite(score), -score, torch.zeros_like(score))
        return loss[torch.argsort(order)]
