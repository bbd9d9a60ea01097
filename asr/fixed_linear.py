"""The product of a linear layer whose weights stay as they are, without gradient.

On a CPU the weights are kept in the form that oneDNN's kernels read, and, where few rows are multiplied, in one for a
loop of our own (`half_product`). Given plain weights, torch arranges them anew at each call or leaves them to MKL,
which on processors of other makers does without most of their instructions.

Shapes: Q rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asr.half_product import HalfProduct, half_product

_Product = Callable[[Tensor], Tensor]
# Fewer rows are multiplied as fast by plain weights.
_FEWEST_ROWS = 2
# Up to so many the loop is as fast as oneDNN or faster; torch 1.13 does not get at all that oneDNN can do.
FEW_ROWS = 512 if torch.__version__.startswith("1.") else 16
# For so many rows it is worth to arrange weights anew at each call.
_MANY_ROWS = 192


class FixedLinear:
    """inputs W^T + bias, the weights given at each call and packed anew only where they have changed.

    A copy of it packs its own, so that the module which holds it may be copied.
    """

    def __init__(self) -> None:
        self._held: tuple[tuple[int, ...], _Weights] | None = None

    def __call__(self, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """inputs (Q, I), weight (O, I), bias (O,) -> (Q, O), in any memory order."""
        if len(inputs) < _FEWEST_ROWS or weight.is_inference():  # which does not tell whether it has changed
            return torch.addmm(bias, inputs, weight.t())
        return self._weights(weight, bias).product_for(len(inputs))(inputs)

    def tables_of_few(self, weight: Tensor, bias: Tensor) -> tuple[Any, Any] | None:
        """What a loop that multiplies few rows by itself reads, see `fill_products`; None where none is used."""
        if weight.is_inference():
            return None
        product = self._weights(weight, bias).product_for(_FEWEST_ROWS)
        return product.tables if isinstance(product, HalfProduct) else None

    def _weights(self, weight: Tensor, bias: Tensor) -> _Weights:
        version = (weight.data_ptr(), weight._version, bias.data_ptr(), bias._version)
        held = self._held
        if held is None or held[0] != version:
            # One assignment, since two threads may come here together.
            self._held = held = (version, _Weights(weight.detach(), bias.detach()))
        return held[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> FixedLinear:
        return FixedLinear()

    def __reduce__(self) -> tuple[type[FixedLinear], tuple[()]]:
        return FixedLinear, ()


class _Weights:
    """Packed, for few rows and for many, where first asked for."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._plain = weight, bias
        self._may_widen = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._of_few: _Product | None = None
        self._of_many: _Product | None = None

    def product_for(self, num_rows: int) -> _Product:
        """What multiplies so many rows. oneDNN shares them out between threads, the loop does not."""
        if self._may_widen and num_rows <= FEW_ROWS and torch.get_num_threads() == 1:
            self._of_few = self._of_few or half_product(*self._plain)
            self._may_widen = self._of_few is not None
            if self._of_few is not None:
                return self._of_few
        self._of_many = self._of_many or _product(*self._plain)
        return self._of_many


def _product(weight: Tensor, bias: Tensor) -> _Product:
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return _packed_product(weight, bias)
        if torch.__version__.startswith("1."):
            return _convolution_product(weight, bias)
    weight_t = weight.t()
    return lambda inputs: torch.addmm(bias, inputs, weight_t)


def _packed_product(weight: Tensor, bias: Tensor) -> _Product:
    """torch 2's own packed layer."""
    operators: Any = torch.ops.mkldnn
    packed = operators._reorder_linear_weight(weight, None)

    def product(inputs: Tensor) -> Tensor:
        outputs: Tensor = operators._linear_pointwise(inputs, packed, bias, "none", [], "")
        return outputs

    return product


def _convolution_product(weight: Tensor, bias: Tensor) -> _Product:
    """torch 1.13 packs weights for convolutions only: the rows are the pixels of one column.

    What that gives has its columns side by side, and many rows take their time to get there: these go another way.
    """
    operators: Any = torch._C._nn  # type: ignore[attr-defined]
    shape = (0, 0), (1, 1), (1, 1), 1
    plain, plain_bias = weight.to_mkldnn(), bias.to_mkldnn()
    packed = operators.mkldnn_reorder_conv2d_weight(weight[:, :, None, None].to_mkldnn(), *shape)

    def product(inputs: Tensor) -> Tensor:
        outputs: Tensor
        if len(inputs) >= _MANY_ROWS:
            outputs = operators.mkldnn_linear(inputs.to_mkldnn(), plain, plain_bias).to_dense()
            return outputs
        pixels = inputs.t()[None, :, :, None]
        outputs = torch.mkldnn_convolution(pixels, packed, bias, *shape)  # type: ignore[attr-defined]
        return outputs[0, :, :, 0].t()

    return product
