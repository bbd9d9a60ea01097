"""The compiled loops of training: what the tensor forms give, and the same bits on any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from asr.kernels.jit import jit
from asr.kernels.simd import add_products_by_column
from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.optim import AdamWithSparseRows
from asr.lm.rnn.outputs.hierarchical import HuffmanOutput
from asr.lm.rnn.outputs.nce import NceOutput, NoiseWords
from asr.lm.rnn.recurrent import GruLayer, SimpleRnnLayer

pytestmark = pytest.mark.skipif(jit(add_products_by_column) is None, reason="needs numba")
NUM_WORDS = 300


def _check(compute: Callable[[], Sequence[Tensor]], module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed by loops, on one and on two threads, and by tensors."""
    num_threads, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(compute())
    torch.set_num_threads(num_threads)
    monkeypatch.setattr(f"asr.lm.rnn.{module}.jit_for", lambda function, tensor: None)
    for one, two, expected in zip(*found, compute(), strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("cell", ["gru", "sigmoid", "relu"])
@pytest.mark.parametrize(("num_streams", "size"), [(3, 7), (19, 50), (16, 48)])
def test_recurrent_layers(cell: str, num_streams: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    layer = GruLayer(21, size) if cell == "gru" else SimpleRnnLayer(21, size, cell)  # type: ignore[arg-type]
    for name, parameter in layer.named_parameters():
        if name.startswith("bias"):
            nn.init.normal_(parameter)
    inputs = torch.randn(5, num_streams, 21, requires_grad=True)
    state = torch.randn(num_streams, size, requires_grad=True)
    keep = (torch.rand(5, num_streams, 1) > 0.2).float()
    factor = torch.randn(5, num_streams, size)

    def compute() -> list[Tensor]:
        outputs, last = layer(inputs, state, keep)
        return [outputs, last, *torch.autograd.grad((factor * outputs).sum(), [inputs, state, *layer.parameters()])]

    _check(compute, "recurrent_numba", monkeypatch)


@pytest.mark.parametrize("maxent_order", [0, 4])
@pytest.mark.parametrize(("size", "num_noise"), [(10, 40), (32, 64)])
def test_nce(maxent_order: int, size: int, num_noise: int, monkeypatch: pytest.MonkeyPatch) -> None:
    output = NceOutput(
        nn.Embedding(50, size, sparse=True), _maxent(maxent_order), NoiseWords(num_noise, num_grad_words=8)
    )
    output.log_z.requires_grad_()

    def loss(hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        return 0.5 * output.loss(hidden, history, word_id, torch.Generator().manual_seed(7))

    _check(lambda: _loss_and_gradients(output, size, loss), "outputs.nce", monkeypatch)


@pytest.mark.parametrize("maxent_order", [0, 4])
@pytest.mark.parametrize("size", [10, 64])
def test_huffman_tree(maxent_order: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    output = HuffmanOutput(50, size, _maxent(maxent_order))
    output.set_unigram(torch.randint(0, 90, (50,)), reset_bias=True)
    nn.init.normal_(output.rows.weight, std=0.3)

    def loss(hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        return 0.5 * output.loss(hidden, history, word_id, torch.Generator())

    _check(lambda: _loss_and_gradients(output, size, loss), "outputs.hierarchical", monkeypatch)


@pytest.mark.parametrize("shape", [(9000,), (9000, 20)])
def test_adagrad(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    index, values = torch.randint(0, 9000, (1, 20_000)), torch.randn(20_000, *shape[1:])

    def compute() -> list[Tensor]:
        table = nn.Parameter(torch.ones(shape))
        optimizer = AdamWithSparseRows([table])
        for _ in range(2):
            table.grad = torch.sparse_coo_tensor(index, values, shape)
            optimizer.step()
        return [table.detach(), optimizer.state[table]["square"]]

    _check(compute, "optim", monkeypatch)


def test_dense_parameters_take_the_steps_of_adam() -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2))
    optimizers = AdamWithSparseRows([ours], lr=0.05), torch.optim.Adam([theirs], 0.05, (0.9, 0.99))
    for step in range(4):
        for param, optimizer in zip((ours, theirs), optimizers, strict=True):
            param.grad = torch.linspace(-2, 3, 5) ** step
            optimizer.step()
        torch.testing.assert_close(ours.detach(), theirs.detach())


def _maxent(order: int) -> HashedMaxEnt | None:
    if order == 0:
        return None
    maxent = HashedMaxEnt(50, order, 500)
    nn.init.normal_(maxent.weight)
    return maxent


def _loss_and_gradients(output: nn.Module, size: int, loss: Callable[..., Tensor]) -> list[Tensor]:
    torch.manual_seed(3)
    hidden = torch.randn(NUM_WORDS, size, requires_grad=True)
    value = loss(hidden, torch.randint(0, 50, (NUM_WORDS, 3)), torch.randint(2, 50, (NUM_WORDS,)))
    gradients = torch.autograd.grad(value, [hidden, *output.parameters()])
    return [value.detach(), *(each.to_dense() if each.is_sparse else each for each in gradients)]
