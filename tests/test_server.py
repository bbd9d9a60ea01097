"""The server: conversations in Vosk's protocol, side by side and broken off, and requests with recordings."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import soundfile
import torch
from aiohttp import ClientError, ClientSession, ClientWebSocketResponse, FormData, WSCloseCode, WSMessage, WSMsgType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asr
from asr.audio.io import AudioFile
from asr.errors import AsrError
from asr.recognizer import Recognizer
from asr.server import Conversation, LiveStreams, Server, ServerOptions
from asr.streaming import StreamingOptions, StreamingRecognizer, recognize_stream
from asr.testing.tones import RATE, TEXT, tones

SENTENCES = [line.split() for line in TEXT[:4]]
PIECE = RATE // 4


@pytest.fixture(scope="module")
def recognizer(tiny_bundle_folder) -> Recognizer:
    return asr.load(tiny_bundle_folder)


@pytest.fixture(scope="module")
def streaming(recognizer) -> StreamingRecognizer:
    return StreamingRecognizer(recognizer)


def serve(
    recognizer: Recognizer,
    streaming: StreamingRecognizer,
    talk: Callable[[ClientSession], Awaitable[object]],
    **limits: float,
) -> object:
    """What `talk` returns, with a client of a server on a free port."""

    async def session() -> object:
        server = Server(recognizer, streaming, ServerOptions(**limits))
        async with server.listening("127.0.0.1", 0) as (address,), ClientSession(address) as client:
            return await asyncio.wait_for(talk(client), 60)

    return asyncio.run(session())


def as_bytes(samples: torch.Tensor) -> bytes:
    return (samples * 32767).to(torch.int16).numpy().astype("<i2").tobytes()


async def conversation(client: ClientSession, content: bytes, size: int = 2 * PIECE, rate: int = RATE) -> list[dict]:
    """As Vosk's own clients: each message waits for its answer."""
    async with client.ws_connect("/") as socket:
        await socket.send_json({"config": {"sample_rate": rate}})
        answers = []
        for begin in range(0, len(content), size):
            await socket.send_bytes(content[begin : begin + size])
            answers.append(await socket.receive_json())
        await socket.send_json({"eof": 1})
        answers.append(await socket.receive_json())
        assert (await socket.receive()).type == WSMsgType.CLOSE
    return answers


def utterances_of(recognizer: Recognizer, content: bytes) -> list[list[tuple[str, float, float]]]:
    """The words of a stream that nobody shares."""
    samples = torch.from_numpy(np.frombuffer(content, "<i2").astype(np.float32) / 32768)
    found = [result for result in recognize_stream(recognizer, samples.split(PIECE), RATE) if result.is_final]
    return [[(word.text, word.start, word.end) for word in result.words] for result in found if result.words]


def words_of(answers: list[dict]) -> list[tuple[str, float, float]]:
    return [(word["word"], word["start"], word["end"]) for answer in answers for word in answer.get("result", [])]


@pytest.mark.parametrize("size", [2 * PIECE, 4001, 2 * RATE])
def test_each_message_has_one_answer_and_the_words_are_those_of_a_stream(recognizer, streaming, size):
    """4001 bytes cut samples in two; a second of pause ends an utterance before the end."""
    sound = torch.cat([tones(SENTENCES[0]), torch.zeros(2 * RATE), tones(SENTENCES[1])])
    content = as_bytes(sound)
    answers = serve(recognizer, streaming, lambda client: conversation(client, content, size))
    assert all(set(answer) in ({"partial"}, {"text"}, {"text", "result"}) for answer in answers)
    expected = utterances_of(recognizer, content)
    assert len(expected) > 1
    for answer, words in zip([answer for answer in answers if "result" in answer], expected, strict=True):
        assert answer["text"] == " ".join(word for word, *_ in words)
        assert words_of([answer]) == [
            (word, pytest.approx(a, abs=1e-3), pytest.approx(b, abs=1e-3)) for word, a, b in words
        ]
    assert any(answer.get("partial") for answer in answers)
    # What follows the end of an utterance is another one.
    assert all(after.get("partial", "") == "" for answer, after in pairwise(answers) if answer.get("text"))
    assert not streaming.is_ready and not streaming._streams


