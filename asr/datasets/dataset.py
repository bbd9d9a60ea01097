"""Batches for training acoustic models: lhotse cuts in, padded tensors out; features are kept between epochs.

Shapes: N utterances, L samples, T frames, F features, U tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from lhotse import CutSet, MonoCut
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from asr.audio.fbank import Fbank
from asr.audio.io import from_int16, read_audio, to_int16
from asr.audio.resample import change_speed
from asr.datasets.augment import NoiseMixer, SpecAugment, VocalTractPerturbation
from asr.datasets.cuts import cut_file, cut_source, cut_span, cut_text, cut_waveform, require_samples
from asr.distributed import Share, batch_rows, draw_from
from asr.errors import AsrError, in_one_line, require_below_one
from asr.serialization import atomic_path, write_whole_text
from asr.text.lexicon import Tokenizer

_LOGGER = logging.getLogger(__name__)

_CONFIG_NAME = "fbank.json"
_LONGEST_NAME = 200  # bytes; file systems take 255, and temporary files have longer names


class FeatureMemory:
    """Features (T, F) by name in this process's memory.

    Args:
        gigabytes: the maximum amount to keep.
    """

    def __init__(self, gigabytes: float) -> None:
        self._features: dict[str, Tensor] = {}
        self._bytes = 0
        self.limit_gigabytes(gigabytes)

    def limit_gigabytes(self, gigabytes: float) -> None:
        """Changes the maximum amount."""
        self._limit = gigabytes * 2**30

    def __len__(self) -> int:
        return len(self._features)

    def get(self, key: str) -> Tensor | None:
        """The features, or None if they are not kept."""
        return self._features.get(key)

    def put(self, key: str, features: Tensor) -> None:
        """Keeps features, if there is room."""
        size = features.numel() * features.element_size()
        if key not in self._features and self._bytes + size <= self._limit:
            self._features[key] = features
            self._bytes += size


class FeatureFolder:
    """Features (T, F) by name as float32 `.npy` files, shared by any number of processes and runs.

    Args:
        folder: created if it does not exist.
        config: the settings of the features; a folder of features with other settings is refused.

    Raises:
        AsrError: the folder has features with other settings, or cannot be created.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self._has_failed = False
        wanted = json.dumps(dict(config), sort_keys=True)
        config_path = self.folder / _CONFIG_NAME
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not config_path.exists():
                write_whole_text(config_path, wanted)  # another process may read it at any moment
            found = config_path.read_text(encoding="utf-8")
        except OSError as error:
            raise AsrError(
                f"{folder}: the feature folder cannot be used ({error.strerror}); choose another one."
            ) from error
        if found != wanted:
            raise AsrError(
                f"{folder}: the features in it were computed with {found}, not {wanted}; choose another feature_dir."
            )

    def get(self, key: str) -> Tensor | None:
        try:
            return torch.from_numpy(np.load(self._path(key)))
        except FileNotFoundError:
            return None
        except Exception as error:  # readers of a damaged array may raise anything
            raise AsrError(
                f"{self._path(key)}: the stored features are damaged ({in_one_line(error)}); delete that file."
            ) from error

    def put(self, key: str, features: Tensor) -> None:
        """Stores features; after a failure, such as a full disk, there is a warning, and nothing more is stored."""
        if self._has_failed:
            return
        path = self._path(key)
        try:
            with atomic_path(path) as partial:
                path.parent.mkdir(exist_ok=True)
                np.save(partial, features.numpy())
        except AsrError as error:
            self._has_failed = True
            _LOGGER.warning("feature_dir: no more features are stored: %s", error)

    def _path(self, key: str) -> Path:
        # 256 folders, since a corpus has hundreds of thousands of utterances; their ids may be long and have slashes.
        digest = hashlib.sha1(key.encode()).hexdigest()
        name = key.replace("/", "_").encode()[:_LONGEST_NAME].decode(errors="ignore")
        return self.folder / digest[:2] / f"{name}-{digest[2:10]}.npy"


class AcousticBatch(TypedDict):
    """A batch of utterances."""

    features: Tensor  # (N, T, F) float32
    num_frames: Tensor  # (N,) int64
    tokens: Tensor  # (N, U) int64, padded with 0
    num_tokens: Tensor  # (N,) int64
    texts: list[str]
    cut_ids: list[str]
    rows: Tensor  # (N,) int64, positions in the batch of all processes
    num_all: int  # utterances of that batch
    number: tuple[int, int]  # epoch, and number of the batch in it


class PlannedBatch(NamedTuple):
    """The cuts of a batch of all processes, with the numbers that determine its random numbers."""

    cuts: CutSet
    epoch: int
    number: int
    seed: int


