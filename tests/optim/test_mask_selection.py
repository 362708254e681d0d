"""Layer densities, random masks and selection by score."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from thrifty.core.errors import UsageError
from thrifty.optim.mask_selection import (
    global_count,
    largest,
    largest_of_all,
    layer_counts,
    layer_densities,
    masked_shapes,
    random_mask,
    replace_connections,
    shard_like_parameter,
)

SHAPES = some.lists(some.tuples(some.integers(1, 64), some.integers(1, 64)), min_size=1, max_size=8).map(
    lambda shapes: {f"layer {index}": shape for index, shape in enumerate(shapes)}
)


@given(shapes=SHAPES, density=some.floats(0.01, 1.0), distribution=some.sampled_from(["erk", "uniform"]))
def test_layer_densities_sum_to_total_density_and_stay_below_one(
    shapes: dict[str, tuple[int, int]], density: float, distribution: str
) -> None:
    densities = layer_densities(shapes, density, distribution)
    sizes = {name: rows * columns for name, (rows, columns) in shapes.items()}
    assert all(0 < each <= 1 for each in densities.values())
    assert sum(densities[n] * sizes[n] for n in shapes) == pytest.approx(density * sum(sizes.values()))


def test_erk_density_is_proportional_to_dims_over_size() -> None:
    shapes = {"small": (10, 10), "large": (100, 100)}
    densities = layer_densities(shapes, 0.2, "erk")
    assert densities["small"] == 1.0  # its density would be above 1
    shapes = {"a": (40, 60), "b": (100, 50)}
    densities = layer_densities(shapes, 0.2, "erk")
    assert densities["a"] / densities["b"] == pytest.approx((100 / 2400) / (150 / 5000))


def test_unknown_distribution_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown distribution 'erdos'"):
        layer_densities({"a": (2, 2)}, 0.5, "erdos")


@given(rows=some.integers(1, 20), columns=some.integers(1, 20), density=some.floats(0, 1), key=some.text(max_size=5))
def test_random_mask_has_exact_density_and_depends_only_on_key(
    rows: int, columns: int, density: float, key: str
) -> None:
    weight = torch.zeros(rows, columns)
    mask = random_mask(weight, density, key)
    assert mask.dtype == torch.bool and mask.shape == weight.shape
    assert int(mask.sum()) == round(density * rows * columns)
    torch.manual_seed(rows)
    assert torch.equal(random_mask(torch.ones_like(weight), density, key), mask)


def test_random_masks_differ_by_key_and_cover_all_positions() -> None:
    weight = torch.zeros(50, 50)
    masks = [random_mask(weight, 0.5, str(key)) for key in range(40)]
    assert not torch.equal(masks[0], masks[1])
    often = torch.stack(masks).float().mean(0)
    assert often.min() > 0.1 and often.max() < 0.9


def test_counts_are_rounded_densities() -> None:
    shapes = {"a": (3, 5), "b": (7, 11)}
    assert layer_counts(shapes, 0.5, "uniform") == {"a": 8, "b": 38}
    assert global_count(shapes, 0.5) == 46
    weights = {"a": torch.zeros(3, 5), "vector": torch.zeros(3), "kernel": torch.zeros(2, 2, 2)}
    assert masked_shapes(weights) == {"a": (3, 5)}


def test_position_table_inside_a_block_is_not_masked() -> None:
    names = ("block.0.layer.0.SelfAttention.relative_attention_bias.weight", "block.0.layer.0.SelfAttention.q.weight")
    assert list(masked_shapes({name: torch.zeros(8, 4) for name in names})) == [names[1]]


@given(scores=some.lists(some.integers(-3, 3), min_size=1, max_size=30), share=some.floats(0, 1))
def test_largest_equals_stable_sort(scores: list[int], share: float) -> None:
    count = round(share * len(scores))
    kept = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
    mask = largest(torch.tensor(scores, dtype=torch.float32), count)
    assert mask.nonzero().flatten().tolist() == sorted(kept)


@given(
    sizes=some.lists(some.tuples(some.integers(1, 4), some.integers(1, 4)), min_size=1, max_size=4),
    share=some.floats(0, 1),
    seed=some.integers(0, 999),
)
def test_global_largest_is_independent_of_layer_order(sizes: list[tuple[int, int]], share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = {f"{i}": torch.randint(-2, 3, size, generator=generator).float() for i, size in enumerate(sizes)}
    count = round(share * sum(values.numel() for values in scores.values()))
    masks = largest_of_all(scores, count)
    ranked = [(-float(x), name, i) for name in sorted(scores) for i, x in enumerate(scores[name].flatten())]
    kept = {(name, place) for name, mask in masks.items() for place in mask.flatten().nonzero().flatten().tolist()}
    assert kept == {(name, place) for _, name, place in sorted(ranked)[:count]}
    backwards = largest_of_all(dict(reversed(scores.items())), count)
    assert all(torch.equal(mask, backwards[name]) for name, mask in masks.items())


def test_full_mask_or_zero_moves_return_the_same_mask() -> None:
    full, some_of_it = torch.ones(3, 3, dtype=torch.bool), torch.eye(3, dtype=torch.bool)
    worth = torch.rand(3, 3)
    assert replace_connections(full, worth, worth, 0.5) is full
    assert replace_connections(some_of_it, worth, worth, 0.1) is some_of_it
    assert torch.equal(shard_like_parameter(some_of_it, worth), some_of_it)
