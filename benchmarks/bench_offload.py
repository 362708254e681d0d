"""AdamW of an offloaded optimizer against torch's fused one, on a 30M-parameter model.

Promise: at most 1.2 times the time of torch.optim.AdamW(fused=True), and of DeepSpeedCPUAdam if it is installed. The
state is in memory, in a mapped file (while the system can cache it), or updated tile by tile as for gradients from a
device. The last variant excludes the copies, which depend on the link.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from bench_adamw import model, torch_adamw
from side_by_side import print_timings, save_timings, side_by_side
from thrifty.core.gradient_transform import TransformChain, chain
from thrifty.memory.storage_tier import HostTier, OffloadHandle
from thrifty.optim.torch_optimizer import TransformOptimizer, UpdateLocation
from thrifty.techniques.memory.offload_optimizer import HostCopyUpdate, offloaded
from thrifty.techniques.optimizers.adamw import adamw

BASELINE = "torch fused"


class NoLink(HostTier):
    """Tier whose copies cost nothing, since source and target share memory."""

    def there(self, ticket: OffloadHandle) -> Tensor:
        return ticket.get()

    def bring(self, values: Tensor, into: Tensor) -> None:
        pass

    def _ticket(self, tensor: Tensor) -> OffloadHandle:
        return OffloadHandle(tensor)

    def _placed(self, part: Tensor) -> Tensor:
        return part


def in_tiles(transform: TransformChain, names: Sequence[str], parameters: list[Tensor]) -> UpdateLocation:
    return HostCopyUpdate(transform, names, parameters, NoLink("no link"))


def by_tiles() -> TransformChain:
    whole = chain(adamw(1e-3))
    whole.site = in_tiles
    return whole


def deepspeed(module: nn.Module) -> torch.optim.Optimizer:
    optimizer_class = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    return optimizer_class(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, adamw_mode=True)


def main() -> None:
    torch.manual_seed(0)
    ours = {
        "ours, with the parameters": TransformOptimizer(model().named_parameters(), adamw(1e-3)),
        "ours, tile by tile": TransformOptimizer(model().named_parameters(), by_tiles()),
        "ours, state in a mapped file": TransformOptimizer(model().named_parameters(), offloaded(adamw(1e-3), "disk")),
    }
    steps: dict[str, Callable[[], object]] = {BASELINE: torch_adamw(model(), fused=True).step}
    steps |= {name: optimizer.step for name, optimizer in ours.items()}
    if importlib.util.find_spec("deepspeed"):
        steps["DeepSpeedCPUAdam"] = deepspeed(model()).step
    timings = side_by_side(steps, rounds=20, warmup=3)
    parameters = sum(parameter.numel() for parameter in ours["ours, tile by tile"].parameters)
    print_timings(f"AdamW on {parameters:,} parameters", timings, BASELINE, parameters, "parameters/s")
    if len(sys.argv) > 1:
        save_timings(Path(sys.argv[1]), {"benchmark": "offload", "parameters": parameters}, timings, BASELINE)


if __name__ == "__main__":
    main()
