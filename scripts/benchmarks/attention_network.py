"""A small attention-based encoder-decoder of pieces for the benchmark of its decoder, trained in 40 minutes.

Its encoder is that of the small transducer (`transducer_network`), which stays as it is. The decoder is a Transformer
of two layers (Vaswani et al., 2017). What it reads while it is trained are recordings, and sentences whose posteriors
are put together from recordings.

Shapes: N utterances, T frames, U tokens, K hypotheses, P phones, C tokens, H heads, D dimensions of a head.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asr.bundle import Bundle
from asr.ctc import CTCTokens
from asr.kernels.precision import rounded_products
from asr.models.attention import AttentionModel
from asr.serialization import atomic_path
from scripts.benchmarks.ctc_networks import (
    HELD_OUT,
    SHARE_SAID,
    WIDTH,
    Example,
    held_posteriors,
    network_folder,
    spelled_sentences,
    training_batches,
    training_speech,
)
from scripts.benchmarks.ctc_posteriors import FLOOR, RATE, PhonePosteriors, phone_posteriors
from scripts.benchmarks.inputs import required_corpora
from scripts.benchmarks.speech import recordings
from scripts.benchmarks.training import Examples, Schedule, train_in_rounds
from scripts.benchmarks.transducer_network import FRAME_SHIFT, Encoder, trained_transducer
from scripts.benchmarks.transducer_workload import EncodedWorkload

_NUM_LAYERS, _NUM_HEADS, _INNER = 2, 4, 4 * WIDTH
_SCHEDULE = Schedule(num_rounds=100, num_steps=100, peak_lr=1e-3, num_warm_up=400)
_SMOOTHING, _DROPOUT = 0.1, 0.1
_MOST_TOKENS = 200
Cache = tuple[Tensor, ...]
"""Keys and values of each layer, (K, H, U, D)."""


class State(NamedTuple):
    """What K hypotheses have read: caches of their tokens, and of the encoder's frames, whose mask is (K, T)."""

    of_tokens: Cache
    of_frames: Cache
    mask: Tensor


class Layer(nn.Module):
    """Attention to the tokens so far and to the frames, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.of_tokens, self.of_frames = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.query, self.out, self.out_of_frames = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.inner = nn.Sequential(nn.Linear(WIDTH, _INNER), nn.ReLU(), nn.Dropout(_DROPOUT), nn.Linear(_INNER, WIDTH))
        self.drop = nn.Dropout(_DROPOUT)

    def forward(self, tokens: Tensor, past: Cache, frames: Cache, mask: Tensor) -> tuple[Tensor, Cache]:
        """Hidden tokens (K, U, WIDTH) after those in the cache -> their next hidden values, and the longer cache."""
        query, key, value = map(_heads, self.of_tokens(self.norms[0](tokens)).chunk(3, 2))
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        num, total = query.shape[2], key.shape[2]
        is_past = torch.ones(num, total, dtype=torch.bool).tril(total - num)
        tokens = tokens + self.drop(self.out(_attended(query, key, value, is_past)))
        query = _heads(self.query(self.norms[1](tokens)))
        tokens = tokens + self.drop(self.out_of_frames(_attended(query, *frames, mask[:, None, None])))
        return tokens + self.drop(self.inner(self.norms[2](tokens))), (key, value)


class Decoder(nn.Module):
    """Tokens and encoded frames -> logits of the next tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(_NUM_LAYERS))
        self.norm_frames, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.leave = nn.Linear(WIDTH, num_tokens)

    def read_frames(self, encoded: Tensor) -> Cache:
        """Keys and values of encoded frames (N, T, WIDTH) for each layer."""
        encoded = self.norm_frames(encoded) + _positions(0, encoded.shape[1])
        parts = [each.of_frames(encoded).chunk(2, 2) for each in self.layers]  # type: ignore[operator]
        return tuple(_heads(part) for pair in parts for part in pair)

    def forward(self, tokens: Tensor, past: Cache, frames: Cache, mask: Tensor) -> tuple[Tensor, Cache]:
        """Tokens (K, U) after those in the cache -> logits (K, U, C), and the longer cache."""
        begin = past[0].shape[2]
        hidden = self.embed(tokens) + _positions(begin, begin + tokens.shape[1])
        cache: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            pair = slice(2 * number, 2 * number + 2)
            hidden, longer = layer(hidden, past[pair], frames[pair], mask)
            cache += longer
        logits: Tensor = self.leave(self.norm(hidden))
        return logits, tuple(cache)

    def empty(self, num: int) -> Cache:
        """The cache before the first token."""
        return (torch.zeros(num, _NUM_HEADS, 0, WIDTH // _NUM_HEADS),) * (2 * _NUM_LAYERS)

    def loss(self, encoded: Tensor, num_frames: Tensor, targets: Sequence[Tensor], end: int) -> Tensor:
        """The mean for each token; of frames (N, T, WIDTH) and tokens (U,) each."""
        tokens = pad_sequence([torch.cat([own.new_tensor([end]), own]) for own in targets], batch_first=True)
        wanted = pad_sequence(
            [torch.cat([own, own.new_tensor([end])]) for own in targets], batch_first=True, padding_value=-1
        )
        mask = torch.arange(encoded.shape[1]) < num_frames[:, None]
        logits, _ = self(tokens, self.empty(len(tokens)), self.read_frames(encoded), mask)
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), ignore_index=-1, label_smoothing=_SMOOTHING
        )


