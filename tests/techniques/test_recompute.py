"""Periodic recomputation: bit-identical runs and memory of every schedule."""

from typing import Any

import pytest
import torch
from rank_processes import on_ranks
from recompute_work import equal, gradients, live_bytes, model_of_kind, same_on_ranks, same_run, trained
from routed_model import RoutedModel
from stacked_models import KINDS
from tiny_runs import advance, plain_run, technique, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun, compose
from thrifty.composition.explain import explain
from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.footprint import Footprint
from thrifty.memory.block_recompute import BlockChain
from thrifty.memory.planner.chain_schedule import periodic_schedule
from thrifty.memory.recompute_schedule import RecomputeSchedule
from thrifty.techniques.memory.recompute import Recompute

SETTINGS: list[dict[str, Any]] = [
    {"every": 1}, {"every": 2}, {"schedule": "sqrt"}, {"schedule": "selective"}, {"schedule": "selective", "every": 2},
]  # fmt: skip
BESIDE = {
    "accumulate": {"large_batch.gradient_accumulation": {"micro_batches": 2}},
    "mixed precision": {"precision.mixed": {}},
    "aot_eager": {"compile": {"backend": "aot_eager"}},
    "inductor": {"compile": {"backend": "inductor"}},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("beside", [*BESIDE, "nothing"])
def test_every_schedule_is_bit_identical(beside: str) -> None:
    others = [technique(name, **given) for name, given in BESIDE.get(beside, {}).items()]
    plain = trained(*others)
    for given in SETTINGS:
        assert same_run(trained(*others, Recompute(**given)), plain), given


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["parallelism.replicate", "parallelism.shard"])
def test_two_ranks_are_bit_identical(strategy: str) -> None:
    settings = [("memory.recompute", given) for given in SETTINGS]
    assert on_ranks(2, same_on_ranks, strategy, settings) == [[True] * len(settings)] * 2


@pytest.mark.sampled(12)
@pytest.mark.parametrize("schedule", ["sqrt", "selective"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_exact_on_any_architecture(kind: str, schedule: Any) -> None:
    assert equal(gradients(Recompute(schedule=schedule).model(model_of_kind(kind)), kind),
                 gradients(model_of_kind(kind), kind))  # fmt: skip


@pytest.mark.parametrize("schedule", ["every", "sqrt"])
def test_rerouted_mixture_of_experts_is_refused(schedule: Any) -> None:
    plain = plain_run(batch=32)
    techniques = [Recompute(schedule=schedule), technique("memory.compress_activations", bits=2)]
    run = compose(BaseRun(RoutedModel, plain.source, plain.objective), with_optimizer(techniques), 2)
    with pytest.raises(IntegrityError, match=r"saved .*(other|different)") as refused:
        advance(run, run.start())
    assert "--without memory.compress_activations" in refused.value.fix


class Deep(nn.Module):
    """Sixteen blocks of a linear layer, a GELU and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("segments", "megabytes"), [(1, 25.2), (2, 13.1), (4, 7.9), (8, 6.8), (16, 9.4)])
def test_segments_save_one_input_each(segments: int, megabytes: float) -> None:
    """With 512 rows a block saves 3 activations of half a megabyte; numbers are those of checkpoint_sequential."""
    model = Deep()
    BlockChain(list(model.blocks), RecomputeSchedule.of(periodic_schedule(16, 16 // segments)))
    activation = 512 * 256 * 4
    after_forward, peak = live_bytes(model, torch.randn(512, 256))
    assert (activation + after_forward) / 1e6 == pytest.approx(megabytes, abs=0.05)  # the input is saved too
    assert peak <= (segments + 3 * 16 // segments + 4) * activation


def test_segment_length_is_the_square_root_of_all_blocks() -> None:
    model = Recompute(schedule="sqrt").model(Deep())
    after_forward, _ = live_bytes(model, torch.randn(512, 256))
    assert after_forward / 1e6 == pytest.approx(7.9 - 0.5, abs=0.1)  # four segments of four, without their first input


@pytest.mark.slow
def test_footprint_counts_saved_and_recomputed_tensors() -> None:
    def footprint(**given: Any) -> Footprint:
        chosen = with_optimizer([Recompute(**given)] if given else [])
        return explain(compose(plain_run(batch=16, depth=9, style="gpt"), chosen, 2)).footprint

    plain, sqrt, selective, every = (footprint(), *(footprint(**SETTINGS[index]) for index in (2, 3, 0)))
    assert selective.flops == plain.flops and selective.activations < 0.8 * plain.activations
    assert every.activations < sqrt.activations < 0.5 * plain.activations
    assert (
        plain.flops < sqrt.flops < every.flops < 4 / 3 * plain.flops
    )  # the forward pass is a third of each block's work


def test_every_with_sqrt_is_refused() -> None:
    with pytest.raises(UsageError, match="every is 2, but the schedule 'sqrt'"):
        Recompute(every=2, schedule="sqrt")
