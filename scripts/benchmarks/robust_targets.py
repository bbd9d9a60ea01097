"""The input of `scripts/bench robust`: every reader with small valid files."""

from __future__ import annotations

import csv
import functools
import hashlib
import importlib.util
import io
import json
import math
import os
import pickle
import socket
import struct
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from asr import hub
from asr.audio.io import file_pieces, read_audio
from asr.audio.pcm import byte_pieces
from asr.bundle import Bundle
from asr.cli.output import ResultsFile
from asr.ctc.pyctcdecode import BeamSearchDecoderCTC, build_ctcdecoder
from asr.datasets.corpora import CORPORA
from asr.datasets.kaldi import read_wav_scp
from asr.decoding.k2_lattice import load_k2_lattice, read_k2_lattices
from asr.decoding.kaldi_lattice import read_kaldi_archive, read_kaldi_lattices, read_word_ids
from asr.decoding.nbest_io import read_n_best, read_n_best_folder
from asr.decoding.slf import read_slf, read_slf_lattice
from asr.errors import AsrError
from asr.graph.context import TiedStates
from asr.graph.decoding_graph import DecodingGraph
from asr.graph.denominator_graph import DenominatorGraph
from asr.graph.transition_model import read_transition_pdfs
from asr.lm.corpus import read_word_stream
from asr.lm.ngram.arpa import read_arpa, write_arpa
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.io import load_ngram_lm, save_ngram_lm
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.export import load_network, save_network
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.metrics import read_transcripts
from asr.models.checkpoint import network_from_checkpoint, trained_network
from asr.nist import read_words
from asr.serialization import read_checkpoint
from asr.testing.tones import tiny_bundle
from asr.text.ctc_tokens import CTCTokens
from asr.text.lexicon import Lexicon
from asr.text.symbols import TokenTable, Vocabulary

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
    for reader in (trained_network, load_network):
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


def targets_in(scratch: Path) -> dict[str, Target]:
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
    targets |= _bundle_targets(folder)
    targets |= _text_targets(folder)
    targets |= _lattice_targets()
    targets |= _server_targets(scratch)
    network_class = "asr.models.feedforward.FeedForwardNetwork"
    arguments = {"num_features": 20, "num_tokens": 3, "hidden_dim": 8}
    section = {"network": {"class_path": network_class, "init_args": arguments}}
    recipe = json.dumps({"model": {"init_args": section}}).encode()
    good = {"state_dict": {}, "tokens": TOKENS}
    targets["recipe"] = Target(_quietly(_recipe), [recipe], ".yaml", folder={"good.ckpt": _saved(good)})
    if importlib.util.find_spec("av") is not None:
        targets |= _media_targets(folder, tone)
    if importlib.util.find_spec("lhotse") is None:
        return targets
    targets["manifest"] = Target(_cuts, [json.dumps(_cut_of("file", "a.flac")).encode() + b"\n"], ".jsonl")
    command = json.dumps(_cut_of("command", f"mkdir {marker}")).encode()
    targets["manifest command"] = Target(_quietly(_cuts), [command], ".jsonl")
    return targets


def _bundle_targets(folder: Path) -> dict[str, Target]:
    """A bundle with all parts: its description, and its word list and lexicon, of which checksums are kept."""
    if importlib.util.find_spec("kaldifst") is None:
        return {}
    tiny_bundle(folder).save(folder / "bundle")
    files = {path.name: path.read_bytes() for path in (folder / "bundle").iterdir()}
    return {
        f"bundle {name}": Target(
            lambda path: bool(Bundle.load(path.parent)),
            [files[name]],
            folder=files,
            name=name,
            is_checked=name != "bundle.json",
        )
        for name in ("bundle.json", "acoustic_model.safetensors", "rnn_lm_words.txt")
    }


def _arrays(graph: DenominatorGraph) -> dict[str, Any]:
    return {name: array.tolist() for name, array in graph._asdict().items()}


