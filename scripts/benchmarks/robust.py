"""`scripts/bench robust`: mutated input for every reader, and faults that a run must survive.

Each reader gets mutations of small good files, in processes with limits of memory and time. Whatever it does not read
it must refuse with one sentence of ours. Failures are kept below `--keep` with the seed that made them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from asr.audio.io import byte_pieces, file_pieces, read_audio
from asr.bundle import read_manifest
from asr.cli.output import ResultsFile
from asr.decoding.lattice_io import load_k2_lattice, read_kaldi_lattices, read_slf
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.corpus import read_word_stream
from asr.lm.ngram.arpa import read_arpa, write_arpa
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.io import load_ngram_lm, save_ngram_lm
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.export import load_network, save_network
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.metrics import read_transcripts
from asr.models.checkpoint import network_from_checkpoint, weights_and_tokens
from asr.serialization import read_checkpoint, sealed
from asr.text.lexicon import Lexicon
from asr.text.symbols import TokenTable, Vocabulary
from scripts.benchmarks.inputs import ROOT

SECONDS_PER_INPUT = 10.0
MEMORY_BYTES = 3 << 30  # beside what the process has mapped when it begins
QUICK_INPUTS, ALL_INPUTS = 2600, 50_000
_NUMBERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
_WORDS = [
    b"nan",
    b"inf",
    b"-1",
    b"1e999",
    b"99999999999999999999",
    b"",
    b"\0",
    b"\xff",
    b"../x",
    b"{" * 2000,
    b"[]",
    b"null",
]
WORDS = ["A", "B", "C"]
TOKENS = ["<blk>", "P", "T"]


@dataclass
class Target:
    """A reader with good files.

    Args:
        read: takes a path and gives something that can be compared, or raises.
        seeds: good contents.
        suffix: of the file.
        is_checked: whether a single flipped bit must be noticed.
        folder: files that stand beside the mutated one, whose name is `name`.
    """

    read: Callable[[Path], Any]
    seeds: list[bytes]
    suffix: str = ""
    is_checked: bool = False
    folder: dict[str, bytes] = field(default_factory=dict)
    name: str = ""


def main(arguments: list[str]) -> int:
    """Runs everything; the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="scripts/bench robust", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_INPUTS} inputs instead of {ALL_INPUTS}")
    parser.add_argument("--inputs", type=int, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one reader")
    parser.add_argument("--keep", type=Path, default=ROOT / "exp" / "robust", help="where failures go")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report: Counter[str] = Counter(dict.fromkeys(_FIELDS, 0))
    num_inputs = args.inputs or (QUICK_INPUTS if args.quick else ALL_INPUTS)
    with tempfile.TemporaryDirectory() as scratch:
        background = None if args.only else _start_recognizer_check(args.quick)
        targets = _targets(Path(scratch))
        if args.only:
            targets = {args.only: targets[args.only]}
        for target_name, target in targets.items():
            begin = time.monotonic()
            _fuzz(target_name, target, num_inputs // len(targets), args.seed, Path(scratch), args.keep, report)
            print(f"{target_name}: {time.monotonic() - begin:.1f} s", file=sys.stderr)
        if not args.only:
            _kill_and_resume(Path(scratch), 20 if args.quick else 300, args.seed, report)
        result: dict[str, Any] = dict(report)
        if background is not None:
            result |= _recognizer_check(background)
    print(json.dumps(result))
    return 0


_FIELDS = (
    "inputs_tried",
    "refused",
    "crashes",
    "hangs",
    "other_exceptions",
    "refusals_without_sentence",
    "silent_bit_flips",
    "code_executed",
    "lost_results",
    "doubled_results",
)


def _fuzz(
    name: str, target: Target, num_inputs: int, seed: int, scratch: Path, keep: Path, report: Counter[str]
) -> None:
    folder = scratch / f"fuzz-{name}"
    folder.mkdir()
    for beside, content in target.folder.items():
        (folder / beside).write_bytes(content)
    path = folder / (target.name or f"input{target.suffix}")
    marker = scratch / "executed"
    for content in target.seeds:
        path.write_bytes(content)
        target.read(path)  # a good file must be read
    done = 0
    while done < num_inputs:
        done += _child(name, target, range(done, num_inputs), seed, path, marker, keep, report)


def _child(
    name: str, target: Target, indices: range, seed: int, path: Path, marker: Path, keep: Path, report: Counter[str]
) -> int:
    """Tries inputs in a process until one kills it or all are done; gives their number."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _try_all(name, target, indices, seed, path, marker, writing)
        os._exit(0)
    os.close(writing)
    num_done = 0
    received = b""
    outcome = "crashes"
    with os.fdopen(reading, "rb", buffering=0) as results:
        while True:
            if not select.select([results], [], [], SECONDS_PER_INPUT)[0]:
                os.kill(pid, signal.SIGKILL)
                outcome = "hangs"
                break
            block = results.read(1 << 16)
            if not block:
                break
            received += block
            *lines, received = received.split(b"\n")
            for line in lines:
                kind, _, text = line.decode().partition(" ")
                report["inputs_tried"] += 1
                num_done += 1
                if kind != "read":
                    report[kind] += 1
                if kind not in ("read", "refused"):
                    _keep(name, kind, text, target, seed, indices[num_done - 1], keep)
    os.waitpid(pid, 0)
    if num_done < len(indices):
        report["inputs_tried"] += 1
        report[outcome] += 1
        _keep(name, outcome, "", target, seed, indices[num_done], keep)
        num_done += 1
    return num_done


def _keep(name: str, kind: str, text: str, target: Target, seed: int, index: int, keep: Path) -> None:
    content = _mutated(name, target, seed, index)[0]
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"{name}-{seed}-{index}{target.suffix}"
    path.write_bytes(content)
    print(f"{kind}: {name}, seed {seed}, input {index}: {text[:300]} ({path})", file=sys.stderr)


def _try_all(name: str, target: Target, indices: range, seed: int, path: Path, marker: Path, writing: int) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    for index in indices:
        content, flipped = _mutated(name, target, seed, index)
        if flipped is not None:
            path.write_bytes(flipped)
            expected = target.read(path)
        path.write_bytes(content)
        text = ""
        try:
            found = target.read(path)
            kind = "silent_bit_flips" if flipped is not None and found != expected else "read"
        except AsrError as error:
            text = str(error)
            kind = "refused" if text.strip() == text and "\n" not in text and text.endswith(".") else ""
            kind = kind or "refusals_without_sentence"
        except BaseException as error:
            kind, text = "other_exceptions", f"{type(error).__name__}: {error}"
        if marker.exists():
            marker.rmdir()
            kind = "code_executed"
        os.write(writing, f"{kind} {text[:400]}".replace("\n", " ").encode("utf-8", "replace") + b"\n")


def _mutated(name: str, target: Target, seed: int, index: int) -> tuple[bytes, bytes | None]:
    """An input; for single flipped bits of files with a checksum the good one, too."""
    generator = random.Random(f"{name} {seed} {index}")
    good = generator.choice(target.seeds)
    if target.is_checked and index % 2 == 0:
        flipped = bytearray(good)
        flipped[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        return bytes(flipped), good
    content = good
    for _ in range(generator.choice((1, 1, 1, 2, 4))):
        content = generator.choice(_MUTATIONS)(content, generator, target.seeds)
    return content, None


def _flip(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    changed = bytearray(content or b"\0")
    changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def _number(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    packed = struct.pack(generator.choice("<I >I <H >H <Q >Q B".split()), generator.choice(_NUMBERS) & 0xFF)
    if len(packed) > 1:
        packed = struct.pack(
            {2: "<H", 4: generator.choice(("<I", ">I")), 8: "<Q"}[len(packed)],
            generator.choice(_NUMBERS) & (256 ** len(packed) - 1),
        )
    place = generator.randrange(min(len(content), 512) + 1)
    return content[:place] + packed + content[place + len(packed) :]


def _cut(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    return content[: generator.randrange(len(content) + 1)]


def _delete(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    begin = generator.randrange(len(content) + 1)
    return content[:begin] + content[begin + generator.randrange(1, 64) :]


def _repeat(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    begin = generator.randrange(len(content) + 1)
    return (
        content[:begin]
        + content[begin : begin + generator.randrange(1, 200)] * generator.choice((2, 3, 50))
        + content[begin:]
    )


def _splice(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    other = generator.choice(seeds)
    return content[: generator.randrange(len(content) + 1)] + other[generator.randrange(len(other) + 1) :]


def _line(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    lines = content.split(b"\n")
    place = generator.randrange(len(lines))
    fate = generator.randrange(3)
    if fate == 0:
        del lines[place]
    elif fate == 1:
        lines.insert(place, generator.choice(lines))
    else:
        generator.shuffle(lines)
    return b"\n".join(lines)


def _word(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    separator = generator.choice((b" ", b"\t", b"=", b",", b":", b"\n"))
    parts = content.split(separator)
    parts[generator.randrange(len(parts))] = generator.choice(_WORDS)
    return separator.join(parts)


def _value(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    """Another value at some place of a JSON text."""
    try:
        value = json.loads(content)
    except ValueError:
        return _word(content, generator, seeds)
    places: list[tuple[Any, Any]] = []

    def collect(inner: Any) -> None:
        for key in list(inner) if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ():
            places.append((inner, key))
            collect(inner[key])

    collect(value)
    if places:
        owner, key = generator.choice(places)
        owner[key] = generator.choice((None, -1, 1e300, 1 << 62, "", "../x", [], {}, True, [[]]))
        if isinstance(value, dict) and "checksum" in value and generator.random() < 0.9:
            value = sealed({name: inner for name, inner in value.items() if name != "checksum"})
    return json.dumps(value).encode()


_MUTATIONS = (_flip, _number, _cut, _delete, _repeat, _splice, _line, _word, _value)


def _audio(path: Path) -> Any:
    pieces = [len(piece) for piece in file_pieces(path, 0.05)[1]]
    return read_audio(path).tolist(), sum(pieces)


def _from_stdin(path: Path) -> Any:
    with path.open("rb") as stream:
        return sum(len(piece) for piece in byte_pieces(stream, 0.05)[1])


def _graph(path: Path) -> Any:
    graph = DecodingGraph.load(path)
    tensors = {key: value.tolist() for key, value in vars(graph).items() if isinstance(value, torch.Tensor)}
    return tensors, graph.tokens.tokens, graph.vocabulary.words, graph.meta


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _network(path: Path) -> Any:
    return _plain(dict(load_network(path.parent).state_dict()))


def _ngram(path: Path) -> Any:
    model = load_ngram_lm(path)
    return _plain(model.arrays.tensors()), model.vocabulary.words, model.order


def _archive(path: Path) -> Any:
    for reader in (weights_and_tokens, load_network):
        try:
            reader(path)
        except AsrError:
            continue
    return _plain(read_checkpoint(path))


def _lattice(path: Path) -> Any:
    return _plain(vars(load_k2_lattice(path)))


def _cuts(path: Path) -> Any:
    from asr.datasets.cuts import cut_text, read_cuts

    return [(cut.id, cut_text(cut)) for cut in read_cuts([path])]


def _results(path: Path) -> Any:
    with ResultsFile(path, "audio") as output:
        return output.done


def _recipe(path: Path) -> Any:
    return network_from_checkpoint(path.parent / "good.ckpt", path)


def _targets(scratch: Path) -> dict[str, Target]:
    folder = scratch / "seeds"
    folder.mkdir()
    marker = str(scratch / "executed")
    tone = (0.3 * np.sin(np.arange(1600) / 10)).astype(np.float32)

    def sound(suffix: str, **settings: str) -> bytes:
        soundfile.write(str(folder / f"a{suffix}"), tone, 16000, **settings)
        return (folder / f"a{suffix}").read_bytes()

    wav = [sound(".wav", subtype=kind) for kind in ("PCM_16", "PCM_24", "FLOAT", "ULAW", "GSM610", "IMA_ADPCM")]
    targets = {
        f"audio{suffix}": Target(_audio, [sound(suffix)], suffix)
        for suffix in (".flac", ".ogg", ".mp3", ".aiff", ".au")
    }
    targets["audio.wav"] = Target(_audio, wav, ".wav")
    targets["stdin"] = Target(_from_stdin, wav[:3], ".wav")
    text = folder / "text"
    text.write_text("A B C\nB A\nC C A\nA B\n" * 4)
    trie = estimate_kneser_ney(read_word_stream([text]), 2).trie
    write_arpa(trie, folder / "a.arpa")
    model = NgramLM.from_trie(trie)
    save_ngram_lm(model.with_index(), folder / "a.bin")
    save_ngram_lm(model.quantized(), folder / "b.bin")
    targets["arpa"] = Target(lambda path: read_arpa(path).counts, [(folder / "a.arpa").read_bytes()], ".arpa")
    binary = [(folder / name).read_bytes() for name in ("a.bin", "b.bin")]
    targets["ngram"] = Target(_ngram, binary, ".bin", is_checked=True)
    targets["lexicon"] = Target(lambda path: len(Lexicon.from_file(path)), [b"A P T\nB T\nC P\nC(2) T T\n"])
    targets["tokens"] = Target(lambda path: TokenTable.from_file(path).tokens, ["\n".join(TOKENS).encode()])
    targets["words"] = Target(lambda path: Vocabulary.from_file(path).words, ["\n".join(WORDS).encode()])
    transcripts = [b"a A B\nb C\n", b'{"id": "a", "text": "A B"}\n{"id": "b", "error": "x"}\n']
    targets["transcripts"] = Target(read_transcripts, transcripts)
    targets["results"] = Target(_results, [b'{"audio": "a", "text": "A"}\n{"audio": "b", "error": "x"}\n'])
    vocabulary, tokens = Vocabulary(WORDS), TokenTable(TOKENS[1:])
    graph = DecodingGraph(
        arc_begin=torch.tensor([0, 2, 3]),
        dst_state=torch.tensor([0, 1, 1], dtype=torch.int32),
        token_id=torch.tensor([0, 1, 2], dtype=torch.int32),
        score=torch.tensor([-0.5, -1.0, -0.25]),
        word_begin=torch.tensor([0, 0, 1, 1]),
        word_id=torch.tensor([4], dtype=torch.int32),
        final_score=torch.tensor([float("-inf"), -0.1]),
        tokens=tokens,
        vocabulary=vocabulary,
    )
    graph.save(folder / "a.safetensors")
    targets["graph"] = Target(_graph, [(folder / "a.safetensors").read_bytes()], ".safetensors", is_checked=True)
    targets["slf"] = Target(lambda path: vars(read_slf(path, vocabulary, tokens, 0.01)), [_SLF], ".slf")
    targets["kaldi"] = Target(lambda path: len(list(read_kaldi_lattices(path, 9))), [_KALDI])
    checkpoint = {"state_dict": {"average.network.weight": torch.arange(40.0)}, "tokens": TOKENS, "epoch": 1}
    attacks = _attacks(marker, checkpoint)
    targets["checkpoint"] = Target(_archive, [_saved(checkpoint)], ".ckpt", is_checked=True)
    for number, attack in enumerate(attacks):
        targets[f"attack{number}"] = Target(_refused(attack), [_saved(checkpoint)], ".ckpt")
    targets["k2"] = Target(_lattice, [_k2_lattice()], ".pt", is_checked=True)
    network = RNNLanguageModel(vocabulary, RNNLMConfig(embedding_size=4, hidden_size=4))
    save_network(network, folder / "lm")
    files = {path.name: path.read_bytes() for path in (folder / "lm").iterdir()}
    for file_name, content in files.items():
        targets[f"rnn {file_name}"] = Target(_network, [content], is_checked=True, folder=files, name=file_name)
    for bundle in sorted((ROOT / "checkpoints").glob("an4/bundle.json")):
        small = {path.name: path.read_bytes() for path in bundle.parent.iterdir() if path.is_file()}
        manifest = small.pop("bundle.json")
        targets["bundle"] = Target(
            lambda path: read_manifest(path.parent), [manifest], folder=small, name="bundle.json"
        )
    network_class = "asr.models.feedforward.FeedForwardNetwork"
    arguments = {"num_features": 20, "num_tokens": 3, "hidden_dim": 8}
    section = {"network": {"class_path": network_class, "init_args": arguments}}
    recipe = json.dumps({"model": {"init_args": section}}).encode()
    good = {"state_dict": {}, "tokens": TOKENS}
    targets["recipe"] = Target(_quietly(_recipe), [recipe], ".yaml", folder={"good.ckpt": _saved(good)})
    try:
        import lhotse  # noqa: F401
    except ImportError:
        return targets
    targets["manifest"] = Target(_cuts, [json.dumps(_cut_of("file", "a.flac")).encode() + b"\n"], ".jsonl")
    command = json.dumps(_cut_of("command", f"mkdir {marker}")).encode()
    targets["manifest command"] = Target(_quietly(_cuts), [command], ".jsonl")
    return targets


def _quietly(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """A reader whose good file is refused as well, for another reason."""

    def read_or_refuse(path: Path) -> Any:
        try:
            return read(path)
        except AsrError as error:
            return str(error)

    return read_or_refuse


def _refused(attack: bytes) -> Callable[[Path], Any]:
    """A reader of an attack, whatever the path has."""

    def read(path: Path) -> Any:
        path.write_bytes(attack)
        return _quietly(_archive)(path), _quietly(load_k2_lattice)(path)

    return read


def _cut_of(kind: str, source: str) -> dict[str, Any]:
    recording = {"id": "a", "sources": [{"type": kind, "channels": [0], "source": source}], "sampling_rate": 16000}
    recording |= {"num_samples": 16000, "duration": 1.0, "channel_ids": [0]}
    return {
        "id": "a",
        "start": 0,
        "duration": 1.0,
        "channel": 0,
        "supervisions": [],
        "recording": recording,
        "type": "MonoCut",
    }


def _saved(content: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **settings)
    return file.getvalue()


class _Harmful:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def _attacks(marker: str, good: dict[str, Any]) -> list[bytes]:
    harmful = {**good, "x": _Harmful(marker)}
    return [
        _saved(harmful),
        _saved(harmful, _use_new_zipfile_serialization=False),
        pickle.dumps(_Harmful(marker)),
        pickle.dumps(_Harmful(marker), 2) + _saved(good),
        _saved(harmful) + _saved(good),
        _saved(good).replace(b"data.pkl", b"data.PKL"),
    ]


def _k2_lattice() -> bytes:
    """What `save_k2_lattice` writes, without k2."""

    class RaggedTensor:
        def __getstate__(self) -> Any:
            begin, values = torch.tensor([0, 1, 1, 1], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
            return begin, "row_ids1", values

    RaggedTensor.__module__, RaggedTensor.__qualname__ = "_k2.ragged", "RaggedTensor"
    module = types.ModuleType("_k2.ragged")
    module.RaggedTensor = RaggedTensor  # type: ignore[attr-defined]
    names = ("_k2", "_k2.ragged")
    earlier = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update({"_k2": types.ModuleType("_k2"), "_k2.ragged": module})
    try:
        arcs = torch.tensor([[0, 1, 1, 0], [1, 2, 2, 0], [2, 3, -1, 0]], dtype=torch.int32)
        scores = {name: torch.tensor([-1.0, -2.0, 0.0]) for name in ("am_score", "graph_score", "lm_score")}
        graph_arc = torch.tensor([0, 1, -1], dtype=torch.int32)
        return _saved({"arcs": arcs, **scores, "graph_arc": graph_arc, "aux_labels": RaggedTensor()})
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(earlier)


_SLF = b"""VERSION=1.0
base=2.718281828
N=3 L=2
I=0 t=0.0
I=1 t=0.03 W=A
I=2 t=0.06 W=B
J=0 S=0 E=1 a=-1 l=-1
J=1 S=1 E=2 a=-2 l=-1 d=P,0.02:T,0.01:
"""
_KALDI = b"utt\n7 3 5 1.5,20,2_2_1\n7 4 6 1,21,2_1\n4 3 0 0,3,1\n3 9 0 0.25,0,\n9 0.5,0,\n\n"


def _kill_and_resume(scratch: Path, num_kills: int, seed: int, report: Counter[str]) -> None:
    """Writes results in processes that are killed at random times, and counts what is missing or there twice."""
    path = scratch / "killed.jsonl"
    names = [f"{number}.wav" for number in range(400)]
    generator = random.Random(seed)
    for kill in range(num_kills + 1):
        pid = os.fork()
        if pid == 0:
            with ResultsFile(path, "audio") as output:
                output.require_maker("fuzzer")
                for name in names:
                    if name not in output.done:
                        output.add({"audio": name, "text": "WORD " * 40})
                        time.sleep(0.0005)
            os._exit(0)
        if kill < num_kills:
            time.sleep(generator.uniform(0.0, 0.03))
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    counts = Counter(json.loads(line)["audio"] for line in path.read_text().splitlines())
    report["lost_results"] += sum(name not in counts for name in names)
    report["doubled_results"] += sum(count - 1 for count in counts.values())


_RECOGNIZER = """
import ctypes, json, sys, threading
from pathlib import Path
import torch
torch.set_num_threads(1)
from asr.audio.io import read_audio
from asr.bundle import Bundle
from asr.recognizer import Recognizer
folder, num_rounds, *clips = sys.argv[1:]
waveforms = [read_audio(clip)[:64000] for clip in clips]
bundle = Bundle.load(folder)
expected = [Recognizer(bundle)([waveform])[0].text for waveform in waveforms]
wrong, recognizer, together = [], Recognizer(bundle), threading.Barrier(4)
def call(first):
    together.wait()
    try:
        for step in range(len(waveforms)):
            which = (first + step) % len(waveforms)
            if recognizer([waveforms[which]])[0].text != expected[which]:
                wrong.append(which)
    except Exception as error:
        wrong.append(repr(error))
threads = [threading.Thread(target=call, args=(first,)) for first in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
wrong += [which for which, text in enumerate(expected) if recognizer([waveforms[which]])[0].text != text]
trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
def megabytes():
    trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
hours = sum(map(len, waveforms)) / 16000 / 3600
recognizer(waveforms)
recognizer(waveforms)
before = megabytes()
for _ in range(int(num_rounds)):
    recognizer(waveforms)
growth = (megabytes() - before) / (hours * int(num_rounds))
print(json.dumps({"thread_errors": len(wrong), "memory_growth_mb_per_hour": round(max(0.0, growth), 2)}))
"""


def _start_recognizer_check(quick: bool) -> subprocess.Popen[str]:
    clips = sorted(map(str, (ROOT / "scripts" / "demo_clips").glob("*.flac")))[: 3 if quick else 5]
    bundle = ROOT / "checkpoints" / "librispeech"
    command = [sys.executable, "-c", _RECOGNIZER, str(bundle), "6" if quick else "200", *clips]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _recognizer_check(process: subprocess.Popen[str]) -> dict[str, Any]:
    output = process.communicate()[0]
    if process.returncode:
        return {"thread_errors": 1, "memory_growth_mb_per_hour": None}
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result
