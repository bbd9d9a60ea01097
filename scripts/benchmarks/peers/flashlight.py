"""flashlight-text's lexicon decoder with KenLM, as a peer: the same frames, lexicon and n-gram, no graph."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from asr.decoding.interface import DecodingOptions
from asr.graph.decoding_graph import DecodingGraph
from asr.text.lexicon import Lexicon

_NATS_OF_LOG10 = 2.302585


class FlashlightSearch:
    """Beam search over a lexicon tree, words scored by an ARPA file; raises ImportError where it is not installed.

    Args:
        graph: whose tokens and words are used; words that the lexicon lacks are left out.
        lexicon: pronunciations.
        arpa: the n-gram model.
        options: am_scale and search_beam.
        beam_size: hypotheses a frame.
    """

    def __init__(
        self, graph: DecodingGraph, lexicon: Lexicon, arpa: Path, options: DecodingOptions, beam_size: int
    ) -> None:
        from flashlight.lib.text import decoder
        from flashlight.lib.text.decoder.kenlm import KenLM
        from flashlight.lib.text.dictionary import Dictionary

        words = [word for word in graph.vocabulary.words if word in lexicon]
        self._words = Dictionary()
        for word in [*words, "<unk>"]:
            self._words.add_entry(word)
        unk = self._words.get_index("<unk>")
        self._words.set_default_index(unk)
        lm = KenLM(str(arpa), self._words)
        trie, start = decoder.Trie(len(graph.tokens), 0), lm.start(False)
        for word in words:
            index = self._words.get_index(word)
            for phones in lexicon[word]:
                trie.insert([int(token) for token in graph.tokens.ids_of(phones)], index, lm.score(start, index)[1])
        trie.smear(decoder.SmearingMode.MAX)
        flashlight_options = decoder.LexiconDecoderOptions(
            beam_size=beam_size,
            beam_size_token=len(graph.tokens),
            beam_threshold=options.search_beam / options.am_scale,
            lm_weight=_NATS_OF_LOG10 / options.am_scale,
            word_score=0.0,
            unk_score=-1e9,
            sil_score=0.0,
            log_add=False,
            criterion_type=decoder.CriterionType.CTC,
        )
        self._decoder = decoder.LexiconDecoder(flashlight_options, trie, lm, 0, 0, unk, [], False)

    def decode(self, log_prob: Tensor) -> list[str]:
        """log_prob (T, C) float32 -> the best words."""
        log_prob = log_prob.contiguous()
        results = self._decoder.decode(log_prob.data_ptr(), *log_prob.shape)
        return [self._words.get_entry(word) for word in results[0].words if word >= 0] if results else []
