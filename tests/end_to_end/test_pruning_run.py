"""Digits in folders, one in twenty in the wrong folder: score, view, prune, train."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CommandLine
from PIL import Image

from thrifty.core.score_file import read_scores
from thrifty.data.images.digits import DigitImages

pytestmark = pytest.mark.slow

IMAGES, WRONG = 800, 40
RECIPE = {
    "data.source": "images", "data.size": 8, "data.batch": 64, "evaluation.examples": 20,
    "model.patch": 4, "model.width": 32, "model.heads": 4, "model.depth": 1, "checkpoints.every": 50,
}  # fmt: skip
SETTINGS = [word for name, value in RECIPE.items() for word in ("--set", f"{name}={json.dumps(value)}")]


def write_images(folder: Path) -> None:
    """Write files named by their true label: right-NUMBER.png in the folder of their digit, wrong-NUMBER.png in
    another."""
    digits, drawn = DigitImages("train"), np.random.default_rng(0)
    wrong = set(drawn.choice(IMAGES, WRONG, replace=False).tolist())
    for number in range(IMAGES):
        label = int(digits.labels[number])
        label = (label + int(drawn.integers(1, 10))) % 10 if number in wrong else label
        path = folder / str(label) / f"{'wrong' if number in wrong else 'right'}-{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[number] * 255).byte().numpy()).save(path)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    folder = tmp_path_factory.mktemp("pruning")
    write_images(folder / "images")
    return CommandLine(folder, {"THRIFTY_CACHE": str(folder / "cache")})


@pytest.fixture(scope="module")
def scored(desk: CommandLine) -> dict[str, Any]:
    words = ["score", "vit-digits", "--budget", "150steps", "--steps", "0.5", "--runs", "2", *SETTINGS]
    return json.loads(desk("data", *words, "--out", "scores.safetensors", "--json").stdout)


@pytest.fixture(scope="module")
def names(desk: CommandLine, scored: dict[str, Any]) -> list[str]:
    """Return the files of the training examples by number."""
    (listed,) = (desk.folder / "cache" / "prepared").glob("*/train_names.json")
    return json.loads(listed.read_text())


def test_the_hardest_examples_have_most_wrong_labels(
    desk: CommandLine, scored: dict[str, Any], names: list[str]
) -> None:
    scores = read_scores(desk.folder / "scores.safetensors")
    assert scored["examples"] == len(names) == len(scores)
    assert scored["runs"] == 2 and scored["steps"] == 75 and scored["flops"] > 0 and scored["seconds"] > 0
    wrong = {number for number, name in enumerate(names) if "wrong" in name}
    hardest = scores.scores.argsort(descending=True)[: round(0.05 * len(names))].tolist()
    assert len(wrong & set(hardest)) > 0.6 * len(wrong)


@pytest.mark.slow
def test_a_page_shows_likely_mislabelled_files(desk: CommandLine, scored: dict[str, Any], names: list[str]) -> None:
    report = json.loads(desk("data", "look", "images", "--scores", "scores.safetensors", "--json").stdout)
    page = (desk.folder / report["page"]).read_text()
    suspects = page.split('id="suspects"')[1].split("</section>")[0]
    shown = re.findall(r"\d/(?:right|wrong)-\d+\.png", suspects.split("<details>")[0])
    assert len(shown) == 24 and sum("wrong" in name for name in shown) >= 16  # one at random
    assert shown == [names[number] for number in report["first"][:24]]


PRUNE = ("data", "prune", "scores.safetensors", "--keep-fraction", "0.5", "--drop-hardest", "0.05")


def test_a_choice_is_counted_and_written_as_a_recipe(desk: CommandLine, scored: dict[str, Any]) -> None:
    output = desk(*PRUNE, "--write", "chosen.toml").stdout
    assert f"{scored['examples']:,}" in output and "hardest examples dropped: " in output
    assert "written: thrifty train chosen.toml" in output and scored["sha256"] in output
    settings = tomllib.loads((desk.folder / "chosen.toml").read_text())["techniques"]["data_selection"]["prune"]
    assert settings["sha256"] == scored["sha256"] and Path(settings["scores"]).is_absolute()
    again = desk(*PRUNE, "--write", "chosen.toml", exit_code=2).stderr
    assert "chosen.toml' exists already" in again


@pytest.mark.slow
def test_the_report_shows_kept_and_removed_examples(desk: CommandLine, scored: dict[str, Any]) -> None:
    desk(*PRUNE, "--write", "pruned.toml")
    desk("train", "pruned.toml", "--name", "pruned", "--budget", "4steps")
    selection = json.loads((desk.run("pruned") / "selection.json").read_text())
    assert selection["kept"] == round(0.5 * scored["examples"])
    desk("report", "pruned")
    page = (desk.run("pruned") / "report.html").read_text()
    for group in selection["shown"].values():
        assert len(group) == 24
        assert all(each["picture"] in page and each["file"] in page for each in group)
    notes = json.loads((desk.run("pruned") / "explanation.json").read_text())["techniques"]
    (touched,) = (each["touched"] for each in notes if each["name"] == "data_selection.prune")
    assert any(line.startswith("scoring cost") for line in touched) and any(
        "kept of each class" in line for line in touched
    )
    assert desk.records("pruned", "evaluation")[-1]["step"] == 4


def test_scores_of_other_data_are_refused(desk: CommandLine, scored: dict[str, Any]) -> None:
    option = f'data_selection.prune:scores="scores.safetensors",sha256="{scored["sha256"]}"'
    refused = desk("train", "vit-digits", "--name", "other", "--with", option, "--budget", "4steps", exit_code=2)
    assert "examples of other data than these 1,300" in refused.stderr and "thrifty data score" in refused.stderr
    assert not (desk.run("other") / "records.jsonl").exists()
    look = desk("data", "look", "digits", "--scores", "scores.safetensors", exit_code=2)
    assert "which was scored" in look.stderr


def test_options_without_meaning_are_refused(desk: CommandLine, scored: dict[str, Any]) -> None:
    for words, told in (
        (["look", "images", "--scores", "scores.safetensors", "--size", "8"], "--size has no effect with --scores"),
        (["look", "images", "--keep-fraction", "0.5"], "--keep-fraction has no effect without --scores"),
        (["prune", "scores.safetensors", "--recipe", "vit-digits"], "--recipe applies only with --write"),
        (["prune", "scores.safetensors", "--keep-fraction", "2"], "keep must be"),
        (["prune", "nothing"], "there is no score file"),
        (["score", "vit-digits", "--steps", "soon"], "is not a number of steps"),
        (["score", "vit-digits", "--method", "el2m"], "did you mean 'el2n'"),
    ):
        assert told in desk("data", *words, exit_code=2).stderr, words
