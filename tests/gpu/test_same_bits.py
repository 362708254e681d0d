"""A run on a GPU repeated: bit-identical with deterministic kernels."""

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
    """Return a model wide and long enough for the attention kernels that sum in thread order."""
    model = assemble(ModelConfig("llama", 2, 256, 4, 2, 512, VOCABULARY, 512, True))
    initialize(model, 0)
    return model


@pytest.mark.parametrize("names", [[], ["compile"], ["attention.block_sparse"], ["attention.spatten"]], ids=str)
def test_two_runs_are_bit_identical(names: list[str]) -> None:
    plain = BaseRun(wide_model, PackedTokens(corpus(), 512, 8, seed=0), NextToken())
    chosen = [technique("optimizers.adamw"), technique("precision.mixed"), *map(technique, names)]
    snapshots = []
    for _ in range(2):
        torch._dynamo.reset()
        run = compose(plain, chosen, 8, GPU)
        state = run.start()
        with deterministic_kernels(GPU):
            advance(run, state)
        snapshots.append(snapshot(state))
    assert_same(*snapshots)


def test_running_sums_equal_cpu() -> None:
    numbers = torch.rand(64, 4097)
    torch.testing.assert_close(running_sums(numbers.to(GPU), 1).cpu(), numbers.cumsum(1), rtol=1e-5, atol=1e-5)
