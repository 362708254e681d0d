"""Techniques in a loop of the user's own do what they do in the trainer, or are refused in words."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from own_loop_ranks import difference_by_hand, refusals_by_hand
from rank_processes import on_ranks
from tiny_runs import advance, plain_run, technique, with_optimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thrifty
from thrifty import techniques
from thrifty.composition.compose import compose
from thrifty.core.claims import Claim
from thrifty.core.errors import NeedsTrainer, RefusedError, ThriftyError, UsageError
from thrifty.core.randomness import start_draws
from thrifty.core.state import TrainState
from thrifty.core.technique import Technique
from thrifty.optim.weight_masks import masks_in
from thrifty.training.loop import step_seed

STEPS = 8
ELSEWHERE = {"losses.z_loss", "curriculum.low_frequency", "curriculum.resolution", "curriculum.sequence_length"}
ELSEWHERE |= {"data_selection.prune", "large_batch.batch_ramp"}
"""Applied to losses and data: tests/interface/test_changed_data.py."""
NAMES = [name for name in techniques.own_names() if name not in ELSEWHERE and not name.startswith("parallelism.")]
LEAST = 65
"""Techniques that work in a loop by hand."""
LOSSY = {"memory.compress_activations": 0.02, "precision.mixed": 1e-3}
"""Relative difference of losses where values are drawn that depend on the trainer's own count of passes, or the head is
on the other side of a rounding."""


def trained_by_hand(chosen: Technique) -> list[float]:
    """Losses of a plain loop over the batches that the trainer takes."""
    plain = plain_run(depth=4, style="gpt")
    model = plain.build().train()
    optimizer = thrifty.optim.AdamW(model, **vars(technique("optimizers.adamw")))
    batch_size = {"batch": plain.source.batch} if chosen.name == "large_batch.scale_learning_rate" else {}
    model, optimizer = thrifty.apply((model, optimizer), chosen, total_steps=STEPS, **batch_size)
    losses = []
    for step in range(STEPS):
        start_draws(step_seed(0, step, 0), torch.device("cpu"))
        batch = plain.source.at(step)
        loss = (plain.objective.losses(plain.objective.predict(model, batch), batch) * batch.weight).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_own_loops_have_the_trainers_losses_or_are_refused(name: str) -> None:
    chosen = technique(name, **({"autoencoder": False} if name == "attention.vitcod" else {}))
    if Claim.OPTIMIZER in chosen.claims:
        with pytest.raises(ThriftyError, match=r"optimizer = thrifty\.optim\."):
            trained_by_hand(chosen)
        return
    try:
        losses = trained_by_hand(chosen)
    except NeedsTrainer as refused:
        assert name in str(refused) and "thrifty.train" in refused.fix
        return
    except RefusedError as refused:
        with pytest.raises(RefusedError):
            run = compose(plain_run(depth=4, style="gpt"), with_optimizer([chosen]), STEPS)
            run.build_model()
        assert refused.fix
        return
    run = compose(plain_run(depth=4, style="gpt"), with_optimizer([chosen]), STEPS)
    expected = [record.loss for record in advance(run, run.start())]
    assert losses == pytest.approx(expected, rel=LOSSY.get(name, 1e-5))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "accumulate", "also"),
    [("replicate", 1, ()), ("replicate", 2, ()), ("replicate", 1, ("lora",)), ("shard", 2, ()), ("tensor", 1, ())],
)
def test_ranks_that_apply_it_have_the_weights_of_one_process(name: str, accumulate: int, also: tuple[str, ...]) -> None:
    for difference in on_ranks(2, difference_by_hand, name, name != "tensor", also, accumulate):
        assert difference < 1e-12


def test_rank_techniques_are_refused_where_they_cannot_work() -> None:
    found = on_ranks(2, refusals_by_hand)[0]
    assert "zero=2" in found["stage 1"] and "before fully_shard" in found["after sharding"]
    assert "all ranks for one copy" in found["both"] and "already applied" in found["twice"]
    for name in ("replicate", "shard", "tensor"):
        with pytest.raises(RefusedError, match="torchrun --nproc-per-node"):
            thrifty.apply(nn.Linear(2, 2), name)


def test_so_many_techniques_work_in_a_loop_by_hand() -> None:
    needs_trainer = []
    for name in techniques.own_names():
        try:
            thrifty.apply(nn.Linear(2, 2), name)
        except NeedsTrainer as refused:
            needs_trainer += [] if name == "losses.z_loss" else [name]
            assert "thrifty.train(" in refused.fix or name == "losses.z_loss"
        except ThriftyError as refused:
            assert refused.fix
    assert len(techniques.own_names()) - len(needs_trainer) >= LEAST, needs_trainer


class Block(nn.Module):
    """A residual block of a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(8, 3))


