"""Imports decoding graphs of icefall (HLG.pt), sherpa-onnx (HLG.fst), WeNet, EESEN (TLG.fst) and Kaldi (HCLG.fst).

Such a graph reads outputs of a network and outputs words. Its ids are defined in words.txt and, for a CTC network's
outputs, in tokens.txt. In k2, a label is a column of the network's output. In OpenFst, 0 is epsilon, so a label is the
column plus 1. An HCLG graph reads transition ids; the transition model maps them to outputs (pdfs).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph, graph_from_arrays
from asr.graph.epsilon_removal import remove_epsilons
from asr.graph.fst import INPUT_EPSILON, GraphArrays, Words, offsets
from asr.graph.openfst import is_openfst, read_openfst
from asr.graph.transition_model import is_transition_model, read_transition_pdfs
from asr.text.ctc_tokens import CTCTokens
from asr.text.documents import is_whole_number, read_text
from asr.text.symbols import BLANK, DISAMBIGUATION, EPSILON_ID, SPECIAL_WORDS, UNK_ID, TokenTable, Vocabulary
from asr.torch_archive import load_tensors, ragged_parts

TOPOLOGY = "imported"
"""`meta["topology"]` of imported graphs, whose topology is unknown."""

_FINAL_LABEL = -1  # of k2
_NO_WORDS = ("<eps>", "<s>", "</s>")
_BLANKS = ("<blk>", "<blank>", "<ctc_blank>")


def import_graph(path: str | Path, words: str | Path, tokens: str | Path) -> DecodingGraph:
    """Imports a graph that k2 or OpenFst wrote.

    Args:
        path: HLG.pt, written by `torch.save` of k2's `Fsa.as_dict()`, or a binary OpenFst file. No code in it is run.
        words: words.txt, `word id` on each line.
        tokens: tokens.txt, `token id` on each line: the outputs of the network, optionally with `<eps>` before and
            disambiguation symbols after them. For a graph of transition ids, Kaldi's model (final.mdl) or the output
            of `show-transitions`; the outputs are then named `<blk>` (pdf 0), `pdf_1`, `pdf_2` and so on.

    Raises:
        AsrError: a file cannot be read, or the files do not fit each other.
    """
    vocabulary, word_of = _vocabulary(words)
    table, entry = _outputs(tokens)
    arrays = _read(Path(path))
    ids = arrays.word_id
    known = np.append(word_of, -1)[np.minimum(ids, len(word_of))]
    if (known < 0).any():
        raise AsrError(
            f"{words}: there is no word {int(ids[known < 0][0])}, which {path} outputs; "
            "give the words.txt of this graph."
        )
    if len(arrays.label) and int(arrays.label.max()) >= len(entry):
        raise AsrError(
            f"{path}: the graph reads output {int(arrays.label.max())}, but {tokens} has outputs 0 to "
            f"{len(entry) - 1}; give the tokens of the graph's network. A graph of Kaldi's transition ids (HCLG.fst) "
            "needs its final.mdl instead, or the output of 'show-transitions phones.txt final.mdl'."
        )
    label = np.where(arrays.label == INPUT_EPSILON, INPUT_EPSILON, entry[np.maximum(arrays.label, 0)]).astype(np.int32)
    spoken = known != EPSILON_ID
    owner = np.repeat(np.arange(arrays.num_arcs), np.diff(arrays.word_begin))[spoken]
    spoken_words = Words(offsets(np.bincount(owner, minlength=arrays.num_arcs)), known[spoken].astype(np.int32))
    renamed = replace(arrays, label=label, word_begin=spoken_words.begin, word_id=spoken_words.word_id)
    try:
        finished = remove_epsilons(renamed).best_first().breadth_first()
    except AsrError as error:
        raise AsrError(f"{path}: {error}") from error
    meta = {"topology": TOPOLOGY, "source": Path(path).name}
    return graph_from_arrays(finished, table, vocabulary, meta)


def _vocabulary(path: str | Path) -> tuple[Vocabulary, npt.NDArray[np.int64]]:
    """The vocabulary, and the word id of each id in the file: 0 for symbols that are not words, -1 for unused ids."""
    listed = _symbols(path, "word")
    spoken = [word for word in listed if word not in SPECIAL_WORDS and not DISAMBIGUATION.match(word)]
    vocabulary = Vocabulary(spoken, name=str(path))
    known = {word: number for number, word in enumerate(vocabulary.words)} | {"<unk>": UNK_ID}
    ids = np.full(max(listed.values(), default=0) + 1, -1, dtype=np.int64)
    for word, number in listed.items():
        is_silent = word in _NO_WORDS or DISAMBIGUATION.match(word)
        ids[number] = EPSILON_ID if is_silent else known[word]
    return vocabulary, ids


def _outputs(path: str | Path) -> tuple[TokenTable, npt.NDArray[np.int32]]:
    """The network's outputs, and the output of each label of the graph; labels are counted from 0."""
    if is_transition_model(path):
        pdfs = read_transition_pdfs(path)[1:]
        names = [BLANK, *(f"pdf_{column}" for column in range(1, int(pdfs.max()) + 1))]
        return TokenTable(names, name=str(path)), pdfs
    tokens = _tokens(path)
    columns = np.array(tokens.columns)
    entry = np.empty(len(columns), dtype=np.int32)
    entry[columns] = np.arange(len(columns))
    return tokens.table, entry


