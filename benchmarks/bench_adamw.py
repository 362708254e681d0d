"""Time of AdamW as a chain of transforms against torch.optim.AdamW(fused=True), on a 30M-parameter model.

Promise: at most 1.1 times its time, compiled or not; results agree within 1e-7
(tests/optim/test_transform_elements.py).
"""

import sys
from pathlib import Path

import torch
from torch import nn

from side_by_side import print_timings, save_timings, side_by_side
from thrifty.core.recipe import ModelSettings
from thrifty.modeling.parameter_kinds import is_matrix
from thrifty.models import build_model
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.techniques.optimizers.adamw import adamw
from thrifty.techniques.optimizers.lion import lion


def model(depth: int = 12) -> nn.Module:
    module = build_model(ModelSettings(preset="llama-mini", depth=depth, width=448, heads=7), 8192, 512, seed=0)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return module


def torch_adamw(module: nn.Module, **options: bool) -> torch.optim.Optimizer:
    named = list(module.named_parameters())
    groups = [
        {"params": [p for n, p in named if is_matrix(n, p)], "weight_decay": 0.1},
        {"params": [p for n, p in named if not is_matrix(n, p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), **options)


def main() -> None:
    torch.manual_seed(0)
    chained = TransformOptimizer(model().named_parameters(), adamw(1e-3))
    optimizers = {"torch fused": torch_adamw(model(), fused=True), "chain": chained}
    compiled = TransformOptimizer(model().named_parameters(), adamw(1e-3))
    compiled.compile()
    optimizers["chain, compiled"] = compiled
    optimizers["torch foreach"] = torch_adamw(model(), foreach=True)
    optimizers["lion chain"] = TransformOptimizer(model().named_parameters(), lion(1e-4))
    timings = side_by_side({name: optimizer.step for name, optimizer in optimizers.items()}, rounds=20, warmup=3)
    parameters = sum(parameter.numel() for parameter in chained.parameters)
    print_timings(f"AdamW on {parameters:,} parameters", timings, "torch fused", parameters, "parameters/s")
    if len(sys.argv) > 1:
        save_timings(Path(sys.argv[1]), {"benchmark": "adamw", "parameters": parameters}, timings, "torch fused")


if __name__ == "__main__":
    main()
