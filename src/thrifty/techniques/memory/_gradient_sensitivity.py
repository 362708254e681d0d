"""How much each of several disturbances moves a gradient."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from thrifty.core.randomness import GeneratorStates
from thrifty.core.ranks import mean_over_ranks
from thrifty.optim.transform_elements import global_norm


def sensitivities(run: Callable[[int | None], None], model: nn.Module, count: int) -> list[float]:
    """The squared distance between the gradient with disturbance i and the one without any, for each i < `count`.

    `run(i)` leaves gradients in the parameters. It is called once for each, with the same random numbers inside and the
    same buffers; afterwards those and the gradients are as before. Where ranks differ, the mean over them.
    """
    with preserve_gradients(model) as again:
        plain = _gradients(run, model, None, again)
        squares = []
        for index in range(count):
            gradients = _gradients(run, model, index, again)
            differences = [mine - theirs for mine, theirs in zip(gradients, plain, strict=True)]
            squares.append(global_norm(differences).double().square())
    return mean_over_ranks(torch.stack(squares)).tolist() if squares else []


def _gradients(
    run: Callable[[int | None], None], model: nn.Module, index: int | None, again: Callable[[], None]
) -> list[Tensor]:
    again()
    run(index)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients  # type: ignore[return-value]


@contextmanager
def preserve_gradients(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Inside, gradients start from none; afterwards they, buffers and random numbers are as before. What is yielded
    brings buffers and random numbers back in between."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    generators = GeneratorStates({parameter.device for parameter in parameters})

    def again() -> None:
        generators.put_back()
        for buffer, value in buffers:
            buffer.data.copy_(value)

    for parameter in parameters:
        parameter.grad = None
    try:
        yield again
    finally:
        again()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
