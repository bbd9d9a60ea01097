"""Change of sampling rate and filterbanks while the samples still come: what comes out is that of the whole recording.

Both keep the samples that outputs to come depend on, and run the whole-recording code over them. Shapes: L samples, T
frames, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.data.fbank import Fbank
from asr.data.resampling import block_sizes, resample


class ResampleStream:
    """`resample` in pieces.

    Args:
        old_rate, new_rate: in Hz.
    """

    def __init__(self, old_rate: int, new_rate: int) -> None:
        self._old_rate, self._new_rate = old_rate, new_rate
        self._old, self._new, reach = block_sizes(old_rate, new_rate)
        self._margin = -(-reach // self._old)
        self._held = torch.zeros(0)
        # Blocks before what is held, and blocks that have been given out.
        self._first_block = 0
        self._next_block = 0

    def push(self, samples: Tensor, is_last: bool = False) -> Tensor:
        """(L,) more samples -> (L',) all that can be said by now; after the last ones, all the rest."""
        if self._old == self._new:
            return samples
        self._held = torch.cat([self._held, samples])
        num_blocks = self._first_block + len(self._held) // self._old - self._margin
        if not is_last and num_blocks <= self._next_block:
            return samples[:0]
        out = resample(self._held, self._old_rate, self._new_rate)
        begin = (self._next_block - self._first_block) * self._new
        ready = out[begin:] if is_last else out[begin : (num_blocks - self._first_block) * self._new]
        self._next_block = max(self._next_block, num_blocks)
        first = max(self._first_block, self._next_block - self._margin)
        self._held = self._held[(first - self._first_block) * self._old :]
        self._first_block = first
        return ready


class FeatureStream:
    """Filterbanks in pieces.

    Args:
        fbank: what makes them; without dither, or the pieces are not those of the whole.
    """

    def __init__(self, fbank: Fbank) -> None:
        self._fbank = fbank
        # Frames recomputed before the first new one, whose window must lie in what is held.
        self._margin = -(-fbank.frame_length // fbank.frame_shift)
        self._held = torch.zeros(0)
        self._first_frame = 0
        self._next_frame = 0

    def push(self, samples: Tensor, is_last: bool = False) -> Tensor:
        """(L,) more samples -> (T, F) the frames that can be told by now; after the last ones, all the rest."""
        fbank = self._fbank
        self._held = torch.cat([self._held, samples])
        if is_last:
            num_frames = self._first_frame + int(fbank.num_frames(torch.tensor(len(self._held))))
        else:
            whole = (len(self._held) - fbank.frame_length) // fbank.frame_shift + 1
            num_frames = self._first_frame + max(0, whole)
        if num_frames <= self._next_frame:
            return torch.zeros(0, fbank.feature_dim)
        held = self._held.to(fbank.window.device)
        features = fbank(held.unsqueeze(0), torch.tensor([len(held)]))[0][0]
        new = features[self._next_frame - self._first_frame : num_frames - self._first_frame]
        self._next_frame = num_frames
        first = max(self._first_frame, num_frames - self._margin)
        self._held = self._held[(first - self._first_frame) * fbank.frame_shift :]
        self._first_frame = first
        return new
