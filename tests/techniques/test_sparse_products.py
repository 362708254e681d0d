"""Sparse products in runs: rounding, choice by density, moving masks and resume."""

from typing import Any

import pytest
import sparse_work
import torch
from rank_processes import on_ranks
from tiny_runs import (
    advance,
    assert_same,
    losses,
    plain_run,
    restored,
    run_through,
    snapshot,
    technique,
    with_optimizer,
)
from torch import Tensor, nn

import thrifty
from thrifty.composition.compose import compose
from thrifty.core.errors import UsageError
from thrifty.core.state import TrainState
from thrifty.core.technique import Technique
from thrifty.kernels.sparse import sparse_breakeven
from thrifty.kernels.sparse.block_sparse_matrix import BlockSparseMatrix
from thrifty.kernels.sparse.csr_matrix import CsrMatrix
from thrifty.kernels.sparse.sparse_breakeven import DensityTimeFit
from thrifty.optim.weight_masks import masks_in
from thrifty.techniques.sparsity.sparse_products import (
    SPARSE_PRODUCT,
    LayerProducts,
    SparseProducts,
    products_of,
    remove_sparse_product,
    use_sparse_product,
)

LAYERS = 16
"""Layers of the tiny model that may use sparse products: four in each block."""


def sparse(density: float = 0.1, **settings: Any) -> list[Technique]:
    return [technique("sparsity.rigl", density=density, **settings), technique("sparsity.sparse_products")]


def products(state: TrainState) -> dict[str, LayerProducts]:
    assert state.model is not None
    return {name: SPARSE_PRODUCT.of(layer) for name, layer in products_of(state.model)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("masks", ["sparsity.static", "sparsity.rigl", "sparsity.set"])
def test_sparse_run_is_equal_within_rounding(masks: str) -> None:
    under = technique(masks, density=0.1)
    dense, wanted = run_through(plain_run(), with_optimizer([under]), 5)
    records, state = run_through(plain_run(), with_optimizer([under, technique("sparsity.sparse_products")]), 5)
    assert losses(records) == pytest.approx(losses(dense), rel=SparseProducts.tolerance)
    assert [record.notes["sparse_products"] for record in records] == [LAYERS] * 5
    for name, mask in masks_in(state).items():  # moved to where the dense gradient is largest
        assert float((mask == masks_in(wanted)[name]).float().mean()) > 0.99, name


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "other",
    [
        "growth.stacking",
        "large_batch.gradient_accumulation",
        "averaging.ema",
        "memory.activation_budget",
        "memory.offload_optimizer",
        "memory.recompute",
        "optimizers.schedule_free",
        "precision.bfloat16_weights",
        "precision.mixed",
        "precision.optimizer_state",
    ],
)
def test_sparse_run_resumes_exactly_with_others(other: str) -> None:
    plain, chosen = plain_run(), with_optimizer([technique(other), *sparse()])
    run = compose(plain, chosen, 5)
    state = run.start()
    records = advance(run, state, 3)  # masks move in the update of step 2
    saved = snapshot(state)
    records += advance(run, state)
    again = compose(plain, chosen, 5)
    resumed = restored(again, saved)
    advance(again, resumed)
    assert_same(snapshot(resumed), snapshot(state))
    assert all(record.notes["sparse_products"] for record in records if not record.changes)
    dense, _ = run_through(plain, [one for one in chosen if one.name != "sparsity.sparse_products"], 5)
    assert losses(records) == pytest.approx(losses(dense), rel=2e-2)  # 16-bit rounding differs


@pytest.mark.slow
def test_data_parallel_ranks_are_sparse() -> None:
    wanted, _ = run_through(plain_run(), with_optimizer(sparse()), 3)
    strategies = [[*sparse(), technique(f"parallelism.{way}")] for way in ("replicate", "shard")]
    for found in on_ranks(2, sparse_work.train, strategies, 3):
        for rank_losses, used in zip(found, (LAYERS, 0), strict=True):
            assert rank_losses[0] == pytest.approx(losses(wanted), rel=1e-4)
            assert rank_losses[1] == used


