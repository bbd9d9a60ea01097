"""A GPU that is not there: tensors that live in this process's memory and say that they are on one.

What torch refuses on a real GPU is refused here: tensors of two devices in one operation, a device's tensor as a numpy
array, waiting for values while a CUDA graph is captured. So are ties that a GPU would decide by chance. Each time the
host waits for the device is counted. Operations are torch's CPU code and kernels run in Triton's interpreter, so that
results are the CPU's: what a GPU's own arithmetic makes of it, and races between programs or streams, are not seen.
There are no gradients: torch's autograd asks for a real device.

Streams do their work at once, too, but `asr.testing.simulated_streams` follows what a real one might still have to do
when memory is freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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

# The host has to know what these find before it can go on.
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
# Whether a GPU's own implementation is to be taken.
_CHOICES = {"_fused_sdp_choice", "_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"}
# May be given tensors of both; torch.ctc_loss itself fetches the lengths.
_MIXES = {"copy_", "_to_copy", "_ctc_loss"}
_INDEXING = {"index", "index_put", "index_put_"}


def _refused(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    raise AssertionError(f"{func} where the simulated device is not")


class DeviceTensor(Tensor):
    """A tensor on the simulated device; `held` has its values, on the CPU."""

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
        """torch would not do it for a class of ours."""
        return self.cpu().tolist()


class SimulatedGraph:
    """In the place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], object]] = []
        self.replayed: Callable[[], None] | None = None

    def replay(self) -> None:
        """Does again what was captured, on the same memory."""
        if self.replayed is not None:
            self.replayed()
        for launch in self.launches:
            launch()


class _Capture(threading.local):
    """What one thread captures, and the memory that this uses."""

    def __init__(self) -> None:
        self.graph: SimulatedGraph | None = None
        self.used: list[Tensor] = []


class SimulatedDevice:
    """What happens on the device.

    Args:
        num_streams: how many streams `torch.cuda.Stream` takes turns with.

    Attributes:
        waits: how often the host waited for it, by operation.
        operations: torch operations that a device would run, by name; views and fresh memory are none.
        kernels: launches of Triton's kernels, by name, and of captured graphs, `graph`.
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
        """What this thread is capturing; the work of others goes on meanwhile (`capture_error_mode="thread_local"`)."""
        return self._capture.graph

    def clear_counts(self) -> None:
        """Starts counting anew."""
        for counts in (self.waits, self.operations, self.kernels):
            counts.clear()

    @property
    def num_launches(self) -> int:
        """Operations and kernels together."""
        return self.operations.total() + self.kernels.total()

    def wait(self, name: str) -> None:
        """Counts one.

        Raises:
            RuntimeError: a graph is being captured.
        """
        if self.graph is not None:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        self.waits[name] += 1

    @contextlib.contextmanager
    def capture(self, graph: SimulatedGraph, stream: SimulatedStream | None = None, **_: Any) -> Iterator[None]:
        """In the place of `torch.cuda.graph`."""
        used: list[Tensor] = []
        graph.replayed = lambda: self._replayed(used)
        self._capture.used, self._capture.graph = used, graph
        try:
            with contextlib.nullcontext() if stream is None else self.streams.running(stream):
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
        """Notes what was queued: what it reads or writes, the memory that it has made, and what it has changed."""
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
        """Runs what changes memory of the device, or keeps it for a replay."""
        if self.graph is None:
            run()
        else:
            self.graph.launches.append(run)


class _Operations(TorchDispatchMode):
    """Sends operations on the device's tensors, and those that make them, to what they hold; each thread needs one."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        on_device = [one for one in tensors if isinstance(one, DeviceTensor)]
        wanted = kwargs.get("device")
        if wanted is not None:
            # "cuda" without a number has been made the guard's device, see `simulated_gpu`.
            to_device = torch.device(wanted).type in ("cuda", "meta")
        else:
            to_device = isinstance(args[0], DeviceTensor) if name == "copy_" else bool(on_device)
        if name == "_pin_memory":
            return args[0]
        if name in _CHOICES:
            return 0
        if not on_device and not to_device:
            return func(*args, **kwargs)
        if name not in _MIXES:
            self._check(func, name, args, tensors)
        if name == "index_copy_":
            _check_ties(*args[1:])
        waits = "copy to host" if not to_device else name if name in _WAITS else self._choice(name, args, tensors)
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
        """Indexing waits where a mask, or an index on the host, says what is chosen."""
        if name not in _INDEXING or not isinstance(args[0], DeviceTensor):
            return None
        hosts = any(not isinstance(one, DeviceTensor) and one.dim() for one in tensors)
        return name if hosts or any(one.dtype is torch.bool for one in tensors[1:]) else None


