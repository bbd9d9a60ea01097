"""Random tries asked in random calls of the network with each output layer: plain scores, whatever is cached."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.testing.plain_lm import PlainLM
from asr.text.symbols import BOS_ID, EOS_ID, Vocabulary
from scripts.benchmarks.query_stream import QueryStream, merged, replay

pytestmark = [pytest.mark.slow, pytest.mark.one_stack]

NUM_WORDS = 30
OUTPUTS = ["nce", "normalised nce", "hierarchical", "class", "full"]
CACHES = [
    "cache_scores",
    "cache_hidden",
    "cache_history_normalizers",
    "cache_group_normalizers",
    "cache_tree_paths",
]


@functools.cache
def small_network(output: str) -> RNNLanguageModel:
    torch.manual_seed(2)
    config = RNNLMConfig(
        embedding_size=6,
        hidden_size=6,
        output="nce" if output == "normalised nce" else output,  # type: ignore[arg-type]
        normalized=output == "normalised nce",
        maxent_order=3,
        maxent_size=500,
    )
    network = RNNLanguageModel(Vocabulary([f"w{i}" for i in range(NUM_WORDS)]), config)
    network.output.set_unigram(torch.arange(NUM_WORDS + 4) ** 2, reset_bias=True)
    for parameter in network.output.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return network.eval()


@functools.cache
def oracle(output: str) -> PlainLM:
    return PlainLM(small_network(output))


@st.composite
def streams(draw: st.DrawFn) -> QueryStream:
    """A trie, each node but `<s>` asked for at least once and after its parent, in calls of any size and order."""
    num_nodes = draw(st.integers(2, 40))
    parent = [0] + [draw(st.integers(0, node - 1)) for node in range(1, num_nodes)]
    words = draw(st.lists(st.integers(EOS_ID, NUM_WORDS + 3), min_size=num_nodes, max_size=num_nodes))
    words[0] = BOS_ID
    # Equal words after one parent are one node; here they are two of the same history.
    levels = [0] * num_nodes
    for node in range(1, num_nodes):
        levels[node] = levels[parent[node]] + draw(st.integers(1, 3))
    calls = []
    for level in range(1, max(levels) + 1):
        new = [node for node in range(1, num_nodes) if levels[node] == level]
        old = [node for node in range(1, num_nodes) if levels[node] < level]
        again = draw(st.lists(st.sampled_from(old), max_size=4)) if old else []
        calls.append(draw(st.permutations(new + again)))
    begin = torch.tensor([0] + [len(call) for call in calls]).cumsum(0)
    query = torch.tensor([node for call in calls for node in call], dtype=torch.int64)
    return QueryStream(torch.tensor(parent), torch.tensor(words), query, begin)


def assert_plain_scores(output: str, stream: QueryStream, engine: CachedRNNLM, marks: bool = False) -> None:
    last = stream.last_call_of_context()

    def mark(call: int, context_of_node: torch.Tensor) -> None:
        if marks:
            engine.retain(context_of_node[last > call])

    found = replay(stream, engine, mark)
    expected = [oracle(output).last_log_prob(words) for words in stream.histories(stream.query)]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("output", OUTPUTS)
@settings(max_examples=25)
@given(stream=streams(), caches=st.lists(st.booleans(), min_size=5, max_size=5))
def test_any_caches_in_any_calls(output, stream, caches):
    engine = CachedRNNLM(small_network(output), CacheOptions(**dict(zip(CACHES, caches, strict=True))))
    assert_plain_scores(output, stream, engine)
    assert_plain_scores(output, stream, engine)


@pytest.mark.parametrize("output", OUTPUTS)
@settings(max_examples=20)
@given(
    parts=st.lists(streams(), min_size=1, max_size=4),
    capacity=st.sampled_from([1, 8_000, 15_000, 30_000, 1_000_000]),
    marks=st.booleans(),
    num_workers=st.integers(1, 2),
    batching=st.sampled_from(["frame", "query"]),
)
def test_any_capacity_placement_and_number_of_streams(output, parts, capacity, marks, num_workers, batching):
    network = small_network(output)
    engine = CachedRNNLM(
        network, CacheOptions(capacity_bytes=capacity, batching=batching), hidden_networks=[network] * num_workers
    )
    assert_plain_scores(output, merged(parts), engine, marks)
    for stream in parts:
        assert_plain_scores(output, stream, engine, marks)


@pytest.mark.parametrize("output", ["normalised nce", "hierarchical", "class"])
@pytest.mark.parametrize("options", [{"recombination": "first"}, {"recombination": "best"}], ids=str)
@settings(max_examples=10)
@given(stream=streams())
def test_what_shares_contexts_forgets_what_was_kept_of_them(output, options, stream):
    # Longer than any history here, so that all scores are plain ones.
    assert_plain_scores(
        output, stream, CachedRNNLM(small_network(output), CacheOptions(recombination_length=41, **options))
    )


@pytest.mark.parametrize("output", ["normalised nce", "hierarchical", "class"])
@settings(max_examples=10)
@given(stream=streams())
def test_near_histories_keep_normalizers_of_their_own(output, stream):
    """Features of the words before differ where rows are shared; the row stands for near states alone."""
    engine = CachedRNNLM(small_network(output), CacheOptions(history_precision="round-2"))
    found = replay(stream, engine)
    expected = [oracle(output).last_log_prob(words) for words in stream.histories(stream.query)]
    torch.testing.assert_close(found, torch.tensor(expected), atol=0.1, rtol=0.0)


def test_a_second_word_of_a_history_decides_only_where_its_path_is_new():
    network = small_network("hierarchical")
    path_begin = network.output.path_begin
    engine, without = CachedRNNLM(network), CachedRNNLM(network, CacheOptions(cache_tree_paths=False))
    lengths = (path_begin[1:] - path_begin[:-1]).tolist()
    for word in (5, 6, 33, 32):
        for each in (engine, without):
            each.score(each.start(1), torch.tensor([word]))
    assert without.statistics().num_tree_decisions == sum(lengths[word] for word in (5, 6, 33, 32))
    led_to = {
        node
        for word in (5, 6, 33, 32)
        for node in network.output.path_node[path_begin[word] + 1 : path_begin[word + 1]].tolist()
    }
    # The tree has fewer nodes than are held, and each path ends in a word, which is not a node.
    assert engine.statistics().num_tree_decisions == len(led_to) + 4


def test_log_z_of_normalised_nce_is_computed_once_a_history():
    engine, without = (
        CachedRNNLM(small_network("normalised nce"), CacheOptions(cache_history_normalizers=cached))
        for cached in (True, False)
    )
    for each in (engine, without):
        _, context = each.score(each.start(3), torch.tensor([5, 6, 7]))
        each.score(context.repeat(2), torch.tensor([8, 9, 10, 11, 12, 13]))
        each.score(context, torch.tensor([20, 21, 22]))
    assert engine.statistics().num_history_normalizers == 4
    assert without.statistics().num_history_normalizers == 12
