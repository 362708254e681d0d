"""Image-text retrieval and zero-shot classification over a whole set, against plain loops."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pair_runs import SIDE, Crosses, pair_run, tiny_clip

from thrifty.core.batches import Batch
from thrifty.data.epoch_sampler import HeldOutExamples
from thrifty.objectives.retrieval_metrics import (
    chance_retrieval,
    class_vectors,
    embed_pairs,
    retrieval,
    zero_shot_accuracy,
)

CPU = torch.device("cpu")


def unit_vectors(count: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)), dim=1)


@given(st.integers(1, 14), st.integers(0, 99))
def test_recall_equals_sorted_lists(count, seed):
    images, captions = unit_vectors(count, seed), unit_vectors(count, seed + 1)
    numbers = torch.randint(max(1, count // 2), (count,), generator=torch.Generator().manual_seed(seed))
    scores = retrieval(images, captions, numbers)
    for name, queries, keys in (("captions", images, captions), ("images", captions, images)):
        for first in (1, 5, 10):
            right = 0
            for query, own in zip(queries, numbers, strict=True):
                nearest = sorted(range(count), key=lambda index: -float(query @ keys[index]))[:first]
                right += any(numbers[index] == own for index in nearest)
            assert scores[f"{name} R@{first}"] == pytest.approx(right / count)


def test_chance_recall_equals_all_orders():
    numbers = torch.tensor([0, 0, 1, 2, 2, 2])
    orders = list(itertools.permutations(range(6)))
    for first in (1, 5):
        right = sum(any(numbers[i] == own for i in order[:first]) for own in numbers for order in orders)
        assert chance_retrieval(numbers)[f"images R@{first}"] == pytest.approx(right / len(orders) / 6)
    assert chance_retrieval(numbers)["captions R@10"] == 1.0


def test_embeddings_equal_the_towers():
    model, held_out = tiny_clip(), HeldOutExamples(Crosses())
    images, captions, numbers = embed_pairs(model, held_out.batches(40, 16), CPU)
    whole = next(held_out.batches(40, 40))
    with torch.no_grad():
        torch.testing.assert_close(images, model.of_images(whole["inputs"]))
        torch.testing.assert_close(captions, model.of_captions(whole["tokens"], whole["keep"]))
    assert len(numbers.unique()) == 40
    twice = embed_pairs(model, [*held_out.batches(8, 8), *held_out.batches(8, 4)], CPU)[2]
    assert torch.equal(twice[:8], twice[8:])


def test_padding_does_not_change_the_caption():
    model, batch = tiny_clip(), pair_run(batch=4).source.at(0)
    other = Batch({**batch.fields, "tokens": torch.where(batch["keep"], batch["tokens"], 9)}, batch.weight)
    numbers = embed_pairs(model, [batch, other], CPU)[2]
    assert torch.equal(numbers[:4], numbers[4:])


class Named(torch.nn.Module):
    """A model that embeds an image by its first pixels and a caption by its first token."""

    def of_images(self, images):
        return F.normalize(images.flatten(1)[:, :3], dim=1)

    def of_captions(self, tokens, keep):
        return F.normalize(torch.eye(3)[tokens[:, 0]] + torch.eye(3)[tokens[:, 1]] / 4, dim=1)


def test_zero_shot_class_is_nearest_mean_of_prompts():
    prompts = []
    for tokens in ([[0, 1], [1, 1], [2, 2]], [[0, 2], [1, 0], [2, 2]]):
        rows = torch.tensor(tokens)
        prompts.append(Batch({"tokens": rows, "keep": torch.ones_like(rows, dtype=torch.bool)}, torch.ones(3)))
    vectors = class_vectors(Named(), prompts, CPU)
    means = sum(Named().of_captions(batch["tokens"], batch["keep"]) for batch in prompts) / 2
    torch.testing.assert_close(vectors, means / means.norm(dim=1, keepdim=True))
    images = torch.zeros(4, 1, SIDE, SIDE)
    images[:, 0, 0, :3] = torch.tensor([[2.0, 0, 1], [0, 1, 0], [1, 0, 3], [0, 0, 1]])
    batches = [Batch({"inputs": images[i : i + 2], "labels": torch.tensor(labels)}, torch.ones(2))
               for i, labels in ((0, [0, 1]), (2, [2, 1]))]  # fmt: skip
    assert zero_shot_accuracy(Named(), vectors, batches, CPU) == 0.75
