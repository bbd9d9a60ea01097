"""A decoder of transducers of others, with the same networks: torchaudio's. ImportError where it is not installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from asr.models.transducers.base import Transducer

States = list[list[Tensor]]


class _AsTorchaudio(nn.Module):
    """A transducer with the methods of `torchaudio.models.RNNT` that the search calls; its blank comes last."""

    def __init__(self, network: Transducer) -> None:
        super().__init__()
        self._network = network
        blank = network.tokens.blank_id
        self.columns = [*(column for column in range(len(network.tokens)) if column != blank), blank]

    def transcribe(self, encoded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """What it gets is encoded already."""
        return encoded, lengths

    def predict(self, targets: Tensor, lengths: Tensor, state: States | None = None) -> tuple[Tensor, Tensor, States]:
        """Tokens (K, 1) -> outputs (K, 1, P), lengths, states."""
        if state is None:
            predicted, new = self._network.start()
        else:
            columns = torch.tensor([self.columns[token] for token in targets[:, 0].tolist()])
            predicted, new = self._network.predict(columns, tuple(part[0] for part in state))
        return predicted[:, None], lengths, [[part] for part in new]

    def join(
        self, encoded: Tensor, encoded_lengths: Tensor, predicted: Tensor, predicted_lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A frame (1, 1, E) and outputs (K, 1, P) -> logits (K, 1, 1, C)."""
        logits = self._network.join(encoded[0].expand(len(predicted), -1), predicted[:, 0])
        return logits[:, None, None, self.columns], encoded_lengths, predicted_lengths


def torchaudio(network: Transducer, by_length: bool) -> Callable[[int], Callable[[Tensor], list[int]]]:
    """torchaudio.models.RNNTBeamSearch; the beam is `beam_width`, and what it finds are columns.

    Args:
        network: a transducer without durations.
        by_length: whether a hypothesis' score is divided by its number of tokens, as by default.
    """
    adapted = _AsTorchaudio(network)
    settings: dict[str, Any] = {} if by_length else {"hypo_sort_key": lambda hypothesis: hypothesis[3]}
    search = importlib.import_module("torchaudio.models").RNNTBeamSearch(adapted, len(adapted.columns) - 1, **settings)

    def with_beam(beam_width: int) -> Callable[[Tensor], list[int]]:
        @torch.no_grad()
        def decode(encoded: Tensor) -> list[int]:
            found = search(encoded, torch.tensor([len(encoded)]), beam_width)
            best = found[0] if by_length else max(found, key=lambda hypothesis: hypothesis[3])
            return [adapted.columns[token] for token in best[0][1:]]

        return decode

    return with_beam
