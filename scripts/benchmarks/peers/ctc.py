"""CTC decoders of others on the same frames, n-gram and lexicon.

pyctcdecode, flashlight-text and torchaudio read the n-gram and the lexicon, kaldi-decoder, sherpa-onnx and k2 our
decoding graph, which holds both. Each function returns a function that makes a decoder with a given beam, and loads
them once for all beams, where the decoder allows that: torchaudio's and sherpa-onnx's load them with each beam. Each
raises ImportError where it is not installed.
"""

from __future__ import annotations

import copy
import functools
import importlib
import io
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.ctc import CTCTokens
from asr.graph.decoding_graph import DecodingGraph
from asr.graph.topology import with_last_boundary
from asr.testing.kaldi_search import KaldiSearch

_LN_10 = math.log(10.0)
_RATE, _SAMPLES_OF_A_FRAME, _FEWEST_FRAMES = 16000, 160, 10
Decode = Callable[[Tensor], list[str]]
WithBeam = Callable[..., Decode]


def pyctcdecode(tokens: CTCTokens, words: Sequence[str], arpa: Path, lm_scale: float, insertion: float) -> WithBeam:
    """pyctcdecode over letters or pieces; the beam is `beam_width`."""
    package = importlib.import_module("pyctcdecode")
    lm = copy.copy(_pyctcdecode_lm(tuple(words), arpa))
    lm.reset_params(alpha=lm_scale, beta=insertion)
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        decoder = package.BeamSearchDecoderCTC(package.Alphabet.build_alphabet(labels_of(tokens)), lm)

    def with_beam(beam_width: int) -> Decode:
        return lambda log_prob: list(decoder.decode(log_prob.numpy(), beam_width=beam_width).split())

    return with_beam


@functools.lru_cache(1)
def _pyctcdecode_lm(words: tuple[str, ...], arpa: Path) -> Any:
    """pyctcdecode's trie of words with KenLM, which does not depend on tokens and scales."""
    package, ken = importlib.import_module("pyctcdecode"), importlib.import_module("kenlm")
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        return package.LanguageModel(ken.Model(str(arpa)), words)


def labels_of(tokens: CTCTokens) -> list[str]:
    """The columns as pyctcdecode names them."""
    return ["" if column == tokens.blank_id else symbol for column, symbol in enumerate(tokens.symbols)]


def flashlight(
    tokens: CTCTokens,
    spellings: Mapping[str, Sequence[Sequence[str]]],
    arpa: Path,
    lm_scale: float,
    insertion: float,
) -> WithBeam:
    """flashlight-text's lexicon decoder with KenLM; the beam is `beam_size`."""
    text = importlib.import_module("flashlight.lib.text.decoder")
    entries, lm = _flashlight_lm(tuple(spellings), arpa)
    unk = entries.get_index("<unk>")
    silence = tokens.symbols.index(tokens.word_boundary) if tokens.word_boundary is not None else tokens.blank_id
    trie, start = text.Trie(len(tokens), silence), lm.start(False)
    for word, ways in spellings.items():
        index = entries.get_index(word)
        score = lm.score(start, index)[1]
        for way in ways:
            trie.insert([tokens.columns[tokens.table.id_of(symbol)] for symbol in way], index, score)
    trie.smear(text.SmearingMode.MAX)

    def with_beam(beam_size: int) -> Decode:
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

    return with_beam


@functools.lru_cache(1)
def _flashlight_lm(words: tuple[str, ...], arpa: Path) -> Any:
    """flashlight-text's numbers of words, and KenLM, which do not depend on tokens."""
    ken = importlib.import_module("flashlight.lib.text.decoder.kenlm")
    entries = importlib.import_module("flashlight.lib.text.dictionary").Dictionary()
    for word in [*words, "<unk>"]:
        entries.add_entry(word)
    entries.set_default_index(entries.get_index("<unk>"))
    return entries, ken.KenLM(str(arpa), entries)


def torchaudio(
    tokens: CTCTokens,
    spellings: Mapping[str, Sequence[Sequence[str]]],
    arpa: Path,
    lm_scale: float,
    insertion: float,
) -> WithBeam:
    """torchaudio's lexicon decoder with KenLM: flashlight-text, as torchaudio 0.13 has it built in."""
    package = importlib.import_module("torchaudio.models.decoder")
    boundary = tokens.word_boundary or tokens.symbols[tokens.blank_id]

    def with_beam(beam_size: int) -> Decode:
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

    return with_beam


def kaldi(tokens: CTCTokens, graph: DecodingGraph, lm_scale: float, insertion: float) -> WithBeam:
    """Kaldi's FasterDecoder on our graph, as sherpa-onnx uses it."""
    search = KaldiSearch(_scaled(graph, lm_scale, insertion))

    def with_beam(beam: float, most: int) -> Decode:
        own = search.with_beams(beam, most, min(30, most))

        def decode(log_prob: Tensor) -> list[str]:
            found = own.decode(_with_boundary(tokens, log_prob))
            return [] if found is None else _words_of(graph, found[0])

        return decode

    return with_beam


