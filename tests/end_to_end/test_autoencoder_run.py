"""A masked autoencoder on the command line: train, resume, explain, report, export, continue."""

import base64
import io
import json
import re
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command_line import CommandLine, assert_equal
from PIL import Image

from thrifty.kernels.token_gather import gather_tokens
from thrifty.techniques.data_selection.drop_masked_patches import DropMaskedPatches
from thrifty.training.data_opening import open_examples
from thrifty.training.evaluation import held_out_loss
from thrifty.training.trained_model import load_trained_model

SMALL = {"model.width": 32, "model.heads": 4, "model.depth": 2, "model.decoder_depth": 1, "data.batch": 16}
FEW = {"evaluation.examples": 100, "checkpoints.every": 3, "evaluation.every": 3}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    folder = tmp_path_factory.mktemp("autoencoder")
    return CommandLine(folder, {"THRIFTY_CACHE": str(folder / "cache")})


def settings(**values: Any) -> list[str]:
    given = {name.replace("__", "."): value for name, value in values.items()}
    return [word for path, value in given.items() for word in ("--set", f"{path}={json.dumps(value)}")]


@pytest.fixture(scope="module")
def finished(desk: CommandLine) -> dict[str, Any]:
    """Return summary and output of a run on digits, shared by several tests; it is exported to "out" and has a
    report."""
    done = desk("train", "mae-digits", "--name", "digits", "--budget", "6steps", *settings(**SMALL, **FEW))
    desk("export", "digits", "out")
    desk("report", "digits")
    summary = json.loads((desk.run("digits") / "summary.json").read_text())
    return summary | {"stdout": done.stdout, "stderr": done.stderr}


@pytest.mark.slow
def test_the_loss_is_named_and_labels_are_not_required(desk: CommandLine, finished: dict[str, Any]) -> None:
    assert finished["unit"] == "images" and finished["tokens"] == 6 * 16
    assert finished["loss_in"] == "mean squared error" and "label_entropy" not in finished
    assert f"held-out loss {finished['held_out_loss']:.3f}, mean squared error" in finished["stdout"]
    assert json.loads((desk.run("digits") / "images.json").read_text())["labels"] == []
    page = (desk.run("digits") / "report.html").read_text()
    assert "mean squared error" in page and "images/s, median" in page
    for text in ("nats", "Held-out accuracy", "label frequencies alone"):
        assert text not in page.partition("<body")[2].partition("<script")[0], text


@pytest.mark.slow
def test_the_report_shows_masked_and_reconstructed_images(desk: CommandLine, finished: dict[str, Any]) -> None:
    page = (desk.run("digits") / "report.html").read_text()
    assert len({*re.findall(r'<img src="data:image/png;base64,([^"]+)', page)}) == 3 * 8
    for name in ("original", "masked", "reconstructed"):
        assert f'alt="Example 8, {name}"' in page
    kept = json.loads((desk.run("digits") / "pictures.json").read_text())
    assert kept["step"] == 6 and "predicted removed patches" in kept["about"]
    _, data = open_examples(load_trained_model(desk.run("digits"))[1])
    batch = next(data.held_out.batches(8, 8))
    for row, shown in enumerate(kept["shown"]):
        pixels = {name: opened(address) for name, address in shown["pictures"].items()}
        true = (batch["inputs"][row, 0] * data.ends.std[0] + data.ends.mean[0]) * 255
        assert (pixels["original"] - true).abs().max() <= 0.51
        seen = torch.zeros(16, dtype=torch.bool)
        seen[batch["visible"][row]] = True
        is_seen = seen.view(4, 1, 4, 1).expand(4, 2, 4, 2).reshape(8, 8)
        assert torch.equal(pixels["reconstructed"][is_seen], pixels["original"][is_seen])
        assert (pixels["masked"][~is_seen] - 255 * data.ends.mean[0]).abs().max() <= 0.51


