"""Transducers of transformers: tiny random ones in its own format."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.models.transducers import load_transducer
from asr.models.transducers.transformers import TransformersTransducer
from tests.models.external_audio import greedy_path, noise, token_log_probs, write_foreign_code

pytestmark = pytest.mark.slow

SYMBOLS = ["<unk>", "<pad>", "▁a", "b", "c", "▁", "a", "<blank>"]
BLANK = 7
KINDS = ["ParakeetRNNT", "ParakeetTDT", "NemotronAsrStreaming", "Nemotron3_5Asr"]
BATCH = [noise(0.6, 1), noise(0.3, 2), noise(1.0, 3)]


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def network(transformers: Any, kind: str = "ParakeetTDT", seed: int = 0) -> Any:
    """A network whose output depends on the audio and on the tokens so far."""
    torch.manual_seed(seed)
    # With 8 or 16 channels, convolutions of torch 2.13 in bfloat16 are wrong on processors with AMX.
    encoder = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
        "conv_kernel_size": 3, "subsampling_conv_channels": 32, "num_mel_bins": 80, "subsampling_factor": 4,
    }  # fmt: skip
    further = {"prompt_intermediate_size": 32} if kind == "Nemotron3_5Asr" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(SYMBOLS), blank_token_id=BLANK, pad_token_id=1, decoder_hidden_size=12, num_decoder_layers=2,
        encoder_config=encoder, **further,
    )  # fmt: skip
    of_class = {"ParakeetTDT": "ParakeetForTDT", "ParakeetRNNT": "ParakeetForRNNT"}.get(kind, f"{kind}ForRNNT")
    made = getattr(transformers, of_class)(config)
    for weight in made.parameters():
        if weight.dim() > 1:
            weight.data.normal_(std=2.0 * weight[0].numel() ** -0.5)
    bias = made.joint.head.bias.data
    bias[:2], bias[BLANK] = -10.0, 0.5  # `generate` leaves out the padding
    bias[len(SYMBOLS) : len(SYMBOLS) + 1] = -1.0  # no endless loops
    made.generation_config.decoder_start_token_id = BLANK
    made.generation_config.suppress_tokens = [*range(len(SYMBOLS), len(bias))]
    return made.eval()


def tokenizer(transformers: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = Tokenizer(models.Unigram([(symbol, -float(n)) for n, symbol in enumerate(SYMBOLS)], unk_id=0))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    return transformers.ParakeetTokenizer(tokenizer_object=pieces, unk_token="<unk>", pad_token="<pad>")


def extractor(transformers: Any, kind: str) -> Any:
    family = "Parakeet" if "Parakeet" in kind else "NemotronAsrStreaming"
    return getattr(transformers, f"{family}FeatureExtractor")()


def transducer(transformers: Any, kind: str, seed: int = 0) -> TransformersTransducer:
    return TransformersTransducer(
        network(transformers, kind, seed), extractor(transformers, kind), tokenizer(transformers)
    )


def inputs_of(model: TransformersTransducer, utterance: Tensor) -> Any:
    return model._extractor([utterance.numpy()], sampling_rate=16000, return_tensors="pt")


@pytest.fixture
def folder(transformers: Any, tmp_path: Path) -> Path:
    network(transformers).save_pretrained(tmp_path)
    parts = extractor(transformers, "ParakeetTDT"), tokenizer(transformers)
    transformers.ParakeetProcessor(*parts).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_log_probs_are_those_of_the_network(transformers: Any, kind: str) -> None:
    model = transducer(transformers, kind)
    assert model.tokens.symbols == tuple(SYMBOLS)
    assert (model.tokens.blank_id, model.frame_shift, model.sampling_rate) == (BLANK, 0.04, 16000)
    assert model.durations == ((0, 1, 2, 3, 4) if kind == "ParakeetTDT" else ())
    labels = [2, 3, 3, 4, 6]
    wanted = model.network(**inputs_of(model, BATCH[0]), decoder_input_ids=torch.tensor([[BLANK, *labels]])).logits
    encoded, num_frames = model(BATCH[0])
    assert wanted.shape[3] == len(SYMBOLS) + len(model.durations)
    found = token_log_probs(model, encoded[0, : num_frames[0]], labels)
    wanted = wanted[0, : num_frames[0], :, : len(SYMBOLS)].log_softmax(2)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert found.std(0).mean() > 0.01 and found.std(1).mean() > 0.01


@torch.no_grad()
def test_durations_come_last(transformers: Any) -> None:
    model = transducer(transformers, "ParakeetTDT")
    wanted = model.network(**inputs_of(model, BATCH[0]), decoder_input_ids=torch.tensor([[BLANK]])).logits[0]
    (encoded,), _ = model(BATCH[0])
    assert torch.allclose(model.join(encoded, model.start()[0].expand(len(encoded), -1)), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_greedy_paths_are_those_of_generate(transformers: Any, kind: str) -> None:
    lengths = set()
    for seed in range(3):
        model = transducer(transformers, kind, seed)
        for utterance in BATCH:
            wanted = model.network.generate(**inputs_of(model, utterance), max_length=400).sequences[0].tolist()
            (encoded,), (num_frames,) = model(utterance)
            found = greedy_path(model, encoded[:num_frames])
            assert found == [token for token in wanted if token not in (BLANK, 1)]
            lengths.add(len(found))
    assert len(lengths) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_matter(transformers: Any, kind: str) -> None:
    model = transducer(transformers, kind)
    encoded, num_frames = model(BATCH)
    assert model._ignores_padding
    for utterance, found, num in zip(BATCH, encoded, num_frames, strict=True):
        (alone,), (num_alone,) = model(utterance)
        assert num == num_alone
        assert torch.allclose(found[:num], alone[:num], atol=1e-4)
    assert len(model(noise(0.01))[0][0])


def test_networks_that_read_padding_read_each_recording_alone(transformers: Any) -> None:
    model = transducer(transformers, "ParakeetTDT")
    without_padding = model.network.get_audio_features

    def leaking(input_features: Tensor, **masks: Tensor) -> Any:
        output = without_padding(input_features, **masks)
        output.pooler_output = output.pooler_output + input_features.shape[1]
        return output

    model.network.get_audio_features = leaking
    encoded, num_frames = model(BATCH)
    assert not model._ignores_padding
    for utterance, found, num in zip(BATCH, encoded, num_frames, strict=True):
        assert torch.equal(found[:num], model(utterance)[0][0, :num])


@torch.no_grad()
def test_networks_run_on_their_device(transformers: Any) -> None:
    model = transducer(transformers, "ParakeetTDT")
    model.network.to("meta")
    predicted, state = model.start()
    predicted, state = model.predict(torch.tensor([2], device=model.device), state)
    made = (predicted, *state, model.join(torch.zeros_like(predicted), predicted))
    assert {each.device.type for each in made} == {"meta"}


@torch.no_grad()
def test_rows_are_independent(transformers: Any) -> None:
    model = transducer(transformers, "ParakeetTDT")
    predicted, state = model.start()
    assert [tuple(each.shape) for each in (predicted, *state)] == [(1, 12), (1, 2, 12), (1, 2, 12)]
    tokens = torch.tensor([2, 3, 4])
    together, states = model.predict(tokens, tuple(each.expand(3, -1, -1) for each in state))
    picked = torch.tensor([2, 0])
    again, _ = model.predict(tokens[picked], tuple(each[picked] for each in states))
    for row, token in zip(picked, tokens[picked], strict=True):
        alone, state_alone = model.predict(tokens[row, None], state)
        assert torch.allclose(alone[0], together[row], atol=1e-6)
        wanted, _ = model.predict(token[None], state_alone)
        assert torch.allclose(again[picked == row], wanted, atol=1e-6)


@torch.no_grad()
def test_folders(transformers: Any, folder: Path) -> None:
    model = load_transducer(f"transformers:{folder}")
    assert model.name == f"transformers:{folder}"
    wanted = transducer(transformers, "ParakeetTDT")
    encoded, num_frames = model(BATCH)
    assert torch.allclose(encoded, wanted(BATCH)[0], atol=1e-5)
    assert model.tokens.spell("abc") == [("▁a", "b", "c")]
    half = load_transducer(f"transformers:{folder}", dtype=torch.bfloat16)
    (short,), _ = half(BATCH[1])
    assert short.dtype == torch.bfloat16
    labels = [2, 3, 4]
    found = token_log_probs(half, short[: num_frames[1]], labels)
    exact = token_log_probs(model, encoded[1, : num_frames[1]], labels)
    assert found.dtype == torch.float32 and (found.exp() - exact.exp()).abs().max() < 0.1


def test_other_folders_are_told(transformers: Any, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    lacking = {name: weight for name, weight in weights.items() if "joint" not in name}
    save_file(lacking, folder / "model.safetensors", {"format": "pt"})
    message = r"lacks 2 weights of the network \(joint.head.bias, ...\); give one that was trained as a transducer"
    with pytest.raises(AsrError, match=f"^transformers:{folder}: the checkpoint {message}"):
        load_transducer(f"transformers:{folder}")
    transformers.ParakeetCTCConfig().save_pretrained(folder)
    with pytest.raises(
        AsrError,
        match=f"^transformers:{folder}: this is no transducer, but of the type parakeet_ctc; give one of .*tdt",
    ):
        load_transducer(f"transformers:{folder}")
    (folder / "config.json").write_text("[1]")
    with pytest.raises(AsrError, match=f"^transformers:{folder}: .*cannot be loaded .*; the folder must have"):
        load_transducer(f"transformers:{folder}")


def test_parts_that_do_not_fit_are_told(transformers: Any) -> None:
    made, reader, pieces = network(transformers), extractor(transformers, "ParakeetTDT"), tokenizer(transformers)
    with pytest.raises(
        AsrError, match=r"^mine: it is not a transducer with an LSTM .*has no attribute.*; give one like"
    ):
        TransformersTransducer(torch.nn.Linear(1, 1), reader, pieces, "mine")
    with pytest.raises(AsrError, match=r"^mine: the sampling_rate of its feature extractor is None; give"):
        TransformersTransducer(made, SimpleNamespace(), pieces, "mine")
    made.config.vocab_size = 4
    with pytest.raises(AsrError, match=r"^mine: the tokenizer's symbol .* the network has 4 columns, so give its own"):
        TransformersTransducer(made, reader, pieces, "mine")


def test_code_in_a_folder_is_not_run(transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    written = write_foreign_code(tmp_path, "ParakeetTDTConfig")
    with pytest.raises(AsrError, match=r"custom code .*; the folder must have"):
        load_transducer(f"transformers:{tmp_path}")
    assert not written.exists()


def test_a_missing_or_old_package_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("transformers")
    old.__version__ = "4.57.1"  # type: ignore[attr-defined]
    for module, message in (
        (None, "needs the package transformers, .*; `pip install transformers`"),
        (old, "transducers need transformers 5.24 or later, but 4.57.1 is installed here; `pip install --upgrade"),
    ):
        monkeypatch.setitem(sys.modules, "transformers", module)
        with pytest.raises(AsrError, match=f"^transformers:owner/name.* {message}"):
            load_transducer("transformers:owner/name")
