"""FLIP: a contrastive model that sees part of each image in training finds more for the same work, or does it?

Paper     Li et al. 2022, Scaling Language-Image Pre-training via Masking (FLIP, arXiv 2212.00794): half of the patches
          dropped in all released configurations, then a little unmasked tuning; 3.7 times less time to CLIP's accuracy
          (from memory, not verified).
Note      all runs of a budget cost the same FLOPs, counted, unmasked tuning included; those that drop patches make
          more steps of it. With and without unmasked tuning are runs of their own, each with a cosine to its end; with
          it the last tenth of the steps sees whole images. Judged is retrieval of all 1,911 held-out emoji, whole, by
          another vendor than those trained on, both ways. Captions cost the same whatever is dropped.
"""

from dataclasses import dataclass

from thrifty.composition.compose import CPU, BaseRun, compose
from thrifty.composition.explain import count
from thrifty.core.recipe import AugmentationSettings, DataSettings
from thrifty.core.technique import Technique
from thrifty.data.pairs.pair_data import PairData, open_image_pairs
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.whole_run import initialized, run_to_end
from thrifty.models.model_config import ModelConfig
from thrifty.objectives.contrastive import Contrastive
from thrifty.objectives.retrieval_metrics import chance_retrieval, embed_pairs, retrieval
from thrifty.techniques.data_selection.drop_patches import DropPatches
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.schedules.cosine import CosineDecay

WHOLE, HALF, HALF_TUNED = "whole images", "half dropped", "half dropped, tuned"
MOST, MOST_TUNED = "three quarters dropped", "three quarters dropped, tuned"
WAYS = {WHOLE: (0.0, False), HALF: (0.5, False), HALF_TUNED: (0.5, True), MOST: (0.75, False), MOST_TUNED: (0.75, True)}
"""What is dropped, and whether the end of the run is unmasked tuning."""
TUNED = 0.1
"""Share of the steps that unmasked tuning takes."""


