"""Decoding of any transducer, with language models inside the search."""

from asr.transducer.decoder import TransducerDecoder
from asr.transducer.interface import TransducerDecodingConfig
from asr.transducer.recognizer import TransducerRecognizer

__all__ = ["TransducerDecoder", "TransducerDecodingConfig", "TransducerRecognizer"]
