"""Step of each optimizer on a 30M-parameter model, against other installable implementations.

Promise: no slower than the fastest of them in one interleaved run. Besides parameters, gradients and state, a step uses
no more memory than its state; Adafactor, whose state is tiny, uses a few megabytes. Gradients are refreshed before
every step, because some optimizers overwrite them, and shrinking values become slow denormals.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import lion_pytorch
import pytorch_optimizer
import schedulefree
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bench_adamw import model
from side_by_side import print_timings, rows, side_by_side, write
from thrifty.core.gradient_transform import GradientTransform
from thrifty.core.tensor_tracing import StepTrace, tensor_bytes
from thrifty.modeling.parameter_kinds import is_hidden_matrix, is_matrix
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

Named = list[tuple[str, nn.Parameter]]
Make = Callable[[Named], torch.optim.Optimizer]


def groups(named: Named, decay: float) -> list[dict]:
    return [
        {"params": [p for n, p in named if is_matrix(n, p)], "weight_decay": decay},
        {"params": [p for n, p in named if not is_matrix(n, p)], "weight_decay": 0.0},
    ]


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for hidden matrices and its fused AdamW for the rest."""

    def __init__(self, named: Named):
        hidden = [p for n, p in named if is_hidden_matrix(n, p)]
        rest = [(n, p) for n, p in named if not is_hidden_matrix(n, p)]
        self.parts = [
            torch.optim.Muon(hidden, lr=1e-3, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups(rest, 0.1), lr=1e-3, fused=True),
        ]
        super().__init__([p for _, p in named], {})

    def step(self) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
            self.state.update(part.state)


def in_training(optimizer: schedulefree.AdamWScheduleFree) -> torch.optim.Optimizer:
    optimizer.train()
    return optimizer


def torch_sgd(momentum: float, **options: bool) -> Make:
    return lambda named: torch.optim.SGD(groups(named, 1e-4), lr=1e-3, momentum=momentum, **options)


def free(**options: bool) -> Make:
    return lambda named: in_training(
        schedulefree.AdamWScheduleFree(groups(named, 0.1), lr=1e-3, warmup_steps=10, **options)
    )


RACES: dict[str, tuple[Callable[[], GradientTransform], dict[str, Make]]] = {
    "sgd": (
        lambda: sgd(1e-3, 0.9),
        {"torch fused": torch_sgd(0.9, fused=True), "torch foreach": torch_sgd(0.9, foreach=True)},
    ),
    "sgd without momentum": (
        lambda: sgd(1e-3, 0.0),
        {"torch fused": torch_sgd(0.0, fused=True), "torch foreach": torch_sgd(0.0, foreach=True)},
    ),
    "adamw": (lambda: adamw(1e-3), {"torch fused": lambda named: torch.optim.AdamW(groups(named, 0.1), fused=True)}),
    "lion": (
        lambda: lion(1e-4),
        {
            "lion-pytorch": lambda named: lion_pytorch.Lion(groups(named, 1.0), lr=1e-4),
            "pytorch_optimizer": lambda named: pytorch_optimizer.Lion(groups(named, 1.0), lr=1e-4),
        },
    ),
    "lars": (
        lambda: lars(0.1),
        {"pytorch_optimizer": lambda named: pytorch_optimizer.LARS(groups(named, 1e-4), lr=0.1)},
    ),
    "lamb": (
        lambda: lamb(1e-3),
        {"pytorch_optimizer": lambda named: pytorch_optimizer.Lamb(groups(named, 0.01), lr=1e-3)},
    ),
    "muon": (lambda: muon(1e-3), {"torch": MuonAndAdamW}),
    "soap": (
        lambda: soap(1e-3, max_dim=1024),
        {
            "pytorch_optimizer": lambda named: pytorch_optimizer.SOAP(
                groups(named, 0.01), lr=1e-3, max_precondition_dim=1024
            )
        },
    ),
    "adafactor": (
        lambda: adafactor(1e-3),
        {
            "torch": lambda named: torch.optim.Adafactor([p for _, p in named], lr=1e-3),
            "torch foreach": lambda named: torch.optim.Adafactor([p for _, p in named], lr=1e-3, foreach=True),
        },
    ),
    "schedule_free": (
        lambda: schedule_free(1e-3, weight_decay=0.1, warmup=10),
        {"schedulefree": free(), "schedulefree, one by one": free(foreach=False)},
    ),
}


@dataclass
class Contender:
    """An optimizer with its own model."""

    make: Make
    fresh: list[Tensor]
    depth: int

    def __post_init__(self) -> None:
        named = list(model(self.depth).named_parameters())
        self.parameters = [p for _, p in named]
        self.optimizer = self.make(named)

    @torch.no_grad()
    def refresh(self) -> None:
        for parameter, gradient in zip(self.parameters, self.fresh, strict=True):
            parameter.grad.copy_(gradient)

    def step(self) -> None:
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        if isinstance(self.optimizer, TransformOptimizer):
            return [tensor for slot in self.optimizer.slots.values() for tensor in slot]
        return [leaf for leaf in tree_leaves(list(self.optimizer.state.values())) if isinstance(leaf, Tensor)]


def ours(make: Callable[[], GradientTransform]) -> Make:
    return lambda named: TransformOptimizer(named, make())


def memory(make: Make, fresh: list[Tensor], threads: int, depth: int) -> dict[str, int]:
    """Return the bytes of state, and the peak of other memory in a step besides parameters, gradients and state.

    Counted on one thread, which sees every allocation; ours may use this much per thread.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    contender = Contender(make, fresh, depth)
    contender.step()  # torch's optimizers allocate their state in the first step
    contender.refresh()
    known: Iterable[Tensor] = [*contender.parameters, *(p.grad for p in contender.parameters), *contender.state()]
    with StepTrace(*known) as live:
        contender.step()
    torch.set_num_threads(threads_before)
    several = threads if isinstance(contender.optimizer, TransformOptimizer) else 1
    return {"state": sum(map(tensor_bytes, contender.state())), "extra": live.peak * several}


def race(name: str, fresh: list[Tensor], rounds: int, depth: int) -> dict[str, object]:
    make, rivals = RACES[name]
    makers = {"ours": ours(make), **rivals}
    held = {label: memory(maker, fresh, torch.get_num_threads(), depth) for label, maker in makers.items()}
    contenders = {label: Contender(maker, fresh, depth) for label, maker in makers.items()}
    steps = {label: contender.step for label, contender in contenders.items()}
    timings = side_by_side(steps, rounds, 2, {label: contender.refresh for label, contender in contenders.items()})
    fastest = min(rivals, key=lambda label: timings[label].median)
    print_timings(name, timings, fastest)
    for label, sizes in held.items():
        print(
            f"  {label:<34} {sizes['state'] / 1e6:9.1f} MB of state, {sizes['extra'] / 1e6:.1f} MB temporary in a step"
        )
    return {"seconds": rows(timings, fastest), "fastest other": fastest, "bytes": held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, help="results file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=RACES, nargs="+", default=list(RACES))
    parser.add_argument(
        "--depth", type=int, default=12, help="blocks; use fewer if torch's Muon takes minutes per step"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    fresh = [parameter.grad.clone() for parameter in model(options.depth).parameters()]
    results = {name: race(name, fresh, options.rounds, options.depth) for name in options.only}
    if options.path:
        parameters = sum(gradient.numel() for gradient in fresh)
        write(options.path, {"benchmark": "optimizers", "parameters": parameters, "races": results})


if __name__ == "__main__":
    main()
