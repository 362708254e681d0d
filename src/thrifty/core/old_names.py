"""Names that stored files of earlier versions use, and the names of today.

Readers of run folders, stored recipes and results rename what they read. Everything else knows today's names only; an
old name that somebody types is answered with the new one.
"""

from collections.abc import Mapping
from typing import Any

TECHNIQUES = {
    "large_batch.exponential_average": "averaging.ema",
    "large_batch.latest_weight_average": "averaging.latest",
    "large_batch.noise_scale": "measure.noise_scale",
    "large_batch.accumulate": "large_batch.gradient_accumulation",
    "optimizers.clip": "gradients.clip",
    "optimizers.layer_decay": "optimizers.layerwise_lr_decay",
    "growth.resolution": "curriculum.resolution",
    "growth.patch_size": "curriculum.patch_size",
    "growth.sequence_length": "curriculum.sequence_length",
    "growth.low_frequency": "curriculum.low_frequency",
    "sparsity.ticket": "sparsity.mask_from_file",
    "adapters.intrinsic": "adapters.intrinsic_dimension",
    "adapters.prefix": "adapters.prefix_tuning",
    "adapters.prompt": "adapters.prompt_tuning",
    "parallelism.share_parameters": "memory.share_parameters",
}
SETTINGS = {
    "adapters.lora": {"stabilised": "rank_stabilized"},
    "adapters.prompt_tuning": {"start": "initialization"},
    "attention.block_sparse": {"near": "window_blocks", "first": "global_blocks", "drawn": "random_blocks"},
    "attention.spatten": {"latest": "recent_fraction"},
    "attention.vitcod": {"code": "autoencoder"},
    "attention.window": {"first": "global_tokens"},
    "averaging.ema": {"judge": "evaluate", "beginning": "ramp"},
    "averaging.latest": {"judge": "evaluate"},
    "curriculum.low_frequency": {"shares": "fractions"},
    "data_selection.gradient_norm_sampling": {"times": "presample", "at_once": "scoring_batch"},
    "data_selection.prune": {"floor": "min_class_share", "offset": "drop_hardest", "abundant": "abundant_from"},
    "gradients.clip": {"largest": "max_norm"},
    "growth.auto_grow": {"times": "time_source"},
    "growth.layer_drop": {"settle": "time_constant", "spare_first": "keep_first_block"},
    "initializations.layer_scale": {"start": "initial_value"},
    "initializations.skip_init": {"start": "initial_value"},
    "large_batch.gradient_accumulation": {"parts": "micro_batches"},
    "large_batch.gradient_cache": {"parts": "micro_batches"},
    "memory.activation_budget": {"costs": "cost_source"},
    "memory.compress_activations": {"smallest": "min_elements"},
    "memory.offload_activations": {"smallest": "min_elements", "ahead": "prefetch"},
    "memory.optimal_recompute": {"costs": "cost_source"},
    "optimizers.adafactor": {"least_root": "eps1", "least_size": "eps2", "clip": "clip_threshold"},
    "optimizers.lamb": {"correct": "bias_correction"},
    "optimizers.lars": {"coefficient": "trust_coefficient", "rate": "learning_rate_placement"},
    "optimizers.layerwise_lr_decay": {"front": "embedding_pattern"},
    "optimizers.muon": {
        "steps": "newton_schulz_steps",
        "rest_lr": "adamw_lr",
        "rest_betas": "adamw_betas",
        "rest_eps": "adamw_eps",
    },
    "optimizers.soap": {"largest": "max_dim"},
    "parallelism.pipeline": {"parts": "micro_batches", "costs": "cost_source"},
    "parallelism.shard": {"gathered": "gather_dtype"},
    "parallelism.tensor": {"along_tokens": "sequence_parallel"},
    "precision.float8": {"keep_ends": "skip_end_blocks"},
    "precision.optimizer_state": {"smallest": "min_elements"},
    "sparsity.early_bird": {"draw": "criterion"},
    "sparsity.gradual": {"initial": "initial_density"},
    "sparsity.sparse_products": {"costs": "cost_source"},
    "sparsity.static": {"by": "criterion"},
}
"""Of each technique, by its name of today."""
VALUES = {("parallelism.shard", "gather_dtype"): {"as kept": "parameter"}}
OBJECTIVES = {
    "answer": "chat_answers",
    "classify": "classification",
    "contrast": "contrastive",
    "reconstruct": "masked_reconstruction",
}
RECIPE_KEYS = {"model": {"fresh": "reinitialize"}, "checkpoints": {"also": "extra_steps"}}

