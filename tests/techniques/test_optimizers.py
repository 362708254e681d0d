"""Optimizers compared with their formulas in float64, and their invariants."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from optimizer_runs import (
    OPTIMIZERS,
    SHAPES,
    STEPS,
    Tensors,
    gradients,
    parameters,
    random_tensors,
    trained,
    trained_sharded,
)
from pair_runs import pair_run
from rank_processes import on_ranks
from tiny_models import FAMILIES, random_model
from tiny_runs import plain_run, run_through, technique
from torch import Tensor, nn

from thrifty.composition.compose import compose
from thrifty.core.errors import UsageError
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.models.hf_wrapper import HuggingFaceCausalLM
from thrifty.optim import chunked_update
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.transform_elements import AddDecayedWeights, ScaleBySchedule
from thrifty.techniques.optimizers.adafactor import adafactor
from thrifty.techniques.optimizers.lamb import lamb
from thrifty.techniques.optimizers.lars import lars
from thrifty.techniques.optimizers.lion import lion
from thrifty.techniques.optimizers.muon import muon, orthogonalized
from thrifty.techniques.optimizers.schedule_free import ScheduleFreeTransform, schedule_free
from thrifty.techniques.optimizers.sgd import sgd
from thrifty.techniques.optimizers.soap import eigenvectors, soap

MATRICES = [name for name, shape in SHAPES.items() if len(shape) == 2]
HIDDEN = [name for name in MATRICES if "embedding" not in name]
SLICES = {"blocks.0.attention.qkv.weight": [6, 2, 2], "blocks.0.mlp.up.weight": [8, 8]}

Rule = Callable[[str, int, Tensor, Tensor, dict[str, Tensor]], Tensor]
"""Function from (name, step from 1, parameter, gradient, state that starts at 0) to the new parameter."""


class Memory(dict):
    def __init__(self, like: Tensor):
        super().__init__()
        self.like = like

    def __missing__(self, key: str) -> Tensor:
        return torch.zeros_like(self.like)


def stepped(rule: Rule, steps: int = STEPS) -> Tensors:
    values = random_tensors(0)
    memories = {name: Memory(value) for name, value in values.items()}
    for step in range(steps):
        for name, gradient in gradients(step).items():
            values[name] = rule(name, step + 1, values[name], gradient, memories[name])
    return values


def assert_close(found: Tensors, wanted: Tensors, tolerance: float = 1e-12) -> None:
    for name in wanted:
        assert (found[name] - wanted[name]).abs().max() <= tolerance, name


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_adds_decay_before_momentum(momentum: float, nesterov: bool) -> None:
    def rule(name: str, t: int, w: Tensor, g: Tensor, memory: dict[str, Tensor]) -> Tensor:
        g = g + 0.1 * w if name in MATRICES else g
        memory["v"] = momentum * memory["v"] + g
        return w - 0.05 * (g + momentum * memory["v"] if nesterov else memory["v"])

    assert_close(trained(sgd(0.05, momentum, nesterov, 0.1)), stepped(rule))


def test_sgd_without_momentum_has_no_state() -> None:
    optimizer = TransformOptimizer(parameters().items(), sgd(momentum=0.0))
    assert optimizer.slots == {}


@pytest.mark.parametrize("make", [sgd, lamb, adafactor, schedule_free])
def test_a_weight_decay_of_zero_changes_no_bit(make: Callable[..., Any]) -> None:
    plain = chain(*(e for e in make(weight_decay=0.0).elements.values() if not isinstance(e, AddDecayedWeights)))
    found, wanted = (trained(each, dtype=torch.float32) for each in (make(weight_decay=0.0), plain))
    assert all(torch.equal(found[name], wanted[name]) for name in SHAPES)


@pytest.mark.parametrize("rate", ["outside", "inside"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_equals_the_paper_with_either_rate_placement(rate: str, nesterov: bool) -> None:
    def rule(name: str, t: int, w: Tensor, g: Tensor, memory: dict[str, Tensor]) -> Tensor:
        if name in MATRICES:
            g = 0.02 * w.norm() / (g.norm() + 0.1 * w.norm()) * (g + 0.1 * w)
        lr = 0.5 / t
        g = lr * g if rate == "inside" else g
        memory["v"] = 0.9 * memory["v"] + g
        step = g + 0.9 * memory["v"] if nesterov else memory["v"]
        return w - (step if rate == "inside" else lr * step)

    schedule = ScaleBySchedule(lambda step: 1 / (step + 1))
    assert_close(trained(lars(0.5, 0.9, 0.1, 0.02, nesterov, rate, schedule)), stepped(rule))


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("bounds", [(0.0, math.inf), (2.0, 5.0)])
def test_lamb_equals_the_paper(correct: bool, slices: bool, bounds: tuple[float, float]) -> None:
    def rule(name: str, t: int, w: Tensor, g: Tensor, memory: dict[str, Tensor]) -> Tensor:
        memory["m"] = 0.9 * memory["m"] + 0.1 * g
        memory["v"] = 0.99 * memory["v"] + 0.01 * g * g
        c1, c2 = (1 - 0.9**t, 1 - 0.99**t) if correct else (1.0, 1.0)
        u = (memory["m"] / c1) / ((memory["v"] / c2).sqrt() + 1e-6)
        if name not in MATRICES:
            return w - 0.01 * u
        u = u + 0.1 * w
        cuts = SLICES.get(name, [len(w)]) if slices else [len(w)]
        layers = zip(w.split(cuts), u.split(cuts), strict=True)
        return torch.cat([w - 0.01 * min(max(float(w.norm()), bounds[0]), bounds[1]) / u.norm() * u for w, u in layers])

    assert_close(trained(lamb(0.01, (0.9, 0.99), 1e-6, 0.1, correct, bounds, slices)), stepped(rule))


def test_lion_equals_the_paper() -> None:
    def rule(name: str, t: int, w: Tensor, g: Tensor, memory: dict[str, Tensor]) -> Tensor:
        u = (0.9 * memory["m"] + 0.1 * g).sign() + (0.5 * w if name in MATRICES else 0)
        memory["m"] = 0.99 * memory["m"] + 0.01 * g
        return w - 0.01 * u

    assert_close(trained(lion(0.01, (0.9, 0.99), 0.5)), stepped(rule))


def newton_schulz(g: Tensor) -> Tensor:
    x = g / g.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x


@pytest.mark.parametrize("scale", ["original", "match_rms"])
@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_equals_the_post_with_adamw_for_the_rest(scale: str, slices: bool, nesterov: bool) -> None:
    def rule(name: str, t: int, w: Tensor, g: Tensor, memory: dict[str, Tensor]) -> Tensor:
        decay = 0.1 * w if name in MATRICES else 0
        if name not in HIDDEN:
            memory["m"] = 0.9 * memory["m"] + 0.1 * g
            memory["v"] = 0.95 * memory["v"] + 0.05 * g * g
            return w - 0.02 * (memory["m"] / (1 - 0.9**t) / ((memory["v"] / (1 - 0.95**t)).sqrt() + 1e-8) + decay)
        memory["v"] = 0.9 * memory["v"] + g
        u = g + 0.9 * memory["v"] if nesterov else memory["v"]
        layers = []
        for layer in u.split(SLICES.get(name, [len(w)]) if slices else [len(w)]):
            r, c = layer.shape
            size = max(1, r / c) ** 0.5 if scale == "original" else 0.2 * max(r, c) ** 0.5
            layers.append(size * newton_schulz(layer))
        return w - 0.01 * (torch.cat(layers) + decay)

    ours = muon(0.01, 0.9, nesterov, 0.1, scale, slices=slices, dtype=torch.float64, adamw_lr=0.02)
    assert_close(trained(ours), stepped(rule), 1e-10)


def test_soap_is_adam_in_shampoo_axes() -> None:
    def rule(name: str, t: int, w: Tensor, g: Tensor, memory: dict[str, Tensor]) -> Tensor:
        sides = [
            dim for dim in (0, 1) if w.ndim == 2 and w.shape[dim] <= 6
        ]  # sides whose axes all have gradients at once

        def turn(x: Tensor, back: bool = False) -> Tensor:
            for dim in sides:
                axes = memory[f"Q{dim}"] if back else memory[f"Q{dim}"].T
                x = axes @ x if dim == 0 else x @ axes.T
            return x

        moved = torch.zeros_like(w)
        if t > 1:
            memory["m"] = 0.9 * memory["m"] + 0.1 * g
            memory["v"] = 0.95 * memory["v"] + 0.05 * turn(g) ** 2
            corrected = (1 - 0.95 ** (t - 1)) ** 0.5 / (1 - 0.9 ** (t - 1))
            moved = corrected * turn(turn(memory["m"]) / (memory["v"].sqrt() + 1e-8), back=True)
        for dim in sides:
            spread = memory.get(f"L{dim}", torch.zeros(w.shape[dim], w.shape[dim]).double())
            memory[f"L{dim}"] = 0.95 * spread + 0.05 * (g @ g.T if dim == 0 else g.T @ g)
            if t == 1:
                memory[f"Q{dim}"] = torch.linalg.eigh(memory[f"L{dim}"])[1].flip(1)
            elif (t - 1) % 3 == 0:
                power = memory[f"L{dim}"] @ memory[f"Q{dim}"]
                order = (memory[f"Q{dim}"] * power).sum(0).argsort(descending=True)
                memory["v"] = memory["v"].index_select(dim, order)
                memory[f"Q{dim}"] = torch.linalg.qr(power[:, order])[0]
        return w - 0.02 * (moved + (0.1 * w if name in MATRICES else 0))

    assert_close(trained(soap(0.02, (0.9, 0.95), 1e-8, 0.1, every=3, max_dim=6)), stepped(rule), 1e-10)


def test_soap_survives_nan_eigenvectors(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.linalg.eigh

    def eigh(side: Tensor) -> Any:
        found = plain(side)
        if side.dtype == torch.float32:  # as LAPACK may fail if most rows are zero
            found.eigenvectors.fill_(torch.nan)
        return found

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    side = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    assert torch.allclose(eigenvectors(side).abs(), torch.full((2, 2), 0.5**0.5))


def test_soap_survives_rows_of_zeros() -> None:
    records, _ = run_through(pair_run(), [technique("optimizers.soap")], 3)
    assert all(math.isfinite(record.loss) for record in records)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_soap_decomposes_in_float32_for_16_bit_parameters(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).to(dtype))
    optimizer, start = TransformOptimizer([("weight", weight)], soap(0.05, every=2)), float(weight.detach().norm())
    for _ in range(40):
        weight.grad = weight.detach().clone()
        optimizer.step()
    assert float(weight.detach().norm()) < 0.5 * start and weight.dtype == dtype
    assert optimizer.slots["scale_by_soap.left_axes"][0].dtype == torch.float32


def test_adafactor_equals_the_paper_as_torch_reads_it() -> None:
    def rule(name: str, t: int, w: Tensor, g: Tensor, memory: dict[str, Tensor]) -> Tensor:
        fresh, eps = t**-0.8, 1e-3
        memory["all"] = (1 - fresh) * memory["all"] + fresh * g * g
        second = memory["all"]
        if w.ndim == 2:  # row and column means of the mean
            row, column = second.mean(1, keepdim=True), second.mean(0, keepdim=True)
            second = row @ column / max(float(row.mean()), eps)
        u = g / second.sqrt().clamp(min=eps)
        u = u / max(1.0, float(u.square().mean().sqrt()) / 0.5)
        size = max(1e-3, float(w.square().mean().sqrt())) * min(0.3, t**-0.5)
        return w - size * u - (0.3 * 0.1 * w if name in MATRICES else 0)

    assert_close(trained(adafactor(0.3, -0.8, 0.5, 1e-3, 1e-3, 0.1)), stepped(rule))


@pytest.mark.parametrize(("power", "rate_power", "warmup"), [(0.0, 2.0, 0), (0.0, 2.0, 4), (1.5, 1.0, 4)])
def test_schedule_free_equals_its_three_sequences(power: float, rate_power: float, warmup: int) -> None:
    weights: list[float] = []
    averages: Tensors = {}

    def rule(name: str, t: int, y: Tensor, g: Tensor, memory: dict[str, Tensor]) -> Tensor:
        if t == 1:
            memory["x"] = memory["z"] = y
        lr = 0.01 * (min(t / warmup, 1.0) if warmup else 1.0)
        if len(weights) < t:
            weights.append(t**power * lr**rate_power)
        memory["v"] = 0.99 * memory["v"] + 0.01 * g * g
        d = g / ((memory["v"] / (1 - 0.99**t)).sqrt() + 1e-8) + (0.1 * y if name in MATRICES else 0)
        memory["z"] = memory["z"] - lr * d
        share = weights[-1] / sum(weights[:t])
        memory["x"] = (1 - share) * memory["x"] + share * memory["z"]
        averages[name] = memory["x"]
        return 0.1 * memory["z"] + 0.9 * memory["x"]

    wanted = stepped(rule)
    held = parameters()
    optimizer = TransformOptimizer(held.items(), schedule_free(0.01, (0.9, 0.99), 1e-8, 0.1, warmup, power, rate_power))
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            held[name].grad = gradient
        optimizer.step()
    assert_close(held, wanted)
    assert_close(dict(zip(optimizer.names, optimizer.eval_weights(), strict=True)), averages)
    before = {name: parameter.detach().clone() for name, parameter in held.items()}
    with optimizer.use_eval_weights():
        assert_close(held, averages)
    assert_close(held, before, 0.0)


def test_schedule_free_average_is_independent_of_resume() -> None:
    straight, resumed = ScheduleFreeTransform(1.0, warmup=7, power=0.5), ScheduleFreeTransform(1.0, warmup=7, power=0.5)
    numbers = [straight.scalars(step, step) for step in range(30)]
    assert [resumed.scalars(step, step) for step in range(20, 30)] == numbers[20:]
    grown = [straight.scalars(step, step - 20)["share"] for step in range(20, 30)]
    assert grown[0] == 1.0 and grown == sorted(grown, reverse=True)


def one_step(transform: GradientTransform, values: Tensors, given: Tensors) -> Tensors:
    """Return the change of each parameter in the first step."""
    held = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    optimizer = TransformOptimizer(held.items(), transform)
    for name, parameter in held.items():
        parameter.grad = given[name].clone()
    optimizer.step()
    return {name: parameter.detach() - values[name] for name, parameter in held.items()}


@pytest.mark.parametrize(
    "make",
    [lambda: lamb(0.1, weight_decay=0.0), lambda: lars(1.0, weight_decay=0.0, coefficient=0.1)],
    ids=["lamb", "lars"],
)
@settings(max_examples=20)
@given(factor=some.floats(1e-4, 1e4), layer=some.sampled_from(MATRICES))
def test_trust_ratio_scales_steps_with_weights(
    make: Callable[[], GradientTransform], factor: float, layer: str
) -> None:
    values = random_tensors(0)
    before = one_step(make(), values, gradients(0))
    after = one_step(make(), values | {layer: values[layer] * factor}, gradients(0))
    for name in SHAPES:
        scaled = before[name] * (factor if name == layer else 1.0)
        torch.testing.assert_close(after[name], scaled, rtol=1e-8, atol=1e-10 * max(1.0, factor))


@settings(max_examples=20)
@given(factor=some.floats(1e-6, 1e6))
def test_lion_ignores_the_scale_of_gradients(factor: float) -> None:
    given_all = gradients(0)
    scaled = {name: gradient * factor for name, gradient in given_all.items()}
    found, wanted = one_step(lion(), random_tensors(0), scaled), one_step(lion(), random_tensors(0), given_all)
    assert all(torch.equal(found[name], wanted[name]) for name in SHAPES)


@settings(max_examples=20)
@given(decay=some.floats(0.0, 10.0), coefficient=some.floats(1e-3, 10.0), seed=some.integers(0, 99))
def test_vectors_have_no_decay_or_trust_ratio(decay: float, coefficient: float, seed: int) -> None:
    values, given_all = random_tensors(seed), gradients(seed)
    by_lars = one_step(lars(0.1, 0.9, decay, coefficient), values, given_all)
    by_lamb = one_step(lamb(0.1, weight_decay=decay), values, given_all)
    for name in SHAPES.keys() - MATRICES:
        torch.testing.assert_close(by_lars[name], -0.1 * given_all[name])
        torch.testing.assert_close(by_lamb[name], -0.1 * given_all[name].sign(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("empty", ["weights", "gradient"])
def test_zero_layer_has_trust_ratio_one(empty: str) -> None:
    values, given_all = random_tensors(0), gradients(0)
    name = "blocks.0.attention.out.weight"
    (values if empty == "weights" else given_all)[name].zero_()
    found = one_step(lars(0.1, 0.9, 0.5, 0.01), values, given_all)[name]
    torch.testing.assert_close(found, -0.1 * (given_all[name] + 0.5 * values[name]))


@settings(max_examples=30)
@given(rows=some.integers(1, 12), columns=some.integers(1, 12), factor=some.floats(1e-3, 1e3))
def test_orthogonalization_keeps_singular_vectors(rows: int, columns: int, factor: float) -> None:
    matrix = torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(rows * columns))
    found = orthogonalized(matrix, dtype=torch.float64)
    torch.testing.assert_close(orthogonalized(matrix * factor, dtype=torch.float64), found)
    torch.testing.assert_close(orthogonalized(matrix.T, dtype=torch.float64), found.T)
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    new = torch.einsum("ri,rc,ic->i", left, found, right)
    torch.testing.assert_close(left @ torch.diag(new) @ right, found)
    assert new.min() >= 0 and new.max() < 1.25
    assert new[sizes > 0.02 * sizes.square().sum().sqrt()].min() > 0.6
    together = orthogonalized(torch.stack([matrix, 2 * matrix]), dtype=torch.float64)
    torch.testing.assert_close(together, torch.stack([found, found]))


def test_sharded_optimizers_equal_the_single_process() -> None:
    first, second = on_ranks(2, trained_sharded)
    assert first == second
    for name, make in OPTIMIZERS.items():
        found = {key: torch.tensor(value, dtype=torch.float64) for key, value in first[name].items()}
        assert_close(found, trained(make()), 1e-10)


def turned(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor


def apart(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


# SOAP's axes without gradients depend on rounding
@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"soap"}))
@pytest.mark.parametrize(
    "lie", [(turned, torch.clone), (torch.clone, turned), (turned, turned), (apart, torch.clone), (torch.clone, apart)]
)
def test_memory_layout_does_not_matter(
    name: str, lie: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_update, "CHUNK_ELEMENTS", 16)  # split matrices into pieces by row
    held = {key: nn.Parameter(lie[0](value)) for key, value in random_tensors(0).items()}
    optimizer = TransformOptimizer(held.items(), OPTIMIZERS[name]())
    for step in range(STEPS):
        for key, gradient in gradients(step).items():
            held[key].grad = lie[1](gradient)
        optimizer.step()
    assert_close({key: value.detach() for key, value in held.items()}, trained(OPTIMIZERS[name]()), 1e-11)


def test_schedules_multiply_every_rate() -> None:
    for name, make in OPTIMIZERS.items():
        if name != "schedule-free":
            stopped = chain(make(), ScaleBySchedule(lambda step: float(step == 0)))
            assert_close(trained(stopped), trained(make(), steps=1), 1e-14)


def test_factors_multiply_schedule_free_steps() -> None:
    halved = schedule_free(0.02, warmup=3, factors=ScaleBySchedule(lambda step: 0.5))
    assert_close(trained(halved), trained(schedule_free(0.01, warmup=3)), 1e-14)


WITH_EPS = {
    "adafactor": "eps1",
    "adamw": "eps",
    "lamb": "eps",
    "muon": "adamw_eps",
    "schedule_free": "eps",
    "soap": "eps",
}


@pytest.mark.parametrize(("name", "eps"), WITH_EPS.items())
def test_zero_eps_is_refused(name: str, eps: str) -> None:
    for value in (0.0, 1e-30):
        with pytest.raises(UsageError, match=f"optimizers.{name}: {eps} is {value}"):
            technique(f"optimizers.{name}", **{eps: value})


@pytest.mark.parametrize(("name", "eps"), WITH_EPS.items())
def test_smallest_eps_keeps_unused_weights_finite(name: str, eps: str) -> None:
    """The last positions of the tiny model's table are never used."""
    _, state = run_through(plain_run(style="gpt"), [technique(f"optimizers.{name}", **{eps: 1e-20})], 2)
    assert state.model is not None
    assert all(parameter.isfinite().all() for parameter in state.model.parameters())


