"""Encoder-decoders of transformers: tiny random ones in its own format."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asr.attention import AttentionDecoder
from asr.errors import AsrError
from asr.models.attention import load_attention_model
from asr.models.attention.cross_attention import CrossAttention
from asr.models.attention.transformers import TransformersAttentionModel, _as_output
from asr.models.external.transformers import tokens_of
from asr.text.byte_pieces import from_gpt2
from tests.models.external_audio import noise, write_foreign_code

pytestmark = pytest.mark.slow

SYMBOLS = ["<unk>", "<s>", "</s>", "<pad>", "▁a", "b", "c", "▁d", "e", "▁f"]
KINDS = ["Whisper", "Moonshine", "Speech2Text", "Canary"]
# Its mask of the encoder's output lacks a frame.
ALL_KINDS = [*KINDS, "SpeechEncoderDecoder"]
LIMIT = 20
WIDE = {"token_min_log_prob": -1e9, "max_tokens_per_second": 1e9}
BATCH = [noise(0.6, 1), noise(0.3, 2), noise(1.0, 3)]
LANGUAGES = ["<|en|>", "<|de|>"]
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", *LANGUAGES, "<|translate|>", "<|transcribe|>", "<|notimestamps|>"]
SPECIAL += ["<|0.00|>", "<|0.02|>"]


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def tokenizer(transformers: Any, kind: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    if kind == "Whisper":
        characters = [*pre_tokenizers.ByteLevel.alphabet()]
        pieces = {piece: number for number, piece in enumerate([*sorted(characters), "Ġa", "ab", "Ġab"])}
        made = transformers.WhisperTokenizer(vocab=pieces, merges=[("Ġ", "a"), ("a", "b"), ("Ġa", "b")])
        made.add_tokens([AddedToken(token, special="." not in token) for token in SPECIAL], special_tokens=False)
        return made
    pieces = Tokenizer(models.Unigram([(symbol, -float(n)) for n, symbol in enumerate(SYMBOLS)], unk_id=0))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    marks = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, **marks)


def speech_encoder_decoder(transformers: Any, vocab_size: int, **marks: int) -> Any:
    encoder = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(16,) * 7,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    decoder = transformers.MBartConfig(
        vocab_size=vocab_size, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=16,
        max_position_embeddings=40, is_decoder=True, add_cross_attention=True,
    )  # fmt: skip
    config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    for name, value in marks.items():
        setattr(config, name, value)
    made = transformers.SpeechEncoderDecoderModel(config=config)
    made.generation_config.forced_eos_token_id = None  # at the limit, at no cost
    return made


def network(transformers: Any, kind: str, seed: int = 0) -> Any:
    """A network whose output depends on the audio and on the tokens so far."""
    torch.manual_seed(seed)
    own = tokenizer(transformers, kind)
    marks = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "decoder_start_token_id": 1}
    if kind == "Whisper":
        end, start = own.convert_tokens_to_ids(SPECIAL[:2])
        marks = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    sizes = {
        "Whisper": {
            "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_source_positions": 100,
            "max_target_positions": 40, "num_mel_bins": 80,
        },
        "Moonshine": {
            "hidden_size": 32, "intermediate_size": 16, "encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2, "max_position_embeddings": 40,
        },
        "Speech2Text": {
            "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_target_positions": 40,
            "conv_channels": 16, "input_feat_per_channel": 80,
        },
        "Canary": {
            "decoder_config": {
                "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 40, "vocab_size": len(own),
            },
            "encoder_config": {
                "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
                "conv_kernel_size": 3, "subsampling_conv_channels": 32, "num_mel_bins": 80, "subsampling_factor": 4,
            },
        },
    }  # fmt: skip
    if kind == "SpeechEncoderDecoder":
        made = speech_encoder_decoder(transformers, vocab_size=len(own), **marks)
    else:
        config = getattr(transformers, f"{kind}Config")(vocab_size=len(own), **marks, **sizes[kind])
        made = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    for weight in made.parameters():
        if weight.dim() > 1:
            weight.data.normal_(std=2.0 * weight[0].numel() ** -0.5)
    made.get_output_embeddings().weight.data[marks["eos_token_id"]] *= 2.5  # texts end sooner or later
    for name, value in marks.items():
        setattr(made.generation_config, name, value)
    made.generation_config.suppress_tokens = [0, 1, 3]
    if kind == "Whisper":
        generation = made.generation_config
        generation._from_model_config = False
        ids = dict(zip(SPECIAL, own.convert_tokens_to_ids(SPECIAL), strict=True))
        generation.lang_to_id = {each: ids[each] for each in LANGUAGES}
        generation.task_to_id = {task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")}
        generation.no_timestamps_token_id = ids["<|notimestamps|>"]
        generation.is_multilingual = True
        generation.suppress_tokens = [*(ids[each] for each in SPECIAL[1:]), 3, 4]
        generation.begin_suppress_tokens = [ids[SPECIAL[0]], 5]
    return made.eval()


def extractor(transformers: Any, kind: str) -> Any:
    if kind == "Whisper":
        return transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=2)
    if kind in ("Moonshine", "SpeechEncoderDecoder"):
        return transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    if kind == "Speech2Text":
        return transformers.Speech2TextFeatureExtractor()
    return transformers.ParakeetFeatureExtractor()


def model(transformers: Any, kind: str, seed: int = 0, **options: Any) -> TransformersAttentionModel:
    parts = network(transformers, kind, seed), extractor(transformers, kind), tokenizer(transformers, kind)
    if kind == "Canary":
        options = {"prompt": "<s>ab", **options}
    return TransformersAttentionModel(*parts, **options)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_the_network(transformers: Any, kind: str) -> None:
    own = model(transformers, kind)
    labels = torch.tensor([[4, 5, 8, 5], [6, 4, 4, 9], [8, 6, 5, 4]])
    encoded, num_frames = own(BATCH)
    prompt = own.prompt(encoded, num_frames)
    logits, state = own.start(encoded, num_frames, prompt)
    found = [logits]
    for token in labels.T:
        logits, state = own.step(token, torch.arange(3), state)
        found.append(logits)
    scores = torch.stack(found, 1)
    for row, utterance in enumerate(BATCH):
        inputs = own.inputs_of(utterance[None], torch.tensor([len(utterance)]))
        decoder_input_ids = torch.cat([prompt[row], labels[row]])[None]
        wanted = own.network(**inputs, decoder_input_ids=decoder_input_ids).logits[0, prompt.shape[1] - 1 :]
        may = ~scores[row].isinf()
        assert may.sum() > 20
        assert torch.allclose(scores[row][may], wanted[may], atol=1e-4)
    assert scores.clamp(min=-50).std(0).mean() > 0.01 and scores.clamp(min=-50).std(1).mean() > 0.01


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_rows_may_be_repeated_exchanged_and_left_out(transformers: Any, kind: str) -> None:
    own = model(transformers, kind)
    encoded, num_frames = own(BATCH)
    prompt = own.prompt(encoded, num_frames)

    def alone(utt: int, *tokens: int) -> Tensor:
        num = num_frames[utt, None] if own.max_seconds is None else torch.tensor([encoded.shape[1]])
        logits, state = own.start(encoded[utt, None, : int(num)], num, prompt[utt, None])
        for token in tokens:
            logits, state = own.step(torch.tensor([token]), torch.tensor([0]), state)
        return logits[0]

    _, state = own.start(encoded, num_frames, prompt)
    _, state = own.step(torch.tensor([4, 5, 6, 6]), torch.tensor([0, 0, 1, 2]), state)
    logits, state = own.step(torch.tensor([8, 9, 4, 4]), torch.tensor([1, 0, 2, 3]), state)
    wanted = [alone(0, 5, 8), alone(0, 4, 9), alone(1, 6, 4), alone(2, 6, 4)]
    assert torch.allclose(logits, torch.stack(wanted), atol=1e-4)
    logits, _ = own.step(torch.tensor([5, 5]), torch.tensor([3, 1]), state)
    assert torch.allclose(logits, torch.stack([alone(2, 6, 4, 5), alone(0, 4, 9, 5)]), atol=1e-4)


def generated(own: TransformersAttentionModel, utterance: Tensor, num_beams: int) -> tuple[list[int], float]:
    """The tokens of `generate` after the prompt, and the score by length that it gives them."""
    inputs = own.inputs_of(utterance[None], torch.tensor([len(utterance)]))
    encoded, num_frames = own(utterance)
    prompt = own.prompt(encoded, num_frames)
    is_whisper = own.max_seconds is not None
    start: dict[str, Any] = {"language": "en", "task": "transcribe"} if is_whisper else {"decoder_input_ids": prompt}
    found = own.network.generate(
        **inputs, **start, max_new_tokens=LIMIT, num_beams=num_beams, do_sample=False, renormalize_logits=True,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    score = float(found["sequences_scores"][0]) if num_beams > 1 else 0.0
    return found["sequences"][0, prompt.shape[1] :].tolist(), score


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("num_beams", [1, 4])
@torch.no_grad()
def test_texts_are_those_of_generate(transformers: Any, kind: str, num_beams: int) -> None:
    lengths, is_equal = [], []
    for seed in range(8):
        own = model(transformers, kind, seed, **({"language": "en"} if kind == "Whisper" else {}))
        own.max_tokens = LIMIT
        decoder = AttentionDecoder(own, beam_size=num_beams, **WIDE)
        for utterance in BATCH:
            (*tokens, last), wanted = generated(own, utterance, num_beams)
            if last != own.tokens.blank_id:
                continue  # cut off at the limit, where ours ends
            (found,) = decoder(*own(utterance))[0]
            columns = [own.tokens.columns[own.tokens.table.id_of(token.text)] for token in found.tokens]
            if num_beams == 1:
                # `generate` stops at the first end, ours when nothing is better.
                assert columns[: len(tokens)] == tokens
            else:
                assert found.score / (len(columns) + 1) > wanted - 1e-4
            lengths.append(len(tokens))
            is_equal.append(columns == tokens)
    assert max(lengths) > 5
    assert sum(is_equal) >= 0.6 * len(is_equal) and len(is_equal) >= 4


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_batch_is_its_utterances(transformers: Any, kind: str) -> None:
    own = model(transformers, kind, seed=2)
    decoder = AttentionDecoder(own, beam_size=3, internal_lm_scale=0.1)
    together = decoder(*own(BATCH), nbest=3)
    for found, utterance in zip(together, BATCH, strict=True):
        alone = decoder(*own(utterance), nbest=3)[0]
        assert [each.text for each in found] == [each.text for each in alone]
        assert [each.tokens for each in found] == [each.tokens for each in alone]
        assert [each.score for each in found] == pytest.approx([each.score for each in alone], abs=1e-3)


@torch.no_grad()
def test_languages_are_found_out_or_given(transformers: Any) -> None:
    ids = dict(zip(SPECIAL, tokenizer(transformers, "Whisper").convert_tokens_to_ids(SPECIAL), strict=True))
    wanted = [ids["<|startoftranscript|>"], 0, ids["<|transcribe|>"], ids["<|notimestamps|>"]]
    given = model(transformers, "Whisper", language="DE", task="translate")
    assert given.prompt(*given(BATCH)).tolist() == 3 * [[wanted[0], ids["<|de|>"], ids["<|translate|>"], wanted[3]]]
    found = set()
    for seed in range(6):
        own = model(transformers, "Whisper", seed)
        prompts = own.prompt(*own(BATCH))
        inputs = own.inputs_of(torch.stack([noise(0.6, 1)]), torch.tensor([9600]))
        assert int(prompts[0, 1]) == int(own.network.detect_language(input_features=inputs["input_features"])[0])
        assert prompts[:, [0, 2, 3]].tolist() == 3 * [[wanted[0], *wanted[2:]]]
        found |= {*prompts[:, 1].tolist()}
    assert found == {ids[each] for each in LANGUAGES}


EN, DE, TRANSLATE, TRANSCRIBE = "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"
OLD = {"lang_to_id": None, "task_to_id": None, "no_timestamps_token_id": None, "is_multilingual": None}


@pytest.mark.parametrize(
    ("configuration", "options", "wanted"),
    [
        (OLD, {}, ["?", TRANSCRIBE]),  # none at all
        ({**OLD, "forced": [None, TRANSLATE]}, {}, ["?", TRANSLATE]),
        ({**OLD, "forced": [None, TRANSCRIBE]}, {"language": "de", "task": "translate"}, [DE, TRANSLATE]),
        ({"forced": [DE, TRANSLATE]}, {}, [DE, TRANSLATE]),
        ({"forced": [DE, TRANSLATE]}, {"task": "transcribe"}, ["?", TRANSCRIBE]),
        ({"language": "german", "task": "translate"}, {}, [DE, TRANSLATE]),
        ({"language": "german", "task": "translate"}, {"language": "en"}, [EN, TRANSLATE]),
        ({}, {"language": "<|de|>"}, [DE, TRANSCRIBE]),
        ({**OLD, "is_multilingual": False, "forced": ["<|notimestamps|>"]}, {}, []),
        ({**OLD, "is_multilingual": False}, {}, []),
    ],
)
def test_generation_configurations_decide(
    transformers: Any, configuration: dict[str, Any], options: dict[str, str], wanted: list[str]
) -> None:
    made, own = network(transformers, "Whisper"), tokenizer(transformers, "Whisper")
    for name, value in configuration.items():
        if name != "forced":
            setattr(made.generation_config, name, value)
            continue
        ids = [None if token is None else own.convert_tokens_to_ids(token) for token in value]
        made.generation_config.forced_decoder_ids = [[place + 1, id] for place, id in enumerate(ids)]
    found = TransformersAttentionModel(made, extractor(transformers, "Whisper"), own, **options)
    prompt = own.convert_ids_to_tokens(found.prompt(*found(BATCH[0]))[0])
    assert [prompt[0], prompt[-1]] == ["<|startoftranscript|>", "<|notimestamps|>"]
    assert [own if own == theirs else "?" for own, theirs in zip(prompt[1:-1], wanted, strict=True)] == wanted


@pytest.mark.parametrize("mark", ["<|nospeech|>", "<|nocaptions|>"])
@torch.no_grad()
def test_whisper_tells_whether_nobody_speaks(transformers: Any, mark: str) -> None:
    theirs = tokenizer(transformers, "Whisper")
    theirs.add_tokens([mark])
    made = network(transformers, "Whisper", seed=1)
    made.resize_token_embeddings(len(theirs), mean_resizing=False)
    column, start = theirs.convert_tokens_to_ids([mark, "<|startoftranscript|>"])
    made.get_output_embeddings().weight.data[column].normal_(generator=torch.Generator().manual_seed(0))
    parts = made, extractor(transformers, "Whisper"), theirs
    inputs = model(transformers, "Whisper").inputs_of(torch.stack([BATCH[2]]), torch.tensor([len(BATCH[2])]))
    told = set()
    for options in ({}, {"language": "de"}, {"prompt": "ab<|startoftranscript|><|en|><|transcribe|>"}):
        own = TransformersAttentionModel(*parts, **options)
        encoded, num_frames = own(BATCH)
        prompt = own.prompt(encoded, num_frames)
        _, state = own.start(encoded, num_frames, prompt)
        found = own.no_speech(state)
        assert found is not None and found.shape == (3,)
        before = prompt[2, : prompt[2].tolist().index(start) + 1]
        logits = made(**inputs, decoder_input_ids=before[None]).logits[0, -1]
        assert float(found[2]) == pytest.approx(float(logits.softmax(0)[column]), rel=1e-3)
        told.add(round(float(found[2]), 6))
    assert len(told) == 2
    for other in (model(transformers, "Whisper"), TransformersAttentionModel(*parts, prompt="<|en|>")):
        encoded, num_frames = other(BATCH)
        _, state = other.start(encoded, num_frames, other.prompt(encoded, num_frames))
        assert other.no_speech(state) is None


def test_texts_begin_with_the_forced_token(transformers: Any) -> None:
    made = network(transformers, "Speech2Text")
    made.generation_config.forced_bos_token_id = 9
    parts = extractor(transformers, "Speech2Text"), tokenizer(transformers, "Speech2Text")
    own = TransformersAttentionModel(made, *parts)
    assert own.prompt(*own(BATCH)).tolist() == 3 * [[1, 9]]


def test_suppressed_tokens_may_be_beyond_the_columns(transformers: Any) -> None:
    made, own = network(transformers, "Whisper"), tokenizer(transformers, "Whisper")
    made.generation_config.suppress_tokens, made.generation_config.begin_suppress_tokens = [-1, 7, 50257], [9, 50256]
    found = TransformersAttentionModel(made, extractor(transformers, "Whisper"), own, language="en")
    encoded, num_frames = found(BATCH[0])
    with torch.no_grad():
        logits, state = found.start(encoded, num_frames, found.prompt(encoded, num_frames))
        following, _ = found.step(torch.tensor([3]), torch.tensor([0]), state)
    assert logits[0, [7, 8, 9]].isinf().tolist() == [True, False, True]
    assert following[0, [7, 8, 9]].isinf().tolist() == [True, False, False]


def test_marks_are_no_text(transformers: Any) -> None:
    own = model(transformers, "Whisper")
    written = {own.tokens.text_of(entry) for entry in range(len(own.tokens.table))}
    assert "ab" in written
    assert not any("<|" in text for text in written)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("Whisper", {"language": "fr"}, "there is no language 'fr'; give one of de, en"),
        ("Whisper", {"language": 3}, "ConditionalGeneration: language is of type int; give text, or None"),
        ("Moonshine", {"prompt": 3}, "ConditionalGeneration: prompt is of type int; give text, or None"),
        ("Whisper", {"task": "sing"}, "there is no task 'sing'; give one of translate, transcribe"),
        ("Whisper", {"prompt": "a", "language": "en"}, "a prompt decides on language and task"),
        ("Moonshine", {"language": "en"}, "this network has neither languages nor tasks to choose"),
        ("Canary", {"prompt": None}, "canary writes texts after a prompt"),
        ("Canary", {"prompt": ""}, "the prompt has no tokens; give the text of one or more, or leave it out"),
        ("Whisper", {"prompt": 40 * "<|en|>"}, "the prompt has 40 tokens, but the decoder reads 40 with the text"),
    ],
)
def test_prompts_are_refused(transformers: Any, kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AsrError, match=message):
        model(transformers, kind, **options)


def test_devices_that_are_not_there_are_refused(transformers: Any) -> None:
    own = model(transformers, "Whisper")
    for device in ("meta", "nonsense", torch.device("cuda:99")):
        with pytest.raises(AsrError, match=f"device {device}: (there is no such device; give cpu|torch sees)"):
            own.to(device)
    assert own.to("cpu").device.type == "cpu"


def test_windows_have_a_length(transformers: Any) -> None:
    own = model(transformers, "Whisper")
    assert own.max_seconds == 2.0
    with pytest.raises(
        AsrError, match=r"an utterance has 2\.5 s, but the network reads at most 2 s; cut it at a pause"
    ):
        own(noise(2.5))


def test_frames_have_times(transformers: Any) -> None:
    shifts = {"Whisper": 0.02, "Moonshine": 0.024, "Speech2Text": 0.04, "Canary": 0.04, "SpeechEncoderDecoder": 0.02}
    for kind, shift in shifts.items():
        assert model(transformers, kind).frame_shift == pytest.approx(shift, rel=0.02)


def test_other_networks_are_refused(transformers: Any) -> None:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=20)
    parts = transformers.GPT2LMHeadModel(config), extractor(transformers, "Whisper"), tokenizer(transformers, "Whisper")
    with pytest.raises(AsrError, match="reads audio and text in one sequence"):
        TransformersAttentionModel(*parts)


@pytest.fixture
def folder(transformers: Any, tmp_path: Path) -> Path:
    network(transformers, "Whisper").save_pretrained(tmp_path)
    for part in (extractor(transformers, "Whisper"), tokenizer(transformers, "Whisper")):
        part.save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
def test_a_folder_is_loaded(transformers: Any, folder: Path) -> None:
    own = load_attention_model(f"transformers:{folder}", language="en")
    wanted = model(transformers, "Whisper", language="en")
    assert own.name == f"transformers:{folder}"
    frames = wanted(BATCH)
    assert torch.equal(own(BATCH)[0], frames[0])
    (found,), (same,) = (AttentionDecoder(each)(*each(BATCH[0]))[0] for each in (own, wanted))
    assert found == same
    with pytest.raises(AsrError, match="there is no language 'fr'"):
        load_attention_model(f"transformers:{folder}", language="fr")


def test_folders_are_checked(transformers: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AsrError, match=r"nothing: there is no such folder; give one with config\.json"):
        load_attention_model(f"transformers:{tmp_path / 'nothing'}")
    with pytest.raises(AsrError, match="an attention model is named KIND:NAME"):
        load_attention_model(str(folder))
    weights = network(transformers, "Whisper").state_dict()
    made = network(transformers, "Whisper")
    made.save_pretrained(folder, state_dict={name: value for name, value in weights.items() if "fc1" not in name})
    with pytest.raises(AsrError, match=r"lacks \d+ weights .* give one that was trained as an encoder-decoder"):
        load_attention_model(f"transformers:{folder}")


@pytest.mark.parametrize("kind", ["ParakeetTDT", "Wav2Vec2", "Voxtral"])
def test_other_types_are_refused_before_weights_are_read(transformers: Any, tmp_path: Path, kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")()
    config.save_pretrained(tmp_path)
    with pytest.raises(
        AsrError,
        match=f"this is no encoder-decoder, but of the type {config.model_type}; give one of canary, .*, whisper",
    ) as raised:
        load_attention_model(f"transformers:{tmp_path}")
    assert "qwen3_asr" not in str(raised.value)


def test_files_of_other_networks_are_named(transformers: Any, folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(AsrError, match=f"^transformers:{folder}: its tokenizer has no tokens of text; add its tok"):
        load_attention_model(f"transformers:{folder}")
    tokenizer(transformers, "Whisper").save_pretrained(folder)
    extractor(transformers, "Moonshine").save_pretrained(folder)
    message = r"the network cannot read this audio \(Whisper expects .*\); .* the feature extractor that of another"
    with pytest.raises(AsrError, match=f"^transformers:{folder}: {message}"):
        load_attention_model(f"transformers:{folder}")


def test_code_in_a_folder_is_not_run(transformers: Any, folder: Path) -> None:
    written = write_foreign_code(folder, "WhisperConfig")
    with pytest.raises(AsrError):
        load_attention_model(f"transformers:{folder}")
    assert not written.exists()


@torch.no_grad()
def test_weights_of_16_bits(transformers: Any, folder: Path) -> None:
    own = load_attention_model(f"transformers:{folder}", language="en", dtype=torch.bfloat16)
    assert own(BATCH[0])[0].dtype == torch.bfloat16
    assert AttentionDecoder(own, internal_lm_scale=0.1)(*own(BATCH))[0][0].is_complete


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_attention_is_that_of_the_network(transformers: Any, kind: str) -> None:
    own = model(transformers, kind)
    own.network.set_attn_implementation("eager")
    encoded, num_frames = own(BATCH)
    prompt, token = own.prompt(encoded, num_frames), torch.tensor([[4, 5, 8, 5], [6, 4, 4, 9], [8, 6, 5, 4]])
    found = own.attention(encoded, num_frames, prompt, token)
    assert found is not None and found.shape == (2, 3, 5, encoded.shape[1])  # both heads of the second layer
    for utt, num in enumerate(num_frames.tolist()):
        frames = encoded[utt, None] if own.max_seconds is not None else encoded[utt, None, :num]
        output = own.network(
            encoder_outputs=_as_output(frames, None), output_attentions=True, use_cache=False,
            decoder_input_ids=torch.cat([prompt[utt], token[utt]])[None],
        )  # fmt: skip
        wanted = output.cross_attentions[1][0, :, prompt.shape[1] - 1 :, :num]
        assert torch.allclose(found[:, utt, :, :num], wanted / wanted.sum(2, keepdim=True), atol=1e-5)
        assert not found[:, utt, :, num:].any()


def test_heads_may_be_named(transformers: Any) -> None:
    made = network(transformers, "Whisper")
    made.generation_config.alignment_heads = [[0, 1], [1, 0], [1, 1]]
    own = TransformersAttentionModel(made, extractor(transformers, "Whisper"), tokenizer(transformers, "Whisper"))
    encoded, num_frames = own(BATCH)
    with torch.no_grad():
        found = own.attention(encoded, num_frames, own.prompt(encoded, num_frames), torch.tensor([[4], [5], [6]]))
    assert found is not None and len(found) == 3
    for beyond in ([7, 0], [1, 2]):  # of a teacher
        made.generation_config.alignment_heads = [[1, 0], beyond]
        heads = CrossAttention(made)
        assert heads.of_layer == {1: None}


def test_copies_and_threads(transformers: Any) -> None:
    own = model(transformers, "Whisper", seed=2)
    decoder = AttentionDecoder(own, beam_size=2)
    expected = [decoder(*own(utterance)) for utterance in BATCH]
    assert any(word.end_frame > word.start_frame + 1 for found in expected for word in found[0][0].words)
    copied = copy.deepcopy(decoder)
    assert [copied(*own(utterance)) for utterance in BATCH] == expected
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda utterance: decoder(*own(utterance)), 3 * BATCH)] == 3 * expected


def test_words_of_whisper_are_those_of_its_tokenizer(transformers: Any) -> None:
    own = model(transformers, "Whisper")
    tokens, theirs = own.tokens, tokenizer(transformers, "Whisper")
    for text in (" ab été ab", " a—日本 ab", "b a"):
        columns = theirs(text, add_special_tokens=False)["input_ids"]
        entries = [tokens.columns.index(column) for column in columns]
        words = [tokens.text_of(*entries[begin:end]) for begin, end in tokens.group(entries)]
        assert words == text.split()
    assert tokens.spell("été") == [tuple(from_gpt2(piece, "▁") for piece in theirs.tokenize(" été"))]


def test_words_may_be_added_to_the_tokenizer(transformers: Any) -> None:
    theirs = tokenizer(transformers, "Whisper")
    theirs.add_tokens(["日本", "né"])
    tokens = tokens_of(theirs, len(theirs), 259, "own")
    entries = [tokens.columns.index(column) for column in theirs.convert_tokens_to_ids(["Ġa", "日本", "Ġab", "né"])]
    words = [tokens.text_of(*entries[begin:end]) for begin, end in tokens.group(entries)]
    assert words == ["a日本", "abné"]


def test_words_of_other_languages_name_the_network(transformers: Any) -> None:
    with pytest.raises(AsrError, match=r"^MoonshineForConditionalGeneration: of 1 words, only 0 can be spelled"):
        AttentionDecoder(model(transformers, "Moonshine"), words=["日"])


def test_words_of_whisper_are_listed(transformers: Any) -> None:
    own = model(transformers, "Whisper", seed=3, language="en")
    decoder = AttentionDecoder(own, words=["ab", "a"], spelling_penalty=-math.inf, token_min_log_prob=-1e9)
    for found in decoder(*own(BATCH)):
        assert {word.text for word in found[0].words} <= {"ab", "a"}
        assert found[0].words
