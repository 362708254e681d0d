"""Forms of a variant, and refusals of variants that cannot be compared."""

from dataclasses import replace
from pathlib import Path

import pytest
from simulated_runs import variants

from thrifty.comparing.variants import Change, variants_of
from thrifty.core.errors import TYPED, UsageError
from thrifty.recipes import load_recipe
from thrifty.recipes.recipe_toml import write_recipe
from thrifty.recipes.typed_variants import read_variants
from thrifty.recipes.vision_recipes import vit_digits
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.optimizers.lion import Lion
from thrifty.techniques.optimizers.muon import Muon


def names(variant) -> list[str]:
    return [technique.name for technique in variant.recipe.techniques]


def test_variant_adds_removes_and_sets() -> None:
    baseline, variant = variants(
        "--without optimizers.adamw --with optimizers.lion:lr=2e-4,betas=[0.9,0.98] --set data.batch=16"
    )
    assert "optimizers.adamw" in names(baseline) and "optimizers.adamw" not in names(variant)
    assert variant.optimizer is not None and variant.optimizer.betas == (0.9, 0.98)
    assert (variant.rate, variant.recipe.data.batch, baseline.recipe.data.batch) == (2e-4, 16, 64)
    assert variant.against(baseline) == {"added": ["optimizers.lion"], "removed": ["optimizers.adamw"], "changed": []}


def test_variant_may_be_a_recipe_and_have_a_name() -> None:
    baseline, variant, other = variants(
        "small steps: vit-digits --set techniques.optimizers.adamw.lr=1e-3", "--with=growth.stacking"
    )
    assert (variant.label, other.label, variant.folder, other.folder) == (
        "small steps",
        "--with=growth.stacking",
        "variant-1",
        "variant-2",
    )
    assert variant.against(baseline) == {"added": [], "removed": [], "changed": ["optimizers.adamw"]}


def test_variant_may_be_a_file_with_spaces_in_its_name(tmp_path: Path) -> None:
    file = tmp_path / "two words" / "of a plan.toml"
    file.parent.mkdir()
    file.write_text(write_recipe(replace(vit_digits(), seed=7)))
    baseline = vit_digits()
    for text, label in ((f"planned: {file}", "planned"), (str(file), str(file))):
        _, variant = variants_of(baseline, read_variants([text], lambda name: load_recipe(name, name).recipe()))
        assert (variant.label, variant.recipe.seed) == (label, 7)


def test_learning_rate_is_changed_alone() -> None:
    baseline = variants("--set data.batch=16")[0]
    tried = baseline.at_rate(0.5)
    assert tried.rate == baseline.rate / 2
    assert names(tried) == names(baseline)
    assert baseline.at_rate(1) is baseline


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("name: ", "is empty"),
        ("--set data.batch=16 stacking", "'stacking' is not one of --with"),
        ("--wiht growth.stacking", r"'--wiht' is not one of(.|\n)*did you mean '--with'"),
        ("-optimizers.adamw", r"is not one of(.|\n)*--without optimizers\.adamw"),
        ("+optimizers.lion:lr=2e-4", r"is not one of(.|\n)*--with optimizers\.lion:lr=2e-4"),
        ("data.batch=16", r"is not one of(.|\n)*--set data\.batch=16"),
        ("--set data.batch=16 --with", "--with has no value"),
        ("--with 'growth.stacking", "No closing quotation"),
        ("--without optimizers.lion", "did you mean"),
        ("--with growth.staking", "did you mean"),
        ("vit-digits", "is the same run as 'baseline'"),
        ("--set data.size=16", "is not comparable"),
        ("--set objective.label_smoothing=0.1", "is not comparable"),
        ("--set budget.steps=80 --set data.batch=16", "cannot differ between variants"),
        ("--set mesh.replicate=2 --with parallelism.replicate", "has a mesh"),
    ],
)
def test_invalid_variant_is_refused_with_a_fix(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TYPED, "1")
    with pytest.raises(UsageError, match=message) as refused:
        variants(text)
    assert refused.value.fix


def test_missing_and_duplicate_variants_are_refused() -> None:
    with pytest.raises(UsageError, match="no variant besides"):
        variants()
    with pytest.raises(UsageError, match=r"the same run as '--set data\.batch=16'"):
        variants("--set data.batch=16", "again: --set data.batch=16")
    with pytest.raises(UsageError, match="two variants are called 'one'"):
        variants("one: --set data.batch=16", "one: --set data.batch=8")


def test_names_short_names_and_objects_are_equal_changes() -> None:
    spelled: list[list[Change]] = [
        ["-optimizers.adamw", "optimizers.lion:lr=2e-4", "data.batch=16"],
        ["-adamw", "lion:lr=2e-4", "data.batch=16"],
        ["-adamw", Lion(lr=2e-4), "data.batch=16"],
        [Lion(lr=2e-4), "data.batch=16"],
        ["lion:lr=2e-4", "data.batch=16"],
    ]
    first, *others = (variants_of(vit_digits(), {"lion": changes})[1].recipe for changes in spelled)
    assert all(other == first for other in others) and first.data.batch == 16
    (_, plain) = variants_of(vit_digits(), {"lion": Lion})
    assert plain.optimizer == Lion()


def test_variant_may_be_a_recipe_or_start_from_one() -> None:
    other = replace(vit_digits(), seed=7)
    _, whole, changed = variants_of(vit_digits(), {"seed": other, "both": [other, "data.batch=16"]})
    assert (whole.recipe.seed, changed.recipe.seed, changed.recipe.data.batch) == (7, 7, 16)


@pytest.mark.parametrize("muon", [Muon(lr=2e-3), Muon(lr=2e-3, adamw_lr=1e-3)])
def test_learning_rates_of_an_optimizer_are_tuned_together(muon: Muon) -> None:
    """A comparison that tuned only Muon's own rate would underestimate Muon."""
    _, variant = variants_of(vit_digits(), {"muon": muon})
    tuned = variant.at_rate(4.0).optimizer
    assert tuned == replace(muon, lr=8e-3, adamw_lr=muon.adamw_lr and 4e-3)


def test_optimizers_of_one_variant_do_not_replace_each_other() -> None:
    for changes in (["lion", Muon()], [Muon(), "lion"], [Muon, Lion]):
        _, both = variants_of(vit_digits(), {"both": changes})
        assert {"optimizers.lion", "optimizers.muon"} < {*names(both)}


def test_technique_object_replaces_the_recipes_technique() -> None:
    _, variant = variants_of(vit_digits(), {"slower": AdamW(lr=1e-4)})
    assert variant.optimizer == AdamW(lr=1e-4) and names(variant).count("optimizers.adamw") == 1
