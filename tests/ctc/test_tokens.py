"""What the symbols of a network are taken for."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from asr.ctc import CTCTokens
from asr.ctc.graphs import read_lexicon
from asr.errors import AsrError

LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ETAON'"]
PIECES = ["<blk>", "▁", "▁the", "▁th", "e", "r", "▁he", "s", "t", "he"]


def test_letters_of_wav2vec() -> None:
    tokens = CTCTokens(LETTERS)
    assert (tokens.kind, tokens.blank_id, tokens.word_boundary) == ("letters", 0, "|")
    assert tokens.spell("NOT") == [("N", "O", "T", "|")]
    assert tokens.spell("NOB") == []
    # `<s>` is not text, and a boundary is not a letter.
    assert tokens.spell("|") == []
    assert not tokens.is_text(tokens.table.id_of("<s>"))


def test_pieces_of_gpt2() -> None:
    pieces = ["Ġthe", "Ġca", "t", "Ã©"]
    # GPT-2's alphabet has control characters, by which letters of other alphabets are told from bytes.
    for kind in (None, "pieces"):
        tokens = CTCTokens(["<pad>", "<unk>", *pieces, "Ċ"], kind=kind)  # type: ignore[arg-type]
        assert tokens.kind == "pieces" and tokens.is_byte_level
        assert tokens.symbols[:5] == ("<pad>", "<unk>", "▁the", "▁ca", "t")
        assert tokens.text_of(*range(2, 6)) == "thecaté" and len(tokens.spell("caté")[0]) == 3
        assert tokens.group([2, 3, 4, 5, 1]) == [(0, 1), (1, 4)]
    assert read_lexicon({"cat": "Ġca t"}, tokens).pronunciations["cat"] == [("▁ca", "t")]
    assert CTCTokens(["<pad>", "<unk>", *pieces], kind="phones").symbols[2:] == tuple(pieces)
    # Letters of Maltese.
    assert CTCTokens(["<pad>", "|", *"ABĊĠ"]).kind == "letters"


def test_letters_of_espnet() -> None:
    tokens = CTCTokens(["<blank>", "<unk>", "<space>", *"ETAON|", "<sos/eos>"])
    assert (tokens.kind, tokens.word_boundary) == ("letters", "<space>")
    assert tokens.spell("NOT") == [("N", "O", "T", "<space>")]
    assert tokens.group([2, 6, 7, 2, 4]) == [(1, 3), (4, 5)]
    assert tokens.text_of(2, 6, 7) == "ON"


def test_names_of_sounds_and_boundaries_may_be_in_another_case() -> None:
    tokens = CTCTokens(["<blank>", "<SPACE>", "[NOISE]", "<|EN|>", *"etaon"])
    assert (tokens.kind, tokens.word_boundary) == ("letters", "<SPACE>")
    for word in ("not", "NOT"):
        assert tokens.spell(word) == [("n", "o", "t", "<SPACE>")]


def test_letters_with_a_boundary_of_any_name() -> None:
    symbols = ["<blank>", "<sp>", *"ETAON"]
    assert CTCTokens(symbols).kind == "phones"
    assert CTCTokens(symbols, word_boundary="<sp>").spell("NOT") == [("N", "O", "T", "<sp>")]
    with pytest.raises(AsrError, match='if they are letters, kind="letters" and the word_boundary'):
        CTCTokens(symbols).spell("NOT")


@pytest.mark.parametrize(
    ("symbols", "blank", "column"),
    [
        (["-", "|", "A"], None, 0),
        (["A", "|", "-"], None, 2),
        (["A", "|", ""], None, 2),
        (["A", "B", " "], 3, 3),
        (["A", "<blank>", "B"], None, 1),
        (["A", "B", "|", "x"], "x", 3),
        (["A", "B", "|", "x"], -1, 3),
    ],
)
def test_blank_anywhere(symbols: list[str], blank: int | str | None, column: int) -> None:
    tokens = CTCTokens(symbols, blank=blank)
    assert tokens.blank_id == column
    assert tokens.columns[0] == column
    assert sorted(tokens.columns) == list(range(len(tokens)))
    names = [symbols[at] if at < len(symbols) else "" for at in tokens.columns[1:]]
    assert [name.replace(" ", "|") for name in names] == list(tokens.table.tokens[1:])


def test_disambiguation_symbols_after_the_outputs_are_left_out(tmp_path: Path) -> None:
    """icefall writes those of its lexicon transducer into tokens.txt; the network has no columns for them."""
    path = tmp_path / "tokens.txt"
    path.write_text("".join(f"{symbol} {column}\n" for column, symbol in enumerate([*PIECES, "#0", "#1"])))
    assert CTCTokens(path).symbols == tuple(PIECES)
    path.write_text("#0 3\n<blk> 0\n#1 1\na 2\n")
    assert CTCTokens(path).symbols == ("<blk>", "#1", "a")


@pytest.mark.parametrize("scores", ["0 0 -0 -1", "0 0 -3.25 -11.9e-05"])
def test_scores_of_pieces_are_no_part_of_them(tmp_path: Path, scores: str) -> None:
    """SentencePiece's `.vocab`, as in archives of NeMo, whose networks have a blank after the pieces."""
    pieces = ["<unk>", "\u2581", "\u2581the", "1"]
    (tmp_path / "bpe.vocab").write_text("".join(f"{p}\t{s}\n" for p, s in zip(pieces, scores.split(), strict=True)))
    assert CTCTokens(tmp_path / "bpe.vocab", blank=4).symbols == (*pieces, "<blk>")


