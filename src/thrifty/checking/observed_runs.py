"""Short training runs that a check observes.

The observer is a technique that wraps the backward pass of all other techniques. Checked code therefore needs no
changes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from thrifty.composition.compose import CPU, BaseRun, Run, compose
from thrifty.composition.fake_runs import trained_batch_norms
from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.errors import ThriftyError
from thrifty.core.objective import Objective
from thrifty.core.out_of_memory import is_out_of_memory
from thrifty.core.shard_layout import local_tensors, order_of
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState, full_value
from thrifty.core.technique import Numerics, Technique
from thrifty.training.loop import train

DRAWING = (Stage.COMPRESS, Stage.SELECT)
"""Stages that sample examples or gradient values."""
RANDOM = "the loss draws random values"
"""Reason why runs cannot be compared if dropout is not the only random part of the loss."""


@dataclass(frozen=True)
class CheckSubject:
    """Subject of a check: a plain run and techniques, composed for a number of steps."""

    open: Callable[[], BaseRun]
    """Function that opens the plain run anew at each call."""
    techniques: tuple[Technique, ...]
    steps: int
    seed: int = 0
    device: torch.device = CPU

    @property
    def alone(self) -> tuple[Technique, ...]:
        """Techniques that one process can run. All other techniques divide work among ranks."""
        return tuple(technique for technique in self.techniques if not technique.divides_ranks)

    @property
    def dividing(self) -> tuple[Technique, ...]:
        return tuple(technique for technique in self.techniques if technique.divides_ranks)

    @cached_property
    def batch_norms(self) -> list[str]:
        return trained_batch_norms(self.open())

    def composed(self, techniques: Iterable[Technique]) -> Run:
        return compose(self.open(), tuple(techniques), self.steps, self.device)


@dataclass
class StepObservations:
    """Losses, gradients and parameters, observed in the steps of a run."""

    state: TrainState
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first: dict[str, Tensor] = field(default_factory=dict)
    """Gradient of each parameter in the first step."""
    steps_of: dict[str, int] = field(default_factory=dict)
    """Number of steps in which each parameter was trained."""
    reached: set[str] = field(default_factory=set)
    """Names of parameters with a nonzero gradient in at least one step."""

    def see(self, model: nn.Module) -> None:
        beginning = not self.steps_of
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            self.steps_of[name] = self.steps_of.get(name, 0) + 1
            if parameter.grad is None:
                continue
            if beginning:
                self.first[name] = full_value(parameter.grad, order_of(parameter)).float()
            if name not in self.reached and bool(torch.count_nonzero(*local_tensors([parameter.grad]))):
                self.reached.add(name)

    def tensors(self) -> dict[str, Tensor]:
        return {name: full_value(tensor) for name, tensor in self.state.tensors().items()}

    @property
    def not_finite(self) -> str:
        """Description of the first loss that is not finite; empty if all losses are finite."""
        steps = (step for step, loss in enumerate(self.losses, start=1) if not math.isfinite(loss))
        return next((f"the loss of step {step} is not finite: {self.losses[step - 1]}" for step in steps), "")


class GradientProbe(Technique):
    """Technique that calls `see` with the model after each backward pass, when gradients are complete."""

    stage, numerics = Stage.INITIALIZE, Numerics.EXACT

    see: Callable[[nn.Module], None]
    quiet: bool = False
    """True to disable dropout in the observed passes."""

    def backward(self, backward: Backward) -> Backward:
        def watched(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            with without_dropout(model) if self.quiet else nullcontext():
                outcome = backward(model, objective, batch)
            self.see(model)
            return outcome

        return watched


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Disable dropout inside the context. Batch norms stay in training mode."""
    modes = [(module, module.training) for module in model.modules()]
    for module, mode in modes:
        module.training = mode and getattr(module, "running_mean", None) is not None
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def train_observed(
    subject: CheckSubject,
    techniques: Sequence[Technique],
    *,
    steps: int | None = None,
    seed: int | None = None,
    quiet: bool = False,
    nudge: int | None = None,
    at: Callable[[Run, TrainState], None] = lambda run, state: None,
) -> tuple[Run, StepObservations]:
    """Train a run for `steps` steps (None: all). Return the composed run without the observer, and the observations.

    `at` is called with the run and its state before the first step and after each step. If `nudge` is set, the last
    bits of gradients change randomly, with `nudge` as the seed.
    """
    trace = StepObservations(TrainState())

    def see(model: nn.Module) -> None:
        if nudge is not None:
            nudge_gradients(model, nudge)
        trace.see(model)

    watched = subject.composed((*techniques, GradientProbe(see=see, quiet=quiet)))
    trace.state = watched.start()
    at(watched, trace.state)
    advance(watched, trace, subject.seed if seed is None else seed, steps, at)
    return replace(watched, techniques=tuple(t for t in watched.techniques if not isinstance(t, GradientProbe))), trace


