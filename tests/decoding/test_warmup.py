"""Warming up: once for each kind of search, with frames that lead through the graph, and without an effect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asr.decoding import mbr, warmup
from asr.decoding.warmup import made_up_log_prob, needs_warm_up
from tests.decoding.random_graphs import random_graph

CPU = torch.device("cpu")


@pytest.mark.parametrize("epsilons", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_tokens_of_all_frames_are_a_path(seed: int, epsilons: bool) -> None:
    graph = random_graph(seed, epsilons=epsilons)
    log_prob, num_frames = made_up_log_prob(graph)
    assert num_frames.tolist() == [48, 20] and log_prob.shape == (2, 48, len(graph.tokens))
    torch.testing.assert_close(log_prob.exp().sum(2), torch.ones(2, 48))
    src = graph.src_state()

    def after(states: torch.Tensor, token: int) -> torch.Tensor:
        return graph.dst_state[(graph.token_id == token) & torch.isin(src, states)].long().unique()

    for utt, num in enumerate(num_frames.tolist()):
        sure, best = log_prob[utt, :num].softmax(1).max(1)
        assert float(sure.min()) > 0.5
        states = torch.tensor([graph.start_state])
        for token in best.tolist():
            for _ in range(graph.num_states):
                states = torch.cat([states, after(states, -1)]).unique()
            states = after(states, token)
        assert len(states)
    # After the end there is noise alone.
    assert float(log_prob[1, 20:].softmax(1).max(1).values.median()) < 0.9


def test_a_state_without_arcs_ends_the_path() -> None:
    graph = random_graph(0)
    graph.arc_begin[1:] = graph.arc_begin[1]
    graph.dst_state[:] = 1
    log_prob, _ = made_up_log_prob(graph)
    assert float(log_prob[0, 0].softmax(0).max()) > 0.9


def test_each_kind_of_search_is_warmed_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "has_loops", lambda device: device.type == "cpu")

    def bundle(network: str | None = None, epsilons: bool = False) -> Any:
        rnn_lm = None if network is None else SimpleNamespace(arguments={"cell": network})
        graph = random_graph(1, epsilons=epsilons)
        return SimpleNamespace(rnn_lm=rnn_lm, acoustic_model=SimpleNamespace(class_name="Tdnnf"), graph=graph)

    assert not needs_warm_up(bundle(), "rnn", torch.device("cuda"), ("chunks",))
    this_test = object()  # kinds that nothing has warmed up yet
    kinds = [
        (bundle(), "rnn", CPU, ("chunks", this_test)),
        (bundle("gru"), "rnn", CPU, ("chunks", this_test)),
        (bundle("relu"), "rnn", CPU, ("chunks", this_test)),
        (bundle(epsilons=True), "rnn", CPU, ("chunks", this_test)),
        (bundle(), "ngram", CPU, ("chunks", this_test)),
        (bundle(), "rnn", CPU, ("search", this_test)),
    ]
    for expected in (True, False):
        assert [needs_warm_up(*kind) for kind in kinds] == [expected] * len(kinds)


def test_loops_of_least_risk_are_called_with_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, since a compiled loop would not notice a place beyond its arrays."""
    called: list[str] = []

    def noted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            called.append(function.__name__)
            return function(*arguments)

        return call

    monkeypatch.setattr(mbr, "jit", noted)
    mbr.warm_up()
    loops = ["score_lattice", "rows_of", "least_risk", "nearest_path", "sentence_posteriors"]
    assert called == loops
    monkeypatch.setattr(mbr, "jit", lambda function: None)
    mbr.warm_up()
    assert len(called) == len(loops)
