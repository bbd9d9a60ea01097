"""CTC decoders of others on the same frames, n-gram and lexicon.

pyctcdecode, flashlight-text and torchaudio read the n-gram and the lexicon, kaldi-decoder and k2 our decoding graph,
which holds both. sherpa-onnx searches graphs by kaldi-decoder. Each raises ImportError where it is not installed.
"""

from __future__ import annotations

import importlib
import io
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.ctc import CTCTokens
from asr.graph.decoding_graph import DecodingGraph
from asr.graph.topology import with_last_boundary
from asr.testing.kaldi_search import KaldiSearch

_LN_10 = math.log(10.0)
Decode = Callable[[Tensor], list[str]]


def pyctcdecode(
    tokens: CTCTokens, words: Sequence[str], arpa: Path, lm_scale: float, insertion: float, beam_width: int
) -> Decode:
    """pyctcdecode over letters or pieces."""
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
    """flashlight-text's lexicon decoder with KenLM."""
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


def torchaudio(
    tokens: CTCTokens,
    spellings: Mapping[str, Sequence[Sequence[str]]],
    arpa: Path,
    lm_scale: float,
    insertion: float,
    beam_size: int,
) -> Decode:
    """torchaudio's lexicon decoder with KenLM: flashlight-text, as torchaudio 0.13 has it built in."""
    package = importlib.import_module("torchaudio.models.decoder")
    boundary = tokens.word_boundary or tokens.symbols[tokens.blank_id]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as lexicon:
        for word, ways in spellings.items():
            for way in ways:
                lexicon.write(f"{word} {' '.join(way)}\n")
        lexicon.flush()
        decoder = package.ctc_decoder(
            lexicon=lexicon.name,
            tokens=list(tokens.symbols),
            lm=str(arpa),
            beam_size=beam_size,
            beam_threshold=25.0,
            lm_weight=lm_scale * _LN_10,
            word_score=insertion,
            blank_token=tokens.symbols[tokens.blank_id],
            sil_token=boundary,
        )

    def decode(log_prob: Tensor) -> list[str]:
        found = decoder(log_prob[None])[0]
        return list(found[0].words) if found else []

    return decode


def kaldi(tokens: CTCTokens, graph: DecodingGraph, lm_scale: float, insertion: float, beam: float, most: int) -> Decode:
    """Kaldi's FasterDecoder on our graph, as sherpa-onnx uses it."""
    search = KaldiSearch(_scaled(graph, lm_scale, insertion), beam, most, min(30, most))

    def decode(log_prob: Tensor) -> list[str]:
        found = search.decode(_with_boundary(tokens, log_prob))
        return [] if found is None else _words_of(graph, found[0])

    return decode


def k2(tokens: CTCTokens, graph: DecodingGraph, lm_scale: float, insertion: float, beam: float, most: int) -> Decode:
    """k2's pruned intersection with our graph, and the best path of its lattice."""
    package = importlib.import_module("k2")
    to_k2: Any = importlib.import_module("asr.decoding.k2").to_k2
    fsa = package.create_fsa_vec([to_k2(_scaled(graph, lm_scale, insertion))])

    def decode(log_prob: Tensor) -> list[str]:
        log_prob = _with_boundary(tokens, log_prob)
        segments = torch.tensor([[0, 0, len(log_prob)]], dtype=torch.int32)
        frames = package.DenseFsaVec(log_prob[None], segments)
        lattice = package.intersect_dense_pruned(fsa, frames, beam, beam, min(30, most), most)
        best = package.shortest_path(lattice, use_double_scores=True)
        arcs = best.arc_idx
        return _words_of(graph, arcs[arcs >= 0].long())

    return decode


def _scaled(graph: DecodingGraph, lm_scale: float, insertion: float) -> DecodingGraph:
    score = graph.score * lm_scale + insertion * graph.word_begin.diff()
    return replace(graph, score=score, final_score=graph.final_score * lm_scale)


def _with_boundary(tokens: CTCTokens, log_prob: Tensor) -> Tensor:
    """The columns as the graph numbers them, with the boundary that ends the last word."""
    log_prob = log_prob[:, torch.tensor(tokens.columns)]
    return with_last_boundary(log_prob[None], torch.tensor([len(log_prob)]), tokens.boundary_id)[0][0].contiguous()


def _words_of(graph: DecodingGraph, arcs: Tensor) -> list[str]:
    begin, ids = graph.word_begin.tolist(), graph.word_id
    words = graph.vocabulary.words
    return [words[int(word)] for arc in arcs.tolist() for word in ids[begin[arc] : begin[arc + 1]]]
