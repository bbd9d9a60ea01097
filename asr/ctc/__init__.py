"""A decoder for any CTC network: turns log-probabilities of letters, word pieces or phones into words."""

from asr.ctc.decoder import CTCDecoder
from asr.ctc.interface import CTCDecodingConfig, CTCHypothesis, CTCToken, CTCWord
from asr.ctc.stream import CTCStream
from asr.text.ctc_tokens import CTCTokens

__all__ = ["CTCDecoder", "CTCDecodingConfig", "CTCHypothesis", "CTCStream", "CTCToken", "CTCTokens", "CTCWord"]
