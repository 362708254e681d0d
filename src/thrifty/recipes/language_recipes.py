"""Language models on text."""

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


def fast(lr: float) -> tuple[Technique, ...]:
    """What pays on nearly every run: AdamW with a rate decayed to the end and clipping; bfloat16 where there are units
    for it; compiled blocks where there is a compiler, on CPUs with tiled attention in models that allow it."""
    chosen: list[Technique] = [AdamW(lr=lr), LinearDecay(), GradientClipping()]
    if has_fast_bfloat16():
        chosen.append(MixedPrecision())
    if can_compile():
        chosen.append(CompiledBlocks())
        if not torch.cuda.is_available():
            chosen.append(TiledAttention(optional=True))
    return tuple(chosen)


def both_ways(lr: float) -> tuple[Technique, ...]:
    """The same for models in which a token sees later ones, whose attention is not tiled."""
    return tuple(technique for technique in fast(lr) if not isinstance(technique, TiledAttention))


def text() -> recipe.Recipe:
    """A small Llama-style model on any text: the recipe behind `thrifty train --data FILE`.

    Command   thrifty train text --data my.txt
    Expect    some thousand tokens a second and core; held-out loss well below the unigram entropy after 500 steps.
    """
    return recipe.Recipe(
        name="text",
        about="A small Llama-style language model on any text.",
        model=recipe.ModelSettings(preset="llama-micro"),
        data=recipe.DataSettings(length=256, batch=32),
        budget=recipe.Budget(steps=500),
        techniques=fast(lr=2e-3),
    )


def plain() -> recipe.Recipe:
    """What techniques are held against: a small Llama-style model in plain PyTorch, with AdamW and nothing else that
    would save anything.

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
    """A small BERT-style encoder on any text, by masked tokens.

    Command   thrifty train masked --data my.txt
    Expect    more tokens than next-token prediction needs: only one in seven is learned from.
    """
    return recipe.Recipe(
        name="masked",
        about="A small BERT-style encoder on any text, by masked tokens.",
        model=recipe.ModelSettings(preset="bert-micro"),
        objective=recipe.ObjectiveSettings("masked_token"),
        data=recipe.DataSettings(length=128, batch=64),
        budget=recipe.Budget(steps=2000),
        techniques=both_ways(lr=1e-3),
    )


def spans() -> recipe.Recipe:
    """A small T5-style encoder-decoder on any text, by spans that are cut out of it.

    Command   thrifty train spans --data my.txt
    """
    return recipe.Recipe(
        name="spans",
        about="A small T5-style encoder-decoder on any text, by spans that are cut out of it.",
        model=recipe.ModelSettings(preset="t5-micro"),
        objective=recipe.ObjectiveSettings("sequence_to_sequence"),
        data=recipe.DataSettings(length=128, batch=64),
        budget=recipe.Budget(steps=2000),
        techniques=both_ways(lr=2e-3),
    )


def kjv() -> recipe.Recipe:
    """The demo: a 4M-parameter Llama-style model on the King James Bible, for two and a half minutes.

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
        techniques=fast(lr=2e-3),
    )


def stdlib() -> recipe.Recipe:
    """The zero-download run: a small model of Python on the running environment's own source.

    Command   thrifty train stdlib
    """
    return recipe.Recipe(
        name="stdlib",
        about="A small Llama-style model of Python, on the source of the running environment.",
        model=recipe.ModelSettings(preset="llama-micro"),
        data=recipe.DataSettings(source="python-stdlib", length=256, batch=32),
        budget=recipe.Budget(steps=500),
        techniques=fast(lr=2e-3),
    )
