"""Streaming CTC decoding.

Shapes: T frames of a chunk, C tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asr.ctc.frames import FrameInput, as_frames
from asr.ctc.graph_search import Converted, GraphSearch
from asr.ctc.interface import CTCHypothesis, no_hypothesis
from asr.ctc.prefix_beam import read_chunks
from asr.ctc.prefix_search import PrefixSearch, Spelled
from asr.errors import AsrError
from asr.graph.topology import with_last_boundary
from asr.kernels.jit import uncompiled
from asr.kernels.memory import no_autograd
from asr.lm.interface import LanguageModel
from asr.text.ctc_tokens import CTCTokens


class CTCStream:
    """Decodes one utterance in chunks of any size; made by `CTCDecoder.stream`.

    With a word list, a second language model always acts inside the search, unlike for whole utterances, whose lattice
    it rescores unless `lm_fusion="search"`.

    Args:
        search: the decoder's search.
        tokens, inputs, device: the decoder's.
        commit_frames: see `CTCDecoder.stream`.
    """

    def __init__(
        self,
        search: GraphSearch | PrefixSearch,
        tokens: CTCTokens,
        inputs: FrameInput,
        device: torch.device,
        commit_frames: int | None,
    ) -> None:
        self._tokens, self._inputs, self._device = tokens, inputs, device
        self._num_frames = 0
        self._is_open = True
        self._loan = search.models.loan()
        self._reader: _GraphStream | _TokenStream
        with self._loan.turn():
            if isinstance(search, GraphSearch):
                self._reader = _GraphStream(search, self._loan.model, commit_frames)
            else:
                self._reader = _TokenStream(search, self._loan.model)

    @property
    def num_frames(self) -> int:
        """The number of frames read so far."""
        return self._num_frames

    @uncompiled
    def accept(self, log_probs: Any) -> None:
        """Reads the next frames (T, C), in the forms that a call of the decoder takes; T may be 0.

        Raises:
            AsrError: the width is wrong, values are not log-probabilities, or the stream has ended.
        """
        self._require_open()
        frames = as_frames(log_probs, None, self._tokens, self._inputs, self._device, checks_blank=False)
        if not frames.is_single:
            raise AsrError("a stream reads one utterance; give (frames, tokens), and open a stream for each utterance.")
        if len(frames.log_prob[0]):
            with self._loan.turn():
                self._reader.accept(frames.log_prob)
        self._num_frames += len(frames.log_prob[0])

    @uncompiled
    def partial(self) -> CTCHypothesis:
        """The best hypothesis so far."""
        self._require_open()
        with no_autograd():
            return self._reader.partial(self._num_frames)

    @property
    def num_stable_words(self) -> int:
        """The number of leading words of `partial` that can no longer change."""
        self._require_open()
        return self._reader.num_stable_words()

    @uncompiled
    def finish(self) -> CTCHypothesis:
        """Ends the stream and returns the best hypothesis."""
        self._require_open()
        self._is_open = False
        with self._loan.turn():
            found = self._reader.finish(self._num_frames)
            del self._reader
            self._loan.give_back()
        return found

    def _require_open(self) -> None:
        if not self._is_open:
            raise AsrError("the stream has ended; open another one.")


class _GraphStream:
    def __init__(self, search: GraphSearch, lm: LanguageModel | None, commit_frames: int | None) -> None:
        self._search = search
        self._decoder = search.stream(lm, commit_frames)
        (self._number,) = self._decoder.start()
        # The last partial result: the next one has most of it in common.
        self._last: Converted | None = None

    def accept(self, log_prob: torch.Tensor) -> None:
        self._decoder.advance([self._number], log_prob, torch.tensor([log_prob.shape[1]]))

    def partial(self, num_frames: int) -> CTCHypothesis:
        hypothesis = self._decoder.partial(self._number)
        if hypothesis is None:
            return no_hypothesis()
        self._last = self._search.as_ctc_hypothesis(hypothesis, num_frames, False, self._last)
        return self._last.hypothesis

    def num_stable_words(self) -> int:
        return self._decoder.num_settled_words(self._number)

    def finish(self, num_frames: int) -> CTCHypothesis:
        graph = self._search.graph
        no_frames = torch.zeros((1, 0, len(graph.tokens)), dtype=torch.float32, device=graph.device)
        last, num = with_last_boundary(no_frames, torch.zeros(1, dtype=torch.int64), self._search.boundary_id)
        if int(num[0]):
            self._decoder.advance([self._number], last, num)
        result = self._decoder.finalize(self._number)
        if result.best is None:
            return no_hypothesis()
        return self._search.as_ctc_hypothesis(result.best, num_frames, result.reached_final, self._last).hypothesis


class _TokenStream:
    def __init__(self, search: PrefixSearch, lm: LanguageModel | None) -> None:
        self._search, self._lm = search, lm
        self._beam = search.start(self._lm)
        # The last partial result: the next one has most of it in common.
        self._spelled = Spelled()
        # The words that can no longer change, and where the next one begins in all prefixes.
        self._num_stable, self._word_begin = 0, 0

    def accept(self, log_prob: torch.Tensor) -> None:
        read_chunks([self._beam], [np.ascontiguousarray(log_prob[0].cpu().numpy())], self._lm)

    def partial(self, num_frames: int) -> CTCHypothesis:
        found, self._spelled = self._search.partial(self._beam, self._spelled)
        return found

    def num_stable_words(self) -> int:
        path = self._beam.shared_path()
        if len(path) > self._word_begin:
            shared = self._beam.prefixes.char[path[self._word_begin :]]
            words = self._search.groups(shared.tolist())
            if len(words) > 1:
                # The last one may still grow.
                self._num_stable += len(words) - 1
                self._word_begin += words[-1][0]
        return self._num_stable

    def finish(self, num_frames: int) -> CTCHypothesis:
        return self._search.hypotheses(self._beam, self._lm, 1)[0]