class _Draws(NamedTuple):
    """The random numbers of an utterance."""

    speed_factor: float
    noise: list[float] | None
    pronunciations: list[float] | None
    dither: int | None


class WaveformCache:
    """Decoded audio files, kept in memory as int16 once `fill` has read them; of others, parts are read each time.

    Cuts that are not simply a piece of one file with all its channels are read by lhotse.

    Args:
        sampling_rate: rate to which recordings are resampled, in Hz.
    """

    def __init__(self, sampling_rate: int = 16000) -> None:
        self.sampling_rate = sampling_rate
        self._samples: dict[str, Tensor] = {}

    @property
    def gigabytes(self) -> float:
        """Memory in use, in GiB."""
        return sum(samples.numel() for samples in self._samples.values()) * 2 / 2**30

    def fill(self, cuts: CutSet, max_gigabytes: float = math.inf) -> None:
        """Reads the recordings of `cuts`, unless more than `max_gigabytes` of memory would then be in use.

        For those that cannot be read, `waveform` raises the error later.
        """
        # Whole files, of which the cuts may be small parts.
        missing = {
            path: cut.recording.duration for cut in cuts if (path := cut_file(cut)) and path not in self._samples
        }
        if self.gigabytes + sum(missing.values()) * self.sampling_rate * 2 / 2**30 > max_gigabytes:
            return
        with ThreadPoolExecutor(2) as pool:
            for path, samples in zip(missing, pool.map(self._read_or_none, missing), strict=True):
                if samples is not None:
                    self._samples[path] = samples

    def waveform(self, cut: MonoCut) -> Tensor:
        """The cut's samples (L,) float32 in [-1, 1].

        Raises:
            AsrError: the recording cannot be read, or ends before the cut begins.
        """
        path = cut_file(cut)
        samples = None if path is None else self._samples.get(path)
        if samples is None:
            return cut_waveform(cut, self.sampling_rate)
        begin, end = cut_span(cut, self.sampling_rate)
        return require_samples(cut, from_int16(samples[begin:end]))

    def _read_or_none(self, path: str) -> Tensor | None:
        try:
            return to_int16(read_audio(path, self.sampling_rate))
        except AsrError:
            return None


@dataclass(frozen=True)
class Augmentation:
    """Changes of the utterances that differ between epochs; by default there are none.

    Attributes:
        speed_factors: one of them is drawn for each utterance in each epoch, such as [0.9, 1.0, 1.1].
        noise: adds noise, or None.
        max_vocal_tract_warp: maximum change of the frequency scale, such as 0.1; 0 for none.
        spec_augment: masks features, or None.
        random_pronunciation: whether to draw one of a word's pronunciations instead of taking the first.

    Raises:
        AsrError: there is no speed factor, one is not a positive number, or the warp is not below 1.
    """

    speed_factors: Sequence[float] = (1.0,)
    noise: NoiseMixer | None = None
    max_vocal_tract_warp: float = 0.0
    spec_augment: SpecAugment | None = None
    random_pronunciation: bool = False

    def __post_init__(self) -> None:
        if not self.speed_factors or not all(0.0 < factor < math.inf for factor in self.speed_factors):
            raise AsrError(f"speed_factors is {[*self.speed_factors]}; give positive numbers, or [1.0] for one speed.")
        require_below_one(max_vocal_tract_warp=self.max_vocal_tract_warp)


