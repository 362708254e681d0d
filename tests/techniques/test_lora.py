"""LoRA against its paper and against peft."""

import math
import re
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
import transformers
from tiny_models import FAMILIES, TWO_SIDED, random_model
from tiny_runs import advance, plain_run, technique, tiny_model
from torch import Tensor, nn

from thrifty.composition.compose import compose
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.run_notes import collect_notes
from thrifty.core.tensor_tracing import StepTrace, gc_disabled
from thrifty.modeling.lora_layers import LORA, LoraFactors, add_factors, factors_of
from thrifty.modeling.lora_model import (
    activate,
    active_adapters,
    adapted_layers,
    adapters,
    factor_names,
    merge,
    remove,
    unmerge,
)
from thrifty.techniques.adapters.lora import Lora

TOKENS = torch.arange(16)[None]
CONFIGS = FAMILIES | TWO_SIDED
FIRST = {"gpt2": "c_attn", "llama": "q_proj", "bert": "query"}


def frozen(family: str = "") -> Any:
    """Return a frozen base model of transformers or of this package."""
    model = random_model(CONFIGS[family]()) if family else tiny_model(depth=2)
    return model.requires_grad_(False)


def adapted_model(family: str = "", **settings: Any) -> Any:
    return Lora(**{"rank": 4, **settings}).attach(frozen(family))


def randomized(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in factor_names(model):
                parameter.normal_(std=0.3, generator=generator)
    return model


def output(model: Any) -> Tensor:
    config = getattr(model, "config", None)
    if config is None:
        return model(TOKENS)
    return model(input_ids=TOKENS, **({"decoder_input_ids": TOKENS} if config.is_encoder_decoder else {})).logits


@pytest.mark.parametrize("family", ["", *CONFIGS])
def test_the_initial_function_is_bit_identical(family: str) -> None:
    base, model = frozen(family), adapted_model(family, where=".", rank=2)
    assert torch.equal(output(model), output(base))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(output(model), output(base))
    assert not torch.allclose(output(randomized(model)), output(base), atol=1e-2)


def test_initial_values_of_a_and_b() -> None:
    model = adapted_model("gpt2-untied", where=".")
    tables = 0
    for layer in adapted_layers(model).values():
        a, b = layer.lora_a, layer.lora_b
        if isinstance(layer, nn.Embedding):
            tables += 1
            assert not a.any() and 0.7 < b.std() < 1.3
        else:
            bound = 1 / math.sqrt(a.shape[1])  # Kaiming-uniform with a = sqrt(5)
            assert a.abs().max() <= bound and a.std() > 0.4 * bound and not b.any()
    assert tables == 2


@pytest.mark.parametrize("family", ["", "gpt2-untied", "llama"])
def test_the_first_gradient_of_nonzero_factors_is_zero(family: str) -> None:
    model = adapted_model(family, where=".")
    output(model).square().sum().backward()
    factors = factor_names(model)
    for layer in adapted_layers(model).values():
        started, zero = (
            (layer.lora_b, layer.lora_a) if isinstance(layer, nn.Embedding) else (layer.lora_a, layer.lora_b)
        )
        assert not started.grad.any() and zero.grad.any()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name in factors)
        assert name in factors or parameter.grad is None


@pytest.mark.parametrize("family", CONFIGS)
def test_default_layers_equal_all_linear_in_peft(family: str) -> None:
    with collect_notes() as notes:
        ours = adapted_layers(adapted_model(family, rank=2))
    theirs = peft.get_peft_model(frozen(family), peft.LoraConfig(r=2, target_modules="all-linear")).base_model.model
    assert ours.keys() == {name for name, *_ in with_peft_names(theirs)}
    assert "adapted: " in notes[1] and re.sub(r"\.\d+\.", ".N.", min(ours)) in notes[1]


def test_small_layers_and_expert_tensors_are_skipped() -> None:
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    with collect_notes() as notes:
        Lora(rank=16).attach(transformers.MixtralForCausalLM(config).requires_grad_(False))
    assert "experts.gate_up_proj" in "".join(notes) and "several matrices in one tensor" in "".join(notes)
    small = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(4, 16), nn.Linear(16, 2))
    with collect_notes() as notes:
        Lora(rank=8).attach(small)
    assert "skipped 1: it is smaller than the rank 8; skipped 2: it is smaller than the rank 8" in notes[0]


