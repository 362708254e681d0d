"""Model, data, clock and evaluation that all four programs of the demo share."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.data.text.text_data import TextData, open_text
from thrifty.interface.recipe_arguments import recipe
from thrifty.models import build_model
from thrifty.models.text_generation import generate

RECIPE = recipe("plain")
LENGTH = RECIPE.data.length
HELD_OUT_EXAMPLES = 64
EVALUATIONS = 20
PROMPT = "And the LORD said"


def open_data() -> TextData:
    return open_text(RECIPE.data, RECIPE.seed)


def build(data: TextData) -> nn.Module:
    return build_model(RECIPE.model, data.vocabulary, LENGTH, RECIPE.seed)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean loss of the next token, for logits (batch, length, vocabulary) and tokens (batch, length + 1)."""
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Race:
    """Clock of a program. It starts after the first step, which may compile, and stops during evaluation."""

    def __init__(self, data: TextData, seconds: float, predict: Callable[[Tensor], Tensor]):
        """`predict` returns the logits of tokens."""
        self.seconds, self.predict = seconds, predict
        self.held_out = [batch["tokens"] for batch in data.held_out.batches(HELD_OUT_EXAMPLES, 8)]
        self.began, self.first_step, self.spent, self.steps = time.perf_counter(), 0.0, 0.0, 0
        self.curve: list[tuple[float, float]] = []

    def is_over(self) -> bool:
        """Count a step, evaluate if it is due, and return True if the time is used."""
        now = time.perf_counter()
        if self.steps:
            self.spent += now - self.resumed
        else:
            self.first_step = now - self.began
        self.steps += 1
        if self.spent >= len(self.curve) * self.seconds / EVALUATIONS:
            self.evaluate()
        self.resumed = time.perf_counter()
        return self.spent >= self.seconds

    @torch.no_grad()
    def evaluate(self) -> None:
        losses = [loss_of(self.predict(tokens[:, :-1]), tokens).item() for tokens in self.held_out]
        self.curve.append((self.spent, sum(losses) / len(losses)))

    def save(self, file: Path, text: str = "") -> None:
        self.evaluate()
        file.write_text(
            json.dumps({"curve": self.curve, "steps": self.steps, "first_step": self.first_step, "text": text})
        )


def sample(model: nn.Module, data: TextData) -> str:
    start = torch.tensor([data.tokenizer.encode(PROMPT)])
    return data.tokenizer.decode(generate(model, start, 60, temperature=0.6, context=LENGTH)[0].tolist())
