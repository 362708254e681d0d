"""CLIP compared with transformers: outputs, Hugging Face folders, and models built for images with captions."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import random_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.model_spec import ImageModelSpec, PairModelSpec, TextModelSpec
from thrifty.core.recipe import ModelSettings
from thrifty.data.pairs.caption_rows import caption_rows
from thrifty.data.tokenizer import read_tokenizer
from thrifty.kernels.contrastive_loss import contrastive_losses
from thrifty.models import build_model_for, export_model, own_sizes, shape_for
from thrifty.models.contrastive_model import INITIAL_SCALE, LARGEST_SCALE, ContrastiveModel
from thrifty.models.families import assemble
from thrifty.models.model_presets import shape_of
from thrifty.models.weight_conversion import export_folder, folder_shape, import_folder

END = 5
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 12,
    "bos_token_id": 4,
    "eos_token_id": END,
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
ENDS = PairModelSpec(ImageModelSpec((), 16, 3, (0.5,) * 3, (0.2,) * 3), TextModelSpec(300, 12))


def theirs(**changed):
    config = transformers.CLIPConfig(text_config=TEXT | changed, vision_config=VISION | changed, projection_dim=24)
    return random_model(config, auto=transformers.AutoModel)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip")
    theirs().save_pretrained(path)
    return path


def images(side: int = 16) -> torch.Tensor:
    return torch.randn(5, 3, side, side, generator=torch.Generator().manual_seed(1))


def captions() -> tuple[torch.Tensor, torch.Tensor]:
    """Return captions of several lengths, each with its end token; the padding after it must not matter."""
    tokens = torch.randint(6, 300, (5, 12), generator=torch.Generator().manual_seed(2))
    keep = torch.arange(12) < torch.tensor([3, 5, 12, 1, 8])[:, None]
    tokens[torch.arange(5), keep.sum(1) - 1] = END
    return tokens, keep


@pytest.mark.parametrize("changed", [{}, {"hidden_act": "gelu", "layer_norm_eps": 1e-3}])
def test_vectors_logits_and_loss_equal_transformers(tmp_path, changed):
    model = theirs(**changed)
    model.save_pretrained(tmp_path)
    ours, shape = import_folder(tmp_path)
    assert (shape.depth, shape.text_depth, shape.width, shape.text_width, shape.space) == (3, 2, 48, 32, 24)
    (tokens, keep), pixels = captions(), images()
    with torch.no_grad():
        wanted = model(tokens, pixels, keep.long(), return_loss=True)
        torch.testing.assert_close(ours.of_images(pixels), wanted.image_embeds, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.of_captions(tokens, keep), wanted.text_embeds, rtol=1e-5, atol=1e-5)
        vectors = ours(pixels, tokens, keep).unbind(1)
        torch.testing.assert_close(vectors[0] @ vectors[1].T, wanted.logits_per_image, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(contrastive_losses(*vectors).mean(), wanted.loss, rtol=1e-5, atol=1e-5)


def test_a_caption_vector_is_read_at_its_end(folder):
    ours, _ = import_folder(folder)
    tokens, keep = captions()
    other = torch.where(keep, tokens, 7)
    with torch.no_grad():
        assert torch.equal(ours.of_captions(tokens, keep), ours.of_captions(other, keep))
        assert not torch.equal(ours.of_captions(tokens, keep), ours.of_captions(tokens))
        torch.testing.assert_close(ours.of_captions(tokens[2:3]), ours.of_captions(tokens, keep)[2:3])


def test_only_visible_patches_affect_an_image_vector(folder):
    ours, _ = import_folder(folder)
    visible = torch.tensor([[0, 3, 9]]).expand(5, -1)
    changed = images().clone()
    changed[:, :, :4, 4:8] = 9.0  # patch 1
    with torch.no_grad():
        seen = ours.of_images(images(), visible)
        assert torch.equal(seen, ours.of_images(changed, visible))
        assert not torch.allclose(seen, ours.of_images(images()), atol=1e-3)
        every = torch.arange(16).expand(5, -1)
        torch.testing.assert_close(ours.of_images(images(), every), ours.of_images(images()))


def test_the_scale_starts_at_1_over_0_07_and_is_limited_to_100():
    model = build_model_for(ENDS, ModelSettings("clip-nano"), seed=0, task="contrastive")
    assert isinstance(model, ContrastiveModel)
    assert model.logit_scale.item() == pytest.approx(math.log(1 / 0.07))
    with torch.no_grad():
        model.logit_scale.fill_(LARGEST_SCALE + 1)
    assert model.scale.item() == pytest.approx(100)
    # so that it decreases as soon as the loss requires it
    assert torch.autograd.grad(model.scale.sum(), model.logit_scale)[0].item() == pytest.approx(100)


def tokenizer_json(path: Path, *special: str) -> Path:
    """Return a tokenizer that starts with these special tokens."""
    tokenizer = Tokenizer(models.WordLevel({}, unk_token="?"))  # noqa: S106 (no password)
    tokenizer.add_special_tokens([*special])
    tokenizer.save(str(path / "tokenizer.json"))
    return path / "tokenizer.json"


def test_an_exported_folder_round_trips_bit_for_bit(tmp_path):
    model = build_model_for(ENDS, ModelSettings("clip-nano"), seed=0, task="contrastive")
    shape = shape_for(ENDS, ModelSettings("clip-nano"))
    end = tokenizer_json(tmp_path, "<|endoftext|>")
    export_model(model, shape, tmp_path / "out", end, images=ENDS.images)
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"} <= files
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    assert isinstance(loaded, transformers.CLIPModel)
    tokens, keep = captions()
    tokens[torch.arange(5), keep.sum(1) - 1] = 0
    with torch.no_grad():
        wanted = loaded(tokens, images(), keep.long()).logits_per_image
        vectors = model(images(), tokens, keep).unbind(1)
    torch.testing.assert_close(vectors[0] @ vectors[1].T, wanted, rtol=1e-5, atol=1e-5)
    again, own_shape = import_folder(tmp_path / "out")
    assert own_shape == shape
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


OF_BERT = "[CLS] $A [SEP]"


@pytest.mark.parametrize(
    ("end", "own"),
    [("<|endoftext|>", own) for own in ("", "<bos> $A", OF_BERT, "<|startoftext|> $A")] + [("[SEP]", OF_BERT)],
)
def test_exported_tokenizers_mark_captions_like_training(tmp_path, end, own):
    inner = Tokenizer(models.WordLevel({"a": 0, "red": 1, "spot": 2}, unk_token="a"))  # noqa: S106 (no password)
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    added = [word for word in own.split() if word != "$A"]
    inner.add_special_tokens([end, *added])
    if own:
        special = [(word, inner.token_to_id(word)) for word in added]
        inner.post_processor = processors.TemplateProcessing(own, special_tokens=special)
    inner.save(str(tmp_path / "tokenizer.json"))
    model = build_model_for(ENDS, ModelSettings("clip-nano"), seed=0, task="contrastive")
    shape = shape_for(ENDS, ModelSettings("clip-nano"))
    export_model(model, shape, tmp_path / "out", tmp_path / "tokenizer.json", images=ENDS.images)
    captions = ["a red spot", "spot"]
    rows = caption_rows(captions, read_tokenizer(tmp_path / "tokenizer.json"), 8)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    encoded = tokenizer(captions, padding="max_length", max_length=8)
    assert encoded["input_ids"] == rows["tokens"].tolist()
    assert encoded["attention_mask"] == rows["keep"].long().tolist()


def test_captions_without_an_end_token_are_not_exported(tmp_path, folder):
    model, shape = import_folder(folder)
    with pytest.raises(RefusedError, match="end-of-text"):
        export_folder(model, shape, tmp_path / "out")
    third = tokenizer_json(tmp_path, "<a>", "<b>", "<|endoftext|>")
    with pytest.raises(RefusedError, match="highest id"):
        export_folder(model, shape, tmp_path / "out", third)
    with pytest.raises(RefusedError, match="class token"):
        export_folder(model, replace(shape, pool="mean"), tmp_path / "out")


def test_an_unsupported_setting_is_refused_by_name(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    for section, key, value in (("text_config", "hidden_act", "tanh"), ("vision_config", "novelty", 3)):
        changed = config | {section: config[section] | {key: value}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(RefusedError, match=key):
            folder_shape(tmp_path, fresh=True)
    changed = config | {"text_config": config["text_config"] | {"layer_norm_eps": 0.1}}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(RefusedError, match="for captions and"):
        folder_shape(tmp_path, fresh=True)


def test_a_folder_fits_other_image_sizes_but_no_longer_captions(folder):
    larger = replace(ENDS, images=replace(ENDS.images, side=24))
    model = build_model_for(larger, ModelSettings(folder=str(folder)), seed=0, task="contrastive")
    (tokens, keep), plain = captions(), import_folder(folder)[0]
    with torch.no_grad():
        torch.testing.assert_close(model.of_images(images(24)), plain.of_images(images(24)), rtol=1e-5, atol=1e-5)
        assert torch.equal(model.of_captions(tokens, keep), plain.of_captions(tokens, keep))
    longer = replace(ENDS, text=TextModelSpec(300, 13))
    with pytest.raises(UsageError, match="limited to 12 tokens"):
        build_model_for(longer, ModelSettings(folder=str(folder)), seed=0, task="contrastive")


def test_a_model_is_built_for_the_data():
    shape = shape_for(ENDS, ModelSettings("clip-nano", patch=8, depth=2))
    assert (shape.image, shape.channels, shape.patch, shape.depth, shape.text_depth) == (16, 3, 8, 2, 4)
    assert (shape.vocabulary, shape.length) == (300, 12)
    assert own_sizes(ModelSettings("clip-nano"))[0] == 32
    other = shape_for(ENDS, ModelSettings("clip-nano", width=64, text_width=64, text_heads=2))
    assert (other.hidden, other.text_hidden, other.text_heads, other.space) == (256, 256, 2, 128)
    with pytest.raises(UsageError, match="cannot be cut into patches"):
        shape_for(ENDS, ModelSettings("clip-nano", patch=5))


def test_another_kind_of_model_is_refused_with_a_fitting_one():
    with pytest.raises(UsageError, match=r"clip-nano"):
        build_model_for(ENDS, ModelSettings("gpt-nano"), seed=0, task="contrastive")
    with pytest.raises(UsageError, match=r"compares images with captions"):
        build_model_for(TextModelSpec(300, 12), ModelSettings("clip-nano"), seed=0, task="next_token")


@pytest.mark.parametrize(
    ("preset", "patch", "parameters"), [("clip-vit-b32", 32, 151_277_313), ("clip-vit-b16", 16, 149_620_737)]
)
def test_published_sizes(preset, patch, parameters):
    """The number of parameters equals that of transformers for a configuration of the same sizes."""
    with torch.device("meta"):
        ours = sum(p.numel() for p in assemble(shape_of(ModelSettings(preset))).parameters())
        config = transformers.CLIPConfig(vision_config={"patch_size": patch})
        assert ours == sum(p.numel() for p in transformers.CLIPModel(config).parameters()) == parameters


def test_patches_can_be_averaged_instead_of_a_class_token():
    model = build_model_for(ENDS, ModelSettings("clip-nano", pool="mean"), seed=0, task="contrastive")
    assert "image.embedding.class_token" not in dict(model.named_parameters())
    with torch.no_grad():
        tokens = model.image.first_norm(model.image.embedding(images()))
        for block in model.image.blocks:
            tokens = block(tokens)
        pooled = model.image.projection(model.image.norm(tokens).mean(1))
        torch.testing.assert_close(model.of_images(images()), pooled / pooled.norm(dim=1, keepdim=True))


def test_initialization_follows_the_published_law():
    model = build_model_for(ENDS, ModelSettings("clip-micro"), seed=0, task="contrastive")
    values = {name: parameter.std().item() for name, parameter in model.named_parameters() if parameter.ndim > 1}
    for tower, width, depth in (("image", 192, 6), ("text", 128, 4)):
        for part, wanted in (
            ("attention.qkv", width**-0.5),
            ("attention.out", (2 * depth * width) ** -0.5),
            ("mlp.up", (2 * width) ** -0.5),
            ("mlp.down", (2 * depth * width) ** -0.5),
        ):
            assert values[f"{tower}.blocks.1.{part}.weight"] == pytest.approx(wanted, rel=0.05)
        assert values[f"{tower}.projection.weight"] == pytest.approx(width**-0.5, rel=0.05)
    assert values["text.embedding.token.weight"] == pytest.approx(0.02, rel=0.05)
    assert values["text.embedding.position.weight"] == pytest.approx(0.01, rel=0.1)
    assert pytest.approx(2.6592, abs=1e-4) == INITIAL_SCALE
