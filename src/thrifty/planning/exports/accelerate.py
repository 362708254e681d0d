"""Accelerate configuration, as read by `accelerate launch --config_file`."""

import json
from collections.abc import Mapping
from typing import Any

from thrifty.core.file_names import comment_lines
from thrifty.planning.exports.portable_recipe import PortableRecipe

DTYPES = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


def configuration(run: PortableRecipe) -> str:
    """Return Accelerate's configuration as YAML. Raises RefusedError for mesh axes that this configuration lacks.

    Other settings that the configuration lacks (batch, micro-batches, optimizer) are in comments at the top.
    """
    run.refuse_other_axes("accelerate")
    on_processor = run.device == "cpu"
    sharded = run.zero > 0
    kind = "FSDP" if sharded else "NO" if run.ranks == 1 else "MULTI_CPU" if on_processor else "MULTI_GPU"
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": DTYPES[run.dtype],
        "num_machines": 1,
        "num_processes": run.ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": on_processor,
        "debug": False,
    }
    if run.compiled:
        values["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"}
    if sharded:
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": run.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": run.recompute != "none",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    clipped = f", max_grad_norm {run.clip:g}" if run.clip else ""
    checkpointing = " and gradient checkpointing of the model" if run.recompute != "none" and not sharded else ""
    comments = [
        f"{run.name}: {run.batch // run.data_ranks // run.parts} examples per micro-batch; in your script "
        f"Accelerator(gradient_accumulation_steps={run.parts}){clipped}{checkpointing}",
        *run.notes(),
    ]
    return comment_lines(comments) + yaml(values)


def yaml(values: Mapping[str, Any], indent: str = "") -> str:
    """Return nested tables of scalars as YAML. Scalars are written as JSON, which is valid YAML."""
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name}:\n{yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}\n")
    return "".join(lines)
