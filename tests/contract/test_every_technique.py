"""Promises of every technique. New files of the catalogue are included automatically."""

import inspect
import math
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from drawn_settings import ATTEMPTS, draw_settings
from rank_processes import in_a_group_of_one
from table_samples import whole_tables
from technique_runs import RUNS, plain_for
from tiny_runs import (
    DEVICE,
    LEAST_GAIN,
    Snapshot,
    advance,
    assert_same,
    composed,
    losses,
    plain_run,
    restored,
    run_through,
    snapshot,
    technique,
    with_optimizer,
)
from torch import nn

from thrifty import techniques
from thrifty.checking.technique_contract import ContractSubject, contract
from thrifty.composition.compose import BaseRun, Run
from thrifty.composition.explain import explain, passes_of
from thrifty.core.claims import Claim
from thrifty.core.errors import InfeasibleError, IntegrityError, UsageError
from thrifty.core.plain_values import build, to_data
from thrifty.core.run_relative_settings import moments_of
from thrifty.core.state import TrainState, read_log
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.weight_masks import masks_in
from thrifty.training import checkpoint
from thrifty.training.loop import Record

STEPS = 6


@pytest.fixture(scope="module", params=techniques.names())
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of a technique, in module scope so that its tests run in sequence and share trainings."""
    torch._dynamo.reset()
    # several ranks: tests/techniques/test_parallelism.py
    with in_a_group_of_one() if request.param.startswith("parallelism.") else nullcontext():
        yield request.param


@pytest.fixture
def one(name: str) -> Technique:
    return technique(name)


def logits_of(model: nn.Module, plain: BaseRun) -> torch.Tensor:
    objective = plain.objective
    with torch.no_grad():
        return objective.predict(model.eval(), objective.examples(plain.source.at(9)).to(DEVICE)).logits


def test_card_names_a_paper_and_a_promise(one: Technique) -> None:
    card = inspect.getdoc(sys.modules[type(one).__module__]) or ""
    starts = [line.split("  ")[0] for line in card.splitlines()]
    assert "Paper" in starts and "Promise" in starts


def test_technique_contract_holds(one: Technique, name: str) -> None:
    assert one.name == name
    together = with_optimizer([one])
    for other in ("gradients.clip", "schedules.linear", "large_batch.gradient_accumulation", "memory.recompute"):
        if other != one.name and not technique(other).claims & one.claims:
            together.append(technique(other))
    subject = ContractSubject(one, tuple(together[1:]), lambda: plain_for(name), STEPS, DEVICE)
    assert not [each for each in contract(subject, ("explanation", "it learns")) if each.outcome != "holds"]
    assert type(one)() == build(type(one), tomllib.loads(tomli_w.dumps(to_data(type(one)()))))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_numerics_are_as_promised(one: Technique, dropout: float) -> None:
    if one.numerics is Numerics.DIFFERENT or (dropout and one.numerics is Numerics.ROUNDING):
        pytest.skip("another algorithm" if one.numerics is Numerics.DIFFERENT else "it draws other dropout masks")
    reference, expected = without_any(one.name if one.name in RUNS else None, dropout)
    trained, end = trained_with(one, dropout)
    if one.name == "memory.offload_optimizer" and DEVICE.type != "cpu":
        assert trained == pytest.approx(reference, rel=1e-5)  # the update on the CPU rounds differently
    elif one.numerics is Numerics.EXACT:
        assert trained == reference
        assert_same(end, expected)
    else:
        assert trained == pytest.approx(reference, rel=one.tolerance)


@lru_cache(4)
def trained_with(one: Technique, dropout: float) -> tuple[list[float], Snapshot]:
    """Return the losses and the final state of the run with this technique."""
    records, state = run_through(plain_for(one.name, style="gpt", dropout=dropout), with_optimizer([one]), STEPS)
    return losses(records), snapshot(state)


@cache
def without_any(data_of: str | None, dropout: float) -> tuple[list[float], Snapshot]:
    """Return the losses and the final state of the plain run on text, or on the data of this technique."""
    plain = plain_for(*([data_of] if data_of else []), style="gpt", dropout=dropout)
    records, state = run_through(plain, with_optimizer([]), STEPS)
    return losses(records), snapshot(state)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", techniques.names(), indirect=True, scope="module")
def test_it_learns(one: Technique) -> None:
    records, _ = run_through(plain_for(one.name, repeated=True), with_optimizer([one]), 40)
    assert losses(records)[-1] < losses(records)[0] - LEAST_GAIN.get(one.name, 1.0)


def test_resume_from_a_checkpoint_is_bit_identical(one: Technique, tmp_path: Path) -> None:
    dropout = 0.3  # random draws inside a step must be restored too
    straight, expected = trained_with(one, dropout)
    plain = plain_for(one.name, style="gpt", dropout=dropout)
    run = composed(plain, with_optimizer([one]), STEPS)
    state = run.start()
    first = advance(run, state, 3)
    checkpoint.save(tmp_path, state.step, state.tensors(), state.scalars())
    stored = checkpoint.find(tmp_path)
    run = composed(plain, with_optimizer([one]), STEPS)
    state = run.init_state(read_log(stored.scalars))
    checkpoint.fill(stored, state.tensors())
    state.load_scalars(stored.scalars)
    second = advance(run, state)
    assert losses(first + second) == straight
    assert_same(snapshot(state), expected)


LENGTHS = ((0, 12), (4, 9), (6, 14), (8, 11))
"""Numbers of steps of a run that changes its length, each after a number of finished steps."""
SAVED = 6


def test_changed_lengths_are_bit_identical_after_resume(one: Technique, tmp_path: Path) -> None:
    moments = {name: in_fractions(moment) for name, moment, _ in moments_of(one)}
    if not moments:
        pytest.skip("it has no moment")
    one = replace(one, **moments)
    chosen = [*with_optimizer([one]), *([] if Claim.SCHEDULE in one.claims else [technique("schedules.linear")])]
    plain, lengths = plain_for(one.name, style="gpt"), dict(LENGTHS[1:])

    def trained(run: Run, state: TrainState) -> list[Record]:
        """Train to the end, with all changes of the length that are due."""
        records = []
        while state.step < run.steps:
            due = next((step for step in lengths if step > state.step), None)
            records += advance(run, state, due)
            run.verify(state)
            if state.step == SAVED and not list(tmp_path.iterdir()):
                checkpoint.save(tmp_path, state.step, state.tensors(), state.scalars())
            if state.step in lengths:
                run.change_length(lengths[state.step], state.step)
        return records

    run = composed(plain, chosen, LENGTHS[0][1])
    state = run.start()
    straight = trained(run, state)
    assert state.step == LENGTHS[-1][1]
    again, stored = composed(plain, chosen, LENGTHS[0][1]), checkpoint.find(tmp_path)
    for step, steps in LENGTHS[1:]:
        if step <= SAVED:
            again.change_length(steps, step)
    resumed = again.init_state(read_log(stored.scalars))
    checkpoint.fill(stored, resumed.tensors())
    resumed.load_scalars(stored.scalars)
    assert losses(trained(again, resumed)) == losses(straight[SAVED:])
    assert_same(snapshot(resumed), snapshot(state))


def in_fractions(moment: Any) -> Any:
    """Return moments of a run of `STEPS` steps as fractions of the run."""
    if isinstance(moment, tuple):
        return tuple(map(in_fractions, moment))
    return moment / STEPS if isinstance(moment, int) else moment


def test_promise_holds_at_every_step(one: Technique) -> None:
    verified_at_every_step(one)


@lru_cache(1)
def verified_at_every_step(one: Technique) -> nn.Module:
    """Return the model after a run in which the technique's promise holds at every step."""
    run = composed(plain_for(one.name), with_optimizer([one]), STEPS)
    state = run.start()
    for step in range(STEPS + 1):
        run.verify(state)
        if step < STEPS:
            advance(run, state, step + 1)
    assert state.model is not None
    return state.model


