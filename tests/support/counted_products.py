"""Costs of sparse products by their shapes alone, so that tests on tiny models choose them on every machine."""

import pytest

from thrifty.kernels.sparse.csr_matrix import LANES
from thrifty.kernels.sparse.sparse_breakeven import BreakevenCase, DensityTimeFit
from thrifty.techniques.sparsity import sparse_products

MEASURED = BreakevenCase.measured


def counted(case: BreakevenCase) -> DensityTimeFit:
    """A pass over inputs and results, and the kept numbers: about what a processor with vectors of 512 bits showed."""
    passes = LANES * (1 / case.inputs + 1 / case.outputs) / 4
    return DensityTimeFit(1.0, min(passes, 0.2), {"csr": 2.5, "blocks": 1.2}[case.form])


def count_products(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BreakevenCase, "measured", counted)
    patch.setattr(sparse_products, "has_fast_bfloat16", lambda: True)
