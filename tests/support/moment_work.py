"""Work of each rank in the tests of quantized moments, and in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensor_work import GPT2_PLAN, TENSOR, composed, laid, model, transformers_model
from tiny_runs import advance
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from thrifty.core import mesh
from thrifty.core.gradient_transform import chain
from thrifty.core.shard_layout import FusedOrder, order_of, tag_order
from thrifty.core.state import TrainState, full_value
from thrifty.optim.moment_formats import is_scales, opened
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.transform_elements import ScaleByAdam
from thrifty.techniques.precision.optimizer_state import FORMATS, with_compact_state
from thrifty.training import checkpoint
from thrifty.training.rank_sync import process_group_sync
from thrifty.training.state_loading import load_state

WIDTHS: dict[str, tuple[int, ...]] = {
    "two_blocks": (512,),
    "three_blocks": (768,),
    "other_blocks_on_two": (1280,),
    "two_slices": (64, 32),
    "three_odd_slices": (1270, 1270, 1270),
    "prime_halves": (514,),
}
"""Column slices of matrices that tensor parallelism divides by columns."""


class Matrices(nn.Module):
    """Return matrices of these widths, divided by columns, slice by slice, over all ranks."""

    def __init__(self, ranks: int):
        super().__init__()
        for name, slices in WIDTHS.items():
            order = FusedOrder(1, slices, ranks) if ranks > 1 and len(slices) > 1 else None
            self.register_parameter(name, tag_order(nn.Parameter(_laid(torch.zeros(4, sum(slices)), order)), order))


def _laid(whole: Tensor, order: FusedOrder | None) -> Tensor:
    whole = order.to_stored(whole) if order else whole
    return distribute_tensor(whole, mesh.submesh("tensor"), [Shard(1)]) if mesh.axis("tensor").size > 1 else whole


def moved(form: str, steps: int, state: TrainState | None = None) -> TrainState:
    """Return a state after more steps of Adam on gradients that depend only on step and name."""
    if state is None:
        matrices = Matrices(mesh.axis("tensor").size)
        transform = with_compact_state(chain(ScaleByAdam(0.9, 0.95)), FORMATS[form], 1)
        state = TrainState(model=matrices, optimizer=TransformOptimizer(matrices.named_parameters(), transform))
    assert state.model is not None and state.optimizer is not None
    for _ in range(steps):
        for name, parameter in state.model.named_parameters():
            seed = 1000 * state.step + len(name)
            gradient = torch.randn(4, sum(WIDTHS[name]), generator=torch.Generator().manual_seed(seed)) ** 3
            parameter.grad = _laid(gradient, order_of(parameter))
        state.optimizer.step()
        state.step += 1
    return state


def saved(form: str, folder: Path, steps: int = 3) -> dict[str, Any]:
    state = moved(form, steps)
    checkpoint.save(folder, state.step, state.tensors(), state.scalars(), ranks=process_group_sync())
    return content(state)


def loaded(form: str, folder: Path, steps: int = 0) -> dict[str, Any]:
    """Load a fresh state from a folder, train it for some steps, and return its content."""
    state = moved(form, 0)
    load_state(state, checkpoint.find(folder, ranks=process_group_sync()), process_group_sync())
    return content(moved(form, steps, state))


def content(state: TrainState) -> dict[str, Any]:
    """Return whole tensors as stored, dequantized moments, and the dtype of each moment."""
    assert state.optimizer is not None
    stored = {name: full_value(tensor) for name, tensor in state.tensors().items()}
    moments = [name for name in stored if name.startswith("optimizer/") and not is_scales(name)]
    numbers = {name: opened(name, stored, state.optimizer.site.slot_kind).float() for name in moments}
    return {
        "stored": {name: value.float().numpy() for name, value in stored.items()},
        "numbers": {name: value.numpy() for name, value in numbers.items()},
        "dtypes": {name: stored[name].dtype for name in moments},
    }


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "gpt": (lambda: model("gpt").float(), {}),
    "GPT-2 of transformers": (lambda: transformers_model("GPT2").float(), {"plan": GPT2_PLAN}),
}


def of_models() -> dict[str, dict[str, Any]]:
    """Return the states of tensor-parallel models after two steps."""
    found = {}
    for name, (build, settings) in MODELS.items():
        run = composed(build, [(TENSOR, settings), ("precision.optimizer_state", {"min_elements": 1})], 4)
        state = run.start()
        advance(run, state, 2)
        run.verify(state)
        found[name] = content(state)
    return found


def on_two(folder: Path) -> dict[str, Any]:
    with laid(tensor=2):
        return {
            "saved": {form: saved(form, folder / f"of two, {form}") for form in FORMATS},
            "again": {form: loaded(form, folder / f"of two, {form}", 2) for form in FORMATS},
            "resumed": {form: content(moved(form, 5)) for form in FORMATS},
            "of one": {form: loaded(form, folder / f"of one, {form}") for form in FORMATS},
            "models": of_models(),
        }


def on_four(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save a model over two mesh axes, and load the checkpoint of one process."""
    with laid(tensor=2, shard=2):
        chosen = [(TENSOR, {}), ("parallelism.shard", {})]
        return saved_model(chosen, folder / "of four"), loaded_model(chosen, folder / "of one, model")


def saved_model(chosen: list[tuple[str, dict[str, Any]]], folder: Path) -> dict[str, Any]:
    run = composed(MODELS["gpt"][0], [*chosen, ("precision.optimizer_state", {"min_elements": 1})], 4)
    state = run.start()
    advance(run, state, 2)
    checkpoint.save(folder, state.step, state.tensors(), state.scalars(), ranks=process_group_sync())
    return content(state)


def loaded_model(chosen: list[tuple[str, dict[str, Any]]], folder: Path) -> dict[str, Any]:
    run = composed(MODELS["gpt"][0], [*chosen, ("precision.optimizer_state", {"min_elements": 1})], 4)
    state = run.init_state()
    load_state(state, checkpoint.find(folder, ranks=process_group_sync()), process_group_sync())
    return content(state)
