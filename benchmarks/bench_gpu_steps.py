"""GPU steps of GPT-2-small with each technique that promises speed or memory there, against plain PyTorch.

    python benchmarks/bench_gpu_steps.py [--preset gpt-small --length 1024 --batch 16] [--only WAY …] [--json PATH]

Plain is a hand-written loop: bfloat16 autocast and fused AdamW on the same model, not compiled; `torch, compiled` is
that loop compiled. Each variant alternates with the plain loop; `ratio` is its step time divided by the plain one's in
the same round. `peak` is the peak of CUDA's allocator in a step, `told` the prediction of `explain` before it. `same
bits` uses deterministic kernels only, the default of a run; all other variants allow nondeterministic ones.
"""

import argparse
import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from side_by_side import side_by_side, write
from steps import SameRows, whole_step
from thrifty import techniques
from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.composition.explain import explain
from thrifty.core.recipe import ModelSettings
from thrifty.core.technique import Technique
from thrifty.models import build_model
from thrifty.models.model_presets import PRESETS
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.training.determinism import deterministic_kernels

GPU = torch.device("cuda")
TORCH, TORCH_COMPILED, SAME_BITS = "torch", "torch, compiled", ", same bits"
COMPILED: dict[str, dict[str, object]] = {"precision.mixed": {}, "compile": {}}
Settings = dict[str, dict[str, object]]
MIXED: Settings = {"precision.mixed": {}}
WAYS: dict[str, Settings] = {
    "float32": {},
    "mixed": MIXED,
    f"mixed{SAME_BITS}": MIXED,
    "mixed, accumulated over 4": {**MIXED, "large_batch.gradient_accumulation": {"micro_batches": 4}},
    "float8": {**MIXED, "precision.float8": {}},
    "recompute": {**MIXED, "memory.recompute": {}},
    "recompute, selective": {**MIXED, "memory.recompute": {"schedule": "selective"}},
    "recompute, optimal at half": {**MIXED, "memory.optimal_recompute": {"bytes": 0.5}},
    "compress, 8 bits": {**MIXED, "memory.compress_activations": {"bits": 8}},
    "compress, 4 bits": {**MIXED, "memory.compress_activations": {"bits": 4}},
    "compress, 2 bits": {**MIXED, "memory.compress_activations": {"bits": 2}},
    "offload activations": {**MIXED, "memory.offload_activations": {}},
    "offload optimizer": {**MIXED, "memory.offload_optimizer": {}},
    "budget of half": {**MIXED, "memory.activation_budget": {"bytes": 0.5}},
    "budget of a third, 4 bits": {**MIXED, "memory.activation_budget": {"bytes": 0.33, "bits": 4}},
    "8-bit moments": {**MIXED, "precision.optimizer_state": {}},
    "bfloat16 weights": {"precision.bfloat16_weights": {}},
    "2:4 weights": {**MIXED, "sparsity.n_of_m": {}},
    "lora": {**MIXED, "adapters.lora": {}},
    TORCH_COMPILED: {},
    "compiled": COMPILED,
    f"compiled{SAME_BITS}": COMPILED,
    "compiled, float8": {**COMPILED, "precision.float8": {}},
    "compiled, recompute": {**COMPILED, "memory.recompute": {}},
    "compiled, compress, 4 bits": {**COMPILED, "memory.compress_activations": {"bits": 4}},
    "compiled, offload activations": {**COMPILED, "memory.offload_activations": {}},
    "compiled, 8-bit moments": {**COMPILED, "precision.optimizer_state": {}},
    "compiled, bfloat16 weights": {"precision.bfloat16_weights": {}, "compile": {}},
    "compiled, lora": {**COMPILED, "adapters.lora": {}},
}


