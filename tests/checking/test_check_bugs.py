"""The classic silent bugs, put in again: each is found by the promise that it breaks."""

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
    found = check_run(plain_run, with_optimizer(techniques))
    return {(verdict.promise, verdict.about): verdict for verdict in found}


def broken(*techniques: Technique) -> dict[tuple[str, str], PromiseVerdict]:
    return {name: verdict for name, verdict in verdicts(*techniques).items() if verdict.outcome == "broken"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("others", [[], ["precision.mixed"]])
def test_micro_batches_that_weigh_alike_whatever_is_in_them(others: list[str]) -> None:
    found = broken(MeanOfMeans(), *(technique(name) for name in others))
    assert found.keys() == {("one big batch", "gradients")}  # at equal weights nothing shows
    assert "--without mean_of_means" in found["one big batch", "gradients"].fix


@pytest.mark.parametrize("optimizer", ["adamw", "soap", "muon"])
def test_gradients_that_are_wrong_only_later_whatever_the_optimizer_makes_of_last_bits(optimizer: str) -> None:
    found = broken(TurnsBack(), technique(f"optimizers.{optimizer}"))
    assert "where the last bits of gradients change" in found["rounding", "turns_back"].measured


def test_recomputed_blocks_that_starve_adapters_of_gradients() -> None:
    found = broken(technique("adapters.lora"), ReentrantRecompute())
    flow = found["gradients arrive", "parameters"]
    assert "blocks.0.attention.out.lora_a" in flow.measured and flow.fix == "--without reentrant_recompute"
    assert ("exact", "reentrant_recompute") in found


def test_data_whose_position_is_lost_on_resume() -> None:
    found = broken(Forgetful())
    assert found.keys() == {("data by step", "data"), ("resume", "checkpoint")}
    assert "stopped after step 2 and resumed, the loss of step 3 is" in found["resume", "checkpoint"].measured


def test_an_effective_batch_that_shrinks_when_memory_is_short() -> None:
    found = broken(Shrinking())
    assert found.keys() == {("batch when memory is short", "gradients")}
    assert "not that of the 4 examples" in found["batch when memory is short", "gradients"].measured


def test_an_effective_batch_that_is_split_when_memory_is_short_is_sound() -> None:
    found = verdicts(Splitting())
    assert found["batch when memory is short", "gradients"].outcome == "holds"
    assert not any(verdict.outcome == "broken" for verdict in found.values())


def test_an_optimizer_that_keeps_momentum_of_what_is_held_at_zero() -> None:
    assert broken(HalfMasked()).keys() == {("state under masks", "optimizer")}


def test_moments_that_do_not_follow_masks_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    def constrain_weights_only(self: MaskedUpdate, slots: Slots, parameters: list[torch.Tensor]) -> None:
        self._apply(parameters, slots["mask"])

    assert not broken(technique("sparsity.rigl"))
    monkeypatch.setattr(MaskedUpdate, "apply_constraints", constrain_weights_only)
    found = broken(technique("sparsity.rigl"))
    assert "values outside the mask" in found["invariants", "run"].measured
    assert found["invariants", "run"].fix == "--without sparsity.rigl"


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True])
def test_gradients_that_are_divided_twice_in_16_bits_among_ranks(twice: bool) -> None:
    def start(folder: Path, count: int) -> str:
        on_ranks(count, as_rank_that_divides_twice if twice else work_as_rank, folder)
        return ""

    (verdict,) = [one for one in check(sharded_digits(), start=start).verdicts if one.about == "ranks"]
    assert verdict.outcome == ("broken" if twice else "holds"), verdict.measured
    if twice:
        assert "gradients are 0.5 times as long" in verdict.measured
        assert verdict.fix == "--without parallelism.shard"


def failing(error: Exception) -> PromiseVerdict:
    """What is said of a technique whose backward pass raises this."""

    def raising(*anything: object) -> None:
        raise error

    class Failing(technique("gradients.clip").__class__):
        backward = raising

    (found,) = broken(Failing()).values()
    return found


def test_a_run_that_fails_is_a_verdict_and_no_traceback() -> None:
    found = failing(ValueError("nobody expected this\nat all"))
    assert (found.promise, found.measured) == ("it trains", "ValueError: nobody expected this")


def test_an_operation_without_a_kernel_that_gives_the_same_bits_is_told_with_its_own_fix() -> None:
    said = "histc_cuda does not have a deterministic implementation, but you set torch.use_deterministic_algorithms"
    found = failing(RuntimeError(said))
    assert "gives other bits each time on a GPU: histc_cuda" in found.measured
    assert found.fix.startswith("--set deterministic=false")
