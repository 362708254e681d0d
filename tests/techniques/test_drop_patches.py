"""Random patch subsets: sampling, supported models, schedule and cost."""

from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from image_runs import autoencoder_run, image_run, tiny_vit
from pair_runs import pair_run, tiny_clip
from tiny_runs import advance, losses, plain_run, technique, with_optimizer
from torch import nn

from thrifty.composition.compose import BaseRun, compose
from thrifty.composition.explain import explain
from thrifty.core.batches import Batch, BatchSource, MappedSource
from thrifty.core.errors import RefusedError, UsageError
from thrifty.modeling.visible_patches import prepare, visible_only, without_patches
from thrifty.techniques.data_selection.drop_patches import (
    FIELD,
    DropPatches,
    kept_patches,
    keys_of_content,
    visible_patches,
)

STEPS = 4


def dropping(model: nn.Module, own: torch.Tensor, rate: float) -> AbstractContextManager[None]:
    return visible_only(model, partial(visible_patches, own, rate=rate))


def keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 70), st.floats(0.01, 0.99), st.integers(0, 99))
def test_visible_patches_are_distinct_and_ascending(patches, rate, seed):
    visible = visible_patches(keys(3, seed), patches, rate)
    assert visible.shape == (3, max(1, round(patches * (1 - rate))))
    assert (visible.diff() > 0).all()
    assert visible.min() >= 0
    assert visible.max() < patches


def test_each_patch_is_equally_likely():
    often = visible_patches(keys(20_000), 16, 0.75).flatten().bincount(minlength=16) / 20_000
    assert (often - 0.25).abs().max() < 0.015


def test_visible_patches_depend_on_the_key_only():
    whole = visible_patches(keys(8), 16, 0.5)
    assert torch.equal(visible_patches(keys(8)[5:6], 16, 0.5), whole[5:6])
    assert len({tuple(row) for row in whole.tolist()}) == 8


MODELS = {
    "vit": lambda: tiny_vit(),
    "vit without a class token": lambda: tiny_vit(pool="mean"),
    "clip's tower": lambda: ImagesOnly(tiny_clip()),
    "a ViT of transformers": lambda: ForeignEmbedding(
        transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=8,
                patch_size=2, num_channels=1, id2label=dict(enumerate("abc")),
            )
        )
    ),
    "a CLIP of transformers": lambda: ForeignEmbedding(
        transformers.CLIPForImageClassification(
            transformers.CLIPConfig(
                vision_config={
                    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
                    "image_size": 8, "patch_size": 2, "num_channels": 1,
                },
                id2label=dict(enumerate("abc")),
            )
        )
    ),
}  # fmt: skip


class ImagesOnly(nn.Module):
    def __init__(self, clip: nn.Module):
        super().__init__()
        self.clip = clip

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return self.clip.of_images(images)


