"""Masked autoencoders: what leaving out removed patches saves, and what pre-training is worth where labels are few.

Paper     He et al. 2021, Masked Autoencoders Are Scalable Vision Learners (MAE, arXiv 2111.06377): 3 times as fast or
          more at 75 %, the best share of its ablation (unverified).
Note      paces are those of a larger model on images of `side` pixels, in patches of 8 (6 blocks of width 192, 2 of
          width 96 in the decoder): forward pass, backward pass and update on one thread. A classifier is trained as
          long from an autoencoder's encoder as from first values, and from those once more for `longer` times as many
          steps. Its head is given the mean of the patches. Each seed has other images with labels.
"""

from thrifty.composition.compose import compose
from thrifty.core.recipe import AugmentationSettings
from thrifty.core.technique import Technique
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.autoencoder_task import (
    AutoencoderSizes,
    EncoderPace,
    LabelledImages,
    adamw,
    masked,
    tuned,
)
from thrifty.experiments.tasks.whole_run import run_to_end
from thrifty.models.masked_autoencoder import MaskedAutoencoder
from thrifty.techniques.adapters.head_only import HeadOnly
from thrifty.techniques.data_selection.drop_masked_patches import DropMaskedPatches

PACED = AutoencoderSizes(patch=8, depth=6, width=192, decoder_depth=2, decoder_width=96)
SCRATCH, LONGER, BLANKS = "from scratch", "from scratch, longer", "75 %, blanks"
TUNED_LR, PROBE_LR = 2e-3, 2e-2


def dropping(blanks: bool) -> list[Technique]:
    return [] if blanks else [DropMaskedPatches()]


def pretrained(
    sizes: AutoencoderSizes, data: str, rate: float, blanks: bool, steps: int, batch: int, lr: float, seed: int
) -> tuple[MaskedAutoencoder, float]:
    """A trained autoencoder, and the seconds in its steps."""
    plain = masked(sizes, data, batch, rate, seed, AugmentationSettings(crop=1))
    model, state = run_to_end(compose(plain, [*adamw(lr), *dropping(blanks)], steps), seed)
    assert isinstance(model, MaskedAutoencoder)
    return model, state.counters["seconds"]


