"""The drop-in for pyctcdecode: a plain Python search with its rules, and the package itself where it is installed."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import pickle
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from asr.ctc.prefix_beam import PrefixBeam, read_chunks
from asr.ctc.prefix_kernel import NUM_ALIVE, NUM_PREFIXES
from asr.ctc.pyctcdecode import Alphabet, BeamSearchDecoderCTC, build_ctcdecoder
from asr.ctc.word_trie import WordTrie
from asr.errors import AsrError
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import Interpolated, RemappedLM
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import Vocabulary
from tests.ctc.oracle import ForgetfulNgram

pytestmark = pytest.mark.slow

LABELS = ["", " ", *"abcde"]
WORDS = ["bad", "bead", "cab", "dead", "ace"]


@pytest.fixture
def word_model(ngram_of: Callable[..., NgramLM]) -> NgramLM:
    return ngram_of(["bad cab", "dead bead ace", "ace bad", "cab dead", "bead"], WORDS, order=2)


def random_logits(num_frames: int, seed: int, num_labels: int = len(LABELS)) -> np.ndarray:
    return 3.0 * np.random.default_rng(seed).normal(size=(num_frames, num_labels))


def plain_search(
    log_prob: np.ndarray,
    lm: NgramLM | None,
    *,
    alpha: float = 0.5,
    beta: float = 1.5,
    offset: float = -10.0,
    beam_width: int = 100,
    prune: float = -10.0,
    least: float = -5.0,
    hot: tuple[str, ...] = (),
    weight: float = 10.0,
    history: int = 0,
    looks_ahead: bool = False,
) -> dict[str, float]:
    """The rules of pyctcdecode, written anew over (words, partial word, last label): texts and their totals."""

    def words_score(words: tuple[str, ...], ends: bool) -> float:
        total = weight * sum(word in hot for word in words)
        if lm is not None:
            known = lm.score_sentence([*words]).double()
            total += alpha * float(known[: len(words)].sum()) + beta * len(words)
            total += sum(alpha * offset * math.log(10) for word in words if word not in WORDS)
            if ends:
                total += alpha * float(known[-1])
        return total

    def unigram(word: str) -> float:
        assert lm is not None
        return float(lm.arrays.arc_score(torch.tensor([lm.vocabulary.id_of(word)])))

    def partial_score(partial: str) -> float:
        if not partial:
            return 0.0
        lengths = [len(word) for word in hot if word.startswith(partial)]
        if lengths:
            return weight * len(partial) / min(lengths)
        begun = [word for word in WORDS if word.startswith(partial)]
        if lm is not None and looks_ahead and begun:
            return alpha * (max(map(unigram, begun)) - max(map(unigram, WORDS)))
        if lm is None or begun:
            return 0.0
        return offset * max(1.0, len(partial) / 6)

    alive: dict[tuple[tuple[str, ...], str, int], float] = {((), "", -1): 0.0}
    for row in log_prob:
        following: dict[tuple[tuple[str, ...], str, int], float] = {}
        for label in set(np.flatnonzero(row >= least).tolist()) | {int(row.argmax())}:
            for (words, partial, last), score in alive.items():
                if label in (0, last):
                    key = (words, partial, label)
                elif LABELS[label] == " ":
                    key = ((*words, partial) if partial else words, "", label)
                else:
                    key = (words, partial + LABELS[label], label)
                added = score + float(row[label])
                following[key] = float(np.logaddexp(following[key], added)) if key in following else added
        ranked = {key: score + words_score(key[0], False) + partial_score(key[1]) for key, score in following.items()}
        best = max(ranked.values())
        kept = sorted((key for key in ranked if ranked[key] >= best + prune), key=lambda key: -ranked[key])
        alive = {}
        seen = set()
        for words, partial, last in kept[:beam_width]:
            end = (words[-history:] if history else words, partial, last)
            if end not in seen:
                alive[words, partial, last] = following[words, partial, last]
            seen.add(end)
    merged: dict[tuple[str, ...], float] = {}
    for (words, partial, _), score in alive.items():
        text = (*words, partial) if partial else words
        merged[text] = float(np.logaddexp(merged[text], score)) if text in merged else score
    return {" ".join(words): score + words_score(words, True) for words, score in merged.items()}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beam_width": 7},
        {"prune_history": True},
        {"prune_history": True, "beam_width": 7},
        {"beam_prune_logp": -4.0, "token_min_logp": -3.0},
        {"token_min_logp": -0.3},  # in most frames, only the best label may follow
        {"hotwords": ["dab", "cab ace"], "hotword_weight": 4.0},
    ],
)
@pytest.mark.parametrize("with_lm", [False, True])
def test_same_as_a_plain_search(
    seed: int, settings: dict[str, object], with_lm: bool, word_model: NgramLM, arpa_file: Callable[[NgramLM], Path]
) -> None:
    decoder = build_ctcdecoder(LABELS, str(arpa_file(word_model)) if with_lm else None)
    logits = random_logits(14, seed)
    log_prob = torch.from_numpy(logits).log_softmax(1).numpy()
    names = {"beam_width": "beam_width", "beam_prune_logp": "prune", "token_min_logp": "least"}
    plain = {names[name]: value for name, value in settings.items() if name in names}
    if "hotwords" in settings:
        plain |= {"hot": ("dab", "cab", "ace"), "weight": settings["hotword_weight"]}
    if "prune_history" in settings:
        plain["history"] = 1  # of a bigram model, and without a model
    wanted = plain_search(log_prob, word_model if with_lm else None, **plain)  # type: ignore[arg-type]
    found = decoder.decode_beams(logits, **settings)  # type: ignore[arg-type]
    best = max(wanted.values())
    # What falls behind the beam at the end is left out there.
    inside = {
        text: score for text, score in wanted.items() if score >= best + float(settings.get("beam_prune_logp", -10.0))
    }  # type: ignore[arg-type]
    assert {beam[0]: beam[-1] for beam in found} == pytest.approx(inside, abs=1e-2)
    totals = [beam[-1] for beam in found]
    assert totals == sorted(totals, reverse=True)
    if "prune_history" in settings:
        others = {name: value for name, value in settings.items() if name != "prune_history"}
        assert decoder.decode(logits, **others) == found[0][0]  # type: ignore[arg-type]


def trie_of(words: list[list[int]]) -> WordTrie:
    characters = np.fromiter(itertools.chain.from_iterable(words), np.int64)
    return WordTrie.of_characters(characters, np.fromiter(map(len, words), np.int64))


def prefixes_of(trie: WordTrie) -> dict[tuple[int, ...], int]:
    """The nodes of a trie by the characters that lead to them, found along its arcs."""
    found, new = {(): 0}, [()]
    while new:
        prefix = new.pop()
        node = found[prefix]
        chars = trie.char[trie.begin[node] : trie.begin[node + 1]].tolist()
        assert chars == sorted(chars)
        for char, following in zip(chars, trie.next[trie.begin[node] :].tolist(), strict=False):
            found[(*prefix, char)] = following
            new.append((*prefix, char))
            assert (trie.parent[following], trie.depth[following]) == (node, len(prefix) + 1)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_words_added_to_a_trie(seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = [rng.integers(1, 4, size=rng.integers(1, 6)).tolist() for _ in range(30)]
    for num in (0, 1, 10, 29):
        trie = trie_of(words[:num]).extended(words[num:])
        nodes = prefixes_of(trie)
        assert nodes.keys() == prefixes_of(trie_of(words)).keys()
        assert sorted(nodes.values()) == list(range(trie.num_nodes))
        assert [nodes[tuple(word)] for word in words] == trie.word_node.tolist()
        for chosen in (range(0, 30, 7), range(0)):
            shortest, inside = trie.shortest_of(chosen), trie.is_prefix_of(chosen)
            for prefix, node in nodes.items():
                lengths = [len(words[one]) for one in chosen if tuple(words[one][: len(prefix)]) == prefix]
                assert (shortest[node], inside[node]) == (min(lengths, default=0), bool(lengths))


def test_hot_words_and_weights_leave_the_known_words_as_they_are(
    word_model: NgramLM, arpa_file: Callable[[NgramLM], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building the trie of 200,000 words takes seconds."""
    path, logits, hot = arpa_file(word_model), random_logits(12, 0), ["dab", "bad", "zzz"]
    wanted = build_ctcdecoder(LABELS, path, alpha=0.7).decode_beams(logits, hotwords=hot)
    decoder = build_ctcdecoder(LABELS, path)
    before = decoder.decode_beams(logits)
    monkeypatch.setattr(WordTrie, "of_characters", None)
    decoder.reset_params(alpha=0.7)
    assert decoder.decode_beams(logits, hotwords=hot) == wanted
    decoder.reset_params(alpha=0.5)
    assert decoder.decode_beams(logits) == before != wanted


