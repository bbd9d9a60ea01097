"""A whole small training by lattice-free MMI: corpus to network, and what a bundle takes from it."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import soundfile
import torch

from asr.audio.fbank import Fbank
from asr.bundle import Bundle
from asr.cli.main import main
from asr.datasets.corpora.base import Utterance
from asr.errors import AsrError
from asr.graph.context import TIED_STATES, TiedStates
from asr.kernels.precision import rounded_products
from asr.models.chain_corpus import Alignment, PreparedCorpus, write_corpus
from asr.models.chain_preparation import (
    denominator_graph,
    load_chain,
    phone_histories,
    prepare_chain,
    usable_utterances,
)
from asr.models.chunks import Chunk, ChunkAugmentation, ChunkSizes
from asr.models.distillation import TeacherPosteriors
from asr.models.lfmmi import LfMmi
from asr.models.phone_alignment import refine_alignment
from asr.text.lexicon import Lexicon
from asr.text.symbols import TokenTable

pl = pytest.importorskip("pytorch_lightning")

NETWORK = {
    "num_features": 20,
    "dim": 16,
    "bottleneck_dim": 4,
    "num_layers": 2,
    "prefinal_dim": 8,
    "small_dim": 8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six utterances of two tones, one a phone, in turn with silence."""
    folder = tmp_path_factory.mktemp("chain")
    rng = np.random.default_rng(0)
    time = np.arange(16000) / 16000
    sounds = {"SIL": 0.0 * time, "a": np.sin(2 * np.pi * 500 * time), "b": np.sin(2 * np.pi * 2500 * time)}
    utterances, aligned = [], []
    for number in range(6):
        phones = ["SIL", *rng.choice(["a", "b"], size=6).tolist(), "SIL"]
        samples = 0.1 * np.concatenate([sounds[phone][:4800] for phone in phones]) + 0.001 * rng.normal(size=38400)
        soundfile.write(folder / f"{number}.wav", samples, 16000)
        utterances.append(("toy", Utterance(str(number), folder / f"{number}.wav", "A", f"speaker{number % 3}")))
        indices = [("SIL", "a", "b").index(phone) for phone in phones]
        aligned.append((indices, [0.3 * place for place in range(len(phones))], float(number)))
    write_corpus(
        folder / "prepared", utterances, Lexicon({"A": [("a",)]}), Fbank(num_mel_bins=20), conditions=("1", "1.1")
    )
    Alignment.from_lists(("SIL", "a", "b"), aligned).save(folder / "prepared" / "alignment.npz")
    return folder


def fit(
    folder: Path,
    states: TiedStates,
    max_epochs: int,
    initial_checkpoint: str | None = None,
    chain: Path | None = None,
    network_arguments: dict[str, int] | None = None,
    network: Any = None,
    trainer_options: dict[str, Any] | None = None,
    resume: Path | None = None,
    total_steps: int | None = None,
    **options: Any,
) -> Any:
    from asr.models.chain_training import (
        ChainDataModule,
        ChainOptimization,
        ChainRegularization,
        LitChainModel,
        Selection,
    )
    from asr.models.tdnnf import Tdnnf

    torch.manual_seed(0)
    arguments = {**NETWORK, "num_tokens": states.num_columns, **(network_arguments or {})}
    network = network or Tdnnf(**arguments, has_auxiliary=True)  # type: ignore[arg-type]
    data = ChainDataModule(
        str(folder / "prepared"),
        "alignment.npz",
        str(chain or folder / "states"),
        Selection(["toy-speaker2"]),
        ChunkSizes((20, 40), frames_per_batch=80),
        fbank=Fbank(num_mel_bins=20),
    )
    optimization = ChainOptimization(peak_lr=5e-3, final_lr=5e-3, total_steps=total_steps, average_decay=0.5)
    model = LitChainModel(
        network, optimization, regularization=ChainRegularization(dropout=0.0), initial_checkpoint=initial_checkpoint,
        **options,
    )  # fmt: skip
    trainer = pl.Trainer(
        max_epochs=max_epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False, num_sanity_val_steps=0,
        **(trainer_options or {}),
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=None if resume is None else str(resume))
    return trainer


@pytest.fixture(scope="module")
def states(folder: Path) -> TiedStates:
    corpus = PreparedCorpus(folder / "prepared")
    alignment = Alignment.load(folder / "prepared" / "alignment.npz")
    train, _ = usable_utterances(corpus, alignment, {}, ["toy-speaker2"])
    states, graph = prepare_chain(corpus, alignment, train, 9, 5, folder / "states")
    assert states.phones == ("SIL", "a", "b") and graph.num_states > 3
    return states


@pytest.mark.slow
def test_a_training_starts_from_the_network_of_a_bundle(folder: Path, states: TiedStates, tmp_path: Path) -> None:
    bundle = bundle_of(folder, states)
    network = bundle.acoustic_model.network
    with mock.patch.object(Bundle, "load", lambda path: bundle):
        model = fit(folder, states, 0, str(tmp_path)).lightning_module  # type: ignore[attr-defined]
    for name, value in network.state_dict().items():
        for trained in (model.network, model.average.network):
            torch.testing.assert_close(trained.state_dict()[name], value, rtol=0, atol=0)
    auxiliary = model.network.auxiliary.state_dict()
    torch.testing.assert_close(auxiliary, model.average.network.auxiliary.state_dict())
    assert auxiliary["expand.weight"].std() > 0


def bundle_of(folder: Path, states: TiedStates) -> SimpleNamespace:
    """What training takes from a bundle: network, tied states, denominator, and which features it was trained on."""
    from asr.models.tdnnf import Tdnnf

    torch.manual_seed(1)
    network = Tdnnf(**NETWORK, num_tokens=states.num_columns)  # type: ignore[arg-type]
    torch.nn.init.normal_(network.branch.out.weight, std=2.0)  # scores as sharp as after training
    graph = SimpleNamespace(meta={TIED_STATES: states.to_json()}, tokens=TokenTable(states.column_names()))
    _, denominator = load_chain(folder / "states")
    fbank = Fbank(**PreparedCorpus(folder / "prepared").fbank_arguments)
    parts = {name: SimpleNamespace(network=part) for name, part in (("acoustic_model", network), ("features", fbank))}
    return SimpleNamespace(**parts, graph=graph, denominator=denominator)


