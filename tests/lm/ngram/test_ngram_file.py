"""The binary n-gram file: the same model back, and what is said about damaged ones."""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from asr.errors import AsrError
from asr.lm.corpus import read_word_stream
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.io import _PREFIX, _aligned, load_ngram_lm, read_ngram_lm, save_ngram_lm
from asr.lm.ngram.lookup import look_up_ngrams
from asr.lm.ngram.model import NgramLM
from asr.text.symbols import Vocabulary
from tests.reference.ngram_oracle import toy_sentences


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> NgramLM:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("\n".join(toy_sentences(0, 300)))
    return NgramLM.from_trie(estimate_kneser_ney(read_word_stream([path]), 4).trie, "toy")


def _all_queries(lm: NgramLM) -> tuple[torch.Tensor, torch.Tensor]:
    num_words = len(lm.vocabulary)
    return torch.arange(lm.num_states).repeat_interleave(num_words), torch.arange(num_words).repeat(lm.num_states)


@pytest.mark.slow
@pytest.mark.parametrize("compressed", [False, True], ids=["mapped", "compressed"])
@pytest.mark.parametrize("kind", ["plain", "indexed", "quantized"])
def test_reads_back_what_was_written(lm: NgramLM, tmp_path: Path, kind: str, compressed: bool) -> None:
    lm = {"plain": lm, "indexed": lm.with_index(), "quantized": lm.quantized().with_index(0.9)}[kind]
    save_ngram_lm(lm, tmp_path / "lm.ngram", compressed)
    again = read_ngram_lm(tmp_path / "lm.ngram")
    assert (again.vocabulary, again.order, again.name) == (lm.vocabulary, 4, "toy")
    for ours, theirs in zip(again.score(*_all_queries(again)), lm.score(*_all_queries(lm)), strict=True):
        assert torch.equal(ours, theirs)
    assert [path.name for path in tmp_path.iterdir()] == ["lm.ngram"]


@pytest.mark.parametrize(("text", "order"), [("a b a", 1), ("w0", 2), ("w0", 3)])
def test_the_smallest_models_are_indexed(tmp_path: Path, text: str, order: int) -> None:
    (tmp_path / "text").write_text(text)
    lm = NgramLM.from_trie(estimate_kneser_ney(read_word_stream([tmp_path / "text"]), order).trie)
    save_ngram_lm(lm.with_index(), tmp_path / "lm.ngram")
    for ours, theirs in zip(
        read_ngram_lm(tmp_path / "lm.ngram").score(*_all_queries(lm)), lm.score(*_all_queries(lm)), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_index_finds_what_binary_search_finds(lm: NgramLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for load in (0.3, 0.6, 0.95):
        indexed = lm.with_index(load)
        for ours, theirs in zip(indexed.score(*_all_queries(lm)), lm.score(*_all_queries(lm)), strict=True):
            assert torch.equal(ours, theirs)
        with monkeypatch.context() as patch:
            patch.setattr("asr.lm.ngram.lookup._BUILD_HOMES", 100)
            patch.setattr("asr.lm.ngram.lookup._BUILD_BLOCK", 70)
            in_many_parts = lm.with_index(load).arrays.index
        assert indexed.arrays.index is not None and in_many_parts is not None
        assert torch.equal(in_many_parts.slot, indexed.arrays.index.slot)


def test_more_arcs_than_an_index_can_tell_apart(lm: NgramLM) -> None:
    """With two keys for each place, some are so far from their own that the 31 bits stored could be another key's."""
    with pytest.raises(AsrError, match=r"arcs cannot be distinguished by hashing; use no index"):
        lm.with_index(2.0)
    with pytest.raises(AsrError, match=r"arcs are too many for a hash index; use none"):
        lm.with_index(1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "indexed", "quantized"])
def test_loops_equal_tensor_operations(lm: NgramLM, kind: str) -> None:
    lm = {"plain": lm, "indexed": lm.with_index(), "quantized": lm.quantized().with_index(0.9)}[kind]
    tensors = NgramLM(lm.vocabulary, lm.arrays, lm.order, compiled=False)
    state, word = (query[::7] for query in _all_queries(lm))
    expected = tensors.score(state, word)
    for ours, theirs in zip(lm.score(state, word), expected, strict=True):
        assert torch.equal(ours, theirs)
    few = slice(0, 3000)
    uncompiled = [torch.empty_like(part[few]) for part in expected]
    arrays = state[few].numpy(), word[few].numpy(), lm.arrays.lookup_tables(), *(part.numpy() for part in uncompiled)
    with np.errstate(over="ignore"):  # the key wraps around, as it must
        assert look_up_ngrams(*arrays)
    for ours, theirs in zip(uncompiled, expected, strict=True):
        assert torch.equal(ours, theirs[few])


def test_quantized_scores_are_close_and_small(lm: NgramLM) -> None:
    exact, state = lm.score(*_all_queries(lm))
    near, same_state = lm.quantized().score(*_all_queries(lm))
    assert torch.equal(state, same_state)
    finite = torch.isfinite(exact)
    assert torch.equal(torch.isfinite(near), finite)
    assert (exact - near)[finite].abs().max() < 0.3
    assert (exact - near)[finite].abs().mean() < 0.02
    assert lm.quantized().arrays.num_bytes()["score"] == lm.num_arcs


def test_damaged_files(lm: NgramLM, tmp_path: Path) -> None:
    path = tmp_path / "lm.ngram"
    save_ngram_lm(lm, path)
    whole = path.read_bytes()
    broken = {
        "not an n-gram model file": b"\\data\\\n" + whole,
        "not an n-gram model file;": whole[:7],
        "has version 7, this program reads versions up to 2": whole[:8] + struct.pack("<I", 7) + whole[12:],
        "the header is cut short or damaged": whole[:40] + b"?" + whole[41:],
        "header is cut short": whole[:200],
        "it is cut short": whole[:-1],
        "does not match its checksum": whole[:-50] + b"?" + whole[-49:],
    }
    for sentence, content in broken.items():
        path.write_bytes(content)
        with pytest.raises(AsrError, match=sentence) as caught:
            load_ngram_lm(path)
        assert "lm.ngram" in str(caught.value)
    with pytest.raises(AsrError, match="sizes of its arrays do not fit"):  # the damaged byte has parted two words
        load_ngram_lm(path, verify=False)
    with pytest.raises(AsrError, match="cannot be read"):
        load_ngram_lm(tmp_path / "none")


def test_compressed_files_are_smaller(lm: NgramLM, tmp_path: Path) -> None:
    save_ngram_lm(lm, tmp_path / "mapped")
    save_ngram_lm(lm, tmp_path / "compressed", compressed=True)
    assert (tmp_path / "compressed").stat().st_size < 0.5 * (tmp_path / "mapped").stat().st_size


def test_damaged_compressed_files(lm: NgramLM, tmp_path: Path) -> None:
    path = tmp_path / "lm.ngram"
    save_ngram_lm(lm, path, compressed=True)
    path.write_bytes((whole := path.read_bytes())[:-9] + b"?" + whole[-8:])
    with pytest.raises(AsrError, match=r"lm.ngram: the array 'words' does not match its checksum"):
        load_ngram_lm(path)
    with pytest.raises(AsrError, match=r"lm.ngram: .*\(an array (cannot be decompressed|expands to other)"):
        load_ngram_lm(path, verify=False)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda entry: entry.__setitem__(1, entry[1] - 1), "an array expands to other than"),
        (lambda entry: entry.__setitem__(1, entry[1] + 1), "an array expands to other than"),
        (lambda entry: entry.__setitem__(1, 1 << 30), "'score' is float32 of length 1073741824"),
        (lambda entry: entry.pop(), "does not describe an n-gram model"),
    ],
)
def test_wrong_sizes_of_compressed_arrays(
    lm: NgramLM, tmp_path: Path, change: Callable[[list[object]], object], sentence: str
) -> None:
    path = tmp_path / "lm.ngram"
    save_ngram_lm(lm, path, compressed=True)
    magic, version, length, _ = _PREFIX.unpack((whole := path.read_bytes())[: _PREFIX.size])
    header = json.loads(whole[_PREFIX.size : _PREFIX.size + length])
    change(header["arrays"]["score"])
    text = json.dumps(header).encode()
    start = _PREFIX.pack(magic, version, len(text), zlib.crc32(text)) + text
    path.write_bytes(start.ljust(_aligned(len(start)), b"\0") + whole[_aligned(_PREFIX.size + length) :])
    with pytest.raises(AsrError, match=sentence):
        load_ngram_lm(path, verify=False)


