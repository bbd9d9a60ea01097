"""Corpora given as lists: Kaldi's data folders, tables (CSV, TSV), NeMo's manifests, and lhotse's cuts.

The folder or file given as `--corpus` is the corpus and its only part, which has the same name. Transcripts are not
normalized.
"""

from __future__ import annotations

import csv
import io
import math
import os
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asr.datasets.corpora.base import CorpusPart, SkippedItem, Utterance
from asr.datasets.kaldi import read_table, read_wav_scp
from asr.errors import AsrError
from asr.text.documents import READING_ERRORS, open_text, parse_json, read_text


class _List(ABC):
    """A corpus of one part."""

    name: str
    _what: str
    _ids: str  # where ids come from, and what to do if one is repeated

    def parts_in(self, corpus_dir: Path) -> list[str]:
        if not corpus_dir.exists():
            raise AsrError(f"{corpus_dir}: there is no such file; give --corpus {self._what}.")
        name = corpus_dir.resolve().name
        return [name if corpus_dir.is_dir() else name.partition(".")[0] or name]

    def list_part(self, corpus_dir: Path, part: str) -> CorpusPart:
        (only,) = self.parts_in(corpus_dir)
        if part != only:
            raise AsrError(f"{corpus_dir}: there is no part {part!r}; its only part is {only!r}.")
        utterances: dict[str, Utterance] = {}
        skipped = []
        for item in self._read(corpus_dir):
            if isinstance(item, SkippedItem):
                skipped.append(item)
            elif item.utterance_id in utterances:
                skipped.append(
                    SkippedItem(item.utterance_id, f"the id occurs a second time; the first one is kept; {self._ids}")
                )
            elif not item.text:
                skipped.append(SkippedItem(item.utterance_id, "the transcript is empty"))
            else:
                utterances[item.utterance_id] = replace(item, audio=_as_on_disk(item.audio))
        if not utterances:
            reason = f": {skipped[0].item}: {skipped[0].reason}" if skipped else ""
            raise AsrError(f"{corpus_dir}: there are no transcribed utterances{reason}.")
        return CorpusPart([utterances[name] for name in sorted(utterances)], skipped)

    @abstractmethod
    def _read(self, path: Path) -> Iterator[Utterance | SkippedItem]:
        """The utterances in any order.

        Raises:
            AsrError: the list itself cannot be read.
        """

    def lexicon(self, corpus_dir: Path) -> Path | None:
        return None

    def download(self, corpus_dir: Path, parts: Sequence[str]) -> None:
        raise AsrError(f"{corpus_dir}: a list of files cannot be downloaded; leave out --download.")


def _as_on_disk(audio: Path) -> Path:
    """The path of a file whose name may be in Unicode's other form, as in archives that macOS has written."""
    if str(audio).isascii() or os.path.isfile(audio):  # noqa: PTH113
        return audio
    forms = (unicodedata.normalize(form, str(audio)) for form in ("NFC", "NFD"))
    return next((Path(form) for form in forms if os.path.isfile(form)), audio)  # noqa: PTH113


class KaldiFolder(_List):
    """A folder with `wav.scp` and `text`, and perhaps `segments` and `utt2spk`.

    Without `utt2spk`, each utterance has a speaker of its own. With it, utterances without a speaker are refused, as by
    Kaldi: one speaker would become many, some of which may be training data and others test data.
    """

    name = "kaldi"
    _what = "a data folder of Kaldi, with wav.scp and text"
    _ids = "change one of the two ids"

    def _read(self, path: Path) -> Iterator[Utterance | SkippedItem]:
        texts = read_table(path / "text")
        speaker_file = path / "utt2spk"
        speakers = read_table(speaker_file) if speaker_file.is_file() else None
        known = set()
        for one in read_wav_scp(path / "wav.scp"):
            name = one.utterance_id
            known.add(name)
            if name not in texts:
                yield SkippedItem(name, "there is audio but no transcript")
                continue
            text = " ".join(texts[name].split())
            speaker = name if speakers is None else speakers.get(name)
            if not speaker:
                raise AsrError(
                    f"{speaker_file}: the utterance {name!r} has no speaker; add its line, or remove the file if no "
                    "speakers are known."
                )
            yield Utterance(name, one.audio, text, speaker, one.begin, one.end, None)
        for name in texts:
            if name not in known:
                yield SkippedItem(name, "there is a transcript but no audio")
        for name in speakers or ():
            if name not in known and name not in texts:
                raise AsrError(
                    f"{speaker_file}: the utterance {name!r} has neither audio nor a transcript in this folder; "
                    "correct its name, or remove its line."
                )


