"""The decoding graph as both first passes load it: tensors, the tokens it reads and the words it writes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from asr.errors import AsrError
from asr.graph.compact import finish, unpack
from asr.graph.epsilon_removal import remove_epsilons
from asr.graph.graph_arrays import INPUT_EPSILON, GraphArrays
from asr.graph.validation import TENSOR_DTYPES, require_valid_tensors
from asr.text.tokens import TokenTable
from asr.text.vocabulary import SPECIAL_WORDS, Vocabulary

FORMAT = "asr decoding graph"
VERSION = 1


@dataclass(frozen=True, eq=False)
class DecodingGraph:
    """A weighted transducer from frames to words, arcs sorted by source state (CSR order); state 0 is the start.

    Shapes: S states, A arcs, W words on all arcs together.

    Args:
        arc_begin: (S + 1,) int64; the arcs of state s are `arc_begin[s] : arc_begin[s + 1]`.
        dst_state: (A,) int32, where an arc leads.
        token_id: (A,) int32, the column of the acoustic model's `log_prob` that an arc reads, 0 being the blank;
            -1 reads nothing and stands only in graphs with `has_epsilons`.
        score: (A,) float32, natural log, higher is better.
        word_begin: (A + 1,) int64; the words of arc a are `word_id[word_begin[a] : word_begin[a + 1]]`.
        word_id: (W,) int32, ids of `vocabulary`; an arc has none, one or several.
        final_score: (S,) float32, -inf where a path may not end.
        tokens: the acoustic model's output symbols.
        vocabulary: the words.
        meta: how the graph was made: topology, order of its language model and so on; JSON values only.
    """

    arc_begin: Tensor
    dst_state: Tensor
    token_id: Tensor
    score: Tensor
    word_begin: Tensor
    word_id: Tensor
    final_score: Tensor
    tokens: TokenTable
    vocabulary: Vocabulary
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def start_state(self) -> int:
        return 0

    @property
    def num_states(self) -> int:
        return self.final_score.numel()

    @property
    def num_arcs(self) -> int:
        return self.dst_state.numel()

    @property
    def has_epsilons(self) -> bool:
        """Whether some arc reads no frame."""
        return bool(self.token_id.eq(INPUT_EPSILON).any())

    @property
    def device(self) -> torch.device:
        return self.score.device

    def src_state(self) -> Tensor:
        """The state that each arc leaves, (A,) int32."""
        states = torch.arange(self.num_states, dtype=torch.int32, device=self.device)
        return torch.repeat_interleave(states, self.arc_begin[1:] - self.arc_begin[:-1])

    def to(self, device: torch.device | str) -> DecodingGraph:
        """The same graph on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in TENSOR_DTYPES})

    def remove_epsilons(self) -> DecodingGraph:
        """An equivalent graph in which every arc reads a frame, as k2 needs it."""
        values = {name: getattr(self, name).cpu().numpy() for name in TENSOR_DTYPES}
        arrays = remove_epsilons(GraphArrays(label=values.pop("token_id"), **values))
        return graph_from_arrays(arrays, self.tokens, self.vocabulary, self.meta).to(self.device)

    def require_tokens(self, tokens: TokenTable) -> None:
        """Refuses an acoustic model whose columns mean something else.

        Raises:
            AsrError: the graph reads other tokens than `tokens`.
        """
        if tokens == self.tokens:
            return
        ours, theirs = self.tokens.tokens, tokens.tokens
        if len(ours) != len(theirs):
            difference = f"it reads {len(ours)} tokens, the acoustic model has {len(theirs)}"
        else:
            column = next(i for i, (our, their) in enumerate(zip(ours, theirs, strict=True)) if our != their)
            difference = f"column {column} is {ours[column]!r} to it and {theirs[column]!r} to the acoustic model"
        raise AsrError(
            f"The decoding graph was built for other tokens: {difference}; build it again with this model's tokens."
        )

    def validate(self, name: str = "decoding graph") -> None:
        """Checks everything that the first passes rely on.

        Raises:
            AsrError: a tensor has a wrong type or size, an index points outside, or no path can end.
        """
        tensors = {tensor_name: getattr(self, tensor_name) for tensor_name in TENSOR_DTYPES}
        require_valid_tensors(tensors, len(self.tokens), len(self.vocabulary), name)

    def save(self, path: str | Path) -> None:
        """Writes the graph as it is, one safetensors file with a JSON header; `PhoneGraph.save` writes less."""
        tensors = {name: getattr(self, name).cpu().contiguous() for name in TENSOR_DTYPES}
        write_graph_file(path, "frames", tensors, self.tokens, self.vocabulary, self.meta)

    @classmethod
    def load(cls, path: str | Path, tokens: TokenTable | None = None) -> DecodingGraph:
        """Reads a graph and checks it.

        Args:
            path: what `save` or `PhoneGraph.save` wrote.
            tokens: the acoustic model's tokens, if the graph shall fit them.

        Raises:
            AsrError: the file is missing, damaged, not a graph, of another version, or made for other tokens.
        """
        header, tensors = _read(Path(path))
        table = TokenTable(header["tokens"], name=str(path))
        if header["kind"] == "phones":
            phones = unpack(tensors, header["meta"]["score_step"], str(path))
            tensors |= tensors_of(finish(phones, header["phones"], header["meta"]["topology"], table))
        missing = [name for name in (*TENSOR_DTYPES, "words") if name not in tensors]
        if missing:
            raise AsrError(f"{path}: the graph file lacks the field {missing[0]!r}; build the graph again.")
        graph = cls(
            **{name: tensors[name] for name in TENSOR_DTYPES},
            tokens=table,
            vocabulary=Vocabulary(bytes(tensors["words"].numpy()).decode("utf-8").split(), name=str(path)),
            meta=header["meta"],
        )
        graph.validate(str(path))
        if tokens is not None:
            graph.require_tokens(tokens)
        return graph