def test_checksums_of_blocks_are_those_of_the_whole(
    lm: NgramLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_ngram_lm(lm, tmp_path / "lm.ngram")
    monkeypatch.setattr("asr.lm.ngram.io._CRC_BLOCK", 1000)
    load_ngram_lm(tmp_path / "lm.ngram")


def test_full_disk_leaves_no_file(lm: NgramLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(AsrError, match="No space left on device"):
        save_ngram_lm(lm, tmp_path / "lm.ngram")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compressed", [False, True], ids=["mapped", "compressed"])
def test_a_model_without_ordinary_words_survives_the_file(tmp_path: Path, compressed: bool) -> None:
    (tmp_path / "lm.arpa").write_text(
        "\\data\\\nngram 1=3\n\n\\1-grams:\n-99\t<s>\n-0.5\t</s>\n-0.2\t<unk>\n\n\\end\\\n"
    )
    lm = NgramLM.from_arpa(tmp_path / "lm.arpa")
    save_ngram_lm(lm, tmp_path / "lm.ngram", compressed)
    again = load_ngram_lm(tmp_path / "lm.ngram")
    assert again.vocabulary == lm.vocabulary and len(lm.vocabulary) == 4
    assert torch.equal(again.score(*_all_queries(lm))[0], lm.score(*_all_queries(lm))[0])


def test_words_that_the_model_lacks_survive_the_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a b\nb a\na\n")
    stream = read_word_stream([tmp_path / "text"], Vocabulary(["a", "b", "c"]))
    lm = NgramLM.from_trie(estimate_kneser_ney(stream, 2).trie)
    save_ngram_lm(lm, tmp_path / "lm.ngram")
    again = load_ngram_lm(tmp_path / "lm.ngram")
    assert again.num_oov_words == lm.num_oov_words == 1
    unknown, c = again.vocabulary.ids_of(["<unk>", "c"])
    assert again.score(again.start(1), c[None])[0] == again.score(again.start(1), unknown[None])[0]
