"""A masked autoencoder around a user's own Vision Transformer."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from drawn_models import StemVit, built
from image_runs import tiny_mae
from safetensors.torch import load_model
from torch import nn

import thrifty
from thrifty.core.errors import RefusedError
from thrifty.kernels.image_patches import patchify, unpatchify
from thrifty.models.masked_autoencoder import encoder_alone
from thrifty.models.wrapped_autoencoder import WrappedAutoencoder, autoencoder_around, patch_side

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 8,
    "patch_size": 2, "num_channels": 1,
}  # fmt: skip
VISIBLE = torch.tensor([[0, 3, 7, 12], [1, 2, 14, 15]])


def build(kind: str = "ViT", **changed: Any) -> nn.Module:
    return built(getattr(transformers, f"{kind}ForImageClassification"), SIZES | changed)


def images(channels: int = 1, side: int = 8) -> torch.Tensor:
    return torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("visible", [None, VISIBLE])
@pytest.mark.parametrize("blanks", [False, True])
def test_outputs_equal_our_autoencoder(visible: torch.Tensor | None, blanks: bool) -> None:
    ours = tiny_mae().eval()
    vit = encoder_alone(deepcopy(ours), 3, "class")
    model = WrappedAutoencoder(vit, ours.decoder, ours.head, 2).eval()
    for each in (model, deepcopy(model)):
        torch.testing.assert_close(each(images(), visible, blanks=blanks), ours(images(), visible, blanks=blanks))


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Dinov2", "ViTMSN"])
def test_encoder_states_are_those_of_the_model(kind: str) -> None:
    vit = build(kind).eval()
    expected = vit.base_model(images()).last_hidden_state
    model = autoencoder_around(vit, 8, 1).eval()
    torch.testing.assert_close(model.encode(images()), expected)
    hidden = model.encode(images(), VISIBLE)
    assert hidden.shape[1] == expected.shape[1] - 12
    changed = patchify(images(), 2)
    changed[0, 1] += 9  # a patch that is not visible
    back = unpatchify(changed, 2, 8, 8)
    torch.testing.assert_close(model.encode(back, VISIBLE), hidden)


def test_a_stem_of_convolutions_has_patches_of_its_whole_stride() -> None:
    model = autoencoder_around(StemVit(), 32, 3)
    assert model.patch == patch_side(model, 32, 3) == 8
    assert model.logits(images(3, 32)).shape == (2, 16, 3 * 8 * 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of noise images in two classes."""
    from PIL import Image

    root, draws = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for index in range(24):
        kind = root / "ab"[index % 2]
        kind.mkdir(exist_ok=True)
        Image.fromarray(draws.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(kind / f"{index}.png")
    return root


CHOICES: list[list[Any]] = [
    [], ["drop_masked_patches"], ["drop_masked_patches", "memory.optimal_recompute"],
    ["drop_masked_patches", "growth.stacking"], ["curriculum.resolution"],
]  # fmt: skip


@pytest.mark.parametrize("chosen", CHOICES, ids=lambda chosen: "+".join(chosen) or "plain")
def test_an_own_model_trains_as_an_encoder(chosen: list[Any], folder: Path, tmp_path: Path) -> None:
    options = {
        "data": str(folder), "loss": "masked_reconstruction", "techniques": [thrifty.AdamW(lr=1e-3), *chosen],
        "budget": 4, "batch": 4, "runs": tmp_path, "quiet": True, "settings": {"data.size": 32},
    }  # fmt: skip
    run = thrifty.train(StemVit, name="whole", **options)
    half = thrifty.train(StemVit, name="half", observers=[lambda record: record.step < 2], **options)
    again = thrifty.resume(half.folder, model=StemVit, quiet=True).load_model()
    whole = run.load_model()
    assert isinstance(whole.encoder, StemVit)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())
    moved = {
        name
        for name, value in StemVit().state_dict().items()
        if not torch.equal(value, whole.encoder.state_dict()[name])
    }
    assert moved >= {"stem.0.weight", "places", "blocks.0.attention.qkv.weight", "blocks.1.mlp.2.weight"}


@pytest.mark.parametrize("is_own", [True, False])
def test_the_export_is_the_encoder(is_own: bool, folder: Path, tmp_path: Path) -> None:
    make = StemVit if is_own else partial(build, image_size=32, patch_size=8, num_channels=3)
    run = thrifty.train(
        make, str(folder), loss="masked_reconstruction", techniques=["drop_masked_patches", thrifty.AdamW(lr=1e-3)],
        budget=2, batch=4, runs=tmp_path, quiet=True, settings={"data.size": 32},
    )  # fmt: skip
    thrifty.export(run, tmp_path / "out", model=make)
    expected = run.load_model().encoder
    if is_own:
        again = StemVit()
        load_model(again, str(tmp_path / "out" / "model.safetensors"))
    else:
        again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in expected.state_dict().items())
    checked = thrifty.check(
        model=make, data=str(folder), loss="masked_reconstruction", techniques=["drop_masked_patches", thrifty.AdamW()],
        batch=4, settings={"data.size": 32}, quiet=True, ranks=False,
    )  # fmt: skip
    assert not checked.broken, str(checked)


def test_recomputed_blocks_encode_the_same_patches(folder: Path, tmp_path: Path) -> None:
    seen = set()
    for index, more in enumerate(([], ["memory.recompute"], ["memory.optimal_recompute"])):
        run = thrifty.train(
            partial(build, image_size=32, patch_size=8, num_channels=3), str(folder), loss="masked_reconstruction",
            techniques=["drop_masked_patches", thrifty.AdamW(lr=1e-3), *more], budget=3, batch=4, runs=tmp_path,
            name=str(index), quiet=True, settings={"data.size": 32},
        )  # fmt: skip
        seen.add(run.loss)
    assert len(seen) == 1


def test_pyramids_and_other_channels_are_refused() -> None:
    config = {"image_size": 16, "patch_size": 2, "num_channels": 1, "embed_dim": 16, "depths": [1, 1]}
    swin = built(transformers.SwinForImageClassification, config | {"num_heads": [2, 2], "window_size": 2})
    with pytest.raises(RefusedError, match="no hidden state for each of the 64 patches"):
        autoencoder_around(swin, 16, 1)
    with pytest.raises(RefusedError, match="does not accept images of 3 x 8 x 8"):
        autoencoder_around(build(), 8, 3)
