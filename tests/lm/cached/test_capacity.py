"""A bound on bytes changes no score but by rounding: live contexts stay, hidden rows are computed again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.kernels.hash_table import MAX_LOAD, HashTable
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.cached.eviction import ByteCosts, Limits, drop_rows, least_used, remove_nodes
from asr.lm.cached.outputs import OutputCache
from asr.lm.cached.states import HiddenStore, QueryStatistics
from asr.lm.cached.trie import BEFORE_START, START, HistoryTrie, RowAllocator
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.testing.plain_lm import PlainLM
from asr.text.symbols import Vocabulary
from tests.reference.toy_network import ToyClassNetwork, ToyNetwork, ToyNormalizedNetwork


def beam_search(engine, network, num_steps, width, seed, marks):
    """A beam over random continuations; scores are compared with the plain network's."""
    plain = PlainLM(network)
    generator = torch.Generator().manual_seed(seed)
    context, histories = engine.start(1), [[]]
    for step in range(num_steps):
        choice = torch.randint(3, 24, (len(histories), 4), generator=generator)
        log_prob, next_idx = engine.score(context.repeat_interleave(4), choice.view(-1))
        extended = [[*words, word] for words, row in zip(histories, choice.tolist(), strict=True) for word in row]
        if step % 4 == 0 or step == num_steps - 1:
            for words, score in zip(extended, log_prob.tolist(), strict=True):
                assert score == pytest.approx(plain.last_log_prob(words), abs=1e-5)
        kept = torch.randperm(len(extended), generator=generator)[:width]
        context, histories = next_idx[kept], [extended[i] for i in kept.tolist()]
        if marks:
            engine.retain(context)


