"""Acoustic models from elsewhere in the recognizer, in bundles and on the command line."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor, nn

import asr
from asr.bundle import Bundle
from asr.cli.main import main
from asr.ctc.bundles import bundle_with_acoustic_model
from asr.ctc.word_models import uniform_ngram
from asr.decoding.settings import ResourceOptions
from asr.errors import AsrError
from asr.models.external import CallableModel
from asr.models.external.network import ExternalNetwork
from asr.models.external.torchscript import save
from asr.recognizer import Recognizer
from asr.testing.tones import PITCH, PRONUNCIATIONS, RATE, tones
from asr.text.ctc_tokens import CTCTokens
from asr.text.lexicon import Lexicon
from asr.text.plain_form import PlainForm, PlainTokens

PHONES = sorted(PITCH)
# Each letter of these words has the pitch of a phone of `asr.testing.tones`, so that letters can be heard, too.
LETTER_OF = {"P": "a", "T": "b", "K": "c", "S": "d"}
SPELLED = {word: "".join(LETTER_OF[phone] for phone in ways[0]) for word, ways in PRONUNCIATIONS.items()}
SHIFT = 320


class Pitches(nn.Module):
    """Hears which tone sounds in each 20 ms: log-probabilities of blank, tones and, if asked for, a word boundary."""

    def __init__(self, order: list[int], has_boundary: bool) -> None:
        super().__init__()
        time = torch.arange(SHIFT) / RATE
        pitch = torch.tensor([PITCH[phone] for phone in PHONES])
        angle = 2 * torch.pi * pitch[:, None] * time
        self.register_buffer("waves", torch.cat([angle.sin(), angle.cos()]))
        self.order = order
        self.has_boundary = has_boundary

    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        assert waveform.shape[1] >= 400, "as convolutions over samples have it"
        num_frames = waveform.shape[1] // 320
        frames = waveform[:, : num_frames * 320].reshape(waveform.shape[0], num_frames, 320)
        parts = (frames @ self.waves.t()) ** 2
        power = (parts[:, :, :4] + parts[:, :, 4:]).sqrt()
        silence = torch.full_like(power[:, :, :1], 8.0)
        heard = [silence, power]
        if self.has_boundary:
            # Sure of it half of the time: silence is blank or boundary.
            heard.append(silence - 0.5)
        return torch.cat(heard, dim=2)[:, :, self.order].log_softmax(2), torch.div(
            num_samples, 320, rounding_mode="floor"
        )


def phone_model() -> CallableModel:
    """Phones, the blank last."""
    network = Pitches([1, 2, 3, 4, 0], has_boundary=False)
    return CallableModel(network, CTCTokens([*PHONES, "<blk>"], kind="phones"), RATE, SHIFT / RATE, "phones")


def letter_model() -> CallableModel:
    symbols = ["<blk>", *(LETTER_OF[phone] for phone in PHONES), "|"]
    return CallableModel(Pitches([0, 1, 2, 3, 4, 5], has_boundary=True), symbols, RATE, SHIFT / RATE, "letters")


def scripted(path: Path) -> str:
    model: Any = phone_model()
    metadata = {"sampling_rate": RATE, "frame_shift": SHIFT / RATE}
    save(torch.jit.script(model._function), path, model.tokens, **metadata)
    return f"torchscript:{path}"


@pytest.fixture(scope="module")
def bundle(tiny_bundle_folder: Path) -> Bundle:
    return Bundle.load(tiny_bundle_folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


@pytest.mark.slow
def test_a_network_of_the_bundles_tokens_takes_its_graph(bundle: Bundle, cache: Path) -> None:
    recognizer = Recognizer(bundle, acoustic_model=phone_model(), decoder="token-passing")
    assert recognizer.bundle.graph is bundle.graph
    assert not cache.exists()
    (result,) = recognizer(tones(["PAT", "TO", "KIT"]))
    assert result.text == "PAT TO KIT"
    assert result.words[0].start == pytest.approx(0.1, abs=0.03)
    # Recordings shorter than the network's window, other rates, lists, copies.
    assert recognizer(torch.zeros(20))[0].text == ""
    assert recognizer([torch.zeros(20), tones(["SICK"])])[1].text == "SICK"
    assert recognizer(tones(["SKIP"], rate=8000), sampling_rate=8000)[0].text in ("SKIP", "SKIP TO")
    assert copy.deepcopy(recognizer)(tones(["SICK"]))[0].text == "SICK"
    assert recognizer.bundle.fingerprint != bundle.fingerprint


def test_bundle_without_effect_beside_a_graph_is_refused(bundle: Bundle, cache: Path, tmp_path: Path) -> None:
    bundle.graph.save(tmp_path / "graph.safetensors")
    graph = tmp_path / "graph.safetensors"
    with pytest.raises(AsrError, match="bundle tones has no effect here"):
        bundle_with_acoustic_model(phone_model(), bundle, graph=graph)
    assert bundle_with_acoustic_model(phone_model(), bundle, bundle.small_ngram, graph=graph).rnn_lm is bundle.rnn_lm


@pytest.mark.slow
@pytest.mark.parametrize("is_cased", [False, True])
def test_words_in_another_letter_case(is_cased: bool, cache: Path) -> None:
    """Of a network of lower-case letters, or of letters in both cases and a comma."""
    symbols = ["<blk>", *(LETTER_OF[phone] for phone in PHONES), "|"]
    if is_cased:
        symbols = [",", symbols[1].upper(), *symbols[2:], symbols[1], "<blk>"]
    order = [0, 1, 2, 3, 4, 5, 1, 0] if is_cased else [0, 1, 2, 3, 4, 5]  # where two are alike, both are heard
    model = CallableModel(Pitches(order, has_boundary=True), symbols, RATE, SHIFT / RATE, "letters")
    words = {word: spelled.upper() for word, spelled in SPELLED.items()}
    made = bundle_with_acoustic_model(model, ngram=uniform_ngram(sorted(set(words.values()))))
    network = made.acoustic_model
    assert network is not None and network.arguments.get("separators") == ("-‐‑–—" if is_cased else None)
    assert ExternalNetwork(**network.arguments).tokens.table == made.graph.tokens
    for said in (["PAT", "TO", "KIT"], ["SKIP", "PAT"]):
        (result,) = Recognizer(made, decoder="token-passing")(tones(said))
        assert result.text == " ".join(words[word] for word in said)


@pytest.mark.slow
def test_tokens_in_plain_form_stay_so(cache: Path, tmp_path: Path) -> None:
    """If the user has chosen it, also with a lexicon; the network's boundary is a space."""
    first, *others = (LETTER_OF[phone] for phone in PHONES)
    symbols = [",", first.upper(), *others, " ", first, "<blk>"]
    tokens = PlainTokens(CTCTokens(symbols), PlainForm())
    model = CallableModel(Pitches([0, 1, 2, 3, 4, 5, 1, 0], has_boundary=True), tokens, RATE, SHIFT / RATE, "letters")
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("".join(f"{word} {' '.join(spelled)} |\n" for word, spelled in SPELLED.items()))
    made = bundle_with_acoustic_model(model, lexicon=lexicon)
    assert made.acoustic_model is not None
    assert ExternalNetwork(**made.acoustic_model.arguments).tokens.table == made.graph.tokens == tokens.table
    (result,) = Recognizer(made, decoder="token-passing")(tones(["PAT", "SICK"]))
    assert result.text == "PAT SICK"