def _text_targets(folder: Path) -> dict[str, Target]:
    """Lists, tables, transcripts of other programs."""
    states = {"phones": ["SIL", "A"], "entry": [[0, 1], [0, 2]], "loop": [[3, 4], [3, 4]]}
    row, half = np.zeros(2, dtype=np.int64), np.full((3, 2), 0.5, dtype=np.float32)
    denominator = DenominatorGraph(row, row + 1, half[0], np.array([0, 1, 2]), np.array([1, 0]), half[1], half[2])
    denominator.save(folder / "denominator.safetensors")
    archive = io.BytesIO()
    np.savez(archive, **denominator._asdict())
    vocabulary = [b'{"<blank>": 0, "a": 1, "b": 2, "|": 3}', b'["<blank>", "a", "b", "|"]']
    decoder = build_ctcdecoder(["", "a", "b", " "])
    decoder.save_to_dir(folder)
    alphabet = (folder / "alphabet.json").read_bytes()
    nemo = b'{"audio_filepath": "a.wav", "text": "A B", "offset": 0.5, "duration": 1.0}\n{"audio_filepath": "b.wav"}\n'
    table = io.StringIO()
    csv.writer(table).writerows([["id", "audio", "text"], ["a", "a.wav", "A B"], ["b", "b.wav", "C, D"]])
    scp = b"a a.wav\nb sph2pipe -f wav b.sph |\nc flac -dc c.flac |\n"
    segments = b"a-1 a 0.5 1.5\nb-1 b 0 -1\n"

    def listed(kind: str) -> Callable[[Path], Any]:
        corpus = CORPORA[kind]
        return lambda path: [corpus.list_part(path, part).utterances for part in corpus.parts_in(path)]

    def kaldi(path: Path) -> Any:
        return [(one.utterance_id, str(one.audio)) for one in read_wav_scp(path.parent / "wav.scp")]

    return {
        "tied states": Target(lambda path: TiedStates.from_file(path).num_columns, [json.dumps(states).encode()]),
        "denominator": Target(
            lambda path: _arrays(DenominatorGraph.load(path)),
            [(folder / "denominator.safetensors").read_bytes()],
            ".safetensors",
            is_checked=True,
        ),
        "denominator of a training": Target(
            lambda path: _arrays(DenominatorGraph.load(path)), [archive.getvalue()], ".npz", is_checked=True
        ),
        "ctc tokens.json": Target(lambda path: CTCTokens(path).symbols, vocabulary, ".json"),
        "ctc tokens.txt": Target(lambda path: CTCTokens(path).symbols, [b"<blk> 0\na 1\nb 2\n", b"<blk>\na\nb\n"]),
        "saved decoder": Target(
            lambda path: bool(BeamSearchDecoderCTC.load_from_dir(path.parent)), [alphabet], name="alphabet.json"
        ),
        "hot words": Target(functools.partial(_with_hot_words, decoder), [b"ab\nba\na b\n"]),
        "ctm": Target(read_words, [b"a 1 0.5 0.25 A 0.9\na 1 0.8 0.2 B\n;; c\n"], ".ctm"),
        "stm": Target(read_words, [b"a 1 s 0.5 2.5 <o,f0> A B\nb 1 s 0 1 C\n"], ".stm"),
        "trn": Target(read_words, [b"A B (a)\nC (b)\n"], ".trn"),
        "nemo": Target(listed("nemo"), [nemo], ".json"),
        "table": Target(listed("csv"), [table.getvalue().encode()], ".csv"),
        "wav.scp": Target(kaldi, [scp], name="wav.scp"),
        "segments": Target(kaldi, [segments], name="segments", folder={"wav.scp": scp}),
    }


def _with_hot_words(decoder: BeamSearchDecoderCTC, path: Path) -> str:
    """Hot words, as a caller may have read them from a file."""
    logits = np.log(np.full((6, 4), 0.25, dtype=np.float32))
    return decoder.decode(logits, beam_width=8, hotwords=path.read_bytes().decode("latin-1").split("\n"))


