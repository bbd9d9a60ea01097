"""Checks of the host's code around the kernels, and broken versions of it that they must notice.

Such errors appear only now and then, on a GPU or with several threads: memory that passes between streams, ties decided
by chance, state left behind by a failure. `kernel_checks.py` does the same for kernels.

`stream_hazards` runs a recognizer on a simulated GPU. In each call, the acoustic model runs in one stream, and each
worker's language model, whose arrays grow, in another.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.ctc.language_models import LentModels
from asr.decoding import k2
from asr.decoding.backend import SearchGraph
from asr.decoding.build import default_decoder
from asr.decoding.gpu import kernels
from asr.decoding.gpu.cuda_graph import BufferSizes, FrameBuffers, FrameReplay, new_capture_stream
from asr.decoding.gpu.frame import FrameLimits
from asr.decoding.settings import DecodingOptions, ResourceOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.kernels.hash_table import HashTable
from asr.pipeline import EnginePool, StreamPool, pipelined
from asr.recognizer import Recognizer
from asr.testing.simulated_gpu import simulated_gpu
from scripts.benchmarks.kernel_checks import Difference

_NUM_BATCHES, _NUM_QUERIES = 6, 64


def stream_hazards(bundle: Bundle, num_calls: int, has_kernels: bool = True) -> tuple[int, int]:
    """Runs calls of a recognizer with two workers whose language models are queried for new histories in each call.

    Args:
        bundle: a bundle with a recurrent language model.
        num_calls: number of calls, each of six batches.
        has_kernels: whether histories are looked up by Triton's kernels; otherwise by tensor operations.

    Returns:
        The number of memory blocks freed while another stream might still use them, and the number of uses of a block
        while another stream might still write to it.
    """
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(simulated_gpu(num_streams=4))
        stack.enter_context(torch.no_grad())
        if not has_kernels:
            stack.enter_context(mock.patch("asr.kernels.jit.triton_available", lambda device: False))
        resources = ResourceOptions(num_workers=2)
        own = copy.deepcopy(bundle)  # its networks are moved to the device
        recognizer = Recognizer(own, "rnn", decoder="token-passing", lm_fusion="search", resources=resources)
        recognizer.to("cuda")
        for weight in recognizer.parameters():
            weight.mul_(1.0)  # as a step of training does, for which the host does not wait, unlike the copy
        for call in range(num_calls):
            _ask(recognizer, call)
        return device.streams.hazards.total(), device.streams.races.total()


def _ask(recognizer: Recognizer, call: int) -> None:
    """A call like those of `Recognizer.forward`, with words in place of samples, and queries in place of the search."""
    with recognizer._engines.lend(recognizer._new_engines) as engines:
        generator, num_words = torch.Generator().manual_seed(call), len(recognizer.bundle.graph.vocabulary)

        def first(length: int) -> Tensor:
            word_id = torch.randint(4, num_words, (length, _NUM_QUERIES), generator=generator)
            return word_id.to(recognizer.device) + 0

        def second(worker: int, word_ids: Tensor) -> Tensor:
            lm = engines.models[worker].model
            assert lm is not None
            context_idx = lm.start(_NUM_QUERIES)
            for word_id in word_ids:
                log_prob, context_idx = lm.score(context_idx, word_id)
            engines.models[worker].forget_contexts()
            return log_prob + 0.0

        lengths = [3 + call + batch % 2 for batch in range(_NUM_BATCHES)]
        for log_prob in pipelined(lengths, first, second, recognizer.resources.num_workers, engines.streams):
            log_prob.tolist()


def check_streams(bundle: Bundle) -> None:
    """Workers do not free memory too early, and wait for the memory that they use."""
    num_hazards, num_races = stream_hazards(bundle, 1, has_kernels=False)
    if num_hazards or num_races:
        raise Difference(f"{num_hazards} blocks were freed and {num_races} used too early")


def check_failed_capture(bundle: Bundle) -> None:
    """A frame that cannot be captured leaves clean tables and a warning, whatever the type of the error."""

    class Failing:
        """Replaces a kernel: leaves dirty tables when it is launched, and cannot be captured."""

        was_launched = False

        def __getitem__(self, grid: Any) -> Failing:
            return self

        def __call__(self, *_: Any, **__: Any) -> None:
            if self.was_launched:
                raise OSError("no driver")
            self.was_launched = True
            owner[0] = 5
            histogram[0, 0, 3] = 7

    with simulated_gpu():
        cuda, options = torch.device("cuda", 0), DecodingOptions()
        graph = SearchGraph(bundle.graph.to(cuda), options)
        sizes = BufferSizes(streams=1, frames=2, columns=4, paths=64, ended=64, arcs=64, records=64, losing=64)
        buffers = FrameBuffers(graph.emitting, FrameLimits(options, False, cuda, block=64), sizes, False)
        buffers.counts += 1
        owner, histogram = buffers._recombined._owner, buffers._recombined._cut_off._histogram
        with mock.patch.object(kernels, "clear", Failing()), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            FrameReplay(buffers, new_capture_stream(buffers.counts.device))
        if not any("no driver" in str(one.message) for one in caught):
            raise Difference("there is no warning about the failure")
        if set(owner.tolist()) != {kernels.EMPTY.value} or bool(buffers.counts.any()) or bool(histogram.any()):
            raise Difference("tables are dirty after a failure")


def check_backends_are_lent_once(bundle: Bundle) -> None:
    """Searches in two threads never share a backend, wherever one thread interrupts the other."""
    made: Any = lambda *_: object()  # noqa: E731
    decoder = TokenPassingDecoder(bundle.graph, backend=made)

    def take() -> Any:
        return decoder._take_backend(None, False)

    def given_back() -> None:
        decoder._idle_of(None, False).append(made())

    _check_lent_once(given_back, take, TokenPassingDecoder._take_backend.__code__)


def check_language_models_are_lent_once(bundle: Bundle) -> None:
    """CTC decoders in two threads never share a language model."""
    models = LentModels(mock.Mock, is_shared=False)
    with contextlib.ExitStack() as held:
        _check_lent_once(
            lambda: models._idle.append(mock.Mock()),
            lambda: held.enter_context(models.lent()),
            inspect.unwrap(LentModels.lent).__code__,
        )


def _check_lent_once(give_back: Callable[[], None], take: Callable[[], Any], code: CodeType) -> None:
    for at in itertools.count():
        give_back()
        first, others = _interrupted(take, code, at)
        if not others:
            return
        if first is others[0]:
            raise Difference("two threads have taken the same object")


def _interrupted(take: Callable[[], Any], code: CodeType, at: int) -> tuple[Any, list[Any]]:
    """Calls `take`, and again before instruction number `at` of a function that it calls, if it runs that far."""
    number, before = itertools.count(), sys.gettrace()
    others: list[Any] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not code or others:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(number) == at:
            others.append(take())
        return trace

    sys.settrace(trace)
    try:
        return take(), others
    finally:
        sys.settrace(before)


def check_default_decoder(bundle: Bundle) -> None:
    """A k2 that can be imported but cannot intersect is not the default."""
    with mock.patch.dict(sys.modules, {"k2": ModuleType("k2")}):
        if default_decoder(torch.device("cuda")) != "token-passing":
            raise Difference("k2 is the default though it cannot intersect")


@dataclass(frozen=True)
class HostMutant:
    """A function with some text of its source replaced.

    Args:
        name: the fault.
        function: name of the function, in the class or module `owner`.
        text, instead: the text to replace, which must occur, and its replacement.
        check: the check that must notice the fault.
        error: the error that the check then raises.
    """

    name: str
    owner: Any
    function: str
    text: str
    instead: str
    check: Callable[[Bundle], None]
    error: type[Exception] = Difference

    def is_caught(self, bundle: Bundle) -> bool:
        """Whether the check notices the fault."""
        with self._broken():
            try:
                self.check(bundle)
            except self.error:
                return True
        return False

    @contextlib.contextmanager
    def _broken(self) -> Iterator[None]:
        function = inspect.unwrap(getattr(self.owner, self.function))
        source = textwrap.dedent(inspect.getsource(function))
        if self.text not in source:
            raise ValueError(f"the mutant {self.name!r} changes what {self.function} does not have")
        names = dict(function.__globals__)
        code = compile(
            f"from __future__ import annotations\n{source.replace(self.text, self.instead)}", __file__, "exec"
        )
        exec(code, names)
        with mock.patch.object(self.owner, self.function, names[self.function]):
            yield


_IDLE = "self._idle_of(lm, keep_lattice)"
HOST_MUTANTS = (
    HostMutant(
        "language models are made outside their workers' streams",
        Recognizer,
        "_new_engines",
        "with streams.running(worker):",
        "if True:",
        check_streams,
    ),
    HostMutant(
        "streams are created again for each call",
        EnginePool,
        "lend",
        "yield engines\n",
        "yield engines._replace(streams=StreamPool(len(engines.models) + 1, torch.device('cuda')))\n",
        check_streams,
    ),
    HostMutant(
        "a worker does not wait for the acoustic model",
        StreamPool,
        "running",
        "self._streams[thread].wait_event(after)",
        "pass",
        check_streams,
    ),
    HostMutant(
        "streams do not wait for changes of weights",
        StreamPool,
        "catch_up",
        "stream.wait_stream(torch.cuda.current_stream(self._device))",
        "pass",
        check_streams,
    ),
    HostMutant(
        "results are handed out before they are there",
        StreamPool,
        "wait",
        "self._streams[thread].synchronize()",
        "pass",
        check_streams,
    ),
    HostMutant(
        "each query of a new history adds it, and chance decides which one stays",
        HashTable,
        "insert",
        "    return slot, one\n",
        "    return slot, torch.arange(len(key), device=key.device)\n",
        check_streams,
        RuntimeError,
    ),
    HostMutant(
        "a capture may fail with a RuntimeError only",
        FrameReplay,
        "_captured",
        "except Exception as",
        "except RuntimeError as",
        check_failed_capture,
        OSError,
    ),
    HostMutant(
        "tables stay dirty after a failure",
        FrameReplay,
        "_captured",
        "self._buffers.clear()",
        "pass",
        check_failed_capture,
    ),
    HostMutant(
        "an idle backend is looked for, and then taken",
        TokenPassingDecoder,
        "_take_backend",
        f"try:\n        return {_IDLE}.pop()\n    except IndexError:  # all are in use\n",
        f"if {_IDLE}:\n        return {_IDLE}.pop()\n    else:\n",
        check_backends_are_lent_once,
        IndexError,
    ),
    HostMutant(
        "an idle language model is looked for, and then taken",
        LentModels,
        "lent",
        "    try:\n        model = self._idle.pop()\n    except IndexError:",
        "    if self._idle:\n        model = self._idle.pop()\n    else:",
        check_language_models_are_lent_once,
        IndexError,
    ),
    HostMutant(
        "k2 is the default if it imports",
        k2,
        "k2_works",
        "    k2 = import_k2()\n",
        "    return import_k2() is not None\n",
        check_default_decoder,
    ),
)
