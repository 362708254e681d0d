"""Runs whose model is on fake tensors, so that building and tracing it needs no memory for values."""

import copy
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from thrifty.composition.compose import CPU, BaseRun, Run
from thrifty.core.batch_norms import batch_norms
from thrifty.core.randomness import preserved_draws
from thrifty.core.tensor_tracing import untraced


def on_fakes(run: Run, fake: FakeTensorMode) -> Run:
    """Return the run with its model on fake tensors."""
    return replace(run, plain=plain_on_fakes(run.plain, fake), device=CPU)


def plain_on_fakes(plain: BaseRun, fake: FakeTensorMode) -> BaseRun:
    """Return the run without techniques, with its model on fake tensors."""

    def build() -> nn.Module:
        model: nn.Module | None = None
        with (
            suppress(Exception),
            fake,
            _FakeCopies(),
        ):  # building may read values; a real error is raised again below
            model = plain.build()
        if model is None:
            gc.collect()  # the partly built model is in reference cycles with the error
            with suppress(Exception), unset_fake_temporarily(), torch.device("meta"):
                model = plain.build()
        if model is None:
            with unset_fake_temporarily(), untraced():  # a source to copy from, not part of the step
                model = plain.build()
        with fake:
            return _faked(model, fake)

    return replace(plain, build=build)


def trained_batch_norms(plain: BaseRun) -> list[str]:
    """Return the names of layers that normalize with batch statistics in training mode."""
    with preserved_draws(), without_log():
        return batch_norms(plain_on_fakes(plain, FakeTensorMode(allow_non_fake_inputs=True)).build().train())


class _FakeCopies(TorchFunctionMode):
    """Mode in which `copy.deepcopy` of a fake tensor returns a new fake tensor. A copy by torch shares the storage and
    remembered value of the original. The process may crash when such a copy is freed (torch 2.13)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, copies = args
        if id(tensor) not in copies:
            twin = torch.empty_like(tensor, requires_grad=tensor.requires_grad)
            twin = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
            copies[id(tensor)] = twin
            own = {name: value for name, value in vars(tensor).items() if name not in vars(twin)}
            vars(twin).update(copy.deepcopy(own, copies))
        return copies[id(tensor)]


def _faked(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """Replace the model's remaining real tensors, such as weights loaded from a file, by fake tensors."""
    converted: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and _is_to_be_faked(parameter):
                if id(parameter) not in converted:
                    converted[id(parameter)] = nn.Parameter(_fake_of(parameter.detach(), fake), parameter.requires_grad)
                module._parameters[name] = converted[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and _is_to_be_faked(buffer):
                module._buffers[name] = _fake_of(buffer, fake)
    return model


def _is_to_be_faked(tensor: Tensor) -> bool:
    return not hasattr(tensor, "fake_mode") or tensor.device.type == "meta"


def _fake_of(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    """Return a fake tensor like another tensor. For a tensor on the meta device, the fake tensor is on the CPU."""
    if hasattr(tensor, "fake_mode") or tensor.device.type == "meta":
        return torch.empty_like(tensor, device="cpu")
    return fake.from_tensor(tensor)


@contextmanager
def without_log() -> Iterator[None]:
    """Silence torch's log of an operation that fails on fake tensors, since the error is raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
