"""Lexicon files in both forms, their faults, and what is kept."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest

from asr.errors import AsrError
from asr.text.lexicon import Lexicon

CMUDICT = """\
;;; a comment
'bout B AW1 T
a AH0
a(2) EY1
aalen(3) AA1 L AH0 N
d'artagnan D AH0 R T AE1 NG Y AH0 N # foreign french
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_cmudict_variants_comments_case_and_stress(tmp_path: Path) -> None:
    path = write(tmp_path / "cmudict", CMUDICT)
    lexicon = Lexicon.from_file(path)
    assert lexicon.pronunciations == {
        "'BOUT": [("B", "AW", "T")],
        "A": [("AH",), ("EY",)],
        "AALEN": [("AA", "L", "AH", "N")],
        "D'ARTAGNAN": [("D", "AH", "R", "T", "AE", "NG", "Y", "AH", "N")],
    }
    assert Lexicon.from_file(path, keep_stress=True)["A"] == [("AH0",), ("EY1",)]
    assert "a" in Lexicon.from_file(path, upper_case=False)
    assert lexicon.phones == ("AA", "AE", "AH", "AW", "B", "D", "EY", "L", "N", "NG", "R", "T", "Y")


def test_kaldi_form_with_tabs_repeated_words_and_special_words(tmp_path: Path) -> None:
    path = write(tmp_path / "lexicon.txt", "<unk> SPN\nREAD\tR IY1 D\nREAD R EH1 D\r\n\nA AH0\n")
    lexicon = Lexicon.from_file(path)
    assert lexicon["READ"] == [("R", "IY", "D"), ("R", "EH", "D")]
    assert "<unk>" in lexicon and len(lexicon) == 3


def test_pronunciations_that_differ_in_stress_only_become_one(tmp_path: Path) -> None:
    path = write(tmp_path / "lexicon.txt", "RECORD R EH1 K\nRECORD R EH0 K\n")
    assert len(Lexicon.from_file(path)["RECORD"]) == 1
    assert len(Lexicon.from_file(path, keep_stress=True)["RECORD"]) == 2


def test_an_optional_last_phone() -> None:
    lexicon = Lexicon(
        {"AB": [("A", "B"), ("A", "B", "|"), ("B",)], "C": [("C", "|")], "|": [("|",)], "D": [("|", "D")]}
    )
    assert lexicon.with_optional("|").pronunciations == {
        "AB": [("A", "B"), ("A", "B", "|"), ("B",), ("B", "|")],
        "C": [("C", "|")],
        "|": [("|",)],
        "D": [("|", "D"), ("|", "D", "|")],
    }


def test_checksums_and_lists_are_of_all_pronunciations() -> None:
    ways = {"AB": [("A", "B"), ("B",)], "C": [("C",)]}
    lexicon = Lexicon(ways, name="one")
    assert list(lexicon.each()) == [("A", "B"), ("B",), ("C",)]
    assert lexicon.phones == ("A", "B", "C")
    assert lexicon.checksum == Lexicon(dict(ways), name="other").checksum
    others: list[dict[str, list[tuple[str, ...]]]] = [
        {"AB": [("A", "B")], "C": [("C",)]},
        {"AB": [("A",), ("B",)], "C": [("C",)]},
        {"C": [("C",)], "AB": [("A", "B"), ("B",)]},
        {"A": [("A", "B"), ("B",)], "BC": [("C",)]},
        {"AB": [("AB",), ("B",)], "C": [("C",)]},
    ]
    assert len({lexicon.checksum, *(Lexicon(other).checksum for other in others)}) == 1 + len(others)


def test_compressed_files_read_the_same(tmp_path: Path) -> None:
    plain = Lexicon.from_file(write(tmp_path / "lexicon.txt", CMUDICT))
    (tmp_path / "lexicon.xz").write_bytes(lzma.compress(CMUDICT.encode()))
    (tmp_path / "lexicon.gz").write_bytes(gzip.compress(CMUDICT.encode()))
    for name in ("lexicon.xz", "lexicon.gz"):
        assert Lexicon.from_file(tmp_path / name).pronunciations == plain.pronunciations


def test_saved_lexicon_reads_the_same(tmp_path: Path) -> None:
    lexicon = Lexicon({"READ": [("R", "IY", "D"), ("R", "EH", "D")], "A": [("AH",)]})
    lexicon.save(tmp_path / "saved")
    assert Lexicon.from_file(tmp_path / "saved").pronunciations == lexicon.pronunciations


