"""Search and change of modules in any model, Thrifty's or of transformers."""

from typing import Any

import pytest
import torch
import transformers
from stacked_models import KINDS
from tiny_runs import advance, losses, plain_run, technique, tiny_model, with_optimizer
from torch import nn

from thrifty.composition.compose import BaseRun, compose
from thrifty.core.errors import RefusedError
from thrifty.core.run_notes import add_note, collect_notes
from thrifty.core.technique import Technique
from thrifty.modeling.module_surgery import find_blocks, find_stacks, select, tied_names, weight_layers, wrap_forward

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
FAMILIES = {
    "model.layers": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, intermediate_size=32)),
    "transformer.h": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=3, n_head=2)
    ),
    "gpt_neox.layers": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**SMALL, intermediate_size=32)
    ),
    "bert.encoder.layer": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, intermediate_size=32)),
}


def test_select_returns_modules_with_matching_names() -> None:
    selection = select(tiny_model(depth=2), nn.Linear, r"mlp\.up$")
    assert list(selection.matched) == ["blocks.0.mlp.up", "blocks.1.mlp.up"]
    assert str(selection) == "2 of 2 modules"


def test_select_names_what_it_skipped_and_why() -> None:
    model = tiny_model(depth=1)
    with collect_notes() as notes:
        selection = select(model, nn.Linear, "", lambda name, module: "tied" if name == "head" else None)
    assert "head" not in selection.matched
    assert selection.skipped == {"head": "tied"}
    assert notes == [f"{len(selection.matched)} of {len(selection.matched) + 1} modules; skipped head: tied"]


def test_select_without_a_match_names_the_modules() -> None:
    with pytest.raises(RefusedError, match="no module matches 'attn'") as refused:
        select(tiny_model(depth=3), nn.Linear, "attn")
    assert "blocks.N.mlp.up" in refused.value.fix
    with pytest.raises(RefusedError, match="head: tied"):
        select(tiny_model(depth=1), nn.Linear, "head", lambda name, module: "tied")
    with pytest.raises(RefusedError, match="no module") as refused:
        select(tiny_model(depth=1), nn.Conv2d)
    assert "none of that kind" in refused.value.fix


def test_notes_go_once_to_the_innermost_collector() -> None:
    add_note("to nobody")
    with collect_notes() as outer:
        with collect_notes() as inner:
            add_note("inside")
            add_note("inside")
        add_note("outside")
    assert (outer, inner) == (["outside"], ["inside"])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_blocks_of_a_transformers_model_are_found(name: str) -> None:
    found_name, blocks = find_blocks(FAMILIES[name]())
    assert (found_name, len(blocks)) == (name, 3)


def test_the_blocks_of_own_models_are_found() -> None:
    assert find_blocks(tiny_model(depth=1))[0] == "blocks"
    assert len(find_blocks(tiny_model(depth=4))[1]) == 4


def test_the_longest_then_largest_list_is_chosen() -> None:
    model = nn.Module()
    model.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    assert find_blocks(model)[0] == "layers"
    model.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    assert find_blocks(model)[0] == "more"


@pytest.mark.parametrize("name", KINDS)
def test_only_outermost_stacks_are_found(name: str) -> None:
    kind = KINDS[name]
    stacks = find_stacks(kind.model())
    assert {stack: len(blocks) for stack, blocks in stacks.items()} == kind.stacks


def test_a_decoder_has_a_single_stack() -> None:
    model = tiny_model(depth=2)
    assert [*find_stacks(model).items()] == [find_blocks(model)]


