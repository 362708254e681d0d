"""LoRA against its paper and against peft."""

import math

import peft
import pytest
import torch
from torch import nn

from thrifty.core.compose import compose
from thrifty.core.errors import Refused
from thrifty.techniques.adapters.lora import Lora, add_lora, low_rank_addition, merge, unmerge
from tiny_runs import advance, plain_run, technique, tiny_model

TOKENS = torch.arange(16)[None]


def adapted(**settings: object) -> nn.Module:
    return Lora(rank=4, **settings).model(tiny_model(depth=2))  # type: ignore[arg-type]


def randomized(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, generator=generator)
    return model


def test_the_addition_is_scale_times_b_a_x() -> None:
    generator = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 6), (2, 6), (5, 2)))
    torch.testing.assert_close(low_rank_addition(x, a, b, 0.5), 0.5 * x @ (b @ a).T)


def test_at_the_start_the_function_is_the_frozen_one_bit_for_bit() -> None:
    model = adapted()
    assert torch.equal(model.eval()(TOKENS), tiny_model(depth=2).eval()(TOKENS))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_a"):
            bound = 1 / math.sqrt(parameter.shape[1])  # Kaiming-uniform with a = sqrt(5)
            assert parameter.abs().max() <= bound and parameter.std() > 0.4 * bound
        if name.endswith("lora_b"):
            assert not parameter.any()


def test_the_first_gradient_of_a_is_zero_and_that_of_b_is_not() -> None:
    model = adapted()
    model(TOKENS).square().sum().backward()
    for name, parameter in model.named_parameters():
        if name.endswith("lora_a"):
            assert not parameter.grad.any()
        elif name.endswith("lora_b"):
            assert parameter.grad.any()
        else:
            assert parameter.grad is None and not parameter.requires_grad


def test_merging_keeps_the_function_and_unmerging_the_bits() -> None:
    model = randomized(adapted()).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    separate = model(TOKENS)
    merge(model)
    merge(model)  # twice is once
    assert (model(TOKENS) - separate).abs().max() < 1e-4
    assert any(not torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    unmerge(model)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(model(TOKENS), separate)


def test_unmerging_is_exact_in_bfloat16_too() -> None:
    linear = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    add_lora(linear, 2, 1.0, 0.0)
    nn.init.normal_(linear.lora_b)
    before = linear.weight.clone()
    merge(linear)
    assert not torch.equal(linear.weight, before)
    unmerge(linear)
    assert torch.equal(linear.weight, before)


@pytest.mark.parametrize("stabilised", [False, True])
def test_its_outputs_and_gradients_are_pefts(stabilised: bool) -> None:
    ours = randomized(adapted(alpha=6.0, stabilised=stabilised))
    names = {name.removesuffix(".lora_a") for name, _ in ours.named_parameters() if name.endswith("lora_a")}
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=list(names), use_rslora=stabilised)
    theirs = peft.get_peft_model(tiny_model(depth=2), config)
    here = dict(ours.named_modules())
    with torch.no_grad():
        for name, module in theirs.base_model.model.named_modules():
            if name in names:
                module.lora_A["default"].weight.copy_(here[name].lora_a)
                module.lora_B["default"].weight.copy_(here[name].lora_b)
    found, wanted = ours(TOKENS), theirs.base_model.model(TOKENS)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for output in (found, wanted):
        output.square().sum().backward()
    for name, module in theirs.base_model.model.named_modules():
        if name in names:
            torch.testing.assert_close(
                here[name].lora_b.grad, module.lora_B["default"].weight.grad, rtol=1e-4, atol=1e-4
            )


def test_a_tied_head_is_passed_over_and_an_oversized_rank_refused() -> None:
    model = Lora(rank=4, where="head|up").model(tiny_model(depth=2))
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        f"blocks.{i}.mlp.up.lora_{x}" for i in (0, 1) for x in "ab"
    ]
    with pytest.raises(Refused, match="rank 33 is larger than a weight of shape") as refused:
        Lora(rank=33).model(tiny_model(depth=2))
    assert "at most 32" in refused.value.fix


def test_training_leaves_the_frozen_weights_untouched() -> None:
    run = compose(plain_run(), [technique("adapters.lora"), technique("optimizers.adamw")], 5)
    state = run.start()
    advance(run, state)
    plain = dict(plain_run().build().named_parameters())
    assert state.model is not None and state.optimizer is not None
    trained = dict(state.model.named_parameters())
    assert all(torch.equal(trained[name], value) for name, value in plain.items())
    assert all(name.endswith(("lora_a", "lora_b")) for name in state.optimizer.names)


def test_the_factors_do_not_depend_on_what_was_drawn_before_and_draw_nothing_from_others() -> None:
    models = [tiny_model(depth=2) for _ in range(2)]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        Lora(rank=4).model(model)
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
