"""Features of the CPU, as the libraries of torch may use them."""

import os

import pytest
import torch

from thrifty.machine.cpu_features import has_fast_bfloat16


@pytest.mark.parametrize(("limit", "is_fast"), [("AVX2", False), ("avx512_core", False), ("ALL", True), ("", True)])
def test_limited_instructions_have_no_bfloat16_units(
    limit: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setitem(os.environ, "ONEDNN_MAX_CPU_ISA", limit)
    assert has_fast_bfloat16("cpu") is is_fast
