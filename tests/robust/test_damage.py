"""What this program writes says so when a bit of it has changed, and is replaced as a whole or not at all."""

from __future__ import annotations

import errno
import io
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from asr.bundle import Bundle
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph, PhoneGraph
from asr.graph.denominator_graph import DenominatorGraph
from asr.lm.ngram.io import load_ngram_lm, save_ngram_lm
from asr.lm.rnn.export import load_network, save_network


def content_of(value: object) -> object:
    """Something to compare by."""
    if isinstance(value, DecodingGraph):
        tensors = {name: tensor.tolist() for name, tensor in vars(value).items() if isinstance(tensor, torch.Tensor)}
        return tensors, value.tokens.tokens, value.vocabulary.words, value.meta
    if isinstance(value, Bundle):
        return value.name, value.decoding, content_of(value.graph), value.features.arguments
    if isinstance(value, DenominatorGraph):
        return {name: array.tolist() for name, array in value._asdict().items()}
    if isinstance(value, torch.nn.Module):
        return {name: tensor.tolist() for name, tensor in value.state_dict().items()}
    return {name: tensor.tolist() for name, tensor in value.arrays.tensors().items()}, value.vocabulary.words  # type: ignore[attr-defined]


def no_flipped_bit_is_read(damaged: Path, read: Callable[[], object], num_flips: int) -> None:
    expected = content_of(read())
    whole = damaged.read_bytes()
    generator = random.Random(0)
    try:
        for _ in range(num_flips):
            content = bytearray(whole)
            place, bit = generator.randrange(len(whole)), generator.randrange(8)
            content[place] ^= 1 << bit
            damaged.write_bytes(content)
            try:
                found = read()
            except AsrError as error:
                assert "\n" not in str(error)
                continue
            assert content_of(found) == expected, f"{damaged.name}: bit {bit} of byte {place}"
    finally:
        damaged.write_bytes(whole)


@pytest.fixture
def bundle(tiny_bundle_folder: Path) -> Bundle:
    return Bundle.load(tiny_bundle_folder)


@pytest.mark.slow
def test_no_flipped_bit_of_a_graph_is_read(tmp_path: Path, bundle: Bundle) -> None:
    path = tmp_path / "graph.safetensors"
    bundle.graph.save(path)
    no_flipped_bit_is_read(path, lambda: DecodingGraph.load(path), 300)


@pytest.mark.slow
def test_no_flipped_bit_of_a_graph_of_phones_is_read(tmp_path: Path) -> None:
    pytest.importorskip("kaldifst")
    from asr.graph.build import build_phone_graph
    from asr.lm.corpus import read_word_stream
    from asr.lm.ngram.estimate import estimate_kneser_ney
    from asr.lm.ngram.model import NgramLM
    from asr.testing.tones import PRONUNCIATIONS, TEXT
    from asr.text.lexicon import Lexicon
    from asr.text.symbols import TokenTable

    (tmp_path / "text").write_text("\n".join(TEXT) + "\n")
    (tmp_path / "lexicon").write_text("".join(f"{word} {' '.join(ways[0])}\n" for word, ways in PRONUNCIATIONS.items()))
    lexicon = Lexicon.from_file(tmp_path / "lexicon")
    model = NgramLM.from_trie(estimate_kneser_ney(read_word_stream([tmp_path / "text"]), 2).trie)
    graph: PhoneGraph = build_phone_graph(lexicon, model, TokenTable(lexicon.phones, name="lexicon"))[0]
    path = tmp_path / "graph.safetensors"
    graph.save(path)
    no_flipped_bit_is_read(path, lambda: DecodingGraph.load(path), 150)


@pytest.mark.slow
def test_no_flipped_bit_of_a_denominator_is_read(tmp_path: Path) -> None:
    rows = np.array([0, 1]), np.array([1, 2]), np.array([0, 1, 2]), np.array([1, 0])
    halves = np.full((3, 2), 0.5, dtype=np.float32)
    entry, loop, begin, source = rows
    graph = DenominatorGraph(entry, loop, halves[0], begin, source, halves[1], halves[2])
    path = tmp_path / "denominator.safetensors"
    graph.save(path)
    no_flipped_bit_is_read(path, lambda: DenominatorGraph.load(path), 300)
    arrays = dict(np.load(io.BytesIO(np_archive(graph))))
    (tmp_path / "old.safetensors").write_bytes(save({name: torch.from_numpy(array) for name, array in arrays.items()}))
    assert content_of(DenominatorGraph.load(tmp_path / "old.safetensors")) == content_of(graph)  # has no checksum
    path = tmp_path / "denominator.npz"
    path.write_bytes(np_archive(graph))
    no_flipped_bit_is_read(path, lambda: DenominatorGraph.load(path), 200)


