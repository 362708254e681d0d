"""A trial call of an attention module alone, with random inputs, whose attention call is caught.

It shows the number and width of the heads. The gradients of the first head's query, key and value with respect to the
output of a layer show which rows of the layer they come from. The values of the module's parameters do not matter, but
the call computes with them, because the module's code may keep results for later calls.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from thrifty.core.module_state import restore_module_state
from thrifty.core.randomness import preserved_draws
from thrifty.modeling.attention_catcher import CatchAttention, CaughtCall
from thrifty.modeling.layer_shapes import in_width

T = TypeVar("T")
TOKENS, MORE_TOKENS = 3, 64


class ObservedHeads(NamedTuple):
    """Numbers of heads in an attention call. A module may repeat its key heads before the call."""

    heads: int
    key_heads: int
    width: int


class HeadRows(NamedTuple):
    """Rows of a layer from which the first head's query, key and value come."""

    q: list[int]
    k: list[int]
    v: list[int]
    heads: int
    width: int


def observed_heads(owner: nn.Module, width: int) -> ObservedHeads | None:
    """Return the numbers of heads, and their width, of an attention module with inputs of `width` channels. Return None
    if it cannot be called alone, or if its attention is not recognized."""
    if (seen := attention_inputs(owner, width)) is None:
        return None
    q, k, _ = seen
    return ObservedHeads(q.shape[1], k.shape[1], q.shape[3])


def first_head_rows(layer: nn.Module, owner: nn.Module) -> HeadRows | None:
    """Return the rows of a layer of the module `owner` from which the first head comes. Return None if the module
    cannot be called alone, or if its attention is not recognized."""
    outputs: list[Tensor] = []

    def replace(module: nn.Module, args: object, output: Tensor) -> Tensor:
        outputs.append(torch.randn(output.shape).to(output).requires_grad_())
        return outputs[-1]

    _, seen = _trial(owner, in_width(layer), replaced=(layer, replace))
    if len(seen) != 1 or len(outputs) != 1:
        return None
    with with_real_tensors():
        q, k, v = (_nonzero_rows(each, outputs[0]) for each in seen[0])
    return HeadRows(q, k, v, seen[0][0].shape[1], seen[0][0].shape[3])


def runs_without_attention(owner: nn.Module, width: int) -> bool:
    """Return True if a module with inputs of `width` channels can be called alone and does not compute attention, such
    as a mixture of experts with a softmax and matmuls. A module that requires other inputs is not tried. Short inputs
    may be treated otherwise, so two lengths are tried."""
    if any(value is None for value in _other_inputs(owner, TOKENS, torch.empty(())).values()):
        return False
    trials = [_trial(owner, width, tokens) for tokens in (TOKENS, MORE_TOKENS)]
    return all(call is not None and not (seen or call.reason) for call, seen in trials)


def has_other_keys(owner: nn.Module, width: int) -> bool:
    """Return True if a module with inputs of `width` channels can be called alone, and its attention has another number
    of keys than of queries."""
    call, seen = _trial(owner, width)
    return call is not None and call.is_done and not seen


def observed_mask(owner: nn.Module, width: int) -> Tensor | None:
    """Return the mask (…, tokens, tokens) of the only attention call of a module; None if it has no mask."""
    call, seen = _trial(owner, width)
    return call.mask if call is not None and len(seen) == 1 else None


