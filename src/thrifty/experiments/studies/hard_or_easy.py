"""Data pruning on real images: accuracy with the hardest or the easiest half, for small and large datasets.

Paper     Sorscher et al. 2022, Beyond neural scaling laws: beating power law scaling via data pruning (arXiv
          2206.14486). Keep the hardest examples if data are abundant, and the easiest examples if data are scarce.
Note      Difficulty is EL2N, averaged over networks trained briefly on all examples. An equal fraction of each class is
          kept. Without that rule, half of Fashion-MNIST consisted mostly of shirts and pullovers, and the network
          learned almost nothing about shoes. All networks train for the same number of steps.
"""

from contextlib import closing
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.core.randomness import keyed_generator, seed_of
from thrifty.core.recipe import DataSettings
from thrifty.data.images.image_data import open_images
from thrifty.data.train_split import DataSplit
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.digits_task import FixedImages, linear_layers, run_on
from thrifty.experiments.tasks.whole_run import in_steps
from thrifty.kernels.example_scores import el2n

ALL = "all"
VARIANTS = (ALL, "random", "hardest", "easiest", "hardest but some")


@cache
def images_of(data: str, part: DataSplit) -> FixedImages:
    """Return all n images of a split as standardized vectors (n, pixels)."""
    arrays = open_images(DataSettings(source=data, batch=1), 0, None, lambda text: None).parts[part]
    fields = arrays.fields(np.arange(len(arrays)))
    return FixedImages(fields["inputs"].flatten(1), fields["labels"])


def trained(data: FixedImages, classes: int, width: int, steps: int, until: int, batch: int, seed: int) -> nn.Module:
    """Return a classifier after the first `until` steps of a run of `steps` steps."""
    sizes = (data.images.shape[1], width, width, classes)
    run = run_on(lambda: nn.Sequential(*linear_layers(sizes, seed)), data, steps=steps, batch=batch, seed=seed)
    with closing(in_steps(run, seed)) as states:
        return next(model for step, model, _ in states if step == until)


@cache
def pool_and_scores(
    seed: int, data: str, images: int, networks: int, scored_after: int, width: int, steps: int, batch: int
) -> tuple[FixedImages, Tensor]:
    """Return a random subset of n training images, and the EL2N scores of these images (n,)."""
    whole = images_of(data, DataSplit.TRAIN)
    indices = torch.randperm(len(whole), generator=keyed_generator(f"hard or easy/{seed}"))[:images]
    pool, classes = FixedImages(whole.images[indices], whole.labels[indices]), int(whole.labels.max()) + 1
    scores = []
    for network in range(networks):
        own_seed = seed_of(f"hard or easy/{seed}/{network}")
        model = trained(pool, classes, width, steps, scored_after, batch, own_seed)
        scores.append(el2n(model(pool.images), pool.labels))
    return pool, torch.stack(scores).mean(0)


def kept_of_each_class(keys: Tensor, labels: Tensor, share: float, offset: float) -> Tensor:
    """Return the indices of a fraction `share` of each class, at least one: its examples with the highest keys (n,).
    The fraction `offset` with the very highest keys is skipped.
    """
    kept = []
    for label in labels.unique():
        own = (labels == label).nonzero().squeeze(1)
        order = own[keys[own].argsort(descending=True, stable=True)]
        first = round(offset * len(own))
        kept.append(order[first : first + max(1, round(share * len(own)))])
    return torch.cat(kept)


