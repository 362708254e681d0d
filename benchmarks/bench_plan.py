"""What plans promise against what runs then take: peak memory, seconds of a step, and the order of plans.

    python benchmarks/bench_plan.py [FILE.json] [--models gpt …] [--only TECHNIQUES …] [--seconds N] [--no-steps]

Promise: the predicted peak within 5 % in the median, what was measured under the upper bound in 95 % of configurations;
after probing a step's time within 10 % in the median; of pairs that differ by more than 10 % the faster one told in
90 %. Peaks are those of the allocator's events. A step's time is predicted as a plan does, from a probe of whole steps
at two or three sizes of micro-batch, and measured by the training loop afterwards; other programs disturb that, so the
machine's load is kept beside it.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from bench_footprints import MODELS, Model, chosen, one_rank
from side_by_side import write
from thrifty.core.compose import compose
from thrifty.core.errors import UsageError
from thrifty.models.wrapped import HuggingFaceCausalLM
from thrifty.planning.allocations import allocated
from thrifty.planning.axes import MICRO_BATCHES
from thrifty.planning.predict import COUNTED_HIGH, counted
from thrifty.planning.probes import sizes
from thrifty.planning.probing import timed
from thrifty.studies.language import BYTES
from thrifty.training.loop import train

STEPS, LEAST_STEPS = 6, 7
"""Of the run whose memory is watched, and of that whose steps are timed."""
APART = 0.1
"""By how much plans must differ for their order to count."""
PLANS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "recompute": {"memory.recompute": {}},
    "recompute, every 2": {"memory.recompute": {"every": 2}},
    "recompute, selective": {"memory.recompute": {"schedule": "selective"}},
    "optimal recompute": {"memory.optimal_recompute": {"bytes": 0.5}},
    "activation budget": {"memory.activation_budget": {"bytes": 0.5, "costs": "counted"}},
    "compress, 4 bits": {"memory.compress_activations": {"bits": 4}},
    "offload activations": {"memory.offload_activations": {}},
    "8-bit optimizer state": {"precision.optimizer_state": {}},
    "offload optimizer": {"memory.offload_optimizer": {}},
    "mixed": {"precision.mixed": {}},
    "bfloat16 weights": {"precision.bfloat16_weights": {"rounding": "kahan"}},
    "accumulate 2": {"large_batch.accumulate": {"parts": 2}},
    "accumulate 4": {"large_batch.accumulate": {"parts": 4}},
    "lora": {"adapters.lora": {}},
    "mixed + recompute + accumulate 2": {
        "precision.mixed": {}, "memory.recompute": {}, "large_batch.accumulate": {"parts": 2},
    },
}  # fmt: skip


def opt() -> nn.Module:
    """Of transformers, and nothing that any bound was found on."""
    sizes = {"hidden_size": 96, "word_embed_proj_dim": 96, "ffn_dim": 384, "num_hidden_layers": 3}
    shape = transformers.OPTConfig(**sizes, num_attention_heads=4, vocab_size=BYTES, max_position_embeddings=160)
    torch.manual_seed(0)
    with unset_fake_temporarily():
        return HuggingFaceCausalLM(transformers.OPTForCausalLM(shape))


OURS = MODELS | {"opt": Model(opt, 8, 64)}


@dataclass(frozen=True)
class Case:
    """Bytes and seconds, predicted and measured; seconds are 0 where steps were not timed."""

    model: str
    techniques: str
    predicted_memory: float
    measured_memory: int
    predicted_step: float = 0.0
    measured_step: float = 0.0
    load: float = 0.0
    """Processes that wanted a processor, over the last minute, when this was measured."""

    @property
    def memory_error(self) -> float:
        return self.predicted_memory / self.measured_memory - 1

    @property
    def step_error(self) -> float:
        return self.predicted_step / self.measured_step - 1

    def __str__(self) -> str:
        sizes = f"{self.predicted_memory / 1e6:8.2f} {self.measured_memory / 1e6:8.2f} MB {self.memory_error:+7.2%}"
        steps = f" {self.predicted_step:7.3f} {self.measured_step:7.3f} s {self.step_error:+7.1%}" if self.load else ""
        return f"{self.model:<12} {self.techniques:<34} {sizes}{steps}"


def measured(model: str, label: str, seconds: float) -> Case:
    plain, techniques = OURS[model].run(), chosen(PLANS[label])
    torch._dynamo.reset()
    run = compose(plain, techniques, STEPS)
    case = Case(model, label, counted(run).memory, allocated(run).peak)
    if not seconds:
        return case
    cutting = [technique for technique in techniques if MICRO_BATCHES in technique.claims]
    parts = max((getattr(technique, "parts", 1) for technique in cutting), default=1)
    whole = compose(plain, [technique for technique in techniques if technique not in cutting], LEAST_STEPS)
    timing = timed(whole, sizes(plain.source.batch, parts, compiled=False), parts, [plain.source.at(0)], seconds)
    run = compose(plain, techniques, LEAST_STEPS)
    with closing(train(run, run.start(), seed=0)) as records:
        taken = [record.seconds for record in records][2:]
    step = timing.step(plain.source.batch, parts)
    figures = asdict(case) | {"predicted_step": step, "measured_step": median(taken), "load": os.getloadavg()[0]}
    return Case(**figures)


def in_order(cases: Sequence[Case]) -> tuple[int, int]:
    """Of pairs on one model whose steps differ by more than a tenth, how many were told in their order, and all."""
    right = told = 0
    for one, other in combinations(cases, 2):
        if one.model != other.model or abs(one.measured_step / other.measured_step - 1) <= APART:
            continue
        told += 1
        right += (one.predicted_step < other.predicted_step) == (one.measured_step < other.measured_step)
    return right, told


def summary(cases: Sequence[Case]) -> Mapping[str, Any]:
    memory = sorted(abs(case.memory_error) for case in cases)
    under = sum(case.measured_memory <= case.predicted_memory * COUNTED_HIGH for case in cases)
    found: dict[str, Any] = {
        "configurations": len(cases),
        "memory: median error": median(memory),
        "memory: largest error": memory[-1],
        "memory: under the upper bound": under / len(cases),
    }
    steps = [case for case in cases if case.load]
    if steps:
        right, told = in_order(steps)
        found |= {
            "step: median error": median(abs(case.step_error) for case in steps),
            "order: pairs": told,
            "order: told right": right / told if told else None,
            "load: median": median(case.load for case in steps),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="where to keep the figures")
    parser.add_argument("--models", choices=OURS, nargs="+", default=list(OURS))
    parser.add_argument("--only", choices=PLANS, nargs="+", default=list(PLANS), metavar="TECHNIQUES")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long the steps of a probe may take")
    parser.add_argument("--no-steps", action="store_true", help="memory alone")
    options = parser.parse_args()
    cases, refused = [], {}
    with one_rank():
        for model in options.models:
            for label in options.only:
                try:
                    cases.append(measured(model, label, 0.0 if options.no_steps else options.seconds))
                except UsageError as error:
                    refused[f"{model}: {label}"] = error.what
                    continue
                print(cases[-1], flush=True)
    for label, what in refused.items():
        print(f"refused: {label}: {what}")
    found = summary(cases)
    for name, value in found.items():
        print(f"{name:<32} {value:.4g}" if value is not None else f"{name:<32} –")
    if options.path:
        write(options.path, {"benchmark": "plan", **found, "refused": refused, "cases": [asdict(c) for c in cases]})


if __name__ == "__main__":
    main()