class SmallAttention(AttentionModel):
    """The small model as decoders see it.

    Args:
        tokens: its columns; the blank is the end of the text.
        decoder: the decoder.
        encode_one: the encoder, samples (L,) -> (T, WIDTH).
    """

    name, sampling_rate, frame_shift, max_tokens = "small attention model", RATE, FRAME_SHIFT, _MOST_TOKENS

    def __init__(self, tokens: CTCTokens, decoder: Decoder, encode_one: Callable[[Tensor], Tensor]) -> None:
        self.tokens = tokens
        self.decoder = decoder.eval().requires_grad_(False)
        self._encode_one = encode_one

    def encode(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        rows = [self._encode_one(own[:length]) for own, length in zip(waveform, num_samples.tolist(), strict=True)]
        return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])

    def prompt(self, encoded: Tensor, num_frames: Tensor) -> Tensor:
        return torch.full((len(encoded), 1), self.tokens.blank_id)

    def start(self, encoded: Tensor, num_frames: Tensor, prompt: Tensor) -> tuple[Tensor, State]:
        mask = torch.arange(encoded.shape[1]) < num_frames[:, None]
        frames = self.decoder.read_frames(encoded)
        logits, cache = self.decoder(prompt, self.decoder.empty(len(prompt)), frames, mask)
        return logits[:, -1], State(cache, frames, mask)

    def step(self, token: Tensor, source: Tensor, state: State) -> tuple[Tensor, State]:
        past, frames, mask = state
        if len(source) != len(mask) or not torch.equal(mask, mask[source]):
            frames, mask = tuple(each[source] for each in frames), mask[source]
        logits, cache = self.decoder(token[:, None], tuple(each[source] for each in past), frames, mask)
        return logits[:, -1], State(cache, frames, mask)


def trained_attention(bundle: Bundle, tokens: CTCTokens, corpora: Path | None) -> tuple[Encoder, Decoder]:
    """The networks, which are trained on the first call; training goes on where it was interrupted."""
    path = network_folder() / "attention-of-posteriors.safetensors"
    encoder, decoder = trained_transducer(bundle, tokens, corpora).encoder.requires_grad_(False), Decoder(len(tokens))
    if not path.is_file():
        checkpoint = network_folder() / "attention-in-training.pt"
        conditions, _ = training_speech(tokens, bundle, required_corpora(corpora), network_folder())
        sentences = spelled_sentences(required_corpora(corpora), tokens, bundle.lexicon)

        def examples(draw: random.Random) -> Iterator[list[Example]]:
            return training_batches(conditions, sentences, SHARE_SAID[tokens.kind], draw)

        optimize(encoder, decoder, tokens.blank_id, examples, checkpoint)
        with atomic_path(path) as written:
            save_file(decoder.state_dict(), written)
        checkpoint.unlink()
    decoder.load_state_dict(load_file(path))
    return encoder, decoder.eval()


def heard_by_attention(
    bundle: Bundle, tokens: CTCTokens, corpora: Path | None, num_utts: int | None
) -> EncodedWorkload:
    """Utterances of dev-clean-2, or without a number those of the held-out speakers on which scales are chosen."""
    encoder, decoder = trained_attention(bundle, tokens, corpora)
    find_posteriors = PhonePosteriors(bundle)

    @torch.no_grad()
    def encode_one(posteriors: Tensor) -> Tensor:
        return encoder(posteriors.float()[None])[0]

    network = SmallAttention(tokens, decoder, lambda waveform: encode_one(find_posteriors([waveform])[0]))
    if num_utts is None:
        posteriors, references = held_posteriors(bundle, required_corpora(corpora))
        return EncodedWorkload(" and ".join(HELD_OUT), network, [*map(encode_one, posteriors)], references)
    name, speech = recordings(corpora, num_utts)
    encoded = [encode_one(own) for own in phone_posteriors(bundle, speech)]
    return EncodedWorkload(name, network, encoded, [list(one.words) for one in speech])


def optimize(
    encoder: Encoder, decoder: Decoder, end: int, examples: Examples, checkpoint: Path, schedule: Schedule = _SCHEDULE
) -> None:
    """Trains the decoder from random weights with Adam.

    Args:
        encoder: stays as it is.
        decoder: its weights are drawn here.
        end: the column of the end of the text.
        examples: see `Examples`.
        checkpoint: written after each round; training goes on from it if it exists.
        schedule: rounds and learning rates.
    """
    torch.manual_seed(1)
    for module in decoder.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02 if isinstance(module, nn.Embedding) else WIDTH**-0.5)
    optimizer = torch.optim.Adam(decoder.parameters(), betas=(0.9, 0.98))

    def loss_of(posteriors: list[Tensor], targets: Sequence[Tensor]) -> Tensor:
        with torch.no_grad(), rounded_products():
            encoded = encoder(pad_sequence(posteriors, batch_first=True, padding_value=FLOOR))
        with rounded_products():
            num_frames = torch.tensor([(len(each) + 1) // 2 for each in posteriors])
            return decoder.loss(encoded.float(), num_frames, targets, end)

    train_in_rounds(decoder, optimizer, loss_of, examples, schedule, checkpoint, "attention model")


def _heads(values: Tensor) -> Tensor:
    """(N, U, WIDTH) -> (N, H, U, D)."""
    return values.unflatten(2, (_NUM_HEADS, -1)).transpose(1, 2)


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    fit = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
    weight = fit.masked_fill(~mask, -torch.inf).softmax(3)
    return (weight @ value).transpose(1, 2).flatten(2)


def _positions(begin: int, end: int) -> Tensor:
    """Sinusoids (end - begin, WIDTH)."""
    angle = torch.arange(begin, end)[:, None] * 1e-4 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    return torch.cat([angle.sin(), angle.cos()], 1)
