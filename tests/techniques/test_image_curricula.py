"""Curricula from small to full images, by averaged pixels or low frequencies."""

import gc
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from image_runs import tiny_vit
from tiny_runs import advance, plain_run, technique, tiny_model
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.run_notes import collect_notes
from thrifty.core.technique import Technique
from thrifty.kernels.image_resizing import resize
from thrifty.kernels.low_pass import crop_spectrum
from thrifty.modeling.patch_grid import accept_other_sizes
from thrifty.objectives.classification import Classification
from thrifty.techniques.curriculum.low_frequency import LowFrequencyCurriculum
from thrifty.techniques.curriculum.resolution import ResolutionCurriculum
from thrifty.techniques.growth.auto_grow import AutoGrow

SIDE = 16


class Images(BatchSource):
    """Random images of two classes with different brightness."""

    batch = 4

    def __init__(self, colours: int = 3):
        self.shape = (colours, SIDE, SIDE) if colours else (SIDE, SIDE)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        labels = torch.arange(start, stop) % 2
        noise = torch.randn(stop - start, *self.shape, generator=torch.Generator().manual_seed(step))
        inputs = noise + labels.view(-1, *[1] * len(self.shape))
        return Batch({"inputs": inputs, "labels": labels}, torch.full((stop - start,), 1 / self.batch))


