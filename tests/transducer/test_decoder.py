"""What `TransducerDecoder` and `TransducerRecognizer` accept, refuse and return."""

from __future__ import annotations

import copy
import math
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asr
from asr.errors import AsrError
from asr.lm.ngram.io import read_ngram_lm
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.models.transducers import Transducer, load_transducer
from asr.text.symbols import Vocabulary
from asr.transducer import TransducerDecoder, TransducerRecognizer
from tests.reference.table_lm import TableLM
from tests.reference.tiny_arpa import TINY
from tests.reference.toy_transducer import ToyTransducer

PIECES = ["▁a", "b", "<blk>", "▁b"]


def frames(num: int = 10, seed: int = 1) -> torch.Tensor:
    return torch.randn(num, 6, generator=torch.Generator().manual_seed(seed))


def recurrent(words: list[str]) -> RNNLanguageModel:
    torch.manual_seed(0)
    return RNNLanguageModel(Vocabulary(words), RNNLMConfig(embedding_size=6, hidden_size=6)).eval()


@pytest.fixture
def arpa(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.arpa"
    path.write_text(TINY)
    return path


def test_an_ngram_file_lists_the_words(arpa: Path) -> None:
    settings = {"spelling_penalty": -math.inf, "internal_lm_scale": 0.0, "token_min_log_prob": -20.0}
    decoder = TransducerDecoder(ToyTransducer(PIECES), ngram=arpa, **settings)
    found = decoder(frames(), nbest=50)
    assert len(found) > 2
    assert {word.text for each in found for word in each.words} == {"a", "b"}
    model = read_ngram_lm(arpa)
    for each in found:
        word_ids = model.vocabulary.ids_of([word.text for word in each.words])
        context, score = model.start(1), 0.0
        for word_id in word_ids:
            own, context = model.score(context, word_id[None])
            score += float(own)
        assert each.lm_score == pytest.approx(score + float(model.final(context)), abs=1e-4)


def test_a_model_is_interpolated_with_the_ngram_model(arpa: Path) -> None:
    network, model = ToyTransducer(PIECES), TableLM(Vocabulary(["a", "b"]))
    settings: dict[str, Any] = {"beam_size": 50, "lm_scale": 1.0, "internal_lm_scale": 0.0, "token_min_log_prob": -20.0}
    both = TransducerDecoder(network, ngram=arpa, lm=model, lm_weight=0.25, **settings)(frames(), nbest=20)
    ngram = read_ngram_lm(arpa)
    listed = [each for each in both if each.words and not any(word.is_spelled for word in each.words)]
    assert len(listed) > 3
    for each in listed:
        expected, history, context = 0.0, (1,), ngram.start(1)
        for word in [*(word.text for word in each.words), "</s>"]:
            own = model.log_prob_of(history, model.vocabulary.id_of(word))
            if word == "</s>":
                other = ngram.final(context)
            else:
                other, context = ngram.score(context, torch.tensor([ngram.vocabulary.id_of(word)]))
            history = (*history, model.vocabulary.id_of(word))
            expected += math.log(0.25 * math.exp(own) + 0.75 * math.exp(float(other)))
        assert each.lm_score == pytest.approx(expected, abs=1e-3)


def test_the_networks_own_model_of_texts_is_subtracted_beside_others(arpa: Path) -> None:
    network = ToyTransducer(PIECES)
    assert TransducerDecoder(network).config.internal_lm_scale == 0.0
    assert TransducerDecoder(network, words=["a", "b"], hot_words=["a"]).config.internal_lm_scale == 0.0
    decoders = [TransducerDecoder(network, ngram=arpa, **given) for given in ({}, {"internal_lm_scale": 0.2})]
    assert decoders[0](frames()) == decoders[1](frames())
    assert TransducerDecoder(network, ngram=arpa, internal_lm_scale=0.0).config.internal_lm_scale == 0.0


@pytest.mark.skipif(not hasattr(torch, "get_default_device"), reason="torch 1.13 has no default device")
def test_torch_may_make_its_tensors_on_another_device(arpa: Path) -> None:
    network, encoded, waveform = ToyTransducer(PIECES), frames(), torch.zeros(60)
    models: dict[str, Any] = {"ngram": arpa, "lm": recurrent(["a", "b"]), "hot_words": ["a b"]}
    wanted = TransducerDecoder(network, **models)(encoded)
    with torch.device("meta"):
        decoder = TransducerDecoder(network, **models)
        stream = decoder.stream()
        stream.accept(encoded)
        assert decoder(encoded) == wanted
        assert stream.finish().tokens == wanted[0].tokens
        encoded, lengths = network(waveform)
    assert encoded.device.type == lengths.device.type == "cpu"


def test_decoders_are_copied_to_other_processes(arpa: Path) -> None:
    model = recurrent(["a", "b"])
    decoder = TransducerDecoder(ToyTransducer(PIECES), ngram=arpa, lm=model, hot_words=["a b"])
    wanted, places = decoder(frames()), [each.data_ptr() for each in model.parameters()]
    for received in (
        copy.deepcopy(decoder),
        pickle.loads(pickle.dumps(decoder)),
        pickle.loads(ForkingPickler.dumps(decoder)),
    ):
        assert received(frames()) == decoder(frames()) == wanted
    # Compiled loops hold arrays of them.
    assert places == [each.data_ptr() for each in model.parameters()]


def test_numbers_of_hypotheses_and_shapes() -> None:
    decoder = TransducerDecoder(ToyTransducer(PIECES))
    single, batch = decoder(frames(), nbest=3), decoder(frames()[None], nbest=3)
    assert [single] == batch
    assert len(single) == 3
    assert decoder(frames().numpy(), nbest=3) == single
    assert decoder.texts(frames()) == [single[0].text]
    assert decoder(torch.zeros(0, 4, 6)) == []
    (nothing,) = decoder(torch.zeros(0, 6))
    assert nothing.text == "" and nothing.is_complete and nothing.score == 0.0


@pytest.mark.filterwarnings("error")
def test_a_scale_of_zero_takes_away_words_that_cannot_be() -> None:
    network, settings = ToyTransducer(PIECES), {"lm_scale": 0.0, "internal_lm_scale": 0.0}
    model = TableLM(Vocabulary(["a", "ab"]))
    model.log_prob_of = lambda history, word_id: -math.inf  # type: ignore[method-assign]
    found = TransducerDecoder(network, lm=model, **settings)(frames())[0]
    assert found.words and found.lm_score == -math.inf
    (wanted,) = TransducerDecoder(network, words=["a", "ab"])(frames())
    assert (found.text, found.score) == (wanted.text, wanted.score)


@pytest.mark.parametrize("model", [None, TableLM(Vocabulary(["abab"]))])
def test_nothing_survives(model: TableLM | None) -> None:
    network = ToyTransducer(PIECES, durations=(1,), sharpness=0.0, blank_bias=-math.inf)
    decoder = TransducerDecoder(network, words=["abab"], lm=model, spelling_penalty=-math.inf)
    for num in (3, 40):
        (found,) = decoder(frames(num))
        assert (found.text, found.is_complete, found.score) == ("", False, -math.inf)
        stream = decoder.stream()
        stream.accept(frames(num))
        assert (stream.partial().text, stream.num_stable_words) == ("", 0)
        assert stream.finish() == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beam": 3}, "no argument or setting 'beam'"),
        ({"WHOLE_NUMBERS": ()}, "no argument or setting 'WHOLE_NUMBERS'; settings are beam_size, "),
        ({"beam_size": 0}, "beam_size is 0"),
        ({"beam_size": "8"}, "beam_size is '8'"),
        ({"search_beam": -1.0}, "search_beam is -1.0"),
        ({"token_min_log_prob": 0.5}, "token_min_log_prob is 0.5"),
        ({"lm_scale": 1.0}, "lm_scale has no effect here: there is no language model"),
        ({"internal_lm_scale": -0.1}, "internal_lm_scale is -0.1"),
        ({"spelling_penalty": -1.0}, "spelling_penalty has no effect here"),
        ({"words": ["a"], "spelling_penalty": math.inf}, "spelling_penalty is inf"),
        ({"word_insertion_penalty": math.inf}, "word_insertion_penalty is inf"),
        ({"lm_weight": 0.5}, "lm_weight has no effect here: there is no lm"),
        ({"words": ["a"], "lm_options": {}}, "lm_options has no effect here"),
        ({"lm": "model", "lm_weight": 0.5}, "lm_weight has no effect here: there is no n-gram model"),
        ({"lm": "missing"}, "missing: the language model cannot be read"),
        ({"lm": "transformers:gpt2"}, "transformers:gpt2: a Transformer has no list of words"),
        ({"token_lm": "transformers:gpt2"}, "which scores words"),
        ({"words": ["a"], "token_lm": "x"}, "token_lm cannot be combined with words"),
        ({"hot_words": ["a"], "token_lm": TableLM(Vocabulary(["▁a", "b"]))}, "hot_words has no effect here"),
        ({"hot_words": ["日"]}, "of 1 words, only 0 can be spelled in the tokens, unlike '日'"),
        ({"words": ["a"], "hot_words": ["z"]}, "hot_words: give words of the vocabulary"),
        ({"words": ["A", "B"], "plain_words": False}, "which are in lower case"),
        ({"words": ["a"], "plain_words": 2}, "plain_words is 2; it must be True, False or None"),
        ({"plain_words": True}, "plain_words has no effect here"),
        ({"words": ["x", "y", "a"]}, "only 1 can be spelled in the tokens, unlike 'x'"),
        ({"words": []}, "there is no word in it"),
        ({"lm": TableLM(Vocabulary([]))}, "the language model has no words"),
    ],
)
def test_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(AsrError, match=message.replace("(", r"\(")):
        TransducerDecoder(ToyTransducer(PIECES), **arguments)


