"""The lottery: rounds, rewinding and controls as documented; after a kill the same command ends with the same bits."""

import gc
import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandLine, assert_equal, kill, wait_until, write_corpus
from torch import Tensor, nn

from thrifty.core.errors import UsageError
from thrifty.core.recipe import Budget, CheckpointSettings, DataSettings, EvaluationSettings, ModelSettings, Recipe
from thrifty.core.state import fill_tensor
from thrifty.core.user_objects import UserObjects
from thrifty.experiments.lottery_rounds import LotterySettings, run_lottery
from thrifty.experiments.mask_export import export_masks, masks_of
from thrifty.recipes.recipe_toml import read_recipe, write_recipe
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.schedules.linear import LinearDecay
from thrifty.techniques.sparsity.mask_from_file import density_of, read_mask_file
from thrifty.techniques.sparsity.rigl import Rigl
from thrifty.training import checkpoint
from thrifty.training.loop import train
from thrifty.training.run_setup import prepare_run

pytestmark = pytest.mark.slow

STEPS, REWIND = 6, 2
LOTTERY = LotterySettings(rounds=1, prune=0.5, rewind=REWIND, controls=("random-mask", "reinitialise"))
LONGER = replace(LOTTERY, rounds=2, controls=())


def newest(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    return checkpoint.load(run / "checkpoints", step).tensors


@pytest.fixture(scope="module")
def recipe(common_folder: Path) -> Recipe:
    return Recipe(
        name="tiny",
        model=ModelSettings(preset="llama-nano", width=16, depth=1, heads=2),
        data=DataSettings(source=str(common_folder / "corpus"), vocabulary=300, length=16, batch=4),
        budget=Budget(steps=STEPS),
        evaluation=EvaluationSettings(every=100, examples=4),
        checkpoints=CheckpointSettings(every=4, keep=1),
        device="cpu",
        techniques=(AdamW(lr=1e-2), LinearDecay()),
    )


@pytest.fixture(scope="module")
def played(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a lottery of one round with its controls, then one more without."""
    runs = tmp_path_factory.mktemp("lottery") / "runs"
    first = run_lottery(recipe, LOTTERY, runs, quiet=True)
    result = run_lottery(recipe, LONGER, runs, quiet=True)
    assert result["rounds"][:2] == first["rounds"]
    return runs, result


def test_every_round_halves_the_weights_in_an_ordinary_run(played: tuple[Path, dict[str, Any]]) -> None:
    runs, result = played
    assert result["status"] == "finished"
    assert [each["density"] for each in result["rounds"]] == [1.0, 0.5, 0.25]
    kinds = [sorted(each["runs"]) for each in result["rounds"]]
    assert kinds == [["ticket"], ["random-mask", "reinitialise", "ticket"], ["ticket"]]
    for number in (1, 2):
        before, after = newest(runs / f"tiny-round-{number - 1}"), newest(runs / f"tiny-round-{number}")
        masks, earlier = masks_of(after), masks_of(before)
        assert density_of(masks) == 0.5**number
        sizes = {name: before[f"parameters/{name}"].abs() for name in masks}
        kept = torch.cat([size[masks[name]] for name, size in sizes.items()])
        gone = torch.cat([
            size[~masks[name] & earlier.get(name, torch.ones_like(masks[name]))] for name, size in sizes.items()
        ])  # fmt: skip
        assert gone.max() <= kept.min()
        assert len(gone) == len(kept)
    saved = json.loads((runs / "tiny-lottery" / "lottery.json").read_text())
    assert saved == {name: value for name, value in result.items() if name != "folder"}


def test_a_ticket_starts_from_the_dense_runs_early_state(
    played: tuple[Path, dict[str, Any]],
) -> None:
    """Reproduced step by step: weights, moments, age and step of the dense run's checkpoint under the ticket's mask."""
    runs, _ = played
    recipe = read_recipe(runs / "tiny-round-2" / "recipe.toml")
    prepared = prepare_run(recipe, quiet=True)
    state = prepared.run.init_state()
    early = checkpoint.load(runs / "tiny-round-0" / "checkpoints", REWIND)
    for name, tensor in state.tensors().items():
        if "masks.mask" not in name:
            fill_tensor(tensor, early.tensors[name])
    state.load_scalars(early.scalars)
    assert state.optimizer is not None and state.optimizer.born == 0
    state.optimizer.apply_constraints()
    assert [record.step for record in train(prepared.run, state, recipe.seed)] == [3, 4, 5, 6]
    loaded = newest(runs / "tiny-round-2")
    assert_equal({name: loaded[name] for name in state.tensors()}, state.tensors())


def test_controls_have_as_many_weights(
    played: tuple[Path, dict[str, Any]],
) -> None:
    runs, _ = played
    ticket, other, same = (
        masks_of(newest(runs / f"tiny-round-1{name}")) for name in ("", "-random-mask", "-reinitialise")
    )
    for name, mask in ticket.items():
        assert int(other[name].sum()) == int(mask.sum()) and not torch.equal(other[name], mask)
        assert torch.equal(same[name], mask)
    first = {
        name: (runs / name / "records.jsonl").read_text() for name in ("tiny-round-1", "tiny-round-1-reinitialise")
    }
    steps = {
        name: [line["step"] for line in map(json.loads, text.splitlines()) if line["kind"] == "step"]
        for name, text in first.items()
    }
    assert steps == {"tiny-round-1": [3, 4, 5, 6], "tiny-round-1-reinitialise": [1, 2, 3, 4, 5, 6]}


def test_finished_rounds_are_not_repeated(played: tuple[Path, dict[str, Any]], recipe: Recipe) -> None:
    runs, result = played
    before = {path: path.stat().st_mtime_ns for path in runs.glob("tiny-round-*/records.jsonl")}
    said: list[str] = []
    assert run_lottery(recipe, LONGER, runs, quiet=True, say=said.append) == result
    assert not any("round" in text for text in said)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_two_lotteries_are_not_mixed(played: tuple[Path, dict[str, Any]], recipe: Recipe) -> None:
    runs, _ = played
    with pytest.raises(UsageError, match=r"different settings: lottery.prune: 0.5 → 0.3"):
        run_lottery(recipe, replace(LOTTERY, prune=0.3), runs, quiet=True)
    with pytest.raises(UsageError, match=r"different settings: recipe\.data\.batch: 4 → 8"):
        run_lottery(replace(recipe, data=replace(recipe.data, batch=8)), LOTTERY, runs, quiet=True)


def test_a_lottery_is_not_continued_on_other_data(recipe: Recipe, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    own = replace(recipe, data=replace(recipe.data, source=str(tmp_path / "corpus")))
    lottery, runs = replace(LOTTERY, controls=()), tmp_path / "runs"
    run_lottery(own, lottery, runs, quiet=True)
    (tmp_path / "corpus" / "more.py").write_text("whales = 3\n" * 200)
    with pytest.raises(UsageError, match=r"tiny-lottery' was started with other data or weights"):
        run_lottery(own, lottery, runs, quiet=True)


def test_impossible_lotteries_are_refused(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"lottery: prune is 1\.0"):
        LotterySettings(prune=1.0)
    with pytest.raises(UsageError, match="where is not a regular expression"):
        LotterySettings(where="(")
    for moment in (-1, 1.0):
        with pytest.raises(UsageError, match="before the last step"):
            LotterySettings(rewind=moment)
    with pytest.raises(UsageError, match="cannot start at step 6 of 6"):
        run_lottery(recipe, replace(LOTTERY, rewind=STEPS), tmp_path, quiet=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="without torchrun"):
        run_lottery(recipe, LOTTERY, tmp_path, quiet=True)


def test_impossible_tickets_are_refused_before_any_write(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no matrix of the model of tiny has a name that matches 'nowhere'"):
        run_lottery(recipe, replace(LOTTERY, where="nowhere"), tmp_path, quiet=True)
    with pytest.raises(UsageError, match="both decide the weight masks"):
        run_lottery(replace(recipe, techniques=(*recipe.techniques, Rigl())), LOTTERY, tmp_path, quiet=True)
    assert not any(tmp_path.iterdir())


def test_the_first_model_is_freed_before_the_rounds(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[weakref.ref[nn.Module]] = []

    def build() -> nn.Module:
        model = prepare_run(recipe, steps=1, quiet=True).run.plain.build()
        built.append(weakref.ref(model))
        return model

    def look(*args: Any) -> dict[str, Any]:
        gc.collect()
        return {"kept": [model() for model in built if model() is not None]}

    monkeypatch.setattr("thrifty.experiments.lottery_rounds._Rounds.run_all", look)
    assert run_lottery(replace(recipe, objects=UserObjects(model=build)), LOTTERY, tmp_path, quiet=True) == {"kept": []}
    assert len(built) == 2  # one is on fake tensors, for the search for indices without a row


def test_runs_of_no_known_lottery_are_not_its_rounds(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "tiny-round-0").mkdir()
    with pytest.raises(UsageError, match=r"tiny-round-0' exists"):
        run_lottery(recipe, LOTTERY, tmp_path, quiet=True)
    assert not (tmp_path / "tiny-lottery").exists()


def test_the_masks_of_a_run_are_a_ticket_for_other_runs(played: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    runs, _ = played
    density, sha256 = export_masks(runs / "tiny-round-2", tmp_path / "kept.safetensors")
    assert density == 0.25
    ticket, masks = read_mask_file(str(tmp_path / "kept.safetensors"), sha256), masks_of(newest(runs / "tiny-round-2"))
    assert ticket.keys() == masks.keys() and all(torch.equal(ticket[name], masks[name]) for name in masks)
    with pytest.raises(UsageError, match="exists already"):
        export_masks(runs / "tiny-round-2", tmp_path / "kept.safetensors")
    with pytest.raises(UsageError, match="has no masks"):
        export_masks(runs / "tiny-round-0", tmp_path / "other.safetensors")


def test_rounds_do_not_stop_early(recipe: Recipe, tmp_path: Path) -> None:
    """A falling loss counts as no improvement here."""
    settings = EvaluationSettings(every=1, examples=4, patience=1, lower_is_better=False)
    result = run_lottery(replace(recipe, evaluation=settings), replace(LOTTERY, controls=()), tmp_path, quiet=True)
    assert [each["runs"]["ticket"]["steps"] for each in result["rounds"]] == [STEPS, STEPS]


def test_a_fraction_without_checkpoint_is_the_nearest_one(recipe: Recipe, tmp_path: Path) -> None:
    """A budget in seconds may change the number of steps after the checkpoint of the fraction was due."""
    longer = replace(recipe, checkpoints=replace(recipe.checkpoints, extra_steps=(3,)))
    lottery, texts = replace(LOTTERY, rewind=REWIND / STEPS, controls=()), []

    def say(text: str) -> None:
        texts.append(text)
        if text.startswith("round 1"):
            shutil.rmtree(tmp_path / "tiny-round-0" / "checkpoints" / "step-00000002")

    run_lottery(longer, lottery, tmp_path, quiet=True, say=say)
    assert texts[-1] == "tickets start from step 3, the checkpoint nearest to step 2 of 6"
    records = map(json.loads, (tmp_path / "tiny-round-1" / "records.jsonl").read_text().splitlines())
    assert [record["step"] for record in records if record["kind"] == "step"] == [4, 5, 6]


def assert_same_lottery(found: Path, expected: Path, steps: int) -> None:
    """Assert that both rounds' runs, the ticket and the reported results are equal bit for bit."""
    for name in ("tiny-round-0", "tiny-round-1"):
        assert_equal(newest(found / name, steps), newest(expected / name, steps))
    tickets = [(runs / "tiny-lottery" / "round-1.safetensors").read_bytes() for runs in (found, expected)]
    assert tickets[0] == tickets[1]
    rounds = [json.loads((runs / "tiny-lottery" / "lottery.json").read_text())["rounds"] for runs in (found, expected)]
    assert rounds[0] == rounds[1] and len(rounds[0]) == 2


@pytest.mark.slow
def test_kill_before_the_first_checkpoint_ends_bit_identical(
    recipe: Recipe, thrifty: CommandLine, tmp_path: Path
) -> None:
    steps, whole, killed = 40, tmp_path / "whole", tmp_path / "killed"
    longer = replace(recipe, budget=Budget(steps=steps), checkpoints=CheckpointSettings(every=30, keep=1))
    lottery = replace(LOTTERY, controls=())

    def stop(text: str) -> None:
        if text.startswith("round 1"):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run_lottery(longer, lottery, whole, quiet=True, say=stop)
    assert not (whole / "tiny-round-1").exists()
    run_lottery(longer, lottery, whole, quiet=True)
    (tmp_path / "recipe.toml").write_text(write_recipe(longer))
    words = ["lottery", tmp_path / "recipe.toml", "--rounds", "1", "--prune-fraction", "0.5", "--rewind", str(REWIND)]
    process = thrifty.start(*words, "--runs", killed, "--quiet")
    assert wait_until((killed / "tiny-round-1" / "recipe.toml").exists, process)
    assert process.poll() is None
    kill(process)
    assert not list((killed / "tiny-round-1" / "checkpoints").glob("step-????????"))
    run_lottery(longer, lottery, killed, quiet=True)
    assert_same_lottery(killed, whole, steps)


@pytest.mark.slow
def test_kills_in_both_rounds_end_bit_identical(thrifty: CommandLine) -> None:
    words = ["lottery", *thrifty.recipe("tiny", "--quiet", steps=40, checkpoints__every=5, evaluation__every=100)[1:]]
    words += ["--rounds", "1", "--rewind", "3"]
    thrifty(*words, "--runs", "whole")
    whole, killed = thrifty.folder / "whole", thrifty.folder / "killed"
    for there in (
        killed / "tiny-round-0" / "checkpoints" / "step-00000010",
        killed / "tiny-lottery" / "round-1.safetensors",
        killed / "tiny-round-1" / "recipe.toml",
    ):
        process = thrifty.start(*words, "--runs", "killed")
        assert wait_until(there.exists, process)
        kill(process)
    thrifty(*words, "--runs", "killed")
    assert_same_lottery(killed, whole, 40)
