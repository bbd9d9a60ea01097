"""From what users hand in to utterances that the acoustic model can take: checks, mono, sampling rate, pauses.

Shapes: N utterances, L samples.


Work of several threads at the same time on a GPU: each has a stream; events say what must be there before what.

On a CPU the same calls do nothing.


Two stages of work at the same time: while batches are searched, the next one goes through the acoustic model.

Frame-batch and index-table rescore with one to four workers beside the rest of the recognizer. Here the first stage
has one thread, the second one to four, each with a language model of its own. On a CPU torch and k2 let go of Python's
lock while they compute; on a GPU each thread has a stream, and a search waits there, not on the host, for the acoustic
model's event.


Waveforms to words: features, acoustic model, first pass and language model behind one module."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from asr.audio.resample import checked_rate, resample
from asr.bundle import Bundle
from asr.decoding.build import (
    LanguageModels,
    build_first_pass,
    chosen_first_pass,
    chosen_mode,
    decoding_options,
    language_models,
)
from asr.decoding.interface import Decoder
from asr.decoding.paths import WordAligner, can_align
from asr.errors import AsrError
from asr.lm.combine import mark_live
from asr.results import RecognitionResult, StageTimes, as_result, joined
from asr.text.lexicon import Lexicon

_WINDOW_SECONDS = 0.2


def as_utterances(waveform: Tensor | Sequence[Tensor], num_samples: Tensor | None = None) -> list[Tensor]:
    """One float tensor (L,) an utterance.

    Args:
        waveform: (L,), a batch (N, L), or a list of (L,); a list's entries may be (channels, L), which are averaged.
        num_samples: (N,) of a batch whose rows are padded.

    Raises:
        AsrError: no tensors, another shape, no samples, integers, NaN or infinite samples, lengths that are not those
            of the rows; the utterance is numbered.
    """
    if isinstance(waveform, Tensor):
        rows = [waveform] if waveform.dim() == 1 else list(waveform) if waveform.dim() == 2 else None
        if rows is None:
            raise AsrError(
                f"the waveform has the shape {tuple(waveform.shape)}; give (samples,) or (utterances, samples)."
            )
    elif isinstance(waveform, (list, tuple)) and all(isinstance(row, Tensor) for row in waveform):
        rows = list(waveform)
    else:
        raise AsrError(
            f"the waveform is a {type(waveform).__name__}; give a tensor or a list of tensors, of numpy's arrays "
            "torch.from_numpy(array)."
        )
    if num_samples is not None:
        if len(num_samples) != len(rows):
            raise AsrError(f"there are {len(num_samples)} lengths (num_samples) for {len(rows)} utterances.")
        for index, (row, num) in enumerate(zip(rows, num_samples.tolist(), strict=True)):
            if not 0 <= num <= row.shape[-1]:
                raise AsrError(f"utterance {index} has {row.shape[-1]} samples, and num_samples says {num}.")
        rows = [row[: int(num)] for row, num in zip(rows, num_samples, strict=True)]
    return [_checked(row, f"utterance {index}") for index, row in enumerate(rows)]


def _checked(row: Tensor, name: str) -> Tensor:
    if row.dim() == 2:
        row = row.float().mean(dim=0)
    if row.dim() != 1:
        raise AsrError(f"{name} has the shape {tuple(row.shape)}; give (samples,), or (channels, samples) in a list.")
    if row.numel() == 0:
        raise AsrError(f"{name} has no samples.")
    if not row.is_floating_point():
        raise AsrError(f"{name} holds {row.dtype}; give floating-point samples in [-1, 1] (16-bit samples / 32768).")
    if not bool(torch.isfinite(row).all()):
        raise AsrError(f"{name} has samples that are NaN or infinite.")
    return row.float()


def at_rate(waveform: Tensor, old_rate: int, new_rate: int) -> Tensor:
    """(L,) brought to another sampling rate.

    Raises:
        AsrError: as `checked_rate`.
    """
    old_rate = checked_rate(old_rate)
    return waveform if old_rate == new_rate else resample(waveform, old_rate, new_rate)


def split_at_pauses(waveform: Tensor, sampling_rate: int, max_seconds: float) -> list[tuple[int, int]]:
    """Cuts a long recording where it is quietest, so that no piece is longer than `max_seconds`.

    Each cut lies in the later half of the longest piece allowed, in the middle of the 0.2 s with the least energy.

    Args:
        waveform: (L,).
        sampling_rate: in Hz.
        max_seconds: at least one second.

    Returns:
        (begin, end) of each piece in samples; together they are the whole recording.
    """
    if max_seconds < 1.0:
        raise AsrError(f"pieces of at most {max_seconds} s are too short to recognize; allow one second or more.")
    longest = int(max_seconds * sampling_rate)
    window = int(_WINDOW_SECONDS * sampling_rate)
    cumulative = torch.cat([waveform.new_zeros(1, dtype=torch.float64), waveform.double().square().cumsum(0)])
    pieces = []
    begin, num_samples = 0, waveform.numel()
    while num_samples - begin > longest:
        first, last = begin + longest // 2, begin + longest - window
        energy = cumulative[first + window : last + window] - cumulative[first:last]
        cut = first + int(energy.argmin()) + window // 2
        pieces.append((begin, cut))
        begin = cut
    return [*pieces, (begin, num_samples)]


def like_length_batches(lengths: Sequence[int], max_padded: int) -> list[list[int]]:
    """Groups positions of like length so that each group's padded size stays below `max_padded`; one at least."""
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and longest * (len(batches[-1]) + 1) <= max_padded:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches


