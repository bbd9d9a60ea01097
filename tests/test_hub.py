"""torch.hub's entry points, and bundles that are fetched, also from a server that breaks off."""

from __future__ import annotations

import copy
import errno
import http.server
import json
import os
import pickle
import runpy
import shutil
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import asr
from asr import hub
from asr.bundle import Bundle, bundle_folder
from asr.cli.main import main
from asr.errors import AsrError
from asr.testing.tones import tones

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_torch_hub_loads_a_recognizer_from_the_checkout(tiny_bundle_folder):
    recognizer = torch.hub.load(
        str(CHECKOUT),
        "recognizer",
        source="local",
        bundle=str(tiny_bundle_folder),
        mode="ngram",
        decoder="token-passing",
    )
    assert isinstance(recognizer, torch.nn.Module)
    assert recognizer(tones(["PAT", "TWO"]), sampling_rate=16000)[0].text == "PAT TWO"


def test_torch_hub_lists_what_can_be_loaded_and_explains_it(tiny_bundle_folder):
    # `torch.hub.list` and `help` take repositories on GitHub only; this is what they do with one.
    entries = runpy.run_path(str(CHECKOUT / "hubconf.py"))
    names = [name for name, entry in entries.items() if callable(entry) and not name.startswith("_")]
    assert sorted(names) == ["acoustic_model", "language_model", "recognizer", "streaming_recognizer"]
    for name in names:
        assert "Args:" in entries[name].__doc__ and f'torch.hub.load(".", "{name}"' in entries[name].__doc__
    arguments = {"source": "local", "bundle": str(tiny_bundle_folder)}
    model = torch.hub.load(str(CHECKOUT), "acoustic_model", **arguments)
    waveform = tones(["PAT", "TWO"])
    log_prob, num_frames = model(waveform)
    (scored, scored_frames) = asr.load(tiny_bundle_folder).log_prob([waveform], asr.results.StageTimes())
    assert torch.equal(log_prob, scored) and torch.equal(num_frames, scored_frames)
    assert log_prob.shape == (1, int(num_frames), len(model.tokens))
    assert abs(len(waveform) / model.sampling_rate - int(num_frames) * model.frame_seconds) < 0.1
    language_model = torch.hub.load(str(CHECKOUT), "language_model", **arguments)
    assert {"PAT", "TWO"} <= set(language_model.vocabulary.words)
    streaming = torch.hub.load(str(CHECKOUT), "streaming_recognizer", **arguments, mode="ngram")
    assert isinstance(streaming, asr.StreamingRecognizer)
    for copy_of in (copy.copy, copy.deepcopy, pickle.dumps, ForkingPickler.dumps):
        with pytest.raises(AsrError, match="cannot be copied, pickled or sent to another process; send its Recogniz"):
            copy_of(streaming)


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder on the loopback interface, and breaks off.

    Attributes:
        break_after: bytes of an answer after which the connection is closed; None for whole answers.
        takes_ranges: whether an answer may begin in the middle of a file.
        requests: path and `Range` of each request.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.break_after: int | None = None
        self.takes_ranges = True
        self.requests: list[tuple[str, str | None]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range") if self.server.takes_ranges else None
        self.server.requests.append((self.path, self.headers.get("Range")))
        path = self.server.folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        begin = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        is_text = path.suffix in (".json", ".md")
        self.wfile.write(content[begin:] if is_text else content[begin:][: self.server.break_after])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tiny_bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    (tmp_path / "site").mkdir()
    shutil.copytree(tiny_bundle_folder, tmp_path / "site" / "tones")
    for name in ("ASR_BUNDLE", "ASR_BUNDLES", "HF_ENDPOINT", "HF_TOKEN", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ASR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_FIRST_WAIT_SECONDS", 0.001)
    with Server(tmp_path / "site") as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield running
        running.shutdown()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".json")
    }


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "ASR_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["bundle", "list"]) == 0
    assert main(["doctor", "--json"]) == 0
    capsys.readouterr()
    assert main(["bundle", "fetch", "hf:owner/name"]) == 2
    assert "error: this user has no home folder; set" in capsys.readouterr().err


def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(server: Server, tiny_bundle_folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in tiny_bundle_folder.iterdir()}
    largest = max(sizes, key=lambda name: sizes[name])
    server.break_after = sizes[largest] // 3 + 1
    told: list[tuple[int, int]] = []
    folder = bundle_folder(f"{server.address}/tones", on_progress=lambda done, total: told.append((done, total)))
    assert contents(folder).items() >= contents(tiny_bundle_folder).items()
    begins = [asked for path, asked in server.requests if path == f"/tones/{largest}"]
    assert begins == [None, f"bytes={server.break_after}-", f"bytes={2 * server.break_after}-"]
    assert (
        told[-1][0]
        == told[-1][1]
        == sum(size for name, size in sizes.items() if name not in ("bundle.json", "card.md"))
    )
    assert Bundle.load(folder).name == "tones"


def test_what_is_here_needs_no_server(server: Server) -> None:
    name = f"{server.address}/tones"
    folder = bundle_folder(name)
    asked = len(server.requests)
    assert bundle_folder(name) == folder and len(server.requests) == asked
    assert hub.cached_bundles() == [(name, folder)]


def test_a_cache_without_locks(server: Server, tiny_bundle_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))  # as on some network file systems

    monkeypatch.setattr("fcntl.flock", flock)
    folder = bundle_folder(f"{server.address}/tones")
    assert contents(folder).items() >= contents(tiny_bundle_folder).items()


