"""Arguments of classifiers: only models with several token types receive token types."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from thrifty.core.classifier_inputs import classifier_inputs


class Classifier(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        return input_ids + attention_mask + token_type_ids


@pytest.mark.parametrize(
    ("config", "has_types"),
    [
        (None, True),
        (SimpleNamespace(width=8), True),
        (SimpleNamespace(model_type="bert", type_vocab_size=2), True),
        (SimpleNamespace(model_type="gpt2"), False),
    ],
)
def test_token_types_are_passed_to_models_that_take_them(config: object, has_types: bool) -> None:
    model = Classifier()
    if config:
        model.config = config  # type: ignore[assignment]
    tokens = torch.ones(1, 2, dtype=torch.long)
    assert ("token_type_ids" in classifier_inputs(model, tokens, tokens > 0, tokens)) == has_types
