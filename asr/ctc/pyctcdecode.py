"""Drop-in replacement for pyctcdecode: the same functions, arguments and results, with the compiled prefix beam search.

    from asr.ctc.pyctcdecode import build_ctcdecoder

Hypotheses, scores and hot words agree with pyctcdecode 0.5.0: scores are sums over paths, the vocabulary is open, and
words outside the unigrams cost `unk_score_offset`. `docs/ctc-replacing.md` lists the differences.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from asr.ctc.alphabet import Alphabet as Alphabet
from asr.ctc.alphabet import fields_of
from asr.ctc.interface import require_number
from asr.ctc.language_models import KenLanguageModel, LentModels, model_maker
from asr.ctc.prefix_beam import Alive, PrefixBeam, ask, ask_final, in_order, read_chunks
from asr.ctc.prefix_kernel import BOUNDARY, Rules
from asr.ctc.word_models import is_kenlm_binary, listed_words, read_ngram
from asr.ctc.word_trie import LEAST_LOG_PROB, LONG_WORD, Characters, KnownWords, ScoredWords
from asr.decoding.interface import TOLERANCE
from asr.errors import AsrError
from asr.kernels.memory import no_autograd
from asr.lm.combine import CombinedLM
from asr.lm.interface import LanguageModel as WordModel
from asr.lm.ngram.model import NgramLM
from asr.options import require_type
from asr.serialization import copied_to_processes
from asr.text.ctc_tokens import PIECE_PREFIX
from asr.text.symbols import UNK_ID, ordinary_words

DEFAULT_ALPHA = 0.5
DEFAULT_BETA = 1.5
DEFAULT_UNK_LOGP_OFFSET = -10.0
DEFAULT_BEAM_WIDTH = 100
DEFAULT_HOTWORD_WEIGHT = 10.0
DEFAULT_PRUNE_LOGP = -10.0
DEFAULT_MIN_TOKEN_LOGP = -5.0
_ALPHABET, _LANGUAGE_MODEL, _WEIGHTS, _UNIGRAMS = "alphabet.json", "language_model", "attrs.json", "unigrams.txt"
_WORDS_LOOKED_AT = 1000
_MOST_TRIES_KEPT = 4
# Models that forget nothing: chosen on training speakers, for a GRU. Without pruning by history, texts that differ in
# early words fill the beam.
_HISTORY_OF_OTHERS = 3

WordFrames = tuple[str, tuple[int, int]]
OutputBeam = tuple[str, "LMState | None", list[WordFrames], float, float]
OutputBeamMPSafe = tuple[str, list[WordFrames], float, float]


@dataclass(frozen=True)
class LMState:
    """The words of a text and of those before it; pass it as `lm_start_state` to continue from there.

    The language model reads them again, so that a state may be kept and used at any time, in any decoder.
    """

    words: tuple[str, ...]


class LanguageModelSettings:
    """The language model weights that `reset_params` changes; see `build_ctcdecoder`."""

    def __init__(self, alpha: float, beta: float, unk_score_offset: float, score_boundary: bool) -> None:
        for name, value in {"alpha": alpha, "beta": beta, "unk_score_offset": unk_score_offset}.items():
            _require_finite(name, value)
        self.alpha = float(alpha)
        self.beta = float(beta)
        self.unk_score_offset = float(unk_score_offset)
        self.score_boundary = score_boundary


@copied_to_processes
class BeamSearchDecoderCTC:
    """Decodes logits of a CTC network like pyctcdecode's class of this name; made by `build_ctcdecoder`.

    Args:
        alphabet: the labels.
        models: language models of words, or None.
        unigrams: the known words; () for all words of the language model.
        settings: weights; None without a language model.
        source: the file of the language model, for `save_to_dir`.
        ahead: an n-gram model over the language model's vocabulary, by whose unigrams unfinished words are pruned, or
            None.
    """

    def __init__(
        self,
        alphabet: Alphabet,
        models: LentModels | None = None,
        unigrams: Collection[str] = (),
        settings: LanguageModelSettings | None = None,
        source: str | Path | None = None,
        ahead: NgramLM | None = None,
    ) -> None:
        self._alphabet = alphabet
        self._models = models if models is not None else LentModels()
        self._settings = settings
        self._unigrams = ordinary_words(unigrams)
        self._source = source
        self._ahead = ahead
        self._characters = Characters(alphabet.labels)
        pieces = [self._numbers_of(label) for label in alphabet.labels]
        self._blank = alphabet.labels.index("")
        # The search expects the blank in column 0.
        self._columns = [self._blank, *(column for column in range(len(pieces)) if column != self._blank)]
        lengths = [len(pieces[column]) for column in self._columns]
        self._char_begin = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._token_chars = np.array([char for column in self._columns for char in pieces[column]], dtype=np.int64)
        self._num_ends = np.array([pieces[column].count(BOUNDARY) for column in self._columns], dtype=np.int64)
        self._tries: dict[Any, ScoredWords] = {}
        with self._models.lent() as lm:
            self._vocabulary = None if lm is None else lm.vocabulary
            self._listed = _listed_words(lm)
            self._forgets = lm is None or isinstance(lm, (NgramLM, KenLanguageModel))
            self._history = _history_of(lm)
        self._check_boundary()
        if lm is not None:
            self._check_case()

    def reset_params(
        self,
        alpha: float | None = None,
        beta: float | None = None,
        unk_score_offset: float | None = None,
        lm_score_boundary: bool | None = None,
    ) -> None:
        """Changes weights, except those given as None.

        Raises:
            AsrError: there is no language model, sentences of this one always begin with `<s>`, or a weight is not a
                finite number.
        """
        given = {
            "alpha": alpha,
            "beta": beta,
            "unk_score_offset": unk_score_offset,
            "score_boundary": lm_score_boundary,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if given and self._settings is None:
            raise AsrError(f"{next(iter(given))} has no effect here: there is no language model; leave it out.")
        if self._settings is not None:
            self._settings = LanguageModelSettings(**{**vars(self._settings), **given})
        self._check_boundary()

    def _check_boundary(self) -> None:
        if self._settings is None or self._settings.score_boundary:
            return
        with self._models.lent() as lm:
            if not isinstance(lm, NgramLM):
                raise AsrError(
                    "lm_score_boundary=False needs an n-gram model in ARPA text or our binary; other models score "
                    "every sentence from <s> on."
                )

    def _check_case(self) -> None:
        """Refuses words that cannot be written with the labels, but could in another letter case."""
        words = self._unigrams or list(self._listed)
        words = words[:: max(1, len(words) // _WORDS_LOOKED_AT)]
        if 2 * self._num_written(words) >= len(words):
            return
        for change, case in ((str.upper, "upper"), (str.lower, "lower")):
            if 2 * self._num_written(map(change, words)) > len(words):
                wrong = next(word for word in words if not self._characters.can_write(word))
                raise AsrError(
                    f"the words ({wrong!r}, ...) cannot be written with the labels, which are in {case} case; convert "
                    "unigrams and language model to that case."
                )

    def _num_written(self, words: Iterable[str]) -> int:
        return sum(map(self._characters.can_write, words))

    @functools.cached_property
    def _known_words(self) -> KnownWords:
        known = self._unigrams or self._listed
        return KnownWords.build(self._characters, known, self._listed, self._vocabulary, self._ahead)

    def decode(
        self,
        logits: Any,
        beam_width: int = DEFAULT_BEAM_WIDTH,
        beam_prune_logp: float = DEFAULT_PRUNE_LOGP,
        token_min_logp: float = DEFAULT_MIN_TOKEN_LOGP,
        hotwords: Iterable[str] | None = None,
        hotword_weight: float = DEFAULT_HOTWORD_WEIGHT,
        lm_start_state: LMState | None = None,
    ) -> str:
        """The best text of one utterance, logits (T, C); arguments as for `decode_beams`, with `prune_history`."""
        (beams,) = self._decode(
            [logits], beam_width, beam_prune_logp, token_min_logp, True, hotwords, hotword_weight, lm_start_state
        )
        return next(beams)[0]

    def decode_beams(
        self,
        logits: Any,
        beam_width: int = DEFAULT_BEAM_WIDTH,
        beam_prune_logp: float = DEFAULT_PRUNE_LOGP,
        token_min_logp: float = DEFAULT_MIN_TOKEN_LOGP,
        prune_history: bool = False,
        hotwords: Iterable[str] | None = None,
        hotword_weight: float = DEFAULT_HOTWORD_WEIGHT,
        lm_start_state: LMState | None = None,
    ) -> list[OutputBeam]:
        """The surviving texts of one utterance, best first.

        Args:
            logits: (T, C) logits, log-probabilities or probabilities, an array or a tensor.
            beam_width: maximum number of hypotheses that survive a frame.
            beam_prune_logp: hypotheses this far below the best are pruned (0 or negative).
            token_min_logp: labels with a lower log-probability are not followed, except the frame's best.
            prune_history: keep only the best of hypotheses that differ in words that an n-gram model has forgotten, or
                in words before the last three if the model is another one.
            hotwords: words to favor, known or not.
            hotword_weight: natural log, added for each hot word.
            lm_start_state: state returned by an earlier call, to continue its text; None begins a sentence. A model
                that is not an n-gram model reads all words of the state again.

        Returns:
            Tuples of the text, the language model's state after it, its words with begin and end frames, the network's
            score, and the total score.

        Raises:
            AsrError: the shape is wrong, or values are NaN or infinite.
        """
        (beams,) = self._decode(
            *([logits], beam_width, beam_prune_logp, token_min_logp, prune_history),
            *(hotwords, hotword_weight, lm_start_state),
        )
        return list(beams)

    def decode_beams_batch(
        self,
        pool: Any,
        logits_list: Iterable[Any],
        beam_width: int = DEFAULT_BEAM_WIDTH,
        beam_prune_logp: float = DEFAULT_PRUNE_LOGP,
        token_min_logp: float = DEFAULT_MIN_TOKEN_LOGP,
        prune_history: bool = False,
        hotwords: Iterable[str] | None = None,
        hotword_weight: float = DEFAULT_HOTWORD_WEIGHT,
    ) -> list[list[OutputBeamMPSafe]]:
        """Like `decode_beams` for several utterances, without the states; `pool` is not used."""
        found = self._decode(
            *(list(logits_list), beam_width, beam_prune_logp, token_min_logp, prune_history),
            *(hotwords, hotword_weight, None),
        )
        return [[(text, frames, am_score, total) for text, _, frames, am_score, total in beams] for beams in found]

    def decode_batch(
        self,
        pool: Any,
        logits_list: Iterable[Any],
        beam_width: int = DEFAULT_BEAM_WIDTH,
        beam_prune_logp: float = DEFAULT_PRUNE_LOGP,
        token_min_logp: float = DEFAULT_MIN_TOKEN_LOGP,
        hotwords: Iterable[str] | None = None,
        hotword_weight: float = DEFAULT_HOTWORD_WEIGHT,
    ) -> list[str]:
        """Like `decode` for several utterances; `pool` is not used."""
        found = self._decode(
            list(logits_list), beam_width, beam_prune_logp, token_min_logp, True, hotwords, hotword_weight, None
        )
        return [next(beams)[0] for beams in found]

    def save_to_dir(self, filepath: str | Path) -> None:
        """Writes labels, and the language model's file, unigrams and weights, for `load_from_dir`.

        Raises:
            AsrError: the language model was not read from a file, or the folder cannot be written.
        """
        if self._settings is not None and self._source is None:
            raise AsrError("the decoder's language model was not read from a file and cannot be saved with it.")
        try:
            self._write(Path(filepath))
        except OSError as error:
            raise AsrError(f"{filepath}: the decoder cannot be saved there ({error.strerror or error}).") from error

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _ALPHABET).write_text(self._alphabet.dumps(), encoding="utf-8")
        if self._settings is None or self._source is None:
            return
        target = folder / _LANGUAGE_MODEL
        target.mkdir(parents=True, exist_ok=True)
        (target / _WEIGHTS).write_text(json.dumps(vars(self._settings)), encoding="utf-8")
        lines = "".join(f"{word}\n" for word in sorted(self._unigrams))
        (target / _UNIGRAMS).write_text(lines, encoding="utf-8")
        copy = target / Path(self._source).name
        if not (copy.exists() and copy.samefile(self._source)):
            shutil.copyfile(self._source, copy)

    @staticmethod
    def parse_directory_contents(filepath: str | Path) -> dict[str, str | None]:
        """The paths of `alphabet` and `language_model` in a folder of `save_to_dir`; None without a language model.

        Raises:
            AsrError: the folder has no alphabet.
        """
        folder = Path(filepath)
        if not (folder / _ALPHABET).is_file():
            raise AsrError(f"{folder}: this is not the folder of a saved decoder (it has no {_ALPHABET}).")
        has_model = (folder / _LANGUAGE_MODEL).is_dir()
        return {
            "alphabet": str(folder / _ALPHABET),
            "language_model": str(folder / _LANGUAGE_MODEL) if has_model else None,
        }

    @classmethod
    def load_from_hf_hub(
        cls, model_id: str, cache_dir: str | Path | None = None, **kwargs: Any
    ) -> BeamSearchDecoderCTC:
        """Downloads the folder of a saved decoder from the Hugging Face hub, and reads it.

        Args:
            model_id: the name of the repository.
            cache_dir: where downloads are kept; by default, where `huggingface_hub` keeps them.
            kwargs: passed on to `huggingface_hub.snapshot_download`.

        Raises:
            AsrError: `huggingface_hub` is not installed, the download fails, or as for `load_from_dir`.
        """
        try:
            from huggingface_hub import snapshot_download
        except ImportError as error:
            raise AsrError(f"{model_id}: a download needs the package; `pip install huggingface_hub`.") from error
        try:
            folder = snapshot_download(model_id, cache_dir=cache_dir, **kwargs)
        except (OSError, ValueError) as error:
            raise AsrError(f"{model_id}: the decoder cannot be downloaded ({error}).") from error
        return cls.load_from_dir(folder)

    @classmethod
    def clear_class_models(cls) -> None:
        """Does nothing, since models belong to their decoders."""

    def cleanup(self) -> None:
        """Does nothing, since the model is freed with the decoder."""

    @classmethod
    def load_from_dir(cls, filepath: str | Path, unigram_encoding: str | None = None) -> BeamSearchDecoderCTC:
        """Reads a folder written by `save_to_dir` of this class or of pyctcdecode.

        Raises:
            AsrError: a file is missing or damaged.
        """
        folder = Path(filepath)
        found = cls.parse_directory_contents(folder)
        try:
            alphabet = Alphabet.loads(Path(str(found["alphabet"])).read_text(encoding="utf-8"))
            if found["language_model"] is None:
                return cls(alphabet)
            model_folder = Path(found["language_model"])
            weights = {"alpha": (int, float), "beta": (int, float), "unk_score_offset": (int, float)}
            written = (model_folder / _WEIGHTS).read_text(encoding="utf-8")
            attributes = fields_of(written, _WEIGHTS, score_boundary=bool, **weights)
            unigrams = (model_folder / _UNIGRAMS).read_text(encoding=unigram_encoding or "utf-8").split("\n")
            others = [path for path in model_folder.iterdir() if path.name not in (_WEIGHTS, _UNIGRAMS)]
            # Systems leave files such as .DS_Store behind.
            (source,) = (path for path in others if not path.name.startswith((".", "__")))
        except (OSError, ValueError, AsrError) as error:
            reason = str(error).rstrip(".")
            raise AsrError(f"{folder}: this is not the folder of a saved decoder ({reason}).") from error
        decoder = build_ctcdecoder(
            alphabet.labels,
            str(source),
            [word for word in unigrams if word] or None,
            attributes["alpha"],
            attributes["beta"],
            attributes["unk_score_offset"],
            attributes["score_boundary"],
        )
        decoder._alphabet = alphabet
        return decoder

    def _decode(
        self,
        utterances: list[Any],
        beam_width: int,
        beam_prune_logp: float,
        token_min_logp: float,
        prune_history: bool,
        hotwords: Iterable[str] | None,
        hotword_weight: float,
        lm_start_state: LMState | None,
    ) -> list[Iterator[OutputBeam]]:
        wanted = "a state that decode_beams has returned, or None"
        require_type(lm_start_state, LMState | None, "lm_start_state", wanted)
        chunks = [self._log_probs(logits) for logits in utterances]
        words = self._scored_words(hotwords, hotword_weight)
        history = self._history if prune_history else 0
        rules = self._rules(words, beam_width, beam_prune_logp, token_min_logp, history)
        with no_autograd(), self._models.lent() as lm:
            before = () if lm_start_state is None else lm_start_state.words
            context = 0 if lm is None else self._context_after(before, lm)
            beams = [PrefixBeam(rules, context) for _ in chunks]
            read_chunks(beams, chunks, lm)
            return [self._outputs(beam, words, before, lm) for beam in beams]

    def _context_after(self, words: tuple[str, ...], lm: WordModel) -> int:
        """The language model's context after words, of which n-gram models only read those that they remember."""
        settings = self._settings
        has_boundary = settings is None or settings.score_boundary
        # Context 0 is that of an empty history, without <s>.
        context = int(lm.start(1)) if has_boundary else 0
        for word in words[-self._history :] if self._forgets else words:
            word_id = lm.vocabulary.id_of(word) if word in self._listed else UNK_ID
            _, following = ask(lm, torch.tensor([context]), torch.tensor([word_id]))
            context = int(following[0])
        return context

    def _log_probs(self, logits: Any) -> npt.NDArray[np.float32]:
        values = as_array(logits)
        if values.ndim != 2 or values.shape[1] != len(self._columns):
            raise AsrError(
                f"the logits have the shape {values.shape}; give (frames, {len(self._columns)}), one column per label."
            )
        # The search reads single precision, so that these need no more.
        values = np.require(values, None if values.dtype == np.float32 else np.float64, ["C", "W"])
        given = torch.from_numpy(values)
        if not bool(given.amax(1).isfinite().all()):
            raise AsrError(
                "the logits have NaN, infinity or a frame of nothing but -inf in them; check the network's input and "
                "weights."
            )
        if len(values) and given.amin() >= 0 and np.abs(values.sum(axis=1, dtype=np.float64) - 1).max() <= TOLERANCE:
            values = np.log(np.clip(values, 1e-15, 1, dtype=np.float64))
        else:
            # Faster than NumPy.
            values = given.log_softmax(1).clamp_(LEAST_LOG_PROB, 0).numpy()
        ordered = values if self._blank == 0 else values[:, self._columns]
        return np.ascontiguousarray(ordered, dtype=np.float32)

    def _numbers_of(self, label: str) -> list[int]:
        """The numbers of a label's characters; 0 is the word boundary."""
        if self._alphabet.is_bpe:
            begins, ends = label.startswith(PIECE_PREFIX), label.endswith(PIECE_PREFIX) and len(label) > 1
            inside = self._characters.numbers_of(label[int(begins) : len(label) - int(ends)])
            return [BOUNDARY] * begins + inside + [BOUNDARY] * ends
        return [BOUNDARY] if label == " " else self._characters.numbers_of(label.replace(" ", ""))

    def _scored_words(self, hotwords: Iterable[str] | None, hotword_weight: float) -> ScoredWords:
        _require_finite("hotword_weight", hotword_weight)
        given = [hotwords] if isinstance(hotwords, str) else list(() if hotwords is None else hotwords)
        _require_strings("hotwords", given)
        hot = list(dict.fromkeys(word for phrase in given for word in phrase.split()))
        settings = self._settings
        weights = None if settings is None else (settings.alpha, settings.unk_score_offset)
        key = (tuple(hot), hotword_weight, weights)
        found = self._tries.get(key)
        if found is None:
            found = ScoredWords.build(self._known_words, self._characters, hot, hotword_weight, weights)
            if len(self._tries) >= _MOST_TRIES_KEPT:
                self._tries.clear()
            self._tries[key] = found
        return found

    def _rules(
        self, words: ScoredWords, beam_width: int, beam_prune_logp: float, token_min_logp: float, history: int
    ) -> Rules:
        beams = {"beam_width": beam_width, "beam_prune_logp": beam_prune_logp, "token_min_logp": token_min_logp}
        for name, value in beams.items():
            require_number(name, value)
        if not (1 <= beam_width < 2**63 and beam_prune_logp <= 0):
            raise AsrError(
                f"beam_width is {beam_width} and beam_prune_logp {beam_prune_logp}; give 1 or more, below 2^63, and 0 "
                "or less."
            )
        settings = self._settings
        trie = words.trie
        insertion = 0.0 if settings is None else float(settings.beta)
        most_at_end = insertion + words.most_end + (words.most_guess if self._alphabet.is_bpe else 0.0)
        return Rules(
            char_begin=self._char_begin,
            char=self._token_chars,
            num_ends=self._num_ends,
            word_of=np.zeros(1, dtype=np.int64),
            has_words=True,
            boundary=BOUNDARY,
            trie_begin=trie.begin,
            trie_char=trie.char,
            trie_next=trie.next,
            trie_word=words.word,
            trie_end=words.end,
            trie_guess=words.guess,
            outside_end=words.outside_end,
            outside_guess=words.outside_guess,
            most_inside=words.most_guess,
            most_at_end=most_at_end,
            long_word=LONG_WORD,
            unk=UNK_ID,
            has_lm=settings is not None,
            lm_scale=0.0 if settings is None else float(settings.alpha),
            insertion=insertion,
            beam=-float(beam_prune_logp),
            beam_size=int(beam_width),
            token_min=float(token_min_logp),
            history=history,
        )

    def _outputs(
        self, beam: PrefixBeam, words: ScoredWords, before: tuple[str, ...], lm: WordModel | None
    ) -> Iterator[OutputBeam]:
        """The texts of all surviving prefixes, after the words before, best first; each is spelled when it is taken.

        Their last words are scored as complete.
        """
        prefixes, rules = beam.prefixes, beam.rules
        merged: dict[int, tuple[Alive, float]] = {}
        for alive in beam.alive():
            # With and without a word boundary at its end, a text is the same.
            text = alive.prefix if alive.length > 0 else int(prefixes.parent[alive.prefix])
            first, score = merged.get(text, (alive, -math.inf))
            merged[text] = (first, float(np.logaddexp(score, alive.am_score)))
        entries = list(merged.values())
        am_score = np.array([score for _, score in entries])
        bonus = np.array([alive.total - alive.am_score for alive, _ in entries])
        context = np.array([alive.context for alive, _ in entries], dtype=np.int64)
        open_words = [position for position, (alive, _) in enumerate(entries) if alive.length > 0]
        if open_words:
            place = np.array([prefixes.place[entries[position][0].prefix] for position in open_words])
            word = np.where(place >= 0, words.word[place.clip(0)], rules.unk)
            bonus[open_words] += rules.insertion + np.where(place >= 0, words.end[place.clip(0)], rules.outside_end)
            if lm is not None:
                log_prob, following = ask(lm, torch.from_numpy(context[open_words]), torch.from_numpy(word))
                bonus[open_words] += rules.lm_scale * log_prob
                context[open_words] = following
        if lm is not None and self._settings is not None and self._settings.score_boundary:
            bonus += rules.lm_scale * ask_final(lm, torch.from_numpy(context))
        total = am_score + bonus
        best_first = np.argsort(-total, kind="stable")
        kept = best_first[total[best_first] >= total.max() - rules.beam].tolist()

        def output(position: int) -> OutputBeam:
            spelled = self._spelled(beam, entries[position][0].prefix)
            state = None if lm is None else LMState((*before, *(word for word, _ in spelled)))
            text = " ".join(word for word, _ in spelled)
            return text, state, spelled, float(am_score[position]), float(total[position])

        return map(output, kept)

    def _spelled(self, beam: PrefixBeam, prefix: int) -> list[WordFrames]:
        path = beam.path(prefix)
        written = "".join([self._characters.symbols[char] for char in beam.prefixes.char[path].tolist()])
        begin, end = beam.prefixes.begin[path].tolist(), beam.prefixes.end[path].tolist()
        words, first = [], 0
        for word in written.split(" "):
            if word:
                words.append((word, begin[first], end[first + len(word) - 1]))
            first += len(word) + 1
        frames = in_order([begin for _, begin, _ in words], [end for _, _, end in words])
        spans = zip(*(each.tolist() for each in frames), strict=True)
        return [(word, span) for (word, _, _), span in zip(words, spans, strict=True)]


