"""CTC networks in ONNX files, run by onnxruntime: exports of icefall, NeMo, sherpa-onnx and transformers.

What a file expects is read from the names of its inputs and from its metadata:

| input | is |
| --- | --- |
| `x`, `x_lens` (or `speech`, `feats`, ...) | filterbanks (N, T, F) as icefall makes them, and frames |
| the same and `model_type` `wenet_ctc` | filterbanks of 16-bit integers up to half the sampling rate, as WeNet's |
| `audio_signal`, `length` | filterbanks (N, F, T) as NeMo makes them, normalized as `normalize_type` says, and frames |
| the same and `fbank` in the metadata | filterbanks with those settings: an export of this program |
| `waveform`, `audio` | samples (N, L) |
| `input_values` | the same as transformers makes them: each recording has mean 0 and variance 1 |
| `attention_mask` beside one of the others | ones: recordings are read one at a time |
| `x` and states | chunks of `T` frames, `decode_chunk_len` frames apart: a streaming network |
| `x`, `x_lens` and states | the same; the last chunk may have fewer frames, and all of its outputs are valid |

Shapes: N utterances, L samples, T frames, F features, C tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.audio.fbank import INT16_SCALE, LOG_FLOOR, Fbank
from asr.errors import AsrError, package
from asr.kernels import jit
from asr.models.external.base import (
    each_alone,
    fbank_of,
    measured_shift,
    named,
    positive_integer,
    positive_number,
    reason_of,
    tokens_of_file,
)
from asr.models.external.nemo_features import NemoFeatures
from asr.models.external.streaming import Chunked, ChunkedModel, checked_chunk_sizes
from asr.serialization import sha256_of_file
from asr.text.ctc_tokens import CTCTokens
from asr.text.documents import parse_json, read_text

_OF_TRANSFORMERS = "input_values"
_FEATURES_OF_TRANSFORMERS = "input_features"
_MASK = "attention_mask"
_WAVEFORM_INPUTS = (_OF_TRANSFORMERS, "waveform", "audio", "wav", "samples")
_TRANSPOSED_INPUTS = ("audio_signal", "processed_signal")
_LENGTH_INPUTS = ("x_lens", "length", "lengths", "x_length", "speech_lengths", "feats_lengths", "num_frames", "len")
_DEFAULT_SAMPLING_RATE = 16000
_DEFAULT_NUM_MEL_BINS = 80
_DEFAULT_SUBSAMPLING = 4
_FBANK_SHIFT = 0.01
_PREPROCESSOR = "preprocessor_config.json"
_VARIANCE_FLOOR = 1e-7
_WENET = "wenet_ctc"
# Fields of the metadata, and their values, that mean features of other kinds: Whisper's, GigaAM's, MFCC of TeleSpeech,
# and features that are normalized by these means (Dolphin, FireRedASR).
_OTHER_FEATURES: dict[str, tuple[str, ...] | None] = {
    "feature": ("whisper",),
    "is_giga_am": ("1",),
    "model_type": ("telespeech_ctc",),
    "mean": None,
    "cmvn_mean": None,
}
_DTYPES: dict[str, Any] = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(double)": np.float64}

# Where a tensor names the file with its numbers.
_EXTERNAL_DATA, _LOCATION = "external_data", "location"

# The beginning of a field of `metadata_props` at the end of a file: its key; a value of 64 characters follows.
_SEAL = b"r\x4e\n\x0aasr_sha256\x12@"


def seal(path: Path) -> None:
    """Appends the checksum of an ONNX file to its metadata, at the end of the file."""
    digest = sha256_of_file(path)
    with path.open("ab") as stream:
        stream.write(_SEAL + digest.encode())


def require_intact(path: Path) -> None:
    """Checks a file that `seal` has sealed against its checksum; other files pass.

    Raises:
        AsrError: the file is damaged.
    """
    num_bytes = path.stat().st_size - len(_SEAL) - 64
    with path.open("rb") as stream:
        stream.seek(max(0, num_bytes))
        found = stream.read()
    if found.startswith(_SEAL) and found[len(_SEAL) :] != sha256_of_file(path, num_bytes).encode():
        raise AsrError(
            f"onnx:{path}: the file does not match its checksum. If it is damaged, copy or export it again; if another "
            "program has changed it, remove 'asr_sha256' from its metadata."
        )


def _require_weights_beside(path: Path) -> None:
    """Refuses weights in files outside of the file's folder, which older versions of onnxruntime read.

    Raises:
        AsrError: it has such weights, or names files and cannot be read.
    """
    content, name = path.read_bytes(), f"onnx:{path}"
    if _LOCATION.encode() not in content:
        return
    onnx = package("onnx", name)
    try:
        model = onnx.load_from_string(content)
    except Exception as error:  # protobuf's own classes derive from Exception alone
        raise _unreadable(name, error) from error
    # The Hugging Face Hub's cache has links to files that are in one folder.
    folders = path.parent.resolve(), path.resolve().parent
    for location in _locations(model):
        with named(f"{name}: its weights cannot be found", "save them in the same file"):
            place = (path.parent / location).resolve()
        if not any(place.is_relative_to(folder) for folder in folders):
            raise AsrError(f"{name}: it has weights in {location!r}, which is not in its folder; save them beside it.")


def _locations(message: Any) -> Iterator[str]:
    """The files that the tensors of an ONNX message name, relative to its folder."""
    for field, value in message.ListFields():
        if field.name == _EXTERNAL_DATA:
            yield from (entry.value for entry in value if entry.key == _LOCATION)
        elif field.type == field.TYPE_MESSAGE:
            for each in value if isinstance(value, Sequence) else [value]:
                yield from _locations(each)


def _unreadable(name: str, error: Exception) -> AsrError:
    return AsrError(f"{name}: this is not a readable ONNX file ({reason_of(error)}).")


class OnnxFile:
    """A network in an ONNX file.

    Args:
        path: the file.
        num_threads: threads of onnxruntime; None for as many as torch uses.

    Attributes:
        name: shown to users.
        path: absolute.
        metadata: its fields by name.
        inputs: by name, with `shape` and `type`.
        outputs: likewise.

    Raises:
        AsrError: onnxruntime is missing, or the file cannot be read or has weights in files outside of its folder.
    """

    def __init__(self, path: str | Path, num_threads: int | None = None) -> None:
        path = Path(path)
        self.path, self._num_threads = path.absolute(), num_threads
        self.name = f"onnx:{path}"
        runtime = package("onnxruntime", self.name)
        if not path.is_file():
            raise AsrError(f"{self.name}: there is no such file.")
        require_intact(path)
        _require_weights_beside(path)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = jit.num_threads() if num_threads is None else num_threads
        options.log_severity_level = 3
        try:
            self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own classes derive from Exception alone
            raise _unreadable(self.name, error) from error
        self.metadata: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)
        self.inputs: dict[str, Any] = {each.name: each for each in self._session.get_inputs()}
        self.outputs: dict[str, Any] = {each.name: each for each in self._session.get_outputs()}

    def run_session(self, feed: dict[str, Any]) -> list[Any]:
        """Arrays by the names of inputs, which are converted to their types -> the outputs.

        Raises:
            AsrError: onnxruntime cannot run the network with them.
        """
        try:
            outputs: list[Any] = self._session.run(
                None, {name: np.asarray(value, dtype=self.dtype(name)) for name, value in feed.items()}
            )
        except Exception as error:  # as above
            raise AsrError(f"{self.name}: onnxruntime cannot run it ({reason_of(error)}).") from error
        return outputs

    def dtype(self, name: str) -> Any:
        """NumPy's type of an input."""
        return _DTYPES.get(self.inputs[name].type, np.float32)

    def number(self, field: str, default: int | None) -> int:
        """A whole number greater than 0 in the metadata.

        Raises:
            AsrError: it is none, or is missing and has no default.
        """
        value = self.metadata.get(field, default)
        if value is None:
            raise AsrError(f"{self.name}: its metadata have no field {field!r}; export it again with it.")
        return positive_integer(value, f"{self.name}: the field {field!r} of its metadata")

    def own_tokens(self, tokens: Any, blank: int | str | None) -> CTCTokens:
        """The given tokens, those of the metadata, or those of `tokens.txt` next to the file.

        Raises:
            AsrError: there are none, or as for `CTCTokens`.
        """
        if isinstance(tokens, CTCTokens):
            return tokens
        if tokens is None and "tokens" in self.metadata:
            tokens = self.metadata["tokens"].split("\n")
        elif tokens is None:
            beside = [self.path.with_name(name) for name in ("tokens.txt", "vocab.json")]
            tokens = next((file for file in beside if file.is_file()), None)
        if tokens is None:
            raise AsrError(f"{self.name}: its tokens are unknown; put tokens.txt next to it, or give tokens=.")
        with named(self.name):
            return tokens_of_file(tokens, self.path, blank=blank)


