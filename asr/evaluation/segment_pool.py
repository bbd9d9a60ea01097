"""Frame log-probabilities that an acoustic model gave on real speech, cut into phones by forced alignment.

Shapes: M segments, F frames of all segments together, T frames of an utterance, C tokens, L phones.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from asr.am.ctc_alignment import align_ctc
from asr.errors import AsrError
from asr.text.tokens import BLANK_ID, TokenTable

# In a file, a log-probability is a multiple of -1/4, of which -12 is the least.
_STEPS_A_NAT = 4
_MOST_STEPS = 12 * _STEPS_A_NAT


@dataclass(frozen=True, eq=False)
class SegmentPool:
    """Segments of aligned speech. A segment begins with the first frame of its phone and ends before the next phone;
    the blanks before the first phone of an utterance are a segment of the blank.

    Args:
        tokens: the acoustic model's.
        log_prob: (F, C) float32.
        aligned: (F,) int64, the token that each frame reads: its segment's or the blank.
        begin: (M + 1,) int64, segment m has frames begin[m] : begin[m + 1].
        token_id: (M,) int64, the phone, or the blank at an utterance's beginning.
        left, right: (M,) int64, the phones beside it, the blank where there is none.
        ends_word: (M,) bool, whether a word ends with it.
    """

    tokens: TokenTable
    log_prob: NDArray[np.float32]
    aligned: NDArray[np.int64]
    begin: NDArray[np.int64]
    token_id: NDArray[np.int64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    ends_word: NDArray[np.bool_]

    @property
    def num_segments(self) -> int:
        return len(self.token_id)

    @classmethod
    def from_utterances(
        cls, tokens: TokenTable, utterances: Sequence[tuple[NDArray[np.float32], Sequence[Sequence[str]]]]
    ) -> SegmentPool:
        """Aligns utterances and cuts them up.

        Args:
            tokens: the acoustic model's.
            utterances: log_prob (T, C) and the pronunciation of each word; an utterance with fewer frames than its
                phones need is left out.

        Raises:
            AsrError: no utterance could be aligned.
        """
        frames, aligned, length, parts = [], [], [], []
        for log_prob, words in utterances:
            phones = np.array([token for word in words for token in tokens.ids_of(word)], dtype=np.int64)
            position, found = align_ctc(
                torch.from_numpy(log_prob)[None],
                torch.tensor([len(log_prob)]),
                torch.from_numpy(phones)[None],
                torch.tensor([len(phones)]),
            )
            if not found or not len(phones):
                continue
            path = position[0].numpy()
            first = np.array([np.flatnonzero(path == position)[0] for position in range(len(phones))])
            bounds = np.concatenate(([0], first, [len(path)]))
            context = np.concatenate(([BLANK_ID, BLANK_ID], phones, [BLANK_ID]))
            ends = np.zeros(len(phones) + 1, dtype=bool)
            ends[np.cumsum([len(word) for word in words])] = True
            chosen = np.flatnonzero(np.diff(bounds) > 0)
            length.append(np.diff(bounds)[chosen])
            parts.append(np.stack([context[1:-1], context[:-2], context[2:], ends])[:, chosen])
            frames.append(log_prob)
            aligned.append(np.where(path < 0, BLANK_ID, phones[path]))
        if not frames:
            raise AsrError(
                "no utterance could be aligned with its transcript; check that text and audio belong together."
            )
        token_id, left, right, ends_word = np.concatenate(parts, axis=1)
        begin = np.concatenate(([0], np.cumsum(np.concatenate(length))))
        return cls(
            tokens,
            np.concatenate(frames),
            np.concatenate(aligned),
            begin,
            token_id,
            left,
            right,
            ends_word.astype(bool),
        )

    def save(self, path: str | Path) -> None:
        """Writes an xz-compressed npz; log-probabilities in steps of 1/4, from -12 on."""
        steps = np.clip(np.rint(-self.log_prob * _STEPS_A_NAT), 0, _MOST_STEPS).astype(np.uint8)
        content = io.BytesIO()
        np.savez(
            content,
            tokens=np.array(self.tokens.tokens[1:]),
            # Columns lie together, so that neighbours are alike.
            steps=np.ascontiguousarray(steps.T),
            aligned=self.aligned.astype(np.uint8 if len(self.tokens) <= 256 else np.int32),
            begin=self.begin.astype(np.int32),
            context=np.stack([self.token_id, self.left, self.right, self.ends_word]).astype(np.int16),
        )
        Path(path).write_bytes(lzma.compress(content.getvalue(), preset=9 | lzma.PRESET_EXTREME))

    @classmethod
    def load(cls, path: str | Path) -> SegmentPool:
        """Reads what `save` wrote.

        Raises:
            AsrError: the file is missing, damaged, or no pool.
        """
        try:
            with np.load(io.BytesIO(lzma.decompress(Path(path).read_bytes()))) as archive:
                token_id, left, right, ends_word = archive["context"].astype(np.int64)
                return cls(
                    TokenTable(archive["tokens"].tolist(), name=str(path)),
                    np.ascontiguousarray(archive["steps"].T).astype(np.float32) * np.float32(-1.0 / _STEPS_A_NAT),
                    archive["aligned"].astype(np.int64),
                    archive["begin"].astype(np.int64),
                    token_id,
                    left,
                    right,
                    ends_word.astype(bool),
                )
        except OSError as error:
            raise AsrError(f"{path}: the pool of segments cannot be read ({error.strerror or error}).") from error
        except (lzma.LZMAError, ValueError, KeyError) as error:
            raise AsrError(
                f"{path}: this is no pool of segments ({error}); make it with simulate_frames.py."
            ) from error
