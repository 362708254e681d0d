"""Image data of a run: batches as a function of (seed, number), held-out images, and statistics."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.recipe import AugmentationSettings, DataSettings, ModelSettings, Recipe
from thrifty.data.images.augmentation import augment
from thrifty.data.images.digits import DigitImages
from thrifty.data.images.image_arrays import normalized
from thrifty.data.images.image_data import open_images
from thrifty.data.images.pretrained_normalization import normalized_for
from thrifty.data.run_metadata import image_metadata, read_model_spec
from thrifty.data.train_split import DataSplit
from thrifty.kernels.example_rng import example_keys
from thrifty.kernels.image_resizing import resize

MIXED = AugmentationSettings(crop=1, operations=1, erase=0.3, mixup=0.4, cutmix=1.0)


def opened(seed=0, **changed):
    return open_images(DataSettings(**{"source": "digits", "batch": 16} | changed), seed, None, print)


def test_digits_are_standardized_by_training_pixels():
    data, train = opened(), DigitImages("train")
    assert (len(data.parts[DataSplit.TRAIN]), len(data.parts[DataSplit.HELD_OUT])) == (1300, 497)
    assert data.ends.labels == tuple("0123456789") and (data.ends.side, data.ends.channels) == (8, 1)
    assert data.ends.mean[0] == pytest.approx(float(train.images.mean()))
    assert data.ends.std[0] == pytest.approx(float(train.images.std(unbiased=False)), rel=1e-5)
    shown = data.parts[DataSplit.TRAIN].fields(np.arange(1300))
    assert shown["inputs"].shape == (1300, 1, 8, 8) and abs(float(shown["inputs"].mean())) < 1e-5
    assert torch.equal(data.parts[DataSplit.TRAIN].shown(np.arange(1300))[:, 0], train.images)
    assert torch.equal(shown["labels"], train.labels)


@settings(max_examples=25)
@given(step=st.integers(0, 10**6), start=st.integers(0, 15), count=st.integers(1, 16), seed=st.integers(0, 99))
def test_any_rows_equal_the_whole_batch(step, start, count, seed):
    source = opened(seed, augment=MIXED).train
    stop = min(start + count, 16)
    part, whole = source.rows(step, start, stop), source.at(step).rows(start, stop)
    assert all(torch.equal(part[name], whole[name]) for name in whole.fields)
    torch.testing.assert_close(part["labels"].sum(1), torch.ones(stop - start))


def test_augmentation_differs_by_epoch_and_seed():
    def first(seed, epoch):
        source = opened(seed, batch=130, augment=AugmentationSettings(crop=2, operations=1)).train
        rows = [source.at(10 * epoch + step) for step in range(10)]
        return torch.cat([batch["inputs"].flatten(1) for batch in rows])

    shown = [first(0, 0), first(0, 1), first(1, 0)]
    for one, another in ((0, 1), (0, 2)):
        same = torch.cdist(shown[one], shown[another]).min(1).values == 0
        assert float(same.float().mean()) < 0.5


def test_training_keys_are_unique_and_held_out_keys_fixed():
    def keys(seed, **how):
        source = opened(seed, batch=130, **how).train
        return torch.cat([source.at(step)["key"] for step in range(20)])

    assert len(set(keys(0).tolist())) == 2600 and keys(0).dtype == torch.int64
    assert not set(keys(0).tolist()) & set(keys(1).tolist())
    assert torch.equal(keys(0), keys(0, augment=MIXED))
    source = opened(batch=16).train
    assert torch.equal(source.rows(3, 5, 9)["key"], source.at(3)["key"][5:9])
    one, other = (torch.cat([b["key"] for b in opened(seed).held_out.batches(497, 100)]) for seed in (0, 1))
    assert torch.equal(one, other) and len(set(one.tolist())) == 497


def test_no_labels_without_labelled():
    data = open_images(DataSettings(source="digits", batch=4), 0, None, print, labelled=False)
    assert data.train.at(0).fields.keys() == {"inputs", "key"} and data.ends.labels == ()
    changed = DataSettings(source="digits", batch=4, augment=AugmentationSettings(crop=1, flip=True))
    assert open_images(changed, 0, None, print, labelled=False).train.at(0).fields.keys() == {"inputs", "key"}
    assert torch.equal(data.train.at(5)["inputs"], opened(batch=4).train.at(5)["inputs"])


def test_held_out_images_are_not_augmented():
    one, other = (opened(seed, augment=MIXED).held_out for seed in (0, 1))
    (first,), (second,) = (list(held_out.batches(64, 64)) for held_out in (one, other))
    assert torch.equal(first["inputs"], second["inputs"]) and first["labels"].dtype == torch.int64


@pytest.mark.parametrize("size", [8, 12])
def test_crops_of_bytes_equal_crops_of_images(size):
    arrays, keys = opened(size=size).parts[DataSplit.TRAIN], example_keys(0, np.arange(50)).view(np.uint64)
    chosen = np.arange(50)
    by_images = augment(arrays.shown(chosen), keys, MIXED, arrays.ends.mean)
    assert torch.equal(arrays.changed(chosen, keys, MIXED), by_images)


def test_images_are_resized_to_another_side():
    data = opened(size=16)
    assert data.ends.side == 16 and data.train.at(0)["inputs"].shape == (16, 1, 16, 16)
    picture = torch.rand(1, 3, 12, 12)
    assert resize(picture, 12, 12) is picture
    torch.testing.assert_close(resize(torch.ones(1, 3, 12, 12), 5, 5), torch.ones(1, 3, 5, 5))
    torch.testing.assert_close(resize(picture, 4, 4).mean(), picture.mean(), rtol=0.05, atol=0)


def test_pixels_are_standardized_by_channel():
    ends = ImageModelSpec(("a",), 2, 2, (0.5, 0.25), (0.5, 0.125))
    found = normalized(torch.tensor([[[[1.0, 0.0], [0.5, 0.5]], [[0.25, 0.5], [0.0, 0.25]]]]), ends)
    assert found.tolist() == [[[[1.0, -1.0], [0.0, 0.0]], [[0.0, 2.0], [-2.0, 0.0]]]]


def test_label_entropy_of_image_data():
    assert opened().facts == {"unit": "images", "label_entropy": pytest.approx(2.307, abs=0.01)}
    assert opened().description()["train_images"] == 1300 and opened().example_unit == 1


def test_run_folder_has_the_model_spec(tmp_path):
    data = opened(size=12)
    for name, text in data.metadata().items():
        (tmp_path / name).write_text(text)
    assert read_model_spec(tmp_path, Recipe()) == data.ends
    (tmp_path / "images.json").write_text('{"labels": ["a"], "colour": 3}')
    with pytest.raises(IntegrityError, match=r"images.json' is damaged"):
        read_model_spec(tmp_path, Recipe())


def test_a_fork_on_other_labels_is_refused(tmp_path):
    data = opened()
    data.check_meaning(data.identity, tmp_path)
    for before in ({**data.identity, "labels": "cat/dog"}, {"tokenizer.json": "abc"}):
        with pytest.raises(UsageError, match="other labels than the old run"):
            data.check_meaning(before, tmp_path)


def test_unsupported_settings_of_images_are_refused():
    with pytest.raises(UsageError, match=r"data.tokenizer is set, but .digits. holds images"):
        opened(tokenizer="some.json")
    for size in (0, 10**9):
        with pytest.raises(UsageError, match=f"data: size is {size}\n  fix: size must be at least 1 and at most 8192"):
            opened(size=size)
    with pytest.raises(UsageError, match="1300 images to train on, fewer than one batch of 2000"):
        opened(batch=2000)


@pytest.fixture
def base(tmp_path):
    """Folder of a pretrained model, and a function that writes the settings of its image processor."""

    def write(**stated):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
        return ModelSettings(folder=str(tmp_path))

    return write


def normalized_by(model, run=None):
    data_settings = DataSettings(source="digits", batch=16)
    data = open_images(data_settings, 0, None, print, normalized_as=partial(normalized_for, model, run))
    return data.ends.mean[0], data.ends.std[0], data


def test_images_are_normalized_as_for_pretrained_weights(base):
    stated = {"image_mean": [0.5], "image_std": [0.25]}
    mean, std, data = normalized_by(base(**stated))
    assert (mean, std) == (0.5, 0.25)
    part = data.parts[DataSplit.HELD_OUT]
    inputs = part.fields(np.arange(9))["inputs"]
    torch.testing.assert_close(inputs, (part.shown(np.arange(9)) - 0.5) / 0.25)
    # a processor that divides by 127.5, or not at all, and one that only divides
    assert normalized_by(base(**stated, rescale_factor=1 / 127.5))[:2] == (0.25, 0.125)
    assert normalized_by(base(image_mean=[127.5], image_std=[255.0], do_rescale=False))[:2] == (0.5, 1.0)
    assert normalized_by(base(do_normalize=False))[:2] == (0.0, 1.0)


def test_images_keep_their_own_statistics_otherwise(base):
    own = opened().ends.mean[0], opened().ends.std[0]
    stated = {"image_mean": [0.5], "image_std": [0.25]}
    assert normalized_by(replace(base(**stated), reinitialize=True))[:2] == own
    assert normalized_by(base(image_mean=[0.5] * 3, image_std=[0.5] * 3))[:2] == own  # of other channels
    assert normalized_by(base(size=8))[:2] == own
    assert normalized_by(ModelSettings())[:2] == own
    for wrong in ({"image_mean": ["a"], "image_std": [1.0]}, {"image_mean": [0.5], "image_std": [0.0]}):
        with pytest.raises(IntegrityError, match=r"preprocessor_config\.json' has no usable normalization"):
            normalized_by(base(**wrong))


def test_images_are_normalized_as_in_their_run(base, tmp_path):
    before = replace(opened().ends, mean=(0.1,), std=(0.2,))
    for name, written in image_metadata(before).items():
        (tmp_path / name).write_text(written)
    model = base(image_mean=[0.5], image_std=[0.25])
    assert normalized_by(model, tmp_path)[2].ends == before
    for name, written in image_metadata(replace(before, channels=3, mean=(0.1,) * 3, std=(0.2,) * 3)).items():
        (tmp_path / name).write_text(written)
    assert normalized_by(model, tmp_path)[:2] == (0.5, 0.25)
