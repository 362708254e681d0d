"""Training in a random subspace: weights, gradients, and accuracy by dimension."""

import copy

import pytest
import torch
import torch.nn.functional as F
from adapter_models import TOKENS
from tiny_runs import advance, plain_run, technique, tiny_model, with_optimizer
from torch import Tensor, nn

import thrifty
from thrifty.composition.compose import compose
from thrifty.core.errors import RefusedError
from thrifty.data.images.digits import digits
from thrifty.techniques.adapters.intrinsic_dimension import (
    SUBSPACE,
    IntrinsicDimension,
    restrict_to_subspace,
    subspace_backward,
)

IDS = TOKENS % 256


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for name, p in model.named_parameters() if name != "subspace"])


def test_the_initial_function_is_bit_identical() -> None:
    assert torch.equal(IntrinsicDimension(dimension=50).model(tiny_model())(IDS), tiny_model()(IDS))


def test_weights_follow_z_in_every_forward_pass() -> None:
    model = IntrinsicDimension(dimension=50).model(tiny_model())
    projection, origin = SUBSPACE.of(model).projection, flat(model)
    with torch.no_grad():
        model.subspace.normal_()
    model(IDS)
    torch.testing.assert_close(flat(model), origin + projection.apply(model.subspace.detach()))
    with torch.no_grad():
        model.subspace.zero_()
    model(IDS)
    assert torch.equal(flat(model), origin)


def test_the_gradient_of_z_is_the_projected_weight_gradient() -> None:
    plain = plain_run()
    batch = plain.source.at(0)
    reference = tiny_model()
    losses = plain.objective.losses(plain.objective.predict(reference, batch), batch)
    (losses * batch.weight).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in reference.parameters()])
    for parts in (1, 2):  # computed once for all micro-batches
        chosen = [technique("large_batch.gradient_accumulation", micro_batches=parts)] if parts > 1 else []
        run = compose(plain, with_optimizer([IntrinsicDimension(dimension=50), *chosen]), 4)
        state = run.start()
        assert state.model is not None
        run.backward(state.model, run.objective, batch)
        expected = SUBSPACE.of(state.model).projection.apply_transposed(gradient)
        torch.testing.assert_close(state.model.subspace.grad, expected, rtol=1e-3, atol=1e-5)
        assert all(p.grad is None and not p.requires_grad for n, p in state.model.named_parameters() if n != "subspace")


def test_a_failing_backward_pass_leaves_the_weights_frozen() -> None:
    model = IntrinsicDimension(dimension=5).model(tiny_model())

    def fails(*given: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        subspace_backward(fails)(model, None, None)  # type: ignore[arg-type]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["subspace"]


def test_finishing_leaves_the_trained_weights_only() -> None:
    one = IntrinsicDimension(dimension=50)
    run = compose(plain_run(), [one, technique("optimizers.adamw")], 4)
    state = run.start()
    advance(run, state)
    assert state.model is not None and state.optimizer is not None
    assert state.optimizer.names == ["subspace"]
    before = state.model(IDS)
    finished = one.finish(state.model)
    assert torch.equal(finished(IDS), before)
    plain = tiny_model()
    plain.load_state_dict(finished.state_dict())
    assert torch.equal(plain(IDS), before) and not torch.equal(before, tiny_model()(IDS))


def network(seed: int) -> nn.Module:
    """Return a network with 5 dimensions whose initial weights depend on a seed, but whose projection does not."""
    torch.manual_seed(seed)
    return IntrinsicDimension(dimension=5).model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))


