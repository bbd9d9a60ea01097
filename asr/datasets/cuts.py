"""Lists of lhotse cuts: reading, splitting by speaker, selection of usable ones with a report, and bucketed batches."""

from __future__ import annotations

import gzip
import logging
import math
import random
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lhotse import CutSet, MonoCut
from lhotse.cut import Cut
from lhotse.dataset import DynamicBucketingSampler, SimpleCutSampler
from lhotse.dataset.sampling.base import CutSampler
from lhotse.serialization import deserialize_item
from torch import Tensor

from asr.audio.io import PartReader
from asr.audio.resample import resample
from asr.audio.samples import to_mono
from asr.errors import AsrError
from asr.text.documents import parse_json, room
from asr.text.lexicon import Tokenizer

_LOGGER = logging.getLogger(__name__)


@dataclass
class FilterReport:
    """Why utterances are left out: counts of unknown words, and ids of utterances by reason."""

    unknown_words: Counter[str] = field(default_factory=Counter)
    unknown_word_ids: list[str] = field(default_factory=list)
    duration_ids: list[str] = field(default_factory=list)
    empty_ids: list[str] = field(default_factory=list)

    def log(self, split: str, num_cuts: int, are_kept: bool = False) -> None:
        """Logs a warning if utterances are left out or, where all are kept, have words without tokens."""
        if self.unknown_words:
            words = ", ".join(f"{word} ({num})" for word, num in self.unknown_words.most_common(20))
            effect = "have no tokens for" if are_kept else "are left out for"
            more = "" if len(self.unknown_words) <= 20 else f" and {len(self.unknown_words) - 20} more"
            _LOGGER.warning(
                "%s: %d of %d utterances %s %d words that are not in the lexicon or token table: %s%s",
                *(split, len(self.unknown_word_ids), num_cuts, effect, len(self.unknown_words), words, more),
            )
        if are_kept:
            return
        for ids, reason in ((self.duration_ids, "are too short or too long"), (self.empty_ids, "have no transcript")):
            if ids:
                _LOGGER.warning("%s: %d of %d utterances are left out that %s", split, len(ids), num_cuts, reason)


def cut_text(cut: MonoCut) -> str:
    """The transcript of a cut; empty if it has none."""
    return " ".join(supervision.text for supervision in cut.supervisions if supervision.text)


def cut_waveform(cut: MonoCut, sampling_rate: int, parts: PartReader | None = None) -> Tensor:
    """The samples (L,) of a cut at a sampling rate, mixed by `to_mono`.

    Only cuts that are not simply a piece of one file with all its channels are read by lhotse. It resamples with
    scipy, finds other samples than those asked for in Opus, and noise at the beginning of a part of an MP3.

    Args:
        cut: the cut.
        sampling_rate: of the result, in Hz.
        parts: keeps files that have to be decoded as a whole for the next cut.

    Raises:
        AsrError: the audio cannot be read, or ends before the cut begins.
    """
    path = cut_file(cut)
    if path is None:
        samples, rate = _read_by_lhotse(cut), cut.sampling_rate
        return resample(torch.from_numpy(to_mono(samples.T, rate)), rate, sampling_rate)
    begin, end = cut_span(cut, sampling_rate)
    try:
        part = (parts or PartReader()).read(path, begin / sampling_rate, end / sampling_rate, sampling_rate)
    except AsrError as error:
        raise AsrError(f"{cut.id}: {error}") from error
    return require_samples(cut, part)


def _read_by_lhotse(cut: MonoCut) -> np.ndarray[Any, Any]:
    try:
        if (samples := cut.load_audio()) is None:
            raise ValueError("it has no recording")
        return samples
    except Exception as error:  # lhotse's backends each raise their own
        reason = str(error).partition("\n")[0].removesuffix(" Details:").rstrip(".")
        cure = "does the file exist, and is it audio?"
        if isinstance(error, ImportError):
            cure = "lhotse changes the recording with that package; install it."
        raise AsrError(f"{cut.id}: the audio of the cut cannot be read ({reason}); {cure}") from error


def require_samples(cut: MonoCut, samples: Tensor) -> Tensor:
    """The samples of a cut.

    Raises:
        AsrError: there are none.
    """
    if samples.numel() == 0:
        raise AsrError(
            f"{cut_file(cut)}: the recording ends before {cut.start} s, where cut {cut.id} begins; prepare the corpus "
            "again."
        )
    return samples


