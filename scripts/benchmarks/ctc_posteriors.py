"""Posteriors of phones, by the librispeech bundle: what the networks for the benchmark of CTC decoders read.

The scores of a network trained by lattice-free MMI (Povey et al., 2016) mean little frame by frame. A forward-backward
pass over its denominator graph turns them into posteriors of its columns. Those of a phone are added up, first and
further frames apart, so that a recording has 1 + 2 P columns: silence, the first frames of P phones, their further
frames. Logs of the posteriors are cut off at `FLOOR`.

The network was trained on train-clean-5 and is too sure of these recordings. So training hears them in several
conditions, with changed speed, noise and telephone, in which the network makes about as many errors as with new
speakers.

Shapes: T frames, S columns of the acoustic model, P phones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asr.audio.io import read_audio
from asr.audio.resample import change_speed
from asr.bundle import Bundle
from asr.datasets.augment import through_telephone, with_noise
from asr.errors import AsrError
from asr.graph.context import TIED_STATES, TiedStates
from asr.models.lfmmi import LfMmi
from asr.recognizer import Recognizer
from asr.results import StageTimes
from scripts.benchmarks.inputs import with_progress
from scripts.benchmarks.speech import Recording

FLOOR = math.log(1e-5)
_UTTERANCES_OF_A_BATCH = 16
# A score of silence in the frames after a short utterance's end, above all others.
_NO_SPEECH = 20.0
RATE = 16000
Change = Callable[[Tensor, torch.Generator], Tensor]


def _at_speed(waveform: Tensor, generator: torch.Generator, factor: float) -> Tensor:
    return change_speed(waveform, factor)


def _noisy_telephone(waveform: Tensor, generator: torch.Generator) -> Tensor:
    return with_noise(through_telephone(waveform, generator), generator)


CONDITIONS: dict[str, Change | None] = {
    "unchanged": None,
    "slow": partial(_at_speed, factor=0.8),
    "fast": partial(_at_speed, factor=1.25),
    "noise": with_noise,
    "noisy telephone": _noisy_telephone,
}


def tied_states(bundle: Bundle) -> TiedStates:
    """The columns of each phone of the bundle's acoustic model.

    Raises:
        AsrError: the model has no tied states, or the bundle no denominator graph.
    """
    tied = bundle.graph.meta.get(TIED_STATES)
    if tied is None or bundle.denominator is None:
        raise AsrError(
            f"bundle {bundle.name}: its acoustic model was not trained by lattice-free MMI; use librispeech."
        )
    return TiedStates.from_json(tied)


class PhonePosteriors:
    """Computes log posteriors (T, 1 + 2 P) of waveforms, in half precision, in the order of `tied_states`' phones."""

    def __init__(self, bundle: Bundle) -> None:
        self._summed = _sums(tied_states(bundle))
        assert bundle.denominator is not None
        self._recognizer = Recognizer(bundle, mode="ngram", decoder="token-passing")
        self._objective = LfMmi(bundle.denominator)

    @torch.no_grad()
    def __call__(self, waveforms: Iterable[Tensor]) -> list[Tensor]:
        """Of samples (L,) of each recording, at 16 kHz."""
        scores = []
        for waveform in waveforms:
            score, num_frames = self._recognizer.log_prob([waveform], StageTimes())
            scores.append(score[0, : int(num_frames[0])].float())
        padded = pad_sequence(scores, batch_first=True)
        for row, score in zip(padded, scores, strict=True):
            row[len(score) :, 0] = _NO_SPEECH
        found = []
        for score, posterior in zip(scores, self._objective.denominator(padded)[1], strict=True):
            shares = posterior[: len(score)] @ self._summed
            found.append((shares / shares.sum(1, keepdim=True)).log().clamp(min=FLOOR).half())
        return found


def phone_posteriors(bundle: Bundle, speech: Sequence[Recording], change: Change | None = None) -> list[Tensor]:
    """Log posteriors (T, 1 + 2 P) of each recording, as `PhonePosteriors`."""
    compute, generator = PhonePosteriors(bundle), torch.Generator().manual_seed(0)
    order = sorted(range(len(speech)), key=lambda number: speech[number].path.stat().st_size)
    batches = [order[i : i + _UTTERANCES_OF_A_BATCH] for i in range(0, len(order), _UTTERANCES_OF_A_BATCH)]
    found: list[Tensor] = [torch.empty(0)] * len(speech)
    for batch in with_progress(batches, "acoustic model"):
        waveforms = (read_audio(speech[number].path, RATE) for number in batch)
        changed = waveforms if change is None else (change(waveform, generator) for waveform in waveforms)
        for number, posteriors in zip(batch, compute(changed), strict=True):
            found[number] = posteriors
    return found


def stored_posteriors(bundle: Bundle, speech: Sequence[Recording], folder: Path, condition: str) -> list[Tensor]:
    """The same in a condition, kept in a folder."""
    path = folder / f"posteriors-{condition.replace(' ', '-')}.safetensors"
    if not path.is_file():
        found = phone_posteriors(bundle, speech, CONDITIONS[condition])
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"posteriors": torch.cat(found), "lengths": torch.tensor(list(map(len, found)))}, path)
    kept = load_file(path)
    return list(kept["posteriors"].split(kept["lengths"].tolist()))


def _sums(states: TiedStates) -> Tensor:
    """(S, 1 + 2 P), 1 where a column of the acoustic model counts for a column of the posteriors."""
    num_phones = len(states.phones) - 1
    sums = torch.zeros(states.num_columns, 1 + 2 * num_phones)
    sums[0, 0] = 1.0
    for phone in range(1, num_phones + 1):
        sums[torch.from_numpy(states.entry[:, phone]), phone] = 1.0
        sums[torch.from_numpy(states.loop[:, phone]), num_phones + phone] = 1.0
    return sums
