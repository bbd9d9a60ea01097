"""Drop-in replacement for torchaudio's CTC decoder: the same function, arguments and results, with compiled searches.

    from asr.ctc.torchaudio import ctc_decoder

The differences:

- With a lexicon, a compiled graph of words is searched: `beam_size` is the number of partial paths that survive a
  frame, and `beam_threshold` is their maximum distance from the best one. Scores are those of the best path;
  `log_add=True` is refused.
- Without a lexicon, scores are always sums over all paths of a text, whatever `log_add` is, and n-best lists have
  distinct texts. Without a language model, silence at the beginning and repeated silence add no tokens. torchaudio
  leaves out silence in the first frames only.
- A word whose spelling does not end in silence follows the rules of CTC. In torchaudio, its last token lasts one frame
  only, and needs no blank before it if it doubles the token before.
- `beam_size_token` also keeps a token from lasting into frames where it is not among the most probable ones. The blank
  may always follow; torchaudio rules it out, too, if there is no lexicon.
- Arguments that would have no effect are refused, such as `word_score` without a lexicon. An utterance in chunks has a
  single hypothesis, so `decode_begin` refuses an `nbest` above 1.
- With `unk_score` above -inf, out-of-vocabulary words are spelled, each with this score added; torchaudio outputs the
  unknown word instead, in the place of beginnings of known words only.
- `tokens` and `timesteps` are those of the path itself: no silence is added before the first or after the last token,
  and frames are counted from 0.
- A word at the end needs no silence after it, even if its spelling ends in one.
- `lm_weight` weighs logs to base 10 if the model is an n-gram file, as in torchaudio, and natural logs otherwise.
- With a lexicon, the search may always back off, as in other decoding graphs, also from a listed n-gram: a text whose
  probability is higher with shorter histories has that one.
- Texts more than 20 below the best are not in n-best lists.
- Words that are not in the language model share the probability of its `<unk>` evenly.
- `emissions` may be tensors or arrays, on any device and of any floating-point type, with or without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asr.ctc.decoder import CTCDecoder as WordDecoder
from asr.ctc.frames import as_tensor
from asr.ctc.graphs import read_lexicon
from asr.ctc.interface import CTCHypothesis as Found
from asr.ctc.language_models import StatefulModel, is_ngram_file
from asr.ctc.stream import CTCStream
from asr.ctc.word_models import is_kenlm_binary
from asr.errors import AsrError
from asr.lm.interface import LanguageModel
from asr.lm.ngram.arpa import LN_10
from asr.text.ctc_tokens import CTCTokens
from asr.text.symbols import Vocabulary, first_words, ordinary_words


class CTCHypothesis(NamedTuple):
    """A hypothesis, as torchaudio's class of this name.

    Attributes:
        tokens: (L,) int64, the columns of its tokens.
        words: its words; empty without a lexicon.
        score: the combined score by which hypotheses are ranked.
        timesteps: (L,) int32, the first frame of each token.
    """

    tokens: Tensor
    words: list[str]
    score: float
    timesteps: Tensor


class CTCDecoder:
    """Like torchaudio's class of this name; made by `ctc_decoder`.

    Args:
        decoder: the decoder to wrap.
        nbest: maximum number of hypotheses per utterance.
        has_words: whether there is a lexicon.
        sil_score: natural log, added to the silence in each frame.
        silence: the silence's column, or None.
        num_tokens: how many of a frame's tokens are followed, besides the blank; None for all.
    """

    def __init__(
        self,
        decoder: WordDecoder,
        nbest: int,
        has_words: bool,
        sil_score: float,
        silence: int | None,
        num_tokens: int | None = None,
    ) -> None:
        self._decoder = decoder
        self._nbest = nbest
        self._has_words = has_words
        self._sil_score = sil_score
        self._silence = silence
        self._num_tokens = num_tokens
        self._stream: CTCStream | None = None
        self._last: Found | None = None

    def __call__(self, emissions: Any, lengths: Any = None) -> list[list[CTCHypothesis]]:
        """Decodes a batch of emissions (N, T, C) with lengths (N,) -> the best hypotheses of each utterance."""
        emissions = as_tensor(emissions)
        if emissions.dim() != 3:
            raise AsrError(f"the emissions have the shape {tuple(emissions.shape)}; give (batch, frames, tokens).")
        found = self._decoder(self._scored(emissions), lengths, nbest=self._nbest)
        return [[self._as_theirs(hypothesis) for hypothesis in each] for each in found if isinstance(each, list)]

    def decode_begin(self) -> None:
        """Begins an utterance that arrives in chunks.

        Raises:
            AsrError: the decoder is to return several hypotheses.
        """
        if self._nbest > 1:
            raise AsrError(f"nbest is {self._nbest}, but an utterance in chunks has one hypothesis; give nbest=1.")
        self._stream = self._decoder.stream()

    def decode_step(self, emissions: Any) -> None:
        """Reads the utterance's next frames, (T, C)."""
        self._open().accept(self._scored(as_tensor(emissions)))

    def decode_end(self) -> None:
        """Ends the utterance."""
        self._last = self._open().finish()
        self._stream = None

    def get_final_hypothesis(self) -> list[CTCHypothesis]:
        """A list with the best hypothesis of the last utterance that was ended.

        Raises:
            AsrError: no utterance has ended yet.
        """
        if self._last is None:
            raise AsrError("no utterance has ended yet; call decode_begin, decode_step and decode_end first.")
        return [self._as_theirs(self._last)]

    def idxs_to_tokens(self, idxs: Tensor) -> list[str]:
        """The symbols of columns (L,)."""
        return [self._decoder.tokens.symbols[int(column)] for column in idxs]

    def _open(self) -> CTCStream:
        if self._stream is None:
            raise AsrError("no utterance is open; call decode_begin first.")
        return self._stream

    def _scored(self, emissions: Tensor) -> Tensor:
        """The emissions (..., C) with the silence's score added, and the least probable tokens ruled out."""
        if self._sil_score != 0.0 and self._silence is not None:
            emissions = emissions.detach().clone()
            emissions[..., self._silence] += self._sil_score
        if self._num_tokens is None or self._num_tokens >= emissions.shape[-1]:
            return emissions
        least = emissions.topk(self._num_tokens).values[..., -1:]
        is_out = emissions < least
        is_out[..., self._decoder.tokens.blank_id] = False
        return emissions.masked_fill(is_out, -math.inf)

    def _as_theirs(self, found: Found) -> CTCHypothesis:
        tokens = self._decoder.tokens
        columns = [tokens.columns[tokens.table.id_of(token.text)] for token in found.tokens]
        words = [word.text for word in found.words] if self._has_words else []
        frames = [token.start_frame for token in found.tokens]
        return CTCHypothesis(
            torch.tensor(columns, dtype=torch.int64), words, found.score, torch.tensor(frames, dtype=torch.int32)
        )