def test_broken_promise_is_detected(one: Technique) -> None:
    if not one.overrides("holds"):
        pytest.skip("it makes no promise that the state can show")
    if one.divides_ranks:
        pytest.skip("its promise concerns several ranks, and is tested there")
    messages = []
    for break_promise in (
        fill_weights,
        fill_masks,
        clear_log,
        unfreeze_weights,
        unshare_weights,
    ):
        run = composed(plain_for(one.name), with_optimizer([one]), STEPS)
        state = run.start()
        if masks_are_still_full(state):
            advance(run, state)
        run.verify(state)
        break_promise(state)
        try:
            run.verify(state)
        except IntegrityError as error:
            messages.append(str(error))
    assert messages, "no broken promise was detected"
    assert all(one.name in message for message in messages)


def masks_are_still_full(state: TrainState) -> bool:
    """Return True if masks stay full until the first gradients, so that no promise applies yet."""
    masks = masks_in(state)
    return bool(masks) and all(bool(mask.all()) for mask in masks.values())


@torch.no_grad()
def fill_weights(state: TrainState) -> None:
    assert state.model is not None
    for parameter in state.model.parameters():
        parameter.fill_(1.0)


def fill_masks(state: TrainState) -> None:
    assert state.model is not None
    for buffer in state.model.buffers():
        if buffer.dtype == torch.bool:
            buffer.fill_(True)


