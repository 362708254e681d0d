"""Weight averages, compared with torch's AveragedModel and explicit sums."""

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from tiny_runs import advance, losses, plain_run, run_through, technique, with_optimizer
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_swa_avg_fn

from thrifty.composition.compose import compose
from thrifty.core.errors import UsageError
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.recipe import Budget, CheckpointSettings, DataSettings, EvaluationSettings, ModelSettings, Recipe
from thrifty.optim.fused_updates import FusedAdamWUpdate, fused_tail
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.weight_average import Beginning, EmaTransform, decay_after
from thrifty.techniques.averaging.latest import LatestWeightAverage, LatestWeightsTransform, uniform_mean
from thrifty.techniques.optimizers.adamw import AdamW, adamw
from thrifty.training import checkpoint
from thrifty.training.trained_model import load_trained_model
from thrifty.training.trainer import train

AVERAGES = {"averaging.latest": "latest_weight_average", "averaging.ema": "exponential_average"}
"""Techniques, and the name of their slots in checkpoints."""


class WeightHistory:
    """A model and its weights after each update."""

    def __init__(self, element: GradientTransform, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
        self.optimizer = TransformOptimizer(self.model.named_parameters(), chain(adamw(0.05), element))
        self.been: list[nn.Module] = []

    def go(self, steps: int) -> "WeightHistory":
        for _ in range(steps):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(len(self.been)))
            self.model(x.to(next(self.model.parameters()).dtype)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.been.append(copy.deepcopy(self.model))
        return self

    def assert_judged(self, expected: nn.Module) -> None:
        actual = self.optimizer.eval_weights()
        assert actual is not None
        for value, parameter in zip(actual, expected.parameters(), strict=True):
            torch.testing.assert_close(value, parameter.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("steps", [3, 5, 8, 9, 20, 21])
def test_the_latest_mean_equals_torch(steps: int) -> None:
    walk = WeightHistory(LatestWeightsTransform(copies=4, start=3, every=2)).go(steps)
    taken = [walk.been[updates - 1] for updates in range(3, steps + 1, 2)][-4:]
    theirs = AveragedModel(taken[0], avg_fn=get_swa_avg_fn())
    for model in taken:
        theirs.update_parameters(model)
    walk.assert_judged(theirs.module)


def test_an_exponential_mean_equals_torch() -> None:
    """With a small decay the warmup ends at once: (1 + 1) / (10 + 1) exceeds 0.1 from the second weights on."""
    walk = WeightHistory(EmaTransform(0.1))
    theirs = AveragedModel(walk.model, avg_fn=get_ema_avg_fn(0.1))
    for _ in range(12):
        theirs.update_parameters(walk.go(1).model)
        walk.assert_judged(theirs.module)


@given(decay=some.floats(0.0, 0.9999), steps=some.integers(1, 60))
def test_debiased_weights_of_the_past_sum_to_one(decay: float, steps: int) -> None:
    shares: list[float] = []
    for averaged in range(steps):
        kept = decay_after(averaged, decay, "debiased")
        shares = [kept * share for share in shares] + [1 - kept]
    powers = [decay ** (steps - 1 - step) for step in range(steps)]
    assert shares == pytest.approx([power / sum(powers) for power in powers], rel=1e-6, abs=1e-9)


def test_the_decay_warms_up_from_zero() -> None:
    assert [decay_after(t, 0.999, "warmup") for t in (0, 1, 2, 90)] == pytest.approx([0, 2 / 11, 3 / 12, 91 / 100])
    assert decay_after(10_000, 0.999, "warmup") == 0.999


@pytest.mark.parametrize("beginning", ["warmup", "debiased"])
def test_an_exponential_mean_excludes_weights_before_start(beginning: Beginning) -> None:
    walk = WeightHistory(EmaTransform(0.99, beginning, start=4)).go(4)
    assert walk.optimizer.eval_weights() is None
    walk.go(1).assert_judged(walk.been[-1])


def test_copies_do_not_share_memory_with_the_weights() -> None:
    """w + 1, w + 2 and w + 3 average to w + 2, also on a CPU, where `.cpu()` does not copy."""
    weight = torch.tensor([1.0, -2.0])
    element = LatestWeightsTransform(copies=3, start=1, every=1)
    slots = element.init(["weight"], [weight])
    for step in range(3):
        weight += 1
        element.after_step(slots, [weight], element.scalars(step, step))
    (actual,) = element.eval_weights(slots, [weight], element.scalars(3, 3)) or []
    assert torch.equal(actual, torch.tensor([3.0, 0.0])) and torch.equal(weight, torch.tensor([4.0, 1.0]))


def test_the_mean_covers_the_existing_copies() -> None:
    walk = WeightHistory(LatestWeightsTransform(copies=3, start=4, every=3)).go(3)
    assert walk.optimizer.eval_weights() is None
    walk.go(1).assert_judged(walk.been[3])
    walk.go(3)
    for value, *both in zip(
        walk.optimizer.eval_weights() or [], *(walk.been[i].parameters() for i in (3, 6)), strict=True
    ):
        torch.testing.assert_close(value, uniform_mean([[p.detach()] for p in both])[0])


@given(
    start=some.integers(0, 9), every=some.integers(1, 4), copies=some.integers(1, 4), born=some.integers(0, 12),
    updates=some.integers(0, 12),
)  # fmt: skip
def test_the_mean_covers_copies_since_the_last_reset(
    start: int, every: int, copies: int, born: int, updates: int
) -> None:
    """The weight after n updates is n, so the mean reveals its copies."""
    element, weight = LatestWeightsTransform(copies, start, every), torch.tensor([float(born)])
    slots = element.init(["weight"], [torch.tensor([-1e6])])
    for step in range(born, born + updates):
        weight += 1
        element.after_step(slots, [weight], element.scalars(step, step - born))
    due = [n for n in range(born + 1, born + updates + 1) if n >= start and (n - start) % every == 0][-copies:]
    actual = element.eval_weights(slots, [weight], element.scalars(born + updates, updates))
    assert actual is None if not due else actual is not None and float(actual[0]) == pytest.approx(sum(due) / len(due))


@pytest.mark.parametrize("element", [LatestWeightsTransform(2, 1, 1), EmaTransform(0.5)])
def test_means_of_16_bit_weights_are_float32(element: GradientTransform) -> None:
    walk = WeightHistory(element, torch.bfloat16).go(3)
    assert all(value.dtype == torch.float32 for value in walk.optimizer.eval_weights() or [])
    with walk.optimizer.use_eval_weights():
        assert all(parameter.dtype == torch.bfloat16 for parameter in walk.model.parameters())


@pytest.mark.parametrize("name", AVERAGES)
def test_training_is_bit_identical_and_stays_fused(name: str) -> None:
    plain, expected = run_through(plain_run(), with_optimizer([]), 6)
    records, state = run_through(plain_run(), with_optimizer([technique(name)]), 6)
    assert losses(records) == losses(plain)
    for parameter, tensor in expected.tensors().items():
        assert torch.equal(state.tensors()[parameter], tensor)
    assert state.optimizer is not None and state.optimizer.eval_weights() is not None
    actual = fused_tail(state.optimizer.transform)  # type: ignore[arg-type]
    assert actual is not None and isinstance(actual[1], FusedAdamWUpdate)


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_without_evaluate_is_not_evaluated(name: str) -> None:
    _, state = run_through(plain_run(), with_optimizer([technique(name, evaluate=False)]), 3)
    assert state.optimizer is not None and state.optimizer.eval_weights() is None
    assert any(AVERAGES[name] in tensor for tensor in state.tensors())


@pytest.mark.parametrize("name", AVERAGES)
def test_a_growth_with_reset_restarts_the_average(name: str) -> None:
    chosen = with_optimizer([technique(name), technique("growth.stacking", at=(3,))])
    run = compose(plain_run(), chosen, 5)
    state = run.start()
    advance(run, state, 3)
    assert state.optimizer is not None and state.optimizer.eval_weights() is not None
    run.changes(state)
    assert state.optimizer.eval_weights() is None
    advance(run, state, 4)
    assert state.model is not None
    actual = state.optimizer.eval_weights() or []
    assert all(torch.allclose(a, b) for a, b in zip(actual, state.model.parameters(), strict=True))


def test_one_average_at_a_time() -> None:
    with pytest.raises(UsageError, match="both decide the averaged weights"):
        compose(plain_run(), with_optimizer([technique(name) for name in AVERAGES]), 2)


def test_a_run_evaluates_and_exports_its_mean(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("\n\n".join(Path(json.__file__).read_text().split("\n\n")))
    recipe = Recipe(
        name="averaged",
        model=ModelSettings(preset="llama-nano", depth=1, width=16, heads=2, kv_heads=1, hidden=32),
        data=DataSettings(source=str(tmp_path / "my.txt"), vocabulary=280, length=16, batch=4, held_out=0.3),
        budget=Budget(steps=9),
        evaluation=EvaluationSettings(every=3, examples=8),
        checkpoints=CheckpointSettings(every=100),
        techniques=(AdamW(lr=1e-2), LatestWeightAverage(copies=3, every=2, start=4)),
    )
    summary = train(recipe, tmp_path, quiet=True)
    folder = tmp_path / "averaged"
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert [("trained_loss" in record) for record in evaluations] == [False, True, True]
    assert summary["held_out_loss"] == evaluations[-1]["loss"] != evaluations[-1]["trained_loss"]

    tensors = checkpoint.load(folder / "checkpoints", None).tensors
    exported, trained = (dict(load_trained_model(folder, trained=raw)[0].named_parameters()) for raw in (False, True))
    for name, parameter in exported.items():
        copies: list[Tensor] = [tensors[f"optimizer/latest_weight_average.copy_{i}/{name}"] for i in range(3)]
        torch.testing.assert_close(parameter.detach(), torch.stack(copies).mean(0))
        assert torch.equal(trained[name].detach(), tensors[f"parameters/{name}"])
        assert not torch.equal(parameter, trained[name])
