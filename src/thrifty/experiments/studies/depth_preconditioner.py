"""Depth as preconditioner: a product of linear maps represents the same functions as one map. Gradient descent on the
product is preconditioned, and no regularizer can imitate this.

Paper     Arora, Cohen & Hazan 2018, On the Optimization of Deep Networks: Implicit Acceleration by Overparameterization
          (arXiv 1802.06509): theorem 1, and the comparison of l4 and l2 loss in section 8.
"""

import math

import torch
from torch import Tensor

from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot, grid

RATES = tuple(10 ** (exponent / 8) for exponent in range(-24, 9))


def balanced_factors(end_to_end: Tensor, depth: int) -> list[Tensor]:
    """Return W_1 … W_depth with product W_depth … W_1 = `end_to_end` (out, in) and W_{j+1}ᵀ W_{j+1} = W_j W_jᵀ.

    Each factor has the `depth`-th root of the singular values of `end_to_end`.
    """
    if depth == 1:
        return [end_to_end.clone()]
    u, s, v = torch.linalg.svd(end_to_end, full_matrices=False)
    root = (s ** (1 / depth)).diag()
    return [root @ v, *(root.clone() for _ in range(depth - 2)), u @ root]


def regression(seed: int, examples: int, features: int, condition: float) -> tuple[Tensor, Tensor]:
    """Return inputs (n, d) and targets (n,) of n examples with d features. Column scales fall from 1 to 1 /
    `condition`. Targets are linear in the inputs, plus unit noise.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -math.log10(condition), features, dtype=torch.float64)
    x = torch.randn(examples, features, generator=generator, dtype=torch.float64) * scales
    truth, noise = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (features, examples))
    return x, x @ truth + noise


def lowest_loss(x: Tensor, y: Tensor, p: int) -> float:
    """Return the minimum over w of mean |x w - y|^p / p, by Newton's method from the least-squares solution."""
    w = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    for _ in range(100):
        error = x @ w - y
        curvature = (x.mT * ((p - 1) * error.abs() ** (p - 2))) @ x
        w = w - torch.linalg.solve(curvature, x.mT @ (error.abs() ** (p - 1) * error.sign()))
    return float(((x @ w - y).abs() ** p).mean() / p)


def measure(
    seed: int, p: int, depth: int, examples: int, features: int, condition: float, most_steps: int
) -> dict[str, float]:
    """Return the number of gradient descent steps on `depth` factors until the loss is within 0.1 % of the minimum.

    All learning rates of the grid run in parallel along a leading dim. The result is the smallest number of the grid.
    """
    x, y = regression(seed, examples, features, condition)
    goal = lowest_loss(x, y, p) * 1.001
    start = torch.randn(1, features, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    start *= 0.1 / start.norm()
    rates = torch.tensor(RATES, dtype=torch.float64)[:, None, None]
    factors = [w.repeat(len(RATES), 1, 1).requires_grad_() for w in balanced_factors(start, depth)]
    for step in range(most_steps):
        product = factors[0]
        for factor in factors[1:]:
            product = factor @ product
        losses = ((product @ x.mT - y).abs() ** p).mean((1, 2)) / p
        if bool((losses <= goal).any()):
            return {"steps": step, "rate": RATES[int(losses.nan_to_num(math.inf).argmin())]}
        gradients = torch.autograd.grad(losses.sum(), factors)
        with torch.no_grad():
            for factor, gradient in zip(factors, gradients, strict=True):
                factor -= rates * gradient
    return {"steps": math.inf}


def depth_preconditioner(
    seeds: int = 20, examples: int = 500, features: int = 20, condition: float = 5.0, most_steps: int = 10_000
) -> Study:
    """Linear regression by products of 1, 2 and 3 factors, with l4 and l2 loss.

    Command   thrifty study depth_preconditioner
    Expect    With l4, two and three factors require less than half of the steps of one factor. With l2, more factors
              have no advantage. Duration: under a minute on two cores.
    """
    fixed = {"examples": examples, "features": features, "condition": condition, "most_steps": most_steps}
    cases = {label: {**levels, **fixed} for label, levels in grid(p=(4, 2), depth=(1, 2, 3)).items()}

    def speedups(cells: Cells) -> Cells:
        return {
            f"p {p}, depth {depth} against 1": {
                "speedup": cells[f"p {p}, depth 1"]["steps"] / cells[f"p {p}, depth {depth}"]["steps"]
            }
            for p, depth in ((4, 2), (4, 3), (2, 2), (2, 3))
        }

    def speedup(cells: Cells, p: int, depth: int) -> float:
        return cells[f"p {p}, depth {depth} against 1"]["speedup"]

    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "steps": MeasuredQuantity("steps of gradient descent to 0.1 % above the lowest loss, at the best rate"),
            "rate": MeasuredQuantity("best rate of the grid, with eight rates per decade"),
            "speedup": MeasuredQuantity("steps with one factor divided by steps with several, per seed"),
        },
        seeds=seeds,
        derive=speedups,
        expect={
            "l4: two factors require less than 0.7 of the steps of one": lambda c: speedup(c, 4, 2) > 1 / 0.7,
            "l4: three factors require less than 0.7 of the steps of one": lambda c: speedup(c, 4, 3) > 1 / 0.7,
            "l2: two factors are at most 10 % faster": lambda c: speedup(c, 2, 2) < 1.1,
            "l2: three factors are at most 10 % faster": lambda c: speedup(c, 2, 3) < 1.1,
        },
        plots=[StudyPlot("steps", "Steps to 0.1 % above the lowest loss", x="depth", y="steps", by="p", log_y=True)],
        minutes=0.5,
    )
