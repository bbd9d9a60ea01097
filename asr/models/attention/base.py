"""The interface of attention-based encoder-decoders, and how they are named.

Such a model has two networks. The encoder reads the audio. The decoder reads the tokens so far and, by attention, the
encoder's output, and scores the next token or the end of the text (Chan et al., Listen, attend and spell, ICASSP 2016;
Vaswani et al., Attention is all you need, NIPS 2017).

Shapes: N utterances, L samples, T frames, E encoder dimensions, P tokens of a prompt, K hypotheses, C tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

import torch
from torch import Tensor

from asr.kernels.memory import on_cpu_by_default
from asr.models.external.base import load_kind
from asr.models.external.encoder import ExternalEncoder
from asr.text.ctc_tokens import CTCTokens

KINDS = {
    "transformers": "an AutoModelForSpeechSeq2Seq of transformers, a hub name or a local folder, such as "
    "transformers:openai/whisper-small",
}
"""The kinds of models: what may precede the colon of a name, and what follows it."""


class AttentionModel(ExternalEncoder):
    """An attention-based encoder-decoder and its tokens; see also `ExternalEncoder`.

    Attributes:
        tokens: the columns of the decoder's output; what `CTCTokens` calls the blank is the end of the text.
        max_tokens: of a text.
        max_seconds: of audio that it reads at a time; None for any length.
    """

    tokens: CTCTokens
    max_tokens: int = 400
    max_seconds: float | None = None

    @property
    def reads_lengths(self) -> bool:
        """Whether the decoder leaves out padding; if not, utterances of different lengths are decoded one by one."""
        return True

    def prompt(self, encoded: Tensor, num_frames: Tensor) -> Tensor:
        """The tokens before the text, (N, P) int64 columns, given encoded (N, T, E) and (N,); by default none."""
        return torch.zeros(len(encoded), 0, dtype=torch.int64, device=encoded.device)

    @abstractmethod
    def start(self, encoded: Tensor, num_frames: Tensor, prompt: Tensor) -> tuple[Tensor, Any]:
        """Reads prompts (N, P) for encoded (N, T, E) and frames (N,) on the host.

        Returns:
            Logits (N, C) of the first token, -inf for those that must not occur, and the decoder's state: N rows of
            what it has read.
        """

    @abstractmethod
    def step(self, token: Tensor, source: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Reads a token after each of some rows.

        Args:
            token: (K,) int64 columns.
            source: (K,) int64, the row of the state that each token follows.
            state: the decoder's; it may be changed.

        Returns:
            Logits (K, C) of the next token, and the state: K rows.
        """

    def no_speech(self, state: Any) -> Tensor | None:
        """The probability that nobody speaks, (N,), by the state that `start` returned; None if it is unknown."""
        return None

    def attention(self, encoded: Tensor, num_frames: Tensor, prompt: Tensor, token: Tensor) -> Tensor | None:
        """How much the decoder attends to each frame when it writes a text, from which times of words are found.

        Args:
            encoded: (N, T, E).
            num_frames: (N,).
            prompt: (N, P).
            token: (N, U) columns of the text's tokens, padded.

        Returns:
            Weights (H, N, U + 1, T) of H heads for each token and the one after the last, or None if unknown.
        """
        return None


@on_cpu_by_default()
def load_attention_model(name: str, **options: Any) -> AttentionModel:
    """Loads the model named `KIND:NAME`, see `KINDS`; options are passed on to its class.

    Raises:
        AsrError: there is no such kind, its package is missing, or the model cannot be read.
    """
    return cast(AttentionModel, load_kind(name, KINDS, "asr.models.attention", "an attention model", options))