class Patches(nn.Module):
    """A classifier of the mean of patches of 4 × 4 pixels, for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.blocks = tiny_model(style="gpt").blocks
        self.head = nn.Linear(32, 2)
        self.seen: list[tuple[bool, int]] = []

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).mT
        self.seen.append((self.training, x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class NamedSizes(NamedTuple):
    image_size: list[int]


class PlacedPatches(Patches):
    """A classifier with a class token and learned positions. It adds all positions, or the first ones (`sliced`)."""

    def __init__(self, height: int, width: int, sliced: bool):
        super().__init__()
        self.start, self.sliced = nn.Parameter(torch.randn(1, 1, 32)), sliced
        self.places = nn.Parameter(torch.randn(1, 1 + height * width, 32))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).mT
        x = torch.cat((self.start.expand(len(x), -1, -1), x), 1)
        x = x + (self.places[:, : x.shape[1]] if self.sliced else self.places)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def run_of(one: Technique, steps: int, source: BatchSource | None = None) -> Run:
    torch.manual_seed(0)
    start = Patches()

    def build() -> nn.Module:
        made = Patches()
        made.load_state_dict(start.state_dict())
        return made

    return compose(BaseRun(build, source or Images(), Classification()), [one, technique("optimizers.adamw")], steps)


def sides(run: Run, steps: int) -> list[int]:
    return [run.source.at(step)["inputs"].shape[-1] for step in range(steps)]


def test_resolution_rises_in_phases_and_ends_full() -> None:
    run = run_of(ResolutionCurriculum(start=0.5, until=0.8, phases=2, multiple=4), 10)
    assert sides(run, 10) == [8] * 4 + [12] * 4 + [16] * 2
    plain = Images().at(5)
    assert torch.equal(run.source.at(5)["inputs"], resize(plain["inputs"], 12, 12))
    assert torch.equal(run.source.at(5)["labels"], plain["labels"])


def test_low_frequencies_come_first_until_their_moments() -> None:
    run = run_of(LowFrequencyCurriculum(multiple=4), 10)
    assert sides(run, 10) == [12] * 6 + [12] * 2 + [16] * 2  # 160 and 192 of 224 are 11.4 and 13.7 of 16
    actual = sides(run_of(LowFrequencyCurriculum(fractions=(0.25, 0.5), until=(0.3, 0.5), multiple=4), 10), 10)
    assert actual == [4] * 3 + [8] * 2 + [16] * 5
    assert torch.equal(run.source.at(2)["inputs"], crop_spectrum(Images().at(2)["inputs"], 12, 12))


@pytest.mark.parametrize(
    "one", [ResolutionCurriculum(until=3, multiple=4), LowFrequencyCurriculum(until=(2, 3), multiple=4)]
)
def test_training_uses_small_images_and_evaluation_full_ones(one: Technique) -> None:
    run = run_of(one, 4)
    state = run.start()
    advance(run, state)
    assert isinstance(state.model, Patches)
    trained = [patches for training, patches in state.model.seen if training]
    assert trained[0] < trained[-1] == 16
    batch = run.plain.source.at(0)
    state.model.eval()
    run.eval_objective.predict(state.model, batch)
    assert state.model.seen[-1] == (False, 16)


@pytest.mark.parametrize(
    "one", [ResolutionCurriculum(until=2, multiple=4), LowFrequencyCurriculum(until=(1, 2), multiple=4)]
)
def test_grayscale_images_are_supported(one: Technique) -> None:
    assert one.batches(Images(0)).at(0)["inputs"].shape[1:] < (SIDE, SIDE)


@pytest.mark.parametrize("one", [ResolutionCurriculum(), LowFrequencyCurriculum()])
def test_texts_are_refused(one: Technique) -> None:
    with pytest.raises(RefusedError, match=rf"{one.name} requires batches of images; these have tokens") as refused:
        one.batches(plain_run().source).at(0)
    assert f"--without {one.name}" in refused.value.fix


@pytest.mark.parametrize(
    "one", [ResolutionCurriculum(until=5, multiple=16), LowFrequencyCurriculum(until=(5, 8), multiple=16)]
)
def test_small_images_stay_full_with_a_note(one: Technique) -> None:
    with collect_notes() as notes:
        assert torch.equal(one.batches(Images()).at(0)["inputs"], Images().at(0)["inputs"])
    assert notes == ["images of 16 x 16 have their full size from the start: lower multiple or the initial size"]
    with collect_notes() as notes:
        replace(one, multiple=4).batches(Images()).at(9)
    assert not notes


def test_integer_images_are_refused() -> None:
    class Bytes(Images):
        def rows(self, step: int, start: int, stop: int) -> Batch:
            batch = super().rows(step, start, stop)
            return Batch(batch.fields | {"inputs": batch["inputs"].byte()}, batch.weight)

    with pytest.raises(RefusedError, match="not floats"):
        ResolutionCurriculum().batches(Bytes()).at(0)


def test_fractions_and_moments_must_match() -> None:
    with pytest.raises(UsageError, match="is not 2 rising ends"):
        LowFrequencyCurriculum(until=(0.5,))
    with pytest.raises(UsageError, match="rising"):
        LowFrequencyCurriculum(until=(0.8, 0.6))


def test_automatic_growth_tries_resolutions() -> None:
    run = run_of(AutoGrow(stages=3, until=12, search=2, depths=1, lengths=2, multiple=4), 12)
    state = run.start()
    patches = []
    for step in range(12):
        advance(run, state, step + 1)
        assert isinstance(state.model, Patches)
        patches.append(state.model.seen[-1][1])
    assert patches[:6] == [4] * 4 + [16, 4] and patches[8:] == [16] * 4
    chosen = next(entry.decision for entry in state.log if "losses" in entry.decision)
    assert chosen["tried"] == [[1.0, 1.0], [1.0, 0.5]]
    # a quarter of the patches cost less than a quarter: attention is quadratic
    assert 4 * chosen["times"][1] < chosen["times"][0] < 5 * chosen["times"][1]


def test_automatic_growth_of_indivisible_images_is_in_depth() -> None:
    run = run_of(AutoGrow(stages=3, until=6, search=1, depths=2, lengths=2, multiple=SIDE), 6)
    state = run.start()
    advance(run, state, 3)
    assert state.log[-1].decision["sizes"] == [[1.0, 1.0], [0.5, 1.0]]


@pytest.mark.parametrize("sliced", [True, False])
@pytest.mark.parametrize(
    ("full", "grid"),
    [
        ((4, 4), (2, 2)),
        ((4, 16), (2, 8)),
        ((6, 8), (3, 4)),
        ((6, 8), (4, 5)),  # 49 positions could be 7 x 7
        ((7, 7), (4, 8)),  # 50 positions could be 5 x 10
        ((7, 14), (4, 7)),  # half of each side, rounded
        ((8, 8), (4, 8)),
        ((8, 8), (4, 5)),
        ((8, 8), (6, 8)),
        ((8, 8), (4, 9)),  # as many as 6 x 6
    ],
)
@torch.no_grad()
def test_positions_are_interpolated_for_small_images(full: tuple, grid: tuple, sliced: bool) -> None:
    model, small = PlacedPatches(*full, sliced), PlacedPatches(*grid, False)
    images = torch.randn(2, 3, *(4 * side for side in full))
    expected = model(images)
    first, places = model.places.split([1, full[0] * full[1]], 1)
    resized = F.interpolate(places.mT.unflatten(2, full), grid, mode="bicubic", align_corners=False)
    small.load_state_dict({**model.state_dict(), "places": torch.cat((first, resized.flatten(2).mT), 1)})
    accept_other_sizes(model, "curriculum.resolution")
    smaller = torch.randn(2, 3, *(4 * side for side in grid))
    for _ in range(2):
        torch.testing.assert_close(model(smaller), small(smaller))
    assert torch.equal(model(images), expected)


@torch.no_grad()
def test_the_way_to_call_a_model_is_remembered() -> None:
    model, calls = PlacedPatches(6, 8, sliced=False), []
    model.patch.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    accept_other_sizes(model, "curriculum.resolution")
    images = torch.randn(2, 3, 12, 16)
    known = ref(images)
    gc.disable()
    try:
        model(images)
        del images
        assert len(calls) > 1 and known() is None  # failed attempts keep no tensors
    finally:
        gc.enable()
    calls.clear()
    model(torch.randn(2, 3, 12, 16))
    assert len(calls) == 1


class ConvolutionStem(PlacedPatches):
    def __init__(self) -> None:
        super().__init__(6, 8, sliced=False)
        self.patch = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(), nn.Conv2d(8, 32, 4, 4)
        )


def test_failed_calls_leave_no_effects_in_the_model_or_draws() -> None:
    model, images, smaller = ConvolutionStem(), torch.randn(2, 3, 24, 32), torch.randn(2, 3, 12, 16)
    accept_other_sizes(model, "curriculum.resolution")
    resumed = deepcopy(model)
    model(smaller)  # finds the way
    model.load_state_dict(resumed.state_dict())
    start = torch.get_rng_state()
    expected, after = (model(images), model(smaller)), torch.get_rng_state()
    torch.set_rng_state(start)
    outputs = resumed(images), resumed(smaller)
    assert all(map(torch.equal, outputs, expected))
    assert torch.equal(torch.get_rng_state(), after)
    assert all(map(torch.equal, resumed.buffers(), model.buffers()))
    outputs[0].sum().backward()


@pytest.mark.parametrize("config", [{"image_size": 16}, SimpleNamespace(image_size=[16]), NamedSizes([16, 16])])
@torch.no_grad()
def test_sizes_are_read_from_configs_of_any_kind(config: object) -> None:
    model = PlacedPatches(4, 4, sliced=False)
    model.config = config
    accept_other_sizes(model, "curriculum.resolution")
    assert model(torch.randn(2, 3, 8, 12)).shape == (2, 2)


@torch.no_grad()
def test_a_model_that_interpolates_its_positions_is_unchanged() -> None:
    model, images = tiny_vit(2), torch.randn(2, 1, 4, 16)  # 2 x 8 patches are as many as 4 x 4
    torch.nn.init.normal_(model.embedding.position)
    expected = model(images)
    accept_other_sizes(model, "curriculum.resolution")
    assert torch.equal(model(images), expected)
