"""All options of recognition that a user or a bundle may set, and the passes in which each has an effect.

An option that would have no effect is refused, so that nobody measures a setting that was never in force.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any

from asr.errors import AsrError
from asr.kernels.linear import ACOUSTIC_PRECISIONS
from asr.lm.cached.approximations import CacheOptions
from asr.options import Option, check_options, device_named, option, options_of

# Interpolating a well-trained recurrent model with a small n-gram saves too few errors for its time, so that mode is
# not a default; see `asr.decoding.build.available_modes`.
MODES = {
    "rnn": "the recurrent language model",
    "interpolated": "the recurrent and the larger n-gram model, interpolated",
    "large_ngram": "the larger n-gram model",
    "ngram": "only the small n-gram model that is part of the decoding graph",
}
"""Mode -> the language model that decides."""

EXTERNAL_MODE = "external"
"""The mode if the user provides a language model."""

SECOND_PASSES = {
    "none": "no second pass",
    "lattice": "another language model over the lattice that the first pass leaves",
    "nbest": "another language model over the best sentences of that lattice, as a prefix tree",
}
"""`second_pass` -> its description."""


_WIDEST_BEAM = 1e30  # wider beams become infinite: float32 cannot hold much more
_MAX_SCALE = 1e6
_LONGEST_PAUSE = 60.0  # between two sentences; the graph gets a state for each frame


@dataclass(frozen=True)
class DecodingOptions:
    """Beams and scales. A path's score, higher is better, is

        total = am_scale * am_score + graph_scale * graph_score + lm_scale * lm_score
                + word_insertion_penalty * number of words

    where `lm_score` is the score of the language model given to `decode`. To replace the graph's own language model,
    give `Difference(large, small)`; to keep part of it, lower `lm_scale` as well.

    Args:
        search_beam: partial paths whose score is this far below the best one of their frame are pruned.
        output_beam: lattice arcs are pruned if the best path through them is this far below the best path.
        min_active_states: minimum number of partial paths of an utterance that survive a frame, even outside the beam.
        max_active_states: maximum number of partial paths that survive, except for ties. Token passing counts (graph
            state, word history) pairs. k2 counts graph states, and keeps within both limits only roughly: where a frame
            is outside of them, it makes the beam of the next ones narrower or wider.
        am_scale: weight of the frame log-probabilities.
        graph_scale: weight of the graph's scores.
        lm_scale: weight of the language model's scores.
        word_insertion_penalty: added for each word; negative values give fewer words.
        skip_beam: words whose partial path, without their language model score, is this far below the best one are
            pruned before the language model is queried, in the search and in rescoring. None queries it for all.
        max_contexts_per_state: maximum number of word histories at a state; None keeps all (exact).
        context_beam: in lattice rescoring, word histories whose score is this far below the best one of their frame are
            pruned; None keeps all (exact, but with many times as many language model queries).
        blank_skip_threshold: of consecutive frames whose blank probability exceeds this, only the first is decoded;
            None decodes all frames (exact).
        chunk_frames: with `lm_fusion="chunks"`, number of frames by which the lattice grows between two rescorings.
        lookahead_frames: with `lm_fusion="chunks"`, number of frames that the search is ahead of the language model.
        max_token_seconds: words whose tokens last longer than this on average count as noise and are left out of a
            recognizer's results; see `asr.decoding.words`. None leaves nothing out.
        pause_seconds: stretches of at least this length in which nothing is louder than the noise of the recording are
            silence, whatever the acoustic model finds there; see `asr.models.pauses`. None, or inf, leaves all to it.
        sentence_pause_seconds: where there is silence of at least this length, a sentence may end and another begin
            (`asr.graph.context`). A recognizer adds this to its graph if that is of tied states. At most 60 s. None,
            or inf, takes each segment of a recording for one sentence.
        mbr_scale: scale of the total scores by whose posteriors the words with the least expected errors are chosen
            from the lattice (minimum-Bayes-risk decoding, `asr.decoding.mbr`); 1 is that of the search. None, or inf,
            takes the words of the best path.
        word_beam: the old name of `skip_beam`.

    Raises:
        AsrError: a value is out of range.
    """

    search_beam: float = option(
        20.0, "drop partial paths that are this much worse than the best one; larger is slower and better"
    )
    output_beam: float = option(
        8.0, "drop lattice paths that are this much worse than the best one before rescoring", needs="lattice"
    )
    min_active_states: int = option(30, "minimum number of partial paths that survive a frame, even outside the beam")
    max_active_states: int = option(7000, "maximum number of partial paths that survive a frame")
    am_scale: float = option(1.0, "weight of the acoustic model")
    graph_scale: float = option(1.0, "weight of the decoding graph and its n-gram")
    lm_scale: float = option(1.0, "weight of the large language model", needs="large model")
    word_insertion_penalty: float = option(0.0, "added for each word; negative for fewer words")
    skip_beam: float | None = option(
        None,
        "do not ask the large language model about words that are this much worse than the best path without it",
        needs="large model",
        kind=float,
    )
    max_contexts_per_state: int | None = option(
        None,
        "keep only this many word histories at a state; slower on a CPU",
        needs="large model",
        kind=int,
    )
    context_beam: float | None = option(
        10.0,
        "while a lattice is rescored, drop word histories this much worse than the best; inf keeps all",
        needs="rescoring",
        optional=True,
    )
    blank_skip_threshold: float | None = option(
        None,
        "of frames in a row that are blank with a higher probability than this, decode only the first",
        kind=float,
    )
    chunk_frames: int = option(
        100, "frames after which the large language model prunes the growing lattice", needs="chunks"
    )
    lookahead_frames: int = option(12, "frames that the search is ahead of the large language model", needs="chunks")
    max_token_seconds: float | None = option(
        None,
        "leave out words whose tokens last longer than this on average, which is noise",
        kind=float,
    )
    pause_seconds: float | None = option(
        0.5,
        "take stretches of at least this length without anything louder than noise for silence (inf: none)",
        optional=True,
    )
    sentence_pause_seconds: float | None = option(
        0.25,
        "let a sentence end and another begin in silence of at least this length (inf: nowhere)",
        optional=True,
    )
    mbr_scale: float | None = option(
        None,
        "choose the words with the least expected errors from the lattice, by posteriors of its scores at this scale "
        "(minimum-Bayes-risk decoding; try 1; inf: those of the best path)",
        needs="rescored lattice",
        kind=float,
    )
    word_beam: InitVar[float | None] = None

    def __post_init__(self, word_beam: float | None) -> None:
        if word_beam is not None:
            warnings.warn("word_beam is now skip_beam; the old name will go.", FutureWarning, stacklevel=3)
            object.__setattr__(self, "skip_beam", word_beam)
        check_options(self, "decoding options")
        beams = ("search_beam", "output_beam", "skip_beam", "context_beam")
        endless = ("pause_seconds", "sentence_pause_seconds", "mbr_scale")
        for name in (*beams, "am_scale", "max_token_seconds", *endless):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise AsrError(f"decoding options: {name} is {value}; it must be above 0.")
            if name in beams and value is not None and value > _WIDEST_BEAM:
                object.__setattr__(self, name, math.inf)
        # On a command line nothing else turns off what the bundle sets; total scores times such a scale may overflow.
        for name in endless:
            if (getattr(self, name) or 0.0) > _WIDEST_BEAM:
                object.__setattr__(self, name, None)
        if (self.sentence_pause_seconds or 0.0) > _LONGEST_PAUSE:
            raise AsrError(
                f"decoding options: sentence_pause_seconds is {self.sentence_pause_seconds}; it must be at most "
                f"{_LONGEST_PAUSE:.0f}, or inf."
            )
        for name in ("am_scale", "graph_scale", "lm_scale", "word_insertion_penalty"):
            if not abs(getattr(self, name)) <= _MAX_SCALE:  # with larger scales, sums of scores overflow float32
                raise AsrError(
                    f"decoding options: {name} is {getattr(self, name)}; it must be a finite number, at most "
                    f"{_MAX_SCALE:.0e}."
                )
        for name in ("graph_scale", "lm_scale"):  # a negative one would make what is impossible the best
            if getattr(self, name) < 0:
                raise AsrError(f"decoding options: {name} is {getattr(self, name)}; it must be 0 or more.")
        if not 0 <= self.min_active_states <= self.max_active_states or self.max_active_states < 1:
            raise AsrError(
                f"decoding options: min_active_states is {self.min_active_states} and max_active_states "
                f"{self.max_active_states}; choose 0 <= min_active_states <= max_active_states."
            )
        if self.chunk_frames < 1 or self.lookahead_frames < 0 or self.chunk_frames + self.lookahead_frames >= 2**31:
            raise AsrError(
                f"decoding options: chunk_frames is {self.chunk_frames} and lookahead_frames {self.lookahead_frames}; "
                "give at least 1 and 0, below 2^31 together."
            )
        if self.max_contexts_per_state is not None and self.max_contexts_per_state < 1:
            raise AsrError(
                f"decoding options: max_contexts_per_state is {self.max_contexts_per_state}; give at least 1."
            )
        if self.blank_skip_threshold is not None and not 0 < self.blank_skip_threshold < 1:
            raise AsrError(
                f"decoding options: blank_skip_threshold is {self.blank_skip_threshold}; it must be above 0 and "
                "below 1."
            )


@dataclass(frozen=True)
class LanguageModelOptions:
    """How language models are combined, within the first pass and in a second pass.

    With a second pass, the language model score of a sentence is

        (1 - second_pass_weight) * score of the first pass's model + second_pass_weight * score of the second's

    where the first term is 0 if the first pass has the mode `ngram`, whose model is in the graph.

    Args:
        rnn_weight: weight of the recurrent model in the mode `interpolated`.
        carry_history: whether the recurrent model starts each segment of a recording and each utterance of a stream in
            the state that the ones before left, instead of after `<s>` alone. n-gram models start from `<s>` anyway.
            It helps only networks that were trained so (`RNNLMConfig.carry_state`).
        second_pass: a key of `SECOND_PASSES`.
        second_pass_mode: the mode of the second pass, a key of `MODES`.
        second_pass_weight: see above; 1 drops the score of the first pass's language model.
        second_pass_sentences: maximum number of sentences per segment that are rescored.

    Raises:
        AsrError: a value is out of range.
    """

    rnn_weight: float = option(
        0.5, "weight of the recurrent model where it is interpolated with an n-gram, 0 to 1", needs="both models"
    )
    carry_history: bool = option(
        False,
        "the recurrent language model remembers the earlier segments of a recording and utterances of a stream",
        needs="carried history",
    )
    second_pass: str = option("none", "what follows the first pass", choices=SECOND_PASSES)
    second_pass_mode: str = option("rnn", "the language model of the second pass", choices=MODES, needs="second pass")
    second_pass_weight: float = option(
        1.0, "weight of the second pass's language model against that of the first, 0 to 1", needs="second pass"
    )
    second_pass_sentences: int = option(
        1000, "the maximum number of sentences that a second pass over a list rescores", needs="second pass nbest"
    )

    def __post_init__(self) -> None:
        check_options(self, "language model options")
        for name in ("rnn_weight", "second_pass_weight"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise AsrError(f"language model options: {name} is {getattr(self, name)}; it must be between 0 and 1.")
        if self.second_pass_sentences < 1:
            raise AsrError(
                f"language model options: second_pass_sentences is {self.second_pass_sentences}; give 1 or more."
            )


_MAX_WORKERS = 64


@dataclass(frozen=True)
class ResourceOptions:
    """How much audio a recognizer processes at a time, and how much memory its language models may take.

    Only `max_segment_seconds` and `acoustic_precision`, which rounds scores, can change the recognized words. Where
    histories share hidden states, as an approximation, words also depend on what the caches hold, and so on
    `cache_bytes`, `batch_seconds` and `num_workers`.

    Args:
        max_segment_seconds: longer recordings are cut at pauses into segments of at most this length.
        batch_seconds: maximum audio in a batch of segments, padding included. None means 50 seconds on a CPU and 3,000
            on a GPU.
        num_workers: number of batches that are decoded at the same time, each with its own language model and share of
            `cache_bytes`, while the next batch goes through the acoustic model. 0 runs all stages in turn. More workers
            than free cores do not help.
        cache_bytes: memory for the recurrent language model's caches; the least frequently used histories are evicted.
        lm_device_bytes: device memory for the tables of the large language models; the rest of the tables stays in
            host memory. None puts everything on the device.
        acoustic_precision: precision of the acoustic model's matrix products on a CPU; see `asr.kernels.linear` for
            `auto`.
        lm_hidden_device, lm_output_device: where the recurrent language model runs its hidden and its output layer,
            such as `cuda` and `cpu`. Histories are kept, and lattices rescored, where the output layer is. None is the
            CPU for lattices, and the recognizer's device within the search. The hidden layer is there, too, by default.

    Raises:
        AsrError: a value is out of range, this machine has no such device, or `lm_device_bytes` is combined with
            another device of the language model.
    """

    max_segment_seconds: float = option(25.0, "cut longer recordings at pauses", needs="whole recordings")
    batch_seconds: float | None = option(
        None,
        "audio that is recognized together, in seconds (50 on a CPU, 3,000 on a GPU)",
        kind=float,
        needs="whole recordings",
    )
    num_workers: int = option(
        0,
        "number of batches that are decoded at the same time, while the next one goes through the acoustic model; set "
        "OMP_NUM_THREADS=1 with it; 0: one after the other",
        flag="--workers",
        needs="whole recordings",
    )
    cache_bytes: int = option(
        1 << 30,
        "memory for the recurrent language model's caches; less is slower",
        flag="--cache-mb",
        unit="MB",
        needs="recurrent model",
    )
    lm_device_bytes: int | None = option(
        None,
        "device memory for the tables of the large language models; the rest stays in host memory",
        kind=int,
        flag="--lm-device-mb",
        unit="MB",
        needs="large model",
    )
    acoustic_precision: str = option("auto", "what the acoustic model multiplies", choices=ACOUSTIC_PRECISIONS)
    lm_hidden_device: str | None = option(
        None, "where the recurrent language model's hidden layer runs", kind=str, needs="recurrent model"
    )
    lm_output_device: str | None = option(
        None,
        "where its output layer runs, its caches are and lattices are rescored",
        kind=str,
        needs="recurrent model",
    )

    def __post_init__(self) -> None:
        check_options(self, "resources")
        for name in ("lm_hidden_device", "lm_output_device"):
            if getattr(self, name) is not None:
                device_named(getattr(self, name), name)
        if not 0 <= self.num_workers <= _MAX_WORKERS:
            raise AsrError(f"num_workers is {self.num_workers}; it must be between 0 and {_MAX_WORKERS}.")
        if not 1.0 <= self.max_segment_seconds < math.inf:
            raise AsrError(f"max_segment_seconds is {self.max_segment_seconds}; give 1 second or more.")
        if self.batch_seconds is not None and not 0.0 < self.batch_seconds < math.inf:
            raise AsrError(f"batch_seconds is {self.batch_seconds}; it must be above 0, and finite.")
        if self.lm_device_bytes is not None and (self.lm_hidden_device or self.lm_output_device):
            raise AsrError(
                "lm_device_bytes keeps tables in host memory and cannot be combined with lm_hidden_device or "
                "lm_output_device; leave out one of them."
            )


@dataclass(frozen=True)
class Settings:
    """All options of recognition that may change words.

    Args:
        decoding: beams and scales.
        language_models: combination of language models, and the second pass.
        cache: approximations of the recurrent model.
        given: names of the options that the user gave; the others are the bundle's or defaults.
    """

    decoding: DecodingOptions = field(default_factory=DecodingOptions)
    language_models: LanguageModelOptions = field(default_factory=LanguageModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    given: frozenset[str] = frozenset()

    @classmethod
    def of(cls, values: dict[str, Any], given: Iterable[str] = ()) -> Settings:
        """Makes settings from a flat mapping of all options.

        Args:
            values: option values, by current names.
            given: names of the options that the user gave, current or old.

        Raises:
            AsrError: an option does not exist or is out of range.
        """
        unknown = sorted(set(values) - set(options_of(*_PARTS)))
        if unknown:
            known = ", ".join(sorted(options_of(*_PARTS)))
            raise AsrError(f"there is no decoding option {unknown[0]!r}; there are {known}.")

        def of(part: type) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name in options_of(part)}

        return cls(
            DecodingOptions(**of(DecodingOptions)),
            LanguageModelOptions(**of(LanguageModelOptions)),
            CacheOptions(**of(CacheOptions)),
            frozenset(OLD_NAMES.get(name, name) for name in given),
        )

    def parts(self) -> dict[str, DecodingOptions | LanguageModelOptions | CacheOptions]:
        """The three groups of options, by field name."""
        return {"decoding": self.decoding, "language_models": self.language_models, "cache": self.cache}

    @property
    def models(self) -> tuple[LanguageModelOptions, CacheOptions]:
        """The two groups of options that `Pass` takes."""
        return self.language_models, self.cache


_PARTS = (DecodingOptions, LanguageModelOptions, CacheOptions)

OLD_NAMES = {"word_beam": "skip_beam"}
"""Old name of an option -> current name. Bundles may use either; users who give an old name get a hint."""


def setting_options() -> dict[str, Option]:
    """The options of `Settings`, by name; bundles and `Recognizer(options=...)` accept these."""
    return options_of(*_PARTS)


_ARGUMENTS = ("mode", "language_model", "hot_words", "hot_word_score", "decoder", "lm_fusion", "options", "resources")

FIXED: dict[str, str] = {
    **{name: f"load another one with asr.load(..., {name}=...)" for name in _ARGUMENTS},
    **{name: f"load another one with asr.load(..., options={{'{name}': ...}})" for name in setting_options()},
    **{
        name: f"load another one with asr.load(..., resources=asr.ResourceOptions({name}=...))"
        for name in options_of(ResourceOptions)
    },
    **dict.fromkeys(("settings", "final_options"), "load another one with asr.load(..., options={...})"),
    "final_mode": "load another one with asr.load(..., mode=...)",
    "bundle": "make another one with asr.Recognizer(bundle)",
    "sampling_rate": "give the rate of your samples to each call, as in recognizer(samples, 8000)",
}
"""What of a recognizer cannot be set once it is built, because it would have no effect -> what to do instead."""


@dataclass(frozen=True)
class Pass:
    """The properties of a run that determine which options have an effect.

    Args:
        mode: a key of `MODES`, or `EXTERNAL_MODE`.
        lm_fusion: where the first pass's large language model acts.
        language_models: includes the choice of a second pass.
        cache: approximations, some of which require others.
        keeps_lattice: whether lattices are kept: the user may get them or n-best lists, or they are needed otherwise.
    """

    mode: str
    lm_fusion: str
    language_models: LanguageModelOptions
    cache: CacheOptions
    keeps_lattice: bool = False

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of the first pass and, if there is one, of the second."""
        return (self.mode, self.language_models.second_pass_mode) if self.has_second else (self.mode,)

    @property
    def has_second(self) -> bool:
        return self.language_models.second_pass != "none"

    @property
    def carries_history(self) -> bool:
        """Whether a language model can remember the utterances before."""
        return self.mode in ("rnn", "interpolated", EXTERNAL_MODE) and not self.has_second

    @property
    def rescores(self) -> bool:
        """Whether a language model rescores a lattice in some pass."""
        is_first = self.mode != "ngram" and self.lm_fusion in ("lattice", "chunks")
        return is_first or self.language_models.second_pass == "lattice"