def test_a_language_model_has_most_of_the_weight_by_default(arpa: Path) -> None:
    def score(**weight: float) -> float:
        model = TableLM(Vocabulary(["a", "b"]))
        decoder = TransducerDecoder(ToyTransducer(PIECES), ngram=arpa, lm=model, **weight)
        return float(decoder(frames())[0].score)

    assert score() == score(lm_weight=0.7) != score(lm_weight=0.6)


def test_no_hot_words_are_as_none_given(arpa: Path) -> None:
    for arguments in ({}, {"words": ["a"]}, {"ngram": arpa}):
        without, none = (
            TransducerDecoder(ToyTransducer(PIECES), **arguments, **more) for more in ({}, {"hot_words": []})
        )
        assert none.config == without.config
        assert none(frames()) == without(frames())


def test_hot_words_are_listed(arpa: Path) -> None:
    with pytest.raises(AsrError, match="hot_words: give words of the vocabulary; it does not have 'b'"):
        TransducerDecoder(ToyTransducer(PIECES), words=["a"], ngram=arpa, hot_words=["b"])
    with pytest.raises(AsrError, match="hot_words: give words of the vocabulary; it does not have 'x'"):
        TransducerDecoder(ToyTransducer(PIECES), words=["a", "x"], hot_words=["x"])
    with pytest.raises(AsrError, match="these tokens do not spell words"):
        TransducerDecoder(ToyTransducer(["<blk>", "AA1", "B"]), words=["a"], hot_words=["a"])
    (plain,), (hot,) = (
        TransducerDecoder(ToyTransducer(PIECES), words=["a"], ngram=arpa, spelling_penalty=-math.inf, **given)(frames())
        for given in ({}, {"hot_words": {"a": 0.5}})
    )
    assert hot.text == plain.text
    assert hot.score == pytest.approx(plain.score + 0.35 * 0.5 * len(plain.words), abs=0.01)


