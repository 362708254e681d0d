"""Predicted and measured memory of a step, for models x techniques.

    python benchmarks/bench_footprints.py [FILE.json] [--models gpt …] [--only TECHNIQUE …] [--device cuda]

Promise: parameters, gradients and optimizer state are exact to the byte; the median error of the predicted peak is
within 5 %. The prediction is `explain(run).footprint` on fake tensors. The measurement is the allocator's events over a
short run, or on a GPU its peak of allocated memory. Each model has its own process; other load does not affect bytes.
"""

import argparse
import gc
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from allocator_trace import measure_allocations
from side_by_side import write
from thrifty import techniques
from thrifty.composition.compose import CPU, BaseRun, Run, compose
from thrifty.composition.explain import explain
from thrifty.core.claims import Claim
from thrifty.core.errors import UsageError
from thrifty.core.shard_layout import local_tensors
from thrifty.core.technique import Technique
from thrifty.data.text.token_windows import PackedTokens
from thrifty.experiments.tasks.language_task import BYTES, source_text
from thrifty.models.families import assemble
from thrifty.models.hf_wrapper import HuggingFaceCausalLM
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.training.loop import train

STEPS = 6
SETTINGS: dict[str, dict[str, Any]] = {
    "adapters.intrinsic_dimension": {"dimension": 1024},
    "adapters.visual_prompt": {"tokens": 4, "patch": 4},
    "compile": {"backend": "aot_eager"},
    "curriculum.sequence_length": {"start": 16, "until": 3, "phases": 2},
    "growth.stacking": {"at": (1, 3)},
    "large_batch.batch_ramp": {"start": 0.5, "until": 3, "multiple": 2},
    "measure.noise_scale": {"every": 2},
    "memory.activation_budget": {"cost_source": "counted"},
    "optimizers.soap": {"every": 2},
    "sparsity.rigl": {"every": 2, "density": 0.5},
}
"""Settings for techniques whose defaults do not suit a short run of a small model."""
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "recompute, sqrt": {"memory.recompute": {"schedule": "sqrt"}},
    "recompute, selective": {"memory.recompute": {"schedule": "selective"}},
    "compress, 8 bits": {"memory.compress_activations": {"bits": 8}},
    "compress, 2 bits": {"memory.compress_activations": {"bits": 2}},
    "mixed, float16": {"precision.mixed": {"format": "float16"}},
    "lora, dropout": {"adapters.lora": {"dropout": 0.1}},
    "accumulate 2 + recompute": {"large_batch.gradient_accumulation": {"micro_batches": 2}, "memory.recompute": {}},
    "mixed + recompute": {"precision.mixed": {}, "memory.recompute": {}},
    "mixed + lora": {"precision.mixed": {}, "adapters.lora": {}},
    "mixed + compress": {"precision.mixed": {}, "memory.compress_activations": {}},
    "mixed + recompute + lora + accumulate": {
        "precision.mixed": {},
        "memory.recompute": {},
        "adapters.lora": {},
        "large_batch.gradient_accumulation": {"micro_batches": 2},
    },
    "recompute + offload optimizer + clip": {
        "memory.recompute": {},
        "memory.offload_optimizer": {},
        "gradients.clip": {},
    },
    "8-bit muon + recompute": {"optimizers.muon": {}, "precision.optimizer_state": {}, "memory.recompute": {}},
    "shared + bfloat16 weights": {"memory.share_parameters": {}, "precision.bfloat16_weights": {}},
}


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    batch: int
    length: int

    def run(self) -> BaseRun:
        return BaseRun(self.build, PackedTokens(source_text()[0], self.length, self.batch, seed=0), NextToken())


def ours(style: Any, depth: int, width: int, vocabulary: int = BYTES) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        kv_heads, hidden = (2, 3 * width) if style == "llama" else (4, 4 * width)
        model = assemble(ModelConfig(style, depth, width, 4, kv_heads, hidden, vocabulary, 160, tied=True))
        initialize(model, 0)
        return model

    return build


def gpt_neox() -> nn.Module:
    """Return a model in the user's form: separate head, with dropout."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = transformers.GPTNeoXConfig(
        **sizes, vocab_size=BYTES, max_position_embeddings=160, hidden_dropout=0.1, attention_dropout=0.1
    )
    torch.manual_seed(0)
    with unset_fake_temporarily():  # wrapping calls the model with real values
        return HuggingFaceCausalLM(transformers.GPTNeoXForCausalLM(shape))


MODELS = {
    "gpt": Model(ours("gpt", 4, 128), 8, 64),
    "llama": Model(ours("llama", 3, 128), 8, 64),
    "llama, wide": Model(ours("llama", 2, 128, 4096), 4, 16),
    "gpt_neox": Model(gpt_neox, 8, 64),
}
"""Activations dominate in all models but the wide one, where weights and their state do."""


@dataclass(frozen=True)
class Case:
    model: str
    techniques: str
    predicted: float
    measured: int
    exact: bool
    """True if parameters, gradients and optimizer state were predicted to the byte."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        sizes = f"{self.predicted / 1e6:9.3f} MB {self.measured / 1e6:9.3f} MB {self.error:+8.2%}"
        return f"{self.model:<12} {self.techniques:<40} {sizes}{'' if self.exact else '  state differs'}"


