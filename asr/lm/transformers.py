"""Causal Transformers (GPT-2, Llama, Qwen, ... of the package transformers) as language models of words.

The network reads tokens; a word is scored as the sum over the tokens of its spelling. Inside `CachedRNNLM`, it takes
the place of a recurrent network: the state of a history is its tokens, and what the network has computed for them is
kept in a `TokenTree`. A state is complete without the tree, so the tree may forget at any time.

    words = asr.Bundle.load("checkpoints/librispeech").graph.vocabulary
    language_model = CachedRNNLM(load("gpt2", words))

Shapes: Q queries, S state width, U tokens of the longest spelling, M tokens that a state holds.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asr.errors import AsrError, in_one_line, package
from asr.lm.interface import StatefulNetwork
from asr.lm.token_tree import ROOT, TokenTree
from asr.text.symbols import BOS_ID, EOS_ID, EPSILON_ID, UNK_ID, Vocabulary

KIND = "transformers:"
"""What precedes the name of a model of transformers where other models are named by their files."""

CASES = {
    "auto": "the one that takes the fewest tokens",
    "as-is": "as in the vocabulary",
    "lower": "lower case",
    "upper": "upper case",
}
"""How words are written for the network."""

_CACHE_BYTES = 1 << 30
# Words whose tokens are counted to choose the case.
_NUM_SAMPLED = 1000
_COST_OF_UNKNOWN = 10
_NO_TOKEN, _NOT_SPELLED = -1, -2
# Of longer spellings, the beginning counts.
_LONGEST_SPELLING = 32
# State columns before the tokens: generation and node of the tree, where the history was last found; number of tokens.
_GENERATION, _NODE, _NUM_TOKENS, _NUM_COLUMNS = range(4)
# The options of `load` that are of `TransformerNetwork`, and those that say where a tokenizer's files are, too.
_OPTIONS = ("case", "begin", "end", "unknown_score", "max_tokens", "cache_bytes")
_OPTIONS_OF_FILES = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_FILES = "config.json, model.safetensors, tokenizer.json and tokenizer_config.json"


class Spelling:
    """The tokens of each word, after other words; a word is spelled when it is first needed.

    Args:
        tokenizer: of the network, from transformers.
        vocabulary: the words.
        end: the tokens that end a sentence.
        case: a key of `CASES`.
    """

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary, end: Sequence[int], case: str) -> None:
        if case not in CASES:
            raise AsrError(f"case is {case!r}; it must be one of {', '.join(CASES)}.")
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self.end = list(end)
        sample = vocabulary.ordinary[:: max(1, len(vocabulary) // _NUM_SAMPLED)]

        def cost(choice: str) -> int:
            return sum(len(tokens) or _COST_OF_UNKNOWN for tokens in self._tokens_of(sample, choice))

        # The first of those that take as many tokens.
        self.case = min(("as-is", "lower", "upper"), key=cost) if case == "auto" else case
        self._table = np.full((len(vocabulary), 1), _NOT_SPELLED, dtype=np.int64)
        self._fill([EPSILON_ID, BOS_ID, EOS_ID, UNK_ID], [[], [], self.end, []])

    def __call__(self, word_id: Tensor) -> Tensor:
        """word_id (Q,) on the host -> tokens (Q, U), -1 beyond a spelling's end."""
        ids = word_id.numpy()
        new = np.unique(ids[self._table[ids, 0] == _NOT_SPELLED])
        if len(new):
            self._fill(new.tolist(), self._tokens_of([self._vocabulary.words[one] for one in new], self.case))
        tokens = self._table[ids]
        return torch.from_numpy(tokens[:, : max(1, int((tokens >= 0).sum(1).max(initial=0)))])

    def _fill(self, ids: Sequence[int], spellings: Sequence[Sequence[int]]) -> None:
        wider = max(map(len, spellings)) - self._table.shape[1]
        if wider > 0:
            self._table = np.pad(self._table, ((0, 0), (0, wider)), constant_values=_NO_TOKEN)
        for word_id, tokens in zip(ids, spellings, strict=True):
            self._table[word_id] = _NO_TOKEN
            self._table[word_id, : len(tokens)] = tokens

    def _tokens_of(self, words: Sequence[str], case: str) -> list[list[int]]:
        """The tokens of words after another word; none for a word that the tokenizer cannot write by itself."""
        convert = {"lower": str.lower, "upper": str.upper}.get(case, str)
        texts = [convert(text) for text in ("a", *(f"a {word}" for word in words))]
        (before, *tokens) = encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        # Characters that the tokenizer does not know are missing.
        read = self._tokenizer.batch_decode(encoded, clean_up_tokenization_spaces=False)
        is_whole = [_letters(one) == _letters(text) for one, text in zip(read, texts, strict=True)]
        return [
            one[len(before) :][:_LONGEST_SPELLING] if whole and one[: len(before)] == before else []
            for one, whole in zip(tokens, is_whole[1:], strict=True)
        ]


