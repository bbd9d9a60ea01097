"""Recognizes recordings with a transducer or an attention model: encoder, search and language models."""

from __future__ import annotations

import torch

from asr.ctc.recognizer import ExternalRecognizer
from asr.decoding.settings import ResourceOptions
from asr.decoding.warmup import query_many
from asr.errors import AsrError
from asr.fusion.decoder import FusionDecoder
from asr.kernels.memory import no_autograd
from asr.options import require_type


class FusionRecognizer(ExternalRecognizer):
    """Turns recordings into words.

        network = load_transducer("transformers:nvidia/parakeet-tdt-0.6b-v3")
        recognizer = TransducerRecognizer(TransducerDecoder(network, ngram="4gram.arpa"))
        print(recognizer("talk.mp3")[0].text)

    Args:
        decoder: the decoder, with its network.
        resources: as for `ExternalRecognizer`.

    Raises:
        AsrError: the decoder is of another type, or segments would be longer than the network can read.
    """

    decoder: FusionDecoder

    def __init__(self, decoder: FusionDecoder, resources: ResourceOptions | None = None) -> None:
        require_type(decoder, FusionDecoder, "decoder", "a TransducerDecoder or an AttentionDecoder")
        super().__init__(decoder.network, decoder, resources)
        most, longest = getattr(decoder.network, "max_seconds", None), self.resources.max_segment_seconds
        if most is not None and longest > most:
            raise AsrError(
                f"{decoder.network.name}: max_segment_seconds is {longest:g}, but the network reads at most {most:g} s "
                "at a time; give no more."
            )

    @property
    def device(self) -> torch.device:
        return self.decoder.network.device

    @no_autograd()
    def prepare(self) -> None:
        """Runs networks and language models once, which on a new machine compiles loops of the latter."""
        with self.decoder.models.lent() as lm:
            if lm is not None:
                query_many(lm)
                lm.retain(lm.start(0))
        # Not long enough to be taken for silence.
        self(0.01 * torch.randn(self.sampling_rate // 2, generator=torch.Generator().manual_seed(0)))
