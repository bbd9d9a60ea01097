"""Transcripts by utterance id: Kaldi's `id words ...` lines, or JSON Lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asr.errors import AsrError
from asr.text.text_file import read_text

_ID_FIELDS = ("id", "cut_id", "utterance", "audio")


def read_transcripts(path: str | Path) -> dict[str, tuple[str, ...]]:
    """Reads one transcript a line, in either form; `.gz` and `.xz` are unpacked.

    JSON Lines need `text` (a string, or a list of words) and one of `id`, `cut_id`, `utterance`, `audio`; of an
    `audio` path the id is the file's name without its ending. Lines with an `error` field have no words, and give way
    to a line in which the same utterance was done after all.

    Raises:
        AsrError: the file is missing, not UTF-8, a line cannot be read, or an id stands twice.
    """
    transcripts: dict[str, tuple[str, ...]] = {}
    failed: dict[str, tuple[str, ...]] = {}
    for line_number, line in enumerate(read_text(path, "transcript file").split("\n"), start=1):
        if not line.strip():
            continue
        is_json = line.lstrip()[0] == "{"
        utt_id, words = _from_json(line, f"{path}:{line_number}") if is_json else _from_kaldi(line)
        if words is None:
            failed[utt_id] = ()
        elif utt_id in transcripts:
            raise AsrError(f"{path}:{line_number}: the utterance {utt_id!r} stands twice; keep one of the two lines.")
        else:
            transcripts[utt_id] = words
    return failed | transcripts


def _from_kaldi(line: str) -> tuple[str, tuple[str, ...]]:
    utt_id, *words = line.split()
    return utt_id, tuple(words)


def _from_json(line: str, where: str) -> tuple[str, tuple[str, ...] | None]:
    """The id and its words, None where recognition has failed."""
    try:
        record: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError as error:
        raise AsrError(f"{where}: the line is no JSON object ({error.msg}).") from error
    field = next((name for name in _ID_FIELDS if name in record), None)
    if field is None:
        raise AsrError(f"{where}: the object names no utterance; give it one of the fields {', '.join(_ID_FIELDS)}.")
    if not isinstance(record[field], (str, int)):
        raise AsrError(f"{where}: the field '{field}' is {json.dumps(record[field])}; it must be a string.")
    utt_id = Path(str(record[field])).stem if field == "audio" else str(record[field])
    words = record.get("text")
    if "text" not in record:
        if record.get("error"):
            return utt_id, None
        raise AsrError(f"{where}: the object has no field 'text'.")
    if isinstance(words, str):
        return utt_id, tuple(words.split())
    if not isinstance(words, list):
        raise AsrError(f"{where}: the field 'text' is {json.dumps(words)}; it must be a string or a list of words.")
    return utt_id, tuple(map(str, words))
