"""Compiles the loops of a search ahead of time, so that neither users nor measurements wait for the compiler.

numba compiles a loop when it is first called and caches the machine code on disk, beside the source or, if that folder
is read-only, in the user's cache folder. A short search over synthetic log-probabilities calls all loops that a real
search needs: it compiles them the first time on a machine, and loads them in every later process.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.jit import has_loops
from asr.kernels.linear import MAX_LOOP_ROWS
from asr.lm.interface import LanguageModel, device_of

# Frames of each synthetic utterance: enough for words, and for several calls of the compiled search.
_NUM_FRAMES = (48, 20)

# Added to the logit of the token on the path; all logits have standard normal noise.
_PEAK = 9.0

# Combinations that have been warmed up in this process.
_WARM: set[tuple[object, ...]] = set()


def needs_warm_up(bundle: Bundle, mode: str, device: torch.device, kind: tuple[object, ...]) -> bool:
    """Whether a search still needs a warm-up in this process; returns True once for each combination.

    Args:
        bundle: the bundle to decode with.
        mode: its mode.
        device: device of the search or of the language model; only loops for the CPU are compiled ahead of time.
        kind: everything else that determines which loops run, such as the decoder.
    """
    if not has_loops(device):
        return False
    rnn_lm = bundle.rnn_lm.arguments if bundle.rnn_lm is not None else {}
    key = (bundle.acoustic_model.class_name, str(rnn_lm), bundle.graph.has_epsilons, mode, *kind)
    if key in _WARM:
        return False
    _WARM.add(key)
    return True


def made_up_log_prob(graph: DecodingGraph) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a few utterances that follow random paths through a graph, with noise.

    Returns:
        log_prob (N, T, C) natural logs and num_frames (N,), on the CPU.
    """
    generator = torch.Generator().manual_seed(0)
    arc_begin, token_id, dst_state = graph.arc_begin.cpu(), graph.token_id.cpu(), graph.dst_state.cpu()
    logits = torch.randn(len(_NUM_FRAMES), max(_NUM_FRAMES), len(graph.tokens), generator=generator)
    for utt, num_frames in enumerate(_NUM_FRAMES):
        state, frame = graph.start_state, 0
        # Arcs that read nothing take steps, but no frames.
        for draw in torch.rand(4 * num_frames, generator=generator).tolist():
            begin, end = int(arc_begin[state]), int(arc_begin[state + 1])
            if begin == end or frame == num_frames:
                break
            arc = begin + int(draw * (end - begin))
            if int(token_id[arc]) >= 0:
                logits[utt, frame, token_id[arc]] += _PEAK
                frame += 1
            state = int(dst_state[arc])
    return logits.log_softmax(-1), torch.tensor(_NUM_FRAMES)


def query_many(lm: LanguageModel) -> None:
    """Queries a language model with many histories that differ in their last word, as made-up utterances do not.

    A recurrent model computes many states by other loops than few, and products of the states before them only once.
    """
    number, last_word = torch.arange(MAX_LOOP_ROWS + 2, device=device_of(lm)), len(lm.vocabulary) - 1
    last, other = last_word - number % 2, last_word - number // 2 % (last_word + 1)
    context_idx = lm.start(len(number))
    for word_id in (last, other, last):
        _, context_idx = lm.score(context_idx, word_id)