def test_connections_side_by_side_share_batches_and_do_not_disturb_each_other(recognizer, streaming, monkeypatch):
    contents = [as_bytes(tones(words)) for words in SENTENCES]
    num_together: list[int] = []
    step = streaming.step

    def counted() -> object:
        num_together.append(sum(map(streaming.has_chunk, streaming._streams)))
        return step()

    monkeypatch.setattr(streaming, "step", counted)

    async def talk(client: ClientSession) -> list[list[dict]]:
        return await asyncio.gather(*(conversation(client, content, 2 * RATE) for content in contents))

    answers = serve(recognizer, streaming, talk)
    assert [[word for word, *_ in words_of(each)] for each in answers] == SENTENCES
    assert max(num_together) > 1 and num_together.count(0) <= len(num_together) / 4


def test_reset_begins_a_new_stream_and_words_can_be_left_out(recognizer, streaming):
    async def talk(client: ClientSession) -> list[dict]:
        async with client.ws_connect("/") as socket:
            await socket.send_json({"config": {"sample_rate": RATE, "words": 0}})
            answers = []
            for sentence in SENTENCES[:2]:
                await socket.send_bytes(as_bytes(tones(sentence)))
                await socket.receive_json()
                await socket.send_json({"reset": 1})
                answers.append(await socket.receive_json())
            return answers

    assert serve(recognizer, streaming, talk) == [{"text": " ".join(sentence)} for sentence in SENTENCES[:2]]


def test_no_audio_has_no_words(recognizer, streaming):
    async def talk(client: ClientSession) -> dict:
        async with client.ws_connect("/") as socket:
            await socket.send_json({"eof": 1})
            return await socket.receive_json()

    assert serve(recognizer, streaming, talk) == {"text": ""}


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("nothing", "text messages are"),
        ("[1]", "text messages are"),
        ("[" * 100_000, "text messages are"),
        ('{"config": {"words": "no"}}', "config: words must be true or false."),
        ('{"eof": 1, "config": {}}', "text messages are"),
        ('{"config": {"grammar": 1}}', "config: 'grammar' is not supported; there are sample_rate and words."),
        ('{"config": {"sample_rate": "8k"}}', "config: sample_rate must be a whole number of Hz."),
        ('{"config": {"sample_rate": true}}', "config: sample_rate must be a whole number of Hz."),
        ('{"config": {"sample_rate": 7}}', "7"),
    ],
)
def test_a_message_that_cannot_be_followed_is_answered_by_one_sentence(recognizer, streaming, message, complaint):
    async def talk(client: ClientSession) -> tuple[dict, WSMsgType]:
        async with client.ws_connect("/") as socket:
            await socket.send_str(message)
            await socket.send_bytes(bytes(200))
            return await socket.receive_json(), (await socket.receive()).type

    answer, then = serve(recognizer, streaming, talk)
    assert complaint in answer["error"] and then == WSMsgType.CLOSE
    assert not streaming._streams


def test_messages_have_at_most_a_mebibyte(recognizer, streaming):
    async def talk(client: ClientSession) -> list[WSMessage]:
        async with client.ws_connect("/") as socket:
            answers = []
            for size in (1 << 20, (1 << 20) + 1):
                await socket.send_bytes(bytes(size))
                answers.append(await socket.receive())
        return answers

    largest, larger = serve(recognizer, streaming, talk)
    assert largest.data == '{"partial": ""}' and (larger.type, larger.data) == (WSMsgType.CLOSE, 1009)


def test_settings_come_before_samples(recognizer, streaming):
    async def talk(client: ClientSession) -> dict:
        async with client.ws_connect("/") as socket:
            await socket.send_bytes(bytes(200))
            await socket.receive_json()
            await socket.send_json({"config": {"sample_rate": 8000}})
            return await socket.receive_json()

    assert serve(recognizer, streaming, talk) == {"error": "config: it must come before the first samples."}


