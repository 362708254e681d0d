"""Overhead of N:M training in a step with emulated products: masks, decay, masking; interleaved in one process.

    python benchmarks/bench_n_of_m.py [--width 256] [--rounds 9] [--json FILE]

First mask computation alone: by magnitude (ours, topk, sort) and transposable. Then whole training steps of a small
Llama-style model: dense, masks computed at every step or every 40, and unbiased gradient estimates.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from side_by_side import print_timings, rows, side_by_side, write
from thrifty.composition.compose import BaseRun, compose
from thrifty.core.technique import Technique
from thrifty.data.text.token_windows import PackedTokens
from thrifty.experiments.tasks.language_task import llama, source_text
from thrifty.kernels.n_of_m_masks import n_of_m_mask
from thrifty.kernels.transposable_masks import transposable_mask
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.sparsity.n_of_m import NOfM

DEPTH, LENGTH, BATCH, STEPS = 4, 128, 8, 100_000


def mask_making(width: int) -> dict[str, Callable[[], object]]:
    """Return functions that compute masks of one weight of (4 width, width)."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, width, generator=generator) for size in (4 * width, 1024))
    return {
        "a matrix product of 1024 tokens": lambda: x @ weight.T,
        "2 of 4 by comparison": lambda: n_of_m_mask(weight, 2, 4),
        "2 of 4 by topk": lambda: weight.abs().view(-1, 4).topk(2, -1).indices,
        "2 of 4 by stable sort": lambda: weight.abs().view(-1, 4).sort(dim=-1, descending=True, stable=True).indices,
        "transposable, 90 patterns": lambda: transposable_mask(weight, 2, 4),
    }


def one_step(width: int, *chosen: Technique) -> Callable[[], object]:
    """Return a training step without the loop around it."""
    source = PackedTokens(source_text()[0], LENGTH, BATCH, 0)
    plain = BaseRun(lambda: llama(DEPTH, width, LENGTH, 0), source, NextToken())
    run = compose(plain, [*chosen, AdamW(lr=1e-3)], STEPS)
    state, batch = run.start(), source.at(0)
    examples = run.plain.objective.examples(batch)
    model, optimizer = state.model, state.optimizer
    assert model is not None and optimizer is not None

    def step() -> None:
        run.backward(model.train(), run.objective, examples)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    making = side_by_side(mask_making(options.width), options.rounds)
    baseline = "a matrix product of 1024 tokens"
    print_timings(f"masks of one weight of {4 * options.width} x {options.width}", making, baseline)
    steps = {
        "dense": one_step(options.width),
        "2:4, every 40 steps": one_step(options.width, NOfM(every=40)),
        "2:4": one_step(options.width, NOfM()),
        "2:4, transposable": one_step(options.width, NOfM(transposable=True)),
        "2:4, mvue": one_step(options.width, NOfM(mvue=True)),
    }
    timings = side_by_side(steps, options.rounds)
    title = f"a training step, {DEPTH} blocks of width {options.width}, {BATCH} x {LENGTH} tokens"
    print_timings(title, timings, "dense", BATCH * LENGTH, "tokens/s")
    if options.json:
        facts: dict[str, Any] = {"benchmark": "n_of_m", "width": options.width}
        write(options.json, {**facts, "masks": rows(making, baseline), "steps": rows(timings, "dense")})


if __name__ == "__main__":
    main()
