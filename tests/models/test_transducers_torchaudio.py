"""Transducers of torchaudio: tiny random ones of its classes."""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asr.errors import AsrError
from asr.models.transducers import load_transducer
from asr.models.transducers.torchaudio import TorchaudioTransducer
from asr.text.ctc_tokens import CTCTokens
from tests.models.external_audio import assert_rows_are_independent, greedy_path, noise, token_log_probs

pytestmark = pytest.mark.slow

SYMBOLS = ["<unk>", "▁a", "b", "c", "▁", "a", "<blk>"]
BLANK = 6
BATCH = [noise(0.6, 1), noise(0.3, 2), noise(1.03, 3)]


@pytest.fixture
def models() -> Any:
    """`torchaudio.models`, if its libraries can be loaded."""
    try:
        return importlib.import_module("torchaudio.models")
    except (ImportError, OSError) as error:
        pytest.skip(f"no torchaudio: {error}")


def network(models: Any, num_symbols: int = len(SYMBOLS), seed: int = 0) -> Any:
    torch.manual_seed(seed)
    made = importlib.import_module("torchaudio.models.rnnt").emformer_rnnt_model(
        input_dim=80, encoding_dim=16, num_symbols=num_symbols, segment_length=16, right_context_length=4,
        time_reduction_input_dim=8, time_reduction_stride=4, transformer_num_heads=2, transformer_ffn_dim=16,
        transformer_num_layers=2, transformer_dropout=0.1, transformer_activation="gelu",
        transformer_left_context_length=8, transformer_max_memory_size=0, transformer_weight_init_scale_strategy=None,
        transformer_tanh_on_mem=True, symbol_embedding_dim=12, num_lstm_layers=3, lstm_layer_norm=True,
        lstm_layer_norm_epsilon=1e-3, lstm_dropout=0.3,
    )  # fmt: skip
    made.joiner.linear.weight.data *= 2.0
    return made.eval()


def features(waveform: Tensor) -> tuple[Tensor, Tensor]:
    """Frames of 160 samples, with 4 of right context."""
    frames = waveform[: len(waveform) // 160 * 160].reshape(-1, 160)[:, :80] * 10.0
    padded = nn.functional.pad(frames, (0, 0, 0, 4))
    return padded, torch.tensor([len(padded)])


def transducer(models: Any, seed: int = 0) -> TorchaudioTransducer:
    return TorchaudioTransducer(network(models, seed=seed), features, SYMBOLS)


@torch.no_grad()
def test_log_probs_are_those_of_the_network(models: Any) -> None:
    model = transducer(models)
    assert (model.name, model.tokens.blank_id, model.frame_shift, model.durations) == ("RNNT", BLANK, 0.04, ())
    labels = [2, 2, 1, 5, 3]
    inputs, num_inputs = features(BATCH[0])
    wanted, *_ = model.network(inputs[None], num_inputs, torch.tensor([[BLANK, *labels]]), torch.tensor([6]))
    encoded, num_frames = model(BATCH)
    assert num_frames.tolist() == [15, 7, 25]
    assert encoded.shape == (3, 25, 16)
    found = token_log_probs(model, encoded[0, :15], labels)
    assert torch.allclose(found, wanted[0].log_softmax(2), atol=1e-5)
    assert found.std(0).mean() > 0.01 and found.std(1).mean() > 0.01


@torch.no_grad()
def test_greedy_paths_are_those_of_torchaudio(models: Any) -> None:
    """If the network is sure, a beam of one hypothesis after each frame finds the same as no beam."""
    model = transducer(models, seed=48)
    for layer in model.network.predictor.lstm_layers:
        layer.p2g.weight.data *= 2.0
        layer.x2g.weight.data *= 2.0
    model.network.joiner.linear.weight.data *= 10.0
    model.network.joiner.linear.bias.data[BLANK] += 6.0
    search = models.RNNTBeamSearch(model.network, BLANK, hypo_sort_key=lambda hypothesis: hypothesis[3])
    lengths = []
    for utterance in BATCH:
        (encoded,), (num_frames,) = model(utterance)
        found = greedy_path(model, encoded[:num_frames])
        assert [BLANK, *found] == search(*features(utterance), 1)[0][0]
        lengths.append(len(found))
    assert lengths == [1, 2, 1]


def test_padding_does_not_matter(models: Any) -> None:
    model = transducer(models)
    encoded, num_frames = model(BATCH)
    for utterance, found, num in zip(BATCH, encoded, num_frames, strict=True):
        assert torch.equal(found[:num], model(utterance)[0][0])
    assert model(noise(0.01))[1].tolist() == [2]


@torch.no_grad()
def test_networks_run_on_their_device(models: Any) -> None:
    model = transducer(models)
    model.network.to("meta")
    encoded, _ = model(noise(0.2))
    predicted, state = model.start()
    predicted, state = model.predict(torch.tensor([2], device=model.device), state)
    made = (encoded, predicted, *state, model.join(encoded[:, 0], predicted))
    assert {each.device.type for each in made} == {"meta"}


@torch.no_grad()
def test_rows_are_independent(models: Any) -> None:
    model = transducer(models)
    predicted, state = model.start()
    assert [tuple(each.shape) for each in (predicted, *state)] == [(1, 16)] + [(1, 12)] * 6
    assert_rows_are_independent(model)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64], ids=str)
