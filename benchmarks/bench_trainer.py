"""Default recipe against Hugging Face's Trainer on the same model shape, data and tokens per step.

    python benchmarks/bench_trainer.py [--preset llama-mini --length 512 --batch 8 --vocabulary 8192] [--json PATH]
    python benchmarks/bench_trainer.py --peak WAY      peak memory of one variant, in its own process

Variants: `thrifty` is the recipe `text` with its techniques; (a) `trainer` is Trainer with its default arguments; (b)
`trainer, best` adds bf16 and torch_compile. Speeds are whole steps with data and records, in alternating segments of
one process. Promise: 3 times (a) and 1.3 times (b) in tokens/s, at lower peak memory.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from side_by_side import Timing, print_timings, save_timings, side_by_side
from thrifty.composition.compose import BaseRun, compose
from thrifty.core.recipe import DataSettings, ModelSettings
from thrifty.data.text.text_data import open_text
from thrifty.models import build_model, model_shape
from thrifty.models.hf_config import write_config
from thrifty.objectives import find_objective
from thrifty.recipes.language_recipes import text_techniques
from thrifty.training.loop import train
from thrifty.training.memory_meter import MemoryMeter

WAYS = ("thrifty", "trainer", "trainer, best")
STEPS_A_SEGMENT = 4


def thrifty_steps(arguments: argparse.Namespace) -> Callable[[], object]:
    """Return a function that runs a segment of steps."""
    data = open_text(settings_of(arguments), seed=0)
    model = ModelSettings(preset=arguments.preset)
    plain = BaseRun(
        lambda: build_model(model, data.vocabulary, arguments.length, 0), data.train, find_objective("next_token")
    )
    run = compose(plain, text_techniques(lr=1e-3), 100_000)
    records = train(run, run.start(), seed=0)
    return lambda: [next(records) for _ in range(STEPS_A_SEGMENT)]


def trainer_steps(arguments: argparse.Namespace, best: bool) -> Callable[[], object]:
    """Return the same for Trainer, paused by a callback after each segment of steps."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    data = open_text(settings_of(arguments), seed=0)
    shape = model_shape(ModelSettings(preset=arguments.preset), data.vocabulary, arguments.length)
    assert shape is not None
    config = {key: value for key, value in write_config(shape).items() if key != "architectures"}
    model = LlamaForCausalLM(LlamaConfig(**config))

    class Examples(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for step in range(100_000):
                for row in data.train.at(step)["tokens"]:
                    yield {"input_ids": row[:-1], "labels": row[:-1]}

    may_go, has_stopped = threading.Semaphore(0), threading.Semaphore(0)

    class PauseCallback(TrainerCallback):
        steps = 0

        def on_step_end(self, *unused: object, **more: object) -> None:
            self.steps += 1
            if self.steps % STEPS_A_SEGMENT == 0:
                has_stopped.release()
                may_go.acquire()

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=arguments.batch,
            max_steps=100_000,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            bf16=best,
            torch_compile=best,
        ),
        train_dataset=Examples(),
        callbacks=[PauseCallback()],
    )
    threading.Thread(target=lambda: (may_go.acquire(), trainer.train()), daemon=True).start()
    return lambda: (may_go.release(), has_stopped.acquire())


def settings_of(arguments: argparse.Namespace) -> DataSettings:
    return DataSettings(
        "python-stdlib", length=arguments.length, batch=arguments.batch, vocabulary=arguments.vocabulary
    )


def segments_of(way: str, arguments: argparse.Namespace) -> Callable[[], object]:
    return thrifty_steps(arguments) if way == "thrifty" else trainer_steps(arguments, best="best" in way)


def peak_of(way: str) -> float:
    """Return the peak bytes above the level before the model was built, in a fresh process with the same arguments."""
    process = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--peak", way], check=True, capture_output=True, text=True
    )
    return json.loads(process.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-mini")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", choices=WAYS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.peak:
        if arguments.peak != "thrifty":
            pass  # its code does not count as memory of the run
        meter = MemoryMeter(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        segments_of(arguments.peak, arguments)()
        print(json.dumps(meter.peak()))
        return
    timings = side_by_side({way: segments_of(way, arguments) for way in WAYS}, arguments.rounds, warmup=2)
    timings = {way: Timing(tuple(s / STEPS_A_SEGMENT for s in t.seconds)) for way, t in timings.items()}
    title = f"one step of {arguments.preset}, {arguments.batch} x {arguments.length}, vocabulary {arguments.vocabulary}"
    print_timings(title, timings, "thrifty", arguments.batch * arguments.length, "tokens/s")
    peaks = {way: peak_of(way) for way in WAYS}
    print("  peak memory: " + ", ".join(f"{way} {peak / 1e9:.2f} GB" for way, peak in peaks.items()))
    if arguments.json:
        facts = {"benchmark": "trainer", "peak_memory": peaks, **{k: str(v) for k, v in vars(arguments).items()}}
        save_timings(arguments.json, facts, timings, "thrifty")


if __name__ == "__main__":
    main()
