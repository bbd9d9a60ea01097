"""Beam search for attention-based encoder-decoders, token by token, with a language model inside.

In each step, every hypothesis ends or is extended by a token, and the best extensions of each utterance stay
(Sutskever, Vinyals and Le, Sequence to sequence learning with neural networks, NIPS 2014). All utterances advance
together: each step runs the decoder once and asks the language model once. An utterance keeps the same number of rows
of the decoder while it lasts, so that what its rows have read of the encoder stays where it is.

Shapes: N utterances, T frames, E encoder dimensions, M rows of hypotheses, C tokens, Q extensions.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asr.attention.interface import AttentionDecodingConfig
from asr.errors import AsrError
from asr.fusion.beam import CANDIDATES, Fusion, Growing
from asr.fusion.interface import Finished, FloatArray, IntArray
from asr.models.attention import AttentionModel

BoolArray = npt.NDArray[np.bool_]
_STEPS_BETWEEN_MARKS = 16
# Tokens that the shortest text may have, whatever its length in seconds.
_FEWEST_TOKENS = 10


class _Rows(NamedTuple):
    """Hypotheses, B of each utterance; those with a score of -inf stand for none.

    Attributes:
        utt: (M,) the utterance.
        node: (M,) the last token, a node of `_Tree`.
        am_score: (M,) of the network.
        lm_score: (M,) of the language model, unscaled.
        place, context, bonus: as for `asr.fusion.beam.Growing`.
        guess: as for `asr.fusion.scores.Extension`.
    """

    utt: IntArray
    node: IntArray
    am_score: FloatArray
    lm_score: FloatArray
    place: IntArray
    context: IntArray
    bonus: FloatArray
    guess: FloatArray


class _Ended(NamedTuple):
    """A text that has ended: what it is compared by, its last node in the tree, and its scores."""

    rank: float
    node: int
    am_score: float
    lm_score: float
    total: float


class _Tree:
    """The tokens of all hypotheses; node 0 is before the first token."""

    def __init__(self) -> None:
        self._parent, self._entry = [np.zeros(1, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
        self._num = 1

    def add(self, parent: IntArray, entry: IntArray) -> IntArray:
        """Adds a token after each of some nodes -> their nodes."""
        self._parent.append(parent)
        self._entry.append(entry)
        added = self._num + np.arange(len(parent))
        self._num += len(parent)
        return added

    def paths(self, nodes: list[int]) -> list[IntArray]:
        """The tokens up to each node."""
        parent, entry = np.concatenate(self._parent).tolist(), np.concatenate(self._entry)
        found = []
        for node in nodes:
            path = []
            while node:
                path.append(node)
                node = parent[node]
            found.append(entry[path[::-1]])
        return found


class AttentionBeam:
    """The search of some utterances.

    Args:
        network: the attention model.
        fusion: scores and selects hypotheses.
        config: scales and beams.
    """

    def __init__(self, network: AttentionModel, fusion: Fusion, config: AttentionDecodingConfig) -> None:
        self._network, self._fusion, self._config = network, fusion, config
        columns = np.array(network.tokens.columns, dtype=np.int64)
        self._entry_of, self._column_of = np.argsort(columns), columns
        self._end = network.tokens.blank_id

    def search(self, encoded: Tensor, num_frames: IntArray) -> list[list[Finished]]:
        """The hypotheses of each utterance, encoded (N, T, E) and (N,), best first."""
        network, fusion, num_utts = self._network, self._fusion, len(encoded)
        is_empty = num_frames == 0
        if is_empty.any():  # attention to no frame is not defined
            encoded = torch.nn.functional.pad(encoded, (0, 0, 0, max(0, 1 - encoded.shape[1]))).clone()
            encoded[torch.from_numpy(is_empty)] = 0.0
        size = int(self._config.beam_size)
        limit = self._limits(num_frames)
        tree = _Tree()
        ended: list[list[_Ended]] = [[] for _ in range(num_utts)]
        zeros, nothing = np.zeros(num_utts), np.zeros(num_utts, dtype=np.int64)
        rows = _Rows(np.arange(num_utts), nothing, zeros, zeros, nothing, fusion.start(num_utts), zeros, zeros)
        frames = torch.from_numpy(num_frames).clamp(min=1)
        prompt = network.prompt(encoded, frames)
        logits, state = network.start(encoded, frames, prompt)
        internal, silent_state = self._start_silently(encoded, prompt)
        is_live = ~is_empty
        for step in range(int(limit.max(initial=0)) + 1):
            log_prob = self._log_prob(logits, step)
            inner = None if internal is None else internal.log_softmax(1)
            self._end_texts(rows, step, log_prob, inner, ended)
            is_live = is_live & (step < limit) & ~self._is_done(rows, step, ended)
            if not is_live.any():
                break
            rows, source, token = self._extended(rows, is_live, log_prob, inner, tree)
            device = network.device
            source, token = source.to(device), token.to(device)
            logits, state = network.step(token, source, state)
            if internal is not None:
                internal, silent_state = network.step(token, source, silent_state)
            if step % _STEPS_BETWEEN_MARKS == 0:
                fusion.retain(rows.context)
        return [_found(tree, each, size) for each in ended]

    def _limits(self, num_frames: IntArray) -> IntArray:
        """The most tokens of each utterance, (N,)."""
        seconds = num_frames * self._network.frame_shift
        most = np.ceil(np.minimum(seconds * self._config.max_tokens_per_second, float(self._network.max_tokens)))
        return np.minimum(np.maximum(most, _FEWEST_TOKENS), self._network.max_tokens).astype(np.int64)

    def _start_silently(self, encoded: Tensor, prompt: Tensor) -> tuple[Tensor | None, object]:
        """The internal language model: the decoder with an encoder output of zeros."""
        if not self._config.internal_lm_scale:
            return None, None
        silence = encoded.new_zeros(len(encoded), 1, encoded.shape[2])
        return self._network.start(silence, torch.ones(len(encoded), dtype=torch.int64), prompt)

    def _log_prob(self, logits: Tensor, step: int) -> Tensor:
        name, num_tokens = self._network.name, len(self._network.tokens)
        if logits.dim() != 2 or logits.shape[1] != num_tokens:
            raise AsrError(
                f"{name}: the decoder returned {tuple(logits.shape)} for {num_tokens} tokens; give the network's own."
            )
        log_prob = logits.float().log_softmax(1)
        if bool(log_prob[:, self._end].isnan().any()):
            raise AsrError(f"{name}: the decoder returned NaN after {step} tokens; check its weights.")
        return log_prob

    def _end_texts(
        self,
        rows: _Rows,
        step: int,
        log_prob: Tensor,
        inner: Tensor | None,
        ended: list[list[_Ended]],
    ) -> None:
        """Adds what ends here: for each utterance, rank, node, acoustic score, language model score and total."""
        alive = np.flatnonzero(rows.am_score > -np.inf)
        am_score = rows.am_score[alive] + _host(log_prob[:, self._end])[alive]
        lm_score, gain = self._fusion.finish(rows.place[alive], rows.context[alive])
        if inner is not None:
            gain = gain - float(self._config.internal_lm_scale or 0.0) * _host(inner[:, self._end])[alive]
        total = am_score + rows.bonus[alive] + gain
        lm_score = rows.lm_score[alive] + lm_score
        rank = self._config.rank(total, step)
        for place in np.flatnonzero(total > -np.inf).tolist():
            row = int(alive[place])
            scores = float(am_score[place]), float(lm_score[place]), float(total[place])
            ended[rows.utt[row]].append(_Ended(float(rank[place]), int(rows.node[row]), *scores))

    def _is_done(self, rows: _Rows, step: int, ended: list[list[_Ended]]) -> BoolArray:
        """Whether as many texts have ended in each utterance as survive a step, and no other is better now, (N,)."""
        rank = self._config.rank(rows.am_score + rows.bonus + rows.guess, step)
        best = np.full(len(ended), -np.inf)
        np.maximum.at(best, rows.utt, rank)
        size = int(self._config.beam_size)
        worst = [heapq.nlargest(size, each)[-1].rank if len(each) >= size else -math.inf for each in ended]
        return best <= np.array(worst)

    def _extended(
        self,
        rows: _Rows,
        is_live: BoolArray,
        log_prob: Tensor,
        inner: Tensor | None,
        tree: _Tree,
    ) -> tuple[_Rows, Tensor, Tensor]:
        """The surviving extensions as new rows, the row that each comes from (M,), and the token's column (M,)."""
        size, end = int(self._config.beam_size), self._end
        log_prob[:, end] = -torch.inf
        value, column = (_host(each) for each in log_prob.topk(min(CANDIDATES * size, log_prob.shape[1] - 1), 1))
        may_grow = is_live[rows.utt] & (rows.am_score > -np.inf)
        source, rank = np.nonzero((value >= self._config.token_min_log_prob) & may_grow[:, None])
        chosen = column[source, rank].astype(np.int64)
        am_score, entry = rows.am_score[source] + value[source, rank], self._entry_of[chosen]
        gain = None
        if inner is not None:
            picked = inner[torch.from_numpy(source).to(inner.device), torch.from_numpy(chosen).to(inner.device)]
            gain = -float(self._config.internal_lm_scale or 0.0) * _host(picked)
        growing = Growing(rows.utt[source], rows.place[source], rows.context[source], rows.bonus[source])
        extended = self._fusion.extend(growing, entry, am_score, gain)
        kept = extended.kept
        own_utt = rows.utt[source[kept]]
        place = np.arange(len(kept)) - np.searchsorted(own_utt, own_utt)  # among those of the utterance
        # All utterances have the same number of rows; those that are not needed repeat the first one.
        width = max(int(np.bincount(rows.utt).max()), 1 + int(place.max(initial=0)))
        utt = np.repeat(self._kept_utts(rows, is_live), width)
        first = np.searchsorted(rows.utt, utt)
        parent, token = first.copy(), np.full(len(utt), end)
        new = _Rows(
            utt,
            np.zeros(len(utt), dtype=np.int64),
            np.full(len(utt), -np.inf),
            np.zeros(len(utt)),
            np.zeros(len(utt), dtype=np.int64),
            rows.context[first],
            np.zeros(len(utt)),
            np.zeros(len(utt)),
        )
        place += np.searchsorted(utt, own_utt)
        parent[place], token[place] = source[kept], chosen[kept]
        new.node[place] = tree.add(rows.node[source[kept]], entry[kept])
        new.am_score[place] = am_score[kept]
        new.lm_score[place] = rows.lm_score[source[kept]] + extended.lm_score
        new.place[place], new.context[place] = extended.place, extended.context
        new.bonus[place], new.guess[place] = extended.bonus, extended.guess
        return new, torch.from_numpy(parent), torch.from_numpy(token)

    def _kept_utts(self, rows: _Rows, is_live: BoolArray) -> IntArray:
        """The utterances with rows: those that go on, and others too unless that would be twice as many."""
        utts = np.unique(rows.utt)
        live = utts[is_live[utts]]
        return live if 2 * len(live) <= len(utts) else utts


def _found(tree: _Tree, ended: list[_Ended], num: int) -> list[Finished]:
    """The best texts of an utterance."""
    best = heapq.nlargest(num, ended)
    entries = tree.paths([each.node for each in best])
    return [
        Finished(own, np.zeros(len(own), dtype=np.int64), each.am_score, each.lm_score, each.total)
        for own, each in zip(entries, best, strict=True)
    ]


def _host(values: Tensor) -> FloatArray:
    return values.double().cpu().numpy()