def with_peft_names(model: Any) -> Iterator[tuple[str, Any, Any]]:
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            table = bool(layer.lora_embedding_A)
            pair = (layer.lora_embedding_A, layer.lora_embedding_B) if table else (layer.lora_A, layer.lora_B)
            yield name, *(each["default"] if table else each["default"].weight for each in pair)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rslora", [False, True], ids=["", "rslora"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "gpt2-untied", "t5-1.1"])
def test_outputs_and_gradients_equal_peft(family: str, rslora: bool) -> None:
    settings = {"alpha": 6.0, "rank_stabilized": rslora, "where": ".", "slices": "", "rank": 2}
    ours = randomized(adapted_model(family, **settings).double())
    layers = adapted_layers(ours)
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=list(layers), use_rslora=rslora)
    theirs = peft.get_peft_model(frozen(family).double(), config)
    pairs = {name: (a, b) for name, a, b in with_peft_names(theirs.base_model.model)}
    assert pairs.keys() == layers.keys()
    with torch.no_grad():
        for name, layer in layers.items():
            for mine, yours in zip((layer.lora_a, layer.lora_b), pairs[name], strict=True):
                yours.data = mine.detach().clone()  # peft's factors are float32 until here
    actual, expected = output(ours), output(theirs)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    for result in (actual, expected):
        result.square().mean().backward()
    for name, layer in layers.items():
        for mine, yours in zip((layer.lora_a, layer.lora_b), pairs[name], strict=True):
            torch.testing.assert_close(mine.grad, yours.grad, rtol=1e-6, atol=1e-8)


def test_dropout_applies_to_the_input_of_a_only() -> None:
    linear, x = nn.Linear(6, 5), torch.randn(50, 6)
    theirs = peft.tuners.lora.Linear(
        nn.Linear(6, 5), "default", peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.5), r=2, lora_alpha=4
    )
    theirs.base_layer.load_state_dict(linear.state_dict())
    add_factors(linear, LoraFactors(2, 4.0, dropout=0.5))
    nn.init.normal_(linear.lora_b)
    with torch.no_grad():
        theirs.lora_A["default"].weight.copy_(linear.lora_a)
        theirs.lora_B["default"].weight.copy_(linear.lora_b)
    outputs = []
    for layer in (linear, theirs):
        torch.manual_seed(3)
        outputs.append(layer.train()(x))
    torch.testing.assert_close(*outputs)
    assert not torch.equal(linear(x), linear.eval()(x))


@pytest.mark.parametrize("slices", ["qkv", "qv", "k"])
def test_slices_of_a_fused_layer_equal_separate_layers(slices: str) -> None:
    """The Llama of this package fuses layers that are separate in transformers."""
    model = randomized(adapted_model(where="qkv", slices=slices, rank=2))
    for path, layer in adapted_layers(model).items():
        x = torch.randn(3, layer.in_features)
        a, b, scale = factors_of(layer)
        assert layer.lora_a.shape == (2 * len(slices), layer.in_features) and scale == 8.0
        addition, start, seen = layer(x) - nn.functional.linear(x, layer.weight), 0, 0
        for letter, width in zip("qkv", layer.parts.values(), strict=True):
            part = addition[:, start : start + width]
            if letter in slices:
                rows = slice(2 * seen, 2 * seen + 2)
                expected = scale * x @ (b[start : start + width, rows] @ a[rows]).T
                torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)
                seen += 1
            else:
                assert part.abs().max() < 1e-5
            start += width
        assert seen == len(slices), path


def test_slices_select_separate_layers() -> None:
    names = {name.rpartition(".")[2] for name in adapted_layers(adapted_model("llama", where="attn", slices="qv"))}
    assert names == {"q_proj", "v_proj", "o_proj"}
    with collect_notes() as notes:
        adapted_model("llama", where="attn", slices="qv")
    assert "model.layers.0.self_attn.k_proj: slices=qv excludes it" in notes[0]
    gates = adapted_layers(
        adapted_model(where="up", slices="q")
    )  # gate and value are no part of attention: each its own A
    assert {layer.lora_a.shape[0] for layer in gates.values()} == {8}


