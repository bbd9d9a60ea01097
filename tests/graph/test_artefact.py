"""The decoding graph's file: what is saved is loaded, and every way a file can be wrong is one clear sentence."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from asr.errors import AsrError
from asr.graph.decoding_graph import TENSOR_DTYPES, DecodingGraph, PhoneGraph, write_graph_file
from asr.graph.epsilon_removal import remove_epsilons
from asr.graph.packing import compress, decompress, pack
from asr.text.symbols import TokenTable
from tests.reference.toy_graph import toy_graph

Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def graph() -> DecodingGraph:
    words: dict[str, list[tuple[str, ...]]] = {"A": [("x",)], "BÉ": [("x", "y"), ("y",)]}
    return toy_graph(words, ["x", "y"], lambda history, word: math.log(1 / 3), history_length=1)


def test_saved_graph_is_loaded(graph: DecodingGraph, tmp_path: Path) -> None:
    graph.save(tmp_path / "graph.safetensors")
    loaded = DecodingGraph.load(tmp_path / "graph.safetensors", graph.tokens)
    for name in TENSOR_DTYPES:
        assert torch.equal(getattr(loaded, name), getattr(graph, name)), name
    assert loaded.vocabulary == graph.vocabulary and loaded.tokens == graph.tokens and loaded.meta == graph.meta


def test_compact_graph_is_compressed_and_loaded(tmp_path: Path) -> None:
    pytest.importorskip("kaldifst")
    from asr.graph.build import build_phone_graph
    from tests.graph.test_exactness import LEXICON, PHONES, TEXT, language_model, lexicon_of

    model = language_model(tmp_path, TEXT, 3)
    compact: PhoneGraph = build_phone_graph(lexicon_of(LEXICON), model, TokenTable(PHONES))[0]
    compact.save(tmp_path / "graph.safetensors")
    content = load_file(str(tmp_path / "graph.safetensors"))
    # What loading would have to do every time has been done: no epsilons, best arcs first.
    ready = pack(remove_epsilons(compact.arrays).best_first(), compact.meta["score_step"])
    assert compact.arrays.has_epsilons and int(ready["label"].min()) == 0
    assert all(lzma.decompress(content[name].numpy().tobytes()) == ready[name].numpy().tobytes() for name in ready)
    assert lzma.decompress(content["words"].numpy().tobytes()).split() == [
        w.encode() for w in model.vocabulary.words[4:]
    ]
    # Files of version 1 are not compressed and have epsilons.
    packed = pack(compact.arrays, compact.meta["score_step"])
    old, extra_header = tmp_path / "old.safetensors", {"phones": compact.phones, "version": 1}
    write_graph_file(old, "phones", packed, compact.tokens, compact.vocabulary, compact.meta, extra_header)
    expected = compact.finish()
    for path in (tmp_path / "graph.safetensors", old):
        loaded = DecodingGraph.load(path, compact.tokens)
        for name in TENSOR_DTYPES:
            assert torch.equal(getattr(loaded, name), getattr(expected, name)), name
        assert loaded.vocabulary == compact.vocabulary and loaded.meta == compact.meta


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32"])
def test_compression_keeps_values_and_types(dtype: str) -> None:
    info = np.iinfo(dtype)
    values = torch.from_numpy(np.array([info.min, info.max, 0, 1, *range(100)], dtype=dtype))
    stored, types = compress({"label": values, "empty": values[:0]})
    restored = decompress({**stored, "words": torch.arange(3)}, types, "graph")
    assert torch.equal(restored["label"], values) and restored["label"].dtype == values.dtype
    assert len(restored["empty"]) == 0 and torch.equal(restored["words"], torch.arange(3))


@pytest.mark.parametrize("content", [b"", b"not compressed", lzma.compress(b"odd"), lzma.compress(b"even")[:-9]])
def test_damaged_compression_is_refused(content: bytes) -> None:
    tensors = {"label": torch.tensor(list(content), dtype=torch.uint8)}
    with pytest.raises(AsrError, match="the field 'label' of the graph cannot be decompressed"):
        decompress(tensors, {"label": "int16"}, "graph.safetensors")
    good = {"label": torch.tensor(list(lzma.compress(b"even")), dtype=torch.uint8)}
    for types in ({"label": "object"}, {"label": 3}, {"label": ["int16"]}, {"score": "int16"}):
        with pytest.raises(AsrError, match="cannot be decompressed"):
            decompress(good, types, "graph")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_small_file_that_fills_the_memory_is_refused() -> None:
    stored, types = compress({"label": torch.zeros(1 << 21, dtype=torch.uint8)})
    with pytest.raises(AsrError, match="'label' of the graph cannot be decompressed"):
        decompress(stored, types, "graph")
    stored, types = compress({name: torch.zeros(3 << 18, dtype=torch.uint8) for name in ("label", "score")})
    with pytest.raises(AsrError, match=r"'(label|score)' of the graph cannot be decompressed"):  # too large together
        decompress(stored, types, "graph")


def test_src_state_lists_each_arcs_state(graph: DecodingGraph) -> None:
    src_state = graph.src_state().tolist()
    for state in range(graph.num_states):
        begin, end = graph.arc_begin[state : state + 2].tolist()
        assert src_state[begin:end] == [state] * (end - begin)


def test_other_tokens_are_refused(graph: DecodingGraph, tmp_path: Path) -> None:
    graph.save(tmp_path / "graph.safetensors")
    with pytest.raises(AsrError, match="has 3 tokens, the acoustic model has 2"):
        DecodingGraph.load(tmp_path / "graph.safetensors", TokenTable(["x"]))
    with pytest.raises(AsrError, match="token 2 is 'y' in the graph and 'z'"):
        graph.require_tokens(TokenTable(["x", "z"]))


def test_truncated_file_is_refused(graph: DecodingGraph, tmp_path: Path) -> None:
    path = tmp_path / "graph.safetensors"
    graph.save(path)
    whole = path.read_bytes()
    for size in (0, 4, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(AsrError, match="the graph file is damaged or cut short"):
            DecodingGraph.load(path)


def test_missing_file_and_other_contents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AsrError, match="there is no such graph file"):
        DecodingGraph.load(tmp_path / "none.safetensors")
    save_file({"weight": torch.zeros(2)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(AsrError, match="not a decoding graph"):
        DecodingGraph.load(tmp_path / "model.safetensors")


def test_other_version_and_missing_field_are_refused(graph: DecodingGraph, tmp_path: Path) -> None:
    path = tmp_path / "graph.safetensors"
    graph.save(path)
    tensors = load_file(str(path))
    header: dict[str, object] = {
        "format": "asr decoding graph",
        "version": 99,
        "kind": "frames",
        "tokens": graph.tokens.tokens,
        "meta": {},
    }
    save_file(tensors, str(path), metadata={"header": json.dumps(header)})
    with pytest.raises(AsrError, match="format version 99"):
        DecodingGraph.load(path)
    header["version"] = 1
    del tensors["score"], header["meta"]
    save_file(tensors, str(path), metadata={"header": json.dumps(header)})
    with pytest.raises(AsrError, match="has no valid 'meta'"):
        DecodingGraph.load(path)
    header["meta"] = {}
    save_file(tensors, str(path), metadata={"header": json.dumps(header)})
    with pytest.raises(AsrError, match="lacks the field 'score'"):
        DecodingGraph.load(path)


def _with_last(values: torch.Tensor, last: int) -> torch.Tensor:
    return torch.cat((values[:-1], values.new_tensor([last])))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dst_state", lambda t: t + 1000, "'dst_state' has values"),
        ("dst_state", lambda t: _with_last(t, 1000), "'dst_state' has values from 0 to 1000"),
        ("token_id", lambda t: t - 2, "'token_id' has values from -2"),
        ("word_id", lambda t: t * 0, "'word_id' has values from 0"),
        ("score", lambda t: t * float("nan"), "not finite"),
        ("final_score", lambda t: -t, "not finite"),
        ("score", lambda t: t[1:], "'score' has"),
        ("score", lambda t: t.double(), "torch.float64"),
        ("final_score", lambda t: torch.full_like(t, -math.inf), "no state is final"),
        ("arc_begin", lambda t: t.flip(0), "'arc_begin' does not increase"),
        ("arc_begin", lambda t: torch.cat((t[:1] + 1, t[1:])), "'arc_begin' does not increase"),
        ("arc_begin", lambda t: _with_last(t, int(t[-1]) + 1), "'arc_begin' does not increase"),
        ("arc_begin", lambda t: torch.cat((t[:1], t[-1:], t[2:])), "'arc_begin' does not increase"),
    ],
)
def test_damaged_tensors_are_refused(graph: DecodingGraph, name: str, change: Change, message: str) -> None:
    with pytest.raises(AsrError, match=message):
        replace(graph, **{name: change(getattr(graph, name))}).validate()