def test_a_training_uses_the_tied_states_and_the_denominator_of_a_bundle(
    folder: Path, states: TiedStates, tmp_path: Path
) -> None:
    (tmp_path / "bundle.json").touch()
    bundle = bundle_of(folder, states)
    with mock.patch.object(Bundle, "load", lambda path: bundle):
        found, denominator = load_chain(tmp_path)
    assert found.to_json() == states.to_json() and denominator is bundle.denominator
    for lacking in (
        SimpleNamespace(graph=bundle.graph, denominator=None),
        SimpleNamespace(graph=SimpleNamespace(meta={}), denominator=bundle.denominator),
    ):
        with (
            mock.patch.object(Bundle, "load", lambda path, lacking=lacking: lacking),
            pytest.raises(AsrError, match="the bundle has no tied states or no denominator graph"),
        ):
            load_chain(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("silence_accuracy", [0.0, 1.0])
def test_smbr_raises_the_expected_accuracy_of_speakers_set_aside(
    folder: Path, states: TiedStates, tmp_path: Path, silence_accuracy: float
) -> None:
    from asr.models.chain_training import ChainObjective

    options = {"objective": ChainObjective(smbr_weight=0.9, silence_accuracy=silence_accuracy)}
    fit(folder, states, 2).save_checkpoint(tmp_path / "first.ckpt")  # type: ignore[attr-defined]
    early = fit(folder, states, 1, str(tmp_path / "first.ckpt"), **options).callback_metrics  # type: ignore[attr-defined]
    later = fit(folder, states, 15, str(tmp_path / "first.ckpt"), **options).callback_metrics  # type: ignore[attr-defined]
    assert later["val_accuracy"] > early["val_accuracy"] + 0.05
    # Silence is a quarter of the frames.
    assert 0.4 < later["val_accuracy"] < (0.8 if silence_accuracy == 0.0 else 1.0)


@pytest.mark.slow
def test_mmi_alone_logs_no_accuracy_and_trains_as_before(folder: Path, states: TiedStates) -> None:
    from asr.models.chain_training import ChainObjective

    plain = fit(folder, states, 1)
    ignored = fit(folder, states, 1, objective=ChainObjective(smbr_weight=0.0, silence_accuracy=0.5))
    assert "val_mmi" in plain.callback_metrics and "val_accuracy" not in plain.callback_metrics  # type: ignore[attr-defined]
    for name, value in plain.lightning_module.state_dict().items():  # type: ignore[attr-defined]
        assert torch.equal(ignored.lightning_module.state_dict()[name], value), name  # type: ignore[attr-defined]


def teacher_of(folder: Path, bundle: SimpleNamespace, states: TiedStates, factor: int = 3) -> TeacherPosteriors:
    corpus, objective = PreparedCorpus(folder / "prepared"), LfMmi(bundle.denominator)
    with mock.patch.object(Bundle, "load", lambda path: bundle):
        return TeacherPosteriors(corpus, "teacher", states, objective, factor)


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A copy of the prepared corpus, in which files may be written and damaged."""
    shutil.copytree(folder, tmp_path / "own")
    return tmp_path / "own"


@pytest.mark.slow
def test_a_teachers_posteriors_are_those_of_each_utterance_alone(
    folder: Path, states: TiedStates, tmp_path: Path
) -> None:
    """Also if it is read in a batch with longer ones."""
    utterances = []
    for number, length in enumerate((38400, 16000, 25600, 38400, 25600, 38400)):
        samples, rate = soundfile.read(folder / f"{number}.wav")
        soundfile.write(tmp_path / f"{number}.wav", samples[:length], rate)
        utterances.append(("toy", Utterance(str(number), tmp_path / f"{number}.wav", "A", "one")))
    write_corpus(tmp_path / "prepared", utterances, Lexicon({"A": [("a",)]}), Fbank(num_mel_bins=20), ("1", "1.1"))
    bundle = bundle_of(folder, states)
    corpus, objective = PreparedCorpus(tmp_path / "prepared"), LfMmi(bundle.denominator)
    teacher = teacher_of(tmp_path, bundle, states)
    for utterance, condition, first, length in (
        (0, 0, 0, 80),
        (1, 0, 0, 33),
        (2, 1, 20, 20),
        (3, 1, 20, 40),
        (5, 0, 79, 1),
    ):
        features = torch.from_numpy(corpus.features(utterance, condition).astype(np.float32))[None]
        with torch.no_grad(), rounded_products():
            score = bundle.acoustic_model.network.eval()(features, torch.tensor([features.shape[1]]))[0].float()
        whole = objective.denominator(score)[1][0].numpy().copy()
        is_small = whole < 0.01
        assert whole[is_small].sum() > 0.1
        whole[is_small] = 0.0
        whole /= whole.sum(1, keepdims=True)
        found = teacher.of([Chunk(utterance, condition, first)] * 2, length).numpy()
        assert found.shape == (2, length, states.num_columns) and (whole > 0).sum() > 1.5 * len(whole)
        for piece in found:
            np.testing.assert_allclose(piece, whole[first : first + length], rtol=0, atol=2e-3)


@pytest.mark.slow
def test_a_teachers_posteriors_are_kept_and_those_of_others_refused(own: Path, states: TiedStates) -> None:
    bundle = bundle_of(own, states)
    made = teacher_of(own, bundle, states)
    files = sorted((own / "prepared").glob("posteriors-*.npz"))
    assert [file.name.rpartition("-")[2] for file in files] == ["1.1.npz", "1.npz"]
    chunks = [Chunk(2, 1, 7), Chunk(4, 0, 30)]
    with mock.patch.object(bundle.acoustic_model.network, "forward", side_effect=AssertionError("heard again")):
        kept = teacher_of(own, bundle, states)
    assert torch.equal(kept.of(chunks, 20), made.of(chunks, 20))
    # Another denominator gives other posteriors.
    other = bundle_of(own, states)
    other.denominator = other.denominator._replace(initial=other.denominator.initial[::-1].copy())
    assert not torch.equal(teacher_of(own, other, states).of(chunks, 20), made.of(chunks, 20))
    # The file of another condition has other numbers of frames.
    shutil.copy(files[0], files[1])
    with pytest.raises(AsrError, match="posteriors are of another corpus; delete the file"):
        teacher_of(own, bundle, states)
    files[1].write_bytes(files[0].read_bytes()[:1000])
    with pytest.raises(AsrError, match="posteriors are damaged"):
        teacher_of(own, bundle, states)
    with pytest.raises(AsrError, match=r"teacher: it has one output for 3 frames of features, .* to train one for 2;"):
        teacher_of(own, bundle, states, factor=2)
    bundle.graph.meta[TIED_STATES] = {**states.to_json(), "phones": ["SIL", "a", "c"]}
    with pytest.raises(AsrError, match="teacher: its tied states are not those of the data"):
        teacher_of(own, bundle, states)
    bundle = bundle_of(own, states)
    bundle.acoustic_model.network.num_features = 21
    with pytest.raises(AsrError, match="teacher: its network takes 21 features, the corpus has 20"):
        teacher_of(own, bundle, states)
    bundle = bundle_of(own, states)
    bundle.features.network.arguments = {"num_mel_bins": 20, "high_freq": 5600.0}
    with pytest.raises(AsrError, match=r"teacher: .* with high_freq 5600\.0, but the corpus has 0\.0; give"):
        teacher_of(own, bundle, states)


def test_a_teacher_hears_noisy_speech_without_its_noise(folder: Path, states: TiedStates, tmp_path: Path) -> None:
    utterances = [("toy", Utterance("1", folder / "1.wav", "A", "one"))]
    lexicon, fbank = Lexicon({"A": [("a",)]}), Fbank(num_mel_bins=20)
    write_corpus(tmp_path / "prepared", utterances, lexicon, fbank, ("1", "noise", "1.1", "room"))
    teacher = teacher_of(tmp_path, bundle_of(folder, states), states)
    clean, noisy, fast, room = (teacher.of([Chunk(0, condition, 5)], 20) for condition in range(4))
    assert torch.equal(noisy, clean) and torch.equal(room, clean) and not torch.equal(fast, clean)
    files = sorted((tmp_path / "prepared").glob("posteriors-*.npz"))
    assert [file.name.rpartition("-")[2] for file in files] == ["1.1.npz", "1.npz"]


def test_an_utterance_without_frames_has_no_posteriors(folder: Path, states: TiedStates, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "short.wav", np.zeros(10), 16000)
    audio = [tmp_path / "short.wav", folder / "1.wav"]
    utterances = [("toy", Utterance(path.stem, path, "A", "one")) for path in audio]
    write_corpus(tmp_path / "prepared", utterances, Lexicon({"A": [("a",)]}), Fbank(num_mel_bins=20), ("1", "1.1"))
    bundle = bundle_of(folder, states)
    found = teacher_of(tmp_path, bundle, states).of([Chunk(1, 1, 5)], 20)
    assert torch.equal(found, teacher_of(folder, bundle, states).of([Chunk(1, 1, 5)], 20))
    assert [each.num_frames for each in PreparedCorpus(tmp_path / "prepared").utterances] == [(0, 0), (240, 218)]


_OTHER_PROCESS = """
import fcntl, pathlib, sys, time
with open("utterances.json", "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX, 1, 1)
    print("working", flush=True)
    time.sleep(1)
    pathlib.Path("made").rename(sys.argv[1])
"""


def test_processes_do_not_make_the_same_posteriors(own: Path, states: TiedStates) -> None:
    bundle = bundle_of(own, states)
    made = teacher_of(own, bundle, states)
    (file,) = (own / "prepared").glob("posteriors-*-1.1.npz")
    file.rename(own / "prepared" / "made")
    command = [sys.executable, "-c", _OTHER_PROCESS, file.name]
    with subprocess.Popen(command, cwd=own / "prepared", stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"working\n"
        with mock.patch.object(bundle.acoustic_model.network, "forward", side_effect=AssertionError("heard again")):
            waited = teacher_of(own, bundle, states)
    chunks = [Chunk(2, 1, 7), Chunk(4, 0, 30)]
    assert torch.equal(waited.of(chunks, 20), made.of(chunks, 20))


@pytest.mark.slow
def test_a_resumed_training_needs_neither_initial_checkpoint_nor_teacher(
    own: Path, states: TiedStates, tmp_path: Path
) -> None:
    first, middle = tmp_path / "first.ckpt", tmp_path / "middle.ckpt"
    fit(own, states, 1).save_checkpoint(first)
    bundle = bundle_of(own, states)
    options = {"initial_checkpoint": str(first), "teacher": "teacher", "total_steps": 30}
    with mock.patch.object(Bundle, "load", lambda path: bundle):
        whole = fit(own, states, 3, **options).lightning_module.state_dict()
        fit(own, states, 1, **options).save_checkpoint(middle)
    first.unlink()
    resumed = fit(own, states, 3, resume=middle, **options).lightning_module.state_dict()
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    next((own / "prepared").glob("posteriors-*")).unlink()
    with pytest.raises(AsrError, match=r"teacher: teacher: there is no such bundle, and .*posteriors-.* is missing"):
        fit(own, states, 3, resume=middle, **options)


@pytest.mark.slow
def test_a_network_learns_from_its_teacher_what_the_transcripts_do_not_say(own: Path, states: TiedStates) -> None:
    """With all of the weight the teacher's, a network trained on faulty alignments becomes like the teacher."""
    bundle = bundle_of(own, states)
    corpus, objective = PreparedCorpus(own / "prepared"), LfMmi(bundle.denominator)
    features = torch.from_numpy(corpus.features(2, 0).astype(np.float32))[None]
    num_frames = torch.tensor([features.shape[1]])

    def posterior(network: Any) -> torch.Tensor:
        with torch.no_grad():
            return objective.denominator(network.eval()(features, num_frames)[0])[1]

    taught = posterior(bundle.acoustic_model.network)
    distance = {}
    for weight in (0.0, 1.0):
        with mock.patch.object(Bundle, "load", lambda path: bundle):
            trained = fit(own, states, 20, teacher="teacher", teacher_weight=weight).lightning_module
        distance[weight] = float((posterior(trained.average.network) - taught).abs().mean())
    assert distance[1.0] < 0.6 * distance[0.0]
    plain = fit(own, states, 20).lightning_module
    assert float((posterior(plain.average.network) - taught).abs().mean()) == distance[0.0]


@pytest.mark.parametrize(
    ("group", "option", "value"),
    [
        ("Optimization", "warmup_fraction", 1.5), ("Optimization", "max_gradient_norm", 0.0),
        ("Optimization", "max_gradient_norm", float("nan")), ("Optimization", "average_decay", 1.0),
        ("Optimization", "total_steps", 0), ("Regularization", "weight_decay", -0.1),
        ("Regularization", "xent_weight", -0.1), ("Regularization", "score_l2", -1e-5),
        ("Regularization", "dropout", 1.0), ("Regularization", "dropout", -0.1), ("Objective", "leak", -0.1),
        ("Objective", "tolerance", -1.0), ("Objective", "smbr_weight", 1.5), ("Objective", "silence_accuracy", 1.5),
        # An exponential decay to 0 would be 0 right after the warm-up.
        ("Optimization", "peak_lr", 0.0), ("Optimization", "final_lr", 0.0),
    ],
)  # fmt: skip
def test_numbers_that_would_train_wrongly_are_refused(group: str, option: str, value: float) -> None:
    from asr.models import chain_training

    with pytest.raises(AsrError, match=rf"^{option} is {value}; give "):
        getattr(chain_training, f"Chain{group}")(**{option: value})


def test_the_teachers_weight_must_be_a_share() -> None:
    from asr.models.chain_training import LitChainModel
    from asr.models.tdnnf import Tdnnf

    network = Tdnnf(**NETWORK, num_tokens=9, has_auxiliary=True)  # type: ignore[arg-type]
    with pytest.raises(AsrError, match=r"teacher_weight is 1\.5; give a number between 0 and 1\."):
        LitChainModel(network, teacher_weight=1.5)


@pytest.mark.parametrize(
    ("group", "option", "value"),
    [
        (ChunkSizes, "frames_per_batch", 0), (ChunkAugmentation, "max_warp", -0.1),
        (ChunkAugmentation, "max_warp", 1.0), (ChunkAugmentation, "max_smoothing", 0.6),
        (ChunkAugmentation, "speaker_share", 1.5),
    ],
)  # fmt: skip
def test_data_that_would_train_wrongly_are_refused(group: Any, option: str, value: float) -> None:
    with pytest.raises(AsrError, match=rf"^{option} is {value}; give "):
        group(**{option: value})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tdnnf", "feed-forward"])
def test_training_lowers_the_loss_of_speakers_set_aside(folder: Path, states: TiedStates, kind: str) -> None:
    from asr.models.feedforward import ChainFeedForwardNetwork

    def network() -> Any:
        if kind == "tdnnf":
            return None
        torch.manual_seed(0)
        return ChainFeedForwardNetwork(20, states.num_columns, (16, 16), (15, 1), has_auxiliary=True)

    early = fit(folder, states, 1, network=network())
    later = fit(folder, states, 15, network=network())
    assert later.callback_metrics["val_mmi"] < early.callback_metrics["val_mmi"] - 0.2  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_checkpoint_becomes_a_network_without_the_auxiliary_branch(
    folder: Path, states: TiedStates, tmp_path: Path
) -> None:
    from asr.models.checkpoint import network_from_checkpoint

    trainer = fit(folder, states, 1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")  # type: ignore[attr-defined]
    arguments = "\n".join(f"        {name}: {value}" for name, value in {**NETWORK, "has_auxiliary": True}.items())
    (tmp_path / "recipe.yaml").write_text(
        "model:\n  init_args:\n    network:\n      class_path: asr.models.tdnnf.Tdnnf\n      init_args:\n"
        f"{arguments}\n        num_tokens: {states.num_columns}\n"
    )
    registered, tokens = network_from_checkpoint(tmp_path / "last.ckpt", tmp_path / "recipe.yaml")
    assert registered.class_name == "Tdnnf" and "has_auxiliary" not in registered.arguments
    assert list(tokens.tokens) == states.column_names()
    average = trainer.lightning_module.average.network  # type: ignore[attr-defined]
    features, num_frames = torch.randn(1, 50, 20), torch.tensor([50])
    torch.testing.assert_close(registered.network(features, num_frames)[0], average(features, num_frames)[0])
    # Layers that the recipe does not have are not left out, nor are others made up.
    recipe = (tmp_path / "recipe.yaml").read_text()
    for num_layers in (NETWORK["num_layers"] - 1, NETWORK["num_layers"] + 1):
        (tmp_path / "other.yaml").write_text(
            recipe.replace(f"num_layers: {NETWORK['num_layers']}", f"num_layers: {num_layers}")
        )
        with pytest.raises(AsrError, match=r"last\.ckpt: the weights do not fit the network of .*other\.yaml"):
            network_from_checkpoint(tmp_path / "last.ckpt", tmp_path / "other.yaml")


@pytest.mark.slow
def test_a_training_starts_from_the_averaged_weights_of_another(
    folder: Path, states: TiedStates, tmp_path: Path
) -> None:
    first = fit(folder, states, 1)
    first.save_checkpoint(tmp_path / "first.ckpt")  # type: ignore[attr-defined]
    second = fit(folder, states, 0, str(tmp_path / "first.ckpt"))
    expected = first.lightning_module.average.network.state_dict()  # type: ignore[attr-defined]
    model = second.lightning_module  # type: ignore[attr-defined]
    for network in (model.network, model.average.network):
        torch.testing.assert_close(network.state_dict(), expected, rtol=0, atol=0)


def test_a_network_of_other_sizes_is_refused_as_a_start(folder: Path, states: TiedStates, tmp_path: Path) -> None:
    first = fit(folder, states, 0)
    first.save_checkpoint(tmp_path / "first.ckpt")  # type: ignore[attr-defined]
    with (
        mock.patch.dict(NETWORK, num_layers=3),
        pytest.raises(AsrError, match=r"first\.ckpt: initial_checkpoint: the weights do not fit the network"),
    ):
        fit(folder, states, 0, str(tmp_path / "first.ckpt"))


@pytest.mark.slow
def test_a_bundle_is_read_once(folder: Path, states: TiedStates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a bundle takes seconds."""
    reads: list[Path] = []
    load = Bundle.load

    def counted(path: Path) -> Bundle:
        reads.append(path)
        return load(path)

    monkeypatch.setattr(Bundle, "load", counted)
    with pytest.raises(AsrError):
        fit(folder, states, 0, str(Path(__file__).parents[2] / "checkpoints" / "an4"))
    assert len(reads) == 1


@pytest.mark.slow
def test_a_training_starts_from_a_network_whose_states_were_tied_in_another_way(
    folder: Path, states: TiedStates, tmp_path: Path
) -> None:
    first = fit(folder, states, 1)
    first.save_checkpoint(tmp_path / "first.ckpt")  # type: ignore[attr-defined]
    # Silence and one state of two contexts for each phone: entry and loop of a phone share what they had.
    coarse = TiedStates(
        states.phones, *(np.tile([[0, 1, 2]], (3, 1)) + shift * np.array([0, 1, 1]) for shift in (0, 2))
    )
    corpus = PreparedCorpus(folder / "prepared")
    alignment = Alignment.load(folder / "prepared" / "alignment.npz")
    train, _ = usable_utterances(corpus, alignment, {}, ["toy-speaker2"])
    histories = phone_histories([alignment.of(index)[0].tolist() for index in train], 5)
    np.savez(tmp_path / "denominator.npz", **denominator_graph(histories, coarse)._asdict())
    (tmp_path / "states.json").write_text(json.dumps(coarse.to_json()))
    second = fit(folder, coarse, 0, str(tmp_path / "first.ckpt"), tmp_path)
    before = first.lightning_module.average.network.state_dict()  # type: ignore[attr-defined]
    after = second.lightning_module.network.state_dict()  # type: ignore[attr-defined]
    counts = np.zeros((3, 3))
    for index in train:
        phones = alignment.of(index)[0].tolist()
        for pair in zip([0, *phones], phones, strict=False):
            counts[pair] += 1
    expected = torch.zeros(coarse.num_columns, before["branch.out.weight"].shape[1])
    weight = torch.zeros(coarse.num_columns)
    for new, old in ((coarse.entry, states.entry), (coarse.loop, states.loop)):
        for pair in itertools.product(range(3), range(3)):
            expected[new[pair]] += counts[pair] * before["branch.out.weight"][old[pair]]
            weight[new[pair]] += counts[pair]
    torch.testing.assert_close(after["branch.out.weight"], expected / weight[:, None], rtol=1e-2, atol=1e-3)
    same = [name for name in before if not name.startswith(("branch.out", "auxiliary.out"))]
    assert len(same) > 20
    for name in same:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0)


@pytest.mark.slow
def test_outputs_follow_their_states_if_there_are_as_many_as_before(
    folder: Path, states: TiedStates, tmp_path: Path
) -> None:
    """Trees grow up to the same limit, so that other trees have as many columns; a hidden layer may, too."""
    width = {"small_dim": states.num_columns}
    first = fit(folder, states, 1, network_arguments=width)
    first.save_checkpoint(tmp_path / "first.ckpt")
    turned = np.array([0, *range(states.num_columns - 1, 0, -1)])
    other = TiedStates(states.phones, turned[states.entry], turned[states.loop])
    (tmp_path / "states.json").write_text(json.dumps(other.to_json()))
    shutil.copy(folder / "states" / "denominator.npz", tmp_path)
    second = fit(folder, other, 0, str(tmp_path / "first.ckpt"), tmp_path, width)
    before = first.lightning_module.average.network.state_dict()
    after = second.lightning_module.network.state_dict()
    assert before["branch.out.weight"].abs().max() > 0
    for name, value in before.items():
        expected = value[turned] if ".out." in name and name.startswith(("branch", "auxiliary")) else value
        torch.testing.assert_close(after[name], expected, msg=lambda text, name=name: f"{name}: {text}")
    with pytest.raises(AsrError, match=r"ckpt_path: the checkpoint has other tied states than data\.chain"):
        fit(folder, other, 2, chain=tmp_path, network_arguments=width, resume=tmp_path / "first.ckpt")


def test_a_training_is_not_resumed_with_other_features(folder: Path, states: TiedStates, tmp_path: Path) -> None:
    fit(folder, states, 0).save_checkpoint(tmp_path / "first.ckpt")
    content = torch.load(tmp_path / "first.ckpt")
    assert content["fbank"] == Fbank(num_mel_bins=20).arguments
    content["fbank"]["low_freq"] = 40.0
    torch.save(content, tmp_path / "first.ckpt")
    with pytest.raises(AsrError, match=r"ckpt_path: .* with low_freq 40\.0, but the corpus has 20\.0; give"):
        fit(folder, states, 1, resume=tmp_path / "first.ckpt")


def test_the_phones_of_a_piece_lie_where_they_are_spoken(folder: Path, states: TiedStates) -> None:
    from asr.models.chain_training import ChainDataModule
    from asr.models.chunks import ChunkBatch

    data = ChainDataModule(
        str(folder / "prepared"), "alignment.npz", str(folder / "states"), fbank=Fbank(num_mel_bins=20)
    )
    phone, _ = data.alignment.of(3)
    before = [0, *phone[:-1]]
    # Each phone lasts 10 output frames, at a speed of 1.1 10 / 1.1; the last one to the end of the piece.
    batch = ChunkBatch(torch.empty(0), [Chunk(3, 0, 25), Chunk(3, 1, 60)], 20, torch.arange(2), 2)
    plain, fast = data.pieces(batch, factor=3, tolerance=2.0)
    assert plain.earliest.tolist() == [-7, 3, 13] and plain.latest.tolist() == [7, 17, 27]
    assert plain.entry.tolist() == states.entry[before[2:5], phone[2:5]].tolist()
    assert plain.loop.tolist() == states.loop[before[2:5], phone[2:5]].tolist()
    begin = 10 / 1.1 * np.array([6, 7]) - 60
    assert fast.earliest.tolist() == np.floor(begin - 1.5).tolist()
    assert fast.latest.tolist() == np.ceil([begin[1] + 1.5, 21.5]).tolist()


@pytest.mark.slow
def test_a_network_of_other_outputs_or_features_is_refused(folder: Path, states: TiedStates) -> None:
    fits = states.num_columns
    for changes in ({"num_tokens": fits + 1}, {"num_features": 21}):
        with pytest.raises(AsrError, match=rf"but the data have \d+ and {fits}; set them in model"):
            fit(folder, states, 0, network_arguments=changes)


AN4 = Path(__file__).resolve().parents[2] / "checkpoints" / "an4"


@pytest.fixture
def chain_command(tmp_path: Path) -> list[str]:
    """`asr chain` for one utterance, in lower case, of AN4's phones, and another without a pronunciation."""
    soundfile.write(tmp_path / "one.wav", np.random.default_rng(1).normal(size=8000) * 0.1, 16000)
    (tmp_path / "toy.csv").write_text("id,audio,text\none,one.wav,a bay\ntwo,one.wav,a bee\n")
    (tmp_path / "lexicon.txt").write_text("a AH\nbay B EY\n")
    command = ["chain", "--corpus", f"csv:toy={tmp_path / 'toy.csv'}", "--lexicon", str(tmp_path / "lexicon.txt")]
    return [*command, "--bundle", str(AN4), "--passes", "0", "--output", str(tmp_path / "chain")]


@pytest.mark.slow
@pytest.mark.parametrize("lexicon", ["a AH\nbay B EY\n", "A AH\nBAY B EY\n"])
def test_asr_chain_reads_transcripts_in_lower_case_and_says_again_what_it_left_out(
    chain_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], lexicon: str
) -> None:
    (tmp_path / "lexicon.txt").write_text(lexicon)
    for _ in range(2):
        assert main(chain_command) == 1
        said = capsys.readouterr()
        assert json.loads(said.out)["left_out"] == 1 and "left out: two: no pronunciation of bee" in said.err
    assert [each.text for each in PreparedCorpus(tmp_path / "chain" / "prepared").utterances] == ["a bay"]


@pytest.mark.slow
def test_a_refined_alignment_has_pronunciations_of_the_words(folder: Path, tmp_path: Path) -> None:
    aligned, lines = Alignment.load(folder / "prepared" / "alignment.npz"), []
    # Each utterance five times, because the classifier needs a batch.
    utterances = [
        ("toy", Utterance(f"{time}-{index}", folder / f"{index}.wav", "A", "one"))
        for time in range(5)
        for index in range(6)
    ]
    write_corpus(tmp_path, utterances, Lexicon({"A": [("a",)]}), Fbank(num_mel_bins=20), conditions=("1",))
    corpus = PreparedCorpus(tmp_path)
    first = Alignment.from_lists(aligned.phones, 5 * [(*aligned.of(index), 0.0) for index in range(6)])
    spoken = {tuple(first.phones[phone] for phone in first.of(index)[0] if phone) for index in range(len(corpus))}
    refined = refine_alignment(corpus, Lexicon({"A": sorted(spoken)}), first, 1, lines.append)
    assert [line.partition(":")[0] for line in lines] == ["epoch 0", "epoch 1", "epoch 2"]
    assert float(lines[-1].split()[2]) > 0.3
    assert refined.phones == first.phones and np.isfinite(refined.score).all()
    for index in range(len(corpus)):
        phones, seconds = refined.of(index)
        assert tuple(first.phones[phone] for phone in phones if phone) in spoken
        assert seconds[0] == 0.0 and (np.diff(seconds) > 0).all()


def test_no_classifier_is_trained_on_too_little_speech(folder: Path) -> None:
    corpus, aligned = PreparedCorpus(folder / "prepared"), Alignment.load(folder / "prepared" / "alignment.npz")
    with pytest.raises(AsrError, match=r"6 aligned utterances are too few to train a classifier .* or --passes 0"):
        refine_alignment(corpus, Lexicon({"A": [("a",)]}), replace(aligned, score=np.zeros(6)), 1, print)
    nothing = Alignment.from_lists(aligned.phones, [([], [], -np.inf)] * len(corpus))
    with pytest.raises(AsrError, match="0 aligned utterances are too few"):
        refine_alignment(corpus, Lexicon({"A": [("a",)]}), nothing, 1, print)


def test_without_an_utterance_to_train_on_there_is_no_denominator(folder: Path, tmp_path: Path) -> None:
    corpus, aligned = PreparedCorpus(folder / "prepared"), Alignment.load(folder / "prepared" / "alignment.npz")
    train, _ = usable_utterances(corpus, aligned, {"toy": 10.0})
    with pytest.raises(AsrError, match="no utterance is left to train on"):
        prepare_chain(corpus, aligned, train, 9, 5, tmp_path / "states")
    assert not (tmp_path / "states").exists()


def test_states_and_denominator_are_replaced_together(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, aligned = PreparedCorpus(folder / "prepared"), Alignment.load(folder / "prepared" / "alignment.npz")
    states = prepare_chain(corpus, aligned, [*range(len(corpus))], 9, 5, tmp_path / "states")[0]

    def full_disk(path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(AsrError, match=r"/states: the folder cannot be written \(No space left on device\)"):
        prepare_chain(corpus, aligned, [*range(len(corpus))], 7, 5, tmp_path / "states")
    assert load_chain(tmp_path / "states")[0].to_json() == states.to_json()
    assert [path.name for path in tmp_path.iterdir()] == ["states"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "lexicon", "sentence"),
    [
        (["--bundle", "none"], "", "none: there is no"),
        (["--high-freq", "7000"], "", "(high_freq is 5600.0, not 7000.0); give --high-freq."),
        (["--max-columns", "70"], "", "70 columns are too few: 40 phones need at least 79."),
        ([], "bee B Y\nbay B @\n", "its network has no phone '@' (bay)"),
    ],
)
def test_asr_chain_computes_no_features_for_a_bundle_that_does_not_fit(
    chain_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    options: list[str], lexicon: str, sentence: str,
) -> None:  # fmt: skip
    if lexicon:
        (tmp_path / "lexicon.txt").write_text(lexicon)
    assert main([*chain_command, *options]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "chain" / "prepared").exists()


@pytest.mark.slow
def test_asr_chain_refuses_alignments_of_another_bundle_or_lexicon(
    chain_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(chain_command) == 1
    (tmp_path / "lexicon.txt").write_text("other B\na AH\nbay B EY\n")  # the same pronunciations of these words
    assert main(chain_command) == 1
    (tmp_path / "lexicon.txt").write_text("a EY\nbay B EY\n")
    assert main(chain_command) == 2
    assert "alignment-bundle.npz: the alignment kept there is by another --bundle" in capsys.readouterr().err
    (tmp_path / "lexicon.txt").write_text("a AH\nbay B EY\n")
    other = ["--bundle", str(AN4.parent / "librispeech")]
    assert main([*chain_command, *other]) == 2
    assert "alignment-bundle.npz: the alignment kept there is by another --bundle" in capsys.readouterr().err


@pytest.mark.slow
def test_asr_chain_refuses_features_of_a_corpus_that_has_changed(
    chain_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(chain_command) == 1
    audio, table = tmp_path / "one.wav", (tmp_path / "toy.csv").read_text()
    written = audio.stat().st_mtime_ns
    os.utime(audio, (1, 1))
    sentence = "prepared: the features kept there are of csv:toy before transcripts or audio files changed; delete them"
    assert main(chain_command) == 2
    assert sentence in capsys.readouterr().err
    os.utime(audio, ns=(written, written))
    for changed in (table.replace("a bay", "bay a"), table.replace("one,one.wav", "1,one.wav")):
        (tmp_path / "toy.csv").write_text(changed)
        assert main(chain_command) == 2
        assert sentence in capsys.readouterr().err
    # Without the features, their alignments are refused.
    (tmp_path / "chain" / "prepared" / "utterances.json").unlink()
    (tmp_path / "toy.csv").write_text(table)
    os.utime(audio, (1, 1))
    assert main(chain_command) == 2
    assert "alignment-bundle.npz: the alignment kept there is by another --bundle" in capsys.readouterr().err


@pytest.mark.slow
def test_asr_chain_keeps_features_of_a_corpus_that_was_moved_or_is_gone(
    chain_command: list[str], tmp_path: Path
) -> None:
    assert main(chain_command) == 1
    (tmp_path / "moved").mkdir()
    for name in ("one.wav", "toy.csv"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert main(chain_command) == 1
    moved = [part.replace("toy.csv", "moved/toy.csv") for part in chain_command]
    assert main(moved) == 1


def test_passes_of_asr_chain_are_not_negative(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lexicon.txt").write_text("A a\n")
    common = ["--corpus", "csv:toy=toy.csv", "--lexicon", str(tmp_path / "lexicon.txt"), "--bundle", "none"]
    assert main(["chain", *common, "--output", str(folder), "--passes", "-1"]) == 2
    assert "--passes -1: give 0 or more" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 3}, {"limit_train_batches": 3}, {"max_steps": 2}, {"max_steps": 900}],
)
def test_schedules_end_with_the_training(folder: Path, states: TiedStates, options: dict[str, Any]) -> None:
    from asr.models.chunks import ChunkLoader

    with mock.patch.object(ChunkLoader, "plan", autospec=True, side_effect=ChunkLoader.plan) as plan:
        trainer = fit(folder, states, 1, trainer_options=options)
    assert trainer.lightning_module._num_steps() == trainer.global_step > 0
    # Two of the training and one of the validation before the first step, and one of each during the epoch.
    assert plan.call_count <= 5


def test_batches_that_differ_are_not_to_be_repeated(folder: Path, states: TiedStates) -> None:
    with pytest.raises(AsrError, match="each epoch has other batches here"):
        fit(folder, states, 1, trainer_options={"overfit_batches": 1})


def test_a_schedule_needs_an_end(folder: Path, states: TiedStates) -> None:
    with pytest.raises(AsrError, match="give max_epochs or max_steps"):
        fit(folder, states, -1, trainer_options={"max_time": "00:00:00:02"})


@pytest.mark.parametrize(
    ("held_out", "frames", "sentence"),
    [
        ([], 2000, "6 training utterances fill no batch of 2000"),
        (["toy-speaker2"], 600, "2 held-out utterances fill no"),
    ],
)
def test_data_too_small_for_a_batch_are_refused(
    folder: Path, states: TiedStates, held_out: list[str], frames: int, sentence: str
) -> None:
    from asr.models.chain_training import ChainDataModule, Selection
    from asr.models.tdnnf import Tdnnf

    data = ChainDataModule(
        str(folder / "prepared"), "alignment.npz", str(folder / "states"), Selection(held_out),
        ChunkSizes((70,), frames), fbank=Fbank(num_mel_bins=20),
    )  # fmt: skip
    with pytest.raises(AsrError, match=sentence):
        data.open(Tdnnf(**NETWORK, num_tokens=states.num_columns))  # type: ignore[arg-type]


def test_names_and_sizes_that_do_not_fit_are_refused(folder: Path) -> None:
    corpus = PreparedCorpus(folder / "prepared")
    alignment = Alignment.load(folder / "prepared" / "alignment.npz")
    with pytest.raises(AsrError, match="there is no corpus 'toys'; there are toy"):
        usable_utterances(corpus, alignment, {"toy": 0.0, "toys": 1.0})
    shorter = Alignment.from_lists(alignment.phones, [([0, 1], [0.0, 0.3], 1.0)])
    with pytest.raises(AsrError, match="the alignment is of 1 utterances, but there are 6"):
        usable_utterances(corpus, shorter, {})


def test_damaged_files_of_a_prepared_folder_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "alignment.npz").write_bytes((folder / "prepared" / "alignment.npz").read_bytes()[:200])
    with pytest.raises(AsrError, match=r"alignment\.npz: this is not an alignment"):
        Alignment.load(tmp_path / "alignment.npz")
    listing = (folder / "prepared" / "utterances.json").read_text()
    for damaged in (listing[:-9], listing.replace('"1.1"', '"other"'), listing):  # the last one lacks its features
        (tmp_path / "utterances.json").write_text(damaged)
        with pytest.raises(AsrError, match="the prepared corpus is damaged"):
            PreparedCorpus(tmp_path)


def test_an_interrupted_alignment_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    alignment = Alignment.load(folder / "prepared" / "alignment.npz")

    def interrupted(path: Path, **_: Any) -> None:
        path.write_bytes(b"PK")
        raise KeyboardInterrupt

    with mock.patch.object(np, "savez", interrupted), pytest.raises(KeyboardInterrupt):
        alignment.save(tmp_path / "alignment.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--corpus", "ljspeech:train=lj"], "the features kept there are of an4:train (--corpus)"),
        (["--corpus", "an4:train=an4", "ljspeech:train=lj"], "the features kept there are of an4:train (--corpus)"),
        (["--corpus", "an4:test=an4"], "the features kept there are of an4:train (--corpus)"),
        (["--corpus", "an4:train=an4", "--high-freq", "7000"], "the features kept there are up to 5600.0 Hz"),
        (["--corpus", "an4:train=an4", "--held-out", "an4-none"], "there is no speaker 'an4-none' to hold out"),
        (["--corpus", "an4:train=an4", "--min-score", "an5=1"], "there is no corpus 'an5'; there are an4"),
    ],
)
def test_asr_chain_says_at_once_what_does_not_fit(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    from asr.cli.main import main

    prepared = tmp_path / "prepared"
    prepared.mkdir()
    for name in ("1", "1.1"):
        (prepared / f"features-{name}.npy").write_bytes((folder / "prepared" / f"features-{name}.npy").read_bytes())
    listing = json.loads((folder / "prepared" / "utterances.json").read_text())
    listing["fbank"] = Fbank(high_freq=5600.0).arguments
    listing |= {"corpora": ["an4"], "parts": ["an4:train"]}
    for row in listing["utterances"]:
        row["corpus"] = "an4"
    (prepared / "utterances.json").write_text(json.dumps(listing))
    (tmp_path / "lexicon").write_text("A a\n")
    inputs = ["--lexicon", str(tmp_path / "lexicon"), "--bundle", "none", "--output", str(tmp_path)]
    assert main(["chain", *inputs, *options]) == 2
    assert sentence in capsys.readouterr().err


def test_asr_chain_checks_names_of_corpora_before_it_computes_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from asr.cli.main import main

    (tmp_path / "lexicon").write_text("A a\n")
    inputs = ["--lexicon", str(tmp_path / "lexicon"), "--bundle", "none", "--output", str(tmp_path / "new")]
    assert main(["chain", *inputs, "--corpus", "an4:train=an4", "--min-score", "an4=1", "lj=2"]) == 2
    assert "--min-score: there is no corpus 'lj'; there are an4." in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_utterances_are_chosen_by_speaker_and_score(folder: Path) -> None:
    corpus = PreparedCorpus(folder / "prepared")
    alignment = Alignment.load(folder / "prepared" / "alignment.npz")
    train, aside = usable_utterances(corpus, alignment, {"toy": 2.5}, ["toy-speaker2"])
    assert train == [3, 4] and aside == [2, 5]
    with pytest.raises(AsrError, match="nobody"):
        usable_utterances(corpus, alignment, {}, ["nobody"])


def test_recipes_name_the_filterbanks_of_the_corpus(folder: Path) -> None:
    from asr.models.chain_training import ChainDataModule

    for fbank in (None, Fbank(num_mel_bins=20, high_freq=5600.0)):
        with pytest.raises(AsrError, match=r"other filterbanks; give fbank the init_args \{'num_mel_bins': 20\}"):
            ChainDataModule(folder / "prepared", "alignment.npz", folder, fbank=fbank)


@pytest.mark.parametrize(
    ("phones", "sentence"),
    [
        (("SIL", "b", "a"), "phone 1 is b, but a in the tied states of"),
        (("SIL", "a", "b", "c"), "phone 3 is c, but none in the tied states of"),
        (("SIL", "a"), "phone 2 is none, but b in the tied states of"),
    ],
)
def test_an_alignment_of_other_phones_is_refused(
    folder: Path, states: TiedStates, own: Path, phones: tuple[str, ...], sentence: str
) -> None:
    from asr.models.chain_training import ChainDataModule

    path = own / "prepared" / "alignment.npz"
    replace(Alignment.load(path), phones=phones).save(path)
    with pytest.raises(AsrError, match=rf"alignment\.npz: {sentence} {re.escape(str(folder / 'states'))}; give"):
        ChainDataModule(str(own / "prepared"), "alignment.npz", str(folder / "states"), fbank=Fbank(num_mel_bins=20))
