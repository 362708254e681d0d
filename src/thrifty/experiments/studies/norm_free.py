"""Norm-free training: with a suitable initialization, 24 blocks train without norms and without warm-up.

Papers    Zhang et al. 2019, Fixup (arXiv 1901.09321); Bachlechner et al. 2020, ReZero (2003.04887); De & Smith 2020,
          SkipInit (2002.10444); Huang et al. 2020, T-Fixup (ICML); Touvron et al. 2021, LayerScale (2103.17239).
Note      All variants start from the Xavier initialization of the original post-norm Transformer, which required
          warm-up. LayerScale keeps the norms; at this depth, little change is expected.
"""

import dataclasses
from statistics import fmean

import numpy as np
from torch import nn

from thrifty.core.plain_values import build as build_value
from thrifty.core.technique import Technique
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.language_task import BYTES, source_text, train_on_bytes
from thrifty.modeling.stream_norms import bypass_norms
from thrifty.models.families import assemble
from thrifty.models.init_laws import xavier_uniform_init
from thrifty.models.model_config import ModelConfig, Style
from thrifty.models.transformer import initialize
from thrifty.techniques.initializations.fixup import Fixup
from thrifty.techniques.initializations.layer_scale import LayerScale
from thrifty.techniques.initializations.rezero import ReZero
from thrifty.techniques.initializations.skip_init import SkipInit
from thrifty.techniques.initializations.t_fixup import TFixup
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.schedules.constant_then_decay import ConstantThenDecay

UNIGRAM = "unigram entropy of the text"
NORM_FREE = {"rezero": ReZero, "skip_init": SkipInit, "t_fixup": TFixup, "fixup": Fixup}
INITIALIZATIONS = {**NORM_FREE, "layer_scale": LayerScale}


def build(style: Style, norms: bool, depth: int, width: int, length: int, seed: int) -> nn.Module:
    """Return a byte decoder with pre-norm blocks ("gpt"), post-norm blocks ("gpt1"), or without norms."""
    model = assemble(ModelConfig(style, depth, width, 4, 4, 4 * width, BYTES, length, tied=False))
    model.law = xavier_uniform_init
    initialize(model, seed)
    if not norms:
        bypass_norms(model)
    return model


def initialization(name: str, seed: int) -> list[Technique]:
    """Return the initialization technique called `name`, with `seed` if it has a seed; an empty list if `name` is
    empty.
    """
    if not name:
        return []
    kind = INITIALIZATIONS[name]
    has_seed = any(field.name == "seed" for field in dataclasses.fields(kind))
    return [build_value(kind, {"seed": seed} if has_seed else {})]


def measure(
    seed: int,
    style: Style,
    warmup: int,
    depth: int,
    width: int,
    length: int,
    batch: int,
    steps: int,
    technique: str = "",
    norms: bool = True,
) -> dict[str, float]:
    """Return training losses of one variant with Adam. The learning rate is 1e-3, and constant after the warm-up."""
    trained = train_on_bytes(
        lambda: build(style, norms, depth, width, length, seed),
        [
            *initialization(technique, seed),
            AdamW(lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0),
            ConstantThenDecay(warmup=warmup, decay_from=1.0),
        ],
        steps=steps,
        seed=seed,
        length=length,
        batch=batch,
    )

    def mean_up_to(share: float) -> float:
        stop = max(1, round(share * steps))
        return fmean(trained.losses[max(0, stop - steps // 12 - 1) : stop])

    return {
        "early_loss": mean_up_to(0.2),
        "middle_loss": mean_up_to(0.6),
        "loss": mean_up_to(1.0),
        "seconds": trained.seconds,
    }


def norm_free(
    seeds: int = 3,
    depth: int = 24,
    width: int = 64,
    length: int = 64,
    batch: int = 16,
    steps: int = 250,
    warmup: int = 100,
) -> Study:
    """Ten variants of a 24-block byte decoder for 250 steps.

    Command   thrifty study norm_free
    Expect    Post-norm models stay at the unigram entropy, with and without warm-up. Without norms and without a
              special initialization, training diverges. Pre-norm models and all norm-free initializations learn from
              the first step; T-Fixup is fastest. Duration: a quarter of an hour on two cores.
    """
    fixed = {"depth": depth, "width": width, "length": length, "batch": batch, "steps": steps}
    variants: dict[str, dict] = {
        "post-norm": {"style": "gpt1"},
        "post-norm, warm-up": {"style": "gpt1", "warmup": warmup},
        "pre-norm": {},
        "nothing": {"norms": False},
        **{name: {"technique": name} for name in NORM_FREE},
        "layer_scale": {"technique": "layer_scale"},
        "layer_scale, warm-up": {"technique": "layer_scale", "warmup": warmup},
    }
    cases = {label: {"style": "gpt", "warmup": 0, **fixed, **variant} for label, variant in variants.items()}
    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "early_loss": MeasuredQuantity("training loss after about 20 % of the run, nats per byte"),
            "middle_loss": MeasuredQuantity("training loss after about 60 % of the run, nats per byte"),
            "loss": MeasuredQuantity(
                "training loss at the end: mean over the last twelfth of the steps, nats per byte"
            ),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
        },
        seeds=seeds,
        derive=lambda cells: {UNIGRAM: {"loss": unigram_entropy()}},
        expect={
            "post-norm does not learn, even with warm-up: less than 0.1 nats below the unigram entropy": lambda c: (
                min(_loss(c, "post-norm"), _loss(c, "post-norm, warm-up")) > _loss(c, UNIGRAM) - 0.1
            ),
            "pre-norm learns: 0.5 nats below post-norm": lambda c: _gain(c, "pre-norm") > 0.5,
            "without norms or another initialization, the final loss is above the initial one, ln 256": lambda c: (
                _loss(c, "nothing") > np.log(BYTES)
            ),
            **{
                f"{name} learns: 0.5 nats below post-norm": lambda c, name=name: _gain(c, name) > 0.5
                for name in NORM_FREE
            },
            "T-Fixup has the lowest loss": lambda c: min(cases, key=lambda label: _loss(c, label)) == "t_fixup",
            "LayerScale changes little at this depth: within 0.1 nats of pre-norm": lambda c: (
                abs(_loss(c, "layer_scale") - _loss(c, "pre-norm")) < 0.1
            ),
        },
        plots=[StudyPlot("loss", "Training loss at the end, nats per byte", y="loss")],
        minutes=15,
    )


def unigram_entropy() -> float:
    """Return the entropy of the byte frequencies in nats per byte: the loss of a model that knows only the
    frequencies.
    """
    counts = np.bincount(source_text()[0], minlength=BYTES)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _loss(cells: Cells, label: str) -> float:
    return cells[label]["loss"]


def _gain(cells: Cells, label: str) -> float:
    return _loss(cells, "post-norm") - _loss(cells, label)