class ForeignEmbedding(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return self.inner(pixel_values=images).logits


@pytest.mark.parametrize("kind", MODELS)
def test_blocks_see_visible_patches_only_at_their_positions(kind):
    torch.manual_seed(0)
    model, own = MODELS[kind]().eval(), keys(2)
    images = torch.randn(2, 1, 8, 8)
    visible = visible_patches(own, 16, 0.5)
    changed = images.clone()
    for index in range(2):
        for patch in set(range(16)) - set(visible[index].tolist()):
            row, column = 2 * (patch // 4), 2 * (patch % 4)
            changed[index, :, row : row + 2, column : column + 2] = 7.0
    with torch.no_grad():
        before = model.logits(images)
        model = DropPatches().model(model)
        assert torch.equal(model.logits(images), before)  # all patches are visible outside of the context
        lengths: list[int] = []
        hook = model.get_submodule(stack_of(model)).register_forward_pre_hook(
            lambda module, args: lengths.append(args[0].shape[1])
        )
        with dropping(model, own, 0.5):
            seen = model.logits(images)
            assert torch.allclose(model.logits(changed), seen, atol=1e-6)
        hook.remove()
        assert lengths[0] == 8 + (0 if kind == "vit without a class token" else 1)
        assert not torch.allclose(seen, before, atol=1e-3)
        assert torch.equal(model.logits(images), before)


def stack_of(model: nn.Module) -> str:
    """Return the stack of the image tower."""
    return next(
        name
        for name, module in model.named_modules()
        if name.endswith(".0") and isinstance(model.get_submodule(name.removesuffix(".0")), nn.ModuleList)
        and "text" not in name
    )  # fmt: skip


def test_outputs_equal_our_models_with_explicit_patches():
    model, own = tiny_vit().eval(), keys(3)
    images = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        expected = model(images, visible_patches(own, 16, 0.25))
        with dropping(DropPatches().model(model), own, 0.25):
            assert torch.equal(model(images), expected)


@pytest.mark.parametrize("plain", [image_run, pair_run])
def test_patches_are_dropped_in_training_before_until(plain):
    run = compose(plain(), with_optimizer([DropPatches(rate=0.75, until=0.5)]), STEPS)
    assert [FIELD in run.source.at(step).fields for step in range(STEPS)] == [True, True, False, False]
    assert not isinstance(run.eval_objective, type(run.objective))
    state, batch = run.start(), run.source.at(0)
    with torch.no_grad():
        whole = run.eval_objective.predict(state.model.eval(), batch).logits
        seen = run.objective.predict(state.model, batch).logits
        bare = Batch({name: batch[name] for name in batch.fields if name != FIELD}, batch.weight)
        assert torch.equal(run.objective.predict(state.model, bare).logits, whole)
    assert not torch.allclose(seen, whole, atol=1e-4)


def test_dropped_patches_change_with_epoch_and_seed():
    plain = image_run(batch=4)
    epoch = plain.source.examples
    source = DropPatches(until=10_000).batches(plain.source)
    wholes = [source.at(step) for step in range(2 * epoch // 4)]
    by_image: dict[bytes, set[int]] = {}
    for batch in wholes:
        for image, key in zip(batch["inputs"], batch[FIELD].tolist(), strict=True):
            by_image.setdefault(image.numpy().tobytes(), set()).add(key)
    assert min(map(len, by_image.values())) > 1
    other = DropPatches(until=10_000, seed=1).batches(plain.source).at(0)
    assert not torch.equal(other[FIELD], wholes[0][FIELD])


def test_micro_batches_see_the_same_patches():
    drop = technique("data_selection.drop_patches", until=1.0)
    parts = technique("large_batch.gradient_accumulation", micro_batches=3)
    whole, split = (
        losses(advance(run, run.start()))
        for run in (compose(image_run(batch=6), with_optimizer([drop, *more]), STEPS) for more in ([], [parts]))
    )
    assert split == pytest.approx(whole, rel=1e-5)


def test_smaller_images_have_fewer_patches_to_drop():
    """With curriculum.resolution, images of 4 × 4 pixels have 4 patches, of which 2 are visible."""
    chosen = [technique("data_selection.drop_patches", until=1.0), technique("curriculum.resolution", until=1.0)]
    run = compose(image_run(), with_optimizer(chosen), STEPS)
    state, lengths = run.start(), []
    state.model.blocks[0].register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    advance(run, state)
    assert lengths[0] == 1 + kept_patches(4, 0.5)


def test_counted_flops_fall_with_dropped_patches():
    flops = {
        until: explain(
            compose(image_run(), with_optimizer([DropPatches(rate=0.5, until=until)]), STEPS)
        ).footprint.flops
        for until in (1.0, 0.5)
    }
    assert (
        0.45 < flops[1.0] / flops[0.5] < 0.6
    )  # a footprint is that of the last step, with whole images if until is below 1


def test_models_without_patches_or_with_masks_are_refused():
    with pytest.raises(RefusedError, match="itself selects the visible patches"):
        run = compose(autoencoder_run(), with_optimizer([DropPatches()]), STEPS)
        advance(run, run.start())
    with pytest.raises(UsageError, match="both decide the encoder input"):
        compose(autoencoder_run(), with_optimizer([DropPatches(), technique("data_selection.drop_masked_patches")]), 3)
    with pytest.raises(RefusedError, match="no convolution that cuts images"):
        compose(plain_run(), with_optimizer([DropPatches()]), STEPS).start()


class HandWritten(nn.Module):
    """ViT whose positions are added in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, 32, 2, 2)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 32))
        self.where = nn.Parameter(torch.randn(1, 17, 32))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, 10)
        self.seen: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.cut(images).flatten(2).mT
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), 1) + self.where
        for block in self.blocks:
            x = block(x)
        self.seen.append(x.shape[1])
        return self.head(x[:, 0])


@pytest.mark.parametrize("compiled", [False, True])
def test_patches_of_hand_written_models_are_dropped(compiled):
    model = HandWritten()
    assert prepare(model) == "before blocks.0"
    if compiled:
        for block in model.blocks:
            block.compile(backend="eager")
    images = torch.randn(4, 1, 8, 8)
    inputs = []
    model.blocks[1].register_forward_pre_hook(lambda block, args: inputs.append(args[0]))
    with dropping(model, keys(4), 0.75):
        model(images)
    kept = without_patches(
        torch.cat((model.class_token.expand(4, -1, -1), model.cut(images).flatten(2).mT), 1) + model.where,
        visible_patches(keys(4), 16, 0.75),
        1,
    )
    expected = type(model.blocks[0]).forward(model.blocks[0], kept) if not compiled else inputs[0]
    torch.testing.assert_close(inputs[0], expected)
    model(images)
    assert model.seen == [5, 17]


RECOMPUTING = ["memory.recompute", "memory.optimal_recompute", "memory.activation_budget"]


@pytest.mark.parametrize("name", RECOMPUTING)
def test_recomputed_blocks_drop_the_same_patches(name: str) -> None:
    """The first block drops them where positions are added outside the embedding."""
    plain = image_run()
    drop = technique("data_selection.drop_patches", until=1.0)
    seen = []
    for more in ([], [technique(name)]):
        torch.manual_seed(0)
        run = compose(BaseRun(HandWritten, plain.source, plain.objective), with_optimizer([drop, *more]), STEPS)
        torch.manual_seed(0)
        seen.append(losses(advance(run, run.start())))
    assert seen[0] == seen[1]


def test_copied_blocks_drop_no_patches_again() -> None:
    chosen = [technique("data_selection.drop_patches", until=1.0), technique("growth.stacking", at=(2,))]
    plain = image_run()
    run = compose(BaseRun(HandWritten, plain.source, plain.objective), with_optimizer(chosen), STEPS)
    state = run.start()
    advance(run, state)
    assert isinstance(state.model, HandWritten) and len(state.model.blocks) == 2
    assert {*state.model.seen} == {9}


def test_blocks_that_require_all_patches_are_refused():
    config = transformers.SwinConfig(
        image_size=8,
        patch_size=1,
        num_channels=1,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        id2label=dict(enumerate("abc")),
    )
    plain, model = image_run(), transformers.SwinForImageClassification(config)
    run = compose(BaseRun(lambda: model, plain.source, plain.objective), with_optimizer([DropPatches()]), 3)
    with pytest.raises(RefusedError, match="does not accept a part of the patches"):
        advance(run, run.start())


class WithoutKeys(MappedSource):
    def __init__(self, source: BatchSource):
        super().__init__(source, lambda step, batch: Batch({n: batch[n] for n in ("inputs", "labels")}, batch.weight))


def test_data_without_keys_drop_patches_by_content():
    plain = image_run()
    run = compose(BaseRun(plain.build, WithoutKeys(plain.source), plain.objective), with_optimizer([DropPatches()]), 3)
    whole = run.source.at(0)[FIELD]
    assert len(set(whole.tolist())) == len(whole)
    assert torch.equal(run.source.rows(0, 2, 4)[FIELD], whole[2:4])
    assert not torch.equal(run.source.at(1)[FIELD], whole)
    assert all(loss == loss for loss in losses(advance(run, run.start())))
    with pytest.raises(RefusedError, match=r"neither images .* nor the field `key`") as refused:
        keys_of_content(Batch({"labels": torch.zeros(2)}, torch.ones(2)), 0)
    assert "int64" in refused.value.fix