class CustomLanguageModel(StatefulModel):
    """Adapter for a model with torchaudio's `CTCDecoderLM` interface (`start`, `score`, `finish`).

    Args:
        model: the model; its scores are natural logs.
        words: the model's words, in the order of its word numbers.
    """

    def __init__(self, model: Any, words: Sequence[str]) -> None:
        self._model = model
        super().__init__(Vocabulary(ordinary_words(words), name="lm_dict"), model.start(False))
        number_of = {word: number for number, word in enumerate(words)}
        self._number = [number_of.get(word, number_of.get("<unk>", -1)) for word in self.vocabulary.words]

    def after(self, state: Any, word_id: int) -> tuple[float, Any]:
        """Like `StatefulModel.after`; words that the model does not number have probability 0."""
        if self._number[word_id] < 0:
            return -math.inf, state
        following, score = self._model.score(state, self._number[word_id])
        return score, following

    def at_end(self, state: Any) -> float:
        return float(self._model.finish(state)[1])


def ctc_decoder(
    lexicon: str | Path | Mapping[str, Any] | None,
    tokens: str | Path | Sequence[str],
    lm: str | Path | nn.Module | LanguageModel | Any | None = None,
    lm_dict: str | Path | None = None,
    nbest: int = 1,
    beam_size: int = 50,
    beam_size_token: int | None = None,
    beam_threshold: float = 50,
    lm_weight: float = 2,
    word_score: float = 0,
    unk_score: float = -math.inf,
    sil_score: float = 0,
    log_add: bool = False,
    blank_token: str = "-",
    sil_token: str = "|",
    unk_word: str = "<unk>",
) -> CTCDecoder:
    """Builds a decoder like torchaudio's function of this name.

    Args:
        lexicon: a file (`word TOKEN TOKEN ...`) or a mapping; None decodes tokens.
        tokens: a file with one token per line, or a list.
        lm: an n-gram model (of words with a lexicon, of tokens without): ARPA text, our binary, KenLM's binary; a model
            with the interface of torchaudio's `CTCDecoderLM`; or any other that `asr.ctc.CTCDecoder` accepts.
        lm_dict: for a `CTCDecoderLM`, a file with its words in the order of their numbers, one per line; by default,
            the words of the lexicon.
        nbest: maximum number of hypotheses per utterance.
        beam_size, beam_threshold: see the module's documentation.
        beam_size_token: how many of a frame's tokens are followed, besides the blank; None for all.
        lm_weight: weight of the language model; of logs to base 10 if `lm` is an n-gram file, else of natural logs.
        word_score: added for each word.
        unk_score: see the module's documentation.
        sil_score: added to the silence in each frame.
        log_add: see the module's documentation.
        blank_token, sil_token: these symbols as written in `tokens`.
        unk_word: the unknown word as written in the lexicon.

    Raises:
        AsrError: an argument cannot be read, does not match the others or would have no effect.
    """
    has_boundary = sil_token in (tokens if not isinstance(tokens, (str, Path)) else CTCTokens(tokens, blank=0).symbols)
    table = CTCTokens(tokens, blank=blank_token, word_boundary=sil_token if has_boundary else "")
    if beam_size < 1:
        raise AsrError(f"beam_size is {beam_size}; keep 1 hypothesis or more.")
    if beam_size_token is not None and beam_size_token < 1:
        raise AsrError(f"beam_size_token is {beam_size_token}; follow 1 token or more.")
    if sil_score and not has_boundary:
        raise AsrError(f"sil_score has no effect here: the tokens have no silence {sil_token!r}; leave it out.")
    if lm_dict is not None and not _is_theirs(lm):
        raise AsrError("lm_dict has no effect here: it is for models with torchaudio's interface; leave it out.")
    is_file = isinstance(lm, (str, Path)) and is_ngram_file(lm)
    scale = 0.0 if lm is None else float(lm_weight) / (LN_10 if is_file else 1.0)
    settings: dict[str, Any] = {
        "lm_scale": scale,
        "word_insertion_penalty": float(word_score),
        "search_beam": float(beam_threshold),
        "inputs": "scores",
    }
    if lexicon is None:
        for name, is_given in {"word_score": word_score != 0.0, "unk_score": unk_score > -math.inf}.items():
            if is_given:
                raise AsrError(f"{name} has no effect here: there are no words without a lexicon; leave it out.")
        model = None if lm is None else _as_model(lm, lm_dict, table.table.tokens[1:])
        if model is None:
            settings.pop("lm_scale")
        decoder = WordDecoder(table, token_lm=model, beam_size=beam_size, token_min_log_prob=-math.inf, **settings)
    else:
        if log_add:
            raise AsrError("log_add=True is not supported with a lexicon, where the best path counts; leave it out.")
        spelled = read_lexicon(lexicon, table)
        words = [word for word in spelled.pronunciations if word != unk_word]
        spelled, _ = spelled.restricted_to(words)
        settings |= {"max_active_states": beam_size, "output_beam": min(float(beam_threshold), 20.0)}
        if unk_score > -math.inf:
            if unk_score and not scale:
                raise AsrError(f"unk_score is {unk_score}; without a language model it must be 0 or -inf.")
            # The decoder's penalty is part of the language model's score.
            settings |= {"spell_unknown": True, "spelling_penalty": unk_score / scale if scale else 0.0}
        if isinstance(lm, (str, Path)) and is_file and not is_kenlm_binary(lm):
            settings["ngram"] = lm
        elif lm is not None:
            settings["lm"] = _as_model(lm, lm_dict, words)
        decoder = WordDecoder(table, lexicon=spelled, words=words, **settings)
    silence = table.symbols.index(sil_token) if has_boundary else None
    return CTCDecoder(decoder, nbest, lexicon is not None, float(sil_score), silence, beam_size_token)


def _is_theirs(lm: Any) -> bool:
    """Whether a model has torchaudio's interface."""
    return not isinstance(lm, (str, Path, LanguageModel)) and hasattr(lm, "finish")


def _as_model(lm: Any, lm_dict: str | Path | None, words: Sequence[str]) -> Any:
    """Wraps a model with torchaudio's interface; returns any other model unchanged."""
    if not _is_theirs(lm):
        return lm
    if lm_dict is None:
        return CustomLanguageModel(lm, words)
    # Words are numbered by their lines, those of special words included.
    return CustomLanguageModel(lm, first_words(lm_dict))
