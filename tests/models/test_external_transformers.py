"""Networks of transformers: tiny random ones in its own format, and objects with the same interface."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asr.ctc import CTCDecoder
from asr.errors import AsrError
from asr.models.external import load_acoustic_model
from asr.models.external.transformers import TransformersModel
from tests.models.external_audio import noise, outputs_as_alone, write_foreign_code

pytestmark = pytest.mark.slow

LETTERS = {"<pad>": 0, "<unk>": 1, "|": 2, "A": 3, "B": 4}
SIZES: dict[str, Any] = {
    "vocab_size": 5, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "conv_dim": (8, 8), "conv_stride": (20, 16), "conv_kernel": (20, 16), "num_conv_pos_embeddings": 2,
    "num_conv_pos_embedding_groups": 2, "pad_token_id": 0,
}  # fmt: skip


class Extractor:
    """Like a feature extractor: samples, or frames of 160, with a mask if it is asked for one."""

    sampling_rate = 16000

    def __init__(self, mask_name: str = "attention_mask", shift: int = 1, return_attention_mask: bool = True) -> None:
        self.mask_name, self.shift, self.return_attention_mask = mask_name, shift, return_attention_mask

    def __call__(self, utterances: list[Any], return_attention_mask: bool = False, **_: Any) -> dict[str, Tensor]:
        parts = [torch.from_numpy(each[: len(each) // self.shift * self.shift]) for each in utterances]
        padded = nn.utils.rnn.pad_sequence(parts, batch_first=True).reshape(len(parts), -1, self.shift)
        lengths = torch.tensor([len(each) // self.shift for each in parts])
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        return {"inputs": padded} | ({self.mask_name: mask} if return_attention_mask else {})


class Network(nn.Module):
    """Like an `AutoModelForCTC`: averages four inputs, and if it leaks, the padding after them."""

    def __init__(self, num_columns: int = 5, stride: int = 320, leaks: bool = False, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(stride, num_columns)
        self.leaks = leaks
        self.config = SimpleNamespace(vocab_size=num_columns, **config)

    def _get_subsampling_output_length(self, num_inputs: Tensor) -> Tensor:
        return num_inputs.div(self.linear.in_features, rounding_mode="floor")

    def forward(self, inputs: Tensor, **masks: Tensor) -> Any:
        stride = self.linear.in_features
        frames = inputs.mean(2)[:, : inputs.shape[1] // stride * stride].reshape(len(inputs), -1, stride)
        logits = self.linear(100.0 * frames)
        if self.leaks:
            logits = logits + torch.arange(logits.shape[1]).flip(0)[:, None] * self.linear.bias
        return SimpleNamespace(logits=logits)


def tokenizer(symbols: dict[str, int], pad_token_id: int = 0) -> Any:
    return SimpleNamespace(get_vocab=lambda: symbols, pad_token_id=pad_token_id, word_delimiter_token="|")


@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.parametrize("mask_name", ["attention_mask", "padding_mask"])
@pytest.mark.parametrize("masked", [True, False])
def test_recordings_do_not_depend_on_others(mask_name: str, leaks: bool, masked: bool) -> None:
    extractor = Extractor(mask_name, return_attention_mask=masked)
    model = TransformersModel(
        Network(leaks=leaks, pad_token_id=0, inputs_to_logits_ratio=320), extractor, tokenizer(LETTERS)
    )
    batch = [noise(0.5, 1), noise(1.0, 2), noise(0.3, 3)]
    _, num_frames = outputs_as_alone(model, batch, atol=1e-4)
    assert num_frames.tolist() == [25, 50, 15]


def test_frame_shift_of_a_ratio_that_is_not_one_of_samples() -> None:
    network = Network(stride=4, pad_token_id=0, inputs_to_logits_ratio=4)
    model = TransformersModel(network, Extractor(shift=160), tokenizer(LETTERS))
    assert model.frame_shift == pytest.approx(0.04)
    assert model([noise(1.0), noise(0.5)])[1].tolist() == [25, 12]


def test_the_blank_is_not_always_the_padding() -> None:
    network = Network(blank_token_id=2, pad_token_id=1, inputs_to_logits_ratio=320)
    symbols = {"<s>": 2, "<pad>": 1, "|": 0, "A": 3, "B": 4}
    assert TransformersModel(network, Extractor(), tokenizer(symbols, pad_token_id=1)).tokens.blank_id == 2


def test_the_tokenizer_writes_words_in_pieces() -> None:
    pieces = {"<pad>": 0, "▁A": 1, "B": 2, "▁": 3, "A": 4}
    own = tokenizer(pieces)
    own.tokenize = lambda text: ["▁", *text]
    model = TransformersModel(Network(pad_token_id=0, inputs_to_logits_ratio=320), Extractor(), own)
    assert model.tokens.spell("AB") == [("▁", "A", "B")]


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("Data2VecAudio", False),
        ("Data2VecAudio", True),
        ("Wav2Vec2", True),
        ("Wav2Vec2Conformer", False),
        ("WavLM", True),
    ],
)
def test_networks_whose_convolutions_read_padding(tmp_path: Path, name: str, adapter: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **SIZES, add_adapter=adapter, feat_extract_norm="layer", conv_pos_kernel_size=3, conv_depthwise_kernel_size=3
    )
    getattr(transformers, f"{name}ForCTC")(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(LETTERS))
    transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json")).save_pretrained(tmp_path)
    transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(tmp_path)
    model = load_acoustic_model(f"transformers:{tmp_path}")
    batch = [noise(0.5), noise(1.0), noise(0.317)]
    outputs_as_alone(model, batch, atol=1e-3)


def test_transformers_network(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "A": 5, "B": 6, "C": 7}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    folder = tmp_path / "network"
    torch.manual_seed(0)
    # With 8 or 16 channels, convolutions of torch 2.13 in bfloat16 are wrong on processors with AMX.
    config = transformers.Wav2Vec2Config(
        vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_stride=(10, 8), conv_kernel=(10, 8), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        pad_token_id=0, conv_dim=(32, 32), feat_extract_norm="layer", do_stable_layer_norm=True,
    )  # fmt: skip
    network = transformers.Wav2Vec2ForCTC(config).eval()
    network.save_pretrained(folder)
    transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json")).save_pretrained(folder)
    batch = [noise(0.2), noise(0.1)]
    for masked in (True, False):
        transformers.Wav2Vec2FeatureExtractor(
            feature_size=1, sampling_rate=16000, padding_value=0.0, return_attention_mask=masked
        ).save_pretrained(folder)
        model = load_acoustic_model(f"transformers:{folder}")
        assert model.frame_shift == pytest.approx(80 / 16000)
        # The network has a column more than the tokenizer has symbols.
        assert model.tokens.symbols == (*vocabulary, "<unused-8>")
        assert (model.tokens.blank_id, model.tokens.word_boundary) == (0, "|")
        log_prob, num_frames = outputs_as_alone(model, batch, atol=1e-3)
    decoder = CTCDecoder(model.tokens, words=["AB", "CAB"], frame_shift=model.frame_shift, warm_up=False)
    assert len(decoder(log_prob, num_frames)) == 2
    half, _ = load_acoustic_model(f"transformers:{folder}", torch_dtype=torch.bfloat16)(batch)
    assert (half[0] - log_prob[0]).abs().max() < 0.1
    damage = {
        "config.json": (b"[1]", "cannot be loaded .*; the folder must have"),
        "model.safetensors": (b"nothing", "cannot be loaded .*; the folder must have"),
        "vocab.json": (b'{"<pad>": 0, "A": "x"}', "symbol 'A' has the id 'x'; the network has 9 columns"),
        "preprocessor_config.json": (b'{"sampling_rate": 0}', "sampling_rate of its feature extractor is 0; give"),
    }
    for name, (content, message) in damage.items():
        damaged = tmp_path / f"damaged-{name}"
        shutil.copytree(folder, damaged)
        original = json.loads((folder / name).read_text()) if name.startswith("preprocessor") else {}
        (damaged / name).write_bytes(json.dumps(original | json.loads(content)).encode() if original else content)
        with pytest.raises(AsrError, match=f"^transformers:{damaged}: .*{message}"):
            load_acoustic_model(f"transformers:{damaged}")
    # Only the network without its output layer, as after pre-training: transformers would add a random one.
    headless = tmp_path / "headless"
    shutil.copytree(folder, headless)
    network.wav2vec2.save_pretrained(headless)
    with pytest.raises(
        AsrError, match=r"the checkpoint lacks 2 weights of the network \(lm_head.bias, ...\); give one"
    ):
        load_acoustic_model(f"transformers:{headless}")
    with pytest.raises(AsrError, match="without a network connection, give a folder with"):
        load_acoustic_model("transformers:nobody/nothing", local_files_only=True)
    with pytest.raises(AsrError, match="the folder must have"):
        load_acoustic_model(f"transformers:{tmp_path}")


def test_code_in_a_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever standard input says when transformers asks."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    written = write_foreign_code(tmp_path, "Wav2Vec2Config")
    with pytest.raises(AsrError, match=r"custom code .*; the folder must have"):
        load_acoustic_model(f"transformers:{tmp_path}")
    assert not written.exists()


def test_extractor_and_tokenizer_come_from_where_the_network_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    given = {}

    class Part:
        def __init__(self, name: str, part: Any) -> None:
            self.name, self.part = name, part

        def from_pretrained(self, name: str, output_loading_info: bool = False, **options: Any) -> Any:
            given[self.name] = options
            return (self.part, {"missing_keys": []}) if output_loading_info else self.part

    network = Network(pad_token_id=0, inputs_to_logits_ratio=320)
    parts = {"ModelForCTC": network, "FeatureExtractor": Extractor(), "Tokenizer": tokenizer(LETTERS)}
    for name, part in parts.items():
        monkeypatch.setattr(transformers, f"Auto{name}", Part(name, part))
    load_acoustic_model("transformers:owner/name", revision="v2", local_files_only=True, torch_dtype=torch.bfloat16)
    shared = {"revision": "v2", "local_files_only": True, "trust_remote_code": False}
    assert given["FeatureExtractor"] == given["Tokenizer"] == shared
    assert given["ModelForCTC"] == {**shared, "torch_dtype": torch.bfloat16}


def test_a_network_of_many_languages_comes_with_the_letters_of_the_chosen_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    letters = {"eng": ["<pad>", "|", "a", "b"], "fra": ["<pad>", "|", "é", "a", "b"]}
    (tmp_path / "vocab.json").write_text(
        json.dumps({language: {symbol: n for n, symbol in enumerate(symbols)} for language, symbols in letters.items()})
    )
    for language, symbols in letters.items():
        config = transformers.Wav2Vec2Config(
            vocab_size=len(symbols), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            conv_dim=(8,) * 7, num_conv_pos_embeddings=2, num_conv_pos_embedding_groups=2, adapter_attn_dim=4,
        )  # fmt: skip
        network = transformers.Wav2Vec2ForCTC(config)
        save_file(network._get_adapters(), tmp_path / f"adapter.{language}.safetensors")
        if language == "eng":
            network.save_pretrained(tmp_path)
    unknown = {"unk_token": "<pad>", "bos_token": None, "eos_token": None}
    path = str(tmp_path / "vocab.json")
    transformers.Wav2Vec2CTCTokenizer(path, target_lang="eng", **unknown).save_pretrained(tmp_path)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(tmp_path)
    for options, language in (({}, "eng"), ({"target_lang": "fra", "ignore_mismatched_sizes": True}, "fra")):
        model = load_acoustic_model(f"transformers:{tmp_path}", **options)
        assert list(model.tokens.symbols) == letters[language]


def test_frame_shift_of_a_transformers_network_with_an_adapter(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.json").write_text(json.dumps({"<pad>": 0, "<unk>": 1, "|": 2, "A": 3, "B": 4}))
    config = transformers.Wav2Vec2Config(
        vocab_size=5, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_stride=(20, 16), conv_kernel=(20, 16), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        add_adapter=True, num_adapter_layers=2, adapter_stride=2, pad_token_id=0,
    )  # fmt: skip
    transformers.Wav2Vec2ForCTC(config).save_pretrained(tmp_path)
    transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json")).save_pretrained(tmp_path)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(tmp_path)
    model = load_acoustic_model(f"transformers:{tmp_path}")
    assert model.frame_shift == pytest.approx(0.08)
    assert model(noise(2.0))[1].tolist() == [25]
