"""Training under Lightning: it learns, resumes to the same result, does not blow up, and never spans the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asr.cli.main import main
from asr.errors import AsrError
from asr.kernels.jit import jit_for
from asr.lm.rnn.data import TokenBatch, history_of
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.lm.rnn.optim import AdamWithSparseRows
from asr.text.symbols import EOS_ID, Vocabulary
from tests.grouped import grouped

pl = pytest.importorskip("pytorch_lightning")
pytest.importorskip("tensorboard")

from asr.cli import train  # noqa: E402
from asr.lm.rnn.datamodule import TextDataModule, TextFiles  # noqa: E402
from asr.lm.rnn.export import load_network, network_from_checkpoint, save_network  # noqa: E402
from asr.lm.rnn.training import LitRNNLM  # noqa: E402

SMALL = {"embedding_size": 8, "hidden_size": 8, "maxent_order": 3, "maxent_size": 997, "num_noise_words": 32}

NO_STEPS = {"lr": 1e-60, "sparse_lr": 1e-60}  # steps that round to 0


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines = ["THE CAT SAT", "A DOG RAN FAR", "THE DOG SAT", "A CAT RAN"] * 60
    (tmp_path / "text.txt").write_text("\n".join(lines))
    (tmp_path / "words.txt").write_text("\n".join("THE A CAT DOG SAT RAN FAR".split()))
    return tmp_path


def _data(corpus: Path) -> TextDataModule:
    text = [str(corpus / "text.txt")]
    texts = TextFiles(train_texts=text, validation_texts=text)
    return TextDataModule(str(corpus / "words.txt"), str(corpus / "cache"), texts, 4, 8)


def _model(corpus: Path, **more: Any) -> LitRNNLM:
    pl.seed_everything(1, workers=False)
    network = RNNLMConfig(**{**SMALL, **more.pop("network", {})})
    made: LitRNNLM = grouped(LitRNNLM, str(corpus / "words.txt"), network, warmup_steps=1, **more)
    return made


def _trainer(corpus: Path, **more: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(accelerator="cpu", default_root_dir=str(corpus), **{**quiet, "max_epochs": 2, **more})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "output"), [("gru", "nce"), ("gru", "hierarchical"), ("gru", "class"), ("gru", "full"), ("relu", "nce")]
)
def test_learns_and_is_finite_at_three_times_the_rate(corpus: Path, cell: str, output: str) -> None:
    network = {"output": output, "cell": cell}
    perplexities = []
    for factor in (1, 3):
        model = _model(corpus, network=network, lr=2e-3 * factor, sparse_lr=0.1 * factor)
        trainer = _trainer(corpus, max_epochs=6, enable_checkpointing=False)
        trainer.fit(model, _data(corpus))
        perplexities.append(float(trainer.callback_metrics["val_perplexity"]))
        assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
    # 8 words with </s>; the corpus itself has a perplexity of about 1.5.
    assert max(perplexities) < 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "every", "step"),
    [
        ({}, {"every_n_train_steps": 11}, 11),
        ({"accumulate_grad_batches": 2}, {"every_n_epochs": 1}, 16),
        ({"limit_train_batches": 6}, {"every_n_epochs": 1}, 6),
    ],
)
def test_a_resumed_run_ends_where_an_unbroken_one_does(
    corpus: Path, options: dict[str, Any], every: dict[str, int], step: int
) -> None:
    from pytorch_lightning.callbacks import ModelCheckpoint

    whole = _model(corpus)
    keep = ModelCheckpoint(dirpath=corpus / "checkpoints", save_top_k=-1, filename="{step}", **every)
    trainer = _trainer(corpus, callbacks=[keep], **options)
    trainer.fit(whole, _data(corpus))
    assert trainer.global_step > step
    resumed = _model(corpus)
    checkpoint = str(corpus / "checkpoints" / f"step={step}.ckpt")
    again = _trainer(corpus, enable_checkpointing=False, **options)
    again.fit(resumed, _data(corpus), ckpt_path=checkpoint)
    assert again.global_step == trainer.global_step
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_a_precision_of_the_trainer_is_refused(corpus: Path, precision: str) -> None:
    trainer = _trainer(corpus, precision=precision, enable_checkpointing=False)
    with pytest.raises(AsrError, match=f"trainer.precision is {precision}, but LitRNNLM .* set compute_dtype"):
        trainer.fit(_model(corpus), _data(corpus))


def test_without_a_trainer_no_batch_is_done(corpus: Path) -> None:
    data = _data(corpus)
    assert data.state_dict() == {"batches_done": 0}
    data.setup()
    assert data.num_train_batches() > 1 and data.state_dict() == {"batches_done": 0}


@pytest.mark.parametrize("name", ["transcript_repeats", "num_streams", "num_steps"])
def test_numbers_below_1_are_rejected(corpus: Path, name: str) -> None:
    with pytest.raises(AsrError, match=f"{name} is 0; give 1 or more"):
        grouped(TextDataModule, str(corpus / "words.txt"), str(corpus / "cache"), **{name: 0})


def test_validation_text_is_read_where_there_is_one(corpus: Path) -> None:
    words, text = str(corpus / "words.txt"), [str(corpus / "text.txt")]
    for paths, num_words in ((text, 1020), ([], None)):
        data = TextDataModule(words, str(corpus / "cache"), TextFiles(train_texts=text, validation_texts=paths))
        data.setup()
        found = data.validation_tokens
        assert (None if found is None else len(found.token_id)) == num_words
        assert (len(data.val_dataloader()) > 0) == bool(paths)


def test_several_processes_average_all_but_the_tables_and_use_every_parameter(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = _model(corpus), dict[str, Any]()
    trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace(_ddp_kwargs=options))
    monkeypatch.setattr(LitRNNLM, "trainer", trainer)
    model.setup("validate")
    ignored = set(model._ddp_params_and_buffers_to_ignore)
    assert {"network.embedding.weight", "network.output.maxent.weight"} <= ignored
    assert not any("layers" in name for name in ignored)
    # Otherwise each step would look for parameters without a gradient.
    assert "find_unused_parameters" not in options
    trainer.strategy = SimpleNamespace()
    with pytest.raises(AsrError, match="training in several processes needs `ddp`"):
        model.setup("fit")


def test_times_start_at_zero_where_a_checkpoint_has_none(corpus: Path) -> None:
    model, saved = _model(corpus), dict[str, Any]()
    model.on_load_checkpoint({})
    model.on_save_checkpoint(saved)
    assert saved["train_seconds"] == saved["train_cpu_seconds"] == 0.0


@pytest.mark.slow
def test_gradients_are_averaged_over_the_words_there_are(corpus: Path) -> None:
    """A text that is too short for the streams gets fewer of them."""
    norms = []
    for num_streams in (127, 1000):
        data = _data(corpus)
        data.num_streams = num_streams
        trainer = _trainer(corpus, max_steps=1, log_every_n_steps=1, enable_checkpointing=False)
        trainer.fit(_model(corpus), data)
        norms.append(float(trainer.callback_metrics["grad_norm"]))
    assert norms[0] == norms[1]


@pytest.mark.slow
def test_a_step_of_several_batches_has_the_sum_of_their_gradients(corpus: Path) -> None:
    class Notes(pl.Callback):  # type: ignore[misc]
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            parts = module.network.named_parameters()
            noted.append({name: part.grad.to_dense().clone() for name, part in parts if part.grad is not None})

    noted: list[dict[str, Tensor]] = []
    options = {"enable_checkpointing": False, "callbacks": [Notes()], "log_every_n_steps": 1}
    for num in (1, 3):
        model = _model(corpus, **NO_STEPS, max_grad_norm=1e-3)
        trainer = _trainer(corpus, max_steps=3 // num, accumulate_grad_batches=num, **options)
        trainer.fit(model, _data(corpus))
    *parts, found = noted
    assert len(parts) == 3
    for name, grad in found.items():
        torch.testing.assert_close(grad, sum(part[name] for part in parts), msg=name)
    norm = torch.cat([grad.flatten() for name, grad in found.items() if "layers" in name]).norm()
    assert float(trainer.callback_metrics["grad_norm"]) == pytest.approx(float(norm) / (3 * 4 * 8))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", 0.0), ("sparse_lr", -0.1), ("max_grad_norm", -1.0), ("warmup_steps", -1), ("decay_start", 1.5),
        ("final_lr_factor", -0.1),
    ],
)  # fmt: skip
def test_numbers_that_would_train_wrongly_are_refused(corpus: Path, option: str, value: float) -> None:
    with pytest.raises(AsrError, match=f"^{option} is {value}; give "):
        grouped(LitRNNLM, str(corpus / "words.txt"), RNNLMConfig(), **{option: value})


def test_batches_of_one_step_have_noise_of_their_own(corpus: Path) -> None:
    model, seeds = _model(corpus), []
    forward = model.network.forward

    def noted(batch: TokenBatch, states: Any, generator: torch.Generator) -> Any:
        seeds.append(generator.initial_seed())
        return forward(batch, states, generator)

    model.network.forward = noted
    _trainer(corpus, max_steps=3, accumulate_grad_batches=2, enable_checkpointing=False).fit(model, _data(corpus))
    assert seeds == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_init_from_takes_weights_and_accumulators(corpus: Path) -> None:
    model = _model(corpus)
    trainer = _trainer(corpus, enable_checkpointing=False)
    trainer.fit(model, _data(corpus))
    trainer.save_checkpoint(corpus / "first.ckpt")
    more = _model(corpus, init_from=str(corpus / "first.ckpt"), **NO_STEPS)
    # The first trainer stays: its module holds it weakly, and has no state_dict() without it on torch 1.13.
    again = _trainer(corpus, max_steps=1, enable_checkpointing=False)
    again.fit(more, _data(corpus))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(more.state_dict()[name], value)
    accumulator = again.optimizers[0].state[more.network.embedding.weight]["square"]
    assert accumulator.max() > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first.ckpt", "lm"])
def test_a_resumed_run_does_not_need_what_it_started_from(corpus: Path, name: str) -> None:
    from pytorch_lightning.callbacks import ModelCheckpoint

    first = _model(corpus)
    trainer = _trainer(corpus, max_epochs=1, enable_checkpointing=False)
    trainer.fit(first, _data(corpus))
    trainer.save_checkpoint(corpus / "first.ckpt")
    save_network(first.network, corpus / "lm")
    whole = _model(corpus, init_from=str(corpus / name))
    keep = ModelCheckpoint(dirpath=corpus, filename="{epoch}", save_top_k=-1)
    trainer = _trainer(corpus, callbacks=[keep])  # stays: its module holds it weakly
    trainer.fit(whole, _data(corpus))
    (corpus / name).rename(corpus / "elsewhere")
    resumed = _model(corpus, init_from=str(corpus / name))
    again = _trainer(corpus, enable_checkpointing=False)
    again.fit(resumed, _data(corpus), ckpt_path=str(corpus / "epoch=0.ckpt"))
    for part, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[part], value, rtol=0, atol=0, msg=part)


@pytest.mark.parametrize(
    ("option", "value", "changed"),
    [("num_streams", 5, "num_streams"), ("num_steps", 9, "num_steps"), ("text", "THE CAT RAN\n", "training text")],
)
def test_a_run_goes_on_within_an_epoch_of_the_same_windows_only(
    corpus: Path, option: str, value: Any, changed: str
) -> None:
    def run(max_steps: int, data: TextDataModule, resume: Path | None = None) -> Any:
        trainer = _trainer(corpus, max_epochs=3, max_steps=max_steps, enable_checkpointing=False)
        model = _model(corpus)
        trainer.fit(model, data, ckpt_path=None if resume is None else str(resume))
        trainer.save_checkpoint(corpus / f"{trainer.global_step}.ckpt")
        return trainer

    data = _data(corpus)
    run(3, data)
    num_batches = data.num_train_batches()
    run(num_batches, _data(corpus))
    run(4, _data(corpus), corpus / "3.ckpt")
    other = _data(corpus)
    if option == "text":
        (corpus / "text.txt").write_text((corpus / "text.txt").read_text() + value)
        other = _data(corpus)
    else:
        setattr(other, option, value)
    with pytest.raises(AsrError, match=f"ckpt_path: .* within an epoch of other {changed}; give"):
        run(4, other, corpus / "3.ckpt")
    # From the end of an epoch on.
    assert run(num_batches + 2, other, corpus / f"{num_batches}.ckpt").global_step == num_batches + 2


def test_init_from_takes_an_exported_folder(corpus: Path) -> None:
    torch.manual_seed(1)
    network = RNNLanguageModel(Vocabulary.from_file(corpus / "words.txt"), RNNLMConfig(**SMALL))
    torch.nn.init.normal_(network.output.bias.weight)
    save_network(network, corpus / "lm", half_precision=False)
    model = _model(corpus, init_from=str(corpus / "lm"), **NO_STEPS)
    _trainer(corpus, max_steps=1, enable_checkpointing=False).fit(model, _data(corpus))
    for name, value in network.state_dict().items():
        if "unigram" not in name:
            torch.testing.assert_close(model.network.state_dict()[name], value, msg=name)


@pytest.mark.slow
def test_weights_of_other_words_are_refused(corpus: Path) -> None:
    """A word list made again may have as many words in another order, and all shapes fit."""
    model = _model(corpus)
    trainer = _trainer(corpus, max_steps=1, enable_checkpointing=False)
    trainer.fit(model, _data(corpus))
    trainer.save_checkpoint(corpus / "first.ckpt")
    save_network(model.network, corpus / "lm")
    (corpus / "words.txt").write_text("\n".join("A THE CAT DOG SAT RAN FAR".split()))
    for name in ("first.ckpt", "lm"):
        more = _model(corpus, init_from=str(corpus / name))
        with pytest.raises(AsrError, match=f"{name}: init_from has another word list than model.vocabulary"):
            _trainer(corpus, enable_checkpointing=False).fit(more, _data(corpus))
    again = _trainer(corpus, enable_checkpointing=False)
    with pytest.raises(AsrError, match="ckpt_path: the checkpoint has another word list"):
        again.fit(_model(corpus), _data(corpus), ckpt_path=str(corpus / "first.ckpt"))


def test_export_needs_only_the_checkpoint(corpus: Path) -> None:
    model = _model(corpus)
    trainer = _trainer(corpus, enable_checkpointing=False, max_steps=3)
    trainer.fit(model, _data(corpus))
    trainer.save_checkpoint(corpus / "a.ckpt")
    save_network(network_from_checkpoint(corpus / "a.ckpt"), corpus / "lm", half_precision=False)
    loaded = load_network(corpus / "lm")
    assert loaded.vocabulary == model.network.vocabulary
    for name, value in model.network.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value)


def test_n_gram_weights_that_a_network_does_not_have_are_refused(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = RNNLanguageModel(Vocabulary(["a", "b"]), RNNLMConfig(embedding_size=4, hidden_size=4))
    monkeypatch.setattr("asr.cli.lm.network_from_checkpoint", lambda path: plain)
    command = ["lm", "rnn", "export", str(corpus / "a.ckpt"), str(corpus / "lm")]
    assert main([*command, "--maxent-weights", "100"]) == 2
    assert "a.ckpt has no n-gram weights; leave it out." in capsys.readouterr().err
    assert not (corpus / "lm").exists()
    assert main(command) == 0


def test_pruned_half_precision_file_scores_alike(corpus: Path) -> None:
    torch.manual_seed(1)
    network = RNNLanguageModel(Vocabulary.from_file(corpus / "words.txt"), RNNLMConfig(**SMALL)).eval()
    assert network.maxent is not None
    torch.nn.init.normal_(network.maxent.weight[:100], std=1.0)
    save_network(network, corpus / "lm", num_maxent_weights=100)
    loaded = load_network(corpus / "lm")
    query = torch.randn(5, 8), torch.randint(2, 11, (5, 2)), torch.randint(2, 11, (5,))
    torch.testing.assert_close(loaded.log_prob(*query), network.log_prob(*query), rtol=1e-2, atol=1e-2)
    assert not network.maxent.is_pruned


@pytest.mark.parametrize(
    ("file", "damage", "sentence"),
    [
        ("network.safetensors", lambda content: content[:-50], "bytes where the language model names"),
        ("network.safetensors", lambda content: content[:-50] + b"?" + content[-49:], "the checksum is not the one"),
        ("words.txt", lambda content: b"THE\nA\n", "bytes where the language model names"),
        ("network.json", lambda content: b"{}", "description of a language model"),
        ("network.json", lambda content: b"\xff", "language model's description is damaged"),
        ("network.json", lambda content: content.replace(b'"RnnLm"', b'"os"'), "not one that files may name"),
        ("network.json", lambda content: content.replace(b'"RnnLm"', b"{}"), "not one that files may name"),
        ("network.json", lambda content: content.replace(b'_size": 8', b'_size": 9'), "do not fit"),
        ("network.json", lambda content: content.replace(b'_size": 8', b'_size": -8'), "it must be 1 or more"),
        ("network.json", lambda content: content.replace(b'_size": 8', b'_size": "8"'), "does not take the arguments"),
        ("network.json", lambda content: content.replace(b'"gru"', b'"lstm"'), "cell is 'lstm'; it must be one of"),
        ("network.json", lambda content: content.replace(b'layers": 1', b'layers": ' + b"%d" % 2**62), "does not take"),
        ("network.json", lambda content: content.replace(b'maxent_size": ', b'maxent_size": -'), "it must be 1"),
    ],
)
def test_damaged_files_are_one_sentence(
    corpus: Path, file: str, damage: Callable[[bytes], bytes], sentence: str
) -> None:
    network = RNNLanguageModel(Vocabulary.from_file(corpus / "words.txt"), RNNLMConfig(**SMALL))
    save_network(network, corpus / "lm")
    unseal(corpus / "lm" / "network.json")
    path = corpus / "lm" / file
    content = path.read_bytes()
    assert damage(content) != content
    path.write_bytes(damage(content))
    with pytest.raises(AsrError, match=sentence):
        load_network(corpus / "lm")
    path.unlink()
    with pytest.raises(AsrError, match=f"{file}: .*(missing|cannot be read)"):
        load_network(corpus / "lm")


def unseal(path: Path) -> dict[str, Any]:
    """Takes the description's checksum away, with which every change would be taken for damage."""
    description: dict[str, Any] = json.loads(path.read_text())
    del description["checksum"]
    path.write_text(json.dumps(description, indent=2))
    return description


