"""Runs small enough to train in milliseconds on real text: the standard library's source as bytes."""

import heapq
import json
import os
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thrifty import techniques
from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core.batches import Batch, BatchSource, WrappedSource
from thrifty.core.claims import Claim
from thrifty.core.state import TrainState, fill_tensor, full_value, read_log
from thrifty.core.technique import Technique
from thrifty.data.text.token_windows import PackedTokens
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.next_token import NextToken
from thrifty.training.evaluation import held_out_loss
from thrifty.training.loop import Record, train

DEVICE = torch.device(os.environ.get("THRIFTY_TEST_DEVICE", "cpu"))
"""Device of tiny runs: `make test-gpu` sets cuda."""
VOCABULARY = 256
SETTINGS: dict[str, dict[str, Any]] = {
    "adapters.bias_only": {"add": True},
    "adapters.bottleneck": {"width": 8},
    "adapters.intrinsic_dimension": {"dimension": 64},
    "adapters.lora": {"rank": 4},
    "adapters.prefix_tuning": {"tokens": 4, "hidden": 16},
    "adapters.prompt_tuning": {"tokens": 4},
    "adapters.visual_prompt": {"tokens": 4, "patch": 4},
    "attention.a3": {"rounds": 0.25, "percent": 30.0, "from_step": 2},
    "attention.block_sparse": {"block": 2, "window_blocks": 0, "global_blocks": 1, "random_blocks": 1},
    "attention.dota": {"density": 0.2, "from_step": 2},
    "attention.elsa": {"p": 4.0, "from_step": 2},
    "attention.sanger": {"threshold": 0.2, "from_step": 2},
    "attention.spatten": {"tokens": 0.5, "heads": 0.5, "values": 0.5, "from_step": 2},
    "attention.tiled": {"tile": 8},
    "attention.vitcod": {"tokens": 24, "cut": 0.4, "autoencoder": True, "from_step": 2},
    "attention.window": {"window": 3, "block": 4},
    "compile": {"backend": "aot_eager"},
    "data_selection.drop_masked_tokens": {"blocks": 1},
    "data_selection.prune": {"order": "random"},
    "growth.auto_grow": {"stages": 3, "until": 6, "search": 1, "depths": 2, "multiple": 4},
    "growth.compound": {"at": (1, 3)},
    "growth.layer_drop": {"time_constant": 2},
    "curriculum.low_frequency": {"until": (2, 3), "multiple": 4},
    "curriculum.patch_size": {"at": (3,)},
    "curriculum.resolution": {"until": 3, "multiple": 4},
    "curriculum.sequence_length": {"start": 8, "until": 3, "phases": 2},
    "growth.stacking": {"at": (1, 3)},
    "large_batch.gradient_accumulation": {"micro_batches": 2},
    "large_batch.batch_ramp": {"start": 0.5, "until": 3, "multiple": 2},
    "measure.noise_scale": {"every": 2},
    "large_batch.scale_learning_rate": {"base_batch": 2, "warmup": 2},
    "memory.activation_budget": {"cost_source": "counted"},
    "optimizers.adamw": {"lr": 3e-3},
    "optimizers.lamb": {"lr": 1e-2},
    "optimizers.lars": {"lr": 0.1},
    "optimizers.lion": {"lr": 1e-3},
    "optimizers.muon": {"lr": 1e-2, "precision": "float32"},
    "optimizers.soap": {"every": 2},
    "precision.optimizer_state": {"min_elements": 1},
    "sparsity.dynamic_heads": {"every": 2, "alpha": 1.0},
    "sparsity.early_bird": {"every": 1, "latest": 2},
    "sparsity.n_of_m": {"every": 2},
    "sparsity.gradual": {"every": 2, "density": 0.5},
    "sparsity.grasp": {"density": 0.5},
    "sparsity.rigl": {"every": 2, "density": 0.5},
    "sparsity.mask_from_file": {
        "file": str(Path(__file__).with_name("tiny_ticket.safetensors")),
        "sha256": "a4c7e422566a030ece170893fdd73d3bf425c705005fd468cd649d38173b8b91",
    },
    "sparsity.set": {"every": 2, "density": 0.5},
    "sparsity.snip": {"density": 0.5},
    "sparsity.static": {"density": 0.5},
}
"""Only where the defaults make no sense in a run of a few steps of a tiny model."""
LEAST_GAIN = {
    "adapters.bias_only": 0.6,
    "adapters.bottleneck": 0.8,
    "adapters.head_only": 0.4,
    "adapters.intrinsic_dimension": 0.8,
    "adapters.prefix_tuning": 0.4,
    "adapters.prompt_tuning": 0.2,
    "adapters.visual_prompt": 0.1,
    "data_selection.drop_masked_patches": 0.6,  # not in nats
}
"""By how many nats 40 steps lower the loss where what is trained is too little to learn one, on a random base."""
ROOM = 8
"""Positions of the tiny model beyond the text, for virtual tokens."""


