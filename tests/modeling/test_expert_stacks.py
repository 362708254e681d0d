"""Mixtures of experts of transformers, whose matrices of all experts are in one parameter."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import thrifty
from thrifty.core.errors import RefusedError
from thrifty.modeling.expert_stacks import is_expert_stack, is_transposed_stack, stack_width, stacked_matrices
from thrifty.modeling.residual_branches import find_branches
from thrifty.modeling.residual_checks import refuse_normed_branches, refuse_normed_sums
from thrifty.techniques.growth.stacking import written_by
from thrifty.techniques.initializations.layer_scale import LayerScale
from thrifty.techniques.initializations.rezero import ReZero
from thrifty.techniques.sparsity.early_bird import EarlyBird

SHARED = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 4},
    "Olmoe": {"intermediate_size": 32, "num_experts": 4},
    "Qwen2Moe": {
        "intermediate_size": 48, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4,
    },
    "GptOss": {"intermediate_size": 32, "num_local_experts": 4, "head_dim": 8},
    "DeepseekV3": {
        "num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 4,
        "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 0,
    },
}  # fmt: skip
TOKENS = torch.arange(12)[None]


def mixture(name: str) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
    model = kind(kind.config_class(**{**SHARED, **SIZES[name]})).eval()
    for parameter in model.parameters():  # biases too
        nn.init.normal_(parameter, std=0.2)
    return model


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_expert_stack(module)]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("name", SIZES)
def test_branches_end_in_the_experts(name: str) -> None:
    model = mixture(name)
    for blocks in find_branches(model, ends_only=True).values():
        assert [{branch.width for branch in block} for block in blocks] == [{32}, {32}]
        assert all(any(is_expert_stack(branch.writer) for branch in block) for block in blocks)
    refuse_normed_sums(model, "it would be lost")
    refuse_normed_branches(model, "it would be lost")


@pytest.mark.parametrize("name", SIZES)
def test_gains_of_experts_fold_into_their_matrices(name: str) -> None:
    model = mixture(name)
    scaled = LayerScale(initial_value=0.3).model(model)
    for gain in (each for path, each in scaled.named_parameters() if path.endswith("gain")):
        nn.init.uniform_(gain, 0.2, 0.7)
    before = logits(scaled)
    folded = LayerScale().finish(scaled)
    assert not any("gain" in path for path, _ in folded.named_parameters())
    torch.testing.assert_close(logits(folded), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SIZES)
def test_blocks_of_experts_start_as_the_identity(name: str) -> None:
    outputs: list[Tensor] = []
    model = ReZero().model(mixture(name))
    for block in model.model.layers:
        block.register_forward_hook(lambda block, args, output: outputs.append((args[0], output)))
    logits(model)
    assert all(torch.equal(*pair) for pair in outputs)


def test_a_model_may_start_with_a_block_of_experts() -> None:
    states = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "expand": 1}
    sizes = {"n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24}
    sizes |= {"n_group": 1, "topk_group": 1, "head_dim": 8, "layers_block_type": ["moe", "attention"]}
    model = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**{**SHARED, **sizes, **states}))
    assert "gain" in {path.rpartition(".")[2] for path, _ in LayerScale().model(model).named_parameters()}


@pytest.mark.parametrize("name", SIZES)
def test_blocks_with_zeroed_last_layers_are_the_identity(name: str) -> None:
    model, outputs = mixture(name), []
    written = written_by(model)
    for block in model.model.layers:
        for path, parameter in block.named_parameters():
            if ("model.layers", path) in written:
                nn.init.zeros_(parameter)
        block.register_forward_hook(lambda block, args, output: outputs.append((args[0], output)))
    logits(model)
    assert all(torch.equal(*pair) for pair in outputs)
    assert all(stack.any() for each in experts_of(model) for stack in stacked_matrices(each)[:-1])


@pytest.mark.parametrize("name", ["Qwen2Moe", "GptOss"])
def test_muon_orthogonalizes_each_expert(name: str) -> None:
    model = mixture(name)
    optimizer = thrifty.optim.Muon(model, lr=0.1, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    (experts, *_), singles = experts_of(model), nn.ModuleList()
    for stack in stacked_matrices(experts):
        for matrix, gradient in zip(stack.detach(), stack.grad, strict=True):
            single = nn.Linear(1, 1, bias=False)
            single.weight = nn.Parameter((matrix.mT if is_transposed_stack(experts) else matrix).clone())
            single.weight.grad = (gradient.mT if is_transposed_stack(experts) else gradient).clone()
            singles.append(single)
    optimizer.step()
    torch.optim.Muon(singles.parameters(), lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    updated = [matrix for stack in stacked_matrices(experts) for matrix in stack]
    for found, single in zip(updated, singles, strict=True):
        expected = single.weight.mT if is_transposed_stack(experts) else single.weight
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize(
    ("shapes", "is_stack", "is_transposed"),
    [
        ({"gate_up_proj": (4, 24, 8), "down_proj": (4, 8, 12)}, True, False),
        ({"w13": (4, 8, 24), "w2": (4, 12, 8), "w2_bias": (4, 8)}, True, True),
        ({"w1": (4, 12, 8), "w2": (4, 8, 12)}, False, False),  # may be of either layout
        ({"w13": (4, 24, 8), "w2": (4, 8, 12), "b2": (4, 8)}, False, False),
        ({"w13": (4, 24, 8), "w2": (4, 8, 12), "bias": (8,)}, False, False),
        ({"q": (8, 4, 2), "o": (8, 4, 2)}, False, False),  # heads of XLNet
    ],
)
def test_only_stacks_of_known_layout_are_accepted(
    shapes: dict[str, tuple[int, ...]], is_stack: bool, is_transposed: bool
) -> None:
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    assert is_expert_stack(module) is is_stack
    if is_stack:
        assert is_transposed_stack(module) is is_transposed and stack_width(module) == 8


class WholeBlock(nn.Module):
    """Block that is a mixture of experts with its norm, router and residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(8), nn.Linear(8, 4)
        self.w1, self.w2 = nn.Parameter(torch.randn(4, 8, 12)), nn.Parameter(torch.randn(4, 12, 8))


def test_a_block_with_experts_of_its_own_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.ModuleList(WholeBlock() for _ in range(2)))
    with pytest.raises(RefusedError, match="w1 belongs to no residual branch"):
        find_branches(model, ends_only=True)


def test_pruning_of_a_mixture_is_refused_with_the_reason() -> None:
    with pytest.raises(RefusedError, match="matrices of all experts in one parameter"):
        EarlyBird().model(mixture("Mixtral"))
