"""Configuration in the style of torchtitan: TOML tables for one of torchtitan's models."""

import tomli_w

from thrifty.core.file_names import comment_lines
from thrifty.planning.exports.portable_recipe import PortableRecipe

RECOMPUTE_MODES = {"none": "none", "every": "full", "selective": "selective"}


def configuration(run: PortableRecipe) -> str:
    """Return TOML with the keys of torchtitan's job files. The user must set `model` to a model of torchtitan. Raises
    RefusedError for optimizers other than AdamW."""
    run.refuse_other_optimizers("torchtitan")
    values = {
        "job": {"description": run.name},
        "model": {"name": "llama3", "flavor": "TO BE FILLED IN"},
        "optimizer": {
            "name": "AdamW", "lr": run.lr, "beta1": run.betas[0], "beta2": run.betas[1], "eps": run.eps,
            "weight_decay": run.weight_decay,
        },
        "lr_scheduler": {
            "warmup_steps": run.warmup,
            "decay_ratio": (run.until - run.warmup) / max(run.steps, 1),
            "decay_type": run.schedule if run.schedule != "constant" else "linear",
            "min_lr_factor": run.floor if run.schedule != "constant" else 1.0,
        },
        "training": {
            "local_batch_size": run.batch // run.data_ranks // run.parts,
            "global_batch_size": run.batch,
            "seq_len": run.length,
            "steps": run.steps,
            "seed": run.seed,
            "mixed_precision_param": run.dtype,
            "mixed_precision_reduce": "float32",
            **({"max_norm": run.clip} if run.clip else {}),
        },
        "parallelism": {
            "data_parallel_replicate_degree": run.mesh.get("replicate", 1),
            "data_parallel_shard_degree": run.mesh.get("shard", 1),
            "tensor_parallel_degree": run.mesh.get("tensor", 1),
            "pipeline_parallel_degree": run.mesh.get("pipeline", 1),
            **({"fsdp_reshard_after_forward": "always" if run.zero == 3 else "never"} if run.zero else {}),
        },
        "activation_checkpoint": {"mode": RECOMPUTE_MODES[run.recompute]},
        "compile": {"enable": run.compiled},
    }  # fmt: skip
    return comment_lines(run.notes()) + tomli_w.dumps(values)