def sherpa(
    tokens: CTCTokens, graph: DecodingGraph, frames: Sequence[Tensor], lm_scale: float, insertion: float
) -> WithBeam:
    """sherpa-onnx's offline recognizer with our graph; its beam is fixed at 16, the number of states is not.

    It reads recordings only, so it runs a network whose outputs are the frames: a recording of silence says by its
    length which utterance's.
    """
    package = importlib.import_module("sherpa_onnx.offline_recognizer")
    all_frames = [_with_boundary(tokens, log_prob) for log_prob in frames]
    number_of = {log_prob.data_ptr(): number for number, log_prob in enumerate(frames)}
    fst = KaldiSearch(_scaled(graph, lm_scale, insertion)).fst

    def with_beam(most: int) -> Decode:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _save_network_of(all_frames, folder / "network.onnx")
            entries = [f"{symbol} {entry}\n" for entry, symbol in enumerate(graph.tokens.tokens)]
            (folder / "tokens.txt").write_text("".join(entries), encoding="utf-8")
            fst.write(str(folder / "graph.fst"))
            network = package.OfflineZipformerCtcModelConfig(model=str(folder / "network.onnx"))
            recognizer: Any = package._Recognizer(
                package.OfflineRecognizerConfig(
                    feat_config=package.FeatureExtractorConfig(),
                    model_config=package.OfflineModelConfig(
                        zipformer_ctc=network, tokens=str(folder / "tokens.txt"), num_threads=1
                    ),
                    ctc_fst_decoder_config=package.OfflineCtcFstDecoderConfig(str(folder / "graph.fst"), most),
                )
            )

        def decode(log_prob: Tensor) -> list[str]:
            stream = recognizer.create_stream()
            num_samples = _SAMPLES_OF_A_FRAME * (number_of[log_prob.data_ptr()] + _FEWEST_FRAMES)
            stream.accept_waveform(_RATE, [0.0] * num_samples)
            recognizer.decode_stream(stream)
            return _words_of(graph, torch.tensor(stream.result.words, dtype=torch.int64) - 1)

        return decode

    return with_beam


def _save_network_of(frames: Sequence[Tensor], path: Path) -> None:
    """Writes a network with icefall's inputs and outputs to an ONNX file; the number of features chooses the output."""
    onnx = importlib.import_module("onnx")
    helper, of_array = onnx.helper, onnx.numpy_helper.from_array
    begin = np.cumsum([0, *map(len, frames)])
    tables = {
        "frames": torch.cat(list(frames)).numpy(),
        "begins": begin[:-1],
        "lengths": np.diff(begin),
        "fewest": np.array([_FEWEST_FRAMES]),
        "first": np.array([0]),
    }
    nodes = [
        ("Sub", ["x_lens", "fewest"], ["number"]),
        ("Gather", ["begins", "number"], ["begin"]),
        ("Gather", ["lengths", "number"], ["log_probs_len"]),
        ("Add", ["begin", "log_probs_len"], ["end"]),
        ("Slice", ["frames", "begin", "end", "first"], ["chosen"]),
        ("Unsqueeze", ["chosen", "first"], ["log_probs"]),
    ]
    number, real = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node(*node) for node in nodes],
        "frames",
        [
            helper.make_tensor_value_info("x", real, ["N", "T", 80]),
            helper.make_tensor_value_info("x_lens", number, ["N"]),
        ],
        [
            helper.make_tensor_value_info("log_probs", real, ["N", "S", frames[0].shape[1]]),
            helper.make_tensor_value_info("log_probs_len", number, ["N"]),
        ],
        [of_array(table, name) for name, table in tables.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    helper.set_model_props(model, {"model_type": "zipformer2_ctc", "vocab_size": str(frames[0].shape[1])})
    onnx.save(model, str(path))


def k2(tokens: CTCTokens, graph: DecodingGraph, lm_scale: float, insertion: float) -> WithBeam:
    """k2's pruned intersection with our graph, and the best path of its lattice."""
    package = importlib.import_module("k2")
    to_k2: Any = importlib.import_module("asr.decoding.k2").to_k2
    fsa = package.create_fsa_vec([to_k2(_scaled(graph, lm_scale, insertion))])

    def with_beam(beam: float, most: int) -> Decode:
        def decode(log_prob: Tensor) -> list[str]:
            log_prob = _with_boundary(tokens, log_prob)
            segments = torch.tensor([[0, 0, len(log_prob)]], dtype=torch.int32)
            frames = package.DenseFsaVec(log_prob[None], segments)
            lattice = package.intersect_dense_pruned(fsa, frames, beam, beam, min(30, most), most)
            best = package.shortest_path(lattice, use_double_scores=True)
            arcs = best.arc_idx
            return _words_of(graph, arcs[arcs >= 0].long())

        return decode

    return with_beam


def _scaled(graph: DecodingGraph, lm_scale: float, insertion: float) -> DecodingGraph:
    score = graph.score * lm_scale + insertion * graph.word_begin.diff()
    return replace(graph, score=score, final_score=graph.final_score * lm_scale)


def _with_boundary(tokens: CTCTokens, log_prob: Tensor) -> Tensor:
    """The columns as the graph numbers them, with the boundary that ends the last word."""
    log_prob = log_prob[:, torch.tensor(tokens.columns)]
    return with_last_boundary(log_prob[None], torch.tensor([len(log_prob)]), tokens.boundary_id)[0][0].contiguous()


def _words_of(graph: DecodingGraph, arcs: Tensor) -> list[str]:
    begin, words = graph.word_begin, graph.vocabulary.words
    # Not the list of all words' places, which takes longer than the search.
    return [words[int(word)] for arc in arcs.tolist() for word in graph.word_id[begin[arc] : begin[arc + 1]]]
