"""Ensembles: the mean of the members' scores, whole or in pieces, and how bundles hold them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.cli.main import main
from asr.models.checkpoint import trained_network
from asr.models.tdnnf import Ensemble, Tdnnf
from asr.models.windows import ChunkedEncoder, WindowSizes, WindowStream
from asr.serialization import ModelSpec

ARGUMENTS: dict[str, Any] = {
    "num_features": 20,
    "num_tokens": 5,
    "dim": 12,
    "bottleneck_dim": 4,
    "num_layers": 2,
    "prefinal_dim": 8,
    "small_dim": 8,
}


def member(seed: int, **more: Any) -> ModelSpec:
    torch.manual_seed(seed)
    arguments = {**ARGUMENTS, **more}
    network = Tdnnf(**arguments).eval()
    torch.nn.init.normal_(network.branch.out.weight)
    return ModelSpec("Tdnnf", arguments, network)


@pytest.fixture
def members() -> list[ModelSpec]:
    """Networks of unequal depth, so that their contexts differ."""
    return [member(0), member(1, num_layers=4), member(2)]


def normalized_mean(members: list[ModelSpec], features: Tensor, num_frames: Tensor) -> Tensor:
    """The geometric mean of the members' distributions, normalized again; each member reads the whole utterance."""
    probability = [each.network(features, num_frames)[0].double().exp() for each in members]
    product = torch.stack(probability).log().mean(0).exp()
    return (product / product.sum(2, keepdim=True)).log().float()


