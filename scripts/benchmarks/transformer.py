"""Trains a small causal Transformer (Llama's layers) from texts, to be used as `--rnn-lm transformers:FOLDER`.

Rows of 64 tokens begin with a sentence, as histories do in the search; tokens are pieces of lower-case words. Matrices
are trained by Muon (Jordan et al., 2024), embeddings and norms by AdamW. An interrupted training continues.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asr.text.documents import open_text
from scripts.benchmarks.inputs import argument_parser

_END = "<|endoftext|>"
_ROW, _BATCH = 64, 64
_VOCABULARY = 4096
_MUON_RATE, _ADAM_RATE = 0.02, 0.003
_WARM_UP = 200
_SAVE_EVERY = 500
_LINES_AT_ONCE = 100_000


def main(arguments: Sequence[str]) -> int:
    parser = argument_parser("transformer", __doc__)
    parser.add_argument("--text", nargs="+", required=True, type=Path, help="files with one sentence per line")
    parser.add_argument("--transcripts", nargs="+", default=[], type=Path, help="files with lines 'utterance-id WORDS'")
    parser.add_argument("--output", required=True, type=Path, help="folder for network and tokenizer")
    parser.add_argument("--steps", type=int, default=8000, help="batches of 4,096 tokens (default: 8000)")
    parser.add_argument("--width", type=int, default=256, help="of the layers (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="number of layers (default: 4)")
    args = parser.parse_args(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    lines = itertools.chain(_lines(args.text, False), _lines(args.transcripts, True))
    tokenizer = _tokenizer(args.output, itertools.islice(lines, 0, None, 10))
    texts = [
        _Rows(tokenizer, _lines(paths, has_id))
        for paths, has_id in ((args.text, False), (args.transcripts, True))
        if paths
    ]
    _train(_network(args.width, args.layers), texts, args.steps, args.output)
    return 0


def _lines(paths: Sequence[Path], has_id: bool) -> Iterator[str]:
    for path in paths:
        with open_text(path, "text") as file:
            for line in file:
                text = line.decode("utf-8").lower().strip()
                yield text.partition(" ")[2] if has_id else text


def _tokenizer(folder: Path, sample: Iterator[str]) -> Any:
    """The tokenizer in a folder, or a new one, trained on some lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        made.decoder = decoders.ByteLevel()
        made.train_from_iterator(sample, trainers.BpeTrainer(vocab_size=_VOCABULARY, special_tokens=[_END]))
        PreTrainedTokenizerFast(tokenizer_object=made, bos_token=_END, eos_token=_END).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


class _Rows:
    """A text as tokens; each sentence begins with the token of its end."""

    def __init__(self, tokenizer: Any, lines: Iterator[str]) -> None:
        sentences = []
        while block := list(itertools.islice(lines, _LINES_AT_ONCE)):
            encoded = tokenizer(block, add_special_tokens=False)["input_ids"]
            sentences += [np.array([tokenizer.bos_token_id, *one], dtype=np.uint16) for one in encoded]
        begin = np.cumsum([0, *map(len, sentences)])[:-1]
        self.token = np.concatenate(sentences)
        self.begin = begin[begin < len(self.token) - _ROW - 1]

    def draw(self, generator: np.random.Generator, num: int) -> list[Any]:
        """Rows (_ROW + 1,), each from the beginning of a sentence on."""
        return [self.token[at : at + _ROW + 1].astype(np.int64) for at in generator.choice(self.begin, num)]


def _network(width: int, num_layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 32 * 32,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(1)
    return LlamaForCausalLM(config)


def _train(network: Any, texts: Sequence[_Rows], num_steps: int, folder: Path) -> None:
    matrices = [part for name, part in network.named_parameters() if part.ndim == 2 and "embed" not in name]
    chosen = {id(part) for part in matrices}
    others = [part for part in network.parameters() if id(part) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=_MUON_RATE, weight_decay=0.0),
        torch.optim.AdamW(others, lr=_ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    state, first = folder / "training.pt", 0
    if state.is_file():
        kept = torch.load(state, weights_only=True)
        network.load_state_dict(kept["network"])
        for optimizer, one in zip(optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(one)
        first = kept["step"]
    begin, total = time.perf_counter(), 0.0
    for step in range(first, num_steps):
        done = step / num_steps
        scale = min(1.0, (step + 1) / _WARM_UP) * min(1.0, (1 - done) / 0.7)
        for optimizer, rate in zip(optimizers, (_MUON_RATE, _ADAM_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
        loss = _loss(network, _batch(texts, np.random.default_rng(step), done))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        total += loss.item()
        if (step + 1) % 50 == 0:
            seconds = (time.perf_counter() - begin) / 50
            print(f"step {step + 1} of {num_steps}: loss {total / 50:.3f}, {seconds:.2f} s a step", flush=True)
            begin, total = time.perf_counter(), 0.0
        if (step + 1) % _SAVE_EVERY == 0 or step + 1 == num_steps:
            network.save_pretrained(folder)
            parts = [optimizer.state_dict() for optimizer in optimizers]
            torch.save({"network": network.state_dict(), "optimizers": parts, "step": step + 1}, state)


def _batch(texts: Sequence[_Rows], generator: np.random.Generator, done: float) -> Tensor:
    """Rows (_BATCH, _ROW + 1); a twelfth of them are transcripts, and a third towards the end."""
    num_last = 0 if len(texts) == 1 else int(_BATCH * (0.08 if done < 0.7 else 0.35))
    rows = texts[0].draw(generator, _BATCH - num_last) + texts[-1].draw(generator, num_last)
    return torch.from_numpy(np.stack(rows))


def _loss(network: Any, rows: Tensor) -> Tensor:
    """The mean negative log-probability of a token; products are of bfloat16 numbers."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(input_ids=rows[:, :-1]).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