def test_pieces_are_spelled_by_as_few_as_possible() -> None:
    tokens = CTCTokens(PIECES)
    assert tokens.kind == "pieces"
    assert tokens.spell("there") == [("▁the", "r", "e")]
    assert tokens.spell("hes") == [("▁he", "s")]
    assert tokens.spell("x") == []
    entries = [tokens.table.id_of(piece) for piece in ("▁the", "r", "e", "▁", "he", "▁", "▁he")]
    assert tokens.group(entries) == [(0, 3), (3, 5), (6, 7)]


def all_segmentations(text: str, symbols: set[str]) -> list[tuple[str, ...]]:
    """Every way to write a text in symbols, by trying every first symbol."""
    if not text:
        return [()]
    return [
        (text[:end], *rest)
        for end in range(len(text), 0, -1)
        if text[:end] in symbols
        for rest in all_segmentations(text[end:], symbols)
    ]


def test_several_spellings_of_a_word() -> None:
    """Those with fewer pieces come first; of these, those with longer first pieces."""
    symbols = ["<blk>", "▁", "▁a", "▁ab", "a", "b", "ab", "ba", "c"]
    for word in ("ab", "abab", "abbaab", "baba", "acab", ""):
        every = sorted(all_segmentations("▁" + word, set(symbols)), key=len) if word else [("▁",)]
        for num in (1, 3, 1000):
            assert CTCTokens(symbols, num_spellings=num).spell(word) == every[:num]
    assert CTCTokens(LETTERS, num_spellings=5).spell("NOT") == [("N", "O", "T", "|")]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(AsrError, match=f"num_spellings is {wrong!r}"):
            CTCTokens(symbols, num_spellings=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "symbols",
    [
        ["-", "|", "a", "b", "c", "d"],
        ["<pad>", "<space>", "a", "b"],
        ["<blk>", "▁", "▁a", "▁ab", "ab", "ba", "c", "abc", "b"],
        ["<blk>", "▁a", "bc", "▁ab", "c", "cab", "ca", "bca"],
        ["[PAD]", "a", "##b", "##ab", "ab", "##ba", "b", "##c", "abc"],
    ],
)
def test_one_spelling_is_the_first_of_many(symbols: list[str]) -> None:
    one, many = CTCTokens(symbols), CTCTokens(symbols, num_spellings=1000)
    words = ["".join(letters) for length in range(6) for letters in itertools.product("abcd|", repeat=length)]
    found = [one.spell(word) for word in words]
    assert found == [many.spell(word)[:1] for word in words]
    assert [] in found and max(map(len, found)) == 1


def test_the_spelling_of_the_piece_model_comes_first() -> None:
    class Model:
        def encode(self, text: str, out_type: type[str]) -> list[str]:
            return ["▁", *text]

    symbols = ["<blk>", "▁", "▁a", "a", "b", "ab"]
    spell = CTCTokens(symbols, piece_model=Model(), num_spellings=3).spell
    assert spell("ab") == [("▁", "a", "b"), ("▁a", "b"), ("▁", "ab")]


