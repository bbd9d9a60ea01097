"""Output of recognition: lines that are written at once and read again when a run resumes, and lattice files."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import IO, Any

from asr.cli.file_names import enter_names, enter_parts, read_names, read_parts, with_names
from asr.cli.options import listed
from asr.cli.printing import print_record
from asr.cli.recordings import Shard
from asr.decoding.k2 import import_k2
from asr.decoding.k2_lattice import save_k2_lattice
from asr.decoding.kaldi_lattice import write_kaldi_lattice
from asr.decoding.slf import write_slf
from asr.errors import AsrError
from asr.locks import lock
from asr.recognizer import Recognizer
from asr.results import RecognitionResult
from asr.serialization import atomic_path, cure_of, output_path, write_whole_text
from asr.streaming import StreamingOptions
from asr.text.documents import parse_json
from asr.transcripts import SUFFIXES, Transcript, format_transcript, plain_name

STANDARD_OUTPUT = "-"


class ResultsFile:
    """A file of JSON Lines to which one process at a time appends results, each with the recognizer that made it.

    Args:
        path: the file, created if it does not exist. A device or a pipe has no earlier results.
        field: the field that names a recording.

    Attributes:
        done: recordings that earlier runs have finished without failure, in order; `record` returns the result of one.
            An unfinished last line, left by an interruption, is removed.

    Raises:
        AsrError: the file cannot be read or written, another process is writing to it, or it has other contents; the
            file is then unchanged.
    """

    def __init__(self, path: Path, field: str) -> None:
        self.done: dict[str, tuple[int, int]] = {}  # where the line begins, and its length
        self._makers: dict[str, str] = {}  # each with the first of its recordings
        self._path = path
        self._field = field
        self._maker = ""
        self._failures: dict[tuple[str, str], None] = {}
        try:
            self._stream = path.open("a+", encoding="utf-8") if path.is_file() or not path.exists() else path.open("w")
        except OSError as error:
            raise AsrError(f"{path}: the output cannot be written ({error.strerror}); {cure_of(error)}.") from error
        try:
            if path.is_file():
                _lock(self._stream, path)
                self._read()
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *_: object) -> None:
        # Each line has been flushed by now, or its failure reported.
        with suppress(OSError):
            self._stream.close()

    def require_maker(self, maker: str) -> None:
        """Sets the recognizer of the following lines, which must be that of the earlier results.

        Raises:
            AsrError: an earlier result is from another recognizer.
        """
        self._maker = maker
        for other, name in self._makers.items():
            if other != maker:
                raise AsrError(
                    f"{self._path}: {name} was recognized by {other!r}, not by {maker!r}; choose another --output, or "
                    "delete this file."
                )

    def record(self, name: str) -> dict[str, Any]:
        """The result of a finished recording."""
        begin, length = self.done[name]
        with self._path.open("rb") as file:
            file.seek(begin)
            record = _record(file.read(length), self._field)
        if record is None:
            raise AsrError(f"{self._path}: the result of {name} is damaged; delete its line.")
        return record

    def failures(self, names: Collection[str]) -> list[str]:
        """The messages of the failures of some recordings."""
        return [message for name, message in self._failures if name in names]

    def add(self, record: Mapping[str, Any]) -> None:
        """Appends a line; a failure that is already in the file is not repeated.

        Raises:
            AsrError: like `print_line`.
        """
        if "error" in record:
            failure = str(record[self._field]), str(record["error"])
            if failure in self._failures:
                return
            self._failures[failure] = None
        print_record({**record, **({_MAKER: self._maker} if self._maker else {})}, self._stream)

    def _read(self) -> None:
        """Finds out which recordings are done; lines written by this class need no parsing."""
        content = self._path.read_bytes()
        head, middle, tail = json.dumps({self._field: ""})[:-2].encode(), b'", "text": "', f', "{_MAKER}": "'.encode()
        # In a whole file only line ends are control characters.
        is_whole = len(content.translate(None, _CONTROL_CHARACTERS)) == len(content)
        makers: dict[bytes, str] = {}
        begin, number = 0, 0
        while (end := content.find(b"\n", begin)) >= 0:
            number += 1
            name_end = content.find(b'"', begin + len(head), end)
            maker_begin = content.rfind(tail, begin, end) + len(tail)
            name, maker = "", ""
            if (
                is_whole
                and maker_begin > name_end > 0
                and content.startswith(head, begin)
                and content.startswith(middle, name_end)
                and content.endswith(b'"}', maker_begin, end)
            ):
                raw = content[maker_begin : end - 2]
                if raw not in makers:
                    makers[raw] = raw.decode() if _OWN_MAKER.fullmatch(raw) else ""
                written = content[begin + len(head) : name_end]
                name, maker = "" if b"\\" in written else written.decode(), makers[raw]
            if not name or not maker:  # another program's line, or a name with escapes
                record = _record(content[begin:end], self._field)
                if record is None:
                    raise _foreign(self._path, number)
                name, maker = record[self._field], str(record.get(_MAKER, ""))
                if "error" in record:
                    self._failures[name, str(record["error"])] = None
                    begin = end + 1
                    continue
            self.done[name] = begin, end - begin
            if maker:
                self._makers.setdefault(maker, name)
            begin = end + 1
        rest = content[begin:]
        if not rest.startswith(head[: len(rest)]):
            raise _foreign(self._path, number + 1)
        os.ftruncate(self._stream.fileno(), begin)


def _lock(file: IO[Any], path: Path) -> None:
    """Locks an open file until it is closed; refuses one that another process has locked."""
    if not lock(file, wait=False):
        raise AsrError(f"{path}: another process is writing to this output; wait, or choose another file.")


# In a line written by `add`, the recording comes first and the maker last.
_MAKER = "made_by"
_OWN_MAKER = re.compile(rb"[\w .-]+")
_CONTROL_CHARACTERS = bytes(code for code in range(32) if code != ord("\n"))


class TranscriptFolder:
    """A folder with one file per recording and format. Several processes may write to it, each for other recordings.

    Args:
        folder: created if it does not exist.
        formats: keys of `asr.transcripts.FORMATS`.
        stems: recording -> a short name, which need not be unique.

    Attributes:
        names: recording -> the name of its files without suffixes, different for all recordings.
        done: of these, the recordings that have all their files.

    Raises:
        AsrError: the folder cannot be created, or has a file that this class has not written in the place of one that
            it would write.
    """

    def __init__(self, folder: Path, formats: Sequence[str], stems: Mapping[str, str]) -> None:
        self._folder = folder
        self._formats = formats
        self._stems = stems
        try:
            folder.mkdir(parents=True, exist_ok=True)
            here = {entry.name for entry in os.scandir(folder)}
        except OSError as error:
            raise AsrError(f"{folder}: transcripts cannot be written there ({error.strerror}).") from error
        # Hidden files may be unfinished.
        self._has_transcripts = any(name.endswith(tuple(SUFFIXES.values())) and name[0] != "." for name in here)
        known = read_names(folder / TRANSCRIPTS)
        self.names = with_names(known, stems)
        self.done: dict[str, str] = {}
        for recording, name in self.names.items():
            files = [f"{name}{SUFFIXES[kind]}" for kind in formats]
            if recording not in known and (foreign := here.intersection(files)):
                raise AsrError(
                    f"{folder / min(foreign)}: it is not known which recording this file is of; choose another "
                    "--output-dir, or delete the file."
                )
            if here.issuperset(files):
                self.done[recording] = name

    def require_maker(self, maker: str) -> None:
        """Sets the recognizer of the following files, which must be that of the existing ones.

        Raises:
            AsrError: the existing files are from another recognizer, or the folder cannot be written.
        """
        path = self._folder / _MAKER_FILE
        if self._has_transcripts and path.is_file():
            other = path.read_text(encoding="utf-8", errors="replace").strip()
            if other != maker:
                raise AsrError(
                    f"{self._folder}: its files were made by {other!r}, not by {maker!r}; choose another "
                    "--output-dir, or empty this one."
                )
        self.names = enter_names(self._folder / TRANSCRIPTS, self._stems)
        write_whole_text(path, f"{maker}\n")

    def add(self, name: str, transcript: Transcript) -> None:
        """Writes the files of a recording, each as a whole.

        Raises:
            AsrError: they cannot be written, for example because the disk is full.
        """
        for kind in self._formats:
            path = self._folder / f"{self.names[name]}{SUFFIXES[kind]}"
            write_whole_text(path, format_transcript(transcript, kind))


_MAKER_FILE = ".made_by"
TRANSCRIPTS = ".transcripts"
"""The register of a `TranscriptFolder`, for `asr.cli.file_names`."""


def maker_of(recognizer: Recognizer, kind: str = "", streaming: StreamingOptions | None = None) -> str:
    """A name for a recognizer that depends on everything that affects its words, but not on batches or memory.

    Args:
        recognizer: the recognizer.
        kind: of its results, such as `stream`, a part of the name.
        streaming: the options of streams.
    """
    decides = {
        "bundle": recognizer.bundle.fingerprint,
        "options": {name: asdict(part) for name, part in recognizer.settings.parts().items()},
        "final_options": asdict(recognizer.final_options),
        "decoder": [recognizer.decoder_name, recognizer.lm_fusion],
        "max_segment_seconds": recognizer.resources.max_segment_seconds,
        "acoustic_precision": recognizer.resources.acoustic_precision,
        "has_confidences": recognizer.calibration is not None,  # by which words in noise are left out
        "hot_words": None if recognizer.hot_words is None else sorted(recognizer.hot_words.scores.items()),
        "kind": kind,
    }
    if streaming is not None:
        decides["streaming"] = {name: value for name, value in asdict(streaming).items() if name != "cache_bytes"}
    return maker_name(decides, recognizer.bundle.name, recognizer.mode, kind)


def maker_name(decides: Mapping[str, Any], *names: str) -> str:
    """Names, some of which may be empty, and a number for all that decides on the words."""
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return " ".join(filter(None, (*names, digest)))


def _record(line: bytes, field: str) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        return None
    return record if isinstance(record.get("text"), str) or "error" in record else None


def _foreign(path: Path, number: int) -> AsrError:
    return AsrError(f"{path}:{number}: this line is not output of this command; choose another --output.")


FORMATS = {
    "kaldi": "one text archive, lattices.txt.gz (with --shard I/N lattices.I.txt.gz), and words.txt",
    "slf": "HTK's format, one .slf.gz per lattice",
    "k2": "one file per lattice, for k2.Fsa.from_dict(torch.load(...)), and words.txt; needs k2",
}


def add_lattice_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for lattices."""
    parser.add_argument(
        "--lattices",
        type=output_path,
        metavar="FOLDER",
        help="write the alternatives: one lattice for each recording, or for each segment of a long one; words then "
        "have confidences",
    )
    parser.add_argument("--lattice-format", choices=[*FORMATS], default="slf", help=f"{listed(FORMATS)} (default: slf)")
    parser.add_argument(
        "--lattice-gzip",
        action=argparse.BooleanOptionalAction,
        help="compress lattices of the formats slf and kaldi (.gz), to an eighth of their size (default: compress)",
    )


