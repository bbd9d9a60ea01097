"""What may be turned off changes no score; what approximates does so as told."""

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asr.errors import AsrError
from asr.kernels.linear import are_bytes_multiplied, byte_products, has_byte_products
from asr.lm.cached.approximations import CacheOptions, QuantizedHistory, Recombination
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.cached.states import HiddenStore, _packed, _unpacked
from asr.lm.cached.trie import START, HistoryTrie
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.testing.plain_lm import PlainLM
from asr.text.symbols import Vocabulary
from tests.reference.toy_network import ToyClassNetwork, ToyNetwork

HYPOTHESES = st.lists(st.lists(st.integers(3, 12), min_size=4, max_size=4), min_size=1, max_size=12)


def scores(engine, hypotheses):
    """log P of each word of hypotheses of equal length, (K, L)."""
    words = torch.tensor(hypotheses)
    context, columns = engine.start(len(hypotheses)), []
    for position in range(words.shape[1]):
        log_prob, context = engine.score(context, words[:, position])
        columns.append(log_prob)
    return torch.stack(columns, dim=1)


def plain_scores(network, hypotheses):
    plain = PlainLM(network)
    return torch.tensor([plain.log_probs(words) for words in hypotheses])


@pytest.mark.slow
@given(
    hypotheses=HYPOTHESES,
    caches=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    batching=st.sampled_from(["frame", "query"]),
    num_workers=st.integers(1, 3),
)
def test_caches_batching_and_workers_change_no_score(hypotheses, caches, batching, num_workers):
    network = ToyClassNetwork()
    engine = CachedRNNLM(
        network, CacheOptions("float32", *caches, batching=batching), hidden_networks=[network] * num_workers
    )
    for _ in range(2):
        assert torch.allclose(scores(engine, hypotheses), plain_scores(network, hypotheses), atol=1e-5)


def test_products_of_a_state_are_made_once_for_all_that_follow_it(monkeypatch):
    network = RNNLanguageModel(Vocabulary([f"W{i}" for i in range(30)]), RNNLMConfig(embedding_size=6, hidden_size=9))
    num_states = []

    def branch(state, before, word_id):
        num_states.append(len(state))
        return network.step(state[before], word_id)

    monkeypatch.setattr(network, "branch", branch)
    engine = CachedRNNLM(network)
    _, context = engine.score(engine.start(20), torch.arange(4, 24))
    _, context = engine.score(context[:3].repeat_interleave(8), torch.arange(24) + 4)
    log_prob, _ = engine.score(context, torch.full_like(context, 7))
    assert num_states[-1] == 3
    plain = PlainLM(network)
    expected = [plain.last_log_prob([4 + row // 8, 4 + row, 7]) for row in range(24)]
    assert log_prob.tolist() == pytest.approx(expected, abs=1e-5)


def test_each_cache_saves_its_own_work():
    hypotheses = [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 8, 9], [5, 6, 7, 8]]
    counts = []
    for num_caches in range(5):
        flags = [cache < num_caches for cache in range(4)]
        engine = CachedRNNLM(
            ToyClassNetwork(),
            CacheOptions(
                cache_hidden=flags[0],
                cache_scores=flags[1],
                cache_history_normalizers=flags[2],
                cache_group_normalizers=flags[3],
            ),
        )
        for _ in range(3):
            scores(engine, hypotheses)
        counts.append(engine.statistics())
    assert counts[1].num_hidden_rows == 5 < counts[0].num_hidden_rows
    assert counts[2].num_outputs == 7 < counts[1].num_outputs
    assert counts[3].num_history_normalizers == 5 < counts[2].num_history_normalizers
    assert counts[4].num_group_normalizers <= counts[3].num_group_normalizers


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("float16", 1e-2), ("bfloat16", 5e-2), ("int8", 5e-2)]
)
def test_hidden_rows_may_be_kept_in_fewer_bytes(dtype, tolerance):
    network = ToyNetwork()
    hypotheses = torch.randint(3, 24, (50, 6), generator=torch.Generator().manual_seed(0)).tolist()
    engine = CachedRNNLM(network, CacheOptions(hidden_dtype=dtype))
    error = (scores(engine, hypotheses) - plain_scores(network, hypotheses)).abs().max()
    assert (error > 1e-5) == (dtype != "float32")
    assert error < tolerance


