"""Weights in files: matrices as bytes with a step for each row, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from asr.errors import AsrError
from asr.graph.denominator_graph import DenominatorGraph
from asr.kernels.linear import PackedLinear, byte_products, has_byte_products
from asr.lm.rnn.maxent import HashedMaxEnt
from asr.serialization import (
    LANGUAGE_MODEL_CLASSES,
    build_network,
    load_arrays,
    load_weights,
    require_finite,
    save_weights,
)
from asr.text.symbols import Vocabulary


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        PackedLinear(12, 32), nn.BatchNorm1d(32), nn.Linear(32, 7), nn.Embedding(5, 4), nn.Embedding(5, 1)
    ).eval()


def test_matrices_are_stored_as_bytes(tmp_path: Path) -> None:
    saved, loaded = network(0), network(1)
    save_weights(saved, tmp_path / "w", half_precision=False, byte_matrices=True)
    kinds = {name: tensor.dtype for name, tensor in load_file(tmp_path / "w").items()}
    assert {kinds[name] for name in ("0.weight", "2.weight", "3.weight")} == {torch.int8}
    assert {kinds[name] for name in ("0.weight.step", "0.bias", "1.running_mean", "4.weight")} == {torch.float32}
    load_weights(loaded, tmp_path / "w")
    for name, tensor in saved.state_dict().items():
        found = loaded.state_dict()[name]
        if name in ("0.weight", "2.weight", "3.weight"):
            half_step = tensor.abs().amax(1, keepdim=True) / 254
            assert not torch.equal(found, tensor)
            assert bool(((found - tensor).abs() <= half_step * 1.001).all())
        else:
            assert torch.equal(found, tensor)


@pytest.mark.parametrize("byte_matrices", [False, True])
def test_weights_beyond_float16_are_not_written(tmp_path: Path, byte_matrices: bool) -> None:
    """They would be infinite in the file, which is refused when it is loaded."""
    saved = network(0)
    saved.state_dict()["1.running_var"][3] = 7e4
    with pytest.raises(AsrError, match=r"w: some of the weights '1.running_var' are beyond the range of float16"):
        save_weights(saved, tmp_path / "w", half_precision=True, byte_matrices=byte_matrices)
    assert not (tmp_path / "w").exists()
    save_weights(saved, tmp_path / "w", half_precision=False, byte_matrices=byte_matrices)
    load_weights(network(1), tmp_path / "w")


def test_no_random_numbers_are_drawn_where_weights_are_loaded(tmp_path: Path) -> None:
    arguments = {"embedding_size": 8, "hidden_size": 8, "output": "full"}
    vocabulary = Vocabulary(["A", "B"])

    def build(weights: Path | None = None) -> nn.Module:
        return build_network("RnnLm", arguments, LANGUAGE_MODEL_CLASSES, "a test", vocabulary, weights).network

    torch.manual_seed(1)
    saved = build()
    save_weights(saved, tmp_path / "w", half_precision=False)
    before = torch.get_rng_state()
    loaded = build(tmp_path / "w")
    load_weights(loaded, tmp_path / "w")
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    # Initial weights are drawn by default, and again afterwards.
    assert not torch.equal(next(build().parameters()), next(build().parameters()))


@pytest.mark.skipif(not has_byte_products(), reason="this processor does not multiply bytes fast")
@torch.no_grad()
def test_products_of_bytes_stay_the_same(tmp_path: Path) -> None:
    saved, loaded = network(0)[0], network(1)[0]  # type: ignore[index]
    save_weights(saved, tmp_path / "w", half_precision=True, byte_matrices=True)
    load_weights(loaded, tmp_path / "w")
    loaded.bias.copy_(saved.bias)
    inputs = torch.randn(40, 12)
    with byte_products():
        torch.testing.assert_close(loaded(inputs), saved(inputs), rtol=1e-6, atol=1e-6)
    assert float((loaded(inputs) - saved(inputs)).abs().max()) > 1e-4


@pytest.mark.parametrize("change", ["no matrix", "other rows", "one number"])
def test_steps_that_do_not_fit_are_refused(tmp_path: Path, change: str) -> None:
    save_weights(network(0), tmp_path / "w", half_precision=False, byte_matrices=True)
    state = load_file(tmp_path / "w")
    if change == "no matrix":
        del state["0.weight"]
    else:
        state["0.weight.step"] = torch.ones(3) if change == "other rows" else torch.tensor(1.0)
    save_file(state, tmp_path / "w")
    with pytest.raises(AsrError, match=r"'0\.weight\.step' has no matrix"):
        load_weights(network(0), tmp_path / "w")


def _written(path: Path, **tensors: tuple[str, list[int], bytes]) -> None:
    """Writes a safetensors file of any types: name -> type, shape, content."""
    header, body = {}, b""
    for name, (kind, shape, content) in tensors.items():
        offsets = [len(body), len(body) + len(content)]
        header[name], body = {"dtype": kind, "shape": shape, "data_offsets": offsets}, body + content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.mark.parametrize("kind, size", [("C64", 8), ("U16", 2), ("F8_E4M3", 1), ("F8_E8M0", 1)])
def test_other_types_are_refused(tmp_path: Path, kind: str, size: int) -> None:
    _written(tmp_path / "w", weight=(kind, [1, 2], bytes(2 * size)), bias=("F32", [1], bytes(4)))
    with pytest.raises(AsrError, match=r"w: the weights cannot be read \(.*(uint16|complex64|float8).*\); fetch"):
        load_weights(nn.Linear(2, 1), tmp_path / "w")


def test_weights_that_are_infinite_in_float32_are_refused(tmp_path: Path) -> None:
    bias = ("F32", [1], bytes(4))
    steps = {"weight": ("I8", [1, 2], b"\x7f\x7f"), "weight.step": ("F32", [1], np.float32(3e38).tobytes())}
    double = {"weight": ("F64", [1, 2], np.full(2, 1e300).tobytes())}
    for tensors in (steps, double):
        _written(tmp_path / "w", bias=bias, **tensors)
        with pytest.raises(AsrError, match="w: the weights 'weight' are not all finite numbers"):
            load_weights(nn.Linear(2, 1), tmp_path / "w")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 65, 40_001])
def test_a_weight_that_is_not_finite_is_found_anywhere(dtype: torch.dtype, size: int) -> None:
    weights = torch.randn(size).to(dtype)
    weights[size // 2] = 6e4  # sums of such numbers are beyond the range of float16
    require_finite({"empty": weights[:0], "count": torch.tensor(3), "large": weights.repeat(3)}, Path("w"))
    for number in (math.nan, math.inf, -math.inf):
        for place in (0, size // 3, size - 1):
            damaged = weights.clone()
            damaged[place] = number
            with pytest.raises(AsrError, match="w: the weights 'damaged' are not all finite numbers"):
                require_finite({"weights": weights, "damaged": damaged}, Path("w"))


@pytest.mark.parametrize("damage", ["no weights", "a weight too few", "other bits"])
def test_bits_of_features_must_fit_their_weights(tmp_path: Path, damage: str) -> None:
    saved = HashedMaxEnt(5, 2, 50)
    nn.init.normal_(saved.weight)
    saved.prune(7)
    state = saved.state_dict()
    if damage == "no weights":
        del state["kept_weight"]
    elif damage == "a weight too few":
        state["kept_weight"] = state["kept_weight"][1:]
    else:
        state["kept_bits"] = state["kept_bits"].long()
    save_file(state, tmp_path / "w")
    with pytest.raises(AsrError, match="w: the weights do not fit the network"):
        load_weights(HashedMaxEnt(5, 2, 50), tmp_path / "w")


@pytest.mark.parametrize("name, size", [("hidden_size", 1 << 22), ("num_layers", 1 << 40), ("maxent_size", 1 << 25)])
def test_networks_too_large_for_their_file_are_not_built(tmp_path: Path, name: str, size: int) -> None:
    path = tmp_path / "w"
    path.write_bytes(bytes(1000))
    arguments = {"embedding_size": 8, "hidden_size": 8, "maxent_order": 2, name: size}
    with pytest.raises(AsrError, match=r"a test: RnnLm does not take .* \(the network would be too large for the file"):
        build_network("RnnLm", arguments, LANGUAGE_MODEL_CLASSES, "a test", Vocabulary(["A"]), path)


def test_long_histories_are_refused() -> None:
    with pytest.raises(AsrError, match="maxent_order is 100000; it must be 64 or less"):
        build_network("RnnLm", {"maxent_order": 100_000}, LANGUAGE_MODEL_CLASSES, "a test", Vocabulary(["A"]))


def test_arrays_do_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, ones=np.ones(1000), text=np.array("a"))
    assert np.array_equal(load_arrays(path)["ones"], np.ones(1000)) and str(load_arrays(path)["text"]) == "a"
    np.savez_compressed(path, ones=np.ones(1000))
    with pytest.raises(ValueError, match="it expands to more than its size"):
        load_arrays(path)
    with pytest.raises(AsrError, match=r"a\.npz: the file is not a valid denominator graph \(.*expands"):
        DenominatorGraph.load(path)
