from __future__ import annotations

import gzip
import json

import pytest

from asr.cli.main import main
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
        (b'{"id": "u1", "supervisions": []}', "has no field 'text'"),
        (b'{"id": "u1", "supervisions": ["A"]}', "has no field 'text'"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(AsrError, match=message):
        read_transcripts(path)


def test_a_manifest_of_cuts_has_transcripts(tmp_path):
    cut = {"id": "u1", "start": 0.0, "supervisions": [{"text": "HELLO BIG"}, {"id": "pause"}, {"text": "WORLD"}]}
    (tmp_path / "cuts.jsonl").write_text(json.dumps(cut) + "\n")
    assert read_transcripts(tmp_path / "cuts.jsonl") == {"u1": ("HELLO", "BIG", "WORLD")}


def test_a_line_of_a_failure_gives_way_to_a_later_one(tmp_path):
    lines = [{"id": "u1", "error": "cut short"}, {"id": "u2", "error": "empty"}]
    lines += [{"id": "u1", "text": "HELLO"}, {"id": "u2", "error": "empty"}]
    (tmp_path / "text").write_text("\n".join(map(json.dumps, lines)))
    assert read_transcripts(tmp_path / "text") == {"u1": ("HELLO",), "u2": ()}


STREAM = [
    {"audio": "x/f.wav", "type": "partial", "text": "one", "words": [{"word": "one", "start": 0.5, "end": 0.75}]},
    {
        "audio": "x/f.wav",
        "type": "final",
        "text": "one two",
        "words": [{"word": "one", "start": 0.5, "end": 0.75}, {"word": "two", "start": 1.0, "end": 1.5}],
        "reason": "pause",
    },
    {"audio": "x\u2028/g.wav", "type": "final", "text": "", "words": [], "reason": "end"},
    {
        "audio": "x/f.wav",
        "type": "final",
        "text": "three",
        "words": [{"word": "three", "start": 3.0, "end": 3.5}],
        "reason": "end",
    },
]


def test_the_final_results_of_a_stream_are_one_transcript(tmp_path, capsys):
    """The output of `asr transcribe --stream`, by its text and by the times of its words."""
    path = tmp_path / "stream.jsonl"
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in STREAM))
    assert read_transcripts(path) == {"f": ("one", "two", "three"), "g": ()}
    (tmp_path / "ref.stm").write_text("f 1 a 0 2 one two\nf 1 a 2 5 three\ng 1 a 0 1 four\n")
    (tmp_path / "ref.txt").write_text("f one two three\ng four\n")
    for reference in ("ref.stm", "ref.txt"):
        assert main(["evaluate", str(path), "--reference", str(tmp_path / reference), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["words"], found["deletions"], found["insertions"], found["substitutions"]) == (4, 1, 0, 0)
    path.write_text(path.read_text() + json.dumps(STREAM[0]) + "\n")  # of a second run
    for reference in ("ref.stm", "ref.txt"):
        assert main(["evaluate", str(path), "--reference", str(tmp_path / reference)]) == 2
        assert "stream.jsonl:5: the" in (error := capsys.readouterr().err) and "'f' occurs twice" in error


def test_what_an_interrupted_run_wrote_of_a_stream_does_not_count_again(tmp_path, capsys):
    begins = {"one two": 0.0, "three": 2.25}
    run = [{**record, "begin": begins.get(record["text"], 0.0)} for record in STREAM if "f.wav" in record["audio"]]
    path = tmp_path / "stream.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [*run[:2], *run[:1], *run]))
    assert read_transcripts(path) == {"f": ("one", "two", "three")}
    (tmp_path / "ref.stm").write_text("f 1 a 0 2 one two\nf 1 a 2 5 three\n")
    assert main(["evaluate", str(path), "--reference", str(tmp_path / "ref.stm"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["insertions"] == 0


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


def test_a_table_is_called_one(tmp_path):
    (tmp_path / "text.csv").write_text("id,text\nu1,HELLO WORLD\n")
    with pytest.raises(AsrError, match=r"text.csv: transcripts are not read from tables; give lines 'id words ...'"):
        read_transcripts(tmp_path / "text.csv")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(AsrError, match="nowhere: the transcript file cannot be read"):
        read_transcripts(tmp_path / "nowhere")


@pytest.mark.parametrize("field", ["id", "cut_id", "utterance", "audio"])
def test_any_field_of_an_id_fits_any_reference(tmp_path, capsys, field):
    word = {"word": "one", "start": 0.5, "end": 1.0, "confidence": 0.9}
    path, stm, text = (tmp_path / name for name in ("words.jsonl", "ref.stm", "ref.txt"))
    path.write_text(json.dumps({field: "f", "text": "one", "words": [word]}) + "\n")
    stm.write_text("f 1 a 0 2 one\n")
    text.write_text("f one\n")
    for reference in (stm, text):
        details = tmp_path / f"{reference.name}.json"
        command = ["evaluate", str(path), "--reference", str(reference), "--details", str(details), "--json"]
        assert main(command) == 0 and json.loads(capsys.readouterr().out)["wer"] == 0.0
    assert json.loads(details.read_text())["utterances"][0]["words"][0]["confidence"] == 0.9