@pytest.mark.parametrize("output_size", [4, 10])
def test_rows_of_bytes_have_a_scale_for_the_columns_of_the_output_layer(output_size):
    store = HiddenStore(10, output_size, "int8", torch.device("cpu"))
    state = torch.linspace(-0.5, 0.4, 10).repeat(20, 1)
    state[:, 10 - output_size :] *= 100.0
    state[7] = 0.0
    row = store.append(state)  # more rows than there is room for at first
    step = torch.empty(10)
    step[: 10 - output_size] = 0.5 / 127
    step[10 - output_size :] = state[0, 10 - output_size :].abs().max() / 127
    assert torch.all((store.read(row) - state).abs() <= 0.5001 * step)
    assert torch.equal(store.read(row, 10 - output_size), store.read(row)[:, 10 - output_size :])
    assert torch.all(store.read(row[7:8]) == 0.0)
    store.write(row[3:4], -state[:1])
    store.rows.give_back(row[:3])
    assert store.compact(18).tolist() == list(range(3, 20))
    assert torch.all((store.read(torch.tensor([0, 4])) - torch.stack([-state[0], state[7]])).abs() <= 0.5001 * step)
    assert store.bytes_per_row == 10 + 4 * len(store.scale[0]) + 4


@pytest.mark.parametrize("output_size", [4, 10])
def test_rows_of_bytes_are_rounded_to_the_nearest_step_and_keep_nan(output_size):
    store = HiddenStore(10, output_size, "int8", torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(30, 10, generator=generator) * torch.logspace(-20, 20, 30)[:, None]
    state[3] = 0.0
    row = store.append(state)[torch.randperm(30, generator=generator)]
    begin = 10 - output_size
    parts = [state[:, :begin], state[:, begin:]] if begin else [state]
    largest = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in parts], dim=1)
    step = (largest / 127).clamp(min=1e-12)
    expected = ((state / step).round() * step)[row]
    assert torch.equal(store.read(row), expected)
    assert torch.equal(store.rounded(state)[row], expected)
    state[5, begin], state[6, 9] = math.nan, math.inf
    store.write(torch.arange(30), state)
    read = store.read(torch.arange(30))
    assert read[[5, 6], begin:].isnan().all()
    assert not read[[4, 7]].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_hidden_layer_may_multiply_bytes(num_workers):
    torch.manual_seed(0)
    vocabulary = Vocabulary([f"W{i}" for i in range(21)])
    network = RNNLanguageModel(vocabulary, RNNLMConfig(embedding_size=24, hidden_size=40)).eval()
    hypotheses = torch.randint(3, 24, (50, 6), generator=torch.Generator().manual_seed(0)).tolist()
    options = CacheOptions(hidden_products="int8")
    engine = CachedRNNLM(network, options, hidden_networks=[network] * num_workers)
    found = scores(engine, hypotheses)
    assert not are_bytes_multiplied()
    with byte_products():
        assert torch.allclose(found, plain_scores(network, hypotheses), atol=1e-5)
    error = (found - plain_scores(network, hypotheses)).abs().max()
    assert (error > 1e-5) == has_byte_products()
    assert error < 0.05
    # A row is rounded by itself, whatever is beside it.
    alone = [scores(CachedRNNLM(network, options), [words])[0] for words in hypotheses[:5]]
    assert torch.allclose(found[:5], torch.stack(alone), atol=1e-5)


@pytest.mark.slow
@given(length=st.integers(1, 4), choice=st.sampled_from(["first", "best"]), hypotheses=HYPOTHESES)
def test_histories_that_end_in_the_same_words_share_a_context(length, choice, hypotheses):
    engine = CachedRNNLM(ToyNetwork(), CacheOptions(recombination_length=length, recombination=choice))
    words = torch.tensor(hypotheses)
    context = engine.start(len(hypotheses))
    for position in range(words.shape[1]):
        _, context = engine.score(context, words[:, position])
        endings = [
            (1, *row[: position + 1])[-length:] if position + 1 >= length else (1, *row[: position + 1])
            for row in hypotheses
        ]
        assert len(set(context.tolist())) == len(set(endings))


@pytest.mark.slow
@given(hypotheses=HYPOTHESES)
def test_a_recombination_length_beyond_the_hypotheses_is_exact(hypotheses):
    network = ToyNetwork()
    for choice in ("first", "best"):
        engine = CachedRNNLM(network, CacheOptions(recombination_length=6, recombination=choice))
        assert torch.allclose(scores(engine, hypotheses), plain_scores(network, hypotheses), atol=1e-5)


