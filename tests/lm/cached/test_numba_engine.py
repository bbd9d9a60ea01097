"""A compiled loop that answers in an engine's stead gives what the engine itself gives."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from asr.kernels.byte_products import has_byte_products
from asr.kernels.jit import jit, kernel
from asr.kernels.lookup import expand, of_any_type
from asr.lm.cached import engine_numba
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.cached.engine_numba import MAX_EDGES, look_up_cached
from asr.lm.combine import Difference, RemappedLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import Vocabulary
from tests.reference.toy_network import ToyNetwork

pytest.importorskip("numba")
VOCABULARY = Vocabulary([f"W{i}" for i in range(30)])


def network(maxent_order=3, embedding_size=6, **options):
    torch.manual_seed(0)
    made = RNNLanguageModel(
        VOCABULARY, RNNLMConfig(embedding_size, 9, maxent_order=maxent_order, maxent_size=1000, log_z=0.3, **options)
    )
    if made.maxent is not None:
        torch.nn.init.normal_(made.maxent.weight)
    return made


def asked_of_loop(engine, context_idx, word_id):
    """What the loop answers once the engine has made everything ready, and how often it could not."""
    log_prob, next_idx, num_waits = torch.empty(len(word_id)), torch.empty_like(word_id), 0
    while True:
        tables = engine.lookup_tables()
        queries = context_idx.numpy(), word_id.numpy()
        could = jit(look_up_cached)(*queries, tables, log_prob.numpy(), next_idx.numpy())
        engine.expand(context_idx if not could else context_idx[:0], context_idx)
        if could:
            return log_prob, next_idx, num_waits
        num_waits += 1


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 1024])
@pytest.mark.parametrize(
    ("caches", "options"),
    [
        ({}, {}),
        ({}, {"maxent_order": 0}),
        ({}, {"cell": "sigmoid"}),
        ({}, {"num_layers": 2}),
        ({"hidden_dtype": "int8"}, {}),
        ({"hidden_dtype": "int8"}, {"num_layers": 2}),
        ({"held_projections": 41}, {}),
        ({"held_projections": 5, "hidden_dtype": "int8"}, {}),
        ({"recombination_length": 1}, {}),
        ({"recombination_length": 2}, {}),
        ({"recombination_length": 3, "hidden_dtype": "int8"}, {}),
        ({"recombination_length": 7}, {}),
    ],
)
def test_equal_to_the_engine_itself(room, caches, options):
    made, generator = network(**options), torch.Generator().manual_seed(0)
    plain = CachedRNNLM(made, CacheOptions(compiled=False, **caches))
    lent, looped = (CachedRNNLM(made, CacheOptions(loop_room=room, **caches)) for _ in range(2))
    # With few words, many histories end in the same ones, and many queries of a call are equal.
    length = caches.get("recombination_length", 7)
    num_words = 8 if "recombination_length" in caches else len(VOCABULARY)
    context_idx, seen = plain.start(40), []
    for _ in range(6):
        word_id = torch.randint(3, num_words, (40,), generator=generator)
        expected, following = plain.score(context_idx, word_id)
        log_prob, next_idx, num_waits = asked_of_loop(lent, context_idx, word_id)
        # The network's products are made of other rows together.
        torch.testing.assert_close(log_prob, expected, rtol=0, atol=2e-6)
        assert torch.equal(next_idx, following) and (num_waits >= 1 or length == 1)
        log_prob_of_call, next_idx = looped.score(context_idx, word_id)
        torch.testing.assert_close(log_prob_of_call, expected, rtol=0, atol=2e-6)
        assert torch.equal(next_idx, following)
        assert torch.equal(lent.score(context_idx, word_id)[0], log_prob)
        seen.append((context_idx, word_id))
        context_idx = following[torch.randint(40, (40,), generator=generator)]
    # What either knows, both ways give at once.
    for context_idx, word_id in seen:
        log_prob, next_idx, num_waits = asked_of_loop(lent, context_idx, word_id)
        expected = plain.score(context_idx, word_id)
        torch.testing.assert_close(log_prob, expected[0], rtol=0, atol=2e-6)
        assert num_waits == 0 and torch.equal(next_idx, expected[1])
        assert torch.equal(looped.score(context_idx, word_id)[1], expected[1])
    counts, own, of_calls = (engine.statistics() for engine in (plain, lent, looped))
    for name in ("num_edges", "num_contexts", "num_hidden_rows", "num_outputs"):
        assert getattr(counts, name) == getattr(own, name) == getattr(of_calls, name)
    for name in ("num_calls", "num_queries", "num_edge_hits"):
        assert getattr(counts, name) == getattr(of_calls, name)
    assert own.hit_ratio == pytest.approx(1.0 - own.num_edges / own.num_queries)
    for name in ("seconds_find", "seconds_hidden", "seconds_output"):
        assert 0.0 < getattr(counts, name) < counts.seconds_total
    assert min(own.seconds_total, of_calls.seconds_total) > 0.0
    assert (counts.num_contexts - 2 < counts.num_edges) == (length < 7)
    lent.reset()
    assert asked_of_loop(lent, *seen[0])[2] >= 1


def test_nothing_is_added_where_something_lacks():
    engine = CachedRNNLM(network())
    word_id = torch.tensor([5, 6])
    _, context_idx, _ = asked_of_loop(engine, engine.start(2), word_id)
    mixed = torch.stack([engine.start(1)[0], context_idx[0]])
    before = engine.statistics().num_contexts
    tables = engine.lookup_tables()
    answers = torch.empty(2).numpy(), torch.empty(2, dtype=torch.int64).numpy()
    assert not jit(look_up_cached)(mixed.numpy(), torch.tensor([9, 9]).numpy(), tables, *answers)
    engine.expand(mixed[:0], mixed)
    assert engine.statistics().num_contexts == before


def test_engines_that_approximate_have_no_loop():
    made = network()
    assert CachedRNNLM(made).lookup_tables() is not None
    for options in (
        {"recombination_length": 2, "recombination": "best"},
        {"recombination_length": 2, "history_precision": "sign"},
        {"history_precision": "sign"},
        {"hidden_dtype": "float16"},
        {"cache_scores": False},
        {"cache_hidden": False},
        {"compiled": False},
    ):
        engine = CachedRNNLM(made, CacheOptions(**options))
        assert engine.lookup_tables() is None
        engine.expand(engine.start(1), engine.start(1))
    for other in (network(normalized=True), network(output="class"), ToyNetwork()):
        assert CachedRNNLM(other).lookup_tables() is None


@pytest.mark.slow
@pytest.mark.parametrize("capacity_bytes", [20_000, 40_000, 10**7])
def test_an_engine_with_a_capacity_has_a_loop_until_it_is_used_up(capacity_bytes):
    made, generator = network(), torch.Generator().manual_seed(0)
    plain, bounded = CachedRNNLM(made), CachedRNNLM(made, CacheOptions(capacity_bytes=capacity_bytes, loop_room=64))
    context_idx = own_idx = plain.start(40)
    num_by_loop = 0
    for _ in range(30):
        word_id = torch.randint(3, len(VOCABULARY), (40,), generator=generator)
        expected, following = plain.score(context_idx, word_id)
        log_prob, next_idx, own_following = torch.empty(40), torch.empty(40, dtype=torch.int64), None
        while own_following is None:
            tables = bounded.lookup_tables()
            if tables is None:
                log_prob, own_following = bounded.score(own_idx, word_id)
                break
            queries = own_idx.numpy(), word_id.numpy()
            could = jit(look_up_cached)(*queries, tables, log_prob.numpy(), next_idx.numpy())
            own_following = next_idx if could else None
            bounded.expand(own_idx[:0] if could else own_idx, next_idx if could else own_idx)
            num_by_loop += could
        torch.testing.assert_close(log_prob, expected, rtol=0, atol=2e-6)
        chosen = torch.randint(40, (40,), generator=generator)
        context_idx, own_idx = following[chosen], own_following[chosen]
        bounded.retain(own_idx)
    assert (num_by_loop == 30) == (capacity_bytes == 10**7) and num_by_loop > 0
    statistics = bounded.statistics()
    assert (statistics.num_evictions > 0) == (capacity_bytes < 10**7)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 3])
def test_histories_share_contexts_in_the_loop_and_after_a_capacity_is_used_up(length):
    """Both engines forget the same histories, so that the same ones come first afterwards."""
    made, generator = network(), torch.Generator().manual_seed(0)
    options = {"capacity_bytes": 60_000, "recombination_length": length, "loop_room": 8}
    plain, looped = (CachedRNNLM(made, CacheOptions(compiled=compiled, **options)) for compiled in (False, True))
    context_idx, num_by_loop = plain.start(40), 0
    for _ in range(40):
        word_id = torch.randint(3, len(VOCABULARY), (40,), generator=generator)
        num_by_loop += looped.lookup_tables() is not None
        expected, following = plain.score(context_idx, word_id)
        found, own_following = looped.score(context_idx, word_id)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
        assert torch.equal(own_following, following)
        context_idx = following[torch.randint(40, (40,), generator=generator)]
        for engine in (plain, looped):
            engine.retain(context_idx)
    counts, own = plain.statistics(), looped.statistics()
    assert 0 < num_by_loop < 40 and own.num_evictions > 0
    for name in ("num_evictions", "num_evicted_contexts", "num_contexts", "num_edges"):
        assert getattr(counts, name) == getattr(own, name)


def test_the_loop_adds_no_more_edges_than_the_table_of_endings_has_room_for():
    """63 endings are half of 128 slots but for one; 65 edges and the nodes have room for more."""
    engine = CachedRNNLM(network(), CacheOptions(recombination_length=2, loop_room=1))
    words = torch.arange(3, 23)
    _, contexts = engine.score(engine.start(20), words)
    _, longer = engine.score(contexts.repeat_interleave(20)[:43], words.repeat(20)[:43])
    engine.score(longer[:2], words[:1].repeat(2))  # A A A ends as A A does, and A B A as B A does
    parts = engine.trie.edges, engine.trie.nodes, engine.recombination.table
    assert (engine.trie.edges.count, *(part.num_free for part in parts)) == (65, 63, 15, 1)
    assert engine.lookup_tables().counts[MAX_EDGES] == 66


def test_a_call_may_take_the_last_edges_that_a_capacity_has_room_for():
    made = network()
    plain, bounded = CachedRNNLM(made), CachedRNNLM(made, CacheOptions(capacity_bytes=20_000, loop_room=8))
    most = bounded.capacity.limits.max_edges
    words, num_asked = torch.arange(3, len(VOCABULARY)), 0
    context_idx = plain.start(1)
    _, contexts = plain.score(context_idx.repeat(len(words)), words)
    # Each call stops where the arrays end, the last one for the second time where no more fits than it asks for.
    for num in (27, 73, most - 100):
        asked = torch.cartesian_prod(torch.cat([context_idx, contexts]), words)[num_asked : num_asked + num]
        expected = plain.score(asked[:, 0], asked[:, 1])
        found = bounded.score(asked[:, 0], asked[:, 1])
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-6)
        assert torch.equal(found[1], expected[1])
        num_asked += num
    assert bounded.trie.edges.count == most and not bounded.capacity.has_room(1)
    assert bounded.statistics().num_evictions == 0


def test_loops_serve_again_once_nothing_is_live():
    made = network()
    plain, bounded = CachedRNNLM(made), CachedRNNLM(made, CacheOptions(capacity_bytes=20_000, loop_room=8))
    words = torch.arange(3, len(VOCABULARY))
    for _ in range(3):
        context_idx = own_idx = bounded.start(len(words))
        for _ in range(8):
            expected, context_idx = plain.score(context_idx, words)
            found, own_idx = bounded.score(own_idx, words)
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
            bounded.retain(own_idx)
        assert bounded.lookup_tables() is None
        bounded.retain(own_idx[:0])
        assert bounded.lookup_tables() is not None and bounded.trie.num_nodes == 2
    # With room to spare nothing is forgotten.
    _, context_idx = bounded.score(bounded.start(1), words[:1])
    bounded.retain(context_idx[:0])
    assert bounded.trie.num_nodes == 3


@kernel(fastmath=False)
def expands(context_idx, tables):
    return expand(context_idx, tables)


BYTES = {"hidden_dtype": "int8", "hidden_products": "int8"}
needs_byte_products = pytest.mark.skipif(not has_byte_products(), reason="this processor does not multiply bytes")


def expanded_by_loop(lm, context_idx):
    tables = lm.lookup_tables()
    num = jit(expands)(context_idx.numpy(), of_any_type(tables))
    lm.expand(context_idx[:0], context_idx)
    return num


@pytest.mark.one_stack
@pytest.mark.slow
@needs_byte_products
@pytest.mark.parametrize("capacity_bytes", [None, 10**7])
@pytest.mark.parametrize(
    ("caches", "options"),
    [
        ({}, {}),
        ({"recombination_length": 2}, {}),
        ({}, {"embedding_size": 9}),
        ({"held_projections": 41}, {}),
    ],
)
def test_a_loop_runs_the_hidden_layer_as_the_engine_does(capacity_bytes, caches, options):
    made, generator = network(**options), torch.Generator().manual_seed(1)
    assert (made.projection is not None) == ("embedding_size" not in options)
    settings = CacheOptions(capacity_bytes=capacity_bytes, **BYTES, **caches)
    called, looped = CachedRNNLM(made, settings), CachedRNNLM(made, settings)
    context_idx = called.start(40)
    for _ in range(6):
        word_id = torch.randint(3, 9, (40,), generator=generator)
        num_rows = called.statistics().num_hidden_rows
        called.lookup_tables()
        called.expand(context_idx, context_idx)
        assert expanded_by_loop(looped, context_idx) == called.statistics().num_hidden_rows - num_rows > 0
        looped.expand(context_idx[:0], context_idx)  # what was taken over is not taken again
        assert expanded_by_loop(looped, context_idx) == 0
        row, own_row = called.trie.hidden_row[context_idx].long(), looped.trie.hidden_row[context_idx].long()
        assert torch.equal(row, own_row)
        for name in ("state", "scale", "last_used"):
            assert torch.equal(getattr(called.hidden, name)[row], getattr(looped.hidden, name)[own_row])
        (expected, following), (log_prob, next_idx) = (lm.score(context_idx, word_id) for lm in (called, looped))
        assert torch.equal(log_prob, expected) and torch.equal(next_idx, following)
        context_idx = following[torch.randint(40, (40,), generator=generator)]
    counts, own = called.statistics(), looped.statistics()
    for name in ("num_hidden_rows", "num_hidden_calls", "largest_hidden_batch", "num_hidden_held", "num_contexts"):
        assert getattr(counts, name) == getattr(own, name) > 0
    looped = CachedRNNLM(made, settings, clock=lambda: 0.0)
    assert expanded_by_loop(looped, looped.start(1)) == 1
    own = looped.statistics()
    assert 0.0 < own.seconds_hidden == own.seconds_total < 10.0  # the loop has a clock of its own


@pytest.mark.slow
@needs_byte_products
def test_a_loop_computes_overwritten_projections_again():
    made, generator = network(), torch.Generator().manual_seed(2)
    called = CachedRNNLM(made, CacheOptions(compiled=False, **BYTES))
    looped = CachedRNNLM(made, CacheOptions(held_projections=48, **BYTES))
    words, contexts = torch.arange(3, 30), []
    for lm in (called, looped):
        _, first = lm.score(lm.start(len(words)), words)
        contexts.append(torch.cat([first, lm.score(first, words)[1]]))
    num_rows = expanded_by_loop(looped, contexts[1])  # the first histories have rows
    assert num_rows == 27 and int(looped.projections.num_computed) == len(words) + 1 + num_rows
    for word in range(4, 30):
        some = torch.randperm(54, generator=generator)[: int(torch.randint(1, 49, (1,), generator=generator))]
        some = torch.cat([some, some[:3]])
        context_idx = contexts[1][some]
        tables = looped.lookup_tables()
        word_id, log_prob, next_idx = torch.full_like(some, word), torch.empty(len(some)), torch.empty_like(some)
        queries = context_idx.numpy(), word_id.numpy()
        assert jit(look_up_cached)(*queries, tables, log_prob.numpy(), next_idx.numpy())
        looped.expand(context_idx[:0], context_idx)
        assert torch.equal(log_prob, called.score(contexts[0][some], word_id)[0])
    assert int(looped.projections.num_computed) > 4 * 54 and len(looped.projections.hidden) == 48
    # More than are held at once: the engine makes room when it is asked again.
    context_idx, word_id = contexts[1][:49], torch.full((49,), 30)
    tables, log_prob, next_idx = looped.lookup_tables(), torch.empty(49), torch.empty_like(word_id)
    for num, could in ((49, False), (20, True)):
        queries = context_idx[:num].numpy(), word_id[:num].numpy()
        assert jit(look_up_cached)(*queries, tables, log_prob[:num].numpy(), next_idx[:num].numpy()) == could
    looped.expand(context_idx[:0], context_idx)
    assert torch.equal(log_prob[:20], called.score(contexts[0][:20], word_id[:20])[0])
    word_id = word_id + 1
    log_prob, _, num_waits = asked_of_loop(looped, context_idx, word_id)
    assert num_waits == 0 and len(looped.projections.hidden) == 60
    assert torch.equal(log_prob, called.score(contexts[0][:49], word_id)[0])


@pytest.mark.slow
@needs_byte_products
@pytest.mark.parametrize("capacity_bytes", [None, 16 * 4 * 64 * 19])  # 19 places
def test_a_query_that_needs_more_projections_than_are_held_gets_room_or_leaves_the_loop(capacity_bytes):
    made, words = network(embedding_size=64), torch.arange(5, 25)
    plain = CachedRNNLM(made, CacheOptions(compiled=False, **BYTES))
    expected, _ = plain.score(plain.score(plain.start(20), words)[1], words)
    looped = CachedRNNLM(made, CacheOptions(held_projections=8, capacity_bytes=capacity_bytes, loop_room=8, **BYTES))
    _, context_idx = looped.score(looped.start(20), words)
    assert expanded_by_loop(looped, context_idx) == 20
    assert int(looped.projections.num_computed) == 1 and len(looped.projections.hidden) == 8  # none is lost unread
    log_prob, next_idx, tables = torch.empty(20), torch.empty_like(words), looped.lookup_tables()
    queries, answers = (context_idx.numpy(), words.numpy()), (log_prob.numpy(), next_idx.numpy())
    assert not jit(look_up_cached)(*queries, tables, *answers)
    looped.expand(context_idx, context_idx)
    assert len(looped.projections.hidden) == 8  # not one more until the loop begins
    tables = looped.lookup_tables()
    assert (tables is None) == (capacity_bytes is not None)
    if tables is None:
        log_prob, _ = looped.score(context_idx, words)
    else:
        assert len(looped.projections.hidden) == 20 and jit(look_up_cached)(*queries, tables, *answers)
    torch.testing.assert_close(log_prob, expected, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_loop_leaves_overwritten_projections_of_floats_to_the_engine():
    made, words = network(), torch.arange(3, 30)
    plain, looped = (
        CachedRNNLM(made, CacheOptions(compiled=False)),
        CachedRNNLM(made, CacheOptions(held_projections=48)),
    )
    contexts = []
    for lm in (plain, looped):
        _, first = lm.score(lm.start(len(words)), words)
        _, second = lm.score(first, words)
        lm.score(second, words)  # 27 projections before these, and 48 places
        contexts.append(first)
    log_prob, _, num_waits = asked_of_loop(looped, contexts[1], words.flip(0))
    torch.testing.assert_close(log_prob, plain.score(contexts[0], words.flip(0))[0], rtol=0, atol=2e-6)
    assert num_waits == 1


@pytest.mark.slow
@needs_byte_products
def test_a_copy_of_an_engine_goes_on_by_itself():
    made, words = network(), torch.arange(3, 30)
    plain, used = CachedRNNLM(made, CacheOptions(compiled=False, **BYTES)), CachedRNNLM(made, CacheOptions(**BYTES))
    context_idx, own_idx = plain.start(len(words)), used.start(len(words))
    for shift in range(12):
        expected, context_idx = plain.score(context_idx, words.roll(shift))
        expanded_by_loop(used, own_idx)
        used.lookup_tables()  # makes room, so that the copy need not
        used = copy.deepcopy(used)
        log_prob, own_idx, _ = asked_of_loop(used, own_idx, words.roll(shift))
        assert torch.equal(log_prob, expected)
    assert int(used.projections.num_computed) == 12 * len(words) - len(words) + 1


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_a_copy_in_another_process_goes_on_as_the_engine_does(compiled):
    engine, words = CachedRNNLM(network(), CacheOptions(compiled=compiled)), torch.arange(3, 30)
    context_idx = engine.start(len(words))
    for shift in range(3):
        _, context_idx = engine.score(context_idx, words.roll(shift))
    copied, own_idx = pickle.loads(pickle.dumps(engine)), context_idx.clone()
    earlier = []
    for shift in range(40):  # all arrays grow meanwhile
        earlier.append((context_idx, words.roll(shift)))
        expected, context_idx = engine.score(context_idx, words.roll(shift))
        log_prob, own_idx = copied.score(own_idx, words.roll(shift))
        assert torch.equal(log_prob, expected) and torch.equal(own_idx, context_idx)
    for queries in earlier:
        assert all(map(torch.equal, copied.score(*queries), engine.score(*queries)))


@pytest.mark.slow
@needs_byte_products
def test_a_loop_leaves_to_the_engine_what_it_cannot_expand(monkeypatch):
    made, words = network(), torch.arange(5, 25)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 1)
        assert network().half().float().step_tables() is None  # its weights are kept as float16 outside `byte_products`
    # Not all in bytes, or not in one step.
    for options in ({}, {"hidden_dtype": "int8"}, {"hidden_products": "int8"}, {**BYTES, "batching": "query"}):
        engine = CachedRNNLM(made, CacheOptions(**options))
        assert expanded_by_loop(engine, engine.start(1)) == -1
    for other in (network(num_layers=2), network(cell="relu")):
        engine = CachedRNNLM(other, CacheOptions(**BYTES))
        assert expanded_by_loop(engine, engine.start(1)) == -1

    def twenty_contexts(**options):
        engine = CachedRNNLM(made, CacheOptions(**BYTES, **options))
        return engine, engine.score(engine.start(20), words)[1]

    engine, context_idx = twenty_contexts()
    for unknown in (-1, 22):
        assert expanded_by_loop(engine, torch.cat([context_idx, torch.tensor([unknown])])) == -1
    assert bool((engine.trie.hidden_row[context_idx] == -1).all())
    assert expanded_by_loop(engine, context_idx) == 20
    # Where a step of many rows would be divided among threads.
    engine, context_idx = twenty_contexts()
    monkeypatch.setattr(engine_numba, "max_byte_rows", lambda: 19)
    assert expanded_by_loop(engine, context_idx) == -1
    assert expanded_by_loop(engine, context_idx[1:]) == 19
    monkeypatch.undo()
    # With the two rows of its start, a row more than fits.
    engine, context_idx = twenty_contexts(capacity_bytes=10**6)
    engine.capacity.limits = replace(engine.capacity.limits, max_rows=21)
    assert expanded_by_loop(engine, context_idx) == -1
    tables = of_any_type(held := engine.lookup_tables())
    found = [jit(expands)(part.numpy(), tables) for part in (context_idx[:10], context_idx[:19], context_idx)]
    assert found == [10, 9, -1] and held is not None
    engine.expand(context_idx[:0], context_idx)
    engine.capacity.limits = replace(engine.capacity.limits, max_rows=22)
    assert expanded_by_loop(engine, context_idx) == 1
    # Rows that were freed are not those that the loop would take.
    engine, context_idx = twenty_contexts()
    engine.expand(context_idx[:2], context_idx)
    engine.trie.hidden_row[context_idx[0]] = -1
    engine.hidden.rows.give_back(torch.tensor([2]))
    assert expanded_by_loop(engine, context_idx) == -1


@pytest.mark.slow
@needs_byte_products
def test_a_loop_expands_the_histories_of_all_combined_models():
    one, other = (CachedRNNLM(network(), CacheOptions(**options)) for options in (BYTES, {}))
    order = torch.cat([torch.arange(4), torch.arange(4, len(VOCABULARY)).flip(0)])
    remapped = RemappedLM(one, Vocabulary([VOCABULARY.words[int(i)] for i in order[4:]]))
    context_idx = remapped.score(remapped.start(3), torch.tensor([5, 6, 7]))[1]
    assert expanded_by_loop(remapped, context_idx) == 3 and expanded_by_loop(remapped, context_idx) == 0
    pair = Difference(one, CachedRNNLM(network(), CacheOptions(**BYTES)))
    context_idx = pair.score(pair.start(3), torch.tensor([8, 9, 10]))[1]
    assert expanded_by_loop(pair, context_idx) == 6
    mixed = Difference(one, other)
    assert expanded_by_loop(mixed, mixed.score(mixed.start(3), torch.tensor([11, 12, 13]))[1]) == -1


@needs_byte_products
def test_code_on_disk_says_whether_it_uses_tiles(monkeypatch):
    """A process that Linux does not let use them must not load it. Only the type of the tables says what is called."""
    from numba import typeof

    from asr.kernels import intrinsics

    kinds = intrinsics.expansion_types(typeof(CachedRNNLM(network(), CacheOptions(**BYTES)).lookup_tables()))
    assert ("tiles", int(intrinsics.has_tiles())) in expand.stamps(kinds)
    monkeypatch.setattr(intrinsics, "_may_use_tiles", lambda: False)
    assert ("tiles", 0) in expand.stamps(kinds)
