"""Audio for networks from elsewhere, and what all of them must do with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from asr.models.external.base import ExternalModel
from asr.models.transducers import Transducer


def noise(seconds: float, seed: int = 0) -> Tensor:
    return 0.1 * torch.randn(int(16000 * seconds), generator=torch.Generator().manual_seed(seed))


def outputs_as_alone(model: ExternalModel, batch: Sequence[Tensor], atol: float) -> tuple[Tensor, Tensor]:
    """The outputs of a batch, whose utterances must have the same ones alone."""
    log_prob, num_frames = model(batch)
    for utterance, found, num in zip(batch, log_prob, num_frames, strict=True):
        single, (num_alone,) = model(utterance)
        assert num == num_alone
        assert torch.allclose(found[:num], single[0][:num], atol=atol)
    return log_prob, num_frames


def token_log_probs(model: Transducer, encoded: Tensor, tokens: Sequence[int]) -> Tensor:
    """The log-probabilities (T, U + 1, C) of frames (T, E) after each of the first of some tokens."""
    predicted, state = model.start()
    found = []
    for token in (*tokens, None):
        logits = model.join(encoded, predicted.expand(len(encoded), -1))
        found.append(logits[:, : len(model.tokens)].log_softmax(1))
        if token is not None:
            predicted, state = model.predict(torch.tensor([token], device=model.device), state)
    return torch.stack(found, 1)


def assert_rows_are_independent(model: Transducer) -> None:
    """The prediction network reads each hypothesis as it would read it alone."""
    _, state = model.start()
    tokens = torch.tensor([2, 3, 4])
    together, states = model.predict(tokens, tuple(torch.cat([each] * 3) for each in state))
    picked = torch.tensor([2, 0])
    again, _ = model.predict(tokens[picked], tuple(each[picked] for each in states))
    for row, found in zip(picked, again, strict=True):
        alone, state_alone = model.predict(tokens[row, None], state)
        assert torch.allclose(alone[0], together[row], atol=1e-6)
        assert torch.allclose(model.predict(tokens[row, None], state_alone)[0][0], found, atol=1e-6)


def write_foreign_code(folder: Path, config: str) -> Path:
    """A folder of transformers with code of its own, whose configuration is one of transformers' -> what it writes."""
    (folder / "theirs.py").write_text(
        f"open({str(folder / 'was run')!r}, 'w')\nfrom transformers import {config} as Config\n"
    )
    (folder / "config.json").write_text(
        json.dumps({"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}})
    )
    return folder / "was run"


def greedy_path(model: Transducer, encoded: Tensor, most_per_frame: int = 10) -> list[int]:
    """The tokens of frames (T, E) that have the highest score one after the other."""
    predicted, state = model.start()
    num_tokens, frame, num_at_frame = len(model.tokens), 0, 0
    found: list[int] = []
    while frame < len(encoded):
        assert len(found) < 10 * len(encoded), "an endless loop"
        logits = model.join(encoded[frame, None], predicted)[0]
        token = int(logits[:num_tokens].argmax())
        is_blank = token == model.tokens.blank_id
        num_at_frame += not is_blank
        advance = int(is_blank or num_at_frame >= most_per_frame)
        if model.durations:
            advance = max(int(is_blank), model.durations[int(logits[num_tokens:].argmax())])
        if not is_blank:
            found.append(token)
            predicted, state = model.predict(torch.tensor([token], device=model.device), state)
        frame += advance
        num_at_frame *= not advance
    return found