def np_archive(graph: DenominatorGraph) -> bytes:
    file = io.BytesIO()
    np.savez(file, **graph._asdict())
    return file.getvalue()


@pytest.mark.slow
def test_no_flipped_bit_of_other_models_is_read(tmp_path: Path, bundle: Bundle) -> None:
    assert bundle.small_ngram is not None and bundle.rnn_lm is not None
    path = tmp_path / "a.bin"
    save_ngram_lm(bundle.small_ngram, path)
    no_flipped_bit_is_read(path, lambda: load_ngram_lm(path), 200)
    save_network(bundle.rnn_lm.network, tmp_path / "lm")  # type: ignore[arg-type]
    for name in ("network.json", "network.safetensors", "words.txt"):
        no_flipped_bit_is_read(tmp_path / "lm" / name, lambda: load_network(tmp_path / "lm"), 100)


@pytest.mark.slow
def test_no_flipped_bit_of_a_bundle_is_read(tmp_path: Path, tiny_bundle_folder: Path) -> None:
    folder = tmp_path / "tones"
    shutil.copytree(tiny_bundle_folder, folder)
    for name in ("bundle.json", "acoustic_model.safetensors", "small_ngram.bin"):
        no_flipped_bit_is_read(folder / name, lambda: Bundle.load(folder), 60 if name == "bundle.json" else 10)


def damaged_manifests(manifest: dict[str, object]) -> list[dict[str, object]]:
    del manifest["checksum"]
    changed = [{**manifest, key: value} for key in manifest for value in (None, 3, [], {}, "x")]
    changed += [{name: value for name, value in manifest.items() if name != key} for key in manifest]
    for key in ("acoustic_model", "features", "rnn_lm", "graph", "small_ngram"):
        entry = manifest[key]
        assert isinstance(entry, dict)
        changed += [
            {**manifest, key: {**entry, inner: value}} for inner in entry for value in (None, 3, "../x", [], {})
        ]
        changed += [{**manifest, key: {k: v for k, v in entry.items() if k != inner}} for inner in entry]
    return changed


@pytest.mark.slow
def test_a_manifest_of_anything_is_one_sentence(tmp_path: Path, tiny_bundle_folder: Path) -> None:
    folder = tmp_path / "tones"
    shutil.copytree(tiny_bundle_folder, folder)
    manifest = json.loads((folder / "bundle.json").read_text())
    for changed in damaged_manifests(manifest):
        (folder / "bundle.json").write_text(json.dumps(changed))
        try:
            Bundle.load(folder)
        except AsrError as error:
            assert "\n" not in str(error)


def test_a_card_in_another_encoding_is_no_obstacle(tmp_path: Path, tiny_bundle_folder: Path) -> None:
    folder = tmp_path / "tones"
    shutil.copytree(tiny_bundle_folder, folder)
    (folder / "card.md").write_bytes("für".encode("latin-1"))
    assert Bundle.load(folder).card == "f\ufffdr"


def test_a_full_disk_leaves_the_earlier_bundle(tmp_path: Path, bundle: Bundle, monkeypatch) -> None:
    folder = tmp_path / "tones"
    bundle.save(folder)
    (folder / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("asr.bundle.save_ngram_lm", full)
    with pytest.raises(AsrError, match=r"cannot be written \(No space left on device\); make room"):
        bundle.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["tones"]
    monkeypatch.undo()
    bundle.save(folder)
    assert (folder / "notes.txt").read_text() == "mine" and Bundle.load(folder).name == bundle.name


FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from asr.errors import AsrError
from asr.models.external import torchscript
from asr.serialization import atomic_path
from asr.text.ctc_tokens import CTCTokens
network = torch.jit.script(torch.nn.Linear(100, 100))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    with atomic_path(Path(sys.argv[1])) as partial:
        torchscript.save(network, partial, CTCTokens(["<blk>", "a"]))
except AsrError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_full_disk_does_not_end_the_process_that_exports(tmp_path: Path) -> None:
    """torch's own writer ends it with a signal."""
    path = tmp_path / "model.pt"
    path.write_bytes(b"mine")
    command = [sys.executable, "-c", FULL_DISK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert (done.returncode, path.read_bytes()) == (0, b"mine"), done.stderr
    assert "cannot be written (File too large)" in done.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]