def measure(
    seed: int,
    kept_of: str,
    images: int,
    share: float,
    offset: float,
    networks: int,
    scored_after: int,
    width: int,
    steps: int,
    batch: int,
) -> dict[str, float]:
    """Return the test accuracy of a network trained on the kept images. `kept_of` names the selection and the data,
    such as "hardest of digits".
    """
    way, _, data = kept_of.rpartition(" of ")
    pool, scores = pool_and_scores(seed, data, images, networks, scored_after, width, steps, batch)
    keys = {
        "random": torch.rand(len(pool), generator=keyed_generator(f"hard or easy/{seed}/random")),
        "hardest": scores,
        "easiest": -scores,
        "hardest but some": scores,
    }
    kept = torch.arange(len(pool))
    if way != ALL:
        kept = kept_of_each_class(keys[way], pool.labels, share, offset if way == "hardest but some" else 0.0)
    part, test = FixedImages(pool.images[kept], pool.labels[kept]), images_of(data, DataSplit.HELD_OUT)
    model = trained(part, int(test.labels.max()) + 1, width, steps, steps, batch, seed)
    with torch.no_grad():
        right = (model(test.images).argmax(1) == test.labels).float().mean()
    return {"accuracy": 100 * float(right), "kept": len(kept)}


def label_of(way: str, data: str, images: int) -> str:
    return f"{way}, {images:,} of {data}"


def hard_or_easy(
    seeds: int = 5,
    digits: tuple[int, ...] = (100, 325, 1300),
    clothes: tuple[int, ...] = (250, 2000, 30000),
    share: float = 0.5,
    offset: float = 0.1,
    networks: int = 4,
    scored_after: int = 50,
    width: int = 128,
    steps: int = 1000,
    batch: int = 64,
) -> Study:
    """Half of 100 to 1,300 digits, and half of 250 to 30,000 images of clothes: the hardest or the easiest of each
    class.

    Command   thrifty study hard_or_easy
    Expect    With more images, the hardest half improves relative to the easiest half. With one seed, the paper's
              advice for few images failed: the easiest half was never better than a random half. On clothes, where the
              hardest images are ambiguous, a random half was better than the hardest and the easiest half. There,
              skipping the hardest tenth helped. Requires `thrifty data get fashion-mnist`. Duration: six minutes on two
              cores.
    """
    sets = {"digits": digits, "fashion-mnist": clothes}
    fixed = {
        "share": share, "offset": offset, "networks": networks, "scored_after": scored_after, "width": width,
        "steps": steps, "batch": batch,
    }  # fmt: skip
    cases = {
        label_of(way, data, images): {"kept_of": f"{way} of {data}", "images": images, **fixed}
        for data, sizes in sets.items()
        for images in sizes
        for way in VARIANTS
    }

    def error(cells: Cells, way: str, data: str, images: int) -> float:
        return 100 - cells[label_of(way, data, images)]["accuracy"]

    def odds(cells: Cells, data: str, images: int) -> float:
        return error(cells, "hardest", data, images) / error(cells, "easiest", data, images)

    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "accuracy": MeasuredQuantity("test accuracy at the end, percent"),
            "kept": MeasuredQuantity("training images kept"),
        },
        seeds=seeds,
        expect={
            (
                "on both sets, the error of the hardest half relative to the easiest is lower with the most images "
                "than with the fewest"
            ): lambda c: all(odds(c, data, sizes[-1]) < odds(c, data, sizes[0]) for data, sizes in sets.items()),
            "on both sets, the easiest half beats a random one with the fewest images": lambda c: all(
                error(c, "easiest", data, sizes[0]) < error(c, "random", data, sizes[0]) for data, sizes in sets.items()
            ),
            "with the most digits, the hardest half is within one point of all images": lambda c: (
                error(c, "hardest", "digits", digits[-1]) < error(c, ALL, "digits", digits[-1]) + 1
            ),
            "with the most clothes, a random half beats the hardest and the easiest by three points": lambda c: all(
                error(c, way, "fashion-mnist", clothes[-1]) > error(c, "random", "fashion-mnist", clothes[-1]) + 3
                for way in ("hardest", "easiest")
            ),
            "with the most clothes, skipping the hardest tenth improves the hardest half": lambda c: (
                error(c, "hardest but some", "fashion-mnist", clothes[-1])
                < error(c, "hardest", "fashion-mnist", clothes[-1])
            ),
        },
        plots=[
            StudyPlot(
                "accuracy",
                "Test accuracy by number of images",
                x="images",
                y="accuracy",
                by="kept_of",
                log_x=True,
            )
        ],
        minutes=6,
    )
