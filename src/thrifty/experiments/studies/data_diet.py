"""Data pruning with label noise: accuracy after training on half of a dataset, selected by different scores.

Papers    Paul, Ganguli & Dziugaite 2021, Deep Learning on a Data Diet (arXiv 2107.07075): EL2N and GraNd. Kirsch 2023
          (2303.14753): GraNd at initialization correlates with the input norm and selects nothing useful. Toneva et al.
          2019 (1812.05159): forgetting. Sorscher et al. 2022 (2206.14486): prototypes.
Note      Scores are averages over ten networks with different initializations, after one epoch. Prototype distances use
          the last hidden layer of one of these networks. The final network has its own initialization, and always
          trains for the same number of steps. The compute of scoring, a fifth of the final training, is not counted.
          With scores after five epochs, the hardest half equalled a random half (one seed), because the networks were
          then confident of most examples.
"""

from contextlib import closing
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.func import functional_call

from thrifty.core.randomness import keyed_generator, seed_of
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.digits_task import (
    CLASSES,
    FixedImages,
    PixelStandardizer,
    accuracy,
    perceptron,
    run_on,
    with_wrong_labels,
)
from thrifty.experiments.tasks.whole_run import in_steps, run_to_end
from thrifty.kernels.example_scores import Fields, ForgettingCounter, el2n, grand, input_norms, prototype_distance

ALL, SCORES = "all", "the scores themselves"
BEGUN, TRAINED = "GraNd at initialization", "GraNd"
VARIANTS = (
    ALL, "random", "EL2N, hardest", "EL2N, easiest", "EL2N, hardest but some", f"{TRAINED}, hardest but some",
    f"{BEGUN}, hardest", "input norm, hardest", "forgetting, hardest but some", "prototype, hardest",
    "prototype, easiest",
)  # fmt: skip
LOOK = 2
"""Number of steps between two forgetting evaluations."""


def gradient_norms(model: nn.Module, data: FixedImages) -> Tensor:
    """Return the GraNd scores of all n examples (n,)."""

    def loss(parameters: Fields, example: Fields) -> Tensor:
        logits = functional_call(model, dict(parameters), (example["inputs"][None],))
        return F.cross_entropy(logits, example["labels"][None])

    return grand(loss, dict(model.named_parameters()), {"inputs": data.images, "labels": data.labels}, chunk=100)


@cache
def scores_of_runs(
    seed: int, wrong: float, networks: int, scored_after: int, width: int, steps: int, batch: int
) -> dict[str, Tensor]:
    """Return scores (r, n) of r networks for n examples, keyed by the kind of score. Prototypes and the input norm have
    one row.
    """
    data, _ = with_wrong_labels(wrong, seed)
    everything, by_method = torch.arange(len(data)), {name: [] for name in ("EL2N", TRAINED, BEGUN, "forgetting")}
    for network in range(networks):
        counter = ForgettingCounter(len(data))
        own_seed = seed_of(f"data diet/{seed}/{network}")
        run = run_on(partial(perceptron, width, own_seed), data, steps=steps, batch=batch, seed=own_seed)
        with closing(in_steps(run, own_seed)) as states:
            for step, model, _ in states:
                if step == 0:
                    by_method[BEGUN].append(gradient_norms(model, data))
                if step % LOOK == 0:
                    with torch.no_grad():
                        logits = model(data.images)
                    counter.update(everything, logits.argmax(1) == data.labels)
                if step == scored_after:
                    break
        by_method["EL2N"].append(el2n(model(data.images), data.labels))
        by_method[TRAINED].append(gradient_norms(model, data))
        by_method["forgetting"].append(counter.scores())
    scores = {name: torch.stack(rows) for name, rows in by_method.items()}
    with torch.no_grad():
        embedded = model[:-1](data.images)  # type: ignore[index]
    scores["prototype"] = prototype_distance(embedded, CLASSES, seed)[None]
    scores["input norm"] = input_norms(PixelStandardizer()(data.images))[None]
    return scores


def chosen(scores: Tensor, rule: str, share: float, offset: float) -> Tensor:
    """Return the indices of the examples to keep, given the scores of n examples (n,).

    "hardest but some" skips the hardest fraction `offset` before it selects.
    """
    order = scores.argsort(descending=rule != "easiest", stable=True)
    first = round(offset * len(scores)) if rule == "hardest but some" else 0
    return order[first : first + round(share * len(scores))]


def rank_correlation(one: Tensor, other: Tensor) -> float:
    return float(spearmanr(one.numpy(), other.numpy()).statistic)


