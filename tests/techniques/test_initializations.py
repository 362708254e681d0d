"""Initializations without norms and LayerScale: the papers' formulas, on many models."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from stacked_models import KINDS, TARGETS, THEIRS, TOKENS, VOCABULARY, WIDTH, Kind, gpt
from tiny_runs import advance, plain_run, technique, tiny_model, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import compose
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.state import TrainState
from thrifty.core.technique import Technique
from thrifty.modeling.embeddings import size_stream
from thrifty.modeling.residual_branches import find_branches
from thrifty.modeling.stream_norms import bypass_norms
from thrifty.techniques.initializations._branch_matrices import draw_xavier, matrices
from thrifty.techniques.initializations.fixup import Fixup
from thrifty.techniques.initializations.layer_scale import LayerScale
from thrifty.techniques.initializations.rezero import ReZero
from thrifty.techniques.initializations.skip_init import SkipInit, largest_start
from thrifty.techniques.initializations.t_fixup import TFixup

WITHOUT_NORMS: dict[str, Technique] = {
    "rezero": ReZero(), "skip_init": SkipInit(), "fixup": Fixup(), "t_fixup": TFixup()
}  # fmt: skip
ALL: dict[str, Technique] = WITHOUT_NORMS | {"layer_scale": LayerScale()}
STARTS_AS_IDENTITY = ("rezero", "skip_init", "fixup")


def gpt_loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model.logits(TOKENS).flatten(0, 1), TARGETS.flatten())


# --- what runs and what refuses ---------------------------------------------------------------------------------------

SMALL = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
PARTLY = {
    "experts": lambda: transformers.MixtralConfig(
        **SMALL, intermediate_size=64, num_key_value_heads=2, num_local_experts=2
    ),
    "low-rank attention": lambda: transformers.DeepseekV2Config(
        **SMALL, intermediate_size=64, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, first_k_dense_replace=9,
    ),
    "one key for all heads, fused": lambda: transformers.FalconConfig(**SMALL, multi_query=True),
    "one key for two heads, fused": lambda: transformers.FalconConfig(
        **SMALL, new_decoder_architecture=True, num_kv_heads=2
    ),
}  # fmt: skip
NEEDS_NO_PARTS = ("rezero", "skip_init", "layer_scale")
RUNS = {(kind, name) for kind in (*KINDS, "one key for all heads, fused") for name in ALL} | {
    (kind, name) for kind in PARTLY for name in NEEDS_NO_PARTS
}
REFUSES = {("experts", name): "matrices of all experts in one parameter" for name in ("fixup", "t_fixup")} | {
    (kind, name): "keys and values are unknown"
    for kind in ("low-rank attention", "one key for two heads, fused")
    for name in ("fixup", "t_fixup")
}


def kind_of(name: str) -> Kind:
    if name in KINDS:
        return KINDS[name]
    config = PARTLY[name]()
    return Kind(
        lambda: transformers.AutoModelForCausalLM.from_config(config),
        lambda model: model(input_ids=TOKENS, labels=TARGETS).loss, {}, {},
    )  # fmt: skip


def test_table_covers_every_model_and_initialization() -> None:
    assert RUNS | REFUSES.keys() == {(kind, name) for kind in (*KINDS, *PARTLY) for name in ALL}
    assert all((kind, name) in RUNS for kind in THEIRS for name in ALL)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("kind", "name"), sorted(RUNS))
def test_initialized_models_learn_with_unchanged_names(kind: str, name: str) -> None:
    model = kind_of(kind).model()
    names = dict(model.named_parameters()).keys()
    model = ALL[name].model(model)
    assert names <= dict(model.named_parameters()).keys()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(4):
        losses.append(kind_of(kind).loss(model))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[3] < losses[2] < losses[0]
    for key, parameter in model.named_parameters():
        if key.endswith(("gain", "shift", "shift_after")):
            assert parameter.grad is not None, f"{key} is on no path"


@pytest.mark.parametrize(("kind", "name"), sorted(REFUSES))
def test_refusals_name_the_reason(kind: str, name: str) -> None:
    with pytest.raises(RefusedError, match=REFUSES[kind, name]) as refused:
        ALL[name].model(kind_of(kind).model())
    assert refused.value.fix


@pytest.mark.sampled(18)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STARTS_AS_IDENTITY)
@torch.no_grad()
def test_every_stack_starts_as_the_identity_map(kind: str, name: str) -> None:
    model = ALL[name].model(KINDS[kind].model())
    for stack in KINDS[kind].stacks:
        ends: list[Tensor] = []
        blocks = model.get_submodule(stack)
        blocks[0].register_forward_pre_hook(lambda block, args, ends=ends: ends.append(args[0].clone()))
        blocks[-1].register_forward_hook(
            lambda block, args, out, ends=ends: ends.append(out[0] if isinstance(out, tuple) else out)
        )
        KINDS[kind].loss(model)
        assert torch.equal(*ends)


def test_two_initializations_or_adapters_are_refused() -> None:
    names = [f"initializations.{name}" for name in ALL]
    for name in names:
        for other in (*names, "adapters.lora"):
            if other != name:
                with pytest.raises(UsageError, match=r"both decide the residual gains|cannot be combined: .+"):
                    compose(plain_run(), with_optimizer([technique(name), technique(other)]), 2)


@pytest.mark.parametrize("name", WITHOUT_NORMS)
def test_model_without_norms_has_no_export(name: str) -> None:
    with pytest.raises(RefusedError, match="no weights of the plain architecture compute the same") as refused:
        ALL[name].finish(ALL[name].model(gpt()))
    assert "layer_scale" in refused.value.fix


@pytest.mark.parametrize("name", WITHOUT_NORMS)
def test_trained_norm_raises_integrity_error(name: str) -> None:
    model = ALL[name].model(gpt())
    ALL[name].holds(TrainState(model=model))
    model.blocks[1].mlp_norm.weight.requires_grad_(True)
    with pytest.raises(IntegrityError, match=rf"{name}: blocks\.1\.mlp_norm is bypassed"):
        ALL[name].holds(TrainState(model=model))


@pytest.mark.parametrize("name", ("fixup", "t_fixup"))
def test_values_depend_on_seed_and_name(name: str) -> None:
    def drawn(depth: int, seed: int = 0, tied: bool = True) -> dict[str, Tensor]:
        plain = gpt(depth, tied)
        before = torch.get_rng_state()
        model = type(ALL[name])(seed=seed).model(plain)  # type: ignore[call-arg]
        assert torch.equal(torch.get_rng_state(), before)
        return {key: p.detach() for key, p in model.named_parameters() if p.ndim > 1 and p.abs().max() > 0}

    short, again, other, long, untied = drawn(2), drawn(2), drawn(2, seed=1), drawn(4), drawn(2, tied=False)
    for key, value in short.items():
        assert torch.equal(value, again[key]) and torch.equal(value, untied[key])
        if "blocks" in key:
            assert not torch.equal(value, other[key])
            unit = [matrix / matrix.norm() for matrix in (value[-WIDTH:], long[key][-WIDTH:])]
            torch.testing.assert_close(*unit)  # the same random values at another scale


def test_grown_blocks_copy_scalars() -> None:
    chosen = with_optimizer([technique("initializations.rezero"), technique("growth.stacking", at=(3,))])
    run = compose(plain_run(depth=4), chosen, 6)
    state = run.start()
    advance(run, state, 3)
    run.changes(state)
    assert state.model is not None
    run.verify(state)
    alphas = [float(block.attention.out.gain.detach()) for block in state.model.blocks]
    assert len(alphas) == 4 and alphas[:2] == alphas[2:] and 0.0 not in alphas


# --- depth ------------------------------------------------------------------------------------------------------------


def gradient_norm(model: nn.Module) -> float:
    gpt_loss(model).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def unscaled(model: nn.Module) -> nn.Module:
    """Return a model without norms, initialized by Xavier's values."""
    for branch in (branch for block in find_branches(model)["blocks"] for branch in block):
        draw_xavier(matrices(branch), seed=0)
    size_stream(model)
    bypass_norms(model)
    return model