class StreamPool:
    """A stream for each of some threads, all behind what this thread has queued so far, such as copies of weights.

    Args:
        number: of threads, which number themselves from 0.
        device: what they compute on.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self._streams: list[Any] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(number)]
            for stream in self._streams:
                stream.wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def running(self, thread: int, after: Any = None) -> Iterator[None]:
        """What is queued inside runs in the thread's stream, behind an event that another thread has recorded."""
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[thread]):
            if after is not None:
                self._streams[thread].wait_event(after)
            yield

    def event(self, thread: int) -> Any:
        """An event behind all that is in the thread's stream so far; None on a CPU."""
        return self._streams[thread].record_event() if self._streams else None

    def wait(self, thread: int) -> None:
        """Keeps the host until the thread's stream has done all."""
        if self._streams:
            self._streams[thread].synchronize()


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor where it is needed; to a GPU by way of pinned memory, so that the host does not wait for the copy."""
    if host.device.type == "cpu" and device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


_Item = TypeVar("_Item")


_Between = TypeVar("_Between")


_Result = TypeVar("_Result")


def pipelined(
    items: Iterable[_Item],
    first: Callable[[_Item], _Between],
    second: Callable[[int, _Between], _Result],
    num_workers: int,
    device: torch.device,
) -> Iterator[_Result]:
    """Runs both stages on all items; the results are those of running them one after the other, and in order.

    Args:
        items: taken as they are needed: at most `num_workers` + 1 are under way.
        first: run in one thread, item after item.
        second: run in the workers; its first argument is the worker, 0 to `num_workers` - 1.
        num_workers: 0 runs everything in turn, in this thread.
        device: what both compute on.

    Raises:
        whatever a stage raises, for the first item in order.
    """
    if num_workers == 0:
        for item in items:
            yield second(0, first(item))
        return
    idle: queue.SimpleQueue[int] = queue.SimpleQueue()
    for worker in range(num_workers):
        idle.put(worker)
    streams = StreamPool(num_workers + 1, device)

    @torch.no_grad()
    def run_first(item: _Item) -> tuple[_Between, Any]:
        with streams.running(num_workers):
            return first(item), streams.event(num_workers)

    @torch.no_grad()
    def run_second(made: Future[tuple[_Between, Any]]) -> _Result:
        value, is_made = made.result()
        worker = idle.get()
        try:
            with streams.running(worker, after=is_made):
                result = second(worker, value)
            # The result is read by any thread, and the memory of the value goes back to the first stage's stream.
            streams.wait(worker)
            return result
        finally:
            idle.put(worker)

    under_way: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(1) as front, ThreadPoolExecutor(num_workers) as back:
        try:
            for item in items:
                under_way.append(back.submit(run_second, front.submit(run_first, item)))
                if len(under_way) > num_workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for waiting in under_way:
                waiting.cancel()


_Engines = list[LanguageModels]


class EnginePool:
    """Language models with caches, each lent to one call at a time.

    A language model's caches change with every query, so two calls must never share one. A call takes a set that is
    idle, or a new one, and returns it warm. A set whose call failed is dropped, since its caches may be half written.
    Copies of a pool are empty.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._idle: list[_Engines] = []

    def fill(self, make: Callable[[], _Engines]) -> None:
        """Makes a set unless one is idle."""
        with self.lock:
            if not self._idle:
                self._idle.append(make())

    @contextlib.contextmanager
    def lend(self, make: Callable[[], _Engines]) -> Iterator[_Engines]:
        """A set that nobody else has until the block ends."""
        with self.lock:
            engines = self._idle.pop() if self._idle else make()
        yield engines
        with self.lock:
            self._idle.append(engines)

    def __reduce__(self) -> tuple[type[EnginePool], tuple[()]]:
        return EnginePool, ()