@pytest.mark.slow
def test_other_tokens_get_a_graph_which_is_kept(bundle: Bundle, cache: Path, tmp_path: Path) -> None:
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("".join(f"{word} {' '.join(spelled)} |\n" for word, spelled in SPELLED.items()))
    steps: list[str] = []
    made = bundle_with_acoustic_model(letter_model(), bundle, lexicon=lexicon, progress=steps.append)
    assert "composition" in steps
    assert made.large_ngram is bundle.large_ngram and made.rnn_lm is bundle.rnn_lm
    recognizer = Recognizer(made, "large_ngram", decoder="token-passing", options={"lm_scale": 1.0, "graph_scale": 1.0})
    for words in (["PAT", "TO", "KIT"], ["SKIP", "PAT", "TWO"]):
        (result,) = recognizer(tones(words))
        assert result.text == " ".join(words)
        assert result.is_complete
    # The boundary is part of no word.
    first, second = result.words[:2]
    assert first.start == pytest.approx(0.1, abs=0.03) and first.end == pytest.approx(0.46, abs=0.03)
    assert second.start == pytest.approx(0.56, abs=0.03)
    assert len(list(cache.glob("*.safetensors"))) == 1
    from asr.ctc import graphs

    graphs._kept_graphs.clear()
    steps.clear()
    again = bundle_with_acoustic_model(letter_model(), bundle, lexicon=lexicon, progress=steps.append)
    assert steps == []
    assert torch.equal(again.graph.token_id, made.graph.token_id)
    assert torch.equal(again.small_ngram.arrays.score, made.small_ngram.arrays.score)  # type: ignore[union-attr]


