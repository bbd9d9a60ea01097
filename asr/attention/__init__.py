"""Decoding of any attention-based encoder-decoder, such as Whisper, with language models inside the search."""

from asr.attention.decoder import AttentionDecoder
from asr.attention.interface import AttentionDecodingConfig
from asr.attention.recognizer import AttentionRecognizer

__all__ = ["AttentionDecoder", "AttentionDecodingConfig", "AttentionRecognizer"]
