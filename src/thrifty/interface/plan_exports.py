"""Plans exported as configurations of other trainers."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thrifty.core.recipe import Recipe
    from thrifty.planning.exports.portable_recipe import PortableRecipe
    from thrifty.training.run_setup import PreparedRun

SCRIPT = "script"


def export_recipe(recipe: "Recipe", steps: int, trainer: str, path: Path) -> Path:
    """Write a recipe for a number of steps as the configuration of another trainer, or as a folder with a "script".
    Return the file. Raise RefusedError if the format cannot express the recipe, or if the path exists.
    """
    from thrifty.core.errors import RefusedError, refuse_unknown
    from thrifty.planning.exports import CONFIGURATIONS
    from thrifty.planning.exports.portable_recipe import PortableRecipe
    from thrifty.training.run_setup import prepare_run

    refuse_unknown("there is no export to", trainer, [*CONFIGURATIONS, SCRIPT])
    if path.exists():
        raise RefusedError(f"{str(path)!r} exists already", fix=f"remove {str(path)!r}; or another --out")
    prepared = prepare_run(recipe, steps=steps, quiet=True)
    run = PortableRecipe.of(recipe, prepared.run.techniques, steps, prepared.run.device.type)
    if trainer == SCRIPT:
        return _write_script(prepared, run, path)
    path.write_text(CONFIGURATIONS[trainer][1](run), encoding="utf-8")
    return path


def export_path(trainer: str, plan: Path) -> Path:
    """Return the path for an export of a plan file, such as `plan-accelerate.yaml` for plan.toml."""
    from thrifty.planning.exports import CONFIGURATIONS

    return plan.with_name(f"{plan.stem}-{SCRIPT if trainer == SCRIPT else CONFIGURATIONS[trainer][0]}")


def _write_script(prepared: "PreparedRun", run: "PortableRecipe", folder: Path) -> Path:
    """Write a folder that contains the training script, the initial weights and the tokens."""
    import inspect

    import numpy as np

    from thrifty.core.errors import RefusedError
    from thrifty.data.text.token_windows import PackedTokens
    from thrifty.kernels import keyed_permutation
    from thrifty.models import export_model, shape_for
    from thrifty.planning.exports.pytorch_script import script

    source = prepared.run.plain.source
    if prepared.recipe.objective.name != "next_token" or not isinstance(source, PackedTokens):
        raise RefusedError(
            f"a script needs next_token on text, not {prepared.recipe.objective.name} on {prepared.recipe.data.source}",
            fix="remove --export script; the other exports work",
        )
    functions = (
        keyed_permutation._round_keys,
        keyed_permutation._feistel,
        keyed_permutation.mix_bits,
        keyed_permutation.permute,
    )
    ordering = "\n\n".join(["import hashlib", *(inspect.getsource(function) for function in functions)])
    text = script(run, ordering.replace("ROUNDS", str(keyed_permutation.ROUNDS)), f"{folder.name}/train.py")
    folder.mkdir(parents=True)
    ends = prepared.data.ends
    export_model(prepared.run.plain.build(), shape_for(ends, prepared.recipe.model), folder / "model")
    np.save(folder / "tokens.npy", source.windows.tokens)
    (folder / "train.py").write_text(text, encoding="utf-8")
    return folder / "train.py"