def cut_span(cut: MonoCut, sampling_rate: int) -> tuple[int, int]:
    """Where a cut begins and ends in its recording, in samples at a rate; it has at least one."""
    begin = round(cut.start * sampling_rate)
    return begin, begin + max(1, round(cut.duration * sampling_rate))


def cut_file(cut: MonoCut) -> str | None:
    """The file of a cut that is an unchanged piece of it with all channels; None for any other cut."""
    recording = getattr(cut, "recording", None)
    if recording is None or recording.transforms or [source.type for source in recording.sources] != ["file"]:
        return None
    channels = cut.channel if isinstance(cut.channel, list) else [cut.channel]
    return str(recording.sources[0].source) if set(channels) == set(recording.channel_ids) else None


def cut_source(cut: MonoCut) -> tuple[str, float, float] | None:
    """The file that a cut is part of, and its begin and end there in seconds; None if its audio is changed."""
    recording = getattr(cut, "recording", None)
    if recording is None or getattr(recording, "transforms", None) or len(recording.sources) != 1:
        return None
    return str(recording.sources[0].source), float(cut.start), float(cut.end)


def read_cuts(paths: Sequence[str | Path]) -> list[MonoCut]:
    """The cuts of several manifests, one after the other.

    Manifests are JSON Lines, plain or gzipped. lhotse supports recordings that are the output of a shell command or
    come from the network; these are refused, so that no manifest can run code.

    Raises:
        AsrError: a manifest is missing, damaged or contains something else, or two cuts have the same id.
    """
    cuts: list[MonoCut] = []
    for path in paths:
        if not Path(path).is_file():
            raise AsrError(f"{path}: there is no such cut manifest; write it with `asr prepare`.")
        try:
            for record in _records(Path(path)):
                if not isinstance(record, dict):
                    raise ValueError("a line is not a JSON object")
                if "type" not in record:
                    raise ValueError(f"a line has the fields {', '.join(record)}, but no 'type'")
                _require_plain_files(record)
                cut = deserialize_item(record)
                if not isinstance(cut, Cut):
                    raise ValueError(f"a {type(cut).__name__} is not a cut")
                if not isinstance(cut.id, str):
                    raise ValueError("the id of a cut is not a string")
                if not (math.isfinite(cut.start) and 0.0 <= cut.duration < math.inf):
                    raise ValueError(f"start and duration of the cut {cut.id!r} are not a span of time")
                if cut.has_recording and not (isinstance(cut.sampling_rate, int) and cut.sampling_rate > 0):
                    raise ValueError(f"the recording of the cut {cut.id!r} has no sampling rate")
                cuts.append(cut)
        except Exception as error:  # gzip, json and lhotse each raise their own
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise AsrError(
                f"{path}: this is not a readable manifest of lhotse cuts ({reason}); create it with `asr prepare`, "
                "which also converts other lists."
            ) from error
    repeated = [cut_id for cut_id, num in Counter(cut.id for cut in cuts).items() if num > 1]
    if repeated:
        raise AsrError(f"{', '.join(map(str, paths))}: the cut {repeated[0]!r} occurs twice; give each manifest once.")
    return cuts


_MAX_LINE_BYTES = 1 << 24
_SHELL_CHARACTERS = re.compile(r"[^\w./ +@,:%=~-]")


