"""Pieces of prepared utterances."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from asr.audio.fbank import Fbank
from asr.datasets.augment import SpecAugment
from asr.datasets.corpora.base import Utterance
from asr.distributed import WHOLE, Share
from asr.errors import AsrError
from asr.models.chain_corpus import Alignment, PreparedCorpus, Progress, write_corpus
from asr.models.chain_preparation import require_names
from asr.models.chunks import NO_AUGMENTATION, Chunk, ChunkAugmentation, ChunkLoader, ChunkSizes
from asr.models.interface import SpeakerStatistics, UtteranceCmvn
from asr.models.tdnnf import smoothed
from asr.serialization import write_whole_text
from asr.text.lexicon import Lexicon

SECONDS = (2.0, 5.0, 0.5)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    utterances = []
    for number, seconds in enumerate(SECONDS):
        samples = rng.normal(size=int(16000 * seconds)) * 0.05 * (1 + np.sin(np.arange(int(16000 * seconds)) / 3000))
        soundfile.write(folder / f"{number}.wav", samples, 16000)
        utterances.append(("toy", Utterance(str(number), folder / f"{number}.wav", "A B", "one")))
    utterances.append(("strange", Utterance("strange", folder / "0.wav", "A UNKNOWN", "one")))
    lexicon = Lexicon({"A": [("a",)], "B": [("b",)]})
    left_out = write_corpus(folder / "prepared", utterances, lexicon, Fbank(num_mel_bins=20), conditions=("1", "1.1"))
    assert left_out == ["strange: no pronunciation of UNKNOWN"]
    return PreparedCorpus(folder / "prepared")


def test_what_was_written_is_read(corpus: PreparedCorpus) -> None:
    assert corpus.corpora == {"toy", "strange"}  # of which nothing was usable
    require_names(corpus, {"strange": 1.0}, ["toy-one"])
    assert len(corpus) == 3 and [each.speed for each in corpus.conditions] == [1.0, 1.1] and corpus.num_features == 20
    for utterance, seconds in enumerate(SECONDS):
        assert len(corpus.features(utterance, 0)) == pytest.approx(100 * seconds, abs=1)
        assert len(corpus.features(utterance, 1)) == pytest.approx(100 * seconds / 1.1, abs=2)


def test_segments_of_a_recording_are_read_alone(corpus: PreparedCorpus, tmp_path: Path) -> None:
    audio = corpus.folder.parent / "1.wav"
    segments = [Utterance("1", audio, "A", "one", 0.0, 1.0), Utterance("2", audio, "A", "one", 1.5, None)]
    lexicon = Lexicon({"A": [("a",)]})
    late = Utterance("3", audio, "A", "one", 9.0, 10.0)
    left_out = write_corpus(tmp_path, [("toy", each) for each in (*segments, late)], lexicon, Fbank(), ("1",))
    prepared = PreparedCorpus(tmp_path)
    for utterance, (begin, end) in enumerate(((0, 16000), (24000, 80000))):
        samples = torch.from_numpy(soundfile.read(audio, dtype="float32")[0][begin:end])
        alone = Fbank()(samples[None], torch.tensor([len(samples)]))[0][0]
        assert np.array_equal(prepared.features(utterance, 0), alone.numpy().astype(np.float16))
    assert left_out == [f"3: it begins at 9 s, but {audio} has only 5 s."]
    with pytest.raises(AsrError, match="no utterance can be used: 1: no pronunciation of A"):
        write_corpus(tmp_path / "none", [("toy", segments[0])], Lexicon({"B": [("b",)]}), Fbank(), ("1",))
    assert write_corpus(tmp_path / "none", [("toy", segments[0])], lexicon, Fbank(), ("1",)) == []


@pytest.fixture
def five(tmp_path: Path) -> list[tuple[str, Utterance]]:
    """Five utterances of noise, of which the third cannot be read and the fourth has an unknown word."""
    rng = np.random.default_rng(1)
    for number in (0, 1, 3, 4):
        soundfile.write(tmp_path / f"{number}.wav", 0.1 * rng.normal(size=8000 + 800 * number), 16000)
    texts = ("A", "A", "A", "UNKNOWN", "A")
    return [("toy", Utterance(str(i), tmp_path / f"{i}.wav", text, "one")) for i, text in enumerate(texts)]


LEXICON = Lexicon({"A": [("a",)]})
CONDITIONS = ("1", "noise")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def interrupted_after(number: int) -> Progress:
    def on_progress(done: int, total: int) -> None:
        assert total == 5
        if done == number:
            raise KeyboardInterrupt

    return on_progress


@pytest.mark.parametrize("per_flush", [1, 2, 50])
@pytest.mark.parametrize("number", range(1, 6))
def test_an_interrupted_run_goes_on_with_the_same_result(
    five: list[tuple[str, Utterance]],
    number: int,
    per_flush: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, partial = tmp_path / "whole", tmp_path / "partial"
    left_out = write_corpus(whole, five, LEXICON, Fbank(), CONDITIONS, num_jobs=3)
    assert [line.partition(":")[0] for line in left_out] == [str(tmp_path / "2.wav"), "3"]
    assert contents(whole).keys() == {"utterances.json", "features-1.npy", "features-noise.npy"}
    monkeypatch.setattr("asr.models.chain_corpus._UTTERANCES_PER_FLUSH", per_flush)
    for interruption in sorted({number, min(number + 1, 5)}):
        with pytest.raises(KeyboardInterrupt):
            write_corpus(partial, five, LEXICON, Fbank(), CONDITIONS, on_progress=interrupted_after(interruption))
        with pytest.raises(AsrError, match="there is no prepared corpus"):
            PreparedCorpus(partial)
    done = []
    again = write_corpus(partial, five, LEXICON, Fbank(), CONDITIONS, on_progress=lambda *each: done.append(each))
    assert done == [(each, 5) for each in range(interruption + 1, 6)] and again == left_out
    assert contents(partial) == contents(whole)


@pytest.mark.parametrize("lost", ["journal", "features-1.npy", "features-noise.npy", "all features"])
def test_what_the_disk_has_lost_is_computed_again(five: list[tuple[str, Utterance]], lost: str, tmp_path: Path) -> None:
    whole, partial = tmp_path / "whole", tmp_path / "partial"
    write_corpus(whole, five, LEXICON, Fbank(), CONDITIONS)
    with pytest.raises(KeyboardInterrupt):
        write_corpus(partial, five, LEXICON, Fbank(), CONDITIONS, on_progress=interrupted_after(5))
    name = "unfinished.jsonl" if lost == "journal" else lost
    for file in partial.iterdir() if lost == "all features" else [partial / name]:
        if file.suffix == ".npy" or lost == "journal":
            os.truncate(file, 0 if lost == "all features" else file.stat().st_size - 3)
    begun: list[int] = []
    write_corpus(partial, five, LEXICON, Fbank(), CONDITIONS, on_progress=lambda done, total: begun.append(done))
    assert begun[0] == (1 if lost == "all features" else 5)
    assert contents(partial) == contents(whole)


def test_the_list_that_completes_a_folder_is_written_after_the_features(
    five: list[tuple[str, Utterance]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sizes = tmp_path / "prepared", []

    def write(path: Path, text: str) -> None:
        sizes.append({name: len(content) for name, content in contents(folder).items() if name.endswith(".npy")})
        write_whole_text(path, text)

    monkeypatch.setattr("asr.models.chain_corpus.write_whole_text", write)
    write_corpus(folder, five, LEXICON, Fbank(num_mel_bins=20), CONDITIONS)
    assert sizes == [{name: len(content) for name, content in contents(folder).items() if name.endswith(".npy")}]


def test_a_folder_of_an_earlier_version_is_read(corpus: PreparedCorpus, tmp_path: Path) -> None:
    """Its list of utterances has the names of corpora only with the utterances, and parts without checksums."""
    folder = shutil.copytree(corpus.folder, tmp_path / "earlier")
    listing = json.loads((folder / "utterances.json").read_text())
    for name in ("corpora", "sources", "left_out"):
        del listing[name]
    (folder / "utterances.json").write_text(json.dumps({**listing, "parts": ["toy:train"]}))
    earlier = PreparedCorpus(folder)
    assert (earlier.corpora, earlier.sources, earlier.left_out) == ({"toy"}, {"toy:train": ""}, ())
    assert np.array_equal(earlier.features(2, 1), corpus.features(2, 1))


def test_an_interrupted_run_of_something_else_is_refused(five: list[tuple[str, Utterance]], tmp_path: Path) -> None:
    folder = tmp_path / "prepared"
    with pytest.raises(KeyboardInterrupt):
        write_corpus(folder, five, LEXICON, Fbank(), CONDITIONS, on_progress=interrupted_after(2))
    before = contents(folder)
    for arguments in (
        (five[1:], LEXICON, Fbank(), CONDITIONS),
        (five, Lexicon({"A": [("a",)], "UNKNOWN": [("a",)]}), Fbank(), CONDITIONS),
        (five, LEXICON, Fbank(num_mel_bins=40), CONDITIONS),
        (five, LEXICON, Fbank(), ("1", "1.1")),
        (five, LEXICON, Fbank(), CONDITIONS, {"toy:train": "another checksum"}),
    ):
        with pytest.raises(AsrError, match="prepared: an interrupted run has begun this folder from other corpora"):
            write_corpus(folder, *arguments)
        assert {name: contents(folder)[name] for name in before} == before


def test_one_process_at_a_time_writes_features(five: list[tuple[str, Utterance]], tmp_path: Path) -> None:
    folder = tmp_path / "prepared"

    def on_progress(done: int, total: int) -> None:
        with pytest.raises(AsrError, match="prepared: another process is writing to it"):
            write_corpus(folder, five, LEXICON, Fbank(), CONDITIONS)

    write_corpus(folder, five, LEXICON, Fbank(), CONDITIONS, on_progress=on_progress)
    (tmp_path / "file").touch()
    with pytest.raises(AsrError, match="file: the features cannot be written"):
        write_corpus(tmp_path / "file", five, LEXICON, Fbank(), CONDITIONS)


def test_a_disk_that_gets_full_is_told_and_the_next_run_goes_on(
    five: list[tuple[str, Utterance]], tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(AsrError, match=r"prepared: the features cannot be written \(.*\); raise the limit"):
            write_corpus(tmp_path / "prepared", five, LEXICON, Fbank(), CONDITIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for name in ("prepared", "whole"):
        write_corpus(tmp_path / name, five, LEXICON, Fbank(), CONDITIONS)
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "prepared" / path.name).read_bytes() == path.read_bytes()


def test_pieces_lie_inside_and_are_the_same_for_the_same_seed(corpus: PreparedCorpus) -> None:
    loader = ChunkLoader(corpus, range(3), (0, 1), sizes=ChunkSizes((20, 40, 60), 60))
    for seed in range(20):
        assert loader.plan(seed) == loader.plan(seed)
        seen = set()
        for length, chunks in loader.plan(seed):
            for utterance, condition, first in chunks:
                num_outputs = corpus.utterances[utterance].num_frames[condition] // 3
                assert 0 <= first <= num_outputs - length
                seen.add(utterance)
        assert 2 not in seen  # too short for the shortest piece
    # It has 16 output frames, as many as the piece.
    assert ChunkLoader(corpus, [2], sizes=ChunkSizes((16, 40), 16)).plan(0) == [(16, [Chunk(2, 0, 0)])]


@pytest.mark.parametrize(
    ("num_utterances", "size", "sizes"),
    [
        (4, 4, [4, 4, 4]),
        (6, 4, [2, 4, 4, 4, 4]),  # half a batch is kept
        (4, 5, [5, 5]),  # less is left out
        (7, 4, [4, 4, 4, 4, 4]),
    ],
)
def test_batches_are_full_and_only_small_rests_are_left_out(
    corpus: PreparedCorpus, num_utterances: int, size: int, sizes: list[int]
) -> None:
    # Three pieces cover the 500 frames of the utterance.
    loader = ChunkLoader(corpus, [1] * num_utterances, sizes=ChunkSizes((20, 60), 60 * size))
    for seed in range(5):
        plan = loader.plan(seed)
        assert {length for length, _ in plan} == {60}
        assert sorted(len(chunks) for _, chunks in plan) == sizes


@pytest.mark.parametrize("lengths", [(45, 60), (60, 45), (1, 166), (160, 166)])
def test_any_lengths_in_any_order_cover_utterances(corpus: PreparedCorpus, lengths: tuple[int, ...]) -> None:
    """The second utterance has 166 output frames; three pieces of 60 are too long for it, and so are two of 160."""
    loader = ChunkLoader(corpus, range(3), sizes=ChunkSizes(lengths, 60))
    for length, chunks in loader.plan(3):
        for utterance, condition, first in chunks:
            assert length in lengths
            assert 0 <= first <= corpus.utterances[utterance].num_frames[condition] // 3 - length
    assert loader.plan(3) == ChunkLoader(corpus, range(3), sizes=ChunkSizes(sorted(lengths), 60)).plan(3)


@pytest.mark.parametrize("lengths", [(), (0, 20), (-5,)])
def test_a_piece_has_frames(lengths: tuple[int, ...]) -> None:
    with pytest.raises(AsrError, match=r"lengths: .*: give the output frames of a piece"):
        ChunkSizes(lengths)


def test_a_piece_is_the_normalised_utterance_with_zeros_around(corpus: PreparedCorpus) -> None:
    loader = ChunkLoader(corpus, range(3), sizes=ChunkSizes((20, 60)), left_context=7, right_context=8)
    batch = loader.load(60, [Chunk(0, 0, 0), Chunk(0, 0, 6)])
    assert batch.features.shape == (2, 7 + 180 + 8, 20)
    raw = torch.from_numpy(corpus.features(0, 0).astype(np.float32))
    normal = UtteranceCmvn()(raw[None], torch.tensor([len(raw)]))[0]
    padded = torch.nn.functional.pad(normal, (0, 0, 7, 30))
    torch.testing.assert_close(batch.features[0], padded[:195], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(batch.features[1], padded[18 : 18 + 195], atol=1e-3, rtol=1e-3)
    assert not batch.features[0, :7].any()


def test_each_piece_is_smoothed_by_a_share_of_its_own(corpus: PreparedCorpus) -> None:
    chunks = [Chunk(1, 0, 0), Chunk(1, 0, 20), Chunk(1, 0, 40)]
    plain = ChunkLoader(corpus, [1], sizes=ChunkSizes((30,))).load(30, chunks).features
    loader = ChunkLoader(corpus, [1], sizes=ChunkSizes((30,)), augmentation=ChunkAugmentation(0.0, max_smoothing=0.4))

    def load(share: Share = WHOLE) -> torch.Tensor:
        torch.manual_seed(0)
        return loader.load(30, chunks, share).features

    mixed = load()
    shares = []
    for before, after in zip(plain, mixed, strict=True):
        change = (smoothed(before[None], 1.0) - before)[0]
        shares.append(float((after - before).mul(change).sum() / change.square().sum()))
        assert torch.allclose(after, smoothed(before[None], shares[-1])[0], atol=1e-4)
    assert all(0.0 < share < 0.4 for share in shares) and len({round(share, 4) for share in shares}) == 3
    # Processes that share a batch draw the same.
    assert torch.equal(load(Share(1, 2)), mixed[1::2])


@pytest.mark.parametrize(
    "change", [ChunkAugmentation(0.1), ChunkAugmentation(0.0, spec_augment=SpecAugment(max_frequency_mask_bins=5))]
)
def test_an_epoch_that_was_stopped_goes_on_with_the_same_batches(
    corpus: PreparedCorpus, change: ChunkAugmentation
) -> None:
    """Warps and masks are random, but those of each batch follow from the seed and its number."""
    plain, changed = (
        ChunkLoader(corpus, [1] * 8, sizes=ChunkSizes((20, 60), 240), augmentation=augmentation)
        for augmentation in (NO_AUGMENTATION, change)
    )
    whole = list(changed.epoch(3))
    assert [batch.number for batch in whole] == [(3, number) for number in range(6)]
    for one, other in zip(whole, plain.epoch(3), strict=True):
        assert one.chunks == other.chunks and not torch.equal(one.features, other.features)
    for start in (2, 6):
        rest = list(changed.epoch(3, start=start))
        assert [batch.number for batch in rest] == [batch.number for batch in whole[start:]]
        assert all(torch.equal(one.features, other.features) for one, other in zip(rest, whole[start:], strict=True))
    for one, other in zip(changed.epoch(3, Share(1, 2), start=4), whole[4:], strict=True):
        assert torch.equal(one.features, other.features[1::2]) and one.num_all == len(other.chunks)


@pytest.mark.slow
def test_pieces_are_normalized_with_other_utterances_of_their_speaker(corpus: PreparedCorpus) -> None:
    corpus = PreparedCorpus(corpus.folder)
    speakers = ["ann", "ann", "ann", "bob"]
    utterances = [*corpus.utterances, corpus.utterances[2]]
    corpus.utterances = [replace(one, speaker=name) for one, name in zip(utterances, speakers, strict=True)]
    features = [torch.from_numpy(corpus.features(number, 0).astype(np.float32)) for number in range(3)]
    norm = UtteranceCmvn()
    nothing = SpeakerStatistics.of_nothing(20)
    first, second = (
        norm.statistics(features[number][None], torch.tensor([len(features[number])])) for number in (1, 2)
    )
    num_frames = torch.tensor([len(features[0])])
    expected = {
        name: norm(features[0][None], num_frames, known)[0, :60]
        for name, known in {"alone": nothing, "1": first, "2": second, "1 and 2": first + second}.items()
    }
    chunks = [Chunk(0, 0, 0)] * 300

    def drawn(share: float, processes: Share = WHOLE) -> list[str]:
        torch.manual_seed(2)
        loader = ChunkLoader(
            corpus, [0, 1, 2], sizes=ChunkSizes((20,)), augmentation=ChunkAugmentation(0.0, speaker_share=share)
        )
        pieces = loader.load(20, chunks, processes).features
        return [
            name
            for piece in pieces
            for name, value in expected.items()
            if torch.allclose(piece, value, atol=1e-4, rtol=1e-3)
        ]

    found = Counter(drawn(1.0))
    assert found.total() == 300 and set(found) == set(expected) and found["1 and 2"] > 150
    assert drawn(0.0) == ["alone"] * 300
    assert 120 < drawn(0.5).count("alone") < 200
    assert drawn(0.5, Share(1, 2)) == drawn(0.5)[1::2]
    # Others' voices are left out, and so are utterances that are not in training.
    bobs = (
        ChunkLoader(corpus, [2, 3], sizes=ChunkSizes((10,)), augmentation=ChunkAugmentation(0.0, speaker_share=1.0))
        .load(10, [Chunk(2, 0, 0)])
        .features
    )
    assert torch.allclose(bobs[0], norm(features[2][None], torch.tensor([len(features[2])]))[0, :30], atol=1e-3)


def test_seconds_are_those_of_the_recording_whatever_the_speed(corpus: PreparedCorpus) -> None:
    loader = ChunkLoader(corpus, range(3), (0, 1))
    assert loader.output_seconds(Chunk(0, 1, 10), 2) == pytest.approx([0.315 * 1.1, 0.345 * 1.1])


def test_alignments_survive_the_disk(tmp_path: Path) -> None:
    alignment = Alignment.from_lists(("SIL", "a"), [([0, 1], [0.0, 0.3], -1.0), ([], [], -np.inf)])
    alignment.save(tmp_path / "alignment.npz")
    again = Alignment.load(tmp_path / "alignment.npz")
    assert again.phones == ("SIL", "a") and again.of(0)[0].tolist() == [0, 1] and len(again.of(1)[0]) == 0
    assert again.of(0)[1].tolist() == [0.0, 0.3] and again.score.tolist() == [-1.0, -np.inf]


def test_conditions_are_drawn_by_their_weights(corpus: PreparedCorpus) -> None:
    loader = ChunkLoader(corpus, [0], (0, 1), sizes=ChunkSizes((20, 40), 20))
    light = corpus.conditions[1]._replace(weight=corpus.conditions[0].weight / 4)
    loader.corpus.conditions = (corpus.conditions[0], light)
    drawn = [chunks[0].condition for seed in range(400) for _, chunks in loader.plan(seed)[:1]]
    assert sum(drawn) / len(drawn) == pytest.approx(0.2, abs=0.06)
