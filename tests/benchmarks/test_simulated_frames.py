"""Pools of segments, and what is simulated from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr.errors import AsrError
from asr.text.lexicon import Lexicon
from asr.text.symbols import TokenTable
from scripts.benchmarks.__main__ import main
from scripts.benchmarks.simulation import FrameSimulator, SegmentPool, SimulationFolder, choose_sentences, simulate
from tests.reference.ctc_paths import collapsed

TOKENS = TokenTable(["A", "B"])
LEXICON = Lexicon({"AB": [("A", "B")], "BA": [("B", "A")]})


def random_frames(seed: int, num_frames: int) -> np.ndarray:
    score = np.random.default_rng(seed).normal(size=(num_frames, 3))
    return (score - np.log(np.exp(score).sum(1, keepdims=True))).astype(np.float32)


def pool() -> SegmentPool:
    words = [LEXICON["AB"][0], LEXICON["BA"][0]]
    return SegmentPool.from_utterances(TOKENS, [(random_frames(seed, 20), words) for seed in range(6)])


def test_a_pool_holds_every_frame_once_and_survives_its_file(tmp_path: Path) -> None:
    made = pool()
    assert made.begin[-1] == len(made.log_prob) == 120
    assert [made.token_id.tolist().count(token) for token in (1, 2)] == [12, 12]
    assert made.ends_word.sum() == 12
    made.save(tmp_path / "pool.xz")
    again = SegmentPool.load(tmp_path / "pool.xz")
    assert again.tokens == made.tokens
    np.testing.assert_allclose(again.log_prob, np.clip(made.log_prob, -12, 0), atol=0.126)
    for name in ("aligned", "begin", "token_id", "left", "right", "ends_word"):
        np.testing.assert_array_equal(getattr(again, name), getattr(made, name))


def test_bad_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pool.xz").write_bytes(b"no pool")
    with pytest.raises(AsrError, match="no pool of segments"):
        SegmentPool.load(tmp_path / "pool.xz")
    with pytest.raises(AsrError, match="cannot be read"):
        SegmentPool.load(tmp_path / "missing")
    with pytest.raises(AsrError, match="could be aligned"):
        SegmentPool.from_utterances(TOKENS, [(random_frames(0, 2), [LEXICON["AB"][0]] * 3)])


def test_simulated_frames_spell_the_sentence() -> None:
    sentences = [("AB", "AB", "AB"), ("BA", "BA")]
    made = simulate(FrameSimulator(pool(), 3.0, seed=1), sentences, LEXICON)
    again = simulate(FrameSimulator(pool(), 3.0, seed=1), sentences, LEXICON)
    clear = simulate(FrameSimulator(pool(), 50.0, seed=1), sentences, LEXICON)
    for words, one, same, sure in zip(sentences, made, again, clear, strict=True):
        np.testing.assert_array_equal(one, same)
        np.testing.assert_allclose(np.exp(one).sum(1), 1.0, atol=1e-5)
        phones = [token for word in words for token in TOKENS.ids_of(LEXICON[word][0])]
        assert collapsed(tuple(sure.argmax(1))) == phones


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(AsrError, match="lacks the word 'CC'"):
        simulate(FrameSimulator(pool()), [("CC",)], LEXICON)
    with pytest.raises(AsrError, match="clarity is nan"):
        FrameSimulator(pool(), float("nan"))
    only_a = SegmentPool.from_utterances(TOKENS, [(random_frames(0, 4), [("A",)])])
    with pytest.raises(AsrError, match="no segment of the phone B"):
        FrameSimulator(only_a).frames([("B",)])


def test_sentences_come_in_equal_parts_from_the_texts() -> None:
    texts = [{f"{name}-{i}": ("AB", "BA")[: 1 + i % 2] for i in range(20)} for name in "xyz"]
    chosen = choose_sentences(texts, 5, {"AB", "BA"}, {"y"}, (2, 3))
    assert list(chosen) == ["x-1", "z-1", "z-11"]
    assert choose_sentences(texts, 5, {"AB"}, {"y"}, (2, 3)) == {}


@pytest.mark.slow
def test_prepare_makes_the_folder_of_a_corpus(tmp_path: Path, tiny_bundle_folder: Path) -> None:
    from tests.tiny_bundle import PRONUNCIATIONS, RATE, tones

    audio = tmp_path / "audio"
    audio.mkdir()
    for index, words in enumerate(("PAT KIT", "SICK SKIP", "KIT SKIP", "PAT SICK")):
        soundfile.write(audio / f"1-1-{index}.wav", tones(words.split(), seed=index).numpy(), RATE)
        with (audio / "1-1.trans.txt").open("a") as file:
            file.write(f"1-1-{index} {words}\n")
    Lexicon({**PRONUNCIATIONS, "ZOO": [("Z",)]}).save(tmp_path / "lexicon.txt")
    long = "PAT TO KIT TO SICK"
    (tmp_path / "text").write_text(f"1-1-9 {long}\n2-1-0 {long} TWO\n2-1-1 PAT\n3-1-0 {long} ZOO\n3-1-1 {long}\n")
    files = []
    for folder in (SimulationFolder(tmp_path / "once"), SimulationFolder(tmp_path / "again")):
        arguments = {"audio": audio, "text": tmp_path / "text", "lexicon": tmp_path / "lexicon.txt"}
        arguments |= {"bundle": tiny_bundle_folder, "output": folder.path}
        with pytest.raises(AsrError, match=r"lacks segments.*scripts/bench simulate prepare"):
            folder.require()
        assert main(["simulate", "prepare", *(f"--{name}={value}" for name, value in arguments.items())]) == 0
        files.append([file.read_bytes() for file in (folder.segments, folder.sentences, folder.lexicon)])
    assert files[0] == files[1]
    folder = folder.require()
    assert folder.sentences.read_text() == f"2-1-0 {long} TWO\n3-1-1 {long}\n"
    assert folder.lexicon.read_text() == "KIT K T\nPAT P T\nSICK S K\nTO T\nTWO T\n"
    sentences = [tuple(line.split()[1:]) for line in folder.sentences.read_text().splitlines()]
    made = simulate(FrameSimulator(SegmentPool.load(folder.segments)), sentences, Lexicon.from_file(folder.lexicon))
    assert all(len(frames) for frames in made)
