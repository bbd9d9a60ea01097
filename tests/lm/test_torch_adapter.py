"""User modules behind the adapter: an LSTM and a small Transformer over words, an LSTM over characters."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asr.errors import AsrError
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.torch_adapter import SpelledModule, WordModule
from asr.text.symbols import BOS_ID, EOS_ID, Vocabulary

VOCABULARY = Vocabulary(["A", "AB", "BA", "ABBA"])
SPELLINGS = {"</s>": [3], "A": [0], "AB": [0, 1], "BA": [1, 0], "ABBA": [0, 1, 1, 0]}


class SmallLstm(nn.Module):
    def __init__(self, num_symbols: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_symbols, 6)
        self.cell = nn.LSTMCell(6, 5)
        self.output = nn.Linear(5, num_symbols)

    def initial_state(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(5), torch.zeros(5)

    def forward(self, symbol_id: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden, cell = self.cell(self.embedding(symbol_id), state)
        return self.output(hidden).log_softmax(dim=1), (hidden, cell)


class SmallTransformer(nn.Module):
    """Attends over the last `window` words, which are its state; -1 where there are none yet."""

    def __init__(self, num_symbols: int, window: int = 8) -> None:
        super().__init__()
        self.window = window
        self.embedding = nn.Embedding(num_symbols, 8)
        self.position = nn.Parameter(torch.randn(window, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.output = nn.Linear(8, num_symbols)

    def initial_state(self) -> tuple[Tensor]:
        return (torch.full((self.window,), -1.0),)

    def forward(self, symbol_id: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        words = torch.cat((state[0][:, 1:], symbol_id[:, None].float()), dim=1)
        inputs = self.embedding(words.clamp(min=0).long()) + self.position
        hidden = self.layer(inputs, src_key_padding_mask=words < 0)
        return self.output(hidden[:, -1]).log_softmax(dim=1), (words,)


@pytest.mark.parametrize("module_class", [SmallLstm, SmallTransformer])
@torch.no_grad()
def test_word_module_equals_the_module(module_class: type[nn.Module]) -> None:
    torch.manual_seed(1)
    module = module_class(len(VOCABULARY)).eval()
    network = WordModule(module, VOCABULARY)
    sentences = torch.tensor([[4, 5, 6, 7, 4], [5, 5, 7, 7, 6], [4, 4, 4, 5, 5]])
    state = network.initial_state().expand(3, -1)
    parts = tuple(part.expand(3, *part.shape) for part in module.initial_state())  # type: ignore[operator]
    previous = torch.full((3,), BOS_ID)
    for word_id in sentences.unbind(dim=1):
        state = network.step(state, previous)
        expected, parts = module(previous, parts)
        hidden = state[:, network.state_size - network.hidden_size :]
        found = network.log_prob(hidden, torch.zeros(3, 0, dtype=torch.int64), word_id)
        torch.testing.assert_close(found, expected.gather(1, word_id[:, None])[:, 0])
        previous = word_id


@torch.no_grad()
@pytest.mark.parametrize("kept_bytes", [0, 300, 1 << 20])
def test_word_module_reads_again_what_it_has_forgotten(kept_bytes: int) -> None:
    torch.manual_seed(3)
    module = SmallLstm(len(VOCABULARY)).eval()
    network = WordModule(module, VOCABULARY, kept_bytes)
    assert network.state_size == 5 + 5 + 2  # states are as small as the module's, whatever the number of words
    language_model = CachedRNNLM(network)
    words = torch.randint(4, 8, (4, 9))
    contexts, scores = language_model.start(9), torch.zeros(9)
    for word_id in words:
        found, contexts = language_model.score(contexts, word_id)
        scores += found
    scores += language_model.final(contexts)
    for sentence, found in zip(words.T.tolist(), scores.tolist(), strict=True):
        expected, parts, previous = 0.0, tuple(part[None] for part in module.initial_state()), BOS_ID
        for word in [*sentence, EOS_ID]:
            log_prob, parts = module(torch.tensor([previous]), parts)
            expected, previous = expected + float(log_prob[0, word]), word
        assert abs(found - expected) < 1e-5


@torch.no_grad()
def test_word_module_notices_new_weights_and_can_be_copied() -> None:
    module = SmallLstm(len(VOCABULARY))
    network = WordModule(module, VOCABULARY)

    def scored(by: WordModule) -> Tensor:
        hidden = by.step(by.initial_state()[None], torch.tensor([BOS_ID])).expand(4, -1)
        return by.log_prob(hidden, torch.zeros(4, 0, dtype=torch.int64), torch.arange(4, 8))

    before = scored(network)
    module.output.bias[4] += 1.0
    assert not torch.equal(scored(network), before)
    assert torch.equal(scored(pickle.loads(pickle.dumps(network))), scored(network))


@torch.no_grad()
def test_spelled_module_sums_over_the_spelling() -> None:
    torch.manual_seed(2)
    # Tokens: 0 A, 1 B, 2 space, 3 end, 4 begin.
    module = SmallLstm(5)
    spellings = {"</s>": [3], **{word: [*map("AB".index, word), 2] for word in ("A", "AB", "BA")}}
    network = SpelledModule(module, VOCABULARY, spellings, begin_id=4)
    assert set(network.state_dict()) == {f"module.{name}" for name in module.state_dict()}
    words = [5, 4, 6, EOS_ID]
    state = network.initial_state()[None]
    previous = BOS_ID
    found = []
    for word in words:
        state = network.step(state, torch.tensor([previous]))
        hidden = state[:, network.state_size - network.hidden_size :]
        found.append(float(network.log_prob(hidden, torch.zeros(1, 0, dtype=torch.int64), torch.tensor([word]))))
        previous = word

    log_prob, parts = module(torch.tensor([4]), tuple(part[None] for part in module.initial_state()))
    for word, score in zip(words, found, strict=True):
        expected = 0.0
        for token in spellings[VOCABULARY.words[word]]:
            expected += float(log_prob[0, token])
            log_prob, parts = module(torch.tensor([token]), parts)
        assert abs(score - expected) < 1e-5
    # ABBA has no spelling; mixed queries do not disturb each other.
    query = torch.tensor([7, 4, EOS_ID, 5])
    together = network.log_prob(hidden.expand(4, -1), torch.zeros(4, 0, dtype=torch.int64), query)
    assert together[0] == -torch.inf
    for row in range(1, 4):
        alone = network.log_prob(hidden, torch.zeros(1, 0, dtype=torch.int64), query[row : row + 1])
        torch.testing.assert_close(together[row], alone[0])


class Logits(SmallLstm):
    """Forgets to normalize."""

    def forward(self, symbol_id: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        log_prob, state = super().forward(symbol_id, state)
        return log_prob + 5.0, state


class Bare(SmallLstm):
    """Has one state, and forgets that it needs a tuple."""

    def initial_state(self) -> Tensor:  # type: ignore[override]
        return torch.zeros(5)


@pytest.mark.parametrize("adapter", [WordModule, lambda *given: SpelledModule(*given, SPELLINGS, begin_id=0)])
def test_modules_are_not_in_training_and_logits_are_told_once(
    adapter: Callable[..., WordModule | SpelledModule], caplog: pytest.LogCaptureFixture
) -> None:
    module = nn.Sequential(nn.Dropout(0.5))
    for made, told in ((SmallLstm(len(VOCABULARY)), []), (Logits(len(VOCABULARY)), ["sum to 148 instead of 1"])):
        made.dropout = module.train()
        network = adapter(made.train(), VOCABULARY)
        assert not made.training and not module.training
        for _ in range(2):
            state = network.step(network.initial_state()[None], torch.tensor([BOS_ID]))
            network.log_prob(state, torch.zeros(1, 0, dtype=torch.int64), torch.tensor([EOS_ID]))
        assert [each for each in told if each in caplog.text] == told and len(caplog.records) == len(told)


class Changed(SmallLstm):
    """Has an output of another form."""

    def __init__(self, change: Callable[[Tensor, tuple[Tensor, ...]], object]) -> None:
        super().__init__(len(VOCABULARY))
        self.change = change

    def forward(self, symbol_id: Tensor, state: tuple[Tensor, ...]) -> Any:
        return self.change(*super().forward(symbol_id, state))


@pytest.mark.parametrize("adapter", [WordModule, lambda *given: SpelledModule(*given, {"</s>": [3], "A": [4]}, 0)])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda log_prob, state: log_prob, r"returns a tensor of the shape \(2, 8\); expected a tuple"),
        (
            lambda log_prob, state: (log_prob, state[0]),
            r"returns \(.*2, 8\), a tensor of the shape \(2, 5\)\); expected",
        ),
        (lambda log_prob, state: (log_prob, state[:1]), r"expected .* the next states, \(.*2, 5\), .*2, 5\)\)"),
        (lambda log_prob, state: (log_prob[:, None], state), r"returns \(a tensor of the shape \(2, 1, 8\)"),
        (lambda log_prob, state: None, "returns NoneType"),
    ],
)
def test_outputs_of_another_form_are_told(
    adapter: Callable[..., nn.Module], change: Callable[..., object], message: str
) -> None:
    with pytest.raises(AsrError, match=f"^Changed: for two symbols, the module .*{message}"):
        adapter(Changed(change), VOCABULARY)


def test_spellings_that_do_not_fit_are_told(caplog: pytest.LogCaptureFixture) -> None:
    module = SmallLstm(5)
    for spelling in ([99], "AB", [-1]):
        with pytest.raises(AsrError, match=r"spelling of 'AB' has the token .* scores the tokens 0 to 4"):
            SpelledModule(module, VOCABULARY, {"</s>": [3], "AB": spelling}, begin_id=4)  # type: ignore[dict-item]
    with pytest.raises(AsrError, match=r"None of the 4 words has a spelling \(A, ...\); check their letter case"):
        SpelledModule(module, VOCABULARY, {"</s>": [3], "ab": [0]}, begin_id=4)
    SpelledModule(module, VOCABULARY, {"</s>": [3], "AB": [0, 1]}, begin_id=4)
    assert "3 words have no spelling and are never predicted (A, ...)" in caplog.text


def test_misfits_are_one_sentence() -> None:
    with pytest.raises(AsrError, match="LSTM: the language model module has no method initial_state"):
        WordModule(nn.LSTM(3, 3), VOCABULARY)
    with pytest.raises(AsrError, match=r"vocabulary is of type list; give asr.text.symbols.Vocabulary\(words\)"):
        WordModule(SmallLstm(8), ["A", "AB"])  # type: ignore[arg-type]
    with pytest.raises(AsrError, match=r"Bare\.initial_state: it returns a tensor; expected a tuple of tensors"):
        WordModule(Bare(8), VOCABULARY)
    with pytest.raises(AsrError, match="scores 5 words and its vocabulary has 8"):
        WordModule(SmallLstm(5), VOCABULARY)
    with pytest.raises(AsrError, match="</s>"):
        SpelledModule(SmallLstm(5), VOCABULARY, {"A": [2]}, begin_id=0)
