"""Files: networks from a fixed registry of classes, weights, checksums, atomic writes, and Lightning checkpoints.

Files refer to classes by their names in the registry and never hold pickled objects. Reading a checkpoint runs no code
from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import importlib
import json
import math
import os
import pickle
import secrets
import shutil
import stat
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asr.errors import AsrError
from asr.kernels.byte_products import rounded_rows
from asr.text.documents import parse_json
from asr.text.symbols import Vocabulary
from asr.torch_archive import DTYPES, load_tensors

# The only class names permitted in files -> module, class and, if its constructor takes one, configuration class.
FEATURE_CLASSES = {"Fbank": ("asr.audio.fbank", "Fbank"), "Samples": ("asr.models.external.network", "Samples")}
ACOUSTIC_MODEL_CLASSES = {
    "ChainDnn": ("asr.models.feedforward", "ChainFeedForwardNetwork"),
    "Conformer": ("asr.models.conformer", "Conformer"),
    "Ensemble": ("asr.models.tdnnf", "Ensemble"),
    "External": ("asr.models.external.network", "ExternalNetwork"),
    "SplicedDnn": ("asr.models.feedforward", "FeedForwardNetwork"),
    "Tdnnf": ("asr.models.tdnnf", "Tdnnf"),
}
LANGUAGE_MODEL_CLASSES = {"RnnLm": ("asr.lm.rnn.model", "RNNLanguageModel", "RNNLMConfig")}


def registered_name(class_path: str, classes: Mapping[str, tuple[str, ...]]) -> str:
    """The registered name of a class path from a recipe; the last part of the path if it is not registered."""
    class_name = class_path.rsplit(".", 1)[-1]
    return next((name for name, (_, known, *_) in classes.items() if known == class_name), class_name)


@dataclass
class ModelSpec:
    """A network, and the description from which it can be rebuilt.

    Args:
        class_name: its name in the registry.
        arguments: constructor arguments, JSON values only.
        network: the network.
    """

    class_name: str
    arguments: dict[str, Any]
    network: nn.Module = field(repr=False)


class OwnFormat(ABC):
    """A network that is not stored as safetensors, but in a file of another format or by its name alone."""

    @property
    @abstractmethod
    def file_suffix(self) -> str | None:
        """The suffix of its file, such as `.onnx`; None for no file."""

    @abstractmethod
    def load_file(self, path: Path | None) -> None:
        """Loads the network from the file, or by its name if `path` is None.

        Raises:
            AsrError: it cannot be loaded, or does not match the description.
        """

    @abstractmethod
    def save_file(self, path: Path | None) -> None:
        """Writes the file, if it has one.

        Raises:
            AsrError: it cannot be stored.
        """


_INITIAL = nn.init.constant_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_normal_, nn.init.kaiming_uniform_

# A small file from an attacker could otherwise fill the memory. Weights of n-gram features may take one bit in a file,
# and each weight counts about twice: when it is allocated, and when it is initialized.
_NUMBERS_PER_BYTE = 16
_ROOM, _NUMBERS_PER_CALL = 1 << 24, 1000


class _LoadedNext(TorchFunctionMode):
    """Within the block, a network is built whose weights are then loaded from a file.

    Functions of `nn.init` leave tensors as they are instead of filling them. `ValueError` is raised if the tensors are
    too large for the file.
    """

    def __init__(self, weights: Path) -> None:
        super().__init__()
        self._room = _ROOM + (_NUMBERS_PER_BYTE * weights.stat().st_size if weights.is_file() else 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        found = named["tensor"] if func in _INITIAL else func(*args, **named)
        self._room -= _NUMBERS_PER_CALL + (found.numel() if isinstance(found, Tensor) else 0)
        if self._room < 0:
            raise ValueError("the network would be too large for the file of its weights")
        return found


def build_network(
    class_name: str,
    arguments: dict[str, Any],
    classes: Mapping[str, tuple[str, ...]],
    where: str,
    vocabulary: Vocabulary | None = None,
    weights: Path | None = None,
) -> ModelSpec:
    """Builds a network of the registry.

    Args:
        class_name: a key of `classes`.
        arguments: of its constructor, or of its configuration class if the registry has one.
        classes: the permitted part of the registry.
        where: the file with these values, for error messages.
        vocabulary: the words of a language model.
        weights: the file from which the weights are loaded next; None to draw them at random, as the constructor does,
            which would take time, and change torch's random numbers.

    Raises:
        AsrError: the class is not in the registry, it does not accept the arguments, or the network would be too large
            for the file of its weights.
    """
    if not isinstance(class_name, str) or class_name not in classes:
        raise AsrError(
            f"{where}: the class {class_name!r} is not one that files may name ({', '.join(classes)}); use one of "
            "these, or register your own first."
        )
    module_name, *names = classes[class_name]
    network_class, *config_class = (getattr(importlib.import_module(module_name), name) for name in names)
    try:
        with contextlib.nullcontext() if weights is None else _LoadedNext(weights):
            network = (
                network_class(vocabulary, config_class[0](**arguments)) if config_class else network_class(**arguments)
            )
    except AsrError as error:
        raise AsrError(f"{where}: {error}") from error
    except (TypeError, ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise AsrError(f"{where}: {class_name} does not take the arguments given there ({reason}).") from error
    if torch.get_default_dtype() != torch.float32:
        network.float()
    return ModelSpec(class_name, arguments, network.eval())


_STEP = ".step"


def save_weights(network: nn.Module, path: Path, half_precision: bool, byte_matrices: bool = False) -> None:
    """Writes a state dict as safetensors; tied weights are stored once.

    Args:
        network: the network.
        path: the file.
        half_precision: store float32 as float16.
        byte_matrices: store the matrices of linear layers and embeddings (O, I) as int8, with the step of each row (O,)
            float32.

    Raises:
        AsrError: a weight is beyond the range of float16.
    """
    matrices = {
        f"{name}.weight".lstrip(".")
        for name, module in network.named_modules()
        # The step of a row with one number would take more than the byte saves.
        if byte_matrices and isinstance(module, nn.Linear | nn.Embedding) and module.weight.shape[1] > 1
    }
    state: dict[str, Tensor] = {}
    stored: set[int] = set()
    for name, tensor in network.state_dict().items():
        if tensor.numel() and tensor.data_ptr() in stored:
            continue
        stored.add(tensor.data_ptr())
        if name in matrices:
            state[name + _STEP], rounded = rounded_rows(tensor.detach().cpu().float())
            state[name] = rounded.char().contiguous()
            continue
        plain = tensor.detach().cpu()
        halved = half_precision and tensor.dtype == torch.float32
        state[name] = plain.to(torch.float16 if halved else tensor.dtype).contiguous()
        if halved and bool((state[name].isinf() & plain.isfinite()).any()):
            raise AsrError(
                f"{path.name}: some of the weights {name!r} are beyond the range of float16 (65504); store float32 "
                "(--float32 of 'asr lm rnn export', --full-precision of 'asr bundle')."
            )
    path.write_bytes(save(state))  # not `save_file`, whose files only their owner can read


def load_weights(network: nn.Module, path: Path) -> None:
    """Loads a file of `save_weights`; weights are converted to the network's precision.

    Raises:
        AsrError: the file cannot be read, has weights that are not finite, or does not match the network.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            state = read_tensors(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise AsrError(f"{path}: the weights cannot be read ({error}); fetch the file again.") from error
    parts = network.named_modules(remove_duplicate=False)
    weights = {f"{of}.{name}".lstrip("."): each for of, part in parts for name, each in _tensors(part)}
    for name in [name for name in state if name.endswith(_STEP)]:
        matrix = name.removesuffix(_STEP)
        step, rounded, place = state.pop(name), state.get(matrix), weights.get(matrix)
        if rounded is None or rounded.dim() != 2 or step.shape != rounded.shape[:1]:
            raise _misfit(path, f"{name!r} has no matrix with a row for each step")
        if place is not None and place.dtype == torch.float32 and place.shape == rounded.shape:
            # In place: other matrices of this size would take time and memory.
            state[matrix] = place.detach().copy_(rounded).mul_(step[:, None])
        else:
            state[matrix] = rounded.float() * step[:, None]
    require_finite(state, path)
    try:
        missing, unexpected = network.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise _misfit(path, str(error).strip().splitlines()[-1].strip()) from error
    # Tied weights are stored once; loading one name has filled the other. (`state_dict` would copy the largest ones.)
    filled = {weights[name].data_ptr() for name in state if name in weights}
    missing = [name for name in missing if name not in weights or weights[name].data_ptr() not in filled]
    if missing or unexpected:
        raise _misfit(path, f"missing: {missing[:3]}, unexpected: {unexpected[:3]}")


def read_tensors(file: Any) -> dict[str, Tensor]:
    """The tensors of a safetensors file that `safe_open` has opened for torch.

    Raises:
        ValueError: a tensor is of a type that this program does not write.
    """
    try:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except AttributeError as error:  # torch 1.13 lacks some of these types
        raise ValueError(str(error)) from error
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise ValueError(f"{name!r} is of type {tensor.dtype}")
    return tensors


def load_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file of `np.savez`. Of a damaged file, it may raise any exception.

    Raises:
        ValueError: the arrays are larger than the file, so that a small one could fill the memory.
    """
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise ValueError("it expands to more than its size, which files of this program do not")
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module itself, without those of its parts."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def require_finite(state: dict[str, Tensor], path: Path) -> None:
    """Checks that all weights are finite.

    Raises:
        AsrError: a weight is infinite or NaN.
    """
    for name, tensor in state.items():
        # Networks have float32, in which larger numbers would be infinite.
        numbers = tensor.float() if tensor.dtype == torch.float64 else tensor
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # Both are NaN if any weight is. This takes a tenth of the time of `isfinite`.
        if not (math.isfinite(numbers.min()) and math.isfinite(numbers.max())):
            raise AsrError(
                f"{path}: the weights {name!r} are not all finite numbers: the training diverged (take an earlier "
                "checkpoint), or the file is damaged (fetch it again)."
            )


def _misfit(path: Path, reason: str) -> AsrError:
    return AsrError(f"{path}: the weights do not fit the network that its description builds ({reason}).")


_Class = TypeVar("_Class", bound=type)


def copied_to_processes(kind: _Class) -> _Class:
    """A decorator for classes: another process that is given an object gets a copy of its tensors.

    When torch sends a tensor to another process, it moves the numbers to shared memory and frees the memory where they
    were. Arrays of the tensor, which compiled loops hold, would then be of freed memory.
    """
    ForkingPickler.register(kind, _pickled_as_bytes)
    return kind


def _pickled_as_bytes(value: Any) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    return pickle.loads, (pickle.dumps(value, pickle.HIGHEST_PROTOCOL),)


def checksums(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """File name -> size and checksum."""
    return {
        name: {"num_bytes": (folder / name).stat().st_size, "sha256": sha256_of_file(folder / name)} for name in names
    }


def require_intact(path: Path, expected: dict[str, Any] | None, what: str) -> None:
    """Checks a file against its entry of `checksums`.

    Args:
        path: the file.
        expected: its entry, or None if there is none.
        what: what the file belongs to, such as `bundle`, for error messages.

    Raises:
        AsrError: the file is missing, or its size or checksum differs.
    """
    if not isinstance(expected, dict):
        raise AsrError(f"{path}: the {what} has no checksum for this file; fetch the {what} again.")
    if not path.is_file():
        raise AsrError(f"{path}: the {what} names this file, but it is missing; fetch the {what} again.")
    num_bytes = path.stat().st_size
    if num_bytes != expected.get("num_bytes"):
        raise AsrError(
            f"{path}: the file has {num_bytes} bytes where the {what} names {expected.get('num_bytes')}; "
            "the download was cut short, or it is a Git LFS pointer: fetch it again."
        )
    if sha256_of_file(path) != expected.get("sha256"):
        raise AsrError(
            f"{path}: the checksum is not the one that the {what} names; the file is damaged, fetch it again."
        )


def sealed(description: dict[str, Any]) -> dict[str, Any]:
    """Adds a checksum to a JSON object, for `read_description` to verify."""
    return {**description, _SEAL: fingerprint_of_description(description)}


def read_description(path: Path, what: str) -> dict[str, Any]:
    """Reads a JSON object; its checksum, if any, is verified and removed.

    Raises:
        AsrError: the file is missing, damaged, or not a JSON object.
    """
    try:
        if path.stat().st_size > _MAX_DESCRIPTION_BYTES:
            raise ValueError("it is larger than any description")
        description = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AsrError(f"{path}: the {what}'s description cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise AsrError(f"{path}: the {what}'s description is damaged ({error}); fetch the {what} again.") from error
    if not isinstance(description, dict):
        raise AsrError(f"{path}: the {what}'s description is not a JSON object; fetch the {what} again.")
    seal = description.pop(_SEAL, None)
    if seal is not None and seal != fingerprint_of_description(description):
        raise AsrError(
            f"{path}: the checksum of the {what}'s description does not match: the file is damaged, or was edited; "
            f"if you edited it, delete its field {_SEAL!r}."
        )
    return description


_SEAL = "checksum"
_MAX_DESCRIPTION_BYTES = 1 << 26


def fingerprint_of_description(description: dict[str, Any]) -> str:
    """SHA-256 of a JSON object, independent of the order of its fields."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def fingerprint_of(path: Path) -> str:
    """SHA-256 of a file, or of the files directly in a folder; empty if one cannot be read."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    try:
        digests = [sha256_of_file(file) for file in files]
    except OSError:
        return ""
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def checksum_of_tensors(header: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text and of tensors with names, types and shapes, independent of the order of tensors."""
    digest = hashlib.sha256(header.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def sha256_of_file(path: Path, num_bytes: float = math.inf) -> str:
    """SHA-256 of a file, or of its first `num_bytes`."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(int(min(num_bytes, 1 << 20))):
            digest.update(block)
            num_bytes -= len(block)
    return digest.hexdigest()


_BUFFER_BYTES = 1 << 20


def _unique_name() -> str:
    """A name that no other thread uses, nor a process of another container that shares the folder."""
    return secrets.token_hex(8)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path, which is renamed to `path` if the block succeeds and deleted if not.

    Links are followed. Devices and pipes are written to directly.

    Raises:
        AsrError: the file cannot be written, for instance because the disk is full.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file() and not target.is_dir():
        partial = target
    else:
        # The suffix is kept because some libraries depend on it.
        partial = target.with_name(f".{_unique_name()}.{target.name}")
    try:
        yield partial
        if partial != target:
            partial.replace(target)
    except OSError as error:
        raise AsrError(f"{path}: the file cannot be written ({_reason(error)}); {cure_of(error)}.") from error
    finally:
        if partial != target:
            with contextlib.suppress(OSError):  # the error of the block says more
                partial.unlink()


def write_whole_text(path: str | Path, text: str) -> None:
    """Writes a text file atomically, in UTF-8; lone surrogates, which JSON may contain, become escape codes.

    Raises:
        AsrError: as for `atomic_path`.
    """
    with atomic_path(Path(path)) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, which replaces `folder` if the block succeeds and is deleted if not.

    Entries of an existing folder that are not in the new one are kept.

    Raises:
        AsrError: the folder cannot be written, for instance because the disk is full.
    """
    target = Path(os.path.realpath(folder))
    unique = _unique_name()
    partial, earlier = (target.with_name(f".{unique}.{kind}.{target.name}") for kind in ("new", "old"))
    try:
        if target.exists() and not target.is_dir():
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        for file in partial.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        if not target.exists():
            partial.rename(target)
            return
        for entry in target.iterdir():
            if not os.path.lexists(partial / entry.name):
                _copy(entry, partial / entry.name)
        if _exchange(partial, target):
            return  # `partial` is the former folder now, and is deleted below
        target.rename(earlier)
        try:
            partial.rename(target)
        except OSError:
            earlier.rename(target)
            raise
        shutil.rmtree(earlier, ignore_errors=True)
    except OSError as error:
        raise AsrError(f"{folder}: the folder cannot be written ({_reason(error)}); {cure_of(error)}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy(entry: Path, place: Path) -> None:
    """Hard-links a file if the file system supports it, else copies it; folders are copied."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.copytree(entry, place, symlinks=True)
        return
    try:
        os.link(entry, place, follow_symlinks=False)
    except (OSError, NotImplementedError):
        shutil.copy2(entry, place, follow_symlinks=False)


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(one: Path, other: Path) -> bool:
    """Atomically exchanges the names of two folders -> whether the system supports it."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False  # not Linux, or an old C library
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def output_path(name: str) -> Path:
    """The path of an output that cannot go to standard output: the type of an argument of a command.

    Raises:
        AsrError: the name is `-`, by which users mean standard output.
    """
    if name == "-":
        raise AsrError("-: this output cannot go to standard output; name a file or folder, or ./- for that name.")
    return Path(name)


def require_writable(*paths: Path, inputs: Iterable[str | Path | None] = ()) -> None:
    """Checks, before long work, that outputs can be written and do not overwrite inputs.

    Args:
        paths: outputs.
        inputs: files that the same command reads, and folders with such files; None entries are skipped.

    Raises:
        AsrError: the folder of a path is missing or not writable, a path is a folder, two paths are the same, or a path
            is an input, possibly through links.
    """
    # There may be a hundred thousand inputs; they are only looked at if an output exists already.
    existing = {_identity(path) for path in paths if path.is_file()}
    read: dict[tuple[int, int], str | Path] = {}
    for name in inputs if existing else ():
        for found, file in () if name is None else _files_of(name):
            if found in existing:
                read[found] = file
    seen: set[str] = set()
    for path in paths:
        if path.is_file() and _identity(path) in read:
            raise AsrError(
                f"{path}: this is an input of the same command ({read[_identity(path)]}), which the output would "
                "overwrite; name another file for the output."
            )
        folder = path.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise AsrError(f"{path}: the folder {folder} is not there or not writable; make it first.")
        if path.is_dir():
            raise AsrError(f"{path}: this is a folder; name a file in it.")
        if os.path.realpath(path) in seen:
            raise AsrError(f"{path}: two results would go to this file; name another one for one of them.")
        seen.add(os.path.realpath(path))


def _files_of(name: str | Path) -> Iterator[tuple[tuple[int, int], str | Path]]:
    """Yields a file, or all files below a folder, each after its identity; skips what cannot be read."""
    try:
        status = os.stat(name)  # noqa: PTH116
    except OSError:
        return
    if not stat.S_ISDIR(status.st_mode):
        yield (status.st_dev, status.st_ino), name
        return
    for folder, _, files in os.walk(name):
        for file in files:
            with contextlib.suppress(OSError):
                yield _identity(Path(folder, file)), Path(folder, file)


def _identity(path: str | Path) -> tuple[int, int]:
    """Device and inode, the same for all names of a file, including symbolic and hard links."""
    status = os.stat(path)  # noqa: PTH116
    return status.st_dev, status.st_ino


def _reason(error: OSError) -> str:
    """What the system says; where numpy writes an array to a full disk, what numpy says."""
    return str(error.strerror or error)


def cure_of(error: OSError) -> str:
    """What to do about an output that cannot be written."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "make its folder first"
    if error.errno == errno.EFBIG:
        return "raise the limit of the size of files (ulimit -f)"
    return (
        "name another one"
        if error.errno in (errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EROFS, errno.EBADF)
        else "make room and try again"
    )


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Opens a binary file for atomic writing: it gets its name when its content is complete and on disk.

    Raises:
        AsrError: as for `atomic_path`.
    """
    with atomic_path(path) as partial, partial.open("wb", buffering=_BUFFER_BYTES) as stream:
        yield stream
        stream.flush()
        if partial.is_file():
            os.fsync(stream.fileno())


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Loads a checkpoint to the CPU; it may hold only tensors, numbers, strings and containers of them.

    Raises:
        AsrError: the file is missing, damaged or not a checkpoint, or holds objects of other classes.
    """
    try:
        content = load_tensors(path)
    except (OSError, UnpicklingError) as error:
        shown = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = shown.strip().partition("\n")[0] or type(error).__name__
    else:
        if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
            return content
        reason = "it has no state_dict"
    raise AsrError(f"{path}: no Lightning checkpoint can be read there ({reason}).")
