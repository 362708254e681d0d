"""`thrifty.merge`: adapters that were trained in a loop of one's own become part of the weights."""

import copy

import pytest
import torch
from tiny_runs import plain_run, technique
from torch import Tensor, nn

import thrifty
from thrifty import techniques
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.technique import Technique

PLAIN = ("lora", "bias_only", "head_only", "intrinsic_dimension")
"""Adapters that the plain weights can take."""
LEFT_ON = ("bottleneck", "prefix_tuning", "prompt_tuning")


def trained(*chosen: Technique | str) -> tuple[nn.Module, list[str], Tensor]:
    """A model with trained adapters, the names of its plain parameters, and inputs."""
    plain = plain_run(depth=2, style="gpt", tied=False)
    model = plain.build()
    names = list(model.state_dict())
    optimizer = thrifty.optim.Sgd(model.named_parameters(), lr=0.1)
    for each in chosen:
        thrifty.apply((model, optimizer), each)
    for step in range(3):
        batch = plain.source.at(step)
        plain.objective.losses(plain.objective.predict(model, batch), batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), names, plain.source.at(3)["tokens"][:, :-1]


def outputs(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.head(model(tokens))


@pytest.mark.parametrize("name", PLAIN)
def test_a_merged_model_has_plain_names_and_equal_outputs(name: str) -> None:
    model, names, tokens = trained(technique(f"adapters.{name}"))
    expected = outputs(model, tokens)
    assert thrifty.merge(model) is model
    assert list(model.state_dict()) == names and all(each.requires_grad for each in model.parameters())
    torch.testing.assert_close(outputs(model, tokens), expected, rtol=1e-4, atol=1e-5)
    fresh = plain_run(depth=2, style="gpt", tied=False).build().eval()
    assert not torch.allclose(outputs(fresh, tokens), expected, rtol=1e-4, atol=1e-5)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(outputs(fresh, tokens), outputs(model, tokens))
    assert "adapters" not in repr(thrifty.summary(model))
    thrifty.apply(model, "lora", rank=2)  # as on a model that never had adapters


@pytest.mark.parametrize("name", LEFT_ON)
def test_unmergeable_adapters_are_refused_and_stay(name: str) -> None:
    model, _, tokens = trained(technique(f"adapters.{name}"))
    expected, before = outputs(model, tokens), list(model.state_dict())
    with pytest.raises(RefusedError, match="cannot be folded into the weights"):
        thrifty.merge(model)
    assert list(model.state_dict()) == before and torch.equal(outputs(model, tokens), expected)
    assert name in repr(thrifty.summary(model))


def test_every_adapter_of_the_catalogue_is_merged_or_refused() -> None:
    known = {name.removeprefix("adapters.") for name in techniques.own_names() if name.startswith("adapters.")}
    assert known == {*PLAIN, *LEFT_ON, "visual_prompt"}


def test_merge_keeps_other_techniques_and_merges_copies_apart() -> None:
    model, _, tokens = trained("lora", "memory.recompute")
    expected = outputs(model, tokens)
    merged = thrifty.merge(copy.deepcopy(model))
    torch.testing.assert_close(outputs(merged, tokens), expected, rtol=1e-4, atol=1e-5)
    assert "recompute" in repr(thrifty.summary(merged)) and "lora" not in repr(thrifty.summary(merged))
    assert "lora" in repr(thrifty.summary(model)) and torch.equal(outputs(model, tokens), expected)


def test_torch_attention_and_16_bit_weights_are_merged() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).bfloat16().eval()
    names, x = list(model.state_dict()), torch.randn(2, 5, 16, dtype=torch.bfloat16)
    thrifty.apply(model, "lora", rank=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.normal_(std=0.1)
    expected = model(x)
    thrifty.merge(model)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.05)


def test_a_model_without_adapters_is_refused() -> None:
    model = plain_run(depth=2, style="gpt").build()
    with pytest.raises(UsageError, match="no adapters"):
        thrifty.merge(model)
    wrapper = nn.Module()
    wrapper.module = thrifty.apply(model, "lora", rank=2)
    with pytest.raises(UsageError, match="inside the wrapper Module") as error:
        thrifty.merge(wrapper)
    assert error.value.fix == "merge(model.module)"
