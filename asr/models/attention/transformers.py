"""Encoder-decoders of transformers with their feature extractors and tokenizers: hub name or local folder.

They are Whisper, Moonshine, Speech2Text, Canary, Cohere's and others (`AutoModelForSpeechSeq2Seq`) whose decoders read
the encoder's output by cross-attention.

Shapes: N utterances, L samples, T frames, E encoder dimensions, P tokens of a prompt, K hypotheses, C tokens.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asr.errors import AsrError
from asr.models.attention.base import AttentionModel
from asr.models.attention.cross_attention import CrossAttention
from asr.models.external.base import named
from asr.models.external.encoder import TorchEncoder
from asr.models.external.transformers import (
    MASKS,
    TOLERANCE,
    AudioReader,
    class_by_type,
    load_parts,
    mask_in,
    num_frames_of,
    tokens_of,
)
from asr.options import require_type

_MAPPINGS = {"AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"}
# What texts are written after, if neither the caller nor the configuration says so.
_NEEDS_PROMPT = ("canary", "cohere_asr")
# Of the decoder's positions, by names that networks have for them; else as many as Whisper's.
_LIMITS = ("max_target_positions", "max_position_embeddings")
_MOST_TOKENS = 448
# Of languages, times and other things that are not said.
_MARK = re.compile(r"<.*>")
# Of Whisper.
_LANGUAGE = re.compile(r"<\|[a-z]{2,3}\|>")
_START = "<|startoftranscript|>"
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
_TASKS = ("translate", "transcribe")
_ENGLISH_VOCAB_SIZE = 51864


class _State(NamedTuple):
    """What K hypotheses have read.

    Attributes:
        cache: keys and values of the decoder's layers, K rows.
        utt: (K,) which of the encoded utterances each row is of.
        encoded: the encoder's output of all utterances, and of one after it has been read.
        mask: (K, T) which frames are used, or None for all.
        no_speech: (N,) the probability that nobody speaks, after the prompt, or None.
    """

    cache: Any
    utt: Tensor
    encoded: Tensor
    mask: Tensor | None
    no_speech: Tensor | None = None


class TransformersAttentionModel(AudioReader, TorchEncoder, AttentionModel):
    """An encoder-decoder of transformers.

    Args:
        network: an `AutoModelForSpeechSeq2Seq` whose decoder reads the encoder's output by cross-attention.
        feature_extractor: that of the same checkpoint.
        tokenizer: that of the same checkpoint.
        name: shown to users.
        language: of the speech, such as `en`, for networks of several; None for that of the generation configuration,
            or else to find out.
        task: `transcribe`, or `translate` into English, for networks that do both; None for that of the generation
            configuration, or else `transcribe`.
        prompt: the text of the tokens that texts are written after, such as `<|startoftranscript|>`; by default,
            those of the network's configuration.

    Raises:
        AsrError: the network is no such encoder-decoder, it has no such language or task, the tokenizer's ids do not
            fit its columns, or the feature extractor is not one of audio.
    """

    def __init__(
        self,
        network: nn.Module,
        feature_extractor: Any,
        tokenizer: Any,
        name: str = "",
        *,
        language: str | None = None,
        task: str | None = None,
        prompt: str | None = None,
    ) -> None:
        super().__init__(network, feature_extractor, name)
        config = self.network.config
        if not getattr(config, "is_encoder_decoder", False):
            raise AsrError(
                f"{self.name}: the decoder of this network reads audio and text in one sequence; give one with an "
                "encoder and cross-attention, such as Whisper."
            )
        # Whisper reads windows of 30 s.
        window = getattr(feature_extractor, "n_samples", None)
        if window is not None:
            self.padding = "max_length"
            self.max_seconds = window / self.sampling_rate
        with named(self.name):
            for key, value in {"language": language, "task": task, "prompt": prompt}.items():
                require_type(value, str | None, key, "text, or None")
            generation = self.network.generation_config
            end = _named_token(self.network, "eos_token_id")
            if end is None:
                raise AsrError("its configuration has no eos_token_id, the end of a text; add it to config.json")
            num_columns = int(self.network.get_output_embeddings().out_features)
            marks = {id for symbol, id in tokenizer.get_added_vocab().items() if _MARK.fullmatch(symbol)}
            marks.update(tokenizer.all_special_ids)
            self.tokens = tokens_of(tokenizer, num_columns, end, self.name, marks - {end})
            is_text = torch.tensor([self.tokens.is_text(entry) for entry in range(num_columns)])
            self._must_not = torch.zeros(num_columns, dtype=torch.bool)
            self._must_not[self.tokens.columns] = ~is_text
            self._must_not[_within(getattr(generation, "suppress_tokens", None), num_columns)] = True
            self._must_not[end] = False
            self._not_first = self._must_not.clone()
            self._not_first[_within(getattr(generation, "begin_suppress_tokens", None), num_columns)] = True
            self._prompt = _Prompt.of(self.network, tokenizer, language, task, prompt)
            self._no_speech = self._place_of_silence(tokenizer)
            # A language that is found out is not among them yet.
            num_prompts = len(self._prompt.tokens) + bool(self._prompt.languages)
            self.max_tokens = self._longest() - num_prompts
            if self.max_tokens < 1:
                raise AsrError(
                    f"the prompt has {num_prompts} tokens, but the decoder reads {self._longest()} with the text; "
                    "give a shorter one"
                )
            parameters = inspect.signature(inspect.unwrap(type(self.network).forward)).parameters
            self._cache_name = "cache" if "cache" in parameters else "past_key_values"
            self._heads = CrossAttention(self.network)
        self.frame_shift, self._units_of_frame = self._measured()

    @property
    def is_masked(self) -> bool:
        # Whisper's feature extractor makes a mask if it is asked to, in spite of its configuration.
        return self.max_seconds is not None or super().is_masked

    def encode(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        if self.max_seconds is not None and num_samples.max() > self.max_seconds * self.sampling_rate:
            seconds = float(num_samples.max()) / self.sampling_rate
            raise AsrError(
                f"{self.name}: an utterance has {seconds:.1f} s, but the network reads at most {self.max_seconds:g} s; "
                "cut it at a pause."
            )
        return self.read(waveform, num_samples)

    def run_network(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        mask = mask_in(inputs)
        features = next(value for name, value in inputs.items() if name not in MASKS)
        output = self.network.get_encoder()(features, **({} if mask is None else {"attention_mask": mask}))
        encoded: Tensor = output.last_hidden_state
        own = getattr(output, "attention_mask", None)
        if own is not None:
            return encoded, own.long().sum(-1).cpu()
        return encoded, num_frames_of(self.network, mask, *encoded.shape[:2])

    def prompt(self, encoded: Tensor, num_frames: Tensor) -> Tensor:
        prompt = torch.tensor(self._prompt.tokens, device=encoded.device).expand(len(encoded), -1)
        languages, place = self._prompt.languages, self._prompt.place
        if not languages:
            return prompt
        logits, _ = self._read(prompt[:, :place], self._new_state(encoded, num_frames))
        allowed = torch.tensor(languages, device=logits.device)
        found = allowed[logits[:, -1, allowed].argmax(1)]
        return torch.cat([prompt[:, :place], found[:, None], prompt[:, place:]], 1)

    def start(self, encoded: Tensor, num_frames: Tensor, prompt: Tensor) -> tuple[Tensor, _State]:
        logits, state = self._read(prompt, self._new_state(encoded, num_frames))
        if self._no_speech is not None:
            place, column = self._no_speech
            state = state._replace(no_speech=logits[:, place].float().softmax(1)[:, column])
        return logits[:, -1].float().masked_fill(self._not_first.to(logits.device), -torch.inf), state

    def no_speech(self, state: _State) -> Tensor | None:
        return state.no_speech

    def step(self, token: Tensor, source: Tensor, state: _State) -> tuple[Tensor, _State]:
        utt = state.utt[source]
        state.cache.self_attention_cache.reorder_cache(source)
        if not torch.equal(utt, state.utt):
            state.cache.cross_attention_cache.reorder_cache(source)
            state = state._replace(utt=utt, mask=None if state.mask is None else state.mask[source])
        logits, state = self._read(token[:, None], state)
        return logits[:, -1].float().masked_fill(self._must_not.to(logits.device), -torch.inf), state

    def attention(self, encoded: Tensor, num_frames: Tensor, prompt: Tensor, token: Tensor) -> Tensor | None:
        if not self._heads.of_layer:
            return None
        state = self._new_state(encoded, num_frames)
        with self._heads.watched() as seen:
            self._read(torch.cat([prompt, token], 1), state)
        mask = torch.arange(encoded.shape[1]) < num_frames[:, None]
        return self._heads.weights(seen, mask.to(self.device))[:, :, prompt.shape[1] - 1 :]

    @functools.cached_property
    def reads_lengths(self) -> bool:
        """Whether the decoder leaves out padding, or should not, as in a window; found out with noise."""
        if self.max_seconds is not None:
            return True
        encoded = torch.randn(2, 8, self._width, generator=torch.Generator().manual_seed(0))
        encoded = encoded.to(next(self.network.parameters()))
        num_frames, prompt = torch.tensor([8, 5]), torch.tensor(self._prompt.tokens, device=self.device).expand(2, -1)
        with torch.no_grad():
            both, _ = self._read(prompt, self._new_state(encoded, num_frames))
            alone, _ = self._read(prompt[:1], self._new_state(encoded[1:, :5], num_frames[1:]))
        eps = torch.finfo(encoded.dtype).eps
        return bool((both[1, -1] - alone[0, -1]).abs().max() < max(TOLERANCE, 16.0 * eps))

    def _place_of_silence(self, tokenizer: Any) -> tuple[int, int] | None:
        """After which token of the prompt Whisper tells whether nobody speaks, and the column of the token for it."""
        marks, prompt = tokenizer.get_added_vocab(), self._prompt.tokens
        column = next((marks[mark] for mark in _NO_SPEECH if mark in marks), None)
        start = marks.get(_START)
        if column is None or start not in prompt:
            return None
        return len(prompt) - 1 - prompt[::-1].index(start), column

    def _new_state(self, encoded: Tensor, num_frames: Tensor) -> _State:
        from transformers import DynamicCache, EncoderDecoderCache

        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        mask = None
        if int(num_frames.min()) < encoded.shape[1] and self.max_seconds is None:
            mask = torch.arange(encoded.shape[1]) < num_frames[:, None]
            mask = mask.long().to(encoded.device)
        utt = torch.arange(len(encoded), device=encoded.device)
        return _State(cache, utt, encoded.to(next(self.network.parameters())), mask)

    def _read(self, token: Tensor, state: _State) -> tuple[Tensor, _State]:
        """Reads tokens (K, U) -> logits (K, U, C) of the next ones."""
        # After the first call, keys and values of the encoder's output are in the cache, and only its shape counts.
        encoded = state.encoded if len(state.encoded) == len(token) else state.encoded.expand(len(token), -1, -1)
        masks: dict[str, Any] = {}
        if state.mask is not None:
            masks["attention_mask"] = state.mask.repeat_interleave(self._units_of_frame, 1)
        output = self.network(
            encoder_outputs=_as_output(encoded, state.mask),
            decoder_input_ids=token,
            use_cache=True,
            **{self._cache_name: state.cache},
            **masks,
        )
        logits: Tensor = output.logits
        return logits, state._replace(encoded=state.encoded[:1])

    def _measured(self) -> tuple[float, int]:
        """Seconds from one frame to the next, and how many units of the encoder's input (samples, frames) are one."""
        seconds = 4.0 if self.max_seconds is None else min(4.0, self.max_seconds / 2)
        num_samples = int(seconds * self.sampling_rate)
        noise = 0.01 * torch.randn(1, 2 * num_samples, generator=torch.Generator().manual_seed(0))
        counts = []
        for num in (num_samples, 2 * num_samples):
            inputs = self.inputs_of(noise[:, :num], torch.tensor([num]))
            mask = mask_in(inputs)
            with torch.no_grad(), self._named():
                encoded, num_frames = self.run_network(inputs)
            counts.append((int(num_frames[0]), 0 if mask is None else int(mask.sum())))
        self._width = encoded.shape[2]
        (fewer, short), (more, long) = counts
        added = max(1, more - fewer)
        return seconds / added, max(1, round((long - short) / added))

    def _longest(self) -> int:
        """The most tokens that the decoder can read, and no more than are useful."""
        config = self.network.config
        configs = [config, *(getattr(config, name, None) for name in ("decoder", "decoder_config"))]
        found = [getattr(each, name, None) for each in configs for name in _LIMITS]
        return min([each for each in found if isinstance(each, int)], default=_MOST_TOKENS)


