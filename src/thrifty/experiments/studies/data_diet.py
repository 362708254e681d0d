"""What half of a training set is worth keeping, where some labels are wrong.

Papers    Paul, Ganguli & Dziugaite 2021, Deep Learning on a Data Diet (arXiv 2107.07075): EL2N and GraNd; Kirsch 2023
          (2303.14753): GraNd at first values follows the norm of the input and finds nothing; Toneva et al. 2019
          (1812.05159): forgetting; Sorscher et al. 2022 (2206.14486): prototypes.
Note      all but the prototypes are averaged over ten networks from other first values, which are not the one that is
          trained in the end, after one epoch of the run of that one. It makes the same number of steps whatever is
          kept; scoring costs a fifth of them more and is not counted here. Distances to prototypes are in the last
          hidden layer of one of the ten. Scored five epochs into the run, the hardest half was as good as a random one
          (one seed): by then the networks are sure of most of what they were shown.
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
BEGUN, TRAINED = "GraNd at first values", "GraNd"
WAYS = (
    ALL, "random", "EL2N, hardest", "EL2N, easiest", "EL2N, hardest but some", f"{TRAINED}, hardest but some",
    f"{BEGUN}, hardest", "input norm, hardest", "forgetting, hardest but some", "prototype, hardest",
    "prototype, easiest",
)  # fmt: skip
LOOK = 2
"""Steps between two looks at what has been forgotten."""


def gradient_norms(model: nn.Module, data: FixedImages) -> Tensor:
    """GraNd of every example (n,)."""

    def loss(parameters: Fields, example: Fields) -> Tensor:
        logits = functional_call(model, dict(parameters), (example["inputs"][None],))
        return F.cross_entropy(logits, example["labels"][None])

    return grand(loss, dict(model.named_parameters()), {"inputs": data.images, "labels": data.labels}, chunk=100)


@cache
def scores_of_runs(
    seed: int, wrong: float, networks: int, scored_after: int, width: int, steps: int, batch: int
) -> dict[str, Tensor]:
    """By kind of score, those of each network (r, n); of prototypes and inputs there is one row."""
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
    """The places of the examples to keep, by their scores (n,); "hardest but some" first takes away the share `offset`
    of the very hardest."""
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
    """What a network learns of the kept examples; or of the scores, how they agree with one another."""
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
    """Rank correlations, and how many of the wrong labels are among as many examples of highest EL2N."""
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
    """Half of 1,300 digits, 5 % of them under wrong labels, kept by eight kinds of score; what a perceptron learns.

    Command   thrifty study data_diet
    Expect    the hardest half holds all wrong labels, and is worse than a random one; so is the easiest, which holds
              none. Without the hardest 5 % the next half beats even the whole, whose wrong labels it leaves out. GraNd
              at first values follows the norm of the input and is no better than chance. Two minutes on two cores.
    """
    settings = {
        "share": share, "offset": offset, "wrong": wrong, "networks": networks, "scored_after": scored_after,
        "width": width, "steps": steps, "batch": batch,
    }  # fmt: skip

    def right(cells: Cells, way: str) -> float:
        return cells[way]["accuracy"]

    return Study(
        measure=measure,
        cases={way: {"way": way, **settings} for way in (*WAYS, SCORES)},
        quantities={
            "accuracy": MeasuredQuantity("test images told right at the end, percent"),
            "wrong_labels": MeasuredQuantity("wrong labels among those kept"),
            "first_grand_to_input_norm": MeasuredQuantity(
                "rank correlation of GraNd at first values with the input's norm"
            ),
            "one_to_mean": MeasuredQuantity("rank correlation of EL2N of one network with the mean of five others"),
            "mean_to_mean": MeasuredQuantity("the same of the mean of five with that of five others"),
            "caught": MeasuredQuantity(
                "percent wrong labels among as many examples of highest EL2N as there are wrong labels"
            ),
        },
        seeds=seeds,
        expect={
            (
                "the hardest half by EL2N is more than two points worse than a random one, and so is the easiest"
            ): lambda c: max(right(c, "EL2N, hardest"), right(c, "EL2N, easiest")) < right(c, "random") - 2,
            "without the very hardest, EL2N's half beats a random one by two points, and all by one": lambda c: (
                right(c, "EL2N, hardest but some") > max(right(c, "random") + 2, right(c, ALL) + 1)
            ),
            "GraNd at first values does not beat a random half by more than half a point": lambda c: (
                right(c, f"{BEGUN}, hardest") < right(c, "random") + 0.5
            ),
            "GraNd at first values follows the norm of the input: rank correlation above 0.6": lambda c: (
                c[SCORES]["first_grand_to_input_norm"] > 0.6
            ),
            "one network's EL2N agrees with the mean of five less well than another mean of five does": lambda c: (
                c[SCORES]["one_to_mean"] < c[SCORES]["mean_to_mean"]
            ),
            "more than six in ten of the wrong labels are among as many of highest EL2N": lambda c: (
                c[SCORES]["caught"] > 60
            ),
        },
        plots=[StudyPlot("accuracy", "Percent told right by what half is kept", y="accuracy")],
        minutes=2,
    )
