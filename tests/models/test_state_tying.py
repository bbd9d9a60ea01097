"""Trees of contexts on cases that can be worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from asr.errors import AsrError
from asr.graph.context import ENTRY, LOOP
from asr.models.state_tying import ContextStatistics, grow_trees

PHONES = ("SIL", "AA", "M", "N", "T")


def statistics(spread: dict[int, float], state: int = ENTRY, phone: int = 1, frames: int = 200) -> ContextStatistics:
    """Frames of one state of one phone, whose mean depends on the phone before."""
    rng = np.random.default_rng(0)
    found = ContextStatistics.empty(len(PHONES), 2)
    for before, mean in spread.items():
        index = np.full(frames, before)
        found.add(np.full(frames, state), index, np.full(frames, phone), rng.normal(mean, 1.0, size=(frames, 2)))
    return found


def test_without_room_for_splits_every_state_is_a_root() -> None:
    states = grow_trees(PHONES, statistics({2: 0.0, 4: 9.0}), max_columns=9)
    assert states.num_columns == 9
    assert (states.entry[:, 0] == 0).all() and (states.loop[:, 0] == 0).all()
    assert len(np.unique(states.entry[:, 1])) == 1
    assert states.entry[0, 1] != states.loop[0, 1]


def test_the_first_split_parts_what_differs_most() -> None:
    # Behind nasals AA begins otherwise than behind T.
    states = grow_trees(PHONES, statistics({2: 0.0, 3: 0.1, 4: 5.0}), max_columns=10)
    column = states.entry[:, 1]
    assert column[2] == column[3] != column[4]
    assert len(np.unique(states.loop[:, 1])) == 1


def test_where_splits_gain_most_they_come_first() -> None:
    spreads = {1: {2: 0.0, 4: 1.0}, 2: {2: 0.0, 4: 9.0}, 3: {2: 0.0, 4: 3.0}}
    together = ContextStatistics.empty(len(PHONES), 2)
    for phone, spread in spreads.items():
        own = statistics(spread, phone=phone)
        for name in ("count", "total", "square"):
            getattr(together, name)[:] += getattr(own, name)
    for num_splits, split in ((1, [2]), (2, [2, 3]), (3, [1, 2, 3])):
        states = grow_trees(PHONES, together, max_columns=9 + num_splits)
        assert [phone for phone in range(5) if states.entry[2, phone] != states.entry[4, phone]] == split


def test_a_loop_state_has_a_tree_of_its_own() -> None:
    states = grow_trees(PHONES, statistics({2: 0.0, 4: 5.0}, state=LOOP), max_columns=10)
    assert len(np.unique(states.loop[:, 1])) == 2 and len(np.unique(states.entry[:, 1])) == 1


def test_a_leaf_keeps_its_share_of_frames() -> None:
    few = statistics({2: 0.0, 4: 5.0}, frames=30)
    assert grow_trees(PHONES, few, max_columns=20, min_frames=31).num_columns == 9
    assert grow_trees(PHONES, few, max_columns=20, min_frames=30).num_columns > 9


def test_no_more_columns_than_asked_for() -> None:
    many = statistics({before: 3.0 * before for before in range(5)})
    assert grow_trees(PHONES, many, max_columns=11).num_columns == 11


def test_columns_belong_to_one_phone() -> None:
    states = grow_trees(PHONES, statistics({2: 0.0, 3: 2.0, 4: 5.0}), max_columns=14)
    owner = states.phone_of_column
    assert (owner[states.entry] == np.arange(5)).all() and (owner[states.loop] == np.arange(5)).all()


def test_too_few_columns_are_refused() -> None:
    with pytest.raises(AsrError, match="need at least 9"):
        grow_trees(PHONES, statistics({2: 0.0}), max_columns=8)
