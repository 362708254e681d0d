"""Replay of a model with the masks of a trace, to measure the effect of dropped pairs on the loss.

Tiled and sparse attention cores are replayed as plain softmax over their kept pairs. All masks are computed from the
recorded queries and keys. Dropped pairs of earlier layers therefore do not change the masks of later layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thrifty.core.errors import RefusedError, UsageError, class_name
from thrifty.core.tensor_tracing import track_running_module
from thrifty.simulators.accelerator.attention_error import computed_pairs
from thrifty.simulators.accelerator.attention_trace import AttentionLayer, AttentionTrace
from thrifty.simulators.accelerator.trace_recorder import (
    Core,
    attention_arguments,
    replace_attention,
)


@contextmanager
def replay_with_masks(model: nn.Module, trace: AttentionTrace) -> Iterator[None]:
    """Within the context, restrict attention to the trace's pairs. The caller must run the trace's examples in the same
    order.

    The output of a query without pairs is zero. Raises UsageError for other examples. Raises RefusedError if the model
    calls neither torch's attention nor an attention core.
    """
    with track_running_module(model) as current_module:
        replay = _Replay({layer.name: layer for layer in trace.layers}, current_module)
        with replace_attention(model, replay.plain), replay:
            yield
    if missing := [name for name, layer in replay.layers.items() if replay.seen.get(name, 0) != layer.examples]:
        raise RefusedError(
            f"{missing[0]!r} of {class_name(model)} did not run its examples in torch's or Thrifty's attention",
            fix="trace a run with plain attention",
        )


@dataclass
class _Replay(TorchFunctionMode):
    layers: dict[str, AttentionLayer]
    current_module: Callable[[], str]
    seen: dict[str, int] = field(default_factory=dict)
    """Number of examples that each layer has processed."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        arguments = attention_arguments(args, kwargs)
        kept = self.kept(self.current_module() or "attention", arguments["query"], arguments)
        mask, bias = kept, arguments.get("attn_mask")
        if bias is not None and bias.dtype != torch.bool:  # the trace records visible pairs, but no biases
            mask = bias.masked_fill(~kept, float("-inf"))
        output = func(**arguments | {"attn_mask": mask, "is_causal": False})
        return output.masked_fill(~kept.any(-1, keepdim=True), 0.0)

    def plain(self, core: Core) -> Core:
        """Return an attention core with the output of torch's attention, even if `core` does not call torch's
        attention.
        """

        def computed(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Tensor:
            before = sum(self.seen.values())
            output = core(q, k, v, *rest, **named)
            if sum(self.seen.values()) > before:
                return output
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

        return computed

    def kept(self, name: str, q: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Return the mask of kept pairs (examples, heads, queries, keys) for the examples of one call."""
        examples, _, queries, _ = q.shape
        first, layer = self.seen.get(name, 0), self.layers.get(name)
        if layer is None or first + examples > layer.examples or queries > layer.queries:
            raise UsageError(f"the trace has no mask for this call of {name!r}", fix="trace the same run again")
        self.seen[name] = first + examples
        if first == 0 and len(self.seen) == 1 and layer.q is not None and arguments.get("scale") is None:
            recorded = torch.from_numpy(layer.q[:examples, :, :queries]).to(q)
            if not torch.allclose(recorded, q, rtol=1e-2, atol=1e-2):
                raise UsageError(
                    f"queries of {name!r} differ from the trace: the weights or the examples have changed",
                    fix="trace the same run again",
                )
        kept = computed_pairs(layer)[first : first + examples, :, :queries, : arguments["key"].shape[2]]
        return torch.from_numpy(kept).to(q.device)
