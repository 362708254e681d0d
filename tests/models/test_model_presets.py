import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thrifty.core.errors import UsageError
from thrifty.core.recipe import ModelSettings
from thrifty.models.families import assemble
from thrifty.models.model_presets import PRESETS, shape_of
from thrifty.models.transformer import EncoderDecoder, initialize

PUBLISHED = {
    "gpt-small": 124_439_808,
    "gpt-medium": 354_823_168,
    "gpt-large": 774_030_080,
    "gpt-xl": 1_557_611_200,
    "smollm2-135m": 134_515_008,
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
    "gpt1-small": 116_534_784,
    "bert-small": 109_514_298,
    "t5-small": 60_506_624,
    "t5-v1.1-small": 76_961_152,
    "marian-base": 73_886_208 + 58_101,  # the bias of the logits is a parameter here
    "vit-tiny": 5_717_416,
    "vit-small": 22_050_664,
    "vit-base": 86_567_656,
    "deit-tiny": 5_717_416,
    "deit-small": 22_050_664,
    "mae-base": 111_907_840 - 197 * (768 + 512),  # fixed positions are no parameters here
    "mae-large": 329_541_888 - 197 * (1024 + 512),
    "clip-vit-b32": 151_277_313,
    "clip-vit-b16": 149_620_737,
}
OURS = {
    "gpt-nano": 1.3e6,
    "gpt-micro": 4.3e6,
    "gpt-mini": 16e6,
    "gpt1-nano": 1.35e6,
    "gpt1-micro": 4.3e6,
    "bert-nano": 1.35e6,
    "bert-micro": 4.3e6,
    "t5-nano": 1.45e6,
    "t5-micro": 4.7e6,
    "marian-nano": 1.45e6,
    "llama-nano": 1.3e6,
    "llama-micro": 4e6,
    "llama-mini": 16e6,
    "llama-small": 124e6,
    "vit-nano": 0.81e6,
    "vit-micro": 2.7e6,
    "mae-nano": 0.91e6,
    "mae-micro": 2.9e6,
    "mae-tiny": 5.8e6,
    "clip-nano": 2.1e6,
    "clip-micro": 4.1e6,
}


def count(preset: str) -> int:
    with torch.device("meta"):
        model = assemble(shape_of(ModelSettings(preset=preset)))
    assert all(parameter.is_meta for parameter in model.parameters())
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_numbers_of_parameters(preset):
    assert count(preset) == PUBLISHED[preset]


@pytest.mark.parametrize("preset", OURS)
def test_small_presets_have_about_their_intended_size(preset):
    assert count(preset) == pytest.approx(OURS[preset], rel=0.05)


def test_every_preset_is_counted_here():
    assert PRESETS.keys() == PUBLISHED.keys() | OURS.keys()


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("gpt2", "did you mean 'gpt-small'"),
        ("openai-community/gpt2", r'snapshot_download\("openai-community/gpt2", local_dir="gpt2"\), and model="gpt2"'),
        ("hub:org/m-1.5", r'snapshot_download\("org/m-1.5"'),
        ("./models/mine", "the folder of a Hugging Face model"),
    ],
)
def test_models_of_the_hub_are_downloaded_by_the_user(name, fix):
    with pytest.raises(UsageError, match=fix):
        shape_of(ModelSettings(preset=name))


def test_vocabulary_and_length_of_the_data():
    model = assemble(shape_of(ModelSettings(preset="gpt-nano"), vocabulary=100, length=8))
    assert model.head.weight.shape == (100, 128)
    assert model.embedding.position.weight.shape == (8, 128)
    assert model.head.weight is model.embedding.token.weight


def test_sizes_follow_a_changed_width_and_heads_in_proportion():
    shape = shape_of(ModelSettings(preset="llama-nano", width=256, heads=8))
    assert (shape.hidden, shape.kv_heads) == (768, 4)
    assert shape_of(ModelSettings(preset="gpt-nano", width=64)).hidden == 256


def test_set_sizes_are_used_unchanged():
    settings = ModelSettings(preset="llama-nano", depth=3, width=48, heads=6, kv_heads=3, hidden=50, tied=False)
    shape = shape_of(settings)
    assert (shape.depth, shape.width, shape.heads, shape.kv_heads, shape.hidden, shape.tied) == (3, 48, 6, 3, 50, False)
    model = assemble(shape)
    assert model.head.weight is not model.embedding.token.weight


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'llama-nano'"):
        assemble(shape_of(ModelSettings(preset="lama-nano")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ModelSettings(heads=5), "width 128 does not divide into 5 heads"),
        (ModelSettings(kv_heads=3), "4 heads cannot share 3 key-value heads"),
        (ModelSettings(width=12), "the width of a head is 3"),
        (ModelSettings(depth=0), "depth is 0"),
        (ModelSettings(hidden=-1), "hidden is -1"),
        (ModelSettings(preset="gpt-nano", kv_heads=2), "2 key-value heads for 4 heads, but a gpt model shares none"),
        (ModelSettings(preset="marian-nano", width=33, heads=3), "the width is 33"),
    ],
)
def test_incompatible_sizes_are_refused_with_a_fix(settings, message):
    with pytest.raises(UsageError, match=message) as refused:
        assemble(shape_of(settings))
    assert refused.value.fix


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("gpt-nano", {"buckets": 16}, "buckets is set, but a gpt model has none"),
        ("llama-nano", {"decoder_depth": 2}, "decoder_depth is set, but a llama model has none"),
        ("bert-nano", {"rope_base": 1.0}, "rope_base is set, but a bert model has none"),
        ("t5-nano", {"activation": "swish"}, "a t5 model has no activation 'swish'"),
        ("t5-nano", {"distance": 16}, "32 buckets cannot distinguish distances up to 16"),
        ("t5-nano", {"decoder_depth": 0}, "decoder_depth is 0"),
    ],
)
def test_choices_of_another_style_are_refused(preset, changes, message):
    with pytest.raises(UsageError, match=message) as refused:
        dataclasses.replace(PRESETS[preset], **changes)
    assert refused.value.fix


def test_default_depth_of_a_decoder():
    settings = ModelSettings(preset="t5-nano", depth=3)
    assert [
        len(side.blocks) for side in (assemble(shape_of(settings)).encoder, assemble(shape_of(settings)).decoder)
    ] == [3, 3]
    uneven = assemble(dataclasses.replace(shape_of(settings), decoder_depth=1))
    assert [len(uneven.encoder.blocks), len(uneven.decoder.blocks)] == [3, 1]


@hypothesis.settings(max_examples=20)
@given(
    preset=st.sampled_from(["gpt-nano", "gpt1-nano", "llama-nano", "bert-nano", "t5-nano", "marian-nano"]),
    heads=st.integers(1, 4),
    head_width=st.sampled_from([2, 6, 8]),
    depth=st.integers(1, 3),
    vocabulary=st.integers(1, 50),
    length=st.integers(1, 9),
)
def test_any_accepted_size_can_be_run(preset, heads, head_width, depth, vocabulary, length):
    settings = ModelSettings(preset=preset, heads=heads, kv_heads=heads, width=heads * head_width, depth=depth)
    model = assemble(shape_of(settings, vocabulary, length))
    initialize(model, seed=0)
    tokens = torch.zeros(2, length, dtype=torch.long)
    logits = model.logits(*(tokens, tokens) if isinstance(model, EncoderDecoder) else (tokens,))
    assert logits.shape == (2, length, vocabulary)
    assert logits.isfinite().all()
