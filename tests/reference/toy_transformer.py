"""A small causal Transformer of transformers with random weights, its tokenizer, and scores of whole texts.

Import it only where transformers and tokenizers are installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import nn

TEXT = ["the quick brown fox jumps over a lazy dog", "don't the fox and the dog quickly jump", "a brown dog", "zest"]
END = "<|endoftext|>"


def tokenizer_of(marks: str = "bytes") -> Any:
    """A tokenizer of lower-case letters and common pieces; spaces are marked as in GPT-2 or as in Llama."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    if marks == "bytes":
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=80, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator([*TEXT, "transubstantiate zyx"], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)


TOKENIZER = tokenizer_of()
SIZE = len(TOKENIZER)
SMALL = {"vocab_size": SIZE, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **SMALL),
    "llama": lambda: transformers.LlamaConfig(intermediate_size=48, num_key_value_heads=2, **LAYERS, **SMALL),
    "granite": lambda: transformers.GraniteConfig(
        intermediate_size=48, num_key_value_heads=2, logits_scaling=4.0, **LAYERS, **SMALL
    ),
    "gptj": lambda: transformers.GPTJConfig(
        n_embd=32, n_layer=2, n_head=4, n_positions=128, rotary_dim=4, tie_word_embeddings=False, **SMALL
    ),
    "opt": lambda: transformers.OPTConfig(ffn_dim=48, word_embed_proj_dim=32, **LAYERS, **SMALL),
}


def model_of(kind: str = "llama", scale: float = 8.0) -> nn.Module:
    """A network whose random weights are large enough for distributions that are far from uniform."""
    torch.manual_seed(1)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
        bias = getattr(model.get_output_embeddings(), "bias", None)  # type: ignore[operator]
        if bias is not None:
            bias.normal_()
    return model


def tokens_of(words: Sequence[str]) -> list[list[int]]:
    """The tokens of words."""
    return [TOKENIZER(" " + word.lower(), add_special_tokens=False)["input_ids"] for word in words]


@torch.no_grad()
def whole_text(model: nn.Module, tokens: Sequence[int], begin: int) -> float:
    """The score of the tokens from `begin` on, in one text."""
    log_prob = model(torch.tensor([tokens])).logits.float().log_softmax(-1)[0]
    return sum(float(log_prob[place - 1, tokens[place]]) for place in range(begin, len(tokens)))


def expected(model: nn.Module, sentence: Sequence[str]) -> float:
    """The score of a sentence of upper-case words, with its end."""
    return whole_text(model, [0, *(token for word in tokens_of(sentence) for token in word), 0], 1)


def saved(folder: Path) -> Path:
    """Writes the network and the tokenizer as transformers does."""
    model_of().save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    return folder
