"""Work of each rank in tests of large batches, in a module that a new process can import."""

from tiny_runs import advance, plain_run, run_through, technique, with_optimizer

from thrifty.composition.compose import BaseRun, compose
from thrifty.core.batches import MappedSource
from thrifty.core.state import full_value


def averages(strategy: str | None) -> list[float]:
    """Return the norm of each of two averages after a few steps."""
    norms = []
    for name in ("averaging.latest", "averaging.ema"):
        chosen = [technique(name), *([technique(strategy)] if strategy else [])]
        run = compose(plain_run(), with_optimizer(chosen), 4)
        state = run.start()
        advance(run, state)
        assert state.optimizer is not None
        norms += [float(full_value(value).norm()) for value in state.optimizer.eval_weights() or []]
    assert norms
    return norms


def noise_scales(strategy: str | None) -> list[float]:
    """Return the gradient noise scale at each step, of equal halves on any number of ranks.

    Two ranks of four examples have the first and second halves; together these are the even and odd examples.
    """
    plain, chosen = plain_run(), [technique("measure.noise_scale", every=1, momentum=0.5)]
    if strategy:
        chosen.append(technique(strategy))
    else:
        source = MappedSource(plain.source, lambda step, batch: batch.map(lambda tensor: tensor[[0, 2, 1, 3]]))
        plain = BaseRun(plain.build, source, plain.objective)
    records, _ = run_through(plain, with_optimizer(chosen), 4)
    return [record.notes.get("noise_scale", 0.0) for record in records]


def with_each_strategy() -> list[tuple[list[float], list[float]]]:
    return [(averages(name), noise_scales(name)) for name in ("parallelism.replicate", "parallelism.shard")]
