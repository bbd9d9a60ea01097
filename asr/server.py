"""A server of live audio and recordings: Vosk's WebSocket protocol, and OpenAI's HTTP interface for transcriptions.

The connections are streams of one `StreamingRecognizer`, so chunks that are ready at the same time form a batch, and
all streams share the language model's caches. Each piece of audio is answered when its chunks have been searched: a
client that sends faster than it is heard has to wait, and nothing piles up.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import BodyPartReader, WSCloseCode, WSMsgType, web
from aiohttp.log import server_logger
from torch import Tensor

from asr.audio.io import AudioFile
from asr.audio.pcm import PcmFormat
from asr.errors import AsrError, require_above_zero
from asr.recognizer import Recognizer
from asr.results import RecognitionResult, StreamResult, Word
from asr.streaming import StreamingRecognizer
from asr.transcripts import Transcript, cues, format_transcript

_LOGGER = logging.getLogger(__name__)

_T = TypeVar("_T")

_MAX_MESSAGE_BYTES = 1 << 20
_MAX_FIELD_BYTES = 1 << 12
_BLOCK_BYTES = 1 << 16
_SHUTDOWN_SECONDS = 30.0
_MAX_NAME, _MAX_SUFFIX = 80, 12

# The keys of `config` messages that have an effect.
_CONFIG = ("sample_rate", "words")

# Fields of transcription requests besides the file. The bundle alone decides on model and language.
_REPEATED_FIELD = "timestamp_granularities[]"
_FIELDS = ("model", "language", "response_format", _REPEATED_FIELD)
# Fields that some clients always send -> the values that ask for nothing else than what is done anyway.
_AS_ALWAYS = {"temperature": ("0", "0.0"), "prompt": ("",), "stream": ("false", "False")}
_CONTENT_TYPES = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}
RESPONSE_FORMATS = ("json", "verbose_json", *_CONTENT_TYPES)


@dataclass(frozen=True)
class ServerOptions:
    """Limits of a server.

    Args:
        max_connections: the maximum number of streams and requests with recordings at a time, together.
        idle_seconds: a connection that has sent nothing for this long, while something is expected, is ended.
        max_upload_mb: the maximum size of a recording, in MB of 2^20 bytes.

    Raises:
        AsrError: a limit is not above 0.
    """

    max_connections: int = 64
    idle_seconds: float = 60.0
    max_upload_mb: float = 256.0

    def __post_init__(self) -> None:
        require_above_zero(**vars(self))


class LiveStreams:
    """The streams of all connections, for coroutines of one event loop.

    Args:
        recognizer: nothing else uses it. Its methods run in one thread, because they would take turns anyway.
    """

    def __init__(self, recognizer: StreamingRecognizer) -> None:
        self._recognizer = recognizer
        self._thread = ThreadPoolExecutor(1)
        self._found: dict[int, list[StreamResult]] = {}
        self._round: asyncio.Task[None] | None = None

    async def open(self, sampling_rate: int) -> int:
        """Opens a stream -> its number.

        Raises:
            AsrError: the sampling rate is out of range.
        """
        stream = await self._call(lambda: self._recognizer.open(sampling_rate))
        self._found[stream] = []
        return stream

    async def push(self, stream: int, samples: Tensor) -> list[StreamResult]:
        """Takes samples (L,) -> the results that were found since the last call, when all chunks have been searched."""
        await self._call(lambda: self._recognizer.push(stream, samples))
        while await self._call(lambda: self._recognizer.has_chunk(stream)):
            await self._next_round()
        found, self._found[stream] = self._found[stream], []
        return found

    async def close(self, stream: int) -> list[StreamResult]:
        """Ends a stream -> its last results.

        Raises:
            AsrError: the stream has ended, since a step has failed.
        """
        try:
            await self._call(lambda: self._recognizer.close(stream))
            while not any(result.reason == "end" for result in self._found[stream]):
                await self._next_round()
            return self._found[stream]
        finally:
            del self._found[stream]

    def shut_down(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    async def _next_round(self) -> None:
        """Waits for a chunk of every stream that has one. Connections that wait at the same time share the round."""
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._step())
        await asyncio.shield(self._round)  # a connection that breaks off must not end the round of the others

    async def _step(self) -> None:
        for result in await self._call(self._recognizer.step):
            self._found[result.stream].append(result)

    async def _call(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


class Conversation:
    """One WebSocket connection, in Vosk's protocol.

    The client sends `{"config": {"sample_rate": 8000}}`, which is optional, then samples (16-bit little-endian PCM, one
    channel) in binary messages, and `{"eof": 1}` at the end. Each binary message, and the end, gets one answer:
    `{"partial": "..."}`, or `{"result": [{"conf", "start", "end", "word"}, ...], "text": "..."}` when an utterance has
    ended. After `{"reset": 1}`, which is answered like the end, a new stream begins.

    Args:
        streams: the streams of all connections.
        socket: the connection.
        sampling_rate: of the samples, in Hz, unless the client says otherwise.
        idle_seconds: how long the client may take to read a message.
    """

    def __init__(
        self, streams: LiveStreams, socket: web.WebSocketResponse, sampling_rate: int, idle_seconds: float
    ) -> None:
        self._streams = streams
        self._socket = socket
        self._rate = sampling_rate
        self._idle_seconds = idle_seconds
        self._shows_words = True
        self._stream: int | None = None
        self._rest = b""  # half a sample
        self._partial = ""

    async def run(self, next_message: Callable[[], Awaitable[Any]]) -> None:
        """Answers messages until the client ends, or `next_message` returns None.

        Raises:
            ConnectionError: the client is gone, or reads no answers.
        """
        try:
            while (message := await next_message()) is not None:
                if message.type == WSMsgType.BINARY:
                    await self._answer(await self._heard(message.data))
                elif message.type == WSMsgType.TEXT:
                    if await self._follow_text(message.data):
                        return
                else:  # the client is gone
                    return
            await self._answer(await self._close_stream())
        except AsrError as error:
            await self._send({"error": str(error)})
            await self.close(WSCloseCode.POLICY_VIOLATION)
        finally:
            with suppress(AsrError):
                await self._close_stream()

    async def close(self, code: WSCloseCode) -> None:
        """Closes the connection; errors as for `run`."""
        await self._in_time(self._socket.close(code=code))

    async def _send(self, record: dict[str, Any]) -> None:
        await self._in_time(self._socket.send_json(record))

    async def _in_time(self, sending: Awaitable[object]) -> None:
        try:
            await asyncio.wait_for(sending, self._idle_seconds)
        except asyncio.TimeoutError:  # in Python 3.10, not the TimeoutError of other modules
            raise ConnectionError("the client reads no answers") from None

    async def _follow_text(self, text: str) -> bool:
        """Follows a text message -> whether it was the last one."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):  # of deeply nested JSON
            message = None
        match message:
            case {"config": dict(config)} if len(message) == 1:
                self._configure(config)
                return False
            case {"eof": _} | {"reset": _} if len(message) == 1:
                await self._answer(await self._close_stream())
                return "eof" in message
        raise AsrError(
            'text messages are {"config": {...}}, {"eof": 1} or {"reset": 1}, and binary ones are 16-bit samples.'
        )

    def _configure(self, config: dict[str, Any]) -> None:
        if self._stream is not None:
            raise AsrError("config: it must come before the first samples.")
        if unknown := [key for key in config if key not in _CONFIG]:
            raise AsrError(f"config: {unknown[0]!r:.80} is not supported; there are {' and '.join(_CONFIG)}.")
        rate = config.get("sample_rate", self._rate)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 1 <= rate < 2**31 or rate != int(rate):
            raise AsrError("config: sample_rate must be a whole number of Hz.")
        shows_words = config.get("words", True)
        if shows_words not in (True, False):  # or 1 and 0
            raise AsrError("config: words must be true or false.")
        self._rate, self._shows_words = int(rate), bool(shows_words)

    async def _heard(self, content: bytes) -> list[StreamResult]:
        if self._stream is None:
            self._stream = await self._streams.open(self._rate)
        content = self._rest + content
        whole = len(content) - len(content) % 2
        self._rest = content[whole:]
        return await self._streams.push(self._stream, PcmFormat(self._rate).decode(content[:whole]))

    async def _close_stream(self) -> list[StreamResult]:
        """Ends the stream, if there is one -> its last results."""
        stream, self._stream, self._rest = self._stream, None, b""
        return [] if stream is None else await self._streams.close(stream)

    async def _answer(self, found: Sequence[StreamResult]) -> None:
        """Sends one message: the words of utterances that have ended, or those of the current one."""
        final = [result for result in found if result.is_final]
        for result in found:
            self._partial = "" if result.is_final else result.text
        if not final and self._stream is not None:
            await self._send({"partial": self._partial})
            return
        words = [word for result in final for word in result.words]
        record: dict[str, Any] = {"text": " ".join(word.text for word in words)}
        if words and self._shows_words:
            record = {"result": [_vosk_word(word) for word in words], **record}
        await self._send(record)