def test_an_export_without_checksums_is_read(corpus: Path) -> None:
    network = RNNLanguageModel(Vocabulary.from_file(corpus / "words.txt"), RNNLMConfig(**SMALL))
    save_network(network, corpus / "lm")
    path = corpus / "lm" / "network.json"
    description = unseal(path)
    del description["files"]
    path.write_text(json.dumps(description))
    load_network(corpus / "lm")
    (corpus / "lm" / "words.txt").write_text("THE\nA\nTHE\n")
    with pytest.raises(AsrError, match="occurs twice"):
        load_network(corpus / "lm")


def test_what_an_export_leaves_out_has_the_value_it_was_trained_with() -> None:
    """Exports made before a field existed do not have it."""
    assert asdict(RNNLMConfig()) == {
        "embedding_size": 256, "hidden_size": 256, "num_layers": 1, "cell": "gru", "output": "nce", "num_classes": 0,
        "tie_embeddings": True, "maxent_order": 0, "maxent_size": 2**22, "num_noise_words": 512, "noise_power": 0.75,
        "log_z": 0.0, "learn_log_z": False, "log_z_penalty": None, "normalized": False,
        "normalizer_precision": "float32", "dropout": 0.0, "carry_state": False,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["embedding_size", "hidden_size", "num_layers"])
