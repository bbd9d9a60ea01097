"""Transducers in ONNX files: tiny random ones in the forms of icefall's and of NeMo's exports."""

from __future__ import annotations

import copy
import itertools
import pickle
import shutil
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asr.audio.fbank import LOG_FLOOR, Fbank
from asr.errors import AsrError
from asr.models.external.nemo_features import NemoFeatures
from asr.models.external.onnx import in_unit_range
from asr.models.transducers import load_transducer
from asr.models.transducers.onnx import OnnxTransducer
from asr.transducer import TransducerDecoder
from tests.models.external_audio import assert_rows_are_independent, greedy_path, noise, token_log_probs

pytestmark = pytest.mark.slow

PIECES = ["<unk>", "▁a", "b", "c", "▁", "a"]
OF_ICEFALL = ["<blk>", *PIECES]
OF_NEMO = [*PIECES, "<blk>"]
OF_PARTS = {"vocab_size": str(len(PIECES)), "subsampling_factor": "2", "pred_rnn_layers": "2", "pred_hidden": "8"}
BATCH = [noise(0.3, 1), noise(0.2, 2)]


class Encoder(nn.Module):
    """Every other frame (N, T, F)."""

    def __init__(self, num_features: int = 80) -> None:
        super().__init__()
        self.linear = nn.Linear(num_features, 6)

    def forward(self, x: Tensor, x_lens: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x[:, ::2]), torch.div(x_lens + 1, 2, rounding_mode="floor")


class StatelessDecoder(nn.Module):
    """icefall's: a convolution over the last tokens; there is none where one is negative."""

    def __init__(self, context_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(OF_ICEFALL), 8)
        self.conv = nn.Conv1d(8, 8, context_size)
        self.linear = nn.Linear(8, 6)

    def forward(self, y: Tensor) -> Tensor:
        y = y.long()
        embedded = self.embedding(y.clamp(min=0)) * (y >= 0).unsqueeze(-1)
        return self.linear(self.conv(embedded.permute(0, 2, 1)).squeeze(2))


class Joiner(nn.Module):
    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, num_columns)

    def forward(self, encoder_out: Tensor, decoder_out: Tensor) -> Tensor:
        return self.linear(torch.tanh(encoder_out + decoder_out))


