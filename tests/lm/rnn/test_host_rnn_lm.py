"""A network with its big tables in host memory scores the same bits in every placement, within its budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asr.errors import AsrError
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.offload import HostTable, table_bytes, with_host_tables
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import Vocabulary

NUM_WORDS = 4000


def _network(output: str = "nce", tie: bool = True, **more: object) -> RNNLanguageModel:
    torch.manual_seed(5)
    config = RNNLMConfig(
        embedding_size=24, hidden_size=24, output=output, tie_embeddings=tie, maxent_order=3, maxent_size=60_000,
        num_noise_words=8, **more,  # type: ignore[arg-type]
    )  # fmt: skip
    network = RNNLanguageModel(Vocabulary(f"W{idx}" for idx in range(NUM_WORDS)), config).eval()
    assert network.maxent is not None
    torch.nn.init.normal_(network.maxent.weight)
    network.maxent.prune(20_000)
    torch.nn.init.normal_(network.output.rows.weight, std=0.3)
    return network


def _walk(network: RNNLanguageModel) -> Tensor:
    """Scores of random histories, asked of the query engine."""
    engine = CachedRNNLM(network, CacheOptions(compiled=False))
    generator = torch.Generator().manual_seed(6)
    context_idx = engine.start(80)
    scores = []
    for _ in range(5):
        word_id = torch.randint(2, NUM_WORDS, (80,), generator=generator)
        score, context_idx = engine.score(context_idx, word_id)
        scores.append(score)
    return torch.cat([*scores, engine.final(context_idx)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "tie", "share", "placements"),
    [
        ("nce", True, 1.0, {"words": "resident", "maxent": "resident"}),
        ("nce", True, 0.75, {"words": "resident", "maxent": "index"}),
        ("nce", True, 0.63, {"words": "resident", "maxent": "cache"}),
        ("nce", True, 0.4, {"words": "cache", "maxent": "index"}),
        ("nce", False, 0.3, {"output": "cache", "input": "cache", "maxent": "index"}),
        ("nce", False, 0.47, {"output": "cache", "input": "cache", "maxent": "index"}),
        ("hierarchical", True, 0.3, {"output": "cache", "input": "cache", "maxent": "index"}),
        ("class", True, 0.3, {"output": "cache", "input": "cache", "maxent": "index"}),
    ],
)
def test_same_bits_within_the_budget(
    output: str, tie: bool, share: float, placements: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiled loops over a whole table round differently from the tensor form, which is all that a GPU has.
    for module in ("outputs.hierarchical", "outputs.nce"):
        monkeypatch.setattr(f"asr.lm.rnn.{module}.jit_for", lambda function, tensor: None)
    network = _network(output, tie)
    budget = int(share * table_bytes(network))
    host, tables = with_host_tables(network, "cpu", budget)
    assert {name: table.placement for name, table in tables.items()} == placements
    assert sum(table.device_bytes for table in tables.values()) <= budget
    left, sizes = budget, [table.table_bytes for table in tables.values()]
    for number, table in enumerate(tables.values()):
        # A cache with twice as many places would not fit into the table's share of what is left.
        if table.placement == "cache":
            assert 2 * table.device_bytes > left * sizes[number] // sum(sizes[number:])
        left -= table.device_bytes
    assert torch.equal(_walk(host), _walk(network))
    for table in tables.values():
        assert (table.statistics.num_fetched > 0) == (table.placement != "resident")
    assert host.vocabulary is network.vocabulary


def test_zero_weights_are_not_fetched() -> None:
    network = _network()
    _, tables = with_host_tables(network, "cpu", int(0.75 * table_bytes(network)))
    assert network.maxent is not None
    tables["maxent"].rows(torch.arange(10_000))
    assert tables["maxent"].statistics.num_fetched == int((network.maxent.weight[:10_000] != 0).sum())


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 7999), max_size=40), max_size=6), st.booleans())
def test_rows_are_the_rows(batches: list[list[int]], skips_zeros: bool) -> None:
    values = torch.arange(8000.0)[:, None] - 7
    values[::3] = 0
    wide = values.expand(-1, 4) if not skips_zeros else values
    host = HostTable(wide, "cpu", 13 * 1024 + 100 if skips_zeros else 24 * 1024, skips_zeros)
    assert host.placement == ("index" if skips_zeros else "cache")
    for batch in batches:
        row_idx = torch.tensor(batch, dtype=torch.int64)
        assert torch.equal(host.rows(row_idx), wide[row_idx])


def test_what_cannot_be_placed() -> None:
    network = _network()
    with pytest.raises(AsrError, match="budget of 100 bytes is too small for the tables"):
        with_host_tables(network, "cpu", 100)
    for normalized in (_network("full", normalized=True), _network("nce", normalized=True)):
        with pytest.raises(AsrError, match="normalized over the whole vocabulary"):
            with_host_tables(normalized, "cpu", 1 << 30)
