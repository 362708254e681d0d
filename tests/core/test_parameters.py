"""The rule for what is decayed."""

import pytest
import torch

from thrifty.core.parameters import is_matrix
from tiny_runs import tiny_model


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("blocks.0.attention.out.weight", (4, 4), True),
        ("embedding.token.weight", (4, 4), True),
        ("head.weight", (4, 4), True),
        ("conv.weight", (4, 4, 3, 3), True),
        ("norm.weight", (4,), False),
        ("mlp.up.bias", (4,), False),
        ("stacked.bias", (2, 4), False),
        ("embedding.position.weight", (4, 4), False),
        ("transformer.wpe.weight", (4, 4), False),
        ("vit.cls_token", (1, 1, 4), False),
        ("vit.pos_embed", (1, 5, 4), False),
        ("decomposition.weight", (4, 4), True),
        ("gain", (), False),
    ],
)
def test_matrices_are_decayed_and_vectors_biases_and_positions_are_not(
    name: str, shape: tuple[int, ...], decayed: bool
) -> None:
    assert is_matrix(name, torch.zeros(shape)) == decayed


@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_most_weights_of_our_models_are_decayed(style: str) -> None:
    named = dict(tiny_model(style=style).named_parameters())
    spared = {name for name, parameter in named.items() if not is_matrix(name, parameter)}
    assert spared == {name for name, p in named.items() if p.ndim == 1 or "position" in name}