def test_first_come_history_stands_for_a_shared_context_and_the_best_takes_its_place():
    network = ToyNetwork(num_history_words=0)
    plain = PlainLM(network)
    histories = sorted(([5, 7], [6, 7]), key=plain.last_log_prob)  # the worse one comes first
    successor = torch.tensor([9])
    for choice, stands in (("first", histories[0]), ("best", histories[1])):
        for ask_between in (False, True):
            engine = CachedRNNLM(network, CacheOptions(recombination_length=1, recombination=choice))
            for words in histories:
                _, context = engine.score(engine.start(1), torch.tensor(words[:1]))
                _, context = engine.score(context, torch.tensor(words[1:]))
                if ask_between:
                    engine.score(context, torch.tensor([10]))
            log_prob, _ = engine.score(context, successor)
            assert log_prob.item() == pytest.approx(plain.last_log_prob([*stands, 9]), abs=1e-5)


def test_the_best_stands_for_a_shared_context_as_long_as_the_window():
    network = ToyNetwork(num_history_words=0)
    plain = PlainLM(network)
    better, worse = sorted(([5, 7], [6, 7]), key=plain.last_log_prob, reverse=True)
    for window, stands in ((50, better), (0, worse)):
        engine = CachedRNNLM(
            network, CacheOptions(recombination_length=1, recombination="best", recombination_window=window)
        )
        for words in (better, worse):
            _, context = engine.score(engine.start(1), torch.tensor(words[:1]))
            _, context = engine.score(context, torch.tensor(words[1:]))
        log_prob, _ = engine.score(context, torch.tensor([9]))
        assert log_prob.item() == pytest.approx(plain.last_log_prob([*stands, 9]), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("round-2", 0.05), ("round-1", 0.5)])
def test_near_histories_share_hidden_rows(precision, tolerance):
    network = ToyNetwork(hidden_size=4)
    hypotheses = torch.randint(3, 6, (200, 6), generator=torch.Generator().manual_seed(0)).tolist()
    engine = CachedRNNLM(network, CacheOptions(history_precision=precision))
    error = (scores(engine, hypotheses) - plain_scores(network, hypotheses)).abs().max()
    assert error < tolerance
    counts = engine.statistics()
    exact = CachedRNNLM(network)
    scores(exact, hypotheses)
    assert counts.num_hidden_rows + counts.num_shared_rows == exact.statistics().num_hidden_rows
    assert (counts.num_shared_rows > 0) == (precision == "round-1")


def test_sign_shares_more_than_rounding():
    hypotheses = torch.randint(3, 6, (200, 6), generator=torch.Generator().manual_seed(0)).tolist()
    shared = []
    for precision in ("round-2", "round-1", "sign"):
        engine = CachedRNNLM(ToyNetwork(hidden_size=4), CacheOptions(history_precision=precision))
        scores(engine, hypotheses)
        shared.append(engine.statistics().num_shared_rows)
    assert shared[0] < shared[1] < shared[2]


def test_histories_are_near_by_the_columns_that_the_next_step_reads():
    class HalfRecurrent(ToyNetwork):
        recurrent_size = 1

    network = HalfRecurrent(hidden_size=4)
    network.step = lambda state, word_id: torch.cat((state[:, :1], torch.rand(len(word_id), 4) - 0.5), dim=1)
    engine = CachedRNNLM(network, CacheOptions(history_precision="round-2"))
    scores(engine, [[5, 6, 7, 8], [6, 6, 7, 8], [7, 6, 7, 8]])
    assert engine.statistics().num_shared_rows > 0