def opened(address: str) -> torch.Tensor:
    """Return a grey picture (h, w), 0 to 255, as Pillow reads it."""
    picture = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    return torch.from_numpy(np.asarray(picture, dtype=np.float32).copy())


def test_a_resumed_run_equals_an_uninterrupted_one(desk: CommandLine, finished: dict[str, Any]) -> None:
    expected, evaluated = desk.tensors("digits"), desk.records("digits", "evaluation")
    assert {"buffers/embedding.position", "buffers/decoder.position"} <= expected.keys()
    shutil.copytree(desk.run("digits"), desk.run("stopped"))
    shutil.rmtree(desk.run("stopped") / "checkpoints" / "step-00000006")
    desk("resume", "stopped")
    assert_equal(desk.tensors("stopped"), expected)
    assert desk.records("stopped", "evaluation")[-1] == evaluated[-1]


def test_an_exported_model_reconstructs_the_same_in_transformers(desk: CommandLine, finished: dict[str, Any]) -> None:
    names = sorted(path.name for path in (desk.folder / "out").iterdir())
    assert names == ["README.md", "config.json", "model.safetensors", "preprocessor_config.json"]
    model = transformers.AutoModelForPreTraining.from_pretrained(desk.folder / "out", norm_pix_loss=True).eval()
    restored, recipe = load_trained_model(desk.run("digits"))
    objective, data = open_examples(recipe)
    batch = next(data.held_out.batches(100, 100))
    noise = torch.ones(100, 16).scatter(1, batch["visible"], 0.0)
    with torch.no_grad():
        theirs = model(batch["inputs"], noise=noise)
        pixels = restored.logits(batch["inputs"], batch["visible"])
        torch.testing.assert_close(
            gather_tokens(theirs.logits, batch["removed"]), gather_tokens(pixels, batch["removed"])
        )
    judged = DropMaskedPatches().objective(objective)  # as evaluated in the run, which used 16-bit values
    loss = held_out_loss(restored, judged, data.held_out.batches(100, 100), torch.device("cpu"))
    assert float(theirs.loss) == pytest.approx(loss, rel=1e-5)
    assert finished["held_out_loss"] == pytest.approx(loss, rel=1e-3)


def test_explain_describes_images_without_labels(desk: CommandLine) -> None:
    output = desk("explain", "mae-digits", *settings(**SMALL)).stdout
    assert "1,300 training images of 8 x 8 x 1\n" in output.replace("x 1 \n", "x 1\n")
    assert "2 blocks process visible patches, 1 all patches" in output


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", [["--with", "adapters.head_only", *settings(model__pool="patches")], []])
def test_a_classifier_starts_from_the_encoder(desk: CommandLine, finished: dict[str, Any], words: list[str]) -> None:
    name = "probe" if words else "tuned"
    rest = settings(data__batch=16, **FEW)
    summary = desk.json("train", "vit-digits", "--name", name, "--model", "out", "--budget", "3steps", *words, *rest)
    assert 0 <= summary["held_out"]["accuracy"] <= 1
    start, trained = desk.tensors("digits"), desk.tensors(name)
    block = "parameters/blocks.1.mlp.up.weight"
    assert torch.equal(start[block], trained[block]) is bool(words)
    assert trained["parameters/head.weight"].shape == (10, 32)
    desk("export", name, f"{name}-out", exit_code=2 if words else 0)  # transformers' ViT pools by its class token


def test_unsuitable_data_and_models_are_refused(desk: CommandLine) -> None:
    refused = desk("train", "mae-digits", "--data", str(desk.folder), exit_code=2).stderr
    assert "'mae-nano' cannot learn" in refused or "contains none" in refused or "images" in refused
    words = ("--set", "objective.name=masked_reconstruction", "--budget", "1steps")
    assert "'vit-nano' cannot learn masked_reconstruction" in desk("train", "vit-digits", *words, exit_code=2).stderr
