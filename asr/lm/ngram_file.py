"""An n-gram model's arrays in one safetensors file: loads in a moment where ARPA takes minutes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from asr.errors import AsrError
from asr.lm.ngram import NgramArrays, NgramLM
from asr.text.vocabulary import SPECIAL_WORDS, Vocabulary

FORMAT = "asr n-gram model"
VERSION = 1


def save_ngram(model: NgramLM, path: str | Path) -> None:
    """Writes a model."""
    words = "\n".join(model.vocabulary.words[len(SPECIAL_WORDS) :]).encode("utf-8")
    tensors = {field.name: getattr(model.arrays, field.name).cpu().contiguous() for field in fields(NgramArrays)}
    tensors["words"] = torch.from_numpy(np.frombuffer(words, dtype=np.uint8).copy())
    header = {"format": FORMAT, "version": VERSION, "order": model.order, "name": model.name}
    save_file(tensors, str(path), metadata={"header": json.dumps(header, ensure_ascii=False)})


def load_ngram(path: str | Path) -> NgramLM:
    """Reads what `save_ngram` wrote.

    Raises:
        AsrError: the file is missing, damaged, or something else.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("header", "{}"))
            if header.get("format") != FORMAT or header.get("version") != VERSION:
                raise AsrError(f"{path}: this is no {FORMAT} of version {VERSION}; convert the ARPA file again.")
            arrays = NgramArrays(**{field.name: file.get_tensor(field.name) for field in fields(NgramArrays)})
            words = file.get_tensor("words").numpy().tobytes().decode("utf-8")
    except (OSError, SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AsrError(f"{path}: the n-gram model cannot be read ({error}); fetch or make it again.") from error
    return NgramLM(Vocabulary(words.split("\n"), name=str(path)), arrays, int(header["order"]), str(header["name"]))