_KALDI_LISTS = {"words": b"a-1 1 2\na-2\n", "acwt": b"a-1 10 \na-2 12 \n", "lmwt.nolm": b"a-1\t3\na-2\t4\n"}


def _lattice_targets() -> dict[str, Target]:
    """Lattices and lists that `asr rescore` reads."""
    words = dict(enumerate(["", *"ABCDEFGHI"]))
    lists = [
        b'{"id": "a", "nbest": [{"text": "A B", "score": -1.5}, {"text": "A", "scores": {"am": -2, "lm": -1}}]}\n',
        b"a\t-1.5\tA B\na\t-2\tA\nb\tC\n",
        b"-1.5 -2 2 A B\n-2 -1 1 A\n",
        b"NBestList1.0\n(-1500) A B\n(-1600) A\n",
        b"NBestList2.0\n(-15) A ( st: 0.1 et: 0.2 g: -5 a: -10 ) a ( st: 0.1 et: 0.2 g: 0 a: -10 )\n(-16)\n",
    ]
    return {
        "words.txt": Target(read_word_ids, [b"<eps> 0\nA 3\nB 4\n"]),
        "other slf": Target(lambda path: vars(read_slf_lattice(path)), [_SLF], ".slf"),
        "other kaldi": Target(lambda path: len(list(read_kaldi_archive(path, words, 0.01))), [_KALDI, _binary_kaldi()]),
        "transitions": Target(read_transition_pdfs, [_TRANSITIONS, _SHOWN_TRANSITIONS]),
        "other k2": Target(
            lambda path: repr(read_k2_lattices(path, words, 0.01)),
            [_k2_lattice(), _saved(_k2_vector())],
            ".pt",
            is_checked=True,
        ),
        "n-best": Target(read_n_best, lists),
        **{
            f"n-best {name}": Target(
                lambda path: read_n_best_folder(path.parent, words), forms, name=name, folder=_KALDI_LISTS
            )
            for name, forms in (
                ("words", [_KALDI_LISTS["words"], b"a-1 \0B\4\2\0\0\0\1\0\0\0\2\0\0\0a-2 \0B\4\0\0\0\0"]),
                ("acwt", [_KALDI_LISTS["acwt"], b"a-1 \0B\4\0\0\x20\x41a-2 \0B\4\0\0\x40\x41"]),
            )
        },
    }


def _media_targets(folder: Path, tone: Any) -> dict[str, Target]:
    """Containers that FFmpeg reads."""
    import av

    found = {}
    for suffix, codec in ((".m4a", "aac"), (".mka", "pcm_s16le"), (".webm", "libopus")):
        path = folder / f"a{suffix}"
        try:
            with av.open(str(path), "w") as container:
                stream = container.add_stream(codec, rate=48000)
                frame = av.AudioFrame.from_ndarray((tone * 20000).astype(np.int16)[None], format="s16", layout="mono")
                frame.sample_rate = 48000
                for packet in (*stream.encode(frame), *stream.encode(None)):
                    container.mux(packet)
        except (av.FFmpegError, ValueError):
            continue  # this build has no such encoder
        found[f"media{suffix}"] = Target(lambda path: len(read_audio(path)), [path.read_bytes()], suffix)
    return found


