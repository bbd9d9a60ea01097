"""The order of a graph's states, against a plain breadth-first search, and subgraphs."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asr.graph.fst import Arcs, GraphArrays, Words, list_breadth_first, reorder_states


def random_graph(num_states: int, num_arcs: int, seed: int) -> GraphArrays:
    """Random arcs with up to two words each; the scores tell the arcs apart."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(3, size=num_arcs)
    words = Words(np.append(0, np.cumsum(counts)), draw.integers(1, 9, size=counts.sum()).astype(np.int32))
    return GraphArrays.from_arcs(
        draw.integers(num_states, size=num_arcs),
        draw.integers(num_states, size=num_arcs),
        draw.integers(5, size=num_arcs),
        np.arange(num_arcs),
        words,
        draw.normal(size=num_states),
    )


def order_of(graph: GraphArrays, starts: Iterable[int]) -> list[int]:
    """States as a breadth-first search finds them, from one start after the other."""
    order: list[int] = []
    for start in starts:
        if start in order:
            continue
        waiting = deque([start])
        order.append(start)
        while waiting:
            state = waiting.popleft()
            for target in graph.dst_state[graph.arc_begin[state] : graph.arc_begin[state + 1]].tolist():
                if target not in order:
                    order.append(target)
                    waiting.append(target)
    return order


def rows_of(graph: GraphArrays) -> list[tuple[float, list[tuple[object, ...]]]]:
    """Final score and arcs of each state, each arc with its words."""
    rows = []
    for state in range(graph.num_states):
        arcs = []
        for arc in range(graph.arc_begin[state], graph.arc_begin[state + 1]):
            words = graph.word_id[graph.word_begin[arc] : graph.word_begin[arc + 1]].tolist()
            arcs.append((int(graph.dst_state[arc]), int(graph.label[arc]), float(graph.score[arc]), words))
        rows.append((float(graph.final_score[state]), arcs))
    return rows


@given(st.integers(1, 8), st.integers(0, 20), st.integers(0, 99))
def test_states_in_breadth_first_order(num_states: int, num_arcs: int, seed: int) -> None:
    graph = random_graph(num_states, num_arcs, seed)
    order = order_of(graph, range(num_states))
    number = {state: position for position, state in enumerate(order)}
    before = rows_of(graph)
    expected = [
        (before[state][0], [(number[target], *rest) for target, *rest in before[state][1]])  # type: ignore[index]
        for state in order
    ]
    found = graph.breadth_first()
    assert rows_of(found) == expected
    assert rows_of(found.breadth_first()) == expected
    if order_of(graph, [0]) == list(range(num_states)):
        assert found is graph  # nothing to copy
    # Uncompiled, since compiled loops do not notice places beyond their arrays.
    state, place = np.empty(num_states, dtype=np.int32), np.empty(num_states, dtype=np.int32)
    list_breadth_first(graph.arc_begin, graph.dst_state, state, place)
    assert state.tolist() == order and place[state].tolist() == list(range(num_states))
    ordered = graph.take_states(np.arange(num_states))  # a copy
    reorder_states(Arcs.of(graph), state, place, Arcs.of(ordered))
    assert rows_of(replace(ordered, final_score=graph.final_score[state])) == expected


@given(st.integers(1, 8), st.integers(0, 20), st.integers(0, 99))
def test_a_subgraph_keeps_the_arcs_between_its_states(num_states: int, num_arcs: int, seed: int) -> None:
    graph = random_graph(num_states, num_arcs, seed)
    states = np.random.default_rng(seed).permutation(num_states)[: 1 + seed % num_states]
    number = {int(state): position for position, state in enumerate(states)}
    before = rows_of(graph)
    assert rows_of(graph.take_states(states)) == [
        (before[state][0], [(number[arc[0]], *arc[1:]) for arc in before[state][1] if arc[0] in number])  # type: ignore[index]
        for state in states
    ]
