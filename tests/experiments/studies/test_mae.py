"""Study of masked autoencoders: expectations, labeled subsets, and the initialization of a classifier."""

import numpy as np
import torch

from thrifty.composition.compose import compose
from thrifty.data.train_split import DataSplit
from thrifty.experiments import studies
from thrifty.experiments.studies.mae import BLANKS, LONGER, SCRATCH, dropping
from thrifty.experiments.study import Cells
from thrifty.experiments.tasks.autoencoder_task import (
    AutoencoderSizes,
    EncoderPace,
    LabelledImages,
    adamw,
    masked,
    tuned,
)
from thrifty.experiments.tasks.whole_run import run_to_end
from thrifty.techniques.adapters.head_only import HeadOnly

TINY = AutoencoderSizes(patch=2, depth=1, width=32, decoder_depth=1, decoder_width=32)


def cells(tuned: tuple[float, ...], probe: tuple[float, ...], gains: tuple[float, ...]) -> Cells:
    """Return cells by case: from scratch, longer from scratch, with mask tokens, and 50, 75, 90 %."""
    labels = (SCRATCH, LONGER, BLANKS, "50 %", "75 %", "90 %")
    return {
        label: {"tuned_100": t, "probe_100": p, "encoder_gain": g, "step_gain": 0.8 * g}
        for label, t, p, g in zip(labels, tuned, probe, gains, strict=True)
    }


def test_expectations_can_hold_and_can_fail() -> None:
    study = studies.make("mae")
    assert len(study.cases) == 6
    good = cells((73, 83, 84, 84, 87, 66), (18, 28, 61, 70, 66, 38), (1.0, 1.0, 1.0, 2.1, 4.3, 9.5))
    assert all(holds(good) for holds in study.expect.values())
    alike = cells((74, 80, 80, 74, 74, 74), (25,) * 6, (1.0,) * 6)
    assert not any(holds(alike) for holds in study.expect.values())


def test_the_labelled_subset_depends_on_the_seed_only() -> None:
    one, again, other = (LabelledImages.of("digits", 40, 16, seed) for seed in (0, 0, 1))
    assert np.array_equal(one.train.contents.pixels, again.train.contents.pixels)
    assert not np.array_equal(one.train.contents.pixels, other.train.contents.pixels)
    assert len(one.train.contents) == 40 and one.train.batch == 16
    whole = {image.tobytes() for image in one.images.parts[DataSplit.TRAIN].pixels}
    assert {image.tobytes() for image in one.train.contents.pixels} <= whole
    assert LabelledImages.of("digits", 40, 64, 0).train.batch == 40


def test_a_classifier_copies_the_encoder() -> None:
    start, few = TINY.autoencoder(0, 8, 1), LabelledImages.of("digits", 20, 8, 0)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    for _ in range(2):
        model, objective = tuned(start, few, [*adamw(1e-2), HeadOnly()], "patches", 2, 0)
        assert 0 <= few.accuracy(model, objective, 50) <= 100
        assert torch.equal(model.blocks[0].mlp.up.weight, before["blocks.0.mlp.up.weight"])
    assert all(torch.equal(value, before[name]) for name, value in start.state_dict().items())


def test_pre_training_learns_with_and_without_mask_tokens() -> None:
    for blanks in (False, True):
        plain = masked(TINY, "digits", 32, 0.75, 0)
        run = compose(plain, [*adamw(5e-3), *dropping(blanks)], 60)
        begin, batch = run.start(), run.source.at(59)
        _, end = run_to_end(run, 0)
        with torch.no_grad():
            first, last = (
                float(run.objective.losses(run.objective.predict(state.model, batch), batch) @ batch.weight)
                for state in (begin, end)
            )
        assert last < 0.9 * first


def test_speedups_count_dropped_patches_in_alternating_runs() -> None:
    whole, dropped = (EncoderPace(TINY, 8, 2, 0.75, dropping(blanks)) for blanks in (True, False))
    one, other = whole.flops(), dropped.flops()
    assert other["encoder_flops"] < 0.4 * one["encoder_flops"]
    assert one["step_flops"] - one["encoder_flops"] < other["step_flops"] < one["step_flops"]
    turns: list[str] = []
    whole.step = lambda: turns.append("whole")  # type: ignore[method-assign]
    dropped.step = lambda: turns.append("dropped")  # type: ignore[method-assign]
    gains = dropped.gains(whole, 2)
    assert (
        turns == ["whole", "dropped"] * 3 and gains.keys() == {"step_gain", "encoder_gain"} and min(gains.values()) > 0
    )
