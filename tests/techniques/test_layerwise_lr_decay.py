"""Layer-wise learning-rate decay: rates by depth in many models, compared with torch's groups."""

from typing import Any

import pytest
import torch
from image_runs import image_run, tiny_mae, tiny_vit
from pair_runs import tiny_clip
from stacked_models import KINDS
from tiny_runs import advance, losses, plain_run, run_through, technique, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import compose
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.gradient_transform import chain
from thrifty.core.technique import Technique
from thrifty.modeling.stage_placeholders import StagePlaceholder
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.techniques.optimizers.adamw import adamw
from thrifty.techniques.optimizers.layerwise_lr_decay import (
    LayerwiseLearningRateDecay,
    ScaleByParameterFactor,
    depth_factor,
    depths,
)


def factors(model: nn.Module, decay: float = 0.5, front: str = "") -> dict[str, float]:
    return {name: depth_factor(*at, decay) for name, at in depths(model, front).items()}


def table(model: nn.Module, **settings: Any) -> dict[float, set[str]]:
    """Return modules or parameters by factor, with blocks as a whole."""
    found: dict[float, set[str]] = {}
    for name, factor in factors(model, **settings).items():
        found.setdefault(factor, set()).add(name)
    return found


def test_vit_rates_match_the_papers_code() -> None:
    model = tiny_vit(depth=3)
    written = {  # 0.75 to the power of 4, 3, 2, 1, 0
        "embedding": 0.31640625, "blocks.0": 0.421875, "blocks.1": 0.5625, "blocks.2": 0.75, "norm": 1.0, "head": 1.0,
    }  # fmt: skip
    found = factors(model, 0.75)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, factor in found.items():
        (wanted,) = (value for part, value in written.items() if name.startswith(f"{part}."))
        assert factor == pytest.approx(wanted, abs=1e-15), name


