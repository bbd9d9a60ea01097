"""Weights in files: matrices as bytes with a step for each row, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from asr.errors import AsrError
from asr.kernels.linear import PackedLinear, byte_products, has_byte_products
from asr.serialization import LANGUAGE_MODEL_CLASSES, build_network, load_weights, save_weights
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

    def build(**how: bool) -> nn.Module:
        return build_network("RnnLm", arguments, LANGUAGE_MODEL_CLASSES, "a test", vocabulary, **how).network

    torch.manual_seed(1)
    saved = build()
    save_weights(saved, tmp_path / "w", half_precision=False)
    before = torch.get_rng_state()
    loaded = build(initialize=False)
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
