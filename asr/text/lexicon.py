"""Pronunciations of words, from files in the format of CMUdict or Kaldi, and the tokens of a transcript by them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from asr.errors import AsrError
from asr.text.documents import read_text
from asr.text.normalize import equivalent_forms, written_as
from asr.text.symbols import TokenTable

Pronunciation = tuple[str, ...]
_VARIANT = re.compile(r"^(?P<word>.+)\(\d+\)$")
_STRESSED_VOWEL = re.compile(r"^(?P<phone>[A-Z]{2})[0-2]$")

# A pronunciation probability as Kaldi writes it. A lone digit may be a symbol of a word such as 2ND.
_PROBABILITY = re.compile(r"^(?:[0-9]*\.[0-9]+|[0-9]+[eE]-[0-9]+)(?:[eE][-+]?[0-9]+)?$")

# They separate the phones of a pronunciation, the pronunciations of a word, and words; no phone contains them.
_PHONES, _VARIANTS, _WORDS = "\x1f", "\x1e", "\x1d"


class _Pronunciations(Mapping[str, list[Pronunciation]]):
    """word -> pronunciations, also of a word that is written in an equivalent form.

    Each word's are one string: tuples of a large lexicon would take 100 MB more.
    """

    def __init__(self, joined: dict[str, str]) -> None:
        self.joined = joined

    def __getitem__(self, word: str) -> list[Pronunciation]:
        name = written_as(word, self.joined)
        if name is None:
            raise KeyError(word)
        return [tuple(variant.split(_PHONES)) for variant in self.joined[name].split(_VARIANTS)]

    def __contains__(self, word: object) -> bool:
        return word in self.joined or (isinstance(word, str) and written_as(word, self.joined) is not None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.joined)

    def __len__(self) -> int:
        return len(self.joined)


class Lexicon:
    """Words and their pronunciations, in the order in which they were read.

    A word that it does not have as written is looked up in its `equivalent_forms` (NFC, NFD, other apostrophes).

    Args:
        pronunciations: word -> pronunciations, the preferred one first; duplicates are removed.
        name: source of the pronunciations, for error messages.

    Attributes:
        pronunciations: word -> pronunciations.

    Raises:
        AsrError: there are no words, a word has no pronunciation, or a pronunciation is empty.
    """

    def __init__(self, pronunciations: Mapping[str, Iterable[Sequence[str]]], name: str = "lexicon") -> None:
        self.name = name
        joined: dict[str, str] = {}
        for word, variants in pronunciations.items():
            distinct = dict.fromkeys(map(_PHONES.join, variants))
            if not distinct or "" in distinct:
                raise AsrError(f"{name}: the word {word!r} has no pronunciation; give its phones or remove it.")
            joined[word] = _VARIANTS.join(distinct)
        self.pronunciations = _Pronunciations(joined)
        self._require_words()

    @classmethod
    def _of(cls, joined: dict[str, str], name: str) -> Lexicon:
        lexicon = cls.__new__(cls)
        lexicon.name, lexicon.pronunciations = name, _Pronunciations(joined)
        lexicon._require_words()
        return lexicon

    def _require_words(self) -> None:
        if not self.pronunciations:
            raise AsrError(f"{self.name}: the lexicon is empty; it needs lines of the form `WORD PHONE PHONE ...`.")

    @classmethod
    def from_file(cls, path: str | Path, keep_stress: bool = False, upper_case: bool = True) -> Lexicon:
        """Reads a file with lines as in CMUdict (`word(2) PH PH # comment`) or Kaldi (`WORD PH PH`).

        Args:
            path: the file, plain, .gz or .xz. Lines that begin with `;;;`, and text after ` #`, are comments; a `#`
                that ends a line is a phone, such as in the pronunciation `C #` of the word `C#`.
            keep_stress: keep the stress marks of ARPAbet vowels (`AH0`) instead of removing them (`AH`).
            upper_case: convert words to upper case, as in transcripts; words such as `<unk>`, and with the Turkish ı,
                are not changed.

        Raises:
            AsrError: the file is missing, not UTF-8 or empty, or a line has no pronunciation.
        """
        path = Path(path)
        joined: dict[str, str] = {}
        for line_number, line in enumerate(read_text(path, "lexicon").split("\n"), start=1):
            if line.startswith(";;;"):
                continue
            if "#" in line and not line.rstrip().endswith(" #"):
                line = line.partition(" #")[0]
            fields = line.split()
            if not fields:
                continue
            word, phones = fields[0], fields[1:]
            if not phones:
                raise AsrError(
                    f"{path}, line {line_number}: the word {word!r} has no pronunciation; "
                    "give its phones or remove the line."
                )
            if phones[0][0] in ".0123456789" and _PROBABILITY.match(phones[0]):
                raise AsrError(
                    f"{path}, line {line_number}: {phones[0]!r} is a probability, not a phone; remove that column."
                )
            variant = _VARIANT.match(word) if word.endswith(")") else None
            word = variant["word"] if variant else word
            if upper_case:
                word = in_upper_case(word)
            if not keep_stress:
                phones = [_without_stress(phone) for phone in phones]
            spelled = _PHONES.join(phones)
            known = joined.get(word)
            if known is None:
                joined[word] = spelled
            elif spelled not in known.split(_VARIANTS):
                joined[word] = known + _VARIANTS + spelled
        return cls._of(joined, name=str(path))

    @classmethod
    def from_files(cls, paths: Sequence[str | Path], keep_stress: bool = False, upper_case: bool = True) -> Lexicon:
        """Reads one or more files like `from_file`; a word's pronunciations come from the first file that has it."""
        return functools.reduce(cls.merged_with, (cls.from_file(path, keep_stress, upper_case) for path in paths))

    @classmethod
    def for_words(cls, paths: Sequence[str | Path], words: Sequence[str], keep_stress: bool = False) -> Lexicon:
        """Reads files like `from_files`; the given words are found in any case, and then have the case that is given.

        The others are in upper case or as written, whichever covers more of the given words.

        Args:
            paths: the files.
            words: the words of a language model, a graph or transcripts.
            keep_stress: as for `from_file`.

        Raises:
            AsrError: as for `from_file`.
        """
        upper, written = (cls.from_files(paths, keep_stress, upper_case) for upper_case in (True, False))
        best = written if sum(word in written for word in words) > sum(word in upper for word in words) else upper
        joined, known = dict(best.pronunciations.joined), upper.pronunciations.joined
        lacking = {word: written_as(in_upper_case(word), known) for word in words if word not in best}
        renamed = {word: name for word, name in lacking.items() if name is not None}
        for name in set(renamed.values()).difference(words):
            joined.pop(name, None)
        return cls._of({**joined, **{word: known[name] for word, name in renamed.items()}}, best.name)

    @property
    def phones(self) -> tuple[str, ...]:
        """All phones, sorted."""
        found: set[str] = set()
        for spelled in self.pronunciations.joined.values():
            found.update(spelled.replace(_VARIANTS, _PHONES).split(_PHONES))
        return tuple(sorted(found))

    @property
    def checksum(self) -> str:
        """The SHA-256 of all words and pronunciations in their order."""
        joined = self.pronunciations.joined
        parts = (_WORDS.join(joined), _WORDS.join(joined.values()))
        return hashlib.sha256((2 * _WORDS).join(parts).encode("utf-8", "surrogatepass")).hexdigest()

    def each(self) -> Iterator[Pronunciation]:
        """The pronunciations of all words."""
        for spelled in self.pronunciations.joined.values():
            for variant in spelled.split(_VARIANTS):
                yield tuple(variant.split(_PHONES))

    def __len__(self) -> int:
        return len(self.pronunciations)

    def __contains__(self, word: object) -> bool:
        return word in self.pronunciations

    def __getitem__(self, word: str) -> list[Pronunciation]:
        return self.pronunciations[word]

    def restricted_to(self, words: Iterable[str]) -> tuple[Lexicon, list[str]]:
        """The lexicon of the given words, and the out-of-vocabulary words, each once and in order."""
        joined = self.pronunciations.joined
        name_of = {word: written_as(word, joined) for word in words}
        unknown = [word for word, name in name_of.items() if name is None]
        known = {word: joined[name] for word, name in name_of.items() if name is not None}
        return Lexicon._of(known, self.name), unknown

    def with_optional(self, last: str) -> Lexicon:
        """The lexicon in which every pronunciation that does not end in this phone is followed by the same with it."""
        end = _PHONES + last

        def both(variant: str) -> str:
            return variant if variant == last or variant.endswith(end) else variant + _VARIANTS + variant + end

        joined = {}
        for word, spelled in self.pronunciations.joined.items():
            if _VARIANTS in spelled:
                variants = [each for variant in spelled.split(_VARIANTS) for each in both(variant).split(_VARIANTS)]
                joined[word] = _VARIANTS.join(dict.fromkeys(variants))
            else:
                joined[word] = both(spelled)
        return Lexicon._of(joined, self.name)

    def merged_with(self, other: Lexicon) -> Lexicon:
        """This lexicon plus the words that only `other` has."""
        joined = {**other.pronunciations.joined, **self.pronunciations.joined}
        return Lexicon._of(joined, f"{self.name} and {other.name}")

    def save(self, path: str | Path) -> None:
        """Writes the lexicon in Kaldi's format, one pronunciation per line; compressed if the path ends in .xz."""
        lines = [
            f"{word} {' '.join(phones)}\n" for word, variants in self.pronunciations.items() for phones in variants
        ]
        content = "".join(lines).encode("utf-8")
        Path(path).write_bytes(lzma.compress(content) if Path(path).suffix == ".xz" else content)


