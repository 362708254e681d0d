"""Masked autoencoders: speedup of an encoder that omits masked patches, and value of pre-training with few labels.

Paper     He et al. 2021, Masked Autoencoders Are Scalable Vision Learners (MAE, arXiv 2111.06377): a speedup of 3 or
          more at a masking rate of 75 %, the best rate in the paper's ablation (unverified).
Note      Speedups are measured on a model larger than the trained autoencoders, with images of `side` pixels in patches
          of 8. The encoder has 6 blocks of width 192, and the decoder 2 of width 96. Speedups cover forward, backward
          and update on one thread. Classifiers start from the encoder of an autoencoder, or from scratch with equal
          steps or with `longer` times the steps. The head reads the mean over patches. Each seed selects other labeled
          images than the other seeds.
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
    """Return a trained autoencoder, and the seconds of its training steps."""
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
    """Return the accuracy of classifiers that start from an autoencoder, and the speedup and FLOPs of autoencoder
    training.

    If `rate` is 0, the classifiers start from an untrained encoder.
    """
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
    """Digits with half, three quarters and nine tenths of the patches masked; classifiers with 100 and 300 labels.

    Command   thrifty study mae
    Expect    At 75 %, the encoder is 4 times as fast as with mask tokens, and a step 3 times as fast. With 100 labels
              (seed 0), the accuracy is 92 % after masking 50 %, and 66 % after masking 90 %. After masking 75 %, it is
              87 % without mask tokens and 84 % with them. Training from scratch reaches 73 %, and 83 % with five times
              the steps. Duration: half an hour on two cores.
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
        """Return the speedup over an encoder with mask tokens, for the encoder or the step."""
        return cells[label_of(rate)][f"{part}_gain"]

    def gain(cells: Cells, rate: float, metric: str, other: str = SCRATCH) -> float:
        """Return the gain in accuracy over the initialization `other` in percentage points, with the fewest labels."""
        return cells[label_of(rate)][f"{metric}_{few}"] - cells[other][f"{metric}_{few}"]

    accuracies = {
        f"{name}_{count}": MeasuredQuantity(f"test accuracy with {words} {count} labelled images, percent")
        for count in labels
        for name, words in (("tuned", "all weights tuned on"), ("probe", "only a head trained on"))
    }
    return Study(
        measure=measure,
        cases=cases,
        quantities={
            **accuracies,
            "seconds": MeasuredQuantity("seconds in pre-training steps, one thread", of_machine=True),
            "step_gain": MeasuredQuantity("speedup of a step of the larger model over mask tokens", of_machine=True),
            "step_flops": MeasuredQuantity("FLOPs of a step of the larger model"),
            "encoder_gain": MeasuredQuantity(
                "speedup of the larger encoder's forward and backward pass over mask tokens", of_machine=True
            ),
            "encoder_flops": MeasuredQuantity("FLOPs of the larger encoder's forward and backward pass"),
        },
        seeds=seeds,
        expect={
            "at 75 %, the encoder is more than 3.5 times as fast, and the whole step more than 2.5 times": lambda c: (
                faster(c, 0.75, "encoder") > 3.5 and faster(c, 0.75, "step") > 2.5
            ),
            "a higher rate is faster, in the encoder and in the whole step": lambda c: all(
                faster(c, 0.9, part) > faster(c, 0.75, part) > faster(c, 0.5, part) > 1 for part in ("encoder", "step")
            ),
            f"with {few} labels, pre-training at 50 and at 75 % gains more than 3 points over none": lambda c: (
                min(gain(c, rate, "tuned") for rate in (0.5, 0.75)) > 3
            ),
            f"with {few} labels, 90 %, which keeps one patch of 16, is a worse start than 75 %": lambda c: (
                gain(c, 0.9, "tuned") < gain(c, 0.75, "tuned")
            ),
            f"with {few} labels, 75 % is better than training from scratch {longer} times as long": lambda c: (
                gain(c, 0.75, "tuned", LONGER) > 0
            ),
            f"head on frozen features, {few} labels: 75 % is 20 points above an untrained encoder": lambda c: (
                gain(c, 0.75, "probe") > 20
            ),
            "leaving out mask tokens costs less than 3 points after tuning, at equal steps": lambda c: (
                gain(c, 0.75, "tuned", BLANKS) > -3
            ),
        },
        plots=[
            StudyPlot("tuned", f"Test accuracy after tuning on {few} labels, percent", x="case", y=f"tuned_{few}"),
            StudyPlot("step", "Speedup of a step over mask tokens, by FLOPs", x="step_flops", y="step_gain"),
            StudyPlot("encoder", "Speedup of the encoder, by FLOPs", x="encoder_flops", y="encoder_gain"),
        ],
        minutes=30,
    )


def label_of(rate: float) -> str:
    return f"{100 * rate:g} %"
