"""`asr evaluate --recipe`: systems by test sets, resumed, and what is wrong with a recipe."""

from __future__ import annotations

import gzip
import json

import pytest

from asr.cli.evaluate_recipe import Recipe
from asr.testing.tones import TEXT
from tests.ctc.test_bundles import scripted


@pytest.fixture
def recipe(tmp_path, cuts):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"sets:\n  tones: {cuts}\n  elsewhere: {tmp_path}/none.jsonl.gz\n"
        "systems:\n  small: --mode ngram\n  GRU 1.0: --mode rnn --search-beam 9\n"
    )
    return path


@pytest.mark.slow
def test_a_table_of_sets_by_systems(tmp_path, recipe, evaluate, tiny_bundle_folder):
    folder = tmp_path / "out"
    arguments = ("--recipe", recipe, "--bundle", tiny_bundle_folder, "--output", folder)
    code, text, errors = evaluate(*arguments)
    assert code == 0
    assert "elsewhere is left out: there is no" in errors
    lines = text.splitlines()
    assert lines[0] == "| system | tones |"
    assert lines[2].startswith("| small | 0.00 (0.00 to 0.00); 0.") and lines[2].count(";") == 1
    assert lines[3].startswith("| GRU 1.0 | 0.00 (0.00 to 0.00); 0.") and lines[3].endswith(" % |")
    assert (folder / "table.md").read_text() == text
    small, gru = json.loads((folder / "table.json").read_text())
    assert json.loads(evaluate(*arguments, "--json")[1]) == [small, gru]
    num_words = sum(len(line.split()) for line in TEXT[:3])
    assert (small["set"], small["system"], small["words"], small["hit_ratio"]) == ("tones", "small", num_words, None)
    assert 0 < gru["hit_ratio"] < 1 and 0 < gru["answered_without_hidden"] < 1
    system = json.loads((folder / "tones" / "GRU 1.0.json").read_text())["system"]
    assert system["mode"] == "rnn" and "9" in json.dumps(system)
    assert "GRU 1.0" in (folder / "tones.html").read_text()


@pytest.mark.slow
def test_what_is_done_stays_and_the_rest_follows(tmp_path, recipe, cuts, evaluate, tiny_bundle_folder):
    folder = tmp_path / "out"
    arguments = ("--recipe", recipe, "--bundle", tiny_bundle_folder, "--output", folder)
    assert evaluate(*arguments)[0] == 0
    table = json.loads((folder / "table.json").read_text())
    code, _, errors = evaluate(*arguments)
    assert code == 0 and errors.count("3 of 3 recordings are already in") == 2
    assert json.loads((folder / "table.json").read_text()) == table
    manifest = cuts.read_bytes()
    cuts.write_bytes(gzip.compress(gzip.decompress(manifest).replace(f'"{TEXT[0]}"'.encode(), b'"SKIP"')))
    assert evaluate(*arguments)[0] == 0
    for before, after in zip(table, json.loads((folder / "table.json").read_text()), strict=True):
        assert after["wer"] > before["wer"] == 0.0 and after["words"] < before["words"]
        assert after["hit_ratio"] == before["hit_ratio"]
    cuts.write_bytes(manifest)
    words = folder / "tones" / "small.jsonl"
    words.write_text("".join(words.read_text().splitlines(keepends=True)[:-1]).replace(TEXT[0], "SKIP"))
    assert evaluate(*arguments)[0] == 0
    small, _ = json.loads((folder / "table.json").read_text())
    num_lost = len(TEXT[0].split())
    assert small["wer"] == pytest.approx(num_lost / small["words"], abs=1e-6)  # the changed record was taken
    # Other options do not mix with what is there.
    code, _, errors = evaluate(*arguments, "--am-scale", "0.5")
    assert code == 2 and "small.jsonl" in errors


@pytest.mark.slow
def test_systems_are_scored_by_the_same_rules(tmp_path, cuts, evaluate, tiny_bundle_folder):
    lower = gzip.decompress(cuts.read_bytes()).replace(f'"{TEXT[0]}"'.encode(), f'"{TEXT[0].lower()}"'.encode())
    cuts.write_bytes(gzip.compress(lower))
    path = tmp_path / "recipe.yaml"
    path.write_text(f"sets: {{tones: {cuts}}}\nsystems: {{plain: --mode ngram, loose: --mode ngram --ignore-case}}\n")
    arguments = ("--recipe", path, "--bundle", tiny_bundle_folder, "--output", tmp_path / "out", "--json")
    code, text, _ = evaluate(*arguments)
    assert (code, [row["wer"] for row in json.loads(text)]) == (0, [0.0, 0.0])
    assert (tmp_path / "out" / "tones.html").is_file()