class _Prompt(NamedTuple):
    """The tokens that texts are written after.

    Attributes:
        tokens: the tokens, without that of a language that has to be found out.
        languages: the tokens of all languages if it has to, else empty.
        place: where the language stands.
    """

    tokens: list[int]
    languages: tuple[int, ...] = ()
    place: int = 1

    @classmethod
    def of(cls, network: Any, tokenizer: Any, language: str | None, task: str | None, prompt: str | None) -> _Prompt:
        """The prompt of a network with what the caller of `TransformersAttentionModel` wants.

        Raises:
            AsrError: it needs a prompt, or has no such language or task.
        """
        config, generation = network.config, network.generation_config
        if prompt is not None:
            if language is not None or task is not None:
                raise AsrError("a prompt decides on language and task; leave those out")
            given = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
            if not given:
                raise AsrError("the prompt has no tokens; give the text of one or more, or leave it out")
            return cls(given)
        if config.model_type in _NEEDS_PROMPT:
            raise AsrError(
                f"{config.model_type} writes texts after a prompt, which names the language; give the text of "
                "its tokens as prompt."
            )
        start = _named_token(network, "decoder_start_token_id")
        if start is None:
            raise AsrError("its configuration has no decoder_start_token_id; give the text of that token as prompt")
        # That of the language may be null.
        forced = [token for _, token in getattr(generation, "forced_decoder_ids", None) or () if token is not None]
        languages, tasks, no_times = _choices(network, tokenizer)
        if not languages:
            for wish in (language, task):
                if wish is not None:
                    raise AsrError(f"this network has neither languages nor tasks to choose; leave out {wish!r}")
            first = getattr(generation, "forced_bos_token_id", None)
            tokens: list[int] = [start, *forced, *(() if first is None else (first,))]
        else:
            task = getattr(generation, "task", None) if task is None else task
            language = getattr(generation, "language", None) if language is None else language
            is_set = task is not None or language is not None
            named_task = next((token for token in forced if token in tasks.values() and not is_set), None)
            if named_task is None:
                task = task or "transcribe"
                if task not in tasks:
                    raise AsrError(f"there is no task {task!r}; give one of {', '.join(tasks)}")
                named_task = tasks[task]
            tokens = [start, named_task]
        if no_times is not None and no_times not in tokens:
            tokens.append(no_times)
        if not languages:
            return cls(tokens)
        if language is None:
            token = next((token for token in forced if token in languages.values() and not is_set), None)
        else:
            token = languages.get(f"<|{_code_of(language)}|>")
            if token is None:
                known = ", ".join(sorted(each.strip("<|>") for each in languages))
                raise AsrError(f"there is no language {language!r}; give one of {known}")
        if token is None:
            return cls(tokens, tuple(languages.values()))
        return cls([tokens[0], token, *tokens[1:]])


