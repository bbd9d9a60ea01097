"""The Huffman tree: its shape, its two forms, and paths that go on from what is known of their history."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asr.kernels.jit import jit_for
from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.output_numba import add_path_log_prob
from asr.lm.rnn.outputs.hierarchical import HuffmanOutput, huffman_paths

QUERIES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 39)), max_size=12)


def _tree(maxent_order: int, std: float) -> HuffmanOutput:
    torch.manual_seed(7)
    output = HuffmanOutput(40, 9, HashedMaxEnt(40, maxent_order, 300) if maxent_order else None)
    output.set_unigram(torch.randint(0, 50, (40,)), reset_bias=True)
    for parameter in output.parameters():
        nn.init.normal_(parameter, std=std)
    return output


def test_huffman_tree_is_optimal_and_prefix_free() -> None:
    counts = np.array([0, 0, 1, 1, 2, 3, 5, 8])
    begin, node, sign, odds = huffman_paths(counts, np.array([0, 1]))
    lengths = np.diff(begin)
    assert lengths.tolist() == [0, 0, 5, 5, 4, 3, 2, 1]
    codes = {tuple(zip(node[a:b], sign[a:b], strict=True)) for a, b in itertools.pairwise(begin[2:])}
    assert len(codes) == 6
    # The root parts 8 from 12.
    root = node[begin[2]]
    assert math.isclose(abs(float(odds[root])), math.log(12 / 8), rel_tol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("maxent_order", [0, 3])
@pytest.mark.parametrize("std", [0.3, 20.0])  # so far that a careless logarithm would overflow
def test_loops_over_paths_equal_tensors(maxent_order: int, std: float) -> None:
    if jit_for(add_path_log_prob, torch.empty(0)) is None:
        pytest.skip("needs numba")
    output = _tree(maxent_order, std)
    query = torch.randn(50, 9), torch.randint(0, 40, (50, 3)), torch.randint(0, 40, (50,))
    looped = output.log_prob(*query)
    assert torch.isneginf(looped[query[2] < 2]).all()
    nothing = query[2], torch.empty(0, 0)
    tensors, num_computed = output._log_prob_by_tensors(*query, *nothing)
    torch.testing.assert_close(looped[query[2] >= 2], tensors[query[2] >= 2], rtol=1e-4, atol=1e-3)
    assert output.path_log_prob(*query, *nothing)[1] == num_computed


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("by_loops", [True, False])
@given(batches=st.lists(QUERIES, min_size=1, max_size=6), num_held=st.integers(1, 45), std=st.sampled_from([0.3, 20.0]))
def test_paths_go_on_from_what_is_known_of_their_history(by_loops, batches, num_held, std) -> None:
    if by_loops and jit_for(add_path_log_prob, torch.empty(0)) is None:
        pytest.skip("needs numba")
    output = _tree(3, std)
    hidden, history = torch.randn(4, 9), torch.randint(0, 40, (4, 3))
    held, known = torch.full((4, num_held), torch.nan), set()
    for batch in [*batches, batches[0]]:
        owner, word_id = (torch.tensor([query[i] for query in batch], dtype=torch.int64) for i in range(2))
        query = hidden[owner], history[owner], word_id
        if by_loops:
            found, num_computed = output.path_log_prob(*query, owner, held)
        else:
            found, num_computed = output._log_prob_by_tensors(*query, owner, held)
            found[word_id < 2] = -torch.inf
        torch.testing.assert_close(found, output.log_prob(*query), rtol=1e-4, atol=1e-3)
        num_expected, seen = 0, set(known)
        for row, word in batch:
            path = output.path_node[output.path_begin[word] : output.path_begin[word + 1]].tolist()
            led_to = {(row, node) for node in path[1:] if output._root - node < num_held}
            num_expected += len(path) - len(led_to & known)
            seen |= led_to
            if by_loops:  # what a query finds, the next one knows; in tensors the next batch does
                known = seen
        known = seen
        if std < 1:  # unlikely nodes are not held
            assert num_computed == num_expected
