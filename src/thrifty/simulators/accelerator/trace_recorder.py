"""Recorder of attention traces of real models: calls of torch's attention, or of an attention core of this package.

For `scaled_dot_product_attention`, the recorder reads queries, keys, values, mask and `is_causal` from the call. A
tiled or sparse attention core runs a second time with unit vectors as values. The output of this run is the attention
probabilities, and pairs above zero are kept. Only forward passes are recorded."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thrifty.core.errors import RefusedError, class_name
from thrifty.core.tensor_tracing import track_running_module
from thrifty.kernels.attention_filters.keep_masks import core_weights
from thrifty.simulators.accelerator.attention_trace import AttentionLayer, AttentionTrace, layer_of

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
Core = Callable[..., Tensor]
HIDDEN = -9000.0
"""Threshold of additive masks: a lower value hides the pair. Masks use -inf, the dtype's minimum, -1e9 or -10000 (-9984
in bfloat16). Biases of visible pairs are larger."""
CORES = ("core", "thrifty_core")
"""Attributes that hold the attention core: in this package's modules, and in models of transformers."""


@dataclass
class _AttentionCall:
    """Operands and kept pairs of one attention call."""

    q: Tensor
    k: Tensor
    v: Tensor
    kept: Tensor | None
    """Mask (examples, 1 or heads, queries, keys), True for computed pairs; None for all pairs."""


@dataclass
class _Recorder(TorchFunctionMode):
    """Recorder of calls of torch's attention, grouped by the innermost running module."""

    current_module: Callable[[], str]
    calls: dict[str, list[_AttentionCall]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            arguments = attention_arguments(args, kwargs)
            q, k, v = arguments["query"], arguments["key"], arguments["value"]
            if arguments.get("scale") is not None:  # a trace implies the default scale
                q = q * (arguments["scale"] * q.shape[-1] ** 0.5)
            kept = _visible(arguments.get("attn_mask"), bool(arguments.get("is_causal")), q, k)
            self.note(_AttentionCall(q, k, v, kept))
        return func(*args, **(kwargs or {}))

    @property
    def seen(self) -> int:
        return sum(map(len, self.calls.values()))

    def note(self, call: _AttentionCall) -> None:
        self.calls.setdefault(self.current_module() or "attention", []).append(call)


def record_attention(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Any] | None = None,
    provenance: dict[str, str] | None = None,
    name: str = "recorded",
) -> AttentionTrace:
    """Record the attention of `model` on `batches`, in evaluation mode. The default of `forward` is `model(batch)`.

    Trailing keys that no query of an example can see are treated as padding. Raises RefusedError if the model calls
    neither torch's attention nor an attention core.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), track_running_module(model) as current_module:
            recorder = _Recorder(current_module)
            with replace_attention(model, lambda core: _recorded(core, recorder)):
                for batch in batches:
                    with recorder:
                        forward(model, batch) if forward else model(batch)
    finally:
        model.train(was_training)
    if not recorder.calls:
        raise RefusedError(
            f"{class_name(model)} calls neither torch's scaled_dot_product_attention nor an attention core",
            fix='load a transformers model with attn_implementation="sdpa"',
        )
    layers = tuple(_layer(layer, calls) for layer, calls in recorder.calls.items())
    about = {"model": class_name(model), "torch": torch.__version__, **(provenance or {})}
    return AttentionTrace(name, layers, about)


def attention_arguments(args: tuple, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a call of `scaled_dot_product_attention`, by name."""
    return dict(zip(_ARGUMENTS, args, strict=False)) | dict(kwargs or {})


@contextmanager
def replace_attention(model: nn.Module, other: Callable[[Core], Core]) -> Iterator[None]:
    """Within the context, replace each attention core of the model by `other(core)`."""
    cores = []
    for module, name in product(model.modules(), CORES):
        core = getattr(module, name, None)
        if callable(core):
            holder, attribute = (core, "forward") if isinstance(core, nn.Module) else (module, name)
            if all(holder is not known for known, *_ in cores):  # layers may share a core
                cores.append((holder, attribute, vars(holder).get(attribute)))
                setattr(holder, attribute, other(getattr(holder, attribute)))
    try:
        yield
    finally:
        for holder, attribute, own in cores:
            if own is None:
                delattr(holder, attribute)
            else:
                setattr(holder, attribute, own)


def _recorded(core: Core, recorder: _Recorder) -> Core:
    """Return an attention core that records its kept pairs. A core that does not call torch's attention runs a second
    time.

    A core may pass state to the next layer in its `relay`. The second run starts from the same state as the first, and
    its final state is discarded.
    """
    relay = getattr(core, "relay", None)

    def recording(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Tensor:
        before, received = recorder.seen, getattr(relay, "standing", None)
        output = core(q, k, v, *rest, **named)
        if recorder.seen > before:
            return output
        passed_on = getattr(relay, "standing", None)
        if relay is not None:
            relay.standing = received
        recorder.note(_AttentionCall(q, k, v, core_weights(core, q, k, *rest, **named) > 0))
        if relay is not None:
            relay.standing = passed_on
        return output

    return recording


def _visible(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else mask > HIDDEN
        return seen[(None,) * (4 - seen.dim())]
    if causal:
        return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    return None


def _layer(name: str, calls: list[_AttentionCall]) -> AttentionLayer:
    """Return one layer with all calls of a module as examples, padded to the longest call."""
    queries, keys = (max(getattr(call, kind).shape[2] for call in calls) for kind in ("q", "k"))
    heads = calls[0].q.shape[1]
    q, k, v = (
        np.concatenate([_padded(getattr(call, kind), heads, size) for call in calls])
        for kind, size in (("q", queries), ("k", keys), ("v", keys))
    )
    masks, lengths, key_lengths, all_kept = [], [], [], True
    for call in calls:
        examples, _, t, _ = call.q.shape
        kept = np.zeros((examples, heads, queries, keys), dtype=bool)
        seen = True if call.kept is None else call.kept.cpu().numpy()
        kept[:, :, :t, : call.k.shape[2]] = seen
        used = keys - np.argmax(kept.any(axis=(1, 2))[:, ::-1], axis=-1)
        rows = np.minimum(used, t) if t == call.k.shape[2] else np.full(examples, t)
        real = (np.arange(queries) < rows[:, None])[:, :, None] & (np.arange(keys) < used[:, None])[:, None]
        all_kept &= bool(kept[np.broadcast_to(real[:, None], kept.shape)].all())
        masks.append(kept)
        lengths.append(rows)
        key_lengths.append(used)
    mask = None if all_kept else np.concatenate(masks)
    sizes = [np.concatenate(part).astype(np.int64) for part in (lengths, key_lengths)]
    bits = 8 * calls[0].q.element_size()
    return layer_of(name, mask=mask, q=q, k=k, v=v, lengths=sizes[0], key_lengths=sizes[1], bits=bits)


def _padded(tensor: Tensor, heads: int, tokens: int) -> np.ndarray:
    """Return a tensor as (examples, heads, tokens, width): shared key-value heads are repeated, and zeros pad the
    tokens.
    """
    tensor = tensor.detach()
    if tensor.shape[1] != heads:
        tensor = tensor.repeat_interleave(heads // tensor.shape[1], dim=1)
    tensor = F.pad(tensor, (0, 0, 0, tokens - tensor.shape[2]))
    return tensor.cpu().to(torch.float32 if tensor.dtype != torch.float16 else torch.float16).numpy()
