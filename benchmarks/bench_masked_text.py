"""Training step of masked language modelling, with and without masked tokens in the encoder, against transformers'
BertForMaskedLM of the same shape.

    python benchmarks/bench_masked_text.py [--depth 12] [--width 256] [--length 128] [--batch 16] [--json FILE]

A step is forward, loss, backward and fused AdamW on the same masked texts; the decoder has one block per six of the
encoder. transformers returns logits at all positions, ours only at predicted ones. This is the default of its API, not
a limit of it.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from side_by_side import print_timings, save_timings, side_by_side
from thrifty.core.batches import Batch
from thrifty.core.objective import Objective
from thrifty.data.text.token_windows import PackedTokens
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.masked_token import MaskedToken
from thrifty.techniques.data_selection.drop_masked_tokens import DropMaskedTokens

PLAIN, IGNORED = "ours, 15 % masked", -100


def updated(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(
    shape: ModelConfig, objective: Objective, batch: Batch, dropping: DropMaskedTokens | None
) -> Callable[[], None]:
    model = assemble(shape)
    initialize(model, 0)
    if dropping is not None:
        model, objective = dropping.model(model), dropping.objective(objective)
    return updated(model, lambda: (objective.losses(objective.predict(model, batch), batch) * batch.weight).sum())


def theirs(shape: ModelConfig, batch: Batch) -> Callable[[], None]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads, intermediate_size=shape.hidden, max_position_embeddings=shape.length,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    labels = torch.full_like(batch["tokens"], IGNORED).scatter(1, batch["places"], batch["targets"])
    return updated(model, lambda: model(input_ids=batch["tokens"], labels=labels).loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"depth": 12, "width": 256, "heads": 4, "vocabulary": 4096, "length": 128, "batch": 16, "rounds": 8}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_default_device(options.device)
    shape = ModelConfig(
        "bert", options.depth, options.width, options.heads, options.heads, 4 * options.width, options.vocabulary,
        options.length, tied=True, norm_eps=1e-12,
    )  # fmt: skip
    text = np.random.default_rng(0).integers(1, options.vocabulary, 100_000).astype(np.uint16)
    rows = PackedTokens(text, options.length, options.batch, seed=0).at(0)
    few = MaskedToken(mask=0, vocabulary=options.vocabulary, special=frozenset({0}))
    half = replace(few, rate=0.5)
    blocks = max(1, options.depth // 6)
    batches = {objective.rate: objective.examples(rows).to(options.device) for objective in (few, half)}
    ways = {
        PLAIN: ours(shape, few, batches[few.rate], None),
        "ours, 50 % masked": ours(shape, half, batches[half.rate], None),
        "50 % left out, self": ours(shape, half, batches[half.rate], DropMaskedTokens(blocks=blocks)),
        "50 % left out, cross": ours(shape, half, batches[half.rate], DropMaskedTokens(blocks=blocks, attend="cross")),
        "transformers, 15 % masked": theirs(shape, batches[few.rate]),
        "transformers, 50 % masked": theirs(shape, batches[half.rate]),
    }
    timings = side_by_side(ways, options.rounds)
    title = f"{options.depth} blocks of width {options.width}, {options.batch} x {options.length} tokens"
    print_timings(title, timings, PLAIN, options.batch, "texts/s")
    if options.json:
        shape_of = {name: getattr(options, name) for name in sizes}
        save_timings(
            options.json, {"benchmark": "masked text", "shape": shape_of, "decoder blocks": blocks}, timings, PLAIN
        )


if __name__ == "__main__":
    main()
