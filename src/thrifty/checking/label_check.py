"""Check that every example has learned tokens, and format one example for display."""

from collections.abc import Callable, Iterable
from itertools import groupby

import torch

from thrifty.checking.check_verdicts import PromiseVerdict, broken, holds, not_applicable
from thrifty.core.batches import Batch
from thrifty.core.objective import Objective
from thrifty.core.recipe import Recipe
from thrifty.data.catalogue import use_model_tokenizer
from thrifty.data.chat.chat_preview import preview
from thrifty.data.run_data import RunData
from thrifty.data.text.text_data import TextData
from thrifty.objectives.chat_answers import ChatAnswers
from thrifty.objectives.token_cross_entropy import TokenCrossEntropy

PROMISE = "something is learned"
FIX = "thrifty data preview prints the learned tokens; raise data.length if answers are cut off"
SHOWN = 600
"""Maximum number of printed characters of an example."""


def labels(objective: Objective, batch: Batch) -> PromiseVerdict:
    """Check that each example of a batch has predictions that count in the loss. `objective` is the plain objective,
    without changes by techniques."""
    if not isinstance(objective, TokenCrossEntropy):
        return not_applicable(PROMISE, "labels", "the loss is not over tokens: every example counts by its weight")
    targets, weights = objective.targets(batch), objective.shares(batch)
    counted = torch.ones_like(targets, dtype=torch.bool) if weights is None else weights > 0
    per_example = counted.sum(1)
    empty = int(((per_example == 0) & (batch.weight > 0)).sum())
    least = int(per_example.min())
    text = f"{int(counted.sum()):,} tokens of {len(batch)} examples are learned, at least {least:,} of each"
    if empty or not bool(counted.any()):
        return broken(PROMISE, "labels", f"{empty} of {len(batch)} examples have no learned token", FIX)
    return holds(PROMISE, "labels", text)


def format_example(recipe: Recipe, data: RunData, objective: Objective, batch: Batch) -> tuple[str, ...]:
    """Return an example as text, with learned tokens between ⟦ and ⟧; nothing if examples are not text."""
    if not isinstance(data, TextData) or not isinstance(objective, TokenCrossEntropy):
        return ()
    if isinstance(objective, ChatAnswers):
        seen = preview(use_model_tokenizer(recipe.data, recipe.model), objective.chat_learning(), 1, lambda text: None)
        return tuple(_cut(_joined((part.text, part.learned) for part in example)) for example in seen.examples)
    targets, weights = objective.targets(batch)[0], objective.shares(batch)
    counted = [True] * len(targets) if weights is None else (weights[0] > 0).tolist()
    return (_cut(_runs(targets.tolist(), counted, data.tokenizer.decode)),)


def _runs(tokens: list[int], learned: list[bool], decode: Callable[[list[int]], str]) -> str:
    marked = groupby(zip(tokens, learned, strict=True), key=lambda each: each[1])
    return _joined((decode([token for token, _ in run]), is_learned) for is_learned, run in marked)


def _joined(parts: Iterable[tuple[str, bool]]) -> str:
    return "".join(f"⟦{text}⟧" if learned else text for text, learned in parts)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + " …"
