"""A plan written for other trainers: what a script needs beside it, from the plan's own model and data."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thrifty.planning.exports.portable_recipe import PortableRecipe
    from thrifty.planning.planner import Plan
    from thrifty.training.run_setup import PreparedRun


def write_exports(names: tuple[str, ...], plan: "Plan", out: Path) -> list[Path]:
    """Writes what is asked for beside the plan's recipe; the paths. Raises RefusedError where it cannot be said
    there."""
    from thrifty.planning.exports import write_configuration
    from thrifty.planning.exports.portable_recipe import PortableRecipe
    from thrifty.training.run_setup import prepare_run

    if not names:
        return []
    steps = max(int(plan.forecast.steps.value), 1)
    prepared = prepare_run(plan.recipe, steps=steps, quiet=True)
    run = PortableRecipe.of(plan.recipe, prepared.run.techniques, steps, prepared.run.device.type)
    configurations = [write_configuration(name, run, out) for name in names if name != "script"]
    return configurations + ([_write_script(prepared, run, out)] if "script" in names else [])


def _write_script(prepared: "PreparedRun", run: "PortableRecipe", out: Path) -> Path:
    """A folder with the program, its model's first weights and the tokens."""
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
            f"script: {prepared.recipe.objective.name} on {prepared.recipe.data.source} is not plain text read forward",
            fix="leave --export script out; the other exports work",
        )
    folder = out.with_name(f"{out.stem}-script")
    if folder.exists():
        raise RefusedError(f"{folder} is there already", fix="remove it, or give --out another name")
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
