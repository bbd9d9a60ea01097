"""Every path of a lattice, one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from asr.decoding.lattice import Lattice
from asr.decoding.settings import DecodingOptions
from tests.reference.table_lm import TableLM


def all_sentences(
    lattice: Lattice, options: DecodingOptions, lm: TableLM | None = None
) -> dict[tuple[int, ...], float]:
    """The best total of each word sequence of a lattice of one utterance; `lm` replaces the scores that it has."""
    arc_total, final_total = lattice.arc_total(options), lattice.final_total(options)
    if lm is not None:
        arc_total = arc_total - options.lm_scale * lattice.lm_score.double()
        final_total = final_total - options.lm_scale * lattice.final_lm_score.double()
    arc_totals, final_totals = arc_total.tolist(), final_total.tolist()
    begin, dst = lattice.arc_begin.tolist(), lattice.dst_state.tolist()
    word_begin, word_id = lattice.word_begin.tolist(), lattice.word_id.tolist()
    # States come in topological order, so all ways into a state are known when its turn comes.
    ways: list[dict[tuple[int, ...], float]] = [{} for _ in final_totals]
    ways[int(lattice.start_state[0])][()] = 0.0
    best: dict[tuple[int, ...], float] = {}
    for state, reached in enumerate(ways):
        for words, total in reached.items():
            if final_totals[state] > float("-inf"):
                best[words] = max(best.get(words, float("-inf")), total + final_totals[state])
            for arc in range(begin[state], begin[state + 1]):
                longer = words + tuple(word_id[word_begin[arc] : word_begin[arc + 1]])
                known = ways[dst[arc]].get(longer, float("-inf"))
                ways[dst[arc]][longer] = max(known, total + arc_totals[arc])
    if lm is not None:
        best = {words: total + options.lm_scale * lm.score_sentence(words) for words, total in best.items()}
    return best


def best_total_of(
    lattice: Lattice, options: DecodingOptions, word_ids: Sequence[int], start_frames: Sequence[int]
) -> float:
    """The best total of a lattice's paths with these words at these frames, of one utterance; -inf without any."""
    wanted = list(zip(word_ids, start_frames, strict=True))
    arc_total, final_total = lattice.arc_total(options).tolist(), lattice.final_total(options).tolist()
    # The best total of each state after each number of words.
    best: defaultdict[tuple[int, int], float] = defaultdict(lambda: float("-inf"))
    best[int(lattice.start_state[0]), 0] = 0.0
    for state, frame in enumerate(lattice.frame.tolist()):
        for arc in range(int(lattice.arc_begin[state]), int(lattice.arc_begin[state + 1])):
            words = lattice.word_id[lattice.word_begin[arc] : lattice.word_begin[arc + 1]].tolist()
            for num in range(len(wanted) + 1 - len(words)):
                if wanted[num : num + len(words)] == [(word, frame) for word in words]:
                    reached = int(lattice.dst_state[arc]), num + len(words)
                    best[reached] = max(best[reached], best[state, num] + arc_total[arc])
    return max(best[state, len(wanted)] + final for state, final in enumerate(final_total))