def test_streams_of_connections_that_break_off_are_closed(recognizer, streaming):
    async def talk(client: ClientSession) -> None:
        socket = await client.ws_connect("/")
        await socket.send_bytes(as_bytes(tones(SENTENCES[0])))
        await socket.receive_json()
        assert len(streaming._streams) == 1
        socket._response.connection.transport.abort()
        while streaming._streams:
            await asyncio.sleep(0.01)

    serve(recognizer, streaming, talk)


def test_a_step_that_fails_ends_the_connections_and_new_ones_are_served(recognizer, streaming, monkeypatch, caplog):
    content = as_bytes(tones(SENTENCES[0]))

    def failing(numbers: object) -> object:
        raise AsrError("the network gave NaN.")

    async def talk(client: ClientSession) -> list[dict]:
        first, second = await client.ws_connect("/"), await client.ws_connect("/")
        for socket in (first, second):
            await socket.send_bytes(content[:1000])
            await socket.receive_json()
        with monkeypatch.context() as patched:
            patched.setattr(streaming, "_step", failing)
            await first.send_bytes(3 * content)
            assert await first.receive_json() == {"error": "the network gave NaN."}
        await second.send_bytes(content)
        assert "a `step` that fails" in (await second.receive_json())["error"]
        for socket in (first, second):
            assert (await socket.receive()).data == WSCloseCode.POLICY_VIOLATION
        return await conversation(client, content)

    assert [word for word, *_ in words_of(serve(recognizer, streaming, talk))] == SENTENCES[0]
    assert not [record for record in caplog.records if record.name.startswith("aiohttp")]


def test_more_connections_than_allowed_are_refused_until_one_ends(recognizer, streaming):
    async def talk(client: ClientSession) -> tuple[tuple, tuple]:
        first = await client.ws_connect("/")
        stream = await client.get("/", headers={**_UPGRADE})
        recording = await client.post("/v1/audio/transcriptions")
        refused = (stream.status, await stream.text()), (recording.status, await recording.json())
        await first.close()
        await conversation(client, bytes(100))
        return refused

    busy = "The server is busy; try again later."
    stream, recording = serve(recognizer, streaming, talk, max_connections=1)
    assert stream == (503, f"{busy}\n")
    assert recording == (503, {"error": {"message": busy, "type": "server_error"}})


def test_errors_of_paths_and_methods_are_json(recognizer, streaming):
    async def talk(client: ClientSession) -> list[tuple]:
        answers = [await client.get("/v1/audio/transcriptions"), await client.post("/v1/embeddings")]
        return [(answer.status, await answer.json()) for answer in answers]

    for status, (found, answer) in zip((405, 404), serve(recognizer, streaming, talk), strict=True):
        assert found == status and f"{status}: " in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"