def combinations() -> dict[str, dict[str, dict[str, Any]]]:
    """Return every technique alone, and several combinations."""
    return {name: {name: {}} for name in techniques.names()} | VARIANTS


def chosen(settings: Mapping[str, Mapping[str, Any]]) -> list[Technique]:
    chosen_techniques = [techniques.find(name)(**(SETTINGS.get(name, {}) | own)) for name, own in settings.items()]
    has_optimizer = any(Claim.OPTIMIZER in technique.claims for technique in chosen_techniques)
    return chosen_techniques if has_optimizer else [*chosen_techniques, AdamW()]


def measured(model: str, label: str, settings: Mapping[str, Mapping[str, Any]], device: torch.device) -> Case:
    torch._dynamo.reset()
    run = compose(MODELS[model].run(), chosen(settings), STEPS, device)
    predicted = explain(run).footprint
    if device == CPU:
        report = measure_allocations(run)
        states, peak = (report.parameters, report.gradients, report.optimizer), report.peak
    else:
        *states, peak = cuda_allocated(run)
    exact = (predicted.parameters, predicted.gradients, predicted.optimizer) == tuple(states)
    return Case(model, label, predicted.memory, peak, exact)


def cuda_allocated(run: Run) -> tuple[int, int, int, int]:
    """Return bytes of parameters, gradients and optimizer state, and the peak of CUDA's allocator, in blocks of 512
    bytes.

    Steps with a structural change are excluded from the peak.
    """
    gc.collect()
    torch.cuda.empty_cache()
    before, peaks, gradients = torch.cuda.memory_allocated(), [], [0]
    state = run.start()
    with closing(train(run, state, 0)) as records:
        for _ in range(run.steps):
            gc.collect()
            assert state.model is not None and state.optimizer is not None
            hook = state.optimizer.register_step_pre_hook(
                lambda optimizer, *arguments: gradients.append(
                    bytes_of(p.grad for p in optimizer.parameters if p.grad is not None)
                )
            )
            torch.cuda.reset_peak_memory_stats()
            if not next(records).changes:
                peaks.append(torch.cuda.max_memory_allocated() - before)
            hook.remove()
    slots = bytes_of(tensor for tensors in state.optimizer.slots.values() for tensor in tensors)
    return bytes_of(state.model.parameters()), gradients[-1], slots, max(peaks)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all storages of these tensors."""
    storages = [tensor.untyped_storage() for tensor in local_tensors([*tensors])]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def one_rank() -> Iterator[None]:
    """Start a process group of this process alone, for the techniques that require one."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder, "store")), 1)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def grid(model: str, labels: Sequence[str], device: torch.device) -> tuple[list[Case], dict[str, str]]:
    """Return all cases of a model, and the messages of refused ones."""
    cases: list[Case] = []
    refused: dict[str, str] = {}
    gc.freeze()  # speed up garbage collection, since imported modules contain no cycles
    with one_rank():
        if device != CPU:  # CUDA libraries allocate memory at their first use
            measured(model, "", {}, device)
        for label in labels:
            try:
                cases.append(measured(model, label, combinations()[label], device))
            except UsageError as error:
                refused[f"{model}: {label}"] = error.what
                continue
            print(cases[-1], flush=True)
    return cases, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="results file")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--only", choices=combinations(), nargs="+", default=list(combinations()), metavar="TECHNIQUE")
    parser.add_argument("--device", type=torch.device, default=CPU)
    options = parser.parse_args()
    arguments = [[each] * len(options.models) for each in (options.only, options.device)]
    with ProcessPoolExecutor(len(options.models), multiprocessing.get_context("spawn")) as processes:
        results = list(processes.map(grid, options.models, *arguments))
    cases = [case for model_cases, _ in results for case in model_cases]
    refused = {label: what for _, model_refused in results for label, what in model_refused.items()}
    for label, what in refused.items():
        print(f"refused: {label}: {what}")
    errors = sorted(abs(case.error) for case in cases)
    worst = max(cases, key=lambda case: abs(case.error))
    inexact = sum(not case.exact for case in cases)
    print(f"{len(cases)} cases: error of the peak {median(errors):.4%} median, {errors[-1]:.2%} largest: {worst}")
    print(f"{inexact} with parameters, gradients or optimizer state other than predicted")
    if options.path:
        summary = {"median error": median(errors), "largest error": errors[-1], "state differs": inexact}
        rows = [asdict(case) | {"error": case.error} for case in cases]
        write(options.path, {"benchmark": "footprints", **summary, "refused": refused, "cases": rows})


if __name__ == "__main__":
    main()
