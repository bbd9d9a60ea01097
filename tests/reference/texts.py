"""Texts of tokens, and their scores by language models, as the searches of tokens are compared with them."""

from __future__ import annotations

from collections.abc import Sequence

from asr.text.ctc_tokens import CTCTokens
from asr.text.symbols import UNK_ID
from tests.reference.table_lm import TableLM


def text_of(tokens: CTCTokens, columns: Sequence[int]) -> str:
    """The text that columns of pieces or letters write."""
    symbols = "".join(tokens.symbols[column] for column in columns)
    return " ".join(symbols.replace("▁", " ").replace("|", " ").split())


def sentence_score(model: TableLM, text: str) -> float:
    """Of the words of a text, `<unk>` for those that are not listed, and `</s>`."""
    vocabulary = model.vocabulary
    return model.score_sentence(tuple(vocabulary.id_of(w) if w in vocabulary else UNK_ID for w in text.split()))
