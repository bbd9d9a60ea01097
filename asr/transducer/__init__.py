"""Decoding of any transducer, with language models inside the search."""

from asr.fusion.recognizer import FusionRecognizer as TransducerRecognizer
from asr.transducer.decoder import TransducerDecoder
from asr.transducer.search import TransducerDecodingConfig

__all__ = ["TransducerDecoder", "TransducerDecodingConfig", "TransducerRecognizer"]
