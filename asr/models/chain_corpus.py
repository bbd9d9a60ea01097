"""Utterances prepared for frame-level training: filterbanks in several conditions, phones, and where each begins.

A prepared folder holds `utterances.json`, one `features-<condition>.npy` for each condition (all utterances one after
the other, float16 log energies, not normalized), and alignments (`Alignment.save`). Features are memory-mapped.

Shapes: U utterances, T frames of all of them together, F features, P phones of all utterances together.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asr.audio.fbank import Fbank
from asr.datasets.augment import CONDITIONS, Condition
from asr.datasets.corpora.base import Utterance
from asr.datasets.kaldi import utterance_reader
from asr.errors import AsrError, in_one_line
from asr.graph.fst import offsets
from asr.locks import lock
from asr.serialization import atomic_path, cure_of, load_arrays, write_whole_text
from asr.text.documents import parse_json
from asr.text.lexicon import Lexicon

SILENCE = "SIL"
FRAME_SECONDS = 0.01
LIST_FILE = "utterances.json"
Progress = Callable[[int, int], None]
"""Called with the number of utterances done, and the number of all utterances."""
_UTTERANCES_PER_FLUSH = 50

# Number of recordings from which the condition "babble" takes its voices.
_NUM_OTHERS = 80


@dataclass(frozen=True)
class PreparedUtterance:
    """One utterance of a prepared folder.

    Attributes:
        utterance_id: as in the corpus.
        corpus: name of the corpus.
        speaker: unique over all corpora.
        text: normalized words.
        num_frames: frames in each condition, in the order of `PreparedCorpus.conditions`.
    """

    utterance_id: str
    corpus: str
    speaker: str
    text: str
    num_frames: tuple[int, ...]


@dataclass(frozen=True)
class Alignment:
    """The phones of all utterances, silence included, and the seconds at which they begin at speed 1.

    Attributes:
        phones: the symbols.
        begin: (U + 1,) int64; utterance u has the entries `begin[u] : begin[u + 1]`, none if it has no alignment.
        phone: (P,) int64, indices into `phones`.
        start: (P,) float64 seconds.
        score: (U,) float64, the mean log-probability per frame; higher is better, -inf without alignment.
        made_from: a checksum of what the alignment depends on besides the corpus; empty if unknown.
    """

    phones: tuple[str, ...]
    begin: npt.NDArray[np.int64]
    phone: npt.NDArray[np.int64]
    start: npt.NDArray[np.float64]
    score: npt.NDArray[np.float64]
    made_from: str = ""

    @classmethod
    def from_lists(
        cls, phones: Sequence[str], utterances: Sequence[tuple[Sequence[int], Sequence[float], float]]
    ) -> Alignment:
        """Makes an alignment from (phones, seconds, score) of each utterance."""
        return cls(
            tuple(phones),
            offsets([len(each[0]) for each in utterances]),
            np.array([phone for each in utterances for phone in each[0]], dtype=np.int64),
            np.array([second for each in utterances for second in each[1]], dtype=np.float64),
            np.array([each[2] for each in utterances], dtype=np.float64),
        )

    def of(self, utterance: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The phones of an utterance, and the seconds at which they begin."""
        span = slice(self.begin[utterance], self.begin[utterance + 1])
        return self.phone[span], self.start[span]

    def save(self, path: Path) -> None:
        """Writes an `.npz`, completely or not at all."""
        fields = {**vars(self), "phones": np.array(self.phones)}
        with atomic_path(path) as partial:
            np.savez(partial, **fields)

    @classmethod
    def load(cls, path: Path) -> Alignment:
        """Reads what `save` wrote.

        Raises:
            AsrError: there is no such file, or it is damaged.
        """
        if not path.is_file():
            raise AsrError(f"{path}: there is no such alignment; make it first.")
        try:
            file = load_arrays(path)
            phones = tuple(str(phone) for phone in file["phones"])
            made_from = str(file["made_from"]) if "made_from" in file else ""  # earlier versions lack it
            begin, phone, start, score = (file[name] for name in ("begin", "phone", "start", "score"))
            return cls(phones, begin, phone, start, score, made_from)
        except Exception as error:  # readers of a damaged archive may raise anything
            raise AsrError(
                f"{path}: this is not an alignment ({in_one_line(error)}); delete it and make it again."
            ) from error


