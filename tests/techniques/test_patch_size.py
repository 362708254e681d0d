"""Progressive patch size: an enlarged patch keeps its token, and the final model is plain."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st
from image_runs import PIXELS, autoencoder_run, image_run
from pair_runs import pair_run
from tiny_runs import advance, assert_same, plain_run, restored, snapshot, technique, with_optimizer
from torch import nn

from thrifty.composition.compose import BaseRun, compose
from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.kernels.image_resizing import resized_patches
from thrifty.modeling.patch_grid import find_grid, resize_patches
from thrifty.techniques.curriculum.patch_size import PatchSizeCurriculum

HALVING = PatchSizeCurriculum(at=(1, 3))


VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 8,
    "patch_size": 2, "num_channels": 1, "num_labels": 10,
}  # fmt: skip


class HandWritten(nn.Module):
    """Vision Transformer with positions added in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.start = nn.Conv2d(1, 32, 2, 2), nn.Parameter(torch.zeros(1, 1, 32))
        self.where = nn.Parameter(torch.randn(17, 32))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.cut(images).flatten(2).mT
        x = torch.cat((self.start.expand(len(x), -1, -1), x), 1) + self.where
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def run_of(*others: str, plain: BaseRun | None = None, one: PatchSizeCurriculum = HALVING):
    return compose(plain or image_run(depth=2), with_optimizer([one, *map(technique, others)]), 5)


@given(st.integers(1, 5), st.integers(2, 3), st.integers(1, 3), st.integers(0, 9))
def test_a_smaller_patch_equals_its_enlarged_patch(side: int, times: int, channels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, channels, side * times, side * times, generator=generator, dtype=torch.float64)
    patch = torch.randn(1, channels, side, side, generator=generator, dtype=torch.float64)
    enlarged = F.interpolate(patch, scale_factor=times, mode="bilinear", align_corners=False)
    smaller = resized_patches(weight, side)
    torch.testing.assert_close(F.conv2d(patch, smaller), F.conv2d(enlarged, weight))
    torch.testing.assert_close(resized_patches(resized_patches(smaller, side * times), side), smaller)


def test_patches_start_large_and_end_at_the_final_size() -> None:
    run = run_of()
    state = run.start()
    seen = []
    for step in range(1, 6):
        record = advance(run, state, step)[-1]
        run.verify(state)
        embedding = state.model.embedding
        seen.append((embedding.patch_size, embedding.position.shape[1], len(record.changes)))
    assert seen == [(8, 2, 0), (4, 5, 1), (4, 5, 0), (2, 17, 1), (2, 17, 0)]
    plain = image_run(depth=2).build()
    assert {n: p.shape for n, p in state.model.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}


def test_an_untrained_model_ends_as_the_plain_model() -> None:
    run = run_of()
    state = run.start()
    assert state.model.embedding.patch.weight.shape[-1] == 8
    plain = image_run(depth=2).build()
    finished = HALVING.finish(state.model)
    actual = dict(finished.named_parameters())
    for name, parameter in plain.named_parameters():
        assert actual[name].shape == parameter.shape
        if name != "embedding.position":
            torch.testing.assert_close(actual[name], parameter, rtol=1e-5, atol=1e-6)
    assert finished.logits(PIXELS).shape == (2, 10)


def test_tokens_of_smooth_images_hardly_change() -> None:
    run = run_of()
    state = run.start()
    advance(run, state, 1)
    weight = state.model.embedding.patch.weight.detach().clone()
    run.changes(state)
    assert torch.equal(state.model.embedding.patch.weight, resized_patches(weight, 4))
    level = torch.full((1, 1, 8, 8), 0.7)
    large, small = F.conv2d(level, weight, stride=8), state.model.embedding.patch(level) - _bias(state.model)
    torch.testing.assert_close(small, large.expand_as(small), rtol=1e-4, atol=1e-5)


