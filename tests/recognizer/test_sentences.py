"""Several sentences in one search, in recordings and in streams of real speech."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.cli.main import main
from asr.decoding.k2 import k2_works
from asr.decoding.nbest_io import read_n_best
from asr.decoding.slf import read_slf_lattice
from asr.decoding.word_lattice import RescoringScales, rescore_lattice, rescore_list
from asr.errors import AsrError
from asr.lm.combine import SentencesLM
from asr.lm.interface import LanguageModel
from asr.recognizer import Recognizer
from asr.streaming import StreamingOptions, StreamingRecognizer, recognize_stream
from asr.text.symbols import EOS_ID

pytestmark = pytest.mark.slow

CLIPS = Path(__file__).resolve().parents[2] / "scripts" / "demo_clips"
FIRST = "SHE WROTE A LONG LETTER TO HER BROTHER AND HE READ IT TWICE"
SECOND = "THE CAPTAIN SAID THAT THE SHIP WOULD LEAVE THE HARBOR BEFORE NIGHT"


@pytest.fixture(scope="module")
def recording() -> Tensor:
    """Two sentences with half a second between them."""
    pause = 3e-5 * torch.randn(8000, generator=torch.Generator().manual_seed(0))
    first, second = (soundfile.read(CLIPS / f"{name}.flac", dtype="float32")[0] for name in ("letter", "captain"))
    return torch.cat([torch.from_numpy(first), pause, torch.from_numpy(second)])


def made(
    bundle: Bundle, mode: str = "rnn", lm_fusion: str = "auto", decoder: str = "auto", **options: Any
) -> Recognizer:
    options = {"mbr_scale": math.inf, **options}
    return Recognizer(bundle, mode, lm_fusion=lm_fusion, decoder=decoder, options=options)


def score_of(lm: LanguageModel, sentence: str) -> float:
    context_idx, total = lm.start(1), 0.0
    for word in lm.vocabulary.ids_of(sentence.split()):
        log_prob, context_idx = lm.score(context_idx, word[None])
        total += float(log_prob)
    return total + float(lm.final(context_idx))


@pytest.mark.parametrize("lm_fusion", ["lattice", "chunks", "search"])
def test_the_language_model_scores_each_sentence_by_itself(
    librispeech: Bundle, recording: Tensor, lm_fusion: str
) -> None:
    recognizer = made(librispeech, lm_fusion=lm_fusion)
    (result,) = recognizer(recording)
    assert recognizer.joins_sentences and result.text == f"{FIRST} {SECOND}"
    lm = recognizer.build_language_models(1 << 24).model
    assert isinstance(lm, SentencesLM)
    assert result.lm_score == pytest.approx(score_of(lm, FIRST) + score_of(lm, SECOND), abs=0.05)
    one = made(librispeech, lm_fusion=lm_fusion, sentence_pause_seconds=math.inf)
    (as_one,) = one(recording)
    assert not one.joins_sentences and as_one.text == result.text
    assert as_one.lm_score == pytest.approx(score_of(lm, f"{FIRST} {SECOND}"), abs=0.05)
    assert result.total > as_one.total + 1.0
    # The pause must be long enough.
    (too_short,) = made(librispeech, lm_fusion=lm_fusion, sentence_pause_seconds=3.0)(recording)
    assert too_short.total == pytest.approx(as_one.total, abs=0.01)


def test_k2_finds_the_same_sentences(librispeech: Bundle, recording: Tensor) -> None:
    if not k2_works(torch.device("cpu")):
        pytest.skip("k2 does not run here")
    ours, theirs = (made(librispeech, "ngram", decoder=decoder)(recording)[0] for decoder in ("token-passing", "k2"))
    assert theirs.text == ours.text and theirs.total == pytest.approx(ours.total, abs=0.05)
    as_one = made(librispeech, "ngram", decoder="k2", sentence_pause_seconds=math.inf)
    assert theirs.total > as_one(recording)[0].total + 0.5


def test_no_result_shows_the_ends_of_sentences(librispeech: Bundle, recording: Tensor) -> None:
    recognizer = Recognizer(librispeech, mode="ngram", keep_lattices=True)
    (result,) = recognizer(recording, nbest=30)
    texts = [alternative.text for alternative in result.hypotheses]
    assert len(set(texts)) == len(texts) == 30 and not any("</s>" in text for text in texts)
    assert texts[0] == f"{FIRST} {SECOND}".replace("HARBOR", "HARBOUR")
    assert [word.text for word in result.words] == result.text.split()
    (piece,) = result.lattices
    assert EOS_ID not in piece.lattice.word_id.tolist()
    times = {word.text: word for word in result.words[10:14]}
    assert times["THE"].start - times["TWICE"].end > 0.15


def test_files_keep_the_ends_of_sentences(librispeech: Bundle, recording: Tensor, tmp_path: Path) -> None:
    """Files of the small n-gram's search, rescored: as if the language model had decided in the first place."""
    beams = {"am_scale": 1.1, "search_beam": 12.5, "output_beam": 7.0, "max_active_states": 3000}
    direct = made(librispeech, "rnn", "lattice", skip_beam=math.inf, context_beam=math.inf, **beams)
    (expected,) = direct(recording)
    lm, scales = direct.build_language_models(1 << 24).model, RescoringScales(1.1, 1.0, 1.0)
    assert lm is not None
    soundfile.write(tmp_path / "a.wav", recording.numpy(), 16000, subtype="FLOAT")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in {**beams, "mbr_scale": math.inf}.items()]
    outputs = ["--output", str(tmp_path / "a.jsonl"), "--nbest", "50", "--lattices", str(tmp_path / "lattices")]
    assert main(["transcribe", str(tmp_path / "a.wav"), "--mode", "ngram", *options, *outputs]) == 0
    found = rescore_lattice(read_slf_lattice(tmp_path / "lattices" / "a.slf.gz"), lm, scales)
    assert found is not None and found.text == expected.text == f"{FIRST} {SECOND}"
    assert found.total == pytest.approx(expected.total, abs=0.02) and found.sentence_ends == (13,)
    sentences = rescore_list(read_n_best(tmp_path / "a.jsonl")["a"], lm, scales)
    same = next(one for one in sentences if one.text == found.text)
    assert same.lm_score == pytest.approx(found.lm_score, abs=0.01) and same.sentence_ends == (13,)
    assert same.total == pytest.approx(expected.total, abs=0.02)


