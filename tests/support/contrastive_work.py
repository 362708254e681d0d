"""Pairs of embeddings, and functions that each rank runs in tests of the contrastive loss."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from pair_runs import pair_run
from tiny_runs import advance, losses, technique, with_optimizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thrifty.composition.compose import compose
from thrifty.composition.explain import explain
from thrifty.core import mesh
from thrifty.kernels.contrastive_loss import contrastive_losses
from thrifty.training.evaluation import held_out_loss

PAIRS = 24
STEPS = 3


def pairs(n: int, e: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings of images and captions (n, e), and weights (n,), in float64."""
    generator = torch.Generator().manual_seed(seed)
    images, captions = (torch.randn(n, e, generator=generator, dtype=torch.float64) for _ in range(2))
    return 2 * images, captions, torch.rand(n, generator=generator, dtype=torch.float64)


class Largest(TorchDispatchMode):
    """A mode that records the number of elements of the largest result of any operation."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def over_ranks(tile: int) -> tuple[list, list, list, int]:
    """Return losses and gradients of this rank's pairs, and the number of elements of its largest tensor."""
    images, captions, weight = (each.chunk(dist.get_world_size())[dist.get_rank()].clone() for each in pairs(PAIRS, 6))
    vectors = [images.requires_grad_(), captions.requires_grad_()]
    with Largest() as seen:
        losses = contrastive_losses(*vectors, dist.group.WORLD, tile)
        gradients = torch.autograd.grad((losses * weight).sum(), vectors)
    return losses.tolist(), gradients[0].tolist(), gradients[1].tolist(), seen.elements


def trained(strategy: Sequence[str], axes: dict[str, int]) -> tuple[list[float], float]:
    """Return the losses of each step of a tiny run on ranks along these axes, and the final held-out loss."""
    if axes:
        mesh.set_mesh({"pipeline": 1, "replicate": 1, "shard": 1, "tensor": 1} | axes, "cpu")
    chosen = with_optimizer([technique(name) for name in strategy])
    run = compose(pair_run(batch=8), chosen, STEPS)
    explain(run)
    state = run.start()
    records = advance(run, state)
    run.verify(state)
    assert state.model is not None
    held_out = held_out_loss(state.model, run.eval_objective, [pair_run(batch=8).source.at(20)], torch.device("cpu"))
    mesh.clear_mesh()
    return losses(records), held_out


def trained_along(runs: Sequence[tuple[Sequence[str], dict[str, int]]]) -> list[tuple[list[float], float]]:
    """Return the results of several runs in sequence."""
    return [trained(*each) for each in runs]