def test_interleaved_heads_are_adapted_as_a_whole_or_refused() -> None:
    config = transformers.GPTNeoXConfig(
        num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=32
    )
    model = random_model(config)
    whole = Lora(rank=2, where="query_key_value").attach(model)
    assert whole.gpt_neox.layers[0].attention.query_key_value.lora_a.shape == (2, 16)
    with pytest.raises(RefusedError, match=r"slices of queries, keys and values in .*query_key_value are unknown"):
        Lora(rank=2, slices="qv").attach(random_model(config))
    with pytest.raises(UsageError, match="slices is 'qx'"):
        Lora(slices="qx")


def test_torch_attention_uses_the_additions() -> None:
    def encoder() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2).double().requires_grad_(False)

    x, names = torch.randn(2, 5, 16, dtype=torch.float64), list(dict(encoder().named_parameters()))
    model = randomized(Lora(rank=2, where=".").attach(encoder()))
    assert len(adapted_layers(model)) == 8
    dense = encoder()
    for path, layer in adapted_layers(model).items():
        a, b, scale = factors_of(layer)
        name = "in_proj_weight" if isinstance(layer, nn.MultiheadAttention) else "weight"
        dense.get_submodule(path).get_parameter(name).add_(scale * b.detach() @ a.detach()).requires_grad_()
    torch.testing.assert_close(model(x), dense(x))
    with torch.no_grad():  # torch's encoder would use its fast path here
        torch.testing.assert_close(model.eval()(x), dense(x))
    for each in (model, dense):
        each.train()(x).square().sum().backward()
    attention, full = (each.layers[0].self_attn for each in (model, dense))
    a, b, scale = factors_of(attention)
    expected = torch.autograd.grad((scale * b @ a * full.in_proj_weight.grad).sum(), attention.lora_a)[0]
    torch.testing.assert_close(attention.lora_a.grad, expected)
    assert model.layers[0].self_attn.in_proj_weight.grad is None
    plain = [name for name, _ in model.named_parameters() if name not in factor_names(model)]
    assert plain == names
    with collect_notes() as notes:
        Lora(rank=2, where=".", dropout=0.1).attach(encoder())
    assert "layers.0.self_attn: its attention reads the weight" in notes[0]


