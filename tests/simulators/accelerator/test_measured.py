"""Measured times are for the trace's attention. Long measurements are skipped."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import sparse

from thrifty.simulators.accelerator import measured_attention
from thrifty.simulators.accelerator.attention_trace import AttentionTrace, layer_of
from thrifty.simulators.accelerator.measured_attention import all_pairs_seconds, kept_pairs_seconds
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace

TRACE = synthetic_trace("uniform", 0.3, layers=2, heads=2, lengths=[24, 17], width=8)


def test_seconds_of_all_pairs_and_kept_pairs() -> None:
    assert all_pairs_seconds(TRACE) > 0 and kept_pairs_seconds(TRACE) > 0


def test_sparse_attention_equals_torch_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_attention, "AT_A_TIME", 10)
    kept = TRACE.layers[0].kept()[1].copy()
    kept[5] = False
    q, k, v = np.random.default_rng(0).standard_normal((3, 24, 8))
    result = torch.from_numpy(measured_attention.sparse_attention(q, k, v, sparse.csr_array(kept)))
    tensors = (torch.from_numpy(x)[None] for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*tensors, torch.from_numpy(kept))[0].nan_to_num(0.0)
    torch.testing.assert_close(result, expected)


def test_work_above_the_limit_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_attention, "LIMIT", 1000)
    assert all_pairs_seconds(TRACE) is None and kept_pairs_seconds(TRACE) is not None
    monkeypatch.setattr(measured_attention, "SPARSE_LIMIT", 1000)
    assert kept_pairs_seconds(TRACE) is None


def test_causal_masks_run_as_is_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    printed_json = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *x, is_causal: printed_json.append(is_causal))
    mask = np.tril(np.ones((9, 9), dtype=bool))[None, None].repeat(2, 0)
    causal = layer_of("causal", mask=mask, lengths=[9, 5], width=8)
    all_pairs_seconds(AttentionTrace("both", (causal, layer_of("some", mask=mask | ~mask, width=8))), times=1)
    assert printed_json[:2] == [True, False]
