"""Visual prompts: their positions, the input of each block, and the trained parameters."""

import math

import pytest
import torch
from stacked_models import KINDS, LABELS, PIXELS
from tiny_runs import tiny_model
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, UsageError
from thrifty.techniques.adapters.visual_prompt import NAME, VisualPrompt, cut_out, initial_bound, insert
from thrifty.techniques.memory.recompute import Recompute

VIT = KINDS["vit"]


def prompts_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if name.endswith(NAME)}


def test_prompts_follow_the_first_tokens_and_are_cut_out() -> None:
    x, prompt = torch.randn(2, 5, 4), torch.randn(3, 4)
    longer = insert(x, prompt, 1)
    assert torch.equal(longer, torch.cat((x[:, :1], prompt.expand(2, -1, -1), x[:, 1:]), 1))
    assert torch.equal(cut_out(longer, 3, 1), x)
    assert torch.equal(insert(x, prompt, 0)[:, :3], prompt.expand(2, -1, -1))


@pytest.mark.parametrize("deep", [False, True])
def test_initial_values_are_uniform_within_the_paper_bound(deep: bool) -> None:
    model = VisualPrompt(tokens=50, deep=deep).model(VIT.model())
    actual = prompts_of(model)
    assert [*actual] == [f"vit.layers.{index}.{NAME}" for index in (range(3) if deep else (0,))]
    bound = math.sqrt(6 / (3 * 4 * 4 + 32))
    assert initial_bound(4, 32) == bound
    for values in actual.values():
        assert values.shape == (50, 32) and 0.98 * bound < values.abs().max() <= bound
    assert len({float(values.sum()) for values in actual.values()}) == len(actual)


@pytest.mark.parametrize("deep", [False, True])
def test_each_block_sees_its_prompt_or_the_prompt_output(deep: bool) -> None:
    model = VIT.model()
    seen: list[Tensor] = []
    for block in model.vit.layers:
        block.layernorm_before.register_forward_pre_hook(lambda norm, args: seen.append(args[0]))
    VisualPrompt(tokens=3, deep=deep).model(model)
    hidden = model.vit(PIXELS).last_hidden_state
    assert hidden.shape == (4, 17, 32) and [x.shape[1] for x in seen] == [20, 20, 20]
    plain = VIT.model().vit.embeddings(PIXELS)
    assert torch.equal(cut_out(seen[0], 3, 1), plain)
    for index, x in enumerate(seen):
        own = torch.equal(x[:, 1:4], model.vit.layers[0 if not deep else index].visual_prompt.expand(4, -1, -1))
        assert own == (deep or index == 0)


def test_outputs_equal_the_model_on_longer_sequences() -> None:
    model = VIT.model()
    VisualPrompt(tokens=3, deep=False).model(model)
    plain = VIT.model()
    x = insert(plain.vit.embeddings(PIXELS), model.vit.layers[0].visual_prompt, 1)
    for block in plain.vit.layers:
        x = block(x)
    expected = plain.classifier(plain.vit.layernorm(x)[:, 0])
    torch.testing.assert_close(model(pixel_values=PIXELS).logits, expected)


@pytest.mark.parametrize("kind", ["vit", "a user's vit"])
@pytest.mark.parametrize("head", [False, True])
def test_only_prompts_and_the_head_are_trained_and_they_learn(kind: str, head: bool) -> None:
    model = VisualPrompt(tokens=8, after=int(kind == "vit"), head=head).model(KINDS[kind].model())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    of_head = {"classifier.weight", "classifier.bias"} if kind == "vit" else {"head.weight", "head.bias"}
    assert trained == prompts_of(model).keys() | (of_head if head else set())
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.1)
    losses = []
    for _ in range(20):
        losses.append(KINDS[kind].loss(model))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.05
    assert len(LABELS) == 4


def test_gradients_are_equal_with_recompute() -> None:
    gradients = []
    for again in (False, True):
        model = VisualPrompt(tokens=3).model(VIT.model())
        VIT.loss(Recompute().model(model) if again else model).backward()
        gradients.append([p.grad for p in prompts_of(model).values()])
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*gradients, strict=True))


def test_models_without_patches_or_with_masks_are_refused() -> None:
    with pytest.raises(RefusedError, match="no convolution that cuts an image") as refused:
        VisualPrompt().model(tiny_model())
    assert "adapters.visual_prompt.patch=16" in refused.value.fix
    with pytest.raises(RefusedError, match="has 2 stacks of blocks"):
        VisualPrompt(patch=4).model(KINDS["t5"].model())
    model = VisualPrompt(patch=4).model(KINDS["llama"].model())
    with pytest.raises(UsageError, match="receives a mask or positions"):
        KINDS["llama"].loss(model)
