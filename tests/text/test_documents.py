"""Text files of every kind that all readers take."""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from asr.datasets.corpora.base import read_transcript
from asr.decoding.kaldi_lattice import read_kaldi_archive
from asr.errors import AsrError
from asr.graph.openfst import MAGIC
from asr.lm.corpus import read_word_stream
from asr.lm.ngram.arpa import read_arpa
from asr.metrics import read_transcripts
from asr.text.documents import read_text
from asr.text.lexicon import Lexicon
from asr.text.symbols import TokenTable, Vocabulary
from tests.reference.tiny_arpa import TINY

PACKED: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", list(PACKED))
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_all_readers_take_packed_files_and_byte_order_marks(tmp_path: Path, suffix: str, mark: bytes) -> None:
    def file(text: str) -> Path:
        path = tmp_path / f"file{suffix}"
        path.write_bytes(PACKED[suffix](mark + text.replace("\n", "\r\n").encode()))
        return path

    assert Vocabulary.from_file(file("\u00c9T\u00c9 4\nB 5\n")).words[4:] == ("\u00c9T\u00c9", "B")
    assert TokenTable.from_file(file("<blk>\nAH\n")).tokens == ("<blk>", "AH")
    assert Lexicon.from_file(file("A AH\n")).pronunciations == {"A": [("AH",)]}
    assert read_transcripts(file("u1 A B\n")) == {"u1": ("A", "B")}
    assert read_transcript(file("u1 A B\n")) == ["u1 A B"]
    assert read_word_stream([file("A B\nA\n")]).vocabulary.words[4:] == ("A", "B")
    assert read_arpa(file(TINY)).vocabulary.words[4:] == ("a", "b")


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_damage_anywhere_is_one_sentence(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"file{suffix}"
    whole = PACKED[suffix](b"".join(b"%d words\n" % (number * number) for number in range(1000)))
    half = len(whole) // 2
    for damaged in (b"nothing packed", whole[:-12], whole[:half], whole[:half] + bytes(40) + whole[half + 40 :]):
        path.write_bytes(damaged)
        for read in (read_text, read_transcripts, lambda path: read_word_stream([path]), read_arpa):
            with pytest.raises(AsrError, match="cannot be unpacked"):
                read(path)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_small_file_does_not_fill_the_memory(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"lexicon.txt{suffix}"
    packed = PACKED[suffix](bytes(64_000_000))  # several of them in a row are one file
    path.write_bytes(packed)
    assert len(read_text(path)) == 64_000_000
    path.write_bytes(packed + PACKED[suffix](bytes(1)))
    with pytest.raises(AsrError, match="the lexicon expands to more than 64 MB"):
        read_text(path, "lexicon")
    # Lines without an end, and readers of bytes.
    readers = (read_arpa, lambda path: read_word_stream([path]), lambda path: list(read_kaldi_archive(path, {}, 0.01)))
    for what, read in zip(("n-gram model", "text", "lattice archive"), readers, strict=True):
        mark = MAGIC.to_bytes(4, "little") if what == "lattice archive" else b""
        path.write_bytes(PACKED[suffix](mark + bytes(1)) + packed)
        with pytest.raises(AsrError, match=f"the {what} expands to more than 64 MB"):
            read(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pack", "kind"),
    [
        (gzip.compress, "gzip"),
        (lzma.compress, "xz"),
        (bz2.compress, "bzip2"),
        (lambda text: b"\x28\xb5\x2f\xfd" + text, "zstd"),
    ],
)
def test_compressed_files_with_other_names(tmp_path: Path, pack: Callable[[bytes], bytes], kind: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(pack(b"A B\n"))
    with pytest.raises(AsrError, match=rf"text\.txt: the text is compressed \({kind}\); unpack it"):
        read_text(path, "text")
