"""Decoding of any attention-based encoder-decoder, such as Whisper, with language models inside the search."""

from asr.attention.decoder import AttentionDecoder
from asr.attention.recognizer import AttentionRecognizer
from asr.attention.search import AttentionDecodingConfig

__all__ = ["AttentionDecoder", "AttentionDecodingConfig", "AttentionRecognizer"]
