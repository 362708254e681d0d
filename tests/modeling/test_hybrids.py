"""Hybrids: blocks of several kinds, such as attention and state spaces, in one residual stream."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.core.run_notes import collect_notes
from thrifty.modeling.adapter_base import head_names
from thrifty.modeling.embeddings import output_layers
from thrifty.modeling.module_surgery import find_stacks
from thrifty.modeling.residual_branches import find_branches
from thrifty.modeling.residual_checks import refuse_normed_sums
from thrifty.modeling.stream_norms import is_bypassed
from thrifty.techniques.growth._depth_growth import cut_stacks
from thrifty.techniques.growth.layer_drop import LayerDrop
from thrifty.techniques.initializations.layer_scale import LayerScale
from thrifty.techniques.initializations.rezero import ReZero

TEXT = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4}
SIZES: dict[str, dict[str, Any]] = {
    "Bamba": {"attn_layer_indices": [1, 3], **STATES},
    "FalconH1": {"mamba_d_ssm": 64, "head_dim": 8, "mamba_expand": 2, **STATES},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False},
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 48},
}  # fmt: skip


def hybrid(name: str) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
    return kind(kind.config_class(**TEXT, **SIZES[name]))


@pytest.mark.parametrize("name", SIZES)
def test_blocks_of_several_kinds_are_one_stack(name: str) -> None:
    model = hybrid(name)
    assert {stack: len(blocks) for stack, blocks in find_stacks(model).items()} == {"model.layers": 4}
    ends = [{branch.name.rpartition(".")[2] for branch in block} for block in _branches(model)]
    assert all(ends)
    with collect_notes() as notes:
        refuse_normed_sums(model, "a dropped block would lose it")
    assert not any("could not be run" in note for note in notes)


@pytest.mark.parametrize("name", SIZES)
def test_branches_with_gains_of_0_leave_the_stream(name: str) -> None:
    model, outputs = ReZero().model(hybrid(name)), []
    for block in model.model.layers:
        block.register_forward_hook(lambda block, args, output: outputs.append(_first(output)))
    model(input_ids=torch.arange(6)[None])
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


def test_norms_with_a_gate_stay() -> None:
    model = hybrid("Bamba")
    with collect_notes() as notes:
        ReZero().model(model)
    kept = {type(norm).__name__ for norm in model.modules() if "Norm" in type(norm).__name__ and not is_bypassed(norm)}
    assert kept == {"BambaRMSNormGated"} and any("it also multiplies by a gate" in note for note in notes)


@pytest.mark.parametrize("technique", [LayerDrop(), LayerScale()])
def test_inner_weights_that_are_no_layers_are_accepted(technique: Any) -> None:
    technique.model(hybrid("Jamba"))
    with pytest.raises(RefusedError, match=r"conv1d\.weight belongs to no residual branch"):
        find_branches(hybrid("Bamba"))


class Block(nn.Module):
    """Block with a norm before its branch, or after the sum."""

    def __init__(self, is_normed_after: bool, width: int = 8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.is_normed_after = is_normed_after

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_normed_after:
            return self.norm(x + self.down(self.hidden(x)))
        return x + self.down(self.hidden(self.norm(x)))


class Gated(Block):
    def __init__(self, is_normed_after: bool):
        super().__init__(is_normed_after)
        del self.down
        self.gate, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def hidden(self, x: Tensor) -> Tensor:
        return self.up(x) * torch.sigmoid(self.gate(x))


class Stages(nn.Module):
    def __init__(self, *stages: nn.Module):
        super().__init__()
        self.stages = nn.ModuleList(stages)


def test_each_kind_of_block_is_tried() -> None:
    refuse_normed_sums(Stages(Block(False), Gated(False)), "why")
    with pytest.raises(RefusedError, match="Gated has a norm after its sums"):
        refuse_normed_sums(Stages(Block(False), Gated(True)), "why")


def test_stages_with_lists_of_blocks_are_no_blocks() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(False), Block(False)])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x))

    class Wide(Stage):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.norm = nn.Linear(8, 8), nn.LayerNorm(16)

    assert {*find_stacks(Stages(Stage(), Wide()))} == {"stages.0.blocks", "stages.1.blocks"}


class Classifier(Block):
    def __init__(self) -> None:
        super().__init__(False)
        self.down = nn.Linear(16, 3)


def test_a_classifier_after_the_blocks_is_a_head() -> None:
    model = nn.Sequential(Block(False), Block(False), Classifier())
    assert [*output_layers(model)] == ["2.down"]
    in_series = nn.Sequential(nn.ModuleDict({"blocks": nn.ModuleList([Block(False)] * 2)}))
    in_series.add_module("reduce", nn.Linear(8, 2))
    in_series.add_module("head", nn.Linear(10, 3))
    assert {*head_names(in_series)} == {"head.weight", "head.bias"}


def test_unequal_blocks_are_not_copied() -> None:
    with pytest.raises(RefusedError, match="have different parameters"):
        cut_stacks(hybrid("Bamba"), lambda blocks: blocks // 2)


def _branches(model: nn.Module) -> list[Any]:
    return [block for blocks in find_branches(model, ends_only=True).values() for block in blocks]


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
