"""Compiled graphs with autograd functions are loaded from the disk, and never for another formula."""

import pytest
import torch

from thrifty.machine.compile_cache import prepare_compile_cache
from thrifty.machine.cpu_features import can_compile

pytestmark = pytest.mark.skipif(not can_compile(), reason="no C++ compiler")


def scaled_square(forward: float, backward: float):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return forward * x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * backward * x

    def function(x):
        with torch.autocast("cpu", enabled=False):
            return Square.apply(x)

    return function


def compiled_values(forward: float, backward: float) -> tuple[float, float, int]:
    """Return value and derivative at 3, and the number of hits in the cache on disk."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x = torch.full((8,), 3.0, requires_grad=True)
    y = torch.compile(scaled_square(forward, backward))(x)
    y.sum().backward()
    return y[0].item(), x.grad[0].item(), torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]


def test_loaded_from_disk_unless_a_pass_differs(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    prepare_compile_cache()
    assert compiled_values(2.0, 4.0) == (18.0, 12.0, 0)
    assert compiled_values(2.0, 4.0) == (18.0, 12.0, 1)
    assert compiled_values(2.0, 5.0) == (18.0, 15.0, 0), "another backward pass"
    assert compiled_values(3.0, 4.0) == (27.0, 12.0, 0), "another forward pass"


def test_graphs_of_another_cpu_are_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits = []
    for capability in ("AVX2", "AVX512", "AVX2"):
        monkeypatch.setattr(torch._inductor.config, "unsafe_marked_cacheable_functions", {})
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)  # noqa: B023
        prepare_compile_cache()
        hits.append(compiled_values(2.0, 4.0)[2])
    assert hits == [0, 0, 1]
