"""Downloads bundles by https or from the Hugging Face Hub, verifies them, and caches them in a folder.

A remote bundle has the layout of a local one: `bundle.json` lists the files next to it, with sizes and SHA-256. An
interrupted transfer resumes where it stopped, even in another process. A complete bundle needs no network.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asr.errors import AsrError
from asr.locks import lock
from asr.serialization import open_atomic, read_description, require_intact

Progress = Callable[[int, int], None]
"""Called with the number of bytes fetched so far, and the number of bytes of all files."""

KNOWN_BUNDLES = ("an4", "librispeech")
"""The project's own bundles. Where they are published is up to `ASR_BUNDLES`, the address of the folder with them."""

MANIFEST, CARD = "bundle.json", "card.md"
"""Files of a bundle: its description, and its card."""

_SOURCE = "source.json"
_HUB = "https://huggingface.co"
_REPOSITORY = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
_TIMEOUT_SECONDS = 30.0
_BLOCK_BYTES = 1 << 20
_MAX_TEXT_BYTES = 1 << 26
# Consecutive attempts without a single new byte before giving up, and the wait after the first one, which then doubles.
_MAX_ATTEMPTS = 5
_FIRST_WAIT_SECONDS = 0.5
_WORTH_ANOTHER_TRY = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Source:
    """Where a bundle is fetched from.

    Args:
        name: as the user gave it.
        address: URL of the folder that holds `bundle.json`, without a trailing slash.
        token: for the Hugging Face Hub; sent to its host only, never to a host that it redirects to.
    """

    name: str
    address: str
    token: str = ""


