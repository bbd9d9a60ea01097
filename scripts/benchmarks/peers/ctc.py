"""CTC decoders of others on the same frames, n-gram and lexicon: pyctcdecode, flashlight-text, torchaudio."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from torch import Tensor

from asr.ctc import CTCTokens

_LN_10 = math.log(10.0)
Decode = Callable[[Tensor], list[str]]


def pyctcdecode(
    tokens: CTCTokens, words: Sequence[str], arpa: Path, lm_scale: float, insertion: float, beam_width: int
) -> Decode:
    """pyctcdecode over letters or pieces; raises ImportError where it is not installed."""
    package = importlib.import_module("pyctcdecode")
    labels = ["" if column == tokens.blank_id else symbol for column, symbol in enumerate(tokens.symbols)]
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        decoder = package.build_ctcdecoder(labels, str(arpa), list(words), alpha=lm_scale, beta=insertion)

    def decode(log_prob: Tensor) -> list[str]:
        text: str = decoder.decode(log_prob.numpy(), beam_width=beam_width)
        return text.split()

    return decode


def flashlight(
    tokens: CTCTokens,
    spellings: Mapping[str, Sequence[Sequence[str]]],
    arpa: Path,
    lm_scale: float,
    insertion: float,
    beam_size: int,
) -> Decode:
    """flashlight-text's lexicon decoder with KenLM; raises ImportError where it is not installed."""
    text = importlib.import_module("flashlight.lib.text.decoder")
    ken = importlib.import_module("flashlight.lib.text.decoder.kenlm")
    dictionary = importlib.import_module("flashlight.lib.text.dictionary")
    entries = dictionary.Dictionary()
    for word in [*spellings, "<unk>"]:
        entries.add_entry(word)
    unk = entries.get_index("<unk>")
    entries.set_default_index(unk)
    lm = ken.KenLM(str(arpa), entries)
    silence = tokens.symbols.index(tokens.word_boundary) if tokens.word_boundary is not None else tokens.blank_id
    trie, start = text.Trie(len(tokens), silence), lm.start(False)
    for word, ways in spellings.items():
        index = entries.get_index(word)
        score = lm.score(start, index)[1]
        for way in ways:
            trie.insert([tokens.columns[tokens.table.id_of(symbol)] for symbol in way], index, score)
    trie.smear(text.SmearingMode.MAX)
    options = text.LexiconDecoderOptions(
        beam_size=beam_size,
        beam_size_token=len(tokens),
        beam_threshold=25.0,
        lm_weight=lm_scale * _LN_10,
        word_score=insertion,
        unk_score=-math.inf,
        sil_score=0.0,
        log_add=False,
        criterion_type=text.CriterionType.CTC,
    )
    decoder: Any = text.LexiconDecoder(options, trie, lm, silence, tokens.blank_id, unk, [], False)

    def decode(log_prob: Tensor) -> list[str]:
        log_prob = log_prob.contiguous()
        results = decoder.decode(log_prob.data_ptr(), *log_prob.shape)
        return [entries.get_entry(word) for word in results[0].words if word >= 0] if results else []

    return decode
