"""Work of each rank in tests of sharding, in a module that a new process can import."""

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_work import digests
from tiny_runs import VOCABULARY, corpus, plain_run, technique
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core import mesh
from thrifty.core.batches import Batch, MappedSource
from thrifty.core.errors import RefusedError
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.ranks import random_stream
from thrifty.core.shard_layout import local_tensors
from thrifty.core.state import TrainState, full_value, read_log
from thrifty.core.technique import Technique
from thrifty.data.text.token_windows import PackedTokens
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.next_token import NextToken
from thrifty.objectives.sequence_to_sequence import SequenceToSequence
from thrifty.training.checkpoint import fill, find, save
from thrifty.training.loop import step_seed
from thrifty.training.rank_sync import ProcessGroupSync, SingleProcess

STEPS, BATCH = 20, 8
DEMANDING = ("optimizers.lamb", "gradients.clip", "large_batch.gradient_accumulation")
"""Techniques that require whole norms and sums over micro-batches."""


@contextmanager
def laid(**sizes: int) -> Iterator[None]:
    """Set a mesh of all ranks with these axes, and clear it afterwards."""
    mesh.set_mesh({name: sizes.get(name, 1) for name in mesh.AXES}, "cpu")
    try:
        yield
    finally:
        mesh.clear_mesh()


@dataclass(frozen=True)
class Way:
    """A strategy of data parallelism and its mesh axes; without axes all ranks are on the data axis."""

    divides: Technique | None
    axes: Mapping[str, int] | None = None

    @contextmanager
    def placed(self) -> Iterator[None]:
        if self.axes is None:
            yield
        else:
            with laid(**self.axes):
                yield

    def run(self, plain: BaseRun, others: Sequence[Technique], steps: int) -> Run:
        return compose(plain, [*others, *([self.divides] if self.divides else [])], steps)


def in_float64(style: str = "llama") -> BaseRun:
    """Return a float64 run of a model with tied embeddings on real text."""
    if style == "llama":
        plain = plain_run(batch=BATCH)
        return BaseRun(lambda: plain.build().double(), plain.source, plain.objective)

    def build() -> nn.Module:
        model = assemble(ModelConfig("t5", 2, 32, 4, 4, 64, VOCABULARY, 16, True))
        initialize(model, 0)
        return model.double()

    def pairs(step: int, batch: Batch) -> Batch:
        text = batch["tokens"]
        return Batch({"source": text[:, :8], "tokens": text[:, 8:]}, batch.weight)

    return BaseRun(build, MappedSource(PackedTokens(corpus(), 16, BATCH, seed=0), pairs), SequenceToSequence())


def take_step(run: Run, state: TrainState, objective: Objective | None = None) -> float:
    """Return the loss of a step in float64; records have it in float32."""
    assert state.model is not None and state.optimizer is not None
    batch = run.source.at(state.step)
    loss = run.backward(state.model, objective or run.objective, batch).loss.item()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.step += 1
    return loss


@torch.no_grad()
def judged(run: Run, state: TrainState) -> float:
    assert state.model is not None
    batch = run.plain.source.at(1000)
    losses = run.eval_objective.losses(run.eval_objective.predict(state.model, batch), batch)
    return float(losses.double() @ batch.weight.double())


@dataclass
class Trained:
    losses: list[float]
    held_out: list[float]
    parameters: dict[str, Any]
    """Whole parameters as arrays."""
    parts: int
    """Modules that are gathered separately."""


def trained(way: Way, names: Sequence[str] = DEMANDING, style: str = "llama", steps: int = STEPS) -> Trained:
    """Run some steps in float64 with evaluations between them, which must free all memory."""
    with way.placed():
        run = way.run(in_float64(style), [technique(name) for name in names], steps)
        state, losses, held_out = run.start(), [], []
        for step in range(steps):
            losses.append(take_step(run, state))
            if step % 8 == 0:
                held_out.append(judged(run, state))
        assert state.model is not None
        whole = {name: full_value(parameter).numpy() for name, parameter in state.model.named_parameters()}
        return Trained(losses, held_out, whole, sum(isinstance(m, FSDPModule) for m in state.model.modules()))


def all_trained(ways: Mapping[str, Way]) -> dict[str, Trained]:
    return {name: trained(way) for name, way in ways.items()}


class Watch(TorchDispatchMode):
    """Record every storage that operations allocate, and the bytes that this rank sends in ring collectives."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Callable[[], torch.UntypedStorage | None]] = {}
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in local_tensors([leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]):
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = weakref.ref(storage)
        if func.namespace == "c10d":
            self.sent += sent_in_a_ring(func, args)
        return result

    def held(self) -> int:
        """Return the bytes of all live storages, after gloo's threads have freed the tensors of ended collectives."""
        gc.collect()
        least = self._alive()
        for _ in range(20):
            time.sleep(0.02)
            least = min(least, self._alive())
        return least

    def _alive(self) -> int:
        return sum(storage.nbytes() for each in self._storages.values() if (storage := each()) is not None)


