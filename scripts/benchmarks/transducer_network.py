"""A small transducer of pieces for the benchmark of decoders of transducers, trained in 45 minutes.

Its encoder is the network of pieces of the benchmark of CTC decoders (`ctc_networks`), which reads posteriors of phones
by the librispeech bundle and is trained further here. Two of its frames become one of 60 ms. The prediction network
remembers two tokens (Ghodsi et al., 2020). The loss is that of transducers (Graves, 2012), with that of CTC beside it.

Shapes: N utterances, T frames, P phones, U tokens of an utterance, K hypotheses, C tokens, B log-probabilities of the
next token or the blank after each frame and each number of tokens. Encoder and prediction network have outputs of the
same size, `WIDTH`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import ctc_loss, pad
from torch.nn.utils.rnn import pad_sequence

from asr.bundle import Bundle
from asr.ctc import CTCTokens
from asr.kernels.precision import rounded_products
from asr.metrics import NO_ERRORS, count_errors
from asr.serialization import atomic_path
from scripts.benchmarks.ctc_networks import (
    SHARE_SAID,
    WIDTH,
    Example,
    Readout,
    network_folder,
    spelled_sentences,
    trained,
    training_batches,
    training_speech,
)
from scripts.benchmarks.ctc_posteriors import FLOOR
from scripts.benchmarks.inputs import required_corpora
from scripts.benchmarks.training import Examples, Schedule, train_in_rounds

_STACKED, CONTEXT = 2, 2
# Seconds from one frame of the encoder to the next.
FRAME_SHIFT = 0.03 * _STACKED
_SCHEDULE = Schedule(num_rounds=25, num_steps=100, peak_lr=1e-3, num_warm_up=200)
_CTC_WEIGHT = 0.3
# Of sentences in training: the loss takes as much time as an utterance has frames times tokens.
_MOST_WORDS, _MOST_FRAMES = 12, 400
_MOST_OF_A_FRAME = 5


def trained_transducer(bundle: Bundle, tokens: CTCTokens, corpora: Path | None) -> Network:
    """The network with these tokens, which is trained on the first call; training goes on where it was interrupted."""
    path = network_folder() / "transducer-of-posteriors.safetensors"
    network = Network(trained(bundle, tokens, corpora), len(tokens))
    if not path.is_file():
        checkpoint = network_folder() / "transducer-in-training.pt"
        train(network, tokens, bundle, required_corpora(corpora), checkpoint)
        with atomic_path(path) as written:
            save_file(network.state_dict(), written)
        checkpoint.unlink()
    network.load_state_dict(load_file(path))
    return network.eval()


def train(network: Network, tokens: CTCTokens, bundle: Bundle, corpora: Path, checkpoint: Path) -> None:
    """Trains a network that begins with that of pieces, and reports greedy errors of the held-out speakers on stderr.

    Args:
        network: its other weights are drawn here.
        tokens: its columns.
        bundle: the one with the acoustic model.
        corpora: with LibriSpeech and text.
        checkpoint: see `optimize`.
    """
    conditions, held = training_speech(tokens, bundle, corpora, network_folder())
    conditions = [([each for each in said if len(each[0]) <= _MOST_FRAMES], spoken) for said, spoken in conditions]
    sentences = spelled_sentences(corpora, tokens, bundle.lexicon, _MOST_WORDS)

    def examples(draw: random.Random) -> Iterator[list[Example]]:
        return training_batches(conditions, sentences, SHARE_SAID[tokens.kind], draw)

    optimize(network, tokens.blank_id, examples, checkpoint)
    network.eval()
    rates = ", ".join(f"{name} {greedy_error_rate(network, tokens.blank_id, said):.1f}" for name, said in held)
    print(f"transducer: % wrong of the held-out speakers, greedily: {rates}", file=sys.stderr)


def optimize(
    network: Network, blank: int, examples: Examples, checkpoint: Path, schedule: Schedule = _SCHEDULE
) -> None:
    """Trains all but the convolutions from random weights, with Adam.

    Args:
        network: its convolutions are trained already.
        blank: its column.
        examples: see `Examples`.
        checkpoint: written after each round; training goes on from it if it exists.
        schedule: rounds and learning rates.
    """
    torch.manual_seed(1)
    for layer in (network.encoder.project, *network.of_tokens.children()):
        layer.reset_parameters()  # type: ignore[operator]
    optimizer = torch.optim.Adam(network.parameters())

    def loss_of(posteriors: list[Tensor], targets: Sequence[Tensor]) -> Tensor:
        return network.loss(posteriors, targets, blank)

    train_in_rounds(network, optimizer, loss_of, examples, schedule, checkpoint, "transducer")


@torch.no_grad()
def greedy(networks: TokenNetworks, encoded: Tensor, blank: int) -> list[int]:
    """For frames (T, WIDTH), the most probable column again and again; the next frame comes after a blank."""
    history = [blank] * CONTEXT
    after = networks.predict(torch.tensor([history]))[0, 0]
    for frame in encoded:
        for _ in range(_MOST_OF_A_FRAME):
            column = int(networks.join(frame, after).argmax())
            if column == blank:
                break
            history.append(column)
            after = networks.predict(torch.tensor([history[-CONTEXT:]]))[0, 0]
    return history[CONTEXT:]


@torch.no_grad()
def encoded_of(network: Network, posteriors: Sequence[Tensor]) -> list[Tensor]:
    """Log posteriors (T, 1 + 2 P) of each recording -> encoded (T / 2 rounded up, WIDTH)."""
    return [network.encoder(own.float()[None])[0] for own in posteriors]


def greedy_error_rate(network: Network, blank: int, examples: Sequence[Example]) -> float:
    """Errors in % of the greedy search."""
    counts = NO_ERRORS
    for own, (_, target) in zip(encoded_of(network, [own for own, _ in examples]), examples, strict=True):
        found = greedy(network.of_tokens, own, blank)
        counts += count_errors([*map(str, target.tolist())], [*map(str, found)])
    return 100.0 * counts.rate


class Encoder(nn.Module):
    """Log posteriors (N, T, 1 + 2 P) -> encoded (N, T / 2 rounded up, WIDTH)."""

    def __init__(self, readout: Readout) -> None:
        super().__init__()
        self.readout = readout
        self.project = nn.Linear(_STACKED * WIDTH, WIDTH)

    def hidden(self, posteriors: Tensor) -> Tensor:
        """(N, T, WIDTH), with another frame if T is odd."""
        return self.readout.hidden(pad(posteriors, (0, 0, 0, -posteriors.shape[1] % _STACKED), value=FLOOR))

    def stacked(self, hidden: Tensor) -> Tensor:
        return self.project(hidden.reshape(len(hidden), -1, _STACKED * WIDTH))

    def forward(self, posteriors: Tensor) -> Tensor:
        return self.stacked(self.hidden(posteriors))


class TokenNetworks(nn.Module):
    """The prediction network, which reads the last two tokens, and the joint network."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, CONTEXT)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, num_tokens)

    def predict(self, tokens: Tensor) -> Tensor:
        """Tokens (N, U + 1) -> predicted (N, U, WIDTH)."""
        return self.project(self.mix(self.embed(tokens).transpose(1, 2)).relu().transpose(1, 2))

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """(..., WIDTH) of both -> logits (..., C)."""
        return self.leave((encoded + predicted).tanh())


