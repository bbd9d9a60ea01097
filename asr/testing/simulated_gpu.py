"""A simulated GPU: tensors that are in this process's memory and report to be on a GPU.

What torch rejects on a real GPU is rejected here: tensors of two devices in one operation, a device's tensor as a NumPy
array, waiting for values while a CUDA graph is captured. Ties that a GPU would decide by chance are rejected, too. Each
wait of the host for the device is counted. Operations run torch's CPU code, and kernels run in Triton's interpreter, so
that results are the CPU's: a GPU's own arithmetic, and races between programs or streams, are not simulated. There are
no gradients, since torch's autograd needs a real device.

Streams do their work at once as well, but `asr.testing.simulated_streams` tracks what a real stream might still have to
do when memory is freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from asr.testing.simulated_streams import SimulatedStream, StreamModel

_DEVICE, _CPU = torch.device("cuda", 0), torch.device("cpu")
# In torch's own order of device types.
_CUDA, _META, _NUM_TYPES = 1, 14, 20

# The host needs the results of these operations before it can continue.
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
# Operations that choose whether to use a GPU's own implementation.
_CHOICES = {"_fused_sdp_choice", "_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"}
# Operations that accept tensors of both devices; torch.ctc_loss itself fetches the lengths.
_MIXES = {"copy_", "_to_copy", "_ctc_loss"}
_INDEXING = {"index", "index_put", "index_put_"}


def _refused(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    raise AssertionError(f"{func} was called outside of the simulated device")


class DeviceTensor(Tensor):
    """A tensor on the simulated device; `held` is the CPU tensor with its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, layout=held.layout, device=_DEVICE
        )
        made.held = held
        return made

    __torch_dispatch__: Any = classmethod(_refused)

    def tolist(self) -> Any:
        """torch does not support this for tensor subclasses."""
        return self.cpu().tolist()