def _letters(text: str) -> str:
    return "".join(text.split()).casefold()


class TransformerNetwork(nn.Module, StatefulNetwork):
    """A causal Transformer as a `StatefulNetwork` over words.

    `<unk>` and words that the tokenizer cannot write have a constant score and are not read. Histories of more than M
    tokens continue from their last M / 2.

    Args:
        network: a causal language model of transformers, such as a `GPT2LMHeadModel`.
        tokenizer: that of the same checkpoint.
        vocabulary: the words.
        case: how words are written for the network, a key of `CASES`.
        begin: the token that every text begins with; the tokenizer's own if None.
        end: what ends a sentence, in tokens; if None, the tokenizer's token for the end of a text.
        unknown_score: the score of `<unk>` and of words that the tokenizer cannot write, natural log.
        max_tokens: M, or less if the network has fewer positions.
        cache_bytes: memory for what the network has computed.
        name: shown to users.

    Raises:
        AsrError: the network cannot be used in this way, or the tokenizer lacks a token.
    """

    has_exact_states = True

    def __init__(
        self,
        network: nn.Module,
        tokenizer: Any,
        vocabulary: Vocabulary,
        *,
        case: str = "auto",
        begin: int | None = None,
        end: Sequence[int] | None = None,
        unknown_score: float = -15.0,
        max_tokens: int = 128,
        cache_bytes: int = _CACHE_BYTES,
        name: str = "",
    ) -> None:
        super().__init__()
        self.name = name or type(network).__name__
        self.network = network.eval()
        self.vocabulary = vocabulary
        if end is None:
            end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        if begin is None:
            begin = next((one for one in (tokenizer.bos_token_id, *end) if one is not None), None)
        if begin is None or not end:
            raise AsrError(f"{self.name}: the tokenizer has no token that ends a text; give begin and end.")
        self._begin_id = begin
        self._spelling = Spelling(tokenizer, vocabulary, end, case)
        self._unknown_score = unknown_score
        # The tokens of a word that is scored come after those of a state, and the begin of the text before them.
        positions = getattr(network.config, "max_position_embeddings", None) or math.inf
        self._max_tokens = int(min(max_tokens, positions - _LONGEST_SPELLING - 1))
        if self._max_tokens < 2 * _LONGEST_SPELLING:
            raise AsrError(
                f"{self.name}: histories have at most {self._max_tokens} tokens; {2 * _LONGEST_SPELLING} or more are "
                "needed, so give a larger max_tokens or a network with more positions."
            )
        self.state_size = self.hidden_size = _NUM_COLUMNS + self._max_tokens
        self.num_history_words = 0
        self._cache_bytes = cache_bytes
        self._tree: TokenTree | None = None
        self._lock = threading.Lock()
        self._factor = TokenTree(self.network, begin, cache_bytes, self.name).checked_factor()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tree": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        self.forget()  # what is where the weights were
        return super()._apply(*arguments, **options)

    @property
    def case(self) -> str:
        """How words are written, a key of `CASES` but `auto`."""
        return self._spelling.case

    def forget(self) -> None:
        """Drops all that the network has computed; it is computed again when it is needed."""
        self._tree = None

    @property
    def num_tokens_read(self) -> int:
        """How many tokens have gone through the network since it was last moved or has last forgotten."""
        return 0 if self._tree is None else self._tree.num_read

    def initial_state(self) -> Tensor:
        """See `StatefulNetwork.initial_state`; states are on the CPU, wherever the weights are."""
        return torch.zeros(self.state_size)

    def step(self, state: Tensor, word_id: Tensor) -> Tensor:
        """See `StatefulNetwork.step`; the tokens are appended, and read when a word after them is first scored.

        A sentence that follows others begins with the end of the last one.
        """
        state = state.clone()
        with self._locked_tree() as tree:
            node = self._nodes(tree, state)
            tokens = self._spelling(word_id)
            tokens = torch.cat((tokens, tokens.new_full((len(tokens), len(self._spelling.end)), _NO_TOKEN)), dim=1)
            is_start = word_id == BOS_ID
            is_first = is_start & (state[:, _NUM_TOKENS] == 0)
            tokens[is_start & ~is_first, : len(self._spelling.end)] = torch.tensor(self._spelling.end)
            num_before = state[:, _NUM_TOKENS].long()
            num = (tokens >= 0).sum(1)
            is_full = (num_before + num > self._max_tokens).nonzero()[:, 0]
            for row in is_full.tolist():
                self._shorten(state[row], int(num[row]))
            num_before = state[:, _NUM_TOKENS].long()
            node[is_full] = self._walk(tree, state[is_full])
            for place, token in enumerate(tokens.unbind(1)):
                active = (token >= 0).nonzero()[:, 0]
                if not len(active):
                    break
                node[active] = tree.extended(node[active], token[active])
                state[active, _NUM_COLUMNS + num_before[active] + place] = token[active].float()
            state[:, _NUM_TOKENS] += num
            state[:, _GENERATION], state[:, _NODE] = tree.generation, node.float()
        return state

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """hidden (Q, S), states -> log_prob (Q,)."""
        with self._locked_tree() as tree:
            node, spelled = self._nodes(tree, hidden), self._spelling(word_id)
            nodes, tokens, queries = [], [], []
            active = torch.arange(len(word_id))
            for place, token in enumerate(spelled.unbind(1)):
                active = active[token[active] >= 0]
                nodes.append(node[active])
                tokens.append(token[active])
                queries.append(active)
                if place + 1 < spelled.shape[1]:
                    active = active[spelled[active, place + 1] >= 0]
                    node[active] = tree.extended(node[active], token[active])
            scores = tree.log_prob(torch.cat(nodes), torch.cat(tokens))
        total = torch.zeros(len(word_id)).index_add(0, torch.cat(queries), scores)
        total.masked_fill_(spelled[:, 0] < 0, self._unknown_score)
        return total.masked_fill_(word_id <= BOS_ID, -math.inf)

    @contextlib.contextmanager
    def _locked_tree(self) -> Iterator[TokenTree]:
        """The tree, for one thread at a time. If a call is interrupted, it may be half changed, and is dropped."""
        with self._lock:
            if self._tree is None:
                self._tree = TokenTree(self.network, self._begin_id, self._cache_bytes, self.name, self._factor)
            self._tree.make_room()
            try:
                yield self._tree
            except BaseException:
                self._tree = None
                raise

    def _nodes(self, tree: TokenTree, state: Tensor) -> Tensor:
        """The nodes (Q,) of states (Q, S); those that the tree has forgotten are created again."""
        node = state[:, _NODE].long()
        lost = (state[:, _GENERATION] != tree.generation).nonzero()[:, 0]
        node[lost] = self._walk(tree, state[lost])
        return node

    @staticmethod
    def _walk(tree: TokenTree, state: Tensor) -> Tensor:
        """The nodes (Q,) of states (Q, S), found token by token."""
        node = torch.full((len(state),), ROOT)
        num = state[:, _NUM_TOKENS].long()
        for place in range(int(num.max()) if len(num) else 0):
            active = (num > place).nonzero()[:, 0]
            node[active] = tree.extended(node[active], state[active, _NUM_COLUMNS + place].long())
        return node

    def _shorten(self, state: Tensor, num_new: int) -> None:
        """Drops the oldest tokens of a state (S,), in place, so that this many more fit."""
        num_kept = max(0, min(self._max_tokens // 2, self._max_tokens - num_new))
        num = int(state[_NUM_TOKENS])
        kept = state[_NUM_COLUMNS + num - num_kept : _NUM_COLUMNS + num].clone()
        state[_NUM_COLUMNS:] = 0.0
        state[_NUM_COLUMNS : _NUM_COLUMNS + num_kept] = kept
        state[_NUM_TOKENS] = num_kept


def is_transformer(source: object) -> bool:
    """Whether a language model is named as one of transformers, `transformers:NAME`."""
    return isinstance(source, (str, Path)) and str(source).startswith(KIND)


def without_kind(source: str | Path) -> str:
    """The folder or hub name of a model that may be named `transformers:NAME`; other names stay."""
    return str(source).removeprefix(KIND)


def load(name: str, vocabulary: Vocabulary, **options: Any) -> TransformerNetwork:
    """Loads a causal language model of a hub name or a local folder; no code in it is run.

    Args:
        name: as `AutoModelForCausalLM.from_pretrained` takes it, with or without `transformers:` in front of it.
        vocabulary: the words.
        options: of `TransformerNetwork`, or else passed on to `from_pretrained` (`dtype`, `revision`, ...).

    Raises:
        AsrError: the package is missing, or the model is neither on this machine nor can it be downloaded, is damaged
            or not a causal language model, or as for `TransformerNetwork`.
    """
    name = without_kind(name)
    transformers = package("transformers", f"{KIND}{name}")
    ours = {key: options.pop(key) for key in [*options] if key in _OPTIONS}
    options["trust_remote_code"] = False
    try:
        network, info = transformers.AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **options)
        where = {option: options[option] for option in _OPTIONS_OF_FILES if option in options}
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False, **where)
    except Exception as error:  # of any class, if a file is damaged
        cure = "the folder must have" if Path(name).is_dir() else "without a network connection, give a folder with"
        raise AsrError(
            f"{KIND}{name}: the language model cannot be loaded ({in_one_line(error)}); {cure} {_FILES}."
        ) from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise AsrError(
            f"{KIND}{name}: the checkpoint lacks {len(missing)} weights of the network ({missing[0]}, ...); give one "
            "that was trained as a causal language model."
        )
    return TransformerNetwork(network, tokenizer, vocabulary, name=f"{KIND}{name}", **ours)