def test_networks_that_are_refused() -> None:
    with pytest.raises(AsrError, match="network is of type Linear; give a transducer"):
        TransducerDecoder(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(AsrError, match="these tokens do not spell words"):
        TransducerDecoder(ToyTransducer(["<blk>", "AA1", "B"]), words=["a"])
    with pytest.raises(AsrError, match="a transducer is named KIND:NAME"):
        load_transducer("model.onnx")
    with pytest.raises(AsrError, match="runs on the CPU only"):
        Transducer.to(ToyTransducer(PIECES), torch.device("cuda"))
    with pytest.raises(AsrError, match="runs on the CPU only"):
        Transducer.to(ToyTransducer(PIECES), "cuda")
    with pytest.raises(AsrError, match="runs on the CPU only"):
        Transducer.to(ToyTransducer(PIECES), "nonsense")


@pytest.mark.parametrize(
    ("encoded", "lengths", "message"),
    [
        (torch.zeros(2), None, "has the shape"),
        (torch.zeros(1, 3, 6), [4], "lengths range from 4 to 4"),
        (torch.zeros(1, 3, 6), [1, 2], "2 lengths for 1"),
        (torch.full((1, 3, 6), math.nan), None, "utterance 0, frame 0"),
        (torch.zeros(3, 5), None, r"toy: the joint network cannot read frames of 5 dimensions \(.*\); give"),
        ([frames()], None, "encoded frames of type list cannot be read"),
        (torch.zeros(1, 3, 6), "long", "lengths of type str cannot be read"),
    ],
)
def test_input_is_refused(encoded: Any, lengths: Any, message: str) -> None:
    decoder = TransducerDecoder(ToyTransducer(PIECES))
    with pytest.raises(AsrError, match=message):
        decoder(encoded, lengths)
    with pytest.raises(AsrError, match="ask for 1 hypothesis or more"):
        decoder(frames(), nbest=0)


def test_networks_that_do_not_fit_or_are_broken() -> None:
    network = ToyTransducer(PIECES)
    network.joint = torch.nn.Linear(6, 5)
    with pytest.raises(AsrError, match=r"toy: the joint network returned \(1, 5\) for 1 hypotheses, 4 tokens"):
        TransducerDecoder(network)(frames())
    with pytest.raises(AsrError, match=r"toy: the joint network returned \(1, 5\) for 1 hypotheses, 4 tokens"):
        TransducerDecoder(network, internal_lm_scale=0.1)(frames())
    network = ToyTransducer(PIECES)
    torch.nn.init.constant_(network.joint.bias, math.nan)
    with pytest.raises(AsrError, match="toy: the joint network returned NaN in frame 0"):
        TransducerDecoder(network)(frames())
    network = ToyTransducer(PIECES, durations=(1, 2))
    torch.nn.init.constant_(network.joint.bias[-1:], math.nan)
    with pytest.raises(AsrError, match="toy: the joint network returned NaN in frame 0"):
        TransducerDecoder(network)(frames())


@pytest.mark.parametrize(
    ("method", "returned"),
    [
        ("start", torch.zeros(1, 6)),
        ("start", (torch.zeros(1, 6), torch.zeros(1, 6))),  # a state that is no tuple
        ("start", (torch.zeros(1, 6), (torch.zeros(2, 6),))),
        ("predict", torch.zeros(1, 6)),
        ("predict", (torch.zeros(1, 1, 6), ())),
    ],
)
def test_states_of_another_form_are_told(method: str, returned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    network = ToyTransducer(PIECES)
    monkeypatch.setattr(network, method, lambda *given: returned)
    with pytest.raises(AsrError, match=f"toy: {method} must return .* its state, a tuple of tensors"):
        TransducerDecoder(network)(frames())


def test_a_list_is_not_tokens() -> None:
    network = ToyTransducer(PIECES)
    network.tokens = PIECES  # type: ignore[assignment]
    with pytest.raises(AsrError, match="toy: tokens is of type list"):
        TransducerDecoder(network)


def test_padding_may_be_anything() -> None:
    decoder = TransducerDecoder(ToyTransducer(PIECES))
    padded = torch.cat([frames(), torch.full((3, 6), math.nan)])[None]
    assert decoder(padded, [10])[0] == decoder(frames())


def test_phones_are_words_of_their_own() -> None:
    network = ToyTransducer(["<blk>", "AA1", "B", "K"], sharpness=3.0)
    (found,) = TransducerDecoder(network)(frames())
    assert found.text.split() == [token.text for token in found.tokens]
    assert found.tokens


def test_a_recognizer_cuts_recordings_and_batches_them() -> None:
    network = ToyTransducer(PIECES, sharpness=3.0, blank_bias=2.0, dim=160)
    network.frame_shift *= 10.0  # words would end after the recording
    recognizer = TransducerRecognizer(
        TransducerDecoder(network), asr.ResourceOptions(max_segment_seconds=1.0, batch_seconds=2.0)
    )
    generator = torch.Generator().manual_seed(0)
    recordings = [torch.randn(num, generator=generator).clamp(-1, 1) for num in (16000, 40000, 5000)]
    together = recognizer(recordings)
    for found, recording in zip(together, recordings, strict=True):
        (alone,) = recognizer(recording)
        assert found.text == alone.text
        assert found.total == pytest.approx(alone.total, rel=1e-4)
        times = [(word.start, word.end) for word in found.words]
        assert times == sorted(times)
        assert max(end for _, end in times) <= found.duration + 1e-6
        assert found.duration == pytest.approx(len(recording) / 16000)
        assert set(found.times.stages) == {"acoustic model", "search"}
    assert max(word.start for word in together[1].words) > 1.5


def test_a_recognizer_asks_all_networks_when_it_is_prepared() -> None:
    network, model = ToyTransducer(PIECES, dim=160), TableLM(Vocabulary(["a", "b"]))
    recognizer = TransducerRecognizer(TransducerDecoder(network, lm=model))
    recognizer.prepare()
    assert model.num_calls > 0
    assert network.predicted
    TransducerRecognizer(TransducerDecoder(network)).prepare()


def test_a_recognizer_returns_distinct_sentences() -> None:
    network = ToyTransducer(PIECES, dim=160)
    recognizer = TransducerRecognizer(TransducerDecoder(network))
    (found,) = recognizer(torch.rand(8000) - 0.5, nbest=4)
    assert len(recognizer(torch.rand(8000) - 0.5, nbest=2)[0].hypotheses) == 2
    texts = [each.text for each in found.hypotheses]
    assert len(set(texts)) == 4
    assert texts[0] == found.text
    totals = [each.total for each in found.hypotheses]
    assert totals == sorted(totals, reverse=True)
    assert found.total == totals[0]
    resampled = recognizer(np.zeros(4000, dtype=np.int16), sampling_rate=8000)
    assert resampled[0].duration == pytest.approx(0.5)


def test_words_are_written_as_they_are_listed() -> None:
    network = ToyTransducer(["<blk>", "▁\u00e9", "b"], sharpness=3.0)
    settings: dict[str, Any] = {"spelling_penalty": -math.inf}
    (found,) = TransducerDecoder(network, words=["e\u0301", "e\u0301b"], **settings)(frames())
    assert {word.text for word in found.words} <= {"e\u0301", "e\u0301b"}
    assert found.words and not any(word.is_spelled for word in found.words)
    for words in (["e\u0301", "\u00e9"], ["\u00e9", "e\u0301"]):
        (found,) = TransducerDecoder(network, words=words, **settings)(frames())
        assert {word.text for word in found.words} == {"\u00e9"}
