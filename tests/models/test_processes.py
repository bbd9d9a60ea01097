"""Training in two processes ends as in one: acoustic and language models, whole and resumed; and what it rests on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asr.distributed import Share, batch_rows, draw_from, draw_rows
from asr.errors import AsrError
from asr.lm.rnn.data import TokenStreams
from scripts.benchmarks.processes import largest_differences, write_inputs


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    differences = largest_differences(tmp_path, ("ctc", "chain", "nce", "full", "class", "hierarchical"))
    # Adagrad's and Adam's steps are some thousand times this.
    assert differences == {kind: pytest.approx(0.0, abs=2e-6) for kind in differences}
    assert len(differences) == 6


@pytest.mark.slow
def test_a_process_may_have_nothing_of_a_batch(tmp_path: Path) -> None:
    """As in the trainings above."""
    pytest.importorskip("pytorch_lightning")
    from scripts.benchmarks.processes import _acoustic

    write_inputs(tmp_path)
    _, data = _acoustic(tmp_path, "ctc")
    data.setup("fit")
    plans, dataset = list(data.train_dataloader().sampler), data.train_dataset
    batches = [dataset[plan] for plan in plans]
    assert min(batch["num_all"] for batch in batches) == 1
    dataset.share = Share(1, 2)
    shares = [dataset[plan] for plan in plans]
    for batch, share in zip(batches, shares, strict=True):
        assert batch["num_all"] == share["num_all"] and share["cut_ids"] == batch["cut_ids"][1::2]
        if share["cut_ids"]:
            torch.testing.assert_close(share["features"][:, :5], batch["features"][1::2, :5], rtol=0, atol=0)
    assert any(not share["cut_ids"] for share in shares)


def test_rows_of_a_share_are_drawn_as_those_of_the_whole_batch() -> None:
    draw_from(1, 2, 3)
    whole = draw_rows(lambda num: torch.rand(2, num, 4), 5, dim=1)
    draw_from(1, 2, 3)
    with batch_rows(Share(1, 2).rows(5), 5):
        part = draw_rows(lambda num: torch.rand(2, num, 4), 2, dim=1)
    assert torch.equal(part, whole[:, 1::2])
    draw_from(1, 2, 4)
    assert not torch.equal(draw_rows(lambda num: torch.rand(2, num, 4), 5, dim=1), whole)


def test_streams_of_all_processes_are_those_of_one() -> None:
    tokens = np.arange(1000, dtype=np.int32) % 50 + 4
    whole = TokenStreams(tokens, 7, 6, 2)
    parts = [TokenStreams(tokens, 7, 6, 2, Share(rank, 3)) for rank in range(3)]
    assert [len(part) for part in parts] == [len(whole)] * 3
    for place in (0, 4):
        batches = [part[place] for part in parts]
        assert torch.equal(torch.cat([batch.target_id for batch in batches]), whole[place].target_id)
        assert [batch.first_stream for batch in batches] == [0, 2, 4]
        assert all(batch.num_all_words == whole[place].num_all_words == 42 for batch in batches)
    with pytest.raises(AsrError, match="2 streams for 3 processes"):
        TokenStreams(tokens, 2, 6, 2, Share(0, 3))