def test_wordpieces_with_continuation_marks() -> None:
    tokens = CTCTokens(["[PAD]", "the", "##re", "##r", "th", "##e"])
    assert tokens.spell("there") == [("the", "##re")]
    entries = [tokens.table.id_of(piece) for piece in ("th", "##e", "the", "##re")]
    assert tokens.group(entries) == [(0, 2), (2, 4)]
    assert "".join(tokens.text_of(entry) for entry in entries[2:]) == "there"


def test_groups_of_letters() -> None:
    tokens = CTCTokens(["-", "|", "a", "b"])
    assert tokens.group([1, 2, 3, 1, 1, 2]) == [(1, 3), (5, 6)]
    assert tokens.group([1, 1]) == []
    assert CTCTokens(["-", "a", "b", " "]).boundary_id == 3


def test_placeholders_are_no_text() -> None:
    tokens = CTCTokens(["<blk>", "a\u3000b", "c", "<unused-3>", "|", ""], blank=0, kind="letters")
    assert [entry for entry in range(6) if tokens.is_text(entry)] == [2, 4]
    assert tokens.text_of(1, 2, 3, 4, 5) == "c"
    assert tokens.group([1, 2, 3]) == [(1, 2)]


def test_bytes_of_pieces_are_utf_8() -> None:
    symbols = ["<blk>", "\u2581caf", "<0xC3>", "<0xA9>", "s", "\u2581", "<unk>"]
    tokens = CTCTokens(symbols)
    assert tokens.text_of(1, 2, 3, 4) == "caf\u00e9s"
    assert tokens.text_of(1, 3, 4, 2, 6, 3) == "caf\ufffds\ufffd\ufffd"
    assert tokens.group([5, 2, 3, 1]) == [(0, 3), (3, 4)]


def byte_level_of(text: str) -> str:
    """Text in icefall's characters of bytes: those from U+0100 on which NFKC keeps, but printable ASCII as it is."""
    left_out = [0x132, 0x133, 0x13F, 0x140, 0x149, 0x17F]
    others = [chr(code) for code in range(0x100, 0x1A7) if code not in left_out]
    chars = others[:32] + [chr(code) for code in range(32, 127)] + others[32:]
    assert len(chars) == 256
    return "".join(chars[byte] for byte in text.encode())


def test_byte_level_pieces_are_utf_8() -> None:
    ni, hao, e = map(byte_level_of, ("\u4f60", "\u597d", "\u00e9"))
    assert (ni, hao) == ("\u018b\u0163\u0145", "\u018c\u014b\u0163")
    symbols = ["<blk>", "<sos/eos>", "<unk>", f"▁{ni}", f"▁{hao[:2]}", hao[2:], "▁CAF", e, "▁", "S", f"{e}S"]
    tokens = CTCTokens(symbols)
    assert tokens.kind == "pieces" and tokens.is_byte_level
    assert tokens.text_of(6, 7, 9) == "CAF\u00e9S"
    assert tokens.text_of(4, 5) == "\u597d"
    assert tokens.text_of(4) == "\ufffd"
    assert tokens.spell("CAF\u00e9S") == [("▁CAF", f"{e}S")]
    # CJK characters are words of their own.
    assert tokens.spell("\u4f60\u597d") == [(f"▁{ni}", f"▁{hao[:2]}", hao[2:])]
    assert tokens.spell("\u597d\u00e9") == [(f"▁{hao[:2]}", hao[2:], "▁", e)]
    assert tokens.spell("\u5979") == []
    assert [tokens.text_of(*range(1, 11)[slice(*span)]) for span in tokens.group(range(1, 11))][:3] == [
        "\u4f60", "\u597d", "CAF\u00e9"
    ]  # fmt: skip


def test_byte_level_pieces_of_a_piece_model() -> None:
    e = byte_level_of("\u00e9")

    class Model:
        def encode(self, text: str, out_type: type[str]) -> list[str]:
            return ["▁", *text]

    tokens = CTCTokens(["<blk>", "▁", "A", *e], piece_model=Model())
    assert tokens.spell("A\u00e9") == [("▁", "A", *e)]


