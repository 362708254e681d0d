"""Customary names of techniques, in addition to full names and to last parts of names that occur once."""

from collections.abc import Mapping
from typing import Any

CUSTOMARY_NAMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "1f1b": ("parallelism.pipeline", {"schedule": "1f1b"}),
    "2:4": ("sparsity.n_of_m", {"n": 2, "m": 4}),
    "accumulate": ("large_batch.gradient_accumulation", {}),
    "activation_checkpointing": ("memory.recompute", {}),
    "activation_offloading": ("memory.offload_activations", {}),
    "actnn": ("memory.compress_activations", {}),
    "adam8bit": ("precision.optimizer_state", {"format": "int8"}),
    "albert": ("memory.share_parameters", {}),
    "amp": ("precision.mixed", {}),
    "autocast": ("precision.mixed", {}),
    "bf16": ("precision.mixed", {"format": "bfloat16"}),
    "bigbird": ("attention.block_sparse", {}),
    "bitfit": ("adapters.bias_only", {}),
    "data_parallel": ("parallelism.replicate", {}),
    "ddp": ("parallelism.replicate", {}),
    "efficienttrain": ("curriculum.low_frequency", {}),
    "flash": ("attention.tiled", {}),
    "flash_attention": ("attention.tiled", {}),
    "fp16": ("precision.mixed", {"format": "float16"}),
    "fp8": ("precision.float8", {}),
    "fsdp": ("parallelism.shard", {}),
    "gpipe": ("parallelism.pipeline", {"schedule": "gpipe"}),
    "grad_cache": ("large_batch.gradient_cache", {}),
    "gradient_checkpointing": ("memory.recompute", {}),
    "gradient_clipping": ("gradients.clip", {}),
    "lawa": ("averaging.latest", {}),
    "linear_probing": ("adapters.head_only", {}),
    "llrd": ("optimizers.layerwise_lr_decay", {}),
    "mixed_precision": ("precision.mixed", {}),
    "pipeline_parallel": ("parallelism.pipeline", {}),
    "rotor": ("memory.optimal_recompute", {}),
    "rslora": ("adapters.lora", {"rank_stabilized": True}),
    "sequence_parallel": ("parallelism.tensor", {"sequence_parallel": True}),
    "tensor_parallel": ("parallelism.tensor", {}),
    "torch_compile": ("compile", {}),
    "vpt": ("adapters.visual_prompt", {}),
    "wsd": ("schedules.constant_then_decay", {}),
    "zero": ("parallelism.shard", {}),
    "zero1": ("parallelism.shard", {"zero": 1}),
    "zero2": ("parallelism.shard", {"zero": 2}),
    "zero3": ("parallelism.shard", {"zero": 3}),
    "zero_offload": ("memory.offload_optimizer", {}),
}
"""Customary name -> the technique, and the settings that the name implies."""
RELATED: Mapping[str, tuple[str, ...]] = {
    "checkpointing": ("memory.recompute", "memory.optimal_recompute"),
    "offload": ("memory.offload_activations", "memory.offload_optimizer"),
    "pruning": ("sparsity.gradual", "data_selection.prune"),
    "swa": ("averaging.latest", "averaging.ema"),
}
"""Customary names of which no technique here is the one that is meant, or of which several could be."""
