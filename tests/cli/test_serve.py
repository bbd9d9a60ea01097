"""`asr serve` as a process: what it says, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest
from aiohttp import ClientSession

from asr.cli import main
from asr.testing.tones import RATE, TEXT, tones

SENTENCE = TEXT[0].split()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_after_the_last_words(tiny_bundle_folder, number):
    command = [sys.executable, "-m", "asr", "serve", "--port", "0", "--bundle", str(tiny_bundle_folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        line = next(line for line in process.stderr if line.startswith("asr: listening on "))

        async def talk() -> dict:
            async with ClientSession() as client, client.ws_connect(line.split()[-1]) as socket:
                await socket.send_json({"config": {"sample_rate": RATE}})
                await socket.send_bytes((tones(SENTENCE) * 32767).short().numpy().tobytes())
                await socket.receive_json()
                process.send_signal(number)
                return await socket.receive_json()

        assert asyncio.run(talk())["text"] == " ".join(SENTENCE)
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--port", "70000"], "--port 70000: give a number from 0 to 65535."),
        (["--max-connections", "0"], "--max-connections is 0; give a number above 0."),
        (["--max-upload-mb", "-1"], "--max-upload-mb is -1.0; give a number above 0."),
        (["--chunk-seconds", "0"], "--chunk-seconds is 0.0; it must be above 0"),
    ],
)
def test_options_out_of_range_are_one_sentence(capsys, arguments, complaint):
    assert main.main(["serve", *arguments]) == 2
    assert complaint in capsys.readouterr().err
