"""The corpora that `asr prepare` can read, each in a module of its own."""

from __future__ import annotations

from asr.datasets.corpora.an4 import An4
from asr.datasets.corpora.base import Corpus
from asr.datasets.corpora.librispeech import MINI_LIBRISPEECH_PARTS, LibriSpeech
from asr.datasets.corpora.lists import KaldiFolder, LhotseCuts, NemoManifest, Table
from asr.datasets.corpora.ljspeech import LJSpeech
from asr.datasets.corpora.speechocean762 import SpeechOcean762

CORPORA: dict[str, Corpus] = {
    "an4": An4(),
    "csv": Table(),
    "kaldi": KaldiFolder(),
    "lhotse": LhotseCuts(),
    "nemo": NemoManifest(),
    "librispeech": LibriSpeech(),
    "ljspeech": LJSpeech(),
    # The manifests are named librispeech_* under either name: the parts of mini LibriSpeech have names of their own.
    "mini-librispeech": LibriSpeech(parts=MINI_LIBRISPEECH_PARTS, default_download=MINI_LIBRISPEECH_PARTS),
    "speechocean762": SpeechOcean762(),
}
"""Name on the command line -> corpus."""
