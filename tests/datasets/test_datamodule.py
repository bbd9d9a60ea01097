"""Batches: what is in them, what is left out, and what must not change them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from lhotse import CutSet, MonoCut, MultiCut, Recording, SupervisionSegment

from asr.audio.fbank import Fbank
from asr.audio.io import read_audio
from asr.datasets.augment import NoiseMixer, SpecAugment
from asr.datasets.corpora.librispeech import LibriSpeech
from asr.datasets.corpora.lists import Table
from asr.datasets.cuts import cut_waveform, hold_out_speakers, read_cuts
from asr.datasets.datamodule import AcousticDataModule
from asr.datasets.dataset import FeatureMemory, WaveformCache
from asr.datasets.prepare import prepare_part
from asr.distributed import Share
from asr.errors import AsrError
from tests.datasets.toy_corpora import write_audio, write_librispeech
from tests.grouped import grouped

LEXICON = "A AH0\nA EY1\nBAY B EY1\n"


def data_module(**options: Any) -> AcousticDataModule:
    """With options in the groups that have them."""
    made: AcousticDataModule = grouped(AcousticDataModule, **options)
    return made


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, Any]:
    """Arguments for a data module over ten utterances of two speakers."""
    write_librispeech(tmp_path / "corpus", num=5)
    report = prepare_part(LibriSpeech(), tmp_path / "corpus", "dev-clean-2", tmp_path / "data")
    (tmp_path / "lexicon.txt").write_text(LEXICON, encoding="utf-8")
    return {"train_cuts": [report.cuts], "lexicon": [str(tmp_path / "lexicon.txt")]}


def test_a_batch_is_what_the_acoustic_models_expect(corpus: dict[str, Any]) -> None:
    module = data_module(**corpus, fbank=Fbank(40, use_energy=True), max_batch_duration=2.0)
    module.setup("fit")
    assert (module.num_tokens, module.feature_dim) == (4, 41)
    seen: list[str] = []
    for batch in module.train_dataloader():
        num = len(batch["texts"])
        assert set(batch) == {
            "features",
            "num_frames",
            "tokens",
            "num_tokens",
            "texts",
            "cut_ids",
            "rows",
            "num_all",
            "number",
        }
        assert batch["features"].dtype == torch.float32
        assert batch["features"].shape == (num, int(batch["num_frames"].max()), 41)
        assert batch["num_frames"].dtype == batch["tokens"].dtype == batch["num_tokens"].dtype == torch.int64
        assert batch["tokens"].tolist() == [[1, 2, 3]] * num and batch["num_tokens"].tolist() == [3] * num
        assert batch["texts"] == ["A BAY"] * num
        seen += batch["cut_ids"]
    assert sorted(seen) == sorted(cut.id for cut in module.cuts["train"]) and len(seen) == 10


def test_cuts_of_some_channels_and_another_speed_are_what_they_say(tmp_path: Path) -> None:
    samples = 0.1 * np.random.default_rng(0).standard_normal((16000, 2)).astype(np.float32)
    soundfile.write(tmp_path / "call.wav", samples, 16000, subtype="FLOAT")
    recording = Recording.from_file(tmp_path / "call.wav")
    caller, callee = (MonoCut(f"{side}", 0.25, 0.5, side, recording=recording) for side in (0, 1))
    both, fast = MultiCut("both", 0.25, 0.5, [0, 1], recording=recording), caller.perturb_speed(1.25)
    padded = callee.pad(0.75)
    part = samples[4000:12000]
    for cached in (False, True):
        waveforms = WaveformCache()
        if cached:
            waveforms.fill(CutSet.from_cuts([caller, callee, both, fast, padded]))
        torch.testing.assert_close(waveforms.waveform(caller), torch.from_numpy(part[:, 0]))
        torch.testing.assert_close(waveforms.waveform(callee), torch.from_numpy(part[:, 1]))
        torch.testing.assert_close(waveforms.waveform(both), torch.from_numpy(part.mean(1)), rtol=0, atol=1e-4)
        assert [len(waveforms.waveform(cut)) for cut in (fast, padded)] == [6400, 12000]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.wav", {}),
        ("a.mp3", {"bitrate_mode": "CONSTANT", "compression_level": 0.99}),
        ("a.ogg", {"subtype": "OPUS"}),
    ],
)
@pytest.mark.parametrize("rate", [16000, 8000])
def test_a_cut_is_a_part_of_its_file_at_any_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], rate: int
) -> None:
    """lhotse needs scipy to resample, and finds other samples in compressed files."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    samples = 0.1 * np.random.default_rng(0).standard_normal(16000 * 4).astype(np.float32)
    soundfile.write(tmp_path / name, samples, 16000, **options)
    recording, whole = Recording.from_file(tmp_path / name), read_audio(tmp_path / name, rate)
    part = cut_waveform(recording.to_cut().truncate(offset=2.5, duration=0.5), rate)
    torch.testing.assert_close(part, whole[5 * rate // 2 : 3 * rate], rtol=0, atol=1e-6)
    reverse = cut_waveform(recording.to_cut().perturb_volume(-1.0), rate)
    torch.testing.assert_close(reverse, -whole, rtol=0, atol=1e-5)


def test_a_package_that_lhotse_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(16000), 16000)
    resampled = Recording.from_file(tmp_path / "a.wav").resample(8000).to_cut()
    for package in ("scipy", "torchaudio"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(AsrError, match=r"cannot be read \(.*scipy.*\); lhotse changes the recording with that package"):
        cut_waveform(resampled, 16000)


@pytest.mark.slow
def test_features_are_those_of_each_file_alone(corpus: dict[str, Any]) -> None:
    module = data_module(**corpus)
    module.setup("fit")
    for batch in module.train_dataloader():
        for row, cut_id in enumerate(batch["cut_ids"]):
            wave = read_audio(module.cuts["train"][cut_id].recording.sources[0].source)
            alone, _ = module.fbank(wave[None], torch.tensor([len(wave)]))
            torch.testing.assert_close(batch["features"][row, : batch["num_frames"][row]], alone[0])
            assert not batch["features"][row, batch["num_frames"][row] :].any()


@pytest.mark.slow
def test_every_way_to_keep_data_gives_the_same(corpus: dict[str, Any], tmp_path: Path) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"memory_gb": 0.0},
        {"feature_dir": str(tmp_path / "features")},
        {"feature_dir": str(tmp_path / "features")},
        {"num_workers": 1},
    ]
    epochs = []
    for way in ways:
        module = data_module(**corpus, **way, max_batch_duration=2.0)
        module.setup("fit")
        loader = module.train_dataloader()
        for _ in range(2):
            epochs.append({i: f for b in loader for i, f in zip(b["cut_ids"], b["features"], strict=True)})
    for epoch in epochs[1:]:
        assert epoch.keys() == epochs[0].keys()
        for cut_id, features in epoch.items():
            frames = min(len(features), len(epochs[0][cut_id]))  # padding depends on the company
            assert torch.equal(features[:frames], epochs[0][cut_id][:frames])


