"""Linear layers with constant weights, which are packed once for a CPU instead of in every call.

For many rows the weights are kept in the form that oneDNN's kernels read. Given plain weights, torch packs them again
in each call, or passes them to MKL, which does not use most vector instructions of other makers' processors.

The product of a few rows takes as long as reading the weights. `Float16Weights` keeps weights that are exact in
float16, as those of a bundle are, in 16 bits, and widens them when they are loaded into registers. Sums are float32.

Within `byte_products`, inputs and weights are quantized to 8 bits (`asr.kernels.byte_products`).

`ChannelsLastConv2d` convolves in the layout for which oneDNN is fastest.

Shapes: Q rows, I inputs, O outputs, P tiles of W outputs, P W at least O; of a convolution, N images of T times F
numbers with C channels in, and T' times F' with C' channels out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr.kernels.byte_products import Int8Convolution, Int8Weights, has_byte_products
from asr.kernels.jit import has_package, jit_required
from asr.kernels.simd import COLUMNS, ROWS, add_block, tiled

ACOUSTIC_PRECISIONS = {"auto": "8-bit integers where the processor multiplies them fast", "float32": "float32"}
"""`acoustic_precision` of a recognizer -> what it multiplies, see `byte_products`."""


class Float16Weights:
    """inputs (Q, I) -> inputs weight^T + bias (Q, O), on one thread.

    Attributes:
        tables: the weights' tiles and the bias as `fill_products` reads them.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._loop = jit_required(fill_products)
        self._num_outputs = len(weight)
        padded_bias = F.pad(bias, (0, -len(weight) % COLUMNS)).numpy()
        self.tables: tuple[Any, Any] = tiled(weight.half(), COLUMNS).view(torch.int16).numpy(), padded_bias

    def __call__(self, inputs: Tensor, rectifies: bool = False) -> Tensor:
        num_rows = len(inputs)
        outputs = inputs.new_empty(-(-num_rows // ROWS) * ROWS, len(self.tables[1]))
        self._loop(outputs.numpy(), inputs.detach().contiguous().numpy(), *self.tables)
        outputs = outputs[:num_rows, : self._num_outputs]
        return outputs.relu_() if rectifies else outputs


def float16_weights(weight: Tensor, bias: Tensor) -> Float16Weights | None:
    """Weight (O, I) and bias (O,) kept in float16, for float32 products on a CPU.

    None without numba, if a weight is not exact in float16, or if the processor cannot convert float16.
    """
    if not has_package("numba"):
        return None
    from asr.kernels.intrinsics import has_instruction

    if not has_instruction("f16c") or not torch.equal(weight.half().float(), weight):
        return None
    return Float16Weights(weight, bias)


def fill_products(outputs: Any, inputs: Any, tiles: Any, bias: Any) -> None:
    """Fills outputs (Q or more, P W), for `jit`.

    Q is rounded up to a multiple of ROWS; the added rows are undefined. inputs (Q, I), bias (P W,), tiles (P, I, W)
    int16, the bits of float16.
    """
    num_rows, size = inputs.shape
    last = np.zeros((ROWS, size), dtype=np.float32)
    first_of_last = num_rows // ROWS * ROWS
    for row in range(first_of_last, num_rows):
        for j in range(size):
            last[row - first_of_last, j] = inputs[row, j]
    for tile in range(len(tiles)):
        column = tile * COLUMNS
        for begin in range(0, num_rows, ROWS):
            for row in range(begin, begin + ROWS):
                for j in range(column, column + COLUMNS):
                    outputs[row, j] = bias[j]
            left = inputs[begin:] if begin < first_of_last else last
            add_block(outputs[begin:, column:], left, tiles[tile], 0)


class _Choice(threading.local):
    is_on = False


_choice = _Choice()


@contextmanager
def byte_products(is_on: bool = True) -> Iterator[None]:
    """Within the block, this thread's `PackedLinear` layers multiply bytes, if the processor can.

    Layers on a GPU, in types other than float32 or with a gradient do not.
    """
    before = _choice.is_on
    _choice.is_on = is_on and has_byte_products()
    try:
        yield
    finally:
        _choice.is_on = before


def are_bytes_multiplied() -> bool:
    """Whether this thread is within `byte_products`."""
    return _choice.is_on


# inputs (Q, I), and whether negative outputs become 0 -> (Q, O)
_Product = Callable[[Tensor, bool], Tensor]

# Fewer rows are multiplied just as fast with plain weights.
_MIN_PACKED_ROWS = 2

# Up to this many rows the loop is at least as fast as oneDNN; torch 1.13 does not use all of oneDNN.
MAX_LOOP_ROWS = 512 if torch.__version__.startswith("1.") else 16

# From this many rows on, packing the weights in each call is worth it.
_MIN_LINEAR_ROWS = 192

_ValueT = TypeVar("_ValueT")


class KeptWhileUnchanged(Generic[_ValueT]):
    """What was computed from tensors, until one of them changes. A copy keeps nothing: its tensors are others.

    Changes through `tensor.data`, which torch does not count, are not noticed; change tensors under `torch.no_grad`.
    """

    def __init__(self) -> None:
        self._held: tuple[list[tuple[int, int]], _ValueT] | None = None

    def get(self, tensors: Iterable[Tensor], compute: Callable[[], _ValueT]) -> _ValueT:
        """What `compute()` returns, now or earlier with the same tensors; not for inference tensors."""
        version = [(tensor.data_ptr(), tensor._version) for tensor in tensors]
        held = self._held
        if held is None or held[0] != version:
            # A single assignment, since two threads may get here at the same time.
            self._held = held = (version, compute())
        return held[1]

    def __reduce__(self) -> tuple[type[KeptWhileUnchanged[_ValueT]], tuple[()]]:
        return KeptWhileUnchanged, ()


class PackedWeights:
    """inputs W^T + bias; the weights are given in each call and packed again only if they have changed."""

    def __init__(self) -> None:
        self._kept = KeptWhileUnchanged[_Weights]()

    def __call__(self, inputs: Tensor, weight: Tensor, bias: Tensor, rectifies: bool = False) -> Tensor:
        """inputs (Q, I), weight (O, I), bias (O,) -> (Q, O), in any memory order, negative ones as 0 if `rectifies`."""
        # An inference tensor has no version, so a change could not be noticed.
        if weight.is_inference() or (len(inputs) < _MIN_PACKED_ROWS and not are_bytes_multiplied()):
            outputs = torch.addmm(bias, inputs, weight.t())
            return outputs.relu_() if rectifies else outputs
        return self._weights(weight, bias).product_for(len(inputs))(inputs, rectifies)

    def byte_product(self, weight: Tensor, bias: Tensor) -> Int8Weights:
        """The product of bytes; only where `multiplies_bytes`."""
        return self._weights(weight, bias).in_bytes()

    def byte_convolution(
        self, weight: Tensor, bias: Tensor, stride: tuple[int, int], rectifies: bool
    ) -> Int8Convolution:
        """Like `byte_product`, for a convolution; see `Int8Convolution`."""
        return self._weights(weight, bias).convolution(stride, rectifies)

    def small_batch_weights(self, weight: Tensor, bias: Tensor) -> tuple[Any, ...] | None:
        """The tables with which a loop can multiply a few rows itself; None if it cannot.

        They are those of `Int8Weights` where this thread multiplies bytes, and otherwise those of `Float16Weights`.
        """
        if weight.is_inference():
            return None
        product = self._weights(weight, bias).product_for(_MIN_PACKED_ROWS)
        return product.tables if isinstance(product, (Float16Weights, Int8Weights)) else None

    def _weights(self, weight: Tensor, bias: Tensor) -> _Weights:
        return self._kept.get((weight, bias), lambda: _Weights(weight.detach(), bias.detach()))


class _Weights:
    """Weights packed for few rows, for many rows and as bytes, each when first needed."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._plain = weight, bias
        self._may_widen = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._in_bytes: Int8Weights | None = None
        self._convolution: Int8Convolution | None = None
        self._for_few_rows: _Product | None = None
        self._for_many_rows: _Product | None = None

    def in_bytes(self) -> Int8Weights:
        """The product of bytes, for any number of rows."""
        self._in_bytes = self._in_bytes or Int8Weights(*self._plain)
        return self._in_bytes

    def convolution(self, stride: tuple[int, int], rectifies: bool) -> Int8Convolution:
        """The convolution of bytes; the arguments are the same in all calls."""
        self._convolution = self._convolution or Int8Convolution(*self._plain, stride, rectifies)
        return self._convolution

    def product_for(self, num_rows: int) -> _Product:
        """The product for this many rows. oneDNN divides them between threads, the loop for few does not."""
        if are_bytes_multiplied():
            return self.in_bytes()
        if self._may_widen and num_rows <= MAX_LOOP_ROWS and torch.get_num_threads() == 1:
            self._for_few_rows = self._for_few_rows or float16_weights(*self._plain)
            self._may_widen = self._for_few_rows is not None
            if self._for_few_rows is not None:
                return self._for_few_rows
        self._for_many_rows = self._for_many_rows or _product(*self._plain)
        return self._for_many_rows


def _product(weight: Tensor, bias: Tensor) -> _Product:
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return _packed_product(weight, bias)
        if torch.__version__.startswith("1."):
            return _convolution_product(weight, bias)
    weight_t = weight.t()

    def product(inputs: Tensor, rectifies: bool) -> Tensor:
        outputs = torch.addmm(bias, inputs, weight_t)
        return outputs.relu_() if rectifies else outputs

    return product


def _packed_product(weight: Tensor, bias: Tensor) -> _Product:
    """torch 2's own packed layer."""
    operators: Any = torch.ops.mkldnn
    packed = operators._reorder_linear_weight(weight, None)

    def product(inputs: Tensor, rectifies: bool) -> Tensor:
        outputs: Tensor = operators._linear_pointwise(inputs, packed, bias, "relu" if rectifies else "none", [], "")
        return outputs

    return product


def _convolution_product(weight: Tensor, bias: Tensor) -> _Product:
    """torch 1.13 packs weights only for convolutions: the rows become the pixels of one column.

    The result is in column order, which takes time for many rows, so these use plain weights.
    """
    operators: Any = torch._C._nn  # type: ignore[attr-defined]
    shape = (0, 0), (1, 1), (1, 1), 1
    plain, plain_bias = weight.to_mkldnn(), bias.to_mkldnn()
    packed = operators.mkldnn_reorder_conv2d_weight(weight[:, :, None, None].to_mkldnn(), *shape)

    def product(inputs: Tensor, rectifies: bool) -> Tensor:
        if len(inputs) >= _MIN_LINEAR_ROWS:
            outputs: Tensor = operators.mkldnn_linear(inputs.to_mkldnn(), plain, plain_bias).to_dense()
        else:
            pixels = inputs.t()[None, :, :, None]
            outputs = torch.mkldnn_convolution(pixels, packed, bias, *shape)  # type: ignore[attr-defined]
            outputs = outputs[0, :, :, 0].t()
        return outputs.relu_() if rectifies else outputs

    return product


def _is_autocast() -> bool:
    """Whether autocast is on for CPUs; the function of torch 1 raises a warning in torch 2."""
    if hasattr(torch.amp, "is_autocast_available"):  # since torch 2.4
        return bool(torch.is_autocast_enabled("cpu"))
    return bool(torch.is_autocast_cpu_enabled())


def multiplies_bytes(weight: Tensor, inputs: Tensor) -> bool:
    """Whether this thread multiplies bytes (`byte_products`), and may for this weight and these inputs."""
    return are_bytes_multiplied() and not weight.is_inference() and _is_fixed(weight, inputs)


def _is_fixed(weight: Tensor, inputs: Tensor) -> bool:
    """Whether the weights may be packed for a product with these inputs."""
    is_plain = inputs.device.type == "cpu" and inputs.dtype == weight.dtype == torch.float32
    return is_plain and not torch.is_grad_enabled() and not _is_autocast()


def norm_as_product(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """norm(x) = gain x + offset, for a norm without scale and shift in evaluation -> gain, offset."""
    assert norm.running_mean is not None and norm.running_var is not None
    gain = (norm.running_var + norm.eps).rsqrt()
    return gain, -norm.running_mean * gain


class PackedLinear(nn.Linear):
    """`nn.Linear`; on a CPU, if no gradient is needed, weights are kept packed (`PackedWeights`)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self._fixed = PackedWeights()

    def small_batch_weights(self) -> tuple[Any, ...] | None:
        """See `PackedWeights`."""
        return self._fixed.small_batch_weights(self.weight, self.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs (..., in_features) -> (..., out_features)."""
        return self._product(inputs, rectifies=False)

    def rectified(self, inputs: Tensor) -> Tensor:
        """The outputs with 0 in place of negative ones, in one pass if possible."""
        return self._product(inputs, rectifies=True)

    def normalized(self, inputs: Tensor, norm: nn.BatchNorm1d) -> Tensor:
        """norm(rectified(inputs)), in one pass if possible; (..., in_features) -> (..., out_features).

        The norm has no scale and shift of its own.
        """
        if norm.training or not multiplies_bytes(self.weight, inputs):
            outputs: Tensor = norm(self.rectified(inputs))
            return outputs
        return self._fixed.byte_product(self.weight, self.bias)(inputs, True, *norm_as_product(norm))

    def _product(self, inputs: Tensor, rectifies: bool) -> Tensor:
        if not _is_fixed(self.weight, inputs):
            outputs = super().forward(inputs)
            return F.relu(outputs) if rectifies else outputs
        outputs = self._fixed(inputs.reshape(-1, self.in_features), self.weight, self.bias, rectifies)
        return outputs.reshape(*inputs.shape[:-1], self.out_features)


class ChannelsLastConv2d(nn.Conv2d):
    """`nn.Conv2d` without padding modes, dilation or groups.

    With one input channel, oneDNN takes a tenth of the time in this layout. The stored weight keeps the order of
    `state_dict` and files; torch chooses the layout by the strides of the weight that is passed to the convolution.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding)
        self._fixed = PackedWeights()

    def forward(self, inputs: Tensor) -> Tensor:
        """(N, C, T, F) -> (N, C', T', F')."""
        if torch.is_grad_enabled():
            # The backward pass of torch 1.13 fails in training by several processes.
            return super().forward(inputs)
        weight = self.weight.to(memory_format=torch.channels_last)
        return F.conv2d(inputs, weight, self.bias, self.stride, self.padding)

    def between_relus(self, inputs: Tensor) -> Tensor:
        """ReLU, the convolution, and ReLU again, in one pass if possible.

        (N, C, T, F), which may be overwritten -> (N, C', T', F').
        """
        if self._multiplies_bytes(inputs):
            return self._in_bytes(rectifies=True)(inputs)
        return F.relu(self(F.relu(inputs, inplace=True)), inplace=True)

    def normalized(self, inputs: Tensor, norm: nn.BatchNorm1d, share: float) -> Tensor:
        """Adds share * inputs to norm(relu(convolution)), in one pass if possible; (N, C, T, F) -> (N, C, T - 2, F).

        For a kernel of three frames by three bins. The norm, of channels in the last axis, has no scale and shift.
        """
        if not norm.training and self._multiplies_bytes(inputs):
            return self._in_bytes(rectifies=False)(inputs, *norm_as_product(norm), share)
        hidden = norm(F.relu(self(inputs)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return torch.add(hidden, inputs[:, :, 1:-1], alpha=share)

    def _multiplies_bytes(self, inputs: Tensor) -> bool:
        return self.kernel_size[1] == 3 and self.padding == (0, 1) and multiplies_bytes(self.weight, inputs)

    def _in_bytes(self, rectifies: bool) -> Int8Convolution:
        assert self.bias is not None
        return self._fixed.byte_convolution(self.weight, self.bias, (self.stride[0], self.stride[1]), rectifies)