OUTSIDE = {
    "our llama": ({"embedding"}, {"norm"}),
    "our untied gpt": ({"embedding"}, {"norm", "head"}),
    "bert": ({"bert.embeddings"}, {"cls"}),
    "gpt2": ({"transformer.wte", "transformer.wpe"}, {"transformer.ln_f"}),
    "vit": ({"vit.embeddings"}, {"vit.layernorm", "classifier"}),
    "llama": ({"model.embed_tokens"}, {"model.norm", "lm_head"}),
    "gpt_neox": ({"gpt_neox.embed_in"}, {"gpt_neox.final_layer_norm", "lm_head"}),
    "opt": (
        {"model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"},
        {"model.decoder.project_out", "model.decoder.final_layer_norm"},
    ),
    "marian": ({"model.shared", "model.encoder.embed_positions", "model.decoder.embed_positions"}, set()),
    "t5": ({"shared"}, {"encoder.final_layer_norm", "decoder.final_layer_norm"}),
    "a user's vit": ({"patches", "pos_embed"}, {"norm", "head"}),
    "torch's encoder": ({"embed"}, {"head"}),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_modules_before_and_after_blocks_are_recognized(name: str) -> None:
    front, behind = OUTSIDE[name]
    kind = KINDS[name]
    for parameter, (depth, blocks) in depths(kind.model()).items():
        stack = next((stack for stack in kind.stacks if parameter.startswith(f"{stack}.")), None)
        if stack is not None:
            assert blocks == kind.stacks[stack]
            assert depth == 1 + int(parameter[len(stack) + 1 :].split(".")[0])
            continue
        own = front if depth == 0 else behind
        assert depth in (0, blocks + 1)
        assert any(parameter == each or parameter.startswith(f"{each}.") for each in own), parameter


def test_stacks_are_counted_from_their_own_end() -> None:
    found = factors(tiny_clip())
    assert found["logit_scale"] == 1.0 and found["image.projection.weight"] == found["text.projection.weight"] == 1.0
    for tower in ("image", "text"):
        blocks = {int(name.split(".")[2]) for name in found if name.startswith(f"{tower}.blocks.")}
        for name, factor in found.items():
            if name.startswith(f"{tower}.blocks."):
                assert factor == 0.5 ** (len(blocks) - int(name.split(".")[2]))
            elif name.startswith(f"{tower}.embedding."):
                assert factor == 0.5 ** (len(blocks) + 1)
    found = factors(tiny_mae(depth=4, decoder_depth=2))
    assert found["decoder.embed.weight"] == found["decoder.mask_token"] == 0.5**3
    assert found["decoder.blocks.1.mlp.up.weight"] == found["blocks.3.mlp.up.weight"] == 0.5
    assert found["norm.weight"] == found["decoder.norm.weight"] == found["head.weight"] == 1.0


def test_embedding_pattern_selects_modules_before_blocks() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
            self.reader, self.writer = nn.Linear(4, 4), nn.Linear(4, 4)

    assert table(Odd())[1.0] == {"reader.weight", "reader.bias", "writer.weight", "writer.bias"}
    assert table(Odd(), front="reader")[0.125] == {"reader.weight", "reader.bias"}
    assert table(Odd(), front="reader")[1.0] == {"writer.weight", "writer.bias"}


def test_training_equals_torch_adamw_with_groups() -> None:
    ours, theirs = KINDS["bert"].model(), KINDS["bert"].model()
    named = factors(ours, 0.6)
    decayed = {name for name, p in theirs.named_parameters() if p.ndim > 1 and "position" not in name}
    groups = [
        {"params": [p], "lr": 3e-3 * named[name], "weight_decay": 0.1 * (name in decayed)}
        for name, p in theirs.named_parameters()
    ]
    wanted = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    transform = chain(adamw(3e-3), ScaleByParameterFactor(lambda name, parameter: named[name]))
    optimizer = TransformOptimizer(ours.named_parameters(), transform)
    for _ in range(4):
        for model, stepper in ((ours, optimizer), (theirs, wanted)):
            KINDS["bert"].loss(model).backward()
            stepper.step()
            stepper.zero_grad()
    for (name, mine), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not name.endswith("key.bias"):  # its gradient is only rounding error, which Adam normalizes
            torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-6, msg=name)


def moved(optimizer: Technique, decay: float) -> dict[str, float]:
    """Return the change of each parameter in one step, relative to the plain run."""
    ways = []
    for more in ([LayerwiseLearningRateDecay(decay=decay)], []):
        run = compose(plain_run(), [optimizer, *more], 1)
        state = run.start()
        assert state.model is not None
        before = {name: value.detach().clone() for name, value in state.model.named_parameters()}
        advance(run, state)
        now = {name: value.detach() for name, value in state.model.named_parameters()}
        ways.append({name: float((value - before[name]).norm()) for name, value in now.items()})
    return {name: ways[0][name] / ways[1][name] for name in ways[0] if ways[1][name] > 1e-6}


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("sgd", {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}),
        ("adamw", {"weight_decay": 0.1}),  # Adam's step does not depend on the gradient's scale
        ("schedule_free", {"warmup": 0}),
    ],
)
def test_step_length_follows_the_factors(optimizer: str, settings: dict[str, float]) -> None:
    found = moved(technique(f"optimizers.{optimizer}", **settings), decay=0.5)
    for name, share in found.items():
        depth = 0 if name.startswith("embedding") else 5 if name.startswith("norm") else 1 + int(name.split(".")[1])
        assert share == pytest.approx(0.5 ** (5 - depth), rel=1e-3), name


def test_decay_of_one_is_exact() -> None:
    plain, _ = run_through(plain_run(), with_optimizer([]), 3)
    found, _ = run_through(plain_run(), with_optimizer([LayerwiseLearningRateDecay(decay=1.0)]), 3)
    assert losses(found) == pytest.approx(losses(plain), rel=1e-6)


