"""Chunked decoding equals whole-utterance decoding, however the frames are cut and whoever else is in the batch."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asr.decoding import online, token_passing
from asr.decoding.backtrace import Backtrace, SpelledPath
from asr.decoding.interface import DecodeResult
from asr.decoding.online import EndpointRules, StreamingDecoder
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.reference.history_tree import HistoryTree
from tests.reference.table_lm import TableLM


def same(one: DecodeResult, other: DecodeResult) -> None:
    assert one.reached_final == other.reached_final
    assert one.best is not None and other.best is not None
    assert one.best.word_ids == other.best.word_ids
    assert one.best.start_frames == other.best.start_frames
    for name in ("total", "am_score", "graph_score", "lm_score"):
        assert getattr(one.best, name) == pytest.approx(getattr(other.best, name), abs=1e-4), name


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), with_lm=st.booleans(), skip=st.sampled_from([None, 0.5]))
def test_any_chunking_equals_the_whole(seed: int, with_lm: bool, skip: float | None) -> None:
    graph = random_graph(seed, num_states=20, num_arcs=80, epsilons=skip is None)
    lm = TableLM(graph.vocabulary, seed, num_history_words=2) if with_lm else None
    options = DecodingOptions(search_beam=5.0, min_active_states=2, max_active_states=8, blank_skip_threshold=skip)
    lengths = [9, 4, 12]
    log_prob = random_log_prob(seed, 3, 12)
    whole = TokenPassingDecoder(graph, options).decode(log_prob, torch.tensor(lengths), lm)
    chooser = random.Random(seed)
    decoder = StreamingDecoder(graph, options, lm)
    streams = decoder.start(2)
    done = [0, 0]
    while any(done[row] < lengths[row] for row in range(len(streams))):
        if len(streams) == 2 and sum(done) > 3:
            streams += decoder.start(1)
            done.append(0)
        rows = [row for row in range(len(streams)) if done[row] < lengths[row] and chooser.random() < 0.7]
        sizes = [min(chooser.randrange(4), lengths[row] - done[row]) for row in rows]
        chunk = torch.zeros(len(rows), max([*sizes, 0]), 4)
        for place, (row, size) in enumerate(zip(rows, sizes, strict=True)):
            chunk[place, :size] = log_prob[row, done[row] : done[row] + size]
            done[row] += size
        decoder.advance([streams[row] for row in rows], chunk, torch.tensor(sizes, dtype=torch.int64))
    for row in range(2):
        same(decoder.finalize(streams[row]), whole[row])
    if len(streams) == 3:
        decoder.advance(streams[2:], log_prob[2:, done[2] :], torch.tensor([12 - done[2]]))
        same(decoder.finalize(streams[2]), whole[2])


def test_collected_back_pointers_tell_the_same_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(7, num_states=30, num_arcs=150)
    log_prob = random_log_prob(7, 2, 200)
    num_frames = torch.tensor([200, 150])
    whole = TokenPassingDecoder(graph).decode(log_prob, num_frames)
    monkeypatch.setattr(token_passing, "Backtrace", partial(Backtrace, first_collection=100))
    for one, other in zip(TokenPassingDecoder(graph).decode(log_prob, num_frames), whole, strict=True):
        same(one, other)


def test_paths_traced_together_are_those_traced_one_by_one() -> None:
    """Frames with 2, 2 and 1 backpointers: 0 and 1 begin, 2 and 3 follow 1, and 4 follows 2; the last path is empty."""
    backtrace = Backtrace(torch.device("cpu"))
    for previous, arc in (([-1, -1], [5, 6]), ([1, 1], [7, 8]), ([2], [9])):
        backtrace.add(torch.tensor(previous), torch.tensor(arc))
    expected = [[6, 7, 9], [6, 8], [5], []]
    asked = torch.tensor([4, 3, 0, -1])
    assert [path.tolist() for path in backtrace.paths(asked)] == expected
    assert [path.tolist() for path in backtrace.paths_together(asked)] == expected
    # 0 and 3 go; 1, 2 and 4 are numbered anew.
    assert backtrace.collect(torch.tensor([4, -1])).tolist() == [2, -1]
    assert [path.tolist() for path in backtrace.paths_together(torch.tensor([2, 0, -1]))] == [[6, 7, 9], [6], []]


def test_partial_results_and_stream_numbers() -> None:
    graph = random_graph(3, num_states=20, num_arcs=80)
    decoder = StreamingDecoder(graph)
    first, second = decoder.start(2)
    log_prob = random_log_prob(3, 1, 6)
    decoder.advance([first], log_prob, torch.tensor([6]))
    assert decoder.partial(first) is not None
    empty = decoder.partial(second)
    assert empty is not None and empty.words == ()
    decoder.finalize(first)
    with pytest.raises(AsrError, match=f"stream {first} is not open"):
        decoder.partial(first)
    with pytest.raises(AsrError, match="one chunk"):
        decoder.advance([second, second], log_prob, torch.tensor([6]))
    assert decoder.start(1) == [first]


def test_partial_results_and_endpoints_share_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(3, num_states=20, num_arcs=80)
    decoder = StreamingDecoder(graph)
    (stream,) = decoder.start()
    log_prob, traced = random_log_prob(3, 1, 6), []
    path = Backtrace.path
    monkeypatch.setattr(Backtrace, "path", lambda *args: traced.append(1) or path(*args))
    partial = []
    for begin in (0, 3):
        decoder.advance([stream], log_prob[:, begin : begin + 3], torch.tensor([3]))
        decoder.is_endpoint(stream)
        partial += [decoder.partial(stream), decoder.partial(stream)]
    assert len(traced) == 2
    assert partial[0] == partial[1] != partial[2] == partial[3]


def test_utterances_end_after_pauses_that_get_shorter_as_they_get_longer() -> None:
    rules = EndpointRules()
    for has_words, num_frames, pause in (
        (False, 200, 125), (True, 200, 25),
        (True, 375, 25),  # half of the longest
        (True, 600, 10), (False, 600, 50),  # four fifths: the pause is two fifths
        (True, 749, 1), (True, 750, 0), (False, 750, 0),
    ):  # fmt: skip
        assert rules.apply(has_words, pause, num_frames)
        assert not pause or not rules.apply(has_words, pause - 1, num_frames)
    with pytest.raises(AsrError, match="longest is 0; give 1 frame or more"):
        EndpointRules(longest=0)


def test_endpoint_after_blanks() -> None:
    graph = random_graph(3, num_states=20, num_arcs=80)
    decoder = StreamingDecoder(graph, endpoint_rules=EndpointRules(3, 3, 50))
    (stream,) = decoder.start()
    blanks = torch.tensor([5.0, 0.0, 0.0, 0.0]).log_softmax(0).expand(1, 2, 4)
    decoder.advance([stream], blanks, torch.tensor([2]))
    assert not decoder.is_endpoint(stream)
    decoder.advance([stream], blanks, torch.tensor([1]))
    assert decoder.is_endpoint(stream)
    rules = EndpointRules(silence_before_words=100, silence_after_words=5, longest=50)
    assert [rules.is_long(num_frames) for num_frames in (25, 26)] == [False, True]
    assert rules.apply(True, 5, 20) and not rules.apply(False, 5, 20) and rules.apply(False, 0, 50)


@pytest.mark.parametrize(
    ("last_run", "num_frames", "is_end"),
    [
        ((2, 3, 8), 12, False),  # blanks from frame 8 on
        ((2, 3, 8), 13, True),
        ((2, 3, 17), 17, False),  # a token that lasts too long
        ((2, 3, 18), 18, True),
        ((2, 3, 15), 18, True),  # and then blanks
    ],
)
def test_a_token_that_lasts_as_long_as_in_noise_is_a_pause(last_run, num_frames, is_end) -> None:
    rules = EndpointRules(silence_after_words=5, longest=1000, longest_token=10)
    path = SpelledPath(word_ids=(4,), phones=((1, 0, 3), last_run), spoken_end=last_run[2], num_frames=num_frames)
    assert rules.ends(path, num_frames) == is_end


def test_where_no_path_is_left_all_frames_are_silence() -> None:
    decoder = StreamingDecoder(random_graph(3), endpoint_rules=EndpointRules(5, 2, 50), inputs="scores")
    (stream,) = decoder.start()
    for num_frames, is_end in ((4, False), (1, True)):
        decoder.advance([stream], torch.full((1, num_frames, 4), -torch.inf), torch.tensor([num_frames]))
        assert decoder.partial(stream) is None and decoder.is_endpoint(stream) == is_end
    result = decoder.finalize(stream)
    assert result.best is None and not result.reached_final and result.num_frames == 5


@settings(max_examples=4)
@given(seed=st.integers(0, 10**6), with_lm=st.booleans())
@example(seed=241, with_lm=True)  # no path reads more than 20 frames
def test_settled_words_stay(seed: int, with_lm: bool) -> None:
    graph = random_graph(seed, num_states=20, num_arcs=80, epsilons=True)
    lm = TableLM(graph.vocabulary, seed, num_history_words=2) if with_lm else None
    options = DecodingOptions(search_beam=4.0, min_active_states=1, max_active_states=5)
    decoder = StreamingDecoder(graph, options, lm)
    (stream,) = decoder.start()
    log_prob = random_log_prob(seed, 1, 40)
    whole = TokenPassingDecoder(graph, options).decode(log_prob, torch.tensor([40]), lm)[0]
    settled: tuple[int, ...] = ()
    for begin in range(0, 40, 4):
        decoder.advance([stream], log_prob[:, begin : begin + 4], torch.tensor([4]))
        partial = decoder.partial(stream)
        if partial is None:  # no path reads all of these frames
            assert whole.best is None and decoder.finalize(stream).best is None
            return
        assert partial.word_ids[: len(settled)] == settled
        settled = partial.word_ids[: decoder.num_settled_words(stream)]
    same(decoder.finalize(stream), whole)


@pytest.mark.slow
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 30), max_size=4), skip=st.booleans())
@example(seed=2993, cuts=[29], skip=True)  # the last arc, by itself, reads nothing and writes a word
def test_a_path_spelled_in_pieces_is_the_path_spelled_at_once(seed: int, cuts: list[int], skip: bool) -> None:
    graph = random_graph(seed, epsilons=True)
    arc = torch.randint(graph.num_arcs, (30,), generator=torch.Generator().manual_seed(seed))
    num_read = int((graph.token_id[arc] >= 0).sum())
    frame_of = torch.arange(num_read) * 3 + 1 if skip and num_read else None
    path = SpelledPath()
    for begin, end in itertools.pairwise([0, *sorted(cuts), 30]):
        rest = None if frame_of is None else frame_of[path.num_frames :]
        path = path.followed_by(graph, arc[begin:end], rest)
    whole = SpelledPath().followed_by(graph, arc, frame_of)
    assert path.graph_score == pytest.approx(whole.graph_score)
    assert replace(path, graph_score=0.0) == replace(whole, graph_score=0.0)


def test_an_endless_stream_holds_only_what_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "Backtrace", partial(Backtrace, first_collection=100))
    graph = random_graph(3, num_states=20, num_arcs=80)
    options = DecodingOptions(search_beam=4.0, min_active_states=1, max_active_states=8, blank_skip_threshold=0.9)
    decoder = StreamingDecoder(graph, options)
    (stream,) = decoder.start()
    most = 0
    for seed in range(15):
        decoder.advance([stream], random_log_prob(seed, 1, 60), torch.tensor([60]))
        most = max(most, decoder._backtrace.num_records)
        unsettled = decoder._progress[stream].unsettled_frames
        assert unsettled is not None and len(unsettled) < 90
    # A backpointer a frame alone would be 900 and not settle.
    assert most < 800
    result = decoder.finalize(stream)
    assert result.num_frames == 900 and result.best is not None and result.best.end_frames[-1] > 850


@pytest.mark.slow
def test_a_language_model_that_forgets_nothing_is_made_to_decide() -> None:
    graph = random_graph(5, num_states=20, num_arcs=80)
    log_prob = random_log_prob(5, 1, 120)
    options = DecodingOptions(search_beam=12.0, min_active_states=1, max_active_states=40, lm_scale=0.01)
    settled, totals = [], []
    for commit_frames in (None, 30):
        tree = HistoryTree(graph.vocabulary, torch.device("cpu"))
        decoder = StreamingDecoder(graph, options, tree, commit_frames=commit_frames)
        (stream,) = decoder.start()
        for begin in range(0, 120, 10):
            decoder.advance([stream], log_prob[:, begin : begin + 10], torch.tensor([10]))
        settled.append(decoder._progress[stream].settled.num_frames)
        best = decoder.finalize(stream).best
        assert best is not None
        totals.append(best.total)
    assert settled[0] < settled[1] >= 80
    # Histories that differ long ago only are in each other's way.
    assert totals[0] < totals[1]
