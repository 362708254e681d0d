"""Functions that each rank runs in tests of the masked autoencoder."""

from image_runs import autoencoder_run
from tiny_runs import advance, losses, technique, with_optimizer

from thrifty.composition.compose import compose
from thrifty.core import mesh

STEPS = 3


def trained_along(axes: dict[str, dict[str, int]]) -> dict[str, list[float]]:
    """Return the losses of each step without masked patches, by parallel technique."""
    results = {}
    for name, sizes in axes.items():
        mesh.set_mesh({"pipeline": 1, "replicate": 1, "shard": 1, "tensor": 1} | sizes, "cpu")
        chosen = [technique(name), technique("data_selection.drop_masked_patches")]
        run = compose(autoencoder_run(batch=8), with_optimizer(chosen), STEPS)
        state = run.start()
        results[name] = losses(advance(run, state))
        run.verify(state)
        mesh.clear_mesh()
    return results