@pytest.mark.parametrize("name", WITHOUT_NORMS)
def test_first_gradient_is_independent_of_depth(name: str) -> None:
    norms = [gradient_norm(ALL[name].model(gpt(depth))) for depth in (2, 8, 32, 64)]
    assert max(norms) < 2 * min(norms)


def test_gradient_explodes_without_norms_or_method() -> None:
    shallow, deep = (gradient_norm(unscaled(gpt(depth))) for depth in (2, 8))
    assert deep > 1000 * shallow
    assert gpt_loss(unscaled(gpt(32))) > 1000


# --- ReZero -----------------------------------------------------------------------------------------------------------


def attention_by_hand(x: Tensor, attention: nn.Module) -> Tensor:
    q, k, v = F.linear(x, attention.qkv.weight, attention.qkv.bias).chunk(3, -1)
    q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    seen = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    return F.linear(seen.transpose(1, 2).flatten(2), attention.out.weight, attention.out.bias)


def mlp_by_hand(x: Tensor, mlp: nn.Module) -> Tensor:
    inner = F.gelu(F.linear(x, mlp.up.weight, mlp.up.bias), approximate="tanh")
    return F.linear(inner, mlp.down.weight, mlp.down.bias)


def embedded_by_hand(model: nn.Module) -> Tensor:
    return model.embedding.token.weight[TOKENS] + model.embedding.position.weight[: TOKENS.shape[1]]