_UPGRADE = {
    "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}  # fmt: skip


def test_silent_connections_get_their_last_words_and_are_ended(recognizer, streaming):
    async def talk(client: ClientSession) -> tuple[dict, WSMsgType, int | None]:
        async with client.ws_connect("/") as socket:
            await socket.send_bytes(as_bytes(tones(SENTENCES[0])))
            await socket.receive_json()
            return await socket.receive_json(), (await socket.receive()).type, socket.close_code

    answer, *then = serve(recognizer, streaming, talk, idle_seconds=0.2)
    assert answer["text"] == " ".join(SENTENCES[0]) and then == [WSMsgType.CLOSE, WSCloseCode.OK]


def test_connections_without_a_request_are_closed(recognizer, streaming):
    async def talk(client: ClientSession) -> list[bytes]:
        address = client._base_url
        answers = []
        for begin in (b"", b"GET / HT"):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(begin)
            answers.append(await reader.read())
            writer.close()
        return answers

    assert serve(recognizer, streaming, talk, idle_seconds=0.2) == [b"", b""]


def test_a_client_that_reads_no_answers_is_given_up(streaming):
    class Unread:
        async def send_json(self, record: dict) -> None:
            await asyncio.Event().wait()

    async def message() -> WSMessage:
        return WSMessage(WSMsgType.BINARY, as_bytes(tones(SENTENCES[0])), None)

    async def session() -> None:
        streams = LiveStreams(streaming)
        with pytest.raises(ConnectionError, match="reads no answers"):
            await asyncio.wait_for(Conversation(streams, Unread(), RATE, 0.1).run(message), 10)
        streams.shut_down()

    asyncio.run(session())
    assert not streaming._streams


def test_open_streams_get_their_last_words_when_the_server_ends(recognizer, streaming):
    async def last_answer(socket: ClientWebSocketResponse) -> tuple[dict, int | None]:
        answer = await socket.receive_json()
        await socket.receive()
        return answer, socket.close_code

    async def session() -> tuple[dict, int | None]:
        async with ClientSession() as client:
            async with Server(recognizer, streaming, ServerOptions()).listening("127.0.0.1", 0) as (address,):
                socket = await client.ws_connect(address)
                await socket.send_bytes(as_bytes(tones(SENTENCES[0])))
                await socket.receive_json()
                answer = asyncio.ensure_future(last_answer(socket))
            return await answer

    answer, code = asyncio.run(session())
    assert answer["text"] == " ".join(SENTENCES[0]) and code == WSCloseCode.GOING_AWAY


def test_a_long_recording_does_not_delay_the_end(recognizer, streaming, monkeypatch):
    monkeypatch.setattr(asr.server, "_SHUTDOWN_SECONDS", 0.1)
    begun, num_read = threading.Event(), list[int]()

    def pieces(self: AudioFile) -> Iterator[torch.Tensor]:
        for number in range(200):
            begun.set()
            time.sleep(0.05)
            num_read.append(number)
            yield tones(SENTENCES[0])

    monkeypatch.setattr(AudioFile, "_pieces", pieces)

    async def session() -> None:
        server = Server(recognizer, streaming, ServerOptions())
        async with ClientSession() as client, server.listening("127.0.0.1", 0) as (address,):
            form = FormData({"file": io.BytesIO(b"audio")})
            request = asyncio.ensure_future(client.post(f"{address}/v1/audio/transcriptions", data=form))
            await asyncio.to_thread(begun.wait, 60)
        with pytest.raises(ClientError):
            await request

    asyncio.run(session())
    assert len(num_read) < 100


def test_a_recording_whose_client_is_gone_does_not_delay_the_next_one(recognizer, streaming, monkeypatch):
    num_read, usual = list[int](), AudioFile._pieces

    def pieces(self: AudioFile) -> Iterator[torch.Tensor]:
        if self.path.suffix != ".long":
            yield from usual(self)
            return
        for number in range(200):
            time.sleep(0.05)
            num_read.append(number)
            yield tones(SENTENCES[0])

    monkeypatch.setattr(AudioFile, "_pieces", pieces)

    async def talk(client: ClientSession) -> str:
        first = FormData()
        first.add_field("file", b"audio", filename="a.long")
        request = asyncio.ensure_future(client.post("/v1/audio/transcriptions", data=first))
        while not num_read:
            await asyncio.sleep(0.01)
        request.cancel()
        second = FormData()
        second.add_field("file", recording(SENTENCES[0]), filename="b.wav")
        async with client.post("/v1/audio/transcriptions", data=second) as response:
            return (await response.json())["text"]

    assert serve(recognizer, streaming, talk) == " ".join(SENTENCES[0])
    assert len(num_read) < 100


def test_a_port_that_is_taken_is_named(recognizer, streaming):
    async def talk(client: ClientSession) -> None:
        port = client._base_url.port
        async with Server(recognizer, streaming, ServerOptions()).listening("127.0.0.1", port):
            pass

    with pytest.raises(AsrError, match=r"^127\.0\.0\.1, port \d+: the server cannot listen there \("):
        serve(recognizer, streaming, talk)


_MESSAGES = st.one_of(
    st.binary(max_size=3000),
    st.text(max_size=50),
    st.sampled_from([{"eof": 1}, {"reset": 1}, {"config": {}}, {"config": {"sample_rate": 8000}}]).map(json.dumps),
    st.recursive(st.none() | st.integers() | st.floats() | st.text(max_size=5), st.lists, max_leaves=5).map(
        lambda value: json.dumps({"config": value})
    ),
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversations=st.lists(st.lists(_MESSAGES, max_size=6), min_size=10, max_size=10))
def test_any_messages_leave_the_server_working(recognizer, streaming, conversations):
    async def talk(client: ClientSession) -> list[dict]:
        for messages in conversations:
            async with client.ws_connect("/") as socket:
                for message in messages:
                    await (socket.send_bytes if isinstance(message, bytes) else socket.send_str)(message)
                    answer = await socket.receive(0.05 if "config" in str(message) else None)
                    if answer.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.CLOSING):
                        break
        return await conversation(client, as_bytes(tones(SENTENCES[0])))

    async def patient(client: ClientSession) -> list[dict]:
        try:
            return await talk(client)
        except asyncio.TimeoutError:  # config has no answer
            return await conversation(client, as_bytes(tones(SENTENCES[0])))

    answers = serve(recognizer, streaming, patient)
    assert [word for word, *_ in words_of(answers)] == SENTENCES[0]
    assert not streaming._streams


