"""Recorded streams come back from their file, replay to the same scores, and run side by side."""

import pytest
import torch

from asr.errors import AsrError
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.interface import LanguageModel
from asr.testing.plain_lm import PlainLM
from scripts.benchmarks.query_stream import QueryRecorder, load_streams, merged, replay, save_streams
from tests.reference.toy_network import ToyNetwork


def record(num_streams=3):
    recorder = QueryRecorder(CachedRNNLM(ToyNetwork()))
    generator = torch.Generator().manual_seed(0)
    scores = []
    for stream in range(num_streams):
        context = recorder.start(1)
        for _ in range(4 + stream):
            word_id = torch.randint(3, 24, (6,), generator=generator)
            log_prob, next_idx = recorder.score(
                context[torch.randint(0, len(context), (6,), generator=generator)], word_id
            )
            scores.append(log_prob)
            context = next_idx
        scores.append(recorder.final(context))
    return recorder, torch.cat(scores)


def test_replay_gives_the_recorded_scores_on_a_fresh_engine(tmp_path):
    recorder, scores = record()
    assert isinstance(recorder, LanguageModel)
    save_streams(tmp_path / "streams.npz.xz", recorder.streams())
    streams = load_streams(tmp_path / "streams.npz.xz")
    assert [stream.num_calls for stream in streams] == [5, 6, 7]
    engine = CachedRNNLM(ToyNetwork())
    assert torch.allclose(torch.cat([replay(stream, engine) for stream in streams]), scores, atol=1e-6)


def test_histories_of_queries_are_the_words_asked():
    recorder, scores = record(1)
    stream = recorder.streams()[0]
    plain = PlainLM(ToyNetwork())
    expected = [plain.last_log_prob(words) for words in stream.histories(stream.query)]
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)


def test_merged_streams_ask_the_same_side_by_side():
    recorder, scores = record()
    streams = recorder.streams()
    together = merged(streams)
    assert together.num_calls == 7
    assert together.query.numel() == sum(stream.query.numel() for stream in streams)
    merged_scores = replay(together, CachedRNNLM(ToyNetwork()))
    assert torch.allclose(merged_scores.sort().values, scores.sort().values, atol=1e-6)


def test_last_call_of_a_context_is_the_last_that_extends_it():
    stream = record(1)[0].streams()[0]
    last = stream.last_call_of_context()
    for node in range(stream.parent.numel()):
        calls = [i for i, query in enumerate(stream.calls()) if (stream.parent[query] == node).any()]
        assert last[node] == (calls[-1] if calls else -1)


def test_a_file_that_is_no_recording_is_named(tmp_path):
    (tmp_path / "bad.npz.xz").write_bytes(b"nothing")
    with pytest.raises(AsrError, match="no recorded query streams"):
        load_streams(tmp_path / "bad.npz.xz")