def test_letters_and_signs_are_phones_where_they_spell_a_word(tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("2ND 2 N D\nC# C #\nc#  C #  # a comment\n1E 1 E\n7 7\n")
    lexicon = Lexicon.from_file(tmp_path / "letters")
    assert lexicon.pronunciations == {
        "2ND": [("2", "N", "D")],
        "C#": [("C", "#"), ("C",)],
        "1E": [("1", "E")],
        "7": [("7",)],
    }


def test_words_are_taken_in_the_form_that_the_model_has(tmp_path: Path) -> None:
    (tmp_path / "lower").write_text("cat k a t\ndog d o g\n")
    lower, upper = (
        Lexicon.for_words([tmp_path / "lower"], words) for words in (("cat", "dog", "<s>"), ("CAT", "<s>", "cow"))
    )
    assert set(lower.pronunciations) == {"cat", "dog"} and set(upper.pronunciations) == {"CAT", "DOG"}
    (tmp_path / "upper").write_text("CAT k a t\nDOG d o g\nDOG d a g\nPARIS p a r i s\nL'EAU l o\nKIN k i n\n")
    words = ("cat", "dog", "Dog", "Paris", "l’eau", "kın", "cow")
    mixed = Lexicon.for_words([tmp_path / "upper"], words)
    assert set(mixed.pronunciations) == {"cat", "dog", "Dog", "Paris", "l’eau", "KIN"}
    assert mixed["dog"] == mixed["Dog"] == [("d", "o", "g"), ("d", "a", "g")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"A AH\nWORD\nB B IY\n", r"line 2: the word 'WORD' has no pronunciation; give its phones"),
        (b"WORD  # no phones, a comment only\n", "line 1: the word 'WORD' has no pronunciation"),
        (b"A 0.5 AH\n", "line 1: '0.5' is a probability"),
        (b"A AH\nB 1.0 B\n", r"line 2: '1.0' is a probability"),
        (b"A 1e-05 AH\n", "line 1: '1e-05' is a probability"),
        (b"", "is empty"),
        (b"\n\n;;; nothing\n", "is empty"),
        (b"CAFE K AE F EY\nCAF\xe9 K AE F EY\n", "line 2: the lexicon is not UTF-8; convert it first"),
    ],
)
def test_faulty_lexicons(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(AsrError, match=message) as error:
        Lexicon.from_file(path)
    assert str(path) in str(error.value)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(AsrError, match="cannot be read"):
        Lexicon.from_file(tmp_path / "absent")
    for name in ("bad.xz", "bad.gz"):
        (tmp_path / name).write_bytes(b"this is not compressed")
        with pytest.raises(AsrError, match="cannot be unpacked"):
            Lexicon.from_file(tmp_path / name)
    (tmp_path / "cut.xz").write_bytes(lzma.compress(CMUDICT.encode())[:-20])
    with pytest.raises(AsrError, match="cannot be unpacked"):
        Lexicon.from_file(tmp_path / "cut.xz")


def test_restriction_reports_unknown_words_once() -> None:
    lexicon = Lexicon({"A": [("AH",)], "B": [("B", "IY")]})
    part, unknown = lexicon.restricted_to(["B", "ZYZZYVA", "B", "QUUX", "ZYZZYVA"])
    assert list(part.pronunciations) == ["B"]
    assert unknown == ["ZYZZYVA", "QUUX"]


def test_merging_prefers_the_first() -> None:
    merged = Lexicon({"A": [("AH",)]}).merged_with(Lexicon({"A": [("EY",)], "B": [("B", "IY")]}))
    assert merged["A"] == [("AH",)] and merged["B"] == [("B", "IY")]


@pytest.mark.slow
@pytest.mark.corpus
def test_real_lexicons(corpora: Path) -> None:
    librispeech = Lexicon.from_file(corpora / "text" / "lexicon.txt.xz")
    cmudict = Lexicon.from_file(corpora / "text" / "cmudict.dict.xz")
    an4 = Lexicon.from_file(corpora / "an4" / "an4.dic")
    assert len(librispeech) == 90153 and len(librispeech.phones) == 39
    assert len(cmudict) == 126052 and cmudict.phones == librispeech.phones
    assert an4["A"] == [("AH",), ("EY",)] and set(an4.phones) <= set(librispeech.phones)


def test_equivalent_words_have_the_same_pronunciations() -> None:
    lexicon = Lexicon({"été": [("E", "T", "E")], "DON'T": [("D",)]})
    other, curly = "e\u0301te\u0301", "DON’T"
    assert other in lexicon and lexicon[other] == lexicon["été"]
    assert lexicon.pronunciations.get(curly) == [("D",)] and "ete" not in lexicon and 1 not in lexicon.pronunciations
    chosen, unknown = lexicon.restricted_to([curly, other, "ete"])
    assert chosen.pronunciations == {curly: [("D",)], other: [("E", "T", "E")]} and unknown == ["ete"]
    assert list(chosen.pronunciations) == [curly, other]
