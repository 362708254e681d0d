"""Where sparsity starts to save time on this machine: the densities below which a layer's products win sparse."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from thrifty.kernels.sparse.csr_matrix import LANES
from thrifty.kernels.sparse.sparse_breakeven import BreakevenCase, DensityTimeFit, forms_of

DENSITIES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.005)


@dataclass(frozen=True)
class BreakevenRow:
    """One form of products of one layer: how its time goes with density."""

    case: BreakevenCase
    line: DensityTimeFit

    @property
    def crossover(self) -> float:
        """The density below which it takes less time than dense products; 0 where it never does."""
        return self.line.crossover

    def __str__(self) -> str:
        times = ", ".join(f"{self.line.ratio(density):.2f} at {density:g}" for density in DENSITIES)
        kept = "single weights (csr)" if self.case.form == "csr" else f"blocks of {LANES}"
        shape = f"{self.case.outputs} x {self.case.inputs}, {self.case.dtype}"
        return f"{shape}, {kept}: below a density of {self.crossover:.2f}; of the dense time {times}"


def crossover_table(
    shapes: Iterable[Sequence[int]], tokens: int = 2048, dtypes: Sequence[str] = ("float32",)
) -> Iterator[BreakevenRow]:
    """Rows for layers of these shapes (outputs, inputs), as kept by this machine or measured now, which takes about a
    second each. These are the times by which `sparsity.sparse_products` chooses."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for outputs, inputs in shapes:
        for dtype in dtypes:
            for form in forms_of(outputs, inputs):
                case = BreakevenCase(form, outputs, inputs, tokens, dtype, device)
                yield BreakevenRow(case, case.measured())
