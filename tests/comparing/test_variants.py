"""What an arm can be, and which may not be compared."""

from dataclasses import replace
from pathlib import Path

import pytest
from simulated_runs import arms

from thrifty.comparing.variants import read_variants
from thrifty.core.errors import UsageError
from thrifty.recipes import load_tables
from thrifty.recipes.recipe_layers import RecipeLayers
from thrifty.recipes.recipe_toml import recipe_to_data, write_recipe
from thrifty.recipes.vision_recipes import vit_digits


def names(arm) -> list[str]:
    return [technique.name for technique in arm.recipe.techniques]


def test_an_arm_adds_removes_and_sets() -> None:
    baseline, arm = arms("-optimizers.adamw +optimizers.lion:lr=2e-4,betas=[0.9,0.98] data.batch=16")
    assert "optimizers.adamw" in names(baseline) and "optimizers.adamw" not in names(arm)
    assert arm.optimizer is not None and arm.optimizer.betas == (0.9, 0.98)
    assert (arm.rate, arm.recipe.data.batch, baseline.recipe.data.batch) == (2e-4, 16, 64)
    assert arm.against(baseline) == {"added": ["optimizers.lion"], "removed": ["optimizers.adamw"], "changed": []}


def test_an_arm_may_be_a_recipe_and_have_a_name() -> None:
    baseline, arm, other = arms("small steps: vit-digits techniques.optimizers.adamw.lr=1e-3", "+growth.stacking")
    assert (arm.label, other.label, arm.folder, other.folder) == ("small steps", "+growth.stacking", "arm-1", "arm-2")
    assert arm.against(baseline) == {"added": [], "removed": [], "changed": ["optimizers.adamw"]}


def test_an_arm_may_be_a_file_whose_name_has_spaces(tmp_path: Path) -> None:
    file = tmp_path / "two words" / "of a plan.toml"
    file.parent.mkdir()
    file.write_text(write_recipe(replace(vit_digits(), seed=7)))
    lay = lambda name: RecipeLayers().override(name, load_tables(name))  # noqa: E731
    baseline = RecipeLayers().override("vit-digits", recipe_to_data(vit_digits()))
    for text, label in ((f"planned: {file}", "planned"), (str(file), str(file))):
        _, arm = read_variants([text], baseline, lay)
        assert (arm.label, arm.recipe.seed) == (label, 7)


def test_a_rate_is_changed_alone() -> None:
    baseline = arms("data.batch=16")[0]
    tried = baseline.at_rate(0.5)
    assert tried.rate == baseline.rate / 2
    assert names(tried) == names(baseline)
    assert baseline.at_rate(1) is baseline


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("name: ", "is empty"),
        ("data.batch=16 stacking", "'stacking' changes nothing"),
        ("--seds 3", "--seds is no option"),
        ("-optimizers.lion", "did you mean"),
        ("+growth.staking", "did you mean"),
        ("vit-digits", "is the same run as 'baseline'"),
        ("data.size=16", "judged on something else"),
        ("objective.label_smoothing=0.1", "judged on something else"),
        ("budget.steps=80 data.batch=16", "cannot be of one arm"),
        ("mesh.replicate=2 +parallelism.replicate", "has a mesh"),
    ],
)
def test_what_is_no_arm_is_refused_with_what_to_do(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        arms(text)
    assert refused.value.fix


def test_no_arm_and_two_alike_are_refused() -> None:
    with pytest.raises(UsageError, match="nothing to compare"):
        arms()
    with pytest.raises(UsageError, match=r"the same run as 'data\.batch=16'"):
        arms("data.batch=16", "again: data.batch=16")
    with pytest.raises(UsageError, match="two arms are called 'one'"):
        arms("one: data.batch=16", "one: data.batch=8")


def test_what_is_changed_of_an_arm_leaves_the_baseline_as_it_is() -> None:
    layers = RecipeLayers().override("recipe", recipe_to_data(vit_digits()))
    read_variants(["-optimizers.adamw +optimizers.lion"], layers, lambda name: layers)
    assert layers.recipe() == vit_digits()