_SUFFIXES = {"slf": (".slf", ".slf.gz"), "k2": (".pt",)}


def _archive(shard: Shard) -> str:
    return "lattices.txt" if shard.number == 1 else f"lattices.{shard.index + 1}.txt"


def existing(folder: str | Path, names: Iterable[str]) -> list[Path]:
    """The files of a folder that have one of these names; the folder is listed once."""
    try:
        here = {entry.name for entry in os.scandir(folder)}
    except OSError:
        return []
    return [path for name in dict.fromkeys(names) if name in here and (path := Path(folder, name)).is_file()]


def lattice_files(lattice_format: str, stems: Iterable[str], shard: Shard) -> list[str]:
    """Names of the files that lattices of whole recordings are written to."""
    if lattice_format == "kaldi":
        archive = _archive(shard)
        return [archive, f"{archive}.gz", "words.txt"]
    names = [f"{plain_name(stem)}{suffix}" for stem in stems for suffix in _SUFFIXES[lattice_format]]
    return [*names, *(["words.txt"] if lattice_format == "k2" else [])]


_LATTICES = ".lattices"
_PIECE = re.compile(r"-\d{7,}-\d{7,}$")
_ARCHIVES = re.compile(r"lattices(\.\d+)?\.txt(\.gz)?")


def with_lattices(folder: Path, lattice_format: str, shard: Shard, recordings: Iterable[str]) -> set[str]:
    """Those of the recordings of which a `LatticeWriter` has written all lattices and all of them are still there.

    Args:
        folder: the writer's folder.
        lattice_format: a key of `FORMATS`, in which the lattices must be, compressed or not.
        shard: whose archive is read first; the lattices may be in that of any shard.
        recordings: the recordings.

    Raises:
        AsrError: the register or an archive cannot be read.
    """
    written = read_parts(folder / _LATTICES)
    lattices = {recording: written[recording] for recording in recordings if recording in written}
    missing = set(chain.from_iterable(lattices.values()))
    try:
        here = {entry.name for entry in os.scandir(folder) if entry.is_file()}
    except OSError:
        here = set()
    if lattice_format == "kaldi":
        own = _archive(shard)
        for name in sorted(filter(_ARCHIVES.fullmatch, here), key=lambda name: (not name.startswith(own), name)):
            if missing:
                missing -= _names_in(folder / name)
    else:
        suffixes = _SUFFIXES[lattice_format]
        missing = {name for name in missing if here.isdisjoint(f"{name}{suffix}" for suffix in suffixes)}
    return {recording for recording, names in lattices.items() if missing.isdisjoint(names)}


