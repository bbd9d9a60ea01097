"""Mutants that no test has to notice, each with the reason; `scripts/bench mutants` leaves them out."""

from __future__ import annotations

_OFTEN = {
    "any negative": "any negative number says that there is none",
    "growth": "how much room is made at once, or when: time and memory, no result",
    "hash": "another hash function, which tells keys apart as well",
    "no collection": "unreachable backpointers are collected from a million on; paths stay",
    "no other token": "no arc of a lattice reads another token than the first",
    "settled": "how often settled words are looked for; they stay the same",
    "shorter steps": "shorter steps to the same optimum",
    "shortcut": "takes the long way where the short one would do, with the same result",
    "tie": "what lies exactly at a beam may stay or go",
}
"""Reasons that several mutants share, by the word that stands for them below."""

WITH_A_GPU = {
    "asr/lm/cached/engine.py": ("_put_edges",),
}
"""Module -> functions that only GPUs use: fast tests call none; slow ones do, on a simulated device."""

WITH_K2 = {
    "asr/decoding/k2.py": (
        "", "to_k2", "_rows", "__init__", "decode", "_search", "_intersect", "_best_paths",
    ),
    "asr/decoding/k2_online.py": (
        "", "__init__", "extend", "best", "_pruned", "_searchable", "_follow", "start", "advance", "partial",
        "num_settled_words", "is_endpoint", "finalize", "_take", "_intersect", "_final_lattice", "_best",
    ),
    "asr/decoding/k2_lattice.py": ("lattice_to_k2", "save_k2_lattice"),
}  # fmt: skip
"""Module -> functions that only run with k2; "" stands for what is outside functions. Left out where k2 is missing."""

SIZES = {
    "asr/decoding/backtrace.py": ("_FIRST_COLLECTION",),
    "asr/decoding/cpu/chunk_lm.py": ("_TURNS_BETWEEN_COLLECTIONS",),
    "asr/decoding/frame.py": ("FRAMES_BETWEEN_COLLECTIONS", "_LARGEST_TABLE"),
    "asr/decoding/online.py": ("_FRAMES_BETWEEN_SETTLINGS",),
    "asr/lm/cached/engine.py": ("_KEPT_LEVELS",),
    "asr/lm/cached/states.py": ("_FIRST_ROWS", "_ROOM, _GROWTH", "_ROWS_WORTH_BRANCHES"),
    "asr/lm/cached/trie.py": ("_FIRST_NODES", "_FIRST_BUCKETS"),
    "asr/lm/combine.py": ("_MOST_MAPPED",),
    "asr/lm/contexts.py": ("FORGET_FROM", "_FIRST_BUCKETS", "_ROOM"),
    "asr/lm/corpus.py": ("BLOCK_BYTES",),
    "asr/lm/evaluate.py": (
        "_WORDS_AT_ONCE",
        "_STREAM_WINDOW",
        "_WORDS_OF_GROUP, _NUM_GROUPS, _MOST_SENTENCES",
        "_HISTORY_WORDS_AT_ONCE",
    ),
    "asr/lm/ngram/arpa.py": ("BLOCK_LINES",),
    "asr/lm/ngram/io.py": ("_CRC_BLOCK",),
    "asr/lm/ngram/lookup.py": ("_BUILD_BLOCK", "_BUILD_HOMES"),
    "asr/lm/ngram/model.py": ("_QUERIES_AT_ONCE",),
    "asr/lm/rnn/data.py": ("_WORDS_AT_ONCE",),
    "asr/lm/rnn/model.py": ("_MIN_ROWS_TO_SHARE",),
    "asr/lm/rnn/optim.py": ("_MIN_PLACES",),
    "asr/lm/rnn/outputs/hierarchical.py": ("_MIN_WORDS, _MIN_COLUMNS",),
    "asr/lm/rnn/outputs/log_partition.py": ("_QUERIES_AT_ONCE", "_WORDS_AT_ONCE", "_QUERIES_WORTH_TILES"),
    "asr/lm/rnn/outputs/nce.py": ("_MIN_BLOCKS", "_MIN_WORDS"),
    "asr/lm/rnn/recurrent_numba.py": ("_MAX_UNITS", "_ROWS_AT_LEAST", "MIN_ROWS_FOR_TILES"),
}
"""Module -> numbers that say how much is done at once, by one thread, ahead or before tidying up: time and memory.

One more or twice as much changes no result. Other changes of these lines, such as to 0, are tested."""

