"""Optimizers of `thrifty.optim` as citizens of torch: groups, schedulers, state dicts, closures."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import thrifty
from thrifty.composition.technique_optimizer import TechniqueOptimizer
from thrifty.core.errors import UsageError
from thrifty.interface.optimizers import optimizer_named, optimizer_names

NAMES = optimizer_names()
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
SGD = {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers).double()


def make(name: str, params: Any, **settings: Any) -> TechniqueOptimizer:
    return optimizer_named(name)(params, total_steps=40, **settings)


def backward(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step)).double()
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    loss.backward()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, scheduler: Any = None) -> Tensor:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", ["AdamW", "Sgd"])
def test_sparse_gradients_are_refused_with_the_fix(name: str) -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1))
    model(torch.arange(9)).sum().backward()
    with pytest.raises(UsageError, match=r"the gradient of '0\.weight' is sparse") as error:
        make(name, model, lr=1e-2).step()
    assert error.value.fix == "build the layer with sparse=False: nn.Embedding(…, sparse=False)"


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=4),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 12),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.9)]
    ),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-1, step_size_up=5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LinearLR": lambda o: schedulers.LinearLR(o),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.95),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [3, 7]),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.05, total_steps=20),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=12),
    "SequentialLR": lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o), schedulers.StepLR(o, 2)], [5]),
    "StepLR": lambda o: schedulers.StepLR(o, 3),
}


def test_every_scheduler_of_torch_is_among_those_compared() -> None:
    bases = {"LRScheduler", "_LRScheduler"}
    kinds = [each for each in vars(schedulers).values() if isinstance(each, type)]
    known = {each.__name__ for each in kinds if issubclass(each, schedulers.LRScheduler)} - bases
    assert known - {"ReduceLROnPlateau"} == set(SCHEDULERS)  # which follows a metric


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(
    ("ours", "torchs", "settings"), [("AdamW", torch.optim.AdamW, ADAMW), ("Sgd", torch.optim.SGD, SGD)]
)
def test_adamw_and_sgd_under_each_scheduler_are_those_of_torch(
    ours: str, torchs: type[torch.optim.Optimizer], settings: dict[str, Any], name: str
) -> None:
    values = []
    for kind in (optimizer_named(ours), torchs):
        model = network()
        optimizer = kind(model.parameters(), **settings)
        values.append(train(model, optimizer, range(15), SCHEDULERS[name](optimizer)))
    torch.testing.assert_close(*values, rtol=1e-12, atol=1e-14)


def test_empty_groups_and_zero_rates_act_as_in_torch() -> None:
    values = []
    for kind in (thrifty.optim.AdamW, torch.optim.AdamW):
        model = network()
        groups = [{"params": []}, {"params": [*model[0].parameters()]}, {"params": [*model[3].parameters()], "lr": 0.0}]
        optimizer = kind(groups, **ADAMW)
        before = model[3].weight.detach().clone()
        values.append(train(model, optimizer, range(4)))
        assert torch.equal(model[3].weight, before)
        other = kind([{"params": [*group["params"]]} for group in groups], **ADAMW)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        values.append(train(model, other, range(4, 8)))
    torch.testing.assert_close(values[:2], values[2:], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_scaler_skips_overflowing_steps(name: str) -> None:
    values = []
    for enabled in (False, True):
        model = network().float()
        optimizer, scaler = make(name, model), torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
        for step in range(5):
            if step == 2 and not enabled:
                continue
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean() * (torch.inf if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        values.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*values)


def test_compiled_steps_equal_plain_ones_and_closures_run_once() -> None:
    values = []
    for compiled in (False, True):
        model = network()
        optimizer = thrifty.optim.AdamW(model, lr=1e-2)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for number in range(3):
            backward(model, number)
            step()
            optimizer.zero_grad()
        values.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*values)
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return backward(model, 0)

    with torch.no_grad():
        assert optimizer.step(closure) > 0
    assert calls == [True]


def test_schedules_reach_what_muon_leaves_to_adamw() -> None:
    """By a scheduler of torch, by a loop that sets "lr", and by a loop that sets both rates."""

    def moved(rate: float, how: str) -> Tensor:
        model = network()
        before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
        optimizer = thrifty.optim.Muon(model, lr=1e-2, adamw_lr=3e-3)
        if how == "scheduler":
            schedulers.LambdaLR(optimizer, lambda step: rate)
        else:
            both = {"adamw_lr": 3e-3 * rate} if how == "both" else {}
            optimizer.param_groups[0].update(lr=1e-2 * rate, **both)
        return train(model, optimizer, range(3)) - before

    for how in ("scheduler", "lr"):
        assert not moved(0.0, how).any()
        torch.testing.assert_close(moved(0.5, how), moved(0.5, "both"))


@pytest.mark.parametrize(("scale", "share"), [("match_rms", 1.0), ("original", 0.05)])
def test_one_learning_rate_of_muon_suffices(scale: str, share: float) -> None:
    results = []
    for settings in ({}, {"adamw_lr": 4e-3 * share}):
        model = network()
        optimizer = thrifty.optim.Muon(model, lr=4e-3, scale=scale, **settings)
        schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        results.append(train(model, optimizer, range(3)))
    assert torch.equal(*results)


def test_parameters_added_after_the_optimizer_are_named() -> None:
    model = network()
    early = thrifty.optim.AdamW(model, lr=1e-3)
    model = thrifty.apply(model, "lora", rank=2)
    with pytest.warns(UserWarning, match="trainable parameters of the model are not in the optimizer"):
        train(model, early, range(1))
    late = thrifty.optim.AdamW(model, lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, early, range(1))  # said once
        train(model, late, range(2))


def test_parameters_unfrozen_later_are_named_or_trained() -> None:
    model = network()
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    optimizer = thrifty.optim.AdamW(model, lr=1e-3)
    everything = thrifty.optim.AdamW(model.named_parameters(), lr=1e-3)
    train(model, optimizer, range(2))
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].named_parameters()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(1))
    model[3].requires_grad_(True)
    with pytest.warns(UserWarning, match=r"2 trainable parameters .*, such as 3\.weight: .* model\.named_parameters"):
        train(model, optimizer, range(1))
    before = model[3].weight.detach().clone()
    train(model, everything, range(1))
    assert not torch.equal(model[3].weight, before)


def test_frozen_parameters_have_no_state() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = thrifty.optim.AdamW(model.named_parameters(), lr=1e-3)
    model, optimizer = thrifty.apply((model, optimizer), "ema")
    train(model, optimizer, range(2))
    trained = [index for index, each in enumerate(model.parameters()) if each.requires_grad]
    assert [*optimizer.state_dict()["state"]] == trained
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(1))
    assert [*optimizer.state_dict()["state"]] == trained


def test_a_state_of_a_missing_technique_is_refused() -> None:
    model = network()
    model, averaged = thrifty.apply((model, thrifty.optim.Muon(model, lr=1e-2)), "ema")
    train(model, averaged, range(3))
    other = network()
    plain = thrifty.optim.Muon(other, lr=1e-2)
    with pytest.raises(UsageError, match=r"of a technique that the optimizer lacks\n.*\"ema\""):
        plain.load_state_dict(averaged.state_dict())
    train(other, plain, range(2))
    other, again = thrifty.apply((other, thrifty.optim.Muon(other, lr=1e-2)), "ema")
    again.load_state_dict(averaged.state_dict())
    assert again.state_dict()["state"].keys() == averaged.state_dict()["state"].keys()


def test_a_plateau_lowers_the_rate() -> None:
    model = network()
    optimizer = thrifty.optim.AdamW(model, lr=1e-2)
    scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_can_change_between_steps(name: str) -> None:
    for field in fields(optimizer_named(name).technique):
        model = network()
        optimizer = make(name, model)
        train(model, optimizer, range(3))
        value = optimizer.param_groups[0][field.name]
        if type(value) not in (float, tuple) or value == 0.0 or (name, field.name) == ("ScheduleFreeAdamW", "lr"):
            continue
        changed = value * 0.7 if type(value) is float else tuple(each * 0.7 for each in value)
        again = copy.deepcopy(model)
        other = make(name, again, **{field.name: changed})
        state = copy.deepcopy(optimizer.state_dict())
        state["param_groups"][0][field.name] = changed
        other.load_state_dict(state)
        optimizer.param_groups[0][field.name] = changed
        torch.testing.assert_close(
            train(model, optimizer, range(3, 6)), train(again, other, range(3, 6)), rtol=0, atol=0, msg=field.name
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.1), (0.1, 0.0)])
def test_weight_decay_starts_and_stops_between_steps(name: str, before: float, after: float) -> None:
    model = network()
    optimizer = make(name, model, weight_decay=before)
    train(model, optimizer, range(3))
    again = copy.deepcopy(model)
    other = make(name, again, weight_decay=after)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["weight_decay"] = after
    other.load_state_dict(state)
    optimizer.param_groups[0]["weight_decay"] = after
    assert torch.equal(train(model, optimizer, range(3, 6)), train(again, other, range(3, 6)))


def test_a_setting_that_needs_another_state_cannot_change() -> None:
    model = network()
    optimizer = thrifty.optim.AdamW(model)
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["betas"] = (0.0, 0.9)
    with pytest.raises(UsageError, match="betas cannot change between steps"):
        train(model, optimizer, range(2, 3))


def test_an_optimizer_with_a_schedule_refuses_schedulers() -> None:
    model = network()
    optimizer = make("ScheduleFreeAdamW", model)
    with pytest.raises(UsageError, match="lr cannot change between steps"):
        train(model, optimizer, range(3), schedulers.ExponentialLR(optimizer, 0.9))


def test_groups_and_missing_gradients_act_as_in_torch() -> None:
    values = []
    for kind in (thrifty.optim.AdamW, torch.optim.AdamW):
        model = network()
        groups = [
            {"params": list(model[0].parameters()), "lr": 0.03},
            {"params": list(model[3].parameters()), "weight_decay": 0.5},
        ]
        optimizer = kind(groups, **ADAMW)
        train(model, optimizer, range(4))
        optimizer.add_param_group({"params": [*model[5].parameters(), *model[1].parameters()], "weight_decay": 0.0})
        for step in range(4, 14):
            optimizer.zero_grad()
            backward(model, step)
            for parameter in model[3].parameters() if step % 3 == 1 else ():
                parameter.grad = None
            if step in (6, 7):
                model[0].bias.grad = None
            optimizer.step()
        values.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*values, rtol=1e-12, atol=1e-14)


def test_groups_with_equal_names_keep_their_own_settings() -> None:
    rates, models = (1e-2, 1e-3), (network(), network())
    groups = [{"params": each.named_parameters(), "lr": rate} for each, rate in zip(models, rates, strict=True)]
    optimizer = thrifty.optim.AdamW(groups)
    for step in range(4):
        optimizer.zero_grad()
        for model in models:
            backward(model, step)
        optimizer.step()
    for model, rate in zip(models, rates, strict=True):
        alone = network()
        expected = train(alone, thrifty.optim.AdamW(alone, lr=rate), range(4))
        actual = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["state dict", "deepcopy", "pickle", "file"])
def test_a_copy_continues_to_the_same_bits(name: str, way: str, tmp_path: Any) -> None:
    model = network()
    optimizer = make(name, model)
    train(model, optimizer, range(4))
    if way == "deepcopy":
        again, other = copy.deepcopy((model, optimizer))
    elif way == "pickle":
        again, other = pickle.loads(pickle.dumps((model, optimizer)))  # noqa: S301
    else:
        again = copy.deepcopy(model)
        other = make(name, again)
        state = optimizer.state_dict()
        if way == "file":
            torch.save(state, tmp_path / "state")
            state = torch.load(tmp_path / "state", weights_only=True)
        other.load_state_dict(copy.deepcopy(state))
    assert torch.equal(train(model, optimizer, range(4, 9)), train(again, other, range(4, 9)))


@pytest.mark.parametrize(
    "other",
    [
        lambda: ("Lion", network()),
        lambda: ("AdamW", nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]).double()),
    ],
    ids=["another technique", "other shapes"],
)
def test_another_optimizers_state_is_refused_without_changes(other: Callable) -> None:
    model = network()
    optimizer = thrifty.optim.AdamW(model)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    name, foreign = other()
    state = make(name, foreign)
    for parameter in foreign.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.step()
    with pytest.raises((UsageError, ValueError)):
        optimizer.load_state_dict(state.state_dict())
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    train(model, optimizer, range(2, 3))


def test_the_state_keeps_its_own_dtypes() -> None:
    model = nn.Linear(256, 64)
    optimizer = thrifty.apply(thrifty.optim.AdamW(model), "optimizer_state", format="int8")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    other = thrifty.apply(thrifty.optim.AdamW(copy.deepcopy(model)), "optimizer_state", format="int8")
    other.load_state_dict(state)
    formats = {slot: tensor.dtype for slot, tensor in other.state[next(iter(other.state))].items()}
    assert {torch.int8, torch.uint8} & set(formats.values())
    torch.testing.assert_close(other.state_dict()["state"], state["state"], rtol=0, atol=0)


def test_weight_decay_spares_vectors_of_a_model_only() -> None:
    moved = {}
    for how, params in {"model": lambda m: m, "bare": lambda m: m.parameters()}.items():
        model = network()
        before = model[0].bias.detach().clone()
        optimizer = thrifty.optim.Sgd(params(model), lr=0.1, weight_decay=0.5)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        moved[how] = not torch.equal(model[0].bias, before)
    assert moved == {"model": False, "bare": True}


def test_name_based_optimizers_refuse_bare_parameters() -> None:
    with pytest.raises(UsageError, match=r"pass the model, or model.named_parameters\(\)"):
        thrifty.optim.Muon(network().parameters())
    thrifty.optim.Muon(network().named_parameters())


def test_a_fraction_of_a_run_requires_its_number_of_steps() -> None:
    with pytest.raises(UsageError, match=r"warmup is 0\.05"):
        thrifty.optim.ScheduleFreeAdamW(network())
    assert thrifty.optim.ScheduleFreeAdamW(network(), total_steps=100).param_groups[0]["warmup"] == 5


@pytest.mark.parametrize(("settings", "words"), [({"lrr": 1.0}, "did you mean 'lr'"), ({"lr": -1.0}, "lr is -1")])
def test_settings_are_checked(settings: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        thrifty.optim.AdamW(network(), **settings)


def test_an_unknown_optimizer_is_named_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean 'AdamW'"):
        _ = thrifty.optim.AdamWW


def test_no_parameter_is_kept_outside_of_groups_and_state() -> None:
    model = network()
    optimizer = thrifty.optim.Muon(model)
    train(model, optimizer, range(2))
    known = {id(parameter) for parameter in model.parameters()}
    outside = {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
    assert not [path for path, tensor in tensors_in(outside, "") if id(tensor) in known]


def tensors_in(value: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from tensors_in(each, f"{path}.{key}", seen)
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from tensors_in(each, f"{path}[{place}]", seen)
    elif hasattr(value, "__dict__") and type(value).__module__.startswith("thrifty"):
        yield from tensors_in(vars(value), path, seen)


def test_a_closure_returns_its_loss_and_gradients() -> None:
    model = network()
    optimizer = thrifty.optim.Lion(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(model, 0)

    before = [parameter.clone() for parameter in model.parameters()]
    assert optimizer.step(closure).item() > 0
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@given(st.sampled_from(NAMES), st.lists(st.booleans(), min_size=6, max_size=6), st.integers(0, 2**16))
def test_a_parameter_without_a_gradient_is_left_as_it_is(name: str, present: list[bool], seed: int) -> None:
    model = network()
    optimizer = make(name, model)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    backward(model, seed)
    parameters = list(model.parameters())
    for parameter, is_present in zip(parameters, present, strict=False):
        if not is_present:
            parameter.grad = None
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.step()
    for parameter, old in zip(parameters, before, strict=True):
        assert torch.equal(parameter, old) == (parameter.grad is None or not parameter.grad.any())


def test_the_next_rate_is_known_before_steps_and_with_schedulers() -> None:
    model = nn.Linear(4, 4)
    optimizer = thrifty.optim.AdamW(model, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    twin = copy.deepcopy(model)
    unasked = thrifty.optim.AdamW(twin, lr=0.1)
    other = torch.optim.lr_scheduler.StepLR(unasked, 1, 0.5)
    for _ in range(3):
        assert optimizer.learning_rate() == optimizer.param_groups[0]["lr"]
        assert optimizer.scalars()["scale_by_learning_rate.factor"] == -optimizer.param_groups[0]["lr"]
        for each, schedule, own in ((optimizer, scheduler, model), (unasked, other, twin)):
            own(torch.ones(2, 4)).sum().backward()
            each.step()
            schedule.step()
            each.zero_grad()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


class UnusualNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.to_logits = nn.Linear(16, 50)


def test_muon_leaves_embeddings_and_heads_of_any_name_to_adamw() -> None:
    summary = thrifty.summary(thrifty.optim.Muon(UnusualNames()))
    (parts,) = summary.groups
    halves = {key.partition(":")[0]: set(names) for key, names in parts.items()}
    matrices = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    assert halves["hidden"] == {f"blocks.{block}.{name}" for block in (0, 1) for name in matrices}
    assert {"tok.weight", "to_logits.weight"} < halves["rest"]
    said = repr(summary)
    assert "hidden: scale_by_momentum, orthogonalize, " in said and "blocks.N.linear1.weight" in said
    perceptron = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    (parts,) = thrifty.summary(thrifty.optim.Muon(perceptron)).groups
    assert [names for key, names in parts.items() if key.startswith("hidden")] == [("0.weight", "2.weight")]


def test_optimizer_summaries_have_groups_rates_and_techniques() -> None:
    model = nn.Linear(4, 3)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}]
    optimizer = thrifty.apply(thrifty.optim.AdamW(groups, lr=0.2), "optimizer_state", format="int8")
    summary = thrifty.summary(optimizer)
    assert summary.learning_rates == (0.1, 0.2) and summary.elements == (12, 3)
    assert summary.added == ("precision.optimizer_state",) and "scale_by_adam" in repr(summary)
    plain = thrifty.summary(torch.optim.SGD(model.parameters(), lr=0.1))
    assert plain.groups == ({"SGD": ("parameter0", "parameter1")},) and "SGD of 15 elements" in repr(plain)
    with pytest.raises(UsageError, match="summary requires a model or an optimizer"):
        thrifty.summary(groups)  # type: ignore[call-overload]