def _names_in(archive: Path) -> set[str]:
    """The names of the lattices of an archive; of a damaged one, those before the last that can be read."""
    names = list[str]()
    try:
        with _open_bytes(archive, "rb") as file:
            for name, _ in _entries(file):
                names.append(name)
    except _DAMAGE:
        del names[-1:]  # writing it again mends the archive
    except OSError as error:
        raise AsrError(f"{archive}: the lattices cannot be read ({error.strerror}).") from error
    return set(names)


class LatticeWriter:
    """Writes lattices to a folder. Several processes may write to it, each for other recordings.

    Args:
        folder: created if it does not exist.
        lattice_format: a key of `FORMATS`.
        recognizer: the recognizer of the results.
        stems: recording -> a short name, which need not be unique, of the recordings of all jobs.
        todo: the recordings to be recognized; lattices of others are not changed.
        is_packed: write `NAME.slf.gz` and `lattices.txt.gz`; so does None, unless the format is k2 or there is a
            `lattices.txt` to continue.
        shard: of several jobs, each writes its own archive in Kaldi's format.

    Raises:
        AsrError: the folder cannot be written, another process is writing to the archive, or the format cannot be
            compressed or needs k2, which is not there.
    """

    def __init__(
        self,
        folder: str | Path,
        lattice_format: str,
        recognizer: Recognizer,
        stems: Mapping[str, str],
        todo: Iterable[str],
        is_packed: bool | None,
        shard: Shard,
    ) -> None:
        if is_packed and lattice_format == "k2":
            raise AsrError("--lattice-gzip is for the formats slf and kaldi; k2 cannot read compressed files.")
        if lattice_format == "k2":
            import_k2()  # before anything is recognized or written
        self._folder = Path(folder)
        self._format = lattice_format
        if is_packed is None:
            is_packed = lattice_format == "slf" or not (self._folder / _archive(shard)).is_file()
        self._suffix = ".gz" if is_packed else ""
        self._graph = recognizer.bundle.graph
        self._options = recognizer.final_options
        self._archive = self._folder / f"{_archive(shard)}{self._suffix}"
        self._register = self._folder / _LATTICES
        with ExitStack() as locked, self._writable():
            self._folder.mkdir(parents=True, exist_ok=True)
            # The formats are UTF-8, which names of files need not be.
            readable = {name: os.fsencode(stem).decode("utf-8", "replace") for name, stem in stems.items()}
            self._names = enter_names(self._register, readable)
            self._written = read_parts(self._register)
            if lattice_format == "kaldi":
                self._lock_archive(locked)
                _drop(self._archive, {self._names[name] for name in todo})
                self._lock_archive(locked)  # it is another file now
            if lattice_format in ("kaldi", "k2"):  # whose labels are numbers
                words = self._graph.vocabulary.words
                lines = "".join(f"{word} {word_id}\n" for word_id, word in enumerate(words))
                write_whole_text(self._folder / "words.txt", lines)
            self._locked = locked.pop_all()

    def __enter__(self) -> LatticeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._locked.close()

    def write(self, recording: str, result: RecognitionResult) -> None:
        """Writes the lattices of a recording; with several segments, names contain begin and end in 1/100 s.

        Raises:
            AsrError: they cannot be written, for example because the disk is full.
        """
        stem = self._names[recording]
        names = list[str]()
        for piece in result.lattices:
            is_whole = piece.begin == 0.0 and abs(piece.end - result.duration) < 1e-6
            name = stem if is_whole else f"{stem}-{100 * piece.begin:07.0f}-{100 * piece.end:07.0f}"
            names.append(name)
            with self._writable():
                if self._format == "kaldi":
                    with _open_text(self._archive, "a") as file:
                        write_kaldi_lattice(file, name, piece.lattice, self._options)
                elif self._format == "slf":
                    lattice = piece.lattice.with_sentence_ends(self._graph)
                    labels = self._graph.vocabulary, self._graph.tokens
                    path = self._folder / f"{name}.slf{self._suffix}"
                    with atomic_path(path) as partial, self._writable(), _open_text(partial, "w") as file:
                        write_slf(file, name, lattice, *labels, self._options, piece.frame_seconds)
                else:
                    ends = piece.lattice.sentence_ends(self._graph)
                    save_k2_lattice(self._folder / f"{name}.pt", piece.lattice, self._options, ends)
        if self._written.get(recording) != names:
            enter_parts(self._register, recording, stem, names)

    def _lock_archive(self, locked: ExitStack) -> None:
        _lock(locked.enter_context(self._archive.open("ab")), self._archive)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise AsrError(f"{self._folder}: lattices cannot be written there ({error.strerror}).") from error


def _open_text(path: Path, mode: str) -> Any:
    """Opens a file for writing, `.gz` compressed; compressed parts appended one by one form one compressed file."""
    if path.suffix == ".gz":
        return gzip.open(path, f"{mode}t", compresslevel=6, encoding="utf-8")
    return path.open(mode, encoding="utf-8")


def _drop(archive: Path, names: set[str]) -> None:
    """Removes the lattices of these recordings from an archive, and an incomplete last part."""
    with (
        atomic_path(archive) as partial,
        _open_bytes(partial, "wb") as kept,
        _open_bytes(archive, "rb") as file,
        suppress(*_DAMAGE),
    ):
        for name, lines in _entries(file):
            if name not in names and _PIECE.sub("", name) not in names:
                kept.writelines(lines)


_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile)


def _open_bytes(archive: Path, mode: str) -> Any:
    return gzip.open(archive, mode) if archive.suffix == ".gz" else archive.open(mode)


def _entries(lines: Iterable[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """The lattices of an archive, name and lines; one that does not end with an empty line is incomplete."""
    entry: list[bytes] = []
    for line in lines:
        entry.append(line)
        if not line.strip():
            if len(entry) > 1:
                yield entry[0].decode("utf-8", "replace").strip(), entry
            entry = []