def clear_log(state: TrainState) -> None:
    state.log.clear()


def unfreeze_weights(state: TrainState) -> None:
    assert state.model is not None
    state.model.requires_grad_(True)


def unshare_weights(state: TrainState) -> None:
    assert state.model is not None
    for module in state.model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))


@pytest.mark.parametrize("draw", range(6 if whole_tables() else 1))
def test_random_settings_train_and_resume(name: str, draw: int) -> None:
    plain, refusals = plain_for(name, style="gpt", dropout=0.3), []
    for attempt in range(ATTEMPTS):
        settings = draw_settings(name, f"{draw}/{attempt}")
        try:
            one = technique(name, **settings)
            run = composed(plain, with_optimizer([one]), STEPS)
            state = run.start()
            records = advance(run, state, 3)
            saved = snapshot(state)
            records += advance(run, state)
            run.verify(state)
            break
        except (UsageError, InfeasibleError) as refused:
            assert refused.fix, settings
            refusals.append(f"{settings}: {refused.what}")
    else:
        pytest.fail("all random settings are refused: " + "; ".join(refusals))
    again = composed(plain, with_optimizer([one]), STEPS)
    resumed = restored(again, saved)
    advance(again, resumed)
    again.verify(resumed)
    assert all(math.isfinite(loss) for loss in losses(records)), settings
    assert_same(snapshot(resumed), snapshot(state))
    if one.numerics is Numerics.EXACT and DEVICE.type == "cpu":
        assert losses(records) == without_any(name if name in RUNS else None, 0.3)[0], settings


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", techniques.names(), indirect=True, scope="module")
def test_fake_explanation_equals_a_real_count(one: Technique) -> None:
    built: list[nn.Module] = []
    plain = plain_for(one.name)

    def build_and_keep() -> nn.Module:
        built.append(plain.build())
        return built[-1]

    run = composed(BaseRun(build_and_keep, plain.source, plain.objective), with_optimizer([one]), STEPS)
    explanation = explain(run)
    assert [row.technique for row in explanation.rows] == list(run.techniques)
    assert explanation.footprint.memory > 0 and explanation.footprint.flops > 0
    assert built and all(hasattr(parameter, "fake_mode") for model in built for parameter in model.parameters())
    if not one.overrides("footprint"):
        real = passes_of(run, run.source.at(STEPS - 1).to(DEVICE)).followed_by(run.transform(), STEPS)
        real = real.add(flops=real.update_flops)
        if DEVICE.type == "cpu":
            # on fake tensors, an update that reads values is counted up to the read
            rare = {name: getattr(explanation.footprint, name) for name in ("flops", "update_flops")}
            assert rare == pytest.approx({name: getattr(real, name) for name in rare}, rel=0.03)
            assert explanation.footprint == replace(real, **rare)
        else:  # GPU attention kernels save other tensors
            assert explanation.footprint.memory == pytest.approx(real.memory, rel=0.05)


def test_unused_techniques_change_nothing() -> None:
    """Importing and constructing every technique does not change a run without them."""
    program = (
        "from tiny_runs import losses, plain_run, run_through, technique\n"
        "print(*[loss.hex() for loss in losses(run_through(plain_run(), [technique('optimizers.adamw')], 4)[0])])"
    )
    tests = Path(__file__).parents[1] / "support"
    alone = subprocess.run(
        [sys.executable, "-c", f"import torch; torch.set_num_threads(1)\n{program}"],
        cwd=tests, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in techniques.names():
        techniques.find(name)()
    values = losses(run_through(plain_run(), [technique("optimizers.adamw")], 4)[0])
    assert alone.stdout.split() == [loss.hex() for loss in values]
