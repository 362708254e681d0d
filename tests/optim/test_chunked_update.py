"""A chunked update computes the same values as the whole chain."""

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
    """An element that is right only if it sees a whole tensor."""

    name = "divide_by_norm"
    reach = TransformScope.TENSOR

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        return [update / (update.norm() + 1e-12) for update in updates]


class DivideByLargest(GradientTransform):
    """An element that is right only if it sees all tensors."""

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


def whole(transform: GradientTransform, parameters: list[Tensor], steps: int) -> list[Tensor]:
    slots = transform.init([f"p{i}" for i in range(len(parameters))], parameters)
    for step in range(steps):
        updates = transform.update(
            tensors([t.shape for t in parameters], step), slots, parameters, transform.scalars(step, step)
        )
        torch._foreach_add_(parameters, updates)
    return parameters


def in_pieces(transform: GradientTransform, parameters: list[Tensor], steps: int) -> list[Tensor]:
    for tensor in parameters:
        tensor.requires_grad_()
    optimizer = TransformOptimizer([(f"p{i}", tensor) for i, tensor in enumerate(parameters)], transform)
    for step in range(steps):
        for tensor, gradient in zip(parameters, tensors([t.shape for t in parameters], step), strict=True):
            tensor.grad = gradient
        optimizer.step()
    return [tensor.detach() for tensor in parameters]


@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=25)
@given(shapes=st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=5))
def test_chunked_update_equals_whole_chain(name: str, shapes: list[tuple[int, ...]]) -> None:
    result = in_pieces(CHAINS[name](), tensors(shapes, 99), 3)
    expected = whole(CHAINS[name](), tensors(shapes, 99), 3)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_each_element_is_in_exactly_one_piece() -> None:
    parameters = tensors([(7, 5), (3,), (2, 2), (0, 4), (), (40,), (1, 30)], 0)
    counts = [torch.zeros_like(tensor) for tensor in parameters]
    assert lion().reach is TransformScope.ROWS
    chunks = ChunkedUpdate(lion(), chain(), parameters).pieces
    assert len(chunks) == 6
    for piece in chunks:
        for part in piece.of(counts):
            part.add_(1)
    assert all(torch.equal(count, torch.ones_like(count)) for count in counts)


def test_row_wise_elements_split_large_tensors_by_rows() -> None:
    (parameters,) = tensors([(9, 4)], 0)
    (piece,) = ChunkedUpdate(chain(lion(), DivideByNorm()), chain(), [parameters]).pieces
    assert [len(segment.pieces) for segment in piece.work.segments] == [3, 1]


def test_elements_of_scope_all_run_before_the_chunked_tail() -> None:
    head, tail = split_chain(chain(DivideByLargest(), lion(1e-2)), tensors([(4, 4)], 0))
    assert list(head.elements) == ["divide_by_largest"] and isinstance(tail, ChunkedUpdate)
    head, tail = split_chain(chain(lion(1e-2), DivideByLargest()), tensors([(4, 4)], 0))
    assert isinstance(head, TransformChain) and len(head.elements) == 4 and isinstance(tail, ChunkedUpdate)


def test_thread_pool_is_complete_before_main_thread_continues() -> None:
    torch.set_num_threads(3)
    chunked_update._pool(5, -1)  # a new pool
    with chunked_update.ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(torch.get_num_threads).result() == 3


def test_thread_count_of_main_program_is_unchanged() -> None:
    in_pieces(lion(), tensors([(30, 30)], 0), 1)
    assert torch.get_num_threads() == 2
    with chunked_update.ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(torch.get_num_threads).result() == 2