@pytest.mark.slow
@torch.no_grad()
def test_an_ensemble_scores_by_the_geometric_mean(members: list[ModelSpec]) -> None:
    features, num_frames = torch.randn(2, 50, 20), torch.tensor([50, 31])
    log_prob, num_outputs = Ensemble.of(members).network(features, num_frames)
    assert num_outputs.tolist() == [17, 11]
    wanted = normalized_mean(members, features, num_frames)
    for row, num in enumerate(num_outputs.tolist()):
        torch.testing.assert_close(log_prob[row, :num], wanted[row, :num], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_one_member_is_the_network_itself(members: list[ModelSpec]) -> None:
    features, num_frames = torch.randn(1, 40, 20), torch.tensor([40])
    alone = members[1].network(features, num_frames)[0]
    torch.testing.assert_close(Ensemble.of(members[1:2]).network(features, num_frames)[0], alone)


@pytest.mark.slow
@torch.no_grad()
def test_members_of_an_ensemble_count_like_others(members: list[ModelSpec]) -> None:
    features, num_frames = torch.randn(1, 50, 20), torch.tensor([50])
    ensemble = Ensemble.of([Ensemble.of(members[:2]), members[2]])
    assert ensemble.arguments == Ensemble.of(members).arguments
    wanted = normalized_mean(members, features, num_frames)
    torch.testing.assert_close(ensemble.network(features, num_frames)[0], wanted, atol=1e-5, rtol=1e-5)


SIZES = WindowSizes(4, 100, 100, 1000, 0.0)


def read_in_chunks(encoder: ChunkedEncoder, features: Tensor) -> tuple[Tensor, WindowStream]:
    """The outputs of a stream's chunks, and the stream, which has ended."""
    stream = encoder.open(torch.device("cpu"))
    stream.push(features)
    stream.close()
    chunks: list[Tensor] = []
    while stream.is_ready:
        chunks += encoder.step([stream])
    return torch.cat(chunks), stream


@pytest.mark.slow
@torch.no_grad()
def test_pieces_of_a_stream_get_the_scores_of_the_whole(members: list[ModelSpec]) -> None:
    network: Any = Ensemble.of(members).network
    deepest: Any = members[1].network
    assert network.receptive_field == deepest.receptive_field
    features = torch.randn(61, 20)
    pieces, _ = read_in_chunks(ChunkedEncoder(network, SIZES), features)
    mean, std = features.mean(0), features.std(0, correction=0)
    whole = network.forward_normalized(((features - mean) / std)[None], torch.tensor([61]))[0][-1][0]
    torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_drafts_of_a_stream_are_the_first_members(members: list[ModelSpec]) -> None:
    ensemble: Any = Ensemble.of(members).network
    features = torch.randn(61, 20)
    drafting = ChunkedEncoder(ensemble, SIZES, drafts=True)
    drafts, stream = read_in_chunks(drafting, features)
    torch.testing.assert_close(drafts, read_in_chunks(ChunkedEncoder(ensemble.members[0], SIZES), features)[0])
    torch.testing.assert_close(
        drafting.utterance_log_probs([stream])[0],
        ensemble.forward_normalized(stream.utterance()[None], torch.tensor([61]))[0][-1][0],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "says"),
    [
        (member(3, num_tokens=6), "differ"),
        (member(3, num_features=21), "differ"),
        (
            ModelSpec("SplicedDnn", {"num_features": 20, "num_tokens": 5}, torch.nn.Identity()),
            "all of bounded context",
        ),
    ],
)
def test_networks_that_do_not_fit_are_refused(members: list[ModelSpec], other: ModelSpec, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Ensemble.of([*members, other])


def test_no_member_is_refused() -> None:
    with pytest.raises(ValueError, match="needs members"):
        Ensemble([])


def saved(bundle: Bundle, network: ModelSpec, folder: Path) -> str:
    replace(bundle, acoustic_model=network).save(folder, half_precision=False)
    return str(folder)


@pytest.mark.slow
@torch.no_grad()
def test_bundles_become_one(
    tiny_bundle_folder: Path, tmp_path: Path, members: list[ModelSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Bundle.load(tiny_bundle_folder)
    paths = [saved(tiny, each, tmp_path / str(number)) for number, each in enumerate(members)]
    command = ["bundle", str(tmp_path / "one"), "--graph", str(tiny_bundle_folder / "graph.safetensors")]
    assert main([*command, "--full-precision", "--acoustic-model", *paths]) == 0
    bundle = Bundle.load(tmp_path / "one")
    assert bundle.acoustic_model.class_name == "Ensemble"
    features, num_frames = torch.randn(1, 50, 20), torch.tensor([50])
    log_prob = bundle.acoustic_model.network(features, num_frames)[0]
    torch.testing.assert_close(log_prob, normalized_mean(members, features, num_frames), atol=1e-5, rtol=1e-5)

    # Training starts from the first member.
    weights, tokens, *_ = trained_network(tmp_path / "one")
    assert tokens == list(tiny.graph.tokens.tokens)
    torch.testing.assert_close(weights, dict(members[0].network.state_dict()))

    assert main([*command, "--byte-matrices", "--acoustic-model", *paths]) == 0
    rounded = Bundle.load(tmp_path / "one").acoustic_model.network(features, num_frames)[0]
    assert 0 < float((rounded - log_prob).abs().max()) < 0.2

    # Its own network is no TDNN-F.
    capsys.readouterr()
    assert main([*command, "--acoustic-model", paths[0], str(tiny_bundle_folder)]) == 2
    assert "all of bounded context" in capsys.readouterr().err


@pytest.mark.slow
def test_bundles_and_checkpoints_are_not_mixed(
    tiny_bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, checkpoint = str(tiny_bundle_folder / "graph.safetensors"), tmp_path / "last.ckpt"
    checkpoint.touch()
    command = ["bundle", "new", "--graph", graph, "--acoustic-model", str(tiny_bundle_folder), str(checkpoint)]
    assert main(command) == 2
    assert "not both" in capsys.readouterr().err


@pytest.mark.slow
def test_networks_of_other_features_are_refused(
    tiny_bundle_folder: Path, tmp_path: Path, members: list[ModelSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Bundle.load(tiny_bundle_folder)
    other = ModelSpec("Fbank", {**tiny.features.arguments, "low_freq": 40.0}, tiny.features.network)
    paths = [
        saved(replace(tiny, features=features), members[0], tmp_path / str(number))
        for number, features in enumerate((tiny.features, other))
    ]
    graph = str(tiny_bundle_folder / "graph.safetensors")
    assert main(["bundle", str(tmp_path / "new"), "--graph", graph, "--acoustic-model", *paths]) == 2
    assert "other features" in capsys.readouterr().err
