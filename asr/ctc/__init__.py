"""A decoder for any CTC network: turns log-probabilities of letters, word pieces or phones into words."""

from asr.ctc.config import CTCDecodingConfig
from asr.ctc.decoder import CTCDecoder
from asr.ctc.hypothesis import CTCHypothesis, CTCToken, CTCWord
from asr.ctc.stream import CTCStream
from asr.text.ctc_tokens import CTCTokens

__all__ = ["CTCDecoder", "CTCDecodingConfig", "CTCHypothesis", "CTCStream", "CTCToken", "CTCTokens", "CTCWord"]
