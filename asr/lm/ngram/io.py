"""`NgramLM` in one binary file: memory-mapped or compressed, with a version and checksums, never written in part.

Layout: magic, version, length and CRC-32 of a JSON header, the header, then each array at a multiple of 64 bytes. The
header gives each array's position, type, length and CRC-32, and the length of the file. In version 2, the arrays are
compressed (zlib): first the lowest byte of each value, then the second of each, and so on. The header also gives the
number of compressed bytes, and the CRC-32 is that of these bytes.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from asr.errors import AsrError
from asr.lm.ngram.lookup import ArcIndex
from asr.lm.ngram.model import NgramArrays, NgramLM
from asr.serialization import open_atomic
from asr.text.documents import parse_json
from asr.text.symbols import Vocabulary

MAGIC = b"ASRNGRAM"
VERSIONS = MAPPED, COMPRESSED = (1, 2)
_PREFIX = struct.Struct("<8sIII")
_ALIGNMENT = 64
_CRC_BLOCK = 1 << 24


def save_ngram_lm(lm: NgramLM, path: str | Path, compressed: bool = False) -> None:
    """Writes a model; the file appears under its name only when it is complete.

    Args:
        lm: the model.
        path: the file.
        compressed: whether to compress the arrays to about 40 %. They are then decompressed into memory when the model
            is loaded, instead of mapped.

    Raises:
        AsrError: the file cannot be written, for example because the disk is full.
    """
    arrays = {name: np.ascontiguousarray(tensor.cpu().numpy()) for name, tensor in lm.arrays.tensors().items()}
    words = "\n".join(lm.vocabulary.ordinary).encode()
    arrays["words"] = np.frombuffer(words, dtype=np.uint8)
    version = COMPRESSED if compressed else MAPPED
    header: dict[str, Any] = {"order": lm.order, "name": lm.name, "arrays": {}, "index": None}
    if (index := lm.arrays.index) is not None:
        arrays["slot"] = index.slot.cpu().numpy()
        header["index"] = [index.num_homes, index.word_bits, index.key_bits]
    position = 0
    for name, array in arrays.items():
        position = _aligned(position)
        stored = _compressed(array) if compressed else array
        num_bytes = [stored.nbytes] if compressed else []
        header["arrays"][name] = [str(array.dtype), len(array), position, _crc(stored), *num_bytes]
        position += stored.nbytes
        arrays[name] = stored
    header["num_bytes"] = position
    with open_atomic(Path(path)) as stream:
        _write(stream, version, header, arrays)


def load_ngram_lm(path: str | Path, verify: bool = True, known: Vocabulary | None = None) -> NgramLM:
    """Maps a model into memory; pages are read when they are first used. Compressed arrays are decompressed.

    Args:
        path: the file.
        verify: whether to check every array against its checksum first, which reads the whole file.
        known: a vocabulary that the model shares if it has the same words, which saves time and memory.

    Raises:
        AsrError: the file is missing, of another kind or version, cut short or damaged.
    """
    path = Path(path)
    version, header, begin = _read_header(path)
    try:
        return _mapped_model(path, version, header, begin, verify, known)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, RuntimeError, AttributeError) as error:
        raise AsrError(
            f"{path}: the header does not describe an n-gram model ({error}); build the file again."
        ) from error


def _mapped_model(
    path: Path, version: int, header: dict[str, Any], begin: int, verify: bool, known: Vocabulary | None
) -> NgramLM:
    mapped = np.memmap(path, dtype=np.uint8, mode="c")
    if len(mapped) != begin + header["num_bytes"]:
        raise AsrError(
            f"{path}: the file has {len(mapped)} bytes, but its header declares {begin + header['num_bytes']}; "
            "it is cut short, build or copy it again."
        )
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    room = len(mapped) * (_MOST_EXPANSION if version == COMPRESSED else 1)
    for name, (dtype, length, position, crc, *compressed_bytes) in header["arrays"].items():
        if dtype not in _DTYPES.get(name, ()) or not 0 <= length <= room or not 0 <= position <= len(mapped):
            raise ValueError(f"the array {name!r} is {dtype} of length {length} at {position}")
        num_bytes = compressed_bytes[0] if version == COMPRESSED else length * np.dtype(dtype).itemsize
        stored = mapped[begin + position : begin + position + num_bytes]
        if verify and _crc(stored) != crc:
            raise AsrError(f"{path}: the array {name!r} does not match its checksum; build or copy the file again.")
        arrays[name] = _decompressed(stored, dtype, length) if version == COMPRESSED else stored.view(dtype)
        room -= arrays[name].nbytes
    words = arrays.pop("words").tobytes().decode()
    if known is not None and "\n".join(known.ordinary) == words:
        vocabulary = known
    else:
        vocabulary = Vocabulary(words.split("\n") if words else [], name=str(path))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    slot = tensors.pop("slot", None)
    index = ArcIndex(slot, *header["index"]) if slot is not None else None
    model_arrays = NgramArrays(**tensors, index=index)
    _require_sound(model_arrays, len(vocabulary), header["order"])
    return NgramLM(vocabulary, model_arrays, header["order"], str(header["name"]))


# Models expand two- to fourfold. A small file from an attacker could otherwise fill the memory.
_MOST_EXPANSION = 100


def _compressed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array, compressed, (B,) uint8."""
    planes = array.view(np.uint8).reshape(-1, array.itemsize).T
    return np.frombuffer(zlib.compress(planes.tobytes(), 9), dtype=np.uint8)