PYRAMIDS = {
    "Swin": (
        lambda: transformers.SwinModel(transformers.SwinConfig(
            image_size=32, patch_size=2, embed_dim=16, depths=[1, 2, 3], num_heads=[2, 2, 2], window_size=4
        )),
        {"encoder.layers.0.blocks": 1, "encoder.layers.1.blocks": 2, "encoder.layers.2.blocks": 3},
    ),
    "ConvNeXt": (
        lambda: transformers.ConvNextModel(transformers.ConvNextConfig(
            hidden_sizes=[8, 16], depths=[1, 3], num_stages=2
        )),
        {"encoder.stages.0.layers": 1, "encoder.stages.1.layers": 3},
    ),
    "PVT": (
        lambda: transformers.PvtModel(transformers.PvtConfig(
            image_size=32, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], num_attention_heads=[1, 1, 2, 2]
        )),
        {"encoder.block.0": 1, "encoder.block.1": 1, "encoder.block.2": 2, "encoder.block.3": 1},
    ),
    "experts in blocks": (
        lambda: transformers.MixtralModel(transformers.MixtralConfig(
            vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=16, num_local_experts=3,
        )),
        {"layers": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PYRAMIDS)
def test_a_pyramid_has_one_stack_per_stage(name: str) -> None:
    build, expected = PYRAMIDS[name]
    assert {stack: len(blocks) for stack, blocks in find_stacks(build()).items()} == expected


def test_a_list_of_single_layers_is_the_last_resort() -> None:
    model = nn.Module()
    model.heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
    assert list(find_stacks(model)) == ["heads"]
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2))
    assert list(find_stacks(model)) == ["blocks"]
    alone = model.blocks
    assert list(find_stacks(alone)) == [""]


def torch_block() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16)


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
def test_output_heads_in_a_list_are_no_stack(kind: Any) -> None:
    model = nn.Module()
    model.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)) for _ in range(2))
    assert list(find_stacks(model)) == ["heads"]
    model.encoder = (
        kind([torch_block(), torch_block()]) if kind is nn.ModuleList else kind(torch_block(), torch_block())
    )
    assert list(find_stacks(model)) == ["encoder"]


class Gated(nn.Module):
    """A block that defines a layer with other outputs last."""

    def __init__(self, outputs: int = 1):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(outputs))
        self.gate = nn.Linear(8, outputs)


def test_blocks_that_define_a_gate_last_are_stacks() -> None:
    model = nn.ModuleDict({
        "encoder": nn.ModuleList(torch_block() for _ in range(3)), "decoder": nn.ModuleList(Gated() for _ in range(3))
    })  # fmt: skip
    assert list(find_stacks(model)) == ["encoder", "decoder"]
    projections = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
    layers = nn.ModuleList(Gated(2) for _ in range(3))
    model = nn.ModuleDict({"layers": layers, "projections": nn.Sequential(*projections)})
    assert list(find_stacks(model)) == ["layers"]


def test_many_output_heads_with_norms_are_no_stack() -> None:
    heads = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)) for _ in range(5))
    model = nn.ModuleDict({"encoder": nn.ModuleList([torch_block()]), "heads": nn.ModuleList(heads)})
    assert list(find_stacks(model)) == ["encoder"]


@pytest.mark.parametrize("count", [2, 3])
def test_as_many_output_heads_as_blocks_are_no_stack(count: int) -> None:
    heads = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)) for _ in range(count))
    blocks = nn.ModuleList(torch_block() for _ in range(2))
    model = nn.ModuleDict({"blocks": blocks, "heads": nn.ModuleList(heads)})
    assert list(find_stacks(model)) == ["blocks"]


def test_equal_towers_are_no_blocks() -> None:
    def tower() -> nn.Module:
        return nn.ModuleDict({"blocks": nn.ModuleList([torch_block(), torch_block()]), "last": nn.Linear(8, 8)})

    model = nn.ModuleDict({"towers": nn.ModuleList([tower(), tower()])})
    assert list(find_stacks(model)) == ["towers.0.blocks", "towers.1.blocks"]


def test_a_block_of_experts_with_norms_is_no_tower() -> None:
    def block() -> nn.Module:
        experts = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(3))
        attention, router = nn.MultiheadAttention(8, 2), nn.Linear(8, 3)
        return nn.ModuleDict({"attention": attention, "router": router, "experts": nn.ModuleList(experts)})

    assert list(find_stacks(nn.ModuleDict({"blocks": nn.ModuleList([block(), block()])}))) == ["blocks"]


def test_a_block_with_a_list_of_two_mlps_is_no_tower() -> None:
    def block() -> nn.Module:
        mlps = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(2))
        return nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "mlps": nn.ModuleList(mlps)})

    stacks = find_stacks(nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(3))}))
    assert {name: len(blocks) for name, blocks in stacks.items()} == {"layers": 3}