def _tokens(path: str | Path) -> CTCTokens:
    """The network's outputs, without an `<eps>` that precedes the blank."""
    listed = {token: number for token, number in _symbols(path, "token").items() if not DISAMBIGUATION.match(token)}
    ordered = sorted(listed, key=lambda token: listed[token])
    begins_with_epsilon = ordered[:1] == ["<eps>"] and ordered[1:2] and ordered[1] in _BLANKS
    if begins_with_epsilon:
        del listed[ordered.pop(0)]
    first = int(bool(begins_with_epsilon))
    if [listed[token] for token in ordered] != list(range(first, first + len(ordered))):
        raise AsrError(f"{path}: the token ids must be {first}, {first + 1}, {first + 2}, ... without gaps.")
    tokens = CTCTokens(ordered)
    tokens.name = tokens.table.name = str(path)
    return tokens


def _symbols(path: str | Path, what: str) -> dict[str, int]:
    symbols: dict[str, int] = {}
    for number, line in enumerate(read_text(path, f"{what} list").splitlines(), start=1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 2 or not is_whole_number(fields[1]) or len(fields[1]) > 9:
            raise AsrError(f"{path}:{number}: expected '{what} id', as in Kaldi's {what}s.txt.")
        if fields[0] in symbols:
            raise AsrError(f"{path}:{number}: the {what} {fields[0]!r} occurs twice.")
        symbols[fields[0]] = int(fields[1])
    if not symbols:
        raise AsrError(f"{path}: the {what} list is empty.")
    return symbols


def _read(path: Path) -> GraphArrays:
    """Reads a graph; labels are columns of the network's output or -1 for epsilon, word ids are those of the file."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise AsrError(f"{path}: the graph cannot be read ({error.strerror}).") from error
    if head == b"PK\x03\x04":
        return _read_k2(path)
    if not is_openfst(head):
        raise AsrError(
            f"{path}: this is neither an HLG.pt file of k2 nor a binary OpenFst file; compile text with `fstcompile`."
        )
    fst = read_openfst(path)
    if len(fst.input_label) and min(int(fst.input_label.min()), int(fst.output_label.min())) < 0:
        raise AsrError(f"{path}: the transducer has labels below 0; the file is damaged.")
    return GraphArrays.from_transducer(fst, (fst.input_label - 1).astype(np.int32))


def _read_k2(path: Path) -> GraphArrays:
    """Reads a k2 graph. Its final arcs, which have the label -1 and lead to the last state, become final scores."""
    try:
        content = load_tensors(path, states_of=["_k2.ragged RaggedTensor", "k2.symbol_table SymbolTable"])
    except (OSError, UnpicklingError) as error:
        raise AsrError(f"{path}: this is not a k2 graph, or it is damaged ({error}).") from error
    arcs = content.get("arcs") if isinstance(content, dict) else None
    if not isinstance(arcs, torch.Tensor) or arcs.dtype != torch.int32 or arcs.dim() != 2 or arcs.shape[1] != 4:
        raise AsrError(f"{path}: this is not a k2 graph: it has no 'arcs' of four integers each.")
    if not len(arcs):
        raise AsrError(f"{path}: the graph is empty.")
    values = arcs.numpy()
    src_state, dst_state, label = values[:, 0], values[:, 1], values[:, 2]
    score = np.ascontiguousarray(values[:, 3]).view(np.float32)
    num_states = int(max(src_state.max(), dst_state.max())) + 1
    if min(int(src_state.min()), int(dst_state.min())) < 0 or int(label.min()) < _FINAL_LABEL or np.isnan(score).any():
        raise AsrError(f"{path}: a state, a label or a score is out of range; the file is damaged.")
    if num_states > len(arcs) + 1:
        raise AsrError(f"{path}: some states have no arcs; the file is damaged.")
    words = _k2_words(content.get("aux_labels"), len(arcs), path)
    ends = label == _FINAL_LABEL
    if words.counts[ends].any():
        raise AsrError(f"{path}: final arcs have words, which a decoding graph does not allow.")
    final_score = np.full(num_states, -np.inf, dtype=np.float32)
    np.maximum.at(final_score, src_state[ends], score[ends])
    inner = np.flatnonzero(~ends & (score > -np.inf))
    return GraphArrays.from_arcs(
        src_state[inner], dst_state[inner], label[inner], score[inner], words.take(inner), final_score
    )


def _k2_words(labels: Any, num_arcs: int, path: Path) -> Words:
    """The words of each arc, from a tensor of one each or from a ragged tensor."""
    if isinstance(labels, torch.Tensor) and labels.shape == (num_arcs,) and not labels.is_floating_point():
        return Words.single(np.maximum(labels.numpy(), 0))
    parts = ragged_parts(labels, num_arcs)
    if parts is None:
        raise AsrError(f"{path}: the words ('aux_labels') must be one number or one list for each arc.")
    begin, values = (part.numpy() for part in parts)
    owner = np.repeat(np.arange(num_arcs), np.diff(begin))[values > 0]
    return Words(offsets(np.bincount(owner, minlength=num_arcs)), values[values > 0].astype(np.int32))