def measure(
    seed: int,
    rate: float,
    blanks: bool,
    steps: int,
    tuning: int,
    labels: list[int],
    data: str,
    patch: int,
    depth: int,
    width: int,
    batch: int,
    tested: int,
    side: int,
    paced: int,
) -> dict[str, float]:
    """What classifiers come to that start from an autoencoder trained so, from first values where `rate` is 0; and the
    pace of such an autoencoder."""
    sizes = AutoencoderSizes(patch, depth, width, decoder_depth=2, decoder_width=width // 2)
    numbers: dict[str, float] = {}
    if rate:
        start, numbers["seconds"] = pretrained(sizes, data, rate, blanks, steps, batch, 2e-3, seed)
        larger = EncoderPace(PACED, side, 8, rate, dropping(blanks))
        numbers |= larger.flops() | larger.gains(EncoderPace(PACED, side, 8, rate, []), paced)
    else:
        ends = LabelledImages.of(data, labels[0], batch, seed).images.ends
        start = sizes.autoencoder(seed, ends.side, ends.channels)
    for count in labels:
        few = LabelledImages.of(data, count, batch, seed, AugmentationSettings(crop=1))
        for name, techniques in (("tuned", adamw(TUNED_LR)), ("probe", [*adamw(PROBE_LR), HeadOnly()])):
            model, objective = tuned(start, few, techniques, "patches", tuning, seed)
            numbers[f"{name}_{count}"] = few.accuracy(model, objective, tested)
    return numbers


def mae(
    seeds: int = 3,
    rates: tuple[float, ...] = (0.5, 0.75, 0.9),
    steps: int = 4000,
    tuning: int = 300,
    longer: int = 5,
    labels: tuple[int, ...] = (100, 300),
    data: str = "digits",
    patch: int = 2,
    depth: int = 4,
    width: int = 64,
    batch: int = 64,
    tested: int = 497,
    side: int = 96,
    paced: int = 9,
) -> Study:
    """Digits of which half, three quarters and nine tenths are removed; classifiers of 100 and of 300 labelled ones.

    Command   thrifty study mae
    Expect    at 75 % the encoder is 4 times as fast as with blanks, a step 3 times. With 100 labels 92 % told right
              after 50 %, 87 % after 75 %, 84 % after that with blanks and 66 % after 90 %; 73 % from scratch, and 83 %
              in five times as many steps (seed 0). Half an hour on two cores.
    """
    fixed = {
        "steps": steps, "tuning": tuning, "labels": list(labels), "data": data, "patch": patch, "depth": depth,
        "width": width, "batch": batch, "tested": tested, "side": side, "paced": paced,
    }  # fmt: skip
    scratch = {"rate": 0.0, "blanks": False, **fixed}
    few = min(labels)
    cases = {
        SCRATCH: scratch,
        LONGER: scratch | {"tuning": longer * tuning},
        BLANKS: {"rate": 0.75, "blanks": True, **fixed},
    } | {label_of(rate): {"rate": rate, "blanks": False, **fixed} for rate in rates}

    def faster(cells: Cells, rate: float, part: str) -> float:
        """How many times as fast as with blanks."""
        return cells[label_of(rate)][f"{part}_gain"]

    def gain(cells: Cells, rate: float, how: str, other: str = SCRATCH) -> float:
        """Points above another start, with the fewest labels."""
        return cells[label_of(rate)][f"{how}_{few}"] - cells[other][f"{how}_{few}"]

    accuracies = {
        f"{name}_{count}": MeasuredQuantity(f"test images told right, {words} {count} labelled ones, percent")
        for count in labels
        for name, words in (("tuned", "all weights tuned on"), ("probe", "a head alone trained on"))
    }
    return Study(
        measure=measure,
        cases=cases,
        quantities={
            **accuracies,
            "seconds": MeasuredQuantity("seconds in the steps of pre-training, one thread", of_machine=True),
            "step_gain": MeasuredQuantity("a step of the larger model: times as fast as with blanks", of_machine=True),
            "step_flops": MeasuredQuantity("its FLOPs"),
            "encoder_gain": MeasuredQuantity(
                "the larger encoder's two passes: times as fast as with blanks", of_machine=True
            ),
            "encoder_flops": MeasuredQuantity("their FLOPs"),
        },
        seeds=seeds,
        expect={
            "at 75 % the encoder is 3.5 times as fast or more, and the whole step 2.5 times": lambda c: (
                faster(c, 0.75, "encoder") > 3.5 and faster(c, 0.75, "step") > 2.5
            ),
            "the more is removed the faster, in the encoder and in the whole step": lambda c: all(
                faster(c, 0.9, part) > faster(c, 0.75, part) > faster(c, 0.5, part) > 1 for part in ("encoder", "step")
            ),
            f"with {few} labels 50 and 75 % are a better start than none, by 3 points and more": lambda c: (
                min(gain(c, rate, "tuned") for rate in (0.5, 0.75)) > 3
            ),
            f"with {few} labels 90 %, where one patch of 16 is left, is no better start than 75 %": lambda c: (
                gain(c, 0.9, "tuned") < gain(c, 0.75, "tuned")
            ),
            f"with {few} labels 75 % is above training from scratch {longer} times as long": lambda c: (
                gain(c, 0.75, "tuned", LONGER) > 0
            ),
            f"a head on frozen features, {few} labels: 75 % is 20 points above first values": lambda c: (
                gain(c, 0.75, "probe") > 20
            ),
            "leaving out blanks costs nothing at equal steps: within 3 points or above, tuned": lambda c: (
                gain(c, 0.75, "tuned", BLANKS) > -3
            ),
        },
        plots=[
            StudyPlot("tuned", f"Told right after tuning on {few} labels, percent", x="case", y=f"tuned_{few}"),
            StudyPlot("step", "A step: times as fast as with blanks, by FLOPs", x="step_flops", y="step_gain"),
            StudyPlot("encoder", "The encoder: times as fast, by FLOPs", x="encoder_flops", y="encoder_gain"),
        ],
        minutes=30,
    )


def label_of(rate: float) -> str:
    return f"{100 * rate:g} %"
