"""`summary`: changes of techniques in a model, and the algorithm of each parameter in an optimizer."""

import re
from dataclasses import dataclass
from typing import overload

from torch import nn
from torch.optim import Optimizer

from thrifty.composition.technique_optimizer import TechniqueOptimizer
from thrifty.core.errors import UsageError
from thrifty.interface.own_loop import APPLIED, AppliedTechnique


@dataclass(frozen=True)
class ModelSummary:
    """Parameter counts of a model, and the modules that each technique changed or skipped."""

    parameters: int
    trainable: int
    applied: tuple[AppliedTechnique, ...]

    def __str__(self) -> str:
        share = self.trainable / self.parameters if self.parameters else 0.0
        lines = [f"{self.parameters:,} parameters, {self.trainable:,} trainable ({share:.2%})"]
        for each in self.applied:
            lines += [each.technique.name, *(f"  {note}" for note in each.notes)]
        return "\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True)
class OptimizerSummary:
    """Parameter groups of an optimizer, the algorithm of each parameter, and added techniques."""

    optimizer: str
    groups: tuple[dict[str, tuple[str, ...]], ...]
    """For each group: names of its parameters by algorithm. The name of an algorithm lists the steps of its update."""
    elements: tuple[int, ...]
    """Total number of parameter elements in each group."""
    learning_rates: tuple[float, ...]
    added: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.optimizer} of {sum(self.elements):,} elements"]
        lines += [f"{name} is added" for name in self.added]
        for number, (parts, count, rate) in enumerate(
            zip(self.groups, self.elements, self.learning_rates, strict=True)
        ):
            lines.append(f"group {number}: {sum(map(len, parts.values()))} parameters, {count:,} elements, lr {rate:g}")
            for algorithm, names in parts.items():
                alike = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)|(?<=^parameter)\d+$", "N", name) for name in names)
                lines += [f"  {algorithm}: {len(names)} parameters", f"    {', '.join(alike)}"]
        return "\n".join(lines)

    __repr__ = __str__


@overload
def summary(target: nn.Module) -> ModelSummary: ...
@overload
def summary(target: Optimizer) -> OptimizerSummary: ...
def summary(target: nn.Module | Optimizer) -> ModelSummary | OptimizerSummary:
    """Summarize a model or an optimizer.

    For a model: number of parameters and of trainable parameters, and the modules that each technique changed or
    skipped.

    Example::

        print(thrifty.summary(thrifty.apply(model, "lora", rank=4)))
        print(thrifty.summary(thrifty.optim.Muon(model)))
    """
    if isinstance(target, Optimizer):
        return _optimizer_summary(target)
    if not isinstance(target, nn.Module):
        raise UsageError(
            f"summary requires a model or an optimizer, not a {type(target).__name__!r}",
            fix="thrifty.summary(model)",
        )
    parameters = list(target.parameters())
    trainable = sum(each.numel() for each in parameters if each.requires_grad)
    return ModelSummary(sum(each.numel() for each in parameters), trainable, APPLIED.get(target) or ())


def _optimizer_summary(optimizer: Optimizer) -> OptimizerSummary:
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    own = isinstance(optimizer, TechniqueOptimizer)
    return OptimizerSummary(
        kind,
        tuple(
            {key: tuple(names) for key, names in optimizer.algorithms(group).items()}
            if own
            else {kind: tuple(group.get("param_names", [f"parameter{n}" for n in range(len(group["params"]))]))}
            for group in groups
        ),
        tuple(sum(each.numel() for each in group["params"]) for group in groups),
        tuple(float(group["lr"]) for group in groups),
        tuple(each.name for each in optimizer.added) if own else (),
    )
