"""CTC decoding without a word list: finds any sequence of tokens, with or without a language model of tokens.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from asr.ctc.frames import Frames
from asr.ctc.interface import CTCDecodingConfig, CTCHypothesis, CTCToken, CTCWord, no_hypothesis
from asr.ctc.language_models import LentModels
from asr.ctc.prefix_beam import IntArray, PrefixBeam, ask_final, in_order, read_chunks
from asr.ctc.prefix_kernel import WORD_MARK, Rules
from asr.errors import AsrError
from asr.lm.interface import LanguageModel
from asr.text.ctc_tokens import CTCTokens
from asr.text.normalize import written_as
from asr.text.symbols import UNK_ID, Vocabulary

_LOGGER = logging.getLogger(__name__)


class Spelled(NamedTuple):
    """The tokens and words of a prefix of L tokens.

    Attributes:
        rows: (3, L) int64, the tokens' entries in the table, first frames, and frames after the last ones.
        tokens: the same as objects.
        spans: positions of the first token of each word, and after its last one.
        words: the words.
    """

    rows: IntArray = np.zeros((3, 0), dtype=np.int64)
    tokens: Sequence[CTCToken] = ()
    spans: Sequence[tuple[int, ...]] = ()
    words: Sequence[CTCWord] = ()


class PrefixSearch:
    """Prefix beam search over tokens.

    Args:
        tokens: the network's tokens.
        config: scales and beams.
        models: language models of tokens, or none.
        frame_shift: seconds from one frame to the next, or None.
        compiled: whether to compile the loops if numba is installed.

    Raises:
        AsrError: the language model has none of the tokens, or not the word boundary.
    """

    def __init__(
        self,
        tokens: CTCTokens,
        config: CTCDecodingConfig,
        models: LentModels,
        frame_shift: float | None,
        compiled: bool = True,
    ) -> None:
        self.tokens = tokens
        self._config = config
        self.models = models
        self._frame_shift = frame_shift
        self._compiled = compiled
        with models.lent() as lm:
            self._rules = token_rules(tokens, config, None if lm is None else lm.vocabulary)
        written = [_written(tokens, entry) for entry in range(len(tokens.table))]
        self._written_begin = np.cumsum([0, *map(len, written)])
        self._written = np.concatenate(written).astype(np.int64)

    def decode(self, frames: Frames, nbest: int) -> list[list[CTCHypothesis]]:
        """The best hypotheses of each utterance, best first, with distinct texts."""
        log_prob = frames.log_prob.cpu().numpy()
        chunks = [
            np.ascontiguousarray(utterance[:num])
            for utterance, num in zip(log_prob, frames.num_frames.tolist(), strict=True)
        ]
        with self.models.lent() as lm:
            beams = [self.start(lm) for _ in chunks]
            read_chunks(beams, chunks, lm)
            return [self.hypotheses(beam, lm, nbest) for beam in beams]

    def start(self, lm: LanguageModel | None) -> PrefixBeam:
        """A new search for an utterance."""
        return PrefixBeam(self._rules, 0 if lm is None else int(lm.start(1)), self._compiled)

    def hypotheses(self, beam: PrefixBeam, lm: LanguageModel | None, nbest: int) -> list[CTCHypothesis]:
        """The best texts, by the sum over the surviving prefixes with each text, final scores included.

        Such prefixes differ in a boundary at the end, or in the tokens that words are written in. Tokens, times and the
        language model's score are those of the best one; what the others add to the sum is added to `am_score`.
        """
        alive = beam.alive()
        final = np.zeros(len(alive), dtype=np.float64)
        if lm is not None and alive:
            final = ask_final(lm, torch.tensor([each.context for each in alive], dtype=torch.int64))
        total = np.array([each.total for each in alive]) + self._config.lm_scale * final
        keys = beam.text_keys([each.prefix for each in alive], self._written_begin, self._written).tolist()
        # For each text, the position of its best prefix, and the sum.
        texts: dict[int, tuple[int, float]] = {}
        for position in np.argsort(-total, kind="stable").tolist():
            key, added = keys[position], float(total[position])
            if added == -math.inf:
                break
            if key in texts:
                best, score = texts[key]
                texts[key] = (best, float(np.logaddexp(score, added)))
            else:
                texts[key] = (position, added)
        distinct: dict[str, CTCHypothesis] = {}
        for position, score in sorted(texts.values(), key=lambda each: -each[1]):
            if len(distinct) == nbest:
                break
            own = alive[position]
            spelled = self._spelled(beam, own.prefix, Spelled())
            am_score = own.am_score + (score - float(total[position]))
            scores = (score, am_score, own.lm_score + float(final[position]))
            hypothesis = CTCHypothesis(tuple(spelled.words), tuple(spelled.tokens), *scores, True)
            # Different bytes that are not UTF-8 have the same text.
            distinct.setdefault(hypothesis.text, hypothesis)
        return list(distinct.values()) or [no_hypothesis()]

    def partial(self, beam: PrefixBeam, earlier: Spelled) -> tuple[CTCHypothesis, Spelled]:
        """The best surviving prefix, without final scores and without what others with its text would add.

        `earlier` is what was returned before, or empty.
        """
        best = max(beam.alive(), key=lambda each: each.total, default=None)
        if best is None or best.total == -math.inf:
            return no_hypothesis(), earlier
        spelled = self._spelled(beam, best.prefix, earlier)
        scores = (best.total, best.am_score, best.lm_score)
        return CTCHypothesis(tuple(spelled.words), tuple(spelled.tokens), *scores, False), spelled

    def _spelled(self, beam: PrefixBeam, prefix: int, earlier: Spelled) -> Spelled:
        """The tokens and words of a prefix; those that it has in common with an earlier one are taken from there."""
        entry, *frames = beam.characters(prefix)
        first, last = in_order(*frames)
        rows = np.stack([entry, first, last])
        num = min(rows.shape[1], earlier.rows.shape[1])
        differs = (rows[:, :num] != earlier.rows[:, :num]).any(axis=0)
        same = int(differs.argmax()) if differs.any() else num
        entries, symbols, shift = entry.tolist(), self.tokens.table.tokens, self._frame_shift
        new = rows[:, same:].tolist()
        tokens = [*earlier.tokens[:same], *map(CTCToken, [symbols[entry] for entry in new[0]], new[1], new[2])]
        # The last word that begins among them may have grown.
        num_words = max(0, bisect.bisect_left(earlier.spans, (same,)) - 1)
        begin = earlier.spans[num_words][0] if num_words else 0
        spans = [(begin + own, begin + end) for own, end in self.groups(entries[begin:])]
        words = [*earlier.words[:num_words]]
        for own, end in spans:
            text = self.tokens.text_of(*entries[own:end])
            frame, after = tokens[own].start_frame, tokens[end - 1].end_frame
            seconds = (None, None) if shift is None else (frame * shift, after * shift)
            words.append(CTCWord(text, frame, after, *seconds))
        return Spelled(rows, tokens, [*earlier.spans[:num_words], *spans], words)

    def groups(self, entries: list[int]) -> list[tuple[int, int]]:
        """The words of a sequence of tokens, as `CTCTokens.group` returns them; each phone is a word."""
        if self.tokens.kind == "phones":
            return [(position, position + 1) for position in range(len(entries))]
        return self.tokens.group(entries)


def _written(tokens: CTCTokens, entry: int) -> list[int]:
    """What a token adds to a text, for `fill_text_keys`."""
    is_text = tokens.is_text(entry) and entry != tokens.boundary_id
    if tokens.kind == "phones":
        # Each is a word; the others count as empty ones.
        return [WORD_MARK + 1 + entry] if is_text else [WORD_MARK]
    if not is_text:
        return [WORD_MARK] if tokens.separates_words(entry) else []
    begins = tokens.kind == "pieces" and tokens.begins_word(entry)
    return [*reversed(tokens.bytes_of(entry)), *[WORD_MARK] * begins]


def token_rules(tokens: CTCTokens, config: CTCDecodingConfig, vocabulary: Vocabulary | None) -> Rules:
    """The rules if each token is a word of the language model, which has this vocabulary.

    Raises:
        AsrError: the language model has none of the tokens, or not the word boundary.
    """
    num = len(tokens.table)
    word_of: IntArray = np.full(num, UNK_ID, dtype=np.int64)
    if vocabulary is not None:
        word_of = token_word_ids(tokens, vocabulary)
    nothing = np.zeros(1, dtype=np.int64)
    return Rules(
        char_begin=np.arange(-1, num).clip(0).astype(np.int64),
        char=np.arange(1, num, dtype=np.int64),
        num_ends=np.ones(num, dtype=np.int64),
        word_of=word_of,
        has_words=False,
        # A language model says how likely repeated boundaries are; without one, they only take places in the beam.
        boundary=-1 if tokens.boundary_id is None or vocabulary is not None else tokens.boundary_id,
        trie_begin=nothing,
        trie_char=nothing,
        trie_next=nothing,
        trie_word=nothing,
        trie_end=np.zeros(1),
        trie_guess=np.zeros(1),
        outside_end=0.0,
        outside_guess=0.0,
        most_inside=0.0,
        most_at_end=float(config.word_insertion_penalty),
        long_word=1.0,
        unk=UNK_ID,
        has_lm=vocabulary is not None,
        lm_scale=float(config.lm_scale),
        insertion=float(config.word_insertion_penalty),
        beam=float(config.search_beam),
        beam_size=int(config.beam_size),
        token_min=float(config.token_min_log_prob),
        history=0,
    )


def token_word_ids(tokens: CTCTokens, vocabulary: Vocabulary) -> IntArray:
    """The word of a language model of tokens for each entry of `CTCTokens.table`, (C,); `<unk>` for what it lacks.

    Raises:
        AsrError: the language model has none of the tokens, or not the word boundary.
    """
    symbols = tokens.table.tokens
    num = len(symbols)
    word_of = np.full(num, UNK_ID, dtype=np.int64)
    names = {entry: written_as(symbols[entry], vocabulary) for entry in range(1, num)}
    known = {entry: vocabulary.id_of(name) for entry, name in names.items() if name is not None}
    if not known:
        raise AsrError(
            f"{tokens.name}: the language model has none of the {num - 1} tokens ({symbols[1]!r}, ...); "
            "estimate it from text that is split into these tokens."
        )
    if tokens.boundary_id is not None and tokens.boundary_id not in known:
        raise AsrError(
            f"{tokens.name}: the language model lacks the word boundary {symbols[tokens.boundary_id]!r}, as a "
            "model of words does; estimate it from text that is split into these tokens, boundaries included."
        )
    word_of[[*known]] = [*known.values()]
    lacking = [symbols[entry] for entry in names if entry not in known and tokens.is_text(entry)]
    if lacking:
        _LOGGER.warning(
            "%s: the language model lacks %d of the %d tokens (%s%s); they have the probability of its <unk>.",
            *(tokens.name, len(lacking), num - 1, " ".join(lacking[:5]), " ..." if len(lacking) > 5 else ""),
        )
    return word_of