_AUDIO_COLUMNS = ("audio", "path", "file", "filename", "wav", "wav_filename", "audio_filepath")
_TEXT_COLUMNS = ("text", "sentence", "transcript", "transcription", "normalized_text")
_ID_COLUMNS = ("id", "utterance_id", "utt_id", "segment_id")
_SPEAKER_COLUMNS = ("speaker", "speaker_id", "client_id")
_AUDIO_FOLDERS = ("", "clips", "audio", "wavs")


class Table(_List):
    """A CSV or TSV file with a header; Common Voice's, for example."""

    name = "csv"
    _what = "a table with the columns audio and text"
    _ids = "give the table a column id (without one, the names of the files are the ids)"

    def _read(self, path: Path) -> Iterator[Utterance | SkippedItem]:
        try:
            yield from self._rows(path, read_text(path, "table"))
        except csv.Error as error:
            raise AsrError(f"{path}: this is not a CSV or TSV table ({error}).") from error

    def _rows(self, path: Path, content: str) -> Iterator[Utterance | SkippedItem]:
        header = content.partition("\n")[0]
        delimiter = max(("\t", ",", ";", "|"), key=header.count)
        quotes = delimiter == "," or _encloses_fields(content, delimiter)
        quoting: Any = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
        # Without the last line's end, so that each break in a field is one between two lines.
        _require_lines(path, csv.reader(io.StringIO(content.rstrip()), delimiter=delimiter, quoting=quoting))
        rows = csv.DictReader(io.StringIO(content), delimiter=delimiter, quoting=quoting)
        names = {str(name).strip().lower(): name for name in rows.fieldnames or ()}

        def column(known: Sequence[str]) -> str | None:
            return next((names[one] for one in known if one in names), None)

        audio_column, text_column = column(_AUDIO_COLUMNS), column(_TEXT_COLUMNS)
        if audio_column is None or text_column is None:
            raise AsrError(
                f"{path}: the table needs a header with a column for the audio ({', '.join(_AUDIO_COLUMNS)}) and one "
                f"for the text ({', '.join(_TEXT_COLUMNS)})."
            )
        id_column, speaker_column = column(_ID_COLUMNS), column(_SPEAKER_COLUMNS)
        for row in rows:
            written = (row[audio_column] or "").strip()
            name = str(row[id_column] or "").strip() if id_column else Path(written).stem
            if not written or not name:
                yield SkippedItem(f"line {rows.line_num}", f"the row has no {'id' if written else 'audio file'}")
                continue
            folders = (path.parent / folder for folder in _AUDIO_FOLDERS)
            candidates = [folder / written for folder in folders]
            audio = next((one for one in map(_as_on_disk, candidates) if os.path.isfile(one)), candidates[0])  # noqa: PTH113
            text = " ".join((row[text_column] or "").split())
            yield Utterance(name, audio, text, (speaker_column and row[speaker_column]) or name, 0.0, None, None)


def _encloses_fields(content: str, delimiter: str) -> bool:
    """Whether quotation marks enclose whole fields of a table; in Common Voice's TSV they are part of the sentences."""
    rows = csv.reader(io.StringIO(content), delimiter=delimiter, strict=True)
    try:
        return not any("\n" in field for row in rows for field in row)
    except csv.Error:
        return False


def _require_lines(path: Path, rows: Any) -> None:
    """Rejects a row of several lines: most often a quotation mark without a second one has taken the next rows.

    Raises:
        AsrError: a field has a line break.
    """
    for row in rows:
        num_breaks = sum(field.count("\n") for field in row)
        if num_breaks:
            raise AsrError(
                f"{path}:{rows.line_num - num_breaks}: a field has a line break, perhaps because a quotation mark is "
                "not closed; write each row in one line, enclose a field that begins with a quotation mark in "
                "quotation marks, and double those within."
            )


