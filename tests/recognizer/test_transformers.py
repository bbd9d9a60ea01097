"""A causal Transformer in place of the bundle's recurrent model: in searches, in commands, with CTC networks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asr.bundle import Bundle, read_rnn_lm
from asr.cli.main import main
from asr.ctc import CTCDecoder
from asr.errors import AsrError
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.ngram.model import NgramLM
from asr.lm.transformers import load
from asr.recognizer import Recognizer
from asr.streaming import recognize_stream
from asr.testing.tones import RATE, tones

toy = pytest.importorskip("tests.reference.toy_transformer")

SENTENCES = [["PAT", "TO", "KIT"], ["KIT", "TWO"], ["SICK", "SKIP"], ["PAT"]]
FUSIONS = ["lattice", "chunks", "search"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.saved(tmp_path_factory.mktemp("transformer"))


@pytest.fixture(scope="module")
def bundle(tiny_bundle_folder: Path) -> Bundle:
    return Bundle.load(tiny_bundle_folder)


def recognizer_of(bundle_folder: Path, folder: Path, **arguments: Any) -> Recognizer:
    return Recognizer.from_folder(bundle_folder, rnn_lm=f"transformers:{folder}", **arguments)


def ngram_score(ngram: NgramLM, words: list[str]) -> float:
    context_idx, total = ngram.start(1), 0.0
    for word in ngram.vocabulary.ids_of(words):
        log_prob, context_idx = ngram.score(context_idx, word[None])
        total += float(log_prob)
    return total + float(ngram.final(context_idx))


@pytest.mark.parametrize("lm_fusion", FUSIONS)
def test_results_have_the_scores_of_whole_texts(
    tiny_bundle_folder: Path, bundle: Bundle, folder: Path, lm_fusion: str
) -> None:
    options = {"lm_scale": 0.2, "mbr_scale": math.inf}
    recognizer = recognizer_of(tiny_bundle_folder, folder, mode="rnn", lm_fusion=lm_fusion, options=options)
    assert bundle.small_ngram is not None
    results = recognizer([tones(words, seed=9) for words in SENTENCES], RATE)
    model = toy.model_of()
    for result in results:
        words = [word.text for word in result.words]
        wanted = toy.expected(model, words) - ngram_score(bundle.small_ngram, words)
        assert words and result.lm_score == pytest.approx(wanted, abs=1e-3)


def test_it_is_the_same_as_a_language_model_of_ones_own(tiny_bundle_folder: Path, bundle: Bundle, folder: Path) -> None:
    options = {"lm_scale": 0.2}
    waveforms = [tones(words, seed=9) for words in SENTENCES]
    assert bundle.small_ngram is not None
    lm = CachedRNNLM(load(str(folder), bundle.small_ngram.vocabulary))
    theirs = Recognizer(bundle, language_model=lm, options=options)(waveforms, RATE)
    ours = recognizer_of(tiny_bundle_folder, folder, mode="rnn", options=options)(waveforms, RATE)
    assert [one.text for one in ours] == [one.text for one in theirs]
    assert [one.total for one in ours] == pytest.approx([one.total for one in theirs], abs=1e-3)


@pytest.mark.parametrize("mode", ["rnn", "interpolated"])
def test_streams_second_passes_and_carried_history(tiny_bundle_folder: Path, folder: Path, mode: str) -> None:
    waveform = tones(SENTENCES[0], seed=9)
    options = {"lm_scale": 0.05}
    recognizer = recognizer_of(tiny_bundle_folder, folder, mode=mode, options=options)
    (result,) = recognizer(waveform, RATE)
    assert [event.text for event in recognize_stream(recognizer, [waveform], RATE) if event.is_final] == [result.text]
    second = {"second_pass": "lattice", "second_pass_mode": mode}
    twice = recognizer_of(tiny_bundle_folder, folder, mode="ngram", options={**options, **second})
    assert twice(waveform, RATE)[0].text == result.text
    carried = recognizer_of(tiny_bundle_folder, folder, mode=mode, options={**options, "carry_history": True})
    first, later = carried([waveform, waveform], RATE, sessions=["a", "a"])
    assert first.lm_score != later.lm_score


@pytest.mark.parametrize("name", ["history_precision", "hidden_dtype", "hidden_products"])
def test_options_of_hidden_layers_are_refused(tiny_bundle_folder: Path, folder: Path, name: str) -> None:
    value = "sign" if name == "history_precision" else "int8"
    with pytest.raises(AsrError, match=f"{name} has no effect here: it is for recurrent networks"):
        recognizer_of(tiny_bundle_folder, folder, options={name: value})


@pytest.mark.parametrize("name", ["lm_device_bytes", "lm_hidden_device"])
def test_divided_networks_are_refused(tiny_bundle_folder: Path, folder: Path, name: str) -> None:
    from asr.decoding.settings import ResourceOptions

    value: Any = {"lm_device_bytes": 1 << 20, "lm_hidden_device": "cpu"}[name]
    with pytest.raises(AsrError, match=f"{name} has no effect here"):
        recognizer_of(tiny_bundle_folder, folder, resources=ResourceOptions(**{name: value}))


def test_bundles_do_not_hold_it(tmp_path: Path, bundle: Bundle, folder: Path) -> None:
    other = bundle.with_language_models(rnn_lm=f"transformers:{folder}")
    assert other.fingerprint != bundle.fingerprint
    with pytest.raises(AsrError, match="a bundle cannot hold a language model of transformers"):
        other.save(tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
    with pytest.raises(AsrError, match="a bundle cannot hold a language model of transformers"):
        read_rnn_lm(f"transformers:{folder}")


def test_commands(tmp_path: Path, tiny_bundle_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import soundfile

    soundfile.write(tmp_path / "a.wav", tones(SENTENCES[0], seed=9).numpy(), RATE)
    given = [str(tmp_path / "a.wav"), "--bundle", str(tiny_bundle_folder), "--rnn-lm", f"transformers:{folder}"]
    assert main(["transcribe", *given, "--lm-scale", "0.05"]) == 0
    assert capsys.readouterr().out.split(": ")[1].split() == SENTENCES[0]
    assert main(["transcribe", *given, "--hidden-dtype", "int8"]) == 2
    assert "--hidden-dtype has no effect here" in capsys.readouterr().err
    assert main(["transcribe", *given[:-1], "transformers:nowhere"]) == 2
    assert "transformers:nowhere: the language model cannot be loaded" in capsys.readouterr().err


@pytest.mark.parametrize("with_bundle", [False, True])
def test_lists_are_rescored(
    tmp_path: Path, tiny_bundle_folder: Path, folder: Path, with_bundle: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a bundle, all words of the lists are spelled, also those that no word list has."""
    sentences = ["PAT TO KIT", "PAT TWO KIT", "THE QUICK FOX", "THE QUICK BROWN FOX"]
    lines = (json.dumps({"id": "a", "nbest": [{"text": text, "score": 0.0} for text in sentences]}),)
    (tmp_path / "list.jsonl").write_text("\n".join(lines) + "\n")
    arguments = ["rescore", str(tmp_path / "list.jsonl"), "--rnn-lm", f"transformers:{folder}", "--jsonl"]
    arguments += ["--nbest", "4", "--lm-scale", "1"]
    if with_bundle:
        arguments += ["--bundle", str(tiny_bundle_folder), "--rnn-weight", "1"]
    assert main(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    found = {one["text"]: one["scores"]["lm"] for one in record["nbest"]}
    model = toy.model_of()
    for text in sentences[: 2 if with_bundle else 4]:
        assert found[text] == pytest.approx(toy.expected(model, text.split()), abs=1e-3)


@pytest.mark.parametrize("with_ngram", [False, True])
def test_perplexity(tmp_path: Path, folder: Path, with_ngram: bool, capsys: pytest.CaptureFixture[str]) -> None:
    sentences = ["THE QUICK FOX", "A LAZY DOG JUMPS OVER A FOX"]
    (tmp_path / "text").write_text("\n".join(sentences) + "\n")
    measure = ["lm", "rnn", "measure", f"transformers:{folder}", "--text", str(tmp_path / "text")]
    if with_ngram:
        made = ["lm", "ngram", "--text", str(tmp_path / "text"), "--order", "2", "--binary", str(tmp_path / "2gram")]
        assert main(made) == 0
        measure += ["--ngram", str(tmp_path / "2gram")]
    capsys.readouterr()
    assert main(measure) == 0
    report = json.loads(capsys.readouterr().out)
    total = sum(toy.expected(toy.model_of(), sentence.split()) for sentence in sentences)
    num_words = report["words"] + report["sentences"]
    assert (report["words"], report["sentences"], report["unknown_words"]) == (10, 2, 0)
    assert report["perplexity"] == pytest.approx(math.exp(-total / num_words), rel=1e-3)
    assert ("interpolated_perplexity" in report) is with_ngram
    if with_ngram:
        assert main([*measure, "--log-linear-words", "5"]) == 2
        assert "--log-linear-words sums over the words of a recurrent model" in capsys.readouterr().err


def test_around_a_ctc_network(folder: Path) -> None:
    symbols = ["-", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]
    words = ["THE", "FOX", "DOG", "BOX"]
    log_probs = torch.full((20, len(symbols)), -8.0)
    for place, letter in enumerate("THE|FOX"):
        log_probs[2 * place, symbols.index(letter)] = 0.0
        log_probs[2 * place + 1, 0] = 0.0
    log_probs[14:, 0] = 0.0
    log_probs[8, symbols.index("B")] = -0.1
    log_probs = log_probs.log_softmax(1)
    model = toy.model_of()
    wanted = {text: toy.expected(model, text.split()) for text in ("THE FOX", "THE BOX")}
    decoder = CTCDecoder(symbols, words=words, lm=f"transformers:{folder}", lm_scale=3.0, warm_up=False)
    best, *_ = decoder(log_probs, nbest=2)
    assert best.text == max(wanted, key=lambda text: wanted[text])
    assert best.lm_score == pytest.approx(wanted[best.text], abs=1e-2)
    with pytest.raises(AsrError, match="a Transformer has no list of words; give words"):
        CTCDecoder(symbols, lm=f"transformers:{folder}", warm_up=False)
    with pytest.raises(AsrError, match="round states"):
        options = {"hidden_dtype": "int8"}
        CTCDecoder(symbols, words=words, lm=f"transformers:{folder}", lm_options=options, warm_up=False)
    with pytest.raises(AsrError, match="token_lm"):
        CTCDecoder(symbols, token_lm=f"transformers:{folder}", warm_up=False)


def test_one_search_after_another_keeps_what_was_computed(
    tiny_bundle_folder: Path, bundle: Bundle, folder: Path
) -> None:
    recognizer = recognizer_of(tiny_bundle_folder, folder)
    waveform = tones(SENTENCES[0], seed=9)
    recognizer(waveform, RATE)
    network: Any = replace(recognizer.bundle).rnn_lm.network  # type: ignore[union-attr]
    num_read = network.num_tokens_read
    assert num_read > 0
    recognizer(waveform, RATE)
    assert network.num_tokens_read == num_read