def _row_of(entry: dict[str, Any]) -> PreparedUtterance:
    return PreparedUtterance(**{**entry, "num_frames": tuple(entry["num_frames"])})


class PreparedCorpus:
    """A prepared folder, read lazily.

    Args:
        folder: written by `write_corpus`.

    Attributes:
        corpora: names of the corpora that it was made from, also of those without a usable utterance.
        sources: what the command that made it calls their parts, each with a checksum of its utterances and audio
            files; empty if unknown, the checksums also one by one.
        left_out: one sentence for each utterance that could not be used.

    Raises:
        AsrError: it is not such a folder, or its files are damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / LIST_FILE).is_file():
            raise AsrError(f"{folder}: there is no prepared corpus; prepare it first.")
        try:
            self._read()
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise AsrError(
                f"{folder}: the prepared corpus is damaged ({in_one_line(error)}); delete it and prepare it again."
            ) from error

    def _read(self) -> None:
        listing: dict[str, Any] = parse_json((self.folder / LIST_FILE).read_text(encoding="utf-8"))
        self.condition_names: tuple[str, ...] = tuple(listing["conditions"])
        self.conditions: tuple[Condition, ...] = tuple(CONDITIONS[name] for name in self.condition_names)
        self.fbank_arguments: dict[str, Any] = listing["fbank"]
        self.utterances = list(map(_row_of, listing["utterances"]))
        self.corpora = frozenset(listing.get("corpora", (each.corpus for each in self.utterances)))
        # Earlier versions have only names.
        self.sources: dict[str, str] = {**dict.fromkeys(listing.get("parts", ()), ""), **listing.get("sources", {})}
        self.left_out: tuple[str, ...] = tuple(listing.get("left_out", ()))
        counts = np.array([each.num_frames for each in self.utterances]).reshape(-1, len(self.conditions))
        self._offset = np.concatenate([np.zeros((1, len(self.conditions)), dtype=np.int64), counts.cumsum(0)])
        files = (self.folder / f"features-{name}.npy" for name in self.condition_names)
        self._features = [np.load(file, mmap_mode="r") for file in files]

    def __len__(self) -> int:
        return len(self.utterances)

    @property
    def num_features(self) -> int:
        """F."""
        return int(self._features[0].shape[1])

    def features(self, utterance: int, condition: int) -> npt.NDArray[np.float16]:
        """(T, F) float16 of one utterance in one condition."""
        begin, end = self._offset[utterance : utterance + 2, condition]
        return self._features[condition][begin:end]


def write_corpus(
    folder: str | Path,
    utterances: Iterable[tuple[str, Utterance]],
    lexicon: Lexicon,
    fbank: Fbank,
    conditions: Sequence[str] = tuple(CONDITIONS),
    sources: Mapping[str, str] | None = None,
    num_jobs: int = 1,
    on_progress: Progress | None = None,
) -> list[str]:
    """Decodes all audio and writes a prepared folder.

    If it is interrupted, the next call with the same arguments goes on from there, with the same result.

    Args:
        folder: created if it is missing.
        utterances: (corpus name, utterance).
        lexicon: utterances with a word that is not in it are left out.
        fbank: the features.
        conditions: names of `CONDITIONS`; "1" comes first, because alignments are made on it.
        sources: kept as `PreparedCorpus.sources`.
        num_jobs: number of threads that decode audio and compute features.
        on_progress: called after each utterance.

    Returns:
        one sentence for each utterance that was left out.

    Raises:
        AsrError: all of them were, the folder cannot be written, or an interrupted call had other arguments.
    """
    utterances = list(utterances)
    read = utterance_reader()
    voices = _voices([utterance for _, utterance in utterances], read, fbank.sampling_rate)

    def prepare(item: tuple[str, Utterance]) -> tuple[PreparedUtterance, list[Tensor]] | str:
        """The utterance and its features (T, F) in each condition, or why it is left out."""
        corpus, utterance = item
        unknown = [word for word in utterance.text.split() if word not in lexicon]
        if unknown:
            return f"{utterance.utterance_id}: no pronunciation of {' '.join(unknown)}"
        try:
            waveform = read(utterance, fbank.sampling_rate)
        except AsrError as error:
            return str(error)
        speaker = f"{corpus}-{utterance.speaker}"
        # Each utterance draws its own random numbers, whether it is the first after an interruption or not.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{speaker} {utterance.utterance_id}".encode()))
        features = []
        for name in conditions:
            changed = CONDITIONS[name].apply(waveform, generator, voices or [waveform])
            with torch.no_grad():
                features.append(fbank(changed[None], torch.tensor([len(changed)]))[0][0])
        lengths = tuple(map(len, features))
        return PreparedUtterance(utterance.utterance_id, corpus, speaker, utterance.text, lengths), features

    made_from = {
        "conditions": list(conditions),
        "fbank": fbank.arguments,
        "corpora": sorted({corpus for corpus, _ in utterances}),
        "sources": dict(sorted((sources or {}).items())),
        "utterances": [utterance.utterance_id for _, utterance in utterances],
        "unknown": sorted({word for _, each in utterances for word in each.text.split() if word not in lexicon}),
    }
    folder = Path(folder)
    with _FeatureFiles(folder, conditions, fbank.feature_dim, made_from) as files, ThreadPoolExecutor(num_jobs) as pool:
        begin = files.num_done
        for done, result in enumerate(pool.map(prepare, utterances[begin:]), start=begin + 1):
            files.add(result)
            if on_progress is not None:
                on_progress(done, len(utterances))
        if not files.rows:
            raise AsrError(f"{folder}: no utterance can be used{': ' + files.left_out[0] if files.left_out else ''}.")
        files.finish({name: made_from[name] for name in ("conditions", "fbank", "corpora", "sources")})
    return files.left_out


def _voices(
    utterances: Sequence[Utterance], read: Callable[[Utterance, int], Tensor], sampling_rate: int
) -> list[Tensor]:
    """The waveforms (L,) of some utterances from all over the list, those that can be read."""
    found = list[Tensor]()
    for utterance in utterances[:: max(1, len(utterances) // _NUM_OTHERS)]:
        with suppress(AsrError):
            found.append(read(utterance, sampling_rate))
    return found


class _FeatureFiles:
    """The feature files of a folder while they grow, and a journal of what they hold, for the next run to go on.

    The journal has a line of JSON of what the features are made from, and one for each utterance: its entry in
    `LIST_FILE`, or why it was left out.
    """

    def __init__(
        self, folder: Path, conditions: Sequence[str], num_features: int, made_from: Mapping[str, Any]
    ) -> None:
        self.folder, self.num_features = folder, num_features
        self.rows: list[PreparedUtterance] = []
        self.left_out: list[str] = []
        self._num_frames = np.zeros(len(conditions), dtype=np.int64)
        self._paths = [folder / f"features-{name}.npy" for name in conditions]
        self._journal_path = folder / "unfinished.jsonl"
        self._head = json.dumps(made_from) + "\n"
        self._lines: list[str] = []

    @property
    def num_done(self) -> int:
        """Number of utterances that are written or left out."""
        return len(self.rows) + len(self.left_out)

    def __enter__(self) -> _FeatureFiles:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                self._journal = stack.enter_context(self._journal_path.open("a+", encoding="utf-8"))
                if not lock(self._journal, wait=False):
                    raise AsrError(f"{self.folder}: another process is writing to it; wait until it has ended.")
                self._files = [stack.enter_context(path.open("ab")) for path in self._paths]
                self._resume()
                self._stack = stack.pop_all()
        except OSError as error:
            raise self._cannot_write(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with self._stack:
                self._flush()
        except OSError as error:  # when they are closed, files write what they could not write before
            raise self._cannot_write(error) from error
        if not self.rows:  # nothing that another run, with a better lexicon for instance, should be told to delete
            self._journal_path.unlink(missing_ok=True)

    def add(self, result: tuple[PreparedUtterance, list[Tensor]] | str) -> None:
        """Appends an utterance, or the reason why it is left out."""
        if isinstance(result, str):
            self.left_out.append(result)
            self._lines.append(json.dumps(result) + "\n")
        else:
            row, features = result
            self._count(row)
            self._lines.append(json.dumps(asdict(row)) + "\n")
            try:
                for file, each in zip(self._files, features, strict=True):
                    file.write(each.numpy().astype(np.float16).tobytes())
            except OSError as error:
                raise self._cannot_write(error) from error
        if len(self._lines) == _UTTERANCES_PER_FLUSH:
            self._flush()

    def finish(self, listing: Mapping[str, Any]) -> None:
        """Completes the feature files, then writes the list of utterances, which marks the folder as complete."""
        self._flush()
        try:
            for path, num_frames in zip(self._paths, self._num_frames, strict=True):
                with path.open("r+b") as file:
                    file.write(self._header(int(num_frames)))
        except OSError as error:
            raise self._cannot_write(error) from error
        whole = {**listing, "left_out": self.left_out, "utterances": [asdict(row) for row in self.rows]}
        write_whole_text(self.folder / LIST_FILE, json.dumps(whole))
        self._journal_path.unlink()

    def _count(self, row: PreparedUtterance) -> None:
        self.rows.append(row)
        self._num_frames += row.num_frames

    def _header(self, num_frames: int) -> bytes:
        """The header of a `.npy` file, which is as long for any number of frames."""
        text = f"{{'descr': '<f2', 'fortran_order': False, 'shape': ({num_frames}, {self.num_features}), }}"
        return np.lib.format.magic(1, 0) + (118).to_bytes(2, "little") + f"{text:<117}\n".encode()

    def _bytes(self, num_frames: int) -> int:
        return len(self._header(0)) + 2 * self.num_features * num_frames

    def _resume(self) -> None:
        """Takes what an earlier run has written, as far as both the journal and all feature files have it."""
        self._journal.seek(0)
        lines = self._journal.readlines()
        if lines and lines[0].endswith("\n") and lines[0] != self._head:
            raise AsrError(
                f"{self.folder}: an interrupted run has begun this folder from other corpora, lexicons or options; "
                "repeat that command, delete the folder, or choose another."
            )
        sizes = [os.fstat(file.fileno()).st_size for file in self._files]
        for line in lines[1:]:
            try:
                entry = parse_json(line)
            except ValueError:
                break  # the line was cut off
            if isinstance(entry, str):
                self.left_out.append(entry)
                continue
            row = _row_of(entry)
            after = self._num_frames + row.num_frames
            if any(size < self._bytes(int(num)) for size, num in zip(sizes, after, strict=True)):
                break  # the features were not flushed in time
            self._count(row)
        self._journal.truncate(0)
        self._journal.writelines([self._head, *lines[1 : 1 + self.num_done]])
        self._journal.flush()
        for file, num_frames in zip(self._files, self._num_frames, strict=True):
            file.truncate(self._bytes(int(num_frames)) if num_frames else 0)
            if not num_frames:
                file.write(self._header(0))

    def _flush(self) -> None:
        """Hands everything to the disk, features first: the journal must not promise what the files do not have."""
        try:
            for file in self._files:
                file.flush()
            self._journal.writelines(self._lines)
            self._journal.flush()
        except OSError as error:
            raise self._cannot_write(error) from error
        self._lines.clear()

    def _cannot_write(self, error: OSError) -> AsrError:
        return AsrError(f"{self.folder}: the features cannot be written ({in_one_line(error)}); {cure_of(error)}.")