@torch.no_grad()
def test_networks_of_other_types(models: Any, kind: torch.dtype) -> None:
    model = transducer(models)
    wanted = token_log_probs(model, model(BATCH[1])[0][0], [2, 3])
    model.network.to(kind)
    (encoded,), _ = model(BATCH[1])
    found = token_log_probs(model, encoded, [2, 3])
    assert encoded.dtype == kind and found.dtype == torch.float32
    assert (found.exp() - wanted.exp()).abs().max() < 0.1


def test_networks_that_do_not_fit_are_told(models: Any) -> None:
    made = network(models)
    with pytest.raises(AsrError, match=r"^Linear: it is not a network like torchaudio.models.RNNT .*; give one of emf"):
        TorchaudioTransducer(nn.Linear(1, 1), features, SYMBOLS)
    with pytest.raises(AsrError, match=r"^RNNT: the network has 7 tokens, but the list has 6; give its own tokens"):
        TorchaudioTransducer(made, features, SYMBOLS[1:])
    with pytest.raises(AsrError, match=r"^RNNT: .*the token 'b' occurs twice"):
        TorchaudioTransducer(made, features, ["b", *SYMBOLS])
    with pytest.raises(AsrError, match=r"^RNNT: the hop_length is 0; give a whole number"):
        TorchaudioTransducer(made, features, CTCTokens(SYMBOLS), hop_length=0)


# --- Pipelines


@pytest.fixture
def files(models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a tiny pipeline's files, which are on this machine."""
    pieces = pytest.importorskip("sentencepiece")
    pipelines = importlib.import_module("torchaudio.pipelines")
    folder = tmp_path / "torchaudio"
    folder.mkdir()
    (tmp_path / "text").write_text("abc cab bac acb\n" * 20)
    pieces.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(folder / "pieces"), vocab_size=9, minloglevel=2
    )
    statistics = {"mean": [0.0] * 80, "invstddev": [1.0] * 80}
    (folder / "statistics.json").write_text(json.dumps(statistics))
    torch.save(network(models, num_symbols=10).state_dict(), folder / "weights.pt")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    bundle = pipelines.RNNTBundle(
        _rnnt_path="weights.pt", _rnnt_factory_func=partial(network, models, 10, 1), _blank=9,
        _global_stats_path="statistics.json", _sp_model_path="pieces.model", _right_padding=4, _sample_rate=16000,
        _n_fft=400, _n_mels=80, _hop_length=160, _segment_length=16, _right_context_length=4,
    )  # fmt: skip
    monkeypatch.setattr(pipelines, "TINY", bundle, raising=False)
    return folder


@torch.no_grad()
def test_pipelines(models: Any, files: Path) -> None:
    model = load_transducer("torchaudio:TINY")
    assert (model.name, model.sampling_rate, model.frame_shift) == ("torchaudio:TINY", 16000, 0.04)
    assert (len(model.tokens), model.tokens.blank_id, model.tokens.kind) == (10, 9, "pieces")
    assert model.tokens.piece_model is not None and "".join(model.tokens.spell("cab")[0]) == "▁cab"
    bundle = importlib.import_module("torchaudio.pipelines").TINY
    encoded, num_frames = model(BATCH)
    wanted, _ = bundle._get_model().transcribe(*(each[None] for each in bundle.get_feature_extractor()(BATCH[0])))
    assert num_frames[0] == wanted.shape[1]
    assert torch.allclose(encoded[0, : num_frames[0]], wanted[0], atol=1e-5)


def test_names(models: Any) -> None:
    for name in ("WAV2VEC2_ASR_BASE_960H", "RNNTBundle", "no such name"):
        with pytest.raises(AsrError, match=r"no such transducer; there are .*EMFORMER_RNNT_BASE_LIBRISPEECH in this"):
            load_transducer(f"torchaudio:{name}")


def test_files_that_cannot_be_read_are_told(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (files / "was run",)

    def no_network(*args: object, **kwargs: object) -> None:
        raise OSError("Name or service not known")

    where = f"put weights.pt, statistics.json, pieces.model into {files}"
    content = {path: path.read_bytes() for path in sorted(files.glob("*.*")) if path.suffix != ".vocab"}
    assert len(content) == 3
    for path, intact in content.items():
        path.write_bytes(b"nothing")
        with pytest.raises(AsrError, match=f"^torchaudio:TINY: its files cannot be downloaded or read .*; {where}"):
            load_transducer("torchaudio:TINY")
        path.write_bytes(intact)
    torch.save(Code(), files / "weights.pt")
    with pytest.raises(AsrError, match=f"^torchaudio:TINY: its files cannot be downloaded or read .*; {where}"):
        load_transducer("torchaudio:TINY")
    assert not (files / "was run").exists()
    (files / "weights.pt").unlink()
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    with pytest.raises(AsrError, match=f"^torchaudio:TINY: .* .Name or service not known.; {where}"):
        load_transducer("torchaudio:TINY")


def test_missing_packages_are_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchaudio", "torchaudio.pipelines"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AsrError, match=r"needs the package torchaudio\.pipelines, .*; `pip install torchaudio`"):
        load_transducer("torchaudio:EMFORMER_RNNT_BASE_LIBRISPEECH")


def test_pipelines_need_sentencepiece(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(AsrError, match=r"^torchaudio:TINY needs the package sentencepiece, .*; `pip install sentence"):
        load_transducer("torchaudio:TINY")
