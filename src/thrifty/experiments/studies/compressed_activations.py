"""Compressed activations: 12 blocks trained with saved activations of 8, 4 or 2 bits instead of 32.

Paper     Chen et al. 2021, ActNN (arXiv 2104.14129); Liu et al. 2022, GACT (arXiv 2206.11357).
Note      Loss differences at this model size say little about large models. The papers report no increase of the loss
          at an average of 4 bits, and some increase at 2 bits. The study compares the loss after some hundred steps,
          and the saved memory.
"""

from typing import Any

from torch import nn

from thrifty.composition.compose import BaseRun, compose
from thrifty.composition.explain import count
from thrifty.core.technique import Technique
from thrifty.data.text.token_windows import PackedTokens
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.language_task import BYTES, decayed_adamw, source_text, train_on_bytes
from thrifty.experiments.tasks.whole_run import initialized
from thrifty.models.model_config import ModelConfig
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.memory.compress_activations import CompressActivations

PLAIN = "32 bits"


def build(depth: int, width: int, length: int, seed: int) -> nn.Module:
    """Return a byte decoder with GELU, whose derivative is not linear in the saved tensor."""
    heads = max(1, width // 16)
    return initialized(ModelConfig("gpt", depth, width, heads, heads, 4 * width, BYTES, length, tied=True), seed)


def measure(
    seed: int,
    depth: int,
    width: int,
    length: int,
    batch: int,
    steps: int,
    bits: int = 32,
    ranges: str = "group",
    adaptive: bool = False,
) -> dict[str, float]:
    """Return the losses of one run, and the bytes of live activations at the end of the forward pass."""
    chosen: list[Technique] = [*decayed_adamw(width)]
    if bits < 32:
        settings: dict[str, Any] = {"bits": bits, "ranges": ranges, "adaptive": adaptive, "every": 100}
        chosen.append(CompressActivations(**settings, group=256 if ranges == "group" else 16))
    source = PackedTokens(source_text()[0], length, batch, seed)
    run = compose(BaseRun(lambda: build(depth, width, length, seed), source, NextToken()), chosen, steps)
    _, footprint = count(run, run.techniques)
    trained = train_on_bytes(
        lambda: build(depth, width, length, seed), chosen, steps=steps, seed=seed, length=length, batch=batch
    )
    return {
        "loss": trained.held_out_loss(),
        "training_loss": trained.mean_loss(max(steps // 10, 1)),
        "activations": footprint.activations,
        "seconds": trained.seconds,
    }


def compressed_activations(
    seeds: int = 3, depth: int = 12, width: int = 64, length: int = 64, batch: int = 16, steps: int = 300
) -> Study:
    """A 12-block byte decoder with six storage formats of activations.

    Command   thrifty study compressed_activations
    Expect    With 8 and 4 bits, the final loss is within 0.05 nats of the plain run for every grouping of quantization
              ranges. With 2 bits, the loss is higher. Activations of 8, 4 and 2 bits take less than 1/3, 1/5 and 1/7 of
              the memory. Duration: ten minutes on two cores.
    """
    fixed = {"depth": depth, "width": width, "length": length, "batch": batch, "steps": steps}
    variants: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "8 bits": {"bits": 8},
        "4 bits": {"bits": 4},
        "4 bits, a range a head": {"bits": 4, "ranges": "head"},
        "4 bits on average": {"bits": 4, "adaptive": True},
        "2 bits": {"bits": 2},
    }
    return Study(
        measure=measure,
        cases={label: fixed | variant for label, variant in variants.items()},
        quantities={
            "loss": MeasuredQuantity("held-out loss at the end, nats per byte"),
            "training_loss": MeasuredQuantity("mean training loss of the last tenth of the steps"),
            "activations": MeasuredQuantity("bytes of activations alive at the end of the forward pass"),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
        },
        seeds=seeds,
        expect={
            **{
                f"{label}: final loss within 0.05 nats of {PLAIN}": lambda c, label=label: _worse(c, label) < 0.05
                for label in variants
                if label.startswith(("8", "4"))
            },
            "the final loss with 2 bits is above that with 4 bits": lambda c: c["2 bits"]["loss"] > c["4 bits"]["loss"],
            "activations of 8, 4 and 2 bits take less than 1/3, 1/5 and 1/7 of the memory": lambda c: all(
                _share(c, f"{bits} bits") < 1 / most for bits, most in ((8, 3), (4, 5), (2, 7))
            ),
        },
        plots=[StudyPlot("loss", "Held-out loss by bytes of activations", x="activations", y="loss", log_x=True)],
        minutes=10,
    )


def _worse(cells: Cells, label: str) -> float:
    return cells[label]["loss"] - cells[PLAIN]["loss"]


def _share(cells: Cells, label: str) -> float:
    return cells[label]["activations"] / cells[PLAIN]["activations"]
