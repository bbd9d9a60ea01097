"""Reads n-best lists of other recognizers: JSON Lines, text, Kaldi's archives, and SRILM's three formats."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from asr.decoding.word_lattice import Candidate
from asr.errors import AsrError
from asr.lm.ngram.arpa import LN_10
from asr.text.documents import (
    LARGEST_NUMBER,
    READING_ERRORS,
    finite_number,
    is_whole_number,
    open_text,
    parse_json,
    read_text,
    unreadable,
)

_DECIPHER = re.compile(r"NBestList([12])\.0\s*")
# SRILM's bytelogs are logarithms to base 1.0001, divided by 1024.
_BYTELOG = 1024.0 * math.log(1.0001)
_FRAME_SECONDS = 0.01  # of Decipher, where `et` is the time at which a word's last frame begins
_SCORED_WORD = re.compile(r"(\S+) +\( +st: +(\S+) +et: +(\S+) +g: +(\S+) +a: +(\S+) +\) *")
_PAUSES = ("-pau-", "<s>", "</s>")

# The files of a Kaldi folder, as `nbest-to-linear` and the scripts that call it name them. The first graph costs that
# exist are used. They may be in two files, `lmwt.nolm` and `lmwt.lmonly`, which are then summed.
_WORDS = ("words_text", "words", "text")  # with one of the first two, `text` is the reference
_AM_COSTS = ("ac_cost", "acwt")
_GRAPH_COSTS = (("lm_cost",), ("lmwt.withlm",), ("lmwt.nolm", "lmwt.lmonly"), ("lmwt.lmonly",), ("lmwt.nolm",))


def read_n_best(path: str | Path) -> dict[str, list[Candidate]]:
    """The n-best lists of a file.

    | format | lines | scores |
    | --- | --- | --- |
    | JSON Lines | `{"id": ..., "nbest": [{"text": ..., "score": ...}, ...]}` | or `scores`: `am`, `lm` |
    | text | `id<TAB>words`, `id<TAB>score<TAB>words` | natural logs, or none |
    | SRILM | `am lm num_words words` | logs to base 10 |
    | Decipher 1, with the line `NBestList1.0` first | `(score) words` | bytelogs, sum of both models |
    | Decipher 2, `NBestList2.0` | `(score) word ( st: 0.1 et: 0.3 g: -10 a: -900 ) ...` | bytelogs, and times |

    A file of SRILM or Decipher has one utterance, which is named after the file. An object without `nbest` has one
    sentence, its own `text`, or none if recognition failed (`error`). `sentence_ends` is that of `Candidate`.

    Raises:
        AsrError: the file cannot be read, a line has none of these formats, a field of an object has the wrong type, or
            only some of the sentences of an utterance have scores.
    """
    path = Path(path)
    content = read_text(path, "n-best list").split("\n")
    lines = [(f"{path}:{number}", line) for number, line in enumerate(content, start=1) if line.strip()]
    if not lines:
        return {}
    first = lines[0][1]
    decipher = _DECIPHER.fullmatch(first)
    if decipher is not None:
        parse = _decipher_sentence if decipher[1] == "1" else _timed_sentence
        return {_name_of(path): [parse(line, where) for where, line in lines[1:]]}
    if "\t" not in first and _is_srilm(first):
        return {_name_of(path): [_srilm_sentence(line, where) for where, line in lines]}
    lists: dict[str, list[Candidate]] = {}
    is_scored: dict[str, bool] = {}
    for where, line in lines:
        if line.lstrip().startswith("{"):
            name, candidates = _from_json(line, where)
            if name in lists:
                raise AsrError(f"{where}: the utterance {name!r} occurs twice.")
            lists[name] = candidates
            continue
        name, *rest = line.split("\t")
        if len(rest) not in (1, 2):
            raise AsrError(f"{where}: expected 'id<TAB>words' or 'id<TAB>score<TAB>words'.")
        if is_scored.setdefault(name.strip(), len(rest) == 2) != (len(rest) == 2):
            raise _partly_scored(where, name.strip())
        score = finite_number(rest[0], where) if len(rest) == 2 else 0.0
        lists.setdefault(name.strip(), []).append(Candidate(tuple(rest[-1].split()), score))
    return lists


def read_n_best_folder(folder: str | Path, words: Mapping[int, str] | None = None) -> dict[str, list[Candidate]]:
    """Reads the n-best lists of a folder of Kaldi or SRILM.

    Kaldi's `nbest-to-linear` writes an archive of words and two of costs, text or binary; sentence `utt-3` is the third
    of the utterance `utt`. The files must have the names that Kaldi's scripts use: `words_text`, `words` or `text`;
    `ac_cost` or `acwt`; `lm_cost`, `lmwt.withlm`, or `lmwt.nolm` and `lmwt.lmonly`, which are summed. SRILM's folders
    have one file per utterance.

    Args:
        folder: the folder; its files may be compressed.
        words: id -> word, for words that are written as ids.

    Raises:
        AsrError: a file cannot be read or lacks a sentence, or there are no n-best lists.
    """
    files = _files_of(folder)
    spoken = _kaldi_words(files)
    if spoken is not None:
        return _kaldi_lists(spoken, files, words)
    lists: dict[str, list[Candidate]] = {}
    for path in files.values():
        for name, candidates in read_n_best(path).items():
            if lists.setdefault(name, candidates) is not candidates:
                raise AsrError(f"{path}: the utterance {name!r} occurs twice in the folder.")
    if not lists:
        raise AsrError(
            f"{folder}: there are no n-best lists in this folder; Kaldi's files are words_text, ac_cost and lm_cost, "
            "SRILM has one file for each utterance."
        )
    return lists


def has_word_ids(folder: str | Path) -> bool:
    """Whether the words of Kaldi's lists in a folder are ids, so that `read_n_best_folder` needs `words`."""
    spoken = _kaldi_words(_files_of(folder))
    return spoken is not None and _without_packing(spoken.name) == "words"