def moved(model: nn.Module, seed: int) -> Tensor:
    """Return the outputs of a model after a change of z, as an optimizer makes it after a forward pass."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    model(x)
    with torch.no_grad():
        model.subspace += torch.randn(5, generator=torch.Generator().manual_seed(seed))
    return model(x).detach()


def test_loaded_weights_are_kept_with_other_initial_weights() -> None:
    saved, loaded, x = network(0), network(1), torch.ones(2, 6)
    moved(saved, 1)
    with torch.no_grad():
        saved.subspace += 1  # by the last step before the model is saved
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(loaded(x), saved(x))
    torch.testing.assert_close(moved(loaded, 2), moved(saved, 2), rtol=1e-4, atol=1e-5)


def test_a_restart_and_a_loaded_z_are_exact() -> None:
    saved, x = network(0), torch.ones(2, 6)
    moved(saved, 1)
    state = saved.state_dict()
    for part in (state, {"subspace": state["subspace"]}):
        again = network(0)
        again.load_state_dict(part, strict=False)
        assert torch.equal(again(x), saved(x))
        assert torch.equal(SUBSPACE.of(again).origin, SUBSPACE.of(saved).origin)


@pytest.mark.parametrize("assign", [False, True])
def test_assigned_weights_follow_z(assign: bool) -> None:
    saved, loaded, x = network(0), network(1), torch.ones(2, 6)
    moved(saved, 1)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()), assign=assign)
    torch.testing.assert_close(moved(loaded, 2), moved(saved, 2), rtol=1e-4, atol=1e-5)
    loaded.load_state_dict({"subspace": saved.subspace.detach() + 1}, strict=False, assign=assign)
    with torch.no_grad():
        saved.subspace += 1
    torch.testing.assert_close(loaded(x), saved(x), rtol=1e-4, atol=1e-5)


def test_weights_follow_changes_of_the_data_of_z() -> None:
    model, x = network(0), torch.ones(2, 6)
    before = model(x)
    model.subspace.data.add_(1)  # without a new version, as in some optimizers
    assert not torch.equal(model(x), before)


def test_a_whole_model_is_compiled() -> None:
    model, x = network(0), torch.ones(2, 6)
    model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        with torch.no_grad():
            model.subspace += 1
        torch.testing.assert_close(compiled(x), model(x))


def test_a_model_without_values_runs_twice() -> None:
    with torch.device("meta"):
        model = network(0)
        assert [model(torch.ones(2, 6)).shape for _ in range(2)] == [(2, 3)] * 2
        model.load_state_dict(model.state_dict())


def test_two_forward_passes_may_precede_a_backward_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = thrifty.optim.AdamW(model, lr=0.1)
    thrifty.apply((model, optimizer), "intrinsic_dimension", dimension=5)
    losses = []
    for _ in range(20):
        loss = model(torch.ones(2, 6)).square().mean() + model(torch.zeros(2, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_more_dimensions_than_weights_are_refused() -> None:
    with pytest.raises(RefusedError, match="dimension '7' exceeds the 6 weights"):
        IntrinsicDimension(dimension=7).model(nn.Linear(2, 2))


def trained_accuracy(dimension: int, seed: int) -> float:
    """Return the held-out accuracy on digits of a 64-64-10 network after 150 steps in a subspace."""
    images, labels = digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = images.flatten(1)[order], labels[order]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    subspace = restrict_to_subspace(model, dimension, seed)
    optimizer = torch.optim.Adam([model.subspace], 0.03)
    for _ in range(150):
        with subspace.gradients_of(model.subspace):
            F.cross_entropy(model(x[:1200]), y[:1200]).backward()
        model.subspace.grad = subspace.take_gradients()
        optimizer.step()
    with torch.no_grad():
        return float((model(x[1200:]).argmax(1) == y[1200:]).float().mean())


@pytest.mark.slow
def test_accuracy_on_digits_grows_with_the_dimension() -> None:
    means = [sum(trained_accuracy(d, seed) for seed in range(3)) / 3 for d in (5, 50, 500)]
    assert means[0] + 0.15 < means[1] and means[1] + 0.02 < means[2] and means[2] > 0.93


def test_parameters_that_were_added_later_are_loaded() -> None:
    saved, loaded, x = network(0), network(1), torch.ones(2, 6)
    for model in (saved, loaded):
        model.bias = nn.Parameter(torch.zeros(3))
    moved(saved, 1)
    with torch.no_grad():
        saved.bias += 1
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(loaded(x), saved(x)) and torch.equal(loaded.bias, saved.bias)
