"""Old names of techniques: readers of run folders, recipes and results resolve them."""

NEW_NAMES = {
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
"""Old name -> name of today."""
_OLD_NAMES = {new: old for old, new in NEW_NAMES.items()}


def order_key(name: str) -> str:
    """Return the key that orders techniques of one stage: their first name, so that a rename changes no run."""
    return _OLD_NAMES.get(name, name)
