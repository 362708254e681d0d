"""Names that were renamed, and readers of what was written under them.

Only what a program wrote is read so: run folders, checkpoints, and results. A recipe or an option that a person wrote
must bear the names of today; `renamed` is the hint for one that does not.
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
"""Old name -> name of today, as are all of these."""
SETTINGS: Mapping[str, Mapping[str, str]] = {
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
"""Of techniques, by the technique's name of today."""
SECTIONS: Mapping[str, Mapping[str, str]] = {
    "model": {"fresh": "reinitialize"},
    "checkpoints": {"also": "extra_steps"},
}
"""Of a recipe's sections."""
OBJECTIVES = {
    "answer": "chat_answers",
    "classify": "classification",
    "contrast": "contrastive",
    "reconstruct": "masked_reconstruction",
}
VALUES = {("parallelism.shard", "gather_dtype", "as kept"): "parameter"}
_FIRST_NAMES = {new: old for old, new in TECHNIQUES.items()}


def order_key(name: str) -> str:
    """Return the key that orders techniques of one stage: their first name, so that a rename changes no run."""
    return _FIRST_NAMES.get(name, name)


def renamed(path: str) -> str | None:
    """Return a hint if a recipe's key, such as `techniques.gradients.clip.largest`, is the old name of another."""
    table, _, key = path.rpartition(".")
    new = SETTINGS.get(table.removeprefix("techniques."), SECTIONS.get(table, {})).get(key)
    return new and f"did you mean {new!r}?"


def today(technique: str) -> str:
    return TECHNIQUES.get(technique, technique)


def settings_today(technique: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a technique's settings as they are called today; `technique` may be an old name."""
    name = today(technique)
    keys = SETTINGS.get(name, {})
    renamed_settings = {keys.get(key, key): value for key, value in settings.items()}
    return {
        key: VALUES.get((name, key, value), value) if isinstance(value, str) else value
        for key, value in renamed_settings.items()
    }


def recipe_today(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a stored recipe as they are written today."""
    tables = dict(recipe)
    for section, keys in SECTIONS.items():
        if isinstance(table := recipe.get(section), Mapping):
            tables[section] = {keys.get(key, key): value for key, value in table.items()}
    if isinstance(objective := recipe.get("objective"), Mapping):
        name = objective.get("name")
        tables["objective"] = {**objective, "name": OBJECTIVES.get(name, name)} if name else objective
    if isinstance(techniques := recipe.get("techniques"), Mapping):
        tables["techniques"] = _techniques_today(techniques)
    return tables


def _techniques_today(techniques: Mapping[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for group, members in techniques.items():
        if not (isinstance(members, Mapping) and members and all(isinstance(m, Mapping) for m in members.values())):
            tables[group] = members  # a technique without a group, such as compile
            continue
        for name, settings in members.items():
            new_group, _, new_name = today(f"{group}.{name}").partition(".")
            tables.setdefault(new_group, {})[new_name] = settings_today(f"{group}.{name}", settings)
    return tables


def path_today(path: str) -> str:
    """Return a dotted path into a recipe as it is written today."""
    table, _, key = path.rpartition(".")
    if table in SECTIONS:
        return f"{table}.{SECTIONS[table].get(key, key)}"
    if not table.startswith("techniques."):
        return path
    name = today(table.removeprefix("techniques."))
    return f"techniques.{name}.{SETTINGS.get(name, {}).get(key, key)}"


def tensor_today(name: str) -> str:
    """Return the name of a checkpoint's tensor; what a technique remembers is kept under the technique's name."""
    kind, _, rest = name.partition("/")
    technique, slash, tensor = rest.partition("/")
    return f"techniques/{today(technique)}{slash}{tensor}" if kind == "techniques" else name


def record_today(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record, or an entry of a log, that may name a technique."""
    return {**record, "technique": today(str(record["technique"]))} if "technique" in record else dict(record)


def scalars_today(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scalars of a checkpoint: its log and its recipe name techniques."""
    scalars = dict(scalars)
    if "log" in scalars:
        scalars["log"] = [record_today(entry) for entry in scalars["log"]]
    if "recipe" in scalars:
        scalars["recipe"] = recipe_today(scalars["recipe"])
    return scalars


def run_file_today(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run folder keeps as NAME.json."""
    if name == "origins":
        return {path_today(path): origin for path, origin in data.items()}
    if name == "explanation" and isinstance(data.get("techniques"), list):
        return {**data, "techniques": [_explained_today(entry) for entry in data["techniques"]]}
    return dict(data)


def _explained_today(entry: Any) -> Any:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        return entry
    settings = entry.get("settings")
    told = {"settings": settings_today(entry["name"], settings)} if isinstance(settings, Mapping) else {}
    return {**entry, "name": today(entry["name"]), **told}


def comparison_today(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a comparison.json: the recipes of its definition, and the techniques that its arms change."""
    definition = data["definition"]
    arms = {label: recipe_today(recipe) for label, recipe in definition["arms"].items()}
    changes = {
        label: {role: [today(name) for name in names] for role, names in roles.items()}
        for label, roles in data["changes"].items()
    }
    return {**data, "definition": {**definition, "arms": arms}, "changes": changes}


def cases_today(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cases of a study's definition; those of `attention_filters` hold settings of techniques."""
    return {
        label: {**case, "settings": settings_today("attention.block_sparse", case["settings"])}
        if case.get("method") == "block-sparse"
        else case
        for label, case in cases.items()
    }
