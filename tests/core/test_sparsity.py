"""How a density is spread over layers, and the masks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from thrifty.core.errors import UsageError
from thrifty.core.sparsity import layer_densities, random_mask

SHAPES = some.lists(some.tuples(some.integers(1, 64), some.integers(1, 64)), min_size=1, max_size=8).map(
    lambda shapes: {f"layer {index}": shape for index, shape in enumerate(shapes)}
)


@given(shapes=SHAPES, density=some.floats(0.01, 1.0), distribution=some.sampled_from(["erk", "uniform"]))
def test_the_kept_weights_are_the_wanted_share_of_all_and_no_layer_exceeds_one(
    shapes: dict[str, tuple[int, int]], density: float, distribution: str
) -> None:
    found = layer_densities(shapes, density, distribution)
    sizes = {name: rows * columns for name, (rows, columns) in shapes.items()}
    assert all(0 < share <= 1 for share in found.values())
    assert sum(found[n] * sizes[n] for n in shapes) == pytest.approx(density * sum(sizes.values()))


def test_erk_keeps_more_of_small_layers_in_proportion_to_dims_over_size() -> None:
    shapes = {"small": (10, 10), "large": (100, 100)}
    found = layer_densities(shapes, 0.2, "erk")
    assert found["small"] == 1.0  # its share would be above 1
    shapes = {"a": (40, 60), "b": (100, 50)}
    found = layer_densities(shapes, 0.2, "erk")
    assert found["a"] / found["b"] == pytest.approx((100 / 2400) / (150 / 5000))


def test_an_unknown_distribution_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown distribution 'erdos'"):
        layer_densities({"a": (2, 2)}, 0.5, "erdos")


@given(rows=some.integers(1, 20), columns=some.integers(1, 20), density=some.floats(0, 1), key=some.text(max_size=5))
def test_a_mask_has_its_number_of_places_and_depends_on_its_key_alone(
    rows: int, columns: int, density: float, key: str
) -> None:
    weight = torch.zeros(rows, columns)
    mask = random_mask(weight, density, key)
    assert mask.dtype == torch.bool and mask.shape == weight.shape
    assert int(mask.sum()) == round(density * rows * columns)
    torch.manual_seed(rows)
    assert torch.equal(random_mask(torch.ones_like(weight), density, key), mask)


def test_different_keys_give_different_masks_spread_over_all_places() -> None:
    weight = torch.zeros(50, 50)
    masks = [random_mask(weight, 0.5, str(key)) for key in range(40)]
    assert not torch.equal(masks[0], masks[1])
    often = torch.stack(masks).float().mean(0)
    assert often.min() > 0.1 and often.max() < 0.9
