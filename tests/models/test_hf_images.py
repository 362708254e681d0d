"""Image classifiers of transformers: other labels, other sizes of images, exports, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.recipe import ModelSettings
from thrifty.modeling.patch_grid import accept_other_sizes
from thrifty.models import sees_images
from thrifty.models.hf_folder import read_config
from thrifty.models.model_builder import build_model_for, label_objective
from thrifty.models.model_export import export_model
from thrifty.models.model_resolution import own_sizes

transformers = pytest.importorskip("transformers")

BODY: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
PATCHES = {"image_size": 32, "patch_size": 8, **BODY}
TEXT = {"vocab_size": 99, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, **BODY}
TOWERS = {"vision_config": PATCHES, "text_config": TEXT}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
FAMILIES: dict[str, dict[str, Any]] = {
    "DeiTForImageClassification": PATCHES,
    "DeiTForImageClassificationWithTeacher": PATCHES,
    "BeitForImageClassification": PATCHES,
    "Dinov2ForImageClassification": {"image_size": 32, "patch_size": 8, **BODY},
    "SiglipForImageClassification": TOWERS,
    "CLIPForImageClassification": TOWERS,
    "SwinForImageClassification": {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4
    },
    "ConvNextForImageClassification": {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2},
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "PoolFormerForImageClassification": STAGES,
    "MobileViTForImageClassification": {"image_size": 32, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8] * 7},
    "PvtForImageClassification": {"image_size": 32, "num_attention_heads": [1, 1, 2, 2], **STAGES},
}  # fmt: skip
ANY_SIZE = {"ConvNext", "ResNet", "PoolFormer", "MobileViT", "Swin"}
"""Families whose parameters do not depend on the size of images."""
ENDS = ImageModelSpec(tuple("abcde"), 32, 3, (0.5,) * 3, (0.25,) * 3)


def folder_of(name: str, path: Path, labels: int = 5, **settings: Any) -> Path:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    kind(kind.config_class(num_labels=labels, **{**FAMILIES[name], **settings})).save_pretrained(path)
    return path


def built(folder: Path, ends: ImageModelSpec = ENDS, **settings: Any) -> Any:
    return build_model_for(ends, ModelSettings(folder=str(folder), **settings), 0, "classification").eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers_and_of_an_export(name: str, tmp_path: Path) -> None:
    folder, images = folder_of(name, tmp_path / "in"), torch.randn(2, 3, 32, 32)
    model = built(folder)
    theirs = getattr(transformers, name).from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(images), theirs(images).logits)
        export_model(model, None, tmp_path / "out", images=ENDS)
        again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
        torch.testing.assert_close(again(images).logits, model(images))
    assert again.config.id2label == dict(enumerate(ENDS.labels))
    assert read_config(tmp_path / "out")["architectures"] == [name]
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert list(processor.image_mean) == list(ENDS.mean)


@pytest.mark.parametrize("name", FAMILIES)
def test_another_number_of_labels_changes_the_head_alone(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path, labels=9)
    theirs = dict(getattr(transformers, name).from_pretrained(folder).named_parameters())
    model = built(folder)
    changed = {key for key, value in model.lm.named_parameters() if not value.equal(theirs[key])}
    assert changed and all(key.startswith(("classifier", "cls_class", "distillation_class")) for key in changed)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize("side", [16, 48])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_weights_are_adapted_to_another_size_or_refused(name: str, side: int, tmp_path: Path) -> None:
    folder, ends = folder_of(name, tmp_path / "in"), replace(ENDS, side=side)
    if name.startswith("Pvt"):
        with pytest.raises(RefusedError, match="are for images of 32 pixels") as refused:
            built(folder, ends)
        assert "data.size=32" in refused.value.fix
        return
    model = built(folder, ends)
    images = torch.randn(2, 3, side, side)
    export_model(model, None, tmp_path / "out", images=ends)
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(images).logits, model(images))  # without interpolation at each call
    if not name.startswith(tuple(ANY_SIZE)):
        theirs = getattr(transformers, name).from_pretrained(folder).eval()
        with torch.no_grad():
            other = theirs(images, interpolate_pos_encoding=True).logits
        assert (other - model(images)).abs().max() < 0.05 * other.abs().max()  # torch's own interpolation


@pytest.mark.parametrize("name", ["DeiTForImageClassification", "SiglipForImageClassification"])
def test_smaller_images_of_a_curriculum_are_interpolated(name: str, tmp_path: Path) -> None:
    model = built(folder_of(name, tmp_path))
    accept_other_sizes(model, "curriculum.resolution")
    assert model(torch.randn(2, 3, 16, 24)).shape == (2, 5)


def test_new_weights_take_sizes_of_the_data(tmp_path: Path) -> None:
    folder = folder_of("DeiTForImageClassification", tmp_path)
    model = built(folder, replace(ENDS, side=24, channels=1), reinitialize=True)
    assert model(torch.randn(2, 1, 24, 24)).shape == (2, 5)
    with pytest.raises(UsageError, match="the images have 1 channels, but the model has 3"):
        built(folder, replace(ENDS, channels=1))


def test_sizes_and_objective_come_from_the_folder(tmp_path: Path) -> None:
    folder = folder_of("SwinForImageClassification", tmp_path)
    settings = ModelSettings(folder=str(folder))
    assert own_sizes(settings) == (32, 2) and sees_images(settings)
    assert label_objective(read_config(folder)) == "classification"


def test_other_objectives_are_refused(tmp_path: Path) -> None:
    folder = folder_of("SwinForImageClassification", tmp_path)
    with pytest.raises(UsageError, match="cannot learn masked_reconstruction") as refused:
        build_model_for(replace(ENDS, labels=()), ModelSettings(folder=str(folder)), 0, "masked_reconstruction")
    assert "--loss classification" in refused.value.fix
