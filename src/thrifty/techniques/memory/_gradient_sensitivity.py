"""Sensitivity of a gradient to each of several perturbations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from thrifty.core.randomness import GeneratorStates
from thrifty.core.ranks import mean_over_ranks
from thrifty.optim.transform_elements import global_norm


def sensitivities(run: Callable[[int | None], None], model: nn.Module, count: int) -> list[float]:
    """Return the squared distance by which each of `count` perturbations changes the gradient.

    `run(i)` writes gradients to the parameters' `.grad`, with perturbation i. `run(None)` runs without a perturbation.
    Each call starts with the same random state and buffers. Afterwards buffers, random state and gradients are
    restored. The result is the mean over ranks.
    """
    with preserve_gradients(model) as restore:
        plain = _gradients(run, model, None, restore)
        squares = []
        for index in range(count):
            gradients = _gradients(run, model, index, restore)
            differences = [perturbed - exact for perturbed, exact in zip(gradients, plain, strict=True)]
            squares.append(global_norm(differences).double().square())
    return mean_over_ranks(torch.stack(squares)).tolist() if squares else []


def _gradients(
    run: Callable[[int | None], None], model: nn.Module, index: int | None, restore: Callable[[], None]
) -> list[Tensor]:
    restore()
    run(index)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients  # type: ignore[return-value]


@contextmanager
def preserve_gradients(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Clear all gradients for the context, and afterwards restore gradients, buffers and random state.

    The context yields a function that restores buffers and random state at once.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    generators = GeneratorStates({parameter.device for parameter in parameters})

    def restore() -> None:
        generators.put_back()
        for buffer, value in buffers:
            buffer.data.copy_(value)

    for parameter in parameters:
        parameter.grad = None
    try:
        yield restore
    finally:
        restore()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
