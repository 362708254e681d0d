"""DeepSpeed configuration, as read by `deepspeed.initialize(config=…)`."""

from typing import Any

from thrifty.core.errors import RefusedError
from thrifty.planning.exports.portable_recipe import PortableRecipe


def configuration(run: PortableRecipe) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    Raises RefusedError for optimizers other than AdamW, for mesh axes that this configuration lacks, and if
    micro-batches do not have equal size, which DeepSpeed requires.
    """
    run.refuse_other_optimizers("deepspeed")
    run.refuse_other_axes("deepspeed")
    pieces = run.data_ranks * run.parts
    if run.batch % pieces:
        raise RefusedError(
            f"deepspeed: an effective batch of {run.batch} does not divide into {pieces} equal parts",
            fix=f"--set data.batch={run.batch - run.batch % pieces or pieces}",
        )
    stage = run.zero or int(run.offload_optimizer)
    adamw = {"lr": run.lr, "betas": [*run.betas], "eps": run.eps, "weight_decay": run.weight_decay}
    values: dict[str, Any] = {
        "train_batch_size": run.batch,
        "train_micro_batch_size_per_gpu": run.batch // pieces,
        "gradient_accumulation_steps": run.parts,
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": {"stage": stage},
        # DeepSpeed clips at 1 by default
        "gradient_clipping": run.clip or 0.0,
        "bf16": {"enabled": run.dtype == "bfloat16"},
        "fp16": {"enabled": run.dtype == "float16"},
    }
    if run.offload_optimizer:
        values["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": run.device != "cpu"}
    if run.schedule != "constant":
        values["scheduler"] = _schedule(run)
    if run.recompute != "none":
        values["activation_checkpointing"] = {"partition_activations": False, "contiguous_memory_optimization": False}
    return values


def _schedule(run: PortableRecipe) -> dict[str, Any]:
    if run.schedule == "cosine":
        shape = {"warmup_num_steps": run.warmup, "total_num_steps": run.until, "cos_min_ratio": run.floor}
        # DeepSpeed's warm-up is logarithmic by default
        return {"type": "WarmupCosineLR", "params": shape | {"warmup_min_ratio": 0.0, "warmup_type": "linear"}}
    shape = {"warmup_min_lr": 0.0, "warmup_max_lr": run.lr, "warmup_num_steps": run.warmup, "warmup_type": "linear"}
    return {"type": "WarmupDecayLR", "params": shape | {"total_num_steps": run.until}}