def test_impossible_labels_have_the_least_score() -> None:
    decoder = build_ctcdecoder(["", "a"])
    beams = decoder.decode_beams(np.array([[0.0, -500.0]]), beam_prune_logp=-100.0, token_min_logp=-100.0)
    assert {beam[0]: beam[3] for beam in beams} == pytest.approx({"": 0.0, "a": math.log(1e-15)}, abs=1e-4)


def test_pieces_merge_however_a_word_is_split() -> None:
    decoder = build_ctcdecoder(["", "▁b", "▁ba", "ad", "d", "▁"])
    sure = np.full((4, 6), -20.0)
    sure[0, [1, 2]], sure[1, [3, 4]], sure[2, 0], sure[3, 5] = 0.0, 0.0, 0.0, 0.0
    beams = decoder.decode_beams(sure)
    # b + ad and ba + d are one text, twice as probable as b + d and ba + ad.
    assert beams[0][0] == "bad"
    assert beams[0][3] == pytest.approx(math.log(0.5), abs=1e-3)
    assert {beam[0] for beam in beams} >= {"bd", "baad"}


PIECES = ["", "▁a", "▁b", "a", "ab", "▁ab", "▁⁇▁", "b▁"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("has_tables", [True, False])
def test_pieces_against_all_paths(
    seed: int, has_tables: bool, ngram_of: Callable[..., NgramLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also pieces that end a word, such as the unknown piece: two words may end within one frame."""
    monkeypatch.setattr("asr.ctc.prefix_beam._ROUNDS_BETWEEN_MARKS", 1)
    lm = ngram_of(["a ab", "b ab a", "ab b", "ba a"], ["a", "b", "ab", "ba"], order=2)
    decoder = build_ctcdecoder(PIECES, language_model=lm if has_tables else ForgetfulNgram(lm))
    log_prob = torch.from_numpy(random_logits(4, seed, len(PIECES))).log_softmax(1).numpy()
    sums: dict[str, float] = {}
    for path in itertools.product(range(len(PIECES)), repeat=len(log_prob)):
        written = "".join(PIECES[label] for label, _ in itertools.groupby(path))
        text = " ".join(written.replace("▁", " ").split())
        sums[text] = float(np.logaddexp(sums.get(text, -math.inf), log_prob[np.arange(len(path)), path].sum()))
    wanted = {}
    for text, score in sums.items():
        words = text.split()
        unknown = sum(word not in lm.vocabulary for word in words)
        of_words = 0.5 * float(lm.score_sentence(words).double().sum()) + 1.5 * len(words)
        wanted[text] = score + of_words - 0.5 * 10 * math.log(10) * unknown
    found = decoder.decode_beams(log_prob, beam_width=10**5, beam_prune_logp=-1e6, token_min_logp=-1e6)
    assert {beam[0]: beam[-1] for beam in found} == pytest.approx(wanted, abs=1e-2)


@pytest.mark.parametrize("order", [1, -1])
def test_a_text_is_one_prefix_whatever_its_pieces(order: int) -> None:
    """Otherwise equal texts are not merged, and crowd out others."""
    labels = ["", "▁", *["▁a", "a", "b", "ab", "abb"][::order]]
    decoder = build_ctcdecoder(labels)
    beam = PrefixBeam(decoder._rules(decoder._scored_words(None, 0.0), 1000, -1e6, -1e6, 0))
    read_chunks([beam], [decoder._log_probs(random_logits(6, 0, len(labels)))], None)
    prefixes = [tuple(beam.characters(each.prefix)[0].tolist()) for each in beam.alive()]
    assert len(set(prefixes)) == len(prefixes) > 50


def test_a_prefix_and_its_last_piece_are_one_hypothesis() -> None:
    """Otherwise the parts of its score are pruned apart, and take two places in the beam.

    In the last frame, `ab` makes the prefix `ba` between the paths `bb` + `a` and `b-` + `a`.
    """
    decoder = build_ctcdecoder(["", "b", "a", "ab"])
    beam = PrefixBeam(decoder._rules(decoder._scored_words(None, 0.0), 100, -100.0, -5.0, 0))
    probable = [[1], [0, 1], [0, 1, 2, 3]]
    logits = np.full((3, 4), -20.0)
    for frame, columns in enumerate(probable):
        logits[frame, columns] = 0.0
    read_chunks([beam], [decoder._log_probs(logits)], None)
    num = int(beam.prefixes.count[NUM_ALIVE])
    alive = list(zip(beam.prefixes.node[:num].tolist(), beam.prefixes.last[:num].tolist(), strict=True))
    assert len(set(alive)) == len(alive) == 5


def test_a_piece_after_a_boundary_is_the_same_as_without() -> None:
    """`b` + `▁a` and `b▁` + `▁a` are one hypothesis, in one place of the beam."""
    decoder = build_ctcdecoder(["", "▁", "▁a", "b"])
    beam = PrefixBeam(decoder._rules(decoder._scored_words(None, 0.0), 100, -100.0, -5.0, 0))
    logits = np.full((3, 4), -20.0)
    logits[0, 3], logits[1, :2], logits[2, 2] = 0.0, 0.0, 0.0
    read_chunks([beam], [decoder._log_probs(logits)], None)
    assert int(beam.prefixes.count[NUM_ALIVE]) == 1
    assert beam.alive()[0].am_score == pytest.approx(0.0, abs=1e-6)


def test_pieces_that_do_not_survive_leave_no_characters() -> None:
    """Otherwise the tree grows by the characters of all pieces in each frame, and most of the time goes there."""
    labels = ["", *(f"▁{first}{second}xyz" for first in "abcd" for second in "efgh")]
    decoder = build_ctcdecoder(labels)
    beam = PrefixBeam(decoder._rules(decoder._scored_words(None, 0.0), 2, -100.0, -100.0, 0))
    read_chunks([beam], [decoder._log_probs(random_logits(5, 0, len(labels)))], None)
    assert int(beam.prefixes.count[NUM_PREFIXES]) <= 1 + 5 * 2 * 6


def test_frames_of_words() -> None:
    decoder = build_ctcdecoder(LABELS)
    rows = [1, 2, 2, 0, 3, 1, 1, 0, 4, 4, 0]
    logits = np.full((len(rows), len(LABELS)), -20.0)
    logits[np.arange(len(rows)), rows] = 0.0
    text, state, frames, _, _ = decoder.decode_beams(logits)[0]
    assert (text, state) == ("ab c", None)
    assert frames == [("ab", (1, 5)), ("c", (8, 10))]


@pytest.mark.parametrize("labels", [LABELS[:5], PIECES])
def test_frames_of_words_are_in_order(labels: list[str]) -> None:
    decoder = build_ctcdecoder(labels)
    for seed in range(20):
        for _, _, spans, _, _ in decoder.decode_beams(random_logits(30, seed, len(labels)))[:5]:
            frames = [frame for _, span in spans for frame in span]
            assert frames == sorted(frames)
            assert all(begin < end for _, (begin, end) in spans)


def test_batches_and_states(word_model: NgramLM, arpa_file: Callable[[NgramLM], Path]) -> None:
    decoder = build_ctcdecoder(LABELS, arpa_file(word_model), WORDS)
    utterances = [random_logits(length, length) for length in (12, 1, 30)]
    batch = decoder.decode_beams_batch(None, utterances)
    for logits, beams in zip(utterances, batch, strict=True):
        single = decoder.decode_beams(logits)
        assert [(text, frames, score, total) for text, _, frames, score, total in single] == beams
    assert decoder.decode_batch(None, utterances) == [beams[0][0] for beams in batch]
    first = decoder.decode_beams(utterances[0])[0]
    assert first[1] is not None
    going_on = decoder.decode_beams(utterances[1], lm_start_state=first[1])[0]
    text = first[0].split()
    plain = word_model.score_sentence([*text, *going_on[0].split()])
    expected = 0.5 * float(plain[len(text) :].sum()) + 1.5 * len(going_on[0].split())
    unknown = sum(word not in WORDS for word in going_on[0].split())
    assert going_on[4] - going_on[3] == pytest.approx(expected - 0.5 * 10 * math.log(10) * unknown, abs=1e-3)


@pytest.fixture
def network() -> RNNLanguageModel:
    torch.manual_seed(0)
    made = RNNLanguageModel(Vocabulary(WORDS), RNNLMConfig(hidden_size=16, embedding_size=8, output="full")).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4.0)
    return made


@pytest.mark.parametrize("source", [None, "arpa", "kenlm", "network", "mix"])
def test_decoders_in_other_processes(
    source: str | None,
    word_model: NgramLM,
    network: RNNLanguageModel,
    arpa_file: Callable[[NgramLM], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = arpa_file(word_model)
    models = {
        None: {},
        "arpa": {"kenlm_model_path": path},
        "kenlm": {"kenlm_model_path": path, "unigrams": WORDS},
        "network": {"language_model": network},
        "mix": {"language_model": Interpolated([CachedRNNLM(network), word_model], [0.5, 0.5])},
    }
    if source == "kenlm":
        pytest.importorskip("kenlm")
        monkeypatch.setattr("asr.ctc.pyctcdecode.is_kenlm_binary", lambda path: True)  # KenLM reads ARPA text, too
    decoder = build_ctcdecoder(LABELS, **models[source])  # type: ignore[arg-type]
    logits = random_logits(14, 0)
    wanted = decoder.decode_beams(logits)
    for received in (pickle.loads(pickle.dumps(decoder)), pickle.loads(ForkingPickler.dumps(decoder))):
        assert received.decode_beams(logits) == wanted
    assert decoder.decode_beams(logits) == wanted


def test_states_may_be_used_later_and_elsewhere(network: RNNLanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> BeamSearchDecoderCTC:
        return build_ctcdecoder(LABELS, language_model=network, alpha=2.0, unk_score_offset=-1.0)

    first, second = random_logits(16, 1), random_logits(8, 5)
    first[np.arange(14), [column for letter in "bad cab" for column in (LABELS.index(letter), 0)]] += 9.0
    decoder = made()
    states = [state for _, state, *_ in decoder.decode_beams(first)[:20]]

    def going_on(by: BeamSearchDecoderCTC) -> dict[tuple[int, str], float]:
        found = [by.decode_beams(second, lm_start_state=state)[:5] for state in states]
        return {(number, text): total for number, beams in enumerate(found) for text, *_, total in beams}

    totals = going_on(decoder)
    wanted = pytest.approx(totals, abs=0.05)
    best = [max(total for (of, _), total in totals.items() if of == number) for number in range(len(states))]
    assert max(best) - min(best) > 1.0
    assert going_on(made()) == wanted
    with decoder._models.lent():  # as another thread's search would
        assert going_on(decoder) == wanted
    monkeypatch.setattr("asr.ctc.language_models._CACHE_BYTES", 60_000)
    forgetful = made()
    forgetful.decode_beams(first)
    for seed in range(3):
        forgetful.decode_beams(random_logits(30, seed))
        assert going_on(forgetful) == wanted


@pytest.mark.parametrize("has_boundary", [True, False])
def test_states_hold_all_that_an_n_gram_model_remembers(ngram_of: Callable[..., NgramLM], has_boundary: bool) -> None:
    lm = ngram_of(["bad cab ace", "dead bead ace bad", "ace bad cab", "cab dead bead"], WORDS, order=3)
    decoder = build_ctcdecoder(LABELS, language_model=lm, lm_score_boundary=has_boundary)
    text, state = "", None
    for spoken in ("bad cab", "ace", "abe", "dead"):
        columns = [column for letter in spoken for column in (LABELS.index(letter), 0)]
        logits = np.full((len(columns), len(LABELS)), -9.0)
        logits[np.arange(len(columns)), columns] = 9.0
        best = decoder.decode_beams(logits, lm_start_state=state)[0]
        assert best[0] == spoken
        history, new = text.split(), spoken.split()
        context = int(lm.start(1)) if has_boundary else 0
        scores = []
        for word in (*history, *new):
            score, following = lm.score(torch.tensor([context]), lm.vocabulary.ids_of([word]))
            scores.append(float(score))
            context = int(following)
        of_words = sum(scores[len(history) :]) + (float(lm.final(torch.tensor([context]))) if has_boundary else 0.0)
        unknown = 0.5 * 10 * math.log(10) * (spoken == "abe")
        assert best[4] - best[3] == pytest.approx(0.5 * of_words + 1.5 * len(new) - unknown, abs=1e-3)
        text, state = f"{text} {spoken}", best[1]
    with pytest.raises(AsrError, match="lm_start_state is of type str; give a state that decode_beams has returned"):
        decoder.decode(logits, lm_start_state="bad cab")  # type: ignore[arg-type]


def test_parameters_can_be_reset(word_model: NgramLM, arpa_file: Callable[[NgramLM], Path]) -> None:
    path = arpa_file(word_model)
    decoder = build_ctcdecoder(LABELS, path)
    logits = random_logits(12, 1)
    decoder.reset_params(alpha=0.1, beta=-2.0, unk_score_offset=-1.0, lm_score_boundary=False)
    other = build_ctcdecoder(LABELS, path, alpha=0.1, beta=-2.0, unk_score_offset=-1.0, lm_score_boundary=False)
    assert decoder.decode_beams(logits) == other.decode_beams(logits)
    assert decoder.decode_beams(logits) != build_ctcdecoder(LABELS, path).decode_beams(logits)


def test_saved_and_loaded(tmp_path: Path, word_model: NgramLM, arpa_file: Callable[[NgramLM], Path]) -> None:
    decoder = build_ctcdecoder(LABELS, arpa_file(word_model), WORDS, alpha=0.7)
    folder = tmp_path / "new" / "saved"
    decoder.save_to_dir(folder)
    assert json.loads((folder / "language_model" / "attrs.json").read_text())["alpha"] == 0.7
    logits = random_logits(15, 2)
    again = BeamSearchDecoderCTC.load_from_dir(folder)
    assert again.decode_beams(logits) == decoder.decode_beams(logits)
    again.reset_params(alpha=0.3)
    again.save_to_dir(folder)  # over the files that it was loaded from
    assert BeamSearchDecoderCTC.load_from_dir(folder).decode_beams(logits) == again.decode_beams(logits)
    (folder / "language_model" / ".DS_Store").write_bytes(b"")
    found = BeamSearchDecoderCTC.parse_directory_contents(folder)
    assert found == {"alphabet": str(folder / "alphabet.json"), "language_model": str(folder / "language_model")}
    decoder.cleanup()
    BeamSearchDecoderCTC.clear_class_models()
    assert BeamSearchDecoderCTC.load_from_dir(folder).decode_beams(logits) == again.decode_beams(logits)
    with pytest.raises(AsrError, match=r"model\.arpa: the decoder cannot be saved there"):
        decoder.save_to_dir(arpa_file(word_model))
    with pytest.raises(AsrError, match="not the folder of a saved decoder"):
        BeamSearchDecoderCTC.load_from_dir(tmp_path)
    (folder / "alphabet.json").write_text("[]")
    with pytest.raises(AsrError, match=f"^{folder}: this is not the folder of a saved decoder .*valid 'labels'"):
        BeamSearchDecoderCTC.load_from_dir(folder)


def test_decoders_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_ctcdecoder(LABELS).save_to_dir(tmp_path / "me" / "mine")

    def downloaded(name: str, cache_dir: Path, **arguments: str) -> str:
        assert arguments == {"revision": "main"}
        if not (cache_dir / name).is_dir():
            raise OSError("404")
        return str(cache_dir / name)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=downloaded))
    decoder = BeamSearchDecoderCTC.load_from_hf_hub("me/mine", tmp_path, revision="main")
    logits = random_logits(12, 0)
    assert decoder.decode_beams(logits) == build_ctcdecoder(LABELS).decode_beams(logits)
    with pytest.raises(AsrError, match=r"me/other: the decoder cannot be downloaded \(404\)"):
        BeamSearchDecoderCTC.load_from_hf_hub("me/other", tmp_path, revision="main")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(AsrError, match="me/mine: a download needs the package; `pip install huggingface_hub`"):
        BeamSearchDecoderCTC.load_from_hf_hub("me/mine")


def test_alphabets_as_text() -> None:
    alphabet = Alphabet.build_alphabet(["<unk>", "▁a"])
    assert Alphabet.loads(alphabet.dumps()) == alphabet
    for text in ("[", "[]", "{}", '{"labels": [1], "is_bpe": false}', '{"labels": ["▁ a"], "is_bpe": true}'):
        with pytest.raises(AsrError, match="these are not the labels of a saved decoder"):
            Alphabet.loads(text)


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        (["_", "|", "a"], ["", " ", "a"]),
        (["a", "|"], ["a", " ", ""]),
        (["<pad>", "<unk>", "|", "a"], ["", "⁇", " ", "a"]),
        (["[PAD]", "the", "##re"], ["", "▁the", "re"]),
        (["<unk>", "▁a"], ["▁⁇▁", "▁a", ""]),
    ],
)
def test_alphabets(labels: list[str], wanted: list[str]) -> None:
    assert Alphabet.build_alphabet(labels).labels == wanted


def test_only_ngrams_score_sentences_without_their_beginning(word_model: NgramLM) -> None:
    other = RemappedLM(word_model, word_model.vocabulary)
    with pytest.raises(AsrError, match="lm_score_boundary=False needs an n-gram model"):
        build_ctcdecoder(LABELS, language_model=other, lm_score_boundary=False)
    with pytest.raises(AsrError, match="lm_score_boundary=False needs an n-gram model"):
        build_ctcdecoder(LABELS, language_model=other).reset_params(lm_score_boundary=False)
    build_ctcdecoder(LABELS, language_model=word_model, lm_score_boundary=False)


@pytest.mark.parametrize("seed", range(3))
def test_models_that_forget_nothing_are_pruned_by_three_words(seed: int, word_model: NgramLM) -> None:
    """As if they were n-gram models of order 4, though their contexts differ."""
    decoder = build_ctcdecoder(LABELS, language_model=ForgetfulNgram(word_model))
    logits = random_logits(13, seed) / 3.0
    logits[:, :2] = -20.0
    logits[1::2, 1] = 20.0  # words of a letter
    log_prob = torch.from_numpy(logits).log_softmax(1).numpy()
    found = {beam[0]: beam[-1] for beam in decoder.decode_beams(logits, beam_width=40, prune_history=True)}
    wanted, others = (plain_search(log_prob, word_model, beam_width=40, history=history) for history in (3, 2))
    best = max(wanted.values())
    assert found == pytest.approx({text: score for text, score in wanted.items() if score >= best - 10}, abs=1e-2)
    assert set(wanted) != set(others)


@pytest.mark.parametrize("seed", range(3))
def test_unfinished_words_are_pruned_by_the_unigrams_of_a_combination(
    seed: int, ngram_of: Callable[..., NgramLM]
) -> None:
    sentences = [f"{word} dead ace" for word in WORDS]
    lm, same = (ngram_of(sentences, WORDS, order=2) for _ in range(2))
    decoder = build_ctcdecoder(LABELS, None, None, 3.0, language_model=Interpolated([lm, same], [0.5, 0.5]))
    logits = random_logits(14, seed) / 2.0
    log_prob = torch.from_numpy(logits).log_softmax(1).numpy()
    found = {beam[0]: beam[-1] for beam in decoder.decode_beams(logits, beam_width=5)}
    wanted, others = (
        plain_search(log_prob, lm, alpha=3.0, beam_width=5, looks_ahead=looks_ahead) for looks_ahead in (True, False)
    )
    best = max(wanted.values())
    assert found == pytest.approx({text: score for text, score in wanted.items() if score >= best - 10}, abs=1e-2)
    assert set(wanted) != set(others)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_probabilities_of_any_precision(dtype: torch.dtype) -> None:
    decoder = build_ctcdecoder(LABELS)
    logits = torch.from_numpy(random_logits(40, 3))
    given = logits.softmax(1).to(dtype)
    assert decoder.decode(given) == decoder.decode(logits) != ""
    assert decoder.decode_beams(given)[0][4] == pytest.approx(decoder.decode_beams(logits)[0][4], abs=0.1)


def test_unigrams_of_an_arpa_file(
    word_model: NgramLM, arpa_file: Callable[[NgramLM], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyctcdecode's `load_unigram_set_from_arpa` returns the file's special words, too."""
    pytest.importorskip("kenlm")
    path, logits = arpa_file(word_model), random_logits(15, 2)
    wanted = build_ctcdecoder(LABELS, path, WORDS).decode_beams(logits)
    unigrams = ["<s>", "</s>", "<unk>", *WORDS]
    assert build_ctcdecoder(LABELS, path, unigrams).decode_beams(logits) == wanted
    monkeypatch.setattr("asr.ctc.pyctcdecode.is_kenlm_binary", lambda path: True)  # KenLM reads ARPA, too
    found = build_ctcdecoder(LABELS, path, unigrams).decode_beams(logits)
    assert [beam[0] for beam in found] == [beam[0] for beam in wanted]
    assert [beam[4] for beam in found] == pytest.approx([beam[4] for beam in wanted], abs=1e-3)


def test_words_in_another_case_are_told(word_model: NgramLM, arpa_file: Callable[[NgramLM], Path]) -> None:
    path = arpa_file(word_model)
    with pytest.raises(AsrError, match=r"the words \('[a-z]+', ...\) cannot .* labels, which are in upper case"):
        build_ctcdecoder([label.upper() for label in LABELS], path)
    with pytest.raises(AsrError, match=r"the words \('BAD', ...\) cannot .* labels, which are in lower case"):
        build_ctcdecoder(LABELS, path, [word.upper() for word in WORDS])
    build_ctcdecoder(["", " ", *"xyz"], path)  # not a question of case


def test_bad_input_is_told(tmp_path: Path) -> None:
    decoder = build_ctcdecoder(LABELS)
    with pytest.raises(AsrError, match="give \\(frames, 7\\)"):
        decoder.decode(np.zeros((3, 4)))
    with pytest.raises(AsrError, match="NaN"):
        decoder.decode(np.full((3, 7), np.nan))
    with pytest.raises(AsrError, match="occurs twice"):
        build_ctcdecoder(["a", "a"])
    for name, value in [("unigrams", WORDS), ("alpha", 0.7), ("unk_score_offset", 0.0), ("lm_score_boundary", False)]:
        with pytest.raises(AsrError, match=f"{name} has no effect here: there is no language model"):
            build_ctcdecoder(LABELS, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(AsrError, match="beta has no effect here"):
        decoder.reset_params(beta=1.0)
    for beam_width in (0, math.inf):
        with pytest.raises(AsrError, match=f"beam_width is {beam_width}"):
            decoder.decode(np.zeros((3, 7)), beam_width=beam_width)  # type: ignore[arg-type]
    with pytest.raises(AsrError, match="hotword_weight is nan"):
        decoder.decode(np.zeros((3, 7)), hotwords=["ab"], hotword_weight=math.nan)
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"mmap lm http://kheafield.com/code format version 5\n\0")
    with pytest.raises(AsrError, match="give unigrams"):
        build_ctcdecoder(LABELS, binary)


@pytest.mark.parametrize("seed", range(4))
def test_same_as_the_package(seed: int, word_model: NgramLM, arpa_file: Callable[[NgramLM], Path]) -> None:
    theirs_module = pytest.importorskip("pyctcdecode")
    importlib.import_module("kenlm")
    path = str(arpa_file(word_model))
    theirs = theirs_module.build_ctcdecoder(LABELS, path, WORDS)
    ours = build_ctcdecoder(LABELS, path, WORDS)
    logits = random_logits(40, seed)
    # The package scores an empty word behind a last space; so the last frame is surely a letter.
    logits[-1, LABELS.index("e")] = 30.0
    for settings in (
        {},
        {"hotwords": ["dab", "ace"]},
        {"beam_width": 10},
        {"beam_width": 10, "prune_history": True},
    ):
        wanted, found = theirs.decode_beams(logits, **settings), ours.decode_beams(logits, **settings)
        assert [beam[0] for beam in found[:3]] == [beam[0] for beam in wanted[:3]]
        assert [beam[-1] for beam in found[:3]] == pytest.approx([beam[-1] for beam in wanted[:3]], abs=1e-3)


def test_values_of_other_types(word_model: NgramLM) -> None:
    logits = torch.from_numpy(random_logits(12, 0)).bfloat16()
    decoder = build_ctcdecoder(LABELS, language_model=word_model, unigrams=np.array(WORDS))  # type: ignore[arg-type]
    assert decoder.decode_beams(logits) == decoder.decode_beams(logits.float())
    given = logits.float()
    given[3] = -math.inf
    with pytest.raises(AsrError, match="a frame of nothing but -inf"):
        decoder.decode(given)
    for name in ("alpha", "beta", "unk_score_offset"):
        with pytest.raises(AsrError, match=f"{name} is 'x'; it must be a number"):
            decoder.reset_params(**{name: "x"})  # type: ignore[arg-type]
        with pytest.raises(AsrError, match=f"{name} is nan; it must be a number"):
            build_ctcdecoder(LABELS, language_model=word_model, **{name: math.nan})  # type: ignore[arg-type]
        with pytest.raises(AsrError, match=f"{name} is -inf; it must be finite"):
            decoder.reset_params(**{name: -math.inf})
    for name in ("beam_width", "beam_prune_logp", "token_min_logp", "hotword_weight"):
        with pytest.raises(AsrError, match=f"{name} is 'x'; it must be a number"):
            decoder.decode(logits, **{name: "x"})  # type: ignore[arg-type]
    with pytest.raises(AsrError, match="hotwords: None is not a word"):
        decoder.decode(logits, hotwords=[None])  # type: ignore[list-item]
    with pytest.raises(AsrError, match="unigrams: None is not a word"):
        build_ctcdecoder(LABELS, language_model=word_model, unigrams=["bad", None])  # type: ignore[list-item]
    with pytest.raises(AsrError, match=r"unigrams is 'words\.txt'; give the words themselves"):
        build_ctcdecoder(LABELS, language_model=word_model, unigrams="words.txt")
    with pytest.raises(AsrError, match="None is not a label"):
        build_ctcdecoder([None, *LABELS])  # type: ignore[list-item]


def test_a_beam_may_have_any_width() -> None:
    decoder, logits = build_ctcdecoder(LABELS), random_logits(8, 0)
    assert decoder.decode_beams(logits, beam_width=sys.maxsize) == decoder.decode_beams(logits, beam_width=10_000)


def test_a_word_ends_after_an_unknown_piece() -> None:
    labels = ["", "<unk>", "▁a", "b"]
    logits = np.full((4, 4), -20.0)
    logits[[0, 1, 2, 3], [2, 1, 3, 3]] = 0.0
    assert build_ctcdecoder(labels).decode(logits) == "a ⁇ b"