def reference_run(
    subject: CheckSubject, techniques: Sequence[Technique], quiet: bool = False
) -> tuple[StepObservations, bool]:
    """Return the observations of a run, and True if its loss depends on random numbers, such as those of dropout."""
    _, trace = train_observed(subject, techniques, quiet=quiet)
    _, other = train_observed(subject, techniques, quiet=quiet, steps=1, seed=subject.seed + 1)
    return trace, not is_same(other.losses[0], trace.losses[0])


def advance(
    run: Run,
    trace: StepObservations,
    seed: int,
    steps: int | None = None,
    at: Callable[[Run, TrainState], None] = lambda run, state: None,
) -> None:
    """Continue training a state until `steps` steps are finished (None: until the end of the run)."""
    with closing(train(run, trace.state, seed)) as records:
        for record in records:
            trace.losses.append(record.loss)
            trace.norms.append(record.gradient_norm)
            at(run, trace.state)
            if record.step == steps:
                return


@torch.no_grad()
def nudge_gradients(model: nn.Module, seed: int) -> None:
    """Multiply each gradient value by 1 + 1e-7 ε, with ε from a standard normal distribution."""
    for index, parameter in enumerate(model.parameters()):
        if parameter.grad is not None:
            (gradient,) = local_tensors([parameter.grad])
            noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1000 * seed + index))
            gradient.addcmul_(gradient, noise.to(gradient), value=1e-7)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return each trained parameter's gradient in float32, and clear the gradients. A missing gradient is returned as
    zeros.
    """
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = gradient.detach().float().clone()
            parameter.grad = None
    return gradients


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same shape and values. NaN equals NaN."""
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or not (one.is_floating_point() and other.is_floating_point()):
        return False
    return torch.allclose(one.cpu().double(), other.cpu().double(), rtol=0, atol=0, equal_nan=True)


def is_same(one: float, other: float) -> bool:
    """Return True if two numbers are equal. NaN equals NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))


def relative(actual: float, wanted: float) -> float:
    """Return the relative difference between `actual` and `wanted`; infinity if either is NaN."""
    distance = abs(actual - wanted) / max(abs(wanted), 1e-12)
    return math.inf if math.isnan(distance) else distance


def farthest(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error of a gradient, by norm, and the name of its parameter. The error is relative to
    the parameter's gradient norm, or to a thousandth of the norm over all gradients if that is larger.
    """
    floor = 1e-3 * sum(float(tensor.square().sum()) for tensor in wanted.values()) ** 0.5
    worst, whose = 0.0, ""
    for name, tensor in wanted.items():
        other = actual.get(name, torch.zeros_like(tensor))
        size = max(float(tensor.norm()), floor, 1e-30)
        distance = float((other.to(tensor.device) - tensor).norm()) / size
        if math.isnan(distance):
            return math.inf, name
        if distance > worst:
            worst, whose = distance, name
    return worst, whose


def one_line_error(error: Exception) -> str:
    """Return the first line of an error. The type of the error precedes it, unless the error is a ThriftyError. Raises
    out-of-memory errors again, because they do not break a technique's promise.
    """
    if is_out_of_memory(error):
        raise error
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, ThriftyError) else f"{type(error).__name__}: {first}"
