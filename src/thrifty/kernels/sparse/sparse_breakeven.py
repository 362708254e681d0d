"""Break-even density of a linear layer: below it, the three matmuls are faster sparse than dense.

The time of sparse matmuls is linear in density: a fixed cost for inputs and results, and a cost per kept weight. Two
measured densities determine the line. Its intersection with the time of dense matmuls is the crossover. The measurement
is stored for the machine, so that a resumed run makes the same choice.
"""

import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from thrifty.core.cache_dir import cache_folder
from thrifty.kernels.sparse import compiled_products
from thrifty.kernels.sparse.block_sparse_matrix import BlockSparseMatrix
from thrifty.kernels.sparse.csr_matrix import LANES, CsrMatrix
from thrifty.kernels.sparse.sparsity_pattern import SparsityPattern

Form = Literal["csr", "blocks"]
DENSITIES = (0.02, 0.2)
"""Densities at which sparse matmuls are timed, to fit `DensityTimeFit`."""
FLOPS = 2e10
"""Maximum FLOPs of the timed dense matmuls, for a fraction of a second."""


@dataclass(frozen=True)
class DensityTimeFit:
    """Seconds of a layer's three matmuls (one forward, two backward). Sparse matmuls take `fixed + rate · density`."""

    dense: float
    fixed: float
    rate: float

    def ratio(self, density: float) -> float:
        """Return the time of sparse matmuls divided by the time of dense matmuls."""
        return (self.fixed + self.rate * density) / self.dense

    @property
    def crossover(self) -> float:
        """Density below which sparse matmuls are faster; 0 if they never are."""
        return min(max((self.dense - self.fixed) / max(self.rate, 1e-30), 0.0), 1.0)


@dataclass(frozen=True)
class BreakevenCase:
    """Sizes, storage form and dtype of a linear layer. The matmuls of a case share one measured line on a machine."""

    form: Form
    outputs: int
    inputs: int
    tokens: int
    dtype: str = "float32"
    """Dtype of dense matmuls. Sparse matmuls convert to float32."""
    device: str = "cpu"

    def measured(self) -> DensityTimeFit:
        """Return the stored line of this machine. If none is stored, measure it and store the result."""
        return _stored(self, torch.get_num_threads())


def forms_of(outputs: int, inputs: int) -> tuple[Form, ...]:
    """Return the possible storage forms of a weight with this shape."""
    return ("csr", "blocks") if outputs % LANES == 0 and inputs % LANES == 0 else ("csr",)


def best_form(lines: dict[Form, DensityTimeFit], densities: dict[Form, float]) -> tuple[Form, float]:
    """Return the form with the fastest matmuls, and its time divided by the time of dense matmuls."""
    return min(((form, lines[form].ratio(density)) for form, density in densities.items()), key=lambda pair: pair[1])


@cache
def _stored(case: BreakevenCase, threads: int) -> DensityTimeFit:
    path = _path(case, threads)
    try:
        return _read(path)
    except (OSError, ValueError, TypeError, LookupError):  # missing or damaged
        return _store(path, case, measure(case))


def _read(path: Path) -> DensityTimeFit:
    stored = json.loads(path.read_text(encoding="utf-8"))
    line = DensityTimeFit(**{name: float(stored[name]) for name in ("dense", "fixed", "rate")})
    if not (line.dense > 0 and math.isfinite(line.dense + line.fixed + line.rate)):
        raise ValueError(path)
    return line


def _path(case: BreakevenCase, threads: int) -> Path:
    here = {**asdict(case), "threads": threads, **fingerprint(case.device)}
    name = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / "sparse-products" / f"{name}.json"


def fingerprint(device: str) -> dict[str, str | bool]:
    """Return the properties that make times comparable: CPU or GPU, torch version, and whether matmuls are compiled."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    processor = model or platform.processor() or platform.machine()
    name = torch.cuda.get_device_name() if device == "cuda" else processor
    return {"device_name": name, "torch": torch.__version__, "compiled": compiled_products.PRODUCTS.is_there()}


def _store(path: Path, case: BreakevenCase, line: DensityTimeFit) -> DensityTimeFit:
    """Store a measurement and return the stored measurement. If several ranks of a machine measure at once, all use the
    first stored result.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(asdict(line) | {"case": asdict(case)}, file)
        try:
            os.link(file.name, path)
        except FileExistsError:
            try:
                return _read(path)
            except (ValueError, TypeError, LookupError):  # damaged
                os.replace(file.name, path)
        finally:
            Path(file.name).unlink(missing_ok=True)
    except OSError:  # no space or no permission: the next process measures again
        pass
    return line


def measure(case: BreakevenCase, seconds: float = 0.5) -> DensityTimeFit:
    """Time dense and sparse matmuls on random values, in turn, for at least `seconds`. The best of at least three
    rounds counts.
    """
    dtype = getattr(torch, case.dtype)
    most = max(int(FLOPS / (6 * case.outputs * case.inputs)), 4 * LANES)
    tokens = min(case.tokens, most)
    generator = torch.Generator(case.device).manual_seed(0)
    with _disable_current_modes(), unset_fake_temporarily(), torch.no_grad():
        shapes = (tokens, case.inputs), (tokens, case.outputs), (case.outputs, case.inputs)
        x, upstream, weight = (
            torch.randn(shape, generator=generator, device=case.device).to(dtype) for shape in shapes
        )
        patterns = [_random_pattern(case, density, generator) for density in DENSITIES]
        products = [lambda: _dense(x, upstream, weight)]
        products += [lambda pattern=pattern: _sparse(x, upstream, weight.float(), pattern) for pattern in patterns]
        dense, low, high = _best(products, seconds)
    sparser, denser = (pattern.density for pattern in patterns)
    span = denser - sparser
    rate = max(high - low, 0.0) / span if span else high / max(denser, 1e-30)
    return DensityTimeFit(dense, max(low - rate * sparser, 0.0), rate)


def _random_pattern(case: BreakevenCase, density: float, generator: torch.Generator) -> SparsityPattern:
    block = LANES if case.form == "blocks" else 1
    grid = torch.rand(case.outputs // block, case.inputs // block, generator=generator, device=case.device) < density
    mask = grid.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return BlockSparseMatrix.of(mask) if case.form == "blocks" else CsrMatrix.of(mask)


def _dense(x: Tensor, upstream: Tensor, weight: Tensor) -> None:
    F.linear(x, weight)
    upstream @ weight
    upstream.T @ x


def _sparse(x: Tensor, upstream: Tensor, weight: Tensor, pattern: SparsityPattern) -> None:
    """Run the matmuls of `sparse_linear`, forward and backward."""
    dtype = x.dtype
    wide, wide_upstream = x.float(), upstream.float()
    pattern.spmm(wide, pattern.pick(weight)).to(dtype)
    pattern.spmm_turned(wide_upstream, pattern.turn(pattern.pick(weight))).to(dtype)
    pattern.place(pattern.sddmm(wide_upstream, wide))


def _best(candidates: list[Callable[[], None]], seconds: float) -> list[float]:
    """Return the minimum time of each candidate over alternating rounds after a warm-up."""
    times: list[list[float]] = [[] for _ in candidates]
    while len(times[0]) < 4 or sum(map(sum, times)) < seconds:
        for candidate, own in zip(candidates, times, strict=True):
            _synchronize()
            began = time.perf_counter()
            candidate()
            _synchronize()
            own.append(time.perf_counter() - began)
    return [min(own[1:]) for own in times]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
