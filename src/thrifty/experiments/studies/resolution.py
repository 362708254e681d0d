"""Progressive resolution: accuracy by training time of a small ViT that starts with small images.

Papers    Wang et al. 2022, EfficientTrain (arXiv 2211.09703); Tan & Le 2021, EfficientNetV2 (arXiv 2104.00298), for the
          resizing.
Note      All variants of a budget have equal steps and images, so small images save only time. Accuracy is measured on
          full-size images. The ViT is much smaller than ImageNet models; with 64 patches, there is little to save.
"""

from statistics import fmean
from typing import Literal

from thrifty.core.technique import Technique
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot, grid
from thrifty.experiments.tasks.image_task import train_on_images
from thrifty.techniques.curriculum.low_frequency import LowFrequencyCurriculum
from thrifty.techniques.curriculum.resolution import ResolutionCurriculum

Way = Literal["full", "resolution", "low_frequency"]
PROGRESSIVE: tuple[Way, ...] = ("resolution", "low_frequency")


def techniques_of(way: Way, patch: int) -> list[Technique]:
    if way == "resolution":
        return [ResolutionCurriculum(start=0.5, until=0.8, multiple=patch)]
    if way == "low_frequency":
        return [LowFrequencyCurriculum(fractions=(0.5, 0.75), until=(0.6, 0.8), multiple=patch)]
    return []


def measure(
    seed: int, way: Way, steps: int, data: str, depth: int, width: int, patch: int, batch: int, tested: int
) -> dict[str, float]:
    """Return accuracy and loss on held-out images, the mean number of patches per image, and seconds."""
    trained = train_on_images(
        techniques_of(way, patch),
        steps=steps, seed=seed, data=data, depth=depth, width=width, patch=patch, batch=batch, lr=1e-3,
    )  # fmt: skip
    patches = [(trained.run.source.rows(step, 0, 1)["inputs"].shape[-1] // patch) ** 2 for step in range(steps)]
    metrics = trained.judged(tested)
    return {
        "accuracy": metrics["accuracy"],
        "loss": metrics["loss"],
        "patches": fmean(patches),
        "seconds": trained.seconds,
    }


def resolution(
    seeds: int = 3,
    budgets: tuple[int, ...] = (200, 400, 800),
    data: str = "cifar10",
    depth: int = 4,
    width: int = 128,
    patch: int = 4,
    batch: int = 64,
    tested: int = 5000,
) -> Study:
    """A 4-block ViT on CIFAR-10 for 200, 400 and 800 steps: full images, growing images, and growing low frequencies.

    Command   thrifty study resolution
    Expect    A start with small images saves a third of the time. At equal steps, this start loses less accuracy than
              halving the steps of a run on full images. Requires `thrifty data get cifar10`. Duration: forty minutes on
              two cores.
    """
    fixed = {"data": data, "depth": depth, "width": width, "patch": patch, "batch": batch, "tested": tested}
    levels = grid(way=("full", "resolution", "low_frequency"), steps=budgets)
    half, last = budgets[-2], budgets[-1]

    def value(cells: Cells, way: Way, steps: int, name: str) -> float:
        return cells[f"way {way}, steps {steps:g}"][name]

    return Study(
        measure=measure,
        cases={label: {**level, **fixed} for label, level in levels.items()},
        quantities={
            "accuracy": MeasuredQuantity("accuracy on full-size held-out images, as a fraction"),
            "loss": MeasuredQuantity("held-out loss, nats"),
            "patches": MeasuredQuantity("mean patches per training image"),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
        },
        seeds=seeds,
        expect={
            sentence: holds
            for way in PROGRESSIVE
            for sentence, holds in (
                (
                    f"{way} takes less than 80 % of the seconds of full images",
                    lambda c, way=way: value(c, way, last, "seconds") < 0.8 * value(c, "full", last, "seconds"),
                ),
                (
                    f"{way} loses less accuracy than halving the full steps",
                    lambda c, way=way: value(c, way, last, "accuracy") > value(c, "full", half, "accuracy"),
                ),
            )
        },
        plots=[
            StudyPlot("accuracy", "Accuracy against training seconds", x="seconds", y="accuracy", by="way", log_x=True),
            StudyPlot("by_steps", "Accuracy against steps", x="steps", y="accuracy", by="way", log_x=True),
        ],
        minutes=40,
    )
