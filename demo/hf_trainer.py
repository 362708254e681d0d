"""Trainer of Hugging Face with its defaults: float32, AdamW with linear decay, clipped gradients.

    python demo/hf_trainer.py FOLDER SECONDS

FOLDER has the tokens that demo.py prepared. Prints one JSON document.
"""

import json
import sys
from pathlib import Path

import torch
from shared import BATCH, DEVICE, RATE, SEED, Clock, build, rows
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

PILOT = 8
"""Number of steps that are timed, because Trainer requires the number of steps."""


class WithLoss(nn.Module):
    """The model in the form that Trainer requires."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = build()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.gpt(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class AfterStep(TrainerCallback):
    def __init__(self, clock: Clock):
        self.clock = clock

    def on_step_end(self, arguments, state, control, model, **_):
        self.clock.after_step(model.gpt)


def train(folder: Path, steps: int) -> dict:
    model, clock = WithLoss(), Clock(folder)
    arguments = TrainingArguments(
        str(folder / "trainer"),
        max_steps=steps,
        learning_rate=RATE,
        per_device_train_batch_size=BATCH,
        seed=SEED,
        use_cpu=DEVICE == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    examples = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows(folder, "train").cpu()]
    Trainer(model, arguments, train_dataset=examples, callbacks=[AfterStep(clock)]).train()
    return clock.result(model.gpt)


folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
pilot = train(folder, PILOT)
seconds_per_step = pilot["curve"][-1][0] / (PILOT - 1)
print(json.dumps(train(folder, round(seconds / seconds_per_step))))
