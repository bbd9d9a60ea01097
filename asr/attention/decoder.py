"""`AttentionDecoder`: turns the encoder's output of any attention-based encoder-decoder into words.

Times of tokens come from the decoder's attention: each frame belongs to one token, tokens follow one another, and the
sum of the frames' weights for their tokens is as large as possible. This is dynamic time warping over cross-attention
weights, as in Whisper (Radford et al., Robust speech recognition via large-scale weak supervision, 2022, and its
implementation).

Shapes: N utterances, T frames, E encoder dimensions, H heads, U tokens of a text, R rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asr.attention.search import AttentionBeam, AttentionDecodingConfig
from asr.fusion.beam import Fusion
from asr.fusion.decoder import FusionDecoder, Text
from asr.fusion.interface import Finished, FloatArray, IntArray
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
        if self._reads_alone(num_frames):
            parts = zip(encoded, num_frames.tolist(), strict=True)
            return [self.search(lm, each[None, :num], np.array([num]))[0] for each, num in parts]
        fusion = Fusion(self.scores, self.config, lm)
        return AttentionBeam(self.network, fusion, self.config, len(encoded)).search(encoded, num_frames)

    def _reads_alone(self, num_frames: IntArray) -> bool:
        return len(set(num_frames.tolist())) > 1 and not self.network.reads_lengths

    def timed(self, texts: list[list[Text]], encoded: Tensor, num_frames: IntArray) -> list[list[Text]]:
        found: list[list[Text]] = [[] for _ in texts]
        for rank in range(max(map(len, texts), default=0)):
            utts = [utt for utt, own in enumerate(texts) if rank < len(own)]
            best = [texts[utt][rank].best for utt in utts]
            spans = self._spans(encoded[utts], num_frames[utts], [each.entries for each in best])
            for utt, each, (begin, end) in zip(utts, best, spans, strict=True):
                found[utt].append(texts[utt][rank]._replace(best=each._replace(begin=begin, end=end)))
        return found

    def _spans(self, encoded: Tensor, num_frames: IntArray, entries: list[IntArray]) -> list[tuple[IntArray, IntArray]]:
        """The first frame of each token and the one after its last, of each text."""
        if self._reads_alone(num_frames):
            parts = zip(encoded, num_frames.tolist(), entries, strict=True)
            return [self._spans(each[None, :num], np.array([num]), [own])[0] for each, num, own in parts]
        network, frames = self.network, torch.from_numpy(num_frames).clamp(min=1)
        columns = np.array(network.tokens.columns, dtype=np.int64)
        texts = [torch.from_numpy(columns[own]) for own in entries]
        token = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=network.tokens.blank_id)
        weight = network.attention(encoded, frames, network.prompt(encoded, frames), token.to(network.device))
        if weight is None:
            return [evenly(len(own), int(num)) for own, num in zip(entries, num_frames, strict=True)]
        parts = zip(weight.unbind(1), entries, num_frames.tolist(), strict=True)
        return [token_spans(own[:, : len(text) + 1, :num]) for own, text, num in parts]


def token_spans(weight: Tensor) -> tuple[IntArray, IntArray]:
    """The first frame of each token and the one after its last, (U,) each.

    Args:
        weight: (H, U + 1, T), of each head, for each token and the end of the text.
    """
    num_tokens, num_frames = weight.shape[1] - 1, weight.shape[2]
    if num_tokens >= num_frames:
        return evenly(num_tokens, num_frames)
    # Frames to which all tokens attend alike, such as the first, say nothing.
    mean, deviation = weight.mean(1, keepdim=True), weight.std(1, keepdim=True, unbiased=False)
    fit = ((weight - mean) / (deviation + torch.finfo(weight.dtype).eps)).mean(0)
    begin = best_path(fit.double().cpu().numpy())
    return begin[:-1], begin[1:]


def best_path(fit: FloatArray) -> IntArray:
    """The first frame of each row, (R,), given how well rows and frames fit, (R, T); each row has a frame or more."""
    num_rows, num_frames = fit.shape
    total = np.full(num_rows, -np.inf)
    total[0] = fit[0, 0]
    moves = np.zeros((num_frames, num_rows), dtype=bool)
    for frame in range(1, num_frames):
        from_before = np.concatenate([[-np.inf], total[:-1]])
        moves[frame] = from_before > total
        total = np.maximum(total, from_before) + fit[:, frame]
    begin = np.zeros(num_rows, dtype=np.int64)
    row = num_rows - 1
    for frame in range(num_frames - 1, 0, -1):
        if moves[frame, row]:
            begin[row] = frame
            row -= 1
    return begin


def evenly(num_tokens: int, num_frames: int) -> tuple[IntArray, IntArray]:
    """Spans of equal length, for lack of better ones."""
    bound = np.arange(num_tokens + 1) * num_frames // max(1, num_tokens)
    return bound[:-1], bound[1:]
