"""Classic silent bugs. Each bug breaks the expected promise."""

from pathlib import Path

import pytest
import torch
from careless_techniques import Forgetful, HalfMasked, MeanOfMeans, ReentrantRecompute, Shrinking, Splitting, TurnsBack
from check_work import as_rank_that_divides_twice
from rank_processes import on_ranks
from small_recipes import sharded_digits
from tiny_runs import plain_run, technique, with_optimizer

from thrifty.checking.check_verdicts import PromiseVerdict
from thrifty.checking.promise_check import check, check_run
from thrifty.checking.rank_check import work_as_rank
from thrifty.core.gradient_transform import Slots
from thrifty.core.technique import Technique
from thrifty.optim.weight_masks import MaskedUpdate


def verdicts(*techniques: Technique) -> dict[tuple[str, str], PromiseVerdict]:
    results = check_run(plain_run, with_optimizer(techniques))
    return {(verdict.promise, verdict.about): verdict for verdict in results}


def broken(*techniques: Technique) -> dict[tuple[str, str], PromiseVerdict]:
    return {name: verdict for name, verdict in verdicts(*techniques).items() if verdict.outcome == "broken"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("others", [[], ["precision.mixed"]])
def test_mean_of_unequal_micro_batches_is_broken(others: list[str]) -> None:
    results = broken(MeanOfMeans(), *(technique(name) for name in others))
    assert results.keys() == {("one big batch", "gradients")}  # with equal weights, the bug has no effect
    assert "--without mean_of_means" in results["one big batch", "gradients"].fix


@pytest.mark.parametrize("optimizer", ["adamw", "soap", "muon"])
def test_late_gradient_error_is_broken_for_every_optimizer(optimizer: str) -> None:
    results = broken(TurnsBack(), technique(f"optimizers.{optimizer}"))
    assert "where the last bits of gradients change" in results["rounding", "turns_back"].measured


def test_reentrant_recompute_without_adapter_gradients_is_broken() -> None:
    results = broken(technique("adapters.lora"), ReentrantRecompute())
    flow = results["gradients arrive", "parameters"]
    assert "blocks.0.attention.out.lora_a" in flow.measured and flow.fix == "--without reentrant_recompute"
    assert ("exact", "reentrant_recompute") in results


def test_data_position_lost_on_resume_is_broken() -> None:
    results = broken(Forgetful())
    assert results.keys() == {("data by step", "data"), ("resume", "checkpoint")}
    assert "stopped after step 2 and resumed, the loss of step 3 is" in results["resume", "checkpoint"].measured


def test_batch_that_shrinks_when_memory_is_short_is_broken() -> None:
    results = broken(Shrinking())
    assert results.keys() == {("batch when memory is short", "gradients")}
    assert "differs from that of the 4 examples" in results["batch when memory is short", "gradients"].measured


def test_batch_that_is_split_when_memory_is_short_holds() -> None:
    results = verdicts(Splitting())
    assert results["batch when memory is short", "gradients"].outcome == "holds"
    assert not any(verdict.outcome == "broken" for verdict in results.values())


def test_momentum_of_masked_weights_is_broken() -> None:
    assert broken(HalfMasked()).keys() == {("state under masks", "optimizer")}


def test_moments_outside_moved_masks_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def constrain_weights_only(self: MaskedUpdate, slots: Slots, parameters: list[torch.Tensor]) -> None:
        self._apply(parameters, slots["mask"])

    assert not broken(technique("sparsity.rigl"))
    monkeypatch.setattr(MaskedUpdate, "apply_constraints", constrain_weights_only)
    results = broken(technique("sparsity.rigl"))
    assert "values outside the mask" in results["invariants", "run"].measured
    assert results["invariants", "run"].fix == "--without sparsity.rigl"


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True])
def test_gradients_divided_twice_by_ranks_are_broken(twice: bool) -> None:
    def start(folder: Path, count: int) -> str:
        on_ranks(count, as_rank_that_divides_twice if twice else work_as_rank, folder)
        return ""

    (verdict,) = [one for one in check(sharded_digits(), start=start).verdicts if one.about == "ranks"]
    assert verdict.outcome == ("broken" if twice else "holds"), verdict.measured
    if twice:
        assert "gradient norms are 0.5 times as large" in verdict.measured
        assert verdict.fix == "--without parallelism.shard"


def failing(error: Exception) -> PromiseVerdict:
    """Return the verdict on a technique whose backward pass raises `error`."""

    def raising(*anything: object) -> None:
        raise error

    class Failing(technique("gradients.clip").__class__):
        backward = raising

    (results,) = broken(Failing()).values()
    return results


def test_failing_run_returns_a_verdict() -> None:
    results = failing(ValueError("nobody expected this\nat all"))
    assert (results.promise, results.measured) == ("it trains", "ValueError: nobody expected this")


def test_missing_deterministic_kernel_has_its_own_fix() -> None:
    message = "histc_cuda does not have a deterministic implementation, but you set torch.use_deterministic_algorithms"
    results = failing(RuntimeError(message))
    assert "returns different bits each time on a GPU: histc_cuda" in results.measured
    assert results.fix.startswith("--set deterministic=false")