def in_upper_case(word: str) -> str:
    """A word in upper case; words such as `<unk>`, and with the Turkish ı, stay: i and ı would be the same letter."""
    return word if word.startswith("<") or "ı" in word else word.upper()


def has_stress(tokens: Iterable[str]) -> bool:
    """Whether there are ARPAbet vowels with stress marks among tokens."""
    return any(_STRESSED_VOWEL.match(token) for token in tokens)


@functools.lru_cache(maxsize=4096)
def _without_stress(phone: str) -> str:
    return _STRESSED_VOWEL.sub(r"\g<phone>", phone)


def word_ends(phones: Sequence[int], variants: Sequence[Sequence[tuple[int, ...]] | int]) -> list[int] | None:
    """Splits a sequence of phones into the pronunciations of words.

    Args:
        phones: (P,) tokens.
        variants: for each of W words, its pronunciations; or, for a word of unknown pronunciation, the number of phones
            before it.

    Returns:
        For each word the number of phones up to its end, (W,) ascending. The last is P, unless phones of a word follow
        that has not been output yet; the last word's pronunciation may be cut short. None if there is no such split.
    """
    # reached[n]: number of phones that the first n words can cover -> number of phones before the n-th word.
    reached: list[dict[int, int]] = [{0: -1}]
    for position, choices in enumerate(variants):
        is_last = position == len(variants) - 1
        after: dict[int, int] = {}
        for begin in reached[-1]:
            if isinstance(choices, int):
                for end in range(begin + 1, len(phones) + 1) if begin == choices else ():
                    after.setdefault(end, begin)
                continue
            for choice in choices:
                end = begin + len(choice)
                if tuple(phones[begin:end]) == choice:
                    after.setdefault(end, begin)
                elif is_last and begin < len(phones) < end and tuple(phones[begin:]) == choice[: len(phones) - begin]:
                    after.setdefault(len(phones), begin)
        reached.append(after)
    if not variants or not reached[-1]:
        return None
    end = len(phones) if len(phones) in reached[-1] else max(reached[-1])
    ends: list[int] = []
    for before in reversed(reached[1:]):
        ends.append(end)
        end = before[end]
    return ends[::-1]