def attention_inputs(owner: nn.Module, width: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return queries, keys and values (b, heads, tokens, head width) of the only attention call of a module."""
    _, seen = _trial(owner, width)
    return seen[0] if len(seen) == 1 else None


def _trial(
    owner: nn.Module, width: int, tokens: int = TOKENS, replaced: tuple[nn.Module, Callable[..., Tensor]] | None = None
) -> tuple[CaughtCall | None, list[tuple[Tensor, Tensor, Tensor]]]:
    """Call a module alone, without its hooks on outputs but with the hook `replaced` of one module. Return the call,
    and queries, keys and values of each attention call in it; None and no tensors if the module requires more inputs,
    or cannot be called without its values."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: object) -> Tensor:
        seen.append((q, k, v))
        call.mask = mask
        return q.new_zeros(*q.shape[:-1], v.shape[-1])

    call = CaughtCall(core, causal=False)
    with with_real_tensors(owner.parameters()), restore_module_state(owner):
        tensors = _real_tensors(owner)
        like = next((each for each in tensors.values() if each.is_floating_point()), torch.empty(()))
        for module in owner.modules():
            module._forward_hooks = OrderedDict()
        if replaced:
            replaced[0].register_forward_hook(replaced[1])
        try:
            with CatchAttention(call):
                x = torch.randn(1, tokens, width).to(like)
                functional_call(owner, tensors, (x,), _other_inputs(owner, tokens, like))
        except Exception:  # of any module's code
            return None, []
    return call, seen


def _other_inputs(owner: nn.Module, tokens: int, like: Tensor) -> dict[str, Any]:
    """Return the inputs of an attention module after the first, on the device of `like`: the customary positions of
    `transformers`, which are their numbers (1, t), or their cosines and sines (1, t, head width) without rotation; None
    for other inputs that have no default."""
    positions: dict[str, Any] = {"position_ids": torch.arange(tokens, device=like.device)[None]}
    if isinstance(width := getattr(owner, "head_dim", None), int):
        positions["position_embeddings"] = like.new_ones(1, tokens, width), like.new_zeros(1, tokens, width)
    others = [*inspect.signature(owner.forward).parameters.values()][1:]
    is_needed = {each.name: each.default is each.empty for each in others if each.kind is each.POSITIONAL_OR_KEYWORD}
    return {name: positions.get(name) for name, needed in is_needed.items() if needed or name in positions}


@contextmanager
def with_real_tensors(tensors: Iterable[Tensor] = ()) -> Iterator[None]:
    """Compute with real tensors, and leave the global random generators unchanged, also those of the devices of
    `tensors`."""
    with _disable_current_modes(), unset_fake_temporarily(), preserved_draws(tensors), torch.enable_grad():
        yield


def _nonzero_rows(heads: Tensor, output: Tensor) -> list[int]:
    """Return the channels of `output` that the first head of (b, heads, tokens, head width) depends on."""
    first = heads[:, 0]
    if not first.requires_grad:
        return []
    weights = torch.randn(first.shape).to(first)
    (gradient,) = torch.autograd.grad(first, output, weights, retain_graph=True, allow_unused=True)
    return [] if gradient is None else gradient.flatten(0, -2).any(0).nonzero().flatten().tolist()


def _real_tensors(owner: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name: themselves, or on the CPU in float32 if parameters differ
    in device or dtype, or have no values."""
    tensors = dict((*owner.named_parameters(), *owner.named_buffers()))
    kinds = {(each.device, each.dtype) for each in owner.parameters()}
    has_values = not any(each.is_meta or is_fake(each) for each in tensors.values())
    return {name: each.detach() if has_values and len(kinds) == 1 else _real(each) for name, each in tensors.items()}


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU in float32; for one without values, ones that need no memory."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    if tensor.is_meta or is_fake(tensor):
        with with_real_tensors():
            return torch.ones((), dtype=dtype).expand(tensor.shape)
    return tensor.detach().to("cpu", dtype)


def random_copy(copied: T, modules: Iterable[nn.Module]) -> T:
    """Return a deep copy of an object, in which the parameters of `modules` are random numbers on the CPU, in float32.
    Tensors of the modules are not deep-copied, since they may have no values."""
    memo: dict[int, Any] = {}
    for module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
            if name in module._parameters and isinstance(tensor, Tensor):
                memo[id(tensor)] = nn.Parameter(torch.randn(tensor.shape), tensor.requires_grad)
            elif isinstance(tensor, Tensor):
                memo[id(tensor)] = _real(tensor).clone(memory_format=torch.contiguous_format)
    return deepcopy(copied, memo)
