"""Recipes of language models on text."""

import torch

from thrifty.core import recipe
from thrifty.core.technique import Technique
from thrifty.machine.cpu_features import can_compile, has_fast_bfloat16
from thrifty.techniques.attention.tiled import TiledAttention
from thrifty.techniques.compile import CompiledBlocks
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.precision.mixed import MixedPrecision
from thrifty.techniques.schedules.linear import LinearDecay

LEAST_COMPILED = 120.0
LEAST_COMPILED_STEPS = 100
"""Smallest budget in seconds in which compilation, which takes up to a minute, pays."""


def text_techniques(lr: float) -> tuple[Technique, ...]:
    """Return the techniques that help in nearly every run of a causal language model.

    The techniques are AdamW, linear decay and gradient clipping. Mixed precision is added if the processor has bfloat16
    instructions. Blocks are compiled if there is a compiler and the budget is not very short. On CPUs, tiled attention
    is added to compiled blocks if the model allows it.
    """
    chosen: list[Technique] = [AdamW(lr=lr), LinearDecay(), GradientClipping()]
    if has_fast_bfloat16():
        chosen.append(MixedPrecision())
    if can_compile():
        chosen.append(CompiledBlocks(least_seconds=LEAST_COMPILED, least_steps=LEAST_COMPILED_STEPS))
        if not torch.cuda.is_available():
            chosen.append(TiledAttention(optional=True))
    return tuple(chosen)


def bidirectional_techniques(lr: float) -> tuple[Technique, ...]:
    """Return `text_techniques` without tiled attention, for models whose attention is not causal."""
    return tuple(technique for technique in text_techniques(lr) if not isinstance(technique, TiledAttention))


def text() -> recipe.Recipe:
    """A small Llama-style model on any text. `thrifty train --data FILE` uses this recipe.

    Command   thrifty train text --data my.txt
    Expect    A few thousand tokens per second and core. After 500 steps the held-out loss is far below the unigram
              entropy.
    """
    return recipe.Recipe(
        name="text",
        about="A small Llama-style language model on any text.",
        model=recipe.ModelSettings(preset="llama-micro"),
        data=recipe.DataSettings(length=256, batch=32),
        budget=recipe.Budget(steps=500),
        techniques=text_techniques(lr=2e-3),
    )


def plain() -> recipe.Recipe:
    """The baseline of comparisons: a small Llama-style model in plain PyTorch, with AdamW and no saving technique.

    Command   thrifty compare plain --variant "--with precision.mixed"
    """
    return recipe.Recipe(
        name="plain",
        about="A small Llama-style model on the King James Bible in plain PyTorch.",
        model=recipe.ModelSettings(preset="llama-nano"),
        data=recipe.DataSettings(source="kjv", length=256, batch=8),
        budget=recipe.Budget(seconds=60.0),
        evaluation=recipe.EvaluationSettings(every=200, examples=16),
        techniques=(AdamW(lr=3e-3), LinearDecay(), GradientClipping()),
    )


def masked() -> recipe.Recipe:
    """A small BERT-style encoder on any text, trained on masked tokens.

    Command   thrifty train masked --data my.txt
    Expect    Training requires more tokens than next-token prediction, because only one token in seven is predicted.
    """
    return recipe.Recipe(
        name="masked",
        about="A small BERT-style encoder on any text, trained on masked tokens.",
        model=recipe.ModelSettings(preset="bert-micro"),
        objective=recipe.ObjectiveSettings("masked_token"),
        data=recipe.DataSettings(length=128, batch=64),
        budget=recipe.Budget(steps=2000),
        techniques=bidirectional_techniques(lr=1e-3),
    )


def spans() -> recipe.Recipe:
    """A small T5-style encoder-decoder on any text, trained with span corruption.

    Command   thrifty train spans --data my.txt
    """
    return recipe.Recipe(
        name="spans",
        about="A small T5-style encoder-decoder on any text, trained with span corruption.",
        model=recipe.ModelSettings(preset="t5-micro"),
        objective=recipe.ObjectiveSettings("sequence_to_sequence"),
        data=recipe.DataSettings(length=128, batch=64),
        budget=recipe.Budget(steps=2000),
        techniques=bidirectional_techniques(lr=2e-3),
    )


def kjv() -> recipe.Recipe:
    """A Llama-style model of 4M parameters on the King James Bible: a demo that trains for 150 seconds.

    Command   thrifty data get kjv && thrifty train kjv
    """
    return recipe.Recipe(
        name="kjv",
        about="A small Llama-style model on the King James Bible (public domain).",
        model=recipe.ModelSettings(preset="llama-micro"),
        data=recipe.DataSettings(source="kjv", length=256, batch=32),
        budget=recipe.Budget(seconds=150.0),
        evaluation=recipe.EvaluationSettings(every=25),
        checkpoints=recipe.CheckpointSettings(every=100),
        techniques=text_techniques(lr=2e-3),
    )


def stdlib() -> recipe.Recipe:
    """A small Llama-style model on Python code: sources of the standard library and torch (no download).

    Command   thrifty train stdlib
    """
    return recipe.Recipe(
        name="stdlib",
        about="A small Llama-style model on Python code of the standard library and torch.",
        model=recipe.ModelSettings(preset="llama-micro"),
        data=recipe.DataSettings(source="python-stdlib", length=256, batch=32),
        budget=recipe.Budget(steps=500),
        techniques=text_techniques(lr=2e-3),
    )
