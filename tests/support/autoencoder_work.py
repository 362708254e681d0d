"""Work of each rank in tests of the masked autoencoder, in a module that a new process can import."""

from image_runs import autoencoder_run
from tiny_runs import advance, losses, technique, with_optimizer

from thrifty.composition.compose import compose
from thrifty.core import mesh

STEPS = 3


def trained_along(axes: dict[str, dict[str, int]]) -> dict[str, list[float]]:
    """Losses of each step without blanks, for the techniques that use these axes, one after the other."""
    found = {}
    for name, sizes in axes.items():
        mesh.set_mesh({"pipeline": 1, "replicate": 1, "shard": 1, "tensor": 1} | sizes, "cpu")
        chosen = [technique(name), technique("data_selection.drop_masked_patches")]
        run = compose(autoencoder_run(batch=8), with_optimizer(chosen), STEPS)
        state = run.start()
        found[name] = losses(advance(run, state))
        run.verify(state)
        mesh.clear_mesh()
    return found