def _files_of(folder: str | Path) -> dict[str, Path]:
    return {_without_packing(path.name): path for path in visible_files(Path(folder))}


def _kaldi_words(files: Mapping[str, Path]) -> Path | None:
    """The file with the words of Kaldi's lists, if there are any."""
    has_costs = any(name in files for name in chain(_AM_COSTS, *_GRAPH_COSTS))
    return next((files[name] for name in _WORDS if name in files and has_costs), None)


def _kaldi_lists(
    spoken: Path, files: Mapping[str, Path], words: Mapping[int, str] | None
) -> dict[str, list[Candidate]]:
    am_costs = next((_costs(files[name]) for name in _AM_COSTS if name in files), None)
    parts = next((names for names in _GRAPH_COSTS if all(name in files for name in names)), ())
    graph_costs = [_costs(files[name]) for name in parts]
    are_ids = _without_packing(spoken.name) == "words"
    lists: dict[str, list[tuple[int, Candidate]]] = {}
    for key, text in _archive(spoken, _integers):
        name, _, number = key.rpartition("-")
        where = f"{spoken}: {key}"
        if not name or not is_whole_number(number):
            raise AsrError(f"{where}: the name of a sentence must end with its number, as in 'utt-1'.")
        if are_ids:
            if words is None:
                raise AsrError(f"{spoken}: its words are numbers; give --words, the words.txt that defines them.")
            text = [_word(one, words, where) for one in text]
        am_score = 0.0 if am_costs is None else -_cost(am_costs, key, where)
        lm_score = -sum(_cost(costs, key, where) for costs in graph_costs)
        candidate = Candidate(tuple(word for word in text if word), am_score, lm_score)
        lists.setdefault(name, []).append((int(number), candidate))
    return {name: [one for _, one in sorted(found, key=lambda item: item[0])] for name, found in lists.items()}


def _word(number: str, words: Mapping[int, str], where: str) -> str:
    if not is_whole_number(number) or int(number) not in words:
        raise AsrError(f"{where}: there is no word {number[:60]} in the word list.")
    return words[int(number)]


