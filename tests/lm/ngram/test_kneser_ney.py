"""The estimator against a slow one written with dictionaries, and against lmplz's figures on WikiText-2."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from asr.cli.main import run
from asr.errors import AsrError
from asr.lm.corpus import read_word_stream
from asr.lm.evaluate import measure_perplexity
from asr.lm.ngram.arpa import read_arpa, write_arpa
from asr.lm.ngram.estimate import count_ngrams, estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.lm.ngram.transform import prune_to_size, prune_to_threshold, set_backoffs
from asr.text.symbols import Vocabulary
from tests.reference.ngram_oracle import BackoffModel, kneser_ney, toy_sentences
from tests.reference.tiny_arpa import TINY


def _text(folder: Path, sentences: list[str]) -> Path:
    path = folder / "text.txt"
    path.write_text("\n".join(["", *sentences, "  "]) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "thresholds", "limited"),
    [(1, [0], False), (2, [0, 0], False), (3, [0, 0, 0], False), (3, [0, 1, 1], False), (4, [0, 0, 0, 1], True)],
)
def test_equals_the_slow_estimator(tmp_path: Path, order: int, thresholds: list[int], limited: bool) -> None:
    sentences = toy_sentences(seed=order, num_sentences=300)
    allowed = {f"w{i}" for i in range(7)} if limited else None
    vocabulary = Vocabulary(sorted(allowed)) if allowed else None
    stream = read_word_stream([_text(tmp_path, sentences)], vocabulary)
    model = estimate_kneser_ney(stream, order, thresholds)
    assert model.fallback_orders == ()
    expected = kneser_ney(sentences, order, thresholds, allowed)
    ours = {ngram: score for ngram, score in BackoffModel(model.trie).score.items() if ngram != ("<s>",)}
    assert ours.keys() == expected.keys()
    for ngram, probability in expected.items():
        assert np.exp(ours[ngram]) == pytest.approx(probability, rel=1e-5), ngram


@pytest.mark.parametrize("prune", [(), (0, 0, 2)])
def test_every_history_sums_to_one(tmp_path: Path, prune: tuple[int, ...]) -> None:
    stream = read_word_stream([_text(tmp_path, toy_sentences(1))])
    lm = NgramLM.from_trie(estimate_kneser_ney(stream, 3, prune).trie)
    num_words = len(lm.vocabulary)
    state = torch.arange(lm.num_states).repeat_interleave(num_words)
    score, _ = lm.score(state, torch.arange(num_words).repeat(lm.num_states))
    torch.testing.assert_close(score.exp().view(-1, num_words).sum(1), torch.ones(lm.num_states))


def test_words_that_the_text_lacks_can_be_listed(tmp_path: Path) -> None:
    vocabulary = Vocabulary(["unheard", "w1", "w2", "unseen"])
    stream = read_word_stream([_text(tmp_path, toy_sentences(1))], vocabulary)
    tries = [estimate_kneser_ney(stream, 3, keep_unseen=keep).trie for keep in (True, False)]
    assert [("unseen",) in BackoffModel(trie).score for trie in tries] == [True, False]
    lm = NgramLM.from_trie(tries[0])
    unseen, word_id = vocabulary.id_of("unseen"), torch.arange(len(vocabulary))
    state = torch.arange(lm.num_states).repeat_interleave(len(vocabulary))
    score = lm.score(state, word_id.repeat(lm.num_states))[0].view(-1, len(vocabulary))
    torch.testing.assert_close(score[:, unseen], score[:, vocabulary.id_of("<unk>")])
    torch.testing.assert_close(score.exp().sum(1), torch.ones(lm.num_states))


def test_counts_belong_to_the_ngrams_kept(tmp_path: Path) -> None:
    model = estimate_kneser_ney(read_word_stream([_text(tmp_path, ["a b a b", "a b"])]), 2)
    of_bigram = dict(
        zip(map(tuple, model.trie.words_of(2).tolist()), model.count[model.trie.span(2)].tolist(), strict=True)
    )
    assert of_bigram == {(1, 4): 2, (4, 5): 3, (5, 4): 1, (5, 2): 2}
    assert model.fallback_orders == (1,)


def test_discounts_follow_from_counts_of_counts(tmp_path: Path) -> None:
    """Chen and Goodman's equation 26 for the longest n-grams, whose counts are those of the text."""
    stream = read_word_stream([_text(tmp_path, toy_sentences(3, 300))])
    model = estimate_kneser_ney(stream, 3)
    words = [["<s>", *line.split(), "</s>"] for line in toy_sentences(3, 300)]
    ngrams = [
        Counter(gram for one in words for gram in zip(*(one[i:] for i in range(n)), strict=False)) for n in (1, 2, 3)
    ]
    assert model.num_distinct == (len(ngrams[0]) + 1, len(ngrams[1]), len(ngrams[2]))  # <unk> is listed as well
    n1, n2, n3, n4 = (list(ngrams[2].values()).count(times) for times in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    assert model.discounts[2] == pytest.approx((1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3))


def test_discounts_for_texts_that_do_not_determine_them(tmp_path: Path) -> None:
    """ "a" follows "<s>" twice; one count of both is left for the lower order."""
    stream = read_word_stream([_text(tmp_path, ["a", "a"])])
    model = estimate_kneser_ney(stream, 2)
    assert model.discounts == ((0.5, 1.0, 1.5),) * 2 and model.fallback_orders == (1, 2)
    # Of 2 words, "a" and "</s>", each is preceded by one other; the rest is shared with <unk>.
    unigram = 0.5 / 2 + 0.5 / 3
    score = BackoffModel(model.trie).score
    assert np.exp(score["a",]) == pytest.approx(unigram) and np.exp(score["<unk>",]) == pytest.approx(0.5 / 3)
    assert np.exp(score["<s>", "a"]) == pytest.approx(1.0 / 2 + 1.0 / 2 * unigram)


def test_the_last_threshold_holds_for_all_further_orders(tmp_path: Path) -> None:
    stream = read_word_stream([_text(tmp_path, toy_sentences(4, 200))])
    short, full = (estimate_kneser_ney(stream, 3, prune).trie for prune in ((0, 1), (0, 1, 1)))
    np.testing.assert_array_equal(short.score, full.score)
    assert short.counts == full.counts < estimate_kneser_ney(stream, 3).trie.counts
    for prune in ((-1,), (0, -1), (1, 0)):
        with pytest.raises(AsrError, match="has a negative or decreasing threshold"):
            estimate_kneser_ney(stream, 3, prune)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_pruning_a_model_that_rules_words_out(tmp_path: Path) -> None:
    """`a b` is impossible, except after `<s>`. Without the first n-gram it were possible, without the second never."""
    (tmp_path / "a.arpa").write_text(TINY.replace("-0.4\ta b", "-inf\ta b"))
    trie = read_arpa(tmp_path / "a.arpa")
    assert prune_to_threshold(trie, 1e-9).counts == trie.counts == (5, 4, 1)
    kept = {size: prune_to_size(trie, size) for size in (9, 8, 7, 6, 5)}
    assert [pruned.counts for pruned in kept.values()] == [(5, 3, 1), (5, 2, 1), (5, 1, 1), (5, 0, 0), (5, 0, 0)]
    assert kept[8].score[6:].tolist() == trie.score[[6, 7, 10]].tolist()


def test_pruning_keeps_what_matters(tmp_path: Path) -> None:
    stream = read_word_stream([_text(tmp_path, toy_sentences(3, 300))])
    model = estimate_kneser_ney(stream, 3)
    full = measure_perplexity(NgramLM.from_trie(model.trie), stream).perplexity
    np.testing.assert_allclose(set_backoffs(model.trie).backoff, model.trie.backoff, atol=2e-5)
    last = full
    for size in (800, 500, 300, 220):
        pruned = prune_to_size(model.trie, size, model.count)
        assert 0.8 * size < sum(pruned.counts) <= size
        lm = NgramLM.from_trie(pruned)
        now = measure_perplexity(lm, stream).perplexity
        assert now > last
        last = now
        state = torch.arange(lm.num_states).repeat_interleave(len(lm.vocabulary))
        score, _ = lm.score(state, torch.arange(len(lm.vocabulary)).repeat(lm.num_states))
        sums = score.exp().view(lm.num_states, -1).sum(1)
        torch.testing.assert_close(sums, torch.ones(lm.num_states))
    assert prune_to_threshold(model.trie, 0.0).counts[0] == model.trie.counts[0]
    assert prune_to_threshold(model.trie, 1e9).counts == (model.trie.counts[0], 0, 0)
    num_words = model.trie.counts[0]
    assert prune_to_size(model.trie, num_words).counts == (num_words, 0, 0)
    assert prune_to_size(model.trie, sum(model.trie.counts)) is model.trie
    assert sum(prune_to_size(model.trie, sum(model.trie.counts) - 1).counts) < sum(model.trie.counts)
    with pytest.raises(AsrError, match=f"{num_words - 1} n-grams are fewer than the {num_words} words"):
        prune_to_size(model.trie, num_words - 1)


@pytest.mark.parametrize(("entropy", "size"), [("1e-5", 300), ("1e-3", 5_000), ("1e-3", 300)])
def test_pruning_by_entropy_and_size_is_pruning_by_the_stricter(tmp_path: Path, entropy: str, size: int) -> None:
    """With the counts of the text, as each alone."""
    command = ["lm", "ngram", "--text", str(_text(tmp_path, toy_sentences(3, 300))), "--order", "3"]
    by_entropy, by_size = ["--entropy", entropy], ["--max-ngrams", str(size)]
    found = []
    for number, options in enumerate((by_entropy, by_size, [*by_entropy, *by_size])):
        arpa = tmp_path / f"{number}.arpa"
        assert run([*command, *options, "--arpa", str(arpa)]) == 0
        found.append(arpa.read_bytes())
    assert found[0] != found[1] and found[2] == min(found[:2], key=len)


def test_without_counts_histories_weigh_what_the_model_gives_them(tmp_path: Path) -> None:
    """As in SRILM, which has no counts: the entropies that both lose differ, and both keep the shorter n-grams."""
    model = estimate_kneser_ney(read_word_stream([_text(tmp_path, toy_sentences(3, 300))]), 3)
    by_count, by_model = (prune_to_size(model.trie, 300, count) for count in (model.count, None))
    for trie in (by_count, by_model):
        assert sum(trie.counts) <= 300 and trie.counts[0] == model.trie.counts[0]
        scores = BackoffModel(trie).score
        assert all(ngram[:-1] in scores for ngram in scores if len(ngram) > 1)
    assert set(BackoffModel(by_count).score) != set(BackoffModel(by_model).score)


def test_bad_text_and_options(tmp_path: Path) -> None:
    with pytest.raises(AsrError, match="no sentence"):
        read_word_stream([_text(tmp_path, [" ", ""])])
    with pytest.raises(AsrError, match="line 3: the text contains the mark <s> as a word"):
        read_word_stream([_text(tmp_path, ["a b", "<s> a"])])
    (tmp_path / "latin").write_bytes("caf\u00e9\n".encode("latin-1"))
    with pytest.raises(AsrError, match="latin, line 1: the text is not UTF-8"):
        read_word_stream([tmp_path / "latin"])
    (tmp_path / "cut.xz").write_bytes(lzma.compress(b"a b c\n" * 1000)[:-12])
    with pytest.raises(AsrError, match="cannot be unpacked"):
        read_word_stream([tmp_path / "cut.xz"])
    stream = read_word_stream([_text(tmp_path, ["a b"])])
    for order, prune in ((0, []), (2, [0, 0, 0]), (3, [1, 0])):
        with pytest.raises(AsrError, match=r"order: 0|prune: "):
            estimate_kneser_ney(stream, order, prune)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _text(tmp_path, toy_sentences(5, 200))
    transcripts = tmp_path / "transcripts"
    transcripts.write_text("utt1 w1 w2\nutt2\nutt3 w3\n")
    words, arpa, binary = (str(tmp_path / name) for name in ("words", "lm.arpa", "lm.ngram"))
    assert run(["lm", "vocabulary", words, "--text", str(text), "--max-words", "20"]) == 0
    assert json.loads(capsys.readouterr().out)["words"] == 20
    command = ["lm", "ngram", "--text", str(text), "--transcripts", str(transcripts), "--vocabulary", words]
    assert run([*command, "--max-ngrams", "150", "--arpa", arpa, "--binary", binary]) == 0
    report = json.loads(capsys.readouterr().out)
    assert sum(report["ngrams"]) <= 150
    assert report["sentences"] == 203
    assert report["word_types"] == len(set(f"{text.read_text()} w1 w2 w3".split()))
    results = []
    for model in (arpa, binary):
        assert run(["lm", "perplexity", model, str(transcripts), "--transcripts"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1]
    assert results[0]["words"] == 3
    with pytest.raises(AsrError, match="there is nothing to write"):
        run(command)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arpa", "none/a.arpa"], "none/a.arpa: the folder .*none is not there or not writable"),
        (["--arpa", "a", "--binary", "a"], "a: two results would go to this file"),
        (["--binary", "."], "this is a folder"),
        (["--arpa", "a.arpa.gz"], "ARPA text is written uncompressed; leave out .gz"),
        (["--arpa", "a", "--entropy", "nan"], "--entropy nan: give a number of 0 or more"),
        (["--arpa", "a", "--entropy", "-1"], "--entropy -1.0: give a number of 0 or more"),
        (["--arpa", "a", "--order", "0"], "--order and --max-ngrams must be 1 or more"),
        (["--arpa", "a", "--max-ngrams", "0"], "--order and --max-ngrams must be 1 or more"),
        (["--arpa", "a", "--prune", "2", "1"], r"--prune: \[2, 1, 1\] has a negative or decreasing threshold"),
        (["--arpa", "a", "--prune", "0", "0", "0", "1"], "--prune: 4 thresholds for 3 orders"),
        (["--arpa", "a", "--map-unknown"], "--map-unknown needs --vocabulary"),
        (["--arpa", "a", "--no-index"], "--no-index changes the binary file; give --binary"),
        (["--arpa", "a", "--compress"], "--compress changes the binary file; give --binary"),
        (["--arpa", "a", "--quantize"], "--quantize changes the binary file; give --binary"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AsrError, match=message):
        run(["lm", "ngram", "--text", "nowhere.txt", *options])


@pytest.mark.parametrize("options", [["--order", "2"], ["--prune", "0", "1"], ["--map-unknown"]])
def test_options_of_counting_have_no_effect_on_a_model(options: list[str]) -> None:
    with pytest.raises(AsrError, match=f"{options[0]} has no effect with --from-arpa"):
        run(["lm", "ngram", "--from-arpa", "nowhere.arpa", "--arpa", "a", *options])


@pytest.mark.parametrize(
    ("options", "message"),
    [(["words", "--max-words", "-1"], "--max-words -1"), (["none/words"], "make it first")],
)
def test_a_wrong_request_for_a_word_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AsrError, match=message):
        run(["lm", "vocabulary", *options, "--text", "nowhere.txt"])


def test_a_text_with_more_words_than_numbers_is_refused() -> None:
    word_id = np.broadcast_to(np.int32(4), 2**31)  # takes no memory
    with pytest.raises(AsrError, match="2147483648 words with sentence marks, the limit is 2147483647"):
        next(count_ngrams(word_id, 5, 2))


def test_texts_without_words_have_no_word_list(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("u1\nu2\n")
    with pytest.raises(AsrError, match="the texts contain no words"):
        run(["lm", "vocabulary", str(tmp_path / "words"), "--transcripts", str(tmp_path / "ids")])


def test_a_lexicon_lists_words_in_any_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("the Dog\nthe cow barks\n")
    (tmp_path / "lexicon").write_text("THE DH AH\nDOG D AO G\nbarks B AA R K S\n")
    words = tmp_path / "words"
    command = ["lm", "vocabulary", str(words), "--text", str(tmp_path / "text"), "--lexicon", str(tmp_path / "lexicon")]
    assert run(command) == 0
    assert json.loads(capsys.readouterr().out)["words"] == 3
    assert words.read_text().split() == ["the", "Dog", "barks"]
    (tmp_path / "lexicon").write_text("A AH\n")
    with pytest.raises(AsrError, match="it contains no word of the texts"):
        run(command)


@pytest.mark.slow
@pytest.mark.corpus
def test_wikitext_perplexity_is_that_of_lmplz(corpora: Path) -> None:
    folder = corpora / "text" / "wikitext-2"
    model = estimate_kneser_ney(read_word_stream([folder / "train.txt.xz"]), 3)
    assert model.trie.counts == (33279, 619591, 1398959)
    lm = NgramLM.from_trie(model.trie)
    for part, expected in (("valid", 247.66), ("test", 230.89)):
        stream = read_word_stream([folder / f"{part}.txt.xz"], lm.vocabulary)
        assert measure_perplexity(lm, stream).perplexity == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("source", ["--text", "--from-arpa"])
def test_a_vocabulary_of_the_other_case_is_refused(source: str, tmp_path: Path) -> None:
    """The model would have no words."""
    (tmp_path / "words").write_text("HELLO\nWORLD\n")
    paths = {"--text": _text(tmp_path, ["hello world"]), "--from-arpa": tmp_path / "model"}
    write_arpa(estimate_kneser_ney(read_word_stream([paths["--text"]]), 2).trie, paths["--from-arpa"])
    command = ["lm", "ngram", source, str(paths[source]), "--vocabulary", str(tmp_path / "words")]
    with pytest.raises(AsrError, match=rf"words: none of its words is in .*{paths[source].name}; check that both"):
        run([*command, "--arpa", str(tmp_path / "empty")])
    assert not (tmp_path / "empty").exists()