def _decompressed(stored: np.ndarray[Any, Any], dtype: str, length: int) -> np.ndarray[Any, Any]:
    """The inverse of `_compressed`.

    Raises:
        ValueError: the bytes are not those of `length` values.
    """
    num_bytes = length * np.dtype(dtype).itemsize
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(stored.tobytes(), num_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"an array cannot be decompressed: {error}") from error
    if len(content) != num_bytes or not stream.eof:
        raise ValueError(f"an array expands to other than {num_bytes} bytes")
    planes = np.frombuffer(content, dtype=np.uint8).reshape(np.dtype(dtype).itemsize, length)
    return planes.T.copy(order="C").reshape(-1).view(dtype)


_INTEGERS = ("int16", "int32", "int64")
_DTYPES = {
    "arc_begin": _INTEGERS,
    "label": ("int16", "int32"),
    "score": ("float32", "uint8"),
    "dst_state": _INTEGERS,
    "backoff_state": _INTEGERS,
    "backoff_score": ("float32",),
    "word_map": ("int64",),
    "score_level": ("float32",),
    "words": ("uint8",),
    "slot": ("int64",),
}
_MAX_ORDER = 64


def _require_sound(arrays: NgramArrays, num_words: int, order: int) -> None:
    """Rejects arrays with which a look-up would leave the arrays or never end: a checksum can be forged.

    Raises:
        ValueError: sizes do not fit, an index is out of range, backing off does not end, or a score is not a number.
    """
    num_states, num_arcs = len(arrays.backoff_state), len(arrays.label)
    label = arrays.label.to(torch.int64) + (1 << 15 if arrays.label.dtype == torch.int16 else 0)
    begin = arrays.arc_begin.to(torch.int64)
    sizes = [
        len(begin) == num_states + 1,
        len(arrays.score) == len(arrays.dst_state) == num_arcs,
        len(arrays.backoff_score) == num_states > 0,
        len(arrays.word_map) == num_words <= num_arcs,
        len(arrays.score_level) == (256 if arrays.score.dtype == torch.uint8 else 0),
    ]
    if not all(sizes) or type(order) is not int or not 1 <= order <= _MAX_ORDER:
        raise ValueError("the sizes of its arrays do not fit")
    rises = int(begin[0]) == 0 and int(begin[-1]) == num_arcs and bool((begin[1:] >= begin[:-1]).all())
    ranges = ((label, num_words), (arrays.dst_state, num_states), (arrays.word_map, num_words))
    if not rises or int(begin[1]) != num_words or not all(_lies_in(*each) for each in ranges):
        raise ValueError("an index is out of range")
    state = backoff = arrays.backoff_state.to(torch.int64)
    if not _lies_in(backoff, num_states):
        raise ValueError("a backoff state is out of range")
    for _ in range(order):
        state = backoff[state]
    if bool(state.any()):
        raise ValueError("backing off does not end")
    scores = [arrays.backoff_score, arrays.score_level] + [arrays.score] * arrays.score.is_floating_point()
    if any(bool(torch.isnan(values).any() or (values == torch.inf).any()) for values in scores):
        raise ValueError("a score is not a number")
    if arrays.index is not None:
        _require_sound_index(arrays.index, num_arcs, num_words)