@pytest.mark.slow
def test_moving_masks_do_not_recompile() -> None:
    torch._dynamo.reset()
    plain, under = plain_run(depth=1), technique("sparsity.rigl", density=0.1, every=1)
    wanted, _ = run_through(plain, with_optimizer([under]), 4)
    run = compose(plain, with_optimizer([under, technique("sparsity.sparse_products"), technique("compile")]), 4)
    state = run.start()
    records = advance(run, state, 1)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    records += advance(run, state)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before > 0
    assert [record.notes["sparse_products"] for record in records] == [LAYERS / 4] * 4
    assert losses(records) == pytest.approx(losses(wanted), rel=1e-4)


def test_dense_gradients_only_in_moving_steps() -> None:
    run = compose(plain_run(), with_optimizer(sparse()), 4)
    state = run.start()
    outside = []
    for _ in range(4):
        run.changes(state)
        assert state.model is not None and state.optimizer is not None
        state.model.train()
        run.backward(state.model, run.objective, run.source.at(state.step))
        masks, parameters = masks_in(state), dict(state.model.named_parameters())
        outside.append(sum(int(parameters[name].grad[~mask].count_nonzero()) for name, mask in masks.items()))
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
    assert [bool(number) for number in outside] == [False, False, True, False]


def test_high_density_is_bit_identical() -> None:
    _, wanted = run_through(plain_run(), with_optimizer(sparse(0.9)[:1]), 4)
    records, state = run_through(plain_run(), with_optimizer(sparse(0.9)), 4)
    assert_same(snapshot(state), snapshot(wanted))
    assert records[-1].notes["sparse_products"] == 0
    assert all("sparse products would take" in product.summary for product in products(state).values())


def test_products_become_sparse_during_pruning() -> None:
    pruning = technique("sparsity.gradual", density=0.05, every=1, until=4)
    records, state = run_through(plain_run(), with_optimizer([pruning, technique("sparsity.sparse_products")]), 7)
    counts = [record.notes["sparse_products"] for record in records]
    assert counts[0] == 0 and counts[-1] == LAYERS and counts == sorted(counts)
    assert all(product.summary.startswith("csr: at density") for product in products(state).values())


def test_evaluation_is_dense() -> None:
    _, state = run_through(plain_run(), with_optimizer(sparse()), 2)
    assert state.model is not None
    tokens = plain_run().source.at(9)["tokens"][:, :-1]
    with torch.no_grad():
        found = state.model.eval()(tokens)
        wanted = plain_run().build()
        wanted.load_state_dict(state.model.state_dict())
        assert torch.equal(found, wanted.eval()(tokens))


def lines(dtype: torch.dtype = torch.float32) -> dict:
    return {dtype: {"csr": DensityTimeFit(1.0, 0.0, 2.5), "blocks": DensityTimeFit(1.0, 0.0, 1.2)}}


