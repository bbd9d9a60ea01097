"""Causal Transformers as language models of words, against the networks reading whole texts."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.token_tree import TokenTree
from asr.lm.transformers import Spelling, TransformerNetwork, load
from asr.text.symbols import BOS_ID, EPSILON_ID, UNK_ID, Vocabulary

transformers = pytest.importorskip("transformers")
toy = pytest.importorskip("tests.reference.toy_transformer")

WORDS = "THE QUICK BROWN FOX JUMPS OVER A LAZY DOG DON'T TRANSUBSTANTIATE ZZYZX ÆSIR".split()
VOCABULARY = Vocabulary(WORDS)
SENTENCES = [
    "THE QUICK BROWN FOX".split(),
    "THE QUICK DOG".split(),
    "DON'T ZZYZX THE TRANSUBSTANTIATE".split(),
    "THE QUICK BROWN DOG".split(),
    ["A"],
    [],
]


def network_of(kind: str = "llama", **options: Any) -> TransformerNetwork:
    return TransformerNetwork(toy.model_of(kind), toy.TOKENIZER, VOCABULARY, **options)


def scores(lm: CachedRNNLM, sentences: Sequence[Sequence[str]], start: Tensor | None = None) -> list[float]:
    """The scores of sentences, all queried word by word at the same time."""
    context_idx = lm.start(len(sentences)) if start is None else start.clone()
    total = torch.zeros(len(sentences))
    for place in range(max(map(len, sentences))):
        active = [row for row, sentence in enumerate(sentences) if len(sentence) > place]
        words = lm.vocabulary.ids_of([sentences[row][place] for row in active])
        log_prob, next_idx = lm.score(context_idx[active], words)
        total[active] += log_prob
        context_idx[active] = next_idx
    return (total + lm.final(context_idx)).tolist()


@pytest.mark.parametrize("kind", toy.CONFIGS)
def test_scores_equal_those_of_whole_texts(kind: str) -> None:
    network = network_of(kind)
    lm = CachedRNNLM(network)
    wanted = [toy.expected(network.network, sentence) for sentence in SENTENCES]
    assert scores(lm, SENTENCES) == pytest.approx(wanted, abs=1e-3)
    assert scores(lm, SENTENCES[::-1]) == pytest.approx(wanted[::-1], abs=1e-3)


def test_each_token_is_read_once_after_the_same_tokens() -> None:
    network = network_of()
    scores(CachedRNNLM(network), SENTENCES)
    texts = [[0, *(token for word in toy.tokens_of(sentence) for token in word)] for sentence in SENTENCES]
    distinct = {tuple(text[:length]) for text in texts for length in range(1, len(text) + 1)}
    assert network.num_tokens_read == len(distinct)
    scores(CachedRNNLM(network), SENTENCES)
    assert network.num_tokens_read == len(distinct)  # another search finds what this one has computed


def test_many_histories_take_several_groups() -> None:
    """More histories than fit into a group, all of them new in the same call, at different depths."""
    network, generator = network_of(), torch.Generator().manual_seed(2)
    words = torch.randint(4, len(VOCABULARY), (60, 6), generator=generator)
    sentences = [[VOCABULARY.words[word] for word in row[: 1 + number % 6]] for number, row in enumerate(words)]
    sentences = [[word for word in sentence if word != "ÆSIR"] for sentence in sentences]
    lm = CachedRNNLM(network)
    assert scores(lm, sentences) == pytest.approx([toy.expected(network.network, one) for one in sentences], abs=2e-3)
    # And all at once, without the shorter histories before them.
    states = torch.stack([lm.hidden.read(lm.trie.hidden_row[:1].long())[0]] * len(sentences))
    for place in range(6):
        rows = [row for row, sentence in enumerate(sentences) if len(sentence) > place]
        states[rows] = network.step(states[rows], VOCABULARY.ids_of([sentences[row][place] for row in rows]))
    other = copy.deepcopy(network)
    ends = other.log_prob(states, states, torch.full((len(sentences),), 2))
    texts = [[0, *(token for word in toy.tokens_of(one) for token in word), 0] for one in sentences]
    assert ends.tolist() == pytest.approx(
        [toy.whole_text(network.network, text, len(text) - 1) for text in texts], abs=1e-3
    )


def test_forgetting_changes_no_score() -> None:
    network = network_of(cache_bytes=1)
    wanted = [toy.expected(network.network, sentence) for sentence in SENTENCES]
    assert scores(CachedRNNLM(network), SENTENCES) == pytest.approx(wanted, abs=1e-3)
    unlimited = network_of()
    scores(CachedRNNLM(unlimited), SENTENCES)
    assert network.num_tokens_read > unlimited.num_tokens_read
    small = CachedRNNLM(network_of(), CacheOptions(capacity_bytes=8192))
    small.retain(small.start(1))
    assert scores(small, SENTENCES) == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("options", [{"hidden_dtype": "int8"}, {"history_precision": "sign"}])
def test_states_are_not_rounded(options: dict[str, str]) -> None:
    with pytest.raises(AsrError, match="hidden_dtype and history_precision round states"):
        CachedRNNLM(network_of(), CacheOptions(**options))  # type: ignore[arg-type]


def test_words_that_cannot_be_written() -> None:
    network = network_of(unknown_score=-7.0)
    lm = CachedRNNLM(network)
    words = torch.tensor([EPSILON_ID, BOS_ID, UNK_ID, VOCABULARY.id_of("ÆSIR")])
    log_prob, next_idx = lm.score(lm.start(4), words)
    assert log_prob.tolist() == [-math.inf, -math.inf, -7.0, -7.0]
    after, _ = lm.score(next_idx[2:], VOCABULARY.ids_of(["DOG", "DOG"]))
    alone, _ = lm.score(lm.start(1), VOCABULARY.ids_of(["DOG"]))
    assert after.tolist() == [float(alone)] * 2  # they are not read


@pytest.mark.parametrize(("kind", "options", "most"), [("llama", {"max_tokens": 64}, 64), ("gpt2", {}, 95)])
def test_long_histories_continue_from_their_last_tokens(kind: str, options: dict[str, int], most: int) -> None:
    """GPT-2 has a vector for each of 128 positions: one for the begin, and 32 for the longest word after a history."""
    network = network_of(kind, **options)
    lm = CachedRNNLM(network)
    context_idx, text, num_shortened = lm.start(1), [0], 0
    for word, tokens in zip(WORDS[:9] * 14, toy.tokens_of(WORDS[:9]) * 14, strict=True):
        log_prob, context_idx = lm.score(context_idx, VOCABULARY.ids_of([word]))
        assert float(log_prob) == pytest.approx(toy.whole_text(network.network, [*text, *tokens], len(text)), abs=1e-3)
        if len(text) - 1 + len(tokens) > most:
            text, num_shortened = [0, *text[len(text) - most // 2 :]], num_shortened + 1
        text += tokens
    assert num_shortened > 0


@pytest.mark.parametrize("end", [None, [5, 6]])
def test_a_sentence_continues_the_text_of_the_carried_state(end: list[int] | None) -> None:
    network = network_of(end=end)
    lm = CachedRNNLM(network)
    (first, second) = SENTENCES[0], SENTENCES[2]
    state = lm.state_after(lm.first_state(1), [lm.vocabulary.ids_of(first).tolist()])
    both = lm.state_after(state, [lm.vocabulary.ids_of(second).tolist()])
    texts = [[token for word in toy.tokens_of(sentence) for token in word] for sentence in (first, second)]
    ends = [0] if end is None else end
    before = [0, *texts[0], *ends]
    wanted = toy.whole_text(network.network, [*before, *texts[1], *ends], len(before))
    assert scores(lm, [second], lm.start_from(state)) == pytest.approx([wanted], abs=1e-3)
    longer = [*before, *texts[1], *ends]
    wanted = toy.whole_text(network.network, [*longer, *texts[0], *ends], len(longer))
    assert scores(lm, [first], lm.start_from(both)) == pytest.approx([wanted], abs=1e-3)


def test_copies_and_casts() -> None:
    network = network_of()
    wanted = scores(CachedRNNLM(network), SENTENCES)
    lm = CachedRNNLM(network)
    scores(lm, SENTENCES[:2])
    for other in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        assert scores(other, SENTENCES) == pytest.approx(wanted, abs=1e-4)
    double = copy.deepcopy(network).double()
    assert scores(CachedRNNLM(double), SENTENCES) == pytest.approx(wanted, abs=1e-2)
    half = copy.deepcopy(network).bfloat16()
    assert scores(CachedRNNLM(half), SENTENCES) == pytest.approx(wanted, rel=0.2)
    assert scores(lm, SENTENCES) == pytest.approx(wanted, abs=1e-4)
    network.bfloat16()  # what it has computed before is not used any more
    assert scores(CachedRNNLM(network), SENTENCES) == scores(CachedRNNLM(half), SENTENCES)


def test_states_of_an_earlier_tree_are_found_again() -> None:
    """Numbers of nodes are not taken from a tree that was forgotten or belongs to another network."""
    network = network_of()
    wanted = scores(CachedRNNLM(network), SENTENCES)
    lm = CachedRNNLM(network)
    context_idx, _ = lm.start(1), scores(lm, SENTENCES[2:3])
    _, context_idx = lm.score(context_idx, VOCABULARY.ids_of(["THE"]))
    lm.score(context_idx, VOCABULARY.ids_of(["FOX"]))
    network.double().float()  # moving the weights ends the tree
    scores(CachedRNNLM(network), SENTENCES[4:])  # another one whose nodes have other tokens
    log_prob, _ = lm.score(context_idx, VOCABULARY.ids_of(["QUICK"]))
    texts = toy.tokens_of(["THE", "QUICK"])
    assert float(log_prob) == pytest.approx(
        toy.whole_text(network.network, [0, *texts[0], *texts[1]], 1 + len(texts[0])), abs=1e-3
    )
    assert scores(CachedRNNLM(network), SENTENCES) == pytest.approx(wanted, abs=1e-3)


def test_threads_share_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of(cache_bytes=20_000)
    wanted = [toy.expected(network.network, sentence) for sentence in SENTENCES]
    found: list[list[float]] = []
    inside = threading.Semaphore(1)

    def alone(method: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            assert inside.acquire(blocking=False), "two threads change the tree"
            try:
                time.sleep(1e-4)
                return method(*arguments)
            finally:
                inside.release()

        return wrapped

    for name in ("extended", "log_prob"):
        monkeypatch.setattr(TokenTree, name, alone(getattr(TokenTree, name)))

    def run() -> None:
        for _ in range(3):
            found.append(scores(CachedRNNLM(network), SENTENCES))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    for each in found:
        assert each == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("marks", ["bytes", "metaspace"])
def test_words_are_spelled_as_after_other_words(marks: str) -> None:
    tokenizer = toy.tokenizer_of(marks)
    assert TransformerNetwork(toy.model_of(), tokenizer, VOCABULARY).case == "lower"
    spelling = Spelling(tokenizer, VOCABULARY, [0], "auto")
    for word in ("FOX", "DON'T", "TRANSUBSTANTIATE"):
        tokens = [token for token in spelling(VOCABULARY.ids_of([word]))[0].tolist() if token >= 0]
        assert tokenizer.decode(tokens).strip() == word.lower()
        assert tokenizer.convert_ids_to_tokens(tokens)[0][0] in "Ġ▁"


def test_the_case_of_the_vocabulary_stays_if_the_tokenizer_can_write_it() -> None:
    network = TransformerNetwork(toy.model_of(), toy.TOKENIZER, Vocabulary([word.lower() for word in WORDS]))
    assert network.case == "as-is"
    with pytest.raises(AsrError, match="case is 'title'"):
        network_of(case="title")


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    network = load(f"transformers:{toy.saved(tmp_path)}", VOCABULARY)
    assert scores(CachedRNNLM(network), SENTENCES) == scores(CachedRNNLM(network_of()), SENTENCES)
    other = load(str(tmp_path), VOCABULARY, unknown_score=-3.0, dtype=torch.bfloat16)
    assert next(other.parameters()).dtype == torch.bfloat16


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    folder = toy.saved(tmp_path)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(AsrError, match=r"cannot be loaded .* the folder must have config.json"):
        load(str(folder), VOCABULARY)
    with pytest.raises(AsrError, match="cannot be loaded"):
        load(str(tmp_path / "missing"), VOCABULARY)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = toy.saved(tmp_path)
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AsrError, match=r"lacks 1 weights of the network \(model.norm.weight"):
        load(str(folder), VOCABULARY)


def test_no_code_in_a_folder_is_run(tmp_path: Path) -> None:
    import json

    folder = toy.saved(tmp_path)
    mark = tmp_path / "run"
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"open({str(mark)!r}, 'w').close()\n"
        "class Own(LlamaForCausalLM): pass\nclass OwnConfig(LlamaConfig): pass\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(AsrError, match="cannot be loaded"):
        load(str(folder), VOCABULARY, trust_remote_code=True)
    assert not mark.exists()


def test_networks_without_keys_and_values_are_refused() -> None:
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, **toy.SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(AsrError, match=r"Mamba.*cannot read several texts"):
        TransformerNetwork(model, toy.TOKENIZER, VOCABULARY)


def test_networks_that_ignore_positions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = transformers.GPT2Model.forward

    @functools.wraps(forward)
    def without_positions(*arguments: Any, position_ids: Any = None, **options: Any) -> Any:
        return forward(*arguments, **options)

    monkeypatch.setattr(transformers.GPT2Model, "forward", without_positions)
    with pytest.raises(AsrError, match="cannot read several texts"):
        network_of("gpt2")


def test_an_interrupted_call_leaves_no_half_changed_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of()
    wanted = [toy.expected(network.network, sentence) for sentence in SENTENCES]
    for name, new in (("_new_nodes", "FOX OVER FOX"), ("_reserve", "OVER FOX OVER"), ("_read", "DOG DOG DOG")):
        lm = CachedRNNLM(network)
        scores(lm, SENTENCES[:1])
        with monkeypatch.context() as patch:
            patch.setattr(TokenTree, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                scores(lm, [new.split()])
        expected = toy.expected(network.network, new.split())
        assert scores(CachedRNNLM(network), [*SENTENCES, new.split()]) == pytest.approx([*wanted, expected], abs=1e-3)


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_scores_that_are_not_products_are_refused() -> None:
    config = transformers.Gemma2Config(
        intermediate_size=48, num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5, **toy.LAYERS, **toy.SMALL
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    with pytest.raises(AsrError, match="not those of its output layer alone"):
        TransformerNetwork(model, toy.TOKENIZER, VOCABULARY)


def test_what_lacks_is_said() -> None:
    tokenizer = toy.tokenizer_of()
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(AsrError, match="no token that ends a text; give begin and end"):
        TransformerNetwork(toy.model_of(), tokenizer, VOCABULARY)
    given = TransformerNetwork(toy.model_of(), tokenizer, VOCABULARY, begin=0, end=[0])
    assert scores(CachedRNNLM(given), SENTENCES) == scores(CachedRNNLM(network_of()), SENTENCES)
    with pytest.raises(AsrError, match="histories have at most 63 tokens; 64 or more are needed"):
        network_of(max_tokens=63)