def user_cache() -> Path:
    """The user's cache folder.

    Raises:
        AsrError: the user has no home folder, as in some containers.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base)
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:
        raise AsrError(
            "this user has no home folder; set the environment variable XDG_CACHE_HOME to a folder for caches, or "
            "ASR_CACHE to one for fetched bundles and compiled graphs."
        ) from error


def cache_folder() -> Path:
    """The folder of fetched bundles and compiled graphs: ASR_CACHE, or else `asr` in the user's cache folder.

    Raises:
        AsrError: as for `user_cache`.
    """
    own = os.environ.get("ASR_CACHE")
    return Path(own) if own else user_cache() / "asr"


def source_of(name: str) -> Source | None:
    """The source that a name stands for: `https://...`, `hf:owner/name[@revision]`, or one of `KNOWN_BUNDLES`.

    Returns:
        None if the name is something else, such as a folder, or if it is a known bundle but ASR_BUNDLES is not set.

    Raises:
        AsrError: the address is malformed or its scheme is not allowed.
    """
    if name.startswith("hf:"):
        match = _REPOSITORY.fullmatch(name)
        if match is None:
            raise AsrError(
                f"{name}: a repository of the Hugging Face Hub is written hf:owner/name or hf:owner/name@tag."
            )
        hub = _checked(os.environ.get("HF_ENDPOINT", _HUB))
        token = os.environ.get("HF_TOKEN", "")
        return Source(name, f"{hub}/{match[1]}/resolve/{match[2] or 'main'}", token)
    if "://" in name:
        return Source(name, _checked(name).removesuffix(f"/{MANIFEST}"))
    published = os.environ.get("ASR_BUNDLES", "")
    if name in KNOWN_BUNDLES and published:
        return Source(name, f"{_checked(published)}/{name}")
    return None


def _checked(address: str) -> str:
    parts = urllib.parse.urlsplit(address)
    is_local = parts.hostname in _LOCAL_HOSTS
    if parts.scheme not in ("http", "https") or not parts.hostname or (parts.scheme == "http" and not is_local):
        raise AsrError(f"{address}: bundles are fetched by https; give https://... or hf:owner/name.")
    if parts.query or parts.fragment:
        raise AsrError(f"{address}: give the address of the bundle's folder, without '?' and '#'.")
    return address.rstrip("/")


def cached_folder(source: Source) -> Path | None:
    """The folder of a bundle if it has been fetched completely, else None."""
    folder = _folder_of(source)
    return folder if (folder / _SOURCE).is_file() else None


def cached_bundles() -> list[tuple[str, Path]]:
    """Name and folder of each completely fetched bundle, sorted by name."""
    found = list[tuple[str, Path]]()
    try:
        folder = cache_folder()
    except AsrError:  # nothing can have been fetched
        return found
    for path in (folder / "bundles").glob(f"*/{_SOURCE}"):
        found.append((str(read_description(path, "cache")["name"]), path.parent))
    return sorted(found)


def fetch(source: Source, refresh: bool = False, on_progress: Progress | None = None) -> Path:
    """Fetches a bundle into the cache unless it is there already.

    Args:
        source: where to fetch it from.
        refresh: compare with the source and fetch what has changed; otherwise a complete bundle is used as it is.
        on_progress: called after each block.

    Returns:
        The bundle's folder.

    Raises:
        AsrError: there is no network or no bundle at the address, a transfer keeps breaking off, or a file does not
            match its checksum.
    """
    folder = _folder_of(source)
    if not refresh and cached_folder(source) is not None:
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AsrError(f"{folder}: the cache cannot be written ({error.strerror}); set ASR_CACHE.") from error
    with (folder / ".lock").open("w") as file:
        lock(file)  # so that only one process fetches at a time
        if refresh or cached_folder(source) is None:  # another process may have fetched it meanwhile
            _fetch(source, folder, on_progress)
    return folder


def _folder_of(source: Source) -> Path:
    last = re.sub(r"[^\w.-]", "_", source.name.rstrip("/").rsplit("/", 1)[-1])
    return cache_folder() / "bundles" / f"{last}-{hashlib.sha256(source.address.encode()).hexdigest()[:12]}"


def _fetch(source: Source, folder: Path, on_progress: Progress | None) -> None:
    manifest = _small_file(source, MANIFEST)
    if manifest is None:
        raise AsrError(f"{source.name}: there is no bundle at {source.address} ({MANIFEST} is missing there).")
    # The name stays `.part` until all files are there, because a folder with a bundle.json counts as a bundle.
    description = folder / f"{MANIFEST}.part"
    _write(description, manifest)
    files = _files_of(read_description(description, "bundle"), source)
    total, here = sum(entry["num_bytes"] for entry in files.values()), 0

    def report(num_bytes: int) -> None:
        if on_progress is not None:
            on_progress(here + num_bytes, total)

    ready: dict[Path, Path] = {}
    for name, entry in files.items():
        ready[folder / name] = _fetched_file(source, folder / name, entry, report)
        here += entry["num_bytes"]
    card = _small_file(source, CARD)
    if card is not None:
        _write(folder / CARD, card)
    # An earlier version stays usable until the new one has arrived completely.
    (folder / _SOURCE).unlink(missing_ok=True)
    for path, file in ready.items():
        file.replace(path)
    description.replace(folder / MANIFEST)
    _write(folder / _SOURCE, json.dumps({"name": source.name, "address": source.address}).encode())


def _files_of(manifest: dict[str, Any], source: Source) -> dict[str, dict[str, Any]]:
    """The files that a bundle lists. Their names are checked so that nothing is written outside its folder."""
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise AsrError(f"{source.name}: {source.address} is not a bundle: it does not list its files.")
    for name, entry in files.items():
        is_plain = re.fullmatch(r"\w[\w.-]*", name) is not None and name not in (MANIFEST, _SOURCE)
        is_described = (
            isinstance(entry, dict)
            and isinstance(entry.get("num_bytes"), int)
            and entry["num_bytes"] >= 0
            and re.fullmatch(r"[0-9a-f]{64}", str(entry.get("sha256"))) is not None
        )
        if not is_plain or not is_described:
            raise AsrError(
                f"{source.name}: the bundle's entry for the file {name!r} is not safe to fetch (bad name, size or "
                "checksum)."
            )
    return files


def _fetched_file(source: Source, path: Path, entry: dict[str, Any], report: Callable[[int], None]) -> Path:
    """Fetches one file, resuming an earlier attempt -> `path` if that is intact, else a `.part` file beside it."""
    if _is_intact(path, entry):
        return path
    partial, size = path.with_name(f"{path.name}.{entry['sha256'][:16]}.part"), entry["num_bytes"]
    wait, failures, reason = _FIRST_WAIT_SECONDS, 0, "it ended early"
    while (begin := partial.stat().st_size if partial.is_file() else 0) != size:
        if begin > size:
            partial.unlink()
            begin, reason = 0, "more bytes arrived than the file has"
        if failures >= _MAX_ATTEMPTS:
            raise AsrError(
                f"{source.address}/{path.name}: the transfer broke off after {begin} of {size} bytes ({reason}); run "
                "the same command again to resume."
            )
        try:
            _append(_open(source, path.name, begin), partial, begin, size, report)
            reason = "it ended early"
        except urllib.error.HTTPError as error:
            reason = f"the server returned {error.code} {_quoted(str(error.reason))}"
            if error.code not in _WORTH_ANOTHER_TRY:
                raise AsrError(f"{source.address}/{path.name}: it cannot be fetched ({reason}).") from error
        except (OSError, http.client.HTTPException) as error:
            reason = _reason(error)
        if begin < (partial.stat().st_size if partial.is_file() else 0) <= size:
            wait, failures = _FIRST_WAIT_SECONDS, 0
        else:
            failures += 1
            if failures < _MAX_ATTEMPTS:
                time.sleep(wait)
                wait *= 2
    if not size:
        partial.touch()
    if not _is_intact(partial, entry):
        partial.unlink()
        raise AsrError(
            f"{source.address}/{path.name}: the file that arrived does not match the bundle (its checksum differs); "
            "fetch it again."
        )
    return partial


def _is_intact(path: Path, entry: dict[str, Any]) -> bool:
    try:
        require_intact(path, entry, "bundle")
    except AsrError:
        return False
    return True


def _append(answer: Any, partial: Path, begin: int, size: int, report: Callable[[int], None]) -> None:
    """Appends the missing bytes, as many as arrive. If the server ignores the range, the file is written from 0."""
    with answer as response:
        goes_on = begin > 0 and response.status == 206
        if goes_on and not str(response.headers.get("Content-Range", "")).startswith(f"bytes {begin}-"):
            raise http.client.HTTPException("the server sent a different range than requested")
        position = begin if goes_on else 0
        try:
            stream = partial.open("ab" if goes_on else "wb")
        except OSError as error:
            raise AsrError(f"{partial}: it cannot be written ({error.strerror}); make room.") from error
        with stream:
            while position <= size and (block := response.read(_BLOCK_BYTES)):
                try:
                    stream.write(block)
                except OSError as error:
                    raise AsrError(f"{partial}: it cannot be written ({error.strerror}); make room.") from error
                position += len(block)
                report(position)


def _open(source: Source, name: str, begin: int = 0) -> Any:
    request = urllib.request.Request(f"{source.address}/{urllib.parse.quote(name)}")
    request.add_header("User-Agent", "onepass-asr")
    if source.token:
        request.add_unredirected_header("Authorization", f"Bearer {source.token}")
    if begin:
        request.add_header("Range", f"bytes={begin}-")
    return urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)


def _small_file(source: Source, name: str) -> bytes | None:
    """A file's content; None if there is no such file."""
    wait = _FIRST_WAIT_SECONDS
    for attempt in range(_MAX_ATTEMPTS):
        try:
            with _open(source, name) as response:
                content: bytes = response.read(_MAX_TEXT_BYTES + 1)
            if len(content) > _MAX_TEXT_BYTES:
                raise AsrError(
                    f"{source.address}/{name}: the file is far too large to be a bundle's {name}; check the address."
                )
            announced = str(response.headers.get("Content-Length", len(content))).strip()
            if announced == str(len(content)):
                return content
            reason = "it ended early"
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            reason = f"the server returned {error.code} {_quoted(str(error.reason))}"
            if error.code not in _WORTH_ANOTHER_TRY:
                raise AsrError(f"{source.address}/{name}: it cannot be fetched ({reason}).") from error
        except (OSError, http.client.HTTPException) as error:
            reason = _reason(error)
            if isinstance(error, urllib.error.URLError):  # no connection at all
                break
        if attempt + 1 < _MAX_ATTEMPTS:
            time.sleep(wait)
            wait *= 2
    raise AsrError(
        f"{source.name}: it cannot be fetched from {source.address} ({reason}); is there a network? A local folder "
        "and a bundle that was fetched before need none."
    )


def _reason(error: BaseException) -> str:
    cause = getattr(error, "reason", None) or error
    return _quoted(str(getattr(cause, "strerror", None) or cause) or type(cause).__name__)


def _quoted(text: str) -> str:
    """A server's message as one printable line of limited length."""
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return line if len(line) <= 100 else f"{line[:100]} ..."


def _write(path: Path, content: bytes) -> None:
    with open_atomic(path) as file:
        file.write(content)
