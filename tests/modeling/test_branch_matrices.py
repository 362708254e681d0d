"""The matrices inside fused layers, identified by their effect."""

import math

import pytest
import torch
import transformers
from stacked_models import HEADS, KINDS, VOCABULARY, WIDTH
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.modeling.module_surgery import find_stacks, is_under
from thrifty.modeling.residual_branches import ResidualBranch, biases, find_branches
from thrifty.modeling.stream_norms import bypass_norms
from thrifty.techniques.initializations._branch_matrices import BranchMatrix, draw_xavier, matrices, outer_matrices


def branches_of(model: nn.Module) -> list[ResidualBranch]:
    return [branch for blocks in find_branches(model).values() for block in blocks for branch in block]


@pytest.mark.parametrize("name", KINDS)
def test_matrices_cover_every_element_once(name: str) -> None:
    model = KINDS[name].model()
    counted = dict.fromkeys(dict(model.named_parameters()), 0)
    for matrix in [*outer_matrices(model), *(m for branch in branches_of(model) for m in matrices(branch))]:
        assert matrix.values.numel() == matrix.fan_in * matrix.fan_out
        counted[matrix.parameter] += matrix.values.numel()
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for key, parameter in model.named_parameters():
        is_drawn = parameter.ndim > 1 and id(parameter) not in tables and not any(w in key for w in ("pos", "token"))
        assert counted[key] == (parameter.numel() if is_drawn else 0), key


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_attention_without_values_returns_zero(name: str) -> None:
    """For any packing: concatenated, head by head, transposed, or fewer values than queries."""
    kind = KINDS[name]
    model = kind.model()
    bypass_norms(model)
    attentions = [branch for branch in branches_of(model) if branch.kind != "mlp"]
    given: list[float] = []
    for branch in attentions:
        for layer in (*branch.inner.values(), branch.writer):
            for bias in biases(layer):
                bias.zero_()
        if isinstance(branch.writer, nn.MultiheadAttention):
            branch.writer.register_forward_hook(lambda module, args, output: given.append(float(output[0].abs().max())))
        else:
            branch.writer.register_forward_pre_hook(lambda module, args: given.append(float(args[0].abs().max())))
    kind.loss(model)
    assert min(given) > 0 and len(given) == len(attentions)
    given.clear()
    for branch in attentions:
        for matrix in matrices(branch):
            if matrix.role == "value":
                matrix.values.zero_()
    kind.loss(model)
    assert given == [0.0] * len(attentions)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_attention_without_queries_is_uniform(name: str) -> None:
    """Keys no longer matter if queries and keys are identified correctly."""
    kind = KINDS[name]
    model = kind.model()
    in_attention = [matrix for branch in branches_of(model) if branch.kind != "mlp" for matrix in matrices(branch)]
    for branch in branches_of(model):
        for layer in branch.inner.values() if branch.kind != "mlp" else ():
            for bias in biases(layer):
                bias.zero_()
    for matrix in in_attention:
        if matrix.role == "query":
            matrix.values.zero_()
    before = kind.loss(model)
    for matrix in in_attention:
        if matrix.role == "key":
            matrix.values.mul_(-3.0)
    assert kind.loss(model) == before
    for matrix in in_attention:
        if matrix.role == "value":
            matrix.values.mul_(-3.0)
    assert kind.loss(model) != before


