"""Tensor parallelism on two and four real ranks: values, random masks and checkpoints equal to one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensor_work as work
import torch
from parallel_work import alone
from rank_processes import on_ranks
from table_samples import sample_of
from technique_runs import RUNS
from tensor_work import GROWING, LAMB, MODELS, Run, loss_problem, loss_values, model, trained
from torch import nn
from worker_results import computed_once, shared_folder

from thrifty import techniques
from thrifty.kernels.chunked_cross_entropy import linear_cross_entropy_reference

DIVIDING = ("parallelism.pipeline", "parallelism.replicate", "parallelism.shard", "parallelism.tensor")
OTHERS = sample_of((name for name in techniques.names() if name not in (*DIVIDING, *RUNS)), 4)
REFUSED = {
    "adapters.bias_only": "more than a weight and a bias",
    "adapters.intrinsic_dimension": "the projection needs all weights on one device",
    "adapters.lora": "computes with more than its weight",
    "adapters.prefix_tuning": "the plan has no style for it",
    "attention.dota": "a detector reads the input of all heads",
    "attention.spatten": "importance sums over all heads",
    "attention.vitcod": "each head has a mask",
    "initializations.fixup": "more than a weight and a bias",
    "memory.activation_budget": "one rank cannot recompute a collective operation",
    "memory.optimal_recompute": "layers compute on several",
    "precision.float8": "computes with more than its weight",
    "sparsity.dynamic_heads": "heads are compared with each other",
    "sparsity.early_bird": "a ticket covers whole layers",
    "sparsity.n_of_m": "computes with more than its weight",
    "sparsity.grasp": "the sums over ranks inside a layer have no second derivative",
}
LOOSE = {
    "memory.compress_activations": 3e-2,
    "optimizers.soap": 3e-3,
    "precision.bfloat16_weights": 3e-3,
    "precision.mixed": 3e-3,
    "precision.optimizer_state": 1e-3,
}
"""Techniques that amplify the last bit of a sum, or round the parts of a tensor separately."""


@pytest.fixture(scope="module")
def folder() -> Path:
    (path := shared_folder() / "tensor-checkpoints").mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="module")
def of_one(folder: Path) -> dict[str, str]:
    return computed_once("tensor, one", lambda: work.written(folder, "of one", ()))


@pytest.fixture(scope="module")
def two(folder: Path, of_one: dict[str, str]) -> list[dict[str, Any]]:
    return computed_once("tensor, two", lambda: on_ranks(2, work.all_on_two, folder, OTHERS))


@pytest.fixture(scope="module")
def four(folder: Path, two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return computed_once("tensor, four", lambda: on_ranks(4, work.all_on_four, folder))


def assert_same_run(found: list[Run], alone: Run) -> None:
    """Check equality with one process to 1e-10, and between ranks; records are in float32."""
    for run in found:
        assert run.losses == pytest.approx(alone.losses, rel=1e-7)
        assert run.norms == pytest.approx(alone.norms, rel=1e-6)
        assert list(run.tensors) == list(alone.tensors)
        for name, value in alone.tensors.items():
            np.testing.assert_allclose(run.tensors[name], value, rtol=0, atol=1e-10, err_msg=name)
            np.testing.assert_array_equal(run.tensors[name], found[0].tensors[name], err_msg=name)


@pytest.mark.parametrize("name", work.TRAINED)
def test_two_ranks_equal_one_process_on_every_model(two: list[dict[str, Any]], name: str) -> None:
    build, _ = MODELS[name]
    assert_same_run([rank["models"][name] for rank in two], trained(build, (), 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "build", "others", "steps"),
    [
        ("gpt", lambda: model("gpt"), LAMB, work.STEPS),
        ("gpt x shard", lambda: model("gpt"), LAMB, work.STEPS),
        ("llama x replicate", lambda: model("llama", tied=False, kv_heads=2), LAMB, work.STEPS),
        ("llama x shard", lambda: model("llama", tied=False, kv_heads=2), [], work.STEPS),
        ("growing x replicate", lambda: model("gpt"), GROWING, 6),
        ("growing x shard", lambda: model("gpt"), GROWING, 6),
    ],
)
def test_four_ranks_equal_one_process(
    four: list[dict[str, Any]], name: str, build: Callable[[], nn.Module], others: Any, steps: int
) -> None:
    assert_same_run([rank["runs"][name] for rank in four], trained(build, others, steps))


@pytest.mark.parametrize("style", work.FAMILIES)
def test_encoders_and_decoders_are_exact(two: list[dict[str, Any]], style: str) -> None:
    made, inputs = work.family(style)
    expected = work.gradients(made, *inputs)
    for rank in two:
        for along_tokens in (False, True):
            found = rank["families"][style, along_tokens]
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("ranks", ["two", pytest.param("four", marks=pytest.mark.slow)])
def test_vocabulary_parallel_loss_is_exact(ranks: str, request: pytest.FixtureRequest) -> None:
    hidden, weight, bias, targets, expected = loss_problem(torch.float64)
    for index, factor in enumerate((0.0, 0.1)):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        losses, lse = linear_cross_entropy_reference(leaves[0], leaves[1], targets, bias=leaves[2])
        ((losses * expected).sum() * 3 + factor * lse.square().sum()).backward()
        wanted = [losses, lse, *(leaf.grad for leaf in leaves), torch.from_numpy(loss_values(factor, False)[0][-1])]
        for rank in request.getfixturevalue(ranks):
            found, widths = rank["losses"][index]
            for value, right in zip(found, wanted, strict=True):
                assert right is not None
                np.testing.assert_allclose(value, right.detach().numpy(), rtol=0, atol=1e-12)
            assert len(weight) not in widths
        assert len(weight) in loss_values(factor, False)[1]


def assert_share(mask: np.ndarray, share: float) -> None:
    """Check a fraction within four standard deviations of independent samples."""
    assert np.mean(mask) == pytest.approx(share, abs=4 * (share * (1 - share) / mask.size) ** 0.5)


def test_dropout_masks_follow_the_division(two: list[dict[str, Any]]) -> None:
    for along_tokens in (False, True):
        first, second = (rank["dropped"][along_tokens, False][0] for rank in two)
        for name, masks in first.items():
            (mine,), (theirs,) = masks, second[name]
            is_whole = "norm" in name and not along_tokens
            assert np.array_equal(mine, theirs) == is_whole, name
            if not is_whole:  # independent masks: both ranks drop an element half as often
                assert_share(mine & theirs, 0.25)
            assert_share(mine, 0.5)
        for name, (mask,) in first.items():
            assert ".1." in name or not np.array_equal(mask, first[name.replace(".0.", ".1.")][0])


def test_recomputed_dropout_masks_are_equal(two: list[dict[str, Any]]) -> None:
    for rank in two:
        for along_tokens in (False, True):
            (masks, once), (masks_again, again) = (rank["dropped"][along_tokens, each] for each in (False, True))
            for name, ((mask,), both) in ((name, (masks[name], masks_again[name])) for name in masks):
                assert len(both) == 2 and all(np.array_equal(mask, each) for each in both), name
            assert once.losses == again.losses
            assert all(np.array_equal(value, again.tensors[name]) for name, value in once.tensors.items())
    for name, value in two[0]["dropped"][False, False][1].tensors.items():
        np.testing.assert_array_equal(value, two[1]["dropped"][False, False][1].tensors[name], err_msg=name)


def test_ranks_hold_their_part_of_split_layers(two: list[dict[str, Any]]) -> None:
    table, head, attention, mlp = 257 * 32, 257 * 32, 4 * 32 * 32 + 3 * 32, 2 * 32 * 64 + 64
    positions, norms, row_biases = 24 * 32, 5 * 2 * 32, 2 * 2 * 32
    assert (table + head + 2 * (attention + mlp) + positions + norms + row_biases) == sum(
        parameter.numel() for parameter in model("gpt", tied=False).parameters()
    )
    for place, rank in enumerate(two):
        ends = 2 * 32 * (129 if place == 0 else 128)
        held = 8 * (ends + attention + mlp + positions + norms + row_biases)
        for along_tokens in (False, True):
            assert (rank["held"][along_tokens].parameters, rank["held"][along_tokens].optimizer) == (held, 2 * held)


def test_each_block_has_four_collective_sums(two: list[dict[str, Any]]) -> None:
    blocks, chunks = 2, 1
    for rank in two:
        sent = rank["held"][False].sent  # plus the embedding, and the gradient of the loss
        assert sent == {"all_reduce": 4 * blocks + 2, "all_gather_into_tensor": chunks}
        sent = rank["held"][True].sent  # plus the split and the gather of hidden states
        assert sent["reduce_scatter_tensor"] == 4 * blocks
        assert sent["all_gather_into_tensor"] == 4 * blocks + 2 + chunks


def test_memory_and_traffic_are_predicted(two: list[dict[str, Any]]) -> None:
    blocks, hidden = 4, 4 * 16 * 32 * 4
    for rank in two:
        footprint, held = rank["predicted"]
        assert footprint.parameters == pytest.approx(held, rel=0.02)
        assert footprint.optimizer == 2 * footprint.parameters == 2 * footprint.gradients
        assert footprint.traffic == pytest.approx((4 * blocks + 2) * hidden)  # 2 (1 - 1/2) times each


def test_merged_model_is_the_plain_one(two: list[dict[str, Any]]) -> None:
    assert [rank["finished"] for rank in two] == [(True, True)] * 2


def test_diverging_whole_parameters_raise_on_every_rank(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert "parallelism.tensor: norm.weight differs between ranks" in rank["noticed"]


@pytest.mark.slow
def test_checkpoints_are_independent_of_the_split(
    folder: Path, of_one: dict[str, str], two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    written = two[0]["checkpoints"][0]
    for rank in two:
        assert rank["checkpoints"] == (written, of_one)
    for rank in four:
        assert rank["checkpoints"] == [written] * 3
    for name in ("of two", "of four", "of two by two"):
        assert work.read(folder, name, ()) == written


@pytest.mark.slow
def test_indivisible_models_are_refused(four: list[dict[str, Any]]) -> None:
    for heads, no_plan, no_style, no_pair, tokens in (rank["refusals"] for rank in four):
        assert (
            "'blocks.0.attention.qkv': 2 heads cannot be divided equally among 4 ranks" in heads and "tensor=2" in heads
        )
        assert "no tensor-parallel plan is known for GPT2LMHeadModel" in no_plan and "plan = [" in no_plan
        assert "the styles are column, row, summed, whole" in no_style
        assert "do not fit the inputs" in no_pair
        assert "7 tokens cannot be divided equally among 4 ranks" in tokens


@pytest.mark.parametrize("name", OTHERS)
def test_other_techniques_combine_or_are_refused(two: list[dict[str, Any]], name: str) -> None:
    first, second = (rank["each"][name] for rank in two)
    if name in REFUSED:
        assert REFUSED[name] in first and first == second
        return
    single, loose = alone(name), LOOSE.get(name, 1e-5)
    assert (first.losses, first.norms) == (second.losses, second.norms)
    assert first.losses == pytest.approx(single.losses, rel=loose)
    assert first.norms == pytest.approx(single.norms, rel=30 * loose)
    assert first.evaluated == second.evaluated == pytest.approx(single.evaluated, rel=loose)
    assert list(first.tensors) == list(single.tensors)
