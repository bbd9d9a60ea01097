"""Attention-based encoder-decoders from elsewhere, such as Whisper."""

from asr.models.attention.base import AttentionModel, load_attention_model

__all__ = ["AttentionModel", "load_attention_model"]
