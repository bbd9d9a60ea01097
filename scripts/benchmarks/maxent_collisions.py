"""How many n-grams of a text share their MaxEnt weight with another n-gram because of a hash collision.

Shapes: L words of the text, M history words, G distinct n-grams.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asr.lm.rnn.data import pack_sentences
from asr.lm.rnn.maxent import HashedMaxEnt


@dataclass(frozen=True)
class OrderCollisions:
    """The distinct n-grams of one order, and those of them whose weight another n-gram, of any order, has as well."""

    order: int
    num_ngrams: int
    num_shared: int


def measure_collisions(maxent: HashedMaxEnt, token_id: NDArray[np.int32]) -> list[OrderCollisions]:
    """Counts over a text (L,), its n-grams of orders 2 to the features' longest; sentence starts count as words.

    For word features: an output layer that hashes nodes or classes asks for more than one weight a word.
    """
    num_words = maxent.vocabulary_size
    slots = []
    parts = list(pack_sentences(token_id, maxent.order - 1, len(token_id)))
    history = torch.cat([part.history for part in parts])
    word_id = torch.cat([part.word_id for part in parts]).numpy()
    places = maxent.places(history).numpy()
    history_idx = np.zeros(len(word_id), dtype=np.int64)
    for age in range(maxent.order - 1):
        # Numbers the distinct histories of this length: shorter ones' numbers joined by the next older word.
        _, history_idx = np.unique(history_idx * num_words + history[:, age].numpy(), return_inverse=True)
        _, first = np.unique(history_idx * num_words + word_id, return_index=True)
        slots.append(places[first, age] + word_id[first])
    used, num_users = np.unique(np.concatenate(slots), return_counts=True)
    return [
        OrderCollisions(order, len(slot), int((num_users[np.searchsorted(used, slot)] > 1).sum()))
        for order, slot in enumerate(slots, start=2)
    ]