def _records(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    left = room(path) if is_packed else math.inf
    with gzip.open(path) if is_packed else path.open("rb") as lines:
        while line := lines.readline(_MAX_LINE_BYTES):
            left -= len(line)
            if len(line) == _MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {_MAX_LINE_BYTES} bytes")
            if left < 0:
                raise ValueError("it expands to more than any manifest of this size")
            if line.strip():
                yield parse_json(line)


def _require_plain_files(value: Any) -> None:
    """Refuses audio or features anywhere in a record that lhotse would not read from a file."""
    if isinstance(value, dict):
        if "storage_type" in value:
            raise ValueError("it refers to stored arrays, which this program does not read")
        for source in value.get("sources") or ():
            _require_plain_file(source)
    if isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            _require_plain_files(part)


def _require_plain_file(source: Any) -> None:
    if not isinstance(source, dict) or source.get("type") != "file" or not isinstance(source.get("source"), str):
        raise ValueError("a recording is not a file but, for example, a command or an address")
    name = source["source"]
    # lhotse passes files of these two formats to programs through a shell.
    goes_to_shell = name.lower().endswith((".sph", ".opus")) and _SHELL_CHARACTERS.search(name)
    if name.startswith(("pipe:", "-")) or "://" in name or goes_to_shell:
        raise ValueError(f"the recording {name!r} is not the plain name of a file")


def hold_out_speakers(cuts: Sequence[MonoCut], fraction: float, seed: int) -> tuple[list[MonoCut], list[MonoCut]]:
    """Holds out random speakers with about `fraction` of the speech.

    Args:
        cuts: the cuts.
        fraction: fraction of the total duration.
        seed: of the random choice.

    Returns:
        the cuts of the other speakers, and those that are held out.

    Raises:
        AsrError: there is only one speaker.
    """
    duration: dict[str, float] = defaultdict(float)
    for cut in cuts:
        duration[cut_speaker(cut)] += cut.duration
    if len(duration) < 2:
        raise AsrError("valid_fraction: the training cuts have only one speaker; give valid_cuts instead.")
    speakers = sorted(duration)
    random.Random(seed).shuffle(speakers)
    held_out: set[str] = set()
    wanted = fraction * sum(duration.values())
    taken = 0.0
    for speaker in speakers[:-1]:
        if held_out and taken + duration[speaker] / 2 > wanted:
            break
        held_out.add(speaker)
        taken += duration[speaker]
    rest = [cut for cut in cuts if cut_speaker(cut) not in held_out]
    return rest, [cut for cut in cuts if cut_speaker(cut) in held_out]


def select_usable(
    cuts: Sequence[MonoCut], tokenizer: Tokenizer, min_duration: float, max_duration: float
) -> tuple[list[MonoCut], FilterReport]:
    """Selects cuts with a duration within the bounds (seconds) and a transcript with tokens, and reports the others."""
    usable: list[MonoCut] = []
    left_out = FilterReport()
    for cut in cuts:
        words = cut_text(cut).split()
        unknown = tokenizer.encode(words)[1]
        left_out.unknown_words.update(unknown)
        if not words:
            left_out.empty_ids.append(cut.id)
        elif unknown:
            left_out.unknown_word_ids.append(cut.id)
        elif not min_duration <= cut.duration <= max_duration:
            left_out.duration_ids.append(cut.id)
        else:
            usable.append(cut)
    return usable, left_out


def cut_speaker(cut: MonoCut) -> str:
    """The speaker's name in the corpus; the id of the cut if the speaker is unknown."""
    return next((str(supervision.speaker) for supervision in cut.supervisions if supervision.speaker), cut.id)


_LIBRISPEECH_ID = re.compile(r"(?P<chapter>\d+-\d+)-(?P<number>\d{4})(?P<variant>\D.*)?")


def cut_session(cut: MonoCut) -> tuple[str, float]:
    """What a cut is a part of, and its place there: a chapter of LibriSpeech, by its id, or else a file."""
    found = _LIBRISPEECH_ID.fullmatch(cut.id)
    if found is not None:
        return f"{found['chapter']}{found['variant'] or ''}", float(found["number"])
    # Not by the recording's id: in the manifests of `asr prepare`, each utterance of a file has its own.
    source = cut_source(cut)
    return cut.recording_id if source is None else source[0], float(cut.start)


def bucket_sampler(
    cuts: CutSet, max_duration: float, max_cuts: int | None, num_buckets: int, shuffle: bool, seed: int
) -> CutSampler:
    """Batches of similar duration with limits of seconds and cuts; small corpora get fewer buckets."""
    if len(cuts) < 2:  # lhotse needs two buckets, and a cut in each
        return SimpleCutSampler(cuts, max_duration=max_duration, max_cuts=max_cuts, world_size=1, rank=0)
    with warnings.catch_warnings():
        # lhotse warns that cuts in memory take more memory than lazy ones.
        warnings.filterwarnings("ignore", message="You are using DynamicBucketingSampler with an eagerly read CutSet")
        return DynamicBucketingSampler(
            cuts,
            max_duration=max_duration,
            max_cuts=max_cuts,
            num_buckets=max(2, min(num_buckets, len(cuts) // 2)),
            shuffle=shuffle,
            seed=seed,
            # Each process sees whole batches and takes its share of every one.
            world_size=1,
            rank=0,
        )
