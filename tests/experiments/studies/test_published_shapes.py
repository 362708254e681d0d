"""Mathematics of the studies, compared with independent references, and the smallest cell of each study."""

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from pair_runs import write_crosses
from torch import Tensor, nn

from thrifty.core.errors import UsageError
from thrifty.experiments import studies
from thrifty.experiments.studies import depth_preconditioner, isoflop, norm_free, train_large, width_lazy
from thrifty.experiments.study import Numbers
from thrifty.experiments.study_summary import cells_of
from thrifty.experiments.tasks.language_task import llama, parameters_of, source_text, steps_for, train_on_bytes
from thrifty.recipes import RECIPES, load_recipe
from thrifty.techniques.optimizers.adamw import AdamW

SMALL = {
    "a3_babi": ["stories=64", "tested=16", "steps=3", "width=8", "batch=8"],
    "attention_filters": ["steps=2", "depth=1", "width=32", "batch=2", "length=16"],
    "batch_scaling": ["batches=[16, 650]", "epochs=1", "hidden=[8]"],
    "chinchilla_refit": ["per_budget=2", 'starts=["coarse"]'],
    "compressed_activations": ["depth=2", "width=16", "length=16", "batch=2", "steps=3"],
    "data_diet": ["networks=2", "scored_after=2", "width=16", "steps=3", "batch=8"],
    "depth_preconditioner": ["examples=40", "features=4", "most_steps=3"],
    "early_bird": ["depth=1", "width=16", "length=16", "batch=2", "steps=8"],
    "flip": ["budgets=[2]", "depth=1", "width=32", "side=16", "patch=4", "batch=16"],
    "hard_or_easy": ["digits=[40]", "clothes=[]", "networks=1", "scored_after=2", "width=16", "steps=3", "batch=8"],
    "importance_sampling": ["full_steps=8", "depth=1", "width=16", "batch=4", "length=16", "windows=64"],
    "isoflop": ["budgets=[2e8, 4e8]", "length=16", "batch=2"],
    "lamb_batch": ["batches=[2, 4]", "sequences=8", "depth=1", "width=16", "length=16"],
    "layer_drop": ["budgets=[3]", "depth=2", "width=16", "length=16", "batch=2"],
    "lion_rate": ["depth=1", "width=16", "length=16", "batch=2", "steps=3"],
    "mae": [
        "rates=[0.5]",
        "steps=2",
        "tuning=2",
        "longer=2",
        "labels=[10]",
        "depth=1",
        "width=32",
        "batch=8",
        "tested=50",
        "side=32",
        "paced=1",
    ],
    "lottery_ticket": ["rounds=[1]", "width=8", "steps=3", "batch=8"],
    "masked_tokens": ["steps=[3, 4]", "tuning=2", "depth=2", "width=16", "length=16", "batch=2"],
    "n_of_m": ["depth=1", "width=16", "length=16", "batch=2", "steps=3"],
    "norm_free": ["depth=2", "width=16", "length=16", "batch=2", "steps=3", "warmup=2"],
    "pruning_digits": ["densities=[0.1]", "width=16", "steps=3", "batch=8", "every=1"],
    "resolution": ["budgets=[2, 3]", "data=digits", "depth=1", "width=32", "patch=2", "batch=8", "tested=50"],
    "sparse_vit": ["densities=[0.5]", "steps=3", "depth=1", "width=32", "batch=8", "every=1", "tested=50"],
    "stacking": ["budgets=[3, 6]", "depth=4", "width=16", "length=16", "batch=2"],
    "teacher_perceptron": ["per_dimension=[2, 4]", "width=20"],
    "train_large": ["widths=[8, 16]", "budgets=[1e8]", "depth=1", "length=16", "batch=2"],
    "weight_averaging": ["moments=[2, 4]", "every=1", "depth=1", "width=16", "length=16", "batch=2"],
    "width_lazy": ["widths=[4, 8]", "inputs=sphere", "examples=20", "most_steps=3"],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", studies.names())
def test_every_small_cell_returns_known_quantities(name: str, tmp_path: Path) -> None:
    data = [f"data={write_crosses(tmp_path)}"] if name == "flip" else []
    study = studies.make(name, SMALL[name] + data)
    assert study.name == name
    for label, case in study.cases.items():
        numbers = study.measure(seed=0, **case)
        assert numbers, label
        assert numbers.keys() <= study.quantities.keys(), label
        assert not any(math.isnan(value) for value in numbers.values()), label


@pytest.mark.parametrize("name", studies.names())
def test_every_study_documents_command_and_expectation(name: str) -> None:
    card = studies.find(name).__doc__ or ""
    assert f"Command   thrifty study {name}\n" in card
    assert "Expect    " in card
    study = studies.make(name)
    assert study.expect
    assert study.plots
    assert study.seeds >= 3
    shown = {plot.y for plot in study.plots} | {plot.x for plot in study.plots} - {"case"}
    assert shown <= study.quantities.keys() | {key for case in study.cases.values() for key in case}


def test_names_are_either_recipes_or_studies() -> None:
    assert not set(RECIPES) & set(studies.names())
    with pytest.raises(UsageError, match=r"is a study(.|\n)*thrifty study norm_free"):
        load_recipe("norm_free", "recipe", studies.names())
    with pytest.raises(UsageError, match="did you mean 'norm_free'"):
        load_recipe("norm_fre", "recipe", studies.names())
    with pytest.raises(UsageError, match=r"no setting 'stepz'(.|\n)*'steps'"):
        studies.make("norm_free", ["stepz=3"])
    with pytest.raises(UsageError, match="steps must be a whole number"):
        studies.make("norm_free", ["steps=many"])


# depth_preconditioner


def end_to_end_velocity(end_to_end: Tensor, gradient: Tensor, depth: int) -> Tensor:
    """Return the velocity (out, in) of the product of balanced factors under gradient flow (theorem 1).

    -Σ_j (W Wᵀ)^((depth-j)/depth) · gradient · (Wᵀ W)^((j-1)/depth), j = 1 … depth
    """
    u, s, v = torch.linalg.svd(end_to_end)

    def power(vectors: Tensor, exponent: float) -> Tensor:
        values = torch.zeros(len(vectors), dtype=s.dtype)
        values[: len(s)] = s**2
        return vectors @ (values**exponent).diag() @ vectors.mT

    terms = [power(u, (depth - j) / depth) @ gradient @ power(v.mT, (j - 1) / depth) for j in range(1, depth + 1)]
    return -torch.stack(terms).sum(0)


@given(some.integers(2, 5), some.integers(1, 4), some.integers(1, 5), some.integers(0, 1000))
@settings(max_examples=25)
def test_balanced_factors_follow_theorem_1(depth: int, rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start, gradient = (torch.randn(rows, columns, generator=generator, dtype=torch.float64) for _ in range(2))
    factors = depth_preconditioner.balanced_factors(start, depth)
    assert torch.allclose(product(factors), start)
    for one, next_one in pairwise(factors):
        assert torch.allclose(next_one.mT @ next_one, one @ one.mT)

    rate = 1e-6
    leaves = [factor.requires_grad_() for factor in factors]
    gradients = torch.autograd.grad((product(leaves) * gradient).sum(), leaves)
    moved = product([w.detach() - rate * g for w, g in zip(leaves, gradients, strict=True)]) - start
    expected = end_to_end_velocity(start, gradient, depth)
    assert torch.allclose(moved / rate, expected, rtol=1e-3, atol=1e-3 * float(expected.norm()))


def product(factors: list[Tensor]) -> Tensor:
    result = factors[0]
    for factor in factors[1:]:
        result = factor @ result
    return result


def test_one_output_has_the_closed_form_preconditioner() -> None:
    w, gradient = (torch.randn(1, 6, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in (0, 1))
    for depth in (2, 3, 4):
        along = (gradient @ w.mT) / w.norm() ** 2 * w
        expected = -(w.norm() ** (2 - 2 / depth)) * (gradient + (depth - 1) * along)
        assert torch.allclose(end_to_end_velocity(w, gradient, depth), expected)


def test_unbalanced_factors_do_not_follow_theorem_1() -> None:
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    gradient = torch.eye(3, dtype=torch.float64)
    moves = -(gradient @ one.mT @ one + two @ two.mT @ gradient)
    assert not torch.allclose(moves, end_to_end_velocity(two @ one, gradient, 2), rtol=0.1)


@pytest.mark.parametrize("p", [2, 4])
def test_the_lowest_loss_has_zero_gradient(p: int) -> None:
    x, y = depth_preconditioner.regression(0, 60, 5, 4.0)
    lowest = depth_preconditioner.lowest_loss(x, y, p)
    w = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [w], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = ((x @ w - y).abs() ** p).mean() / p
        value.backward()
        return value

    optimizer.step(loss)
    assert float(loss().detach()) == pytest.approx(lowest, rel=1e-9)


def test_depth_helps_l4_but_not_l2_at_one_seed() -> None:
    study = studies.make("depth_preconditioner")
    cells = {label: study.measure(seed=0, **case) for label, case in study.cases.items()}
    assert cells["p 4, depth 1"]["steps"] > 1.4 * cells["p 4, depth 2"]["steps"]
    assert cells["p 2, depth 1"]["steps"] < 1.1 * cells["p 2, depth 2"]["steps"]


# width_lazy


def test_the_network_and_its_gradient_match_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 5, generator=generator), torch.randn(6, 5, generator=generator)
    output, labels = torch.tensor([1.0, -1, 1, -1, 1, -1]) / math.sqrt(6), torch.ones(7)
    leaf = weight.clone().requires_grad_()
    predicted = torch.relu(x @ leaf.mT) @ output
    ((predicted - labels).square().mean() / 2).backward()
    found, on = width_lazy.forward(x, weight, output)
    assert torch.allclose(found, predicted.detach())
    assert torch.allclose((on * output * (found - labels)[:, None]).mT @ x / 7, leaf.grad)


def test_contradictory_labels_are_never_fitted() -> None:
    case = {"width": 64, "inputs": "sphere", "examples": 20, "rate": 10.0, "goal": 0.025, "most_steps": 300}
    assert width_lazy.measure(seed=0, **case, conflicts=0)["steps"] < 300
    conflict = width_lazy.measure(seed=0, **case, conflicts=4)
    assert math.isinf(conflict["steps"])
    assert conflict["loss"] == pytest.approx(8 / 20 / 2, rel=0.05)  # the best output for contradictory labels is 0


def test_wider_networks_move_less() -> None:
    case = {"inputs": "sphere", "examples": 40, "rate": 10.0, "goal": 0.025, "most_steps": 3000, "conflicts": 0}
    narrow, wide = (width_lazy.measure(seed=0, width=width, **case) for width in (16, 256))
    assert wide["movement"] < 0.5 * narrow["movement"]


# the language models


def test_training_and_held_out_text_are_different_files() -> None:
    training, held_out = (part.tobytes() for part in source_text())
    assert 0.02 < len(held_out) / len(training) < 0.1
    assert held_out[:2000] not in training


def test_a_diverged_run_has_infinite_remaining_losses() -> None:
    trained = train_on_bytes(lambda: llama(1, 16, 16, 0), [AdamW(lr=1e30)], steps=30, seed=0, length=16, batch=2)
    assert len(trained.losses) == 30
    assert math.isinf(trained.losses[-1])
    assert math.isinf(trained.mean_loss(20))


def test_a_step_costs_six_flops_per_parameter_and_token() -> None:
    assert steps_for(6.0 * 1000 * 512 * 7, 1000, 512) == 7
    assert parameters_of(llama(2, 16, 64, 0)) == 10_832  # the tied embedding counts once


# train_large


@given(some.lists(some.integers(1, 5), min_size=1, max_size=4), some.integers(0, 40), some.integers(0, 100))
@settings(max_examples=30)
def test_the_largest_weights_over_all_tensors_are_kept(sizes: list[int], kept: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(size, 3, generator=generator) for size in sizes]
    before = torch.cat([weight.flatten() for weight in weights])
    train_large.keep_largest(weights, kept)
    after = torch.cat([weight.flatten() for weight in weights])
    expected = set(before.abs().argsort(descending=True)[:kept].tolist())
    assert set(after.nonzero().flatten().tolist()) == (expected if kept < len(before) else set(range(len(before))))
    assert torch.equal(after[after != 0], before[after != 0])


def test_only_block_matrices_are_pruned() -> None:
    model = llama(2, 16, 16, 0)
    total = sum(weight.numel() for weight in train_large.block_matrices(model))
    assert total == parameters_of(model) - 256 * 16 - 5 * 16  # the table and five norms


# isoflop


def test_optima_follow_a_known_law() -> None:
    study = studies.make("isoflop")
    tokens_per_parameter, budgets = 30.0, sorted({case["flops"] for case in study.cases.values()})

    def numbers(case: Mapping) -> Numbers:
        parameters = parameters_of(llama(case["depth"], case["width"], 64, 0))
        best = math.sqrt(case["flops"] / 6 / tokens_per_parameter)
        tokens = case["flops"] / 6 / parameters
        return {"parameters": parameters, "tokens": tokens, "loss": 2 + 0.1 * math.log(parameters / best) ** 2}

    measured = {(label, 0): numbers(case) for label, case in study.cases.items()}
    cells = cells_of(study, measured)[0]
    for flops in budgets:
        row = cells[f"optimum at {flops:.1e} FLOP"]
        assert row["optimal_parameters"] == pytest.approx(math.sqrt(flops / 180), rel=1e-3)
    assert cells[isoflop.EXPONENT]["exponent"] == pytest.approx(0.5, abs=1e-3)
    assert all(holds(cells) for holds in study.expect.values())


# norm_free


def build(style: str, norms: bool = True) -> nn.Module:
    return norm_free.build(style, norms, depth=2, width=16, length=16, seed=0)  # type: ignore[arg-type]


def test_variants_differ_in_their_norms_only() -> None:
    post, pre, nothing = build("gpt1"), build("gpt"), build("gpt", norms=False)
    x = 100 * torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0))
    assert post.blocks[0](x).std().item() == pytest.approx(1, abs=0.05)
    assert pre.blocks[0](x).std().item() > 50
    assert torch.equal(pre.blocks[0].attention.qkv.weight, nothing.blocks[0].attention.qkv.weight)
    assert torch.equal(nothing.norm(x), x)


def test_the_unigram_entropy_is_the_byte_entropy() -> None:
    text = source_text()[0]
    shares = np.unique(text, return_counts=True)[1] / len(text)
    assert norm_free.unigram_entropy() == pytest.approx(float(np.sum(shares * np.log(1 / shares))))
    assert 2.5 < norm_free.unigram_entropy() < 4
