"""Each corpus in each of its layouts, whole and with pieces missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr.audio.io import inspect_audio
from asr.datasets.corpora.an4 import An4
from asr.datasets.corpora.base import Corpus
from asr.datasets.corpora.librispeech import LIBRISPEECH_PARTS, MINI_LIBRISPEECH_PARTS, LibriSpeech
from asr.datasets.corpora.ljspeech import LJSpeech
from asr.datasets.corpora.speechocean762 import SpeechOcean762
from asr.errors import AsrError
from tests.datasets.toy_corpora import write_audio, write_librispeech


@pytest.mark.parametrize("suffix", ["flac", "mp3", "wav"])
@pytest.mark.parametrize("part", LIBRISPEECH_PARTS + MINI_LIBRISPEECH_PARTS)
def test_librispeech_parts_and_formats(tmp_path: Path, part: str, suffix: str) -> None:
    root = tmp_path / "LibriSpeech"
    write_librispeech(root, part, num=1, suffix=suffix)
    for folder in (tmp_path, root):  # the folder above, or LibriSpeech itself
        assert LibriSpeech().parts_in(folder) == [part]
        listing = LibriSpeech().list_part(folder, part)
        assert [(each.utterance_id, each.text, each.speaker) for each in listing.utterances] == [
            ("19-198-0000", "A BAY", "19"),
            ("26-198-0000", "A BAY", "26"),
        ]
        assert listing.skipped == []


def test_flac_wins_over_mp3(tmp_path: Path) -> None:
    write_librispeech(tmp_path, num=1, suffix="mp3")
    write_librispeech(tmp_path, num=1, suffix="flac")
    assert {each.audio.suffix for each in LibriSpeech().list_part(tmp_path, "dev-clean-2").utterances} == {".flac"}


def test_halves_are_reported(tmp_path: Path) -> None:
    chapter = write_librispeech(tmp_path) / "19" / "198"
    (chapter / "19-198-0001.flac").unlink()
    write_audio(chapter / "19-198-0099.flac")
    with (chapter / "19-198.trans.txt").open("a", encoding="utf-8") as file:
        file.write("19-198-0002 ANOTHER TEXT\n19-198-0077 \n")
    write_audio(chapter / "19-198-0077.flac")
    listing = LibriSpeech().list_part(tmp_path, "dev-clean-2")
    assert len(listing.utterances) == 7
    reasons = {each.item: each.reason for each in listing.skipped}
    assert "no audio file" in reasons["19-198-0001"]
    assert "no transcript" in reasons["19-198-0099"]
    assert "second transcript" in reasons["19-198-0002"]
    assert "transcript is empty" in reasons["19-198-0077"]


def test_a_transcript_that_is_not_utf8_costs_its_chapter_only(tmp_path: Path) -> None:
    part = write_librispeech(tmp_path, num=2)
    (part / "19" / "198" / "19-198.trans.txt").write_bytes(b"19-198-0000 CAF\xe9\n")
    listing = LibriSpeech().list_part(tmp_path, "dev-clean-2")
    assert {each.speaker for each in listing.utterances} == {"26"}
    assert any("not UTF-8" in each.reason for each in listing.skipped)


def test_parts_that_are_there_are_not_downloaded(tmp_path: Path) -> None:
    part = write_librispeech(tmp_path / "LibriSpeech", num=1)
    LibriSpeech().download(tmp_path, ["dev-clean-2"])  # would clear the folder, and needs a network
    assert (part / "19" / "198" / "19-198-0000.flac").is_file()


def test_a_failing_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("lhotse.recipes.download_librispeech", refuse)
    with pytest.raises(AsrError, match=r"train-clean-5, dev-clean-2 could not be downloaded \(no route to host\)"):
        LibriSpeech(default_download=MINI_LIBRISPEECH_PARTS).download(tmp_path, [])


def write_an4(root: Path, cmu: bool) -> Path:
    names = {"train": ["an251-fash-b", "cen1-mblw-b"], "test": ["an406-fcaw-b"]}
    for part, utterances in names.items():
        lines = []
        for name in utterances:
            speaker = name.split("-")[1]
            folder = root / "wav" / (("an4_clstk" if part == "train" else "an4test_clstk") if cmu else part) / speaker
            write_audio(folder / (f"{name}.sph" if cmu else f"{name}.flac"))
            lines.append(f"<s> GO ON </s> ({name})\n" if cmu else f"{speaker}/{name} GO ON\n")
        transcript = root / "etc" / f"an4_{part}.transcription" if cmu else root / f"{part}.text"
        transcript.parent.mkdir(parents=True, exist_ok=True)
        transcript.write_text("".join(lines), encoding="utf-8")
    return root


@pytest.mark.parametrize("cmu", [False, True])
def test_an4_layouts(tmp_path: Path, cmu: bool) -> None:
    root = write_an4(tmp_path / "an4", cmu)
    assert An4().parts_in(root) == ["train", "test"]
    train = An4().list_part(root, "train")
    assert [(each.utterance_id, each.speaker, each.text) for each in train.utterances] == [
        ("an251-fash-b", "fash", "GO ON"),
        ("cen1-mblw-b", "mblw", "GO ON"),
    ]
    assert train.skipped == []
    assert all(inspect_audio(each.audio) == (8000, 16000, 1) for each in train.utterances)
    assert [each.speaker for each in An4().list_part(root, "test").utterances] == ["fcaw"]


def write_speechocean(root: Path, official: bool) -> Path:
    name = "000010011"
    if official:
        write_audio(root / "WAVE" / "SPEAKER0001" / f"{name}.WAV")
        (root / "train").mkdir()
        (root / "train" / "text").write_text(f"{name}\tWE CALL IT BEAR\n", encoding="utf-8")
        (root / "train" / "wav.scp").write_text(f"{name}\tWAVE/SPEAKER0001/{name}.WAV\n", encoding="utf-8")
        (root / "train" / "utt2spk").write_text(f"{name}\t0001\n", encoding="utf-8")
    else:
        write_audio(root / "mp3" / "train" / "0001" / f"{name}.flac")
        (root / "train.text").write_text(f"0001/{name} WE CALL IT BEAR\n", encoding="utf-8")
    return root


@pytest.mark.parametrize("official", [False, True])
def test_speechocean_layouts(tmp_path: Path, official: bool) -> None:
    root = write_speechocean(tmp_path, official)
    assert SpeechOcean762().parts_in(root) == ["train"]
    listing = SpeechOcean762().list_part(root, "train")
    assert [(each.utterance_id, each.speaker, each.text) for each in listing.utterances] == [
        ("000010011", "0001", "WE CALL IT BEAR")
    ]
    assert listing.skipped == []


def test_ljspeech(tmp_path: Path) -> None:
    (tmp_path / "wavs").mkdir()
    for name in ("LJ001-0001", "LJ001-0002"):
        (tmp_path / "wavs" / f"{name}.flac").touch()
    lines = ["LJ001-0002\tin being comparatively modern", "LJ001-0001 PRINTING", "LJ001-0001 TWICE", "LJ001-0003 GONE"]
    (tmp_path / "text").write_text("\n".join(lines), encoding="utf-8")
    assert LJSpeech().parts_in(tmp_path) == ["train"]
    part = LJSpeech().list_part(tmp_path, "train")
    assert [(each.utterance_id, each.text) for each in part.utterances] == [
        ("LJ001-0001", "PRINTING"),
        ("LJ001-0002", "IN BEING COMPARATIVELY MODERN"),
    ]
    assert {each.speaker for each in part.utterances} == {"ljspeech"}
    assert [item.item for item in part.skipped] == ["LJ001-0001", "LJ001-0003"]


@pytest.mark.parametrize("corpus", [LibriSpeech(), An4(), SpeechOcean762(), LJSpeech()], ids=lambda corpus: corpus.name)
def test_missing_empty_and_foreign_folders(tmp_path: Path, corpus: Corpus) -> None:
    with pytest.raises(AsrError, match="there is no such folder"):
        corpus.parts_in(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AsrError, match="the folder is empty"):
        corpus.parts_in(tmp_path / "empty")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "photo.jpg").touch()
    with pytest.raises(AsrError, match=r"this is not (AN4|speechocean762|LJ Speech)|none of the parts"):
        corpus.parts_in(tmp_path / "foreign")
    with pytest.raises(AsrError, match="not a part"):
        corpus.list_part(tmp_path / "foreign", "validation")


def test_a_part_without_any_pair(tmp_path: Path) -> None:
    part = write_librispeech(tmp_path, num=1)
    for path in part.rglob("*.flac"):
        path.unlink()
    with pytest.raises(AsrError, match="no transcript has an audio file"):
        LibriSpeech().list_part(tmp_path, "dev-clean-2")
    with pytest.raises(AsrError, match="there is no such folder"):
        LibriSpeech().list_part(tmp_path, "train-clean-100")


@pytest.mark.slow
@pytest.mark.corpus
def test_the_real_corpora(corpora: Path) -> None:
    expected: list[tuple[Corpus, str, dict[str, tuple[int, int]]]] = [
        (An4(), "an4", {"train": (948, 74), "test": (130, 10)}),
        (LibriSpeech(), "librispeech", {"train-clean-5": (858, 14), "dev-clean-2": (244, 3)}),
        (SpeechOcean762(), "speechocean762", {"train": (2500, 125)}),
    ]
    for corpus, folder, parts in expected:
        assert corpus.parts_in(corpora / folder) == list(parts)
        for part, (num_utterances, num_speakers) in parts.items():
            listing = corpus.list_part(corpora / folder, part)
            assert len(listing.utterances) == num_utterances
            assert len({each.speaker for each in listing.utterances}) == num_speakers
            assert listing.skipped == []