def test_memory_is_that_of_whole_files(tmp_path: Path) -> None:
    recording = Recording.from_file(write_audio(tmp_path / "long.wav", 3.0))
    CutSet.from_cuts(
        [
            MonoCut(
                f"{begin}",
                begin,
                0.5,
                0,
                [SupervisionSegment(f"{begin}", recording.id, 0, 0.5, text="A")],
                recording=recording,
            )
            for begin in (0.5, 2.0)
        ]
    ).to_file(tmp_path / "cuts.jsonl.gz")
    (tmp_path / "lexicon.txt").write_text(LEXICON, encoding="utf-8")
    arguments = {"train_cuts": [str(tmp_path / "cuts.jsonl.gz")], "lexicon": [str(tmp_path / "lexicon.txt")]}
    waveforms = []
    for seconds in (2.0, 3.0):
        module = data_module(**arguments, memory_gb=seconds * 32000 / 2**30)
        module.setup("fit")
        assert module.waveforms.gigabytes == (3.0 * 32000 / 2**30 if seconds == 3.0 else 0.0)
        waveforms.append([module.waveforms.waveform(cut) for cut in module.cuts["train"]])
    for from_file, kept in zip(*waveforms, strict=True):
        assert len(kept) == 8000 and torch.equal(from_file, kept)


