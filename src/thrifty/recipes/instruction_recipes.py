"""Instruction tuning: a pretrained language model learns to answer, after Alpaca and Alpaca-LoRA."""

from thrifty.core import recipe
from thrifty.core.technique import Technique
from thrifty.data.catalogue import PYTHON_FUNCTIONS, entry
from thrifty.recipes.language_recipes import fast
from thrifty.techniques.adapters.lora import Lora

QUERIES_AND_VALUES = r"qkv|[qv]_proj|query|value|c_attn"


def alpaca_lora_techniques(lr: float) -> tuple[Technique, ...]:
    """Alpaca-LoRA's choice: rank 8 on queries and values, everything else frozen."""
    return (*fast(lr), Lora(rank=8, alpha=16.0, dropout=0.05, where=QUERIES_AND_VALUES, slices="qv"))


def instruct() -> recipe.Recipe:
    """SmolLM2-135M learns to write Python functions from their docstrings, or whatever conversations are given to it.

    Command   thrifty data get smollm2-135m && thrifty train instruct --data my.jsonl
    All       of the weights instead of LoRA: --without adapters.lora --set techniques.optimizers.adamw.lr=5e-5
    Then      thrifty chat instruct, and thrifty export instruct FOLDER
    """
    return recipe.Recipe(
        name="instruct",
        about="SmolLM2-135M answers as the given conversations do; without any, with Python functions.",
        model=recipe.ModelSettings(folder=str(entry("smollm2-135m").model_folder)),
        data=recipe.DataSettings(source=PYTHON_FUNCTIONS, length=512, batch=8),
        objective=recipe.ObjectiveSettings("chat_answers"),
        budget=recipe.Budget(steps=100),
        evaluation=recipe.EvaluationSettings(every=25, at_start=True),
        checkpoints=recipe.CheckpointSettings(every=100, keep=1),
        techniques=alpaca_lora_techniques(lr=3e-4),
    )


def instruct_kjv() -> recipe.Recipe:
    """SmolLM2-135M learns to rewrite verses of the King James Version in modern English.

    Command   thrifty data get smollm2-135m kjv-web && thrifty train instruct-kjv
    Expect    the loss on 64 held-out answers falls from 1.58 to 1.08 nats per token in 60 steps of ten verses. A step
              takes about 2.2 seconds of one core with bfloat16 units, and compiling 20; on two cores that were wanted
              by five others each, the whole took 11 minutes.
    """
    return recipe.Recipe(
        name="instruct-kjv",
        about="SmolLM2-135M rewrites verses of the King James Version in modern English.",
        model=recipe.ModelSettings(folder=str(entry("smollm2-135m").model_folder)),
        data=recipe.DataSettings(source="kjv-web", length=512, batch=2),
        objective=recipe.ObjectiveSettings("chat_answers"),
        budget=recipe.Budget(steps=60),
        evaluation=recipe.EvaluationSettings(every=20, at_start=True),
        checkpoints=recipe.CheckpointSettings(every=60, keep=1),
        techniques=alpaca_lora_techniques(lr=2e-3),
    )
