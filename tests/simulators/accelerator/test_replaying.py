"""A model replayed with the masks of a trace computes attention over exactly these pairs."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, UsageError
from thrifty.interface.design_comparison import held_out_losses
from thrifty.kernels.tiled_attention import causal_attention_reference, tiled_attention
from thrifty.models.attention_layers import Attention
from thrifty.simulators.accelerator.attention_trace import AttentionTrace
from thrifty.simulators.accelerator.design_filters import apply_design_filter
from thrifty.simulators.accelerator.masked_replay import replay_with_masks
from thrifty.simulators.accelerator.trace_recorder import record_attention


class Two(nn.Module):
    """A model of two attention layers."""

    def __init__(self, core=causal_attention_reference):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (Attention(32, 4, 2, core=core) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + self.first(x))


MODEL = Two()
X = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(1))
TRACE = record_attention(MODEL, [X[:2], X[2:]])


def masked(model: nn.Module, trace: AttentionTrace, x: Tensor = X) -> Tensor:
    with torch.no_grad(), replay_with_masks(model, trace):
        return torch.cat([model(part) for part in x.split(2)])


def test_recorded_masks_change_nothing() -> None:
    with torch.no_grad():
        torch.testing.assert_close(masked(MODEL, TRACE), MODEL(X))


def test_each_layer_uses_its_own_masks() -> None:
    trace = apply_design_filter(TRACE, "elsa", 0.4)
    kept = {layer.name: torch.from_numpy(layer.kept()).view(3, 4, 12, 12) for layer in trace.layers}

    class ByHand(nn.Module):
        def __init__(self, keep: Tensor):
            super().__init__()
            self.keep = keep

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
            scores = (q @ k.mT / 8**0.5).masked_fill(~self.keep, float("-inf"))
            return scores.softmax(-1) @ v

    other = Two()
    other.load_state_dict(MODEL.state_dict())
    other.first.core, other.second.core = (ByHand(kept[name]) for name in ("first", "second"))
    with torch.no_grad():
        expected = other(X)
        assert (expected - MODEL(X)).abs().max() > 1e-2
        torch.testing.assert_close(masked(MODEL, trace), expected, rtol=1e-4, atol=1e-5)


def test_dropped_queries_output_zeros_and_biases_stay() -> None:
    layer = TRACE.layers[0]
    alive = np.ones((3, 4, 12), dtype=np.int64)
    alive[:, :, 5] = 0
    trace = AttentionTrace("dropped", (layer.masked(layer.kept().reshape(3, 4, 12, 12), {"alive": alive}),))
    q, k, v = (torch.randn(3, 4, 12, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    added = torch.randn(12, 12)
    model = nn.Module()
    model.first = nn.Module()
    model.first.forward = lambda: F.scaled_dot_product_attention(q, k, v, added, scale=1.0)
    with replay_with_masks(model, trace):
        output = model.first()
    assert (output[:, :, 5] == 0).all()
    expected = (q @ k.mT + added).masked_fill(~torch.ones(12, 12).tril().bool(), float("-inf")).softmax(-1) @ v
    rows = [row for row in range(12) if row != 5]
    torch.testing.assert_close(output[:, :, rows], expected[:, :, rows])


def test_attention_other_than_softmax_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = SimpleNamespace(batches=lambda *count: [X])
    here = "thrifty.interface.design_comparison"
    monkeypatch.setattr(f"{here}.run_folder", lambda run: run)
    monkeypatch.setattr(f"{here}.open_examples", lambda recipe, run: (None, SimpleNamespace(held_out=batches)))
    monkeypatch.setattr(f"{here}.held_out_loss", lambda model, _, x, device: spread(model(x[0])))
    trace = AttentionTrace("mine", TRACE.layers, {"run": "mine", "examples": "3"})

    def spread(x: Tensor) -> float:
        return x.detach().std().item()

    def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tiled_attention(q, k, v, tile=4)

    monkeypatch.setattr(f"{here}.load_trained_model", lambda *a, **k: (Two(tiled), None))
    assert held_out_losses(Path("mine"), [trace]) == pytest.approx([spread(MODEL(X))])
    monkeypatch.setattr(f"{here}.load_trained_model", lambda *a, **k: (Two(lambda *x: 2 * tiled(*x)), None))
    with pytest.raises(RefusedError, match="with plain softmax attention"):
        held_out_losses(Path("mine"), [trace])


def test_other_examples_and_unseen_attention_are_refused() -> None:
    with pytest.raises(UsageError, match="the weights or the examples have changed"):
        masked(MODEL, TRACE, X + 1)
    with pytest.raises(UsageError, match="no mask for this call of 'first'"):
        masked(MODEL, TRACE, torch.cat([X, X]))
    with pytest.raises(RefusedError, match="did not run its examples"):
        masked(MODEL, TRACE, X[:2])

    class ByHand(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ x

    with pytest.raises(RefusedError, match="'first' of ByHand did not run its examples in torch's or"):
        masked(ByHand(), TRACE)


def test_tiled_cores_use_the_same_masks() -> None:
    tiled, trace = Two(lambda q, k, v: tiled_attention(q, k, v, tile=4)), apply_design_filter(TRACE, "elsa", 0.4)
    core = tiled.first.core
    for masks in (TRACE, trace):
        torch.testing.assert_close(masked(tiled, masks), masked(MODEL, masks), rtol=1e-4, atol=1e-5)
    assert tiled.first.core is core
