"""`--lattices`: the alternatives of each recording as files of other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from asr.decoding.lattice.k2_file import save_k2_lattice
from asr.decoding.lattice.kaldi_file import write_kaldi_lattice
from asr.decoding.lattice.slf_file import write_slf
from asr.errors import AsrError
from asr.recognizer import Recognizer
from asr.result import RecognitionResult

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


class LatticeWriter:
    """Writes lattices to a folder, which is made where it is missing.

    Args:
        folder: where to.
        lattice_format: a key of `FORMATS`.
        recognizer: that the results are from.

    Raises:
        AsrError: the folder cannot be written.
    """

    def __init__(self, folder: str | Path, lattice_format: str, recognizer: Recognizer) -> None:
        self._folder = Path(folder)
        self._format = lattice_format
        self._graph = recognizer.bundle.graph
        self._options = recognizer.options
        self._names: dict[str, int] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if lattice_format == "kaldi":
                (self._folder / "lattices.txt").write_text("", encoding="utf-8")
                words = self._graph.vocabulary.words
                lines = "".join(f"{word} {word_id}\n" for word_id, word in enumerate(words))
                (self._folder / "words.txt").write_text(lines, encoding="utf-8")
        except OSError as error:
            raise AsrError(f"{folder}: lattices cannot be written there ({error.strerror}).") from error

    def write(self, audio: Path, result: RecognitionResult) -> None:
        """Writes a recording's lattices; several pieces are told apart by their begin and end in 1/100 s."""
        stem = "_".join(audio.stem.split())
        self._names[stem] = self._names.get(stem, 0) + 1
        if self._names[stem] > 1:
            stem = f"{stem}.{self._names[stem]}"
        for piece in result.lattices:
            is_whole = piece.begin == 0.0 and abs(piece.end - result.duration) < 1e-6
            name = stem if is_whole else f"{stem}-{100 * piece.begin:07.0f}-{100 * piece.end:07.0f}"
            if self._format == "kaldi":
                with (self._folder / "lattices.txt").open("a", encoding="utf-8") as file:
                    write_kaldi_lattice(file, name, piece.lattice, self._options)
            elif self._format == "slf":
                with (self._folder / f"{name}.slf").open("w", encoding="utf-8") as file:
                    graph = self._graph
                    write_slf(
                        file, name, piece.lattice, graph.vocabulary, graph.tokens, self._options, piece.frame_seconds
                    )
            else:
                save_k2_lattice(self._folder / f"{name}.pt", piece.lattice, self._options)
