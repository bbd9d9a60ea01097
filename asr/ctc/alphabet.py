"""The labels of pyctcdecode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from asr.errors import AsrError
from asr.text.ctc_tokens import CONTINUATION_PREFIX, PIECE_PREFIX
from asr.text.documents import parse_json


@dataclass(frozen=True)
class Alphabet:
    """Normalized labels: the blank is "", and the word boundary is " " or the prefix `▁`."""

    labels: list[str]
    is_bpe: bool

    @classmethod
    def build_alphabet(cls, labels: Sequence[str]) -> Alphabet:
        """Normalizes labels such as `|`, `_`, `<pad>`, `[PAD]` and `##...`; a missing blank is appended.

        Raises:
            AsrError: a label is not a string or occurs twice, or a word piece has a space in it.
        """
        found = list(labels)
        wrong = [label for label in found if not isinstance(label, str)]
        if wrong:
            raise AsrError(f"{wrong[0]!r} is not a label; labels are strings.")
        twice = next((label for position, label in enumerate(found) if label in found[:position]), None)
        if twice is not None:
            raise AsrError(f"the label {twice!r} occurs twice; labels must be distinct.")
        is_bpe = any(label.startswith((CONTINUATION_PREFIX, PIECE_PREFIX)) for label in found)
        if is_bpe and any(" " in label for label in found):
            raise AsrError("a label has a space in it although the labels look like word pieces.")
        if any(label.startswith(CONTINUATION_PREFIX) for label in found):
            found = [_from_wordpiece(label) for label in found]
        if not is_bpe and "|" in found and " " not in found:
            found[found.index("|")] = " "
        found = ["" if label.lower() in ("<pad>", "[pad]") else label for label in found]
        if not is_bpe and "_" in found and "" not in found:
            found[found.index("_")] = ""
        if "" not in found:
            found.append("")
        unknown = "▁⁇▁" if is_bpe else "⁇"
        found = [unknown if label.lower() in ("<unk>", "[unk]") else label for label in found]
        return cls(found, is_bpe)

    def dumps(self) -> str:
        """The labels as JSON."""
        return json.dumps({"labels": self.labels, "is_bpe": self.is_bpe})

    @classmethod
    def loads(cls, s: str) -> Alphabet:
        """Reads what `dumps` has written.

        Raises:
            AsrError: the text is something else.
        """
        try:
            content = fields_of(s, "an alphabet", labels=list, is_bpe=bool)
            if not all(isinstance(label, str) for label in content["labels"]):
                raise ValueError("a label is not a string")
            if content["is_bpe"] and any(" " in label for label in content["labels"]):
                raise ValueError("a label of word pieces has a space in it")
        except ValueError as error:
            raise AsrError(f"these are not the labels of a saved decoder ({error}).") from error
        return cls(content["labels"], content["is_bpe"])


def fields_of(text: str, where: str, **kinds: Any) -> dict[str, Any]:
    """Reads a JSON object whose fields must have the given types.

    Raises:
        ValueError: the text is not such an object.
    """
    content = parse_json(text)
    for name, kind in kinds.items():
        if not isinstance(content, dict) or not isinstance(content.get(name), kind):
            raise ValueError(f"{where} lacks a valid {name!r}")
    return cast("dict[str, Any]", content)


def _from_wordpiece(label: str) -> str:
    if label.startswith(CONTINUATION_PREFIX):
        return label.removeprefix(CONTINUATION_PREFIX)
    is_special = len(label) > 2 and label[0] in "<[" and label[-1] in ">]"
    return label if is_special or label in ("", PIECE_PREFIX) else PIECE_PREFIX + label
