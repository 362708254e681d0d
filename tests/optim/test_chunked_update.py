"""Running a chain in pieces changes where its arithmetic happens and nothing else."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, TransformChain, TransformScope, chain
from thrifty.modeling.parameter_kinds import is_matrix
from thrifty.optim import chunked_update
from thrifty.optim.chunked_update import ChunkedUpdate
from thrifty.optim.parameter_partition import partition
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.transform_elements import (
    AddDecayedWeights,
    ScaleByAdam,
    ScaleByMomentum,
    ScaleParameters,
    scale_by_learning_rate,
)
from thrifty.optim.update_plan import split_chain
from thrifty.techniques.optimizers.lion import lion


class DivideByNorm(GradientTransform):
    """Right only when it sees the whole of a tensor."""

    name = "divide_by_norm"
    reach = TransformScope.TENSOR

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        return [update / (update.norm() + 1e-12) for update in updates]


class DivideByLargest(GradientTransform):
    """Right only when it sees all tensors."""

    name = "divide_by_largest"

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        largest = torch.stack([update.abs().max() for update in updates]).max()
        return [update / largest for update in updates]


CHAINS = {
    "rows": lambda: lion(1e-2),
    "selective rows": lambda: chain(lion(1e-2), ScaleParameters(0.1, lambda name, parameter: name == "p1")),
    "tensors": lambda: chain(ScaleByAdam(), DivideByNorm(), AddDecayedWeights(0.1), scale_by_learning_rate(0.1)),
    "all, then rows": lambda: chain(DivideByLargest(), lion(1e-2)),
    "rows, tensors, rows": lambda: chain(
        lion(1e-2),
        DivideByNorm(),
        AddDecayedWeights(0.1),
        ScaleByMomentum(),
        DivideByNorm(),
        scale_by_learning_rate(0.1),
    ),
    "tensors in front of a kernel": lambda: chain(DivideByNorm(), ScaleByMomentum(), scale_by_learning_rate(0.1)),
    "partition": lambda: partition(
        ("m", is_matrix, lion(1e-2)), ("rest", lambda n, p: True, chain(ScaleByAdam(), scale_by_learning_rate(0.1)))
    ),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chunked_update, "CHUNK_ELEMENTS", 12)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def tensors(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def whole(transform: GradientTransform, held: list[Tensor], steps: int) -> list[Tensor]:
    slots = transform.init([f"p{i}" for i in range(len(held))], held)
    for step in range(steps):
        updates = transform.update(tensors([t.shape for t in held], step), slots, held, transform.scalars(step, step))
        torch._foreach_add_(held, updates)
    return held


def in_pieces(transform: GradientTransform, held: list[Tensor], steps: int) -> list[Tensor]:
    for tensor in held:
        tensor.requires_grad_()
    optimizer = TransformOptimizer([(f"p{i}", tensor) for i, tensor in enumerate(held)], transform)
    for step in range(steps):
        for tensor, gradient in zip(held, tensors([t.shape for t in held], step), strict=True):
            tensor.grad = gradient
        optimizer.step()
    return [tensor.detach() for tensor in held]


@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=25)
@given(shapes=st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=5))
def test_a_chain_in_pieces_is_the_chain(name: str, shapes: list[tuple[int, ...]]) -> None:
    found = in_pieces(CHAINS[name](), tensors(shapes, 99), 3)
    wanted = whole(CHAINS[name](), tensors(shapes, 99), 3)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_every_number_is_in_exactly_one_piece() -> None:
    held = tensors([(7, 5), (3,), (2, 2), (0, 4), (), (40,), (1, 30)], 0)
    counts = [torch.zeros_like(tensor) for tensor in held]
    assert lion().reach is TransformScope.ROWS
    found = ChunkedUpdate(lion(), chain(), held).pieces
    assert len(found) == 6
    for piece in found:
        for part in piece.of(counts):
            part.add_(1)
    assert all(torch.equal(count, torch.ones_like(count)) for count in counts)


def test_large_tensors_go_by_rows_through_what_needs_no_more() -> None:
    (held,) = tensors([(9, 4)], 0)
    (piece,) = ChunkedUpdate(chain(lion(), DivideByNorm()), chain(), [held]).pieces
    assert [len(stretch.pieces) for stretch in piece.work.stretches] == [3, 1]


def test_what_must_see_everything_runs_first_and_the_rest_in_pieces() -> None:
    head, tail = split_chain(chain(DivideByLargest(), lion(1e-2)), tensors([(4, 4)], 0))
    assert list(head.elements) == ["divide_by_largest"] and isinstance(tail, ChunkedUpdate)
    head, tail = split_chain(chain(lion(1e-2), DivideByLargest()), tensors([(4, 4)], 0))
    assert isinstance(head, TransformChain) and len(head.elements) == 4 and isinstance(tail, ChunkedUpdate)


def test_every_thread_of_the_pool_is_there_before_the_rest_of_the_program_goes_on() -> None:
    torch.set_num_threads(3)
    chunked_update._pool(5, -1)  # a pool of its own
    with chunked_update.ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(torch.get_num_threads).result() == 3


def test_the_threads_of_the_rest_of_the_program_stay() -> None:
    in_pieces(lion(), tensors([(30, 30)], 0), 1)
    assert torch.get_num_threads() == 2
    with chunked_update.ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(torch.get_num_threads).result() == 2
