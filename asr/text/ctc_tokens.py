"""The output symbols of a CTC network: the blank, word boundaries, and the spelling of words.

There are three kinds, recognized by their symbols. `letters`: each symbol is a character, and `|` (wav2vec 2.0),
`<space>` (ESPnet) or a space separates words. `pieces`: a piece that begins a word has the prefix `▁` (SentencePiece),
or a piece that continues one has the prefix `##` (WordPiece); pieces may be byte-level (`asr.text.byte_pieces`), also
those of GPT-2, with `Ġ` before words, which are converted to icefall's.
`phones`: anything else; words need a lexicon.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.text.byte_pieces import are_byte_level, are_gpt2, as_bytes, bytes_of, from_gpt2
from asr.text.documents import parse_json, read_text
from asr.text.normalize import equivalent_forms, is_unspaced, only_case_of
from asr.text.symbols import BLANK, DISAMBIGUATION, TokenTable

_LOGGER = logging.getLogger(__name__)

TokenKind = Literal["letters", "pieces", "phones"]

PIECE_PREFIX = "▁"
CONTINUATION_PREFIX = "##"
# Beside `<space>`, `|` is a character.
LETTER_BOUNDARIES = ("<space>", "<SPACE>", "|", " ")
_UNAMBIGUOUS_BLANKS = ("<blk>", "<blank>", "[blank]", "<ctc_blank>", "<ctc>", "<pad>", "[PAD]", "<eps>", "")
_OTHER_BLANKS = ("-", "_")
_SPECIAL = frozenset(
    ("<s>", "</s>", "<unk>", "<pad>", "<sos/eos>", "<sos>", "<eos>", "<bos>", "[UNK]", "[PAD]", "[CLS]", "[SEP]", "⁇")
)
_SCORED_PIECE = re.compile(r"(.+)\t-?\d+(?:\.\d+)?(?:e-?\d+)?")
# Replaces symbols that a `TokenTable` cannot hold, and stands for columns without a symbol; never part of a text.
_PLACEHOLDER = "<unused-{}>"
_PLACEHOLDERS = re.compile(r"<unused-\d+>")
# SentencePiece writes characters that it has no piece for in the bytes of their UTF-8.
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Names of sounds and languages, such as `[NOISE]` and `<|en|>`.
_NAMES = re.compile(r"<.+>|\[.+\]")


class PieceModel(Protocol):
    """The part of `sentencepiece.SentencePieceProcessor` that is used here."""

    def encode(self, text: str, out_type: type[str]) -> list[str]:
        """The pieces of a text."""


class CTCTokens:
    """The columns of a CTC network.

    Args:
        symbols: one symbol per column; a mapping from symbols to columns; or a file with one symbol per line, with
            `symbol id` lines (`tokens.txt` of icefall and sherpa-onnx; disambiguation symbols at its end are left out),
            with `piece score` lines (`.vocab` of SentencePiece), or with JSON of either form (`vocab.json` of
            transformers).
        blank: the blank, as a column or a symbol; -1 is the last column. `len(symbols)` means that the list omits a
            blank after its last symbol (NeMo). None looks for a symbol with a usual name of the blank.
        word_boundary: the symbol between words, or "" for none; None looks for `<space>`, `<SPACE>`, `|` or a space if
            the kind is `letters`.
        kind: `letters`, `pieces` or `phones`; None infers it from the symbols.
        piece_model: a SentencePiece model, as a file or loaded, to spell words; without it, a word is spelled with as
            few pieces as possible.
        num_spellings: how many ways to write a word the search may find, at most. More than 1 helps networks of pieces
            that are not sure how to write a word; graphs grow accordingly.
        byte_level: whether pieces are byte-level (`asr.text.byte_pieces`); None infers it from the symbols, and
            converts those of GPT-2.

    Attributes:
        symbols: one per column.
        blank_id: the blank's column.
        kind: see above.
        word_boundary: the symbol between words; None if pieces mark boundaries or nothing does.
        table: the symbols with the blank first, as graphs number them.
        columns: (C,) the column of each entry of `table`.
        is_byte_level: whether they are byte-level pieces, see `asr.text.byte_pieces`.
        name: the source of the symbols, for messages.

    Raises:
        AsrError: `num_spellings` is below 1, a symbol occurs twice, the blank is not found or contradicts the symbols,
            a file cannot be read, or the SentencePiece model has pieces that are not symbols.
    """

    def __init__(
        self,
        symbols: Sequence[str] | Mapping[str, int] | str | Path,
        *,
        blank: int | str | None = None,
        word_boundary: str | None = None,
        kind: TokenKind | None = None,
        piece_model: str | Path | PieceModel | None = None,
        num_spellings: int = 1,
        byte_level: bool | None = None,
    ) -> None:
        if isinstance(num_spellings, bool) or not isinstance(num_spellings, int) or num_spellings < 1:
            raise AsrError(f"num_spellings is {num_spellings!r}; a word has 1 spelling or more.")
        self.num_spellings = num_spellings
        self.name = str(symbols) if isinstance(symbols, (str, Path)) else "tokens"
        listed = _symbols_of(symbols, self.name)
        self.blank_id = _blank_column(listed, blank, self.name)
        if self.blank_id == len(listed):
            listed.append(BLANK)
        self.symbols: tuple[str, ...] = tuple(listed)
        _refuse_duplicates(self.symbols, self.name)
        self.kind: TokenKind = kind if kind is not None else _kind_of(self.symbols, self.blank_id, word_boundary)
        if self.kind not in ("letters", "pieces", "phones"):
            raise AsrError(f"{self.name}: there is no kind of tokens {kind!r}; give letters, pieces or phones.")
        if kind != "phones" and self.kind != "letters" and byte_level is None and self._are_gpt2():
            self.kind, byte_level = "pieces", True
            self.symbols = tuple(map(self.converted, self.symbols))
        self.word_boundary = self._boundary(word_boundary)
        if self.word_boundary == self.symbols[self.blank_id]:
            raise AsrError(
                f"{self.name}: the blank, column {self.blank_id}, is {self.word_boundary!r}, which separates words; "
                'give the column of the blank, or word_boundary="" if nothing separates words.'
            )
        self.uses_continuations = self.kind == "pieces" and not any(
            symbol.startswith(PIECE_PREFIX) for symbol in self.symbols
        )
        self.columns = [self.blank_id, *(column for column in range(len(self.symbols)) if column != self.blank_id)]
        self.table = TokenTable((self._table_name(column) for column in self.columns[1:]), name=self.name)
        self._text_symbols = frozenset(
            symbol for symbol in self.table.tokens[1:] if symbol not in _SPECIAL and not _PLACEHOLDERS.fullmatch(symbol)
        )
        self._written = self._text_symbols - {self.word_boundary}  # those that words are written in
        self._longest = max(map(len, self._written), default=0)
        self._beginnings = {symbol[:end] for symbol in self._written for end in range(1, len(symbol) + 1)}
        self._mark = PIECE_PREFIX if self.kind == "pieces" and not self.uses_continuations else ""
        if byte_level is None:
            byte_level = bool(self._mark) and are_byte_level(self._text_symbols, PIECE_PREFIX)
        self.is_byte_level = byte_level
        self._is_text = [entry > 0 and symbol in self._text_symbols for entry, symbol in enumerate(self.table.tokens)]
        self._bytes_of = self._bytes_of_pieces()
        self._texts = [self._symbol_text(entry) for entry in range(len(self.table))]
        of_characters = (text for entry, text in enumerate(self._texts) if entry not in self._bytes_of)
        self._letter_case = only_case_of("".join(text for text in of_characters if not _NAMES.fullmatch(text)))
        self.piece_model: PieceModel | None = None
        if piece_model is not None:
            self.piece_model = self._checked_model(piece_model)

    def _are_gpt2(self) -> bool:
        return are_gpt2(set(self.symbols) - {self.symbols[self.blank_id]})

    def converted(self, symbol: str) -> str:
        """A byte-level piece of GPT-2 as one of icefall's; the blank and special symbols stay."""
        is_other = symbol in (self.symbols[self.blank_id], *_SPECIAL) or _PLACEHOLDERS.fullmatch(symbol)
        return symbol if is_other else from_gpt2(symbol, PIECE_PREFIX)

    def in_order_of_table(self, log_prob: Tensor) -> Tensor:
        """Natural log-probabilities of the network's columns (..., C) -> of the entries of `table` (..., C)."""
        if self.blank_id == 0:
            return log_prob
        return log_prob.index_select(-1, torch.tensor(self.columns, device=log_prob.device))

    @property
    def boundary_id(self) -> int | None:
        """The entry of `table` that separates words, or None."""
        return None if self.word_boundary is None else self.table.id_of(_as_entry(self.word_boundary))

    def __len__(self) -> int:
        return len(self.symbols)

    def is_text(self, entry: int) -> bool:
        """Whether an entry of `table` may be part of a text, unlike the blank, `<s>` and `<unk>`."""
        return self._is_text[entry]

    def separates_words(self, entry: int) -> bool:
        """Whether an entry of `table` is the boundary, or another white space such as U+3000."""
        return entry == self.boundary_id or self.symbols[self.columns[entry]].isspace()

    def is_byte(self, entry: int) -> bool:
        """Whether an entry of `table` is written as a byte, as in `<0x41>`."""
        return self.kind == "pieces" and _BYTE.fullmatch(self.table.tokens[entry]) is not None

    def begins_word(self, entry: int) -> bool:
        """Whether an entry of `table` is a piece that begins a word."""
        symbol = self.table.tokens[entry]
        return not symbol.startswith(CONTINUATION_PREFIX) if self.uses_continuations else symbol[0] == PIECE_PREFIX

    def bytes_of(self, entry: int) -> bytes:
        """The UTF-8 of the text of an entry of `table`, which may be a part of a character."""
        found = self._bytes_of.get(entry)
        return self._texts[entry].encode("utf-8", "surrogatepass") if found is None else found

    def text_of(self, *entries: int) -> str:
        """The text of entries of `table`, without marks of word boundaries; bytes that are not UTF-8 are replaced."""
        if not self._bytes_of:
            return "".join([self._texts[entry] for entry in entries])
        parts = []
        for is_bytes, run in itertools.groupby(entries, self._bytes_of.__contains__):
            if is_bytes:
                parts.append(b"".join(map(self._bytes_of.__getitem__, run)).decode("utf-8", errors="replace"))
            else:
                parts += map(self._texts.__getitem__, run)
        return "".join(parts)

    def _symbol_text(self, entry: int) -> str:
        symbol = self.table.tokens[entry]
        if not self.is_text(entry) or symbol == _as_entry(self.word_boundary or ""):
            return ""
        if self.kind == "pieces":
            return symbol.removeprefix(CONTINUATION_PREFIX if self.uses_continuations else PIECE_PREFIX)
        return symbol

    def spell(self, word: str) -> list[tuple[str, ...]]:
        """The spellings of a word in these symbols, including the boundary after it; empty if it has none.

        There are at most `num_spellings`: first that of the SentencePiece model, if there is one, then those with the
        fewest symbols. A word that has none is spelled in one of its `equivalent_forms` (NFC, NFD, other apostrophes),
        or, if the symbols are in one letter case only, in that case. Words of scripts without spaces, such as Chinese,
        have spellings without the boundary or `▁` besides.

        Raises:
            AsrError: the symbols are phones, for which a lexicon is needed.
        """
        if self.kind == "phones":
            raise AsrError(
                f"{self.name}: words cannot be spelled in these tokens, which look like phones; give a lexicon, or, if "
                'they are letters, kind="letters" and the word_boundary.'
            )
        in_case = word if self._letter_case is None else self._letter_case(word)
        words = [word] if in_case == word else [word, in_case]
        forms = itertools.chain.from_iterable(itertools.chain([each], equivalent_forms(each)) for each in words)
        return next((found for form in forms if (found := self._spellings(form))), [])

    def _spellings(self, word: str) -> list[tuple[str, ...]]:
        spellings: list[tuple[str, ...]] = []
        text = as_bytes(word) if self.is_byte_level else word
        if self.piece_model is not None:
            pieces = tuple(self.piece_model.encode(text, out_type=str))
            if all(piece in self._text_symbols for piece in pieces):
                spellings.append(pieces)
            elif not is_unspaced(word[:1]):
                return []
        elif self.num_spellings == 1:
            shortest = self._shortest(text, self._mark)
            spellings += () if shortest is None else (shortest,)
        if len(spellings) < self.num_spellings > 1:
            others = (pieces for pieces in self._segmentations(text) if pieces not in spellings)
            spellings.extend(itertools.islice(others, self.num_spellings - len(spellings)))
        if self._mark and not self.is_byte_level and is_unspaced(word[:1]):
            unmarked = self._shortest(word, "")
            spellings += () if unmarked is None else (unmarked,)
        if self.word_boundary is None:
            return spellings
        ended = [(*pieces, _as_entry(self.word_boundary)) for pieces in spellings]
        return ended + spellings if is_unspaced(word[-1:]) else ended

    def group(self, entries: Sequence[int]) -> list[tuple[int, int]]:
        """Splits a sequence of entries of `table` into words -> (first position, position after the last) each.

        Positions with only a boundary belong to no word. Not for phones.
        """
        words: list[tuple[int, int]] = []
        boundary, is_open = self.boundary_id, False
        for position, entry in enumerate(entries):
            if entry == boundary or not self.is_text(entry):
                is_open = is_open and not self.separates_words(entry)
                continue
            begins = self.kind == "pieces" and self.begins_word(entry)
            if is_open and not begins:
                words[-1] = (words[-1][0], position + 1)
            else:
                words.append((position, position + 1))
                is_open = True
        # A lone `▁` is a boundary, not a word.
        return [span for span in words if any(self._texts[entries[at]] for at in range(*span))]

    def _shortest(self, word: str, mark: str) -> tuple[str, ...] | None:
        """The first of `_segmentations` of a word with this mark, found in less time; None if there is none."""
        text, written = _marked(word, mark), self._written
        num = len(text)
        if self._longest == 1 and not self.uses_continuations:
            return tuple(text) if num and written.issuperset(text) else None
        # For each place, the fewest symbols from there to the end, and the first of them, the longest if there are two.
        fewest, first, ends = [num + 1] * num + [0], [""] * num, [0] * num
        for begin in range(num - 1, -1, -1):
            mark = CONTINUATION_PREFIX if self.uses_continuations and begin else ""
            least = num
            for end in range(begin + 1, min(num, begin + self._longest) + 1):
                symbol = mark + text[begin:end]
                if symbol not in self._beginnings:
                    break
                if fewest[end] <= least and symbol in written:
                    least, first[begin], ends[begin] = fewest[end], symbol, end
            fewest[begin] = least + 1
        if not 0 < fewest[0] <= num:
            return None
        spelling, place = [], 0
        while place < num:
            spelling.append(first[place])
            place = ends[place]
        return tuple(spelling)

    def _segmentations(self, word: str) -> Iterator[tuple[str, ...]]:
        """All ways to write a word in symbols: fewer symbols come first, and among equally many, longer first ones."""
        text = _marked(word, self._mark)
        num = len(text)
        if not num:
            return
        # The symbols that may follow at each place, the longest first, and the bounds on how many lead to the end.
        symbols: list[list[tuple[int, str]]] = [[] for _ in range(num)]
        fewest, most = [num + 1] * num + [0], [-1] * num + [0]
        for begin in range(num - 1, -1, -1):
            mark = CONTINUATION_PREFIX if self.uses_continuations and begin else ""
            for end in range(min(num, begin + self._longest), begin, -1):
                symbol = mark + text[begin:end]
                if most[end] < 0 or symbol not in self._written:
                    continue
                symbols[begin].append((end, symbol))
                fewest[begin] = min(fewest[begin], 1 + fewest[end])
                most[begin] = max(most[begin], 1 + most[end])

        def complete(begin: int, left: int) -> Iterator[tuple[str, ...]]:
            if begin == num:
                yield ()
                return
            for end, symbol in symbols[begin]:
                if fewest[end] < left <= most[end] + 1:
                    for rest in complete(end, left - 1):
                        yield (symbol, *rest)

        for length in range(fewest[0], most[0] + 1):
            yield from complete(0, length)

    def _bytes_of_pieces(self) -> dict[int, bytes]:
        """The bytes of entries that are pieces of UTF-8."""
        if self.is_byte_level:
            entries = filter(self.is_text, range(len(self.table.tokens)))
            return {entry: bytes_of(self._symbol_text(entry)) for entry in entries}
        entries = filter(self.is_byte, range(len(self.table)))
        return {entry: bytes([int(self.table.tokens[entry][3:5], 16)]) for entry in entries}

    def _boundary(self, word_boundary: str | None) -> str | None:
        if word_boundary is not None and word_boundary not in ("", *self.symbols):
            raise AsrError(f"{self.name}: the word boundary {word_boundary!r} is not one of the tokens.")
        if word_boundary is not None:
            return word_boundary or None
        if self.kind != "letters":
            return None
        return next((symbol for symbol in LETTER_BOUNDARIES if symbol in self.symbols), None)

    def _table_name(self, column: int) -> str:
        symbol = _as_entry(self.symbols[column])
        return symbol if symbol.split() == [symbol] and symbol != BLANK else _PLACEHOLDER.format(column)

    def _checked_model(self, piece_model: str | Path | PieceModel) -> PieceModel:
        if isinstance(piece_model, (str, Path)):
            piece_model = load_piece_model(piece_model)
        model: Any = piece_model
        if not hasattr(model, "encode"):
            raise AsrError(f"piece_model is of type {type(model).__name__}; give a file, or a loaded model.")
        if not hasattr(model, "get_piece_size"):
            return cast(PieceModel, model)
        pieces = [str(model.id_to_piece(number)) for number in range(int(model.get_piece_size()))]
        # Models may have the blank among their pieces, as icefall's do.
        missing = [piece for piece in pieces if piece not in self.symbols and piece not in _SPECIAL]
        if missing:
            raise AsrError(
                f"{self.name}: the SentencePiece model has {len(missing)} pieces that are not tokens of the network "
                f"({' '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}); give the model it was trained with."
            )
        return cast(PieceModel, model)