def test_a_sequence_around_a_model_is_no_stack() -> None:
    block = lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))  # noqa: E731
    model = nn.Module()
    model.encoder = nn.Sequential(nn.ModuleDict({"norm": nn.LayerNorm(2), "blocks": nn.Sequential(block(), block())}))
    assert {name: len(blocks) for name, blocks in find_stacks(model).items()} == {"encoder.0.blocks": 2}
    model.encoder = nn.Sequential(block())
    with pytest.raises(RefusedError, match="no list of equal blocks"):
        find_stacks(model)


def test_weight_layers_are_those_that_are_called() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.MultiheadAttention(4, 2), nn.LayerNorm(4), nn.Linear(4, 2))
    assert list(weight_layers(model)) == ["1", "3"]
    assert list(weight_layers(transformers.GPT2Model(transformers.GPT2Config(n_embd=4, n_layer=1, n_head=1)))) == [
        f"h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]


def test_a_model_without_blocks_is_refused() -> None:
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
    with pytest.raises(RefusedError, match="no list of equal blocks was found in Sequential"):
        find_blocks(nn.Sequential(nn.Linear(2, 2), mixed))
    with pytest.raises(RefusedError, match="no list of equal blocks"):
        find_stacks(nn.Sequential(nn.Linear(2, 2), mixed))


def test_a_wrapped_forward_keeps_names_and_can_be_wrapped_again() -> None:
    linear = nn.Linear(3, 3)
    names, x = list(linear.state_dict()), torch.ones(1, 3)
    plain = linear(x)
    wrap_forward(linear, lambda module, inner, *args: inner(*args) * module.weight.new_tensor(2))
    wrap_forward(linear, lambda module, inner, *args: inner(*args) + 1)
    assert torch.equal(linear(x), plain * 2 + 1)
    assert list(linear.state_dict()) == names
    del linear.forward
    assert torch.equal(linear(x), plain)


def test_tied_names_point_at_the_first_name() -> None:
    assert tied_names(tiny_model(tied=True)) == {"head.weight": "embedding.token.weight"}
    assert tied_names(tiny_model(tied=False)) == {}


def test_a_replaced_forward_runs_in_torch_encoder_layers() -> None:
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(True)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    plain = layer(x)
    wrap_forward(layer.linear1, lambda module, inner, *args: 2 * inner(*args))
    changed = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), changed)
    assert not torch.allclose(plain, changed, atol=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("name", ["adapters.lora", "sparsity.n_of_m", "sparsity.static", "sparsity.snip"])
def test_layers_with_computed_weights_are_refused(norm: Any, name: str) -> None:
    def block() -> nn.Module:
        return nn.Sequential(norm(nn.Linear(16, 16)), nn.ReLU(), norm(nn.Linear(16, 16)))

    model = nn.Sequential(*(block() for _ in range(2)))
    settings = {} if name == "sparsity.n_of_m" else {"where": r"\d"}
    with pytest.raises(RefusedError, match="computed"):
        technique(name, **settings).model(model)


def repeated() -> nn.Module:
    """Return a model of two blocks, each of which runs twice."""
    model = tiny_model()
    model.blocks = nn.ModuleList([*model.blocks[:2], *model.blocks[:2]])
    return model


@pytest.mark.parametrize(
    "name", ["initializations.layer_scale", "initializations.rezero", "growth.layer_drop", "growth.auto_grow"]
)
def test_decisions_per_block_refuse_repeated_blocks(name: str) -> None:
    with pytest.raises(RefusedError, match="one block in several places") as refused:
        technique(name).model(repeated())
    assert "memory.share_parameters" in refused.value.fix


@pytest.mark.parametrize(
    ("name", "settings"),
    [("memory.recompute", {}), ("memory.recompute", {"every": 2}), ("memory.recompute", {"schedule": "sqrt"}),
     ("memory.optimal_recompute", {"bytes": 0.3}), ("memory.activation_budget", {"bytes": 0.4})],
)  # fmt: skip
def test_a_block_in_several_places_runs_again_in_each(name: str, settings: dict[str, Any]) -> None:
    def trained(*chosen: Technique) -> list[float]:
        plain = plain_run()
        run = compose(BaseRun(repeated, plain.source, plain.objective), with_optimizer(chosen), 2)
        return losses(advance(run, run.start()))

    assert trained(technique(name, **settings)) == trained()