def test_roles_and_sizes_of_fused_layers() -> None:
    def listed(name: str, branch: int) -> list[tuple[str, int, int]]:
        branch_matrices = matrices(branches_of(KINDS[name].model())[branch])
        return [(matrix.role, matrix.fan_in, matrix.fan_out) for matrix in branch_matrices]

    grouped = [("query", 32, 32), ("key", 32, 16), ("value", 32, 16), ("last", 32, 32)]
    for name in ("our llama", "llama", "phi3"):
        assert sorted(listed(name, 0)) == sorted(grouped)
        assert listed(name, 1) == [("hidden", 32, 64), ("hidden", 32, 64), ("last", 64, 32)]
    assert listed("gpt2", 0) == [("query", 32, 32), ("key", 32, 32), ("value", 32, 32), ("last", 32, 32)]
    assert listed("gpt2", 1) == [("hidden", 32, 64), ("last", 64, 32)]
    assert listed("our t5", 0) == [("query", 32, 16), ("key", 32, 16), ("value", 32, 16), ("last", 16, 32)]
    assert listed("our t5", 7) == [("query", 32, 16), ("key", 32, 16), ("value", 32, 16), ("last", 16, 32)]


@pytest.mark.parametrize(("name", "folded"), [("t5", 8**-0.5), ("our t5", 4**-0.5), ("gpt2", 1.0), ("our bert", 1.0)])
def test_queries_are_divided_if_scores_are_not_scaled(name: str, folded: float) -> None:
    for branch in branches_of(KINDS[name].model()):
        for matrix in matrices(branch):
            assert matrix.folded == (folded if matrix.role == "query" else 1.0)


@pytest.mark.parametrize(
    "config",
    [
        lambda: transformers.FalconConfig(new_decoder_architecture=True, num_kv_heads=HEADS // 2, hidden_size=WIDTH),
        lambda: transformers.DeepseekV2Config(
            hidden_size=WIDTH, intermediate_size=64, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=9,
        ),
    ],
)  # fmt: skip
def test_an_attention_with_unknown_parts_is_refused(config: object) -> None:
    settings = config()  # type: ignore[operator]
    settings.vocab_size, settings.num_hidden_layers, settings.num_attention_heads = VOCABULARY, 1, HEADS
    settings.num_key_value_heads = HEADS
    model = transformers.AutoModelForCausalLM.from_config(settings)
    with pytest.raises(RefusedError, match=r"parts of .* that compute queries, keys and values are unknown"):
        matrices(branches_of(model)[0])


def matrix(values: Tensor, name: str = "a.weight", role: str = "hidden", folded: float = 1.0) -> BranchMatrix:
    return BranchMatrix(name, role, values, values.shape[1], values.shape[0], folded)  # type: ignore[arg-type]


def test_xavier_values_use_the_bound_of_their_own_part() -> None:
    fused = torch.empty(600, 200)
    parts = [matrix(fused[:400], role="query", folded=0.5), matrix(fused[400:], role="value")]
    draw_xavier(parts, seed=0, scale=0.25, unscaled=("query",))
    for part, bound in ((fused[:400], 0.5 * math.sqrt(6 / 600)), (fused[400:], 0.25 * math.sqrt(6 / 400))):
        assert 0.99 * bound < part.abs().max() <= bound
        assert part.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_sampled_values_depend_on_seed_and_name_only() -> None:
    before = torch.get_rng_state()
    drawn = {}
    for seed, name in ((0, "a.weight"), (0, "b.weight"), (1, "a.weight")):
        drawn[seed, name] = torch.empty(8, 8)
        draw_xavier([matrix(torch.empty(3, 3), "first.weight"), matrix(drawn[seed, name], name)], seed)
    assert torch.equal(torch.get_rng_state(), before)
    again = torch.empty(8, 8)
    draw_xavier([matrix(again)], 0)
    assert torch.equal(again, drawn[0, "a.weight"])
    assert len({float(values.sum()) for values in drawn.values()}) == 3


def test_embeddings_and_heads_are_outside_the_blocks() -> None:
    model = KINDS["vit"].model()
    names = {each.parameter for each in outer_matrices(model)}
    assert names == {"vit.embeddings.patch_embeddings.projection.weight", "classifier.weight"}
    assert not outer_matrices(KINDS["gpt2"].model())
    assert [each.parameter for each in outer_matrices(KINDS["our untied gpt"].model())] == ["head.weight"]
    assert not any(is_under(name, stack) for name in names for stack in find_stacks(model))