@torch.no_grad()
def test_rezero_scales_branches_by_one_alpha_per_block() -> None:
    model = ReZero(multiplier=1.0).model(tiny_model(depth=3, style="gpt"))
    alphas = {name: p for name, p in model.named_parameters() if name.endswith("gain")}
    assert list(alphas) == [f"blocks.{index}.attention.out.gain" for index in range(3)]
    assert all(alpha.shape == (1,) and alpha == 0 for alpha in alphas.values())
    for value, alpha in zip((0.5, -0.25, 2.0), alphas.values(), strict=True):
        alpha.fill_(value)
    x = embedded_by_hand(model)
    for value, block in zip((0.5, -0.25, 2.0), model.blocks, strict=True):
        x = x + value * attention_by_hand(x, block.attention)
        x = x + value * mlp_by_hand(x, block.mlp)
    torch.testing.assert_close(model(TOKENS), x)


def test_rezero_has_one_alpha_per_branch_on_request() -> None:
    model = ReZero(shared="branch").model(gpt(2))
    gpt_loss(model).backward()
    gains = [layer.gain.grad for block in model.blocks for layer in (block.attention.out, block.mlp.down)]
    assert len({float(gain) for gain in gains}) == 4 and all(gain != 0 for gain in gains)


def test_first_gradients_reach_only_alphas_and_ends() -> None:
    model = ReZero().model(gpt(2, tied=False))
    gpt_loss(model).backward()
    for name, parameter in model.named_parameters():
        moves = parameter.grad is not None and bool(parameter.grad.any())
        assert moves == (name.endswith("gain") or name.startswith(("embedding", "head"))), name


class GatedBlock(nn.Module):
    """Block with a learned gate that multiplies the stream too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate.sigmoid()
        return x * (1 - gate) + gate * self.down(self.up(x).relu())


@pytest.mark.parametrize("initialized", [ReZero(), SkipInit()])
def test_gates_of_the_stream_are_refused(initialized: Technique) -> None:
    blocks = nn.Sequential(GatedBlock(), GatedBlock())
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), blocks, nn.Linear(WIDTH, VOCABULARY))
    with pytest.raises(RefusedError, match="GatedBlock changes the residual stream although its branches"):
        initialized.model(model)


# --- SkipInit ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_skip_init_multiplies_branch_outputs() -> None:
    model = SkipInit(initial_value=0.25, multiplier=1.0).model(tiny_model(depth=3, style="gpt"))
    model.blocks[1].mlp.down.gain.fill_(-1.5)
    x = embedded_by_hand(model)
    for index, block in enumerate(model.blocks):
        x = x + 0.25 * attention_by_hand(x, block.attention)
        x = x + (-1.5 if index == 1 else 0.25) * mlp_by_hand(x, block.mlp)
    torch.testing.assert_close(model(TOKENS), x)


def test_skip_init_limits_the_initial_value() -> None:
    assert largest_start(16) == 0.25
    SkipInit(initial_value=0.353).model(gpt(4))
    with pytest.raises(RefusedError, match=r"initial_value '0\.36' exceeds 1 / sqrt\(8 branches\)") as refused:
        SkipInit(initial_value=0.36).model(gpt(4))
    assert refused.value.fix == "--set techniques.initializations.skip_init.initial_value=0.353 or less"


# --- LayerScale -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_folded_gains_are_exact_on_every_model(kind: str) -> None:
    model = LayerScale(initial_value=0.5).model(KINDS[kind].model())
    for name, parameter in model.named_parameters():
        if name.endswith("gain"):
            parameter.mul_(torch.linspace(-1, 2, parameter.numel()))
    with_gains = KINDS[kind].loss(model)
    names = list(KINDS[kind].model().state_dict())
    plain = LayerScale().finish(model)
    assert list(plain.state_dict()) == names
    torch.testing.assert_close(KINDS[kind].loss(plain), with_gains)


def test_initial_gains_follow_the_depth_of_their_stack() -> None:
    model = nn.Module()
    model.shallow, model.deep = gpt(2).blocks, gpt(20).blocks
    parameters = dict(LayerScale().model(model).named_parameters())
    assert parameters["shallow.1.mlp.down.gain"].detach().max() == pytest.approx(0.1)
    assert parameters["deep.19.attention.out.gain"].detach().max() == pytest.approx(1e-5)


@pytest.mark.parametrize(("kind", "more"), [("Gemma2", {"head_dim": 8}), ("Olmo2", {}), ("Llama", {})])
def test_gains_before_a_norm_are_refused(kind: str, more: dict[str, int]) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    config = getattr(transformers, f"{kind}Config")(**sizes, vocab_size=60, num_hidden_layers=2, pad_token_id=0, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(12)[None]
    if kind == "Llama":
        before = model(input_ids=tokens).logits
        assert not torch.allclose(
            LayerScale(initial_value=0.1).model(model)(input_ids=tokens).logits, before, atol=1e-3
        )
        return
    with pytest.raises(RefusedError, match=r"has a norm after model\.layers\.0\.self_attn\.o_proj: it would undo"):
        LayerScale().model(model)
