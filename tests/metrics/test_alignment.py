from __future__ import annotations

from asr.metrics import GAP, align, alignment_errors, confusions, format_alignment, format_confusions


def test_errors_stand_under_their_words():
    assert format_alignment("one two three".split(), "one too three four".split()) == (
        "REF: one two three *\n"  #
        "HYP: one too three four\n"
        "         S         I"
    )
    assert align(["a", "b"], ["b"]) == [("a", GAP), ("b", "b")]
    assert format_alignment(["*", "b"], ["a"]).splitlines()[2].split() in (["S", "D"], ["D", "S"])


def test_confusions_are_counted_and_sorted():
    references = {"1": "a b".split(), "2": "a c".split(), "3": ["d"]}
    hypotheses = {"1": "x b".split(), "2": "x c e".split()}
    counts = confusions(references, hypotheses)
    assert counts == {("a", "x"): 2, (GAP, "e"): 1, ("d", GAP): 1}
    assert [line.split(None, 1)[1] for line in format_confusions(counts)] == ["a -> x", "inserted  e", "deleted   d"]
    assert len(list(format_confusions(counts, num_shown=1))) == 1


def test_errors_of_an_alignment() -> None:
    counts = alignment_errors([("a", "a"), ("b", ""), ("", "c"), ("d", "e"), ("f", "")])
    assert (counts.num_ref, counts.num_substitutions, counts.num_insertions, counts.num_deletions) == (4, 1, 1, 2)
