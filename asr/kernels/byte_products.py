"""Products of 8-bit integers for linear layers and a convolution, with what follows them in the same pass.

Inputs and weights are quantized to 255 steps: inputs between the lowest and the highest of their row, weights
symmetrically around zero. With VNNI, four products of bytes take as long as one of float32, and with AMX more than ten;
with AVX2 alone, the same products of int16 are a third faster than float32. The results are equal. Each row of the
inputs has a step of its own, so that the result for a frame does not depend on other frames.

The second convolution of a front end takes as long in float32 as a third of a small network's layers in bytes.
`Int8Convolution` quantizes all that an output frame reads with one step.

Layer by layer, all frames of a batch would pass through memory several times for each factorized layer. `Int8Layers`
takes some hundred rows through all layers before the next ones, so that they stay in the L2 cache. The numbers are the
same.

Shapes: Q rows, I inputs, O outputs, P tiles of W outputs, P W at least O, G integers in an element (`packed_integers`);
of a convolution, N images of T times F numbers with C channels in, T' times F' with C' channels out, kernels of K times
3 numbers; of layers, N utterances, T frames of which they leave T', D channels, B channels of a bottleneck, L layers, M
parts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr.kernels.jit import Intrinsic, has_package, in_threads, jit_required, num_threads
from asr.kernels.simd import AMX_TILE, COLUMNS, ROWS, aligned, as_float32, tiled

_LARGEST = 127
_NUM_STEPS = 255
ROWS_AT_ONCE = 8 * ROWS  # their bytes stay in the nearest caches during the loop over all tiles

_SIGN = np.uint32(0x80000000)
_ROWS_IN_CACHE = 320  # of a part; with their bottlenecks they take about 1 MB
_ROWS_AT_LEAST = 64  # of a thread's part


class _SetRows(Intrinsic):
    def stamps(self, argument_types: Any) -> list[tuple[str, int]]:
        """Code with tiles must not run in a process that Linux does not let use them."""
        return [("tiles", int(_has_tiles()))]


set_rows: Any = _SetRows("asr.kernels.intrinsics", "set_rows")
copy_items: Any = Intrinsic("asr.kernels.intrinsics", "copy_items")


def rounded_rows(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """numbers (N, K) -> the step of each row (N,), and the numbers in steps, integers from -127 to 127, (N, K)."""
    largest = numbers.abs().amax(dim=1) if numbers.numel() else numbers.new_zeros(len(numbers))
    step = largest.clamp(min=torch.finfo(torch.float32).tiny * _LARGEST) / _LARGEST
    return step, (numbers / step[:, None]).round_()


def packed_integers(numbers: Tensor) -> Tensor:
    """(N, K) of 8 bits -> (N, K / G) int32 of G adjacent ones each, see `integers_per_element`; padded with zeros."""
    group = _integers_per_element()
    if group == 2:
        numbers = numbers.short()
    return F.pad(numbers, (0, -numbers.shape[1] % group)).contiguous().view(torch.int32)


def has_byte_products() -> bool:
    """Whether numba is installed and the processor has instructions that multiply and add small integers."""
    return _integers_per_element() > 0


@functools.cache
def _integers_per_element() -> int:
    if not has_package("numba"):
        return 0
    from asr.kernels.intrinsics import integers_per_element

    return integers_per_element()


def _has_tiles() -> bool:
    from asr.kernels.intrinsics import has_tiles

    return has_tiles()


class ByteWeights(NamedTuple):
    """Quantized weights as loops read them: arrays, or tensors before they are stacked.

    Attributes:
        tiles: (P, I / G, W) int32, of G integers each, see `packed_integers`.
        step, total, bias: (P W,) of each column, the total being the sum of its quantized weights.
    """

    tiles: Any
    step: Any
    total: Any
    bias: Any


class NormAndBypass(NamedTuple):
    """What may follow a product with ReLU: gain * product + offset + share * bypass.

    Attributes:
        gain, offset: (O,), or (0,) if nothing follows.
        share: float32, 0 without a bypass.
    """

    gain: Any
    offset: Any
    share: Any


def nothing_follows() -> tuple[NormAndBypass, Any]:
    """For loops: the norm and the bypass of `fill_byte_products` if neither is there."""
    nothing = np.empty(0, np.float32)
    return NormAndBypass(nothing, nothing, np.float32(0.0)), np.empty((0, 0), np.float32)


def norm_and_bypass(gain: Tensor | None, offset: Tensor | None, share: float = 0.0) -> NormAndBypass:
    """The arrays of gain and offset (O,); None for both if nothing follows."""
    nothing = np.empty(0, dtype=np.float32)
    gain_array, offset_array = (nothing if each is None else each.numpy() for each in (gain, offset))
    return NormAndBypass(gain_array, offset_array, np.float32(share))


class Int8Weights:
    """inputs (Q, I) -> inputs weight^T + bias (Q, O) with quantized rows of both; needs `has_byte_products`.

    Args:
        weight: (O, I) float32.
        bias: (O,).

    Attributes:
        tables: the weights as `fill_byte_products` reads them.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._loop = jit_required(fill_byte_products)
        self._num_outputs, self._num_inputs = weight.shape
        self.tables = ByteWeights(*(each.numpy() for each in quantized_weights(weight, bias)))

    def __call__(
        self, inputs: Tensor, rectifies: bool, gain: Tensor | None = None, offset: Tensor | None = None
    ) -> Tensor:
        """inputs (..., I) -> (..., O), with 0 for negative ones if `rectifies`; a row with NaN or infinity becomes NaN.

        With gain and offset (O,), these are then multiplied and added.
        """
        rows = inputs.detach().reshape(-1, self._num_inputs).contiguous().numpy()
        outputs = inputs.new_empty(len(rows), self._num_outputs)
        filled = outputs.numpy()
        norm, kind = norm_and_bypass(gain, offset), np.empty(0, dtype=input_type())

        def work(begin: int, end: int) -> None:
            part = slice(begin * ROWS, min(end * ROWS, len(rows)))
            work_arrays = room_for_products(ROWS_AT_ONCE, self.tables.tiles, kind)
            self._loop(filled[part], rows[part], 1, 0, self.tables, rectifies, norm, filled[:0], *work_arrays)

        in_threads(work, -(-len(rows) // ROWS), rows_at_least=8)
        return outputs.view(*inputs.shape[:-1], self._num_outputs)


def quantized_weights(weight: Tensor, bias: Tensor) -> ByteWeights:
    """Weight (O, I) and bias (O,) -> tensors."""
    step, rounded = rounded_rows(weight)
    padding = 0, -len(rounded) % COLUMNS
    packed = packed_integers(rounded.char())
    if _has_tiles():
        packed = F.pad(packed, (0, -packed.shape[1] % AMX_TILE))
    tiles = tiled(packed, COLUMNS)
    return ByteWeights(tiles, *(F.pad(column, padding) for column in (step, step * rounded.sum(dim=1), bias)))


def input_type() -> type[np.integer[Any]]:
    """The type of quantized inputs."""
    return np.uint8 if _integers_per_element() == 4 else np.int16


def room_for_products(num_rows: int, tiles: Any, byte_kind: Any) -> tuple[Any, Any]:
    """Work arrays of loops over this many rows at once, for these tiles: left and products of `fill_byte_products`.

    byte_kind (0,) has the type of quantized inputs.
    """
    num_tiles, num_elements, _ = tiles.shape
    left = aligned(num_rows, num_elements * (4 // byte_kind.itemsize), byte_kind)
    return left, aligned(num_rows, num_tiles * COLUMNS, np.empty(0, np.int32))


def joined_taps(inputs: Tensor, stride: int) -> Tensor:
    """What the second factor of a factorized layer reads: sums over two frames, at two frames, side by side.

    (N, T, 2 B), the products of a frame with both taps of the first factor -> (N, T - 2 stride, 2 B). With a stride of
    0, the layer has one tap, and the inputs are left as they are.
    """
    if stride == 0:
        return inputs
    before, after = inputs.chunk(2, dim=2)
    sums = before[:, :-stride] + after[:, stride:]
    return torch.cat((sums[:, :-stride], sums[:, stride:]), dim=2)


def fill_byte_products(
    outputs: Any, inputs: Any, length: Any, stride: Any, weights: Any, rectifies: Any, norm: Any, bypass: Any,
    left: Any, products: Any,
) -> None:  # fmt: skip
    """Fills outputs (Q, O), for `jit`.

    inputs (Q or more, I). With a stride, their `joined_taps` are multiplied; there are sequences of `length` rows of
    outputs, with 2 strides more rows of inputs each. `weights` is a `ByteWeights`, with ReLU after them if `rectifies`,
    and `norm` a `NormAndBypass`. With a bypass (Q or more, O), its row in the middle of those of inputs that an output
    reads is added; without one, it has no row. Work arrays: left (ROWS_AT_ONCE, I) unsigned bytes or int16, products
    (ROWS_AT_ONCE, P W) int32.
    """
    tiles, step, total, bias = weights
    gain, offset, share = norm
    packed = left.view(np.int32)
    num_rows, num_outputs = outputs.shape
    num_inputs = inputs.shape[1]
    joined = np.empty(num_inputs, dtype=np.float32)
    floor = np.float32(0.0) if rectifies else np.float32(-np.inf)
    lowest, step_of = np.empty(len(left), dtype=np.float32), np.empty(len(left), dtype=np.float32)
    nothing = np.zeros((1, COLUMNS), dtype=np.int32)
    for first in range(0, num_rows, len(left)):
        count = min(len(left), num_rows - first)
        for row in range(count):
            source = inputs[first + row] if stride == 0 else joined
            if stride > 0:
                _join_taps(joined, inputs, _first_tap(first + row, length, stride), stride)
            lowest[row], step_of[row] = _round_row(left[row], source, num_inputs)
        whole = count + -count % ROWS
        for tile in range(len(tiles)):
            set_rows(products[:, tile * COLUMNS :], packed[:whole], tiles[tile], nothing)
        # Whole rows, still in the cache: loops over parts of rows would be too short.
        for row in range(count):
            product, output, low, scale = products[row], outputs[first + row], lowest[row], step_of[row]
            if len(bypass) > 0:
                passed = bypass[_first_tap(first + row, length, stride) + stride]
                for j in range(num_outputs):
                    value = np.float32(product[j]) * (scale * step[j]) + (low * total[j] + bias[j])
                    value = floor if value < floor else value  # unlike max, this keeps NaN
                    output[j] = (value * gain[j] + offset[j]) + share * passed[j]
            elif len(gain) > 0:
                for j in range(num_outputs):
                    value = np.float32(product[j]) * (scale * step[j]) + (low * total[j] + bias[j])
                    value = floor if value < floor else value
                    output[j] = value * gain[j] + offset[j]
            else:
                for j in range(num_outputs):
                    value = np.float32(product[j]) * (scale * step[j]) + (low * total[j] + bias[j])
                    output[j] = floor if value < floor else value


def _first_tap(row: Any, length: Any, stride: Any) -> Any:
    """The first row of inputs that a row of outputs reads, see `fill_byte_products`."""
    return row + 2 * stride * (row // length)


def _join_taps(joined: Any, inputs: Any, row: Any, stride: Any) -> None:
    """Fills a row of `joined_taps`, (2 B,), from the rows `row`, `row + stride` and `row + 2 stride` of inputs."""
    size = len(joined) // 2
    first, middle, last = inputs[row], inputs[row + stride], inputs[row + 2 * stride]
    for j in range(size):
        joined[j] = first[j] + middle[size + j]
        joined[size + j] = middle[j] + last[size + j]


def _round_row(left: Any, row: Any, num_inputs: int) -> Any:
    """Fills left with the row's numbers in steps above the lowest one -> that number and the step."""
    # Compilers compare several numbers at a time only if these are integers, whose order has no NaN. The bits of
    # negative numbers grow as these fall.
    signed, unsigned = row.view(np.int32), row.view(np.uint32)
    high, low, largest = signed[0], unsigned[0], unsigned[0]
    for j in range(num_inputs):
        high, low, largest = max(high, signed[j]), min(low, unsigned[j]), max(largest, unsigned[j])
    lowest = as_float32(np.int32(largest if largest >= _SIGN else low))
    highest = as_float32(high if high >= np.int32(0) else np.int32(low))
    # With NaN or an infinity in the row, the width is NaN or infinite, and so is the step; the bytes are 0.
    width = highest - lowest
    per_step = np.float32(_NUM_STEPS) / width if width > np.float32(1e-30) else np.float32(0.0)
    for j in range(num_inputs):
        left[j] = np.uint8(np.int32(np.rint((row[j] - lowest) * per_step)))
    return lowest, width / np.float32(_NUM_STEPS)


class Int8Convolution:
    """A convolution with quantized numbers and ReLU, which may be followed by a norm and a bypass.

    Needs `has_byte_products`. The second axis has a kernel of 3 numbers, with one zero as padding at each end.

    Args:
        weight: (C', C, K, 3) float32.
        bias: (C',).
        stride: of both axes.
        rectifies: whether negative inputs count as 0.
    """

    def __init__(self, weight: Tensor, bias: Tensor, stride: tuple[int, int], rectifies: bool) -> None:
        self._loop = jit_required(fill_byte_convolution)
        self._num_outputs, self._num_inputs, self._num_frames, _ = weight.shape
        self._stride, self._rectifies = stride, rectifies
        # In the order of what an output reads: channels in the inner loop, and frames in the outer one.
        rows = weight.permute(0, 2, 3, 1).flatten(1)
        self._tables = ByteWeights(*(each.numpy() for each in quantized_weights(rows, bias)))

    def __call__(
        self, inputs: Tensor, gain: Tensor | None = None, offset: Tensor | None = None, share: float = 0.0
    ) -> Tensor:
        """(N, C, T, F) -> (N, C', T', F'), channels last; an output frame that reads NaN or infinity becomes NaN.

        With gain and offset (C',), these are then multiplied and added, and `share` times the number in the middle of
        those that an output reads; C' is C then, K is 3, and the strides are 1.
        """
        images = inputs.detach().permute(0, 2, 3, 1).contiguous()
        num_images, num_frames, num_places, num_channels = images.shape
        num_rows = max(0, (num_frames - self._num_frames) // self._stride[0] + 1)
        num_bins = (num_places - 1) // self._stride[1] + 1
        outputs = inputs.new_empty(num_images, num_rows, num_bins, self._num_outputs)
        filled = outputs.view(num_images * num_rows, num_bins * self._num_outputs).numpy()
        read = images.view(num_images, num_frames, -1).numpy()
        strides = Strides(num_rows, num_channels, *self._stride)
        norm, kind = norm_and_bypass(gain, offset, share), input_type()

        def work(begin: int, end: int) -> None:
            held = np.empty((1 + self._num_frames * (num_places + 1)) * num_channels, dtype=kind)
            work_arrays = held, *room_for_products(ROWS * num_bins, self._tables.tiles, held)
            part = begin * ROWS, min(end * ROWS, len(filled))
            self._loop(filled, read, *part, strides, self._tables, self._rectifies, norm, *work_arrays)

        in_threads(work, -(-len(filled) // ROWS), rows_at_least=8)
        return outputs.permute(0, 3, 1, 2)


class Strides(NamedTuple):
    """Of a convolution: T' and C, and after how many frames and places of images the next outputs begin."""

    num_rows: Any
    num_channels: Any
    frames: Any
    places: Any


def fill_byte_convolution(
    outputs: Any, images: Any, first_row: Any, end_row: Any, strides: Any, weights: Any, rectifies: Any, norm: Any,
    held: Any, left: Any, products: Any,
) -> None:  # fmt: skip
    """Fills the rows first_row .. end_row - 1 of outputs (N T', F' C'), for `jit`.

    images (N, T, F C), whose negative numbers count as 0 if `rectifies`; `strides` is a `Strides`, `weights` a
    `ByteWeights` with I = 3 C K, and `norm` a `NormAndBypass`, whose bypass are the images. Work arrays:
    held ((1 + K (F + 1)) C,) and left (ROWS F', I), unsigned bytes or int16, and products (ROWS F', P W) int32.
    """
    tiles, step, total, bias = weights
    gain, offset, share = norm
    num_rows, num_channels, frame_stride, bin_stride = strides
    packed = left.view(np.int32)
    # Each frame is followed by the zeros of its padding; those before it follow the one before, or are the first ones.
    window = held[num_channels:].reshape(-1, images.shape[2] + num_channels)
    num_frames, num_bins = len(window), len(left) // ROWS
    num_outputs = outputs.shape[1] // num_bins
    lowest, row_step = np.empty(ROWS, dtype=np.float32), np.empty(ROWS, dtype=np.float32)
    nothing = np.zeros((1, COLUMNS), dtype=np.int32)
    for first in range(first_row, end_row, ROWS):
        count = min(ROWS, end_row - first)
        for row in range(count):
            image, begin = images[(first + row) // num_rows], (first + row) % num_rows * frame_stride
            lowest[row], row_step[row], zero = _round_window(window, image, begin, rectifies)
            held[:num_channels] = zero
            for place in range(num_bins):
                target = left[row * num_bins + place]
                for frame in range(num_frames):
                    at = frame * window.shape[1] + place * bin_stride * num_channels
                    copy_items(target, frame * 3 * num_channels, held, at, 3 * num_channels)
        for tile in range(len(tiles)):
            set_rows(products[:, tile * COLUMNS :], packed, tiles[tile], nothing)
        for row in range(count):
            image, middle = images[(first + row) // num_rows], (first + row) % num_rows * frame_stride + 1
            low, scale = lowest[row], row_step[row]
            for place in range(num_bins):
                product = products[row * num_bins + place]
                output = outputs[first + row, place * num_outputs : (place + 1) * num_outputs]
                if len(gain) > 0:
                    passed = image[middle, place * num_channels : (place + 1) * num_channels]
                    for j in range(num_outputs):
                        value = np.float32(product[j]) * (scale * step[j]) + (low * total[j] + bias[j])
                        value = np.float32(0.0) if value < np.float32(0.0) else value
                        output[j] = (value * gain[j] + offset[j]) + share * passed[j]
                else:
                    for j in range(num_outputs):
                        value = np.float32(product[j]) * (scale * step[j]) + (low * total[j] + bias[j])
                        # Unlike max, this keeps NaN.
                        output[j] = np.float32(0.0) if value < np.float32(0.0) else value


def _round_window(window: Any, image: Any, begin: Any, rectifies: Any) -> Any:
    """Fills window with the frames of an image from `begin` on, and with zeros after each, in steps above the lowest.

    Returns the lowest number, at most 0, the step, and what zero is in steps above the lowest.
    """
    num_frames, width = len(window), image.shape[1]
    high, largest = np.int32(0), np.uint32(0)  # see `_round_row`
    read = image[begin : begin + num_frames].reshape(-1)  # one loop over all frames: compilers do not vectorize two
    signed, unsigned = read.view(np.int32), read.view(np.uint32)
    for j in range(len(read)):
        high, largest = max(high, signed[j]), max(largest, unsigned[j])
    highest = as_float32(high)
    lowest = as_float32(np.int32(largest)) if largest >= _SIGN else np.float32(0.0)
    # A NaN or an infinity stays, whether or not negative numbers count.
    highest += np.float32(0.0) * (lowest + highest)
    lowest = np.float32(0.0) if rectifies else lowest
    span = highest - lowest
    per_step = np.float32(_NUM_STEPS) / span if span > np.float32(1e-30) else np.float32(0.0)
    zero = np.uint8(np.int32(np.rint(-lowest * per_step)))
    for frame in range(num_frames):
        row, target = image[begin + frame], window[frame]
        for j in range(width):
            value = (row[j] - lowest) * per_step
            target[j] = np.uint8(np.int32(np.rint(value if value > np.float32(0.0) else np.float32(0.0))))
        target[width:] = zero
    return lowest, span / np.float32(_NUM_STEPS), zero


class LayerWeights(NamedTuple):
    """A layer: its two factors, and the norm after its ReLU as a factor of each output and what is added.

    Attributes:
        factor: (2 B, D), or (B, D) if the stride is 0.
        factor_bias: (2 B,) or (B,).
        expand: (D, 2 B) or (D, B).
        expand_bias: (D,).
        gain: (D,).
        offset: (D,).
        stride: see `joined_taps`.
    """

    factor: Tensor
    factor_bias: Tensor
    expand: Tensor
    expand_bias: Tensor
    gain: Tensor
    offset: Tensor
    stride: int


class Int8Layers:
    """Layers of equal shapes; needs `has_byte_products`.

    Each computes gain * relu(expand taps + bias) + offset + share * input, where taps are `joined_taps` of the products
    of the input and the first factor, and input frames without an output are left out.

    Args:
        layers: at least one.
        share: of the bypass.
        rows_in_cache: about how many output rows go through all layers together.
    """

    def __init__(self, layers: Sequence[LayerWeights], share: float, rows_in_cache: int = _ROWS_IN_CACHE) -> None:
        self._rows_in_cache = rows_in_cache
        self._loop = jit_required(fill_layers)
        self._tables = (
            _stacked([quantized_weights(layer.factor, layer.factor_bias) for layer in layers]),
            _stacked([quantized_weights(layer.expand, layer.expand_bias) for layer in layers]),
            NormAndBypass(
                torch.stack([layer.gain for layer in layers]).numpy(),
                torch.stack([layer.offset for layer in layers]).numpy(),
                np.float32(share),
            ),
            np.array([layer.stride for layer in layers]),
        )
        self._num_lost = 2 * sum(layer.stride for layer in layers)
        self._bottleneck = len(layers[0].factor)

    def __call__(self, inputs: Tensor) -> Tensor:
        """(N, T, D) -> (N, T', D); a row that reads NaN or infinity becomes NaN."""
        num_utterances, length, num_channels = inputs.shape
        num_left = max(length - self._num_lost, 0)
        outputs = inputs.new_empty(num_utterances, num_left, num_channels)
        read, filled = inputs.detach().contiguous().numpy(), outputs.numpy()
        parts = self._parts(num_utterances, num_left)

        def work(begin: int, end: int) -> None:
            self._loop(filled, read, parts[begin:end], *self._tables, np.empty(0, dtype=input_type()), self._bottleneck)

        in_threads(work, len(parts), rows_at_least=1)
        return outputs

    def _parts(self, num_utterances: int, length: int) -> Any:
        """(M, 4): first utterance, number of utterances, first output frame, number of frames; several are whole."""
        of_thread = max(_ROWS_AT_LEAST, -(-num_utterances * length // num_threads()))
        rows = min(self._rows_in_cache, of_thread)
        together = max(1, rows // max(1, length + self._num_lost))
        num_cuts = -(-length // rows)
        bounds = [length * cut // num_cuts for cut in range(num_cuts + 1)] if num_cuts else []
        return np.array(
            [
                (first, min(together, num_utterances - first), begin, end - begin)
                for first in range(0, num_utterances, together)
                for begin, end in itertools.pairwise(bounds)
            ],
            dtype=np.int64,
        ).reshape(-1, 4)


def _stacked(tables: Sequence[ByteWeights]) -> ByteWeights:
    return ByteWeights(*(torch.stack(columns).numpy() for columns in zip(*tables, strict=True)))


def fill_layers(
    outputs: Any, inputs: Any, parts: Any, factor: Any, expand: Any, norm: Any, strides: Any, byte_kind: Any,
    bottleneck: Any,
) -> None:  # fmt: skip
    """Fills outputs (N, T', D), for `jit`.

    inputs (N, T, D); parts (M, 4), see `Int8Layers._parts`. factor and expand are `ByteWeights` and norm is a
    `NormAndBypass` whose arrays have L rows more, one of each layer; strides (L,). byte_kind (0,) has the type of
    quantized inputs; `bottleneck` is how many outputs the first factor has.
    """
    num_channels, num_lost = inputs.shape[2], 2 * strides.sum()
    num_rows = 0
    for part in range(len(parts)):
        num_rows = max(num_rows, parts[part, 1] * (parts[part, 3] + num_lost))
    rows, hidden = np.empty((num_rows, num_channels), np.float32), np.empty((num_rows, bottleneck), np.float32)
    wide, few = room_for_products(ROWS_AT_ONCE, factor.tiles[0], byte_kind)
    narrow, many = room_for_products(ROWS_AT_ONCE, expand.tiles[0], byte_kind)
    no_norm, no_bypass = nothing_follows()
    for part in range(len(parts)):
        first, together, begin, count = parts[part]
        length = count + num_lost
        for at in range(together):
            rows[at * length : (at + 1) * length] = inputs[first + at, begin : begin + length]
        for layer in range(len(strides)):
            stride = strides[layer]
            first_weights, second_weights = _of_layer(factor, layer), _of_layer(expand, layer)
            own_norm = NormAndBypass(norm.gain[layer], norm.offset[layer], norm.share)
            fill_byte_products(
                hidden[: together * length], rows, 1, 0, first_weights, False, no_norm, no_bypass, wide, few
            )
            left = length - 2 * stride
            # In place: a row is read, as the bypass, before an output is written there.
            fill_byte_products(
                rows[: together * left], hidden, left, stride, second_weights, True, own_norm, rows, narrow, many
            )
            length = left
        for at in range(together):
            outputs[first + at, begin : begin + count] = rows[at * count : (at + 1) * count]


def _of_layer(weights: Any, layer: Any) -> Any:
    return ByteWeights(weights.tiles[layer], weights.step[layer], weights.total[layer], weights.bias[layer])