@pytest.mark.parametrize("delay", [False, True])
def test_offloaded_optimizer_uses_the_rates(delay: bool) -> None:
    away = technique("memory.offload_optimizer", to="simulated", delay=delay, after=2)
    here, there = (
        run_through(plain_run(), with_optimizer([LayerwiseLearningRateDecay(decay=0.5), *more]), 2)[0]
        for more in ([], [away])
    )
    assert losses(there) == pytest.approx(losses(here), rel=1e-6)


def test_lora_factors_have_the_rate_of_their_block() -> None:
    run = compose(image_run(), with_optimizer([LayerwiseLearningRateDecay(decay=0.5), technique("adapters.lora")]), 2)
    model = run.build_model()
    rates = {name: p.own_factor for name, p in model.named_parameters() if "lora" in name}
    assert rates
    for name, rate in rates.items():
        assert rate == (0.5 ** (4 - int(name.split(".")[1])) if name.startswith("blocks.") else 1.0)


def test_pipeline_stages_count_blocks_of_other_ranks() -> None:
    model, whole = tiny_vit(depth=4), factors(tiny_vit(depth=4))
    for place in (0, 3):
        model.blocks[place] = StagePlaceholder(model.blocks[place])
    model.head = StagePlaceholder(model.head)
    assert factors(model) == {name: whole[name] for name, _ in model.named_parameters()}


def test_grown_model_has_rates_of_its_depth() -> None:
    growing = technique("growth.stacking", at=(1,))
    run = compose(plain_run(depth=4), with_optimizer([LayerwiseLearningRateDecay(decay=0.5), growing]), 3)
    state = run.start()
    rates = []
    for stop in (1, 3):
        advance(run, state, stop)
        assert state.model is not None
        rates.append({name: p.own_factor for name, p in state.model.named_parameters()})
    shallow, deep = ({name.split(".")[1] for name in each if name.startswith("blocks.")} for each in rates)
    assert len(shallow) < len(deep)
    assert rates[0]["blocks.0.mlp.up.weight"] == 0.5 ** len(shallow)
    assert rates[1]["blocks.0.mlp.up.weight"] == 0.5 ** len(deep)


def test_explain_lists_modules_before_and_after_blocks() -> None:
    run = compose(image_run(), with_optimizer([LayerwiseLearningRateDecay()]), 2)
    run.build_model()
    assert run.notes["optimizers.layerwise_lr_decay"] == [
        "before the blocks, at 0.237 of the rate: embedding, embedding.patch",
        "after the blocks, at 1 of the rate: head, norm",
    ]


def test_unknown_parameter_raises_integrity_error() -> None:
    with pytest.raises(IntegrityError, match="layerwise_lr_decay: 'weight' is not the parameter"):
        TransformOptimizer(nn.Linear(2, 2).named_parameters(), LayerwiseLearningRateDecay().update(adamw()))


def test_invalid_models_and_settings_are_refused() -> None:
    with pytest.raises(RefusedError, match="no list of equal blocks"):
        LayerwiseLearningRateDecay().model(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="embedding_pattern is not a regular expression"):
        LayerwiseLearningRateDecay(embedding_pattern="(")
    for decay in (0.0, 1.1):
        with pytest.raises(UsageError, match="decay must be above 0 and at most 1"):
            LayerwiseLearningRateDecay(decay=decay)
    with pytest.raises(UsageError, match="shared by all blocks have no depth"):
        compose(plain_run(), with_optimizer([LayerwiseLearningRateDecay(), technique("memory.share_parameters")]), 2)


@pytest.mark.parametrize("traced", [False, True])
def test_factor_transform_works_alone_and_traced(traced: bool) -> None:
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    optimizer = TransformOptimizer(
        parameters.items(), ScaleByParameterFactor(lambda name, _: -0.5 if name == "a" else -1.0)
    )
    if traced:
        optimizer.compile(backend="eager")
    for parameter in parameters.values():
        parameter.grad = torch.ones(2)
    optimizer.step()
    values: list[Tensor] = [*parameters.values()]
    assert values[0].tolist() == [0.5, 0.5] and values[1].tolist() == [0.0, 0.0]
