"""Options of Thrifty for settings of other trainers, such as `per_device_train_batch_size`."""

PEER_OPTIONS = {
    "--lr 1e-3": ("lr", "learning_rate"),
    "--lr 1e-3, or --with adamw:weight_decay=0.1": ("optim", "optimizer"),
    "--batch 32": ("batch", "batch_size", "train_batch_size", "per_device_train_batch_size", "global_batch_size"),
    "--epochs 3": ("epochs", "num_epochs", "num_train_epochs", "max_epochs"),
    "--budget 500steps": ("steps", "max_steps", "num_steps", "train_steps", "iterations", "max_iters"),
    "--budget 10min": ("time", "max_time", "minutes", "hours", "duration"),
    "--set data.length=256": ("length", "max_length", "max_seq_length", "seq_len", "block_size", "context_length"),
    "--name mine": ("output", "output_dir", "run_name", "out_dir"),
    "--model llama-nano": ("model_name", "model_name_or_path", "pretrained", "base_model"),
    "--data my.txt": ("dataset", "dataset_name", "dataset_path", "train_file", "train_data", "file"),
    "--set evaluation.every=100": ("eval_steps", "eval_every", "eval_interval", "evaluation_strategy", "eval_strategy"),
    "--set checkpoints.every=200": ("save_steps", "save_every", "save_interval", "save_strategy"),
    "--set checkpoints.keep=2": ("save_total_limit",),
    "--patience 3": ("patience", "early_stopping", "early_stopping_patience"),
    "--with mixed": ("fp16", "bf16", "amp", "precision", "mixed_precision", "torch_dtype"),
    "--with recompute": ("gradient_checkpointing", "activation_checkpointing"),
    "--with gradient_accumulation:micro_batches=4": ("gradient_accumulation_steps", "accumulate_grad_batches"),
    "--with clip:max_norm=1.0": ("max_grad_norm", "gradient_clip_val"),
    "--with adamw:weight_decay=0.1": ("weight_decay",),
    "--with lora": ("lora", "peft", "lora_r", "lora_rank", "lora_alpha", "use_peft"),
    "--with schedules.cosine": ("lr_scheduler_type", "scheduler", "lr_scheduler", "schedule"),
    "--with schedules.cosine:warmup=0.05": ("warmup", "warmup_steps", "warmup_ratio"),
    "--device cuda": ("gpu", "gpus", "use_cuda"),
    "--device cpu": ("no_cuda", "use_cpu"),
    "--ranks 2": ("nproc_per_node", "num_processes", "world_size", "devices"),
}
"""Names in other trainers by the option that sets the same value."""
_OPTION_OF = {name: option for option, names in PEER_OPTIONS.items() for name in names}


def peer_option(name: str) -> str:
    """Return the option for the name of a setting in another trainer, such as `--learning-rate`; "" if unknown."""
    return _OPTION_OF.get(name.lstrip("-").replace("-", "_").lower(), "")