def _choices(network: Any, tokenizer: Any) -> tuple[dict[str, int], dict[str, int], int | None]:
    """The tokens of languages and tasks, and the one of texts without times.

    Checkpoints of Whisper without a generation configuration, or with an old one, have them in the tokenizer only.
    """
    config, generation = network.config, network.generation_config
    languages: dict[str, int] = getattr(generation, "lang_to_id", None) or {}
    tasks: dict[str, int] = getattr(generation, "task_to_id", None) or {}
    no_times: int | None = getattr(generation, "no_timestamps_token_id", None)
    if config.model_type != "whisper":
        return languages, tasks, no_times
    marks = tokenizer.get_added_vocab()
    no_times = marks.get("<|notimestamps|>") if no_times is None else no_times
    is_multilingual = getattr(generation, "is_multilingual", None)
    # English-only networks have the tokens of languages, too, but were not trained with them.
    if is_multilingual or (is_multilingual is None and config.vocab_size != _ENGLISH_VOCAB_SIZE):
        languages = languages or {symbol: id for symbol, id in marks.items() if _LANGUAGE.fullmatch(symbol)}
        tasks = tasks or {task: marks[f"<|{task}|>"] for task in _TASKS if f"<|{task}|>" in marks}
    return languages, tasks, no_times


def _code_of(language: str) -> str:
    """The code of a language that is given as a code, a token or an English name."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    name = language.lower().strip("<|>")
    return str(TO_LANGUAGE_CODE.get(name, name))


def _as_output(encoded: Tensor, mask: Tensor | None) -> Any:
    """Encoded frames and their mask as an encoder of transformers returns them."""
    from transformers.modeling_outputs import BaseModelOutput

    output = BaseModelOutput(last_hidden_state=encoded)
    output.attention_mask = mask
    return output


def _named_token(network: Any, name: str) -> Any:
    """The token, or the first of several, that the generation configuration, or else the configuration, names."""
    for config in (network.generation_config, network.config):
        value = getattr(config, name, None)
        if value is not None:
            return value[0] if isinstance(value, Sequence) else value
    return None


def _within(tokens: Sequence[int] | None, num_columns: int) -> list[int]:
    """Those of some tokens that are columns; configurations may name others."""
    return [token for token in tokens or () if 0 <= token < num_columns]


def load(name: str, **options: Any) -> TransformersAttentionModel:
    """Loads the network of a hub name or a local folder.

    Args:
        name: the name.
        options: `language`, `task` and `prompt`, see `TransformersAttentionModel`; others are passed on to
            `from_pretrained`.

    Raises:
        AsrError: the network is neither on this machine nor can it be downloaded, it is no encoder-decoder, the
            checkpoint lacks some of its weights, or it needs code of its own.
    """
    own = {key: options.pop(key) for key in ("language", "task", "prompt") if key in options}
    cure = "give one that was trained as an encoder-decoder"
    # The same class also reads networks with audio and text in one sequence.
    auto_class = class_by_type(
        name, _MAPPINGS, "encoder-decoder", lambda config: getattr(config, "is_encoder_decoder", True)
    )
    parts = load_parts(name, auto_class, cure, options)
    return TransformersAttentionModel(*parts, f"transformers:{name}", **own)
