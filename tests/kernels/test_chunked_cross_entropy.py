"""Chunked cross-entropy compared with the plain one: values, gradients and memory."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thrifty.core.errors import UsageError
from thrifty.kernels.chunked_cross_entropy import (
    IGNORED,
    Step,
    chunk_step,
    gradient_norm_scores,
    head_filled_up,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from thrifty.kernels.vocab_parallel_cross_entropy import vocabulary_step


class Case:
    """Random inputs of one shape; every fifth target is ignored."""

    def __init__(self, n: int = 75, d: int = 12, v: int = 31, dtype: torch.dtype = torch.float64, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(n, d, generator=generator, dtype=dtype).requires_grad_()
        self.weight = torch.randn(v, d, generator=generator, dtype=dtype).requires_grad_()
        self.bias = torch.randn(v, generator=generator, dtype=dtype).requires_grad_()
        self.targets = torch.randint(v, (n,), generator=generator)
        self.targets[::5] = IGNORED
        self.counts = torch.rand(n, generator=generator, dtype=torch.promote_types(dtype, torch.float32))

    @property
    def parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias


def counting_step() -> tuple[list[int], Step]:
    """Return `chunk_step` with a list that receives the number of rows of each call."""
    calls: list[int] = []

    def step(*arguments):
        calls.append(len(arguments[0]))
        return chunk_step(*arguments)

    return calls, step


def gradients_of(loss: Tensor, case: Case) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, case.parameters)


@settings(max_examples=25)
@given(
    n=st.integers(1, 70), d=st.integers(1, 9), v=st.integers(2, 40), chunk=st.integers(1, 80), seed=st.integers(0, 99)
)
def test_values_and_gradients_equal_plain_loss_for_any_shape(n, d, v, chunk, seed):
    case = Case(n, d, v, seed=seed)
    losses, lse = linear_cross_entropy(case.hidden, case.weight, case.targets, case.counts, bias=case.bias, chunk=chunk)
    plain, plain_lse = linear_cross_entropy_reference(case.hidden, case.weight, case.targets, bias=case.bias)
    torch.testing.assert_close(losses, plain)
    torch.testing.assert_close(lse, plain_lse)
    fast = gradients_of(3 * (losses * case.counts).sum(), case)
    torch.testing.assert_close(fast, gradients_of(3 * (plain * case.counts).sum(), case))


@pytest.mark.parametrize("expected", ["none", "right", "wrong", "zero"])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_gradients_are_right_for_any_expected_weights(expected, z_loss):
    case = Case()
    expected_weights = {"none": None, "right": case.counts, "wrong": case.counts.flip(0), "zero": case.counts * 0}[
        expected
    ]

    def total(losses, lse):
        return (losses * case.counts).sum() + z_loss * lse.square().sum()

    fast = gradients_of(
        total(
            *linear_cross_entropy(case.hidden, case.weight, case.targets, expected_weights, bias=case.bias, chunk=20)
        ),
        case,
    )
    plain = gradients_of(
        total(*linear_cross_entropy_reference(case.hidden, case.weight, case.targets, bias=case.bias)), case
    )
    torch.testing.assert_close(fast, plain)


def test_logits_are_computed_once_for_expected_weights():
    case, (calls, step) = Case(), counting_step()
    losses, _ = linear_cross_entropy(case.hidden, case.weight, case.targets, case.counts, chunk=16, step=step)
    assert len(calls) == 5
    (65536 * losses * case.counts).sum().backward()
    assert len(calls) == 5
    losses, _ = linear_cross_entropy(case.hidden, case.weight, case.targets, case.counts, chunk=16, step=step)
    losses.sum().backward()
    assert len(calls) == 15


@pytest.mark.parametrize("n", [1, 16, 17, 511, 513, 1000])
def test_every_chunk_has_the_same_shape(n):
    case, (calls, step) = Case(n, 4, 8), counting_step()
    linear_cross_entropy(case.hidden, case.weight, case.targets, step=step, chunk=128)
    assert len(set(calls)) == 1 and n <= sum(calls) < n + 16 * len(calls)


@pytest.mark.slow
def test_compiled_step_equals_eager():
    case = Case(100, 16, 50, dtype=torch.float32)
    step = torch.compile(chunk_step, dynamic=False)
    results = []
    for chosen in (chunk_step, step):
        losses, lse = linear_cross_entropy(case.hidden, case.weight, case.targets, case.counts, chunk=48, step=chosen)
        results.append((losses, lse, *torch.autograd.grad((losses * case.counts).sum(), case.parameters[:2])))
    torch.testing.assert_close(*results)


def test_second_backward_over_retained_graph_is_equal():
    case = Case()
    losses, _ = linear_cross_entropy(case.hidden, case.weight, case.targets, case.counts, bias=case.bias)
    loss = (losses * case.counts).sum()
    first = torch.autograd.grad(loss, case.parameters, retain_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(loss, case.parameters))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_input_has_no_gradient_and_no_effect_on_others(frozen):
    case = Case()
    trained = case.weight if frozen == "hidden" else case.hidden
    losses, _ = linear_cross_entropy(case.hidden, case.weight, case.targets, case.counts)
    (expected,) = torch.autograd.grad((losses * case.counts).sum(), trained)
    getattr(case, frozen).requires_grad_(False)

    def step(*arguments):
        outputs = chunk_step(*arguments)
        assert outputs[2 if frozen == "hidden" else 3] is None
        return outputs

    losses, _ = linear_cross_entropy(case.hidden, case.weight, case.targets, case.counts, step=step)
    torch.testing.assert_close(torch.autograd.grad((losses * case.counts).sum(), trained)[0], expected, rtol=0, atol=0)


def test_evaluation_computes_no_gradients():
    case = Case()

    def step(*arguments):
        assert arguments[4] is None
        return chunk_step(*arguments)

    with torch.no_grad():
        losses, _ = linear_cross_entropy(case.hidden, case.weight, case.targets, case.counts, step=step)
    assert not losses.requires_grad


def test_ignored_targets_have_no_loss_and_no_gradient():
    case = Case()
    losses, lse = linear_cross_entropy(case.hidden, case.weight, case.targets, case.counts)
    (losses.sum() + lse.sum()).backward()
    assert (losses[::5] == 0).all() and (lse[::5] == 0).all() and (case.hidden.grad[::5] == 0).all()
    assert (case.hidden.grad[1::5] != 0).any(dim=1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_accurate_as_plain_loss(dtype):
    case = Case(400, 64, 200, dtype=torch.float32)
    counts = torch.full((400,), 1e-7)  # far below the float16 range: only the relative weights may enter the products

    def error(losses: Tensor, scale: float) -> float:
        got = torch.autograd.grad((losses * counts * scale).sum(), case.weight)[0] / scale
        return ((got - exact).norm() / exact.norm()).item()

    exact_losses, _ = linear_cross_entropy_reference(case.hidden, case.weight, case.targets)
    exact = torch.autograd.grad((exact_losses * counts).sum(), case.weight)[0]
    hidden = case.hidden.to(dtype)
    chunked, _ = linear_cross_entropy(hidden, case.weight, case.targets, counts, chunk=64)
    plain, _ = linear_cross_entropy_reference(hidden, case.weight, case.targets)
    assert chunked.dtype == torch.float32
    assert error(chunked, 65536.0) < max(1.5 * error(plain, 65536.0), 2e-3)


def test_products_use_the_autocast_dtype():
    case = Case(dtype=torch.float32)
    seen = []

    def step(*arguments):
        seen.extend((arguments[0].dtype, arguments[1].dtype, torch.is_autocast_enabled("cpu")))
        return chunk_step(*arguments)

    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(case.hidden, case.weight, case.targets, step=step)[0].sum().backward()
    assert set(seen) == {torch.bfloat16, False}
    assert case.hidden.grad.dtype == case.weight.grad.dtype == torch.float32


def test_second_derivative_is_refused():
    case = Case()
    losses, _ = linear_cross_entropy(case.hidden, case.weight, case.targets, case.counts)
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad((losses * case.counts).sum(), case.hidden, create_graph=True)


def test_meta_tensors_suffice_for_accounting():
    hidden, weight = (torch.empty(*shape, device="meta", requires_grad=True) for shape in ((100, 16), (50, 16)))
    targets, counts = torch.empty(100, dtype=torch.long, device="meta"), torch.empty(100, device="meta")
    losses, _ = linear_cross_entropy(hidden, weight, targets, counts)
    (losses * counts).sum().backward()
    assert hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.sampled(1)
@pytest.mark.parametrize("expected_weights", [True, False])
def test_full_logits_of_50k_vocabulary_never_exist(expected_weights):
    n, d, v = 512, 8, 50_257
    hidden, weight = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
    targets, counts = torch.randint(v, (n,)), torch.full((n,), 1 / n)

    def largest(loss_of) -> int:
        with LargestTensor() as mode:
            (loss_of() * counts).sum().backward()
        return mode.elements

    expected = counts if expected_weights else None
    assert largest(lambda: linear_cross_entropy(hidden, weight, targets, expected, chunk=64)[0]) <= 64 * v < n * v / 2
    assert largest(lambda: linear_cross_entropy_reference(hidden, weight, targets)[0]) == n * v


def test_gradient_norm_scores_equal_autograd():
    case = Case()
    logits = (case.hidden @ case.weight.t() + case.bias).detach().requires_grad_()
    torch.nn.functional.cross_entropy(logits, case.targets, reduction="sum").backward()
    scores = gradient_norm_scores(case.hidden, case.weight, case.targets, bias=case.bias, chunk=20)
    torch.testing.assert_close(scores, logits.grad.square().sum(-1))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("v", [64, 100])
def test_padded_head_has_equal_losses_and_gradients(v, has_bias):
    case = Case(v=v)
    bias = case.bias if has_bias else None
    soft = hard = case.counts
    plain = chunk_step(case.hidden, case.weight, bias, case.targets, soft, hard, True, True, has_bias)
    weight, filled_bias = head_filled_up(case.weight, bias)
    assert len(weight) == 64 * -(-v // 64)
    padded = chunk_step(case.hidden, weight, filled_bias, case.targets, soft, hard, True, True, has_bias)
    for mine, theirs in zip(padded, plain, strict=True):
        if theirs is not None:
            unpadded = mine[:v] if mine.shape[:1] == (len(weight),) and len(weight) != len(case.hidden) else mine
            torch.testing.assert_close(unpadded, theirs)


def test_padded_part_of_a_head_has_equal_results(one_rank):
    """Targets of the next rank are not padding tokens of this rank."""
    case = Case(v=31)
    case.targets[::3] += 31
    case.targets[::5] = IGNORED
    step = partial(vocabulary_step, first=0, count=31, group=dist.group.WORLD)
    arguments = case.targets, case.counts, case.counts, True, True, True
    plain = step(case.hidden, case.weight, case.bias, *arguments)
    padded = step(case.hidden, *head_filled_up(case.weight, case.bias), *arguments)
    for mine, theirs, count in zip(padded, plain, (75, 75, 75, 31, 31), strict=True):
        torch.testing.assert_close(mine[:count], theirs)
