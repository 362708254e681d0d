"""Trainer of Hugging Face with its defaults: float32, AdamW with linear decay, clipped gradients.

python demo/hf_trainer.py FOLDER SECONDS STEPS
"""

import sys
from math import inf
from pathlib import Path

import torch
from shared import BATCH, RATE, SEED, Clock, build, rows
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments


class WithLoss(nn.Module):
    """The model in the form that Trainer requires."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = build()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.gpt(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Evaluation(TrainerCallback):
    def __init__(self, clock: Clock):
        self.clock = clock

    def on_step_end(self, arguments, state, control, model, **_):
        self.clock.is_over_after_step(model.gpt)


folder, steps = Path(sys.argv[1]), int(sys.argv[2])
clock = Clock(folder, "trainer", inf)
model = WithLoss()
arguments = TrainingArguments(
    str(folder / "trainer"),
    max_steps=steps,
    learning_rate=RATE,
    per_device_train_batch_size=BATCH,
    seed=SEED,
    use_cpu=not torch.cuda.is_available(),
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
examples = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows(folder, "train")]
Trainer(model, arguments, train_dataset=examples, callbacks=[Evaluation(clock)]).train()
clock.add(clock.seconds, clock.curve[-1][1])
clock.save(model.gpt)
