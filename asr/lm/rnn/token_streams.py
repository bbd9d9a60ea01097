"""A token file cut into parallel streams: batch after batch, each stream reads on where it stopped.

Shapes: B streams, T steps, M history words.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from asr.text.vocabulary import BOS_ID, EOS_ID, EPSILON_ID


class TokenBatch(NamedTuple):
    """T words of B streams.

    Attributes:
        input_id: the word before each target, `<s>` at the start of a sentence, (B, T) int64.
        target_id: the word to predict, (B, T) int64.
        history: the last M words before each target, newest first, (B, T, M) int64.
        is_start: a sentence starts here, (B, T) bool.
        is_first: these are the streams' first words: no state to carry in.
    """

    input_id: Tensor
    target_id: Tensor
    history: Tensor
    is_start: Tensor
    is_first: bool


class TokenStreams(Dataset[TokenBatch]):
    """Item i is the i-th window of `num_steps` words in each of `num_streams` equal, contiguous parts of the text.

    What does not fill the last window of all streams is left out (fewer than num_streams * num_steps words). A text
    too short for the streams gets fewer streams.
    """

    def __init__(self, token_id: NDArray[np.int32], num_streams: int, num_steps: int, num_history_words: int) -> None:
        self.token_id = token_id
        self.num_steps = min(num_steps, len(token_id))
        self.num_streams = max(1, min(num_streams, len(token_id) // self.num_steps))
        self.num_history_words = num_history_words
        self.stream_length = len(token_id) // self.num_streams

    def __len__(self) -> int:
        return self.stream_length // self.num_steps

    def __getitem__(self, batch_idx: int) -> TokenBatch:
        if not 0 <= batch_idx < len(self):
            raise IndexError(batch_idx)
        num_before = max(1, self.num_history_words)
        stream_begin = np.arange(self.num_streams)[:, None] * self.stream_length
        position = np.arange(-num_before, self.num_steps)[None, :] + batch_idx * self.num_steps
        # What lies before a stream's first word counts as the end of a sentence.
        window = np.where(position < 0, EOS_ID, self.token_id[stream_begin + np.maximum(position, 0)])
        tokens = torch.from_numpy(window.astype(np.int64))
        history = history_of(tokens, num_before, self.num_history_words)
        previous_id = tokens[:, num_before - 1 : -1]
        is_start = previous_id == EOS_ID
        input_id = torch.where(is_start, BOS_ID, previous_id)
        return TokenBatch(input_id, tokens[:, num_before:], history, is_start, batch_idx == 0)


def history_of(token_id: Tensor, num_before: int, num_history_words: int) -> Tensor:
    """The histories of all but the first `num_before` columns of token_id (B, num_before + T), in the same sentence.

    Returns:
        (B, T, M), newest first: `<s>` where the sentence started, `<eps>` before it.
    """
    num_steps = token_id.shape[1] - num_before
    history = token_id.new_full((token_id.shape[0], num_steps, num_history_words), EPSILON_ID)
    in_sentence = torch.ones_like(history[..., :1]).squeeze(-1).bool()
    for age in range(num_history_words):
        column = token_id[:, num_before - 1 - age : num_before - 1 - age + num_steps]
        is_end = column == EOS_ID
        history[..., age] = torch.where(in_sentence, torch.where(is_end, BOS_ID, column), EPSILON_ID)
        in_sentence = in_sentence & ~is_end
    return history