def _cost(costs: Mapping[str, float], key: str, where: str) -> float:
    if key not in costs:
        raise AsrError(f"{where}: this sentence has no cost; the files of the folder do not belong together.")
    return costs[key]


def _costs(path: Path) -> dict[str, float]:
    found = {}
    for key, fields in _archive(path, _number):
        if len(fields) != 1:
            raise AsrError(f"{path}: {key}: expected one cost.")
        found[key] = finite_number(fields[0], f"{path}: {key}")
    return found


def _archive(path: Path, binary: Callable[[bytes, int, str], tuple[list[str], int]]) -> Iterator[tuple[str, list[str]]]:
    """Reads the key and fields of each entry of a Kaldi archive, binary or text."""
    with open_text(path, "archive") as file:
        try:
            content = file.read()
        except READING_ERRORS as error:
            raise unreadable(path, "archive", error) from error
    if b"\0B" not in content[:4096]:
        for line in read_text(path, "archive").splitlines():
            key, *fields = line.split() or [""]
            if key:
                yield key, fields
        return
    position = 0
    while position < len(content):
        end = content.find(b" \0B", position, position + 4096)
        key = content[position:end].decode("utf-8", "replace")
        if end <= position or key.split() != [key]:
            raise AsrError(f"{path}: byte {position}: expected the name of a sentence; the archive is damaged.")
        fields, position = binary(content, end + 3, f"{path}: {key}")
        yield key, fields


def _integers(content: bytes, position: int, where: str) -> tuple[list[str], int]:
    """Reads a list of integers: the size of each in bytes, their number, and the integers."""
    (size, number) = _unpacked("<bi", content, position, where)
    if size != 4 or number < 0:
        raise AsrError(f"{where}: this is not a list of integers; the archive is damaged.")
    numbers = _unpacked(f"<{number}i", content, position + 5, where)
    return [str(one) for one in numbers], position + 5 + 4 * number


def _number(content: bytes, position: int, where: str) -> tuple[list[str], int]:
    (size,) = _unpacked("<b", content, position, where)
    if size not in (4, 8):
        raise AsrError(f"{where}: this is not a number; the archive is damaged.")
    (number,) = _unpacked("<f" if size == 4 else "<d", content, position + 1, where)
    return [repr(number)], position + 1 + size


def _unpacked(form: str, content: bytes, position: int, where: str) -> tuple[Any, ...]:
    if position + struct.calcsize(form) > len(content):
        raise AsrError(f"{where}: the archive ends within an entry; it is cut short.")
    return struct.unpack_from(form, content, position)


def visible_files(folder: Path) -> list[Path]:
    """The files of a folder, sorted, without hidden ones, such as the record of `asr transcribe --lattices`."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]


def _without_packing(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".xz")


def _name_of(path: Path) -> str:
    """The utterance of an SRILM file, from the file's name."""
    name = _without_packing(path.name)
    return name.removesuffix(".score").removesuffix(".nbest") or name


def _is_srilm(line: str) -> bool:
    """Whether a line begins with two scores and a number of words."""
    fields = line.split()[:3]
    try:
        [float(one) for one in fields[:2]]
    except ValueError:
        return False
    return len(fields) == 3 and fields[2].isdecimal()


def _srilm_sentence(line: str, where: str) -> Candidate:
    if not _is_srilm(line):
        raise AsrError(f"{where}: expected acoustic score, language model score, number of words, and words.")
    am_score, lm_score = (LN_10 * finite_number(one, where) for one in line.split()[:2])
    return Candidate(_spoken(line.split()[3:]), am_score, lm_score)


def _decipher_sentence(line: str, where: str) -> Candidate:
    score, words = _decipher_score(line, where)
    return Candidate(_spoken(words.split()), score)


