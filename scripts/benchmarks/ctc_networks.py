"""CTC networks of letters, pieces and phones for the benchmark of CTC decoders, each trained in a few minutes.

They read posteriors of phones by the librispeech bundle, whose weights stay as they are (`ctc_posteriors`), and are
trained by CTC (Graves et al., 2006) on train-clean-5 and on sentences of train-clean-100's transcripts that are put
together from its recordings (`ctc_spoken_text`). So their outputs are as good as this bundle's ears, and have the form
that other people's networks have. Two speakers are held out, on whom the decoders' scales are chosen.

Shapes: N utterances, T frames, P phones, C tokens.
"""

from __future__ import annotations

import lzma
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asr.bundle import Bundle
from asr.ctc import CTCTokens
from asr.kernels.precision import rounded_products
from asr.metrics import NO_ERRORS, count_errors
from asr.text.lexicon import Lexicon
from scripts.benchmarks.ctc_posteriors import CONDITIONS, FLOOR, phone_posteriors, stored_posteriors, tied_states
from scripts.benchmarks.ctc_spoken_text import SpokenText
from scripts.benchmarks.ctc_workload import CTCWorkload
from scripts.benchmarks.inputs import cache_folder, required_corpora, with_progress
from scripts.benchmarks.speech import Recording, recordings

WIDTH, _KERNEL, _DILATIONS, _DROPOUT = 256, 5, (1, 1, 2, 2, 4), 0.1
# Frames of 30 ms that training reads, and the share of sentences that were said as they are.
_NUM_FRAMES = {"letters": 4_000_000, "pieces": 4_000_000, "phones": 2_000_000}
SHARE_SAID = {"letters": 0.2, "pieces": 0.2, "phones": 0.4}
_PEAK_LR = 2e-3
_FRAMES_OF_A_BATCH, _BATCHES_OF_A_CONDITION = 6000, 10
# Posteriors are flattened, or sharpened a little, by a random factor of their logs.
SCALES = (0.6, 1.1)
HELD_OUT = ("1988", "2902")
# Of these speakers' recordings, this share is decoded to choose scales, in the conditions in which the acoustic model,
# which was trained on them, makes about as many errors as with new speakers.
_SHARE_DECODED, _CONDITIONS_DECODED = 6, ("fast", "noise")
_TRANSCRIPTS = Path("text", "train-clean-100.text.xz")
Example = tuple[Tensor, Tensor]
"""Log posteriors (T, 1 + 2 P), and the columns of the words."""
Condition = tuple[list[Example], SpokenText]
"""Recordings, and what sentences are made of."""


