"""The decoding graph that decoders load: its tensors, the tokens that it reads and the words that it outputs.

Files contain a compact graph of phones (`asr.graph.packing`). Loading composes the topology. The result, the graph of
frames that the search needs, is several times larger. `GraphModule` makes it a submodule of a recognizer.

Shapes: S states, A arcs, W words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from asr.errors import AsrError, in_one_line
from asr.graph.context import BIPHONE_TOPOLOGY, TIED_STATES, TiedStates, compose_biphones, with_sentence_ends
from asr.graph.epsilon_removal import remove_epsilons
from asr.graph.fst import INPUT_EPSILON, GraphArrays
from asr.graph.packing import compress, decompress, pack, unpack
from asr.graph.topology import compose_topology, topology_named
from asr.serialization import checksum_of_tensors, copied_to_processes, open_atomic, read_tensors
from asr.text.documents import parse_json
from asr.text.symbols import TokenTable, Vocabulary


def finish(graph: GraphArrays, phones: Sequence[str], meta: Mapping[str, Any], tokens: TokenTable) -> GraphArrays:
    """Removes epsilons, if there are any, and composes the topology; labels become columns of the acoustic model.

    Args:
        graph: the graph of phones.
        phones: the phones of its labels.
        meta: metadata of the graph: `topology` and, for left biphones, `tied_states`.
        tokens: output symbols of the acoustic model.

    Raises:
        AsrError: the tokens do not fit the phones or the tied states.
    """
    if graph.has_epsilons:
        graph = remove_epsilons(graph)
    topology_name = meta["topology"]
    if topology_name == BIPHONE_TOPOLOGY:
        states = TiedStates.from_json(meta[TIED_STATES])
        states.require_tokens(tokens)
        return compose_biphones(states, phones, graph)
    topology = topology_named(topology_name)
    return compose_topology(topology, topology.token_ids(phones, tokens), graph)


TENSOR_DTYPES = {
    "arc_begin": torch.int64,
    "dst_state": torch.int32,
    "token_id": torch.int32,
    "score": torch.float32,
    "word_begin": torch.int64,
    "word_id": torch.int32,
    "final_score": torch.float32,
}


def require_valid_tensors(tensors: Mapping[str, Tensor], num_tokens: int, num_words: int, name: str) -> None:
    """Checks a graph's tensors; `DecodingGraph` describes them.

    Args:
        tensors: name -> tensor, for all names in `TENSOR_DTYPES`.
        num_tokens: number of columns of the acoustic model.
        num_words: size of the vocabulary.
        name: source of the graph, for error messages.

    Raises:
        AsrError: a tensor has the wrong type or size, an index is out of range, or no path can end.
    """
    for tensor_name, dtype in TENSOR_DTYPES.items():
        tensor = tensors[tensor_name]
        if tensor.dtype != dtype or tensor.dim() != 1:
            raise AsrError(
                f"{name}: the field {tensor_name!r} is {tensor.dtype} with {tensor.dim()} dimensions, not "
                f"one-dimensional {dtype}; build the graph again."
            )
    num_states, num_arcs = tensors["final_score"].numel(), tensors["dst_state"].numel()
    if num_states == 0:
        raise AsrError(f"{name}: the graph has no states; build it again.")
    sizes = {"arc_begin": num_states + 1, "token_id": num_arcs, "score": num_arcs, "word_begin": num_arcs + 1}
    for tensor_name, size in sizes.items():
        found = tensors[tensor_name].numel()
        if found != size:
            raise AsrError(f"{name}: the field {tensor_name!r} has {found} entries, not {size}; build the graph again.")
    _require_offsets(name, "arc_begin", tensors["arc_begin"], num_arcs)
    _require_offsets(name, "word_begin", tensors["word_begin"], tensors["word_id"].numel())
    _require_range(name, "dst_state", tensors["dst_state"], 0, num_states)
    _require_range(name, "token_id", tensors["token_id"], INPUT_EPSILON, num_tokens)
    _require_range(name, "word_id", tensors["word_id"], 1, num_words)
    if not bool(tensors["score"].isfinite().all()) or not bool((tensors["final_score"] < torch.inf).all()):
        raise AsrError(f"{name}: the graph has scores that are not finite; build it again.")
    if not bool(torch.isfinite(tensors["final_score"]).any()):
        raise AsrError(f"{name}: no state is final, so no path can end; build the graph again.")


def _require_offsets(name: str, tensor_name: str, offsets: Tensor, total: int) -> None:
    if int(offsets[0]) != 0 or int(offsets[-1]) != total or bool((offsets[1:] < offsets[:-1]).any()):
        raise AsrError(f"{name}: the field {tensor_name!r} does not increase from 0 to {total}; build the graph again.")


def _require_range(name: str, tensor_name: str, ids: Tensor, low: int, end: int) -> None:
    if ids.numel() and (int(ids.min()) < low or int(ids.max()) >= end):
        raise AsrError(
            f"{name}: the field {tensor_name!r} has values from {int(ids.min())} to {int(ids.max())}, but "
            f"{low} to {end - 1} are allowed; build the graph again."
        )


FORMAT = "asr decoding graph"
VERSION = 2
_COMPRESSED = "compressed"  # the header's field with the types of compressed tensors, since version 2


@copied_to_processes
@dataclass(frozen=True, eq=False)
class DecodingGraph:
    """A weighted transducer from frames to words; arcs are sorted by source state (CSR), and state 0 is the start.

    Shapes: S states, A arcs, W words on all arcs together.

    Args:
        arc_begin: (S + 1,) int64; the arcs of state s are `arc_begin[s] : arc_begin[s + 1]`.
        dst_state: (A,) int32, the destination state of each arc.
        token_id: (A,) int32, the token that each arc reads, a column of the acoustic model's `log_prob`. 0 is the
            blank; -1 is an input epsilon, only in graphs with `has_epsilons`.
        score: (A,) float32, natural log, higher is better.
        word_begin: (A + 1,) int64; the words of arc a are `word_id[word_begin[a] : word_begin[a + 1]]`.
        word_id: (W,) int32, ids of `vocabulary`; an arc may have any number of words.
        final_score: (S,) float32, -inf for states that are not final.
        tokens: output symbols of the acoustic model.
        vocabulary: the words.
        meta: metadata as JSON values: topology, order of the language model and so on.
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

    def __repr__(self) -> str:
        return f"DecodingGraph(states={self.num_states}, arcs={self.num_arcs}, words={len(self.vocabulary)})"

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
        """Whether any arc has an input epsilon."""
        return bool(self.num_arcs) and int(self.token_id.min()) == INPUT_EPSILON  # the lowest label

    @property
    def can_join_sentences(self) -> bool:
        """Whether silence can separate sentences: the graph is of tied states, and has silence between words."""
        return self.meta.get("topology") == BIPHONE_TOPOLOGY and self.meta.get("silence") is not None

    @property
    def device(self) -> torch.device:
        return self.score.device

    def src_state(self) -> Tensor:
        """The source state of each arc, (A,) int32."""
        states = torch.arange(self.num_states, dtype=torch.int32, device=self.device)
        return torch.repeat_interleave(states, self.arc_begin[1:] - self.arc_begin[:-1])

    def to(self, device: torch.device | str) -> DecodingGraph:
        """The same graph on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in TENSOR_DTYPES})

    def remove_epsilons(self) -> DecodingGraph:
        """An equivalent graph without input epsilons, as k2 requires."""
        arrays = remove_epsilons(self._arrays())
        return graph_from_arrays(arrays, self.tokens, self.vocabulary, self.meta).to(self.device)

    def with_gain(self, gain: Tensor) -> DecodingGraph:
        """The graph with a gain (V,) added to the score of each arc that outputs a word, for each such word."""
        arrays = self._arrays()
        total = np.cumsum(np.append(0.0, gain.double().numpy()[arrays.word_id]))
        score = arrays.score + np.diff(total[arrays.word_begin]).astype(np.float32)
        arrays = replace(arrays, score=score).best_first()
        return graph_from_arrays(arrays, self.tokens, self.vocabulary, self.meta).to(self.device)

    def _arrays(self) -> GraphArrays:
        """States and arcs on the host; labels are token ids."""
        values = {name: getattr(self, name).cpu().numpy() for name in TENSOR_DTYPES}
        return GraphArrays(label=values.pop("token_id"), **values)

    def with_sentence_ends(self, num_frames: int) -> DecodingGraph:
        """The graph of one sentence or several in a row, with at least `num_frames` frames of silence between them.

        The word `</s>` marks the end of each sentence but the last. See `asr.graph.context`.

        Args:
            num_frames: at least 2.

        Returns:
            The graph, with new tensors; only if it has `can_join_sentences`.
        """
        tensors: dict[str, Any] = tensors_of(with_sentence_ends(self._arrays(), num_frames))
        return replace(self, **tensors).to(self.device)

    def require_tokens(self, tokens: TokenTable) -> None:
        """Checks that the graph was built for the tokens of an acoustic model.

        Raises:
            AsrError: it was built for other tokens.
        """
        if tokens == self.tokens:
            return
        ours, theirs = self.tokens.tokens, tokens.tokens
        if len(ours) != len(theirs):
            difference = f"it has {len(ours)} tokens, the acoustic model has {len(theirs)}"
        else:
            column = next(i for i, (our, their) in enumerate(zip(ours, theirs, strict=True)) if our != their)
            difference = f"token {column} is {ours[column]!r} in the graph and {theirs[column]!r} in the acoustic model"
        raise AsrError(
            f"the decoding graph was built for other tokens: {difference}; build it again with the tokens "
            "of this model."
        )

    def validate(self, name: str = "decoding graph") -> None:
        """Checks everything that decoders rely on.

        Raises:
            AsrError: a tensor has the wrong type or size, an index is out of range, or no path can end.
        """
        tensors = {tensor_name: getattr(self, tensor_name) for tensor_name in TENSOR_DTYPES}
        require_valid_tensors(tensors, len(self.tokens), len(self.vocabulary), name)

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file with a JSON header; the files of `PhoneGraph.save` are much smaller."""
        tensors = {name: getattr(self, name).cpu().contiguous() for name in TENSOR_DTYPES}
        write_graph_file(path, "frames", tensors, self.tokens, self.vocabulary, self.meta)

    @classmethod
    def load(cls, path: str | Path, tokens: TokenTable | None = None, verify: bool = True) -> DecodingGraph:
        """Reads a graph and checks it.

        Args:
            path: a file that `save` or `PhoneGraph.save` wrote.
            tokens: the acoustic model's tokens, to check that the graph fits them; None skips this check.
            verify: whether to check the file's checksum.

        Raises:
            AsrError: the file is missing, damaged, not a graph, of another version, or built for other tokens.
        """
        header, tensors = _read(Path(path), verify)
        try:
            graph = cls._assembled(header, tensors, str(path))
        except AsrError:
            raise
        except Exception as error:  # a damaged file may have any header and tensors
            raise AsrError(
                f"{path}: the parts of the graph do not fit each other ({in_one_line(error)}); build it again."
            ) from error
        graph.validate(str(path))
        if tokens is not None:
            graph.require_tokens(tokens)
        return graph

    @classmethod
    def _assembled(cls, header: dict[str, Any], tensors: dict[str, Tensor], name: str) -> DecodingGraph:
        table = TokenTable(header["tokens"], name=name)
        if header["kind"] == "phones":
            phones = unpack(tensors, header["meta"]["score_step"], name)
            tensors |= tensors_of(finish(phones, header["phones"], header["meta"], table))
        missing = [field for field in (*TENSOR_DTYPES, "words") if field not in tensors]
        if missing:
            raise AsrError(f"{name}: the graph file lacks the field {missing[0]!r}; build the graph again.")
        return cls(
            **{field: tensors[field] for field in TENSOR_DTYPES},
            tokens=table,
            vocabulary=Vocabulary(bytes(tensors["words"].numpy()).decode("utf-8").split(), name=name),
            meta=header["meta"],
        )