@dataclass(frozen=True)
class VariantTiming:
    """Measured time and memory of a step with one technique."""

    seconds: float
    torch_seconds: float
    ratio: float
    ratios: tuple[float, ...]
    peak: int
    told: float | None
    prepared: float
    """Seconds until the second step had finished: building, planning, compiling."""

    def __str__(self) -> str:
        error = "" if self.told is None else f" ({self.told / self.peak - 1:+.1%})"
        predicted = "" if self.told is None else f", predicted {self.told / 1e9:6.2f} GB{error}"
        return (
            f"{self.seconds * 1e3:8.1f} ms, {self.ratio:.3f} [{min(self.ratios):.3f}, {max(self.ratios):.3f}] of "
            f"torch's, peak {self.peak / 1e9:6.2f} GB{predicted}, ready after {self.prepared:.0f} s"
        )


def torch_step(plain: BaseRun, compiled: bool = False) -> Callable[[], None]:
    """Return a step of a hand-written PyTorch loop."""
    model, batch = plain.build().to(GPU).train(), plain.objective.examples(plain.source.at(0)).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss_of(tokens: Tensor) -> Tensor:
        logits = model.head(model(tokens[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    loss_of = torch.compile(loss_of) if compiled else loss_of

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(batch["tokens"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_of(step: Callable[[], object], before: int) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def chosen(settings: Settings) -> list[Technique]:
    from_settings = [techniques.find(name)(**own) for name, own in settings.items()]
    return [*from_settings, AdamW(lr=1e-4), GradientClipping()]


def own_step(run: Run, name: str) -> Callable[[], None]:
    if name == TORCH_COMPILED:
        return torch_step(run.plain, compiled=True)
    step = whole_step(run)

    def with_same_bits() -> None:
        with deterministic_kernels(GPU):
            step()

    return with_same_bits if name.endswith(SAME_BITS) else step


def measured(plain: BaseRun, name: str, theirs: Callable[[], None], rounds: int) -> VariantTiming:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    run = compose(plain, chosen(WAYS[name]), 100, GPU)
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    mine = own_step(run, name)
    mine()
    mine()
    torch.cuda.synchronize()
    prepared = time.perf_counter() - began
    peak = peak_of(mine, before)
    timings = side_by_side({TORCH: theirs, "mine": mine}, rounds, warmup=1)
    ratios = [a / b for a, b in zip(timings["mine"].seconds, timings[TORCH].seconds, strict=True)]
    predicted = None if name == TORCH_COMPILED else explain(run).footprint.memory
    seconds, torch_seconds = timings["mine"].median, timings[TORCH].median
    return VariantTiming(seconds, torch_seconds, median(ratios), tuple(ratios), peak, predicted, prepared)


def plain_run(preset: str, length: int, batch: int) -> BaseRun:
    vocabulary = PRESETS[preset].vocabulary
    tokens = torch.randint(vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(0))

    def build() -> nn.Module:
        return build_model(ModelSettings(preset=preset), vocabulary, length, 0)

    return BaseRun(build, SameRows({"tokens": tokens}), NextToken())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt-small")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no GPU: nothing to measure")
        return
    plain = plain_run(options.preset, options.length, options.batch)
    torch.backends.cuda.matmul.allow_tf32 = False
    theirs = torch_step(plain)
    alone = torch.cuda.memory_allocated()
    theirs()
    peak = peak_of(theirs, 0)
    print(f"{options.preset}, {options.batch} x {options.length} tokens, {torch.cuda.get_device_name()}: plain PyTorch")
    print(f"uses {alone / 1e9:.2f} GB before its first step and {peak / 1e9:.2f} GB at its peak", flush=True)
    results: dict[str, VariantTiming] = {}
    failed: dict[str, str] = {}
    for name in options.only:
        try:
            results[name] = measured(plain, name, theirs, options.rounds)
            print(f"  {name:<30} {results[name]}", flush=True)
        except Exception as failure:  # a variant that fails on this card or version must not stop the others
            failed[name] = f"{type(failure).__name__}: {failure}"
            print(f"  {name:<30} failed: {failed[name][:2000]}", flush=True)
            traceback.print_exc()
        if options.json:
            facts = {"benchmark": "gpu_steps", "preset": options.preset, "tokens": [options.batch, options.length]}
            ways = {name: asdict(way) for name, way in results.items()}
            write(options.json, facts | {"torch peak": peak, "ways": ways, "failed": failed})


if __name__ == "__main__":
    main()
