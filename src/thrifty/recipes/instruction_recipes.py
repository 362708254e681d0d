"""Recipes of instruction tuning of a pretrained language model, after Alpaca and Alpaca-LoRA."""

from thrifty.core import recipe
from thrifty.core.technique import Technique
from thrifty.data.catalogue import PYTHON_FUNCTIONS, entry
from thrifty.recipes.language_recipes import text_techniques
from thrifty.techniques.adapters.lora import Lora

QUERIES_AND_VALUES = r"qkv|[qv]_proj|query|value|c_attn"


def alpaca_lora_techniques(lr: float) -> tuple[Technique, ...]:
    """Return the techniques of Alpaca-LoRA: LoRA of rank 8 on query and value projections; other weights are frozen."""
    return (*text_techniques(lr), Lora(rank=8, alpha=16.0, dropout=0.05, where=QUERIES_AND_VALUES, slices="qv"))


def instruct() -> recipe.Recipe:
    """Instruction tuning of SmolLM2-135M on a file of conversations, by default on Python functions.

    Command   thrifty data get smollm2-135m && thrifty train instruct --data my.jsonl
    Full      To train all weights: --without adapters.lora --set techniques.optimizers.adamw.lr=5e-5
    Then      thrifty chat instruct, and thrifty export instruct FOLDER
    """
    return recipe.Recipe(
        name="instruct",
        about="Instruction tuning of SmolLM2-135M on your conversations; by default on Python functions.",
        model=recipe.ModelSettings(folder=str(entry("smollm2-135m").model_folder)),
        data=recipe.DataSettings(source=PYTHON_FUNCTIONS, length=512, batch=8),
        objective=recipe.ObjectiveSettings("chat_answers"),
        budget=recipe.Budget(steps=100),
        evaluation=recipe.EvaluationSettings(every=25, at_start=True),
        checkpoints=recipe.CheckpointSettings(every=100, keep=1),
        techniques=alpaca_lora_techniques(lr=3e-4),
    )


def instruct_kjv() -> recipe.Recipe:
    """Instruction tuning of SmolLM2-135M: rewrite verses of the King James Version in modern English.

    Command   thrifty data get smollm2-135m kjv-web && thrifty train instruct-kjv
    Expect    The loss on 64 held-out answers falls from 1.58 to 1.08 nats per token in 60 steps of ten verses. On one
              core with bfloat16 instructions, a step takes about 2.2 s and compilation 20 s. On two cores, each shared
              with five other processes, the whole run took 11 minutes.
    """
    return recipe.Recipe(
        name="instruct-kjv",
        about="Instruction tuning of SmolLM2-135M: rewrite the King James Version in modern English.",
        model=recipe.ModelSettings(folder=str(entry("smollm2-135m").model_folder)),
        data=recipe.DataSettings(source="kjv-web", length=512, batch=2),
        objective=recipe.ObjectiveSettings("chat_answers"),
        budget=recipe.Budget(steps=60),
        evaluation=recipe.EvaluationSettings(every=20, at_start=True),
        checkpoints=recipe.CheckpointSettings(every=60, keep=1),
        techniques=alpaca_lora_techniques(lr=2e-3),
    )