class OnnxEncoder(OnnxFile, Chunked):
    """A network in an ONNX file that reads audio.

    Args:
        path: the file.
        num_threads: as for `OnnxFile`.
        normalize: as for `OnnxModel`.

    Attributes:
        kind: of its input: `waveform`, `features` or `transposed`.
        sampling_rate: of the waveforms, in Hz.
        extractor: waveforms -> features, like `asr.audio.fbank.Fbank`; None if the network reads samples.
        normalizes: see `OnnxModel`.
        takes_lengths: whether it reads the lengths of utterances.

    Raises:
        AsrError: as for `OnnxFile`, its inputs are not among those above, or its metadata cannot be used.
    """

    def __init__(self, path: str | Path, num_threads: int | None = None, normalize: bool | None = None) -> None:
        super().__init__(path, num_threads)
        self._require_known_features()
        self._signal, self._length, self._states = self._sorted_inputs()
        self.takes_lengths = self._length is not None
        self.kind = _input_kind(self._signal, len(self.inputs[self._signal].shape), self.name)
        preprocessor = self._preprocessor()
        rate = positive_integer(
            preprocessor.get("sampling_rate", _DEFAULT_SAMPLING_RATE),
            f"{self.name}: the sampling_rate in {_PREPROCESSOR}",
        )
        self.sampling_rate = self.number("sample_rate", rate)
        self.normalizes: bool | None = None
        if self.kind == "waveform":
            usual = preprocessor.get("do_normalize", self._signal == _OF_TRANSFORMERS)
            self.normalizes = bool(usual if normalize is None else normalize)
        self.extractor = self._feature_extractor()

    @property
    def reads_one(self) -> bool:
        """Whether it reads one utterance at a time; without lengths, it would take padding for audio."""
        return self._length is None or _MASK in self.inputs or self.inputs[self._signal].shape[0] == 1

    def read(self, waveform: Tensor, num_samples: Tensor) -> tuple[list[Any], Tensor, int]:
        """(N, L) in [-1, 1] and (N,) -> the outputs, the samples or frames of each input (N,), and the most of them."""
        signal, lengths = self._signal_of(waveform, num_samples)
        feed: dict[str, Any] = {self._signal: signal.numpy()}
        if self._length is not None:
            feed[self._length] = lengths.numpy()
        if _MASK in self.inputs:
            feed[_MASK] = np.ones((1, int(lengths[0])))
        longest = signal.shape[2] if self.kind == "transposed" else signal.shape[1]
        return emitted(self.run_session(feed)), lengths, longest

    def normal_features(self, features: Tensor) -> Tensor:
        """Log energies scaled as in the network's training, from those of 16-bit integers, which WeNet's read."""
        return features if "fbank" in self.metadata or self._is_of_wenet else in_unit_range(features)

    def shift(self, given: float | None, forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> float:
        """Seconds from one frame of output to the next: as given, by the metadata, or as `forward` counts frames.

        Raises:
            AsrError: the given number or the field `subsampling_factor` of the metadata is not greater than 0, or the
                latter is not whole.
        """
        if given is not None:
            return positive_number(given, f"{self.name}: the frame_shift")
        if self._states or "subsampling_factor" in self.metadata:
            shift = _FBANK_SHIFT
            if "fbank" in self.metadata:
                shift = self.extractor.frame_shift / self.sampling_rate
            return self.number("subsampling_factor", _DEFAULT_SUBSAMPLING) * shift
        return measured_shift(forward, self.sampling_rate)

    def initial_states(self) -> dict[str, Any]:
        states = {}
        for name in self._states:
            shape = [size if isinstance(size, int) and size > 0 else 1 for size in self.inputs[name].shape]
            states[name] = np.zeros(shape, dtype=self.dtype(name))
        return states

    def read_chunk(self, chunk: Tensor, states: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """A chunk (T, F) and the states before it -> the outputs for one utterance, and the states after it."""
        feed = {self._signal: chunk.unsqueeze(0).numpy(), **states}
        if self._length is not None:
            feed[self._length] = np.array([len(chunk)])
            missing = self.chunk_sizes()[0] - len(chunk)
            feed[self._signal] = np.pad(feed[self._signal], ((0, 0), (0, missing), (0, 0)))
        outputs = self.run_session(feed)
        following = dict(zip(self._states, outputs[len(outputs) - len(self._states) :], strict=True))
        return emitted(outputs[: len(outputs) - len(self._states)]), following

    def chunk_sizes(self) -> tuple[int, int]:
        """As for `Chunked`.

        Raises:
            AsrError: the metadata do not say, or frames would be left out.
        """
        if "T" not in self.metadata:
            raise AsrError(
                f"{self.name}: it keeps states ({', '.join(self._states)}), but its metadata have no field 'T', the "
                "frames of a chunk, as icefall's have; export it again with it, or for whole utterances."
            )
        size, shift = self.number("T", None), self.number("decode_chunk_len", None)
        return checked_chunk_sizes(size, shift, self.name)

    @property
    def _is_of_wenet(self) -> bool:
        return self.metadata.get("model_type") == _WENET

    def _require_known_features(self) -> None:
        for field, values in _OTHER_FEATURES.items():
            value = self.metadata.get(field)
            if value is not None and (values is None or value in values):
                shown = field if values is None else f"{field} = {value}"
                raise AsrError(
                    f"{self.name}: its metadata say {shown}, so that it reads features that are not computed here; "
                    "give a network that reads filterbanks of icefall, WeNet or NeMo, or use CallableModel in Python."
                )

    def _sorted_inputs(self) -> tuple[str, str | None, list[str]]:
        names = [name for name in self.inputs if name != _MASK]
        length = next((name for name in names if name in _LENGTH_INPUTS), None)
        signals = [name for name in names if name != length]
        if not signals:
            raise AsrError(f"{self.name}: none of its inputs {', '.join(names)} is a signal.")
        self._check_states(names, signals)
        if signals[0] == _FEATURES_OF_TRANSFORMERS:
            raise AsrError(
                f"{self.name}: it reads {signals[0]}, features of transformers that are not computed here; give the "
                "network as transformers:NAME, or use CallableModel in Python."
            )
        return signals[0], length, signals[1:]

    def _check_states(self, names: list[str], signals: list[str]) -> None:
        """Checks the inputs of those names, of which some are a signal and states.

        Raises:
            AsrError: the states do not come back, or such networks with states cannot be used.
        """
        signal, *states = signals
        if states and len(self.outputs) < 1 + len(states):
            raise AsrError(
                f"{self.name}: its inputs {', '.join(names)} are neither a signal and its lengths nor a signal and "
                f"states that come back among the outputs ({', '.join(self.outputs)}); export it for whole "
                "utterances, or use CallableModel in Python."
            )
        if states and signal in _TRANSPOSED_INPUTS + _WAVEFORM_INPUTS:
            raise AsrError(
                f"{self.name}: it reads {signal} and keeps states ({', '.join(states)}); of networks with states, "
                "only those that read filterbanks (N, T, F) can be used, as icefall's; export it for whole utterances."
            )

    def _preprocessor(self) -> dict[str, Any]:
        """The description of its input next to a network of transformers, if there is one."""
        beside = self.path.with_name(_PREPROCESSOR)
        if self._signal != _OF_TRANSFORMERS or not beside.is_file():
            return {}
        with named(f"{self.name}: {_PREPROCESSOR} next to it is not a JSON object", "copy it again"):
            content = parse_json(read_text(beside))
            if not isinstance(content, dict):
                raise ValueError(f"it is of type {type(content).__name__}")
        return content

    def _feature_extractor(self) -> Any:
        if self.kind == "waveform":
            return None
        axis = 1 if self.kind == "transposed" else 2
        size = self.inputs[self._signal].shape[axis]
        known = size if isinstance(size, int) and size > 0 else None
        if "fbank" in self.metadata:
            return self._own_fbank(known)
        num_mel_bins = known or self.number("feat_dim", _DEFAULT_NUM_MEL_BINS)
        with named(self.name):
            if self.kind == "transposed":
                normalize_type = self.metadata.get("normalize_type", "per_feature")
                return NemoFeatures(num_mel_bins, self.sampling_rate, normalize_type)
            high_freq = 0.0 if self._is_of_wenet else -400.0
            return Fbank(num_mel_bins=num_mel_bins, high_freq=high_freq, sampling_rate=self.sampling_rate)

    def _signal_of(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        if self.extractor is None:
            return normalized(waveform, num_samples) if self.normalizes else waveform, num_samples
        features, lengths = self.extractor(waveform, num_samples)
        if self.kind == "transposed":
            return features.transpose(1, 2).contiguous(), lengths
        return self.normal_features(features), lengths

    def _own_fbank(self, num_features: int | None) -> Fbank:
        """The filterbank of a network of this program, with the settings in the metadata, for that input."""
        with named(f"{self.name}: the field 'fbank' of its metadata is not JSON", "export it again"):
            settings = parse_json(self.metadata["fbank"])
        fbank = fbank_of(settings, self.sampling_rate, self.name)
        if num_features not in (None, fbank.feature_dim):
            raise AsrError(
                f"{self.name}: the field 'fbank' of its metadata describes {fbank.feature_dim} features, but its input "
                f"{self._signal!r} has {num_features}; export it again."
            )
        return fbank


class OnnxModel(OnnxEncoder, ChunkedModel):
    """A network in an ONNX file that reads whole utterances, or a streaming one, chunk by chunk.

    Args:
        path: the file.
        tokens: its output symbols: a list or a file; None for those of the metadata, or `tokens.txt` or transformers'
            `vocab.json` next to the file.
        num_threads: threads of onnxruntime; None for as many as torch uses.
        frame_shift: in seconds; None derives it from the metadata `subsampling_factor`, or from numbers of frames.
        blank: as for `CTCTokens`.
        normalize: whether samples are normalized; None for what `preprocessor_config.json` next to the file says, or
            only those of `input_values`.

    Attributes:
        normalizes: whether it does; None if the network does not read samples.

    Raises:
        AsrError: onnxruntime is missing, the file cannot be read or has weights in files outside of its folder, its
            inputs are not among those above, its metadata cannot be used, or there are no tokens.
    """

    def __init__(
        self,
        path: str | Path,
        tokens: Any = None,
        num_threads: int | None = None,
        frame_shift: float | None = None,
        blank: int | str | None = None,
        normalize: bool | None = None,
    ) -> None:
        super().__init__(path, num_threads, normalize)
        self.tokens = self.own_tokens(tokens, blank)
        if self.is_streaming:
            self.chunk_sizes()
        self.frame_shift = self.shift(frame_shift, self.forward)

    def __reduce__(self) -> tuple[type[OnnxModel], tuple[Any, ...]]:
        # Copies and other processes open the file again, from whichever folder they work in.
        return OnnxModel, (self.path, self.tokens, self._num_threads, self.frame_shift, None, self.normalizes)

    def forward_whole(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        if len(num_samples) > 1 and self.reads_one:
            return each_alone(self.forward_whole, waveform, num_samples)
        return self.sorted_output(*self.read(waveform, num_samples))

    def step(self, chunk: Tensor, states: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        output, following = self.read_chunk(chunk, states)
        log_prob, num_frames = self.checked(*self.sorted_output(output, torch.ones(1), 1), 1)
        return log_prob[0, : int(num_frames)], following


def in_unit_range(features: Tensor) -> Tensor:
    """Log energies of samples in [-1, 1], as in icefall and sherpa-onnx, from those of 16-bit integers.

    They have the same floor, which digital silence and quiet noise reach only in this range.
    """
    return (features - 2.0 * math.log(INT16_SCALE)).clamp(min=LOG_FLOOR)


def normalized(waveform: Tensor, num_samples: Tensor) -> Tensor:
    """Samples (N, L) with mean 0 and variance 1 in each recording, and zeros after its end."""
    parts = [each[:num] for each, num in zip(waveform, num_samples.tolist(), strict=True)]
    scaled = [(each - each.mean()) / (each.var(unbiased=False) + _VARIANCE_FLOOR).sqrt() for each in parts]
    return torch.nn.utils.rnn.pad_sequence(scaled, batch_first=True)


def emitted(outputs: list[Any]) -> list[Any]:
    """The log-probabilities and, if the second output is one of whole numbers (N,), the frames, as tensors."""
    log_prob, *others = outputs
    found = [torch.from_numpy(log_prob) if _holds(log_prob, np.floating) else log_prob]
    # Other outputs may be hidden layers.
    if others and _holds(others[0], np.integer) and others[0].ndim == 1:
        found.append(torch.from_numpy(others[0]))
    return found


def _holds(output: Any, kind: type[Any]) -> bool:
    return isinstance(output, np.ndarray) and np.issubdtype(output.dtype, kind)


def load(path: str, **options: Any) -> OnnxModel:
    """Loads the network of a file, or of a folder with one ONNX file or `model.onnx`.

    Raises:
        AsrError: there is none, or it cannot be used.
    """
    place = Path(path)
    if place.is_dir():
        files = sorted(place.glob("[!.]*.onnx"))  # hidden ones may be unfinished
        chosen = [file for file in files if file.name == "model.onnx"] or files
        if len(chosen) != 1:
            raise AsrError(f"onnx:{path}: the folder has {len(files)} ONNX files; give the path of one of them.")
        place = chosen[0]
    return OnnxModel(place, **options)


def _input_kind(name: str, num_dims: int, model: str) -> str:
    if name in _TRANSPOSED_INPUTS and num_dims == 3:
        return "transposed"
    if num_dims == 2 and name in _WAVEFORM_INPUTS:
        return "waveform"
    if num_dims == 3:
        return "features"
    raise AsrError(
        f"{model}: its input {name!r} has {num_dims} dimensions and is neither features (N, T, F) nor samples, which "
        f"are called {', '.join(_WAVEFORM_INPUTS)}."
    )