@pytest.mark.slow
@given(
    capacity=st.sampled_from([1, 10_000, 20_000, 40_000, 1_000_000]),
    width=st.integers(1, 8),
    marks=st.booleans(),
    num_steps=st.integers(1, 25),
    seed=st.integers(0, 1000),
)
@settings(max_examples=12)
@pytest.mark.parametrize("network_class", [ToyNetwork, pytest.param(ToyClassNetwork, marks=pytest.mark.slow)])
def test_any_capacity_gives_the_plain_scores(network_class, capacity, width, marks, num_steps, seed):
    network = network_class()
    engine = CachedRNNLM(network, CacheOptions(capacity_bytes=capacity))
    beam_search(engine, network, num_steps, width, seed, marks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_rows_that_are_computed_again_are_rounded_as_at_first(dtype):
    """Scores are those of a cache without bound, bit for bit, if products do not depend on how many rows there are."""
    generator = torch.Generator().manual_seed(0)
    options = {"hidden_dtype": dtype, "batching": "query"}
    free, bounded = (CachedRNNLM(ToyNetwork(), CacheOptions(capacity_bytes=most, **options)) for most in (None, 1))
    contexts = [(free.start(1), bounded.start(1))]
    for _ in range(40):
        pairs = [contexts[int(choice)] for choice in torch.randint(0, len(contexts), (4,), generator=generator)]
        pairs += contexts[-4:]
        word_id = torch.randint(3, 24, (len(pairs),), generator=generator)
        expected, following = free.score(torch.cat([pair[0] for pair in pairs]), word_id)
        log_prob, next_idx = bounded.score(torch.cat([pair[1] for pair in pairs]), word_id)
        assert torch.equal(log_prob, expected)
        contexts += zip(following.split(1), next_idx.split(1), strict=True)
    counts = bounded.statistics()
    assert counts.num_dropped_rows > 0 and counts.num_hidden_rows > 2 * free.statistics().num_hidden_rows


@pytest.mark.slow
def test_small_capacities_do_evict_and_stay_bounded():
    engine = CachedRNNLM(ToyNetwork(hidden_size=128), CacheOptions(capacity_bytes=100_000))
    beam_search(engine, engine.network, 150, 8, 0, marks=True)
    counts = engine.statistics()
    assert counts.num_evictions > 0
    assert counts.peak_bytes <= 100_000


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_contexts_that_are_given_out_again_stay(compiled):
    network = ToyNetwork(hidden_size=128)
    engine = CachedRNNLM(network, CacheOptions(capacity_bytes=60_000, compiled=compiled))
    start = engine.start(1)
    sentences = torch.randint(3, 24, (400, 3), generator=torch.Generator().manual_seed(0))

    def walked(words):
        context = start
        for word in words:
            _, context = engine.score(context, word.view(1))
        return context

    # Others are used more often than the first, so that it would leave before them.
    for sentence in sentences[1:20].repeat_interleave(6, dim=0):
        walked(sentence)
    walked(sentences[0])
    engine.retain(start)
    held = walked(sentences[0])
    for sentence in sentences[20:]:
        walked(sentence)
        if engine.statistics().num_evicted_contexts:
            break
    assert engine.statistics().num_evicted_contexts > 0
    log_prob, _ = engine.score(held, torch.tensor([8]))
    assert float(log_prob) == pytest.approx(PlainLM(network).last_log_prob([*sentences[0].tolist(), 8]), abs=1e-5)


@pytest.mark.slow
def test_without_marks_only_hidden_rows_leave():
    engine = CachedRNNLM(ToyNetwork(hidden_size=128), CacheOptions(capacity_bytes=20_000))
    beam_search(engine, engine.network, 20, 8, 0, marks=False)
    counts = engine.statistics()
    assert counts.num_dropped_rows > 0
    assert counts.num_evicted_contexts == 0


@pytest.mark.slow
def test_a_long_stream_stays_bounded_although_its_history_does_not():
    network = ToyNetwork()
    engine = CachedRNNLM(network, CacheOptions(capacity_bytes=40_000))
    context, words = engine.start(1), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        choice = torch.randint(3, 24, (3,), generator=generator)
        log_prob, next_idx = engine.score(context.repeat(3), choice)
        context = next_idx[:1]
        words.append(int(choice[0]))
        engine.retain(context)
    assert log_prob[0].item() == pytest.approx(PlainLM(network).last_log_prob(words), abs=1e-5)
    assert engine.statistics().peak_bytes <= 40_000


@pytest.mark.slow
def test_live_contexts_keep_their_numbers():
    network = ToyNetwork()
    engine = CachedRNNLM(network, CacheOptions(capacity_bytes=10_000))
    held: dict[int, list[int]] = {}
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        word_id = torch.randint(3, 24, (10,), generator=generator)
        _, node = engine.score(engine.start(10), word_id)
        next_word = torch.randint(3, 24, (10,), generator=generator)
        _, deeper = engine.score(node, next_word)
        if len(held) < 20:
            held[int(deeper[0])] = [int(word_id[0]), int(next_word[0])]
        engine.retain(torch.tensor(sorted(held)))
    assert engine.statistics().num_evictions > 0
    for node, words in held.items():
        log_prob, _ = engine.score(torch.tensor([node]), torch.tensor([7]))
        assert log_prob.item() == pytest.approx(PlainLM(network).last_log_prob([*words, 7]), abs=1e-5)


def test_least_used_leaves_go_first():
    engine = CachedRNNLM(ToyNetwork(num_words=400), CacheOptions(capacity_bytes=1))
    often = torch.arange(10, 20)
    engine.retain(engine.start(1))
    for first in range(20, 320, 30):
        for _ in range(3):
            engine.score(engine.start(10), often)
        # From here on nobody holds them: only their uses keep them.
        engine.retain(engine.start(1))
        engine.score(engine.start(30), torch.arange(first, first + 30))
        engine.retain(engine.start(1))
    before = engine.statistics().num_edges
    assert engine.statistics().num_evictions > 0
    engine.score(engine.start(10), often)
    assert engine.statistics().num_edges == before


def test_uses_before_an_eviction_count_half():
    trie = HistoryTrie(torch.device("cpu"))
    leaf = trie.new_nodes(torch.full((3,), START), torch.arange(3, 6))
    nothing = torch.zeros(trie.nodes.capacity, dtype=torch.bool)
    trie.num_uses[leaf[0]] = 8
    remove_nodes(trie, nothing.index_fill(0, leaf[2:], True))
    trie.num_uses[leaf[1]] = 5
    assert least_used(trie, nothing, 1).nonzero().squeeze(1).tolist() == [int(leaf[0])]


def test_the_least_used_candidates_are_chosen():
    trie = HistoryTrie(torch.device("cpu"))
    leaf = trie.new_nodes(torch.full((6,), START), torch.arange(3, 9))
    parent = leaf[:1]
    deeper = trie.new_nodes(parent, torch.tensor([9]))
    trie.num_uses[torch.cat([leaf, deeper])] = torch.tensor([1, 40, 3, 50, 2, 60, 5], dtype=torch.int32)
    is_kept = torch.zeros(trie.nodes.capacity, dtype=torch.bool)
    is_kept[leaf[4]] = True
    chosen = [least_used(trie, is_kept, num).nonzero().squeeze(1).tolist() for num in (1, 2, 3)]
    assert all(int(leaf[4]) not in some for some in chosen)
    assert chosen[0] == [int(leaf[2])]  # not the parent, whose uses are at least those of what follows it
    assert int(leaf[1]) not in chosen[2] and int(leaf[5]) not in chosen[2]


def test_limits_fit_into_the_capacity():
    costs = ByteCosts(per_slot=16, per_node=20, per_row=1032)
    for capacity in (100_000, 1_000_000, 50_000_000):
        for num_edges in (0, capacity // 200, capacity // 120):
            limits = Limits.within(capacity, costs, num_edges, num_edges)
            assert limits.max_edges >= num_edges
            # Each edge may lead to a node of its own; two more have no edge.
            assert limits.max_nodes == limits.max_edges + START + 1
            total = 16 * limits.num_slots + 20 * limits.max_nodes + 1032 * limits.max_rows
            assert capacity - 1032 - 512 < total <= capacity


def test_tables_double_where_half_of_the_bytes_allow_it_or_all_edges_need_it():
    costs = ByteCosts(per_slot=16, per_node=20, per_row=100)
    exact = 2 * 512 * (16 + int(MAX_LOAD * 20)) + 512  # half of it is a table of 512 slots with its nodes
    assert [Limits.within(bytes_, costs).num_slots for bytes_ in (exact - 1, exact, 2 * exact)] == [256, 512, 1024]
    full = int(MAX_LOAD * 256)
    assert [Limits.within(1, costs, num).num_slots for num in (0, full, full + 1, 2 * full)] == [256, 256, 512, 512]
    limits = Limits.within(1, costs, full, full + 100)
    assert (limits.max_edges, limits.max_nodes, limits.max_rows) == (full, full + 100, 16)
    assert Limits.within(1, costs, full, full + START + 1).max_nodes == full + START + 1


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_that_were_asked_for_last_are_not_computed_again(compiled):
    """Of the histories that fit, the first is asked for last, before rows have to be dropped for one more."""
    torch.manual_seed(0)
    network = RNNLanguageModel(Vocabulary(f"w{i}" for i in range(60)), RNNLMConfig(32, 256)).eval()
    engine = CachedRNNLM(network, CacheOptions(capacity_bytes=50_000, compiled=compiled))
    most = engine.capacity.limits.max_rows
    start, word_id = engine.start(1), torch.arange(4, 4 + most)

    def ask(context_idx, word):
        return engine.score(context_idx, torch.tensor([word]))[1]

    contexts = [ask(start, word) for word in word_id.tolist()]
    for context_idx in contexts[: most - 2]:  # the rows of the two first nodes are held as well
        ask(context_idx, 4)
    ask(contexts[0], 5)
    assert engine.statistics().num_dropped_rows == 0
    ask(contexts[most - 2], 4)
    assert engine.statistics().num_dropped_rows > 0
    num_rows = engine.statistics().num_hidden_rows
    ask(contexts[0], 6)
    assert engine.statistics().num_hidden_rows == num_rows
    ask(contexts[1], 6)
    assert engine.statistics().num_hidden_rows > num_rows


def test_rows_are_dropped_until_all_that_are_needed_fit():
    engine = CachedRNNLM(ToyNetwork(), CacheOptions(capacity_bytes=1))
    _, context_idx = engine.score(engine.start(14), torch.arange(3, 17))
    engine.score(context_idx, torch.full((14,), 3))
    rows, most = engine.hidden.rows, engine.capacity.limits.max_rows
    assert rows.num_used == most == 16
    nothing = context_idx[:0]
    assert engine.capacity.make_row_room(13, nothing) and rows.num_used == 3
    assert engine.statistics().num_dropped_rows == 13
    assert engine.capacity.make_row_room(13, nothing) and rows.num_used == 3
    assert not engine.capacity.make_row_room(16, nothing)


@pytest.mark.slow
def test_contexts_beyond_half_of_the_bytes_are_paid_with_hidden_rows_and_give_them_back():
    network = ToyNetwork(num_words=400, hidden_size=64)
    engine = CachedRNNLM(network, CacheOptions(capacity_bytes=150_000))
    rows_at_first = narrowest = engine.hidden.max_rows
    generator = torch.Generator().manual_seed(0)
    context = engine.start(1)
    for step in range(60):
        width = 150 if 20 <= step < 30 else 15
        word_id = torch.randint(3, 400, (5 * len(context),), generator=generator)
        _, next_idx = engine.score(context.repeat_interleave(5), word_id)
        context = next_idx[torch.randint(0, len(next_idx), (width,), generator=generator)]
        engine.retain(context)
        narrowest = min(narrowest, engine.hidden.max_rows)
    assert narrowest < rows_at_first / 2
    assert engine.hidden.max_rows > rows_at_first * 0.7
    assert engine.statistics().peak_bytes <= 150_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hidden_dtype": "int8"},
        {"history_precision": "sign"},
        {"recombination_length": 2},
        {"recombination_length": 2, "recombination": "best"},
    ],
    ids=str,
)
@pytest.mark.parametrize("network_class", [ToyNetwork, ToyNormalizedNetwork, ToyClassNetwork])
def test_the_bound_holds_after_every_call(network_class, options):
    engine = CachedRNNLM(network_class(num_words=60, hidden_size=32), CacheOptions(capacity_bytes=80_000, **options))
    generator = torch.Generator().manual_seed(0)
    context = engine.start(30)
    for _ in range(30):
        _, next_idx = engine.score(context.repeat(4), torch.randint(3, 60, (120,), generator=generator))
        assert engine.statistics().bytes_held <= 80_000
        context = next_idx[torch.randint(0, 120, (30,), generator=generator)]
        engine.retain(context)
    counts = engine.statistics()
    assert counts.num_evictions > 0
    assert counts.peak_bytes <= 80_000
    assert bool(torch.isfinite(engine.final(context)).all())


