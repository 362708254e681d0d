"""Parts of attention that layers compute, in hand-written modules whose names do not say it, or say it wrongly."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, CodeGenConfig, FalconConfig, Phi3Config

import thrifty
from thrifty.core.errors import RefusedError
from thrifty.core.run_notes import collect_notes
from thrifty.modeling.attention_parts import part_of_layer
from thrifty.modeling.attention_sites import find_attention_sites
from thrifty.modeling.attention_trial import observed_heads
from thrifty.modeling.residual_branches import find_branches
from thrifty.modeling.structured_pruning import find_units, prune_units
from thrifty.techniques.adapters.lora import Lora
from thrifty.techniques.sparsity.dynamic_heads import DynamicHeads
from thrifty.techniques.sparsity.early_bird import EarlyBird

WIDTH, HEADS, HEAD = 32, 4, 8
ORDERS = {"parts": "qkv", "heads": "query_key_value", "elements": "other", "reversed": "other"}


class Fused(nn.Module):
    """Attention whose fused layer has a chosen name, and its rows in a chosen order."""

    def __init__(
        self, order: str = "parts", name: str = "qkv", key_heads: int = HEADS, norm: str = "", heads: str = "heads"
    ):
        super().__init__()
        self.order, self.name, self.keys = order, name, key_heads * HEAD
        setattr(self, heads, HEADS)
        self.count = heads
        setattr(self, name, nn.Linear(WIDTH, WIDTH + 2 * self.keys))
        self.back = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm({"head": HEAD, "all": WIDTH}[norm]) if norm else None

    def projected(self, x: Tensor) -> list[Tensor]:
        y, heads = getattr(self, self.name)(x), getattr(self, self.count)
        if self.order == "heads":
            return [each.flatten(2) for each in y.unflatten(-1, (heads, -1)).chunk(3, -1)]
        if self.order == "elements":
            return [each.flatten(2) for each in y.unflatten(-1, (heads, -1, 3)).unbind(-1)]
        if self.order == "reversed":
            return [*reversed(y.split([self.keys, self.keys, WIDTH], -1))]
        return [*y.chunk(3, -1)] if self.keys == WIDTH else [*y.split([WIDTH, self.keys, self.keys], -1)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        if self.norm is not None and self.norm.normalized_shape == (WIDTH,):
            q, k = self.norm(q), self.norm(k)
        q, k, v = (each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (q, k, v))
        if self.norm is not None and self.norm.normalized_shape == (HEAD,):
            q, k = self.norm(q), self.norm(k)
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        return self.back(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.back = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.first, self.second, self.third))
        weights = (q @ k.repeat_interleave(2, 1).mT * HEAD**-0.5).softmax(-1)
        return self.back((weights @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.before, self.mix, self.between = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.before(x))
        return x + self.contract(F.gelu(self.expand(self.between(x))))


def model_of(attention: type[nn.Module] = Fused, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(attention(**options)) for _ in range(2)))


@pytest.mark.parametrize("name", ["qkv", "query_key_value", "wide"])
@pytest.mark.parametrize("norm", ["", "head", "all"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_fused_rows_is_found(order: str, norm: str, name: str) -> None:
    module = Fused(order, name, norm=norm)
    assert part_of_layer(name, getattr(module, name), module) == ORDERS[order]
    assert part_of_layer("back", module.back, module) == ""
    assert observed_heads(module, WIDTH) == (HEADS, HEADS, HEAD)


@pytest.mark.parametrize("is_fake", [False, True])
def test_shared_keys_and_separate_layers_are_found(is_fake: bool) -> None:
    with FakeTensorMode() if is_fake else torch.device("cpu"):
        grouped, separate = Fused(key_heads=2), Separate()
    assert part_of_layer("qkv", grouped.qkv, grouped) == "qkv"
    assert [part_of_layer(name, each, separate) for name, each in separate.named_children()] == ["q", "k", "v", ""]


def test_modules_that_require_masks_and_positions_are_called() -> None:
    sizes = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "num_hidden_layers": 1}
    sizes |= {"hidden_size": 64, "num_attention_heads": 8}
    grouped = {"new_decoder_architecture": True, "num_kv_heads": 2}
    orders = (
        (CodeGenConfig(**sizes, rotary_dim=8), "transformer.h.0.attn.qkv_proj", "other"),  # four parts of q, v, k each
        (FalconConfig(**sizes), "transformer.h.0.self_attention.query_key_value", "qkv"),  # one key head
        (FalconConfig(**sizes, **grouped), "transformer.h.0.self_attention.query_key_value", "other"),
        (Phi3Config(**sizes, intermediate_size=64), "model.layers.0.self_attn.qkv_proj", "qkv"),
    )
    for config, name, order in orders:
        model = AutoModelForCausalLM.from_config(config)
        owner = model.get_submodule(name.rpartition(".")[0])
        assert part_of_layer(name, model.get_submodule(name), owner) == order, name


def test_the_random_numbers_of_a_run_stay_the_same() -> None:
    module = Fused()
    before = torch.get_rng_state()
    part_of_layer("qkv", module.qkv, module)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_trial_call_leaves_the_module_unchanged() -> None:
    def count(module: nn.Module, args: object) -> None:
        module.calls.add_(1)
        module.last = args

    module = Fused()
    module.register_buffer("calls", torch.zeros(()))
    module.register_forward_pre_hook(count)
    assert observed_heads(module, WIDTH) is not None
    assert float(module.calls) == 0 and not hasattr(module, "last")


@pytest.mark.parametrize("attention", [Fused, Separate])
def test_branches_of_unnamed_attention_are_found(attention: type[nn.Module]) -> None:
    options = {"name": "wide"} if attention is Fused else {}
    (blocks,) = find_branches(model_of(attention, **options)).values()
    assert [(branch.kind, branch.name.partition(".")[2]) for branch in blocks[0]] == [
        ("attention", "mix.back"), ("mlp", "contract"),
    ]  # fmt: skip
    assert len(blocks[0][0].inner) == (1 if attention is Fused else 3)


@pytest.mark.parametrize("order", ["parts", "heads"])
def test_heads_of_either_order_are_removed(order: str) -> None:
    x = torch.randn(2, 5, WIDTH)
    masked, smaller = model_of(order=order), model_of(order=order)
    for units in find_units(masked).values():
        with torch.no_grad():
            units.writer.weight[:, : units.width] = 0
    for units in find_units(smaller).values():
        prune_units(units, range(1, units.count))
    torch.testing.assert_close(smaller(x), masked(x))


def test_heads_in_another_order_are_refused() -> None:
    with pytest.raises(RefusedError, match="cannot be separated"):
        find_units(model_of(order="elements"))


def test_heads_counted_under_another_name_are_not_removed() -> None:
    model = model_of(heads="n")
    with pytest.raises(RefusedError, match="which removes neurons only") as refused:
        EarlyBird().model(model)
    assert "cannot be separated" in refused.value.what
    with collect_notes() as notes:
        DynamicHeads(density=0.5).model(model)
    assert "2 of 4 heads a block" in "".join(notes)


def test_a_module_that_stores_its_heads_twice_is_refused() -> None:
    model = model_of(heads="n")
    for block in model:
        block.mix.num_heads = HEADS
        block.mix.order = "heads"
    with pytest.raises(RefusedError, match="Fused computes other attention with fewer heads"):
        find_units(model)


class Inline(nn.Module):
    """A block that computes attention in its own code."""

    def __init__(self, fixed: bool):
        super().__init__()
        self.fixed, self.heads = fixed, HEADS
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.proj = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads, width = (self.heads, WIDTH // self.heads) if self.fixed else (-1, HEAD)
        q, k, v = self.c_attn(self.before(x)).unflatten(-1, (3, heads, width)).permute(2, 0, 3, 1, 4)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.proj(F.gelu(self.fc(self.between(x))))


def test_heads_of_a_block_with_attention_in_its_code_are_removed() -> None:
    torch.manual_seed(0)
    masked = nn.Sequential(*(Inline(fixed=False) for _ in range(2)))
    smaller, x = copy.deepcopy(masked), torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        for units in find_units(masked, {"heads"}).values():
            units.writer.weight[:, : units.width] = 0
    for units in find_units(smaller, {"heads"}).values():
        prune_units(units, range(1, units.count))
    torch.testing.assert_close(smaller(x), masked(x))
    with pytest.raises(RefusedError, match="Inline computes other attention with fewer heads"):
        find_units(nn.Sequential(*(Inline(fixed=True) for _ in range(2))))


def test_slices_of_an_unnamed_order_are_refused() -> None:
    Lora(slices="qv", rank=2).model(model_of())
    with pytest.raises(RefusedError, match="slices of queries, keys and values in"):
        Lora(slices="qv", rank=2).model(model_of(order="heads"))


def test_heads_are_counted_by_a_call() -> None:
    (site, _) = find_attention_sites(model_of(heads="n"))
    assert (site.heads, site.key_heads, site.head_width) == (HEADS, HEADS, HEAD)


@pytest.mark.parametrize("kind", [thrifty.optim.Muon, thrifty.optim.Lamb])
@pytest.mark.parametrize("order", ORDERS)
def test_optimizers_divide_only_rows_in_the_order_of_parts(kind: Any, order: str) -> None:
    def stepped(slices: bool) -> Tensor:
        model = model_of(order=order)
        optimizer = kind(model, lr=0.01, slices=slices)
        model(torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))).square().mean().backward()
        optimizer.step()
        return model.get_parameter("0.mix.qkv.weight").detach()

    assert torch.equal(stepped(True), stepped(False)) is (order != "parts")