class TransposedEncoder(Encoder):
    def forward(self, audio_signal: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        encoded, num_frames = super().forward(audio_signal.transpose(1, 2), length)
        return encoded.transpose(1, 2), num_frames


class Lstm(nn.Module):
    """NeMo's prediction network."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(OF_NEMO), 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2)
        self.linear = nn.Linear(8, 6)

    def forward(self, targets: Tensor, target_length: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        output, (h, c) = self.lstm(self.embedding(targets.long()).transpose(0, 1), (h, c))
        return self.linear(output).permute(1, 2, 0) * target_length[:, None, None], target_length, h, c


class TransposedJoiner(Joiner):
    def forward(self, encoder_outputs: Tensor, decoder_outputs: Tensor) -> Tensor:
        encoded, predicted = encoder_outputs.transpose(1, 2).unsqueeze(2), decoder_outputs.transpose(1, 2).unsqueeze(1)
        return super().forward(encoded, predicted).log_softmax(3)


def export(
    path: Path, network: nn.Module, inputs: dict[str, Tensor], outputs: str, metadata: dict[str, str] | None = None
) -> None:
    """Writes a file; sizes of inputs that are 3 or 30 may vary."""
    onnx = pytest.importorskip("onnx")
    legacy = {} if torch.__version__.startswith("1.") else {"dynamo": False}
    axes = {
        name: {n: f"{name}{n}" for n, size in enumerate(each.shape) if size in (3, 30)} for name, each in inputs.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network.eval(), tuple(inputs.values()), str(path), opset_version=17, input_names=list(inputs),
            output_names=outputs.split(), dynamic_axes=axes, **legacy,
        )  # fmt: skip
    model = onnx.load(str(path))
    onnx.helper.set_model_props(model, metadata or {})
    onnx.save(model, str(path))


def export_encoder(folder: Path, network: nn.Module, metadata: dict[str, str], num_utts: int = 3) -> None:
    if isinstance(network, TransposedEncoder):
        inputs = {"audio_signal": torch.zeros(num_utts, network.linear.in_features, 30)}
        inputs["length"] = torch.full((num_utts,), 30)
        export(folder / "encoder.onnx", network, inputs, "outputs encoded_lengths", metadata)
    else:
        inputs = {"x": torch.zeros(num_utts, 30, 80), "x_lens": torch.full((num_utts,), 30)}
        export(folder / "encoder.onnx", network, inputs, "encoder_out encoder_out_lens", metadata)


def write_tokens(folder: Path, symbols: list[str]) -> None:
    (folder / "tokens.txt").write_text("".join(f"{symbol} {n}\n" for n, symbol in enumerate(symbols)), "utf-8")


def of_icefall(folder: Path, context_size: int = 2, type_: torch.dtype = torch.int64) -> tuple[Any, Any, Any]:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    encoder, decoder, joiner = Encoder(), StatelessDecoder(context_size), Joiner(len(OF_ICEFALL))
    export_encoder(folder, encoder, {"model_type": "zipformer2"})
    export(
        folder / "decoder.onnx", decoder, {"y": torch.zeros(3, context_size, dtype=type_)}, "decoder_out",
        {"context_size": str(context_size), "vocab_size": str(len(OF_ICEFALL))},
    )  # fmt: skip
    outputs = {"encoder_out": torch.zeros(3, 6), "decoder_out": torch.zeros(3, 6)}
    export(folder / "joiner.onnx", joiner, outputs, "logit", {"joiner_dim": "6"})
    write_tokens(folder, OF_ICEFALL)
    return encoder, decoder, joiner


def lstm_inputs() -> dict[str, Tensor]:
    inputs = {"targets": torch.zeros(3, 1, dtype=torch.int32), "target_length": torch.ones(3, dtype=torch.int32)}
    return inputs | {name: torch.zeros(2, 3, 8) for name in ("states.1", "onnx::Slice_3")}


def of_nemo(folder: Path, num_durations: int = 0, num_features: int = 80) -> tuple[Any, Any, Any]:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    encoder, decoder, joiner = TransposedEncoder(num_features), Lstm(), TransposedJoiner(len(OF_NEMO) + num_durations)
    export_encoder(folder, encoder, {**OF_PARTS, "normalize_type": "per_feature"})
    export(folder / "decoder.onnx", decoder, lstm_inputs(), "outputs prednet_lengths states cells")
    outputs = {"encoder_outputs": torch.zeros(3, 6, 1), "decoder_outputs": torch.zeros(3, 6, 1)}
    export(folder / "joiner.onnx", joiner, outputs, "outputs")
    write_tokens(folder, OF_NEMO)
    return encoder, decoder, joiner


def frames_of(features: Any, utterance: Tensor) -> Tensor:
    return features(utterance[None], torch.tensor([len(utterance)]))[0][0]


@pytest.mark.parametrize("type_", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("context_size", [1, 2, 4])
@torch.no_grad()
def test_transducers_of_icefall(tmp_path: Path, context_size: int, type_: torch.dtype) -> None:
    encoder, decoder, joiner = of_icefall(tmp_path, context_size, type_)
    model = load_transducer(f"onnx:{tmp_path}")
    assert (model.name, model.tokens.symbols, model.tokens.blank_id) == (f"onnx:{tmp_path}", tuple(OF_ICEFALL), 0)
    assert (model.sampling_rate, model.durations) == (16000, ())
    assert model.frame_shift == pytest.approx(0.02)
    encoded, num_frames = model(BATCH)
    assert num_frames.tolist() == [15, 10]
    labels = [2, 2, 1, 5, 4]
    context = torch.tensor([[-1] * (context_size - 1) + [0, *labels]]).unfold(1, context_size, 1)[0]
    predicted = decoder(context)
    for utterance, found, num in zip(BATCH, encoded, num_frames, strict=True):
        wanted = encoder.linear(in_unit_range(frames_of(Fbank(high_freq=-400.0), utterance))[::2])
        assert torch.allclose(found[:num], wanted, atol=1e-4)
        logits = joiner(wanted[:, None], predicted)
        assert torch.allclose(token_log_probs(model, found[:num], labels), logits.log_softmax(2), atol=1e-4)


@pytest.mark.parametrize("num_durations", [0, 5])
@pytest.mark.parametrize("num_features", [80, 128])
@torch.no_grad()
def test_transducers_of_nemo(tmp_path: Path, num_durations: int, num_features: int) -> None:
    encoder, decoder, joiner = of_nemo(tmp_path, num_durations, num_features)
    model = load_transducer(f"onnx:{tmp_path}")
    assert (model.tokens.symbols, model.tokens.blank_id) == (tuple(OF_NEMO), 6)
    assert (model.frame_shift, model.durations) == (0.02, (0, 1, 2, 3, 4)[:num_durations])
    encoded, num_frames = model(BATCH)
    assert num_frames.tolist() == [16, 11]
    labels, zeros = [2, 2, 1, 5, 4], torch.zeros(2, 1, 8)
    output, _ = decoder.lstm(decoder.embedding(torch.tensor([6, *labels]))[:, None], (zeros, zeros))
    for utterance, found, num in zip(BATCH, encoded, num_frames, strict=True):
        wanted = encoder.linear(frames_of(NemoFeatures(num_features, 16000, "per_feature"), utterance)[::2])
        assert torch.allclose(found[:num], wanted, atol=1e-4)
        logits = joiner.linear(torch.tanh(wanted[:, None] + decoder.linear(output[:, 0])))
        log_prob = logits[:, :, : len(OF_NEMO)].log_softmax(2)
        assert torch.allclose(token_log_probs(model, found[:num], labels), log_prob, atol=1e-4)
        durations = model.join(found[:num], model.start()[0].expand(num, -1))[:, len(OF_NEMO) :]
        assert durations.shape[1] == num_durations
        if num_durations:
            assert torch.allclose(durations.log_softmax(1), logits[:, 0, len(OF_NEMO) :].log_softmax(1), atol=1e-4)


@pytest.mark.parametrize("of_toolkit", [of_icefall, of_nemo])
def test_rows_are_independent(tmp_path: Path, of_toolkit: Any) -> None:
    of_toolkit(tmp_path)
    model = load_transducer(f"onnx:{tmp_path}")
    predicted, state = model.start()
    assert {len(each) for each in (predicted, *state)} == {1}
    assert_rows_are_independent(model)
    encoded, (num_frames,) = model(BATCH[0])
    assert greedy_path(model, encoded[0, :num_frames])


@pytest.mark.parametrize("of_toolkit", [of_icefall, of_nemo])
def test_encoders_of_one_recording(tmp_path: Path, of_toolkit: Any) -> None:
    encoder, _, _ = of_toolkit(tmp_path)
    wanted, num_wanted = load_transducer(f"onnx:{tmp_path}")(BATCH)
    export_encoder(tmp_path, encoder, OF_PARTS, num_utts=1)
    found, num_frames = load_transducer(f"onnx:{tmp_path}")(BATCH)
    assert torch.equal(num_frames, num_wanted)
    assert torch.allclose(found[1, : num_frames[1]], wanted[1, : num_frames[1]], atol=1e-4)


def test_copies_read_the_same_files_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_nemo(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = OnnxTransducer("encoder.onnx", "decoder.onnx", "joiner.onnx", frame_shift=0.03)
    monkeypatch.chdir("/")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (copied.frame_shift, copied.tokens.symbols) == (0.03, tuple(OF_NEMO))
        assert torch.equal(copied(BATCH)[0], model(BATCH)[0])


def test_the_piece_model_of_the_folder_spells_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Processor:
        def __init__(self, model_file: str) -> None:
            assert model_file == str(tmp_path / "bpe.model")

        def encode(self, text: str, out_type: type[str]) -> list[str]:
            return ["▁", *text]

    module = ModuleType("sentencepiece")
    module.SentencePieceProcessor = Processor  # type: ignore[attr-defined]
    module.__spec__ = ModuleSpec("sentencepiece", None)
    monkeypatch.setitem(sys.modules, "sentencepiece", module)
    of_icefall(tmp_path)
    assert load_transducer(f"onnx:{tmp_path}").tokens.spell("abc") == [("▁a", "b", "c")]
    (tmp_path / "bpe.model").touch()
    assert load_transducer(f"onnx:{tmp_path}").tokens.spell("abc") == [("▁", "a", "b", "c")]


def test_files_of_8_bits_are_taken_if_asked_for_or_alone(tmp_path: Path) -> None:
    of_icefall(tmp_path)
    shutil.copy(tmp_path / "encoder.onnx", tmp_path / "encoder.int8.onnx")
    with pytest.warns(UserWarning, match=f"^onnx:{tmp_path}: encoder.onnx is used, not encoder.int8.onnx; int8=True"):
        model: Any = load_transducer(f"onnx:{tmp_path}")
    assert model._encoder.path.name == "encoder.onnx"
    with pytest.warns(UserWarning, match="encoder.int8.onnx is used, not encoder.onnx; int8=False would"):
        model = load_transducer(f"onnx:{tmp_path}", int8=True)
    assert [each.path.name for each in (model._encoder, model._decoder)] == ["encoder.int8.onnx", "decoder.onnx"]
    (tmp_path / "encoder.onnx").unlink()
    model = load_transducer(f"onnx:{tmp_path}")
    assert model._encoder.path.name == "encoder.int8.onnx"


def test_folders_without_the_files_are_told(tmp_path: Path) -> None:
    of_icefall(tmp_path)
    shutil.copy(tmp_path / "joiner.onnx", tmp_path / "joiner-epoch-9.onnx")
    message = r"one file joiner\*.onnx, but this folder has joiner-epoch-9.onnx, joiner.onnx; give a folder with one"
    with pytest.raises(AsrError, match=f"^onnx:{tmp_path}: a transducer has {message}"):
        load_transducer(f"onnx:{tmp_path}")
    for path in tmp_path.glob("joiner*"):
        path.unlink()
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(AsrError, match=f"^onnx:{folder}: a transducer has one file .*, but this folder has none"):
            load_transducer(f"onnx:{folder}")
    of_icefall(tmp_path)
    (tmp_path / "tokens.txt").unlink()
    with pytest.raises(AsrError, match=f"^onnx:{tmp_path}/encoder.onnx: its tokens are unknown; put tokens.txt next"):
        load_transducer(f"onnx:{tmp_path}")
    (tmp_path / "decoder.onnx").write_bytes(b"nothing")
    with pytest.raises(AsrError, match=f"^onnx:{tmp_path}/decoder.onnx: this is not a readable ONNX file"):
        load_transducer(f"onnx:{tmp_path}")


def test_files_of_other_forms_are_told(tmp_path: Path) -> None:
    of_icefall(tmp_path)
    files = {part: (tmp_path / f"{part}.onnx").read_bytes() for part in ("encoder", "decoder", "joiner")}
    for part, other, message in (
        ("decoder", "joiner", "decoder.onnx: its inputs encoder_out, decoder_out are neither tokens, nor a token"),
        ("joiner", "encoder", "joiner.onnx: its inputs x, x_lens are not an output of the encoder and one of the"),
        ("encoder", "joiner", "encoder.onnx: its inputs encoder_out, decoder_out are neither a signal and its lengths"),
    ):
        (tmp_path / f"{part}.onnx").write_bytes(files[other])
        with pytest.raises(AsrError, match=f"^onnx:{tmp_path}/{message}.*; export it "):
            load_transducer(f"onnx:{tmp_path}")
        (tmp_path / f"{part}.onnx").write_bytes(files[part])

    class Flat(Joiner):
        def forward(self, encoder_out: Tensor, decoder_out: Tensor) -> Tensor:
            return super().forward(encoder_out, decoder_out).flatten()

    outputs = {"encoder_out": torch.zeros(3, 6), "decoder_out": torch.zeros(3, 6)}
    export(tmp_path / "joiner.onnx", Flat(len(OF_ICEFALL)), outputs, "logit")
    with pytest.raises(AsrError, match=f"^onnx:{tmp_path}/joiner.onnx: its output has no row for each hypothesis; exp"):
        load_transducer(f"onnx:{tmp_path}")


def test_decoders_that_do_not_return_their_states_are_told(tmp_path: Path) -> None:
    class Forgetful(Lstm):
        def forward(self, targets: Tensor, target_length: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
            return super().forward(targets, target_length, h, c)[:2]

    of_nemo(tmp_path)
    export(tmp_path / "decoder.onnx", Forgetful(), lstm_inputs(), "outputs prednet_lengths")
    with pytest.raises(AsrError, match=f"^onnx:{tmp_path}/decoder.onnx: its inputs .* are neither .*; export it"):
        load_transducer(f"onnx:{tmp_path}")


class StreamingEncoder(nn.Module):
    """In the form of icefall's: a convolution over every other frame, whose left context is a state, and a counter.

    Its output depends on all that came before, and on all frames of the chunk, as far as the next one begins.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(80, 6, 5)

    def forward(self, x: Tensor, cached_conv_0: Tensor, processed_lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        frames = torch.cat([cached_conv_0, x.transpose(1, 2)], dim=2)
        encoded = self.conv(frames)[:, :, :8:2] + processed_lens[:, None, None].float() / 100
        return encoded.transpose(1, 2), frames[:, :, 8:10], processed_lens + 4


CHUNK, SHIFT = 11, 8  # features; 4 frames of output


def streaming(folder: Path, metadata: dict[str, str] | None = None, signal: str = "x") -> StreamingEncoder:
    of_icefall(folder)
    torch.manual_seed(1)
    encoder = StreamingEncoder()
    inputs = {signal: torch.zeros(1, CHUNK, 80), "cached_conv_0": torch.zeros(1, 80, 2)}
    inputs["processed_lens"] = torch.zeros(1, dtype=torch.int64)
    sizes = (
        {"T": str(CHUNK), "decode_chunk_len": str(SHIFT), "subsampling_factor": "2"} if metadata is None else metadata
    )
    outputs = "encoder_out new_cached_conv_0 new_processed_lens"
    export(folder / "encoder.onnx", encoder, inputs, outputs, {"model_type": "zipformer2", **sizes})
    return encoder


def chunk_by_chunk(encoder: StreamingEncoder, utterance: Tensor) -> Tensor:
    features = in_unit_range(frames_of(Fbank(high_freq=-400.0), utterance))
    num_chunks = -(-len(features) // SHIFT)
    padded = torch.full((CHUNK + (num_chunks - 1) * SHIFT, 80), LOG_FLOOR)
    padded[: len(features)] = features
    states, found = (torch.zeros(1, 80, 2), torch.zeros(1, dtype=torch.int64)), []
    for begin in range(0, num_chunks * SHIFT, SHIFT):
        encoded, *states = encoder(padded[None, begin : begin + CHUNK], *states)
        found.append(encoded[0])
    return torch.cat(found)


@torch.no_grad()
def test_streaming_encoders_read_chunk_by_chunk(tmp_path: Path) -> None:
    encoder = streaming(tmp_path)
    model = load_transducer(f"onnx:{tmp_path}")
    assert model.frame_shift == pytest.approx(0.02)
    encoded, num_frames = model(BATCH)
    assert num_frames.tolist() == [16, 12]
    for utterance, found, num in zip(BATCH, encoded, num_frames, strict=True):
        wanted = chunk_by_chunk(encoder, utterance)
        assert torch.allclose(found[:num], wanted, atol=1e-4)
    for sizes in ((1, 7, 300, 1280, 80), (4000,), (160, 0, 1)):
        reader, rest, parts = model.stream(), BATCH[0], []
        assert reader.chunk_samples == SHIFT * 160
        for size in itertools.cycle(sizes):
            if not len(rest):
                break
            parts.append(reader.accept(rest[:size]))
            rest = rest[size:]
        assert any(len(part) for part in parts)
        parts.append(reader.accept(torch.zeros(0), is_last=True))
        assert torch.allclose(torch.cat(parts), encoded[0], atol=1e-5)
    assert model.stream().accept(torch.zeros(0)).shape == (0, 6)


@torch.no_grad()
def test_streams_have_language_models_and_hot_words_inside(tmp_path: Path) -> None:
    streaming(tmp_path)
    model = load_transducer(f"onnx:{tmp_path}")
    for arguments in ({}, {"words": ["ab", "ac", "a"], "hot_words": {"ac": 9.0}, "token_min_log_prob": -20.0}):
        decoder = TransducerDecoder(model, **arguments)
        (whole,), _ = decoder(*model([noise(1.2, 3), noise(0.4, 4)]))
        reader, stream = model.stream(), decoder.stream()
        for piece in noise(1.2, 3).split(1000):
            stream.accept(reader.accept(piece))
        stream.accept(reader.accept(torch.zeros(0), is_last=True))
        assert stream.finish().tokens == whole.tokens
        assert len(whole.tokens) > 2
    assert "ac" in whole.text.split()


def test_copies_of_streaming_transducers(tmp_path: Path) -> None:
    streaming(tmp_path)
    model = load_transducer(f"onnx:{tmp_path}")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(BATCH)[0], model(BATCH)[0])


def test_transducers_of_whole_utterances_do_not_stream(tmp_path: Path) -> None:
    of_icefall(tmp_path)
    with pytest.raises(AsrError, match=f"^onnx:{tmp_path}: its encoder keeps no states and reads whole utterances"):
        load_transducer(f"onnx:{tmp_path}").stream()


@pytest.mark.parametrize(
    ("metadata", "signal", "message"),
    [
        ({}, "x", r"it keeps states \(cached_conv_0, processed_lens\), but its metadata have no field 'T'"),
        ({"T": "11"}, "x", "its metadata have no field 'decode_chunk_len'"),
        ({"T": "11", "decode_chunk_len": "12"}, "x", "its metadata say that chunks have T = 11 frames and"),
        (
            {"T": "9" * 12, "decode_chunk_len": "8"},
            "x",
            "the field 'T' of its metadata is above 10000, which would fill",
        ),
        ({"T": "9", "decode_chunk_len": "8"}, "x", "onnxruntime cannot run it"),
        (
            {},
            "audio_signal",
            "it reads audio_signal and keeps states .*; of networks with states, only those that read",
        ),
    ],
)
def test_streaming_encoders_that_are_refused(
    tmp_path: Path, metadata: dict[str, str], signal: str, message: str
) -> None:
    streaming(tmp_path, metadata, signal)
    with pytest.raises(AsrError, match=f"^onnx:{tmp_path}/encoder.onnx: {message}"):
        load_transducer(f"onnx:{tmp_path}")


def test_files_that_do_not_belong_together_are_told(tmp_path: Path) -> None:
    of_nemo(tmp_path, num_durations=5)
    write_tokens(tmp_path, OF_NEMO[1:])
    with pytest.raises(
        AsrError, match=f"^onnx:{tmp_path}: the networks have 7 tokens, but the list has 6; give theirs"
    ):
        load_transducer(f"onnx:{tmp_path}")
    for num_durations, num_columns in ((1, 8), (-1, 6)):
        of_nemo(tmp_path, num_durations)
        message = (
            f"joiner.onnx: its output has {num_columns} columns for 7 tokens and any durations, of which there are"
        )
        with pytest.raises(AsrError, match=f"^onnx:{tmp_path}/{message}"):
            load_transducer(f"onnx:{tmp_path}")
    of_icefall(tmp_path)
    write_tokens(tmp_path, OF_ICEFALL[:-1])
    with pytest.raises(
        AsrError, match=f"^onnx:{tmp_path}: the networks have 7 tokens, but the list has 6; give theirs"
    ):
        load_transducer(f"onnx:{tmp_path}")
    write_tokens(tmp_path, OF_ICEFALL)
    joiner = Joiner(len(OF_ICEFALL))
    joiner.linear = nn.Linear(5, len(OF_ICEFALL))
    outputs = {"encoder_out": torch.zeros(3, 5), "decoder_out": torch.zeros(3, 5)}
    export(tmp_path / "joiner.onnx", joiner, outputs, "logit")
    with pytest.raises(AsrError, match=f"^onnx:{tmp_path}/joiner.onnx: onnxruntime cannot run it"):
        load_transducer(f"onnx:{tmp_path}")


@pytest.mark.parametrize(
    ("of_toolkit", "field", "value", "message"),
    [
        (of_nemo, "pred_hidden", "many", "the field 'pred_hidden' of its metadata is 'many'; give a whole number"),
        (of_nemo, "pred_hidden", "9" * 30, "the field 'pred_hidden' of its metadata is above 10000, which would fill"),
        (of_nemo, "pred_rnn_layers", None, "its metadata have no field 'pred_rnn_layers'; export it again with it"),
        (of_nemo, "vocab_size", None, "its metadata have no field 'vocab_size'; export it again with it"),
        (of_nemo, "is_giga_am", "1", "its metadata say is_giga_am = 1, so that it reads features"),
        (of_icefall, "subsampling_factor", "0", "the field 'subsampling_factor' of its metadata is '0'; give"),
    ],
)
def test_bad_metadata_are_told(tmp_path: Path, of_toolkit: Any, field: str, value: str | None, message: str) -> None:
    encoder, _, _ = of_toolkit(tmp_path)
    metadata = {**OF_PARTS, field: value}
    export_encoder(tmp_path, encoder, {name: each for name, each in metadata.items() if each is not None})
    with pytest.raises(AsrError, match=f"^onnx:{tmp_path}/encoder.onnx: {message}"):
        load_transducer(f"onnx:{tmp_path}")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "its metadata have no field 'context_size'; export it again with it"),
        ({"context_size": "9" * 12}, "the field 'context_size' of its metadata is above 10000, which would fill"),
        ({"context_size": "3"}, "onnxruntime cannot run it .*Got: 3 Expected: 2"),
    ],
)
def test_bad_context_sizes_are_told(tmp_path: Path, metadata: dict[str, str], message: str) -> None:
    _, decoder, _ = of_icefall(tmp_path)
    export(tmp_path / "decoder.onnx", decoder, {"y": torch.zeros(3, 2, dtype=torch.int64)}, "decoder_out", metadata)
    with pytest.raises(AsrError, match=f"^onnx:{tmp_path}/decoder.onnx: {message}"):
        load_transducer(f"onnx:{tmp_path}")


def test_weights_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    _, decoder, _ = of_icefall(tmp_path)
    assert decoder
    import onnx

    path = tmp_path / "decoder.onnx"
    model = onnx.load(str(path))
    weight = model.graph.initializer[0]
    (tmp_path.parent / "weights").write_bytes(weight.raw_data)
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../weights")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(AsrError, match=f"^onnx:{path}: it has weights in '../weights', which is not in its folder"):
        load_transducer(f"onnx:{tmp_path}")