@pytest.mark.slow
def test_sharing_and_capacity_together_keep_the_books():
    for options in (
        {"history_precision": "sign"},
        {"recombination_length": 2},
        {"recombination_length": 2, "recombination": "best"},
    ):
        engine = CachedRNNLM(ToyClassNetwork(num_words=60), CacheOptions(capacity_bytes=10_000, **options))
        generator = torch.Generator().manual_seed(0)
        context = engine.start(20)
        for _ in range(40):
            log_prob, next_idx = engine.score(context, torch.randint(3, 60, (20,), generator=generator))
            assert bool((log_prob < 0).all())
            context = next_idx[torch.randint(0, 20, (20,), generator=generator)]
            engine.retain(context)
        counts = engine.statistics()
        assert counts.num_evictions > 0
        rows = engine.trie.hidden_row[engine.trie.nodes.is_used()]
        assert set(rows[rows >= 0].tolist()) == set(engine.hidden.rows.is_used().nonzero().squeeze(1).tolist())


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_hidden_layer_elsewhere_is_sent_one_block_and_sends_one_back(num_workers):
    class Elsewhere(ToyNetwork):
        """A network on a device by another name."""

        def initial_state(self):
            return SimpleNamespace(device=torch.device("cpu", 0))

    network = ToyNetwork()
    hypotheses = torch.randint(3, 24, (20, 4), generator=torch.Generator().manual_seed(0)).tolist()
    engine = CachedRNNLM(network, hidden_networks=[Elsewhere() for _ in range(num_workers)])
    assert torch.allclose(scores(engine, hypotheses), plain_scores(network, hypotheses), atol=1e-5)
    counts = engine.statistics()
    assert counts.num_transfers == 2 * counts.num_hidden_calls > 0
    # Of each row 9 numbers and a word go, and 9 numbers come.
    assert counts.bytes_moved == 4 * counts.num_hidden_rows * (9 + 1 + 9)
    assert counts.seconds_transfer > 0.0
    assert num_workers > 1 or counts.seconds_transfer < counts.seconds_hidden < counts.seconds_total


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda engine: pickle.loads(pickle.dumps(engine))])
def test_a_copy_has_workers_of_its_own(copied):
    network = ToyNetwork()
    engine = CachedRNNLM(network, hidden_networks=[network, network])
    hypotheses = torch.randint(3, 24, (20, 4), generator=torch.Generator().manual_seed(0)).tolist()
    for _ in range(2):
        engine = copied(engine)
        assert torch.allclose(scores(engine, hypotheses), plain_scores(network, hypotheses), atol=1e-5)


def test_packed_block_carries_states_and_words():
    state, word_id = torch.randn(3, 5), torch.tensor([0, 7, 2_000_000_000])
    back, words = _unpacked(_packed(state, word_id))
    assert torch.equal(back, state)
    assert torch.equal(words, word_id)


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_dtype": "float8"},
        {"batching": "word"},
        {"recombination_length": 0},
        {"recombination_length": 2, "recombination": "last"},
        {"history_precision": "round-3"},
        {"history_precision": "sign", "recombination_length": 2, "recombination": "best"},
    ],
)
def test_wrong_options_are_named(options):
    with pytest.raises(AsrError, match="|".join(options)):
        CachedRNNLM(ToyNetwork(), CacheOptions(**options))


def test_a_failing_network_leaves_no_unscored_edge():
    network = ToyNetwork()
    engine = CachedRNNLM(network)
    network.log_prob, working = None, network.log_prob  # type: ignore[assignment]
    with pytest.raises(TypeError):
        engine.score(engine.start(1), torch.tensor([5]))
    network.log_prob = working
    log_prob, _ = engine.score(engine.start(1), torch.tensor([5]))
    assert log_prob.item() == pytest.approx(PlainLM(network).last_log_prob([5]), abs=1e-5)


def test_a_forgotten_node_has_no_best_history():
    recombination = Recombination(1, "best", 50, torch.device("cpu"))
    node = torch.tensor([2])
    assert recombination.better(node, torch.tensor([-1.0]), 0, 4).tolist() == [0]
    assert recombination.better(node, torch.tensor([-2.0]), 1, 4).tolist() == []
    recombination.forget(torch.arange(4) == 2)
    assert recombination.better(node, torch.tensor([-2.0]), 2, 4).tolist() == [0]
    # A node that comes later has none either.
    assert recombination.better(torch.tensor([9]), torch.tensor([-3.0]), 3, 10).tolist() == [0]


@pytest.mark.parametrize("freed", range(4))
def test_keys_of_freed_rows_are_forgotten_and_no_others(freed):
    sharing = QuantizedHistory("sign", 2, torch.device("cpu"))
    key = sharing.key(torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]), torch.full((4,), 7))
    sharing.store(key, torch.arange(4))
    row, missing = sharing.find(key)
    assert row.tolist() == [0, 1, 2, 3] and missing is None
    sharing.forget(torch.arange(4) == freed)
    row, missing = sharing.find(key)
    assert missing.tolist() == [freed]
    assert all(row[own] == own for own in range(4) if own != freed)