class AcousticDataset(Dataset[AcousticBatch]):
    """A lhotse map-style dataset: the index is a batch of cuts from a lhotse sampler, or a planned batch.

    Augmentation draws from torch's generator, which a planned batch seeds. A recording that cannot be read is left out
    of its batch, with a warning in the log. If several processes train, all draw the same numbers, and each loads only
    the utterances of its `share`, which may be empty for a small batch.

    Args:
        fbank: computes the features.
        tokenizer: words to tokens; unknown words get none (the data module reports them).
        waveforms: where samples come from.
        features: where features are kept. Used only if they are the same in each epoch, without noise and dither.
        augmentation: changes that differ between epochs.
    """

    def __init__(
        self,
        fbank: Fbank,
        tokenizer: Tokenizer,
        waveforms: WaveformCache | None = None,
        features: FeatureFolder | FeatureMemory | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.fbank = fbank
        self.tokenizer = tokenizer
        self.waveforms = waveforms or WaveformCache(fbank.sampling_rate)
        self.augmentation = augmentation if augmentation is not None else Augmentation()
        warp = self.augmentation.max_vocal_tract_warp
        self.vocal_tract = VocalTractPerturbation(warp, fbank) if warp > 0.0 else None
        self.features = features if self.augmentation.noise is None and fbank.dither == 0.0 else None
        self.share = Share()

    def __getitem__(self, batch: CutSet | PlannedBatch) -> AcousticBatch:
        planned = batch if isinstance(batch, PlannedBatch) else PlannedBatch(batch, 0, 0, 0)
        if planned is batch:
            draw_from(planned.seed, planned.epoch, planned.number)
        cuts = list(planned.cuts)
        draws = [self._draws(cut_text(cut).split()) for cut in cuts]
        features: list[Tensor] = []
        tokens: list[Tensor] = []
        rows: list[int] = []
        reason = "the batch has no cuts"
        for row in self.share.rows(len(cuts)):
            cut, draw = cuts[row], draws[row]
            try:
                features.append(self._features(cut, draw))
            except AsrError as error:
                reason = str(error)
                _LOGGER.warning("%s is left out: %s", cut.id, reason)
                continue
            words = cut_text(cut).split()
            tokens.append(torch.tensor(self._encode(words, draw.pronunciations), dtype=torch.int64))
            rows.append(row)
        if not features and self.share.num == 1:
            raise AsrError(f"no recording of the batch could be read: {reason}")
        # `pad_sequence` needs at least one sequence.
        padded = pad_sequence(features, batch_first=True) if features else torch.zeros(0, 1, self.fbank.feature_dim)
        num_frames = torch.tensor([len(frames) for frames in features], dtype=torch.int64)
        with batch_rows(rows, len(cuts)):
            if self.vocal_tract is not None:
                padded = self.vocal_tract(padded)
            if self.augmentation.spec_augment is not None:
                padded = self.augmentation.spec_augment(padded, num_frames)
        return {
            "features": padded,
            "num_frames": num_frames,
            "tokens": pad_sequence(tokens, batch_first=True) if tokens else torch.zeros(0, 1, dtype=torch.int64),
            "num_tokens": torch.tensor([len(ids) for ids in tokens], dtype=torch.int64),
            "texts": [cut_text(cuts[row]) for row in rows],
            "cut_ids": [cuts[row].id for row in rows],
            "rows": torch.tensor(rows, dtype=torch.int64),
            "num_all": len(cuts),
            "number": (planned.epoch, planned.number),
        }

    def _draws(self, words: list[str]) -> _Draws:
        augmentation, factors = self.augmentation, self.augmentation.speed_factors
        return _Draws(
            factors[0] if len(factors) == 1 else factors[int(torch.randint(len(factors), ()))],
            None if augmentation.noise is None else augmentation.noise.draw(),
            torch.rand(len(words)).tolist() if augmentation.random_pronunciation else None,
            None if self.fbank.dither == 0.0 else int(torch.randint(1 << 48, ())),
        )

    def _features(self, cut: MonoCut, draw: _Draws) -> Tensor:
        """The features of a cut, (T, F)."""
        speed_factor = draw.speed_factor
        key = _audio_name(cut) if speed_factor == 1.0 else f"{_audio_name(cut)}_sp{speed_factor:g}"
        stored = None if self.features is None else self.features.get(key)
        if stored is not None:
            return stored
        waveform = self.waveforms.waveform(cut)
        if speed_factor != 1.0:
            waveform = change_speed(waveform, speed_factor)
        if self.augmentation.noise is not None:
            waveform = self.augmentation.noise(waveform, draw.noise)
        with torch.no_grad(), torch.random.fork_rng(devices=[], enabled=draw.dither is not None):
            if draw.dither is not None:
                torch.manual_seed(draw.dither)
            features: Tensor = self.fbank(waveform[None], torch.tensor([len(waveform)]))[0][0]
        if self.features is not None:
            self.features.put(key, features)
        return features

    def _encode(self, words: list[str], draws: list[float] | None) -> list[int]:
        variants = None
        if draws is not None and self.tokenizer.lexicon is not None:
            variants = [
                int(draw * len(self.tokenizer.pronunciations(word))) for word, draw in zip(words, draws, strict=True)
            ]
        return self.tokenizer.encode(words, variants)[0]


def _audio_name(cut: MonoCut) -> str:
    """A cut's id and a digest of where its audio is, and of the file's size and time of modification.

    In another manifest, another cut may have the same id, and a file may change before another run.
    """
    source = cut_source(cut)
    if source is None:
        return cut.id
    try:
        status = Path(source[0]).stat()
        state = (status.st_size, status.st_mtime_ns)
    except OSError:
        state = (0, 0)  # reading it will say why
    return f"{cut.id}-{hashlib.sha1(repr((*source, *state)).encode()).hexdigest()[:12]}"