def with_linear_layers(model: nn.Module) -> nn.Module:
    """Replace each `Conv1D` of a transformers model by `nn.Linear`."""
    for name, layer in [*model.named_modules()]:
        if type(layer).__name__ == "Conv1D":
            linear = nn.Linear(*layer.weight.shape)
            linear.load_state_dict({"weight": layer.weight.T, "bias": layer.bias})
            model.set_submodule(name, linear)
    return model


@pytest.mark.parametrize("scale", ["original", "match_rms"])
@pytest.mark.parametrize("others", [[], ["precision.bfloat16_weights"], ["memory.offload_optimizer"]])
def test_muon_step_is_equal_for_transposed_matrices(scale: str, others: list[str]) -> None:
    def stepped(change: Callable[[nn.Module], nn.Module]) -> dict[str, Tensor]:
        plain = plain_run()
        model = change(HuggingFaceCausalLM(random_model(FAMILIES["gpt2"]())))
        chosen = [
            technique("optimizers.muon", scale=scale, lr=0.1, weight_decay=0.0, precision="float32"),
            *map(technique, others),
        ]
        run = compose(replace(plain, build=lambda: model), chosen, 1)
        state = run.start()
        before = {name: parameter.detach().clone() for name, parameter in state.model.named_parameters()}
        for name, parameter in state.model.named_parameters():
            gradient = torch.randn(sorted(parameter.shape), generator=torch.Generator().manual_seed(len(name)))
            flipped = parameter.ndim == 2 and parameter.shape != gradient.shape
            parameter.grad = (gradient.T if flipped else gradient).to(parameter.dtype).contiguous()
        state.optimizer.step()
        return {name: (p.detach() - before[name]).float() for name, p in state.model.named_parameters()}

    kept, linear = stepped(lambda model: model), stepped(with_linear_layers)
    for name, moved in linear.items():
        size = float(moved.norm())
        assert float(kept[name].norm()) == pytest.approx(size, rel=0.02), name