def _timed_sentence(line: str, where: str) -> Candidate:
    """Reads a sentence with times and scores of words; entries within a word's time are its phones and states."""
    _, rest = _decipher_score(line, where)
    words: list[str] = []
    times: list[tuple[float, float]] = []
    am_score = lm_score = 0.0
    position, last = 0, -math.inf
    for match in _SCORED_WORD.finditer(rest):
        if match.start() != position:
            break
        position = match.end()
        start, end, grammar, acoustic = (finite_number(one, where) for one in match.groups()[1:])
        if start <= last:
            continue
        last = end
        am_score, lm_score = am_score + _BYTELOG * acoustic, lm_score + _BYTELOG * grammar
        if match[1] not in _PAUSES:
            words.append(match[1])
            times.append((start, end + _FRAME_SECONDS))
    if position != len(rest):
        raise AsrError(f"{where}: expected 'word ( st: 0.1 et: 0.3 g: -10 a: -900 )' for each word.")
    return Candidate(tuple(words), am_score, lm_score, tuple(times))


def _decipher_score(line: str, where: str) -> tuple[float, str]:
    """Splits a line into the score at its beginning and the rest."""
    match = re.match(r"\s*\(\s*([^\s()]+)\s*\)\s*", line)
    if match is None:
        raise AsrError(f"{where}: expected a score in parentheses, then words.")
    return _BYTELOG * finite_number(match[1], where), line[match.end() :].strip()


def _spoken(words: list[str]) -> tuple[str, ...]:
    return tuple(word for word in words if word not in _PAUSES)


def _from_json(line: str, where: str) -> tuple[str, list[Candidate]]:
    try:
        record = parse_json(line)
        name = str(record["id"]) if "id" in record else Path(str(record["audio"])).stem
        # `asr transcribe --nbest` writes no list where no complete sentence survived, only the words of the best path.
        own = [] if "error" in record else [record]
        entries = record.get("nbest", own)
        if not isinstance(entries, list):
            raise AsrError(f"{where}: 'nbest' must be a list, not {entries!r:.40}.")
        found = [_candidate(entry, where) for entry in entries]
        is_scored = {"score" in entry or "scores" in entry for entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AsrError(
            f"{where}: expected an object with 'id' or 'audio' and 'nbest', a list of {{'text': ..., 'score': ...}}."
        ) from error
    if len(is_scored) > 1:
        raise _partly_scored(where, name)
    return name, found


def _partly_scored(where: str, name: str) -> AsrError:
    return AsrError(f"{where}: only some sentences of {name!r} have a score; give each of them one, or none.")


def _candidate(entry: Any, where: str) -> Candidate:
    if not isinstance(entry["text"], str):
        raise TypeError("the text is not a string")
    words = tuple(entry["text"].split())
    if "scores" not in entry:
        scores = (_score(entry, "score", where), _score(entry, "lm_score", where))
        return Candidate(words, *scores, sentence_ends=_sentence_ends(entry, len(words), where))
    scores = entry["scores"]
    if not isinstance(scores, dict) or "am" not in scores:
        raise AsrError(f"{where}: 'scores' must be an object with 'am', not {scores!r:.40}; add it, or give 'score'.")
    lm_score = _score(scores, "lm", where) + _score(scores, "graph", where)
    ends = _sentence_ends(entry, len(words), where)
    return Candidate(words, _score(scores, "am", where), lm_score, sentence_ends=ends)


def _sentence_ends(entry: Mapping[str, Any], num_words: int, where: str) -> tuple[int, ...]:
    ends = entry.get("sentence_ends", [])
    if not isinstance(ends, list) or any(type(end) is not int for end in ends) or sorted(ends) != ends:
        raise AsrError(f"{where}: 'sentence_ends' must be a list of numbers of words, ascending, not {ends!r:.40}.")
    if ends and not 0 <= ends[0] <= ends[-1] <= num_words:
        raise AsrError(f"{where}: 'sentence_ends' is {ends!r:.40}, but the sentence has {num_words} words.")
    return tuple(ends)


def _score(scores: Mapping[str, Any], field: str, where: str) -> float:
    score = scores.get(field, 0.0)
    if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) <= LARGEST_NUMBER:
        raise AsrError(f"{where}: {field!r} must be a number of at most {LARGEST_NUMBER:g}, not {score!r:.40}.")
    return float(score)
