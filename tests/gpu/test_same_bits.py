"""A run on a GPU made twice: equal to the last bit where kernels are held to an order."""

import pytest
import torch
from gpu_only import GPU, on_a_gpu
from tiny_runs import VOCABULARY, advance, assert_same, corpus, snapshot, technique

from thrifty.composition.compose import BaseRun, compose
from thrifty.data.text.token_windows import PackedTokens
from thrifty.kernels.deterministic_cumsum import running_sums
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.next_token import NextToken
from thrifty.training.determinism import deterministic_kernels

pytestmark = on_a_gpu


def wide_model() -> torch.nn.Module:
    """Wide and long enough for the attention kernels that sum in the order in which threads come."""
    model = assemble(ModelConfig("llama", 2, 256, 4, 2, 512, VOCABULARY, 512, True))
    initialize(model, 0)
    return model


@pytest.mark.parametrize("names", [[], ["compile"], ["attention.block_sparse"], ["attention.spatten"]], ids=str)
def test_two_runs_are_equal(names: list[str]) -> None:
    plain = BaseRun(wide_model, PackedTokens(corpus(), 512, 8, seed=0), NextToken())
    chosen = [technique("optimizers.adamw"), technique("precision.mixed"), *map(technique, names)]
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        run = compose(plain, chosen, 8, GPU)
        state = run.start()
        with deterministic_kernels(GPU):
            advance(run, state)
        found.append(snapshot(state))
    assert_same(*found)


def test_running_sums_are_those_of_the_processor() -> None:
    numbers = torch.rand(64, 4097)
    torch.testing.assert_close(running_sums(numbers.to(GPU), 1).cpu(), numbers.cumsum(1), rtol=1e-5, atol=1e-5)
