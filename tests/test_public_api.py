"""What `import asr` offers: quick to import, recordings of every kind, and language models of the user's own."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

import asr
from asr.audio.samples import as_recordings
from asr.decoding.build import recognition_settings
from asr.streaming import recognize_stream
from asr.testing.tones import RATE, tones
from asr.text.symbols import Vocabulary

PAT_TO_KIT = ["PAT", "TO", "KIT"]


class PreferredWord(asr.LanguageModel):
    """One word is likely everywhere, all others are not; words are numbered otherwise than in the bundle.

    Args:
        word: the likely one.
    """

    def __init__(self, word: str) -> None:
        self._vocabulary = Vocabulary(["TWO", "SKIP", "TO", "KIT", "PAT", "SICK"])
        self._word_id = self._vocabulary.words.index(word)
        self.num_queries = 0

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def start(self, num_streams: int) -> Tensor:
        return torch.zeros(num_streams, dtype=torch.int64)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        self.num_queries += len(word_id)
        likely = word_id == self._word_id
        return torch.where(likely, math.log(0.9), math.log(0.02)), (context_idx + 1) % 4

    def final(self, context_idx: Tensor) -> Tensor:
        return torch.full(context_idx.shape, math.log(0.1))


@pytest.fixture(scope="module")
def recognizer(tiny_bundle_folder: Path) -> asr.Recognizer:
    return asr.load(tiny_bundle_folder, mode="ngram")


def test_importing_is_quick_and_names_resolve() -> None:
    program = (
        "import sys, asr\n"
        "assert not {'torch', 'numpy', 'numba'} & set(sys.modules), 'imported too early'\n"
        "assert set(asr.__all__) <= set(dir(asr)) and issubclass(asr.AsrError, Exception)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert all(hasattr(asr, name) for name in asr.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Recogniser'"):
        asr.Recogniser  # noqa: B018


USER = """
import asr
from asr.streaming import recognize_stream