def test_stage_order_and_clashes_hold_in_both_orders() -> None:
    model = thrifty.apply(network(), "recompute")
    with pytest.raises(UsageError, match=r"memory\.recompute is already applied") as refused:
        thrifty.apply(model, "lora", rank=2)
    assert refused.value.fix == "apply adapters.lora first"
    for names in (("lora", "rigl"), ("rigl", "lora")):
        model = network()
        pair = model, thrifty.optim.AdamW(model)
        with pytest.raises(UsageError, match="cannot be combined"):
            for name in names:
                pair = thrifty.apply(pair, name, total_steps=STEPS, **({"rank": 2} if name == "lora" else {}))
    optimizer = thrifty.apply(thrifty.optim.AdamW(network()), "cosine", total_steps=STEPS)
    with pytest.raises(UsageError, match="both decide the schedule"):
        thrifty.apply(optimizer, "linear", total_steps=STEPS)
    with pytest.raises(UsageError, match="both decide the schedule"):
        thrifty.apply(thrifty.optim.ScheduleFreeAdamW(network(), warmup=2), "linear", total_steps=STEPS)


@pytest.mark.parametrize(
    ("wrapped", "message"),
    [
        (lambda: torch.compile(network()), "already wrapped in torch.compile"),
        (lambda: (model := network(), model.compile())[0], "already wrapped in torch.compile"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "already wrapped in torch.jit"),
        (lambda: nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2)), "lazy layers"),
    ],
)
def test_a_model_that_would_not_see_the_change_is_refused(wrapped: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        thrifty.apply(wrapped(), "lora", rank=2)


@pytest.mark.parametrize("name", ["lora", "recompute", "mixed", "compress_activations", "offload_activations"])
def test_copies_of_changed_models_use_their_own_weights(name: str) -> None:
    model = thrifty.apply(network(), name, **({"rank": 2} if name == "lora" else {}))
    copied, x = copy.deepcopy(model), torch.randn(4, 8)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    assert not torch.equal(copied(x), model(x))
    copied(x).float().sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in copied.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("name", ["n_of_m", "optimal_recompute"])
def test_copies_of_bound_models_evaluate_and_refuse_to_train(name: str) -> None:
    model = network()
    if name == "n_of_m":
        model, _ = thrifty.apply((model, thrifty.optim.AdamW(model)), name, total_steps=STEPS)
    else:
        model = thrifty.apply(model, name)
    copied, x = copy.deepcopy(model), torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(copied.eval()(x), model(x))
    with pytest.raises(UsageError, match="and this is a copy of it"):
        copied.train()(x)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = (plain_run(depth=2, style="gpt").build() for _ in range(2))
    with pytest.raises(UsageError, match="contains no parameter of the model"):
        thrifty.apply((model, thrifty.optim.AdamW(other)), "rigl", total_steps=8)


Loop = tuple[nn.Module, torch.optim.Optimizer]


def steps_by_hand(loop: Loop, steps: range) -> list[float]:
    plain = plain_run(depth=2, style="gpt")
    model, optimizer = loop
    losses = []
    for step in steps:
        batch = plain.source.at(step)
        loss = plain.objective.losses(plain.objective.predict(model, batch), batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_a_restart_changes_nothing(begin: Callable[[], Loop], stopped: int) -> None:
    first = begin()
    steps_by_hand(first, range(stopped))
    second = begin()
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    assert steps_by_hand(first, range(stopped, 8)) == steps_by_hand(second, range(stopped, 8))


@pytest.mark.parametrize("kind", [thrifty.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("name", ["attention.spatten", "attention.elsa"])
def test_a_change_at_a_step_is_where_it_was_after_a_restart(name: str, kind: type[torch.optim.Optimizer]) -> None:
    def begin() -> Loop:
        model = plain_run(depth=2, style="gpt").build().train()
        return thrifty.apply((model, kind(model.parameters(), lr=1e-2)), technique(name, from_step=4))

    for stopped in (2, 6):
        assert_a_restart_changes_nothing(begin, stopped)


@pytest.mark.parametrize("kind", [thrifty.optim.AdamW, thrifty.optim.Muon])
@pytest.mark.parametrize("other", [None, "averaging.ema", "gradients.clip", "averaging.latest", "schedules.cosine"])
@pytest.mark.parametrize("mask", ["sparsity.rigl", "sparsity.set", "sparsity.static", "sparsity.gradual"])
def test_masks_in_company_are_where_they_were_after_a_restart(mask: str, other: str | None, kind: type) -> None:
    def begin(names: list[str]) -> Loop:
        model = plain_run(depth=2, style="gpt").build().train()
        loop = model, kind(model, lr=1e-2)
        for name in names:
            settings = {"every": 2, "density": 0.5} if name in ("sparsity.rigl", "sparsity.set") else {}
            loop = thrifty.apply(loop, name, total_steps=8, **settings)
        return loop

    names = [mask, *filter(None, [other])]
    for order in (names, names[::-1]):
        assert_a_restart_changes_nothing(lambda order=order: begin(order), 4)


def test_an_activation_budget_keeps_applied_techniques() -> None:
    model, x = thrifty.apply(network(), "mixed"), torch.randn(4, 8)
    before = model(x)
    with thrifty.activation_budget(model, "50%"):
        model(x).float().sum().backward()
    assert torch.equal(model(x), before) and not torch.equal(before, network()(x))


def test_an_idle_batch_ramp_warns_when_applied() -> None:
    data = TensorDataset(torch.arange(64.0))
    for batch, is_idle in ((8, True), (32, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            thrifty.apply(DataLoader(data, batch_size=batch), "batch_ramp", total_steps=100)
        assert [f"the batch is {batch} at every step" in str(each.message) for each in caught] == [True] * is_idle


def test_a_mask_without_a_file_is_named_when_it_is_applied() -> None:
    model = plain_run(depth=2, style="gpt").build()
    with pytest.warns(UserWarning, match="without a file no weight is masked"):
        thrifty.apply((model, thrifty.optim.AdamW(model)), "mask_from_file")


@pytest.mark.parametrize(
    ("name", "settings", "is_idle"),
    [
        ("rigl", {"total_steps": 50}, True),
        ("rigl", {"total_steps": 1000}, False),
        ("rigl", {"total_steps": 50, "until": 5000}, True),
        ("rigl", {"until": 50}, True),
        ("set", {"total_steps": 1000, "alpha": 0.0}, True),
        ("snip", {"total_steps": 5, "scoring_steps": 9}, True),
        ("gradual", {"total_steps": 50}, False),
        ("static", {}, False),
    ],
)
def test_masks_that_never_move_warn_when_applied(name: str, settings: dict[str, float], is_idle: bool) -> None:
    model = plain_run(depth=2, style="gpt").build()
    optimizer = thrifty.optim.AdamW(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thrifty.apply((model, optimizer), name, density=0.5, **settings)
    said = [str(each.message) for each in caught if "never move" in str(each.message)]
    assert bool(said) is is_idle and all(f"sparsity.{name}: masks never move in" in each for each in said)


MASKS = {"rigl": {"every": 2}, "set": {"every": 2}, "static": {}, "gradual": {"every": 2}, "snip": {}}


def masked_by_hand(name: str, params: Callable[[nn.Module], object]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the masks and the parameter names of an optimizer after a technique was applied."""
    model = network()
    optimizer = thrifty.optim.AdamW(params(model), lr=1e-2)
    thrifty.apply((model, optimizer), name, density=0.5, total_steps=STEPS, **MASKS[name])
    return masks_in(TrainState(model=model, optimizer=optimizer)), optimizer.names


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("params", "parts"), [(lambda model: model.parameters(), "01"), (lambda model: model[0], "0")], ids=["bare", "part"]
)
def test_masks_use_the_names_of_the_model(name: str, params: Callable[[nn.Module], object], parts: str) -> None:
    wanted, all_names = masked_by_hand(name, lambda model: model)
    masks, names = masked_by_hand(name, params)
    assert masks.keys() == wanted.keys() and len(masks) == 4
    assert all(torch.equal(masks[each], wanted[each]) for each in masks)
    assert names == [each for each in all_names if each[0] in parts]


def test_masked_weights_outside_the_optimizer_are_refused() -> None:
    model = network()
    with pytest.raises(UsageError, match=r"4 weights that would be masked .*, such as '0\.0\.up\.weight'"):
        thrifty.apply((model, thrifty.optim.AdamW(model[1])), "static")
    thrifty.apply((model, thrifty.optim.AdamW(model.named_parameters())), "static")


def test_loaded_states_keep_the_names_of_the_model() -> None:
    model = network()
    _, optimizer = thrifty.apply((model, thrifty.optim.AdamW(model)), "static", density=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    names, masks, state = optimizer.names, optimizer.slots["masks.mask"], copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["param_names"] = [f"parameter{index}" for index in range(len(names))]
    optimizer.load_state_dict(state)
    assert optimizer.names == names and all(map(torch.equal, optimizer.slots["masks.mask"], masks))


def test_masks_refuse_two_parameters_of_one_name() -> None:
    model, other = network(), network()
    optimizer = thrifty.optim.AdamW([*model.named_parameters(), *other.named_parameters()])
    with pytest.raises(UsageError, match=r"two parameters of the optimizer have the name '0\.0\.norm\.weight'"):
        thrifty.apply((model, optimizer), "static")


def test_a_missing_first_gradient_keeps_masked_weights() -> None:
    model = network()
    optimizer = thrifty.optim.AdamW(model, lr=0.0)
    thrifty.apply((model, optimizer), "static", density=0.5, distribution="global", criterion="magnitude")
    before = copy.deepcopy(model.state_dict())
    for name, parameter in model.named_parameters():
        parameter.grad = None if name == "0.1.down.weight" else torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
