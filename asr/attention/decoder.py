"""`AttentionDecoder`: turns the encoder's output of any attention-based encoder-decoder into words."""

from __future__ import annotations

from torch import Tensor

from asr.attention.interface import AttentionDecodingConfig
from asr.attention.search import AttentionBeam
from asr.fusion.beam import Fusion
from asr.fusion.decoder import FusionDecoder
from asr.fusion.interface import Finished, IntArray
from asr.lm.interface import LanguageModel
from asr.models.attention import AttentionModel


class AttentionDecoder(FusionDecoder):
    """Decodes an attention-based encoder-decoder; several threads may call it at the same time.

        model = load_attention_model("transformers:openai/whisper-small")
        decoder = AttentionDecoder(model, ngram="4gram.arpa", hot_words=["Kensho"])
        print(decoder(*model(waveform, 16000))[0][0].text)

    The search (`asr.attention.search`) finds any sequence of tokens. A language model scores each word as soon as it is
    finished, and an unfinished one by the best unigram of the words that it may become. Arguments are those of
    `asr.fusion.decoder.FusionDecoder`; settings are the fields of `AttentionDecodingConfig`.
    """

    network: AttentionModel
    config: AttentionDecodingConfig
    config_type = AttentionDecodingConfig
    network_type = AttentionModel
    example = 'an attention model, such as load_attention_model("transformers:...")'

    def search(self, lm: LanguageModel | None, encoded: Tensor, num_frames: IntArray) -> list[list[Finished]]:
        fusion = Fusion(self.scores, self.config, lm)
        return AttentionBeam(self.network, fusion, self.config).search(encoded, num_frames)

    def rank(self, total: float, num_tokens: int) -> float:
        return self.config.rank(total, num_tokens)
