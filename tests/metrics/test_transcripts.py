from __future__ import annotations

import gzip
import json

import pytest

from asr.errors import AsrError
from asr.metrics import read_transcripts


def test_kaldi_and_json_lines_say_the_same(tmp_path):
    kaldi, lines, packed = tmp_path / "text", tmp_path / "text.jsonl", tmp_path / "text.jsonl.gz"
    kaldi.write_text("u1 HELLO WORLD\n\nu2\n")
    records = [{"id": "u1", "text": "HELLO WORLD"}, {"audio": "some/where/u2.flac", "error": "truncated"}]
    lines.write_text("\n".join(map(json.dumps, records)))
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    expected = {"u1": ("HELLO", "WORLD"), "u2": ()}
    assert read_transcripts(kaldi) == read_transcripts(lines) == read_transcripts(packed) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"u1 A\nu1 B\n", r"text:2: the utterance 'u1' occurs twice"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"id": "u1"', r"text:1: the line is not a JSON object"),
        (b'{"text": "A"}', "has no id"),
        (b'{"id": "u1"}', "has no field 'text'"),
        (b'{"id": "u1", "text": null}', "text:1: the field 'text' is null"),
        (b'{"id": "u1", "text": 3}', "text:1: the field 'text' is 3"),
        (b'{"audio": null, "text": "A"}', "text:1: the field 'audio' is null"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(AsrError, match=message):
        read_transcripts(path)


def test_a_line_of_a_failure_gives_way_to_a_later_one(tmp_path):
    lines = [{"id": "u1", "error": "cut short"}, {"id": "u2", "error": "empty"}]
    lines += [{"id": "u1", "text": "HELLO"}, {"id": "u2", "error": "empty"}]
    (tmp_path / "text").write_text("\n".join(map(json.dumps, lines)))
    assert read_transcripts(tmp_path / "text") == {"u1": ("HELLO",), "u2": ()}


def test_files_of_other_systems_and_strange_names(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfu1 HELLO WORLD\r\nu2\r\n")
    assert read_transcripts(path) == {"u1": ("HELLO", "WORLD"), "u2": ()}
    path.write_text('{"audio": "a/u\u2028 1.wav", "text": "HELLO"}\n')
    assert read_transcripts(path) == {"u\u2028 1": ("HELLO",)}


def test_a_damaged_archive_is_named(tmp_path):
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"u1 HELLO WORLD\n")[:10] + b"\xff" * 20)
    with pytest.raises(AsrError, match=r"text.gz: the transcript file cannot be unpacked"):
        read_transcripts(tmp_path / "text.gz")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(AsrError, match="nowhere: the transcript file cannot be read"):
        read_transcripts(tmp_path / "nowhere")