@pytest.mark.slow
def test_where_live_contexts_alone_pass_the_bound_they_take_what_they_need_and_no_more():
    network = ToyNetwork(num_words=3000, hidden_size=16)
    engine = CachedRNNLM(network, CacheOptions(capacity_bytes=50_000))
    plain = PlainLM(network)
    words = torch.arange(3, 2003)
    engine.retain(engine.start(1))
    _, context = engine.score(engine.start(2000), words)
    log_prob, _ = engine.score(context, words.flip(0))
    assert 50_000 < engine.statistics().peak_bytes < 104 * 4100 + 20_000
    for i in (0, 777, 1999):
        assert log_prob[i].item() == pytest.approx(plain.last_log_prob([3 + i, 2002 - i]), abs=1e-5)
    engine.retain(engine.start(1))
    for first in range(3, 3000, 100):
        _, context = engine.score(engine.start(97), torch.arange(first, first + 97))
        engine.retain(engine.start(1))
    counts = engine.statistics()
    assert counts.bytes_held <= 50_000


@pytest.mark.slow
@pytest.mark.parametrize("asks_again", [False, True])
def test_more_edges_between_live_contexts_than_contexts(asks_again):
    """Many live contexts widen the table; then 30 are left, with an edge from each to each.

    These are more edges than the contexts need slots, so their scores are forgotten, or kept where the same call asks
    for them.
    """
    engine = CachedRNNLM(ToyNetwork(num_words=700), CacheOptions(capacity_bytes=1, recombination_length=1))
    engine.retain(engine.start(1))
    _, context = engine.score(engine.start(600), torch.arange(3, 603))
    engine.retain(context)
    engine.score(context[:440], torch.arange(3, 443))
    live = context[:30]
    engine.retain(live)
    known = live.repeat_interleave(30), torch.arange(3, 33).repeat(30)
    expected, following = engine.score(*known)
    num_evictions = engine.statistics().num_evictions
    engine.retain(live)
    new = live.repeat_interleave(5), torch.arange(500, 650)
    queries = [torch.cat(pair) for pair in zip(known, new, strict=True)] if asks_again else new
    log_prob, next_idx = engine.score(*queries)
    assert engine.statistics().num_evictions > num_evictions
    assert bool((log_prob < 0.0).all())
    if asks_again:
        assert torch.equal(log_prob[:900], expected) and torch.equal(next_idx[:900], following)
    log_prob, next_idx = engine.score(*known)
    assert torch.equal(next_idx, following)
    torch.testing.assert_close(log_prob, expected, rtol=0, atol=1e-5)


