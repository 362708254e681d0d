"""Masked autoencoder: removed patches, loss and image previews."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_runs import tiny_mae

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.objective import Prediction
from thrifty.core.recipe import DataSettings, ObjectiveSettings
from thrifty.data.images.image_data import open_images
from thrifty.kernels.example_rng import example_keys
from thrifty.kernels.image_patches import patchify, unpatchify
from thrifty.objectives import chosen_objective, find_objective
from thrifty.objectives.masked_reconstruction import MaskedReconstruction, patch_losses, split
from thrifty.techniques.data_selection.drop_masked_patches import DropMaskedPatches
from thrifty.training.evaluation import see

KEYS = example_keys(0, np.arange(4))


def pictures(b: int = 4, size: int = 8) -> Batch:
    inputs = torch.randn(b, 1, size, size, generator=torch.Generator().manual_seed(3))
    return Batch({"inputs": inputs, "key": torch.from_numpy(example_keys(0, np.arange(b)))}, torch.full((b,), 1 / b))


@given(st.integers(1, 5), st.integers(2, 70), st.integers(0, 9), st.data())
def test_row_key_alone_splits_all_patches(b: int, total: int, seed: int, data: st.DataObject):
    visible = data.draw(st.integers(1, total - 1))
    keys = example_keys(seed, np.arange(b))
    seen, removed = split(keys, total, visible)
    assert seen.shape == (b, visible) and removed.shape == (b, total - visible)
    for row in range(b):
        assert sorted([*seen[row], *removed[row]]) == list(range(total))
        assert list(seen[row]) == sorted(seen[row]) and list(removed[row]) == sorted(removed[row])
    alone = split(keys[b - 1 :], total, visible)
    assert np.array_equal(alone[0][0], seen[-1]) and np.array_equal(alone[1][0], removed[-1])


def test_every_patch_is_removed_equally_often():
    seen, _ = split(example_keys(1, np.arange(20_000)), 16, 4)
    share = np.bincount(seen.ravel(), minlength=16) / 20_000
    assert np.abs(share - 0.25).max() < 0.015  # five standard deviations


@pytest.mark.parametrize(("rate", "visible"), [(0.75, 4), (0.5, 8), (0.9, 1), (0.6, 6)])
def test_number_of_visible_patches(rate: float, visible: int):
    made = MaskedReconstruction(rate=rate, patch=2).examples(pictures())
    assert visible == int(16 * (1 - rate))
    assert made["visible"].shape == (4, visible) and made["removed"].shape == (4, 16 - visible)
    assert made.fields.keys() == {"inputs", "visible", "removed"}
    assert MaskedReconstruction(rate=rate, patch=2).examples(made) is made


def test_smaller_images_have_fewer_patches():
    assert MaskedReconstruction(patch=2).examples(pictures(size=4))["visible"].shape == (4, 1)


def test_loss_is_the_mean_over_pixels_then_removed_patches():
    objective, batch = (
        MaskedReconstruction(patch=2, normalize=False),
        MaskedReconstruction(patch=2).examples(pictures()),
    )
    predicted = torch.randn(4, 12, 4, generator=torch.Generator().manual_seed(4))
    pixels, wanted = patchify(batch["inputs"], 2), []
    for row in range(4):
        errors = [(predicted[row, i] - pixels[row, p]) ** 2 for i, p in enumerate(batch["removed"][row].tolist())]
        wanted.append(sum(float(error.mean()) for error in errors) / 12)
    assert objective.losses(Prediction(output=predicted), batch).tolist() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_visible_patches_are_no_targets(normalize: bool):
    objective = MaskedReconstruction(patch=2, normalize=normalize)
    batch = objective.examples(pictures())
    pixels = patchify(batch["inputs"], 2)
    for row in range(4):
        pixels[row, batch["visible"][row]] += 7.0
    other = Batch({**batch.fields, "inputs": unpatchify(pixels, 2, 8, 8)}, batch.weight)
    prediction = Prediction(output=torch.zeros(4, 12, 4))
    assert torch.equal(objective.losses(prediction, batch), objective.losses(prediction, other))


def test_predicting_patch_means_has_normalized_loss_near_one():
    batch = MaskedReconstruction(patch=2).examples(pictures())
    losses = MaskedReconstruction(patch=2).losses(Prediction(output=torch.zeros(4, 12, 4)), batch)
    assert losses.tolist() == pytest.approx([3 / 4] * 4, rel=1e-3)  # the unbiased variance of 4 pixels: 3/4 is left


@pytest.mark.parametrize("dropped", [False, True])
def test_removed_pixels_reach_only_the_targets(dropped: bool):
    plain, model = MaskedReconstruction(patch=2), tiny_mae().eval()
    objective = DropMaskedPatches().objective(plain) if dropped else plain
    batch = plain.examples(pictures())
    pixels = patchify(batch["inputs"], 2)
    for row in range(4):
        pixels[row, batch["removed"][row]] = 9.0
    other = Batch({**batch.fields, "inputs": unpatchify(pixels, 2, 8, 8)}, batch.weight)
    with torch.no_grad():
        one, another = (objective.predict(model, each) for each in (batch, other))
        assert one.logits.shape == (4, 12, 4) and torch.equal(one.logits, another.logits)
        assert not torch.equal(objective.losses(one, batch), objective.losses(another, other))


def test_scores_are_gradient_norms_at_the_predictions():
    objective, batch = MaskedReconstruction(patch=2), MaskedReconstruction(patch=2).examples(pictures())
    given = torch.randn(4, 12, 4, generator=torch.Generator().manual_seed(5), requires_grad=True)
    prediction = Prediction(output=given)
    objective.losses(prediction, batch).sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(objective.scores(prediction, batch), given.grad.flatten(1).norm(dim=1))


def test_masks_change_each_epoch_and_stay_in_evaluation():
    masks = {}
    for seed in (0, 1):
        data = open_images(DataSettings(source="digits", batch=1300), seed, None, print, labelled=False)
        objective = MaskedReconstruction(patch=2)
        first, second = (objective.examples(data.train.at(step)) for step in (0, 1))
        order = [batch["inputs"].flatten(1).sum(1).argsort() for batch in (first, second)]
        differ = (first["visible"][order[0]] != second["visible"][order[1]]).any(1).float().mean()
        assert differ > 0.9
        held_out = data.held_out.shaped(objective.examples)
        few, many = next(held_out.batches(8, 8)), next(held_out.batches(100, 100))
        assert torch.equal(few["visible"], many["visible"][:8])
        masks[seed] = many["visible"]
        rows = objective.examples(data.train.rows(0, 7, 11))
        assert torch.equal(rows["removed"], first["removed"][7:11])
    assert torch.equal(masks[0], masks[1])


def test_images_that_cannot_be_split_are_refused():
    with pytest.raises(UsageError, match=r"rate is 0\.95: 0 of 16 patches would be visible") as refused:
        MaskedReconstruction(rate=0.95, patch=2).examples(pictures())
    assert "lower model.patch" in refused.value.fix
    with pytest.raises(UsageError, match="8 x 8 pixels cannot be cut into patches of 3"):
        MaskedReconstruction(patch=3).examples(pictures())
    with pytest.raises(UsageError, match="patch size of the model is unknown"):
        MaskedReconstruction().with_patch_size(None).examples(pictures())
    for rate in (0.0, 1.0):
        with pytest.raises(UsageError, match="rate"):
            MaskedReconstruction(rate=rate)


def test_objective_by_name_with_settings():
    chosen = chosen_objective(ObjectiveSettings("masked_reconstruction", rate=0.5, normalize=False)).with_patch_size(4)
    assert chosen == MaskedReconstruction(rate=0.5, normalize=False, patch=4)
    assert chosen.learns_from == ("images", "text") and not chosen.needs_labels
    assert chosen.loss_in == "mean squared error"
    assert patch_losses(torch.ones(1, 2, 3), torch.zeros(1, 2, 3)).tolist() == [1.0]
    with pytest.raises(UsageError, match=r"objective\.normalize is set, but classification has no such setting"):
        find_objective("classification", normalize=True)


@pytest.mark.parametrize("normalize", [True, False])
def test_preview_merges_predicted_and_visible_patches(normalize: bool):
    objective = MaskedReconstruction(patch=2, normalize=normalize)
    batch = objective.examples(pictures())
    right = Prediction(output=objective.targets(batch))
    found = objective.image_previews(right, batch)
    assert list(found) == ["original", "masked", "reconstructed"]
    assert torch.equal(found["original"], batch["inputs"])
    torch.testing.assert_close(found["reconstructed"], batch["inputs"])
    cut = {
        name: patchify(images, 2)
        for name, images in objective.image_previews(Prediction(output=right.logits + 1), batch).items()
    }
    for row in range(4):
        seen, removed = batch["visible"][row], batch["removed"][row]
        for name in ("masked", "reconstructed"):
            assert torch.equal(cut[name][row, seen], cut["original"][row, seen])
        assert not cut["masked"][row, removed].any()
        deviation = cut["original"][row, removed].std(1, keepdim=True) if normalize else torch.ones(12, 1)
        off = cut["reconstructed"][row, removed] - cut["original"][row, removed]
        torch.testing.assert_close(off, deviation.expand_as(off), rtol=1e-3, atol=1e-3)
    assert ("of the true patch" in objective.pictured) is normalize


def test_wrapping_technique_keeps_the_previews():
    plain = MaskedReconstruction(patch=2)
    batch, model = plain.examples(pictures()), tiny_mae()
    around = DropMaskedPatches().objective(plain)
    prediction = around.predict(model, batch)
    assert around.pictured == plain.pictured
    for name, images in around.image_previews(prediction, batch).items():
        assert torch.equal(images, plain.image_previews(prediction, batch)[name])


def test_previews_use_the_first_evaluated_batch():
    objective, model, sizes = MaskedReconstruction(patch=2), tiny_mae(dropout=0.5).train(), []
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    batch = objective.examples(pictures())
    found = see(model, objective, batch, 3, torch.device("cpu"))
    assert sizes == [4] and model.training
    with torch.no_grad():
        prediction = objective.predict(model.eval(), batch)
    assert found.losses == objective.losses(prediction, batch)[:3].tolist()
    for name, images in objective.image_previews(prediction, batch).items():
        assert torch.equal(found.pictures[name], images[:3])
