"""Trainer of transformers with its default arguments and a tuned learning rate, on a Llama of the same size.

python demo/hf_trainer.py SECONDS FILE
"""

import copy
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from shared import LENGTH, RECIPE, Race, open_data
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from thrifty.models import model_shape
from thrifty.models.hf_config import write_config

LEARNING_RATE = 3e-3
TIMED = 6
"""Number of steps that are timed to choose max_steps, because Trainer's learning rate decays over max_steps."""


class Examples(torch.utils.data.IterableDataset):
    def __init__(self, data: Any):
        self.data = data

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        step = 0
        while True:
            for tokens in self.data.train.at(step)["tokens"]:
                yield {"input_ids": tokens, "labels": tokens}
            step += 1


class EachStep(TrainerCallback):
    def __init__(self, is_over: Any):
        self.is_over = is_over

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        control.should_training_stop = self.is_over()


def trainer(model: Any, data: Any, steps: int, is_over: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=RECIPE.data.batch,
        learning_rate=LEARNING_RATE,
        max_steps=steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(model=model, args=arguments, train_dataset=Examples(data), callbacks=[EachStep(is_over)])


def main() -> None:
    seconds, file = float(sys.argv[1]), Path(sys.argv[2])
    data = open_data()
    shape = model_shape(RECIPE.model, data.vocabulary, LENGTH)
    config = {key: value for key, value in write_config(shape).items() if key != "architectures"}
    set_seed(RECIPE.seed)
    model = LlamaForCausalLM(LlamaConfig(**config))
    times: list[float] = []
    trainer(copy.deepcopy(model), data, TIMED, lambda: times.append(time.perf_counter())).train()
    step = (times[-1] - times[0]) / (len(times) - 1)
    race = Race(data, seconds, lambda tokens: model(input_ids=tokens).logits)
    trainer(model, data, max(int(seconds / step), 1), race.is_over).train()
    race.save(file)


if __name__ == "__main__":
    main()