def measure(
    seed: int,
    way: str,
    share: float,
    offset: float,
    wrong: float,
    networks: int,
    scored_after: int,
    width: int,
    steps: int,
    batch: int,
) -> dict[str, float]:
    """Return the test accuracy after training on the kept examples. For the variant `SCORES`, return the agreement
    between scores.
    """
    data, flipped = with_wrong_labels(wrong, seed)
    if way == ALL:
        kept = torch.arange(len(data))
    elif way == "random":
        generator = keyed_generator(f"data diet/{seed}/kept")
        kept = torch.randperm(len(data), generator=generator)[: round(share * len(data))]
    else:
        scores = scores_of_runs(seed, wrong, networks, scored_after, width, steps, batch)
        if way == SCORES:
            return agreement(scores, flipped)
        kind, _, rule = way.partition(", ")
        kept = chosen(scores[kind].mean(0), rule, share, offset)
    part = FixedImages(data.images[kept], data.labels[kept])
    run = run_on(partial(perceptron, width, seed), part, steps=steps, batch=batch, seed=seed)
    model, _ = run_to_end(run, seed)
    return {"accuracy": accuracy(model), "wrong_labels": float(flipped[kept].sum())}


def agreement(scores: dict[str, Tensor], flipped: Tensor) -> dict[str, float]:
    """Return rank correlations of scores, and the precision in percent of the highest EL2N scores as a detector of
    wrong labels. As many examples are selected as there are wrong labels.
    """
    runs = scores["EL2N"]
    half, count = len(runs) // 2, int(flipped.sum())
    singles = [rank_correlation(one, runs[half:].mean(0)) for one in runs[:half]]
    hardest = runs.mean(0).argsort(descending=True)[:count]
    return {
        "first_grand_to_input_norm": rank_correlation(scores[BEGUN].mean(0), scores["input norm"][0]),
        "one_to_mean": float(np.mean(singles)),
        "mean_to_mean": rank_correlation(runs[:half].mean(0), runs[half:].mean(0)),
        "caught": 100 * float(flipped[hardest].float().mean()) if count else 0.0,
    }


def data_diet(
    seeds: int = 5,
    share: float = 0.5,
    offset: float = 0.05,
    wrong: float = 0.05,
    networks: int = 10,
    scored_after: int = 20,
    width: int = 128,
    steps: int = 1000,
    batch: int = 64,
) -> Study:
    """Accuracy of a perceptron on half of 1,300 digits, selected by eight kinds of scores; 5 % of the labels are wrong.

    Command   thrifty study data_diet
    Expect    The hardest half contains all wrong labels and is worse than a random half. The easiest half contains no
              wrong label and is also worse than a random half. Without the hardest 5 %, the next hardest half is better
              even than the whole set, because the skipped 5 % contain the wrong labels. GraNd at initialization
              correlates with the input norm and is no better than random. Duration: two minutes on two cores.
    """
    settings = {
        "share": share, "offset": offset, "wrong": wrong, "networks": networks, "scored_after": scored_after,
        "width": width, "steps": steps, "batch": batch,
    }  # fmt: skip

    def right(cells: Cells, way: str) -> float:
        return cells[way]["accuracy"]

    return Study(
        measure=measure,
        cases={way: {"way": way, **settings} for way in (*VARIANTS, SCORES)},
        quantities={
            "accuracy": MeasuredQuantity("test accuracy at the end, percent"),
            "wrong_labels": MeasuredQuantity("wrong labels among the kept examples"),
            "first_grand_to_input_norm": MeasuredQuantity(
                "rank correlation of GraNd at initialization with the input norm"
            ),
            "one_to_mean": MeasuredQuantity("rank correlation of EL2N of one network with the mean of five others"),
            "mean_to_mean": MeasuredQuantity(
                "rank correlation of the mean EL2N of five networks with that of five others"
            ),
            "caught": MeasuredQuantity("precision of the highest EL2N scores as a detector of wrong labels, percent"),
        },
        seeds=seeds,
        expect={
            ("the hardest and the easiest half by EL2N are each more than two points below a random half"): lambda c: (
                max(right(c, "EL2N, hardest"), right(c, "EL2N, easiest")) < right(c, "random") - 2
            ),
            "without the hardest 5 %, EL2N's hard half beats random by two points and the whole by one": lambda c: (
                right(c, "EL2N, hardest but some") > max(right(c, "random") + 2, right(c, ALL) + 1)
            ),
            "GraNd at initialization beats a random half by at most half a point": lambda c: (
                right(c, f"{BEGUN}, hardest") < right(c, "random") + 0.5
            ),
            "GraNd at initialization follows the input norm: rank correlation above 0.6": lambda c: (
                c[SCORES]["first_grand_to_input_norm"] > 0.6
            ),
            "the EL2N of one network agrees less with a mean of five than another mean of five does": lambda c: (
                c[SCORES]["one_to_mean"] < c[SCORES]["mean_to_mean"]
            ),
            "the highest EL2N scores find more than 60 % of the wrong labels": lambda c: c[SCORES]["caught"] > 60,
        },
        plots=[StudyPlot("accuracy", "Test accuracy by selected half", y="accuracy")],
        minutes=2,
    )