def test_a_server_without_ranges_begins_anew(
    server: Server, tiny_bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.takes_ranges, server.break_after = False, 2000
    name = f"{server.address}/tones"
    waits: list[float] = []
    monkeypatch.setattr(hub, "time", SimpleNamespace(sleep=waits.append))
    with pytest.raises(AsrError, match=r"the transfer broke off after \d+ of \d+ bytes .* again to resume"):
        bundle_folder(name)
    assert waits == [0.001, 0.002, 0.004, 0.008]  # none after the last attempt
    assert hub.cached_bundles() == []
    server.break_after = None
    assert contents(bundle_folder(name)).items() >= contents(tiny_bundle_folder).items()


def test_another_process_goes_on_where_one_stopped(server: Server) -> None:
    source = hub.source_of(f"{server.address}/tones")
    assert source is not None
    name, entry = max(
        json.loads((server.folder / "tones" / "bundle.json").read_text())["files"].items(),
        key=lambda item: item[1]["num_bytes"],
    )
    partial = hub._folder_of(source) / f"{name}.{entry['sha256'][:16]}.part"
    partial.parent.mkdir(parents=True)
    partial.write_bytes((server.folder / "tones" / name).read_bytes()[:1000])
    hub.fetch(source)
    assert [asked for path, asked in server.requests if path.endswith(name)] == ["bytes=1000-"]


def test_what_is_not_the_bundle_s_file_is_refused_and_the_old_bundle_stays(server: Server) -> None:
    name = f"{server.address}/tones"
    folder = bundle_folder(name)
    before = contents(folder)
    manifest = server.folder / "tones" / "bundle.json"
    changed = json.loads(manifest.read_text())
    changed.pop("checksum")
    changed["files"]["graph.safetensors"]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(changed))
    source = hub.source_of(name)
    assert source is not None
    with pytest.raises(AsrError, match=r"graph\.safetensors: the file that arrived does not match the bundle"):
        hub.fetch(source, refresh=True)
    assert contents(folder) == before and hub.cached_folder(source) == folder
    changed["files"]["../outside"] = changed["files"]["graph.safetensors"]
    manifest.write_text(json.dumps(changed))
    with pytest.raises(AsrError, match=r"entry for the file '../outside' is not safe"):
        hub.fetch(source, refresh=True)


@pytest.mark.slow
def test_names_of_published_bundles_and_of_the_hub(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Path(server.folder) / "nowhere"
    with pytest.raises(AsrError, match=r"librispeech: this bundle is not on this machine; .* set ASR_BUNDLES"):
        bundle_folder(None, nowhere)
    (server.folder / "tones").rename(server.folder / "librispeech")
    monkeypatch.setenv("ASR_BUNDLES", f"{server.address}/")
    folder = bundle_folder(None, nowhere)
    assert Bundle.load(folder).name == "tones"
    monkeypatch.delenv("ASR_BUNDLES")
    assert bundle_folder("librispeech", nowhere) == folder  # fetched already
    (server.folder / "someone" / "talk" / "resolve").mkdir(parents=True)
    (server.folder / "librispeech").rename(server.folder / "someone" / "talk" / "resolve" / "v2")
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    assert Bundle.load(bundle_folder("hf:someone/talk@v2")).name == "tones"
    with pytest.raises(AsrError, match=r"hf:someone/other: there is no bundle at .*/someone/other/resolve/main"):
        bundle_folder("hf:someone/other")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("http://example.org/tones", "bundles are fetched by https"),
        ("ftp://example.org/tones", "bundles are fetched by https"),
        ("hf:tones", "hf:owner/name"),
        ("https://example.org/tones?token=1", r"without '\?' and '#'"),
        ("http://127.0.0.1:9/tones", "it cannot be fetched from .*; is there a network"),
    ],
)
def test_wrong_addresses_are_one_sentence(name: str, message: str, server: Server) -> None:
    with pytest.raises(AsrError, match=message):
        bundle_folder(name)


def test_a_token_goes_to_the_hub_only(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    source = hub.source_of("hf:someone/talk")
    assert source is not None and source.token == "secret"
    with monkeypatch.context() as patch:
        opened: list[Any] = []
        patch.setattr("urllib.request.urlopen", lambda request, **_: opened.append(request))
        hub._open(source, "bundle.json", 5)
    (request,) = opened
    assert "Authorization" not in request.headers  # those that redirections repeat
    assert request.unredirected_hdrs == {"Authorization": "Bearer secret"}
    assert request.full_url == "https://huggingface.co/someone/talk/resolve/main/bundle.json"
    assert hub.source_of(f"{server.address}/tones") == hub.Source(f"{server.address}/tones", f"{server.address}/tones")


def test_the_commands(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    name = f"{server.address}/tones"
    assert main(["bundle", "fetch", name, "--output", str(tmp_path / "mine")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mine'}\n"
    assert Bundle.load(tmp_path / "mine").name == "tones"
    assert main(["bundle", "list", "--json"]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"name": name, "folder": str(bundle_folder(name))}.items() <= listed[-1].items()
    assert main(["bundle", "info", name, "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["name"] == "tones" and "MB" in info["parts"]["graph"] and info["fingerprint"]
    assert main(["bundle", "fetch", name, "--output", os.devnull]) == 2
    assert "already exists and is not a bundle" in capsys.readouterr().err
    assert main(["bundle"]) == 2
    assert "bundle fetch" in capsys.readouterr().err
