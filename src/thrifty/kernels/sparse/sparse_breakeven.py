"""From which density on the three products of a linear layer take less time sparse than dense.

The time of sparse products is a line over density: something for going through inputs and results, and something for
each number that is kept. Two measured densities give the line, and where it meets the time of dense products is the
crossover. What was measured is kept for the machine, so that a run that is resumed chooses alike.
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
"""Where the line is measured."""
FLOPS = 2e10
"""Of the dense products that are timed, at most: a fraction of a second."""


@dataclass(frozen=True)
class DensityTimeFit:
    """Seconds of a layer's products, forward and both backward; of sparse ones `fixed + rate · density`."""

    dense: float
    fixed: float
    rate: float

    def ratio(self, density: float) -> float:
        """The time of sparse products over that of dense ones."""
        return (self.fixed + self.rate * density) / self.dense

    @property
    def crossover(self) -> float:
        """The density below which sparse products take less time; 0 where they never do."""
        return min(max((self.dense - self.fixed) / max(self.rate, 1e-30), 0.0), 1.0)


@dataclass(frozen=True)
class BreakevenCase:
    """A linear layer's products, of which there is one line on a machine."""

    form: Form
    outputs: int
    inputs: int
    tokens: int
    dtype: str = "float32"
    """Of dense products; sparse ones compute in float32 and convert."""
    device: str = "cpu"

    def measured(self) -> DensityTimeFit:
        """On this machine: as kept by it, else timed now and kept."""
        return _kept(self, torch.get_num_threads())


def forms_of(outputs: int, inputs: int) -> tuple[Form, ...]:
    """The forms that a weight of this shape can have."""
    return ("csr", "blocks") if outputs % LANES == 0 and inputs % LANES == 0 else ("csr",)


def best_form(lines: dict[Form, DensityTimeFit], densities: dict[Form, float]) -> tuple[Form, float]:
    """The form whose products take the least time, and the ratio of that to the time of dense ones."""
    return min(((form, lines[form].ratio(density)) for form, density in densities.items()), key=lambda pair: pair[1])


@cache
def _kept(case: BreakevenCase, threads: int) -> DensityTimeFit:
    path = _path(case, threads)
    try:
        return _read(path)
    except (OSError, ValueError, TypeError, LookupError):  # not there, or damaged
        return _keep(path, case, measure(case))


def _read(path: Path) -> DensityTimeFit:
    kept = json.loads(path.read_text(encoding="utf-8"))
    line = DensityTimeFit(**{name: float(kept[name]) for name in ("dense", "fixed", "rate")})
    if not (line.dense > 0 and math.isfinite(line.dense + line.fixed + line.rate)):
        raise ValueError(path)
    return line


def _path(case: BreakevenCase, threads: int) -> Path:
    here = {**asdict(case), "threads": threads, **fingerprint(case.device)}
    name = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / "sparse-products" / f"{name}.json"


def fingerprint(device: str) -> dict[str, str | bool]:
    """What makes times comparable: the processor or the GPU, torch, and whether products are compiled."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    processor = model or platform.processor() or platform.machine()
    name = torch.cuda.get_device_name() if device == "cuda" else processor
    return {"device_name": name, "torch": torch.__version__, "compiled": compiled_products.PRODUCTS.is_there()}


def _keep(path: Path, case: BreakevenCase, line: DensityTimeFit) -> DensityTimeFit:
    """Several ranks of one machine measure at once: the first to be done decides for all."""
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
    except OSError:  # no room, or not allowed to: measured again by the next process
        pass
    return line


def measure(case: BreakevenCase, seconds: float = 0.5) -> DensityTimeFit:
    """Time the products on random numbers, in turn, for at least so long; the best of at least three rounds counts."""
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
        ways = [lambda: _dense(x, upstream, weight)]
        ways += [lambda pattern=pattern: _sparse(x, upstream, weight.float(), pattern) for pattern in patterns]
        dense, low, high = _best(ways, seconds)
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
    """As `sparse_linear` computes them."""
    dtype = x.dtype
    wide, wide_upstream = x.float(), upstream.float()
    pattern.spmm(wide, pattern.pick(weight)).to(dtype)
    pattern.spmm_turned(wide_upstream, pattern.turn(pattern.pick(weight))).to(dtype)
    pattern.place(pattern.sddmm(wide_upstream, wide))


def _best(ways: list[Callable[[], None]], seconds: float) -> list[float]:
    """The least time of each way over rounds in which each has its turn, after one that is not counted."""
    taken: list[list[float]] = [[] for _ in ways]
    while len(taken[0]) < 4 or sum(map(sum, taken)) < seconds:
        for way, own in zip(ways, taken, strict=True):
            _settle()
            began = time.perf_counter()
            way()
            _settle()
            own.append(time.perf_counter() - began)
    return [min(own[1:]) for own in taken]


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