def graph_from_arrays(
    arrays: GraphArrays, tokens: TokenTable, vocabulary: Vocabulary, meta: dict[str, Any]
) -> DecodingGraph:
    """Builds a graph from NumPy arrays whose labels are token ids, and checks it."""
    graph = DecodingGraph(**tensors_of(arrays), tokens=tokens, vocabulary=vocabulary, meta=meta)
    graph.validate()
    return graph


def tensors_of(arrays: GraphArrays) -> dict[str, Tensor]:
    """Converts NumPy arrays to the tensors of a `DecodingGraph`."""
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
    compressed: bool = False,
) -> None:
    """Writes a graph file of the kind `frames` or `phones`."""
    header = {"format": FORMAT, "version": VERSION, "kind": kind, "tokens": tokens.tokens, "meta": meta}
    lines = "".join(f"{word}\n" for word in vocabulary.ordinary)
    words = torch.from_numpy(np.frombuffer(lines.encode("utf-8"), dtype=np.uint8).copy())
    tensors = {**tensors, "words": words}
    if compressed:
        tensors, header[_COMPRESSED] = compress(tensors)
    text = json.dumps({**header, **(extra_header or {})}, ensure_ascii=False)
    metadata = {"header": text, _CHECKSUM: checksum_of_tensors(text, tensors)}
    with open_atomic(Path(path)) as file:  # files of `save_file` are readable by their owner only
        file.write(save(tensors, metadata))


