"""Work of each rank in tests of images, in a module that a new process can import."""

import torch
from image_runs import image_run
from tiny_runs import advance, losses, technique, with_optimizer

from thrifty.composition.compose import compose
from thrifty.core import mesh
from thrifty.core.recipe import AugmentationSettings
from thrifty.training.evaluation import evaluate

STEPS = 3
AUGMENT = AugmentationSettings(crop=1, operations=1, mixup=0.4)


def trained(name: str, axes: dict[str, int]) -> tuple[list[float], dict[str, float]]:
    """Return the losses of each step over ranks on these axes, and the final metrics."""
    mesh.set_mesh({"pipeline": 1, "replicate": 1, "shard": 1, "tensor": 1} | axes, "cpu")
    run = compose(image_run(batch=8, augment=AUGMENT), with_optimizer([technique(name)]), STEPS)
    state = run.start()
    records = advance(run, state)
    run.verify(state)
    assert state.model is not None
    held_out = [run.plain.source.at(step) for step in (10, 11)]
    measured = evaluate(state.model, run.eval_objective, held_out, torch.device("cpu"))
    mesh.clear_mesh()
    return losses(records), measured


def trained_along(axes: dict[str, dict[str, int]]) -> dict[str, tuple[list[float], dict[str, float]]]:
    """Return losses and metrics for each technique that uses these axes."""
    return {name: trained(name, sizes) for name, sizes in axes.items()}


def own_rows(step: int) -> list[list[float]]:
    """Return the indices of this rank's images in a step."""
    mesh.set_mesh({"pipeline": 1, "replicate": 2, "shard": 1, "tensor": 1}, "cpu")
    chosen = with_optimizer([technique("parallelism.replicate")])
    batch = compose(image_run(batch=8, augment=AUGMENT), chosen, STEPS).source.at(step)
    mesh.clear_mesh()
    return batch["inputs"].flatten(1).tolist()
