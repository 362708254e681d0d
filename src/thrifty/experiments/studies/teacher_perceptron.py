"""Data pruning of a perceptron: the best examples to keep depend on the dataset size.

Paper     Sorscher et al. 2022, Beyond neural scaling laws: beating power law scaling via data pruning (arXiv
          2206.14486), the teacher-student perceptron of its theory.
Note      The teacher is a direction in d dimensions that labels Gaussian examples. The student is the maximum-margin
          direction on the kept examples. Its exact error is its angle to the teacher. Hard examples are close to the
          decision boundary of a scoring probe. The probe is the teacher, or a direction at an angle to the teacher.
          Unlike in real data, no label is wrong.
"""

import math

import numpy as np
from scipy.optimize import nnls

from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot

ALL, BLURRED = "all", "hardest, blurred probe"
VARIANTS = (ALL, "random", "easiest", "hardest", BLURRED)


def max_margin(signed: np.ndarray) -> np.ndarray:
    """Return the shortest vector w (d,) with signed @ w >= 1. `signed` (n, d) has n separable examples of d features,
    multiplied by their labels.

    This least-distance problem is reduced to nonnegative least squares as in Lawson and Hanson 1974, Solving Least
    Squares Problems, chapter 23.
    """
    count, width = signed.shape
    system = np.vstack([signed.T, np.ones((1, count))])
    target = np.zeros(width + 1)
    target[-1] = 1.0
    multipliers, _ = nnls(system, target, maxiter=30 * count)
    residual = system @ multipliers - target
    return -residual[:-1] / residual[-1]


def probe_at(teacher: np.ndarray, degrees: float, random: np.random.Generator) -> np.ndarray:
    """Return a unit vector (d,) at an angle of `degrees` to the teacher, which is also a unit vector."""
    orthogonal = random.standard_normal(len(teacher))
    orthogonal -= (orthogonal @ teacher) * teacher
    orthogonal /= np.linalg.norm(orthogonal)
    return math.cos(math.radians(degrees)) * teacher + math.sin(math.radians(degrees)) * orthogonal


def measure(seed: int, per_dimension: float, kept: str, share: float, blur: float, width: int) -> dict[str, float]:
    """Return the student's error: the probability that student and teacher label a new example differently."""
    random = np.random.default_rng(seed)
    teacher = random.standard_normal(width)
    teacher /= np.linalg.norm(teacher)
    examples = random.standard_normal((round(per_dimension * width), width))
    signed = examples * np.sign(examples @ teacher)[:, None]
    if kept != ALL:
        distance = np.abs(examples @ probe_at(teacher, blur if kept == BLURRED else 0.0, random))
        keys = {"random": random.random(len(examples)), "easiest": -distance, "hardest": distance, BLURRED: distance}
        signed = signed[np.argsort(keys[kept])[: round(share * len(examples))]]
    student = max_margin(signed)
    cosine = float(student @ teacher / np.linalg.norm(student))
    return {"error": math.acos(min(cosine, 1.0)) / math.pi, "examples": len(signed)}


def label_of(kept: str, per_dimension: float) -> str:
    return f"{kept}, {per_dimension:g} per dimension"


def teacher_perceptron(
    seeds: int = 10,
    per_dimension: tuple[float, ...] = (2, 4, 8, 16, 32),
    share: float = 0.25,
    blur: float = 20.0,
    width: int = 100,
) -> Study:
    """A quarter of the examples of a perceptron in 100 dimensions: random, the hardest, or the easiest.

    Command   thrifty study teacher_perceptron
    Expect    With 2 examples per dimension, the easiest quarter is best, and the hardest is worse than random. With 16
              and 32 examples, the order is reversed, and the hardest quarter is as good as all examples. With a probe
              at 20° to the teacher, half of the hardest quarter's advantage is lost. Duration: less than a minute on
              two cores.
    """
    fixed = {"share": share, "blur": blur, "width": width}
    cases = {
        label_of(kept, many): {"per_dimension": many, "kept": kept, **fixed}
        for many in per_dimension
        for kept in VARIANTS
    }

    def error(cells: Cells, kept: str, many: float) -> float:
        return cells[label_of(kept, many)]["error"]

    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "error": MeasuredQuantity("probability that student and teacher label a new example differently"),
            "examples": MeasuredQuantity("training examples of the student"),
        },
        seeds=seeds,
        expect={
            (
                "with 2 and 4 examples per dimension, the easiest quarter beats a random one, which beats the hardest"
            ): lambda c: all(error(c, "easiest", n) < error(c, "random", n) < error(c, "hardest", n) for n in (2, 4)),
            "with 16 and 32, the hardest quarter beats the easiest, which beats a random one": lambda c: all(
                error(c, "hardest", n) < error(c, "easiest", n) < error(c, "random", n) for n in (16, 32)
            ),
            "with 16 and 32, the error of the hardest quarter is within 10 % of all examples": lambda c: all(
                error(c, "hardest", n) < 1.1 * error(c, ALL, n) for n in (16, 32)
            ),
            "with 2, the error of the easiest quarter is within 10 % of all examples": lambda c: (
                error(c, "easiest", 2) < 1.1 * error(c, ALL, 2)
            ),
            "with 32, a probe at an angle to the teacher selects a quarter with 50 % more error": lambda c: (
                error(c, BLURRED, 32) > 1.5 * error(c, "hardest", 32)
            ),
        },
        plots=[
            StudyPlot(
                "error",
                "Error of the student by examples per dimension",
                x="per_dimension",
                y="error",
                by="kept",
                log_x=True,
                log_y=True,
            ),
        ],
        minutes=1,
    )