def layer_under(mask: Tensor, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(*mask.shape[::-1])
    with torch.no_grad():
        layer.weight.mul_(mask)
    use_sparse_product(layer, lines(dtype))
    SPARSE_PRODUCT.of(layer).follow(mask, layer.weight)
    return layer


def block_mask(density: float) -> Tensor:
    grid = torch.rand(4, 6, generator=torch.Generator().manual_seed(2)) < density
    return grid.repeat_interleave(16, 0).repeat_interleave(16, 1)


def test_block_masks_use_block_products() -> None:
    mask = block_mask(0.3)
    product = SPARSE_PRODUCT.of(layer_under(mask))
    assert isinstance(product.patterns[torch.float32], BlockSparseMatrix) and product.summary.startswith("blocks: ")
    scattered = torch.rand(64, 96, generator=torch.Generator().manual_seed(3)) < 0.3
    product = SPARSE_PRODUCT.of(layer_under(scattered))
    assert isinstance(product.patterns[torch.float32], CsrMatrix) and product.summary.startswith("csr: ")


def test_only_moved_masks_are_read_again() -> None:
    mask = block_mask(0.3)
    layer = layer_under(mask)
    before = SPARSE_PRODUCT.of(layer).patterns[torch.float32]
    SPARSE_PRODUCT.of(layer).follow(mask, layer.weight)
    assert SPARSE_PRODUCT.of(layer).patterns[torch.float32] is before
    mask[16:32] = False
    with torch.no_grad():
        layer.weight.mul_(mask)
    SPARSE_PRODUCT.of(layer).follow(mask, layer.weight)
    x = torch.randn(3, 96)
    assert SPARSE_PRODUCT.of(layer).patterns[torch.float32] is not before
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_weight_outside_its_mask_stays_dense() -> None:
    mask = block_mask(0.3)
    layer = layer_under(mask)
    mask[16:32] = False
    SPARSE_PRODUCT.of(layer).follow(mask, layer.weight)
    assert not SPARSE_PRODUCT.of(layer).patterns and "nonzero outside" in SPARSE_PRODUCT.of(layer).summary
    with torch.no_grad():
        layer.weight.mul_(mask)
    SPARSE_PRODUCT.of(layer).follow(mask, layer.weight)
    assert SPARSE_PRODUCT.of(layer).patterns
    SPARSE_PRODUCT.of(layer).follow(None, layer.weight)
    assert not SPARSE_PRODUCT.of(layer).patterns


def test_unmeasured_dtypes_are_dense() -> None:
    layer, x = layer_under(block_mask(0.2), torch.bfloat16), torch.randn(5, 96)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    with torch.autocast("cpu", torch.bfloat16):
        found, dense = layer(x), nn.functional.linear(x, layer.weight, layer.bias)
    assert found.dtype is torch.bfloat16 and not torch.equal(found, dense)
    torch.testing.assert_close(found, dense, rtol=2e-2, atol=2e-2)


def test_each_dtype_has_its_own_choice() -> None:
    mask = block_mask(0.3)
    layer = nn.Linear(96, 64)
    with torch.no_grad():
        layer.weight.mul_(mask)
    slow = {torch.bfloat16: {"csr": DensityTimeFit(1.0, 0.0, 20.0), "blocks": DensityTimeFit(1.0, 0.0, 10.0)}}
    use_sparse_product(layer, lines() | slow)  # type: ignore[arg-type]
    SPARSE_PRODUCT.of(layer).follow(mask, layer.weight)
    one, other = SPARSE_PRODUCT.of(layer).summary.split("; ")
    assert one.startswith("blocks: ") and one.endswith(" in float32")
    assert other.startswith("dense: ") and other.endswith(" in bfloat16")
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            layer(torch.randn(5, 96))
        assert SPARSE_PRODUCT.of(layer).used is not enabled


def test_removal_restores_the_layer() -> None:
    layer = layer_under(block_mask(0.2))
    remove_sparse_product(layer)
    assert vars(layer).keys() == vars(nn.Linear(2, 2)).keys()


def test_notes_list_crossover_densities() -> None:
    run = compose(plain_run(), with_optimizer([technique("sparsity.sparse_products")]), 2)
    run.build_model()
    notes = run.notes["sparsity.sparse_products"]
    assert len(notes) == 4 and all("csr below a density of 0.3" in line and "blocks below" in line for line in notes)
    run = compose(plain_run(), with_optimizer([technique("adapters.lora"), technique("sparsity.sparse_products")]), 2)
    run.build_model()
    notes = run.notes["sparsity.sparse_products"]
    assert any("another technique changes its product" in line for line in notes)


def test_delayed_weights_stay_dense() -> None:
    delayed = technique("memory.offload_optimizer", to="simulated", delay=True, after=1)
    records, _ = run_through(plain_run(), with_optimizer([delayed, *sparse()]), 3)
    assert [record.notes["sparse_products"] for record in records] == [0] * 3


@pytest.mark.parametrize(
    ("where", "words"), [("nowhere", "no layer has a name"), ("(", "where is not a regular expression")]
)
def test_pattern_without_layers_is_refused(where: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SparseProducts(where=where).model(plain_run().build())


@pytest.mark.usefixtures("measured_products")
def test_costs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_breakeven.measure, "__defaults__", (0.0,))  # as short as possible
    run = compose(plain_run(), with_optimizer([technique("sparsity.sparse_products", tokens=64)]), 1)
    state = run.start()
    assert all(line.dense > 0 for product in products(state).values() for line in product.lines[torch.float32].values())


def test_a_missing_gradient_keeps_sparse_products() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), nn.Linear(32, 4))
    pair = model, thrifty.optim.AdamW(model)
    thrifty.apply(pair, "static", density=0.05)
    thrifty.apply(pair, "sparse_products", where="^0")
    for _ in range(3):
        model(torch.ones(8, 32)).square().sum().backward()
        assert [SPARSE_PRODUCT.of(layer).used for _, layer in products_of(model)] == [True, True]
        model[0][1].weight.grad = None
        pair[1].step()
        pair[1].zero_grad()
