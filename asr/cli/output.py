"""Results as lines, each written as soon as it is known, and read again where an interrupted run goes on.

`--lattices`: the alternatives of each recording as files of other programs."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from asr.decoding.lattice_io import save_k2_lattice, write_kaldi_lattice, write_slf
from asr.errors import AsrError
from asr.recognizer import Recognizer
from asr.results import RecognitionResult
from asr.serialization import atomic_path


class ResultsFile:
    """JSON Lines to which one process at a time adds results, each with what made it.

    Args:
        path: the file; made where it is missing. A device or a pipe is written to, and has no earlier results.
        field: the field that names a recording.
        anew: drop what the file has, whatever it is, once `require_maker` is called: not for a request that fails.

    Attributes:
        done: results of earlier runs by recording, failures left out. A line that an interruption left unfinished is
            taken away.

    Raises:
        AsrError: the file cannot be read or written, another process writes to it, or it holds something else; it then
            is left as it is.
    """

    def __init__(self, path: Path, field: str, anew: bool = False) -> None:
        self.done: dict[str, dict[str, Any]] = {}
        self._path = path
        self._field = field
        self._maker = ""
        self._is_dropped = anew and path.is_file()
        self._failures: set[tuple[str, str]] = set()
        try:
            self._stream = path.open("a+", encoding="utf-8") if path.is_file() or not path.exists() else path.open("w")
        except OSError as error:
            raise AsrError(f"{path}: the output cannot be written ({error.strerror}).") from error
        try:
            if path.is_file():
                self._lock()
            if path.is_file() and not anew:
                self._read()
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *_: object) -> None:
        # Each line has been flushed, or its failure told.
        with suppress(OSError):
            self._stream.close()

    def require_maker(self, maker: str) -> None:
        """Refuses to add results of one recognizer to those of another; all lines to come tell this one.

        Raises:
            AsrError: an earlier result has been made by another recognizer.
        """
        self._maker = maker
        if self._is_dropped:
            os.ftruncate(self._stream.fileno(), 0)
        for name, record in self.done.items():
            if record.get(_MAKER, maker) != maker:
                raise AsrError(
                    f"{self._path}: {name} was recognized by {record[_MAKER]!r}, not by the present one, "
                    f"{maker!r}; name another --output, or delete this one."
                )

    def add(self, record: Mapping[str, Any]) -> None:
        """A line more; a failure that the file has already is not told again.

        Raises:
            AsrError: as `print_line`.
        """
        if "error" in record:
            failure = str(record[self._field]), str(record["error"])
            if failure in self._failures:
                return
            self._failures.add(failure)
        print_record({**record, **({_MAKER: self._maker} if self._maker else {})}, self._stream)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AsrError(f"{self._path}: another process writes to this output; wait, or name another.") from error
        except OSError:
            return  # some network file systems have no locks

    def _read(self) -> None:
        content = self._path.read_bytes()
        whole, newline, rest = content.rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n") if newline else [], start=1):
            record = _record(line, self._field)
            if record is None:
                raise _foreign(self._path, number)
            if "error" in record:
                self._failures.add((record[self._field], str(record["error"])))
            else:
                self.done[record[self._field]] = record
        if rest:
            beginning = json.dumps({self._field: ""})[:-2].encode()
            if not rest.startswith(beginning[: len(rest)]):
                raise _foreign(self._path, content.count(b"\n") + 1)
        os.ftruncate(self._stream.fileno(), len(content) - len(rest))


_MAKER = "made_by"


def maker_of(recognizer: Recognizer, kind: str = "") -> str:
    """A recognizer's name for its results: the same words come from the same maker, whatever the batches."""
    decides = {
        "bundle": recognizer.bundle.fingerprint,
        "options": asdict(recognizer.options),
        "rnn_weight": recognizer.rnn_weight,
        "decoder": [recognizer.decoder_name, recognizer.lm_fusion],
        "max_segment_seconds": recognizer.resources.max_segment_seconds,
        "kind": kind,
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return " ".join(filter(None, (recognizer.bundle.name, recognizer.mode, kind, digest)))


def _record(line: bytes, field: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        return None
    return record if isinstance(record.get("text"), str) or "error" in record else None


def _foreign(path: Path, number: int) -> AsrError:
    return AsrError(f"{path}:{number}: this is no output of this command; name another --output.")


def print_record(record: Mapping[str, Any], stream: TextIO) -> None:
    """A JSON line. Letters that the stream cannot write, such as those of a file name that is not UTF-8, are escaped.

    Raises:
        AsrError: as `print_line`.
    """
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(record)
    print_line(line, stream)


def print_line(line: str, stream: TextIO) -> None:
    """A line, at once; letters that the stream cannot write are shown by their codes.

    Raises:
        AsrError: the disk is full, for instance.
    """
    encoding = stream.encoding or "utf-8"
    try:
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise AsrError(f"{stream.name}: the output cannot be written ({error.strerror}); make room first.") from error


FORMATS = {
    "kaldi": "one text archive, lattices.txt, with words.txt beside it",
    "slf": "HTK's, a file each",
    "k2": "a file each for k2.Fsa.from_dict(torch.load(...)); needs k2",
}


def add_lattice_arguments(parser: argparse.ArgumentParser) -> None:
    """Where lattices go."""
    parser.add_argument(
        "--lattices",
        metavar="FOLDER",
        help="write what else might have been said: a lattice for each recording, or for each piece of a long one. "
        "With --jsonl, words have confidences",
    )
    formats = "; ".join(f"{name}: {text}" for name, text in FORMATS.items())
    parser.add_argument("--lattice-format", choices=[*FORMATS], default="slf", help=f"{formats} (default slf)")


_ARCHIVE = "lattices.txt"
KALDI_FILES = (_ARCHIVE, "words.txt")


_PIECE = re.compile(r"-\d{7,}-\d{7,}$")


class LatticeWriter:
    """Writes lattices to a folder, which is made where it is missing.

    Args:
        folder: where to.
        lattice_format: a key of `FORMATS`.
        recognizer: that the results are from.
        done: recordings that an earlier run has written lattices of, in its order; these stay as they are.

    Raises:
        AsrError: the folder cannot be written.
    """

    def __init__(
        self, folder: str | Path, lattice_format: str, recognizer: Recognizer, done: Sequence[Path] = ()
    ) -> None:
        self._folder = Path(folder)
        self._format = lattice_format
        self._graph = recognizer.bundle.graph
        self._options = recognizer.options
        self._taken: set[str] = set()
        names_done = {self._new_name(audio) for audio in done}
        with self._writable():
            self._folder.mkdir(parents=True, exist_ok=True)
            if lattice_format == "kaldi":
                _keep_only(self._folder / _ARCHIVE, names_done)
                words = self._graph.vocabulary.words
                lines = "".join(f"{word} {word_id}\n" for word_id, word in enumerate(words))
                (self._folder / "words.txt").write_text(lines, encoding="utf-8")

    def write(self, audio: Path, result: RecognitionResult) -> None:
        """Writes a recording's lattices; several pieces are told apart by their begin and end in 1/100 s.

        Raises:
            AsrError: they cannot be written, for want of space for instance.
        """
        stem = self._new_name(audio)
        for piece in result.lattices:
            is_whole = piece.begin == 0.0 and abs(piece.end - result.duration) < 1e-6
            name = stem if is_whole else f"{stem}-{100 * piece.begin:07.0f}-{100 * piece.end:07.0f}"
            with self._writable():
                if self._format == "kaldi":
                    with (self._folder / _ARCHIVE).open("a", encoding="utf-8") as file:
                        write_kaldi_lattice(file, name, piece.lattice, self._options)
                elif self._format == "slf":
                    with (self._folder / f"{name}.slf").open("w", encoding="utf-8") as file:
                        graph = self._graph
                        write_slf(
                            file,
                            name,
                            piece.lattice,
                            graph.vocabulary,
                            graph.tokens,
                            self._options,
                            piece.frame_seconds,
                        )
                else:
                    save_k2_lattice(self._folder / f"{name}.pt", piece.lattice, self._options)

    def _new_name(self, audio: Path) -> str:
        """The file's name without its ending and white space; numbered where another recording has it already."""
        stem = os.fsencode("_".join(audio.stem.split())).decode("utf-8", "replace")
        name, number = stem, 1
        while name in self._taken:
            number += 1
            name = f"{stem}.{number}"
        self._taken.add(name)
        return name

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error  # torch.save raises RuntimeError
            raise AsrError(f"{self._folder}: lattices cannot be written there ({reason}).") from error


def _keep_only(archive: Path, names: set[str]) -> None:
    """Leaves the lattices of these recordings in an archive; what an interruption left behind goes."""
    with atomic_path(archive) as partial, partial.open("wb") as kept:
        if not names or not archive.is_file():
            return
        with archive.open("rb") as file:
            kept.writelines(_entries_of(file, names))


def _entries_of(lines: Iterable[bytes], names: set[str]) -> Iterator[bytes]:
    """The lines of these recordings' lattices; a recording's name stands on a line without tabs."""
    is_wanted = False
    for line in lines:
        if line.strip() and b"\t" not in line:
            name = line.decode("utf-8").strip()
            is_wanted = name in names or _PIECE.sub("", name) in names
        if is_wanted:
            yield line
