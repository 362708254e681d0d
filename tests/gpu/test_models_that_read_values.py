"""A model whose forward pass reads values, on a GPU: its memory is measured on a real batch and predicts training."""

import pytest
import torch
from gpu_only import GPU, on_a_gpu
from routed_model import build
from tiny_runs import advance, corpus, technique, with_optimizer

from thrifty.composition.compose import BaseRun, compose
from thrifty.composition.explain import explain
from thrifty.data.text.token_windows import PackedTokens
from thrifty.objectives.next_token import NextToken

pytestmark = on_a_gpu


@pytest.mark.parametrize("names", [(), ("precision.mixed",), ("memory.recompute",), ("memory.offload_optimizer",)])
def test_peak_is_predicted_from_a_real_batch(names: tuple[str, ...]) -> None:
    plain = BaseRun(build, PackedTokens(corpus(), 64, 512, seed=0), NextToken())
    run = compose(plain, with_optimizer([technique(name) for name in names]), 3, GPU)
    before = torch.cuda.memory_allocated()
    explanation = explain(run)
    assert any("counted on a real batch" in line for line in explanation.decisions)
    assert torch.cuda.memory_allocated() - before < 2**24  # libraries may keep a workspace
    state = run.start()
    torch.cuda.reset_peak_memory_stats()
    advance(run, state)
    measured = torch.cuda.max_memory_allocated() - before
    assert explanation.footprint.memory == pytest.approx(measured, rel=0.1)