def test_group_normalizers_stay_within_what_they_may_take():
    network = ToyClassNetwork(num_words=60)
    engine = CachedRNNLM(network, CacheOptions(capacity_bytes=1))
    context = engine.start(1)
    plain = PlainLM(network)
    for word in range(3, 40):
        log_prob, next_idx = engine.score(context.repeat(50), torch.arange(3, 53))
        assert log_prob[7].item() == pytest.approx(plain.last_log_prob([*range(3, word), 10]), abs=1e-5)
        context = next_idx[word - 3 : word - 2]
    assert engine.output._group_normalizer.num_bytes <= 256 * engine.hidden.max_rows


ALL_OPTIONS = [
    {},
    {"hidden_dtype": "int8"},
    {"hidden_dtype": "float16"},
    {"history_precision": "sign"},
    {"recombination_length": 2},
    {"recombination_length": 2, "recombination": "best"},
]


NOT_COUNTED = ("_factor", "factors", "_room")


def num_bytes(tensor):
    return tensor.numel() * tensor.element_size()


def bytes_of_arrays(part):
    """The bytes of all tensors and tables that belong to a part of an engine.

    Lists of free numbers do not count, nor does the room behind the hidden rows, which is not touched.
    """
    total = 0
    for name, value in vars(part).items():
        if isinstance(value, HashTable):
            total += num_bytes(value.keys) + num_bytes(value.values)
        elif isinstance(value, torch.Tensor) and name not in NOT_COUNTED:
            total += num_bytes(value)
    return total


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("network_class", [ToyNetwork, ToyNormalizedNetwork, ToyClassNetwork])
def test_bytes_held_are_those_of_the_arrays(network_class, options):
    engine = CachedRNNLM(network_class(), CacheOptions(**options))
    beam_search_unchecked(engine, 12)
    parts = [engine.trie, engine.hidden, engine.output, engine.recombination, engine.sharing]
    expected = sum(bytes_of_arrays(part) for part in parts if part is not None)
    assert engine.statistics().bytes_held == expected > 8_000