class Tokenizer:
    """Converts words to token ids, with a lexicon (phones) or by spelling (characters).

    Args:
        tokens: the token table, with all phones of the lexicon.
        lexicon: pronunciations; None for characters.

    Raises:
        AsrError: a phone of the lexicon is not in the table.
    """

    def __init__(self, tokens: TokenTable, lexicon: Lexicon | None = None) -> None:
        self.tokens = tokens
        self.lexicon = lexicon
        if lexicon is not None:
            tokens.ids_of(lexicon.phones)

    @classmethod
    def from_files(
        cls, lexicons: Sequence[str | Path] = (), tokens: str | Path | None = None, keep_stress: bool = False
    ) -> Tokenizer:
        """Reads lexicons and a token table; a word's pronunciations come from the first lexicon that has it.

        Args:
            lexicons: files of pronunciations; none for characters.
            tokens: the token table; by default the phones of the lexicons, sorted.
            keep_stress: keep the stress marks of vowels.

        Raises:
            AsrError: a file cannot be used, or there are neither lexicons nor tokens.
        """
        lexicon = Lexicon.from_files(lexicons, keep_stress) if lexicons else None
        if tokens is not None:
            return cls(TokenTable.from_file(tokens), lexicon)
        if lexicon is None:
            raise AsrError("data: give a lexicon to train on phones, or tokens with one character per line.")
        return cls(TokenTable(lexicon.phones, name=lexicon.name), lexicon)

    def encode(self, words: Sequence[str], variants: Sequence[int] | None = None) -> tuple[list[int], list[str]]:
        """The token ids of a transcript.

        Args:
            words: the words.
            variants: for each word the index of its pronunciation; by default 0.

        Returns:
            The ids, and the out-of-vocabulary words, in order, which have no ids.
        """
        ids: list[int] = []
        unknown: list[str] = []
        for position, word in enumerate(words):
            if self.lexicon is None:
                forms = itertools.chain([word], equivalent_forms(word))
                spelled = next((form for form in forms if all(letter in self.tokens for letter in form)), None)
                if spelled is not None:
                    ids += self.tokens.ids_of(list(spelled))
                else:
                    unknown.append(word)
            elif pronunciations := self.pronunciations(word):
                choice = variants[position] if variants is not None else 0
                ids += self.tokens.ids_of(pronunciations[choice])
            else:
                unknown.append(word)
        return ids, unknown

    def pronunciations(self, word: str) -> list[Pronunciation]:
        """Those of a word as written or else in upper case, as the lexicon is read; none for an unknown word."""
        assert self.lexicon is not None
        name = word if word in self.lexicon else in_upper_case(word)
        return self.lexicon.pronunciations.get(name, [])
