"""Training through Lightning: it runs, resumes to the same weights, and what it leaves behind can be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from asr.audio.fbank import Fbank
from asr.bundle import Bundle
from asr.datasets.augment import SpecAugment
from asr.datasets.corpora.librispeech import LibriSpeech
from asr.datasets.datamodule import AcousticDataModule
from asr.datasets.prepare import prepare_part
from asr.errors import AsrError
from asr.graph.context import TIED_STATES
from asr.models.checkpoint import network_from_checkpoint, trained_network
from asr.models.conformer import Conformer
from asr.models.losses import CtcCrf, TorchCtc
from asr.models.training import LitAcousticModel, Optimization
from tests.datasets.toy_corpora import write_librispeech
from tests.grouped import grouped

pytestmark = pytest.mark.slow

NETWORK: dict[str, Any] = {
    "num_features": 20,
    "num_tokens": 4,
    "dim": 16,
    "num_blocks": 2,
    "num_heads": 2,
    "hidden_dim": 32,
    "kernel_size": 3,
    "group_size": 8,
    "skip_probability": 0.1,
    "intermediate_blocks": [1],
}


@pytest.fixture
def data_arguments(tmp_path: Path) -> dict[str, Any]:
    write_librispeech(tmp_path / "corpus", num=4)
    report = prepare_part(LibriSpeech(), tmp_path / "corpus", "dev-clean-2", tmp_path / "data")
    (tmp_path / "lexicon.txt").write_text("A AH0\nBAY B EY1\n", encoding="utf-8")
    return {
        "train_cuts": [report.cuts],
        "valid_cuts": [report.cuts],
        "test_cuts": [report.cuts],
        "lexicon": [str(tmp_path / "lexicon.txt")],
        "fbank": Fbank(num_mel_bins=20),
        "spec_augment": SpecAugment(),
        "max_batch_duration": 2.0,
        "speed_factors": [0.9, 1.0],
    }


def fit(folder: Path, data: dict[str, Any], max_epochs: int, resume: str | None = None, **options: Any) -> Path:
    pl.seed_everything(3)
    model = grouped(
        LitAcousticModel, Conformer(**NETWORK), options.pop("objective", TorchCtc()), **{"peak_lr": 1e-2, **options}
    )
    keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        logger=False,
        callbacks=[keep],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, datamodule=grouped(AcousticDataModule, **data), ckpt_path=resume)
    assert "val_token_error_rate" in trainer.callback_metrics
    return folder / f"epoch={max_epochs - 1}.ckpt"


def averaged_weights(checkpoint: str | Path) -> dict[str, Tensor]:
    return trained_network(checkpoint)[0]


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_resumed_run_ends_where_the_whole_one_does(tmp_path: Path, data_arguments: dict[str, Any]) -> None:
    whole = fit(tmp_path / "whole", data_arguments, max_epochs=3)
    resumed = fit(tmp_path / "resumed", data_arguments, max_epochs=3, resume=str(tmp_path / "whole" / "epoch=1.ckpt"))
    assert same(averaged_weights(whole), averaged_weights(resumed))
    assert not same(averaged_weights(whole), averaged_weights(tmp_path / "whole" / "epoch=1.ckpt"))


def test_a_resumed_run_says_that_it_keeps_its_learning_rate(
    tmp_path: Path, data_arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    middle = str(fit(tmp_path / "whole", data_arguments, max_epochs=1))
    fit(tmp_path / "same", data_arguments, max_epochs=2, resume=middle)
    assert "ckpt_path" not in caplog.text
    fit(tmp_path / "other", data_arguments, max_epochs=2, resume=middle, peak_lr=1e-4)
    assert "ckpt_path: the run goes on with the peak_lr 0.01 with which it began, not 0.0001; " in caplog.text


def test_a_resumed_run_does_not_go_back_to_its_initial_checkpoint(
    tmp_path: Path, data_arguments: dict[str, Any]
) -> None:
    initial = str(fit(tmp_path / "a", data_arguments, max_epochs=1))
    whole = fit(tmp_path / "whole", data_arguments, max_epochs=3, initial_checkpoint=initial)
    halfway = str(tmp_path / "whole" / "epoch=1.ckpt")
    resumed = fit(tmp_path / "b", data_arguments, max_epochs=3, resume=halfway, initial_checkpoint=initial)
    assert same(averaged_weights(whole), averaged_weights(resumed))


def test_a_run_is_not_resumed_with_other_tokens(tmp_path: Path, data_arguments: dict[str, Any]) -> None:
    """A changed lexicon may have as many phones as before."""
    checkpoint = fit(tmp_path / "a", data_arguments, max_epochs=1)
    (tmp_path / "lexicon.txt").write_text("A EH0\nBAY B EY1\n", encoding="utf-8")
    with pytest.raises(AsrError, match="ckpt_path: the checkpoint has other tokens than the data"):
        fit(tmp_path / "b", data_arguments, max_epochs=2, resume=str(checkpoint))


def test_a_run_is_not_resumed_with_other_features(tmp_path: Path, data_arguments: dict[str, Any]) -> None:
    """As many, but of another band; checkpoints of earlier versions do not say."""
    checkpoint = fit(tmp_path / "a", data_arguments, max_epochs=1)
    other = {**data_arguments, "fbank": Fbank(num_mel_bins=20, high_freq=5600.0)}
    with pytest.raises(AsrError, match=r"ckpt_path: .* with high_freq 0\.0, but the recipe has 5600\.0; give"):
        fit(tmp_path / "b", other, max_epochs=2, resume=str(checkpoint))
    content = torch.load(checkpoint)
    assert content.pop("fbank") == Fbank(num_mel_bins=20).arguments
    torch.save(content, checkpoint)
    fit(tmp_path / "c", other, max_epochs=2, resume=str(checkpoint))


def test_a_start_from_other_features_is_said(
    tmp_path: Path, data_arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    first = str(fit(tmp_path / "a", data_arguments, max_epochs=1))
    fit(tmp_path / "b", data_arguments, max_epochs=1, initial_checkpoint=first)
    said = (
        f"{first}: initial_checkpoint: it was trained on filterbanks with high_freq 0.0, but this training has 5600.0"
    )
    assert said not in caplog.messages
    other = {**data_arguments, "fbank": Fbank(num_mel_bins=20, high_freq=5600.0)}
    fit(tmp_path / "c", other, max_epochs=1, initial_checkpoint=first)
    assert said in caplog.messages


def test_weights_are_averaged_once_a_step_of_several_batches(data_arguments: dict[str, Any]) -> None:
    model = LitAcousticModel(Conformer(**NETWORK), TorchCtc())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, num_sanity_val_steps=0, **quiet)
    trainer.fit(model, datamodule=grouped(AcousticDataModule, **data_arguments))
    assert int(model.average.num_updates) == trainer.global_step > 1


def test_figures_of_test_and_validation_are_equal_on_the_same_data(data_arguments: dict[str, Any]) -> None:
    model, data = LitAcousticModel(Conformer(**NETWORK), TorchCtc()), grouped(AcousticDataModule, **data_arguments)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    whole = pl.Trainer(accelerator="cpu", **quiet)
    beginning = pl.Trainer(accelerator="cpu", limit_val_batches=1, limit_test_batches=1, **quiet)
    validations = [trainer.validate(model, data)[0] for trainer in (whole, beginning)]
    tests = [trainer.test(model, data)[0] for trainer in (whole, beginning)]  # sums begin anew each time
    assert tests == [{name.replace("val_", "test_"): value for name, value in each.items()} for each in validations]
    assert tests[0] != tests[1]


def test_a_run_continues_behind_a_shorter_step_at_the_end_of_an_epoch(
    tmp_path: Path, data_arguments: dict[str, Any]
) -> None:
    def run(folder: str, resume: Path | None = None) -> pl.Trainer:
        pl.seed_everything(3)
        keep = ModelCheckpoint(dirpath=tmp_path / folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=3, accumulate_grad_batches=3, callbacks=[keep], num_sanity_val_steps=0,
            logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        model = LitAcousticModel(Conformer(**NETWORK), TorchCtc(), Optimization(peak_lr=1e-2))
        # Each utterance is a batch, so that the last step of an epoch has two.
        data = grouped(AcousticDataModule, **{**data_arguments, "max_batch_cuts": 1})
        trainer.fit(model, datamodule=data, ckpt_path=None if resume is None else str(resume))
        return trainer

    whole = run("whole")
    resumed = run("resumed", tmp_path / "whole" / "step=3.ckpt")
    assert whole.global_step == resumed.global_step == 9
    first, second = (averaged_weights(tmp_path / name / "step=9.ckpt") for name in ("whole", "resumed"))
    assert same(first, second)


def test_flat_start_and_ctc_crf_train_and_another_run_starts_from_them(
    tmp_path: Path, data_arguments: dict[str, Any]
) -> None:
    first = fit(tmp_path / "a", data_arguments, max_epochs=1, flat_start_steps=2, objective=CtcCrf(num_tokens=4))
    assert all(torch.isfinite(value).all() for value in averaged_weights(first).values())
    second = fit(tmp_path / "b", data_arguments, max_epochs=1, initial_checkpoint=str(first), peak_lr=1e-60)
    assert same(averaged_weights(first), averaged_weights(second))


def test_the_checkpoint_gives_the_network_back(tmp_path: Path, data_arguments: dict[str, Any]) -> None:
    checkpoint = fit(tmp_path / "a", data_arguments, max_epochs=1)
    recipe = tmp_path / "am.yaml"
    section = {"class_path": "asr.models.conformer.Conformer", "init_args": NETWORK}
    recipe.write_text(yaml.safe_dump({"model": {"init_args": {"network": section}}}), encoding="utf-8")
    registered, tokens = network_from_checkpoint(checkpoint, recipe)
    assert registered.class_name == "Conformer"
    assert not registered.network.training
    weights = averaged_weights(checkpoint)
    assert same(weights, registered.network.state_dict())
    assert list(tokens.tokens) == ["<blk>", "AH", "B", "EY"]
    other = fit(tmp_path / "b", data_arguments, max_epochs=1, initial_checkpoint=str(checkpoint))
    mean = network_from_checkpoint([checkpoint, other], recipe)[0].network.state_dict()
    for name, value in averaged_weights(other).items():
        expected = (value + weights[name]) / 2 if value.is_floating_point() else value
        torch.testing.assert_close(mean[name], expected)


def test_training_starts_from_a_bundle_too(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "checkpoints" / "an4"
    weights, tokens, tied_states, fbank = trained_network(folder)
    bundle = Bundle.load(folder)
    assert same(weights, bundle.acoustic_model.network.state_dict())
    assert tokens == list(bundle.graph.tokens.tokens) and tied_states == bundle.graph.meta.get(TIED_STATES)
    assert fbank == Fbank(**bundle.features.arguments).arguments
    with pytest.raises(AsrError, match=r"bundle\.json"):
        trained_network(tmp_path)


def test_what_does_not_fit_is_named(tmp_path: Path, data_arguments: dict[str, Any]) -> None:
    checkpoint = fit(tmp_path / "a", data_arguments, max_epochs=1)
    recipe = tmp_path / "am.yaml"
    section = {"class_path": "asr.models.conformer.Conformer", "init_args": {**NETWORK, "dim": 32}}
    recipe.write_text(yaml.safe_dump({"model": {"init_args": {"network": section}}}), encoding="utf-8")
    with pytest.raises(AsrError, match=r"do not fit the network of .*am\.yaml .*give the config\.yaml that it wrote"):
        network_from_checkpoint(checkpoint, recipe)
    with pytest.raises(AsrError, match="no Lightning checkpoint"):
        averaged_weights(recipe)
    with pytest.raises(AsrError, match="cannot be read"):
        network_from_checkpoint(checkpoint, tmp_path / "none.yaml")
    recipe.write_text("model: {}\n", encoding="utf-8")
    with pytest.raises(AsrError, match="no model"):
        network_from_checkpoint(checkpoint, recipe)
    torch.save({"state_dict": {"x": torch.zeros(1)}}, tmp_path / "other.ckpt")
    with pytest.raises(AsrError, match="it has no averaged"):
        averaged_weights(tmp_path / "other.ckpt")


def test_a_network_of_another_size_than_the_data_is_refused(tmp_path: Path, data_arguments: dict[str, Any]) -> None:
    with pytest.raises(AsrError, match="has num_features 20 and num_tokens 4, but the data have 30 and 4"):
        fit(tmp_path, {**data_arguments, "fbank": Fbank(num_mel_bins=30)}, max_epochs=1)


def test_utterances_that_ctc_cannot_align_are_said(
    tmp_path: Path, data_arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Their loss is 0, which looks as if they were learned."""
    fit(tmp_path / "a", data_arguments, max_epochs=1)
    assert "too short for their tokens" not in caplog.text
    lexicon = Path(data_arguments["lexicon"][0])
    lexicon.write_text(f"A {'AH0 ' * 6}\nBAY B EY1\n", encoding="utf-8")  # 13 frames; the utterances have 10 to 18
    fit(tmp_path / "b", data_arguments, max_epochs=1)
    assert "train: 2 of 8 utterances are too short for their tokens at an output each 40 ms" in caplog.text
    lexicon.write_text(f"A {'AH0 ' * 20}\nBAY B EY1\n", encoding="utf-8")
    with pytest.raises(AsrError, match=r"train: 8 of 8 utterances are too short .*; do the transcripts fit the audio"):
        fit(tmp_path / "c", data_arguments, max_epochs=1)
