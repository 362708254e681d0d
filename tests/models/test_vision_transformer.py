"""The Vision Transformer compared with transformers: outputs, positions on other grids, Hugging Face folders."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_models import random_model
from torch import nn

from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.recipe import ModelSettings
from thrifty.data.images.image_arrays import normalized
from thrifty.data.images.image_decoding import decode
from thrifty.kernels.image_resizing import resized_positions
from thrifty.models import build_model, build_model_for, export_model, own_sizes, shape_for
from thrifty.models.model_presets import shape_of
from thrifty.models.vision_transformer import PatchEmbedding, VisionTransformer
from thrifty.models.weight_conversion import export_folder, import_folder

LABELS = ("cat", "dog", "horse", "cow", "sheep")
ENDS = ImageModelSpec(LABELS, 16, 3, (0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "id2label": dict(enumerate(LABELS)),
}


def images(height: int = 16, width: int = 16, channels: int = 3) -> torch.Tensor:
    return torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(1))


def theirs(**changed):
    config = transformers.ViTConfig(**(SIZES | changed))
    return random_model(config, auto=transformers.AutoModelForImageClassification)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vit")
    theirs().save_pretrained(path)
    return path


def test_logits_and_hidden_states_equal_transformers(folder):
    ours, shape = import_folder(folder)
    assert (shape.image, shape.patch, shape.vocabulary, shape.length) == (16, 4, 5, 17)
    model, pixels = theirs(), images()
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(pixels), model(pixels).logits, rtol=1e-5, atol=1e-5)
        hidden = model.vit(pixels).last_hidden_state
        torch.testing.assert_close(ours(pixels), hidden, rtol=1e-5, atol=1e-5)
        assert torch.equal(ours.pooled(hidden), hidden[:, 0])


@pytest.mark.parametrize("size", [(24, 24), (8, 20), (32, 16)])
def test_interpolated_positions_equal_transformers(folder, size):
    ours, _ = import_folder(folder)
    with torch.no_grad():
        wanted = theirs()(images(*size), interpolate_pos_encoding=True).logits
        torch.testing.assert_close(ours.logits(images(*size)), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changed", [{"hidden_act": "relu"}, {"num_channels": 1, "layer_norm_eps": 1e-3}])
def test_variants_of_config_json(tmp_path, changed):
    model = theirs(**changed)
    model.save_pretrained(tmp_path)
    pixels = images(channels=changed.get("num_channels", 3))
    with torch.no_grad():
        ours = import_folder(tmp_path)[0].logits(pixels)
        torch.testing.assert_close(ours, model(pixels).logits, rtol=1e-5, atol=1e-5)


def test_an_exported_folder_has_labels_and_image_processor(folder, tmp_path):
    ours, shape = import_folder(folder)
    export_model(ours, shape, tmp_path / "out", images=ENDS)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(images()).logits, theirs()(images()).logits)
    assert loaded.config.id2label == dict(enumerate(LABELS)) and loaded.config.label2id["cow"] == 3
    processor = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert processor["image_mean"] == [0.5, 0.4, 0.3] and processor["image_std"] == [0.2, 0.2, 0.1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]
    again, _ = import_folder(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


def test_exported_processors_crop_like_training(folder, tmp_path):
    shades = np.linspace(0, 255, 40).astype(np.uint8)
    picture = Image.fromarray(np.broadcast_to(shades[None, :, None], (20, 40, 3)).copy())
    picture.save(tmp_path / "wide.png")
    ours, shape = import_folder(folder)
    export_model(ours, shape, tmp_path / "out", images=ENDS)
    processor = transformers.AutoImageProcessor.from_pretrained(str(tmp_path / "out"))
    trained = torch.from_numpy(decode(tmp_path / "wide.png", ENDS.side).astype(np.float32))[None] / 255
    processed = processor(picture, return_tensors="pt")["pixel_values"].float()
    # a rounded pixel may differ by 1, which is 0.04 of the smallest deviation
    torch.testing.assert_close(processed, normalized(trained, ENDS), rtol=0, atol=0.05)


def test_unsupported_settings_are_refused(tmp_path):
    transformers.ViTConfig(**SIZES, qkv_bias=False).save_pretrained(tmp_path)
    with pytest.raises(RefusedError, match="qkv_bias = False"):
        import_folder(tmp_path)
    transformers.ViTConfig(**(SIZES | {"image_size": [16, 24]})).save_pretrained(tmp_path)
    with pytest.raises(RefusedError, match="square"):
        import_folder(tmp_path)


def test_weights_that_do_not_fit_config_json_are_refused(folder, tmp_path):
    theirs().vit.save_pretrained(tmp_path)
    with pytest.raises(IntegrityError, match="2 missing"):
        import_folder(tmp_path)


def test_pooling_by_class_token_or_mean():
    settings = ModelSettings(preset="vit-nano", depth=1, pool="mean")
    model = build_model_for(ENDS, settings, 0, "classification")
    assert isinstance(model, VisionTransformer)
    hidden = model(images())
    assert hidden.shape == (2, 16, 128) and "embedding.class_token" not in dict(model.named_parameters())
    torch.testing.assert_close(model.logits(images()), model.head(hidden.mean(1)))
    with pytest.raises(RefusedError, match="pools by its class token"):
        export_folder(model, shape_for(ENDS, settings), Path("nowhere"))


def test_positions_on_their_own_grid_equal_the_table():
    table = torch.randn(1, 17, 8)
    assert resized_positions(table, (4, 4), 1) is table
    other = resized_positions(table, (2, 6), 1)
    assert other.shape == (1, 13, 8) and torch.equal(other[:, 0], table[:, 0])
    level = resized_positions(torch.ones(1, 16, 8), (7, 3), 0)
    torch.testing.assert_close(level, torch.ones(1, 21, 8))


def test_resized_positions_keep_float32_under_autocast() -> None:
    table = torch.randn(1, 17, 8, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        positions = resized_positions(table, (3, 5), 1)
    assert positions.dtype == torch.float32 and torch.equal(positions, resized_positions(table, (3, 5), 1))


def test_patches_are_in_row_order():
    embedding = PatchEmbedding(8, 4, 1, 4, "mean")
    nn.init.zeros_(embedding.patch.bias)
    nn.init.ones_(embedding.patch.weight)
    picture = torch.zeros(1, 1, 8, 8)
    picture[..., :4, 4:] = 1.0  # above, to the right: the second patch
    assert embedding(picture)[0, :, 0].tolist() == [0.0, 16.0, 0.0, 0.0]


def test_unsuitable_images_are_refused_with_a_fix():
    model = build_model_for(ENDS, ModelSettings(preset="vit-nano", depth=1), 0, "classification")
    with pytest.raises(UsageError, match="3 channels"):
        model(images(channels=1))
    with pytest.raises(UsageError, match="18 x 16 pixels cannot be cut") as refused:
        model(images(18, 16))
    assert "multiple of 4" in refused.value.fix
    with pytest.raises(UsageError, match="patches of 5") as refused:
        shape_of(ModelSettings(preset="vit-nano", patch=5))
    assert "model.patch = 4" in refused.value.fix
    with pytest.raises(UsageError, match="pool is 'cls'"):
        shape_of(ModelSettings(preset="vit-nano", pool="cls"))
    with pytest.raises(UsageError, match="patch is set, but a llama model has none"):
        shape_of(ModelSettings(patch=4))


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(UsageError, match="cannot learn classification: its tokens do not attend to later tokens"):
        build_model_for(ENDS, ModelSettings(preset="llama-nano"), 0, "classification")
    with pytest.raises(UsageError, match="'vit-nano' cannot learn next_token: it classifies images"):
        build_model(ModelSettings(preset="vit-nano"), 300, 32, 0)


def test_a_trained_model_is_refitted_to_other_images_and_labels(folder):
    settings = ModelSettings(folder=str(folder))
    assert own_sizes(settings)[0] == 16 and own_sizes(ModelSettings())[0] is None
    same = build_model_for(ENDS, settings, 0, "classification")
    other = build_model_for(replace(ENDS, labels=("a", "b"), side=24), settings, 0, "classification")
    shape = shape_for(replace(ENDS, labels=("a", "b"), side=24), settings)
    assert (shape.image, shape.vocabulary, shape.length) == (24, 2, 37)
    assert other.embedding.position.shape == (1, 37, 32) and other.head.weight.shape == (2, 32)
    assert other.head.weight.std() > 0 and not other.head.bias.any()
    with torch.no_grad():
        torch.testing.assert_close(other(images(24, 24)), same(images(24, 24)))
    again = build_model_for(replace(ENDS, labels=("a", "b"), side=24), settings, 0, "classification")
    assert torch.equal(again.head.weight, other.head.weight)
    with pytest.raises(UsageError, match="1 channels, but the model"):
        build_model_for(replace(ENDS, channels=1), settings, 0, "classification")
    with pytest.raises(UsageError, match="patch is set, but the pretrained weights"):
        build_model_for(ENDS, ModelSettings(folder=str(folder), patch=2), 0, "classification")
    fresh = build_model_for(
        replace(ENDS, channels=1), ModelSettings(folder=str(folder), reinitialize=True, patch=2), 0, "classification"
    )
    assert fresh.embedding.patch.weight.shape == (32, 1, 2, 2) and fresh.embedding.position.shape == (1, 65, 32)


def test_initial_values_are_independent_of_depth():
    deep, flat = (build_model_for(ENDS, ModelSettings(preset="vit-nano", depth=d), 3, "classification") for d in (3, 1))
    values = deep.state_dict()
    assert all(torch.equal(values[name], value) for name, value in flat.named_parameters())
    assert values["embedding.class_token"].std() == pytest.approx(0.02, rel=0.2)
    assert values["embedding.patch.weight"].abs().max() <= 1 / 48**0.5
    assert values["blocks.0.mlp.up.weight"].abs().max() == pytest.approx((6 / 640) ** 0.5, rel=0.01)
    assert values["blocks.0.attention.qkv.weight"].abs().max() == pytest.approx((6 / 256) ** 0.5, rel=0.01)


@pytest.mark.parametrize("preset", ["vit-nano", "mae-nano", "clip-nano"])
@pytest.mark.parametrize("patch", [1, 3, 5, 8, 40])
def test_patches_of_any_size_have_fitting_images(preset: str, patch: int) -> None:
    published, _ = own_sizes(ModelSettings(preset=preset))
    side, _ = own_sizes(ModelSettings(preset=preset, patch=patch))
    assert published and side and side % patch == 0 and side <= max(published, patch)
    assert side == published or published % patch
