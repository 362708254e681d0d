"""Gradient cache: exact gradient of a joint loss in micro-batches, cost, and refusals."""

import pytest
import torch
from pair_runs import pair_run
from tiny_runs import losses, plain_run, run_through, technique, with_optimizer

from thrifty.composition.compose import compose
from thrifty.composition.explain import explain
from thrifty.core.backward import plain_backward
from thrifty.core.errors import RefusedError, UsageError
from thrifty.techniques.large_batch.gradient_cache import GradientCache, cached


def gradients_by(backward, parts: int = 0, **model) -> tuple[float, dict[str, torch.Tensor]]:
    plain = pair_run(batch=10, **model)
    built, batch = plain.build().double(), plain.source.at(0)
    batch = batch.map(lambda values: values.double() if values.is_floating_point() else values)
    batch = batch.weighted(torch.rand(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    torch.manual_seed(3)
    outcome = backward(built, plain.objective, batch)
    return outcome.loss.item(), {name: parameter.grad for name, parameter in built.named_parameters()}


@pytest.mark.parametrize("parts", [1, 2, 3, 10, 20])
def test_gradient_equals_the_whole_batch(parts):
    wanted_loss, wanted = gradients_by(plain_backward)
    loss, found = gradients_by(cached(plain_backward, parts))
    assert loss == pytest.approx(wanted_loss, rel=1e-12)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
    assert found["logit_scale"].abs().item() > 0


def test_both_passes_have_equal_random_values():
    """With dropout, a single micro-batch equals the plain step only if both passes have the same masks."""
    wanted_loss, wanted = gradients_by(plain_backward, dropout=0.5)
    loss, found = gradients_by(cached(plain_backward, 1), dropout=0.5)
    assert loss == pytest.approx(wanted_loss, rel=1e-12)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)


def test_summed_micro_batch_gradients_differ():
    from thrifty.techniques.large_batch.gradient_accumulation import accumulated

    _, wanted = gradients_by(plain_backward)
    _, found = gradients_by(accumulated(plain_backward, 2))
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) > 1e-3


@pytest.mark.slow
def test_memory_of_one_micro_batch_for_a_third_more_work():
    plain, one = (
        explain(compose(pair_run(batch=32), with_optimizer(more), 3)).footprint
        for more in ([], [GradientCache(micro_batches=8)])
    )
    assert one.activations < 0.3 * plain.activations
    assert one.flops / plain.flops == pytest.approx(4 / 3, rel=0.03)


def test_combines_with_loss_scaling_and_dropped_patches():
    together = ["precision.mixed", "data_selection.drop_patches", "memory.recompute"]
    chosen = [technique(name) for name in together]
    plain, _ = run_through(pair_run(batch=8), with_optimizer(chosen), 3)
    found, _ = run_through(pair_run(batch=8), with_optimizer([*chosen, technique("large_batch.gradient_cache")]), 3)
    assert losses(found) == pytest.approx(losses(plain), rel=2e-2)


def test_losses_of_single_examples_are_refused():
    with pytest.raises(RefusedError, match=r"large_batch\.gradient_cache") as refused:
        compose(plain_run(), with_optimizer([GradientCache()]), 3)
    assert "large_batch.gradient_accumulation" in refused.value.fix
    with pytest.raises(UsageError, match="both decide the micro-batches"):
        compose(pair_run(), with_optimizer([GradientCache(), technique("large_batch.gradient_accumulation")]), 3)
