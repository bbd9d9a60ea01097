"""Minimum-Bayes-risk decoding against every path written out."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asr.decoding.cpu.mbr import (
    Rows,
    expected_errors,
    least_risk,
    nearest_path,
    path_within,
    position_posteriors,
    sentence_posteriors,
)
from asr.decoding.interface import Hypothesis
from asr.decoding.lattice import Lattice, best_to_end
from asr.decoding.mbr import PartPosteriors, PathPosteriors
from asr.decoding.nbest import n_best
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.decoding.words import with_final_words
from asr.errors import AsrError
from asr.kernels.jit import jit
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.decoding.small_lattices import lattice_of_all_sorts, small_lattice
from tests.reference import minimum_risk
from tests.reference.edit_distance import edit_distance
from tests.reference.table_lm import TableLM

PLAIN = DecodingOptions()


def all_paths(lattice: Lattice, options: DecodingOptions = PLAIN) -> list[tuple[tuple[int, ...], float]]:
    """The words and the total of every path."""
    arc_total, final_total = lattice.arc_total(options).tolist(), lattice.final_total(options).tolist()
    begin, dst = lattice.arc_begin.tolist(), lattice.dst_state.tolist()
    word_begin, word_id = lattice.word_begin.tolist(), lattice.word_id.tolist()
    found, waiting = [], [(int(lattice.start_state[0]), (), 0.0)]
    while waiting:
        state, words, total = waiting.pop()
        if final_total[state] > -math.inf:
            found.append((words, total + final_total[state]))
        for arc in range(begin[state], begin[state + 1]):
            longer = words + tuple(word_id[word_begin[arc] : word_begin[arc + 1]])
            waiting.append((dst[arc], longer, total + arc_total[arc]))
    return found


def exact_risk(lattice: Lattice, sentence: Sequence[int], scale: float = 1.0) -> float:
    paths = all_paths(lattice)
    weight = np.exp([scale * total for _, total in paths])
    errors = [edit_distance(sentence, words) for words, _ in paths]
    return float(weight @ errors / weight.sum())


def tree(seed: int) -> Lattice:
    """A lattice in which one path leads to each state; arcs have up to three words."""
    generator = random.Random(seed)
    frame, arcs, level = [0], [], [0]
    for now in range(1, 4):
        following = []
        for state in level:
            for _ in range(generator.choice((1, 1, 2, 3))):
                words = [generator.choice((4, 5, 6)) for _ in range(generator.choice((0, 1, 1, 2, 3)))]
                arcs.append((state, len(frame), words, -2.0 * generator.random()))
                following.append(len(frame))
                frame.append(now)
        level = following
    return small_lattice(frame, arcs, [-generator.random() if generator.random() < 0.5 else -math.inf for _ in frame])


def sentences(seed: int, words: Sequence[int]) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.choice(words) for _ in range(length)] for length in (0, 1, 2, 5) if words or not length]


def rows_at(lattice: Lattice, scale: float = 1.0, options: DecodingOptions = PLAIN) -> tuple[Rows, Any]:
    """The rows of a lattice at a scale, and its distinct words."""
    posteriors = PartPosteriors(lattice, options)
    return posteriors.at(scale).rows, posteriors.scored[1]


def risk_of(rows: Rows, sentence: Sequence[int]) -> float:
    return float(expected_errors(rows, np.array(sentence, np.int64))[2])


def posterior_of(rows: Rows, sentence: Sequence[int], num_words: int) -> Any:
    """The posterior of each word at each position of a sentence."""
    numbers = np.array(sentence, np.int64)
    return position_posteriors(rows, numbers, *expected_errors(rows, numbers)[:2], num_words)


def with_paths(make: Callable[[int], Lattice], num: int) -> Iterator[tuple[int, Lattice]]:
    """Those of the first lattices that have a path, with their seeds."""
    for seed in range(num):
        lattice = make(seed)
        if best_to_end(lattice, lattice.arc_total(PLAIN), lattice.final_total(PLAIN))[0] > -math.inf:
            yield seed, lattice


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_expected_errors_of_a_tree_are_exact(scale: float) -> None:
    for seed, lattice in with_paths(tree, 25):
        rows, distinct = rows_at(lattice, scale)
        for sentence in sentences(seed, range(len(distinct))):
            expected = exact_risk(lattice, distinct[sentence].tolist(), scale)
            assert risk_of(rows, sentence) == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_expected_errors_of_any_lattice_are_an_upper_bound_that_is_exact_for_no_words() -> None:
    num_larger = 0
    for seed, lattice in with_paths(lattice_of_all_sorts, 60):
        rows, distinct = rows_at(lattice)
        for sentence in sentences(seed, range(len(distinct))):
            expected, found = exact_risk(lattice, distinct[sentence].tolist()), risk_of(rows, sentence)
            assert found == pytest.approx(expected, abs=1e-9) if not sentence else found > expected - 1e-9
            num_larger += found > expected + 1e-9
    assert num_larger


@pytest.mark.slow
def test_posteriors_are_probabilities_and_those_of_a_chain_are_certain() -> None:
    for seed, lattice in with_paths(lattice_of_all_sorts, 60):
        rows, distinct = rows_at(lattice)
        for sentence in sentences(seed, range(len(distinct))):
            posterior = posterior_of(rows, sentence, len(distinct))
            assert (posterior >= 0.0).all() and posterior.sum(1) == pytest.approx(1.0)
    chain = small_lattice([0, 1, 2, 3], [(0, 1, [4], 0.0), (1, 2, [], 0.0), (2, 3, [5, 6], 0.0)])
    rows, distinct = rows_at(chain)
    # Silent frames share a row: states 1 and 2, of which the first has no other arc.
    assert rows.row.tolist() == [0, 1, 2] and rows.dst_row.tolist() == [1, 2] and rows.reached.tolist() == [1.0] * 3
    # 4 is missing at the start, 6 stands where 5 should.
    posterior = posterior_of(rows, [2, 2], 3)
    assert risk_of(rows, [2, 2]) == 2.0 and sorted(posterior.argmax(1).tolist()) == [0, 1, 2, 3, 3]


def test_words_share_a_position_by_posterior() -> None:
    lattice = small_lattice(
        [0, 1, 2], [(0, 1, [4], math.log(0.6)), (0, 1, [5], math.log(0.4)), (1, 2, [], -1.0), (1, 2, [6], -2.0)]
    )
    rows, distinct = rows_at(lattice)
    assert distinct.tolist() == [4, 5, 6]
    said_6 = math.exp(-2.0) / (math.exp(-1.0) + math.exp(-2.0))
    assert risk_of(rows, [1]) == pytest.approx(0.6 + said_6)
    posterior = posterior_of(rows, [1], 3)
    assert posterior[1].tolist() == pytest.approx([0.6, 0.4, 0.0, 0.0])
    assert posterior[2].tolist() == pytest.approx([0.0, 0.0, said_6, 1.0 - said_6])


def shares_of_words(sentence: Sequence[int], paths: Sequence[tuple[tuple[int, ...], float]], scale: float) -> Any:
    """The share of the paths that say each word in its place: by every best alignment, and by one of them; (2, W)."""
    weight = np.exp([scale * total for _, total in paths])
    found = np.zeros((2, len(sentence)))
    for (words, _), share in zip(paths, weight / weight.sum(), strict=True):
        for place, word in enumerate(sentence):
            before, after = sentence[:place], sentence[place + 1 :]

            def around(first: int, last: int, before: Any = before, after: Any = after, words: Any = words) -> int:
                return edit_distance(before, words[:first]) + edit_distance(after, words[last:])

            said = [around(at, at + 1) for at in range(len(words)) if words[at] == word]
            other = [1 + around(at, at + 1) for at in range(len(words)) if words[at] != word]
            none = [1 + around(at, at) for at in range(len(words) + 1)]
            found[0, place] += share * (min(said, default=99) < min(other + none))
            found[1, place] += share * (min(said, default=99) <= min(other + none))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_posteriors_of_a_sentence_are_the_shares_of_the_paths_with_its_words(scale: float) -> None:
    num_certain = 0
    for _, lattice in with_paths(tree, 40):
        paths = all_paths(lattice)
        for sentence in ([], [5], [4, 6, 4], [7, 5], max(paths, key=lambda path: path[1])[0]):
            found = PartPosteriors(lattice, PLAIN).of_sentence(scale, sentence)
            least, most = shares_of_words(sentence, paths, scale)
            assert (least - 1e-9 <= found).all() and (found <= most + 1e-9).all()
            num_certain += int(((most - least < 1e-9) & (found > 0.01) & (found < 0.99)).sum())
    assert num_certain > 50


def test_posteriors_of_many_sentences_are_those_of_each() -> None:
    posteriors = PartPosteriors(words_agree(), PLAIN)
    for _ in range(2):
        assert posteriors.of_sentence(1.0, [5, 6]) == pytest.approx([0.6, 0.3])
        assert posteriors.of_sentence(1.0, [4, 8]) == pytest.approx([0.4, 0.4])
        assert posteriors.of_sentence(1.0, [3, 8]) == pytest.approx([0.0, 0.4])
        assert posteriors.of_sentence(50.0, [4, 8]) == pytest.approx([1.0, 1.0], abs=1e-5)
    silence = PartPosteriors(small_lattice([0, 1], [(0, 1, [], 0.0)]), PLAIN)
    assert [silence.of_sentence(1.0, one).tolist() for one in ([4], [])] == [[0.0], []]


def words_agree() -> Lattice:
    """The best path says 4 8, but two others, which are more probable together, say 5 first."""
    totals = {(4, 8): 0.4, (5, 6): 0.3, (5, 7): 0.3}
    arcs = [(0, 1 + place, list(words), math.log(share)) for place, (words, share) in enumerate(totals.items())]
    return small_lattice([0, 1, 1, 1, 2], [*arcs, *((state, 4, [], 0.0) for state in (1, 2, 3))])


def test_words_on_which_paths_agree_win_over_the_best_path() -> None:
    rows, distinct = rows_at(words_agree())
    found, risk, shares = least_risk(rows, np.array([0, 4]), len(distinct), 20)
    assert shares.tolist() == sentence_posteriors(rows, found, len(distinct)).tolist()
    assert distinct[found].tolist()[0] == 5
    assert risk == pytest.approx(exact_risk(words_agree(), distinct[found].tolist()))
    assert risk < exact_risk(words_agree(), (4, 8)) - 0.1
    # At a large scale, only the best path counts.
    sharp, _ = rows_at(words_agree(), 50.0)
    assert distinct[least_risk(sharp, np.array([0, 4]), len(distinct), 20)[0]].tolist() == [4, 8]


@pytest.mark.slow
def test_expected_errors_fall_and_are_mostly_below_those_of_any_path() -> None:
    """Each round keeps the alignments of the one before, so the least risk of all is not always found."""
    num_trees, num_changed, num_least = 0, 0, 0
    for _, lattice in with_paths(tree, 80):
        rows, distinct = rows_at(lattice)
        risks = {words: risk_of(rows, np.searchsorted(distinct, words)) for words, _ in all_paths(lattice)}
        best = max(all_paths(lattice), key=lambda path: path[1])[0]
        found, risk, _ = least_risk(rows, np.searchsorted(distinct, best), len(distinct), 20)
        assert risk == pytest.approx(risk_of(rows, found)) and risk < risks[best] + 1e-9
        num_trees, num_changed = num_trees + 1, num_changed + (risk < risks[best] - 1e-9)
        num_least += risk < min(risks.values()) + 1e-9
    assert num_changed > 5 and num_least > 0.8 * num_trees


@pytest.mark.slow
def test_nearest_path_is_the_nearest_of_all_and_of_these_the_best() -> None:
    num_tied = 0
    for seed, lattice in with_paths(lattice_of_all_sorts, 60):
        posteriors = PartPosteriors(lattice, PLAIN)
        scored, distinct = posteriors.scored
        totals = lattice.arc_total(PLAIN).numpy(), lattice.final_total(PLAIN).numpy()
        for sentence in sentences(seed, range(len(distinct))):
            by_errors = defaultdict(list)
            for words, total in all_paths(lattice):
                by_errors[edit_distance(distinct[sentence].tolist(), words)].append(total)
            errors = min(by_errors)
            arc, total = nearest_path(scored, posteriors.at(1.0).posterior, np.array(sentence, np.int64))
            words = [word for one in arc for word in words_of(lattice, one)]
            assert edit_distance(distinct[sentence].tolist(), words) == errors
            assert total == pytest.approx(max(by_errors[errors]))
            ends = [int(lattice.start_state[0]), *lattice.dst_state[arc].tolist()]
            assert lattice.src_state()[arc].tolist() == ends[:-1]
            assert total == pytest.approx(totals[0][arc].sum() + totals[1][ends[-1]])
            num_tied += len(set(by_errors[errors])) > 1
    assert num_tied > 20


def words_of(lattice: Lattice, arc: int) -> list[int]:
    found: list[int] = lattice.word_id[int(lattice.word_begin[arc]) : int(lattice.word_begin[arc + 1])].tolist()
    return found


SCALED = DecodingOptions(am_scale=0.7, graph_scale=1.3, lm_scale=0.6, word_insertion_penalty=-0.4)


@pytest.mark.one_stack
@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True])
def test_results_equal_the_plain_algorithm_to_the_last_digit(is_compiled: bool) -> None:
    pytest.importorskip("numba")

    def loop(function: Callable[..., Any]) -> Callable[..., Any]:
        return jit(function) or function if is_compiled else function

    num_words = 0
    lattices = [*with_paths(lattice_of_all_sorts, 25), *with_paths(tree, 8), *real_lattices()]
    for seed, lattice in lattices:
        posteriors, scale = PartPosteriors(lattice, SCALED), (1.0, 0.3)[seed % 2]
        plain, words = minimum_risk.weighted_lattice(lattice, SCALED, scale)
        (scored, distinct), (posterior, rows) = posteriors.scored, posteriors.at(scale)
        assert distinct.tolist() == words.tolist() and posterior.tolist() == plain.posterior.tolist()
        assert (rows.posterior > 0.0).all() and (rows.dst_row >= 0).all()
        row = minimum_risk.rows_of_states(plain)
        totals = lattice.arc_total(SCALED).numpy(), lattice.final_total(SCALED).numpy()
        for sentence in sentences(seed, range(len(distinct) + 1)):
            numbers, positions = np.array(sentence, np.int64), minimum_risk.with_gaps(np.array(sentence, np.int64))
            expected, risk = minimum_risk.expected_errors(plain, row, positions)
            errors, after, same_risk = loop(expected_errors)(rows, numbers)
            assert np.array_equal(errors, expected[:, 0::2]) and same_risk == risk
            shares = minimum_risk.position_posteriors(plain, row, positions, expected, len(distinct))
            found = loop(position_posteriors)(rows, numbers, errors, after, len(distinct))
            assert np.array_equal(found, shares)
            own = minimum_risk.sentence_posteriors(plain, numbers, len(distinct))
            assert loop(sentence_posteriors)(rows, numbers, len(distinct)).tolist() == own.tolist()
            path, total = minimum_risk.nearest_path(plain, numbers, *totals)
            again, same = loop(nearest_path)(scored, posterior, numbers)
            assert again.tolist() == path.tolist() and same == total
            # Paths within a limit are found by themselves, and no others.
            errors_of_path = edit_distance(sentence, plain.word[words_on(lattice, path)].tolist())
            for limit in (errors_of_path - 1, errors_of_path):
                within, total_within = loop(path_within)(scored, posterior, numbers, limit)
                found = within.tolist(), total_within
                assert found == ((path.tolist(), total) if limit == errors_of_path else ([], -math.inf))
            num_words += len(numbers)
            if len(distinct):
                begin = numbers.clip(max=len(distinct) - 1)
                best, least = minimum_risk.least_risk(plain, begin, len(distinct), 20)
                one, risk, shares = loop(least_risk)(rows, begin, len(distinct), 20)
                assert one.tolist() == best.tolist() and risk == least
                assert shares.tolist() == minimum_risk.sentence_posteriors(plain, one, len(distinct)).tolist()
    assert num_words > 200


def test_uncompiled_loops_give_the_same_posteriors(monkeypatch: pytest.MonkeyPatch) -> None:
    lattices = [lattice for _, lattice in with_paths(lattice_of_all_sorts, 20)]
    compiled = [rows_at(lattice, 0.3, SCALED) for lattice in lattices]
    monkeypatch.setattr("asr.decoding.mbr.jit", lambda function: None)
    for lattice, (expected, words) in zip(lattices, compiled, strict=True):
        rows, distinct = rows_at(lattice, 0.3, SCALED)
        assert distinct.tolist() == words.tolist()
        for field, same in zip(rows, expected, strict=True):
            assert np.asarray(field) == pytest.approx(np.asarray(same), abs=1e-12)


def words_on(lattice: Lattice, path: Any) -> list[int]:
    """The positions of the words on the arcs of a path."""
    return [place for arc in path for place in range(int(lattice.word_begin[arc]), int(lattice.word_begin[arc + 1]))]


def real_lattices() -> Iterator[tuple[int, Lattice]]:
    """Lattices of searches, longer than those made by hand."""
    for seed in range(6):
        decoder = TokenPassingDecoder(random_graph(seed, final_prob=1.0), OPTIONS, keep_lattice=True)
        (decoded,) = decoder.decode(random_log_prob(seed, 1, 12), torch.tensor([12]))
        if decoded.lattice is not None:
            yield seed, decoded.lattice


def test_words_may_be_missing_after_any_word_of_a_path() -> None:
    chain = PartPosteriors(small_lattice([0, 1, 2], [(0, 1, [4], -0.5), (1, 2, [5], -1.0)]), PLAIN)
    arc, total = path_within(chain.scored[0], np.ones(2), np.array([0, 2, 2, 1]), 2)
    assert arc.tolist() == [0, 1] and total == -1.5


def test_arcs_without_a_posterior_are_on_no_path() -> None:
    either = PartPosteriors(small_lattice([0, 1], [(0, 1, [4], -0.5), (0, 1, [5], -1.0)]), PLAIN)
    for posterior, expected in (([1.0, 1.0], [0]), ([0.0, 1.0], [1])):
        assert nearest_path(either.scored[0], np.array(posterior), np.array([0]))[0].tolist() == expected


@pytest.mark.parametrize("is_compiled", [False, True])
def test_without_a_complete_path_none_is_nearest(is_compiled: bool) -> None:
    lattice = small_lattice([0, 1, 2], [(0, 1, [4], -0.5), (1, 2, [5], -1.0)], [-math.inf] * 3)
    posteriors = PartPosteriors(lattice, PLAIN)
    loop = (jit(nearest_path) or nearest_path) if is_compiled else nearest_path
    arc, total = loop(posteriors.scored[0], np.ones(2), np.array([0, 1, 1]))
    assert arc.tolist() == [] and total == -math.inf


OPTIONS = DecodingOptions(
    search_beam=math.inf,
    output_beam=6.0,
    context_beam=None,
    am_scale=0.3,
    lm_scale=0.6,
    word_insertion_penalty=0.3,
    mbr_scale=0.2,
)


@pytest.mark.slow
def test_result_is_a_path_of_the_lattice_with_its_scores_and_times() -> None:
    num_changed = 0
    for seed in range(12):
        graph = random_graph(seed, final_prob=1.0)
        lm = TableLM(graph.vocabulary, seed) if seed % 2 else None
        decoder = TokenPassingDecoder(graph, OPTIONS, keep_lattice=True)
        (decoded,) = decoder.decode(random_log_prob(seed, 1, 6), torch.tensor([6]), lm)
        if decoded.lattice is None or decoded.best is None:
            continue
        found = with_final_words(decoded, graph, OPTIONS, None)
        assert found.best is not None and found.lattice is decoded.lattice
        told = with_final_words(decoded, graph, OPTIONS, None, OPTIONS.mbr_scale).best
        assert told is not None and OPTIONS.mbr_scale is not None
        alone = PathPosteriors(decoded.lattice, OPTIONS).of_hypothesis(OPTIONS.mbr_scale, found.best)
        assert told == replace(found.best, confidences=tuple(alone.tolist()))
        same = with_final_words(decoded, graph, replace(OPTIONS, mbr_scale=None), None)
        assert same.best is decoded.best
        if found.best.word_ids == decoded.best.word_ids:
            assert found.best is decoded.best
            continue
        num_changed += 1
        listed = {one.word_ids: one for one in n_best(decoded.lattice, graph, OPTIONS, 10**4)}
        one = listed[found.best.word_ids]
        assert found.best.total == pytest.approx(one.total) and found.best.total < decoded.best.total
        assert found.best.lm_score == pytest.approx(one.lm_score)
        assert found.best.am_score == pytest.approx(one.am_score)
        rows, distinct = rows_at(decoded.lattice, 0.2, OPTIONS)
        risks = [risk_of(rows, np.searchsorted(distinct, each.word_ids)) for each in (found.best, decoded.best)]
        assert risks[0] < risks[1] + 1e-9
    assert num_changed >= 2


def in_a_row(lattices: Sequence[Lattice]) -> Lattice:
    """A lattice whose paths are those of several lattices, each of which ends in its last state, one after another."""
    frame, arcs = [0], []
    for lattice in lattices:
        state, now = len(frame) - 1, frame[-1]
        begin, words, word_begin = lattice.arc_begin.tolist(), lattice.word_id.tolist(), lattice.word_begin.tolist()
        for own in range(lattice.num_states):
            for arc in range(begin[own], begin[own + 1]):
                said = words[word_begin[arc] : word_begin[arc + 1]]
                arcs.append((state + own, state + int(lattice.dst_state[arc]), said, float(lattice.am_score[arc])))
        frame += [now + later for later in lattice.frame[1:].tolist()]
    return small_lattice(frame, arcs)


def test_a_long_lattice_is_cut_where_all_paths_meet() -> None:
    parts = [words_agree() for _ in range(4)]
    whole = in_a_row(parts)
    for frames_at_least, num_words in ((2, 2), (3, 4), (4, 4), (5, 8)):
        posteriors = PathPosteriors(whole, PLAIN, frames_at_least=frames_at_least)
        said = (4, 8, 5, 6, 5, 7, 3, 8)
        hypothesis = Hypothesis(said, tuple("abcdefgh"), 0.0, 0.0, 0.0, 0.0, (0, 1, 2, 2, 4, 4, 6, 7), (8,) * 8)
        own = PartPosteriors(in_a_row(parts[: num_words // 2]), PLAIN)
        expected = [own.of_sentence(1.0, said[at : at + num_words]) for at in range(0, 8, num_words)]
        assert posteriors.of_hypothesis(1.0, hypothesis).tolist() == np.concatenate(expected).tolist()


def test_parts_of_a_cut_lattice_are_decoded_each_by_itself() -> None:
    num_changed = num_parts = 0
    for seed in range(30):
        graph = random_graph(seed, final_prob=1.0)
        options = replace(OPTIONS, output_beam=3.0, blank_skip_threshold=0.6 if seed % 3 == 0 else None)
        decoder = TokenPassingDecoder(graph, options, keep_lattice=True)
        (decoded,) = decoder.decode((3.0 * random_log_prob(seed, 1, 30)).log_softmax(-1), torch.tensor([30]))
        lattice, best, original = decoded.lattice, decoded.best, decoded.original_frame
        if lattice is None or best is None:
            continue
        posteriors = PathPosteriors(lattice, options, original, frames_at_least=5)
        found = posteriors.path_of_least_risk(graph, 0.2, best)
        num_changed += found is not best
        bounds, end = [0], lattice.num_frames
        for frame in range(end):
            if int((lattice.frame == frame).sum()) == 1 and frame - bounds[-1] >= 5 and end - frame >= 5:
                bounds.append(frame)
        num_parts += len(bounds)
        words, totals, confidences = [], [], []
        for first, last in itertools.pairwise([*bounds, end]):
            piece = lattice.between(first, last)
            part = PartPosteriors(piece, options)
            times = range(first, last) if original is None else original[first:last].tolist()
            before = [word for word, at in zip(best.word_ids, best.start_frames, strict=True) if at in times]
            arcs, total = part.nearest_path(0.2, part.sentence_of_least_risk(0.2, before))
            said = [word for arc in arcs.tolist() for word in words_of(piece, arc)]
            words += said
            totals.append(total)
            confidences += part.of_sentence(1.0, said).tolist()
        assert list(found.word_ids) == words and found.total == pytest.approx(sum(totals))
        assert found.total <= best.total + 1e-9
        assert posteriors.of_hypothesis(1.0, found).tolist() == confidences
    assert num_changed >= 3 and num_parts >= 40


def test_without_a_lattice_or_words_nothing_changes() -> None:
    graph = random_graph(1, final_prob=1.0)
    decoder = TokenPassingDecoder(graph, replace(OPTIONS, mbr_scale=None))
    (decoded,) = decoder.decode(random_log_prob(1, 1, 6), torch.tensor([6]))
    assert decoded.lattice is None and with_final_words(decoded, graph, OPTIONS, None, 1.0) == decoded
    silence = small_lattice([0, 1], [(0, 1, [], 0.0)])
    decoder = TokenPassingDecoder(graph, OPTIONS, keep_lattice=True)
    (decoded,) = decoder.decode(random_log_prob(1, 1, 6), torch.tensor([6]))
    assert decoded.best is not None
    nothing = replace(decoded.best, word_ids=(), words=())
    assert PathPosteriors(silence, PLAIN).path_of_least_risk(graph, 1.0, nothing) is nothing
    empty = replace(decoded, hypotheses=())
    assert with_final_words(empty, graph, OPTIONS, None, 1.0) is empty


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
def test_scale_must_be_positive(scale: float) -> None:
    with pytest.raises(AsrError, match="mbr_scale"):
        DecodingOptions(mbr_scale=scale)
    assert DecodingOptions(mbr_scale=math.inf).mbr_scale is None