def _bias(model: nn.Module) -> torch.Tensor:
    return model.embedding.patch.bias.view(1, -1, 1, 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("others", [(), ("growth.stacking", "averaging.ema"), ("sparsity.rigl",)])
@pytest.mark.parametrize("saved", [1, 2, 3])
def test_resume_is_bit_identical(saved: int, others: tuple[str, ...]) -> None:
    whole, stopped, again = run_of(*others), run_of(*others), run_of(*others)
    end, half = whole.start(), stopped.start()
    advance(whole, end)
    advance(stopped, half, saved)
    state = restored(again, snapshot(half))
    advance(again, state)
    assert_same(snapshot(state), snapshot(end))


def test_the_image_tower_of_a_contrastive_model_is_supported() -> None:
    run = run_of(plain=pair_run(), one=PatchSizeCurriculum(at=(2,)))
    state = run.start()
    first = advance(run, state, 1)[-1]
    assert state.model.image.embedding.patch_size == 2 * pair_run().build().image.embedding.patch_size
    assert advance(run, state)[-1].loss < 2 * first.loss
    run.verify(state)


FOREIGN = {
    "DeiT": lambda: transformers.DeiTForImageClassification(transformers.DeiTConfig(**VIT)),
    "DINOv2": lambda: transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**VIT)),
    "SigLIP": lambda: transformers.SiglipForImageClassification(
        transformers.SiglipConfig(vision_config=VIT, text_config={"vocab_size": 9}, num_labels=10)
    ),
    "hand-written": HandWritten,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_patches_of_foreign_models_start_large(name: str) -> None:
    torch.manual_seed(0)
    start = FOREIGN[name]().state_dict()

    def build() -> nn.Module:
        model = FOREIGN[name]()
        model.load_state_dict(start)
        return model

    run = run_of(plain=replace(image_run(), build=build), one=PatchSizeCurriculum(at=(2,)))
    state = run.start()
    shapes = [(value.shape, value.numel()) for value in start.values()]
    assert find_grid(state.model).patch == 4
    assert all(loss == loss for loss in (record.loss for record in advance(run, state)))
    assert find_grid(state.model).patch == 2
    assert [(value.shape, value.numel()) for value in state.model.state_dict().values()] == shapes


def test_positions_of_wide_images_keep_their_grid() -> None:
    model = HandWritten()
    model.img_size, model.where = (8, 32), nn.Parameter(torch.randn(1 + 4 * 16, 32))
    wide = model.where.detach()[1:].T.reshape(1, 32, 4, 16)
    resize_patches(find_grid(model), 4)
    small = F.interpolate(wide, (2, 8), mode="bicubic", align_corners=False)
    torch.testing.assert_close(model.where[1:].T.reshape(1, 32, 2, 8), small)
    assert model(torch.zeros(1, 1, 8, 32)).shape == (1, 10)


def test_models_whose_blocks_depend_on_the_patches_are_refused() -> None:
    model = HandWritten()
    model.blocks[0].norm1 = nn.LayerNorm((17, 32))
    with pytest.raises(RefusedError, match="does not accept patches of 4 pixels"):
        run_of(plain=replace(image_run(), build=lambda: model), one=PatchSizeCurriculum(at=(2,))).start()


def test_models_without_patches_are_refused() -> None:
    with pytest.raises(RefusedError, match="texts have no patches"):
        run_of(plain=plain_run()).objective  # noqa: B018
    with pytest.raises(RefusedError, match="is not a model with image patches at learned positions"):
        run_of(plain=autoencoder_run()).start()
    with pytest.raises(RefusedError, match="8 x 8 pixels cannot be cut into patches of 16 x 16"):
        run_of(one=PatchSizeCurriculum(at=(1, 2, 3))).start()


def test_a_patch_size_unlike_the_log_is_an_error() -> None:
    run = run_of()
    state = run.start()
    state.model.embedding.patch.stride = state.model.embedding.patch.kernel_size = (2, 2)
    with pytest.raises(IntegrityError, match="side of patches is 2, but the run's log has 4 times the final side 2"):
        run.verify(state)


def test_images_smaller_than_multiples_of_patches_are_refused() -> None:
    grows = technique("curriculum.resolution", start=0.5, until=3, multiple=2, phases=3)
    run = compose(image_run(), with_optimizer([HALVING, grows]), 4)
    with pytest.raises(RefusedError, match="multiple of 2 pixels, cannot be cut into patches of 8 x 8") as refused:
        advance(run, run.start())
    assert "curriculum.resolution.multiple=8" in refused.value.fix and "data.size" not in refused.value.fix