@pytest.mark.slow
def test_a_program_ends_although_its_loaders_are_in_use(corpus: dict[str, Any]) -> None:
    program = (
        "from asr.datasets.datamodule import AcousticDataModule, CutSelection, Loading, TokenizerFiles\n"
        f"selection, files = CutSelection({corpus['train_cuts']!r}), TokenizerFiles({corpus['lexicon']!r})\n"
        "module = AcousticDataModule(selection, files, loading=Loading(num_workers=1))\n"
        "module.setup('fit')\n"
        "batches = iter(module.train_dataloader())\n"
        "print(type(next(batches)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "<class 'dict'>"), ran.stderr
    assert "Error" not in ran.stderr


@pytest.mark.parametrize("in_folder", [False, True])
def test_manifests_may_have_the_same_ids(tmp_path: Path, in_folder: bool) -> None:
    """Ids that are names of files, in one folder for each part of a corpus."""
    (tmp_path / "tokens.txt").write_text("<blk>\nA\n")
    manifests = []
    for part in ("train", "valid"):
        (tmp_path / part).mkdir()
        for number in range(2):
            samples = 0.1 * np.random.default_rng(2 * len(manifests) + number).standard_normal(16000)
            soundfile.write(tmp_path / part / f"{number}.wav", samples, 16000)
        (tmp_path / f"{part}.csv").write_text(f"path,text\n{part}/0.wav,A\n{part}/1.wav,A\n")
        prepare_part(Table(), tmp_path / f"{part}.csv", part, tmp_path)
        manifests.append(str(tmp_path / f"csv_{part}.jsonl.gz"))
    module = data_module(
        train_cuts=manifests[:1],
        valid_cuts=manifests[1:],
        tokens=str(tmp_path / "tokens.txt"),
        feature_dir=str(tmp_path / "features") if in_folder else None,
    )
    module.setup("fit")
    for part, loader in (("train", module.train_dataloader()), ("valid", module.val_dataloader())):
        (batch,) = loader
        for number, features in zip(batch["cut_ids"], batch["features"], strict=True):
            wave = read_audio(tmp_path / part / f"{number}.wav")
            assert torch.equal(features, module.fbank(wave[None], torch.tensor([len(wave)]))[0][0])


def test_kept_features_of_audio_that_has_changed_are_not_used(corpus: dict[str, Any], tmp_path: Path) -> None:
    def features() -> dict[str, torch.Tensor]:
        module = data_module(**corpus, feature_dir=str(tmp_path / "features"))
        module.setup("fit")
        return {i: f for b in module.train_dataloader() for i, f in zip(b["cut_ids"], b["features"], strict=True)}

    before = features()
    audio = tmp_path / "corpus" / "dev-clean-2" / "19" / "198" / "19-198-0000.flac"
    samples, rate = soundfile.read(audio)
    soundfile.write(audio, 0.5 * samples, rate)
    after = features()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["19-198-0000"] and len(before) == 10


@pytest.mark.slow
def test_speed_is_drawn_afresh_and_reproducibly(corpus: dict[str, Any]) -> None:
    def lengths(seed: int) -> list[dict[str, int]]:
        module = data_module(**corpus, speed_factors=[0.9, 1.0, 1.1], seed=seed)
        module.setup("fit")
        loader: Any = module.train_dataloader()
        epochs = []
        for epoch in range(12):
            loader.sampler.set_epoch(epoch)
            epochs.append({id_: int(n) for b in loader for id_, n in zip(b["cut_ids"], b["num_frames"], strict=True)})
        return epochs

    epochs = lengths(0)
    assert lengths(0) == epochs and lengths(1) != epochs
    assert {epoch[cut_id] for epoch in epochs for cut_id in ("19-198-0000", "26-198-0000")} == {36, 40, 44}


def test_bucketing_bounds_the_batch_and_groups_by_duration(corpus: dict[str, Any]) -> None:
    module = data_module(**corpus, max_batch_duration=1.7, num_buckets=4)
    module.setup("fit")
    loader = module.train_dataloader()
    orders = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        batches = list(loader)
        assert all(int(batch["num_frames"].sum()) <= 171 for batch in batches)
        orders.append([batch["cut_ids"] for batch in batches])
    assert orders[0] != orders[1] or orders[1] != orders[2]
    assert abs(module.num_train_batches() - len(orders[0])) <= 2


def test_one_utterance_is_a_batch(corpus: dict[str, Any], tmp_path: Path) -> None:
    (path,) = corpus["train_cuts"]
    one = str(tmp_path / "one.jsonl.gz")
    CutSet.from_cuts([next(iter(CutSet.from_file(path)))]).to_file(one)
    module = data_module(**corpus, valid_cuts=[one], test_cuts=[one])
    module.setup()
    for loader in (module.val_dataloader(), module.test_dataloader()):
        assert [batch["cut_ids"] for batch in loader] == [[cut.id for cut in CutSet.from_file(one)]]


def test_unknown_words_are_reported_and_test_utterances_stay(
    corpus: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transcript = tmp_path / "corpus" / "dev-clean-2" / "19" / "198" / "19-198.trans.txt"
    text = (
        transcript.read_text(encoding="utf-8").replace("0000 A BAY", "0000 A ZEBRA ZEBRA").replace("0001 A", "0001 AN")
    )
    transcript.write_text(text, encoding="utf-8")
    prepare_part(LibriSpeech(), tmp_path / "corpus", "dev-clean-2", tmp_path / "data", redo=True)
    module = data_module(**corpus, test_cuts=corpus["train_cuts"])
    with caplog.at_level(logging.WARNING):
        module.setup("fit")
        module.setup("test")
    assert "train: 2 of 10 utterances are left out for 2 words" in caplog.text and "ZEBRA (2), AN (1)" in caplog.text
    assert "test: 2 of 10 utterances have no tokens for 2 words that are not in the lexicon" in caplog.text
    assert module.left_out["train"].unknown_words == {"ZEBRA": 2, "AN": 1}
    assert (len(module.cuts["train"]), len(module.cuts["test"])) == (8, 10)
    batches = list(module.test_dataloader())
    found = {
        i: (t, n) for b in batches for i, t, n in zip(b["cut_ids"], b["texts"], b["num_tokens"].tolist(), strict=True)
    }
    assert found["19-198-0000"] == ("A ZEBRA ZEBRA", 1)


@pytest.mark.parametrize(
    ("split", "options"), [("train", {}), ("train", {"valid_fraction": 0.3}), ("valid", {}), ("test", {})]
)
def test_a_manifest_without_utterances_is_refused(
    corpus: dict[str, Any], tmp_path: Path, split: str, options: dict[str, Any]
) -> None:
    (tmp_path / "empty.jsonl").touch()
    module = data_module(**{**corpus, f"{split}_cuts": [str(tmp_path / "empty.jsonl")], **options})
    with pytest.raises(AsrError, match=rf"empty\.jsonl: {split}_cuts has no utterances; give"):
        module.setup("test" if split == "test" else "fit")


def test_held_out_speakers(corpus: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    module = data_module(**corpus, valid_fraction=0.3)
    module.setup("fit")
    speakers = {split: {cut.supervisions[0].speaker for cut in cuts} for split, cuts in module.cuts.items()}
    assert not speakers["train"] & speakers["valid"] and speakers["train"] | speakers["valid"] == {"19", "26"}
    rest, held_out = hold_out_speakers(read_cuts(corpus["train_cuts"]), 0.3, 0)
    assert set(module.cuts["train"].ids) == {cut.id for cut in rest} and len(rest) == 5
    assert set(module.cuts["valid"].ids) == {cut.id for cut in held_out} and len(held_out) == 5
    assert sum(len(batch["texts"]) for batch in module.val_dataloader()) == 5
    assert [record.message for record in caplog.records if "valid_fraction" in record.message] == [
        "valid_fraction: 50 % of the speech is held out, because speakers are held out as a whole; give valid_cuts if "
        "that is too much."
    ]


def test_a_file_that_went_bad_after_preparation_costs_itself_only(
    corpus: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "corpus" / "dev-clean-2" / "19" / "198" / "19-198-0003.flac").write_bytes(b"")
    module = data_module(**corpus)
    module.setup("fit")
    with caplog.at_level(logging.WARNING):
        seen = [cut_id for batch in module.train_dataloader() for cut_id in batch["cut_ids"]]
    assert len(seen) == 9 and "19-198-0003 is left out" in caplog.text


@pytest.mark.slow
def test_other_rates_and_stereo_become_frames_of_16_khz_mono(corpus: dict[str, Any], tmp_path: Path) -> None:
    write_audio(tmp_path / "corpus" / "dev-clean-2" / "19" / "198" / "19-198-0000.flac", 0.5, 44100, 2)
    prepare_part(LibriSpeech(), tmp_path / "corpus", "dev-clean-2", tmp_path / "data", redo=True)
    module = data_module(**corpus)
    module.setup("fit")
    frames = {i: int(n) for b in module.train_dataloader() for i, n in zip(b["cut_ids"], b["num_frames"], strict=True)}
    assert frames["19-198-0000"] == 50


def test_channels_that_cancel_each_other_are_heard(tmp_path: Path) -> None:
    left = torch.randn(1600, generator=torch.Generator().manual_seed(0)) * 0.1
    soundfile.write(tmp_path / "a.wav", torch.stack([left, -left], dim=1).numpy(), 16000, subtype="FLOAT")
    assert torch.equal(cut_waveform(Recording.from_file(tmp_path / "a.wav").to_cut(), 16000), left)


@pytest.mark.slow
def test_noise_and_masks_change_training_only(corpus: dict[str, Any], tmp_path: Path) -> None:
    write_audio(tmp_path / "noise" / "hum.wav", 1.0)
    settings: dict[str, Any] = {
        **corpus,
        "spec_augment": SpecAugment(),
        "test_cuts": corpus["train_cuts"],
        "valid_fraction": 0.3,
    }
    plain = data_module(**corpus)
    noisy = data_module(**settings, noise=NoiseMixer(tmp_path / "noise", 1.0), memory_gb=1.0)
    batch = next(iter(noisy.train_dataloader()))
    cuts = CutSet.from_cuts(noisy.cuts["train"][cut_id] for cut_id in batch["cut_ids"])
    clean = plain.plain_dataset[cuts]
    assert torch.equal(noisy.plain_dataset[cuts]["features"], clean["features"])
    assert not torch.equal(batch["features"], clean["features"])


def test_noise_of_another_sampling_rate_is_refused(corpus: dict[str, Any], tmp_path: Path) -> None:
    """It would be added at another pitch."""
    write_audio(tmp_path / "noise" / "hum.wav", 1.0)
    with pytest.raises(AsrError, match="noise: sampling_rate is 16000, but 8000 in fbank; give both the same"):
        data_module(**corpus, fbank=Fbank(sampling_rate=8000), noise=NoiseMixer(tmp_path / "noise"))


def test_characters(corpus: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("<blk>\nA\nB\nY\n", encoding="utf-8")
    module = data_module(**{**corpus, "lexicon": []}, tokens=str(tmp_path / "letters"))
    module.setup("fit")
    assert next(iter(module.train_dataloader()))["tokens"][0].tolist() == [1, 2, 1, 3]


def test_other_pronunciations_are_drawn(corpus: dict[str, Any]) -> None:
    module = data_module(**corpus, test_cuts=corpus["train_cuts"], random_pronunciation=True)
    module.setup()
    drawn = {tuple(row) for _ in range(3) for b in module.train_dataloader() for row in b["tokens"].tolist()}
    assert drawn == {(1, 2, 3), (3, 2, 3)}
    assert {tuple(row) for b in module.test_dataloader() for row in b["tokens"].tolist()} == {(1, 2, 3)}


def test_features_are_kept_in_memory_by_the_process_that_needs_them_again(corpus: dict[str, Any]) -> None:
    module = data_module(**corpus)
    module.setup("fit")
    assert len(list(module.train_dataloader())) > 0
    assert isinstance(module.features, FeatureMemory) and len(module.features) == 10
    assert data_module(**corpus, num_workers=1).features is None


def test_a_process_without_a_share_of_a_batch_gets_an_empty_one(corpus: dict[str, Any]) -> None:
    module = data_module(**corpus)
    module.setup("fit")
    cuts = CutSet.from_cuts([next(iter(module.cuts["train"]))])
    whole = module.plain_dataset[cuts]
    module.plain_dataset.share = Share(1, 2)
    empty = module.plain_dataset[cuts]
    for name in ("features", "num_frames", "tokens", "num_tokens", "rows"):
        assert empty[name].shape[0] == 0 and empty[name].dtype == whole[name].dtype, name
    assert (empty["texts"], empty["cut_ids"], empty["num_all"]) == ([], [], 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_cuts": []}, "train_cuts: there is no manifest"),
        ({"train_cuts": ["absent.jsonl.gz"]}, "there is no such cut manifest"),
        ({"lexicon": []}, "give a lexicon"),
        ({"min_duration": 50.0, "max_duration": 60.0}, "no utterance can be used"),
    ],
)
def test_faulty_requests(corpus: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(AsrError, match=message):
        data_module(**{**corpus, **change}).setup("fit")


def test_a_damaged_manifest_and_one_named_twice(corpus: dict[str, Any]) -> None:
    path = Path(corpus["train_cuts"][0])
    with pytest.raises(AsrError, match="occurs twice"):
        data_module(**{**corpus, "train_cuts": [str(path)] * 2}).setup("fit")
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(AsrError, match="not a readable manifest"):
        data_module(**corpus).setup("fit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"valid_fraction": 1.5}, "valid_fraction is 1.5; give 0 or more, and less than 1"),
        ({"valid_fraction": -0.1}, "valid_fraction is -0.1"),
        ({"valid_fraction": float("nan")}, "valid_fraction is nan"),
        ({"max_vocal_tract_warp": -0.1}, "max_vocal_tract_warp is -0.1; give 0 or more, and less than 1"),
        ({"max_vocal_tract_warp": 1.0}, "max_vocal_tract_warp is 1.0"),
        ({"max_batch_duration": 0.0}, "max_batch_duration is 0.0; give a number above 0"),
        ({"max_batch_cuts": 0}, "max_batch_cuts is 0; give 1 or more"),
        ({"num_buckets": 0}, "num_buckets is 0; give 1 or more"),
        ({"num_workers": -1}, "num_workers is -1; give 0 or more"),
        ({"speed_factors": []}, r"speed_factors is \[\]; give positive numbers"),
        ({"speed_factors": [1.0, 0.0]}, r"speed_factors is \[1.0, 0.0\]"),
    ],
)
def test_numbers_that_cannot_be_are_refused(corpus: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(AsrError, match=message):
        data_module(**corpus, **arguments)
