"""`--lattices`: the alternatives of each recording as files of other programs."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from asr.decoding.lattice.k2_file import save_k2_lattice
from asr.decoding.lattice.kaldi_file import write_kaldi_lattice
from asr.decoding.lattice.slf_file import write_slf
from asr.errors import AsrError
from asr.recognizer import Recognizer
from asr.result import RecognitionResult
from asr.whole_file import whole_path

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
    with whole_path(archive) as partial, partial.open("wb") as kept:
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