def beam_search_unchecked(engine, num_steps):
    generator = torch.Generator().manual_seed(0)
    context = engine.start(10)
    for _ in range(num_steps):
        _, context = engine.score(context, torch.randint(3, 24, (10,), generator=generator))


def test_the_costs_of_slots_nodes_and_rows():
    """Rows of 8 + 1 numbers and the call that used them last; 4 bytes a normalizer, 256 for a history's groups."""

    def costs(network_class, **options):
        return CachedRNNLM(network_class(), CacheOptions(capacity_bytes=10**6, **options)).capacity.costs

    assert costs(ToyNetwork) == ByteCosts(16, 20, 4 * 9 + 4)
    assert costs(ToyNetwork, hidden_dtype="int8") == ByteCosts(16, 20, 9 + 2 * 4 + 4)
    assert costs(ToyNormalizedNetwork) == ByteCosts(16, 20, 4 * 9 + 4 + 4)
    assert costs(ToyClassNetwork) == ByteCosts(16, 20, 4 * 9 + 4 + 4 + 256)
    # Normalizers belong to nodes where histories share rows, which a table with four slots a row finds.
    assert costs(ToyNormalizedNetwork, history_precision="sign") == ByteCosts(16, 20 + 4, 4 * 9 + 4 + 4 * 16)
    assert costs(ToyNetwork, recombination_length=2) == ByteCosts(2 * 16, 20, 4 * 9 + 4)
    assert costs(ToyNetwork, recombination_length=2, recombination="best") == ByteCosts(2 * 16, 20 + 8, 4 * 9 + 4)


