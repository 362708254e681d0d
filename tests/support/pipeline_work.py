"""Work of each rank in tests of the pipeline, in a module that a new process can import."""

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parallel_work import digests
from tiny_runs import VOCABULARY, advance, plain_run, snapshot, technique, with_optimizer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from thrifty.composition.compose import CPU, BaseRun, Run, compose
from thrifty.composition.explain import explain
from thrifty.core import mesh
from thrifty.core.backward import BackwardResult
from thrifty.core.batches import Batch, MappedSource
from thrifty.core.errors import UsageError
from thrifty.core.footprint import Footprint
from thrifty.core.objective import Objective
from thrifty.core.state import TrainState, read_log
from thrifty.core.tensor_tracing import StepTrace
from thrifty.core.written_buffers import BufferSnapshot
from thrifty.modeling.stage_placeholders import present
from thrifty.objectives.chat_answers import ChatAnswers
from thrifty.training import checkpoint
from thrifty.training.evaluation import held_out_loss
from thrifty.training.rank_sync import ProcessGroupSync

AXES = {"pipeline": 1, "replicate": 1, "shard": 1, "tensor": 1}
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "pad_token_id": None,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
THEIRS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gemma2": SIZES | {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt2": {
        "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY, "initializer_range": 0.2,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip
"""Models of transformers: with an untied head; a tied head and later layers; a tied head and positions."""


@dataclass
class Found:
    """Results of one rank, with tensors as arrays that can be sent between processes."""

    refused: str = ""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    held_out: float = 0.0
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A run with techniques and settings in addition to those of tiny runs."""

    techniques: Mapping[str, Mapping[str, Any]]
    model: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 4
    data: str = "text"
    double: bool = True

    def compose(self) -> Run:
        plain = plain_run(**{name: value for name, value in self.model.items() if name != "theirs"})
        if self.data == "conversations":
            plain = BaseRun(plain.build, MappedSource(plain.source, as_conversations), ChatAnswers())
        build = (lambda: theirs(self.model["theirs"])) if "theirs" in self.model else plain.build
        built = (lambda: build().double()) if self.double else build
        chosen = [technique(name, **settings) for name, settings in self.techniques.items()]
        return compose(BaseRun(built, plain.source, plain.objective), with_optimizer(chosen), self.steps)

    def without(self, *names: str) -> "Case":
        kept = {name: settings for name, settings in self.techniques.items() if name not in names}
        return Case(kept, self.model, self.steps, self.data, self.double)


def theirs(name: str) -> nn.Module:
    import transformers

    from thrifty.models.hf_loader import HuggingFaceCausalLM

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **THEIRS[name])
    return HuggingFaceCausalLM(transformers.AutoModelForCausalLM.from_config(config))


def as_conversations(step: int, batch: Batch) -> Batch:
    """Return each line of a text as a conversation, several in a row of tokens."""
    tokens = batch["tokens"]
    read = tokens[:, :-1]
    segments = 1 + (read == ord("\n")).long().cumsum(1)
    share = torch.full(read.shape, 1 / read.shape[1])
    return Batch({"tokens": read, "targets": tokens[:, 1:], "segments": segments, "share": share}, batch.weight)


def found(case: Case) -> Found:
    """Train a case on this rank, and return its results."""
    torch._dynamo.reset()
    try:
        return found_in(case, case.compose())
    except UsageError as error:
        return Found(refused=f"{error.what}; {error.fix}")


def found_in(case: Case, run: Run) -> Found:
    state = run.start()
    losses: list[float] = []
    backward = run.backward

    def listening(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        outcome = backward(model, objective, batch)
        losses.append(float(outcome.loss))  # records are float32
        return outcome

    vars(run)["backward"] = listening
    records = advance(run, state)
    run.verify(state)
    assert state.model is not None
    return Found(
        losses=losses,
        norms=[record.gradient_norm for record in records],
        skipped=[record.skipped for record in records],
        held_out=held_out_loss(state.model, run.eval_objective, [run.plain.source.at(case.steps)], CPU),
        tensors={name: tensor.double().numpy() for name, tensor in snapshot(state).tensors.items()},
    )


def on_mesh(sizes: Mapping[str, int], cases: Sequence[Case]) -> list[Found]:
    mesh.set_mesh(AXES | sizes, "cpu")
    try:
        return [found(case) for case in cases]
    finally:
        mesh.clear_mesh()


def resumed(case: Case, folder: Path) -> tuple[Run, TrainState]:
    """A run as its newest checkpoint has it."""
    at = checkpoint.find(folder, ranks=ProcessGroupSync() if mesh.axis("pipeline").size > 1 else None)
    run = case.compose()
    state = run.init_state(read_log(at.scalars))
    checkpoint.fill(at, state.tensors(), ranks=ProcessGroupSync() if mesh.axis("pipeline").size > 1 else None)
    state.load_scalars(at.scalars)
    return run, state


def save_after(case: Case, steps: int, folder: Path, stages: int, resume: bool = False) -> dict[str, str]:
    """Train to this step and save; return digests of this rank's tensors before the first step."""
    mesh.set_mesh(AXES | {"pipeline": stages}, "cpu")
    try:
        run, state = resumed(case, folder) if resume else (run := case.compose(), run.start())
        before = digests(snapshot(state).tensors)
        advance(run, state, steps)
        checkpoint.save(folder, state.step, state.tensors(), state.scalars(), ranks=ProcessGroupSync())
        return before
    finally:
        mesh.clear_mesh()


def footprints(cases: Sequence[Case]) -> list[tuple[Footprint, Footprint]]:
    """Return the explained footprints without techniques and with them."""
    mesh.set_mesh(AXES | {"pipeline": torch.distributed.get_world_size()}, "cpu")
    try:
        explained = [explain(case.compose()) for case in cases]
        return [(each.plain, each.footprint) for each in explained]
    finally:
        mesh.clear_mesh()


class Sent(TorchDispatchMode):
    """Sum the bytes that this rank sends to others."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.bytes += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def sent_and_buffered(cases: Sequence[Case]) -> list[tuple[int, int]]:
    """Return, for each case, the bytes that this rank sends in a later step, and its buffers besides the state."""
    mesh.set_mesh(AXES | {"pipeline": torch.distributed.get_world_size()}, "cpu")
    measured = []
    for case in cases:
        run = case.compose()
        with StepTrace() as live:
            state = run.start()
            assert state.model is not None and state.optimizer is not None
            buffers = BufferSnapshot(state.model)  # as in the training loop
            run.backward(state.model, run.objective, run.source.at(0))
            with Sent() as sent:
                run.backward(state.model, run.objective, run.source.at(0))
            state.optimizer.zero_grad()
            gc.collect()
            slots = (tensor for tensors in state.optimizer.slots.values() for tensor in tensors)
            measured.append((sent.bytes, live.held_besides([*state.model.parameters(), *slots])))
            del buffers
    mesh.clear_mesh()
    return measured


def most_alive(cases: Sequence[Case]) -> list[list[int]]:
    """Return, for each case, the largest number of micro-batches whose activations this rank held in the first step.

    It counts saved inputs of the first matrix of each block.
    """
    mesh.set_mesh(AXES | {"pipeline": torch.distributed.get_world_size()}, "cpu")
    peaks = []
    for case in cases:
        run = case.compose()
        state = run.start()
        assert state.model is not None
        counts = [Alive(block.mlp.down) for block in present(state.model.blocks)]  # type: ignore[attr-defined]
        run.backward(state.model, run.objective, run.source.at(0))
        peaks.append([count.peak for count in counts])
    mesh.clear_mesh()
    return peaks


class Alive:
    """Counter of the layer inputs that are saved for a backward pass at one time."""

    def __init__(self, layer: nn.Module):
        self.now, self.peak = 0, 0
        layer.register_forward_pre_hook(self.see)

    def see(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            self.now += 1
            self.peak = max(self.peak, self.now)
            weakref.finalize(args[0].untyped_storage(), self.forget)

    def forget(self) -> None:
        self.now -= 1