def sent_in_a_ring(collective: Any, args: tuple) -> float:
    """Return the bytes that each rank sends: all but its own part in a gather or scatter, both in an all-reduce."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    kind = collective._schema.name.removeprefix("c10d::")
    if kind == "broadcast_":
        return sum(sizes)
    if kind in ("_allgather_base_", "_reduce_scatter_base_"):
        return max(sizes) - min(sizes)
    assert kind == "allreduce_", kind
    group = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject))
    ranks = dist.ProcessGroup.unbox(group).size()
    return 2 * sum(sizes) * (1 - 1 / ranks)


class Between(WrappedObjective):
    """A wrapped objective that records the live bytes before the last micro-batch."""

    def __init__(self, inner: Objective, watch: Watch):
        super().__init__(inner)
        self.watch, self.held = watch, 0

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        if batch.last:
            self.held = self.watch.held()
        return super().predict(model, batch)


@dataclass
class Bytes:
    """Bytes per parameter element."""

    held: float
    """Bytes between two micro-batches."""
    sent: float
    """Bytes sent in a step."""
    outside: float
    """Fraction of the elements outside the blocks."""


def held_and_sent(ways: Mapping[str, Way], parts: int) -> dict[str, Bytes]:
    return {name: _held_and_sent(way, parts) for name, way in ways.items()}


def _held_and_sent(way: Way, parts: int) -> Bytes:
    def build() -> nn.Module:
        model = assemble(ModelConfig("llama", 4, 128, 4, 4, 256, 256, 64, True))
        initialize(model, 0)
        return model

    plain = BaseRun(build, PackedTokens(corpus(), 8, 4 * parts, seed=0), NextToken())
    others = [technique("optimizers.adamw"), technique("large_batch.gradient_accumulation", micro_batches=parts)]
    with way.placed(), Watch() as watch:
        run = way.run(plain, others, 2)
        state = run.start()
        between = Between(run.objective, watch)
        take_step(run, state, between)  # the first step also allocates buffers of later ones
        watch.sent = 0.0
        take_step(run, state, between)
    model = build()
    numbers, in_blocks = (sum(p.numel() for p in module.parameters()) for module in (model, model.blocks))
    return Bytes(between.held / numbers, watch.sent / numbers, 1 - in_blocks / numbers)


def losses_with_dropout(ways: Sequence[Way], draws: int) -> list[list[float]]:
    """Return losses of one batch at the initial parameters, with repeated dropout, by strategy."""
    found = []
    for way in ways:
        with way.placed():
            run = way.run(plain_run(batch=BATCH, dropout=0.3), [technique("optimizers.adamw")], 1)
            state = run.start()
            assert state.model is not None
            batch, losses = run.source.at(0), []
            for draw in range(draws):
                torch.manual_seed(step_seed(0, draw, random_stream()))
                losses.append(run.backward(state.model, run.objective, batch).loss.item())
            found.append(losses)
    return found


@dataclass
class Resumed:
    before: dict[str, str]
    """Digest of every whole tensor of the loaded state."""
    after: dict[str, str]
    examples: list[list[int]]
    """Examples of all ranks in order, by step."""


def resume_each(ways: Mapping[str, Way], folder: Path, steps: int) -> dict[str, Resumed]:
    """Resume each run from its newest checkpoint, or start it, train some steps, and save."""
    return {name: _resume(way, folder / name, steps) for name, way in ways.items()}


def _resume(way: Way, folder: Path, steps: int) -> Resumed:
    ranks = ProcessGroupSync() if dist.get_world_size() > 1 else SingleProcess()
    with way.placed():
        run = way.run(in_float64(), [technique(name) for name in DEMANDING], 100)
        if folder.exists():
            found = find(folder, ranks=ranks)
            state = run.init_state(read_log(found.scalars))
            fill(found, state.tensors(), ranks=ranks)
            state.load_scalars(found.scalars)
        else:
            state = run.start()
        before, examples = _digests(state), []
        for _ in range(steps):
            examples.append(_tokens_of_all(run.source.at(state.step)))
            take_step(run, state)
        save(folder, state.step, state.tensors(), state.scalars(), ranks=ranks)
        return Resumed(before, _digests(state), examples)


def _digests(state: TrainState) -> dict[str, str]:
    return digests({name: full_value(tensor) for name, tensor in state.tensors().items()})


def _tokens_of_all(batch: Batch) -> list[int]:
    parts: list[Any] = [None] * mesh.axis("data").size
    own = batch["tokens"].flatten().tolist()
    if len(parts) == 1:
        return own
    dist.all_gather_object(parts, own)
    return [token for part in parts for token in part]


@dataclass
class Formats:
    losses: list[float]
    given: set[torch.dtype]
    """Dtypes of the inputs of linear layers."""
    kept: set[torch.dtype]
    """Dtypes of the parameters between steps."""


def formats(way: Way) -> Formats:
    given: set[torch.dtype] = set()

    def note(module: nn.Linear, args: tuple[Tensor]) -> None:
        given.update({args[0].dtype, module.weight.dtype})

    with way.placed():
        run = way.run(
            plain_run(batch=BATCH), [technique("optimizers.adamw"), technique("large_batch.gradient_accumulation")], 4
        )
        state = run.start()
        assert state.model is not None
        for module in state.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(note)
        losses = [take_step(run, state) for _ in range(4)]
        assert all(isinstance(parameter, DTensor) for parameter in state.model.parameters())
        return Formats(losses, given, {parameter.dtype for parameter in state.model.parameters()})


def on_two(ways: Mapping[str, Way], low: Way) -> tuple[dict[str, Trained], Trained, Formats, Formats]:
    """Return results in float64, the last with an encoder-decoder too, and in float32 with a lower precision."""
    last = list(ways.values())[-1]
    return all_trained(ways), trained(last, style="t5", steps=6), formats(last), formats(low)


def on_four(
    ways: Mapping[str, Way], counted: Mapping[str, Way], parts: int
) -> tuple[dict[str, Trained], dict[str, Bytes], list[list[str]]]:
    return all_trained(ways), held_and_sent(counted, parts), [refused_in_a_pipeline(zero) for zero in (1, 2, 3)]


def refused_in_a_pipeline(zero: int) -> list[str]:
    with laid(pipeline=2, shard=2):
        run = compose(plain_run(), [technique("parallelism.shard", zero=zero), technique("optimizers.adamw")], 1)
        try:
            run.build_model()
        except RefusedError as refused:
            return [refused.what, refused.fix]
        return []