def test_groups_of_a_bounded_cache_are_kept_as_long_as_they_fit():
    """8 histories of 256 bytes are 128 slots of 16, of which half are filled: 8 histories with 5 classes each fit."""
    network = ToyClassNetwork()
    counts = QueryStatistics()
    cache = OutputCache(network, CacheOptions(), counts)
    cache.limit_groups(8)
    cache.reserve(8)
    row, word_id = torch.arange(8).repeat_interleave(5), torch.arange(3, 8).repeat(8)
    hidden, history = torch.randn(8, network.hidden_size)[row], torch.full((40, 2), 4)
    expected = network.log_prob(hidden, history, word_id)
    for _ in range(2):
        assert torch.allclose(cache.score(row, hidden, history, word_id), expected, atol=1e-5)
        assert counts.num_group_normalizers == network.num_group_normalizers == 40
    assert counts.num_history_normalizers == network.num_normalizers == 8


def test_without_room_for_a_table_no_group_is_kept():
    network = ToyClassNetwork()
    counts = QueryStatistics()
    cache = OutputCache(network, CacheOptions(), counts)
    cache.limit_groups(0)
    cache.reserve(1)
    query = torch.tensor([0]), torch.randn(1, network.hidden_size), torch.full((1, 2), 4), torch.tensor([5])
    for num_computed in (1, 2):
        cache.score(*query)
        assert (counts.num_group_normalizers, counts.num_history_normalizers) == (num_computed, 1)


def test_room_is_made_for_a_single_history():
    network = ToyNormalizedNetwork()
    cache = OutputCache(network, CacheOptions(), QueryStatistics())
    for num in (1, 2, 2):
        cache.reserve(num)
        row = torch.tensor([num - 1])
        cache.score(row, torch.randn(1, network.hidden_size), torch.full((1, 2), 4), torch.tensor([5]))
    assert network.num_normalizers == 2


