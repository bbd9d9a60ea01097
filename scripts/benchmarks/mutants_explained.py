"""Mutants that no test has to notice, each with the reason; `scripts/bench mutants` leaves them out."""

from __future__ import annotations

_ANY_NEGATIVE = "any negative number says that there is none"
_GPU = "runs only with a GPU, where the tests marked gpu compare it"
_GROWTH = "how much room is made at once, or when: time and memory, no result"
_HASH = "another hash function, which tells keys apart as well"
_SHORTCUT = "takes the long way where the short one would do, with the same result"
_TIE = "what lies exactly at a beam may stay or go"

EXPLAINED: dict[str, dict[tuple[str, str], str]] = {
    "asr/decoding/backtrace.py": {
        ("_FIRST_COLLECTION = 1 << 20", "20 -> 21"): _GROWTH,
        (
            "self._collect_at = max(_FIRST_COLLECTION, 2 * self.num_records)",
            "2 * self.num_records -> 2 + self.num_records",
        ): _GROWTH,
    },
    "asr/decoding/chunks.py": {
        (
            "self.backtrace = Backtrace(graph.device, collects=False)",
            "False -> True",
        ): "unreachable backpointers are collected from a million on; paths stay",
        (
            "tokens = tokens.select((tokens.score >= -self._bounds.search_beam).nonzero().squeeze(1))",
            "tokens.score >= -self._bounds.search_beam -> tokens.score > -self._bounds.search_beam",
        ): _TIE,
        (
            "unfinished = best[tokens.stream] == -math.inf",
            "-math.inf -> +math.inf",
        ): "utterances without a complete path are searched again in another way",
    },
    "asr/decoding/confidence.py": {
        (
            'name: {"knots": list(self.knots[name]), "values": [round(value, 4) for value in self.values[name]]}',
            "4 -> 5",
        ): "decimals of a file",
        (
            "curvature = (design * (expected * (1.0 - expected))[:, None]).T @ design + prior",
            "1.0 - expected -> 1.0 + expected",
        ): "shorter steps to the same optimum",
    },
    "asr/decoding/rescoring.py": {
        ("min_active_states=0,", "0 -> 1"): "the best partial path survives any beam",
        (
            "search.advance(stream, torch.zeros(num_utts, lattice.num_frames, 1, device=device), "
            "lattice.frames_of_utts())",
            "1 -> 2",
        ): "no arc of a lattice reads another token than the first",
    },
    "asr/decoding/token_search.py": {
        ("row_of = torch.full_like(self._score_offset, -1, dtype=torch.int64)", "1 -> 2"): _ANY_NEGATIVE,
    },
}
"""Module -> (text of the line, change) -> why the change has no effect on results."""
