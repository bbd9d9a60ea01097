"""Labels from a trained network's alignment, and a network of another frame shift that learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import soundfile
import torch
from torch import Tensor

from asr.audio.fbank import Fbank
from asr.datasets.corpora.librispeech import LibriSpeech
from asr.datasets.datamodule import AcousticDataModule
from asr.datasets.prepare import prepare_part
from asr.errors import AsrError
from asr.models.alignment import IGNORED, TeacherAlignment
from asr.models.feedforward import FeedForwardNetwork
from asr.models.losses import TorchCtc
from asr.models.training import LitAcousticModel, Optimization
from asr.testing.tones import PRONUNCIATIONS, tones
from tests.grouped import grouped

pytestmark = pytest.mark.slow

FBANK = Fbank(num_mel_bins=20)
TOKENS = ("<blk>", "T", "S", "P", "K")  # not in the bundle's order
TEXT = ["PAT KIT", "SICK SKIP", "SKIP TO", "SICK PAT", "KIT SICK", "SKIP KIT", "SICK TO SKIP", "PAT SICK"]


def spoken(sentences: list[list[str]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    waveforms = [tones(words, seed=index) for index, words in enumerate(sentences)]
    num_samples = torch.tensor([len(waveform) for waveform in waveforms])
    padded = torch.nn.utils.rnn.pad_sequence(waveforms, batch_first=True)
    features, num_frames = FBANK(padded, num_samples)
    ids = [torch.tensor([TOKENS.index(p) for word in words for p in PRONUNCIATIONS[word][0]]) for words in sentences]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return features, num_frames, tokens, torch.tensor([len(own) for own in ids])


def test_frames_get_the_phone_that_sounds(tiny_bundle_folder: Path) -> None:
    features, num_frames, tokens, num_tokens = spoken([["KIT", "PAT"], ["SKIP"]])
    teacher = TeacherAlignment(str(tiny_bundle_folder), TOKENS, FBANK, radius_seconds=0.06)
    label = teacher(features, num_frames, tokens, num_tokens, 1, num_frames, int(num_frames.max()))
    # 0.1 s of silence before each word and at the end, 0.12 s a phone.
    first = [0] * 10 + [4] * 12 + [1] * 12 + [0] * 10 + [3] * 12 + [1] * 12 + [0] * 10
    wrong = (label[0] != torch.tensor(first)).sum()
    assert wrong <= 2 * 8  # two frames at each of eight bounds
    assert (label[1, num_frames[1] :] == IGNORED).all()
    assert label[1, num_frames[1] // 2] == TOKENS.index("K")
    halved = teacher(features, num_frames, tokens, num_tokens, 2, num_frames // 2, int(num_frames.max()) // 2)
    assert (halved[0] != torch.tensor(first[::2])).sum() <= 8


def test_too_few_frames_for_a_transcript_teach_nothing(tiny_bundle_folder: Path) -> None:
    features, num_frames, _, _ = spoken([["TO"]])
    tokens = torch.ones(1, 100, dtype=torch.int64)
    teacher = TeacherAlignment(str(tiny_bundle_folder), TOKENS, FBANK)
    label = teacher(features, num_frames, tokens, torch.tensor([100]), 1, num_frames, int(num_frames))
    assert (label == IGNORED).all()


def test_a_teacher_of_other_tokens_or_features_is_refused(tiny_bundle_folder: Path) -> None:
    with pytest.raises(AsrError, match="does not have the tokens AA"):
        TeacherAlignment(str(tiny_bundle_folder), (*TOKENS, "AA"), FBANK)
    with pytest.raises(AsrError, match="another number of features than the data \\(40\\)"):
        TeacherAlignment(str(tiny_bundle_folder), TOKENS, Fbank(num_mel_bins=40))
    with pytest.raises(AsrError, match=r"teacher: .* with high_freq 0\.0, but the recipe has 5600\.0; give"):
        TeacherAlignment(str(tiny_bundle_folder), TOKENS, Fbank(num_mel_bins=20, high_freq=5600.0))


@pytest.fixture
def data_arguments(tmp_path: Path) -> dict[str, Any]:
    chapter = tmp_path / "corpus" / "dev-clean-2" / "19" / "198"
    chapter.mkdir(parents=True)
    lines = []
    for index, text in enumerate(TEXT):
        soundfile.write(str(chapter / f"19-198-{index:04d}.flac"), tones(text.split(), seed=index).numpy(), 16000)
        lines.append(f"19-198-{index:04d} {text}\n")
    (chapter / "19-198.trans.txt").write_text("".join(lines), encoding="utf-8")
    cuts = prepare_part(LibriSpeech(), tmp_path / "corpus", "dev-clean-2", tmp_path / "data").cuts
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("".join(f"{word} {' '.join(ways[0])}\n" for word, ways in PRONUNCIATIONS.items()))
    return {
        "train_cuts": [cuts],
        "valid_cuts": [cuts],
        "lexicon": [str(lexicon)],
        "fbank": FBANK,
        "max_batch_duration": 3.0,
    }


def fit(data: dict[str, Any], folder: Path, teacher: str, epochs: int, resume: Path | None = None) -> Any:
    pl.seed_everything(3)
    network = FeedForwardNetwork(20, 5, num_hidden_layers=1, hidden_dim=32, subsampling_factor=1)
    model = LitAcousticModel(network, TorchCtc(), Optimization(peak_lr=2e-2, average_decay=0.5), teacher=teacher)
    keep = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=[keep], **quiet)
    trainer.fit(
        model, datamodule=grouped(AcousticDataModule, **data), ckpt_path=None if resume is None else str(resume)
    )
    return float(trainer.callback_metrics["val_token_error_rate"]), model.state_dict()


def test_a_network_of_10_ms_learns_from_one_of_20(
    tmp_path: Path, data_arguments: dict[str, Any], tiny_bundle_folder: Path
) -> None:
    error_rate, whole = fit(data_arguments, tmp_path / "whole", str(tiny_bundle_folder), epochs=12)
    assert error_rate < 0.1
    _, resumed = fit(data_arguments, tmp_path / "b", str(tiny_bundle_folder), 12, tmp_path / "whole" / "epoch=8.ckpt")
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert not any(name.startswith("_teacher") for name in whole)
