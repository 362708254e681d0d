"""Tensor and pipeline parallelism: partition, stages, communication between stages, fake ranks."""