class SimulatedGraph:
    """Replaces `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], object]] = []
        self.replayed: Callable[[], None] | None = None

    def replay(self) -> None:
        """Runs what was captured again, on the same memory."""
        if self.replayed is not None:
            self.replayed()
        for launch in self.launches:
            launch()


class _Capture(threading.local):
    """The graph that a thread captures, and the memory that it uses."""

    def __init__(self) -> None:
        self.graph: SimulatedGraph | None = None
        self.used: list[Tensor] = []


class SimulatedDevice:
    """Records what happens on the device.

    Args:
        num_streams: size of the pool from which `torch.cuda.Stream` takes streams in turn.

    Attributes:
        waits: how often the host waited for the device, by operation.
        operations: torch operations that a device would run, by name; views and allocations do not count.
        kernels: launches of Triton's kernels, by name, and of captured graphs, as `graph`.
        streams: the streams, and the memory that they share.
    """

    def __init__(self, num_streams: int = 32) -> None:
        self.waits: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.streams = StreamModel(num_streams)
        self._capture = _Capture()

    @property
    def graph(self) -> SimulatedGraph | None:
        """The graph that this thread captures; other threads are not affected (`capture_error_mode="thread_local"`)."""
        return self._capture.graph

    def clear_counts(self) -> None:
        """Resets all counts."""
        for counts in (self.waits, self.operations, self.kernels):
            counts.clear()

    @property
    def num_launches(self) -> int:
        """Number of operations and kernels together."""
        return self.operations.total() + self.kernels.total()

    def wait(self, name: str) -> None:
        """Counts a wait of the host for the device.

        Raises:
            RuntimeError: a graph is being captured.
        """
        if self.graph is not None:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        self.waits[name] += 1

    @contextlib.contextmanager
    def capture(self, graph: SimulatedGraph, stream: SimulatedStream | None = None, **_: Any) -> Iterator[None]:
        """Replaces `torch.cuda.graph`."""
        used: list[Tensor] = []
        graph.replayed = lambda: self._replayed(used)
        self._capture.used, self._capture.graph = used, graph
        try:
            with contextlib.nullcontext() if stream is None else self.streams.capturing(stream):
                yield
        finally:
            self._capture.graph = None

    def _replayed(self, used: list[Tensor]) -> None:
        self.kernels["graph"] += 1
        self.streams.work(used, ())

    def work(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        counts: Counter[str],
        changed: Sequence[Tensor] = (),
    ) -> None:
        """Records queued work: the tensors that it reads or writes, those that it created and those that it changed."""
        inputs, outputs, changed = (
            [one for one in some if isinstance(one, DeviceTensor)] for some in (inputs, outputs, changed)
        )
        if self.graph is not None:
            self._capture.used += [one.held for one in (*inputs, *outputs)]
            return
        counts[name] += 1
        self.streams.work(
            [one.held for one in inputs], [(one, one.held) for one in outputs], [one.held for one in changed]
        )

    def launch(self, run: Callable[[], object]) -> None:
        """Runs work that changes memory of the device; while a graph is captured, only records it for replays."""
        if self.graph is None:
            run()
        else:
            self.graph.launches.append(run)


class _Operations(TorchDispatchMode):
    """Runs operations that use or create the device's tensors on the CPU tensors in them; each thread needs one."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        name = func.overloadpacket.__name__
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        on_device = [one for one in tensors if isinstance(one, DeviceTensor)]
        wanted = kwargs.get("device")
        if wanted is not None:
            # torch has replaced "cuda" without a number by the guard's device, see `simulated_gpu`.
            to_device = torch.device(wanted).type in ("cuda", "meta")
        else:
            to_device = isinstance(args[0], DeviceTensor) if name == "copy_" else bool(on_device)
        if name == "_pin_memory":
            # A tensor of its own, which tells it from one that is not pinned.
            pinned = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        if name in _CHOICES:
            return 0
        if not on_device and not to_device:
            return func(*args, **kwargs)
        if name not in _MIXES:
            self._check(func, name, args, tensors)
        if name == "index_copy_":
            _check_ties(*args[1:])
        waits = "copy to host" if not to_device else name if name in _WAITS else self._choice(name, args, tensors)
        if waits is None and _copies_and_waits(name, args, kwargs):
            waits = "copy to device"
        if waits is not None:
            self._device.wait(waits)
        result = self._run(func, name, tensors, args, kwargs, to_device)
        results = tree_flatten(result)[0]
        if _is_work(func, name):
            changed = results if func._schema.is_mutable else ()
            self._device.work(name, tensors, results, self._device.operations, changed)
        elif self._device.graph is None:
            self._device.streams.made(*((one, one.held) for one in results if isinstance(one, DeviceTensor)))
        if waits is not None:
            self._device.streams.current().synchronize()
        return result

    def _run(self, func: Any, name: str, tensors: list[Tensor], args: Any, kwargs: Any, to_device: bool) -> Any:
        own = {key: _CPU if key == "device" and value is not None else value for key, value in kwargs.items()}
        held_args, held_kwargs = tree_map_only(DeviceTensor, lambda one: one.held, (args, own))
        known = {id(one.held) if isinstance(one, DeviceTensor) else id(one): one for one in tensors}
        work = _fused_gru_cell if name == "_thnn_fused_gru_cell" else func
        if func._schema.is_mutable and self._device.graph is not None:
            self._device.launch(lambda: work(*held_args, **held_kwargs))
            return args[0]
        result = work(*held_args, **held_kwargs)
        if self._device.graph is not None and name.startswith(("empty", "new_empty")):
            # What is captured is computed once here, and may read places from memory that is not yet written.
            result.zero_()  # type: ignore[union-attr]
        if self._device.graph is not None and not any(one.alias_info for one in func._schema.returns):
            outputs = [one for one in tree_flatten(result)[0] if isinstance(one, Tensor)]

            def again() -> None:
                anew = [one for one in tree_flatten(work(*held_args, **held_kwargs))[0] if isinstance(one, Tensor)]
                for old, new in zip(outputs, anew, strict=True):
                    old.copy_(new)

            self._device.launch(again)

        def placed(one: Tensor) -> Tensor:
            if id(one) in known:
                return known[id(one)]
            return DeviceTensor(one) if to_device else one

        return tree_map_only(Tensor, placed, result)

    def _check(self, func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
        hosts = [one for one in tensors if not isinstance(one, DeviceTensor) and one.dim()]
        chooses = name in _INDEXING and isinstance(args[0], DeviceTensor)
        if hosts and not chooses:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found cuda:0 and cpu")

    @staticmethod
    def _choice(name: str, args: Any, tensors: list[Tensor]) -> str | None:
        """The name of an operation that waits: indexing with a mask, or with an index on the host; else None."""
        if name not in _INDEXING or not isinstance(args[0], DeviceTensor):
            return None
        hosts = any(not isinstance(one, DeviceTensor) and one.dim() for one in tensors)
        return name if hosts or any(one.dtype is torch.bool for one in tensors[1:]) else None


def _copies_and_waits(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation copies a tensor of the host to the device and waits: it is not pinned, or is to be waited
    for. A number that is assigned to one element, or to those of an index, is such a tensor."""
    if name in ("index_put", "index_put_"):
        return not isinstance(args[2], DeviceTensor)
    if name not in ("copy_", "_to_copy"):
        return False
    source = args[1] if name == "copy_" else args[0]
    if isinstance(source, DeviceTensor):
        return False
    is_queued = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
    return not (is_queued and getattr(source, "is_pinned_here", False))


def _check_ties(dim: int, index: Any, source: Any) -> None:
    """If a position occurs several times, a GPU decides by chance which of the sources is kept.

    Raises:
        RuntimeError: the sources of a position differ.
    """
    held, rows = index.held, source.held.movedim(dim, 0)
    order = held.argsort(stable=True)
    same = held[order][1:] == held[order][:-1]
    if not torch.equal(rows[order][1:][same], rows[order][:-1][same]):
        raise RuntimeError("index_copy_: a position occurs twice with different sources; a GPU may keep either of them")


def _is_work(func: Any, name: str) -> bool:
    """Whether an operation is work for a device: views and allocations are not."""
    is_view = not func._schema.is_mutable and any(one.alias_info for one in func._schema.returns)
    return not is_view and not name.startswith(("empty", "new_empty", "_reshape_alias", "lift_fresh", "detach"))


def _fused_gru_cell(
    inputs: Tensor, hidden: Tensor, state: Tensor, input_bias: Tensor, hidden_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """An operation that only GPUs have; the second result is for gradients."""
    from_input, from_state = (inputs + input_bias).chunk(3, 1), (hidden + hidden_bias).chunk(3, 1)
    reset, update = ((from_input[gate] + from_state[gate]).sigmoid() for gate in (0, 1))
    new = (from_input[2] + reset * from_state[2]).tanh()
    return new + update * (state - new), state


@contextlib.contextmanager
def simulated_gpu(num_streams: int = 32) -> Iterator[SimulatedDevice]:
    """Within the block, `cuda` is a simulated device, also in all threads that are started.

    Args:
        num_streams: see `SimulatedDevice`.
    """
    device = SimulatedDevice(num_streams)
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _NUM_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    run_thread = threading.Thread.run

    def run_in_thread(thread: threading.Thread) -> None:
        with _operations(device):
            run_thread(thread)

    def nothing(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    streams = device.streams
    of_cuda: dict[str, Any] = dict.fromkeys(["device_of", "_lazy_init"], nothing)
    of_cuda |= {"Stream": streams.new_stream, "current_stream": streams.current, "stream": streams.running}
    of_cuda |= {"synchronize": streams.see_all, "is_available": lambda: True, "device_count": lambda: 1}
    of_cuda |= {"get_device_name": lambda *_: "simulated", "CUDAGraph": SimulatedGraph, "graph": device.capture}
    with contextlib.ExitStack() as stack:
        # torch calls a guard for the device's type before many operations; the guard for `meta` does nothing.
        stack.callback(guards.__setitem__, _CUDA, guards[_CUDA])
        guards[_CUDA] = guards[_META]
        # Moved parameters must become new objects: the old ones cannot hold a `DeviceTensor`.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        for name, instead in of_cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, instead))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_in_thread))
        _interpret_kernels(stack, device)
        stack.enter_context(_operations(device))
        yield device


@contextlib.contextmanager
def _operations(device: SimulatedDevice) -> Iterator[None]:
    """Sets up a thread: sends its operations to the simulated device."""
    # Tensors made by torch.tensor must reach the device by an operation that is dispatched.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Operations(device):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def _interpret_kernels(stack: contextlib.ExitStack, device: SimulatedDevice) -> None:
    """Lets Triton's interpreter, if installed, read and write the CPU tensors behind the device's tensors."""
    try:
        from torch.utils._python_dispatch import _disable_current_modes  # torch 2
        from triton.runtime import interpreter
        from triton.runtime.interpreter import FunctionRewriter, GridExecutor
    except ImportError:
        return
    run_grid, rewrite, replace = GridExecutor.__call__, FunctionRewriter.rewrite_ast, interpreter._patch_lang
    # The interpreter has one state for all threads: the place in the grid, and which of Triton's functions it replaced.
    interprets, replaced = threading.RLock(), set[frozenset[str]]()
    builder, kept = interpreter.interpreter_builder, SimpleNamespace(restore=lambda: None)

    @functools.cache
    def language_of(function: Any) -> frozenset[str]:
        named = [each.__name__ for each in function.__globals__.values() if isinstance(each, ModuleType)]
        return frozenset(name for name in named if name.startswith("triton.language"))

    def replace_once(function: Any) -> Any:
        # The interpreter replaces Triton's functions by its own for each launch and each call of a function, and puts
        # them back after the launch. That takes a third of its time.
        if language_of(function) not in replaced:
            replaced.add(language_of(function))
            stack.callback(replace(function).restore)
        return kept

    def rewrite_alone(rewriter: Any) -> Any:
        # Python 3.11 counts the depth of all threads' syntax trees together: two at once may raise a SystemError.
        with interprets:
            return rewrite(rewriter)

    def interpret(kernel: Any, *args: Any, **kwargs: Any) -> None:
        # The interpreter's own use of torch is not work of the device.
        with interprets, _disable_current_modes():
            run_grid(kernel, *args, **kwargs)

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        hosts = [
            one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and not isinstance(one, DeviceTensor)
        ]
        if hosts:
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        held_args, held_kwargs = tree_map_only(DeviceTensor, lambda one: one.held, (args, kwargs))
        device.launch(lambda: interpret(kernel, *held_args, **held_kwargs))
        device.work(kernel.fn.__name__, [*args, *kwargs.values()], (), device.kernels)

    stack.enter_context(mock.patch.object(FunctionRewriter, "rewrite_ast", rewrite_alone))
    stack.enter_context(mock.patch.object(interpreter, "_patch_lang", replace_once))
    # Kernels alone are tested for overflows, which takes a fifth of the time.
    unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
    stack.enter_context(mock.patch.object(builder, "options", unchecked))
    stack.enter_context(mock.patch.object(GridExecutor, "__call__", launch))
    # Arguments are already in the host's memory; the interpreter would copy each of them onto itself.
    stack.enter_context(mock.patch.object(GridExecutor, "_restore_args_dev", lambda *_: None, create=True))
