"""Numbers that no computation survives are refused, and hints are given where they are needed."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import warnings
import zlib
from pathlib import Path

import pytest

from asr.bundle import Bundle
from asr.cli.main import main
from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError
from asr.lm.ngram.io import load_ngram_lm, save_ngram_lm
from asr.recognizer import Recognizer
from asr.testing.tones import tones

_PREFIX = struct.Struct("<8sIII")


@pytest.mark.parametrize("name", ["am_scale", "graph_scale", "lm_scale", "word_insertion_penalty"])
def test_scales_beyond_float32_are_refused(name: str) -> None:
    for value in (1e38, float("inf"), float("nan")):
        with pytest.raises(AsrError, match=f"{name} is .*it must be (a finite number|above 0)"):
            DecodingOptions(**{name: value})


@pytest.mark.parametrize("name", ["search_beam", "output_beam", "context_beam", "skip_beam"])
def test_beams_beyond_float32_keep_all(tiny_bundle_folder: Path, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        recognizer = Recognizer.from_folder(tiny_bundle_folder, options={name: 1e300})
        (result,) = recognizer([tones(["PAT", "TO", "KIT"])])
    assert getattr(recognizer.options, name) == math.inf
    assert result.text == "PAT TO KIT"


def test_negative_numbers_with_an_exponent_are_numbers(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.wav").touch()
    assert main(["transcribe", f"{tmp_path}/a.wav", "--bundle", "nowhere", "--word-insertion-penalty", "-1e-1"]) == 2
    assert "nowhere: there is no bundle here" in capsys.readouterr().err


def test_a_billion_channels_are_refused(tiny_bundle_folder: Path, capsys) -> None:
    options = ["--stream", "--raw-rate", "16000", "--raw-channels", "1000000000", "--bundle", str(tiny_bundle_folder)]
    assert main(["transcribe", "-", *options]) == 2
    assert "--raw-channels 1000000000: give at most 1024" in capsys.readouterr().err


def test_a_reference_in_other_letters_gets_a_hint(tmp_path: Path, capsys) -> None:
    (tmp_path / "ref").write_text("a Pat, to kit.\nb Sick skip!\n")
    (tmp_path / "hyp").write_text("a PAT TO KIT\nb SICK SKIP\n")
    assert main(["evaluate", str(tmp_path / "hyp"), "--reference", str(tmp_path / "ref")]) == 0
    said = capsys.readouterr().err
    assert "without case and punctuation the word error rate would be 0.00%" in said
    assert "use --ignore-case and --ignore-punctuation" in said
    assert main(["evaluate", str(tmp_path / "ref"), "--reference", str(tmp_path / "ref")]) == 0
    assert capsys.readouterr().err == ""


def test_marks_of_letters_are_no_punctuation(tmp_path: Path, capsys) -> None:
    (tmp_path / "ref").write_text("a नमस्ते दुनिया\nb l’été\n", encoding="utf-8")
    (tmp_path / "hyp").write_text("a नमस्त दुनय\nb l'ÉTÉ\n", encoding="utf-8")
    assert main(["evaluate", str(tmp_path / "hyp"), "--reference", str(tmp_path / "ref")]) == 0
    assert capsys.readouterr().err == ""


def forged(content: bytes, change) -> bytes:
    """The file with another header and good checksums of it."""
    magic, version, length, _ = _PREFIX.unpack(content[: _PREFIX.size])
    header = json.loads(content[_PREFIX.size : _PREFIX.size + length])
    change(header)
    text = json.dumps(header).encode()
    begin = -(-(_PREFIX.size + length) // 64) * 64
    head = _PREFIX.pack(magic, version, len(text), zlib.crc32(text)) + text
    return head.ljust(-(-len(head) // 64) * 64, b"\0") + content[begin:]


def changes(header: dict[str, object]) -> list:
    arrays = header["arrays"]
    assert isinstance(arrays, dict)
    made = [
        lambda h, key=key, value=value: h.update({key: value})
        for key in header
        for value in (None, -1, 1 << 62, [], {})
    ]
    for name in arrays:
        made.append(lambda h, name=name: h["arrays"].pop(name))
        for place, values in enumerate((["<f8", "object", "int8", 3], [-1, 0, 1 << 60, "x"], [-64, 1 << 60, None, 3])):
            made += [lambda h, n=name, p=place, v=value: h["arrays"][n].__setitem__(p, v) for value in values]
    return made


@pytest.mark.slow
def test_forged_headers_of_n_gram_models_are_one_sentence(tmp_path: Path, tiny_bundle_folder: Path) -> None:
    model = Bundle.load(tiny_bundle_folder).small_ngram
    assert model is not None
    path = tmp_path / "a.bin"
    save_ngram_lm(model.with_index(), path)
    content = path.read_bytes()
    length = _PREFIX.unpack(content[: _PREFIX.size])[2]
    header = json.loads(content[_PREFIX.size : _PREFIX.size + length])
    path.write_bytes(forged(content, lambda header: None))
    load_ngram_lm(path)
    for change in changes(header):
        path.write_bytes(forged(content, change))
        try:
            load_ngram_lm(path, verify=False)
        except AsrError as error:
            assert "\n" not in str(error)


def test_backing_off_in_a_circle_is_refused(tmp_path: Path, tiny_bundle_folder: Path) -> None:
    model = Bundle.load(tiny_bundle_folder).small_ngram
    assert model is not None
    circle = model.arrays.backoff_state.clone()
    circle[1] = 1
    outside = model.arrays.dst_state.clone()
    outside[3] = 1 << 20
    for name, tensor in (("backoff_state", circle), ("dst_state", outside)):
        model.arrays = dataclasses.replace(Bundle.load(tiny_bundle_folder).small_ngram.arrays, **{name: tensor})
        save_ngram_lm(model, tmp_path / "a.bin")
        with pytest.raises(AsrError, match=r"backing off does not end|out of range"):
            load_ngram_lm(tmp_path / "a.bin")
