"""Footprints counted on two micro-batches equal, to the byte, footprints counted on all micro-batches."""

import pytest
from tiny_runs import plain_run, technique, with_optimizer
from torch._subclasses.fake_tensor import FakeTensorMode

from thrifty.composition import explain
from thrifty.composition.compose import compose
from thrifty.composition.micro_batches import representative_micro_batches
from thrifty.core.footprint import Footprint

BATCH = 8


def counted(*names: str, parts: int) -> Footprint:
    others = [technique(name) for name in names]
    cut = technique("large_batch.gradient_accumulation", micro_batches=parts)
    run = compose(plain_run(batch=BATCH), with_optimizer([cut, *others]), 6)
    return explain.count(run, run.techniques)[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("parts", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "names",
    [(), ("precision.mixed",), ("memory.recompute", "adapters.lora"), ("memory.compress_activations",)],
    ids=lambda names: "+".join(names) or "plain",
)
def test_two_micro_batches_predict_the_footprint_of_all(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], parts: int
) -> None:
    footprint = counted(*names, parts=parts)
    monkeypatch.setattr(explain, "representative_micro_batches", lambda run, batch: (run, batch, 1.0))
    assert footprint == counted(*names, parts=parts)


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        ((), 3),  # micro-batches of three, three and two examples
        ((), 2),
        (("data_selection.gradient_norm_sampling",), 4),
        (("measure.noise_scale",), 4),
    ],
    ids=["unlike", "two", "sampled", "measured"],
)
def test_unequal_or_joint_micro_batches_are_all_traced(names: tuple[str, ...], parts: int) -> None:
    cut = technique("large_batch.gradient_accumulation", micro_batches=parts)
    run = compose(plain_run(batch=BATCH), with_optimizer([cut, *(technique(name) for name in names)]), 6)
    batch = run.source.at(5)
    same, whole, times = representative_micro_batches(run, batch)
    assert same is run and whole is batch and times == 1.0


@pytest.mark.slow
def test_flops_of_skipped_micro_batches_are_counted() -> None:
    assert counted(parts=8).flops == counted(parts=2).flops == counted(parts=1).flops


def test_only_two_micro_batches_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compose(
        plain_run(batch=BATCH), with_optimizer([technique("large_batch.gradient_accumulation", micro_batches=8)]), 6
    )
    with FakeTensorMode():
        cut, batch, times = representative_micro_batches(run, run.source.at(5))
    assert len(batch) == 2 and times == 4.0
    assert next(t for t in cut.techniques if t.name == "large_batch.gradient_accumulation").micro_batches == 2  # type: ignore[attr-defined]