_Self = TypeVar("_Self", bound="Recognizer")


_MOST_WORKERS = 64


class _Scored(NamedTuple):
    """A batch behind the acoustic model: log_prob (N, T, C), num_frames (N,), seconds of each, times so far."""

    log_prob: Tensor
    num_frames: Tensor
    lengths: list[float]
    times: StageTimes


class Recognizer(nn.Module):
    """Turns waveforms into words; needs neither Lightning, lhotse nor k2.

    Move it to a GPU with `.to("cuda")` as any module. Several threads may call it at the same time: they share the
    weights, and each call has language model caches of its own, up to `cache_bytes`.

    Args:
        bundle: the trained parts.
        mode: `auto` (the first that the bundle has parts for), `on_the_fly`, `interpolated`, `large_ngram` or `ngram`.
        first_pass: `auto` (see `asr.decoding.build.default_first_pass`), `k2` or `torch`, whose lattices the
            language model rescores on the fly; or `torch-search`, with the language model inside the search, where it
            decides what is pruned: that takes several times as long.
        max_segment_seconds: longer recordings are cut at pauses into pieces of at most this length.
        batch_seconds: pieces are recognized together up to this much audio, padding included.
        cache_bytes: what the recurrent language model's caches may hold; the least used histories make room.
        lm_device_bytes: device memory for the tables of the large language models, which stay in host memory beyond it;
            None puts all on the device. Results are the same.
        num_workers: so many batches are searched at a time, each with a language model (and a share of `cache_bytes`)
            of its own, while the next goes through the acoustic model; 0 does everything in turn. The words are the
            same. More than the machine has cores beside the acoustic model's is no use.
        lexicon: the graph's pronunciations, from which words get the times of their phones; the bundle's own if None.
            Without one a word's times are where the graph writes it, which is up to a few phones late.
        keep_lattices: whether results have lattices, and words confidences; costs time and memory.
        options: override those that the bundle was tuned to: any field of `DecodingOptions`, and `rnn_weight`.

    Raises:
        AsrError: the bundle has no parts for the mode, an option does not exist, or the first pass cannot run here.
    """

    def __init__(
        self,
        bundle: Bundle,
        mode: str = "auto",
        first_pass: str = "auto",
        max_segment_seconds: float = 25.0,
        batch_seconds: float = 100.0,
        cache_bytes: int = 1 << 30,
        lm_device_bytes: int | None = None,
        num_workers: int = 0,
        keep_lattices: bool = False,
        lexicon: Lexicon | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.bundle = bundle
        self.features = bundle.features.network
        self.acoustic_model = bundle.acoustic_model.network
        self.mode = chosen_mode(bundle, mode)
        self.options, self.rnn_weight = decoding_options(bundle, self.mode, options or {})
        if not 0 <= num_workers <= _MOST_WORKERS:
            raise AsrError(f"the number of workers is {num_workers}; it lies between 0 and {_MOST_WORKERS}.")
        if not 1.0 <= max_segment_seconds < math.inf:
            raise AsrError(f"max_segment_seconds is {max_segment_seconds}; give 1 second or more.")
        if not 0.0 < batch_seconds < math.inf:
            raise AsrError(f"batch_seconds is {batch_seconds}; it must be above 0, and finite.")
        self._wanted_first_pass = first_pass
        chosen_first_pass(first_pass, bundle.graph, torch.device("cpu"))
        self.max_segment_seconds = max_segment_seconds
        self.batch_seconds = batch_seconds
        self.cache_bytes = cache_bytes
        self.num_workers = num_workers
        self.keep_lattices = keep_lattices
        if lexicon is None and can_align(bundle.graph):
            lexicon = bundle.lexicon
        self.aligner = WordAligner(lexicon, bundle.graph) if lexicon is not None else None
        self.lm_device_bytes = lm_device_bytes
        # Built for the device that the weights are on when they are first needed.
        self._first_pass: Decoder | None = None
        self._engines = EnginePool()
        self.eval()

    @classmethod
    def from_folder(
        cls: type[_Self],
        folder: str | Path,
        large_ngram: str | Path | None = None,
        rnn_lm: str | Path | None = None,
        **arguments: Any,
    ) -> _Self:
        """Loads a bundle, with a user's own language models where given (`Bundle.with_language_models`).

        The other arguments are those of the constructor.
        """
        return cls(Bundle.load(folder).with_language_models(large_ngram, rnn_lm), **arguments)

    @property
    def sampling_rate(self) -> int:
        """What waveforms are brought to, in Hz."""
        return self.bundle.sampling_rate

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.acoustic_model.parameters()).device

    @property
    def first_pass_name(self) -> str:
        """`k2`, `torch` or `torch-search`."""
        return chosen_first_pass(self._wanted_first_pass, self.bundle.graph, self.device)

    @torch.no_grad()
    def forward(
        self, waveform: Tensor | Sequence[Tensor], sampling_rate: int | None = None, num_samples: Tensor | None = None
    ) -> list[RecognitionResult]:
        """Recognizes one recording or several.

        Args:
            waveform: float samples in [-1, 1]: (L,), a batch (N, L), or a list of (L,) or (channels, L).
            sampling_rate: of the samples, in Hz; the bundle's own if None.
            num_samples: (N,) of a padded batch.

        Returns:
            A result a recording, in order.

        Raises:
            AsrError: a recording is empty, has samples that are not numbers, or a sampling rate that is none.
        """
        rate = self.sampling_rate
        old_rate = rate if sampling_rate is None else sampling_rate
        recordings = [at_rate(row, old_rate, rate) for row in as_utterances(waveform, num_samples)]
        pieces = [
            (recording_idx, begin, end)
            for recording_idx, recording in enumerate(recordings)
            for begin, end in split_at_pauses(recording, rate, self.max_segment_seconds)
        ]
        batches = like_length_batches([end - begin for _, begin, end in pieces], int(self.batch_seconds * rate))
        samples = ([recordings[pieces[i][0]][pieces[i][1] : pieces[i][2]] for i in batch] for batch in batches)
        found: dict[int, RecognitionResult] = {}
        first_pass = self._prepared_first_pass()
        with self._engines.lend(self._new_engines) as engines:
            search = partial(self._searched, first_pass, engines)
            batch_results = pipelined(samples, self._scored, search, self.num_workers, self.device)
            for batch, results in zip(batches, batch_results, strict=True):
                found.update(zip(batch, results, strict=True))
        recognized = []
        for recording_idx in range(len(recordings)):
            own = [i for i, piece in enumerate(pieces) if piece[0] == recording_idx]
            recognized.append(joined([found[i] for i in own], [pieces[i][1] / rate for i in own]))
        return recognized

    def log_prob(self, samples: Sequence[Tensor], times: StageTimes) -> tuple[Tensor, Tensor]:
        """Pieces of audio to token log-probabilities (N, T, C) and num_frames (N,); adds to the times."""
        device = self.device
        num_samples = to_device(torch.tensor([len(row) for row in samples]), device)
        with times.measure("features", device):
            padded = to_device(nn.utils.rnn.pad_sequence(list(samples), batch_first=True), device)
            features, num_frames = self.features(padded, num_samples)
        with times.measure("acoustic model", device):
            if int(num_frames.max()) == 0:
                return features.new_zeros(len(samples), 0, len(self.bundle.graph.tokens)), num_frames
            log_prob, num_frames = self.acoustic_model(features, num_frames)
        return log_prob, num_frames

    def _scored(self, samples: list[Tensor]) -> _Scored:
        """The first stage of a batch: features and acoustic model."""
        times = StageTimes()
        lengths = [len(row) / self.sampling_rate for row in samples]
        return _Scored(*self.log_prob(samples, times), lengths, times)

    def _searched(
        self, first_pass: Decoder, engines: _Engines, worker: int, scored: _Scored
    ) -> list[RecognitionResult]:
        """The second stage of a batch: first pass and language model."""
        log_prob, num_frames, lengths, times = scored
        models = engines[worker]
        before = dict(models.engine.statistics().as_dict()) if models.engine is not None else {}
        with times.measure("search", self.device):
            decoded = first_pass.decode(log_prob, num_frames, models.model)
        if models.model is not None:
            # No history is held from one batch to the next.
            mark_live(models.model, num_frames.new_empty(0, dtype=torch.int64))
        cache: dict[str, int | float] = {}
        if models.engine is not None:
            after = models.engine.statistics()
            cache = after.as_dict()
            lm_seconds = after.seconds_total - before["seconds_total"]
            times.stages["language model"] = lm_seconds
            times.stages["search"] -= lm_seconds
        samples_per_frame: Any = self.features.frame_shift * self.acoustic_model.subsampling_factor  # type: ignore[operator]
        step = float(samples_per_frame) / self.sampling_rate
        results = []
        for result, length in zip(decoded, lengths, strict=True):
            share = times.scaled(length / sum(lengths))
            share.audio_seconds = length
            results.append(as_result(result, step, share, self.options, self.aligner, cache))
        return results

    def prepare(self) -> None:
        """Builds what the first recording would wait for: first pass, and a language model a worker.

        Raises:
            AsrError: the first pass cannot run here, or the budget of device memory is too small.
        """
        self._prepared_first_pass()
        self._engines.fill(self._new_engines)

    def _prepared_first_pass(self) -> Decoder:
        with self._engines.lock:
            if self._first_pass is None:
                graph = self.bundle.graph.to(self.device)
                self._first_pass = build_first_pass(self.first_pass_name, graph, self.options, self.keep_lattices)
            return self._first_pass

    def _new_engines(self) -> _Engines:
        """A language model for each worker, one at least."""
        num_models = max(1, self.num_workers)
        settings = (self.mode, self.rnn_weight, self.device, self.lm_device_bytes, self.cache_bytes // num_models)
        return [language_models(self.bundle, *settings) for _ in range(num_models)]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and other processes: they build first pass and caches of their own."""
        return {**self.__dict__, "_first_pass": None, "_engines": EnginePool()}

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> _Self:
        """Follows `.to(device)`: graph and caches are built again where the weights are."""
        self._first_pass = None
        self._engines = EnginePool()
        super()._apply(fn, *args, **kwargs)
        return self
