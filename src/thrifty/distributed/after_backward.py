"""A callback at the end of every backward pass of a model, for a user's own training loop."""

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


def call_after_backward(model: nn.Module, function: Callable[[nn.Module], None]) -> None:
    """Call `function(model)` at the end of each backward pass that reaches a parameter, once all gradients are
    complete. Parameters added later and copies of the model are included."""
    hooked, waiting = WeakIdKeyDictionary(), weakref.WeakSet[nn.Module]()

    def run(module: nn.Module) -> None:
        waiting.discard(module)
        with torch.no_grad():
            function(module)

    def reached(module: Callable[[], nn.Module | None], parameter: Tensor) -> None:
        owner = module()
        if owner is not None and owner not in waiting:
            waiting.add(owner)
            torch.autograd.Variable._execution_engine.queue_callback(partial(run, owner))

    def hook_parameters(module: nn.Module, *_: object) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad and parameter not in hooked:
                hooked[parameter] = True
                parameter.register_post_accumulate_grad_hook(partial(reached, weakref.ref(module)))

    hook_parameters(model)
    model.register_forward_pre_hook(hook_parameters)