def test_sizes_are_at_least_one(name: str) -> None:
    RNNLMConfig(**{name: 1})
    with pytest.raises(ValueError, match=f"{name} is 0; it must be 1 or more"):
        RNNLMConfig(**{name: 0})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dropout": 1.0}, "dropout is 1.0; it must be 0 or more and below 1"),
        ({"dropout": -0.5}, "dropout is -0.5; it must be"),
        ({"num_noise_words": 0}, "num_noise_words is 0; it must be 1 or more"),
        ({"noise_power": -1.0}, "noise_power is -1.0; it must be 0 or more"),
        ({"maxent_order": 2, "maxent_size": 0}, "maxent_size is 0; it must be 1 or more"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RNNLMConfig(**options)


def test_sizes_of_parts_that_a_network_does_not_have_do_not_matter() -> None:
    RNNLMConfig(output="full", num_noise_words=0, maxent_size=0)


def test_clipping_by_the_trainer_is_refused(corpus: Path) -> None:
    trainer = _trainer(corpus, enable_checkpointing=False, gradient_clip_val=0.5)
    with pytest.raises(AsrError, match="gradient_clip_val has no effect on LitRNNLM; leave it out"):
        trainer.fit(_model(corpus), _data(corpus))


def test_weights_that_are_no_numbers_are_refused(corpus: Path) -> None:
    model = _model(corpus)
    trainer = _trainer(corpus, enable_checkpointing=False, max_steps=1)
    trainer.fit(model, _data(corpus))
    with torch.no_grad():
        model.network.layers[0].weight_hh[0, 0] = torch.nan
    trainer.save_checkpoint(corpus / "a.ckpt")
    with pytest.raises(AsrError, match=r"a\.ckpt: the weights 'layers.0.weight_hh' are not all finite"):
        network_from_checkpoint(corpus / "a.ckpt")
    save_network(model.network, corpus / "lm")
    with pytest.raises(AsrError, match=r"network\.safetensors: the weights 'layers.0.weight_hh' are not all finite"):
        load_network(corpus / "lm")
    with pytest.raises(AsrError, match="no Lightning checkpoint"):
        network_from_checkpoint(corpus / "words.txt")


def test_a_resumed_run_says_that_it_keeps_its_learning_rates(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = _trainer(corpus, enable_checkpointing=False, max_epochs=1)
    trainer.fit(_model(corpus), _data(corpus))
    trainer.save_checkpoint(corpus / "a.ckpt")
    for rates in ({}, {"lr": 1e-4, "sparse_lr": 0.01}):
        assert "ckpt_path" not in caplog.text
        again = _trainer(corpus, enable_checkpointing=False)
        again.fit(_model(corpus, **rates), _data(corpus), ckpt_path=str(corpus / "a.ckpt"))
    assert "with the lr 0.002 with which it began, not 0.0001; for another one, start a new run" in caplog.text
    assert "with the sparse_lr 0.1 with which it began, not 0.01" in caplog.text


def test_a_training_that_diverges_ends(corpus: Path) -> None:
    """Its checkpoints would be of no use, and replace earlier ones."""
    model = _model(corpus)
    with torch.no_grad():
        model.network.layers[0].weight_hh[0, 0] = torch.inf
    with pytest.raises(AsrError, match=r"diverged: the gradients of step 1 are not finite.*lower optimization\.lr"):
        _trainer(corpus, enable_checkpointing=False).fit(model, _data(corpus))


@pytest.mark.slow
def test_bad_input_of_a_recipe_is_one_sentence(corpus: Path) -> None:
    """LightningCLI wraps what its classes raise."""
    (corpus / "words.txt").write_text("THE\nA\nTHE\n")
    words = str(corpus / "words.txt")
    command = ["fit", "--model", "asr.lm.rnn.training.LitRNNLM", "--model.vocabulary", words]
    command += ["--data", "asr.lm.rnn.datamodule.TextDataModule", "--data.cache_dir", str(corpus / "cache")]
    with pytest.raises(AsrError, match=r"words\.txt: the word 'THE' occurs twice"):
        train.run([*command, "--data.vocabulary", words, "--model.network.hidden_size", "8"])
    with pytest.raises(AsrError, match=r"^model: dropout is 1\.0; it must be 0 or more and below 1\.$"):
        train.run([*command, "--data.vocabulary", words, "--model.network.dropout", "1"])


def test_a_training_needs_an_end(corpus: Path) -> None:
    """The learning rates fall until then."""
    with pytest.raises(AsrError, match="give max_epochs or max_steps"):
        _trainer(corpus, max_epochs=-1, max_time="00:00:00:02", enable_checkpointing=False).fit(
            _model(corpus), _data(corpus)
        )


def test_two_word_lists_are_refused(corpus: Path) -> None:
    (corpus / "other.txt").write_text("THE\nA\n")
    texts = TextFiles(train_texts=[str(corpus / "text.txt")])
    data = TextDataModule(str(corpus / "other.txt"), str(corpus / "cache"), texts)
    with pytest.raises(AsrError, match="different word lists"):
        _trainer(corpus, enable_checkpointing=False).fit(_model(corpus), data)


def test_loop_over_entries_equals_tensor_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, values = torch.tensor([[3, 1, 3, 0]]), torch.tensor([1.0, -2.0, 0.5, 3.0])
    found = []
    for choose in (jit_for, lambda function, tensor: None):
        monkeypatch.setattr("asr.lm.rnn.optim.jit_for", choose)
        table = torch.nn.Parameter(torch.linspace(-1, 1, 5))
        optimizer = AdamWithSparseRows([table])
        for _ in range(2):
            table.grad = torch.sparse_coo_tensor(entry, values, (5,))
            optimizer.step()
        found.append(table.detach())
    torch.testing.assert_close(found[0], found[1])
    assert found[0][2] == 0 and found[0][3] < 0.5 < 1 == found[0][4]


class _LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, Tensor) and not each.is_sparse:
                self.largest = max(self.largest, each.numel())
        return out


@pytest.mark.slow
@pytest.mark.parametrize("output", ["nce", pytest.param("hierarchical", marks=pytest.mark.slow)])
def test_no_tensor_spans_batch_and_vocabulary(output: str) -> None:
    num_words, num_streams, num_steps = 200_000, 16, 8
    config = RNNLMConfig(
        embedding_size=4, hidden_size=4, output=output, maxent_order=3, maxent_size=1 << 16, num_noise_words=64
    )
    network = RNNLanguageModel(Vocabulary(f"W{idx}" for idx in range(num_words - 4)), config)
    network.output.set_unigram(torch.randint(0, 50, (num_words,)), reset_bias=True)
    optimizer = AdamWithSparseRows(network.parameters())
    tokens = torch.randint(4, num_words, (num_streams, num_steps + 2))
    history = history_of(tokens, 2, 2)
    is_start = tokens[:, 1:-1] == EOS_ID
    batch = TokenBatch(tokens[:, 1:-1], tokens[:, 2:], history, is_start, True)
    # The first step makes the optimiser's state, which is as large as the parameters.
    for mode in (None, _LargestTensor()):
        if mode is not None:
            mode.__enter__()
        loss, _ = network(batch, None, torch.Generator().manual_seed(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        query = torch.randn(num_streams * num_steps, 4), history.flatten(0, 1), batch.target_id.flatten()
        network.log_prob(*query)
        if mode is not None:
            mode.__exit__(None, None, None)
            # The tables themselves come by, V * H and the tree; V * batch would be many times that.
            tables = *network.parameters(), *network.buffers()
            assert mode.largest <= max(table.numel() for table in tables) < 4 * num_words * num_steps
    assert bool(loss.isfinite())
