"""Runs with and without recomputation, in a module that a new process can import."""

from collections.abc import Sequence
from typing import Any

import torch
from stacked_models import KINDS
from tiny_runs import Snapshot, losses, plain_run, run_through, snapshot, technique, with_optimizer
from torch import Tensor, nn

from thrifty.core.technique import Technique
from thrifty.core.tensor_tracing import StepTrace, gc_disabled

STEPS = 3


def trained(*chosen: Technique, style: str = "gpt", depth: int = 5) -> tuple[list[float], Snapshot]:
    """Return losses and the final state of a run with dropout."""
    torch._dynamo.reset()
    records, state = run_through(plain_run(style=style, depth=depth, dropout=0.3), with_optimizer(chosen), STEPS)
    return losses(records), snapshot(state)


def same_run(one: tuple[list[float], Snapshot], other: tuple[list[float], Snapshot]) -> bool:
    (losses, state), (wanted, expected) = one, other
    return losses == wanted and all(
        torch.equal(tensor, expected.tensors[name]) for name, tensor in state.tensors.items()
    )


def same_on_ranks(strategy: str, settings: Sequence[tuple[str, dict[str, Any]]]) -> list[bool]:
    """Return True for each technique that leaves a distributed run unchanged."""
    plain = trained(technique(strategy))
    return [same_run(trained(technique(strategy), technique(name, **given)), plain) for name, given in settings]


def model_of_kind(kind: str) -> nn.Module:
    """Return a model of one of many architectures, with dropout and without a key-value cache."""
    model = KINDS[kind].model()
    if hasattr(model, "config"):
        model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return model


def gradients(model: nn.Module, kind: str) -> list[Tensor | None]:
    torch.manual_seed(0)
    KINDS[kind].loss(model).backward()
    return [parameter.grad for parameter in model.parameters()]


def equal(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> bool:
    return all(
        one is other or (one is not None and other is not None and torch.equal(one, other))
        for one, other in zip(found, wanted, strict=True)
    )


def live_bytes(model: nn.Module, inputs: Tensor) -> tuple[int, int]:
    """Return the bytes after the forward pass, and at the peak of a step with preallocated parameter gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    with gc_disabled(), StepTrace(*known, inputs) as live:
        loss = model(inputs).sum()
        after_forward = live.now
        loss.backward()
    return after_forward, live.peak
