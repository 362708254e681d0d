"""The masked autoencoder compared with transformers: outputs, folders, and the Vision Transformer inside."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from tiny_models import random_model

from thrifty.core.batches import Batch
from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.objective import Prediction
from thrifty.core.recipe import ModelSettings
from thrifty.kernels.image_patches import blank_patches, sinusoids_2d
from thrifty.models import build_model, build_model_for, export_model, own_sizes, shape_for
from thrifty.models.masked_autoencoder import MaskedAutoencoder
from thrifty.models.model_presets import shape_of
from thrifty.models.vision_transformer import VisionTransformer
from thrifty.models.weight_conversion import import_folder
from thrifty.objectives.masked_reconstruction import MaskedReconstruction

UNLABELLED = ImageModelSpec((), 16, 3, (0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
LABELLED = replace(UNLABELLED, labels=("cat", "dog", "horse"))
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "decoder_hidden_size": 16,
    "decoder_intermediate_size": 24,
    "decoder_num_hidden_layers": 3,
    "decoder_num_attention_heads": 2,
}


def theirs(**changed):
    """Return a model of transformers with random positions: transformers 5 leaves those of a new model at zero."""
    model = random_model(transformers.ViTMAEConfig(**(SIZES | changed)), auto=transformers.AutoModelForPreTraining)
    generator = torch.Generator().manual_seed(5)
    for table in (model.vit.embeddings.position_embeddings, model.decoder.decoder_pos_embed):
        table.data.normal_(generator=generator)
    return model


def images(size: int = 16) -> torch.Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))


def noise(patches: int = 16) -> torch.Tensor:
    return torch.rand(3, patches, generator=torch.Generator().manual_seed(2))


def split_of(noise: torch.Tensor, visible: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kept and removed positions of transformers in ascending order; the smallest noise is kept."""
    order = noise.argsort(1)
    return order[:, :visible].sort(1).values, order[:, visible:].sort(1).values


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mae")
    theirs().save_pretrained(path)
    return path


@pytest.mark.parametrize("rate", [0.75, 0.5])
@pytest.mark.parametrize("normalize", [True, False])
def test_predictions_and_loss_equal_transformers(folder, normalize, rate):
    ours, shape = import_folder(folder)
    assert isinstance(ours, MaskedAutoencoder) and (shape.vocabulary, shape.length, shape.decoder_depth) == (48, 17, 3)
    model = theirs(norm_pix_loss=normalize, mask_ratio=rate)
    visible, removed = split_of(noise(), int(16 * (1 - rate)))
    with torch.no_grad():
        wanted = model(images(), noise=noise())
        torch.testing.assert_close(ours.logits(images(), visible), wanted.logits, rtol=1e-5, atol=1e-5)
        objective = MaskedReconstruction(rate=rate, normalize=normalize, patch=4)
        batch = Batch({"inputs": images(), "visible": visible, "removed": removed}, torch.full((3,), 1 / 3))
        hidden = ours(images(), visible).gather(1, removed[..., None].expand(-1, -1, 16))
        losses = objective.losses(Prediction(output=ours.head(hidden)), batch)
        torch.testing.assert_close(losses @ batch.weight, wanted.loss, rtol=1e-5, atol=1e-5)


def test_gradients_equal_transformers(folder):
    ours, model = import_folder(folder)[0], theirs()
    visible, removed = split_of(noise(), 4)
    batch = Batch({"inputs": images(), "visible": visible, "removed": removed}, torch.full((3,), 1 / 3))
    hidden = ours(images(), visible).gather(1, removed[..., None].expand(-1, -1, 16))
    (
        MaskedReconstruction(normalize=False, patch=4).losses(Prediction(output=ours.head(hidden)), batch)
        @ batch.weight
    ).backward()
    model(images(), noise=noise()).loss.backward()
    for mine, yours in (
        (ours.embedding.patch.weight, model.vit.embeddings.patch_embeddings.projection.weight),
        (ours.decoder.mask_token, model.decoder.mask_token),
        (ours.blocks[0].mlp.up.weight, model.vit.layers[0].mlp.fc1.weight),
        (ours.decoder.blocks[2].mlp.down.bias, model.decoder.decoder_layers[2].mlp.fc2.bias),
    ):
        torch.testing.assert_close(mine.grad, yours.grad, rtol=1e-4, atol=1e-6)


