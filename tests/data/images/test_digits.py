import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thrifty.core.errors import UsageError
from thrifty.data.epoch_sampler import HeldOutExamples
from thrifty.data.images.digits import DigitEpochs, DigitImages, digits


def test_images_equal_the_repository():
    images, labels = digits()
    assert images.shape == (1797, 8, 8) and images.dtype == torch.float32
    assert labels.shape == (1797,) and labels.dtype == torch.int64
    assert images.min() == 0 and images.max() == 1
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    pixels = (images * 16).to(torch.uint8)
    assert torch.equal(pixels / 16, images)
    digest = hashlib.sha256(pixels.numpy().tobytes() + labels.to(torch.uint8).numpy().tobytes()).hexdigest()
    assert digest == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_the_copy_of_scikit_learn_is_the_same():
    datasets = pytest.importorskip("sklearn.datasets")
    theirs = datasets.load_digits()
    assert torch.equal(torch.from_numpy(theirs.images).float() / 16, digits().images)
    assert torch.equal(torch.from_numpy(theirs.target), digits().labels)


def rows_of(part):
    return {(tuple(image.flatten().tolist()), int(label)) for image, label in zip(*part, strict=True)}


def test_splits_are_disjoint_and_complete():
    train, test = DigitImages("train"), DigitImages("test")
    assert (len(train), len(test)) == (1300, 497)
    parts = [rows_of((part.images, part.labels)) for part in (train, test)]
    assert not parts[0] & parts[1] and parts[0] | parts[1] == rows_of(digits())
    with pytest.raises(UsageError, match="no split 'tests'"):
        DigitImages("tests")


@given(step=st.integers(0, 10**6), start=st.integers(0, 31), count=st.integers(1, 32), seed=st.integers(0, 99))
def test_any_rows_equal_the_whole_batch(step, start, count, seed):
    source = DigitEpochs("train", 32, seed)
    stop = min(start + count, 32)
    part, whole = source.rows(step, start, stop), source.at(step).rows(start, stop)
    assert part.fields.keys() == {"inputs", "labels"}
    assert all(torch.equal(part[name], whole[name]) for name in part.fields)
    assert torch.equal(part.weight, whole.weight)


def test_epoch_has_every_image_once_in_a_new_order():
    source, train = DigitEpochs("train", 130, seed=1), DigitImages("train")
    epochs = [[source.at(step) for step in range(first, first + 10)] for first in (0, 10)]
    for epoch in epochs:
        shown = torch.cat([batch["inputs"].flatten(1) for batch in epoch])
        assert sorted(map(tuple, shown.tolist())) == sorted(map(tuple, train.images.flatten(1).tolist()))
    assert not torch.equal(epochs[0][0]["inputs"], epochs[1][0]["inputs"])
    assert float(epochs[0][0].weight.sum()) == pytest.approx(1)


def test_the_test_split_can_be_held_out():
    batches = list(HeldOutExamples(DigitImages("test")).batches(1000, 200))
    assert [len(batch) for batch in batches] == [200, 200, 97]
    assert sum(float(batch.weight.sum()) for batch in batches) == pytest.approx(1)