class Readout(nn.Module):
    """Five convolutions, which see 1.2 seconds: log posteriors (N, T, 1 + 2 P) -> log_prob (N, T, C)."""

    def __init__(self, num_posteriors: int, num_tokens: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(num_posteriors, WIDTH), nn.ReLU())
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in _DILATIONS)
        self.mix = nn.ModuleList(
            nn.Conv1d(WIDTH, WIDTH, _KERNEL, padding=_KERNEL // 2 * step, dilation=step) for step in _DILATIONS
        )
        self.drop = nn.Dropout(_DROPOUT)
        self.leave = nn.Linear(WIDTH, num_tokens)

    def hidden(self, posteriors: Tensor) -> Tensor:
        """The outputs of the last convolution, (N, T, `WIDTH`)."""
        hidden: Tensor = self.enter(1.0 - posteriors / (0.5 * FLOOR))  # from -1 to 1
        for norm, layer in zip(self.norm, self.mix, strict=True):
            # In bfloat16, torch 1.13 does not normalize with float32 weights.
            normed = norm(hidden.float()).transpose(1, 2)
            hidden = hidden + self.drop(layer(normed).relu().transpose(1, 2))
        return hidden

    def forward(self, posteriors: Tensor) -> Tensor:
        log_prob: Tensor = self.leave(self.hidden(posteriors)).float().log_softmax(2)
        return log_prob


def read_out(bundle: Bundle, stored: Sequence[CTCWorkload], corpora: Path | None, num_utts: int) -> list[CTCWorkload]:
    """Outputs for dev-clean-2 of networks with the tokens of stored workloads, which are trained on the first call."""
    name, speech = recordings(corpora, num_utts)
    posteriors: list[Tensor] = []
    found = []
    for each in stored:
        network = trained(bundle, each.tokens, corpora)
        posteriors = posteriors or phone_posteriors(bundle, speech)
        references = [list(one.words) for one in speech]
        found.append(
            CTCWorkload(f"{each.tokens.kind} of {name}", each.tokens, outputs(network, posteriors), references)
        )
    return found


def read_out_held(bundle: Bundle, stored: CTCWorkload, corpora: Path | None) -> CTCWorkload:
    """The same for some recordings of the held-out speakers, faster and in noise, and one network."""
    network = trained(bundle, stored.tokens, corpora)
    posteriors, references = held_posteriors(bundle, required_corpora(corpora))
    frames = outputs(network, posteriors)
    return CTCWorkload(f"{stored.tokens.kind} of {' and '.join(HELD_OUT)}", stored.tokens, frames, references)


def held_posteriors(bundle: Bundle, corpora: Path) -> tuple[list[Tensor], list[list[str]]]:
    """Log posteriors (T, 1 + 2 P) and words of the held-out speakers' recordings on which scales are chosen."""
    speech = recordings(corpora, part="train-clean-5")[1]
    chosen = [number for number, one in enumerate(speech) if _is_held(one)][::_SHARE_DECODED]
    found: list[Tensor] = []
    for condition in _CONDITIONS_DECODED:
        posteriors = stored_posteriors(bundle, speech, network_folder(), condition)
        found += [posteriors[number] for number in chosen]
    return found, [list(speech[number].words) for number in chosen] * len(_CONDITIONS_DECODED)


def trained(bundle: Bundle, tokens: CTCTokens, corpora: Path | None) -> Readout:
    """The network with these tokens, which is trained on the first call."""
    network = Readout(2 * len(tied_states(bundle).phones) - 1, len(tokens))
    path = network_folder() / f"{tokens.kind}-of-posteriors.safetensors"
    if not path.is_file():
        train_readout(network, tokens, bundle, required_corpora(corpora), network_folder())
        save_file(network.state_dict(), path)
    network.load_state_dict(load_file(path))
    return network.eval()


@torch.no_grad()
def outputs(network: Readout, posteriors: Sequence[Tensor]) -> list[Tensor]:
    """log_prob (T, C) for log posteriors (T, 1 + 2 P) of each recording."""
    return [network(own.float()[None])[0] for own in posteriors]


def network_folder() -> Path:
    """Where posteriors and networks are kept."""
    return cache_folder() / "ctc_networks"


def _is_held(recording: Recording) -> bool:
    return recording.path.stem.split("-")[0] in HELD_OUT


def train_readout(network: Readout, tokens: CTCTokens, bundle: Bundle, corpora: Path, folder: Path) -> None:
    """Trains a network, and reports the errors of its greedy output for the held-out speakers on stderr.

    Args:
        network: its weights are drawn here.
        tokens: its columns.
        bundle: the one with the acoustic model.
        corpora: with LibriSpeech and text.
        folder: for posteriors, which are kept.
    """
    conditions, held = training_speech(tokens, bundle, corpora, folder)
    draw = random.Random(1)
    sentences = spelled_sentences(corpora, tokens, bundle.lexicon)
    batches = training_batches(conditions, sentences, SHARE_SAID[tokens.kind], draw)
    optimize(network, tokens.blank_id, batches, _NUM_FRAMES[tokens.kind], draw)
    network.eval()
    rates = ", ".join(f"{name} {greedy_error_rate(network, tokens.blank_id, examples):.1f}" for name, examples in held)
    print(f"{tokens.kind}: % wrong of the held-out speakers, greedily: {rates}", file=sys.stderr)


def training_speech(
    tokens: CTCTokens, bundle: Bundle, corpora: Path, folder: Path
) -> tuple[list[Condition], list[tuple[str, list[Example]]]]:
    """What was said in each condition of train-clean-5; and each condition's name with what held-out speakers said."""
    assert bundle.lexicon is not None
    speech = recordings(corpora, part="train-clean-5")[1]
    targets = [target_of(one.words, tokens, bundle.lexicon) for one in speech]
    is_held = list(map(_is_held, speech))
    conditions, held = [], []
    for name in CONDITIONS:
        examples = list(zip(stored_posteriors(bundle, speech, folder, name), targets, is_held, strict=True))
        said = [(own, target) for own, target, out in examples if target is not None and not out]
        held.append((name, [(own, target) for own, target, out in examples if target is not None and out]))
        own, texts = zip(*((e[0], one.words) for e, one in zip(examples, speech, strict=True) if not e[2]), strict=True)
        conditions.append((said, SpokenText(own, texts, tied_states(bundle).phones[1:], bundle.lexicon)))
    return conditions, held


def target_of(words: Sequence[str], tokens: CTCTokens, lexicon: Lexicon | None) -> Tensor | None:
    """The columns of words, in their first spellings; None if a word has none."""
    columns = []
    for word in words:
        if tokens.kind == "phones":
            ways = lexicon[word] if lexicon is not None and word in lexicon else []
        else:
            ways = tokens.spell(word)
        if not ways:
            return None
        columns += [tokens.columns[tokens.table.id_of(symbol)] for symbol in ways[0]]
    return torch.tensor(columns)


def optimize(
    network: Readout, blank: int, batches: Iterator[list[Example]], num_frames: int, draw: random.Random
) -> None:
    """Trains a network from random weights by CTC, with Adam and a learning rate that falls to zero."""
    torch.manual_seed(1)
    for layer in network.modules():
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.LayerNorm)):
            layer.reset_parameters()
    optimizer = torch.optim.Adam(network.parameters())
    network.train()
    num_steps = max(1, num_frames // _FRAMES_OF_A_BATCH)
    for step in with_progress(range(num_steps), "CTC"):
        warm_up = min(1.0, (step + 1) / 100)
        optimizer.param_groups[0]["lr"] = _PEAK_LR * warm_up * 0.5 * (1.0 + math.cos(math.pi * step / num_steps))
        own, target = zip(*next(batches), strict=True)
        scaled = [(each.float() * draw.uniform(*SCALES)).clamp(min=FLOOR) for each in own]
        with rounded_products():
            log_prob = network(pad_sequence(scaled, batch_first=True, padding_value=FLOOR))
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


@torch.no_grad()
def greedy_error_rate(network: Readout, blank: int, examples: Sequence[Example]) -> float:
    """Errors in % of the most probable column of each frame, repetitions and blanks removed."""
    counts = NO_ERRORS
    for own, target in examples:
        columns = network(own.float()[None])[0].argmax(1).unique_consecutive()
        hypothesis = columns[columns != blank]
        counts += count_errors([*map(str, target.tolist())], [*map(str, hypothesis.tolist())])
    return 100.0 * counts.rate


def spelled_sentences(
    corpora: Path, tokens: CTCTokens, lexicon: Lexicon | None, longest: int | None = None
) -> list[tuple[list[str], Tensor]]:
    """Sentences of transcripts whose words all have spellings, with their columns; cut after `longest` words."""
    with lzma.open(corpora / _TRANSCRIPTS, "rt") as lines:
        sentences = [line.split()[1:] for line in lines]
    if longest is not None:
        sentences = [words[i : i + longest] for words in sentences for i in range(0, len(words), longest)]
    targets = (target_of(words, tokens, lexicon) for words in sentences)
    return [(words, target) for words, target in zip(sentences, targets, strict=True) if target is not None]


def training_batches(
    conditions: Sequence[Condition],
    sentences: Sequence[tuple[list[str], Tensor]],
    share_said: float,
    draw: random.Random,
) -> Iterator[list[Example]]:
    """Batches of similar length without end; a few at a time are from one condition."""
    while True:
        said, spoken = draw.choice(conditions)
        examples: list[Example] = []
        num_frames = 0
        while num_frames < _FRAMES_OF_A_BATCH * _BATCHES_OF_A_CONDITION:
            if draw.random() < share_said:
                own, target = draw.choice(said)
            else:
                words, target = draw.choice(sentences)
                made = spoken.say(words, draw)
                if made is None or len(made) < len(target):
                    continue
                own = made
            examples.append((own, target))
            num_frames += len(own)
        examples.sort(key=lambda example: len(example[0]))
        batches: list[list[Example]] = [[]]
        for example in examples:
            if batches[-1] and len(example[0]) * (len(batches[-1]) + 1) > _FRAMES_OF_A_BATCH:
                batches.append([])
            batches[-1].append(example)
        draw.shuffle(batches)
        yield from batches
