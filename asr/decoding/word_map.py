"""The graph's words as a language model numbers them."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from asr.lm.contract import LanguageModel
from asr.text.vocabulary import UNK_ID, Vocabulary

_LOGGER = logging.getLogger(__name__)


def word_map_for(vocabulary: Vocabulary, lm: LanguageModel | None, device: torch.device) -> Tensor | None:
    """For each word of the graph its id in the language model, (V,) int64, or None where the lists are the same.

    Words that the language model lacks become `<unk>`; how many is logged as a warning.
    """
    if lm is None or lm.vocabulary == vocabulary:
        return None
    word_map = vocabulary.map_to(lm.vocabulary).to(device)
    num_unknown = int((word_map == UNK_ID).sum()) - 1
    if num_unknown:
        _LOGGER.warning("%d of the graph's %d words are <unk> to the language model", num_unknown, len(vocabulary))
    return word_map