@pytest.mark.parametrize("family", ["", "gpt2-untied", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_merge_keeps_the_function_and_unmerge_the_bits(family: str, dtype: torch.dtype) -> None:
    model = randomized(adapted_model(family, where=".").eval().to(dtype))
    with torch.no_grad():
        for name in factor_names(model):
            model.get_parameter(name).mul_(0.3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apart = output(model)
    merge(model)
    merge(model)  # a second merge changes nothing
    near = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float64: 1e-10}[dtype]
    assert (output(model) - apart).abs().max() < near * apart.abs().max()
    assert any(not torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    for refused in (activate, remove, lambda model: Lora(rank=2).attach(model, "other")):
        with pytest.raises(UsageError, match=r"call unmerge first|no adapter"):
            refused(model)
    unmerge(model)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(output(model), apart)


def test_a_merged_weight_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        linear = nn.Linear(256, 256, bias=False, dtype=dtype)
        nn.init.normal_(linear.weight, std=0.02, generator=generator)
        add_factors(linear, LoraFactors(8, 8.0))
        nn.init.normal_(linear.lora_b, std=4e-4 / math.sqrt(8 / 3 / 256), generator=generator)
        base = linear.weight.detach().clone()
        product = (linear.lora_b.double() @ linear.lora_a.double()).detach()
        assert 0.005 < product.std() / base.double().std() < 0.05
        merge(linear)
        torch.testing.assert_close(
            linear.weight.double(), base.double() + product, rtol=torch.finfo(dtype).eps, atol=1e-9
        )
        errors[dtype] = float((linear.weight.double() - base.double() - product).norm() / product.norm())
        naive = linear.weight - product.to(dtype)
        assert not torch.equal(naive, base)
        unmerge(linear)
        assert torch.equal(linear.weight, base)
    assert errors[torch.float32] < 1e-5 < 0.01 < errors[torch.bfloat16]


def test_a_tied_weight_is_skipped_and_never_merged() -> None:
    model = adapted_model(where="head|up")
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        f"blocks.{i}.mlp.up.lora_{x}" for i in (0, 1) for x in "ab"
    ]
    with pytest.raises(RefusedError, match="its weight is tied"):
        adapted_model(where="head")
    model = frozen()
    add_factors(model.embedding.token, LoraFactors(2, 2.0))
    weight = model.embedding.token.weight.clone()
    with pytest.raises(RefusedError, match="shared with another layer"):
        merge(model)
    assert torch.equal(model.embedding.token.weight, weight) and "blocks.0.mlp.up" not in adapted_layers(model)


def bytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_several_adapters_share_the_tensors_of_one_base() -> None:
    model = frozen("llama")
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    base, alone = output(model), bytes_of(model)
    outputs = {}
    for seed, name in enumerate(("default", "french", "verse")):
        Lora(rank=2 + seed, where="attn" if seed else "mlp", seed=seed).attach(model, name)
        randomized(model)
        outputs[name] = output(model)  # the newest is the active one
    for seed, (name, expected) in enumerate(outputs.items()):  # each new adapter has new values
        activate(model, name)
        outputs[name] = output(model)
        assert seed == 2 or not torch.equal(outputs[name], base), expected
    factors = sum(model.get_parameter(name).numel() for name in factor_names(model))
    assert {name: model.get_parameter(name).data_ptr() for name in places} == places
    assert bytes_of(model) == alone + 4 * factors
    assert adapters(model) == ["default", "french", "verse"]
    assert "model.layers.0.self_attn.q_proj.lora_a_french" in factor_names(model)
    with active_adapters(model):
        assert torch.equal(output(model), base)
        with active_adapters(model, "french"):
            assert torch.equal(output(model), outputs["french"])
        assert torch.equal(output(model), base)
    assert torch.equal(output(model), outputs["verse"])

    activate(model, "french", "verse")
    together = output(model)
    merge(model)
    torch.testing.assert_close(output(model), together, rtol=1e-4, atol=1e-4)
    unmerge(model)
    merge(model, {"french": 0.5, "default": -2.0})
    layer = model.model.layers[0].self_attn.q_proj
    a, b, scale = factors_of(layer, "french")
    torch.testing.assert_close(layer.weight, LORA.of(layer).original_weight + 0.5 * scale * b @ a)
    unmerge(model)
    for name in ("french", "default", "verse"):
        remove(model, name)
    plain = frozen("llama")
    assert torch.equal(output(model), base) and not adapted_layers(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert not any("forward" in vars(module) or LORA.get(module) for module in model.modules())


def test_names_of_adapters_are_checked() -> None:
    model = adapted_model()
    for wrong in ("a.b", "", "two words"):
        with pytest.raises(UsageError, match="is not an adapter name"):
            Lora(rank=2).attach(model, wrong)
    with pytest.raises(UsageError, match="has an adapter 'default' already"):
        Lora(rank=2).attach(model)
    with pytest.raises(UsageError, match="no adapter 'defualt'") as error:
        activate(model, "defualt")
    assert "did you mean 'default'" in error.value.fix


def test_removal_restores_wrapped_layers() -> None:
    linear = nn.Linear(4, 4)
    linear.forward = lambda x: x * 2
    add_factors(linear, LoraFactors(2, 2.0))
    nn.init.normal_(linear.lora_b)
    x = torch.randn(3, 4)
    assert not torch.equal(linear(x), x * 2)
    remove(linear)
    assert torch.equal(linear(x), x * 2)


def test_also_selects_parameters_trained_without_factors() -> None:
    run = compose(plain_run(), [technique("adapters.lora", also="norm"), technique("optimizers.adamw")], 5)
    state = run.start()
    advance(run, state)
    plain = dict(plain_run().build().named_parameters())
    assert state.model is not None and state.optimizer is not None
    trained = dict(state.model.named_parameters())
    for name, value in plain.items():
        assert torch.equal(trained[name], value) == ("norm" not in name), name
    assert any(name == "norm.weight" for name in state.optimizer.names)
    run.verify(state)
    trained["blocks.0.mlp.up.weight"].requires_grad_(True)
    with pytest.raises(IntegrityError, match=r"blocks\.0\.mlp\.up\.weight"):
        run.verify(state)
    with pytest.raises(RefusedError, match="no parameter matches also='nrom'"):
        adapted_model(also="nrom")


def test_merging_in_the_middle_of_training_is_noticed() -> None:
    run = compose(plain_run(), [technique("adapters.lora"), technique("optimizers.adamw")], 5)
    state = run.start()
    assert state.model is not None
    merge(state.model)
    with pytest.raises(IntegrityError, match="merged into the weights during"):
        run.verify(state)


def test_an_oversized_rank_is_refused() -> None:
    with pytest.raises(RefusedError, match="rank '33' is larger than a side of the weight") as refused:
        adapted_model(rank=33, where="out")
    assert "rank=32 or less" in refused.value.fix
    with collect_notes() as notes:
        adapted_model("t5-1.1", where="SelfAttention")
    assert "relative_attention_bias: it stores attention scores" in notes[0]
    with collect_notes() as notes:
        adapted_model("marian", where="embed_positions|fc1")
    assert "the computation of a MarianSinusoidalPositionalEmbedding is unknown" in notes[0]


def test_a_scaled_embedding_scales_the_addition() -> None:
    config = transformers.Gemma3TextConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    model = random_model(config)
    randomized(Lora(rank=2, where="embed_tokens").attach(model))
    apart = output(model)
    merge(model)
    torch.testing.assert_close(output(model), apart, rtol=1e-4, atol=1e-4)


def test_a_training_step_needs_no_more_memory_than_peft() -> None:
    def peak(model: Any) -> tuple[int, int]:
        parameters = list(model.parameters())
        with gc_disabled(), StepTrace(*parameters, TOKENS) as trace:
            result = output(model)
            kept = trace.now
            result.square().mean().backward()
        return kept, trace.peak

    for family, first in FIRST.items():
        ours = adapted_model(family, where=first, slices="", rank=4).train()
        config = peft.LoraConfig(r=4, target_modules=[first])
        theirs = peft.get_peft_model(frozen(family), config).train()
        (kept, most), (their_kept, their_most) = peak(ours), peak(theirs)
        assert kept <= their_kept and most <= their_most, family


def test_the_frozen_weights_cost_no_product_in_the_backward_pass() -> None:
    def flops(model: Any) -> int:
        with StepTrace(*model.parameters(), TOKENS) as trace:
            output(model).square().mean().backward()
        return trace.flops

    full, adapters_only = flops(frozen("llama").requires_grad_(True)), flops(adapted_model("llama", rank=1))
    assert adapters_only < 0.75 * full  # two products instead of three, the first layer's input needs none


def test_training_leaves_the_frozen_weights_untouched() -> None:
    run = compose(plain_run(), [technique("adapters.lora"), technique("optimizers.adamw")], 5)
    state = run.start()
    advance(run, state)
    plain = dict(plain_run().build().named_parameters())
    assert state.model is not None and state.optimizer is not None
    trained = dict(state.model.named_parameters())
    assert all(torch.equal(trained[name], value) for name, value in plain.items())
    assert all(name.endswith(("lora_a", "lora_b")) for name in state.optimizer.names)


def test_factors_depend_on_the_seed_only() -> None:
    models = [tiny_model(depth=2) for _ in range(2)]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        Lora(rank=4).model(model)
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


@pytest.mark.slow
def test_a_rank_four_change_is_learned_with_rank_four_only() -> None:
    """The teacher is the base plus a product of rank 4, so rank 3 cannot reach it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 32, generator=generator)
    base = torch.randn(24, 32, generator=generator) / 32**0.5
    change = torch.randn(24, 4, generator=generator) @ torch.randn(4, 32, generator=generator) / 32**0.5 / 2
    target, losses = x @ (base + change).T, {}
    for rank in (1, 2, 3, 4, 8):
        linear = nn.Linear(32, 24, bias=False)
        with torch.no_grad():
            linear.weight.copy_(base)
        add_factors(linear, LoraFactors(rank, float(rank)), generator=torch.Generator().manual_seed(rank))
        optimizer = torch.optim.Adam([linear.lora_a, linear.lora_b], lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 800)
        for _ in range(800):
            optimizer.zero_grad()
            loss = (linear(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
        losses[rank] = loss.item()
    assert losses[1] > losses[2] > losses[3] > 1e-2
    assert losses[4] < 1e-5 and losses[8] < 1e-5


def test_the_default_pattern_finds_the_layers_of_a_t5() -> None:
    """T5 names its layers SelfAttention, EncDecAttention and DenseReluDense."""
    config = transformers.T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    actual = Lora(rank=4).layers(transformers.T5ForConditionalGeneration(config))
    assert len(actual) == 2 * (4 + 2) + 2 * (8 + 2)
    assert {name.rpartition(".")[2] for name in actual} == {"q", "k", "v", "o", "wi", "wo"}