def _marked(word: str, mark: str) -> str:
    return mark + word.replace(" ", PIECE_PREFIX)


def load_piece_model(path: str | Path) -> PieceModel:
    """Reads a SentencePiece model.

    Raises:
        AsrError: the package `sentencepiece` is not installed, or the file does not exist or is not such a model.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise AsrError(f"{path}: a SentencePiece model needs the package; `pip install sentencepiece`.") from error
    if not Path(path).is_file():
        raise AsrError(f"{path}: there is no such SentencePiece model.")
    try:
        return cast(PieceModel, sentencepiece.SentencePieceProcessor(model_file=str(path)))
    except (OSError, RuntimeError) as error:
        raise AsrError(f"{path}: this is not a readable SentencePiece model.") from error


def _as_entry(symbol: str) -> str:
    """Replaces the boundary " " by "|", which a token table can hold."""
    return "|" if symbol == " " else symbol


def _symbols_of(symbols: Sequence[str] | Mapping[str, int] | str | Path, name: str) -> list[str]:
    if isinstance(symbols, (str, Path)):
        symbols = _read_symbols(Path(symbols))
    if isinstance(symbols, Mapping):
        columns = {column for column in symbols.values() if isinstance(column, int)}
        missing = next((column for column in range(len(symbols)) if column not in columns), None)
        if missing is not None:
            raise AsrError(
                f"{name}: the tokens' ids are not 0, 1, 2, ... without gaps ({missing} is missing); give one token per "
                "column."
            )
        symbols = sorted(symbols, key=symbols.__getitem__)
    if not isinstance(symbols, Iterable) or isinstance(symbols, (set, frozenset)):  # sets have no order
        raise AsrError(f"the tokens are of type {type(symbols).__name__}; give a list or a file.")
    listed = list(symbols)
    if len(listed) < 2:
        raise AsrError(f"{name}: there are {len(listed)} tokens; a network has at least a blank and one symbol.")
    wrong = next((symbol for symbol in listed if not isinstance(symbol, str)), None)
    if wrong is not None:
        raise AsrError(f"{name}: {wrong!r} is not a token; tokens are strings.")
    return listed


def _read_symbols(path: Path) -> list[str] | dict[str, int]:
    if path.suffix == ".model":
        raise AsrError(
            f"{path}: this looks like a SentencePiece model; give the .vocab file written with it, or the network's "
            "list, and the model as piece_model."
        )
    text = read_text(path, "token list")
    if path.suffix == ".json":
        try:
            content = parse_json(text)
        except ValueError as error:
            raise AsrError(f"{path}: the token list is not valid JSON ({error}).") from error
        if isinstance(content, dict) and all(isinstance(column, int) for column in content.values()):
            return cast("dict[str, int]", content)
        if isinstance(content, list):
            return [str(symbol) for symbol in content]
        raise AsrError(f"{path}: the token list is neither a JSON list nor a JSON object of symbols and columns.")
    lines = [line for line in text.split("\n") if line.strip("\r\n")]
    rows = [line.rstrip("\r").rsplit(None, 1) for line in lines]
    is_numbered = all(row and row[-1].isdecimal() and len(row[-1]) < 10 for row in rows)
    if is_numbered and any(len(row) == 2 for row in rows):
        # `symbol id` lines; a row with only the id is the line of a space.
        columns: dict[str, int] = {}
        for *symbols, column in rows:
            symbol = symbols[0] if symbols else " "
            if symbol in columns:
                first, second = columns[symbol], int(column)
                raise AsrError(
                    f"{path}: the token {symbol!r} occurs twice, with the ids {first} and {second}; rename one."
                )
            columns[symbol] = int(column)
        # icefall lists the disambiguation symbols of its graph after the network's outputs.
        while columns and DISAMBIGUATION.match(last := max(columns, key=columns.__getitem__)):
            del columns[last]
        return columns
    if lines and all(len(row) == 2 and row[0].isdecimal() for row in rows):
        number, symbol = rows[0]
        raise AsrError(f"{path}: the ids come before the tokens; write the token first, as in `{symbol} {number}`.")
    scored = [_SCORED_PIECE.fullmatch(line.rstrip("\r")) for line in lines]
    if all(scored):
        return [piece[1] for piece in scored if piece]
    return [line.rstrip("\r") if not line.strip() else line.strip() for line in lines]


def _blank_column(symbols: list[str], blank: int | str | None, name: str) -> int:
    if isinstance(blank, str):
        if blank not in symbols:
            raise AsrError(f"{name}: the blank {blank!r} is not one of the {len(symbols)} tokens.")
        return symbols.index(blank)
    known = next((symbol for symbol in _UNAMBIGUOUS_BLANKS if symbol in symbols), None)
    if blank is not None:
        if isinstance(blank, bool) or not isinstance(blank, Integral) or not -1 <= blank <= len(symbols):
            raise AsrError(f"{name}: the blank's column is {blank!r}, but the columns are 0 to {len(symbols) - 1}.")
        column = len(symbols) - 1 if blank == -1 else int(blank)
        is_other = column == len(symbols) or symbols[column] not in _UNAMBIGUOUS_BLANKS
        if is_other and known in _UNAMBIGUOUS_BLANKS[:5]:
            raise AsrError(f"{name}: blank is column {column}, but column {symbols.index(str(known))} is {known!r}.")
        return column
    if known is None:
        # A hyphen or an underscore may be a letter, but hardly at either end of the list.
        known = next((symbol for symbol in _OTHER_BLANKS if symbol in (symbols[0], symbols[-1])), None)
    if known is None:
        raise AsrError(
            f"{name}: none of the {len(symbols)} tokens has a usual name of the blank (<blk>, <pad>, ...); give its "
            f"column (blank=0), or blank={len(symbols)} if the list omits it at the end."
        )
    return symbols.index(known)


def _refuse_duplicates(symbols: Sequence[str], name: str) -> None:
    seen: dict[str, int] = {}
    for column, symbol in enumerate(symbols):
        first = seen.setdefault(_as_entry(symbol), column)
        if first != column and symbols[first] != symbol:
            raise AsrError(
                f"{name}: columns {first} and {column} are {symbols[first]!r} and {symbol!r}, which both mean the "
                "space between words; rename one."
            )
        if first != column:
            raise AsrError(f"{name}: the token {symbol!r} occurs twice, in columns {first} and {column}; rename one.")


def _kind_of(symbols: Sequence[str], blank_id: int, word_boundary: str | None) -> TokenKind:
    others = (symbol for column, symbol in enumerate(symbols) if column != blank_id)
    text = [symbol for symbol in others if symbol not in _SPECIAL and not _PLACEHOLDERS.fullmatch(symbol)]
    if any(symbol.startswith((PIECE_PREFIX, CONTINUATION_PREFIX)) for symbol in text):
        return "pieces"
    if all(len(symbol) == 1 for symbol in text):
        return "letters"
    has_boundary = any(symbol in (*LETTER_BOUNDARIES, word_boundary) for symbol in text)
    # Some networks of letters have a few digraphs.
    return "letters" if has_boundary and sum(len(symbol) == 1 for symbol in text) > len(text) // 2 else "phones"
