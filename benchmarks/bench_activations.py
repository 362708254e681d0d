"""What memory for activations costs in time: a step of a 12-block model with each way of saving it, side by side.

Promise: at equal memory the joint plan is no slower than the best single way; compression to 4 bits costs at most 30 %
of a step on a processor. Bytes are those of live tensors at the peak of a step, parameters and gradients left out.
With a file name the table is kept, and the plot of memory against slowdown beside it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import altair
from torch import nn

from side_by_side import keep, ratio, side_by_side, tell
from thrifty.core.accounting import StepTrace
from thrifty.core.compose import Composition, Plain, compose
from thrifty.core.technique import Technique
from thrifty.data.packing import PackedTokens
from thrifty.models.presets import Shape, assemble
from thrifty.models.transformer import initialize
from thrifty.objectives.next_token import NextToken
from thrifty.studies.language import BYTES, source_text
from thrifty.techniques.memory.activation_budget import ActivationBudget
from thrifty.techniques.memory.compress_activations import CompressActivations
from thrifty.techniques.memory.offload_activations import OffloadActivations
from thrifty.techniques.memory.optimal_recompute import OptimalRecompute
from thrifty.techniques.memory.recompute import Recompute
from thrifty.techniques.optimizers.sgd import Sgd

DEPTH, WIDTH, HEADS, LENGTH, BATCH = 12, 384, 6, 256, 8
BUDGETS = (0.75, 0.5, 0.35, 0.25)
PLAIN = "nothing"


def plain_run() -> Plain:
    def build() -> nn.Module:
        model = assemble(Shape("gpt", DEPTH, WIDTH, HEADS, HEADS, 4 * WIDTH, BYTES, LENGTH, tied=True))
        initialize(model, 0)
        return model

    return Plain(build, PackedTokens(source_text()[0], LENGTH, BATCH, seed=0), NextToken())


def ways() -> dict[str, list[Technique]]:
    found: dict[str, list[Technique]] = {
        PLAIN: [],
        "recompute, every block": [Recompute()],
        "recompute, selective": [Recompute(schedule="selective")],
        "recompute, sqrt": [Recompute(schedule="sqrt")],
        "offload to disk": [OffloadActivations(to="disk")],
        "compress, 8 bits": [CompressActivations(bits=8)],
        "compress, 4 bits": [CompressActivations(bits=4)],
        "compress, 2 bits": [CompressActivations(bits=2)],
    }
    for share in BUDGETS:
        found[f"optimal recompute, {share:.0%}"] = [OptimalRecompute(bytes=share)]
        found[f"plan, {share:.0%}"] = [ActivationBudget(bytes=share)]
        found[f"plan with 4 bits, {share:.0%}"] = [ActivationBudget(bytes=share, bits=4)]
    return found


@contextmanager
def gradients_let_go(model: nn.Module) -> Iterator[None]:
    """As they come, so that only activations add up."""
    hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    yield
    for hook in hooks:
        hook.remove()


def peak_bytes(run: Composition, model: nn.Module) -> int:
    batch = run.source.at(0)
    known = [*model.parameters(), *model.buffers(), *batch.fields.values(), batch.weight]
    with gradients_let_go(model), StepTrace(*known) as live:
        run.backward(model, run.objective, batch)
    return live.peak


def a_step(run: Composition, model: nn.Module) -> Callable[[], None]:
    batch = run.source.at(0)

    def step() -> None:
        run.backward(model, run.objective, batch)
        model.zero_grad()

    return step


def plot(path: Path, points: list[dict[str, object]]) -> None:
    """Memory against slowdown, one point for each way."""
    shown = altair.Chart(altair.Data(values=points), width=560, height=360).encode(
        altair.X("memory:Q", title="activations at the peak, MB").scale(zero=False),
        altair.Y("slowdown:Q", title="step time, of one that keeps everything").scale(zero=False),
    )
    dots = shown.mark_point(filled=True, size=70).encode(altair.Color("kind:N", title=None))
    names = shown.mark_text(align="left", dx=7, fontSize=9).encode(altair.Text("way:N"))
    (dots + names).save(path, ppi=144)


def main() -> None:
    plain = plain_run()
    runs = {name: compose(plain, [Sgd(), *chosen], 10) for name, chosen in ways().items()}
    models = {name: run.build_model() for name, run in runs.items()}
    steps = {name: a_step(run, models[name]) for name, run in runs.items()}
    for step in steps.values():  # what is planned is planned at the first step
        step()
    peaks = {name: peak_bytes(run, models[name]) for name, run in runs.items()}
    timings = side_by_side(steps, rounds=8, warmup=1)
    tell(f"{DEPTH} blocks of width {WIDTH}, {BATCH} x {LENGTH} tokens", timings, PLAIN)
    points: list[dict[str, object]] = []
    for name, peak in sorted(peaks.items(), key=lambda pair: pair[1]):
        slowdown = ratio(timings, name, PLAIN)
        points.append({"way": name, "kind": name.partition(",")[0], "memory": peak / 1e6, "slowdown": slowdown})
        print(f"  {name:<34} {peak / 1e6:9.1f} MB  {peak / peaks[PLAIN]:6.1%}  {slowdown:6.3f}")
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        keep(path, {"benchmark": "activations", "peak bytes": peaks}, timings, PLAIN)
        plot(path.with_suffix(".png"), points)


if __name__ == "__main__":
    main()