class Network(nn.Module):
    """All that is trained: the encoder, with the network of pieces within, and the others."""

    def __init__(self, readout: Readout, num_tokens: int) -> None:
        super().__init__()
        self.encoder = Encoder(readout)
        self.of_tokens = TokenNetworks(num_tokens)

    def loss(self, posteriors: Sequence[Tensor], targets: Sequence[Tensor], blank: int) -> Tensor:
        """The mean for each token of the losses of transducers and of CTC; of log posteriors and tokens (U,) each."""
        num_frames = torch.tensor([len(each) for each in posteriors])
        num_tokens = torch.tensor([len(each) for each in targets])
        with rounded_products():
            hidden = self.encoder.hidden(pad_sequence(list(posteriors), batch_first=True, padding_value=FLOOR))
            of_ctc = self.encoder.readout.leave(hidden).float().log_softmax(2)
            encoded = self.encoder.stacked(hidden)
            tokens = pad_sequence([pad(each, (CONTEXT, 0), value=blank) for each in targets], batch_first=True)
            predicted = self.of_tokens.predict(tokens)
            num_encoded = num_frames.add(_STACKED - 1) // _STACKED
            scores = next_log_probs(self.of_tokens, encoded, predicted, targets, num_encoded, blank)
        total = transducer_loss(*scores, num_encoded, num_tokens).sum() / num_tokens.sum()
        ctc = ctc_loss(
            *(of_ctc.transpose(0, 1), torch.cat(list(targets)), num_frames, num_tokens),
            blank=blank,
            reduction="sum",
            zero_infinity=True,
        )
        return total + _CTC_WEIGHT * ctc / num_tokens.sum()


