"""Utterances prepared for frame-level training: filterbanks in several conditions, phones, and where each begins.

A prepared folder holds `utterances.json`, one `features-<condition>.npy` for each condition (all utterances one after
the other, float16 log energies, not normalized), and alignments (`Alignment.save`). Features are memory-mapped.

Shapes: U utterances, T frames of all of them together, F features, P phones of all utterances together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asr.audio.fbank import Fbank
from asr.datasets.augment import CONDITIONS, Condition
from asr.datasets.corpora.base import Utterance
from asr.datasets.kaldi import utterance_reader
from asr.errors import AsrError, in_one_line
from asr.graph.fst import offsets
from asr.serialization import atomic_path, write_whole_text
from asr.text.documents import parse_json
from asr.text.lexicon import Lexicon

SILENCE = "SIL"
FRAME_SECONDS = 0.01
LIST_FILE = "utterances.json"


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
            with np.load(path, allow_pickle=False) as file:
                phones = tuple(str(phone) for phone in file["phones"])
                made_from = str(file["made_from"]) if "made_from" in file else ""  # earlier versions lack it
                begin, phone, start, score = (file[name] for name in ("begin", "phone", "start", "score"))
                return cls(phones, begin, phone, start, score, made_from)
        except Exception as error:  # readers of a damaged archive may raise anything
            raise AsrError(
                f"{path}: this is not an alignment ({in_one_line(error)}); delete it and make it again."
            ) from error


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
        self.utterances = [
            PreparedUtterance(**{**row, "num_frames": tuple(row["num_frames"])}) for row in listing["utterances"]
        ]
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
) -> list[str]:
    """Decodes all audio and writes a prepared folder.

    Args:
        folder: created if it is missing.
        utterances: (corpus name, utterance).
        lexicon: utterances with a word that is not in it are left out.
        fbank: the features.
        conditions: names of `CONDITIONS`; "1" comes first, because alignments are made on it.
        sources: kept as `PreparedCorpus.sources`.

    Returns:
        one sentence for each utterance that was left out.

    Raises:
        AsrError: all of them were.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    left_out: list[str] = []
    rows: list[PreparedUtterance] = []
    kept: list[list[npt.NDArray[np.float16]]] = [[] for _ in conditions]
    generator = torch.Generator().manual_seed(1)
    read = utterance_reader()
    corpora: set[str] = set()
    for corpus, utterance in utterances:
        corpora.add(corpus)
        unknown = [word for word in utterance.text.split() if word not in lexicon]
        if unknown:
            left_out.append(f"{utterance.utterance_id}: no pronunciation of {' '.join(unknown)}")
            continue
        try:
            waveform = read(utterance, fbank.sampling_rate)
        except AsrError as error:
            left_out.append(str(error))
            continue
        lengths = []
        for idx, name in enumerate(conditions):
            changed = CONDITIONS[name].apply(waveform, generator)
            with torch.no_grad():
                features = fbank(changed[None], torch.tensor([len(changed)]))[0][0]
            kept[idx].append(features.numpy().astype(np.float16))
            lengths.append(len(features))
        rows.append(
            PreparedUtterance(
                utterance.utterance_id, corpus, f"{corpus}-{utterance.speaker}", utterance.text, tuple(lengths)
            )
        )
    if not rows:
        raise AsrError(f"{folder}: no utterance can be used{': ' + left_out[0] if left_out else ''}.")
    for name, arrays in zip(conditions, kept, strict=True):
        with atomic_path(folder / f"features-{name}.npy") as path:
            np.save(path, np.concatenate(arrays))
    listing = {
        "conditions": list(conditions),
        "fbank": fbank.arguments,
        "corpora": sorted(corpora),
        "sources": dict(sorted((sources or {}).items())),
        "left_out": left_out,
        "utterances": [asdict(row) for row in rows],
    }
    write_whole_text(folder / LIST_FILE, json.dumps(listing))  # last, because it marks the folder as complete
    return left_out