def recording(sentence: list[str], form: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, tones(sentence).numpy(), RATE, format=form)
    return file.getvalue()


def posted(recognizer, streaming, content: bytes | None, name: str = "talk.wav", fields=None, **limits) -> tuple:
    """Status, type and text of the answer to a recording."""

    async def talk(client: ClientSession) -> tuple[int, str, str]:
        form = FormData(quote_fields=False, default_to_multipart=True)
        for key, value in (fields or {}).items():
            form.add_field(key, value)
        if content is not None:
            form.add_field("file", content, filename=name)
        async with client.post("/v1/audio/transcriptions", data=form) as response:
            return response.status, response.content_type, await response.text()

    return serve(recognizer, streaming, talk, **limits)


def test_recordings_become_text_in_each_format(recognizer, streaming):
    content, text = recording(SENTENCES[0]), " ".join(SENTENCES[0])
    fields = {"model": "whisper-1", "language": "en"}  # what clients of OpenAI send
    assert posted(recognizer, streaming, content, fields=fields) == (
        200, "application/json", json.dumps({"text": text})
    )  # fmt: skip
    plain = posted(recognizer, streaming, recording(SENTENCES[0], "FLAC"), "talk.flac", {"response_format": "text"})
    assert plain == (200, "text/plain", f"{text}\n")
    _, kind, subtitles = posted(recognizer, streaming, content, fields={"response_format": "srt"})
    assert (
        kind == "application/x-subrip" and subtitles.startswith("1\n00:00:00,") and text in subtitles.replace("\n", " ")
    )
    _, kind, subtitles = posted(recognizer, streaming, content, fields={"response_format": "vtt"})
    assert kind == "text/vtt" and subtitles.startswith("WEBVTT")
    _, _, everything = posted(recognizer, streaming, content, fields={"response_format": "verbose_json"})
    record, result = json.loads(everything), recognizer(tones(SENTENCES[0]))[0]
    assert record["text"] == text and record["duration"] == pytest.approx(result.duration, abs=1e-3)
    assert [word["word"] for word in record["words"]] == SENTENCES[0]
    assert " ".join(segment["text"] for segment in record["segments"]) == text


