"""The slow way to a decoding graph: every (history, pronunciation, position) is a state, nothing is merged or removed.

Small enough to read, and exact: the language model's score of a word stands on the word's first arc, histories are
kept whole, and there are no backoff arcs. The oracle for `asr.graph.build`, and a quick graph for other tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from asr.graph.decoding_graph import DecodingGraph
from asr.text.symbols import SPECIAL_WORDS, TokenTable, Vocabulary

Score = Callable[[tuple[str, ...], str], float]
# A state: the words of the history, the rest of the word that is being read, and the token just read (blank: None).
State = tuple[tuple[str, ...], tuple[str, ...], "str | None"]


def toy_graph(
    pronunciations: Mapping[str, Sequence[tuple[str, ...]]],
    tokens: Sequence[str],
    score: Score,
    history_length: int = 1,
    topology: str = "ctc",
) -> DecodingGraph:
    """A graph without epsilons over words with pronunciations.

    Args:
        pronunciations: each word's pronunciations.
        tokens: the acoustic model's symbols behind the blank.
        score: log P(word | history), natural log; history oldest first, at most `history_length` words; the word may be
            `</s>`. -inf leaves the word out.
        history_length: words of history that a state remembers.
        topology: `ctc`, `ctc_modified` (a repeated phone needs no blank between its two), or `hmm` (one state a phone).
    """
    table = TokenTable(tokens)
    vocabulary = Vocabulary([word for word in pronunciations if word not in SPECIAL_WORDS])
    start: State = ((), (), None)
    numbers: dict[State, int] = {start: 0}
    arcs: list[list[tuple[int, int, float, list[int]]]] = []
    final: list[float] = []
    agenda = [start]
    for state in agenda:
        history, rest, last = state
        stay: list[tuple[State, str | None, float, list[int]]] = []
        if topology != "hmm":
            stay.append(((history, rest, None), None, 0.0, []))
        if last is not None:
            stay.append((state, last, 0.0, []))
        advance: list[tuple[State, str | None, float, list[int]]] = []
        if rest:
            advance.append(((history, rest[1:], rest[0]), rest[0], 0.0, []))
        else:
            for word, variants in pronunciations.items():
                longer = (*history, word)
                kept = longer[max(len(longer) - history_length, 0) :]
                log_prob = score(history, word)
                for phones in variants if log_prob > float("-inf") else ():
                    advance.append(((kept, phones[1:], phones[0]), phones[0], log_prob, [vocabulary.id_of(word)]))
        if topology == "ctc":
            # A step onto the same phone would be read as the same occurrence: it needs a blank first.
            advance = [arc for arc in advance if arc[1] != last]
        arcs.append([])
        for next_state, token, log_prob, words in stay + advance:
            if next_state not in numbers:
                numbers[next_state] = len(numbers)
                agenda.append(next_state)
            token_id = 0 if token is None else table.id_of(token)
            arcs[-1].append((numbers[next_state], token_id, log_prob, words))
        final.append(float("-inf") if rest else score(history, "</s>"))
    return graph_of_arcs(arcs, final, table, vocabulary, {"topology": topology})


def graph_of_arcs(
    arcs: Sequence[Sequence[tuple[int, int, float, Sequence[int]]]],
    final: Sequence[float],
    tokens: TokenTable,
    vocabulary: Vocabulary,
    meta: dict[str, object] | None = None,
) -> DecodingGraph:
    """A graph from lists: for each state its arcs (dst_state, token_id, score, word_ids), and its final score."""
    flat = [arc for out in arcs for arc in out]
    graph = DecodingGraph(
        arc_begin=torch.tensor([0, *(len(out) for out in arcs)]).cumsum(0),
        dst_state=torch.tensor([arc[0] for arc in flat], dtype=torch.int32),
        token_id=torch.tensor([arc[1] for arc in flat], dtype=torch.int32),
        score=torch.tensor([arc[2] for arc in flat], dtype=torch.float32),
        word_begin=torch.tensor([0, *(len(arc[3]) for arc in flat)]).cumsum(0),
        word_id=torch.tensor([word for arc in flat for word in arc[3]], dtype=torch.int32),
        final_score=torch.tensor(final, dtype=torch.float32),
        tokens=tokens,
        vocabulary=vocabulary,
        meta=dict(meta or {}),
    )
    graph.validate("toy graph")
    return graph