def _server_targets(scratch: Path) -> dict[str, Target]:
    """Responses of a server that bundles are fetched from."""
    body = b"weights"
    entry = {"num_bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    manifest = json.dumps({"format": "asr bundle", "version": 1, "files": {"a.bin": entry}}).encode()
    good = {name: _answer(content) for name, content in (("bundle.json", manifest), ("a.bin", body))}

    def fetched(mutated: str) -> Callable[[Path], Any]:
        def read(path: Path) -> Any:
            with (
                tempfile.TemporaryDirectory(dir=scratch) as cache,
                _Server({**good, mutated: path.read_bytes()}) as port,
            ):
                # Five attempts with pauses between them would take all the time.
                hub._FIRST_WAIT_SECONDS, hub._TIMEOUT_SECONDS = 0.0, 2.0
                os.environ["ASR_CACHE"] = cache
                folder = hub.fetch(hub.Source("fuzzed", f"http://127.0.0.1:{port}/fuzzed"))
                return {one.name: one.read_bytes() for one in folder.iterdir() if one.name != "source.json"}

        return read

    return {f"server {name}": Target(fetched(name), [content]) for name, content in good.items()}


def _answer(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


class _Server:
    """Answers each request with bytes by the last part of its path, whatever these bytes are."""

    def __init__(self, answers: dict[str, bytes]) -> None:
        self._answers = answers
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> int:
        self._thread.start()
        return int(self._socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                try:
                    name = connection.recv(4096).split(b" ")[1].rsplit(b"/", 1)[-1].decode()
                    connection.sendall(self._answers.get(name, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"))
                    connection.shutdown(socket.SHUT_WR)
                except OSError:
                    continue


def _quietly(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """A reader whose valid file is rejected as well, for another reason."""

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
    """The output of `save_k2_lattice`, without k2."""

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


def _k2_vector() -> dict[str, torch.Tensor]:
    """Two lattices as k2 puts them in one tensor: their number, where states and arcs of each begin, the arcs."""
    head = torch.tensor([2, 0, 0, 4, 8, 0, 3, 6], dtype=torch.int32)
    arcs = torch.tensor([[0, 1, 1, 0], [1, 2, 2, 0], [2, 3, -1, 0]], dtype=torch.int32).flatten()
    labels = torch.tensor([1, 2, -1, 3, 0, -1], dtype=torch.int32)
    return {"arcs": torch.cat([head, arcs, arcs]), "aux_labels": labels, "lm_scores": torch.zeros(6)}


_SLF = b"""VERSION=1.0
base=2.718281828
N=3 L=2
I=0 t=0.0
I=1 t=0.03 W=A
I=2 t=0.06 W=B
J=0 S=0 E=1 a=-1 l=-1
J=1 S=1 E=2 a=-2 l=-1 d=P,0.02:T,0.01:
"""


def _binary_kaldi() -> bytes:
    """A compact lattice of two states as Kaldi writes it."""
    header = struct.pack("<i6s", 6, b"vector") + struct.pack("<i16s", 16, b"compactlattice44")
    states = struct.pack("<ffiq", math.inf, math.inf, 0, 1) + struct.pack("<iiffiiii", 1, 1, 0.5, 9.0, 2, 3, 4, 1)
    states += struct.pack("<ffiq", 0.25, 1.0, 0, 0)
    return b"utt " + struct.pack("<i", 2125659606) + header + struct.pack("<iiQqqq", 2, 0, 3, 0, 2, 1) + states


_TRANSITIONS = (
    b"<TransitionModel> <Topology> <TopologyEntry> <ForPhones> 1 2 </ForPhones> <State> 0 <PdfClass> 0 <Transition> 0 "
    b"0.5 <Transition> 1 0.5 </State> <State> 1 </State> </TopologyEntry> </Topology> <Triples> 2 1 0 0 2 0 1 "
    b"</Triples> <LogProbs> [ 0 ] </LogProbs> </TransitionModel>\n"
)
_SHOWN_TRANSITIONS = (
    b"Transition-state 1: phone = a hmm-state = 0 pdf = 1\n Transition-id = 1 p = 0.5 count of pdf = 3 [self-loop]\n"
)
_KALDI = b"utt\n7 3 5 1.5,20,2_2_1\n7 4 6 1,21,2_1\n4 3 0 0,3,1\n3 9 0 0.25,0,\n9 0.5,0,\n\n"
