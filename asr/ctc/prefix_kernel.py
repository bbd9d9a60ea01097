"""Prefix beam search (Hannun et al. 2014) as loops for `jit`; uncompiled, the same functions run in plain Python.

A hypothesis is a prefix (a node of a tree of characters) together with the last symbol read: a token, or the blank. Its
score is the sum over all its paths. Each frame extends all hypotheses by all sufficiently likely tokens, merges equal
hypotheses, queries the language model for new prefixes, and keeps the best hypotheses.

Characters are numbers. With words, 0 is the word boundary, which ends a word. Without them, each token is a character
of its own and a word of the language model. Several boundaries in a row count as one, and those at the beginning of a
text as none, except without words where a language model of tokens reads them (`Rules.boundary`).

Shapes: K hypotheses, S slots, C tokens, A new prefixes of a frame, P prefixes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from asr.kernels.jit import kernel
from asr.kernels.lookup import look_up

_int64: Any = np.int64  # untyped, because to mypy, NumPy 1's integers are not of type int

BOUNDARY = 0
FREE = -1
UNKNOWN = -1
WORD_MARK = 256
_FIRST_MULTIPLIER = 0x1E3779B97F4A7C15
_SECOND_MULTIPLIER = 0x3F58476D1CE4E5B9
# Paths this far below the pruning threshold are ignored: they add at most exp(-5) of a score at the threshold.
_MARGIN = 5.0
# Values that `advance` returns.
DONE, NEEDS_ROOM, ASKS = 0, 1, 2
# Indices of `Prefixes.count`.
NUM_PREFIXES, NUM_ALIVE, FRAME, NUM_ASKED, FIRST_NEW, NUM_SLOTS, ROOM_WANTED, CHUNK_BEGIN = range(8)


class Prefixes(NamedTuple):
    """The tree of characters, and its active hypotheses. P, K, S and A are capacities; `count` has the numbers in use.

    Attributes:
        count: (8,) int64, indexed by `NUM_PREFIXES` and the constants beside it.
        parent, char: (P,) int32.
        context: (P,) int64, of the language model; `UNKNOWN` while it depends on a query.
        lm_score: (P,) float64, language model score of all words so far, unscaled.
        bonus: (P,) float64, everything that is permanently added to the acoustic score.
        guess: (P,) float64, temporarily added for the incomplete word.
        place: (P,) int32, node of the word trie: 0 at the beginning of a word, -1 outside the trie.
        length: (P,) int32, number of characters of the incomplete word; without words, 0 at the beginning of a text and
            after a boundary, else 1.
        begin, end, peak: (P,) int32, int32, float64: frames of the character, and the score of its best path.
        table: (H,) int32, hash table of prefixes by (parent, char), -1 where free; H is a power of two.
        node, last, score: (K,) int32, int32, float64, the active hypotheses.
        end_key: (K,) int64, equal for hypotheses with equal ends; used while these are pruned.
        asked, asked_context, asked_word: (A,) queries to the language model, each for a slot or a ~prefix.
        answer, following: (A,) float32, int64, the scores and next contexts that `look_up` finds.
        allowed: (C,) int64, the tokens that may follow in a frame.
        slot_node, slot_last, slot_score: (S,) hypotheses of the current frame. If the node does not exist yet, this is
            ~n, the node n to which the token's characters are added if the hypothesis survives.
        slot_context, slot_lm_score, slot_bonus, slot_guess: (S,) as for prefixes.
        slot_table: (2^n,) int64, hash table of slots by (node, last), and then of hypotheses by their ends, tagged with
            the frame that they belong to.
        rank, inside: (S,) float64, the scores by which hypotheses are pruned: all, and those inside the beam.
    """

    count: Any
    parent: Any
    char: Any
    context: Any
    lm_score: Any
    bonus: Any
    guess: Any
    place: Any
    length: Any
    begin: Any
    end: Any
    peak: Any
    table: Any
    node: Any
    last: Any
    score: Any
    end_key: Any
    asked: Any
    asked_context: Any
    asked_word: Any
    answer: Any
    following: Any
    allowed: Any
    slot_node: Any
    slot_last: Any
    slot_score: Any
    slot_context: Any
    slot_lm_score: Any
    slot_bonus: Any
    slot_guess: Any
    slot_table: Any
    rank: Any
    inside: Any


class Rules(NamedTuple):
    """The tokens, the word trie, and how words are scored.

    Attributes:
        char_begin, char: (C + 1,), (...) the characters of each token.
        num_ends: (C,) int64, the number of word boundaries among them; without words, 1.
        word_of: (number of characters,) int64, the language model's word for each character; used only without words.
        has_words: whether characters form words, which end at boundaries.
        boundary: the character that adds nothing at the beginning of a text and after itself; -1 if there is none.
        trie_begin, trie_char, trie_next: word trie; the arcs of node n are `trie_begin[n] : trie_begin[n + 1]`, sorted.
        trie_word: (nodes,) int64, the language model's word that ends at each node; <unk> where none does.
        trie_end: (nodes,) float64, added if a word ends at the node.
        trie_guess: (nodes,) float64, added while an incomplete word is at the node.
        outside_end: added if a word ends outside the trie.
        outside_guess: added while an incomplete word is outside the trie.
        most_inside, most_at_end: the most that a token can add apart from the language model score; `most_at_end` is
            for tokens that begin with a boundary.
        long_word: for longer words, `outside_guess` grows in proportion to their length.
        unk: the language model's id for words outside the trie.
        has_lm: whether there is a language model.
        lm_scale: weight of its scores.
        insertion: added for each word.
        beam: hypotheses this far below the best one are pruned.
        beam_size: maximum number of hypotheses that survive a frame.
        token_min: tokens with lower log-probabilities are ignored, except for the best token of a frame.
        history: of surviving hypotheses that agree in this many last words, the incomplete word and the last symbol,
            only the best one is kept, whatever the language model remembers of earlier words; 0 keeps all.
    """

    char_begin: Any
    char: Any
    num_ends: Any
    word_of: Any
    has_words: bool
    boundary: int
    trie_begin: Any
    trie_char: Any
    trie_next: Any
    trie_word: Any
    trie_end: Any
    trie_guess: Any
    outside_end: float
    outside_guess: float
    most_inside: float
    most_at_end: float
    long_word: float
    unk: int
    has_lm: bool
    lm_scale: float
    insertion: float
    beam: float
    beam_size: int
    token_min: float
    history: int


@kernel(fastmath=False, allocates=False)
def advance(log_prob: Any, prefixes: Prefixes, rules: Rules) -> int:
    """Searches frames, log_prob (T, C). The first one has the number `count[CHUNK_BEGIN]`, the next one `count[FRAME]`.

    Returns:
        `DONE`; `NEEDS_ROOM`: the arrays must have room for `count[ROOM_WANTED]` more prefixes and slots; or `ASKS`: the
        caller must pass the language model's scores to `settle`.
    """
    count = prefixes.count
    while count[FRAME] - count[CHUNK_BEGIN] < len(log_prob):
        if count[NUM_ASKED] == 0 and not expand(log_prob, prefixes, rules):
            return NEEDS_ROOM
        if count[NUM_ASKED] > 0:
            return ASKS
        settle(prefixes.answer[:0], prefixes.following[:0], prefixes, rules)
    return DONE


@kernel(fastmath=False, allocates=False)
def advance_with_tables(log_prob: Any, prefixes: Prefixes, rules: Rules, tables: Any) -> int:
    """As `advance`, with a language model whose tables answer all queries (`LanguageModel.lookup_tables`)."""
    count = prefixes.count
    while count[FRAME] - count[CHUNK_BEGIN] < len(log_prob):
        if not expand(log_prob, prefixes, rules):
            return NEEDS_ROOM
        is_settled = False
        while not is_settled:
            num = count[NUM_ASKED]
            answer, following = prefixes.answer[:num], prefixes.following[:num]
            if num:
                look_up(prefixes.asked_context[:num], prefixes.asked_word[:num], tables, answer, following)
            is_settled = settle(answer, following, prefixes, rules)
    return DONE


def expand(log_prob: Any, prefixes: Prefixes, rules: Rules) -> bool:
    """Extends all hypotheses by the next frame's tokens; returns False if the arrays may be too small."""
    count, row = prefixes.count, log_prob[prefixes.count[FRAME] - prefixes.count[CHUNK_BEGIN]]
    alive_node, alive_last, alive_score = prefixes.node, prefixes.last, prefixes.score
    parent, char_of, table, length_of, place_of = (
        prefixes.parent, prefixes.char, prefixes.table, prefixes.length, prefixes.place
    )  # fmt: skip
    bonus_of, guess_of, context_of, lm_score_of = prefixes.bonus, prefixes.guess, prefixes.context, prefixes.lm_score
    begin_of, end_of, peak_of = prefixes.begin, prefixes.end, prefixes.peak
    slot_table, slot_node, slot_last, slot_score = (
        prefixes.slot_table, prefixes.slot_node, prefixes.slot_last, prefixes.slot_score
    )  # fmt: skip
    slot_context, slot_lm_score, slot_bonus = prefixes.slot_context, prefixes.slot_lm_score, prefixes.slot_bonus
    slot_guess = prefixes.slot_guess
    char_begin, chars, boundary, has_lm = rules.char_begin, rules.char, rules.boundary, rules.has_lm
    allowed, num_ends = prefixes.allowed, rules.num_ends
    num_allowed, best_token = 0, 0
    for token in range(len(row)):
        if row[token] > row[best_token]:
            best_token = token
        if row[token] >= rules.token_min:
            allowed[num_allowed] = token
            num_allowed += 1
    if num_allowed == 0:
        allowed[0], num_allowed = best_token, 1
    num_chars = 0
    for j in range(num_allowed):
        num_chars += char_begin[allowed[j] + 1] - char_begin[allowed[j]]
    num_alive = count[NUM_ALIVE]
    wanted = num_alive * max(num_allowed, num_chars)
    # Half of each hash table stays free, so that probing ends.
    is_full = count[NUM_PREFIXES] + wanted > min(len(parent), len(table) // 2)
    if is_full or num_alive * num_allowed > min(len(slot_node), len(slot_table) // 2):
        count[ROOM_WANTED] = max(wanted, num_alive * num_allowed)
        return False
    first_new = count[NUM_PREFIXES]
    count[NUM_ASKED], count[FIRST_NEW] = 0, first_new
    frame, stamp, num_slots = count[FRAME], _int64(count[FRAME] + 1) << 32, _int64(0)
    # Extensions far below this bound cannot survive, nor add noticeably to hypotheses that do.
    bound = -np.inf
    for i in range(num_alive):
        stay = row[0]
        if alive_last[i] > 0:
            stay = max(stay, row[alive_last[i]])
        if rules.token_min <= stay or stay == row[best_token]:
            node = alive_node[i]
            bound = max(bound, alive_score[i] + stay + bonus_of[node] + guess_of[node])
    bound -= rules.beam + _MARGIN
    for i in range(num_alive):
        node, last, score = _int64(alive_node[i]), alive_last[i], alive_score[i]
        follows_boundary = length_of[node] == 0
        for j in range(num_allowed):
            token = allowed[j]
            added = score + row[token]
            if token == 0 or token == last:
                slot = _add(node, token, added, stamp, num_slots, slot_table, slot_node, slot_last, slot_score)
                num_slots = max(num_slots, slot + 1)
                if token > 0 and token == best_token:
                    end_of[node] = frame + 1
                continue
            begin, end = char_begin[token], char_begin[token + 1]
            is_repeated = follows_boundary and chars[begin] == boundary
            gain = rules.most_inside
            if num_ends[token] > is_repeated:
                gain = rules.most_at_end
            if added + bonus_of[node] + gain < bound:
                continue
            base, child = node, node
            if num_ends[token] > 1:
                # The language model is queried more than once, which a slot has no room for.
                for position in range(begin, end):
                    child = _child(child, chars[position], prefixes, rules)
            else:
                if is_repeated:
                    # The boundary is there already. Equal texts must have equal bases: the node without it.
                    begin += 1
                    if end > begin and node > 0:
                        base = _int64(parent[node])
                for position in range(begin, end):
                    child = _int64(table[_place(child, chars[position], table, parent, char_of)])
                    if child == FREE or child >= first_new:
                        # Another token may have made it in this frame, maybe after a path of this token had got a slot.
                        child = _int64(FREE)
                        break
            if child >= 0:
                slot = _add(child, token, added, stamp, num_slots, slot_table, slot_node, slot_last, slot_score)
                num_slots = max(num_slots, slot + 1)
                above = child
                for _ in range(max(1, end - begin)):
                    if added > peak_of[above]:
                        peak_of[above] = added
                        begin_of[above], end_of[above] = frame, frame + 1
                    above = _int64(parent[above])
                continue
            # New characters get nodes only if the hypothesis survives the frame.
            slot = _add(~base, token, added, stamp, num_slots, slot_table, slot_node, slot_last, slot_score)
            if slot < num_slots:
                continue
            num_slots += 1
            slot_lm_score[slot], slot_context[slot] = lm_score_of[node], context_of[node]
            place, length = _int64(place_of[node]), _int64(length_of[node])
            bonus, guess, word = bonus_of[node], 0.0, _int64(-1)
            for position in range(begin, end):
                place, length, more, guess, ended = _extended(place, length, chars[position], rules)
                bonus += more
                word = ended if ended >= 0 else word
            slot_bonus[slot], slot_guess[slot] = bonus, guess
            if has_lm and word >= 0:
                _ask(slot, context_of[node], word, prefixes)
    count[NUM_SLOTS] = num_slots
    return True


@kernel(fastmath=False, allocates=False)
def settle(answer: Any, following: Any, prefixes: Prefixes, rules: Rules) -> bool:
    """Adds the language model's scores (A,) and next contexts (A,), and keeps the best hypotheses of the frame.

    Returns:
        Whether the frame is finished. If not, some prefixes follow others that have only now got their contexts: the
        queries of these prefixes must be answered first.
    """
    count = prefixes.count
    _receive(answer, following, prefixes, rules)
    if count[NUM_ASKED] > 0:
        return False
    num = count[NUM_SLOTS]
    bonus_of, guess_of = prefixes.bonus, prefixes.guess
    slot_node, slot_last, slot_score = prefixes.slot_node, prefixes.slot_last, prefixes.slot_score
    slot_bonus, slot_guess = prefixes.slot_bonus, prefixes.slot_guess
    rank, inside = prefixes.rank, prefixes.inside
    best = -np.inf
    for slot in range(num):
        node = slot_node[slot]
        if node >= 0:
            rank[slot] = slot_score[slot] + bonus_of[node] + guess_of[node]
        else:
            rank[slot] = slot_score[slot] + slot_bonus[slot] + slot_guess[slot]
        best = max(best, rank[slot])
    threshold = best - rules.beam
    num_inside = 0
    for slot in range(num):
        if rank[slot] >= threshold:
            inside[num_inside] = rank[slot]
            num_inside += 1
    num_ties = num_inside
    if num_inside > rules.beam_size:
        threshold = _kth_best(inside[:num_inside], rules.beam_size)
        # Of hypotheses at the threshold, the first ones stay.
        num_ties = rules.beam_size
        for slot in range(num):
            if rank[slot] > threshold:
                num_ties -= 1
    alive_node, alive_last, alive_score = prefixes.node, prefixes.last, prefixes.score
    num_alive = 0
    for slot in range(num):
        is_tie = rank[slot] == threshold
        if rank[slot] > threshold or (is_tie and num_ties > 0):
            if is_tie:
                num_ties -= 1
            node = _int64(slot_node[slot])
            alive_node[num_alive] = node if node >= 0 else _take_in(slot, prefixes, rules)
            alive_last[num_alive], alive_score[num_alive] = slot_last[slot], slot_score[slot]
            rank[num_alive] = rank[slot]
            num_alive += 1
    count[NUM_ALIVE] = num_alive
    if rules.history > 0:
        _keep_best_of_equal_ends(rank, prefixes, rules.history)
    count[FRAME] += 1
    return True


def _receive(answer: Any, following: Any, prefixes: Prefixes, rules: Rules) -> None:
    """Passes the answers on to new prefixes and slots, and asks for prefixes that had to wait for their contexts."""
    count, who, context, parent_of = prefixes.count, prefixes.asked, prefixes.context, prefixes.parent
    num_asked, asked = count[NUM_ASKED], 0
    for node in range(count[FIRST_NEW], count[NUM_PREFIXES]):
        parent = parent_of[node]
        while asked < num_asked and who[asked] >= 0:
            asked += 1
        is_asked = asked < num_asked and ~who[asked] == node
        ends_word = rules.has_lm and prefixes.char[node] == BOUNDARY
        if context[node] == UNKNOWN and context[parent] != UNKNOWN and (is_asked or not ends_word):
            prefixes.bonus[node] += prefixes.bonus[parent]
            prefixes.lm_score[node], context[node] = prefixes.lm_score[parent], context[parent]
            if is_asked:
                prefixes.lm_score[node] += answer[asked]
                prefixes.bonus[node] += rules.lm_scale * answer[asked]
                context[node] = following[asked]
        asked += is_asked
    for asked in range(num_asked):
        slot = who[asked]
        if slot >= 0:
            prefixes.slot_lm_score[slot] += answer[asked]
            prefixes.slot_bonus[slot] += rules.lm_scale * answer[asked]
            prefixes.slot_context[slot] = following[asked]
    count[NUM_ASKED] = 0
    for node in range(count[FIRST_NEW], count[NUM_PREFIXES]):
        parent = parent_of[node]
        if context[node] == UNKNOWN and context[parent] != UNKNOWN:
            _ask(~node, context[parent], _word_at(prefixes.place[parent], rules), prefixes)


def _keep_best_of_equal_ends(rank: Any, prefixes: Prefixes, history: int) -> None:
    """Keeps the best of the active hypotheses that agree in their ends; rank (K,), see `Rules.history`."""
    node, last, score, end_key = prefixes.node, prefixes.last, prefixes.score, prefixes.end_key
    parent, char, table = prefixes.parent, prefixes.char, prefixes.slot_table
    # The frame's slots are needed no more; unlike theirs, this stamp is negative.
    mask, stamp = len(table) - 1, -_int64(prefixes.count[FRAME] + 1) << 32
    num_kept = 0
    for i in range(prefixes.count[NUM_ALIVE]):
        one = _int64(node[i])
        key = _end_key(one, _int64(last[i]), parent, char, history)
        entry = (key ^ (key >> 29)) & mask
        place = num_kept
        while (table[entry] >> 32) << 32 == stamp:
            j = table[entry] - stamp
            is_like = end_key[j] == key and last[i] == last[j]
            if is_like and _have_equal_ends(one, _int64(node[j]), parent, char, history):
                place = j
                break
            entry = (entry + 1) & mask
        if place == num_kept:
            table[entry] = stamp + num_kept
            num_kept += 1
        elif rank[i] <= rank[place]:
            continue
        node[place], last[place], score[place], rank[place], end_key[place] = node[i], last[i], score[i], rank[i], key
    prefixes.count[NUM_ALIVE] = num_kept


def _end_key(node: int, last: int, parent: Any, char: Any, history: int) -> int:
    """A number that is the same for hypotheses with equal ends, and hardly ever for others."""
    key = _int64(last)
    num_boundaries = 0
    while True:
        if char[node] == BOUNDARY:
            num_boundaries += 1
            if num_boundaries > history:
                return key
        key = (key ^ char[node]) * _FIRST_MULTIPLIER
        if node == 0:
            return key
        node = _int64(parent[node])


def _have_equal_ends(one: int, other: int, parent: Any, char: Any, history: int) -> bool:
    """Whether two prefixes agree in their last words and the incomplete word. The root counts as a boundary."""
    num_boundaries = 0
    while one != other:
        if char[one] != char[other]:
            return False
        if char[one] == BOUNDARY:
            num_boundaries += 1
            if num_boundaries > history:
                return True
        one, other = _int64(parent[one]), _int64(parent[other])
    return True


def _kth_best(value: Any, k: int) -> float:
    """The k-th largest of some values (S,), by quickselect, which reorders them."""
    low, high = 0, len(value) - 1
    while low < high:
        pivot = value[(low + high) >> 1]
        left, right = low, high
        while left <= right:
            while value[left] > pivot:
                left += 1
            while value[right] < pivot:
                right -= 1
            if left <= right:
                value[left], value[right] = value[right], value[left]
                left += 1
                right -= 1
        if k - 1 <= right:
            high = right
        elif k - 1 >= left:
            low = left
        else:
            break
    return float(value[k - 1])


@kernel(fastmath=False, allocates=False)
def fill_path(prefix: int, parent: Any, path: Any) -> int:
    """Fills `path` with a prefix and all that it extends but the root, the longest first -> their number."""
    num = 0
    while prefix != 0:
        path[num] = prefix
        num += 1
        prefix = parent[prefix]
    return num


@kernel(fastmath=False, allocates=False)
def fill_text_keys(prefix: Any, parent: Any, char: Any, written_begin: Any, written: Any, key: Any) -> None:
    """Fills `key` (K,) with a number for each prefix (K,): the same for equal texts, and hardly ever for others.

    Character c is written as `written[written_begin[c] : written_begin[c + 1]]`: bytes or other numbers, the last one
    first, and `WORD_MARK` wherever one word ends and another may begin.
    """
    for i in range(len(prefix)):
        node, own = _int64(prefix[i]), _int64(_SECOND_MULTIPLIER)
        has_text, is_apart = False, False
        while node != 0:
            for position in range(written_begin[char[node]], written_begin[char[node] + 1]):
                byte = written[position]
                if byte == WORD_MARK:
                    is_apart = has_text
                    continue
                if is_apart:
                    own = (own ^ WORD_MARK) * _FIRST_MULTIPLIER
                own = (own ^ byte) * _FIRST_MULTIPLIER
                has_text, is_apart = True, False
            node = _int64(parent[node])
        key[i] = own


@kernel(fastmath=False, allocates=False)
def shared_prefix(prefix: Any, parent: Any) -> int:
    """The longest prefix that all of some prefixes (K,) extend or are; those that extend it have higher numbers."""
    shared = _int64(prefix[0])
    for i in range(1, len(prefix)):
        other = _int64(prefix[i])
        while shared != other:
            if shared > other:
                shared = _int64(parent[shared])
            else:
                other = _int64(parent[other])
    return shared


@kernel(fastmath=False, allocates=False)
def fill_table(prefixes: Prefixes) -> None:
    """Enters all prefixes except the first into the table, which must be empty."""
    parent, char_of, table = prefixes.parent, prefixes.char, prefixes.table
    for prefix in range(1, prefixes.count[NUM_PREFIXES]):
        table[_place(_int64(parent[prefix]), _int64(char_of[prefix]), table, parent, char_of)] = prefix


def _add(
    node: int, last: int, score: float, stamp: int, num_slots: int,
    slot_table: Any, slot_node: Any, slot_last: Any, slot_score: Any,
) -> int:  # fmt: skip
    """Adds a path's score to the frame's hypothesis (node, last) -> its slot, which is `num_slots` if it is new."""
    mask = len(slot_table) - 1
    key = (_int64(node) * _FIRST_MULTIPLIER) ^ (_int64(last) * _SECOND_MULTIPLIER)
    place = (key ^ (key >> 29)) & mask
    # Entries of earlier frames have another stamp and count as free.
    while (slot_table[place] >> 32) << 32 == stamp:
        slot = slot_table[place] - stamp
        if slot_node[slot] == node and slot_last[slot] == last:
            other = slot_score[slot]
            high, low = max(other, score), min(other, score)
            if low > -np.inf:
                high += math.log1p(math.exp(low - high))
            slot_score[slot] = high
            return _int64(slot)
        place = (place + 1) & mask
    slot_table[place] = stamp + num_slots
    slot_node[num_slots], slot_last[num_slots], slot_score[num_slots] = node, last, score
    return _int64(num_slots)


def _take_in(slot: int, prefixes: Prefixes, rules: Rules) -> int:
    """The node of a slot that has survived; the nodes of its characters are created unless they exist by now."""
    count, score, frame = prefixes.count, prefixes.slot_score[slot], prefixes.count[FRAME]
    node, token = ~_int64(prefixes.slot_node[slot]), prefixes.slot_last[slot]
    first, end = _int64(rules.char_begin[token]), _int64(rules.char_begin[token + 1])
    place, length, bonus = _int64(prefixes.place[node]), _int64(prefixes.length[node]), prefixes.bonus[node]
    lm_score, context = prefixes.lm_score[node], prefixes.context[node]
    for position in range(first, end):
        char = rules.char[position]
        if char == rules.boundary and length == 0:
            continue
        place, length, _, guess, _ = _extended(place, length, char, rules)
        if char == BOUNDARY or not rules.has_words:
            bonus = prefixes.slot_bonus[slot]
            lm_score, context = prefixes.slot_lm_score[slot], prefixes.slot_context[slot]
        table_place = _place(node, char, prefixes.table, prefixes.parent, prefixes.char)
        known = _int64(prefixes.table[table_place])
        if known == FREE:
            known = _int64(count[NUM_PREFIXES])
            count[NUM_PREFIXES] = known + 1
            prefixes.table[table_place] = known
            prefixes.parent[known], prefixes.char[known] = node, char
            prefixes.place[known], prefixes.length[known] = place, length
            prefixes.bonus[known], prefixes.guess[known] = bonus, guess
            prefixes.lm_score[known], prefixes.context[known] = lm_score, context
            prefixes.peak[known] = -np.inf
        if score > prefixes.peak[known]:
            prefixes.peak[known], prefixes.begin[known], prefixes.end[known] = score, frame, frame + 1
        node = known
    return node


def _child(node: int, char: int, prefixes: Prefixes, rules: Rules) -> int:
    """The prefix with one more character, created if it is new; `settle` adds the parent's bonus to its own."""
    if char == rules.boundary and prefixes.length[node] == 0:
        return node
    table_place = _place(node, char, prefixes.table, prefixes.parent, prefixes.char)
    if prefixes.table[table_place] != FREE:
        return _int64(prefixes.table[table_place])
    count = prefixes.count
    new = count[NUM_PREFIXES]
    count[NUM_PREFIXES] = new + 1
    prefixes.table[table_place] = new
    prefixes.parent[new], prefixes.char[new] = node, char
    prefixes.begin[new], prefixes.end[new], prefixes.peak[new] = count[FRAME], count[FRAME] + 1, -np.inf
    place, length, bonus, guess, word = _extended(prefixes.place[node], prefixes.length[node], char, rules)
    prefixes.place[new], prefixes.length[new] = place, length
    prefixes.bonus[new], prefixes.guess[new], prefixes.context[new] = bonus, guess, UNKNOWN
    # A word that begins and ends within a token has to wait for the context after the word before it.
    if rules.has_lm and word >= 0 and prefixes.context[node] != UNKNOWN:
        _ask(~new, prefixes.context[node], word, prefixes)
    return _int64(new)


def _place(node: int, char: int, table: Any, parent: Any, char_of: Any) -> int:
    """The place in the table of the prefix (node, char), or where it would be inserted."""
    mask = len(table) - 1
    key = (_int64(node) * _FIRST_MULTIPLIER) ^ (_int64(char) * _SECOND_MULTIPLIER)
    place = (key ^ (key >> 29)) & mask
    while table[place] != FREE and (parent[table[place]] != node or char_of[table[place]] != char):
        place = (place + 1) & mask
    return _int64(place)


def _ask(who: int, context: int, word: int, prefixes: Prefixes) -> None:
    asked = prefixes.count[NUM_ASKED]
    prefixes.asked[asked], prefixes.asked_context[asked], prefixes.asked_word[asked] = who, context, word
    prefixes.count[NUM_ASKED] = asked + 1


def _extended(place: int, length: int, char: int, rules: Rules) -> tuple[int, int, float, float, int]:
    """Extends a word by a character -> place in the trie, length, additions to bonus and guess, and the word to query.

    The word is -1 if the language model need not be queried.
    """
    trie_node = _int64(place)
    if not rules.has_words:
        return _int64(0), _int64(char != rules.boundary), rules.insertion, 0.0, _int64(rules.word_of[char])
    if char == BOUNDARY:
        end = rules.trie_end[trie_node] if trie_node >= 0 else rules.outside_end
        return _int64(0), _int64(0), rules.insertion + end, 0.0, _word_at(trie_node, rules)
    longer = _int64(length) + 1
    if trie_node >= 0:
        trie_node = _trie_step(trie_node, char, rules.trie_begin, rules.trie_char, rules.trie_next)
    if trie_node >= 0:
        return trie_node, longer, 0.0, rules.trie_guess[trie_node], _int64(-1)
    return trie_node, longer, 0.0, rules.outside_guess * max(1.0, longer / rules.long_word), _int64(-1)


def _word_at(trie_node: int, rules: Rules) -> int:
    """The language model's word if a word ends at a node of the trie, or outside it."""
    return _int64(rules.trie_word[trie_node]) if trie_node >= 0 else _int64(rules.unk)


def _trie_step(trie_node: int, char: int, trie_begin: Any, trie_char: Any, trie_next: Any) -> int:
    """The child of a trie node for a character, or -1 if there is none."""
    low, end = _int64(trie_begin[trie_node]), _int64(trie_begin[trie_node + 1])
    high = end
    while low < high:
        middle = (low + high) >> 1
        if trie_char[middle] < char:
            low = middle + 1
        else:
            high = middle
    if low < end and trie_char[low] == char:
        return _int64(trie_next[low])
    return _int64(-1)