_OLD_TECHNIQUES = {new: old for old, new in TECHNIQUES.items()}


def order_key(name: str) -> str:
    """Return the key that orders techniques of one stage: their first name, so that a rename changes no run."""
    return _OLD_TECHNIQUES.get(name, name)


def new_key(path: str) -> str:
    """Return the last part of a recipe's dotted path, by its name of today."""
    table, _, key = path.rpartition(".")
    keys = SETTINGS.get(table.removeprefix("techniques."), {}) | RECIPE_KEYS.get(table, {})
    return keys.get(key, key)


def rename_path(path: str) -> str:
    """Rename a dotted path of a stored recipe, such as `techniques.optimizers.clip.largest`."""
    for old, new in TECHNIQUES.items():
        if f"{path}.".startswith(f"techniques.{old}."):
            path = f"techniques.{new}{path.removeprefix(f'techniques.{old}')}"
            break
    table, dot, _ = path.rpartition(".")
    return table + dot + new_key(path)


def rename_origins(origins: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the paths of recipe values, each with where it came from."""
    return {rename_path(path): origin for path, origin in origins.items()}


def rename_tensor(name: str) -> str:
    """Rename a tensor of a checkpoint: `techniques/NAME/…` bears the name of its technique."""
    kind, _, rest = name.partition("/")
    technique, slash, tensor = rest.partition("/")
    return f"techniques/{_today(technique)}{slash}{tensor}" if kind == "techniques" else name


def rename_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the recipe and the techniques of the log in the scalars of a checkpoint."""
    renamed = dict(scalars)
    if "recipe" in scalars:
        renamed["recipe"] = rename_recipe(scalars["recipe"])
    if "log" in scalars:
        renamed["log"] = [{**entry, "technique": _today(entry["technique"])} for entry in scalars["log"]]
    return renamed


def rename_techniques(value: Any) -> Any:
    """Rename every text, and every key, of a stored JSON value that is the name of a technique and nothing more."""
    if isinstance(value, Mapping):
        return {TECHNIQUES.get(key, key): rename_techniques(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rename_techniques(inner) for inner in value]
    return TECHNIQUES.get(value, value) if isinstance(value, str) else value


def rename_comparison(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rename techniques, and what the recipes hold, in a stored comparison; labels stay as they were given."""
    changes = {label: rename_techniques(roles) for label, roles in data.get("changes", {}).items()}
    renamed = {**data, "changes": changes}
    if isinstance(arms := data.get("definition", {}).get("arms"), Mapping):
        recipes = {label: rename_recipe(recipe) for label, recipe in arms.items()}
        renamed["definition"] = {**data["definition"], "arms": recipes}
    return renamed


def rename_recipe(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Rename techniques, settings, keys and the objective in the tables of a stored recipe."""
    renamed = _copied(tables)
    for section, keys in RECIPE_KEYS.items():
        if section in renamed:
            renamed[section] = {keys.get(key, key): value for key, value in renamed[section].items()}
    objective = renamed.get("objective", {})
    if "name" in objective:
        objective["name"] = OBJECTIVES.get(objective["name"], objective["name"])
    groups = renamed.get("techniques", {})
    for old, new in TECHNIQUES.items():
        if (settings := _below(groups, old)) is not None:
            _take(groups, old)
            group, last = new.split(".")
            groups.setdefault(group, {})[last] = settings
    for name, keys in SETTINGS.items():
        settings = _below(groups, name)
        if settings is not None:
            group, last = name.split(".")
            groups[group][last] = {
                key: VALUES.get((name, key), {}).get(value, value) if isinstance(value, str) else value
                for key, value in ((keys.get(key, key), value) for key, value in settings.items())
            }
    return renamed


def _today(technique: str) -> str:
    return TECHNIQUES.get(technique, technique)


def _copied(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in tables.items()}


def _below(groups: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    group, last = name.split(".")
    found = groups.get(group, {})
    return found.get(last) if isinstance(found, dict) else None


def _take(groups: dict[str, Any], name: str) -> None:
    group, last = name.split(".")
    del groups[group][last]
    if not groups[group]:
        del groups[group]