@pytest.mark.parametrize(
    ("content", "name", "fields", "complaint"),
    [
        (None, "", {}, "no field 'file'"),
        (b"text", "../talk.wav", {}, "talk.wav"),
        (b"RIFF", "talk.wav", {"prompt": "x"}, "the field 'prompt' is not supported"),
        (b"RIFF", "talk.wav", {"temperature": "0.2"}, "the field 'temperature' is not supported"),
        (b"", "talk.wav", {"response_format": "docx"}, "response_format: there is no 'docx'"),
        (bytes(3 << 20), "long.wav", {}, "long.wav: the file has more than 2 MB"),
    ],
)
def test_a_request_that_cannot_be_answered_gets_one_sentence(recognizer, streaming, content, name, fields, complaint):
    status, _, answer = posted(recognizer, streaming, content, name, fields, max_upload_mb=2)
    message = json.loads(answer)["error"]["message"]
    assert status == (413 if name == "long.wav" else 400) and complaint in message
    assert not any(path in message for path in ("/tmp", "asr-", ".."))


@pytest.mark.parametrize(
    ("error", "status", "complaint", "log"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 507, "cannot keep the recording (No space", "Make room"),
        (RuntimeError("a bug"), 500, "the server failed; its log says why", "Error handling request"),
    ],
)
def test_failures_of_the_server_are_json_and_in_its_log(
    recognizer, streaming, monkeypatch, caplog, error, status, complaint, log
):
    async def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(Server, "_copy", failing)
    found, _, answer = posted(recognizer, streaming, b"RIFF")
    assert found == status and complaint in json.loads(answer)["error"]["message"]
    assert json.loads(answer)["error"]["type"] == "server_error"
    (record,) = caplog.records
    assert log in record.getMessage() and bool(record.exc_info) == (status == 500)


def test_fields_may_ask_for_what_is_done_anyway(recognizer, streaming):
    fields = {"temperature": "0", "prompt": "", "stream": "false", "response_format": "text"}
    status, _, answer = posted(recognizer, streaming, recording(SENTENCES[0]), fields=fields)
    assert status == 200 and answer == f"{' '.join(SENTENCES[0])}\n"


def test_a_request_has_each_field_once(recognizer, streaming):
    async def talk(client: ClientSession) -> tuple[int, dict]:
        form = FormData(default_to_multipart=True)
        for value in ("json", "text"):
            form.add_field("response_format", value)
        async with client.post("/v1/audio/transcriptions", data=form) as response:
            return response.status, await response.json()

    status, answer = serve(recognizer, streaming, talk)
    assert status == 400 and answer["error"]["message"].startswith("response_format: the request has this field twice")


def test_a_request_has_one_recording(recognizer, streaming):
    async def talk(client: ClientSession) -> tuple[int, dict]:
        form = FormData()
        for name in ("one.wav", "two.wav"):
            form.add_field("file", recording(SENTENCES[0]), filename=name)
        async with client.post("/v1/audio/transcriptions", data=form) as response:
            return response.status, await response.json()

    status, answer = serve(recognizer, streaming, talk)
    assert status == 400 and answer["error"]["message"] == "the request has two files; send one at a time."


def test_what_is_no_form_is_refused_and_models_are_named(recognizer, streaming):
    async def talk(client: ClientSession) -> list[object]:
        nothing = await client.post("/v1/audio/transcriptions", skip_auto_headers=["Content-Type"])
        assert nothing.status == 400 and "multipart/form-data" in (await nothing.json())["error"]["message"]
        wrong = await client.post("/v1/audio/transcriptions", data=b"{}")
        form = FormData({"file": io.BytesIO(b"audio")})
        coded = await client.post("/v1/audio/transcriptions", data=form, headers={"Content-Encoding": "gzip"})
        assert coded.status == 400 and "is not a form" in (await coded.json())["error"]["message"]
        models = await client.get("/v1/models")
        own = await client.get(f"/v1/models/{recognizer.bundle.name}")
        other = await client.get("/v1/models/whisper-1")
        assert own.status == 200 and await own.json() == (await models.json())["data"][0]
        assert other.status == 404 and "no model 'whisper-1'; there is " in (await other.json())["error"]["message"]
        hint = await client.get("/")
        return [wrong.status, await wrong.json(), await models.json(), hint.status]

    status, answer, models, hint = serve(recognizer, streaming, talk)
    assert status == 400 and "multipart/form-data" in answer["error"]["message"]
    assert models["data"][0]["id"] == recognizer.bundle.name and hint == 200