class NemoManifest(_List):
    """JSON Lines with `audio_filepath`, `text` and perhaps `offset` and `duration`."""

    name = "nemo"
    _what = "a manifest of NeMo"
    _ids = "give the lines an id (without one, the names of the files are the ids)"

    def _read(self, path: Path) -> Iterator[Utterance | SkippedItem]:
        begins: dict[str, tuple[Path, float]] = {}
        for number, line in enumerate(read_text(path, "manifest").split("\n"), start=1):
            if not line.strip():
                continue
            try:
                record: dict[str, Any] = parse_json(line)
                audio = Path(str(record["audio_filepath"]))
                begin = float(record.get("offset") or 0.0)
                duration = float(record["duration"]) if record.get("duration") is not None else None
                is_sound = math.isfinite(begin + (duration or 0.0)) and begin >= 0.0
                is_sound = is_sound and (duration is None or duration > 0.0)
            except (ValueError, KeyError, TypeError, OverflowError):
                is_sound = False
            if not is_sound:
                raise AsrError(
                    f"{path}:{number}: expected an object with audio_filepath, text and perhaps offset and duration."
                )
            name = audio.stem if begin == 0.0 else f"{audio.stem}-{100 * begin:07.0f}"
            other, other_begin = begins.setdefault(name, (audio, begin))
            if other == audio and other_begin != begin:  # another part of the recording begins in the same 10 ms
                name = f"{audio.stem}-{1e6 * begin:011.0f}"
            name = str(record.get("id") or name)
            end = None if duration is None else begin + duration
            text = " ".join(str(record.get("text") or "").split())
            yield Utterance(name, path.parent / audio, text, str(record.get("speaker") or name), begin, end, None)


class LhotseCuts(_List):
    """A manifest of lhotse cuts, JSON Lines, plain or gzipped, of one recording and supervision each."""

    name = "lhotse"
    _what = "a manifest of lhotse cuts"
    _ids = "change one of the two ids"

    def _read(self, path: Path) -> Iterator[Utterance | SkippedItem]:
        for record in _json_lines(path):
            if "type" not in record:  # lhotse writes it for every kind of cut, not for recordings and supervisions
                raise AsrError(
                    f"{path}: this is not a manifest of cuts; 'lhotse cut simple -r RECORDINGS -s SUPERVISIONS "
                    "cuts.jsonl.gz' makes cuts of lhotse's recordings and supervisions."
                )
            name = str(record.get("id"))
            try:
                supervisions, recording = record["supervisions"], record["recording"]
                (source,) = recording["sources"]
                begin, duration = float(record["start"]), float(record["duration"])
                channels = record["channel"] if isinstance(record["channel"], list) else [record["channel"]]
                takes_all = set(channels) == set(source["channels"])
                changes = {str(one["name"]) for one in recording.get("transforms") or ()}
                if record.get("type") not in ("MonoCut", "MultiCut") or source["type"] != "file":
                    raise ValueError("no cut of a file")
                whole, audio = float(recording.get("duration", -1.0)), Path(source["source"])
                if not (0.0 <= begin < math.inf and 0.0 < duration < math.inf):
                    raise ValueError("no span of time")
                text = " ".join(str(one.get("text") or "") for one in supervisions)
                speaker = str((supervisions[0].get("speaker") if supervisions else None) or name)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                yield SkippedItem(name, "this is not a cut of one recording in a file")
                continue
            if not takes_all or changes - {"Resample"}:
                yield SkippedItem(
                    name,
                    "it takes only some channels of its recording, or changes it, which would be lost here; give "
                    "'asr fit' and 'asr evaluate' the manifest itself",
                )
                continue
            end = None if begin == 0.0 and abs(duration - whole) < 1e-3 else begin + duration
            yield Utterance(name, audio, " ".join(text.split()), speaker, begin, end, None)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open_text(path, "manifest") as file:
            for line in file:
                if line.strip():
                    record = parse_json(line)
                    if not isinstance(record, dict):
                        raise ValueError("a line is not an object")
                    yield record
    except (*READING_ERRORS, ValueError) as error:
        raise AsrError(f"{path}: this is not a JSON Lines manifest ({error}).") from error
