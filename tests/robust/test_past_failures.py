"""Inputs that once made a reader fail are refused with one sentence, for ever after."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from asr.errors import AsrError
from asr.graph.openfst import MAGIC
from scripts.benchmarks import robust_targets

NOT_A_STRING = {"id": {}, "start": 0, "duration": 1.0, "channel": 0, "supervisions": [], "type": "MonoCut"}
NOT_A_STRING |= {"recording": robust_targets._cut_of("file", "a.flac")["recording"]}
HEAD = b"HTTP/1.1 200 OK\r\n"
DEEP = b"[" * 100_000
DIGITS = b"9" * 5000
BINARY = struct.pack("<ii6si16siiQqqq", MAGIC, 6, b"vector", 16, b"compactlattice44", 1, 0, 0, 0, 1, 0) + bytes(20)
BINARY = b"a " + BINARY  # one final state: weight, number of transition ids, number of arcs
MODEL = b"<TransitionModel> <Topology> <TopologyEntry> <ForPhones> 1 </ForPhones> <State> 0 " + (
    b"<Transition> 0 1 " * 60_000 + b"</State> </TopologyEntry> </Topology> <Triples> %d %s </Triples>"
)
# The reader and what it could not stand. Found by `scripts/bench robust` unless something else is said.
FAILURES = {
    "nested YAML": ("recipe", b"{" * 2000),
    "nested JSON": ("manifest", DEEP),
    "sizes that torch tells of in several lines": ("bundle bundle.json", b""),
    "nested transcript": ("transcripts", b'{"id": ' + DEEP),
    "nested results": ("results", b'{"audio": ' + DEEP + b"\n"),
    "nested word list": ("ctc tokens.json", DEEP),
    "nested n-best list": ("n-best", b'{"nbest": ' + DEEP),
    "nested tied states": ("tied states", DEEP),
    "id that is not a string": ("manifest", json.dumps(NOT_A_STRING).encode()),
    "blank line of another kind": ("ctc tokens.txt", b"\x0b\n"),
    "column beyond all integers": (
        "tied states",
        b'{"phones": ["A"], "entry": [[1e300]], "loop": [[' + b"9" * 30 + b"]]}",
    ),
    "labels that are no list": ("saved decoder", b'{"labels": true, "is_bpe": false}'),
    "decoder that is a list": ("saved decoder", b"[]"),
    "pieces with a space": ("saved decoder", b'{"labels": ["", "a", "b", " "], "is_bpe": true}'),
    "carriage returns in a table": ("table", b'id,audio,text\r"C, D"\r\n'),
    "newline in a server's answer": ("server bundle.json", b"HTT\n\nP/1.1 200 OK\r\n\r\n"),
    "control characters in a server's answer": ("server a.bin", b"HT\x1b[2JTP 200\r\n\r\n"),
    "announced length that is not a number": ("server bundle.json", HEAD + b"Content-Length: \xb2\r\n\r\n{}"),
    # These were made by hand: Python converts neither this digit nor more than 4,300 digits.
    "word id that is a superscript": ("words.txt", "A \u00b2\n".encode()),
    "word id of many digits": ("words.txt", b"A " + DIGITS),
    "state of many digits": ("other kaldi", b"a\n0 " + DIGITS + b" 1 1,2,3\n1 0,0,\n\n"),
    "word of many digits": ("other kaldi", b"a\n0 1 " + DIGITS + b" 1,2,3\n1 0,0,\n\n"),
    "transition id of many digits": ("other kaldi", b"a\n0 1 1 1,2,3_" + DIGITS + b"\n1 0,0,\n\n"),
    "number of transition ids below 0": ("other kaldi", BINARY[:-12] + b"\xff" * 4 + bytes(8)),
    "count of many digits": ("arpa", b"\\data\\\nngram 1=" + DIGITS + b"\n"),
    "order of many digits": ("arpa", b"\\data\\\nngram " + DIGITS + b"=1\n"),
    "shown transition of many digits": (
        "transitions",
        b"Transition-state 1: phone = A hmm-state = 0 pdf = 1\n Transition-id = %s p = 1 [self-loop]\n" % DIGITS,
    ),
    "output beyond 32 bits": ("transitions", MODEL % (1, b"1 0 4294967296")),
    # Each triple has all transitions of its state.
    "transitions that grow with the square of the file": ("transitions", MODEL % (200, b"1 0 0 " * 200)),
    # This one was fetched again without end.
    "more bytes than announced by the bundle": ("server a.bin", HEAD + b"\r\nweights and more"),
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, robust_targets.Target]:
    return robust_targets.targets_in(tmp_path_factory.mktemp("targets"))


@pytest.fixture(autouse=True)
def _cache_stays(monkeypatch) -> None:
    monkeypatch.setenv("ASR_CACHE", os.environ.get("ASR_CACHE", ""))
    monkeypatch.setattr("asr.hub._FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr("asr.hub._TIMEOUT_SECONDS", 2.0)


@pytest.mark.parametrize(("reader", "content"), FAILURES.values(), ids=FAILURES)
def test_past_failures_are_refused(
    targets: dict[str, robust_targets.Target], tmp_path: Path, reader: str, content: bytes
) -> None:
    if reader not in targets:
        pytest.skip("needs lhotse")
    target = targets[reader]
    for beside, good in target.folder.items():
        (tmp_path / beside).write_bytes(good)
    path = tmp_path / (target.name or f"input{target.suffix}")
    if reader == "bundle bundle.json":
        manifest = json.loads(target.seeds[0])
        del manifest["checksum"]
        manifest["acoustic_model"]["arguments"]["num_features"] = 1 << 62
        content = json.dumps(manifest).encode()
    path.write_bytes(content)
    with pytest.raises(AsrError) as refusal:
        found = target.read(path)
        if reader == "recipe":  # its reader tells what the refusal was
            raise AsrError(found)
    text = str(refusal.value)
    assert text.endswith(".") and text.isprintable() and len(text) < 1000