@pytest.mark.parametrize(
    "pieces",
    [["▁ab", "c"], ["\u0101", "\u010d", "\u0161"], ["\u0161", "\u017e", "\u00f5"], ["\u0120", "\u0121", "\u0127"],
     ["\u0161", "\u017e", "e\u0161"], ["▁\u0161", "\u017e"]],
)  # fmt: skip
def test_pieces_of_other_letters_are_not_byte_level(pieces: list[str]) -> None:
    tokens = CTCTokens(["<blk>", "▁a", *pieces])
    assert not tokens.is_byte_level
    assert tokens.text_of(1, *range(2, len(pieces) + 2)) == "".join(["a", *pieces]).replace("▁", "")


def test_phones_need_a_lexicon() -> None:
    tokens = CTCTokens(["<blk>", "AA", "B"])
    assert tokens.kind == "phones"
    with pytest.raises(AsrError, match="give a lexicon"):
        tokens.spell("BA")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "tokens.txt"
    path.write_text("<blk> 0\n▁a 1\nb 2\n", encoding="utf-8")
    assert CTCTokens(path).symbols == ("<blk>", "▁a", "b")
    path.write_text("a 0\n  1\n<blk> 2\n", encoding="utf-8")
    assert CTCTokens(path).symbols == ("a", " ", "<blk>")
    path.write_text("-\n|\nA\n", encoding="utf-8")
    assert CTCTokens(path).symbols == ("-", "|", "A")
    path.write_text("0 -\n1 |\n2 A\n", encoding="utf-8")
    with pytest.raises(AsrError, match="the ids come before the tokens; write the token first, as in `- 0`"):
        CTCTokens(path)
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(json.dumps({"<pad>": 0, "|": 1, "A": 2}), encoding="utf-8")
    assert CTCTokens(vocabulary).symbols == ("<pad>", "|", "A")
    vocabulary.write_text("{", encoding="utf-8")
    with pytest.raises(AsrError, match="not valid JSON"):
        CTCTokens(vocabulary)


