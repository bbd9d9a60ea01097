"""Token tables, and words written in tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr.errors import AsrError
from asr.text.lexicon import Lexicon, Tokenizer
from asr.text.symbols import BLANK, SPECIAL_WORDS, UNK_ID, TokenTable, Vocabulary, first_words


def test_blank_is_zero_and_may_be_given() -> None:
    assert TokenTable(["AH", "B"]).tokens == (BLANK, "AH", "B")
    assert TokenTable([BLANK, "AH", "B"]) == TokenTable(["AH", "B"])
    assert TokenTable(["AH", "B"]).ids_of(["B", "AH", BLANK]) == [2, 1, 0]


@pytest.mark.slow
@given(st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1), min_size=1, unique=True))
def test_saved_table_reads_the_same(tmp_path_factory: pytest.TempPathFactory, symbols: list[str]) -> None:
    path = tmp_path_factory.mktemp("tokens") / "tokens.txt"
    table = TokenTable(symbols)
    table.save(path)
    assert TokenTable.from_file(path) == table


def test_kaldi_form(tmp_path: Path) -> None:
    path = tmp_path / "tokens.txt"
    path.write_text("<blk> 0\nAH 1\nB 2\n", encoding="utf-8")
    assert TokenTable.from_file(path) == TokenTable(["AH", "B"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("<blk>\n", "is empty"),
        ("AH\n<blk>\n", "the first symbol is 'AH'"),
        ("<blk> 0\nAH 2\n", "line 2: expected `symbol` or `symbol 1`"),
        ("<blk> 0\nAH 1 2\n", "line 2: expected `symbol` or `symbol 1`"),
        ("<blk>\nAH\nAH\n", "'AH' occurs twice"),
    ],
)
def test_faulty_tables(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tokens.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(AsrError, match=message) as error:
        TokenTable.from_file(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("kind, make", [("word", Vocabulary), ("token", TokenTable)])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        ("", "entry {place} is ''; {kind}s must not be empty"),
        (" C", "entry {place} is ' C'; {kind}s must not be empty or have white space in them"),
        ("C\n", r"entry {place} is 'C\\n'; {kind}s must not"),
        ("C\u2003D", r"entry {place} is 'C\\u2003D'; {kind}s must not"),
        ("A", "the {kind} 'A' occurs twice"),
    ],
)
def test_one_faulty_symbol_is_named(kind: str, make: type, place: int, symbol: str, message: str) -> None:
    symbols = ["A", "B"]
    symbols.insert(place, symbol)
    num_special = 4 if kind == "word" else 1
    with pytest.raises(AsrError, match=f"mine: {message.format(place=place + num_special, kind=kind)}"):
        make(symbols, name="mine")


@given(st.text(st.sampled_from("AB \t\n\r\x1c\u2028"), max_size=12))
def test_a_word_list_has_the_first_word_of_each_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_bytes(text.encode())
    assert first_words(path) == [line.split()[0] for line in text.splitlines() if line.strip()]


def test_unknown_token_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(AsrError, match="'ZH' is not in the table"):
        TokenTable(["AH"]).ids_of(["AH", "ZH"])
    with pytest.raises(AsrError, match="cannot be read"):
        TokenTable.from_file(tmp_path / "absent")


def test_words_become_phones_and_unknown_ones_are_named() -> None:
    lexicon = Lexicon({"A": [("AH",), ("EY",)], "BAY": [("B", "EY")]})
    tokenizer = Tokenizer(TokenTable(lexicon.phones), lexicon)  # AH B EY
    assert tokenizer.encode(["A", "BAY"]) == ([1, 2, 3], [])
    assert tokenizer.encode(["A", "BAY"], variants=[1, 0]) == ([3, 2, 3], [])
    assert tokenizer.encode(["A", "ZEBRA", "BAY", "ZEBRA"]) == ([1, 2, 3], ["ZEBRA", "ZEBRA"])
    assert tokenizer.encode([]) == ([], [])


def test_transcripts_in_lower_case_are_looked_up_in_upper_case(tmp_path: Path) -> None:
    """As lexicons are read, and as decoding graphs choose by the words of the language model."""
    (tmp_path / "lexicon").write_text("a AH\na EY\nbay B EY\n<hm> M\n", encoding="utf-8")
    tokenizer = Tokenizer.from_files([tmp_path / "lexicon"])  # AH B EY M
    for words in (["a", "bay", "<hm>"], ["A", "Bay", "<hm>"]):
        assert tokenizer.encode(words) == ([1, 2, 3, 4], [])
        assert tokenizer.encode(words, variants=[1, 0, 0]) == ([3, 2, 3, 4], [])
    assert tokenizer.encode(["zebra"]) == ([], ["zebra"])
    assert tokenizer.pronunciations("a") == [("AH",), ("EY",)]


def test_words_become_characters() -> None:
    tokenizer = Tokenizer(TokenTable("ABC'"))
    assert tokenizer.encode(["CAB", "A'B"]) == ([3, 1, 2, 1, 4, 2], [])
    assert tokenizer.encode(["CAB", "CABLE"]) == ([3, 1, 2], ["CABLE"])


def test_a_lexicon_that_does_not_fit_the_table() -> None:
    with pytest.raises(AsrError, match="'EY' is not in the table; does the lexicon fit it"):
        Tokenizer(TokenTable(["AH"]), Lexicon({"A": [("AH",), ("EY",)]}))


def test_from_files(tmp_path: Path) -> None:
    (tmp_path / "first").write_text("A AH\n", encoding="utf-8")
    (tmp_path / "second").write_text("A EY\nBEE B IY\n", encoding="utf-8")
    tokenizer = Tokenizer.from_files([tmp_path / "first", tmp_path / "second"])
    assert tokenizer.tokens.tokens == (BLANK, "AH", "B", "IY")
    assert tokenizer.encode(["A", "BEE"]) == ([1, 2, 3], [])
    with pytest.raises(AsrError, match="give a lexicon"):
        Tokenizer.from_files()


def test_words_of_another_vocabulary() -> None:
    here, there = Vocabulary(["a", "b"]), Vocabulary(["b"])
    special = len(SPECIAL_WORDS)
    assert here.map_to(there).tolist() == [*range(special), UNK_ID, special]


@pytest.mark.parametrize(
    ("here", "there", "is_found"),
    [("o'clock", "o’clock", True), ("o’clock", "o'clock", True), ("d'o`c", "d'o'c", True), ("d`o", "d'o", False)],
)
def test_words_with_other_apostrophes_in_another_vocabulary(here: str, there: str, is_found: bool) -> None:
    special = len(SPECIAL_WORDS)
    expected = [special, UNK_ID] if is_found else [UNK_ID, UNK_ID]
    assert Vocabulary([here, "x"]).map_to(Vocabulary([there])).tolist()[special:] == expected


def test_equivalent_words_are_the_same() -> None:
    composed, decomposed = "été", "e\u0301te\u0301"
    special = len(SPECIAL_WORDS)
    assert Vocabulary([decomposed, "ete"]).map_to(Vocabulary([composed])).tolist()[special:] == [special, UNK_ID]
    letters, marks = Tokenizer(TokenTable("té")), Tokenizer(TokenTable("te\u0301"))
    for word in (composed, decomposed):
        assert letters.encode([word]) == ([2, 1, 2], [])
        assert marks.encode([word]) == ([2, 3, 1, 2, 3], [])


def test_turkish_words_keep_their_own_pronunciations(tmp_path: Path) -> None:
    (tmp_path / "lexicon").write_text("ısı EU S EU\nisi I S I\nstraße S T\n", encoding="utf-8")
    tokenizer = Tokenizer.from_files([tmp_path / "lexicon"])
    assert tokenizer.pronunciations("ısı") == [("EU", "S", "EU")]
    assert tokenizer.pronunciations("isi") == [("I", "S", "I")]
    assert tokenizer.pronunciations("straße") == tokenizer.pronunciations("STRASSE") == [("S", "T")]
