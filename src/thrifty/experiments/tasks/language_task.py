"""Small byte-level language models for studies: text, complete training run, and results."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

import numpy as np
from torch import nn

from thrifty.composition.compose import CPU, BaseRun, compose
from thrifty.core.errors import InfeasibleError
from thrifty.core.objective import Objective
from thrifty.core.randomness import seed_of
from thrifty.core.technique import Technique
from thrifty.data.text.python_sources import python_files
from thrifty.data.text.token_windows import HeldOutWindows, PackedTokens
from thrifty.experiments.tasks.whole_run import initialized, run_to_end
from thrifty.models.model_config import ModelConfig
from thrifty.objectives.next_token import NextToken
from thrifty.planning.scaling_law import FLOP_PER_PARAMETER_AND_TOKEN
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.schedules.linear import LinearDecay
from thrifty.training.evaluation import held_out_loss
from thrifty.training.loop import Record

BYTES = 256
"""Vocabulary size. Models read bytes and therefore require no tokenizer."""
TEXT_BYTES = 10_000_000
HELD_OUT = 20
"""One of every `HELD_OUT` files is held out."""


@cache
def source_text() -> tuple[np.ndarray, np.ndarray]:
    """Return the training text and the held-out text: bytes of the standard library's source files.

    A hash of the file name selects the held-out files.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in python_files(TEXT_BYTES):
        parts[seed_of(path.name) % HELD_OUT == 0].append(path.read_bytes())
    training, held_out = (np.frombuffer(b"".join(files), dtype=np.uint8) for files in parts)
    return training, held_out


def llama(depth: int, width: int, length: int, seed: int, head_width: int = 16) -> nn.Module:
    """Return a randomly initialized Llama-style byte model. The MLP width is 8/3 of the width, rounded up to a multiple
    of 8.
    """
    heads, hidden = max(1, width // head_width), 8 * math.ceil(width / 3)
    return initialized(ModelConfig("llama", depth, width, heads, heads, hidden, BYTES, length, tied=True), seed)


def parameters_of(model: nn.Module) -> int:
    """Return the number of parameters. A shared parameter counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def steps_for(flops: float, parameters: int, tokens_per_step: int) -> int:
    """Return the number of steps in a compute budget. A step costs 6 · parameters · tokens FLOPs.

    Raises InfeasibleError if the budget is below the cost of one step.
    """
    steps = round(flops / (FLOP_PER_PARAMETER_AND_TOKEN * parameters * tokens_per_step))
    if steps < 1:
        raise InfeasibleError(
            f"a budget of {flops:g} FLOPs is below one step of {parameters:,} parameters", fix="set a larger budget"
        )
    return steps


def decayed_adamw(width: int) -> tuple[Technique, ...]:
    """Return the training techniques: AdamW, gradient clipping, 10 % warm-up, and linear decay.

    The learning rate of 0.24 / width was the best of three rates at widths 16 to 96.
    """
    return (AdamW(lr=0.24 / width), LinearDecay(warmup=0.1), GradientClipping())


@dataclass(frozen=True)
class TrainedLanguageModel:
    """A model at the end of its run. Losses are in nats per byte, and are infinite after divergence."""

    model: nn.Module
    objective: Objective
    losses: Sequence[float]
    """Loss of each step, computed before the update of the step."""
    tokens: int
    seconds: float
    """Duration in seconds of all training steps."""
    length: int
    notes: Sequence[Mapping[str, float]] = ()
    """Values that techniques recorded at each completed step."""

    def mean_loss(self, last: int) -> float:
        """Return the mean loss of the last `last` steps."""
        return fmean(self.losses[-last:])

    def held_out_loss(self, examples: int = 512) -> float:
        held_out = HeldOutWindows(source_text()[1], self.length)
        loss = held_out_loss(self.model, self.objective, held_out.batches(examples, 64), CPU)
        return loss if math.isfinite(loss) else math.inf


def train_on_bytes(
    build: Callable[[], nn.Module], techniques: Sequence[Technique], *, steps: int, seed: int, length: int, batch: int
) -> TrainedLanguageModel:
    """Train with the library's training loop. If a run diverges, it ends early, and its remaining losses are
    infinite.
    """
    plain = BaseRun(build, PackedTokens(source_text()[0], length, batch, seed), NextToken())
    run = compose(plain, techniques, steps)
    records: list[Record] = []
    model, state = run_to_end(run, seed, may_diverge=True, see=records.append)
    losses = [record.loss if math.isfinite(record.loss) else math.inf for record in records]
    return TrainedLanguageModel(
        model=model,
        objective=run.eval_objective,
        losses=losses + [math.inf] * (steps - len(losses)),
        tokens=int(state.counters["tokens"]),
        seconds=state.counters["seconds"],
        length=length,
        notes=[record.notes for record in records],
    )


def train_llama(
    techniques: Sequence[Technique], *, steps: int, seed: int, depth: int, width: int, length: int, batch: int
) -> TrainedLanguageModel:
    """Train a Llama-style model of the given sizes, initialized from `seed`."""
    return train_on_bytes(
        lambda: llama(depth, width, length, seed), techniques, steps=steps, seed=seed, length=length, batch=batch
    )