def test_paths_of_a_tree_take_32_numbers_a_history():
    class Tree(ToyNetwork):
        cacheable_terms = "tree"

    cache = OutputCache(Tree(), CacheOptions(), QueryStatistics())
    table = cache.num_bytes
    assert cache.bytes_of_history == 4 * 32
    for num, held in ((4, 4), (9, 9), (6, 9)):
        cache.reserve(num)
        assert cache.num_bytes == table + held * 4 * 32
    unused = OutputCache(Tree(), CacheOptions(cache_tree_paths=False), QueryStatistics())
    unused.reserve(4)
    assert (unused.bytes_of_history, unused.num_bytes) == (0, table)


def test_numbers_beyond_a_trim_are_gone():
    rows = RowAllocator(8, torch.device("cpu"))
    rows.take(7)
    rows.give_back(torch.tensor([6, 2, 4, 5]))
    rows.trim(4)
    assert (rows.num_used, rows.num_free, rows.is_used().tolist()) == (3, 1, [True, True, False, True])
    assert rows.take(1).tolist() == [2]
    assert rows.num_free == 0
    with pytest.raises(IndexError, match="1 rows asked for, 0 of 4 free"):
        rows.take(1)


def test_numbers_grow_by_a_quarter_up_to_the_limit_and_pass_it_only_for_what_is_used():
    rows = RowAllocator(80, torch.device("cpu"), limit=95)
    assert rows.capacity_for(80) == 80
    assert rows.capacity_for(81) == 95
    assert rows.capacity_for(96) == 96
    rows.take(50)
    assert rows.capacity_for(30) == 80
    assert rows.capacity_for(46) == 96
    rows.limit = None
    assert rows.capacity_for(31) == 100


@pytest.mark.parametrize("limit", [None, 120])
def test_rows_grow_in_small_steps_within_their_room(limit):
    """Room for 4 * 100 rows and a step less, or up to the limit; beyond it, the rows are copied."""
    store = HiddenStore(6, 6, "float32", torch.device("cpu"))
    if limit is not None:
        store.limit_rows(limit)
    state = torch.randn(410, 6, generator=torch.Generator().manual_seed(0))
    row = [store.append(state[:100])]
    begin, most = store.state.data_ptr(), 370 if limit is None else limit
    for first in range(100, most):
        row.append(store.append(state[first : first + 1]))
        assert store.rows.capacity <= first + 1 + first // 16
        assert (
            store.num_bytes == store.rows.capacity * (6 * 4 + 4) == num_bytes(store.state) + num_bytes(store.last_used)
        )
    assert store.state.data_ptr() == begin
    row.append(store.append(state[most : most + 40]))
    assert store.state.data_ptr() != begin
    assert torch.equal(store.read(torch.cat(row)), state[: most + 40])
    store.rows.give_back(torch.arange(90))
    kept = state[store.compact(0)]
    assert store.append(state[:1]).tolist() == [len(kept)]
    assert torch.equal(store.read(torch.arange(len(kept) + 1)), torch.cat([kept, state[:1]]))


def test_rows_that_were_used_last_and_those_without_a_parent_stay():
    """Rows 0 and 1 are those of the two first nodes; node 2 is needed now, and 5 was used after 3 and 4."""
    device = torch.device("cpu")
    trie, hidden = HistoryTrie(device), HiddenStore(3, 3, "float32", device)
    node = trie.new_nodes(torch.full((4,), START), torch.arange(5, 9))
    row = hidden.append(torch.zeros(6, 3))
    trie.hidden_row[torch.cat([torch.tensor([BEFORE_START, START]), node])] = row.int()
    hidden.last_used[:6] = torch.tensor([0, 9, 1, 2, 3, 4], dtype=torch.int32)

    def held():
        return (trie.hidden_row[:6] >= 0).nonzero().squeeze(1).tolist()

    drop_rows(trie, hidden, node[:1], 6)
    assert held() == [0, 1, 2, 3, 4, 5]
    drop_rows(trie, hidden, node[:1], 4)
    assert held() == [0, 1, 2, 5]
    hidden.rows.give_back(torch.tensor([3, 4]))
    drop_rows(trie, hidden, node[:1], 0)
    assert held() == [0, 2]
