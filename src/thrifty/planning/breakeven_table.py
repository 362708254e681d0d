"""Break-even densities: the density below which sparse matrix products of a layer are faster on this machine."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from thrifty.kernels.sparse.csr_matrix import LANES
from thrifty.kernels.sparse.sparse_breakeven import BreakevenCase, DensityTimeFit, forms_of

DENSITIES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.005)


@dataclass(frozen=True)
class BreakevenRow:
    """Times of a layer's products as a function of density, for one sparse format."""

    case: BreakevenCase
    line: DensityTimeFit

    @property
    def crossover(self) -> float:
        """Density below which sparse products are faster than dense products; 0 if dense products are always
        faster."""
        return self.line.crossover

    def __str__(self) -> str:
        times = ", ".join(f"{self.line.ratio(density):.2f} at {density:g}" for density in DENSITIES)
        form = "single weights (csr)" if self.case.form == "csr" else f"blocks of {LANES}"
        shape = f"{self.case.outputs} x {self.case.inputs}, {self.case.dtype}"
        return f"{shape}, {form}: faster below a density of {self.crossover:.2f}; time relative to dense: {times}"


def crossover_table(
    shapes: Iterable[Sequence[int]], tokens: int = 2048, dtypes: Sequence[str] = ("float32",)
) -> Iterator[BreakevenRow]:
    """Yield one row per layer shape (outputs, inputs), number format and sparse format.

    Times are cached for this machine. A missing time is measured in about a second. `sparsity.sparse_products` uses the
    same times to choose a format.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for outputs, inputs in shapes:
        for dtype in dtypes:
            for form in forms_of(outputs, inputs):
                case = BreakevenCase(form, outputs, inputs, tokens, dtype, device)
                yield BreakevenRow(case, case.measured())