@pytest.mark.slow
def test_networks_from_elsewhere_are_systems(tmp_path, cuts, evaluate, tiny_bundle_folder, monkeypatch):
    monkeypatch.setenv("ASR_CACHE", str(tmp_path / "cache"))  # of graphs
    name = scripted(tmp_path / "a.pt")
    (tmp_path / "recipe.yaml").write_text(
        f"sets: {{tones: {cuts}}}\nsystems: {{own: --mode ngram, other: --acoustic-model {name} --mode rnn --adapt}}\n"
    )
    arguments = ("--recipe", tmp_path / "recipe.yaml", "--bundle", tiny_bundle_folder, "--output", tmp_path / "out")
    code, _, errors = evaluate(*arguments)
    assert code == 2 and "it cannot adapt" in errors
    recipe = (tmp_path / "recipe.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(recipe.replace(" --adapt", ""))
    code, text, errors = evaluate(*arguments, "--json")
    own, other = json.loads(text)
    assert code == 0
    assert (own["wer"], other["wer"], own["hit_ratio"]) == (0.0, 0.0, None)
    assert other["hit_ratio"] > 0 and other["real_time_factor"] > 0
    code, text, errors = evaluate(*arguments, "--json")
    assert (code, json.loads(text)) == (0, [own, other])
    assert errors.count("3 of 3 recordings are already in") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--bundle nowhere", "nowhere: there is no bundle here"),
        ("--mode rnn --rnn-lm nowhere", "nowhere: there is no file, folder or bundle of this name"),
        ("--lexicon nowhere", "--lexicon nowhere: there is no such file"),
        ("--acoustic-model torchscript:a.pt --graph nowhere", "--graph nowhere: there is no such file"),
    ],
)
def test_what_a_system_lacks_is_told_before_any_system_recognizes(
    tmp_path, cuts, evaluate, tiny_bundle_folder, options, message
):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"sets: {{tones: {cuts}}}\nsystems:\n  good: --mode ngram\n  bad: {options}\n")
    code, _, errors = evaluate("--recipe", path, "--bundle", tiny_bundle_folder, "--output", tmp_path / "out")
    assert code == 2 and "the options of 'bad' are not valid: " in errors and message in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sets: [", "this is not valid YAML"),
        ("sets: {a: b}", "this is not an evaluation recipe"),
        ("sets: {a: b}\nsystems: [x]", "this is not an evaluation recipe"),
        ("sets: {../a: b}\nsystems: {x: --mode rnn}", "'../a' is not a valid name"),
        ("sets: {a: 3}\nsystems: {x: --mode rnn}", "'a' must be text"),
        (
            "sets: {a: b}\nsystems: {x: --beams rnn}",
            "the options of 'x' are not valid: unrecognized arguments: --beams",
        ),
        ("sets: {a: b}\nsystems: {x: --mode rnnn}", "the options of 'x' are not valid: argument --mode"),
        ("sets: {a: b}\nsystems: {x: --mode rnn --output y}", "--output is not for a system, but for the whole rec"),
        ("sets: {a: b}\nsystems: {x: --recipe an4}", "--recipe is not for a system, but for the whole recipe"),
        ("sets: {a: b}\nsystems: {x: --mode rnn --json}", "--json is not for a system, but for the whole recipe"),
        ("sets: {a: /none}\nsystems: {x: --word-insertion-penalty -1e-3}", "none of its manifests exists"),
        ("sets: {a: /none}\nsystems: {x: --mode rnn}", "none of its manifests exists"),
    ],
)
def test_a_wrong_recipe_is_one_sentence(tmp_path, evaluate, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    code, _, errors = evaluate("--recipe", tmp_path / "recipe.yaml", "--output", tmp_path / "out")
    assert code == 2
    assert message in errors and "recipe.yaml" in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--recipe", "nowhere", "--output", "x"],
            "--recipe nowhere: there is no such file, and recipes/ has an4, libri",
        ),
        (["--recipe", "an4"], "name their folder with --output"),
        (["--recipe", "an4", "--output", "x", "--cuts", "y"], "leave out cuts"),
    ],
)
def test_a_wrong_request_is_one_sentence(evaluate, arguments, message):
    code, _, errors = evaluate(*arguments)
    assert code == 2
    assert message in errors


def test_the_recipes_of_the_project_name_options_that_exist(evaluate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no manifest is here
    for name in ("an4", "librispeech"):
        assert "none of its manifests exists" in evaluate("--recipe", name, "--output", "out")[2]


def test_no_two_systems_of_a_recipe_of_the_project_are_the_same():
    default = "--lm-fusion chunks"  # on a CPU with compiled loops
    for name in ("an4", "librispeech"):
        systems = Recipe.read(name).systems.values()
        meant = {options if "--lm-fusion" in options else f"{options} {default}" for options in systems}
        assert len(meant) == len(systems)
