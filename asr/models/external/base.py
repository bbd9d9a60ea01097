"""The interface of external networks, and how they are named.

Shapes: N utterances, L samples, T frames, C tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import textwrap
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from asr.audio.fbank import Fbank
from asr.audio.samples import as_samples
from asr.audio.segments import at_rate
from asr.errors import AsrError
from asr.text.ctc_tokens import CTCTokens

# How far the sum of a row of probabilities may be from 1, and its log from 0.
_TOLERANCE = 0.05
_LONGEST_REASON = 300
_FEWEST_SECONDS = 0.1
# From this length on, frames are counted, and how many times the frame shift their distance may be: many networks lose
# or add frames at the ends.
_SECONDS_TO_COUNT = 1.0
_MOST_OF_SHIFT = 1.5

# What icefall and NeMo call the model of their pieces.
_PIECE_MODELS = ("bpe.model", "tokenizer.model")

KINDS = {
    "torchaudio": "a CTC pipeline of torchaudio.pipelines, such as torchaudio:WAV2VEC2_ASR_BASE_960H",
    "transformers": "an AutoModelForCTC of transformers, a hub name or a local folder",
    "onnx": "an ONNX file, or a folder with model.onnx and tokens.txt",
    "torchscript": "a TorchScript file, with tokens.txt in it or next to it",
}
"""The kinds of networks: what may precede the colon of a name, and what follows it."""


class ExternalModel(ABC):
    """A CTC network: waveforms in, log-probabilities out.

    Attributes:
        name: shown to users.
        tokens: its output symbols.
        sampling_rate: of the waveforms that it reads, in Hz.
        frame_shift: seconds from one output frame to the next.
    """

    name: str
    tokens: CTCTokens
    sampling_rate: int
    frame_shift: float

    @abstractmethod
    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """(N, L) float in [-1, 1] at `sampling_rate` and (N,) -> log-probabilities (N, T, C) and frames (N,) int64."""

    def stream(self) -> StreamingModel:
        """Begins a new utterance that is read in chunks.

        Raises:
            AsrError: the network reads whole utterances.
        """
        raise AsrError(f"{self.name}: this network keeps no states and reads whole utterances; it cannot stream.")

    def __call__(self, waveform: Any, sampling_rate: int | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities of one utterance or several.

        Args:
            waveform: (L,), (N, L), or a list of (L,), tensors or NumPy arrays; floating-point samples in [-1, 1], or
                16-bit or 32-bit integer PCM.
            sampling_rate: of the samples; the network's own if None.

        Returns:
            (N, T, C) natural logs and (N,) int64 frames.

        Raises:
            AsrError: a waveform is empty, of another shape or type, the sampling rate is out of range, or as for `run`.
        """
        with torch.no_grad():
            return self.run(*as_batch(waveform, sampling_rate, self.sampling_rate))

    def run(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """Like `forward`, checked: log-probabilities (N, T, C) float32 and frames (N,) int64 on the host.

        Raises:
            AsrError: as for `checked`.
        """
        return self.checked(*self.forward(*long_enough(waveform, num_samples, self.sampling_rate)), len(num_samples))

    def sorted_output(self, output: Any, num_inputs: Tensor, max_inputs: int) -> tuple[Tensor, Any]:
        """The log-probabilities (N, T, C) and the frames (N,), unchecked, in what a function returned.

        Args:
            output: both, or the former alone; the frames are then in proportion to the input.
            num_inputs: (N,) samples or frames of input.
            max_inputs: the longest of them, with padding.

        Raises:
            AsrError: as for `checked`.
        """
        log_prob, *rest = output if isinstance(output, (tuple, list)) and output else (output,)
        self._require_shape(log_prob, len(num_inputs))
        return log_prob, rest[0] if rest else frames_by_share(num_inputs, max_inputs, log_prob.shape[1])

    def checked(self, log_prob: Any, num_frames: Any, num_utts: int) -> tuple[Tensor, Tensor]:
        """Checks the output; converts logits or probabilities to log-probabilities.

        Args:
            log_prob: the network's output, to be (N, T, C).
            num_frames: the frames of each utterance, to be (N,) whole numbers.
            num_utts: N.

        Returns:
            Log-probabilities (N, T, C) float32, and frames (N,) int64 on the host.

        Raises:
            AsrError: the output or the frames are no tensor or of another shape, there are not as many columns as
                tokens, an utterance has a negative number of frames or more than T, or a valid frame has NaN or +inf.
        """
        self._require_shape(log_prob, num_utts)
        frames = checked_frames(num_frames, num_utts, log_prob.shape[1], self.name)
        log_prob = _as_log_prob(log_prob.detach().float())
        is_bad = ~(log_prob < torch.inf).all(2).cpu()
        bad = (is_bad & (torch.arange(log_prob.shape[1]) < frames.unsqueeze(1))).nonzero()
        if len(bad):
            raise AsrError(
                f"{self.name}: the network's output for utterance {int(bad[0, 0])} has NaN or infinity in frame "
                f"{int(bad[0, 1])}; check its input and its weights."
            )
        return log_prob, frames

    def _require_shape(self, log_prob: Any, num_utts: int) -> None:
        if not isinstance(log_prob, Tensor):
            raise AsrError(
                f"{self.name}: the network's output is of type {type(log_prob).__name__}; it must return a tensor of "
                "(utterances, frames, tokens), alone or in a tuple with the frames of each utterance."
            )
        shape = tuple(log_prob.shape)
        if len(shape) != 3 or shape[0] != num_utts:
            raise AsrError(
                f"{self.name}: the network's output for {num_utts} utterances has the shape {shape}; it must be "
                "(utterances, frames, tokens)."
            )
        if shape[2] != len(self.tokens):
            raise AsrError(
                f"{self.name}: the network's output has the shape {shape}, but it has {len(self.tokens)} tokens; give "
                "the token list of this network."
            )


class StreamingModel(ABC):
    """A network that reads an utterance in chunks of features and keeps states between them.

    Attributes:
        chunk_samples: samples from one chunk to the next.
    """

    tokens: CTCTokens
    sampling_rate: int
    frame_shift: float
    chunk_samples: int

    @abstractmethod
    def accept(self, waveform: Tensor, is_last: bool = False) -> Tensor:
        """The next samples, (L,) float in [-1, 1] -> log-probabilities (T, C) of the frames that they complete."""


class CallableModel(ExternalModel):
    """A network given as any Python function.

    Args:
        function: waveform (N, L), num_samples (N,) -> log-probabilities or logits (N, T, C), or these and frames (N,).
        tokens: its output symbols.
        sampling_rate: in Hz.
        frame_shift: in seconds.
        name: shown to users.

    Raises:
        AsrError: the function cannot be called, or the sampling rate or the frame shift is not a number greater than 0.
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]],
        tokens: CTCTokens | Sequence[str],
        sampling_rate: int,
        frame_shift: float,
        name: str = "callable",
    ) -> None:
        if not callable(function):
            raise AsrError(f"{name}: the function is of type {type(function).__name__}; give a function or a module.")
        self.name = name
        self._function = function
        self.tokens = tokens if isinstance(tokens, CTCTokens) else CTCTokens(tokens)
        self.sampling_rate = positive_integer(sampling_rate, f"{name}: the sampling_rate")
        self.frame_shift = positive_number(frame_shift, f"{name}: the frame_shift")

    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        return self.sorted_output(self._function(waveform, num_samples), num_samples, waveform.shape[1])

    def run(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """As of any network, with a warning if the frame shift cannot be right."""
        log_prob, num_frames = super().run(waveform, num_samples)
        self._warn_of_other_shift(num_samples, num_frames)
        return log_prob, num_frames

    def _warn_of_other_shift(self, num_samples: Tensor, num_frames: Tensor) -> None:
        """Warns if the longest recording has far more or fewer frames than the frame shift says."""
        seconds = float(num_samples.max()) / self.sampling_rate if len(num_samples) else 0.0
        longest = int(num_frames.max()) if len(num_frames) else 0
        if seconds < _SECONDS_TO_COUNT or not longest:
            return
        if not 1 / _MOST_OF_SHIFT < seconds / longest / self.frame_shift < _MOST_OF_SHIFT:
            warnings.warn(
                f"{self.name}: the frame_shift is {self.frame_shift:g} s, but the network has {longest} frames for "
                f"{seconds:.2f} s, one for each {seconds / longest:.2g} s; times of words will be wrong, so check it "
                "and the sampling_rate.",
                stacklevel=2,
            )


def load_acoustic_model(name: str, **options: Any) -> ExternalModel:
    """Loads the network named `KIND:NAME`, see `KINDS`; options are passed on to its class.

    Raises:
        AsrError: there is no such kind, its package is missing, or the network cannot be read.
    """
    return cast(ExternalModel, load_kind(name, KINDS, "asr.models.external", "an acoustic model", options))


def load_kind(name: str, kinds: Mapping[str, str], package: str, what: str, options: Mapping[str, Any]) -> Any:
    """Loads what is named `KIND:NAME` by the function `load` of the kind's module.

    Args:
        name: the name.
        kinds: the kinds and their descriptions.
        package: the one that has a module of each kind.
        what: it is, for messages.
        options: for `load`.

    Raises:
        AsrError: there is no such kind, or as for `load`.
    """
    kind, _, rest = name.partition(":")
    if kind not in kinds or not rest:
        listed = "; ".join(f"{each}: {text}" for each, text in kinds.items())
        raise AsrError(f"{name}: {what} is named KIND:NAME, where KIND is one of {listed}.")
    return importlib.import_module(f"{package}.{kind}").load(rest, **options)


def as_batch(waveform: Any, sampling_rate: int | None, network_rate: int) -> tuple[Tensor, Tensor]:
    """The utterances of a call, (N, L) and (N,), at the network's sampling rate; see `ExternalModel.__call__`.

    Raises:
        AsrError: a waveform is empty, or of another shape or type, or the sampling rate is out of range.
    """
    if isinstance(waveform, (Tensor, np.ndarray)) and waveform.ndim == 1:
        waveform = [waveform]
    elif not isinstance(waveform, (Tensor, np.ndarray, list, tuple)):
        raise AsrError(
            f"the waveform is of type {type(waveform).__name__}; give a tensor, a NumPy array or a list of these."
        )
    utterances = [as_samples(each, f"waveform {number}").float() for number, each in enumerate(waveform)]
    if not utterances or any(each.dim() != 1 or not len(each) for each in utterances):
        raise AsrError("give waveforms of shape (samples,) or (utterances, samples), and no empty ones.")
    if sampling_rate is not None:
        utterances = [at_rate(each, sampling_rate, network_rate) for each in utterances]
    return torch.nn.utils.rnn.pad_sequence(utterances, batch_first=True), torch.tensor(list(map(len, utterances)))


def long_enough(waveform: Tensor, num_samples: Tensor, sampling_rate: int) -> tuple[Tensor, Tensor]:
    """Appends silence to recordings (N, L), (N,) of less than 0.1 s: convolutions over samples need some hundreds."""
    fewest = int(_FEWEST_SECONDS * sampling_rate)
    padded = torch.nn.functional.pad(waveform, (0, max(0, fewest - waveform.shape[1])))
    return padded, num_samples.clamp(min=fewest)


def frames_by_share(num_samples: Tensor, max_samples: int, max_frames: int) -> Tensor:
    """Frames of each utterance, (N,), for networks that do not return them: in proportion to its length, rounded up."""
    share = num_samples.double() / max(1, max_samples) * max_frames
    return share.ceil().long().clamp(max=max_frames)


def checked_frames(num_frames: Any, num_utts: int, max_frames: int, name: str) -> Tensor:
    """The frames that the network of that name returns for N utterances, as (N,) int64 on the host.

    Raises:
        AsrError: they are not N whole numbers from 0 to `max_frames`.
    """
    is_whole = isinstance(num_frames, Tensor) and not num_frames.is_floating_point()
    if not is_whole or num_frames.shape != (num_utts,):
        shown: Any = num_frames
        if isinstance(num_frames, Tensor):
            shown = f"{num_frames.dtype} of the shape {tuple(num_frames.shape)}"
        raise AsrError(
            f"{name}: the numbers of frames that the network returns for {num_utts} utterances are {shown}; they must "
            f"be a tensor of {num_utts} whole numbers, or be left out."
        )
    frames: Tensor = num_frames.detach().to(torch.int64).cpu()
    if num_utts and (int(frames.min()) < 0 or int(frames.max()) > max_frames):
        raise AsrError(
            f"{name}: the network says that the utterances have {int(frames.min())} to {int(frames.max())} frames, "
            f"but its output has {max_frames}; it must count frames of its output."
        )
    return frames


def measured_shift(forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], sampling_rate: int) -> float:
    """Seconds from one output frame to the next: 4 seconds of noise by the frames that they add to 4 others.

    The number for one recording would not do, since most networks lose or add frames at the ends.

    Args:
        forward: like `ExternalModel.forward`.
        sampling_rate: of its waveforms, in Hz.
    """
    seconds = 4
    noise = 0.01 * torch.randn(1, 2 * seconds * sampling_rate, generator=torch.Generator().manual_seed(0))
    counts = []
    for num in (noise.shape[1] // 2, noise.shape[1]):
        with torch.no_grad():
            output, _ = forward(noise[:, :num], torch.tensor([num]))
        counts.append(output.shape[1])
    return seconds / max(1, counts[1] - counts[0])


def tokens_of_file(symbols: Any, path: Path, **marks: Any) -> CTCTokens:
    """The tokens of the network in a file, with the SentencePiece model next to it, if they are pieces.

    Args:
        symbols: as for `CTCTokens`.
        path: the network's file.
        marks: further arguments of `CTCTokens`.

    Raises:
        AsrError: as for `CTCTokens`.
    """
    tokens = CTCTokens(symbols, **marks)
    beside = next((model for model in map(path.with_name, _PIECE_MODELS) if model.is_file()), None)
    if tokens.kind != "pieces" or beside is None:
        return tokens
    if importlib.util.find_spec("sentencepiece") is None:
        warnings.warn(
            f"{beside} is not used, since the package sentencepiece is missing: words are written with as few pieces "
            "as possible, some of them otherwise than the network has learned; `pip install sentencepiece`.",
            stacklevel=2,
        )
        return tokens
    return CTCTokens(symbols, piece_model=beside, **marks)


def each_alone(
    forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], waveform: Tensor, num_samples: Tensor
) -> tuple[Tensor, Tensor]:
    """Calls a function like `ExternalModel.forward` with one recording at a time; padding is zeros."""
    outputs = [forward(each[None, : int(num)], num[None]) for each, num in zip(waveform, num_samples, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence([log_prob[0] for log_prob, _ in outputs], batch_first=True)
    return padded, torch.cat([num_frames for _, num_frames in outputs])


@contextmanager
def named(what: str, cure: str = "") -> Iterator[None]:
    """Puts the name of a network into the messages of errors that its description or its audio causes.

    Args:
        what: the name and, before a cure, what is wrong.
        cure: what to do; none if the errors say it.

    Raises:
        AsrError: the block raised it, or another error that values of a wrong type or size cause.
        torch.cuda.OutOfMemoryError: the block raised it.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except (AsrError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        message = f"{what} ({reason_of(error)}); {cure}." if cure else f"{what}: {reason_of(error)}."
        raise AsrError(message) from error


def reason_of(error: Exception) -> str:
    """The message of a library's error in one line, without a full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return textwrap.shorten(text, _LONGEST_REASON, placeholder=" ...").rstrip(".")


def fbank_of(settings: Any, sampling_rate: int, name: str) -> Fbank:
    """The filterbank that a network's metadata describe.

    Args:
        settings: the arguments of `Fbank`, by name.
        sampling_rate: of the network, in Hz.
        name: of the network.

    Raises:
        AsrError: they are not such arguments, or have another sampling rate.
    """
    with named(f"{name}: the field 'fbank' of its metadata does not describe a filterbank", "export it again"):
        fbank = Fbank(**settings)
        # Some arguments are only read here.
        fbank(torch.zeros(1, fbank.frame_length), torch.tensor([fbank.frame_length]))
    if fbank.sampling_rate != sampling_rate:
        raise AsrError(
            f"{name}: the field 'fbank' of its metadata has a sampling_rate of {fbank.sampling_rate} Hz, but the "
            f"network one of {sampling_rate} Hz; export it again."
        )
    return fbank


def positive_number(value: Any, what: str) -> float:
    """Converts a number greater than 0, which may be text.

    Args:
        value: the number.
        what: the network and the field, for error messages.

    Raises:
        AsrError: it is not such a number.
    """
    number = _finite(value)
    if not number > 0.0:
        raise AsrError(f"{what} is {value!r}; give a number greater than 0.")
    return number


def positive_integer(value: Any, what: str) -> int:
    """Like `positive_number`, for whole numbers."""
    number = _finite(value)
    if not number > 0.0 or not number.is_integer():
        raise AsrError(f"{what} is {value!r}; give a whole number greater than 0.")
    return int(number)


def _finite(value: Any) -> float:
    """A number or the text of one; NaN for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) and not isinstance(value, bool) else math.nan


def _as_log_prob(output: Tensor) -> Tensor:
    """Converts logits or probabilities (N, T, C), recognized by the first frames, to log-probabilities."""
    first = output[:, :1]
    if not output.numel() or float(first.logsumexp(2).abs().max()) <= _TOLERANCE:
        return output
    if float(first.min()) >= 0.0 and float((first.sum(2) - 1.0).abs().max()) <= _TOLERANCE:
        return output.log()
    return output.log_softmax(2)