def test_the_encoder_equals_transformers_on_visible_patches(folder):
    ours, model = import_folder(folder)[0], theirs()
    order = noise().argsort(1)[:, :4]
    with torch.no_grad():
        wanted = model.vit(images(), noise=noise()).last_hidden_state
        torch.testing.assert_close(ours.encode(images(), order), wanted, rtol=1e-5, atol=1e-5)


def test_blanks_are_zero_patches_hidden_from_the_decoder(folder):
    ours = import_folder(folder)[0].eval()
    visible, _ = split_of(noise(), 6)
    with torch.no_grad():
        states = ours(images(), visible, blanks=True)
        hidden = ours.encode(blank_patches(images(), visible, 4))
        at_places = torch.cat((hidden[:, :1], hidden[:, 1:].gather(1, visible[..., None].expand(-1, -1, 32))), 1)
        torch.testing.assert_close(states, ours.decoder(at_places, visible, (4, 4)))
        assert (states - ours(images(), visible)).abs().max() > 1e-3
        torch.testing.assert_close(ours(images(), blanks=True), ours(images()))


def test_new_models_have_fixed_positions():
    settings = ModelSettings(preset="mae-nano", depth=2, width=64, decoder_width=32, decoder_depth=1)
    model = build_model_for(replace(UNLABELLED, side=32), settings, 0, "masked_reconstruction")
    for table, width in ((model.embedding.position, 64), (model.decoder.position, 32)):
        assert torch.equal(table[0, 1:], sinusoids_2d(8, 8, width)) and not table[0, 0].any()
    assert not any("position" in name for name, _ in model.named_parameters())
    assert {"embedding.position", "decoder.position"} <= model.state_dict().keys()
    assert model.decoder.blocks[0].mlp.up.out_features == 128 and len(model.decoder.blocks) == 1


def test_initial_values_have_the_spread_of_their_law():
    model = build_model_for(
        replace(UNLABELLED, side=32), ModelSettings(preset="mae-nano", depth=1), 3, "masked_reconstruction"
    )
    values = model.state_dict()
    assert values["embedding.patch.weight"].abs().max() == pytest.approx((6 / (128 + 48)) ** 0.5, rel=0.01)
    assert values["decoder.embed.weight"].abs().max() == pytest.approx((6 / (128 + 64)) ** 0.5, rel=0.01)
    assert values["head.weight"].abs().max() == pytest.approx((6 / (64 + 48)) ** 0.5, rel=0.02)
    assert values["decoder.mask_token"].std() == pytest.approx(0.02, rel=0.3)
    assert not values["head.bias"].any() and (values["decoder.norm.weight"] == 1).all()


def test_an_exported_folder_loads_in_both_libraries(folder, tmp_path):
    ours, shape = import_folder(folder)
    export_model(ours, shape, tmp_path / "out", images=UNLABELLED)
    loaded = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "out").eval()
    assert type(loaded).__name__ == "ViTMAEForPreTraining"
    with torch.no_grad():
        assert torch.equal(loaded(images(), noise=noise()).logits, theirs()(images(), noise=noise()).logits)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "id2label" not in config and "vocab_size" not in config and config["decoder_num_hidden_layers"] == 3
    processor = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert processor["size"] == {"shortest_edge": 16} and processor["crop_size"] == {"height": 16, "width": 16}
    again, _ = import_folder(tmp_path / "out")
    assert again.state_dict().keys() == ours.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in ours.state_dict().items())


def test_a_position_table_of_another_size_is_refused(folder, tmp_path):
    model = theirs(image_size=24)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(IntegrityError, match=r"embedding\.position has the shape \(1, 37, 32\)"):
        import_folder(tmp_path)


