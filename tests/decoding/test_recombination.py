"""The pieces of a frame's step against loops: expansion, recombination, cut-off, blank skipping, options."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.decoding.backend import expand
from asr.decoding.interface import skip_blanks
from asr.decoding.recombination import NOT_REACHED, best_of_group, group, kth_best_score, prune_tokens, recombine
from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError

SCORES = st.lists(st.floats(-50.0, 0.0, width=32), min_size=1, max_size=40)


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=8), states=st.lists(st.integers(0, 7), max_size=10))
def test_expand_lists_all_arcs_in_order(counts: list[int], states: list[int]) -> None:
    states = [state % len(counts) for state in states]
    begin = torch.tensor([0, *counts]).cumsum(0)
    source, arc = expand(begin, torch.tensor(states, dtype=torch.int64))
    expected = [(i, a) for i, state in enumerate(states) for a in range(int(begin[state]), int(begin[state + 1]))]
    assert list(zip(source.tolist(), arc.tolist(), strict=True)) == expected


@given(keys=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**62)), max_size=60), doubled=st.booleans())
def test_group_is_equality(keys: list[tuple[int, int]], doubled: bool) -> None:
    keys = keys + keys[::2] if doubled else keys
    first = torch.tensor([key[0] for key in keys], dtype=torch.int64)
    second = torch.tensor([key[1] for key in keys], dtype=torch.int64)
    representative = group(first, second).tolist()
    for i, one in enumerate(keys):
        assert keys[representative[i]] == one
        assert representative[i] == representative[keys.index(one)]


@pytest.mark.slow
@given(scores=SCORES, dense=st.booleans())
def test_recombine_keeps_the_first_best(scores: list[float], dense: bool) -> None:
    score = torch.tensor(scores)
    key = torch.arange(len(scores)) % 5
    table = torch.full((5,), NOT_REACHED, dtype=torch.int64) if dense else None
    winner = recombine(key, score, table=table).tolist()
    for i, place in enumerate(winner):
        rivals = range(i % 5, len(scores), 5)
        assert place == max(rivals, key=lambda rival: (scores[rival], -rival))
    assert table is None or bool((table == NOT_REACHED).all())


@pytest.mark.slow
@given(scores=SCORES, num_kept=st.integers(1, 4))
def test_best_of_group(scores: list[float], num_kept: int) -> None:
    kept = best_of_group(torch.arange(len(scores)) % 3, torch.tensor(scores), num_kept).tolist()
    for i, stays in enumerate(kept):
        rivals = sorted(range(i % 3, len(scores), 3), key=lambda rival: (-scores[rival], rival))
        assert stays == (i in rivals[:num_kept])


@pytest.mark.slow
@given(scores=SCORES, k=st.integers(1, 10))
def test_radix_selection_equals_sorting(scores: list[float], k: int) -> None:
    utt_idx = torch.arange(len(scores)) % 3
    found = kth_best_score(torch.tensor(scores), utt_idx, 3, k).tolist()
    for utt, threshold in enumerate(found):
        mine = sorted(scores[utt::3], reverse=True)
        assert threshold == (mine[k - 1] if len(mine) >= k else -math.inf)


@pytest.mark.slow
@settings(max_examples=30)
@given(scores=SCORES, beam=st.floats(0.1, 60.0), fewest=st.integers(0, 6), more=st.integers(0, 6))
def test_survivors_of_each_utterance(scores: list[float], beam: float, fewest: int, more: int) -> None:
    most = max(1, fewest + more)
    together = prune_tokens(torch.tensor(scores), torch.arange(len(scores)) % 2, 2, beam, fewest, most).tolist()
    for utt in range(2):
        mine = scores[utt::2]
        kept = {place for place in together if place % 2 == utt}
        ranked = sorted(mine, reverse=True)
        limit = -beam
        if fewest:
            limit = min(limit, ranked[fewest - 1] if len(ranked) >= fewest else -math.inf)
        inside = [score for score in mine if score >= torch.tensor(limit)]
        if len(inside) > most:
            limit = ranked[most - 1]
        assert kept == {place for place in range(utt, len(scores), 2) if scores[place] >= torch.tensor(limit)}


def test_skip_blanks_keeps_the_first_of_a_run() -> None:
    blank, speech = [0.98, 0.02], [0.3, 0.7]
    log_prob = torch.tensor([[blank, blank, speech, blank, blank, blank], [speech, blank, blank, speech] + [blank] * 2])
    short, num_frames, frame, after_blank = skip_blanks(log_prob.log(), torch.tensor([6, 4]), 0.9)
    assert num_frames.tolist() == [3, 3]
    assert frame.tolist() == [[0, 2, 3], [0, 1, 3]]
    assert after_blank.tolist() == [True, False]
    assert torch.equal(short[0], log_prob.log()[0, [0, 2, 3]])
    _, num_frames, frame, _ = skip_blanks(log_prob.log(), torch.tensor([6, 4]), 0.9, torch.tensor([True, True]))
    assert num_frames.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"search_beam": 0.0}, "search_beam is 0.0"),
        ({"am_scale": -1.0}, "am_scale is -1.0"),
        ({"lm_scale": math.nan}, "lm_scale is nan"),
        ({"min_active_states": 10, "max_active_states": 5}, "min_active_states is 10"),
        ({"max_active_states": 2**63}, "max_active_states is 9223372036854775808; it must be below"),
        ({"max_contexts_per_state": 0}, "max_contexts_per_state is 0"),
        ({"blank_skip_threshold": 1.5}, "blank_skip_threshold is 1.5"),
        ({"blank_skip_threshold": 1.0}, "blank_skip_threshold is 1"),
        ({"blank_skip_threshold": 0.0}, "blank_skip_threshold is 0"),
    ],
)
def test_options_out_of_range(values: dict[str, float], message: str) -> None:
    with pytest.raises(AsrError, match=message):
        DecodingOptions(**values)  # type: ignore[arg-type]