@pytest.mark.parametrize(("mode", "policy"), [("ngram", "stable"), ("rnn", "agreed")])
def test_streams_do_not_show_them_either(librispeech: Bundle, recording: Tensor, mode: str, policy: str) -> None:
    recognizer = Recognizer(librispeech, mode=mode)
    options = StreamingOptions(partial_policy=policy, silence_after_words=3.0)
    padded = torch.cat([recording, recording.new_zeros(16000)])
    found = list(recognize_stream(recognizer, padded.split(4000), options=options))
    finals = [result for result in found if result.is_final]
    assert len(finals) == 1 and len(found) > 4
    assert not any("</s>" in word.text for result in found for word in result.words)
    assert finals[0].text.split()[12:16] == "TWICE THE CAPTAIN SAID".split()
    assert finals[0].notes == () and all(word.confidence is not None for word in finals[0].words)
    if policy == "stable":
        shown = [[word.text for word in result.words] for result in found]
        assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(shown))
        assert [len(one) for one in shown[:-1]] == [result.num_stable for result in found[:-1]]


def test_the_live_search_of_streams_counts_words_without_them(librispeech: Bundle, recording: Tensor) -> None:
    recognizer = Recognizer(librispeech, mode="ngram")
    streaming = StreamingRecognizer(recognizer, StreamingOptions(partial_policy="best", silence_after_words=3.0))
    stream = streaming.open()
    one, ends = streaming._streams[stream], list[int]()
    for samples in torch.cat([recording, recording.new_zeros(16000)]).split(4000):
        streaming.push(stream, samples)
        while streaming.is_ready:
            (partial,) = streaming.step() or [None]
            hypothesis = streaming._decoder.partial(one.search)
            if partial is not None and EOS_ID in hypothesis.word_ids:
                ends.append(hypothesis.word_ids.index(EOS_ID))
                words = [word for word in hypothesis.words if word != "</s>"]
                assert [word.text for word in partial.words] == words
                for num in range(len(hypothesis.words) + 1):
                    shown = [word.text for word in streaming._words(one, hypothesis, num)]
                    assert shown == [word for word in hypothesis.words[:num] if word != "</s>"]
    assert ends


def test_where_the_option_has_no_effect_it_is_refused(librispeech: Bundle) -> None:
    with pytest.raises(AsrError, match=r"sentence_pause_seconds has no effect here.*no carry_history; leave it out"):
        made(librispeech, sentence_pause_seconds=0.3, carry_history=True)
    assert not made(librispeech, carry_history=True).joins_sentences