_CHECKSUM = "sha256"


def _read(path: Path, verify: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise AsrError(f"{path}: there is no such graph file; build it with `asr graph`.")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            header = parse_json(metadata.get("header", "{}"))
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise AsrError(f"{path}: this is not a decoding graph; give a file that `asr graph` wrote.")
            if header.get("version") not in range(1, VERSION + 1):
                raise AsrError(
                    f"{path}: the graph has format version {header.get('version')}, this program reads versions up to "
                    f"{VERSION}; build it again."
                )
            header.setdefault(_COMPRESSED, {})
            types = {"kind": str, "tokens": list, "meta": dict, _COMPRESSED: dict}
            lacking = [key for key, kind in types.items() if not isinstance(header.get(key), kind)]
            if lacking or header["kind"] not in ("frames", "phones"):
                raise AsrError(
                    f"{path}: the header of the graph file has no valid {(lacking or ['kind'])[0]!r}; build it again."
                )
            tensors = read_tensors(file)
    except (SafetensorError, ValueError, RecursionError, OSError) as error:
        raise AsrError(f"{path}: the graph file is damaged or cut short ({error}); copy or build it again.") from error
    # Files of earlier versions have no checksum.
    expected = metadata.get(_CHECKSUM) if verify else None
    if expected is not None and expected != checksum_of_tensors(metadata["header"], tensors):
        raise AsrError(f"{path}: the graph does not match its checksum, so it is damaged; copy or build it again.")
    return header, decompress(tensors, header[_COMPRESSED], str(path))


@dataclass(frozen=True)
class PhoneGraph:
    """A determinized and minimized graph from phones to words, with backoff epsilons.

    Args:
        arrays: the graph; labels are indices of `phones`, or -1 for epsilon.
        phones: the phones of the lexicon.
        tokens: output symbols of the acoustic model.
        vocabulary: the words.
        meta: metadata; `topology`, `score_step` and, for left biphones, `tied_states` are needed to finish the graph.
    """

    arrays: GraphArrays
    phones: tuple[str, ...]
    tokens: TokenTable
    vocabulary: Vocabulary
    meta: dict[str, Any]

    def finish(self) -> DecodingGraph:
        """Removes epsilons and composes the topology, which gives the graph that decoders search."""
        arrays = finish(self.arrays, self.phones, self.meta, self.tokens)
        return graph_from_arrays(arrays, self.tokens, self.vocabulary, self.meta)

    def save(self, path: str | Path) -> None:
        """Writes the compact graph; `DecodingGraph.load` finishes it."""
        # Without epsilons and with arcs in the order of the search, a file is a tenth larger, and is loaded in half the
        # time. States in its order would make it larger still, and save little.
        tensors = pack(remove_epsilons(self.arrays).best_first(), self.meta["score_step"])
        extra_header = {"phones": self.phones}
        write_graph_file(
            path, "phones", tensors, self.tokens, self.vocabulary, self.meta, extra_header, compressed=True
        )


class GraphModule(nn.Module):
    """Holds a decoding graph's tensors as buffers, which are not copied as long as they stay on the host.

    `load_state_dict` loads another graph of the same size, with the same tokens and words. It changes the tensors in
    place, including those of the graph that was given, even if the module is on another device.

    Args:
        graph: a graph on the host.
    """

    def __init__(self, graph: DecodingGraph) -> None:
        super().__init__()
        self._host = graph
        for name in TENSOR_DTYPES:
            self.register_buffer(name, getattr(graph, name))

    def decoding_graph(self) -> DecodingGraph:
        """The graph, on the module's device."""
        return replace(self._host, **{name: getattr(self, name) for name in TENSOR_DTYPES})

    def extra_repr(self) -> str:
        return f"states={self._host.num_states}, arcs={self._host.num_arcs}, words={len(self._host.vocabulary)}"

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Checks tensors before they replace the graph's, because compiled searches do not check them.

        Raises:
            AsrError: an index is out of range, or no path can end.
        """
        given = {name: state_dict.get(prefix + name) for name in TENSOR_DTYPES}
        loaded: dict[str, Tensor] = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
        fits = {name for name, tensor in loaded.items() if tensor.shape == getattr(self, name).shape}
        # torch reports tensors that are missing or of another size, and does not copy the latter.
        other = {name: tensor.to("cpu", TENSOR_DTYPES[name]) for name, tensor in loaded.items() if name in fits}
        if other:
            tensors = {name: other.get(name, getattr(self._host, name)) for name in TENSOR_DTYPES}
            sizes = len(self._host.tokens), len(self._host.vocabulary)
            require_valid_tensors(tensors, *sizes, "the decoding graph to be loaded")
        super()._load_from_state_dict(state_dict, prefix, *args)
        with torch.no_grad():
            for name in fits:
                # With `assign=True`, torch keeps the given tensors with their types.
                setattr(self, name, getattr(self, name).to(TENSOR_DTYPES[name]))
                getattr(self._host, name).copy_(getattr(self, name))
