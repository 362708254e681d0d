"""`thrifty explain --mesh` says, in one process, what real ranks state and hold."""

import heapq
import json
from pathlib import Path

import pytest
from mesh_runs import recipe, stated_and_held
from rank_processes import on_ranks
from table_samples import sample_of

import thrifty
from thrifty.core.errors import UsageError
from thrifty.interface.explanation import RecipeExplanation
from thrifty.recipes.recipe_layers import RecipeLayers

TWO = ("tensor=2", "pipeline=2", "replicate=2", "shard=2")
FOUR = ("pipeline=2,tensor=2", "pipeline=2,shard=2", "tensor=2,replicate=2")


def explained(layers: RecipeLayers) -> RecipeExplanation:
    return thrifty.explain(layers.recipe(), origins=layers.changed())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mesh") / "my.txt"
    path.write_text(Path(heapq.__file__).read_text())
    return path


@pytest.mark.parametrize(("ranks", "meshes"), [(2, sample_of(TWO, 1)), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_one_process_prints_the_content_of_each_rank(
    text: Path, tmp_path: Path, ranks: int, meshes: tuple[str, ...]
) -> None:
    found = on_ranks(ranks, stated_and_held, text, tmp_path, meshes)
    for number, axes in enumerate(meshes):
        said = json.loads(json.dumps(explained(recipe(text, "said", axes)).as_dict()))
        stated = found[0][number][0]
        for part in ("parameters", "plain", "footprint", "techniques"):
            assert said[part] == stated[part], axes
        assert said["footprint"]["traffic"] > 0
        assert [rank for stage in said["stages"] for rank in stage["ranks"]] == [*range(ranks)]
        for stage in said["stages"]:
            (place, first), *others = [found[rank][number][1:] for rank in stage["ranks"]]
            assert {name: stage[name] for name in first} == first, axes
            for other, held in others:
                assert other["pipeline"] == place["pipeline"]
                assert all(held[name] <= first[name] for name in held), axes


@pytest.mark.slow
def test_a_mesh_of_three_axes_is_explained_by_stage(text: Path) -> None:
    found = explained(recipe(text, "said", "pipeline=2,tensor=2,shard=2"))
    stages = found.ranks["stages"]
    assert [stage["notes"]["parallelism.pipeline"][0][-7:] for stage in stages] == ["stage 0", "stage 1"]
    assert found.refused == {} and found.exit_code == 0
    told = str(found)
    assert "each of the ranks of pipeline 2 x shard 2 x tensor 2 sends" in told
    assert "  ranks 0 to 3: parameters " in told and "  ranks 4 to 7: parameters " in told


def test_an_axis_that_no_technique_uses_is_refused(text: Path) -> None:
    layers = recipe(text, "said", "tensor=2")
    layers.apply_changes(("parallelism.tensor",), (), ())
    with pytest.raises(UsageError, match="there are 2 ranks, but no technique of the recipe divides the work"):
        explained(layers)


def test_techniques_refused_on_a_stage_are_named(text: Path) -> None:
    layers = recipe(text, "said", "pipeline=2")
    layers.apply_changes((), (), ("techniques.parallelism.pipeline.micro_batches=1",))
    found = explained(layers).as_dict()
    assert "1f1b requires at least as many micro-batches as stages" in found["refused"]["parallelism.pipeline"]
    assert "parallelism.pipeline" not in [row["name"] for row in found["techniques"]]


def test_refusals_are_first_and_set_the_exit_code(text: Path) -> None:
    layers = recipe(text, "said", "pipeline=2")
    layers.apply_changes((), (), ("techniques.parallelism.pipeline.micro_batches=1",))
    found = explained(layers)
    told = str(found)
    assert found.exit_code == 2 and told.index("refused parallelism.pipeline") < told.index("plain run")