def _vosk_word(word: Word) -> dict[str, Any]:
    confidence = 1.0 if word.confidence is None else word.confidence
    return {"conf": round(confidence, 4), "start": round(word.start, 3), "end": round(word.end, 3), "word": word.text}


class Server:
    """Answers `GET /` with WebSockets, `POST /v1/audio/transcriptions` and `GET /v1/models`; to be used once.

    Args:
        recognizer: for recordings, one after the other.
        streaming: for live audio.
        options: limits.
    """

    def __init__(self, recognizer: Recognizer, streaming: StreamingRecognizer, options: ServerOptions) -> None:
        self._recognizer = recognizer
        self._streams = LiveStreams(streaming)
        self._options = options
        self._recordings = ThreadPoolExecutor(1)
        self._num_open = 0
        self._is_ending = asyncio.Event()
        self._is_over = False  # no request waits any more

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[list[str]]:
        """Serves within the block; at its end, open streams get their last results.

        Args:
            host: the address to listen on.
            port: 0 for any that is free.

        Yields:
            The URLs of the server.

        Raises:
            AsrError: nobody can listen there.
        """
        application = web.Application(middlewares=[_errors_as_json])
        application.router.add_get("/", self._converse)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/v1/models/{name}", self._model)
        application.router.add_post("/v1/audio/transcriptions", self._transcribe)
        application.on_shutdown.append(self._end_all)
        runner = web.AppRunner(
            application,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_SECONDS,
            keepalive_timeout=self._options.idle_seconds,  # until a request is complete, or the next one comes
        )
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                reason = error.strerror or error
                raise AsrError(f"{host}, port {port}: the server cannot listen there ({reason}).") from error
            yield [f"http://{f'[{name}]' if ':' in name else name}:{number}" for name, number, *_ in runner.addresses]
        finally:
            await runner.cleanup()
            self._is_over = True
            self._streams.shut_down()
            self._recordings.shutdown()

    async def _end_all(self, _: web.Application) -> None:
        self._is_ending.set()  # aiohttp then waits for all connections

    async def _converse(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(max_msg_size=_MAX_MESSAGE_BYTES + 1)  # which itself is refused
        if not socket.can_prepare(request).ok:
            return web.Response(text="Connect with a WebSocket, or POST a recording to /v1/audio/transcriptions.\n")
        with self._place():
            with suppress(ConnectionError):  # of clients that do not wait for an answer, or read none
                await socket.prepare(request)
                rate = self._recognizer.sampling_rate
                conversation = Conversation(self._streams, socket, rate, self._options.idle_seconds)
                await conversation.run(lambda: self._next_message(socket))
                await conversation.close(WSCloseCode.GOING_AWAY if self._is_ending.is_set() else WSCloseCode.OK)
            if request.transport is not None and request.transport.get_write_buffer_size():
                request.transport.abort()  # otherwise it stays open until the client has read everything
        return socket

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of the connections that may be open at a time; status 503 if there is none."""
        if self._num_open >= self._options.max_connections or self._is_ending.is_set():
            raise web.HTTPServiceUnavailable(text="The server is busy; try again later.\n")
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def _next_message(self, socket: web.WebSocketResponse) -> Any:
        """A client's next message; None if it is silent for too long or the server ends."""
        message = asyncio.ensure_future(socket.receive())
        ending = asyncio.ensure_future(self._is_ending.wait())
        try:
            both = {message, ending}
            await asyncio.wait(both, timeout=self._options.idle_seconds, return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() else None
        finally:
            message.cancel()
            ending.cancel()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._description()]})

    async def _model(self, request: web.Request) -> web.Response:
        name, own = request.match_info["name"], self._recognizer.bundle.name
        if name != own:
            raise web.HTTPNotFound(text=f"there is no model {name!r:.80}; there is {own!r}.")
        return web.json_response(self._description())

    def _description(self) -> dict[str, str]:
        return {"id": self._recognizer.bundle.name, "object": "model"}

    async def _transcribe(self, request: web.Request) -> web.Response:
        with self._place(), tempfile.TemporaryDirectory(prefix="asr-") as folder:
            fields, name, path = await self._received(request, Path(folder))
            form = fields.get("response_format", "json")
            if form not in RESPONSE_FORMATS:
                raise AsrError(f"response_format: there is no {form!r:.80}; there are {', '.join(RESPONSE_FORMATS)}.")
            result = await asyncio.get_running_loop().run_in_executor(
                self._recordings, self._recognized, path, name, lambda: request.transport is not None
            )
        return _response(Transcript.of(result, name), result, form)

    def _recognized(self, path: Path, name: str, is_awaited: Callable[[], bool]) -> RecognitionResult:
        """The result of a recording, or of its beginning, if the server ends or the client is gone meanwhile."""
        file = AudioFile(path, self._recognizer.sampling_rate)
        # The rest of a long recording would delay the end, or the recordings of others.
        file.begun = takewhile(lambda _: is_awaited() and not self._is_over, file)
        try:
            return self._recognizer([file])[0]
        except AsrError as error:
            raise AsrError(str(error).replace(str(path), name)) from error

    async def _received(self, request: web.Request, folder: Path) -> tuple[dict[str, str], str, Path]:
        """The fields of a request, and the name and the copy of its file.

        Raises:
            AsrError: it is no form, lacks the file, or has a field that would have no effect.
        """
        fields: dict[str, str] = {}
        name, path = "", None
        try:
            form = await request.multipart()
            while (part := await self._soon(form.next())) is not None:
                if not isinstance(part, BodyPartReader) or part.name not in ("file", *_FIELDS, *_AS_ALWAYS):
                    raise _unsupported(getattr(part, "name", None))
                if part.name in fields and part.name != _REPEATED_FIELD:
                    raise AsrError(f"{part.name}: the request has this field twice; send it once.")
                if part.name != "file":
                    fields[part.name] = await self._field(part)
                    if part.name in _AS_ALWAYS and fields[part.name] not in _AS_ALWAYS[part.name]:
                        raise _unsupported(part.name)
                    continue
                if path is not None:
                    raise AsrError("the request has two files; send one at a time.")
                name = Path(part.filename or "recording").name[-_MAX_NAME:]
                suffix = Path(name).suffix
                path = folder / f"recording{suffix if suffix[1:].isalnum() and len(suffix) <= _MAX_SUFFIX else ''}"
                await self._copy(part, path, name)
        except (ValueError, AssertionError, KeyError, web.RequestPayloadError) as error:  # of aiohttp: it is no form
            raise AsrError("the request is not a form with a file (multipart/form-data).") from error
        if path is None:
            raise AsrError("the request has no field 'file' with a recording.")
        return fields, name, path

    async def _soon(self, part: Awaitable[_T]) -> _T:
        """The next part of a request; status 408 if nothing of it comes for too long."""
        try:
            return await asyncio.wait_for(part, self._options.idle_seconds)
        except asyncio.TimeoutError:  # in Python 3.10, not the TimeoutError of other modules
            text = f"Nothing was received for {self._options.idle_seconds:g} s; send the request again.\n"
            raise web.HTTPRequestTimeout(text=text) from None

    async def _field(self, part: BodyPartReader) -> str:
        content = b""
        while block := await self._soon(part.read_chunk(_MAX_FIELD_BYTES)):  # what has arrived so far
            content += block
            if len(content) > _MAX_FIELD_BYTES:
                raise AsrError(f"{part.name}: the field has more than {_MAX_FIELD_BYTES} bytes.")
        return content.decode("utf-8", "replace").strip()

    async def _copy(self, part: BodyPartReader, path: Path, name: str) -> None:
        """Writes a recording to a file; status 413 if it is too large."""
        most = self._options.max_upload_mb
        with path.open("wb") as file:
            while block := await self._soon(part.read_chunk(_BLOCK_BYTES)):
                file.write(block)
                if file.tell() > most * (1 << 20):
                    text = f"{name}: the file has more than {most:g} MB; send it in parts."
                    raise web.HTTPRequestEntityTooLarge(int(most * (1 << 20)), text=text)