def next_log_probs(
    networks: TokenNetworks,
    encoded: Tensor,
    predicted: Tensor,
    targets: Sequence[Tensor],
    num_frames: Tensor,
    blank: int,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N, T, U + 1) of the blank and (N, T, U) of the next token; 0 where there is none.

    Args:
        networks: the joint network's.
        encoded: (N, T, WIDTH).
        predicted: (N, U + 1, WIDTH), after each number of tokens.
        targets: (U,) columns of each.
        num_frames: (N,).
        blank: its column.
    """
    rows = zip(encoded, predicted, num_frames.tolist(), targets, strict=True)
    logits, columns = [], []
    for own, after, length, target in rows:
        logits.append(networks.join(own[:length, None], after[None, : len(target) + 1]).flatten(0, 1))
        columns.append(pad(target, (0, 1), value=blank).repeat(length))
    of_blank, of_next = _LogProbs.apply(torch.cat(logits), torch.cat(columns), blank)
    shape = (len(encoded), encoded.shape[1], predicted.shape[1])
    lengths = torch.tensor([len(each) for each in targets])
    is_frame = torch.arange(shape[1]) < num_frames[:, None]
    exists = is_frame[:, :, None] & (torch.arange(shape[2]) <= lengths[:, None])[:, None]
    empty = of_blank.new_zeros(shape)
    return empty.masked_scatter(exists, of_blank), empty.masked_scatter(exists, of_next)[:, :, :-1]


class _LogProbs(torch.autograd.Function):
    """Log-probabilities (B,) of the blank and of one column (B,) each by logits (B, C)."""

    @staticmethod
    def forward(context: Any, logits: Tensor, columns: Tensor, blank: int) -> tuple[Tensor, Tensor]:
        total = logits.float().logsumexp(1)
        context.save_for_backward(logits, total, columns)
        context.blank = blank
        return logits[:, blank] - total, logits.gather(1, columns[:, None])[:, 0] - total

    @staticmethod
    def backward(context: Any, of_blank: Tensor, of_next: Tensor) -> tuple[Tensor, None, None]:
        logits, total, columns = context.saved_tensors
        grad = (logits - total[:, None]).exp_().mul_(-(of_blank + of_next)[:, None])
        grad[:, context.blank] += of_blank
        return grad.scatter_add_(1, columns[:, None], of_next[:, None]).to(logits.dtype), None, None


def transducer_loss(of_blank: Tensor, of_next: Tensor, num_frames: Tensor, num_tokens: Tensor) -> Tensor:
    """Negative log-likelihoods (N,) of tokens, summed over their alignments, in float64.

    Args:
        of_blank: log-probabilities (N, T, U + 1) of the blank in each frame after each number of tokens.
        of_next: (N, T, U) of the next token.
        num_frames: (N,).
        num_tokens: (N,).
    """
    of_blank, of_next = of_blank.double(), of_next.double()
    # Of the first tokens, all in the same frame. A path that comes in after u tokens goes on without their share.
    within = pad(of_next.cumsum(2), (1, 0))
    forward = [within[:, 0]]
    for frame in range(1, of_blank.shape[1]):
        entering = forward[-1] + of_blank[:, frame - 1]
        forward.append(within[:, frame] + (entering - within[:, frame]).logcumsumexp(1))
    ends = torch.stack(forward, dim=1) + of_blank
    return -ends[torch.arange(len(ends)), num_frames - 1, num_tokens]