@dataclass(frozen=True)
class FlipSizes:
    """Of both towers, and of the data."""

    depth: int
    width: int
    side: int
    patch: int
    batch: int
    data: str

    def open(self, seed: int) -> PairData:
        settings = DataSettings(
            source=self.data, batch=self.batch, length=32, vocabulary=2048, size=self.side,
            augment=AugmentationSettings(crop=self.side // 10),
        )  # fmt: skip
        return open_image_pairs(settings, seed, None, lambda text: None)

    def plain(self, pairs: PairData, seed: int) -> BaseRun:
        heads = max(1, self.width // 32)
        shape = ModelConfig(
            "clip", self.depth, self.width, heads, heads, 4 * self.width, pairs.ends.text.vocabulary, 32, tied=False,
            image=self.side, patch=self.patch, channels=pairs.ends.images.channels, space=self.width,
            text_depth=max(1, self.depth // 2), text_width=self.width, text_heads=heads, text_hidden=4 * self.width,
        )  # fmt: skip
        return BaseRun(lambda: initialized(shape, seed), pairs.train, Contrastive())


def dropping(rate: float, tuned: bool) -> list[Technique]:
    """The technique that a way is; none for whole images."""
    return [DropPatches(rate=rate, until=1.0 - TUNED * tuned)] if rate else []


def flops_of_step(plain: BaseRun, rate: float) -> float:
    """Of a step that drops so much."""
    step = compose(plain, [AdamW(), *dropping(rate, tuned=False)], 1)
    return count(step, step.techniques)[1].flops


def steps_for(whole_steps: int, whole: float, dropped: float, tuned: bool) -> int:
    """How many steps cost what `whole_steps` of whole images do, when a step costs so much on whole images and on what
    is left of them."""
    share = TUNED * tuned
    return max(1, round(whole_steps * whole / ((1 - share) * dropped + share * whole)))


def measure(
    seed: int,
    way: str,
    whole_steps: int,
    depth: int,
    width: int,
    side: int,
    patch: int,
    batch: int,
    lr: float,
    data: str,
) -> dict[str, float]:
    sizes = FlipSizes(depth, width, side, patch, batch, data)
    pairs = sizes.open(seed)
    plain, (rate, tuned) = sizes.plain(pairs, seed), WAYS[way]
    flops = flops_of_step(plain, rate)
    steps = steps_for(whole_steps, flops_of_step(plain, 0.0), flops, tuned) if rate else whole_steps
    chosen = [AdamW(lr=lr, weight_decay=0.2), CosineDecay(warmup=0.1), GradientClipping(), *dropping(rate, tuned)]
    run = compose(plain, chosen, steps)
    model, state = run_to_end(run, seed)
    vectors = embed_pairs(model, pairs.held_out.batches(len(pairs.held_out), 256), CPU)
    recalls, chance = retrieval(*vectors), chance_retrieval(vectors[2])
    return {
        "recall_10": 50 * (recalls["captions R@10"] + recalls["images R@10"]),
        "recall_1": 50 * (recalls["captions R@1"] + recalls["images R@1"]),
        "chance_10": 100 * chance["captions R@10"],
        "steps": steps,
        "step_flops": flops,
        "seconds": state.counters["seconds"],
    }


def label_of(way: str, whole_steps: int) -> str:
    return f"{way}, work of {whole_steps} steps"


def flip(
    seeds: int = 3,
    budgets: tuple[int, ...] = (100, 300),
    depth: int = 4,
    width: int = 64,
    side: int = 64,
    patch: int = 8,
    batch: int = 128,
    lr: float = 1e-3,
    data: str = "emoji",
) -> Study:
    """Retrieval at equal work with none, half and three quarters of the patches dropped, with and without unmasked
    tuning. A budget is the work of so many steps on whole images. First: thrifty data get emoji.

    Command   thrifty study flip
    Expect    more steps count most where there are few: after the work of only 50 whole steps (one seed) three quarters
              dropped found 6.3 % among the first ten, half dropped and tuned 4.7, whole images 3.2, chance 0.5.
    """
    sizes = {"depth": depth, "width": width, "side": side, "patch": patch, "batch": batch, "lr": lr, "data": data}
    most, least = max(budgets), min(budgets)

    def at_10(cells: Cells, way: str, work: int = most) -> float:
        return cells[label_of(way, work)]["recall_10"]

    return Study(
        measure=measure,
        cases={label_of(way, work): {"way": way, "whole_steps": work, **sizes} for work in budgets for way in WAYS},
        quantities={
            "recall_10": MeasuredQuantity("right among the first 10 of all held out, percent, mean of both directions"),
            "recall_1": MeasuredQuantity("right at the first place, percent, mean of both directions"),
            "chance_10": MeasuredQuantity("the former by chance, percent"),
            "steps": MeasuredQuantity("steps that the work paid for"),
            "step_flops": MeasuredQuantity("FLOPs of a step while patches are dropped"),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
        },
        seeds=seeds,
        expect={
            "at the larger budget half of the patches, tuned, finds more than whole images": lambda cells: (
                at_10(cells, HALF_TUNED) > at_10(cells, WHOLE)
            ),
            "at the smaller budget it does too": lambda cells: (
                at_10(cells, HALF_TUNED, least) > at_10(cells, WHOLE, least)
            ),
            "unmasked tuning helps, and the more the more was dropped": lambda cells: (
                at_10(cells, MOST_TUNED) - at_10(cells, MOST) > at_10(cells, HALF_TUNED) - at_10(cells, HALF) > 0
            ),
            "three quarters dropped, tuned, find less than half dropped": lambda cells: (
                at_10(cells, MOST_TUNED) < at_10(cells, HALF_TUNED)
            ),
            "whole images at the larger budget find ten times as much as chance": lambda cells: (
                at_10(cells, WHOLE) > 10 * cells[label_of(WHOLE, most)]["chance_10"]
            ),
        },
        plots=[
            StudyPlot(
                "recall", "Right among the first 10, percent, by the work", x="whole_steps", y="recall_10", by="way"
            ),
            StudyPlot("seconds", "Right among the first 10, percent, by seconds", x="seconds", y="recall_10", by="way"),
        ],
        minutes=20,
    )
