"""Costs of the blocks of a chain without running the blocks: bytes and FLOPs are counted on fake tensors.

The model's own forward pass runs once, with replaced blocks. Each block call is traced forward and backward on fake
copies of its arguments and parameters. The next block receives zeros in the shape of the output.
"""

import time
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from thrifty.core.errors import RefusedError, ThriftyError, reason_of
from thrifty.core.module_state import restore_module_state
from thrifty.core.randomness import preserved_draws
from thrifty.core.ranks import mean_over_ranks
from thrifty.core.tensor_tracing import gc_disabled, storage_bytes, tensors_in
from thrifty.memory.block_costs import block_cost, in_seconds
from thrifty.memory.block_recompute import BlockChain
from thrifty.memory.recompute_schedule import ChainCost, ChainStageCost


class ChainSurvey:
    """Recorded block calls of one forward pass, in order."""

    def __init__(self, timed: bool):
        self.timed = timed
        self.stages: list[ChainStageCost] = []
        self.inputs: dict[int, Tensor] = {}
        """Arguments that are not outputs of the previous call, by storage."""
        self.outputs: list[tuple[Tensor, int]] = []
        """Outputs of the previous call, each with its number of in-place writes."""
        self.known: dict[Hashable, ChainStageCost] = {}
        """Costs by operation trace. Most blocks have the same trace as the previous block."""

    def call(self, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Count a call of a module, without its hooks, which run."""
        return between_hooks(module, partial(self.count, module, inner), args, kwargs)

    def count(self, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        linked = [output for output, version in self.outputs if output._version == version]
        own = [tensor for tensor in tensors if not any(tensor is output for output in linked)]
        self.inputs |= {tensor.untyped_storage()._cdata: tensor for tensor in own}
        try:
            cost, result = block_cost(module, module.forward, args, kwargs, self.known)
        except ThriftyError:
            raise
        except Exception as error:  # a block can raise any exception on fake tensors
            raise RefusedError(
                f"the cost of {type(module).__name__} depends on values, not only on shapes: {reason_of(error)}",
                fix="use memory.recompute, which runs the block",
            ) from error
        if self.timed and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            cost = in_seconds(cost, forward_seconds(inner, args, kwargs))
        self.stages.append(cost)
        self.outputs = [(tensor, tensor._version) for tensor in tensors_in(result)]
        return result

    def cost(self) -> ChainCost:
        return ChainCost(storage_bytes(self.inputs.values()), tuple(self.stages))


def between_hooks(module: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a module's hooks, and `function` in place of its forward function. While `function` runs, the module has its
    own forward function."""
    before = vars(module).get("forward")

    def restore() -> None:
        vars(module).pop("forward", None)
        vars(module).update({} if before is None else {"forward": before})

    def forward(*args: Any, **kwargs: Any) -> Any:
        restore()
        return function(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        restore()


def survey(
    model: nn.Module, chain: BlockChain, forward: Callable[..., Any], args: tuple, kwargs: dict, timed: bool = False
) -> ChainCost:
    """Return the costs of the chain's blocks in the forward pass `forward(*args, **kwargs)` of the model.

    Costs are counted, or measured if `timed` is True and the tensors are real. The model, its state and the
    random state are unchanged.
    """
    chain_survey = ChainSurvey(timed)
    fakes = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, FakeTensor)]
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(gc_disabled())
        stack.enter_context(preserved_draws(model.parameters()))
        stack.enter_context(restore_module_state(model))
        # this pass has no backward pass, so the activation store of the real pass must not receive its saved tensors
        stack.enter_context(saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing))
        if fakes:
            stack.enter_context(fakes[0].fake_mode)
        chain.replacement = chain_survey.call
        try:
            forward(*args, **kwargs)
        finally:
            chain.replacement = None
    return chain_survey.cost()


def forward_seconds(call: Callable[..., Any], args: tuple, kwargs: dict, times: int = 3) -> float:
    """Return the minimum time of a few calls after a warm-up, as the mean over ranks, so that all ranks decide
    equally.
    """
    seconds = []
    with saved_tensors_hooks(lambda tensor: None, lambda packed: packed):
        for _ in range(1 + times):
            began = time.perf_counter()
            call(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    return float(mean_over_ranks(torch.tensor(min(seconds[1:]), device=tensors_in((args, kwargs))[0].device)))