_TABLE = """
asr/decoding/backtrace.py
  room = torch.empty(max(end, 2 * len(self._arc)) - self.num_records, dtype=torch.int64, device=arc.device)
    2 -> 3  # growth
  self._collect_at = max(self._first_collection, 2 * self.num_records)
    2 * self.num_records -> 2 + self.num_records  # growth
asr/decoding/chunks.py
  self.num_states = len(arc_begin) - 1
    len(arc_begin) - 1 ->
    len(arc_begin) + 1  # pairs of stream and state are told apart by any number that is large enough
  self.backtrace = Backtrace(graph.final_score.device, collects=False)
    False -> True  # no collection
  backtrace, records = Backtrace(device, collects=False), LatticeRecords(num_utts, self._options)
    False -> True  # no collection
  is_pushed = True
    True -> False  # another loop searches, with the same result
  backpointer = backtrace.add(nothing - 1, nothing)
    1 -> 2  # any negative
  final = torch.where(span.is_end[tokens.stream], self._graph.final_score[tokens.state], 0.0)
    0.0 -> 1.0  # the same for all paths of a stream, of which only differences count
  no_scores = torch.zeros(num_utts, int(span.num_rescored.max()), 1, dtype=torch.float32)
    1 -> 2  # no other token
  at_front = torch.cat([front.state, front.state.new_zeros(1)])[last.clamp(max=num_front)]
    1 -> 2  # one more entry than is read
  tokens = tokens.select((tokens.score >= -self._bounds.search_beam).nonzero().squeeze(1))
    tokens.score >= -self._bounds.search_beam -> tokens.score > -self._bounds.search_beam  # tie
  unfinished = best[tokens.stream] == -math.inf
    -math.inf -> +math.inf  # utterances without a complete path are searched again in another way
asr/decoding/cpu/chunk_lm.py
  if sink.backtrace.is_due or (not looks_up and turn % _TURNS_BETWEEN_COLLECTIONS == 0):
    not looks_up and turn % _TURNS_BETWEEN_COLLECTIONS == 0 ->
    not looks_up or turn % _TURNS_BETWEEN_COLLECTIONS == 0  # how often backpointers are collected; paths stay
asr/decoding/frame.py
  def expand(self, tokens: ActiveTokens, frame: Frame, *, prune: bool = True) -> Expansion:
    True -> False  # the reference has no fast way that the argument could turn off
  row_of = torch.full_like(self._score_offset, -1, dtype=torch.int64)
    1 -> 2  # any negative
asr/decoding/interface.py
  _LARGEST_EXP = 20.0
    20.0 -> 21.0  # how numbers of about a billion are written in a message
asr/decoding/k2.py
  lattice = k2.intersect_dense_pruned(k2.create_fsa_vec([k2.Fsa(arcs)]), frames, 10.0, 10.0, 1, 10)
    10.0 -> 11.0  # wide enough for a graph of two states
    1 -> 2  # wide enough for a graph of two states
    10 -> 11  # wide enough for a graph of two states
asr/decoding/lattice.py
  row_of = torch.full((int(utt_idx.max()) + 1,), num_utts, dtype=torch.int64, device=utt_idx.device)
    1 -> 2  # one more entry than is read
  if loop is None or not log_prob.numel():
    not log_prob.numel() -> not not log_prob.numel()  # shortcut
asr/decoding/lattice_records.py
  number = torch.full((len(arc) + 1,), -1, device=arc.device)
    -1 -> +1  # all entries but the last are set, and the last, for backpointer -1, is not used
  lost = [ending.final_total.max() - ending.final_total for ending in endings if len(ending.final)]
    ending.final_total.max ->
    ending.final_total.min  # more partial paths than needed are kept; the lattice is pruned afterwards
  _SLACK = 0.1
    0.1 -> 1.1  # more losing arcs than needed are kept; the lattice is pruned afterwards
  keeps, keeps_losing = loss[:-1] <= self.margin, loss.index_select(0, dst) + score_gap <= self.margin
    loss[:-1] <= self.margin -> loss[:-1] < self.margin  # tie
asr/decoding/online.py
  progress.num_unsettled = 0
    0 -> 1  # settled
  if one.num_unsettled >= _FRAMES_BETWEEN_SETTLINGS:
    one.num_unsettled >= _FRAMES_BETWEEN_SETTLINGS -> one.num_unsettled > _FRAMES_BETWEEN_SETTLINGS  # settled
asr/decoding/recombination.py
  num_slots = 1 << max(4, (8 * len(key)).bit_length())
    8 -> 9  # growth
  slot = (slot >> 24) & (num_slots - 1)
    slot >> 24 -> slot << 24  # all keys collide, and one is told apart in each round: time, no result
  slot *= multiplier
    slot *= multiplier -> slot += multiplier  # hash
  slot ^= slot >> 32
    32 -> 33  # hash
    slot ^= slot >> 32 -> pass  # hash
asr/decoding/rescoring.py
  min_active_states=0,
    0 -> 1  # the best partial path survives any beam
  torch.zeros(num_utts, lattice.num_frames, 1, dtype=torch.float32, device=device),
    1 -> 2  # no other token
asr/decoding/warmup.py
  generator = torch.Generator().manual_seed(0)
    0 -> 1  # other paths of the same kind; nobody sees results
asr/decoding/words.py
  name: {"knots": list(self.knots[name]), "values": [round(value, 4) for value in self.values[name]]}
    4 -> 5  # decimals of a file
  curvature = (design * (expected * (1.0 - expected))[:, None]).T @ design + prior
    1.0 - expected -> 1.0 + expected  # shorter steps
    1.0 -> 2.0  # shorter steps
asr/lm/cached/approximations.py
  loop_room: int = 1024
    1024 -> 1025  # growth
  return (torch.randint(-(2**62), 2**62, (num,), generator=generator) * 2 + 1).to(device)
    torch.randint(-2 ** 62, 2 ** 62, (num,), generator=generator) * 2 + 1 ->
    torch.randint(-2 ** 62, 2 ** 62, (num,), generator=generator) * 2 - 1  # hash
  self.factors = _odd_factors(length, 1, device)
    1 -> 2  # hash
  self._factor = _odd_factors(num_columns + 1, 0, device)
    0 -> 1  # hash
asr/lm/cached/eviction.py
  new_row = torch.full((hidden.rows.capacity,), -1, dtype=torch.int32, device=trie.device)
    1 -> 2  # rows that are not in use are not asked for
  if hidden.rows.capacity > limits.max_rows:
    hidden.rows.capacity > limits.max_rows -> hidden.rows.capacity >= limits.max_rows  # shortcut
  if candidate.numel() <= num:
    candidate.numel() <= num -> candidate.numel() < num  # shortcut
  if trie.nodes.capacity > limits.max_nodes:
    trie.nodes.capacity > limits.max_nodes -> trie.nodes.capacity >= limits.max_nodes  # shortcut
  return not self._is_tight and num_new <= self.num_free_edges
    num_new <= self.num_free_edges -> num_new < self.num_free_edges  # shortcut
  if self._num_held() + missing.numel() <= self.limits.max_edges:
    self._num_held() + missing.numel() <= self.limits.max_edges ->
    self._num_held() + missing.numel() < self.limits.max_edges  # shortcut
asr/lm/cached/outputs.py
  self._group_normalizer = HashTable(1, self.device)
    1 -> 2  # growth
  if self.cache_history and added > 0:
    added > 0 -> added >= 0  # shortcut
asr/lm/cached/states.py
  is_lacking = self.trie.hidden_row.index_select(0, context_idx) < 0
    self.trie.hidden_row.index_select(0, context_idx) < 0 ->
    self.trie.hidden_row.index_select(0, context_idx) <= 0  # row 0 belongs to the node above `<s>`, which no context is
  known, state = node[:0], torch.empty(0, self.hidden.state_size, device=self.hidden.device)
    0 -> 1  # the parents of the oldest level have rows, so that nothing is looked up
asr/lm/combine.py
  device = torch.empty(0, device=device).device  # with its number
    0 -> 1  # only its device is read
  self.contexts.check()
    self.contexts.check() -> pass  # on a CPU, packing has checked
  left_weight: float = 0.0
    0.0 -> 1.0  # the steps without weights read none
  right_weight: float = 0.0
    0.0 -> 1.0  # the steps without weights read none
  if self.num_oov_words / unknown_share > 1:
    self.num_oov_words / unknown_share > 1 ->
    self.num_oov_words / unknown_share >= 1  # the logarithm of one word's share is 0
asr/lm/contexts.py
  most = min(int(MAX_LOAD * self._table.num_slots) - self._table.count, len(self._free))
    int(MAX_LOAD * self._table.num_slots) - self._table.count ->
    int(MAX_LOAD * self._table.num_slots) + self._table.count  # numbers run out no later than slots
asr/lm/evaluate.py
  weight = torch.full((len(log_prob),), 1 / len(log_prob), dtype=torch.float64)
    1 / len(log_prob) -> 1 * len(log_prob)  # only the ratios of the first weights count, which are equal
asr/lm/interface.py
  super().__init_subclass__(**arguments)
    super().__init_subclass__(**arguments) -> pass  # no class above does anything
asr/lm/ngram/estimate.py
  ngram_at = np.full(len(word_id), -1, dtype=np.int32)
    1 -> 2  # any negative
  if (num_with[1:4] == 0).any():
    1 -> 2  # without n-grams seen once, a discount is not a number, which is invalid as well
asr/lm/ngram/model.py
  levels = np.concatenate([levels, np.full(NUM_LEVELS - len(levels), -np.inf, dtype=np.float32)])
    -np.inf -> +np.inf  # no score has one of the levels that fill up the table
  num_arcs = self._arc_begin[2:] - self._arc_begin[1:-1]
    self._arc_begin[2:] - self._arc_begin[1:-1] ->
    self._arc_begin[2:] + self._arc_begin[1:-1]  # more steps of a search that has ended
asr/lm/rnn/maxent.py
  if num_zero > 0:
    num_zero > 0 -> num_zero >= 0  # no weight is below the smallest one
asr/lm/rnn/model.py
  if len(word_id) >= _MIN_ROWS_TO_SHARE and state.device.type == "cpu":
    len(word_id) >= _MIN_ROWS_TO_SHARE and state.device.type == 'cpu' ->
    len(word_id) >= _MIN_ROWS_TO_SHARE or state.device.type == 'cpu'  # shortcut
asr/lm/rnn/optim.py
  at_least = _MIN_PLACES if param.dim() == 1 else len(param)
    param.dim() == 1 -> param.dim() != 1  # how many threads share a table's rows, each of which is updated by one
asr/lm/rnn/outputs/log_partition.py
  in_threads(work, len(order) // ROWS, rows_at_least=8)
    len(order) // ROWS -> len(order) * ROWS  # there are no rows beyond the last
asr/lm/rnn/recurrent.py
  if self.compute_dtype == torch.float32 and not self.compile_cell:
    not self.compile_cell -> not not self.compile_cell  # tensor operations, with the same result as the loop
asr/lm/rnn/training.py
  self._batch_begin = (0.0, 0.0)
    0.0 -> 1.0  # set before it is read
"""
"""Modules with the lines of their text and, below each, the changes that have no effect on results, and why."""


def _explained() -> dict[str, dict[tuple[str, str], str]]:
    found: dict[str, dict[tuple[str, str], str]] = {}
    module = text = ""
    for line in _TABLE.strip().replace(" ->\n    ", " -> ").splitlines():
        if not line.startswith(" "):
            module, found[line] = line, {}
        elif not line.startswith("    "):
            text = line.strip()
        else:
            change, _, reason = line.strip().partition("  # ")
            found[module][text, change] = _OFTEN.get(reason, reason)
    return found


EXPLAINED = _explained()
"""Module -> (text of the line, change) -> why the change has no effect on results."""