WHOLE_RECORDINGS = "whole recordings"
"""The need of options that do not apply to streams; command lines refuse them with `--stream`."""

NEEDS: dict[str, tuple[str, Callable[[Pass], bool]]] = {
    "large model": ("a mode with a large language model", lambda run: set(run.modes) != {"ngram"}),
    "recurrent model": (
        "a mode with the bundle's recurrent language model (rnn or interpolated)",
        lambda run: bool({"rnn", "interpolated"} & set(run.modes)),
    ),
    "carried history": (
        "a recurrent or your own language model in the first pass, and no second pass",
        lambda run: run.carries_history,
    ),
    "recombination length": ("recombination_length", lambda run: run.cache.recombination_length is not None),
    "recombination best": (
        "recombination_length and recombination best",
        lambda run: run.cache.recombination_length is not None and run.cache.recombination == "best",
    ),
    "both models": ("the mode interpolated", lambda run: "interpolated" in run.modes),
    "rescoring": ("a language model that rescores a lattice (lm_fusion lattice or chunks)", lambda run: run.rescores),
    "chunks": (
        "a large language model with lm_fusion chunks",
        lambda run: run.mode != "ngram" and run.lm_fusion == "chunks",
    ),
    "lattice": (
        "a lattice (lm_fusion lattice or chunks, a second pass, mbr_scale, lattices or n-best lists)",
        lambda run: run.rescores or run.has_second or run.keeps_lattice,
    ),
    "rescored lattice": (
        "a lattice with the scores of the last language model (second_pass none or lattice)",
        lambda run: run.language_models.second_pass != "nbest",
    ),
    WHOLE_RECORDINGS: ("recordings that are complete", lambda run: True),
    "second pass": ("second_pass lattice or nbest", lambda run: run.has_second),
    "second pass nbest": ("second_pass nbest", lambda run: run.language_models.second_pass == "nbest"),
}
"""Need of an option -> its description, and a predicate that says whether a pass meets it."""


def refuse_unused(options: Iterable[Option], run: Pass) -> None:
    """Refuses options that would have no effect.

    Args:
        options: the options that the user gave.
        run: the pass.

    Raises:
        AsrError: an option has a need that the pass does not meet.
    """
    for one in options:
        if not one.needs:
            continue
        text, has = NEEDS[one.needs]
        if not has(run):
            raise AsrError(
                f"{one.name} has no effect here: it needs {text}, and this recognizer has the mode {run.mode}, "
                f"lm_fusion {run.lm_fusion} and second_pass {run.language_models.second_pass}; leave it out."
            )
