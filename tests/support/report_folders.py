"""Run folders with the numbers of a small language model on a laptop, for the tests of pages."""

import json
import math
import random
from pathlib import Path
from typing import Any

RECIPE = """\
name = "kjv"
about = "A small Llama on the King James Bible."
seed = 0

[model]
preset = "llama-nano"
depth = 6

[data]
source = "king-james-bible"
vocabulary = 4096
length = 256
batch = 32

[budget]
steps = 600

[[techniques]]
name = "optimizers.adamw"
learning_rate = 0.003
betas = [0.9, 0.95]

[[techniques]]
name = "memory.recompute"
every = 1
"""
PLAIN = {"parameters": 2.1e7, "gradients": 2.1e7, "optimizer": 0.0, "activations": 9.4e8, "temporary": 1.1e8}


def footprint(**changed: float) -> dict[str, float]:
    values = {**PLAIN, "flops": 2.46e11, "traffic": 0.0, **changed}
    at_peak = max(values["gradients"], values["activations"] + values["temporary"])
    return {**values, "memory": values["parameters"] + values["optimizer"] + at_peak}


def technique(name: str, stage: str, numerics: str, touched: list[str], before: Any, after: Any, **settings: Any):
    return {
        "name": name,
        "stage": stage,
        "numerics": numerics,
        "settings": settings,
        "touched": touched,
        "before": before,
        "after": after,
    }


def explanation() -> dict[str, Any]:
    plain = footprint()
    bf16 = footprint(activations=5.2e8, temporary=7e7)
    recompute = footprint(activations=1.3e8, temporary=7e7, flops=3.27e11)
    adamw = footprint(activations=1.3e8, temporary=7e7, flops=3.27e11, optimizer=4.2e7)
    techniques = [
        technique("precision.mixed", "precision", "rounding", ["matmuls in bfloat16"], plain, bf16, dtype="bfloat16"),
        technique("memory.recompute", "recompute", "exact", ["6 of 6 blocks run twice"], bf16, recompute, every=1),
        technique(
            "large_batch.gradient_accumulation",
            "accumulate",
            "rounding",
            ["4 micro-batches of 8"],
            recompute,
            recompute,
            micro_batches=4,
        ),
        technique("clipping.norm", "clip", "different", ["49 tensors, one norm"], recompute, recompute, norm=1.0),
        technique(
            "optimizers.adamw",
            "precondition",
            "different",
            ["36 matrices decayed", "13 vectors not decayed: one-dimensional"],
            recompute,
            adamw,
            learning_rate=3e-3,
            betas=[0.9, 0.95],
        ),
        technique("schedules.cosine", "schedule", "different", ["warm-up of 60 steps"], adamw, adamw, warm_up=60),
    ]
    return {"techniques": techniques, "footprint": adamw, "parameters": 5_247_232}


def environment() -> dict[str, Any]:
    return {
        "thrifty": "0.1.0",
        "python": "3.11.2",
        "torch": "2.13.0+cpu",
        "platform": "Linux-6.1-x86_64",
        "cpu": "Intel Xeon, AMX bf16",
        "cores": 2,
        "memory": 16.6e9,
        "device": "cpu",
        "command": ["thrifty", "train", "kjv", "--set", "model.depth=6", "--with", "memory.recompute:every=1"],
        "started": "2026-08-14T09:12:31+00:00",
    }


def records(steps: int, every: int = 50) -> list[dict[str, Any]]:
    rng, tokens, seconds, made = random.Random(7), 8192, 0.0, []
    for step in range(1, steps + 1):
        progress = step / steps
        smooth = 3.05 + 5.27 * math.exp(-14 * progress) + 0.55 * (1 - progress) ** 2
        taken = 0.249 * rng.lognormvariate(0, 0.05) + (2.4 if step == 1 else 0.0)
        seconds += taken
        rate = 3e-3 * min(step / (0.1 * steps), 0.5 + 0.5 * math.cos(math.pi * progress))
        step_record = {
            "kind": "step",
            "step": step,
            "loss": smooth + rng.gauss(0, 0.07),
            "learning_rate": rate,
            "gradient_norm": 0.6 * rng.lognormvariate(0, 0.3) + 6 * math.exp(-30 * progress),
            "tokens": tokens * step,
            "seconds": seconds,
            "step_seconds": taken,
            "tokens_per_second": tokens / taken,
            "flops_per_second": 2.46e11 / taken,
            "memory": 1.9e8 + 4e6 * rng.random() + (3e7 if step > 0.4 * steps else 0),
            "skipped": False,
            "notes": {},
        }
        made.append(step_record)
        if step % every == 0:
            made.append({"kind": "evaluation", "step": step, "loss": smooth + 0.12, "tokens": 16384})
        if step % (4 * every) == 0:
            made.append({"kind": "checkpoint", "step": step, "seconds": 0.31, "bytes": 6.3e7})
    made.append({"kind": "change", "step": int(0.4 * steps), "technique": "growth.stacking", "reason": "3 to 6 blocks"})
    made.append({"kind": "notice", "step": 1, "text": "48 of 49 linears matched; skipped head: tied"})
    return made


def summary(made: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [record for record in made if record["kind"] == "step"]
    held_out = [record["loss"] for record in made if record["kind"] == "evaluation"]
    return {
        "status": "finished",
        "steps": steps[-1]["step"],
        "tokens": steps[-1]["tokens"],
        "seconds": steps[-1]["seconds"],
        "loss": steps[-1]["loss"],
        "held_out_loss": held_out[-1],
        "best_held_out_loss": min(held_out),
        "unigram_entropy": 5.94,
        "bytes_per_token": 3.71,
        "peak_memory": 2.76e8,
        "predicted_memory": 2.63e8,
        "peak_flops_per_second": 2.4e12,
        "skipped_steps": 0,
    }


def write_run_folder(folder: Path, steps: int = 600, **replaced: Any) -> Path:
    made = records(steps, every=max(1, steps // 12))
    files = {
        "recipe": RECIPE,
        "origins": {"model.depth": "--set", "model.preset": "recipe kjv", "budget.steps": "recipe kjv"},
        "environment": environment(),
        "explanation": explanation(),
        "records": made,
        "summary": summary(made),
    } | replaced
    folder.mkdir(parents=True)
    for name, value in files.items():
        if value is None:
            continue
        if name == "recipe":
            (folder / "recipe.toml").write_text(value)
        elif name == "records":
            (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in value))
        else:
            (folder / f"{name}.json").write_text(json.dumps(value))
    return folder
