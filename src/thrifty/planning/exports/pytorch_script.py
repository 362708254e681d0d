"""Plain PyTorch script with the same model, data, example order and updates. It does not import this package."""

import shlex

from thrifty.core.errors import RefusedError
from thrifty.core.file_names import comment_lines
from thrifty.planning.exports.portable_recipe import PortableRecipe

TEMPLATE = '''"""Training run in plain PyTorch. Requires torch, transformers and numpy.

The folder of this file also contains the model with its initial weights, and the tokens.
"""

{comments}
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
NAME = {name!r}
BATCH, PARTS, LENGTH, STEPS, SEED = {batch}, {parts}, {length}, {steps}, {seed}
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = {lr!r}, {betas!r}, {eps!r}, {weight_decay!r}, {clip!r}
SCHEDULE, WARMUP, UNTIL, FLOOR = {schedule!r}, {warmup}, {until}, {floor!r}
DTYPE, COMPILED, RECOMPUTE = torch.{dtype}, {compiled}, {recompute}


# ---- example order: one permutation per epoch, computed for any single position
{permutation}

def batch_at(tokens, step):
    """Return the examples of a step (b, t + 1)."""
    count = (len(tokens) - 1) // LENGTH
    numbers = step * BATCH + np.arange(BATCH)
    chosen = [permute(np.array([n % count]), count, SEED, int(n // count))[0] for n in numbers]
    places = np.array(chosen)[:, None] * LENGTH + np.arange(LENGTH + 1)
    return torch.from_numpy(tokens[places].astype(np.int64))


def rate_at(step):
    """Return the factor of the learning rate for update `step`."""
    if SCHEDULE == "constant":
        return 1.0
    if step < WARMUP:
        return (step + 1) / WARMUP
    progress = min((step - WARMUP) / max(UNTIL - WARMUP, 1), 1.0)
    falling = 1 - progress if SCHEDULE == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return FLOOR + (1 - FLOOR) * falling


def is_decayed(name, parameter):
    return parameter.ndim > 1 and not any(word in name for word in ("wpe", "position", "bias"))


def main():
    device = "cuda" if torch.cuda.is_available() and {on_gpu} else "cpu"
    tokens = np.load(HERE / "tokens.npy", mmap_mode="r")
    model = AutoModelForCausalLM.from_pretrained(HERE / "model", dtype=torch.float32).to(device).train()
    model.config.use_cache = False
    if RECOMPUTE:
        model.gradient_checkpointing_enable({{"use_reentrant": False}})
    if COMPILED:
        model.compile()
    decayed = [p for name, p in model.named_parameters() if is_decayed(name, p)]
    others = [p for name, p in model.named_parameters() if not is_decayed(name, p)]
    groups = [{{"params": decayed, "weight_decay": WEIGHT_DECAY}}, {{"params": others, "weight_decay": 0.0}}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    rows = -(-BATCH // PARTS)
    for step in range(STEPS):
        batch, loss = batch_at(tokens, step).to(device), 0.0
        for part in batch.split(rows):
            with torch.autocast(device, DTYPE, enabled=DTYPE != torch.float32):
                logits = model(input_ids=part[:, :-1]).logits
            share = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten()) * len(part) / BATCH
            share.backward()
            loss += share.item()
        if CLIP is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = LR * rate_at(step)
        optimizer.step()
        optimizer.zero_grad()
        print(f"{{step + 1}} {{loss:.8f}}", flush=True)
    model.save_pretrained(HERE / "trained")


if __name__ == "__main__":
    main()
'''


def script(run: PortableRecipe, permutation: str, file: str) -> str:
    """Return the source code of a PyTorch script that trains `run`. `permutation` is the source code of the function
    for the example order.

    Raises RefusedError for techniques that change the algorithm, several ranks, or a number format with a loss scale.
    """
    if run.lost:
        raise RefusedError(
            f"script: plain PyTorch lacks {', '.join(run.lost)}, which change the algorithm",
            fix=" ".join(f"--without {name}" for name in run.lost),
        )
    if run.lr == 0.0 or run.dtype == "float16" or run.ranks > 1:
        raise RefusedError(
            "script: the script supports AdamW on one device, in float32 or bfloat16",
            fix="--with optimizers.adamw --set techniques.precision.mixed.format=bfloat16, without a mesh",
        )
    comments = comment_lines([f"python {shlex.quote(file)}", *run.notes()])
    values = vars(run) | {"recompute": run.recompute != "none", "on_gpu": run.device != "cpu"}
    return TEMPLATE.format(**values | {"comments": comments, "permutation": permutation, "file": file})