def _require_sound_index(index: ArcIndex, num_arcs: int, num_words: int) -> None:
    numbers = (index.num_homes, index.word_bits, index.key_bits)
    if any(type(number) is not int for number in numbers) or not 1 <= index.num_homes <= len(index.slot) - 8:
        raise ValueError("the size of the hash index does not fit")
    if not 0 <= index.word_bits <= index.key_bits <= 63 or num_words > 1 << index.word_bits:
        raise ValueError("the key size of the hash index does not fit")
    used = index.slot[index.slot != -1]
    if bool((index.slot[-8:] != -1).any()) or not _lies_in(used & 0xFFFFFFFF, num_arcs):
        raise ValueError("the hash index points outside the arrays")


def _lies_in(values: torch.Tensor, end: int) -> bool:
    return not len(values) or 0 <= int(values.min()) <= int(values.max()) < end


def read_ngram_lm(path: str | Path) -> NgramLM:
    """Reads a model from its binary file, or from ARPA text (plain, gz, xz).

    Raises:
        AsrError: the file is missing, damaged or of another kind.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:
            is_binary = stream.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise AsrError(f"{path}: the n-gram model cannot be read ({error.strerror}).") from error
    return load_ngram_lm(path) if is_binary else NgramLM.from_arpa(path)


def _read_header(path: Path) -> tuple[int, dict[str, Any], int]:
    """The version, the header and where the arrays begin."""
    try:
        with path.open("rb") as stream:
            prefix = stream.read(_PREFIX.size)
            if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
                raise AsrError(f"{path}: this is not an n-gram model file; make one with 'asr lm ngram --binary'.")
            _, version, length, crc = _PREFIX.unpack(prefix)
            if version not in VERSIONS:
                raise AsrError(
                    f"{path}: the file has version {version}, this program reads versions up to {VERSIONS[-1]}; "
                    "build it again with 'asr lm ngram --binary'."
                )
            text = stream.read(min(length, path.stat().st_size))
    except OSError as error:
        raise AsrError(f"{path}: the n-gram model cannot be read ({error.strerror}).") from error
    if len(text) != length or zlib.crc32(text) != crc:
        raise AsrError(f"{path}: the header is cut short or damaged; build or copy the file again.")
    try:
        header = parse_json(text)
    except ValueError as error:
        raise AsrError(f"{path}: the header is not valid JSON ({error}); build the file again.") from error
    if not isinstance(header, dict) or type(header.get("num_bytes")) is not int:
        raise AsrError(f"{path}: the header does not describe arrays; build the file again.")
    return version, header, _aligned(_PREFIX.size + length)


def _write(stream: BinaryIO, version: int, header: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    text = json.dumps(header).encode()
    stream.write(_PREFIX.pack(MAGIC, version, len(text), zlib.crc32(text)))
    stream.write(text)
    begin = _aligned(stream.tell())
    for name, (_, _, position, *_) in header["arrays"].items():
        stream.write(bytes(begin + position - stream.tell()))
        stream.write(memoryview(arrays[name]))  # type: ignore[arg-type]


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _crc(array: np.ndarray[Any, Any]) -> int:
    """CRC-32 of an array's bytes."""
    data = array.view(np.uint8)
    crc = 0
    for begin in range(0, len(data), _CRC_BLOCK):
        crc = zlib.crc32(memoryview(data[begin : begin + _CRC_BLOCK]), crc)  # type: ignore[arg-type]
    return crc