def _check_ties(dim: int, index: Any, source: Any) -> None:
    """Where a position occurs several times, a GPU decides by chance which of the sources stays there.

    Raises:
        RuntimeError: they are not the same.
    """
    held, rows = index.held, source.held.movedim(dim, 0)
    order = held.argsort(stable=True)
    same = held[order][1:] == held[order][:-1]
    if not torch.equal(rows[order][1:][same], rows[order][:-1][same]):
        raise RuntimeError("index_copy_: a position occurs twice with different sources, and a GPU takes any of them")


def _is_work(func: Any, name: str) -> bool:
    """Whether a device has to do something: views and fresh memory come at once."""
    is_view = not func._schema.is_mutable and any(one.alias_info for one in func._schema.returns)
    return not is_view and not name.startswith(("empty", "new_empty", "_reshape_alias", "lift_fresh", "detach"))


def _fused_gru_cell(
    inputs: Tensor, hidden: Tensor, state: Tensor, input_bias: Tensor, hidden_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """What only a GPU has; the second result is for gradients."""
    from_input, from_state = (inputs + input_bias).chunk(3, 1), (hidden + hidden_bias).chunk(3, 1)
    reset, update = ((from_input[gate] + from_state[gate]).sigmoid() for gate in (0, 1))
    new = (from_input[2] + reset * from_state[2]).tanh()
    return new + update * (state - new), state


@contextlib.contextmanager
def simulated_gpu(num_streams: int = 32) -> Iterator[SimulatedDevice]:
    """While this lasts, `cuda` is a simulated device, in all threads that are started.

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
        # torch asks a guard for the device's type before many an operation; that for `meta` does nothing.
        stack.callback(guards.__setitem__, _CUDA, guards[_CUDA])
        guards[_CUDA] = guards[_META]
        # A module's parameters are to become new objects: put into the old ones they would lose what they hold.
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
    """What a thread needs."""
    # What torch.tensor makes is to reach the device by an operation that can be seen.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Operations(device):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def _interpret_kernels(stack: contextlib.ExitStack, device: SimulatedDevice) -> None:
    """Lets Triton's interpreter read and write what the device's tensors hold, where Triton is installed."""
    try:
        from torch.utils._python_dispatch import _disable_current_modes  # torch 2
        from triton.runtime.interpreter import FunctionRewriter, GridExecutor
    except ImportError:
        return
    run_grid, rewrite = GridExecutor.__call__, FunctionRewriter.rewrite_ast
    # While it runs a kernel, the interpreter puts its own functions in the place of Triton's, for all threads.
    interprets = threading.RLock()

    def rewrite_alone(rewriter: Any) -> Any:
        # Python 3.11 counts the depth of all threads' syntax trees together: two at once may be a SystemError.
        with interprets:
            return rewrite(rewriter)

    def interpret(kernel: Any, *args: Any, **kwargs: Any) -> None:
        # What the interpreter does with torch is not the device's work.
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
    stack.enter_context(mock.patch.object(GridExecutor, "__call__", launch))
    # Arguments are in the host's memory; the interpreter would copy each of them to where it already is.
    stack.enter_context(mock.patch.object(GridExecutor, "_restore_args_dev", lambda *_: None, create=True))