@pytest.mark.parametrize("evicted", range(2, 5))
def test_histories_of_evicted_nodes_are_forgotten_and_no_others(evicted):
    """Words 5, 6 and 7 after `<s>` have nodes 2, 3 and 4; of these, one gets another node when it comes again."""
    trie = HistoryTrie(torch.device("cpu"))
    recombination = Recombination(1, "first", 50, torch.device("cpu"))
    start, word_id = torch.full((3,), START), torch.tensor([5, 6, 7])
    assert recombination.nodes(trie, start, word_id).tolist() == [2, 3, 4]
    recombination.forget(torch.arange(5) == evicted)
    expected = [5 if node == evicted else node for node in (2, 3, 4)]
    assert recombination.nodes(trie, start, word_id).tolist() == expected


def test_sign_shares_only_between_states_of_the_same_signs():
    sharing = QuantizedHistory("sign", 3, torch.device("cpu"))
    state = torch.tensor([[0.1, -0.2, 0.3], [0.9, -0.8, 0.1], [-0.1, -0.2, 0.3], [0.1, 0.2, 0.3], [0.1, -0.2, -0.3]])
    key = sharing.key(state, torch.full((5,), 7))
    assert key[0] == key[1]
    assert len(set(key[1:].tolist())) == 4
    assert int(sharing.key(state[:1], torch.tensor([8]))) != int(key[0])
    # A column more is not read.
    assert torch.equal(sharing.key(torch.cat([state, -state], dim=1), torch.full((5,), 7)), key)


@pytest.mark.parametrize(("precision", "step"), [("round-2", 0.01), ("round-1", 0.1)])
def test_rounding_keeps_so_many_decimals(precision, step):
    sharing = QuantizedHistory(precision, 1, torch.device("cpu"))
    state = step * torch.tensor([[2.0], [2.4], [1.6], [2.6], [-2.0]])
    key = sharing.key(state, torch.full((5,), 7)).tolist()
    assert key[0] == key[1] == key[2]
    assert len({key[0], key[3], key[4]}) == 3


@pytest.mark.parametrize(("precision", "step"), [("round-2", 0.01), ("round-1", 0.1)])
def test_rounding_puts_all_states_of_a_step_together(precision, step):
    sharing = QuantizedHistory(precision, 1, torch.device("cpu"))
    middle = step * torch.arange(-100.0, 101.0, dtype=torch.float64)[:, None]
    word_id = torch.full((201,), 7)
    key = sharing.key(middle, word_id)
    assert len(set(key.tolist())) == 201
    for beside in (-0.49 * step, 0.49 * step):
        assert torch.equal(sharing.key(middle + beside, word_id), key)


def test_the_best_of_each_node_is_found_for_the_first_node_and_among_equals():
    recombination = Recombination(1, "best", 50, torch.device("cpu"))
    assert recombination.better(torch.tensor([0]), torch.tensor([-1.0]), 0, 1).tolist() == [0]
    assert recombination.better(torch.tensor([0, 1]), torch.tensor([-2.0, -3.0]), 1, 2).tolist() == [1]
    # Of equal scores one stands for the node, whichever; a score that is as good as the known one does not.
    node, score = torch.tensor([1, 2, 2, 0, 1]), torch.tensor([-2.0, -4.0, -4.0, -1.0, -2.5])
    position = recombination.better(node, score, 2, 3).tolist()
    assert sorted(node[position].tolist()) == [1, 2] and 4 not in position


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("held_projections", -1, "a whole number above 0"),
        ("held_projections", 1.5, "a whole number above 0"),
        ("loop_room", 0, "a whole number above 0"),
        ("loop_room", None, "a whole number above 0"),
        ("capacity_bytes", "1", "a whole number above 0"),
        ("capacity_bytes", True, "a whole number above 0"),
        ("cache_scores", None, "true or false"),
        ("cache_tree_paths", 1, "true or false"),
        ("compiled", "no", "true or false"),
    ],
)
def test_options_have_the_right_types(name, value, wanted):
    with pytest.raises(AsrError, match=f"cached language model: {name} is .*; it must be {wanted}"):
        CacheOptions(**{name: value})