@pytest.mark.parametrize(
    ("symbols", "options", "message"),
    [
        (["A", "B", "|"], {}, "none of the 3 tokens has a usual name of the blank"),
        (["-", "A", "A"], {}, "'A' occurs twice, in columns 1 and 2"),
        (["-", "|", "A", " "], {}, "columns 1 and 3 are '|' and ' ', which both mean the space between words"),
        (["<ctc>", "<blk>", "A"], {"blank": 2}, "blank is column 2, but column 1 is '<blk>'"),
        (["<blk>", "A"], {"blank": 1}, "blank is column 1, but column 0 is '<blk>'"),
        (["<blk>", "A"], {"blank": 7}, "column is 7, but the columns are 0 to 1"),
        (["<blk>", "A"], {"blank": "-"}, "blank '-' is not one of the 2 tokens"),
        (["<blk>", "A"], {"word_boundary": "|"}, "word boundary '|' is not one of the tokens"),
        ({"<blk>": 0, "A": 2}, {}, "not 0, 1, 2, ... without gaps (1 is missing)"),
        ({"<blk>": 0, "A": "x"}, {}, "not 0, 1, 2, ..."),
        ({"<blk>": 0, "A": [1]}, {}, "not 0, 1, 2, ..."),
        (["<blk>"], {}, "there are 1 tokens"),
        ({"-", "A", "B"}, {}, "the tokens are of type set; give a list or a file"),
        (["-", "|", "A"], {"blank": 1}, "the blank, column 1, is '|', which separates words"),
        (5, {}, "the tokens are of type int; give a list or a file"),
        (["<blk>", "A"], {"kind": "sounds"}, "no kind of tokens 'sounds'"),
    ],
)
def test_bad_symbols_are_told(symbols: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(AsrError) as error:
        CTCTokens(symbols, **options)  # type: ignore[arg-type]
    assert message in str(error.value)


class Pieces:
    """As a loaded SentencePiece model."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def get_piece_size(self) -> int:
        return len(self._pieces)

    def id_to_piece(self, number: int) -> str:
        return self._pieces[number]

    def encode(self, text: str, out_type: type[str]) -> list[str]:
        return ["▁th", "e"] if text == "the" else ["⁇"]


def test_piece_model_decides_how_words_are_written() -> None:
    tokens = CTCTokens(PIECES, piece_model=Pieces(["<unk>", "▁th", "e"]))
    assert tokens.spell("the") == [("▁th", "e")]
    assert tokens.spell("xyz") == []
    with pytest.raises(AsrError, match="2 pieces that are not tokens of the network"):
        CTCTokens(PIECES, piece_model=Pieces(["▁foo", "bar", "e"]))


def test_piece_models_may_have_the_blank() -> None:
    """As those of icefall, where it is the first of the symbols that it defines."""
    symbols = ["<blk>", "<sos/eos>", "<unk>", "▁th", "▁t", "he", "e"]
    tokens = CTCTokens(symbols, piece_model=Pieces(symbols))
    assert tokens.spell("the") == [("▁th", "e")]


def test_sentencepiece_file_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    path = tmp_path / "pieces.model"
    path.write_bytes(b"no model")
    with pytest.raises(AsrError, match="not a readable SentencePiece model"):
        CTCTokens(PIECES, piece_model=path)
    with pytest.raises(AsrError, match=r"nowhere\.model: this looks like a SentencePiece model; give the \.vocab file"):
        CTCTokens("nowhere.model")
    with pytest.raises(AsrError, match="there is no such SentencePiece model"):
        CTCTokens(PIECES, piece_model=tmp_path / "none.model")


def test_words_are_spelled_in_equivalent_forms() -> None:
    composed, decomposed = "l'été", "l’e\u0301te\u0301"
    letters, marks = CTCTokens(["-", *"lté'"]), CTCTokens(["-", *"lte\u0301’"])
    for word in (composed, decomposed, "l’été"):
        assert letters.spell(word) == [tuple("l'été")]
        assert marks.spell(word) == [tuple("l’e\u0301te\u0301")]
    assert CTCTokens(["-", "▁l", "’é", "té"]).spell(composed) == [("▁l", "’é", "té")]
    assert letters.spell("ete") == []


@pytest.mark.parametrize("blank", [0, "<pad>", 2])
def test_the_given_one_of_several_usual_names_is_the_blank(blank: int | str) -> None:
    tokens = CTCTokens(["<pad>", "<blank>", "[PAD]", "|", *"AB"], blank=blank)
    assert tokens.symbols[tokens.blank_id] in ("<pad>", "[PAD]")


@pytest.mark.parametrize(("content", "symbol"), [("<blk> 0\na 1\na 2\n", "'a'"), ("<blk> 0\n  1\n\u3000 2\n", "' '")])
def test_a_token_that_a_file_lists_twice_is_named(tmp_path: Path, content: str, symbol: str) -> None:
    path = tmp_path / "tokens.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(AsrError, match=f"tokens.txt: the token {symbol} occurs twice, with the ids 1 and 2"):
        CTCTokens(path)


def test_words_of_scripts_without_spaces_need_no_boundary() -> None:
    letters = CTCTokens(["[PAD]", "|", *"今天T", "한"])
    assert letters.spell("今天") == [("今", "天", "|"), ("今", "天")]
    assert letters.spell("天T") == [("天", "T", "|")] and letters.spell("한") == [("한", "|")]
    assert CTCTokens(["-", *"今天"]).spell("今天") == [("今", "天")]
    mixed = CTCTokens(["<blk>", *"今天", "▁T", "T"])
    assert mixed.spell("今天") == [("今", "天")]
    assert mixed.spell("T") == [("▁T",)] and mixed.spell("T今") == [("▁T", "今")]
    assert CTCTokens(["<blk>", "▁", "▁今", *"今天"]).spell("今天") == [("▁今", "天"), ("今", "天")]


def test_a_piece_model_of_the_other_script_leaves_characters_as_they_are() -> None:
    class Latin:
        def encode(self, text: str, out_type: type[str]) -> list[str]:
            return ["▁T"] if text == "T" else ["▁", text]

    tokens = CTCTokens(["<blk>", *"今天", "▁T", "T", "x"], piece_model=Latin())
    assert (tokens.spell("今天"), tokens.spell("T"), tokens.spell("x")) == ([("今", "天")], [("▁T",)], [])


@pytest.mark.parametrize("space", ["\u3000", "\u00a0"])
def test_white_space_of_any_kind_separates_letters(space: str) -> None:
    tokens = CTCTokens(["[PAD]", "|", space, "a", "b"])
    assert tokens.group([3, 2, 4, 1, 3, 4]) == [(0, 1), (2, 3), (4, 6)]
