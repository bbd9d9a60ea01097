"""One recognizer called from several threads gives the words of one thread.

Each case runs in a process of its own, since what it guards against ends with a segmentation fault. The LibriSpeech
bundle is used: caches of a tiny bundle do not grow, and hide races.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_stack]

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "checkpoints" / "librispeech"

OFFLINE = """
import sys, threading
import torch
torch.set_num_threads(1)
from asr.audio.io import read_audio
from asr.bundle import Bundle
from asr.recognizer import Recognizer, ResourceOptions

mode, num_workers, folder, clips = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
waveforms = [read_audio(clip) for clip in clips]
bundle = Bundle.load(folder)
expected = [Recognizer(bundle, mode=mode)([waveform])[0].text for waveform in waveforms]
assert all(expected)
wrong = []
for _ in range(2):
    resources = ResourceOptions(num_workers=num_workers)
    recognizer = Recognizer(bundle, mode=mode, resources=resources)  # its caches are cold
    together = threading.Barrier(4)

    def call(first):
        together.wait()
        for step in range(3):
            which = (first + step) % len(waveforms)
            found = recognizer([waveforms[which]])[0].text
            if found != expected[which]:
                wrong.append((expected[which], found))

    threads = [threading.Thread(target=call, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    afterwards = [recognizer([waveform])[0].text for waveform in waveforms]
    wrong += [pair for pair in zip(expected, afterwards) if pair[0] != pair[1]]
print(wrong)
sys.exit(bool(wrong))
"""

STREAMS = """
import sys, threading
import torch
torch.set_num_threads(1)
from asr.audio.io import read_audio
from asr.bundle import Bundle
from asr.recognizer import Recognizer
from asr.streaming import StreamingRecognizer

mode, folder, clips = sys.argv[1], sys.argv[2], sys.argv[3:]
waveforms = [read_audio(clip) for clip in clips]
recognizer = Recognizer(Bundle.load(folder), mode=mode)

def run(streaming, waveform, results):
    stream = streaming.open()
    for piece in waveform.split(8000):
        streaming.push(stream, piece)
    streaming.close(stream)
    while streaming.is_ready:
        for result in streaming.step():  # of any stream
            results.setdefault(result.stream, []).append(result)
    return stream

def text(results, stream):
    finals = [result for result in results[stream] if result.is_final]
    return " ".join(result.text for result in sorted(finals, key=lambda result: result.begin))

expected = []
for waveform in waveforms:
    alone = {}
    stream = run(StreamingRecognizer(recognizer), waveform, alone)
    expected.append(text(alone, stream))
assert all(expected)
shared, streams, results = StreamingRecognizer(recognizer), {}, {}
together = threading.Barrier(len(waveforms))

def call(which):
    together.wait()
    streams[which] = run(shared, waveforms[which], results)

threads = [threading.Thread(target=call, args=(which,)) for which in range(len(waveforms))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
found = [text(results, streams[which]) for which in range(len(waveforms))]
print(expected, found)
sys.exit(found != expected)
"""


def run(script: str, *arguments: str, num_clips: int) -> None:
    if not BUNDLE.is_dir():
        pytest.skip("the checkout carries no LibriSpeech bundle")
    clips = sorted((ROOT / "scripts" / "demo_clips").glob("*.flac"))[:num_clips]
    command = [sys.executable, "-c", script, *arguments, str(BUNDLE), *map(str, clips)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.mark.parametrize("mode, num_workers", [("rnn", 0), ("ngram", 0), ("rnn", 2)])
def test_calls_of_several_threads(mode: str, num_workers: int) -> None:
    run(OFFLINE, mode, str(num_workers), num_clips=5)


def test_streams_stepped_by_several_threads() -> None:
    run(STREAMS, "rnn", num_clips=4)
