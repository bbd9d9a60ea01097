"""CTC decoders without a word list at small beams: the same frames, with an n-gram model of tokens and without one.

    scripts/bench ctc --lexicon-free

Each decoder may find any sequence of tokens; text between word boundaries is a word. The n-gram model is of order 6 for
letters and 3 for pieces, estimated from the transcripts of train-clean-100; its scale is 0.5. Thresholds are those that
each decoder has by default. pyctcdecode has no models of tokens. All decoders add up the paths of a text:
flashlight-text, and torchaudio's decoder, which wraps it, by `log_add`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import lzma
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from asr.ctc import CTCDecoder, CTCTokens
from asr.ctc.pyctcdecode import build_ctcdecoder
from asr.lm.corpus import read_word_stream
from asr.lm.ngram.arpa import write_arpa
from asr.lm.ngram.estimate import estimate_kneser_ney
from scripts.benchmarks.ctc_workload import CTCWorkload
from scripts.benchmarks.inputs import cache_folder
from scripts.benchmarks.peers import ctc as peers

BEAMS = (2, 5, 10, 20, 50, 100)
LM_SCALE = 0.5
_ORDERS = {"letters": 6, "pieces": 3}
_TRANSCRIPTS = Path("text", "train-clean-100.text.xz")
_LN_10 = math.log(10.0)
Decode = Callable[[Tensor], list[str]]


def systems(workload: CTCWorkload, corpora: Path) -> list[tuple[str, str, Callable[[], Decode]]]:
    """Name, beam, and what makes each decoder."""
    arpa = token_model(workload.tokens, corpora)
    found = []
    for beam in BEAMS:
        for name, make in (
            ("ours", functools.partial(ours, workload.tokens, None, beam)),
            ("ours, as pyctcdecode", functools.partial(ours_as_pyctcdecode, workload.tokens, beam)),
            ("pyctcdecode", functools.partial(pyctcdecode, workload.tokens, beam)),
            ("flashlight", functools.partial(flashlight, workload.tokens, None, beam)),
            ("ours, n-gram", functools.partial(ours, workload.tokens, arpa, beam)),
            ("flashlight, n-gram", functools.partial(flashlight, workload.tokens, arpa, beam)),
            ("torchaudio, n-gram", functools.partial(torchaudio, workload.tokens, arpa, beam)),
        ):
            found.append((name, str(beam), make))
    return found


def token_model(tokens: CTCTokens, corpora: Path) -> Path:
    """The n-gram model of tokens, estimated on the first call."""
    arpa = cache_folder() / "ctc_free" / f"{tokens.kind}.arpa"
    if not arpa.is_file():
        arpa.parent.mkdir(parents=True, exist_ok=True)
        text = arpa.with_suffix(".txt")
        with lzma.open(corpora / _TRANSCRIPTS, "rt") as lines, text.open("w") as spelled:
            for line in lines:
                ways = [tokens.spell(word) for word in line.split()[1:]]
                if all(ways):
                    spelled.write(" ".join(symbol for way in ways for symbol in way[0]) + "\n")
        write_arpa(estimate_kneser_ney(read_word_stream([text]), _ORDERS[tokens.kind]).trie, arpa)
    return arpa


def ours(tokens: CTCTokens, arpa: Path | None, beam: int) -> Decode:
    """Our prefix beam search."""
    settings = {} if arpa is None else {"token_lm": arpa, "lm_scale": LM_SCALE}
    decoder = CTCDecoder(tokens, beam_size=beam, warm_up=False, **settings)  # type: ignore[arg-type]

    def decode(log_prob: Tensor) -> list[str]:
        (best,) = decoder(log_prob)
        return best.text.split()  # type: ignore[union-attr]

    return decode


def ours_as_pyctcdecode(tokens: CTCTokens, beam: int) -> Decode:
    """Our replacement of pyctcdecode, with its thresholds."""
    decoder = build_ctcdecoder(peers.labels_of(tokens))
    return lambda log_prob: decoder.decode(log_prob, beam_width=beam).split()


def pyctcdecode(tokens: CTCTokens, beam: int) -> Decode:
    """pyctcdecode without a language model."""
    decoder = importlib.import_module("pyctcdecode").build_ctcdecoder(peers.labels_of(tokens))
    return lambda log_prob: list(decoder.decode(log_prob.numpy(), beam_width=beam).split())


def flashlight(tokens: CTCTokens, arpa: Path | None, beam: int) -> Decode:
    """flashlight-text's decoder without a lexicon, with KenLM or without a model."""
    text = importlib.import_module("flashlight.lib.text.decoder")
    dictionary = importlib.import_module("flashlight.lib.text.dictionary").Dictionary()
    for symbol in tokens.symbols:
        dictionary.add_entry(symbol)
    if arpa is None:
        lm = text.ZeroLM()
    else:
        lm = importlib.import_module("flashlight.lib.text.decoder.kenlm").KenLM(str(arpa), dictionary)
    boundary = tokens.blank_id if tokens.word_boundary is None else tokens.symbols.index(tokens.word_boundary)
    options = text.LexiconFreeDecoderOptions(
        beam_size=beam,
        beam_size_token=len(tokens),
        beam_threshold=25.0,
        lm_weight=LM_SCALE * _LN_10,
        sil_score=0.0,
        log_add=True,
        criterion_type=text.CriterionType.CTC,
    )
    decoder: Any = text.LexiconFreeDecoder(options, lm, boundary, tokens.blank_id, [])

    def decode(log_prob: Tensor) -> list[str]:
        log_prob = log_prob.contiguous()
        results = decoder.decode(log_prob.data_ptr(), *log_prob.shape)
        # A token for each frame.
        return words_of(tokens, [token for token, _ in itertools.groupby(results[0].tokens)]) if results else []

    return decode


def torchaudio(tokens: CTCTokens, arpa: Path, beam: int) -> Decode:
    """torchaudio's decoder without a lexicon."""
    package = importlib.import_module("torchaudio.models.decoder")
    # Without this list, torchaudio numbers the model's words in another order than the tokens.
    in_order = arpa.with_suffix(".words")
    in_order.write_text("".join(f"{symbol}\n" for symbol in tokens.symbols), encoding="utf-8")
    decoder = package.ctc_decoder(
        lexicon=None,
        tokens=list(tokens.symbols),
        lm=str(arpa),
        lm_dict=str(in_order),
        beam_size=beam,
        beam_threshold=25.0,
        lm_weight=LM_SCALE * _LN_10,
        log_add=True,
        blank_token=tokens.symbols[tokens.blank_id],
        sil_token=tokens.word_boundary or tokens.symbols[tokens.blank_id],
    )

    def decode(log_prob: Tensor) -> list[str]:
        found = decoder(log_prob[None])[0]
        return words_of(tokens, found[0].tokens.tolist()) if found else []

    return decode


def words_of(tokens: CTCTokens, columns: list[int]) -> list[str]:
    """The words of a sequence of tokens."""
    text = "".join(tokens.symbols[column] for column in columns if column != tokens.blank_id)
    return text.replace("▁", " ").replace(tokens.word_boundary or " ", " ").split()