@pytest.mark.parametrize("pool", ["class", "patches"])
def test_a_classifier_starts_from_the_trained_encoder(folder, pool):
    settings = ModelSettings(folder=str(folder), pool=None if pool == "class" else pool)
    ours = build_model_for(LABELLED, settings, 0, "classification")
    assert isinstance(ours, VisionTransformer)
    vit = transformers.ViTModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        hidden = vit(images()).last_hidden_state
        torch.testing.assert_close(ours(images()), hidden, rtol=1e-5, atol=1e-5)
        wanted = hidden[:, 0] if pool == "class" else hidden[:, 1:].mean(1)
        torch.testing.assert_close(ours.pooled(ours(images())), wanted, rtol=1e-5, atol=1e-5)
        few = torch.arange(6).expand(3, -1)
        assert ours.pooled(ours(images(), few)).shape == (3, 32)
    assert ours.head.weight.shape == (3, 32) and ours.head.weight.std() > 0 and not ours.head.bias.any()
    assert "embedding.position" in dict(ours.named_parameters())
    shape = shape_for(LABELLED, settings)
    assert (shape.style, shape.pool, shape.vocabulary, shape.length) == ("vit", pool, 3, 17)
    again = build_model_for(LABELLED, settings, 0, "classification")
    assert torch.equal(again.head.weight, ours.head.weight)


def test_a_classifier_from_an_autoencoder_exports_as_vit(folder, tmp_path):
    settings = ModelSettings(folder=str(folder))
    ours = build_model_for(LABELLED, settings, 0, "classification")
    export_model(ours, shape_for(LABELLED, settings), tmp_path / "out", images=LABELLED)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(images()).logits, ours.logits(images()), rtol=1e-5, atol=1e-5)
    assert loaded.config.id2label == dict(enumerate(LABELLED.labels))


def test_a_trained_autoencoder_continues_at_another_image_size(folder):
    settings = ModelSettings(folder=str(folder))
    assert (own_sizes(settings), own_sizes(ModelSettings())) == ((16, 4), (None, None))
    larger = build_model_for(replace(UNLABELLED, side=24), settings, 0, "masked_reconstruction")
    same = build_model_for(UNLABELLED, settings, 0, "masked_reconstruction")
    assert larger.embedding.position.shape == (1, 37, 32) and larger.decoder.position.shape == (1, 37, 16)
    assert shape_for(replace(UNLABELLED, side=24), settings).length == 37
    with torch.no_grad():
        torch.testing.assert_close(larger(images(24)), same(images(24)))
    fresh = build_model_for(UNLABELLED, replace(settings, reinitialize=True, patch=8), 0, "masked_reconstruction")
    assert fresh.head.out_features == 192 and fresh.embedding.position.shape == (1, 5, 32)


def test_unsuitable_settings_are_refused_with_a_fix(folder):
    with pytest.raises(UsageError, match="without a class token, but a trained MAE has one") as refused:
        build_model_for(LABELLED, ModelSettings(folder=str(folder), pool="mean"), 0, "classification")
    assert '"patches"' in refused.value.fix
    with pytest.raises(UsageError, match="pool is set, but the pretrained weights"):
        build_model_for(UNLABELLED, ModelSettings(folder=str(folder), pool="patches"), 0, "masked_reconstruction")
    with pytest.raises(UsageError, match="decoder_depth is set, but the pretrained weights"):
        build_model_for(UNLABELLED, ModelSettings(folder=str(folder), decoder_depth=1), 0, "masked_reconstruction")
    with pytest.raises(UsageError, match="1 channels, but the model"):
        build_model_for(replace(UNLABELLED, channels=1), ModelSettings(folder=str(folder)), 0, "masked_reconstruction")
    with pytest.raises(
        UsageError, match="'vit-nano' cannot learn masked_reconstruction: it classifies images"
    ) as refused:
        build_model_for(UNLABELLED, ModelSettings(preset="vit-nano"), 0, "masked_reconstruction")
    assert 'model="mae-nano"' in refused.value.fix
    with pytest.raises(UsageError, match="'mae-nano' cannot learn next_token: it reconstructs the pixels"):
        build_model(ModelSettings(preset="mae-nano"), 300, 32, 0)
    with pytest.raises(UsageError, match="decoder of width 30 does not divide into 4 heads"):
        shape_of(ModelSettings(preset="mae-nano", decoder_width=30))
    with pytest.raises(UsageError, match="model: width is 126") as refused:
        shape_of(ModelSettings(preset="mae-nano", width=126, heads=2))
    assert refused.value.fix == "set model.width to 128"
    with pytest.raises(UsageError, match="decoder_width is set, but a vit model has none"):
        shape_of(ModelSettings(preset="vit-nano", decoder_width=64))