def graph_from_arrays(
    arrays: GraphArrays, tokens: TokenTable, vocabulary: Vocabulary, meta: dict[str, Any]
) -> DecodingGraph:
    """A checked graph from numpy arrays whose labels are token ids."""
    graph = DecodingGraph(**tensors_of(arrays), tokens=tokens, vocabulary=vocabulary, meta=meta)
    graph.validate()
    return graph


def tensors_of(arrays: GraphArrays) -> dict[str, Tensor]:
    """The tensors of `DecodingGraph`."""
    renamed = {"token_id": arrays.label}
    return {
        name: torch.from_numpy(np.ascontiguousarray(renamed.get(name, getattr(arrays, name, None))))
        for name in TENSOR_DTYPES
    }


def write_graph_file(
    path: str | Path,
    kind: str,
    tensors: dict[str, Tensor],
    tokens: TokenTable,
    vocabulary: Vocabulary,
    meta: dict[str, Any],
    extra_header: dict[str, Any] | None = None,
) -> None:
    """Writes a graph file of a kind that `DecodingGraph.load` knows: `frames` or `phones`."""
    header = {"format": FORMAT, "version": VERSION, "kind": kind, "tokens": tokens.tokens, "meta": meta}
    lines = "".join(f"{word}\n" for word in vocabulary.words[len(SPECIAL_WORDS) :])
    words = torch.from_numpy(np.frombuffer(lines.encode("utf-8"), dtype=np.uint8).copy())
    metadata = {"header": json.dumps({**header, **(extra_header or {})}, ensure_ascii=False)}
    Path(path).write_bytes(save({**tensors, "words": words}, metadata))  # `save_file` lets only the owner read it


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise AsrError(f"{path}: there is no such graph file; make it with `asr graph`.")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("header", "{}"))
            if header.get("format") != FORMAT:
                raise AsrError(f"{path}: this is not a decoding graph; give a file that `asr graph` wrote.")
            if header.get("version") != VERSION:
                raise AsrError(
                    f"{path}: the graph has format version {header.get('version')}, this program reads "
                    f"version {VERSION}; build it again."
                )
            lacking = [key for key in ("kind", "tokens", "meta") if key not in header]
            if lacking or header["kind"] not in ("frames", "phones"):
                raise AsrError(
                    f"{path}: the graph file's header lacks a valid {(lacking or ['kind'])[0]!r}; build it again."
                )
            names = file.keys()
            return header, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise AsrError(f"{path}: the graph file is damaged or cut short ({error}); copy or build it again.") from error