def _unsupported(field: str | None) -> AsrError:
    return AsrError(f"the field {field!r:.80} is not supported; there are file, {', '.join(_FIELDS)}.")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]) -> Any:
    """OpenAI's clients read the message of an error from JSON, whatever its status."""
    if not request.path.startswith("/v1/"):
        return await handler(request)
    try:
        return await handler(request)
    except AsrError as error:
        status, message = web.HTTPBadRequest.status_code, str(error)
    except web.HTTPError as error:
        status, message = error.status, (error.text or error.reason).strip()
    except web.HTTPException:  # no error
        raise
    except ConnectionError:  # the client is gone, and nobody reads this
        status, message = web.HTTPBadRequest.status_code, "the request is incomplete."
    except OSError as error:
        status = web.HTTPInsufficientStorage.status_code
        message = f"the server cannot keep the recording ({error.strerror or error})."
        _LOGGER.error("%s Make room in %s, or set TMPDIR.", message, tempfile.gettempdir())
    except Exception:
        status, message = web.HTTPInternalServerError.status_code, "the server failed; its log says why."
        server_logger.exception("Error handling request from %s", request.remote)
    kind = "invalid_request_error" if status < web.HTTPInternalServerError.status_code else "server_error"
    return web.json_response({"error": {"message": message, "type": kind}}, status=status)


def _response(transcript: Transcript, result: RecognitionResult, form: str) -> web.Response:
    if form in _CONTENT_TYPES:
        text = format_transcript(transcript, {"text": "txt"}.get(form, form))
        return web.Response(text=text, content_type=_CONTENT_TYPES[form])
    record: dict[str, Any] = {"text": transcript.text}
    if form == "verbose_json":
        record |= {
            "task": "transcribe",
            "duration": round(result.duration, 3),
            "words": [word.as_dict() for word in transcript.words],
            "segments": [
                {"id": number, "start": round(cue.begin, 3), "end": round(cue.end, 3), "text": cue.text}
                for number, cue in enumerate(cues(transcript.words))
            ],
        }
    return web.json_response(record)