def test_recurrent_model_runs_as_its_bundle_says(bundle: Bundle, cache: Path) -> None:
    options = {"rnn": {"lm_scale": 0.2, "hidden_dtype": "int8"}, "interpolated": {"rnn_weight": 0.1}}
    lexicon = Lexicon({word: [(*spelled, "|")] for word, spelled in SPELLED.items()})
    made = bundle_with_acoustic_model(letter_model(), replace(bundle, decoding=options), lexicon=lexicon)
    recognizer = Recognizer(made, "rnn", decoder="token-passing")
    assert recognizer.settings.cache.hidden_dtype == "int8"
    assert recognizer.options.lm_scale == 1.25
    interpolated = Recognizer(made, "interpolated", decoder="token-passing").settings
    assert (interpolated.cache.hidden_dtype, interpolated.language_models.rnn_weight) == ("float32", 0.1)


def test_what_is_missing_is_one_sentence(bundle: Bundle, cache: Path, tmp_path: Path) -> None:
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("PAT P T\n")
    with pytest.raises(AsrError, match="the acoustic model's tokens are phones; give a lexicon"):
        bundle_with_acoustic_model(phone_model(), None, bundle.small_ngram)
    with pytest.raises(AsrError, match="has no words of its own; give an n-gram model"):
        bundle_with_acoustic_model(letter_model())
    with pytest.raises(AsrError, match="can be spelled in these"):
        bundle_with_acoustic_model(letter_model(), bundle)
    with pytest.raises(AsrError, match="symbols of its spellings are not tokens of the network"):
        bundle_with_acoustic_model(letter_model(), bundle, lexicon=lexicon)
    with pytest.raises(
        AsrError, match=r"acoustic_model is of type Linear; give its name KIND:NAME, or .*CallableModel"
    ):
        Recognizer(bundle, acoustic_model=nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(AsrError, match="needs an external acoustic model"):
        Recognizer.from_folder(tmp_path, ngram=tmp_path / "3gram.arpa")
    with pytest.raises(AsrError, match="reads whole utterances; it cannot stream"):
        asr.StreamingRecognizer(Recognizer(bundle, "ngram", acoustic_model=phone_model()))


@pytest.mark.slow
def test_words_of_a_lexicon_alone(cache: Path, tmp_path: Path) -> None:
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text(
        "".join(f"{word} {' '.join(ways[0])}\n" for word, ways in PRONUNCIATIONS.items() if word != "TO")
    )
    recognizer = asr.load(acoustic_model=scripted(tmp_path / "a.pt"), lexicon=lexicon, decoder="token-passing")
    assert recognizer.mode == "ngram"
    assert recognizer(tones(["PAT", "TWO", "KIT"]))[0].text == "PAT TWO KIT"


@pytest.mark.slow
def test_transcribe(tiny_bundle_folder: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = tmp_path / "a.wav"
    soundfile.write(recording, tones(["PAT", "TO", "KIT"]).numpy(), RATE)
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("".join(f"{word} {' '.join(ways[0])}\n" for word, ways in PRONUNCIATIONS.items()))
    name = scripted(tmp_path / "a.pt")
    command = ["transcribe", str(recording), "--bundle", str(tiny_bundle_folder), "--acoustic-model", name, "--mode"]
    assert main([*command, "rnn"]) == 0
    assert capsys.readouterr().out == f"{recording}: PAT TO KIT\n"
    for is_first in (True, False):
        assert main([*command, "large_ngram", "--lexicon", str(lexicon), "--lm-scale", "1"]) == 0
        out, err = capsys.readouterr()
        assert out == f"{recording}: PAT TO KIT\n"
        notice = "compiling a decoding graph for the acoustic model's tokens; needed once, it is kept in"
        assert (notice in err) == is_first
        from asr.ctc import graphs

        graphs._kept_graphs.clear()
    for wrong, reason in (
        (["--stream"], "reads whole utterances; it cannot stream"),
        (["--acoustic-model", "kaldi:x"], "is named KIND:NAME"),
    ):
        assert main([*command, "ngram", *wrong]) == 2
        assert reason in capsys.readouterr().err
    assert main(["transcribe", str(recording), "--bundle", str(tiny_bundle_folder), "--ngram", "x.arpa"]) == 2
    assert "--ngram needs --acoustic-model" in capsys.readouterr().err


def test_bundles_hold_no_programs(bundle: Bundle, cache: Path, tmp_path: Path) -> None:
    made = bundle_with_acoustic_model(scripted(tmp_path / "a.pt"), bundle)
    with pytest.raises(AsrError, match="a bundle holds no programs"):
        made.save(tmp_path / "out")
    with pytest.raises(AsrError, match="a bundle can hold an ONNX file"):
        bundle_with_acoustic_model(phone_model(), bundle).save(tmp_path / "out")
    with pytest.raises(AsrError, match=r"byte_matrices .* has no effect on an external acoustic model"):
        replace(made, rnn_lm=None, default_mode=None).save(tmp_path / "out", byte_matrices=True)
    assert not (tmp_path / "out").exists()


def test_the_precision_of_an_external_model_cannot_be_chosen(bundle: Bundle, cache: Path) -> None:
    made = bundle_with_acoustic_model(phone_model(), bundle)
    with pytest.raises(AsrError, match="acoustic_precision has no effect here: an external acoustic model"):
        Recognizer(made, "ngram", resources=ResourceOptions(acoustic_precision="float32"))


@pytest.mark.slow
def test_a_bundle_with_an_onnx_file(
    tiny_bundle_folder: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("".join(f"{word} {' '.join(ways[0])}\n" for word, ways in PRONUNCIATIONS.items()))
    source, out = tmp_path / "tones.onnx", tmp_path / "out"
    assert main(["export", str(tiny_bundle_folder), "--format", "onnx", "--output", str(source)]) == 0
    made_of = ["--acoustic-model", f"onnx:{source}", "--ngram", str(tiny_bundle_folder / "small_ngram.bin")]
    made_of += ["--lexicon", str(lexicon), "--rnn-lm", str(tiny_bundle_folder)]
    assert main(["bundle", str(out), *made_of]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bundle"] == str(out)
    source.unlink()
    assert (out / "acoustic_model.onnx").is_file()
    recognizer = Recognizer.from_folder(out, decoder="token-passing", options={"lm_scale": 0.2, "graph_scale": 1.0})
    assert (recognizer.mode, recognizer.bundle.name) == ("rnn", "out")
    assert recognizer(tones(["PAT", "TO", "KIT"]))[0].text == "PAT TO KIT"
    assert copy.deepcopy(recognizer)(tones(["SICK"]))[0].text == "SICK"
    for wrong, reason in (
        (["--acoustic-model", f"onnx:{out}/acoustic_model.onnx", "--graph", "none.safetensors"], "none.safetensors"),
        (["--acoustic-model", f"onnx:{source}"], "there is no such file"),
    ):
        assert main(["bundle", str(tmp_path / "other"), *made_of, *wrong]) == 2
        assert reason in capsys.readouterr().err
    manifest = json.loads((out / "bundle.json").read_text())
    del manifest["acoustic_model"]["file"], manifest["checksum"]
    (out / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(AsrError, match="'acoustic_model' lacks a valid 'file'"):
        Bundle.load(out)


def test_a_graph_of_openfst_beside_a_network_whose_blank_is_last(
    bundle: Bundle, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("kaldifst", reason="kaldifst is not installed", exc_type=ImportError)
    from asr.graph.fst import Transducer
    from asr.graph.openfst import to_openfst

    graph = bundle.graph
    counts = (graph.word_begin[1:] - graph.word_begin[:-1]).numpy()
    assert counts.max() == 1, "an arc of OpenFst writes one word"
    written = np.zeros(graph.num_arcs, dtype=np.int32)
    written[counts == 1] = graph.word_id.numpy()
    columns = np.array(phone_model().tokens.columns, dtype=np.int32)
    fst = Transducer(
        0,
        graph.arc_begin.numpy(),
        columns[graph.token_id.numpy()] + 1,
        written,
        graph.score.numpy(),
        graph.dst_state.numpy(),
        graph.final_score.numpy(),
    )
    to_openfst(fst).write(str(tmp_path / "HLG.fst"))
    for name, symbols in (("words", graph.vocabulary.words), ("tokens", [*PHONES, "<blk>"])):
        lines = (f"{symbol} {number}\n" for number, symbol in enumerate(symbols))
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    recording, output = tmp_path / "a.wav", tmp_path / "graph.safetensors"
    soundfile.write(recording, tones(["PAT", "TO", "KIT"]).numpy(), RATE)
    files = [f"--words={tmp_path / 'words.txt'}", f"--tokens={tmp_path / 'tokens.txt'}"]
    assert main(["graph", "--from", str(tmp_path / "HLG.fst"), *files, "--output", str(output)]) == 0
    capsys.readouterr()
    command = ["transcribe", str(recording), "--graph", str(output)]
    assert main([*command, "--acoustic-model", scripted(tmp_path / "a.pt")]) == 0
    assert capsys.readouterr().out == f"{recording}: PAT TO KIT\n"
    assert not cache.exists(), "nothing is compiled"
    assert main(command) == 2
    assert "--graph needs --acoustic-model" in capsys.readouterr().err