def build_ctcdecoder(
    labels: Sequence[str],
    kenlm_model_path: str | Path | None = None,
    unigrams: Collection[str] | None = None,
    alpha: float = DEFAULT_ALPHA,
    beta: float = DEFAULT_BETA,
    unk_score_offset: float = DEFAULT_UNK_LOGP_OFFSET,
    lm_score_boundary: bool = True,
    *,
    language_model: str | Path | nn.Module | WordModel | None = None,
) -> BeamSearchDecoderCTC:
    """Builds a decoder like pyctcdecode's function of this name.

    Args:
        labels: one per column of the logits.
        kenlm_model_path: an n-gram model of words: ARPA text, our binary, or, with `unigrams`, KenLM's binary.
        unigrams: the known words; by default, all words of the model.
        alpha: weight of the language model.
        beta: natural log, added for each word.
        unk_score_offset: log10, added for each unknown word (scaled by `alpha`), and while one is being spelled.
        lm_score_boundary: whether the language model scores sentences with `<s>` and `</s>`.
        language_model: any other language model of words, instead of an n-gram file. A combination with an n-gram model
            (`Interpolated`) finds more than a recurrent model alone.

    Raises:
        AsrError: a model cannot be read, the labels are not usable, or an argument would have no effect.
    """
    alphabet = Alphabet.build_alphabet(labels)
    if unigrams is not None:
        if isinstance(unigrams, (str, Path)):
            raise AsrError(f"unigrams is {str(unigrams)!r}; give the words themselves, not the name of a file.")
        unigrams = list(unigrams)
        _require_strings("unigrams", unigrams)
    if kenlm_model_path is not None and language_model is not None:
        raise AsrError("give either kenlm_model_path or language_model, not both.")
    if kenlm_model_path is None and language_model is None:
        is_given = {
            "unigrams": unigrams is not None,
            "alpha": alpha != DEFAULT_ALPHA,
            "beta": beta != DEFAULT_BETA,
            "unk_score_offset": unk_score_offset != DEFAULT_UNK_LOGP_OFFSET,
            "lm_score_boundary": not lm_score_boundary,
        }
        unused = next((name for name, given in is_given.items() if given), None)
        if unused is not None:
            raise AsrError(f"{unused} has no effect here: there is no language model; leave it out.")
        return BeamSearchDecoderCTC(alphabet)
    settings = LanguageModelSettings(alpha, beta, unk_score_offset, lm_score_boundary)
    ahead = None
    if isinstance(language_model, CombinedLM):
        ahead = next((model for model in language_model.models if isinstance(model, NgramLM)), None)
    source: Any = language_model
    if kenlm_model_path is not None:
        source = str(kenlm_model_path)
        if not is_kenlm_binary(source):
            source = read_ngram(source)
        elif unigrams is None:
            raise AsrError(
                f"{source}: a binary file of KenLM does not list its words; give unigrams, or the ARPA file."
            )
    models = LentModels(*model_maker(source, ordinary_words(unigrams or ())))
    return BeamSearchDecoderCTC(alphabet, models, unigrams or (), settings, kenlm_model_path, ahead)


def _listed_words(lm: WordModel | None) -> frozenset[str]:
    if lm is None:
        return frozenset()
    if isinstance(lm, NgramLM):
        return frozenset(listed_words(lm))
    return frozenset(lm.vocabulary.ordinary)


def _history_of(lm: WordModel | None) -> int:
    """How many of the last words hypotheses must share for pruning by history."""
    if lm is None:
        return 1
    return max(1, lm.order - 1) if isinstance(lm, (NgramLM, KenLanguageModel)) else _HISTORY_OF_OTHERS


def _require_finite(name: str, value: Any) -> None:
    require_number(name, value)
    if math.isinf(value):
        raise AsrError(f"{name} is {value}; it must be finite.")


def _require_strings(name: str, words: Iterable[Any]) -> None:
    wrong = [word for word in words if not isinstance(word, str)]
    if wrong:
        raise AsrError(f"{name}: {wrong[0]!r} is not a word; words are strings.")


def as_array(values: Any) -> npt.NDArray[Any]:
    """An array of an array or of a tensor, on any device, with gradients or without."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    # NumPy has no bfloat16.
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
