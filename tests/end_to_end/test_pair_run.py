"""Runs on images with captions on the command line: train, resume, explain, report, export, retrieve."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command_line import CommandLine, assert_equal
from PIL import Image

from thrifty.core.recipe import DataSettings
from thrifty.data.pairs.pair_data import open_image_pairs
from thrifty.training.trained_model import load_trained_model

SIDE = 16
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "white": (230, 230, 230)}


def paint(path: Path, colour: str, row: int, column: int, shade: int = 0) -> None:
    """Return a dark square with a coloured spot in one of 16 positions."""
    pixels = np.full((SIDE, SIDE, 3), shade, np.uint8)
    pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = COLOURS[colour]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    folder = tmp_path_factory.mktemp("pairs")
    lines = []
    for number in range(128):
        colour, (row, column) = list(COLOURS)[number % 4], divmod(number // 4 % 16, 4)
        paint(folder / "spots" / f"{number:03}.png", colour, row, column, shade=number // 64)
        caption = f"a {colour} spot in row {row} and column {column}"
        lines.append(json.dumps({"image": f"{number:03}.png", "caption": caption}))
    (folder / "spots" / "captions.jsonl").write_text("\n".join(lines))
    for colour in COLOURS:
        for place in range(8):
            paint(folder / "labelled" / colour / f"{place}.png", colour, *divmod(place, 4), shade=place % 2)
    return CommandLine(folder, {"THRIFTY_CACHE": str(folder / "cache")})


SMALL = {
    "model.depth": 1, "model.width": 32, "model.heads": 2, "model.patch": 4, "data.size": SIDE, "data.batch": 16,
    "model.text_depth": 1, "model.text_width": 32, "model.text_heads": 2,
    "data.length": 24, "data.vocabulary": 300, "data.held_out": 0.25, "evaluation.examples": 32, "evaluation.every": 3,
    "checkpoints.every": 3, "data.augment.crop": 0,
}  # fmt: skip


def words(name: str, *others: str, steps: int = 6, **changed: Any) -> list[str]:
    values = SMALL | {key.replace("__", "."): value for key, value in changed.items()}
    settings = [word for path, value in values.items() for word in ("--set", f"{path}={json.dumps(value)}")]
    return ["train", "flip-emoji", "--data", "spots", "--name", name, "--budget", f"{steps}steps", *settings, *others]


@pytest.fixture(scope="module")
def finished(desk: CommandLine) -> dict[str, Any]:
    done = desk(*words("spots-run"))
    summary = json.loads((desk.run("spots-run") / "summary.json").read_text())
    return summary | {"stdout": done.stdout}


@pytest.mark.slow
def test_loss_and_accuracy_are_shown_for_every_run(desk: CommandLine, finished: dict[str, Any]) -> None:
    assert finished["unit"] == "images" and finished["tokens"] == 6 * 16
    assert 0 <= finished["held_out"]["accuracy"] <= 1
    assert f"held-out loss {finished['held_out_loss']:.3f} nats, accuracy" in finished["stdout"]
    desk("report", "spots-run")
    page = (desk.run("spots-run") / "report.html").read_text()
    assert "Held-out accuracy" in page and "images/s, median" in page
    output = desk("explain", *words("explained")[1:]).stdout
    assert "data_selection.drop_patches" in output and "after image.embedding, 50% of the patches are dropped" in output


def test_a_resumed_run_equals_an_uninterrupted_one(desk: CommandLine, finished: dict[str, Any]) -> None:
    expected, evaluated = desk.tensors("spots-run"), desk.records("spots-run", "evaluation")
    shutil.copytree(desk.run("spots-run"), desk.run("stopped"))
    shutil.rmtree(desk.run("stopped") / "checkpoints" / "step-00000006")
    desk("resume", "stopped")
    assert_equal(desk.tensors("stopped"), expected)
    assert desk.records("stopped", "evaluation")[-1] == evaluated[-1]


def test_an_exported_model_predicts_the_same_in_transformers(desk: CommandLine, finished: dict[str, Any]) -> None:
    desk("export", "spots-run", "out")
    loaded = transformers.CLIPModel.from_pretrained(desk.folder / "out").eval()
    restored, _ = load_trained_model(desk.run("spots-run"))
    settings = DataSettings(
        source=str(desk.folder / "spots"), batch=16, length=24, vocabulary=300, size=SIDE, held_out=0.25
    )
    batch = next(open_image_pairs(settings, 0, None, print).held_out.batches(8, 8))
    with torch.no_grad():
        wanted = loaded(batch["tokens"], batch["inputs"], batch["keep"].long()).logits_per_image
        vectors = restored(batch["inputs"], batch["tokens"], batch["keep"]).unbind(1)
    torch.testing.assert_close(vectors[0] @ vectors[1].T, wanted, rtol=1e-5, atol=1e-5)


def test_an_exported_model_continues_with_its_own_tokenizer(desk: CommandLine, finished: dict[str, Any]) -> None:
    if not (desk.folder / "start").exists():
        desk("export", "spots-run", "start")
    recipe = desk.folder / "go-on.toml"
    recipe.write_text(
        f"""
        [model]
        folder = {str(desk.folder / "start")!r}
        [data]
        source = "spots"
        tokenizer = {str(desk.folder / "start" / "tokenizer.json")!r}
        size = {SIDE}
        batch = 16
        length = 24
        held_out = 0.25
        [objective]
        name = "contrastive"
        [evaluation]
        examples = 32
        at_start = true
        [techniques."optimizers.adamw"]
        """
    )
    again = desk.json("train", str(recipe), "--name", "again", "--budget", "1steps")
    assert again["steps"] == 1
    assert again["held_out_loss_at_start"] == pytest.approx(finished["held_out_loss"], rel=1e-3)


@pytest.mark.slow
def test_a_model_retrieves_captions_and_classifies_colours(desk: CommandLine) -> None:
    """With half of the patches dropped, in micro-batches, the right one of 64 captions is found far more often than
    at random."""
    cache = ("--with", "large_batch.gradient_cache:micro_batches=2")
    desk(*words("learned", *cache, steps=80, data__batch=32, checkpoints__every=80))
    results = desk.json(
        "retrieve", "learned", "--classes", "labelled", "--prompt", "a {} spot in row 0", "--prompt", "{}"
    )
    assert results["pairs"] > results["different_captions"] > 16
    assert results["by_chance"]["captions R@1"] < 0.1
    assert results["retrieval"]["captions R@5"] > 3 * results["by_chance"]["captions R@5"]
    assert (
        results["retrieval"]["images R@10"] >= results["retrieval"]["images R@5"] >= results["retrieval"]["images R@1"]
    )
    assert results["zero_shot"]["labels"] == 4 and results["zero_shot"]["accuracy"] > 0.5
    output = desk("retrieve", "learned").stdout
    assert "captions R@10" in output and "chance" in output


def test_unsuitable_retrieval_is_refused_with_a_fix(desk: CommandLine, finished: dict[str, Any]) -> None:
    assert "requires images to classify" in desk("retrieve", "spots-run", "--prompt", "{}", exit_code=2).stderr
    refused = desk("retrieve", "spots-run", "--classes", "labelled", "--prompt", "a spot", exit_code=2).stderr
    assert "must have one {} for the label" in refused
    refused = desk("retrieve", "spots-run", "--classes", "digits", exit_code=2).stderr
    assert "1 channels, but the run has 3" in refused
    refused = desk(*words("parts", "--with", "large_batch.gradient_accumulation"), exit_code=2).stderr
    assert "--with large_batch.gradient_cache" in refused
