"""Branches of unknown blocks, found by structure and compared with what the blocks compute."""

import pytest
import torch
import transformers
from stacked_models import KINDS, WIDTH
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.core.run_notes import collect_notes
from thrifty.modeling.layer_shapes import out_width
from thrifty.modeling.residual_branches import ResidualBranch, add_gain, biases, find_branches, is_decoder
from thrifty.modeling.stream_norms import bypass_norms


def branches_of(model: nn.Module) -> list[ResidualBranch]:
    return [branch for blocks in find_branches(model).values() for block in blocks for branch in block]


@torch.no_grad()
def silence(branch: ResidualBranch) -> None:
    branch.last.weight.zero_()
    for bias in biases(branch.writer):
        bias.zero_()


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", KINDS)
def test_writers_into_the_stream_are_found(name: str) -> None:
    kind = KINDS[name]
    for stack, blocks in find_branches(kind.model()).items():
        for index, block in enumerate(blocks):
            assert [each.name for each in block] == [f"{stack}.{index}.{writer}" for writer in kind.writers[stack]]
            assert [each.kind for each in block if "ross" not in each.kind] == ["attention", "mlp"]
            assert all(out_width(each.writer) == WIDTH for each in block)
        assert is_decoder(blocks) == (len(kind.writers[stack]) == 3)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_block_without_branches_is_the_identity(name: str) -> None:
    kind = KINDS[name]
    silenced, intact = kind.model(), kind.model()
    for model in (silenced, intact):
        bypass_norms(model)
    for branch in branches_of(silenced):
        silence(branch)
    for stack in kind.stacks:
        blocks = silenced.get_submodule(stack)
        entered: list[Tensor] = []
        blocks[0].register_forward_pre_hook(lambda block, args, entered=entered: entered.append(args[0].clone()))
        blocks[-1].register_forward_hook(lambda block, args, output, entered=entered: entered.append(first(output)))
        kind.loss(silenced)
        assert torch.equal(*entered)
    ends: list[Tensor] = []
    intact.get_submodule(list(kind.stacks)[-1])[-1].register_forward_hook(
        lambda block, args, output: ends.append(first(output).clone())
    )
    kind.loss(intact)
    for branch in branches_of(intact):
        kept = branch.last.weight.clone()
        silence(branch)
        kind.loss(intact)
        assert not torch.equal(ends[-1], ends[0]), branch.name
        branch.last.weight.copy_(kept)


def test_a_gain_multiplies_the_output_also_in_a_tuple() -> None:
    for writer, x in ((nn.Linear(4, 4), torch.randn(2, 4)), (nn.MultiheadAttention(4, 2), torch.randn(3, 1, 4))):
        inputs = (x,) * (3 if isinstance(writer, nn.MultiheadAttention) else 1)
        plain, weights = first(writer(*inputs)), writer(*inputs)[1:]
        add_gain(writer, nn.Parameter(torch.tensor([0.5])))
        assert torch.equal(first(writer(*inputs)), plain * 0.5)
        if isinstance(writer, nn.MultiheadAttention):
            assert torch.equal(writer(*inputs)[1], weights[0])
        assert "gain" in dict(writer.named_parameters())


def blocks_of(*layers: tuple[str, nn.Module]) -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ModuleDict(dict(layers))])
    return model


def test_layers_with_unknown_names_are_found_by_width() -> None:
    model = blocks_of(("a", nn.Linear(4, 9)), ("b", nn.Linear(9, 4)), ("c", nn.Linear(4, 4)), ("d", nn.Linear(4, 4)))
    (block,) = find_branches(model)["blocks"]
    assert [(each.name, list(each.inner)) for each in block] == [
        ("blocks.0.b", ["blocks.0.a"]),
        ("blocks.0.d", ["blocks.0.c"]),
    ]


def test_writers_may_be_named() -> None:
    model = blocks_of(("a", nn.Linear(4, 4)), ("b", nn.Linear(4, 4)), ("c", nn.Linear(4, 4)))
    with pytest.raises(RefusedError, match=r"blocks\.0\.c\.weight belongs to no residual branch"):
        find_branches(model)
    (block,) = find_branches(model, where="c$")["blocks"]
    assert [(each.name, list(each.inner)) for each in block] == [("blocks.0.c", ["blocks.0.a", "blocks.0.b"])]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (blocks_of(("a", nn.Linear(4, 8)), ("b", nn.Linear(8, 3))), "blocks.0.a.weight belongs to no residual branch"),
        (blocks_of(("a", nn.Conv1d(4, 4, 3)), ("b", nn.ReLU())), "blocks.0.a.weight belongs to no residual branch"),
        (blocks_of(("out", nn.Linear(4, 4)), ("up", nn.Linear(4, 8))), "has no inner layers"),
        (blocks_of(("a", nn.ReLU()), ("b", nn.ReLU())), "blocks.0 has no layer that writes"),
        (
            blocks_of(("attention", nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcd"}))),
            r"blocks\.0\.attention\.b and blocks\.0\.attention\.d cannot both end the same attention",
        ),
    ],
)
def test_an_unknown_block_is_refused(model: nn.Module, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason) as refused:
        find_branches(model, "")
    assert "where=" in refused.value.fix
    with pytest.raises(RefusedError, match=reason) as refused:  # as for a technique without this setting
        find_branches(model)
    assert "where" not in refused.value.fix


def test_each_stage_of_a_hierarchy_has_its_branches() -> None:
    config = transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 2])
    stages = find_branches(transformers.SwinModel(config))
    assert {stage: len(blocks) for stage, blocks in stages.items()} == {
        "encoder.layers.0.blocks": 1, "encoder.layers.1.blocks": 2,
    }  # fmt: skip
    assert {tuple(branch.kind for branch in block) for blocks in stages.values() for block in blocks} == {
        ("attention", "mlp")
    }


def test_branches_are_noted_once_per_stack() -> None:
    with collect_notes() as notes:
        find_branches(KINDS["marian"].model())
    assert notes == [
        "2 blocks of attention + mlp in model.encoder.layers",
        "3 blocks of attention + cross-attention + mlp in model.decoder.layers",
    ]
