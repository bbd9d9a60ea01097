"""KenLM, the peer of `scripts/bench ngram`: its programs' rates and sizes, and its states beside ours."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from torch import Tensor


def kenlm_programs(bin_folder: Path, arpa: Path, queries: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Sizes of KenLM's binary files, and how many words its `query` scores a second, loading not counted."""
    sizes: dict[str, Any] = {}
    num_queries = report["query_words"] + sum(1 for _ in queries.open("rb"))
    for kind in ("probing", "trie"):
        binary = arpa.with_suffix("." + kind)
        subprocess.run([bin_folder / "build_binary", kind, arpa, binary], check=True, capture_output=True)
        sizes[f"kenlm_{kind}_bytes_per_ngram"] = round(binary.stat().st_size / report["ngrams"], 2)

        def ask(text: Path, binary: Path = binary) -> float:
            begin = time.perf_counter()
            with text.open("rb") as stdin:
                subprocess.run(
                    [bin_folder / "query", "-v", "summary", binary], stdin=stdin, check=True, capture_output=True
                )
            return time.perf_counter() - begin

        whole, empty = (min(ask(text) for _ in range(3)) for text in (queries, Path(os.devnull)))
        rate = num_queries / (whole - empty)
        sizes[f"kenlm_query_{kind}_words_per_s"] = round(rate)
        sizes[f"lookups_over_kenlm_query_{kind}"] = round(report["lookups_per_s_2_threads"] / rate, 2)
    return sizes


def same_states(model: Any, sentences: list[str], state: Tensor) -> bool:
    """Whether our states and KenLM's tell the same histories apart."""
    import kenlm

    pairs = set()
    position = 0
    for text in sentences:
        before = kenlm.State()
        model.BeginSentenceWrite(before)
        for word in [*text.split(), "</s>"]:
            pairs.add((before, int(state[position])))
            position += 1
            after = kenlm.State()
            model.BaseScore(before, word, after)
            before = after
    return len(pairs) == len({theirs for theirs, _ in pairs}) == len({ours for _, ours in pairs})