recognizer: asr.Recognizer = asr.load("librispeech").to("cpu")
reveal_type(recognizer("talk.mp3", nbest=3))
reveal_type(next(recognize_stream(recognizer, [])))
recognizer("talk.mp3", n_best=3)
"""


@pytest.mark.slow
@pytest.mark.one_stack
def test_type_checkers_know_calls_and_results(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", "user.py"]
    root = str(Path(asr.__file__).parents[1])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "MYPYPATH": root}
    )
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()[:3]] == [
        'note: Revealed type is "list[asr.results.RecognitionResult]"',
        'note: Revealed type is "asr.results.StreamResult"',
        'error: Unexpected keyword argument "n_best"; did you mean "nbest"?  [call-arg]',
    ]


def test_an_unknown_bundle_is_one_sentence() -> None:
    with pytest.raises(asr.AsrError, match=r"nowhere: there is no bundle here \(bundle.json is missing\)"):
        asr.load("nowhere")


def test_other_types_than_bundles_and_recognizers_are_told(
    tiny_bundle_folder: Path, recognizer: asr.Recognizer
) -> None:
    other: Any
    for other in ("librispeech", tiny_bundle_folder, None, recognizer):
        with pytest.raises(asr.AsrError, match=r"bundle is of type \w+; give an asr.Bundle; asr.load takes the names"):
            asr.Recognizer(other)
    for other in (recognizer.bundle, 3):
        for load in (asr.load, asr.Bundle.load):
            with pytest.raises(asr.AsrError, match=r"the bundle is of type \w+; give its name or folder; asr.Recog"):
                load(other)
    for other in ("an4", recognizer.bundle, None):
        with pytest.raises(asr.AsrError, match=r"recognizer is of type \w+; give an asr.Recognizer, such as asr.load"):
            asr.StreamingRecognizer(other)
    for name in ("large_ngram", "rnn_lm", "lexicon"):
        with pytest.raises(asr.AsrError, match=f"{name} is of type dict; give the path of a file"):
            asr.load(tiny_bundle_folder, **{name: {}})
    for other in (torch.zeros(2, 100), np.zeros(100)):
        with pytest.raises(asr.AsrError, match="pieces is one array; give a list or another iterable of pieces"):
            next(recognize_stream(recognizer, other))
    with pytest.raises(asr.AsrError, match="pieces is of type NoneType; give an iterable"):
        next(recognize_stream(recognizer, None))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("lm_fusion", ["lattice", "search"])
def test_the_users_language_model_decides_between_homophones(tiny_bundle_folder: Path, lm_fusion: str) -> None:
    waveform = tones(PAT_TO_KIT)
    for word in ("TO", "TWO"):
        model = PreferredWord(word)
        recognizer = asr.load(tiny_bundle_folder, language_model=model, lm_fusion=lm_fusion, options={"lm_scale": 1.0})
        assert recognizer(waveform)[0].text == f"PAT {word} KIT"
        assert recognizer.mode == "external" and model.num_queries > 0


@pytest.mark.slow
def test_the_users_language_model_decides_in_streams(tiny_bundle_folder: Path) -> None:
    for word in ("TO", "TWO"):
        recognizer = asr.load(tiny_bundle_folder, language_model=PreferredWord(word), options={"lm_scale": 1.0})
        streaming = asr.StreamingRecognizer(recognizer, asr.StreamingOptions(chunk_seconds=0.3, right_seconds=0.2))
        stream = streaming.open()
        streaming.push(stream, tones(PAT_TO_KIT))
        streaming.close(stream)
        results = []
        while streaming.is_ready:
            results += streaming.step()
        assert results[-1].text == f"PAT {word} KIT"


def test_scores_are_the_users_models_less_the_graphs(tiny_bundle_folder: Path) -> None:
    recognizer = asr.load(tiny_bundle_folder, language_model=PreferredWord("TO"), options={"lm_scale": 1.0})
    (result,) = recognizer(tones(PAT_TO_KIT))
    small = recognizer.bundle.small_ngram
    assert small is not None
    context, graphs = small.start(1), 0.0
    for word in result.text.split():
        score, context = small.score(context, torch.tensor([small.vocabulary.words.index(word)]))
        graphs += float(score)
    graphs += float(small.final(context))
    ours = math.log(0.02) + math.log(0.9) + math.log(0.02) + math.log(0.1)
    assert result.lm_score == pytest.approx(ours - graphs, abs=1e-4)


def test_what_a_users_model_excludes_is_refused(tiny_bundle_folder: Path) -> None:
    model, bundle = PreferredWord("TO"), asr.Bundle.load(tiny_bundle_folder)
    with pytest.raises(asr.AsrError, match="your own language model replaces the mode 'rnn'; leave out one of them"):
        asr.Recognizer(bundle, "rnn", language_model=model)
    with pytest.raises(asr.AsrError, match="num_workers is 2, but there is one language model"):
        asr.Recognizer(bundle, language_model=model, resources=asr.ResourceOptions(num_workers=2))
    bare = asr.Bundle(bundle.name, bundle.features, bundle.acoustic_model, bundle.graph)
    with pytest.raises(asr.AsrError, match="does not have the n-gram model of its graph"):
        asr.Recognizer(bare, language_model=model)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((torch.zeros(3), torch.zeros(2, dtype=torch.int64)), r"score, log_prob: .* is \[0\.0, 0\.0, 0\.0\]"),
        ((torch.tensor([0.0, math.nan]), torch.zeros(2, dtype=torch.int64)), r"log_prob: .* is \[0\.0, nan\]"),
        (
            (torch.zeros(2, dtype=torch.int64),) * 2,
            r"log_prob: .* \(torch\.int64\); expected a tensor of two log-probabilities",
        ),
        (
            (torch.zeros(2), torch.zeros(2)),
            r"next_idx: .* \(torch\.float32\); expected a tensor of two contexts, torch\.int64",
        ),
        ((torch.zeros(2), torch.tensor([0, -1])), r"next_idx: .* is \[0, -1\] \(torch\.int64\); .* of 0 or more"),
        (([-1.0, -1.0], torch.zeros(2, dtype=torch.int64)), r"score, log_prob: .* it is a list; expected a tensor"),
    ],
)
def test_a_language_model_with_other_answers_is_refused(
    tiny_bundle_folder: Path, answer: tuple[Any, Tensor], message: str
) -> None:
    model, bundle = PreferredWord("TO"), asr.Bundle.load(tiny_bundle_folder)
    model.score = lambda context_idx, word_id: answer  # type: ignore[method-assign]
    with pytest.raises(asr.AsrError, match=f"PreferredWord.*{message}"):
        asr.Recognizer(bundle, language_model=model)
    assert bundle.rnn_lm is not None
    network: Any = bundle.rnn_lm.network  # as torch.hub gives it
    with pytest.raises(
        asr.AsrError, match=r"language_model is of the class RNNLanguageModel; .*CachedRNNLM\(network\)"
    ):
        asr.Recognizer(bundle, language_model=network)


@pytest.mark.slow
@pytest.mark.parametrize("lm_fusion", ["lattice", "search"])
def test_a_language_model_that_is_wrong_later_is_refused_then(tiny_bundle_folder: Path, lm_fusion: str) -> None:
    model, bundle = PreferredWord("TO"), asr.Bundle.load(tiny_bundle_folder)
    recognizer = asr.Recognizer(bundle, language_model=model, lm_fusion=lm_fusion)
    assert recognizer(tones(PAT_TO_KIT), RATE)[0].words
    scores = model.score
    model.score = lambda context_idx, word_id: (  # type: ignore[method-assign]
        scores(context_idx, word_id)[0] * math.nan,
        context_idx,
    )
    with pytest.raises(asr.AsrError, match=r"PreferredWord.score: log P\(\w+ \| context 0\) is nan; give a number"):
        recognizer(tones(PAT_TO_KIT), RATE)


def test_old_names_of_modes_still_work(tiny_bundle_folder: Path) -> None:
    bundle = asr.Bundle.load(tiny_bundle_folder)
    assert asr.Recognizer(bundle, "on_the_fly").mode == "rnn"
    bundle.decoding = {"on_the_fly": {"lm_scale": 0.25}}
    assert recognition_settings(bundle, "rnn", {}).decoding.lm_scale == 0.25
    assert recognition_settings(bundle, "external", {}).decoding.lm_scale == 0.25


@pytest.mark.slow
def test_recordings_may_be_files_arrays_or_tensors(recognizer: asr.Recognizer, tmp_path: Path) -> None:
    samples = tones(PAT_TO_KIT)
    integers = (samples * 32767).to(torch.int16)
    soundfile.write(tmp_path / "talk.wav", tones(PAT_TO_KIT, rate=8000).numpy(), 8000)
    path = tmp_path / "talk.wav"
    for audio in (
        samples,
        samples.double(),
        integers,
        integers.numpy(),
        samples.numpy(),
        samples.numpy()[::-1][::-1],
        samples.numpy().astype(">f4"),
        samples[None],
        samples[None, None],
        [samples],
        [samples[None]],
        [integers.numpy()],
        str(path),
        path,
        [path],
    ):
        (result,) = recognizer(audio)
        assert result.text.split() == PAT_TO_KIT
    mixed = recognizer([path, tones(PAT_TO_KIT, rate=44100).numpy()], sampling_rate=44100)
    assert [result.text.split() for result in mixed] == [PAT_TO_KIT] * 2


def test_batches_have_lengths_and_channels_are_averaged() -> None:
    rows = torch.arange(24.0).view(2, 3, 4)
    first, second = as_recordings(rows, num_samples=torch.tensor([2, 4]))
    assert first.tolist() == rows[0, :, :2].mean(0).tolist() and second.tolist() == rows[1].mean(0).tolist()
    first, second = as_recordings(rows[0, :2], [1, 3])
    assert (first.tolist(), second.tolist()) == ([0.0], [4.0, 5.0, 6.0])
    (mono,) = as_recordings([rows[0]])
    assert mono.tolist() == rows[0].mean(0).tolist()
    padded = torch.tensor([[0.5, math.nan]])
    assert as_recordings(padded, [1])[0].tolist() == [0.5]
    whole = np.array([[-32768, 16384]], dtype=np.int16)
    assert as_recordings(whole)[0].tolist() == [-1.0, 0.5]


@pytest.mark.parametrize("lengths", [5, ["a"], torch.tensor(5), [None]])
def test_lengths_that_are_no_list_of_numbers_are_told(lengths: Any) -> None:
    with pytest.raises(asr.AsrError, match=r"num_samples is .*; give one length for each recording, such as \[16000"):
        as_recordings(torch.zeros(1, 8), lengths)


def test_recordings_without_samples_in_memory_are_told() -> None:
    for tensor in (torch.zeros(8, device="meta"), torch.zeros(8).to_sparse()):
        with pytest.raises(asr.AsrError, match=r"recording 0: the tensor is of the kind .*; give a dense one of real"):
            as_recordings(tensor)
    for file in (io.BytesIO(b"RIFF"), b"RIFF"):
        with pytest.raises(asr.AsrError, match=r"give the path of a file; or what soundfile.read makes of an open one"):
            as_recordings(file)


def test_notebooks_show_parts_and_results_on_a_few_lines(recognizer: asr.Recognizer, tiny_bundle_folder: Path) -> None:
    """Without the numbers of graphs, lattices and caches."""
    with_lattices = asr.load(tiny_bundle_folder, keep_lattices=True)
    (result,) = with_lattices(tones(PAT_TO_KIT), nbest=2)
    shown = repr(result.lattices[0])
    assert "tensor" not in shown and re.search(r"lattice=Lattice\(utterances=1, states=\d+, arcs=\d+\)", shown)
    assert result.cache and "num_queries" not in repr(result) and len(repr(result)) < 1500
    shown = repr(recognizer.bundle)
    assert "tensor" not in shown and "graph=DecodingGraph(states=" in shown and "NgramLM(name=" in shown
    assert len(shown) < 3000


def test_a_recognizer_decodes_in_evaluation_mode(tiny_bundle_folder: Path) -> None:
    recognizer = asr.load(tiny_bundle_folder, mode="ngram")
    recognizer.acoustic_model.dropout.p = 0.9
    before = recognizer(tones(PAT_TO_KIT))[0].total
    assert not recognizer.train().training
    recognizer.acoustic_model.train()
    assert recognizer(tones(PAT_TO_KIT))[0].total == before
    assert not any(module.training for module in recognizer.modules())


@pytest.mark.slow
def test_a_stream_takes_integers(recognizer: asr.Recognizer) -> None:
    totals = []
    for samples in (tones(PAT_TO_KIT), tones(PAT_TO_KIT).mul(32768).to(torch.int16).numpy()):
        streaming = asr.StreamingRecognizer(recognizer)
        stream = streaming.open(RATE)
        streaming.push(stream, samples)
        streaming.close(stream)
        while streaming.is_ready:
            last = streaming.step()
        totals.append(last[-1].total)
    assert totals[0] == pytest.approx(totals[1], abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["lattice", "search", "chunks"])
def test_a_users_model_may_answer_in_float64(tiny_bundle_folder: Path, fusion: str) -> None:
    model = PreferredWord("TO")
    expected = asr.load(tiny_bundle_folder, language_model=model, lm_fusion=fusion)(tones(PAT_TO_KIT))[0]
    score, final = model.score, model.final

    def in_double(context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, next_idx = score(context_idx, word_id)
        return log_prob.double(), next_idx

    model.score, model.final = in_double, lambda context_idx: final(context_idx).double()  # type: ignore[method-assign]
    found = asr.load(tiny_bundle_folder, language_model=model, lm_fusion=fusion)(tones(PAT_TO_KIT))[0]
    assert found.text == expected.text and found.lm_score == pytest.approx(expected.lm_score, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["lattice", "search", "chunks"])
def test_torchs_default_dtype_changes_nothing(tiny_bundle_folder: Path, fusion: str) -> None:
    samples = tones(PAT_TO_KIT)
    expected = asr.load(tiny_bundle_folder, lm_fusion=fusion)(samples, nbest=2)[0]
    torch.set_default_dtype(torch.float64)
    try:
        recognizer = asr.load(tiny_bundle_folder, lm_fusion=fusion)
        found = recognizer(samples, nbest=2)[0]
        streaming = asr.StreamingRecognizer(recognizer)
        stream = streaming.open()
        streaming.push(stream, samples)
        streaming.close(stream)
        results = []
        while streaming.is_ready:
            results += streaming.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.text == expected.text
    totals = [[one.total for one in result.hypotheses] for result in (found, expected)]
    assert totals[0] == pytest.approx(totals[1], abs=1e-5)
    assert results[-1].text == expected.text
