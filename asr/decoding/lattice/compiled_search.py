"""Searches a lattice with a language model that numba's loop looks up itself.

Shapes: N utterances, K partial paths.
"""

from __future__ import annotations

import numpy as np
import torch

from asr.compiled_forms import imports
from asr.decoding.lattice.graph import LatticeGraph
from asr.decoding.lattice.lattice import Lattice
from asr.decoding.lattice.search_kernel import search_lattice
from asr.decoding.options import DecodingOptions
from asr.decoding.search.backtrace import Backtrace
from asr.decoding.search.tokens import Tokens
from asr.lm.compiled_loop import existing_loop
from asr.lm.contract import LanguageModel
from asr.lm.interpolation import CombinedLM, always_answers


def search_by_loop(
    graph: LatticeGraph, joint: Lattice, options: DecodingOptions, lm: LanguageModel, backtrace: Backtrace
) -> list[tuple[Tokens, float]] | None:
    """What is alive at the end of each utterance, as `TokenSearch.alive`; None where the loop cannot serve."""
    if joint.frame.device.type != "cpu" or options.max_contexts_per_state is not None or not imports("numba"):
        return None
    tables = lm.for_difference_loop() if isinstance(lm, CombinedLM) else None
    if tables is None or not always_answers(tables):
        return None
    arc_begin, _, *arcs = graph.emitting.for_loop()
    offset = np.zeros(joint.num_utts)
    found, previous, arc = existing_loop(search_lattice, reorders_sums=False)(
        *(joint.start_state.numpy(), lm.start(joint.num_utts).numpy(), (arc_begin, *arcs)),
        *(joint.frames_of_utts().numpy(), offset, np.float32(options.search_beam), options.max_active_states),
        *(np.float32(options.lm_scale), *tables),
    )
    backtrace.add_blocks(torch.from_numpy(previous), torch.from_numpy(arc), [0])
    stream, state, context_idx, score, lm_score, record = map(torch.from_numpy, found)
    tokens = Tokens(stream, state, context_idx, score, lm_score, record)
    return [
        (tokens.select(position), own_offset)
        for position, own_offset in zip(tokens.by_stream(joint.num_utts), offset.tolist(), strict=True)
    ]
