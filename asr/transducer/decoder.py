"""`TransducerDecoder`: turns the encoder's output of any transducer into words."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asr.ctc.interface import CTCHypothesis, no_hypothesis
from asr.errors import AsrError
from asr.fusion.beam import Fusion
from asr.fusion.decoder import FusionDecoder, Text, as_batch
from asr.fusion.interface import Finished, IntArray
from asr.kernels.memory import no_autograd
from asr.lm.interface import LanguageModel
from asr.models.transducers import Transducer
from asr.transducer.search import TransducerBeam, TransducerDecodingConfig


class TransducerDecoder(FusionDecoder):
    """Decodes a transducer; several threads may call it at the same time.

        network = load_transducer("transformers:nvidia/parakeet-tdt-0.6b-v3")
        decoder = TransducerDecoder(network, ngram="4gram.arpa", lm="transformers:gpt2")
        print(decoder(*network(waveform, 16000))[0][0].text)

    The search (`asr.transducer.search`) finds any sequence of tokens. A language model scores each word as soon as it
    is finished, and an unfinished one by the best unigram of the words that it may become. Arguments are those of
    `asr.fusion.decoder.FusionDecoder`; settings are the fields of `TransducerDecodingConfig`.
    """

    network: Transducer
    config: TransducerDecodingConfig
    config_type = TransducerDecodingConfig
    network_type = Transducer
    example = 'a transducer, such as load_transducer("transformers:...")'

    def search(self, lm: LanguageModel | None, encoded: Tensor, num_frames: IntArray) -> list[list[Finished]]:
        beam = self.begin(lm, len(encoded), keeps_pruned=True)
        beam.advance(encoded, num_frames)
        return beam.finished()

    def begin(self, lm: LanguageModel | None, num_utts: int, keeps_pruned: bool = False) -> TransducerBeam:
        """A new search of some utterances; arguments as for `TransducerBeam`."""
        fusion = Fusion(self.scores, self.config, lm)
        return TransducerBeam(self.network, fusion, self.config, num_utts, keeps_pruned=keeps_pruned)

    def stream(self, confidences: bool = False) -> TransducerStream:
        """Opens a stream, which accepts the encoder's frames as they arrive.

        Args:
            confidences: whether the words of `finish` have confidences; the memory of the stream then grows with its
                length.
        """
        return TransducerStream(self, confidences)


class TransducerStream:
    """Decodes one utterance in chunks of any size; made by `TransducerDecoder.stream`.

    Args:
        decoder: the decoder.
        confidences: as for `TransducerDecoder.stream`.
    """

    def __init__(self, decoder: TransducerDecoder, confidences: bool = False) -> None:
        self._decoder = decoder
        self._loan = decoder.models.loan()
        with self._loan.turn():
            self._beam = decoder.begin(self._loan.model, 1, confidences)
        self._is_open = True

    @property
    def num_frames(self) -> int:
        """The number of frames read so far."""
        return self._beam.num_frames

    @no_autograd()
    def accept(self, encoded: Any) -> None:
        """Reads the next frames of the encoder's output, (T, E); T may be 0.

        Raises:
            AsrError: the shape is wrong, values are NaN or infinite, or the stream has ended.
        """
        self._require_open()
        values, num_frames, is_single = as_batch(encoded, None)
        if not is_single:
            raise AsrError("a stream reads one utterance; give (frames, dimensions), and open a stream for each one.")
        with self._loan.turn():
            self._beam.advance(values.to(self._decoder.network.device), num_frames)

    def partial(self) -> CTCHypothesis:
        """The best hypothesis so far."""
        self._require_open()
        best = self._beam.best()
        return no_hypothesis() if best is None else self._decoder.hypothesis(Text(best, best.total), is_complete=False)

    @property
    def num_stable_words(self) -> int:
        """The number of leading words of `partial` that can no longer change."""
        self._require_open()
        # The last of them may still grow.
        return max(0, len(self._decoder.spans(self._beam.settled().tolist())) - 1)

    def finish(self) -> CTCHypothesis:
        """Ends the stream and returns the best hypothesis."""
        self._require_open()
        self._is_open = False
        with self._loan.turn():
            found = self._decoder.hypotheses(self._decoder.best_texts(self._beam.finished()[0], 1))[0]
            del self._beam
            self._loan.give_back()
        return found

    def _require_open(self) -> None:
        if not self._is_open:
            raise AsrError("the stream has ended; open another one.")