def sent_in_parts(parts: list[bytes], pause: float = 0.2, length: int | None = None):
    """The answer to a form that arrives bit by bit: `talk` for `serve`."""

    async def talk(client: ClientSession) -> bytes:
        address = client._base_url
        reader, writer = await asyncio.open_connection(address.host, address.port)
        size = sum(map(len, parts)) if length is None else length
        head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: here\r\nConnection: close\r\n"
        head += f"Content-Type: multipart/form-data; boundary=XX\r\nContent-Length: {size}\r\n\r\n"
        writer.write(head.encode())
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        answer = await reader.readuntil(b"\r\n\r\n")
        answer += await reader.readexactly(int(re.search(rb"Content-Length: (\d+)", answer)[1]))
        writer.close()  # the server itself would wait for what was not sent
        return answer

    return talk


FIELD = b'--XX\r\nContent-Disposition: form-data; name="response_format"\r\n\r\n'
FILE = b'\r\n--XX\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'


def test_a_form_may_arrive_in_parts(recognizer, streaming):
    content = recording(SENTENCES[0])
    parts = [FIELD + b"te", b"xt" + FILE + content[:99], content[99:] + b"\r\n--XX--\r\n"]
    answer = serve(recognizer, streaming, sent_in_parts(parts))
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(f"{' '.join(SENTENCES[0])}\n".encode())
    parts = [FIELD + b"t" * 3000, b"t" * 3000 + FILE + b"\r\n--XX--\r\n"]
    answer = serve(recognizer, streaming, sent_in_parts(parts))
    assert answer.startswith(b"HTTP/1.1 400") and b"response_format: the field has more than 4096 bytes" in answer


@pytest.mark.parametrize("part", [b"--XX\r\n", FIELD, FIELD + b"text" + FILE + b"RIFF"])
def test_a_recording_that_stops_arriving_gives_its_place_back(recognizer, streaming, part):
    async def talk(client: ClientSession) -> tuple[bytes, int]:
        answer = await sent_in_parts([part], pause=0.0, length=9999)(client)
        async with client.post("/v1/audio/transcriptions", data=b"{}") as response:
            return answer, response.status

    answer, following = serve(recognizer, streaming, talk, idle_seconds=0.2, max_connections=1)
    assert answer.startswith(b"HTTP/1.1 408") and b"Nothing was received for 0.2 s; send the request again" in answer
    assert following == 400  # not 503


@pytest.mark.parametrize("part", [b"", FIELD, FIELD + b"text" + FILE + b"RIFF"])
def test_a_client_that_goes_away_is_no_fault_of_the_server(recognizer, streaming, caplog, part):
    async def talk(client: ClientSession) -> None:
        address = client._base_url
        _, writer = await asyncio.open_connection(address.host, address.port)
        head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: here\r\nContent-Length: 9999\r\n"
        writer.write(f"{head}Content-Type: multipart/form-data; boundary=XX\r\n\r\n".encode() + part)
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        while (await client.post("/v1/audio/transcriptions", data=b"{}")).status == 503:  # it has its place still
            await asyncio.sleep(0.01)

    serve(recognizer, streaming, talk, max_connections=1)
    assert not caplog.records


def test_limits_are_above_zero():
    with pytest.raises(AsrError, match="max_connections is 0; give a number above 0"):
        ServerOptions(max_connections=0)


def test_streams_say_whether_they_have_a_chunk(recognizer):
    streams = StreamingRecognizer(recognizer, StreamingOptions())
    first, second = streams.open(), streams.open()
    streams.push(first, torch.zeros(4 * RATE))
    assert streams.has_chunk(first) and not streams.has_chunk(second) and not streams.has_chunk(7)
    while streams.is_ready:
        streams.step()
    assert not streams.has_chunk(first)
