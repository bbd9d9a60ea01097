"""Small CTC networks of letters, pieces and phones for the benchmark of CTC decoders, trained in minutes.

Each reads the scores of the librispeech bundle's acoustic model, whose weights stay as they are, and is trained by CTC
(Graves et al., 2006) on train-clean-5. So their outputs are as good as this bundle's ears, and have the form that other
people's networks have.

Shapes: N utterances, T frames, S outputs of the acoustic model, C tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asr.bundle import Bundle
from asr.ctc import CTCTokens
from asr.text.lexicon import Lexicon
from scripts.benchmarks.ctc_workload import CTCWorkload
from scripts.benchmarks.inputs import cache_folder, with_progress
from scripts.benchmarks.speech import Recording, frames_of, recordings

_WIDTH, _KERNEL = 192, 5
_EPOCHS, _PEAK_LR, _DROPOUT = 8, 2e-3, 0.2
_UTTERANCES_OF_A_BATCH = 8
# Of the scores, roughly.
_MEAN, _DEVIATION = -8.0, 3.0


class Readout(nn.Module):
    """Two convolutions over an acoustic model's scores, (N, T, S) -> log_prob (N, T, C)."""

    def __init__(self, num_states: int, num_tokens: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(num_states, _WIDTH), nn.ReLU(), nn.Dropout(_DROPOUT))
        self.mix = nn.ModuleList(nn.Conv1d(_WIDTH, _WIDTH, _KERNEL, padding=_KERNEL // 2) for _ in range(2))
        self.drop = nn.Dropout(_DROPOUT)
        self.leave = nn.Linear(_WIDTH, num_tokens)

    def forward(self, scores: Tensor) -> Tensor:
        hidden = self.enter((scores - _MEAN) / _DEVIATION)
        for layer in self.mix:
            hidden = hidden + self.drop(layer(hidden.transpose(1, 2)).relu().transpose(1, 2))
        log_prob: Tensor = self.leave(hidden).log_softmax(2)
        return log_prob


def read_out(bundle: Bundle, stored: Sequence[CTCWorkload], corpora: Path | None, num_utts: int) -> list[CTCWorkload]:
    """Outputs for dev-clean-2 of networks with the tokens of stored workloads, which are trained on the first call."""
    networks = [Readout(len(bundle.graph.tokens), len(each.tokens)) for each in stored]
    paths = [cache_folder() / "ctc_networks" / f"{each.tokens.kind}.safetensors" for each in stored]
    untrained = [number for number, path in enumerate(paths) if not path.is_file()]
    if untrained:
        speech = recordings(corpora, part="train-clean-5")[1]
        scores = [each.half() for each in frames_of(bundle, speech)]
        for number in untrained:
            targets = [_target(one, stored[number].tokens, bundle.lexicon) for one in speech]
            _train(networks[number], stored[number].tokens.blank_id, scores, targets)
            paths[number].parent.mkdir(parents=True, exist_ok=True)
            save_file(networks[number].state_dict(), paths[number])
    name, speech = recordings(corpora, num_utts)
    scores = frames_of(bundle, speech)
    found = []
    for each, network, path in zip(stored, networks, paths, strict=True):
        network.load_state_dict(load_file(path))
        network.eval()
        with torch.no_grad():
            frames = [network(own[None])[0] for own in scores]
        found.append(CTCWorkload(f"{each.tokens.kind} of {name}", each.tokens, frames, [list(r.words) for r in speech]))
    return found


def _target(recording: Recording, tokens: CTCTokens, lexicon: Lexicon | None) -> Tensor | None:
    """The columns of a recording's words, in their first spellings; None if a word has none."""
    columns = []
    for word in recording.words:
        if tokens.kind == "phones":
            ways = lexicon[word] if lexicon is not None and word in lexicon else []
        else:
            ways = tokens.spell(word)
        if not ways:
            return None
        columns += [tokens.columns[tokens.table.id_of(symbol)] for symbol in ways[0]]
    return torch.tensor(columns)


def _train(network: Readout, blank: int, scores: Sequence[Tensor], targets: Sequence[Tensor | None]) -> None:
    """Trains a network by CTC, with Adam and a learning rate that falls to zero."""
    torch.manual_seed(1)
    pairs = [(own, target) for own, target in zip(scores, targets, strict=True) if target is not None]
    pairs.sort(key=lambda pair: len(pair[0]))
    batches = [pairs[i : i + _UTTERANCES_OF_A_BATCH] for i in range(0, len(pairs), _UTTERANCES_OF_A_BATCH)]
    order = list(itertools.chain(*(torch.randperm(len(batches)).tolist() for _ in range(_EPOCHS))))
    optimizer = torch.optim.Adam(network.parameters())
    network.train()
    for step, number in enumerate(with_progress(order, "CTC")):
        warm_up = min(1.0, (step + 1) / 100)
        optimizer.param_groups[0]["lr"] = _PEAK_LR * warm_up * 0.5 * (1.0 + math.cos(math.pi * step / len(order)))
        own, target = zip(*batches[number], strict=True)
        log_prob = network(pad_sequence([each.float() for each in own], batch_first=True))
        loss = nn.functional.ctc_loss(
            log_prob.transpose(0, 1),
            torch.cat(target),
            torch.tensor([len(each) for each in own]),
            torch.tensor([len(each) for each in target]),
            blank=blank,
            zero_infinity=True,
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        optimizer.step()
