"""Ten steps of an optimizer on random tensors, in one process or sharded, in a module that a new process can import."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from thrifty.core.gradient_transform import GradientTransform
from thrifty.core.state import full_value
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.techniques.optimizers.adafactor import adafactor
from thrifty.techniques.optimizers.adamw import adamw
from thrifty.techniques.optimizers.lamb import lamb
from thrifty.techniques.optimizers.lars import lars
from thrifty.techniques.optimizers.lion import lion
from thrifty.techniques.optimizers.muon import muon
from thrifty.techniques.optimizers.schedule_free import schedule_free
from thrifty.techniques.optimizers.sgd import sgd
from thrifty.techniques.optimizers.soap import soap

STEPS = 10
SHAPES = {
    "embedding.token.weight": (11, 6),
    "blocks.0.norm.weight": (6,),
    "blocks.0.attention.qkv.weight": (10, 6),  # 6 queries, 2 keys, 2 values
    "blocks.0.attention.out.weight": (6, 6),
    "blocks.0.mlp.up.weight": (16, 6),  # gate and value
    "blocks.0.mlp.down.weight": (6, 8),
    "blocks.0.mlp.down.bias": (6,),
    "gain": (),
}
OPTIMIZERS: dict[str, Callable[[], GradientTransform]] = {
    "sgd": lambda: sgd(0.1, 0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda: adamw(1e-2),
    "lion": lambda: lion(1e-2),
    "lars": lambda: lars(1.0, weight_decay=0.1, coefficient=0.1),
    "lamb": lambda: lamb(1e-2, weight_decay=0.1),
    "lamb of slices": lambda: lamb(1e-2, weight_decay=0.1, slices=True),
    "muon": lambda: muon(1e-2, dtype=torch.float64),
    "muon of slices": lambda: muon(1e-2, slices=True, scale="original", dtype=torch.float64),
    "adafactor": lambda: adafactor(weight_decay=0.1),
    "soap": lambda: soap(1e-2, weight_decay=0.1, every=3),
    "schedule-free": lambda: schedule_free(1e-2, weight_decay=0.1, warmup=3),
}
Tensors = dict[str, Tensor]


def random_tensors(seed: int, dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: tensor.to(dtype) for name, tensor in drawn.items()}


def gradients(step: int, dtype: torch.dtype = torch.float64) -> Tensors:
    return random_tensors(1000 + step, dtype)


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(tensor) for name, tensor in random_tensors(0, dtype).items()}


def take_steps(optimizer: torch.optim.Optimizer, held: dict[str, nn.Parameter], steps: int = STEPS) -> Tensors:
    """Return the parameters after some steps of an optimizer on the gradients of each step."""
    for step in range(steps):
        for name, gradient in gradients(step, next(iter(held.values())).dtype).items():
            held[name].grad = gradient
        optimizer.step()
    return {name: parameter.detach() for name, parameter in held.items()}


def trained(transform: GradientTransform, steps: int = STEPS, dtype: torch.dtype = torch.float64) -> Tensors:
    held = parameters(dtype)
    return take_steps(TransformOptimizer(held.items(), transform), held, steps)


def trained_sharded() -> dict[str, dict[str, list]]:
    """Return the parameters of each optimizer after training with sharded rows, as plain tensors."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def part(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)] if tensor.ndim else None)

    found = {}
    for name, make in OPTIMIZERS.items():
        held = {key: nn.Parameter(part(parameter.detach())) for key, parameter in parameters().items()}
        optimizer = TransformOptimizer(held.items(), make())
        for step in range(STEPS):
            for key, gradient in gradients(step).items():
                held[key].grad = part(gradient)
            optimizer.step()
        found[name] = {key: full_value(parameter).tolist() for key, parameter in held.items()}
    return found
