"""Bytes and FLOPs of a step, compared with hand-computed values."""

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from tiny_runs import plain_run, technique
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from thrifty.composition.compose import compose
from thrifty.composition.explain import count, passes_of
from thrifty.core import tensor_tracing
from thrifty.core.footprint import Footprint
from thrifty.core.tensor_tracing import StepTrace, gc_frozen, tensor_bytes


def test_live_bytes_count_each_storage_once() -> None:
    given = torch.zeros(1000)
    with StepTrace(given) as live:
        a = torch.ones(10)  # 40 bytes
        view = a[2:5]
        assert live.now == 40
        b = a + 1
        c = b * 2
        assert (live.now, live.peak) == (120, 120)
        del a
        assert live.now == 120  # the view keeps its storage alive
        del view, b
        assert (live.now, live.peak) == (40, 120)
        given += 1
        assert live.now == 40
    del c


def test_peak_includes_casts_inside_elementwise_operations() -> None:
    low, high = torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(1000)
    with StepTrace(low, high) as live:
        low += high  # computed in float32: low is cast
        assert (live.now, live.peak) == (0, 8000)
        created = low * high
        assert (live.now, live.peak) == (4000, 8000)
        del created
    with StepTrace(low, high, casts=False) as live:
        low += high
    assert live.peak == 0


@pytest.mark.parametrize("take", [lambda x, i: x[:, i], lambda x, i: x.index_select(1, i)])
def test_gradient_of_indexing_is_counted_once(take: Callable[[Tensor, Tensor], Tensor]) -> None:
    places = torch.tensor([3, 1])
    x = torch.zeros(4, 50, 5, requires_grad=True)
    with StepTrace(x, places) as live:
        take(x, places).sum().backward()
    assert live.peak < 1.5 * x.nbytes


@settings(max_examples=30)
@given(rows=some.lists(some.integers(1, 200), min_size=1, max_size=6))
def test_peak_is_the_largest_number_of_live_bytes(rows: list[int]) -> None:
    wanted, kept = 0, 0
    with StepTrace() as live:
        sums = []
        for count_ in rows:
            temporary = torch.zeros(count_, 3)  # 12 bytes per row
            sums.append(temporary.sum(1))  # 4 bytes per row
            wanted = max(wanted, kept + 16 * count_)
            del temporary
            kept += 4 * count_
    assert (live.now, live.peak) == (kept, wanted)


def test_new_tensor_at_the_address_of_a_known_one_is_counted() -> None:
    with FakeTensorMode():
        known = [torch.ones(100) for _ in range(50)]
        with StepTrace(*known) as live:
            del known
            created = [torch.ones(100) for _ in range(50)]
            assert live.now == 400 * len(created)


def test_fake_and_real_tensors_have_equal_peaks() -> None:
    def work() -> None:
        x = torch.ones(64, 32)
        y = x @ torch.ones(32, 16)
        del x
        y.softmax(-1).sum()

    peaks = []
    with StepTrace() as live:
        work()
    peaks.append(live.peak)
    with FakeTensorMode(), StepTrace() as live:
        work()
    assert peaks == [live.peak]


def test_footprint_of_a_model_equals_the_formula() -> None:
    run = compose(plain_run(batch=4, depth=1), [technique("optimizers.adamw")], 3)
    passes = passes_of(run, run.source.at(0))
    model, footprint = passes.model, passes.followed_by(run.transform(), 3)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert footprint.parameters == footprint.gradients == 4 * size
    assert footprint.optimizer == 8 * size
    # a multiply-add counts as 2; the backward pass has two matmuls for each forward matmul; 64 tokens
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)  # tied: the embedding is the head
    product = 2 * 4 * 4 * 16 * 16 * 8  # attention: 4 examples, 4 heads, 16 x 16 tokens, width 8; 2 + 5 matmuls
    assert footprint.flops == 3 * 2 * 64 * matrices + 7 * product


def test_activations_scale_with_the_batch_and_parameters_do_not() -> None:
    small, large = (
        count(compose(plain_run(batch=batch), [technique("optimizers.adamw")], 3), ())[1] for batch in (4, 16)
    )
    assert small.parameters == large.parameters and small.gradients == large.gradients
    assert 3.5 * small.activations < large.activations < 4.1 * small.activations
    assert large.flops == pytest.approx(4 * small.flops, rel=0.01)


def test_peak_agrees_with_the_torch_profiler() -> None:
    """Memory of a real step: the allocator's events agree with StepTrace."""
    run = compose(plain_run(batch=16), [technique("optimizers.adamw")], 3)
    _, counted = count(run, run.techniques)
    model = run.build_model().train()
    batch = run.source.at(2)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run.backward(model, run.objective, batch)
    now = peak = 0
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    predicted = max(counted.gradients, counted.activations) + counted.temporary
    assert peak == pytest.approx(predicted, rel=0.1)


def test_formula_of_peak_memory() -> None:
    footprint = Footprint(parameters=10, gradients=7, optimizer=20, activations=5, temporary=3)
    assert footprint.memory == 40
    assert footprint.scale(activations=2.0).memory == 43
    assert footprint.add(optimizer=1, traffic=9).memory == 41
    assert footprint.as_dict()["memory"] == 40


def test_tensor_bytes() -> None:
    assert tensor_bytes(torch.zeros(3, 5, dtype=torch.bfloat16)) == 30
    assert tensor_bytes(nn.Parameter(torch.zeros(2))) == 8


def test_nested_gc_freeze_ends_with_the_outermost_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_tracing, "_is_settled", False)  # the value outside tests
    gc.unfreeze()
    try:
        with gc_frozen():
            there = gc.get_freeze_count()
            with gc_frozen():
                assert gc.get_freeze_count() > there / 2 > 0  # frozen objects may still be freed
            assert gc.get_freeze_count() > there / 2
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # the state that other tests expect