def technique(name: str, **settings: Any) -> Technique:
    """A technique by name, with the settings that make sense in a tiny run."""
    return techniques.find(name)(**(SETTINGS.get(name, {}) | settings))


def with_optimizer(chosen: Sequence[Technique]) -> list[Technique]:
    """The techniques, and AdamW where none of them decides the optimizer."""
    claimed = any(Claim.OPTIMIZER in each.claims for each in chosen)
    return [*chosen] if claimed else [*chosen, technique("optimizers.adamw")]


@cache
def corpus() -> np.ndarray:
    text = b"".join(Path(module.__file__ or "").read_bytes() for module in (heapq, textwrap))
    return np.frombuffer(text, dtype=np.uint8)


class Repeated(WrappedSource):
    """The first batch of another source, at every step: what any algorithm that learns can learn."""

    def __init__(self, source: BatchSource):
        self.source, self.batch = source, source.batch

    def rows(self, step: int, start: int, stop: int) -> Batch:
        return self.source.rows(0, start, stop)


def tiny_model(depth: int = 4, style: str = "llama", tied: bool = True, dropout: float = 0.0) -> nn.Module:
    """Width 32; weights larger than usual, so that a few steps are enough to see an effect."""
    shape = ModelConfig(style, depth, 32, 4, 2 if style == "llama" else 4, 64, VOCABULARY, 16 + ROOM, tied)  # type: ignore[arg-type]
    model = assemble(shape)
    initialize(model, 0, std=0.1)
    if dropout:
        for block in model.blocks:
            block.mlp.activation = nn.Sequential(block.mlp.activation, nn.Dropout(dropout))
    return model


def plain_run(batch: int = 4, repeated: bool = False, **model: Any) -> BaseRun:
    source: BatchSource = PackedTokens(corpus(), 16, batch, seed=0)
    return BaseRun(lambda: tiny_model(**model), Repeated(source) if repeated else source, NextToken())


@dataclass
class Snapshot:
    """The content of a checkpoint, in memory."""

    tensors: dict[str, Tensor]
    scalars: dict[str, Any]


def snapshot(state: TrainState) -> Snapshot:
    scalars = json.loads(json.dumps(state.scalars()))
    scalars["counters"].pop("seconds", None)
    return Snapshot({name: full_value(tensor) for name, tensor in state.tensors().items()}, scalars)


def restored(run: Run, saved: Snapshot) -> TrainState:
    state = run.init_state(read_log(saved.scalars))
    tensors = state.tensors()
    assert tensors.keys() == saved.tensors.keys()
    for name, tensor in tensors.items():
        fill_tensor(tensor, saved.tensors[name])
    state.load_scalars(saved.scalars)
    return state


def advance(run: Run, state: TrainState, steps: int | None = None) -> list[Record]:
    """Train until `steps` are finished, or to the end of the run."""
    records: list[Record] = []
    with closing(train(run, state, seed=0)) as loop:
        for record in loop:
            records.append(record)
            if record.step == steps:
                break
    return records


def evaluated_loss(run: Run, state: TrainState) -> float:
    """The loss of the values that are evaluated, which an average may be, on the first batch."""
    assert state.model is not None and state.optimizer is not None
    with state.optimizer.use_eval_weights():  # type: ignore[attr-defined]
        batch = run.plain.objective.examples(run.plain.source.at(0))
    return held_out_loss(state.model, run.eval_objective, [batch], run.device)


def losses(records: Iterable[Record]) -> list[float]:
    return [record.loss for record in records]


def composed(plain: BaseRun, chosen: Sequence[Technique], steps: int) -> Run:
    return compose(plain, chosen, steps, DEVICE)


def run_through(plain: BaseRun, chosen: Sequence[Technique], steps: int) -> tuple[list[Record], TrainState]:
    run = composed(plain, chosen, steps)
    state = run.start()
    return advance(run, state), state


def assert_same(found: Snapshot, wanted: Snapshot) -> None:
    """Bit for bit, names and counters included."""
    assert found.scalars == wanted.scalars
    assert list(found.tensors) == list(wanted.tensors)
    for name, tensor in wanted.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(found.tensors[name], tensor), name
